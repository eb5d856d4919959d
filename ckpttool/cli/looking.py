"""The commands that only look: `inspect` shows what is inside, `digest` gives what it is known by."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpttool.cli import completing, next_steps, output
from ckpttool.cli.options import AsJson, Glob, LayoutOption, PathArgument, Quiet
from ckpttool.cli.progress import progress


def inspect(
    path: PathArgument,
    glob: Glob = None,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Fold the modules at level N into one line each.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="file, size or name, in every module.",
            autocompletion=completing.among("file", "size", "name"),
        ),
    ] = "file",
    keys: Annotated[bool, typer.Option("--keys", help="Show the native keys as well.")] = False,
    aliases: Annotated[
        bool, typer.Option("--aliases", help="Show every other path of each tensor as well.")
    ] = False,
    names: Annotated[
        bool, typer.Option("--names", help="Show what loading it would import and call, with verdicts.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--all", help="Show all values, not the first twenty of very many.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if loading it asks for more than plain data.")
    ] = False,
    graph: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the modules instead, into a new .svg, .html or .dot file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the drawing if it exists.")] = False,
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show what is inside: module tree, shapes, types, roles, totals, layout.

    Of a folder of checkpoints, show these, and what is inside the latest one.
    """
    import gc

    from ckpttool.cli import inspection

    # A listing makes many objects and no rubbish: collecting would cost a fifth of its time.
    gc.disable()
    view = inspection.view(
        keys=keys, aliases=aliases, depth=depth, sort=sort, names=names, whole=whole, quiet=quiet
    )
    found = inspection.look(path, glob, layout)
    status = 1 if strict and not inspection.is_plain(found) else 0
    drawn = inspection.draw(found, graph, depth, force=force) if graph is not None else None
    if as_json:
        output.write(output.document({**found.document(), **({"graph": drawn} if drawn else {})}))
    else:
        output.write(inspection.text(found, view, drawn))
        next_steps.tell(next_steps.after_inspect, found, quiet=quiet or drawn is not None)
    return status


def digest(
    path: PathArgument,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a digest saved by --json, or with a sidecar."),
    ] = None,
    glob: Glob = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Print the sha256 of every tensor and of the whole; verify the format's checksums."""
    from ckpttool.ops import digest as op

    with progress("digest", quiet=quiet or as_json) as moving:
        found = op.digest(path, moving)
    compared = op.compare(found, check) if check is not None else None
    found = op.shown(found, glob)
    if as_json:
        output.write(output.document(_digest_document(found, compared)))
    else:
        from ckpttool.cli import tables

        output.write(tables.digest(found, compared, quiet=quiet))
        next_steps.tell(next_steps.after_digest, path, quiet=quiet)
    return 0 if compared is None or compared.equal else 1


def _digest_document(found: Any, compared: Any) -> dict[str, Any]:
    whole: dict[str, Any] = found.document()
    if compared is not None:
        whole["check"] = {
            "equal": compared.equal,
            "different": list(compared.different),
            "only_here": list(compared.only_here),
            "only_saved": list(compared.only_saved),
        }
    return whole
