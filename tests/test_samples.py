"""The samples: real, certified, small, and described by sidecars that are their own."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from ckpttool.commands.digest import digest
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests.conftest import ROOT, SAMPLES

FOLDERS = ["td3_pendulum_tf", "td3_pendulum_torch"]


def certificate(folder: str) -> dict[str, object]:
    certificate: dict[str, object] = json.loads((SAMPLES / folder / "CERTIFICATE.json").read_text())
    return certificate


def checkpoints(folder: str) -> list[Path]:
    listed = certificate(folder)["checkpoints"]
    assert isinstance(listed, list)
    return [SAMPLES / folder / row["name"] for row in listed]


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) < 6_000_000


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_those_of_the_certificate(folder: str) -> None:
    listed = certificate(folder)["checkpoints"]
    assert isinstance(listed, list)
    assert len(listed) >= 5
    for row in listed:
        for name, facts in row["files"].items():
            content = (SAMPLES / folder / name).read_bytes()
            assert len(content) == facts["nbytes"]
            assert hashlib.sha256(content).hexdigest() == facts["sha256"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_certificate_says_what_it_must(folder: str) -> None:
    record = certificate(folder)
    assert {"script", "arguments", "seed", "versions", "env", "hidden", "checkpoints", "final"} <= set(record)
    final = record["final"]
    assert isinstance(final, dict)
    returns = final["returns"]
    assert len(returns) == 100
    assert sum(returns) / 100 >= -200
    text = json.dumps(record)
    assert "/root" not in text
    assert "/tmp" not in text


def test_the_licence_and_the_commands_that_made_them_lie_beside_them() -> None:
    note = (SAMPLES / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"SPDX-License-Identifier: {project['license']}\n" in note
    commands = [shlex.split(block) for block in re.findall(r"```sh\n(.*?)```", note, re.DOTALL)]
    words = [word for command in commands for word in command if word.strip()]
    for folder in FOLDERS:
        row = certificate(folder)
        arguments = row["arguments"]
        assert isinstance(arguments, list)
        # All but the folder that the checkpoints are written to.
        start = words.index(row["script"], words.index("tensorflow") if folder.endswith("torch") else 0) + 1
        assert words[start : start + len(arguments) - 1] == arguments[:-1]
    assert {path.name for path in SAMPLES.iterdir() if path.is_dir()} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_checkpoint_has_a_sidecar_of_its_own(folder: str) -> None:
    for path in checkpoints(folder):
        agent = restore_agent(str(path))
        assert agent.sidecar is not None, agent.notes
        assert agent.sidecar.target_sha256 == digest(str(path)).sha256
        assert agent.sidecar.env == {"id": "Pendulum-v1", "gymnasium": "1.4.0"}
        assert agent.sidecar.activations == ["relu", "relu"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_learning_curve_can_be_drawn(folder: str) -> None:
    listed = certificate(folder)["checkpoints"]
    assert isinstance(listed, list)
    means = [row["mean"] for row in sorted(listed, key=lambda row: int(row["step"]))]
    assert means[0] < -1000
    assert means[-1] > -200


def test_both_backends_made_the_same_agent() -> None:
    trees = [open_checkpoint(str(checkpoints(folder)[-1])).tree for folder in FOLDERS]
    bindings = [restore_agent(str(checkpoints(folder)[-1])) for folder in FOLDERS]
    one, other = (dict(agent.tree.tensors()) for agent in bindings)
    networks = [path for path in one if "optimizer" not in str(path[0].value) and len(path) > 1]
    assert len(networks) == 36
    assert all(one[path].shape == other[path].shape for path in networks)
    assert bindings[0].binding.parts == bindings[1].binding.parts
    assert len(trees[0]) != len(trees[1])
