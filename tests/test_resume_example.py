"""examples/resume: TensorFlow, PyTorch and TensorFlow again, each going on where the other stopped."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.formats.resolve import open_checkpoint
from tests.conftest import ROOT

STEPS = 40


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.environment
def test_there_and_back(tmp_path: Path) -> None:
    for library in ("torch", "tensorflow", "gymnasium"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    small = ["--hidden", "8,8", "--batch-size", "8", "--warmup", "30", "--episodes", "1"]
    # Proofs of training have tests of their own.
    options = ["--steps", str(STEPS), "--updates", "0", "--env", "Pendulum-v1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "resume" / "there_and_back.py"), *options, *small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("6 networks read back compute what was read") == 2
    legs = re.findall(r"^(\d_\w+): step (\d+), ", done.stdout, re.MULTILINE)
    assert legs == [("1_tensorflow", "40"), ("2_torch", "80"), ("3_tensorflow", "120")]
    # Ten updates a leg after a warm-up of thirty steps: the counts went along.
    runs = tmp_path / "runs" / "resume"
    last = open_checkpoint(str(runs / "3_tensorflow" / "ckpt-120"))
    counts = {last.tree.names[p]: leaf for p, leaf in last.tree.tensors() if leaf.role == "counter"}
    made = {name: int(leaf.array()) for name, leaf in counts.items() if "save_counter" not in name}
    assert made == {
        "policy/total_it": 30,
        "policy/critic_optimizer/_iterations": 30,
        "policy/actor_optimizer/_iterations": 15,
    }
