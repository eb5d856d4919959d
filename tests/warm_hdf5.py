"""Lists HDF5 files in children of a process that has h5py already, instead of in processes begun anew.

A new one takes a quarter of a second, nearly all of it to import h5py. That a listing has a process of its
own, its environment and its time limit are what the tests with `own_hdf5_process` are about.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats import hdf5
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
        self.returncode, output = warm.run("tests.started_hdf5", before + start, Path("/"), env)
        self.stdout = io.BytesIO(output.encode())

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        """It has ended."""

    def kill(self) -> None:
        """It has ended."""


FORKING = types.SimpleNamespace(
    Popen=Forked, **{name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
)


@contextlib.contextmanager
def forked_hdf5() -> Iterator[None]:
    """Fork the processes that list HDF5 files."""
    with pytest.MonkeyPatch.context() as patch:
        if Path("/proc/self/fd").is_dir():
            patch.setattr(hdf5, "subprocess", FORKING)
        yield


@pytest.fixture
def own_hdf5_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a new process for each listing, for a test of what that process may do."""
    monkeypatch.setattr(hdf5, "subprocess", subprocess)
