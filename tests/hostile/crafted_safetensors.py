"""Safetensors files that break a rule of the format, or ask for much (safetensors/src/tensor.rs)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.crafted_any import written

_LINE = "safetensors"
_NAME = "model.safetensors"
Make = Callable[[Path], Path]


def tensor(
    begin: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32", **more: Any
) -> dict[str, Any]:
    """Return one entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def file_of_header(
    head: bytes | str | dict[str, Any], data: bytes = bytes(4), size: int | None = None
) -> Make:
    """Return the maker of a file of this header, which claims `size` bytes instead of its own."""
    text = json.dumps(head) if isinstance(head, dict) else head
    raw = text.encode() if isinstance(text, str) else text
    return written(_NAME, (len(raw) if size is None else size).to_bytes(8, "little") + raw + data)


def _refused(name: str, make: Make) -> Case:
    """Return a case that every command refuses, since `digest` and `convert` begin with the listing."""
    every = name in ("header-0", "overlap", "short", "two-keys")
    rest = 2 if every else None
    return Case(f"safetensors-{name}", _LINE, make, digest=rest, convert=rest)


def _listed(name: str, make: Make, digest: int | None = 0, convert: int | None = 0, shows: str = "") -> Case:
    return Case(f"safetensors-{name}", _LINE, make, inspect=0, digest=digest, convert=convert, shows=shows)


def _padded(folder: Path) -> Path:
    """Write a header of 100 MB, the most that is legal: all but the entry is padding."""
    head = json.dumps({"a": tensor()}).encode()
    path = folder / _NAME
    with path.open("wb") as file:
        file.write((100_000_000).to_bytes(8, "little") + head)
        for _ in range(100):
            file.write(b" " * ((100_000_000 - len(head)) // 100))
        file.write(b" " * ((100_000_000 - len(head)) % 100) + bytes(4))
    return path


def _many(folder: Path) -> Path:
    names = {f"layers.{number}.weight": tensor(4 * number, 4 * number + 4) for number in range(50_000)}
    return file_of_header(names, bytes(4 * len(names)))(folder)


def _values(folder: Path) -> Path:
    return file_of_header('{"a":[' + "[]," * 5_000_000 + "[]]}")(folder)


_ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_DEEP = "[" * 100_000
CASES = (
    _refused("header-0", file_of_header("", size=0)),
    _refused("header-1", file_of_header("{}", size=1)),
    _refused("header-beyond-file", file_of_header({"a": tensor()}, size=4096)),
    _refused("header-2-63", file_of_header({"a": tensor()}, size=1 << 63)),
    _refused("header-all-ones", file_of_header({"a": tensor()}, size=(1 << 64) - 1)),
    Case(
        "safetensors-header-over-the-limit",
        _LINE,
        file_of_header(json.dumps({"a": tensor()}) + " " * 1000),
        options=("--limit", "header_bytes=1000"),
    ),
    _refused("7-bytes", written(_NAME, b"\x02\0\0\0\0\0\0")),
    _refused("overlap", file_of_header({"a": tensor(), "b": tensor(2, 6)}, bytes(6))),
    _refused("same-place", file_of_header({"a": tensor(), "b": tensor()})),
    _refused("hole", file_of_header({"a": tensor(), "b": tensor(8, 12)}, bytes(12))),
    _refused("hole-in-front", file_of_header({"a": tensor(4, 8)}, bytes(8))),
    _refused("trailing", file_of_header({"a": tensor()}, bytes(5))),
    _refused("trailing-archive", file_of_header({"a": tensor()}, bytes(4) + b"PK\x03\x04")),
    _refused("short", file_of_header({"a": tensor()}, bytes(3))),
    _refused("two-keys", file_of_header(f'{{"a":{_ONE},"a":{_ONE}}}')),
    _refused("two-keys-escaped", file_of_header(f'{{"a":{_ONE},"\\u0061":{_ONE}}}')),
    _refused("two-fields", file_of_header(f'{{"a":{_ONE[:-1]},"dtype":"I32"}}}}')),
    _refused("two-metadata", file_of_header(f'{{"__metadata__":{{}},"a":{_ONE},"__metadata__":{{}}}}')),
    _refused("missing-field", file_of_header({"a": {"dtype": "F32", "shape": [1]}})),
    _refused("entry-is-a-list", file_of_header({"a": [1]})),
    _refused("shape-negative", file_of_header({"a": tensor(shape=[-1])})),
    _refused("shape-float", file_of_header({"a": tensor(shape=[1.0])})),
    _refused("shape-bool", file_of_header({"a": tensor(shape=[True])})),
    _refused("shape-text", file_of_header({"a": tensor(shape="1")})),
    _refused("shape-too-large", file_of_header({"a": tensor(shape=[2])})),
    _refused("shape-too-small", file_of_header({"a": tensor(0, 8)}, bytes(8))),
    _refused("overflow", file_of_header({"a": tensor(shape=[1 << 62, 4])})),
    _refused("overflow-wraps-to-4", file_of_header({"a": tensor(shape=[1 << 63, 2, 1])})),
    _refused("overflow-of-bytes", file_of_header({"a": tensor(0, 0, [1 << 62])}, b"")),
    _refused("overflow-behind-0", file_of_header({"a": tensor(0, 0, [0, 1 << 62, 4])}, b"")),
    _refused("offsets-negative", file_of_header({"a": tensor(-4, 0)})),
    _refused("offsets-float", file_of_header({"a": tensor(0.0, 4.0)})),
    _refused("offsets-reversed", file_of_header({"a": tensor(4, 0)})),
    _refused("offsets-three", file_of_header({"a": tensor() | {"data_offsets": [0, 4, 4]}})),
    _refused("offsets-2-64", file_of_header({"a": tensor(0, 1 << 64)})),
    _refused("rank-100001", file_of_header({"a": tensor(shape=[1] * 100_001)})),
    _refused("type-is-no-text", file_of_header({"a": tensor(dtype=7)})),
    _refused("metadata-number", file_of_header({"__metadata__": {"a": 1}, "a": tensor()})),
    _refused("metadata-list", file_of_header({"__metadata__": [], "a": tensor()})),
    _refused("not-utf-8", file_of_header(b'{"\xff":' + _ONE.encode() + b"}")),
    _refused("utf-16", file_of_header(json.dumps({"a": tensor()}).encode("utf-16-le"))),
    _refused("byte-order-mark", file_of_header(b"\xef\xbb\xbf" + json.dumps({"a": tensor()}).encode())),
    _refused("lone-surrogate", file_of_header(f'{{"\\ud800":{_ONE}}}')),
    _refused("list", file_of_header("[1, 2]")),
    _refused("nan", file_of_header('{"a":NaN}')),
    _refused("infinity", file_of_header('{"a":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,4]}}')),
    _refused("5000-digits", file_of_header('{"a":' + _ONE.replace("1", "1" * 5000) + "}")),
    _refused("4000-digits", file_of_header('{"a":' + _ONE.replace("1", "1" * 4000) + "}")),
    _refused("100000-lists", file_of_header('{"a":' + _DEEP + "]" * 100_000 + "}")),
    _refused("100000-open", file_of_header('{"a":' + _DEEP)),
    _refused("100000-objects", file_of_header('{"a":' * 100_000 + "1" + "}" * 100_000)),
    _refused("5-million-values", _values),
    _refused("null-padding", file_of_header(json.dumps({"a": tensor()}) + "\0\0")),
    _refused("two-documents", file_of_header(json.dumps({"a": tensor()}) + "{}")),
    _listed("padding-of-100-MB", _padded, convert=0, shows="float32"),
    _listed("tensors-50000", _many, digest=None, convert=None, shows="50,000"),
    _listed("empty", file_of_header("{}", b""), shows="0 tensors"),
    _listed("extra-field", file_of_header({"a": tensor(more=[[[]]])}), shows="float32"),
    _listed(
        "unknown-type",
        file_of_header({"a": tensor(dtype="Q7"), "b": tensor(4, 8)}, bytes(8)),
        convert=0,
        shows="Q7",
    ),
    _listed("fp4", file_of_header({"a": tensor(0, 4, [8], "F4")}), shows="F4"),
    _listed("fp8", file_of_header({"a": tensor(0, 4, [4], "F8_E4M3")}), shows="float8_e4m3"),
    _listed(
        "names-escaped",
        file_of_header({"\x1b[31m\0\u202ea\nb/../../x": tensor()}),
    ),
    _listed("name-of-64-KB", file_of_header({"x" * 65536: tensor()}), convert=2, shows="xxx"),
)
