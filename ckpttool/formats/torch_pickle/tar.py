"""The tar archive that the first releases of torch wrote (before 0.1.10): what is in its four members.

Source: torch/serialization.py of those releases (_save) and legacy_load in today's; torch/csrc/generic/
serialization.cpp for the numbers of a tensor (THPTensor_(writeMetadataRaw)).
"""

from __future__ import annotations

from typing import Any, NoReturn

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle import listing
from ckpttool.formats.torch_pickle.classes import Classes
from ckpttool.formats.torch_pickle.storages import Storages, check_location, itemsize, storage_dtype
from ckpttool.formats.torch_pickle.stream import LONG, SHORT, Stream
from ckpttool.formats.torch_pickle.tensors import BUILDERS, RANK, Storage, Tensor
from ckpttool.formats.torch_pickle.views import view
from ckpttool.source import File, Span
from ckpttool.wire import tar
from ckpttool.wire.asked import merged, standing
from ckpttool.wire.pickle_reader import Global

PROTOCOL = 1000
_REBUILD = "torch._utils._rebuild_tensor_v2"


def listed(file: File) -> Listed:
    """List every tensor and value of the archive; nothing is extracted, imported or called.

    Raise FormatError when its members do not fit together.
    """
    members = {name: Stream(file, s.offset, s.offset + s.length) for name, s in tar.members(file).items()}
    for name in ("sys_info", "storages", "pickle"):
        if name not in members:
            raise FormatError(f"the archive has no member {name!r}", file=file.path)
    _check_machine(members["sys_info"].pickle(SHORT).value, file)
    names = _Names(file)
    names.add_storages(members["storages"])
    if "tensors" in members:
        names.add_tensors(members["tensors"])
    builders = {**BUILDERS, _REBUILD: names.rebuilt}
    pickled = members["pickle"].pickle(LONG, names.persistent, builders)
    asked = merged(*(standing(member.asked, name) for name, member in members.items()))
    return listing.listed(
        pickled._replace(asked=asked),
        f"torch tar archive protocol {PROTOCOL}",
        notes=names.classes.notes(),
        details=names.classes.details(),
    )


def _check_machine(said: object, file: File) -> None:
    if not isinstance(said, dict) or said.get("protocol_version") != PROTOCOL:
        raise FormatError("sys_info does not say which protocol this is", file=file.path)
    if said.get("little_endian") is not True:
        # These releases wrote numbers as the machine had them, and today's torch reads them as little-endian.
        raise UnsupportedError("a tar archive of a big-endian machine", file=file.path)


class _Names:
    """The storages and tensors of the archive by their keys, which were addresses."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.classes = Classes()
        self.storages: dict[str, Storage] = {}
        self.tensors: dict[str, Tensor] = {}
        self.named = Storages(self._place)

    def add_storages(self, stream: Stream) -> None:
        """Take the storages, then the list of those that are parts of others."""
        for _ in range(_count(stream)):
            # (key, location, class); the very first files had no location.
            said = _tuple(stream, (2, 3))
            if len(said) == 3:
                check_location(said[1])
            storage = self._empty(_key(said[0], stream), said[-1], stream)
            (count,) = stream.numbers(1)
            if count < 0:
                _fail("a storage has a negative size", stream)
            storage.bytes = stream.span(count * itemsize(storage.dtype))
            storage.nbytes = storage.bytes.length
        views = stream.pickle(LONG).value if stream.at < stream.end else []
        for part in views if isinstance(views, list) else [views]:
            self._add_view(part, stream)

    def _empty(self, key: str, kind: object, stream: Stream) -> Storage:
        if key in self.storages or not isinstance(kind, Global):
            _fail("two storages have one key, or one has no class", stream)
        made = self.storages[key] = Storage(key, storage_dtype(kind), 0, Span(self.file, 0, 0))
        return made

    def _add_view(self, view: object, stream: Stream) -> None:
        if not isinstance(view, tuple) or len(view) != 4 or tuple(map(type, view[2:])) != (int, int):
            _fail("a storage's view is not two keys, an offset and a size", stream)
        key, (offset, count) = _key(view[0], stream), view[2:]
        root = self.storages.get(_key(view[1], stream))
        if root is None or key in self.storages:
            _fail("a storage is a part of one that is not in the archive, or has the key of another", stream)
        start, nbytes = offset * itemsize(root.dtype), count * itemsize(root.dtype)
        if offset < 0 or count < 0 or start + nbytes > root.nbytes:
            _fail(f"storage {key!r} reaches beyond storage {root.key!r}, of which it is a part", stream)
        place = Span(self.file, _span(root).offset + start, nbytes)
        self.storages[key] = Storage(key, root.dtype, nbytes, place, part=True)

    def add_tensors(self, stream: Stream) -> None:
        """Take the tensors: each names its storage, then come rank, sizes, strides and offset."""
        for _ in range(_count(stream)):
            # (key, storage, class); the very first files had class and storage the other way round.
            said = _tuple(stream, (3,))
            owner, kind = (said[2], said[1]) if isinstance(said[1], Global) else (said[1], said[2])
            # The rank was four bytes of eight; what the others held was left to chance.
            rank = stream.numbers(1)[0] & 0xFFFFFFFF
            if rank > RANK:
                _fail(f"a tensor of {rank:,} dimensions", stream)
            numbers = stream.numbers(2 * rank + 1)
            storage = self._owner(owner, kind, stream)
            key = _key(said[0], stream)
            if key in self.tensors or key in self.storages:
                _fail("two things have one key", stream)
            self.tensors[key] = view(
                storage, storage.dtype or "uint8", numbers[-1], numbers[:rank], numbers[rank:-1]
            )

    def _owner(self, key: object, kind: object, stream: Stream) -> Storage:
        if key is None and isinstance(kind, Global):
            # A tensor that never got any memory: `torch.FloatTensor()`.
            bare = Global(kind.module, kind.name.replace("Tensor", "Storage"))
            return Storage("", storage_dtype(bare), 0, Span(self.file, 0, 0))
        storage = self.storages.get(_key(key, stream))
        if storage is None:
            _fail(f"storage {key!r} is not in the archive", stream)
        return storage

    def persistent(self, pid: object) -> object:
        """Return the tensor, storage or class of a persistent id; raise FormatError for another one."""
        if isinstance(pid, tuple) and len(pid) == 3:
            return self.classes.named(pid)
        key = str(pid) if type(pid) in (str, int) else ""
        found = self.tensors.get(key) or self.storages.get(key)
        if found is None:
            raise FormatError(f"what the pickle refers to as {key[:40]!r} is not in the archive")
        return found

    def rebuilt(self, args: tuple[Any, ...]) -> object:
        """Return the tensor of a file made by hand, which names its storage in the call, as in no release."""
        named = args[:1] if not args or isinstance(args[0], Storage) else (self.named.persistent(args[0]),)
        return BUILDERS[_REBUILD]((*named, *args[1:]))

    def _place(self, key: str, nbytes: int) -> Span:
        found = self.storages.get(key)
        if found is None or found.nbytes != nbytes:
            raise FormatError(f"storage {key!r} is not in the archive, or has another size there")
        return _span(found)


def _span(storage: Storage) -> Span:
    assert isinstance(storage.bytes, Span)  # noqa: S101 - a member of a tar archive is not compressed
    return storage.bytes


def _count(stream: Stream) -> int:
    count = stream.pickle(SHORT).value
    if type(count) is not int or not 0 <= count <= stream.end - stream.at:
        _fail("a member does not begin with the number of its entries", stream)
    return count


def _tuple(stream: Stream, lengths: tuple[int, ...]) -> tuple[Any, ...]:
    said = stream.pickle(SHORT).value
    if not isinstance(said, tuple) or len(said) not in lengths:
        _fail("an entry is not described as torch does", stream)
    return said


def _key(said: object, stream: Stream) -> str:
    if type(said) not in (int, str):
        _fail("a key is no number", stream)
    return str(said)


def _fail(message: str, stream: Stream) -> NoReturn:
    raise FormatError(message, file=stream.file.path, offset=stream.at)
