"""What was seen while a model was called once: which layers flatten an image before a dense layer."""

from __future__ import annotations

from typing import Any

_IMAGE, _SEQUENCE, _VECTOR = 4, 3, 2


class Calls:
    """The calls of a model's modules and functions in order: who, the shape it took, the shape it gave."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        # Vectors that no longer are an image's numbers, of whatever width, and by number the calls that take
        # one. They are kept: an id is not given twice.
        self._mixed: dict[int, Any] = {}
        self._taking: set[int] = set()

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
    orders = trace.orders()
    if orders:
        return {module: {"orders": each} for module, each in orders.items()}
    return {module: {"flatten": shape} for module, shape in calls.flattened().items()}


def _size(shape: tuple[int, ...]) -> int:
    count = 1 if shape else 0
    for extent in shape:
        count *= extent
    return count


def _mixes(module: Any) -> bool:
    """Say whether a module has a matrix of its own: what it gives is in no order of what it takes."""
    held = getattr(module, "_parameters", None)
    own = list(held.values()) if isinstance(held, dict) else getattr(module, "weights", None) or ()
    return any(len(_shape(each)) > 1 for each in own)


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
