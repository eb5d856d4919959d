"""A user's model in a process beside this one, which imports no framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckpttool.agents.process import Process
from ckpttool.errors import UsageError

TIMEOUT_S = 600.0
# As `python -m` does it, but the user's folder joins the path only when the model is imported: an interpreter
# that knows -P is new (3.11).
_PROGRAM = (
    "-c",
    "import sys; sys.path[:] = [p for p in sys.path if p]; import runpy; "
    "runpy.run_module('ckpttool.agents.skeleton.child', run_name='__main__', alter_sys=True)",
)


@dataclass(frozen=True, slots=True)
class Like:
    """What the user says of the target model: who makes it, of what, and which Python.

    `arguments` are JSON: a list or an object; `shapes` those of its inputs without the batch.
    """

    factory: str
    arguments: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()
    python: str = sys.executable


def like(factory: str, arguments: str | None, shapes: Sequence[str], python: str | None) -> Like:
    """Return what the user wrote as a record; raise UsageError for what is no JSON or no shape."""
    return Like(factory, _arguments(arguments), tuple(map(shape, shapes)), python or sys.executable)


def _arguments(text: str | None) -> Any:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--like-args is no JSON: {error}", found=text[:100]) from None
    if not isinstance(found, list | dict):
        raise UsageError("--like-args takes a JSON object or list", found=text[:100])
    return found


def shape(text: str) -> tuple[int, ...]:
    """Return the shape that is written as `84,84,4`; raise UsageError if it is none."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError("a shape is written as 84,84,4", found=text)
    return tuple(map(int, parts))


class Beside:
    """The model's process; a context manager that ends it."""

    def __init__(self, wanted: Like, *, timeout: float = TIMEOUT_S) -> None:
        self._wanted = wanted
        self._process = Process(
            "model's process", _PROGRAM, [], python=wanted.python, timeout=timeout, threads=None
        )

    def __enter__(self) -> Beside:
        self._process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._process.stop(b'{"id": 0, "do": "close"}\n' if kind is None else None)

    def build(self) -> Mapping[str, Any]:
        """Make the model; return its framework, its class, and the forms that it can be loaded from."""
        return self._process.request(
            "build", {"factory": self._wanted.factory, "arguments": self._wanted.arguments}
        )

    def describe(self, guessed: Sequence[Sequence[int]]) -> Sequence[Mapping[str, Any]]:
        """Return its modules, called once if a shape is known; `guessed` is for one without weights."""
        shapes = [list(each) for each in self._wanted.shapes]
        answer = self._process.request(
            "describe", {"shapes": shapes, "guessed": [list(each) for each in guessed]}
        )
        found: Sequence[Mapping[str, Any]] = answer["modules"]
        return found

    def save(self, file: str, form: str) -> str:
        """Have the framework write the model's present values; return what to open."""
        return str(self._process.request("save", {"file": file, "form": form})["file"])

    def number(self) -> bool:
        """Fill every weight with its own number; say no where names tell whose a tensor is."""
        return bool(self._process.request("number", {})["done"])

    def load(self, file: str, form: str) -> None:
        """Have the framework load the file strictly; raise WorkerError if it does not."""
        self._process.request("load", {"file": file, "form": form})
