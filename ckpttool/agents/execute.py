"""What every backend shares: the shapes in a graph, the checks on its inputs, the order of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, cast

import numpy as np

from ckpttool.agents.network import Flatten, Layer, Network
from ckpttool.agents.policy import Observation, State
from ckpttool.agents.shape_rules import RULES, Shape
from ckpttool.agents.stacking import member
from ckpttool.errors import EnvironmentMismatchError, UnsupportedError, UsageError

Value = TypeVar("Value")
Dtype = Literal["float32", "float64"]


def arrays(network: Network) -> Iterator[np.ndarray]:
    """Yield every array of every layer, in the order of the nodes."""
    for node in network.nodes:
        for field in fields(node.layer):
            value = getattr(node.layer, field.name)
            if isinstance(value, np.ndarray):
                yield value


def dtype_of(network: Network) -> Dtype:
    """Return the one float type that the network's arrays share; float32 if there is no array."""
    names = {array.dtype.name for array in arrays(network)} or {"float32"}
    if len(names) > 1 or not names <= {"float32", "float64"}:
        raise UnsupportedError(
            "a network computes in float32 or in float64",
            found=" and ".join(sorted(names)),
            hint="network.cast('float32') gives every array one type",
        )
    return cast(Dtype, names.pop())


def shapes(network: Network) -> list[Shape]:
    """Return the shape of every value without its batch; raise UsageError where layers do not fit.

    The members of a stacked network share their shapes, which are without the member axis.
    """
    network = member(network, 0)
    found = list(network.input_shapes.values())
    for number, node in enumerate(network.nodes):
        kind = type(node.layer).__name__
        if not node.inputs or not all(0 <= value < len(found) for value in node.inputs):
            raise UsageError(f"node {number} ({kind}) takes a value that does not exist before it")
        given = [found[value] for value in node.inputs]
        try:
            found.append(choose(RULES, type(node.layer), "network")(node.layer, given))
        except ValueError as error:
            expected, taken = error.args
            raise UsageError(
                f"node {number} ({kind}) does not fit what it takes", expected=expected, found=taken
            ) from None
    _check_results(network, found)
    return found


def choose(table: Mapping[Any, Value], key: Any, owner: str) -> Value:
    """Return the table's row for a layer class or an activation; raise UnsupportedError if it has none."""
    if key not in table:
        raise UnsupportedError(f"the {owner} has no {getattr(key, '__name__', key)}")
    return table[key]


def assemble(
    network: Network, lower: Callable[[Layer], Callable[..., Value]]
) -> Callable[[Sequence[Value]], list[Value]]:
    """Return one function from the inputs' values to the output followed by the next states.

    `lower` makes a function of one layer; it is called once per node, so that weights move only here.
    """
    calls = [lower(node.layer) for node in network.nodes]
    if is_chain(network):
        return _chain(calls)
    steps = [(call, node.inputs) for call, node in zip(calls, network.nodes, strict=True)]
    wanted = [network.output, *(slot.value for slot in network.states)]

    def run(given: Sequence[Value]) -> list[Value]:
        values = list(given)
        for call, inputs in steps:
            values.append(call(*[values[i] for i in inputs]))
        return [values[i] for i in wanted]

    return run


class Feeds:
    """Turns what a caller gives into the arrays of a network's inputs, in their order and type."""

    def __init__(self, network: Network) -> None:
        self.dtype = np.dtype(dtype_of(network))
        self.shapes = shapes(network)[: len(network.inputs)]
        self.members = network.members
        self._names = tuple(name for name, _ in network.inputs)
        self._states = tuple(slot.name for slot in network.states)
        self._observed = tuple(name for name in self._names if name not in self._states)
        self._flattened = _only_flattened(network)
        # The common case is one array of the right width: it must cost less than the arithmetic.
        plain = len(self.shapes) == 1 and len(self.shapes[0]) == 1 and not self._states and self.members == 1
        self._width = self.shapes[0][0] if plain else -1

    def __call__(self, obs: Observation, state: State = ()) -> list[np.ndarray]:
        """Return one array [batch, ...] per input, or [members, batch / members, ...] for a stacked network.

        Raise EnvironmentMismatchError where one does not fit.
        """
        if isinstance(obs, np.ndarray) and obs.ndim == 2 and obs.shape[1] == self._width and not state:
            return [obs if obs.dtype == self.dtype else obs.astype(self.dtype)]
        given = self._rows(obs, state)
        return given if self.members == 1 else self._blocks(given)

    @property
    def is_joint(self) -> bool:
        """Whether a policy has a memory, or more than one input."""
        return bool(self._states) or len(self._names) > 1

    def joined(self, output: np.ndarray) -> np.ndarray:
        """Return a stacked network's output with its rows in the order of the observations'."""
        return output if self.members == 1 else output.reshape(-1, output.shape[-1])

    def _rows(self, obs: Observation, state: State) -> list[np.ndarray]:
        named = self._named(obs)
        batch = len(next(iter(named.values())))
        named.update(zip(self._states, self._remembered(state, batch), strict=True))
        return [self._fit(name, named[name], batch) for name in self._names]

    def _blocks(self, given: list[np.ndarray]) -> list[np.ndarray]:
        """Give every member its rows: those of member m are one block."""
        if any(len(array) % self.members for array in given):
            raise EnvironmentMismatchError(
                "the observations cannot be divided among the stacked policies",
                expected=f"a multiple of {self.members}",
                found=str(len(given[0])),
            )
        return [array.reshape(self.members, -1, *array.shape[1:]) for array in given]

    def _named(self, obs: Observation) -> dict[str, np.ndarray]:
        named = (
            {name: np.asarray(value) for name, value in obs.items()}
            if isinstance(obs, Mapping)
            else {self._observed[0]: np.asarray(obs)}
        )
        if set(named) != set(self._observed) or not all(array.ndim for array in named.values()):
            raise EnvironmentMismatchError(
                "the observation does not have the network's inputs",
                expected=", ".join(self._observed),
                found=", ".join(named) if isinstance(obs, Mapping) else "one array",
            )
        return named

    def _remembered(self, state: State, batch: int) -> State:
        """Return the state, or zeros before the first step."""
        if len(state) not in {0, len(self._states)}:
            raise UsageError(
                "the state does not have the network's slots",
                expected=str(len(self._states)),
                found=str(len(state)),
            )
        by_name = dict(zip(self._names, self.shapes, strict=True))
        return tuple(state) or tuple(np.zeros((batch, *by_name[n]), self.dtype) for n in self._states)

    def _fit(self, name: str, array: np.ndarray, batch: int) -> np.ndarray:
        wanted = (batch, *self.shapes[self._names.index(name)])
        flattens = name in self._flattened and array.size == math.prod(wanted) and len(array) == batch
        if array.shape != wanted and not flattens:
            raise EnvironmentMismatchError(
                f"input {name!r} does not fit the network",
                expected=f"[{', '.join(['batch', *map(str, wanted[1:])])}]",
                found=str(list(array.shape)),
            )
        return array.astype(self.dtype, copy=False).reshape(wanted)


def is_chain(network: Network) -> bool:
    """Say whether every layer takes the one before, from one input to the output."""
    line = all(node.inputs == (number,) for number, node in enumerate(network.nodes))
    return line and len(network.inputs) == 1 and not network.states and network.output == len(network.nodes)


def _chain(calls: Sequence[Callable[..., Value]]) -> Callable[[Sequence[Value]], list[Value]]:
    def run(given: Sequence[Value]) -> list[Value]:
        value = given[0]
        for call in calls:
            value = call(value)
        return [value]

    return run


def _only_flattened(network: Network) -> frozenset[str]:
    """Return the inputs that may come as [batch, ...] because nothing but Flatten reads them."""
    others = {i for node in network.nodes if not isinstance(node.layer, Flatten) for i in node.inputs}
    read = {i for node in network.nodes for i in node.inputs} - others
    return frozenset(name for i, (name, _) in enumerate(network.inputs) if i in read)


def _check_results(network: Network, found: Sequence[Shape]) -> None:
    if not 0 <= network.output < len(found):
        raise UsageError(f"the network's output is value {network.output} of {len(found)}")
    names = [name for name, _ in network.inputs]
    for slot in network.states:
        if slot.name not in names or not 0 <= slot.value < len(found) or found[slot.value] != slot.shape:
            raise UsageError(f"no value of shape {slot.shape} feeds the network's state {slot.name!r}")
