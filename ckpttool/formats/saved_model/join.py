"""The join of a graph with the leaves of the bundle beside it: names, what is trained, who uses what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.errors import some
from ckpttool.formats.saved_model import nodes, objects
from ckpttool.formats.saved_model.messages import MetaGraph
from ckpttool.leaf import Leaf, Path
from ckpttool.tree import Tree

_SIGNATURES = (
    "signatures"  # the root's edge to the map of signatures (saved_model/signature_serialization.py)
)
_SHOWN = 3  # names in a note


class Fact(NamedTuple):
    """What a graph says about one variable; None and "" are for what it does not say."""

    name: str
    trainable: bool | None


@dataclass(slots=True)
class Facts:
    """What a graph says about the leaves, by path; `numbers` are paths by number of object."""

    variables: dict[Path, Fact] = field(default_factory=dict)
    numbers: dict[int, Path] = field(default_factory=dict)
    signatures: dict[str, list[Path]] = field(default_factory=dict)
    initializers: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# Objects (TensorFlow 2).


def by_objects(tree: Tree, graph: objects.Objects) -> Facts:
    """Find each leaf's variable among the graph's objects: along its paths, as a slot, or by its name."""
    facts = Facts()
    loose: list[tuple[Path, Leaf]] = []
    different: list[str] = []
    for path, leaf in tree.tensors():
        number = _along_paths(tree, graph, path)
        if number is None and leaf.of is not None:
            number = _slot(tree, graph, path, leaf)
        if number is None or number in facts.numbers:
            loose.append((path, leaf))
        elif _fits(leaf, graph.variables[number]):
            facts.numbers[number] = path
        else:
            different.append(tree.names[path])
    named = _unique_names(graph, facts.numbers)
    for path, leaf in loose:
        number = named.get(leaf.name or "")
        if number is not None and number not in facts.numbers and _fits(leaf, graph.variables[number]):
            facts.numbers[number] = path
    facts.variables = {
        path: Fact(graph.variables[number].name, graph.variables[number].trainable)
        for number, path in facts.numbers.items()
    }
    facts.signatures = {
        name: _paths(graph.captures.get(function, ()), facts.numbers) for name, function in signatures(graph)
    }
    if different:
        facts.notes.append(
            f"the graph gives {_listed(different)} another shape or type than the variables have"
        )
    absent = [v.name for number, v in graph.variables.items() if number not in facts.numbers]
    if absent:
        facts.notes.append(
            f"the graph has variables that are not stored under the same path: {_listed(absent)}"
        )
    return facts


def _along_paths(tree: Tree, graph: objects.Objects, path: Path) -> int | None:
    number = objects.find(graph, path)
    if number in graph.variables:
        return number
    for alias in tree.aliases.get(path, ()):
        number = objects.find(graph, alias.path)
        if number in graph.variables:
            return number
    return None


def _slot(tree: Tree, graph: objects.Objects, path: Path, leaf: Leaf) -> int | None:
    """Find a slot variable that no edge leads to: its path is OPTIMIZER/slots/KIND/VARIABLE."""
    assert leaf.of is not None  # noqa: S101 - asked for slots with an owner only
    optimizer = objects.find(graph, path[: max(0, len(path) - len(leaf.of) - 2)])
    of = _along_paths(tree, graph, leaf.of)
    if optimizer is None or of is None:
        return None
    number = graph.slots.get((optimizer, of, leaf.slot or ""))
    return number if number in graph.variables else None


def _fits(leaf: Leaf, variable: objects.Variable) -> bool:
    if leaf.dtype != variable.dtype:
        return False
    shape = variable.shape
    if shape is None or len(shape) != len(leaf.shape):
        return shape is None
    return all(known in (-1, extent) for known, extent in zip(shape, leaf.shape, strict=True))


def _unique_names(graph: objects.Objects, taken: Mapping[int, Path]) -> dict[str, int]:
    found: dict[str, int] = {}
    several = set()
    for number, variable in graph.variables.items():
        if number not in taken and variable.name:
            if variable.name in found:
                several.add(variable.name)
            found[variable.name] = number
    return {name: number for name, number in found.items() if name not in several}


def signatures(graph: objects.Objects) -> Iterator[tuple[str, str]]:
    """Go through the signatures: name, and the concrete function that is called."""
    signatures = graph.children[0].get(_SIGNATURES) if graph.children else None
    for name, number in graph.children[signatures].items() if signatures is not None else ():
        for function in graph.functions.get(number, ()):
            yield name, function


def functions(
    graph: objects.Objects, numbers: Mapping[int, Path]
) -> Iterator[tuple[str, int | None, list[Path]]]:
    """Go through the concrete functions: name, the object that holds it, and the variables it captures."""
    holders: dict[str, int] = {}
    for number, names in graph.functions.items():
        for name in names:
            holders.setdefault(name, number)
    for name in sorted(graph.captures):
        yield name, holders.get(name), _paths(graph.captures[name], numbers)


def _paths(captured: Iterable[int], numbers: Mapping[int, Path]) -> list[Path]:
    return list(dict.fromkeys(numbers[number] for number in captured if number in numbers))


# Nodes (TensorFlow 1).


def by_nodes(tree: Tree, meta: MetaGraph, graph: nodes.Nodes) -> Facts:
    """Find each leaf's variables among the graph's nodes: those saved under its key, or of its name."""
    facts = Facts()
    wholes: dict[bytes, list[bytes]] = {}
    for each in meta.variables.values():
        wholes.setdefault(each.whole or each.name, []).append(each.name)
    owners: dict[bytes, Path] = {}
    for path, leaf in tree.tensors():
        key = leaf.key.encode("utf-8", "surrogateescape")
        mine = graph.saved.get(key) or wholes.get(key) or ([key] if key in graph.nodes else [])
        owners |= dict.fromkeys(mine, path)
        for name in mine[:1]:
            variable = meta.variables.get(name)
            trainable = None if meta.trained is None or variable is None else name in meta.trained
            whole = variable.whole if variable is not None else b""
            facts.variables[path] = Fact((whole or name).decode("utf-8", "surrogateescape"), trainable)
            first = nodes.initializer(graph, name, variable.initializer if variable is not None else b"")
            if first is not None:
                facts.initializers[path] = first
    for signature, what in meta.signatures.items():
        outputs = [name for tensor in what.outputs.values() for name in tensor.names]
        inputs = [name for tensor in what.inputs.values() for name in tensor.names]
        used = nodes.used(graph, outputs, inputs)
        facts.signatures[signature] = list(dict.fromkeys(owners[name] for name in used if name in owners))
    return facts


def _listed(names: list[str]) -> str:
    return some([name or "one without a name" for name in names], _SHOWN)
