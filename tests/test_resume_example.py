"""examples/resume: TensorFlow, PyTorch and TensorFlow again, each going on where the other stopped."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats import open_checkpoint
from tests import warm
from tests.conftest import ROOT, in_process

STEPS = 40
# What `python FILE` does.
PROGRAM = """
import runpy, sys
sys.argv = {arguments!r}
sys.path.insert(0, {folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Do as subprocess.run does, where the framework that is asked for has been imported already."""
    python, *arguments = command
    assert python == sys.executable
    if arguments[:2] == ["-m", "ckpttool"]:
        ran = in_process(*arguments[2:])
        status, output = ran.status, ran.out + ran.err
    else:
        program = PROGRAM.format(arguments=arguments, folder=str(Path(arguments[0]).parent))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        framework = arguments[arguments.index("--backend") + 1]
        status, output = warm.run(framework, program, Path.cwd(), environment)
    sys.stdout.write(output)
    return subprocess.CompletedProcess(command, status)


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.environment
def test_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "tensorflow", "gymnasium"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    small = ["--hidden", "8,8", "--batch-size", "8", "--warmup", "30", "--episodes", "1"]
    # Proofs of training have tests of their own.
    options = ["--steps", str(STEPS), "--updates", "0", "--env", "Pendulum-v1"]
    main = runpy.run_path(str(ROOT / "examples" / "resume" / "there_and_back.py"))["main"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["there_and_back.py", *options, *small])
    monkeypatch.setitem(main.__globals__, "subprocess", types.SimpleNamespace(run=run))
    status, printed = main(), capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("6 networks") == 2, printed
    legs = re.findall(r"^(\d_\w+): step (\d+), ", printed, re.MULTILINE)
    assert legs == [("1_tensorflow", "40"), ("2_torch", "80"), ("3_tensorflow", "120")]
    # Ten updates a leg after a warm-up of thirty steps: the counts went along.
    runs = tmp_path / "runs" / "resume"
    last = open_checkpoint(str(runs / "3_tensorflow" / "ckpt-120"))
    counts = {last.tree.names[p]: leaf for p, leaf in last.tree.tensors() if leaf.role == "counter"}
    counters = {name: int(leaf.array()) for name, leaf in counts.items() if "save_counter" not in name}
    assert counters == {
        "policy/total_it": 30,
        "policy/critic_optimizer/_iterations": 30,
        "policy/actor_optimizer/_iterations": 15,
    }
