"""Tables, labeled lines and remarks in the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.cli.styles import adopt_rich_styles, has_colors, strip_line_end, terminal_width, wrap_sentence
from ckpttool.core import deferred, sidecar
from ckpttool.core.text import clean

if TYPE_CHECKING:
    from ckpttool.commands.plugin_rows import PluginRow
    from ckpttool.commands.schemas import SchemaRow
    from ckpttool.core.sidecar import LedgerEntry


SHOWN = 12


def render_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; a column is its title and "left", "right" or "path" (which wraps if needed)."""
    # Imported here because output without a table, e.g. a conversion's, does not need it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, kind in columns:
        table.add_column(
            title, justify="right" if kind == "right" else "left", no_wrap=kind != "path", overflow="fold"
        )
    for row in rows:
        table.add_row(*(clean(cell).replace("[", r"\[") for cell in row))
    colours: Literal["auto"] | None = "auto" if has_colors() else None
    console = Console(
        file=io.StringIO(), width=terminal_width(), force_terminal=has_colors(), color_system=colours
    )
    console.print(table)
    text = adopt_rich_styles(console.file.getvalue())  # type: ignore[attr-defined]  # the StringIO given above
    return "\n".join(map(strip_line_end, text.splitlines()))


def labeled_lines(label: str, names: Sequence[str]) -> list[str]:
    """Return a line for each name, at most a dozen."""
    shown = [f"{label}: {clean(name)}" for name in names[:SHOWN]]
    return shown + ([f"{label}: and {len(names) - SHOWN} more"] if len(names) > SHOWN else [])


# Sentence about an optimizer default (libraries/optimizers_read.py).
_DEFAULT = deferred.compile(
    r"(?P<lead>.*: )?(?P<optimizer>\S+) (?P<setting>\S+ = \S+) "
    r"\(default of (?P<whose>[^;()]+); the checkpoint does not hold it\)"
)


def merge_default_sentences(lines: Sequence[str]) -> list[str]:
    """Merge sentences about optimizer defaults that are the same for several optimizers."""
    defaults = {text: match for text in lines if (match := _DEFAULT.fullmatch(text))}
    settings: dict[tuple[str, str], dict[str, list[str]]] = {}
    for match in defaults.values():
        own = settings.setdefault((match["lead"] or "", match["optimizer"]), {})
        own.setdefault(match["whose"], []).append(match["setting"])
    groups: dict[tuple[str, str], list[str]] = {}
    for (lead, optimizer), own in settings.items():
        shown = "; ".join(f"{', '.join(settings)} (default of {owner})" for owner, settings in own.items())
        groups.setdefault((lead, shown), []).append(optimizer)
    joined = {
        (lead, optimizer): f"{lead}{' and '.join(optimizers)}: {shown}; the checkpoint does not hold them"
        for (lead, shown), optimizers in groups.items()
        for optimizer in optimizers
    }
    return list(
        dict.fromkeys(
            joined[defaults[text]["lead"] or "", defaults[text]["optimizer"]] if text in defaults else text
            for text in lines
        )
    )


def render_remarks(
    assumed: Sequence[str], notes: Sequence[str], entries: Iterable[LedgerEntry] = ()
) -> list[str]:
    """Return the ledger, assumptions and notes; in a pipe, one line each."""
    lines = [
        *map(clean, sidecar.describe_entries(entries)),
        *labeled_lines("assumed", merge_default_sentences(assumed)),
    ]
    lines += [f"note: {clean(note)}" for note in merge_default_sentences(notes)]
    return [wrap_sentence(line) for line in lines]


def render_plugins(kind: str, rows: Sequence[PluginRow]) -> str:
    """Return a row per format, layout or backend."""
    if kind == "backends":
        first = (("backend", "left"), ("installed", "left"), ("what", "path"))
        return render_table(first, ((r.name, _installed_cell(r), r.title) for r in rows))
    columns = [(kind[:-1], "left"), ("reads", "left"), ("writes", "left"), ("what", "path")]
    cells = [[r.name, _yes_or_no(r.reads), _yes_or_no(r.writes), r.title] for r in rows]
    if kind == "layouts":
        # Mark layouts that were written from the library's source alone, without testing real files.
        columns.insert(3, ("tried", "left"))
        for row, cell in zip(rows, cells, strict=True):
            cell.insert(3, _yes_or_no(bool(row.seen)))
    return render_table(columns, cells)


def render_schemas(rows: Sequence[SchemaRow]) -> str:
    """Return a row per JSON Schema."""
    return render_table(
        (("schema", "left"), ("description", "path")), ((row.name, row.title) for row in rows)
    )


def render_limits(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per limit; values changed by the user are starred."""
    columns = (("limit", "left"), ("value", "right"), ("description", "path"))
    changed = ("", " *")
    cells = ((r["name"], f"{r['value']:,}{changed[r['value'] != r['default']]}", r["meaning"]) for r in rows)
    return render_table(columns, cells)


def _yes_or_no(value: bool | None) -> str:
    return "yes" if value else "no"


def _installed_cell(row: PluginRow) -> str:
    from ckpttool.core.installation import install_extra

    if row.available or row.extra is None:
        return "yes" if row.available else "no"
    return f"no: {install_extra(row.extra)}"
