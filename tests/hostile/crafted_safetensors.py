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


def laid(head: bytes | str | dict[str, Any], data: bytes = bytes(4), size: int | None = None) -> Make:
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
    return laid(names, bytes(4 * len(names)))(folder)


def _values(folder: Path) -> Path:
    return laid('{"a":[' + "[]," * 5_000_000 + "[]]}")(folder)


_ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_DEEP = "[" * 100_000
CASES = (
    _refused("header-0", laid("", size=0)),
    _refused("header-1", laid("{}", size=1)),
    _refused("header-beyond-file", laid({"a": tensor()}, size=4096)),
    _refused("header-2-63", laid({"a": tensor()}, size=1 << 63)),
    _refused("header-all-ones", laid({"a": tensor()}, size=(1 << 64) - 1)),
    Case(
        "safetensors-header-over-the-limit",
        _LINE,
        laid(json.dumps({"a": tensor()}) + " " * 1000),
        options=("--limit", "header_bytes=1000"),
    ),
    _refused("7-bytes", written(_NAME, b"\x02\0\0\0\0\0\0")),
    _refused("overlap", laid({"a": tensor(), "b": tensor(2, 6)}, bytes(6))),
    _refused("same-place", laid({"a": tensor(), "b": tensor()})),
    _refused("hole", laid({"a": tensor(), "b": tensor(8, 12)}, bytes(12))),
    _refused("hole-in-front", laid({"a": tensor(4, 8)}, bytes(8))),
    _refused("trailing", laid({"a": tensor()}, bytes(5))),
    _refused("trailing-archive", laid({"a": tensor()}, bytes(4) + b"PK\x03\x04")),
    _refused("short", laid({"a": tensor()}, bytes(3))),
    _refused("two-keys", laid(f'{{"a":{_ONE},"a":{_ONE}}}')),
    _refused("two-keys-escaped", laid(f'{{"a":{_ONE},"\\u0061":{_ONE}}}')),
    _refused("two-fields", laid(f'{{"a":{_ONE[:-1]},"dtype":"I32"}}}}')),
    _refused("two-metadata", laid(f'{{"__metadata__":{{}},"a":{_ONE},"__metadata__":{{}}}}')),
    _refused("missing-field", laid({"a": {"dtype": "F32", "shape": [1]}})),
    _refused("entry-is-a-list", laid({"a": [1]})),
    _refused("shape-negative", laid({"a": tensor(shape=[-1])})),
    _refused("shape-float", laid({"a": tensor(shape=[1.0])})),
    _refused("shape-bool", laid({"a": tensor(shape=[True])})),
    _refused("shape-text", laid({"a": tensor(shape="1")})),
    _refused("shape-too-large", laid({"a": tensor(shape=[2])})),
    _refused("shape-too-small", laid({"a": tensor(0, 8)}, bytes(8))),
    _refused("overflow", laid({"a": tensor(shape=[1 << 62, 4])})),
    _refused("overflow-wraps-to-4", laid({"a": tensor(shape=[1 << 63, 2, 1])})),
    _refused("overflow-of-bytes", laid({"a": tensor(0, 0, [1 << 62])}, b"")),
    _refused("overflow-behind-0", laid({"a": tensor(0, 0, [0, 1 << 62, 4])}, b"")),
    _refused("offsets-negative", laid({"a": tensor(-4, 0)})),
    _refused("offsets-float", laid({"a": tensor(0.0, 4.0)})),
    _refused("offsets-reversed", laid({"a": tensor(4, 0)})),
    _refused("offsets-three", laid({"a": tensor() | {"data_offsets": [0, 4, 4]}})),
    _refused("offsets-2-64", laid({"a": tensor(0, 1 << 64)})),
    _refused("rank-100001", laid({"a": tensor(shape=[1] * 100_001)})),
    _refused("type-is-no-text", laid({"a": tensor(dtype=7)})),
    _refused("metadata-number", laid({"__metadata__": {"a": 1}, "a": tensor()})),
    _refused("metadata-list", laid({"__metadata__": [], "a": tensor()})),
    _refused("not-utf-8", laid(b'{"\xff":' + _ONE.encode() + b"}")),
    _refused("utf-16", laid(json.dumps({"a": tensor()}).encode("utf-16-le"))),
    _refused("byte-order-mark", laid(b"\xef\xbb\xbf" + json.dumps({"a": tensor()}).encode())),
    _refused("lone-surrogate", laid(f'{{"\\ud800":{_ONE}}}')),
    _refused("list", laid("[1, 2]")),
    _refused("nan", laid('{"a":NaN}')),
    _refused("infinity", laid('{"a":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,4]}}')),
    _refused("5000-digits", laid('{"a":' + _ONE.replace("1", "1" * 5000) + "}")),
    _refused("4000-digits", laid('{"a":' + _ONE.replace("1", "1" * 4000) + "}")),
    _refused("100000-lists", laid('{"a":' + _DEEP + "]" * 100_000 + "}")),
    _refused("100000-open", laid('{"a":' + _DEEP)),
    _refused("100000-objects", laid('{"a":' * 100_000 + "1" + "}" * 100_000)),
    _refused("5-million-values", _values),
    _refused("null-padding", laid(json.dumps({"a": tensor()}) + "\0\0")),
    _refused("two-documents", laid(json.dumps({"a": tensor()}) + "{}")),
    _listed("padding-of-100-MB", _padded, convert=0, shows="float32"),
    _listed("tensors-50000", _many, digest=None, convert=None, shows="50,000"),
    _listed("empty", laid("{}", b""), shows="0 tensors"),
    _listed("extra-field", laid({"a": tensor(more=[[[]]])}), shows="float32"),
    _listed(
        "unknown-type", laid({"a": tensor(dtype="Q7"), "b": tensor(4, 8)}, bytes(8)), convert=0, shows="Q7"
    ),
    _listed("fp4", laid({"a": tensor(0, 4, [8], "F4")}), shows="F4"),
    _listed("fp8", laid({"a": tensor(0, 4, [4], "F8_E4M3")}), shows="float8_e4m3"),
    _listed(
        "names-escaped",
        laid({"\x1b[31m\0\u202ea\nb/../../x": tensor()}),
    ),
    _listed("name-of-64-KB", laid({"x" * 65536: tensor()}), convert=2, shows="xxx"),
)
