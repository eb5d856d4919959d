"""Agents of Stable-Baselines3 (PyTorch) and of the libraries built on it: their zips, packed or unpacked.

Source: github.com/DLR-RM/stable-baselines3, stable_baselines3/common/save_util.py (`save_to_zip_file`,
`load_from_zip_file`, `data_to_json`). Nothing that a file serializes is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.probe import Piece, Probe

if TYPE_CHECKING:
    from ckpttool.tree import Tree

NAME = "stable_baselines3"
TITLE = "Stable-Baselines3 agent (zip)"
WRITES = True
FRAMEWORK = "torch"

_VERSION, _DATA, _POLICY = "_stable_baselines3_version", "data", "policy.pth"


def claims(probe: Probe) -> str | None:
    """Return the path of a zip, or of a folder that one was unpacked into, with what the library writes."""
    names = probe.names if probe.kind == "folder" else probe.members
    # Before version 0.5 there was no member that names the library.
    return probe.path if _VERSION in names or (_DATA in names and _POLICY in names) else None


def read(location: str) -> Checkpoint:
    """List what every state_dict of the agent holds, and under `data` its settings and spaces.

    What unpickling would call is listed as a record and named in a note. Raise FormatError when the parts
    do not fit together, UnsupportedError when a member that is an archive itself is compressed.
    """
    from ckpttool.formats.stable_baselines3 import listing, members

    try:
        found = listing.listed(members.opened(location))
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return Checkpoint(
        path=location,
        format=NAME,
        tree=found.tree,
        files=found.files,
        writer=found.writer,
        integrity=found.integrity,
        notes=found.notes,
        asks=found.asks,
    )


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file, which the library itself fills in a process of its own.

    Raise MissingExtraError when the library is not installed, UnsupportedError when the tree is no agent of
    its own (see layouts.stable_baselines3).
    """
    from ckpttool.formats.stable_baselines3 import write

    return write.pieces(tree)
