"""Which entry of an activation stands for which place and channel of an image, whoever computes it.

Every entry of every tensor of one call has a number. A convolution gives its outputs' entries a place and a
channel, and what it takes too: a vector that is reshaped for it is an image already. Whatever only moves
entries moves the numbers along. So the order in which a dense layer takes a flattened image, or makes one,
can be compared between models whose frameworks order axes differently.

The syntax is Python 3.7's: the processes of users' models import this module.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple  # noqa: UP035 - as above

MOST_ENTRIES = 1 << 26
# Of one axis.
MOST_FEATURES = 1 << 20
_UNTRACKED = -1
Part = Tuple[int, int]  # noqa: UP006 - as above


class TrackingLimitError(Exception):
    """A call has more entries than are followed."""


class AxisOrder(NamedTuple):
    """What the entries of an axis are, and their order.

    `parts` are (places, channels) of each image in the order in which they come first, (1, n) for numbers
    that are no image's. `positions` gives each entry's canonical position: part after part, each with its
    channels last.
    """

    parts: Tuple[Part, ...]  # noqa: UP006
    positions: Tuple[int, ...]  # noqa: UP006

    @property
    def is_plain(self) -> bool:
        """Whether no part has both places and channels, whose order could differ."""
        return all(1 in part for part in self.parts)

    @property
    def blocks(self) -> Optional[Tuple[Tuple[int, ...], ...]]:  # noqa: UP006, UP045
        """The canonical positions part by part, None unless each part's entries stand together."""
        start, found = 0, []
        for places, channels in self.parts:
            mine = self.positions[start : start + places * channels]
            if sorted(mine) != list(range(start, start + places * channels)):
                return None
            found.append(tuple(position - start for position in mine))
            start += places * channels
        return tuple(found)

    def document(self) -> Dict[str, Any]:  # noqa: UP006
        """Return the order as JSON; an index that is canonical is left out."""
        same = self.positions == tuple(range(len(self.positions)))
        return {"parts": [list(part) for part in self.parts], "index": None if same else list(self.positions)}


# The order of what could not be followed, and that of what holds no image, however long it is.
UNKNOWN = AxisOrder((), ())
NO_IMAGE = AxisOrder(((1, 1),), (0,))


class FeatureOrders(NamedTuple):
    """The orders of the features that a layer takes and makes, None where nothing records one."""

    takes: Optional[AxisOrder] = None  # noqa: UP045
    makes: Optional[AxisOrder] = None  # noqa: UP045


def parse_order(document: Any) -> Optional[AxisOrder]:  # noqa: UP045
    """Return the order of a document; None for what is none."""
    try:
        parts = tuple((int(places), int(channels)) for places, channels in document["parts"])
        count = sum(places * channels for places, channels in parts)
        index = document["index"]
        found = tuple(range(count)) if index is None else tuple(int(each) for each in index)
    except (KeyError, TypeError, ValueError):
        return None
    return AxisOrder(parts, found) if sorted(found) == list(range(count)) else None


def plain_order(count: int) -> AxisOrder:
    """Return the order of numbers that are no image's."""
    return AxisOrder(((1, count),), tuple(range(count)))


def framework_order(parts: Sequence[Part], framework: str) -> AxisOrder:
    """Return the order in which a framework has such parts by itself: PyTorch's has channels first."""
    index = []  # type: List[int]
    start = 0
    for places, channels in parts:
        if framework == "torch":
            index += [
                start + place * channels + channel for channel in range(channels) for place in range(places)
            ]
        else:
            index += range(start, start + places * channels)
        start += places * channels
    return AxisOrder(tuple(parts), tuple(index))


class ActivationTracker:
    """The entries of one call by number: what made them an image's, and what took them as one."""

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy
        self._count = 0
        self._images = 0
        self._made = [numpy.full(1024, -1, "int64") for _ in range(2)]
        self._taken = [numpy.full(1024, -1, "int64") for _ in range(2)]
        self._links = []  # type: List[Tuple[Any, Any]]
        self._weak = []  # type: List[Tuple[Any, int]]

    def plain(self, shape: Sequence[int]) -> Any:
        """Return the numbers of new entries that are no image's yet."""
        size = 1
        for extent in shape:
            size *= extent
        start, self._count = self._count, self._count + size
        if self._count > MOST_ENTRIES:
            raise TrackingLimitError
        while len(self._made[0]) < self._count:
            for held in (self._made, self._taken):
                held[:] = [self.numpy.concatenate((each, self.numpy.full_like(each, -1))) for each in held]
        return self.numpy.arange(start, self._count).reshape(tuple(shape))

    def image(self, shape: Sequence[int], channel: int) -> Any:
        """Return the numbers of new entries of images, one for each entry of the first axis."""
        found = self.plain(shape)
        self._label(self._made, found, channel)
        return found

    def take(self, entries: Any, channel: int) -> None:
        """Note that something takes these entries as images."""
        self._label(self._taken, entries, channel)

    def unless_known(self, entries: Any, channel: int) -> None:
        """Note that inputs or outputs of a model are images if nothing else says what they are."""
        self._weak.append((entries, channel))

    def link(self, one: Any, other: Any) -> None:
        """Note that two tensors of one shape are added, multiplied or the like: their orders are one."""
        if one.shape == other.shape:
            self._links.append((one, other))

    @staticmethod
    def untracked(like: Any) -> Any:
        """Return what stands for entries that cannot be followed."""
        return like * 0 + _UNTRACKED

    def _label(self, held: List[Any], entries: Any, channel: int) -> None:  # noqa: UP006
        np = self.numpy
        moved = np.moveaxis(entries, channel, -1)
        moved = moved.reshape(len(moved), -1)
        label = np.arange(self._images, self._images + len(moved))[:, None] + np.zeros_like(moved)
        self._images += len(moved)
        # Where the channels are many as places go, only both tell an image.
        channels = entries.shape[channel]
        place = np.zeros_like(moved) + np.arange(moved.shape[1]) + channels * (1 << 32)
        numbers, labels, places = moved.ravel(), label.ravel(), place.ravel()
        free = numbers >= 0
        free[free] = held[0][numbers[free]] == -1
        held[0][numbers[free]] = labels[free]
        held[1][numbers[free]] = places[free]

    def finish(self) -> None:
        """Carry what is known of entries to those that are joined with them."""
        np = self.numpy
        for _ in range(4):
            for one, other in self._links:
                for a, b in ((one.ravel(), other.ravel()), (other.ravel(), one.ravel())):
                    both = (a >= 0) & (b >= 0)
                    a, b = a[both], b[both]
                    known = np.where(self._made[0][a] >= 0, self._made[0][a], self._taken[0][a])
                    place = np.where(self._made[0][a] >= 0, self._made[1][a], self._taken[1][a])
                    free = (self._made[0][b] < 0) & (self._taken[0][b] < 0) & (known >= 0)
                    self._taken[0][b[free]] = known[free]
                    self._taken[1][b[free]] = place[free]
        for entries, channel in self._weak:
            numbers = entries.ravel()
            numbers = numbers[numbers >= 0]
            if (self._made[0][numbers] < 0).all() and (self._taken[0][numbers] < 0).all():
                self.take(entries, channel)

    def order(self, entries: Any) -> Optional[AxisOrder]:  # noqa: UP045
        """Return the order of an axis's entries after `finish`; None where they cannot be followed."""
        np = self.numpy
        if not len(entries) or (entries < 0).any():
            return None
        made, taken = ([each[entries] for each in held] for held in (self._made, self._taken))
        found = None
        for first, second in ((made, taken), (taken, made)):
            known = first[0] >= 0
            label = np.where(known, first[0], second[0])
            found = _image_order(np, label, np.where(known, first[1], second[1]))
            if found is None or not found.is_plain:
                break
        return found


def _image_order(np: Any, label: Any, place: Any) -> Optional[AxisOrder]:  # noqa: UP045
    """Return the order of entries by the image that each belongs to, -1 for none, and its place there."""
    count = len(label)
    parts = []  # type: List[Part]
    index = np.zeros(count, "int64")
    start = 0
    # A run of numbers that are no image's is one part; so are an image's numbers wherever they stand.
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
            channels = int(place[at] >> 32)
            inner = place[mine] & 0xFFFFFFFF
            own = np.unique(inner)
            if len(own) < len(mine):
                return None  # an entry of the image twice
            wide = len(np.unique(inner % channels))
            if len(mine) % wide:
                return None
            parts.append((len(mine) // wide, wide))
            index[mine] = start + np.searchsorted(own, inner)
        start += len(mine)
    return _merge_plain_parts(parts, index)


def _merge_plain_parts(parts: List[Part], index: Any) -> AxisOrder:  # noqa: UP006
    """Return the order with neighbouring parts that are no image's as one."""
    found = []  # type: List[Part]
    start = 0
    for part in parts:
        size = part[0] * part[1]
        trivial = 1 in part and list(index[start : start + size]) == list(range(start, start + size))
        if trivial and found and found[-1][0] == 0:
            found[-1] = (0, found[-1][1] + size)
        else:
            found.append((0, size) if trivial else part)
        start += size
    return AxisOrder(
        tuple((1, n) if places == 0 else (places, n) for places, n in found), tuple(map(int, index))
    )
