"""The promises of every format, as one class that each format's tests inherit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool.conversion.write import save
from ckpttool.core import Leaf, Tree, key
from ckpttool.formats import tf_bundle, torch_zip
from ckpttool.formats.torch_zip import PYTORCH_SET
from ckpttool.testing.formats import MIB, Megabyte, WritingContract
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.test_layouts import fujimoto_set
from tests.trees import torch_tree


def test_an_archive_is_listed_once_to_find_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.encodings import archives
    from ckpttool.formats import resolve

    listed, read = [], archives.read_zip
    monkeypatch.setattr(archives, "read_zip", lambda file, *more: listed.append(file) or read(file, *more))
    assert resolve(str(TORCH_SAMPLE)).format is torch_zip
    assert len(listed) == 1


class TestTensorBundle(WritingContract):
    module = tf_bundle

    def make(self, folder: Path) -> str:
        for end in (".index", ".data-00000-of-00001"):
            shutil.copy(f"{TF_SAMPLE}{end}", folder)
        return str(folder / TF_SAMPLE.name)


class TestPytorch(WritingContract):
    module = torch_zip

    def make(self, folder: Path) -> str:
        shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
        return str(folder / "agent.pt")


class TestPytorchSet(WritingContract):
    module = PYTORCH_SET

    def make(self, folder: Path) -> str:
        entries = fujimoto_set()
        for member in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
            mine = {n.removeprefix(f"{member}/"): v for n, v in entries.items() if n.startswith(f"{member}/")}
            save(torch_tree(mine), str(folder / f"TD3_Env_0_{member}"), "torch")  # type: ignore[arg-type]
        return str(folder / "TD3_Env_0")

    def large(self) -> Tree:
        """Its trees are those of agents: forty megabytes of the networks' own files."""
        places = [(key(member), key(f"w{n}")) for member in ("actor", "critic") for n in range(20)]
        return Tree({p: Leaf("uint8", (MIB,), Megabyte(n), f"w{n}") for n, p in enumerate(places)})
