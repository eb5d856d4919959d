"""The file that lists the checkpoints of a folder and the latest one, as TensorFlow writes it."""

from __future__ import annotations

import os
import time
from typing import IO

from ckpttool.core.atomic_write import Output
from ckpttool.core.errors import FormatError, UsageError
from ckpttool.formats import tf_common


def state_file_output(target: str) -> Output:
    """Return the updated state file beside the target, with our checkpoint as the latest.

    It is read again when written, because another program may have saved in the meantime. Raise
    UsageError at once if it is damaged.
    """
    folder, name = os.path.split(target)
    path = os.path.join(folder, tf_common.NAME)
    _read_state(path)

    def put(stream: IO[bytes]) -> None:
        stream.write(_encode_with_target(_read_state(path), folder, name))

    return Output(path, put, replaces=True)


def _encode_with_target(known: tf_common.CheckpointState, folder: str, name: str) -> bytes:
    whole = os.path.abspath(os.path.join(folder, name))
    kept = [at for at, one in enumerate(known.every) if os.path.abspath(os.path.join(folder, one)) != whole]
    # TensorFlow reads times either for none or for every checkpoint.
    times = (*(known.times[at] for at in kept), time.time()) if known.times else ()
    every = (*(known.every[at] for at in kept), name)
    return tf_common.encode_state(tf_common.CheckpointState(name, every, times, known.preserved))


def _read_state(path: str) -> tf_common.CheckpointState:
    """Return the state file's contents, including its latest checkpoint; an empty state if missing."""
    if not os.path.lexists(path):
        return tf_common.CheckpointState("", ())
    if not os.path.isfile(path):
        raise UsageError("the folder's state file is not a regular file", file=path)
    try:
        known = tf_common.read_state(path)
    except (FormatError, OSError) as error:
        reason = error.message if isinstance(error, FormatError) else error.strerror
        raise UsageError(
            f"cannot update the folder's state file: {reason}",
            file=path,
            hint="repair it, remove it, or write into another folder",
        ) from error
    return (
        known if known.latest in known.every else known._replace(every=(*known.every, known.latest), times=())
    )
