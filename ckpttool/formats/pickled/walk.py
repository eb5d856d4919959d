"""From a pickle's value to the entries of a tree: paths, containers, inert records, NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckpttool.formats.pickled.inert import PLAIN, record
from ckpttool.formats.pickled.load import Pickled, array_source
from ckpttool.formats.pickled.traversal import Below, Traversal
from ckpttool.formats.variables import role_by_name
from ckpttool.leaf import Leaf, Path, Record, Role, ValueLeaf, exact
from ckpttool.tree import Container, Tree
from ckpttool.wire.asked import Asked, merged
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Global, Object

# stable_baselines/common/running_mean_std.py, RunningMeanStd; gymnasium's has the same names.
_STATISTICS = frozenset(("mean", "var"))
# What VecNormalize keeps besides (stable_baselines3/common/vec_env/vec_normalize.py).
_APART = frozenset(("observation_space", "action_space", "old_obs", "old_reward", "ret_rms"))


class Use(NamedTuple):
    """What a tensor is for; `of` and `slot` as in a Leaf."""

    role: Role
    of: Path | None = None
    slot: str | None = None


# Says what an array or a number at a path is for, from its element type and shape ("" and () for a number).
Uses = Callable[[Path, str, tuple[int, ...]], Use]


def native(path: Path) -> str:
    """Return the dotted name of a path."""
    return ".".join(str(step.value) for step in path)


class Walk(Traversal[None]):
    """Goes once through the values of pickles and collects a tree's entries.

    `asks` is what unpickling them would import and call.
    """

    def __init__(self, uses: Uses) -> None:
        """Ask `uses` what each array is for."""
        super().__init__(0)
        self.uses = uses
        self.keys: set[str] = set()
        self.asks: tuple[Asked, ...] = ()
        self._pickled = Pickled(None, 0, None, 0)
        self._arrays: dict[int, Path] = {}

    def add(self, pickled: Pickled, path: Path = ()) -> None:
        """Add a pickle's value at the path."""
        self._pickled = pickled
        self.asks = merged(self.asks, pickled.asked)
        self._arrays.clear()
        self.forget(pickled.size)
        self.value(pickled.value, path, None)

    def tree(self) -> Tree:
        """Return the tree of all that was added."""
        return Tree(self.leaves, self.aliases, self.containers)

    def below(self, value: Any, place: None) -> Below[None]:  # noqa: ARG002 - one place is like another
        """Return what says where entries stand: nowhere in particular."""
        return lambda step, via: None  # noqa: ARG005

    def value(self, value: Any, path: Path, place: None) -> None:
        """Add what stands at the path."""
        self.require_free(path)
        kind = type(value)
        if kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, self.uses(path, "", ()).role)
        elif kind is Array:
            self._array(value, path)
        elif kind is Record:
            self.leaves[path] = ValueLeaf(value)
        elif isinstance(value, dict | list | tuple | Object) and kind is not Global:
            self.container(value, path, place)
        else:
            self.leaves[path] = ValueLeaf(record(value))

    def _array(self, array: Array, path: Path) -> None:
        parts = array.parts()
        if parts is not None and isinstance(parts.data, list):
            self.container(parts.data, path, None, Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        else:
            first = self._arrays.setdefault(id(array), path)
            if first != path:
                self.alias(first, path, native(path))
                return
            use = self.uses(path, parts.type.name, parts.shape)
            self.leaves[path] = Leaf(
                dtype=parts.type.name,
                shape=parts.shape,
                source=array_source(parts, self._pickled),
                key=self._unique(path),
                role=use.role,
                of=use.of,
                slot=use.slot,
            )

    def _unique(self, path: Path) -> str:
        name = native(path)
        name = exact(path) if name in self.keys else name
        self.keys.add(name)
        return name


def by_last_name(path: Path, dtype: str, shape: tuple[int, ...]) -> Use:
    """Say what an array is for by its name alone: weights, statistics (RunningMeanStd's), or a counter."""
    last = path[-1].value if path else None
    if not dtype:
        return Use("other")
    if last in _STATISTICS:
        return Use("buffer")
    if not _APART.isdisjoint(step.value for step in path):
        return Use("other")
    return Use(role_by_name(path, native(path), dtype, shape))
