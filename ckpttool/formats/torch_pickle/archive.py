"""torch.save's archive, wherever it lies: in a file, in a member of another archive, in a folder.

Source: torch/serialization.py (_save, _load), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle import listing, names, script
from ckpttool.formats.torch_pickle.storages import Storages
from ckpttool.formats.torch_pickle.tensors import BUILDERS
from ckpttool.formats.torch_pickle.tree import Members
from ckpttool.source import Deflated, File, Shape, Span, Storage
from ckpttool.wire import (
    pickle_reader,
    zip,  # noqa: A004 - the module is named by its format
)
from ckpttool.wire.asked import standing

_SMALL = 64
_NUMBER = re.compile(rb"[0-9]{1,9}\n?")


class Archive(Protocol):
    """The members of a zip file, or of a folder into which one was unpacked."""

    @property
    def file(self) -> File:
        """What errors name."""
        ...

    @property
    def members(self) -> Mapping[str, object]:
        """The members by name."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether there are checksums."""
        ...

    def source(self, name: str) -> Storage:
        """Return a member's bytes, unread."""
        ...


def listed(archive: Archive) -> Listed:
    """List every tensor and value of the archive; nothing that the pickle names is imported or called.

    Raise FormatError when archive, pickle and storages do not fit together.
    """
    top = names.top(archive.members, archive.file.path)
    _require_small(archive, top)
    _require_numbers(archive, top)
    used: set[str] = set()
    found = (_script if script.is_script(archive.members, top) else _listed)(archive, top, used)
    return replace(found, notes=(*found.notes, *names.notes(archive.members, top, used)))


def _listed(
    archive: Archive,
    top: str,
    used: set[str],
    name: str = "data",
    *,
    notes: tuple[str, ...] = (),
    details: Mapping[str, Any] | None = None,
    classes: Mapping[str, Members] | None = None,
) -> Listed:
    storages = Storages(lambda key, nbytes: _place(archive, f"{top}/{name}", key, nbytes))
    pickled = _unpickled(archive, top, name, storages)
    used.update(f"{top}/{name}/{key}" for key in storages.known)
    return listing.listed(
        pickled,
        _writer(archive, top),
        big=_big(archive, top),
        integrity="crc32" if archive.recorded else "none",
        notes=notes,
        details=details,
        classes=classes,
    )


def _script(archive: Archive, top: str, used: set[str]) -> Listed:
    members = archive.members
    module = _listed(
        archive,
        top,
        used,
        notes=script.notes(members, top),
        details=script.facts(members, top, archive.source),
        classes=script.classes(members, top, archive.source),
    )
    found = script.joined(module, _listed(archive, top, used, "constants"))
    return replace(found, asks=(*script.asks(members, top), *found.asks))


def traced_inputs(archive: Archive, top: str) -> tuple[Shape, ...]:
    """Return the shapes of the inputs with which `forward` was traced, () where the archive has none.

    The archive records the inputs' types and shapes, and storages without their bytes.
    """
    if f"{top}/traced_inputs.pkl" not in archive.members:
        return ()
    storages = Storages(lambda _, nbytes: Span(archive.file, 0, nbytes))
    found = _unpickled(archive, top, "traced_inputs", storages)
    tree = listing.listed(found, "").tree
    return tuple(leaf.shape for path, leaf in tree.tensors() if path and path[0].value == "forward")


def _require_small(archive: Archive, top: str) -> None:
    """Read the small members that say how the archive was written: a checksum tells of damage there, too."""
    for name in names.beside(archive.members, top) if archive.recorded else ():
        if archive.source(name).length <= _SMALL:
            archive.source(name).read()


def _require_numbers(archive: Archive, top: str) -> None:
    """Raise FormatError unless version and alignment are the numbers that torch takes them for.

    torch reads no folders: there they decide nothing.
    """
    for name in ("version", ".storage_alignment") if isinstance(archive, zip.Archive) else ():
        said = _small(archive, f"{top}/{name}") or b""
        if f"{top}/{name}" in archive.members and not _NUMBER.fullmatch(said):
            raise FormatError(
                f"the archive's {name.removeprefix('.')} is no number",
                file=archive.file.path,
                found=repr(said),
            )


def _unpickled(archive: Archive, top: str, name: str, storages: Storages) -> pickle_reader.Read:
    # TorchScript has two pickles, each with a folder of its own for its storages.
    source = archive.source(f"{top}/{name}.pkl")
    found = pickle_reader.read(
        bytes(source.read()),
        persistent=storages.persistent,
        builders=BUILDERS,
        file=archive.file.path,
        base=(source.base if isinstance(source, Deflated) else source).offset,
    )
    return found._replace(asked=standing(found.asked, f"{top}/{name}.pkl"))


def _place(archive: Archive, folder: str, key: str, nbytes: int) -> Storage:
    name = f"{folder}/{key}"
    if name not in archive.members:
        raise FormatError(f"storage {key!r} is not in the archive")
    source = archive.source(name)
    if source.length != nbytes:
        raise FormatError(
            f"storage {key!r} does not have the size that the pickle says",
            expected=f"{nbytes:,} bytes",
            found=f"{source.length:,}",
        )
    return source


def _small(archive: Archive, name: str) -> bytes | None:
    """Return a small member's bytes, None when there is none."""
    if name not in archive.members or archive.source(name).length > _SMALL:
        return None
    return bytes(archive.source(name).read())


def _big(archive: Archive, top: str) -> bool:
    name = f"{top}/byteorder"
    order = _small(archive, name)
    # Compared as torch does: it takes no newline behind the word, either.
    if order not in (b"little", b"big") and name in archive.members:
        raise FormatError(
            "the byte order is not one that torch writes", file=archive.file.path, found=repr(order)
        )
    if order == b"big" and script.is_script(archive.members, top):
        # torch.jit.load does not look at it, and takes storages for little-endian ones.
        raise UnsupportedError("TorchScript of a big-endian machine", file=archive.file.path)
    return order == b"big"


def _writer(archive: Archive, top: str) -> str:
    kind = "TorchScript" if script.is_script(archive.members, top) else "torch"
    version = _small(archive, f"{top}/version") or _small(archive, f"{top}/.data/version")
    return f"{kind} archive version {version.decode('latin-1').strip()}" if version else f"{kind} archive"
