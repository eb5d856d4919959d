"""The order in which files that belong together get their names, so that one step makes all of them count.

That step is the renaming of the index, or of the only file. Parts come before it under names that the old
index does not list. A receipt, which contains the digest of its weights, keeps its temporary name until then:
readers find it there by the digest (names.waiting).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckpttool import behind
from ckpttool.writing import names
from ckpttool.writing.names import Written


def publish(
    files: Sequence[Written], *, force: bool, sync: bool, replaced: Callable[[], Sequence[str]]
) -> None:
    """Give files their names; the last one that does not follow the others is the step that counts.

    Before that step an error takes back what was named, and the old files are whole; after it the new ones
    are. The files that `replaced` returns, which the old index lists, are removed unless they were replaced.
    """
    followers = [file for file in files if file.output.follows]
    extra = [file for file in files if file.output.extra]
    main: Sequence[Written] = [
        *{file.whole: file for file in files if file not in followers and file not in extra}.values()
    ]
    if not force:
        for file in (*main, *followers):
            names.require_free(file.whole[1])
    old = {os.path.abspath(file) for file in replaced()} if force else set()
    if extra and old.intersection(os.path.abspath(file.output.file) for file in main[:-1]):
        main = _by_way_of(main, extra, followers, sync=sync)
    else:
        _commit(main, followers, force=force, sync=sync)
    if followers or old:
        flush_names(main[-1:], sync=sync)
    for file in followers:
        file.name(force=force)
    names.remove(sorted(old - {os.path.abspath(file.output.file) for file in main}))


def flush_names(files: Sequence[Written], *, sync: bool) -> None:
    """Flush the folders that contain the files' names to the disk."""
    for folder in {file.folder for file in files} if sync else ():
        behind.sync(folder)


def _commit(main: Sequence[Written], followers: Sequence[Written], *, force: bool, sync: bool) -> None:
    *parts, last = main
    try:
        for file in parts:
            file.name(force=force)
        flush_names([*parts, *followers], sync=sync)
        last.name(force=force)
    except BaseException:
        if not last.stands():
            for file in parts:
                file.take_back()
        raise
    finally:
        for file in followers:
            file.waits = last.stands()


def _by_way_of(
    main: Sequence[Written], extra: Sequence[Written], followers: Sequence[Written], *, sync: bool
) -> Sequence[Written]:
    """Replace a set whose parts have the same names: first the new one stands under others, then under these.

    The parts are linked, not written again. Return the files that stand in the end: without hard links those
    of the other names, which are as good.
    """
    *parts, last = main
    stem = names.temporary(last.output.target)
    between = [Written(file.output._replace(suffix=file.output.meanwhile), stem) for file in (*parts, *extra)]
    for file in between[:-1]:
        names.require_free(file.output.file, "the new files need that name for a moment: move it away")
    try:
        both = not [1 for file, other in zip(parts, between, strict=False) if not _second(file, other)]
        with behind.Lane() as disk:
            for file in between[len(parts) :]:
                file.fill(disk if sync else None)
        _commit(between, followers, force=True, sync=sync)
        flush_names([last], sync=sync)
    finally:
        names.remove(file.temporary for file in between)
    if not both:
        return between
    for file in parts:
        file.name(force=True)
    flush_names(parts, sync=sync)
    last.name(force=True)
    flush_names([last], sync=sync)  # before the files of the other names go
    names.remove(file.output.file for file in between[:-1] if file.stands())
    return main


def _second(file: Written, other: Written) -> bool:
    """Give a part's bytes the other temporary name too; return whether it has both."""
    if names.linked(file.temporary, other.temporary):
        return True
    os.rename(file.temporary, other.temporary)
    return False
