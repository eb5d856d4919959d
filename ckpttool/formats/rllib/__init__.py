"""Checkpoints of RLlib: the single `checkpoint-N` of version 0.1, and the folders of version 1.0 and later.

Source: ray/rllib/utils/checkpoints.py in github.com/ray-project/ray (the history of versions above
CHECKPOINT_VERSION, `get_checkpoint_info`, `Checkpointable`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled.owner import CHECKPOINT, owner
from ckpttool.formats.probe import Piece, Probe

if TYPE_CHECKING:
    from ckpttool.tree import Tree

NAME = "rllib"
TITLE = "RLlib checkpoint (checkpoint-N, or a folder of pickles)"
WRITES = True
FRAMEWORK = "tensorflow"

# Whatever marks a folder; `class_and_ctor_args.pkl` stands in every component's folder of version 2.0.
_FORMS = (".pkl", ".msgpck", ".msgpack", ".pt")
_STATES = (f"{of}_state{form}" for of in ("algorithm", "policy", "module") for form in _FORMS)
_MARKS = frozenset(("rllib_checkpoint.json", "class_and_ctor_args.pkl", *_STATES))


def claims(probe: Probe) -> str | None:
    """Return a folder that RLlib wrote, the one `checkpoint-N` of a folder, or a pickle that names RLlib."""
    if probe.kind == "folder":
        if not _MARKS.isdisjoint(probe.names):
            return probe.path
        old = [name for name in probe.names if CHECKPOINT.fullmatch(name)]
        inner = Probe(os.path.join(probe.path, old[0])) if len(old) == 1 else None
        return inner.path if inner is not None and owner(inner) == NAME else None
    if probe.name == "rllib_checkpoint.json" and probe.kind == "file":
        return probe.folder
    return probe.path if owner(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List every policy's weights, its optimizer's variables, filters, counters and settings.

    What unpickling would call is listed as a record and named in a note. Raise UnsupportedError for the forms
    that are no pickles (msgpack, PyTorch), FormatError for damage.
    """
    from ckpttool.formats.rllib import listing

    try:
        found = listing.of_folder(location) if places.isdir(location) else listing.of_file(location)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.listed.checkpoint(location, NAME, *found.files)


def pieces(tree: Tree) -> tuple[Piece, ...]:
    """Return the files of the folder of one RLModule; raise UnsupportedError for another tree.

    See layouts.rllib for what such a tree has.
    """
    from ckpttool.formats.rllib import write

    return write.pieces(tree)
