"""One nested value in every container that torch's files have had; PyTorch writes whatever it still can."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def storages(torch: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Give each storage below the value once, with its tensors' element type."""
    pointers: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in pointers:
                pointers.add(storage.data_ptr())
                yield storage, one.dtype
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one


def byteswap(torch: Any, storage: Any, dtype: Any) -> None:
    """Turn every number of the storage around in place."""
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    if storage.nbytes() and width > 1:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        flat.copy_(flat.reshape(-1, width).flip(1).reshape(-1))


def repacked(data: bytes, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> bytes:
    """Return the archive with each member's name and bytes changed; None leaves one out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            changed = change(name, old.read(name))
            if changed is not None:
                new.writestr(*changed)
    return stream.getvalue()


class Unseekable(io.RawIOBase):
    """A pipe: whoever writes a zip file to it puts sizes and checksums behind the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def plain(torch: Any, value: Any, folder: Path) -> Path:
    path = folder / "plain.pt"
    torch.save(value, path)
    return path


def aligned(torch: Any, value: Any, folder: Path) -> Path:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = 4096
    try:
        torch.save(value, folder / "aligned")
    finally:
        config.save.storage_alignment = before
    return folder / "aligned"


def unrecorded(torch: Any, value: Any, folder: Path) -> Path:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, folder / "un recorded.#1.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    return folder / "un recorded.#1.pth"


def buffered(torch: Any, value: Any, folder: Path) -> Path:
    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / "buffered.bin").write_bytes(stream.getvalue())
    return folder / "buffered.bin"


def big(torch: Any, value: Any, folder: Path) -> Path:
    """What a big-endian machine writes: the same numbers, turned around in every storage."""
    all_storages = list(storages(torch, value))
    stream = io.BytesIO()
    for storage, dtype in all_storages:
        byteswap(torch, storage, dtype)
    torch.save(value, stream)
    for storage, dtype in all_storages:
        byteswap(torch, storage, dtype)
    changed = repacked(
        stream.getvalue(), lambda name, data: (name, b"big" if name.endswith("/byteorder") else data)
    )
    (folder / "big.pt").write_bytes(changed)
    return folder / "big.pt"


def piped(torch: Any, value: Any, folder: Path) -> Path:
    """What another zip program makes: another folder's name, compressed, sizes behind the data."""
    stream, pipe = io.BytesIO(), Unseekable()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as new:
        for name in sorted(old.namelist()):
            new.writestr(f"größe/{name.partition('/')[2]}", old.read(name))
    (folder / "piped.zip").write_bytes(pipe.data)
    return folder / "piped.zip"


def unpacked(torch: Any, value: Any, folder: Path) -> Path:
    with zipfile.ZipFile(plain(torch, value, folder)) as archive:
        archive.extractall(folder / "out")
    return folder / "out" / "plain"


def unpacked_below(torch: Any, value: Any, folder: Path) -> Path:
    return unpacked(torch, value, folder).parent


def unpacked_pickle(torch: Any, value: Any, folder: Path) -> Path:
    return unpacked(torch, value, folder) / "data.pkl"


def stream(torch: Any, value: Any, folder: Path, protocol: int = 2) -> Path:
    path = folder / f"stream{protocol}"
    torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return path


def stream4(torch: Any, value: Any, folder: Path) -> Path:
    return stream(torch, value, folder, 4)


# Containers of today's torch by name; all of them hold the same tree.
FORMS: dict[str, Callable[[Any, Any, Path], Path]] = {
    writer.__name__: writer
    for writer in (
        aligned, unrecorded, buffered, big, piped, unpacked, unpacked_below, unpacked_pickle, stream, stream4
    )
}  # fmt: skip


def tar(torch: Any, value: Any, path: Path, *, first: bool = False, pax: bool = False) -> Path:
    """Write what torch 0.1.9 wrote, or (`first`) what it wrote before its first release.

    Source: torch/serialization.py, _save, of those times. Storages are named by their addresses.
    """
    tensors: dict[int, Any] = {}
    kept: dict[int, Any] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> str | None:
            if isinstance(one, torch.Tensor):
                tensors[id(one)] = one
                return str(id(one))
            return None

    objects = io.BytesIO()
    Pickler(objects, 2).dump(value)
    members = {"sys_info": pickle.dumps(SYS_INFO, 2), "pickle": objects.getvalue()}
    members["tensors"] = pickle.dumps(len(tensors), 2)
    for key, one in tensors.items():
        storage = one.untyped_storage()
        kept[storage._cdata] = one
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[one.dtype])
        description = (key, kind, storage._cdata) if first else (key, storage._cdata, kind)
        members["tensors"] += pickle.dumps(description, 2) + struct.pack("<i4s", one.dim(), b"\xaa" * 4)
        numbers = (*one.shape, *one.stride(), one.storage_offset())
        members["tensors"] += struct.pack(f"<{len(numbers)}q", *numbers)
    members["storages"] = pickle.dumps(len(kept), 2)
    for key, one in kept.items():
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[one.dtype])
        data = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
        members["storages"] += pickle.dumps((key, kind) if first else (key, "cpu", kind), 2)
        members["storages"] += struct.pack("<q", len(data) // one.dtype.itemsize) + data.numpy().tobytes()
    if not first:
        members["storages"] += pickle.dumps([], 2)
    path.write_bytes(packed(members, pax=pax))
    return path


SYS_INFO = {
    "protocol_version": 1000,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 8},
}


def packed(members: dict[str, bytes], *, pax: bool = False) -> bytes:
    """Return a tar archive of the members; `pax` gives each a time that needs a header of its own."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1485000000.5 if pax else 1485000000
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def state(torch: Any) -> dict[str, Any]:
    """Return a small state with everything that the containers must keep apart or together."""
    base = torch.arange(60.0).reshape(3, 20)
    return {
        "net": collections.OrderedDict(weight=torch.nn.Parameter(base), bias=torch.ones(30)),
        "views": [base[1], base.t(), base[:, ::2], (base, base.expand(2, 3, 20))],
        "small": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "half": torch.arange(40).to(torch.bfloat16),
        "untyped": torch.arange(40).to(torch.uint16),
        "eighth": torch.linspace(-1, 1, 50).to(torch.float8_e4m3fn),
        "wave": torch.complex(torch.arange(8.0), torch.ones(8)).conj(),
        "step": 7,
        "name": "x",
    }
