"""`convert`, and `verify`, which proves what it wrote."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import Annotated

import typer

from ckpttool.cli import common
from ckpttool.cli.common import (
    ActivationOption,
    AsJson,
    BoundsOption,
    Env,
    HeadOption,
    InputShape,
    LayoutOption,
    LikeArgs,
    LikePython,
    ObsNormOption,
    Quiet,
    agent_facts,
    build_like_model,
    make_importable,
    show_progress,
)
from ckpttool.core import sidecar
from ckpttool.core.errors import UsageError

_TIMEOUT, _SHORTEST = "OPENBLAS_THREAD_TIMEOUT", "4"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What to convert.", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="The file to write; for tf, tf1 and fujimoto the prefix.", show_default=False
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="What to write: torch, tf (TensorFlow objects), tf1 (TensorFlow variables by name), keras "
            "(a weights file), safetensors, npz, onnx (a policy that runs), or whose agent it is to be: "
            "fujimoto (the TD3 authors' files), cleanrl, sb3, sb2, tf2rl, tianshou, spinningup, "
            "d3rlpy (.d3), d3rlpy_model (.pt), rsl_rl, fasttd3, skrl, elegantrl, tf_agents, acme, "
            "keras_rl, rllib. Guessed from DST's suffix: .pt, .pth, .index, .h5, .cleanrl_model, "
            ".safetensors, .npz or .onnx.",
            autocompletion=common.complete_targets,
        ),
    ] = None,
    layout: LayoutOption = None,
    part: Annotated[
        str | None, typer.Option(metavar="PATH", help="Convert only what lies below this path in SRC.")
    ] = None,
    strip: Annotated[
        bool, typer.Option("--strip", help="Remove what wrappers put into names: module., _orig_mod., ...")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Put back what --strip removed, as SRC's sidecar says it.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="ema|raw",
            help="Convert the averaged weights alone, or the trained ones.",
            show_default=False,
        ),
    ] = None,
    fold_weight_norm: Annotated[
        bool, typer.Option("--fold-weight-norm", help="Make one weight of the two tensors of weight norm.")
    ] = False,
    fold_normalizer: Annotated[
        bool,
        typer.Option("--fold-normalizer", help="Fold observation statistics into the first layers."),
    ] = False,
    rules: Annotated[
        str | None,
        typer.Option("--map", metavar="FILE", help="Your own rules, a TOML file: see docs/mapping.md."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=KIND",
            help="What a layer of several possible kinds is: 'enc/**=embedding', 'attn=attention:8' (heads).",
        ),
    ] = None,
    flatten: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=H,W,C",
            help="Shape of the image that a layer takes flattened: 'dense1=7,7,64', with 5 more numbers "
            "behind it 'dense1=7,7,64+5', or 'dense1=no'.",
        ),
    ] = None,
    unflatten: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=H,W,C",
            help="Shape of the image that a dense layer's output becomes: 'fc=7,7,128', or 'fc=no'.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For onnx: which network, such as critic/q1. Default: actor."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The agent's environment; for onnx its action bounds count.",
            autocompletion=common.complete_environments,
        ),
    ] = None,
    activation: ActivationOption = None,
    head: HeadOption = None,
    bounds: BoundsOption = None,
    obs_norm: ObsNormOption = None,
    l2: Annotated[
        list[str] | None,
        typer.Option(
            "--l2",
            metavar="PATTERN=FACTOR",
            help="The weights that a Keras program penalised with l2(FACTOR): 'critic/**/kernel=0.01'. Torch "
            "gets parameter groups with that weight decay.",
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME/SETTING=VALUE",
            help="A setting of an optimizer that no file has: critic_optimizer/momentum=0.9; or none: leave "
            "out the state of optimizers.",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Fill your own model, which this class or function makes: 'package.module:factory'. Your "
            "code runs, in a process of its own; the module may lie in the working directory.",
        ),
    ] = None,
    like_args: LikeArgs = None,
    input_shape: InputShape = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE=TARGET", help="For --like: these two layers or modules belong together."
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FRAMEWORK",
            help="Whose orientation SRC's matrices have, if neither names nor shapes show it: torch or tf.",
        ),
    ] = None,
    cast: Annotated[
        bool, typer.Option("--cast", help="For --like: round numbers to the types of your model.")
    ] = False,
    accept_order: Annotated[
        bool,
        typer.Option("--accept-order", help="For --like: pair by order what nothing else tells apart."),
    ] = False,
    python: LikePython = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the mapping, write nothing.")] = False,
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="For --dry-run: show only moves from or to paths that match."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Write even if something is unmapped.")
    ] = False,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Do not flush to disk before the rename: faster.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare an agent's networks with what was written.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Move a checkpoint to another framework: mapped by rule, written whole or not at all, read back."""
    import gc

    # Modules and plans are many objects and no rubbish: collecting took a seventh of a small conversion, and
    # a sixth at the end of the process.
    gc.disable()
    atexit.register(gc.freeze)
    _import_numpy()
    from ckpttool.commands import convert

    if glob is not None and not dry_run:
        raise UsageError("--glob is for --dry-run alone", hint="--part PATH converts what lies below a path")
    with show_progress("convert", quiet=quiet or as_json) as moving:
        done = convert.convert(
            source,
            target,
            to=to,
            layout=layout,
            part=part,
            weights=weights,
            strip=strip,
            restore=restore,
            fold_weight_norm=fold_weight_norm,
            fold_normalizer=fold_normalizer,
            l2=l2 or (),
            optimizer=optimizer or (),
            rules=rules,
            kinds=kind or (),
            flatten=flatten or (),
            unflatten=unflatten or (),
            network=network,
            env=make_importable(env),
            facts=agent_facts(activation, head, bounds, obs_norm),
            like=build_like_model(like, like_args, input_shape, python),
            match=match or (),
            accept_order=accept_order,
            from_=from_,
            cast=cast,
            allow_missing=allow_missing,
            dry_run=dry_run,
            force=force,
            sync=not no_sync,
            verify=not no_verify,
            progress=moving,
        )
    done = replace(done, report=done.report.shown(glob))
    if as_json:
        common.print_text(common.render_document(done.document()))
    else:
        from ckpttool.cli import tables

        common.print_text(tables.render_conversion(done, quiet=quiet, whole=dry_run))
        common.print_next_steps(common.after_convert, done, quiet=quiet)
    whole = done.report.complete and not sidecar.has_open_entries(done.ledger)
    return 0 if done.within and (whole or allow_missing) else 1


def _import_numpy() -> None:
    """Import numpy, with the threads of its OpenBLAS asleep until there is a product to compute.

    Unless told otherwise they wait in a loop, 30 ms of a core that reads and hashes need
    (OpenBLAS, driver/others/blas_server.c: 2 ** OPENBLAS_THREAD_TIMEOUT ticks).
    """
    kept = os.environ.get(_TIMEOUT)
    os.environ.setdefault(_TIMEOUT, _SHORTEST)
    try:
        import numpy  # noqa: F401
    finally:
        if kept is None:
            del os.environ[_TIMEOUT]


def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="The source checkpoint.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="The converted one.", show_default=False)],
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="Largest error of B against float64, relative to the output's scale. "
            "Default: 2x the error of A's own framework, or rounding at the largest sum.",
        ),
    ] = None,
    train_step: Annotated[
        bool,
        typer.Option("--train-step", help="Also train both on, and compare how far the weights moved."),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="How many updates for --train-step.")] = 100,
    whole: Annotated[
        bool,
        typer.Option(
            "--all", help="Compare every entry as well: optimizers, counters, facts, settings, receipt."
        ),
    ] = False,
    layout: LayoutOption = None,
    env: Env = None,
    activation: ActivationOption = None,
    head: HeadOption = None,
    bounds: BoundsOption = None,
    obs_norm: ObsNormOption = None,
    python: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="The Python that runs the frameworks.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Run both checkpoints of one agent on fixed observations, each in its own framework's process."""
    from ckpttool.commands import verify

    with show_progress("verify", quiet=quiet or as_json) as moving:
        found = verify.verify(
            first,
            second,
            tolerance=tolerance,
            steps=steps if train_step else None,
            layout=layout,
            facts=agent_facts(activation, head, bounds, obs_norm, make_importable(env)),
            python=python,
            whole=whole,
            progress=moving,
        )
    if as_json:
        common.print_text(common.render_document(found.document()))
    else:
        from ckpttool.cli import tables

        common.print_text(tables.render_verification(found, quiet=quiet))
        common.print_next_steps(common.after_verify, second, found, quiet=quiet)
    return 0 if found.within and not sidecar.has_open_entries(found.ledger) else 1
