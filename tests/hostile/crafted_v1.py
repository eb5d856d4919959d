"""TensorFlow's V1 checkpoints: tables that hold names, shapes and values."""

from __future__ import annotations

from pathlib import Path

import cramjam

from tests.bundle_writer import field, shape, table, table_of
from tests.hostile.bundles import FLOATS, GOOD, Make, index_of
from tests.hostile.case import Case
from tests.v1_writer import FULL, ONE, compressed, floats, header, meta
from tests.v1_writer import entry as value

_LINE = "TF index"
_META = meta(b"w", shape(4), 1, [FULL])
_VALUE = value(b"w", [FULL], floats(FLOATS))
_HEAD = (b"", header(_META))
_WHOLE = table([_HEAD, _VALUE])


def _file(data: bytes, name: str = "model.ckpt") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _case(name: str, data: bytes, file: str = "model.ckpt") -> Case:
    """A case that is refused when it is listed."""
    return Case(f"v1-{name}", _LINE, _file(data, file), digest=None)


def _lists(name: str, data: bytes) -> Case:
    return Case(f"v1-{name}", _LINE, _file(data), 0)


def _file_with_entry(bad: bytes) -> bytes:
    """A file whose list has this entry, and the values of `w`."""
    return table([(b"", header(bad)), _VALUE])


def _valued(proto: bytes) -> bytes:
    return table([_HEAD, value(b"w", [FULL], proto)])


CASES = (
    Case("v1-good", _LINE, _file(_WHOLE), 0, 0, 0, shows="w"),
    Case("v1-snappy", _LINE, _file(compressed([_HEAD, _VALUE])), 0, 0, 0, shows="w"),
    _case("cut", _WHOLE[: len(_WHOLE) // 2]),
    _case("flipped", bytes([_WHOLE[0], _WHOLE[1] ^ 1]) + _WHOLE[2:]),
    _case("no-list", table([_VALUE])),
    _case("nothing", table([])),
    _case("list-garbage", table([(b"", b"\xff" * 11), _VALUE])),
    _case("list-groups", table([(b"", b"\x0b" * 5000), _VALUE])),
    _case("v2-index", index_of({b"w": GOOD})),
    _case("newer", table([(b"", header(_META, version=field(1, 9) + field(2, 2))), _VALUE])),
    *(_case(f"type-{n}", _file_with_entry(meta(b"w", shape(4), n, [FULL]))) for n in (0, 99, 20)),
    _case("dims-negative", _file_with_entry(meta(b"w", shape(-4), 1, [FULL]))),
    _case("rank-300", _file_with_entry(meta(b"w", shape(*[1] * 300), 1, [FULL]))),
    _case("product", _file_with_entry(meta(b"w", shape(1 << 62, 1 << 62), 1, [FULL] * 2))),
    _case("4-tib", _file_with_entry(meta(b"w", shape(1 << 40), 1, [FULL]))),
    _case("slice-beyond", _file_with_entry(meta(b"w", shape(4), 1, [(2, 3)]))),
    _case("slices-overlap", table([(b"", header(meta(b"w", shape(4), 1, [FULL], [FULL]))), _VALUE])),
    _case("shard-of-2", _WHOLE, "model.ckpt-00000-of-00002"),
    _lists("slice-absent", _file_with_entry(meta(b"u", shape(4), 1, [FULL]))),
    _lists("too-few", _valued(floats(ONE))),
    _lists("too-many", _valued(floats(FLOATS + ONE))),
    _lists("value-garbage", _valued(b"\xff" * 20)),
    _lists(
        "strings", table([(b"", header(meta(b"w", shape(100), 7, [FULL]))), value(b"w", [FULL], b"B\0" * 99)])
    ),
    _case(
        "snappy-bomb",
        table_of([bytes(cramjam.snappy.compress_raw(bytes(65 << 20)))], [b"z"], 1),
    ),
)
