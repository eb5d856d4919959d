"""Exchange messages between parent and child process: JSON lines over pipes, answered in order.

`{"id", "do", ...}` is answered by `{"id", "ok"}` or `{"id", "error"}`. The syntax is Python 3.7's,
here and in imported modules: interpreters of other environments run this code. A request calls the handler
that `do` names with keywords. Handlers are functions of a class, which also types the calls of the parent.
"""

# ruff: noqa: UP006, UP013, UP035  # Python 3.7, and types of rows that need a line each

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Callable, Dict, Iterator, Mapping, Tuple, Type

from ckpttool.core.errors import CkpttoolError, WorkerError

if TYPE_CHECKING:  # typing.TypedDict is younger than Python 3.7
    from typing import NotRequired, TypedDict

    InputRow = TypedDict(
        "InputRow", {"name": str, "shape": list[int | None], "dtype": str | None, "batch": int | None}
    )
    ArrayRow = TypedDict(
        "ArrayRow", {"shape": list[int], "kind": str, "largest": float, "file": NotRequired[str]}
    )
    TensorRow = TypedDict(
        "TensorRow", {"name": str, "shape": list[int], "dtype": str, "values": str, "constant": bool}
    )
    LayerRow = TypedDict(
        "LayerRow",
        {"path": str, "class": str, "name": str, "settings": dict[str, Any], "tensors": list[TensorRow]},
    )
    CallRow = TypedDict(
        "CallRow",
        {
            "path": str,
            "number": int,
            "options": dict[str, Any],
            "given": NotRequired[list[ArrayRow]],
            "before": NotRequired[list[ArrayRow]],
            "made": NotRequired[list[ArrayRow]],
        },
    )
    # Values are numbers in a recorded call: `start` and `end` are those before and after the layer.
    RecordedCallRow = TypedDict(
        "RecordedCallRow",
        {"path": str, "number": int, "given": list[int], "made": list[int], "start": int, "end": int},
    )
    OperationRow = TypedDict("OperationRow", {"name": str, "given": list[Any], "made": list[int]})

Message = Dict[str, Any]
Handler = Callable[..., Message]
FACTS = ("message", "file", "path", "offset", "expected", "found", "hint")


class Requests:
    """Requests as calls of methods; callers cast it to the class of the handlers."""

    def __init__(self, request: Handler) -> None:
        self._request = request

    def __getattr__(self, do: str) -> Handler:
        return partial(self._request, do)


def list_handlers(requests: type) -> Dict[str, Handler]:
    """Return the handlers of a class by name."""
    return {do: handler for do, handler in vars(requests).items() if do[0] != "_" and callable(handler)}


def encode_line(message: Message) -> bytes:
    """Encode a message as one line."""
    return json.dumps(message).encode() + b"\n"


def decode_error(facts: Message) -> CkpttoolError:
    """Return the error of the other side, with its original class."""
    kinds = {kind.kind: kind for kind in _iter_subclasses(CkpttoolError)}
    kind = kinds.get(facts["kind"], WorkerError)
    return kind(facts["message"], **{name: facts.get(name) for name in FACTS if name != "message"})


def _iter_subclasses(kind: Type[CkpttoolError]) -> Iterator[Type[CkpttoolError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _iter_subclasses(child)


def serve(session: Any, handlers: Mapping[str, Handler], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every request with the handler named by its `do`, until the parent closes the pipe."""
    for request in requests:
        message = json.loads(request)
        number, do = message.pop("id"), message.pop("do")
        try:
            answer = {"ok": handlers[do](session, **message)}
        except Exception as error:  # noqa: BLE001 - whatever a framework raises must reach the parent
            traceback.print_exc()
            answer = {"error": encode_error(error)}
        answers.write(encode_line(dict(answer, id=number)))
        answers.flush()


def encode_error(error: Exception) -> Message:
    """Return the fields from which `error_of` rebuilds an error."""
    if isinstance(error, CkpttoolError):
        return dict({name: getattr(error, name) for name in FACTS}, kind=error.kind)
    return {"kind": WorkerError.kind, "message": f"{type(error).__name__}: {error}"}


@contextmanager
def message_pipes() -> Iterator[Tuple[IO[bytes], IO[bytes]]]:
    """Reserve the pipes for messages: output of a framework goes to standard error."""
    with open(os.dup(0), "rb") as requests, open(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        yield requests, answers


def remove_generated_files() -> None:
    """Remove the temporary files of AutoGraph's modules (tensorflow/python/autograph/pyct/loader.py)."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with suppress(OSError):
                os.remove(getattr(module, "__file__", ""))


def end_process(_session: object) -> Message:
    """End this process at once: some frameworks abort while an interpreter shuts down.

    No data is left to save, and no answer is sent.
    """
    remove_generated_files()
    os._exit(0)
