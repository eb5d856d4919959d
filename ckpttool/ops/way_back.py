"""Whether a conversion goes back to where its source came from, and then the source itself."""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.layouts import variables
from ckpttool.ops import undone
from ckpttool.ops.request import Request
from ckpttool.ops.targets import TARGETS, TargetKind
from ckpttool.ops.undone import Undone
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

# The formats that store what a torch program handed them, and nothing of their own.
CONTAINERS = frozenset(("pytorch", "pytorch_legacy", "pytorch_tar", "pytorch_dcp", "safetensors", "sharded"))


def way_back(checkpoint: Checkpoint, request: Request, known: Sidecar | None, tree: Tree) -> Undone:
    """Return what the checkpoint was converted from if that is wanted; if it cannot be, a note why."""
    if not (request.whole and request.plain) or known is None or known.undo is None:
        return Undone()
    if not _returns(known, request.kind):
        return Undone()
    found = undone.undone(tree, known.undo, checkpoint.path)
    if found.tree is None:
        return found
    if request.kind.state and request.by_name != variables.by_name(found.tree):
        return Undone()
    said = f"undone: every entry is as it was in {(known.source or {}).get('path')}"
    return found._replace(note=said)


def _returns(known: Sidecar, kind: TargetKind) -> bool:
    """Say whether the target is what the sidecar's checkpoint was converted from, by format and layout."""
    before, layout = (known.source or {}).get("format"), (known.source or {}).get("layout")
    if before != kind.format and not {before, kind.format} <= CONTAINERS:
        return False
    # A library's own form is asked for by the library's name.
    others = {each.layout for each in TARGETS.values() if each.agent}
    return layout == kind.layout or (not kind.agent and layout not in others)
