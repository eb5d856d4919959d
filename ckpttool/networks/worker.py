"""Run a framework in a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

import ckpttool
from ckpttool.core import filesystem, plugins, search_paths
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError, WorkerError
from ckpttool.networks import messages, policy_training
from ckpttool.networks import network as serial
from ckpttool.networks.messages import Message, Requests
from ckpttool.networks.network import Network, Observation, Policy, State, dtype_of
from ckpttool.networks.policy_training import Learner, TrainedWeights, TrainingBatch

if TYPE_CHECKING:
    from typing import TypedDict

    NewPolicy = TypedDict("NewPolicy", {"policy": int, "device": str})  # noqa: UP013

LAST_LINES = 6
_FAREWELL = b'{"id": 0, "do": "close"}\n'
LAST_BYTES = 8192
LONGEST_LINE = 1 << 28
GRACE_S = 5.0
MEMORY = "/dev/shm"  # noqa: S108 - the folder made in it has a random name and mode 0700
MEMORY_ROOM = 1 << 30

THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


def module_arguments(name: str) -> tuple[str, ...]:
    """Return the interpreter arguments that run a ckpttool module.

    -P keeps the user's folder off the import path, because it may contain an untrusted torch.py.
    """
    return "-P", "-m", name


class ChildProcess:
    """A ckpttool program run by any interpreter, with a folder that both sides share."""

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        arguments: Sequence[str],
        *,
        python: str,
        timeout: float,
        threads: int | None,
    ) -> None:
        """Store the start parameters: interpreter, `program`, shared folder, `arguments`.

        `timeout` is in seconds per answer; `threads` None keeps the libraries' defaults.
        """
        self.name = name
        self._program, self._arguments = program, arguments
        self._requests = 0
        # The request that was sent before its answer is needed.
        self._early: tuple[str, dict[str, Any]] | None = None
        self._python, self._timeout, self._threads = python, timeout, threads
        self._pending = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._holder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        # After an error or Ctrl-C the process may be in a long computation, as with a request that was not
        # needed: do not wait for it.
        self.stop(_FAREWELL if kind is None and self._early is None else None)

    @property
    def folder(self) -> Path:
        """Return the shared folder; raise WorkerError if the process is not running."""
        if self._holder is None:
            raise WorkerError(f"the {self.name} is not running")
        return Path(self._holder.name)

    def start(self) -> None:
        """Start the process; raise UsageError if the interpreter does not exist."""
        if filesystem.WINDOWS:
            raise UnsupportedError(
                "frameworks in separate processes are not supported on Windows",
                hint="use WSL, or --backend numpy",
            )
        self._holder = tempfile.TemporaryDirectory(prefix="ckpttool-", dir=_memory_folder())
        library = self.folder / "library"
        library.mkdir()
        # The interpreter receives this package alone: its neighbours were built for another Python.
        (library / "ckpttool").symlink_to(Path(ckpttool.__file__).resolve().parent)
        command = [self._python, *self._program, str(self.folder), *self._arguments]
        try:
            with open(self._log, "wb") as log:
                self._child = subprocess.Popen(  # noqa: S603 - the interpreter is the caller's to choose
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment(library),
                    start_new_session=True,  # a terminal's Ctrl-C is for the parent
                )
        except OSError as error:
            self.stop(None)
            raise UsageError(f"cannot run {self._python}: {error.strerror}") from None

    def begin(self, do: str, **values: Any) -> None:
        """Send a request whose answer the same `request` returns later: others compute meanwhile."""
        if self._early != (do, values):
            self._requests += 1
            self._early = do, values
            self.send(messages.encode_line({"id": self._requests, "do": do, **values}))

    def request(self, do: str, **values: Any) -> Any:
        """Send one request and return its answer; raise the other side's error in this process."""
        self.begin(do, **values)
        self._early = None
        try:
            answer = json.loads(self.receive())
            while answer["id"] != self._requests:
                # A late answer to a request that the caller interrupted with Ctrl-C, or did not need.
                answer = json.loads(self.receive())
            result = messages.decode_error(answer["error"]) if "error" in answer else dict(answer["ok"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Code in a file can write to any descriptor of its process.
            self._end(0.0)
            raise WorkerError(f"the {self.name} sent an invalid answer{_last_words(self._log)}") from None
        if isinstance(result, CkpttoolError):
            raise result
        return result

    def send(self, line: bytes) -> None:
        """Write one line; raise WorkerError if the process has ended."""
        child = self._running()
        try:
            _write_line(child, line)
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> bytes:
        """Return one line; raise WorkerError if the process ends or exceeds the timeout."""
        child = self._running()
        assert child.stdout is not None  # noqa: S101 - for the type checker: it was opened as a pipe
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._late()
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise self._ended()
                self._pending += chunk
                if len(self._pending) > LONGEST_LINE:
                    self._end(0.0)
                    raise WorkerError(f"the {self.name} sent too long an answer{_last_words(self._log)}")
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def kill(self) -> None:
        """Kill the process, from any thread; a caller waiting for its answer gets WorkerError."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self, farewell: bytes | None) -> None:
        """End the process, with a farewell message if there is one, and remove the folder."""
        if self._child is not None:
            if farewell is not None:
                with contextlib.suppress(BrokenPipeError):
                    _write_line(self._child, farewell)
            self._end(GRACE_S if farewell is not None else 0.0)
        if self._holder is not None:
            self._holder.cleanup()
            self._holder = None

    @property
    def _log(self) -> Path:
        return self.folder / "stderr.txt"

    def _environment(self, library: Path) -> dict[str, str]:
        inherited = search_paths.child_environment()
        path = os.pathsep.join(filter(None, (str(library), inherited.get("PYTHONPATH"))))
        limits = {} if self._threads is None else dict.fromkeys(THREADS, str(self._threads))
        # Threads that wait do not compute: on a busy machine they take the time of those that do.
        waiting = {"OMP_WAIT_POLICY": inherited.get("OMP_WAIT_POLICY", "PASSIVE")}
        return {**inherited, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **waiting, **limits}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise WorkerError(f"the {self.name} is not running")
        return self._child

    def _end(self, grace: float) -> int:
        """Wait that long for the process, then kill it; return its status."""
        child = self._running()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._child = None
        return child.returncode

    def _late(self) -> WorkerError:
        self._end(0.0)
        return WorkerError(
            f"the {self.name} did not respond within {self._timeout:g} s{_last_words(self._log)}"
        )

    def _ended(self) -> WorkerError:
        return ended_error(f"the {self.name}", self._end(GRACE_S), self._log)


def ended_error(name: str, status: int, log: Path) -> WorkerError:
    """Return the error for an ended process, with the last lines of its standard error."""
    reason = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return WorkerError(f"{name} {reason}{_last_words(log)}")


def _last_words(path: Path) -> str:
    """Return the last lines of a process's standard error, without terminal control sequences."""
    with open(path, "rb") as log:
        log.seek(max(0, os.path.getsize(path) - LAST_BYTES))
        text = log.read().decode("utf-8", "replace")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e\xa0-\U0010ffff\n]", "", text)
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    return "; last output: " + " | ".join(lines[-LAST_LINES:]) if lines else ""


def _write_line(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None  # noqa: S101 - for the type checker: it was opened as a pipe
    child.stdin.write(line)
    child.stdin.flush()


def _memory_folder() -> str | None:
    """Return a large in-memory folder, if there is one: small files take a quarter of the time there."""
    room = filesystem.free_bytes(MEMORY)
    return MEMORY if room is not None and room > MEMORY_ROOM and os.access(MEMORY, os.W_OK) else None


MODEL_TIMEOUT_S = 600.0
# Like `python -m`, but the user's folder joins the path only when the model is imported: the -P option
# requires Python 3.11.
_PATH = "import sys; sys.path[:] = [p for p in sys.path if p]; "
_MAIN = "from ckpttool.networks.model_runner import main; main(sys.argv[1])"
_PROGRAM = _PATH + _MAIN
_RESTRICTED = f"{_PATH}from ckpttool.core.sandbox import begin; begin(*sys.argv[1:]); {_MAIN}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """User's description of the target model: factory, arguments, shapes and Python interpreter.

    `arguments` are JSON: a list or an object; `shapes` those of its inputs without the batch.
    """

    factory: str
    arguments: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()
    python: str = sys.executable


def as_model_spec(model: object) -> ModelSpec:
    """Return the description of a model that may be the name of its code; UsageError for a model itself."""
    if isinstance(model, ModelSpec | str):
        return ModelSpec(model) if isinstance(model, str) else model
    hint = "ckpttool.load_into(model, path) fills a live model"
    if isinstance(name := getattr(model, "__qualname__", None), str):
        hint = f"pass '{getattr(model, '__module__', 'MODULE')}:{name}'"
    raise UsageError("the model is not given by its code", found=type(model).__name__, hint=hint)


def parse_model_spec(
    factory: str,
    arguments: str | None,
    shapes: Sequence[str],
    python: str | None,
    option: str = "--like-args",
) -> ModelSpec:
    """Parse the user's description; raise UsageError for invalid JSON or an invalid shape.

    Args:
        factory: `module:name`, or a path and a name.
        arguments: JSON of the factory's arguments.
        shapes: shapes of the model's inputs without the batch, as text.
        python: the interpreter of the model's process, by default this one.
        option: the option that `arguments` come from, for errors.
    """
    return ModelSpec(
        factory,
        _parse_arguments(arguments, option),
        tuple(map(parse_input_shape, shapes)),
        python or sys.executable,
    )


def _parse_arguments(text: str | None, option: str) -> Any:
    if text is None:
        return None
    try:
        arguments = json.loads(text)
    except ValueError as error:
        hint = f"{option} '{{\"NAME\": VALUE}}': names in double quotes, all in single quotes"
        raise UsageError(f"{option} is not valid JSON: {error}", found=text[:100], hint=hint) from None
    if not isinstance(arguments, list | dict):
        raise UsageError(f"{option} requires a JSON object or list", found=text[:100])
    return arguments


def parse_input_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as `84,84,4`; raise UsageError if it is invalid."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError("invalid shape; write it as 84,84,4", found=text)
    return tuple(map(int, parts))


class ModelProcess(ChildProcess):
    """A process with one model (networks/model_runner.py).

    `restrictions` are those of core/sandbox.py, None for a process that builds and saves a user's model.
    """

    def __init__(
        self, name: str, python: str, restrictions: str | None = None, *, timeout: float = MODEL_TIMEOUT_S
    ) -> None:
        program = _PROGRAM if restrictions is None else _RESTRICTED
        arguments = [] if restrictions is None else [restrictions]
        super().__init__(name, ("-c", program), arguments, python=python, timeout=timeout, threads=None)


TIMEOUT_S = 120.0


class Worker(ChildProcess):
    """A backend in a separate process; a context manager that ends the process and removes the folder.

    `python` may be another environment's interpreter (3.11 or newer, with numpy). No request waits longer
    than `timeout` seconds. `threads` limits the framework's number of threads. Arrays are .npy files in a
    folder that parent and worker share; messages.py describes the messages. A new kind of request is a
    method of WorkerSession. This module is the worker's program and imports no framework.
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
        program = module_arguments("ckpttool.networks.worker")
        name = f"{backend} worker"
        super().__init__(name, program, [backend], python=python, timeout=timeout, threads=threads)
        self.ask = cast("WorkerSession", Requests(self.request))

    def versions(self) -> dict[str, str]:
        """Return the versions of the computing libraries, and of the worker's Python."""
        return self.ask.hello()["versions"]

    def build(self, network: Network, device: str = "cpu") -> WorkerPolicy:
        """Put the network on the worker's device."""
        dtype_of(network)  # report unsupported layers before writing anything
        with open(self.folder / "network.npz", "wb") as file:
            document = serial.write_network(network, file)
        built = self.ask.build(network=document, device=device)
        return WorkerPolicy(self, built["policy"], built["device"])

    def train(self, learner: Learner, batches: Sequence[TrainingBatch]) -> TrainedWeights:
        """Make one update per batch in the worker's framework, in the learner's float type."""
        document = policy_training.write_records([learner, *batches], self.folder / "learner.npz")
        answer = self.ask.train(learner=document)
        trained: TrainedWeights = policy_training.read_records(answer, self.folder / "trained.npz")
        return trained


class WorkerPolicy:
    """A policy in a worker; it ends with the worker."""

    def __init__(self, worker: Worker, number: int, device: str) -> None:
        self.device = device
        self._worker = worker
        self._number = number

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        names = None if isinstance(obs, np.ndarray) else list(obs)
        arrays = [obs] if isinstance(obs, np.ndarray) else list(obs.values())
        _save_arrays(self._worker.folder, "given", [*arrays, *state])
        answer = self._worker.ask.step(policy=self._number, names=names, states=len(state))
        action, *after = _load_arrays(self._worker.folder, "found", answer["arrays"])
        return action, tuple(after)


def _save_arrays(folder: Path, stem: str, arrays: Sequence[np.ndarray]) -> None:
    for number, array in enumerate(arrays):
        np.save(folder / f"{stem}-{number}.npy", array, allow_pickle=False)


def _load_arrays(folder: Path, stem: str, count: int) -> list[np.ndarray]:
    return [np.load(folder / f"{stem}-{number}.npy", allow_pickle=False) for number in range(count)]


@dataclass(slots=True)
class WorkerSession:
    """State of one worker process, and the requests to it."""

    folder: Path
    name: str
    policies: list[Policy] = field(default_factory=list)

    @property
    def backend(self) -> ModuleType:
        """Return the backend's module, imported on first use."""
        return plugins.find("backends", self.name).load()

    def hello(self) -> dict[str, dict[str, str]]:
        """Return the versions of the libraries and of Python."""
        python = ".".join(map(str, sys.version_info[:3]))
        return {"versions": {**self.backend.versions(), "python": python}}

    def build(self, network: Message, device: str) -> NewPolicy:
        """Put a network that the parent wrote on the device."""
        with open(self.folder / "network.npz", "rb") as file:
            policy = self.backend.build(serial.read_network(network, file), device)
        self.policies.append(policy)
        return {"policy": len(self.policies) - 1, "device": policy.device}

    def step(self, policy: int, names: list[str] | None, states: int) -> dict[str, int]:
        """Apply a policy to the arrays that the parent wrote."""
        arrays = _load_arrays(self.folder, "given", (1 if names is None else len(names)) + states)
        obs, state = arrays[: len(arrays) - states], tuple(arrays[len(arrays) - states :])
        observed = obs[0] if names is None else dict(zip(names, obs, strict=True))
        action, after = self.policies[policy].step(observed, state)
        _save_arrays(self.folder, "found", [action, *after])
        return {"arrays": 1 + len(after)}

    def train(self, learner: Message) -> Message:
        """Train a learner that the parent wrote."""
        trained, *batches = policy_training.read_records(learner, self.folder / "learner.npz")
        learn = getattr(self.backend, "learn", None)
        if learn is None:
            raise UnsupportedError(f"backend {self.name} does not support training")
        weights = policy_training.train_learner(learn(trained), trained, batches)
        return policy_training.write_records(weights, self.folder / "trained.npz")

    close = messages.end_process


def main(folder: str, backend: str) -> None:
    """Run the worker."""
    with messages.message_pipes() as (requests, answers):
        messages.serve(
            WorkerSession(Path(folder), backend), messages.list_handlers(WorkerSession), requests, answers
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
