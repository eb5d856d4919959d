"""safetensors: the format's rules, its library and torch as referees, and the tree that we record in it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import torch as referee

from ckpttool.commands.convert import convert
from ckpttool.conversion.write import save
from ckpttool.core import (
    CkpttoolError,
    Container,
    FormatError,
    Inline,
    Leaf,
    Record,
    Tree,
    TruncatedError,
    UnsupportedError,
    ValueLeaf,
    attr,
    display,
    dtypes,
    key,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, torch_zip
from ckpttool.formats import safetensors as our_format
from ckpttool.testing.formats import WritingContract
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.mutants import require_refused_or_listed
from tests.recorded_trees import same, trees
from tests.trees import leaf, torch_tree

FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def put(folder: Path, header: Any, data: bytes = b"", size: int | None = None) -> str:
    """Write a file of a header, given as text, bytes or a document, and of its tensors' bytes."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header))
    raw = raw if isinstance(raw, bytes) else raw.encode()
    file = folder / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw + data)
    return str(file)


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


class TestSafetensors(WritingContract):
    module = our_format

    def make(self, folder: Path) -> str:
        save(open_checkpoint(str(TORCH_SAMPLE)).tree, str(folder / "agent.safetensors"))
        return str(folder / "agent.safetensors")

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        # The format has no checksum, and says so; what is damaged is refused or is listed.
        require_refused_or_listed(path, 300, 8 + int.from_bytes(Path(path).read_bytes()[:8], "little"))


# What the library writes.

TORCH_DTYPES = [
    getattr(torch, row.torch) for row in dtypes.TABLE if row.safetensors and hasattr(torch, row.torch or "")
]


@FIXTURE
@given(st.lists(st.tuples(st.sampled_from(TORCH_DTYPES), st.lists(st.integers(0, 3), max_size=3))), st.data())
def test_what_the_library_writes_is_read(tmp_path: Path, rows: list[Any], data: st.DataObject) -> None:
    tensors = {}
    for number, (dtype, shape) in enumerate(rows):
        count = int(np.prod(shape, dtype=int)) * dtype.itemsize
        raw = torch.frombuffer(
            bytearray(data.draw(st.binary(min_size=count, max_size=count)) or b"\0"), dtype=torch.uint8
        )
        if dtype is torch.bool:
            raw = raw & 1
        tensors[f"{'ba'[number % 2]}.{number}"] = raw[:count].view(dtype).reshape(shape)
    file = tmp_path / "x.safetensors"
    metadata = {"a": "b"} if data.draw(st.booleans()) else None
    referee.save_file(tensors, file, metadata)
    checkpoint = open_checkpoint(str(file))
    assert (checkpoint.format, checkpoint.integrity) == ("safetensors", "none")
    assert checkpoint.details == ({"metadata": metadata} if metadata else {})
    named = {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}
    assert named.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert named[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert named[name].shape == tuple(tensor.shape)
        assert (
            bytes(named[name].read()) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )


def test_paths_are_those_of_the_same_state_dict_in_torchs_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    referee.save_file(model.state_dict(), tmp_path / "x.safetensors")
    one, other = (open_checkpoint(str(tmp_path / f"x.{end}")).tree for end in ("pt", "safetensors"))
    assert {path: (n.key, n.role) for path, n in one.tensors()} == {
        p: (n.key, n.role) for p, n in other.tensors()
    }
    assert sorted(one.names.values()) == sorted(other.names.values())


def test_tied_weights_that_the_library_left_out_are_aliases(tmp_path: Path, golden: Golden) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    referee.save_model(model, str(tmp_path / "x.safetensors"), {"format": "pt", "step": "3"})
    checkpoint = open_checkpoint(str(tmp_path / "x.safetensors"))
    assert [(display(p), [a.key for a in rest]) for p, rest in checkpoint.tree.aliases.items()] == [
        ("0/weight", ["1.weight"])
    ]
    assert checkpoint.details == {"metadata": {"format": "pt", "step": "3"}}
    assert len(digest_checkpoint(checkpoint).tensors) == 4
    golden("\n".join(checkpoint.notes))


def test_types_smaller_than_a_byte_and_unknown_ones_are_listed(tmp_path: Path, golden: Golden) -> None:
    header = {"a": entry(0, 3, "F4", [2, 3]), "b": entry(3, 6, "F6_E2M3", [4]), "c": entry(6, 8, "Q7", [1])}
    checkpoint = open_checkpoint(put(tmp_path, header, bytes(8)))
    values = [leaf.value for _, leaf in checkpoint.tree.plain()]
    assert values == [Record("safetensors.Tensor", text) for text in ("F4[2, 3]", "F6_E2M3[4]", "Q7[1]")]
    golden("\n".join(checkpoint.notes))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(put(tmp_path, {"a": entry(0, 3, "F4", [5])}, bytes(3)))
    golden(caught.value)


# Hostile files.

FOUR = json.dumps(entry(0, 4))
NINES = "9" * 5000
WIDE = [1 << 32, 1 << 32, 4]
HOSTILE: dict[str, tuple[Any, ...]] = {
    "overlap": ({"a": entry(0, 4), "b": entry(3, 7)}, bytes(7)),
    "an overlap as large as a hole": ({"a": entry(0, 4), "b": entry(3, 7)}, bytes(8)),
    "the same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "hole": ({"a": entry(0, 4), "b": entry(5, 8)}, bytes(8)),
    "hole at the start": ({"a": entry(1, 4)}, bytes(4)),
    "trailing": ({"a": entry(0, 4)}, bytes(5)),
    "short": ({"a": entry(0, 4)}, bytes(3)),
    "no tensor, but bytes": ({}, bytes(3)),
    "a name twice": (f'{{"a":{FOUR},"a":{FOUR}}}', bytes(4)),
    "a field twice": ('{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{"a":"b"}}', b""),
    "a field missing": ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "a tensor that is a list": ({"a": []}, b""),
    "a dtype that is a number": ({"a": entry(0, 4, 4)}, bytes(4)),  # type: ignore[arg-type]
    "a dtype that is a list": ({"a": entry(0, 4, ["U8"])}, bytes(4)),  # type: ignore[arg-type]
    "a shape that is no list": ({"a": entry(0, 4) | {"shape": 4}}, bytes(4)),
    "a negative shape": ({"a": entry(0, 4, shape=[-2, -2])}, bytes(4)),
    "a float in the shape": ({"a": entry(0, 4, shape=[4.0])}, bytes(4)),
    "true in the shape": ({"a": entry(0, 1, shape=[True])}, bytes(1)),
    "too few bytes for the shape": ({"a": entry(0, 4, "F32", [2])}, bytes(4)),
    "too many": ({"a": entry(0, 8, "F32", [1])}, bytes(8)),
    "a product that wraps": ({"a": entry(0, 0, "U8", WIDE)}, b""),
    "a zero that hides it": ({"a": entry(0, 0, "U8", [0, *WIDE])}, b""),
    "negative offsets": ({"a": entry(-4, 0, shape=[4])}, bytes(4)),
    "float offsets": ({"a": entry(0, 4) | {"data_offsets": [0, 4.0]}}, bytes(4)),
    "reversed offsets": ({"a": entry(4, 0, shape=[4])}, bytes(4)),
    "three offsets": ({"a": entry(0, 4) | {"data_offsets": [0, 4, 4]}}, bytes(4)),
    "offsets beyond counting": ({"a": entry(0, 1 << 70, shape=[4])}, bytes(4)),
    "offsets beyond the file": ({"a": entry(0, 1 << 40)}, bytes(4)),
    "a number as metadata": ({"__metadata__": {"a": 1}}, b""),
    "a list of metadata": ({"__metadata__": ["a"]}, b""),
    "not UTF-8": (b'{"\xff":{}}', b""),
    "half of a surrogate pair": (f'{{"\\ud800":{FOUR}}}', bytes(4)),
    "a list": ("[1]     ", b""),
    "a number": ("{4", b""),
    "a leading space": (b' {"a":{}}', b""),
    "NaN": ('{"a":NaN}', b""),
    "Infinity": ('{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,0]}}', b""),
    "minus zero": (f'{{"a":{FOUR.replace("[0,", "[-0,")}}}', bytes(4)),
    "an integer of 5,000 digits": (f'{{"a":{{"dtype":"U8","shape":[{NINES}],"data_offsets":[0,0]}}}}', b""),
    "100,000 nested arrays": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", b""),
    "100,001 dimensions": ({"a": entry(0, 1, shape=[1] * 100_001)}, bytes(1)),
    "text behind the object": (f'{{"a":{FOUR}}} x', bytes(4)),
    "a header of length 0": (b"", b"", 0),
    "a header of length 1": (b"{", b"", 1),
    "a header beyond the file": ("{}", b"", 1000),
    "a header of more than 100 MB": ("{}", b"", 100_000_001),
    "a header of 2**63 bytes": ("{}", b"", 1 << 63),
}  # fmt: skip


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_what_breaks_a_rule_is_refused_in_a_sentence(tmp_path: Path, parts: tuple[Any, ...]) -> None:
    file = put(tmp_path, *parts)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(file)
    assert caught.value.file == file
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    # The library agrees, but for names that come twice and for shapes that no tensor has.
    name = next(name for name, known in HOSTILE.items() if known is parts)
    if name not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load(Path(file).read_bytes())


STRICTER = ("a name twice", "metadata twice", "a zero that hides it", "100,001 dimensions")


def test_fields_that_later_versions_may_add_are_passed_over(tmp_path: Path) -> None:
    file = put(tmp_path, {"a": entry(0, 4) | {"x": 1}}, bytes(4))
    assert len(open_checkpoint(file).tree) == 1
    assert len(safetensors.numpy.load(Path(file).read_bytes())) == 1


def test_the_command_refuses_in_a_sentence(tmp_path: Path, golden: Golden) -> None:
    golden(refused(in_process("inspect", put(tmp_path, *HOSTILE["a name twice"]))))
    golden(refused(in_process("digest", put(tmp_path, "{}", b"", 1 << 63))))


@pytest.mark.parametrize("length", range(1, 9))
def test_files_that_end_in_the_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x02" + bytes(length - 1))
    with pytest.raises(TruncatedError):
        open_checkpoint(str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"hello, I am a text",
    ],
    ids=["HTML", "Git LFS", "text"],
)
def test_another_file_under_this_name_is_named(tmp_path: Path, content: bytes, golden: Golden) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CkpttoolError) as caught:
        open_checkpoint(str(tmp_path / "x.safetensors"))
    golden(caught.value)


def test_the_bytes_decide_and_not_the_suffix(tmp_path: Path) -> None:
    referee.save_file({"a": torch.ones(2)}, tmp_path / "weights")
    assert open_checkpoint(str(tmp_path / "weights")).format == "safetensors"
    torch.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    assert open_checkpoint(str(tmp_path / "x.safetensors")).format == "pytorch"


def test_many_tensors_are_listed_in_linear_time(tmp_path: Path) -> None:
    spent = []
    for count in (15_000, 60_000):
        header = {f"layer.{n}.weight": entry(n, n + 1) for n in range(count)}
        file = put(tmp_path, header, bytes(count))
        start = time.process_time()
        assert len(open_checkpoint(file).tree) == count
        spent.append(time.process_time() - start)
    assert spent[1] < 4 * 2.5 * spent[0], spent


# What we write.


@FIXTURE
@given(tree=trees(torch=True))
def test_any_tree_comes_back_and_the_library_reads_its_tensors(tmp_path: Path, tree: Tree) -> None:
    file = str(tmp_path / "x.safetensors")
    save(tree, file, force=True, sync=False)
    checkpoint = open_checkpoint(file)
    assert same(checkpoint.tree, tree)
    with safetensors.safe_open(file, "pt") as library:
        assert set(library.keys()) == {leaf.key for _, leaf in checkpoint.tree.tensors()}
        for _, tensor in checkpoint.tree.tensors():
            read = library.get_tensor(tensor.key).contiguous()
            assert str(read.dtype).removeprefix("torch.") == tensor.dtype
            assert tuple(read.shape) == tensor.shape
            assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(tensor.read())


def test_bytes_lie_where_the_library_puts_them(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.zeros(3, dtype=torch.uint8).to(d) for n, d in enumerate(TORCH_DTYPES)}
    referee.save_file(tensors, tmp_path / "theirs.safetensors")
    tree = open_checkpoint(str(tmp_path / "theirs.safetensors")).tree
    # The header keeps the tree's order, the bytes the library's.
    shuffled = Tree(dict(reversed(tree.leaves.items())))
    save(shuffled, str(tmp_path / "mine.safetensors"))
    headers = []
    for name in ("theirs", "mine"):
        raw = (tmp_path / f"{name}.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        assert size % 8 == 0
        document = json.loads(raw[8 : 8 + size])
        headers.append({n: document[n]["data_offsets"] for n in tensors})
    assert headers[0] == headers[1]
    assert list(open_checkpoint(str(tmp_path / "mine.safetensors")).tree) == list(shuffled)


def test_a_plain_state_dict_needs_no_record(tmp_path: Path) -> None:
    tree = torch_tree({"l1.weight": np.ones((2, 3), "f4"), "l1.bias": np.ones(2, "f4")})
    save(tree, str(tmp_path / "x.safetensors"))
    with safetensors.safe_open(str(tmp_path / "x.safetensors"), "pt") as library:
        assert library.metadata() == {"format": "pt"}


def agent(folder: Path) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model.add_module("tied", model[0])
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameters": OrderedDict(model.named_parameters()),
        "total_it": 7,
        "nested": [
            1,
            (2.5, None, float("nan")),
            {"x": torch.arange(3), 4: "four"},
            b"\xff",
            3 + 4j,
            1 << 200,
        ],
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    torch.save(saved, folder / "a.pt")
    return str(folder / "a.pt")


@pytest.mark.parametrize("middle", ["safetensors", "npz"])
def test_torchs_file_there_and_back_is_the_same_file(tmp_path: Path, middle: str) -> None:
    first = agent(tmp_path)
    there, back = str(tmp_path / f"b.{middle}"), str(tmp_path / "c.pt")
    assert convert(first, there).written
    assert convert(there, back).written
    one, other = open_checkpoint(first), open_checkpoint(back)
    assert same(other.tree, one.tree, keys=True)
    assert digest_checkpoint(other).sha256 == digest_checkpoint(one).sha256
    # What is written again from the first file is what came back.
    again = str(tmp_path / "d.pt")
    convert(first, again)
    assert Path(again).read_bytes() == Path(back).read_bytes()
    mine, reference = (torch.load(file, weights_only=True) for file in (back, first))
    assert mine["optimizer"]["param_groups"] == reference["optimizer"]["param_groups"]
    assert mine["model"]._metadata == reference["model"]._metadata
    assert mine["model"]["tied.weight"].data_ptr() == mine["model"]["0.weight"].data_ptr()


def test_a_whole_module_gives_its_state_dict_to_the_library(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    torch.save(model, tmp_path / "a.pt")
    assert convert(str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")).written
    one, other = (open_checkpoint(str(tmp_path / f"a.{end}")).tree for end in ("pt", "safetensors"))
    assert same(other, one)
    loaded = referee.load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == model.state_dict().keys()


def test_parameters_are_parameters_again(tmp_path: Path) -> None:
    torch.save(dict(torch.nn.Linear(2, 3).named_parameters()), tmp_path / "a.pt")
    for end in ("safetensors", "npz"):
        convert(str(tmp_path / "a.pt"), str(tmp_path / f"a.{end}"))
        tree = open_checkpoint(str(tmp_path / f"a.{end}")).tree
        assert same(tree, open_checkpoint(str(tmp_path / "a.pt")).tree)
        assert all(leaf.trainable for _, leaf in tree.tensors())


def test_aliases_are_recorded_as_the_library_does(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "a.pt")
    convert(str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors"))
    with safetensors.safe_open(str(tmp_path / "a.safetensors"), "pt") as library:
        assert library.metadata()["1.weight"] == "0.weight"
        assert "1.weight" not in library.keys()  # noqa: SIM118
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    other[1].weight = other[0].weight
    referee.load_model(other, str(tmp_path / "a.safetensors"))
    assert torch.equal(other[1].weight, model[0].weight)


@pytest.mark.parametrize("dtype", ["complex128", "string", "qint8", "int4", "float8_e4m3b11fnuz", "unknown"])
def test_types_that_it_lacks_are_refused_before_anything_is_written(
    tmp_path: Path, dtype: str, golden: Golden
) -> None:
    tree = Tree({(key("a"), key("b")): Leaf(dtype, (0,), Inline(b""), "a.b")})
    with pytest.raises(UnsupportedError) as caught:
        save(tree, str(tmp_path / "x.safetensors"))
    golden(caught.value)
    assert not os.listdir(tmp_path)


def test_names_that_would_be_one_are_spelled_apart(tmp_path: Path) -> None:
    tree = Tree(
        {
            (key("a"), key("b")): leaf(np.ones(1, "f4")),
            (key("a.b"),): leaf(np.ones(2, "f4")),
            (key("__metadata__"),): leaf(np.ones(3, "f4")),
            (key("format"),): leaf(np.ones(4, "f4")),
            (key("\ud800"),): leaf(np.ones(5, "f4")),
            (attr("a.b"),): leaf(np.ones(6, "f4")),
        }
    )
    save(tree, str(tmp_path / "x.safetensors"))
    checkpoint = open_checkpoint(str(tmp_path / "x.safetensors"))
    assert same(checkpoint.tree, tree)
    assert len(referee.load_file(tmp_path / "x.safetensors")) == 6


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{",
        '{"version":2,"leaves":[],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float64"}]],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float32","role":"x"}]],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float32","of":7}]],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float32"}]],"aliases":[[0,["w"],null]],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float32"}]],"aliases":[],"containers":[[[],"set",null,0]]}',
        '{"version":1,"leaves":[[[{"x":1}],"w",{"dtype":"float32"}]],"aliases":[],"containers":[]}',
        '{"version":1,"leaves":[[["w"],"w",{"dtype":"float32","value":1}],[["w"],null,{"value":{"dict":[[[],1]]}}]],'
        '"aliases":[],"containers":[]}',
        f'{{"version":1,"leaves":{"[" * 900}{"]" * 900},"aliases":[],"containers":[]}}',
    ],
)
def test_a_record_that_is_damaged_or_anothers_is_not_used(
    tmp_path: Path, record: str, golden: Golden
) -> None:
    metadata = {"ckpttool.tree": record}
    referee.save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", metadata)
    checkpoint = open_checkpoint(str(tmp_path / "x.safetensors"))
    assert list(checkpoint.tree) == [(key("w"),)]
    golden("\n".join(checkpoint.notes))


def test_an_agent_of_tensorflow_becomes_torchs(tmp_path: Path) -> None:
    for target in ("a.pt", "a.safetensors"):
        assert convert(str(TF_SAMPLE), str(tmp_path / target)).written
    one, other = (open_checkpoint(str(tmp_path / name)).tree for name in ("a.pt", "a.safetensors"))
    # A pickle is nested: its entries come in the order of their dicts.
    assert other.keys() == one.keys()
    assert (
        digest_checkpoint(open_checkpoint(str(tmp_path / "a.pt"))).sha256
        == digest_checkpoint(open_checkpoint(str(tmp_path / "a.safetensors"))).sha256
    )
    loaded = referee.load_file(tmp_path / "a.safetensors")
    assert loaded["actor.l1.weight"].shape == (64, 3)


def test_one_network_alone(tmp_path: Path) -> None:
    assert convert(str(TORCH_SAMPLE), str(tmp_path / "actor.safetensors"), part="actor").written
    network = torch.nn.Linear(3, 64)
    loaded = referee.load_file(tmp_path / "actor.safetensors")
    network.load_state_dict({"weight": loaded["l1.weight"], "bias": loaded["l1.bias"]})
    assert len(loaded) == 6


def test_values_and_containers_are_as_they_were(tmp_path: Path) -> None:
    tree = Tree(
        {
            (key("w"),): leaf(np.ones(1, "f4")),
            (key("n"),): ValueLeaf(-0.0),
            (key("c"),): ValueLeaf(Record("a.B", "x")),
        },
        containers={(): Container("OrderedDict", None, {"_metadata": OrderedDict([("", {"version": 1})])})},
    )
    save(tree, str(tmp_path / "x.safetensors"))
    read_back = open_checkpoint(str(tmp_path / "x.safetensors")).tree
    assert same(read_back, tree)
    assert read_back.containers == tree.containers
    assert type(read_back.containers[()].state["_metadata"]) is OrderedDict  # type: ignore[index]


def test_every_claim_is_cheap(tmp_path: Path) -> None:
    file = put(tmp_path, {"a": entry(0, 4)}, bytes(4))
    assert our_format.claims(Probe(file)) == file
    assert torch_zip.claims(Probe(file)) is None
    assert our_format.claims(Probe(str(tmp_path))) is None


@pytest.mark.corpus
def test_real_files_are_read(corpus: Path) -> None:
    files = list((corpus / "torch").rglob("*.safetensors"))
    assert files
    for file in files:
        checkpoint = open_checkpoint(str(file))
        expected = referee.load_file(file)
        assert {leaf.key for _, leaf in checkpoint.tree.tensors()} == expected.keys()
        for _, tensor in checkpoint.tree.tensors():
            assert np.array_equal(tensor.array(), expected[tensor.key].numpy())


def test_an_integer_that_python_would_not_print_is_not_written(tmp_path: Path, golden: Golden) -> None:
    tree = Tree({(key("w"),): leaf(np.ones(1, "f4")), (key("n"),): ValueLeaf(1 << 20_000)})
    for target in ("x.safetensors", "x.npz"):
        with pytest.raises(UnsupportedError) as caught:
            save(tree, str(tmp_path / target))
        golden(caught.value)


def test_looking_loads_no_numpy(tmp_path: Path) -> None:
    files = [str(tmp_path / f"x.{end}") for end in ("safetensors", "npz")]
    for file in files:
        convert(str(TORCH_SAMPLE), file)
    code = (
        "import sys, ckpttool; [ckpttool.summary(path) for path in sys.argv[1:]];"
        "print(sorted({'numpy', 'ml_dtypes', 'torch', 'safetensors', 'pickle'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
