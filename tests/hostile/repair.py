"""Makes the checksums of damaged files right again: whoever damages a file on purpose does so, too."""

from __future__ import annotations

import functools
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import google_crc32c
import numpy as np

from ckpttool.core import FormatError
from ckpttool.encodings import protobuf
from ckpttool.formats import fletcher32
from tests.bundle_writer import MAGIC, masked

_LOCAL_CRC, _CENTRAL_CRC = 14, 16
_FOOTER = 48
_STRING = 7
_HDF5 = b"\x89HDF\r\n\x1a\n"


def resigned(whole: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return damaged files with right checksums, as far as what is left of them has places for these."""
    signed = dict(files)
    changed = [name for name in files if files[name] != whole[name]]
    for name in changed:
        if len(files[name]) != len(whole[name]):
            continue
        if whole[name].startswith(_HDF5):
            signed[name] = hdf5(whole[name], files[name])
        if b"PK\x03\x04" in whole[name]:
            signed[name] = _archive(whole[name], files[name])
        index = name.replace(".data-00000-of-00001", ".index")
        if index != name and index in signed:
            signed[index] = _tensors(whole[index], signed[index], files[name])
    for name, data in signed.items():
        if whole[name].endswith(MAGIC) and len(data) == len(whole[name]):
            signed[name] = _table(whole[name], data)
    return signed


def _archive(whole: bytes, data: bytes) -> bytes:
    """Sign the archive in a file, and the archives among its members before it."""
    start, end = whole.index(b"PK\x03\x04"), whole.rindex(b"PK\x05\x06") + 22
    signed, inner = bytearray(data), whole[start:end]
    for info in zipfile.ZipFile(io.BytesIO(inner)).infolist():
        at = start + _payload(inner, info.header_offset)
        stop = at + info.compress_size
        if inner[at - start :].startswith(b"PK\x03\x04"):
            signed[at:stop] = _archive(whole[at:stop], bytes(signed[at:stop]))
        if info.CRC:
            _sign(whole, signed, info, start, at)
    return bytes(signed)


def _payload(archive: bytes, header: int) -> int:
    name, extra = struct.unpack_from("<HH", archive, header + 26)
    return int(header + 30 + name + extra)


def _sign(whole: bytes, content: bytearray, info: zipfile.ZipInfo, start: int, at: int) -> None:
    stored = bytes(content[at : at + info.compress_size])
    if info.compress_type == zipfile.ZIP_DEFLATED:
        try:
            stored = zlib.decompress(stored, -15)
        except zlib.error:
            return
    before, crc = info.CRC.to_bytes(4, "little"), zlib.crc32(stored).to_bytes(4, "little")
    name = info.orig_filename.encode()
    central = whole.index(name, whole.index(b"PK\x01\x02", at + info.compress_size)) - 46
    after = at + info.compress_size
    # The descriptor behind the data has a mark of four bytes, or none.
    for position in (start + info.header_offset + _LOCAL_CRC, central + _CENTRAL_CRC, after, after + 4):
        if whole[position : position + 4] == before:
            content[position : position + 4] = crc


class _Tensor(NamedTuple):
    crc: bytes
    offset: int
    size: int
    texts: int | None


def _tensors(index: bytes, content: bytes, data: bytes) -> bytes:
    """Put the right checksums of all tensors of a shard into its index."""
    for tensor in _entries(index):
        stored = data[tensor.offset : tensor.offset + tensor.size]
        right = masked(stored) if tensor.texts is None else _of_texts(stored, tensor.texts)
        content = content.replace(tensor.crc, right or tensor.crc, 1)
    return content


def _of_texts(stored: bytes, count: int) -> bytes | None:
    """Return the checksum of a tensor of texts, which is over their lengths as fixed numbers."""
    lengths, at = b"", 0
    try:
        for _ in range(count):
            length, at = protobuf.read_varint(stored, at, len(stored))
            lengths += length.to_bytes(4, "little")
    except (FormatError, OverflowError):
        return None
    return masked(stored[at:], google_crc32c.value(lengths))


def _entries(index: bytes) -> Iterator[_Tensor]:
    for _, handle in _keyed(index, *_handles(index[-_FOOTER:])[1]):
        for key, value in _keyed(index, *_handles(handle)[0]):
            fields = dict(protobuf.parse_fields(value))
            kind, offset, size, crc = (protobuf.as_int(fields.get(n, 0)) for n in (1, 4, 5, 6))
            dims = [
                value
                for number, value in protobuf.iter_fields(protobuf.as_message(fields.get(2, b"")))
                if number == 2
            ]
            texts = math.prod(protobuf.as_int(dict(protobuf.parse_fields(dim))[1]) for dim in dims)
            if key and crc:
                yield _Tensor(crc.to_bytes(4, "little"), offset, size, texts if kind == _STRING else None)


def _handles(data: bytes) -> list[tuple[int, int]]:
    """Return the places that stand one after the other: a footer has two, an index block's value one."""
    numbers, at = [], 0
    while at < len(data) and len(numbers) < 4:
        number, at = protobuf.read_varint(data, at, len(data))
        numbers.append(number)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _keyed(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Go through the entries of a sound block that is not compressed."""
    block = table[offset : offset + size]
    stop = size - 4 * (1 + int.from_bytes(block[-4:], "little"))
    key, at = b"", 0
    while at < stop:
        shared, at = protobuf.read_varint(block, at, stop)
        unshared, at = protobuf.read_varint(block, at, stop)
        length, at = protobuf.read_varint(block, at, stop)
        key = key[:shared] + block[at : at + unshared]
        yield key, block[at + unshared : at + unshared + length]
        at += unshared + length


def _table(whole: bytes, data: bytes) -> bytes:
    """Sign every block of a table; `whole` says where they lie."""
    signed = bytearray(data)
    meta, index = _handles(whole[-_FOOTER:])[:2]
    for offset, size in (*(_handles(handle)[0] for _, handle in _keyed(whole, *index)), meta, index):
        stop = offset + size + 1
        signed[stop : stop + 4] = masked(bytes(signed[offset:stop]))
    return bytes(signed)


# HDF5.


def hdf5(whole: bytes, data: bytes) -> bytes:
    """Correct the checksums of a file: of chunks with a Fletcher-32 filter, and of metadata.

    `whole` is the sound file of the same layout, which says where they are.
    """
    signed = bytearray(data)
    for start, size in _chunks(whole):
        stop = start + size - 4
        signed[stop : stop + 4] = fletcher32(bytes(signed[start:stop])).to_bytes(4, "little")
    for start, stop in _hashed(whole):
        signed[stop : stop + 4] = lookup3(bytes(signed[start:stop])).to_bytes(4, "little")
    return bytes(signed)


@functools.cache
def _chunks(whole: bytes) -> tuple[tuple[int, int], ...]:
    import h5py  # type: ignore[import-untyped]

    chunks = []

    def visit(_: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.chunks and item.fletcher32:
            for number in range(item.id.get_num_chunks()):
                info = item.id.get_chunk_info(number)
                chunks.append((info.byte_offset, info.size))

    with h5py.File(io.BytesIO(whole), "r") as file:
        file.visititems(visit)
    return tuple(chunks)


@functools.cache
def _hashed(whole: bytes) -> tuple[tuple[int, int], ...]:
    """Return the runs of metadata that a checksum of four bytes follows, and the checksum is right."""
    runs = [(0, 44)] if whole[8] in (2, 3) else []
    for mark in (b"OHDR", b"OCHK", b"BTHD", b"BTLF", b"FRHP", b"FHDB", b"FADB", b"FAHD", b"EAHD"):
        at = whole.find(mark)
        while at >= 0:
            # The size is known by the checksum that follows.
            stops = range(at + 4, min(len(whole) - 4, at + 2048))
            sums = lookup3_prefixes(whole[at : stops.stop], stops.start - at)
            runs += [
                (at, n)
                for n, value in zip(stops, sums, strict=True)
                if whole[n : n + 4] == value.to_bytes(4, "little")
            ][:1]
            at = whole.find(mark, at + 1)
    return tuple(runs)


def lookup3(data: bytes) -> int:
    """Return Jenkins's hash of metadata (H5checksum.c, H5_checksum_lookup3 with an initial value of 0)."""
    mask = 0xFFFFFFFF
    a = b = c = 0xDEADBEEF + len(data) & mask

    def turned(value: int, by: int) -> int:
        return (value << by | value >> 32 - by) & mask

    at, left = 0, len(data)
    while left > 12:
        x, y, z = struct.unpack_from("<III", data, at)
        a, b, c = a + x & mask, b + y & mask, c + z & mask
        for by in (4, 6, 8, 16, 19, 4):
            a = (a - c & mask) ^ turned(c, by)
            c = c + b & mask
            a, b, c = b, c, a
        at, left = at + 12, left - 12
    if not left:
        return c
    x, y, z = struct.unpack("<III", data[at:].ljust(12, b"\0"))
    a, b, c = a + x & mask, b + y & mask, c + z & mask
    c = (c ^ b) - turned(b, 14) & mask
    a = (a ^ c) - turned(c, 11) & mask
    b = (b ^ a) - turned(a, 25) & mask
    c = (c ^ b) - turned(b, 16) & mask
    a = (a ^ c) - turned(c, 4) & mask
    b = (b ^ a) - turned(a, 14) & mask
    return (c ^ b) - turned(b, 24) & mask


def lookup3_prefixes(data: bytes, shortest: int) -> list[int]:
    """Return `lookup3(data[:n])` for n from `shortest` to one less than the length, all computed at once."""
    lengths = np.arange(shortest, len(data), dtype=np.uint32)
    if not len(lengths):
        return []

    def turned(value: np.ndarray, by: int) -> np.ndarray:
        return value << np.uint32(by) | value >> np.uint32(32 - by)

    sums = np.tile(np.uint32(0xDEADBEEF) + lengths, (3, 1))
    for block in range((len(data) - 2) // 12):
        # Lengths that end in this block have only their last step left.
        first = max(0, 12 * (block + 1) + 1 - shortest)
        a, b, c = sums[:, first:] + np.frombuffer(data, "<u4", 3, 12 * block)[:, None]
        for by in (4, 6, 8, 16, 19, 4):
            a = (a - c) ^ turned(c, by)
            c = c + b
            a, b, c = b, c, a
        sums[:, first:] = a, b, c
    tails = b"".join(data[(n - 1) // 12 * 12 : n].ljust(12, b"\0") for n in range(shortest, len(data)))
    a, b, c = sums + np.frombuffer(tails, "<u4").reshape(-1, 3).T
    c = (c ^ b) - turned(b, 14)
    a = (a ^ c) - turned(c, 11)
    b = (b ^ a) - turned(a, 25)
    c = (c ^ b) - turned(b, 16)
    a = (a ^ c) - turned(c, 4)
    b = (b ^ a) - turned(a, 14)
    return list(map(int, (c ^ b) - turned(b, 24)))
