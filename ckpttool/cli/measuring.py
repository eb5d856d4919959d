"""The commands that read all numbers: `stats` and `doctor` of one checkpoint, `diff` of two."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli import completing, next_steps, output
from ckpttool.cli.options import (
    ActivationOption,
    AsJson,
    BoundsOption,
    Glob,
    HeadOption,
    InputShape,
    LayoutOption,
    LikeArgs,
    LikePython,
    ObsNormOption,
    PathArgument,
    Quiet,
    agent_facts,
    importable,
    like_of,
)
from ckpttool.cli.progress import progress
from ckpttool.errors import UsageError, choice

_ORDERS = ("file", "name", "size", "norm")


def stats(
    path: PathArgument,
    glob: Glob = None,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="A line for each module down to level N instead.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER", help="file, name, size or norm.", autocompletion=completing.among(*_ORDERS)
        ),
    ] = "file",
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show what the numbers are like: range, mean, spread, zeros, NaN, dead units, vanished moments.

    Exits with 1 if a number is NaN or infinite.
    """
    from ckpttool.ops import stats as op

    if sort not in _ORDERS:
        raise UsageError(f"there is no order {sort!r}", hint=choice(sort, _ORDERS))
    with progress("stats", quiet=quiet or as_json) as moving:
        found = op.stats(path, glob, layout, moving)
    if as_json:
        output.write(output.document(found.document()))
    else:
        from ckpttool.cli import measures

        output.write(measures.stats(found, depth, sort, quiet=quiet))
        next_steps.tell(next_steps.after_stats, path, found, quiet=quiet)
    return 0 if found.finite else 1


def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
    right: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    glob: Glob = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="path; agent: what means the same, across frameworks; conversion: what converting one side "
            "gives. auto: the one that fits.",
            autocompletion=completing.among("auto", "path", "agent", "conversion"),
        ),
    ] = "auto",
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="abs, rel or cosine: biggest first.",
            autocompletion=completing.among("abs", "rel", "cosine"),
        ),
    ] = "abs",
    whole: Annotated[bool, typer.Option("--all", help="Show every change, not the first twenty.")] = False,
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Compare two checkpoints: entries that one has alone, other shapes and types, values and where.

    Exits with 1 if they differ.
    """
    from ckpttool.ops import diff as op

    with progress("diff", quiet=quiet or as_json) as moving:
        found = op.diff(left, right, glob=glob, by=by, sort=sort, layout=layout, progress=moving)
    if as_json:
        output.write(output.document(found.document()))
    else:
        from ckpttool.cli import measures

        output.write(measures.diff(found, whole=whole, quiet=quiet))
        next_steps.tell(next_steps.after_diff, left, right, found, quiet=quiet)
    return 0 if found.identical else 1


def doctor(
    path: PathArgument,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The environment it is for. Default: its own files'.",
            autocompletion=completing.environments,
        ),
    ] = None,
    layout: LayoutOption = None,
    activation: ActivationOption = None,
    head: HeadOption = None,
    bounds: BoundsOption = None,
    obs_norm: ObsNormOption = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Also say what of your own model, which this class or function makes, nothing in the "
            "checkpoint fills. Your code runs, in a process of its own.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="For --like: what fills it, a path or a network (policy/actor, actor)."
        ),
    ] = None,
    like_args: LikeArgs = None,
    input_shape: InputShape = None,
    python: LikePython = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Say what is wrong with a checkpoint, or will be when it is used, and what mends it.

    Exits with 1 on a finding: names that would run code, NaN, dead units, vanished moments, facts that
    nothing tells, an environment that does not fit, tensors of your model that nothing fills.
    """
    from ckpttool.ops import doctor as op

    with progress("doctor", quiet=quiet or as_json) as moving:
        model = like_of(like, like_args, input_shape, python)
        facts = agent_facts(activation, head, bounds, obs_norm)
        found = op.diagnose(path, importable(env), layout, moving, facts=facts, model=model, part=part)
    if as_json:
        output.write(output.document(found.document()))
    else:
        from ckpttool.cli import measures

        output.write(measures.diagnosis(found, quiet=quiet))
        next_steps.tell(next_steps.after_doctor, path, found, quiet=quiet)
    return 1 if found.findings else 0
