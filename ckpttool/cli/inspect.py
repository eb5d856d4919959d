"""Commands that only read checkpoints, and commands about ckpttool itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from ckpttool.cli import console, parameters
from ckpttool.cli.columns import fit_path
from ckpttool.cli.panels import complete_field
from ckpttool.cli.parameters import (
    AgentOptions,
    AsJson,
    Env,
    Glob,
    LayoutOption,
    ModelOptions,
    PathArgument,
    PathOrStdin,
    Quiet,
    argument,
    make_importable,
    use_checkpoint,
)
from ckpttool.cli.progress import show_progress
from ckpttool.cli.styles import format_fix, wrap_sentence
from ckpttool.commands.inspect import summary
from ckpttool.core import filesystem, urls
from ckpttool.core import limits as parser_limits
from ckpttool.core.code_references import allowing
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, UsageError, suggest_choice
from ckpttool.core.source import keep_open
from ckpttool.core.text import clean, format_count, format_size
from ckpttool.core.urls import format_command
from ckpttool.listing.audit import SAFE, read_allowed_names
from ckpttool.listing.contents import CheckpointSummary, may_describe_layers
from ckpttool.listing.modules import Sort
from ckpttool.listing.rows import CheckpointRow
from ckpttool.listing.training_counters import TITLES, step_columns

if TYPE_CHECKING:
    from ckpttool.cli.tree_tables import TreeView
    from ckpttool.commands.check import CheckpointVerdict, CheckResult
    from ckpttool.commands.inspect import CheckpointFolder
    from ckpttool.listing.layers import Architecture


@dataclass(frozen=True)
class TreeOptions:
    """Which entries to list, in which order, and with which details.

    Tree:
        depth (N): Fold modules at level N into one line each.
        sort (ORDER, file|size|name): Order within each module: file, size or name.
        keys (--keys): Show the native keys.
        aliases (--aliases): Show all aliases of each tensor.
        whole (--all): Show all levels, alike siblings and values.
    """

    glob: Glob = None
    depth: int | None = None
    sort: str = "file"
    keys: bool = False
    aliases: bool = False
    whole: bool = False


@dataclass(frozen=True)
class AllowOptions:
    """Names that pickles may use besides the built-in list.

    Pickle audit:
        allow (MODULE[.NAME]): Name that pickles may use; repeatable.
        allow_file (FILE): TOML file that lists such names under allow.
    """

    allow: list[str] | None = None
    allow_file: str | None = None

    def allowed(self) -> frozenset[str]:
        """Return the names; raise UsageError or FormatError for what is not a list of names."""
        return read_allowed_names(self.allow or (), self.allow_file)


@dataclass(frozen=True)
class AuditOptions(AllowOptions):
    """Which pickles fail.

    Pickle audit:
        strict (--strict): Exit 1 if loading needs more than plain data.
    """

    strict: bool = False


@dataclass(frozen=True)
class FindingOptions:
    """What `check` finds besides code and damage, and where it writes that.

    Findings:
        numbers (--no-numbers): Skip values: faster, but finds no NaN.
        shapes (FILE): Exit 1 if shapes differ from inspect --json in FILE.
        layout (NAME): Exit 1 if a checkpoint has another layout.
        sarif (FILE): Also write the findings to FILE as SARIF.
        force (--force): Replace the SARIF file if it exists.
    """

    numbers: bool = True
    shapes: str | None = None
    layout: str | None = None
    sarif: str | None = None
    force: bool = False


@dataclass(frozen=True)
class WorkerOptions:
    """The processes that read checkpoints, where other ones than this do.

    Processes:
        jobs (N, --jobs -j): Read in N processes.
        ray (ADDRESS): Read on a Ray cluster; local starts --jobs workers.
    """

    jobs: int | None = None
    ray: str | None = None


@dataclass(frozen=True)
class PickleOptions(AuditOptions):
    """What loading the file would import and call.

    Pickle audit:
        names (--names): Show what loading would import and call.
    """

    names: bool = False


@dataclass(frozen=True)
class GraphOptions:
    """Draw the modules instead of printing the tree.

    Graph:
        graph (FILE): Draw the modules into a new .svg, .html or .dot file.
        dataflow (--dataflow): Draw an agent's networks, or the layers of a model.
        input_shape ([LAYER=]3,32,32): Input shape without batch, for layers' shapes; repeatable.
        force (--force): Replace the drawing if it exists.
    """

    graph: str | None = None
    dataflow: bool = False
    input_shape: list[str] | None = None
    force: bool = False


def inspect(
    path: PathOrStdin,
    tree: TreeOptions,
    pickle: PickleOptions,
    drawing: GraphOptions,
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show the contents of a checkpoint: module tree, shapes, types, roles, totals and layout.

    For a folder, list its checkpoints and show the latest one. Siblings that differ only in their numbers
    share a line. A terminal shows the levels that fit its height; longer output goes through $PAGER
    (less by default, cat for none).
    """
    view = parse_view(tree, names=pickle.names, quiet=quiet)
    path = parameters.spool_stdin(path)
    if drawing.graph is not None or pickle.strict:
        path = use_checkpoint(path, quiet=quiet or as_json)
    with allowing(pickle.allowed()):
        listing = load_listing(path, tree.glob, layout)
    status = 1 if pickle.strict and not is_plain_data(listing) else 0
    listing, models = with_architecture(listing, drawing.input_shape or ())
    drawn = None
    if drawing.dataflow:
        drawn = draw_dataflow(listing, drawing, layout, models)
    elif drawing.graph is not None:
        drawn = draw_modules(listing, drawing.graph, tree.depth, force=drawing.force)
    if as_json:
        name = "dataflow" if drawing.dataflow else "graph"
        described = {"architecture": [model.document() for model in models]}
        document = {**listing.listed(), **described, **({name: drawn} if drawn else {})}
        console.print_document(document)
    else:
        steps = []
        if console.suggests_commands(quiet=quiet or drawn is not None):
            from ckpttool.cli import next_steps

            steps = next_steps.format_next_steps(next_steps.after_inspect(listing))
        view = _leave_room(replace(view, models=models), steps)
        console.page_text(render_listing(listing, view, drawn))
        for step in steps:
            console.print_text(step)
    return status


def overview(path: PathArgument, as_json: AsJson = False, quiet: Quiet = False) -> int:
    """Show a checkpoint as inspect does, what doctor finds in it, and the next commands.

    Exits with 1 on a finding.
    """
    from ckpttool.commands import doctor

    listing = load_listing(path, None, None)
    if as_json:
        console.print_document(listing.listed())
        return 0
    view = parse_view(TreeOptions(), names=False, quiet=quiet)
    if not isinstance(listing, CheckpointSummary):
        console.page_text(render_listing(listing, view, None))
        return 0
    with show_progress("doctor", quiet=quiet) as moving:
        diagnosis = doctor.diagnose(listing.checkpoint.path, progress=moving)
    from ckpttool.cli.value_tables import render_diagnosis

    verdict = render_diagnosis(diagnosis, quiet=quiet, alone=False)
    listing, models = with_architecture(listing, ())
    steps = []
    if console.suggests_commands(quiet=quiet):
        from ckpttool.cli import next_steps

        steps = next_steps.format_next_steps(next_steps.after_overview(listing, diagnosis))
    view = _leave_room(replace(view, models=models), steps, verdict.count("\n") + 2)
    console.page_text("\n\n".join(filter(None, (render_listing(listing, view, None), verdict))))
    for step in steps:
        console.print_text(step)
    return 1 if diagnosis.findings else 0


_SHOWN = 20
# Lines of a terminal that the listing leaves to suggested commands.
_STEP_LINES = 2


def _leave_room(view: TreeView, steps: Sequence[str], lines: int = 0) -> TreeView:
    """Return the view with room for `lines` below the tree, and for commands that take several lines."""
    if view.screen is None:
        return view
    further = max(0, sum(step.count("\n") + 1 for step in steps) - _STEP_LINES)
    return replace(view, screen=view.screen - lines - further)


def parse_view(tree: TreeOptions, *, names: bool, quiet: bool) -> TreeView:
    """Return the tree view given by the options; raise UsageError for an unknown sort key."""
    _require_order(tree.sort, get_args(Sort))
    # Below the tree come suggested commands and the prompt.
    used = 1 if quiet else _STEP_LINES + 1
    screen = None if (height := console.terminal_height()) is None else height - used
    from ckpttool.cli.tree_tables import TreeView

    return TreeView(
        tree.keys,
        tree.aliases,
        tree.depth,
        cast(Sort, tree.sort),
        quiet,
        names,
        whole=tree.whole,
        screen=screen,
    )


def _require_order(order: str, orders: Sequence[str]) -> None:
    if order not in orders:
        raise UsageError(f"unknown sort key {order!r}", hint=suggest_choice(order, orders))


def load_listing(path: str, glob: str | None, layout: str | None) -> CheckpointSummary | CheckpointFolder:
    """Return the checkpoint at the path, or the contents of a folder."""
    with filesystem.read_session():
        if not filesystem.isdir(filesystem.resolve_path(path)):
            return summary(path, glob, layout)
        from ckpttool.commands import inspect

        return inspect.inspect_path(path, glob, layout)


def draw_modules(
    listing: CheckpointSummary | CheckpointFolder, target: str, depth: int | None, *, force: bool
) -> dict[str, Any]:
    """Draw the modules into a new file; return the JSON object that describes the drawing."""
    from ckpttool.cli import drawings

    if not isinstance(listing, CheckpointSummary):
        raise UsageError("no single checkpoint to draw", file=listing.path, hint=listing.hint)
    return drawings.write_drawing(listing, target, depth, force=force)


def with_architecture(
    listing: CheckpointSummary | CheckpointFolder, shapes: Sequence[str]
) -> tuple[CheckpointSummary | CheckpointFolder, tuple[Architecture, ...]]:
    """Return the listing, with a note on a graph that cannot be read, and the models that it describes."""
    if not isinstance(listing, CheckpointSummary):
        if shapes:
            raise UsageError("no single checkpoint to describe", file=listing.path, hint=listing.hint)
        return listing, ()
    if not shapes and not may_describe_layers(listing.checkpoint):
        return listing, ()
    # Not a top-level import: files of weights alone do not need it.
    from ckpttool.listing.architecture import describe_architecture, describe_unread_graph

    models = describe_architecture(listing.checkpoint, shapes)
    unread = () if models else describe_unread_graph(listing.checkpoint)
    return replace(listing, notes=(*listing.notes, *unread)), models


def draw_dataflow(
    listing: CheckpointSummary | CheckpointFolder,
    drawing: GraphOptions,
    layout: str | None,
    models: Sequence[Architecture],
) -> dict[str, Any]:
    """Draw an agent's networks or a model's layers into a new file; return its JSON object."""
    from ckpttool.cli import drawings

    if drawing.graph is None:
        raise UsageError("--dataflow needs --graph FILE.svg", hint="add --graph dataflow.svg")
    if not isinstance(listing, CheckpointSummary):
        raise UsageError("no single checkpoint to draw", file=listing.path, hint=listing.hint)
    return drawings.write_dataflow(listing, drawing.graph, layout, models, force=drawing.force)


def is_plain_data(listing: CheckpointSummary | CheckpointFolder) -> bool:
    """Return whether loading needs only plain data; raise UsageError without a single checkpoint."""
    if not isinstance(listing, CheckpointSummary):
        raise UsageError("no single checkpoint to audit", file=listing.path, hint=listing.hint)
    return listing.verdict.label == SAFE


@keep_open()
def render_listing(
    listing: CheckpointSummary | CheckpointFolder, view: TreeView, drawn: dict[str, Any] | None
) -> str:
    """Return the text to print."""
    from ckpttool.cli.tree_tables import render_tree

    if not isinstance(listing, CheckpointSummary):
        head = (
            f"{clean(urls.display_url(listing.path))}: {format_count(len(listing.checkpoints), 'checkpoint')}"
        )
        notes = [wrap_sentence(f"note: {clean(note)}") for note in (*listing.notes, listing.hint)]
        table = _checkpoint_table(listing.checkpoints, len(listing.checkpoints), listing.path)
        return "\n".join(table if view.quiet else [head, *table, *notes])
    if drawn is not None and "networks" in drawn:
        lines = [format_count(len(drawn["networks"]), "network")]
        return "\n".join([*([] if view.quiet else lines), f"wrote {clean(drawn['file'])}"])
    if drawn is not None:
        lines = [f"{format_count(drawn['modules'], 'module')}, {format_count(drawn['edges'], 'edge')}"]
        if computed := drawn.get("computation"):
            sizes = (format_count(computed["boxes"], "box", "boxes"), format_count(computed["edges"], "edge"))
            lines.append(f"computation: {', '.join(sizes)}")
        lines += [wrap_sentence(f"note: {clean(note)}") for note in drawn["notes"]]
        return "\n".join([*([] if view.quiet else lines), f"wrote {clean(drawn['file'])}"])
    if view.quiet or len(listing.checkpoints) < 2:
        return render_tree(listing, view)
    table = [*_checkpoint_table(listing.checkpoints, _SHOWN), ""]
    if view.screen is not None:
        view = replace(view, screen=view.screen - len(table))
    return "\n".join([*table, render_tree(listing, view)])


def _checkpoint_table(listed: Sequence[CheckpointRow], most: int, top: str | None = None) -> list[str]:
    """Return one line for each of the last `most` checkpoints, ending with the path.

    If a path is too long for the terminal, all are shown relative to the folder `top`, if given.
    """
    left_out = len(listed) - most
    lines = [f"and {left_out} earlier (--json lists all)"] if left_out > 0 else []
    shown = listed[max(0, left_out) :]
    # The number after the last dash of a name; `counts` also has numbers from other name patterns.
    counts = [{**step_columns(checkpoint.counts), "in_name": checkpoint.step} for checkpoint in shown]
    titles = {n: t for n, t in TITLES.items() if any(own[n] is not None for own in counts)}
    widths = {n: max(len(t), *(len(_format_count(own[n])) for own in counts)) for n, t in titles.items()}
    head = "".join(f"{title:>{widths[name]}}  " for name, title in titles.items())
    lines.append(f"{head}{'size':>7}  {'time (UTC)':<16}  checkpoint")
    rows = []
    for checkpoint, own in zip(shown, counts, strict=True):
        sentence = "  latest" * checkpoint.latest + "  incomplete" * (not checkpoint.complete)
        start = "".join(f"{_format_count(own[name]):>{widths[name]}}  " for name in titles)
        start += f"{format_size(checkpoint.nbytes):>7}  {checkpoint.when:%Y-%m-%d %H:%M}  "
        rows.append((start, checkpoint.path, sentence))
    paths = [clean(urls.display_url(path)) for _, path, _ in rows]
    rooms = [len(start) + len(sentence) for start, _, sentence in rows]
    if top is not None and not urls.is_url(top) and list(map(fit_path, paths, rooms)) != paths:
        paths = [clean(os.path.relpath(path, top)) for _, path, _ in rows]
    fitted = map(fit_path, paths, rooms)
    lines += [f"{start}{path}{sentence}" for (start, _, sentence), path in zip(rows, fitted, strict=True)]
    return lines


def _format_count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def digest(
    path: PathOrStdin,
    workers: WorkerOptions,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a digest saved by --json, or a sidecar."),
    ] = None,
    glob: Glob = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Print the sha256 of every tensor and of the whole; verify the format's checksums."""
    from ckpttool.commands import digest

    path = use_checkpoint(parameters.spool_stdin(path), quiet=quiet or as_json)
    with show_progress("digest", quiet=quiet or as_json) as moving:
        result = digest.digest(path, moving, jobs=workers.jobs, ray=workers.ray)
    compared = digest.compare_with_saved(result, check) if check is not None else None
    result = digest.filter_digest(result, glob)
    if as_json:
        against = {} if compared is None else {"check": compared._asdict()}
        console.print_document({**result.document(), **against})
    else:
        from ckpttool.cli.value_tables import render_digest

        console.print_text(render_digest(result, compared, quiet=quiet))
    return 0 if compared is None or compared.equal else 1


_ORDERS = ("file", "name", "size", "norm")


def stats(
    path: PathArgument,
    workers: WorkerOptions,
    glob: Glob = None,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Summarize modules down to level N.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="file, name, size or norm.",
            autocompletion=complete_field(None, *_ORDERS),
        ),
    ] = "file",
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Summarize the values of each tensor: range, mean, spread, zeros, NaNs, dead units, vanished moments.

    Exits with 1 if a value is NaN or infinite.
    """
    from ckpttool.commands import stats

    _require_order(sort, _ORDERS)
    path = use_checkpoint(path, quiet=quiet or as_json)
    with show_progress("stats", quiet=quiet or as_json) as moving:
        result = stats.stats(path, glob, layout, moving, jobs=workers.jobs, ray=workers.ray)
    if as_json:
        console.print_document(result.document())
    else:
        from ckpttool.cli.value_tables import render_stats

        console.print_text(render_stats(result, depth, sort, quiet=quiet))
        if console.suggests_commands(quiet=quiet):
            from ckpttool.cli import next_steps

            next_steps.print_next_steps(next_steps.after_stats(path, result))
    return 0 if result.finite else 1


@dataclass(frozen=True)
class DiffOptions:
    """What to compare, and which differences to show first.

    Comparison:
        by (HOW, auto|path|agent|conversion): Pair entries by path, agent, conversion or auto.
        sort (ORDER, abs|rel|cosine): Sort key, largest first: abs, rel or cosine.
        whole (--all): Show every change, not only the first 20.
    """

    glob: Glob = None
    by: str = "auto"
    sort: str = "abs"
    whole: bool = False
    layout: LayoutOption = None


def diff(
    left: Annotated[str, argument("A", "A checkpoint.")],
    right: Annotated[str, argument("B", "Checkpoint to compare with.")],
    options: DiffOptions,
    workers: WorkerOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Compare two checkpoints: entries on one side only, shapes, types, and values with their positions.

    Exits with 1 if they differ.
    """
    from ckpttool.commands import diff

    left, right = (use_checkpoint(side, quiet=quiet or as_json) for side in (left, right))
    with show_progress("diff", quiet=quiet or as_json) as moving:
        pairs = diff.align(left, right, glob=options.glob, by=options.by, layout=options.layout)
        alignment = diff.compare_alignment(pairs, options.sort, moving, workers.jobs, workers.ray)
    if as_json:
        console.print_document(alignment.document())
    else:
        height = console.terminal_height()
        # The last lines are the next command and the prompt.
        screen = None if height is None else height - (1 if quiet else 3)
        from ckpttool.cli.value_tables import render_diff

        console.print_text(render_diff(alignment, whole=options.whole, quiet=quiet, screen=screen))
        if console.suggests_commands(quiet=quiet):
            from ckpttool.cli import next_steps

            next_steps.print_next_steps(next_steps.after_diff(left, right, alignment))
    return 0 if alignment.identical else 1


@dataclass(frozen=True)
class DoctorModelOptions(ModelOptions):
    """Your own model, and the part of the checkpoint to load into it.

    Your own model:
        part (PATH): For --like: path or network to load, e.g. policy/actor.
    """

    part: str | None = None


def doctor(
    path: PathArgument,
    agent: AgentOptions,
    model: DoctorModelOptions,
    pickle: AllowOptions,
    env: Env = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Find problems in a checkpoint or in its use, and suggest fixes.

    Exits with 1 on a finding: names that would run code, NaNs, dead units, vanished moments, missing
    agent facts, an environment that does not fit, tensors of your model that the checkpoint does not fill.
    """
    from ckpttool.commands import doctor

    path = use_checkpoint(path, quiet=quiet or as_json)
    with show_progress("doctor", quiet=quiet or as_json) as moving, allowing(pickle.allowed()):
        diagnosis = doctor.diagnose(
            path,
            make_importable(env),
            agent.layout,
            moving,
            facts=agent.facts(),
            model=model.model(),
            part=model.part,
        )
    if as_json:
        console.print_document(diagnosis.document())
    else:
        from ckpttool.cli.value_tables import render_diagnosis

        console.print_text(render_diagnosis(diagnosis, quiet=quiet))
        if console.suggests_commands(quiet=quiet):
            from ckpttool.cli import next_steps

            next_steps.print_next_steps(next_steps.after_doctor(path, diagnosis))
    return 1 if diagnosis.findings else 0


def check(
    paths: Annotated[
        list[str], argument("PATH...", "Checkpoints, folders, or quoted patterns: 'runs/*.pt'.")
    ],
    pickles: AuditOptions,
    findings: FindingOptions,
    workers: WorkerOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Check checkpoints before they are committed or loaded: code in pickles, damage, NaNs, shapes.

    For hooks and continuous integration. Exits with 1 on a finding, with 2 if a file cannot be read or
    is a model of another program. In a folder, checks every file that is a checkpoint by its suffix or
    content.
    """
    from ckpttool.commands import check
    from ckpttool.listing import shape_record

    if findings.sarif is not None:
        from ckpttool.cli.sarif import require_sarif, write_sarif

        require_sarif(findings.sarif, force=findings.force)
    try:
        recorded = None if findings.shapes is None else shape_record.read_shape_record(findings.shapes)
        numbers, layout = findings.numbers, findings.layout
        check_options = check.CheckOptions(pickles.strict, numbers, layout, recorded, pickles.allowed())
        with show_progress("check", quiet=quiet or as_json, unit="checkpoints") as moving:
            result = check.check(paths, check_options, moving, jobs=workers.jobs, ray=workers.ray)
    except CkpttoolError as error:
        if findings.sarif is not None:
            write_sarif(None, 2, findings.sarif, error)
        raise
    status = result.status
    if findings.sarif is not None:
        write_sarif(result, status, findings.sarif)
    only = result.checkpoints[0] if len(result.checkpoints) == 1 and not result.unchecked else None
    if only is not None and only.error is not None and not only.findings:
        raise only.error
    if as_json:
        console.print_document(result.document())
    else:
        console.print_text("\n".join(_check_lines(result, quiet=quiet)))
    for checkpoint in result.failed:
        if checkpoint.error is not None and not as_json:
            console.print_error(checkpoint.error, as_json=False)
    return status


def _check_lines(result: CheckResult, *, quiet: bool) -> Iterator[str]:
    """Yield a line per finding in the style of linters, a line per clean file, and the total."""
    for checkpoint in result.checkpoints:
        yield from _checkpoint_lines(checkpoint, quiet=quiet)
    for path, error in result.unchecked:
        yield wrap_sentence(f"{clean(urls.display_url(path))}: not checked: {clean(error.message)}")
    if quiet:
        return
    bad = sum(1 for checkpoint in result.checkpoints if checkpoint.findings)
    sums = [f"{bad:,} with findings"] * bool(bad) + [f"{len(result.failed):,} unreadable"] * bool(
        result.failed
    )
    total = format_count(len(result.checkpoints), "checkpoint")
    yield "; ".join(
        (
            f"{total}: {', '.join(sums) or 'no problems found'}" if result.checkpoints else total,
            *([f"{format_count(len(result.unchecked), 'model')} not checked"] * bool(result.unchecked)),
            *([f"{format_count(len(result.skipped), 'other file')} skipped"] * bool(result.skipped)),
        )
    )


def _checkpoint_lines(verdict: CheckpointVerdict, *, quiet: bool) -> Iterator[str]:
    for finding in verdict.findings:
        yield wrap_sentence(f"{clean(verdict.path)}: {finding.topic}: {clean(finding.sentence)}")
        if finding.fix:
            yield format_fix(finding.fix, "    ")
    if not (quiet or verdict.findings or verdict.error):
        what = f"{verdict.format}, layout {verdict.layout or 'none recognised'}, {format_count(verdict.tensors, 'tensor')}"  # noqa: E501
        yield wrap_sentence(f"{clean(verdict.path)}: {what}: no problems found")


def textconv(
    file: Annotated[str, argument("FILE", "File to print, as passed by git.")],
    as_json: AsJson = False,
    quiet: Quiet = False,  # noqa: ARG001  # there is no progress to leave out
) -> int:
    """Print a file as text for git diff: one line per tensor and value, always in the same order.

    To set up, run git config diff.ckpttool.textconv 'ckpttool textconv' and add '*.pt diff=ckpttool' to
    .gitattributes. A file that is not a checkpoint prints one sentence and exits with 0, because git
    would stop otherwise.
    """
    from ckpttool.commands import textconv
    from ckpttool.listing import paths

    location = paths.choose_checkpoint(file).path
    if location != file and not filesystem.lexists(location):
        location = f"{location}.index"  # of a TensorFlow prefix
    lines = textconv.textconv(location)
    if as_json:
        console.print_document({"lines": lines})
    else:
        console.print_text("\n".join(map(clean, lines)))
    return 0


def browse(
    path: PathArgument,
    other: Annotated[str | None, argument("[PATH]", "Second checkpoint; marks the differences.")] = None,
    glob: Glob = None,
    by: Annotated[str, typer.Option(metavar="HOW", help="Pair entries by path, agent or auto.")] = "auto",
    layout: LayoutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Unsupported; use inspect, stats, diff.")] = False,
    quiet: Quiet = False,
) -> int:
    """Browse a checkpoint in the terminal: tree, values, histograms, search, differences.

    Tensors are read when they are shown. Press ? for the keys, q to quit.
    """
    if as_json:
        raise UsageError(
            "browse is interactive and does not support --json",
            hint=format_command("inspect", path, "--json"),
        )
    from ckpttool.browser import browse

    path = use_checkpoint(path, quiet=quiet)
    other = None if other is None else use_checkpoint(other, quiet=quiet)
    return browse(path, other, glob=glob, by=by, layout=layout)


def formats(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the formats that can be read and written."""
    return _print_plugins("formats", as_json=as_json)


def layouts(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the agent layouts that can be read and written."""
    return _print_plugins("layouts", as_json=as_json)


def backends(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the backends that run networks, and the extra that provides a missing one."""
    return _print_plugins("backends", as_json=as_json)


def limits(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the parser limits and the names for --limit."""
    if as_json:
        console.print_document({"limits": parser_limits.document()})
    else:
        from ckpttool.cli.tables import render_limits

        console.print_text(render_limits(parser_limits.document()))
    return 0


def _print_plugins(kind: Any, *, as_json: bool) -> int:
    from ckpttool.commands.plugin_rows import list_plugins

    plugins = list_plugins(kind)
    if as_json:
        console.print_document({kind: [row.document() for row in plugins]})
    else:
        from ckpttool.cli.tables import render_plugins

        console.print_text(render_plugins(kind, plugins))
    return 0


def schema(
    name: Annotated[
        str | None,
        argument("NAME", "Name of a command, or error, result, sidecar.", complete_field("schema")),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,  # noqa: ARG001
) -> int:
    """List the JSON Schemas of --json output, or print one to validate documents with."""
    from ckpttool.commands.schemas import list_schemas
    from ckpttool.commands.schemas import schema as read_schema

    if name is None:
        rows = list_schemas()
        if as_json:
            console.print_document({"schemas": [row.document() for row in rows]})
        else:
            from ckpttool.cli.tables import render_schemas

            console.print_text(render_schemas(rows))
        return 0
    content = read_schema(name)
    if as_json:
        (row,) = (row for row in list_schemas() if row.name == name)
        console.print_document({"schemas": [{**row.document(), "content": content}]})
    else:
        console.print_text(json.dumps(content, indent=1))
    return 0
