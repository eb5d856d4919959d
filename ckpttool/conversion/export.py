"""Export networks to ONNX."""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

import numpy as np

from ckpttool.conversion import receipt
from ckpttool.conversion.option_keywords import takes_options
from ckpttool.conversion.options import ExportOptions
from ckpttool.conversion.plan import ConversionResult
from ckpttool.conversion.targets import ONNX, name_target
from ckpttool.core import sidecar, urls
from ckpttool.core.atomic_write import Output, require_new, write_atomically
from ckpttool.core.errors import (
    EnvironmentMismatchError,
    FormatError,
    UnsupportedError,
    UsageError,
    suggest_networks,
)
from ckpttool.core.installation import require_package
from ckpttool.core.sidecar import LedgerEntries, Sidecar
from ckpttool.core.source import File
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, display
from ckpttool.evaluation import environments, restore
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import (
    ActionBounds,
    build_part_network,
    derive_network_settings,
    image_encoder,
    network_sizes,
    require_even_bounds,
    require_facts,
)
from ckpttool.evaluation.gymnasium_engine import EnvSpec
from ckpttool.evaluation.playing import (
    asks_environment,
    assume_choices,
    count_actions,
    environment_hint,
    read_action_bounds,
    take_means,
)
from ckpttool.evaluation.restore import Agent, restore_agent
from ckpttool.libraries import schema
from ckpttool.libraries.schema import VALUES, AgentNetwork, layer_widths
from ckpttool.mapping.rules import MappingEntry, MappingReport
from ckpttool.networks import numpy_backend
from ckpttool.networks.build import UNBOUNDED, NetworkSettings, policy_network
from ckpttool.networks.network import ArgMax, Dense, LayerNorm, Network, Observation
from ckpttool.verification.output_comparison import (
    OutputVerification,
    Parity,
    make_observations,
    measure_parity,
    run_network,
)
from ckpttool.version import __version__

# A statistic or bound that becomes constants of the arithmetic before or after the layers.
FOLDED = "folded"
_FACTS = ("obs_dim", "action_low", "action_high", "choices", "head", "activations")


def build_export_report(
    agent: Agent, part: AgentNetwork, facts: Sidecar, assumed: tuple[str, ...]
) -> MappingReport:
    """Report the exported entries, under their canonical names, with a note on the other entries.

    Entries of other networks and of training are not missing from an export, so none is unused.
    """
    tree, layers = agent.checkpoint.tree, _layer_places(part)
    front = image_encoder(agent, part.title)
    lines, used = [], set() if front is None else {move.source for move in front.moves}
    for move in agent.binding.moves.moves:
        rule = move.rule.name if move.target[:-1] in layers else FOLDED
        if part.program is None and rule == FOLDED and not _is_folded_leaf(move.target, agent, part, facts):
            continue
        before, after = tree[move.source], agent.tree.get(move.target)
        shape_in, shape_out = (leaf.shape if isinstance(leaf, Leaf) else () for leaf in (before, after))
        lines.append(MappingEntry(tree.names[move.source], display(move.target), rule, shape_in, shape_out))
        used.add(move.source)
    left = dict.fromkeys(
        str(move.target[0].value) for move in agent.binding.moves.moves if move.source not in used
    )
    stay = format_count(sum(path not in used for path in tree), "entry is", "entries are")
    stays = f"only {part.title} is exported; {stay} left out: {', '.join(left)}"
    return MappingReport(tuple(lines), assumed=assumed, notes=(*agent.notes, *([stays] if left else [])))


def _layer_places(part: AgentNetwork) -> tuple[Path, ...]:
    """Return the canonical path of every layer."""
    return tuple(
        schema.canonical_weight_path(chain, position, "kernel")[:-1]
        for chain in part.chains
        for position in range(len(chain.layers))
    )


def _is_folded_leaf(target: Path, agent: Agent, part: AgentNetwork, facts: Sidecar) -> bool:
    """Return whether a leaf holds statistics or an action map that the network's computation includes."""
    if not schema.mapped_by_sidecar(target):
        return False
    if target[0].value != schema.NORMALIZER:
        return part.acts
    size = len(facts.obs_norm["mean"]) if facts.obs_norm is not None else None
    return size is not None and (part.component not in VALUES or layer_widths(agent.tree, part)[0] == size)


def name_nodes(network: Network, part: AgentNetwork, agent: Tree) -> list[str]:
    """Return a name for each node: its layer's canonical path, or its position before or after the layers."""
    if part.program is not None:
        return [f"graph/{n}" for n in range(len(network.nodes))]
    dense = [n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense | LayerNorm)]
    constant = [n for n in dense if getattr(network.nodes[n].layer, "constant", False)]
    layers = [n for n in dense if n not in constant]
    # The first layers that other chains share are those of the network itself.
    places = [
        display(schema.canonical_weight_path(chain, position, "kernel")[:-1])
        for chain in part.chains
        for shared in [0 if chain is part else schema.count_shared_layers(agent, part, chain)]
        for position in range(shared, len(chain.layers))
        if chain.layers[position].kind != "batch_norm"  # no node is the whole of it
    ]
    # An encoder's layers come before.
    layers = layers[len(layers) - len(places) :]
    names = dict(zip(layers, places, strict=True))
    if part.state_value is not None:
        names |= dict.fromkeys(constant, "dueling")
    return [names.get(n) or f"{activation_place(n, layers)}/{n}" for n in range(len(network.nodes))]


def activation_place(number: int, layers: Sequence[int]) -> str:
    """Return whether a node is before, between or behind the layers, whose numbers are `layers`."""
    if number < layers[0]:
        return "obs"
    return "action" if number > layers[-1] else "hidden"


def build_metadata(record: Sidecar) -> dict[str, str]:
    """Return the metadata texts of the file, from its receipt.

    They contain no time and no folder, so that the same conversion gives the same file.
    """
    source, env = record.source or {}, record.env or {}
    known = {name: getattr(record, name) for name in _FACTS}
    recorded = {
        "tool": f"ckpttool {__version__}",
        "source": source.get("path"),
        **{f"source_{name}": source.get(name) for name in ("sha256", "format", "layout")},
        "network": source.get("network"),
        "env": env.get("id"),
        **{name: json.dumps(value) for name, value in known.items() if value is not None},
        "assumed": json.dumps(record.assumed),
        "provenance": json.dumps(dict(record.provenance), sort_keys=True),
    }
    return {name: value for name, value in recorded.items() if value is not None}


def derive_export_settings(
    agent: Agent, part: AgentNetwork, env: str | None, target: str, spec: EnvSpec | None = None
) -> tuple[NetworkSettings, Sidecar, LedgerEntries]:
    """Return the network settings, all known facts of the agent, and a ledger entry for each assumption.

    Args:
        agent: the agent; an environment's discrete actions are applied already.
        part: the network to export.
        env: the environment that is given, to record.
        target: the path of the export, for hints.
        spec: the environment's spaces; one is created if only its action space can supply the bounds.
    """
    known = agent.known
    bounded = known.action_low is not None and known.action_high is not None
    needed = part.acts and known.head not in UNBOUNDED and not bounded
    if spec is None and (needed or env is not None):
        spec = _environment_spec(agent, env, target)
    bounds = ActionBounds([-1.0] * network_sizes(agent)[1], [1.0] * network_sizes(agent)[1], None)
    if spec is not None and part.acts:
        bounds = read_action_bounds(agent, layer_widths(agent.tree, part), spec)
    wiring, assumed = derive_network_settings(agent, bounds)
    if part.acts:
        require_even_bounds(agent, wiring)
    facts = Sidecar("", **{name: getattr(known, name) for name in (*restore.FACTS, "obs_dim")})
    own = (known.network_activations or {}).get(part.component.removesuffix("_target"))
    facts = replace(facts, activations=own or known.activations, network_activations=None)
    facts = replace(facts, provenance=_fact_origins(known, facts))
    if needed and spec is not None:
        facts = _with_environment_bounds(facts, wiring, bounds)
    if spec is not None and env is not None:
        recorded = {"id": env, "gymnasium": spec.versions.get("gymnasium")}
        facts = replace(facts, env=recorded, provenance={**facts.provenance, "env": "given"})
    return wiring, facts, assumed


def _fact_origins(known: Sidecar, facts: Sidecar) -> dict[str, str]:
    """Return the recorded origins of the facts."""
    return {
        name: origin for name, origin in known.provenance.items() if getattr(facts, name, None) is not None
    }


def _environment_spec(agent: Agent, requested: str | None, target: str) -> EnvSpec:
    """Return the specification of the given environment, or of the one in the checkpoint's files."""
    known = (agent.known.env or {}).get("id")
    if requested is None and not known:
        hint = environment_hint(agent, ("convert", target, "--to", "onnx"), *network_sizes(agent))
        raise UsageError(
            "the checkpoint contains neither the action bounds nor the environment that defines them",
            file=agent.checkpoint.path,
            hint=f"add --bounds LOW HIGH, or {hint}" if hint.startswith("--env ") else hint,
        )
    # gymnasium imports the module before a colon; an id from a file must not trigger that.
    with environments.make_vector_env(requested or str(known), trusted=requested is not None) as env:
        return env.spec


def _with_environment_bounds(facts: Sidecar, wiring: NetworkSettings, bounds: ActionBounds) -> Sidecar:
    """Return the facts with the environment's bounds; raise EnvironmentMismatchError if it is unbounded."""
    low, high = list(wiring.action_low), list(wiring.action_high)
    if not np.isfinite([*low, *high]).all():
        raise EnvironmentMismatchError(
            f"{bounds.origin} is not bounded", expected=f"bounds for the action map {wiring.head}"
        )
    origins = dict.fromkeys(("action_low", "action_high"), f"assumed: {bounds.origin}")
    return replace(facts, action_low=low, action_high=high, provenance={**facts.provenance, **origins})


# A is NumPy here, not the framework that trained the agent. Of two correct float32 computations, one was 2.5
# times as far from float64 as the other (a critic of FetchReach; matrix products of onnxruntime and NumPy).
OWN_ERROR = 4.0
# Observations that an exported policy of images is compared on.
IMAGES = 100


@takes_options(ExportOptions)
def export(
    source: str,
    target: str,
    options: ExportOptions | None = None,
    *,
    network: str | None = None,
    env: str | None = None,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
) -> ConversionResult:
    """Write one network of the agent at `source` as an ONNX model, with its receipt beside it.

    In the result's `parity`, A is NumPy in float32 and B is the model, run by ONNX Runtime or the onnx
    package. Nothing is written on a dry run, or if the outputs of model and network differ by more than the
    tolerance of `verify`. Raise UsageError for a target with the suffix of another format, and if the
    checkpoint has no such network, or contains neither bounds nor an environment.

    Args:
        source: the agent's checkpoint: a file, prefix or folder.
        target: the path to write.
        options: what to export, and how; keywords replace its fields.

    >>> import ckpttool
    >>> ckpttool.export("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt", "actor.onnx", dry_run=True).written
    False
    """
    options = options or ExportOptions()
    if (name := name_target(target, ONNX)) != target:
        raise UsageError("an export is an ONNX file", file=target, hint=f"name the target {name}")
    if not options.dry_run:
        require_package("onnx", "exporting to ONNX requires onnx", "onnx")
    agent = restore_agent(source, options.layout, options.facts, options.network or "actor")
    title = agent.title(options.network or "actor")
    part = _choose_part(agent, title)
    created = options.env is not None or (part.acts and asks_environment(agent, None))
    spec = _environment_spec(agent, options.env, target) if created else None
    if part.acts and spec is not None:
        agent = assume_choices(agent, spec)
    else:
        agent = take_means(agent, *count_actions(agent, spec))
    stated = options.env or (agent.known.env or {}).get("id") or agent.known.action_low is not None
    require_facts(agent, needs_env=not stated)
    if not options.dry_run:
        for file in (target, sidecar.sidecar_path(target)):
            require_new(file, agent.checkpoint.files, force=options.force)
    wiring, recorded, assumed = derive_export_settings(agent, part, options.env, target, spec)
    done = ConversionResult(
        urls.display_url(agent.checkpoint.path),
        target,
        build_export_report(agent, part, recorded, sidecar.assumption_sentences(assumed)),
        ledger=sidecar.drop_known_bounds(sidecar.merge_entries(agent.ledger, assumed)),
        playable=True,
    )
    if options.dry_run:
        return done
    front = image_encoder(agent, title)
    built = build_part_network(agent, part, wiring, front)
    record = _receipt(agent, title, built, recorded, done.report)
    chooses = wiring.choices is not None and part.acts
    acting = policy_network(agent.tree, part, wiring, front) if chooses else built
    model = _encode_model(acting, part, agent.tree, record)
    parity, engine = _compare_outputs(agent, title, built, model)
    notes = (*done.report.notes, f"the exported model was run with {engine}")
    done = replace(done, report=replace(done.report, notes=notes), parity=(parity,))
    if not parity.within:
        return done
    sha256 = hashlib.sha256(model).hexdigest()
    record = replace(record, target_sha256=sha256, parity=OutputVerification((parity,)).entry())
    _write(target, model, record, agent.checkpoint.files, options)
    return replace(done, digest=sha256, written=True)


def _receipt(agent: Agent, title: str, network: Network, facts: Sidecar, report: MappingReport) -> Sidecar:
    own = (agent.sidecar.target_sha256 or None) if agent.sidecar is not None else None
    return replace(
        facts,
        source=receipt.describe_source(agent.checkpoint, agent.binding, own, network=title),
        rules=receipt.receipt_rules(report),
        assumed=report.assumed,
        # A critic may have more inputs than the policy, and images have no number of inputs.
        obs_dim=shape[0] if len(shape := network.input_shapes["obs"]) == 1 else None,
    )


def _encode_model(network: Network, part: AgentNetwork, agent: Tree, record: Sidecar) -> bytes:
    from ckpttool.networks.network_graph import network_graph
    from ckpttool.networks.onnx_export import encode_graph

    output = "action" if part.acts else "value"
    discrete = any(isinstance(node.layer, ArgMax) for node in network.nodes)
    scores = ("q_values" if part.chooses else "logits") if discrete else None
    names = name_nodes(network, part, agent)
    return encode_graph(network_graph(network, names, output, scores), build_metadata(record))


def _compare_outputs(agent: Agent, title: str, network: Network, model: bytes) -> tuple[Parity, str]:
    """Compare the model's outputs with the network's; return the result and the engine that ran the model."""
    from ckpttool.networks import onnx_backend

    obs = _make_inputs(network)
    expected = run_network(numpy_backend.build(network), obs)
    if not np.isfinite(expected).all():
        raise UnsupportedError(
            f"{title} outputs NaN or infinite values, which cannot be compared", file=agent.checkpoint.path
        )
    outputs = onnx_backend.run_model(model, obs if isinstance(obs, Mapping) else {network.inputs[0][0]: obs})
    return measure_parity(title, network, obs, (expected, outputs), own=OWN_ERROR), onnx_backend.onnx_engine()


def _make_inputs(network: Network) -> Observation:
    """Return inputs to compare with: bytes of images, which are slow, else those of `verify`."""
    shapes = [*network.input_shapes.values()]
    if all(len(shape) < 2 for shape in shapes):
        return make_observations(network)
    observations = np.asarray(make_observations(network, IMAGES))
    pixels: np.ndarray = np.clip(np.rint(abs(observations) * 128), 0, 255)
    return pixels


def _choose_part(agent: Agent, title: str) -> AgentNetwork:
    part = agent.runnable(title) if image_encoder(agent, title) is None else agent.playable(title)
    if part is None:
        raise UsageError(
            f"no network named {title} in the checkpoint",
            file=agent.checkpoint.path,
            hint=suggest_networks(
                part.title for part in agent.binding.parts if agent.runnable(part.title) is not None
            ),
        )
    if part.program is not None and part.program.states:
        raise UnsupportedError(
            f"{title} has recurrent states: it can only be played",
            file=agent.checkpoint.path,
            found=", ".join(part.program.states),
        )
    return part


def _write(
    target: str, model: bytes, metadata: Sidecar, sources: tuple[File, ...], options: ExportOptions
) -> None:
    def check(written: str) -> None:
        with open(written, "rb") as stream:
            if stream.read() != model:
                raise FormatError("the data read back differs from the data written", file=target)

    outputs = (
        Output(target, lambda stream: _write_model(stream, model), check, nbytes=len(model)),
        Output(
            sidecar.sidecar_path(target), lambda stream: _write_model(stream, metadata.encode()), follows=True
        ),
    )
    write_atomically(outputs, force=options.force, sync=options.sync, sources=sources)


def _write_model(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
