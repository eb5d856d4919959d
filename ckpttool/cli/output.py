"""What leaves the program: one JSON document or text without control characters, one sentence per error."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from ckpttool import documents
from ckpttool.errors import CkpttoolError
from ckpttool.version import __version__

SCHEMA = 1
# Our own colours; a name from a file has no escape character left (see clean).
_STYLE = re.compile("\x1b\\[[0-9;]*m")


def clean(text: str) -> str:
    """Return the text with everything that does not print (control, bidi, surrogates) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def document(content: dict[str, Any]) -> str:
    """Return the one JSON document of a command: schema, tool version, then the content."""
    whole = {"schema": SCHEMA, "tool": f"ckpttool {__version__}", **documents.plain(content)}
    return json.dumps(whole, indent=1, allow_nan=False)


def write(text: str) -> None:
    """Print the text on stdout; a name that the terminal's encoding cannot show is escaped."""
    if not sys.stdout.isatty():
        text = _STYLE.sub("", text)
    data = (text + "\n").encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def fail(error: CkpttoolError, *, as_json: bool) -> None:
    """Say what is wrong: a sentence and a hint on stderr, or the error document on stdout."""
    if as_json:
        facts = {"kind": error.kind, "message": _sentence(error), "file": error.file, "hint": error.hint}
        write(document({"error": facts}))
        return
    lines = [f"ckpttool: {_sentence(error)}"]
    if error.hint:
        lines.append(f"hint: {clean(error.hint)}")
    print("\n".join(lines), file=sys.stderr)  # noqa: T201  # the one place that speaks to stderr


def _sentence(error: CkpttoolError) -> str:
    # No longer than a few lines, whatever a hostile file puts into its names.
    text = clean(str(error))
    return text if len(text) <= 600 else text[:597] + "..."


def silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush after a closed pipe says nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
