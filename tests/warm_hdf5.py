"""Lists HDF5 files in children of a process that has h5py already, instead of in processes begun anew.

For tests that list one damaged file after the other. That a listing has a process of its own, its environment
and its time limit are what other tests of test_hdf5.py are about.
"""

from __future__ import annotations

import io
import os
import subprocess
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats.hdf5 import process
from tests import warm

# What a new process would find: its arguments, no standard error, and the file under its number.
BEFORE = """
import os, sys
sys.argv[1:] = {arguments!r}
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.dup2(os.open({file!r}, os.O_RDONLY), {descriptor})
"""


class Forked:
    """What process.py asks of a `Popen`: it has run to its end when it has been made."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int], **_: Any
    ) -> None:
        start, *arguments = command[4:]
        (descriptor,) = pass_fds
        before = BEFORE.format(
            arguments=arguments, file=f"/proc/{os.getpid()}/fd/{descriptor}", descriptor=descriptor
        )
        self.returncode, output = warm.run("h5py", before + start, Path("/"), env)
        self.stdout = io.BytesIO(output.encode())

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        """It has ended."""

    def kill(self) -> None:
        """It has ended."""


@pytest.fixture(scope="class")
def started_hdf5() -> Iterator[None]:
    """Fork the processes that list HDF5 files, for the tests of a class or for one test outside of any."""
    if not Path("/proc/self/fd").is_dir():
        yield
        return
    forking = types.SimpleNamespace(
        Popen=Forked, **{name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", forking)
        yield
