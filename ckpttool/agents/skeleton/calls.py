"""What was seen while a model was called once: which layers flatten an image before a dense layer."""

from __future__ import annotations

from typing import Any

_IMAGE, _SEQUENCE, _VECTOR = 4, 3, 2
_MOST_FOLLOWED = 2_000


class Calls:
    """The calls of a model's modules and functions in order: who, the shape it took, the shape it gave."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        # Vectors that no longer are an image's numbers, of whatever width, and by number the calls that take
        # one. They are kept: an id is not given twice.
        self._mixed: dict[int, Any] = {}
        self._taking: set[int] = set()
        # Modules with tensors in the order of their first calls, and as bits those that came before each
        # one and before each tensor, which is kept.
        self._order: dict[int, int] = {}
        self._before: list[int] = []
        self._flow: dict[int, tuple[Any, int]] = {}

    def flow(self, module: Any, given: Any, made: Any) -> None:
        """Note which modules have a part in what a module or function (None) makes of what it is given."""
        before = 0
        for tensor in _tensors(given):
            before |= self._flow.get(id(tensor), (None, 0))[1]
        if module is not None and _own(module):
            if id(module) not in self._order and len(self._order) < _MOST_FOLLOWED:
                self._order[id(module)] = len(self._order)
                self._before.append(before)
            if id(module) in self._order:
                before |= 1 << self._order[id(module)]
        for tensor in _tensors(made):
            self._flow[id(tensor)] = tensor, before | self._flow.get(id(tensor), (None, 0))[1]

    def order(self) -> dict[int, dict[str, Any]]:
        """Return by module the number of its first call, and as hexadecimal bits the calls that it needs."""
        if len(self._order) == _MOST_FOLLOWED:
            return {}
        return {
            module: {"call": number, "after": hex(self._before[number])}
            for module, number in self._order.items()
        }

    def note(self, module: Any, given: Any, made: Any) -> None:
        """Note one call; what is no tensor is passed over."""
        taken, gave = _shape(given), _shape(made)
        if not (taken and gave):
            return
        known = id(_first(given)) in self._mixed
        if known:
            self._taking.add(len(self.seen))
        if len(taken) == len(gave) == _VECTOR and (known or _mixes(module)):
            self._mixed[id(_first(made))] = _first(made)
        self.seen.append((id(module), taken, gave))

    def flattened(self) -> dict[int, list[int]]:
        """Return by module the shape, without its batch, of the image that the module takes as one axis.

        That is the last image before it if it has as many elements and more than one place; no shape says
        that the module takes a vector that something else gave. Of others nothing is known: where a sequence
        is flattened, its channels may stand first or last.
        """
        found: dict[int, list[int]] = {}
        image: tuple[int, ...] = ()
        vectors: set[int] = set()
        for count, (number, taken, gave) in enumerate(self.seen):
            if len(taken) == _VECTOR:
                if count in self._taking:
                    found.setdefault(number, [])
                elif taken[1] == _size(image) and max(image) != taken[1]:
                    if len(image) >= _IMAGE - 1:
                        found.setdefault(number, list(image))
                elif taken[1] in vectors or not image:
                    found.setdefault(number, [])
            if len(gave) >= _SEQUENCE:
                image, vectors = gave[1:], set()
            elif len(gave) == _VECTOR and gave[1] != _size(image):
                vectors.add(gave[1])
        return found


class Probes:
    """Modules of a program's own classes, called once more by themselves to see what they compute.

    No class tells whether such a module multiplies x @ W or W @ x, or whether its two vectors are a norm's:
    its results for numbers of our own do.
    """

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, Any]] = {}

    def note(self, module: Any, given: Any) -> None:
        """Note a module and the one tensor that it takes; what takes several is not called again."""
        tensors = list(_tensors(given))
        if len(tensors) == 1 and len(_shape(tensors[0])) > 1 and len(self._given) < _MOST_PROBED:
            self._given.setdefault(id(module), (module, tensors[0]))

    def found(self, tensors: Any, compute: Any) -> dict[int, dict[str, Any]]:
        """Return by module what it computes: `tensors(module)` by name, `compute(module, array, like)`."""
        found = {}
        for number, (module, like) in self._given.items():
            try:
                computes = computed(tensors(module), _shape(like), lambda x: compute(module, x, like))  # noqa: B023
            except Exception:  # noqa: BLE001, S112 - a module that takes no other numbers
                continue
            found[number] = {"computes": computes}
        return found


_MOST_PROBED = 500
_MOST_PROBED_ENTRIES = 1 << 24
_CLOSE = 1e-3
_SMALL_INPUT = 3e-3
_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


def computed(tensors: dict[str, Any], shape: tuple[int, ...], compute: Any) -> dict[str, Any]:
    """Return what a module computes from its tensors: its `kind`, the `form` of its matrix, its `epsilon`.

    Without a `kind` it is none of the layers that are compared.
    """
    import numpy as np

    held = {name: np.asarray(each, "float64") for name, each in tensors.items()}
    ranks = sorted(each.ndim for each in held.values())
    if ranks not in ([2], [1, 2], [1], [1, 1]) or _size(shape) > _MOST_PROBED_ENTRIES:
        raise ValueError("no layer that is compared")
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    vectors = [name for name, each in held.items() if each.ndim == 1]
    if 2 in ranks:
        (matrix,) = (each for each in held.values() if each.ndim == 2)
        return _as_matrix(np, x, matrix, [held[name] for name in vectors], compute)
    scale = next((name for name in vectors if name in ("weight", "gamma", "scale", "g", "a_2")), "")
    offset = next((held[name] for name in vectors if name != scale), None)
    if not scale or (offset is None and len(vectors) > 1):
        raise ValueError("no scale")
    return _as_norm(np, x * np.float32(_SMALL_INPUT), held[scale], offset, compute)


def _as_matrix(np: Any, x: Any, matrix: Any, biases: list[Any], compute: Any) -> dict[str, Any]:
    made = np.asarray(compute(x), "float64")
    fitting = []
    for form, each in (("out_in", matrix.T), ("in_out", matrix)):
        if x.shape[-1] != each.shape[0] or made.shape != (*x.shape[:-1], each.shape[1]):
            continue
        if biases and biases[0].shape[0] != each.shape[1]:
            continue
        linear = x.astype("float64") @ each + (biases[0] if biases else 0.0)
        if any(_is_close(np, made, activated) for activated in _activated(np, linear)):
            fitting.append(form)
    return {"kind": "dense", "form": fitting[0]} if len(fitting) == 1 else {}


def _activated(np: Any, x: Any) -> Any:
    """Go through the results of the usual activations."""
    sigmoid = 1 / (1 + np.exp(-x))
    yield from (x, np.maximum(x, 0), np.tanh(x), sigmoid, x * sigmoid, np.exp(x), np.log1p(np.exp(x)))
    yield np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)
    yield from (np.where(x > 0, x, slope * x) for slope in (0.01, 0.1, 0.2, 0.3))
    yield 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _as_norm(np: Any, x: Any, scale: Any, offset: Any, compute: Any) -> dict[str, Any]:
    made = np.asarray(compute(x), "float64")
    x = x.astype("float64")
    best: tuple[float, dict[str, Any]] = (_CLOSE, {})
    for axis in (x.ndim - 1, 1):
        if made.shape != x.shape or x.shape[axis] != scale.shape[0]:
            continue
        along = [1] * x.ndim
        along[axis] = -1
        for kind, centred in (("layer_norm", x - x.mean(axis, keepdims=True)), ("rms_norm", x)):
            square = (centred**2).mean(axis, keepdims=True)
            for epsilon in _EPSILONS:
                normed = centred / np.sqrt(square + epsilon) * scale.reshape(along)
                normed = normed if offset is None else normed + offset.reshape(along)
                error = float(np.abs(made - normed).max() / (np.abs(normed).max() + 1e-30))
                if error < best[0]:
                    best = error, {"kind": kind, "epsilon": epsilon}
    return best[1]


def _is_close(np: Any, one: Any, other: Any) -> bool:
    return bool(np.abs(one - other).max() <= _CLOSE * (np.abs(other).max() + 1e-30))


def known(calls: Calls, trace: Any) -> dict[int, dict[str, Any]]:
    """Return by module what a call tells: `orders` of what it takes and makes, or, untraced, `flatten`."""
    found = calls.order()
    orders = trace.orders()
    key = "orders" if orders else "flatten"
    for module, each in (orders or calls.flattened()).items():
        found.setdefault(module, {})[key] = each
    return found


def _size(shape: tuple[int, ...]) -> int:
    count = 1 if shape else 0
    for extent in shape:
        count *= extent
    return count


def _mixes(module: Any) -> bool:
    """Say whether a module has a matrix of its own: what it gives is in no order of what it takes."""
    return any(len(_shape(each)) > 1 for each in _own(module))


def _own(module: Any) -> list[Any]:
    """Return a module's own tensors: parameters of torch's, all weights of a layer of Keras."""
    held = getattr(module, "_parameters", None)
    return list(held.values()) if isinstance(held, dict) else list(getattr(module, "weights", None) or ())


def _tensors(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif _shape(value):
        yield value


def _first(value: Any) -> Any:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value


def _shape(value: Any) -> tuple[int, ...]:
    value = _first(value)
    try:
        return tuple(1 if extent is None else int(extent) for extent in value.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ()  # no tensor, one of unknown rank, or a lazy parameter


def zeros(numpy: Any, shapes: list[list[int]], dtype: str) -> list[Any]:
    """Return one array of zeros for each shape, with a batch of one."""
    return [numpy.zeros((1, *shape), dtype) for shape in shapes]
