"""How an agent becomes one of another layout: through the canonical tree, with all that is known of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from ckpttool import plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError
from ckpttool.formats import onnx
from ckpttool.layouts import plan as plans
from ckpttool.layouts import recognise
from ckpttool.layouts.canonical import NORMALIZER, Binding, with_targets
from ckpttool.layouts.optimizers import differences
from ckpttool.layouts.td3_tf import SAVES
from ckpttool.leaf import Path
from ckpttool.mapping.plan import Plan, Settings, after
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import folding, knowledge
from ckpttool.ops.restore import canonical_tree, with_records
from ckpttool.ops.targets import TargetKind
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

_STATISTICS = "observation statistics are"


def recognised(
    checkpoint: Checkpoint,
    tree: Tree,
    layout: str | None,
    part: str | None,
    known: Binding | None = None,
) -> tuple[Binding | None, tuple[str, ...]]:
    """Return the agent that the tree is, with what files beside it say, and a note for each of those.

    `known` is the agent of the whole checkpoint, where somebody has recognised it already.
    """
    if checkpoint.format == onnx.NAME:
        return recognise.recognised(checkpoint, layout), ()
    same = known is not None and layout is None and tree is checkpoint.tree
    binding = known if same else recognise.recognise(tree, os.path.basename(checkpoint.path), layout)
    if part is not None and layout is None and binding is not None and not _is_whole(binding):
        binding = None  # one network of an agent is a model of its own
    if binding is None:
        return None, ()
    binding, notes = knowledge.with_companions(binding, checkpoint)
    return with_records(binding, tree, checkpoint), notes


def plan(
    tree: Tree,
    binding: Binding,
    kind: TargetKind,
    told: Settings,
    known: Sidecar | None,
    *,
    fold: bool = False,
) -> Plan:
    """Return the way to the kind's layout; raise UsageError if that is not written, and what its plan raises.

    `told` are settings of the optimizers that are known from elsewhere. With `fold` the first layers compute
    what the statistics of observations do.
    """
    layout = plugins.find("layouts", kind.layout).load()
    if not plans.writes(layout):
        raise UsageError(f"layout {kind.layout} is not written yet")
    agent = canonical_tree(tree, binding.moves)
    facts = knowledge.merged(known, knowledge.of_files(binding, agent))
    added = knowledge.action_map(facts, agent)
    binding = _as_known(binding, facts)
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    if fold:
        folded = folding.folded(binding, agent, facts)
        consumed = tuple(move.source for move in binding.moves.moves if move.target in folded.taken)
        binding, agent, notes = folded.binding, folded.agent, (folded.note,)
        added = {**added, **folded.added}
        facts = replace(facts, obs_norm=None)
    found = binding.moves
    binding, copies = with_targets(binding, agent)
    added = {**added, **copies}
    first = Plan(found.moves, added, assumed=found.assumed, consumed=consumed, notes=(*found.notes, *notes))
    second = cast(Plan, getattr(layout, kind.plan)(binding, Tree({**agent, **added}), told))
    said = differences.notes(agent, framework_of(binding), layout.TABLE.framework)
    if any(move.source in copies for move in second.moves):
        second = replace(second, assumed=(*second.assumed, _copied(binding, copies)))
    made = after(first, _noted(replace(second, notes=(*second.notes, *said)), facts, kind))
    own = getattr(layout, "OBSERVATION_SPACE", ()) if binding.layout == kind.layout else ()
    spaces = [path for path in own if path in tree]
    return replace(made, moves=(*made.moves, *(Move(path, path, KEEP) for path in spaces)))


def _copied(binding: Binding, copies: Iterable[Path]) -> str:
    """Return the sentence that the targets were not stored, and what a program does about that."""
    names = " and ".join(dict.fromkeys(str(path[0].value) for path in copies))
    loads = getattr(plugins.find("layouts", binding.layout).load(), "COPIES_TARGETS", None)
    whose = f", as {loads} makes them" if loads is not None else ""
    return f"{names}: copies of the online networks{whose}; the source stores no targets"


def _noted(plan: Plan, facts: Sidecar, kind: TargetKind) -> Plan:
    """Return the plan with a note where only the sidecar keeps what observations are normalised with.

    A library's own form that lacks them is another agent to the library: they are missing then.
    """
    held = any(move.source[0].value == NORMALIZER for move in plan.moves)
    said = [note for note in plan.notes if note.startswith(_STATISTICS)]
    if facts.obs_norm is None or held or (said and not said[0].startswith(f"{_STATISTICS} in the sidecar")):
        return plan
    notes = () if said else (f"{_STATISTICS} in the sidecar: the target has no place for them",)
    # A limit alone is a setting of some libraries' programs, which they keep with those of training.
    limit = not any(facts.obs_norm["mean"]) and all(var == 1 for var in facts.obs_norm["var"])
    if not kind.agent or limit:
        return replace(plan, notes=(*plan.notes, *notes))
    hint = "--fold-normalizer makes the statistics of observations a part of the first layers"
    return replace(plan, missing=(*plan.missing, NORMALIZER), notes=(*plan.notes, *notes, hint))


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


def without_added(binding: Binding, tree: Tree, known: Sidecar | None) -> Binding:
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


def framework_of(binding: Binding) -> str:
    """Return the framework whose names the binding's layout has."""
    return cast(str, plugins.find("layouts", binding.layout).load().TABLE.framework)


def _is_whole(binding: Binding) -> bool:
    return len({part.component for part in binding.parts}) > 1
