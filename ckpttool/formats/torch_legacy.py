"""PyTorch files before version 1.6: streams, tar archives, and bare pickles."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError, locate_errors
from ckpttool.core.source import File, Inline, Span
from ckpttool.core.text import format_count
from ckpttool.encodings import archives, pickle_reader, tar_members
from ckpttool.encodings.pickle_reader import PersistentLoader, PickleContents
from ckpttool.encodings.pickle_values import Builder, Global, StoredBytes
from ckpttool.formats import file_listing, pickle_signatures, torch_tensors, torch_tree, torch_zip
from ckpttool.formats.file_listing import FileListing
from ckpttool.formats.name_roles import role_by_last_name
from ckpttool.formats.pickle_signatures import MAGIC, find_pickle_format
from ckpttool.formats.pickles import PickleWalk, load_pickle_file
from ckpttool.formats.probe import FormatDefinition, Probe
from ckpttool.formats.tf_common import split_variable_names
from ckpttool.formats.torch_tensors import (
    BUILDERS,
    RANK,
    ClassSources,
    Storage,
    StorageTable,
    Tensor,
    build_view,
    check_location,
    storage_dtype,
    storage_itemsize,
)

NAME = "pytorch_legacy"
TITLE = "PyTorch checkpoint (stream, before 1.6)"
FRAMEWORK = "torch"


def claims(probe: Probe) -> str | None:
    """Return the path of a file that begins with torch's magic number."""
    return probe.path if pickle_signatures.STREAM.match(probe.head) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the file; nothing named in its pickles is imported or called.

    Raise FormatError if pickles and storages do not match. Source: torch/serialization.py (_legacy_save,
    _legacy_load).
    """
    return _read_file(location, NAME, lambda file: list_legacy(file, 0, file.size))


def _read_file(location: str, name: str, list_file: Callable[[File], FileListing]) -> Checkpoint:
    file = File.stamp(location)
    with locate_errors(file=location):
        listing = list_file(file)
    return listing.checkpoint(location, name, file)


PROTOCOL = 1001


def list_legacy(file: File, offset: int, length: int) -> FileListing:
    """List every tensor and value of the stream; nothing named in its pickles is imported or called.

    Storages are not read. Raise FormatError if pickles and storages do not match. Source:
    torch/serialization.py (_legacy_save, _legacy_load); torch/csrc/serialization.cpp for the storages.
    """
    if not offset and archives.is_tar_header(file.read(0, min(length, archives.BLOCK))):
        # torch checks for a tar archive before its stream (serialization.py, _legacy_load).
        raise FormatError("the file is also a tar archive", file=file.path)
    stream = ByteStream(file, offset, offset + length)
    _check_start(stream)
    names = _LegacyStorages(file)
    pickled = stream.pickle(LONG, names.persistent)
    names.locate(stream, stream.pickle(LONG).value)
    # Each of the five pickles may contain calls.
    pickled = pickled._replace(code_references=stream.code_references)
    rest = stream.end - stream.at
    follow = format_count(rest, "byte follows", "bytes follow")
    beyond = (f"{follow} the last storage, unused",) if rest else ()
    listing = torch_tree.list_pickle(
        pickled,
        f"torch stream protocol {PROTOCOL}",
        notes=(*names.classes.notes(), *beyond),
        details=names.classes.details(),
    )
    return _add_code_behind(listing, {"": stream})


def _add_code_behind(listing: FileListing, streams: Mapping[str, ByteStream]) -> FileListing:
    """Return the listing with what follows the streams, by member: a second call of pickle.load reads it."""
    # Not a top-level import: nearly always nothing follows.
    references, unjudged = list(listing.code_references), list(listing.unjudged)
    for name, stream in streams.items():
        if stream.at < stream.end:
            from ckpttool.formats.detect import scan_behind

            behind = scan_behind(stream.file, stream.at, stream.end)
            references += (
                relocate_references(behind.code_references, name) if name else behind.code_references
            )
            unjudged += [
                f"{name}: {content}" if name else content for content in (*behind.unread, *behind.ambiguous)
            ]
    return replace(listing, code_references=merge_references(references), unjudged=tuple(unjudged))


def read_storage(file: File, offset: int, length: int, references: list[CodeReference]) -> Storage:
    """Return the only storage in a stream: the argument of _load_from_bytes in torch/storage.py.

    `references` collects the imports and calls when unpickling. Raise FormatError for any other content.
    """
    stream = ByteStream(file, offset, offset + length)
    _check_start(stream)
    names = _LegacyStorages(file)
    storage = stream.pickle(LONG, names.persistent).value
    names.locate(stream, stream.pickle(LONG).value)
    references += stream.code_references
    if not isinstance(storage, Storage):
        raise FormatError("the bytes of a storage contain something else", file=file.path, offset=offset)
    return storage


def _check_start(stream: ByteStream) -> None:
    magic, protocol = (stream.pickle(SHORT).value for _ in range(2))
    if magic != MAGIC:
        raise FormatError("not torch's magic number", file=stream.file.path)
    if protocol != PROTOCOL:
        raise UnsupportedError(
            "unknown stream protocol",
            file=stream.file.path,
            expected=str(PROTOCOL),
            found=repr(protocol)[:20],
        )
    # The writer's machine (`little_endian`, `type_sizes`) has no effect: counts and storages are always
    # little-endian and of fixed width.
    stream.pickle(SHORT)


class _StorageView(NamedTuple):
    """A storage that begins `start` bytes inside another one."""

    storage: Storage
    root: Storage
    start: int


class _LegacyStorages:
    """Objects named by persistent ids; the locations of storages follow the pickles."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.classes = ClassSources()
        self.storages = StorageTable(lambda _key, _nbytes: Span(file, 0, 0))
        self.views: dict[str, _StorageView] = {}

    def persistent(self, pid: object) -> object:
        """Return the storage or class of a persistent id; raise FormatError for any other id."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return self.classes.named(pid[1:])
        root = self.storages.persistent(pid, 6)
        if root.key in self.views:
            raise FormatError(f"storage {root.key!r} is also a view of another storage")
        view = pid[5] if isinstance(pid, tuple) else None
        return root if view is None else self._view(root, view)

    def _view(self, root: Storage, view: object) -> Storage:
        if not isinstance(view, tuple) or tuple(map(type, view)) != (str, int, int):
            raise FormatError("a storage view is not a key, an offset and a size")
        key, offset, count = view
        width = storage_itemsize(root.dtype)
        if offset < 0 or count < 0 or (offset + count) * width > root.nbytes:
            raise FormatError(
                f"storage {key!r} extends past the end of storage {root.key!r}, of which it is a view"
            )
        part = Storage(key, root.dtype, count * width, root.bytes, part=True)
        if key in self.storages.known:
            # torch would use the other one, whichever of the two the pickle names first.
            raise FormatError(f"a view of storage {root.key!r} has the key of another storage")
        storage_view = _StorageView(part, root, offset * width)
        known = self.views.setdefault(key, storage_view)
        if (known.root, known.start, known.storage.nbytes) != (
            root,
            storage_view.start,
            storage_view.storage.nbytes,
        ):
            raise FormatError(f"storage {key!r} is defined as two different views")
        return known.storage

    def locate(self, stream: ByteStream, keys: object) -> None:
        """Locate the storages in the order of their keys; raise FormatError unless they match those named."""
        waiting = dict(self.storages.known)
        places: dict[str, int] = {}
        if not isinstance(keys, list):
            _fail("the list of storages is not a list", stream)
        for key in keys:
            storage = waiting.pop(key, None) if type(key) is str else None
            if storage is None:
                _fail("the list of storages contains an unused or duplicate key", stream)
            storage.bytes = _read_storage(storage, stream)
            places[storage.key] = storage.bytes.offset
        if waiting:
            _fail(f"storage {next(iter(waiting))!r} is missing from the file", stream)
        for view, root, start in self.views.values():
            view.bytes = Span(self.file, places[root.key] + start, view.nbytes)


def _read_storage(storage: Storage, stream: ByteStream) -> Span:
    (count,) = stream.numbers(1)
    expected = storage.nbytes // storage_itemsize(storage.dtype)
    if count != expected:
        _fail(
            f"the size of storage {storage.key!r} does not match the pickle",
            stream,
            expected=f"{expected:,} elements",
            found=f"{count:,}",
        )
    return stream.span(storage.nbytes)


def _fail(message: str, stream: ByteStream, **facts: str) -> NoReturn:
    raise FormatError(message, file=stream.file.path, offset=stream.at, **facts)


TAR_NAME = "pytorch_tar"
TAR_TITLE = "PyTorch checkpoint (tar archive, before 0.1.10)"

_FIRST = "sys_info"


def tar_claims(probe: Probe) -> str | None:
    """Return the path of a tar archive whose first member is `sys_info`."""
    if not tar_members.is_tar_start(probe.head):
        return None
    try:
        return probe.path if tar_members.first_tar_member(File.stamp(probe.path)) == _FIRST else None
    except CkpttoolError:
        return probe.path if probe.head.startswith(f"{_FIRST}\0".encode()) else None


def read_tar(location: str) -> Checkpoint:
    """List every tensor and value of the archive; nothing is extracted, imported or called.

    Raise FormatError if its members do not match.
    """
    return _read_file(location, TAR_NAME, list_tar)


PYTORCH_TAR = FormatDefinition(
    NAME=TAR_NAME,
    TITLE=TAR_TITLE,
    FRAMEWORK=FRAMEWORK,
    claims=tar_claims,
    read=read_tar,
)


TAR_PROTOCOL = 1000
TAR_MEMBERS = ("sys_info", "storages", "tensors", "pickle")
_REBUILD = "torch._utils._rebuild_tensor_v2"


def list_tar(file: File) -> FileListing:
    """List every tensor and value of the archive; nothing is extracted, imported or called.

    Raise FormatError if its members do not match. Source: torch/serialization.py of those releases (_save)
    and legacy_load in current ones; torch/csrc/generic/serialization.cpp for the numbers of a tensor
    (THPTensor_(writeMetadataRaw)).
    """
    members = {
        name: ByteStream(file, s.offset, s.offset + s.length)
        for name, s in tar_members.read_tar(file).items()
    }
    for name in ("sys_info", "storages", "pickle"):
        if name not in members:
            raise FormatError(f"the archive has no member {name!r}", file=file.path)
    _check_machine(members["sys_info"].pickle(SHORT).value, file)
    names = _TarStorages(file)
    names.add_storages(members["storages"])
    if "tensors" in members:
        names.add_tensors(members["tensors"])
    builders = {**BUILDERS, _REBUILD: names.rebuilt}
    pickled = members["pickle"].pickle(LONG, names.persistent, builders)
    requested = merge_references(
        *(relocate_references(member.code_references, name) for name, member in members.items())
    )
    listing = torch_tree.list_pickle(
        pickled._replace(code_references=requested),
        f"torch tar archive protocol {TAR_PROTOCOL}",
        notes=(
            *names.classes.notes(),
            *file_listing.note_unknown_members([name for name in members if name not in TAR_MEMBERS]),
        ),
        details=names.classes.details(),
    )
    return _add_code_behind(listing, {name: members[name] for name in TAR_MEMBERS if name in members})


def _check_machine(system: object, file: File) -> None:
    if not isinstance(system, dict) or system.get("protocol_version") != TAR_PROTOCOL:
        raise FormatError("sys_info does not contain the protocol version", file=file.path)
    if system.get("little_endian") is not True:
        # These releases wrote numbers in the machine's byte order, and current torch reads them as
        # little-endian.
        raise UnsupportedError("tar archive written on a big-endian machine", file=file.path)


class _TarStorages:
    """The storages and tensors of the archive by their keys, which were addresses."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.classes = ClassSources()
        self.storages: dict[str, Storage] = {}
        self.tensors: dict[str, Tensor] = {}
        self.named = StorageTable(self._locate)

    def add_storages(self, stream: ByteStream) -> None:
        """Read the storages, then the list of views of other storages."""
        for _ in range(_read_count(stream)):
            # (key, location, class); the earliest files had no location.
            counts = _read_tuple(stream, (2, 3))
            if len(counts) == 3:
                check_location(counts[1])
            storage = self._empty(_storage_key(counts[0], stream), counts[-1], stream)
            (count,) = stream.numbers(1)
            if count < 0:
                _fail_tar("negative size of a storage", stream)
            storage.bytes = stream.span(count * storage_itemsize(storage.dtype))
            storage.nbytes = storage.bytes.length
        views = stream.pickle(LONG).value if stream.at < stream.end else []
        for part in views if isinstance(views, list) else [views]:
            self._add_view(part, stream)

    def _empty(self, key: str, kind: object, stream: ByteStream) -> Storage:
        if key in self.storages or not isinstance(kind, Global):
            _fail_tar("two storages have the same key, or one has no class", stream)
        empty = self.storages[key] = Storage(key, storage_dtype(kind), 0, Span(self.file, 0, 0))
        return empty

    def _add_view(self, view: object, stream: ByteStream) -> None:
        if not isinstance(view, tuple) or len(view) != 4 or tuple(map(type, view[2:])) != (int, int):
            _fail_tar("a storage view is not two keys, an offset and a size", stream)
        key, (offset, count) = _storage_key(view[0], stream), view[2:]
        root = self.storages.get(_storage_key(view[1], stream))
        if root is None or key in self.storages:
            _fail_tar(
                "a storage is a view of one that is missing from the archive, or has the key of another",
                stream,
            )
        start, nbytes = offset * storage_itemsize(root.dtype), count * storage_itemsize(root.dtype)
        if offset < 0 or count < 0 or start + nbytes > root.nbytes:
            _fail_tar(
                f"storage {key!r} extends past the end of storage {root.key!r}, of which it is a view", stream
            )
        span = Span(self.file, _span(root).offset + start, nbytes)
        self.storages[key] = Storage(key, root.dtype, nbytes, span, part=True)

    def add_tensors(self, stream: ByteStream) -> None:
        """Read the tensors: each names its storage, followed by rank, sizes, strides and offset."""
        for _ in range(_read_count(stream)):
            # (key, storage, class); the earliest files had class and storage in reverse order.
            counts = _read_tuple(stream, (3,))
            owner, kind = (counts[2], counts[1]) if isinstance(counts[1], Global) else (counts[1], counts[2])
            # The rank was four bytes of eight; the others were uninitialised.
            rank = stream.numbers(1)[0] & 0xFFFFFFFF
            if rank > RANK:
                _fail_tar(f"a tensor has too many dimensions: {rank:,}", stream)
            numbers = stream.numbers(2 * rank + 1)
            storage = self._owner(owner, kind, stream)
            key = _storage_key(counts[0], stream)
            if key in self.tensors or key in self.storages:
                _fail_tar("two entries have the same key", stream)
            self.tensors[key] = build_view(
                storage, storage.dtype or "uint8", numbers[-1], numbers[:rank], numbers[rank:-1]
            )

    def _owner(self, key: object, kind: object, stream: ByteStream) -> Storage:
        if key is None and isinstance(kind, Global):
            # A tensor without memory: `torch.FloatTensor()`.
            bare = Global(kind.module, kind.name.replace("Tensor", "Storage"))
            return Storage("", storage_dtype(bare), 0, Span(self.file, 0, 0))
        storage = self.storages.get(_storage_key(key, stream))
        if storage is None:
            _fail_tar(f"storage {key!r} is missing from the archive", stream)
        return storage

    def persistent(self, pid: object) -> object:
        """Return the tensor, storage or class of a persistent id; raise FormatError for any other id."""
        if isinstance(pid, tuple) and len(pid) == 3:
            return self.classes.named(pid)
        key = str(pid) if type(pid) in (str, int) else ""
        value = self.tensors.get(key) or self.storages.get(key)
        if value is None:
            raise FormatError(f"the pickle refers to {key[:40]!r}, which is missing from the archive")
        return value

    def rebuilt(self, args: tuple[Any, ...]) -> object:
        """Return the tensor of a hand-made file, which names its storage in the call, unlike any release."""
        named = args[:1] if not args or isinstance(args[0], Storage) else (self.named.persistent(args[0]),)
        return BUILDERS[_REBUILD]((*named, *args[1:]))

    def _locate(self, key: str, nbytes: int) -> Span:
        storage = self.storages.get(key)
        if storage is None or storage.nbytes != nbytes:
            raise FormatError(f"storage {key!r} is missing from the archive, or has another size there")
        return _span(storage)


def _span(storage: Storage) -> Span:
    assert isinstance(storage.bytes, Span)  # noqa: S101 - a member of a tar archive is not compressed
    return storage.bytes


def _read_count(stream: ByteStream) -> int:
    count = stream.pickle(SHORT).value
    if type(count) is not int or not 0 <= count <= stream.end - stream.at:
        _fail_tar("a member does not begin with the number of its entries", stream)
    return count


def _read_tuple(stream: ByteStream, lengths: tuple[int, ...]) -> tuple[Any, ...]:
    value = stream.pickle(SHORT).value
    if not isinstance(value, tuple) or len(value) not in lengths:
        _fail_tar("an entry is not in the form that torch writes", stream)
    return value


def _storage_key(stored: object, stream: ByteStream) -> str:
    if type(stored) not in (int, str):
        _fail_tar("a key is not a number", stream)
    return str(stored)


def _fail_tar(message: str, stream: ByteStream) -> NoReturn:
    raise FormatError(message, file=stream.file.path, offset=stream.at)


PICKLE_NAME = "pickle"
PICKLE_TITLE = "Pickle of plain data, NumPy arrays and torch tensors"
WRITES = False
PICKLE_FRAMEWORK = "numpy"


def pickle_claims(probe: Probe) -> str | None:
    """Return the path of a pickle that belongs neither to torch nor to an RL library."""
    return probe.path if find_pickle_format(probe) == PICKLE_NAME else None


def read_pickle(location: str) -> Checkpoint:
    """List every array and value of the pickle; nothing named in it is imported or called.

    Calls that unpickling would make are listed as records and in a note. Raise FormatError if the pickle is
    damaged. Source: Lib/pickle.py and Lib/pickletools.py in CPython for the stream;
    encodings/pickle_values.py lists the sources for NumPy's pickled arrays.
    """
    return _read_file(location, PICKLE_NAME, _list_pickle)


def _list_pickle(file: File) -> FileListing:
    inner = EmbeddedStorages(file)
    pickled = load_pickle_file(file, inner.builders)
    if inner.storages:
        requested = merge_references(pickled.code_references, inner.code_references)
        return torch_tree.list_pickle(
            PickleContents(pickled.value, pickled.size, requested), "pickle of torch tensors"
        )
    walk = PickleWalk(role_by_last_name)
    walk.add(pickled)
    return FileListing(split_variable_names(walk.tree()), code_references=walk.code_references)


PYTHON_PICKLE = FormatDefinition(
    NAME=PICKLE_NAME,
    TITLE=PICKLE_TITLE,
    FRAMEWORK=PICKLE_FRAMEWORK,
    claims=pickle_claims,
    read=read_pickle,
)


class EmbeddedStorages:
    """The storages in one file; `storages` counts them, `asked` lists imports and calls when unpickling."""

    def __init__(self, file: File) -> None:
        """Look for storages in this file, which is a single pickle."""
        self.file = file
        self.storages = 0
        self.code_references: list[CodeReference] = []

    @property
    def builders(self) -> Mapping[str, Builder]:
        """Builders that reconstruct torch tensors from such storages."""
        return {**torch_tensors.REBUILD, "torch.storage._load_from_bytes": self._storage}

    def _storage(self, args: tuple[Any, ...]) -> object:
        data = args[0] if len(args) == 1 else None
        if isinstance(data, StoredBytes):
            storage = read_storage(self.file, data.at, data.length, self.code_references)
        elif isinstance(data, bytes):
            storage = self._stored(data)
        else:
            return NotImplemented
        self.storages += 1
        # Its own key was an address, and addresses are reused.
        storage.key = f"{self.storages}"
        return storage

    def _stored(self, data: bytes) -> Storage:
        """Return the storage of a stream that protocols below 3 store as text (Lib/pickle.py, save_bytes)."""
        stream = MemoryFile(self.file.path, len(data), 0, 0)
        stream.data = data
        try:
            storage = read_storage(stream, 0, len(data), self.code_references)
        except FormatError as error:
            # A position in the decoded bytes would be the wrong byte of the file.
            error.offset = None
            raise
        span = storage.bytes
        if isinstance(span, Span):
            storage.bytes = Inline(data[span.offset : span.offset + span.length])
        return storage


def list_embedded(file: File, offset: int, length: int) -> FileListing:
    """List what torch.save wrote into `length` bytes from `offset` of the file.

    Raise FormatError if the bytes are not in a form that torch writes. Source: torch/storage.py
    (`TypedStorage.__reduce__`, `_load_from_bytes`: torch.save without the zip form).
    """
    head = file.read(offset, min(pickle_signatures.STREAM_LENGTH, length))
    if head.startswith(pickle_signatures.ZIP):
        return torch_zip.list_archive(archives.read_zip(file, offset, length))
    if pickle_signatures.STREAM.match(head):
        return list_legacy(file, offset, length)
    raise FormatError("not written by torch.save", file=file.path, offset=offset)


SHORT, LONG = 512, 1 << 16
_GROWTH = 4
_PIECE = 4096
_ARGUMENT = 9  # bytes of the longest opcode with a fixed-size argument


class MemoryFile(File):
    """Bytes in memory with the interface of a file: data that an outer pickle stores in another encoding."""

    data = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        return self.data[offset : offset + length]


class ByteStream:
    """Bytes `at` to `end` of a file; reading advances `at`.

    `asked` lists the imports and calls when unpickling any of the pickles read (see
    pickle_reader.Read).
    """

    def __init__(self, file: File, at: int, end: int) -> None:
        """Start at the first byte."""
        self.code_references: tuple[CodeReference, ...] = ()
        self.file = file
        self.at = at
        self.end = end
        self._read, self._read_at = b"", at

    def pickle(
        self,
        window: int,
        persistent: PersistentLoader | None = None,
        builders: Mapping[str, Builder] = BUILDERS,
    ) -> PickleContents:
        """Read the pickle that begins here; raise FormatError if it is invalid.

        Its end is only known after reading it. A window of bytes is read, and a larger one if the pickle
        is longer: `persistent` may be called again for the same ids.
        """
        while True:
            length = min(window, self.end - self.at)
            try:
                contents = pickle_reader.parse_pickle(
                    self._ahead(length),
                    persistent=persistent,
                    builders=builders,
                    file=self.file.path,
                    base=self.at,
                    trailing=True,
                )
            except FormatError as error:
                if self.at + length == self.end or not _is_truncated(error, self.at + length):
                    raise
                window *= _GROWTH
            else:
                self.at += contents.end
                if contents.code_references:
                    self.code_references = merge_references(self.code_references, contents.code_references)
                return contents

    def numbers(self, count: int) -> tuple[int, ...]:
        """Read `count` signed 64-bit numbers, little-endian on every machine."""
        self._require(8 * count)
        numbers = struct.unpack(f"<{count}q", self._ahead(8 * count))
        self.at += 8 * count
        return numbers

    def span(self, length: int) -> Span:
        """Skip `length` bytes; raise TruncatedError if there are fewer."""
        self._require(length)
        span = Span(self.file, self.at, length)
        self.at += length
        return span

    def _require(self, length: int) -> None:
        if length > self.end - self.at:
            raise TruncatedError(
                "the data is truncated",
                file=self.file.path,
                offset=self.at,
                expected=f"{length:,} bytes",
                found=f"{self.end - self.at:,}",
            )

    def _ahead(self, length: int) -> bytes:
        """Return the next `length` bytes; a few more are read at once for the data that follows."""
        start = self.at - self._read_at
        if not 0 <= start <= start + length <= len(self._read):
            self._read_at, start = self.at, 0
            self._read = self.file.read(self.at, min(max(length, _PIECE), self.end - self.at))
        return self._read[start : start + length]


def _is_truncated(error: FormatError, stop: int) -> bool:
    # An argument cut off at the end of the window may also look invalid.
    return isinstance(error, TruncatedError) or (error.offset is not None and error.offset > stop - _ARGUMENT)
