"""Checkpoints of torch whose pickles and storages do not fit together, or ask for more than there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, dumps
from tests.hostile.case import Case
from tests.hostile.torch_files import (
    FLOATS,
    ONE,
    called,
    changed,
    members,
    storage,
    tensor,
    torch_file,
    zipped,
)
from tests.hostile.zips import Made, deflated

_LINE = "torch tensor records"
_HUGE = 1 << 62


def _case(
    name: str, value: object = None, storages: dict[str, bytes] | None = None, shows: str = "", **more: Any
) -> Case:
    make_file = torch_file({"w": value} if value is not None else None, storages)
    return Case(f"torch-{name}", _LINE, make_file, shows=shows, **more)


def _quick(name: str, value: object, storages: dict[str, bytes] | None = None, **more: Any) -> Case:
    return _case(name, value, storages, digest=None, convert=None, **more)


def _stated(state: object) -> object:
    """Return a parameter with a state."""
    return called("_rebuild_parameter_with_state", tensor(), True, Dict("collections.OrderedDict"), state)


def _listed(
    name: str, value: object, storages: dict[str, bytes] | None = None, shows: str = "", **more: Any
) -> Case:
    """Return a case that is listed, and cannot be read."""
    return _case(name, value, storages, shows=shows, **{"inspect": 0, "digest": 2, "convert": 2, **more})


def _fine(name: str, value: object, storages: dict[str, bytes] | None = None, **more: Any) -> Case:
    return _case(name, value, storages, **{"inspect": 0, "digest": 0, "convert": 0, **more})


_DOUBLES = Global("torch", "DoubleStorage")
_STORAGES = (
    _case("storage-missing", tensor(storage("7"))),
    _case("storage-shorter", tensor(storage(count=5))),
    _case("storage-longer", tensor(storage(count=3), shape=(3,))),
    _quick("numel-huge", tensor(storage(count=_HUGE))),
    _quick("numel-wraps", tensor(storage(count=(1 << 64) + 4))),
    _quick("numel-negative", tensor(storage(count=-4))),
    _quick("numel-of-true", tensor(storage(count=True))),
    _quick("numel-a-float", tensor(storage(count=4.0))),
    _quick("key-an-integer", tensor(storage(0))),
    _quick("key-two-dtypes", [tensor(), tensor(storage(count=2, kind=_DOUBLES), shape=(2,))]),
    _quick("class-unknown", tensor(storage(kind=Global("torch", "StringStorage")))),
    _quick("class-of-another-module", tensor(storage(kind=Global("evil", "FloatStorage")))),
    _quick("id-no-tuple", tensor(PersistentId("storage"))),
    _quick("id-too-short", tensor(PersistentId(("storage", FLOATS, "0")))),
    _quick("id-of-another-kind", tensor(PersistentId(("module", FLOATS, "0", "cpu", 4)))),
    _fine("device-unknown", tensor(PersistentId(("storage", FLOATS, "0", "warp:9", 4)))),
    _quick("device-a-list", tensor(PersistentId(("storage", FLOATS, "0", [1], 4)))),
    _quick("device-meta", tensor(PersistentId(("storage", FLOATS, "0", "meta", 4))), strict=2),
    _quick("state-with-data", _stated({"data": tensor(offset=3, shape=(1,))}), strict=2),
    _quick("neg-that-is-false", tensor(metadata={"neg": False}), strict=2),
)

_VIEWS = (
    _case("view-beyond-its-storage", tensor(shape=(5,))),
    _quick("offset-beyond", tensor(offset=1)),
    _quick("stride-beyond", tensor(strides=(2,))),
    _quick("offset-negative", tensor(offset=-1)),
    _quick("stride-negative", tensor(strides=(-1,))),
    _quick("size-negative", tensor(shape=(-4,))),
    _quick("sizes-negative-twice", tensor(shape=(-2, -2), strides=(2, 1))),
    _quick("rank-mismatch", tensor(shape=(2, 2))),
    _quick("rank-100", tensor(shape=(1,) * 100, strides=(1,) * 100)),
    _quick("size-no-tuple", tensor(shape=4)),
    _quick("size-a-float", tensor(shape=(4.0,))),
    _quick("numel-overflows", tensor(shape=(1 << 40, 1 << 40), strides=(0, 0))),
    _quick("numel-wraps-to-four", tensor(shape=(1 << 62, 4, 4), strides=(0, 0, 1))),
    _quick("stride-overflows", tensor(shape=(2, 2), strides=(1 << 63, 1))),
    _quick("stride-times-size-wraps", tensor(shape=(5, 1), strides=(1 << 62, 1))),
    _quick("overflow-with-an-empty-dimension", tensor(shape=(_HUGE, 0), strides=(1, 1))),
    _fine("empty", tensor(shape=(0, 3), strides=(3, 1))),
    _fine("scalar-in-a-larger-storage", tensor(offset=3, shape=(), strides=())),
    _listed("expanded-2-40", tensor(shape=(1 << 40,), strides=(0,))),
    _listed("expanded-2-60", tensor(shape=(1 << 30, 1 << 30), strides=(0, 0))),
    _listed(
        "expanded-many-times",
        [tensor(offset=number % 4, shape=(1 << 25, 1 + number // 4), strides=(0, 0)) for number in range(8)],
    ),
    _fine("expanded-a-little", tensor(shape=(1000, 4), strides=(0, 1))),
)


def _packed_twice(folder: Path) -> Path:
    # Two storages that unpack to 64 MB each, of which a thousand views show four bytes in turn.
    count = 1 << 24
    views = [tensor(storage("ab"[n % 2], count), n, (1,)) for n in range(1000)]
    packed = [deflated(f"archive/data/{key}", bytes(4 * count)) for key in "ab"]
    return zipped([*members(dumps(views))[:2], *packed])(folder)


def _chain(count: int) -> Callable[[Path], Path]:
    """Return the maker of a tensor that is an attribute of a tensor, and so on, each of another view."""

    def make(folder: Path) -> Path:
        location = dumps(storage("0", count), 2)[2:-1]
        # _rebuild_from_type_v2(function, type, arguments, state): the last one is in the memo as number 1000.
        step = (
            b"0ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n"
            b"(%bJ%b(K\x01t(K\x01t\x89}t}X\x01\x00\x00\x00mj\xe8\x03\x00\x00stRr\xe8\x03\x00\x00"
        )
        steps = b"".join(step % (location, number.to_bytes(4, "little")) for number in range(count))
        pickled = b"\x80\x02Nr\xe8\x03\x00\x00" + steps + b"0}X\x01\x00\x00\x00wj\xe8\x03\x00\x00s."
        return torch_file(pickled, {"0": bytes(4 * count)})(folder)

    return make


_QUANTISED = Global("torch", "per_tensor_affine")


def _quantised(scheme: object) -> PickleObject:
    whole = PersistentId(("storage", Global("torch", "QInt8Storage"), "0", "cpu", 16))
    return called("_rebuild_qtensor", whole, 0, (16,), (1,), scheme, False, Dict("collections.OrderedDict"))


def _nested(depth: int) -> PickleObject:
    value = _quantised((_QUANTISED, 0.5, 3))
    for _ in range(depth):
        value = _quantised((_QUANTISED, value, value))
    return value


def _sparse(layout: str, *parts: object) -> PickleObject:
    return called("_rebuild_sparse_tensor", Global("torch", layout), parts)


_INDICES = tensor(storage("1", 4, Global("torch", "LongStorage")), shape=(1, 4), strides=(4, 1))
_BOTH = {"0": ONE, "1": bytes(32)}
_PARTS = (
    _listed("quantised", _quantised((_QUANTISED, 0.5, 3)), digest=0, shows="int_repr"),
    _quick("quantised-of-quantised", _nested(6)),
    _quick("quantised-axis-beyond", _quantised((Global("torch", "per_channel_affine"), [0.5], [1], 7))),
    _quick(
        "quantised-scales-too-few",
        _quantised((Global("torch", "per_channel_affine"), [0.5], [1], 0)),
    ),
    _quick("quantised-scheme-unknown", _quantised(())),
    _listed(
        "sparse",
        _sparse("sparse_coo", _INDICES, tensor(), (10,), True),
        _BOTH,
        digest=0,
        convert=0,
        shows="sparse_coo",
    ),
    _quick("sparse-of-sparse", _sparse("sparse_coo", _INDICES, tensor(), _nested(2), True), _BOTH),
    _quick("sparse-without-values", _sparse("sparse_coo", _INDICES, 3, (10,), True), _BOTH),
    _quick("sparse-parts-missing", _sparse("sparse_csr", _INDICES), _BOTH),
    _quick("nested-offsets", called("_rebuild_nested_tensor", tensor(), tensor(), tensor(), "x")),
    _quick("rebuilt-from-nothing", called("_rebuild_tensor_v2")),
    Case("torch-attribute-of-an-attribute", _LINE, _chain(3), inspect=0, digest=0, convert=None, shows="w"),
    Case("torch-attributes-2000-deep", _LINE, _chain(2000), digest=None, convert=None),
    Case("torch-unpacked-again-and-again", _LINE, _packed_twice, inspect=0),
)


def _script(*more: Made, constants: bytes | None = None) -> Callable[[Path], Path]:
    further = [Made("archive/constants.pkl", dumps(()) if constants is None else constants), *more]
    return zipped([*members(), *further])


_SCRIPT = (
    Case(
        "torch-script-archive",
        _LINE,
        _script(Made("archive/code/__torch__.py", b"class A(Module):\n")),
        0,
        0,
        None,
        shows="TorchScript",
    ),
    Case(
        "torch-script-names",
        _LINE,
        _script(Made("archive/code/../../\x1b[2J.py", b"x")),
        0,
        0,
        None,
        shows="TorchScript",
    ),
    Case("torch-script-constants-damaged", _LINE, _script(constants=b"\x80\x02]"), digest=None, convert=None),
    Case(
        "torch-script-code-bomb",
        _LINE,
        _script(deflated("archive/code/a.py", b"x", size=1 << 31)),
        digest=None,
        convert=None,
    ),
    Case(
        "torch-byteorder-unknown",
        _LINE,
        zipped([members()[0], Made("archive/byteorder", b"middle"), *members()[2:]]),
    ),
    Case(
        "torch-byteorder-long",
        _LINE,
        zipped([members()[0], Made("archive/byteorder", b"big" + b" " * 99), *members()[2:]]),
        digest=None,
        convert=None,
    ),
    Case(
        "torch-version-with-escapes",
        _LINE,
        zipped([*members()[:3], Made("archive/version", b"\x1b[31m3")]),
    ),
    Case(
        "torch-storage-a-folder",
        _LINE,
        zipped(changed(2, external=0x10)),
        strict=2,
    ),
    Case(
        "torch-byteorder-in-capitals",
        _LINE,
        zipped(changed(1, name="archive/ByteOrder", data=b"big")),
        strict=2,
    ),
)

CASES = (*_STORAGES, *_VIEWS, *_PARTS, *_SCRIPT)
