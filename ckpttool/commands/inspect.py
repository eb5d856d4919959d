"""Inspect a checkpoint: its contents, without reading a tensor."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from ckpttool.core import filesystem, plugins, urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import keep_open
from ckpttool.core.text import describe_record, render_record
from ckpttool.formats.detect import open_checkpoint, resolve
from ckpttool.listing.contents import CheckpointSummary, summarize_checkpoint
from ckpttool.listing.rows import CheckpointRow


def summary(path: str, glob: str | None = None, layout: str | None = None) -> CheckpointSummary:
    """List the checkpoint at the path; `glob` selects tensors and values by path.

    `layout` names the layout that recognises it; without it, all are tried.

    >>> import ckpttool
    >>> listing = ckpttool.summary("sample_ckpts/td3_pendulum_tf/ckpt-15000")
    >>> listing.layout, listing.totals.parameters, len(listing.tensors)
    ('td3_tf', 27142, 78)
    """
    with keep_open():
        return summarize_checkpoint(open_checkpoint(path), glob, layout)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints of which none is marked as the latest."""

    __repr__ = describe_record
    _repr_html_ = render_record

    path: str
    checkpoints: tuple[CheckpointRow, ...]
    notes: tuple[str, ...]
    hint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document: that of `inspect`, without a checkpoint."""
        return {
            "path": urls.display_url(self.path),
            **dict.fromkeys(("format", "writer", "layout")),
            "tensors": [],
            "values": [],
            "totals": {**dict.fromkeys(("tensors", "parameters", "nbytes", "stored_nbytes"), 0), "roles": {}},
            "modules": [],
            "notes": [*self.notes, self.hint],
            "asks": None,
            "details": {},
            "checkpoints": [listed.document() for listed in self.checkpoints],
        }

    listed = document


def inspect_path(
    path: str, glob: str | None = None, layout: str | None = None
) -> CheckpointSummary | CheckpointFolder:
    """Inspect the checkpoint at the path; for a folder of checkpoints, list them and inspect the latest.

    A folder of folders stands for its only checkpoint, or for its highest number (`MODEL/123`). For a
    folder of several checkpoints without a marked latest one, return a CheckpointFolder. Raise whatever
    `summary` raises.
    """
    from ckpttool.libraries.schema import NO_LAYOUT  # other commands import this module

    path = filesystem.resolve_path(path)
    if layout not in (None, NO_LAYOUT):
        plugins.find("layouts", layout)  # a list of checkpoints recognises none
    with filesystem.read_session():
        return _inspect_path(path, glob, layout) if filesystem.isdir(path) else summary(path, glob, layout)


def _inspect_path(path: str, glob: str | None, layout: str | None) -> CheckpointSummary | CheckpointFolder:
    from ckpttool.listing import folder

    try:
        latest = resolve(path).location
    except CkpttoolError as error:
        return _without_latest(path, error, glob, layout)
    result = summary(path, glob, layout)
    home = folder.run_folder(latest, path)
    if home is None:
        return result
    state, notes = folder.read_state_file(home)
    listed = folder.list_by_step(home, state, latest)
    return replace(
        result, checkpoints=tuple(folder.add_training_counts(listed)), notes=(*result.notes, *notes)
    )


def _without_latest(
    path: str, error: CkpttoolError, glob: str | None, layout: str | None
) -> CheckpointSummary | CheckpointFolder:
    from ckpttool.listing import folder, paths

    state, notes = folder.read_state_file(path)
    listed = folder.list_by_step(path, state, None)
    whole = [entry for entry in listed if entry.complete and entry.format is not None]
    choice = paths.choose_checkpoint(path) if state is None else paths.CheckpointChoice(path, path)
    if choice.location != path:
        result = summary(choice.location, glob, layout)
        listed = folder.expand_run(listed, path)
        listed = [replace(entry, latest=entry.path == choice.location) for entry in listed]
        return replace(result, checkpoints=tuple(folder.add_training_counts(listed)))
    if len(listed) < 2 and choice.candidates:
        notes = [f"deeper folders were not searched: ckpttool check {shlex.quote(path)} searches all"]
        return CheckpointFolder(
            path,
            tuple(folder.add_training_counts([*choice.candidates])),
            tuple(notes if choice.deeper else ()),
            choice.hint,
        )
    if len(listed) < 2 or not whole:
        raise error
    if state is not None:
        notes = [*notes, error.message]
    return CheckpointFolder(
        path,
        tuple(folder.add_training_counts(listed)),
        tuple(notes),
        choice.hint
        if choice.folders > 1
        else f"no checkpoint is marked as the latest; inspect {urls.display_url(whole[-1].path)}",
    )
