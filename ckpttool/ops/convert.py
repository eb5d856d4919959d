"""`convert`: map a checkpoint to another framework, write it, read it back, and leave a receipt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpttool import plugins, sidecar
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts import plan as plans
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognise
from ckpttool.leaf import Leaf, Path, ValueLeaf, display
from ckpttool.mapping import generic
from ckpttool.mapping.report import Mapped, Move, Report
from ckpttool.mapping.rules import KEEP, chain
from ckpttool.ops import receipt, save
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import canonical_tree, own_sidecar
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Alias, Container, Tree


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did; `digest` is the target's (None for a dry run or a refusal).

    `written` says whether the target is there now.
    """

    source: str
    target: str
    report: Report
    digest: str | None
    written: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "source": self.source,
            "target": self.target,
            "mapped": [
                {
                    "source": line.source,
                    "target": line.target,
                    "rule": line.rule,
                    "shape_in": list(line.shape_in),
                    "shape_out": list(line.shape_out),
                }
                for line in self.report.mapped
            ],
            "unused": list(self.report.unused),
            "missing": list(self.report.missing),
            "assumed": list(self.report.assumed),
            "notes": list(self.report.notes),
            "digest": self.digest,
            "written": self.written,
        }


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A source tree's way to a target tree, and what the report says of it."""

    tree: Tree
    report: Report
    binding: Binding | None


def convert(
    source: str,
    target: str,
    *,
    to: str | None = None,
    layout: str | None = None,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
    progress: Progress = silent,
) -> Conversion:
    """Convert the checkpoint at `source` into a new file `target`, with its sidecar beside it.

    Nothing is written when something is unmapped (unless `allow_missing`) or on `dry_run`. The target is
    written beside, read back, compared and then renamed; the same conversion gives the same bytes.
    """
    kind = save.target_kind(target, to)
    checkpoint = open_checkpoint(source)
    if not dry_run:
        save.require_free(target, kind, checkpoint.files, force=force)
        save.require_free(sidecar.beside(target), kind, checkpoint.files, force=force)
    own = own_sidecar(checkpoint)
    mapping = _map(checkpoint, kind, layout, own.sidecar)
    report = replace(mapping.report, notes=(*mapping.report.notes, *own.notes))
    if dry_run or not (report.complete or allow_missing):
        return Conversion(checkpoint.path, target, report, None, written=False)
    written = save.write(
        mapping.tree,
        target,
        kind,
        receipt=lambda digest: receipt.receipt(checkpoint, report, mapping.binding, own, digest),
        force=force,
        sync=sync,
        progress=progress,
    )
    return Conversion(checkpoint.path, target, report, written.sha256, written=True)


def _map(
    checkpoint: Checkpoint, kind: save.TargetKind, layout: str | None, known: Sidecar | None
) -> _Mapping:
    tree = checkpoint.tree
    binding = recognise(tree, os.path.basename(checkpoint.path), layout)
    if checkpoint.format == kind.format and layout is None:
        return _same_format(tree, binding)
    if binding is not None:
        return _agent(tree, binding, kind.layout, known)
    moves = generic.to_torch(tree)
    if not moves:
        raise MappingError(
            "nothing in the checkpoint is a layer of a known kind",
            file=checkpoint.path,
            hint="ckpttool inspect shows what is in it",
        )
    target = _moved(tree, moves, {}, {(): Container("OrderedDict")})
    return _Mapping(target, Report(_lines(tree, target, moves), _unused(tree, moves)), None)


def _same_format(tree: Tree, binding: Binding | None) -> _Mapping:
    moves = tuple(Move(path, path, KEEP) for path in tree)
    return _Mapping(tree, Report(_lines(tree, tree, moves)), binding)


def _agent(tree: Tree, binding: Binding, layout_name: str, known: Sidecar | None) -> _Mapping:
    layout = plugins.find("layouts", layout_name).load()
    if not plans.writes(layout):
        raise UsageError(f"layout {layout_name} is not written yet")
    agent = canonical_tree(tree, binding.moves)
    told = {"epsilon": known.epsilon["adam"]} if known and known.epsilon and "adam" in known.epsilon else {}
    plan: plans.Plan = layout.plan(binding, agent, told)
    first = {move.target: move for move in reversed(binding.moves.moves)}
    moves = tuple(
        Move(first[m.source].source, m.target, chain(first[m.source].rule, m.rule)) for m in plan.moves
    )
    target = _moved(tree, moves, plan.added, plan.containers)
    report = Report(
        _lines(tree, target, moves),
        _unused(tree, moves, binding.consumed | {first[path].source for path in plan.consumed}),
        plan.missing,
        (*binding.moves.assumed, *plan.assumed),
        (*binding.moves.notes, *plan.notes),
    )
    return _Mapping(target, report, binding)


def _moved(
    tree: Tree, moves: tuple[Move, ...], added: Mapping[Path, ValueLeaf], containers: Mapping[Path, Container]
) -> Tree:
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases: dict[Path, tuple[Alias, ...]] = {}
    first: dict[tuple[Path, str], Path] = {}
    for move in moves:
        changed = move.rule.leaf(tree[move.source])
        before = first.setdefault((move.source, move.rule.name), move.target)
        # Parameters that share storage go on sharing it; a step that torch keeps per parameter does not.
        if before is not move.target and isinstance(changed, Leaf) and changed.role == "parameter":
            aliases[before] = (*aliases.get(before, ()), Alias(move.target, display(move.target)))
        else:
            leaves[move.target] = _plain(changed)
    return Tree(leaves | dict(added), aliases, containers)


def _plain(leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    # A state_dict holds plain tensors: what is a trained parameter is the module's knowledge.
    return replace(leaf, of=None, trainable=None) if isinstance(leaf, Leaf) else leaf


def _lines(tree: Tree, target: Tree, moves: tuple[Move, ...]) -> tuple[Mapped, ...]:
    lines = []
    for move in moves:
        before, after = tree[move.source], target.get(move.target)
        shape_in = before.shape if isinstance(before, Leaf) else ()
        shape_out = after.shape if isinstance(after, Leaf) else ()
        rule = move.rule.name if after is not None else f"{move.rule.name}, shared"
        lines.append(Mapped(tree.names[move.source], display(move.target), rule, shape_in, shape_out))
    return tuple(lines)


def _unused(tree: Tree, moves: tuple[Move, ...], consumed: frozenset[Path] = frozenset()) -> tuple[str, ...]:
    used = {move.source for move in moves} | consumed
    return tuple(tree.names[path] for path in tree if path not in used)
