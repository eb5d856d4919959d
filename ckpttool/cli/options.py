"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A file, a TensorFlow prefix, or a folder.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what was asked for: no progress.")]
Glob = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN", help="Only the tensors whose path matches: * in a segment, ** across them."
    ),
]
LayoutOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Read the source as this layout (see ckpttool layouts).")
]
