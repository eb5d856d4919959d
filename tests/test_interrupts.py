"""Ctrl-C at every step of a start: status 130 and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpttool.cli import app
from tests.conftest import ROOT, TORCH_SAMPLE

SCRIPT = "import sys\nfrom ckpttool.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
# Python imports this before the program. It sends the signal at an import or another step that Python audits,
# counted from one of the first of ckpttool: a number is the same place in each run.
HOOK = """
import os, signal, sys

def hook(event, arguments, left=[None, int(os.environ["STEP"])]):
    if event == "import" and arguments[0] == "ckpttool.version" and left[0] is None:
        left[0] = True
    if left[0] and event in ("import", "open", "os.listdir", "os.scandir"):
        left[1] -= 1
        if left[1] == 0:
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
"""
STARTS = ("script", "-m")


def interrupted(start: str, step: int, folder: Path) -> tuple[int, int, str, str]:
    """Return the step, and the status, output and messages of a command that is interrupted there."""
    words = [str(folder / "ckpttool")] if start == "script" else ["-m", "ckpttool"]
    done = subprocess.run(
        [sys.executable, *words, "inspect", str(TORCH_SAMPLE)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'hook'}:{ROOT}", "STEP": str(step)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return step, done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    (tmp_path / "ckpttool").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("every", [60, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupt_ends_a_start_without_a_traceback(folder: Path, start: str, every: int) -> None:
    whole = interrupted(start, 1 << 30, folder)
    assert whole[1] == 0, whole
    steps = (1, 2, 4, 8, 16, 32, *range(64, 400, every))
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(lambda step: interrupted(start, step, folder), steps))
    ended = [outcome for outcome in outcomes if outcome[1] != 0]
    assert len(ended) > len(outcomes) // 2  # the others come after the last step
    for step, status, out, err in ended:
        assert status == 130, (step, status, err)
        assert "Traceback" not in err, (step, err)
        assert err in ("", "ckpttool: interrupted\n"), (step, err)
        assert whole[2].startswith(out), step


def test_an_interrupted_command_has_the_status_of_a_signal() -> None:
    assert app._exit_status(KeyboardInterrupt(), as_json=False) == 130
