"""Below a tracer of system calls: what the kernel is asked for while commands look at hostile files."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TF_SAMPLE
from tests.hostile import watched
from tests.hostile.case import BAIT
from tests.hostile.watched import Call
from tests.test_hostile import CASES


def _traceable() -> bool:
    strace = shutil.which("strace")
    return strace is not None and subprocess.run([strace, "-qq", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _traceable(), reason="strace is not installed, or may not trace")
BY_NAME = {case.name: case for case in CASES}
# A sidecar that names a module, a zip with code in its pickle, a library with a process of its own.
HDF5 = ("hdf5-external-storage", "hdf5-external-link", "hdf5-virtual")
NAMES = ("beside-env-module", *HDF5)


def outside(calls: list[Call], *homes: Path) -> list[Call]:
    """Return the calls that touched more than Python's own files, devices, and what lies in the folders."""
    own = tuple(map(str, (*homes, "/dev/null", "/dev/tty")))
    return [call for call in calls if call.changes and not all(path.startswith(own) for path in call.paths)]


@pytest.mark.parametrize("name", NAMES)
def test_looking_changes_nothing_and_asks_nobody(name: str, tmp_path: Path) -> None:
    home = tmp_path / "case"
    home.mkdir()
    (tmp_path / BAIT).write_bytes(b"\x11" * 4096)
    path = BY_NAME[name].make(home)
    for words in (("inspect", path, "--json"), ("digest", path)):
        status, calls = watched.traced(*words, folder=home)
        assert status in (0, 1, 2)
        assert [call for call in calls if str(path) in call.paths], "nothing was traced"
        assert outside(calls) == []
        started = {os.path.basename(call.paths[0]) for call in calls if call.name == "execve"}
        # h5py, when it is imported, asks for the processor's name.
        assert all(program.startswith("python") for program in started - {"uname"})
        assert not any(BAIT in path for call in calls for path in call.paths)


def test_a_conversion_changes_the_folder_of_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    status, calls = watched.traced("convert", TF_SAMPLE, tmp_path / "out" / "agent.pt", folder=tmp_path)
    assert status == 0
    assert [call for call in calls if call.changes]
    assert outside(calls, tmp_path / "out") == []
