"""Fixtures that all tests share: the samples, the corpus, and the command run as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "sample_ckpts"
CORPUS = ROOT.parent / "shared" / "corpus"

TF_SAMPLE = SAMPLES / "td3_pendulum_tf" / "ckpt-15000"
TORCH_SAMPLE = SAMPLES / "td3_pendulum_torch" / "ckpt-15000.pt"


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the document on stdout."""
        return json.loads(self.out)


def ckpttool(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Ran:
    """Run the command line in a process of its own, without a terminal."""
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    # A source checkout is enough: the package need not be installed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **(env or {})}
    done = subprocess.run(command, capture_output=True, cwd=cwd, env=environment, timeout=300, check=False)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(ran: Ran) -> str:
    """Assert that a command refused bad input as it should; return its sentence."""
    assert ran.status == 2, (ran.out, ran.err)
    lines = ran.err.strip().splitlines()
    assert lines, "nothing was said"
    assert lines[0].startswith("ckpttool: ")
    assert len(lines) <= 2, ran.err
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert "Traceback" not in ran.err
    assert "unexpected" not in lines[0], ran.err
    assert ran.err.replace("\n", "").isprintable()
    assert not ran.out
    return lines[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs the shared corpus of real checkpoints where that is absent."""
    if item.get_closest_marker("corpus") and not CORPUS.is_dir():
        pytest.skip("the shared corpus is not beside the project")


@pytest.fixture
def corpus() -> Path:
    """The shared corpus of real checkpoints; the test is skipped where it is absent."""
    if not CORPUS.is_dir():
        pytest.skip("the shared corpus is not beside the project")
    return CORPUS
