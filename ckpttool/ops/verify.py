"""`verify`: two checkpoints of one agent give the same outputs, each run by its own framework.

With `steps` both also go on training on the same batches (ops/train_step.py). With `whole` everything that
the two hold is compared as well, also of models that are no agents (ops/discrepancies.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckpttool import ledger as ledgers
from ckpttool import plugins, urls
from ckpttool.agents.network import Network
from ckpttool.agents.worker import TIMEOUT_S, Worker
from ckpttool.errors import MappingError, UnsupportedError, UsageError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts.canonical import OPTIMIZERS, RUN
from ckpttool.ledger import Entries, Entry
from ckpttool.ops import learner as learners
from ckpttool.ops import optimizer_facts
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.digest import digest_of
from ckpttool.ops.discrepancies import Contents, Discrepancy, Party, contents
from ckpttool.ops.optimizer_options import NOTHING_STATED, stated_in
from ckpttool.ops.pairs import lost, pairs, shared, wired
from ckpttool.ops.parity import OWN_ERROR, Parity, measured, observations, run, unlike
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.reconversion import receipt_of
from ckpttool.ops.restore import Agent, Own, agent_of, playable_binding, restore
from ckpttool.ops.train_step import TrainStep, batches, train_step
from ckpttool.ops.wiring import require_facts
from ckpttool.shown import count


@dataclass(frozen=True, slots=True)
class Verification:
    """All networks that both checkpoints have; `backends` ran A and B.

    `training` and `contents` are there if they were asked for. `not_compared` names what the checkpoints hold
    and this verification says nothing of.
    """

    first: str
    second: str
    backends: tuple[str, str]
    networks: tuple[Parity, ...]
    tolerance: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    training: TrainStep | None = None
    contents: Contents | None = None
    not_compared: tuple[str, ...] = ()
    ledger: Entries = ()

    @property
    def within(self) -> bool:
        """Say whether every network is within the tolerance, every update within its bound, and all equal."""
        forward = all(network.within for network in self.networks)
        return forward and (self.training is None or self.training.within) and not self.discrepancies

    @property
    def discrepancies(self) -> tuple[Discrepancy, ...]:
        """What was found to differ besides the networks' outputs."""
        return () if self.contents is None else self.contents.discrepancies

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "a": self.first,
            "b": self.second,
            "backends": list(self.backends),
            "networks": [network.document() for network in self.networks],
            "tolerance": self.tolerance,
            "within": self.within,
            **({"training": self.training.document()} if self.training is not None else {}),
            **({"contents": self.contents.document()} if self.contents is not None else {}),
            "not_compared": list(self.not_compared),
            "assumed": list(self.assumed),
            "ledger": ledgers.documents(self.ledger),
            "notes": list(self.notes),
        }


def verify(
    first: str,
    second: str,
    *,
    tolerance: float | None = None,
    steps: int | None = None,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    python: str | None = None,
    whole: bool = False,
    progress: Progress = silent,
) -> Verification:
    """Compare every network that both checkpoints have on fixed observations (and actions).

    `tolerance` replaces the default bound: B's largest error against float64, relative to the output's
    scale. With `steps` both are trained on for that many updates. `facts` are what no file holds of the agent
    that both are. `python` names the interpreter that runs the frameworks. With `whole` every entry, fact,
    setting and receipt is compared, exactly, and what is no agent is compared by its entries. Otherwise
    raise UsageError when the two have no network in common.
    """
    if whole:
        return _whole(first, second, tolerance, steps, layout, facts, python, progress)
    a, b = restore(first, layout, facts), restore(second, facts=facts)
    found = _networks(a, b, (first, second), tolerance, steps, python, progress)
    left = [list(_left_out(agent, trained=steps is not None)) for agent in (a, b)]
    said = [f"{word}: {', '.join(parts)}" for word, parts in zip("AB", left, strict=True) if parts]
    return replace(
        found,
        not_compared=(*found.not_compared, *([", ".join(left[0])] if left[0] == left[1] != [] else said)),
    )


def _networks(
    a: Agent,
    b: Agent,
    paths: tuple[str, str],
    tolerance: float | None,
    steps: int | None,
    python: str | None,
    progress: Progress,
) -> Verification:
    """Compare what the networks of two agents give."""
    for one, other in ((a, b), (b, a)):
        require_facts(one, "verify", *paths, other=other)
    titles = shared(a, b)
    if not titles:
        raise UsageError("the two checkpoints have no network in common", file=paths[1])
    assumed: list[str] = []
    compared, notes = pairs(a, b, titles, assumed)
    found, training = [], None
    backends = (_backend(a), _backend(b))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(name, python, steps)) for name in backends]
        for number, (title, (left, right)) in enumerate(compared.items()):
            progress(number, len(compared))
            found.append(_parity(title, left, right, workers, tolerance))
        if steps is not None:
            training, said = _trained(a, b, steps, workers, assumed)
            notes += said
    # What A has and B lacks cannot be the same, unless B is the conversion of a part; what B has besides
    # says nothing against it.
    part = _part_of(a, b) if lost(a, b) else None
    outside = [f"{title} (B was converted from {part} alone)" for title in lost(a, b)] if part else []
    found += [unlike(title) for title in lost(a, b)] if part is None else []
    return Verification(
        urls.spelled(a.checkpoint.path),
        urls.spelled(b.checkpoint.path),
        backends,
        tuple(found),
        _bound(tolerance),
        tuple(dict.fromkeys(assumed)),
        tuple(dict.fromkeys((*_said(a, b), *notes, *a.notes, *b.notes))),
        training,
        ledger=ledgers.merged(_of_side("A", a, b), _of_side("B", b, a)),
        not_compared=(*(title for title in titles if title not in compared), *outside),
    )


def _bound(tolerance: float | None) -> str:
    if tolerance is None:
        return f"error against float64 at most {OWN_ERROR:g}x that of A, or rounding at the largest sum"
    return f"error against float64 at most {tolerance:g} of the output's scale"


def _left_out(agent: Agent, *, trained: bool) -> Iterator[str]:
    """Go through the parts that no network's output depends on; `trained` optimizers are compared."""
    tops = {str(move.target[0].value) for move in agent.binding.moves.moves} - {*RUN}
    yield from (name for name in OPTIMIZERS if name in tops and not trained)
    yield from sorted(tops - {*OPTIMIZERS})
    bound = {move.source for move in agent.binding.moves.moves} | agent.binding.consumed
    rest = sum(path not in bound for path in agent.checkpoint.tree)
    if rest:
        yield count(rest, "other entry", "other entries")


def _whole(
    first: str,
    second: str,
    tolerance: float | None,
    steps: int | None,
    layout: str | None,
    facts: AgentFacts,
    python: str | None,
    progress: Progress,
) -> Verification:
    """Compare the networks of two agents where both can be run, and everything that the two hold."""
    a, b = _party(first, layout, facts), _party(second, None, facts)
    found = Verification(
        urls.spelled(a.checkpoint.path), urls.spelled(b.checkpoint.path), ("-", "-"), (), "", (), ()
    )
    if a.agent is None or b.agent is None:
        lone = [word for word, party in (("A", a), ("B", b)) if party.agent is None]
        reason = f"the outputs of networks: no agent is recognised in {' and '.join(lone)}"
        found = replace(found, tolerance="entries are equal", not_compared=(reason,))
    else:
        try:
            found = _networks(a.agent, b.agent, (first, second), tolerance, steps, python, progress)
        except (MappingError, UnsupportedError, UsageError) as error:
            if steps is not None:
                raise
            reason = f"the outputs of networks: {error.message}"
            found = replace(found, tolerance="entries are equal", not_compared=(reason,))
    every = contents(a, b, progress)
    return replace(
        found,
        contents=every,
        notes=tuple(dict.fromkeys((*found.notes, *every.notes))),
        not_compared=(*found.not_compared, *every.not_compared),
    )


def _party(path: str, layout: str | None, facts: AgentFacts) -> Party:
    """Open one of the two; a sidecar of other weights is a discrepancy and says nothing of the agent."""
    checkpoint = open_checkpoint(path)
    receipt = receipt_of(checkpoint)
    try:
        binding = playable_binding(checkpoint, layout)
        own = Own() if receipt.stale else Own(receipt.sidecar)
        agent = None if binding is None else agent_of(checkpoint, binding, own, facts)
    except (MappingError, UnsupportedError, UsageError):
        if layout is not None:
            raise
        agent = None
    return Party(checkpoint, agent, receipt)


def _of_side(side: str, agent: Agent, other: Agent) -> Iterator[Entry]:
    """Yield the entries of one side's ledger; those that both sides have alike are of no side."""
    for entry in agent.ledger:
        yield entry if entry in other.ledger else replace(entry, where=f"{side}: {entry.where}".rstrip(": "))


def _worker(backend: str, python: str | None, steps: int | None) -> Worker:
    chosen = {} if python is None else {"python": python}
    return Worker(backend, threads=1, timeout=TIMEOUT_S + (steps or 0), **chosen)


def _backend(agent: Agent) -> str:
    return agent.framework if plugins.find("backends", agent.framework).available() else "numpy"


def _in_its_place(agent: Agent) -> str:
    extra = plugins.find("backends", agent.framework).extra
    has_it = f" (pip install 'ckpttool[{extra}]')" if extra else ""
    return (
        f"{agent.framework} is not installed{has_it}: {urls.spelled(agent.checkpoint.path)} was run by numpy"
    )


def _said(a: Agent, b: Agent) -> Iterator[str]:
    """Go through what the two differ in besides their numbers."""
    for agent in (a, b):
        if _backend(agent) != agent.framework:
            yield _in_its_place(agent)
    if lost(a, b):
        yield f"B lacks {', '.join(lost(a, b))}"
    if lost(b, a):
        yield f"only B has {', '.join(lost(b, a))}"
    normalised = [agent.known.obs_norm is not None for agent in (a, b)]
    if normalised[0] != normalised[1]:
        yield f"only {'A' if normalised[0] else 'B'} says what observations are normalised with"


def _parity(
    title: str, left: Network, right: Network, workers: list[Worker], tolerance: float | None
) -> Parity:
    if left.inputs != right.inputs or left.width != right.width:
        return unlike(title)
    given = observations(left)
    outputs = [run(w.build(n), given) for w, n in zip(workers, (left, right), strict=True)]
    return measured(title, left, given, (outputs[0], outputs[1]), tolerance)


def _trained(
    a: Agent, b: Agent, steps: int, workers: list[Worker], assumed: list[str]
) -> tuple[TrainStep, list[str]]:
    """Train both on; return what came of it and notes, and add to what was assumed."""
    prepared, notes = [], []
    for side, agent, other in (("A", _as_stated(a, b), b), ("B", b, a)):
        wiring, _ = wired(agent, other)
        made = learners.learner_of(agent, wiring)
        prepared.append(made.learner)
        assumed += [f"{side}: {sentence}" for sentence in made.assumed]
        notes += [f"{side}: {note}" for note in made.notes]
        stands = optimizer_facts.epsilon(agent.sidecar, agent.binding.layout)
        if stands != optimizer_facts.epsilon(None, agent.binding.layout):
            notes.append(
                f"{side}: epsilon belongs to the {stands} second moment, as where the agent was trained: "
                f"{agent.framework} adds it elsewhere and was given another number at every step"
            )
    given = batches(prepared[0], steps, a.known.obs_norm)
    return train_step((prepared[0], prepared[1]), given, workers), notes


def _part_of(source: Agent, target: Agent) -> str | None:
    """Return the part of the source that the target was converted from by its receipt, None for the whole."""
    receipt = target.sidecar
    if receipt is None or receipt.source is None or not receipt.source.get("part"):
        return None
    is_source = receipt.source.get("sha256") == digest_of(source.checkpoint).sha256
    return str(receipt.source["part"]) if is_source else None


def _as_stated(source: Agent, target: Agent) -> Agent:
    """Return the source with what its conversion was told of its optimizers, which no file of it says."""
    receipt = target.sidecar
    before = {} if source.sidecar is None else source.sidecar.provenance
    if receipt is None or receipt.source is None or "l2" in before or "optimizer" in before:
        return source
    stated = stated_in(receipt)
    if stated == NOTHING_STATED or receipt.source.get("sha256") != digest_of(source.checkpoint).sha256:
        return source
    return replace(source, sidecar=stated.into(source.sidecar, source.binding, source.checkpoint.tree))
