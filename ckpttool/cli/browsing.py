"""The command that needs a person: `browse`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli.options import Glob, LayoutOption, PathArgument, Quiet
from ckpttool.errors import UsageError


def browse(
    path: PathArgument,
    other: Annotated[
        str | None,
        typer.Argument(metavar="[PATH]", help="Another one: what differs is marked.", show_default=False),
    ] = None,
    glob: Glob = None,
    by: Annotated[
        str, typer.Option(metavar="HOW", help="What is compared: path, agent or auto, as diff has it.")
    ] = "auto",
    layout: LayoutOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Refused: inspect, stats and diff have the documents.")
    ] = False,
    quiet: Quiet = False,  # noqa: ARG001  # every command takes it
) -> int:
    """Walk through a checkpoint in the terminal: tree, values, histograms, search, differences.

    Tensors are read when they are looked at. ? shows the keys, q leaves.
    """
    if as_json:
        from ckpttool.ops.findings import command

        raise UsageError("browse shows a screen and has no document", hint=command("inspect", path, "--json"))
    from ckpttool.browser.start import browse as op

    return op(path, other, glob=glob, by=by, layout=layout)
