"""The `eval` command: options, printed output and files."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ckpttool.cli import console, parameters
from ckpttool.cli.columns import fit_path
from ckpttool.cli.panels import given_options
from ckpttool.cli.parameters import AgentOptions, AsJson, Quiet, argument, make_importable
from ckpttool.cli.progress import show_progress
from ckpttool.cli.styles import wrap_sentence
from ckpttool.cli.tables import labeled_lines, merge_default_sentences
from ckpttool.core import sidecar, urls
from ckpttool.core.atomic_write import require_new
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, NotACheckpointError, UsageError
from ckpttool.core.text import clean, format_count
from ckpttool.listing.training_counters import ANY_UNIT, TITLES, UNITS, step_columns

if TYPE_CHECKING:
    from ckpttool.cli import figures
    from ckpttool.commands.sweep import Sweep
    from ckpttool.evaluation.algorithms import Algorithm, AlgorithmComparison
    from ckpttool.evaluation.episode_videos import EpisodeStrip, EpisodeVideo
    from ckpttool.evaluation.playing import EvaluationOptions
    from ckpttool.evaluation.protocol import Evaluation, EvaluationFailure, Protocol, TrainingRun
    from ckpttool.evaluation.ranking import BestCheckpoint, RankingRow, ScoredCheckpoint
    from ckpttool.evaluation.statistics import Estimate


@dataclass(frozen=True)
class EnvironmentOptions:
    """Environment and simulator.

    Environment:
        env (ID): Gymnasium id or module:factory. Default: the sidecar's.
        engine (SIMULATOR, auto|gymnasium|mujoco|pendulum.batch|classic.batch|device): auto gymnasium mujoco
            pendulum.batch classic.batch device
        num_envs (N): Number of parallel environments. Default: up to 16.
        adapter (NAME, zero_contact_forces|current_positions): Observations: zero_contact_forces or
            current_positions.
        wrapper (NAME[:ARG=N,...], none|TimeFeatureWrapper|HistoryWrapper|VecFrameStack|RescaleAction):
            Wrapper used in training, innermost first; repeatable.
    """

    env: str | None = None
    engine: str = "auto"
    num_envs: int | None = None
    adapter: str | None = None
    wrapper: list[str] | None = None


@dataclass(frozen=True)
class PlayOptions:
    """Number of episodes, the network to play and the hardware.

    Evaluation:
        episodes (N): Episodes to play.
        seed (N, 0..4294967295): First seed; episode i is reset with seed + i.
        noise (STD): Gaussian action noise, in units of half the action range.
        stochastic (--stochastic): Draw actions from the policy's distribution.
        epsilon (E): Probability of a uniform action (Q-networks, discrete).
        network (NAME, actor|actor_target): actor, actor_target or, without a layout, a module.
        dtype (NAME, float32|float64): Precision of the policy: float32 or float64.
        backend (NAME): numpy, torch, tensorflow or onnxruntime.
        device (NAME): cpu, cuda, cuda:N or auto.
        jobs (N, --jobs -j): Play in N processes.
        ray (ADDRESS): Play on a Ray cluster; local starts --jobs workers.
    """

    episodes: int = 10
    seed: int = 1000
    noise: float | None = None
    stochastic: bool = False
    epsilon: float | None = None
    network: str = "actor"
    dtype: str = "float32"
    backend: str = "numpy"
    device: str = "cpu"
    jobs: int | None = None
    ray: str | None = None


@dataclass(frozen=True)
class RunOptions:
    """Whether the paths are training runs, and what to compare their returns with.

    Training runs:
        runs (--runs): Treat each PATH as a training run; intervals over runs.
        last (N): Score a run by its last N checkpoints (--runs).
        curve (--curve): Play every checkpoint of the runs for the curve (--runs).
        against (PATH): Run of another algorithm (--runs); repeatable.
        min_return (RETURN): Exit with 1 if a mean return is below this.
    """

    runs: bool = False
    last: int | None = None
    curve: bool = False
    against: list[str] | None = None
    min_return: float | None = None


_MOST_PIXELS, _MOST_FRAMES = 4096, 64


@dataclass(frozen=True)
class OutputOptions:
    """Files to write, episodes to record, and whether to plot in the terminal.

    `chart` None means: if stdout is a terminal.

    Output:
        out (FILE, --out -o): Save the JSON document; .jsonl or a folder: resumable.
        force (--force): Replace files that exist; .jsonl files are resumed.
        csv (FILE): Write one line per episode to a CSV file.
        top (N): List only the N best, also in --csv.
        tensorboard (DIR): Write TensorBoard scalars at the training steps.
        video (FILE): Record the best checkpoint to an .mp4 or .gif file.
        video_episodes (LIST): Episodes: best, worst, median or numbers. Default: 0.
        video_width (N, 16..): Width of the video in pixels. Default: as rendered.
        strip (FILE): Draw the best and the worst episode as a strip: .png.
        strip_frames (N): Images per episode of a film strip.
        plot (FILE): Plot returns or the learning curve: .png, .svg or .pdf.
        theme (NAME, light|dark): Colors of plots: light or dark. Default: light; SVG adapts.
        chart (--chart/--no-chart): Also plot in the terminal. Default: if stdout is one.
    """

    out: str | None = None
    force: bool = False
    csv: str | None = None
    top: int | None = None
    tensorboard: str | None = None
    video: str | None = None
    video_episodes: str | None = None
    video_width: int | None = None
    strip: str | None = None
    strip_frames: int = 8
    plot: str | None = None
    theme: str | None = None
    chart: bool | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for episodes without a video, or for an empty list."""
        if not self.filmed:
            raise UsageError(
                "--video-episodes lists no episode", hint="use e.g. best,worst or episode numbers from 0"
            )
        if self.filmed != ("0",) and self.video is None and self.strip is None:
            raise UsageError("--video-episodes requires --video or --strip", hint="add --video play.gif")
        if self.video_width is not None and self.video is None:
            raise UsageError("--video-width requires --video", hint="add --video play.gif")
        for name, value, most in (
            ("--video-width", self.video_width, _MOST_PIXELS),
            ("--strip-frames", self.strip_frames, _MOST_FRAMES),
        ):
            if value is not None and value > most:
                raise UsageError(f"{name} {value} is too large", hint=f"use at most {most}")

    @property
    def filmed(self) -> tuple[str, ...]:
        """Episodes to record, by number or by rank."""
        return _split_episodes(self.video_episodes or "0")

    @property
    def strip_episodes(self) -> tuple[str, ...]:
        """Episodes of the film strip."""
        return _split_episodes(self.video_episodes or "best,worst")


def _split_episodes(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


def evaluate(
    paths: Annotated[list[str], argument("PATH...", "Checkpoints, folders of them, or quoted patterns.")],
    environment: EnvironmentOptions,
    agent: AgentOptions,
    play: PlayOptions,
    runs: RunOptions,
    output: OutputOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Restore agents and play them: fixed seeds, deterministic policy, undiscounted returns."""
    from ckpttool.commands import sweep
    from ckpttool.evaluation import playing

    make_importable(environment.env)
    facts = agent.facts()
    lines = _require_output(output)
    options = playing.EvaluationOptions(environment.env, _protocol(environment, play), agent.layout, facts)
    compared = find_compared_runs(paths, runs, agent.layout)
    require_display(output, compared.paths, options)
    with show_progress("eval", quiet=quiet or as_json, unit="episodes") as moving:
        results = sweep.sweep(
            compared.paths,
            options.env,
            options.protocol,
            layout=options.layout,
            facts=options.facts,
            out=lines,
            spread=_choose_executor(play.jobs, play.ray),
            progress=moving,
        )
    if not results.scored and results.failed and len(results.failed) == 1:
        if isinstance(results.failed[0].error, NotACheckpointError):
            parameters.require_one_run(paths)
        raise results.failed[0].error
    shown, mean = _print_results(results, compared, output, options, as_json=as_json, quiet=quiet)
    repeatable = [*given_options(environment), *given_options(agent)]
    if console.suggests_commands(quiet=quiet or as_json):
        from ckpttool.cli import next_steps

        steps = next_steps.after_eval(results, compared.paths, repeatable, play, output.video is not None)
        next_steps.print_next_steps(steps)
    repeated = [*paths, *repeatable, *given_options(play)]
    return _exit_status(results, shown, mean, repeated, runs.min_return)


def _require_output(output: OutputOptions) -> str | None:
    """Raise if a file cannot be written, before hours of playing; return the file to append results to."""
    from ckpttool.evaluation import results_file, score_tables

    lines = None if output.out is None else results_file.results_path(output.out)
    for file in (output.out if lines is None else None, output.csv):
        if file is not None:
            require_new(file, force=output.force)
    if output.tensorboard is not None:
        score_tables.require_folder(output.tensorboard)
    return lines


# Other names of backends, accepted as they are.
_BACKEND_ALIASES = {"pytorch": "torch", "tf": "tensorflow", "tf2": "tensorflow", "onnx": "onnxruntime"}


def _protocol(environment: EnvironmentOptions, play: PlayOptions) -> Protocol:
    from ckpttool.evaluation.protocol import Protocol, parse_float_type

    return Protocol(
        play.episodes,
        play.seed,
        environment.num_envs,
        play.device,
        _BACKEND_ALIASES.get(play.backend, play.backend),
        play.network,
        parse_float_type(play.dtype),
        environment.engine,
        play.noise,
        environment.adapter,
        None if environment.wrapper is None else tuple(environment.wrapper),
        play.stochastic,
        play.epsilon,
    )


def _print_results(
    results: Sweep,
    compared: ComparedRuns,
    output: OutputOptions,
    options: EvaluationOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> tuple[DisplayOutput, float | None]:
    """Print the results and write the files; return what was plotted, and the mean over runs."""
    from ckpttool.cli import figures
    from ckpttool.evaluation import results_file, score_tables, training_logs

    content = results.document()["evaluations"][0] if results.alone else results.document()
    compared_output = report_comparison(compared, output, results)
    beside = training_logs.find_training_logs([evaluation.checkpoint for evaluation in results.evaluations])
    content |= {**compared_output.document, **beside.document()}
    saved = output.out if output.out is not None and results_file.results_path(output.out) is None else None
    if saved is not None:
        # Before films: they take long, and can fail.
        score_tables.save_document(saved, console.render_document(content), force=output.force)
    unit = UNITS.get(results.step_from or "", ANY_UNIT)
    drawn = figures.PlotData(
        results.evaluations,
        results.curve,
        beside.curves,
        compared_output.algorithms,
        compared_output.comparison,
        unit,
    )
    if not as_json and results.scored:
        notes = () if quiet else labeled_lines("note", beside.notes)
        below = [*map(wrap_sentence, notes), *compared_output.lines]
        console.print_text("\n".join(_result_lines(results, output, below, drawn, quiet=quiet)))
    shown = display_results(output, results, options, drawn, quiet=quiet or as_json)
    shown.failures += compared_output.failures
    whole = console.render_document({**content, **shown.document})
    if saved is not None and shown.document:
        score_tables.save_document(saved, whole, force=True)
    if as_json:
        console.print_text(whole)
    else:
        console.print_text("\n".join(shown.lines))
    return shown, compared_output.mean


# Lines of a terminal for the progress, the next command and the prompt, and the fewest rows of a table.
_OTHER_LINES, _FEWEST_ROWS = 4, 3


def _result_lines(
    results: Sweep, output: OutputOptions, below: Sequence[str], drawn: figures.PlotData, *, quiet: bool
) -> list[str]:
    """Return the lines on the results; of several checkpoints as many rows, and the plot, as a terminal fits.

    `below` are lines below the table; `drawn` is what the plot shows.
    """
    from ckpttool.cli import figures

    terminal, chart = console.terminal_height(), list[str]()
    if output.chart or (output.chart is None and terminal is not None and not quiet):
        # Points of different runs do not form one curve.
        curve = () if drawn.algorithms else results.curve
        chart = figures.render_chart(results.evaluations, curve, drawn.unit)
    if terminal is None or len(results.evaluations) == 1:
        return [render_sweep(results, quiet=quiet, top=output.top), *below, *chart]
    lines: list[str] = []
    for plot in (chart, ["not plotted: --chart plots the returns"])[: 1 if output.chart or not chart else 2]:
        room = terminal - _OTHER_LINES - len(below) - len(plot)
        lines = [*render_sweep(results, quiet=quiet, top=output.top, screen=room).split("\n"), *below, *plot]
        if len(lines) <= terminal - _OTHER_LINES:
            break
    return lines


def _exit_status(
    rows: Sweep, shown: DisplayOutput, mean: float | None, repeated: Sequence[str], min_return: float | None
) -> int:
    """Print the errors and return the exit status; `mean` is the mean over runs."""
    for failure in shown.failures:
        console.print_error(failure, as_json=False)
    if rows.failed:
        print_failures(rows.failed, () if rows.scored else repeated)
    if rows.failed or shown.failures:
        return 2
    if rows.interrupted or shown.interrupted:
        return 130
    means = [evaluation.statistics.mean for evaluation in rows.evaluations] if mean is None else [mean]
    # A NaN is not at least the required return.
    low = min_return is not None and not all(mean >= min_return for mean in means)
    return 1 if low or any(sidecar.has_open_entries(result.ledger) for result in rows.evaluations) else 0


def print_failures(failed: Sequence[EvaluationFailure], repeated: Sequence[str] = ()) -> None:
    """Print why checkpoints were not played, each distinct reason once.

    A hint that repeats the command names one checkpoint; if all failed for one reason, it has the
    words to be `repeated`.
    """
    alike: dict[tuple[str, str | None], list[EvaluationFailure]] = {}
    for failure in failed:
        sentence = str(failure.error).removeprefix(f"{failure.error.file}: ")
        hint = failure.error.hint and failure.error.hint.replace(
            f" {shlex.quote(failure.checkpoint)} ", " \0 "
        )
        alike.setdefault((sentence, hint), []).append(failure)
    for (sentence, hint), those in alike.items():
        more = f" (and {len(those) - 1} more)" if len(those) > 1 else ""
        named = repeated if repeated and len(those) == len(failed) else [those[0].checkpoint]
        hint = hint and hint.replace("\0", shlex.join(named))
        console.print_error(
            CkpttoolError(sentence, file=f"{those[0].checkpoint}{more}", hint=hint), as_json=False
        )


def _choose_executor(jobs: int | None, ray: str | None) -> Any:
    """Return the function that plays the episodes."""
    from ckpttool.evaluation import scheduling

    if ray is not None:
        return scheduling.ray_spread(ray, jobs)
    return scheduling.play_in_process if jobs is None else scheduling.process_spread(jobs)


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Checkpoints to play: training runs of one algorithm, and runs to compare with."""

    paths: tuple[str, ...]
    runs: tuple[TrainingRun, ...] = ()
    against: tuple[TrainingRun, ...] = ()
    last: int = 1


@dataclass(slots=True)
class ComparisonOutput:
    """Keys for the JSON document, lines to print, and the mean compared with `--min-return`.

    `algorithms` are the ones to plot: ours and the one it is compared with.
    """

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    mean: float | None = None
    algorithms: tuple[Algorithm, ...] = ()
    comparison: AlgorithmComparison | None = None
    failures: list[CkpttoolError] = field(default_factory=list)


def find_compared_runs(paths: Sequence[str], options: RunOptions, layout: str | None) -> ComparedRuns:
    """Return the checkpoints to play; raise before hours of playing, not after."""
    from ckpttool.listing import training_runs

    against = options.against or ()
    if not (options.runs or options.last is not None or against or options.curve):
        return ComparedRuns(tuple(paths))
    count = options.last or 1
    first_runs, second_runs = (
        training_runs.find_runs(side, count, layout, curve=options.curve) for side in (paths, against)
    )
    played = tuple(path for run in (*first_runs, *second_runs) for path in run.played)
    return ComparedRuns(played, first_runs, second_runs, count)


def report_comparison(compared: ComparedRuns, output: OutputOptions, sweep: Sweep) -> ComparisonOutput:
    """Return the summary of the finished evaluations, and write the requested files."""
    from ckpttool.evaluation import score_tables

    printed = ComparisonOutput()
    try:
        _add_algorithms(compared, sweep, printed)
    except UsageError as error:
        # The episodes were played: their results are printed and written all the same.
        printed.failures.append(error)
    if output.csv is not None and sweep.scored:
        rows = _select_rows(sweep, output.top) if output.top else sweep.scored
        score_tables.save_table(output.csv, rows, force=output.force)
        printed.lines.append(f"wrote {clean(output.csv)}")
    if output.tensorboard is not None and sweep.scored:
        path = score_tables.save_scalars(output.tensorboard, sweep.scored, time.time())
        printed.document["tensorboard"] = path
        printed.lines.append(f"wrote {clean(path)}")
    return printed


def _add_algorithms(runs: ComparedRuns, results: Sweep, printed: ComparisonOutput) -> None:
    from ckpttool.evaluation import algorithms

    first = algorithms.summarize_runs(runs.runs, results.scored, runs.last)
    if first is None:
        return
    second = None
    try:
        second = algorithms.summarize_runs(runs.against, results.scored, runs.last)
    except UsageError as error:
        printed.failures.append(error)
    if second is not None and (len(first.runs) > 1) != (len(second.runs) > 1):
        first, second = (
            algorithms.summarize_runs(side, results.scored, runs.last, over_runs=True) or against_
            for side, against_ in ((runs.runs, first), (runs.against, second))
        )
    printed.mean, printed.algorithms = first.mean.value, (first,)
    if first.scale is not None:
        printed.mean = min(run.score for run in first.runs)
    printed.document |= {"runs": first.document(), "profiles": _profiles_document((first,))}
    printed.lines += _algorithm_lines("runs", first)
    if second is None:
        if runs.against and not printed.failures:
            printed.lines.append("note: no comparison, because no run of --against was evaluated completely")
        return
    known = {*first.notes, *second.notes}
    both = tuple(
        note for note in algorithms.surroundings_notes((*first.runs, *second.runs)) if note not in known
    )
    second = replace(second, notes=(*second.notes, *both))
    compared = algorithms.compare_algorithms(first, second)
    printed.algorithms, printed.comparison = (first, second), compared
    printed.document |= {"against": second.document(), "comparison": compared.document()}
    printed.document["profiles"] = _profiles_document(printed.algorithms)
    printed.lines += [
        *_algorithm_lines("against", second),
        *_comparison_lines(compared, 2 if first.scale is None else 3),
    ]


def _profiles_document(results: Sequence[Algorithm]) -> dict[str, Any]:
    """Return the JSON object of the performance profiles, which share their thresholds."""
    from ckpttool.evaluation import algorithms

    profiles = algorithms.performance_profiles(results)
    named = zip(("runs", "against"), profiles, strict=False)
    return {
        "thresholds": profiles[0].thresholds.tolist(),
        **{name: profile.document() for name, profile in named},
    }


def _algorithm_lines(title: str, one: Algorithm) -> list[str]:
    count, digits = len(one.runs), 2 if one.scale is None else 3
    what = f"{count} training runs" if count > 1 else clean(one.runs[0].path)
    what += f", last {one.last} checkpoints of each" if one.last > 1 else ""
    how = "" if one.mean.ci95 is None else f" (bootstrap over {one.over})"
    lines = [
        f"{title:<8} {what}",
        f"         mean {_format_estimate(one.mean, digits)}{how}",
        f"         IQM {_format_estimate(one.iqm, digits)}",
        *_normalized_lines(one),
    ]
    if count > 1:
        lines += [f"         {run.score:>10.2f}  {clean(run.path)}" for run in one.runs]
    return lines + labeled_lines("note", merge_default_sentences(one.notes))


def _normalized_lines(one: Algorithm) -> list[str]:
    """Return lines with the aggregates that need normalised scores, and their scale."""
    if one.normalized is None:
        return []
    aggregates, label = one.normalized.aggregates, one.normalized.scale.label
    gap = _format_estimate(aggregates["optimality_gap"], 3)
    lines = [f"         optimality gap {gap}", f"         {label}"]
    if one.scale is not None:
        lines.insert(0, f"         median {_format_estimate(aggregates['median'], 3)} (of environments)")
    return lines


def _comparison_lines(comparison: AlgorithmComparison, digits: int) -> list[str]:
    from ckpttool.evaluation import algorithms

    alone = comparison.over == algorithms.EPISODES
    unit = "an episode" if alone else "a run"
    how = "no CI: single runs" if comparison.difference.ci95 is None else f"bootstrap over {comparison.over}"
    return [
        f"difference of means {_format_estimate(comparison.difference, digits)} ({how})",
        f"probability of improvement {_format_estimate(comparison.probability)} (of {unit})",
        *(["note: single run per algorithm: results may not generalise across seeds"] if alone else []),
    ]


def _format_estimate(one: Estimate, digits: int = 2) -> str:
    if one.ci95 is None:
        return f"{one.value:.{digits}f}"
    return f"{one.value:.{digits}f}, 95 % CI {one.ci95[0]:.{digits}f} to {one.ci95[1]:.{digits}f}"


_STEPS = {
    "name": "curve steps: numbers in the file names",
    "total_it": "curve steps: updates counted by the checkpoints (total_it)",
    "num_timesteps": "curve steps: environment steps (num_timesteps)",
    "global_step": "curve steps: environment steps (global_step)",
    "iter": "curve steps: training iterations (iter)",
}


def render_sweep(sweep: Sweep, *, quiet: bool, top: int | None = None, screen: int | None = None) -> str:
    """Return a report for one checkpoint, or a table of several, best first.

    The table has `top` rows; without it as many as fit into `screen` lines, or all.
    """
    every = sweep.evaluations
    if len(every) == 1:
        sentences = [*_note_lines(every[0]), *labeled_lines("note", sweep.notes)]
        trained = _training_lines(step_columns(sweep.scored[0].counts))
        return "\n".join(
            [*_evaluation_lines(every[0]), *trained, *([] if quiet else map(wrap_sentence, sentences))]
        )
    below: list[str] = []
    if sweep.best is not None:
        below += map(wrap_sentence, _verdict_lines(sweep, sweep.best))
        best = next(evaluation for evaluation in every if evaluation.checkpoint == sweep.best.checkpoint)
        below += _judgement_lines(best)
    below += [] if quiet else _remark_lines(sweep)
    most, listed = top, "--json"
    if top is None and screen is not None:
        room = screen - 1 - sum(line.count("\n") + 1 for line in below)  # below the names of the columns
        if room < len(every):
            most, listed = max(_FEWEST_ROWS, room - 1), f"--top {len(every)}"
    rows = _select_rows(sweep, most)
    lines = _table_lines(sweep, rows) if every else []
    if hidden := len(every) - len(rows):
        chosen = f" (--top {top})" if top is not None else ""
        lines.append(f"{hidden:,} of {len(every):,} checkpoints not listed{chosen}; {listed} lists all")
    elif top is not None and not sweep.ranking:
        lines.append("not ranked, because the environments differ: --top lists all checkpoints")
    return "\n".join([*lines, *below])


def _select_rows(results: Sweep, top: int | None) -> tuple[ScoredCheckpoint, ...]:
    """Return the first rows of the table; all if nothing is ranked, e.g. of different environments."""
    return results.best_first[: top if results.ranking else None]


def _training_lines(counts: Mapping[str, int | None]) -> list[str]:
    """Return a line with the checkpoint's training counters by name; empty without counters."""
    shown = [f"{TITLES[name]} {n:,}" for name, n in counts.items() if n is not None]
    return [f"trained  {', '.join(shown)}"] if shown else []


def _table_lines(results: Sweep, scored: Sequence[ScoredCheckpoint]) -> list[str]:
    places = {row.checkpoint: row for row in results.ranking}
    counts = [step_columns(checkpoint.counts) for checkpoint in scored]
    shown = [name for name in TITLES if any(columns[name] is not None for columns in counts)]
    if len(shown) > 1:
        # The rows contain the names.
        shown = [name for name in shown if name != "in_name"]
    rows = [("rank", *(TITLES[n] for n in shown), "mean", "95 % CI", "IQM", "behind")]
    rows += [
        _table_row(checkpoint, places.get(checkpoint.evaluation.checkpoint), [own[name] for name in shown])
        for checkpoint, own in zip(scored, counts, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    every = [checkpoint.evaluation for checkpoint in scored]
    paths = [
        "checkpoint",
        *(f"{clean(urls.display_url(e.checkpoint))}{_interruption_note(e)}" for e in every),
    ]
    starts = [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"{start}  {fit_path(path, len(start) + 2)}" for start, path in zip(starts, paths, strict=True)]


def _table_row(
    scored: ScoredCheckpoint, row: RankingRow | None, counts: Sequence[int | None]
) -> tuple[str, ...]:
    result = scored.evaluation.statistics
    return (
        "-" if row is None else str(row.rank),
        *("-" if number is None else str(number) for number in counts),
        f"{result.mean:.1f}",
        "-" if result.ci95 is None else f"{result.ci95[0]:.1f} to {result.ci95[1]:.1f}",
        f"{result.iqm:.1f}",
        "-" if row is None or row.behind is None else f"{0.0 - row.behind.value:.1f}",
    )


def _verdict_lines(results: Sweep, best: BestCheckpoint) -> list[str]:
    from ckpttool.evaluation.ranking import MOST_EPISODES, decisive_episodes, fewest_episodes

    name, others = clean(urls.display_url(best.checkpoint)), len(results.ranking) - 1
    paired = "paired by seed, 95 % over all comparisons"
    if best.certain:
        return [f"best     {name}: significantly better than all others ({paired})"]
    episodes, fewest = min(result.statistics.n for result in results.evaluations), fewest_episodes(others)
    decisive, needed = decisive_episodes(results.ranking), ""
    if episodes > 1 and decisive is None:
        needed = f"; {MOST_EPISODES:,} episodes would distinguish none (power 80 %)"
    elif episodes > 1 and decisive is not None:
        near = sum((row.episodes_needed or math.inf) <= decisive for row in results.ranking if row.tied)
        needed = f"; {decisive:,} episodes would distinguish {format_count(near, 'other')} (power 80 %)"
    if episodes < fewest:
        few = format_count(episodes, "episode is", "episodes are")
        return [
            f"best     {name} by mean; {few} too few for a significant result among "
            f"{others + 1} checkpoints (at least {fewest} needed){needed}"
        ]
    tied = sum(row.tied for row in results.ranking) - 1
    return [
        f"best     {name} (not significantly better than {tied} of {format_count(others, 'other')}; {paired})"
        f"{needed}"
    ]


def _remark_lines(rows: Sweep) -> list[str]:
    """Return assumptions and notes, listing those common to all evaluations once."""
    every = rows.evaluations
    lines = [(evaluation, line) for evaluation in every for line in _note_lines(evaluation)]
    common = [line for line, n in Counter(line for _, line in lines).items() if n == len(every)]
    own = [f"{clean(urls.display_url(e.checkpoint))}: {line}" for e, line in lines if line not in common]
    source = () if rows.step_from is None else (_STEPS.get(rows.step_from, f"curve steps: {rows.step_from}"),)
    resumed = (f"results reused from an earlier run: {rows.resumed}",) if rows.resumed else ()
    return [
        wrap_sentence(line)
        for line in [*common, *own, *labeled_lines("note", (*source, *resumed, *rows.notes))]
    ]


def _evaluation_lines(one: Evaluation) -> list[str]:
    played, result = one.rollout, one.statistics
    lines = [f"{clean(urls.display_url(one.checkpoint))} in {clean(one.env)}"]
    unused = sum(entry.open for entry in one.ledger)
    if unused:
        facts = format_count(unused, "fact that affects the actions is", "facts that affect the actions are")
        lines.append(f"NOT the return of the trained agent: {facts} not used or unknown (see below)")
    lines += _assumption_lines(one)
    if result.std is None or result.ci95 is None:
        lines.append(f"return   {result.mean:.2f} (one episode)")
    else:
        low, high = result.ci95
        lines += [
            f"return   {result.mean:.2f} +- {result.std:.2f} (mean, std of {result.n} episodes)",
            f"         95 % CI of the mean: {low:.2f} to {high:.2f} (bootstrap over episodes)",
            f"         median {result.median:.2f}, IQM {result.iqm:.2f}, "
            f"{result.min:.2f} to {result.max:.2f}",
        ]
    lines += [
        *_normalized_score_lines(one),
        *_judgement_lines(one),
        f"length   {played.lengths.mean():.1f} steps; {int(played.terminated.sum())} terminated, "
        f"{int(played.truncated.sum())} truncated",
        f"speed    {played.steps_per_s:,.0f} steps/s ({format_count(played.steps, 'step')}, "
        f"{one.protocol.backend} on {one.device}, {played.num_envs} in parallel)",
        f"seeds    {_format_seeds(one)}, {_describe_policy(one)}",
    ]
    return [*lines, cut.strip()] if (cut := _interruption_note(one)) else lines


def _format_seeds(one: Evaluation) -> str:
    played = one.rollout.seeds
    if not len(played):
        return f"{one.protocol.seed} for the simulator; episodes have no seeds"
    return f"{played[0]} to {played[-1]}" if len(played) > 1 else f"{played[0]}"


def _describe_policy(one: Evaluation) -> str:
    how = one.protocol
    if how.stochastic:
        return f"{how.network} with actions drawn from its distribution: not deterministic"
    if how.epsilon is not None:
        return f"{how.network} with uniform actions at probability {how.epsilon:g}: not deterministic"
    if how.noise is None:
        return f"deterministic {how.network}"
    return (
        f"{how.network} with action noise (std {how.noise:g} in units of half the action range): "
        "not deterministic"
    )


def _normalized_score_lines(one: Evaluation) -> list[str]:
    from ckpttool.evaluation.statistics import find_reference_scores

    known = find_reference_scores(one.env)
    if known is None:
        return []
    value = known.normalized(one.statistics.mean)
    return [
        f"score    {value:.1f} normalised (D4RL: random {known.random:.1f} is 0, expert {known.expert:.1f} "
        f"is 100, in {known.env})"
    ]


def _judgement_lines(one: Evaluation) -> list[str]:
    """Return lines with the references of the environment, and the verdict; empty without references."""
    judged = one.judgement
    if judged is None:
        return []
    lines = []
    if (chance := judged.random) is not None:
        low, high = chance.ci95
        simulator = ", ".join(
            f"{name} {clean(chance.versions[name])}"
            for name in ("gymnasium", "mujoco")
            if name in chance.versions
        )
        lines.append(
            f"random   {chance.mean:.2f} (95 % CI {low:.2f} to {high:.2f}; {chance.episodes} episodes, "
            f"{simulator})"
        )
    if (goal := judged.goal) is not None:
        what = "reward threshold" if goal.kind == "threshold" else "best published mean"
        lines.append(wrap_sentence(f"goal     {goal.value:.2f} ({what}: {clean(goal.source)})"))
    return [*lines, f"verdict  {clean(judged.sentence)}"]


def _interruption_note(one: Evaluation) -> str:
    played = one.rollout
    if not played.interrupted:
        return ""
    episodes = format_count(played.episodes, "episode was", "episodes were")
    return f" {len(played.returns):,} of {episodes} finished (interrupted)"


def _note_lines(one: Evaluation) -> list[str]:
    return [
        *map(clean, sidecar.describe_entries(one.ledger)),
        *labeled_lines("assumed", one.assumed),
        *_hint_lines(one),
        *labeled_lines("note", (*_undefined_returns(one), *one.notes)),
    ]


def _undefined_returns(one: Evaluation) -> Iterator[str]:
    """Yield a sentence about returns that are not finite, which make the mean undefined."""
    played = one.rollout
    broken = [at for at, value in enumerate(played.returns.tolist()) if not math.isfinite(value)]
    if broken:
        first = f" (first: seed {played.seeds[broken[0]]})" if len(played.seeds) else ""
        yield (
            f"{len(broken)} of {format_count(len(played.returns), 'return')} are NaN or infinite{first}; "
            "no mean, interval or verdict can be computed"
        )


def _assumption_lines(one: Evaluation) -> list[str]:
    """Return a line with assumptions that affect the actions, and the options that override them."""
    assumed = [entry for entry in one.ledger if entry.use == "assumed"]
    decisive = {
        entry.value: entry.hint
        for entry in assumed
        if entry.hint
        or entry.what == "custom code"
        or any(words in entry.value for words in (sidecar.NORMS_BEFORE, sidecar.NO_RESIDUALS))
    }
    if not decisive:
        return []
    options = ", ".join(dict.fromkeys(hint for hint in decisive.values() if hint))
    stated = f"; override with {options}" if options else ""
    return [clean(f"ASSUMES {', '.join(decisive)} (not stored in any file){stated}")]


def _hint_lines(one: Evaluation) -> list[str]:
    """Return lines with the options that would apply the unused facts."""
    from ckpttool.core.installation import name_program

    hints = dict.fromkeys(e.hint for e in one.ledger if e.open and e.hint)
    return [f"hint: {name_program(clean(hint))}" for hint in hints]


@dataclass(slots=True)
class DisplayOutput:
    """Output written: keys for the JSON document, lines to print, and why something is missing."""

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failures: list[CkpttoolError] = field(default_factory=list)
    interrupted: bool = False


def require_display(output: OutputOptions, paths: Sequence[str], options: EvaluationOptions) -> None:
    """Raise if a requested output cannot be produced, before hours of playing rather than after."""
    from ckpttool.cli import figures

    figures.require_theme(output.theme)
    if output.plot is not None:
        figures.require_plot(output.plot, force=output.force)
    if output.chart:
        figures.require_chart()
    if output.video is not None or output.strip is not None:
        from ckpttool.evaluation import episode_videos
        from ckpttool.listing.paths import expand_paths

        paths = [entry.path for entry in expand_paths(paths)]
        if output.video is not None:
            episode_videos.require_video_support(
                paths, options, output.video, output.filmed, force=output.force
            )
        if output.strip is not None:
            episode_videos.require_strip_support(
                paths, options, output.strip, output.strip_episodes, force=output.force
            )


def display_results(
    output: OutputOptions,
    sweep: Sweep,
    options: EvaluationOptions,
    drawn: figures.PlotData,
    *,
    quiet: bool,
) -> DisplayOutput:
    """Write the requested files.

    Errors are returned instead of raised, because the results already exist.

    Args:
        output: the files and plots that are requested.
        sweep: the evaluations.
        options: those of the evaluations, with which episodes are repeated for videos.
        drawn: what the plots show.
        quiet: without progress.
    """
    from ckpttool.cli import figures

    shown = DisplayOutput()
    if not sweep.scored:
        return shown
    try:
        if output.plot is not None:
            figures.write_plot(output.plot, drawn, output.theme, force=output.force)
            shown.document["plot"] = output.plot
            shown.lines.append(f"wrote {clean(output.plot)}")
        if sweep.interrupted and (output.video is not None or output.strip is not None):
            shown.lines.append("note: no video, because the evaluation was interrupted")
        else:
            _record_best(shown, output, sweep, options, quiet=quiet)
    except CkpttoolError as error:
        shown.failures.append(error)
    except KeyboardInterrupt:
        shown.interrupted = True
    return shown


def _record_best(
    shown: DisplayOutput, output: OutputOptions, results: Sweep, options: EvaluationOptions, *, quiet: bool
) -> None:
    """Record the checkpoint with the highest mean as a video and as a film strip."""
    from ckpttool.evaluation import episode_videos

    best = results.highest
    alone = len(results.scored) == 1
    if output.strip is not None:
        with show_progress("strip", quiet=quiet, unit="episodes") as moving:
            strip = episode_videos.record_strip(
                best,
                output.strip,
                output.strip_episodes,
                options=options,
                frames=output.strip_frames,
                theme=output.theme or "light",
                force=output.force,
                progress=moving,
            )
        shown.document["strip"] = strip.document()
        shown.lines += [*_take_lines(strip, alone=alone, quiet=quiet), f"wrote {clean(strip.file)}"]
    if output.video is not None:
        with show_progress("video", quiet=quiet, unit="pictures") as moving:
            filmed = episode_videos.record_video(
                best,
                output.video,
                output.filmed,
                options=options,
                width=output.video_width,
                force=output.force,
                progress=moving,
            )
        shown.document["video"] = filmed.document()
        shown.lines += [
            *_take_lines(filmed, alone=alone, quiet=quiet),
            f"wrote {clean(filmed.file)} ({filmed.frames} frames, {filmed.fps:g} per second)",
        ]


def _take_lines(filmed: EpisodeVideo | EpisodeStrip, *, alone: bool, quiet: bool) -> list[str]:
    of = "" if alone else f" of {clean(urls.display_url(filmed.checkpoint))}"
    lines = []
    for take in filmed.takes:
        words = f" ({', '.join(take.wanted)})" if take.wanted else ""
        lines.append(
            f"recorded episode {take.episode}{words}{of}: return {take.paid:.2f}, {take.steps} steps"
        )
        if not (take.equal or quiet):
            lines.append(
                f"note: its return in the evaluation was {take.scored:.2f} (batched environments or "
                "another engine)"
            )
    return lines
