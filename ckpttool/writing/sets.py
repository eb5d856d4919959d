"""Sets of files without an index (NAME_actor, NAME_critic), which no rename can replace together.

While one is replaced, a record lies beside it (`.NAME.ckpttool-swap`). It names the old files, which then
have second names, and the new ones. All old names are taken away before the first new one is given, so that
no program finds files of both; the record's removal makes the new set count. Whoever dies in between leaves
the record: until somebody writes to that name, which first puts the old files back, the set is read from the
names that were kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool import behind, documents
from ckpttool.errors import FormatError, NotFoundError
from ckpttool.writing import names
from ckpttool.writing.names import Written

_RECORD = ".ckpttool-swap"
_SCHEMA = 1


class _Swap(NamedTuple):
    """A replacement that is going on: the set's prefix, all its names, the old ones' second names."""

    base: str
    stem: str
    names: tuple[str, ...]
    kept: Mapping[str, str]

    def at(self, name: str) -> str:
        """Return where a name of the folder is."""
        return os.path.join(os.path.dirname(os.path.abspath(self.base)), name)


def is_set(files: Sequence[Written]) -> bool:
    """Say whether the files are a set of one prefix that no index of theirs describes."""
    main = [file.output for file in files if not file.output.follows]
    plain = not any(output.indexes or output.extra or output.inside for output in main)
    return plain and len(main) > 1 and len({output.target for output in main}) == 1


def swap(files: Sequence[Written], *, force: bool, sync: bool) -> None:
    """Give the files of a set their names in place of the old ones; on an error the old ones are put back."""
    base = files[0].output.target
    _restore(base)
    _remove_rest(base)
    if not force:
        for file in files:
            names.require_free(file.output.file)
    found = [os.path.basename(file.output.file) for file in files]
    stem = names.beside(base, names.KEPT, os.urandom(6).hex())
    own = len(os.path.basename(base))
    kept = {
        name: os.path.basename(stem) + name[own:]
        for name, file in zip(found, files, strict=True)
        if os.path.lexists(file.output.file)
    }
    change = _Swap(base, os.path.basename(stem), tuple(found), kept)
    try:
        for file in files:
            names.keep_mode(file.temporary, file.output.file)
        both = _linked(change)
        _record(change, sync=sync)
        for name, second in kept.items():
            if both:
                os.unlink(change.at(name))
            else:
                os.rename(change.at(name), change.at(second))
        for file in files:
            file.name(force=False)
        _settled(base, sync=sync)
        os.unlink(_record_of(base))
        _settled(base, sync=sync)
    except BaseException:
        _restore(base)  # if this fails too, the record and what it names stay
        names.remove(change.at(second) for second in kept.values())
        raise
    names.remove(change.at(second) for second in kept.values())


def restore(base: str) -> None:
    """Put a prefix's old files back if their replacement was cut short; one that goes on is waited for."""
    if os.path.lexists(_record_of(base)):
        with names.alone([os.path.dirname(os.path.abspath(base))]):
            _restore(base)


def kept(path: str) -> str | None:
    """Return the prefix by which the old files of a set are read whose replacement was cut short, else None.

    Raise NotFoundError if there were none: the set was never whole.
    """
    if os.path.lexists(path):
        return None  # the name of a file is the prefix of no set
    stem, end = os.path.splitext(path)
    for base in dict.fromkeys((path, stem)):
        change = _read(base) if os.path.basename(base) else None
        # NAME.h5f stands for NAME_actor.h5f and others.
        if change is None or (base != path and not any(name.endswith(end) for name in change.names)):
            continue
        if not change.kept:
            raise NotFoundError("its conversion was cut short", file=path, hint="convert once more")
        if not all(os.path.lexists(change.at(second)) for second in change.kept.values()):
            raise NotFoundError(
                "its replacement was cut short",
                file=path,
                hint="ckpttool convert onto this name, even without --force, first puts the old files back",
            )
        return os.path.join(os.path.dirname(path), change.stem)
    return None


def _restore(base: str) -> None:
    """Put the old files back: no new name is left before the first old one is there again."""
    change = _read(base)
    if change is None:
        return
    for name in change.names:
        second = change.kept.get(name)
        if second is None or (os.path.lexists(change.at(second)) and not _same(change, name, second)):
            names.remove([change.at(name)])
    for name, second in change.kept.items():
        if not os.path.lexists(change.at(name)):
            os.rename(change.at(second), change.at(name))
    behind.sync(os.path.dirname(os.path.abspath(base)))
    os.unlink(_record_of(base))
    names.remove(change.at(second) for second in change.kept.values())


def _remove_rest(base: str) -> None:
    """Remove second names that no record knows: of a replacement that ended before or after the record."""
    folder, begin = os.path.split(names.beside(base, names.KEPT, ""))
    if os.path.basename(base) in begin:  # not shortened: nobody else's
        names.remove(os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(begin))


def _same(change: _Swap, name: str, second: str) -> bool:
    if not os.path.lexists(change.at(name)):
        return False
    return os.path.samestat(os.lstat(change.at(name)), os.lstat(change.at(second)))


def _linked(change: _Swap) -> bool:
    """Give every old file its second name; return False where the file system has no hard links."""
    return not [
        1 for name, second in change.kept.items() if not names.linked(change.at(name), change.at(second))
    ]


def _settled(base: str, *, sync: bool) -> None:
    if sync:
        behind.sync(os.path.dirname(os.path.abspath(base)))


def _record_of(base: str) -> str:
    return names.beside(base, _RECORD, "")


def _record(change: _Swap, *, sync: bool) -> None:
    document = {"schema": _SCHEMA, "stem": change.stem, "names": change.names, "kept": change.kept}
    temporary = names.temporary(change.base)
    try:
        with behind.Lane() as disk, behind.new_file(temporary, disk if sync else None) as stream:
            stream.write(json.dumps(document).encode())
        os.rename(temporary, _record_of(change.base))
        _settled(change.base, sync=sync)
    finally:
        names.remove([temporary])


def _read(base: str) -> _Swap | None:
    """Return what the record beside the prefix says; raise FormatError for names that are none of its own."""
    file = _record_of(base)
    if not os.path.isfile(file):
        return None
    found: Mapping[str, Any] = documents.load(file, "the record of a replacement")
    own, stem, every, second = (
        os.path.basename(base),
        found.get("stem"),
        found.get("names"),
        found.get("kept"),
    )
    if (
        found.get("schema") == _SCHEMA
        and isinstance(stem, str)
        and isinstance(every, list)
        and isinstance(second, dict)
        and stem.startswith(os.path.basename(names.beside(base, names.KEPT, "")))
        and all(isinstance(name, str) and name.startswith(own) and os.sep not in name for name in every)
        and all(name in every and at == stem + name[len(own) :] for name, at in second.items())
        and os.sep not in stem
    ):
        return _Swap(base, stem, tuple(every), second)
    raise FormatError("the record of a replacement is damaged", file=file, hint="remove it")
