"""Folders of torch.distributed.checkpoint: `.metadata` and the shards `__RANK_N.distcp`; torch is not needed.

Source: torch/distributed/checkpoint/filesystem.py (`_FileSystemWriter`), metadata.py and default_planner.py.
"""

from __future__ import annotations

import os
import re

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled.owner import owner
from ckpttool.formats.probe import Probe

NAME = "pytorch_dcp"
TITLE = "PyTorch distributed checkpoint (folder of .metadata and .distcp)"
WRITES = False
FRAMEWORK = "torch"

# filesystem.py, _get_metadata_path: one for all ranks, or one for each that was saved without collectives.
_METADATA = re.compile(r"(__\d+)?\.metadata")
_SHARD = ".distcp"


def claims(probe: Probe) -> str | None:
    """Return the folder that holds the metadata, whether it, the metadata or a shard is pointed at."""
    if probe.kind == "file":
        known = probe.name.endswith(_SHARD) or owner(probe) == NAME
        return probe.folder if known else None
    if probe.kind != "folder":
        return None
    marks = sorted(name for name in probe.names if _METADATA.fullmatch(name))
    return probe.path if marks and owner(Probe(os.path.join(probe.path, marks[0]))) == NAME else None


def read(location: str) -> Checkpoint:
    """List every tensor by what the metadata says of it, and every other value; no tensor's shard is opened.

    Raise NotFoundError when there is no metadata, TruncatedError when an item lies beyond its shard's end,
    FormatError when the metadata make no sense. A shard that is missing is a note, and an error on reading.
    """
    from ckpttool.formats.pytorch_dcp import listing

    names = sorted(name for name in Probe(location).names if _METADATA.fullmatch(name))
    # Nobody opens a pipe that has the name of a file.
    names = [name for name in names if Probe(os.path.join(location, name)).kind == "file"]
    # One for all ranks wins: torch writes it when it writes for all.
    chosen = [name for name in names if name == ".metadata"] or names
    try:
        found = listing.read(location, chosen)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.listed.checkpoint(location, NAME, *found.files)
