"""TensorFlow's checkpoints with a damaged or hostile index: its table, its header, its entries."""

from __future__ import annotations

import cramjam

from tests.bundle_writer import block, entry, field, framed, header, masked, shape, strings, table, table_of
from tests.bundle_writer import varint as number
from tests.hostile.bundles import CRC, FLOATS, GOOD, Make, file, footed, handle, index_of, listed, texts
from tests.hostile.case import Case

_LINE = "TF index"
_WHOLE = index_of({b"w": GOOD})
_PAIRS = [(b"", header()), (b"w", GOOD)]


def _case(name: str, make: Make) -> Case:
    """A case that is refused when it is listed, so by `digest` as by `convert`."""
    return Case(f"bundle-{name}", _LINE, make, digest=None)


def _reads(name: str, make: Make, shows: str = "w") -> Case:
    return Case(f"bundle-{name}", _LINE, make, 0, 0, 0, shows=shows)


def _lists(name: str, make: Make) -> Case:
    """A case that is listed, and whose tensor cannot be read."""
    return Case(f"bundle-{name}", _LINE, make, 0)


def _flipped(at: int) -> bytes:
    data = bytearray(_WHOLE)
    data[at] ^= 1
    return bytes(data)


def _tabled(contents: bytes, kind: int = 0) -> bytes:
    return table_of([contents], [b"z"], kind)


def _snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def _named(keys: list[bytes]) -> bytes:
    """A block of keys in this order, without shared parts."""
    return block([(b"", header()), *((key, GOOD) for key in keys)], interval=1)


def _many(count: int) -> bytes:
    """A block of empty vectors."""
    value = entry(1, shape(0), 0, 0, masked(b""))
    return block([(b"", header()), *((b"%07d" % n, value) for n in range(count))])


_BIG = FLOATS[3::-1] + FLOATS[7:3:-1] + FLOATS[11:7:-1] + FLOATS[15:11:-1]

_TABLE = (
    _case("empty", file(b"")),
    *(
        _case(f"cut-{name}", file(_WHOLE[:end]))
        for name, end in (
            ("1", 1),
            ("47", 47),
            ("minus-1", -1),
            ("minus-8", -8),
            ("half", len(_WHOLE) // 2),
        )
    ),
    _case("magic", file(_flipped(len(_WHOLE) - 1))),
    _case("footer-varint", file(footed(b"\xff" * 11, b""))),
    _case("handle-beyond", file(footed(handle(10_000, 8), handle(0, 8)))),
    _case("handle-2-63", file(footed(handle(0, 1 << 63), handle(0, 8)))),
    _case("handle-wraps", file(footed(handle((1 << 64) - 1, 8), handle(0, 8)))),
    _case("handle-64-gib", file(footed(handle(0, 64 << 30), handle(0, 8)))),
    _case("crc-of-entries", file(_flipped(10))),
    _case("crc-of-index", file(_flipped(len(_WHOLE) - 60))),
    _case("prefix-bytes", file(b"\0" * 7 + _WHOLE)),
    _case("suffix-bytes", file(_WHOLE + b"\0" * 7)),
    *(
        _case(f"restarts-{count}", file(_tabled(block(_PAIRS)[:-4] + count.to_bytes(4, "little"))))
        for count in ((1 << 31) - 1, (1 << 32) - 1, 0)
    ),
    _case("restart-outside", file(_tabled(block(_PAIRS, restarts=[0, 5000])))),
    _case("shares-nothing-before", file(_tabled(b"\5\1\0w" + bytes(4) + b"\1\0\0\0"))),
    _case("value-beyond", file(_tabled(b"\0\1\x7fw" + bytes(4) + b"\1\0\0\0"))),
    _case(
        "long-keys",
        file(
            _tabled(
                b"".join(
                    (
                        b"\0" + number(1 << 20) + b"\0" + bytes(1 << 20),
                        *(number((1 << 20) + n) + b"\1\0\1" for n in range(200)),
                    )
                )
                + bytes(4)
                + b"\1\0\0\0"
            )
        ),
    ),
    _reads("snappy", file(_tabled(_snappy(block(_PAIRS)), 1))),
    _case("snappy-damaged", file(_tabled(_snappy(block(_PAIRS))[:-1], 1))),
    _case("snappy-lies", file(_tabled(number(1 << 40) + bytes(20), 1))),
    _case("snappy-bomb", file(_tabled(_snappy(bytes(65 << 20)), 1))),
    Case(
        *("bundle-snappy-entries", _LINE, file(_tabled(_snappy(_many(3000)), 1))),
        digest=None,
        options=("--limit", "entries=2000"),
    ),
    _case("compression-9", file(_tabled(block(_PAIRS), 9))),
    _case("key-twice", file(_tabled(_named([b"w", b"w"])))),
    _case("keys-unsorted", file(_tabled(_named([b"w", b"a"])))),
    _case(
        "keys-unsorted-across-blocks",
        file(table_of([block(_PAIRS), block([(b"a", GOOD)])], [b"w", b"z"])),
    ),
    _case(
        "block-twice",
        file(
            (one := framed(block(_PAIRS)))
            + framed(block([]))
            + framed(twice := block([(b"w", handle(0, len(one) - 5)), (b"x", handle(0, len(one) - 5))], 1))
            + (handle(len(one), 8) + handle(len(one) + 13, len(twice))).ljust(40, b"\0")
            + _WHOLE[-8:]
        ),
    ),
)

_HEADER = (
    _case("no-header", file(table([(b"w", GOOD)]))),
    _case("nothing", file(table([]))),
    _case("header-garbage", file(index_of({b"w": GOOD}, b"\xff" * 11))),
    _case("header-nested", file(index_of({b"w": GOOD}, b"\x0b" * 5000))),
    *(_case(f"shards-{count}", file(index_of({b"w": GOOD}, header(count)))) for count in (0, -1)),
    _lists("shards-2147483647", file(index_of({b"w": GOOD}, header((1 << 31) - 1)))),
    _reads(
        "big-endian", file(index_of({b"w": entry(1, shape(4), 0, 16, masked(_BIG))}, header(big=True)), _BIG)
    ),
    _case("endianness-2", file(index_of({b"w": GOOD}, field(1, 1) + field(2, 2)))),
    _case("newer", file(index_of({b"w": GOOD}, header(version=field(1, 9) + field(2, 2))))),
    _case(
        "bad-consumer",
        file(index_of({b"w": GOOD}, header(version=field(1, 1) + field(3, 1)))),
    ),
)


_ENTRIES = (
    *(_case(f"type-{kind}", listed(entry(kind, shape(4), 0, 16, CRC))) for kind in (0, 99, 101, -1, 1 << 40)),
    _case("type-resource", listed(entry(20, shape(4), 0, 16, CRC))),
    _lists("type-variant", listed(entry(21, shape(4), 0, 16, CRC))),
    _case("dims-negative", listed(entry(1, shape(-4), 0, 16, CRC))),
    _case("rank-unknown", listed(entry(1, field(3, 1), 0, 16, CRC))),
    _case("rank-300", listed(entry(1, shape(*[1] * 300), 0, 4, CRC))),
    _case("product", listed(entry(1, shape(1 << 62, 1 << 62), 0, 16, CRC))),
    _case("product-with-0", listed(entry(1, shape(1 << 62, 1 << 62, 0), 0, 0, CRC))),
    _case("4-tib-in-16-bytes", listed(entry(1, shape(1 << 40), 0, 16, CRC))),
    _case("8-gib-in-16-bytes", listed(entry(1, shape(1 << 31), 0, 16, CRC))),
    _case("4-tib", listed(entry(1, shape(1 << 40), 0, 1 << 42, CRC))),
    _case("size-larger", listed(entry(1, shape(3), 0, 16, CRC))),
    _case("size-smaller", listed(entry(1, shape(5), 0, 16, CRC))),
    _case("size-negative", listed(entry(1, shape(4), 0, -16, CRC))),
    _case("offset-negative", listed(entry(1, shape(4), -16, 16, CRC))),
    _case("offset-beyond", listed(entry(1, shape(4), 1, 16, CRC))),
    _case("offset-wraps", listed(entry(1, shape(4), (1 << 63) - 1, 16, CRC))),
    *(
        _case(f"shard-{shard}", listed(entry(1, shape(4), 0, 16, CRC, shard=shard)))
        for shard in (1, -1, (1 << 31) - 1)
    ),
    _lists("crc-wrong", listed(entry(1, shape(4), 0, 16, masked(b"other")))),
    _lists("crc-absent", listed(GOOD[: -len(CRC) - 1])),
    _lists("bit-of-data", listed(GOOD, FLOATS[:-1] + b"\x41")),
    _case("garbage", listed(b"\xff" * 12)),
    _case("groups", listed(b"\x0b" * 5000 + b"\x0c" * 5000)),
    _case("number-for-shape", listed(field(1, 1) + field(2, 7))),
    _case("bytes-for-shard", listed(field(1, 1) + field(3, b"abc"))),
    _case("field-2-gib", listed(b"\x12" + number(2 << 30) + b"abc")),
)

_TWO = strings(b"one", b"two")[0]
_TEXTS = (
    _lists("strings-varint", texts(2, b"\xff" * 11 + bytes(20))),
    _lists("strings-1-tib", texts(1, number(1 << 40) + bytes(20))),
    _case("strings-2-28", texts(1 << 28, b"\1" * 64)),
    _lists("strings-own-checksum", texts(2, _TWO[:2] + bytes(4) + _TWO[6:])),
    _lists("strings-too-long", texts(2, b"\4\3" + _TWO[2:])),
    _lists("strings-of-another-length", texts(2, b"\2\4" + _TWO[2:])),
)


def _cut(*boxes: bytes) -> bytes:
    return entry(1, shape(4), 0, 0, bytes(4), more=b"".join(field(7, box) for box in boxes))


def _box(start: int, length: int) -> bytes:
    return field(1, (field(1, start) if start else b"") + field(2, length))


def _parts(*places: tuple[int, int]) -> dict[bytes, bytes]:
    """Slices of `w`, each in its own bytes of the shard, by the keys of ordered_code.cc."""
    entries, at = {}, 0
    for start, length in places:
        data = FLOATS[at : at + 4 * length]
        key = b"\0w\0\1\1\1" + bytes([0x80 + start, 0x80 + length])
        entries[key] = entry(1, shape(length), at, 4 * length, masked(data))
        at += 4 * length
    return entries


def _sliced(cut: bytes, *places: tuple[int, int]) -> Make:
    return file(index_of({b"w": cut, **_parts(*places)}))


_SLICES = (
    _reads("slices", _sliced(_cut(_box(0, 2), _box(2, 2)), (0, 2), (2, 2))),
    _case("slice-absent", _sliced(_cut(_box(0, 2), _box(2, 2)), (0, 2))),
    _case("slice-beyond", _sliced(_cut(_box(0, 2), _box(2, 3)), (0, 2), (2, 2))),
    _case("slice-negative", _sliced(_cut(_box(-1, 2)), (0, 2))),
    _case("slices-overlap", _sliced(_cut(_box(0, 2), _box(1, 2)), (0, 2), (1, 2))),
    _case("slice-twice", _sliced(_cut(_box(0, 2), _box(0, 2)), (0, 2))),
    _lists("slices-with-a-hole", _sliced(_cut(_box(0, 2)), (0, 2))),
    _case("slice-rank", _sliced(_cut(_box(0, 2) + _box(0, 2)), (0, 2))),
)

_APART = {n: entry(1, shape(4), 16 * at, 16, CRC) for at, n in enumerate((b"a", b"b"))}
_PLACES = (
    _reads("bytes-after", listed(GOOD, FLOATS + b"hidden")),
    _reads(
        "bytes-between",
        file(index_of(_APART | {b"b": entry(1, shape(4), 20, 16, CRC)}), FLOATS + b"hide" + FLOATS),
        shows="b",
    ),
    _reads("shared-bytes", file(index_of({b"a": GOOD, b"b": GOOD})), shows="b"),
    _case(
        "shared-bytes-300-times",
        file(
            index_of(
                {
                    b"%03d" % n: entry(1, shape(1 << 18), 0, 1 << 20, masked(bytes(1 << 20)))
                    for n in range(300)
                }
            ),
            bytes(1 << 20),
        ),
    ),
)

_NAMES = tuple(
    _reads(f"name-{name}", file(index_of({key: GOOD})), shows=shown)
    for name, key, shown in (
        ("escape", b"\x1b[31mred\x1b[0m/w", "red"),
        ("newline", b"first\nsecond", "second"),
        ("bidi", "‮txt.exe".encode(), "txt"),
        ("not-utf-8", b"\xff\xfe/w", "w"),
        ("surrogate", b"\xed\xa0\x80/w", "w"),
        ("up", b"../../../bait.bin", "bait"),
        ("absolute", b"/etc/passwd", "passwd"),
        ("64-kb", b"n" * 65_000, "nnn"),
    )
)

CASES = (*_TABLE, *_HEADER, *_ENTRIES, *_TEXTS, *_SLICES, *_PLACES, *_NAMES)
