"""The groups of parts, each in child processes of its own: what crashes or hangs does not end the run."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.gpu.parts import ABSENT, FAILED, Context, Part, failure, last_line

ROOT = Path(__file__).resolve().parents[2]

# In the order of a run: what is quick and most telling comes first.
GROUPS: Mapping[str, str] = {
    "limits": "benchmarks.gpu.limits",
    "correctness": "benchmarks.gpu.checks",
    "residency": "benchmarks.gpu.transfers",
    "contract": "benchmarks.gpu.contract",
    "speed": "benchmarks.gpu.speed",
    "start": "benchmarks.gpu.start",
    "sanitizer": "benchmarks.gpu.contract:SANITIZERS",
}
# A child imports PyTorch before its first part, and may do so from a cold disk.
START_S = 120.0
# The whole run is to take less than eight minutes.
TOTAL_S = 460.0


class Event(NamedTuple):
    """A part that begins (no record) or ends."""

    part: str
    record: dict[str, Any] | None


def parts_of(module: str) -> tuple[Part, ...]:
    """Return the parts that a module lists as PARTS, or under the name after a colon."""
    name, _, attribute = module.partition(":")
    parts: tuple[Part, ...] = getattr(importlib.import_module(name), attribute or "PARTS")
    return parts


def run_group(module: str, context: Context, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the record of every part of a group; `deadline` is the end of the whole run, perf_counter's.

    A part that fails with an exception ends its process: a CUDA context may be unusable after an error.
    """
    try:
        waiting = list(parts_of(module))
    except Exception as error:  # noqa: BLE001 - a group that cannot be imported must not end the run
        yield failure(Part("import", lambda _: []), last_line(error), 0.0)
        return
    while waiting:
        if time.perf_counter() >= deadline:
            yield from map(_not_run, waiting)
            return
        together = [waiting[0]] if waiting[0].fresh else _until_fresh(waiting)
        for record in _in_child(module, together, context, deadline):
            done = record["part"]
            waiting = [part for part in waiting if part.name != done]
            yield record


def _not_run(part: Part) -> dict[str, Any]:
    reason = "not run: the whole run's time was used up"
    return failure(part, reason, 0.0, ABSENT if part.optional else FAILED)


def _until_fresh(waiting: Sequence[Part]) -> list[Part]:
    first = next((n for n, part in enumerate(waiting) if part.fresh), len(waiting))
    return list(waiting[:first])


def _in_child(
    module: str, parts: Sequence[Part], context: Context, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the records of a child, at least one: of a child that dies, that of the part it was at."""
    with tempfile.TemporaryFile() as errors, _started(module, parts, context, errors) as (child, events):
        at, since, limit = parts[0], time.perf_counter(), START_S + parts[0].limit_s
        by_name = {part.name: part for part in parts}
        reading = _Lines(events)
        while True:
            until = min(since + limit, deadline)
            event = reading.next(until)
            now = time.perf_counter()
            if event is None:
                _kill(child)
                if reading.open or not _finished(child, parts, by_name, at):
                    yield failure(at, _why(child, errors, now - since, ended=not reading.open), now - since)
                return
            name, record = event
            if record is None:
                at, since, limit = by_name[name], now, by_name[name].limit_s
                continue
            del by_name[name]
            yield record
            if not by_name:
                return
            at = next(iter(by_name.values()))
            since, limit = now, at.limit_s + START_S


def _finished(child: Any, parts: Sequence[Part], left: Mapping[str, Part], at: Part) -> bool:
    """Return whether the child ended between two parts, as it does after an exception."""
    return child.returncode == 0 and len(left) < len(parts) and at.name in left


def _why(child: Any, errors: IO[bytes], seconds: float, *, ended: bool) -> str:
    if not ended:
        return f"no result after {seconds:.0f} s"
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
    lines = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    status = child.returncode
    how = f"signal {signal.Signals(-status).name}" if status and status < 0 else f"status {status}"
    return f"the process ended with {how}" + (f": {lines[-1].strip()}" if lines else "")


class _Child:
    """A child and the pipe of its events; left by `with`, which ends the child."""

    def __init__(self, command: Sequence[str], errors: IO[bytes], environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*command, "--events", str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(writing,),
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.events = os.fdopen(reading, "rb", 0)

    def __enter__(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        return self.process, self.events

    def __exit__(self, *_: object) -> None:
        _kill(self.process, wait_s=5.0)
        self.events.close()


def _started(module: str, parts: Sequence[Part], context: Context, errors: IO[bytes]) -> _Child:
    names = json.dumps([part.name for part in parts])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child", module]
    command += ["--parts", names, "--device", context.device, "--folder", context.folder]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not context.cuda:
        # As in rollouts: threads that wait for each other on busy cores would be all that is measured.
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return _Child([*command, *(["--quick"] if context.quick else [])], errors, environment)


def _kill(child: subprocess.Popen[bytes], wait_s: float = 0.2) -> None:
    """End the child with all that it started, unless it ends by itself within that time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(wait_s)
    # What the child has started is in its session, and may live on after it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _Lines:
    """The child's events as they come."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest = stream, b""
        self.open = True

    def next(self, until: float) -> Event | None:
        """Return the next event; None at `until`, or when the child has closed its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.perf_counter())):
                    return None
                data = self._stream.read(1 << 16)
                if not data:
                    self.open = False
                    return None
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        document = json.loads(line)
        return Event(document["part"], document.get("record"))
