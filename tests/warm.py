"""A process that has imported a framework, does nothing else, and forks a child for each program.

TensorFlow and PyTorch take seconds to start. What a program does to them ends with its child, so each meets a
framework that is as new as after an import.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TIMEOUT_S = 600
# What nearly all programs for it import besides: seconds, every time. Optimizers of PyTorch import _dynamo.
BESIDES = {
    "tensorflow": ("hypothesis", "ckpttool.commands.convert", "ckpttool.networks.messages", "tests.conftest"),
    "stable_baselines3": ("torch._dynamo",),
    "torch": ("torch._dynamo",),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run(framework: str, program: str, folder: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a Python program as `python -c` does, in the folder; return its status and all that it printed."""
    requests, answers = _parent(framework)
    request = {
        "program": program,
        "folder": str(folder),
        "env": dict(env or os.environ),
        "seed": _draw_seed(),
    }
    requests.sendall(json.dumps(request).encode() + b"\n")
    answer = answers.readline()
    assert answer, f"{framework} does not start, or its process has died"
    status, output = json.loads(answer)
    return status, output


def once(key: object, make: Callable[[Mapping[str, Path]], Any], folders: Mapping[str, Path]) -> Any:
    """Let `make` fill empty folders and return what it says, once for all programs of xdist; give copies.

    Every caller that passes the same `key` gets the same folders and answer.
    """
    name = hashlib.sha256(repr((key, sorted(folders))).encode()).hexdigest()
    shared = Path(tempfile.gettempdir(), f"made-{name}")
    with open(f"{shared}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = shared / "answer.json"
        if not answer.exists():
            shutil.rmtree(shared, ignore_errors=True)
            places = {folder: shared / f"{number}" for number, folder in enumerate(folders)}
            for location in places.values():
                location.mkdir(parents=True)
            text = json.dumps(make(places))
            assert str(shared) not in text, "the answer names a folder that is copied"
            answer.write_text(text)
    for number, folder in enumerate(folders.values()):
        assert not list(folder.iterdir()), f"{folder} is not empty"
        shutil.copytree(shared / f"{number}", folder, dirs_exist_ok=True)
    return json.loads(answer.read_text())


def begin(framework: str, program: str, env: Mapping[str, str], streams: Sequence[int]) -> tuple[int, Any]:
    """Begin a Python program in this folder, with these descriptors for stdin, stdout and stderr.

    Return the number of its process, and the pipe on which a line with its status arrives when it has ended.
    """
    requests, _ = _parent(framework)
    request = {"program": program, "folder": os.getcwd(), "env": dict(env), "seed": _draw_seed()}
    reading_end, writing_end = os.pipe()
    socket.send_fds(requests, [json.dumps(request).encode() + b"\n"], [*streams, writing_end])
    os.close(writing_end)
    answers = open(reading_end, encoding="ascii")  # noqa: SIM115  # closed with the status
    first = answers.readline()
    assert first, f"{framework} does not start, or its process has died"
    return int(first), answers


def _draw_seed() -> int:
    """Return a seed for a child: the next random number of the test or fixture that asks."""
    return random.getrandbits(32)


@functools.cache
def _parent(framework: str) -> tuple[socket.socket, Any]:
    """Connect to the process that forks; it ends when all sockets of its requests are closed.

    All programs of xdist share one, which the first of them starts.
    """
    path = f"{os.environ.get('TMPDIR')}/warm-{framework}"
    # A socket's path has at most 103 characters.
    if "PYTEST_XDIST_WORKER" in os.environ and len(path) < 100:
        connection, started = _shared(framework, Path(path)), None
    else:
        connection, child_end = socket.socketpair()
        started = _start(framework, child_end)

    answers = connection.makefile()

    def end() -> None:
        # The socket is open until what was made of it is closed too.
        answers.close()
        connection.close()
        if started is not None:
            started.wait()

    atexit.register(end)
    return connection, answers


def _start(framework: str, requests: socket.socket, *options: str) -> subprocess.Popen[bytes]:
    with requests:
        return subprocess.Popen(
            [sys.executable, __file__, framework, *options],
            env={**os.environ, **QUIET},
            stdin=requests,
            stdout=subprocess.DEVNULL,
            start_new_session=bool(options),
        )


def _shared(framework: str, path: Path) -> socket.socket:
    """Connect to the process whose socket lies there; start it where none accepts connections."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            # It outlives this process if another one is connected.
            _start(framework, listener, str(path)).returncode = 0
            connection.connect(str(path))
        return connection


def serve() -> None:
    """Fork a child for every line that comes from a socket, and answer with its status and output."""
    # A source checkout is enough: the package need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    for name in (sys.argv[1], *BESIDES.get(sys.argv[1], ())):
        importlib.import_module(name)
    # A collection in a child would look at, and so copy, every page of what is here.
    gc.freeze()
    requests = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if sys.argv[2:]:
        requests = _next_connection(requests, Path(sys.argv[2]))
    while True:
        line, streams = _next_request(requests)
        if not line:
            break
        request = json.loads(line)
        if streams:
            if not os.fork():
                _watch(streams, request)
            for stream in streams:
                os.close(stream)
        else:
            requests.sendall(json.dumps(_answer(request)).encode() + b"\n")
        _reap()


def _reap() -> int:
    """Forget the children that have ended; return their number."""
    ended = 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            ended += 1
    return ended


def _next_connection(listener: socket.socket, path: Path) -> socket.socket:
    """Fork a process for each connection, which is returned there; end when the last of them has ended."""
    connected = 0
    listener.settimeout(1)
    while True:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            if not os.fork():
                listener.close()
                return connection
            connection.close()
            connected += 1
            continue
        if connected and not (connected := connected - _reap()):
            # Who has come in the meantime is still served; nobody comes any more.
            path.unlink(missing_ok=True)
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                connection.setblocking(True)
                return connection
            sys.exit()


def _next_request(requests: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next line and the descriptors that came with it; no line where the other side has ended."""
    line, streams = b"", []
    while not line.endswith(b"\n"):
        part, descriptors, *_ = socket.recv_fds(requests, 1 << 16, 4)
        if not part:
            return b"", []
        line += part
        streams += descriptors
    return line, streams


def _answer(request: Mapping[str, Any]) -> tuple[int, str]:
    """Fork a child for a program; return its status and what it printed."""
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading_end)
        for stream in (1, 2):
            os.dup2(writing_end, stream)
        signal.alarm(TIMEOUT_S)
        _run(**request)
    os.close(writing_end)
    with open(reading_end, encoding="utf-8", errors="replace") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output


def _watch(streams: Sequence[int], request: Mapping[str, Any]) -> NoReturn:
    """Fork a child with these streams, and tell its number and later its status on the last of them."""
    *streams, status_stream = streams
    child = os.fork()
    if not child:
        os.close(status_stream)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(**request, quiet={})
    # Whoever reads from the child sees the end of it.
    for stream in (*streams, 1, 2):
        os.close(stream)
    os.write(status_stream, b"%d\n" % child)
    _, status = os.waitpid(child, 0)
    os.write(status_stream, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def seed_random_numbers(seed: int) -> None:
    """Seed the generators of Python and of the libraries that are loaded here."""
    random.seed(seed)
    # A test may put another object in the place of a library.
    for library, generator, name in (
        ("numpy", "random", "seed"),
        ("torch", "default_generator", "manual_seed"),
        ("tensorflow", "random", "set_seed"),
    ):
        if (module := getattr(sys.modules.get(library), generator, None)) is not None:
            getattr(module, name)(seed)


def _run(
    program: str, folder: str, env: Mapping[str, str], seed: int, quiet: Mapping[str, str] = QUIET
) -> NoReturn:
    """Run the program in this child, and end it."""
    status = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update({**env, **quiet})
        sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = ["-c"]
        seed_random_numbers(seed)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as requested:
        status = requested.code if isinstance(requested.code, int) else int(requested.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        messages = sys.modules.get("ckpttool.networks.messages")
        if messages is not None:
            messages.remove_generated_files()
        os._exit(status)


if __name__ == "__main__":
    serve()
