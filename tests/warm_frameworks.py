"""Runs the product's processes of frameworks in children of a process that has the framework already.

PyTorch takes three seconds to start, and TensorFlow six. That each is a process begun anew, with its own
threads and without the user's folder, is what the tests with `own_framework_process` are about.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from ckpttool.networks import worker
from tests import warm

FRAMEWORKS = ("torch", "tensorflow")
OF_KINDS = {"keras": "tensorflow", "saved_model": "tensorflow", "torchscript": "torch"}
# What the interpreter would find: its arguments, and as many threads as its environment says.
BEFORE = """
import os, sys
sys.argv[1:] = {arguments!r}
if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
"""
WORKER = "ckpttool.networks.worker"


class Forked:
    """What worker.py asks of a `Popen`; it begins with the first line, which may tell the framework.

    Where a user's code decides, which may import either, it is a new process.
    """

    def __init__(
        self, command: Sequence[str], *, stderr: IO[bytes], env: Mapping[str, str], **how: Any
    ) -> None:
        self._command, self._env, self._how = command, env, how
        self._streams = [-1, -1, os.dup(stderr.fileno())]
        self._streams[0], writing_end = os.pipe()
        answers, self._streams[1] = os.pipe()
        self.stdin = _FirstLine(self, writing_end)
        self.stdout = open(answers, "rb")  # noqa: SIM115  # closed by worker.py
        self.returncode: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pid, self._stated = 0, None
        if (named := command[-1]) in FRAMEWORKS:
            self.begin(named)

    @property
    def started(self) -> bool:
        """Say whether the process runs or has run."""
        return not self._streams

    def begin(self, framework: str | None) -> None:
        """Begin the process: a child of the one that has the framework, or a new one."""
        streams, self._streams = self._streams, []
        if framework is None:
            names = ("stdin", "stdout", "stderr")
            passed = {**self._how, **dict(zip(names, streams, strict=True))}
            self._child = subprocess.Popen(self._command, env=self._env, **passed)
        else:
            self._pid, self._stated = warm.begin(framework, _program(self._command), self._env, streams)
        for stream in streams:
            os.close(stream)

    def wait(self, timeout: float | None = None) -> int:
        """Return the status; raise TimeoutExpired as a `Popen` does."""
        if self._child is not None:
            self.returncode = self._child.wait(timeout)
        elif self._stated is not None and self.returncode is None:
            if timeout is not None and not select.select([self._stated], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout)
            self.returncode = int(self._stated.readline())
            self._stated.close()
        elif self.returncode is None:
            self._forget(0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill the process."""
        if self._child is not None:
            self._child.kill()
        elif self._stated is None:
            self._forget(-signal.SIGKILL)
        elif self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _forget(self, status: int) -> None:
        """End what has not begun."""
        for stream in self._streams:
            os.close(stream)
        self._streams, self.returncode = [], status


class _FirstLine:
    """The pipe to a process, which is begun with what the first line asks for."""

    def __init__(self, process: Forked, inputs: int) -> None:
        self._process = process
        self._pipe = open(inputs, "wb")  # noqa: SIM115  # closed by worker.py

    def write(self, line: bytes) -> None:
        if not self._process.started:
            self._process.begin(OF_KINDS.get(json.loads(line).get("kind")))
        self._pipe.write(line)

    def flush(self) -> None:
        self._pipe.flush()

    def close(self) -> None:
        self._pipe.close()


def _program(command: Sequence[str]) -> str:
    """Return the program of a command of worker.py, to be run in a process that runs already."""
    if WORKER in command:
        arguments = command[command.index(WORKER) + 1 :]
        # Without the folder that it runs in, as the interpreter's -P has it.
        program = f"sys.path[:] = filter(None, sys.path); from {WORKER} import main; main(*sys.argv[1:])"
    else:
        at = command.index("-c")
        program, *arguments = command[at + 1 :]
    return BEFORE.format(arguments=list(arguments)) + program


def _start_process(command: Sequence[str], **how: Any) -> Any:
    """Begin a process: a fork where this interpreter is to run a framework or a model."""
    forks = command[0] == sys.executable and ("-c" in command or command[-1] in FRAMEWORKS)
    return (Forked if forks else subprocess.Popen)(command, **how)


FORKING = types.SimpleNamespace(
    Popen=_start_process, **{name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
)


@contextlib.contextmanager
def forked_frameworks() -> Iterator[None]:
    """Fork the processes that run a framework."""
    with pytest.MonkeyPatch.context() as patch:
        if Path("/proc/self/fd").is_dir():
            patch.setattr(worker, "subprocess", FORKING)
        yield


@pytest.fixture(scope="module")
def own_framework_process() -> Iterator[None]:
    """Begin a new process for each framework, for the tests of a module on what that process may do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "subprocess", subprocess)
        yield
