"""Finds an agent's components, networks and layers in a tree by the names that its codebase uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.layouts.canonical import BRANCHES, Part, PartLayer
from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping.kinds import SPELLING, Kind, recognise
from ckpttool.tree import Tree

# Edges that Keras puts between a model and its layers; nobody names a layer by them.
_PRIVATE = re.compile(r"_functional|_operations|_layers|layers|_self_tracked_trackables")

# What a file that was converted calls Q-functions whose layers have the same names.
_QS = re.compile(r"q\d+")

Segments = tuple[str, ...]


class Entry(NamedTuple):
    """A leaf with its name below the agent, cut into segments."""

    path: Path
    segments: Segments
    leaf: Leaf


class Module(NamedTuple):
    """One layer of a component: its name below the component, its kind, its tensors by stored name."""

    name: Segments
    kind: Kind
    tensors: Mapping[str, Entry]

    @property
    def width_in(self) -> int | None:
        """The number of inputs of a dense layer."""
        return self._kernel_shape()[0] if self.kind.name == "dense" else None

    @property
    def width_out(self) -> int | None:
        """The number of outputs of a dense layer."""
        return self._kernel_shape()[1] if self.kind.name == "dense" else None

    @property
    def width_norm(self) -> int:
        """The width of a layer norm."""
        return self.tensors[self.kind.weights[0].name].leaf.shape[0]

    def _kernel_shape(self) -> tuple[int, ...]:
        first = self.kind.weights[0]
        shape = self.tensors[first.name].leaf.shape
        return shape if self.kind.framework == "tensorflow" else shape[::-1]


def entries(tree: Tree) -> Iterator[Entry]:
    """Go through all tensors under all their names, aliases included, in the order of the tree."""
    for path, leaf in tree.tensors():
        yield Entry(path, tuple(tree.names[path].split("/")), leaf)
    for canonical, aliases in tree.aliases.items():
        leaf_or_value = tree[canonical]
        if isinstance(leaf_or_value, Leaf):
            for alias in aliases:
                yield Entry(canonical, tuple(display(alias.path).split("/")), leaf_or_value)


def root_of(names: Sequence[Segments], components: Mapping[str, str], *, rooted: bool) -> Segments | None:
    """Return the prefix under which most components lie (`policy`), or None when there are none.

    `rooted` allows one object between the top and the components, as in `Checkpoint(policy=agent)`.
    """
    found: dict[Segments, set[str]] = {}
    theirs = {tuple(name.split("/")) for alternatives in components for name in alternatives.split("+")}
    lengths = {len(name) for name in theirs}
    for segments in names:
        for depth in range(2 if rooted else 1):
            for length in lengths:
                stop = depth + length
                if len(segments) > stop and segments[depth:stop] in theirs:
                    found.setdefault(segments[:depth], set()).add("/".join(segments[depth:stop]))
    if not found:
        return None
    return max(found, key=lambda root: (len(found[root]), -len(root)))


def modules(
    found: Sequence[Entry], cut: int, framework: str, *, matrices: bool = False
) -> tuple[Module, ...]:
    """Group a component's tensors (whose names begin after `cut` segments) into layers, in order.

    With `matrices` a torch weight of two axes that stands alone is a dense layer without a bias.
    """
    groups: dict[Segments, dict[str, Entry]] = {}
    seen: set[Path] = set()
    for entry in found:
        # A tensor's other names count only in a component that does not hold it by its own name.
        if entry.leaf.role in ("parameter", "buffer") and entry.path not in seen:
            seen.add(entry.path)
            groups.setdefault(entry.segments[cut:-1], {})[entry.segments[-1]] = entry
    dense = SPELLING[framework, "dense"]
    kinds = {
        name: dense
        if matrices and group.keys() == {"weight"} and len(group["weight"].leaf.shape) == 2
        else recognise({n: entry.leaf for n, entry in group.items()}, framework)
        for name, group in groups.items()
    }
    return _in_use_order([Module(n, kind, groups[n]) for n, kind in kinds.items() if kind is not None])


_NUMBERED = re.compile(r"(\D*)(\d+)")


def _in_use_order(stored: list[Module]) -> tuple[Module, ...]:
    """Return layers in the order of their numbers where they are numbered (l1, l2, ...), else as stored.

    Norms that are defined apart (l1, l2, l3, n1, n2) follow the dense layer of their number.
    """
    if all(module.name and module.name[-1].isdigit() for module in stored):
        return tuple(sorted(stored, key=_ranks(stored)))
    dense = [module for module in stored if module.kind.name == "dense"]
    placed = sorted(dense, key=_ranks(dense))
    by_number = {(m.name[:-1], _number(m.name)): m for m in dense}
    for position, module in enumerate(stored):
        if module.kind.name == "dense":
            continue
        before = [m for m in stored[:position] if m.kind.name == "dense"]
        owner = by_number.get((module.name[:-1], _number(module.name))) or (before[-1] if before else None)
        placed.insert(placed.index(owner) + 1 if owner is not None else 0, module)
    return tuple(placed)


def _ranks(found: Sequence[Module]) -> Callable[[Module], tuple[int, ...]]:
    siblings: dict[Segments, dict[str, int]] = {}
    for module in found:
        for depth, segment in enumerate(module.name):
            names = siblings.setdefault(module.name[:depth], {})
            names.setdefault(segment, len(names))
    for names in siblings.values():
        numbers = {name: match for name in names if (match := _NUMBERED.fullmatch(name))}
        if len({match[1] for match in numbers.values()}) == 1:
            # Names without a number (log_std) keep their places, the others change theirs.
            places = sorted(names[name] for name in numbers)
            names.update(zip(sorted(numbers, key=lambda name: int(numbers[name][2])), places, strict=True))
    return lambda module: tuple(siblings[module.name[:d]][s] for d, s in enumerate(module.name))


def by_definition(chain: Sequence[Module]) -> bool:
    """Say whether only the order of the file tells two layers of equal shape apart."""
    unnumbered = [m for m in chain if m.kind.name == "dense" and _number(m.name) is None]
    shapes = [(module.width_in, module.width_out) for module in unnumbered]
    return len(set(shapes)) < len(shapes)


def _number(name: Segments) -> int | None:
    numbers = re.findall(r"\d+", name[-1]) if name else []
    return int(numbers[-1]) if numbers else None


def heads(found: tuple[Module, ...]) -> tuple[tuple[Module, ...], ...]:
    """Split a critic into its Q-functions: by module where they have one each, else where a chain ends.

    The flat form of the TD3 authors keeps both in one module as l1..l3 and l4..l6: a new Q-function
    begins after a layer with one output.
    """
    by_first: dict[str, list[Module]] = {}
    by_owner: dict[Segments, list[Module]] = {}
    for module in found:
        by_first.setdefault(module.name[0] if len(module.name) > 1 else "", []).append(module)
        by_owner.setdefault(_public(module.name)[:-1], []).append(module)
    if len(by_first) > 1 and all(_QS.fullmatch(name) for name in by_first):
        return tuple(tuple(group) for group in by_first.values())
    ends = [[m.width_out for m in group if m.width_out is not None][-1:] for group in by_owner.values()]
    starts = [[m.width_in for m in group if m.width_in is not None][:1] for group in by_owner.values()]
    # A trunk and a head are modules of their own too, but parts of one Q-function. Q-functions that give
    # quantiles end alike and begin alike.
    alike = ends[:1] != [[]] and all(each[:1] * len(each) == each for each in (ends, starts))
    if len(by_owner) > 1 and (all(end == [1] for end in ends) or alike):
        return tuple(tuple(group) for group in by_owner.values())
    chains: list[list[Module]] = [[]]
    for module in found:
        if chains[-1] and chains[-1][-1].width_out == 1:
            chains.append([])
        chains[-1].append(module)
    return tuple(tuple(chain) for chain in chains if chain)


def connected(chain: Sequence[Module], extra: int | None) -> bool:
    """Say whether each layer takes what the one before gives (or that and `extra` action inputs).

    A norm must have the width of the dense layer that it follows.
    """
    width: int | None = None
    for module in chain:
        taken = module.width_in
        if taken is None:
            if module.width_norm != width:
                return False
            continue
        if width is not None and taken != width and (extra is None or taken != width + extra):
            return False
        width = module.width_out
    return width is not None


def part(
    component: str, head: str | None, chain: Sequence[Module], branches: Mapping[str, Module] | None = None
) -> Part:
    """Return the network's record, its layers named as a torch module would name them."""
    names = [_public(module.name) for module in chain]
    if all(name and name[-1].isdigit() for name in names) and chain[0].kind.framework == "tensorflow":
        names = _sequential(names, chain)
    layers = (PartLayer(name, m.kind.name) for name, m in zip(names, chain, strict=True))
    more = (
        (name, PartLayer(_public(m.name) if m.name[-1] in BRANCHES else (name,), m.kind.name))
        for name, m in (branches or {}).items()
    )
    return Part(component, head, tuple(layers), tuple(more))


def _public(name: Segments) -> Segments:
    kept = tuple(segment for segment in name if not _PRIVATE.fullmatch(segment))
    return kept or name


def _sequential(names: Sequence[Segments], chain: Sequence[Module]) -> list[Segments]:
    # Keras counts layers that own weights (and an input layer); torch's Sequential counts the
    # activation after each hidden layer too: Linear 0, ReLU 1, Linear 2, ...
    renamed, position = [], 0
    for number, name in enumerate(names):
        renamed.append((*name[:-1], str(position)))
        followed_by_norm = number + 1 < len(chain) and chain[number + 1].kind.name == "layer_norm"
        position += 1 if followed_by_norm else 2
    return renamed
