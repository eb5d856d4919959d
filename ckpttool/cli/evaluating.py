"""`eval`: the command, its options and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool import ledger
from ckpttool.cli import completing, next_steps, output
from ckpttool.cli.columns import wrapped
from ckpttool.cli.options import (
    ActivationOption,
    AdapterOption,
    Against,
    AsJson,
    BoundsOption,
    Chart,
    Csv,
    Dtype,
    Engine,
    HeadOption,
    Last,
    LayoutOption,
    Noise,
    ObsNormOption,
    Plot,
    Quiet,
    Runs,
    Tensorboard,
    Video,
    VideoEpisodes,
    WrapperOption,
    agent_facts,
    importable,
)
from ckpttool.cli.progress import progress
from ckpttool.errors import CkpttoolError

if TYPE_CHECKING:
    from ckpttool.cli.showing import Shown
    from ckpttool.ops.sweep import Failed, Sweep


def evaluate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Checkpoints, folders of them, or patterns in quotes.", show_default=False
        ),
    ],
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Gymnasium environment, or module:factory (see --engine device). Default: the sidecar's.",
            autocompletion=completing.environments,
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, metavar="N", help="Episodes to play.")] = 10,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Episode i is reset with seed + i.")
    ] = 1000,
    num_envs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Environments at once. Default: up to 16.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:N or auto.")] = "cpu",
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="numpy, torch, tensorflow or onnxruntime.",
            autocompletion=completing.backends,
        ),
    ] = "numpy",
    network: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="actor or actor_target; of a file without a layout the module's name.",
            autocompletion=completing.among("actor", "actor_target"),
        ),
    ] = "actor",
    noise: Noise = None,
    dtype: Dtype = "float32",
    engine: Engine = "auto",
    adapter: AdapterOption = None,
    wrapper: WrapperOption = None,
    layout: LayoutOption = None,
    activation: ActivationOption = None,
    head: HeadOption = None,
    bounds: BoundsOption = None,
    obs_norm: ObsNormOption = None,
    runs: Runs = False,
    last: Last = None,
    against: Against = None,
    min_return: Annotated[
        float | None, typer.Option(metavar="RETURN", help="Exit with 1 if a mean return is below this.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Play in N processes of their own.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Play on a Ray cluster; local starts one of --jobs workers."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the JSON document to a new file as well; to a folder or a .jsonl file, each result "
            "when it is there, and a rerun goes on from these.",
        ),
    ] = None,
    csv: Csv = None,
    tensorboard: Tensorboard = None,
    video: Video = None,
    video_episodes: VideoEpisodes = "0",
    plot: Plot = None,
    chart: Chart = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Restore agents and play them: fixed seeds, deterministic policy, undiscounted returns."""
    from ckpttool.cli import comparing, plots, showing
    from ckpttool.ops import results, score_files, training_curve, training_step
    from ckpttool.ops.evaluation import Protocol, float_type
    from ckpttool.ops.sweep import sweep

    importable(env)
    facts = agent_facts(activation, head, bounds, obs_norm)
    lines = None if out is None else results.place(out)
    if out is not None and lines is None:
        score_files.require_new_result(out)  # before hours of playing, not after
    protocol = Protocol(
        episodes,
        seed,
        num_envs,
        device,
        backend,
        network,
        float_type(dtype),
        engine,
        noise,
        adapter,
        None if wrapper is None else tuple(wrapper),
    )
    wanted = showing.wanted(video, video_episodes, plot, chart=chart)
    asked = comparing.wanted(
        paths, layout, runs=runs, last=last, against=against or (), csv=csv, tensorboard=tensorboard
    )
    showing.require(wanted, asked.paths, env, protocol, layout, facts)
    with progress("eval", quiet=quiet or as_json, unit="episodes") as moving:
        found = sweep(
            asked.paths,
            env,
            protocol,
            layout=layout,
            facts=facts,
            out=lines,
            spread=_spread(jobs, ray),
            progress=moving,
        )
    if not found.scored and found.failed and len(found.failed) == 1:
        raise found.failed[0].error
    alone = found.scored[0].evaluation if found.alone else None
    content = found.document() if alone is None else found.document()["evaluations"][0]
    told = comparing.tell(asked, found)
    beside = training_curve.beside([each.checkpoint for each in found.evaluations])
    content |= {**told.document, **beside.document()}
    if out is not None and lines is None:
        score_files.save_document(out, output.document(content))
    if not as_json and found.scored:
        from ckpttool.cli import scores, tables

        notes = () if quiet else tables.listed("note", beside.notes)
        output.write("\n".join([scores.sweep(found, quiet=quiet), *map(wrapped, notes), *told.lines]))
    unit = training_step.UNITS.get(found.step_from or "", training_step.ANY_UNIT)
    drawn = plots.Drawn(found.evaluations, found.curve, beside.curves, told.algorithms, told.comparison, unit)
    shown = showing.show(wanted, found, env, layout, drawn, facts=facts, quiet=quiet, as_json=as_json)
    if as_json:
        output.write(output.document({**content, **shown.document}))
    else:
        if shown.lines:
            output.write("\n".join(shown.lines))
        next_steps.tell(next_steps.after_eval, found, env, quiet=quiet)
    return _status(found, shown, told.mean, min_return)


def _status(found: Sweep, shown: Shown, mean: float | None, min_return: float | None) -> int:
    """Say what went wrong, and return what the command ends with; `mean` is that of runs together."""
    for failure in shown.failures:
        output.fail(failure, as_json=False)
    if found.failed:
        _tell(found.failed)
    if found.failed or shown.failures:
        return 2
    if found.interrupted or shown.interrupted:
        return 130
    means = [each.statistics.mean for each in found.evaluations] if mean is None else [mean]
    low = min_return is not None and min(means) < min_return
    return 1 if low or any(ledger.decides(each.ledger) for each in found.evaluations) else 0


def _tell(failed: Sequence[Failed]) -> None:
    """Say what kept checkpoints from being played: the same thing once."""
    alike: dict[tuple[str, str | None], list[Failed]] = {}
    for each in failed:
        sentence = str(each.error).removeprefix(f"{each.error.file}: ")
        alike.setdefault((sentence, each.error.hint), []).append(each)
    for (sentence, hint), those in alike.items():
        more = f" (and {len(those) - 1} more)" if len(those) > 1 else ""
        output.fail(CkpttoolError(sentence, file=f"{those[0].checkpoint}{more}", hint=hint), as_json=False)


def _spread(jobs: int | None, ray: str | None) -> Any:
    """Return who plays."""
    from ckpttool.ops import groups, processes, ray_cluster

    if ray is not None:
        return ray_cluster.on(ray, jobs)
    return groups.here if jobs is None else processes.on(jobs)
