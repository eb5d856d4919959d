"""The tree: an immutable ordered mapping from path to leaf, with aliases and containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttool.leaf import Leaf, Path, ValueLeaf, display, exact

if TYPE_CHECKING:
    from ckpttool.naming import Naming


class Alias(NamedTuple):
    """A second path to the same storage; `key` is its own native key, if the format stores one."""

    path: Path
    key: str | None = None


class Container(NamedTuple):
    """What holds the entries below a path, so that a writer can rebuild it.

    `state` is what the container carries besides its entries (OrderedDict's `_metadata`), as plain data. A
    "module" is an object whose class the file names: `name` is that class, `state` a dict of plain facts from
    its configuration ("units", "activation", "epsilon", "layer"), never code.
    """

    kind: Literal["dict", "OrderedDict", "list", "tuple", "record", "module"]
    name: str | None = None
    state: object = None


@dataclass(frozen=True, eq=False)
class Tree(Mapping[Path, Leaf | ValueLeaf]):
    """Leaves by path in the order of the file; alias paths are not among the leaves."""

    leaves: Mapping[Path, Leaf | ValueLeaf]
    aliases: Mapping[Path, tuple[Alias, ...]] = field(default_factory=dict)
    containers: Mapping[Path, Container] = field(default_factory=dict)

    def __getitem__(self, path: Path) -> Leaf | ValueLeaf:
        """Return the leaf at the path."""
        return self.leaves[path]

    def __iter__(self) -> Iterator[Path]:
        """Go through the paths in the order of the file."""
        return iter(self.leaves)

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self.leaves)

    def tensors(self) -> Iterator[tuple[Path, Leaf]]:
        """Go through the tensor leaves."""
        for path, leaf in self.leaves.items():
            if isinstance(leaf, Leaf):
                yield path, leaf

    def plain(self) -> Iterator[tuple[Path, ValueLeaf]]:
        """Go through the leaves that are not tensors."""
        for path, leaf in self.leaves.items():
            if isinstance(leaf, ValueLeaf):
                yield path, leaf

    @cached_property
    def names(self) -> Mapping[Path, str]:
        """Every path's display name; where two collide, all of those are spelled exactly."""
        named = {path: display(path) for path in self.leaves}
        counts: dict[str, int] = {}
        for name in named.values():
            counts[name] = counts.get(name, 0) + 1
        if len(counts) == len(named):
            return named
        return {path: n if counts[n] == 1 else exact(path) for path, n in named.items()}

    @cached_property
    def naming(self) -> Naming:
        """What each name that people use means."""
        from ckpttool.naming import Naming

        return Naming(self.leaves, self.names, self.aliases)

    def alias_name(self, alias: Alias) -> str:
        """Return an alias's display name, spelled exactly if a leaf has that name already."""
        shown = display(alias.path)
        return exact(alias.path) if shown in self._shown else shown

    @cached_property
    def _shown(self) -> frozenset[str]:
        return frozenset(self.names.values())

    def under(self, prefix: Path) -> Tree:
        """Return the tree as the subtree under `prefix` of one that has nothing else."""
        return Tree(
            {(*prefix, *p): leaf for p, leaf in self.leaves.items()},
            {
                (*prefix, *p): tuple(Alias((*prefix, *a.path), a.key) for a in rest)
                for p, rest in self.aliases.items()
            },
            {(*prefix, *p): c for p, c in self.containers.items()},
        )

    def below(self, prefix: Path) -> Tree:
        """Return the subtree under `prefix`, with paths that start there."""
        cut = len(prefix)
        return Tree(
            {p[cut:]: leaf for p, leaf in self.leaves.items() if p[:cut] == prefix},
            {
                p[cut:]: tuple(Alias(a.path[cut:], a.key) for a in rest if a.path[:cut] == prefix)
                for p, rest in self.aliases.items()
                if p[:cut] == prefix
            },
            {p[cut:]: c for p, c in self.containers.items() if p[:cut] == prefix},
        )
