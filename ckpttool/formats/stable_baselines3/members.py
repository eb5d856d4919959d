"""The members of an agent's zip, or the files of the folder that it was unpacked into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ckpttool import places
from ckpttool.source import File, Span, Storage
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format


class Members(NamedTuple):
    """Every member's bytes by its name, unread; `packed` says that they lie in one zip with checksums."""

    sources: Mapping[str, Storage]
    files: tuple[File, ...]
    packed: bool


def opened(location: str) -> Members:
    """Return the members; those of a folder are its plain files, and no link is followed."""
    if places.isdir(location):
        paths = {name: os.path.join(location, name) for name in sorted(places.listdir(location))}
        plain = (name for name, path in paths.items() if places.isfile(path) and not places.islink(path))
        files = {name: File.stamp(paths[name]) for name in plain}
        sources = {name: Span(file, 0, file.size) for name, file in files.items()}
        return Members(sources, tuple(files.values()), packed=False)
    archive = zip.read(File.stamp(location))
    names = [name for name in archive.members if not name.endswith("/")]
    return Members({name: archive.source(name) for name in names}, (archive.file,), packed=archive.recorded)
