"""The family of errors: what was being read, where, what was expected, what was found, what helps.

CkpttoolError                 anything the caller must hear about; the command exits with 2
|-- UsageError                the request makes no sense (unknown format, impossible option)
|   `-- NameNotFoundError     nothing in the checkpoint has that name, or several entries do; a KeyError too
|-- NotFoundError             nothing is at the path
|   `-- DeadlineError         a server keeps the command waiting for longer than a limit allows
|-- NotACheckpointError       something is at the path, and it is no checkpoint that we know
|-- FormatError               the bytes break the rules of their own format
|   |-- TruncatedError        the bytes end before the format says they do
|   |-- ChecksumError         the bytes are there, their checksum says they are not the ones written
|   `-- LimitError            the file asks for more than a reader gives it (see limits.py)
|-- UnsupportedError          legal in its format, but not something that this version can do
|-- ChangedError              a file is no longer the one that was listed
|-- MappingError              a conversion cannot be known from what the checkpoint says
|-- TargetExistsError         a target is in the way and --force was not given
|-- MissingExtraError         the job needs a library that is not installed
|-- EnvironmentMismatchError  the environment and the agent do not fit together
|-- WorkerError               a framework's own process failed
`-- DeviceError               a GPU cannot be used, or the memory of a device is too small
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ckpttool.core import urls


class CkpttoolError(Exception):
    """Say in one sentence what is wrong; every fact in the sentence is an attribute too."""

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
        """Keep the facts: `file` on disk, `path` in the tree, `offset` in bytes from the file's start.

        Of a URL nothing is kept that must not be shown (urls.spelled).
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
        """Fill in the file or the tensor path where the raiser could not know it; return self."""
        self.file = self.file or (None if file is None else urls.display_url(file))
        self.path = self.path or path
        return self


class UsageError(CkpttoolError):
    """The request makes no sense: an unknown format, an impossible combination of options."""

    kind = "usage"


class NameNotFoundError(UsageError, KeyError):
    """Nothing in the checkpoint has the name, or several entries have; a KeyError for programs that ask."""

    kind = "name_not_found"

    def __str__(self) -> str:
        """Return the sentence and the hint: where a mapping is asked there is no other place for it."""
        told = CkpttoolError.__str__(self)
        return f"{told}; {self.hint}" if self.hint else told


class NotFoundError(CkpttoolError):
    """Nothing is at the path."""

    kind = "not_found"


class DeadlineError(NotFoundError):
    """A server keeps the command waiting for longer than the limit `fetch_seconds` allows."""

    kind = "timeout"


class NotACheckpointError(CkpttoolError):
    """Something is at the path, and it is no checkpoint that we know."""

    kind = "not_a_checkpoint"


class FormatError(CkpttoolError):
    """The bytes break the rules of their own format."""

    kind = "format"


class TruncatedError(FormatError):
    """The bytes end before the format says they do, or a file of the set is missing."""

    kind = "truncated"


class ChecksumError(FormatError):
    """The bytes are there, but their checksum says that they are not the ones written."""

    kind = "checksum"


class LimitError(FormatError):
    """The file declares, repeats or unpacks to more than a limit allows (ckpttool/core/limits.py)."""

    kind = "limit"


class UnsupportedError(CkpttoolError):
    """Legal in its format, but not something that this version can do."""

    kind = "unsupported"


class ChangedError(CkpttoolError):
    """A file is no longer the one that was listed."""

    kind = "changed"


class MappingError(CkpttoolError):
    """A conversion cannot be known from what the checkpoint says."""

    kind = "mapping"


class TargetExistsError(CkpttoolError):
    """A target is in the way and nobody said that it may be replaced."""

    kind = "target_exists"


class MissingExtraError(CkpttoolError):
    """The job needs a library that is not installed."""

    kind = "missing_extra"


class EnvironmentMismatchError(CkpttoolError):
    """The environment and the agent do not fit together."""

    kind = "environment"


class WorkerError(CkpttoolError):
    """A framework's own process failed."""

    kind = "worker"


class DeviceError(CkpttoolError):
    """A GPU cannot be used, or the memory of a device is too small."""

    kind = "device"


# What the system's refusal of a resource is called, by errno; and the words by which libraries pass one on.
_RESOURCES = {
    errno.ENOMEM: ("out of memory", "close other programs, or raise the limit of memory (ulimit -v)"),
    errno.EMFILE: ("too many open files", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("too many open files on this machine", None),
    errno.EAGAIN: ("no more processes or threads can be started", "raise their limit (ulimit -u)"),
    errno.ENOSPC: ("no space left on the device", None),
    errno.EDQUOT: ("the disk quota is exceeded", None),
    errno.EFBIG: ("the file would be larger than allowed", "raise the limit of file sizes (ulimit -f)"),
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
    """Return the error for what the system refused (memory, files, processes); None for any other."""
    words = str(error).lower()
    number = next((number for said, number in _WORDS.items() if said in words), None)
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    elif isinstance(error, RecursionError):
        return CkpttoolError("the data nests deeper than Python can follow")
    elif isinstance(error, UnicodeError):
        return CkpttoolError(
            f"a text cannot be encoded or decoded: {error.reason if hasattr(error, 'reason') else error}"
        )
    elif isinstance(error, SystemExit):
        return CkpttoolError(f"a library ended the program (status {error.code})")
    elif isinstance(error, (ImportError, RuntimeError)):
        number = number or _probe_resources()
    elif isinstance(error, OSError):
        number = number if error.errno is None else error.errno
    file = _path_text(getattr(error, "filename", None))
    if number in _RESOURCES:
        message, hint = _RESOURCES[number]
        return CkpttoolError(message, file=file, hint=hint)
    if isinstance(error, OSError):
        return CkpttoolError(f"the system refuses: {error.strerror or error}", file=file)
    return None


def is_system_error(error: CkpttoolError) -> bool:
    """Return whether the operating system refused a call, which says nothing of a file's content."""
    return isinstance(error.__cause__, OSError)


def _probe_resources() -> int | None:
    """Return the errno of opening a file now: imports and libraries do not say why they failed."""
    try:
        with open(os.devnull, "rb"):
            return None
    except OSError as error:
        return error.errno


def _path_text(name: object) -> str | None:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None


def abbreviate_list(names: Sequence[str], most: int) -> str:
    """Return the first names of a list for a sentence, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def suggest_choice(word: str, known: Iterable[str]) -> str:
    """Return the hint for a word that is none of those known: the one that was meant, then all."""
    import difflib

    words = list(known)
    close = difflib.get_close_matches(word, words, 1)
    meant = f"did you mean {close[0]}; " if close else ""
    return f"{meant}there {'is' if len(words) == 1 else 'are'} {', '.join(words)}"
