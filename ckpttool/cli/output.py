"""What leaves the program: one JSON document or text without control characters, one sentence per error."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from ckpttool import documents
from ckpttool.errors import CkpttoolError
from ckpttool.shown import clean, fitting, sentence
from ckpttool.version import __version__

SCHEMA = 1
# Styles of our own carry a mark that no file can contain: `inert` escapes every other escape character.
_MARK = os.urandom(8).hex()
_STYLE = re.compile(f"\x1b{_MARK}(\\[[0-9;]*m)")
_REQUESTED = re.compile(r"\x1b(?=\[[0-9;]*m)")

# Holds something once stdout has failed.
_FAILED: list[bool] = []

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


def style(code: str) -> str:
    """Return what begins a style in text that is written here: "1" is bold, "2" dim, "0" ends it."""
    return f"\x1b{_MARK}[{code}m"


def styled_by_rich(text: str) -> str:
    """Return text that rich has drawn, and whose cells it was given clean, with its styles as our own."""
    return _REQUESTED.sub(f"\x1b{_MARK}", text)


def inert(text: str, *, styles: bool = False) -> str:
    """Return lines of printable characters, which cannot steer a terminal, and our own styles if wanted."""
    if text.replace("\n", "").isprintable():
        return text
    pieces = _STYLE.split(text)
    for at, piece in enumerate(pieces):
        if at % 2:
            pieces[at] = f"\x1b{piece}" if styles else ""
        else:
            pieces[at] = "\n".join(map(clean, piece.split("\n")))
    return "".join(pieces)


def write(text: str) -> None:
    """Print the text on stdout, if there is any; what the terminal's encoding cannot show is escaped.

    Raise BrokenPipeError when the reader is gone, CkpttoolError when stdout takes no more for another reason.
    """
    if not text:
        return
    require_stdout()
    data = (inert(text, styles=sys.stdout.isatty()) + "\n").encode(
        sys.stdout.encoding or "utf-8", "backslashreplace"
    )
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise CkpttoolError(f"cannot write to standard output: {error.strerror}") from error


def require_stdout() -> None:
    """Raise CkpttoolError where stdout is closed, or has failed before."""
    if sys.stdout is None or _FAILED:
        raise CkpttoolError(
            "cannot write to standard output: it is closed", hint="> /dev/null discards the output"
        )


class Inert:
    """A stream to which libraries print and warn: what it is given cannot steer a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattribute__(self, name: str) -> Any:
        """Return what the stream itself has, but for writing."""
        if name in ("write", "writelines", "stream", "__class__", "__dict__"):
            return super().__getattribute__(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text with control characters as escapes."""
        self.stream.write(text if text.isprintable() else inert(text.expandtabs()))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)


class _Drawing(io.StringIO):
    """Collects what rich draws for a stream, in its colours where that is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    # Rich draws boxes in the characters of the stream's encoding.
    encoding = property(lambda self: self.stream.encoding)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self.stream.isatty()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Let rich print our own text, such as --help; its styles reach the terminal, as those of `style` do."""
    require_stdout()
    before, drawn = sys.stdout, _Drawing(sys.stdout)
    sys.stdout = drawn
    try:
        yield
    finally:
        sys.stdout = before
    write(styled_by_rich(drawn.getvalue()).removesuffix("\n"))


def guard() -> None:
    """Put `Inert` in front of stdout and stderr, and something in the place of a closed descriptor.

    Else the first file that is opened would get its number, and with it what a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    _FAILED.clear()
    sys.stdout, sys.stderr = (
        stream if stream is None or isinstance(stream, Inert) else cast(TextIO, Inert(stream))
        for stream in (sys.stdout, sys.stderr)
    )


def watched() -> bool:
    """Say whether a person watches stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def stderr() -> TextIO:
    """Return the stream itself, for what draws on a terminal."""
    return sys.stderr.stream if isinstance(sys.stderr, Inert) else sys.stderr


def fail(error: CkpttoolError, *, as_json: bool) -> None:
    """Say what is wrong: a sentence and a hint on stderr, or the error document on stdout."""
    if as_json and sys.stdout is not None and not _FAILED:
        facts = {"kind": error.kind, "message": sentence(error), "file": error.file, "hint": error.hint}
        write(document({"error": facts}))
        return
    lines = [_wrapped(f"ckpttool: {sentence(error)}")]
    if error.hint:
        hint = f"hint: {fitting(clean(error.hint))}"
        # What is to be pasted is not broken.
        lines.append(hint if re.match(r"hint: (ckpttool |-)", hint) else _wrapped(hint))
    _say(lines)


def _wrapped(line: str) -> str:
    from ckpttool.cli.columns import wrapped

    return wrapped(line, sys.stderr) if sys.stderr is not None and not sys.stderr.closed else line


def ended(how: str) -> None:
    """Say on stderr that the program was stopped; where the terminal has gone, to nobody."""
    with contextlib.suppress(OSError):
        _say([f"ckpttool: {how}"])


def _say(lines: list[str]) -> None:
    # Where stderr is closed or full, the exit status is all that is left.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write("".join(f"{inert(line)}\n" for line in lines))
            sys.stderr.flush()


def reader_is_gone() -> bool:
    """Say whether stdout is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False


def silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not fail once more."""
    _FAILED.append(True)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish() -> None:
    """Write out what libraries have printed; raise as `write` does."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
    if sys.stdout is None or _FAILED:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise CkpttoolError(f"cannot write to standard output: {error.strerror}") from error
