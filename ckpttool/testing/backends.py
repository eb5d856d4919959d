"""The promises of every backend, against a reference that computes number by number in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest

from ckpttool.core import EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATIONS, ActivationName
from ckpttool.networks import (
    Activation,
    Add,
    Affine,
    ArgMax,
    AtomMean,
    Backend,
    Clip,
    Concat,
    Cosines,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    Node,
    Policy,
    QuantileMean,
    Repeat,
    Slice,
    Softmax,
    StateSlot,
    stack_networks,
)
from ckpttool.testing.formats import check_registration

SCALAR: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "leaky_relu": lambda x: x if x > 0 else 0.25 * x,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "linear": lambda x: x,
    "mish": lambda x: x * math.tanh(max(x, 0.0) + math.log1p(math.exp(-abs(x)))),
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * math.expm1(x)),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "hardtanh": lambda x: min(max(x, -1.0), 1.0),
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
}


def reference(network: Network, row: dict[str, Sequence[float]]) -> list[list[float]]:
    """Return every value of the graph for one row, as lists of Python floats."""
    values = [[float(x) for x in np.ravel(row[name])] for name, _ in network.inputs]
    for node in network.nodes:
        values.append(_apply(node.layer, [values[i] for i in node.inputs]))
    return values


def _apply(layer: Layer, rows: list[list[float]]) -> list[float]:
    x = rows[0]
    match layer:
        case Dense(kernel, bias):
            shift = np.zeros(kernel.shape[1]) if bias is None else bias
            return [
                math.fsum([float(b), *(xi * float(w) for xi, w in zip(x, column, strict=True))])
                for column, b in zip(kernel.T, shift, strict=True)
            ]
        case LayerNorm(scale, offset, epsilon):
            mean = math.fsum(x) / len(x)
            root = math.sqrt(math.fsum((xi - mean) ** 2 for xi in x) / len(x) + epsilon)
            return [
                (xi - mean) / root * float(s) + float(o) for xi, s, o in zip(x, scale, offset, strict=True)
            ]
        case Activation(name):
            return [SCALAR[name](xi) for xi in x]
        case Concat():
            return [xi for part in rows for xi in part]
        case Flatten():
            return x
        case Affine(scale, shift):
            return [xi * float(s) + float(o) for xi, s, o in zip(x, scale, shift, strict=True)]
        case Clip(low, high):
            return [min(max(xi, float(a)), float(b)) for xi, a, b in zip(x, low, high, strict=True)]
        case QuantileMean(quantiles, last):
            actions = len(x) // quantiles
            step, near = (1, quantiles) if last else (actions, 1)
            return [
                math.fsum(x[near * action + step * number] for number in range(quantiles)) / quantiles
                for action in range(actions)
            ]
        case AtomMean(support, limit):
            groups = [x[at : at + len(support)] for at in range(0, len(x), len(support))]
            weights = [[math.exp(xi - max(group)) for xi in group] for group in groups]
            shares = [[max(w / math.fsum(weight), limit) for w in weight] for weight in weights]
            return [math.fsum(w * float(s) for w, s in zip(share, support, strict=True)) for share in shares]
        case Softmax():
            powers = [math.exp(xi - max(x)) for xi in x]
            return [power / math.fsum(powers) for power in powers]
        case Cosines(number):
            return [math.cos(math.pi * step * xi) for xi in x for step in range(1, number + 1)]
        case Repeat(count):
            return x * count
        case Multiply():
            return [math.prod(column) for column in zip(*rows, strict=True)]
        case ArgMax(counts, starts):
            ends = np.cumsum(counts).tolist()
            parts = [x[end - count : end] for end, count in zip(ends, counts, strict=True)]
            return [float(part.index(max(part)) + start) for part, start in zip(parts, starts, strict=True)]
        case _:
            raise NotImplementedError(type(layer).__name__)


RANDOM = np.random.default_rng(7)


def normal(*shape: Any) -> np.ndarray:
    """Return normal numbers, float32 [*shape]."""
    return RANDOM.normal(size=shape).astype(np.float32)


def dense(rows: int, columns: int) -> Dense:
    """Return a dense layer of random weights."""
    return Dense(normal(rows, columns) / np.float32(math.sqrt(rows)), normal(columns))


def chain(width: int, *layers: Layer) -> Network:
    """Return a network of layers, one after the other, on observations [rows, width]."""
    return Network((("obs", width),), tuple(Node(x, (i,)) for i, x in enumerate(layers)), len(layers))


ACTOR = chain(
    17,
    Affine(normal(17), normal(17)),
    dense(17, 40),
    LayerNorm(normal(40), normal(40), 1e-3),
    Activation("relu"),
    Dense(normal(40, 30) / 6),
    Activation("elu"),
    dense(30, 6),
    Activation("tanh"),
    Affine(normal(6), normal(6)),
    Clip(np.full(6, -0.5, np.float32), np.full(6, 0.5, np.float32)),
)


def renewed(network: Network) -> Network:
    """Return a network of the same structure with other weights, and bounds that are still bounds."""
    return network.with_arrays(lambda name, a: a if name in {"low", "high"} else (a * normal(*a.shape)))


# The critic of TD3's successors: the action joins after the first layer.
CRITIC = Network(
    inputs=(("obs", 5), ("action", 2)),
    nodes=(
        Node(dense(5, 8), (0,)),
        Node(Activation("silu"), (2,)),
        Node(Concat(), (3, 1)),
        Node(dense(10, 1), (4,)),
    ),
    output=5,
)

# A gate: one half of a layer times the sigmoid of the other, beside the way around it.
GATED = Network(
    inputs=(("obs", 3),),
    nodes=(
        Node(dense(3, 6), (0,)),
        Node(Slice(0, 3), (1,)),
        Node(Slice(3, 6), (1,)),
        Node(Activation("sigmoid"), (3,)),
        Node(Multiply(), (2, 4)),
        Node(Add(), (5, 0)),
    ),
    output=6,
)

# An Elman cell: h' = tanh([x, h] W + b), action = h' V; the state is the second input.
CELL = Network(
    inputs=(("obs", 3), ("h", 4)),
    nodes=(
        Node(Concat(), (0, 1)),
        Node(dense(7, 4), (2,)),
        Node(Activation("tanh"), (3,)),
        Node(dense(4, 2), (4,)),
    ),
    output=5,
    states=(StateSlot("h", (4,), 4),),
)

# DQN, QR-DQN with its quantiles first or last, C51, and a policy with three choices.
SUPPORT = np.linspace(-2, 5, 6, dtype=np.float32)
CHOICES = {
    "values": chain(5, dense(5, 8), Activation("relu"), dense(8, 4), ArgMax((4,), (0,))),
    "quantiles first": chain(5, dense(5, 12), QuantileMean(3), ArgMax((4,), (1,))),
    "quantiles last": chain(5, dense(5, 12), QuantileMean(4, last=True), ArgMax((3,), (0,))),
    "atoms": chain(5, dense(5, 18), AtomMean(SUPPORT), ArgMax((3,), (-1,))),
    "limited atoms": chain(5, dense(5, 18), AtomMean(SUPPORT, 0.1), ArgMax((3,), (0,))),
    "several": chain(5, dense(5, 9), ArgMax((2, 4, 3), (0, -2, 5))),
}
FRACTIONS = {
    "shares": chain(5, dense(5, 4), Softmax()),
    "cosines": chain(2, dense(2, 3), Cosines(4), Flatten(), dense(12, 2)),
    # Fractions whose cosines multiply the same row: [batch, 3, 4] and [batch, 4].
    "fractions": Network(
        (("obs", 4),),
        (
            Node(dense(4, 3), (0,)),
            Node(Softmax(), (1,)),
            Node(Cosines(4), (2,)),
            Node(Repeat(3), (0,)),
            Node(Multiply(), (3, 4)),
            Node(Flatten(), (5,)),
            Node(QuantileMean(4, last=True), (6,)),
        ),
        output=7,
    ),
}


class BackendContract:
    """Promises of every backend; a subclass names the module, or provides the backend by the fixture."""

    module: ModuleType | None = None

    @pytest.fixture
    def backend(self) -> Any:
        if self.module is None:
            raise NotImplementedError(f"{type(self).__name__} must define module, the module of the backend")
        return self.module

    def test_it_is_registered(self, backend: Backend) -> None:
        check_registration("backends", backend.NAME)

    def check(self, policy: Policy, network: Network, batch: int, tolerance: float = 1e-5) -> None:
        obs = {name: normal(batch, width) for name, width in network.inputs}
        inputs = obs if len(obs) > 1 else next(iter(obs.values()))
        action, state = policy.step(inputs)
        expected = [
            reference(network, {name: a[i].tolist() for name, a in obs.items()})[network.output]
            for i in range(batch)
        ]
        assert state == ()
        np.testing.assert_allclose(action, np.array(expected), rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("batch", [1, 3, 64])
    @pytest.mark.parametrize("network", [ACTOR, CRITIC], ids=["actor", "critic"])
    def test_agrees_with_the_reference(self, backend: Backend, network: Network, batch: int) -> None:
        self.check(backend.build(network), network, batch)

    def test_one_policy_takes_any_batch(self, backend: Backend) -> None:
        policy = backend.build(ACTOR)
        for batch in (1, 64, 3):
            self.check(policy, ACTOR, batch)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_activation(self, backend: Backend, name: ActivationName) -> None:
        policy = backend.build(chain(7, Activation(name, 0.25)))
        x = np.array([[-90, -3, -0.5, 0, 0.5, 3, 90]], np.float32)
        expected = [[SCALAR[name](float(v)) for v in x[0]]]
        np.testing.assert_allclose(policy.step(x)[0], expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "layer",
        [
            dense(4, 3),
            Dense(normal(4, 3)),
            LayerNorm(normal(4), normal(4), 1e-5),
            Affine(normal(4), normal(4)),
            Clip(np.full(4, -0.1, np.float32), np.full(4, 0.2, np.float32)),
            Flatten(),
        ],
        ids=lambda layer: type(layer).__name__,
    )
    def test_layer(self, backend: Backend, layer: Layer) -> None:
        network = chain(4, layer)
        self.check(backend.build(network), network, 3)

    @pytest.mark.parametrize("name", CHOICES)
    def test_choices(self, backend: Backend, name: str) -> None:
        network = CHOICES[name]
        self.check(backend.build(network), network, 64)
        scores = replace(network, nodes=network.nodes[:-1], output=network.output - 1)
        self.check(backend.build(scores), scores, 3)
        members = [network, renewed(network)]
        obs = normal(6, 5)
        choices = backend.build(stack_networks(members)).step(obs)[0]
        alone = [backend.build(n).step(half)[0] for n, half in zip(members, (obs[:3], obs[3:]), strict=True)]
        np.testing.assert_array_equal(choices, np.concatenate(alone))

    @pytest.mark.parametrize("name", FRACTIONS)
    def test_fractions(self, backend: Backend, name: str) -> None:
        for batch in (1, 64):
            self.check(backend.build(FRACTIONS[name]), FRACTIONS[name], batch)

    def test_of_equal_values_the_first_is_chosen(self, backend: Backend) -> None:
        policy = backend.build(chain(5, ArgMax((2, 3), (0, 10))))
        rows = [[1, 1, 2, 2, 2], [0, 3, -1, 4, 4], [-1e30, -1e30, -5, -5, -4]]
        choices = policy.step(np.array(rows, np.float32))[0]
        np.testing.assert_array_equal(choices, [[0, 10], [1, 11], [0, 12]])

    def test_float64_is_computed_in_float64(self, backend: Backend) -> None:
        network = ACTOR.cast("float64")
        policy = backend.build(network)
        assert policy.step(np.ones((1, 17), np.float32))[0].dtype == np.float64
        self.check(policy, network, 3, 1e-12)

    def test_float32_stays_float32(self, backend: Backend) -> None:
        assert backend.build(ACTOR).step(np.ones((2, 17)))[0].dtype == np.float32

    def test_what_a_step_returned_stays_as_it_was(self, backend: Backend) -> None:
        for network in (ACTOR, chain(4, dense(4, 4), Activation("relu")), chain(4, Activation("tanh"))):
            policy = backend.build(network)
            x = normal(3, network.inputs[0][1])
            copy, first = x.copy(), policy.step(x)[0]
            kept = first.copy()
            policy.step(x + 1)
            np.testing.assert_array_equal(first, kept)
            np.testing.assert_array_equal(x, copy)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("batch", [1, 5])
    def test_a_stacked_policy_equals_each_member_alone(
        self, backend: Backend, dtype: Literal["float32", "float64"], batch: int
    ) -> None:
        actors = [renewed(ACTOR).cast(dtype) for _ in range(3)]
        obs = normal(3 * batch, 17).astype(dtype)
        actions = backend.build(stack_networks(actors)).step(obs)[0]
        alone = [backend.build(actor).step(obs[i * batch :][:batch])[0] for i, actor in enumerate(actors)]
        tolerance = 1e-5 if dtype == "float32" else 1e-12
        assert actions.dtype == dtype
        np.testing.assert_allclose(actions, np.concatenate(alone), rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize(
        "network",
        [chain(4, Dense(normal(4, 3))), chain(1, dense(1, 1), Affine(normal(1), normal(1))), CRITIC, GATED],
        ids=["no bias", "width 1", "two inputs", "gated"],
    )
    def test_stacks_of_other_forms(self, backend: Backend, network: Network) -> None:
        members = [network, renewed(network)]
        obs = {name: normal(6, width) for name, width in network.inputs}
        halves = [{name: array[half] for name, array in obs.items()} for half in (slice(3), slice(3, 6))]
        outputs = backend.build(stack_networks(members)).step(obs)[0]
        alone = [backend.build(n).step(half)[0] for n, half in zip(members, halves, strict=True)]
        np.testing.assert_allclose(outputs, np.concatenate(alone), rtol=1e-5, atol=1e-5)

    def test_axes_are_flattened_in_c_order(self, backend: Backend) -> None:
        policy = backend.build(chain(6, Flatten(), Activation("linear")))
        x = normal(2, 3, 2)
        np.testing.assert_array_equal(policy.step(x)[0], x.reshape(2, 6))

    def test_state_is_carried(self, backend: Backend) -> None:
        policy = backend.build(CELL)
        obs, expected = normal(5, 3, 3), np.zeros((3, 4))
        state: tuple[Any, ...] = ()
        for x in obs:
            action, state = policy.step(x, state)
            values = [reference(CELL, {"obs": x[i], "h": expected[i]}) for i in range(3)]
            expected = np.array([v[4] for v in values])
            np.testing.assert_allclose(state[0], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(action, np.array([v[5] for v in values]), rtol=1e-5, atol=1e-5)

    def test_inputs_in_any_memory_order(self, backend: Backend) -> None:
        policy = backend.build(ACTOR)
        x = normal(3, 17)
        frozen = x.copy()
        frozen.flags.writeable = False
        swapped = x.astype(x.dtype.newbyteorder())
        for same in (np.asfortranarray(x), x[::-1][::-1], frozen, swapped, x.astype(np.float64)):
            np.testing.assert_allclose(policy.step(same)[0], policy.step(x)[0], rtol=1e-6, atol=1e-6)

    def test_weights_are_the_policys_own(self, backend: Backend) -> None:
        kernel = normal(3, 2)
        policy = backend.build(chain(3, Dense(kernel)))
        x = normal(1, 3)
        before = policy.step(x)[0].copy()
        kernel[:] = 0
        np.testing.assert_array_equal(policy.step(x)[0], before)

    def test_stored_byte_order_does_not_matter(self, backend: Backend) -> None:
        kernel = normal(3, 2)
        x = normal(1, 3)
        swapped = backend.build(chain(3, Dense(kernel.astype(kernel.dtype.newbyteorder()))))
        np.testing.assert_array_equal(swapped.step(x)[0], backend.build(chain(3, Dense(kernel))).step(x)[0])

    def test_wrong_width_names_both_numbers(self, backend: Backend) -> None:
        with pytest.raises(EnvironmentMismatchError) as caught:
            backend.build(ACTOR).step(np.ones((1, 3), np.float32))
        assert (caught.value.expected, caught.value.found) == ("[batch, 17]", "[1, 3]")

    def test_layers_that_do_not_fit_are_refused(self, backend: Backend) -> None:
        with pytest.raises(UsageError) as caught:
            backend.build(chain(3, dense(3, 4), dense(5, 1)))
        assert (caught.value.expected, caught.value.found) == ("[batch, 5]", "[batch, 4]")
        assert "(Dense)" in caught.value.message

    def test_an_unknown_activation_is_refused(self, backend: Backend) -> None:
        with pytest.raises(UnsupportedError) as caught:
            backend.build(chain(3, Activation("snake")))  # type: ignore[arg-type]
        assert "snake" in caught.value.message

    def test_half_precision_is_refused_with_a_hint(self, backend: Backend) -> None:
        with pytest.raises(UnsupportedError) as caught:
            backend.build(chain(3, Dense(np.ones((3, 1), np.float16))))
        assert caught.value.found == "float16"
        assert "cast" in str(caught.value.hint)

    @pytest.mark.parametrize("device", ["tpu", "cuda:99", "", "CPU"])
    def test_unknown_device(self, backend: Backend, device: str) -> None:
        with pytest.raises(UsageError) as caught:
            backend.build(ACTOR, device)
        assert f"device {device!r}" in caught.value.message

    def test_auto_and_cpu_are_devices(self, backend: Backend) -> None:
        assert "cpu" in backend.build(ACTOR, "cpu").device
        assert backend.build(ACTOR, "auto").device

    def test_versions_name_the_backend(self, backend: Backend) -> None:
        assert backend.versions()[backend.NAME][0].isdigit()
