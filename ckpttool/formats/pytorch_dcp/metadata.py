"""What `.metadata` says: tensors and their chunks, where every item lies, which nesting the names had.

Source: torch/distributed/checkpoint/metadata.py (Metadata, TensorStorageMetadata, ChunkStorageMetadata,
MetadataIndex), filesystem.py (_StorageInfo). The classes have kept their fields since torch 2.0; later ones
added fields (`storage_meta`, `version`, `transform_descriptors`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from ckpttool import limits
from ckpttool.errors import FormatError
from ckpttool.formats.torch_pickle.tensors import BUILDERS, RANK
from ckpttool.source import File, Shape
from ckpttool.wire import pickle_reader
from ckpttool.wire.asked import Asked
from ckpttool.wire.asked import merged as merged_asks
from ckpttool.wire.pickle_reader import Global, Object

_LARGEST = (1 << 63) - 1

# A name's steps before they were joined with dots: dict keys (as text, whatever they were) and list indices.
Steps = tuple[str | int, ...]


class Chunk(NamedTuple):
    """A box of a tensor: its first element's place and its extent in each dimension."""

    offsets: Shape
    sizes: Shape


class Tensor(NamedTuple):
    """What is said of a tensor; `dtype` is torch's name of it."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


class Item(NamedTuple):
    """Where one item lies: the name of a file of the folder, and bytes in it.

    `transforms` are what its bytes went through ("stream.zstd"), which is not undone here.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class Metadata(NamedTuple):
    """All that the metadata say. An entry of None is a value that torch.save wrote; `paths` may lack names.

    `asked` is what unpickling the metadata would import and call (see pickle_reader.Read).
    """

    entries: Mapping[str, Tensor | None]
    paths: Mapping[str, Steps]
    items: Mapping[tuple[str, str], Item]
    version: str | None
    asked: tuple[Asked, ...] = ()


def read(file: File) -> Metadata:
    """Return what the file says; raise FormatError when it is no metadata of torch's."""
    pickled = pickle_reader.read(file.read(0, file.size), builders=BUILDERS, file=file.path)
    found = _fields(pickled.value, "Metadata")
    once = _Once()
    entries = {_text(n): once.entry(v) for n, v in _dict(found.get("state_dict_metadata")).items()}
    planned = found.get("planner_data")
    paths = {_text(n): _steps(v) for n, v in planned.items()} if isinstance(planned, dict) else {}
    items = {_index(at): _item(where) for at, where in _dict(found.get("storage_data")).items()}
    _require_apart(items)
    version = found.get("version")
    return Metadata(entries, paths, items, version if isinstance(version, str) else None, pickled.asked)


def merged(parts: list[Metadata]) -> Metadata:
    """Return one record of what several ranks wrote, each about its own chunks (`use_collectives=False`)."""
    entries: dict[str, Tensor | None] = {}
    for part in parts:
        for name, entry in part.entries.items():
            entries[name] = _both(name, entries.get(name), entry) if name in entries else entry
    paths = {name: steps for part in parts for name, steps in part.paths.items()}
    items = {at: item for part in reversed(parts) for at, item in part.items.items()}
    return Metadata(entries, paths, items, parts[0].version, merged_asks(*(part.asked for part in parts)))


def _both(name: str, one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        if one is not other:
            _bad(f"{name!r} is a tensor for one rank and none for another")
        return None
    if one[:2] != other[:2]:
        _bad(f"{name!r} has another type or shape for another rank")
    return one._replace(chunks=_distinct((*one.chunks, *other.chunks)))


class _Once:
    """Reads entries and lists of chunks; one that a pickle names thousands of times is read once."""

    def __init__(self) -> None:
        self.entries: dict[int, Tensor | None] = {}
        self.chunks: dict[int, tuple[Chunk, ...]] = {}

    def entry(self, value: Any) -> Tensor | None:
        """Return what is said of a tensor, None for a value that is none."""
        if id(value) not in self.entries:
            self.entries[id(value)] = self._entry(value)
        return self.entries[id(value)]

    def _entry(self, value: Any) -> Tensor | None:
        if _is(value, "BytesStorageMetadata"):
            return None
        found = _fields(value, "TensorStorageMetadata")
        properties = found.get("properties")
        # TensorProperties.__getstate__: a tuple that begins with the element type.
        state = properties.state if isinstance(properties, Object) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, Global) or dtype.module != "torch":
            _bad("a tensor's properties do not say its element type")
        chunks = found.get("chunks")
        if not isinstance(chunks, list):
            _bad("a tensor's chunks are no list")
        if id(chunks) not in self.chunks:
            # A rank that has nothing of the tensor says so by an empty chunk.
            filled = (chunk for chunk in map(_chunk, chunks) if 0 not in chunk.sizes)
            self.chunks[id(chunks)] = _distinct(filled)
        return Tensor(dtype.name, _shape(found.get("size")), self.chunks[id(chunks)])


def _distinct(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    # By their text, whose hash is randomised: a file could choose numbers that collide.
    return tuple({repr(chunk): chunk for chunk in chunks}.values())


def place(offset: Shape | None) -> str:
    """Return a chunk's offset as the key of its item (text for the same reason)."""
    return "" if offset is None else repr(offset)


def _chunk(value: Any) -> Chunk:
    found = _fields(value, "ChunkStorageMetadata")
    return Chunk(_shape(found.get("offsets")), _shape(found.get("sizes")))


def _index(value: Any) -> tuple[str, str]:
    # `index` is only a hint where to look first.
    found = _fields(value, "MetadataIndex")
    offset = found.get("offset")
    return _text(found.get("fqn")), place(None if offset is None else _shape(offset))


def _item(value: Any) -> Item:
    found = _fields(value, "_StorageInfo")
    name, offset, length = found.get("relative_path"), found.get("offset"), found.get("length")
    # A name with a slash would lead out of the folder.
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        _bad("an item is not in a file of the folder", found=repr(name)[:80])
    if not isinstance(offset, int) or not isinstance(length, int) or not _count(offset) or not _count(length):
        _bad("an item's offset or length is no number of bytes")
    transforms = found.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple) or not all(isinstance(each, str) for each in transforms):
        _bad("an item's transforms are no list of names")
    return Item(name, offset, length, tuple(transforms))


def _require_apart(items: Mapping[tuple[str, str], Item]) -> None:
    """Raise FormatError when two items share bytes: each is written by itself."""
    filled = ((item.file, item.offset, item.length, name) for (name, _), item in items.items() if item.length)
    for one, other in itertools.pairwise(sorted(filled)):
        if one[0] == other[0] and one[1] + one[2] > other[1]:
            names = f"{one[3][:80]!r} and {other[3][:80]!r}"
            _bad(f"two items overlap in a shard: {names}", found=repr(one[0][:80]))


def _steps(value: Any) -> Steps:
    if not isinstance(value, tuple) or not value or not all(type(s) is str or _count(s) for s in value):
        _bad("a name's path is not made of texts and list indices")
    if len(value) > limits.current().pickle_depth:
        raise limits.exceeded("pickle_depth", "values are nested too deep", len(value))
    return value


def _fields(value: Any, kind: str) -> Mapping[str, Any]:
    if not _is(value, kind) or not isinstance(value.state, dict):
        _bad(f"there is no {kind} where torch writes one")
    state: Mapping[str, Any] = value.state
    return state


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Object) and value.name.startswith("torch.") and value.name.endswith(f".{kind}")


def _dict(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        _bad("the metadata name no entries, or no places for them")
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple | list) or len(value) > RANK or not all(map(_count, value)):
        _bad("a tensor's size or offset is not made of whole numbers")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _bad("an entry's name is no text")
    return value


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _bad(message: str, *, found: str | None = None) -> NoReturn:
    raise FormatError(message, found=found)
