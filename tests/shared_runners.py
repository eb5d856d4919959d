"""Sides of a comparison by `verify` without a process each, whose start takes most of the time.

`InThisProcess` runs a side in the calling process. Within `shared_runners`, a side is served by one process
for each framework, each side with a session of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ckpttool.networks import model_runner
from ckpttool.networks.messages import Message, message_pipes, serve
from ckpttool.networks.worker import MODEL_TIMEOUT_S, ChildProcess
from ckpttool.verification import two_models

_PROGRAM = (
    "-c",
    "import sys; sys.path[:] = [p for p in sys.path if p]; from tests.shared_runners import main; main()",
)
TENSORFLOW = ("keras", "saved_model")


class InThisProcess:
    """What ModelProcess does for a model, without a process; data are encoded as there."""

    folder: Path
    last: InThisProcess

    def __init__(self, *_: object, **__: object) -> None:
        InThisProcess.last = self

    def __enter__(self) -> InThisProcess:
        self._holder = tempfile.TemporaryDirectory(prefix="side")
        self.folder = Path(self._holder.name)
        self.session = model_runner.ModelSession(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.cleanup()

    def begin(self, do: str, **values: Any) -> None:
        """Do nothing: `request` answers."""

    def request(self, do: str, **values: Any) -> dict[str, Any]:
        """Answer as the process would."""
        copy = json.loads(json.dumps(values))
        return dict(json.loads(json.dumps(model_runner.HANDLERS[do](self.session, **copy))))


class SharedRunners:
    """The processes by name, and a folder for each session."""

    def __init__(self, framework_of: Callable[[str], str]) -> None:
        self._framework_of = framework_of
        self._processes: dict[str, ChildProcess] = {}
        self._root = Path(tempfile.mkdtemp(prefix="runners"))
        self._numbers = itertools.count()

    def folder(self) -> Path:
        """Return a new folder."""
        folder = self._root / str(next(self._numbers))
        folder.mkdir()
        return folder

    def find(self, message: dict[str, Any]) -> ChildProcess:
        """Return the process for a side, by its request `open`."""
        if message["kind"] == "factory":
            name = self._framework_of(message["factory"])
        else:
            name = "tensorflow" if message["kind"] in TENSORFLOW else "torch"
        if name not in self._processes:
            process = ChildProcess(
                f"{name} process", _PROGRAM, [name], python=_python(), timeout=MODEL_TIMEOUT_S, threads=None
            )
            process.start()
            self._processes[name] = process
        return self._processes[name]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.stop(b'{"id": 0, "do": "close", "folder": ""}\n')
        shutil.rmtree(self._root)


def _python() -> str:
    import sys

    return sys.executable


@contextlib.contextmanager
def shared_runners(framework_of: Callable[[str], str]) -> Iterator[None]:
    """Serve all sides by shared processes; `framework_of` names the framework of a factory."""
    runners = SharedRunners(framework_of)

    class Side:
        """What ModelProcess does, in a session of a shared process."""

        def __init__(self, *_: object, **__: object) -> None:
            self.folder = runners.folder()
            # The first request names the framework.
            self._process: ChildProcess | None = None

        def __enter__(self) -> Side:
            return self

        def __exit__(self, *_: object) -> None:
            if self._process is not None:
                self._process.request("forget", folder=str(self.folder))
            shutil.rmtree(self.folder)

        def begin(self, do: str, **values: Any) -> None:
            """Do nothing: `request` answers, and both sides may have one process."""

        def request(self, do: str, **values: Any) -> Message:
            """Send one request to the session."""
            if self._process is None:
                self._process = runners.find(values)
            return self._process.request(do, **values, folder=str(self.folder))

    try:
        with mock.patch.object(two_models, "ModelProcess", Side):
            yield
    finally:
        runners.close()


# The program of the processes.


def _forget(sessions: dict[str, Any], folder: str) -> Message:
    sessions.pop(folder, None)
    return {}


def _served(do: str) -> Callable[..., Message]:
    def handler(sessions: dict[str, Any], folder: str, **values: Any) -> Message:
        if folder not in sessions:
            sessions[folder] = model_runner.ModelSession(Path(folder))
        return model_runner.HANDLERS[do](sessions[folder], **values)

    return handler


def main() -> None:
    """Serve the sessions of one framework."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    handlers = {do: _served(do) for do in model_runner.HANDLERS}
    with message_pipes() as (requests, answers):
        serve({}, {**handlers, "forget": _forget}, requests, answers)
