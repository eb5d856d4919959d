"""`schema`: lists the JSON Schemas of our documents, or prints one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpttool.cli import completing, output
from ckpttool.cli.options import AsJson, Quiet

EXAMPLES = "Examples: ckpttool schema; ckpttool schema inspect > inspect.schema.json"


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
