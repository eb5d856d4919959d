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
