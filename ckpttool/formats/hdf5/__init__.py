"""HDF5 files as lists of datasets: a process of its own lists them, this one reads their bytes as spans.

The layout that datasets have in the file is the first part of docs/formats/keras_h5.md. Nothing in this
folder is a format by itself: keras_h5 and keras_zip say what the datasets mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ckpttool.source import File, Shape, Source, Span, Storage

if TYPE_CHECKING:
    from ckpttool.formats.hdf5.process import Job

# The superblock is at 0, 512, 1024, ... bytes (HDF5 File Format Specification 3.0, II.A).
MAGIC = b"\x89HDF\r\n\x1a\n"
_IN_MEMORY = 64 << 20


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
    from ckpttool.formats.hdf5 import answer, process, sources

    made = answer.index(base, run(base, process.LISTING))
    if not any(map(sources.is_checked, (dataset.source for dataset in made.datasets.values()))):
        # No leaf's reading will look at the member's checksum, so this is the only time to.
        sources.verify(base)
    return made


def run(base: Storage, job: Job) -> dict[str, Any]:
    """Return what the process that reads HDF5 files finds in the file that `base` holds."""
    from ckpttool.formats.hdf5 import process, sources

    span = sources.place(base)
    with span.file.opened(span.offset, span.length) as descriptor:
        if isinstance(base, Span):
            return process.run(descriptor, base.offset, base.length, base.file.path, job)
        with _nameless(base.length) as stream:
            for data in sources.unpacked(base):
                stream.write(data)
            stream.flush()
            return process.run(stream.fileno(), 0, base.length, span.file.path, job)


def _nameless(length: int) -> IO[bytes]:
    """Return a file without a name, so that nothing is left behind, if it is small in memory."""
    if length <= _IN_MEMORY and hasattr(os, "memfd_create"):
        return open(os.memfd_create("unpacked"), "w+b")
    import tempfile

    return tempfile.TemporaryFile()


def whole(file: File) -> Span:
    """Return a file that is nothing but HDF5 as the storage that `index` takes."""
    return Span(file, 0, file.size)
