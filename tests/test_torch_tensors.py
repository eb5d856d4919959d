"""Tensors and objects inside torch's pickles: torch is the referee for every storage, view and composite."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.core import (
    CkpttoolError,
    Container,
    FormatError,
    Leaf,
    Record,
    Tree,
    UnsupportedError,
    ValueLeaf,
    attr,
    dangerous_calls,
    index,
    key,
)
from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, dumps
from ckpttool.formats import open_checkpoint, torch_zip
from tests.pickles import damaged, importable, stand_in
from tests.test_format_pytorch import archive, floats, read, tensor, written

ONE = floats(1, 2, 3, 4)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def saved(torch: Any, value: Any, folder: Path) -> Tree:
    path = folder / "checkpoint.pt"
    torch.save(value, path)
    return torch_zip.read(str(path)).tree


def bytes_of(torch: Any, value: Any) -> bytes:
    """The elements in C order as torch has them, conj and neg applied."""
    dense = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def named(tree: Tree) -> dict[str, Leaf]:
    leaves = {leaf.key: leaf for _, leaf in tree.tensors()}
    for path, aliases in tree.aliases.items():
        leaves |= {alias.key: tree[path] for alias in aliases if alias.key is not None}
    return leaves


# ------------------------------------------------------------------ storages

CLASSES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}  # fmt: skip


@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_typed_storage_of_every_device(module, name, tmp_path):
    from ckpttool.core.dtypes import BY_NAME

    count = 16 // BY_NAME[CLASSES[name]].itemsize
    where = PersistentId(("storage", Global(module, name), "0", "cuda:1", count))
    leaf = read(archive(dumps({"a": tensor(0, (count,), (1,), where)}), {"0": ONE}), tmp_path).tree[key("a"),]
    assert (leaf.dtype, bytes(leaf.read())) == (CLASSES[name], ONE)


@pytest.mark.parametrize(
    "kind",
    [
        Global("torch", "UntypedStorage"),
        Global("torch.storage", "UntypedStorage"),
        Global("torch.storage", "_UntypedStorage"),
        Global("torch.cuda", "UntypedStorage"),
    ],
)
def test_untyped_storages_are_bytes(kind, tmp_path):
    where = PersistentId(("storage", kind, "0", "cpu", 16))
    tree = read(archive(dumps({"a": tensor(0, (16,), (1,), where), "s": where}), {"0": ONE}), tmp_path).tree
    assert (tree[key("a"),].dtype, bytes(tree[key("a"),].read())) == ("uint8", ONE)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_saved_alone_are_listed(torch, tmp_path):
    value = {"typed": torch.ones(3).storage(), "bytes": torch.ones(3).untyped_storage()}
    tree = saved(torch, value, tmp_path)
    assert (tree[key("typed"),].dtype, tree[key("typed"),].shape) == ("float32", (3,))
    assert (tree[key("bytes"),].dtype, tree[key("bytes"),].shape) == ("uint8", (12,))
    assert {leaf.role for _, leaf in tree.tensors()} == {"other"}


@pytest.mark.torch
def test_storages_of_two_types_over_the_same_bytes(torch, tmp_path):
    base = torch.arange(8, dtype=torch.uint8)
    value = {"a": base, "b": base.view(torch.float8_e5m2), "c": base.view(torch.uint16)}
    tree = saved(torch, value, tmp_path)
    for name, expected in value.items():
        assert bytes(tree[key(name),].read()) == bytes_of(torch, expected)


SUB_BYTE = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
OPAQUE = [*SUB_BYTE, "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"]


@pytest.mark.parametrize("name", OPAQUE)
def test_types_that_no_array_has_are_named(name, tmp_path):
    where = PersistentId(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", 16))
    args = (where, 0, (2, 4), (4, 1), False, Dict("collections.OrderedDict"), Global("torch", name))
    value = {"a": PickleObject(Global("torch._utils", "_rebuild_tensor_v3"), args, 0)}
    tree = read(archive(dumps(value), {"0": ONE}), tmp_path).tree
    assert tree[key("a"),] == ValueLeaf(Record("torch.Tensor", f"{name}[2, 4]"))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_halves_of_complex_numbers(torch, tmp_path):
    wave = torch.tensor([[1 + 2j, 3 - 4j], [0, -1j]], dtype=torch.complex32)
    value = {"w": wave, "c": wave.conj(), "t": wave.conj().T}
    tree = saved(torch, value, tmp_path)
    for name in ("w", "c", "t"):
        leaf = tree[key(name),]
        assert (leaf.dtype, leaf.shape) == ("complex32", (2, 2))
        assert bytes(leaf.read()) == bytes_of(torch, value[name]), name
    with pytest.raises(UnsupportedError, match="complex32"):
        tree[key("w"),].array()
    value = {"n": wave.conj().imag}
    assert bytes(saved(torch, value, tmp_path)[key("n"),].read()) == bytes_of(torch, value["n"])
    path = tmp_path / "ours.pt"
    saved(torch, {"c": wave.conj()}, tmp_path)
    path.write_bytes(written(torch_zip.read(str(tmp_path / "checkpoint.pt")).tree))
    back = torch.load(path, weights_only=True, mmap=True)["c"]
    assert bytes_of(torch, back) == bytes_of(torch, wave.conj())


# ------------------------------------------------------------------ views


@pytest.mark.torch
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_random_views_of_shared_storages(torch, data, tmp_path):
    count = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["float32", "int16", "complex64", "bool", "float8_e5m2", "uint64"]))
    raw = torch.arange(count * 16, dtype=torch.uint8)
    base = (raw % 2 if kind == "bool" else raw).view(getattr(torch, kind))[:count]
    value = {"base": base}
    for number in range(data.draw(st.integers(1, 4))):
        rank = data.draw(st.integers(0, 3))
        shape = data.draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
        strides = data.draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        if reach < count:
            offset = data.draw(st.integers(0, count - 1 - reach))
            view = torch.as_strided(base, shape, strides, offset)
            value[f"v{number}"] = view.conj() if kind == "complex64" and data.draw(st.booleans()) else view
    leaves = named(saved(torch, value, tmp_path))
    assert leaves.keys() == value.keys()
    for name, expected in value.items():
        assert leaves[name].shape == tuple(expected.shape)
        assert bytes(leaves[name].read()) == bytes_of(torch, expected), name


# ------------------------------------------------------------------ quantised, sparse, nested, meta


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32"])
def test_quantised_tensors_are_integers_with_their_scheme(torch, name, tmp_path):
    dtype = getattr(torch, name)
    plain = torch.linspace(-1, 1, 12).reshape(3, 4)
    whole = torch.quantize_per_tensor(plain, 0.1, 2, dtype)
    scales = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    split = torch.quantize_per_channel(plain, scales, torch.tensor([0, 1, 2]), 0, dtype)
    tree = saved(torch, {"w": whole, "c": split, "t": whole.t()}, tmp_path)
    for letter, expected in (("w", whole), ("c", split), ("t", whole.t())):
        leaf = tree[key(letter), attr("int_repr")] if letter != "t" else named(tree)["t"]
        assert (leaf.key, leaf.dtype, leaf.role) == (letter, name, "parameter")
        assert bytes(leaf.read()) == expected.int_repr().contiguous().numpy().tobytes()
    assert tree.containers[key("w"),] == Container("record", "torch.per_tensor_affine")
    assert tree[key("w"), attr("scale")].value == 0.1
    assert tree[key("w"), attr("zero_point")].value == 2
    assert tree.containers[key("c"),] == Container("record", "torch.per_channel_affine")
    assert tree[key("c"), attr("scales")].array().tolist() == scales.tolist()
    assert tree[key("c"), attr("zero_points")].array().tolist() == [0, 1, 2]
    assert tree[key("c"), attr("axis")].value == 0
    assert {tree[key("c"), attr(part)].role for part in ("scales", "zero_points")} == {"other"}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quint4x2", "quint2x4"])
def test_packed_integers_are_named_and_their_scales_read(torch, name, tmp_path):
    scales = torch.tensor([0.1, 0.2, 0.3])
    plain = torch.linspace(-1, 1, 15).reshape(3, 5)
    value = torch.quantize_per_channel(plain, scales, torch.zeros(3), 0, getattr(torch, name))
    tree = saved(torch, {"w": value}, tmp_path)
    assert tree[key("w"), attr("int_repr")] == ValueLeaf(Record("torch.Tensor", f"{name}[3, 5]"))
    assert tree[key("w"), attr("scales")].array().tolist() == value.q_per_channel_scales().tolist()


def quantised(*scheme: Any, shape: tuple[int, ...] = (2, 2)) -> PickleObject:
    where = PersistentId(("storage", Global("torch", "QInt8Storage"), "0", "cpu", 16))
    args = (where, 0, shape, (2, 1), scheme, False, Dict("collections.OrderedDict"))
    return PickleObject(Global("torch._utils", "_rebuild_qtensor"), args, 0)


CHANNELS = Global("torch", "per_channel_affine")
SENSELESS = {
    "no scheme": quantised(),
    "scheme is a text": quantised("affine", 1.0, 0),
    "axis beyond": quantised(CHANNELS, [1.0, 1.0], [0, 0], 2),
    "axis negative": quantised(CHANNELS, [1.0, 1.0], [0, 0], -1),
    "too few scales": quantised(CHANNELS, [1.0], [0, 0], 0),
    "scales a number": quantised(CHANNELS, 1.0, [0, 0], 0),
    "beyond its storage": quantised(Global("torch", "per_tensor_affine"), 1.0, 0, shape=(9, 2)),
    "sparse of one part": PickleObject(
        Global("torch._utils", "_rebuild_sparse_tensor"), (Global("torch", "sparse_coo"), (tensor(),)), 0
    ),
    "sparse of numbers": PickleObject(
        Global("torch._utils", "_rebuild_sparse_tensor"), (Global("torch", "sparse_coo"), (1, 2, 3)), 0
    ),
    "meta of a negative size": PickleObject(
        Global("torch._utils", "_rebuild_meta_tensor_no_storage"),
        (Global("torch", "float32"), (-1,), (1,), False),
        0,
    ),
}


@pytest.mark.parametrize("value", SENSELESS.values(), ids=SENSELESS)
def test_parts_that_make_no_sense_are_refused(value, tmp_path):
    with pytest.raises(FormatError) as caught:
        read(archive(dumps({"a": value}), {"0": ONE}), tmp_path)
    assert caught.value.offset is not None


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_show_their_parts(torch, tmp_path):
    dense = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    value = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((1, 2)),
    }
    rows = ("crow_indices", "col_indices", "values")
    columns = ("ccol_indices", "row_indices", "values")
    parts = {"coo": ("_indices", "_values"), "csr": rows, "bsr": rows, "csc": columns, "bsc": columns}
    tree = saved(torch, value, tmp_path)
    for name, whole in value.items():
        assert tree.containers[key(name),] == Container("record", f"torch.sparse_{name}")
        assert tree.containers[key(name), attr("size")] == Container("tuple", "torch.Size")
        assert tree[key(name), attr("size"), index(1)].value == 4
        for part in parts[name]:
            leaf = tree[key(name), attr(part.removeprefix("_"))]
            expected = getattr(whole, part)()
            assert leaf.shape == tuple(expected.shape)
            assert bytes(leaf.read()) == bytes_of(torch, expected), (name, part)
            assert leaf.role == ("parameter" if "values" in part else "other")
        assert tree[key(name), attr("values")].key == name
    assert tree[key("coo"), attr("is_coalesced")].value is True
    with pytest.raises(UnsupportedError, match="sparse_coo"):
        written(tree)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_show_their_parts(torch, tmp_path):
    value = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)])
    tree = saved(torch, {"n": value}, tmp_path)
    assert tree[key("n"), attr("values")].array().tolist() == [0, 1, 0, 1, 2]
    assert tree[key("n"), attr("sizes")].array().tolist() == [[2], [3]]
    assert tree[key("n"), attr("storage_offsets")].array().tolist() == [0, 2]


@pytest.mark.torch
def test_meta_tensors_are_values_without_bytes(torch, tmp_path):
    value = {"m": torch.empty(2, 3, device="meta"), "p": torch.nn.Parameter(torch.empty(4, device="meta"))}
    tree = saved(torch, value, tmp_path)
    for name, dtype in (("m", "float32[2, 3]"), ("p", "float32[4]")):
        value = tree[key(name),].value
        assert isinstance(value, Record)
        assert (value.name, value.summary.split(" on ")[0]) == ("torch.Tensor", dtype)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["_rebuild_xla_tensor", "_rebuild_device_tensor_from_numpy"])
def test_tensors_that_came_through_numpy(torch, name, tmp_path):
    rebuild = getattr(torch._utils, name)

    class Elsewhere:
        def __init__(self, *args: Any) -> None:
            self.args = args

        def __reduce__(self) -> Any:
            return rebuild, self.args

    turned = np.asfortranarray(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))
    value = {
        "f": Elsewhere(turned, torch.float32, "cpu", False),
        "b": Elsewhere(turned, torch.bfloat16, "cpu", False),
    }
    tree = saved(torch, value, tmp_path)
    path = tmp_path / "checkpoint.pt"
    loaded = torch.load(path, weights_only=False)
    for letter, dtype in (("f", "float32"), ("b", "bfloat16")):
        leaf = tree[key(letter),]
        assert (leaf.dtype, leaf.shape, leaf.role) == (dtype, (2, 3), "parameter")
        assert bytes(leaf.read()) == bytes_of(torch, loaded[letter])


# ------------------------------------------------------------------ parameters, subclasses, attributes


@pytest.mark.torch
def test_attributes_of_tensors_are_kept(torch, tmp_path, golden):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.decay, weight.mask, weight.where = 0.1, torch.zeros(2), {"axis": [1, torch.ones(1)]}
    plain = torch.zeros(3)
    plain.tag = "text"
    path = tmp_path / "checkpoint.pt"
    torch.save({"w": weight, "x": plain}, path)
    checkpoint = torch_zip.read(str(path))
    assert checkpoint.details["attributes"] == {"w": {"decay": 0.1}, "x": {"tag": "text"}}
    golden("\n".join(checkpoint.notes))
    assert checkpoint.tree[key("w"),].trainable is True
    assert checkpoint.tree[attr("w.mask"),].array().tolist() == [0, 0]
    assert checkpoint.tree[attr("w.where"), key("axis"), index(1)].array().tolist() == [1]
    assert {leaf.role for path, leaf in checkpoint.tree.tensors() if path[0].kind == "attr"} == {"other"}
    json.dumps(dict(checkpoint.details))


@pytest.mark.torch
def test_subclasses_are_tensors(torch, tmp_path):
    kind = type("Named", (torch.Tensor,), {"__module__": "gone.package", "__qualname__": "Named"})
    with importable(stand_in("gone.package.Other"), kind):
        value = torch.arange(3.0).as_subclass(kind)
        value.names_of = ["a"]
        tree = saved(torch, {"x": value, "b": torch.nn.Buffer(torch.ones(1))}, tmp_path)
    assert tree[key("x"),].array().tolist() == [0, 1, 2]
    assert tree[attr("x.names_of"), index(0)].value == "a"
    assert tree[key("b"),].trainable is None


def test_parameters_and_tensors_before_0_4(tmp_path):
    old = PickleObject(Global("torch._utils", "_rebuild_tensor"), (*tensor().args[:4],), 0)
    parameter = PickleObject(Global("torch.nn.parameter", "Parameter"), (old,), 0)
    # (requires_grad, volatile, hooks)
    frozen = PickleObject(Global("torch.nn.parameter", "Parameter"), (old,), 0, state=(False, False, None))
    view = (tensor().args[0], 1, (2,), (2,))
    oldest = PickleObject(Global("torch", "FloatTensor"), (), 0, state=view)
    value = {"p": parameter, "f": frozen, "o": oldest}
    leaves = named(read(archive(dumps(value), {"0": ONE}), tmp_path).tree)
    assert [leaves[name].array().tolist() for name in "pfo"] == [[1, 2, 3, 4], [1, 2, 3, 4], [2, 4]]
    assert leaves["p"].trainable is True
    alone = read(archive(dumps({"f": frozen}), {"0": ONE}), tmp_path).tree
    assert alone[key("f"),].trainable is False


# ------------------------------------------------------------------ other objects


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Settings:
    lr: float
    weight: Any


@pytest.mark.torch
def test_records_hold_tensors(torch, tmp_path):
    value = {
        "pair": Pair(torch.ones(1), 2),
        "settings": Settings(0.5, torch.ones(2)),
        "nested": [({1: torch.ones(3)},)],
    }
    tree = saved(torch, value, tmp_path)
    assert tree.containers[key("settings"),] == Container("record", f"{__name__}.Settings")
    assert tree[key("settings"), attr("weight")].key == "settings.weight"
    assert tree[key("settings"), attr("lr")].value == 0.5
    assert tree.containers[key("pair"),].name == f"{__name__}.Pair"
    assert {leaf.shape for _, leaf in tree.tensors()} == {(1,), (2,), (3,)}


@pytest.mark.torch
def test_torch_s_own_values_are_records(torch, tmp_path):
    generator = torch.Generator().manual_seed(7)
    value = {
        "size": torch.Size([2]), "device": torch.device("cuda", 1), "dtype": torch.bfloat16,
        "layout": torch.sparse_csr, "scheme": torch.per_tensor_affine, "generator": generator,
    }  # fmt: skip
    tree = saved(torch, value, tmp_path)
    assert tree[key("device"),].value == Record("torch.device", "'cuda', 1")
    assert tree[key("dtype"),].value == Record("torch.bfloat16")
    assert tree[key("layout"),].value == Record("torch.sparse_csr")
    assert tree[key("scheme"),].value == Record("torch.per_tensor_affine")
    assert tree.containers[key("generator"),] == Container("record", "torch._C.Generator")
    [(_, state)] = tree.tensors()
    assert (state.role, bytes(state.read())) == ("other", bytes_of(torch, generator.get_state()))


@pytest.mark.torch
@pytest.mark.parametrize("spelling", ["core", "_core"])
def test_numpy_of_both_spellings(torch, spelling, tmp_path):
    value = {
        "a": np.arange(6, dtype="<f4").reshape(2, 3), "s": np.float32(1.5), "h": np.float16(2),
        "c": np.complex64(1 + 2j), "structured": np.zeros(2, [("x", "f4"), ("y", "i8")]),
        "when": np.array(["2020-01-01"], "M8[D]"), "object": np.array([{"x": 1}], object),
        "empty": np.zeros((0, 3)), "scalar": np.array(7), "day": datetime.date(2020, 1, 2),
    }  # fmt: skip
    path = tmp_path / "checkpoint.pt"
    torch.save(value, path, pickle_protocol=2)
    data = path.read_bytes()
    other = "core" if spelling == "_core" else "_core"
    swapped = data.replace(f"numpy.{other}.multiarray\n".encode(), f"numpy.{spelling}.multiarray\n".encode())
    if len(swapped) == len(data):
        tree = torch_zip.read(str(path)).tree
    else:
        inner = zipfile.ZipFile(io.BytesIO(data)).read("checkpoint/data.pkl")
        renamed = inner.replace(f"numpy.{other}.".encode(), f"numpy.{spelling}.".encode())
        assert renamed != inner
        tree = read(archive(renamed), tmp_path).tree
    assert np.array_equal(tree[key("a"),].array(), value["a"])
    assert (tree[key("s"),].value, tree[key("h"),].value, tree[key("c"),].value) == (1.5, 2.0, 1 + 2j)
    assert tree[key("structured"),].value.name == "numpy.ndarray"
    assert tree[key("when"),].value.name == "numpy.ndarray"
    assert tree[key("object"), index(0), key("x")].value == 1
    assert tree[key("empty"),].shape == (0, 3)
    assert tree[key("scalar"),].array() == 7
    assert tree[key("day"),].value.name == "datetime.date"


# ------------------------------------------------------------------ whole modules


@pytest.mark.torch
def test_a_module_s_tensors_have_the_names_of_its_state_dict(torch, tmp_path):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.LSTM(3, 4)])
            self.norm = torch.nn.ModuleDict({"bn": torch.nn.BatchNorm1d(3)})
            self.register_buffer("scale", torch.ones(3))
            self.register_buffer("cache", torch.ones(5), persistent=False)
            self.tied = self.body[0].weight
            self.loose = torch.ones(7)

    net = Net()
    net.norm["bn"](torch.randn(4, 3))
    kind = type(net)
    kind.__module__, kind.__qualname__ = "gone.nets", "Net"
    with importable(kind):
        tree = saved(torch, {"net": net}, tmp_path)
    leaves = named(tree)
    expected = net.state_dict(prefix="net.")
    assert expected.keys() <= leaves.keys()
    for name, value in expected.items():
        assert bytes(leaves[name].read()) == bytes_of(torch, value), name
    buffers = {f"net.{name}" for name, _ in net.named_buffers()}
    counters = {name for name in buffers if name.endswith("num_batches_tracked")}
    assert {name for name, leaf in leaves.items() if leaf.role == "buffer"} == buffers - counters
    assert {name for name, leaf in leaves.items() if leaf.role == "counter"} == counters
    assert leaves["net.loose"].role == "other"
    assert {name for name, leaf in leaves.items() if leaf.trainable} >= {"net.body.0.weight", "net.tied"}
    assert tree.containers[key("net"),] == Container("record", "gone.nets.Net")


# ------------------------------------------------------------------ pickles that torch did not write


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("protocol", range(6))
def test_python_s_own_pickles_of_tensors(torch, protocol, tmp_path):
    net = torch.nn.Linear(3, 2)
    value = {
        "net": net.state_dict(), "turned": torch.arange(6.0).reshape(2, 3).t(), "whole": net, "n": 7,
        "conj": torch.tensor([1 + 2j]).conj(), "a": np.arange(3), "empty": torch.zeros(0, 2),
        "small": torch.tensor(1, dtype=torch.int8), "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value, protocol))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.format == "pickle"
    assert "torch" in str(checkpoint.writer).lower()
    leaves = named(checkpoint.tree)
    for name in ("turned", "conj", "empty", "small", "half"):
        assert bytes(leaves[name].read()) == bytes_of(torch, value[name]), name
    for name, expected in net.state_dict().items():
        assert bytes(leaves[f"net.{name}"].read()) == bytes_of(torch, expected)
        assert bytes(leaves[f"whole.{name}"].read()) == bytes_of(torch, expected)
    assert checkpoint.tree[key("n"),].value == 7
    assert leaves["a"].array().tolist() == [0, 1, 2]
    assert checkpoint.notes == ()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_payload_beside_a_storage_is_named(torch, tmp_path):
    data = pickle.dumps([torch.arange(64.0), os.getcwd], 4)
    # The last item is called: the list ends in APPENDS and STOP.
    (tmp_path / "x.pkl").write_bytes(data[:-2] + b")R" + data[-2:])
    checkpoint = open_checkpoint(str(tmp_path / "x.pkl"))
    assert dangerous_calls(checkpoint.code_references) == ["posix.getcwd"]
    assert [leaf.shape for _, leaf in checkpoint.tree.tensors()] == [(64,)]


# ------------------------------------------------------------------ damage


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_damaged_parts_raise_only_our_errors(torch, tmp_path):
    """Bits are flipped in the pickle itself: the archive's checksums would notice them otherwise."""
    plain = torch.linspace(-1, 1, 6).reshape(2, 3)
    weight = torch.nn.Parameter(plain.clone())
    weight.mark = {"x": torch.ones(1)}
    value = {
        "q": torch.quantize_per_tensor(plain, 0.1, 2, torch.qint8),
        "c": torch.quantize_per_channel(plain, torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "s": plain.to_sparse(), "r": plain.to_sparse_csr(), "n": torch.nested.nested_tensor([plain[0]]),
        "m": plain.to("meta"), "w": weight, "f": plain.to(torch.float8_e5m2), "a": np.arange(3.0),
    }  # fmt: skip
    path = tmp_path / "checkpoint.pt"
    torch.save(value, path)
    with zipfile.ZipFile(path) as members:
        pickled = members.read("checkpoint/data.pkl")
        storages = {
            name.rpartition("/")[2]: members.read(name)
            for name in members.namelist()
            if name.startswith("checkpoint/data/")
        }
    listed = 0
    for flipped in damaged(pickled, 600, 5):
        try:
            checkpoint = read(archive(flipped, storages), tmp_path)
        except CkpttoolError:
            continue
        listed += 1
        for _, leaf in checkpoint.tree.tensors():
            with contextlib.suppress(CkpttoolError):
                assert len(leaf.read()) == leaf.nbytes
    assert listed > 50


# ------------------------------------------------------------------ written back

OPTIMIZERS = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "Rprop", "Adadelta"]


@pytest.mark.torch
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(data=st.data())
def test_training_state_is_written_as_torch_would(torch, data, tmp_path):
    """Modules with _metadata, optimizers of any kind, shared and frozen parameters, half of it as whole."""
    kind = data.draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"]))
    wide = data.draw(st.integers(1, 4))
    norm = data.draw(st.sampled_from([torch.nn.BatchNorm1d, torch.nn.LayerNorm, torch.nn.Identity]))
    net = torch.nn.Sequential(torch.nn.Linear(2, wide), norm(wide), torch.nn.Linear(wide, 2))
    net = net.to(getattr(torch, kind))
    if data.draw(st.booleans()):
        net[0].bias.requires_grad_(False)
    optimizer = getattr(torch.optim, data.draw(st.sampled_from(OPTIMIZERS)))(
        [{"params": net[:2].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=0.1
    )
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    state = net.state_dict()
    value = {
        "net": state,
        "opt": optimizer.state_dict(),
        "tied": [state["0.weight"], (state["0.weight"].t(), torch.Size([wide]))],
        "parameters": {
            name: torch.nn.Parameter(p.clone(), p.requires_grad) for name, p in net.named_parameters()
        },
        "epoch": data.draw(st.integers() | st.none() | st.floats(allow_nan=False)),
        "seen": {1, "a"},
    }
    tree = saved(torch, value, tmp_path)
    path = tmp_path / "ours.pt"
    path.write_bytes(written(tree))
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}):
        back = torch.load(path, **options)
        assert_same(torch, back, value)
        assert back["net"]._metadata == state._metadata
        assert back["tied"][0].data_ptr() == back["net"]["0.weight"].data_ptr()
        net.load_state_dict(back["net"])
        optimizer.load_state_dict(back["opt"])
    again = torch_zip.read(str(path)).tree
    assert again.containers == tree.containers
    written_leaves, expected_leaves = named(again), named(tree)
    assert written_leaves.keys() == expected_leaves.keys()
    for name, leaf in written_leaves.items():
        assert (leaf.role, leaf.slot, leaf.trainable) == tuple(
            getattr(expected_leaves[name], fact) for fact in ("role", "slot", "trainable")
        )


def assert_same(torch: Any, one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(other, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert bytes_of(torch, one) == bytes_of(torch, other)
    elif isinstance(other, dict):
        # What shares its storage with something before it comes last in its dict.
        assert one.keys() == other.keys()
        for name in other:
            assert_same(torch, one[name], other[name])
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(torch, mine, yours)
    else:
        assert one == other
