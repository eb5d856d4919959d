"""The core commands on a simulated Windows (tests/windows.py): the same output and the same files as here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, command_loop

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are listed by /proc")

# In one process and one folder, one after the other.
LINES = [
    "inspect tf/ckpt-15000",
    "inspect torch/ckpt-15000.pt --json",
    "digest tf/ckpt-15000 --json",
    "digest torch/ckpt-15000.pt",
    "stats tf/ckpt-15000",
    "stats torch/ckpt-15000.pt --json",
    "diff tf/ckpt-15000 torch/ckpt-15000.pt",
    "diff torch/ckpt-12500.pt torch/ckpt-15000.pt --json",
    "convert tf/ckpt-15000 agent.pt",
    "convert torch/ckpt-15000.pt back-1 --to tf",
    "convert agent.pt agent.h5 --to keras",
    "convert tf/ckpt-15000 agent.npz",
    "convert agent.npz agent.safetensors",
    "convert agent.h5 again.pt",
    "convert torch/ckpt-12500.pt agent.pt",
    "convert torch/ckpt-12500.pt agent.pt --force",
    "convert torch/ckpt-12500.pt back-1 --to tf --force",
    "diff torch/ckpt-12500.pt back-1",
    "inspect agent.h5",
    "digest agent.safetensors",
    "stats chunked.h5",
    "digest chunked.h5",
    "diff agent.pt agent.h5",
    "inspect zip://agent.h5::members.zip",
    "stats zip://agent.pt::members.zip",
    "diff tf/ckpt-10000 tf/missing",
    "inspect tf",
    "convert missing.pt x.npz",
]
# One of each command and format, with all that a later one of these reads.
FEW = [
    "inspect torch/ckpt-15000.pt --json",
    "digest tf/ckpt-15000 --json",
    "stats tf/ckpt-15000",
    "convert tf/ckpt-15000 agent.pt",
    "convert torch/ckpt-15000.pt back-1 --to tf",
    "convert agent.pt agent.h5 --to keras",
    "convert tf/ckpt-15000 agent.npz",
    "convert agent.npz agent.safetensors",
    "convert torch/ckpt-12500.pt agent.pt",
    "convert torch/ckpt-12500.pt agent.pt --force",
    "convert torch/ckpt-12500.pt back-1 --to tf --force",
    "inspect agent.h5",
    "stats chunked.h5",
    "diff agent.pt agent.h5",
    "stats zip://agent.pt::members.zip",
    "diff tf/ckpt-10000 tf/missing",
    "convert missing.pt x.npz",
]
FAIL = [
    "convert torch/ckpt-12500.pt agent.pt",
    "diff tf/ckpt-10000 tf/missing",
    "convert missing.pt x.npz",
]
SETUP = {"here": "", "windows": "import threading\nfrom tests import windows\nwindows.simulate()"}


def run(folder: Path, program: str, inputs: Any) -> Any:
    temporary = folder.with_name(f"{folder.name}-tmp")
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(inputs),
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fill(folder: Path) -> None:
    """Make a folder with the samples, and with files of the kinds that need a child process or a copy."""
    shutil.copytree(Path(TF_SAMPLE).parent, folder / "tf", copy_function=shutil.copy2)
    shutil.copytree(Path(TORCH_SAMPLE).parent, folder / "torch", copy_function=shutil.copy2)
    with h5py.File(folder / "chunked.h5", "w", track_order=True) as file:
        values = np.arange(4096, dtype="f4").reshape(64, 64)
        file.create_dataset("layer/kernel", data=values, chunks=(16, 16), compression="gzip")


def archive(folder: Path) -> None:
    import zipfile

    with zipfile.ZipFile(folder / "members.zip", "w", zipfile.ZIP_DEFLATED) as members:
        for name in ("agent.h5", "agent.pt"):
            info = zipfile.ZipInfo(name, (2024, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            members.writestr(info, (folder / name).read_bytes())


def content(folder: Path) -> dict[str, str]:
    """Return digests of files; without hard links the parts of a replaced bundle have other names."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith("back-1.")
    }


NOTE = r"\n?note: the HDF5 library ran without protection.*?(?=\n\S|\Z)"


def without_notes_on_sandbox(answer: list[Any]) -> list[Any]:
    """Return the answer without the note that only a system without a sandbox has."""
    texts = [re.sub(NOTE, "", part, flags=re.DOTALL) if isinstance(part, str) else part for part in answer]
    return [part.rstrip("\n") if isinstance(part, str) else part for part in texts]


@pytest.mark.parametrize("lines", [FEW, pytest.param(LINES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_the_core_commands_give_the_same_results_and_files(tmp_path: Path, lines: list[str]) -> None:
    first = next(at for at, line in enumerate(lines) if "zip://" in line)
    outcomes: dict[str, Any] = {}
    fill(tmp_path / "samples")
    for platform in ("here", "windows"):
        folder = tmp_path / platform
        shutil.copytree(tmp_path / "samples", folder)
        program = command_loop(SETUP[platform])
        answers, _ = run(folder, program, lines[:first])
        assert (folder / "agent.h5").exists(), answers
        archive(folder)
        answers += run(folder, program, lines[first:])[0]
        outcomes[platform] = (answers, content(folder))
    for line, here, there in zip(lines, outcomes["here"][0], outcomes["windows"][0], strict=True):
        assert without_notes_on_sandbox(there) == without_notes_on_sandbox(here), line
    failed = [line for line, (status, _, _) in zip(lines, outcomes["here"][0], strict=True) if status == 2]
    assert failed == FAIL
    assert outcomes["windows"][1] == outcomes["here"][1]


# Locks, and what open files prevent: one process, whose second descriptor stands for another program.
WRITES = """
import json, os
from tests import windows
windows.simulate()
from ckpttool.core import atomic_write, filesystem
from ckpttool.core.errors import TargetExistsError, UsageError

def outcome(call):
    try:
        call()
    except (TargetExistsError, UsageError) as error:
        return type(error).__name__

def replace_open_file():
    with open("target", "rb"):
        atomic_write.write_file("target", b"new", force=True)

def take_two_locks():
    with atomic_write.lock_folders(["."]), atomic_write.lock_folders(["."]):
        pass

def create_twice():
    appear = lambda stream: open("race", "wb").close()
    atomic_write.write_atomically([atomic_write.Output("race", appear)])

filesystem._BUSY_S = atomic_write._LOCKED_S = 0.1
atomic_write.write_file("target", b"old")
found = [outcome(replace_open_file), open("target").read(), outcome(take_two_locks), outcome(create_twice)]
atomic_write.write_file("target", b"new", force=True)
print(json.dumps([*found, open("target").read(), sorted(os.listdir())]))
"""


def test_open_files_locks_and_races(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    outcomes = run(folder, WRITES, None)
    assert outcomes == ["UsageError", "old", "UsageError", "TargetExistsError", "new", ["race", "target"]]
