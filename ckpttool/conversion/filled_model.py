"""`convert --like`: fill the user's own model from a checkpoint, and write what it loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.conversion import receipt, write
from ckpttool.conversion.filling import (
    ModelFillPlan,
    TargetModel,
    choose_model_form,
    left_out_notes,
    model_source,
    observe_source,
    plan_fill,
    source_names,
)
from ckpttool.conversion.layer_options import parse_layer_options
from ckpttool.conversion.loading_code import format_loading_code
from ckpttool.conversion.optimizer_options import add_stated_settings
from ckpttool.conversion.options import ConversionRequest, ModelFileOptions, parse_optimizer_options
from ckpttool.conversion.plan import ConversionPlan, ConversionResult, report_moves
from ckpttool.conversion.preparation import PreparedTree
from ckpttool.conversion.reverse import ReverseRecord
from ckpttool.conversion.targets import parse_target_kind, target_stem
from ckpttool.conversion.write import WriteOptions
from ckpttool.core import urls
from ckpttool.core.activations import UNKNOWN, framework_order
from ckpttool.core.atomic_write import Progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.digests import Digest
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.sidecar import LedgerEntry, Sidecar
from ckpttool.core.text import format_count
from ckpttool.core.tree import ValueLeaf, display
from ckpttool.evaluation import evidence
from ckpttool.evaluation.restore import VerifiedSidecar, read_verified_sidecar
from ckpttool.formats.detect import open_checkpoint
from ckpttool.formats.probe import format_framework
from ckpttool.libraries.optimizer_settings import sidecar_settings
from ckpttool.libraries.optimizer_states import ConvertedOptimizers, OptimizerSettings, convert_optimizers
from ckpttool.mapping import user_rules
from ckpttool.mapping.fill_model import MatchOptions
from ckpttool.mapping.flattening import format_order_option, list_open_orders
from ckpttool.mapping.layer_kinds import LayerOption
from ckpttool.mapping.layers import Layer, find_layers
from ckpttool.mapping.rules import Cast, Move, rule_steps
from ckpttool.networks.worker import ModelSpec, as_model_spec
from ckpttool.verification.proof import (
    NO_VERIFY,
    ModelMismatchError,
    ModelProof,
    ProofRequest,
    begin_source,
    comparing_command,
    prove_outputs,
)
from ckpttool.verification.sides import ModelHost, ModelSide


def parse_match_options(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `--match SOURCE=TARGET`; raise UsageError for invalid text."""
    pairs = []
    for text in lines:
        source, sign, target = text.partition("=")
        if not (source and sign and target):
            raise UsageError(
                "invalid --match; use SOURCE=TARGET with two names of layers or modules", found=text
            )
        pairs.append((source, target))
    return tuple(pairs)


def observed_options(checkpoint: Checkpoint, request: ConversionRequest) -> tuple[LayerOption, ...]:
    """Return the options for the layers whose order of flattened images only a call of their model shows."""
    options, target = request.options, format_framework(request.kind.format)
    assert options.like_source is not None  # noqa: S101 - the caller's condition
    source = model_source(checkpoint, options.part, options.preparation, source=options.from_)
    if source.framework == target:
        return ()
    observed = observe_source(source, options.like_source, (), request.layer_options).tree
    able = {
        layer.title: list(_options_of_orders(layer, source.framework, target))
        for layer in find_layers(observed, source.framework)
    }
    texts: tuple[list[str], list[str]] = ([], [])
    while True:
        layer_options = parse_layer_options((), *texts)
        choices = (*layer_options, *request.layer_options)
        layers = find_layers(source.tree, source.framework, choices, source.fills.described)
        unknown = list_open_orders(source.tree, layers)
        more = [able[layer.title].pop(0) for layer in layers if layer.title in unknown and able[layer.title]]
        if not more:
            return layer_options
        for side, text in more:
            texts[side].append(text)


def _options_of_orders(layer: Layer, source: str, target: str) -> Iterator[tuple[int, str]]:
    """Yield the values of --flatten (0) and --unflatten (1) for a layer's orders, those of images first."""
    sides = list(enumerate((layer.facts.takes, layer.facts.makes)))
    known = [(side, order) for side, order in sides if order is not None and order != UNKNOWN]
    for side, order in sorted(known, key=lambda option: option[1].is_plain):
        if order.is_plain or order == framework_order(order.parts, target):
            yield side, f"{layer.title}=no"
        elif order == framework_order(order.parts, source):
            yield side, f"{layer.title}={format_order_option(order)}"


def convert_into_model(
    source: str, target: str, like: ModelSpec | str, options: ModelFileOptions, progress: Progress
) -> ConversionResult:
    """Write the checkpoint that the user's model loads, filled from the one at `source`.

    Nothing is written when a model weight is missing or a weight of the source unused (unless `allow_missing`
    or `allow_unused` permits it), or on a dry run.

    Args:
        source: the checkpoint to read.
        target: the file or prefix to write.
        like: what builds the model; a text is only the factory's name.
        options: the conversion's options.
        progress: called with the bytes written so far, and all.
    """
    rules = user_rules.load_rules(options.rules) if options.rules is not None else None
    matching = MatchOptions(
        options.layers,
        parse_match_options(options.match),
        rules,
        accept_order=options.accept_order,
        cast=options.cast,
    )
    model = as_model_spec(like)
    kind = parse_target_kind(target, options.to)
    form, stem = choose_model_form(kind, target), target_stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not options.dry_run:
        write.require_new_target(stem, kind, checkpoint, force=options.force)
    own = read_verified_sidecar(checkpoint)
    # Rules for every tensor cover all of their axes.
    axes = options.from_ or ("torch" if rules is not None and rules.rest != "kinds" else None)
    model_input = model_source(checkpoint, options.part, options.preparation, own.sidecar, axes, model.shapes)
    skipped = None if options.verify and not options.dry_run else NO_VERIFY
    own_code = None if options.like_source is None else as_model_spec(options.like_source)
    expected = ProofRequest(own_code, options.run_code, skipped, options.part)
    with TargetModel(model, form, target) as beside, begin_source(checkpoint, expected) as running:
        plan = plan_fill(
            beside, checkpoint, model_input, matching, options.like_source, options.allow_unused, options.part
        )
        plan = _with_optimizers(plan, _convert_optimizers(plan, form, options, own.sidecar))
        plan = plan.account(checkpoint, options.part, options.allow_unused, "--allow-unused ")
        writer = _ModelWriter(target, checkpoint, own, plan, beside, model, options, progress, running)
        done = writer.result()
        if options.dry_run:
            return replace(done, proof=ModelProof("--dry-run was used"))
        if not (plan.report.complete or options.allow_missing):
            return done
        load = writer.moved.loading_code(format_loading_code(stem, kind, writer.moved.tree), form)
        how = WriteOptions(checkpoint.files, options.force, options.sync, progress)
        try:
            put = write.write_checkpoint(writer.moved.tree, stem, kind, how=how, receipt=writer.receipt)
        except ModelMismatchError as error:
            return replace(done, proof=error.proof, loaded=True)
        return replace(
            done,
            report=replace(
                plan.report,
                assumed=(*plan.report.assumed, *writer.proof.assumed),
                notes=(*plan.report.notes, *writer.notes()),
            ),
            digest=put.sha256,
            written=True,
            loaded=options.verify,
            load=load,
            proof=writer.proof,
        )


@dataclass(slots=True)
class _ModelWriter:
    """Proves the written file and makes its receipt, before the file gets its name."""

    target: str
    checkpoint: Checkpoint
    own: VerifiedSidecar
    plan: ModelFillPlan
    beside: TargetModel
    model: ModelSpec
    options: ModelFileOptions
    progress: Progress
    running: ModelHost | None = None
    back: ReverseRecord = field(default_factory=lambda: ReverseRecord(why="the target is your own model"))
    proof: ModelProof = field(default_factory=ModelProof)

    @property
    def moved(self) -> ConvertedOptimizers:
        """The model's tree with its optimizers."""
        assert self.plan.optimizers is not None  # noqa: S101 - planned for every conversion
        return self.plan.optimizers

    def result(self) -> ConversionResult:
        """Return the result before anything is written."""
        plan, ready = self.plan, self.plan.prepared
        return ConversionResult(
            urls.display_url(self.checkpoint.path),
            self.target,
            plan.report,
            matched=plan.filling.matched,
            ambiguous=plan.filling.ambiguous,
            loaded=False,
            ledger=plan.ledger.settle(
                _optimizer_entries(ready, self.moved),
                evidence.unconverted_entries(self.checkpoint, source_names(ready, plan.filling)),
            ),
            left_out=plan.ledger.left_out,
        )

    def receipt(self, written: Digest, result: Checkpoint) -> Sidecar:
        """Return the target's sidecar.

        Raise MappingError or WorkerError if the model does not load the file, ModelMismatchError if it then
        computes something else than the source.
        """
        plan, options, checkpoint, model = self.plan, self.options, self.checkpoint, self.model
        if options.verify:
            self.beside.prove(result, self.moved)
        steps = (step for move in plan.filling.moves for step in rule_steps(move.rule))
        rounded = any(isinstance(step, Cast) and step.rounded for step in steps)
        request = plan.proof(options, None if options.verify else NO_VERIFY, rounded=rounded)
        if rounded and options.verify and request.skipped is not None:
            request = replace(request, skipped=f"--cast: {request.skipped}")
        # The input shapes that the source's first layer shows, if it takes vectors.
        guessed = plan.source.guessed()
        vectors = guessed if all(len(kinds) == 1 for kinds in guessed) else ()
        named = replace(model, shapes=model.shapes or vectors)
        built = named if request.like is not None else model
        staged = ModelSide("B", self.beside.staged(result), built, model.python, self.beside.process)
        command = None
        if options.part is None:
            command = comparing_command(checkpoint, self.target, named, request)
        self.proof = prove_outputs(
            checkpoint, staged, request, self.progress, command=command, process=self.running
        )
        known = receipt.with_policy_facts(checkpoint, result, self.own, part=options.part, model=True)
        more: dict[str, Any] = {"cast": True} if options.cast else {}
        more |= {"allow_unused": list(options.allow_unused)} if options.allow_unused else {}
        ready, moved = plan.prepared, self.moved.plan
        conversion = ConversionPlan(
            ready,
            self.moved.tree,
            plan.report,
            settings=moved.settings or None,
            moves=(*_placed_moves(plan, self.moved), *moved.moves),
            kept=tuple(ready.names[path] for path in moved.kept),
        )
        done = receipt.conversion_receipt(
            checkpoint, conversion, known, written, self.back, options.part, more
        )
        return replace(
            done,
            residue=(*done.residue, *plan.ledger.residue()),
            verification=self.proof.document(whole=False),
        )

    def notes(self) -> Iterator[str]:
        """Yield what was proved, and why the conversion cannot be reversed."""
        if self.options.verify:
            who = f"{self.model.factory} {'and its optimizer load' if self.moved.written else 'loads'}"
            yield f"verified: {who} the output strictly, and all values match"
        yield self.proof.sentence
        yield from self.proof.notes
        yield str(self.back.note)


def _convert_optimizers(
    plan: ModelFillPlan, form: str, options: ModelFileOptions, known: Sidecar | None
) -> ConvertedOptimizers:
    """Return the model with the source's optimizers, in a form that it loads."""
    none, settings = parse_optimizer_options((), options.optimizer)
    if none:
        return ConvertedOptimizers(plan.filling.tree)
    known = add_stated_settings(settings, known, None, plan.source.tree)
    settled = OptimizerSettings(sidecar_settings(known), settings.settings())
    return convert_optimizers(plan.source.tree, plan.filling, plan.target, form, settled)


def _placed_moves(plan: ModelFillPlan, moved: ConvertedOptimizers) -> tuple[Move, ...]:
    """Return the moves to the model, which has its own place in a file with optimizers."""
    cut = moved.prefix if moved.plan.moves or moved.plan.added else ()
    return tuple(replace(move, target=(*cut, *move.target)) for move in plan.filling.moves)


def _with_optimizers(fill_plan: ModelFillPlan, moved: ConvertedOptimizers) -> ModelFillPlan:
    """Return the plan with the optimizers' part."""
    ready, plan, report = fill_plan.prepared, moved.plan, fill_plan.report
    if not plan.moves and not plan.added:
        report = replace(report, notes=(*report.notes, *moved.reasons))
        return fill_plan._replace(optimizers=moved, report=report)
    places = _placed_moves(fill_plan, moved)
    mapped = (
        replace(line, target=display(move.target)) for line, move in zip(report.mapped, places, strict=True)
    )
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
    return fill_plan._replace(optimizers=moved, report=report)


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
    if states := [path for path in slots if path not in settings]:
        what = f"state of {format_count(len(states), 'tensor')}: {why}"
        yield LedgerEntry("not used", "optimizer", what, ready.names[states[0]], decides=True, hint=hint)
