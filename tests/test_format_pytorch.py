"""torch's zip checkpoints: PyTorch is the referee for what is read and for what is written."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.core import (
    Alias,
    ChecksumError,
    CkpttoolError,
    Container,
    FormatError,
    Inline,
    Leaf,
    Record,
    Span,
    StridedView,
    Tree,
    UnsupportedError,
    ValueLeaf,
    attr,
    dangerous_calls,
    display,
    index,
    key,
)
from ckpttool.core.dtypes import BY_NAME
from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, ZipWriter, dumps
from ckpttool.formats import Probe, torch_zip
from ckpttool.listing.audit import audit_notes
from tests import truths
from tests.golden_texts import Golden

FLOATS = Global("torch", "FloatStorage")
V2 = Global("torch._utils", "_rebuild_tensor_v2")


def archive(pickled: bytes, storages: dict[str, bytes] | None = None, **others: bytes) -> bytes:
    stream = io.BytesIO()
    writer = ZipWriter(stream)
    writer.add("archive/data.pkl", pickled)
    for name, data in others.items():
        writer.add(f"archive/{name}", data)
    for name, data in (storages or {}).items():
        writer.add(f"archive/data/{name}", data)
    writer.add("archive/version", b"3\n")
    writer.close()
    return stream.getvalue()


def storage(name="0", count=4, kind=FLOATS):
    return PersistentId(("storage", kind, name, "cpu", count))


def tensor(offset=0, shape=(4,), strides=(1,), where=None, **more):
    args = (where or storage(), offset, shape, strides, False, Dict("collections.OrderedDict"))
    return PickleObject(V2, args + tuple(more.values()), 0)


def read(data: bytes, folder: Path):
    path = folder / "checkpoint.pt"
    path.write_bytes(data)
    return torch_zip.read(str(path))


def written(tree: Tree) -> bytes:
    stream = io.BytesIO()
    (piece,) = torch_zip.pieces(tree)
    piece.write(stream)
    return stream.getvalue()


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


ONE = floats(1, 2, 3, 4)


# ------------------------------------------------------------------ recognising


@pytest.mark.parametrize("keep", [1.0, 0.9, 0.5])
def test_claims_whole_and_truncated_archives(keep, tmp_path):
    data = archive(dumps({"a": tensor()}), {"0": ONE})
    path = tmp_path / "x"
    path.write_bytes(data[: int(keep * len(data))])
    assert torch_zip.claims(Probe(str(path))) == str(path)


@pytest.mark.parametrize(
    "data", [b"", b"P", b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"x" * 99]
)
def test_claims_nothing_else(data, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert torch_zip.claims(Probe(str(path))) is None


def test_claims_no_other_zip(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    assert torch_zip.claims(Probe(str(tmp_path / "x.npz"))) is None


def test_two_top_folders_are_refused(tmp_path, golden: Golden):
    stream = io.BytesIO()
    writer = ZipWriter(stream)
    writer.add("a/data.pkl", dumps(1))
    writer.add("b/data.pkl", dumps(2))
    writer.close()
    with pytest.raises(FormatError) as caught:
        read(stream.getvalue(), tmp_path)
    golden(caught.value)


# ------------------------------------------------------------------ reading


def test_plain_storage_is_a_span_and_a_view_is_strided(tmp_path):
    tree = read(archive(dumps({"a": tensor(), "b": tensor(1, (2,), (2,))}), {"0": ONE}), tmp_path).tree
    assert isinstance(tree[key("a"),].source, Span)
    assert isinstance(tree[key("b"),].source, StridedView)
    assert tree[key("b"),].array().tolist() == [2, 4]


def test_same_view_is_an_alias_and_another_is_not(tmp_path):
    value = {"a": tensor(), "b": [tensor()], "c": tensor(0, (2, 2), (2, 1))}
    tree = read(archive(dumps(value), {"0": ONE}), tmp_path).tree
    assert tree.aliases == {(key("a"),): (Alias((key("b"), index(0)), "b.0"),)}
    assert list(tree) == [(key("a"),), (key("c"),)]


def test_empty_tensors_are_no_aliases(tmp_path):
    value = {"a": tensor(0, (0,), (1,)), "b": tensor(0, (0,), (1,))}
    assert len(read(archive(dumps(value), {"0": ONE}), tmp_path).tree) == 2


def test_big_endian_storages_are_turned_around(tmp_path):
    swapped = struct.pack(">4f", 1, 2, 3, 4)
    value = {"a": tensor(), "b": tensor(0, (2, 2), (1, 2))}
    tree = read(archive(dumps(value), {"0": swapped}, byteorder=b"big"), tmp_path).tree
    assert tree[key("a"),].array().tolist() == [1, 2, 3, 4]
    assert tree[key("b"),].array().tolist() == [[1, 3], [2, 4]]


def test_unknown_byte_order_is_refused(tmp_path, golden: Golden):
    with pytest.raises(FormatError) as caught:
        read(archive(dumps({}), byteorder=b"middle"), tmp_path)
    golden(caught.value)


def test_view_of_a_larger_storage_is_noted(tmp_path, golden: Golden):
    checkpoint = read(archive(dumps({"a": tensor(0, (1,), (1,))}), {"0": ONE}), tmp_path)
    golden("\n".join(checkpoint.notes))


def test_a_huge_expansion_is_listed_and_not_read(tmp_path, golden: Golden):
    tree = read(archive(dumps({"a": tensor(0, (1 << 40,), (0,))}), {"0": ONE}), tmp_path).tree
    leaf = tree[key("a"),]
    assert leaf.shape == (1 << 40,)
    with pytest.raises(UnsupportedError) as caught:
        leaf.read()
    golden(caught.value)


def test_a_bare_tensor_has_the_empty_path(tmp_path):
    assert list(read(archive(dumps(tensor()), {"0": ONE}), tmp_path).tree) == [()]


def test_unknown_dtypes_are_listed_by_name(tmp_path):
    args = (storage(count=16, kind=Global("torch.storage", "UntypedStorage")), 0, (16,), (1,), False, None,
            Global("torch", "float4_e2m1fn_x2"))  # fmt: skip
    value = {"a": PickleObject(Global("torch._utils", "_rebuild_tensor_v3"), args, 0)}
    tree = read(archive(dumps(value), {"0": ONE}), tmp_path).tree
    assert tree[key("a"),].value == Record("torch.Tensor", "float4_e2m1fn_x2[16]")


def test_roles_of_an_optimizer(tmp_path):
    state = {0: {"step": tensor(0, (), ()), "exp_avg": tensor(), "momentum_buffer": None}, 1: {"step": 7}}
    value = {"opt": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}
    tree = read(archive(dumps(value), {"0": ONE}), tmp_path).tree
    at = (key("opt"), key("state"))
    assert tree[*at, key(0), key("exp_avg")].role == "slot"
    assert tree[*at, key(0), key("exp_avg")].slot == "exp_avg"
    assert tree[*at, key(0), key("exp_avg")].key == "opt.state.0.exp_avg"
    assert tree[*at, key(0), key("step")].role == "counter"
    assert tree[*at, key(1), key("step")] == ValueLeaf(7, "counter")
    assert tree[key("opt"), key("param_groups"), index(0), key("params"), index(1)] == ValueLeaf(1)


def test_objects_are_inert_and_their_tensors_listed(tmp_path):
    inner = {"_parameters": {"weight": tensor()}, "_buffers": {"b": tensor(1, (1,), (1,))}}
    layer = PickleObject(Global("mine", "Layer"), (), 0, state=inner)
    module = PickleObject(Global("mine", "Net"), (), 0, state={"_modules": {"l1": layer}})
    tree = read(archive(dumps({"net": module, "cls": Global("mine", "Thing")}), {"0": ONE}), tmp_path).tree
    inside = (key("net"), attr("_modules"), key("l1"))
    assert tree[*inside, attr("_parameters"), key("weight")].key == "net.l1.weight"
    assert tree[*inside, attr("_buffers"), key("b")].role == "buffer"
    assert tree.containers[key("net"),] == Container("record", "mine.Net")
    assert tree[key("cls"),].value == Record("mine.Thing")


def test_a_list_in_itself_is_shown_once(tmp_path):
    tree = read(archive(b"]q\x00h\x00a."), tmp_path).tree
    assert isinstance(tree[index(0),].value, Record)


def test_exponentially_shared_lists_end(tmp_path):
    doubled = b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(40))
    began = time.process_time()
    read(archive(b"](K\x01K\x02eq\x00" + doubled + b"."), tmp_path)
    assert time.process_time() - began < 5


def test_deep_nesting_is_refused(tmp_path, golden: Golden):
    with pytest.raises(FormatError) as caught:
        read(archive(b"]" * 100_000 + b"a" * 99_999 + b"."), tmp_path)
    golden(caught.value)


# ------------------------------------------------------------------ what must be refused

DOUBLES = Global("torch", "DoubleStorage")
REFUSED = {
    "storage missing": ({"a": tensor(where=storage("7"))}, FormatError),
    "storage shorter": ({"a": tensor(where=storage(count=5))}, FormatError),
    "storage longer": ({"a": tensor(0, (3,), (1,), storage(count=3))}, FormatError),
    "numel huge": ({"a": tensor(where=storage(count=1 << 62))}, FormatError),
    "numel negative": ({"a": tensor(where=storage(count=-4))}, FormatError),
    "numel a bool": ({"a": tensor(where=storage(count=True))}, FormatError),
    "one key, two types": ([tensor(), tensor(0, (2,), (1,), storage(count=2, kind=DOUBLES))], FormatError),
    "key a number": ({"a": tensor(where=storage(0))}, FormatError),
    "unknown storage class": (tensor(where=storage(kind=Global("torch", "NoStorage"))), UnsupportedError),
    "storage class elsewhere": (tensor(where=storage(kind=Global("os", "FloatStorage"))), UnsupportedError),
    "persistent id of wrong form": (PersistentId(("module", 1, 2)), FormatError),
    "view beyond its storage": ({"a": tensor(1)}, FormatError),
    "negative offset": ({"a": tensor(-1)}, FormatError),
    "negative size": ({"a": tensor(0, (-4,), (1,))}, FormatError),
    "negative stride": ({"a": tensor(3, (4,), (-1,))}, FormatError),
    "rank mismatch": ({"a": tensor(0, (2, 2), (1,))}, FormatError),
    "rank 300": ({"a": tensor(0, (1,) * 300, (1,) * 300)}, UnsupportedError),
    "count overflows": ({"a": tensor(0, (1 << 40, 1 << 40), (0, 0))}, FormatError),
    "stride overflows": ({"a": tensor(0, (2,), (1 << 63,))}, FormatError),
    "size no number": ({"a": tensor(0, ("4",), (1,))}, FormatError),
    "no storage": ({"a": tensor(where=5)}, FormatError),
    "unknown metadata": ({"a": tensor(meta={"x": 1})}, UnsupportedError),
}  # fmt: skip


@pytest.mark.parametrize(("value", "error"), REFUSED.values(), ids=REFUSED)
def test_records_that_make_no_sense_are_refused(value, error, tmp_path):
    with pytest.raises(error) as caught:
        read(archive(dumps(value), {"0": ONE}), tmp_path)
    assert caught.value.file == str(tmp_path / "checkpoint.pt")


def test_a_call_that_can_act_is_listed_and_named(tmp_path, golden: Golden):
    checkpoint = read(archive(dumps({"a": PickleObject(Global("os", "getcwd"), (), 0)})), tmp_path)
    assert checkpoint.tree[key("a"),].value == Record("os.getcwd")
    assert dangerous_calls(checkpoint.code_references) == ["os.getcwd"]
    golden("\n".join(audit_notes(checkpoint.code_references)))


def test_damaged_storage_is_a_checksum_error(tmp_path):
    data = bytearray(archive(dumps({"a": tensor()}), {"0": ONE}))
    data[data.index(ONE)] ^= 1
    leaf = read(bytes(data), tmp_path).tree[key("a"),]
    with pytest.raises(ChecksumError):
        leaf.read()


def everything(tree: Tree):
    leaves = {p: (v.dtype, v.shape, bytes(v.read())) if isinstance(v, Leaf) else v for p, v in tree.items()}
    return leaves, tree.aliases, tree.containers


def test_bit_flips_never_give_other_data(tmp_path):
    value = {"a": tensor(), "b": tensor(1, (2,), (2,)), "n": 7, "s": "text", "l": [1.5, None]}
    data = archive(dumps(value), {"0": ONE}, byteorder=b"little")
    expected = everything(read(data, tmp_path).tree)
    choose = random.Random(3)
    for _ in range(400):
        bit = choose.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            contents = everything(read(bytes(flipped), tmp_path).tree)
        except CkpttoolError:
            continue
        assert contents == expected, bit


# ------------------------------------------------------------------ writing, without torch


def leaf(name: str, dtype: str = "float32", shape=(2,), **more) -> Leaf:
    size = BY_NAME[dtype].itemsize * int(np.prod(shape))
    return Leaf(dtype, shape, Inline(bytes(range(size))), name, **more)


def test_written_trees_come_back(tmp_path):
    top = Container("OrderedDict", None, {"_metadata": {"": {"version": 1}}})
    tree = Tree(
        {(key("a"),): leaf("a"), (key("l"), index(0)): leaf("l.0", "bfloat16"), (key("n"),): ValueLeaf(3)},
        {(key("a"),): (Alias((key("b"),), "b"),)},
        {(): top, (key("e"),): Container("tuple")},
    )
    read_back = read(written(tree), tmp_path).tree
    assert everything(read_back)[0] == everything(tree)[0]
    assert read_back.aliases == tree.aliases
    assert read_back.containers == {**tree.containers, (key("l"),): Container("list")}


UNWRITABLE = {
    "record": Tree({(key("a"),): ValueLeaf(Record("mine.Thing"))}),
    "record container": Tree({(attr("x"),): ValueLeaf(1)}, {}, {(): Container("record", "m.C")}),
    "strings": Tree({(key("a"),): Leaf("string", (1,), Inline(bytes(8)), "a")}),
    "quantised": Tree({(key("a"),): leaf("a", "qint8")}),
    "no torch type": Tree({(key("a"),): leaf("a", "float8_e4m3b11fnuz")}),
    "leaf above a leaf": Tree({(key("a"),): leaf("a"), (key("a"), key("b")): leaf("b")}),
    "gap in a list": Tree({(key("a"), index(1)): leaf("a")}, {}, {(key("a"),): Container("list")}),
    "keys that are one": Tree({(attr("a"),): leaf("a"), (key("a"),): leaf("b")}),
}  # fmt: skip


@pytest.mark.parametrize("tree", UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_torch_cannot_hold_is_refused_before_writing(tree):
    with pytest.raises(UnsupportedError):
        torch_zip.pieces(tree)


def test_a_source_of_the_wrong_length_is_refused(golden: Golden):
    with pytest.raises(FormatError) as caught:
        written(Tree({(key("a"),): Leaf("float32", (3,), Inline(b"1234"), "a")}))
    golden(caught.value)


# ------------------------------------------------------------------ PyTorch as referee

NAMES = [
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "bool", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
    "float8_e4m3fnuz", "float8_e8m0fnu",
]  # fmt: skip


def make(torch, dtype: str, shape, seed: int):
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, count * BY_NAME[dtype].itemsize
    )
    flat = torch.from_numpy(raw.astype(np.uint8))
    return (
        flat.view(getattr(torch, dtype)).reshape(shape)
        if count
        else torch.empty(shape, dtype=getattr(torch, dtype))
    )


def raw(torch, value) -> bytes:
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def saved(torch, value, folder: Path, **options):
    path = folder / "checkpoint.pt"
    torch.save(value, path, **options)
    return torch_zip.read(str(path))


def tensors(tree: Tree) -> dict[str, Leaf]:
    leaves = {display(path): leaf for path, leaf in tree.tensors()}
    for path, aliases in tree.aliases.items():
        leaves |= {display(alias.path): tree[path] for alias in aliases}
    return leaves


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype_both_ways(torch, name, shape, tmp_path):
    value = make(torch, name, shape, 1)
    leaf = saved(torch, {"x": value}, tmp_path).tree[key("x"),]
    assert (leaf.dtype, leaf.shape, bytes(leaf.read())) == (name, shape, raw(torch, value))
    path = tmp_path / "ours.pt"
    path.write_bytes(written(Tree({(key("x"),): leaf})))
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
        back = torch.load(path, **options)["x"]
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert raw(torch, back) == raw(torch, value)


@pytest.mark.torch
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_random_structures_both_ways(torch, data, tmp_path):
    tensor_of = st.builds(
        lambda name, shape, seed: make(torch, name, tuple(shape), seed),
        st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99),
    )  # fmt: skip
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    value = data.draw(
        st.recursive(
            tensor_of | plain,
            lambda inner: (
                st.dictionaries(st.text(max_size=4) | st.integers(0, 99), inner, max_size=3)
                | st.lists(inner, max_size=3)
                | st.tuples(inner, inner)
            ),
            max_leaves=8,
        )
    )
    tree = saved(torch, value, tmp_path).tree
    path = tmp_path / "ours.pt"
    path.write_bytes(written(tree))
    assert same(torch, torch.load(path, weights_only=True), value)
    assert everything(torch_zip.read(str(path)).tree) == everything(tree)


def same(torch, one, other) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(torch, one) == raw(torch, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(torch, one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(map(same, [torch] * len(one), one, other))
        )
    return type(one) is type(other) and one == other


@pytest.mark.torch
def test_views_transposes_conjugates(torch, tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    wave = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
    value = {
        "row": base[1],
        "step": base[:, ::2],
        "turned": base.permute(2, 0, 1),
        "wide": base[:1, :1, :1].expand(2, 3, 4),
        "window": base.unfold(2, 2, 1),
        "conj": wave.conj(),
        "conj_t": wave.conj().T,
        "neg": wave.clone().conj().imag,
    }
    tree = saved(torch, value, tmp_path).tree
    for name, expected in value.items():
        assert bytes(tree[key(name),].read()) == raw(torch, expected), name


@pytest.mark.torch
def test_module_and_optimizer_survive_a_rewrite(torch, tmp_path):
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False)
    )
    net[2].weight = torch.nn.Parameter(net[2].weight)
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=True)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    value = {
        "net": net.state_dict(),
        "tied": net.state_dict(),
        "opt": optimizer.state_dict(),
        "p": net[0].weight,
    }
    tree = saved(torch, value, tmp_path).tree
    assert tree[key("net"), key("1.running_var")].role == "buffer"
    assert tree[key("opt"), key("state"), key(0), key("max_exp_avg_sq")].role == "slot"
    path = tmp_path / "ours.pt"
    path.write_bytes(written(tree))
    back = torch.load(path, weights_only=True)
    assert same(torch, back["opt"], value["opt"])
    assert back["net"]._metadata == value["net"]._metadata
    assert back["tied"]["0.weight"].data_ptr() == back["net"]["0.weight"].data_ptr()
    net.load_state_dict(back["net"])
    optimizer.load_state_dict(back["opt"])


@pytest.mark.torch
def test_parameters_stay_parameters(torch, tmp_path):
    value = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "f": torch.nn.Parameter(torch.ones(2), False),
        "t": torch.ones(2),
    }
    tree = saved(torch, value, tmp_path).tree
    assert [tree[key(name),].trainable for name in "pft"] == [True, False, None]
    path = tmp_path / "ours.pt"
    path.write_bytes(written(tree))
    back = torch.load(path, weights_only=True)
    assert [type(back[name]) for name in "pft"] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [back[name].requires_grad for name in "pft"] == [True, False, False]


@pytest.mark.torch
def test_unrecorded_checksums_are_read(torch, tmp_path):
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        checkpoint = saved(torch, {"a": torch.ones(3)}, tmp_path)
    finally:
        set_crc32_options(before)
    assert checkpoint.integrity == "none"
    assert checkpoint.tree[key("a"),].array().tolist() == [1, 1, 1]


@pytest.mark.torch
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_and_other_objects_are_data(torch, protocol, tmp_path):
    value = {
        "f": np.float64(1.5), "i": np.int32(-3), "t": np.bool_(True), "a": np.arange(6).reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "big": np.arange(3, dtype=">i2"),
        "text": np.array(["ab"]), "objects": np.array([1, None], dtype=object),
        "args": argparse.Namespace(lr=0.1), "count": collections.Counter("aab"), "size": torch.Size([2, 3]),
        "dtype": torch.float32, "set": {1},
    }  # fmt: skip
    tree = saved(torch, value, tmp_path, pickle_protocol=protocol).tree
    assert (tree[key("f"),].value, tree[key("i"),].value, tree[key("t"),].value) == (1.5, -3, True)
    for name in ("a", "turned", "big"):
        assert np.array_equal(tree[key(name),].array(), value[name])
    assert tree[key("text"),].value == Record("numpy.ndarray", "U2[1]")
    assert tree[key("objects"), index(1)].value is None
    assert tree[key("args"), attr("lr")].value == 0.1
    assert tree[key("count"), key("a")].value == 2
    assert tree.containers[key("size"),] == Container("tuple", "torch.Size")
    assert tree[key("dtype"),].value == Record("torch.float32")


@pytest.mark.torch
def test_whole_modules_are_listed_without_their_classes(torch, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    leaves = {leaf.key: leaf for _, leaf in saved(torch, net, tmp_path).tree.tensors()}
    expected = net.state_dict()
    assert leaves.keys() == expected.keys()
    assert all(bytes(leaves[name].read()) == raw(torch, expected[name]) for name in expected)
    assert leaves["1.running_mean"].role == "buffer"


@pytest.mark.torch
def test_sparse_and_quantised_tensors_show_their_parts(torch, tmp_path):
    tree = saved(torch, {"s": torch.eye(3).to_sparse()}, tmp_path).tree
    assert tree.containers[key("s"),].name == "torch.sparse_coo"
    assert {leaf.shape for _, leaf in tree.tensors()} == {(2, 3), (3,)}
    with pytest.raises(UnsupportedError):
        written(tree)


@pytest.mark.torch
def test_loading_a_written_file_needs_no_other_layout(torch, tmp_path):
    """torch.load(mmap=True) can compute offsets from the layout that torch.save gives (serialization.py)."""
    net = torch.nn.Linear(3, 2)
    tree = saved(torch, net.state_dict(), tmp_path).tree
    path = tmp_path / "ours.pt"
    path.write_bytes(written(tree))
    back = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    assert type(back) is collections.OrderedDict
    assert list(back) == ["weight", "bias"]
    assert torch.load(path, map_location="meta", weights_only=True)["weight"].shape == (2, 3)


@pytest.mark.torch
def test_8000_tensors_are_listed_quickly(torch, tmp_path):
    path = tmp_path / "many.pt"
    torch.save({f"layer.{n}.weight": torch.zeros(8) for n in range(8000)}, path)
    began = time.process_time()
    assert len(torch_zip.read(str(path)).tree) == 8000
    assert time.process_time() - began < 5


# ------------------------------------------------------------------ other people's files


@pytest.mark.corpus
def test_corpus_is_read_as_torch_reads_it():
    files = list(truths.files(torch_zip))
    assert files
    for path in files:
        truths.require(torch_zip, path)


def test_trees_can_be_sent_to_another_process(tmp_path):
    value = {"a": tensor(), "b": tensor(1, (2,), (2,)), "c": tensor(0, (2,), (1,), meta={"neg": True})}
    tree = read(archive(dumps(value), {"0": ONE}), tmp_path).tree
    assert everything(pickle.loads(pickle.dumps(tree))) == everything(tree)
