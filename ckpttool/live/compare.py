"""A live tree beside a checkpoint's: which leaves meet by name, and the one as the skeleton of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.errors import MappingError, some
from ckpttool.leaf import Leaf, Path, ValueLeaf, display
from ckpttool.live import saved
from ckpttool.shown import count
from ckpttool.source import Shape
from ckpttool.tree import Tree

Said = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two leaves of one name that do not fit: what the live side has and what the checkpoint has."""

    path: Path
    live: Said
    stored: Said

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": display(self.path),
            "live": {"dtype": self.live[0], "shape": list(self.live[1])},
            "stored": {"dtype": self.stored[0], "shape": list(self.stored[1])},
        }


def difference(path: Path, live: Said, stored: Said) -> Difference | None:
    """Return the difference of two types and shapes, if there is one."""
    return None if live == stored else Difference(path, live, stored)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which leaf of the live tree has which of the checkpoint's, and what is alone on either side."""

    pairs: Mapping[Path, Path]
    different: tuple[Difference, ...]
    unfilled: tuple[Path, ...]
    unused: tuple[Path, ...]

    @property
    def equal(self) -> bool:
        """Say whether both sides have the same tensors by name, type and shape."""
        return not (self.different or self.unfilled or self.unused)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "pairs": {display(live): display(stored) for live, stored in self.pairs.items()},
            "different": [row.document() for row in self.different],
            "unfilled": [display(path) for path in self.unfilled],
            "unused": [display(path) for path in self.unused],
        }


def compare(live: Tree, stored: Tree) -> Comparison:
    """Return which tensors of two trees have a name in common, aliases included; nothing is read.

    Names are compared as a framework restores by them: attributes, keys and numbers alike, and dotted keys
    (`state_dict`) as the steps that they join.
    """
    names: dict[tuple[str, ...], Path] = {}
    for path, _ in stored.tensors():
        for name in _names(stored, path):
            names.setdefault(name, path)
    pairs: dict[Path, Path] = {}
    different = []
    for path, leaf in live.tensors():
        match = next((names[name] for name in _names(live, path) if name in names), None)
        if match is None:
            continue
        pairs[path] = match
        other = _tensor(stored, match)
        said = difference(path, (leaf.dtype, leaf.shape), (other.dtype, other.shape))
        different += [] if said is None else [said]
    taken = set(pairs.values())
    return Comparison(
        pairs,
        tuple(different),
        tuple(path for path, _ in live.tensors() if path not in pairs),
        tuple(p for p, _ in stored.tensors() if p not in taken and tuple(saved.steps(p)) != saved.COUNTER),
    )


def _names(tree: Tree, path: Path) -> Iterator[tuple[str, ...]]:
    yield tuple(saved.steps(path))
    for alias in tree.aliases.get(path, ()):
        yield tuple(saved.steps(alias.path))


def _tensor(tree: Tree, path: Path) -> Leaf:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101 - `compare` pairs tensors only
    return leaf


def filled(skeleton: Tree, tree: Tree) -> Tree:
    """Return the skeleton's paths, keys, roles and aliases with the values of the other tree's tensors.

    Either side may be the live one. Raise MappingError where a tensor of the skeleton has no counterpart, or
    one of another shape or type.
    """
    found = compare(skeleton, tree)
    if found.unfilled:
        names = [display(path) for path in found.unfilled]
        more = count(len(names), "more tensor")
        raise MappingError(f"nothing has the name of {some(names, 3)}", expected=more)
    for row in found.different:
        raise MappingError(
            "the tensors of one name do not fit",
            path=display(row.path),
            expected=_spelled(row.live),
            found=_spelled(row.stored),
        )
    leaves: dict[Path, Leaf | ValueLeaf] = dict(skeleton.leaves)
    for path, other in found.pairs.items():
        leaves[path] = replace(_tensor(skeleton, path), source=_tensor(tree, other).source)
    return Tree(leaves, skeleton.aliases, skeleton.containers)


def _spelled(said: Said) -> str:
    return f"{said[0]}{list(said[1])}"
