"""Judges what the process that lists an HDF5 file says: nothing is believed that the file cannot hold."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from ckpttool import dtypes, limits
from ckpttool.errors import FormatError
from ckpttool.formats.hdf5 import Dataset, Group, Index, sources
from ckpttool.formats.hdf5.sources import Chunk, Chunked, Filled, Filter, Turned, place
from ckpttool.source import Inline, Shape, Source, Storage

_MOST = (1 << 63) - 1

_Entry = TypeVar("_Entry", Group, Dataset)


def index(base: Storage, found: Mapping[str, Any]) -> Index:
    """Return the listing of the HDF5 file that `base` holds as records.

    Raise FormatError for what makes no sense, for data outside of the file, and for bytes that two datasets
    claim or that an object's header begins in.
    """
    judge = _Judge(base)
    try:
        groups = _by_path([judge.group(entry) for entry in found["groups"]])
        datasets = _by_path([judge.dataset(*each) for each in enumerate(found["datasets"])])
        if "" not in groups or groups.keys() & datasets.keys():
            raise ValueError("a group and a dataset have one name")
        same = {_text(name): _text(first) for name, first in found["same"]}
        notes = tuple(_text(note) for note in found["notes"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError("the list of the file's datasets makes no sense", file=judge.file) from error
    judge.require_apart()
    return Index(groups, judge.bounded(datasets), same, notes)


def _by_path(entries: Iterable[_Entry]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for entry in entries:
        if found.setdefault(entry.path, entry) is not entry:
            raise ValueError("two have one name")
    return found


class _Judge:
    """Goes through the entries; `extents` are the runs of bytes that data takes, with the dataset of each."""

    def __init__(self, base: Storage) -> None:
        self.base = base
        self.most = limits.current()
        self.file = place(base).file.path
        self.extents: list[tuple[int, int, str]] = []
        self.addresses: list[int] = []
        self.expanded = 0

    def group(self, entry: Mapping[str, Any]) -> Group:
        """Return a group; raise ValueError or TypeError for one that cannot be."""
        attributes = dict(entry["attributes"])
        for name, value in attributes.items():
            for text in [name, *(value if isinstance(value, list) else [] if value is None else [value])]:
                _text(text)
        return Group(_text(entry["path"]), self._address(entry), entry["ordered"] is True, attributes)

    def dataset(self, number: int, entry: Mapping[str, Any]) -> Dataset:
        """Return dataset `number` of the list; raise ValueError or TypeError if it cannot be.

        Raise FormatError for its data.
        """
        path, dtype = _text(entry["path"]), _text(entry["dtype"])
        shape = _sizes(entry["shape"])
        # Zeros are left out: one must not hide a size that cannot be.
        if dtype not in dtypes.BY_NAME or math.prod(n or 1 for n in shape) > _MOST:
            raise ValueError(dtype)
        if (dtype == "unknown") != ("unreadable" in entry):
            raise ValueError(dtype)
        address = self._address(entry)
        if "unreadable" in entry:
            why = f"dataset {path} holds {_text(entry['unreadable'])}"
            return Dataset(path, address, dtype, shape, sources.Unreadable(self.base, why))
        return Dataset(path, address, dtype, shape, self._source(number, entry, dtype, shape))

    def _address(self, entry: Mapping[str, Any]) -> int:
        self.addresses.append(_size(entry["address"]))
        return self.addresses[-1]

    def _source(self, number: int, entry: Mapping[str, Any], dtype: str, shape: Shape) -> Source:
        path = entry["path"]
        itemsize = dtypes.BY_NAME[dtype].itemsize
        nbytes = math.prod(shape) * itemsize
        if dtype == "string":
            return Inline(_texts(base64.b64decode(entry["inline"]), math.prod(shape)))
        if not nbytes:
            return Inline(b"")
        if "inline" in entry:
            raw: Source = Inline(_exactly(base64.b64decode(entry["inline"]), nbytes))
        elif "fill" in entry:
            fill = _exactly(base64.b64decode(entry["fill"]), itemsize)
            chunked = "chunks" in entry
            raw = self._chunked(number, entry, shape, fill) if chunked else Filled(self.base, fill, nbytes)
            # A larger one is judged by itself.
            self.expanded += nbytes if nbytes <= self.most.expanded_bytes else 0
        else:
            offset, stored = _size(entry["offset"]), _size(entry["stored"])
            if stored != nbytes:
                self._fail(f"dataset {path} has {stored:,} bytes for a shape of {nbytes:,}", offset)
            self._claim(offset, nbytes, path)
            raw = sources.run(self.base, offset, nbytes)
        width = dtypes.component_size(dtype)
        return Turned(raw, width) if entry["big"] is True and width > 1 else raw

    def _chunked(self, number: int, entry: Mapping[str, Any], shape: Shape, fill: bytes) -> Source:
        path = entry["path"]
        filters = tuple(
            Filter(_size(code), _sizes(values), _text(name)) for code, values, name in entry["filters"]
        )
        chunk = _sizes(entry["chunk"])
        chunks = tuple(Chunk(_sizes(at), *map(_size, rest)) for at, *rest in entry["chunks"])
        if len(chunk) != len(shape) or min(chunk) < 1 or len({one.at for one in chunks}) < len(chunks):
            raise ValueError(chunk)
        for one in chunks:
            if len(one.at) != len(shape) or any(at % step for at, step in zip(one.at, chunk, strict=True)):
                raise ValueError(one.at)
            if any(at >= extent for at, extent in zip(one.at, shape, strict=True)):
                self._fail(f"dataset {path} has a chunk outside of its shape", one.offset)
            self._claim(one.offset, one.size, path)
        unknown = [each.name or str(each.code) for each in filters if each.code not in sources.KNOWN]
        if unknown:
            named = ", ".join(unknown)
            return sources.Unreadable(self.base, f"dataset {path} is packed by filter {named}")
        return Chunked(self.base, number, shape, chunk, chunks, filters, fill)

    def _claim(self, offset: int, length: int, path: str) -> None:
        if offset + length > self.base.length:
            self._fail(f"the data of dataset {path} reach beyond the end of the file", offset)
        self.extents.append((offset, offset + length, path))

    def require_apart(self) -> None:
        """Raise FormatError if two claim the same bytes; an object's header takes at least its first."""
        runs = sorted(
            [run for run in self.extents if run[0] < run[1]] + [(at, at + 1, "") for at in self.addresses]
        )
        for (start, stop, path), (following, _, other) in pairwise(runs):
            if following < stop:
                names = " and ".join(
                    f"dataset {name}" if name else "another object" for name in (path, other)
                )
                self._fail(f"{names} claim the same bytes of the file", max(start, following))

    def bounded(self, datasets: dict[str, Dataset]) -> dict[str, Dataset]:
        """Return the datasets; none can be read of those that the file does not hold if they are too much."""
        if self.expanded <= max(self.most.expanded_bytes, self.most.expanded_ratio * self.base.length):
            return datasets
        excess = sources.Excess(self.base, self.expanded)
        return {
            path: one._replace(source=excess) if isinstance(_raw(one.source), Filled | Chunked) else one
            for path, one in datasets.items()
        }

    def _fail(self, sentence: str, offset: int) -> None:
        raise FormatError(sentence, file=self.file, offset=place(self.base).offset + offset)


def _raw(source: Source) -> Source:
    return source.base if isinstance(source, Turned) else source


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(found)
    return found


def _size(found: object) -> int:
    if type(found) is not int or not 0 <= found < 1 << 64:
        raise ValueError(found)
    return found


def _sizes(found: object) -> Shape:
    if not isinstance(found, list):
        raise TypeError(found)
    return tuple(_size(each) for each in found)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError(len(data))
    return data


def _texts(data: bytes, count: int) -> bytes:
    """Return texts, each behind its length in eight bytes, after a check that there are `count` of them."""
    at = 0
    for _ in range(count):
        at += 8 + int.from_bytes(data[at : at + 8], "little")
        if at > len(data):
            raise ValueError(at)
    return _exactly(data, at)
