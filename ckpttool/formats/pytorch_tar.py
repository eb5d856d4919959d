"""The tar archive of PyTorch's first releases (torch.save before 0.1.10): recognised, listed.

Source: torch/serialization.py of those releases (_save) and legacy_load in today's.
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.probe import Probe
from ckpttool.source import File
from ckpttool.wire import tar

NAME = "pytorch_tar"
TITLE = "PyTorch checkpoint (tar archive, before 0.1.10)"
WRITES = False
FRAMEWORK = "torch"

_FIRST = "sys_info"


def claims(probe: Probe) -> str | None:
    """Return the path of a tar archive whose first member is `sys_info`."""
    if not tar.is_start(probe.head):
        return None
    try:
        return probe.path if tar.first(File.stamp(probe.path)) == _FIRST else None
    except CkpttoolError:
        return probe.path if probe.head.startswith(f"{_FIRST}\0".encode()) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the archive; nothing is extracted, imported or called.

    Raise FormatError when its members do not fit together.
    """
    # Not at the top: every command asks `claims`.
    from ckpttool.formats.torch_pickle import tar as members

    file = File.stamp(location)
    try:
        found = members.listed(file)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.checkpoint(location, NAME, file)
