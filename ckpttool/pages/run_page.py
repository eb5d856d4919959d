"""Page of a training run: returns, best checkpoint and its film, drift of layers, findings over time."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.commands.run_history import RunCheckpoint, RunHistory, follow_run
from ckpttool.core import filesystem, text, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import FormatError
from ckpttool.core.source import File
from ckpttool.core.text import clean, describe_record, format_count, format_size
from ckpttool.listing.training_counters import ANY_UNIT, TITLES, UNITS, step_columns
from ckpttool.pages.computation import Computation, find_computation
from ckpttool.pages.rendering import (
    SHOWN,
    EvaluationEntry,
    EvaluationSection,
    ReturnCurve,
    build_chart,
    build_strips,
    find_results,
    format_exactly,
    format_number,
    format_path,
    rank_results,
    read_evaluations,
    render_template,
)
from ckpttool.verification.run_histories import FindingHistory, LayerHistory, fold_layers
from ckpttool.verification.run_members import RunFiles


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Files with more about a run: evaluations of its checkpoints, and a film."""

    evaluations: Sequence[str] = ()
    film: str | None = None


@dataclass(frozen=True, slots=True)
class BestResult:
    """The result with the highest mean; `certain` if `eval` found every other one significantly lower.

    `by_name` if only its file name shows that it is of this run.
    """

    number: int
    result: EvaluationEntry
    certain: bool | None
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class Film:
    """A film as a data URL; `checkpoint` is the name of the one that plays, None if no file records it.

    `episodes` has the number and the return of each episode, as far as recorded.
    """

    url: str
    name: str
    checkpoint: str | None
    episodes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The media type."""
        return self.url[len("data:") : self.url.index(";")]


@dataclass(frozen=True, slots=True)
class FilmRecord:
    """What `eval` records about a film: the file, the checkpoint that plays, and its episodes."""

    file: str
    checkpoint: str
    episodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunContents:
    """Contents of the page of a run.

    `scores` are the results of each checkpoint, by its position; `layers` are the rows of the drift, joined
    into modules at `depth` if there are too many.
    """

    __repr__ = describe_record

    history: RunHistory
    results: EvaluationSection
    scores: dict[int, EvaluationEntry]
    best: BestResult | None
    film: Film | None
    networks: Computation | None
    layers: tuple[LayerHistory, ...]
    depth: int
    files: tuple[File, ...]
    notes: tuple[str, ...]


def gather_run(
    run: RunFiles,
    *,
    inputs: RunInputs,
    glob: str | None = None,
    layout: str | None = None,
    progress: Progress = ignore_progress,
) -> RunContents:
    """Read a run and the files about it; raise any error of reading.

    Args:
        run: the checkpoints of the run.
        inputs: files of results, and the film of the best checkpoint.
        glob: a pattern for the paths of tensors.
        layout: the layout of the run's agents.
        progress: called with the bytes read so far, and all.
    """
    section, films, choices = _read_results(inputs.evaluations)
    if inputs.film is not None and (problem := _film_problem(inputs.film)) is not None:
        raise problem
    history = follow_run(run, glob=glob, layout=layout, progress=progress)
    scores, notes = _match_results(history.checkpoints, section.results)
    results = _run_curves(section, history, scores)
    best = _find_best(scores, choices)
    _, by_name = _find_owners(history.checkpoints, section.results)
    if by_name:
        results = replace(results, notes=(*results.notes, *notes[:1]))
    if best is not None and any(section.results[number] is best.result for number in by_name):
        best = replace(best, by_name=True)
    film = _find_film(inputs.film, films, history, best)
    binding = history.latest.binding
    strips = find_computation(history.latest.checkpoint, binding, history.sha256)
    layers, depth = fold_layers(history.layers, _MOST_ROWS)
    files = (*history.files, *map(File.stamp, filter(filesystem.isfile, inputs.evaluations)))
    if inputs.film is not None:
        files = (*files, File.stamp(inputs.film))
    return RunContents(
        history, results, scores, best, film, strips, layers, depth, files, (*history.notes, *notes)
    )


def _read_results(
    files: Sequence[str],
) -> tuple[EvaluationSection, list[FilmRecord], dict[str, bool]]:
    """Return the evaluations, the films that they record, and whether each best one is certain."""
    films, choices = [], {}
    for file in files:
        whole = text.load_json(file, "the evaluation")
        best = whole.get("best")
        films += [
            _read_film(file, film)
            for film in (whole.get("video"), whole.get("strip"))
            if isinstance(film, dict) and isinstance(film.get("file"), str)
        ]
        # `eval` compared the checkpoints of one file.
        if isinstance(best, dict) and len(files) == 1:
            choices[str(best.get("checkpoint"))] = best.get("certain") is True
    return read_evaluations(files), films, choices


def _read_film(file: str, film: dict[str, Any]) -> FilmRecord:
    episodes = film.get("episodes")
    shown = [
        f"episode {episode['episode']}: return {format_number(float(episode['return']))}"
        for episode in (episodes if isinstance(episodes, list) else ())
        if isinstance(episode, dict)
        and isinstance(episode.get("episode"), int)
        and isinstance(episode.get("return"), int | float)
    ]
    # Only beside the results: a document may name any file.
    beside = os.path.join(os.path.dirname(file), os.path.basename(film["file"]))
    return FilmRecord(
        beside, os.path.basename(str(film.get("checkpoint", ""))), tuple(shown[:_MOST_EPISODES])
    )


def _match_results(
    checkpoints: Sequence[RunCheckpoint], results: Sequence[EvaluationEntry]
) -> tuple[dict[int, EvaluationEntry], list[str]]:
    """Return the result of each checkpoint, that with the most episodes, and notes on all others."""
    owners, by_name = _find_owners(checkpoints, results)
    entries: dict[int, EvaluationEntry] = {}
    others = []
    for number, result in enumerate(results):
        at = owners.get(number)
        if at is None:
            others.append(os.path.basename(result.checkpoint) or "unnamed")
        elif at not in entries or len(result.returns) > len(entries[at].returns):
            entries[at] = result
    notes = []
    if by_name:
        notes.append(
            f"assumed: {format_count(len(by_name), 'result is', 'results are')} of this run, because the "
            "file names match and the recorded paths do not exist"
        )
    if others:
        notes.append(f"results of other checkpoints are not part of the curve: {', '.join(others[:5])}")
    return entries, notes


def _mark_foreign_results(
    checkpoints: Sequence[RunCheckpoint], results: Sequence[EvaluationEntry]
) -> dict[int, tuple[str, str]]:
    """Return class and text of a mark for each result that is not of this run, by its number."""
    owners, _ = _find_owners(checkpoints, results)
    return {number: ("not", "not of this run") for number in range(len(results)) if number not in owners}


def _find_owners(
    checkpoints: Sequence[RunCheckpoint], results: Sequence[EvaluationEntry]
) -> tuple[dict[int, int], frozenset[int]]:
    """Return the checkpoint of each result, and which are matched by name: those with the same counters."""
    owners, by_name = find_results([checkpoint.path for checkpoint in checkpoints], results)
    other = {number for number in by_name if _contradicts(results[number], checkpoints[owners[number]])}
    return {number: at for number, at in owners.items() if number not in other}, by_name - other


def _contradicts(result: EvaluationEntry, checkpoint: RunCheckpoint) -> bool:
    known = {TITLES[name]: value for name, value in step_columns(checkpoint.counts).items()}
    return any(known.get(title) not in (None, value) for title, value in result.counts.items())


def _run_curves(
    section: EvaluationSection, history: RunHistory, scores: dict[int, EvaluationEntry]
) -> EvaluationSection:
    """Return the section with a curve over the steps of the run, and the logged returns beside it.

    Returns in different environments form different curves.
    """
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for at, score in sorted(scores.items()):
        step = history.checkpoints[at].step
        if step is not None and math.isfinite(score.mean):
            low, high = score.ci95 or (score.mean, score.mean)
            points.setdefault(score.env, []).append((float(step), score.mean, low, high))
    unit = UNITS.get(history.step_from or "", ANY_UNIT)
    logged = [*_logged_curves(history)] or [curve for curve in section.curves if curve.logged]
    # A log counts in its own unit, usually environment steps.
    mixed = bool(points and logged) and unit != UNITS["num_timesteps"]
    evaluated = [
        ReturnCurve(
            f"evaluated{f' in {env}' if len(points) > 1 else ''}{f', by {unit}' if mixed else ''}",
            tuple(sorted(of)),
        )
        for env, of in points.items()
    ]
    if mixed:
        logged = [replace(curve, label=f"{curve.label}, by the steps of the log") for curve in logged]
    shown = (*evaluated, *logged)
    return replace(section, curves=shown, unit=ANY_UNIT if mixed or not points else unit)


def _logged_curves(history: RunHistory) -> Iterator[ReturnCurve]:
    for curve in history.logs.curves:
        pairs = zip(curve.steps.tolist(), curve.values.tolist(), strict=True)
        points = ((float(step), value, value, value) for step, value in pairs if math.isfinite(value))
        yield ReturnCurve(f"logged ({curve.of}): {clean(curve.tag)}", tuple(points), logged=True)


def _find_best(scores: dict[int, EvaluationEntry], choices: dict[str, bool]) -> BestResult | None:
    """Return the highest mean; None without results, and for results from different environments."""
    known = {at: score for at, score in scores.items() if math.isfinite(score.mean)}
    if not known or len({score.env for score in known.values()}) > 1:
        return None
    at = max(known, key=lambda number: (known[number].mean, -number))
    certain = choices.get(known[at].checkpoint) if len(known) > 1 else None
    return BestResult(at, known[at], certain)


_MOST_FILM = 3 << 20
_MOST_EPISODES = 4
_SUFFIXES = (".pt", ".pth", ".zip", ".npz", ".h5", ".keras", ".safetensors")
# Offset and bytes of each media type.
_KINDS = (
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (4, b"ftyp", "video/mp4"),
)


def _find_film(
    film: str | None, recorded: Sequence[FilmRecord], history: RunHistory, best: BestResult | None
) -> Film | None:
    """Return the film that was given, else that of the best checkpoint: recorded by `eval`, or beside it.

    Raise FormatError for a file that is given and cannot be embedded; others are left out.
    """
    known = {filesystem.realpath(record.file): record for record in recorded}
    if film is not None:
        record = known.get(filesystem.realpath(film))
        names = {os.path.basename(checkpoint.path) for checkpoint in history.checkpoints}
        owner = _stem_owner(film, names) if record is None else record.checkpoint
        return Film(_embed_film(film), os.path.basename(film), owner, record.episodes if record else ())
    if best is None:
        return None
    folder, name = os.path.split(history.checkpoints[best.number].path)
    stems = dict.fromkeys((name, _stem(name)))
    beside = [os.path.join(folder, f"{stem}{kind}") for kind in (".gif", ".mp4") for stem in stems]
    for file in (*(record.file for record in recorded if record.checkpoint == name), *beside):
        if filesystem.isfile(file) and _film_problem(file) is None:
            record = known.get(filesystem.realpath(file))
            return Film(_embed_film(file), os.path.basename(file), name, record.episodes if record else ())
    return None


def _stem(name: str) -> str:
    """Return a checkpoint's name without the suffix of its format; a step is no suffix (`ckpt-2.5`)."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in _SUFFIXES else name


def _stem_owner(film: str, names: set[str]) -> str | None:
    stem = os.path.splitext(os.path.basename(film))[0]
    return next((name for name in names if stem in (name, _stem(name))), None)


def _film_problem(file: str) -> FormatError | None:
    stamp = File.stamp(file)
    if _media_type(stamp) is None:
        return FormatError(
            "not a film that a page can contain",
            file=file,
            expected="a GIF, PNG or MP4",
            hint="record one: ckpttool eval PATH --video film.mp4",
        )
    if stamp.size > _MOST_FILM:
        limit = f"at most {format_size(_MOST_FILM)}"
        size = format_size(stamp.size)
        hint = "use a smaller film (eval --video-width), or a PNG with some of its images"
        return FormatError("the film is too large", file=file, expected=limit, found=size, hint=hint)
    return None


def _media_type(file: File) -> str | None:
    head = file.read(0, min(8, file.size))
    return next((kind for at, magic, kind in _KINDS if head.startswith(magic, at)), None)


def _embed_film(file: str) -> str:
    """Return a GIF, PNG or MP4 as a data URL; raise FormatError for other and for large files."""
    problem = _film_problem(file)
    if problem is not None:
        raise problem
    stamp = File.stamp(file)
    return f"data:{_media_type(stamp)};base64,{base64.b64encode(stamp.read(0, stamp.size)).decode()}"


_MOST_ROWS = 300
# Steps of color: updates from small to large, norms from smaller to larger than the first one.
_SHADES, _SIDE = 10, 5
# Rows of the table with all numbers.
_MOST_NUMBERS = 4000
# Cells of all strips of a table, about 100 bytes each, and the fewest of one strip.
_MOST_CELLS, _FEWEST_CELLS = 30_000, 50


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One cell: the class of its color, and its value in words."""

    shade: str
    title: str


@dataclass(frozen=True, slots=True)
class DriftRow:
    """One layer of the table; `size` and `change` are the first and the last number of each strip."""

    path: str
    parameters: int
    norms: tuple[HeatCell, ...]
    updates: tuple[HeatCell, ...]
    size: str
    change: str
    numbers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DriftSection:
    """The rows, and the ends of both scales as text; `grouped` is the most checkpoints that share a cell."""

    rows: tuple[DriftRow, ...]
    update_ends: tuple[str, str]
    norm_ends: tuple[str, str]
    unchanged: bool
    broken: bool
    unknown: bool
    numbers: bool
    grouped: int


def build_drift(layers: Sequence[LayerHistory], steps: Sequence[str]) -> DriftSection:
    """Return the strips of all layers on two common scales."""
    updates = _UpdateScale([value for layer in layers for value in layer.updates])
    norms = _NormScale(layers)
    most = _cells_per_strip(2 * len(layers))
    rows = [_drift_row(layer, steps, updates, norms, most) for layer in layers]
    shades = {cell.shade for row in rows for cell in (*row.norms, *row.updates)}
    few = len(layers) * len(steps) <= _MOST_NUMBERS
    return DriftSection(
        tuple(rows),
        updates.ends,
        norms.ends,
        "same" in shades,
        "broken" in shades,
        "unknown" in shades,
        few,
        -(-len(steps) // most),
    )


def _cells_per_strip(strips: int) -> int:
    return max(_FEWEST_CELLS, _MOST_CELLS // max(1, strips))


def _thin_cells(cells: Sequence[HeatCell], most: int) -> tuple[HeatCell, ...]:
    """Return at most `most` cells: of each group of neighbors a broken or found one, else the last known."""
    size = -(-len(cells) // most)
    groups = (cells[at : at + size] for at in range(0, len(cells), size))
    return tuple(max(enumerate(group), key=_cell_rank)[1] for group in groups) if size > 1 else tuple(cells)


def _cell_rank(numbered: tuple[int, HeatCell]) -> tuple[int, int]:
    number, cell = numbered
    return {"broken": 2, "found": 2, "unknown": 0}.get(cell.shade, 1), number


def _drift_row(
    layer: LayerHistory, steps: Sequence[str], updates: _UpdateScale, norms: _NormScale, most: int
) -> DriftRow:
    first = _first_norm(layer)
    sizes = [
        HeatCell(norms.shade(norm, first), f"{step}: norm {_short(norm)}")
        for step, norm in zip(steps, layer.norms, strict=True)
    ]
    changes = [
        HeatCell(updates.shade(value), f"{before} to {after}: update {_short(value)}")
        for before, after, value in zip(steps, steps[1:], layer.updates[1:], strict=False)
    ]
    return DriftRow(
        format_path(layer.path) or "(top level)",
        layer.parameters,
        _thin_cells(sizes, most),
        _thin_cells(changes, most),
        _ends(layer.norms),
        _ends(layer.updates[1:]),
        tuple((_short(norm), _short(value)) for norm, value in zip(layer.norms, layer.updates, strict=True)),
    )


def _first_norm(layer: LayerHistory) -> float | None:
    """Return the norm to which the others are compared; None if none is finite and above zero."""
    return next((norm for norm in layer.norms if norm and math.isfinite(norm)), None)


def _ends(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return _short(known[0]) if len(known) == 1 else f"{_short(known[0])} → {_short(known[-1])}"


def _short(value: float | None) -> str:
    """Return a number with three digits; infinity and NaN as words."""
    if value is None:
        return "unknown"
    if math.isnan(value):
        return "NaN"
    return "infinite" if math.isinf(value) else format_exactly(value, 3)


class _UpdateScale:
    """Map update sizes to shades, on a logarithmic scale between the smallest and the largest."""

    def __init__(self, values: Sequence[float | None]) -> None:
        known = [value for value in values if value is not None and 0 < value < math.inf]
        self._low, self._high = (min(known), max(known)) if known else (1.0, 1.0)
        self.ends = (_short(self._low), _short(self._high)) if known else ("", "")

    def shade(self, value: float | None) -> str:
        """Return the class of a cell."""
        if value is None:
            return "unknown"
        if not math.isfinite(value):
            return "broken"
        if value == 0:
            return "same"
        # The ratio of the ends may be above the largest number.
        span = math.log(self._high) - math.log(self._low)
        share = (math.log(value) - math.log(self._low)) / span if span else 1.0
        return f"u{min(_SHADES - 1, max(0, int(share * _SHADES)))}"


class _NormScale:
    """Map norms to shades by their ratio to the first norm of the layer."""

    def __init__(self, layers: Sequence[LayerHistory]) -> None:
        logs = [math.log(1.1)]
        for layer in layers:
            first = _first_norm(layer)
            known = [norm for norm in layer.norms if norm and math.isfinite(norm)]
            logs += [abs(math.log(norm) - math.log(first)) for norm in known if first]
        self._most = max(logs)
        power = self._most / math.log(10)
        most = format_exactly(math.exp(self._most), 2) if power < 300 else f"10^{power:.0f}"
        self.ends = (f"\u00f7 {most}", f"\u00d7 {most}")

    def shade(self, norm: float | None, first: float | None) -> str:
        """Return the class of a cell."""
        if norm is None:
            return "unknown"
        if not math.isfinite(norm):
            return "broken"
        if not first or not norm:
            return f"n{0 if first else _SIDE}"
        share = (math.log(norm) - math.log(first)) / self._most
        return f"n{_SIDE + max(-_SIDE, min(_SIDE, round(share * _SIDE)))}"


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding: a mark per checkpoint, when it occurs, its latest text, and its texts where they change."""

    topic: str
    sentence: str
    fix: str
    marks: tuple[HeatCell, ...]
    when: str
    texts: tuple[tuple[str, str], ...]


def split_findings(
    histories: Sequence[FindingHistory], checkpoints: Sequence[RunCheckpoint]
) -> tuple[tuple[FindingRow, ...], tuple[FindingRow, ...]]:
    """Return a row for each finding that changes, and those that are equal at all readable checkpoints."""
    steps = step_labels(checkpoints)
    readable = [at for at, checkpoint in enumerate(checkpoints) if checkpoint.error is None]
    changing: list[FindingRow] = []
    constant: list[FindingRow] = []
    for finding in histories:
        same = len({finding.texts[at] for at in readable}) == 1
        (constant if same else changing).append(_finding_row(finding, steps, readable))
    return tuple(changing), tuple(constant)


def _finding_row(history: FindingHistory, steps: Sequence[str], readable: Sequence[int]) -> FindingRow:
    words = {"found": "found", "none": "not found", "unknown": "unknown"}
    known = frozenset(readable)
    shades = [
        "unknown" if at not in known else "found" if texts else "none"
        for at, texts in enumerate(history.texts)
    ]
    marks = [HeatCell(shade, f"{step}: {words[shade]}") for step, shade in zip(steps, shades, strict=True)]
    at = [number for number, readable_at in enumerate(readable) if history.texts[readable_at]]
    return FindingRow(
        history.topic,
        _join_alike(next(texts for texts in reversed(history.texts) if texts)),
        history.fix or "",
        _thin_cells(marks, _cells_per_strip(SHOWN)),
        _describe_times(at, [steps[number] for number in readable]),
        tuple(_changing_texts(history.texts, steps)) if len({*history.texts} - {()}) > 1 else (),
    )


def _join_alike(texts: Sequence[str]) -> str:
    """Return the first of sentences that differ only in numbers, with the number of the others."""
    more = f" (and {format_count(len(texts) - 1, 'more like it', 'more like it')})" if len(texts) > 1 else ""
    return f"{texts[0]}{more}"


def _describe_times(at: Sequence[int], steps: Sequence[str]) -> str:
    if len(at) == len(steps):
        return "every checkpoint"
    if len(at) == 1:
        return f"only {steps[at[0]]}"
    if list(at) == list(range(at[0], len(steps))):
        return f"since {steps[at[0]]}"
    if list(at) == list(range(at[-1] + 1)):
        return f"until {steps[at[-1]]}"
    return f"{len(at)} of {len(steps)}"


def _changing_texts(
    texts_by_step: Sequence[Sequence[str]], steps: Sequence[str]
) -> Iterator[tuple[str, str]]:
    before: Sequence[str] = ()
    for step, texts in zip(steps, texts_by_step, strict=True):
        if texts != before and texts:
            yield step, _join_alike(texts)
        before = texts


_STYLES = ("page.css", "run.css", "computation.css", "print.css")
_SCRIPTS = ("theme.js", "elements.js", "dagre.min.js", "computation.js", "tables.js", "run.js")


def render_run(contents: RunContents) -> bytes:
    """Return the page of a run in UTF-8; the same contents give the same bytes."""
    history, steps = contents.history, step_labels(contents.history.checkpoints)
    strips, ends = build_strips(contents.results.results)
    findings, constant = split_findings(history.findings, history.checkpoints)
    return render_template(
        "run.html",
        _STYLES,
        _SCRIPTS,
        film=contents.film.kind if contents.film else None,
        found=contents,
        history=history,
        order=_rank_checkpoints(contents),
        checkpoint=history.latest.checkpoint,
        steps=steps,
        span=_step_span(history.checkpoints) or (steps[0], steps[-1]),
        unit=UNITS.get(history.step_from or "", ANY_UNIT),
        drift=build_drift(contents.layers, steps),
        findings=findings,
        constant=constant,
        counters=_counter_columns(history.checkpoints),
        chart=build_chart(contents.results.curves),
        ranks=rank_results(contents.results.results, best_first=True),
        strips=strips,
        strip_ends=ends,
        owners=_mark_foreign_results(history.checkpoints, contents.results.results),
        agent=history.latest.binding is not None,
    )


def _rank_checkpoints(contents: RunContents) -> list[int]:
    """Return the positions of the checkpoints, the best first, then those without a result, newest first."""
    count = len(contents.history.checkpoints)

    def rank(at: int) -> tuple[float, int]:
        mean = contents.scores[at].mean if at in contents.scores else math.nan
        return (-mean if math.isfinite(mean) else math.inf, -at)

    return sorted(range(count), key=rank)


def step_labels(checkpoints: Sequence[RunCheckpoint]) -> tuple[str, ...]:
    """Return a short label for each checkpoint: its step, else its name."""
    return tuple(
        f"{saved.step:,}" if saved.step is not None else format_path(os.path.basename(saved.path))
        for saved in checkpoints
    )


def _step_span(checkpoints: Sequence[RunCheckpoint]) -> tuple[str, str] | None:
    known = [checkpoint.step for checkpoint in checkpoints if checkpoint.step is not None]
    return (f"{known[0]:,}", f"{known[-1]:,}") if known else None


def _counter_columns(checkpoints: Sequence[RunCheckpoint]) -> list[tuple[str, list[str]]]:
    """Return the title of each counter that any checkpoint has, with its values."""
    columns = []
    for name, title in TITLES.items():
        values = [step_columns(checkpoint.counts)[name] for checkpoint in checkpoints]
        if any(value is not None for value in values):
            columns.append((title, ["" if value is None else f"{value:,}" for value in values]))
    return columns


def run_document(contents: RunContents) -> dict[str, Any]:
    """Return the JSON object of a run."""
    best, film = contents.best, contents.film
    return {
        **contents.history.document(),
        "best": None
        if best is None
        else {
            "checkpoint": urls.display_url(contents.history.checkpoints[best.number].path),
            "mean": best.result.mean,
            "certain": best.certain,
            "verdict": best.result.verdict or None,
        },
        "film": None if film is None else {"file": film.name, "checkpoint": film.checkpoint},
    }
