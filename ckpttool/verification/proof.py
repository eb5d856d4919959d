"""Prove that a filled model computes what the source computes: run both on the same inputs.

The source runs by itself (a Keras model with its configuration, ONNX, with permission a SavedModel or
TorchScript) or by the user's code; the target loads the written file. The mapping plays no part in it.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import same_family
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, ValueLeaf
from ckpttool.core.urls import format_command
from ckpttool.mapping.rules import Move, Scale, SumTerm, rule_steps
from ckpttool.networks import model_runner
from ckpttool.networks.live import set_value
from ckpttool.networks.model_child import ModelRunner, model_framework
from ckpttool.networks.tracing import to_array
from ckpttool.networks.worker import ModelSpec
from ckpttool.verification.output_comparison import Parity
from ckpttool.verification.sides import ModelHost, ModelSide, find_model_kind
from ckpttool.verification.tolerances import OWN_ERROR
from ckpttool.verification.two_models import (
    ModelComparison,
    ModelComparisonOptions,
    begin_opening,
    compare_models,
    find_code,
)

if TYPE_CHECKING:
    from ckpttool.networks.model_runner import Answer

NO_VERIFY = "--no-verify was used"
_INCOMPLETE = "some tensors of the model keep its own values"
_SIDES = "comparison of the source (A) with the target (B): "
_SEED = 0  # of the inputs (verification/inputs.py)
_TOLERANCE = (
    f"error vs. float64 at most {OWN_ERROR:g}x that of the source, or within rounding of the largest sum"
)


class ModelMismatchError(Exception):
    """The filled model computes something else: stops writing; only the callers of this module handle it."""

    def __init__(self, proof: ModelProof) -> None:
        """Store the comparison."""
        super().__init__()
        self.proof = proof


@dataclass(frozen=True, slots=True)
class ModelProof:
    """Whether the outputs of a filled model are those of the source.

    Args:
        reason: why they were not compared, None if they were.
        command: the command that compares them.
        comparison: what both models computed.
        rounded: the type to which the source's weights were rounded, as the conversion rounds them.
    """

    reason: str | None = None
    command: str | None = None
    comparison: ModelComparison | None = None
    rounded: str | None = None

    @property
    def verified(self) -> bool:
        """Whether both models ran and gave the same outputs."""
        return self.comparison is not None and self.within

    @property
    def notes(self) -> tuple[str, ...]:
        """What the comparison does not show."""
        comparison = self.comparison
        return (
            ()
            if comparison is None
            else tuple(_SIDES + note for note in (*comparison.not_compared, *comparison.notes))
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the comparison assumes, e.g. the order of axes."""
        return () if self.comparison is None else tuple(_SIDES + note for note in self.comparison.assumed)

    @property
    def within(self) -> bool:
        """Whether no output differs; also true if none was compared."""
        return all(output.within for output in self.outputs)

    @property
    def outputs(self) -> tuple[Parity, ...]:
        """The compared outputs."""
        return () if self.comparison is None else self.comparison.outputs

    @property
    def sentence(self) -> str:
        """The outcome for people."""
        if self.comparison is None:
            compare = "" if self.command is None else f"; compare the outputs with {self.command}"
            return f"mapping not verified numerically: {self.reason}{compare}"
        one, other = self.comparison.engines
        if self.rounded is not None:
            one = f"{one}, weights rounded to {self.rounded}"
        if not self.within:
            return f"the outputs differ: source in {one}, target in {other}"
        rows = format_count(self.outputs[0].n, "input") if self.outputs else "no input"
        worst = max((output.max_rel for output in self.outputs), default=0.0)
        return (
            f"verified: source ({one}) and target ({other}) give the same outputs for {rows}, "
            f"difference at most {worst:.1e} of the output's scale"
        )

    def document(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the JSON object; the receipt's has no layers."""
        document: dict[str, Any] = {"verified": self.verified, "reason": self.reason}
        if self.comparison is None:
            return {**document, "command": self.command} if self.command is not None else document
        models = self.comparison.document()
        kept = models if whole else {name: models[name] for name in ("engines", "inputs", "float64")}
        return {
            **document,
            "outputs": [output.document() for output in self.outputs],
            "tolerance": _TOLERANCE + ("" if self.rounded is None else f", in {self.rounded}"),
            "seed": _SEED,
            **({} if self.rounded is None else {"rounded": self.rounded}),
            **kept,
        }


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """What runs the source of a filled model, and what prevents it.

    Args:
        like: the user's code that builds the source's model.
        run_code: permit a program in the source's file.
        skipped: why nothing is to be compared.
        part: the part of the source that fills the model.
        rounded: the type to which the conversion rounds all weights.
        incomplete: some tensors of the model keep its own values.
    """

    like: ModelSpec | None = None
    run_code: bool = False
    skipped: str | None = None
    part: str | None = None
    rounded: str | None = None
    incomplete: bool = False


def common_rounding(
    moves: Sequence[Move], filled: Iterable[Leaf | ValueLeaf], *, merged: bool
) -> tuple[str | None, str | None]:
    """Return the type to which a conversion rounds all weights, or why there is no such type.

    Args:
        moves: the conversion.
        filled: the tensors that it fills.
        merged: tensors of the source were merged before.
    """
    names = {leaf.dtype for leaf in filled if isinstance(leaf, Leaf) and same_family(leaf.dtype, "float32")}
    if len(names) != 1:
        return None, f"values are rounded to several types: {', '.join(sorted(names)) or 'no numbers'}"
    sums = (step for move in moves for step in rule_steps(move.rule) if isinstance(step, SumTerm | Scale))
    if merged or next(sums, None) is not None:
        return None, "values that are computed from others are rounded"
    return names.pop(), None


def prevented(checkpoint: Checkpoint, request: ProofRequest) -> str | None:
    """Return why the source does not run, None if it does."""
    if request.skipped is not None:
        return request.skipped
    if request.like is not None:
        return None
    if request.part is not None:
        return (
            "--part selects a part of the source; --like-source MODULE:FACTORY names the code that builds it"
        )
    kind = find_model_kind(checkpoint)
    if kind is None:
        return "the source contains weights without the model that uses them"
    code = None if request.run_code else find_code(checkpoint, kind)
    return None if code is None else f"{code} (--run-code permits it)"


def _source_side(
    checkpoint: Checkpoint, request: ProofRequest, process: ModelHost | None = None
) -> ModelSide:
    python = sys.executable if request.like is None else request.like.python
    return ModelSide(
        "A", checkpoint.path, request.like, python, process, request.part, request.rounded, checkpoint
    )


@contextmanager
def begin_source(checkpoint: Checkpoint, request: ProofRequest) -> Iterator[ModelHost | None]:
    """Start the process of a source that runs by itself, which opens its model while the target is filled.

    It is None if nothing is to be run, or if the user's code builds the source's model. The process ends
    after the block, at once if nothing was compared.
    """
    if request.like is not None or prevented(checkpoint, request) is not None:
        yield None
        return
    with begin_opening(_source_side(checkpoint, request), run_code=request.run_code) as side:
        yield side.process


def prove_outputs(
    checkpoint: Checkpoint,
    target: ModelSide,
    request: ProofRequest,
    progress: Progress = ignore_progress,
    *,
    command: str | None = None,
    process: ModelHost | None = None,
) -> ModelProof:
    """Run the source and the filled model on the same inputs and return the comparison.

    Raise ModelMismatchError if an output differs, and the error of the user's code that builds the source's
    model. A source that cannot run for another reason is reported as such.

    Args:
        checkpoint: the source.
        target: the filled model and its process.
        request: the source's model, part and permissions.
        progress: called with the steps that are done, and all.
        command: the command that compares the outputs, reported where the source cannot run.
        process: the source's process that `begin_source` started.
    """
    if (reason := prevented(checkpoint, request)) is not None:
        return ModelProof(reason, command)
    like = request.like
    source = _source_side(checkpoint, request, process)
    shapes = () if target.like is None else target.like.shapes
    shape_texts = () if like is None else tuple(",".join(map(str, shape)) for shape in like.shapes)
    options = ModelComparisonOptions(shape_texts, run_code=request.run_code, shapes_b=shapes)
    try:
        comparison = compare_models(source, target, options, progress)
    except CkpttoolError as error:
        if request.incomplete:
            return ModelProof(f"{_INCOMPLETE}; {_reason(error)}", command)
        if like is not None and _is_of_own_code(error):
            raise
        return ModelProof(_reason(error), command)
    proof = ModelProof(comparison=comparison, rounded=request.rounded)
    if proof.within:
        return proof
    if request.incomplete:
        return ModelProof(f"{_INCOMPLETE}, and the outputs differ", command)
    raise ModelMismatchError(proof)


def _is_of_own_code(error: CkpttoolError) -> bool:
    """Return whether the user's code fails to build the source's model or to load its file."""
    others = ("not installed", "cannot be called", "cannot be rounded")
    cannot_run = any(text in error.message for text in others)
    return error.message.startswith("A: ") and not cannot_run


def _reason(error: CkpttoolError) -> str:
    """Return an error as the reason for which nothing was compared."""
    sides = {"A: ": "the source: ", "B: ": "the target: "}
    start = next((side for side in sides if error.message.startswith(side)), "")
    return f"{sides.get(start, '')}{error.message.removeprefix(start)}"


def comparing_command(checkpoint: Checkpoint, target: str, like: ModelSpec, request: ProofRequest) -> str:
    """Return the command that compares the source with the written target.

    The source's inputs have the shapes of `like` if they are vectors; axes of others may have another order.
    """
    kind = find_model_kind(checkpoint)
    words: list[str] = []
    if request.like is not None:
        words += _like_words("a", request.like)
    elif kind is None:
        words += ["--like-a", "MODULE:FACTORY"]
    elif find_code(checkpoint, kind) is not None:
        words.append("--run-code")
    if request.like is not None or kind in (None, "torchscript"):
        for shape in like.shapes:
            words += ["--input-shape", ",".join(map(str, shape)) if len(shape) == 1 else "SHAPE"]
    return format_command("verify", checkpoint.path, target, *words, *_like_words("b", like))


def _like_words(side: str, like: ModelSpec) -> list[str]:
    words = [f"--like-{side}", like.factory]
    if like.arguments is not None:
        words += [f"--like-args-{side}", json.dumps(like.arguments)]
    return words if like.python == sys.executable else [*words, f"--python-{side}", like.python]


class LiveHost:
    """Answers as the process of a model does, for a model of this process."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self._model = folder, model
        self._session = model_runner.ModelSession(folder, model)

    @property
    def runner(self) -> ModelRunner:
        """What calls the model."""
        return self._session.runner

    def request(self, do: str, **values: Any) -> Answer:
        """Answer a request; the values are in the model already."""
        if do == "exact" and model_framework(self._model) != "torch":
            return {"made": False, "reason": "a model in memory is not copied"}
        return cast("Answer", model_runner.HANDLERS[do](self._session, **values))


@contextmanager
def preserve_state(model: Any) -> Iterator[None]:
    """Restore afterwards what calls in the block change: modes, buffers, states of random generators."""
    with ExitStack() as undo:
        if model_framework(model) == "torch":
            torch: Any = sys.modules["torch"]
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            _preserve_modules(model, undo)
        else:
            for variable in getattr(model, "non_trainable_variables", ()):
                if hasattr(variable, "numpy"):
                    undo.callback(set_value, variable, to_array(variable))
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        yield


def _preserve_modules(model: Any, undo: ExitStack) -> None:
    """Register the modes and buffers of all modules; a module may change a buffer, or replace it."""
    for module in model.modules():
        undo.callback(setattr, module, "training", module.training)
        modules = vars(module).get("_buffers", {})
        for name, buffer in [*modules.items()]:
            if buffer is None or type(buffer).__name__.startswith("Uninitialized"):
                continue  # built by the first call
            undo.callback(modules.__setitem__, name, buffer)
            undo.callback(_restore_buffer, buffer, buffer.detach().clone())


def _restore_buffer(buffer: Any, values: Any) -> None:
    torch: Any = sys.modules["torch"]
    if not torch.equal(buffer, values):  # one that no call can change may not be written either
        set_value(buffer, values)


def prove_live(
    checkpoint: Checkpoint, model: Any, shapes: Sequence[Shape], request: ProofRequest
) -> ModelProof:
    """Run the source and a filled model of this process in evaluation mode; see prove_outputs.

    Modes of modules, buffers, and the state of global random generators are restored.
    """
    like = ModelSpec("the model in memory", shapes=tuple(shapes))
    if (reason := prevented(checkpoint, request)) is not None:
        return ModelProof(reason)
    for parameter in model.parameters() if model_framework(model) == "torch" else ():
        if parameter.device.type != "cpu":
            return ModelProof(f"the model is on {parameter.device}, not on the CPU")
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder, preserve_state(model):
        return prove_outputs(
            checkpoint, ModelSide("B", "", like, process=LiveHost(Path(folder), model)), request
        )
