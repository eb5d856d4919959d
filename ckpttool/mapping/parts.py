"""Rules on parts of a tensor: one stored tensor that is several, several that are one, blocks reordered.

`Take` cuts, `Into` puts together; `Blocks` reorders the gates of a recurrent cell; `Term` adds what one side
keeps as two. What `Into` and `Term` make is unfinished until every part has come (see mapping.plan.build).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Role, ValueLeaf
from ckpttool.mapping.rules import KEEP, Rule, steps, transformed
from ckpttool.source import Buffer, Inline, Shape, Source, as_array, combined

if TYPE_CHECKING:
    import numpy as np


class Take(NamedTuple):
    """Take the entries `start` to `stop` of an axis of `whole` entries: several tensors are stored as one."""

    axis: int
    start: int
    stop: int
    whole: int

    @property
    def name(self) -> str:
        """Return which entries are taken."""
        return f"take {self.start}:{self.stop} of {self.whole} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and the narrower shape."""
        return dtype, (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the taken part."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the part as a leaf; raise MappingError unless the axis is as long as the rule says."""
        return transformed(_required(self, leaf, self.axis, self.whole), self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that puts the part back where it was."""
        return Into(*self)


class Into(NamedTuple):
    """Become the entries `start` to `stop` of a tensor whose axis has `whole`; others bring the rest."""

    axis: int
    start: int
    stop: int
    whole: int

    @property
    def name(self) -> str:
        """Return which entries the tensor becomes."""
        return f"into {self.start}:{self.stop} of {self.whole} on axis {self.axis}"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the unfinished whole; raise MappingError unless the part is as long as its place."""
        part = _required(self, leaf, self.axis, self.stop - self.start)
        shape = (*part.shape[: self.axis], self.whole, *part.shape[self.axis + 1 :])
        place = (self.start, self.stop, part.source)
        return replace(part, shape=shape, source=Joined(part.dtype, shape, self.axis, (place,)))

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that takes the part out again."""
        return Take(*self)


class Blocks(NamedTuple):
    """Cut an axis into equal blocks and put them in another order: block i of the result is `order[i]`."""

    axis: int
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the order of the blocks."""
        return f"blocks {','.join(map(str, self.order))} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the array with its blocks in the new order."""
        import numpy as np

        if len(self.order) == array.shape[self.axis]:
            return np.take(array, self.order, self.axis)
        blocks = np.split(array, len(self.order), self.axis)
        return np.concatenate([blocks[n] for n in self.order], self.axis)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the reordered leaf; raise MappingError unless the axis divides into that many blocks."""
        if (
            not isinstance(leaf, Leaf)
            or len(leaf.shape) <= self.axis
            or leaf.shape[self.axis] % len(self.order)
        ):
            raise MappingError(f"{self.name} does not fit", found=str(getattr(leaf, "shape", "a value")))
        return transformed(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the blocks' way back."""
        return Blocks(self.axis, tuple(self.order.index(n) for n in range(len(self.order))))


class Channels(NamedTuple):
    """Reorder an axis that holds flattened images, part after part, to channels "first" or "last".

    `parts` are (places, channels) of each image; (1, n) stays as it is.
    """

    axis: int
    to: str
    parts: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Return the parts and where their channels go."""
        spelled = ",".join(f"{places}x{channels}" for places, channels in self.parts)
        return f"channels {self.to} {spelled} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the array with each part in the other order."""
        import numpy as np

        done, start = [], 0
        for places, channels in self.parts:
            stop = start + places * channels
            part = array[(slice(None),) * self.axis + (slice(start, stop),)]
            if places > 1 and channels > 1:
                sizes = (places, channels) if self.to == "first" else (channels, places)
                split = part.reshape((*part.shape[: self.axis], *sizes, *part.shape[self.axis + 1 :]))
                part = split.swapaxes(self.axis, self.axis + 1).reshape(part.shape)
            done.append(part)
            start = stop
        return done[0] if len(done) == 1 else np.concatenate(done, self.axis)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the reordered leaf; raise MappingError unless the parts are as long as the axis."""
        whole = sum(places * channels for places, channels in self.parts)
        return transformed(_required(self, leaf, self.axis, whole), self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the way back to the other order."""
        return self._replace(to="last" if self.to == "first" else "first")


class Term(NamedTuple):
    """Become one of `of` terms whose sum the target is, such as the two biases of a torch cell.

    A sum in floating point does not give its terms back: they are kept with what else the target cannot hold.
    """

    of: int

    @property
    def name(self) -> str:
        """Return of how many terms the sum is made."""
        return f"one of {self.of} terms"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the unfinished sum."""
        if not isinstance(leaf, Leaf):
            raise MappingError("only tensors are added")
        return replace(leaf, source=Summed(leaf.dtype, leaf.shape, self.of, (leaf.source,)))

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Raise MappingError: a sum does not say what it was made of."""
        raise MappingError("a sum alone cannot be undone")


class Joined(NamedTuple):
    """The source of a tensor that several make: each is the entries `start` to `stop` of one axis."""

    dtype: str
    shape: Shape
    axis: int
    parts: tuple[tuple[int, int, Source], ...]

    @property
    def finished(self) -> bool:
        """Say whether the parts cover the axis, each entry once."""
        ends = [0, *(stop for _, stop, _ in self.parts)]
        return [start for start, _, _ in self.parts] == ends[:-1] and ends[-1] == self.shape[self.axis]

    def merged(self, other: object) -> Joined | None:
        """Return the source with the parts of another one of the same tensor, None if it is of none."""
        if not isinstance(other, Joined) or self[:3] != other[:3]:
            return None
        return self._replace(parts=tuple(sorted((*self.parts, *other.parts), key=lambda part: part[:2])))

    def read(self) -> Buffer:
        """Return the whole tensor's bytes; raise MappingError while parts are missing."""
        if not self.finished:
            raise MappingError("the parts of a tensor do not make a whole")
        before = (slice(None),) * self.axis
        parts = (((*before, slice(start, stop)), part) for start, stop, part in self.parts)
        return combined(self.dtype, self.shape, parts)


class Summed(NamedTuple):
    """The source of a tensor that is a sum of `needed` terms."""

    dtype: str
    shape: Shape
    needed: int
    terms: tuple[Source, ...]

    @property
    def finished(self) -> bool:
        """Say whether every term has come."""
        return len(self.terms) == self.needed

    def merged(self, other: object) -> Summed | None:
        """Return the source with the terms of another one of the same tensor, None if it is of none."""
        if not isinstance(other, Summed) or self[:3] != other[:3]:
            return None
        return self._replace(terms=(*self.terms, *other.terms))

    def read(self) -> Buffer:
        """Return the sum's bytes; raise MappingError while terms are missing."""
        import numpy as np

        if not self.finished:
            raise MappingError("the terms of a sum are not all there")
        # The last first: a constant that comes after the terms of a file may undo one of them exactly.
        last = reversed(self.terms)
        first, *others = (as_array(term.read(), self.dtype, self.shape) for term in last)
        total = np.array(first)
        for term in others:
            total += term
        return total.reshape(-1).view(np.uint8).data


Unfinished = Joined | Summed


def unfinished(leaf: Leaf | ValueLeaf) -> Unfinished | None:
    """Return the source of a tensor that others share in making, None for any other leaf."""
    source = leaf.source if isinstance(leaf, Leaf) else None
    return source if isinstance(source, Joined | Summed) else None


def merged(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf) -> Leaf | None:
    """Return the leaf that two unfinished ones make together, None where they are not of one tensor."""
    first, second = unfinished(one), unfinished(other)
    source = first.merged(second) if first is not None else None
    return replace(one, source=source) if source is not None and isinstance(one, Leaf) else None


def is_part(rule: Rule) -> bool:
    """Say whether what the rule makes is unfinished without others."""
    return isinstance((KEEP, *steps(rule))[-1], Into | Term)


def is_cut(rule: Rule) -> bool:
    """Say whether the rule takes a part of a tensor, whose rest goes elsewhere."""
    return any(isinstance(step, Take) for step in steps(rule))


def filled(dtype: str, shape: Shape, value: float, name: str = "", role: Role = "parameter") -> Leaf:
    """Return a tensor of one number: what one framework keeps and the other takes for granted."""
    import numpy as np

    return Leaf(dtype, shape, Inline(np.full(shape, value, dtypes.numpy_dtype(dtype)).tobytes()), name, role)


def taken(start: int, stop: int, whole: int, axis: int = 0) -> Rule:
    """Return the rule that takes these entries of an axis; none if they are all of it."""
    return KEEP if (start, stop) == (0, whole) else Take(axis, start, stop, whole)


def _required(rule: Rule, leaf: Leaf | ValueLeaf, axis: int, length: int) -> Leaf:
    if not isinstance(leaf, Leaf) or len(leaf.shape) <= axis or leaf.shape[axis] != length:
        raise MappingError(f"{rule.name} does not fit", found=str(getattr(leaf, "shape", "a value")))
    return leaf
