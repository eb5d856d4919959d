"""`convert --like`: fill the user's own model from a checkpoint, write what it loads, and have it loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import plugins, sidecar
from ckpttool.agents.skeleton.beside import Like
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError, some
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts import variables
from ckpttool.mapping.filling import fill
from ckpttool.mapping.fitting import STATES
from ckpttool.mapping.layers import Choice, layers
from ckpttool.mapping.matches import Ambiguity, Filling, Match
from ckpttool.mapping.report import Report
from ckpttool.mapping.skeleton import Skeleton
from ckpttool.ops import part as parts
from ckpttool.ops import receipt, save
from ckpttool.ops.digest import Digest
from ckpttool.ops.plain_names import Prepared, Wanted, prepared
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import own_sidecar
from ckpttool.ops.route import Route, mapped
from ckpttool.ops.target_model import TargetModel, form_of
from ckpttool.ops.undo import Undo
from ckpttool.sidecar import Sidecar
from ckpttool.source import Shape
from ckpttool.tree import Tree
from ckpttool.writing import require_new

# Formats whose tensors stand in alphabetical order, whatever the program did.
_SORTED = frozenset(("npz", "safetensors", "sharded", "tensorflow_v1"))
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Filled:
    """What became of the model: `matched` layer by layer, what is ambiguous, whether it loaded the target.

    `sha256` is the target's digest; without it nothing was written.
    """

    path: str
    report: Report
    sha256: str | None = None
    matched: tuple[Match, ...] = ()
    ambiguous: tuple[Ambiguity, ...] = ()
    loaded: bool = False

    def document(self) -> dict[str, Any]:
        """Return the JSON document's keys."""
        return {
            "matched": [each.document() for each in self.matched],
            "ambiguous": [each.document() for each in self.ambiguous],
            "loaded": self.loaded,
        }


@dataclass(frozen=True, slots=True)
class How:
    """What is done to the source first, what was said of its layers, and how the target is written."""

    part: str | None = None
    wanted: Wanted = field(default_factory=Wanted)
    choices: tuple[Choice, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    allow_missing: bool = False
    dry_run: bool = False
    force: bool = False
    sync: bool = True
    prove: bool = True


def pairs(said: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what `--match SOURCE=TARGET` says; raise UsageError for what says no pair."""
    found = []
    for text in said:
        source, sign, target = text.partition("=")
        if not (source and sign and target):
            raise UsageError("--match takes SOURCE=TARGET, two names of layers or modules", found=text)
        found.append((source, target))
    return tuple(found)


def like(
    source: str, target: str, to: str | None, wanted: Like | str, how: How, progress: Progress = silent
) -> Filled:
    """Write the checkpoint that the wanted model loads, filled from the one at `source`.

    A text is the factory's name alone. Nothing is written when a weight of the model is left open (unless
    `how.allow_missing`) or on a dry run.
    """
    model = Like(wanted) if isinstance(wanted, str) else wanted
    kind = save.target_kind(target, to)
    form = form_of(kind)
    target = save.stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not how.dry_run:
        save.require_free(target, kind, checkpoint.files, force=how.force)
        require_new(sidecar.beside(target), checkpoint.files, force=how.force)
    own = own_sidecar(checkpoint)
    tree, lost = (checkpoint.tree, ()) if how.part is None else parts.below(checkpoint.tree, how.part)
    ready = prepared(checkpoint.tree, tree, how.part, how.wanted, own.sidecar)
    framework = _framework(checkpoint, ready.tree)
    with TargetModel(model, form) as beside:
        skeleton = beside.skeleton(_guessed(ready.tree, framework))
        filling = fill(
            ready.tree,
            framework,
            skeleton,
            in_order=_in_order(checkpoint, ready.tree, framework),
            choices=how.choices,
            given=how.pairs,
        )
        report = _report(ready, lost, skeleton, filling)
        done = Filled(checkpoint.path, report, None, filling.matched, filling.ambiguous)
        if how.dry_run or not (report.complete or how.allow_missing):
            return done
        said = [f"{model.factory} loads what was written, strictly, and holds the same values then"]
        back = Undo(why="the target is a model of your own")
        report = replace(report, notes=(*report.notes, *(said if how.prove else ()), str(back.note)))
        names, moves = ready.names, filling.moves
        way = Route(ready.tree, filling.tree, report, None, None, None, names, ready.stripped, moves)

        def told(written: Digest, found: Checkpoint) -> Sidecar:
            if how.prove:  # before anything has its name
                beside.prove(found)
            return receipt.receipt(checkpoint, way, own, written, back, how.part)

        put = save.write(
            way.tree,
            target,
            kind,
            receipt=told,
            sources=checkpoint.files,
            force=how.force,
            sync=how.sync,
            progress=progress,
        )
        return replace(done, report=report, sha256=put.sha256, loaded=how.prove)


def _report(ready: Prepared, lost: Sequence[str], skeleton: Skeleton, filling: Filling) -> Report:
    counted = [f"{n} by {by}" if by != "order" else f"{n} in order" for by, n in _counts(filling).items()]
    many = "layer" if len(filling.matched) == 1 else "layers"
    notes = [f"{len(filling.matched)} {many} matched: {', '.join(counted)}"] if counted else []
    for by, word in (("order", "in order"), ("only fit", "as the only fit")):
        found = [f"{m.source} is {m.target}" for m in filling.matched if m.by == by]
        notes += [f"{word}: {some(found, _SHOWN)}"] if found else []
    others = [ready.names[p] for p, leaf in ready.tree.tensors() if leaf.role not in (*STATES, "counter")]
    if others:
        notes.append(f"no part of a model, left behind: {some(others, _SHOWN)}")
    names = skeleton.tree.names
    return Report(
        mapped(ready, filling.tree, filling.moves),
        (*(ready.names[path] for path in filling.unused), *lost),
        tuple(names[path] for path in filling.unfilled),
        filling.assumed,
        (*ready.notes, *notes, *(a.sentence for a in filling.ambiguous), *filling.notes),
    )


def _counts(filling: Filling) -> dict[str, int]:
    found: dict[str, int] = {}
    for match in filling.matched:
        found[match.by] = found.get(match.by, 0) + 1
    return found


def _framework(checkpoint: Checkpoint, tree: Tree) -> str:
    """Return whose spelling the source has; of arrays of nobody's, in whose more of them are layers."""
    said = str(plugins.find("formats", checkpoint.format).load().FRAMEWORK)
    if said in ("torch", "tensorflow"):
        return said
    counts = {
        name: sum(len(layer.tensors) for layer in layers(tree, name)) for name in ("torch", "tensorflow")
    }
    return max(counts, key=lambda name: counts[name])


def _in_order(checkpoint: Checkpoint, tree: Tree, framework: str) -> bool:
    """Say whether the tree lists layers as the program made them, not by their names."""
    if checkpoint.format in _SORTED or (framework == "tensorflow" and variables.by_name(tree)):
        return False
    # keras/src/saving/saving_lib.py, _walk_saveable: attributes in alphabetical order.
    return checkpoint.format != "keras_h5" or all("/vars/" not in leaf.key for _, leaf in tree.tensors())


def _guessed(tree: Tree, framework: str) -> tuple[Shape, ...]:
    """Return the shape of one input as the first layer tells it, if that is a dense one."""
    found = layers(tree, framework)
    if not found or [kind.name for kind in found[0].kinds] != ["dense"]:
        return ()
    kind = found[0].kinds[0]
    group = found[0].group(tree)
    row = next(row for row in kind.read(group).rows if row.canonical == "kernel")
    shape = getattr(row.rule.leaf(group[row.stored]), "shape", ())
    return ((shape[0],),) if shape else ()
