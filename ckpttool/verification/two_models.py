"""Run any two models on the same inputs, and find the layer where they part."""

from __future__ import annotations

import glob
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ckpttool.core import limits, sandbox
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CLASSES, CODE, UNKNOWN, filter_verdict
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, UsageError, abbreviate_list
from ckpttool.core.kinds import find_family
from ckpttool.core.text import describe_record, render_record
from ckpttool.core.urls import base_name, format_command, unused_name
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import available_backend, build_agent_network, require_facts
from ckpttool.evaluation.playing import with_recorded_choices
from ckpttool.evaluation.restore import restore_agent
from ckpttool.networks import numpy_backend
from ckpttool.networks.messages import Requests
from ckpttool.networks.model_child import CONVERT
from ckpttool.networks.network import Network, Observation, Policy
from ckpttool.networks.tracing import ROOT, map_array
from ckpttool.networks.worker import ModelProcess, Worker
from ckpttool.verification import causes
from ckpttool.verification.causes import (
    BETWEEN,
    LAYER,
    CapturedCall,
    Cause,
    Divergence,
    LayerCallPair,
    LayerCauses,
    LayerComparison,
    align_arrays,
    is_inside,
)
from ckpttool.verification.computations import OperationDifference, RecordedCall
from ckpttool.verification.inputs import (
    HUGE_MODEL,
    OPPOSITE,
    InputFile,
    InputPair,
    InputResolver,
    draw_inputs,
    further_inputs,
    input_names,
    move_channels,
    parse_named_shapes,
)
from ckpttool.verification.output_comparison import (
    MANY_BITS,
    ComparisonRound,
    OutputNames,
    OutputResult,
    Outputs,
    Parity,
    RoundingBound,
    are_close,
    change_last_bits,
    changing_outputs,
    is_smooth,
    measure_output,
    pair_outputs,
    run_network,
    shake_inputs,
    to_float64,
)
from ckpttool.verification.sides import ModelHost, ModelSide
from ckpttool.verification.training import ModelTraining, OutputTarget, TrainingOptions, compare_training

if TYPE_CHECKING:
    from ckpttool.networks.messages import ArrayRow, CallRow, InputRow, LayerRow
    from ckpttool.networks.model_runner import Answer, Called, MadeExact, ModelRequests, Opened

GRAPHS = ("saved_model", "onnx")
RUNS_CODE = {
    "torchscript": "TorchScript is a program: running the model runs the code in the file",
    "saved_model": "a SavedModel is a program: running the model runs the operations in the file, which can "
    "read and write files",
}
# Copies of a model's file that a process may hold: weights, their float64 form, layers, calls.
_FILE_COPIES = 8


def find_code(checkpoint: Checkpoint, kind: str) -> str | None:
    """Return why opening a model would run code of its file, None if it would not.

    Every file that a framework opens is judged here, before the framework reads it, by the audit of its
    format; a part that cannot be judged is a reason too. Older versions of Keras create objects that newer
    ones refuse, and onnxruntime loads the programs that a graph names. The network of an agent is part of
    ckpttool: no framework gets its file.
    """
    if kind == "agent":
        return None
    if kind in RUNS_CODE:
        return RUNS_CODE[kind]
    for verdict, what in (
        (CODE, "loading would run code"),
        (UNKNOWN, "loading would create instances of unknown classes"),
        (CLASSES, "loading would import classes"),
    ):
        names = [reference.name for reference in filter_verdict(checkpoint.code_references, verdict)]
        if names:
            return f"{what}: {abbreviate_list(names, 3)}"
    return checkpoint.unjudged[0] if checkpoint.unjudged else None


def _sandbox_settings(side: ModelSide) -> str:
    """Return the restrictions of a side's process: from its start, or after the user's code ran."""
    most = limits.current().model_memory
    if side.kind == "factory":
        return sandbox.settings(None, most + _FILE_COPIES * _size(side.path), now=False)
    checkpoint = side.checkpoint
    files = [os.path.abspath(file.path) for file in checkpoint.files]
    if side.kind == "saved_model":
        files += sandbox.iter_saved_model_files(os.path.abspath(checkpoint.path))
    return sandbox.settings(files, most + _FILE_COPIES * checkpoint.stored_nbytes, now=True)


def _restriction_hint(message: str) -> str | None:
    """Return the restriction of a process that may be the reason of its error, None if none is."""
    if any(
        phrase in message for phrase in ("Operation not permitted", "Permission denied", "PermissionDenied")
    ):
        return (
            "the process of a model has no network, starts no programs and opens no other files than its own"
        )
    if any(phrase in message for phrase in ("MemoryError", "bad_alloc", "can't allocate memory")):
        return "raise the limit of the model's process: ckpttool --limit model_memory=64G ..."
    return None


def _size(path: str) -> int:
    """Return the size of a checkpoint's files, those of a TensorFlow prefix included."""
    parts = [path] if os.path.isfile(path) else glob.glob(glob.escape(path) + ".*")
    return sum(os.path.getsize(part) for part in parts if os.path.isfile(part))


class AgentHost:
    """The actor of a recognised agent, with its action map, run as `verify` of two agents runs it."""

    def __init__(self, network: Network, assumed: Sequence[str], worker: Worker) -> None:
        self._network, self._assumed, self._worker = network, assumed, worker
        self.folder = worker.folder

    def request(self, do: str, **values: Any) -> Answer:
        """Answer what the process of a model answers."""
        if do == "open":
            inputs: list[InputRow] = [
                {"name": name, "shape": list(shape), "dtype": "float32", "batch": None}
                for name, shape in self._network.input_shapes.items()
            ]
            versions = {f"agent in {self._worker.NAME}": self._worker.versions()[self._worker.NAME]}
            return {"inputs": inputs, "versions": versions, "channels": "", "observable": False}
        if do == "prepare":
            count = len(values["inputs"])
            notes = ["the actor of the agent is compared, with its action map", *self._assumed]
            return {"dtypes": ["float32"] * count, "below": [None] * count, "notes": notes, "size": 0}
        if do == "run":
            return self._run(values["names"], exact=values["exact"])
        return {"made": True, "reason": "", "copied": True} if do == "exact" else {"layers": []}

    def _run(self, names: Sequence[str], *, exact: bool) -> Called:
        """Write the action; in float64 from NumPy."""
        arrays = [np.load(self.folder / f"input-{index}.npy") for index in range(len(names))]
        observation: Observation = dict(zip(names, arrays, strict=True)) if len(names) > 1 else arrays[0]
        if exact:
            policy: Policy = numpy_backend.build(self._network.cast("float64"))
            observation = to_float64(observation)
        else:
            policy = self._worker.build(self._network)
        np.save(self.folder / "output-0.npy", run_network(policy, observation), allow_pickle=False)
        return {"outputs": ["output"], "calls": []}


def _opening(side: ModelSide, kind: str, *, run_code: bool) -> dict[str, Any]:
    """Return the request that opens a side's model."""
    like = side.like
    running = like is not None or side.process is not None
    return {
        "kind": kind,
        "file": os.path.abspath(side.path if running else side.checkpoint.path),
        "version": side.checkpoint.details.get("keras_version") if kind == "keras" else None,
        "factory": like.factory if like else None,
        "arguments": like.arguments if like else None,
        "run_code": run_code,
    }


@contextmanager
def begin_opening(side: ModelSide, *, run_code: bool) -> Iterator[ModelSide]:
    """Start what runs a side, and have it open the model; return the side with its process."""
    with open_host(side) as host:
        ModelClient(side, host).begin("open", **_opening(side, side.kind, run_code=run_code))
        yield replace(side, process=host)


@contextmanager
def open_host(side: ModelSide, facts: AgentFacts = NO_FACTS) -> Iterator[ModelHost]:
    """Start what runs a side, unless it runs already; end it after the block."""
    if side.process is not None:
        yield side.process
    elif side.kind == "agent":
        agent = with_recorded_choices(restore_agent(side.checkpoint, facts=facts))
        require_facts(agent)
        assumed: list[str] = []
        network = build_agent_network(agent, agent, "actor", assumed)
        with Worker(available_backend(agent), python=side.python, threads=1) as worker:
            yield AgentHost(network, assumed, worker)
    else:
        with ModelProcess(f"process of model {side.word}", side.python, _sandbox_settings(side)) as process:
            yield process


class ModelClient:
    """The requests to what runs one side, and its arrays."""

    def __init__(self, side: ModelSide, host: ModelHost) -> None:
        self.side, self._process = side, host
        self.ask = cast("ModelRequests", Requests(self._request))
        self.names: list[str] = []
        self.inputs: Sequence[InputRow] = ()
        self.framework = ""
        self.dtypes: dict[str, str] = {}
        self.exact = False
        # Whether its float64 form has separate weights.
        self.copied = True
        # The calls of the last capture, which `repeat` may repeat, with their inputs' precision.
        self._captured: tuple[bool, dict[tuple[str, int], CapturedCall]] = (False, {})
        self._layers: list[LayerRow] | None = None

    def _request(self, do: str, **values: Any) -> Any:
        """Send one request and return its answer; errors name this side."""
        try:
            return self._process.request(do, **values)
        except CkpttoolError as error:
            raise type(error)(
                f"{self.side.word}: {error.message}",
                file=error.file or self.side.path,
                path=error.path,
                expected=error.expected,
                found=error.found,
                hint=self._complete_hint(error.hint) or _restriction_hint(error.message),
            ) from None

    def _complete_hint(self, hint: str | None) -> str | None:
        """Return a hint, as the whole command if it is to convert this side's file to its model."""
        like = self.side.like
        if hint != CONVERT or like is None:
            return hint
        suffix = {"torch": ".pt", "keras": ".weights.h5"}.get(self.framework, "")
        stem = base_name(self.side.path).partition(".")[0] or "model"
        target = unused_name(f"{stem}-converted{suffix}")
        words = [] if suffix else ["--to", "tf"]
        words += [] if like.arguments is None else ["--like-args", json.dumps(like.arguments)]
        words += [] if like.python == sys.executable else ["--python", like.python]
        command = format_command("convert", self.side.path, target, "--like", like.factory, *words)
        return f"{hint}: {command}"

    def begin(self, do: str, **values: Any) -> None:
        """Have a process answer a request while another one answers; nothing else answers early."""
        if isinstance(self._process, ModelProcess):
            self._process.begin(do, **values)

    def open(self, kind: str, *, run_code: bool) -> Opened:
        """Open the model; return its inputs, the order of its axes, and its libraries."""
        answer = self.ask.open(**_opening(self.side, kind, run_code=run_code))
        self.inputs, self.framework = answer["inputs"], answer.get("framework", "")
        return answer

    def write(self, name: str, array: np.ndarray) -> None:
        """Write an array for the process."""
        np.save(self._process.folder / name, array, allow_pickle=False)

    def read(self, name: str) -> np.ndarray:
        """Read an array that the process wrote."""
        array: np.ndarray = np.load(self._process.folder / name, allow_pickle=False)
        return array

    def give(self, arrays: Sequence[np.ndarray]) -> None:
        """Write the model's inputs, each in the dtype that the model accepts."""
        self._captured = (False, {})
        for index, (name, array) in enumerate(zip(self.names, arrays, strict=True)):
            self.write(f"input-{index}.npy", array.astype(self.dtypes.get(name, array.dtype), copy=False))

    def run(self, *, exact: bool, observe: bool) -> tuple[dict[str, np.ndarray], list[CallRow]]:
        """Return the outputs by name, and the calls of layers."""
        answer = self.ask.run(names=self.names, exact=exact, observe=observe)
        outputs = {name: self.read(f"output-{index}.npy") for index, name in enumerate(answer["outputs"])}
        return outputs, list(answer["calls"])

    def results(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the outputs by name, and the numbers that describe each result of a layer (see tracing)."""
        names = self.ask.results(names=self.names)["outputs"]
        outputs = {name: self.read(f"output-{index}.npy") for index, name in enumerate(names)}
        return outputs, self.read("results.npy")

    def make_exact(self, *, copied: bool) -> MadeExact:
        """Create the model in float64; return whether that exists, and the reason if not."""
        answer = self.ask.exact(names=self.names, copied=copied)
        self.copied = copied or not answer["made"] or answer["copied"]
        return answer

    def capture(
        self, calls: Sequence[tuple[str, int]], *, exact: bool
    ) -> dict[tuple[str, int], CapturedCall]:
        """Return inputs and outputs of the wanted calls, which may be repeated then."""
        known_exact, known = self._captured
        if known_exact == exact and known.keys() >= {*calls}:
            return {key: known[key] for key in calls}
        return self._capture(calls, exact=exact, outputs=False)[1]

    def begin_exact(self, keys: Sequence[tuple[str, int]]) -> None:
        """Have a process compute in float64 what `run_and_capture`, without calls `run`, returns."""
        if keys:
            self.begin("capture", names=self.names, exact=True, selected=[*keys], outputs=True)
        else:
            self.begin("run", names=self.names, exact=True, observe=False)

    def run_and_capture(
        self, calls: Sequence[tuple[str, int]], *, exact: bool
    ) -> tuple[dict[str, np.ndarray], dict[tuple[str, int], CapturedCall]]:
        """Return the outputs by name, and the wanted calls."""
        return self._capture(calls, exact=exact, outputs=True)

    def _capture(
        self, keys: Sequence[tuple[str, int]], *, exact: bool, outputs: bool
    ) -> tuple[dict[str, np.ndarray], dict[tuple[str, int], CapturedCall]]:
        self._captured = (False, {})
        answer = self.ask.capture(names=self.names, exact=exact, selected=[*keys], outputs=outputs)
        calls = {
            (call["path"], call["number"]): CapturedCall(
                *(
                    tuple(self._rows(rows))
                    for rows in (call.get("given", []), call.get("before", []), call.get("made", []))
                )
            )
            for call in answer["calls"]
        }
        self._captured = exact, calls
        arrays = {name: self.read(f"output-{index}.npy") for index, name in enumerate(answer["outputs"])}
        return arrays, calls

    def _rows(self, rows: Sequence[ArrayRow]) -> Iterator[np.ndarray]:
        for row in rows:
            # The process writes each capture to new files, mostly in memory.
            yield map_array(self._process.folder / "calls" / row["file"])

    def operations(self, *, exact: bool) -> RecordedCall:
        """Return every operation of a call with its values."""
        answer = self.ask.operations(names=self.names, exact=exact)
        file = self._process.folder / "operations.npz"
        arrays = {}
        if answer["operations"]:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {int(name): archive[name] for name in archive}
        return RecordedCall.of(answer, arrays, self.layers())

    def begin_layers(self) -> None:
        """Have a process describe the layers while another one does."""
        if self._layers is None:
            self.begin("layers")

    def layers(self) -> list[LayerRow]:
        """Return every layer with a description of its tensors."""
        if self._layers is None:
            self._layers = self.ask.layers()["layers"]
        return self._layers

    def tensors(self, path: str, *, parts: bool = False) -> dict[str, np.ndarray]:
        """Return the tensors of one layer, on request with those of its parts as `part/name`."""
        names = self.ask.tensors(path=path, parts=parts)["names"]
        return {name: self.read(f"tensor-{index}.npy") for index, name in enumerate(names)}

    def repeat(
        self,
        call: tuple[str, int],
        tensors: Mapping[str, np.ndarray],
        settings: Mapping[str, Any],
        *,
        exact: bool,
        inputs: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the outputs of a captured call with changes of its layer; nothing if it fails.

        Args:
            call: the layer's path, and the number of the call.
            tensors: new values of the layer's tensors by name.
            settings: new values of the layer's attributes.
            exact: compute in float64.
            inputs: the call's first input instead of the captured one.
        """
        if inputs is not None:
            self.write("change-given.npy", inputs)
        files = {}
        for index, (name, array) in enumerate(tensors.items()):
            files[name] = f"change-{index}.npy"
            self.write(files[name], array)
        answer = self.ask.repeat(
            path=call[0],
            number=call[1],
            tensors=files,
            settings=dict(settings),
            exact=exact,
            changed_input=None if inputs is None else "change-given.npy",
        )
        return tuple(self.read(f"repeated-{index}.npy") for index in range(max(answer["made"], 0)))


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Outputs and layers of two models on the same inputs.

    `exact` is true if both also ran in float64. `first` is where they part, None if they agree or if
    their layers cannot be observed.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    engines: tuple[str, str]
    inputs: tuple[InputPair, ...]
    outputs: tuple[Parity, ...]
    exact: bool
    layers: tuple[LayerComparison, ...] = ()
    first: Divergence | None = None
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    training: ModelTraining | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "engines": list(self.engines),
            "inputs": [input_.document() for input_ in self.inputs],
            "float64": self.exact,
            "layers": [layer.document() for layer in self.layers],
            "first_difference": None if self.first is None else self.first.document(),
            **({} if self.training is None else {"training": self.training.document()}),
        }


@dataclass(slots=True)
class ComparedModels:
    """Both processes, what they reported, and the sentences collected on the way."""

    sides: tuple[ModelClient, ModelClient]
    kinds: Sequence[str]
    pairs: list[InputPair] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixed: bool = False
    arrays: Sequence[np.ndarray] = ()
    # Those that the sides have now.
    inputs: Sequence[np.ndarray] = ()
    further: Sequence[tuple[str, Sequence[np.ndarray]]] = ()
    # Whether the inputs are drawn, not the user's.
    drawn: bool = True
    # The number of weights of the larger model.
    size: int = 0

    def cut(self, rows: int) -> int:
        """Give both sides the last rows only, unless a model's batch is fixed; return how many."""
        known = len(self.arrays[0])
        if self.fixed or rows >= known or any(len(array) != known for array in self.arrays):
            return known
        self.give([array[-rows:] for array in self.arrays])
        return rows

    def prepare(
        self, batch: int | None, *, run_code: bool
    ) -> list[tuple[tuple[str, int | None], tuple[str, int | None]]]:
        """Load the files of factories and call both models; the pairs of inputs get their common types.

        Return the type and the limit of integers that each side accepts, by pair.
        """
        kinds: list[dict[str, tuple[str, int | None]]] = []
        sizes = []
        notes = []
        requests: list[dict[str, Any]] = []
        for index, side in enumerate(self.sides):
            by_name = {(pair.a, pair.b)[index]: (pair.shape_a, pair.shape_b)[index] for pair in self.pairs}
            declared = {row["name"]: row["dtype"] for row in side.inputs}
            side.names = [name for name in declared if name in by_name] or list(by_name)
            # The model in memory has its values already.
            file = os.path.abspath(side.side.path) if side.side.like is not None and side.side.path else None
            inputs = [
                {"name": name, "shape": list(by_name[name]), "dtype": declared.get(name)}
                for name in side.names
            ]
            own = {"file": file, "part": side.side.part, "rounded": side.side.rounded}
            requests.append({"inputs": inputs, "batch": batch, **own, "run_code": run_code})
            side.begin("prepare", **requests[-1])
        for side, request in zip(self.sides, requests, strict=True):
            answer = side.ask.prepare(**request)
            notes += [f"{side.side.word}: {note}" for note in answer["notes"]]
            rows = zip(answer["dtypes"], answer["below"], strict=True)
            kinds.append(dict(zip(side.names, rows, strict=True)))
            side.dtypes = dict(zip(side.names, answer["dtypes"], strict=True))
            sizes.append(int(answer["size"]))
        self.notes += notes
        self.size = max(sizes)
        limits = [(kinds[0][pair.a], kinds[1][pair.b]) for pair in self.pairs]
        self.pairs = [_with_dtype(pair, *limit) for pair, limit in zip(self.pairs, limits, strict=True)]
        return limits

    def give(self, arrays: Sequence[np.ndarray]) -> None:
        """Write inputs in each side's own order of axes."""
        self.inputs = arrays
        a, b = self.sides
        inputs = {pair.a: array for pair, array in zip(self.pairs, arrays, strict=True)}
        a.give([inputs[name] for name in a.names])
        moved = {pair.b: move_channels(inputs[pair.a], pair.transposed) for pair in self.pairs}
        b.give([moved[name] for name in b.names])


@dataclass(frozen=True, slots=True)
class ModelComparisonOptions:
    """Options of a comparison of models: shapes of A's inputs, the user's inputs, and permissions.

    `shapes_b` are those of B's inputs in order, for a model that declares none.
    """

    shapes: tuple[str, ...] = ()
    inputs: str | None = None
    transpose: bool | None = None
    run_code: bool = False
    tolerance: float | None = None
    facts: AgentFacts = NO_FACTS
    training: TrainingOptions | None = None
    shapes_b: tuple[tuple[int, ...], ...] = ()


_STEPS = 8
_SMALL = 1e-4  # differences that last bits may explain


def compare_models(
    first: ModelSide,
    second: ModelSide,
    options: ModelComparisonOptions,
    progress: Progress = ignore_progress,
) -> ModelComparison:
    """Run both models, each by its own framework in its own process, and compare outputs and layers.

    Raise UsageError if a side cannot run or its inputs are unknown.
    """
    kinds = [side.kind for side in (first, second)]
    for side, kind in zip((first, second), kinds, strict=True):
        if kind == "factory" or options.run_code:
            continue
        if (reason := find_code(side.checkpoint, kind)) is not None:
            raise UsageError(
                f"{side.word}: {reason}", file=side.path, hint="add --run-code if you trust the file"
            )
    with ExitStack() as stack:
        a, b = (
            ModelClient(side, stack.enter_context(open_host(side, options.facts))) for side in (first, second)
        )
        sides = a, b
        session = ComparedModels(sides, kinds)
        progress(0, _STEPS)
        for model, kind in zip(sides, kinds, strict=True):
            model.begin("open", **_opening(model.side, kind, run_code=options.run_code))
        opened = [side.open(kind, run_code=options.run_code) for side, kind in zip(sides, kinds, strict=True)]
        progress(2, _STEPS)
        _prepare(session, opened, options)
        progress(3, _STEPS)
        return _compare(session, opened, options, progress)


def _prepare(session: ComparedModels, opened: list[Opened], options: ModelComparisonOptions) -> None:
    """Pair the inputs, load the files of factories, and write the inputs."""
    resolver = InputResolver(opened, options.transpose)
    shapes = parse_named_shapes(options.shapes)
    input_file = None
    if options.inputs is not None:
        names = [row["name"] for row in opened[0]["inputs"]] or input_names(shapes)
        input_file = InputFile(options.inputs, names)
        shapes = shapes or input_file.shapes
    session.pairs = resolver.pairs(shapes, options.shapes_b)
    session.assumed += resolver.assumed
    session.assumed += [
        f"{side.side.word}: {note}"
        for side, reply in zip(session.sides, opened, strict=True)
        for note in reply.get("notes", ())
    ]
    batch = next((row["batch"] for reply in opened for row in reply["inputs"] if row["batch"]), None)
    try:
        limits = session.prepare(batch, run_code=options.run_code)
    except UsageError as error:
        if options.transpose is not None or not any(pair.transposed for pair in session.pairs):
            raise
        # The order of axes that the layers show may be that inside the model.
        plain = InputResolver(opened, transpose=False)
        try:
            session.pairs = plain.pairs(shapes, options.shapes_b)
            for side, kind in zip(session.sides, session.kinds, strict=True):
                side.open(kind, run_code=options.run_code)  # the failed call may have created variables
            limits = session.prepare(batch, run_code=options.run_code)
        except UsageError:
            raise error from None
        session.assumed[:] = [sentence for sentence in session.assumed if sentence not in resolver.assumed]
        session.assumed.append(
            "B's inputs have A's order of axes: a model cannot be called with channels moved"
        )
    session.assumed += [
        f"A accepts integers below {a} for {pair.a}, B below {b}: those below {pair.below} are compared"
        for pair, ((_, a), (_, b)) in zip(session.pairs, limits, strict=True)
        if a is not None and b is not None and a != b
    ]
    if input_file is None:
        arrays = draw_inputs(session.pairs, batch, session.size)
        session.further = further_inputs(session.pairs, batch, arrays, session.size)
    else:
        session.drawn = False
        arrays = input_file.inputs(session.pairs, batch)
        session.assumed += input_file.notes
    session.fixed, session.arrays = batch is not None, arrays
    session.give(arrays)


def _with_dtype(pair: InputPair, a: tuple[str, int | None], b: tuple[str, int | None]) -> InputPair:
    """Return the pair with the dtype that both sides accept: integers if one looks them up, short floats."""
    limits = [row for _, row in (a, b) if row is not None]
    whole = [dtype for dtype, _ in (a, b) if not dtype.startswith("float")]
    short = "float16" if "float16" in (a[0], b[0]) else a[0]
    return replace(pair, dtype=whole[0] if whole else short, below=min(limits, default=None))


class _Rounds:
    """Runs both sides on sets of inputs and compares their outputs."""

    def __init__(self, session: ComparedModels, opened: Sequence[Opened], tolerance: float | None) -> None:
        self._session, self._tolerance = session, tolerance
        self._rounded = session.sides[0].side.rounded
        self._observable = [bool(row["observable"]) for row in opened]
        self._layouts = [str(host.get("channels", "")) for host in opened]
        self._exact: list[bool] | None = None
        self.unstable: list[str] = []

    def first(self) -> ComparisonRound:
        """Compare on the first inputs; an output that changes from call to call differs."""
        main = self.run(observe=True)
        changing: list[list[str]] = []
        for side, outputs, exact in zip(self._session.sides, main.outputs, main.exact, strict=True):
            # Of a huge model the float64 run is the second one.
            second = exact if self._session.size >= HUGE_MODEL else None
            if second is not None and not changing_outputs(outputs, second):
                changing.append([])
                continue
            again, _ = side.run(exact=False, observe=False)
            changing.append(changing_outputs(outputs, again))
            if changing[-1]:
                self.unstable.append(side.side.word)
        for index, names in enumerate(main.names):
            if names.a in changing[0] or names.b in changing[1]:
                parity = replace(main.results[index].parity, within=False)
                main.results[index] = replace(main.results[index], parity=parity)
        return main

    def run(self, *, observe: bool = False) -> ComparisonRound:
        """Compare on the inputs that the sides have."""
        a, b = self._session.sides
        observed = [observe and observable for observable in self._observable]
        for side, calls_too in zip((a, b), observed, strict=True):
            side.begin("run", names=side.names, exact=False, observe=calls_too)
        ran = [
            side.run(exact=False, observe=calls_too) for side, calls_too in zip((a, b), observed, strict=True)
        ]
        outputs, calls = (ran[0][0], ran[1][0]), (ran[0][1], ran[1][1])
        for side, values in zip((a, b), outputs, strict=True):
            if not values:
                raise UsageError(f"{side.side.word} returns no tensors", file=side.side.path)
        if observe:
            for side in (a, b):
                side.begin_layers()
            layers = max(a.layers(), b.layers(), key=len)
            self._bound = RoundingBound.of((*calls[0], *calls[1]), layers, self._rounded)
        if self._exact is None:
            self._exact = _make_exact(self._session)
        exact_keys = (
            self._few_calls(calls) if observe and all((*self._exact, *self._observable)) else ([], [])
        )
        for side, there, keys in zip((a, b), self._exact, exact_keys, strict=True):
            if there:
                side.begin_exact(keys)
        exact = [
            _exact_outputs(side, self._session, values, keys) if there else None
            for side, values, there, keys in zip((a, b), outputs, self._exact, exact_keys, strict=True)
        ]
        self._exact = [values is not None for values in exact]
        moves = {pair.transposed for pair in self._session.pairs} - {""}
        names, missing = pair_outputs(*outputs, moves, self._layouts, self._session.assumed)
        comparison = ComparisonRound(outputs, (exact[0], exact[1]), calls, names, missing, [])
        comparison.results += [self._measure(comparison, name) for name in names]
        if (
            comparison.exact_on_both
            and comparison.failed
            and max(result.parity.max_rel for result in comparison.results) < _SMALL
        ):
            moved = self._sensitivity(comparison)
            comparison.results[:] = [self._measure(comparison, name, moved.get(name.a)) for name in names]
        return comparison

    def _sensitivity(self, comparison: ComparisonRound) -> dict[str, tuple[np.ndarray, bool]]:
        """Return how far A's float64 outputs move with last bits of float inputs, and if in proportion."""
        a, inputs = self._session.sides[0], self._session.inputs
        if not any(array.dtype.kind == "f" for array in inputs):
            return {}
        plain, moves = comparison.exact[0] or {}, []
        try:
            for bits in (1, MANY_BITS):
                self._session.give(change_last_bits(inputs, bits))
                outputs, _ = a.run(exact=True, observe=False)
                same = {
                    name: x for name, x in outputs.items() if name in plain and x.shape == plain[name].shape
                }
                moves.append({name: np.nan_to_num(np.abs(x - plain[name])) for name, x in same.items()})
        finally:
            self._session.give(inputs)
        one, many = moves
        return {name: (one[name], is_smooth(one[name], many[name])) for name in one.keys() & many.keys()}

    def _few_calls(
        self, calls: tuple[list[CallRow], list[CallRow]]
    ) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return the calls of both sides' layers, none if their arrays are large: a run may capture them."""
        sides = self._session.sides
        keys = tuple(
            {layer.key for layer in causes.called_layers(side.layers(), rows)}
            for side, rows in zip(sides, calls, strict=True)
        )
        size = sum(
            _call_bytes(row)
            for rows, own in zip(calls, keys, strict=True)
            for row in rows
            if (row["path"], row["number"]) in own
        )
        return ([*keys[0]], [*keys[1]]) if size <= _MOST_BYTES else ([], [])

    def _measure(
        self, comparison: ComparisonRound, names: OutputNames, moved: tuple[np.ndarray, bool] | None = None
    ) -> OutputResult:
        exact = [
            None if values is None else values.get(key)
            for values, key in zip(comparison.exact, (names.a, names.b), strict=True)
        ]
        other = None if exact[1] is None else move_channels(exact[1], names.how)
        outputs = comparison.outputs[0][names.a], move_channels(comparison.outputs[1][names.b], names.how)
        sensitivity, smooth = (None, False) if moved is None else moved
        bounds = self._bound, self._tolerance, sensitivity
        return measure_output(names.a, outputs, (exact[0], other), *bounds, smooth=smooth)

    def further(self, main: ComparisonRound) -> ComparisonRound:
        """Compare on further inputs; return the first round that differs, which the sides then have."""
        if not self._session.further:
            return main
        sentences = self._session.assumed, self._session.notes
        notes, assumed = list(self._session.notes), list(self._session.assumed)
        for title, arrays in self._session.further:
            self._session.give(arrays)
            try:
                comparison = self.run()
            except CkpttoolError:
                continue  # the model does not accept numbers of this size
            finally:
                sentences[0][:], sentences[1][:] = assumed, notes
            lost = [x is not None and y is None for x, y in zip(main.exact, comparison.exact, strict=True)]
            if comparison.failed and not any(lost):
                self._session.notes.append(f"the outputs differ on {title}, not on the first inputs")
                self._session.arrays = arrays
                return self.run(observe=True)
        self._session.give(self._session.arrays)
        return main

    def require_response(self, comparison: ComparisonRound) -> None:
        """Raise UsageError if none of A's outputs depends on the inputs: then agreement shows nothing."""
        a = self._session.sides[0]
        silent = [
            names.a
            for names, result in zip(comparison.names, comparison.results, strict=True)
            if not result.differs_by_row(len(self._session.arrays[0]), exact=comparison.exact_on_both)
        ]
        if not silent:
            return
        others = [arrays for _, arrays in self._session.further if self._session.fixed]
        for arrays in (shake_inputs(self._session.arrays), *others):
            self._session.give(arrays)
            try:
                values, _ = a.run(exact=comparison.exact_on_both, observe=False)
            except CkpttoolError:
                continue
            rows = zip(comparison.names, comparison.results, strict=True)
            answers = {
                names.a: result.responds(values[names.a], exact=comparison.exact_on_both)
                for names, result in rows
            }
            silent = [name for name in silent if not answers[name]]
            if not silent:
                break
        self._session.give(self._session.arrays)
        if len(silent) == len(comparison.names):
            raise UsageError(
                "the comparison shows nothing: A's outputs do not depend on these inputs",
                file=a.side.path,
                found=abbreviate_list([_describe_values(result) for result in comparison.results], 3),
                hint="pass inputs from your data: --inputs FILE.npz",
            )
        if silent:
            self._session.notes.append(
                f"on these inputs, outputs of A that do not depend on them: {', '.join(silent)}"
            )


def _describe_values(result: OutputResult) -> str:
    low, high = (0.0, 0.0) if result.fixed is None else (result.fixed.min(), result.fixed.max())
    return f"{result.parity.name} from {low:g} to {high:g}"


def _compare(
    session: ComparedModels, opened: list[Opened], options: ModelComparisonOptions, progress: Progress
) -> ModelComparison:
    rounds = _Rounds(session, opened, options.tolerance)
    main = rounds.first()
    progress(6, _STEPS)
    observable = all(row["observable"] for row in opened)
    tables = _unequal_tables(session) if observable and not main.failed else []
    if not main.failed:
        session.further = [*session.further, *_reaching_inputs(session, tables)]
        main = rounds.further(main)
    if not main.failed:
        session.notes += [table.sentence for table in tables]
    if not main.failed:
        rounds.require_response(main)
    result = ModelComparison(
        (_engine(opened[0]), _engine(opened[1])),
        tuple(session.pairs),
        main.parities,
        main.exact_on_both,
        assumed=tuple(session.assumed),
    )
    if observable:
        finder = _LayerFinder(session, main.calls, exact=result.exact, unstable=rounds.unstable)
        layers, first = finder.find(main.values(), failed=main.failed)
        if first is None or first.cause is None or first.a == "outputs":
            first = _shape_difference(main) or _exchanged_outputs(main, finder.bound) or first
        if not main.failed:
            session.notes += _hidden_differences(layers, finder.bound)
        none = () if layers else ("layers: no layer of A has a counterpart in B",)
        result = replace(result, layers=layers, first=first, not_compared=none)
    else:
        words = [
            side.side.word for side, row in zip(session.sides, opened, strict=True) if not row["observable"]
        ]
        result = replace(result, not_compared=(f"layers: those of {' and '.join(words)} cannot be observed",))
    extra = [name for name in main.outputs[1] if name not in {name.b for name in main.names}]
    session.notes += [f"only B has output {name}" for name in extra]
    if options.training is not None:
        result = replace(result, training=_train(session, opened, main, options.training))
    progress(_STEPS, _STEPS)
    return replace(result, notes=tuple(session.notes))


def _shape_difference(main: ComparisonRound) -> Divergence | None:
    """Return the first output that B lacks or gives in another shape, None if there is none."""
    for names in main.names:
        shapes = [
            list(array.shape)
            for array in (main.outputs[0][names.a], move_channels(main.outputs[1][names.b], names.how))
        ]
        if shapes[0] != shapes[1]:
            cause = Cause(f"output {names.a} has shape {shapes[0]} in A and {shapes[1]} in B", confirmed=True)
            return _divergence(names.a, names.b, BETWEEN, None, cause, None)
    if not main.missing:
        return None
    cause = Cause(f"B has no counterpart of A's output {main.missing[0]}", confirmed=True)
    return _divergence(main.missing[0], "outputs", BETWEEN, None, cause, None)


def _exchanged_outputs(main: ComparisonRound, bound: float) -> Divergence | None:
    """Return an output that differs if its numbers are those of another output of B, else None."""
    a, b = (outputs or {} for outputs in (main.exact if main.exact_on_both else main.outputs))
    for names, result in zip(main.names, main.results, strict=True):
        for other in () if result.parity.within else main.names:
            array = move_channels(b[other.b], other.how)
            same = other.b != names.b and array.shape == a[names.a].shape
            if same and align_arrays(a[names.a], array)[0] <= bound:
                cause = Cause(f"B's output {other.b} is A's output {names.a}: another order", confirmed=True)
                return _divergence(names.a, names.b, BETWEEN, None, cause, None)
    return None


class _UnequalTable(NamedTuple):
    """A table that an integer input looks up, and its rows that differ; `number` is that of the input."""

    number: int
    name: str
    rows: np.ndarray
    total: int

    @property
    def sentence(self) -> str:
        """The difference, which no output showed."""
        return f"{self.name}: {len(self.rows):,} of {self.total:,} rows differ, but the outputs agree"


def _unequal_tables(session: ComparedModels) -> list[_UnequalTable]:
    """Return the tables in which A and B differ: those with as many rows as an integer input allows."""
    unequal = []
    for index, pair in enumerate(session.pairs):
        tables = [_tables(side, pair.below) for side in session.sides]
        equal = tables[0].keys() & tables[1].keys()
        a, b = ([where for values, where in table.items() if values not in equal] for table in tables)
        for one, other in zip(a, b, strict=True) if len(a) == len(b) else ():
            arrays = [
                side.tensors(path)[name].astype(np.float64)
                for side, (path, name) in zip(session.sides, (one, other), strict=True)
            ]
            if arrays[0].shape == arrays[1].shape:
                bound = EXACT_BOUND * np.abs(arrays[0]).max()
                rows = np.flatnonzero((np.abs(arrays[0] - arrays[1]) > bound).any(1))
                unequal += [_UnequalTable(index, one[0], rows, len(arrays[0]))] if len(rows) else []
    return unequal


def _tables(side: ModelClient, rows: int | None) -> dict[str, tuple[str, str]]:
    """Return the layer and the name of each matrix with this many rows, by a description of its values."""
    return {
        str(tensor["values"]): (str(layer["path"]), str(tensor["name"]))
        for layer in (side.layers() if rows is not None else ())
        for tensor in layer["tensors"]
        if len(tensor["shape"]) == 2 and tensor["shape"][0] == rows
    }


def _reaching_inputs(
    session: ComparedModels, tables: Sequence[_UnequalTable]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield inputs that look up the rows of tables that differ, with their titles."""
    for table in tables if session.drawn else ():
        indices = session.arrays[table.number]
        for start in range(0, min(len(table.rows), _MOST_ROUNDS * indices.size), indices.size):
            rows = np.resize(table.rows[start : start + indices.size], indices.shape).astype(indices.dtype)
            arrays = [rows if n == table.number else array for n, array in enumerate(session.arrays)]
            yield f"rows {rows.min()} to {rows.max()} of {table.name}", arrays


def _hidden_differences(layers: Sequence[LayerComparison], bound: float) -> Iterator[str]:
    """Yield a note for the first layer that differs although the outputs agree."""
    for layer in layers:
        counterparts = layer.by == "weights" or {*map(find_family, layer.classes)} <= {*causes.COMPOSITE}
        if counterparts and layer.inputs <= bound and layer.outputs > _AMPLIFIED * bound:
            yield (
                f"the outputs agree, but on equal inputs {layer.b} of B differs from {layer.a} of A by "
                f"{layer.outputs:.1e} of its largest number: these inputs do not show all of it"
            )
            return


def _train(
    session: ComparedModels,
    opened: Sequence[Opened],
    main: ComparisonRound,
    chosen: TrainingOptions,
) -> ModelTraining:
    """Train both models on the inputs of the comparison, in float64 with weights of that type."""
    session.give(session.arrays)
    for side, outputs in zip(session.sides, main.outputs, strict=True):
        if side.exact and not side.copied:
            answer = side.make_exact(copied=True)
            side.exact = bool(answer["made"]) and _exact_outputs(side, session, outputs, ()) is not None
            if not answer["made"]:
                session.notes.append(f"{side.side.word} is not trained in float64: {answer['reason']}")
    targets = [
        OutputTarget(
            names.a, names.b, main.outputs[0][names.a], partial(move_channels, how=OPPOSITE[names.how])
        )
        for names in main.names
        if main.outputs[0][names.a].dtype.kind == "f"
    ]
    frameworks = [str(row.get("framework", "agent")) for row in opened]
    return compare_training(session.sides, frameworks, targets, chosen)


def _engine(opened: Opened) -> str:
    return ", ".join(f"{name} {version}" for name, version in opened["versions"].items())


def _make_exact(session: ComparedModels) -> list[bool]:
    """Create the models in float64; return for each side whether that exists."""
    exact = []
    for side in session.sides:
        side.begin("exact", names=side.names, copied=False)
    for side in session.sides:
        answer = side.make_exact(copied=False)
        if not answer["made"]:
            session.notes.append(f"{side.side.word} has no float64 run: {answer['reason']}")
        exact.append(bool(answer["made"]))
    return exact


def _exact_outputs(
    side: ModelClient, session: ComparedModels, plain: Outputs, keys: Sequence[tuple[str, int]]
) -> dict[str, np.ndarray] | None:
    """Return the outputs in float64, None if the model has no such form, or another one than `plain`.

    The `wanted` calls of layers are captured in the same run.
    """
    try:
        if keys:
            outputs, _ = side.run_and_capture(keys, exact=True)
        else:
            outputs, _ = side.run(exact=True, observe=False)
    except CkpttoolError as error:
        reason = error.message
    else:
        if all(array.dtype not in (np.float64, np.complex128) for array in outputs.values()):
            reason = "its outputs stay in float32"
        elif not are_close(plain, outputs):
            reason = "its outputs in float64 are others"
        else:
            side.exact = True
            return outputs
    if not side.copied:
        # Layers of own classes may have variables that are not cast.
        answer = side.make_exact(copied=True)
        reason = answer["reason"] or reason
        if answer["made"]:
            return _exact_outputs(side, session, plain, keys)
    session.notes.append(f"{side.side.word} has no float64 run: {reason}")
    return None


_AMPLIFIED = 8  # of a layer's inputs, by its own computation
_MOST_ROUNDS = 8  # of inputs for the rows of one table
_MOST_BYTES = 512 << 20
_FEWEST_ROWS = 2
_MOST_CALLS = 16
EXACT_BOUND, FLOAT_BOUND = 1e-6, 3e-5


class _LayerFinder:
    """Compares the layers of both sides, and finds the first that differs."""

    def __init__(
        self,
        session: ComparedModels,
        calls: tuple[list[CallRow], list[CallRow]],
        *,
        exact: bool,
        unstable: Sequence[str],
    ) -> None:
        self._session, self._exact, self._unstable = session, exact, unstable
        self._receiver: str | None = None
        self.bound = self._bound = EXACT_BOUND if exact else FLOAT_BOUND
        self._layers = [
            causes.called_layers(side.layers(), rows) for side, rows in zip(session.sides, calls, strict=True)
        ]
        self._sizes = [{(call["path"], call["number"]): _call_bytes(call) for call in rows} for rows in calls]

    def find(
        self, outputs: Sequence[np.ndarray], *, failed: bool
    ) -> tuple[tuple[LayerComparison, ...], Divergence | None]:
        """Return a row for every pair of layers, and the first difference if outputs differ."""
        pairs = self._by_inputs(causes.pair_layers(*self._layers))
        known = len(self._session.arrays[0])
        total = sum(map(self._nbytes, pairs))
        used = self._session.cut(max(_FEWEST_ROWS, known * _MOST_BYTES // max(total, 1)))
        if used < known:
            outputs = [array[-used:] if len(array) == known else array for array in outputs]
            self._sizes = [
                {key: size * used // known for key, size in sizes.items()} for sizes in self._sizes
            ]
        rows: dict[int, LayerComparison] = {}
        places = {id(pair): index for index, pair in enumerate(pairs)}
        for chunk in self._chunks(pairs):
            captured = self._capture(chunk)
            for pair in chunk:
                a, b = captured[0].get(pair.a.key), captured[1].get(pair.b.key)
                if a is not None and b is not None:
                    rows[places[id(pair)]] = causes.compare_layer(pair, a, b, self._bound)
        with np.errstate(invalid="ignore", over="ignore"):
            first = self._explain(pairs, rows, outputs) if failed else None
        return tuple(rows.values()), first

    def _by_inputs(self, pairs: list[LayerCallPair]) -> list[LayerCallPair]:
        """Return the pairs, with several calls of one layer paired by their inputs.

        The order in which a model calls a layer on several inputs is free. A program has a layer for each.
        """
        groups: dict[Any, list[int]] = {}
        for index, pair in enumerate(pairs):
            same = pair.a.weights if pair.by == "weights" else pair.b.path
            groups.setdefault((pair.a.path, same), []).append(index)
        for places in groups.values():
            if (
                not 1 < len(places) <= _MOST_CALLS
                or sum(self._nbytes(pairs[n]) for n in places) > _MOST_BYTES
            ):
                continue
            captured = self._capture([pairs[index] for index in places])
            free = [pairs[index].b for index in places]
            for pair_index in places:
                arrays = captured[0][pairs[pair_index].a.key].inputs
                errors = [
                    causes.input_error(arrays[0], other[0])
                    if arrays and (other := captured[1][layer.key].inputs)
                    else 0.0
                    for layer in free
                ]
                nearest = int(np.argmin(errors)) if min(errors) <= self._bound else 0
                pairs[pair_index] = replace(pairs[pair_index], b=free.pop(nearest))
        return pairs

    def _nbytes(self, pair: LayerCallPair) -> int:
        return self._sizes[0].get(pair.a.key, 0) + self._sizes[1].get(pair.b.key, 0)

    def _chunks(self, pairs: Sequence[LayerCallPair]) -> Iterator[list[LayerCallPair]]:
        chunk: list[LayerCallPair] = []
        size = 0
        for pair in pairs:
            nbytes = self._nbytes(pair)
            if chunk and size + nbytes > _MOST_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(pair)
            size += nbytes
        if chunk:
            yield chunk

    def _capture(self, pairs: Sequence[LayerCallPair]) -> list[dict[tuple[str, int], CapturedCall]]:
        keys = ([pair.a.key for pair in pairs], [pair.b.key for pair in pairs])
        return [
            side.capture(list(dict.fromkeys(calls)), exact=self._exact)
            for side, calls in zip(self._session.sides, keys, strict=True)
        ]

    def _explain(
        self, pairs: list[LayerCallPair], rows: Mapping[int, LayerComparison], outputs: Sequence[np.ndarray]
    ) -> Divergence | None:
        """Return where the models part, and the most likely cause."""
        if self._unstable:
            return self._find_randomness(pairs)
        compared = sorted(rows)
        at = self._first_failure(pairs, rows)
        agreeing = [index for index in compared if rows[index].within and (at is None or index < at)]
        before = pairs[agreeing[-1]] if agreeing else None
        if at is None:
            return None if before is None else self._after_last(before, outputs)
        divergence = self._explain_pair(pairs, rows[at], pairs[at], before, outputs)
        # A layer before it whose outputs have A's numbers in another order.
        moved = (n for n in compared if n < at and not rows[n].within)
        if divergence.cause is None and (earlier := next(moved, None)) is not None:
            before = next((pairs[n] for n in reversed(agreeing) if n < earlier), None)
            other = self._explain_pair(pairs, rows[earlier], pairs[earlier], before, outputs)
            return divergence if other.cause is None else other
        return divergence

    def _first_failure(self, pairs: list[LayerCallPair], rows: Mapping[int, LayerComparison]) -> int | None:
        """Return the place of the first pair that differs and affects what follows.

        If the next pair has other inputs and these agree, the two layers are no counterparts: one of
        them is merged with another layer, e.g. a convolution with its batch norm. A layer before a
        reshape may have its outputs in another order.
        """
        for index in [index for index in sorted(rows) if not rows[index].within]:
            path = pairs[index].a.path
            # A layer that contains this one ends later, and began before.
            rest = [
                following
                for following in sorted(rows)
                if following > index and not is_inside(path, pairs[following].a.path)
            ]
            after = rest[0] if rest else None
            if after is None or rows[after].inputs > self._bound:
                return index
            captured, other = self._capture([pairs[index], pairs[after]])
            here, later = captured[pairs[index].a.key], captured[pairs[after].a.key]
            output = other[pairs[index].b.key].outputs[0]
            if pairs[index].by == "weights" and not causes.is_reordered(here.outputs[0], output, self._bound):
                return index
            if not here.inputs or not later.inputs or np.array_equal(here.inputs[0], later.inputs[0]):
                return index
        return None

    def _explain_pair(
        self,
        pairs: list[LayerCallPair],
        row: LayerComparison,
        pair: LayerCallPair,
        before: LayerCallPair | None,
        outputs: Sequence[np.ndarray],
    ) -> Divergence:
        captured = self._capture([pair] if before is None else [before, pair])
        calls = (captured[0][pair.a.key], captured[1][pair.b.key])
        inside = any(other is not pair and is_inside(other.a.path, pair.a.path) for other in pairs)
        title = None if before is None else before.a.path
        if row.inputs <= self._bound and not inside:
            where = LAYER
            cause = LayerCauses(pair, calls, self._session.sides, self._bound, exact=self._exact).find()
            cause = self._with_origin(pair, cause) or self._operations(pairs, pair, where)
        else:
            where = BETWEEN
            after = tuple(call.outputs[0] for call in calls) if inside else self._differing_input(calls)
            cause = None if inside else self._reordered(pair, calls)
            if cause is None and before is not None:
                prior = captured[0][before.a.key], captured[1][before.b.key]
                activation = causes.activation_cause(prior, (after[0], after[1]), self._bound)
                if activation is not None and (
                    owner := self._activation_layer(before, pair, prior[1], activation)
                ):
                    return _divergence(before.a.path, owner, LAYER, None, activation, title)
                cause = activation
        called = None if cause is not None else self._called_instead(pairs, pair, calls[0])
        if cause is None and called is None:
            called = self._exchanged(pairs, outputs)
            if where == BETWEEN and (called is None or called[1] is None):
                cause = self._operations(pairs, pair, LAYER if inside else BETWEEN)
                cause = cause or causes.between_cause((after[0], after[1]), self._bound)
        if cause is None and called is not None:
            return _divergence(called[0].a.path, called[0].b.path, LAYER, None, called[1], title)
        received = next((item for item in pairs if where == BETWEEN and item.b.path == self._receiver), None)
        if received is not None:
            return _divergence(received.a.path, received.b.path, where, None, cause, title)
        return _divergence(row.a, row.b, where, row.inputs, cause, title)

    def _operations(
        self, pairs: Sequence[LayerCallPair], pair: LayerCallPair | None, where: str = BETWEEN
    ) -> Cause | None:
        """Return what both sides execute for a layer's inputs, its outputs, or the model's outputs."""
        sides = [side.operations(exact=self._exact) for side in self._session.sides]
        keys = [(ROOT, 0)] * 2 if pair is None else [pair.a.key, pair.b.key]
        calls = [side.calls.get(key, ((), ())) for side, key in zip(sides, keys, strict=True)]
        what = 1 if pair is None or where == LAYER else 0
        # What the other side has under no name is open: a layer of an own class, or a node of a graph.
        titles = {item.b.path: item.a.path for item in pairs}
        paired = {*titles.values()}, titles.keys()
        known = [
            {
                item.path
                for item in side
                if item.tensors and not item.composed
                if item.path in paths or (item.family and kind not in GRAPHS)
            }
            for side, paths, kind in zip(self._layers, paired, self._session.kinds, strict=True)
        ]
        opened = [{ROOT, key[0]} if where == LAYER else {ROOT} for key in keys]
        for item in pairs:
            # What a layer's own activation computes of equal inputs may be the difference.
            own = any(side.settings.get("activation", "linear") != "linear" for side in (item.a, item.b))
            if own and self._parts_in(item, sides):
                opened[0].add(item.a.path)
                opened[1].add(item.b.path)
        one, other = (
            side.with_layers(paths - own, words)
            for side, paths, own, words in zip(sides, known, opened, ({}, titles), strict=True)
        )
        difference = OperationDifference(one, other, self._bound)
        values = calls[0][0][:1], calls[1][0][:1]
        alone = pair is not None and not pair.b.family and self._session.kinds[1] in GRAPHS
        if alone and where == BETWEEN and all(values):
            of, number = values[0][0], values[1][0]
            if of in one.arrays and difference.is_computed(number, of):
                # What A's layer receives, B's operations before this one receive: they are that layer.
                return self._operations(pairs, pair, LAYER)
        cause = difference.find(list(zip(calls[0][what], calls[1][what], strict=False)))
        if cause is not None and where == BETWEEN:
            self._receiver = difference.receiver
        return cause

    def _parts_in(self, pair: LayerCallPair, sides: Sequence[RecordedCall]) -> bool:
        """Return whether a pair of layers gives other outputs for equal inputs."""
        none = ((), ())
        calls = [side.calls.get(key, none) for side, key in zip(sides, (pair.a.key, pair.b.key), strict=True)]
        errors = []
        for numbers in zip(*calls, strict=True):
            arrays = [side.arrays.get(n[0]) if n else None for side, n in zip(sides, numbers, strict=True)]
            if arrays[0] is None or arrays[1] is None:
                return False
            errors.append(align_arrays(arrays[0], arrays[1])[0])
        return errors[0] <= self._bound < errors[1]

    def _differing_input(self, calls: tuple[CapturedCall, CapturedCall]) -> tuple[np.ndarray, ...]:
        """Return both sides' first input that differs, e.g. the values of an attention."""
        pairs = list(zip(*(call.inputs or call.outputs for call in calls), strict=False))
        apart = (pair for pair in pairs if align_arrays(*pair)[0] > self._bound)
        return next(apart, pairs[0])

    def _activation_layer(
        self, before: LayerCallPair, pair: LayerCallPair, call: CapturedCall, activation: Cause
    ) -> str | None:
        """Return B's layer that applies the activation between two pairs, None if no layer does."""
        if call.before:
            return before.b.path
        if activation.text.endswith(f"B applies {causes.NO_ACTIVATION}"):
            return None  # B has no layer for it
        keys = [layer.key for layer in self._layers[1]]
        between = self._layers[1][keys.index(before.b.key) + 1 : keys.index(pair.b.key)]
        return next((layer.path for layer in between if layer.family == "activation"), None)

    def _after_last(self, before: LayerCallPair, outputs: Sequence[np.ndarray]) -> Divergence:
        captured = self._capture([before])
        prior = (captured[0][before.a.key], captured[1][before.b.key])
        after = (outputs[0], outputs[1])
        cause = (
            causes.activation_cause(prior, after, self._bound)
            or self._operations([], None)
            or causes.between_cause(after, self._bound)
        )
        return _divergence("outputs", "outputs", BETWEEN, None, cause, before.a.path)

    def _reordered(self, pair: LayerCallPair, calls: tuple[CapturedCall, CapturedCall]) -> Cause | None:
        """Return the cause if B's layer is right with its weights in the order of its inputs."""
        a, b = (call.inputs[0] for call in calls)
        order = causes.find_order(a, b, self._bound)
        if order is None:
            return None
        program = self._session.sides[1]
        what, image = causes.describe_order(order)
        cause = Cause(
            f"{pair.b.path} of B receives A's numbers in another order, its weights have A's order: {what}",
            None if image is None else f"convert A again with --flatten '{pair.b.path}={image}'",
        )
        for name, tensor in program.tensors(pair.b.path).items():
            for axis in [
                axis for axis in range(tensor.ndim) if tensor.ndim > 1 and tensor.shape[axis] == len(order)
            ]:
                turned = np.moveaxis(np.empty_like(tensor), axis, 0)
                turned[order] = np.moveaxis(tensor, axis, 0)
                outputs = program.repeat(
                    pair.b.key, {name: np.moveaxis(turned, 0, axis)}, {}, exact=self._exact
                )
                if outputs and causes.output_error(calls[0], CapturedCall((), (), outputs)) <= self._bound:
                    return replace(cause, confirmed=True)
        return None

    def _called_instead(
        self, pairs: Sequence[LayerCallPair], failed: LayerCallPair, call: CapturedCall
    ) -> tuple[LayerCallPair, Cause | None] | None:
        """Return a later layer that B calls with the inputs of A's layer, and the cause."""
        at_b = {layer.key: index for index, layer in enumerate(self._layers[1])}
        later = [pair for pair in pairs[pairs.index(failed) + 1 :] if pair.by == "weights"]
        for other in [pair for pair in later if at_b[pair.b.key] < at_b[failed.b.key]]:
            a, b = self._capture([other])
            inputs, arrays = a[other.a.key].inputs, b[other.b.key].inputs
            if not call.inputs or not inputs or not arrays or np.array_equal(inputs[0], call.inputs[0]):
                continue  # A, too, calls both layers on these inputs, e.g. parallel ones
            if causes.input_error(call.inputs[0], arrays[0]) <= self._bound:
                text = (
                    f"B's {other.b.path}, called in the place of A's {failed.a.path}, has the weights of "
                    f"A's {other.a.path}"
                )
                if failed.a.family != other.b.family:
                    text = (
                        f"B calls {other.b.path} on what A passes to {failed.a.path}: another order of layers"
                    )
                return replace(failed, b=other.b), Cause(text, confirmed=True)
        return None

    def _exchanged(
        self, pairs: Sequence[LayerCallPair], outputs: Sequence[np.ndarray]
    ) -> tuple[LayerCallPair, Cause | None] | None:
        """Return a layer that has exchanged its tensors with another one of B, and the cause.

        B is repeated as a whole with the tensors of A's names; if that is impossible, there is no cause.
        """
        b = self._session.sides[1]
        named = {(pair.a.path, pair.b.path): pair for pair in pairs if pair.by == "weights"}
        for one, other in [paths for paths in named if paths[0] < paths[1] and paths[::-1] in named]:
            tensors = [{f"{path}/{name}": x for name, x in b.tensors(path).items()} for path in (one, other)]
            right = {
                name.replace(path, replacement, 1): array
                for arrays, path, replacement in zip(tensors, (one, other), (other, one), strict=True)
                for name, array in arrays.items()
            }
            whole = (ROOT, 0)
            called = whole in b.capture([whole], exact=self._exact)  # a graph is no layer of itself
            results = b.repeat(whole, right, {}, exact=self._exact) if called else ()
            if not results:
                return named[one, other], None
            if align_arrays(outputs[0], results[0])[0] <= self._bound:
                text = f"B's {one} has the weights of A's {other}, and B's {other} those of A's {one}"
                return named[one, other], Cause(text, confirmed=True)
        return None

    def _with_origin(self, pair: LayerCallPair, cause: Cause | None) -> Cause | None:
        """Return the cause with the other layer of A that has B's tensors, or shares A's."""
        own = {tensor.values for tensor in pair.a.tensors if not tensor.constant}
        digests_of_b = {tensor.values for tensor in pair.b.tensors if not tensor.constant}
        path = pair.a.path
        others = [
            layer
            for layer in self._layers[0]
            if layer.path != path and not is_inside(layer.path, path) and not is_inside(path, layer.path)
        ]
        if cause is None:
            return None
        every = [
            {tensor.values for layer in side for tensor in layer.tensors if not tensor.constant}
            for side in self._layers
        ]
        if cause.other_numbers and len(every[0]) > 1 and not every[0] & every[1]:
            text = "no tensor of A occurs in B: the weights of another step, or averaged ones (EMA)"
            return replace(cause, text=f"{cause.text}; {text}")
        for layer in others:
            values = {tensor.values for tensor in layer.tensors}
            if shared := values & (digests_of_b - own):
                names = [tensor.name for tensor in pair.b.tensors if tensor.values in shared]
                what = "weights" if values >= digests_of_b else abbreviate_list(names, 3)
                return replace(cause, text=f"B's {pair.b.path} has the {what} of A's {layer.path}")
            if values & (own - digests_of_b):
                return replace(cause, text=f"{cause.text}; in A it is tied to {layer.path}")
        return cause

    def _find_randomness(self, pairs: Sequence[LayerCallPair]) -> Divergence | None:
        """Return the first layer whose outputs change from call to call."""
        word = self._unstable[0]
        side = "AB".index(word)
        program, layers = self._session.sides[side], self._layers[side]
        keys = [layer.key for layer in layers]
        first, again = (program.run_and_capture(keys, exact=self._exact)[1] for _ in range(2))
        cause = Cause(
            f"{word} gives other outputs at every call: dropout or noise is active in evaluation, or calls "
            "change its state",
            f"switch dropout and noise off in {word}'s evaluation mode; begin each call with the same state",
            confirmed=True,
        )
        for layer in layers:
            one, other = first[layer.key], again[layer.key]
            if all(np.array_equal(x, y) for x, y in zip(one.outputs, other.outputs, strict=True)):
                continue
            same = all(np.array_equal(x, y) for x, y in zip(one.inputs, other.inputs, strict=True))
            pair = next((pair for pair in pairs if (pair.a, pair.b)[side].key == layer.key), None)
            a, b = (layer.path, layer.path) if pair is None else (pair.a.path, pair.b.path)
            return _divergence(a, b, LAYER if same else BETWEEN, None, cause, None)
        return _divergence("outputs", "outputs", BETWEEN, None, cause, layers[-1].path if layers else None)


def _divergence(
    a: str, b: str, where: str, inputs: float | None, cause: Cause | None, after: str | None
) -> Divergence:
    known_cause = cause or Cause("")
    return Divergence(
        a, b, where, inputs, known_cause.text or None, known_cause.confirmed, known_cause.fix, after
    )


def _call_bytes(call: CallRow) -> int:
    rows = (*call.get("before", ()), *call.get("made", ()))
    # Its inputs are about as large as its outputs.
    return sum(2 * 8 * math.prod(row["shape"]) for row in rows)
