"""A pickle that no other format owns: plain data, NumPy arrays, torch's tensors (a dict of weights).

Source: Lib/pickle.py and Lib/pickletools.py in CPython for the stream; wire/pickle_numpy.py names the sources
of how NumPy pickles its arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled.owner import owner
from ckpttool.formats.probe import Probe
from ckpttool.source import File

if TYPE_CHECKING:
    from ckpttool.formats.listed import Listed

NAME = "pickle"
TITLE = "Pickle of plain data, NumPy arrays and torch tensors"
WRITES = False
FRAMEWORK = "numpy"


def claims(probe: Probe) -> str | None:
    """Return the path of a pickle that neither torch nor an RL library owns."""
    return probe.path if owner(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List every array and value of the pickle; nothing that it names is imported or called.

    What unpickling would call is listed as a record and named in a note. Raise FormatError when the pickle is
    damaged.
    """
    file = File.stamp(location)
    try:
        found = _listed(file)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return found.checkpoint(location, NAME, file)


def _listed(file: File) -> Listed:
    from ckpttool.formats.listed import Listed
    from ckpttool.formats.pickled.load import load_file
    from ckpttool.formats.pickled.walk import Walk, by_last_name
    from ckpttool.formats.torch_pickle import bare, listing
    from ckpttool.wire.asked import merged
    from ckpttool.wire.pickle_reader import Read

    inner = bare.Inner(file)
    pickled = load_file(file, inner.builders)
    if inner.found:
        asked = merged(pickled.asked, inner.asked)
        return listing.listed(Read(pickled.value, pickled.size, asked), "pickle of torch's tensors")
    walk = Walk(by_last_name)
    walk.add(pickled)
    return Listed(walk.tree(), asks=walk.asks)
