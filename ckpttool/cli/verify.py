"""The `verify` command."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from ckpttool.cli import console
from ckpttool.cli.convert import PlayedAgentOptions
from ckpttool.cli.parameters import AsJson, Quiet, argument, make_importable, use_checkpoint
from ckpttool.cli.progress import show_progress
from ckpttool.core import sidecar
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.verification.options import VerificationOptions


@dataclass(frozen=True)
class TrainStepOptions:
    """Whether to compare updates, too.

    Comparison:
        steps (N): Number of updates for --train-step.
        train_step (--train-step): Train both further and compare the weight updates.
    """

    steps: int = 100
    train_step: bool = False


@dataclass(frozen=True)
class ModelPairOptions:
    """Code of models that are no agents of a known library.

    Models:
        loss (MODULE:LOSS): Loss for --train-step.
        like_a (MODULE:FACTORY): Code that builds A's model.
        like_b (MODULE:FACTORY): Code that builds B's model.
        like_args_a (JSON): Arguments of A's factory, '{"hidden": 256}'.
        like_args_b (JSON): Arguments of B's factory.
    """

    loss: str | None = None
    like_a: str | None = None
    like_b: str | None = None
    like_args_a: str | None = None
    like_args_b: str | None = None

    def specs(self) -> tuple[Any, Any]:
        """Return the factories of both sides."""
        if not any((self.like_a, self.like_b, self.like_args_a, self.like_args_b)):
            return None, None
        from ckpttool.networks.worker import parse_model_spec

        specs = []
        rows = (("a", self.like_a, self.like_args_a), ("b", self.like_b, self.like_args_b))
        for word, factory, arguments in rows:
            if factory is None and arguments is not None:
                raise UsageError(f"--like-args-{word} requires --like-{word}")
            specs.append(None if factory is None else parse_model_spec(factory, arguments, (), None))
        return specs[0], specs[1]


def verify(
    first: Annotated[str, argument("A", "The source checkpoint.")],
    second: Annotated[str, argument("B", "The converted checkpoint.")],
    options: VerificationOptions,
    training: TrainStepOptions,
    models: ModelPairOptions,
    agent: PlayedAgentOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Run both checkpoints on the same inputs, each in its own framework's process.

    Recognised agents are compared network by network. Other models run by themselves (.keras, Keras .h5,
    ONNX, SavedModel, TorchScript), or are built by your code (--like-a, --like-b); if their outputs
    differ, the first layer that differs is named.

    By default, B's error from float64 may be twice that of A in its own framework, or that of rounding
    the largest sum in a layer.
    """
    from ckpttool.commands import verify

    like_a, like_b = models.specs()
    options = replace(
        options,
        steps=training.steps if training.train_step else None,
        layout=agent.layout,
        facts=agent.facts(make_importable(agent.env)),
        like_a=like_a,
        like_b=like_b,
        loss_a=options.loss_a or models.loss,
        loss_b=options.loss_b or models.loss,
    )
    first, second = (use_checkpoint(side, quiet=quiet or as_json) for side in (first, second))
    with show_progress("verify", quiet=quiet or as_json) as moving:
        verification = verify.verify(first, second, options, progress=moving)
    if as_json:
        console.print_document(verification.document())
    else:
        from ckpttool.cli import verification_tables

        console.print_text(verification_tables.render_verification(verification, quiet=quiet))
        if console.suggests_commands(quiet=quiet):
            from ckpttool.cli import next_steps

            next_steps.print_next_steps(next_steps.after_verify(second, verification))
    return 0 if verification.within and not sidecar.has_open_entries(verification.ledger) else 1
