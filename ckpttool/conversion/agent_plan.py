"""Plan the conversion of a recognized agent to a library's layout, with its statistics stored or folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ckpttool.conversion.targets import TargetKind
from ckpttool.core import plugins
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.source import Inline
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr
from ckpttool.evaluation import restore
from ckpttool.libraries import optimizer_settings, recognize, schema
from ckpttool.libraries.schema import (
    NORMALIZER,
    OPTIMIZERS,
    AgentNetwork,
    RecognizedAgent,
    add_targets,
    layer_widths,
)
from ckpttool.mapping.rules import KEEP, Move, Plan, Rule, Settings, canonical_tree, compose_plans, is_cut

_STATISTICS = "observation statistics are"


def plan_agent_conversion(
    tree: Tree,
    binding: RecognizedAgent,
    kind: TargetKind,
    settings: Settings,
    known: Sidecar | None,
    *,
    fold: bool = False,
) -> Plan:
    """Return the plan to the kind's layout; raise UsageError if it is not writable.

    Errors of the layout's plan are passed on.

    Args:
        tree: the source.
        binding: the agent in it.
        kind: the target's format and layout.
        settings: optimizer settings known from elsewhere.
        known: the source's sidecar.
        fold: let the first layers apply the observation statistics.
    """
    from ckpttool.libraries import optimizers_write

    layout = plugins.find("layouts", kind.layout).load()
    if not recognize.can_write(layout):
        raise UsageError(f"writing layout {kind.layout} is not supported yet")
    agent = canonical_tree(tree, binding.moves)
    facts = restore.merge_metadata(known, restore.read_metadata(binding, agent))
    restore.require_understood(binding, facts)
    added = restore.action_map(facts, agent)
    binding = _with_known_facts(binding, facts)
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    if fold:
        folded = fold_statistics(binding, agent, facts)
        consumed = tuple(move.source for move in binding.moves.moves if move.target in folded.statistics)
        binding, agent, notes = folded.binding, folded.agent, (folded.note,)
        added = {**added, **folded.added}
        facts = replace(facts, obs_norm=None)
    moves = binding.moves
    binding, copies = add_targets(binding, agent)
    added = {**added, **copies}
    first = Plan(moves.moves, added, assumed=moves.assumed, consumed=consumed, notes=(*moves.notes, *notes))
    try:
        second = cast(Plan, getattr(layout, kind.plan)(binding, Tree({**agent, **added}), settings))
    except UnsupportedError as error:
        if kind.agent and error.hint is None:
            error.hint = "use --to torch or --to tf, which write every recognised agent"
        raise
    epsilon_notes = optimizers_write.list_epsilon_notes(
        agent, optimizer_settings.layout_framework(binding.layout), layout.TABLE.framework
    )
    if any(move.source in copies for move in second.moves):
        second = replace(second, assumed=(*second.assumed, _copied_targets_note(binding, copies)))
    plan = compose_plans(
        first, _with_statistics_note(replace(second, notes=(*second.notes, *epsilon_notes)), facts, kind)
    )
    own = getattr(layout, "OBSERVATION_SPACE", ()) if binding.layout == kind.layout else ()
    spaces = [path for path in own if path in tree]
    return replace(plan, moves=(*plan.moves, *(Move(path, path, KEEP) for path in spaces)))


def _copied_targets_note(binding: RecognizedAgent, copies: Iterable[Path]) -> str:
    """Return a sentence that the targets were not stored, and how a program handles that."""
    names = " and ".join(dict.fromkeys(str(path[0].value) for path in copies))
    loads = getattr(plugins.find("layouts", binding.layout).load(), "COPIES_TARGETS", None)
    owner = f", as {loads} creates them" if loads is not None else ""
    return f"{names}: copies of the online networks{owner}, because the source stores no targets"


def _with_statistics_note(plan: Plan, facts: Sidecar, kind: TargetKind) -> Plan:
    """Return the plan with a note if only the sidecar stores the observation statistics.

    A library's own format without them is a different agent to the library: they are missing then.
    """
    folded = any(move.source[0].value == NORMALIZER for move in plan.moves)
    lines = [note for note in plan.notes if note.startswith(_STATISTICS)]
    if (
        facts.obs_norm is None
        or folded
        or (lines and not lines[0].startswith(f"{_STATISTICS} in the sidecar"))
    ):
        return plan
    notes = () if lines else (f"{_STATISTICS} in the sidecar: the target cannot store them",)
    # A limit alone is a setting of some libraries' programs, stored with their training settings.
    limit = not any(facts.obs_norm["mean"]) and all(var == 1 for var in facts.obs_norm["var"])
    if not kind.agent or limit:
        return replace(plan, notes=(*plan.notes, *notes))
    hint = "use --fold-normalizer to fold the observation statistics into the first layers"
    return replace(plan, missing=(*plan.missing, NORMALIZER), notes=(*plan.notes, *notes, hint))


def _with_known_facts(binding: RecognizedAgent, known: Sidecar) -> RecognizedAgent:
    """Return the binding with all known facts that a target can store, from any origin."""
    layer_facts = binding.facts
    facts = layer_facts._replace(
        head=str(known.head or layer_facts.head),
        activations=tuple(known.activations) if known.activations else layer_facts.activations,
        network_activations={
            component: tuple(names) for component, names in (known.network_activations or {}).items()
        },
        observation_space=known.observation_space,
        choices=schema.known_choices(known) or layer_facts.choices,
        distribution=schema.known_distribution(known, layer_facts),
        norm=restore.known_statistics(known) or layer_facts.norm,
        epsilon=known.norm_epsilon(binding.norm_kind, layer_facts.epsilon),
    )
    return replace(binding, facts=facts)


def without_save_count(binding: RecognizedAgent, tree: Tree, known: Sidecar | None) -> RecognizedAgent:
    """Return the binding without a save count that a conversion added, according to its receipt."""
    from ckpttool.libraries.write import SAVES

    if known is None or known.source is None:
        return binding
    mapped = {str(rule.get("target")) for rule in known.rules if isinstance(rule, Mapping)}
    added = {
        move.source
        for move in binding.moves.moves
        if move.target == SAVES and tree.names[move.source] not in mapped
    }
    kept = tuple(move for move in binding.moves.moves if move.source not in added)
    return replace(
        binding, moves=replace(binding.moves, moves=kept), consumed=binding.consumed | frozenset(added)
    )


class StatisticsFold(NamedTuple):
    """The rule of a tensor changed by its layer's share of the statistics."""

    folded: Leaf
    name: str = "fold statistics"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:  # noqa: ARG002  # it was computed before
        """Return the new tensor."""
        return self.folded

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Raise MappingError: the target stores the statistics nowhere else."""
        raise MappingError("folded statistics cannot be separated again", path=getattr(source, "key", None))


@dataclass(frozen=True, slots=True)
class FoldedAgent:
    """An agent without statistics that computes the same as the one with them.

    `statistics` are the canonical paths of the statistics, `added` biases that the layers did not have.
    """

    binding: RecognizedAgent
    agent: Tree
    added: Mapping[Path, Leaf | ValueLeaf]
    statistics: frozenset[Path]
    note: str


def fold_statistics(binding: RecognizedAgent, agent: Tree, facts: Sidecar) -> FoldedAgent:
    """Return the canonical agent with its statistics folded into the layers that receive observations.

    Raise UsageError without statistics, UnsupportedError where they cannot be folded exactly. `W ((x - mean)
    / s) + b` is `(W / s) x + (b - W (mean / s))`. Clipping the normalised observations is not linear, so
    statistics with a limit are rejected. Optimizer moments belong to the original weights: for the changed
    layers they cannot be computed (a second moment of a sum is not that of its terms), so optimizers are not
    converted.
    """
    norm = _foldable_statistics(binding, facts)
    mean, var = (np.asarray(norm[name], np.float64) for name in ("mean", "var"))
    spread = np.sqrt(var + float(norm.get("epsilon", 1e-8)))
    folded: dict[Path, Leaf] = {}
    for part in binding.parts:
        folded |= _first_layer(part, agent, mean, spread)
    gone = {path for path in agent if path[0].value in (*OPTIMIZERS, NORMALIZER)}
    states = any(path[0].value in OPTIMIZERS for path in gone)
    statistics_paths = frozenset(path for path in gone if path[0] == attr(NORMALIZER))
    if any(move.target in folded and is_cut(move.rule) for move in binding.moves.moves):
        raise UnsupportedError(
            "cannot fold statistics into the first layer, because one tensor stores it together with others"
        )
    kept = tuple(
        replace(move, rule=StatisticsFold(folded[move.target])) if move.target in folded else move
        for move in binding.moves.moves
        if move.target not in gone
    )
    added = {path: leaf for path, leaf in folded.items() if path not in agent}
    bare = replace(
        binding,
        moves=replace(binding.moves, moves=kept),
        facts=binding.facts._replace(norm=None),
    )
    leaves = {path: leaf for path, leaf in agent.items() if path not in gone}
    note = f"the statistics of {len(mean)} observations were folded into the first layers"
    more = (
        "; optimizers were not converted, because their moments belong to the original weights"
        if states
        else ""
    )
    return FoldedAgent(bare, Tree({**leaves, **folded}), added, statistics_paths, note + more)


def _foldable_statistics(binding: RecognizedAgent, facts: Sidecar) -> Mapping[str, Any]:
    norm = facts.obs_norm
    if norm is None:
        raise UsageError(
            "no observation statistics to fold", hint="use --obs-norm FILE to provide statistics"
        )
    if norm.get("clip") is not None:
        raise UnsupportedError(
            "the normalised observations are clipped, which no layer can do",
            found=f"a clip limit of {norm['clip']:g}",
            hint="use --obs-norm with statistics without `clip`, if no observation reaches the limit",
        )
    if binding.fronts:
        raise UnsupportedError(
            "statistics can only be folded into dense layers, but an encoder comes before them"
        )
    return norm


def _first_layer(part: AgentNetwork, agent: Tree, mean: np.ndarray, spread: np.ndarray) -> dict[Path, Leaf]:
    """Return the kernel and bias for raw observations, none for a network with another input."""
    if part.layers[0].kind != "dense":
        raise UnsupportedError(
            f"{part.title} starts with a normalisation layer, into which nothing can be folded"
        )
    if part.streams:
        raise UnsupportedError(f"{part.title} encodes observation and action separately: nothing is folded")
    inputs, _ = layer_widths(agent, part)
    if inputs < len(mean) or (inputs != len(mean) and part.component.partition("_")[0] != "critic"):
        raise UnsupportedError(
            f"the input of {part.title} is not the observations",
            expected=f"{len(mean)} inputs",
            found=str(inputs),
        )
    paths = [schema.canonical_weight_path(part, 0, name) for name in ("kernel", "bias")]
    kernel, bias = (agent.get(path) for path in paths)
    if not isinstance(kernel, Leaf):
        raise UnsupportedError(f"{part.title} has no kernel to fold statistics into")
    weights = kernel.array().astype(np.float64)
    start = bias.array().astype(np.float64) if isinstance(bias, Leaf) else np.zeros(weights.shape[1])
    # A critic's actions come after the observations, and are not normalised.
    rows = weights[: len(mean)] / spread[:, None]
    layers = {
        paths[0]: (kernel, np.concatenate([rows, weights[len(mean) :]])),
        paths[1]: (bias if isinstance(bias, Leaf) else kernel, start - mean @ rows),
    }
    return {path: _folded_leaf(leaf, numbers) for path, (leaf, numbers) in layers.items()}


def _folded_leaf(leaf: Leaf, numbers: np.ndarray) -> Leaf:
    if leaf.dtype not in ("float32", "float64"):
        raise UnsupportedError(f"cannot fold statistics into weights of type {leaf.dtype}", path=leaf.key)
    data = np.ascontiguousarray(numbers, leaf.dtype).tobytes()
    return replace(leaf, shape=numbers.shape, source=Inline(data))
