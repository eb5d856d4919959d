"""Replacement of a set of files that no index describes (NAME_actor, NAME_critic and so on).

No rename replaces several files at once, so the first file of a set stands for all of it: the formats take
nothing for a set that lacks its actor. That file is removed first and named last. Before that, every old file
gets a second name, `.NAME.ckpttool-old-TAG_actor`, and TAG contains a digest of what identifies the files
(suffix, owner, inode, size, modification time). So a complete backup is recognised without a record, and the
set is read from it if the program dies before the new first file has its name.

No file is removed or moved here that this process did not create or was not asked to replace: leftovers of an
interrupted program stay until a person removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import TargetExistsError
from ckpttool.writing import names
from ckpttool.writing.names import Written
from ckpttool.writing.publishing import flush_names

_RANDOM_BYTES = 6
_DIGEST_DIGITS = 16
_TAG = f"[0-9a-f]{{{2 * _RANDOM_BYTES + _DIGEST_DIGITS}}}"


def is_set(files: Sequence[Written]) -> bool:
    """Return whether the files are a set of one prefix that no index of theirs describes."""
    main = [file.output for file in files if not file.output.follows]
    plain = not any(output.indexes or output.extra or output.inside for output in main)
    return plain and len(main) > 1 and len({output.target for output in main}) == 1


def replace(files: Sequence[Written], *, force: bool, sync: bool) -> None:
    """Give the files of a set their names, in place of the old files if `force`.

    Raise TargetExistsError if a name is taken without `force`, or by a file that appeared meanwhile. On any
    error the old files have their names again.
    """
    first, *rest = files
    if not force:
        for file in files:
            names.require_free(file.output.file)
    base = first.output.target
    there = [file.output.file for file in files if os.path.lexists(file.output.file)]
    backup = _Backup(base, {file[len(base) :]: os.lstat(file) for file in there})
    for file in files:
        names.keep_mode(file.temporary, file.output.file)
    with contextlib.ExitStack() as undo:
        undo.callback(backup.remove)
        backup.make()
        flush_names([first], sync=sync)
        undo.callback(backup.restore)
        backup.take_names()
        flush_names([first], sync=sync)
        for file in files:
            undo.callback(file.take_back)
        for file in rest:
            file.name(force=False)
        flush_names([first], sync=sync)
        first.name(force=False)
        flush_names([first], sync=sync)
        undo.pop_all()
    backup.remove()


def backups(path: str) -> list[str]:
    """Return the prefixes under which complete backups of the set at `path` lie, the newest first.

    `path` is the set's prefix, or, where the names of its files end alike, the prefix with that ending
    (NAME.h5f for NAME_actor.h5f).
    """
    found: list[tuple[int, str]] = []
    stem, end = os.path.splitext(path)
    for base, ending in dict.fromkeys(((path, ""), (stem, end))):
        if os.path.basename(base):
            found += [(newest, prefix + ending) for newest, prefix in _complete(base)]
    return [prefix for _, prefix in sorted(found, reverse=True)]


@dataclass(slots=True)
class _Backup:
    """Second names of the old files of a set; `old` and `status` are by suffix, the first file's first."""

    base: str
    old: Mapping[str, os.stat_result]
    status: dict[str, os.stat_result] = field(default_factory=dict)
    stem: str = ""
    _random: str = field(default_factory=lambda: os.urandom(_RANDOM_BYTES).hex())

    def make(self) -> None:
        """Give every old file its second name; where the file system has no hard links, to a copy of it."""
        for suffix in self.old:
            second = self._temporary + suffix
            if not names.linked(self.base + suffix, second):
                shutil.copy2(self.base + suffix, second, follow_symlinks=False)
            self.status[suffix] = os.lstat(second)
        self.stem = names.beside(self.base, names.KEPT, _tag(self.base, self._random, self.status))
        for suffix in self.old:
            os.rename(self._temporary + suffix, self.stem + suffix)

    def take_names(self) -> None:
        """Remove the old names; raise TargetExistsError if one has got another file since."""
        for suffix, status in self.old.items():
            if not _is(self.base + suffix, status):
                raise TargetExistsError(
                    "the target changed while it was being replaced", file=self.base + suffix
                )
            os.unlink(self.base + suffix)

    def restore(self) -> None:
        """Give the old files the names that are free again, the first file last."""
        for suffix in reversed(self.status):
            if not os.path.lexists(self.base + suffix):
                os.rename(self.stem + suffix, self.base + suffix)

    def remove(self) -> None:
        """Remove the second names as far as they are this backup's."""
        files = (
            (name + end, status)
            for end, status in self.status.items()
            for name in (self._temporary, self.stem)
        )
        names.remove([file for file, status in files if _is(file, status)])

    @property
    def _temporary(self) -> str:
        return names.beside(self.base, names.TEMPORARY, self._random)


def _complete(base: str) -> list[tuple[int, str]]:
    """Return the complete backups of a prefix as (time of the last change in ns, prefix), in any order."""
    folder, begin = os.path.split(names.beside(base, names.KEPT, ""))
    pattern = re.compile(re.escape(begin) + f"({_TAG})(.+)", re.DOTALL)
    found: dict[str, dict[str, os.stat_result]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if (match := pattern.fullmatch(name)) is not None:
                found.setdefault(match[1], {})[match[2]] = os.lstat(os.path.join(folder, name))
    return [
        (max(each.st_ctime_ns for each in status.values()), os.path.join(os.path.dirname(base), begin + tag))
        for tag, status in found.items()
        if tag == _tag(base, tag[: 2 * _RANDOM_BYTES], status)
    ]


def _tag(base: str, random: str, status: Mapping[str, os.stat_result]) -> str:
    """Return the random digits and the digest of what identifies all files of a backup."""
    import hashlib  # not at the top: every command that reads imports this module

    files = [(suffix, s.st_uid, s.st_ino, s.st_size, s.st_mtime_ns) for suffix, s in sorted(status.items())]
    digest = hashlib.sha256(repr((os.path.basename(base), random, files)).encode(errors="surrogateescape"))
    return random + digest.hexdigest()[:_DIGEST_DIGITS]


def _is(file: str, status: os.stat_result) -> bool:
    """Return whether the name still has the file of which this is the status."""
    with contextlib.suppress(OSError):
        found = os.lstat(file)
        return os.path.samestat(found, status) and found.st_mtime_ns == status.st_mtime_ns
    return False
