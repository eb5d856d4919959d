"""PyTorch's stream of pickles and storages (torch.save before 1.6, and later on request): recognised, listed.

Source: torch/serialization.py (_legacy_save, _legacy_load).
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.probe import Probe
from ckpttool.formats.torch_pickle import magic
from ckpttool.source import File

NAME = "pytorch_legacy"
TITLE = "PyTorch checkpoint (stream, before 1.6)"
WRITES = False
FRAMEWORK = "torch"


def claims(probe: Probe) -> str | None:
    """Return the path of a file that begins with torch's magic number."""
    return probe.path if magic.STREAM.match(probe.head) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the file; nothing that its pickles name is imported or called.

    Raise FormatError when pickles and storages do not fit together.
    """
    # Not at the top: every command asks `claims`.
    from ckpttool.formats.torch_pickle import legacy

    file = File.stamp(location)
    try:
        found = legacy.listed(file, 0, file.size)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.checkpoint(location, NAME, file)
