"""What writers put into pickles: names of classes, arrays of NumPy, gym's Box called with its two ends."""

from __future__ import annotations

from ckpttool.errors import UnsupportedError
from ckpttool.formats import whole
from ckpttool.leaf import Leaf, Path, Record, display
from ckpttool.wire import pickle_numpy
from ckpttool.wire.pickle_values import Global, Object

# Read without lines, and by every Python since 3.4.
PROTOCOL = 4


def code(leaf: Leaf, path: Path) -> str:
    """Return NumPy's code of the tensor's type ("f4"); raise UnsupportedError where it has none."""
    found = pickle_numpy.code_of(leaf.dtype)
    if found is None:
        raise UnsupportedError(f"a NumPy array cannot hold a tensor of type {leaf.dtype}", path=display(path))
    return found


def array(leaf: Leaf, path: Path) -> Object:
    """Return the tensor as the calls that give an array; its bytes are read."""
    return pickle_numpy.stored(code(leaf, path), leaf.shape, bytes(whole.data(leaf, path)))


def named(record: Record) -> Global:
    """Return the pickle's name of a class or function."""
    module, _, name = record.name.rpartition(".")
    return Global(module, name)


def box(kind: Global, low: Object, high: Object) -> Object:
    """Return a call of a space of numbers; what reads no calls sees the ends as its state."""
    return Object(kind, (low, high), 0, state={"low": low, "high": high})
