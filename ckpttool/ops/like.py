"""`convert --like`: fill the user's own model from a checkpoint, write what it loads, and have it loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import sidecar, urls
from ckpttool.agents.skeleton.beside import Like
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import display
from ckpttool.ledger import Entries, Entry, merged
from ckpttool.mapping.layers import Choice
from ckpttool.mapping.matches import Ambiguity, Match
from ckpttool.mapping.report import Report
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.ops import evidence, model_source, receipt, save, targets
from ckpttool.ops.digest import Digest
from ckpttool.ops.loading import loading_lines
from ckpttool.ops.plain_names import Prepared, Wanted
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import own_sidecar
from ckpttool.ops.route import Route
from ckpttool.ops.target_model import TargetModel, form_of
from ckpttool.ops.undo import Undo
from ckpttool.sidecar import Sidecar
from ckpttool.writing import require_new


@dataclass(frozen=True, slots=True)
class Filled:
    """What became of the model: `matched` layer by layer, what is ambiguous, whether it loaded the target.

    `sha256` is the target's digest; without it nothing was written. The `ledger` has an optimizer whose state
    the model's file has no place for.
    """

    path: str
    report: Report
    sha256: str | None = None
    matched: tuple[Match, ...] = ()
    ambiguous: tuple[Ambiguity, ...] = ()
    loaded: bool = False
    load: tuple[str, ...] = ()
    ledger: Entries = ()

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
    accept_order: bool = False
    source: str | None = None
    cast: bool = False
    rules: RuleFile | None = None
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
    kind = targets.target_kind(target, to)
    form = form_of(kind)
    target = targets.stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not how.dry_run:
        save.require_free(target, kind, checkpoint.files, force=how.force)
        require_new(sidecar.beside(target), checkpoint.files, force=how.force)
    own = own_sidecar(checkpoint)
    # Rules for every tensor say all of their axes.
    axes = how.source or ("torch" if how.rules is not None and how.rules.rest != "kinds" else None)
    given = model_source.model_source(checkpoint, how.part, how.wanted, own.sidecar, axes, model.shapes)
    ready = given.ready
    with TargetModel(model, form) as beside:
        skeleton = beside.skeleton(given.guessed())
        try:
            filling = given.fill(
                skeleton,
                how.choices,
                how.pairs,
                accept_order=how.accept_order,
                cast=how.cast,
                rules=how.rules,
            )
        except CkpttoolError as error:
            raise error.located(file=error.file or checkpoint.path) from error.__cause__
        report = model_source.report(ready, skeleton, filling)
        done = Filled(urls.spelled(checkpoint.path), report, None, filling.matched, filling.ambiguous)
        left = evidence.left_by_model(checkpoint, model_source.written(ready, filling))
        done = replace(done, ledger=merged((*_optimizers(ready), *left)))
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
            known = receipt.with_policy_facts(checkpoint, found, own, part=how.part, model=True)
            return receipt.receipt(
                checkpoint, way, known, written, back, how.part, {"cast": True} if how.cast else {}
            )

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
        load = loading_lines(target, kind, way.tree)
        return replace(done, report=report, sha256=put.sha256, loaded=how.prove, load=load)


def _optimizers(ready: Prepared) -> Iterator[Entry]:
    """Return an entry for the state of optimizers, which a file that fills a model does not have."""
    tree = ready.tree
    slots = [path for path, leaf in tree.tensors() if leaf.role == "slot"]
    if not slots:
        return
    weights = [path for path, leaf in tree.tensors() if leaf.role in ("parameter", "buffer")]
    heads = {display(path[:1]) for path in weights if len(path) > 1}
    alone = len(heads) == 1 and all(len(path) > 1 for path in weights)
    apart = alone and not any(display(path[:1]) in heads for path in slots)
    head = ready.names[weights[0]].partition("/")[0] if apart else ""
    hint = f"--part {head} converts the network alone" if apart else "--allow-missing leaves it out"
    what = f"state of {len(slots):,} {'tensor' if len(slots) == 1 else 'tensors'}: {hint}"
    yield Entry("not used", "optimizer", what, ready.names[slots[0]], decides=True, hint=hint)
