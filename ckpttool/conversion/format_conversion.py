"""Convert a checkpoint: the kind of conversion; to a format: facts, plan, target, proof and receipt."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from ckpttool.conversion import receipt, write
from ckpttool.conversion.options import (
    STANDARD_OUTPUT,
    ConversionOptions,
    ConversionRequest,
    parse_request,
    require_compatible,
)
from ckpttool.conversion.plan import ConversionPlan, ConversionResult, plan_conversion
from ckpttool.conversion.reverse import ReverseRecord, record_reverse
from ckpttool.conversion.targets import (
    EXPORTS,
    complete_hint,
    complete_hints,
    infer_target_word,
    parse_target_kind,
    sharded_kind,
    target_stem,
)
from ckpttool.conversion.write import WriteOptions
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import Output, Progress, WorkerThread, ignore_progress, require_new
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.digests import Digest, DigestRecorder
from ckpttool.core.errors import CkpttoolError, MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries, Sidecar
from ckpttool.core.tree import Path
from ckpttool.evaluation import evidence, restore
from ckpttool.evaluation.agent_facts import AgentFacts, add_environment
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
from ckpttool.formats.probe import format_framework
from ckpttool.libraries import schema
from ckpttool.libraries.recognize import remembering
from ckpttool.libraries.schema import layer_widths
from ckpttool.mapping.layer_kinds import LayerOption

if TYPE_CHECKING:
    from ckpttool.verification.output_comparison import OutputMismatchError, OutputVerification


# Formats for arrays of any kind, which can also store data without a network.
_ARRAYS = frozenset(("npz", "safetensors", "sharded"))


@remembering()
def convert_to_format(
    source: str, target: str, request: ConversionRequest, facts: AgentFacts, progress: Progress
) -> ConversionResult:
    """Convert a checkpoint to the format of the request; write nothing if an entry is unmapped.

    Args:
        source: the checkpoint to read.
        target: the path to write.
        request: the format, and the options in their parsed form.
        facts: facts of the agent that no file contains.
        progress: called with the finished and the total amount of work.
    """
    options = request.options
    checkpoint = open_checkpoint(source)
    _require_convertible(checkpoint, target, request)
    target = target_stem(target, request.kind)
    if options.code is not None:
        from ckpttool.conversion.target_code import require_code_file  # only conversions with code need it

        require_code_file(request, checkpoint)
    if not options.dry_run:
        write.require_new_target(target, request.kind, checkpoint, force=options.force)
    checkpoint = keep_network_reads(checkpoint)
    observed: Sequence[LayerOption] = ()
    if options.like_source is not None:
        from ckpttool.conversion.filled_model import observed_options  # no other conversion needs its modules

        observed = observed_options(checkpoint, request)
        request = request._replace(layer_options=(*observed, *request.layer_options))
    source_sidecar = read_verified_sidecar(checkpoint)
    own, notes = _apply_facts(source_sidecar, checkpoint, request, facts)
    own, more = _with_spaces(own, checkpoint, request, facts.env if facts else None)
    notes = (*notes, *more)
    if observed:
        from ckpttool.conversion.layer_options import describe_layer_options

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
        writer = TargetWriter(checkpoint, plan, target, request, own, recorder, progress, ledger=done.ledger)
        written = writer.write()
    if written is not None and writer.code is not None and options.code != STANDARD_OUTPUT:
        from ckpttool.conversion.target_code import write_code_file

        load = write_code_file(writer.code, target, request, checkpoint)
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
    if not plan.report.unused:
        return
    from ckpttool.conversion.parts import largest_matrices

    largest = largest_matrices(plan.ready.tree)
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
        from ckpttool.evaluation.other_content import no_network_error

        refused = no_network_error(checkpoint, rest=words)
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


def _with_scores_of(written: Sidecar, layout: str) -> Sidecar:
    """Return the sidecar with what the outputs of the target's library are, e.g. quantiles in its order."""
    if written.choices is None:
        return written
    renamed: Mapping[str, str] = getattr(plugins.find("layouts", layout).load(), "WRITTEN_SCORES", {})
    if written.choices["scores"] not in renamed:
        return written
    return replace(written, choices={**written.choices, "scores": renamed[written.choices["scores"]]})


def _with_spaces(
    own: VerifiedSidecar, checkpoint: Checkpoint, request: ConversionRequest, env: str | None
) -> tuple[VerifiedSidecar, tuple[str, ...]]:
    """Return the source's sidecar with the spaces of the given environment that no file records.

    Only a library's own file and code may need them. Without a given environment, code takes the recorded one
    of a policy whose outputs may choose discrete actions. Raise EnvironmentMismatchError if they do not fit.
    """
    code = request.options.code is not None
    named = own.sidecar is not None and own.sidecar.env is not None
    if not (code or request.kind.agent) or (env is None and not (code and named)):
        return own, ()
    from ckpttool.evaluation import environments, playing

    binding = recognize_playable_agent(checkpoint, request.options.layout)
    if binding is None:
        return own, ()
    agent = build_agent(checkpoint, binding, own)
    known, part = agent.known, agent.binding.policy
    recorded = known.observation_space and (known.choices or known.action_low)
    if recorded or part is None or part.component in agent.binding.fronts:
        return own, ()
    trusted = env is not None
    if env is None:
        if not playing.asks_environment(agent, None):
            return own, ()
        env = str((known.env or {})["id"])
    try:
        with environments.make_vector_env(env, trusted=trusted) as vector_env:
            spec = vector_env.spec
    except CkpttoolError as error:
        return own, (f"no spaces were read, because {env} cannot be created: {error.message}",)
    agent = playing.assume_choices(agent, spec)
    bounds = playing.read_action_bounds(agent, layer_widths(agent.tree, part), spec)
    # What the environment shows of the outputs: atoms, or a state's value before the advantages.
    choices = schema.known_choices(agent.known) or playing.spec_choices(spec)
    observed = {
        name: (low.reshape(-1).tolist(), high.reshape(-1).tolist())
        for name, (low, high) in spec.observation_bounds.items()
    }
    spaces: dict[str, Any] = {
        "observation_space": schema.make_observation_space("gymnasium", observed),
        **({"action_low": list(bounds.low), "action_high": list(bounds.high)} if choices is None else {}),
        "choices": None if choices is None else choices.document(),
        # Of outputs whose map no file records.
        "head": agent.known.head if choices is not None else None,
    }
    spaces = {name: value for name, value in spaces.items() if value and not getattr(known, name)}
    base = own.sidecar or Sidecar("")
    origins = dict.fromkeys(spaces, f"{'given' if trusted else 'assumed'}: the spaces of {env}")
    return replace(own, sidecar=replace(base, **spaces, provenance={**base.provenance, **origins})), ()


@dataclass(slots=True)
class TargetWriter:
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
        output = receipt.conversion_receipt(
            self.checkpoint, self.plan, own, written, self.back, options.part, self.request.receipt()
        )
        if options.fold_normalizer:
            recorded = {**output.provenance, "obs_norm": "given: folded into the first layers"}
            output = replace(output, obs_norm=None, provenance=recorded)
        output = _with_scores_of(output, self.request.kind.layout)
        if options.code is not None:
            from ckpttool.conversion.target_code import format_code

            self.code = format_code(self, output, (own.sha256, written.sha256), new_sidecar)
        if not options.verify or binding is None:
            return output
        # Not a top-level import: most checkpoints that are no agents need it for nothing.
        from ckpttool.verification.output_comparison import (
            OutputMismatchError,
            prepared_source_agent,
            verify_outputs,
        )

        before = prepared_source_agent(self.checkpoint, self.plan.ready.tree, binding, own)
        try:
            self.proof = verify_outputs(before, new_sidecar, self.target, output)
        except OutputMismatchError as error:
            self.proof, self.mismatch = error.proof, error
            raise
        return replace(output, parity=self.proof.entry())

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
            from ckpttool.conversion.export import export

            return export(source, target, replace(options, facts=facts))
        if options.like is not None:
            # A model is matched layer by layer.
            from ckpttool.conversion.filled_model import convert_into_model

            return convert_into_model(source, target, options.like, options, progress)
        kind = parse_target_kind(target, options.to)
        spread = options.jobs is not None or options.ray is not None
        kind = sharded_kind(target, kind, options.shard_size, options.shards, spread)
        return convert_to_format(source, target, parse_request(kind, options), facts, progress)
