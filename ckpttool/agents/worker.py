"""The worker: a process of its own for one framework, and the one protocol that serves them all.

Messages are lines of JSON over pipes, answered in order: `{"id", "do", ...}` by `{"id", "ok"}` or
`{"id", "error"}`. Arrays lie as .npy files in a folder that parent and worker share. A new kind of
request is a row in HANDLERS. This module runs as the worker's program and imports no framework.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

import numpy as np

from ckpttool import plugins
from ckpttool.agents import serial
from ckpttool.agents.execute import dtype_of
from ckpttool.agents.network import Network
from ckpttool.agents.policy import Observation, Policy, State
from ckpttool.agents.process import Process
from ckpttool.errors import CkpttoolError, WorkerError

Message = dict[str, Any]
FACTS = ("message", "file", "path", "offset", "expected", "found", "hint")
TIMEOUT_S = 120.0


# The parent's side.


class Worker:
    """A backend in its own process; a context manager that ends the process and removes the folder.

    `python` may be another environment's interpreter (3.11 or newer, with numpy). No request waits longer
    than `timeout` seconds. `threads` limits how many threads the framework computes with.
    """

    def __init__(
        self,
        backend: str,
        python: str = sys.executable,
        *,
        timeout: float = TIMEOUT_S,
        threads: int | None = None,
    ) -> None:
        self.NAME = backend
        self._process = Process(
            f"{backend} worker",
            "ckpttool.agents.worker",
            [backend],
            python=python,
            timeout=timeout,
            threads=threads,
        )
        self._requests = 0

    def __enter__(self) -> Worker:
        self._process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        # After an error or Ctrl-C the worker may be deep in a computation: nobody waits for it.
        self._process.stop(b'{"id": 0, "do": "close"}\n' if kind is None else None)

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that compute, and of the worker's Python."""
        return dict(self.request("hello")["versions"])

    def build(self, network: Network, device: str = "cpu") -> WorkerPolicy:
        """Put the network on the worker's device."""
        dtype_of(network)  # what no backend computes is said before anything is written
        with open(self.folder / "network.npz", "wb") as file:
            document = serial.write(network, file)
        built = self.request("build", network=document, device=device)
        return WorkerPolicy(self, int(built["policy"]), str(built["device"]))

    @property
    def folder(self) -> Path:
        """Where arrays are exchanged while the worker runs."""
        return self._process.folder

    def request(self, do: str, **values: Any) -> Message:
        """Send one request and return its answer; raise the worker's error as if it had happened here."""
        self._requests += 1
        self._process.send(_line({"id": self._requests, "do": do, **values}))
        answer = json.loads(self._process.receive())
        while answer["id"] != self._requests:
            # The answer to a request that Ctrl-C took the caller away from.
            answer = json.loads(self._process.receive())
        if "error" in answer:
            raise _error(answer["error"])
        return dict(answer["ok"])


class WorkerPolicy:
    """A policy that lives in a worker; it ends with the worker."""

    def __init__(self, worker: Worker, number: int, device: str) -> None:
        self.device = device
        self._worker = worker
        self._number = number

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        names = None if isinstance(obs, np.ndarray) else list(obs)
        given = [obs] if isinstance(obs, np.ndarray) else list(obs.values())
        _save(self._worker.folder, "given", [*given, *state])
        answer = self._worker.request("step", policy=self._number, names=names, states=len(state))
        action, *after = _load(self._worker.folder, "found", int(answer["arrays"]))
        return action, tuple(after)


def _error(facts: Message) -> CkpttoolError:
    kinds = {kind.kind: kind for kind in _family(CkpttoolError)}
    kind = kinds.get(facts["kind"], WorkerError)
    return kind(facts["message"], **{name: facts.get(name) for name in FACTS if name != "message"})


def _family(kind: type[CkpttoolError]) -> Iterator[type[CkpttoolError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


# Both sides.


def _save(folder: Path, stem: str, arrays: Sequence[np.ndarray]) -> None:
    for number, array in enumerate(arrays):
        np.save(folder / f"{stem}-{number}.npy", array, allow_pickle=False)


def _load(folder: Path, stem: str, count: int) -> list[np.ndarray]:
    return [np.load(folder / f"{stem}-{number}.npy", allow_pickle=False) for number in range(count)]


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


# The worker's side.


@dataclass(slots=True)
class Session:
    """What one worker process holds."""

    folder: Path
    name: str
    policies: list[Policy] = field(default_factory=list)

    @property
    def backend(self) -> ModuleType:
        """The backend's module, imported when it is first asked for."""
        return plugins.find("backends", self.name).load()


def _hello(session: Session, _: Message) -> Message:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"versions": {**session.backend.versions(), "python": python}}


def _build(session: Session, message: Message) -> Message:
    with open(session.folder / "network.npz", "rb") as file:
        network = serial.read(message["network"], file)
    policy = session.backend.build(network, message["device"])
    session.policies.append(policy)
    return {"policy": len(session.policies) - 1, "device": policy.device}


def _step(session: Session, message: Message) -> Message:
    names, states = message["names"], message["states"]
    given = _load(session.folder, "given", (1 if names is None else len(names)) + states)
    obs, state = given[: len(given) - states], tuple(given[len(given) - states :])
    observed = obs[0] if names is None else dict(zip(names, obs, strict=True))
    action, after = session.policies[message["policy"]].step(observed, state)
    _save(session.folder, "found", [action, *after])
    return {"arrays": 1 + len(after)}


def _close(_session: Session, _: Message) -> Message:
    # Frameworks abort now and then while an interpreter shuts down; nothing here is left to save.
    os._exit(0)


HANDLERS: dict[str, Callable[[Session, Message], Message]] = {
    "hello": _hello,
    "build": _build,
    "step": _step,
    "close": _close,
}


def serve(session: Session, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every request until the parent closes the pipe."""
    for line in requests:
        message = json.loads(line)
        try:
            answer = {"ok": HANDLERS[message["do"]](session, message)}
        except Exception as error:  # noqa: BLE001 - whatever a framework raises must reach the parent
            traceback.print_exc()
            answer = {"error": _facts(error)}
        answers.write(_line({"id": message["id"], **answer}))
        answers.flush()


def _facts(error: Exception) -> Message:
    if isinstance(error, CkpttoolError):
        return {"kind": error.kind, **{name: getattr(error, name) for name in FACTS}}
    return {"kind": WorkerError.kind, "message": f"{type(error).__name__}: {error}"}


@contextmanager
def _pipes() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Keep the pipes for messages: what a framework prints goes to the standard error."""
    with open(os.dup(0), "rb") as requests, open(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        yield requests, answers


def main(folder: str, backend: str) -> None:
    """Be the worker."""
    with _pipes() as (requests, answers):
        serve(Session(Path(folder), backend), requests, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
