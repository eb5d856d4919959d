"""Pairs of layers and orders of parts that only outputs decide: trials beside the computation of the source.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.source import Shape
from ckpttool.graphs.graph import Graph, Value, read_graph
from ckpttool.graphs.interpreter import evaluate
from ckpttool.mapping.feature_orders import AssumedParts
from ckpttool.mapping.solver import FillResult
from ckpttool.networks.tracing import describe_numbers
from ckpttool.networks.worker import ModelSpec
from ckpttool.verification.inputs import (
    InputPair,
    InputResolver,
    draw_inputs,
    move_channels,
    parse_named_shapes,
)
from ckpttool.verification.output_comparison import RoundingBound, measure_output, pair_outputs
from ckpttool.verification.sides import ModelHost, ModelSide
from ckpttool.verification.two_models import ComparedModels, ModelClient, open_host

if TYPE_CHECKING:
    from ckpttool.networks.messages import InputRow
    from ckpttool.networks.model_runner import Answer, Opened

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

    `calls` are the numbers of the calls of the model's modules by their names, `running` starts what runs the
    model, and `shapes` are those of its inputs if it declares none.
    """

    fill: Callable[[Choice], FillResult]
    assign: Callable[[FillResult], Callable[[], None]]
    calls: Mapping[str, int]
    running: Callable[[], AbstractContextManager[ModelHost]]
    shapes: Sequence[Shape]


class TrialSource(NamedTuple):
    """What is filled from: a checkpoint of a framework, and the user's code that builds its model, if any.

    `part` is the path of the model in the checkpoint.
    """

    checkpoint: Checkpoint
    framework: str
    like: ModelSpec | None = None
    part: str | None = None


def decide_by_outputs(
    source: TrialSource, trials: FillTrials, filling: FillResult
) -> tuple[FillResult | None, str]:
    """Return the filling whose outputs are those that the source's computation gives, else what is missing.

    There is none if the checkpoint records no computation that can be evaluated and no code builds its model,
    if the model cannot be called beside it, or if no choice or more than one gives its outputs. What is
    missing is the shape of the model's inputs, or "" if nothing is known that would help.
    """
    missing = ""
    try:
        with ExitStack() as stack:
            running = stack.enter_context(_run_source(source))
            if running is None:
                return None, ""
            model = ModelSide("B", "", ModelSpec("the filled model", shapes=tuple(trials.shapes)))
            host = stack.enter_context(trials.running())
            missing = "" if trials.shapes else "with --input-shape, outputs could decide"
            both = _BothModels(running, ModelClient(model, host))
            missing = ""
            return _Search(both, trials).run(filling), ""
    except CkpttoolError:
        return None, missing  # one of the models cannot be run: the choice stays open


@contextmanager
def _run_source(source: TrialSource) -> Iterator[ModelClient | None]:
    """Start what computes the source's outputs: the recorded graph, else the user's code, if there is any."""
    checkpoint, like = source.checkpoint, source.like
    graph = None
    with suppress(*([] if like is None else [CkpttoolError])):
        graph = None if source.part is not None else read_graph(checkpoint)
    if graph is not None:
        with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder:
            evaluated = _GraphHost(Path(folder), graph, source.framework)
            yield ModelClient(ModelSide("A", checkpoint.path, process=evaluated), evaluated)
    elif like is not None:
        side = ModelSide("A", checkpoint.path, like, like.python, part=source.part)
        with open_host(side) as host:
            yield ModelClient(side, host)
    else:
        yield None


class _GraphHost:
    """Answers as the process of a model does, by evaluating the graph that a file records."""

    def __init__(self, folder: Path, graph: Graph, framework: str) -> None:
        self.folder, self._graph, self._framework = folder, graph, framework
        used = {name for node in graph.nodes for name in node.inputs}
        self._own = [value.name for value in graph.outputs]
        inner = [Value(name) for node in graph.nodes for name in node.outputs if name in used]
        others = (input_ for input_ in inner if input_.name not in self._own)
        self._observed = replace(graph, outputs=(*graph.outputs, *others))

    def request(self, do: str, **values: Any) -> Answer:
        """Answer a request."""
        if do == "open":
            rows = [_input_row(input_) for input_ in self._graph.inputs]
            known = [row for row in rows if row is not None]
            whole = len(known) == len(rows)
            return {
                "inputs": known if whole else [],
                "channels": "first" if self._framework == "torch" else "last",
            }
        if do == "prepare":
            if len(values["inputs"]) != len(self._graph.inputs):
                raise UsageError("the models have different numbers of inputs")
            declared = [row["dtype"] or "float32" for row in values["inputs"]]
            dtypes = ["float32" if dtype.startswith("float") else dtype for dtype in declared]
            return {"dtypes": dtypes, "below": [None] * len(dtypes), "size": 0, "notes": []}
        own, names = [input_.name for input_ in self._graph.inputs], values["names"]
        arrays = [np.load(self.folder / f"input-{index}.npy") for index in range(len(names))]
        names = names if {*names} == {*own} else own
        computed = evaluate(self._observed, dict(zip(names, arrays, strict=True)))
        for index, name in enumerate(self._own):
            np.save(self.folder / f"output-{index}.npy", np.asarray(computed[name]), allow_pickle=False)
        described = np.array([*map(describe_numbers, computed.values())])
        np.save(self.folder / "results.npy", described, allow_pickle=False)
        return {"outputs": self._own}


class _BothModels:
    """The source's computation and a model, with inputs for both."""

    def __init__(self, source: ModelClient, model: ModelClient) -> None:
        """Draw the inputs and compute the source's values; raise CkpttoolError if one does not run."""
        by_graph = source.side.like is None
        kinds = "graph" if by_graph else "factory", "factory"
        opened = [side.open(kind, run_code=False) for side, kind in zip((source, model), kinds, strict=True)]
        self._source, self._model = source, model
        self._layouts = [str(host["channels"]) for host in opened]
        shapes = [() if side.side.like is None else side.side.like.shapes for side in (source, model)]
        session = self._session = ComparedModels((source, model), kinds)
        session.pairs = _pair_inputs(opened, *shapes)
        batch = next((row["batch"] for host in opened for row in host["inputs"] if row["batch"]), None)
        session.prepare(batch, run_code=False)
        if by_graph:
            # The graph takes what the model takes, and numbers of words are integers.
            source.dtypes = {pair.a: pair.dtype if pair.below is None else "int64" for pair in session.pairs}
        batches = _BATCHES if batch is None else (batch,)
        for rows in batches:
            session.give([inputs[:rows] for inputs in draw_inputs(session.pairs, rows, session.size)])
            try:
                self._outputs, described = source.results()
                break
            except CkpttoolError:
                if rows == batches[-1]:
                    raise
        self._by_size = {size: described[described[:, 0] == size, 1:] for size in {*described[:, 0]}}
        largest = max(float(np.abs(output).max(initial=0.0)) for output in self._outputs.values())
        self._bound = RoundingBound(largest, RoundingBound.of((), ()).share * _DEPTH)

    @property
    def size(self) -> int:
        """The number of weights."""
        return self._session.size

    def run(self) -> tuple[int, bool]:
        """Return how many results of layers occur in the source, and whether all outputs are its own."""
        outputs, described = self._model.results()
        return sum(map(self._occurs, described)), self._equal(outputs)

    def _occurs(self, row: np.ndarray) -> bool:
        there = self._by_size.get(row[0]) if row[0] else None
        if there is None:
            return False
        with np.errstate(all="ignore"):
            return bool((np.abs(there - row[1:]).max(1) <= _NEAR * np.abs(row[4:]).max()).any())

    def _equal(self, outputs: Mapping[str, np.ndarray]) -> bool:
        if len(outputs) != len(self._outputs):
            return False
        moves = {pair.transposed for pair in self._session.pairs} - {""}
        names, missing = pair_outputs(self._outputs, outputs, moves, self._layouts, [])
        results = (
            measure_output(
                name.a,
                (self._outputs[name.a], move_channels(outputs[name.b], name.how)),
                (None, None),
                self._bound,
                None,
            )
            for name in names
        )
        return not missing and all(result.parity.within for result in results)


_MOST_ORDERS = 24
# Rounding of both sides in so many layers, in units of one sum's.
_DEPTH = 8


def _input_row(value: Value) -> InputRow | None:
    """Return an input of a graph as the process of a model describes it, None without a shape."""
    if value.shape is None or not value.shape:
        return None
    batch, *extents = (extent if isinstance(extent, int) else None for extent in value.shape)
    return {"name": value.name, "shape": extents, "dtype": value.dtype, "batch": batch}


def _pair_inputs(
    opened: Sequence[Opened], shapes: Sequence[Shape], shapes_b: Sequence[Shape]
) -> list[InputPair]:
    """Return the pairs of inputs; a file may list them in another order, which their shapes show.

    Raise UsageError if no order or several fit.
    """
    rows = opened[0]["inputs"]
    named_shapes = parse_named_shapes([",".join(map(str, shape)) for shape in shapes])
    fitting = []
    for index, order in enumerate(itertools.permutations(rows)):
        if index == _MOST_ORDERS:
            break
        resolver = InputResolver([{**opened[0], "inputs": list(order)}, opened[1]], None)
        try:
            fitting.append(resolver.pairs(named_shapes, shapes_b))
        except UsageError:
            if len(rows) < 2:
                raise
            continue
        if not index:
            break  # the order of the file
    if len(fitting) != 1:
        raise UsageError("the inputs of the models do not fit")
    return fitting[0]


@dataclass
class _Search:
    """Fills the model with more and more choices made, the most promising ones first."""

    both: _BothModels
    trials: FillTrials

    def run(self, filling: FillResult) -> FillResult | None:
        """Return the only complete filling with the source's outputs."""
        if not (filling.ambiguous or filling.assumed_parts):
            tried = self._try(Choice())
            return tried[0] if tried is not None and tried[2] and not tried[0].unfilled else None
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
                [Choice(pairs, (*orders, (parts, order))) for order in parts.orders],
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
            holder = next((name for name, target in pairs.items() if target == other), None)
            if other == source or (holder is not None and holder < target):
                continue
            changed = {**pairs, target: other, **({holder: source} if holder is not None else {})}
            yield Choice(tuple((target, source) for source, target in changed.items()), decided.orders)
    whole = tuple((source, target) for target, source in pairs.items())
    for number, (parts, order) in enumerate(decided.orders):
        for other_order in parts.orders:
            if other_order != order:
                orders = (*decided.orders[:number], (parts, other_order), *decided.orders[number + 1 :])
                yield Choice(whole, orders)


def _same_values(one: FillResult, other: FillResult) -> bool:
    """Return whether two fillings have the same numbers."""
    values = dict(other.tree.tensors())
    return all(np.array_equal(leaf.array(), values[path].array()) for path, leaf in one.tree.tensors())
