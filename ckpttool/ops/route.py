"""Decides how a checkpoint becomes another: copied, by its layout, or by the kinds of its layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ckpttool import plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError
from ckpttool.formats.probe import Format
from ckpttool.layouts import objects, variables
from ckpttool.layouts import plan as plans
from ckpttool.layouts.canonical import NORMALIZER, OPTIMIZED, Binding
from ckpttool.layouts.recognise import recognise
from ckpttool.layouts.td3_tf import SAVES
from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping import generic, inert
from ckpttool.mapping.plan import Plan, Settings, after, build
from ckpttool.mapping.report import Mapped, Move, Report
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import knowledge
from ckpttool.ops import part as parts
from ckpttool.ops.plain_names import AS_IT_IS, Prepared, Wanted, prepared
from ckpttool.ops.restore import canonical_tree
from ckpttool.ops.save import TargetKind
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Container, Tree

TENSORFLOW, NUMPY = "tensorflow", "numpy"
# The formats that store what a torch program handed them, and nothing of their own.
CONTAINERS = frozenset(("pytorch", "pytorch_legacy", "pytorch_tar", "pytorch_dcp", "safetensors", "sharded"))
# Those that pickle NumPy arrays, whichever framework trained them, among much else.
PICKLES = frozenset(("rllib",))
# The layouts of a library's own container, whose settings mean nothing elsewhere.
ENCLOSED = frozenset(("stable_baselines3", "rllib", "rllib_policy", "d3rlpy"))
_STATISTICS = "observation statistics are in the sidecar"


@dataclass(frozen=True, slots=True)
class Route:
    """A source tree's way to a target tree, and what the report says of it.

    `source` is the part that is converted, as it was prepared; `names` are its leaves' in the checkpoint and
    `stripped` what was removed from them; `settings` are what the target's sidecar tells of its optimizers,
    None if it is what the source's tells; `objects` what it tells of the objects that names hide.
    """

    source: Tree
    tree: Tree
    report: Report
    binding: Binding | None
    settings: Settings | None
    objects: Mapping[str, Any] | None = None
    names: Mapping[Path, str] = field(default_factory=dict)
    stripped: Sequence[Mapping[str, Any]] | None = None


def route(
    checkpoint: Checkpoint,
    kind: TargetKind,
    layout: str | None,
    known: Sidecar | None,
    part: str | None,
    wanted: Wanted = AS_IT_IS,
) -> Route:
    """Return how the checkpoint, or what lies below `part` in it, becomes a target of the kind.

    `known` is the sidecar that belongs to the checkpoint, `wanted` what is done to it first. Raise UsageError
    for a part that is not there, a layout that does not fit or cannot be written and names that cannot be
    restored, MappingError when nothing can be mapped.
    """
    tree, lost = (checkpoint.tree, ()) if part is None else parts.below(checkpoint.tree, part)
    ready = prepared(checkpoint.tree, tree, part, wanted, known)
    tree, lost = ready.tree, (*lost, *ready.lost)
    binding, read = _recognised(checkpoint, tree, layout, part)
    told = _told(known)
    plan, by_layout = _planned(checkpoint, tree, kind, layout, binding, known, part)
    if plan is not None and by_layout:
        plan = replace(plan, notes=(*plan.notes, *read))
    if by_layout and binding is not None:
        binding = _without_added(binding, tree, known)
    remembered = None
    if _named(kind) and not variables.by_name(middle := tree if plan is None else build(tree, plan)):
        to_names = variables.to_names(middle, told if plan is None else {**told, **plan.told})
        remembered = objects.remembered(middle, to_names)
        plan = to_names if plan is None else after(plan, to_names)
    if plan is None and kind.format == "pytorch":
        plan = inert.to_state_dicts(tree)
    if plan is None:
        moves = tuple(Move(path, path, KEEP) for path in tree)
        report = Report(_lines(ready, tree, moves), lost, notes=ready.notes)
        return Route(tree, tree, report, binding, None, None, ready.names, ready.stripped)
    target = build(tree, plan)
    used = {move.source for move in plan.moves} | set(plan.consumed)
    if by_layout and binding is not None:
        used |= binding.consumed
    unused = (*(ready.names[path] for path in tree if path not in used), *lost)
    lines = _lines(ready, target, plan.moves)
    report = Report(lines, unused, plan.missing, plan.assumed, (*ready.notes, *plan.notes))
    settings = plan.told if by_layout else None
    return Route(tree, target, report, binding, settings, remembered, ready.names, ready.stripped)


def _is_kept(source: str, target: str, tree: Tree, binding: Binding | None) -> bool:
    """Say whether all that a format holds goes into another as it is, under the same paths."""
    theirs, ours = _framework(source), _framework(target)
    if source == target or ours == NUMPY or {source, target} <= CONTAINERS:
        return True
    if theirs != NUMPY:
        # What a program kept for itself is an agent for others only if a layout knows it; variables by name
        # and objects are TensorFlow's own.
        return theirs == ours and (binding is None or (ours == TENSORFLOW and source not in PICKLES))
    # Arrays that belong to no framework have the paths that they have; their names tell who named them.
    if binding is not None:
        return binding.layout not in ENCLOSED and _framework_of(binding) == ours
    return ours == TENSORFLOW or not generic.to_torch(tree)


def _recognised(
    checkpoint: Checkpoint, tree: Tree, layout: str | None, part: str | None
) -> tuple[Binding | None, tuple[str, ...]]:
    """Return the agent that the tree is, with what files beside it say, and a note for each of those."""
    binding = recognise(tree, os.path.basename(checkpoint.path), layout)
    if part is not None and layout is None and binding is not None and not _is_whole(binding):
        binding = None  # one network of an agent is a model of its own
    return knowledge.with_companions(binding, checkpoint) if binding is not None else (None, ())


def _planned(
    checkpoint: Checkpoint,
    tree: Tree,
    kind: TargetKind,
    layout: str | None,
    binding: Binding | None,
    known: Sidecar | None,
    part: str | None,
) -> tuple[Plan | None, bool]:
    """Return the way to a target of the kind, None if everything stays as it is; and if a layout says it."""
    if kind.agent and binding is None:
        raise UsageError(
            f"only an agent can be written as {kind.layout}, and no layout recognises one here",
            file=checkpoint.path,
        )
    kept = _is_kept(checkpoint.format, kind.format, tree, binding)
    if layout is None and not kind.agent and kept:
        return _rewritten(tree, kind, known if part is None else None), False
    if binding is not None:
        return _agent(tree, _without_added(binding, tree, known), kind, _told(known), known), True
    return _by_kind(checkpoint, tree, _framework(kind.format)), False


def _framework_of(binding: Binding) -> str:
    return cast(str, plugins.find("layouts", binding.layout).load().TABLE.framework)


def _framework(name: str) -> str:
    return cast(Format, plugins.find("formats", name).load()).FRAMEWORK


def _is_whole(binding: Binding) -> bool:
    return len({part.component for part in binding.parts}) > 1


def _without_added(binding: Binding, tree: Tree, known: Sidecar | None) -> Binding:
    """Return the binding without a count of saves that a conversion added, as its receipt shows."""
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


def _named(kind: TargetKind) -> bool:
    return kind.options.get("graph") is False


def _told(known: Sidecar | None) -> Settings:
    """Return what the source's sidecar says of the optimizers."""
    if known is None:
        return {}
    epsilon = {"epsilon": known.epsilon["adam"]} if known.epsilon and "adam" in known.epsilon else {}
    stated = known.optimizers or {}
    return {name: {**epsilon, **stated.get(name, {})} for name in (*OPTIMIZED, *stated)}


def _rewritten(tree: Tree, kind: TargetKind, known: Sidecar | None) -> Plan | None:
    """Return the way to objects of what has none, None if the tree is that already or needs names."""
    if not kind.options.get("graph") or variables.is_graph(tree):
        return None
    plan = objects.again(tree, known.objects) if known is not None and known.objects is not None else None
    return plan or variables.to_graph(tree)


def _agent(tree: Tree, binding: Binding, kind: TargetKind, told: Settings, known: Sidecar | None) -> Plan:
    layout = plugins.find("layouts", kind.layout).load()
    if not plans.writes(layout):
        raise UsageError(f"layout {kind.layout} is not written yet")
    agent = canonical_tree(tree, binding.moves)
    facts = knowledge.merged(known, knowledge.of_files(binding, agent))
    added = knowledge.action_map(facts, agent)
    binding = _as_known(binding, facts)
    found = binding.moves
    first = Plan(found.moves, added, assumed=found.assumed, notes=found.notes)
    return _noted(after(first, layout.plan(binding, Tree({**agent, **added}), told)), facts)


def _noted(plan: Plan, facts: Sidecar) -> Plan:
    """Return the plan with a note where only the sidecar keeps what observations are normalised with."""
    held = any(move.target[0].value == NORMALIZER for move in plan.moves)
    # Some layouts say so themselves, and where their library keeps it.
    if facts.obs_norm is None or held or any(note.startswith(_STATISTICS) for note in plan.notes):
        return plan
    return replace(plan, notes=(*plan.notes, f"{_STATISTICS}: the target has no place for them"))


def _as_known(binding: Binding, known: Sidecar) -> Binding:
    """Return the binding with the action map and the activations that are known, whoever says so."""
    told = binding.facts
    names = tuple(known.activations) if known.activations else told.activations
    return replace(binding, facts=told._replace(head=str(known.head or told.head), activations=names))


def _by_kind(checkpoint: Checkpoint, tree: Tree, ours: str) -> Plan:
    if ours == TENSORFLOW:
        moves, labels = generic.to_tensorflow(tree)
        plan = Plan(moves, labels=labels)
    else:
        plan = Plan(generic.to_torch(tree), containers={(): Container("OrderedDict")})
    if not plan.moves:
        raise MappingError(
            "nothing in the checkpoint is a layer of a known kind",
            file=checkpoint.path,
            hint="ckpttool inspect shows what is in it",
        )
    return plan


def _lines(ready: Prepared, target: Tree, moves: tuple[Move, ...]) -> tuple[Mapped, ...]:
    lines = []
    for move in moves:
        before, there = ready.tree[move.source], target.get(move.target)
        shape_in = before.shape if isinstance(before, Leaf) else ()
        shape_out = there.shape if isinstance(there, Leaf) else ()
        names = [ready.rules.get(move.source), move.rule.name if move.rule != KEEP else None]
        done = ", ".join(name for name in names if name) or KEEP.name
        rule = done if there is not None else f"{done}, shared"
        lines.append(Mapped(ready.names[move.source], display(move.target), rule, shape_in, shape_out))
    return tuple(lines)
