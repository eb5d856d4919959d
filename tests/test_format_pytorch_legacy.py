"""torch's stream of before 1.6: what it holds, how it lies, and what is refused; PyTorch is the referee."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import (
    Checkpoint,
    CkpttoolError,
    FormatError,
    Record,
    Span,
    TruncatedError,
    UnsupportedError,
    dangerous_calls,
    key,
)
from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, dumps, pickle_reader
from ckpttool.formats import Probe, torch_legacy
from ckpttool.listing.audit import audit_notes
from tests import truths
from tests.conftest import in_process
from tests.golden_texts import Golden
from tests.test_format_pytorch import V2, floats
from tests.test_format_pytorch_containers import WithoutChecksums, tree_contents
from tests.torch_forms import stream

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYS_INFO = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
ONE = floats(1, 2, 3, 4)
FLOATS = Global("torch", "FloatStorage")


def storage(name: str = "7", count: int = 4, kind: Global = FLOATS, view: object = None) -> PersistentId:
    return PersistentId(("storage", kind, name, "cpu", count, view))


def tensor(
    where: PersistentId | None = None, offset: int = 0, shape: Any = (4,), strides: Any = (1,)
) -> PickleObject:
    args = (where or storage(), offset, shape, strides, False, Dict("collections.OrderedDict"))
    return PickleObject(V2, args, 0)


def written(
    value: Any,
    storages: Mapping[Any, bytes] | None = None,
    *,
    width: int = 4,
    keys: Any = None,
    start: tuple[Any, ...] = (MAGIC, PROTOCOL, SYS_INFO),
) -> bytes:
    """Return the stream of a value; each storage's count is that of `width` bytes an element."""
    contents = {"7": ONE} if storages is None else storages
    data = b"".join(pickle.dumps(item, 2) for item in start) + dumps(value)
    data += pickle.dumps(list(contents) if keys is None else keys, 2)
    return data + b"".join(struct.pack("<q", len(item) // width) + item for item in contents.values())


def read(data: bytes, folder: Path) -> Checkpoint:
    (folder / "x.pth").write_bytes(data)
    return torch_legacy.read(str(folder / "x.pth"))


class TestStream(WithoutChecksums):
    module = torch_legacy

    def make(self, folder: Path) -> str:
        contents = {name: bytes(range(200)) for name in "abcdef"}
        value = {name: tensor(storage(name, 50), 0, (5, 10), (10, 1)) for name in contents}
        (folder / "x.pth").write_bytes(written({**value, "step": 3}, contents))
        return str(folder / "x.pth")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# ------------------------------------------------------------------ recognising


@pytest.mark.parametrize("protocol", range(1, 6))
def test_claims_the_magic_number_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(MAGIC, protocol))
    assert torch_legacy.claims(Probe(str(tmp_path / "x"))) == str(tmp_path / "x")


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps(MAGIC + 1, 2), b" " + pickle.dumps(MAGIC, 2)])
def test_claims_nothing_else(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert torch_legacy.claims(Probe(str(tmp_path / "x"))) is None


# ------------------------------------------------------------------ reading


def test_storages_are_spans_in_the_order_of_the_list(tmp_path: Path) -> None:
    value = {"a": tensor(storage("9")), "b": tensor(storage("10"), 1, (2,), (2,))}
    data = written(value, {"10": ONE, "9": floats(5, 6, 7, 8)})
    checkpoint = read(data, tmp_path)
    leaf = checkpoint.tree[key("a"),]
    assert leaf.source == Span(checkpoint.files[0], len(data) - 16, 16)
    assert leaf.array().tolist() == [5, 6, 7, 8]
    assert checkpoint.tree[key("b"),].array().tolist() == [2, 4]
    assert (checkpoint.integrity, str(checkpoint.writer).split()[-1]) == ("none", "1001")


def test_parts_of_a_storage_lie_in_it(tmp_path: Path) -> None:
    """torch before 0.4 named storages that are parts of others by (key, offset, size)."""
    value = {
        "whole": tensor(),
        "part": tensor(storage(view=("8", 1, 2)), 0, (2,), (1,)),
        "again": tensor(storage(view=("8", 1, 2)), 0, (2,), (1,)),
        "last": tensor(storage(view=("9", 3, 1)), 0, (), ()),
    }
    tree = read(written(value), tmp_path).tree
    assert [leaf.array().tolist() for _, leaf in tree.tensors()] == [[1, 2, 3, 4], [2, 3], 4]
    assert [alias.key for alias in tree.aliases[key("part"),]] == ["again"]


@pytest.mark.parametrize("view", [("8", 3, 2), ("8", -1, 2), ("8", 1, -1), ("8", 1 << 62, 1), (8, 0, 1), "8"])
def test_parts_beyond_their_storage_are_refused(view: object, tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        read(written(tensor(storage(view=view), 0, (1,), (1,))), tmp_path)
    golden(caught.value)


def test_one_key_for_two_parts_is_refused(tmp_path: Path, golden: Golden) -> None:
    value = [tensor(storage(view=("8", start, 2)), 0, (2,), (1,)) for start in (0, 1)]
    with pytest.raises(FormatError) as caught:
        read(written(value), tmp_path)
    golden(caught.value)


def test_untyped_and_cuda_storages(tmp_path: Path) -> None:
    # Where the writer had a storage is nobody's concern.
    value = [
        storage("a", 3, Global("torch.storage", "UntypedStorage")),
        tensor(storage("b", 3, Global("torch.cuda", "CharStorage")), 0, (3,), (1,)),
    ]
    tree = read(written(value, {"a": b"\1\2\3", "b": b"\xff\0\1"}, width=1), tmp_path).tree
    assert [(leaf.dtype, leaf.array().tolist()) for _, leaf in tree.tensors()] == [
        ("uint8", [1, 2, 3]),
        ("int8", [-1, 0, 1]),
    ]


def test_the_source_code_of_classes_is_listed_and_not_run(tmp_path: Path, golden: Golden) -> None:
    code = "class Net:\n    raise SystemExit\n"
    net = PickleObject(PersistentId(("module", Global("nets", "Net"), "/home/x/nets.py", code)), (), 0)
    net.state = {"w": tensor()}
    checkpoint = read(written(net), tmp_path)
    assert [leaf.key for _, leaf in checkpoint.tree.tensors()] == ["w"]
    assert checkpoint.tree.containers[()].name == "nets.Net"
    assert checkpoint.details["sources"] == {"nets.Net": {"file": "/home/x/nets.py", "source": code}}
    golden("\n".join(checkpoint.notes))
    shown = in_process("inspect", tmp_path / "x.pth", "--json").json()
    assert shown["details"]["sources"]["nets.Net"]["source"] == code


def test_a_class_without_its_source_is_a_name(tmp_path: Path) -> None:
    net = PickleObject(PersistentId(("module", Global("nets", "Net"), None, None)), (), 0)
    checkpoint = read(written([net], {}), tmp_path)
    assert next(leaf for _, leaf in checkpoint.tree.items()).value == Record("nets.Net")
    assert (checkpoint.notes, dict(checkpoint.details)) == ((), {})


def test_a_call_that_can_act_is_named_and_not_made(tmp_path: Path, golden: Golden) -> None:
    evil = PickleObject(PersistentId(("module", Global("os", "system"), None, None)), ("true",), 0)
    checkpoint = read(written({"a": tensor(), "b": evil}), tmp_path)
    golden("\n".join(audit_notes(checkpoint.code_references)))
    assert checkpoint.tree[key("a"),].array().tolist() == [1, 2, 3, 4]


class Payload:
    """Something whose pickle asks for a call."""

    def __reduce__(self) -> Any:
        return os.getcwd, ()


def test_calls_in_every_pickle_are_named(tmp_path: Path, golden: Golden) -> None:
    value = PickleObject(Global("os", "getpid"), (), 0)
    # GLOBAL, EMPTY_TUPLE, REDUCE, POP before the list of keys: nothing of the call is left.
    keys = b"cos\ngetuid\n)R0"
    data = written([tensor(), value], start=(MAGIC, PROTOCOL, Payload()))
    at = data.index(pickle.dumps(["7"], 2)) + 2
    checkpoint = read(data[:at] + keys + data[at:], tmp_path)
    assert dangerous_calls(checkpoint.code_references) == [
        f"{os.getcwd.__module__}.getcwd",
        "os.getpid",
        "os.getuid",
    ]
    golden("\n".join(audit_notes(checkpoint.code_references)))


def test_python_2_gives_an_ordered_dict_its_pairs() -> None:
    data = b"\x80\x02ccollections\nOrderedDict\n](" + b"](U\x01aK\x01e](U\x01bK\x02e" + b"e\x85R."
    value = pickle_reader.parse_pickle(data).value
    assert type(value) is Dict
    assert (value.name, dict(value)) == ("collections.OrderedDict", {"a": 1, "b": 2})


@pytest.mark.parametrize("length", [*range(1, 200, 7), 400, 1 << 16])
def test_the_size_of_what_is_read_at_once_is_not_seen(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {
        "é" * 40: tensor(),
        "f": 1.5,
        "long": 1 << 70,
        "many": [str(n) for n in range(300)],
        "b": b"x" * 99,
    }
    data = written([value, value])
    expected = tree_contents(read(data, tmp_path).tree)
    monkeypatch.setattr(torch_legacy, "LONG", length)
    monkeypatch.setattr(torch_legacy, "SHORT", length)
    assert tree_contents(read(data, tmp_path).tree) == expected


def test_a_module_that_python_2_and_torch_0_3_pickled(tmp_path: Path) -> None:
    """torch/autograd/variable.py before 0.4, __reduce_ex__: a call, then (requires_grad, volatile, hooks)."""

    def ordered(*pairs: Any) -> PickleObject:
        return PickleObject(Global("collections", "OrderedDict"), ([list(pair) for pair in pairs],), 0)

    def output(name: str, args: tuple[Any, ...], state: Any) -> PickleObject:
        call = PickleObject(Global(*name.rsplit(".", 1)), args, 0)
        call.state = state
        return call

    weight = output("torch.nn.parameter.Parameter", (tensor(),), (True, False, ordered()))
    inner = output("torch.nn.modules.linear.Linear", (), {"_parameters": ordered(("weight", weight))})
    buffers = ordered(("running_mean", tensor(offset=1, shape=(2,))))
    net = output("nets.Net", (), {"_modules": ordered(("l1", inner)), "_buffers": buffers, "training": True})
    tree = read(written(net), tmp_path).tree
    assert [(leaf.key, leaf.role, leaf.trainable) for _, leaf in tree.tensors()] == [
        ("l1.weight", "parameter", True),
        ("running_mean", "buffer", None),
    ]


def test_bytes_behind_the_last_storage_are_noted(tmp_path: Path, golden: Golden) -> None:
    assert read(written(tensor()), tmp_path).notes == ()
    golden("\n".join(read(written(tensor()) + b"more", tmp_path).notes))


def test_two_gigabytes_are_listed_without_being_read(tmp_path: Path) -> None:
    data = written(tensor(storage(count=1 << 29), 0, (1 << 29,), (1,)), {}, keys=["7"])
    with open(tmp_path / "x.pth", "wb") as file:
        file.write(data + struct.pack("<q", 1 << 29))
        file.truncate(len(data) + 8 + (1 << 31))
    tracemalloc.start()
    leaf = torch_legacy.read(str(tmp_path / "x.pth")).tree[()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (leaf.nbytes, leaf.source.offset) == (1 << 31, len(data) + 8)
    assert peak < 1 << 20


def test_8000_storages_are_listed_quickly(tmp_path: Path) -> None:
    names = [str(n) for n in range(8000)]
    data = written({name: tensor(storage(name)) for name in names}, dict.fromkeys(names, ONE))
    began = time.process_time()
    assert len(read(data, tmp_path).tree) == 8000
    assert time.process_time() - began < 5


# ------------------------------------------------------------------ refusing

WRONG: dict[str, bytes] = {
    "another magic number": written(1, {}, start=(MAGIC + 1, PROTOCOL, SYS_INFO)),
    "too few elements": written(tensor(storage(count=5))),
    "too many elements": written(tensor(storage(count=3), 0, (3,), (1,))),
    "a negative count": written(tensor(storage(count=-4))),
    "a count that is a text": written(tensor(storage(count="4"))),  # type: ignore[arg-type]
    "2^36 elements named": written(tensor(storage(count=1 << 36))),
    "2^70 elements named": written(tensor(storage(count=1 << 70))),
    "2^36 elements": written(tensor(storage(count=1 << 36)), {}, keys=["7"]) + struct.pack("<q", 1 << 36),
    "no storage": written(tensor(), {}),
    "another storage": written(tensor(), {"7": ONE, "8": ONE}),
    "a storage twice": written(tensor(), {"7": ONE}, keys=["7", "7"]) + struct.pack("<q", 4) + ONE,
    "keys that are no list": written(tensor(), keys="7"),
    "keys that are numbers": written(tensor(), keys=[7]),
    "two types": written([storage(), storage(kind=Global("torch", "IntStorage"))]),
    "a tensor beyond its storage": written(tensor(offset=1)),
    "a persistent id of another kind": written(PersistentId(("storage", FLOATS))),
    "a persistent id that is a text": written(PersistentId("7")),
    "a class that is none": written(PersistentId(("module", "nets.Net", None, None)), {}),
    "source that is none": written(PersistentId(("module", Global("n", "N"), None, 7)), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str, tmp_path: Path) -> None:
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        read(WRONG[name], tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert caught.value.file == str(tmp_path / "x.pth")


def test_keys_that_are_no_list(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        read(written(tensor(), keys=("7",)), tmp_path)
    golden(caught.value)


def test_what_is_not_known_is_unsupported(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(written(1, {}, start=(MAGIC, 1002, SYS_INFO)), tmp_path)
    golden(caught.value)
    with pytest.raises(UnsupportedError) as caught:
        read(written(storage(kind=Global("nets", "Storage"))), tmp_path)
    golden(caught.value)
    with pytest.raises(UnsupportedError) as caught:
        read(written(storage(kind=Global("torch", "\x1b[2J" * 99))), tmp_path)
    golden(caught.value)
    assert str(caught.value).isprintable()


def test_every_truncation_is_one_sentence(tmp_path: Path) -> None:
    data = written({"a": tensor(), "é": [1.5, "ü" * 20, b"x" * 300]})
    for length in range(15, len(data), 2):
        with pytest.raises(CkpttoolError) as caught:
            read(data[:length], tmp_path)
        assert isinstance(caught.value, TruncatedError) or caught.value.offset is not None
        assert str(caught.value).isprintable()


# ------------------------------------------------------------------ PyTorch as referee


@pytest.mark.torch
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_whole_modules_are_listed_by_their_state_dicts_names(
    torch: Any, protocol: int, tmp_path: Path
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    checkpoint = torch_legacy.read(str(stream(torch, net, tmp_path, protocol)))
    leaves = {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}
    assert leaves.keys() == net.state_dict().keys()
    for name, expected in net.state_dict().items():
        assert bytes(leaves[name].read()) == expected.numpy().tobytes()
    source = checkpoint.details["sources"]["torch.nn.modules.linear.Linear"]["source"]
    assert source.startswith("class Linear(")


@pytest.mark.torch
def test_a_big_endian_machine_wrote_little_endian_numbers(torch: Any, tmp_path: Path) -> None:
    """torch/csrc/serialization.cpp turns numbers around there, and loading never looks at the flag."""
    path = stream(torch, {"w": torch.arange(5.0)}, tmp_path)
    at = path.read_bytes().index(b"\x88", path.read_bytes().index(b"little_endian"))
    data = path.read_bytes()
    path.write_bytes(data[:at] + b"\x89" + data[at + 1 :])
    assert torch.load(path, weights_only=True)["w"].tolist() == [0, 1, 2, 3, 4]
    assert torch_legacy.read(str(path)).tree[key("w"),].array().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.torch
def test_torch_reads_what_this_test_writes(torch: Any) -> None:
    """The crafted streams above are torch's own form."""
    value = {
        "a": tensor(),
        "b": tensor(storage("8"), 1, (2,), (2,)),
        "part": tensor(storage("8", view=("9", 2, 2)), 1, (1,), (1,)),
    }
    back = torch.load(io.BytesIO(written(value, {"7": ONE, "8": floats(5, 6, 7, 8)})), weights_only=True)
    assert [tensor.tolist() for tensor in back.values()] == [[1, 2, 3, 4], [6, 8], [8]]


@pytest.mark.torch
def test_a_stream_becomes_a_zip_file(torch: Any, tmp_path: Path) -> None:
    value = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).state_dict()
    ran = in_process("convert", stream(torch, value, tmp_path), tmp_path / "new.pt", "--to", "torch")
    assert ran.status == 0, ran.err
    back = torch.load(tmp_path / "new.pt", weights_only=True)
    assert list(back) == list(value)
    assert all(torch.equal(back[name], value[name]) for name in value)


# ------------------------------------------------------------------ other people's files


@pytest.mark.corpus
def test_corpus_is_read_as_torch_reads_it() -> None:
    files = list(truths.files(torch_legacy))
    assert len(files) >= 16
    for path in files:
        truths.require(torch_legacy, path)
