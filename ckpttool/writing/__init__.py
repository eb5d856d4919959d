"""The only way in which anything is written: beside, checked, then named (see names, sets and room)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from ckpttool import behind, urls
from ckpttool.errors import TargetExistsError, UsageError
from ckpttool.source import File
from ckpttool.writing import names, publishing, room, sets
from ckpttool.writing.names import Written, hidden, remove, require_regular
from ckpttool.writing.outputs import Output

__all__ = ["Output", "hidden", "require_new", "write_atomically"]


def require_new(
    target: str, sources: tuple[File, ...] = (), *, force: bool = False, hint: str = "--force replaces it"
) -> None:
    """Raise unless `target` may be written: not one of the sources, and not there without `force`."""
    if urls.is_url(target):
        raise UsageError(
            "a URL is read, not written", file=target, hint="write to a local path and upload that"
        )
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise UsageError("the folder to write into does not exist", file=folder)
    require_regular(target)
    if not os.path.lexists(target):
        return
    for source in sources:
        with contextlib.suppress(OSError):
            if os.path.samefile(source.path, target):
                raise UsageError("source and target are the same file", file=target)
    if os.path.isdir(target):
        raise TargetExistsError("the target is a folder", file=target)
    if not force:
        raise TargetExistsError("the target exists already", file=target, hint=hint)


def write_atomically(
    outputs: Sequence[Output],
    *,
    force: bool = False,
    sync: bool = True,
    sources: Sequence[File] = (),
    replaced: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Write files through temporary siblings: what stands at the target is always absent, old, or whole.

    All are written and checked before the first one gets its name. Without `force` a target that appears
    meanwhile wins and TargetExistsError is raised. `sync` flushes files and folders to disk. `sources` are
    what is read: ChangedError is raised unless they are then still what they were. `replaced` returns the
    files that the target has now, so that none of them outlives a new set. On any failure, Ctrl-C included,
    the temporary files are removed, and what stood at the target stands there.
    """
    for output in outputs:
        require_regular(output.target if output.inside else output.file)
    room.require(outputs)
    stems = {target: names.temporary(target) for target in dict.fromkeys(output.target for output in outputs)}
    files = [Written(output, stems[output.target]) for output in outputs]
    at = outputs[0].file
    try:
        # What is written goes to the disk while it is read back.
        with behind.Lane() as disk:
            for file in files:
                at = file.output.file
                if not file.output.replaces and not file.output.extra:
                    file.fill(disk if sync else None)
        for source in sources:
            source.require_unchanged()
        at = outputs[0].file
        with names.alone(file.folder for file in files):
            _name(files, force=force, sync=sync, replaced=replaced)
    except OSError as error:
        raise room.explained(error, at, outputs, (file.temporary for file in files)) from error
    finally:
        remove(file.rest for file in files if file.rest is not None)


def _name(files: list[Written], *, force: bool, sync: bool, replaced: Callable[[], Sequence[str]]) -> None:
    """Give all files their names; those that several programs bring up to date are filled now, and last."""
    shared = [file for file in files if file.output.replaces]
    own = [file for file in files if not file.output.replaces]
    try:
        if sets.is_set(own):
            sets.replace(own, force=force, sync=sync)
        else:
            publishing.publish(own, force=force, sync=sync, replaced=replaced)
        for file in shared:
            with behind.Lane() as disk:
                file.fill(disk if sync else None)
            file.name(force=True)
        if not shared:
            publishing.flush_names(own, sync=sync)
    except BaseException:
        # A state file that has its name lists the checkpoint, which then stays.
        if not force and not any(file.stands() for file in shared):
            for file in reversed(own):
                file.take_back()
        raise
    if shared:
        publishing.flush_names(files, sync=sync)
