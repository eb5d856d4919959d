"""Pairs of layers that only outputs decide: trials in a live model beside the computation that a file records.

Where names and shapes fit several ways, the layers are filled one after the other, in the order in which the
model calls them. A wrong one gives numbers that the source's computation does not have, whatever the order of
its axes: the filling with the most layers whose numbers occur in the source is continued first. What decides
is the whole model's outputs, which must be the source's, and must not be so with two of the layers exchanged.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.graphs.graph import Graph, Value, read_graph
from ckpttool.graphs.interpreter import evaluate
from ckpttool.mapping.solver import FillResult
from ckpttool.networks.model_child import model_framework
from ckpttool.networks.tracing import CallRecorder, list_tensors, to_array
from ckpttool.verification.inputs import InputPair, InputResolver, draw_inputs, move_channels
from ckpttool.verification.output_comparison import RoundingBound, measure_output, pair_outputs
from ckpttool.verification.proof import LiveHost, preserve_state

_MOST_TRIALS = 400
_MOST_NUMBERS = 1 << 31  # that all trials together may assign
_ROWS = 6
_NEAR = 1e-4

LayerNames = tuple[str, str]
Decided = tuple[LayerNames, ...]


class FillTrials(NamedTuple):
    """How a model is filled with some pairs decided, and how values are put in it (returns the undoing).

    `calls` are the numbers of the calls of the model's modules by their names.
    """

    fill: Callable[[Decided], FillResult]
    assign: Callable[[FillResult], Callable[[], None]]
    calls: Mapping[str, int]


def decide_by_outputs(
    checkpoint: Checkpoint, model: Any, shapes: Sequence[Shape], trials: FillTrials, filling: FillResult
) -> FillResult:
    """Return the filling whose outputs are those that the checkpoint's computation gives.

    The same filling if the checkpoint records no computation that can be evaluated, if the model cannot be
    called beside it, or if no choice or more than one gives its outputs. The model's values are restored.
    """
    if model_framework(model) == "torch" and any(each.device.type != "cpu" for each in model.parameters()):
        return filling
    try:
        graph = read_graph(checkpoint)
        if graph is None or any(len(each.sources) < len(each.targets) for each in filling.ambiguous):
            return filling
        with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder, preserve_state(model):
            both = _BothModels(graph, LiveHost(Path(folder), model), tuple(shapes))
            found = _Search(both, trials).run(filling)
    except CkpttoolError:
        return filling  # one of the models cannot be run: the choice stays open
    return filling if found is None else found


# What both models compute for the same inputs.


class _NumbersRecorder(CallRecorder):
    """Describes what each call of a layer gives by numbers that the order of axes does not change."""

    activations = False

    def __init__(self) -> None:
        super().__init__()
        self.made: list[np.ndarray] = []

    def leave(self, record: Any, made: Any) -> None:
        """Describe the results of a call."""
        if record is not None:
            self.made += [_describe(to_array(each)) for each in list_tensors(made)]


def _describe(array: np.ndarray) -> np.ndarray:
    """Return size, mean, mean magnitude, root of the mean square, maximum and minimum."""
    x = np.asarray(array, np.float64).reshape(-1)
    if array.dtype.kind != "f" or x.size < 2:
        return np.zeros(6)
    return np.array([x.size, x.mean(), np.abs(x).mean(), np.sqrt((x * x).mean()), x.max(), x.min()])


class _BothModels:
    """The source's graph and a live model, with inputs for both."""

    def __init__(self, graph: Graph, host: LiveHost, shapes: Sequence[Shape]) -> None:
        """Draw the inputs and compute the source's values; raise CkpttoolError if one of them does not run."""
        opened = host.request("open", kind="factory", file=None)
        self._host, self._channels = host, ("last" if opened["framework"] == "torch" else "first")
        rows = [_input_row(each) for each in graph.inputs]
        known = all(row is not None for row in rows)
        source = {"inputs": rows if known else [], "channels": self._channels}
        self._resolver = InputResolver([source, opened], None)
        pairs = self._resolver.pairs({}, shapes)
        if len(pairs) != len(graph.inputs):
            raise CkpttoolError("the models have different numbers of inputs")
        declared = {row["name"]: row["dtype"] for row in opened["inputs"]}
        by_name = {pair.b: pair for pair in pairs}
        self._names = [name for name in declared if name in by_name] or list(by_name)
        answer = host.request(
            "prepare",
            names=self._names,
            shapes=[list(by_name[name].shape_b) for name in self._names],
            dtypes=[declared.get(name) for name in self._names],
            batch=None,
            part=None,
            run_code=False,
            rounded=None,
        )
        self.size = int(answer["size"])
        facts = zip(self._names, answer["dtypes"], answer["below"], strict=True)
        accepted = {name: (dtype, below) for name, dtype, below in facts}
        pairs = [replace(each, dtype=accepted[each.b][0], below=accepted[each.b][1]) for each in pairs]
        arrays = [each[-_ROWS:] for each in draw_inputs(pairs, _batch(graph), self.size)]
        self._given = _own_order(self._names, pairs, arrays)
        self._moves = {pair.transposed for pair in pairs} - {""}
        self._layout = str(opened["channels"])
        self._compute_source(graph, pairs, arrays, known=known)

    def _compute_source(
        self, graph: Graph, pairs: Sequence[InputPair], arrays: Sequence[np.ndarray], *, known: bool
    ) -> None:
        names = [pair.a if known else value.name for pair, value in zip(pairs, graph.inputs, strict=True)]
        used = {name for node in graph.nodes for name in node.inputs}
        inner = [Value(name) for node in graph.nodes for name in node.outputs if name in used]
        own = [value.name for value in graph.outputs]
        values = evaluate(
            replace(graph, outputs=(*graph.outputs, *(each for each in inner if each.name not in own))),
            dict(zip(names, arrays, strict=True)),
        )
        self._outputs = {name: np.asarray(values[name]) for name in own}
        rows = np.array([*map(_describe, values.values())])
        self._by_size = {size: rows[rows[:, 0] == size, 1:] for size in {*rows[:, 0]}}
        largest = max(float(np.abs(each).max(initial=0.0)) for each in self._outputs.values())
        self._bound = RoundingBound(largest, RoundingBound.of((), ()).share * _DEPTH)

    def run(self) -> tuple[int, bool]:
        """Call the model; return how many results of layers occur in the source, and whether all outputs do."""
        recorder, runner = _NumbersRecorder(), self._host.runner
        with runner.observe(recorder):
            made = runner.call(self._names, self._given)
        outputs = dict(runner.outputs(made))
        return sum(map(self._occurs, recorder.made)), self._equal(outputs)

    def _occurs(self, row: np.ndarray) -> bool:
        there = self._by_size.get(row[0]) if row[0] else None
        if there is None:
            return False
        scale = np.abs(row[4:]).max()
        return bool((np.abs(there - row[1:]).max(1) <= _NEAR * scale).any())

    def _equal(self, outputs: Mapping[str, np.ndarray]) -> bool:
        if len(outputs) != len(self._outputs):
            return False
        layouts = (self._channels, self._layout)
        names, missing = pair_outputs(self._outputs, outputs, self._moves, layouts, [])
        results = (
            measure_output(
                each.a,
                (self._outputs[each.a], move_channels(outputs[each.b], each.how)),
                (None, None),
                self._bound,
                None,
            )
            for each in names
        )
        return not missing and all(each.parity.within for each in results)


# Rounding of both sides in so many layers, in units of one sum's.
_DEPTH = 8


def _input_row(value: Value) -> dict[str, Any] | None:
    """Return an input of a graph as the process of a model describes it, None without a shape."""
    if value.shape is None or not value.shape:
        return None
    extents = [each if isinstance(each, int) else None for each in value.shape]
    return {"name": value.name, "shape": extents[1:], "dtype": value.dtype, "batch": None}


def _batch(graph: Graph) -> int | None:
    """Return the batch that a graph's inputs fix."""
    first = [value.shape[0] for value in graph.inputs if value.shape]
    return next((each for each in first if isinstance(each, int)), None)


def _own_order(
    names: Sequence[str], pairs: Sequence[InputPair], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    places = {pair.b: place for place, pair in enumerate(pairs)}
    return [move_channels(arrays[places[name]], pairs[places[name]].transposed) for name in names]


# The search.


@dataclass
class _Search:
    """Fills the model with more and more pairs, the most promising ones first."""

    both: _BothModels
    trials: FillTrials

    def run(self, filling: FillResult) -> FillResult | None:
        """Return the only complete filling with the source's outputs."""
        left = min(_MOST_TRIALS, _MOST_NUMBERS // max(self.both.size, 1))
        order = itertools.count()
        queue: list[tuple[int, int, int, Decided, FillResult]] = [(0, 0, next(order), (), filling)]
        while queue and left > 0:
            *_, decided, known = heapq.heappop(queue)
            for pair in self._choices(known):
                left -= 1
                tried = self._try((*decided, pair))
                if tried is None:
                    continue
                result, occurring, equal = tried
                if equal and not result.ambiguous and not result.unfilled:
                    return result if self._is_only((*decided, pair), filling, result) else None
                if result.ambiguous:
                    row = (-occurring, -len(decided), next(order), (*decided, pair), result)
                    heapq.heappush(queue, row)
        return None

    def _choices(self, known: FillResult) -> Iterator[LayerNames]:
        """Yield what may fill the layer that is called first, of those without a pair."""
        calls = self.trials.calls
        rows = [(calls.get(target, -1), target, group) for group in known.ambiguous for target in group.targets]
        _, target, group = min(rows, key=lambda row: row[0])
        yield from ((source, target) for source in group.sources)

    def _try(self, decided: Decided) -> tuple[FillResult, int, bool] | None:
        """Return the filling with these pairs and what the model computes then, None if it does not fit."""
        try:
            result = self.trials.fill(decided)
            if result.misfits:
                return None
            undo = self.trials.assign(result)
        except CkpttoolError:
            return None
        try:
            return (result, *self.both.run())
        finally:
            undo()

    def _is_only(self, decided: Decided, first: FillResult, result: FillResult) -> bool:
        """Return whether the outputs differ if a layer is filled with another one of its candidates."""
        candidates = {target: group.sources for group in first.ambiguous for target in group.targets}
        pairs = {match.target: match.source for match in result.matched if match.target in candidates}
        counts = Counter(pairs.values())
        assert set(counts.values()) <= {1} or decided  # noqa: S101 - a source may be shared
        for target, source in pairs.items():
            for other in candidates[target]:
                if other == source:
                    continue
                holder = next((name for name, held in pairs.items() if held == other), None)
                if holder is not None and holder < target:
                    continue  # exchanged already
                changed = {**pairs, target: other, **({holder: source} if holder is not None else {})}
                tried = self._try(tuple((theirs, ours) for ours, theirs in changed.items()))
                if tried is not None and tried[2] and not _same_values(tried[0], result):
                    return False
        return True


def _same_values(one: FillResult, other: FillResult) -> bool:
    """Return whether two fillings have the same numbers."""
    values = dict(other.tree.tensors())
    return all(np.array_equal(leaf.array(), values[path].array()) for path, leaf in one.tree.tensors())
