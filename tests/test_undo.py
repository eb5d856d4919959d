"""A conversion is undone bit for bit; what a target cannot hold lies beside it and comes back."""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.restoration import reverse_conversion
from ckpttool.conversion.reverse import record_reverse, residue_path
from ckpttool.conversion.write import save
from ckpttool.core import (
    ChecksumError,
    Container,
    FormatError,
    Inline,
    Leaf,
    TargetExistsError,
    Tree,
    ValueLeaf,
    attr,
    index,
    key,
)
from ckpttool.formats import encode_tree, open_checkpoint
from ckpttool.mapping import (
    AxisSlice,
    BlockOrder,
    Cast,
    Chain,
    ConcatPart,
    Permute,
    Reshape,
    Rule,
    parse_rule,
)
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.conftest import in_process as run
from tests.golden_texts import Golden
from tests.trees import attributes, leaf


def go(source: object, target: object, to: str | None = None, **options: Any) -> ConversionResult:
    return convert(str(source), str(target), to=to, allow_missing=True, sync=False, **options)


def tensors(path: object) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {t.key: (t.dtype, t.shape, t.sha256) for t in digest(str(path)).tensors}


@pytest.fixture
def odd_tf(tmp_path: Path) -> str:
    """The TensorFlow sample with variables that no PyTorch agent has a place for."""
    tree = open_checkpoint(str(TF_SAMPLE)).tree
    odd = {
        attributes("policy/mystery"): leaf(np.arange(60, dtype=np.float64).reshape(20, 3), "mystery"),
        attributes("policy/actor/extra/table"): leaf(np.ones((2, 2), np.int8), "table"),
    }
    path = str(tmp_path / "odd-1")
    save(Tree({**tree.leaves, **odd}, tree.aliases, tree.containers), path, "tf", sync=False)
    return path


@pytest.fixture
def odd_torch(tmp_path: Path) -> str:
    """The PyTorch sample with entries that no TensorFlow agent has a place for."""
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    odd: dict[Any, Any] = {
        (key("history"), index(0)): ValueLeaf(1.5),
        (key("history"), index(1)): ValueLeaf("text"),
        (key("table"),): leaf(np.arange(4, dtype=np.int16), "table"),
    }
    containers = {**tree.containers, (key("history"),): Container("list")}
    path = str(tmp_path / "odd.pt")
    save(Tree({**tree.leaves, **odd}, tree.aliases, containers), path, sync=False)
    return path


def test_tensorflow_comes_back_whole(odd_tf: str, tmp_path: Path, golden: Golden) -> None:
    there = go(odd_tf, tmp_path / "agent.pt")
    assert set(there.report.unused) == {"policy/mystery", "policy/actor/extra/table"}
    (tmp_path / "back").mkdir()
    back = go(tmp_path / "agent.pt", tmp_path / "back" / "odd-1", "tf")
    assert back.report.complete
    assert digest(str(tmp_path / "back" / "odd-1")).sha256 == digest(odd_tf).sha256
    golden("\n".join(back.report.notes))


def test_pytorch_comes_back_whole(odd_torch: str, tmp_path: Path) -> None:
    go(odd_torch, tmp_path / "a-1", "tf")
    back = go(tmp_path / "a-1", tmp_path / "back.pt")
    assert back.report.complete
    assert digest(str(tmp_path / "back.pt")).sha256 == digest(odd_torch).sha256
    tree = open_checkpoint(str(tmp_path / "back.pt")).tree
    assert tree[key("history"), index(1)] == ValueLeaf("text")
    assert tree.containers[key("history"),].kind == "list"


def test_without_the_file_a_note_says_so(odd_tf: str, tmp_path: Path, golden: Golden) -> None:
    go(odd_tf, tmp_path / "agent.pt")
    Path(residue_path(str(tmp_path / "agent.pt"))).unlink()
    back = go(tmp_path / "agent.pt", tmp_path / "back-1", "tf")
    golden("\n".join(back.report.notes))


def test_the_file_of_another_conversion_is_not_used(odd_tf: str, tmp_path: Path, golden: Golden) -> None:
    go(odd_tf, tmp_path / "agent.pt")
    other = Tree({(key("0"),): leaf(np.zeros(1, np.float32)), (key("1"),): leaf(np.zeros(1, np.float32))})
    save(other, residue_path(str(tmp_path / "agent.pt")), "torch", force=True)
    back = go(tmp_path / "agent.pt", tmp_path / "back-1", "tf")
    golden("\n".join(back.report.notes))


def test_another_target_gets_no_residue(odd_tf: str, tmp_path: Path) -> None:
    go(odd_tf, tmp_path / "agent.pt")
    assert not any(
        "conversion reversed" in note
        for note in go(tmp_path / "agent.pt", tmp_path / "x", "fujimoto").report.notes
    )


def test_a_conversion_that_loses_nothing_leaves_no_file(tmp_path: Path) -> None:
    go(TF_SAMPLE, tmp_path / "agent.pt")
    assert not Path(residue_path(str(tmp_path / "agent.pt"))).exists()
    assert json.loads((tmp_path / "agent.pt.ckpttool.json").read_text())["undo"]["residue_sha256"] is None


def test_a_residue_is_never_written_over_another_file(odd_tf: str, tmp_path: Path) -> None:
    Path(residue_path(str(tmp_path / "agent.pt"))).write_text("mine")
    with pytest.raises(TargetExistsError):
        go(odd_tf, tmp_path / "agent.pt")
    assert not (tmp_path / "agent.pt").exists()
    assert Path(residue_path(str(tmp_path / "agent.pt"))).read_text() == "mine"
    assert go(odd_tf, tmp_path / "agent.pt", force=True).written


def test_the_same_conversion_leaves_the_same_residue(odd_tf: str, tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        go(odd_tf, tmp_path / name / "agent.pt")
        written.append(Path(residue_path(str(tmp_path / name / "agent.pt"))).read_bytes())
    assert written[0] == written[1]


def test_the_command_undoes(odd_torch: str, tmp_path: Path) -> None:
    assert run("convert", odd_torch, tmp_path / "a-1", "--to", "tf").status == 1
    assert run("convert", odd_torch, tmp_path / "a-1", "--to", "tf", "--allow-missing").status == 0
    ran = run("convert", tmp_path / "a-1", tmp_path / "back.pt", "--json")
    assert ran.status == 0, ran.err
    assert ran.json()["digest"] == digest(odd_torch).sha256


@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE], ids=["tf", "torch"])
@pytest.mark.parametrize("to", ["tf", "tf1", "torch", "keras", "fujimoto", "cleanrl", "safetensors", "npz"])
def test_every_sample_comes_back_from_everywhere(sample: Path, to: str, tmp_path: Path) -> None:
    there = tmp_path / {"keras": "x.weights.h5", "safetensors": "x.safetensors", "npz": "x.npz"}.get(
        to, "x-1"
    )
    back = tmp_path / "back-1"
    go(sample, there, to)
    go(there, back, "tf" if sample == TF_SAMPLE else "torch")
    back_digest = digest(str(back))
    assert {t.key for t in back_digest.tensors} == {t.key for t in digest(str(sample)).tensors}
    assert back_digest.sha256 == digest(str(sample)).sha256


X = Tree({(key("x"),): leaf(np.float32([[1, 2]]), "x")})
SMALL = {"key": "a", "dtype": "int8", "shape": [1], "data": "AA=="}
MOVED = {"key": "n", "dtype": "float32", "shape": [2, 1], "from": [[["x"], "transpose"]]}


def packed(document: object) -> dict[str, Any]:
    return {"tree": base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()}


def record(tensor: Any, dtype: str = "int8", **more: Any) -> dict[str, Any]:
    """Return the record of a source with one tensor."""
    source = Tree({(key("a"),): Leaf(dtype, (1,), Inline(b""), "a")})
    return packed({"tensors": {"0": tensor}, "tree": encode_tree(source, {(key("a"),): "0"}), **more})


def test_a_record_brings_back_what_it_holds() -> None:
    source = Tree(
        {(index(3),): Leaf("float32", (2, 1), Inline(b""), "n", "slot"), (attr("b"),): ValueLeaf(None)}
    )
    text = packed({"tensors": {"0": MOVED}, "tree": encode_tree(source, {(index(3),): "0"})})
    reverse = reverse_conversion(X, text, "x")
    assert reverse.tree is not None
    assert reverse.tree[attr("b"),] == ValueLeaf(None)
    back = reverse.tree[index(3),]
    assert isinstance(back, Leaf)
    assert (back.shape, back.key, back.role) == ((2, 1), "n", "slot")
    np.testing.assert_array_equal(back.array(), [[1], [2]])
    assert [move.target for move in reverse.moves] == [(index(3),)]
    small = reverse_conversion(X, record(SMALL), "x").tree
    assert small is not None
    assert bytes(small[key("a"),].read()) == b"\0"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings",
    [
        {"tree": 5},
        {"tree": "!"},
        {"tree": "AAAA"},
        {"tree": base64.b64encode(zlib.compress(b"[" * 100_000)).decode()},
        {"tree": base64.b64encode(zlib.compress(b"{}")[:-3]).decode()},
        packed([]),
        packed({}),
        packed({"tensors": [], "tree": ""}),
        packed({"tensors": {}, "tree": 5}),
        record(SMALL, tree="{}"),
        record(5),
        record({}),
        record({**SMALL, "dtype": "int7"}),
        record({**SMALL, "dtype": "uint8"}),
        record({**SMALL, "shape": [-1]}),
        record({**SMALL, "shape": [2]}),
        record({**SMALL, "shape": 1}),
        record({**SMALL, "data": "*"}),
        record({**SMALL, "data": 1}),
        record({**SMALL, "key": 5}),
        record({"key": "a", "dtype": "int8", "shape": [1]}),
        record(MOVED),
        record({**MOVED, "from": []}, "float32"),
        record({**MOVED, "from": [[["y"], "transpose"]]}, "float32"),
        record({**MOVED, "from": [[["x"], "steal"]]}, "float32"),
        record({**MOVED, "from": [[["x"], "keep"]]}, "float32"),
        record({**MOVED, "from": [[{"x": 1}, "keep"]]}, "float32"),
        record({**MOVED, "from": [["x"]]}, "float32"),
        record({**MOVED, "from": [[["x"], "into 0:1 of 2 on axis 0"]]}, "float32"),
    ],
    ids=lambda record: str(record)[-40:],
)
def test_a_record_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="record"):
        reverse_conversion(X, settings, "x")


def test_only_what_was_written_for_these_weights_is_undone(tmp_path: Path, golden: Golden) -> None:
    go(TF_SAMPLE, tmp_path / "agent.pt")
    tree = open_checkpoint(str(tmp_path / "agent.pt")).tree
    changed = dict(tree.leaves)
    first = next(path for path, _ in tree.tensors())
    changed[first] = leaf(np.ones(changed[first].shape, np.float32), changed[first].key)  # type: ignore[union-attr]
    save(Tree(changed, tree.aliases, tree.containers), str(tmp_path / "agent.pt"), force=True)
    with pytest.raises(ChecksumError) as caught:
        go(tmp_path / "agent.pt", tmp_path / "back-1", "tf")
    golden(caught.value)
    (tmp_path / "agent.pt.ckpttool.json").unlink()
    back = go(tmp_path / "agent.pt", tmp_path / "back-1", "tf")
    assert not any("conversion reversed" in note for note in back.report.notes)
    assert open_checkpoint(str(tmp_path / "back-1")).tree


RULES = (
    KEEP,
    TRANSPOSE,
    Permute((2, 0, 1)),
    Reshape((2, 3)),
    Reshape(()),
    Cast("int64"),
    AxisSlice(1, 2, 3, 9),
)


@pytest.mark.parametrize(
    "rule", [*RULES, ConcatPart(0, 0, 4, 8), BlockOrder(1, (1, 0)), Chain((TRANSPOSE, Reshape((4, 1))))]
)
def test_a_rule_is_read_back_from_its_name(rule: Rule) -> None:
    assert parse_rule(rule.name) == rule


@pytest.mark.parametrize(
    "name", ["", "steal", "permute 0,2", "blocks 0,0 on axis 1", "cast to int7", "one of 2 terms"]
)
def test_what_is_no_rule_is_none(name: str) -> None:
    assert parse_rule(name) is None


@pytest.mark.torch
def test_what_was_stated_of_an_optimizer_survives_the_way_back(tmp_path: Path) -> None:
    import torch

    go(TF_SAMPLE, tmp_path / "a.pt", l2=["critic/**/kernel=0.01"])
    back = go(tmp_path / "a.pt", tmp_path / "back-1", "tf")
    assert any("conversion reversed" in note for note in back.report.notes)
    go(tmp_path / "back-1", tmp_path / "again.pt")
    groups = [
        torch.load(tmp_path / name, weights_only=True)["critic_optimizer"]["param_groups"]
        for name in ("a.pt", "again.pt")
    ]
    assert groups[0] == groups[1]
    assert {group["weight_decay"] for group in groups[0]} == {0.0, 0.02}


def irreversible_notes(done: ConversionResult) -> list[str]:
    return [note for note in done.report.notes if note.startswith("not reversible")]


@pytest.mark.torch
def test_a_conversion_that_nothing_undoes_says_so_once(tmp_path: Path, golden: Golden) -> None:
    import torch

    part = go(TF_SAMPLE, tmp_path / "actor.pt", part="policy/actor")
    golden("\n".join(irreversible_notes(part)))
    torch.save({"module.l1.weight": torch.ones(2, 3)}, tmp_path / "wrapped.pt")
    golden("\n".join(irreversible_notes(go(tmp_path / "wrapped.pt", tmp_path / "plain.pt", strip=True))))
    assert json.loads((tmp_path / "plain.pt.ckpttool.json").read_text())["undo"] is None


def test_a_source_with_objects_of_foreign_classes_says_that_nothing_undoes_it(golden: Golden) -> None:
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    strange = {**tree.containers, (key("actor"),): Container("record", "mine.Actor")}
    kept = record_reverse(Tree(tree.leaves, tree.aliases, strange), (), {})
    assert kept.record is None
    golden(kept.why)


@pytest.mark.torch
def test_classes_that_nothing_undoes_are_named_with_verbose_and_in_json(tmp_path: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(2, 3), tmp_path / "whole.pt")
    words = ("convert", "whole.pt", "out.npz", "--force")
    assert "not reversible" not in run(*words, cwd=tmp_path).out
    assert "not reversible" in run(*words, "--verbose", cwd=tmp_path).out
    assert any("not reversible" in note for note in run(*words, "--json", cwd=tmp_path).json()["notes"])
    assert run(*words, "--verbose", "--quiet", cwd=tmp_path).status == 2


def test_many_unmapped_entries_with_other_numbers_are_one_line(tmp_path: Path) -> None:
    replay = [argparse.Namespace(obs=np.full(3, n, "f4"), step=n) for n in range(400)]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"replay": replay, "x": 3}))
    ran = run("convert", "a.pkl", "out-1", "--to", "tf", cwd=tmp_path)
    assert ran.status == 1
    assert [line for line in ran.out.splitlines() if line.startswith("unmapped")] == [
        "unmapped: replay/*/step (400 entries)",
        "unmapped: x",
    ]


def test_a_conversion_with_a_way_back_or_a_copy_says_nothing(tmp_path: Path) -> None:
    assert not irreversible_notes(go(TF_SAMPLE, tmp_path / "agent.pt"))
    assert not irreversible_notes(go(TORCH_SAMPLE, tmp_path / "copy.pt"))
    assert not irreversible_notes(go(TF_SAMPLE, tmp_path / "dry.pt", part="policy/actor", dry_run=True))
