"""The file that names a folder's checkpoints, the latest among them, as TensorFlow keeps it beside them."""

from __future__ import annotations

import os
import time
from typing import IO

from ckpttool.errors import FormatError, UsageError
from ckpttool.formats import checkpoint_state
from ckpttool.writing import Output


def brought_up_to_date(target: str) -> Output:
    """Return the state file beside the target, brought up to date: ours is the latest of those it names.

    It is read once more when it is written, because another program may have saved in the meantime. Raise
    UsageError at once if it is damaged.
    """
    folder, name = os.path.split(target)
    path = os.path.join(folder, checkpoint_state.NAME)
    _known_state(path)
    return Output(
        path, lambda stream: _write(stream, _with_ours(_known_state(path), folder, name)), replaces=True
    )


def _with_ours(known: checkpoint_state.State, folder: str, name: str) -> bytes:
    whole = os.path.abspath(os.path.join(folder, name))
    kept = [at for at, one in enumerate(known.every) if os.path.abspath(os.path.join(folder, one)) != whole]
    # Without times TensorFlow takes none for any; with them it needs one for each.
    times = (*(known.times[at] for at in kept), time.time()) if known.times else ()
    every = (*(known.every[at] for at in kept), name)
    return checkpoint_state.encode(checkpoint_state.State(name, every, times, known.preserved))


def _known_state(path: str) -> checkpoint_state.State:
    """Return what the state file says, its latest checkpoint among all; an empty state if there is none."""
    if not os.path.lexists(path):
        return checkpoint_state.State("", ())
    if not os.path.isfile(path):
        raise UsageError("the folder's state file is not a file", file=path)
    try:
        known = checkpoint_state.read(path)
    except (FormatError, OSError) as error:
        reason = error.message if isinstance(error, FormatError) else error.strerror
        raise UsageError(
            f"the folder's state file cannot be brought up to date: {reason}",
            file=path,
            hint="mend it, remove it, or write into another folder",
        ) from error
    return (
        known if known.latest in known.every else known._replace(every=(*known.every, known.latest), times=())
    )


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
