"""The modules below a branch as a few rows: outermost first, unfolded as far as there is room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.shown import clean, count, shortened, size

# Rows of a terminal, and of a cell in a notebook, that one looks through.
MOST = 48
_LONGEST = 120
Listed = tuple[str, Leaf | ValueLeaf]


@dataclass(slots=True)
class Node:
    """One row: its own name, its leaf or the sums of a module, the rows below; `more` are left out."""

    name: str
    leaf: Leaf | ValueLeaf | None = None
    below: dict[str, Node] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0
    more: int = 0

    @property
    def beside(self) -> str:
        """What stands beside the name: a tensor's type and shape, a module's sums."""
        if self.leaf is None:
            return f"{count(self.tensors, 'tensor')}, {size(self.nbytes)}"
        if isinstance(self.leaf, ValueLeaf):
            value = self.leaf.value
            # A text of megabytes is a value too.
            return shortened(
                clean(repr(value[:_LONGEST] if isinstance(value, str | bytes) else value)), _LONGEST
            )
        extents = ", ".join(map(str, self.leaf.shape))
        role = "" if self.leaf.role == "parameter" else f" {self.leaf.role}"
        return f"{self.leaf.dtype}[{extents}]{role}"


def outline(leaves: Iterable[Listed], most: int = MOST) -> Node:
    """Return the root of the modules of named leaves with about `most` rows below it, outer ones first."""
    root = Node("")
    for name, leaf in leaves:
        _add(root, name, leaf)
    room = most
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        shown = list(node.below)[: max(room, 0)]
        if node is not root and len(shown) < len(node.below):
            shown = []  # a module is unfolded as a whole, or not at all
        node.more = len(node.below) - len(shown)
        node.below = {name: node.below[name] for name in shown}
        room -= len(shown)
        waiting.extend(node.below.values())
    return root


def _add(root: Node, name: str, leaf: Leaf | ValueLeaf) -> None:
    way = [root]
    for step in name.split("/"):
        if step not in way[-1].below:
            way[-1].below[step] = Node(step)
        way.append(way[-1].below[step])
    way[-1].leaf = leaf
    if isinstance(leaf, Leaf):
        for node in way:
            node.tensors += 1
            node.nbytes += leaf.nbytes


def lines(title: str, leaves: Iterable[Listed], width: int) -> Iterator[str]:
    """Go through the lines that a terminal of that width shows."""
    root = outline(leaves)
    yield shortened(clean(title), width)
    yield from _below(root, "  ", width)


def _below(node: Node, indent: str, width: int) -> Iterator[str]:
    for each in node.below.values():
        mark = "/" if each.below or each.more else ""
        yield shortened(f"{indent}{clean(each.name)}{mark}  {each.beside}", width)
        yield from _below(each, f"{indent}  ", width)
    if node.more and not node.name:
        yield f"{indent}and {node.more:,} more"
