"""HDF5 files as lists of datasets: a process of its own lists them, this one reads their bytes as spans.

The layout that datasets have in the file is the first part of docs/formats/keras_h5.md. Nothing in this
folder is a format by itself: keras_h5 and keras_zip say what the datasets mean.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import ChangedError, FormatError, NotFoundError
from ckpttool.source import Deflated, File, Inline, Shape, Source, Span, Storage

# The superblock is at 0, 512, 1024, ... bytes (HDF5 File Format Specification 3.0, II.A).
MAGIC = b"\x89HDF\r\n\x1a\n"


class Dataset(NamedTuple):
    """One dataset: its path without a leading slash, our dtype, its shape and its unread bytes.

    `address` is where its header lies: what was created earlier lies further to the front.
    """

    path: str
    address: int
    dtype: str
    shape: Shape
    source: Source


class Group(NamedTuple):
    """One group: its path ("" is the root) and those attributes that Keras writes, as text or lists of text.

    `ordered` says that its members are listed in the order of their creation, which few writers keep.
    """

    path: str
    address: int
    ordered: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Index:
    """A listed file: groups (each before what it holds) and datasets by path in the file's own order.

    `same` are second names of datasets and groups with the first ones, `notes` what was left out.
    """

    groups: Mapping[str, Group]
    datasets: Mapping[str, Dataset]
    same: Mapping[str, str]
    notes: tuple[str, ...]


def index(base: Storage) -> Index:
    """List the HDF5 file that `base` holds: a whole file as a span, or an archive's member.

    Raise FormatError when it is damaged, and UnsupportedError when it leads to other files (external storage,
    external links, virtual datasets), none of which is opened.
    """
    from ckpttool.formats.hdf5 import process

    file = base.base.file if isinstance(base, Deflated) else base.file
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise NotFoundError(f"cannot be opened: {error.strerror}", file=file.path) from error
    try:
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns, now.st_ino) != file[1:]:
            raise ChangedError("the file changed after it was listed", file=file.path)
        if isinstance(base, Deflated):
            found = _inflated(base, file.path)
        else:
            found = process.listing(descriptor, base.offset, base.length, file.path)
    finally:
        os.close(descriptor)
    try:
        return _index(base, found)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError("the list of the file's datasets makes no sense", file=file.path) from error


def _inflated(base: Deflated, path: str) -> dict[str, Any]:
    import tempfile

    from ckpttool.formats.hdf5 import process
    from ckpttool.formats.hdf5.sources import unpacked

    # The file has no name, so that nothing is left behind whatever happens.
    with tempfile.TemporaryFile() as stream:
        for data in unpacked(base):
            stream.write(data)
        stream.flush()
        return process.listing(stream.fileno(), 0, base.length, path)


def _index(base: Storage, found: dict[str, Any]) -> Index:
    groups = {
        g["path"]: Group(g["path"], g["address"], g["ordered"], g["attributes"]) for g in found["groups"]
    }
    datasets: dict[str, Dataset] = {}
    notes = list(found["notes"])
    for entry in found["datasets"]:
        shape = tuple(entry["shape"])
        if min(shape, default=0) < 0 or entry["dtype"] not in dtypes.BY_NAME:
            raise ValueError(entry["dtype"])
        source = _source(base, entry, shape)
        datasets[entry["path"]] = Dataset(entry["path"], entry["address"], entry["dtype"], shape, source)
    return Index(groups, datasets, dict(found["same"]), tuple(notes))


def _source(base: Storage, entry: dict[str, Any], shape: Shape) -> Source:
    from ckpttool.formats.hdf5 import sources

    itemsize = dtypes.BY_NAME[entry["dtype"]].itemsize
    nbytes = math.prod(shape) * itemsize
    if "inline" in entry:
        data = base64.b64decode(entry["inline"])
        if itemsize and len(data) != nbytes:
            raise ValueError(len(data))
        raw: Source = Inline(data)
    elif not nbytes:
        raw = Inline(b"")
    elif "fill" in entry:
        fill = base64.b64decode(entry["fill"])
        if len(fill) != itemsize:
            raise ValueError(len(fill))
        if "chunks" in entry:
            raw = _chunked(base, entry, shape, fill)
        else:
            raw = sources.Filled(base, fill, math.prod(shape))
    else:
        if entry["stored"] != nbytes or entry["offset"] + nbytes > base.length:
            reason = f"dataset {entry['path']} has {entry['stored']:,} bytes for a shape of {nbytes:,}"
            raise FormatError(reason, file=sources.place(base).file.path, offset=entry["offset"])
        raw = sources.run(base, entry["offset"], nbytes)
    width = dtypes.component_size(entry["dtype"])
    return sources.Turned(raw, width) if entry["big"] and width > 1 else raw


def _chunked(base: Storage, entry: dict[str, Any], shape: Shape, fill: bytes) -> Source:
    from ckpttool.formats.hdf5.sources import KNOWN, Chunk, Chunked, Filter, Unreadable, place

    filters = tuple(Filter(code, tuple(values), name) for code, values, name in entry["filters"])
    unknown = [f.name or str(f.code) for f in filters if f.code not in KNOWN]
    if unknown:
        return Unreadable(base, f"dataset {entry['path']} is packed by filter {', '.join(unknown)}")
    chunks = tuple(Chunk(tuple(at), offset, size, mask) for at, offset, size, mask in entry["chunks"])
    chunk = tuple(entry["chunk"])
    if len(chunk) != len(shape) or min(chunk) < 1 or any(len(each.at) != len(shape) for each in chunks):
        raise ValueError(chunk)
    if sum(each.size for each in chunks) > base.length:
        raise FormatError(
            f"the chunks of dataset {entry['path']} are longer than the file", file=place(base).file.path
        )
    return Chunked(base, shape, chunk, chunks, filters, fill)


def whole(file: File) -> Span:
    """Return a file that is nothing but HDF5 as the storage that `index` takes."""
    return Span(file, 0, file.size)
