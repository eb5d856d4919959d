"""Convert a checkpoint to another framework: map it, write it, read it back, and write a receipt."""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from ckpttool.conversion.format_conversion import run_conversion
from ckpttool.conversion.option_keywords import takes_options
from ckpttool.conversion.options import (
    MOVED,
    ConversionOptions,
    FormatOptions,
    FurtherConversionKeywords,
    FurtherFillKeywords,
    ModelFileOptions,
)
from ckpttool.conversion.plan import ConversionResult
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts

if TYPE_CHECKING:
    from ckpttool.networks.worker import ModelSpec


@takes_options(FormatOptions, MOVED, ConversionOptions)
def convert(
    source: str,
    target: str,
    options: FormatOptions | None = None,
    *,
    to: str | None = None,
    part: str | None = None,
    layout: str | None = None,
    weights: str | None = None,
    rules: str | None = None,
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    optimizer: Sequence[str] = (),
    env: str | None = None,
    facts: AgentFacts = NO_FACTS,
    code: str | None = None,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = ignore_progress,
    **further: Unpack[FurtherConversionKeywords],
) -> ConversionResult:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    Nothing is written if an entry is unmapped (unless `allow_missing`) or with `dry_run`. The target is
    written to a temporary file, read back, compared and then renamed; the same conversion gives the same
    bytes. Raise UsageError for mutually exclusive options. `export` writes ONNX, `fill` what a model of your
    own loads.

    Args:
        source: the checkpoint to convert (SRC): a file, prefix or folder.
        target: the path to write (DST); its suffix selects the format unless `to` does.
        options: what to convert, and how; keywords replace its fields.
        progress: called with the finished and the total amount of work.
        further: the other fields of FormatOptions, which follow.

    >>> import ckpttool
    >>> done = ckpttool.convert("sample_ckpts/td3_pendulum_tf/ckpt-15000", "agent.pt", dry_run=True)
    >>> done.written, done.report.complete, len(done.report.mapped)
    (False, True, 94)
    """
    return run_conversion(source, target, ConversionOptions(**vars(options)), progress)


@takes_options(ModelFileOptions)
def fill(
    source: str,
    target: str,
    like: ModelSpec | str,
    options: ModelFileOptions | None = None,
    *,
    match: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
    cast: bool = False,
    accept_order: bool = False,
    part: str | None = None,
    rules: str | None = None,
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    like_source: ModelSpec | str | None = None,
    run_code: bool = False,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    verify: bool = True,
    progress: Progress = ignore_progress,
    **further: Unpack[FurtherFillKeywords],
) -> ConversionResult:
    """Write the checkpoint that your own model loads, filled from the one at `source`.

    The model is built in a separate process. Nothing is written when one of its weights is missing or a
    weight of the source unused (unless `allow_missing` or `allow_unused` permits it), or with `dry_run`.
    `load_into` fills a live model.

    Args:
        source: the checkpoint to read (SRC): a file, prefix or folder.
        target: the path to write (DST); its suffix selects the framework unless `to` does.
        like: code that builds the model: `package.module:factory`, or a ModelSpec with arguments.
        options: how to fill the model; keywords replace its fields.
        progress: called with the finished and the total amount of work.
        further: the other fields of ModelFileOptions, which follow.

    >>> import ckpttool
    >>> from ckpttool.networks import ModelSpec
    >>> agent, layer = "sample_ckpts/td3_pendulum_tf/ckpt-15000", ModelSpec("torch.nn:Linear", [3, 64])
    >>> done = ckpttool.fill(agent, "l1.pt", layer, part="policy/actor/l1", dry_run=True)
    >>> done.report.complete, [entry.target for entry in done.report.mapped]
    (True, ['weight', 'bias'])
    """
    return run_conversion(source, target, ConversionOptions(**{**vars(options), "like": like}), progress)
