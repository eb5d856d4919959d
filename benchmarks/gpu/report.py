"""What a result says: its goals, its table for a terminal, its page and its plot for the documentation."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.gpu.parts import ABSENT, FAILED, PASSED, finite

Result = Mapping[str, Any]
Figure = Mapping[str, Any]

KEPT, BROKEN, NOT_MEASURED, NOT_APPLICABLE = "kept", "BROKEN", "not measured", "not applicable"
EAGER, LIMIT, GEMM = "eager PyTorch", "device limit", "GEMM rate"
WIDTH = 80


class Goal(NamedTuple):
    """A promise for devices of the H100's class: which number of a result, and its bound."""

    name: str
    measured: Callable[[Sequence[Figure]], float | None]
    sense: str
    bound: float


def records(result: Result) -> Iterator[Mapping[str, Any]]:
    """Yield the records of all parts."""
    for section in ("checks", "residency", "speed"):
        yield from result[section]


def whole(result: Result) -> bool:
    """Return whether every group ran with full sizes, on a device that could be described."""
    return result["only"] is None and not result["quick"] and "cores" in result["device"]


def slug(result: Result) -> str:
    """Return the name of a device's result, for files."""
    device = result["device"]
    name = device["name"] if device["kind"] == "cuda" else f"cpu {device['name']}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def figures(result: Result) -> list[Figure]:
    """Return the figures of all parts that measured something."""
    return [
        figure for record in result["speed"] for figure in record["figures"] if figure["value"] is not None
    ]


def pick(result: Iterable[Figure], name: str, **settings: int | str) -> Iterator[Figure]:
    """Yield the figures of that name and these settings."""
    for figure in result:
        if figure["name"] == name and settings.items() <= figure["settings"].items():
            yield figure


def _ratio(name: str, other: str, **settings: int | str) -> Callable[[Sequence[Figure]], float | None]:
    def measured(figures: Sequence[Figure]) -> float | None:
        return next(
            (f["beside"][other] for f in pick(figures, name, **settings) if other in f["beside"]), None
        )

    return measured


def _most(name: str, **settings: int | str) -> Callable[[Sequence[Figure]], float | None]:
    return lambda figures: max((f["value"] for f in pick(figures, name, **settings)), default=None)


def _start(figures: Sequence[Figure]) -> float | None:
    faster = _ratio("from file to first action", "import torch / this")(figures)
    return 1 / faster if faster else None


GOALS = (
    Goal(
        "captured graph beside eager, 1 row",
        _ratio("host arrays", EAGER, network="256x256", rows=1),
        "at least",
        3,
    ),
    Goal(
        "share of the GEMM rate, 16,384 rows",
        _ratio("tensors on the device", GEMM, network="1024x1024", rows=16384),
        "at least",
        0.6,
    ),
    Goal("Pendulum-v1, steps/s", _most("steps on the device", task="Pendulum-v1"), "at least", 30e6),
    Goal(
        "64 checkpoints beside one by one",
        _ratio("a sweep of checkpoint files", "one by one", checkpoints=64),
        "at least",
        20,
    ),
    Goal("first action beside import torch", _start, "at most", 1.5),
)


def goals(result: Result) -> list[dict[str, Any]]:
    """Return the goals with what was measured; they bind on the H100's class and on full sizes alone."""
    measured_figures, documents = figures(result), []
    binding = bool(result["device"].get("hopper")) and not result["quick"]
    for goal in GOALS:
        measured = goal.measured(measured_figures)
        if measured is None:
            status = NOT_MEASURED
        elif not binding:
            status = NOT_APPLICABLE
        else:
            kept = measured >= goal.bound if goal.sense == "at least" else measured <= goal.bound
            status = KEPT if kept else BROKEN
        documents.append(
            {
                "name": goal.name,
                "measured": None if measured is None else finite(measured),
                "sense": goal.sense,
                "bound": goal.bound,
                "status": status,
            }
        )
    return documents


def number(value: float | None) -> str:
    """Return a number with three significant digits, thousands separated."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{round(value, places):,.{places}f}" if places else f"{float(f'{value:.3g}'):,.0f}"


def _si(value: float | None) -> str:
    """Return a rate with M or G behind it."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value is not None and value >= size:
            return f"{number(value / size)} {unit}"
    return number(value)


Row = tuple[str, ...]


def _latency_rows(result: Result) -> Iterator[Row]:
    measured = figures(result)
    for host in pick(measured, "host arrays"):
        where = {name: host["settings"][name] for name in ("network", "rows")}
        there = next(pick(measured, "tensors on the device", **where), {"value": None, "beside": {}})
        yield (
            str(where["network"]),
            f"{where['rows']:,}",
            number(host["value"]),
            number(host["beside"].get(EAGER)),
            number(there["value"]),
            number(there["beside"].get(EAGER)),
            _percent(there["beside"].get(GEMM)),
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


_LATENCY = ("actor", "rows", "host us", "x eager", "device us", "x eager", "GEMM rate")


def _task_rows(result: Result) -> Iterator[Row]:
    for record in result["speed"]:
        for figure in pick(record["figures"], "steps on the device"):
            where = figure["settings"]
            yield (
                str(where["task"]),
                f"{where['rows']:,}",
                _si(figure["value"]),
                number(figure["beside"].get(EAGER)),
                number(figure["beside"].get("the same without graphs")),
            )


def _best_task_rows(result: Result) -> Iterator[Row]:
    """Yield the row of the most steps per second of each task."""
    rates = [f for f in figures(result) if f["name"] == "steps on the device"]
    best = {f["settings"]["task"]: f["settings"] for f in sorted(rates, key=lambda f: f["value"])}
    settings = {(str(where["task"]), f"{where['rows']:,}") for where in best.values()}
    yield from (row for row in _task_rows(result) if row[:2] in settings)


_TASKS = ("task", "rows", "steps/s", "x eager", "x without graphs")
_SHOWN_APART = {"host arrays", "tensors on the device", "steps on the device"}
_SHOWN_APART |= {f"{name}, eager PyTorch" for name in _SHOWN_APART}


def _other_rows(result: Result) -> Iterator[Row]:
    for record in result["speed"]:
        for figure in record["figures"]:
            if figure["name"] not in _SHOWN_APART and figure["value"] is not None:
                settings = ", ".join(f"{name} {_plain(value)}" for name, value in figure["settings"].items())
                beside = ", ".join(f"{number(ratio)} x {name}" for name, ratio in figure["beside"].items())
                yield figure["name"], settings, f"{number(figure['value'])} {figure['unit']}".strip(), beside


def _plain(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _goal_rows(result: Result) -> Iterator[Row]:
    for goal in result["goals"]:
        bound = f"{goal['sense']} {_bound(goal['bound'])}"
        yield goal["name"], _si(goal["measured"]), bound, goal["status"]


def _bound(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value:g}"


_GOALS = ("goal", "measured", "bound", "status")


def _check_rows(result: Result) -> Iterator[Row]:
    for record in (*result["checks"], *result["residency"]):
        passed = sum(check["status"] == PASSED for check in record["checks"])
        count = f"{passed} of {len(record['checks'])}" if record["checks"] else "-"
        yield record["group"], record["part"], record["status"], count


_CHECKS = ("group", "part", "status", "checks passed")


def _group_rows(result: Result) -> Iterator[Row]:
    """Yield the counts of each group of checks."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in (*result["checks"], *result["residency"]):
        groups.setdefault(record["group"], []).append(record)
    for group, records in groups.items():
        checks = [check for record in records for check in record["checks"]]
        counts = [str(sum(record["status"] == status for record in records)) for status in _STATUSES]
        yield group, *counts, f"{sum(check['status'] == PASSED for check in checks)} of {len(checks)}"


_STATUSES = (PASSED, FAILED, ABSENT)
_GROUPS = ("group", "parts passed", "failed", "absent", "checks passed")


def troubles(result: Result) -> list[str]:
    """Return a line for every failed check, failed or absent part, and figure that was not measured."""
    sentences = []
    for record in records(result):
        title = f"{record['group']}: {record['part']}"
        if record["error"]:
            sentences.append(f"{record['status']}: {title}: {record['error']}")
        for check in record["checks"]:
            if check["status"] == FAILED:
                measured = "not finite" if check["measured"] is None else number(check["measured"])
                bound = f"{check['sense']} {number(check['bound'])} {check['unit']}".strip()
                note = f" ({check['note']})" if check["note"] else ""
                sentences.append(f"failed: {title}: {check['name']}: {measured}, expected {bound}{note}")
        for figure in record["figures"]:
            if figure["value"] is None:
                sizes = ", ".join(_plain(size) for size in figure["settings"].values())
                reason = figure["note"].removeprefix("not measured: ")
                sentences.append(f"not measured: {figure['name']} ({sizes}): {reason}")
    sentences += [f"absent: {name}: {reason}" for name, reason in result["absent"].items()]
    return sorted(sentences, key=lambda line: not line.startswith(FAILED))


def headline(result: Result) -> str:
    """Return the device and its software in one line."""
    device, versions = result["device"], result["versions"]
    known = [f"driver {device['driver']}"] if device.get("driver") else []
    if device["kind"] == "cpu":
        known.append(f"CPU, {device.get('threads', '?')} of {device.get('cores', '?')} cores")
    known += [
        f"{name} {versions[name]}" for name in ("torch", "cuda", "numpy", "python") if versions.get(name)
    ]
    return f"{device['name']}: {', '.join(known)}"


def _columns(head: Row, rows: Iterable[Row]) -> list[str]:
    """Return aligned lines of at most 80 columns; the widest column gives way, and is cut."""
    table_ = [head, *rows]
    if len(table_) == 1:
        return []
    widths = [max(len(row[n]) for row in table_) for n in range(len(head))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[max(range(len(widths)), key=widths.__getitem__)] -= 1
    lines = []
    for row in table_:
        cells = [_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return [*lines, ""]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 2)] + ".."


def table(result: Result) -> str:
    """Return the table for a terminal: 80 columns."""
    lines = [_cut(headline(result), WIDTH), ""]
    for head, rows in (
        (_CHECKS, _check_rows),
        (_LATENCY, _latency_rows),
        (_TASKS, _task_rows),
    ):
        lines += _columns(head, rows(result))
    for what, sizes, measured, beside in _other_rows(result):
        line = f"{what}{f' ({sizes})' if sizes else ''}: {measured}{f'; {beside}' if beside else ''}"
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ")
    lines += ["", *_columns(_GOALS, _goal_rows(result))]
    counts = dict.fromkeys((PASSED, FAILED, ABSENT), 0)
    for record in records(result):
        counts[record["status"]] = counts.get(record["status"], 0) + 1
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    for line in troubles(result):
        lines += textwrap.wrap(_cut(line, 4 * WIDTH), WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, f"parts: {summary}; {result['seconds']:.0f} s"])


HEAD = """# GPU results

Made by `python docs/generate.py` from `benchmarks/results/*.json`, which have every figure and check; do not
edit it by hand. One command checks and measures everything on a device, and keeps the newest result of each:

<!-- not run: it takes minutes -->
```sh
make gpu                                   # python -m benchmarks.gpu --device cuda
python -m benchmarks.gpu --device cpu      # the same on the CPU, which finds what can break without a GPU
```

It needs NumPy, PyTorch and ckpttool's core, and uses what else is installed. Each part runs in a child
process with a time limit, so a crash does not end the run.
"""

NOT_YET = """
## Not yet measured on a GPU

No result of a CUDA device exists. Open questions:

- CUDA graphs: capture of every layer, replays equal bit for bit, a usable device after a failed capture
- Page-locked buffers and streams: races, and accesses that only memcheck detects
- TF32 off for dense, stacked and convolutional layers
- Memory: the error of a batch that does not fit, and 200 evaluations without a leak
- Residency: one copy and one wait per hundred steps
- Several devices, and a busy device
- Every speed goal below
"""

GOALS_TEXT = """
## Speed goals

They bind on devices of the H100's class.

| goal | bound |
|---|---|
"""


def measured_on_cuda(results: Iterable[Result]) -> bool:
    """Return whether a whole run on a GPU is among the results."""
    return any(result["device"]["kind"] == "cuda" and whole(result) for result in results)


def kept_results(folder: Path) -> list[dict[str, Any]]:
    """Return the whole results of a folder: GPUs first, then by name."""
    results = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    results = [result for result in results if whole(result)]
    return sorted(results, key=lambda result: (result["device"]["kind"] != "cuda", slug(result)))


def page(results: Sequence[Result]) -> str:
    """Return docs/gpu.md."""
    goals_ = "".join(f"| {goal.name} | {goal.sense} {_bound(goal.bound)} |\n" for goal in GOALS)
    parts = [HEAD, "" if measured_on_cuda(results) else NOT_YET, GOALS_TEXT + goals_]
    return "".join([*parts, *map(_section, results)])


def plot_name(result: Result) -> str:
    """Return the name of a result's plot, beside the page."""
    return f"gpu-{slug(result)}.svg"


def _section(result: Result) -> str:
    lines = ["", f"## {result['device']['name']}", "", f"{headline(result)}.", ""]
    lines += [f"`{result['command']}`, {result['date']}, {result['seconds']:.0f} s.", ""]
    if plot(result):
        lines += [f"![Latency and steps per second by rows]({plot_name(result)})", ""]
    explained = {
        "One call of an actor": (_LATENCY, _latency_rows(result), _LATENCY_TEXT),
        "Tasks on the device": (_TASKS, _best_task_rows(result), _TASK_TEXT),
        "Speed goals": (_GOALS, _goal_rows(result), ""),
        "Checks": (_GROUPS, _group_rows(result), ""),
    }
    for title, (head, rows, text) in explained.items():
        row_list = list(rows)
        if row_list:
            lines += [f"**{title}.** {text}".rstrip(), "", *_markdown(head, row_list), ""]
    reasons: dict[str, list[str]] = {}
    for line in troubles(result):
        title, _, reason = line.rpartition(": ")
        if result["device"]["kind"] == "cpu" and reason.endswith("on CUDA devices alone"):
            title, reason = title.rpartition(": ")[2], "absent without a CUDA device"
        reasons.setdefault(reason, []).append(title)
    rows = [f"- {_inert('; '.join(titles))}: {_inert(reason)}" for reason, titles in reasons.items()]
    lines += ["**Failed, absent and not measured.**", "", *(rows or ["- nothing"])]
    return "\n".join([*lines, ""])


_LATENCY_TEXT = """\
Medians in µs: `host us` with arrays in and out, `device us` with tensors on the device. `x eager` is the
speed relative to a `torch.nn.Module`, `GEMM rate` the share of the rate of one float32 product."""
_TASK_TEXT = """\
Actor 64-64, whole episodes without a copy inside the loop, at the fastest number of rows. `x eager` is
relative to a loop of eager PyTorch."""


def _markdown(head: Row, rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(_inert(cell) for cell in row)} |" for row in rows]


def _inert(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([|<>\[\]`*_\\])", r"\\\1", text)


_PANEL_W, _PANEL_H, _LEFT, _TOP, _BOTTOM, _GAP = 300, 220, 64, 34, 44, 78
_COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#17a2b8")
Points = Sequence[tuple[float, float]]


def plot(result: Result) -> str | None:
    """Return an SVG of latency and of steps per second by rows; None where nothing was measured."""
    measured = figures(result)
    latency: dict[str, Points] = {}
    for network in dict.fromkeys(str(f["settings"]["network"]) for f in pick(measured, "host arrays")):
        for label, name in (("", "host arrays"), (" eager", "host arrays, eager PyTorch")):
            latency[f"{network}{label}"] = _points(pick(measured, name, network=network))
    rates: dict[str, Points] = {}
    for task in dict.fromkeys(str(f["settings"]["task"]) for f in pick(measured, "steps on the device")):
        rates[task] = _points(pick(measured, "steps on the device", task=task))
    panels = [("one call, us", latency), ("steps/s on the device", rates)]
    drawn = [_panel(title, lines, n) for n, (title, lines) in enumerate(panels) if any(lines.values())]
    if not drawn:
        return None
    width = _LEFT + len(panels) * (_PANEL_W + _GAP)
    height = _TOP + _PANEL_H + _BOTTOM + 16 * math.ceil(len(latency) / 2) + 8
    name = escape(result["device"]["name"])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
            f"<title>{name}</title>",
            # One ground for light and dark pages.
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _points(figures: Iterable[Figure]) -> Points:
    return sorted((float(f["settings"]["rows"]), float(f["value"])) for f in figures)


def _panel(title: str, lines: Mapping[str, Points], column: int) -> str:
    """Return one plot with logarithmic axes."""
    left, top = _LEFT + column * (_PANEL_W + _GAP), _TOP
    every = [point for points in lines.values() for point in points]
    across = _decades([x for x, _ in every])
    up = _decades([y for _, y in every])

    def at(value: float, low_high: tuple[int, int], length: float) -> float:
        low, high = low_high
        return round((math.log10(value) - low) / (high - low) * length, 1)

    parts = [f'<text x="{left}" y="{top - 12}" font-size="13">{escape(title)}</text>']
    for power in range(up[0], up[1] + 1):
        y = round(top + _PANEL_H - at(10.0**power, up, _PANEL_H), 1)
        parts.append(f'<path d="M{left} {y}h{_PANEL_W}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_power(power)}</text>')
    for power in range(across[0], across[1] + 1):
        x = round(left + at(10.0**power, across, _PANEL_W), 1)
        parts.append(f'<path d="M{x} {top}v{_PANEL_H}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x}" y="{top + _PANEL_H + 15}" text-anchor="middle">{_power(power)}</text>')
    parts.append(f'<text x="{left + _PANEL_W}" y="{top + _PANEL_H + 30}" text-anchor="end">rows</text>')
    for number_, (label, points) in enumerate(lines.items()):
        eager = label.endswith(" eager")
        colour = _COLOURS[(number_ // 2 if len(lines) > 2 else number_) % len(_COLOURS)]
        places = [
            (round(left + at(x, across, _PANEL_W), 1), round(top + _PANEL_H - at(y, up, _PANEL_H), 1))
            for x, y in points
        ]
        path = " ".join(f"{'L' if n else 'M'}{x} {y}" for n, (x, y) in enumerate(places))
        dashes = ' stroke-dasharray="5 4"' if eager else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places]
        x, y = left + _PANEL_W // 2 * (number_ % 2), top + _PANEL_H + _BOTTOM + 16 * (number_ // 2)
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(label)}</text>')
    return "\n".join(parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(power: int) -> str:
    names = {0: "1", 1: "10", 2: "100", 3: "1k", 4: "10k", 5: "100k", 6: "1M", 7: "10M", 8: "100M", 9: "1G"}
    return names.get(power, f"1e{power}")
