"""Errors for wrong guesses: files without a network, unknown targets and parts, missing shards."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.convert import convert
from ckpttool.conversion.write import save
from ckpttool.core import CkpttoolError, MappingError, NotACheckpointError, TruncatedError, UsageError
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests import sb3_files as sb3
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Ran, in_process
from tests.trees import torch_tree


def followed(error: CkpttoolError, folder: Path) -> Ran:
    """Run the command of an error's hint in a folder."""
    assert error.hint is not None
    program, *words = shlex.split(error.hint)
    assert program == "ckpttool"
    return in_process(*words, cwd=folder)


def refused(source: str, target: str = "out", **options: Any) -> CkpttoolError:
    """Return the error of a conversion that writes nothing."""
    with pytest.raises(CkpttoolError) as caught:
        convert(source, target, **options)
    assert not list(Path().glob(f"{target}*"))
    return caught.value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- Files without a network -----------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["agent/vecnormalize.pkl", "vecnormalize.pkl", "vec_normalize.pkl"])
@pytest.mark.parametrize("to", ["tf", "torch", "keras"])
def test_statistics_point_to_their_agent(folder: Path, location: str, to: str) -> None:
    sb3.td3_agent(folder / "agent.zip")
    Path(location).parent.mkdir(exist_ok=True)
    sb3.statistics(Path(location))
    error = refused(location, to=to)
    assert isinstance(error, MappingError)
    assert error.file == location
    assert followed(error, folder).status == 0
    assert {part.component for part in restore_agent("out").binding.parts} >= {"actor", "critic"}


def test_statistics_play_by_their_agent(folder: Path) -> None:
    sb3.td3_agent(folder / "agent.zip")
    sb3.statistics(folder / "vecnormalize.pkl")
    with pytest.raises(MappingError) as caught:
        restore_agent("vecnormalize.pkl")
    assert str(caught.value.hint).split() == ["ckpttool", "eval", "agent.zip"]


def test_statistics_without_an_agent_belong_to_none(folder: Path) -> None:
    sb3.statistics(folder / "vecnormalize.pkl")
    # A checkpoint that lies beside it by chance is not what it belongs to.
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}*"):
        shutil.copy(file, folder)
    shutil.copy(TF_SAMPLE.parent / "checkpoint", folder)
    error = refused("vecnormalize.pkl", to="tf")
    assert TF_SAMPLE.name not in str(error)
    assert followed(error, folder).status == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.pt", torch.optim.Adam([nn.Parameter(torch.zeros(2))]).state_dict()),
        ("sgd.pt", torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1).state_dict()),
        ("settings.pt", {"epoch": 3, "lr": 0.1}),
        ("empty.pt", {}),
    ],
)
@pytest.mark.parametrize("to", ["tf", "torch", "keras"])
def test_what_is_no_network_is_named(folder: Path, name: str, value: Any, to: str) -> None:
    torch.save(value, name)
    error = refused(name, to=to)
    assert isinstance(error, MappingError)
    assert error.file == name
    assert followed(error, folder).status == 0
    # Arrays and values are kept as they are where that is what was asked for.
    if any(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        assert convert(name, "kept.npz").written


@pytest.mark.parametrize("stem", ["actor", "model"])
def test_an_optimizer_points_to_the_network_of_its_name(folder: Path, stem: str) -> None:
    layer = nn.Linear(3, 2)
    torch.save(layer.state_dict(), f"{stem}.pt")
    torch.save(torch.optim.Adam(layer.parameters()).state_dict(), f"{stem}_optimizer.pt")
    error = refused(f"{stem}_optimizer.pt", to="tf")
    assert followed(error, folder).status == 0
    assert any(leaf.shape == (3, 2) for _, leaf in open_checkpoint("out").tree.tensors())


def test_a_part_without_a_network_is_named() -> None:
    assert isinstance(refused(str(TORCH_SAMPLE), to="tf", part="actor_optimizer"), MappingError)


# --- Targets and parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("TF", "tf"),
        ("tensor_flow", "tf"),
        ("PyTorch", "torch"),
        ("tourch", "torch"),
        ("pt", "torch"),
        ("h5", "keras"),
        ("keras3", "keras"),
        ("stable-baselines3", "sb3"),
        ("safetensor", "safetensors"),
        ("numpy", "npz"),
    ],
)
def test_an_unknown_target_names_the_one_that_is_meant(folder: Path, wrong: str, meant: str) -> None:
    error = refused(str(TORCH_SAMPLE), to=wrong)
    assert isinstance(error, UsageError)
    assert error.hint == f"--to {meant}"
    ran = in_process("convert", str(TORCH_SAMPLE), "out", *shlex.split(error.hint), cwd=folder)
    assert ran.status == 0


@pytest.mark.parametrize("target", ["out", "out.foo", "out.tar"])
def test_a_name_that_says_nothing_needs_a_target(target: str) -> None:
    error = refused(str(TORCH_SAMPLE), target)
    assert isinstance(error, UsageError)
    assert error.file == target


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("actr", "actor"), ("Critic", "critic"), ("actor.l1", "actor/l1"), ("actor/l1/weight", "actor/l1")],
)
def test_an_unknown_part_names_the_one_that_is_meant(folder: Path, wrong: str, meant: str) -> None:
    error = refused(str(TORCH_SAMPLE), to="tf", part=wrong)
    assert isinstance(error, UsageError)
    assert error.path == wrong
    assert error.hint == f"--part {meant}"
    ran = in_process("convert", str(TORCH_SAMPLE), "out", "--to", "tf", *shlex.split(error.hint), cwd=folder)
    assert ran.status == 0


# --- Folders and files -----------------------------------------------------------------------------------


def test_a_folder_without_a_checkpoint_names_what_it_holds(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("hello")
    assert isinstance(refused("empty", to="tf"), NotACheckpointError)
    error = refused("notes", to="tf")
    assert isinstance(error, NotACheckpointError)
    assert error.found == "readme.txt"


def test_a_file_of_an_unknown_tool_points_to_the_formats(folder: Path) -> None:
    Path("model.bin").write_bytes(bytes(range(128, 256)) * 20)
    error = refused("model.bin", to="tf")
    assert isinstance(error, NotACheckpointError)
    ran = in_process("formats", cwd=folder)
    assert ran.status == 0
    assert "ckpttool formats" in str(error.hint)


@pytest.mark.parametrize("level", [1, 9])
def test_a_pickle_packed_by_gzip_can_be_unpacked_as_the_hint_does(folder: Path, level: int) -> None:
    Path("my model.pkl.gz").write_bytes(gzip.compress(pickle.dumps({"a": [1.0, 2.0]}, 4), level))
    error = refused("my model.pkl.gz", to="tf")
    assert isinstance(error, NotACheckpointError)
    unpack, _, look = str(error.hint).partition("; ")
    subprocess.run(unpack, shell=True, check=True, cwd=folder)  # as a person pastes it
    assert in_process(*shlex.split(look)[1:], cwd=folder).status == 0


def test_a_lone_shard_names_the_others(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"l.weight": np.ones((2, 3), np.float32)}, "model-00001-of-00003.safetensors")
    Path("model-00003-of-00003.safetensors").write_bytes(
        Path("model-00001-of-00003.safetensors").read_bytes()
    )
    (note,) = open_checkpoint("model-00001-of-00003.safetensors").notes
    assert "model-00002-of-00003.safetensors" in note
    assert "model-00003-of-00003.safetensors" not in note
    assert note in convert("model-00001-of-00003.safetensors", "out.npz").report.notes
    # A number of shards that nobody has.
    os.rename("model-00001-of-00003.safetensors", "model-00001-of-99999.safetensors")
    assert not open_checkpoint("model-00001-of-99999.safetensors").notes


def test_a_missing_shard_is_named(folder: Path) -> None:
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}.*"):
        shutil.copy(file, folder)
    name = f"{TF_SAMPLE.name}.data-00000-of-00001"
    (folder / name).rename(folder / "elsewhere")
    for to in ("torch", "npz", "keras"):
        error = refused(TF_SAMPLE.name, to=to)
        assert isinstance(error, TruncatedError)
        assert Path(str(error.file)).name == name
        assert error.found is not None


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("to", ["torch", "npz", "keras"])
def test_a_missing_shard_of_an_index_is_named(folder: Path, suffix: str, to: str) -> None:
    names = [f"model-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    save(
        torch_tree({"a.weight": np.ones((3, 3), np.float32)}), "a.safetensors" if suffix[0] == "s" else "a.pt"
    )
    Path("a.safetensors" if suffix[0] == "s" else "a.pt").rename(names[0])
    index = Path("model.safetensors.index.json" if suffix[0] == "s" else "pytorch_model.bin.index.json")
    index.write_text(json.dumps({"weight_map": {"a.weight": names[0], "b.weight": names[1]}}))
    for path in (str(index), "."):
        error = refused(path, to=to)
        assert isinstance(error, TruncatedError)
        assert Path(str(error.file)).name == names[1]


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_missing_shard_of_a_distributed_checkpoint_is_named(folder: Path) -> None:
    from torch.distributed import checkpoint as distributed

    distributed.save({"a.weight": torch.ones(4, 3)}, checkpoint_id="saved")
    (shard,) = Path("saved").glob("*.distcp")
    shard.unlink()
    for to in ("npz", "keras"):
        error = refused("saved", to=to)
        assert isinstance(error, TruncatedError)
        assert Path(str(error.file)).name == shard.name


@pytest.mark.parametrize("to", ["tf", "keras"])
def test_parameters_of_paddle_are_not_taken_for_torchs(tmp_path: Path, to: str) -> None:
    content = {
        "linear.weight": np.zeros((3, 4), np.float32),
        "StructuredToParameterName@@": {"linear.weight": "linear_0.w_0"},
    }
    (tmp_path / "model.pdparams").write_bytes(pickle.dumps(content))
    with pytest.raises(MappingError) as caught:
        convert(str(tmp_path / "model.pdparams"), str(tmp_path / "out"), to=to)
    assert "npz" in (caught.value.hint or "")
