"""What was seen while a model was called once: which layers flatten an image before a dense layer."""

from __future__ import annotations

from typing import Any

_IMAGE, _SEQUENCE, _VECTOR = 4, 3, 2


class Calls:
    """The calls of a model's modules and functions in order: who, the shape it took, the shape it gave."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def note(self, module: Any, given: Any, made: Any) -> None:
        """Note one call; what is no tensor is passed over."""
        taken, gave = _shape(given), _shape(made)
        if taken and gave:
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
        for number, taken, gave in self.seen:
            if len(taken) == _VECTOR:
                if taken[1] == _size(image) and max(image) != taken[1]:
                    if len(image) >= _IMAGE - 1:
                        found.setdefault(number, list(image))
                elif taken[1] in vectors or not image:
                    found.setdefault(number, [])
            if len(gave) >= _SEQUENCE:
                image, vectors = gave[1:], set()
            elif len(gave) == _VECTOR and gave[1] != _size(image):
                vectors.add(gave[1])
        return found


def _size(shape: tuple[int, ...]) -> int:
    count = 1 if shape else 0
    for extent in shape:
        count *= extent
    return count


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return _shape(value[0]) if value else ()
    try:
        return tuple(1 if extent is None else int(extent) for extent in value.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ()  # no tensor, one of unknown rank, or a lazy parameter


def zeros(numpy: Any, shapes: list[list[int]], dtype: str) -> list[Any]:
    """Return one array of zeros for each shape, with a batch of one."""
    return [numpy.zeros((1, *shape), dtype) for shape in shapes]
