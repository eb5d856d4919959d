"""Error classes: what was read, where, what was expected and found, and what to do.

CkpttoolError                 base class of all errors for the caller; the command exits with 2
|-- UsageError                the request is invalid (unknown format, impossible option)
|   `-- NameNotFoundError     no entry, or several, with that name; also a KeyError
|-- NotFoundError             the path does not exist
|   `-- DeadlineError         a server keeps the command waiting for longer than a limit allows
|-- NotACheckpointError       the path exists, but is not a known checkpoint format
|-- FormatError               the bytes break the rules of their own format
|   |-- TruncatedError        the bytes end before the length that the format declares
|   |-- ChecksumError         the bytes do not match their checksum
|   `-- LimitError            the file exceeds a parser limit (see limits.py)
|-- UnsupportedError          legal in its format, but not supported by this version
|-- ChangedError              a file changed after it was listed
|-- MappingError              the checkpoint lacks the information for a conversion
|-- TargetExistsError         the target exists and --force was not given
|-- MissingExtraError         a required library is not installed
|-- EnvironmentMismatchError  the environment does not match the agent
|-- WorkerError               a framework's separate process failed
`-- DeviceError               a GPU cannot be used, or a device has too little memory
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from ckpttool.core import urls


class CkpttoolError(Exception):
    """Base class of all errors: one sentence states what is wrong; its facts are attributes too."""

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        path: str | None = None,
        offset: int | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Store the facts: `file` on disk, `path` in the tree, `offset` in bytes from the file's start.

        URLs are stored without their secrets (urls.spelled).
        """
        super().__init__(message)
        self.message = message
        self.file = None if file is None else urls.display_url(file)
        self.path = path
        self.offset = offset
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        """Return `file: message (at byte N, expected X, found Y)` without the hint."""
        facts = [
            f"in {self.path}" if self.path else "",
            f"at byte {self.offset}" if self.offset is not None else "",
            f"expected {self.expected}" if self.expected else "",
            f"found {self.found}" if self.found else "",
        ]
        detail = ", ".join(fact for fact in facts if fact)
        head = f"{self.file}: " if self.file else ""
        return f"{head}{self.message}" + (f" ({detail})" if detail else "")

    def located(self, *, file: str | None = None, path: str | None = None) -> CkpttoolError:
        """Fill in the file or tensor path that the raiser did not have; return self."""
        self.file = self.file or (None if file is None else urls.display_url(file))
        self.path = self.path or path
        return self

    def document(self) -> dict[str, str | None]:
        """Return the JSON object of an error in a list of results."""
        return {"kind": self.kind, "message": str(self), "hint": self.hint}


@contextlib.contextmanager
def locate_errors(*, file: str | None = None, path: str | None = None) -> Iterator[None]:
    """Fill in the file or tensor path of an error that is raised in the block."""
    try:
        yield
    except CkpttoolError as error:
        raise error.located(file=file, path=path) from error.__cause__


class UsageError(CkpttoolError):
    """The request is invalid: an unknown format, an impossible combination of options."""

    kind = "usage"


class NameNotFoundError(UsageError, KeyError):
    """No entry has the name, or several entries have it; also a KeyError."""

    kind = "name_not_found"

    def __str__(self) -> str:
        """Return the sentence and the hint, because a mapping lookup has no other place for the hint."""
        sentence = CkpttoolError.__str__(self)
        return f"{sentence}; {self.hint}" if self.hint else sentence


class NotFoundError(CkpttoolError):
    """The path does not exist."""

    kind = "not_found"


class DeadlineError(NotFoundError):
    """A server keeps the command waiting for longer than the limit `fetch_seconds` allows."""

    kind = "timeout"


class NotACheckpointError(CkpttoolError):
    """The path exists, but is not a known checkpoint format."""

    kind = "not_a_checkpoint"


class FormatError(CkpttoolError):
    """The bytes break the rules of their own format."""

    kind = "format"


class TruncatedError(FormatError):
    """The bytes end before the length that the format declares, or a file of the set is missing."""

    kind = "truncated"


class ChecksumError(FormatError):
    """The bytes do not match their checksum."""

    kind = "checksum"


class LimitError(FormatError):
    """The file exceeds a parser limit on declared, repeated or unpacked data (ckpttool/core/limits.py)."""

    kind = "limit"


class UnsupportedError(CkpttoolError):
    """Legal in its format, but not supported by this version."""

    kind = "unsupported"


class ChangedError(CkpttoolError):
    """A file changed after it was listed."""

    kind = "changed"


class MappingError(CkpttoolError):
    """The checkpoint lacks the information for a conversion."""

    kind = "mapping"


class TargetExistsError(CkpttoolError):
    """The target exists and replacing it was not allowed."""

    kind = "target_exists"


class MissingExtraError(CkpttoolError):
    """A required library is not installed."""

    kind = "missing_extra"


class EnvironmentMismatchError(CkpttoolError):
    """The environment does not match the agent."""

    kind = "environment"


class WorkerError(CkpttoolError):
    """A framework's separate process failed."""

    kind = "worker"


class DeviceError(CkpttoolError):
    """A GPU cannot be used, or a device has too little memory."""

    kind = "device"


# Messages for refused system resources by errno, and the phrases in which libraries report them.
_RESOURCES = {
    errno.ENOMEM: ("out of memory", "close other programs, or raise the memory limit (ulimit -v)"),
    errno.EMFILE: ("too many open files", "raise the open-file limit (ulimit -n)"),
    errno.ENFILE: ("too many open files on this machine", None),
    errno.EAGAIN: ("cannot start more processes or threads", "raise the process limit (ulimit -u)"),
    errno.ENOSPC: ("no space left on the device", None),
    errno.EDQUOT: ("disk quota exceeded", None),
    errno.EFBIG: ("the file would exceed the file size limit", "raise the file size limit (ulimit -f)"),
}
_WORDS = {
    "cannot allocate memory": errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
    "unable to allocate": errno.ENOMEM,
    "bad_alloc": errno.ENOMEM,
    "start new thread": errno.EAGAIN,
    "too many open files": errno.EMFILE,
    "resource temporarily unavailable": errno.EAGAIN,
}


def from_system_error(error: BaseException) -> CkpttoolError | None:
    """Return the error for a refused system resource (memory, files, processes); None for others."""
    words = str(error).lower()
    number = next((number for phrase, number in _WORDS.items() if phrase in words), None)
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    elif isinstance(error, RecursionError):
        return CkpttoolError("the data is nested too deeply for Python")
    elif isinstance(error, UnicodeError):
        return CkpttoolError(
            f"cannot encode or decode text: {error.reason if hasattr(error, 'reason') else error}"
        )
    elif isinstance(error, SystemExit):
        return CkpttoolError(f"a library exited the program (status {error.code})")
    elif isinstance(error, (ImportError, RuntimeError)):
        number = number or _probe_resources()
    elif isinstance(error, OSError):
        number = number if error.errno is None else error.errno
    name = getattr(error, "filename", None)
    file = os.fsdecode(name) if isinstance(name, (str, bytes)) else None
    if number in _RESOURCES:
        message, hint = _RESOURCES[number]
        return CkpttoolError(message, file=file, hint=hint)
    if isinstance(error, OSError):
        return CkpttoolError(f"system error: {error.strerror or error}", file=file)
    return None


def is_system_error(error: CkpttoolError) -> bool:
    """Return whether the operating system refused a call, so the file's content is not the cause."""
    return isinstance(error.__cause__, OSError)


@contextlib.contextmanager
def suppress_refusals(then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Leave the block where content is refused, and call `then`; raise errors of the operating system."""
    try:
        yield
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        then()


def _probe_resources() -> int | None:
    """Return the errno of opening a file now, because imports and libraries hide the cause."""
    try:
        with open(os.devnull, "rb"):
            return None
    except OSError as error:
        return error.errno


def abbreviate_list(names: Sequence[str], most: int) -> str:
    """Return the first names of a list as text, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(*choices: str) -> str:
    """Return the question whether one of these was meant."""
    return f"did you mean {' or '.join(choices)}?"


def suggest_networks(names: Iterable[str]) -> str | None:
    """Return the hint that chooses one of several networks, as options; None without names."""
    import shlex

    return " or ".join(f"--network {shlex.quote(name)}" for name in names) or None


def suggest_choice(word: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: the closest choice, then all of them."""
    import difflib

    choices = list(known)
    close = difflib.get_close_matches(word, choices, 1)
    suggestion = f"{did_you_mean(close[0])} " if close else ""
    return f"{suggestion}{'the only choice is' if len(choices) == 1 else 'choose from'} {', '.join(choices)}"
