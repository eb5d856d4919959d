"""Networks of an agent and layers of models, as text below the header of `inspect`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.columns import SHORTEST_PATH, keep_whole
from ckpttool.cli.styles import dim, terminal_width, wrap_sentence
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.text import clean, format_count, shorten
from ckpttool.listing.dataflow import build_listed_strips
from ckpttool.listing.layers import LayerGroup, fold_alike, format_extents, outline_layers
from ckpttool.listing.strip_facts import find_recorded_facts
from ckpttool.listing.strips import strip_lines

if TYPE_CHECKING:
    from ckpttool.cli.tree_tables import TreeView
    from ckpttool.listing.contents import CheckpointSummary
    from ckpttool.listing.layers import Architecture, ArchitectureLayer


def dataflow_lines(summary: CheckpointSummary) -> list[str]:
    """Return a blank line and the dataflow of an agent's networks; empty without an agent."""
    if summary.binding is None:
        return []
    recorded = find_recorded_facts(summary.checkpoint)
    strips = build_listed_strips(summary.binding, summary.checkpoint.tree, recorded)
    lines = [clean(line) for line in strip_lines(strips, terminal_width())]
    origin = ["with facts of the sidecar, not verified here"] if recorded is not None else []
    return ["", *lines, *origin] if lines else []


# Rows of layers on a terminal without --all, and columns of a layer's name and of its class and settings.
_MOST_LAYER_ROWS = 8
_LAYER_NAME = 28
# Models that have such a line on a terminal, and lines of each.
_MOST_OUTLINES = 3


def architecture_lines(view: TreeView) -> list[str]:
    """Return a blank line and the models' layers; on a terminal their classes alone if they are many."""
    if not view.models:
        return []
    tables = [list(_layer_rows(model.root)) for model in view.models]
    if view.screen is not None and not view.whole and sum(map(len, tables)) > _MOST_LAYER_ROWS:
        return outline_lines(view)
    lines: list[str] = []
    for model, rows in zip(view.models, tables, strict=True):
        lines += ["", wrap_sentence(_model_title(model)), *(_layer_table(rows) if rows else ())]
        lines += [wrap_sentence(f"assumed: {clean(assumption)}") for assumption in model.assumed]
        lines += [wrap_sentence(f"note: {clean(note)}") for note in model.notes[:_MOST_LAYER_ROWS]]
    return lines


def outline_lines(view: TreeView) -> list[str]:
    """Return a blank line and the classes of each model's layers, in few lines."""
    if not view.models:
        return []
    lines = [""]
    for model in view.models[:_MOST_OUTLINES]:
        lines.append(shorten(_model_title(model), terminal_width()))
        words = clean(outline_layers(model.root))
        wrapped = textwrap.wrap(words, terminal_width() - 2, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {shorten(line, terminal_width() - 2)}" for line in wrapped[:_MOST_OUTLINES]]
        if len(wrapped) > _MOST_OUTLINES:
            lines[-1] = f"{shorten(lines[-1], terminal_width() - 4)} ..."
    hidden = len(view.models) - _MOST_OUTLINES
    return [*lines, f"  {format_count(hidden, 'more model')}: --all shows them"] if hidden > 0 else lines


def _model_title(model: Architecture) -> str:
    """Return the model's class, source, inputs, parameters and operations."""
    root = model.root
    named = f"{clean(root.path)}: " if root.path else ""
    facts = [
        f"input {f'{clean(name)} ' if len(model.inputs) > 1 and name else ''}{format_extents(shape)}"
        for name, shape in model.inputs[:3]
    ]
    if root.output is not None:
        facts.append(f"output {format_extents(root.output)}")
    facts.append(format_count(root.parameters, "parameter"))
    facts += [f"{root.macs:,} MACs"] if root.macs is not None else []
    return f"{named}{clean(root.title)}, {model.source}: {', '.join(facts)}"


class _ArchitectureRow(NamedTuple):
    """One row of a table of layers."""

    name: str
    text: str
    output: str
    parameters: str
    macs: str


def _layer_rows(root: ArchitectureLayer, level: int = 1) -> Iterator[_ArchitectureRow]:
    """Yield a row per layer below the root, alike ones once."""
    start = f"{root.path}/" if root.path else ""
    for entry in fold_alike(root.below):
        group = entry if isinstance(entry, LayerGroup) else LayerGroup(entry, 1, entry)
        layer, number = group.first, group.number
        name = f"...{group.last.name}" if number > 1 else ""
        text = layer.title if number == 1 else f"{layer.title} (x{number})"
        sources = (
            f"<- {', '.join(source.rpartition('/')[2] for source in layer.inputs)}" if layer.inputs else ""
        )
        yield _ArchitectureRow(
            f"{'  ' * level}{clean(layer.path.removeprefix(start))}{clean(name)}",
            clean("  ".join(filter(None, (text, layer.detail, sources)))),
            "" if layer.output is None else format_extents(layer.output),
            f"{layer.parameters * number:,}" if layer.parameters else "",
            f"{layer.macs * number:,}" if layer.macs else "",
        )
        yield from _layer_rows(layer, level + 1)


def _layer_table(rows: Sequence[_ArchitectureRow]) -> list[str]:
    """Return the rows in columns; on a terminal, they fit its width."""
    cut = sys.stdout.isatty()
    titles = _ArchitectureRow("", "", "output", "parameters", "MACs")
    every = [titles, *rows]
    output, parameters, macs = (max(len(row[at]) for row in every) for at in (2, 3, 4))
    name, text = (max(len(row[at]) for row in every) for at in (0, 1))
    room = terminal_width() - output - parameters - macs - 8
    if cut and name + text > room:
        name = min(name, max(_LAYER_NAME, room - text), max(SHORTEST_PATH, room // 2))
        text = max(SHORTEST_PATH, room - name)
    fit = shorten if cut else keep_whole
    lines = [
        f"{fit(row.name, name):<{name}}  {fit(row.text, text):<{text}}  {row.output:<{output}}"
        f"  {row.parameters:>{parameters}}  {row.macs:>{macs}}".rstrip()
        for row in every
    ]
    return [dim(lines[0]), *lines[1:]]
