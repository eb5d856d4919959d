"""Files of torch's with every field at will: pickles of tensors, and the archives around them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, dumps
from tests.hostile.crafted_any import written
from tests.hostile.zips import Made, archive

FLOATS = Global("torch", "FloatStorage")
REBUILD = "torch._utils"
ONE = struct.pack("<4f", 1, 2, 3, 4)


def storage(key: object = "0", count: object = 4, kind: object = FLOATS, *more: object) -> PersistentId:
    """Return a persistent id of torch's."""
    return PersistentId(("storage", kind, key, "cpu", count, *more))


def tensor(
    where: object = None, offset: object = 0, shape: object = (4,), strides: object = (1,), **more: object
) -> PickleObject:
    """Return the call that rebuilds a tensor."""
    args = (where or storage(), offset, shape, strides, False, Dict("collections.OrderedDict"))
    return PickleObject(Global(REBUILD, "_rebuild_tensor_v2"), args + tuple(more.values()), 0)


def called(name: str, *args: object, module: str = REBUILD) -> PickleObject:
    """Return a call."""
    return PickleObject(Global(module, name), args, 0)


def members(value: object = None, storages: dict[str, bytes] | None = None) -> list[Made]:
    """Return the members of a checkpoint: the pickle first, then what torch writes beside it."""
    pickled = value if isinstance(value, bytes) else dumps({"w": tensor()} if value is None else value)
    return [
        Made("archive/data.pkl", pickled),
        Made("archive/byteorder", b"little"),
        *(Made(f"archive/data/{key}", data) for key, data in (storages or {"0": ONE}).items()),
        Made("archive/version", b"3\n"),
    ]


def changed(index: int, **fields: Any) -> list[Made]:
    """Return a checkpoint's members of which one is changed: 0 the pickle, 1 byteorder, 2 the storage."""
    changed_members = members()
    changed_members[index] = replace(changed_members[index], **fields)
    return changed_members


def torch_file(
    value: object = None, storages: dict[str, bytes] | None = None, name: str = "model.pt"
) -> Callable[[Path], Path]:
    """Return the maker of a checkpoint that holds the value."""
    return written(name, archive(members(value, storages)))


def zipped(members: Sequence[Made], name: str = "model.pt", **more: Any) -> Callable[[Path], Path]:
    """Return the maker of an archive (see zips.archive)."""
    return written(name, archive(members, **more))
