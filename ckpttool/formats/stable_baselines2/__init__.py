"""Agents of Stable-Baselines 2 (TensorFlow 1): its zip files and the cloudpickles before them.

Sources, in github.com/hill-a/stable-baselines: stable_baselines/common/base_class.py (`_save_to_file_zip`,
`_save_to_file_cloudpickle`, `_load_from_file`) and stable_baselines/common/save_util.py (`data_to_json`,
`params_to_bytes`). Nothing that a file serializes is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled.owner import owner
from ckpttool.formats.probe import Piece, Probe
from ckpttool.source import File

if TYPE_CHECKING:
    from ckpttool.tree import Tree

NAME = "stable_baselines2"
TITLE = "Stable-Baselines 2 agent (zip, or cloudpickle)"
WRITES = True
FRAMEWORK = "tensorflow"


def claims(probe: Probe) -> str | None:
    """Return the path of a zip with `parameters` and `parameter_list`, or of a pickle that SB2 wrote."""
    zipped = "parameters" in probe.members and "parameter_list" in probe.members
    return probe.path if zipped or owner(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List the agent's variables, by name, and under `data` its settings and spaces.

    What unpickling would call is listed as a record and named in a note. Raise FormatError when archive,
    arrays and names do not fit together.
    """
    from ckpttool.formats.stable_baselines2 import listing

    file = File.stamp(location)
    zipped = file.read(0, min(2, file.size)) == b"PK"
    try:
        found = listing.from_zip(file) if zipped else listing.from_pickle(file)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.checkpoint(location, NAME, file)


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file, the zip; raise UnsupportedError for a tree that is no agent of the library.

    See layouts.stable_baselines2 for what such a tree has.
    """
    from ckpttool.formats.stable_baselines2 import write

    return write.pieces(tree)
