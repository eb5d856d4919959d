"""Small reads of files elsewhere, gathered into blocks: a header or an index costs few requests.

A read that goes on where the last one ended fetches ever more ahead; any other fetches no more than its own
blocks, so that a look at many places of a large file moves little.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from ckpttool.places import Seen

BLOCK = 16 << 10
# What a file's beginning is asked for: most headers and indexes.
HEAD = 64 << 10
_LARGE = 1 << 20
_AHEAD = (4 << 20) // BLOCK
_KEPT = (32 << 20) // BLOCK

Fetch = Callable[[str, Seen, int, int], bytes]


class Blocks:
    """The blocks that were read last, of all files of a store."""

    def __init__(self, fetch: Fetch) -> None:
        """Get bytes that are not here by `fetch(place, seen, offset, length)`."""
        self._fetch = fetch
        self._kept: OrderedDict[tuple[str, Seen, int], bytes] = OrderedDict()
        self._ahead: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def read(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return the bytes; large reads are fetched as they are and not kept."""
        if length > _LARGE:
            return self._fetch(place, seen, offset, length)
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        found = [self._block(place, seen, number) for number in range(first, last + 1)]
        if None in found:
            start = first + found.index(None)
            data = self._fetched(place, seen, start, last + 1)
            found[start - first :] = [data]
        joined = b"".join(block for block in found if block is not None)
        return joined[offset - first * BLOCK :][:length]

    def keep(self, place: str, seen: Seen, offset: int, data: bytes) -> None:
        """Keep bytes from the beginning of a block on; what is no whole block is dropped, but at the end."""
        with self._lock:
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                if len(block) == BLOCK or offset + at + len(block) == seen.size:
                    self._kept[place, seen, (offset + at) // BLOCK] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _block(self, place: str, seen: Seen, number: int) -> bytes | None:
        with self._lock:
            found = self._kept.get((place, seen, number))
            if found is not None:
                self._kept.move_to_end((place, seen, number))
            return found

    def _fetched(self, place: str, seen: Seen, start: int, stop: int) -> bytes:
        with self._lock:
            following, ahead = self._ahead.get(place, (-1, 0))
            ahead = min(2 * max(ahead, stop - start), _AHEAD) if start == following else 0
            stop = min(max(stop, start + ahead), -(-seen.size // BLOCK))
            self._ahead[place] = (stop, ahead)
        at = start * BLOCK
        data = self._fetch(place, seen, at, min(stop * BLOCK, seen.size) - at)
        self.keep(place, seen, at, data)
        return data
