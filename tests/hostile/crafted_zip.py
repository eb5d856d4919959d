"""Zip archives, mostly around a checkpoint of torch's, that two readers could understand differently."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.encodings import dumps
from tests.hostile.case import Case
from tests.hostile.crafted_any import written
from tests.hostile.torch_files import ONE, changed, members, storage, tensor, zipped
from tests.hostile.zips import Made, archive, deflated, descriptor

_LINE = "zip"
_LINK, _DEVICE = 0o120777 << 16, 0o020666 << 16
_BIG = 1 << 29
_STORAGE = members()[2]


def _refused(name: str, make: Callable[[Path], Path], **more: Any) -> Case:
    return Case(f"zip-{name}", _LINE, make, **more)


def _quick(name: str, make: Callable[[Path], Path], **more: Any) -> Case:
    """Return a case of a structure that all commands meet in the same place."""
    return _refused(name, make, **{"digest": None, "convert": None, **more})


def _damaged(name: str, make: Callable[[Path], Path]) -> Case:
    """Return a case whose listing is right and whose data are not."""
    return Case(f"zip-{name}", _LINE, make, inspect=0, digest=2, convert=2)


def _fine(name: str, make: Callable[[Path], Path], shows: str = "", **more: Any) -> Case:
    expected = {"inspect": 0, "digest": 0, "convert": 0, **more}
    return Case(f"zip-{name}", _LINE, make, shows=shows, **expected)


def _local(**fields: Any) -> Callable[[Path], Path]:
    return zipped(changed(2, local=fields))


def _central(**fields: Any) -> Callable[[Path], Path]:
    return zipped(changed(2, central=fields))


def _flagged(bit: int) -> Callable[[Path], Path]:
    return zipped(changed(2, flags=1 << bit))


_HEADERS = (
    _quick("local-name-differs", _local(name=b"archive/data/1")),
    _quick("local-name-longer", _local(name=b"archive/data/01")),
    _quick("local-size-differs", _local(size=15, stored=15)),
    _quick("local-crc-differs", _local(crc=7)),
    _quick("local-method-differs", _local(method=8)),
    _quick("local-utf8-flag-differs", _local(flags=1 << 11)),
    _quick("local-descriptor-flag-differs", _local(flags=1 << 3)),
    _quick("local-unknown-flag-differs", _local(flags=1 << 9)),
    _quick("local-mark-missing", _local(mark=0x04034B51)),
    _refused("local-encrypted", _local(flags=1)),
    _quick("local-strongly-encrypted", _local(flags=1 << 6)),
    _quick("local-extra-lies", _local(extra=4000)),
    _quick("central-size-differs", _central(size=20, stored=20)),
    _quick("central-crc-differs", _central(crc=7)),
    _refused("central-encrypted", _central(flags=1)),
    _quick("both-encrypted", _flagged(0)),
    _quick("both-masked", _flagged(13)),
    _quick("both-patched", _flagged(5)),
    _quick("stored-with-two-sizes", zipped(changed(2, size=15))),
    _quick("another-disk", _central(disk=1)),
    _quick("comment-hides-the-rest", zipped(changed(2, central={"comment": 65}))),
    _quick("extra-hides-the-rest", zipped(changed(2, central={"extra": 65}))),
    _quick("name-hides-the-rest", zipped(changed(2, central={"length": 5000}))),
)

_PLACES = (
    _refused("duplicate-pickle", zipped([*members(), members()[0]])),
    _refused("duplicate-storage", zipped([*members(), Made("archive/data/0", b"x" * 16)])),
    _quick(
        "two-entries-one-header",
        zipped(
            [
                *members(storages={"0": ONE, "1": ONE[::-1]})[:3],
                Made("archive/data/1", b"", central={"header": 0}),
            ]
        ),
    ),
    _quick("offset-beyond-the-end", _central(header=1 << 30)),
    _quick("offset-of-all-ones", _central(header=0xFFFFFFFF)),
    _quick("offset-into-another", _central(header=31)),
    _quick(
        "reaches-into-the-directory",
        zipped(
            [
                *members()[:3],
                Made(
                    "archive/version",
                    b"3\n",
                    local={"stored": 90, "size": 90},
                    central={"stored": 90, "size": 90},
                ),
            ]
        ),
    ),
    _refused("prefix", zipped(members(), prefix=b"MZ" * 20)),
    _quick(
        "prefix-that-begins-like-a-zip",
        zipped(members(), prefix=b"PK\x03\x04" * 10),
    ),
    _quick("gap-between-members", zipped(changed(2, before=b"hidden bytes here, a lot"))),
    _quick("gap-like-a-descriptor", zipped(changed(2, after=descriptor(_STORAGE)))),
    _quick("gap-before-the-directory", zipped(members(), between=b"\0" * 40)),
    _quick("suffix", zipped(members(), suffix=b"\0")),
    _quick("count-too-small", zipped(members(), count=3, here=3)),
    _quick("count-too-large", zipped(members(), count=5, here=5)),
    _quick("count-of-this-disk-differs", zipped(members(), here=3)),
    _quick("count-above-the-limit", zipped(members()), options=("--limit", "members=3")),
    _quick("directory-longer-than-it-is", zipped(members(), length=1 << 20)),
    _quick("directory-offset-lies", zipped(members(), offset=3)),
    _quick("end-comment-lies", zipped(members(), room=9)),
    _quick(
        "end-record-in-the-comment",
        zipped(members(), comment=b"PK\x05\x06" + bytes(18)),
    ),
    _quick(
        "end-record-in-the-comment-that-misfits",
        zipped(members(), comment=b"PK\x05\x06" + b"\x01" * 18),
    ),
    _fine("comment", zipped(members(), comment=b"written by somebody")),
    _quick("cut-in-half", written("model.pt", archive(members())[:200])),
    _quick("cut-in-the-end-record", written("model.pt", archive(members())[:-3])),
)

_WIDE = struct.pack("<HHQQ", 1, 16, 16, 16)
_ZIP64 = (
    _fine("zip64", zipped(members(), zip64={})),
    _fine(
        "zip64-sizes", zipped(changed(2, local={"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF}, local_extra=_WIDE))
    ),
    _quick("zip64-locator-to-nowhere", zipped(members(), zip64={"at": 1 << 62})),
    _quick("zip64-locator-elsewhere", zipped(members(), zip64={"at": 0})),
    _quick("zip64-record-not-before-its-locator", zipped(members(), zip64={"gap": b"hidden" * 4})),
    _quick("zip64-size-lies", zipped(members(), zip64={"size": 1 << 63})),
    _quick("zip64-count-differs", zipped(members(), zip64={"count": 5})),
    _quick(
        "zip64-count-of-2-63",
        zipped(members(), zip64={"count": 1 << 63}, count=0xFFFF, here=0xFFFF),
    ),
    _quick("zip64-offset-of-2-63", zipped(members(), zip64={"offset": 1 << 63}, offset=0xFFFFFFFF)),
    _quick(
        "zip64-length-wraps",
        zipped(members(), zip64={"length": (1 << 64) - 1, "offset": 0}, offset=0xFFFFFFFF, length=0xFFFFFFFF),
    ),
    _quick("zip64-several-disks", zipped(members(), zip64={"disks": 2})),
    _quick("zip64-sizes-missing", _central(size=0xFFFFFFFF, stored=0xFFFFFFFF)),
    _quick(
        "zip64-sizes-twice",
        zipped(changed(2, central={"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF}, central_extra=_WIDE + _WIDE)),
    ),
    _quick(
        "zip64-size-of-2-63",
        zipped(
            changed(
                2,
                central={"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF},
                central_extra=struct.pack("<HHQQ", 1, 16, 1 << 63, 1 << 63),
            )
        ),
    ),
    _quick(
        "zip64-header-of-2-63",
        zipped(changed(2, central={"header": 0xFFFFFFFF}, central_extra=struct.pack("<HHQ", 1, 8, 1 << 63))),
    ),
)


def _zeroed(archives: list[Made]) -> list[Made]:
    return [Made(**{**vars(member), "crc": 0}) for member in archives]


def _crc(number: int) -> Callable[[Path], Path]:
    return zipped(changed(number, crc=1))


_CHECKSUMS = (
    _damaged("storage-with-a-bad-crc", _crc(2)),
    _damaged("storage-with-a-crc-of-zero", zipped(changed(2, crc=0))),
    _refused("pickle-with-a-bad-crc", _crc(0)),
    _quick("byteorder-with-a-bad-crc", _crc(1)),
    _quick("version-with-a-bad-crc", _crc(3)),
    _quick(
        "small-member-with-a-bad-crc",
        zipped([*members(), Made("archive/.data/serialization_id", b"1234", crc=5)]),
    ),
    _fine("no-crc-recorded", zipped(_zeroed(members()))),
    _fine(
        "no-crc-recorded-and-deflated",
        zipped([*_zeroed(members()[:2]), deflated("archive/data/0", ONE, crc=0)]),
    ),
)


def _packed(**more: Any) -> Made:
    return deflated("archive/data/0", ONE, **more)


def _in_place(member: Made) -> Callable[[Path], Path]:
    changed_members = members()
    return zipped([*changed_members[:2], member, changed_members[3]])


_LATER = _packed(flags=8, local={"crc": 0, "stored": 0, "size": 0})


def _described(layout: str = "<4sIII", **other: int) -> Callable[[Path], Path]:
    return _in_place(Made(**{**vars(_LATER), "after": descriptor(_LATER, layout, **other)}))


_PACKED = (
    _fine("deflated", _in_place(_packed())),
    _fine("deflated-with-a-descriptor", _described()),
    _fine("deflated-with-a-bare-descriptor", _described("<III")),
    # Info-ZIP, writing to a pipe, knows the size before and the rest after (zip 3.0).
    _fine(
        "deflated-with-a-descriptor-of-what-was-left-open",
        _in_place(Made(**{**vars(_LATER), "local": {"crc": 0, "stored": 0}, "after": descriptor(_LATER)})),
    ),
    _fine("deflated-with-a-wide-descriptor", _described("<4sIQQ")),
    _refused("descriptor-with-another-crc", _described(crc=9)),
    _quick("descriptor-with-another-size", _described(size=17)),
    _quick("descriptor-missing", _in_place(_LATER)),
    _quick(
        "descriptor-of-the-last-missing",
        zipped(
            [
                *members()[:3],
                Made("archive/version", b"3\n", flags=8, local={"crc": 0, "stored": 0, "size": 0}),
            ]
        ),
    ),
    _damaged(
        "deflated-with-bytes-behind",
        _in_place(Made(**{**vars(_packed()), "data": _packed().data + b"hidden"})),
    ),
    _damaged("deflated-cut-off", _in_place(Made(**{**vars(_packed()), "data": _packed().data[:-3]}))),
    _damaged(
        "deflated-without-an-end",
        _in_place(Made(**{**vars(_packed()), "data": b"\x00\x10\x00\xef\xff" + ONE})),
    ),
    _damaged("deflated-garbage", _in_place(Made(**{**vars(_packed()), "data": b"\xff" * 30}))),
    _refused("deflated-storage-longer", _in_place(deflated("archive/data/0", ONE * 2))),
    _damaged("deflated-more-than-declared", _in_place(deflated("archive/data/0", bytes(16 << 20), size=16))),
    _refused(
        "deflated-bomb-declared",
        zipped(
            [
                *members({"w": tensor(storage("0", _BIG), shape=(_BIG,))})[:2],
                deflated("archive/data/0", bytes(1 << 20), size=4 * _BIG),
            ]
        ),
    ),
    _quick("deflated-bomb-pickle", zipped([deflated("archive/data.pkl", bytes(9999), size=4 * _BIG)])),
    _damaged(
        "deflated-below-the-limits",
        zipped(
            [
                *members({"w": tensor(storage("0", 1 << 26), shape=(1 << 26,))})[:2],
                deflated("archive/data/0", bytes(1 << 20), size=1 << 28),
            ]
        ),
    ),
    _quick("unknown-method", zipped(changed(2, method=99))),
    _quick("bzip2", zipped(changed(0, method=12))),
)


def _named(name: str | bytes, data: bytes = b"hidden", **more: Any) -> Callable[[Path], Path]:
    return zipped([*members(), Made(name, data, **more)])


def _unicode(raw: bytes, other: bytes) -> bytes:
    body = b"\x01" + struct.pack("<I", zlib.crc32(raw)) + other
    return struct.pack("<HH", 0x7075, len(body)) + body


_OTHER = _unicode(b"archive/data/0", b"archive/data/1")
_NAMES = (
    _fine("hidden-member", _named("archive/data/1")),
    _fine("traversal-name", _named("../bait.bin"), shows="'../bait.bin'"),
    _fine("absolute-name", _named("/etc/passwd"), shows="'/etc/passwd'"),
    _fine(
        "traversal-storage",
        zipped(members({"w": tensor(storage("../../../bait.bin"))}, {"../../../bait.bin": ONE})),
    ),
    _fine("name-with-escapes", _named("archive/\x1b[31mred\x07\n"), shows=r"\x1b[31mred"),
    _fine("name-with-bidi", _named("archive/\u202egnp.exe", flags=1 << 11), shows=r"\u202e"),
    _fine("name-of-64-KB", _named("a" * 65_000), shows="aaaa"),
    _quick("name-with-nul", _named("archive/data/1\0.txt")),
    _quick("name-empty", _named("")),
    _quick("name-not-utf8", _named(b"archive/\xff\xfe", flags=1 << 11)),
    _quick("name-with-surrogates", _named(b"archive/\xed\xa0\x80", flags=1 << 11)),
    _quick(
        "name-of-code-page-437-twice",
        zipped([*members(), Made(b"archive/\x81"), Made("archive/ü", flags=1 << 11)]),
    ),
    _refused("second-name-in-unicode", zipped(changed(2, central_extra=_OTHER))),
    _quick("second-name-in-the-local-header", zipped(changed(2, local_extra=_OTHER))),
    _fine(
        "same-name-in-unicode",
        zipped(changed(2, central_extra=_unicode(b"archive/data/0", b"archive/data/0"))),
    ),
    _refused("names-differ-by-case", _named("archive/DATA/0")),
    _quick("pickles-differ-by-case", _named("archive/Data.PKL")),
    _refused("folder-like-a-file", _named("archive/data/0/", b"")),
    _quick("folder-with-bytes", _named("archive/more/", b"hidden")),
    _quick("backslash", _named("archive\\data\\0")),
    _quick("dot-in-the-way", _named("archive/./data/0")),
    _quick("up-and-down", _named("archive/x/../data/0")),
    _quick("absolute-twin", _named("/archive/data/0")),
    _quick("symbolic-link", zipped(changed(2, data=b"/etc/passwd", external=_LINK))),
    _quick("device", zipped(changed(2, external=_DEVICE))),
    _quick("two-pickles", zipped([*members(), Made("other/data.pkl", dumps(1))])),
    _refused("another-folder-first", zipped([Made("other/x", b"1"), *members()])),
    _fine("another-folder-last", _named("other/data/0", ONE), shows="other/data/0"),
    _fine("folders", zipped([Made("archive/"), Made("archive/data/"), *members()])),
    _fine(
        "zip-in-a-storage",
        zipped(
            members(
                {
                    "w": tensor(
                        storage("0", len(archive(members())) // 4), shape=(len(archive(members())) // 4,)
                    )
                },
                {"0": archive(members())[: len(archive(members())) // 4 * 4]},
            )
        ),
    ),
    _quick("zip-in-a-zip", zipped([Made("model.pt", archive(members()))], "model.zip")),
)


def _many(count: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        more = [Made(f"archive/data/{number}", b"x") for number in range(1, count)]
        return zipped([*members(), *more], zip64={}, count=0xFFFF, here=0xFFFF)(folder)

    return make


CASES = (
    *_HEADERS,
    *_PLACES,
    *_ZIP64,
    *_CHECKSUMS,
    *_PACKED,
    *_NAMES,
    _fine("70001-members", _many(70_001 - 3), digest=None, convert=None),
)
