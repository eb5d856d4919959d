"""Mutants of seed files: the same number gives the same bytes on every machine.

There are four kinds: `bits` changes bytes in place; `spans` moves, cuts and inserts bytes; `resigned` does
either and then corrects every checksum; `structured` takes the format apart, changes one element of it (a
pickle's opcode, a protobuf field, a key of a header, a field of a zip directory) and writes it again with
correct checksums.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import pickletools
import random
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpttool.core import CkpttoolError
from ckpttool.encodings import protobuf as varint
from ckpttool.encodings import sstable
from tests.bundle_writer import masked
from tests.hostile import pickle_mutants, repair
from tests.hostile.seeds import SPLICED, Seed

KINDS = ("bits", "spans", "resigned", "structured")
Change = Callable[[bytes, random.Random], bytes]


@functools.cache
def _whole(seed: Seed) -> dict[str, bytes]:
    return seed.contents()


def kinds(seed: Seed) -> tuple[str, ...]:
    """Return the kinds of mutants that a seed has: those without checksums have nothing to correct."""
    return tuple(kind for kind in KINDS if kind != "resigned" or resignable(seed))


def resignable(seed: Seed) -> bool:
    """Return whether a seed has checksums that can be corrected."""
    return seed.covered or seed.name in (
        "torch DCP",
        "d3rlpy",
        "HDF5 fletcher32",
        "HDF5 latest",
        "HDF5 indexes",
    )


def mutant(seed: Seed, kind: str, number: int) -> dict[str, bytes]:
    """Return the files of a seed, one of them changed."""
    choose = random.Random(f"{seed.name}/{kind}/{number}")
    whole = _whole(seed)
    name = choose.choices(seed.damaged, [len(whole[name]) for name in seed.damaged])[0]
    if kind == "structured":
        return structured(seed, name, choose)
    change = in_place if kind == "bits" or (kind == "resigned" and choose.randrange(4)) else spans
    files = {**whole, name: change(whole[name], choose)}
    return repair.resigned(whole, files) if kind == "resigned" else files


# Bytes of any kind.


def changed(data: bytes, at: int, choose: random.Random) -> bytes:
    """Return the data with one flipped bit, another byte, an edge integer or a cut at a place."""
    return choose.choice((_flip, _byte, _integer, _cut))(data, at, choose)


def in_place(data: bytes, choose: random.Random) -> bytes:
    """Change one to three places and no length."""
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        if data:
            change = choose.choice((_flip, _flip, _byte, _integer, _word))
            data = change(data, choose.randrange(len(data)), choose)
    return data


def spans(data: bytes, choose: random.Random) -> bytes:
    """Cut, insert, repeat, remove or exchange runs of bytes, or join two seeds."""
    if not data:
        return bytes([choose.randrange(256)])
    at, length = choose.randrange(len(data)), choose.choice((1, 2, 4, 8, 16, choose.randint(1, 200)))
    kind = choose.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + choose.randbytes(length) + data[at:]
    if kind == 2:
        return data[: at + length] + data[at:]
    if kind == 3:
        return data[:at] + data[at + length :]
    other = choose.randrange(len(data))
    if kind == 4:
        first, second = sorted((at, other))
        length = min(length, second - first, len(data) - second)
        one, two = data[first : first + length], data[second : second + length]
        return data[:first] + two + data[first + length : second] + one + data[second + length :]
    if kind == 5:
        return data[:at] + data[other : other + length] + data[at + length :]
    more = _whole(choose.choice(SPLICED))
    other_data = more[choose.choice(sorted(more))]
    start = choose.randrange(len(other_data))
    if choose.randrange(2):
        return data[:at] + other_data[start:]
    return data[:at] + other_data[start : start + length] + data[at:]


def _flip(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at] + bytes((data[at] ^ 1 << choose.randrange(8),)) + data[at + 1 :]


def _byte(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at] + bytes((choose.randrange(256),)) + data[at + 1 :]


def _cut(data: bytes, at: int, choose: random.Random) -> bytes:
    return data[:at]


def edge(width: int, choose: random.Random) -> int:
    """Return an unsigned integer of so many bytes from the edge of some type's range."""
    top = 1 << 8 * width
    return choose.choice((0, 1, 2, top // 2 - 1, top // 2, top // 2 + 1, top - 2, top - 1))


def _integer(data: bytes, at: int, choose: random.Random) -> bytes:
    width = choose.choice((1, 2, 4, 8))
    number = edge(width, choose).to_bytes(width, choose.choice(("little", "big")))
    return (data[:at] + number + data[at + width :])[: max(len(data), at + width)]


def _word(data: bytes, at: int, choose: random.Random) -> bytes:
    """Put an aligned word of the data, such as a size or an address, in place of another one."""
    width = choose.choice((1, 2, 4, 8))
    if len(data) < 2 * width:
        return data
    places = len(data) // width
    target, source = width * (at // width % places), width * choose.randrange(places)
    return data[:target] + data[source : source + width] + data[target + width :]


# Structures. Each function changes one element and returns sound bytes otherwise.


def structured(seed: Seed, name: str, choose: random.Random) -> dict[str, bytes]:
    """Change one element of the format of a seed's file."""
    whole = dict(_whole(seed))
    data = whole[name]
    if name.endswith((".index", ".data-00000-of-00001")):
        return whole | bundle(whole, choose)
    if name == "model.ckpt":
        return whole | {name: table(data, choose)}
    try:
        change = _change(name, data)
        return whole | {name: change(data, choose)}
    except (CkpttoolError, ValueError, KeyError, IndexError, struct.error):
        return whole | {name: in_place(data, choose)}


def _change(name: str, data: bytes) -> Change:
    """Return the function that changes data of this sort."""
    suffix = name.rpartition(".")[2]
    if data[:4] == b"PK\x03\x04":
        return archive
    if suffix == "safetensors":
        return safetensors
    if suffix == "npy" or data[:6] == b"\x93NUMPY":
        return npy
    if data[:8] == b"\x89HDF\r\n\x1a\n":
        return hdf5
    if suffix == "tar":
        return tar
    if suffix == "json" or data[:1] == b"{":
        return text
    if suffix in ("pb", "onnx"):
        return protobuf
    if suffix == "py":
        return text
    if data[:1] == b"\x80" or suffix in ("pkl", "metadata"):
        return pickle
    return in_place if len(data) < 4096 else spans


# Pickles.

_ALIKE = (
    b"KMJ",  # numbers of 1, 2 and 4 bytes
    b"\x88\x89NI",
    b")]}\x8f",
    b"\x85\x86\x87tl",
    b"aeuslt0",
    b"XU\x8cTB\x8eC",
    b"hjqr\x94",
    b"Rb\x81\x92\x93oQ",
    b"012",
)
_ROWS = {ord(row.code): row for row in pickletools.opcodes}


def pickle(data: bytes, choose: random.Random) -> bytes:
    """Change one operation of a pickle, or of one of several that follow each other."""
    parts, at = [], 0
    while at < len(data) and len(parts) < 5 and data[at : at + 1] == b"\x80":
        ops = _operations(data, at)
        if not ops:
            break
        parts.append((at, ops))
        at = ops[-1][0] + len(ops[-1][1])
    if not parts:
        return in_place(data, choose)
    start, ops = choose.choices(parts, [len(ops) for _, ops in parts])[0]
    stop = ops[-1][0] + len(ops[-1][1])
    if choose.randrange(2):
        return data[:start] + pickle_mutants.mutated(data[start:stop], choose) + data[stop:]
    runs = [run for _, run in ops]
    for _ in range(choose.choice((1, 1, 1, 2))):
        runs = _operation_changed(runs, choose)
    return data[:start] + b"".join(runs) + data[stop:]


def _operations(data: bytes, start: int) -> list[tuple[int, bytes]]:
    places = []
    stop = start
    with suppress(ValueError):
        stream = io.BytesIO(data)
        stream.seek(start)
        for _, _, at in pickletools.genops(stream):
            places.append(at)
            stop = stream.tell()
    return [(at, data[at:end]) for at, end in zip(places, [*places[1:], stop], strict=True)]


def _operation_changed(runs: list[bytes], choose: random.Random) -> list[bytes]:
    at, other = choose.randrange(len(runs)), choose.randrange(len(runs))
    run = runs[at]
    kind = choose.randrange(9)
    if kind == 0:
        return [*runs[:at], *runs[at + 1 :]]
    if kind == 1:
        return [*runs[:at], run, *runs[at:]]
    if kind == 2:
        return [*runs[:at], *runs[at + 1 : at + 2], run, *runs[at + 2 :]]
    if kind == 3:
        return [*runs[:at], runs[other], *runs[at + 1 :]]
    if kind == 4:
        return [*runs[:at], runs[other], *runs[at:]]
    if kind == 5:
        alike = next((row for row in _ALIKE if run[0] in row), bytes(sorted(_ROWS)))
        return [*runs[:at], bytes([choose.choice(alike)]) + run[1:], *runs[at + 1 :]]
    if kind == 6:
        extra = choose.choice((b"0", b"2", b"(", b"1", b"N", b")", b"]", b"}", b"K\x01", b"h\x00", b"\x94"))
        return [*runs[:at], extra, *runs[at:]]
    numbers = [n for n, run in enumerate(runs) if _number(run)]
    if kind == 7 and numbers:
        at = choose.choice(numbers)
        return [*runs[:at], _encoded(runs[at], choose), *runs[at + 1 :]]
    if len(run) == 1:
        return [*runs[:at], runs[other], *runs[at + 1 :]]
    position = choose.randrange(1, len(run))
    return [*runs[:at], choose.choice((_flip, _byte, _integer))(run, position, choose), *runs[at + 1 :]]


def _number(run: bytes) -> bool:
    return run[:1] in (b"K", b"M", b"J", b"\x8a", b"\x88", b"\x89", b"G", b"h", b"q", b"j")


def _encoded(run: bytes, choose: random.Random) -> bytes:
    """Return a number in another opcode, the same one or one near it or at the edge of a range."""
    old = int.from_bytes(run[1:9], "little") if run[:1] in (b"K", b"M", b"J") else choose.randrange(20)
    new = choose.choice(
        (old, old, old + 1, old - 1, -old, 2 * old, edge(4, choose), edge(8, choose), 0, 1, -1)
    )
    form = choose.randrange(7)
    if form == 0 and 0 <= new < 256:
        return b"K" + bytes([new])
    if form == 1 and 0 <= new < 1 << 16:
        return b"M" + new.to_bytes(2, "little")
    if form == 2 and -(1 << 31) <= new < 1 << 31:
        return b"J" + new.to_bytes(4, "little", signed=True)
    if form == 3:
        return b"I%d\n" % new
    if form == 4:
        return b"L%dL\n" % new
    if form == 5:
        return choose.choice((b"\x88", b"\x89", b"G" + struct.pack(">d", new), b"F%d.0\n" % new, b"N"))
    return b"\x8a\x09" + new.to_bytes(9, "little", signed=True)


# Protobuf messages.


def protobuf(data: bytes, choose: random.Random) -> bytes:
    """Change one field of a message or of a message in it, in a way that the wire format allows."""
    fields = _fields(data)
    if not fields:
        return data + _unknown(choose)
    at = choose.randrange(len(fields))
    number, wire, value = fields[at]
    kind = choose.randrange(10)
    inner = wire == 2 and bool(value) and _fields(value) is not None
    if inner and kind < 6:
        return _joined(fields, at, [(number, wire, protobuf(value, choose))])
    if kind == 0:
        return _joined(fields, at, [])
    if kind == 1:
        return _joined(fields, at, [fields[at], (number, wire, _value(wire, value, choose))])
    if kind == 2:
        moved = [*fields[:at], *fields[at + 1 :]]
        moved.insert(choose.randrange(len(fields)), fields[at])
        return _joined(moved, len(moved), [])
    if kind == 3:
        return _joined(fields, at, []) + _field(number, choose.choice((0, 1, 2, 5)), value, choose)
    if kind == 4:
        return _joined(fields, at, [fields[at]]) + _unknown(choose)
    if kind == 5:
        return _unknown(choose) + data
    if kind == 6 and inner:
        parts = _fields(value) or []
        cut = choose.randrange(len(parts) + 1)
        halves = [_joined(part, len(part), []) for part in (parts[:cut], parts[cut:])]
        return _joined(fields, at, [(number, 2, half) for half in halves])
    if kind == 7:
        return _joined(fields, at, [fields[at], fields[choose.randrange(len(fields))]])
    return _joined(fields, at, [(number, wire, _value(wire, value, choose))])


def _fields(data: bytes) -> list[tuple[int, int, bytes]] | None:
    """Return number, wire type and value of every field (varints as stored); None for no message."""
    messages, at = [], 0
    try:
        while at < len(data):
            tag, at = varint.read_varint(data, at, len(data))
            start, wire = at, tag & 7
            if wire == 0:
                _, at = varint.read_varint(data, at, len(data))
            elif wire == 2:
                length, start = varint.read_varint(data, at, len(data))
                at = start + length
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                return None
            if at > len(data) or not tag >> 3:
                return None
            messages.append((tag >> 3, wire, data[start:at]))
    except CkpttoolError:
        return None
    return messages


def _joined(
    fields: Sequence[tuple[int, int, bytes]], at: int, new: Sequence[tuple[int, int, bytes]]
) -> bytes:
    return b"".join(
        varint.encode_varint(number << 3 | wire)
        + (varint.encode_varint(len(value)) if wire == 2 else b"")
        + value
        for number, wire, value in (*fields[:at], *new, *fields[at + 1 :])
    )


def _value(wire: int, value: bytes, choose: random.Random) -> bytes:
    if wire == 2:
        return choose.choice((in_place, spans))(value, choose)
    if wire in (1, 5):
        return choose.choice((value[::-1], edge(len(value), choose).to_bytes(len(value), "little")))
    old, _ = varint.read_varint(value, 0, len(value))
    new = choose.choice((old, old + 1, max(0, old - 1), 0, 1, 2, old << 1, old | 1 << 32, edge(8, choose)))
    written = varint.encode_varint((choose.choice((new, new, new, -new))) & (1 << 64) - 1)
    # A number may have more bytes than it needs.
    longer = choose.choice((0, 0, 0, 1, 9 - len(written)))
    if longer > 0:
        written = written[:-1] + bytes([written[-1] | 0x80]) + b"\x80" * (longer - 1) + b"\0"
    return written


def _field(number: int, wire: int, value: bytes, choose: random.Random) -> bytes:
    """Return a field with another wire type that holds about the same."""
    if wire == 0:
        value = value if value and len(value) < 10 and not any(b & 0x80 for b in value) else b"\x01"
        return varint.encode_varint(number << 3) + value[:1]
    if wire == 2:
        return varint.encode_varint(number << 3 | 2) + varint.encode_varint(len(value)) + value
    width = 8 if wire == 1 else 4
    return varint.encode_varint(number << 3 | wire) + value[:width].ljust(width, b"\0")


def _unknown(choose: random.Random) -> bytes:
    number = choose.choice((3, 5, 9, 15, 16, 100, 2047, 2048, (1 << 29) - 1))
    wire = choose.choice((0, 1, 2, 3, 5))
    if wire == 3:
        return varint.encode_varint(number << 3 | 3) + b"\x08\x01" + varint.encode_varint(number << 3 | 4)
    return _field(number, wire, b"\x02\x03", choose)


# Tables of TensorFlow.

_NAME = "ckpt-1"
_SHARD = f"{_NAME}.data-00000-of-00001"


def table(data: bytes, choose: random.Random) -> bytes:
    """Change a key or a value of a table; its checksums are right."""
    entries = [(bytes(key), bytes(value)) for key, value in sstable.read_table(data)]
    return _table(_entries_changed(entries, choose))


def _table(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    stream = io.BytesIO()
    sstable.write_table(entries, stream)
    return stream.getvalue()


def _entries_changed(entries: list[tuple[bytes, bytes]], choose: random.Random) -> list[tuple[bytes, bytes]]:
    at = choose.randrange(len(entries))
    key, value = entries[at]
    kind = choose.randrange(12)
    if kind == 0:
        changed = [*entries[:at], *entries[at + 1 :]]
    elif kind == 1:
        changed = [*entries[:at], (in_place(key, choose) if key else b"\0\0", value), *entries[at + 1 :]]
    elif kind == 2:
        changed = [*entries[:at], (key, choose.choice(entries)[1]), *entries[at + 1 :]]
    elif kind == 3:
        changed = [*entries, (key + b"x", value)]
    else:
        for _ in range(choose.choice((1, 1, 2, 3))):
            value = protobuf(value, choose)
        changed = [*entries[:at], (key, value), *entries[at + 1 :]]
    return sorted(dict(changed).items())


def bundle(whole: Mapping[str, bytes], choose: random.Random) -> dict[str, bytes]:
    """Change an entry of a bundle's index, or the object graph in its shard."""
    index = f"{_NAME}.index"
    entries = [(bytes(key), bytes(value)) for key, value in sstable.read_table(whole[index])]
    if choose.randrange(4):
        return {index: _table(_entries_changed(entries, choose))}
    at = next(n for n, (key, _) in enumerate(entries) if key.startswith(b"_CHECKPOINTABLE"))
    key, value = entries[at]
    fields = _fields(value) or []
    places = {number: varint.read_varint(raw, 0, len(raw))[0] for number, wire, raw in fields if wire == 0}
    start, size = places.get(4, 0), places[5]
    stored = whole[_SHARD][start : start + size]
    length, begin = varint.read_varint(stored, 0, len(stored))
    graph = stored[begin + 4 : begin + 4 + length]
    for _ in range(choose.choice((1, 1, 2, 3))):
        graph = protobuf(graph, choose)
    own = masked(len(graph).to_bytes(4, "little"))
    message = varint.encode_varint(len(graph)) + own + graph
    crc = masked(len(graph).to_bytes(4, "little") + own + graph)
    new = [
        (number, wire, varint.encode_varint(len(message)) if number == 5 else crc if number == 6 else raw)
        for number, wire, raw in fields
    ]
    moved = [*fields_with_offset(new, len(whole[_SHARD]))]
    entries[at] = (key, _joined(moved, len(moved), []))
    return {index: _table(entries), _SHARD: whole[_SHARD] + message}


def fields_with_offset(fields: Sequence[tuple[int, int, bytes]], offset: int) -> list[tuple[int, int, bytes]]:
    """Return a BundleEntryProto's fields with another offset."""
    return [*(field for field in fields if field[0] != 4), (4, 0, varint.encode_varint(offset))]


# Zip archives.

# Offset and width of each field, by the record's mark.
_RECORDS: Mapping[bytes, tuple[tuple[int, int], ...]] = {
    b"PK\x03\x04": ((4, 2), (6, 2), (8, 2), (10, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x01\x02": (
        *((4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2)),
        *((34, 2), (36, 2), (38, 4), (42, 4)),
    ),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\x06\x06": ((4, 8), (12, 2), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
    b"PK\x07\x08": ((4, 4), (8, 4), (12, 4)),
}


def archive(data: bytes, choose: random.Random) -> bytes:
    """Change a field of an archive's records, its list of members, or the contents of one of these."""
    kind = choose.randrange(8)
    if kind < 2:
        return _record_changed(data, choose)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        members = [(info, _member(opened, info)) for info in opened.infolist()]
    at = choose.randrange(len(members))
    info, content = members[at]
    if kind == 2:
        members = _members_changed(members, at, choose)
    else:
        # Small members are chosen as often as large ones: headers and pickles are what differs.
        members[at] = (info, _change(info.filename, content)(content, choose))
    return _zipped(members)


def _member(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with opened.open(info) as stream:
        stream._expected_crc = None  # type: ignore[attr-defined]  # archives without checksums have zeros
        return stream.read()


def _record_changed(data: bytes, choose: random.Random) -> bytes:
    places = [
        (match.start(), match.group())
        for match in re.finditer(rb"PK(\x03\x04|\x01\x02|[\x05\x06]\x06|\x06\x07|\x07\x08)", data)
    ]
    result = data
    for _ in range(choose.choice((1, 1, 2))):
        start, mark = choose.choice(places)
        at, width = choose.choice(_RECORDS[mark])
        stored = int.from_bytes(result[start + at : start + at + width], "little")
        other, _ = choose.choice(places)
        there = int.from_bytes(result[other + at : other + at + width], "little")
        # Flags and kinds are in the low bits.
        flipped = stored ^ 1 << choose.randrange(choose.choice((8, 8 * width)))
        new = choose.choice((edge(width, choose), flipped, flipped, stored + 1, there))
        new %= 1 << 8 * width
        result = result[: start + at] + new.to_bytes(width, "little") + result[start + at + width :]
    return result


def _members_changed(
    members: list[tuple[zipfile.ZipInfo, bytes]], at: int, choose: random.Random
) -> list[tuple[zipfile.ZipInfo, bytes]]:
    (info, content), other = members[at], choose.randrange(len(members))
    kind = choose.randrange(6)
    if kind == 0:
        return [*members[:at], *members[at + 1 :]]
    if kind == 1:
        return [*members, (info, choose.choice((content, members[other][1])))]
    if kind == 2:
        return [*members[:at], (info, members[other][1]), *members[at + 1 :]]
    if kind == 3:
        choose.shuffle(members)
        return members
    if kind == 4:
        renamed = zipfile.ZipInfo(
            choose.choice((info.filename + "x", "x" + info.filename, info.filename.upper()))
        )
        return [*members[:at], (renamed, content), *members[at + 1 :]]
    method = choose.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    info.compress_type = method
    return members


def _zipped(members: Sequence[tuple[zipfile.ZipInfo, bytes]]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        for old, content in members:
            info = zipfile.ZipInfo(old.filename, (1980, 1, 1, 0, 0, 0))
            info.compress_type = old.compress_type
            # zipfile itself warns of a name that comes twice, and writes it.
            target.NameToInfo.clear()
            target.writestr(info, content)
    return stream.getvalue()


def tar(data: bytes, choose: random.Random) -> bytes:
    """Change a member of a tar archive, or a field of a header, whose checksum is right."""
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        members = [(info, stored.read() if (stored := opened.extractfile(info)) else b"") for info in opened]
    at = choose.randrange(len(members))
    info, stored = members[at]
    kind = choose.randrange(8)
    if kind == 0:
        members.pop(at)
    elif kind == 1:
        members.append(choose.choice(members))
    elif kind == 2:
        info.name = choose.choice((info.name + "x", choose.choice(members)[0].name))
    else:
        members[at] = (info, pickle(stored, choose) if choose.randrange(4) else spans(stored, choose))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as target:
        for member, content in members:
            member.size = len(content)
            target.addfile(member, io.BytesIO(content) if content else None)
    return stream.getvalue()


# Headers that are text.


def safetensors(data: bytes, choose: random.Random) -> bytes:
    """Change the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header = text(data[8 : 8 + size], choose)
    if choose.randrange(2):
        header += b" " * (-len(header) % 8)
    stored = len(header) + choose.choice((0, 0, 0, 0, 0, 0, 0, 1, -1, 8))
    return max(0, stored).to_bytes(8, "little") + header + data[8 + size :]


def text(data: bytes, choose: random.Random) -> bytes:
    """Change JSON or another text: a number, a string, a pair, a bracket, a blank."""
    plain = data.decode("utf-8", "surrogateescape")
    if choose.randrange(3) == 0:
        with suppress(ValueError):
            return _value_changed(json.loads(plain), choose)
    tokens = re.findall(
        r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[\[\]{},:()]|\s+|[^"\s\[\]{},:()]+', plain
    )
    for _ in range(choose.choice((1, 1, 2))):
        tokens = _tokens_changed(tokens, choose)
    return "".join(tokens).encode("utf-8", "surrogateescape")


def _tokens_changed(tokens: list[str], choose: random.Random) -> list[str]:
    at, other = choose.randrange(len(tokens)), choose.randrange(len(tokens))
    token = tokens[at]
    kind = choose.randrange(8)
    numbers = [n for n, token in enumerate(tokens) if token.lstrip("-").isdigit()]
    if kind < 3 and numbers:
        at = choose.choice(numbers)
        number = int(tokens[at])
        new = choose.choice(
            (
                *(
                    str(number + 1),
                    str(number - 1),
                    str(number * 2),
                    f"{number}.0",
                    f"{number}e0",
                    f"0{number}",
                ),
                *(
                    f"-{number}",
                    "0",
                    "true",
                    "null",
                    f'"{number}"',
                    str(edge(8, choose)),
                    str(edge(4, choose)),
                ),
                *(
                    tokens[choose.choice(numbers)],
                    f"+{number}",
                    f"{number}L",
                    f"{number}_0",
                    f"0x{number:x}",
                    "NaN",
                ),
            )
        )
        return [*tokens[:at], new, *tokens[at + 1 :]]
    if kind == 3:
        return [*tokens[:at], *tokens[at + 1 :]]
    if kind == 4:
        end = at + choose.choice((1, 2, 3, 4, 8))
        return [*tokens[:end], *tokens[at:]]
    if kind == 5:
        return [
            *tokens[:at],
            choose.choice((" ", "\n", "\t", "\0", "\ufeff", ",", "]", "\x0b")),
            *tokens[at:],
        ]
    if kind == 6 and token.startswith(('"', "'")) and len(token) > 2:
        letter = choose.randrange(1, len(token) - 1)
        new = choose.choice(
            (f"\\u{ord(token[letter]):04x}", "\\n", "\\ud800", "\0", "x", "", token[letter].upper())
        )
        return [*tokens[:at], token[:letter] + new + token[letter + 1 :], *tokens[at + 1 :]]
    return [*tokens[:at], tokens[other], *tokens[at + 1 :]]


def _value_changed(value: Any, choose: random.Random) -> bytes:
    """Change a value of a JSON document and write it; a key may then come twice."""
    spots: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        pairs = (
            inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        )
        for key, item in pairs:
            spots.append((inner, key))
            walk(item)

    walk(value)
    if spots:
        home, key = choose.choice(spots)
        other_home, other_key = choose.choice(spots)
        kind = choose.randrange(5)
        if kind == 0:
            del home[key]
        elif kind == 1 and not isinstance(other_home[other_key], dict | list):
            home[key] = other_home[other_key]
        elif kind == 2 and isinstance(home, dict):
            home["twice"] = home[key]
        elif kind == 3:
            home[key] = choose.choice((0, 1, -1, 1.5, True, None, "", [], {}, [1], 1 << 63))
        else:
            home[key], other = None, home[key]
            home[key] = [other] if choose.randrange(2) else other
    written = json.dumps(value, separators=choose.choice(((",", ":"), (", ", ": "))))
    return written.replace('"twice"', choose.choice(('"twice"', '"shape"', '"dtype"'))).encode()


def npy(data: bytes, choose: random.Random) -> bytes:
    """Change the header of an array."""
    version = data[6]
    width = 2 if version == 1 else 4
    size = int.from_bytes(data[8 : 8 + width], "little")
    header, rest = data[8 + width : 8 + width + size], data[8 + width + size :]
    kind = choose.randrange(6)
    if kind < 3:
        header_value = ast.literal_eval(header.decode("latin-1").strip())
        _described(header_value, choose)
        header = repr(header_value).encode("latin-1", "replace")
    elif kind < 5:
        header = text(header.strip(), choose)
    else:
        rest = spans(rest, choose)
    version = choose.choice((version, version, version, version, 1, 2, 3, 4, 0))
    width = 2 if version == 1 else 4
    header += b" " * (-(len(header) + 9 + width) % 64) + b"\n"
    return (
        data[:6]
        + bytes([version, choose.choice((0, 0, 0, 0, 0, 1))])
        + len(header).to_bytes(width, "little")
        + header
        + rest
    )


def _described(header: dict[str, Any], choose: random.Random) -> None:
    kind = choose.randrange(4)
    if kind == 0:
        codes = (
            "<f4",
            ">f4",
            "=f4",
            "|f4",
            "f4",
            "<i4",
            ">i4",
            "<f2",
            "<u4",
            "<c8",
            "|u1",
            "|b1",
            "|i1",
            "<f8",
            "|S4",
        )
        codes = (
            *codes,
            "<U1",
            "|V4",
            "|O",
            "<M8[s]",
            "<i8",
            "float32",
            "f",
            ">f2",
            "<f",
            "?",
            "d",
            "i4",
            "<f16",
            "",
        )
        more = (
            [("a", "<f4")],
            "(2,)<f4",
            "<f4,<f4",
            ("<f4", (2,)),
            4,
            None,
            b"<f4",
            {"names": ["a"], "formats": ["<f4"]},
        )
        header["descr"] = choose.choice((*codes, *codes, *more))
    elif kind == 1:
        header["fortran_order"] = choose.choice((True, True, True, 1, 0, "True", None, 2.0, []))
    elif kind == 2:
        shape = header["shape"]
        total = 1
        for extent in shape:
            total *= extent
        shapes: Sequence[Any] = (
            shape[::-1],
            (total,),
            (1, *shape),
            (*shape, 1),
            (),
            (total // 2, 2),
            list(shape),
            (-1,),
            (True, *shape),
        )
        header["shape"] = choose.choice(
            (*shapes, total, (float(total),), (total, 0), (0,), (total + 1,), (edge(8, choose),), None)
        )
    else:
        key = choose.choice(list(header))
        value = header.pop(key)
        if choose.randrange(3):
            header[choose.choice((key, "extra", key.upper(), 7))] = value


# HDF5.


def hdf5(data: bytes, choose: random.Random) -> bytes:
    """Change a message of an object's header, or a word near the mark of a structure."""
    messages = _messages(data)
    marks = [
        match.start()
        for match in re.finditer(rb"TREE|SNOD|HEAP|GCOL|OHDR|OCHK|BTHD|BTLF|FRHP|FHDB|FADB|FAHD|EAHD", data)
    ]
    flipped = data
    for _ in range(choose.choice((1, 1, 2))):
        kind = choose.randrange(6)
        if kind < 4 and messages:
            kind_at, start, size = choose.choice(messages)
            if not size or choose.randrange(6) == 0:
                flipped = _flip(flipped, kind_at + choose.randrange(4), choose)
                continue
            alike = [item for item in messages if data[item[0]] == data[kind_at] and item[2] == size]
            other = choose.choice(alike)
            if kind == 0 and len(alike) > 1:
                flipped = flipped[:start] + data[other[1] : other[1] + size] + flipped[start + size :]
                continue
            at = start + choose.randrange(min(size, choose.choice((8, size))))
        elif marks:
            at = min(len(data) - 1, choose.choice(marks) + choose.randrange(4, 40))
        else:
            at = choose.randrange(len(data))
        flipped = choose.choice((_flip, _byte, _integer, _word))(flipped, at, choose)
    return repair.hdf5(data, flipped)


def _messages(data: bytes) -> list[tuple[int, int, int]]:
    """Return where each header message's kind and contents stand, and the contents' size."""
    messages: list[tuple[int, int, int]] = []
    for at in range(0, len(data) - 16, 8):
        # A header of version 1: its number of messages, one reference, its size.
        version, _, count, references, size = struct.unpack_from("<BBHII", data, at)
        if version != 1 or references != 1 or not 0 < count < 100 or not 8 <= size <= len(data):
            continue
        position, stop = at + 16, min(len(data) - 8, at + 16 + size)
        while position < stop:
            kind, length = struct.unpack_from("<HH", data, position)
            if kind > 0x18:
                break
            messages.append((position, position + 8, min(length, len(data) - position - 8)))
            position += 8 + length
    for start in (match.start() for match in re.finditer(rb"OHDR\x02", data)):
        flags = data[start + 5]
        position = start + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = int.from_bytes(data[position : position + width], "little")
        position += width
        stop, head = min(len(data), position + size), 6 if flags & 4 else 4
        while position + head <= stop:
            length = int.from_bytes(data[position + 1 : position + 3], "little")
            messages.append((position, position + head, min(length, stop - position - head)))
            position += head + length
    return [message for message in messages if message[1] + message[2] <= len(data)]
