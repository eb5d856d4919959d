"""The toys of docs/architecture.md: its format, library and backend keep their contracts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import Tree
from ckpttool.testing.backends import BackendContract
from ckpttool.testing.formats import WritingContract
from ckpttool.testing.layouts import LayoutContract
from docs.blocks import DOCS, blocks
from docs.screens import Folder
from tests.conftest import ROOT
from tests.conftest import ckpttool as run
from tests.test_layouts import adam_state
from tests.trees import torch_dense, torch_tree

TOYS = ("crate", "toylab", "einsum")


@pytest.fixture(scope="module", autouse=True)
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the page's files as a package of somebody else."""
    folder = Folder(tmp_path_factory.mktemp("toys"))
    for block in blocks(DOCS / "architecture.md"):
        if "file" in block.notes:
            folder.write(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.path)
        yield folder.path
    for name in TOYS:
        sys.modules.pop(name, None)


def toylab_agent() -> Tree:
    generator = np.random.default_rng(0)
    entries: dict[str, Any] = {"updates": 9}
    for name, inputs, outputs in (("brain", 3, 2), ("judge", 5, 1)):
        first = torch_dense(generator, "first", inputs, 8)
        weights = {**first, **torch_dense(generator, "last", 8, outputs)}
        entries |= {f"{name}/{path}": array for path, array in weights.items()}
        entries |= {f"{name}_adam/{path}": value for path, value in adam_state(weights).items()}
    return torch_tree(entries)


class TestCrate(WritingContract):
    @property
    def module(self) -> Any:  # type: ignore[override]  # importable once the toys are installed
        return importlib.import_module("crate")

    def make(self, folder: Path) -> str:
        arrays = {f"w{n}": np.arange(n + 1, dtype=np.float32) for n in range(6)}
        return self.put(torch_tree(arrays), folder / "toy.crate")


class TestToylab(LayoutContract):
    name = "toylab"

    @pytest.fixture
    def tree(self) -> Tree:
        return toylab_agent()


class TestEinsum(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return importlib.import_module("einsum")


def test_the_command_line_lists_and_uses_them(tmp_path: Path, toys: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{toys}"}
    tensors = Tree(dict(toylab_agent().tensors()))
    with open(tmp_path / "agent.crate", "wb") as stream:
        importlib.import_module("crate").pieces(tensors)[0].write(stream)
    found = run("inspect", tmp_path / "agent.crate", "--json", env=environment).json()
    assert (found["format"], found["layout"]) == ("crate", "toylab")
    for command, toy in (("formats", "crate"), ("layouts", "toylab"), ("backends", "einsum")):
        rows = run(command, "--json", env=environment).json()[command]
        assert toy in [row["name"] for row in rows]
