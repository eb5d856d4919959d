"""The Checkpoint record, and the only way in which anything is written: beside, checked, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Literal

from ckpttool.errors import CkpttoolError, TargetExistsError, UsageError
from ckpttool.source import File
from ckpttool.tree import Tree

TEMPORARY = ".ckpttool-tmp-"
Integrity = Literal["crc32c", "crc32", "none"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one path on disk restores.

    `path` is what was taken (a TensorFlow prefix rather than its `.index`), `files` everything that was
    read or that holds tensor bytes, `writer` what the file says about its writer, `integrity` the
    checksum that covers every tensor, `stored_nbytes` the size of the files, `notes` what a person
    should know.
    """

    path: str
    format: str
    tree: Tree
    files: tuple[File, ...]
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()

    @property
    def stored_nbytes(self) -> int:
        """The number of bytes that the checkpoint takes on disk."""
        return sum(file.size for file in self.files)


def require_new(target: str, sources: tuple[File, ...] = (), *, force: bool = False) -> None:
    """Raise unless `target` may be written: not one of the sources, and not there without `force`."""
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise UsageError("the folder to write into does not exist", file=folder)
    if not os.path.lexists(target):
        return
    for source in sources:
        with contextlib.suppress(OSError):
            if os.path.samefile(source.path, target):
                raise UsageError("source and target are the same file", file=target)
    if os.path.isdir(target):
        raise TargetExistsError("the target is a folder", file=target)
    if not force:
        raise TargetExistsError(
            "the target exists already", file=target, hint="--force replaces it"
        )


def write_atomically(
    target: str,
    write: Callable[[IO[bytes]], None],
    *,
    check: Callable[[str], None] | None = None,
    force: bool = False,
    sync: bool = True,
) -> None:
    """Write `target` through a temporary sibling, so that it is always absent, old, or whole.

    `write` fills the temporary file; `check` may reopen it by name and raise. Without `force` a target
    that appears meanwhile wins and TargetExistsError is raised. `sync` flushes file and folder to disk.
    On any failure, Ctrl-C included, the temporary file is removed and the target is as it was.
    """
    folder, name = os.path.split(os.path.abspath(target))
    temporary = os.path.join(folder, f".{name[:180]}{TEMPORARY}{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb") as stream:
            write(stream)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        if check is not None:
            check(temporary)
        _publish(temporary, target, force=force)
        if sync:
            _sync_folder(folder)
    except OSError as error:
        raise _explained(error, target) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _publish(temporary: str, target: str, *, force: bool) -> None:
    if force:
        os.replace(temporary, target)
        return
    try:
        # A hard link fails if the name is taken: of two writers exactly one wins.
        os.link(temporary, target)
    except FileExistsError as error:
        raise TargetExistsError(
            "the target exists already", file=target, hint="--force replaces it"
        ) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links on this filesystem: look, then rename.
        if os.path.lexists(target):
            raise TargetExistsError(
                "the target exists already", file=target, hint="--force replaces it"
            ) from error
        os.replace(temporary, target)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: OSError, target: str) -> CkpttoolError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError("there is no space left to write the target", file=target)
    return UsageError(f"the target cannot be written: {error.strerror}", file=target)
