"""The worker: a process of its own for one framework, and the one protocol that serves them all.

Arrays lie as .npy files in a folder that parent and worker share; how messages travel is in messages.py. A
new kind of request is a row in HANDLERS. This module runs as the worker's program and imports no framework.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from ckpttool import plugins
from ckpttool.agents import serial
from ckpttool.agents.execute import dtype_of
from ckpttool.agents.messages import Message, pipes, serve
from ckpttool.agents.network import Network
from ckpttool.agents.policy import Observation, Policy, State
from ckpttool.agents.process import Process, module
from ckpttool.agents.training import serial as training
from ckpttool.agents.training.learner import Batch, Learner
from ckpttool.agents.training.td3 import Trained, train
from ckpttool.errors import UnsupportedError

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
            module("ckpttool.agents.worker"),
            [backend],
            python=python,
            timeout=timeout,
            threads=threads,
        )

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

    def train(self, learner: Learner, batches: Sequence[Batch]) -> Trained:
        """Make one update for each batch in the worker's framework, in the float type of the learner."""
        document = training.write(learner, batches, self.folder)
        return training.read_trained(self.request("train", learner=document), self.folder)

    @property
    def folder(self) -> Path:
        """Where arrays are exchanged while the worker runs."""
        return self._process.folder

    def request(self, do: str, **values: Any) -> Message:
        """Send one request and return its answer; raise the worker's error as if it had happened here."""
        return self._process.request(do, values)


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


# Both sides.


def _save(folder: Path, stem: str, arrays: Sequence[np.ndarray]) -> None:
    for number, array in enumerate(arrays):
        np.save(folder / f"{stem}-{number}.npy", array, allow_pickle=False)


def _load(folder: Path, stem: str, count: int) -> list[np.ndarray]:
    return [np.load(folder / f"{stem}-{number}.npy", allow_pickle=False) for number in range(count)]


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


def _train(session: Session, message: Message) -> Message:
    learner, batches = training.read(message["learner"], session.folder)
    learn = getattr(session.backend, "learn", None)
    if learn is None:
        raise UnsupportedError(f"backend {session.name} does not train")
    return training.write_trained(train(learn(learner), learner, batches), session.folder)


def _close(_session: Session, _: Message) -> Message:
    # Frameworks abort now and then while an interpreter shuts down; nothing here is left to save.
    os._exit(0)


HANDLERS: dict[str, Callable[[Session, Message], Message]] = {
    "hello": _hello,
    "build": _build,
    "step": _step,
    "train": _train,
    "close": _close,
}


def main(folder: str, backend: str) -> None:
    """Be the worker."""
    with pipes() as (requests, answers):
        serve(Session(Path(folder), backend), HANDLERS, requests, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
