"""`verify`: two checkpoints of one agent give the same outputs, each run by its own framework.

With `steps` both also go on training on the same batches (ops/train_step.py).
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
from ckpttool.errors import UsageError
from ckpttool.ledger import Entries, Entry
from ckpttool.ops import learner as learners
from ckpttool.ops import optimizer_facts
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.digest import digest_of
from ckpttool.ops.optimizer_options import NOTHING_STATED, stated_in
from ckpttool.ops.pairs import lost, pairs, shared, wired
from ckpttool.ops.parity import OWN_ERROR, Parity, measured, observations, run, unlike
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.train_step import TrainStep, batches, train_step
from ckpttool.ops.wiring import require_facts


@dataclass(frozen=True, slots=True)
class Verification:
    """All networks that both checkpoints have; `backends` ran A and B; `training` if it was asked for."""

    first: str
    second: str
    backends: tuple[str, str]
    networks: tuple[Parity, ...]
    tolerance: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    training: TrainStep | None = None
    ledger: Entries = ()

    @property
    def within(self) -> bool:
        """Say whether every network is within the tolerance, and every update within its bound."""
        forward = all(network.within for network in self.networks)
        return forward and (self.training is None or self.training.within)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "a": self.first,
            "b": self.second,
            "backends": list(self.backends),
            "networks": [network.document() for network in self.networks],
            "tolerance": self.tolerance,
            **({"training": self.training.document()} if self.training is not None else {}),
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
    progress: Progress = silent,
) -> Verification:
    """Compare every network that both checkpoints have on fixed observations (and actions).

    `tolerance` replaces the default bound: B's largest error against float64, relative to the output's
    scale. With `steps` both are trained on for that many updates. `facts` are what no file holds of the agent
    that both are. `python` names the interpreter that runs the frameworks. Raise UsageError when the two have
    no network in common.
    """
    a, b = restore(first, layout, facts), restore(second, facts=facts)
    for one, other in ((a, b), (b, a)):
        require_facts(one, "verify", first, second, other=other)
    titles = shared(a, b)
    if not titles:
        raise UsageError("the two checkpoints have no network in common", file=second)
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
    # What A has and B lacks cannot be the same; what B has besides says nothing against it.
    found += [unlike(title) for title in lost(a, b)]
    bound = (
        f"error against float64 at most {OWN_ERROR:g}x that of A, or rounding at the largest sum"
        if tolerance is None
        else f"error against float64 at most {tolerance:g} of the output's scale"
    )
    return Verification(
        urls.spelled(a.checkpoint.path),
        urls.spelled(b.checkpoint.path),
        backends,
        tuple(found),
        bound,
        tuple(dict.fromkeys(assumed)),
        tuple(dict.fromkeys((*_said(a, b), *notes, *a.notes, *b.notes))),
        training,
        ledgers.merged(_of_side("A", a, b), _of_side("B", b, a)),
    )


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
