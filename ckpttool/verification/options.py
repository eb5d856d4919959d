"""The options of `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ckpttool.core.deferred import dataclass
from ckpttool.evaluation.evidence import NO_FACTS, AgentFacts
from ckpttool.networks.worker import ModelSpec


@dataclass(frozen=True)
class VerificationOptions:
    """The options of `verify`.

    Args:
        tolerance: replaces the default bound: B's largest error against float64, relative to the
            output's scale.
        steps: train both sides for that many updates, and compare the updates.
        layout: that of the first checkpoint, None for the recognized one.
        facts: facts of the common agent that no file contains.
        python: the interpreter that runs the frameworks.
        whole: also compare every entry, fact, setting and receipt exactly; checkpoints without an agent
            are compared by their entries.
        like_a: the user's code that builds the model of the first checkpoint, which is then loaded into it
            strictly: "module:factory", or a ModelSpec with arguments.
        like_b: the same for the second checkpoint.
        python_a: the interpreter that runs the first model; None for `python`.
        python_b: the same for the second model.
        input_shapes: shapes of the first model's inputs without the batch: "3,32,32" or "name=3,32,32".
        inputs: a `.npz` file with the inputs, instead of fixed random ones.
        transpose_inputs: whether the second model's inputs have channels on the other side; None decides
            by declared shapes and by convolutions.
        run_code: permit files that contain code: SavedModel, TorchScript, Lambda layers.
        loss_a: the loss of the first model's training steps, "module:function", called with its outputs
            and targets; None for the mean of 0.5 * (output - target)^2.
        loss_b: the same for the second model.
        optimizer_a: for a file of the first model with several optimizers: the name of the one to train with.
        optimizer_b: the same for the second model.

    """

    tolerance: float | None = None
    steps: int | None = None
    layout: str | None = None
    facts: AgentFacts = NO_FACTS
    python: str | None = None
    whole: bool = False
    like_a: ModelSpec | str | None = None
    like_b: ModelSpec | str | None = None
    python_a: str | None = None
    python_b: str | None = None
    input_shapes: Sequence[str] = ()
    inputs: str | None = None
    transpose_inputs: bool | None = None
    run_code: bool = False
    loss_a: str | None = None
    loss_b: str | None = None
    optimizer_a: str | None = None
    optimizer_b: str | None = None

    @property
    def of_training(self) -> tuple[str | None, str | None, str | None, str | None]:
        """The losses and optimizers of training steps."""
        return self.loss_a, self.loss_b, self.optimizer_a, self.optimizer_b

    @property
    def of_models(self) -> bool:
        """Whether an option applies to models only."""
        given = (self.like_a, self.like_b, self.inputs, self.transpose_inputs, *self.of_training)
        return bool(self.input_shapes or self.run_code) or any(each is not None for each in given)


class VerificationKeywords(TypedDict, total=False):
    """Fields of VerificationOptions as keywords, for type checkers and editors."""

    tolerance: float | None
    steps: int | None
    layout: str | None
    facts: AgentFacts
    python: str | None
    whole: bool
    like_a: ModelSpec | str | None
    like_b: ModelSpec | str | None
    python_a: str | None
    python_b: str | None
    input_shapes: Sequence[str]
    inputs: str | None
    transpose_inputs: bool | None
    run_code: bool
    loss_a: str | None
    loss_b: str | None
    optimizer_a: str | None
    optimizer_b: str | None
