"""Writes sstables, bundles and object graphs byte by byte, right or wrong as a test asks for."""

from __future__ import annotations

from pathlib import Path

import google_crc32c

MAGIC = bytes.fromhex("57fb808b247547db")


def masked(data: bytes, running: int = 0) -> bytes:
    value = google_crc32c.extend(running, data)
    return ((((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def block(entries, interval: int = 16, restarts=None) -> bytes:
    """A block's contents; keys share their prefixes except at every `interval`-th entry."""
    out, starts, previous = bytearray(), [], b""
    for position, (key, value) in enumerate(entries):
        shared = 0
        if position % interval == 0:
            starts.append(len(out))
        else:
            while shared < min(len(key), len(previous)) and key[shared] == previous[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        previous = key
    numbers = starts or [0] if restarts is None else restarts
    return bytes(out) + b"".join(n.to_bytes(4, "little") for n in [*numbers, len(numbers)])


def framed(contents: bytes, kind: int = 0) -> bytes:
    return contents + bytes([kind]) + masked(contents + bytes([kind]))


def table_of(blocks: list[bytes], bounds: list[bytes], kind: int = 0) -> bytes:
    """A table of ready block contents; `bounds` are their keys in the index block."""
    out, index = bytearray(), []
    for contents, bound in zip(blocks, bounds, strict=True):
        index.append((bound, varint(len(out)) + varint(len(contents))))
        out += framed(contents, kind)
    meta = varint(len(out)) + varint(8)
    out += framed(block([]))
    contents = block(index, interval=1)
    handles = meta + varint(len(out)) + varint(len(contents))
    return bytes(out) + framed(contents) + handles.ljust(40, b"\0") + MAGIC


def table(entries, per_block: int = 10_000, interval: int = 16) -> bytes:
    entries = list(entries)
    chunks = [entries[at : at + per_block] for at in range(0, len(entries), per_block)]
    return table_of([block(chunk, interval) for chunk in chunks], [chunk[-1][0] for chunk in chunks])


def header(shards: int = 1, *, big: bool = False, version: bytes = b"\x08\x01") -> bytes:
    return (field(1, shards) if shards else b"") + (field(2, 1) if big else b"") + field(3, version)


def shape(*dims: int) -> bytes:
    return b"".join(field(2, field(1, dim) if dim else b"") for dim in dims)


def entry(
    dtype: int, dims: bytes, offset: int, size: int, crc: bytes, shard: int = 0, more: bytes = b""
) -> bytes:
    numbers = b"".join(field(n, v) for n, v in ((3, shard), (4, offset), (5, size)) if v)
    return field(1, dtype) + field(2, dims) + numbers + varint(6 << 3 | 5) + crc + more


def strings(*values: bytes) -> tuple[bytes, bytes]:
    """The stored bytes of a string tensor, and its masked checksum."""
    lengths = b"".join(len(v).to_bytes(4, "little") for v in values)
    own = masked(lengths)
    rest = own + b"".join(values)
    data = b"".join(varint(len(v)) for v in values) + rest
    return data, masked(rest, google_crc32c.value(lengths))


def node(children=(), attributes=(), slots=(), saver: str = "") -> bytes:
    out = bytearray()
    for name, target in children:
        out += field(1, (field(1, target) if target else b"") + field(2, name))
    for name, full_name, key in attributes:
        out += field(2, field(1, name) + field(2, full_name) + field(3, key))
    for of, name, variable in slots:
        out += field(3, field(1, of) + field(2, name) + field(3, variable))
    if saver:
        out += field(4, field(1, saver) + field(2, "object"))
    return bytes(out)


def graph(*nodes: bytes) -> bytes:
    return b"".join(field(1, data) for data in nodes)


def variable(key: str, full_name: str = "") -> bytes:
    return node(attributes=[("VARIABLE_VALUE", full_name, f"{key}/.ATTRIBUTES/VARIABLE_VALUE")])


def bundle(prefix: Path, values: dict[str, bytes], object_graph: bytes | None = None, more=()) -> str:
    """A bundle of float32 vectors by key, with a graph if one is given, and ready `more` entries."""
    data, entries = bytearray(), {b"": header(), **dict(more)}
    for key, value in values.items():
        entries[key.encode()] = entry(1, shape(len(value) // 4), len(data), len(value), masked(value))
        data += value
    if object_graph is not None:
        stored, crc = strings(object_graph)
        entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(7, b"", len(data), len(stored), crc)
        data += stored
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(table(sorted(entries.items())))
    return str(prefix)
