"""Convert a checkpoint to another framework: map it, write it, read it back, and write a receipt."""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Unpack

from ckpttool.conversion import parts, receipt, write
from ckpttool.conversion.layer_options import describe_layer_options
from ckpttool.conversion.option_keywords import takes_options
from ckpttool.conversion.options import (
    MOVED,
    ConversionOptions,
    ConversionRequest,
    FurtherConversionKeywords,
    FurtherFillKeywords,
    parse_request,
    require_compatible,
)
from ckpttool.conversion.plan import ConversionPlan, ConversionResult, plan_conversion
from ckpttool.conversion.reverse import ReverseRecord, record_reverse
from ckpttool.conversion.targets import (
    EXPORTS,
    complete_hint,
    complete_hints,
    find_target_name,
    infer_target_word,
    parse_target_kind,
    sharded_kind,
    target_stem,
)
from ckpttool.conversion.write import WriteOptions
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import (
    Output,
    Progress,
    WorkerThread,
    ignore_progress,
    require_new,
    write_file,
)
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.digests import Digest, DigestRecorder
from ckpttool.core.errors import CkpttoolError, MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries, Sidecar
from ckpttool.core.tree import Path
from ckpttool.evaluation import evidence, restore
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts, add_environment
from ckpttool.evaluation.restore import (
    VerifiedSidecar,
    agent_ledger,
    build_agent,
    policy_sizes,
    read_verified_sidecar,
    recognize_playable_agent,
    select_network_leaves,
)
from ckpttool.formats.detect import note_other_shards, open_checkpoint
from ckpttool.libraries import schema
from ckpttool.libraries.optimizer_settings import format_framework
from ckpttool.libraries.recognize import recognize_checkpoint, remembering
from ckpttool.libraries.schema import layer_widths
from ckpttool.mapping.layer_kinds import LayerOption
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.conversion.graph_code import PolicyCalls
    from ckpttool.graphs.graph import Graph
    from ckpttool.networks.worker import ModelSpec
    from ckpttool.verification.output_comparison import OutputMismatchError, OutputVerification

STANDARD_OUTPUT = "-"
"""Value of `code` that returns the text without writing a file."""
# Formats for arrays of any kind, which can also store data without a network.
_ARRAYS = frozenset(("npz", "safetensors", "sharded"))


@takes_options(ConversionOptions, MOVED)
def convert(
    source: str,
    target: str,
    options: ConversionOptions | None = None,
    *,
    to: str | None = None,
    part: str | None = None,
    layout: str | None = None,
    weights: str | None = None,
    rules: str | None = None,
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    optimizer: Sequence[str] = (),
    env: str | None = None,
    facts: AgentFacts = NO_FACTS,
    code: str | None = None,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = ignore_progress,
    **further: Unpack[FurtherConversionKeywords],
) -> ConversionResult:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    Nothing is written if an entry is unmapped (unless `allow_missing`) or with `dry_run`. The target is
    written to a temporary file, read back, compared and then renamed; the same conversion gives the same
    bytes. Raise UsageError for mutually exclusive options. `export` writes ONNX, `fill` what a model of your
    own loads.

    Args:
        source: the checkpoint to convert (SRC): a file, prefix or folder.
        target: the path to write (DST); its suffix selects the format unless `to` does.
        options: what to convert, and how; keywords replace its fields.
        progress: called with the finished and the total amount of work.
        further: other fields of ConversionOptions, e.g. `shard_size`.

    >>> import ckpttool
    >>> done = ckpttool.convert("sample_ckpts/td3_pendulum_tf/ckpt-15000", "agent.pt", dry_run=True)
    >>> done.written, done.report.complete, len(done.report.mapped)
    (False, True, 94)
    """
    return run_conversion(source, target, options or ConversionOptions(), progress)


@takes_options(ConversionOptions)
def fill(
    source: str,
    target: str,
    like: ModelSpec | str,
    options: ConversionOptions | None = None,
    *,
    match: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
    cast: bool = False,
    accept_order: bool = False,
    part: str | None = None,
    rules: str | None = None,
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    like_source: ModelSpec | str | None = None,
    run_code: bool = False,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    verify: bool = True,
    progress: Progress = ignore_progress,
    **further: Unpack[FurtherFillKeywords],
) -> ConversionResult:
    """Write the checkpoint that your own model loads, filled from the one at `source`.

    The model is built in a separate process. Nothing is written when one of its weights is missing or a
    weight of the source unused (unless `allow_missing` or `allow_unused` permits it), or with `dry_run`.
    `load_into` fills a live model.

    Args:
        source: the checkpoint to read (SRC): a file, prefix or folder.
        target: the path to write (DST); its suffix selects the framework unless `to` does.
        like: code that builds the model: `package.module:factory`, or a ModelSpec with arguments.
        options: how to fill the model; keywords replace its fields.
        progress: called with the finished and the total amount of work.
        further: other fields of ConversionOptions, e.g. `from_`.

    >>> import ckpttool
    >>> from ckpttool.networks import ModelSpec
    >>> agent, layer = "sample_ckpts/td3_pendulum_tf/ckpt-15000", ModelSpec("torch.nn:Linear", [3, 64])
    >>> done = ckpttool.fill(agent, "l1.pt", layer, part="policy/actor/l1", dry_run=True)
    >>> done.report.complete, [entry.target for entry in done.report.mapped]
    (True, ['weight', 'bias'])
    """
    return run_conversion(source, target, replace(options or ConversionOptions(), like=like), progress)


def run_conversion(
    source: str, target: str, options: ConversionOptions, progress: Progress = ignore_progress
) -> ConversionResult:
    """Convert to a format, to ONNX or into a user's model, as the options state."""
    with complete_hints(target):
        exported = infer_target_word(target, options.to) in EXPORTS
        require_compatible(options, exported=exported)
        facts = add_environment(options.facts, options.env)
        if exported:
            # Exports import modules that no other conversion needs.
            from ckpttool.conversion.export import ExportOptions, export

            network, env, layout = options.network or "actor", options.env, options.layout
            how = ExportOptions(network, env, layout, facts, options.dry_run, options.force, options.sync)
            return export(source, target, how)
        if options.like is not None:
            # A model is matched layer by layer.
            from ckpttool.conversion.filled_model import convert_into_model

            return convert_into_model(source, target, options.like, options, progress)
        kind = parse_target_kind(target, options.to)
        spread = options.jobs is not None or options.ray is not None
        kind = sharded_kind(target, kind, options.shard_size, options.shards, spread)
        return _convert_to_format(source, target, parse_request(kind, options), facts, progress)


@remembering()
def _convert_to_format(
    source: str, target: str, request: ConversionRequest, facts: AgentFacts, progress: Progress
) -> ConversionResult:
    options = request.options
    checkpoint = open_checkpoint(source)
    _require_convertible(checkpoint, target, request)
    target = target_stem(target, request.kind)
    _require_code_target(request, checkpoint)
    if not options.dry_run:
        write.require_new_target(target, request.kind, checkpoint, force=options.force)
    checkpoint = keep_network_reads(checkpoint)
    observed: Sequence[LayerOption] = ()
    if options.like_source is not None:
        from ckpttool.conversion.filled_model import (
            observed_options,  # modules that no other conversion needs
        )

        observed = observed_options(checkpoint, request)
        request = request._replace(given=(*observed, *request.given))
    source_sidecar = read_verified_sidecar(checkpoint)
    own, notes = _apply_facts(source_sidecar, checkpoint, request, facts)
    own, more = _with_spaces(own, checkpoint, request, facts.env if facts else None)
    notes = (*notes, *more)
    notes = (*notes, *describe_layer_options(observed))
    shards = note_other_shards(checkpoint)
    notes = notes if shards is None else (shards, *notes)
    with WorkerThread() as aside:
        # The receipt, written last, contains the source's digest, which is computed from the data as it is
        # read.
        recorder = DigestRecorder(checkpoint, aside) if own.sha256 is None and not options.dry_run else None
        checkpoint = checkpoint if recorder is None else recorder.checkpoint
        plan = _plan(checkpoint, request, own.sidecar, notes)
        notes = tuple(complete_hint(note, target) for note in plan.report.notes)
        plan = replace(plan, report=replace(plan.report, notes=notes))
        done = ConversionResult(
            urls.display_url(checkpoint.path),
            target,
            plan.report,
            ledger=_ledger(checkpoint, plan, source_sidecar, request, facts),
        )
        if options.dry_run or not (plan.report.complete or options.allow_missing):
            return done
        _require_largest_matrix(checkpoint, plan)
        # Before anything is written: an error in any of it leaves no target behind.
        load = _loading_code(target, request, plan, checkpoint)
        writer = _TargetWriter(checkpoint, plan, target, request, own, recorder, progress, ledger=done.ledger)
        written = writer.write()
    if written is not None and writer.code is not None and options.code != STANDARD_OUTPUT:
        load = _write_code(writer.code, target, request, checkpoint)
    report = replace(plan.report, notes=(*plan.report.notes, *writer.notes(written)))
    return replace(
        done,
        report=report,
        digest=None if written is None else written.sha256,
        written=written is not None,
        parity=() if writer.proof is None else writer.proof.networks,
        load=() if written is None else load,
        code=None if written is None else writer.code,
        playable="\ndef act(" in (writer.code or ""),
    )


def _require_largest_matrix(checkpoint: Checkpoint, plan: ConversionPlan) -> None:
    """Raise MappingError for a target without the network's main part, whatever may be left out."""
    largest = parts.largest_matrices(plan.ready.tree)
    names = [plan.ready.names.get(path, plan.ready.tree.names[path]) for path in largest]
    if names and {*names} <= {*plan.report.unused}:
        raise MappingError(
            "the largest matrix would be left out",
            file=checkpoint.path,
            path=names[0],
            hint="state its layer with --kind or --map FILE, or use --to npz to copy all tensors unchanged",
        )


def _require_convertible(checkpoint: Checkpoint, target: str, request: ConversionRequest) -> None:
    """Raise an error for a checkpoint without a network or with a missing shard."""
    if request.options.part is not None:
        return
    if () in checkpoint.tree and format_framework(request.kind.format) == "tensorflow":
        raise MappingError(
            "the file is one array without a name, and TensorFlow's variables have names",
            file=checkpoint.path,
            hint="use --to npz to copy it unchanged",
        )
    if request.plain and request.kind.format not in _ARRAYS:
        to = request.options.to
        words = f" {shlex.quote(target)}" + (f" --to {to}" if to is not None else "")
        refused = restore.no_network_error(checkpoint, rest=words)
        if refused is not None:
            raise refused
    restore.require_shards(checkpoint.tree)


def _plan(
    checkpoint: Checkpoint, request: ConversionRequest, known: Sidecar | None, notes: tuple[str, ...]
) -> ConversionPlan:
    """Return the plan, with the notes first in its report; raise an error for missing shards."""
    try:
        conversion = plan_conversion(checkpoint, request, known)
    except CkpttoolError:
        restore.require_shards(checkpoint.tree)
        raise
    restore.require_shards(conversion.ready.tree)
    return replace(conversion, report=replace(conversion.report, notes=(*notes, *conversion.report.notes)))


def _ledger(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    own: VerifiedSidecar,
    request: ConversionRequest,
    facts: AgentFacts,
) -> LedgerEntries:
    """Return the ledger of the conversion: that of the agent, which every command prints, or of a model.

    `own` is the source's sidecar, `facts` are the given facts.
    """
    assumed = sidecar.assumption_entries("architecture", plan.report.assumed)
    if request.options.part is None:
        with contextlib.suppress(CkpttoolError):
            binding = recognize_playable_agent(checkpoint, request.options.layout)
            if binding is not None:
                entries = build_agent(checkpoint, binding, own, facts).ledger
                if plan.binding is None:
                    # Layers converted one by one are those of the class, whose code is in another file.
                    entries = tuple(
                        replace(row, beside=row.beside or row.what == "custom code") for row in entries
                    )
                return sidecar.merge_entries(entries, assumed)
    if plan.binding is not None:
        tree = select_network_leaves(plan.ready.tree, plan.binding)
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(plan.binding, tree))
        entries = agent_ledger(checkpoint, plan.binding, own.sidecar, known, tree)
        return sidecar.merge_entries(entries, assumed)
    written = {plan.ready.names[move.source] for move in plan.moves if move.source in plan.ready.names}
    return sidecar.merge_entries(evidence.unconverted_entries(checkpoint, written, plan.kept), assumed)


def _apply_facts(
    own: VerifiedSidecar, checkpoint: Checkpoint, request: ConversionRequest, facts: AgentFacts
) -> tuple[VerifiedSidecar, tuple[str, ...]]:
    """Return the source's sidecar with the given facts applied, and notes on these facts."""
    if not facts:
        return own, ()
    binding = None
    if request.options.part is None:
        with contextlib.suppress(UnsupportedError, UsageError):
            binding = recognize_playable_agent(checkpoint, request.options.layout)
    notes: tuple[str, ...] = (f"given: {facts.described()}",)
    if binding is not None:
        tree = select_network_leaves(checkpoint.tree, binding)
        facts = facts.sized(*policy_sizes(binding, tree))
        known = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, tree))
        notes = (*notes, *facts.contradictions(known, binding.facts.stated))
    return replace(own, sidecar=facts.over(own.sidecar)), notes


def _loading_code(
    target: str, request: ConversionRequest, plan: ConversionPlan, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Return the code that loads the target; its names are the source's unless a layout renamed them.

    There is none for objects in a store: the formats' libraries load local files. Arrays of no framework need
    none.
    """
    if urls.is_url(target) or format_framework(request.kind.format) == "numpy":
        return ()
    from ckpttool.conversion.loading_code import format_loading_code

    foreign = plan.binding is None and format_framework(checkpoint.format) == "tensorflow"
    root = plan.binding is None and not foreign and all(len(move.source) == 1 for move in plan.moves)
    return format_loading_code(target, request.kind, plan.tree, foreign=foreign, root=root)


def _require_code_target(request: ConversionRequest, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError or FileExistsError where `code` cannot be written, before anything else is."""
    code = request.options.code
    if code is None:
        return
    from ckpttool.conversion.model_code import require_code_target  # only conversions with code need it

    require_code_target(request.kind)
    if code != STANDARD_OUTPUT and not request.options.dry_run:
        require_new(code, checkpoint.files, force=request.options.force)


def _write_code(
    code: str, target: str, request: ConversionRequest, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Write the code of the written networks; return the lines that use it."""
    from ckpttool.conversion import loading_code

    file = str(request.options.code)
    write_file(file, code.encode(), force=request.options.force, sources=checkpoint.files)
    name, _ = os.path.splitext(os.path.basename(file))
    name = name if loading_code.is_word(name) else "CODE"
    states = ", *states" * ("\nSTATES = " in code)
    act = (f"actions{states} = {name}.act(model, observations)",) * ("\ndef act(" in code)
    return (f"import {name}", f"model = {name}.load({loading_code.python_literal(target)})", *act)


def _with_scores_of(written: Sidecar, layout: str) -> Sidecar:
    """Return the sidecar with what the outputs of the target's library are, e.g. quantiles in its order."""
    renamed: Mapping[str, str] = getattr(plugins.find("layouts", layout).load(), "WRITTEN_SCORES", {})
    if written.choices is None or written.choices["scores"] not in renamed:
        return written
    return replace(written, choices={**written.choices, "scores": renamed[written.choices["scores"]]})


def _with_spaces(
    own: VerifiedSidecar, checkpoint: Checkpoint, request: ConversionRequest, env: str | None
) -> tuple[VerifiedSidecar, tuple[str, ...]]:
    """Return the source's sidecar with the spaces of the given environment that no file records.

    Only a library's own file may need them. Raise EnvironmentMismatchError if they do not fit the agent.
    """
    if env is None or not (request.kind.agent or request.options.code):
        return own, ()
    from ckpttool.evaluation import environments
    from ckpttool.evaluation.playing import assume_choices, read_action_bounds, spec_choices

    binding = recognize_playable_agent(checkpoint, request.options.layout)
    if binding is None:
        return own, ()
    agent = build_agent(checkpoint, binding, own)
    known, part = agent.known, agent.binding.policy
    recorded = known.observation_space and (known.choices or known.action_low)
    if recorded or part is None or part.component in agent.binding.fronts:
        return own, ()
    try:
        with environments.make_vector_env(env, trusted=True) as vector_env:
            spec = vector_env.spec
    except CkpttoolError as error:
        return own, (f"no spaces were read, because {env} cannot be created: {error.message}",)
    agent = assume_choices(agent, spec)
    bounds, choices = read_action_bounds(agent, layer_widths(agent.tree, part), spec), spec_choices(spec)
    # What the environment shows of the outputs: atoms, or a state's value before the advantages.
    choices = schema.known_choices(agent.known) or choices
    observed = {
        name: (low.reshape(-1).tolist(), high.reshape(-1).tolist())
        for name, (low, high) in spec.observation_bounds.items()
    }
    spaces: dict[str, Any] = {
        "observation_space": schema.make_observation_space("gymnasium", observed),
        **({"action_low": list(bounds.low), "action_high": list(bounds.high)} if choices is None else {}),
        "choices": None if choices is None else choices.document(),
    }
    spaces = {name: value for name, value in spaces.items() if value and getattr(known, name) is None}
    base = own.sidecar or Sidecar("")
    origins = dict.fromkeys(spaces, f"given: the spaces of {env}")
    return replace(own, sidecar=replace(base, **spaces, provenance={**base.provenance, **origins})), ()


@dataclass(slots=True)
class _TargetWriter:
    """Writer of the target and of all files beside it.

    Afterwards, `back` records whether the source can be restored from the target, and `proof` how the outputs
    of the written networks compare with the source's, or `unproved` why a policy was not compared.
    """

    checkpoint: Checkpoint
    plan: ConversionPlan
    target: str
    request: ConversionRequest
    own: VerifiedSidecar
    recorder: DigestRecorder | None
    progress: Progress
    back: ReverseRecord = field(init=False)
    proof: OutputVerification | None = None
    unproved: tuple[str, ...] = ()
    mismatch: OutputMismatchError | None = None
    code: str | None = None
    places: Mapping[Path, Path] = field(default_factory=dict)
    ledger: LedgerEntries = ()

    def __post_init__(self) -> None:
        """Start with an empty reverse record."""
        self.back = ReverseRecord(why=self.request.no_way_back)

    def write(self) -> Digest | None:
        """Return the target's digest, None if the outputs of one of its networks differ."""
        options, statistics = self.request.options, self._statistics()

        def beside(places: Mapping[Path, Path], lane: WorkerThread) -> list[Output]:
            return [*self._kept(places, lane), *statistics]

        try:
            return write.write_checkpoint(
                self.plan.tree,
                self.target,
                self.request.kind,
                how=WriteOptions(
                    self.checkpoint.files,
                    options.force,
                    options.sync,
                    self.progress,
                    options.jobs,
                    options.ray,
                    self.recorder,
                ),
                receipt=self._receipt,
                others=beside,
            )
        except Exception as error:
            if error is not self.mismatch:
                raise
            return None

    def notes(self, written: Digest | None) -> tuple[str, ...]:
        """Return the report notes on the target, whether or not it was written."""
        lost = () if self.back.note is None or written is None else (self.back.note,)
        proved = self.unproved if self.proof is None else self.proof.notes
        return (*proved, *self._digest_notes(written), *lost)

    def _digest_notes(self, written: Digest | None) -> tuple[str, ...]:
        """Return whether a reversed conversion restored the digest of the original checkpoint."""
        if self.plan.before is None or written is None:
            return ()
        if self.plan.before == written.sha256:
            return ("the digest matches that of the original checkpoint",)
        return (
            "the digest differs from that of the original checkpoint: its format stored something that "
            "this format does not",
        )

    def _kept(self, places: Mapping[Path, Path], lane: WorkerThread) -> list[Output]:
        """Return the file for entries that the target has no place for, if any."""
        self.places = places
        if self.plan.whole:
            self.back = record_reverse(self.plan.ready.tree, self.plan.moves, places)
        if self.back.tree is None:
            self.back.kept = self.plan.kept_tensors()
        outputs = self.back.outputs(self.target, lane)
        for output in outputs:
            require_new(output.file, self.checkpoint.files, force=self.request.options.force, in_store=True)
        return outputs

    def _receipt(self, written: Digest, new_sidecar: Checkpoint) -> Sidecar:
        """Return the target's sidecar; raise OutputMismatchError if the outputs of a network differ."""
        options, binding, own = self.request.options, self.plan.binding, self.own
        if self.recorder is not None:
            own = replace(own, sha256=self.recorder.digest().sha256)
        if binding is None:
            own = receipt.with_policy_facts(self.checkpoint, new_sidecar, own, part=options.part)
            self.unproved = receipt.unplayable_note(own)
        made = receipt.conversion_receipt(
            self.checkpoint, self.plan, own, written, self.back, options.part, self.request.receipt()
        )
        if options.fold_normalizer:
            recorded = {**made.provenance, "obs_norm": "given: folded into the first layers"}
            made = replace(made, obs_norm=None, provenance=recorded)
        made = _with_scores_of(made, self.request.kind.layout)
        if options.code is not None:
            self.code = self._code(made, (own.sha256, written.sha256), new_sidecar)
        if not options.verify or binding is None:
            return made
        # Not a top-level import: most checkpoints that are no agents need it for nothing.
        from ckpttool.verification.output_comparison import (
            OutputMismatchError,
            prepared_source_agent,
            verify_outputs,
        )

        before = prepared_source_agent(self.checkpoint, self.plan.ready.tree, binding, own)
        try:
            self.proof = verify_outputs(before, new_sidecar, self.target, made)
        except OutputMismatchError as error:
            self.proof, self.mismatch = error.proof, error
            raise
        return replace(made, parity=self.proof.entry())

    def _code(self, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint) -> str:
        """Return the code of the written file's networks: of its agent, else of the source's graph.

        Raise UnsupportedError without either, and for what cannot be written exactly.
        """
        source = urls.display_url(self.checkpoint.path)
        try:
            return self._agent_code(record, digests, checkpoint, source)
        except (UnsupportedError, UsageError) as error:
            refusal: CkpttoolError = error
        from ckpttool.conversion.graph_code import GraphPlan, write_graph_code
        from ckpttool.conversion.graph_texts import LANGUAGES

        about = (
            f"Written by ckpttool {__version__} from {source} (sha256 {digests[0]})",
            f"for {os.path.basename(self.target)} (sha256 {digests[1]}).",
            *sidecar.describe_decisions(self.ledger),
        )
        plan = GraphPlan(self.plan.ready.tree, self.plan.moves, checkpoint.tree, self.places)
        target, refused = find_target_name(self.request.kind), False
        for read in (self._model_graph, self._policy_graph) if target in LANGUAGES else ():
            try:
                if (computation := read()) is not None:
                    return write_graph_code(computation[0], plan, target, about, computation[1])
            except (UnsupportedError, UsageError) as error:
                # The first graph's refusal stays, unless an option gives what the second lacks.
                other = refused and not isinstance(error, UsageError)
                refusal, refused = refusal if other else error.located(file=self.target), True
        raise refusal

    def _agent_code(
        self, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint, source: str
    ) -> str:
        from ckpttool.conversion.model_code import write_code

        if self.plan.binding is not None and self.plan.binding.facts.one_hot:
            # The target's layout does not state how they are encoded.
            raise UnsupportedError("--code cannot write networks of discrete observations without a policy")
        file = replace(checkpoint, path=self.target)
        # What its own file contains is read from under its temporary name.
        try:
            binding = recognize_checkpoint(file) or recognize_playable_agent(checkpoint)
            agent = None if binding is None else build_agent(checkpoint, binding, VerifiedSidecar(record))
        except CkpttoolError as error:
            error.file = self.target
            error.hint = None if os.path.basename(checkpoint.path) in str(error.hint) else error.hint
            raise
        if agent is None:
            raise UnsupportedError(
                "--code needs an agent or a policy, and no layout recognises one in the output",
                file=self.target,
                hint="use --to torch, or --to onnx for a model with a graph",
            )
        known = {entry.value for entry in agent.ledger}
        more = (
            each for each in self.ledger if each.open or (each.use == "assumed" and each.value not in known)
        )
        ledger = sidecar.merge_entries(agent.ledger, more)
        return write_code(replace(agent, checkpoint=file, ledger=ledger), self.request.kind, source, digests)

    def _model_graph(self) -> tuple[Graph, None] | None:
        """Return what a source that is no agent computes, if its file states it."""
        from ckpttool.graphs.graph import read_graph

        graph = read_graph(self.checkpoint) if self.plan.binding is None else None
        return None if graph is None else (graph, None)

    def _policy_graph(self) -> tuple[Graph, PolicyCalls] | None:
        """Return what the source's policy computes and how it is called, with the facts that are known."""
        from ckpttool.conversion.policy_graph import read_policy_graph

        binding = recognize_playable_agent(self.checkpoint)
        if binding is None:
            return None
        return read_policy_graph(build_agent(self.checkpoint, binding, self.own))

    def _statistics(self) -> list[Output]:
        """Return the statistics file that the target's library reads beside its own file, if any."""
        binding, options = self.plan.binding, self.request.options
        if binding is None or options.fold_normalizer:
            return []
        layout = plugins.find("layouts", self.request.kind.layout).load()
        if not hasattr(layout, "statistics_beside"):
            return []
        read = restore.read_metadata(binding, select_network_leaves(self.plan.ready.tree, binding))
        facts = restore.merge_metadata(self.own.sidecar, read)
        if facts.obs_norm is None:
            return []
        name, data = layout.statistics_beside(facts)
        file = os.path.join(os.path.dirname(self.target), name)
        require_new(file, self.checkpoint.files, force=options.force, in_store=True)

        def put(stream: IO[bytes]) -> None:
            stream.write(data)

        return [Output(file, put)]
