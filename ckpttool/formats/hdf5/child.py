"""Lists an HDF5 file in a process of its own: where every dataset's bytes lie, as JSON on stdout.

The HDF5 library crashes and hangs on damaged files, so nothing else runs here: no dataset with numbers is
read, no link is followed to another file, no filter is loaded. process.py starts it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
from typing import Any

from ckpttool.formats.hdf5 import types

MEMORY = 2 << 30
ANSWER = 128 << 20
OBJECTS = 500_000
DEPTH = 512
CHUNKS = 500_000
ATTRIBUTE = 16 << 20
STRINGS = 1 << 20
TEXTS = 10_000
# What Keras writes beside its weights (keras/src/legacy/saving/legacy_h5_format.py,
# keras/src/saving/saving_lib.py); everything else in a file's attributes is left alone.
_ATTRIBUTES = ("layer_names", "weight_names")
_TEXTS = frozenset(("model_config", "training_config", "keras_version", "backend", "name"))


class _Refused(Exception):  # noqa: N818  # it is an answer, not a fault
    """What the parent shall say: an error's kind and its sentence."""


def limit(seconds: int) -> None:
    """Bound this process: memory, CPU time, and no file may be written."""
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is all there is
        return
    for what, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (value, value))


class Window:
    """A part of an open file as the file object that HDF5 reads (h5py's fileobj driver)."""

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
        """Fill the buffer; raise OSError if the window ends before."""
        view = memoryview(buffer).cast("B")
        if self.at + len(view) > self.length:
            raise OSError("read beyond the end of the file")
        data = os.pread(self.descriptor, len(view), self.offset + self.at)
        view[: len(data)] = data
        self.at += len(data)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        size = max(0, min(self.length - self.at, size if size >= 0 else self.length))
        data = os.pread(self.descriptor, size, self.offset + self.at)
        self.at += len(data)
        return data


class Listing:
    """The walk through one file; `document` is what it finds."""

    def __init__(self, file: Any) -> None:
        import h5py  # type: ignore[import-untyped]

        self.h5py = h5py
        self.file = file
        self.groups: list[dict[str, Any]] = []
        self.datasets: list[dict[str, Any]] = []
        self.same: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.seen: dict[int, str] = {}
        self.addresses: dict[str, int] = {}
        self.chunks = 0

    def document(self) -> dict[str, Any]:
        """Walk from the root over hard links, each object once."""
        root = self.h5py.h5g.open(self.file.id, b"/")
        stack: list[tuple[Any, str, int]] = [(root, "", 0)]
        self.seen[self._address(root)] = ""
        self.addresses[""] = self._address(root)
        while stack:
            group, path, depth = stack.pop()
            if depth > DEPTH:
                raise _Refused("format", f"groups are nested deeper than {DEPTH}")
            below = [
                (child, name, depth + 1)
                for name, child in self._children(group, path)
                if isinstance(child, self.h5py.h5g.GroupID)
            ]
            stack += reversed(below)
        return {"groups": self.groups, "datasets": self.datasets, "same": self.same, "notes": self.notes}

    def _address(self, item: Any) -> int:
        return int(self.h5py.h5o.get_info(item).addr)

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
        found = []
        for raw in self._names(group, tracked):
            name = f"{path}/{types.text(raw)}" if path else types.text(raw)
            kind = group.links.get_info(raw).type
            if kind == h5py.h5l.TYPE_EXTERNAL:
                raise _Refused("unsupported", f"{name} is a link to another file, which is not followed")
            if kind != h5py.h5l.TYPE_HARD:
                self.notes.append(f"{name} is a soft link, which is not followed")
                continue
            if len(self.seen) >= OBJECTS:
                raise _Refused("unsupported", f"the file holds more than {OBJECTS:,} objects")
            child = h5py.h5o.open(group, raw)
            address = self._address(child)
            if address in self.seen:
                self.same.append((name, self.seen[address]))
                continue
            self.seen[address] = name
            if isinstance(child, h5py.h5d.DatasetID):
                self._dataset(child, name, address)
            elif isinstance(child, h5py.h5g.GroupID):
                found.append((name, child))
                self.addresses[name] = address
            else:
                self.notes.append(f"{name} is a named type, which is not listed")
        return found

    def _names(self, group: Any, tracked: bool) -> list[bytes]:
        h5py = self.h5py
        names: list[bytes] = []
        group.links.iterate(
            lambda name: names.append(bytes(name)),
            idx_type=h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME,
        )
        return names

    def _attributes(self, group: Any) -> dict[str, Any]:
        h5py = self.h5py
        names: list[str] = []
        h5py.h5a.iterate(group, lambda name, *_: names.append(types.text(name)))
        found: dict[str, Any] = {}
        for name in names:
            if name in _TEXTS or name.rstrip("0123456789") in _ATTRIBUTES:
                opened = h5py.h5a.open(group, name.encode())
                if opened.get_space().get_simple_extent_npoints() * opened.get_type().get_size() > ATTRIBUTE:
                    self.notes.append(f"attribute {name} is larger than {ATTRIBUTE:,} bytes and is not read")
                    continue
                value = h5py.Group(group).attrs[name]
                found[name] = types.plain(value)
        return found

    def _dataset(self, dataset: Any, path: str, address: int) -> None:
        h5py = self.h5py
        space, plist = dataset.get_space(), dataset.get_create_plist()
        layout = plist.get_layout()
        if layout == h5py.h5d.VIRTUAL:
            raise _Refused(
                "unsupported", f"dataset {path} is put together from other files (virtual dataset)"
            )
        if plist.get_external_count():
            raise _Refused(
                "unsupported", f"dataset {path} keeps its numbers in another file (external storage)"
            )
        kind = types.dtype(h5py, dataset)
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            self.notes.append(f"dataset {path} is empty (it has no shape)")
            return
        if kind is None:
            self.notes.append(f"dataset {path} has a type that is not listed: {types.described(dataset)}")
            return
        entry = {
            "path": path,
            "address": address,
            "dtype": kind[0],
            "big": kind[1],
            "shape": list(space.get_simple_extent_dims()),
            "stored": dataset.get_storage_size(),
        }
        if kind[0] == "string":
            self._strings(dataset, entry)
            return
        if layout == h5py.h5d.COMPACT:
            entry["inline"] = base64.b64encode(types.raw(h5py, dataset)).decode()
        elif layout == h5py.h5d.CHUNKED:
            entry.update(self._chunked(dataset, plist))
        else:
            # Of space that was never allocated the library gives an offset too: "none" and the user block.
            entry["offset"] = dataset.get_offset() if entry["stored"] else None
        if layout != h5py.h5d.COMPACT and entry.get("offset") is None:
            entry["fill"] = base64.b64encode(types.fill(plist, dataset)).decode()
        self.datasets.append(entry)

    def _chunked(self, dataset: Any, plist: Any) -> dict[str, Any]:
        chunks: list[tuple[Any, ...]] = []

        def note(info: Any) -> None:
            if len(chunks) + self.chunks < CHUNKS:
                chunks.append((list(info.chunk_offset), info.byte_offset, info.size, info.filter_mask))

        count = dataset.get_num_chunks()
        if count + self.chunks > CHUNKS:
            raise _Refused("unsupported", f"the file holds more than {CHUNKS:,} chunks")
        if count:
            dataset.chunk_iter(note)
        self.chunks += len(chunks)
        filters = [plist.get_filter(n) for n in range(plist.get_nfilters())]
        return {
            "chunk": list(plist.get_chunk()),
            "chunks": chunks,
            "filters": [[code, list(values), types.text(name)] for code, _, values, name in filters],
        }

    def _strings(self, dataset: Any, entry: dict[str, Any]) -> None:
        count = 1
        for extent in entry["shape"]:
            count *= extent
        if count > TEXTS or entry["stored"] > STRINGS:
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


def answer(descriptor: int, offset: int, length: int) -> dict[str, Any]:
    """Return the listing, or `{"refused": [kind, sentence]}`."""
    import h5py

    try:
        with h5py.File(Window(descriptor, offset, length), "r") as file:
            return Listing(file).document()
    except _Refused as refused:
        return {"refused": list(refused.args)}
    except MemoryError:
        return {"refused": ["format", f"listing it takes more than {MEMORY >> 30} GiB of memory"]}
    except Exception as error:  # noqa: BLE001  # whatever h5py raises, the parent has one sentence for it
        said = f"{error}".strip("'\"").splitlines() or [type(error).__name__]
        kind = "truncated" if "truncated file" in said[0] or "beyond the end" in said[0] else "format"
        return {"refused": [kind, f"HDF5 cannot read it: {said[0][:200]}"]}


def main(arguments: list[str]) -> int:
    """Print what an open file holds; given are descriptor, offset and number of its bytes, and seconds."""
    descriptor, offset, length, seconds = map(int, arguments)
    limit(seconds)
    try:
        text = json.dumps(answer(descriptor, offset, length))
    except ImportError as error:
        text = json.dumps({"refused": ["missing", str(error)]})
    if len(text) > ANSWER:
        text = json.dumps({"refused": ["unsupported", "the list of its datasets is too long"]})
    sys.stdout.write(text)
    sys.stdout.flush()
    # The library has nothing left to say: damaged files make it crash when it closes them.
    os._exit(0)
