"""The walk through one HDF5 file: groups, datasets and where their bytes lie, as JSON values.

It runs in the process that child.py bounds. No dataset with numbers is read, no link is followed to another
file, no filter is loaded.
"""

from __future__ import annotations

import base64
import contextlib
import math
from typing import Any

from ckpttool import limits
from ckpttool.formats.hdf5 import types

# More texts, or longer ones, are named in a note; what is left out beyond some notes is counted.
STRINGS, TEXTS = 1 << 20, 10_000
NOTES = 64
# What Keras writes beside its weights (keras/src/legacy/saving/legacy_h5_format.py,
# keras/src/saving/saving_lib.py); everything else in a file's attributes is left alone.
_ATTRIBUTES = ("layer_names", "weight_names")
_TEXTS = ("model_config", "training_config", "keras_version", "backend", "name")


class Refused(Exception):  # noqa: N818  # it is an answer, not a fault
    """What the parent shall say: an error's kind, its sentence, of a limit its name and what was found."""


class Listing:
    """The walk through one file; `document` is what it finds."""

    def __init__(self, file: Any) -> None:
        import h5py  # type: ignore[import-untyped]

        self.h5py = h5py
        self.most = limits.current()
        self.file = file
        # Addresses of objects count from behind what is in front of the HDF5 file; offsets of data do not.
        self.block = int(file.id.get_create_plist().get_userblock())
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
            if depth > self.most.hdf5_depth:
                raise Refused("limit", "groups are nested too deeply", "hdf5_depth", depth)
            below = [
                (child, name, depth + 1)
                for name, child in self._children(group, path)
                if isinstance(child, self.h5py.h5g.GroupID)
            ]
            stack += reversed(below)
        more = len(self.notes) - NOTES
        notes = [*self.notes[:NOTES], *([f"{more:,} more are not listed"] if more > 0 else [])]
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
        found, links = [], self._links(group, tracked)
        if len({raw for raw, _ in links}) < len(links):
            raise Refused("format", f"two members of group /{path} have the same name")
        for raw, kind in links:
            if raw in (b"", b".", b"..") or b"/" in raw:
                raise Refused("format", f"a member of group /{path} has a name that is none")
            name = f"{path}/{types.text(raw)}" if path else types.text(raw)
            if kind == h5py.h5l.TYPE_EXTERNAL:
                raise Refused("unsupported", f"{name} is a link to another file, which is not followed")
            if kind != h5py.h5l.TYPE_HARD:
                what = "soft link" if kind == h5py.h5l.TYPE_SOFT else "link of an unknown kind"
                self.notes.append(f"{name} is a {what}, which is not followed")
                continue
            self._count(len(self.seen) + 1, "objects")
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

    def _count(self, found: int, what: str) -> None:
        if found > self.most.hdf5_objects:
            raise Refused("limit", f"the file holds too many {what}", "hdf5_objects", found)

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
        found: dict[str, Any] = {}
        for name in _TEXTS:
            if self.h5py.h5a.exists(group, name.encode()):
                found[name] = types.plain(self._attribute(group, name))
        # What is longer than an attribute may be is in pieces, numbered from 0. Keras looks for each by name.
        for stem in _ATTRIBUTES:
            if self.h5py.h5a.exists(group, stem.encode()):
                found[stem] = self._names(group, stem)
            number = 0
            while self.h5py.h5a.exists(group, f"{stem}{number}".encode()):
                found[f"{stem}{number}"] = self._names(group, f"{stem}{number}")
                number += 1
        return found

    def _names(self, group: Any, name: str) -> Any:
        value = self._attribute(group, name)
        if not types.is_utf8(value):
            raise Refused("format", f"attribute {name} holds a name that is not UTF-8")
        return types.plain(value)

    def _attribute(self, group: Any, name: str) -> Any:
        h5py = self.h5py
        opened = h5py.h5a.open(group, name.encode())
        size = math.prod(opened.get_space().get_simple_extent_dims()) * opened.get_type().get_size()
        if size > self.most.json_bytes:
            raise Refused("limit", f"attribute {name} is too large", "json_bytes", size)
        return h5py.Group(group).attrs[name]

    def _dataset(self, dataset: Any, path: str, address: int) -> None:
        h5py = self.h5py
        space, plist = dataset.get_space(), dataset.get_create_plist()
        layout = plist.get_layout()
        if layout == h5py.h5d.VIRTUAL:
            raise Refused("unsupported", f"dataset {path} is put together from other files (virtual dataset)")
        if plist.get_external_count():
            raise Refused(
                "unsupported", f"dataset {path} keeps its numbers in another file (external storage)"
            )
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            self.notes.append(f"dataset {path} is empty (it has no shape)")
            return
        shape = list(space.get_simple_extent_dims())
        entry = {"path": path, "address": address, "shape": shape, "stored": dataset.get_storage_size()}
        kind = types.dtype(h5py, dataset)
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
            if declared != entry["stored"]:
                stored = entry["stored"]
                raise Refused("format", f"dataset {path} declares {declared:,} bytes and stores {stored:,}")
            entry["inline"] = base64.b64encode(types.raw(h5py, dataset)).decode()
        else:
            entry.update(self._contiguous(dataset))
        self._list(dataset, entry)

    def _unnamed(self, dataset: Any, entry: dict[str, Any]) -> None:
        reason, path = types.unreadable(self.h5py, dataset), entry["path"]
        if reason is None:
            self.notes.append(f"dataset {path} has a type that is not listed: {types.described(dataset)}")
        else:
            self.datasets.append(entry | {"dtype": "unknown", "unreadable": reason})

    def _contiguous(self, dataset: Any) -> dict[str, Any]:
        offset = dataset.get_offset()
        # Space that was never allocated has the address -1, to which the library adds the user block.
        if offset not in (None, self.block - 1):
            return {"offset": offset}
        fill = types.unset(self.h5py, dataset)
        if fill is None:
            return {
                "dtype": "unknown",
                "unreadable": "numbers that were never written and have no fill value",
            }
        return {"fill": base64.b64encode(fill).decode()}

    def _list(self, dataset: Any, entry: dict[str, Any]) -> None:  # noqa: ARG002  # for Digests
        self.datasets.append(entry)

    def _chunked(self, dataset: Any, plist: Any) -> dict[str, Any]:
        chunks: list[tuple[Any, ...]] = []

        count = dataset.get_num_chunks()

        def note(info: Any) -> bool | None:
            chunks.append((list(info.chunk_offset), info.byte_offset, info.size, info.filter_mask))
            return True if len(chunks) > count else None  # all but None ends it

        self.chunks += count
        self._count(self.chunks, "chunks")
        if count:
            dataset.chunk_iter(note)
        if len(chunks) != count:
            raise Refused("format", "the index of a dataset's chunks contradicts itself")
        filters = [plist.get_filter(n) for n in range(plist.get_nfilters())]
        return {
            "chunk": list(plist.get_chunk()),
            "chunks": chunks,
            "filters": [[code, list(values), types.text(name)] for code, _, values, name in filters],
            "fill": base64.b64encode(types.fill(plist, dataset)).decode(),
        }

    def _strings(self, dataset: Any, entry: dict[str, Any]) -> None:
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


class Enough(Exception):  # noqa: N818  # it ends a walk
    """All digests are there that were wanted."""


class Digests(Listing):
    """A walk that reads chunked datasets as the library does, from dataset number `first` on.

    It stops behind `most` bytes; the first is read whatever its size. `found` are the numbers and digests.
    """

    def __init__(self, file: Any, first: int, most: int) -> None:
        super().__init__(file)
        self.first, self.left = first, most
        self.found: list[tuple[int, str]] = []

    def document(self) -> dict[str, Any]:
        """Return the digests; the first one's errors are raised, those of others end the walk."""
        with contextlib.suppress(Enough):
            super().document()
        return {"digests": self.found}

    def _list(self, dataset: Any, entry: dict[str, Any]) -> None:
        number = len(self.datasets)
        super()._list(dataset, entry)
        if number < self.first or "chunks" not in entry:
            return
        self.left -= math.prod(entry["shape"]) * dataset.get_type().get_size()
        if number > self.first and self.left < 0:
            raise Enough
        try:
            self.found.append((number, types.digest(self.h5py, dataset, entry["chunk"])))
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            if number > self.first:
                raise Enough from error
            raise
