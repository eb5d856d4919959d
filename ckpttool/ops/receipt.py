"""The receipt of a conversion: the sidecar that says what went where, by which rule, on what assumption."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpttool import documents
from ckpttool.checkpoint import Checkpoint
from ckpttool.leaf import ValueLeaf
from ckpttool.ops import knowledge
from ckpttool.ops.digest import Digest, digest_of
from ckpttool.ops.restore import Own, networks
from ckpttool.ops.route import Route
from ckpttool.ops.rows import shown_value
from ckpttool.sidecar import Sidecar

_LONGEST = 1000  # characters of a text in the sidecar


def receipt(
    checkpoint: Checkpoint, way: Route, own: Own, written: Digest, part: str | None = None
) -> Sidecar:
    """Return the target's sidecar: the source's facts (or the layout's habit) and how they were carried."""
    binding, report = way.binding, way.report
    base = own.sidecar or Sidecar("")
    if binding is not None:
        read = knowledge.of_files(binding, networks(way.source, binding))
        base = knowledge.merged(own.sidecar, read)
    if way.settings is not None:
        provenance = {name: said for name, said in base.provenance.items() if name != "optimizers"}
        if way.settings:
            provenance["optimizers"] = f"read from {os.path.basename(checkpoint.path)}"
        base = replace(base, optimizers=way.settings or None, provenance=provenance)
    return replace(
        base,
        target_sha256=written.sha256,
        source={
            "path": os.path.basename(checkpoint.path),
            "sha256": own.sha256 or digest_of(checkpoint).sha256,
            "format": checkpoint.format,
            "layout": binding.layout if binding is not None else None,
            **({"part": part} if part is not None else {}),
        },
        rules=[{"source": m.source, "target": m.target, "rule": m.rule} for m in report.mapped],
        assumed=report.assumed,
        objects=way.objects,
        stripped=way.stripped,
        residue=tuple(_residue(way, report.unused)),
    )


def _residue(way: Route, unused: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Go through what is left behind; of a value that is no tensor, what `inspect` shows of it."""
    values = {name: way.source[path] for path, name in way.names.items() if path in way.source}
    for name in unused:
        leaf = values.get(name)
        shown = shown_value(leaf) if isinstance(leaf, ValueLeaf) else {}
        value = shown.get("value")
        if isinstance(value, float):
            shown["value"] = documents.finite(value)
        elif isinstance(value, str):
            shown["value"] = value[:_LONGEST]
        yield {"path": name, **shown}
