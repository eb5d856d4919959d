"""What leaves the program: one JSON document or text without control characters, one sentence per error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import Any

from ckpttool import documents
from ckpttool.errors import CkpttoolError
from ckpttool.shown import clean, fitting, sentence
from ckpttool.version import __version__

SCHEMA = 1
# Our own colours; a name from a file has no escape character left (see clean).
_STYLE = re.compile("\x1b\\[[0-9;]*m")

# Objects of a list that are shown with a line for each of their values.
_MANY = 20_000


def document(content: dict[str, Any]) -> str:
    """Return the one JSON document of a command: schema, tool version, then the content."""
    whole = {"schema": SCHEMA, "tool": f"ckpttool {__version__}", **content}
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_member(item)}" for name, item in whole.items()) + "\n}"


def _member(value: Any) -> str:
    """Return a document's member with a line for each value, or for each object of a list of very many.

    Lines for everything would take ten times as long and all memory there is for a hundred thousand tensors.
    """
    if isinstance(value, list | tuple) and len(value) > _MANY:
        return "[\n  " + ",\n  ".join(_dumped(item) for item in value) + "\n ]"
    return _dumped(value, indent=1).replace("\n", "\n ")


def _dumped(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(documents.plain(value), indent=indent, allow_nan=False)


def write(text: str) -> None:
    """Print the text on stdout, if there is any; what the terminal's encoding cannot show is escaped."""
    if not text:
        return
    if not sys.stdout.isatty():
        text = _STYLE.sub("", text)
    data = (text + "\n").encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def fail(error: CkpttoolError, *, as_json: bool) -> None:
    """Say what is wrong: a sentence and a hint on stderr, or the error document on stdout."""
    if as_json:
        facts = {"kind": error.kind, "message": sentence(error), "file": error.file, "hint": error.hint}
        write(document({"error": facts}))
        return
    lines = [f"ckpttool: {sentence(error)}"]
    if error.hint:
        lines.append(f"hint: {fitting(clean(error.hint))}")
    _say(lines)


def ended(how: str) -> None:
    """Say on stderr that the program was stopped; where the terminal has gone, to nobody."""
    with contextlib.suppress(OSError):
        _say([f"ckpttool: {how}"])


def _say(lines: list[str]) -> None:
    print("\n".join(lines), file=sys.stderr)  # noqa: T201  # the one place that speaks to stderr


def silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush after a closed pipe says nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
