"""Zip archives with every field at will; what is not given is what a careful writer would put there."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.encodings.archives import (
    CENTRAL,
    CENTRAL_MARK,
    DEFLATED,
    END,
    END64,
    END64_MARK,
    END_MARK,
    LOCAL,
    LOCAL_MARK,
    LOCATOR64,
    LOCATOR64_MARK,
)


@dataclass(frozen=True)
class Made:
    """A member: `data` as it lies in the file; `local` and `central` say which fields of a header differ."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    size: int | None = None
    crc: int | None = None
    external: int = 0
    comment: bytes = b""
    local_extra: bytes = b""
    central_extra: bytes = b""
    before: bytes = b""
    after: bytes = b""
    local: Mapping[str, Any] = field(default_factory=dict)
    central: Mapping[str, Any] = field(default_factory=dict)

    @property
    def raw(self) -> bytes:
        """The name's bytes."""
        return self.name if isinstance(self.name, bytes) else self.name.encode()

    @property
    def stated(self) -> dict[str, Any]:
        """What both headers say."""
        return {
            "name": self.raw,
            "method": self.method,
            "flags": self.flags,
            "crc": zlib.crc32(self.data) if self.crc is None else self.crc,
            "stored": len(self.data),
            "size": len(self.data) if self.size is None else self.size,
        }


def deflated(name: str, data: bytes, **more: Any) -> Made:
    """Return a compressed member."""
    engine = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = engine.compress(data) + engine.flush()
    return Made(name, packed, DEFLATED, **{"size": len(data), "crc": zlib.crc32(data), **more})


def archive(members: Sequence[Made], *, prefix: bytes = b"", between: bytes = b"", **end: Any) -> bytes:
    """Return the archive; `between` stands before the directory, `end` says what its end record says.

    `end` may hold `zip64`, which are the fields of a zip64 record to be put there, `comment` and `suffix`.
    """
    body, entries = bytearray(prefix), bytearray()
    for member in members:
        body += member.before
        entries += _central(member, len(body))
        body += _local(member) + member.data + member.after
    body += between
    return bytes(body + entries) + _end(len(members), len(entries), len(body), end)


def _local(member: Made) -> bytes:
    say = {**member.stated, "mark": LOCAL_MARK, "extra": len(member.local_extra), **member.local}
    sizes = (say["crc"], say["stored"], say["size"])
    head = (say["mark"], 20, say["flags"], say["method"], 0, 0x21, *sizes)
    length = say.get("length", len(say["name"]))
    return LOCAL.pack(*head, length, say["extra"]) + say["name"] + member.local_extra


def _central(member: Made, header: int) -> bytes:
    say = {
        **member.stated,
        "header": header,
        "comment": len(member.comment),
        "extra": len(member.central_extra),
        "disk": 0,
        **member.central,
    }
    sizes = (say["crc"], say["stored"], say["size"])
    lengths = (say.get("length", len(say["name"])), say["extra"], say["comment"])
    head = (CENTRAL_MARK, 0x0314, 20, say["flags"], say["method"], 0, 0x21, *sizes, *lengths)
    rest = (say["disk"], 0, member.external, say["header"])
    return CENTRAL.pack(*head, *rest) + say["name"] + member.central_extra + member.comment


def _end(count: int, length: int, offset: int, end: Mapping[str, Any]) -> bytes:
    say = {"count": count, "here": count, "length": length, "offset": offset, "disk": 0, **end}
    comment = say.get("comment", b"")
    wide = b""
    if "zip64" in say:
        more = {"count": count, "length": length, "offset": offset, "size": 44, "disks": 1, **say["zip64"]}
        at = more.get("at", offset + length)
        record = END64.pack(
            *(END64_MARK, more["size"], 45, 45, 0, 0),
            *(more["count"], more["count"], more["length"], more["offset"]),
        )
        locator = LOCATOR64.pack(LOCATOR64_MARK, 0, at, more["disks"])
        wide = record + more.get("gap", b"") + locator
    short = END.pack(
        *(END_MARK, say["disk"], 0, say["here"], say["count"], say["length"], say["offset"]),
        say.get("room", len(comment)),
    )
    return wide + short + comment + say.get("suffix", b"")


def descriptor(member: Made, layout: str = "<4sIII", **other: int) -> bytes:
    """Return the data descriptor of a member, with its mark unless the layout has no room for it."""
    fields = {**member.stated, **other}
    mark = (b"PK\x07\x08",) if "s" in layout else ()
    return struct.pack(layout, *mark, fields["crc"], fields["stored"], fields["size"])
