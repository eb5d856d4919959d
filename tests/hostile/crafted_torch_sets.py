"""What torch wrote otherwise: streams, tar archives, folders of shards, and archives inside agents' files."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.encodings import Global, PersistentId, PickleObject, dumps
from ckpttool.formats.pickle_signatures import MAGIC
from tests.hostile.case import BAIT, Case
from tests.hostile.crafted_any import written
from tests.hostile.torch_files import FLOATS, ONE, members, storage, tensor, zipped
from tests.hostile.zips import Made, archive, deflated

_LINE = "torch tensor records"


def _stream(
    value: object = None, keys: object = ("0",), count: int = 4, data: bytes = ONE, **more: Any
) -> bytes:
    """Return a stream of torch's before 1.6: five pickles, then a count and the bytes of each storage."""
    start = [more.get("magic", MAGIC), more.get("protocol", 1001), {"little_endian": True}]
    parts = [dumps(value, 2) for value in (*start, {"w": value or tensor(_whole())}, list(keys))]  # type: ignore[call-overload]
    return b"".join(parts) + struct.pack("<q", count) + data


def _whole(count: int = 4) -> PersistentId:
    # Streams name a storage with the part of it that is meant, if it is not all.
    return storage("0", count, FLOATS, None)


def _legacy(name: str, data: bytes, shows: str = "", **more: Any) -> Case:
    return Case(f"torch-legacy-{name}", _LINE, written("model.pt", data), shows=shows, **more)


def _viewed(offset: int, count: int) -> object:
    return tensor(storage("0", 4, FLOATS, ("1", offset, count)), shape=(count,))


_LEGACY = (
    _legacy("whole", _stream(), inspect=0, digest=0, convert=0, shows="w"),
    _legacy("numel-2-36", _stream(tensor(_whole(1 << 36), shape=(1 << 36,)), count=1 << 36)),
    _legacy("count-lies", _stream(count=5)),
    _legacy("count-negative", _stream(count=-4)),
    _legacy("cut-off", _stream()[:-1]),
    _legacy("cut-in-the-pickle", _stream()[:60], digest=None, convert=None),
    _legacy("key-not-named", _stream(keys=("0", "7"))),
    _legacy("key-twice", _stream(keys=("0", "0"))),
    _legacy("key-missing", _stream(keys=())),
    _legacy("part-beyond", _stream(_viewed(2, 3))),
    _legacy("part-negative", _stream(_viewed(-1, 2)), digest=None, convert=None),
    _legacy("protocol-unknown", _stream(protocol=1002), digest=None, convert=None),
    _legacy("bytes-behind", _stream() + b"hidden", inspect=0, digest=0, convert=0),
)


def _tar(
    change: Callable[[dict[str, Any]], None] = lambda _: None, *, behind: bytes = b""
) -> Callable[[Path], Path]:
    """Return the maker of a tar archive of torch's first releases; `change` may replace its members."""
    files: dict[str, Any] = {
        "sys_info": dumps({"protocol_version": 1000, "little_endian": True}, 2),
        "storages": dumps(1, 2) + dumps(("5", "cpu", FLOATS), 2) + struct.pack("<q", 4) + ONE + dumps([], 2),
        "tensors": dumps(1, 2)
        + dumps(("6", "5", Global("torch", "FloatTensor")), 2)
        + struct.pack("<4q", 1, 4, 1, 0),
        "pickle": b"\x80\x02}X\x01\x00\x00\x00wX\x01\x00\x00\x006Qs.",
    }
    change(files)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as built:
        for name, data in files.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name.strip())
            content = b"" if isinstance(data, tarfile.TarInfo) else data
            info.size = len(content)
            built.addfile(info, io.BytesIO(content))
    return written("model.pt", stream.getvalue() + behind)


def _tarred(name: str, make: Callable[[Path], Path], shows: str = "", **more: Any) -> Case:
    return Case(f"torch-tar-{name}", "legacy tar", make, shows=shows, **more)


def _link(files: dict[str, Any]) -> None:
    info = tarfile.TarInfo("storages")
    info.type, info.linkname = tarfile.SYMTYPE, f"../{BAIT}"
    files["storages"] = info


def _patched(at: int, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = _tar()(folder)
        whole = bytearray(path.read_bytes())
        whole[at : at + len(data)] = data
        whole[148:156] = b" " * 8
        whole[148:156] = b"%06o\0 " % sum(whole[:512])
        path.write_bytes(whole)
        return path

    return make


_TAR = (
    _tarred("whole", _tar(), inspect=0, digest=0, convert=0, shows="w"),
    _tarred("duplicate", _tar(lambda files: files.update({"pickle ": files["pickle"]}))),
    _tarred("symbolic-link", _tar(_link)),
    _tarred(
        "storage-of-2-60",
        _tar(
            lambda files: files.update(
                storages=dumps(1, 2) + dumps(("5", "cpu", FLOATS), 2) + struct.pack("<q", 1 << 58)
            )
        ),
    ),
    _tarred(
        "storage-negative",
        _tar(
            lambda files: files.update(
                storages=dumps(1, 2) + dumps(("5", "cpu", FLOATS), 2) + struct.pack("<q", -4)
            )
        ),
    ),
    _tarred("count-lies", _tar(lambda files: files.update(storages=dumps(9, 2) + files["storages"][4:]))),
    _tarred(
        "view-beyond",
        _tar(lambda files: files.update(tensors=files["tensors"][:-32] + struct.pack("<4q", 1, 5, 1, 0))),
    ),
    _tarred(
        "rank-of-2-31",
        _tar(
            lambda files: files.update(tensors=files["tensors"][:-32] + struct.pack("<4q", 1 << 31, 4, 1, 0))
        ),
    ),
    _tarred("bytes-behind", _tar(behind=b"hidden".ljust(512))),
    _tarred("size-of-2-87", _patched(124, b"\x80" + b"\xff" * 11)),
    _tarred("name-with-a-prefix", _patched(345, b"elsewhere")),
    _tarred("checksum", written("model.pt", b"sys_info".ljust(257, b"\0") + b"ustar".ljust(767, b"\0"))),
)


def _folder(
    files: dict[str, bytes], links: dict[str, str] | None = None, fifo: str = ""
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        target = folder / "model"
        target.mkdir()
        for name, data in files.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(data)
        for name, to in (links or {}).items():
            (target / name).symlink_to(to)
        if fifo:
            os.mkfifo(target / fifo)
        return target

    return make


_INDEX, _SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"


def _safe() -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return len(text).to_bytes(8, "little") + text + ONE


def _indexed(index: str, **more: Any) -> Callable[[Path], Path]:
    return _folder({_INDEX: index.encode(), _SHARD: _safe(), **more.pop("files", {})}, **more)


def _map(shard: str) -> str:
    return json.dumps({"weight_map": {"w": shard}})


def _sharded(name: str, make: Callable[[Path], Path], shows: str = "", **more: Any) -> Case:
    return Case(f"torch-sharded-{name}", "symlinked shard", make, shows=shows, **more)


_OUT = _folder({_INDEX: _map(_SHARD).encode()}, {_SHARD: f"../../{BAIT}"})
_SHARDED = (
    _sharded("whole", _indexed(_map(_SHARD)), inspect=0, digest=0, convert=0, shows="w"),
    _sharded("absolute", _indexed(_map("/etc/passwd"))),
    _sharded("traversal", _indexed(_map(f"../../{BAIT}"))),
    _sharded("in-a-folder", _indexed(_map(f"sub/{_SHARD}")), digest=None, convert=None),
    _sharded("dots", _indexed(_map("..")), digest=None, convert=None),
    _sharded("escapes", _indexed(_map("\x1b[31m.bin"))),
    _sharded("nul", _indexed(_map("a\0b")), digest=None, convert=None),
    _sharded("surrogate", _indexed(_map("\ud800")), digest=None, convert=None),
    _sharded("duplicate-key", _indexed(_map("a.bin")[:-2] + f', "w": "{_SHARD}"}}}}')),
    _sharded("duplicate-map", _indexed(_map("a.bin")[:-1] + ", " + _map(_SHARD)[1:])),
    _sharded("no-map", _indexed("{}"), digest=None, convert=None),
    _sharded("names-a-number", _indexed('{"weight_map": {"w": 7}}'), digest=None, convert=None),
    _sharded("tensor-not-there", _indexed(json.dumps({"weight_map": {"v": _SHARD}}))),
    _sharded("missing", _indexed(_map("other.safetensors")), inspect=0, digest=2, convert=2, shows="w"),
    _sharded("link-out", _OUT),
    _sharded(
        "link-inside",
        _folder({_INDEX: _map(_SHARD).encode(), "real": _safe()}, {_SHARD: "real"}),
        inspect=0,
        digest=0,
        convert=0,
        shows="w",
    ),
    _sharded("pipe", _folder({_INDEX: _map("s.safetensors").encode()}, fifo="s.safetensors")),
    _sharded("itself", _indexed(_map(_INDEX))),
)

_METADATA = "torch.distributed.checkpoint.metadata"


def _object_of(name: str, state: object, module: str = _METADATA) -> PickleObject:
    return PickleObject(Global(module, name), (), 0, state=state)


def _entry(shape: tuple[int, ...] = (4,), *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> PickleObject:
    boxes = [
        _object_of("ChunkStorageMetadata", {"offsets": o, "sizes": s}) for o, s in chunks or (((0,), shape),)
    ]
    properties = _object_of("TensorProperties", (Global("torch", "float32"), None, False, None, False))
    return _object_of("TensorStorageMetadata", {"properties": properties, "size": shape, "chunks": boxes})


def _item(path: object, offset: object = 0, length: object = None) -> PickleObject:
    state = {"relative_path": path, "offset": offset, "length": len(_ITEM) if length is None else length}
    return _object_of("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")


_ITEM, _RANK = archive(members(dumps(tensor()))), "__0_0.distcp"


def _dcp(
    items: dict[str, PickleObject], shard: bytes = _ITEM, entry: PickleObject | None = None, **more: Any
) -> Callable[[Path], Path]:
    """Return the maker of a folder of torch.distributed.checkpoint with a tensor for each item."""
    metadata = {
        "state_dict_metadata": {name: entry or _entry() for name in items},
        "planner_data": {name: (name,) for name in items},
        "storage_data": {
            _object_of("MetadataIndex", {"fqn": n, "offset": (0,), "index": 0}): i for n, i in items.items()
        },
    }
    return _folder({".metadata": dumps(_object_of("Metadata", metadata), 4), _RANK: shard}, **more)


def _distributed(name: str, make: Callable[[Path], Path], shows: str = "", **more: Any) -> Case:
    return Case(f"torch-dcp-{name}", _LINE, make, shows=shows, **more)


_DCP = (
    _distributed("whole", _dcp({"w": _item(_RANK)}), inspect=0, digest=0, convert=0, shows="w"),
    _distributed("absolute", _dcp({"w": _item("/etc/passwd")})),
    _distributed("traversal", _dcp({"w": _item(f"../../{BAIT}")})),
    _distributed("escapes", _dcp({"w": _item("\x1b[31m.distcp")}), inspect=0),
    _distributed("beyond", _dcp({"w": _item(_RANK, 1 << 62)})),
    _distributed("negative", _dcp({"w": _item(_RANK, -1)}), digest=None, convert=None),
    _distributed("overlap", _dcp({"v": _item(_RANK), "w": _item(_RANK)})),
    _distributed(
        "overlap-in-part",
        _dcp({"v": _item(_RANK, 0, 99), "w": _item(_RANK, 98, 9)}),
        digest=None,
        convert=None,
    ),
    _distributed("larger-than-its-item", _dcp({"w": _item(_RANK)}, entry=_entry((1 << 40,)))),
    _distributed("another-tensor", _dcp({"w": _item(_RANK)}, entry=_entry((2,))), inspect=0),
    _distributed(
        "chunk-beyond",
        _dcp({"w": _item(_RANK)}, entry=_entry((4,), ((0,), (5,)))),
        digest=None,
        convert=None,
    ),
    _distributed("bad-crc", _dcp({"w": _item(_RANK)}, shard=_ITEM.replace(ONE, ONE[::-1])), inspect=0),
    _distributed("link-out", _dcp({"w": _item("out.distcp")}, links={"out.distcp": f"../../{BAIT}"})),
    _distributed("pipe", _dcp({"w": _item("p.distcp")}, fifo="p.distcp")),
)


def _sb3(*more: Made, state: bytes | None = None, settings: bytes = b"{}") -> Callable[[Path], Path]:
    policy = archive(members()) if state is None else state
    built = [Made("data", settings), Made("policy.pth", policy), Made("_stable_baselines3_version", b"2.3.2")]
    return zipped([*built, *more], "agent.zip")


def _agent(name: str, make: Callable[[Path], Path], shows: str = "", **more: Any) -> Case:
    return Case(f"torch-sb3-{name}", "zip", make, shows=shows, **more)


_HIDDEN = Made("../\x1b[2Jhidden", b"x")
_SB3 = (
    _agent("whole", _sb3(), inspect=0, digest=0, convert=0, shows="w"),
    _agent("hidden-member", _sb3(_HIDDEN), inspect=0, digest=0, convert=0),
    _agent(
        "inner-storage-damaged",
        _sb3(state=archive(members()).replace(ONE, ONE[::-1])),
        inspect=0,
    ),
    _agent("inner-archive-damaged", _sb3(state=archive(members())[:-9])),
    _agent(
        "inner-archive-with-a-suffix",
        _sb3(state=archive(members()) + b"x"),
        digest=None,
        convert=None,
    ),
    _agent(
        "inner-archive-deflated",
        zipped([Made("data", b"{}"), deflated("policy.pth", archive(members()))], "agent.zip"),
    ),
    _agent("settings-no-json", _sb3(settings=b"{")),
    _agent("settings-with-two-of-a-name", _sb3(settings=b'{"gamma": 0, "gamma": 1}')),
    _agent("settings-nested-100000-deep", _sb3(settings=b'{"a":' + b"[" * 100_000)),
    _agent(
        "settings-not-base64",
        _sb3(settings=b'{"a": {":serialized:": "?"}}'),
        digest=None,
        convert=None,
    ),
    _agent(
        "settings-bad-crc",
        zipped([Made("data", b"{}", crc=3), Made("policy.pth", archive(members()))], "agent.zip"),
    ),
    _agent(
        "version-with-escapes",
        zipped(
            [Made("policy.pth", archive(members())), Made("_stable_baselines3_version", b"\x1b[31m9")],
            "agent.zip",
        ),
        inspect=0,
        digest=0,
        convert=None,
        shows="Stable-Baselines3",
    ),
)


def _d3(inner: bytes, config: str = "{}") -> Callable[[Path], Path]:
    return written("agent.d3", dumps({"torch": inner, "config": config, "version": "2.8.1"}, 4))


_D3RLPY = (
    Case("torch-d3rlpy", "zip", _d3(archive(members())), 0, 0, 0, shows="w"),
    Case("torch-d3rlpy-inner-bad-crc", "zip", _d3(archive(members()).replace(ONE, ONE[::-1])), 0, 2, 2),
    Case("torch-d3rlpy-inner-prefix", "zip", _d3(b"x" + archive(members()))),
    Case("torch-d3rlpy-inner-cut", "zip", _d3(archive(members())[:-5])),
)

CASES = (*_LEGACY, *_TAR, *_SHARDED, *_DCP, *_SB3, *_D3RLPY)
