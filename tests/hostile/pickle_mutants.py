"""Pickles with another meaning: opcodes and their arguments changed, never cut in the middle."""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Callable

Ops = list[bytes]

_FLAGS = (
    b"\x88",
    b"\x89",
    b"N",
    b"K\x00",
    b"K\x01",
    b"}",
    b"]",
    b")",
    b"X\x01\x00\x00\x00a",
    b"G" + bytes(8),
)
_ENDS = (b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"\x87", b"0", b"2", b"Q", b"(")
_STARTS = (b"}", b"]", b")", b"(", b"N", b"\x88", b"\x8f")
_NUMBERS = (0, 1, 2, 3, 4, 5, 8, 255, 256, 65535, -1, 1 << 31, 1 << 62)


def split(data: bytes) -> Ops:
    """Return a pickle's opcodes with their arguments."""
    starts = [position or 0 for _, _, position in pickletools.genops(data)]
    runs = [data[at:stop] for at, stop in zip(starts, [*starts[1:], len(data)], strict=True)]
    # Frames have a length, which changes.
    return [run for run in runs if run[:1] != b"\x95"]


def text(value: str) -> bytes:
    """Return the opcode of a text."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Return the shortest opcode of an integer."""
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def build(choose: random.Random, names: tuple[str, ...]) -> Ops:
    """Return a BUILD with a state: attributes, attributes and slots, or a tuple of what is around."""
    name, value = text(choose.choice(names)), choose.choice((*_FLAGS, b"h" + bytes((choose.randrange(64),))))
    attributes = b"}" + name + value + b"s"
    kinds = (attributes, b"N" + attributes + b"\x86", b"(" + value * 3 + b"t", b"(" + value * 4 + b"t")
    return [choose.choice((*kinds, b"(" + value * 5 + b"t", value)), b"b"]


GLOBALS = (
    *(f"torch {name}" for name in ("FloatStorage", "DoubleStorage", "LongStorage", "Tensor", "FloatTensor")),
    *(f"torch {name}" for name in ("Size", "float32", "uint16", "int64", "bfloat16", "device")),
    *(f"torch._utils _rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor")),
    *(f"torch._utils _rebuild_{name}" for name in ("parameter", "parameter_with_state", "sparse_tensor")),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch._tensor _rebuild_from_type_v2"),
    *("torch._utils _rebuild_device_tensor_from_cpu_tensor", "torch.storage UntypedStorage"),
    *("torch.nn.parameter Parameter", "torch.serialization _get_layout", "numpy dtype", "numpy ndarray"),
    *(f"numpy._core.multiarray {name}" for name in ("_reconstruct", "scalar")),
    *("numpy._core.numeric _frombuffer", "collections OrderedDict", "collections Counter"),
    *("collections defaultdict", "builtins set", "builtins bytearray", "builtins complex", "_codecs encode"),
)
NAMES = ("data", "grad", "requires_grad", "_backward_hooks", "real", "dtype", "__dict__", "neg", "conj", "x")


def mutated(
    data: bytes,
    choose: random.Random,
    globals_: tuple[str, ...] = GLOBALS,
    names: tuple[str, ...] = NAMES,
) -> bytes:
    """Return the pickle with one to three changes.

    `globals_` are names ("module name") to put in the place of others, `names` attributes to set.
    """
    ops = split(data)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        at = choose.randrange(1, max(2, len(ops) - 1))
        choose.choice(_CHANGES)(ops, at, choose, globals_, names)
    return b"".join(ops)


Change = Callable[[Ops, int, random.Random, tuple[str, ...], tuple[str, ...]], None]


def _near(ops: Ops, at: int, kinds: bytes) -> int:
    """Return the next opcode of one of the kinds, `at` where there is none."""
    places = [*range(at, len(ops)), *range(at)]
    return next((position for position in places if ops[position][0] in kinds), at)


def _flag(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops[_near(ops, at, b"\x88\x89N")] = choose.choice(_FLAGS)


def _number(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops[_near(ops, at, b"KMJ\x8a")] = number(choose.choice(_NUMBERS))


def _another(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    like = [op for op in ops if op[:1] == ops[at][:1]]
    ops[at] = choose.choice(like)


def _recalled(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    puts = [op for op in ops if op[:1] == b"q"]
    if puts:
        ops[_near(ops, at, b"hK\x88\x89)}")] = b"h" + choose.choice(puts)[1:]


def _named(ops: Ops, at: int, choose: random.Random, globals_: tuple[str, ...], _: object) -> None:
    module, _, name = choose.choice(globals_).partition(" ")
    position = _near(ops, at, b"c\x93")
    if ops[position][:1] == b"c":
        ops[position] = f"c{module}\n{name}\n".encode()
    elif ops[position][:1] == b"\x93":
        ops[position : position + 1] = [b"0", b"0", text(module), text(name), b"\x93"]


def _built(ops: Ops, at: int, choose: random.Random, _: object, names: tuple[str, ...]) -> None:
    position = _near(ops, at, b"R\x81}b")
    ops[position + 1 : position + 1] = build(choose, names)


def _ended(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops[_near(ops, at, b"".join(op for op in _ENDS))] = choose.choice(_ENDS)


def _started(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops[_near(ops, at, b"".join(_STARTS))] = choose.choice(_STARTS)


def _dropped(ops: Ops, at: int, *_: object) -> None:
    if len(ops) > 4:
        del ops[at]


def _again(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops[at:at] = ops[at : at + choose.choice((1, 1, 2, 4, 8))]


def _turned(ops: Ops, at: int, *_: object) -> None:
    if at + 2 < len(ops):
        ops[at], ops[at + 1] = ops[at + 1], ops[at]


def _put(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    ops.insert(at, choose.choice((*_FLAGS, *_ENDS)))


def _bytes(ops: Ops, at: int, choose: random.Random, *_: object) -> None:
    position = _near(ops, at, b"XC\x8c")
    raw = bytearray(ops[position])
    if len(raw) > 5:
        raw[choose.randrange(5, len(raw))] = choose.choice(b"<>=|FCO f8i4u2\x00\xff")
        ops[position] = bytes(raw)


_CHANGES: tuple[Change, ...] = (
    *(_flag, _number, _another, _recalled, _named, _built, _ended, _started),
    *(_dropped, _again, _turned, _put, _bytes, _built, _flag),
)
