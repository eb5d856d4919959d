"""`convert`: map a checkpoint to another framework, write it, read it back, and leave a receipt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckpttool import sidecar
from ckpttool.checkpoint import require_new
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.mapping.report import Report
from ckpttool.ops import receipt, save
from ckpttool.ops.plain_names import Wanted
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import own_sidecar
from ckpttool.ops.route import route


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did; `digest` is the target's (None for a dry run or a refusal).

    `written` says whether the target is there now.
    """

    source: str
    target: str
    report: Report
    digest: str | None
    written: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "source": self.source,
            "target": self.target,
            "mapped": [
                {
                    "source": line.source,
                    "target": line.target,
                    "rule": line.rule,
                    "shape_in": list(line.shape_in),
                    "shape_out": list(line.shape_out),
                }
                for line in self.report.mapped
            ],
            "unused": list(self.report.unused),
            "missing": list(self.report.missing),
            "assumed": list(self.report.assumed),
            "notes": list(self.report.notes),
            "digest": self.digest,
            "written": self.written,
        }


def convert(
    source: str,
    target: str,
    *,
    to: str | None = None,
    layout: str | None = None,
    part: str | None = None,
    strip: bool = False,
    restore: bool = False,
    fold_weight_norm: bool = False,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
    progress: Progress = silent,
) -> Conversion:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    `part` names a path: only what lies below it is converted. First, `strip` takes out of names what wrappers
    put into them, `restore` puts it back as the source's sidecar says, `fold_weight_norm` makes one weight of
    a direction and a length. Nothing is written when something is unmapped (unless `allow_missing`) or on
    `dry_run`. The target is written beside, read back, compared and then renamed; the same conversion gives
    the same bytes.
    """
    kind = save.target_kind(target, to)
    target = save.stem(target, kind)
    checkpoint = open_checkpoint(source)
    if not dry_run:
        save.require_free(target, kind, checkpoint.files, force=force)
        require_new(sidecar.beside(target), checkpoint.files, force=force)
    own = own_sidecar(checkpoint)
    way = route(checkpoint, kind, layout, own.sidecar, part, Wanted(strip, restore, fold_weight_norm))
    report = replace(way.report, notes=(*way.report.notes, *own.notes))
    if dry_run or not (report.complete or allow_missing):
        return Conversion(checkpoint.path, target, report, None, written=False)
    written = save.write(
        way.tree,
        target,
        kind,
        receipt=lambda digest: receipt.receipt(checkpoint, replace(way, report=report), own, digest, part),
        force=force,
        sync=sync,
        progress=progress,
    )
    return Conversion(checkpoint.path, target, report, written.sha256, written=True)
