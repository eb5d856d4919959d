"""The stream that torch.save wrote before 1.6: five pickles, then the storages in the order of the last one.

Source: torch/serialization.py (_legacy_save, _legacy_load); torch/csrc/serialization.cpp for the storages.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle import listing
from ckpttool.formats.torch_pickle.classes import Classes
from ckpttool.formats.torch_pickle.magic import MAGIC
from ckpttool.formats.torch_pickle.storages import Storages, itemsize
from ckpttool.formats.torch_pickle.stream import LONG, SHORT, Stream
from ckpttool.formats.torch_pickle.tensors import Storage
from ckpttool.shown import count
from ckpttool.source import File, Span
from ckpttool.wire import tar
from ckpttool.wire.asked import Asked

PROTOCOL = 1001


def listed(file: File, offset: int, length: int) -> Listed:
    """List every tensor and value of the stream; nothing that its pickles name is imported or called.

    Storages stay where they are. Raise FormatError when pickles and storages do not fit together.
    """
    if not offset and tar.is_header(file.read(0, min(length, tar.BLOCK))):
        # torch looks for a tar archive before it looks for its stream (serialization.py, _legacy_load).
        raise FormatError("the file is a tar archive, too", file=file.path)
    stream = Stream(file, offset, offset + length)
    _check_start(stream)
    names = _Names(file)
    pickled = stream.pickle(LONG, names.persistent)
    names.place(stream, stream.pickle(LONG).value)
    # Each of the five pickles may ask for calls.
    pickled = pickled._replace(asked=stream.asked)
    rest = stream.end - stream.at
    follow = count(rest, "byte follows", "bytes follow")
    beyond = (f"{follow} the last storage, which nobody reads",) if rest else ()
    return listing.listed(
        pickled,
        f"torch stream protocol {PROTOCOL}",
        notes=(*names.classes.notes(), *beyond),
        details=names.classes.details(),
    )


def storage(file: File, offset: int, length: int, asked: list[Asked]) -> Storage:
    """Return the one storage that a stream holds: what torch/storage.py, _load_from_bytes, is called with.

    `asked` gathers what unpickling would import and call. Raise FormatError when it holds something else.
    """
    stream = Stream(file, offset, offset + length)
    _check_start(stream)
    names = _Names(file)
    found = stream.pickle(LONG, names.persistent).value
    names.place(stream, stream.pickle(LONG).value)
    asked += stream.asked
    if not isinstance(found, Storage):
        raise FormatError("a storage's own bytes hold something else", file=file.path, offset=offset)
    return found


def _check_start(stream: Stream) -> None:
    magic, protocol = (stream.pickle(SHORT).value for _ in range(2))
    if magic != MAGIC:
        raise FormatError("the magic number is not torch's", file=stream.file.path)
    if protocol != PROTOCOL:
        raise UnsupportedError(
            "the stream's protocol is not known",
            file=stream.file.path,
            expected=str(PROTOCOL),
            found=repr(protocol)[:20],
        )
    # What the writer's machine was (`little_endian`, `type_sizes`) decides nothing: counts and storages are
    # little-endian and of fixed width whatever it says.
    stream.pickle(SHORT)


class _View(NamedTuple):
    """A storage that begins `start` bytes inside another one."""

    storage: Storage
    root: Storage
    start: int


class _Names:
    """What the object's persistent ids name; where the storages lie is said behind the pickles."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.classes = Classes()
        self.storages = Storages(lambda _key, _nbytes: Span(file, 0, 0))
        self.views: dict[str, _View] = {}

    def persistent(self, pid: object) -> object:
        """Return the storage or the class of a persistent id; raise FormatError for another one."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return self.classes.named(pid[1:])
        root = self.storages.persistent(pid, 6)
        if root.key in self.views:
            raise FormatError(f"storage {root.key!r} is a part of another, too")
        view = pid[5] if isinstance(pid, tuple) else None
        return root if view is None else self._view(root, view)

    def _view(self, root: Storage, view: object) -> Storage:
        if not isinstance(view, tuple) or tuple(map(type, view)) != (str, int, int):
            raise FormatError("a storage's view is not a key, an offset and a size")
        key, offset, count = view
        width = itemsize(root.dtype)
        if offset < 0 or count < 0 or (offset + count) * width > root.nbytes:
            raise FormatError(f"storage {key!r} reaches beyond storage {root.key!r}, of which it is a part")
        part = Storage(key, root.dtype, count * width, root.bytes, part=True)
        if key in self.storages.known:
            # torch would take the other one, whichever of the two the pickle names first.
            raise FormatError(f"a part of storage {root.key!r} has the key of another storage")
        made = _View(part, root, offset * width)
        known = self.views.setdefault(key, made)
        if (known.root, known.start, known.storage.nbytes) != (root, made.start, made.storage.nbytes):
            raise FormatError(f"storage {key!r} is two different parts of others")
        return known.storage

    def place(self, stream: Stream, keys: object) -> None:
        """Take the storages in the order of their keys; raise FormatError unless they are those named."""
        waiting = dict(self.storages.known)
        places: dict[str, int] = {}
        if not isinstance(keys, list):
            _fail("the list of storages is no list", stream)
        for key in keys:
            storage = waiting.pop(key, None) if type(key) is str else None
            if storage is None:
                _fail("the list of storages holds one that nothing names, or one twice", stream)
            storage.bytes = _taken(storage, stream)
            places[storage.key] = storage.bytes.offset
        if waiting:
            _fail(f"storage {next(iter(waiting))!r} is not in the file", stream)
        for made, root, start in self.views.values():
            made.bytes = Span(self.file, places[root.key] + start, made.nbytes)


def _taken(storage: Storage, stream: Stream) -> Span:
    (count,) = stream.numbers(1)
    wanted = storage.nbytes // itemsize(storage.dtype)
    if count != wanted:
        _fail(
            f"storage {storage.key!r} does not have the size that the pickle says",
            stream,
            expected=f"{wanted:,} elements",
            found=f"{count:,}",
        )
    return stream.span(storage.nbytes)


def _fail(message: str, stream: Stream, **facts: str) -> NoReturn:
    raise FormatError(message, file=stream.file.path, offset=stream.at, **facts)
