"""`verify`: two checkpoints of one agent give the same outputs, each run by its own framework.

The error of both is measured against a float64 reference in numpy: a conversion is right when B is no
further from it than A's own framework is, give or take rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpttool import plugins
from ckpttool.agents.backends import numpy as reference
from ckpttool.agents.components import policy_network, q_network, value_network, widths
from ckpttool.agents.network import Dense, Network
from ckpttool.agents.policy import Observation, Policy
from ckpttool.agents.worker import Worker
from ckpttool.errors import MappingError, UnsupportedError, UsageError
from ckpttool.layouts.canonical import VALUES
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.wiring import Bounds, wire

OBSERVATIONS = 1000
OWN_ERROR = 2.0
# Of the largest number on the way, not of the output: see docs/design.md for what that one refused.
SCALE = 1e-5
# Two float32 computations of one sum differ by a few units in the last place of the largest number on the
# way: a policy's tanh hides how large the numbers before it were, and how far rounding moved them.
UNIT = float(np.finfo(np.float32).eps)
ROUNDING = 4 * UNIT


@dataclass(frozen=True, slots=True)
class Parity:
    """One network: how far B's outputs are from A's, absolutely and relative to the output's scale.

    `error_a` and `error_b` are the largest differences from the float64 reference.
    """

    name: str
    n: int
    max_abs: float
    max_rel: float
    error_a: float
    error_b: float
    within: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "n": self.n,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "error_a": self.error_a,
            "error_b": self.error_b,
            "within": self.within,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """All networks that both checkpoints have; `backends` ran A and B."""

    first: str
    second: str
    backends: tuple[str, str]
    networks: tuple[Parity, ...]
    tolerance: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def within(self) -> bool:
        """Say whether every network is within the tolerance."""
        return all(network.within for network in self.networks)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "a": self.first,
            "b": self.second,
            "backends": list(self.backends),
            "networks": [network.document() for network in self.networks],
            "tolerance": self.tolerance,
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }


def verify(
    first: str,
    second: str,
    *,
    tolerance: float | None = None,
    layout: str | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> Verification:
    """Compare every network that both checkpoints have on fixed observations (and actions).

    `tolerance` replaces the default bound: B's largest error against float64, relative to the output's
    scale. `python` names the interpreter that runs the frameworks. Raise UsageError when the two have
    no network in common.
    """
    a, b = restore(first, layout), restore(second)
    titles = [p.title for p in a.binding.parts if b.part(p.title) is not None]
    if not titles:
        raise UsageError("the two checkpoints have no network in common", file=second)
    lost, more = ([p.title for p in x.binding.parts if y.part(p.title) is None] for x, y in ((a, b), (b, a)))
    assumed: list[str] = []
    pairs, skipped = _pairs(a, b, titles, assumed)
    found = []
    with contextlib.ExitStack() as stack:
        backends, notes = zip(*(_backend(agent) for agent in (a, b)), strict=True)
        workers = [stack.enter_context(_worker(name, python)) for name in backends]
        for number, (title, (left, right)) in enumerate(pairs.items()):
            progress(number, len(pairs))
            found.append(_parity(title, left, right, workers, tolerance))
    # What A has and B lacks cannot be the same; what B has besides says nothing against it.
    found += [Parity(title, 0, np.inf, np.inf, np.inf, np.inf, within=False) for title in lost]
    bound = (
        f"error against float64 at most {OWN_ERROR:g}x that of A, or rounding at the largest sum"
        if tolerance is None
        else f"error against float64 at most {tolerance:g} of the output's scale"
    )
    said = tuple(dict.fromkeys(note for each in notes for note in each))
    only = [f"B lacks {', '.join(lost)}"] if lost else []
    only += [f"only B has {', '.join(more)}"] if more else []
    return Verification(
        a.checkpoint.path,
        b.checkpoint.path,
        (backends[0], backends[1]),
        tuple(found),
        bound,
        tuple(dict.fromkeys(assumed)),
        (*said, *only, *skipped, *a.notes, *b.notes),
    )


def _pairs(
    a: Agent, b: Agent, titles: Sequence[str], assumed: list[str]
) -> tuple[dict[str, tuple[Network, Network]], list[str]]:
    """Return what is compared, and a note for each critic or value that cannot be run; a policy must be."""
    pairs, skipped = {}, []
    for title in titles:
        try:
            pairs[title] = _network(a, b, title, assumed), _network(b, a, title, assumed)
        except (MappingError, UnsupportedError) as error:
            part = a.part(title)
            if part is None or part.acts or len(titles) == 1:
                raise
            skipped.append(f"{title} is not compared: {error.message}")
    return pairs, skipped


def _worker(backend: str, python: str | None) -> Worker:
    return Worker(backend, threads=1) if python is None else Worker(backend, python=python, threads=1)


def _backend(agent: Agent) -> tuple[str, tuple[str, ...]]:
    plugin = plugins.find("backends", agent.framework)
    if plugin.available():
        return agent.framework, ()
    return "numpy", (f"{agent.framework} is not installed: {agent.checkpoint.path} was run by numpy",)


def _network(agent: Agent, other: Agent, title: str, assumed: list[str]) -> Network:
    part = agent.runnable(title)
    if part is None:
        raise UsageError(f"the checkpoint has no network {title}", file=agent.checkpoint.path)
    obs_dim, act_dim = _sizes(agent)
    unit = Bounds([-1.0] * act_dim, [1.0] * act_dim, "both sides alike, neither says more")
    wiring, guesses = wire(agent, unit, other)
    assumed.extend(guesses)
    if part.acts:
        return policy_network(agent.tree, part, wiring)
    if part.component in VALUES:
        return value_network(agent.tree, part, wiring)
    return q_network(agent.tree, part, wiring, obs_dim, act_dim)


def _sizes(agent: Agent) -> tuple[int, int]:
    actor = agent.part("actor") or agent.part("actor_target")
    if actor is not None:
        return widths(agent.tree, actor)
    # A critic alone: how its inputs divide does not change what it computes.
    total, _ = widths(agent.tree, agent.binding.parts[0])
    return total - 1, 1


def _parity(
    title: str, left: Network, right: Network, workers: list[Worker], tolerance: float | None
) -> Parity:
    if left.inputs != right.inputs or left.width != right.width:
        return Parity(title, 0, np.inf, np.inf, np.inf, np.inf, within=False)
    given = observations(left)
    outputs = [_run(w.build(n), given) for w, n in zip(workers, (left, right), strict=True)]
    exact = _run(reference.build(left.cast("float64")), _doubled(given))
    largest = max(_largest(left, given), float(np.abs(exact).max()))
    scale = float(np.abs(exact).max()) or 1.0
    errors = [float(np.abs(output.astype(np.float64) - exact).max()) for output in outputs]
    between = float(np.abs(outputs[0].astype(np.float64) - outputs[1]).max())
    if tolerance is None:
        allowed = min(max(OWN_ERROR * errors[0], _rounding(left) * largest), SCALE * largest)
        # Extreme inputs can cost A itself more than that; B need not be better than A.
        allowed = max(allowed, errors[0])
    else:
        allowed = tolerance * scale
    return Parity(
        title, len(exact), between, between / scale, errors[0], errors[1], within=errors[1] <= allowed
    )


def _largest(network: Network, given: Observation) -> float:
    """Return the largest magnitude that any dense layer gives, in float64."""
    first = len(network.inputs)
    dense = [first + n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense)]
    doubled, double = network.cast("float64"), _doubled(given)
    return max(float(np.abs(_run(reference.build(replace(doubled, output=n)), double)).max()) for n in dense)


def _rounding(network: Network) -> float:
    """Return the part of the largest number that rounding may cost: it grows as the root of a sum's terms.

    TensorFlow adds the terms one after the other, PyTorch in blocks: with 256 terms the one was seen 6 units
    from float64 where the other was 2.
    """
    terms = max(node.layer.kernel.shape[0] for node in network.nodes if isinstance(node.layer, Dense))
    return max(ROUNDING, UNIT * float(np.sqrt(terms)) / 2)


def observations(network: Network, n: int = OBSERVATIONS) -> Observation:
    """Return the fixed inputs: zeros, ordinary and extreme ones; float32 [n, width] each, always the same."""
    generator = np.random.default_rng(0)
    scales = np.repeat([0.0, 1.0, 10.0], [1, n - n // 5 - 1, n // 5])
    drawn = {
        name: (generator.standard_normal((n, width)) * scales[:, None]).astype(np.float32)
        for name, width in network.inputs
    }
    if "action" in drawn:
        drawn["action"] = np.clip(drawn["action"], -1, 1)
    return drawn if len(drawn) > 1 else drawn[network.inputs[0][0]]


def _doubled(given: Observation) -> Observation:
    if isinstance(given, np.ndarray):
        return given.astype(np.float64)
    return {name: array.astype(np.float64) for name, array in given.items()}


def _run(policy: Policy, given: Observation) -> np.ndarray:
    output, _ = policy.step(given)
    return output
