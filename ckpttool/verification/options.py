"""The options of `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts

if TYPE_CHECKING:
    from ckpttool.networks.worker import ModelSpec


@dataclass(frozen=True)
class VerificationOptions:
    """The options of `verify`, on the command line and as keywords of the function.

    In parentheses are the placeholders of values, and the names of options of the command line other than the
    field's.

    Comparison:
        tolerance (ERROR, 0..): Maximum error of B vs. float64. Default: from A's error.
            It is relative to the largest output. The default is twice A's error, or that of rounding the
            largest sum in a layer.
        steps: Train both sides for that many updates, and compare the updates.
        whole (--all): Also compare optimizers, counters, facts, settings, receipt.
            Checkpoints without an agent are compared by their entries.
        python (INTERPRETER): Python interpreter that runs the frameworks.

    Models:
        like_a: Code that builds A's model: `package.module:factory`, or a ModelSpec with arguments.
            The checkpoint is loaded into the model strictly.
        like_b: Code that builds B's model.
        python_a (INTERPRETER): Python interpreter that runs A.
            Default: `python`.
        python_b (INTERPRETER): Python interpreter that runs B.
            Default: `python`.
        input_shapes ([NAME=]3,32,32, --input-shape): Shape of an input of A without batch; repeatable.
        inputs (FILE.npz): Your own inputs, instead of random ones.
        transpose_inputs (--transpose-inputs/--no-transpose-inputs):
            Move the channel axis of A's images for B.
            By default, declared shapes and convolutions decide.
        run_code (--run-code): Run models whose file contains code.
            Code is in SavedModel, TorchScript and Lambda layers.
        loss_a (MODULE:LOSS): Loss of A alone.
            It is called with the model's outputs and targets. Default: mean of 0.5 * (output - target)^2.
        loss_b (MODULE:LOSS): Loss of B alone.
            As for A.
        optimizer_a (NAME): Optimizer of A, if its file has several.
        optimizer_b (NAME): Optimizer of B, if its file has several.

    Agent:
        layout: Layout of the first checkpoint, if it is not to be recognized.
        facts: Facts of the common agent that no file contains.
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

    def __post_init__(self) -> None:
        """Raise UsageError for a tolerance that no error is within."""
        if self.tolerance is not None and not self.tolerance >= 0:
            raise UsageError("the tolerance is negative", expected="0 or more", found=f"{self.tolerance:g}")

    @property
    def of_training(self) -> tuple[str | None, str | None, str | None, str | None]:
        """The losses and optimizers of training steps."""
        return self.loss_a, self.loss_b, self.optimizer_a, self.optimizer_b

    @property
    def of_models(self) -> bool:
        """Whether an option applies to models only."""
        options = (self.like_a, self.like_b, self.inputs, self.transpose_inputs, *self.of_training)
        return bool(self.input_shapes or self.run_code) or any(option is not None for option in options)


class FurtherVerificationKeywords(TypedDict, total=False):
    """Fields of VerificationOptions that `verify` takes as keywords without listing them."""

    python_a: str | None
    python_b: str | None
    optimizer_a: str | None
    optimizer_b: str | None
