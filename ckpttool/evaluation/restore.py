"""Restore an agent."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ckpttool.core import filesystem, plugins, sidecar, text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    ChecksumError,
    CkpttoolError,
    FormatError,
    MappingError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, Topic
from ckpttool.core.source import File, Inline, MissingShard
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display
from ckpttool.core.urls import format_command
from ckpttool.evaluation import evidence
from ckpttool.evaluation.agent_facts import GIVEN, NO_FACTS, AgentFacts
from ckpttool.formats.detect import ensure_open, open_checkpoint
from ckpttool.formats.probe import Format
from ckpttool.libraries import recognize, schema, single_networks
from ckpttool.libraries.recognize import recognize_checkpoint, recognize_tree
from ckpttool.libraries.schema import (
    NETWORKS,
    NO_LAYOUT,
    RUN,
    AgentMetadata,
    AgentNetwork,
    ObservationNormalizer,
    PolicyEncoder,
    RecognizedAgent,
    layer_widths,
)
from ckpttool.mapping.rules import MoveList, canonical_tree

if TYPE_CHECKING:
    from ckpttool.evaluation.wrappers import WrapperSpec


# The facts of the action map, and those of the observations.
FACTS = (
    "head",
    "activations",
    "network_activations",
    "action_low",
    "action_high",
    "choices",
    "observation_space",
    "obs_norm",
    "env",
    "epsilon",
)

_NETWORKS = "network_activations"
_TEXT = "args.txt"
_ROUNDED = 1e-5
_WEIGHTS = "read from the weights"
NO_STATISTICS = "read from the source: it has none"
_STATISTICS: Topic = "observation statistics"


def with_companions(
    binding: RecognizedAgent, checkpoint: Checkpoint
) -> tuple[RecognizedAgent, tuple[str, ...]]:
    """Return the binding with facts from files beside the checkpoint, and a note for each file read."""
    if binding.layout == NO_LAYOUT:
        return binding, ()
    layout = recognize.as_companion_reader(plugins.find("layouts", binding.layout).load())
    notes = []
    for file in layout.companions(checkpoint.path) if layout is not None else ():
        if filesystem.isfile(file) and layout is not None:
            if filesystem.islink(file):
                File.beside(file, checkpoint.files[0].path)
            before, binding = binding, layout.read_companion(binding, file, _read_companion(file))
            if binding is not before:
                notes.append(f"{os.path.relpath(file, os.path.dirname(checkpoint.path) or '.')} was read")
    return binding, tuple(notes)


def missing_facts(binding: RecognizedAgent, recorded: Sidecar | None) -> LedgerEntries:
    """Return the facts recorded neither in the agent's own files nor in its sidecar, or not understood."""
    unclear = list_not_understood(binding, recorded)
    stated = tuple(binding.facts.stated[name].entry(_TOPIC_OF[name]) for name in unclear)
    lacks = list(binding.facts.lacks)
    if recorded is not None:
        open_facts = {"activations": sidecar.NO_ACTIVATIONS, "head": sidecar.NO_ACTION_MAP}
        left = [fact for name, fact in open_facts.items() if recorded.is_left_open(name)]
        lacks += [entry for entry in left if all(entry.what != lack.what for lack in lacks)]
    missing = (e for e in lacks if recorded is None or not _is_answered(e, recorded))
    discrete = binding.facts.head == "argmax" or any(
        schema.DISCRETE_CHOICE in reasons for reasons in binding.unplaced.values()
    )
    return (*stated, *(entry for entry in missing if entry.what != "action bounds" or not discrete))


def _is_answered(lack: LedgerEntry, recorded: Sidecar) -> bool:
    """Return whether a sidecar or given facts answer what the checkpoint leaves open.

    A default that a conversion assumed is an answer only where the source's library does not leave it open.
    For observation statistics the provenance may record that there are none.
    """
    if lack == sidecar.NO_ENVIRONMENT:
        return bool((recorded.env or {}).get("id"))
    if lack == schema.DUELING:
        return recorded.choices is not None
    name = next((name for name in _ANSWERS if _TOPIC_OF[name] == lack.what), None)
    if name is None:
        return False
    if getattr(recorded, name) is None:
        return name == "obs_norm" and name in recorded.provenance
    if not recorded.is_assumed(name):
        return True
    if recorded.is_left_open(name):
        return False
    layouts = {plugin.name: plugin for plugin in plugins.installed("layouts")}
    source = layouts.get(str((recorded.source or {}).get("layout")))
    return source is not None and all(other.what != lack.what for other in source.load().TABLE.facts.lacks)


def list_not_understood(binding: RecognizedAgent, known: Sidecar | None) -> tuple[str, ...]:
    """Return the facts that a file states in a form that is not understood, and for which none is given."""
    return tuple(name for name in binding.facts.stated if known is None or getattr(known, name) is None)


def require_understood(binding: RecognizedAgent, known: Sidecar, file: str | None = None) -> None:
    """Raise UnsupportedError if a file states a fact in a form that is not understood, and none is given."""
    for name in list_not_understood(binding, known):
        stated, option = binding.facts.stated[name], STATED_BY.get(name)
        raise UnsupportedError(
            f"the {_TOPIC_OF[name]} that {stated.source} states is not supported",
            file=file,
            found=stated.text,
            hint=None if option is None else f"{option} replaces it, if it computes the same",
        )


def without_statistics(binding: RecognizedAgent, recorded: Sidecar) -> Sidecar:
    """Return the known facts, recording absent observation statistics if the agent has none."""
    if recorded.obs_norm is not None or any(lack.what == _STATISTICS for lack in binding.facts.lacks):
        return recorded
    return replace(recorded, provenance={"obs_norm": NO_STATISTICS, **recorded.provenance})


def build_ledger(
    checkpoint: Checkpoint,
    binding: RecognizedAgent,
    own: Sidecar | None,
    known: Sidecar,
    sizes: tuple[int, int],
    stated: Collection[str] = (),
) -> LedgerEntries:
    """Return an agent's ledger: facts used, evidence not used, facts unknown, defaults assumed.

    Every command prints these entries and adds those of its own work (an environment's bounds, settings of a
    target's optimizers).

    Args:
        checkpoint: what the agent was restored from.
        binding: the agent in it.
        own: the sidecar with the `stated` facts.
        known: all known facts.
        sizes: numbers of the policy's observations and of its actions.
        stated: names of the facts that a user gave.
    """
    unknown = missing_facts(binding, own)
    left = tuple(evidence.unused_entries(checkpoint, binding, known, sizes))
    if any(entry.decides and entry.what == _STATISTICS for entry in (*unknown, *left)):
        unknown = tuple(entry for entry in unknown if entry != sidecar.STATISTICS_UNKNOWN)
    if any(entry.decides and entry.what == "activation" for entry in left):
        unknown = tuple(entry for entry in unknown if entry != sidecar.NO_ACTIVATIONS)
    where = binding.facts.origins.get("wrappers", known.origin("env"))
    named = wrapper_entries(training_wrappers(known), where)
    assumed = assumed_entries(binding, known, own)
    stored: dict[str, str] = {}
    if own is not None and own.target_sha256:
        # A sidecar's author also writes its provenance: the origin of a fact is only the sidecar's claim.
        file = os.path.basename(sidecar.sidecar_path(checkpoint.path))
        facts = (name for name in FACTS if getattr(own, name) is not None and name not in stated)
        stored = {name: file for name in facts if own.provenance.get(name) == known.provenance.get(name)}
    where_from = stored.get("env") or binding.facts.origins.get("env_arguments") or known.origin("env")
    arguments = (
        LedgerEntry("used", "environment", f"{name} = {json.dumps(value)[:60]}", where_from)
        for name, value in ((known.env or {}).get("arguments") or {}).items()
    )
    return sidecar.merge_entries(
        _used_fact_entries(known, binding, stored),
        arguments,
        named,
        binding.ledger,
        left,
        unknown,
        assumed,
    )


# The option that sets a fact otherwise decided by a library's default.
STATED_BY = {"activations": "--activation NAME", "head": "--head NAME", "obs_norm": "--obs-norm FILE"}


def assumed_entries(
    binding: RecognizedAgent, known: Sidecar, *sidecars: Sidecar | None
) -> Iterator[LedgerEntry]:
    """Yield an entry for each assumption about an agent with the facts `known`.

    `sidecars` are its own and that of the agent it is compared with.
    """
    yield from sidecar.assumption_entries("architecture", binding.moves.assumed)
    facts = binding.facts
    hidden = ", ".join(dict.fromkeys(known.activations or facts.activations or (facts.hidden,)))
    kind = binding.norm_kind
    rows: tuple[tuple[str, Topic, str], ...] = (
        ("activations", "activation", f"hidden activations {hidden}"),
        (
            "network_activations",
            "activation",
            f"hidden activations {_describe_fact('network_activations', [known.network_activations or {}])}",
        ),
        ("head", "action map", f"action map {known.head or facts.head}"),
        (
            "epsilon",
            "architecture",
            _describe_fact("epsilon", [{kind: known.norm_epsilon(kind, facts.epsilon)}]),
        ),
    )
    for name, what, value in rows:
        if not known.is_assumed(name) or (name == "epsilon" and kind is None):
            continue
        stated = [record is not None and record.is_assumed(name) for record in sidecars]
        owner = "the sidecar" if stated[:1] == [True] else "the other checkpoint's sidecar"
        origin = known.origin(name) + (f" (according to {owner})" if any(stated) else "")
        # No action map replaces a choice among discrete actions.
        hint = STATED_BY.get(name) if name != "head" or known.choices is None else None
        yield LedgerEntry("assumed", what, value, origin=origin, hint=hint)


def training_wrappers(known: Sidecar) -> tuple[WrapperSpec, ...]:
    """Return the training wrappers listed in the agent's files or its sidecar."""
    named = (known.env or {}).get("wrappers") or ()
    if not named:
        return ()  # a conversion needs no environments
    from ckpttool.evaluation.wrappers import WrapperSpec

    return tuple(WrapperSpec(row["name"], row.get("arguments", {})) for row in named)


def wrapper_entries(specs: Sequence[WrapperSpec], where: str) -> Iterator[LedgerEntry]:
    """Yield an entry for each wrapper that is played, changes rewards, or is unknown."""
    if not specs:
        return
    from ckpttool.evaluation import wrappers

    for wrapper in specs:
        shown = f"{wrapper.title}{wrappers.format_arguments(wrapper.arguments)}"
        if not wrappers.is_known_wrapper(wrapper):
            hint = "use --wrapper none to play without it, if it changes neither observations nor actions"
            yield LedgerEntry(
                "cannot be known", "wrapper", f"effect of wrapper {wrapper.name}", where, "", True, hint
            )
        elif wrapper.title in wrappers.REWARDS:
            yield LedgerEntry(
                "not used", "wrapper", f"{shown}: returns are sums of the unchanged rewards", where
            )
        elif wrapper.title not in wrappers.HARMLESS:
            yield LedgerEntry("used", "wrapper", shown, where)
        if wrappers.ends_with_life(wrapper):
            value = f"{wrapper.title}: an episode ends with the game, not with a life"
            yield LedgerEntry("not used", "wrapper", value, where)


def find_contradictions(
    recorded: Sidecar | None, read: Sidecar, facts: AgentMetadata
) -> dict[str, LedgerEntry]:
    """Return an entry for each sidecar fact that contradicts the checkpoint, by name.

    A sidecar is bound only to the weights: editing its facts keeps the digest. So the checkpoint's own
    values win, unless a user gave the sidecar's. The same holds for a fact that the checkpoint states in a
    form that is not understood. Where the checkpoint has only a part of a fact, the sidecar completes it.
    """
    stated = facts.stated
    contradictions: dict[str, LedgerEntry] = {}
    for name, entry in stated.items():
        value = getattr(recorded, name, None)
        if recorded is not None and value is not None and not recorded.is_given(name):
            text = f"{_describe_fact(name, [value])} in the sidecar; the checkpoint contains {entry.text}"
            contradictions[name] = LedgerEntry("not used", _TOPIC_OF[name], text, entry.source, decides=True)
    for names, what in _TOPICS.items():
        name = names[0]
        values = [getattr(recorded, name, None) for name in names]
        own = [getattr(read, name) for name in names]
        origin = str(read.provenance.get(name, ""))
        if name in ("env", "epsilon") or values[0] is None or own[0] is None or not origin:
            continue
        if recorded is None or read.is_assumed(name) or recorded.is_assumed(name):
            continue
        if _agree(name, values, own, open_formula=origin == _WEIGHTS) or (
            name == "obs_norm" and _completes_statistics(values[0], facts.norm)
        ):
            continue
        value = (
            f"{_describe_fact(name, values)} in the sidecar; the checkpoint contains "
            f"{_describe_fact(name, own)}"
        )
        hint = "remove the sidecar, or convert the source again"
        contradictions[name] = LedgerEntry(
            "not used", what, value, origin, decides=recorded.provenance.get(name) != "given", hint=hint
        )
    return contradictions


def _agree(name: str, ones: Sequence[Any], others: Sequence[Any], *, open_formula: bool = False) -> bool:
    """Return whether two values of a fact are equal within float32 rounding.

    Observation statistics of an open formula are equal if mean and variance are: two tensors.
    """
    one, other = ones[0], others[0]
    if name == "choices":
        return schema.Choices.read(one) == schema.Choices.read(other)
    if name == "network_activations":
        keys = one.keys() | other.keys()
        return all(_agree("activations", [one.get(key, ())], [other.get(key, ())]) for key in keys)
    if name == "head":
        return bool(one == other) or "unit_tanh" in (one, other)  # the program scales the model's output
    if name == "activations":
        most = max(len(one), len(other))
        longer = [list(values) * most if len(values) == 1 else list(values) for values in (one, other)]
        return longer[0] == longer[1]
    if name == "action_low":
        return _all_close(list(zip(ones, others, strict=True)))
    rows = [(one[row], other[row]) for row in ("mean", "var")]
    if open_formula and _all_close(rows):
        return True
    spreads = [np.sqrt(np.asarray(n["var"]) + float(n.get("epsilon", 1e-8))) for n in (one, other)]
    limits = [[n.get("clip") or 0.0] for n in (one, other)]
    same_limits = open_formula or limits[0] == limits[1]
    return same_limits and _all_close([rows[0], (spreads[0], spreads[1])])


def _completes_statistics(recorded: Mapping[str, Any], norm: ObservationNormalizer | None) -> bool:
    """Return whether a sidecar has the stored statistics with the formula that no other file contains.

    Then it has the stored mean, and the stored variance or deviation plus one epsilon.
    """
    if norm is None or not norm.assumed:
        return False
    deviations = (
        np.sqrt(_to_flat_array(norm.var)) if norm.var is not None else _to_flat_array(cast(Leaf, norm.std))
    )
    spread = np.sqrt(np.asarray(recorded["var"]) + float(recorded.get("epsilon", 1e-8)))
    if spread.shape != deviations.shape or not _all_close([(recorded["mean"], _to_flat_array(norm.mean))]):
        return False
    # The least deviation gives epsilon with the least rounding.
    least = int(np.argmin(deviations))
    inside, outside = spread[least] ** 2 - deviations[least] ** 2, spread[least] - deviations[least]
    formulas = (np.sqrt(deviations**2 + max(inside, 0.0)), deviations + max(outside, 0.0))
    return any(bool(np.allclose(spread, formula, rtol=_ROUNDED, atol=0.0)) for formula in formulas)


def _with_recorded_formula(binding: RecognizedAgent, recorded: Sidecar | None) -> RecognizedAgent:
    """Return the binding without the assumed formula of its statistics if the sidecar has another one."""
    norm, statistics = binding.facts.norm, None if recorded is None else recorded.obs_norm
    if norm is None or statistics is None or not _completes_statistics(statistics, norm):
        return binding
    if _agree("obs_norm", [statistics], [_statistics_fact(norm)]):
        return binding  # perhaps the same assumption, which a conversion made
    assumed = tuple(assumption for assumption in binding.moves.assumed if assumption != norm.assumed)
    facts = binding.facts._replace(norm=norm._replace(assumed=""))
    return replace(binding, moves=replace(binding.moves, assumed=assumed), facts=facts)


def _all_close(pairs: Sequence[tuple[Any, Any]]) -> bool:
    return all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=_ROUNDED, atol=_ROUNDED) for a, b in pairs
    )


def _used_fact_entries(
    known: Sidecar, binding: RecognizedAgent, stored: Mapping[str, str]
) -> Iterator[LedgerEntry]:
    """Yield an entry for each fact in a file, a sidecar or on the command line."""
    for names, what in _TOPICS.items():
        name = names[0]
        if name == "epsilon" and binding.norm_kind is None:
            continue
        value, origin = getattr(known, name), known.origin(name)
        # A network without hidden layers has no activations.
        if value is None or value in ([], ()) or known.is_assumed(name):
            continue
        where = stored.get(name) or (origin if known.is_read(name) else "")
        values = [getattr(known, name) for name in names]
        yield LedgerEntry(
            "used", what, _describe_fact(name, values), where, origin="" if where == origin else origin
        )


def _describe_fact(name: str, values: Sequence[Any]) -> str:
    value = values[0]
    if name == "obs_norm":
        clip = "" if value.get("clip") is None else f", clip {value['clip']:g}"
        return f"of {len(value['mean'])} values{clip}"
    if name == "action_low":
        low, high = ([f"{number:g}" for number in dict.fromkeys(numbers)] for numbers in values)
        return f"{format_numbers(low)} to {format_numbers(high)}"
    if name == "choices":
        return schema.Choices.read(value).title
    if name == "env":
        return str(value.get("id"))
    if name == "epsilon":
        kinds = [kind for kind in schema.NORM_LAYERS if kind in value]
        return ", ".join(f"{kind.replace('_', ' ')} epsilon {value[kind]:g}" for kind in kinds)
    if name == "network_activations":
        return "; ".join(f"of {part}: {', '.join(dict.fromkeys(own))}" for part, own in value.items())
    return ", ".join(dict.fromkeys(value)) if isinstance(value, list | tuple) else str(value)


def format_numbers(numbers: Sequence[str]) -> str:
    """Return one number, or the first of a list."""
    return numbers[0] if len(numbers) == 1 else f"[{abbreviate_list(numbers, 4)}]"


# Facts that fully determine their topic once given.
_ANSWERS = frozenset(("action_low", "obs_norm", "activations", "head"))
# The facts that the ledger lists, with the facts that belong to each, and their topics.
_TOPICS: Mapping[tuple[str, ...], Topic] = {
    ("activations",): "activation",
    ("network_activations",): "activation",
    ("head",): "action map",
    ("action_low", "action_high"): "action bounds",
    ("choices",): "discrete actions",
    ("obs_norm",): "observation statistics",
    ("env",): "environment",
    ("epsilon",): "architecture",
}
_TOPIC_OF: Mapping[str, Topic] = {names[0]: what for names, what in _TOPICS.items()}


def _read_companion(file: str) -> Tree:
    """Return the contents of a file beside a checkpoint: YAML or JSON settings, or a separate checkpoint."""
    from ckpttool.formats import settings

    if file.endswith(".json"):
        return settings.tree_from_json(text.load_json(file, "settings"), "the file")
    if os.path.basename(file) == _TEXT:
        try:
            return settings.read_yaml(file)  # JSON, or lines of `name: value`
        except FormatError:
            return Tree({})  # other programs use this file name too: no reason to reject the checkpoint
    if file.endswith(".pbtxt"):
        from ckpttool.formats import tf_common

        return settings.tree_from_json(tf_common.read(file), "the file")
    return settings.read_yaml(file) if file.endswith((".yml", ".yaml")) else open_checkpoint(file).tree


def read_metadata(binding: RecognizedAgent, agent: Tree) -> Sidecar:
    """Return the agent's facts from the checkpoint itself, with layout defaults marked as assumed.

    `agent` is the canonical tree; the few small tensors that are facts (statistics, action maps) are
    read.
    """
    facts = binding.facts
    alone = binding.layout == NO_LAYOUT
    habit = (
        "assumed: the framework's default" if alone else f"assumed: the default of layout {binding.layout}"
    )
    kinds = [[layer.kind for layer in part.layers] for part in binding.parts]
    policy, norm = binding.policy, facts.norm
    mean, var, std = (agent.get((attr(schema.NORMALIZER), attr(n))) for n in ("mean", "var", "std"))
    if norm is None and isinstance(mean, Leaf):
        if isinstance(var, Leaf):
            norm = ObservationNormalizer(mean, var)
        elif isinstance(std, Leaf):
            norm = ObservationNormalizer(mean, std=std)
    record: dict[str, Any] = {
        "head": facts.head or None,
        "activations": list(facts.activations)
        if facts.activations is not None
        else [facts.hidden] * (max(kind.count("dense") for kind in kinds) - 1)
        if facts.hidden
        else None,
        "network_activations": {name: list(own) for name, own in facts.network_activations.items()} or None,
        "epsilon": {binding.norm_kind: facts.epsilon} if binding.norm_kind else None,
        "obs_dim": layer_widths(agent, policy)[0]
        if policy is not None and policy.component not in binding.fronts
        else None,
        **_file_bounds(facts, agent, policy),
        "choices": None if facts.choices is None else facts.choices.document(),
        "distribution": None if facts.distribution is None else facts.distribution.document(),
        "observation_space": facts.observation_space,
        "obs_norm": _statistics_fact(norm),
    }
    record |= dict.fromkeys(facts.stated)
    record["env"] = _environment_fact(facts, record["obs_norm"])
    if facts.stacked > 1 and record["obs_norm"] is not None:
        # Statistics cover one observation, but the policy receives several normalised ones.
        record["obs_norm"] |= {name: record["obs_norm"][name] * facts.stacked for name in ("mean", "var")}
    provenance = {
        name: _fact_origin(name, facts, habit) for name, value in record.items() if value is not None
    }
    return Sidecar("", **record, provenance=provenance)


def _fact_origin(name: str, facts: AgentMetadata, habit: str) -> str:
    fact = {"obs_norm": "norm", "activations": "activations" if facts.activations else "hidden"}.get(
        name, name
    )
    if fact in facts.origins:
        return f"read from {facts.origins[fact]}"
    # Facts without a default were read from the weights.
    if name == "env":
        return f"read from {facts.origins.get('wrappers', 'the settings')}"
    if name == "distribution":
        return habit
    if name not in ("head", "activations", "network_activations", "epsilon"):
        return _WEIGHTS
    left_open = any(lack.decides and lack.what == _TOPIC_OF[name] for lack in facts.lacks)
    return habit.replace("assumed", sidecar.LEFT_OPEN, 1) if left_open else habit


def _environment_fact(facts: AgentMetadata, norm: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the environment in sidecar form: its id, its arguments and its wrappers."""
    wrappers = [{"name": name, "arguments": dict(arguments)} for name, arguments in facts.wrappers]
    if facts.stacked > 1:
        # rl_zoo3/utils.py, create_test_env: stacked after VecNormalize, so missing entries are the mean.
        padding = {} if norm is None else {"padding": norm["mean"]}
        wrappers.append({"name": "VecFrameStack", "arguments": {"n_stack": facts.stacked, **padding}})
    record = {"id": facts.env, "arguments": dict(facts.env_arguments), "wrappers": wrappers}
    record = {name: value for name, value in record.items() if value}
    return record or None


def _file_bounds(
    facts: AgentMetadata, agent: Tree, policy: AgentNetwork | None
) -> dict[str, list[float] | None]:
    """Return the action bounds: from the file, or from its scale and bias applied to [-1, 1]."""
    if facts.action_low is not None and facts.action_high is not None:
        return {"action_low": list(facts.action_low), "action_high": list(facts.action_high)}
    scale, bias = (agent.get((attr("actor"), attr(n))) for n in ("action_scale", "action_bias"))
    if not isinstance(scale, Leaf) or policy is None:
        return {"action_low": None, "action_high": None}
    count = layer_widths(agent, policy)[1]
    for leaf in (scale, bias):
        if isinstance(leaf, Leaf) and math.prod(leaf.shape) not in (1, count):
            raise MappingError(
                "the size of the action map does not match the action",
                path=leaf.key,
                expected=f"1 number or {count}",
                found=str(list(leaf.shape)),
            )
    wide = np.broadcast_to(scale.array().astype(np.float64).reshape(-1), (count,))
    middle = bias.array().astype(np.float64).reshape(-1) if isinstance(bias, Leaf) else np.zeros(1)
    return {"action_low": (middle - wide).tolist(), "action_high": (middle + wide).tolist()}


def _statistics_fact(norm: ObservationNormalizer | None) -> dict[str, Any] | None:
    """Return the statistics in sidecar form: mean, var, epsilon inside the root, clip."""
    if norm is None:
        return None
    var = _to_flat_array(norm.var) if norm.var is not None else _to_flat_array(cast(Leaf, norm.std)) ** 2
    epsilon = norm.epsilon
    if norm.outside:
        var, epsilon = (np.sqrt(var) + epsilon) ** 2, 0.0
    return {
        "mean": _to_flat_array(norm.mean).tolist(),
        "var": var.tolist(),
        "epsilon": epsilon,
        "clip": norm.clip,
        **({"parts": dict(norm.parts)} if norm.parts else {}),
    }


def known_statistics(known: Sidecar) -> ObservationNormalizer | None:
    """Return the known observation statistics, from any source."""
    statistics = known.obs_norm
    if statistics is None:
        return None
    clip = statistics.get("clip")
    mean, var = (
        schema.make_float64_tensor([float(value) for value in statistics[name]], name)
        for name in ("mean", "var")
    )
    return ObservationNormalizer(
        mean,
        var,
        epsilon=float(statistics.get("epsilon", 1e-8)),
        clip=None if clip is None else float(clip),
        parts=statistics.get("parts") or {},
    )


def action_map(known: Sidecar, agent: Tree) -> dict[Path, Leaf | ValueLeaf]:
    """Return the action scale and bias [act_dim] as canonical leaves, for layouts with such weights.

    None if the tree has them already, or the bounds are unknown.
    """
    scale, bias = ((attr("actor"), attr(name)) for name in ("action_scale", "action_bias"))
    low, high = known.action_low, known.action_high
    if scale in agent or low is None or high is None:
        return {}
    pairs = tuple(zip(low, high, strict=True))
    # In float32, as torch computes it from a float32 Box (CleanRL, td3_continuous_action.py).
    numbers = {scale: [(b - a) / 2 for a, b in pairs], bias: [(b + a) / 2 for a, b in pairs]}
    return {
        path: Leaf("float32", (len(v),), Inline(struct.pack(f"<{len(v)}f", *v)), display(path), "buffer")
        for path, v in numbers.items()
    }


def _to_flat_array(leaf: Leaf) -> np.ndarray:
    return leaf.array().astype("float64").reshape(-1)


def merge_metadata(recorded: Sidecar | None, read: Sidecar) -> Sidecar:
    """Return the known facts: the sidecar's, except assumed ones that a file records.

    Networks without activations of their own in a sidecar have the policy's, whatever a library's default is.
    """
    if recorded is None:
        return read
    if recorded.activations and not recorded.is_assumed("activations") and read.is_assumed(_NETWORKS):
        read = replace(read, network_activations=None)
    better = {
        name: getattr(read, name)
        for name in FACTS
        if getattr(read, name) is not None
        and (getattr(recorded, name) is None or recorded.is_assumed(name))
        and not (getattr(recorded, name) is not None and read.is_assumed(name))
    }
    for name in ("obs_dim", "distribution"):
        if getattr(recorded, name) is None and getattr(read, name) is not None:
            better[name] = getattr(read, name)
    provenance = {**recorded.provenance, **{name: read.provenance.get(name, "given") for name in better}}
    return replace(recorded, **better, provenance=provenance)


def require_shards(tree: Tree) -> None:
    """Raise TruncatedError naming the first missing shard that tensors of the tree need."""
    lost: dict[str, list[Leaf]] = {}
    for _, leaf in tree.tensors():
        if isinstance(leaf.source, MissingShard):
            lost.setdefault(leaf.source.path, []).append(leaf)
    if not lost:
        return
    file, leaves = next(iter(lost.items()))
    names = ", ".join(os.path.basename(shard) for shard in lost)
    missing = f"{sum(map(len, lost.values()))} of {sum(1 for _ in tree.tensors())}"
    raise TruncatedError(
        f"shard {names} is missing" if len(lost) == 1 else f"shards {names} are missing",
        file=file,
        found=f"{missing} tensors without data, e.g. {leaves[0].key}",
        hint=f"copy it to {os.path.dirname(file) or '.'}",
    )


# Canonical tensors outside layers, which a conversion puts beside a model's layers.
_LONE = frozenset(("log_std", "std", "log_alpha", "alpha", "q_support"))


@dataclass(frozen=True, slots=True)
class Agent:
    """A checkpoint recognised as an agent; `tree` is the canonical one, its leaves unread.

    `known` contains the facts of its sidecar and its own files, with provenance; `sidecar` only the
    sidecar's. `ledger` lists what is used, assumed and not used; building a network adds environment
    bounds (network_outputs.derive_network_settings).
    """

    checkpoint: Checkpoint
    binding: RecognizedAgent
    tree: Tree
    sidecar: Sidecar | None
    known: Sidecar
    notes: tuple[str, ...]
    ledger: LedgerEntries = ()

    @property
    def framework(self) -> str:
        """The backend that runs checkpoints of this format by default."""
        plugin = plugins.find("formats", self.checkpoint.format)
        return cast(Format, plugin.load()).FRAMEWORK

    def title(self, network: str) -> str:
        """Return the canonical title of the requested network.

        A policy alone has only one; that of a Q-learner is its Q-network.
        """
        titles = [part.title for part in self.binding.parts if part.acts]
        lone = self.binding.layout == NO_LAYOUT
        return titles[0] if titles and (lone or (network == "actor" and network not in titles)) else network

    def part(self, title: str) -> AgentNetwork | None:
        """Return the network of that title (`actor`, `critic/q1`), or None."""
        return next((part for part in self.binding.parts if part.title == title), None)

    def front(self, title: str) -> PolicyEncoder | None:
        """Return what the policy of that title computes before its layers, None if nothing."""
        return self.binding.fronts.get(title.partition("/")[0])

    def playable(self, title: str) -> AgentNetwork | None:
        """Return the policy of that title, possibly behind a front; raise as `runnable` does."""
        front = self.front(title)
        return self.runnable(title, front.covers if front is not None else frozenset())

    def runnable(self, title: str, covered: frozenset[str] = frozenset()) -> AgentNetwork | None:
        """Return the network of that title; raise UnsupportedError if a part is of an unknown kind.

        `covered` are tensors handled elsewhere.
        """
        part = self.part(title)
        # A network without any runnable layer is not a part, but was in the file.
        left = [n for n in self.binding.unplaced.get(title.partition("/")[0], ()) if n not in covered]
        if left:
            front, hint = self.front(title), None
            if front is not None and front.covers.issuperset(left):
                reason = "contains more than layers (an encoder, memory, norms): it can only be played"
            elif any("discrete" in entry for entry in left):
                reason = "has discrete actions, which cannot be run yet"
                hint = single_networks.conversion_hint(self.checkpoint.path)
            elif order := [entry for entry in left if entry.startswith(schema.UNKNOWN_ORDER)]:
                left, reason, hint = order, "has layers in an unknown order", schema.RECORDED_ORDER
            else:
                ledger = self.binding.ledger
                classes = [entry.value.partition(":")[0] for entry in ledger if entry.what == "custom code"]
                custom = f"needs custom code, which is not run: {' and '.join(classes)}"
                reason = custom if classes else "cannot be run yet"
            raise UnsupportedError(
                f"{title} {reason}",
                file=self.checkpoint.path,
                found=abbreviate_list(left, 3),
                hint=hint,
            )
        return part


def restore_agent(
    path: str | Checkpoint, layout: str | None = None, facts: AgentFacts = NO_FACTS, network: str = "actor"
) -> Agent:
    """Return the checkpoint as a runnable agent: the canonical tree contains only its networks.

    An unrecognised checkpoint may be a bare policy; `network` names one of several chains of layers.
    Raise UsageError when there is neither.
    """
    checkpoint = ensure_open(path)
    require_shards(checkpoint.tree)
    binding = recognize_playable_agent(checkpoint, layout, network)
    if binding is None:
        raise no_agent_error(checkpoint)
    return build_agent(checkpoint, binding, read_verified_sidecar(checkpoint), facts)


def recognize_playable_agent(
    checkpoint: Checkpoint, layout: str | None = None, network: str = "actor"
) -> RecognizedAgent | None:
    """Return the agent that a layout recognises, else the checkpoint as a bare policy."""
    binding = recognize_checkpoint(checkpoint, layout)
    if binding is not None or layout not in (None, NO_LAYOUT):
        return binding
    try:
        return single_networks.recognize_single_policy(checkpoint, network)
    except (UnsupportedError, UsageError) as error:
        error.hint = error.hint or format_command("inspect", checkpoint.path)
        raise


def no_agent_error(checkpoint: Checkpoint) -> CkpttoolError:
    """Return the error for a checkpoint without a recognised agent; raise that of a missing shard."""
    from ckpttool.evaluation.other_content import no_network_error

    require_shards(checkpoint.tree)
    return no_network_error(checkpoint, "eval") or UsageError(
        "no layout recognises an agent in this checkpoint",
        file=checkpoint.path,
        found=next((note for note in checkpoint.notes if note.startswith("policy ")), None),
        hint=f"{format_command('inspect', checkpoint.path)} lists its tensors",
    )


def build_agent(
    checkpoint: Checkpoint, binding: RecognizedAgent, own: VerifiedSidecar, facts: AgentFacts = NO_FACTS
) -> Agent:
    """Return the checkpoint as the recognised agent, with the facts of its own sidecar.

    Given `facts` override the sidecar's and the files'; a note names each contradiction.
    """
    from ckpttool.libraries import layer_connections

    require_layers(binding, own.sidecar, sidecar.sidecar_path(checkpoint.path))
    recorded = own.sidecar
    choices = None if recorded is None else schema.known_choices(recorded)
    if choices is not None:
        binding = binding.with_q_policies(choices.scores)
    elif recorded is not None and recorded.head == "argmax":
        binding = binding.with_q_policies()
    binding = with_source_computation(binding, own.sidecar, checkpoint)
    binding = with_names(binding, checkpoint.tree, own.sidecar)
    binding, used = with_companions(binding, checkpoint)
    binding = with_records(binding, checkpoint.tree, checkpoint)
    binding = layer_connections.check_connections(binding, checkpoint.tree, own.sidecar)
    tree = select_network_leaves(checkpoint.tree, binding)
    stated = binding.facts.stated
    contradicted = find_contradictions(own.sidecar, read_metadata(binding, tree), binding.facts)
    binding = _with_recorded_formula(binding, own.sidecar)
    wrong = {name: entry for name, entry in contradicted.items() if name not in facts.known}
    binding = binding.entered(*wrong.values())
    own = _drop_contradicted(own, [name for name, entry in wrong.items() if entry.decides])
    if facts:
        if "activations" in facts.known and any(part.program is not None for part in binding.parts):
            raise UsageError(
                "the activations come from the model's graph and cannot be set",
                file=checkpoint.path,
                hint="leave out --activation",
            )
        hidden, actions = policy_sizes(binding, tree)
        if schema.HALVES in binding.facts.lacks and (count := len(facts.known.get("action_low", ()))):
            actions = count
        facts = facts.sized(hidden, actions)
        metadata = merge_metadata(own.sidecar, read_metadata(binding, tree))
        used = (*used, f"given: {facts.described()}", *facts.contradictions(metadata, stated))
        own = replace(own, sidecar=facts.over(own.sidecar))
    own = _broadcast_bounds(own, binding, tree)
    notes = (*own.notes, *used)
    if binding.layout == NO_LAYOUT:
        notes = (*notes, *binding.moves.notes)
    other = sorted({leaf.dtype for path, leaf in tree.tensors() if path[0].value in NETWORKS} - {"float32"})
    if other:
        notes = (*notes, f"weights stored as {', '.join(other)} are run as float32")
    known = merge_metadata(own.sidecar, read_metadata(binding, tree))
    before = select_encoder_leaves(checkpoint.tree, binding)
    ledger = agent_ledger(checkpoint, binding, own.sidecar, known, tree, facts.known)
    return Agent(checkpoint, binding, Tree({**tree, **before}), own.sidecar, known, notes, ledger)


def with_source_computation(
    binding: RecognizedAgent, recorded: Sidecar | None, checkpoint: Checkpoint
) -> RecognizedAgent:
    """Return the binding of converted weights with the source's computation from their receipt.

    What could not be run of the source is not run of them. Raise UnsupportedError if the computation is more
    than a chain of the weights.
    """
    computation = None if recorded is None else recorded.computation
    if recorded is None or computation is None:
        return binding
    if "unplaced" in computation:
        for part in binding.parts:
            if part.acts:
                reason = f"{computation['unplaced']} in {computation['origin']}"
                binding = binding.refused(part.component, reason)
        return binding
    code = computation.get("code")
    if code and (code == single_networks.HOOK or "refused" not in computation):
        sentence = f"the source's own code, {code}, only applies its layers in sequence"
        return binding.assuming(sentence)
    if single_networks.read_computation(checkpoint) is not None:
        return binding
    name = os.path.basename(str((recorded.source or {}).get("path") or "SOURCE"))
    source = os.path.join(os.path.dirname(checkpoint.path), name)
    which, source = ("", source) if os.path.exists(source) else (f", {name}", "SOURCE")
    way = f"play the source{which}: {format_command('eval', source, '--env', 'ID')}"
    if "refused" in computation:
        way = "load the weights into the model's own code (ckpttool.load_into), then export that to ONNX"
    raise UnsupportedError(
        f"this file contains only the weights of a model; its computation is in {computation['origin']}",
        file=checkpoint.path,
        expected="a chain of layers",
        found=computation.get(
            "refused", "a source that computes more (according to the receipt of the conversion)"
        ),
        hint=way,
    )


def _drop_contradicted(own: VerifiedSidecar, names: Sequence[str]) -> VerifiedSidecar:
    """Return the known facts without sidecar facts that the checkpoint contradicts."""
    if own.sidecar is None or not names:
        return own
    more = ["action_high"] if "action_low" in names else []
    gone: dict[str, Any] = dict.fromkeys([*names, *more])
    provenance = {name: origin for name, origin in own.sidecar.provenance.items() if name not in gone}
    return replace(own, sidecar=replace(own.sidecar, **gone, provenance=provenance))


def _without_infinite_statistics(binding: RecognizedAgent) -> RecognizedAgent:
    """Return the binding without observation statistics that overflowed, as those of a run that diverged."""
    statistics = _statistics_fact(binding.facts.norm)
    if statistics is None:
        return binding
    # Networks compute in float32.
    if (np.abs([*statistics["mean"], *statistics["var"]]) <= np.finfo(np.float32).max).all():
        return binding
    where = binding.facts.origins.get("norm", "the file")
    facts = binding.facts._replace(norm=None)
    return replace(binding, facts=facts.not_understood("obs_norm", "with values that are not finite", where))


def with_records(binding: RecognizedAgent, tree: Tree, checkpoint: Checkpoint) -> RecognizedAgent:
    """Return the binding extended by data that its layout does not read.

    These are observation statistics, activations recorded in a graph or configuration, and settings.
    """
    from ckpttool.libraries import layer_connections

    part = binding.policy
    if part is not None and binding.layout != NO_LAYOUT and part.component not in binding.fronts:
        width, _ = layer_widths(select_network_leaves(tree, binding), part)
        binding = schema.apply_statistics(binding, tree, width)
    binding = _without_infinite_statistics(binding)
    binding = layer_connections.read_hidden_activations(binding, checkpoint)
    part = binding.policy
    if part is None or binding.layout == NO_LAYOUT:
        return binding
    from ckpttool.evaluation import stored_settings

    return stored_settings.apply_stored_settings(
        binding, tree, layer_widths(select_network_leaves(tree, binding), part)[1]
    )


def agent_ledger(
    checkpoint: Checkpoint,
    binding: RecognizedAgent,
    own: Sidecar | None,
    known: Sidecar,
    tree: Tree,
    stated: Collection[str] = (),
) -> LedgerEntries:
    """Return the ledger of an agent, whose policy's sizes are those of its canonical tree.

    Args:
        checkpoint: what the agent was restored from.
        binding: the agent in it.
        own: the sidecar with the `stated` facts.
        known: all known facts.
        tree: the canonical tree.
        stated: names of the facts that a user gave.
    """
    part = binding.policy or binding.parts[0]
    sizes = layer_widths(tree, part)
    front = binding.fronts.get(part.component)
    if front is not None:
        sizes = (sum(stream.size for stream in front.streams), sizes[1])
    return build_ledger(checkpoint, binding, own, known, sizes, stated)


def with_names(binding: RecognizedAgent, tree: Tree, known: Sidecar | None) -> RecognizedAgent:
    """Return the binding with the variables that Keras numbers and the conversion's receipt lists.

    keras/src/saving/saving_lib.py: a model's own variables besides layers are `vars/0`, `vars/1`, ...
    """
    stored = set(tree.names.values())
    numbered: dict[str, str] = {}
    for name in tree.names.values():
        owner, _, number = f"/{name}".rpartition("/vars/")
        # Among several variables, numbers do not identify the one.
        if number == "0" and f"{owner}/vars/1".lstrip("/") not in stored:
            numbered[name] = owner
    if not numbered:
        return binding
    lone: dict[str, set[str]] = {}
    for rule in known.rules if known is not None else ():
        target = rule.get("target") if isinstance(rule, Mapping) else None
        above, _, last = str(target).rpartition("/")
        if last in _LONE:
            lone.setdefault(above, set()).add(last)
    named: dict[str, str] = {}
    for name, owner in numbered.items():
        own = [last for last in lone.get(f"policy{owner}", ()) if f"{owner}/{last}".lstrip("/") not in stored]
        if len(own) == 1:
            named[name] = own[0]

    def env(path: Path) -> Path:
        name = tree.names.get(path, "")
        ends = (own for own in named if f"/{name}".endswith(f"/{own}"))
        whole = max(ends, key=len, default=None)
        return path if whole is None else (*path[:-2], attr(named[whole]))

    if not named:
        return binding
    back = {env(path): path for path in tree}
    leaves = {
        env(path): replace(leaf, of=env(leaf.of)) if isinstance(leaf, Leaf) and leaf.of else leaf
        for path, leaf in tree.items()
    }
    agent = recognize_tree(Tree(leaves, containers=tree.containers), "", binding.layout)
    return agent.moved(lambda path: back[path]) if agent is not None else binding


def _broadcast_bounds(own: VerifiedSidecar, binding: RecognizedAgent, tree: Tree) -> VerifiedSidecar:
    """Return the facts with one pair of bounds per action, where one pair was given for all."""
    recorded = own.sidecar
    if (
        recorded is None
        or recorded.provenance.get("action_low") != GIVEN
        or recorded.action_low is None
        or recorded.action_high is None
        or len(recorded.action_low) != 1
        or schema.HALVES in binding.facts.lacks
    ):
        return own
    _, actions = policy_sizes(binding, tree)
    low, high = list(recorded.action_low) * actions, list(recorded.action_high) * actions
    return replace(own, sidecar=replace(recorded, action_low=low, action_high=high))


def policy_sizes(binding: RecognizedAgent, tree: Tree) -> tuple[int, int]:
    """Return the hidden layer and action counts of the policy, or of the networks without one."""
    acting = [part for part in binding.parts if part.acts] or list(binding.parts)
    hidden = max(max(sum(layer.kind == "dense" for layer in part.layers) - 1, 0) for part in acting)
    return hidden, layer_widths(tree, acting[0])[1]


def require_layers(binding: RecognizedAgent, recorded: Sidecar | None, file: str | None = None) -> None:
    """Raise FormatError if a sidecar has more activations than any network has hidden layers."""
    layers = [sum(1 for layer in part.layers if layer.kind == "dense") - 1 for part in binding.parts]
    most = max(layers, default=0)
    # An encoder before the layers may have separate activations.
    if (
        recorded is None
        or not recorded.activations
        or binding.fronts
        or len(recorded.activations) <= max(most, 1)
    ):
        return
    raise FormatError(
        "the sidecar lists more activations than the networks have hidden layers",
        file=file,
        path="activations",
        expected=f"at most {most}",
        found=str(len(recorded.activations)),
    )


def select_network_leaves(tree: Tree, binding: RecognizedAgent) -> Tree:
    """Return the canonical agent without optimizers, temperature and counters, as needed to run it."""
    moves = tuple(move for move in binding.moves.moves if move.target[0].value in RUN)
    return canonical_tree(tree, MoveList(moves))


def select_encoder_leaves(tree: Tree, binding: RecognizedAgent) -> Tree:
    """Return the tensors of the encoders, memories and batch norms of the agent's networks."""
    return canonical_tree(tree, MoveList(tuple(m for front in binding.fronts.values() for m in front.moves)))


@dataclass(frozen=True, slots=True)
class VerifiedSidecar:
    """The sidecar written for exactly these weights, if any.

    `sha256` is the checkpoint's digest if it had to be computed; `notes` name the sidecar's file if
    it is not the usual one. `stale` means that the sidecar belongs to other weights, which is
    possible only with `read_any_sidecar`.
    """

    sidecar: Sidecar | None = None
    sha256: str | None = None
    notes: tuple[str, ...] = ()
    stale: bool = False

    @property
    def origin(self) -> str | None:
        """The digest of the conversion's source, None if the sidecar records none."""
        source = self.sidecar.source if self.sidecar is not None else None
        return str(source["sha256"]) if source and source.get("sha256") else None


def _onnx_metadata(checkpoint: Checkpoint, stored: Sidecar | None) -> VerifiedSidecar:
    """Return what an ONNX model's sidecar adds to its graph: the environment and the bounds of its spaces.

    The graph computes what the other facts describe; which of them were left open, only the sidecar records.
    The digest recorded by an export is the file's.
    """
    if stored is None:
        return VerifiedSidecar()
    file = checkpoint.files[0]
    digests = (hashlib.sha256(file.read(0, file.size)).hexdigest(), digest_checkpoint(checkpoint).sha256)
    if stored.target_sha256 not in digests:
        raise _foreign_sidecar_error(checkpoint, stored, digests[0])
    names = ["env", "observation_space"]
    if stored.is_read("action_low") and not stored.origin("action_low").endswith(sidecar.OUTPUT_RANGE):
        names += ["action_low", "action_high"]
    kept = {name: getattr(stored, name) for name in names}
    stored_names = [*names, *(name for name in ("activations", "head") if stored.is_left_open(name))]
    provenance = {name: stored.provenance[name] for name in stored_names if name in stored.provenance}
    return VerifiedSidecar(Sidecar(stored.target_sha256, **kept, provenance=provenance), digests[1])


def read_verified_sidecar(checkpoint: Checkpoint, sha256: str | None = None) -> VerifiedSidecar:
    """Return the sidecar beside the checkpoint; weights are read if it exists and `sha256` is None.

    Raise ChecksumError if it belongs to other weights: its bounds and statistics are wrong for these,
    and continuing without them would give silently wrong results.
    """
    stored = sidecar.load_sidecar(checkpoint.path)
    if checkpoint.format == recognize.ONNX_FORMAT:
        return _onnx_metadata(checkpoint, stored)
    waiting = sidecar.find_pending_sidecars(checkpoint.path) if stored is None else {}
    if stored is None and not waiting:
        return VerifiedSidecar()
    sha256 = sha256 or digest_checkpoint(checkpoint).sha256
    if stored is not None and stored.target_sha256 == sha256:
        return VerifiedSidecar(stored, sha256)
    for file, pending in (waiting or sidecar.find_pending_sidecars(checkpoint.path)).items():
        if pending.target_sha256 == sha256:
            note = f"facts from {file}, the sidecar of an interrupted conversion (the digest matches)"
            return VerifiedSidecar(pending, sha256, (note,))
    if stored is None:
        return VerifiedSidecar(sha256=sha256)
    raise _foreign_sidecar_error(checkpoint, stored, sha256)


def read_any_sidecar(checkpoint: Checkpoint) -> VerifiedSidecar:
    """Return the sidecar beside the checkpoint, even if it belongs to other weights."""
    try:
        return read_verified_sidecar(checkpoint)
    except ChecksumError:
        return VerifiedSidecar(sidecar.load_sidecar(checkpoint.path), stale=True)


def _foreign_sidecar_error(checkpoint: Checkpoint, stored: Sidecar, sha256: str) -> ChecksumError:
    return ChecksumError(
        "the sidecar beside the checkpoint belongs to different weights",
        file=sidecar.sidecar_path(checkpoint.path),
        expected=f"weights with sha256 {stored.target_sha256[:12]}",
        found=sha256[:12],
        hint="remove it if the weights are right, or restore the checkpoint that it belongs to",
    )
