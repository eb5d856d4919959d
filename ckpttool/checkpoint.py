"""The Checkpoint record, and the only way in which anything is written: beside, checked, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NamedTuple

from ckpttool import behind
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
    should know. `details` is what only this format has to say (a SavedModel's signatures), as JSON values;
    docs/json.md describes it.
    """

    path: str
    format: str
    tree: Tree
    files: tuple[File, ...]
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stored_nbytes(self) -> int:
        """The number of bytes that the checkpoint takes on disk."""
        return sum(file.size for file in self.files)


def require_new(
    target: str, sources: tuple[File, ...] = (), *, force: bool = False, hint: str = "--force replaces it"
) -> None:
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
    if os.path.exists(target) and not os.path.isfile(target):
        # --force would replace the device itself.
        raise TargetExistsError("the target is a device, socket or pipe", file=target)
    if not force:
        raise TargetExistsError("the target exists already", file=target, hint=hint)


class Output(NamedTuple):
    """One file to write, `target` and `suffix` together; `write` fills it.

    Large buffers are written behind `write`, which must not change them once it has written them.
    Files of one target are written under one temporary stem with their own suffixes, so that `check`, called
    with that stem when this file and those before it are filled, may open them as what they will be; it
    raises if they are wrong. A suffix that begins with a slash is a file in the folder `target`, which gets
    its name as a whole. `replaces` says that the file may be there already (a state file that is
    brought up to date).
    """

    target: str
    write: Callable[[IO[bytes]], None]
    check: Callable[[str], None] | None = None
    suffix: str = ""
    replaces: bool = False

    @property
    def file(self) -> str:
        """The name that the file will have."""
        return self.target + self.suffix

    @property
    def inside(self) -> bool:
        """Whether the target is a folder that the file lies in."""
        return self.suffix.startswith(os.sep)


def write_atomically(outputs: Sequence[Output], *, force: bool = False, sync: bool = True) -> None:
    """Write files through temporary siblings, so that each is always absent, old, or whole.

    All are written and checked before the first one gets its name; they get their names in order, an
    index or a receipt last. Without `force` a target that appears meanwhile wins and TargetExistsError
    is raised. `sync` flushes files and folders to disk. On any failure, Ctrl-C included, the temporary
    files are removed, and so are the targets that this call has made.
    """
    stems = {target: _temporary(target) for target in dict.fromkeys(output.target for output in outputs)}
    temporaries = [stems[output.target] + output.suffix for output in outputs]
    published: list[str] = []
    file = outputs[0].file
    try:
        # What is written goes to the disk while it is read back.
        with behind.Lane() as disk:
            for output, temporary in zip(outputs, temporaries, strict=True):
                file = output.file
                os.makedirs(os.path.dirname(temporary), exist_ok=True)
                with behind.new_file(temporary, disk if sync else None) as stream:
                    output.write(stream)
                if output.check is not None:
                    output.check(stems[output.target])
        for output in outputs:
            file = output.file
            _name(output, stems[output.target], published, force=force)
        if sync:
            for folder in {os.path.dirname(os.path.abspath(output.file)) for output in outputs}:
                behind.sync(folder)
    except BaseException as error:
        if not force:
            _remove(published)
        if isinstance(error, OSError):
            raise _explained(error, file) from error
        raise
    finally:
        _remove([*temporaries, *(stems[output.target] for output in outputs if output.inside)])


def _temporary(target: str) -> str:
    folder, name = os.path.split(os.path.abspath(target))
    return os.path.join(folder, f".{name[:180]}{TEMPORARY}{os.urandom(6).hex()}")


def _remove(files: Sequence[str]) -> None:
    for file in files:
        if os.path.isdir(file) and not os.path.islink(file):
            shutil.rmtree(file, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            os.unlink(file)


def _name(output: Output, stem: str, published: list[str], *, force: bool) -> None:
    """Give a file its name, or the folder that it lies in; `published` gets what may be removed again."""
    if output.inside:
        if output.target not in published:
            _publish_folder(stem, output.target)
            published.append(output.target)
        return
    _publish(stem + output.suffix, output.file, force=force or output.replaces)
    if not output.replaces:
        published.append(output.file)


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


def _publish_folder(temporary: str, target: str) -> None:
    # A folder is never replaced: what else it holds is nobody's business. `rename` would take an empty one.
    if os.path.lexists(target):
        raise TargetExistsError("the target exists already", file=target, hint="take another name")
    os.rename(temporary, target)


def _explained(error: OSError, target: str) -> CkpttoolError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError("there is no space left to write the target", file=target)
    return UsageError(f"the target cannot be written: {error.strerror}", file=target)
