"""The commands that tell of ckpttool itself: what is installed, what a file may ask, what JSON looks like."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ckpttool import limits as bounds
from ckpttool.cli import completing, output
from ckpttool.cli.options import AsJson, Quiet


def formats(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the formats: which can be read, which written."""
    return _listing("formats", as_json=as_json)


def layouts(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the agent layouts: which are recognised, which can be written."""
    return _listing("layouts", as_json=as_json)


def backends(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the backends that play agents, and the extra that a missing one needs."""
    return _listing("backends", as_json=as_json)


def limits(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List what a file may ask of its reader, by the names that --limit takes."""
    if as_json:
        output.write(output.document({"limits": bounds.document()}))
    else:
        from ckpttool.cli import tables

        output.write(tables.limits(bounds.document()))
    return 0


def _listing(kind: Any, *, as_json: bool) -> int:
    from ckpttool.ops.listing import listing

    found = listing(kind)
    if as_json:
        output.write(output.document({kind: [row.document() for row in found]}))
    else:
        from ckpttool.cli import tables

        output.write(tables.listing(kind, found))
    return 0


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Whose: a command's name, error, result or sidecar.",
            show_default=False,
            autocompletion=completing.schemas,
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,  # noqa: ARG001
) -> int:
    """List the JSON Schemas of what --json prints, or print one to check documents with."""
    from ckpttool.ops import schemas as op

    if name is None:
        rows = op.listing()
        if as_json:
            output.write(output.document({"schemas": [row.document() for row in rows]}))
        else:
            from ckpttool.cli import tables

            output.write(tables.schemas(rows))
        return 0
    content = op.schema(name)
    if as_json:
        (row,) = (row for row in op.listing() if row.name == name)
        output.write(output.document({"schemas": [{**row.document(), "content": content}]}))
    else:
        output.write(json.dumps(content, indent=1))
    return 0
