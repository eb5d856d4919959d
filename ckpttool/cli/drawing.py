"""Writes the drawing of `inspect --graph`: SVG, a page around it, or Graphviz's language."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO, Any

from ckpttool.cli.drawing_dot import dot
from ckpttool.cli.drawing_html import page
from ckpttool.cli.drawing_layout import layout
from ckpttool.cli.drawing_svg import svg
from ckpttool.errors import UsageError
from ckpttool.ops.drawing import Graph, graph
from ckpttool.ops.summary import Summary
from ckpttool.writing import Output, require_new, write_atomically

_WRITERS: dict[str, Callable[[Graph], str]] = {
    ".svg": lambda made: svg(layout(made)),
    ".html": lambda made: page(layout(made)),
    ".dot": dot,
}


def write(found: Summary, target: str, depth: int | None = None, *, force: bool = False) -> dict[str, Any]:
    """Draw a listing into a new file and return the JSON object that says what was drawn.

    The suffix says what is written. Raise UsageError for another suffix, TargetExistsError when the file is
    there and `force` is not given.
    """
    writer = _WRITERS.get(os.path.splitext(target)[1].lower())
    if writer is None:
        raise UsageError("the drawing's name does not say what to write", file=target, hint=f"{_NAMES}")
    require_new(target, found.checkpoint.files, force=force)
    made = graph(found, depth)
    content = writer(made).encode()
    write_atomically([Output(target, lambda stream: _put(stream, content))], force=force)
    return {
        "file": target,
        "modules": len(made.nodes),
        "edges": len(made.edges),
        "notes": list(made.notes),
    }


def _put(stream: IO[bytes], content: bytes) -> None:
    stream.write(content)


_NAMES = f"--graph takes a file that ends in {', '.join(_WRITERS)}"
