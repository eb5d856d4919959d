"""torch.save's archive after somebody unpacked it: a folder with the members as files.

Source: torch/serialization.py (_save) for the members.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool import limits, places
from ckpttool.errors import FormatError, NotFoundError
from ckpttool.source import File, Span

TOP = "archive"
PICKLE = "data.pkl"


@dataclass(frozen=True, slots=True)
class Folder:
    """The members by the names that they would have in the zip file; `file` is the pickle's."""

    file: File
    members: Mapping[str, str]
    recorded: bool = False
    opened: dict[str, File] = field(default_factory=dict)

    def source(self, name: str) -> Span:
        """Return the member's bytes as an unread source; raise NotFoundError when the file is gone."""
        path = self.members.get(name)
        if path is None:
            raise FormatError(f"the folder has no file {name.removeprefix(f'{TOP}/')!r}", file=self.file.path)
        file = self.opened.setdefault(name, File.stamp(path))
        return Span(file, 0, file.size)


def inside(folder: str, names: frozenset[str]) -> str | None:
    """Return the folder that holds data.pkl: the one given, or the only thing in it; None if neither does."""
    if PICKLE in names:
        return folder if places.isfile(os.path.join(folder, PICKLE)) else None
    visible = [name for name in names if not name.startswith(".")]
    if len(visible) != 1:
        return None
    inner = os.path.join(folder, visible[0])
    return inner if places.isfile(os.path.join(inner, PICKLE)) else None


def read(folder: str) -> Folder:
    """List the files of an unpacked archive; raise FormatError for a link that leads out of it."""
    root = places.realpath(folder)
    members = {f"{TOP}/{name}": os.path.join(folder, name) for name in _files(folder, root)}
    return Folder(File.stamp(os.path.join(folder, PICKLE)), members)


def _files(folder: str, root: str, below: str = "", depth: int = 0) -> Iterator[str]:
    """Give the names, with slashes, of all plain files; links are followed inside of `root` only."""
    if depth > limits.current().folder_depth:
        raise limits.exceeded("folder_depth", "folders are nested too deeply", None, file=folder)
    try:
        entries = sorted(places.listdir(os.path.join(folder, below)))
    except OSError as error:
        raise NotFoundError(f"cannot be opened: {error.strerror}", file=folder) from error
    for entry in entries:
        name = f"{below}{entry}"
        path = os.path.join(folder, name)
        if places.islink(path):
            _check_link(path, root)
        if places.isdir(path) and not places.islink(path):
            yield from _files(folder, root, f"{name}/", depth + 1)
        elif places.isfile(path):
            yield name


def _check_link(path: str, root: str) -> None:
    target = places.realpath(path)
    if os.path.commonpath((target, root)) != root:
        raise FormatError("a link in the folder leads outside of it", file=path)
    if places.kind(target) != "file":
        raise FormatError("a link in the folder does not lead to a file", file=path)
