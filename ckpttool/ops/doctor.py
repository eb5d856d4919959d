"""`doctor`: what is wrong with a checkpoint, or will be when it is used, and the command that mends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool import ledger as ledgers
from ckpttool import urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import ChecksumError, CkpttoolError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.layouts.canonical import NO_LAYOUT, Binding
from ckpttool.layouts.policy_alone import policy_alone
from ckpttool.layouts.recognise import recognised
from ckpttool.ledger import Entries, Entry
from ckpttool.ops import evaluate, evidence, knowledge
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.evaluation import Protocol
from ckpttool.ops.findings import Finding, command, data_alone, unjudged, weightless
from ckpttool.ops.load_into import opened
from ckpttool.ops.model_findings import of_model
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, Own, agent_of, own_sidecar
from ckpttool.ops.stats import Stats, stats_of
from ckpttool.ops.wiring import require_facts
from ckpttool.shown import count
from ckpttool.wire import asked

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of a checkpoint; `notes` say what could not be looked at, or is only good to know."""

    path: str
    format: str
    layout: str | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    ledger: Entries = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "healthy": not self.findings,
            "findings": [each.document() for each in self.findings],
            "ledger": ledgers.documents(self.ledger),
            "notes": list(self.notes),
        }


def diagnose(
    path: str,
    env: str | None = None,
    layout: str | None = None,
    progress: Progress = silent,
    *,
    facts: AgentFacts = NO_FACTS,
    model: Any = None,
    part: str | None = None,
) -> Diagnosis:
    """Look at everything that can be looked at without playing: pickles, numbers, facts, the environment.

    `env` is the environment that the agent is meant for; without it the one that its files name. `facts` are
    what no file holds; where one holds something else, that is a finding. With a
    `model`, a live one or a Like, also what of it nothing in the checkpoint fills; `part` takes what lies
    below one path, or one network. Raise what opening and reading raise: a damaged file is no finding, it is
    an error.
    """
    if model is None and part is not None:
        raise UsageError("a part is for a model")
    checkpoint = opened(path)
    notes: list[str] = []
    binding = recognised(checkpoint, layout)
    numbers = stats_of(checkpoint, binding, progress=progress)
    findings = list(_at_rest(checkpoint, binding, numbers, notes))
    played = binding
    if binding is None and layout in (None, NO_LAYOUT) and (facts or env is not None):
        try:
            played = policy_alone(checkpoint)
        except CkpttoolError as error:
            findings.append(Finding("agent", error.message + _facts(error), error.hint))
    entries: list[Entry] = []
    findings += _agent(checkpoint, played, env, (notes, entries), _environment, facts=facts)
    if model is not None:
        findings += of_model(checkpoint, model, part, notes)
    return _diagnosis(checkpoint, binding, findings, notes, entries)


def examined(checkpoint: Checkpoint, binding: Binding | None, numbers: Stats, sha256: str) -> Diagnosis:
    """Return what is wrong with a checkpoint of which the agent, numbers and digest are known.

    Nothing is read again, and no environment is made.
    """
    notes: list[str] = []
    findings = list(_at_rest(checkpoint, binding, numbers, notes))
    entries: list[Entry] = []
    findings += _agent(checkpoint, binding, None, (notes, entries), lambda *_: iter(()), sha256)
    return _diagnosis(checkpoint, binding, findings, notes, entries)


def _diagnosis(
    checkpoint: Checkpoint,
    binding: Binding | None,
    findings: list[Finding],
    notes: list[str],
    entries: list[Entry],
) -> Diagnosis:
    if checkpoint.integrity == "none":
        notes.append("the format has no checksums: `ckpttool digest PATH --json` saves some")
    named = None if binding is None else binding.layout
    path = urls.spelled(checkpoint.path)
    return Diagnosis(path, checkpoint.format, named, tuple(findings), tuple(notes), tuple(entries))


def _at_rest(
    checkpoint: Checkpoint, binding: Binding | None, numbers: Stats, notes: list[str]
) -> Iterator[Finding]:
    yield from _loading(checkpoint, notes)
    # A pickle of plain values may be anybody's settings.
    yield from weightless(checkpoint, values=checkpoint.format != "pickle")
    yield from _numbers(numbers)
    yield from _orphans(checkpoint, binding)


def _loading(checkpoint: Checkpoint, notes: list[str]) -> Iterator[Finding]:
    """Give what would run if the framework loaded the file."""
    acting = asked.of(checkpoint.asks, asked.CODE)
    fix = data_alone(checkpoint.path)
    for each in acting[:_SHOWN]:
        what = "call" if each.calls else "import"
        yield Finding("loading", f"loading it would {what} {each.name}", fix)
    if len(acting) > _SHOWN:
        more = count(len(acting) - _SHOWN, "more name that acts", "more names that act")
        yield Finding("loading", f"and {more}", fix)
    yield from unjudged(checkpoint.unjudged)
    classes = asked.of(checkpoint.asks, asked.CLASSES)
    if classes:
        notes.append(f"loading it imports {count(len(classes), 'name')} from outside of the standard library")


def _numbers(numbers: Stats) -> Iterator[Finding]:
    """Give what `stats` calls no good sign, the same sign of many tensors once."""
    tensors: dict[str, list[str]] = {}
    for each in numbers.tensors:
        for sign in each.signs:
            tensors.setdefault(sign, []).append(each.path)
    for sign, paths in tensors.items():
        more = f" and {count(len(paths) - 1, 'other')}" if len(paths) > 1 else ""
        fix = "an earlier checkpoint of the run" if sign.endswith(("NaN", "infinite")) else None
        yield Finding("numbers", f"{paths[0]}{more}: {sign}", fix)


def _orphans(checkpoint: Checkpoint, binding: Binding | None) -> Iterator[Finding]:
    """Give the moments of weights that are not there: no restore has a variable for them."""
    owners = {} if binding is None else binding.of
    tree = checkpoint.tree
    alone = [
        tree.names[path]
        for path, leaf in tree.tensors()
        if leaf.role == "slot" and leaf.of is None and path not in owners
    ]
    if alone:
        belong = count(len(alone), "moment belongs", "moments belong")
        yield Finding(
            "optimizer",
            f"{belong} to no weight of the file, such as {alone[0]}",
            f"{command('inspect', checkpoint.path)} shows which have an owner",
        )


def _agent(
    checkpoint: Checkpoint,
    binding: Binding | None,
    env: str | None,
    told: tuple[list[str], list[Entry]],
    place: Callable[[Agent, str | None, list[str]], Iterator[Finding]],
    sha256: str | None = None,
    facts: AgentFacts = NO_FACTS,
) -> Iterator[Finding]:
    """Give what running the checkpoint as an agent would lack, and what `place` says of its environment.

    Notes and the entries of the agent's ledger are added to the lists of `told`.
    """
    notes, entries = told
    if binding is None:
        notes.append("no layout recognises an agent: bounds, statistics and environment were not looked at")
        entries += _of_model(checkpoint, sha256)
        yield from _unused(entries)
        return
    own = Own()
    try:
        own = own_sidecar(checkpoint, sha256)
    except ChecksumError as error:
        yield Finding("agent", error.message, error.hint)
    try:
        agent = agent_of(checkpoint, binding, own, facts)
    except UnsupportedError as error:
        if own.sidecar is None or own.sidecar.computation is None:
            raise
        yield Finding("agent", error.message, error.hint)
        return
    before = knowledge.merged(own.sidecar, knowledge.of_files(binding, agent.tree))
    for sentence in facts.contradictions(before):
        yield Finding("agent", sentence, "leave the option out if the checkpoint is right")
    try:
        require_facts(
            agent, "eval", checkpoint.path, "--env", env or (agent.known.env or {}).get("id") or "ID"
        )
    except UsageError as error:
        yield Finding("agent", error.message, error.hint)
        return
    entries += (each for each in agent.ledger if env is None or each != ledgers.NO_BOUNDS)
    bounds = f"{command('eval', checkpoint.path, '--env', 'ID')} takes them from the environment"
    yield from _unused(entries, bounds)
    yield from place(agent, env, notes)


def _of_model(checkpoint: Checkpoint, sha256: str | None) -> Entries:
    """Return the ledger that a conversion has: of the policy that the checkpoint is alone, or of a model."""
    with contextlib.suppress(CkpttoolError):
        binding = policy_alone(checkpoint)
        if binding is not None:
            own = own_sidecar(checkpoint, sha256)
            try:
                return agent_of(checkpoint, binding, own).ledger
            except UnsupportedError as error:
                if own.sidecar is not None and own.sidecar.computation is not None:
                    return (ledgers.unknown("architecture", error.message, decides=True, hint=error.hint),)
                raise
    return evidence.left_by_model(checkpoint, frozenset(checkpoint.tree.names.values()))


def _unused(entries: Iterable[Entry], bounds: str | None = None) -> Iterator[Finding]:
    """Give a finding for each entry of the ledger that is not used; `bounds` says what gives the bounds."""
    for entry in entries:
        if entry.use in ("not used", "cannot be known"):
            fix = bounds if entry == ledgers.NO_BOUNDS else entry.hint
            yield Finding("agent", f"{entry.use}: {entry.sentence}", fix)


def _environment(agent: Agent, env: str | None, notes: list[str]) -> Iterator[Finding]:
    """Give what keeps the agent from playing, or has changed since it was trained."""
    known = agent.known.env or {}
    if env is None and not known.get("id"):
        notes.append("environment unknown; pass --env ID to check the agent against it")
        return
    try:
        how = Protocol()
        place = evaluate.place_of(agent, env, how)
        with place.make(1, how.engine) as vector:
            entrant = evaluate.enter(agent, place, how, vector.spec)
    except MissingExtraError as error:
        notes.append(f"the environment was not looked at: {error.message}")
        return
    except CkpttoolError as error:
        yield Finding("environment", error.message + _facts(error), error.hint)
        return
    yield from (Finding("environment", note) for note in entrant.notes if note not in agent.notes)


def _facts(error: CkpttoolError) -> str:
    told = (("expected", error.expected), ("found", error.found))
    facts = [f"{word} {value}" for word, value in told if value]
    return f" ({', '.join(facts)})" if facts else ""
