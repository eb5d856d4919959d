"""How far two outputs of one network are from each other, and how far they may be.

The error of both is measured against a float64 reference in numpy: a conversion is right when B is no
further from it than A's own framework is, give or take rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpttool.agents.backends import numpy as reference
from ckpttool.agents.network import Dense, Network
from ckpttool.agents.policy import Observation, Policy

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


def unlike(title: str) -> Parity:
    """Return what is said of a network that B lacks, or has in another size."""
    return Parity(title, 0, np.inf, np.inf, np.inf, np.inf, within=False)


def measured(
    title: str,
    network: Network,
    given: Observation,
    outputs: tuple[np.ndarray, np.ndarray],
    tolerance: float | None = None,
    own: float = OWN_ERROR,
    *,
    exact: np.ndarray | None = None,
) -> Parity:
    """Return how far two outputs on `given` are from each other and from the network in float64.

    Without a `tolerance` B may be `own` times as far as A is, or as far as rounding explains. `exact` is what
    the network gives in float64, where somebody knows it.
    """
    if exact is None:
        exact = run(reference.build(network.cast("float64")), doubled(given))
    largest = max(_largest(network, given), float(np.abs(exact).max()))
    scale = float(np.abs(exact).max()) or 1.0
    errors = [float(np.abs(output.astype(np.float64) - exact).max()) for output in outputs]
    between = float(np.abs(outputs[0].astype(np.float64) - outputs[1]).max())
    if tolerance is None:
        allowed = min(max(own * errors[0], _rounding(network) * largest), SCALE * largest)
        # Extreme inputs can cost A itself more than that; B need not be better than A.
        allowed = max(allowed, errors[0])
    else:
        allowed = tolerance * scale
    return Parity(
        title, len(exact), between, between / scale, errors[0], errors[1], within=errors[1] <= allowed
    )


def _largest(network: Network, given: Observation) -> float:
    """Return the largest magnitude that any dense layer but the output gives, in float64."""
    dense = [n for n, node in enumerate(network.nodes, len(network.inputs)) if isinstance(node.layer, Dense)]
    exact, double = network.cast("float64"), doubled(given)
    inner = (run(reference.build(replace(exact, output=n)), double) for n in dense if n != network.output)
    return max((float(np.abs(output).max()) for output in inner), default=0.0)


def _rounding(network: Network) -> float:
    """Return the part of the largest number that rounding may cost: it grows as the root of a sum's terms.

    TensorFlow adds the terms one after the other, PyTorch in blocks: with 256 terms the one was seen 6 units
    from float64 where the other was 2.
    """
    terms = max(node.layer.kernel.shape[0] for node in network.nodes if isinstance(node.layer, Dense))
    return max(ROUNDING, UNIT * float(np.sqrt(terms)) / 2)


def observations(network: Network, n: int = OBSERVATIONS) -> Observation:
    """Return the fixed inputs: zeros, ordinary and extreme ones; float32 [n, ...] each, always the same."""
    generator = np.random.default_rng(0)
    scales = np.repeat([0.0, 1.0, 10.0], [1, n - n // 5 - 1, n // 5])
    drawn = {
        name: (generator.standard_normal((n, *shape)).T * scales).T.astype(np.float32)
        for name, shape in network.input_shapes.items()
    }
    if "action" in drawn:
        drawn["action"] = np.clip(drawn["action"], -1, 1)
    return drawn if len(drawn) > 1 else drawn[network.inputs[0][0]]


def doubled(given: Observation) -> Observation:
    """Return the inputs in float64."""
    if isinstance(given, np.ndarray):
        return given.astype(np.float64)
    return {name: array.astype(np.float64) for name, array in given.items()}


def run(policy: Policy, given: Observation) -> np.ndarray:
    """Return the output [batch, n] of a network without memory."""
    output, _ = policy.step(given)
    return output
