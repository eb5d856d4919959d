"""A pickle of plain data and NumPy arrays that no other format owns (a dict of weights, saved statistics).

Source: Lib/pickle.py and Lib/pickletools.py in CPython for the stream; wire/pickle_numpy.py names the sources
of how NumPy pickles its arrays.
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled.owner import owner
from ckpttool.formats.probe import Probe
from ckpttool.source import File

NAME = "pickle"
TITLE = "Pickle of plain data and NumPy arrays"
WRITES = False
FRAMEWORK = "numpy"


def claims(probe: Probe) -> str | None:
    """Return the path of a pickle of protocol 2 or above that neither torch nor an RL library owns."""
    return probe.path if owner(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List every array and value of the pickle; nothing that it names is imported or called.

    Raise FormatError when the pickle is damaged or asks to call something that can act.
    """
    from ckpttool.formats.pickled.load import load_file
    from ckpttool.formats.pickled.walk import Walk, by_last_name

    file = File.stamp(location)
    walk = Walk(by_last_name)
    try:
        walk.add(load_file(file))
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return Checkpoint(path=location, format=NAME, tree=walk.tree(), files=(file,))
