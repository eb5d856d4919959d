"""The tree that a file records, over the arrays that the file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from ckpttool import documents, dtypes
from ckpttool.errors import FormatError
from ckpttool.formats.recorded.values import decoded, path_of
from ckpttool.formats.recorded.write import VERSION
from ckpttool.leaf import Key, Leaf, Path, Record, Role, ValueLeaf
from ckpttool.tree import Alias, Container, Tree

_ROLES = get_args(Role)
_PLAIN = (bool, int, float, complex, str, bytes, Record)
_KINDS = ("dict", "OrderedDict", "list", "tuple", "record", "module")


class DamagedError(FormatError):
    """The recorded tree is not one, or not that of these arrays: another program kept it for others."""


def restored(text: bytes, arrays: Mapping[str, Leaf], untyped: Mapping[str, int] | None = None) -> Tree:
    """Return the tree that `text` records over a file's arrays, by name.

    `untyped` gives the bytes in an element of arrays whose type the file cannot say (NumPy's void). Raise
    DamagedError unless every array has one place in the tree, or repeats a value.
    """
    try:
        return _Restored(arrays, untyped or {}).tree(
            documents.strict(text, "the recorded tree", "header_bytes")
        )
    except (FormatError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else "the recorded tree is nested too deeply"
        raise DamagedError(reason) from error


class _Restored:
    """Goes once through the document."""

    def __init__(self, arrays: Mapping[str, Leaf], untyped: Mapping[str, int]) -> None:
        self.arrays = arrays
        self.untyped = untyped
        self.steps: dict[str, Key] = {}
        self.used: set[str] = set()

    def tree(self, document: dict[str, Any]) -> Tree:
        if (
            document.keys() != {"version", "leaves", "aliases", "containers"}
            or document["version"] != VERSION
        ):
            raise DamagedError("the recorded tree is of another version")
        leaves = self._leaves(_rows(document["leaves"]))
        if self.used != self.arrays.keys():
            raise DamagedError("the recorded tree is that of other arrays")
        aliases = self._aliases(_rows(document["aliases"]), list(leaves), set(leaves))
        return Tree(leaves, aliases, self._containers(document["containers"]))

    def _leaves(self, rows: list[Any]) -> dict[Path, Leaf | ValueLeaf]:
        paths = [path_of(row[0], self.steps) for row in rows]
        leaves = {path: self._leaf(row[1], row[2], paths) for path, row in zip(paths, rows, strict=True)}
        if len(leaves) != len(rows):
            raise DamagedError("the recorded tree has two leaves with one path")
        return leaves

    def _leaf(self, name: Any, facts: Any, paths: list[Path]) -> Leaf | ValueLeaf:
        if not isinstance(facts, dict):
            raise DamagedError("the recorded tree is damaged")
        role = facts.get("role", "parameter")
        if role not in _ROLES:
            raise DamagedError("the recorded tree names a role that there is not")
        if name is not None:
            self._use(name)
        if "value" in facts:
            value = decoded(facts["value"])
            if value is not None and type(value) not in _PLAIN:
                raise DamagedError("the recorded tree holds a value that is none")
            return ValueLeaf(value, role)
        leaf = self._array(name, facts.get("dtype"))
        slot, trainable, second = (decoded(facts.get(fact)) for fact in ("slot", "trainable", "name"))
        if not isinstance(trainable, bool | None) or not all(
            isinstance(t, str | None) for t in (slot, second)
        ):
            raise DamagedError("the recorded tree is damaged")
        of = self._owner(facts.get("of"), paths)
        return replace(leaf, role=cast(Role, role), of=of, slot=slot, trainable=trainable, name=second)

    def _array(self, name: Any, dtype: Any) -> Leaf:
        """Return the array of that name, which has the type, or is of elements that are as large."""
        leaf = self.arrays.get(name) if isinstance(name, str) else None
        if leaf is not None and leaf.dtype == dtype:
            return leaf
        row = dtypes.BY_NAME.get(dtype) if isinstance(dtype, str) else None
        if leaf is None or row is None or not row.itemsize or self.untyped.get(name) != row.itemsize:
            raise DamagedError("the recorded tree is that of other arrays")
        return replace(leaf, dtype=row.name)

    def _use(self, name: Any) -> None:
        if not isinstance(name, str) or name in self.used or name not in self.arrays:
            raise DamagedError("the recorded tree is that of other arrays")
        self.used.add(name)

    def _owner(self, of: Any, paths: list[Path]) -> Path | None:
        if of is None:
            return None
        if type(of) is not int or not 0 <= of < len(paths):
            raise DamagedError("the recorded tree names an owner that there is not")
        return paths[of]

    def _aliases(self, rows: list[Any], paths: list[Path], taken: set[Path]) -> dict[Path, tuple[Alias, ...]]:
        found: dict[Path, list[Alias]] = {}
        for place, steps, name in rows:
            path = path_of(steps, self.steps)
            if type(place) is not int or not 0 <= place < len(paths) or not isinstance(name, str | None):
                raise DamagedError("the recorded tree has an alias of nothing")
            if path in taken:
                raise DamagedError("the recorded tree has two entries with one path")
            taken.add(path)
            found.setdefault(paths[place], []).append(Alias(path, name))
        return {path: tuple(others) for path, others in found.items()}

    def _containers(self, rows: Any) -> dict[Path, Container]:
        found: dict[Path, Container] = {}
        for row in rows if isinstance(rows, list) else [None]:
            if not isinstance(row, list) or len(row) != 4 or row[1] not in _KINDS:
                raise DamagedError("the recorded tree is damaged")
            name = decoded(row[2])
            if not isinstance(name, str | None):
                raise DamagedError("the recorded tree is damaged")
            found[path_of(row[0], self.steps)] = Container(row[1], name, decoded(row[3]))
        return found


def _rows(rows: Any) -> list[Any]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise DamagedError("the recorded tree is damaged")
    return rows
