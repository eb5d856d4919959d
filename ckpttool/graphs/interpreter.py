"""Evaluation of a graph with NumPy, for values of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ckpttool.core import limits
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import FormatError, UnsupportedError, UsageError
from ckpttool.graphs.graph import Graph, OperatorNode
from ckpttool.graphs.operators import CONTROL, compute_node, require_size

_Values = dict[str, np.ndarray]
# All values that are kept at one time may have so many times the entries of one value.
_MOST_VALUES = 8


def evaluate(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a graph by name, for its inputs by name.

    Raise UsageError for missing or unknown inputs, UnsupportedError with the name of an operator that the
    table does not have, FormatError if inputs do not fit an operator, and LimitError for a value that is
    too large.
    """
    names = {value.name for value in graph.inputs}
    if names != inputs.keys():
        raise UsageError(
            "the inputs are not those of the graph",
            expected=", ".join(sorted(names)) or "none",
            found=", ".join(sorted(inputs)) or "none",
        )
    outputs = _run(graph, {name: np.asarray(array) for name, array in inputs.items()}, _nothing)
    return dict(zip((value.name for value in graph.outputs), outputs, strict=True))


_Lookup = Callable[[str], np.ndarray]


def _nothing(name: str) -> np.ndarray:
    raise FormatError("a node uses a value that nothing computes", found=repr(name[:200]))


def _run(graph: Graph, values: _Values, outer: _Lookup) -> list[np.ndarray]:
    """Return the outputs of a graph; `outer` returns the values of the graph around it."""
    run = _GraphRun(graph, values, outer, _count_uses(graph))
    for node in graph.nodes:
        run.add(node)
    return [run.value(output.name) for output in graph.outputs]


@dataclass
class _GraphRun:
    """Values of a graph's names so far, and how often nodes still use them."""

    graph: Graph
    values: _Values
    outer: _Lookup
    uses: Counter[str]
    sizes: dict[str, int] = field(default_factory=dict)
    entries: int = 0

    def value(self, name: str) -> np.ndarray:
        """Return a value by name; a constant is read at its first use."""
        if name not in self.values:
            constant = self.graph.constants.get(name)
            if constant is None:
                return self.outer(name)
            self.values[name] = constant.read(name)
        return self.values[name]

    def add(self, node: OperatorNode) -> None:
        """Compute a node; free the values that no other node uses."""
        arrays = [self.value(name) if name else None for name in node.inputs]
        if node.op in CONTROL:
            computed = _CONTROL[node.op](node, arrays, self.value)
        else:
            computed = compute_node(node, arrays)
        for number, name in enumerate(node.outputs):
            if not self.uses[name]:
                continue
            if number >= len(computed):
                raise UnsupportedError(
                    f"an optional output of the operator {node.op} is not supported", found=name
                )
            self.values[name] = computed[number]
            self.sizes[name] = _count_entries(computed[number])
            self.entries += self.sizes[name]
        require_size([self.entries], _MOST_VALUES)
        for name in _inputs_of(node):
            self.uses[name] -= 1
            if not self.uses[name]:
                self.values.pop(name, None)
                self.entries -= self.sizes.pop(name, 0)


def _count_entries(array: np.ndarray) -> int:
    """Return how many entries an array keeps in memory: fewer than its shape has if it is broadcast."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return min(array.size, owner.size)


def _count_uses(graph: Graph) -> Counter[str]:
    """Return how often each value is used; outputs are used once more than nodes use them."""
    uses = Counter(name for node in graph.nodes for name in _inputs_of(node))
    uses.update(output.name for output in graph.outputs)
    return uses


def _inputs_of(node: OperatorNode) -> Iterator[str]:
    """Yield the names that a node uses, including those in its graphs."""
    yield from filter(None, node.inputs)
    for attribute in node.attributes.values():
        if isinstance(attribute, Graph):
            for inner in attribute.nodes:
                yield from _inputs_of(inner)
            yield from (output.name for output in attribute.outputs)


_Arrays = Sequence[np.ndarray | None]


def _body(node: OperatorNode, name: str) -> Graph:
    graph = node.attributes.get(name)
    if not isinstance(graph, Graph):
        raise FormatError(f"a node of the operator {node.op} has no graph {name}", path=node.title or None)
    return graph


def _call(graph: Graph, arrays: Sequence[np.ndarray], outer: _Lookup) -> list[np.ndarray]:
    if len(graph.inputs) != len(arrays):
        raise FormatError(
            "the inputs of a branch or loop do not fit its graph",
            expected=str(len(graph.inputs)),
            found=str(len(arrays)),
        )
    names = (value.name for value in graph.inputs)
    return _run(graph, dict(zip(names, arrays, strict=True)), outer)


def _branch(node: OperatorNode, arrays: _Arrays, outer: _Lookup) -> tuple[np.ndarray, ...]:
    chosen = arrays[0] is not None and bool(np.asarray(arrays[0]).reshape(()))
    return tuple(_call(_body(node, "then_branch" if chosen else "else_branch"), [], outer))


def _loop(node: OperatorNode, arrays: _Arrays, outer: _Lookup) -> tuple[np.ndarray, ...]:
    count, condition, *carried = arrays
    body, most = _body(node, "body"), limits.current().graph_parts
    trips = None if count is None else int(np.asarray(count).reshape(()))
    active = condition is None or bool(np.asarray(condition).reshape(()))
    state, collected = [array for array in carried if array is not None], list[list[np.ndarray]]()
    step = 0
    while active and (trips is None or step < trips):
        if step >= most:
            raise limits.limit_error("graph_parts", "a loop of the graph has too many steps", step)
        outputs = _call(body, [np.asarray(step, np.int64), np.asarray(active), *state], outer)
        active, state = bool(outputs[0]), outputs[1 : 1 + len(state)]
        collected.append(outputs[1 + len(state) :])
        require_size([sum(array.size for array in collected[-1]) * len(collected)])
        step += 1
    scanned = len(body.outputs) - 1 - len(state)
    if not collected and scanned:
        raise UnsupportedError("a loop without steps that collects values is not supported", found="Loop")
    return (*state, *(np.stack([row[n] for row in collected]) for n in range(scanned)))


def _scan(node: OperatorNode, arrays: _Arrays, outer: _Lookup) -> tuple[np.ndarray, ...]:
    body, scanned = _body(node, "body"), int(node.attributes.get("num_scan_inputs", 0))
    present = [array for array in arrays if array is not None]
    state, sequences = present[: len(present) - scanned], present[len(present) - scanned :]

    def setting(name: str, count: int) -> Sequence[int]:
        return node.attributes.get(name) or (0,) * count

    axes, turned = setting("scan_input_axes", scanned), setting("scan_input_directions", scanned)
    sequences = [
        np.flip(np.moveaxis(array, axis, 0), 0) if reverse else np.moveaxis(array, axis, 0)
        for array, axis, reverse in zip(sequences, axes, turned, strict=True)
    ]
    rows = list[list[np.ndarray]]()
    for step in range(len(sequences[0]) if sequences else 0):
        outputs = _call(body, [*state, *(array[step] for array in sequences)], outer)
        state = outputs[: len(state)]
        rows.append(outputs[len(state) :])
    count = len(body.outputs) - len(state)
    if not rows and count:
        raise UnsupportedError("a scan without steps is not supported", found="Scan")
    results = []
    axes, turned = setting("scan_output_axes", count), setting("scan_output_directions", count)
    for n, (axis, reverse) in enumerate(zip(axes, turned, strict=True)):
        whole = np.stack([row[n] for row in (rows[::-1] if reverse else rows)])
        results.append(np.moveaxis(whole, 0, axis))
    return (*state, *results)


_CONTROL = {"If": _branch, "Loop": _loop, "Scan": _scan}
