"""Pairs of layers and orders of parts that only outputs decide: trials beside the computation of a file.

Where names and shapes fit several ways, the layers are filled one after the other, in the order in which the
model calls them. A wrong one gives numbers that the source's computation does not have, whatever the order of
its axes: the filling with the most layers whose numbers occur in the source is continued first. What decides
is the whole model's outputs, which must be the source's, and must not be so with two of the layers exchanged.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError, WorkerError
from ckpttool.core.source import Shape
from ckpttool.graphs.graph import Graph, Value, read_graph
from ckpttool.graphs.interpreter import evaluate
from ckpttool.mapping.feature_orders import AssumedParts
from ckpttool.mapping.solver import FillResult
from ckpttool.networks.model_child import last_error_line, model_framework
from ckpttool.networks.tracing import CallRecorder, list_tensors, to_array
from ckpttool.verification.inputs import InputPair, InputResolver, draw_inputs, move_channels
from ckpttool.verification.output_comparison import RoundingBound, measure_output, pair_outputs
from ckpttool.verification.proof import LiveHost, preserve_state

_MOST_TRIALS = 200
_MOST_NUMBERS = 1 << 30  # that all trials together may assign
# A traced program may have the number of rows with which it was traced in its code.
_BATCHES = (6, 1, 2, 3, 4, 8)
_NEAR = 1e-4


class Choice(NamedTuple):
    """Pairs of layers, of the source and the model, and orders of parts in the source."""

    pairs: tuple[tuple[str, str], ...] = ()
    orders: tuple[tuple[AssumedParts, tuple[int, ...]], ...] = ()


class FillTrials(NamedTuple):
    """How a model is filled with some choices decided, and how values are put in it (returns the undoing).

    `calls` are the numbers of the calls of the model's modules by their names, `framework` is the source's.
    """

    fill: Callable[[Choice], FillResult]
    assign: Callable[[FillResult], Callable[[], None]]
    calls: Mapping[str, int]
    framework: str


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
        if graph is None:
            return filling
        with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder, preserve_state(model):
            both = _BothModels((graph, trials.framework), LiveHost(Path(folder), model), shapes)
            return _Search(both, trials).run(filling) or filling
    except CkpttoolError:
        return filling  # one of the models cannot be run: the choice stays open


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
    with np.errstate(all="ignore"):
        return np.array([x.size, x.mean(), np.abs(x).mean(), np.sqrt((x * x).mean()), x.max(), x.min()])


class _BothModels:
    """The source's graph and a live model, with inputs for both."""

    def __init__(self, source: tuple[Graph, str], host: LiveHost, shapes: Sequence[Shape]) -> None:
        """Draw the inputs and compute the source's values; raise CkpttoolError if one does not run."""
        (graph, framework), opened = source, host.request("open", kind="factory", file=None)
        self._host, self._channels = host, ("first" if framework == "torch" else "last")
        rows = [_input_row(each) for each in graph.inputs]
        known = all(row is not None for row in rows)
        pairs = _pair_inputs(rows if known else [], self._channels, opened, shapes)
        if len(pairs) != len(graph.inputs):
            raise UsageError("the models have different numbers of inputs")
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
        self._moves = {pair.transposed for pair in pairs} - {""}
        self._layout = str(opened["channels"])
        batches = _batches(graph)
        for batch in batches:
            arrays = [each[:batch] for each in draw_inputs(pairs, batch, self.size)]
            self._given = _own_order(self._names, pairs, arrays)
            try:
                self._compute_source(graph, pairs, arrays, known=known)
                break
            except CkpttoolError:
                if batch == batches[-1]:
                    raise

    def _compute_source(
        self, graph: Graph, pairs: Sequence[InputPair], arrays: Sequence[np.ndarray], *, known: bool
    ) -> None:
        names = [pair.a if known else value.name for pair, value in zip(pairs, graph.inputs, strict=True)]
        # A model of Keras also takes the numbers of words as floats.
        given = [
            x if pair.below is None else x.astype(np.int64) for x, pair in zip(arrays, pairs, strict=True)
        ]
        used = {name for node in graph.nodes for name in node.inputs}
        inner = [Value(name) for node in graph.nodes for name in node.outputs if name in used]
        own = [value.name for value in graph.outputs]
        values = evaluate(
            replace(graph, outputs=(*graph.outputs, *(each for each in inner if each.name not in own))),
            dict(zip(names, given, strict=True)),
        )
        self._outputs = {name: np.asarray(values[name]) for name in own}
        rows = np.array([*map(_describe, values.values())])
        self._by_size = {size: rows[rows[:, 0] == size, 1:] for size in {*rows[:, 0]}}
        largest = max(float(np.abs(each).max(initial=0.0)) for each in self._outputs.values())
        self._bound = RoundingBound(largest, RoundingBound.of((), ()).share * _DEPTH)

    def run(self) -> tuple[int, bool]:
        """Return how many results of layers occur in the source, and whether all outputs are its own."""
        recorder, runner = _NumbersRecorder(), self._host.runner
        try:
            with runner.observe(recorder):
                outputs = dict(runner.outputs(runner.call(self._names, self._given)))
        except Exception as error:  # whatever the model's own code raises for these numbers
            raise WorkerError(f"calling the model raises {last_error_line(error)}") from error
        return sum(map(self._occurs, recorder.made)), self._equal(outputs)

    def _occurs(self, row: np.ndarray) -> bool:
        there = self._by_size.get(row[0]) if row[0] else None
        if there is None:
            return False
        with np.errstate(all="ignore"):
            return bool((np.abs(there - row[1:]).max(1) <= _NEAR * np.abs(row[4:]).max()).any())

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


_MOST_ORDERS = 24
# Rounding of both sides in so many layers, in units of one sum's.
_DEPTH = 8


def _input_row(value: Value) -> dict[str, Any] | None:
    """Return an input of a graph as the process of a model describes it, None without a shape."""
    if value.shape is None or not value.shape:
        return None
    extents = [each if isinstance(each, int) else None for each in value.shape]
    return {"name": value.name, "shape": extents[1:], "dtype": value.dtype, "batch": None}


def _pair_inputs(
    rows: Sequence[Any], channels: str, opened: Mapping[str, Any], shapes: Sequence[Shape]
) -> list[InputPair]:
    """Return the pairs of inputs; a file may list them in another order, which their shapes show.

    Raise UsageError if no order or several fit.
    """
    fitting = []
    for place, order in enumerate(itertools.permutations(rows)):
        if place == _MOST_ORDERS:
            break
        resolver = InputResolver([{"inputs": list(order), "channels": channels}, opened], None)
        try:
            fitting.append(resolver.pairs({}, shapes))
        except UsageError:
            if len(rows) < 2:
                raise
            continue
        if not place:
            break  # the order of the file
    if len(fitting) != 1:
        raise UsageError("the inputs of the models do not fit")
    return fitting[0]


def _batches(graph: Graph) -> Sequence[int]:
    """Return the batch that a graph's inputs fix, otherwise those to try."""
    first = [value.shape[0] for value in graph.inputs if value.shape]
    return [each for each in first if isinstance(each, int)][:1] or _BATCHES


def _own_order(
    names: Sequence[str], pairs: Sequence[InputPair], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    places = {pair.b: place for place, pair in enumerate(pairs)}
    return [move_channels(arrays[places[name]], pairs[places[name]].transposed) for name in names]


# The search.


@dataclass
class _Search:
    """Fills the model with more and more choices made, the most promising ones first."""

    both: _BothModels
    trials: FillTrials

    def run(self, filling: FillResult) -> FillResult | None:
        """Return the only complete filling with the source's outputs."""
        left = min(_MOST_TRIALS, _MOST_NUMBERS // max(self.both.size, 1))
        order = itertools.count()
        queue: list[tuple[int, int, int, Choice, FillResult]] = [(0, 0, next(order), Choice(), filling)]
        while queue and left > 0:
            *_, decided, known = heapq.heappop(queue)
            for choice in self._choices(decided, known):
                left -= 1
                tried = self._try(choice)
                if tried is None:
                    continue
                result, occurring, equal = tried
                if result.ambiguous or result.assumed_parts:
                    heapq.heappush(
                        queue, (-occurring, -len(choice.pairs + choice.orders), next(order), choice, result)
                    )
                elif equal and not result.unfilled:
                    return result if self._is_only(choice, filling, result) else None
        return None

    def _choices(self, decided: Choice, known: FillResult) -> Iterator[Choice]:
        """Yield the choices for the layer that is called first, of those that are open."""
        calls = self.trials.calls
        pairs, orders = decided
        open_layers: list[tuple[int, list[Choice]]] = [
            (calls.get(target, -1), [Choice((*pairs, (source, target)), orders) for source in group.sources])
            for group in known.ambiguous
            for target in group.targets
        ]
        targets = {match.source: match.target for match in known.matched}
        open_layers += [
            (
                calls.get(targets.get(parts.layer, ""), -1),
                [Choice(pairs, (*orders, (parts, each))) for each in parts.orders],
            )
            for parts in known.assumed_parts
        ]
        yield from min(open_layers, key=lambda row: row[0])[1]

    def _try(self, decided: Choice) -> tuple[FillResult, int, bool] | None:
        """Return the filling with these choices and what the model computes then, None if it does not fit."""
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

    def _is_only(self, decided: Choice, first: FillResult, result: FillResult) -> bool:
        """Return whether the outputs differ with another choice for a layer, or two layers exchanged."""
        for other in _other_choices(decided, first, result):
            tried = self._try(other)
            if tried is not None and tried[2] and not _same_values(tried[0], result):
                return False
        return True


def _other_choices(decided: Choice, first: FillResult, result: FillResult) -> Iterator[Choice]:
    candidates = {target: group.sources for group in first.ambiguous for target in group.targets}
    pairs = {match.target: match.source for match in result.matched if match.target in candidates}
    for target, source in pairs.items():
        for other in candidates[target]:
            holder = next((name for name, held in pairs.items() if held == other), None)
            if other == source or (holder is not None and holder < target):
                continue
            changed = {**pairs, target: other, **({holder: source} if holder is not None else {})}
            yield Choice(tuple((theirs, ours) for ours, theirs in changed.items()), decided.orders)
    whole = tuple((source, target) for target, source in pairs.items())
    for place, (parts, order) in enumerate(decided.orders):
        for other_order in parts.orders:
            if other_order != order:
                orders = (*decided.orders[:place], (parts, other_order), *decided.orders[place + 1 :])
                yield Choice(whole, orders)


def _same_values(one: FillResult, other: FillResult) -> bool:
    """Return whether two fillings have the same numbers."""
    values = dict(other.tree.tensors())
    return all(np.array_equal(leaf.array(), values[path].array()) for path, leaf in one.tree.tensors())
