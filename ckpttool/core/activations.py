"""Track how image entries (places and channels) map to vector entries, independent of framework.

Every entry of every tensor in one call has a number. A convolution gives its input and output
entries a place and a channel: a vector that is reshaped for a convolution is already an image.
Operations that only move entries move the numbers along. So the order in which a dense layer
receives or returns a flattened image can be compared between models whose frameworks order axes
differently.

The syntax is Python 3.7's, because the processes of users' models import this module.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple  # noqa: UP035 - as above

from ckpttool.core.deferred import NamedTuple

MOST_ENTRIES = 1 << 26
_UNTRACKED = -1
Part = Tuple[int, int]  # noqa: UP006 - as above


class TrackingLimitError(Exception):
    """A call has more entries than the tracker follows."""


class AxisOrder(NamedTuple):
    """Meaning and order of the entries of an axis.

    `parts` are (places, channels) of each image in order of first appearance, (1, n) for entries
    that belong to no image. `positions` gives each entry's canonical position: part after part,
    channels last.
    """

    parts: Tuple[Part, ...]  # noqa: UP006
    positions: Tuple[int, ...]  # noqa: UP006

    @property
    def is_plain(self) -> bool:
        """Return whether any part has both places and channels, whose order could differ."""
        return all(1 in part for part in self.parts)

    @property
    def blocks(self) -> Optional[Tuple[Tuple[int, ...], ...]]:  # noqa: UP006, UP045
        """Return the canonical positions part by part, or None unless each part is contiguous."""
        if len(self.parts) == 1 and len(self.positions) == self.parts[0][0] * self.parts[0][1]:
            return (self.positions,)  # all of it
        start, blocks = 0, []
        for places, channels in self.parts:
            mine = self.positions[start : start + places * channels]
            if sorted(mine) != list(range(start, start + places * channels)):
                return None
            blocks.append(tuple(position - start for position in mine))
            start += places * channels
        return tuple(blocks)

    def document(self) -> Dict[str, Any]:  # noqa: UP006
        """Return the order as JSON, without an index that is canonical."""
        same = self.positions == tuple(range(len(self.positions)))
        return {"parts": [list(part) for part in self.parts], "index": None if same else list(self.positions)}


# The orders of untracked entries and of axes without images, of any length.
UNKNOWN = AxisOrder((), ())
NO_IMAGE = AxisOrder(((1, 1),), (0,))


class CallPlace(NamedTuple):
    """The first call of a layer among the calls of its model: its number, -1 where nothing records it.

    `after` is a bit set of the calls whose results are its inputs, `leads` one of the model's outputs
    that depend on its result.
    """

    number: int = -1
    after: int = 0
    leads: int = 0


NO_CALL = CallPlace()


class FeaturePart(NamedTuple):
    """Features that come from one of several results that a layer's input joins: their number and origin.

    `origin` is "call" with the number of a layer's call, "input" with that of a model input, MIXED where
    the entries are not one after the other as in their result or several calls of the layer join other
    results, or "" where the result is not followed.
    While a graph is read, `number` may be the path of the layer's weight.
    """

    size: int
    origin: str = ""
    number: Any = -1


Parts = Tuple[FeaturePart, ...]  # noqa: UP006
MIXED = "mixed"


def common_parts(calls: Sequence[Parts]) -> Parts:
    """Return the parts of a layer's input in all calls: those of most parts, MIXED if others differ."""
    most = max(calls, key=len) if calls else ()  # type: Parts
    return most if len({*calls}) < 2 else tuple(FeaturePart(part.size, MIXED) for part in most)


class WeightUse(NamedTuple):
    """What a computation does with a weight: the order of the features that its layer takes and makes.

    An order is None where nothing records it. `role` is that in a product: "in_out" and "out_in" are
    matrices by their axes, "added" is a bias; or the norm that its module computes. `settings` are those
    of its layer, by their names in Keras. `parts` are those of the features that the layer takes.
    """

    takes: Optional[AxisOrder] = None  # noqa: UP045
    makes: Optional[AxisOrder] = None  # noqa: UP045
    call: CallPlace = NO_CALL
    role: str = ""
    settings: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045
    parts: Parts = ()


def parse_order(document: Any) -> Optional[AxisOrder]:  # noqa: UP045
    """Return the order in a JSON document, or None if the document is not an order."""
    try:
        parts = tuple((int(places), int(channels)) for places, channels in document["parts"])
        count = sum(places * channels for places, channels in parts)
        index = document["index"]
        order = tuple(range(count)) if index is None else tuple(int(item) for item in index)
    except (KeyError, TypeError, ValueError):
        return None
    return AxisOrder(parts, order) if sorted(order) == list(range(count)) else None


def plain_order(count: int) -> AxisOrder:
    """Return the order of entries that belong to no image."""
    return AxisOrder(((1, count),), tuple(range(count)))


def framework_order(parts: Sequence[Part], framework: str) -> AxisOrder:
    """Return a framework's default order for such parts: channels first in PyTorch."""
    index = []  # type: List[int]
    start = 0
    for places, channels in parts:
        if framework == "torch":
            index += [
                start + index * channels + channel for channel in range(channels) for index in range(places)
            ]
        else:
            index += range(start, start + places * channels)
        start += places * channels
    return AxisOrder(tuple(parts), tuple(index))


class ActivationTracker:
    """The numbered entries of one call, with the operations that mark them as image entries."""

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy
        self._count = 0
        self._images = 0
        self._by_output = [numpy.full(0, -1, "int64") for _ in range(2)]
        self._used = [numpy.full(0, -1, "int64") for _ in range(2)]
        self._links = []  # type: List[Tuple[Any, Any]]
        self._weak = []  # type: List[Tuple[Any, int]]
        self._starts = []  # type: List[int]
        self._cuts = []  # type: List[Tuple[int, int, Any]]

    def plain(self, shape: Sequence[int]) -> Any:
        """Return the numbers of new entries that belong to no image yet."""
        size = 1
        for extent in shape:
            size *= extent
        start, self._count = self._count, self._count + size
        self._starts.append(start)
        if self._count > MOST_ENTRIES:
            raise TrackingLimitError
        return self.numpy.arange(start, self._count).reshape(tuple(shape))

    def image(self, shape: Sequence[int], channel: int) -> Any:
        """Return the numbers of new image entries, one for each entry of the first axis."""
        numbers = self.plain(shape)
        self._label(self._by_output, numbers, channel)
        return numbers

    def take(self, entries: Any, channel: int) -> None:
        """Record that an operation uses these entries as images."""
        self._label(self._used, entries, channel)

    def unless_known(self, entries: Any, channel: int) -> None:
        """Record that inputs or outputs of a model are images unless another operation defines them."""
        self._weak.append((entries, channel))

    def link(self, one: Any, other: Any) -> None:
        """Record that two tensors of one shape are combined element by element, so they share one order."""
        if one.shape == other.shape:
            self._links.append((one, other))

    def results(self, row: Any) -> Tuple[Tuple[int, int], ...]:  # noqa: UP006
        """Return the results whose entries a row has, by number, with their counts, first come first.

        The number is -1 where a row has the entries of a result more than once, in another order, or
        between those of others.
        """
        np = self.numpy
        if not len(row) or (row < 0).any():
            return ()
        numbers = np.searchsorted(self._starts, row, side="right") - 1
        images, first, counts = np.unique(numbers, return_index=True, return_counts=True)
        last = len(row) - np.unique(numbers[::-1], return_index=True)[1]
        mixed = [
            bool(last[at] - first[at] > counts[at] or (np.diff(row[numbers == image]) <= 0).any())
            for at, image in enumerate(images)
        ]
        whole = tuple((-1 if mixed[at] else int(images[at]), int(counts[at])) for at in np.argsort(first))  # type: Tuple[Tuple[int, int], ...]
        return (*whole, (-1, 0)) if any(mixed) and len(whole) == 1 else whole

    def cut(self, entries: Any) -> None:
        """Record that an operation takes these entries out of a result."""
        if entries.size:
            self._cuts.append((int(entries.min()), int(entries.max()), entries))

    def is_cut(self, row: Any) -> bool:
        """Return whether an operation takes some entries of a row, and not all, out of their result."""
        np = self.numpy
        first, last = int(row.min()), int(row.max())
        for least, most, entries in self._cuts:
            if least <= last and most >= first:
                among = np.isin(row, entries)
                if among.any() and not among.all():
                    return True
        return False

    @staticmethod
    def untracked(like: Any) -> Any:
        """Return the placeholder for entries that cannot be followed."""
        return like * 0 + _UNTRACKED

    def _know_all(self) -> None:
        """Have a row of facts for each entry, with a power of two of rows: most calls have no images."""
        short = self._count - len(self._by_output[0])
        if short > 0:
            short = (1 << self._count.bit_length()) - len(self._by_output[0])
            empty = self.numpy.full(short, -1, "int64")
            for pair in (self._by_output, self._used):
                pair[:] = [self.numpy.concatenate((array, empty)) for array in pair]

    def _label(self, pair: List[Any], entries: Any, channel: int) -> None:  # noqa: UP006
        np = self.numpy
        self._know_all()
        moved = np.moveaxis(entries, channel, -1)
        moved = moved.reshape(len(moved), -1)
        label = np.arange(self._images, self._images + len(moved))[:, None] + np.zeros_like(moved)
        self._images += len(moved)
        # If there are as many channels as places, only both together identify an image.
        channels = entries.shape[channel]
        positions = np.zeros_like(moved) + np.arange(moved.shape[1]) + channels * (1 << 32)
        numbers, labels, places = moved.ravel(), label.ravel(), positions.ravel()
        free = numbers >= 0
        free[free] = pair[0][numbers[free]] == -1
        pair[0][numbers[free]] = labels[free]
        pair[1][numbers[free]] = places[free]

    def finish(self) -> None:
        """Propagate facts about entries to the entries that are joined with them."""
        np = self.numpy
        if self._images or self._weak:
            self._know_all()
        for _ in range(4 if self._images else 0):
            for one, other in self._links:
                for a, b in ((one.ravel(), other.ravel()), (other.ravel(), one.ravel())):
                    both = (a >= 0) & (b >= 0)
                    a, b = a[both], b[both]
                    known = np.where(self._by_output[0][a] >= 0, self._by_output[0][a], self._used[0][a])
                    positions = np.where(self._by_output[0][a] >= 0, self._by_output[1][a], self._used[1][a])
                    free = (self._by_output[0][b] < 0) & (self._used[0][b] < 0) & (known >= 0)
                    self._used[0][b[free]] = known[free]
                    self._used[1][b[free]] = positions[free]
        for entries, channel in self._weak:
            numbers = entries.ravel()
            numbers = numbers[numbers >= 0]
            if (self._by_output[0][numbers] < 0).all() and (self._used[0][numbers] < 0).all():
                self.take(entries, channel)

    def order(self, entries: Any) -> Optional[AxisOrder]:  # noqa: UP045
        """Return the order of an axis's entries after `finish`, or None where they cannot be followed."""
        np = self.numpy
        if not len(entries) or (entries < 0).any():
            return None
        if not self._images:
            return plain_order(len(entries))
        self._know_all()
        image_pair, plain_pair = (
            [array[entries] for array in pair] for pair in (self._by_output, self._used)
        )
        order = None
        for first, second in ((image_pair, plain_pair), (plain_pair, image_pair)):
            known = first[0] >= 0
            label = np.where(known, first[0], second[0])
            order = _image_order(np, label, np.where(known, first[1], second[1]))
            if order is None or not order.is_plain:
                break
        return order


def _image_order(np: Any, label: Any, positions: Any) -> Optional[AxisOrder]:  # noqa: UP045
    """Return the order of entries by their image (-1 for none), and each entry's place in it."""
    count = len(label)
    parts = []  # type: List[Part]
    index = np.zeros(count, "int64")
    start = 0
    # Entries without an image form one part; so do an image's entries, wherever they are.
    run = np.zeros(count, "int64")
    run[1:] = np.cumsum((label[1:] < 0) & (label[:-1] >= 0))
    keys = np.where(label >= 0, label, -1 - run)
    _, first = np.unique(keys, return_index=True)
    for at in sorted(first):
        mine = np.flatnonzero(keys == keys[at])
        if label[at] < 0:
            parts.append((1, len(mine)))
            index[mine] = start + np.arange(len(mine))
        else:
            channels = int(positions[at] >> 32)
            inner = positions[mine] & 0xFFFFFFFF
            own = np.unique(inner)
            if len(own) < len(mine):
                return None  # an image entry occurs twice
            wide = len(np.unique(inner % channels))
            if len(mine) % wide:
                return None
            parts.append((len(mine) // wide, wide))
            index[mine] = start + np.searchsorted(own, inner)
        start += len(mine)
    return _merge_plain_parts(parts, index)


def _merge_plain_parts(parts: List[Part], index: Any) -> AxisOrder:  # noqa: UP006
    """Return the order with adjacent non-image parts merged."""
    merged = []  # type: List[Part]
    start = 0
    for part in parts:
        size = part[0] * part[1]
        trivial = 1 in part and list(index[start : start + size]) == list(range(start, start + size))
        if trivial and merged and merged[-1][0] == 0:
            merged[-1] = (0, merged[-1][1] + size)
        else:
            merged.append((0, size) if trivial else part)
        start += size
    return AxisOrder(
        tuple((1, n) if places == 0 else (places, n) for places, n in merged), tuple(map(int, index))
    )
