"""`convert --like`: fill the user's own model from a checkpoint, and write what it loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.commands import evidence, receipt, save
from ckpttool.commands.digest import Digest
from ckpttool.commands.load_into import (
    ModelSource,
    TargetModel,
    build_fill_report,
    choose_model_form,
    fill_without,
    left_out_notes,
    model_source,
    source_names,
)
from ckpttool.commands.model_comparison import ModelSide
from ckpttool.commands.model_ledger import ModelLedger, account_for_tensors
from ckpttool.commands.model_proof import (
    NO_VERIFY,
    ModelMismatchError,
    ModelProof,
    ProofRequest,
    common_rounding,
    comparing_command,
    prove_outputs,
)
from ckpttool.commands.optimizer_states import ConvertedOptimizers, OptimizerSettings, convert_optimizers
from ckpttool.commands.options import (
    ConversionOptions,
    PreparedTree,
    parse_optimizer_options,
    parse_target_kind,
    sidecar_settings,
    target_stem,
)
from ckpttool.commands.plan import ConversionPlan, ConversionResult, report_moves
from ckpttool.commands.restore import VerifiedSidecar, read_verified_sidecar
from ckpttool.commands.save import ReverseRecord, WriteOptions, format_loading_code
from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, UsageError, abbreviate_list
from ckpttool.core.sidecar import LedgerEntry, Sidecar
from ckpttool.core.source import Shape
from ckpttool.core.tree import ValueLeaf, display
from ckpttool.formats.detect import open_checkpoint
from ckpttool.mapping import user_rules
from ckpttool.mapping.fill_model import MatchOptions, Skeleton
from ckpttool.mapping.rules import Cast, rule_steps
from ckpttool.mapping.solver import FillResult
from ckpttool.networks.worker import ModelSpec


def parse_match_options(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `--match SOURCE=TARGET`; raise UsageError for invalid text."""
    found = []
    for text in lines:
        source, sign, target = text.partition("=")
        if not (source and sign and target):
            raise UsageError(
                "invalid --match; use SOURCE=TARGET with two names of layers or modules", found=text
            )
        found.append((source, target))
    return tuple(found)


def convert_into_model(
    source: str, target: str, like: ModelSpec | str, options: ConversionOptions, progress: Progress
) -> ConversionResult:
    """Write the checkpoint that the user's model loads, filled from the one at `source`.

    A text is only the factory's name. Nothing is written when a model weight is missing or a weight of
    the source unused (unless `allow_missing` or `allow_unused` permits it), or on a dry run.
    """
    matching = _match_options(options)
    model = ModelSpec(like) if isinstance(like, str) else like
    kind = parse_target_kind(target, options.to)
    form, stem = choose_model_form(kind), target_stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not options.dry_run:
        save.require_new_target(stem, kind, checkpoint, force=options.force)
    own = read_verified_sidecar(checkpoint)
    # Rules for every tensor cover all of their axes.
    every = matching.rules is not None and matching.rules.rest != "kinds"
    axes = options.from_ or ("torch" if every else None)
    given = model_source(checkpoint, options.part, options.preparation, own.sidecar, axes, model.shapes)
    with TargetModel(model, form) as beside:
        skeleton = beside.skeleton(given.guessed())
        made, filling = _plan_for_model(checkpoint, given, skeleton, matching, options.allow_unused)
        moved = _convert_optimizers(given, filling, skeleton, (form, options.optimizer), own.sidecar)
        ledger = _account(checkpoint, given, filling, moved, options)
        made = _with_ledger(_with_optimizers(made, given.ready, moved), ledger)
        vectors = given.guessed() if all(len(each) == 1 for each in given.guessed()) else ()
        planned = _PlannedModel(
            target, checkpoint, own, made, filling, moved, ledger, vectors, bool(given.ready.rules)
        )
        done = planned.result(given)
        if options.dry_run:
            return replace(done, proof=ModelProof("--dry-run was used"))
        if not (made.report.complete or options.allow_missing):
            return done
        load = moved.loading_code(format_loading_code(stem, kind, made.tree), form)
        writer = _ModelWriter(planned, beside, model, options, progress)
        how = WriteOptions(checkpoint.files, options.force, options.sync, progress)
        try:
            put = save.write_checkpoint(made.tree, stem, kind, how=how, receipt=writer.receipt)
        except ModelMismatchError as error:
            return replace(done, proof=error.proof, loaded=True)
        return replace(
            done,
            report=replace(
                made.report,
                assumed=(*made.report.assumed, *writer.proof.assumed),
                notes=(*made.report.notes, *writer.notes()),
            ),
            digest=put.sha256,
            written=True,
            loaded=options.verify,
            load=load,
            proof=writer.proof,
        )


@dataclass(frozen=True, slots=True)
class _PlannedModel:
    """The planned conversion of a checkpoint into a user's model."""

    target: str
    checkpoint: Checkpoint
    own: VerifiedSidecar
    made: ConversionPlan
    filling: FillResult
    moved: ConvertedOptimizers
    ledger: ModelLedger
    vectors: tuple[Shape, ...]
    """the input shapes that the source's first layer shows, if it takes vectors"""
    merged: bool
    """tensors of the source were merged before the mapping"""

    def result(self, given: ModelSource) -> ConversionResult:
        """Return the result before anything is written."""
        used = source_names(given.ready, self.filling)
        return ConversionResult(
            urls.display_url(self.checkpoint.path),
            self.target,
            self.made.report,
            matched=self.filling.matched,
            ambiguous=self.filling.ambiguous,
            loaded=False,
            ledger=self.ledger.settle(
                _optimizer_entries(given.ready, self.moved),
                evidence.unconverted_entries(self.checkpoint, used),
            ),
            left_out=self.ledger.left_out,
        )


@dataclass(slots=True)
class _ModelWriter:
    """Proves the written file and makes its receipt, before the file gets its name."""

    planned: _PlannedModel
    beside: TargetModel
    model: ModelSpec
    options: ConversionOptions
    progress: Progress
    back: ReverseRecord = field(default_factory=lambda: ReverseRecord(why="the target is your own model"))
    proof: ModelProof = field(default_factory=ModelProof)

    def receipt(self, written: Digest, found: Checkpoint) -> Sidecar:
        """Return the target's sidecar.

        Raise MappingError or WorkerError if the model does not load the file, ModelMismatchError if it then
        computes something else than the source.
        """
        planned, options, checkpoint = self.planned, self.options, self.planned.checkpoint
        if options.verify:
            self.beside.prove(found, planned.moved)
        model, request = self.model, self._request()
        shapes = model.shapes or (self.planned.vectors if request.like is not None else ())
        built = replace(model, shapes=shapes)
        staged = ModelSide("B", self.beside.staged(found), built, model.python, self.beside.host())
        named = replace(model, shapes=model.shapes or self.planned.vectors)
        command = None
        if options.part is None:
            command = comparing_command(checkpoint, planned.target, named, request)
        self.proof = prove_outputs(checkpoint, staged, request, self.progress, command=command)
        known = receipt.with_policy_facts(checkpoint, found, planned.own, part=options.part, model=True)
        more: dict[str, Any] = {"cast": True} if options.cast else {}
        more |= {"allow_unused": list(options.allow_unused)} if options.allow_unused else {}
        made = receipt.conversion_receipt(
            checkpoint, planned.made, known, written, self.back, options.part, more
        )
        return replace(
            made,
            residue=(*made.residue, *planned.ledger.residue()),
            verification=self.proof.document(whole=False),
        )

    def notes(self) -> Iterator[str]:
        """Yield what was proved, and why the conversion cannot be reversed."""
        if self.options.verify:
            who = (
                f"{self.model.factory} {'and its optimizer load' if self.planned.moved.written else 'loads'}"
            )
            yield f"verified: {who} the output strictly, and all values match"
        yield self.proof.sentence
        yield from self.proof.notes
        yield str(self.back.note)

    def _request(self) -> ProofRequest:
        """Return what runs the source, and what keeps the outputs from being comparable."""
        options, report = self.options, self.planned.made.report
        like = ModelSpec(options.like_source) if isinstance(options.like_source, str) else options.like_source
        skipped, rounded = None if options.verify else NO_VERIFY, None
        filling = self.planned.filling
        steps = (step for move in filling.moves for step in rule_steps(move.rule))
        if skipped is None and any(isinstance(step, Cast) and step.rounded for step in steps):
            filled = [filling.tree[move.target] for move in filling.moves]
            rounded, why = common_rounding(filling.moves, filled, merged=self.planned.merged)
            skipped = None if why is None else f"--cast: {why}"
        return ProofRequest(
            like, options.run_code, skipped, options.part, rounded, incomplete=bool(report.missing)
        )


def _account(
    checkpoint: Checkpoint,
    given: ModelSource,
    filling: FillResult,
    moved: ConvertedOptimizers,
    options: ConversionOptions,
) -> ModelLedger:
    """Return what becomes of the source's tensors that do not fill the model."""
    plan = moved.plan
    used = {*(move.source for move in plan.moves), *plan.consumed, *plan.kept}
    return account_for_tensors(
        checkpoint, given, filling, used=used, part=options.part, patterns=options.allow_unused
    )


def _with_ledger(made: ConversionPlan, ledger: ModelLedger) -> ConversionPlan:
    report = made.report
    return replace(made, report=replace(report, unused=ledger.unused, notes=(*report.notes, *ledger.notes())))


def _match_options(options: ConversionOptions) -> MatchOptions:
    return MatchOptions(
        options.layers,
        parse_match_options(options.match),
        user_rules.load_rules(options.rules) if options.rules is not None else None,
        accept_order=options.accept_order,
        cast=options.cast,
    )


def _plan_for_model(
    checkpoint: Checkpoint,
    given: ModelSource,
    skeleton: Skeleton,
    matching: MatchOptions,
    patterns: Sequence[str],
) -> tuple[ConversionPlan, FillResult]:
    """Return how the source fills a model, as a conversion plan, with the matches."""
    try:
        filling = fill_without(given, skeleton, matching, patterns)
    except CkpttoolError as error:
        raise error.located(file=error.file or checkpoint.path) from error.__cause__
    ready, report = given.ready, build_fill_report(given.ready, skeleton, filling)
    made = ConversionPlan(
        ready.tree,
        filling.tree,
        report,
        names=ready.names,
        stripped=ready.stripped,
        moves=filling.moves,
    )
    return made, filling


def _convert_optimizers(
    given: ModelSource,
    filling: FillResult,
    skeleton: Skeleton,
    target: tuple[str, Sequence[str]],
    known: Sidecar | None,
) -> ConvertedOptimizers:
    """Return the model with the source's optimizers; `target` are its form and the `--optimizer` options."""
    form, stated = target
    none, settings = parse_optimizer_options((), stated)
    if none:
        return ConvertedOptimizers(filling.tree)
    known = settings.into(known, None, given.tree)
    settled = OptimizerSettings(sidecar_settings(known), settings.settings())
    return convert_optimizers(given.tree, filling, skeleton, form, settled)


def _with_optimizers(made: ConversionPlan, ready: PreparedTree, moved: ConvertedOptimizers) -> ConversionPlan:
    """Return the plan with the optimizers' part."""
    plan, report = moved.plan, made.report
    if not plan.moves and not plan.added:
        return replace(made, report=replace(report, notes=(*report.notes, *moved.reasons)))
    names = {move.target: display((*moved.prefix, *move.target)) for move in made.moves}
    mapped = tuple(
        replace(line, target=names[move.target]) for line, move in zip(report.mapped, made.moves, strict=True)
    )
    moves = tuple(replace(move, target=(*moved.prefix, *move.target)) for move in made.moves)
    unused = frozenset(left_out_notes(ready))
    used = {move.source for move in plan.moves} | {*plan.consumed, *plan.kept}
    notes = [note for note in report.notes if note not in unused]
    report = replace(
        report,
        mapped=(*mapped, *report_moves(ready, moved.tree, plan.moves)),
        missing=(*report.missing, *plan.missing),
        assumed=(*report.assumed, *plan.assumed),
        notes=(*notes, *left_out_notes(ready, used), *plan.notes),
    )
    kept = tuple(ready.names[path] for path in plan.kept)
    return replace(
        made,
        tree=moved.tree,
        report=report,
        moves=(*moves, *plan.moves),
        settings=plan.settings or None,
        kept=(*made.kept, *kept),
    )


def _optimizer_entries(ready: PreparedTree, moved: ConvertedOptimizers) -> Iterator[LedgerEntry]:
    """Yield an entry for optimizer state that the target does not have."""
    tree, slots = ready.tree, moved.left
    if not slots:
        return
    weights = [path for path, leaf in tree.tensors() if leaf.role in ("parameter", "buffer")]
    heads = {display(path[:1]) for path in weights if len(path) > 1}
    alone = len(heads) == 1 and all(len(path) > 1 for path in weights)
    apart = alone and not any(display(path[:1]) in heads for path in slots)
    head = ready.names[weights[0]].partition("/")[0] if apart else ""
    hint = (
        f"use --part {head} to convert only the network" if apart else "use --allow-missing to leave it out"
    )
    why = hint if moved.written else next(iter(moved.reasons), hint)
    settings = [path for path in slots if isinstance(tree[path], ValueLeaf)]
    if settings:
        lost = abbreviate_list([ready.names[path] for path in settings], 3)
        none = "use --optimizer none to convert without the optimizer"
        text = f"{lost}: the target's optimizer has no such setting, so its updates differ; {none}"
        yield LedgerEntry("not used", "setting", text, ready.names[settings[0]], decides=True, hint=none)
    count = len(slots) - len(settings)
    if count:
        what = f"state of {count:,} {'tensor' if count == 1 else 'tensors'}: {why}"
        yield LedgerEntry("not used", "optimizer", what, ready.names[slots[0]], decides=True, hint=hint)
