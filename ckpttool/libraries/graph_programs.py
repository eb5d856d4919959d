"""Policies from graphs: the program of an output, as a chain of layers if it is one.

A graph is lowered node by node (program_operators.py), whatever language its file is written in. An
operator that is not supported only matters if the action depends on it.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    CkpttoolError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    suggest_networks,
)
from ckpttool.core.sidecar import DEFAULT_SLOPE, NotUnderstood, format_activation
from ckpttool.core.source import Inline
from ckpttool.core.tree import Leaf, Path
from ckpttool.graphs.builder import needed_nodes
from ckpttool.graphs.graph import FUNCTION, Graph, OperatorNode, Value
from ckpttool.graphs.operators import COMBINATIONS, operator_kind
from ckpttool.libraries.model_steps import ChainStep
from ckpttool.libraries.program_operators import (
    PARTIAL,
    ProgramBuilder,
    ProgramValue,
    UnsupportedNodeError,
    is_fragment,
)
from ckpttool.libraries.schema import Choices, ObservationNormalizer, Program, ProgramOperation

if TYPE_CHECKING:
    import numpy as np

_OBSERVATIONS = ("float32", "float64", "uint8", "int8", "int32", "int64")
# Output names, preferred ones first, and names of outputs that are not the action.
_ACTS = (
    deferred.compile(r"deterministic_continuous_actions?"),
    deferred.compile(r"(continuous_)?actions?(_?mean|_?mu)?|acts?|actor|mean(_?actions?)?|mu|policy|pi|a"),
)
_ACTS_NOT = deferred.compile(
    r"val|critic|std|sigma|log|prob|entropy|hidden|cell|state|version|memory|shape|^(v|h|c)$|[hc]_?out|q\d*$"
)
# Operators before the first layer that keep the number of entries, besides elementwise ones and norms.
_KEEPING = frozenset(("Flatten", "Unsqueeze", "Transpose"))
_NEXT = "/next"  # graphs/torchscript.py: what a buffer is overwritten with


class GraphComputation(NamedTuple):
    """The program of a policy, and its steps if it is a chain of layers on normalized observations.

    `used` are the paths of all tensors. Of a graph that chooses discrete actions, both end with the values
    that the `choices` are made by. `graph` computes only the output that is the action.
    """

    program: Program
    used: tuple[Path, ...]
    graph: Graph
    steps: tuple[ChainStep, ...] | None = None
    norm: ObservationNormalizer | None = None
    notes: tuple[str, ...] = ()
    refusal: CkpttoolError | None = None
    choices: Choices | None = None


def lower_policy(
    graph: Graph, network: str, file: str, *, half: bool = False, hint: str | None = None
) -> GraphComputation:
    """Return the computation of a graph's action, for one observation, in float32.

    Raise UnsupportedError for several inputs, an input without a fixed shape and an operator that is not
    supported; UsageError if several outputs could be the action.

    Args:
        graph: what the file computes.
        network: the output that is the action; "" if there is one.
        file: the file's name, for errors.
        half: compute types of 16 bits in float32, too.
        hint: what errors suggest.
    """
    return _GraphLowering(_with_one_input(graph, network, file), file, half=half, hint=hint).policy(network)


def _with_one_input(graph: Graph, network: str, file: str) -> Graph:
    """Return the graph with the outputs for which the inputs of the action suffice.

    Raise UsageError if some outputs have one input, of several, and it is unknown which one is the action.
    """
    inputs = {value.name for value in graph.inputs}
    needs: dict[str, set[str]] = {}
    for value in graph.outputs:
        needed_nodes(graph.nodes, used := {value.name})
        needs[value.name] = used & inputs
    if len(inputs) < 2 or all(needs[name] == inputs for name in needs):
        return graph
    name = network if network in needs else None if network != "actor" else _choose_action_output([*needs])
    if name is None and any(len(used) == 1 for used in needs.values()):
        raise _several_outputs([*needs], file)
    return _limit_outputs(graph, {one for one in needs if name is None or needs[one] <= needs[name]})


def _limit_outputs(graph: Graph, names: set[str]) -> Graph:
    """Return the part of a graph that computes these outputs, with the inputs that they need."""
    nodes = needed_nodes(graph.nodes, used := {*names})
    inputs = tuple(value for value in graph.inputs if value.name in used)
    outputs = tuple(value for value in graph.outputs if value.name in names)
    return replace(graph, nodes=nodes, inputs=inputs, outputs=outputs)


def _several_outputs(names: Sequence[str], file: str) -> UsageError:
    return UsageError(
        "the model has several outputs, and it is unknown which one is the action",
        file=file,
        found=abbreviate_list(names, 8),
        hint=_suggest_outputs(names),
    )


def _suggest_outputs(names: Sequence[str]) -> str | None:
    """Return the options that choose one of the likely actions, at most 8; None without outputs."""
    return suggest_networks((_likely_actions(names) or names)[:8])


def _likely_actions(names: Sequence[str]) -> list[str]:
    """Return the outputs whose names do not state that they are something else."""
    return [name for name in names if not _ACTS_NOT.search(name.lower())]


def _choose_action_output(names: Sequence[str]) -> str | None:
    """Return the name of the output that is the action, None if the names do not decide."""
    likely = _likely_actions(names)
    for pattern in _ACTS:
        matches = [name for name in likely if pattern.fullmatch(name.lower())]
        if len(matches) == 1:
            return matches[0]
    return likely[0] if len(likely) == 1 and len(names) > 1 else None


class _GraphLowering:
    """Lowers a graph: its inputs, the nodes that its outputs need, and what one of them depends on."""

    def __init__(self, graph: Graph, file: str, *, half: bool, hint: str | None) -> None:
        """Add the values of all nodes; those that are not supported have an error instead."""
        self.graph, self.file, self.hint = graph, file, hint
        self.builder = ProgramBuilder(graph, half=half)
        # States that the graph has as constants, and overwrites.
        self.buffers: dict[str, Path] = {}
        # The type of the input, if the model is run in float32 instead.
        self.own_type = ""
        self._add_inputs()
        self._add_buffers()
        for node in needed_nodes(graph.nodes, {value.name for value in graph.outputs}):
            try:
                self.builder.lower(node)
            except UnsupportedNodeError as error:
                self.builder.failed |= dict.fromkeys(node.outputs, error)
            except CkpttoolError as error:
                raise error.located(file=file) from error.__cause__

    # Inputs.

    def _add_inputs(self) -> None:
        cells = {name for node in self.graph.nodes if _is_cell(node) for name in node.inputs[5:7]}
        states = [value for value in self.graph.inputs if value.name in cells]
        plain = [value for value in self.graph.inputs if value.name not in cells]
        if len(plain) != 1:
            raise UnsupportedError(
                "the model must have exactly one observation input",
                file=self.file,
                expected="one input",
                found=abbreviate_list([value.name for value in plain], 6) or "none",
            )
        (only,) = plain
        halves = ("float16", "bfloat16") if self.builder.half else ()
        if only.dtype is not None and only.dtype not in (*_OBSERVATIONS, *halves):
            raise self._not_observed(only, "numbers of type float32, float64, uint8 or another integer type")
        if only.shape is not None and len(only.shape) < 2:
            raise self._not_observed(only, "[batch, number of observations], or images")
        batch, *rest = only.shape or ("", "")
        shape = tuple(extent for extent in rest if isinstance(extent, int) and extent > 0)
        if len(shape) != len(rest):
            shape = (self._first_width(only),) if len(rest) == 1 else ()
        if 0 in shape or not shape:
            raise self._not_observed(only, "fixed extents, except the number of observations")
        self.own_type = next((name for name in ("float64", *halves) if name == only.dtype), "")
        self.builder.batch = batch if isinstance(batch, int) and batch > 0 else 1
        self.builder.inputs = [("obs", shape)]
        self.builder.values[only.name] = ProgramValue(0, shape)
        for value in states:
            extents = value.shape or ()
            if len(extents) != 3 or extents[0] not in (1, "") or not isinstance(extents[2], int):
                raise self._not_observed(value, "the state of one recurrent layer, [1, batch, units]")
            self._add_state(value.name, extents[2])

    def _add_state(self, name: str, units: int) -> None:
        number = self.builder.first
        self.builder.states[name] = units
        self.builder.values[name] = ProgramValue(number, (units,), (0,))

    def _add_buffers(self) -> None:
        """Add the states that are buffers: zeros, [1, 1, units], that each step overwrites."""
        for value in self.graph.outputs:
            name = value.name.removesuffix(_NEXT)
            constant = self.graph.constants.get(name)
            if name == value.name or constant is None or constant.path is None:
                continue
            extents = constant.shape or ()
            if len(extents) == 3 and extents[:2] == (1, 1) and not constant.read(name).any():
                self.buffers[name] = constant.path
                self._add_state(name, extents[2])

    def _first_width(self, value: Value) -> int:
        """Return the input size of the first layer, for an input without a fixed one; 0 without a layer."""
        names, probe = {value.name}, ProgramBuilder(self.graph)
        known: Mapping[str, Any] = collections.ChainMap(probe.values, dict(self.graph.constants))
        for node in self.graph.nodes:
            others = [name for name in node.inputs if name and name not in names]
            if names.isdisjoint(node.inputs) and not _is_cell(node):
                if known.keys() >= {*others}:
                    with contextlib.suppress(UnsupportedNodeError):
                        probe.lower(node)
                continue
            kind = operator_kind(node.op)
            rows = kind in COMBINATIONS or kind in ("norm", "channelwise")
            for shape in filter(None, (known[name].shape for name in others if name in known)):
                if kind in ("product", "recurrent"):
                    # [in, out], or [directions, gates * units, in]
                    last = len(shape) == 3 or node.attributes.get("transB", 0)
                    return int(shape[-1 if last else 0])
                if rows and math.prod(shape) > 1:
                    return int(shape[-1])
            if rows or node.op in _KEEPING:
                names.update(node.outputs)
        return 0

    def _not_observed(self, value: Value, expected: str) -> CkpttoolError:
        return UnsupportedError(
            "an input of the model is neither an observation nor a recurrent state",
            file=self.file,
            path=value.name,
            expected=expected,
            found=str(list(value.shape or ())),
        )

    # Outputs.

    def policy(self, network: str) -> GraphComputation:
        """Return the computation of the action."""
        names = [value.name for value in self.graph.outputs]
        if not names:
            raise UnsupportedError("the model has no output", file=self.file)
        others = [name for name in names if not self._is_state(name)] or names
        name: str | None = network if network in names else None
        if name is None and network != "actor":
            raise UsageError(
                f"the model has no output named {network}",
                file=self.file,
                found=abbreviate_list(names, 8),
                hint=_suggest_outputs(names),
            )
        if name is None:
            name = others[0] if len(others) == 1 else _choose_action_output(others)
        if name is None and len(probable := [other for other in others if self._is_probability(other)]) == 1:
            name = probable[0]
        if name is None:
            raise _several_outputs(names, self.file)
        left = [other for other in others if other != name]
        notes = [f"{', '.join(left)} left out: {name} is the policy"] if left else []
        if self.own_type:
            notes.append(f"the model computes in {self.own_type} but is run in float32")
        return self.computation(name, notes)

    def _is_state(self, name: str) -> bool:
        value = self.builder.values.get(name)
        return isinstance(value, ProgramValue) and value.ones == (0,)

    def _is_probability(self, name: str) -> bool:
        """Return whether an output are probabilities of actions."""
        value = self.builder.values.get(name)
        operation = self.builder.operation(value.number) if isinstance(value, ProgramValue) else None
        return operation is not None and operation.kind == "softmax"

    def computation(self, name: str, notes: Sequence[str]) -> GraphComputation:
        """Return the computation of one output."""
        value: object = self.builder.values.get(name)
        try:
            if name in self.builder.failed:
                raise self.builder.failed[name]
            if is_fragment(value):
                value = self.builder.whole_layer(value)
        except UnsupportedNodeError as error:
            raise self._refused(error.reason, error.node) from None
        if not isinstance(value, ProgramValue):
            raise self._refused("a constant", name)
        scores = self._find_choices(value)
        value, choices = (value, None) if scores is None else scores
        if len(value.shape) != 1:
            raise self._refused(f"an output of shape {list(value.shape)}", name)
        needed = self._needed(value.number)
        operations = [(number, self.builder.operations[number - self.builder.first]) for number in needed]
        partial = [operation.value["node"] for _, operation in operations if operation.kind in PARTIAL]
        refusals = [self._refused(node.op, node) for node in partial]
        self._require_carried([operation for _, operation in operations])
        places = {number: number for number in range(self.builder.first)}
        places |= {number: self.builder.first + position for position, number in enumerate(needed)}
        steps = tuple(
            operation._replace(inputs=tuple(places[one] for one in operation.inputs))
            for _, operation in operations
        )
        states = dict(self.builder.states)
        program = Program(tuple(self.builder.inputs), states, steps, places[value.number], value.shape[0])
        tensors = (path for step in steps for path in step.value.get("paths", ()))
        used = tuple(dict.fromkeys((*tensors, *self.buffers.values())))
        chain, norm = _match_chain(program)
        if chain is None and refusals:
            raise refusals[0]
        graph = _limit_outputs(self.graph, {name})
        refusal = next(iter(refusals), None)
        return GraphComputation(program, used, graph, chain, norm, tuple(notes), refusal, choices)

    def _needed(self, number: int) -> list[int]:
        """Return the numbers of the operations that a value depends on, in order."""
        needed, waiting = set[int](), [number]
        while waiting:
            value_number = waiting.pop()
            if value_number >= self.builder.first and value_number not in needed:
                needed.add(value_number)
                waiting += self.builder.operations[value_number - self.builder.first].inputs
        return sorted(needed)

    def _find_choices(self, output: ProgramValue) -> tuple[ProgramValue, Choices] | None:
        """Return the scores of discrete actions and the choices; None if the output is no such choice.

        The outputs are probabilities, of which the largest is chosen. Or each action is the number of the
        largest score, or of the largest in one of consecutive slices of the
        scores, plus its first value.
        """
        at = self.builder.operation
        last = at(output.number)
        if last is not None and last.kind == "softmax":
            return self._scores_of(last.inputs[0], (output.shape[0],), (0,))
        numbers = last.inputs if last is not None and last.kind == "concat" else (output.number,)
        counts, starts, stop, sources = [], [], 0, set()
        for number in numbers:
            operation, start = at(number), 0.0
            if operation is not None and operation.kind == "affine" and (operation.value["scale"] == 1).all():
                start = float(operation.value["shift"].reshape(-1)[0])
                operation = at(operation.inputs[0])
            if operation is None or operation.kind != "arg_max" or not start.is_integer():
                return None
            counts.append(operation.value["count"])
            starts.append(int(start))
            source, before = operation.inputs[0], at(operation.inputs[0])
            if len(numbers) > 1:
                if before is None or before.kind != "slice" or before.value["start"] != stop:
                    return None
                source, stop = before.inputs[0], before.value["stop"]
            probable = at(source)
            sources.add(probable.inputs[0] if probable and probable.kind == "softmax" else source)
        return self._scores_of(sources.pop(), counts, starts) if len(sources) == 1 else None

    def _scores_of(
        self, number: int, counts: Sequence[int], starts: Sequence[int]
    ) -> tuple[ProgramValue, Choices] | None:
        """Return the scores with a number, and the choices that they decide."""
        values = (value for value in self.builder.values.values() if isinstance(value, ProgramValue))
        scores = next((value for value in values if value.number == number and not value.ones), None)
        if scores is None or scores.shape != (sum(counts),):
            return None
        return scores, Choices(tuple(counts), tuple(starts), single=len(counts) == 1)

    def _require_carried(self, operations: Sequence[ProgramOperation]) -> None:
        """Require that the model outputs every state of its recurrent layers."""
        values, carried = self.builder.values, set[str]()
        outputs = [value.name for value in self.graph.outputs]
        for operation in operations:
            for state, output in operation.value.get("carried", {}).items():
                ends = [f"{state}{_NEXT}"] if state in self.buffers else outputs
                value = values.get(output)
                same = (isinstance(values.get(end), ProgramValue) and values[end] == value for end in ends)
                if output not in ends and not (isinstance(value, ProgramValue) and any(same)):
                    reason = f"the next state of {state} is not a model output"
                    raise self._refused(
                        operation.value["node"].op if state in self.buffers else reason, output
                    )
                carried.add(state)
        if missing := [state for state in self.builder.states if state not in carried]:
            raise self._refused("a state that the model does not output", missing[0])

    def _refused(self, reason: str, node: OperatorNode | str) -> CkpttoolError:
        title = node if isinstance(node, str) else "/".join(node.scope) if not node.name else node.name
        missing = "" if isinstance(node, str) else node.attributes.get("not_understood", "")
        stated = "" if isinstance(node, str) else node.attributes.get(FUNCTION, "")
        return UnsupportedError(
            "the graph computes the action with an unsupported operation",
            file=self.file,
            path=title or (None if isinstance(node, str) else node.title) or None,
            found=", ".join(filter(None, (reason, missing, stated))),
            hint=self.hint,
        )


def _is_cell(node: OperatorNode) -> bool:
    """Return whether a node is a recurrent layer, whose sixth and seventh inputs are its states."""
    return operator_kind(node.op) == "recurrent"


def _match_chain(
    program: Program,
) -> tuple[tuple[ChainStep, ...] | None, ObservationNormalizer | None]:
    """Return the program as policy steps and observation statistics; None for other programs."""
    line = all(op.inputs == (number,) for number, op in enumerate(program.operations))
    if program.states or not line or len(program.inputs[0][1]) != 1:
        return None, None
    operations = list(program.operations)
    first = next((n for n, op in enumerate(operations) if op.kind == "dense"), len(operations))
    norm = _match_normalizer(operations[:first], program.inputs[0][1][0]) if first else None
    if first and norm is None:
        return None, None
    steps = tuple(_list_steps(operations[first:]))
    return (None, None) if any(step.kind == "unknown" for step in steps) else (steps, norm)


def _list_steps(operations: Sequence[ProgramOperation]) -> Iterator[ChainStep]:
    """Yield the steps of operations in sequence; that of one that no chain has is `unknown`."""
    import numpy as np

    rows: tuple[Any, Any] = (1.0, 0.0)
    for number, op in enumerate((*operations, None)):
        name = (f"step {number}",)
        if op is not None and op.kind == "affine":
            rows = (rows[0] * op.value["scale"], rows[1] * op.value["scale"] + op.value["shift"])
            continue
        if np.any(rows[0] != 1) or np.any(rows[1]):
            # The policy's records require lists.
            wide = np.broadcast_arrays(*(np.asarray(row, np.float64) for row in rows))
            scale, offset = ([float(entry) for entry in row.reshape(-1)] for row in wide)
            yield ChainStep("affine", name, (scale, offset))
        rows = (1.0, 0.0)
        if op is None:
            return
        value = op.value
        if op.kind in ("dense", "layer_norm") and value["weights"] is not None:
            yield ChainStep(op.kind, name, value["weights"])
        elif op.kind == "activation":
            usual = math.isclose(value["slope"], DEFAULT_SLOPE, rel_tol=1e-6)
            slope = DEFAULT_SLOPE if usual else value["slope"]
            yield ChainStep("activation", name, format_activation(value["name"], slope))
        elif op.kind == "clip" and (limits := _find_limits(value)) in _LIMITED:
            yield ChainStep("activation", name, _LIMITED[limits])
        elif op.kind == "function":
            node = value["node"]
            stated = NotUnderstood(node.attributes[FUNCTION], "the model's configuration")
            yield ChainStep("code" if node.op == "Lambda" else "activation", node.scope, stated)
        else:
            yield ChainStep("unknown", name)


# Activations of policies that are limits.
_LIMITED = {(0.0, 6.0): "relu6", (-1.0, 1.0): "hardtanh"}


def _find_limits(value: Mapping[str, Any]) -> tuple[float, float]:
    """Return the limits of all entries, NaN where they differ."""
    rows = (value["low"], value["high"])
    low, high = (float(row[0]) if (row == row[0]).all() else math.nan for row in rows)
    return low, high


def _match_normalizer(operations: Sequence[ProgramOperation], width: int) -> ObservationNormalizer | None:
    """Return mean, standard deviation and clipping of observations, None for other operations."""
    import numpy as np

    scale, shift, clip = np.ones(width), np.zeros(width), None
    for op in operations:
        if op.kind == "affine" and clip is None:
            scale, shift = scale * op.value["scale"], shift * op.value["scale"] + op.value["shift"]
        elif op.kind == "clip" and clip is None:
            low, clip = _find_limits(op.value)
            if not (low == -clip and 0 < clip < 3e38):
                return None
        else:
            return None
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    rows: Mapping[str, np.ndarray] = {"mean": (0.0 - shift) / scale, "std": 1 / scale}
    mean, std = (
        Leaf("float64", row.shape, Inline(row.astype("<f8").tobytes()), f"normalizer/{name}", "buffer")
        for name, row in rows.items()
    )
    return ObservationNormalizer(mean, std=std, clip=clip)
