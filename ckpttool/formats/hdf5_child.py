"""Child process that lists an HDF5 file.

The HDF5 library crashes and hangs on damaged files, so nothing else runs here. For digests, it also reads
chunked datasets.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.core import atomic_write, filesystem, limits, sandbox
from ckpttool.formats.hdf5_listing import (
    NAME_ATTRIBUTES,
    TEXT_ATTRIBUTES,
    Hdf5DatasetRecord,
    Hdf5GroupRecord,
    Hdf5Listing,
)

_SLAB = 16 << 20


def decode_name(raw: bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 are escaped."""
    return raw.decode("utf-8", "backslashreplace")


def plain_attribute(value: Any) -> Any:
    """Return an attribute as JSON: a string, a list of strings, or None for what Keras does not write."""
    if isinstance(value, bytes):
        return decode_name(value)
    if isinstance(value, str):
        # h5py represents bytes that are not UTF-8 as surrogates.
        return decode_name(value.encode("utf-8", "surrogateescape"))
    if hasattr(value, "tolist"):
        items = value.tolist()
        if isinstance(items, bytes | str):
            return plain_attribute(items)
        if isinstance(items, list) and all(isinstance(item, bytes | str) for item in items):
            return [plain_attribute(item) for item in items]
    return None


def is_utf8(value: Any) -> bool:
    """Return whether all strings of an attribute are UTF-8."""
    items = value.tolist() if hasattr(value, "tolist") else value
    try:
        for item in items if isinstance(items, list) else [items]:
            _ = item.decode() if isinstance(item, bytes) else item.encode() if isinstance(item, str) else None
    except UnicodeError:
        return False
    return True


# The supported floats: bytes, sign bit, start and bits of the exponent, bits of the mantissa, bias.
_FLOATS = {
    (2, 15, 10, 5, 10, 15): "float16",
    (2, 15, 7, 8, 7, 127): "bfloat16",
    (4, 31, 23, 8, 23, 127): "float32",
    (8, 63, 52, 11, 52, 1023): "float64",
}


def type_name(h5py: Any, dataset: Any) -> tuple[str, bool] | None:
    """Return ckpttool's name of the dataset's type and whether it is big-endian, or None.

    Every type property that affects the value of a number is compared. Padding is not: no element of
    these types has bits outside its number.
    """
    kind, h5t = dataset.get_type(), h5py.h5t
    group, size = kind.get_class(), kind.get_size()
    if group == h5t.FLOAT:
        return _float(h5t, kind)
    if group == h5t.INTEGER:
        return _integer(h5t, kind)
    if group == h5t.ENUM and size == 1 and kind.get_nmembers() == 2:
        names = {bytes(kind.get_member_name(n)): kind.get_member_value(n) for n in range(2)}
        # bool as h5py stores it.
        is_bool = names == {b"FALSE": 0, b"TRUE": 1} and _integer(h5t, kind.get_super()) == ("int8", False)
        return ("bool", False) if is_bool else None
    if group == h5t.COMPOUND:
        return _complex(h5t, kind)
    if group == h5t.STRING:
        return "string", False
    if group == h5t.OPAQUE and size == 2 and h5py.h5a.exists(dataset, b"dtype"):
        # Keras 3 stores bfloat16 as two opaque bytes and marks it (keras/src/saving/saving_lib.py,
        # H5IOStore).
        named = plain_attribute(h5py.Dataset(dataset).attrs["dtype"])
        return ("bfloat16", False) if named == "bfloat16" else None
    return None


def _integer(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    size, order = kind.get_size(), kind.get_order()
    whole = kind.get_precision() == 8 * size and kind.get_offset() == 0
    if size not in (1, 2, 4, 8) or not whole or order not in (h5t.ORDER_LE, h5t.ORDER_BE):
        return None
    sign = "" if kind.get_sign() == h5t.SGN_2 else "u"
    return f"{sign}int{8 * size}", order == h5t.ORDER_BE and size > 1


def _float(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    sign, at, bits, low, mantissa = kind.get_fields()
    size, order = kind.get_size(), kind.get_order()
    name = _FLOATS.get((size, sign, at, bits, mantissa, kind.get_ebias()))
    whole = kind.get_precision() == 8 * size and kind.get_offset() == 0
    if name is None or low or not whole or kind.get_norm() != h5t.NORM_IMPLIED:
        return None
    return (name, order == h5t.ORDER_BE) if order in (h5t.ORDER_LE, h5t.ORDER_BE) else None


def _complex(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    if kind.get_nmembers() != 2 or [kind.get_member_name(n) for n in range(2)] != [b"r", b"i"]:
        return None
    parts = [kind.get_member_type(n) for n in range(2)]
    half = kind.get_size() // 2
    if (
        any(part.get_class() != h5t.FLOAT or part.get_size() != half for part in parts)
        or [kind.get_member_offset(n) for n in range(2)] != [0, half]
        or kind.get_size() % 2
    ):
        return None
    names = {_float(h5t, part) for part in parts}
    name = names.pop() if len(names) == 1 else None
    known = {"float32": "complex64", "float64": "complex128"}
    return (known[name[0]], name[1]) if name is not None and name[0] in known else None


def unreadable_reason(h5py: Any, dataset: Any) -> str | None:
    """Return why a dataset of numbers with an unsupported type cannot be read.

    Other unsupported types (tables, lists, references) contain no tensor.
    """
    h5t, kind = h5py.h5t, dataset.get_type()
    names = {
        h5t.INTEGER: "an integer",
        h5t.FLOAT: "a float",
        h5t.BITFIELD: "a bit field",
        h5t.TIME: "a time",
        h5t.OPAQUE: "an opaque type",
        h5t.ENUM: "an enumeration",
    }
    name = names.get(kind.get_class())
    if kind.get_class() == h5t.COMPOUND:
        members = [kind.get_member_name(n) for n in range(kind.get_nmembers())]
        name = "a complex number" if sorted(members) == [b"i", b"r"] else None
    return f"{name} of {8 * kind.get_size()} bits in an unsupported representation" if name else None


def describe_type(dataset: Any) -> str:
    """Return an unsupported type in h5py's spelling."""
    with contextlib.suppress(TypeError, ValueError, OSError):
        return str(dataset.dtype)[:80]
    return "unknown"


def read_elements(h5py: Any, dataset: Any) -> bytes:
    """Return the elements of a dataset as they are stored."""
    import numpy as np

    kind = dataset.get_type()
    # numpy may lack this type: only its size matters.
    values = np.zeros(dataset.shape, np.dtype(("V", kind.get_size())))
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values, kind)
    return values.tobytes()


def fill_element(plist: Any, dataset: Any) -> bytes:
    """Return the fill element as stored in the file; zero if it is not available."""
    import numpy as np

    size = int(dataset.get_type().get_size())
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        value = np.zeros((), dataset.dtype)
        plist.get_fill_value(value)
        if value.nbytes == size:
            return value.tobytes()
    return bytes(size)


def unwritten_element(h5py: Any, dataset: Any) -> bytes | None:
    """Return the element that the library reads for missing data, None if it reads none.

    It leaves the memory unchanged if the fill time is never (H5D_FILL_TIME_NEVER).
    """
    import numpy as np

    h5s, kind = h5py.h5s, dataset.get_type()
    space = dataset.get_space()
    if dataset.shape:
        space.select_hyperslab((0,) * len(dataset.shape), (1,) * len(dataset.shape))
    elements = []
    for before in (b"\x00", b"\xff"):
        room = np.frombuffer(bytearray(before * kind.get_size()), np.dtype(("V", kind.get_size())))
        dataset.read(h5s.create_simple((1,)), space, room, kind)
        elements.append(room.tobytes())
    return elements[0] if elements[0] == elements[1] else None


def digest_dataset(h5py: Any, dataset: Any, chunk: Sequence[int]) -> str:
    """Return the SHA-256 of a dataset's elements as stored; one slab is in memory at a time."""
    import numpy as np

    kind, shape = dataset.get_type(), dataset.shape
    size, height = kind.get_size(), max(1, math.prod(shape[1:]))
    # Whole chunks, so that each is decompressed once.
    rows = min(max(1, _SLAB // (height * size) // chunk[0]) * chunk[0], shape[0])
    room = np.zeros((rows, *shape[1:]), np.dtype(("V", size)))
    space, hasher = dataset.get_space(), hashlib.sha256()
    for start in range(0, shape[0], rows):
        part = room[: min(rows, shape[0] - start)]
        part.reshape(-1).view(np.uint8)[:] = 0
        space.select_hyperslab((start, *(0 for _ in shape[1:])), part.shape)
        dataset.read(h5py.h5s.create_simple(part.shape), space, part, kind)
        hasher.update(part.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


# More or longer strings are only mentioned in a note; beyond some notes, omissions are counted.
STRINGS, TEXTS = 1 << 20, 10_000
NOTES = 64


class RefusalError(Exception):  # part of the protocol, not an error
    """A refusal for the parent: the error's kind, its message, and for a limit its name and value."""


class Hdf5Walk:
    """One walk of a file; `document` is its result.

    No numeric dataset is read, no link to another file is followed, no filter is loaded.
    """

    def __init__(self, file: Any) -> None:
        import h5py  # type: ignore[import-untyped]

        self.h5py = h5py
        self.most = limits.current()
        self.file = file
        # Object addresses are relative to the end of the user block; data offsets are not.
        self.block = int(file.id.get_create_plist().get_userblock())
        self.groups: list[Hdf5GroupRecord] = []
        self.datasets: list[Hdf5DatasetRecord] = []
        self.same: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.visited: dict[int, str] = {}
        self.addresses: dict[str, int] = {}
        self.chunks = 0

    def document(self) -> Hdf5Listing:
        """Walk from the root over hard links, visiting each object once."""
        root = self.h5py.h5g.open(self.file.id, b"/")
        stack: list[tuple[Any, str, int]] = [(root, "", 0)]
        self.visited[self._address(root)] = ""
        self.addresses[""] = self._address(root)
        while stack:
            group, path, depth = stack.pop()
            if depth > self.most.hdf5_depth:
                raise RefusalError("limit", "groups are nested too deeply", "hdf5_depth", depth)
            below = [
                (child, name, depth + 1)
                for name, child in self._children(group, path)
                if isinstance(child, self.h5py.h5g.GroupID)
            ]
            stack += reversed(below)
        more = len(self.notes) - NOTES
        notes = [*self.notes[:NOTES], *([f"{more:,} more items are not listed"] if more > 0 else [])]
        return {"groups": self.groups, "datasets": self.datasets, "same": self.same, "notes": notes}

    def _address(self, item: Any) -> int:
        return int(self.h5py.h5o.get_info(item).addr) + self.block

    def _children(self, group: Any, path: str) -> list[tuple[str, Any]]:
        h5py = self.h5py
        tracked = bool(group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED)
        self.groups.append(
            {
                "path": path,
                "address": self.addresses[path],
                "ordered": tracked,
                "attributes": self._attributes(group),
            }
        )
        children, links = [], self._links(group, tracked)
        if len({raw for raw, _ in links}) < len(links):
            raise RefusalError("format", f"two members of group /{path} have the same name")
        for raw, kind in links:
            if raw in (b"", b".", b"..") or b"/" in raw:
                raise RefusalError("format", f"a member of group /{path} has an invalid name")
            name = f"{path}/{decode_name(raw)}" if path else decode_name(raw)
            if kind == h5py.h5l.TYPE_EXTERNAL:
                raise RefusalError(
                    "unsupported", f"{name} is a link to another file; external links are not followed"
                )
            if kind != h5py.h5l.TYPE_HARD:
                what = "soft link" if kind == h5py.h5l.TYPE_SOFT else "link of an unknown kind"
                self.notes.append(f"{name} is a {what}, which is not followed")
                continue
            self._count(len(self.visited) + 1, "objects")
            child = h5py.h5o.open(group, raw)
            address = self._address(child)
            if address in self.visited:
                self.same.append((name, self.visited[address]))
                continue
            self.visited[address] = name
            if isinstance(child, h5py.h5d.DatasetID):
                self._dataset(child, name, address)
            elif isinstance(child, h5py.h5g.GroupID):
                children.append((name, child))
                self.addresses[name] = address
            else:
                self.notes.append(f"{name} is a named type, which is not listed")
        return children

    def _count(self, count: int, what: str) -> None:
        if count > self.most.hdf5_objects:
            raise RefusalError("limit", f"the file holds too many {what}", "hdf5_objects", count)

    def _links(self, group: Any, tracked: bool) -> list[tuple[bytes, int]]:
        h5py = self.h5py
        links: list[tuple[bytes, int]] = []
        group.links.iterate(
            lambda name, info: links.append((bytes(name), info.type)),
            idx_type=h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME,
            info=True,
        )
        return links

    def _attributes(self, group: Any) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for name in TEXT_ATTRIBUTES:
            if self.h5py.h5a.exists(group, name.encode()):
                attributes[name] = plain_attribute(self._attribute(group, name))
        # Values longer than an attribute may be are split into pieces, numbered from 0. Keras looks up each
        # by name.
        for stem in NAME_ATTRIBUTES:
            if self.h5py.h5a.exists(group, stem.encode()):
                attributes[stem] = self._names(group, stem)
            number = 0
            while self.h5py.h5a.exists(group, f"{stem}{number}".encode()):
                attributes[f"{stem}{number}"] = self._names(group, f"{stem}{number}")
                number += 1
        return attributes

    def _names(self, group: Any, name: str) -> Any:
        value = self._attribute(group, name)
        if not is_utf8(value):
            raise RefusalError("format", f"attribute {name} contains a name that is not valid UTF-8")
        return plain_attribute(value)

    def _attribute(self, group: Any, name: str) -> Any:
        h5py = self.h5py
        opened = h5py.h5a.open(group, name.encode())
        size = math.prod(opened.get_space().get_simple_extent_dims()) * opened.get_type().get_size()
        if size > self.most.json_bytes:
            raise RefusalError("limit", f"attribute {name} is too large", "json_bytes", size)
        return h5py.Group(group).attrs[name]

    def _dataset(self, dataset: Any, path: str, address: int) -> None:
        h5py = self.h5py
        space, plist = dataset.get_space(), dataset.get_create_plist()
        layout = plist.get_layout()
        if layout == h5py.h5d.VIRTUAL:
            raise RefusalError(
                "unsupported", f"dataset {path} is assembled from other files (virtual dataset)"
            )
        if plist.get_external_count():
            raise RefusalError(
                "unsupported", f"dataset {path} stores its values in another file (external storage)"
            )
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            self.notes.append(f"dataset {path} is empty (it has no shape)")
            return
        shape = list(space.get_simple_extent_dims())
        stored = dataset.get_storage_size()
        entry = Hdf5DatasetRecord(path=path, address=address, shape=shape, stored=stored)
        kind = type_name(h5py, dataset)
        if kind is None:
            self._unnamed(dataset, entry)
            return
        entry["dtype"], entry["big"] = kind
        if kind[0] == "string":
            self._strings(dataset, entry)
            return
        declared = math.prod(shape) * dataset.get_type().get_size()
        if not declared:
            entry["inline"] = ""
        elif layout == h5py.h5d.CHUNKED:
            entry.update(self._chunked(dataset, plist))
        elif layout == h5py.h5d.COMPACT:
            if declared != stored:
                raise RefusalError(
                    "format", f"dataset {path} declares {declared:,} bytes but stores {stored:,}"
                )
            entry["inline"] = base64.b64encode(read_elements(h5py, dataset)).decode()
        else:
            entry.update(self._contiguous(dataset))
        self._list(dataset, entry)

    def _unnamed(self, dataset: Any, entry: Hdf5DatasetRecord) -> None:
        reason, path = unreadable_reason(self.h5py, dataset), entry["path"]
        if reason is None:
            self.notes.append(f"dataset {path} is not listed: unsupported type {describe_type(dataset)}")
        else:
            self.datasets.append(entry | {"dtype": "unknown", "unreadable": reason})

    def _contiguous(self, dataset: Any) -> Hdf5DatasetRecord:
        offset = dataset.get_offset()
        # Unallocated space has the address -1, to which the library adds the user block.
        if offset not in (None, self.block - 1):
            return {"offset": offset}
        fill = unwritten_element(self.h5py, dataset)
        if fill is None:
            return {
                "dtype": "unknown",
                "unreadable": "values that were never written and have no fill value",
            }
        return {"fill": base64.b64encode(fill).decode()}

    def _list(self, dataset: Any, entry: Hdf5DatasetRecord) -> None:  # noqa: ARG002  # for Digests
        self.datasets.append(entry)

    def _chunked(self, dataset: Any, plist: Any) -> Hdf5DatasetRecord:
        chunks: list[tuple[list[int], int, int, int]] = []

        count = dataset.get_num_chunks()

        def note(info: Any) -> bool | None:
            chunks.append((list(info.chunk_offset), info.byte_offset, info.size, info.filter_mask))
            return True if len(chunks) > count else None  # any return value except None ends it

        self.chunks += count
        self._count(self.chunks, "chunks")
        if count:
            dataset.chunk_iter(note)
        if len(chunks) != count:
            raise RefusalError("format", "the chunk index of a dataset is inconsistent")
        filters = [plist.get_filter(n) for n in range(plist.get_nfilters())]
        return {
            "chunk": list(plist.get_chunk()),
            "chunks": chunks,
            "filters": [(code, list(values), decode_name(name)) for code, _, values, name in filters],
            "fill": base64.b64encode(fill_element(plist, dataset)).decode(),
        }

    def _strings(self, dataset: Any, entry: Hdf5DatasetRecord) -> None:
        count = math.prod(entry["shape"])
        if count > TEXTS or max(entry["stored"], count * dataset.get_type().get_size()) > STRINGS:
            self.notes.append(f"dataset {entry['path']} holds {count:,} strings, which are not listed")
            return
        values = self.h5py.Dataset(dataset)[()]
        flat = [values] if not entry["shape"] else values.reshape(-1).tolist()
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in flat]
        data = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        if len(data) > STRINGS:
            self.notes.append(
                f"dataset {entry['path']} holds {len(data):,} bytes of text, which are not listed"
            )
            return
        entry["inline"] = base64.b64encode(data).decode()
        self.datasets.append(entry)


class StopWalk(Exception):  # noqa: N818  # it ends a walk
    """Ends the walk once all requested digests are computed."""


class Hdf5DigestWalk(Hdf5Walk):
    """A walk that reads chunked datasets through the library, starting at dataset number `first`.

    It stops after `most` bytes; the first is read regardless of its size. `records` are the numbers and
    digests.
    """

    def __init__(self, file: Any, first: int, most: int) -> None:
        super().__init__(file)
        self.first, self.left = first, most
        self.records: list[tuple[int, str]] = []

    def digests(self) -> dict[str, list[tuple[int, str]]]:
        """Return the digests; the first dataset's errors are raised, those of others end the walk."""
        with contextlib.suppress(StopWalk):
            self.document()
        return {"digests": self.records}

    def _list(self, dataset: Any, entry: Hdf5DatasetRecord) -> None:
        number = len(self.datasets)
        super()._list(dataset, entry)
        if number < self.first or "chunks" not in entry:
            return
        self.left -= math.prod(entry["shape"]) * dataset.get_type().get_size()
        if number > self.first and self.left < 0:
            raise StopWalk
        try:
            self.records.append((number, digest_dataset(self.h5py, dataset, entry["chunk"])))
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            if number > self.first:
                raise StopWalk from error
            raise


# From this superblock version on, byte 11 has flags for a writer and for a writer with concurrent readers.
_FLAGGED, _OPEN = 3, 0b101


def limit_resources(seconds: int) -> None:
    """Limit this process: memory, CPU time, and no written files."""
    _set_limits(AS=limits.current().hdf5_memory, CPU=seconds, FSIZE=0, CORE=0)


def forbid_opening() -> None:
    """Prevent this process from opening or starting anything more, whatever the file refers to."""
    _set_limits(NOFILE=0, NPROC=0)


def _set_limits(**values: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: only the parent's timeout applies
        return
    for name, value in values.items():
        with contextlib.suppress(ValueError, OSError):
            # At the second (hard) CPU limit the process is killed without an error message.
            hard = value + 1 if name == "CPU" else value
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))


class Hdf5FileWindow:
    """A range of an open file as the file object that HDF5 reads (h5py's fileobj driver)."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self.descriptor, self.offset, self.length, self.at = descriptor, offset, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start (0), here (1) or the end (2)."""
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        """Return where the next read begins."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; raise OSError if the window or the file ends first.

        h5py ignores the returned number: unfilled bytes would be arbitrary memory.
        """
        view = memoryview(buffer).cast("B")
        data = self._bytes(len(view))
        if len(data) != len(view):
            raise OSError("read beyond the end of the file")
        view[:] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        return self._bytes(size if size >= 0 else self.length)

    def _bytes(self, size: int) -> bytes:
        left = max(0, min(self.length - self.at, size))
        pieces = []
        # One call returns at most 2 GiB on Linux.
        while left > 0 and (piece := filesystem.read_at(self.descriptor, left, self.offset + self.at)):
            pieces.append(piece)
            self.at += len(piece)
            left -= len(piece)
        return b"".join(pieces)


def handle_request(
    descriptor: int, offset: int, length: int, digests: tuple[int, int] | None = None
) -> Mapping[str, Any]:
    """Return the listing, the digests (hdf5.Hdf5Job), or `{"refused": [kind, sentence]}`."""
    import h5py

    window = Hdf5FileWindow(descriptor, offset, length)
    try:
        with h5py.File(window, "r") as file:
            _require_closed(window, file)
            return Hdf5Walk(file).document() if digests is None else Hdf5DigestWalk(file, *digests).digests()
    except RefusalError as refused:
        return {"refused": list(refused.args)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever h5py raises, the parent has one sentence for it
        sentence = f"{error}".strip("'\"").splitlines() or [type(error).__name__]
        kind = "truncated" if "truncated file" in sentence[0] or "beyond the end" in sentence[0] else "format"
        return {"refused": [kind, f"the HDF5 library cannot read the file: {sentence[0][:200]}"]}


def _require_closed(window: Hdf5FileWindow, file: Any) -> None:
    """Raise Refused if the superblock (version 3) marks the file as not closed after writing.

    The library rejects such a file too, but not when it reads through a file object (H5Fint.c,
    H5F_open).
    """
    window.seek(file.id.get_create_plist().get_userblock())
    head = window.read(12)
    if head[8] >= _FLAGGED and head[11] & _OPEN:
        raise RefusalError("format", "the file was not closed after writing: its contents may be incomplete")


def preload_modules() -> None:
    """List a small file in memory, so that everything needed is imported while files can be opened."""
    import h5py
    import numpy as np

    own = limits.using(limits.Limits())
    with own, h5py.File("rehearsal", "w", driver="core", backing_store=False) as file:
        file["layer/text"] = "text"
        file["layer/bytes"] = np.array([b"a"])
        file["layer/other"] = np.zeros(1, [("a", "i4")])
        file.attrs["name"] = "text"
        file.attrs["layer_names"] = np.array([b"layer"])
        file.create_dataset("layer/unset", (2,), "f4")
        file.create_dataset("layer/chunked", (2,), "f4", chunks=(1,))
        Hdf5DigestWalk(file, 0, 0).digests()
        with contextlib.suppress(OSError):
            h5py.File(Hdf5FileWindow(-1, 0, 0), "r")


def _run_request(descriptor: int, offset: int, length: int, digests: tuple[int, int] | None) -> str:
    try:
        preload_modules()
    except ImportError as error:
        return json.dumps({"refused": ["missing", str(error)]})
    missing = sandbox.restrict(()).missing
    forbid_opening()
    try:
        if digests is not None:
            atomic_write.keep_freed_memory()  # of the library's chunks
        answer = handle_request(descriptor, offset, length, digests)
        if missing and "notes" in answer:
            answer["notes"].append(sandbox.describe_missing("the HDF5 library", missing))
        return json.dumps(answer)
    except MemoryError:
        return json.dumps({"refused": ["limit", "the HDF5 library needs too much memory", "hdf5_memory"]})


def main(arguments: list[str]) -> int:
    """Print the child's result for an open file.

    Args:
        arguments: descriptor, offset and length in bytes, seconds, the limits as a JSON object, and for
            digests the first dataset's number and the number of bytes to read.
    """
    descriptor, offset, length, seconds = map(int, arguments[:4])
    with limits.using(limits.Limits(**json.loads(arguments[4]))):
        limit_resources(seconds)
        first, most = map(int, arguments[5:7]) if len(arguments) > 5 else (0, 0)
        sys.stdout.write(
            _run_request(descriptor, offset, length, (first, most) if len(arguments) > 5 else None)
        )
        sys.stdout.flush()
    # The library has no more work: damaged files make it crash when it closes them.
    os._exit(0)
