"""Program output: one JSON document or text without control characters, one sentence per error."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TextIO, cast

from ckpttool.cli.styles import adopt_rich_styles, escape_controls, has_colors, wrap_sentence
from ckpttool.core import deferred, text
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.text import clean, describe_error, truncate_text
from ckpttool.version import __version__

SCHEMA = 1

# Not empty once stdout has failed.
_FAILED: list[bool] = []

# Maximum number of objects in a list that are shown with one line per value.
_MANY = 20_000
# How many of them are written at once.
_PIECE = 1_000


def render_document(content: dict[str, Any]) -> str:
    """Return the JSON document of a command: schema, tool version, then the content."""
    return "".join(_iter_document(content))


def print_document(content: dict[str, Any]) -> None:
    """Print the JSON document of a command piece by piece; raise as `print_text`."""
    _write_pieces(_iter_document(content))


def _iter_document(content: dict[str, Any]) -> Iterator[str]:
    start = "{\n"
    for name, item in {"schema": SCHEMA, "tool": f"ckpttool {__version__}", **content}.items():
        yield f"{start} {json.dumps(name)}: "
        yield from _iter_member(item)
        start = ",\n"
    yield "\n}"


def _iter_member(value: Any) -> Iterator[str]:
    """Yield a document's member with one line per value, or one per object of a very long list.

    One line per value would take ten times as long, and all memory for a hundred thousand tensors.
    """
    if not isinstance(value, list | tuple) or len(value) <= _MANY:
        yield _dump_json(value, indent=1).replace("\n", "\n ")
        return
    for start in range(0, len(value), _PIECE):
        yield ",\n  " if start else "[\n  "
        yield ",\n  ".join(_dump_json(item) for item in value[start : start + _PIECE])
    yield "\n ]"


def _dump_json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=_document)
    except ValueError:
        whole = json.loads(json.dumps(value, default=_document))
        return json.dumps(text.replace_nonfinite(whole), indent=indent, allow_nan=False)


def _document(record: Any) -> Any:
    """Return the JSON object of a record."""
    return record.document()


def suggests_commands(*, quiet: bool) -> bool:
    """Return whether the next commands (`next_steps`) are printed: on a terminal, never into a pipe."""
    return not quiet and sys.stdout.isatty()


def print_text(text: str) -> None:
    """Print the text to stdout, if there is any; escape what the terminal's encoding lacks.

    Raise BrokenPipeError when the reader has closed the pipe, and CkpttoolError when writing to stdout
    fails for another reason.
    """
    if text:
        _write_pieces((text,))


def _write_pieces(pieces: Iterable[str]) -> None:
    require_stdout()
    encoding, styles = sys.stdout.encoding or "utf-8", has_colors()
    try:
        sys.stdout.flush()
        for piece in chain(pieces, ("\n",)):
            data = escape_controls(piece, styles=styles).encode(encoding, "backslashreplace")
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise CkpttoolError(f"cannot write to standard output: {error.strerror}") from error


def page_text(text: str) -> None:
    """Print the text; on a terminal that it does not fit, through $PAGER (less by default, cat for none)."""
    height, keyboard = terminal_height(), sys.stdin is not None and sys.stdin.isatty()
    long = height is not None and text.count("\n") >= height
    command = shlex.split(os.environ.get("PAGER") or "less")
    plain = command[:1] in ([], ["cat"])
    if not (long and keyboard) or plain or not _run_pager(command, text):
        print_text(text)


def _run_pager(command: list[str], text: str) -> bool:
    """Return whether the pager could be started; wait until the user leaves it."""
    import subprocess

    # F: leave at once if the text fits; R: show colors; X: leave the text on the screen.
    environment = {"LESS": "FRX", **os.environ}
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603  # the user's own
    except OSError:
        return False
    data = (escape_controls(text, styles=has_colors()) + "\n").encode("utf-8", "backslashreplace")
    while True:
        try:
            pager.communicate(data)
        except KeyboardInterrupt:
            continue  # the pager handles Ctrl-C itself
        return True


def terminal_height() -> int | None:
    """Return the number of lines of the terminal or of LINES; None if stdout is no terminal."""
    return shutil.get_terminal_size((80, 24)).lines if sys.stdout.isatty() else None


def require_stdout() -> None:
    """Raise CkpttoolError if stdout is closed or has failed before."""
    if sys.stdout is None or _FAILED:
        raise CkpttoolError(
            "cannot write to standard output: it is closed", hint="use > /dev/null to discard the output"
        )


class EscapingStream:
    """Stream for libraries' prints and warnings; control characters are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute of the wrapped stream, for everything except writing."""
        if name in ("write", "writelines", "stream", "__class__", "__dict__"):
            return super().__getattribute__(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text with control characters escaped."""
        self.stream.write(text if text.isprintable() else escape_controls(text.expandtabs()))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)


class _RichCapture(io.StringIO):
    """Buffer for rich's output, in color if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    # rich chooses box characters by the stream's encoding.
    encoding = property(lambda self: self.stream.encoding)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self.stream.isatty()


@contextlib.contextmanager
def render_with_rich() -> Iterator[None]:
    """Let rich print our own text, such as --help; its styles reach the terminal like those of `style`."""
    require_stdout()
    before, drawn = sys.stdout, _RichCapture(sys.stdout)
    # typer's help reads only one of the variables that force colors.
    forced = os.environ.get("FORCE_COLOR")
    if forced is None and has_colors() and not sys.stdout.isatty():
        os.environ["FORCE_COLOR"] = "1"
    sys.stdout = drawn
    try:
        yield
    finally:
        sys.stdout = before
        if forced is None:
            os.environ.pop("FORCE_COLOR", None)
    print_text(adopt_rich_styles(drawn.getvalue()).removesuffix("\n"))


def guard_streams() -> None:
    """Wrap stdout and stderr in `EscapingStream` and replace closed descriptors.

    Otherwise the first file opened would get a closed descriptor's number, and with it what libraries
    print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)  # the lowest free number
    _FAILED.clear()
    sys.stdout, sys.stderr = (
        stream
        if stream is None or isinstance(stream, EscapingStream)
        else cast(TextIO, EscapingStream(stream))
        for stream in (sys.stdout, sys.stderr)
    )


def is_stderr_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def raw_stderr() -> TextIO:
    """Return the unwrapped stderr, for code that draws on a terminal."""
    return sys.stderr.stream if isinstance(sys.stderr, EscapingStream) else sys.stderr


# How commands, and the options to add to one, begin.
_PASTED = deferred.compile(r"(?<=: )(?:--?[a-z]|(?:ckpttool|pipx?|uvx?|\S+ -m pip) )")


def print_error(error: CkpttoolError, *, as_json: bool) -> None:
    """Print the error and its hint to stderr, or the error document to stdout."""
    if as_json and sys.stdout is not None and not _FAILED:
        facts = {"kind": error.kind, "message": describe_error(error), "file": error.file, "hint": error.hint}
        print_text(render_document({"error": facts}))
        return
    lines = [_wrap_for_stderr(f"ckpttool: {describe_error(error)}")]
    if error.hint:
        from ckpttool.core.installation import name_program

        hint = f"hint: {name_program(truncate_text(clean(error.hint)))}"
        # What is meant to be pasted is not wrapped; behind a sentence, it is on a separate line.
        wrapped, command = _wrap_for_stderr(hint), _PASTED.search(hint)
        if command is not None and wrapped != hint:
            head, rest = hint[: command.start()].rstrip(), hint[command.start() :]
            wrapped = hint if head == "hint:" else f"{_wrap_for_stderr(head)}\n    {rest}"
        lines.append(wrapped)
    _write_stderr(lines)


def _wrap_for_stderr(line: str) -> str:

    return wrap_sentence(line, sys.stderr) if sys.stderr is not None and not sys.stderr.closed else line


def print_interruption(how: str) -> None:
    """Report on stderr that the program was stopped; ignore a closed terminal."""
    with contextlib.suppress(OSError):
        _write_stderr([f"ckpttool: {how}"])


def print_note(line: str) -> None:
    """Print a line to stderr."""
    _write_stderr([line])


def _write_stderr(lines: list[str]) -> None:
    # If stderr is closed or full, only the exit status remains.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write("".join(f"{escape_controls(line)}\n" for line in lines))
            sys.stderr.flush()


def is_reader_gone() -> bool:
    """Return whether stdout is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False


def silence_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's final flush does not fail again."""
    _FAILED.append(True)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_streams() -> None:
    """Flush what libraries have printed; raise as `write` does."""
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
