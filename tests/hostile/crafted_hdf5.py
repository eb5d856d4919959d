"""HDF5 files that lead outside, go round, declare what they do not hold, or make the HDF5 library fail."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import BAIT, Case
from tests.hostile.crafted_any import written

_LINE = "HDF5"
_NAME = "model.h5"
Make = Callable[[Path], Path]


def hdf5_maker(fill: Callable[[Any, Any], None], **options: Any) -> Make:
    """Return the maker of a file that `fill` fills, given the file and h5py, beside a small dataset."""

    def make(folder: Path) -> Path:
        import h5py  # type: ignore[import-untyped]

        with h5py.File(folder / _NAME, "w", **options) as file:
            file["whole"] = 1.0
            fill(file, h5py)
        return folder / _NAME

    return make


def _external(name: str) -> Callable[[Any, Any], None]:
    return lambda file, _: file.create_dataset("a", (8,), "u1", external=[(name, 0, 8)]) and None


def _link(name: str) -> Callable[[Any, Any], None]:
    def fill(file: Any, h5py: Any) -> None:
        file["a"] = h5py.ExternalLink(name, "/x")

    return fill


def _virtual(file: Any, h5py: Any) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(f"../{BAIT}", "x", (4,))
    file.create_virtual_dataset("a", layout)


def _soft(file: Any, h5py: Any) -> None:
    file["loop"] = h5py.SoftLink("/loop")
    file["nowhere"] = h5py.SoftLink("/../../etc/passwd")
    file["top"] = h5py.SoftLink("/")


def _cycle(file: Any, h5py: Any) -> None:
    file["g/h"] = file["/"]
    file["g/self"] = file["g"]


def _fan(file: Any, h5py: Any) -> None:
    group = file
    for _ in range(29):  # 4^29 paths
        below = group.create_group("d0")
        for number in range(1, 4):
            group[f"d{number}"] = below
        group = below
    group["leaf"] = 2.0


def _deep(file: Any, h5py: Any) -> None:
    group = file
    for _ in range(3000):
        group = group.create_group("g")


def _shape(*shape: int, **more: Any) -> Callable[[Any, Any], None]:
    return lambda file, _: file.create_dataset("a", shape, "f4", **more) and None


def _shapes(file: Any, h5py: Any) -> None:
    """Declare 60 GiB in datasets each of which is small enough to be read."""
    for number in range(240):
        file.create_dataset(f"a{number}", (1 << 26,), "f4")


def _chunk(data: bytes, shape: int = 256, chunk: int = 256, **more: Any) -> Callable[[Any, Any], None]:
    """Store one chunk of these bytes, whatever the filters would have made of it."""

    def fill(file: Any, h5py: Any) -> None:
        dataset = file.create_dataset("a", (shape,), "u1", chunks=(chunk,), maxshape=(None,), **more)
        dataset.id.write_direct_chunk((0,), data)

    return fill


def _user_filter(file: Any, h5py: Any) -> None:
    """Store a chunk behind filter 32000 (lzf), which h5py registers and nobody else must."""
    file.create_dataset("a", data=[1.0] * 64, compression="lzf")


def _others(file: Any, h5py: Any) -> None:
    import numpy as np

    file["table"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
    file.create_dataset("lists", (2,), h5py.vlen_dtype("i4"))
    file["opaque"] = np.zeros(2, "V3")
    file.create_dataset("refs", (1,), h5py.ref_dtype)
    file["enum"] = np.array([1, 2], h5py.enum_dtype({"x": 1, "y": 2}))
    file["null"] = h5py.Empty("f4")


def _strings(file: Any, h5py: Any) -> None:
    """Declare ten thousand texts of 2 GiB each, none of them stored."""
    kind = h5py.string_dtype("ascii", (1 << 31) - 1)
    file.create_dataset("a", (10_000,), kind)


def _names(file: Any, h5py: Any) -> None:
    h5py.h5g.create(file.id, b"\xff\x1b[2J\n\xe2\x80\xae")
    file.create_dataset(b"..\\x80/".replace(b"/", b"") + b"\x80", data=1.0)
    file["x" * 60_000] = 1.0


def _same_name(file: Any, h5py: Any) -> None:
    """Name one dataset by a byte and another by what that byte is spelled as."""
    file.create_dataset(b"a\xff", data=1.0)
    file.create_dataset(b"a\\xff", data=2.0)


def _many(file: Any, h5py: Any) -> None:
    """Write more datasets than a process lists with the memory that it has already."""
    for number in range(3000):
        file[f"d{number}"] = [0.0]


def _two(file: Any, h5py: Any) -> None:
    import numpy as np

    file["a"] = np.arange(64.0)
    file["b"] = np.arange(64.0) + 64


def _shared(folder: Path) -> Path:
    """Let the second dataset's data begin in the first one's."""
    import h5py

    path = hdf5_maker(_two)(folder)
    with h5py.File(path) as file:
        first, second = (file[name].id.get_offset() for name in "ab")
    data = path.read_bytes()
    old, new = (at.to_bytes(8, "little") for at in (second, first + 8))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def _looped(kind: int, key: int) -> Make:
    """Let the first child of a B-tree's root be the root, one level below itself.

    Source: HDF5 File Format Specification 3.0, III.A.1; nodes of `kind` have keys of `key` bytes.
    """

    def make(folder: Path) -> Path:
        import numpy as np

        packed = {"chunks": (8,), "compression": "gzip"}
        make = hdf5_maker(lambda file, _: file.create_dataset("a", data=np.arange(64.0), **packed) and None)
        path = make(folder)
        data = bytearray(path.read_bytes())
        at = data.index(b"TREE" + bytes((kind,)))
        data[at + 5] = 1
        data[at + 24 + key : at + 32 + key] = at.to_bytes(8, "little")
        path.write_bytes(data)
        return path

    return make


def _chunk_elsewhere(*places: int) -> Make:
    """Let the chunks of four datasets begin at these bytes of the element's own dimension, or outside.

    Source: HDF5 File Format Specification 3.0, III.A.1, the key of a chunk: size, filter mask, an offset for
    each dimension, and one for the bytes of an element, which is 0.
    """
    *offset, byte = places

    def make(folder: Path) -> Path:
        import numpy as np

        def fill(file: Any, _: Any) -> None:
            for number in range(4):
                file.create_dataset(f"a{number}", data=np.arange(8.0) + number, chunks=(8,))

        path = hdf5_maker(fill)(folder)
        data = bytearray(path.read_bytes())
        at = -1
        while (at := data.find(b"TREE\x01", at + 1)) >= 0:
            key = at + 24
            data[key + 8 : key + 24] = b"".join(number.to_bytes(8, "little") for number in (*offset, byte))
        path.write_bytes(data)
        return path

    return make


def _kind(change: Callable[[Any], None], chunks: tuple[int, ...] | None = None) -> Make:
    """Let a dataset have a type that is float32 but for one property."""

    def fill(file: Any, h5py: Any) -> None:
        import numpy as np

        kind = h5py.h5t.IEEE_F32LE.copy()
        change(kind)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if chunks is not None:
            plist.set_chunk(chunks)
        one = h5py.h5d.create(file.id, b"a", kind, h5py.h5s.create_simple((4,)), plist)
        one.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype="<f4").view("V4"), kind)

    return hdf5_maker(fill)


def _no_size(folder: Path) -> Path:
    """Let contiguous storage have an address and no size (data layout message, version 3)."""
    import h5py

    path = hdf5_maker(_two)(folder)
    with h5py.File(path) as file:
        at = file["a"].id.get_offset().to_bytes(8, "little")
    data = path.read_bytes()
    size = (512).to_bytes(8, "little")
    assert data.count(at + size) == 1
    path.write_bytes(data.replace(at + size, at + bytes(8)))
    return path


def _not_closed(folder: Path) -> Path:
    """Let the superblock say that somebody writes the file."""
    from tests.hostile import repair

    path = hdf5_maker(_two, libver="latest")(folder)
    data = path.read_bytes()
    path.write_bytes(repair.hdf5(data, data[:11] + b"\x01" + data[12:]))
    return path


def _unfilled(file: Any, h5py: Any) -> None:
    """Declare numbers that were never written, and that nothing is filled in for them."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    h5py.h5d.create(file.id, b"a", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), plist)


def _names_as(value: Any) -> Callable[[Any, Any], None]:
    """Let the attribute that names layers hold something that is not a list of texts in UTF-8."""

    def fill(file: Any, h5py: Any) -> None:
        file["dense/kernel"] = 1.0
        file.attrs["keras_version"] = "2.15.0"
        file.attrs["layer_names"] = value

    return fill


def _checked(damage: bool) -> Make:
    def make(folder: Path) -> Path:
        import h5py
        import numpy as np

        path = folder / _NAME
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=np.arange(100.0), chunks=(50,), fletcher32=True)
            at = file["a"].id.get_chunk_info(1).byte_offset
        data = bytearray(path.read_bytes())
        data[at + 9] ^= 4 * damage
        path.write_bytes(data)
        return path

    return make


def _cut(keep: Callable[[int], int]) -> Make:
    def make(folder: Path) -> Path:
        path = hdf5_maker(_two)(folder)
        data = path.read_bytes()
        path.write_bytes(data[: keep(len(data))])
        return path

    return make


def _family(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "m%d.h5", "w", driver="family", memb_size=1 << 12) as file:
        _two(file, h5py)
    return folder / "m0.h5"


def _split(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "m", "w", driver="split") as file:
        _two(file, h5py)
    (piece,) = folder.glob("m-m*")
    return piece.rename(folder / "m.h5")


def _attribute(file: Any, h5py: Any) -> None:
    """Keep 96 KB of names where the limit of the case allows 64 KB."""
    import numpy as np

    file.attrs.create("layer_names", np.array([b"a" * 1000] * 60))


def _fine(name: str, make: Make, shows: str = "", **more: Any) -> Case:
    known = {"inspect": 0, "digest": None, "convert": None, "shows": shows}
    return Case(f"hdf5-{name}", _LINE, make, **{**known, **more})


def _refused(name: str, make: Make, **more: Any) -> Case:
    return Case(f"hdf5-{name}", _LINE, make, **{"digest": None, "convert": None, **more})


def _unread(name: str, make: Make, **more: Any) -> Case:
    """Return a case whose listing is right and whose data cannot be believed."""
    return Case(f"hdf5-{name}", _LINE, make, **{"inspect": 0, "convert": None, **more})


_SECRET = f"../{BAIT}"
CASES = (
    _refused("external-storage", hdf5_maker(_external(_SECRET)), digest=2, convert=2),
    _refused("external-storage-absolute", hdf5_maker(_external("/etc/passwd"))),
    _refused("external-link", hdf5_maker(_link(_SECRET)), digest=2, convert=2),
    _refused("external-link-absolute", hdf5_maker(_link("/etc/passwd"))),
    _refused("virtual", hdf5_maker(_virtual)),
    _fine("soft-links", hdf5_maker(_soft)),
    _fine("hard-cycle", hdf5_maker(_cycle), shows="whole"),
    _fine("4-29-fan", hdf5_maker(_fan), shows="leaf"),
    _refused("3000-deep", hdf5_maker(_deep)),
    _unread("4-TiB-unset", hdf5_maker(_shape(1 << 40))),
    _unread("4-GiB-unset", hdf5_maker(_shape(1 << 30)), convert=2),
    _unread("60-GiB-unset-in-parts", hdf5_maker(_shapes)),
    _unread("chunked-unset", hdf5_maker(_shape(1 << 30, chunks=(1 << 20,), compression="gzip"))),
    _unread("2-62-elements", hdf5_maker(_shape(1 << 31, 1 << 31, chunks=(1, 1)))),
    _refused("2-66-elements", hdf5_maker(_shape(1 << 33, 1 << 33, chunks=(1, 1)))),
    _unread("chunk-of-more", hdf5_maker(_chunk(zlib.compress(bytes(1 << 22)), compression="gzip"))),
    _unread("chunk-of-less", hdf5_maker(_chunk(zlib.compress(bytes(10)), compression="gzip"))),
    _unread("chunk-cut", hdf5_maker(_chunk(zlib.compress(bytes(256))[:-6], compression="gzip"))),
    _unread("chunk-junk", hdf5_maker(_chunk(b"junk", compression="gzip"))),
    _unread("chunk-trailing", hdf5_maker(_chunk(zlib.compress(bytes(256)) + b"tail", compression="gzip"))),
    _unread(
        "chunk-shuffled-bomb",
        hdf5_maker(_chunk(zlib.compress(bytes(1 << 22)), compression="gzip", shuffle=True)),
    ),
    _unread("chunk-beyond-file", hdf5_maker(_chunk(b"x" * 100, 1 << 28, 1 << 28))),
    _unread("fletcher32-flipped", _checked(damage=True)),
    _fine("fletcher32", _checked(damage=False), digest=0),
    _refused("chunks-outside-the-shape", _chunk_elsewhere(8, 0)),
    _refused("chunks-far-outside-the-shape", _chunk_elsewhere(1 << 40, 0)),
    _refused("chunks-between-places", _chunk_elsewhere(4, 0)),
    _refused("chunks-inside-an-element", _chunk_elsewhere(0, 4)),
    _unread("float-of-another-bias", _kind(lambda kind: kind.set_ebias(126))),
    _unread("float-of-another-bias-in-chunks", _kind(lambda kind: kind.set_ebias(126), (2,))),
    _unread("float-without-a-hidden-bit", _kind(lambda kind: kind.set_norm(2))),
    _unread("float-of-another-sign-bit", _kind(lambda kind: kind.set_fields(0, 24, 8, 1, 23))),
    _refused("address-without-size", _no_size),
    _refused("not-closed-by-its-writer", _not_closed),
    _unread("never-filled", hdf5_maker(_unfilled)),
    _refused("layer-names-as-a-text", hdf5_maker(_names_as("dense"))),
    _refused("layer-names-as-a-number", hdf5_maker(_names_as(7))),
    _refused("layer-names-in-another-encoding", hdf5_maker(_names_as([b"\xff"]))),
    _unread("filter-of-users", hdf5_maker(_user_filter)),
    _fine("other-types", hdf5_maker(_others)),
    _fine("texts-unset", hdf5_maker(_strings)),
    _fine("names", hdf5_maker(_names)),
    _refused("one-name-twice", hdf5_maker(_same_name)),
    _refused("shared-bytes", _shared, digest=2, convert=2),
    _refused("btree-of-names-loops", _looped(0, 8)),
    _refused("btree-of-chunks-loops", _looped(1, 24)),
    _fine("user-block", hdf5_maker(_two, userblock_size=4096), digest=0),
    _refused("family-piece", _family),
    _refused("split-piece", _split),
    _refused("truncated-by-8", _cut(lambda size: size - 8)),
    _refused("truncated-half", _cut(lambda size: size // 2)),
    _refused("truncated-to-30", _cut(lambda size: 30)),
    _refused("magic-alone", written(_NAME, b"\x89HDF\r\n\x1a\n")),
    _refused("magic-and-ones", written(_NAME, b"\x89HDF\r\n\x1a\n" + b"\xff" * 4096)),
    _refused("objects", hdf5_maker(_two), options=("--limit", "hdf5_objects=2")),
    _refused("attribute", hdf5_maker(_attribute), options=("--limit", "json_bytes=4K")),
    _refused("memory", hdf5_maker(_many, libver="latest"), options=("--limit", "hdf5_memory=80M")),
)
