"""Targets in shards: their own libraries read them, a rerun continues, and no kill changes a byte."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors import torch as referee

from ckpttool.commands.convert import convert
from ckpttool.conversion import shards, targets
from ckpttool.conversion.options import ConversionOptions
from ckpttool.conversion.shards import ShardTask
from ckpttool.conversion.write import save
from ckpttool.core import (
    CkpttoolError,
    FormatError,
    Inline,
    Leaf,
    TargetExistsError,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    filesystem,
    index,
    key,
)
from ckpttool.core import source as tensor_source
from ckpttool.core.digests import digest_checkpoint
from ckpttool.evaluation import scheduling
from ckpttool.formats import open_checkpoint, tf_common, torch_dcp
from ckpttool.formats.tf_common import Box, SlicedTensor
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, ckpttool, in_process

run_tensorflow = runpy.run_path(str(Path(__file__).with_name("tensorflow_child.py")))["run"]

NAME = "model.safetensors"
INDEX = f"{NAME}.index.json"


def weights(count: int = 6, size: int = 100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(size, n + 1, generator=generator) for n in range(count)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A state_dict with tied weights; the largest tensor has 2,400 bytes."""
    state = weights()
    state["tied.weight"] = state["layers.0.weight"]
    torch.save(state, tmp_path / "source.pt")
    return tmp_path / "source.pt"


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Return all files of a folder, hidden ones too, except the receipt: that names its source."""
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.endswith(".ckpttool.json"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def sha256(path: Path) -> str:
    return digest_checkpoint(open_checkpoint(str(path))).sha256


# Shards of Hugging Face.


@pytest.mark.parametrize("size", [500, 1200, 2000, 100_000])
def test_shards_are_split_and_named_as_by_huggingface_hub(tmp_path: Path, size: int) -> None:
    torch.save(weights(), tmp_path / "source.pt")
    target = folder(tmp_path / "made")
    assert convert(str(tmp_path / "source.pt"), str(target / NAME), shard_size=str(size)).written
    split = huggingface_hub.split_torch_state_dict_into_shards(weights(), max_shard_size=size)
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"] == split.metadata
    if split.is_sharded:
        assert index["weight_map"] == split.tensor_to_filename
    for name in {*index["weight_map"].values()}:
        loaded = referee.load_file(target / name)
        assert loaded.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert all(torch.equal(value, weights()[key]) for key, value in loaded.items())
    assert contents(target).keys() == {INDEX, *index["weight_map"].values()}


def test_transformers_loads_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    torch.save(model.state_dict(), tmp_path / "source.pt")
    target = folder(tmp_path / "made")
    config.save_pretrained(target)
    assert convert(str(tmp_path / "source.pt"), str(target / NAME), shard_size="20KB", layout="none").written
    loaded, lists = transformers.BertModel.from_pretrained(target, output_loading_info=True)
    assert not lists["missing_keys"]
    assert not lists["unexpected_keys"]
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_an_agent_in_shards_is_the_agent_in_one_file(tmp_path: Path, jobs: int | None) -> None:
    convert(str(TORCH_SAMPLE), str(tmp_path / "whole.safetensors"))
    here, target = folder(tmp_path / "here"), folder(tmp_path / "made")
    convert(str(TORCH_SAMPLE), str(here / NAME), shard_size="40KB")
    done = convert(str(TORCH_SAMPLE), str(target / NAME), shard_size="40KB", jobs=jobs)
    assert contents(target) == contents(here)
    assert done.parity
    assert done.within
    for path in (target, target / INDEX):
        assert sha256(path) == sha256(tmp_path / "whole.safetensors") == done.digest
        assert in_process("verify", TORCH_SAMPLE, path, "--all").status == 0
    receipt = json.loads((target / f"{INDEX}.ckpttool.json").read_text())
    whole = json.loads((tmp_path / "whole.safetensors.ckpttool.json").read_text())
    assert receipt == whole


def test_tied_weights_are_stored_once(tmp_path: Path, source: Path) -> None:
    target = folder(tmp_path / "made")
    convert(str(source), str(target / NAME), shard_size="1KB")
    checkpoint = open_checkpoint(str(target))
    assert sum(map(len, checkpoint.tree.aliases.values())) == 1
    assert sha256(target) == sha256(source)


def test_names_and_values_are_in_the_index(tmp_path: Path) -> None:
    # An embedded tree that does not fit the tensors is not used.
    target = folder(tmp_path / "made")
    convert(str(TORCH_SAMPLE), str(target / NAME), shard_size="40KB")
    index = json.loads((target / INDEX).read_text())
    del index["weight_map"]["critic.q1.l1.bias"]
    (target / INDEX).write_text(json.dumps(index))
    assert "total_it" in open_checkpoint(str(target)).tree.names.values()
    index["metadata"]["ckpttool.tree"] = index["metadata"]["ckpttool.tree"].replace("float32", "float64")
    (target / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(str(target))
    assert any("ignoring the tree" in note for note in checkpoint.notes)
    assert "total_it" not in checkpoint.tree.names.values()


# Shards of TensorFlow.


def read_bundles(folder: Path) -> dict[str, dict[str, str]]:
    """Return the bytes of every variable of both bundles (runs in a child process)."""
    import tensorflow as tf

    bundles = {}
    for name in ("parts-1", "whole-1"):
        reader = tf.train.load_checkpoint(str(folder / name))
        keys = [key for key in reader.get_variable_to_shape_map() if key != "_CHECKPOINTABLE_OBJECT_GRAPH"]
        bundles[name] = {key: np.asarray(reader.get_tensor(key)).tobytes().hex() for key in keys}
    return bundles


@pytest.mark.tensorflow
def test_tensorflow_reads_shards(tmp_path: Path) -> None:
    convert(str(TORCH_SAMPLE), str(tmp_path / "whole-1"), to="tf")
    done = convert(str(TORCH_SAMPLE), str(tmp_path / "parts-1"), to="tf", shards=5, jobs=2)
    assert done.within
    assert len(list(tmp_path.glob("parts-1.data-*-of-00005"))) == 5
    read = run_tensorflow(__file__, "read_bundles", tmp_path)
    assert read["parts-1"] == read["whole-1"]
    assert len(read["parts-1"]) > 70
    assert sha256(tmp_path / "parts-1") == sha256(tmp_path / "whole-1")


# Shards of torch.distributed.checkpoint.

LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp

whole = torch.load(sys.argv[1])

def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 7)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    return [emptied(each) for each in value] if isinstance(value, list) else None

def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other

state = emptied(whole)
dcp.load(state, checkpoint_id=sys.argv[2], no_dist=True)
assert equal(state, whole), (state, whole)
"""


def nested_state() -> dict[str, Any]:
    """Return what a training program saves: modules, an optimizer, numbers, lists, a tuple with a tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor(5)],
        "step": 3,
        "names": ["a", "b"],
        "pair": (torch.arange(3), "text", None),
        "rates": [{"lr": 0.1}, [1, 2]],
    }


@pytest.mark.parametrize("jobs", [None, 2])
def test_torch_loads_a_distributed_checkpoint(tmp_path: Path, jobs: int | None) -> None:
    torch.save(nested_state(), tmp_path / "source.pt")
    target = tmp_path / "made"
    done = convert(
        str(tmp_path / "source.pt"), str(target), to="dcp", shard_size="300", jobs=jobs, layout="none"
    )
    assert done.digest == sha256(target)
    assert len(list(target.glob("*.distcp"))) > 3
    assert {file.name for file in tmp_path.iterdir()} == {"source.pt", "made", "made.ckpttool.json"}
    program = [sys.executable, "-c", LOAD, tmp_path / "source.pt", target]
    ran = subprocess.run([*map(str, program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    again = tmp_path / "again.pt"
    assert convert(str(target), str(again), layout="none").written
    assert {name: value.dtype for name, value in torch.load(again)["model"].items()} == {
        name: value.dtype for name, value in nested_state()["model"].items()
    }


def test_an_agent_returns_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    done = convert(str(TORCH_SAMPLE), str(tmp_path / "made"), to="dcp", shard_size="50KB")
    assert done.parity
    assert in_process("verify", TORCH_SAMPLE, tmp_path / "made", "--all").status == 0
    back = convert(str(tmp_path / "made"), str(tmp_path / "back.pt"), to="torch")
    assert back.digest == sha256(TORCH_SAMPLE)


@pytest.mark.parametrize(
    "tree",
    [
        {(key("a.b"), key("c")): ValueLeaf(1), (key("a"), key("b.c")): ValueLeaf(2)},
        {(): ValueLeaf(1)},
        {(index(0),): ValueLeaf(1), (index(1),): ValueLeaf(2)},
    ],
)
def test_trees_without_unique_names_are_refused(tree: Any) -> None:
    for function in (torch_dcp.pieces, torch_dcp.stored):
        with pytest.raises(UnsupportedError):
            function(Tree(tree))


def test_a_distributed_checkpoint_is_never_replaced(tmp_path: Path, source: Path) -> None:
    folder(tmp_path / "made")
    with pytest.raises(TargetExistsError):
        convert(str(source), str(tmp_path / "made"), to="dcp", force=True)


# Sources: their tensors go to other processes.


@pytest.mark.parametrize("end", ["x.pt", "x.npz", "x.safetensors", "x.weights.h5", "dcp", "tf-1"])
def test_sources_of_every_format_reach_other_processes_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    to = end.partition("-")[0] if "." not in end else None
    convert(str(TF_SAMPLE), str(tmp_path / end), to=to)
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    convert(str(tmp_path / end), str(one / NAME), shard_size="30KB")
    interrupt(tmp_path / end, two, monkeypatch, shard_size="30KB")
    convert(str(tmp_path / end), str(two / NAME), shard_size="30KB", jobs=2)
    assert contents(one) == contents(two)


def test_a_tree_in_memory_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tree of the same names and shapes may have other numbers, which no journal states."""
    write = ShardTask._write

    def fail(self: ShardTask, *arguments: Any) -> Any:
        if "__2_" in self.file:
            raise KeyboardInterrupt
        return write(self, *arguments)

    def tree(value: int) -> Tree:
        data = np.full(2000, value, "<f4").tobytes()
        return Tree({(key(f"w{n}"),): Leaf("float32", (2000,), Inline(data), f"w{n}") for n in range(3)})

    monkeypatch.setattr(targets, "TARGETS", {**targets.TARGETS, "dcp": SMALL})
    with monkeypatch.context() as patched:
        patched.setattr(ShardTask, "_write", fail)
        with pytest.raises(KeyboardInterrupt):
            save(tree(1), str(tmp_path / "made"), "dcp")
    with pytest.raises(UsageError):
        save(tree(1), str(tmp_path / "made"), "dcp")
    subprocess.run(["rm", "-r", *tmp_path.iterdir()], check=True)
    assert save(tree(2), str(tmp_path / "made"), "dcp").sha256 == sha256(tmp_path / "made")


SMALL = targets.TARGETS["dcp"]._replace(sharded={"shard_bytes": 8000})


@pytest.mark.parametrize(
    ("between", "options"),
    [
        ("between/model.safetensors", {"shard_size": "40KB"}),
        ("between/dcp", {"to": "dcp", "shard_size": "50KB"}),
    ],
)
def test_shards_are_sources(tmp_path: Path, between: str, options: dict[str, Any]) -> None:
    here, target = folder(tmp_path / "between"), folder(tmp_path / "made")
    convert(str(TORCH_SAMPLE), str(tmp_path / between), **options)
    source = here / "dcp" if "to" in options else here
    done = convert(str(source), str(target / NAME), shard_size="30KB", jobs=2)
    assert done.digest == sha256(target) == sha256(TORCH_SAMPLE)


def test_shards_of_tensorflow_are_sources(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "parts-1"), to="tf", shard_size="60KB")
    assert len(list(tmp_path.glob("parts-1.data-*"))) > 3
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    convert(str(TF_SAMPLE), str(one / NAME), shard_size="60KB")
    convert(str(tmp_path / "parts-1"), str(two / NAME), shard_size="60KB", jobs=2)
    assert contents(one) == contents(two)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that every command of this process uses."""
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with scheduling._connect_cluster("local", 2):
        yield


def test_a_cluster_does_what_one_process_does(cluster: None, tmp_path: Path, source: Path) -> None:
    here, target, run = (folder(tmp_path / name) for name in ("here", "made", "run"))
    convert(str(source), str(here / NAME), shard_size="1KB")
    for step in (1, 2):
        np.savez(run / f"ckpt-{step}.npz", w=np.full(9, float(step)), step=np.int64(step))
    (run / "ckpt-3.npz").write_bytes(b"damaged")
    # The paths are relative to the working directory.
    for words in (
        ("digest", "source.pt", "--json"),
        ("stats", "source.pt", "--json"),
        ("diff", "source.pt", "here", "--json"),
        ("check", "run", "here", "--json"),
        ("report", "run", "--out", "page.html", "--force"),
    ):
        expected, page = in_process(*words, cwd=tmp_path), tmp_path / "page.html"
        shown = page.read_bytes() if page.exists() else b""
        ran = in_process(*words, "--ray", "local", "--jobs", "2", cwd=tmp_path)
        assert (ran.status, ran.out, ran.err) == (expected.status, expected.out, expected.err)
        assert page.exists() is ("report" in words)
        assert not page.exists() or page.read_bytes() == shown
    options = ("--shard-size", "1KB", "--quiet")
    ran = in_process("convert", "source.pt", f"made/{NAME}", *options, "--ray", "local", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert contents(target) == contents(here)


@pytest.mark.parametrize("command", ["convert", "digest"])
def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path, source: Path, command: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    built = folder(tmp_path / "made")
    target = (built / NAME, "--shard-size", "1KB") if command == "convert" else ()
    ran = in_process(command, source, *target, "--ray", "nowhere")
    assert ran.status == 2
    assert contents(built) == {}


@pytest.mark.parametrize("difference", ["version", "no folder", "another folder"])
def test_a_machine_that_sees_other_files_is_refused(tmp_path: Path, source: Path, difference: str) -> None:
    context = scheduling.TaskContext.current([str(source)], shared=True)
    assert context.run(len, "task") == 4
    if difference == "version":
        context = replace(context, version="0.0")
    else:
        tmp_path.rename(f"{tmp_path}-elsewhere")
    if difference == "another folder":
        tmp_path.mkdir()
    with pytest.raises(UsageError) as raised:
        context.run(len, "task")
    assert raised.value.file == (None if difference == "version" else str(tmp_path))


# A rerun continues.


@pytest.fixture
def interrupted(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a conversion that ended within the third of its shards."""
    target = folder(tmp_path / "made")
    interrupt(source, target, monkeypatch, shard_size="1KB")
    return target


def interrupt(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    write = ShardTask._write

    def fail(self: ShardTask, *arguments: Any) -> Any:
        if "-00003-" in self.file:
            raise KeyboardInterrupt
        return write(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ShardTask, "_write", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), str(output / NAME), **options)


def working_folder(output: Path) -> Path:
    (only,) = output.iterdir()
    return only


@contextlib.contextmanager
def counted_shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of the shards that are written in the block."""
    names: list[str] = []
    write = ShardTask._write

    def count(self: ShardTask, *arguments: Any) -> Any:
        names.append(os.path.basename(self.file)[6:11])
        return write(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ShardTask, "_write", count)
        yield names


def test_a_rerun_writes_what_is_missing(
    tmp_path: Path, source: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CkpttoolError):
        open_checkpoint(str(interrupted))
    with counted_shards(monkeypatch) as written:
        convert(str(source), str(interrupted / NAME), shard_size="1KB")
    assert "00003" in written
    assert not {"00001", "00002"} & {*written}
    undisturbed = folder(tmp_path / "undisturbed")
    convert(str(source), str(undisturbed / NAME), shard_size="1KB")
    assert contents(interrupted) == contents(undisturbed)


@pytest.mark.parametrize("damage", ["shard", "header", "record", "no shard", "rest"])
def test_a_damaged_shard_is_written_again(
    tmp_path: Path, source: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    work = working_folder(interrupted)
    file = next(work.glob("*-00002-*.safetensors"))
    if damage == "shard":
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    elif damage == "header":
        file.write_bytes(file.read_bytes().replace(b'"pt"', b'"tf"'))
    elif damage == "no shard":
        file.unlink()
    elif damage == "record":
        file.with_name(f"{file.name}.record").write_text("{")
    else:
        (work / f".{file.name}.ckpttool-tmp-0123").write_bytes(b"rest")
    with counted_shards(monkeypatch) as written:
        convert(str(source), str(interrupted / NAME), shard_size="1KB")
    assert ("00002" in written) == (damage != "rest")
    assert "00001" not in written
    undisturbed = folder(tmp_path / "undisturbed")
    convert(str(source), str(undisturbed / NAME), shard_size="1KB")
    assert contents(interrupted) == contents(undisturbed)


@pytest.mark.parametrize("change", ["size", "source", "version"])
def test_another_conversion_is_not_continued(
    source: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = contents(interrupted)
    if change == "source":
        torch.save({name: value + 1 for name, value in torch.load(source).items()}, source)
    options: dict[str, Any] = {"shard_size": "2KB" if change == "size" else "1KB"}
    if change == "version":
        monkeypatch.setattr(shards, "__version__", "99")
    with pytest.raises(UsageError) as error:
        convert(str(source), str(interrupted / NAME), **options)
    assert error.value.file == str(working_folder(interrupted))
    assert contents(interrupted) == before
    assert error.value.hint is not None
    subprocess.run(error.value.hint.partition(": ")[2], shell=True, check=True)
    assert not any(interrupted.iterdir())
    assert convert(str(source), str(interrupted / NAME), **options).written


def test_nothing_is_left_of_a_conversion_without_a_complete_shard(tmp_path: Path, source: Path) -> None:
    target = folder(tmp_path / "made")
    data = bytearray(source.read_bytes())
    at = data.index(weights()["layers.0.weight"].numpy().tobytes()[:64])
    data[at] ^= 1
    source.write_bytes(data)
    with pytest.raises(CkpttoolError):
        convert(str(source), str(target / NAME), shard_size="1KB")
    assert not any(target.iterdir())


@pytest.mark.parametrize("name", ["rename", "makedirs"])
def test_errors_of_the_system_are_explained(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, "quota")

    target = folder(tmp_path / "made")
    monkeypatch.setattr(*((os, name) if name == "makedirs" else (filesystem, name)), fail)
    with pytest.raises(UsageError) as error:
        convert(str(source), str(target / NAME), shard_size="1KB")
    assert error.value.hint
    assert not any(target.iterdir())


def test_a_link_is_not_a_folder_of_a_conversion(tmp_path: Path, source: Path, interrupted: Path) -> None:
    work = working_folder(interrupted)
    work.rename(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    work.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TargetExistsError):
        convert(str(source), str(interrupted / NAME), shard_size="1KB")
    assert contents(tmp_path / "elsewhere") == before


def test_existing_files_are_not_replaced(tmp_path: Path, source: Path) -> None:
    target = folder(tmp_path / "made")
    (target / "model-00002-of-00005.safetensors").write_bytes(b"mine")
    with pytest.raises(TargetExistsError):
        convert(str(source), str(target / NAME), shard_size="1500")
    assert [file.name for file in target.iterdir()] == ["model-00002-of-00005.safetensors"]


@pytest.mark.parametrize("target", ["hf", "tf"])
def test_a_replaced_target_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Interrupt every rename and link of a replacement by shards of the same names, one after the other."""
    name, files = (NAME, {"shard_size": "15KB"}) if target == "hf" else ("ckpt-1", {"to": "tf", "shards": 3})
    options: dict[str, Any] = {**files, "part": "policy/actor", "verify": False}
    sums = []
    for which in ("12500", "15000"):
        convert(f"{TF_SAMPLE.with_name('ckpt')}-{which}", str(folder(tmp_path / which) / name), **options)
        sums.append(sha256(tmp_path / which))
    assert sums[0] != sums[1]
    built = tmp_path / "12500"
    for number in range(1, 200):
        steps = Stopper(number)
        with monkeypatch.context() as patched, contextlib.suppress(Stopper.Stopped):
            patched.setattr(filesystem, "rename", steps.before(filesystem.rename))
            patched.setattr(os, "link", steps.before(os.link))
            convert(str(TF_SAMPLE), str(built / name), force=True, **options)
            break
        assert sha256(built) in sums
    assert number > 8
    # Besides them, receipts of interrupted conversions wait under temporary names.
    assert contents(tmp_path / "15000").items() <= contents(built).items()


class Stopper:
    """Stops at one of the calls of several functions."""

    class Stopped(BaseException):
        pass

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def before(self, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.number:
                raise self.Stopped
            return function(*arguments, **named)

        return call


# Kills of any process.


def test_kills_of_any_process_change_no_byte(tmp_path: Path) -> None:
    disturb(tmp_path, 3)


@pytest.mark.slow
def test_twenty_kills_of_any_process_change_no_byte(tmp_path: Path) -> None:
    disturb(tmp_path, 20)


def disturb(tmp_path: Path, kills: int) -> None:
    """Convert with two processes; kill one of them, or the one that started them, that many times.

    A run is disturbed when it has completed another shard. If it goes on, it ends with the next one.
    """
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    state = {f"w{n}": torch.randn(500_000, generator=generator) for n in range(12 * kills)}
    torch.save(state, tmp_path / "source.pt")
    undisturbed, target = folder(tmp_path / "undisturbed"), folder(tmp_path / "made")
    options = ("--shard-size", "2MB", "--no-sync", "--quiet")
    assert in_process("convert", tmp_path / "source.pt", undisturbed / NAME, *options).status == 0
    command = [sys.executable, "-m", "ckpttool", "convert", tmp_path / "source.pt", target / NAME, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = complete = 0
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        with subprocess.Popen(
            [*map(str, command), "--jobs", "2"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as driver:
            victims = draw.choice([(driver.pid,), (0, driver.pid)])
            for victim in victims[: kills - done]:
                while driver.poll() is None and len(list(target.glob(".*/*.record"))) <= complete:
                    time.sleep(0.002)
                time.sleep(draw.random() * 0.01)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim or draw.choice([driver.pid, *children(driver.pid)]), signal.SIGKILL)
                    done += 1
                complete = len(list(target.glob(".*/*.record")))
            _, errors = driver.communicate(timeout=120)
            status = driver.returncode
    assert status == 0, errors
    assert done == kills
    assert contents(target) == contents(undisturbed)


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process started."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, file.read_text().split())
    return children


# Options.


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("a.pt", {"shard_size": "1GB"}),
        ("a.pt", {"jobs": 2}),
        ("a.npz", {"ray": "local"}),
        ("a.safetensors", {"jobs": 2}),
        ("a.safetensors", {"shards": 2}),
        ("a.npz", {"shards": 2}),
        ("a", {"to": "safetensors", "shard_size": "1GB"}),
        ("a-1", {"to": "tf", "shards": 2, "shard_size": "1GB"}),
        ("a", {"to": "dcp", "shards": 2}),
        ("a.safetensors", {"shard_size": "0"}),
        ("a.safetensors", {"shard_size": "5 apples"}),
        ("a.safetensors", {"shard_size": "1GB", "like": "models:Net"}),
        ("a.onnx", {"shard_size": "1GB"}),
    ],
)
def test_invalid_combinations_are_refused(
    tmp_path: Path, source: Path, target: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as error:
        convert(str(source), str(tmp_path / target), ConversionOptions(**options))
    assert error.value.hint
    assert [file.name for file in tmp_path.iterdir()] == ["source.pt"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("2T", 2 * 10**12), ("3KB", 3000)],
)
def test_sizes_are_those_of_huggingface_hub(text: str, nbytes: int) -> None:
    assert targets.parse_size(text) == nbytes


def test_a_task_carries_no_data_of_other_shards(tmp_path: Path) -> None:
    torch.save(weights(4, 1000), tmp_path / "source.pt")
    sizes: list[int] = []

    def measure(self: ShardTask, *_: Any) -> Any:
        sizes.append(len(pickle.dumps(self)))
        raise KeyboardInterrupt

    target = str(folder(tmp_path / "made") / NAME)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards.ShardTask, "complete", measure)
        with pytest.raises(KeyboardInterrupt):
            convert(str(tmp_path / "source.pt"), target, shard_size="1KB")
    assert 0 < sizes[0] < 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by setrlimit")
def test_the_memory_of_a_process_is_bounded(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.zeros(1_000_000 + n) for n in range(6)}, tmp_path / "source.pt")
    command = ("convert", tmp_path / "source.pt", tmp_path / NAME, "--shard-size", "8MB", "--jobs", "2")
    ran = ckpttool("--limit", "worker_bytes=60M", *command)
    assert (ran.status, ran.out) == (2, "")
    assert "worker_bytes" in ran.err
    assert not (tmp_path / INDEX).exists()
    assert ckpttool("--limit", "worker_bytes=600M", *command, "--quiet").status == 0


# Reading in several processes.


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_tensors_are_read_by_several_processes(tmp_path: Path, source: Path, jobs: str) -> None:
    other = weights()
    other["layers.3.weight"][7, 1] = 5
    torch.save(other, tmp_path / "other.pt")
    for words in (
        ("digest", source, "--json"),
        ("stats", source, "--json"),
        ("stats", source, "--glob", "layers.[12]*", "--json"),
        ("diff", source, tmp_path / "other.pt", "--json"),
        ("diff", TORCH_SAMPLE, TF_SAMPLE, "--json"),
    ):
        expected, ran = in_process(*words), in_process(*words, "--jobs", jobs)
        assert (ran.status, ran.json()) == (expected.status, expected.json())


def test_a_damaged_tensor_is_named_by_several_processes(tmp_path: Path) -> None:
    data = bytearray(TORCH_SAMPLE.read_bytes())
    tensors = open_checkpoint(str(TORCH_SAMPLE)).tree.tensors()
    data[data.find(max((bytes(leaf.read()) for _, leaf in tensors), key=len))] ^= 1
    (tmp_path / "damaged.pt").write_bytes(data)
    for command in ("digest", "stats"):
        expected, ran = (
            in_process(command, tmp_path / "damaged.pt", *more) for more in ((), ("--jobs", "2"))
        )
        assert (ran.status, ran.err) == (expected.status, expected.err)
        assert ran.status == 2


# Tensors in chunks are read in strips.

GRID = [((0, 4), (0, 2)), ((0, 4), (2, 3)), ((4, 3), (0, 5))]


@pytest.mark.parametrize(
    ("boxes", "streamed"),
    [
        ([((0, 4), (0, 5)), ((4, 3), (0, 5))], True),
        ([((0, 7), (3, 2)), ((0, 7), (0, 3))], True),
        (GRID, True),
        ([*GRID, ((4, 0), (0, 5)), ((0, 7), (5, 0))], True),
        ([((0, 7), (0, 2)), ((0, 3), (2, 3)), ((3, 4), (2, 3))], False),
    ],
)
def test_chunks_are_put_together_in_strips(
    boxes: list[Box], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_source, "_CUT", 1)
    monkeypatch.setattr(tf_common, "LARGE", 45)  # bytes: two rows and a half
    whole = np.arange(7 * 5 * 2, dtype=np.int16).reshape(7, 5, 2)

    def chunk(box: Box) -> Inline:
        index = tuple(slice(start, start + length) for start, length in box)
        return Inline(whole[index].tobytes())

    parts = [((*box, (0, 2)), chunk(box)) for box in boxes]
    source = tf_common.assemble_slices("int16", whole.shape, parts, "")
    assert isinstance(source, SlicedTensor)
    assert bytes(source.read()) == whole.tobytes()
    assert source.streams() is streamed
    pieces = [bytes(piece) for piece in tensor_source.iter_pieces(source)]
    assert b"".join(pieces) == whole.tobytes()
    assert len(pieces) > 1 or not streamed
    if streamed:
        short = source._replace(parts=((parts[0][0], Inline(b"0")), *source.parts[1:]))
        with pytest.raises(FormatError):
            list(tensor_source.iter_pieces(short))
