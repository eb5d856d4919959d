"""Define frozen graphs of typed layers and policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, cast, get_args

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import EnvironmentMismatchError, FormatError, UnsupportedError, UsageError
from ckpttool.core.kinds import ActivationName
from ckpttool.core.sidecar import DEFAULT_SLOPE


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """`x @ kernel + bias`; kernel [in, out], bias [out] or None; `constant` for a kernel without weights."""

    kernel: np.ndarray
    bias: np.ndarray | None = None
    constant: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ConstantRow:
    """The same trained row [n] for every row of the input, whose values are not used."""

    row: np.ndarray


@dataclass(frozen=True, slots=True)
class Exp:
    """The exponential of every element."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Normalise the last axis, then `* scale + offset`; scale, offset [n]; epsilon inside the root."""

    scale: np.ndarray
    offset: np.ndarray
    epsilon: float


# torch/nn/modules/activation.py, SELU.
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function; `slope` is only for leaky_relu (PyTorch 0.01, Keras layers 0.3)."""

    name: ActivationName
    slope: float = DEFAULT_SLOPE


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenate all inputs along the last axis."""


@dataclass(frozen=True, slots=True)
class Flatten:
    """Flatten [batch, ...] to [batch, n], in C order."""


@dataclass(frozen=True, slots=True)
class Transpose:
    """Reorder the axes after the batch: axis i of the result is axis axes[i] of the input, from 0."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Select columns `start` up to, but not including, `stop` of the last axis."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Add:
    """Add all inputs, which have the same shape."""


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiply all inputs elementwise; they have the same shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """Cross-correlate images [batch, height, width, in] to [batch, height, width, out].

    kernel [height, width, in, out], bias [out] or None; `strides` are (down, right), `padding` the
    rows of zeros ((above, below), (left, right)).
    """

    kernel: np.ndarray
    bias: np.ndarray | None = None
    strides: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x * scale + shift`; scale, shift [n]: action bounds and observation statistics."""

    scale: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Clip every element; low, high [n]."""

    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, slots=True)
class QuantileMean:
    """Average the quantiles of every action's value, [batch, quantiles * actions] to [batch, actions].

    The quantiles of one action lie together if `last`, else those of all actions with one number.
    """

    quantiles: int
    last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AtomMean:
    """Expected value of every action from logits, [batch, actions * atoms] to [batch, actions].

    support [atoms]: the values whose probabilities are the softmax of an action's logits, but at least
    `limit` (of 0, no limit).
    """

    support: np.ndarray
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Softmax:
    """Probabilities from logits, over the last axis."""


@dataclass(frozen=True, slots=True)
class Cosines:
    """Cosines of pi, 2 pi, ... times every number, [..., n] to [..., n, number]."""

    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same row `count` times, [batch, n] to [batch, count, n]."""

    count: int


@dataclass(frozen=True, slots=True)
class ArgMax:
    """Number of the largest value of each choice, [batch, sum(counts)] to [batch, len(counts)].

    A choice's first value has number `starts[i]`; of equal values the first is taken. The numbers have the
    network's float type, which represents them exactly.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]


Layer = (
    Dense
    | ConstantRow
    | Exp
    | LayerNorm
    | Activation
    | Concat
    | Flatten
    | Affine
    | Clip
    | Transpose
    | Slice
    | Add
    | Multiply
    | Convolution
    | QuantileMean
    | AtomMean
    | Softmax
    | Cosines
    | Repeat
    | ArgMax
)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A layer and the numbers of its input values."""

    layer: Layer
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateSlot:
    """State of a recurrent network, carried from step to step.

    `shape` is without the batch, `value` the number of the value that becomes the next state.
    """

    name: str
    shape: tuple[int, ...]
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A graph with named inputs and one output.

    `inputs` are names and widths, e.g. `("obs", 17)`, or shapes without the batch, `("obs", (64, 64, 3))`; a
    network with state also lists its state slots' names among the inputs. `output` is the number of the
    returned value. `members` above 1 means the arrays of several networks in one, each with a leading member
    axis (see stack_networks). Values are numbered: first the inputs in order, then one per node. A backend
    turns the whole graph into one function (see Policy); a new kind of layer is one more class here and one
    more row in layer_functions.py, or in each backend's table.
    """

    inputs: tuple[tuple[str, int | tuple[int, ...]], ...]
    nodes: tuple[Node, ...]
    output: int
    states: tuple[StateSlot, ...] = ()
    members: int = 1

    def cast(self, dtype: Literal["float32", "float64"]) -> Network:
        """Return the same network with every array in `dtype`."""
        return self.with_arrays(lambda _, array: array.astype(dtype))

    def with_arrays(self, change: Callable[[str, np.ndarray], np.ndarray]) -> Network:
        """Return the same network with `change(field, array)` for every array of every layer."""
        return replace(self, nodes=tuple(replace(n, layer=_map_arrays(n.layer, change)) for n in self.nodes))

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every input without its batch, in order."""
        slots = {slot.name: slot.shape for slot in self.states}
        shapes = {name: (width,) if isinstance(width, int) else tuple(width) for name, width in self.inputs}
        return {name: slots.get(name, shape) for name, shape in shapes.items()}

    @property
    def width(self) -> int:
        """Return the width of the output: that of the last layer with a width."""
        if any(isinstance(node.layer, QuantileMean | AtomMean | ArgMax) for node in self.nodes):
            return value_shapes(self)[self.output][-1]
        for node in reversed(self.nodes):
            if isinstance(node.layer, Dense):
                return int(node.layer.kernel.shape[-1])
        raise ValueError("the output width is undefined: the network has no dense layer")


def field_arrays(layer: Layer) -> dict[str, np.ndarray]:
    """Return a layer's arrays by field, in the order in which backends take them."""
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def _map_arrays(layer: Layer, change: Callable[[str, np.ndarray], np.ndarray]) -> Layer:
    arrays: dict[str, Any] = {name: change(name, array) for name, array in field_arrays(layer).items()}
    return replace(layer, **arrays) if arrays else layer


NOISE = "/noise"
"""Name of the input of random numbers, in a network that draws its actions."""
DrawLaw = Literal["normal", "uniform", "factors"]
"""Law of these numbers; see NormalSampler of evaluation/rollout.py."""

Observation = np.ndarray | Mapping[str, np.ndarray]
State = tuple[np.ndarray, ...]


class Policy(Protocol):
    """A network on a device; the weights stay there between steps."""

    device: str

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state.

        `obs` is an array [batch, obs_dim] for a network with one input, else a mapping from input name to
        array; `state` is empty for networks without memory.
        """
        ...


class Backend(Protocol):
    """Interface of every backend module; its names are module-level."""

    NAME: str

    def build(self, network: Network, device: str = "cpu") -> Policy:
        """Put the network on the device ("cpu", "cuda", "auto"); raise UsageError if unavailable."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of the computing libraries."""
        ...


Shape = tuple[int, ...]


def _dense_shape(layer: Dense, shapes: Sequence[Shape]) -> Shape:
    rows, columns = layer.kernel.shape
    if len(shapes) != 1 or shapes[0][-1] != rows:
        raise ValueError(f"[batch, {rows}]", _format_shapes(shapes))
    if layer.bias is not None and layer.bias.shape != (columns,):
        raise ValueError(f"a bias of {columns}", str(list(layer.bias.shape)))
    return (*shapes[0][:-1], columns)


def _vector_shape(size: int, shapes: Sequence[Shape]) -> Shape:
    if len(shapes) != 1 or size not in {1, shapes[0][-1]}:
        raise ValueError(f"[batch, {size}]", _format_shapes(shapes))
    return shapes[0]


def _concat_shape(_layer: Concat, shapes: Sequence[Shape]) -> Shape:
    if len({shape[:-1] for shape in shapes}) != 1:
        raise ValueError("shapes that differ only in the last axis", _format_shapes(shapes))
    return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def _same_shape(_layer: Layer, shapes: Sequence[Shape]) -> Shape:
    if len(set(shapes)) != 1:
        raise ValueError("equal shapes", _format_shapes(shapes))
    return shapes[0]


def _transpose_shape(layer: Transpose, shapes: Sequence[Shape]) -> Shape:
    if len(shapes) != 1 or sorted(layer.axes) != list(range(len(shapes[0]))):
        raise ValueError(f"{len(layer.axes)} axes after the batch", _format_shapes(shapes))
    return tuple(shapes[0][axis] for axis in layer.axes)


def _slice_shape(layer: Slice, shapes: Sequence[Shape]) -> Shape:
    if len(shapes) != 1 or not 0 <= layer.start < layer.stop <= shapes[0][-1]:
        raise ValueError(f"at least {layer.stop} columns", _format_shapes(shapes))
    return (*shapes[0][:-1], layer.stop - layer.start)


def _convolution_shape(layer: Convolution, shapes: Sequence[Shape]) -> Shape:
    *size, channels, filters = layer.kernel.shape
    if len(shapes) != 1 or len(shapes[0]) != len(size) + 1 or shapes[0][-1] != channels:
        raise ValueError(f"[batch, height, width, {channels}]", _format_shapes(shapes))
    if layer.bias is not None and layer.bias.shape != (filters,):
        raise ValueError(f"a bias of {filters}", str(list(layer.bias.shape)))
    whole = [n + sum(more) for n, more in zip(shapes[0], layer.padding, strict=False)]
    if any(n < k for n, k in zip(whole, size, strict=True)):
        raise ValueError(f"images of {size[0]} x {size[1]} or more", _format_shapes(shapes))
    steps = zip(whole, size, layer.strides, strict=True)
    return (*((n - k) // stride + 1 for n, k, stride in steps), filters)


def _grouped_shape(size: int, shapes: Sequence[Shape]) -> Shape:
    """Return the shape with one value for every `size` values of the last axis."""
    if len(shapes) != 1 or shapes[0][-1] % size:
        raise ValueError(f"[batch, a multiple of {size}]", _format_shapes(shapes))
    return (*shapes[0][:-1], shapes[0][-1] // size)


def _choice_shape(layer: ArgMax, shapes: Sequence[Shape]) -> Shape:
    if list(shapes) != [(sum(layer.counts),)] or len(layer.counts) != len(layer.starts):
        raise ValueError(f"[batch, {sum(layer.counts)}]", _format_shapes(shapes))
    return (len(layer.counts),)


def _format_shapes(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(["batch", *shape]).replace("'", "") for shape in shapes)


RULES: dict[type[Layer], Callable[[Any, Sequence[Shape]], Shape]] = {
    Dense: _dense_shape,
    ConstantRow: lambda layer, shapes: (*shapes[0][:-1], layer.row.size),
    Exp: lambda _layer, shapes: shapes[0],
    LayerNorm: lambda layer, shapes: _vector_shape(layer.scale.size, shapes),
    Activation: lambda _layer, shapes: shapes[0],
    Concat: _concat_shape,
    Flatten: lambda _layer, shapes: (math.prod(shapes[0]),),
    Affine: lambda layer, shapes: _vector_shape(layer.scale.size, shapes),
    Clip: lambda layer, shapes: _vector_shape(layer.low.size, shapes),
    Transpose: _transpose_shape,
    Slice: _slice_shape,
    Add: _same_shape,
    Multiply: _same_shape,
    Convolution: _convolution_shape,
    QuantileMean: lambda layer, shapes: _grouped_shape(layer.quantiles, shapes),
    AtomMean: lambda layer, shapes: _grouped_shape(layer.support.shape[-1], shapes),
    Softmax: lambda _layer, shapes: shapes[0],
    Cosines: lambda layer, shapes: (*shapes[0], layer.number),
    Repeat: lambda layer, shapes: (layer.count, *shapes[0]),
    ArgMax: _choice_shape,
}


# Layers that act on the last axis alone: a member axis before the batch does not affect them.
STACKABLE: frozenset[type[Layer]] = frozenset(get_args(Layer)) - {
    Flatten,
    Transpose,
    Convolution,
    Cosines,
    Repeat,
}
# Their only field with two axes; all others have one and are the same for every row.
MATRIX = "kernel"


def stack_structure(network: Network) -> Hashable | None:
    """Return the structure that stacked networks must share; None if a network cannot be stacked.

    It consists of the graph, the layers' kinds, shapes and types, activations and epsilons: everything
    except the weights.
    """
    if network.states or not all(_is_stackable(node.layer) for node in network.nodes):
        return None
    layers = tuple((type(node.layer), node.inputs, _layer_facts(node.layer)) for node in network.nodes)
    return network.members, network.inputs, network.output, layers


def stack_networks(networks: Sequence[Network]) -> Network:
    """Stack the networks as one with `members=K`: kernels [K, in, out], all other arrays [K, 1, n].

    A single network is its own stack. Raise UsageError if structures differ. The input of a stacked policy
    contains the members' rows one block after the other, obs [K * n, obs_dim]; block m is computed with
    member m's weights: one batched product instead of K small ones.
    """
    first, *others = networks
    if not others:
        return first
    structure = stack_structure(first)
    if structure is None or first.members > 1 or any(stack_structure(other) != structure for other in others):
        raise UsageError("cannot stack networks of different structures")

    def stack(layers: Sequence[Layer]) -> Layer:
        rows = [field_arrays(layer) for layer in layers]
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return _map_arrays(
            layers[0], lambda name, _: arrays[name] if name == MATRIX else arrays[name][:, None]
        )

    alike = zip(*([node.layer for node in network.nodes] for network in networks), strict=True)
    nodes = tuple(replace(node, layer=stack(layers)) for node, layers in zip(first.nodes, alike, strict=True))
    return replace(first, nodes=nodes, members=len(networks))


def select_member(network: Network, number: int) -> Network:
    """Return one network of a stack."""
    if network.members == 1:
        return network
    alone = network.with_arrays(lambda name, array: array[number] if name == MATRIX else array[number, 0])
    return replace(alone, members=1)


def _is_stackable(layer: Layer) -> bool:
    axes = {name: array.ndim for name, array in field_arrays(layer).items()}
    return type(layer) in STACKABLE and all(n == (2 if name == MATRIX else 1) for name, n in axes.items())


def _layer_facts(layer: Layer) -> Hashable:
    values = [getattr(layer, field.name) for field in fields(layer)]
    return tuple((v.shape, v.dtype.name) if isinstance(v, np.ndarray) else v for v in values)


Value = TypeVar("Value")
Dtype = Literal["float32", "float64"]


def network_arrays(network: Network) -> Iterator[np.ndarray]:
    """Yield every array of every layer, in node order."""
    for node in network.nodes:
        yield from field_arrays(node.layer).values()


def dtype_of(network: Network) -> Dtype:
    """Return the float type of the network's arrays; float32 if there is no array."""
    names = {array.dtype.name for array in network_arrays(network)} or {"float32"}
    if len(names) > 1 or not names <= {"float32", "float64"}:
        raise UnsupportedError(
            "a network must compute in float32 or float64",
            found=" and ".join(sorted(names)),
            hint="use network.cast('float32') to convert all arrays to one type",
        )
    return cast(Dtype, names.pop())


def value_shapes(network: Network) -> list[Shape]:
    """Return the shape of every value without its batch; raise UsageError if layers do not match.

    The members of a stacked network share their shapes, which are without the member axis. A rule takes a
    layer and the shapes of its inputs; its ValueError contains the expected and the found shape.
    """
    network = select_member(network, 0)
    computed = list(network.input_shapes.values())
    for number, node in enumerate(network.nodes):
        kind = type(node.layer).__name__
        if not node.inputs or not all(0 <= value < len(computed) for value in node.inputs):
            raise UsageError(f"node {number} ({kind}) uses a value that is not defined before it")
        inputs = [computed[value] for value in node.inputs]
        try:
            computed.append(look_up(RULES, type(node.layer), "network")(node.layer, inputs))
        except ValueError as error:
            expected, actual = error.args
            raise UsageError(
                f"node {number} ({kind}) does not match its inputs", expected=expected, found=actual
            ) from None
    _check_results(network, computed)
    return computed


def look_up(table: Mapping[Any, Value], key: Any, owner: str) -> Value:
    """Return the table entry of a layer class or activation; raise UnsupportedError if there is none."""
    if key not in table:
        raise UnsupportedError(f"the {owner} does not support {getattr(key, '__name__', key)}")
    return table[key]


def assemble(
    network: Network, lower: Callable[[Layer], Callable[..., Value]]
) -> Callable[[Sequence[Value]], list[Value]]:
    """Return one function from input values to the output followed by the next states.

    `lower` turns a layer into a function; it is called once per node, so that weights move only here.
    """
    calls = [lower(node.layer) for node in network.nodes]
    if is_chain(network):
        return chain_calls(calls)
    steps = [(call, node.inputs) for call, node in zip(calls, network.nodes, strict=True)]
    results = [network.output, *(slot.value for slot in network.states)]

    def run(arguments: Sequence[Value]) -> list[Value]:
        values = list(arguments)
        for call, inputs in steps:
            values.append(call(*[values[i] for i in inputs]))
        return [values[i] for i in results]

    return run


class InputAdapter:
    """Convert the caller's observations to arrays of a network's inputs, in their order and type."""

    def __init__(self, network: Network) -> None:
        self.dtype = np.dtype(dtype_of(network))
        self.shapes = value_shapes(network)[: len(network.inputs)]
        self.members = network.members
        self._names = tuple(name for name, _ in network.inputs)
        self._states = tuple(slot.name for slot in network.states)
        self._observed = tuple(name for name in self._names if name not in self._states)
        self._flattened = _only_flattened(network)
        # The common case is one array of the right width: it must cost less than the arithmetic.
        plain = len(self.shapes) == 1 and len(self.shapes[0]) == 1 and not self._states and self.members == 1
        self._width = self.shapes[0][0] if plain else -1

    def __call__(self, obs: Observation, state: State = ()) -> list[np.ndarray]:
        """Return an array [batch, ...] per input, or [members, batch / members, ...] for a stack.

        Raise EnvironmentMismatchError if an input does not match.
        """
        if isinstance(obs, np.ndarray) and obs.ndim == 2 and obs.shape[1] == self._width and not state:
            return [obs if obs.dtype == self.dtype else obs.astype(self.dtype)]
        rows = self._rows(obs, state)
        return rows if self.members == 1 else self._blocks(rows)

    @property
    def is_joint(self) -> bool:
        """Return whether a policy has a memory, or observations of more than one input."""
        return bool(self._states) or len([name for name in self._names if name != NOISE]) > 1

    def joined(self, output: np.ndarray) -> np.ndarray:
        """Return a stacked network's output, with rows in the order of the observations."""
        return output if self.members == 1 else output.reshape(-1, output.shape[-1])

    def _rows(self, obs: Observation, state: State) -> list[np.ndarray]:
        named = self._named(obs)
        batch = len(next(iter(named.values())))
        named.update(zip(self._states, self._remembered(state, batch), strict=True))
        return [self._fit(name, named[name], batch) for name in self._names]

    def _blocks(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Split the rows among the members: one block each."""
        if any(len(array) % self.members for array in arrays):
            raise EnvironmentMismatchError(
                "the number of observations is not divisible by the number of stacked policies",
                expected=f"a multiple of {self.members}",
                found=str(len(arrays[0])),
            )
        return [array.reshape(self.members, -1, *array.shape[1:]) for array in arrays]

    def _named(self, obs: Observation) -> dict[str, np.ndarray]:
        named = (
            {name: np.asarray(value) for name, value in obs.items()}
            if isinstance(obs, Mapping)
            else {self._observed[0]: np.asarray(obs)}
        )
        if set(named) != set(self._observed) or not all(array.ndim for array in named.values()):
            raise EnvironmentMismatchError(
                "the observation does not match the network's inputs",
                expected=", ".join(self._observed),
                found=", ".join(named) if isinstance(obs, Mapping) else "one array",
            )
        return named

    def _remembered(self, state: State, batch: int) -> State:
        """Return the state, or zeros before the first step."""
        if len(state) not in {0, len(self._states)}:
            raise UsageError(
                "the state does not match the network's state slots",
                expected=str(len(self._states)),
                found=str(len(state)),
            )
        by_name = dict(zip(self._names, self.shapes, strict=True))
        return tuple(state) or tuple(np.zeros((batch, *by_name[n]), self.dtype) for n in self._states)

    def _fit(self, name: str, array: np.ndarray, batch: int) -> np.ndarray:
        shape = (batch, *self.shapes[self._names.index(name)])
        flattens = name in self._flattened and array.size == math.prod(shape) and len(array) == batch
        if array.shape != shape and not flattens:
            raise EnvironmentMismatchError(
                f"input {name!r} does not match the network",
                expected=f"[{', '.join(['batch', *map(str, shape[1:])])}]",
                found=str(list(array.shape)),
            )
        return array.astype(self.dtype, copy=False).reshape(shape)


def require_cpu(backend: str, device: str) -> None:
    """Raise UsageError for a device that a backend of the CPU does not have."""
    if device not in {"cpu", "auto"}:
        raise UsageError(f"the {backend} backend does not support device {device!r}", hint="use --device cpu")


def is_chain(network: Network) -> bool:
    """Return whether the layers form a chain from a single input to the output."""
    line = all(node.inputs == (number,) for number, node in enumerate(network.nodes))
    return line and len(network.inputs) == 1 and not network.states and network.output == len(network.nodes)


def chain_calls(calls: Sequence[Callable[..., Value]]) -> Callable[[Sequence[Value]], list[Value]]:
    """Return the calls one after another, from the only input to the only output."""

    def run(inputs: Sequence[Value]) -> list[Value]:
        value = inputs[0]
        for call in calls:
            value = call(value)
        return [value]

    return run


def _only_flattened(network: Network) -> frozenset[str]:
    """Return the inputs that may be [batch, ...] because only Flatten reads them."""
    others = {i for node in network.nodes if not isinstance(node.layer, Flatten) for i in node.inputs}
    read = {i for node in network.nodes for i in node.inputs} - others
    return frozenset(name for i, (name, _) in enumerate(network.inputs) if i in read)


def _check_results(network: Network, shapes: Sequence[Shape]) -> None:
    if not 0 <= network.output < len(shapes):
        raise UsageError(
            "the network's output is a value that does not exist",
            expected=f"a number below {len(shapes)}",
            found=str(network.output),
        )
    names = [name for name, _ in network.inputs]
    for slot in network.states:
        if slot.name not in names or not 0 <= slot.value < len(shapes) or shapes[slot.value] != slot.shape:
            raise UsageError(f"no value of shape {slot.shape} feeds the network's state {slot.name!r}")


# Trained arrays of a layer, in the order of both frameworks, and their names in torch.nn.
TRAINED: Mapping[type[Layer], Mapping[str, str]] = {
    Dense: {"kernel": "weight", "bias": "bias"},
    Convolution: {"kernel": "weight", "bias": "bias"},
    LayerNorm: {"scale": "weight", "offset": "bias"},
    ConstantRow: {"row": "row"},
}
LAYERS: dict[str, type[Layer]] = {kind.__name__: kind for kind in get_args(Layer)}


def write_network(network: Network, file: BinaryIO) -> dict[str, Any]:
    """Write the arrays to `file` as an npz; return the rest as a JSON document."""
    arrays: dict[str, np.ndarray] = {}
    document = network_to_document(network, arrays)
    np.savez(file, allow_pickle=False, **arrays)
    return document


def network_to_document(network: Network, arrays: dict[str, np.ndarray], prefix: str = "") -> dict[str, Any]:
    """Put the arrays into `arrays` under names that begin with `prefix`; return the rest for JSON."""
    nodes = [_node_document(f"{prefix}{number}.", node, arrays) for number, node in enumerate(network.nodes)]
    return {
        "inputs": [list(row) for row in network.inputs],
        "nodes": nodes,
        "output": network.output,
        "states": [[slot.name, list(slot.shape), slot.value] for slot in network.states],
        "members": network.members,
    }


def read_network(document: dict[str, Any], file: BinaryIO) -> Network:
    """Return the network from a document and its npz; raise FormatError if they are invalid."""
    with np.load(file, allow_pickle=False) as arrays:
        return network_from_document(document, arrays)


def network_from_document(document: dict[str, Any], arrays: Any) -> Network:
    """Return the network from a document and arrays by name; raise FormatError if they are invalid."""
    try:
        return Network(
            inputs=tuple((str(name), _to_tuples(width)) for name, width in document["inputs"]),
            nodes=tuple(
                Node(_layer_from_document(node, arrays), tuple(node["inputs"])) for node in document["nodes"]
            ),
            output=int(document["output"]),
            states=tuple(StateSlot(name, tuple(shape), value) for name, shape, value in document["states"]),
            members=int(document["members"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"incomplete network document: {error!r}") from None


def _node_document(prefix: str, node: Node, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    own = field_arrays(node.layer)
    arrays.update((prefix + name, array) for name, array in own.items())
    plain = {
        field.name: getattr(node.layer, field.name) for field in fields(node.layer) if field.name not in own
    }
    return {
        "layer": type(node.layer).__name__,
        "inputs": list(node.inputs),
        # JSON has no numbers of NumPy.
        "plain": {name: x.item() if isinstance(x, np.generic) else x for name, x in plain.items()},
        "arrays": {name: prefix + name for name in own},
    }


def _layer_from_document(node: dict[str, Any], arrays: Any) -> Layer:
    tensors = {name: arrays[key] for name, key in node["arrays"].items()}
    plain = {name: _to_tuples(value) for name, value in node["plain"].items()}
    return LAYERS[node["layer"]](**plain, **tensors)


def _to_tuples(value: Any) -> Any:
    """Convert JSON lists to tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
