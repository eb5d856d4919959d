"""What a notebook shows of a checkpoint: HTML without scripts, in which every name is text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from ckpttool.face.outline import Listed, Node, outline
from ckpttool.shown import clean, shortened

if TYPE_CHECKING:
    from ckpttool.face.handle import Handle

_LONGEST = 160
_ROW = '<div style="margin-left:1.2em">'
_BESIDE = '<span style="opacity:.7">'


def handle(shown: Handle) -> str:
    """Return the table of a tensor's facts."""
    facts = {
        "type": shown.dtype,
        "shape": "[" + ", ".join(map(str, shown.shape)) + "]",
        "bytes": f"{shown.nbytes:,}",
        "role": shown.role,
        "key": shown.key,
        "also": ", ".join(shown.aliases[:8]),
    }
    rows = "".join(f"<tr><th>{name}</th><td>{_text(said)}</td></tr>" for name, said in facts.items() if said)
    return f"<table><caption>{_text(shown.name)}</caption>{rows}</table>"


def branch(title: str, leaves: Iterable[Listed]) -> str:
    """Return the modules as a tree that unfolds without a script, at most some dozens of rows."""
    root = outline(leaves)
    inside = "".join(_rows(root))
    return f"<details open><summary><b>{_text(title)}</b></summary>{inside}</details>"


def _rows(node: Node) -> Iterator[str]:
    for each in node.below.values():
        said = f"<code>{_text(each.name)}</code> {_BESIDE}{_text(each.beside)}</span>"
        if each.below:
            inside = "".join(_rows(each))
            yield f"{_ROW}<details><summary>{said}</summary>{inside}</details></div>"
        else:
            yield f"{_ROW}{said}</div>"
    if node.more and not node.name:
        yield f"{_ROW}and {node.more:,} more</div>"


def _text(said: str) -> str:
    return escape(shortened(clean(said), _LONGEST))
