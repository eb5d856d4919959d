"""Views of the modules under a branch, as text and as HTML without scripts, with every name escaped."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.text import clean, format_count, format_size, shorten
from ckpttool.core.tree import Leaf, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.core.handles import Handle

# Rows that are readable in a terminal and in a notebook cell.
MOST = 48
_MAX_VALUE_TEXT = 120
Listed = tuple[str, Leaf | ValueLeaf]


@dataclass(slots=True)
class OutlineRow:
    """One row: its name, its leaf or the module's totals, and child rows; `more` counts omitted rows."""

    name: str
    leaf: Leaf | ValueLeaf | None = None
    below: dict[str, OutlineRow] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0
    more: int = 0

    @property
    def beside(self) -> str:
        """Text beside the name: a tensor's type and shape, a module's totals."""
        if self.leaf is None:
            return f"{format_count(self.tensors, 'tensor')}, {format_size(self.nbytes)}"
        if isinstance(self.leaf, ValueLeaf):
            value = self.leaf.value
            # A value can be a text of megabytes.
            return shorten(
                clean(repr(value[:_MAX_VALUE_TEXT] if isinstance(value, str | bytes) else value)),
                _MAX_VALUE_TEXT,
            )
        extents = ", ".join(map(str, self.leaf.shape))
        role = "" if self.leaf.role == "parameter" else f" {self.leaf.role}"
        return f"{self.leaf.dtype}[{extents}]{role}"


def build_outline(leaves: Iterable[Listed], most: int = MOST) -> OutlineRow:
    """Return the root row of named leaves with about `most` rows under it, outermost first."""
    root = OutlineRow("")
    for name, leaf in leaves:
        _add_leaf(root, name, leaf)
    room = most
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        shown = list(node.below)[: max(room, 0)]
        if node is not root and len(shown) < len(node.below):
            shown = []  # a module is unfolded completely or not at all
        node.more = len(node.below) - len(shown)
        node.below = {name: node.below[name] for name in shown}
        room -= len(shown)
        waiting.extend(node.below.values())
    return root


def _add_leaf(root: OutlineRow, name: str, leaf: Leaf | ValueLeaf) -> None:
    way = [root]
    for step in name.split("/"):
        if step not in way[-1].below:
            way[-1].below[step] = OutlineRow(step)
        way.append(way[-1].below[step])
    way[-1].leaf = leaf
    if isinstance(leaf, Leaf):
        for node in way:
            node.tensors += 1
            node.nbytes += leaf.nbytes


def render_lines(title: str, leaves: Iterable[Listed], width: int) -> Iterator[str]:
    """Yield the lines for a terminal of that width."""
    root = build_outline(leaves)
    yield shorten(clean(title), width)
    yield from _row_lines(root, "  ", width)


def _row_lines(node: OutlineRow, indent: str, width: int) -> Iterator[str]:
    for child in node.below.values():
        mark = "/" if child.below or child.more else ""
        yield shorten(f"{indent}{clean(child.name)}{mark}  {child.beside}", width)
        yield from _row_lines(child, f"{indent}  ", width)
    if node.more and not node.name:
        yield f"{indent}and {node.more:,} more"


_MAX_HTML_TEXT = 160
_MAX_HTML_ROWS = 12
_FEW_NUMBERS = 8
_MAX_HTML_COLUMNS = 12
# JupyterLab aligns all cells to the right, which suits numbers only.
_LEFT = ' style="text-align:left"'
_ROW = '<div style="margin-left:1.2em">'
_BESIDE = '<span style="opacity:.7">'


def render_handle(shown: Handle) -> str:
    """Return a table of the tensor's facts."""
    facts = {
        "type": shown.dtype,
        "shape": "[" + ", ".join(map(str, shown.shape)) + "]",
        "bytes": f"{shown.nbytes:,}",
        "role": shown.role,
        "key": shown.key,
        "also": ", ".join(shown.aliases[:8]),
    }
    rows = "".join(
        f"<tr><th>{name}</th><td{_LEFT}>{html_text(value)}</td></tr>"
        for name, value in facts.items()
        if value
    )
    return f"<table><caption>{html_text(shown.name)}</caption>{rows}</table>"


def render_branch(title: str, leaves: Iterable[Listed]) -> str:
    """Return the modules as a tree that unfolds without a script, limited to a few dozen rows."""
    root = build_outline(leaves)
    inside = "".join(_html_rows(root))
    return f"<details open><summary><b>{html_text(title)}</b></summary>{inside}</details>"


def _html_rows(node: OutlineRow) -> Iterator[str]:
    for child in node.below.values():
        sentence = f"<code>{html_text(child.name)}</code> {_BESIDE}{html_text(child.beside)}</span>"
        if child.below:
            inside = "".join(_html_rows(child))
            yield f"{_ROW}<details><summary>{sentence}</summary>{inside}</details></div>"
        else:
            yield f"{_ROW}{sentence}</div>"
    if node.more and not node.name:
        yield f"{_ROW}and {node.more:,} more</div>"


def render_result(record: Any) -> str:
    """Return the HTML of a command's result for a notebook: its JSON document as a table.

    A list of objects is a table of its first rows.
    """
    rows = "".join(
        f"<tr><th>{html_text(name)}</th><td{_LEFT}>{_html_value(value)}</td></tr>"
        for name, value in record.document().items()
        if value not in (None, [], {})
    )
    return f"<table><caption>{html_text(type(record).__name__)}</caption>{rows}</table>"


# Above it, a notebook is slow to open and to save.
_MAX_EMBEDDED = 8_000_000
_MEDIA_TYPES = {".gif": "image/gif", ".png": "image/png", ".svg": "image/svg+xml", ".mp4": "video/mp4"}


def render_file(record: Any) -> str:
    """Return the page, picture or film that a result's `file` contains, else the result's table.

    Scripts of a page run in its frame alone, without access to the notebook.
    """
    from base64 import b64encode  # only notebooks need both
    from html import escape

    suffix = os.path.splitext(record.file)[1].lower()
    try:
        if os.path.getsize(record.file) > _MAX_EMBEDDED:
            return render_result(record)
        with open(record.file, "rb") as stream:
            content = stream.read()
    except OSError:  # it was moved: its facts remain
        return render_result(record)
    name = escape(os.path.basename(record.file))
    if suffix not in _MEDIA_TYPES:
        page = escape(content.decode(errors="replace"))
        frame = 'sandbox="allow-scripts" width="100%" height="640"'
        return f'<iframe title="{name}" {frame} srcdoc="{page}"></iframe>'
    source = f"data:{_MEDIA_TYPES[suffix]};base64,{b64encode(content).decode()}"
    if suffix == ".mp4":
        return f'<video controls loop title="{name}" src="{source}"></video>'
    return f'<img alt="{name}" src="{source}">'


def _html_value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return _html_table(value)
    return html_text(_plain_text(value))


def _html_table(objects: list[dict[str, Any]]) -> str:
    """Return the first objects of a list, one per row; a column for each member with a text in any row."""
    rows = [_table_row(object_) for object_ in objects[:_MAX_HTML_ROWS]]
    columns = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in columns if any(row.get(name) for row in rows)][:_MAX_HTML_COLUMNS]
    # A column is aligned by its first text.
    styles = {name: _alignment(next(row[name] for row in rows if row.get(name))) for name in names}
    head = "".join(f"<th{styles[name]}>{html_text(name)}</th>" for name in names)
    cells = (
        "".join(f"<td{styles[name]}>{html_text(row.get(name) or '')}</td>" for name in names) for row in rows
    )
    body = "".join(f"<tr>{cell}</tr>" for cell in cells)
    more = f"<tr><td>{len(objects) - len(rows):,} more</td></tr>" if len(objects) > len(rows) else ""
    return f"<table><tr>{head}</tr>{body}{more}</table>"


def _table_row(object_: dict[str, Any]) -> dict[str, str]:
    """Return the texts of an object by column; numbers in one member have a column each."""
    row: dict[str, str] = {}
    for name, value in object_.items():
        if isinstance(value, dict) and sum(isinstance(item, int | float) for item in value.values()) > 2:
            row |= {f"{name} {key}" if key in row else key: _short_text(item) for key, item in value.items()}
        else:
            row[name] = _cell(value)
    return row


def _alignment(text: str) -> str:
    """Return the attribute of a cell: numbers are aligned to the right."""
    try:
        float(text)
    except ValueError:
        return _LEFT
    return ""


def _cell(value: Any) -> str:
    """Return the text of a table's cell; none for a list of lists or objects, e.g. the keys of a path."""
    nested = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    return "" if nested else _plain_text(value)


def _plain_text(value: Any) -> str:
    """Return a JSON value as one line; nested lists and objects by their members, or by their number."""
    if isinstance(value, dict) and isinstance(value.get("shape"), list) and "dtype" in value:
        return f"{value['dtype']}{value['shape']}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_short_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short_text, value))
    return _short_text(value)


def _short_text(value: Any) -> str:
    if isinstance(value, list) and len(value) <= _FEW_NUMBERS and all(type(item) is int for item in value):
        return str(value)  # a shape or an index
    if isinstance(value, dict | list):
        return format_count(len(value), "entry", "entries")
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def html_text(text: str) -> str:
    """Return text from a file for HTML: escaped, without control characters, and shortened."""
    from html import escape  # only notebooks need it

    return escape(shorten(clean(text), _MAX_HTML_TEXT))
