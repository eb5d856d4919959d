"""What PyTorch, NumPy and Python make of unusual pickles and archives, ckpttool reads alike or refuses."""

from __future__ import annotations

import collections
import pickle
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import CkpttoolError, FormatError, Limits, UnsupportedError, key
from ckpttool.encodings import Dict, Global, OpaqueKey, PersistentId, PickleObject, dumps, parse_pickle
from ckpttool.encodings.pickle_values import BUILDERS, CONTAINERS, SPREAD
from ckpttool.formats import open_checkpoint
from ckpttool.formats.pickle_signatures import MAGIC
from ckpttool.formats.pickles import BUILDERS as LOADED
from ckpttool.formats.torch_tensors import _OWN_NAMES
from tests import warm
from tests.hostile import pickle_mutants
from tests.hostile.differential import verdict
from tests.hostile.readers import attempts
from tests.hostile.torch_files import ONE, called, changed, members, storage, tensor
from tests.hostile.zips import Made, archive
from tests.test_format_pytorch_legacy import storage as stream_storage
from tests.test_format_pytorch_legacy import written as stream

HOOKS = Dict("collections.OrderedDict")
V2 = Global("torch._utils", "_rebuild_tensor_v2")
NINES = tensor(storage("1"))
STORAGES = {"0": ONE, "1": struct.pack("<4f", 9, 9, 9, 9)}


def built(value: PickleObject, state: Any) -> PickleObject:
    """Return the call with a state that BUILD sets."""
    return PickleObject(value.function, value.args, 0, state=state)


def parameter(*more: Any, state: Any = None) -> PickleObject:
    """Return the call that rebuilds a parameter."""
    name = "_rebuild_parameter_with_state" if more else "_rebuild_parameter"
    return PickleObject(Global("torch._utils", name), (tensor(), True, HOOKS, *more), 0, state=state)


def from_type(state: Any, kind: str = "Tensor") -> PickleObject:
    """Return the call that rebuilds a tensor with attributes."""
    return called(
        "_rebuild_from_type_v2", V2, Global("torch", kind), tensor().args, state, module="torch._tensor"
    )


def flagged(metadata: Any, requires_grad: Any = False, hooks: Any = HOOKS) -> PickleObject:
    """Return the call that rebuilds a tensor with metadata."""
    return PickleObject(V2, (*tensor().args[:4], requires_grad, hooks, metadata), 0)


def channels(scales: Any, zeros: Any, scheme: str = "per_channel_affine") -> PickleObject:
    """Return the call that rebuilds a tensor of 2 by 2 that is quantised by rows."""
    where = PersistentId(("storage", Global("torch", "QInt8Storage"), "0", "cpu", 16))
    quantizer = (Global("torch", scheme), scales, zeros, 0)
    return called("_rebuild_qtensor", where, 0, (2, 2), (2, 1), quantizer, False, HOOKS)


VIEW = (storage("1"), 0, (4,), (1,))
# What torch reads as other numbers (or not at all) than those of the tensor's own storage.
STATES = {
    "BUILD of four on a tensor": built(tensor(), VIEW),
    "BUILD of four on a parameter": parameter(state=VIEW),
    "BUILD of five on a parameter": parameter(state=(NINES, None, HOOKS, True, False)),
    "BUILD of a dict on a tensor": built(tensor(), {"data": NINES}),
    "BUILD of a dict on a parameter": parameter(state={"data": NINES}),
    "BUILD of a storage": built(tensor(), (storage("1"),)),
    "state with data": parameter({"data": NINES}),
    "slot data": parameter((None, {"data": NINES})),
    "dict and slot data": parameter(({"mark": 1}, {"data": NINES})),
    "attribute data": from_type({"data": NINES}),
    "slot data of a type": from_type((None, {"data": NINES})),
    "attribute real": from_type({"real": NINES}),
    "attribute grad": from_type({"grad": NINES}),
    "attribute requires_grad": from_type({"requires_grad": True}),
    "attribute __class__": from_type({"__class__": Global("torch", "Tensor")}),
    "attribute names": from_type({"names": ("a",)}),
    "state of three": from_type((None, None, {"data": NINES})),
    "state a list": from_type([("data", NINES)]),
    "state a text": parameter("data"),
    "states of two calls": called(
        "_rebuild_parameter_with_state", from_type({"a": 1}), True, HOOKS, {"b": 2}
    ),
    "neg False": flagged({"neg": False}),
    "neg 1": flagged({"neg": 1}),
    "neg None": flagged({"neg": None}),
    "neg text": flagged({"neg": "a"}),
    "conj of real numbers": flagged({"conj": True}),
    "metadata a list": flagged([("neg", True)]),
    "requires_grad 1": flagged({}, 1),
    "requires_grad text": flagged({}, "False"),
    "requires_grad None": flagged({}, None),
    "requires_grad of a parameter": called("_rebuild_parameter", tensor(), 1, HOOKS),
    "hooks a number": flagged({}, False, 5),
    "on the meta device": tensor(PersistentId(("storage", Global("torch", "FloatStorage"), "0", "meta", 4))),
    "no location": tensor(PersistentId(("storage", Global("torch", "FloatStorage"), "0", None, 4))),
    "a view in an archive": tensor(storage("0", 4, Global("torch", "FloatStorage"), ("1", 0, 4))),
    "v1 of six": called("_rebuild_tensor", *tensor().args),
    "v2 of four": called("_rebuild_tensor_v2", *tensor().args[:4]),
    "dtype of another module": called("_rebuild_tensor_v3", *tensor().args, Global("numpy", "float32")),
    "old tensor of another class": PickleObject(Global("torch", "LongTensor"), (), 0, state=VIEW),
    "tensor of a list": PickleObject(Global("torch", "FloatTensor"), ([1.0, 2.0],), 0),
    "tensor of a size": PickleObject(Global("torch", "FloatTensor"), (4,), 0),
    "channels of float32": channels([0.5, 0.5], [1.5, 0]),
    "channels of a tuple": channels((0.5, 0.5), (0, 0)),
    "symmetric channels": channels([0.5, 0.5], [0, 0], "per_channel_symmetric"),
    "sparse of an unknown layout": called("_rebuild_sparse_tensor", Global("torch", "strided"), ()),
    "a counter of a list": PickleObject(Global("collections", "Counter"), ([1, 1, 2],), 0),
}
# What must stay readable, and be equal to what torch reads.
SOUND = {
    "plain": tensor(),
    "attributes": from_type({"mark": 1}),
    "attributes and slots": from_type(({"mark": 1}, {"other": 2})),
    "parameter": parameter(),
    "parameter with attributes": parameter({"decay": 0.5}),
    "neg": flagged({"neg": True}),
    "no hooks": flagged({}, False, None),
    "old tensor": PickleObject(Global("torch", "FloatTensor"), (), 0, state=VIEW),
    "ordered dict of a dict": PickleObject(Global("collections", "OrderedDict"), ({"a": tensor()},), 0),
    "counter": PickleObject(Global("collections", "Counter"), ({"a": 2},), 0),
    "keys twice": {"a": {1: tensor(), 2: NINES}},
}


def outcomes(reader: str, paths: Sequence[Path], folder: Path) -> list[tuple[str, str, str]]:
    """Return for each file what ckpttool says, what the reference says, and the outcome."""
    names = [str(path) for path in paths]
    mine, reference = list(attempts("ckpttool", names, folder)), list(attempts(reader, names, folder))
    return [(a[0], b[0], verdict(reader, a, b).outcome) for a, b in zip(mine, reference, strict=True)]


def files(folder: Path, data: dict[str, bytes], suffix: str) -> list[Path]:
    paths = [folder / f"{number}{suffix}" for number in range(len(data))]
    for path, content in zip(paths, data.values(), strict=True):
        path.write_bytes(content)
    return paths


def checkpoint(value: Any) -> bytes:
    """Return an archive of a value that uses two storages."""
    both = {"v": value, "a": tensor(), "b": NINES}
    return archive(members(both, STORAGES))


@pytest.mark.parametrize("value", STATES.values(), ids=STATES)
def test_states_that_can_replace_values_are_refused(value: Any, tmp_path: Path) -> None:
    [path] = files(tmp_path, {"": checkpoint(value)}, ".pt")
    with pytest.raises((FormatError, UnsupportedError)) as caught:
        open_checkpoint(str(path))
    assert caught.value.file == str(path)


@pytest.mark.torch
def test_torch_agrees_about_states(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    every = {name: checkpoint(value) for name, value in (STATES | SOUND).items()}
    paths = files(tmp_path, every, ".pt")
    outcomes_by_name = dict(zip(every, outcomes("torch", paths, tmp_path), strict=True))
    assert {name: outcomes_by_name[name] for name in SOUND} == dict.fromkeys(SOUND, ("read", "read", "equal"))
    assert {outcomes_by_name[name][0] for name in STATES} == {"refused"}
    # Without these the cases above would show nothing: torch reads other numbers.
    assert {name for name in STATES if outcomes_by_name[name][1] == "read"} >= {
        *("BUILD of four on a tensor", "BUILD of five on a parameter"),
        *("state with data", "slot data", "attribute data", "neg False", "neg 1", "tensor of a list"),
    }


@pytest.mark.torch
def test_every_attribute_of_torch_s_own_is_known(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = (
        "import torch, inspect\n"
        "kinds = [vars(k) for k in torch.nn.Parameter.__mro__]\n"
        "names = {n for k in kinds for n, v in k.items() if hasattr(type(v), '__set__')}\n"
        "print(*sorted(n for n in names if not n.startswith('__')))\n"
    )
    status, output = warm.run("torch", program, tmp_path)
    assert status == 0, output
    assert set(output.split()) <= _OWN_NAMES


# ------------------------------------------------------------------ archives


def renamed(index: int, name: str) -> list[Made]:
    return changed(index, name=name)


ARCHIVES = {
    "storage marked as a DOS folder": changed(2, external=0x10),
    "pickle marked as a DOS folder": changed(0, external=0x20 | 0x10),
    "storage marked as a Unix folder": changed(2, external=0o040755 << 16),
    "byte order in capitals": [*renamed(1, "archive/BYTEORDER")],
    "byte order below another case": [*members()[:1], Made("ARCHIVE/byteorder", b"big"), *members()[2:]],
    "constants in capitals": [*members(), Made("archive/Constants.pkl", b"N.")],
    "byte order with a newline": changed(1, data=b"big\n"),
    "byte order in another case": changed(1, data=b"Big"),
    "byte order empty": changed(1, data=b""),
    "alignment no number": [*members(), Made("archive/.storage_alignment", b"6x")],
    "version no number": [*members()[:-1], Made("archive/version", b"x")],
    "one name in two encodings": [
        *members(),
        Made("archive/é".encode(), b"1", flags=1 << 11),
        Made("archive/é".encode(), b"2"),
    ],
    "name not marked as UTF-8": [*members(), Made("archive/é".encode(), b"1")],
}


@pytest.mark.parametrize("output", ARCHIVES.values(), ids=ARCHIVES)
def test_archives_that_readers_understand_differently_are_refused(output: list[Made], tmp_path: Path) -> None:
    [path] = files(tmp_path, {"": archive(output)}, ".pt")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(path))
    assert caught.value.file == str(path)


def test_an_empty_folder_in_an_archive_is_read(tmp_path: Path) -> None:
    data = [*members(), Made("archive/more/", external=0x10), Made("archive/again/", external=0o040755 << 16)]
    [path] = files(tmp_path, {"": archive(data)}, ".pt")
    assert open_checkpoint(str(path)).tree[key("w"),].array().tolist() == [1, 2, 3, 4]


# ------------------------------------------------------------------ streams


@pytest.mark.parametrize("first", [0, 1])
def test_a_part_with_the_key_of_a_storage_is_refused(first: int, tmp_path: Path) -> None:
    part = tensor(stream_storage("7", view=("8", 0, 4)))
    other = tensor(stream_storage("8"))
    data = stream([part, other] if first else [other, part], {"7": ONE, "8": ONE})
    [path] = files(tmp_path, {"": data}, ".pth")
    with pytest.raises(FormatError):
        open_checkpoint(str(path))


def test_a_stream_that_is_a_tar_archive_too_is_refused(tmp_path: Path) -> None:
    """torch tries tar first; a text in the first pickle can hold the rest of a header."""
    start = pickle.dumps(MAGIC, 2)
    data = start[:-1] + b"X" + struct.pack("<I", 600) + b"0" * 600 + b"0."
    data += stream(tensor(stream_storage("7")), {"7": ONE})[len(start) :]
    [path] = files(tmp_path, {"": data}, ".pth")
    assert open_checkpoint(str(path)).tree[()].array().tolist() == [1, 2, 3, 4]
    block = data[:148] + b"%08o" % tarfile.calc_chksums(data[:512])[0] + data[156:512]
    tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    path.write_bytes(block + data[512:])
    with pytest.raises(FormatError):
        open_checkpoint(str(path))


def test_a_persistent_id_without_a_view_is_refused_in_a_stream(tmp_path: Path) -> None:
    [path] = files(tmp_path, {"": stream(tensor(storage("7")))}, ".pth")
    with pytest.raises(FormatError):
        open_checkpoint(str(path))


# ------------------------------------------------------------------ NumPy


def dtype(state: Any = None, *args: Any) -> PickleObject:
    return PickleObject(Global("numpy", "dtype"), args or ("f8", False, True), 0, state=state)


def array(
    kind: Any, data: Any = bytes(range(48)), shape: Any = (2, 3), order: Any = False, *start: Any
) -> PickleObject:
    empty = (Global("numpy", "ndarray"), (0,), b"b")
    state = (*(start or (1,)), shape, kind, order, data)
    return PickleObject(Global("numpy.core.multiarray", "_reconstruct"), empty, 0, state=state)


def scalar(*args: Any) -> PickleObject:
    return PickleObject(Global("numpy.core.multiarray", "scalar"), args, 0)


def buffered(order: Any, kind: Any = None) -> PickleObject:
    args = (bytes(range(48)), kind or dtype(), (2, 3), order)
    return PickleObject(Global("numpy.core.numeric", "_frombuffer"), args, 0)


BIG = (3, ">", None, None, None, -1, -1, 0)
TWICE = PickleObject(Global("numpy", "dtype"), ("f8", False, True), 0, state=BIG)
NUMBERS = {
    "plain": array(dtype((3, "<", None, None, None, -1, -1, 0))),
    "big": array(dtype(BIG)),
    "big without BUILD": array(dtype(None, ">f8", False, True)),
    "little after big": array(dtype((3, "<", None, None, None, -1, -1, 0), ">f8", False, True)),
    "order as bytes": array(dtype((3, b">", None, None, None, -1, -1, 0))),
    "five items": array(dtype((">", None, None, -1, -1))),
    "six items": array(dtype((1, ">", None, None, -1, -1))),
    "seven items": array(dtype((2, ">", None, None, None, -1, -1))),
    "nine items": array(dtype((4, ">", None, None, None, -1, -1, 0, {"a": 1}))),
    "version 5": array(dtype((5, ">", None, None, None, -1, -1, 0))),
    "order x": array(dtype((3, "x", None, None, None, -1, -1, 0))),
    "order of two": array(dtype((3, ">>", None, None, None, -1, -1, 0))),
    "order none": array(dtype((3, None, None, None, None, -1, -1, 0))),
    "subarray": array(dtype((3, "<", (dtype(BIG), (2,)), None, None, -1, -1, 0))),
    "fields": array(dtype((3, "<", None, ("a",), {"a": (dtype(), 0)}, -1, -1, 0))),
    "flags": array(dtype((3, "<", None, None, None, -1, -1, 63))),
    "shared dtype": array(dtype(BIG, "f8")),
    "array without version": PickleObject(
        *(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), 0),
        state=((2, 3), dtype(BIG), True, bytes(range(48))),
    ),
    "array of version 0": array(dtype(), bytes(range(48)), (2, 3), False, 0),
    "array of version 2": array(dtype(), bytes(range(48)), (2, 3), False, 2),
    "order 1": array(dtype(), order=1),
    "order 5": array(dtype(), order=5),
    "order text": array(dtype(), order="F"),
    "order None": array(dtype(), order=None),
    "shape a list": array(dtype(), shape=[2, 3]),
    "data as text": array(dtype(), bytes(range(48)).decode("latin-1")),
    "data as a list": array(dtype(), [0.0] * 6),
    "objects in bytes": array(dtype(None, "O8", False, True), bytes(6)),
    "buffer C": buffered("C"),
    "buffer F": buffered("F"),
    "buffer f": buffered("f"),
    "buffer of bytes F": buffered(b"F"),
    "buffer A": buffered("A"),
    "buffer K": buffered("K"),
    "buffer 1": buffered(1),
    "buffer big": buffered("F", dtype(None, ">f8", False, True)),
    "scalar": scalar(dtype(), struct.pack("<d", 1.5)),
    "scalar big": scalar(dtype(BIG), struct.pack(">d", 1.5)),
    "scalar big without BUILD": scalar(dtype(None, ">f8", False, True), struct.pack(">d", 1.5)),
    "scalar too long": scalar(dtype(), bytes(9)),
    "scalar too short": scalar(dtype(), bytes(7)),
    "scalar of text": scalar(dtype(), struct.pack("<d", 1.5).decode("latin-1")),
}  # fmt: skip
READ = {
    *("plain", "big", "big without BUILD", "little after big", "order as bytes", "five items", "six items"),
    *("seven items", "nine items", "array without version", "array of version 0", "order 1", "data as text"),
    *("buffer C", "buffer F", "buffer f", "buffer of bytes F", "buffer A", "buffer big", "scalar"),
    *("scalar big", "scalar big without BUILD", "scalar of text"),
}


def test_numpy_agrees_about_arrays(tmp_path: Path) -> None:
    every = {name: dumps({"v": value}, 4) for name, value in NUMBERS.items()}
    result = dict(zip(every, outcomes("pickle", files(tmp_path, every, ".pkl"), tmp_path), strict=True))
    faults = {name: one for name, one in result.items() if one[2] not in ("refused", "equal", "explained")}
    assert faults == {}
    assert {name for name, one in result.items() if one[2] == "equal"} >= READ


def every_kind() -> list[Any]:
    """Return arrays and scalars of all kinds that NumPy pickles."""
    np, other = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    return [
        *(np.zeros(3, other.bfloat16), other.bfloat16(1.5), np.dtype(other.bfloat16), np.dtype(">f8")),
        *(np.array(["a"]), np.array([b"ab"]), np.array(["a", "bb"], np.dtypes.StringDType()), np.str_("a")),
        *(np.zeros(2, [("a", "f4"), ("b", "i2", (2,))]), np.rec.array([(1, 2.0)]), np.void(b"abc")),
        *(np.array(["2020"], "M8[D]"), np.datetime64("2020"), np.array([1], np.longdouble), np.bool_(1)),
        *(np.ma.array([1, 2], mask=[0, 1]), np.random.default_rng(1), np.random.RandomState(1)),
        *(np.array([{1: 2}], object), np.asfortranarray(np.ones((2, 3))), np.arange(3)[::-1]),
        np.zeros(3, np.dtype("f8", metadata={"a": 1})),
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_every_kind_are_listed(protocol: int) -> None:
    for value in every_kind():
        data = pickle.dumps({"v": value}, protocol)
        for builders in (BUILDERS, LOADED):
            assert len(parse_pickle(data, builders={**CONTAINERS, **builders}).value) == 1


@pytest.mark.parametrize("name", NUMBERS)
def test_torch_s_archives_read_arrays_alike(name: str, tmp_path: Path) -> None:
    """The two readers of pickles have builders of scalars of their own."""
    built = {".pkl": dumps({"v": NUMBERS[name]}, 4), ".pt": archive(members(dumps({"v": NUMBERS[name]}, 4)))}
    values = []
    for suffix, data in built.items():
        [path] = files(tmp_path, {"": data}, suffix)
        try:
            tree = open_checkpoint(str(path)).tree
        except CkpttoolError:
            values.append(None)
            continue
        arrays = [leaf.array().tolist() for _, leaf in tree.tensors()]
        values.append(arrays or [value.value for _, value in tree.plain()])
    assert values[0] == values[1]


LATE = (
    b"\x80\x02}(X\x01\x00\x00\x00vcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
)
LATE += b"(K\x01K\x01\x85cnumpy\ndtype\nX\x02\x00\x00\x00f8\x89\x88\x87Rq\x01\x89C\x08\0\0\0\0\0\0\xf8?tb"
AGAIN = b"(K\x03X\x01\x00\x00\x00>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


@pytest.mark.parametrize("more", [b"h\x01" + AGAIN, b"h\x01" + AGAIN + AGAIN])
def test_a_dtype_that_changes_later_is_refused(more: bytes) -> None:
    sound = parse_pickle(LATE + b"u.", builders={**CONTAINERS, **BUILDERS}).value
    assert sound["v"].parts().shape == (1,)
    with pytest.raises(FormatError):
        parse_pickle(LATE + b"X\x01\x00\x00\x00w" + more + b"u.", builders={**CONTAINERS, **BUILDERS})


# ------------------------------------------------------------------ opcodes


@pytest.mark.parametrize(
    "data",
    [b"I10\n.", b"I-7\n.", b"I01\n.", b"I00\n.", b"L5L\n.", b"F1.5\n.", b"F-1e5\n.", b"Finf\n.", b"F-.5\n."],
)
def test_numbers_as_text_are_those_of_python(data: bytes) -> None:
    expected = pickle.loads(data)
    values = parse_pickle(data).value
    assert (type(values), values) == (type(expected), expected)


@pytest.mark.parametrize(
    "data", [b"I010\n.", b"I0x1F\n.", b"I 1\n.", b"I1_0\n.", b"I+1\n.", b"L010L\n.", b"F1_0\n."]
)
def test_numbers_that_pythons_read_differently_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_pickle(data)


NEW = {
    "OrderedDict": b"ccollections\nOrderedDict\n](K\x01K\x02\x86e\x85\x81.",
    "Counter": b"ccollections\nCounter\n}K\x01K\x02s\x85\x81.",
    "set": b"cbuiltins\nset\n]K\x01a\x85\x81.",
    "bytearray": b"cbuiltins\nbytearray\nC\x01a\x85\x81.",
}


@pytest.mark.parametrize("name", NEW)
def test_new_takes_no_arguments(name: str) -> None:
    """`__new__` of these classes ignores what a call of them takes."""
    assert not pickle.loads(NEW[name])
    with pytest.raises(FormatError):
        parse_pickle(NEW[name])
    assert parse_pickle(NEW[name].replace(b"\x81.", b"R.")).value


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", 2.5: "b"},
        collections.OrderedDict({"a": 1}),
        {(1, "a"): 2, (1.5,): 3},
        {b"x": 1},
        {None: 1, 2j: 3},
    ],
)
def test_keys_are_equal_where_pythons_are(value: dict[Any, Any]) -> None:
    data = pickle.dumps(value, 2)
    twice = data[:-1] + b"(" + b"".join(pickle.dumps(k, 2)[2:-1] + b"K\x63" for k in value) + b"u."
    expected = pickle.loads(twice)
    assert list(parse_pickle(twice).value.items()) == list(expected.items())


def test_items_of_sets_are_distinct() -> None:
    one = b"K\x01\x88G?\xf0" + bytes(6)
    data = b"\x8f(" + one + b"K\x02C\x01aX\x01\x00\x00\x00aNN(K\x01K\x02t(\x88K\x02t\x90."
    expected = pickle.loads(data)
    assert set(parse_pickle(data).value) == expected
    assert len(parse_pickle(data).value) == len(expected)
    for wrong in (b"\x8f(]\x90.", b"\x8f(}\x90.", b"(\x8f\x91."):
        with pytest.raises(FormatError):
            parse_pickle(wrong)


_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


@pytest.mark.parametrize(
    "tail", [b"]\x85Ns.", b"}\x85Ns.", b"\x8f\x85Ns.", _ARRAY + b"Ns.", _ARRAY + b"\x85Ns."]
)
def test_unhashable_keys_are_refused(tail: bytes) -> None:
    with pytest.raises(FormatError):
        parse_pickle(b"}" + tail, builders={**CONTAINERS, **BUILDERS})


def test_labels_of_keys_do_not_hide_each_other(tmp_path: Path) -> None:
    value = {(1,): 1, "(1,)": 2, 2j: 3, "<complex 2>": 4, "x": {"(1,)": 5, (1,): 6}}
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value, 4))
    assert sorted(leaf.value for _, leaf in open_checkpoint(str(path)).tree.plain()) == [1, 2, 3, 4, 5, 6]


# ------------------------------------------------------------------ hashes

PRIME = (1 << 61) - 1
COUNT = 6_000


def _long(value: int) -> bytes:
    return b"\x8a\x10" + value.to_bytes(16, "little")


def _float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


COLLIDING: dict[str, Callable[[int], bytes]] = {
    "integers": lambda n: _long(PRIME * (n + 1)),
    "complex": lambda n: b"h\x00" + _float(-1000003.0 * n) + _float(n) + b"\x86R",
    "floats": lambda n: _float((n + 1) * 2.0**70),
    "tuples": lambda n: b"(" + _long(PRIME * (n + 1)) + b"K\x01t",
    "NaNs": lambda n: _float(float("nan")),
}


@pytest.mark.parametrize("name", COLLIDING)
@pytest.mark.parametrize("number", [200, COUNT])
def test_few_keys_of_a_dict_may_collide(name: str, number: int) -> None:
    one = b"}(" + b"".join(COLLIDING[name](n) + b"N" for n in range(number)) + b"u"
    data = b"\x80\x02cbuiltins\ncomplex\nq\x000](" + one * (COUNT // number) + b"e."
    value = parse_pickle(data).value
    assert [len(mapping) for mapping in value] == [number] * (COUNT // number)
    for mapping in value:
        hashed = [hash(kept) for kept in mapping if type(kept) is not OpaqueKey]
        assert len(hashed) <= Limits().pickle_hashed_keys + SPREAD
        assert max(collections.Counter(hashed).values()) <= 2 * SPREAD


def test_equal_keys_among_many_are_refused() -> None:
    keys = [_float(n + 0.5) for n in range(6000)]
    data = b"\x80\x02}(" + b"".join(item + b"N" for item in keys)
    values = parse_pickle(data + b"u.").value
    assert len(values) == 6000
    assert sum(type(item) is OpaqueKey for item in values) > 1000
    for again in (0.5, 5999.5):
        with pytest.raises(FormatError):
            parse_pickle(data + _float(again) + b"Nu.")


# ------------------------------------------------------------------ mutants


@pytest.mark.torch
def test_torch_agrees_about_mutants(tmp_path: Path) -> None:
    import random

    pytest.importorskip("torch")
    value = {
        "net": {"w": parameter({"m": 1}), "b": tensor(), "n": flagged({"neg": True})},
        "s": 7,
        "t": (1, True),
    }
    data, choose = dumps({**value, "o": NINES, "type": from_type({"mark": 1})}), random.Random(3)
    every = {}
    for number in range(250):
        every[str(number)] = archive(members(pickle_mutants.mutated(data, choose), STORAGES))
    verdicts = outcomes("torch", files(tmp_path, every, ".pt"), tmp_path)
    assert {one[2] for one in verdicts} & {"different", "failed", "unverified"} == set()
    assert sum(one[2] == "equal" for one in verdicts) > 20
