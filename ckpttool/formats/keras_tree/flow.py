"""In which order layers of a Keras model take and make flattened images, as its configuration tells.

An axis is terms that stand one after the other; a term is digits, the slowest first: the digits of a
flattened image are its rows, columns and channels. Reshaping splits and joins digits, permuting reorders
them. What a convolution takes becomes an image by that.

Sources: keras/src/models/functional.py and sequential.py (configurations), keras/src/layers/reshaping/*.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.activations import MOST_FEATURES, UNKNOWN, Order, natural
from ckpttool.formats.keras_tree.config import Config, config_of, windowed_sizes

_MOST_LAYERS = 20_000
_IMAGES = re.compile(
    r"(?:Separable|Depthwise)?Conv[123]D(?:Transpose)?|(?:Max|Average)Pooling[123]D|UpSampling[123]D"
    r"|ZeroPadding[123]D|Cropping[123]D"
)
_GLOBAL = re.compile(r"Global(?:Max|Average)Pooling[123]D")
_SAME = frozenset(
    [
        "Activation",
        "ReLU",
        "LeakyReLU",
        "ELU",
        "Softmax",
        "Dropout",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        "GaussianNoise",
        "GaussianDropout",
        "AlphaDropout",
        "ActivityRegularization",
        "Rescaling",
        "Masking",
        "Identity",
    ]
)
_NORMS = frozenset(
    ("BatchNormalization", "LayerNormalization", "RMSNormalization", "PReLU", "GroupNormalization")
)
_MERGES = frozenset(("Add", "Multiply", "Subtract", "Average", "Maximum", "Minimum"))
_CELLS = frozenset(("LSTM", "GRU", "SimpleRNN"))


class Digit(NamedTuple):
    """A digit of an origin's numbers: `(number // stride) % extent`, with its role: places 0 to 2, or 3."""

    origin: int
    role: int
    extent: int
    stride: int = 1


_CHANNEL, _NONE = 3, -1
Term = tuple[Digit, ...]
Axis = tuple[Term, ...]


class Value(NamedTuple):
    """What a layer gives: its axes without the batch; () terms of an axis of unknown length."""

    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the axes."""
        return tuple(sum(_size(term) for term in axis) for axis in self.axes)


def _size(term: Term) -> int:
    return math.prod(digit.extent for digit in term)


@dataclass
class Flow:
    """The values of one configuration's layers, and what layers take and make by name."""

    takes: dict[tuple[str, ...], list[Axis | None]] = field(default_factory=dict)
    makes: dict[tuple[str, ...], list[Axis]] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    _taken: dict[int, Mapping[Digit, int]] = field(default_factory=dict)
    _joined: list[tuple[Axis, Axis]] = field(default_factory=list)
    _origins: int = 0
    _visited: int = 0

    # --- Values -----------------------------------------------------------------------------------------

    def _new(self, shape: Sequence[int], *, image: bool = False) -> Value:
        """Return a new value; an image's last axis has its channels."""
        self._origins += 1
        axes: list[Axis] = []
        for number, extent in enumerate(shape):
            role = _NONE if not image else _CHANNEL if number == len(shape) - 1 else number
            axes.append(((Digit(self._origins if image else self._fresh(), role, extent),),))
        return Value(tuple(axes))

    def _fresh(self) -> int:
        self._origins += 1
        return self._origins

    def model(
        self, config: Config, given: Sequence[Value | None], above: tuple[str, ...]
    ) -> list[Value | None]:
        """Return what a Sequential or functional model makes of its inputs."""
        layers = config.settings.get("layers")
        if not isinstance(layers, list):
            return [None]
        if config.cls == "Sequential":
            value = given[0] if given else _input(self, config.settings.get("build_input_shape"))
            for each in layers:
                value = self._one(config_of(each), [value], above)
            return [value]
        return self._functional(config, layers, given, above)

    def _functional(
        self, config: Config, layers: list[Any], given: Sequence[Value | None], above: tuple[str, ...]
    ) -> list[Value | None]:
        values: dict[tuple[str, int, int], Value | None] = {}
        waiting: list[tuple[str, Config, int, list[tuple[str, int, int]]]] = []
        inputs = _references(config.settings.get("input_layers"))
        for each in layers:
            layer = config_of(each)
            name = str(each.get("name") or layer.name or "") if isinstance(each, dict) else ""
            if layer.cls == "InputLayer":
                place = next((n for n, ref in enumerate(inputs) if ref[0] == name), None)
                inner = given[place] if place is not None and place < len(given) else None
                values[name, 0, 0] = inner if inner is not None else self._one(layer, [], above)
                continue
            nodes = each.get("inbound_nodes") if isinstance(each, dict) else None
            for number, node in enumerate(nodes if isinstance(nodes, list) else []):
                waiting.append((name, layer, number, _references(node)))
        while waiting and self._visited < _MOST_LAYERS:
            later = []
            for name, layer, number, refs in waiting:
                self._visited += 1
                if not refs or not all(ref in values for ref in refs):
                    later.append((name, layer, number, refs))
                    continue
                made = self._several(layer, [values[ref] for ref in refs], above)
                for place, value in enumerate(made):
                    values[name, number, place] = value
            if len(later) == len(waiting):
                break
            waiting = later
        return [values.get(ref) for ref in _references(config.settings.get("output_layers"))]

    def _several(
        self, layer: Config, given: list[Value | None], above: tuple[str, ...]
    ) -> list[Value | None]:
        if layer.cls in ("Sequential", "Functional", "Model"):
            return self.model(layer, given, (*above, layer.name or ""))
        return [self._one(layer, given, above)]

    # --- Layers -----------------------------------------------------------------------------------------

    def _one(self, layer: Config, given: list[Value | None], above: tuple[str, ...]) -> Value | None:  # noqa: C901 - a list of classes
        cls, settings = layer.cls or "", layer.settings
        if cls in ("Sequential", "Functional", "Model"):
            return self.model(layer, given, (*above, layer.name or ""))[0]
        started = _input(self, settings.get("batch_shape") or settings.get("batch_input_shape"))
        if cls == "InputLayer":
            if not above and started is not None:
                self.inputs.append(started)
            return started
        values = [each for each in given if each is not None] or ([started] if started is not None else [])
        name = (*above, layer.name or "")
        x = values[0] if values else None
        if len(values) < len(given) or x is None:
            self._takes(name, None)
            return None
        if settings.get("data_format") not in (None, "channels_last"):
            self._takes(name, None)
            return None
        if cls in _SAME:
            return x
        if cls in _NORMS:
            axis = settings.get("axis", -1)
            last = axis in (-1, len(x.axes), [-1], [len(x.axes)]) or cls == "PReLU"
            self._takes(name, x.axes[-1] if last else None)
            return x
        if cls in _MERGES:
            same = all(each.shape == x.shape for each in values)
            for each in values[1:]:
                self._joined += zip(x.axes, each.axes, strict=False) if same else ()
            return x if same else None
        if cls == "Concatenate":
            return _concatenated(values, settings.get("axis", -1))
        return self._shaped(cls, settings, x, name)

    def _shaped(self, cls: str, settings: Mapping[str, Any], x: Value, name: tuple[str, ...]) -> Value | None:  # noqa: C901 - a list of classes
        if cls == "Flatten":
            return _reshaped(x, (math.prod(x.shape),))
        if cls == "Reshape":
            wanted = settings.get("target_shape")
            return _reshaped(x, _sizes(wanted, math.prod(x.shape)))
        if cls == "Permute":
            dims = settings.get("dims")
            if isinstance(dims, list) and sorted(map(str, dims)) == sorted(
                str(n + 1) for n in range(len(x.axes))
            ):
                return Value(tuple(x.axes[n - 1] for n in dims))
            return None
        if cls == "Dense":
            return self._features(x, settings.get("units"), name)
        if cls == "EinsumDense":
            self._takes(name, None)
            return None
        if cls == "Embedding":
            made = self._features(x, settings.get("output_dim"), None)
            return Value((*x.axes, made.axes[-1])) if made is not None else None
        if cls in _CELLS:
            made = self._features(x, settings.get("units"), None)
            self._takes(name, x.axes[-1])
            if made is None:
                return None
            return made if settings.get("return_sequences") else Value(made.axes[-1:])
        if cls == "RepeatVector":
            count = settings.get("n")
            return Value((*self._new((count,)).axes, *x.axes)) if type(count) is int and count > 0 else None
        if cls == "TimeDistributed":
            inner = self._one(config_of(settings.get("layer")), [Value(x.axes[1:])], name)
            return Value((x.axes[0], *inner.axes)) if inner is not None and len(x.axes) > 1 else None
        if cls in ("MultiHeadAttention", "MultiHeadSelfAttention", "Attention"):
            return self._features(x, x.shape[-1], None)
        if _GLOBAL.fullmatch(cls):
            return self._new(x.shape[-1:]) if not settings.get("keepdims") else None
        if _IMAGES.fullmatch(cls):
            self._image(x)
            sizes = windowed_sizes(cls, settings, x.shape)
            return self._new(sizes, image=True) if sizes is not None else None
        return None

    def _features(self, x: Value, units: Any, name: tuple[str, ...] | None) -> Value | None:
        if type(units) is not int or not 0 < units <= MOST_FEATURES:
            return None
        (made,) = self._new((units,)).axes
        if name is not None:
            self._takes(name, x.axes[-1])
            self.makes.setdefault(name, []).append(made)
        return Value((*x.axes[:-1], made))

    def _takes(self, name: tuple[str, ...], axis: Axis | None) -> None:
        self.takes.setdefault(name, []).append(axis)

    def _image(self, x: Value) -> None:
        """Note that something takes a value as an image: what its digits are."""
        roles: dict[int, dict[Digit, int]] = {}
        for number, axis in enumerate(x.axes):
            for term in axis:
                for digit in term:
                    if digit.role == _NONE:
                        role = _CHANNEL if number == len(x.axes) - 1 else number
                        roles.setdefault(digit.origin, {})[digit] = role
        for origin, found in roles.items():
            self._taken.setdefault(origin, found)

    # --- Orders -----------------------------------------------------------------------------------------

    def orders(self) -> Iterator[tuple[tuple[str, ...], str, Order]]:
        """Go through the orders of what layers take and make: by the layer's name, and which of the two."""
        for one, other in (*self._joined, *((b, a) for a, b in self._joined)):
            for mine, theirs in zip(one, other, strict=False):
                self._carry(mine, theirs)
        for side, found in (("takes", self.takes), ("makes", self.makes)):
            for name, axes in found.items():
                orders = {UNKNOWN if axis is None else self._order(axis) for axis in axes}
                if len(orders) == 1 and orders != {UNKNOWN}:
                    yield name, side, orders.pop()
                elif None not in axes:
                    yield name, side, UNKNOWN

    def _carry(self, mine: Term, theirs: Term) -> None:
        """Give one origin, whole in a term, the order of another that it is added to."""
        if len(mine) != 1 or mine[0].role != _NONE or mine[0].origin in self._taken:
            return
        other = self._named(theirs)
        if _size(theirs) != mine[0].extent or not any(role != _NONE for _, role in other):
            return
        stride, found = mine[0].extent, {}
        for digit, role in other:
            stride //= digit.extent
            found[Digit(mine[0].origin, _NONE, digit.extent, stride)] = role
        self._taken[mine[0].origin] = found

    def _named(self, term: Term) -> list[tuple[Digit, int]]:
        """Return the digits of a term with their roles, a whole origin by what takes it as an image."""
        found: list[tuple[Digit, int]] = []
        for digit in term:
            taken = self._taken.get(digit.origin) if digit.role == _NONE else None
            if taken is None:
                found.append((digit, digit.role))
                continue
            inner = sorted(taken, key=lambda each: -each.stride)
            whole = math.prod(each.extent for each in inner)
            if digit in taken:
                found.append((digit, taken[digit]))
            elif digit.stride == 1 and whole == digit.extent:
                found += [(each, taken[each]) for each in inner]
            else:
                found.append((digit, _NONE))
        return found

    def _order(self, axis: Axis) -> Order:
        parts: list[tuple[int, int]] = []
        index: list[int] = []
        for term in axis:
            named = self._named(term)
            size = math.prod(digit.extent for digit, _ in named)
            if not 0 < size + len(index) <= MOST_FEATURES:
                return UNKNOWN
            images = {digit.origin for digit, role in named if role != _NONE}
            if not images:
                if parts and parts[-1][0] == 1:
                    parts[-1] = (1, parts[-1][1] + size)
                else:
                    parts.append((1, size))
                index += range(len(index), len(index) + size)
                continue
            if len(images) > 1 or any(role == _NONE and digit.extent > 1 for digit, role in named):
                return UNKNOWN
            places = math.prod(digit.extent for digit, role in named if role != _CHANNEL)
            start, own = len(index), _positions(named)
            if 1 in (places, size // places) and own == list(range(size)):
                if parts and parts[-1][0] == 1:
                    parts[-1] = (1, parts[-1][1] + size)
                else:
                    parts.append((1, size))
            else:
                parts.append((places, size // places))
            index += [start + each for each in own]
        return Order(tuple(parts), tuple(index))


def _positions(named: list[tuple[Digit, int]]) -> list[int]:
    """Return the canonical position of each entry of a term: rows, columns, then channels."""
    canonical = sorted(range(len(named)), key=lambda n: (named[n][1], -named[n][0].stride))
    weight, weights = 1, [0] * len(named)
    for number in reversed(canonical):
        weights[number] = weight
        weight *= named[number][0].extent
    found = [0]
    for number, (digit, _) in enumerate(named):
        found = [base + step * weights[number] for base in found for step in range(digit.extent)]
    return found


def _input(flow: Flow, shape: Any) -> Value | None:
    """Return the input of this shape, whose first axis is the batch; None where a length is free."""
    if not isinstance(shape, list) or len(shape) < 2:
        return None
    axes = [axis for axis in shape[1:] if type(axis) is int and 0 < axis <= MOST_FEATURES]
    if len(axes) != len(shape) - 1:
        return None
    return flow._new(axes, image=len(axes) > 2)


def _references(value: Any) -> list[tuple[str, int, int]]:
    """Return the tensors that a node takes: layer, node, place (Keras 2's lists, 3's histories)."""
    found: list[tuple[str, int, int]] = []
    stack = [value]
    while stack and len(found) < _MOST_LAYERS:
        item = stack.pop()
        if isinstance(item, dict):
            history = item.get("keras_history")
            item = history if isinstance(history, list) else list(item.values())
        if not isinstance(item, list):
            continue
        if len(item) > 2 and isinstance(item[0], str) and type(item[1]) is int and type(item[2]) is int:
            found.append((item[0], item[1], item[2]))
        else:
            stack += reversed(item)
    return found


def _sizes(wanted: Any, whole: int) -> tuple[int, ...]:
    if not isinstance(wanted, list) or not all(type(each) is int for each in wanted):
        return ()
    known = math.prod(each for each in wanted if each != -1)
    return tuple(whole // known if each == -1 and known else each for each in wanted)


def _reshaped(x: Value, shape: Sequence[int]) -> Value | None:
    """Return the value in another shape; None where its digits do not divide so."""
    if tuple(shape) == x.shape:
        return x
    if any(len(axis) != 1 for axis in x.axes) or math.prod(shape) != math.prod(x.shape) or not shape:
        return None
    waiting = [digit for axis in x.axes for digit in axis[0] if digit.extent > 1]
    axes: list[Axis] = []
    for extent in shape:
        mine: list[Digit] = []
        left = extent
        while left > 1:
            if not waiting:
                return None
            digit = waiting.pop(0)
            if left % digit.extent == 0:
                mine.append(digit)
                left //= digit.extent
            elif digit.extent % left == 0:
                inner = digit.extent // left
                mine.append(digit._replace(extent=left, stride=digit.stride * inner))
                waiting.insert(0, digit._replace(extent=inner))
                left = 1
            else:
                return None
        axes.append((tuple(mine),))
    return Value(tuple(axes)) if not waiting else None


def _concatenated(values: list[Value], axis: Any) -> Value | None:
    rank = len(values[0].axes)
    if type(axis) is not int or any(len(each.axes) != rank for each in values) or rank == 0:
        return None
    # The batch is the first axis.
    place = axis + rank if axis < 0 else axis - 1
    if not 0 <= place < rank:
        return None
    whole = tuple(term for each in values for term in each.axes[place])
    return Value((*values[0].axes[:place], whole, *values[0].axes[place + 1 :]))


def told(model: Config) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return by layer what a configuration tells of orders, as plain facts (see `order_of`)."""
    flow = Flow()
    try:
        flow.model(model, [], ())
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        shapes = ";".join(",".join(map(str, value.shape)) for value in flow.inputs)
        for name, side, order in flow.orders():
            if side == "makes" and order.is_plain and order != UNKNOWN:
                continue
            form = next((f for f in ("tensorflow", "torch") if order == natural(order.parts, f)), "other")
            if order == UNKNOWN or len(order.parts) > _MOST_PARTS:
                found.setdefault(name, {})[f"{side}_order"] = "other"
                continue
            found.setdefault(name, {})[side] = [each for part in order.parts for each in part]
            if not order.is_plain or form == "other":
                words = {"tensorflow": "channels last", "torch": "channels first"}
                found[name][f"{side}_order"] = words.get(form, form)
        for facts in found.values():
            facts["model_inputs"] = shapes
    except (RecursionError, ValueError, TypeError, ZeroDivisionError, OverflowError):
        return {}
    return found


_MOST_PARTS = 16


def annotated(model: Config) -> Config:
    """Return the configuration with what it tells of orders in the settings of its layers."""
    facts = told(model)
    return _annotated(model, facts, ()) if facts else model


def _annotated(
    model: Config, facts: Mapping[tuple[str, ...], dict[str, Any]], above: tuple[str, ...]
) -> Config:
    layers = model.settings.get("layers")
    if not isinstance(layers, list):
        return model
    made = []
    for each in layers:
        layer = config_of(each)
        name = (*above, layer.name or "")
        if isinstance(each, dict) and layer.cls is not None:
            inner = _annotated(layer, facts, name)
            each = {**each, "config": {**inner.settings, **facts.get(name, {})}}
        made.append(each)
    return Config(model.cls, {**model.settings, "layers": made})


class Calls:
    """The calls of a model's layers as its configuration lists them: a number for each, and what it needs.

    `found` has by layer the number of its first call and, as bits, the calls whose results that takes.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], tuple[int, int]] = {}

    def model(self, config: Config, given: Sequence[int], above: tuple[str, ...]) -> list[int]:
        """Follow a Sequential or functional model; return the calls that each of its outputs needs."""
        layers = config.settings.get("layers")
        if not isinstance(layers, list) or len(self.found) > _MOST_LAYERS:
            raise ValueError
        if config.cls == "Sequential":
            before = given[0] if given else 0
            for each in layers:
                before = self._one(config_of(each), [before], above)[0]
            return [before]
        inputs = [each[0] for each in _references(config.settings.get("input_layers"))]
        started = dict(zip(inputs, given, strict=False))
        values: dict[tuple[str, int, int], int] = {}
        waiting: list[tuple[str, Config, int, list[tuple[str, int, int]]]] = []
        for each in layers:
            layer = config_of(each)
            name = str(each.get("name") or layer.name or "") if isinstance(each, dict) else ""
            if layer.cls == "InputLayer":
                values[name, 0, 0] = started.get(name, 0)
                continue
            nodes = each.get("inbound_nodes") if isinstance(each, dict) else None
            for number, node in enumerate(nodes if isinstance(nodes, list) else []):
                waiting.append((name, layer, number, _references(node)))
        self._nodes(waiting, values, above)
        return [values[ref] for ref in _references(config.settings.get("output_layers"))] or [0]

    def _nodes(
        self,
        waiting: list[tuple[str, Config, int, list[tuple[str, int, int]]]],
        values: dict[tuple[str, int, int], int],
        above: tuple[str, ...],
    ) -> None:
        while waiting:
            later = []
            for name, layer, number, refs in waiting:
                if not all(ref in values for ref in refs):
                    later.append((name, layer, number, refs))
                    continue
                made = self._one(layer, [values[ref] for ref in refs], above)
                for place in range(max(len(made), _MOST_OUTPUTS)):
                    values[name, number, place] = made[min(place, len(made) - 1)]
            if len(later) == len(waiting):
                raise ValueError
            waiting = later

    def _one(self, layer: Config, given: list[int], above: tuple[str, ...]) -> list[int]:
        name = (*above, layer.name or "")
        if layer.cls in ("Sequential", "Functional", "Model"):
            return self.model(layer, given, name)
        before = 0
        for each in given:
            before |= each
        if layer.cls == "InputLayer":
            return [before]
        number, _ = self.found.setdefault(name, (len(self.found), before))
        return [before | 1 << number]


# Of one layer: the states of a stack of cells.
_MOST_OUTPUTS = 16


def with_calls(model: Config) -> Config:
    """Return the configuration with the order of calls in the settings of its layers."""
    calls = Calls()
    try:
        calls.model(model, [], ())
    except (RecursionError, ValueError, TypeError, KeyError):
        return model
    facts: dict[tuple[str, ...], dict[str, Any]] = {
        name: {"call_number": number, "called_after": hex(before)}
        for name, (number, before) in calls.found.items()
    }
    return _annotated(model, facts, ())
