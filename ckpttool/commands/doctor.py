"""Diagnose problems of a checkpoint and of its agent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpttool.commands.stats import Stats, compute_stats
from ckpttool.conversion import parts
from ckpttool.conversion.filling import FillOptions, LiveModel, ModelFillPlan, plan_model_fill
from ckpttool.core import code_references, plugins, sidecar, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import (
    ChecksumError,
    CkpttoolError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry
from ckpttool.core.text import describe_record, format_count, render_record
from ckpttool.core.tree import display
from ckpttool.core.urls import format_command
from ckpttool.evaluation import evidence, playing, restore
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import require_facts
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import Agent, VerifiedSidecar, build_agent, read_verified_sidecar
from ckpttool.formats.detect import ensure_open
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import NO_LAYOUT, RecognizedAgent
from ckpttool.libraries.single_networks import recognize_single_policy
from ckpttool.listing.audit import LoadingVerdict, judge_loading
from ckpttool.listing.findings import Finding, data_only_command, unjudged_findings, weightless_findings
from ckpttool.networks import live, live_trees
from ckpttool.networks.worker import ModelSpec

_MODEL_MAX_SHOWN = 4


def examine_model(
    checkpoint: Checkpoint, model: Any, part: str | None, notes: list[str]
) -> Iterator[Finding]:
    """Yield what prevents the checkpoint, or its `part`, from filling a live model or the model of a Like.

    For a live model, also yield what its own framework's restore by name would leave unchanged, and
    what saving it would omit.
    """
    target = model if isinstance(model, ModelSpec) else LiveModel(model)
    met = plan_model_fill(target, checkpoint, FillOptions(part=part))
    yield from _unfilled_findings(met)
    if met.report.unused:
        unused = abbreviate_list(met.report.unused, _MODEL_MAX_SHOWN)
        many = format_count(len(met.report.unused), "entry", "entries")
        notes.append(f"{met.model} has no place for {many}: {unused}")
    if isinstance(target, LiveModel):
        yield from _restore_findings(checkpoint, target, part, met)


def _unfilled_findings(met: ModelFillPlan) -> Iterator[Finding]:
    names = [met.skeleton.names[path] for path in met.filling.unfilled]
    if names:
        many = format_count(len(names), "tensor")
        yield Finding(
            "model",
            f"no checkpoint entry fills {many} of {met.model}: {abbreviate_list(names, _MODEL_MAX_SHOWN)}",
        )
    for misfit in met.filling.misfits[:_MODEL_MAX_SHOWN]:
        yield Finding("model", f"{misfit.error.message} (expected {misfit.expected}, found {misfit.found})")
    for group in met.filling.ambiguous[:_MODEL_MAX_SHOWN]:
        could = f"{abbreviate_list(group.sources, _MODEL_MAX_SHOWN)} could fill {abbreviate_list(group.targets, _MODEL_MAX_SHOWN)}"  # noqa: E501
        yield Finding("model", could, "pass match={SOURCE: TARGET} to load_into to choose the pairs")


def _restore_findings(
    checkpoint: Checkpoint, target: LiveModel, part: str | None, met: ModelFillPlan
) -> Iterator[Finding]:
    """Yield what the framework's own save and restore would omit.

    Keras on another backend saves only whole models, which contain everything.
    """
    if target.framework != "torch" and not live_trees.is_trackable(target.model):
        return
    tree = checkpoint.tree
    if part is not None:
        try:
            tree = parts.select_part(tree, part)[0]
        except UsageError:  # a network of the agent, which no restore finds by that name
            return
    owner = "torch" if target.framework == "torch" else "tensorflow"
    foreign = owner != plugins.find("formats", checkpoint.format).load().FRAMEWORK
    audit = live.audit(target.model, None if foreign else tree)
    for row in audit.unsaved[:_MODEL_MAX_SHOWN]:
        yield Finding("model", f"saving {met.model} would leave out {display(row.path)}: {row.reason}")
    for path, reason in list(audit.refused.items())[:_MODEL_MAX_SHOWN]:
        yield Finding("model", f"{display(path)} cannot be saved: {reason}")
    left = [display(path) for path in audit.unfilled]
    if left and not met.filling.unfilled:
        as_is = format_count(len(left), "variable unchanged", "variables unchanged")
        sentence = f"restoring by name would leave {as_is}: {abbreviate_list(left, _MODEL_MAX_SHOWN)}"
        yield Finding("model", sentence, "ckpttool.load_into(model, path) fills all of them")


_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of a checkpoint; `notes` list checks that were not possible, and other information."""

    __repr__ = describe_record
    _repr_html_ = render_record

    path: str
    format: str
    layout: str | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    ledger: LedgerEntries = ()
    loading: LoadingVerdict | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "healthy": not self.findings,
            "findings": [finding.document() for finding in self.findings],
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.notes),
        }


def diagnose(
    path: str,
    env: str | None = None,
    layout: str | None = None,
    progress: Progress = ignore_progress,
    *,
    facts: AgentFacts = NO_FACTS,
    model: Any = None,
    part: str | None = None,
) -> Diagnosis:
    """Run all checks that need no playing: pickles, values, facts and the environment.

    Raise whatever opening and reading raise: a damaged file is an error, not a finding.

    Args:
        path: the checkpoint: a file, prefix or folder.
        env: the intended environment; without it, the one in the agent's files is used.
        layout: the layout, if it is not to be recognised.
        progress: called with the finished and the total amount of work.
        facts: facts that no file contains; a file with another value is a finding.
        model: a live model, or a Like: what the checkpoint does not fill in it is reported too.
        part: selects the entries under one path, or one network, for the model.

    >>> import ckpttool
    >>> ckpttool.doctor("sample_ckpts/td3_pendulum_tf/ckpt-15000").findings
    ()
    """
    if model is None and part is not None:
        raise UsageError("part can be used only with a model")
    checkpoint = ensure_open(path)
    notes: list[str] = []
    binding = recognize_checkpoint(checkpoint, layout)
    numbers = compute_stats(checkpoint, binding, progress=progress, histograms=False)
    findings = list(_static_findings(checkpoint, binding, numbers, notes))
    played = binding
    if binding is None and layout in (None, NO_LAYOUT) and (facts or env is not None):
        try:
            played = recognize_single_policy(checkpoint)
        except CkpttoolError as error:
            findings.append(Finding("agent", error.message + _format_error_facts(error), error.hint))
    entries: list[LedgerEntry] = []
    findings += _agent_findings(checkpoint, played, env, (notes, entries), _environment_findings, facts=facts)
    if model is not None:
        findings += examine_model(checkpoint, model, part, notes)
    return _diagnose_checkpoint(checkpoint, binding, findings, notes, entries)


def examine_agent(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, numbers: Stats, sha256: str
) -> Diagnosis:
    """Return the diagnosis of a checkpoint whose agent, values and digest are already known.

    Nothing is read again, and no environment is created.
    """
    notes: list[str] = []
    findings = list(_static_findings(checkpoint, binding, numbers, notes))
    entries: list[LedgerEntry] = []
    findings += _agent_findings(checkpoint, binding, None, (notes, entries), lambda *_: iter(()), sha256)
    return _diagnose_checkpoint(checkpoint, binding, findings, notes, entries)


def _diagnose_checkpoint(
    checkpoint: Checkpoint,
    binding: RecognizedAgent | None,
    findings: list[Finding],
    notes: list[str],
    entries: list[LedgerEntry],
) -> Diagnosis:
    if checkpoint.integrity == "none":
        notes.append("the format has no checksums; `ckpttool digest PATH --json` saves digests")
    named = None if binding is None else binding.layout
    path = urls.display_url(checkpoint.path)
    return Diagnosis(
        path,
        checkpoint.format,
        named,
        tuple(findings),
        tuple(notes),
        tuple(entries),
        judge_loading(checkpoint),
    )


def _static_findings(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, numbers: Stats, notes: list[str]
) -> Iterator[Finding]:
    yield from _loading_findings(checkpoint, notes)
    # A pickle of plain values may be the settings of any program.
    yield from weightless_findings(checkpoint, values=checkpoint.format != "pickle")
    yield from _number_findings(numbers)
    yield from _orphan_slot_findings(checkpoint, binding)


# What a loader does with code that is a file or a node of a graph, not a name.
_ACTIONS = {"torchscript": "compile", "tensorflow": "run", "onnx": "use", "program": "make available"}


def _loading_findings(checkpoint: Checkpoint, notes: list[str]) -> Iterator[Finding]:
    """Yield the code that would run if the framework loaded the file."""
    acting = [
        reference
        for verdict in (code_references.CODE, code_references.UNKNOWN)
        for reference in code_references.filter_verdict(checkpoint.code_references, verdict)
    ]
    fix = data_only_command(checkpoint.path)
    for reference in acting[:_SHOWN]:
        yield Finding("loading", f"loading it would {_describe_action(reference)} {reference.name}", fix)
    if len(acting) > _SHOWN:
        more = format_count(len(acting) - _SHOWN, "more name that runs code", "more names that run code")
        yield Finding("loading", f"and {more}", fix)
    yield from unjudged_findings(checkpoint.unjudged)
    classes = code_references.filter_verdict(checkpoint.code_references, code_references.CLASSES)
    if classes:
        notes.append(
            f"loading it imports {format_count(len(classes), 'name')} from outside the standard library"
        )


def _describe_action(reference: code_references.CodeReference) -> str:
    if reference.verdict == code_references.UNKNOWN:
        return "create an instance of the unknown class"
    return "call" if reference.calls else _ACTIONS.get(reference.by, "import")


def _number_findings(numbers: Stats) -> Iterator[Finding]:
    """Yield the bad signs that `stats` finds, each sign once for all its tensors."""
    tensors: dict[str, list[str]] = {}
    for tensor in numbers.tensors:
        for sign in tensor.signs:
            tensors.setdefault(sign, []).append(tensor.path)
    for sign, paths in tensors.items():
        more = f" and {format_count(len(paths) - 1, 'other')}" if len(paths) > 1 else ""
        fix = "go back to an earlier checkpoint of the run" if sign.endswith(("NaN", "infinite")) else None
        yield Finding("numbers", f"{paths[0]}{more}: {sign}", fix)


def _orphan_slot_findings(checkpoint: Checkpoint, binding: RecognizedAgent | None) -> Iterator[Finding]:
    """Yield the optimizer moments of missing weights, which no restore can use."""
    owners = {} if binding is None else binding.of
    tree = checkpoint.tree
    alone = [
        tree.names[path]
        for path, leaf in tree.tensors()
        if leaf.role == "slot" and leaf.of is None and path not in owners
    ]
    if alone:
        belong = format_count(len(alone), "moment belongs", "moments belong")
        yield Finding(
            "optimizer",
            f"{belong} to no weight in the file, e.g. {alone[0]}",
            f"{format_command('inspect', checkpoint.path)} shows which moments have an owner",
        )


def _agent_findings(
    checkpoint: Checkpoint,
    binding: RecognizedAgent | None,
    env: str | None,
    remarks: tuple[list[str], list[LedgerEntry]],
    examine: Callable[[Agent, str | None, list[str]], Iterator[Finding]],
    sha256: str | None = None,
    facts: AgentFacts = NO_FACTS,
) -> Iterator[Finding]:
    """Yield what is missing to run the checkpoint as an agent, and `place`'s findings on its environment.

    Notes and the agent's ledger entries are appended to the lists in `remarks`.
    """
    notes, entries = remarks
    if binding is None:
        notes.append("no layout recognises an agent; bounds, statistics and environment were not checked")
        entries += _conversion_ledger(checkpoint, sha256)
        yield from _unused_entry_findings(entries)
        return
    own = VerifiedSidecar()
    try:
        own = read_verified_sidecar(checkpoint, sha256)
    except ChecksumError as error:
        yield Finding("agent", error.message, error.hint)
    try:
        agent = build_agent(checkpoint, binding, own, facts)
    except UnsupportedError as error:
        if own.sidecar is None or own.sidecar.computation is None:
            raise
        yield Finding("agent", error.message, error.hint)
        return
    before = restore.merge_metadata(own.sidecar, restore.read_metadata(binding, agent.tree))
    for sentence in facts.contradictions(before, binding.facts.stated):
        yield Finding("agent", sentence, "omit the option if the checkpoint is correct")
    try:
        # An environment may show what the policy's outputs are; what is missing then is a finding on it.
        if env is None or not playing.asks_environment(agent, env):
            require_facts(agent)
    except UsageError as error:
        yield Finding("agent", error.message, error.hint)
        return
    entries += (entry for entry in agent.ledger if env is None or entry != sidecar.NO_BOUNDS)
    bounds = f"{format_command('eval', checkpoint.path, '--env', 'ID')} uses the bounds of the environment"
    yield from _unused_entry_findings(entries, bounds)
    yield from examine(agent, env, notes)


def _conversion_ledger(checkpoint: Checkpoint, sha256: str | None) -> LedgerEntries:
    """Return the ledger of a conversion: of the checkpoint as a single policy, or of a model."""
    with contextlib.suppress(CkpttoolError):
        binding = recognize_single_policy(checkpoint)
        if binding is not None:
            own = read_verified_sidecar(checkpoint, sha256)
            try:
                return build_agent(checkpoint, binding, own).ledger
            except UnsupportedError as error:
                if own.sidecar is not None and own.sidecar.computation is not None:
                    return (
                        sidecar.unknown_fact("architecture", error.message, decides=True, hint=error.hint),
                    )
                raise
    return evidence.unconverted_entries(checkpoint, frozenset(checkpoint.tree.names.values()))


def _unused_entry_findings(entries: Iterable[LedgerEntry], bounds: str | None = None) -> Iterator[Finding]:
    """Yield a finding for each unused ledger entry; `bounds` is the fix for missing action bounds."""
    for entry in entries:
        if entry.use in ("not used", "cannot be known"):
            fix = bounds if entry == sidecar.NO_BOUNDS else entry.hint
            yield Finding("agent", f"{entry.use}: {entry.sentence}", fix)


def _environment_findings(agent: Agent, env: str | None, notes: list[str]) -> Iterator[Finding]:
    """Yield what prevents the agent from playing, or has changed since training."""
    known = agent.known.env or {}
    if env is None and not known.get("id"):
        notes.append("environment unknown; pass --env ID to check the agent against it")
        return
    try:
        how = Protocol()
        environment = playing.choose_environment(agent, env, how)
        with environment.make(1, how.engine) as vector:
            entrant = playing.prepare_agent(agent, environment, how, vector.spec)
    except MissingExtraError as error:
        notes.append(f"environment not checked: {error.message}")
        return
    except CkpttoolError as error:
        # The listing of a file, which also prints this, has no such option.
        other = re.match(r"use (--env) (\S+)", error.hint or "")
        fix = error.hint if other is None else format_command("eval", agent.checkpoint.path, *other.groups())
        yield Finding("environment", error.message + _format_error_facts(error), fix)
        return
    yield from (Finding("environment", note) for note in entrant.notes if note not in agent.notes)


def _format_error_facts(error: CkpttoolError) -> str:
    layer_facts = (("expected", error.expected), ("found", error.found))
    facts = [f"{word} {value}" for word, value in layer_facts if value]
    return f" ({', '.join(facts)})" if facts else ""
