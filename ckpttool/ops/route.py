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
from ckpttool.layouts import objects, variable_names, variables
from ckpttool.layouts import plan as plans
from ckpttool.layouts.canonical import NORMALIZER, Binding
from ckpttool.layouts.optimizers import differences
from ckpttool.layouts.recognise import recognise
from ckpttool.layouts.td3_tf import SAVES
from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping import by_rules, generic, inert
from ckpttool.mapping.layers import Choice
from ckpttool.mapping.plan import Plan, Settings, after, build
from ckpttool.mapping.report import Mapped, Move, Report
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import knowledge, optimizer_facts, undone
from ckpttool.ops import part as parts
from ckpttool.ops.optimizer_options import NOTHING_STATED, Stated
from ckpttool.ops.plain_names import AS_IT_IS, Prepared, Wanted, prepared
from ckpttool.ops.restore import canonical_tree
from ckpttool.ops.save import TARGETS, TargetKind
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

TENSORFLOW, NUMPY = "tensorflow", "numpy"
# The formats that store what a torch program handed them, and nothing of their own.
CONTAINERS = frozenset(("pytorch", "pytorch_legacy", "pytorch_tar", "pytorch_dcp", "safetensors", "sharded"))
# Those that pickle NumPy arrays, whichever framework trained them, among much else.
PICKLES = frozenset(("rllib",))
# The layouts of a library's own container, whose settings mean nothing elsewhere.
ENCLOSED = frozenset(("stable_baselines3", "rllib", "rllib_policy", "d3rlpy"))
_STATISTICS = "observation statistics are"


@dataclass(frozen=True, slots=True)
class Route:
    """A source tree's way to a target tree, and what the report says of it.

    `source` is the part that is converted, as it was prepared; `names` are its leaves' in the checkpoint and
    `stripped` what was removed from them; `settings` are what the target's sidecar tells of its optimizers,
    None if it is what the source's tells; `objects` what it tells of the objects that names hide. `moves`
    say where what went, and `whole` whether all of a checkpoint did, under the names that it had there.
    """

    source: Tree
    tree: Tree
    report: Report
    binding: Binding | None
    settings: Settings | None
    objects: Mapping[str, Any] | None = None
    names: Mapping[Path, str] = field(default_factory=dict)
    stripped: Sequence[Mapping[str, Any]] | None = None
    moves: tuple[Move, ...] = ()
    whole: bool = False
    said: Mapping[str, str] = field(default_factory=dict)


def route(
    checkpoint: Checkpoint,
    kind: TargetKind,
    layout: str | None,
    known: Sidecar | None,
    part: str | None,
    wanted: Wanted = AS_IT_IS,
    rules: RuleFile | None = None,
    stated: Stated = NOTHING_STATED,
    given: Sequence[Choice] = (),
) -> Route:
    """Return how the checkpoint, or what lies below `part` in it, becomes a target of the kind.

    `known` is the sidecar that belongs to the checkpoint, `wanted` what is done to it first, `rules` the
    user's own, `stated` and `given` what was said of optimizers and layers. Raise UsageError for a part that
    is not there, a layout that does not fit or cannot be written and names that cannot be restored,
    MappingError when nothing can be mapped.
    """
    tree, lost = (checkpoint.tree, ()) if part is None else parts.below(checkpoint.tree, part)
    ready = prepared(checkpoint.tree, tree, part, wanted, known)
    tree, lost = ready.tree, (*lost, *ready.lost)
    binding, read = _recognised(checkpoint, tree, layout, part)
    whole = part is None and wanted == AS_IT_IS
    plain = not (layout or rules or any(stated) or given)
    back = _back(checkpoint, kind, known, ready) if whole and plain else None
    if isinstance(back, Route):
        return replace(back, binding=binding)
    if back is not None:
        ready = ready._replace(notes=(*ready.notes, back))
    known = stated.into(known, binding, tree)
    ready = ready._replace(notes=(*ready.notes, *stated.notes(known)))
    told = optimizer_facts.settings(known)
    if rules is None:
        plan, by_layout = _planned(checkpoint, tree, kind, layout, binding, known, part, given)
    else:
        plan, by_layout, binding = _by_rules(checkpoint, tree, kind, rules, given), False, None
    if plan is not None and by_layout:
        plan = replace(plan, notes=(*plan.notes, *read))
    if by_layout and binding is not None:
        binding = _without_added(binding, tree, known)
    remembered = None
    if _named(kind) and not variables.by_name(middle := tree if plan is None else build(tree, plan)):
        to_names = variable_names.to_names(middle, told if plan is None else {**told, **plan.told})
        remembered = objects.remembered(middle, to_names)
        plan = to_names if plan is None else after(plan, to_names)
    if plan is None and kind.format == "pytorch":
        plan = inert.to_state_dicts(tree)
    if plan is None:
        moves = tuple(Move(path, path, KEEP) for path in tree)
        report = Report(mapped(ready, tree, moves), lost, notes=ready.notes)
        names, stripped, whole = ready.names, ready.stripped, whole and kind.format != checkpoint.format
        return Route(
            tree,
            tree,
            report,
            binding,
            _given(stated, known),
            None,
            names,
            stripped,
            moves,
            whole,
            _said(known),
        )
    target = build(tree, plan)
    used = {move.source for move in plan.moves} | set(plan.consumed)
    if by_layout and binding is not None:
        used |= binding.consumed
    used -= set(plan.partly)
    unused = (*(ready.names[path] for path in tree if path not in used), *lost)
    lines = mapped(ready, target, plan.moves)
    report = Report(lines, unused, plan.missing, plan.assumed, (*ready.notes, *plan.notes))
    settings = plan.told if by_layout else _given(stated, known)
    names, stripped = ready.names, ready.stripped
    return Route(
        tree, target, report, binding, settings, remembered, names, stripped, plan.moves, whole, _said(known)
    )


def _given(stated: Stated, known: Sidecar | None) -> Settings | None:
    """Return the settings with those that were stated, None if none was."""
    return known.optimizers if any(stated) and known is not None else None


def _said(known: Sidecar | None) -> Mapping[str, str]:
    """Return where the statements about optimizers are from, for the receipt."""
    told = known.provenance if known is not None else {}
    return {name: told[name] for name in ("l2", "optimizer") if name in told}


def _back(
    checkpoint: Checkpoint, kind: TargetKind, known: Sidecar | None, ready: Prepared
) -> Route | str | None:
    """Return the way back to what the checkpoint was converted from, None if the target is not that.

    A text says why there is no way although it is.
    """
    if known is None or known.undo is None or not _returns(known, kind):
        return None
    found = undone.undone(ready.tree, known.undo, checkpoint.path)
    if found.tree is None:
        return found.note
    target = found.tree
    if kind.state and _named(kind) != variables.by_name(target):
        return None
    lines = mapped(ready, target, found.moves)
    said = f"undone: every entry is as it was in {(known.source or {}).get('path')}"
    report = Report(lines, notes=(*ready.notes, said))
    return Route(ready.tree, target, report, None, None, None, ready.names, moves=found.moves, whole=True)


def _returns(known: Sidecar, kind: TargetKind) -> bool:
    """Say whether the target is what the sidecar's checkpoint was converted from, by format and layout."""
    before, layout = (known.source or {}).get("format"), (known.source or {}).get("layout")
    if before != kind.format and not {before, kind.format} <= CONTAINERS:
        return False
    # A library's own form is asked for by the library's name.
    others = {each.layout for each in TARGETS.values() if each.agent}
    return layout == kind.layout or (not kind.agent and layout not in others)


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
    return ours == TENSORFLOW or not generic.to_torch(tree).moves


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
    given: Sequence[Choice],
) -> tuple[Plan | None, bool]:
    """Return the way to a target of the kind, None if everything stays as it is; and if a layout says it."""
    if kind.agent and binding is None:
        raise UsageError(
            f"only an agent can be written as {kind.layout}, and no layout recognises one here",
            file=checkpoint.path,
        )
    kept = layout is None and not kind.agent and _is_kept(checkpoint.format, kind.format, tree, binding)
    if given and (kept or binding is not None):
        why = "stays as it is" if kept or binding is None else f"goes by its layout, {binding.layout}"
        raise UsageError(
            f"--kind and --flatten say how layers are mapped, and this {why}", file=checkpoint.path
        )
    if kept:
        return _rewritten(tree, kind, known if part is None else None), False
    if binding is not None:
        return _agent(
            tree, _without_added(binding, tree, known), kind, optimizer_facts.settings(known), known
        ), True
    return _by_kind(checkpoint, tree, _framework(kind.format), given), False


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
    second = cast(Plan, getattr(layout, kind.plan)(binding, Tree({**agent, **added}), told))
    said = differences.notes(agent, _framework_of(binding), layout.TABLE.framework)
    return after(first, _noted(replace(second, notes=(*second.notes, *said)), facts))


def _noted(plan: Plan, facts: Sidecar) -> Plan:
    """Return the plan with a note where only the sidecar keeps what observations are normalised with."""
    held = any(move.source[0].value == NORMALIZER for move in plan.moves)
    # Some layouts say so themselves, and where their library keeps it.
    if facts.obs_norm is None or held or any(note.startswith(_STATISTICS) for note in plan.notes):
        return plan
    note = f"{_STATISTICS} in the sidecar: the target has no place for them"
    return replace(plan, notes=(*plan.notes, note))


def _as_known(binding: Binding, known: Sidecar) -> Binding:
    """Return the binding with the action map, activations, epsilon and statistics known, whoever says so."""
    told = binding.facts
    facts = told._replace(
        head=str(known.head or told.head),
        activations=tuple(known.activations) if known.activations else told.activations,
        norm=knowledge.norm(known) or told.norm,
        epsilon=(known.epsilon or {}).get("layer_norm", told.epsilon),
    )
    return replace(binding, facts=facts)


def _by_rules(
    checkpoint: Checkpoint, tree: Tree, kind: TargetKind, rules: RuleFile, given: Sequence[Choice]
) -> Plan:
    """Return what the user's rules say, and of what they do not name what the file says of the rest."""
    if kind.agent:
        raise UsageError(f"rules say names, and those of {kind.layout} are its library's", file=rules.path)
    found = by_rules.applied(rules, tree)
    ours = _framework(kind.format)
    plan = by_rules.plan(rules, found, objects=ours == TENSORFLOW)
    rest = Tree({path: tree[path] for path in found.rest}, {}, tree.containers)
    if rules.rest == "keep":
        kept = tuple(Move(path, path, KEEP) for path in rest)
        return replace(plan, moves=(*plan.moves, *kept))
    if rules.rest == "kinds" and found.rest:
        more = _by_kind(checkpoint, rest, ours, given)
        return replace(
            more,
            moves=(*plan.moves, *more.moves),
            added={**plan.added, **more.added},
            labels={**plan.labels, **more.labels},
            consumed=(*plan.consumed, *more.consumed),
            notes=(*plan.notes, *more.notes),
        )
    return plan


def _by_kind(checkpoint: Checkpoint, tree: Tree, ours: str, given: Sequence[Choice]) -> Plan:
    plan = generic.to_tensorflow(tree, given) if ours == TENSORFLOW else generic.to_torch(tree, given)
    if not plan.moves and not plan.notes:
        raise MappingError(
            "nothing in the checkpoint is a layer of a known kind",
            file=checkpoint.path,
            hint="ckpttool inspect shows what is in it",
        )
    return plan


def mapped(ready: Prepared, target: Tree, moves: tuple[Move, ...]) -> tuple[Mapped, ...]:
    """Return the report's line for each move."""
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
