"""The rows of the libraries: no row excludes a tree that its library recognises, and most import nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import Checkpoint, CkpttoolError, Plugin, display, plugins
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import may_recognize
from tests.conftest import CORPUS, ROOT, TF_SAMPLE, TORCH_SAMPLE
from tests.library_rows import recognised, require_no_difference
from tests.test_layouts import torch_agent


@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE], ids=lambda path: path.parent.name)
def test_samples(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_no_difference(open_checkpoint(str(sample)).tree, sample.name, monkeypatch)


def checkpoints(folder: Path) -> Iterator[Checkpoint]:
    for path in sorted(folder.rglob("*")):
        try:
            yield open_checkpoint(str(path))
        except CkpttoolError:
            continue


@pytest.mark.corpus
def test_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = set()
    for checkpoint in checkpoints(CORPUS):
        name = os.path.basename(checkpoint.path)
        if len(checkpoint.tree) < 2_000:
            require_no_difference(checkpoint.tree, name, monkeypatch)
            layouts.add(recognised(checkpoint.tree, name))
    assert len(layouts) > 2


def test_every_library_of_ours_has_a_row_with_a_pattern() -> None:
    assert not [row.name for row in plugins.BUILT_IN["layouts"] if not row.names and not row.files]


def test_a_row_without_a_pattern_is_asked_about_every_tree() -> None:
    assert may_recognize(Plugin("other", "another_package.agents"), (), "agent")


def test_most_trees_pass_few_rows() -> None:
    rows = plugins.BUILT_IN["layouts"]
    model = ["features/0/weight", "features/0/bias", "classifier/weight", "classifier/bias"]
    assert not [row.name for row in rows if may_recognize(row, model, "model.safetensors")]
    agent = list(map(display, torch_agent(["l1", "l2", "l3"])))
    passed = [row.name for row in rows if may_recognize(row, agent, "agent.pt")]
    assert passed == ["td3_torch", "fujimoto"]


def test_looking_at_a_model_imports_no_library(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", **{"layer.weight": np.ones((2, 3), np.float32)})
    program = (
        "import sys\n"
        "from ckpttool.formats.detect import open_checkpoint\n"
        "from ckpttool.libraries.recognize import recognize_checkpoint\n"
        f"assert recognize_checkpoint(open_checkpoint({str(tmp_path / 'model.npz')!r})) is None\n"
        "from ckpttool.core.plugins import BUILT_IN\n"
        "theirs = {row.module.partition(':')[0] for row in BUILT_IN['layouts']}\n"
        "print(sorted(theirs & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
