"""Says what a file is that no format claims: the wrong download, another kind of archive, plain text."""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.errors import CkpttoolError, NotACheckpointError, UnsupportedError
from ckpttool.formats.probe import Probe


class _Known(NamedTuple):
    start: bytes
    what: str
    hint: str | None = None
    at: int = 0


_TAR = "tar://MEMBER::ARCHIVE reads a member of a tar archive, compressed or not"
_ZIP = "zip://MEMBER::ARCHIVE reads a member of it"
# First bytes, in the order of asking. Sources: the Git LFS pointer specification, RFC 1952, the HDF5
# file format specification section II.A, APPNOTE.TXT, POSIX.1-2017 pax (ustar).
_WRONG = (
    _Known(b"version https://git-lfs", "a Git LFS pointer, not the file itself", "git lfs pull"),
    _Known(b"<!doctype html", "an HTML page, not a checkpoint", "download the file itself"),
    _Known(b"<html", "an HTML page, not a checkpoint", "download the file itself"),
    _Known(b"\x1f\x8b", "a gzip archive", _TAR),
    _Known(b"BZh", "a bzip2 archive", _TAR),
    _Known(b"\xfd7zXZ\x00", "an xz archive", _TAR),
    _Known(b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    _Known(b"ustar", "a tar archive", _TAR, 257),
)


def explain(probe: Probe) -> CkpttoolError:
    """Return the error that names what is at the path."""
    head = probe.head
    if not head:
        return NotACheckpointError("the file is empty", file=probe.path)
    start = head.lstrip()[:64].lower()
    for known in _WRONG:
        if head.startswith(known.start, known.at) or (not known.at and start.startswith(known.start)):
            return NotACheckpointError(f"this is {known.what}", file=probe.path, hint=known.hint)
    if probe.damage is not None:
        return probe.damage
    if head.startswith(b"PK"):
        return _zipped(probe)
    if _is_text(head):
        return NotACheckpointError("this is a text file, not a checkpoint", file=probe.path)
    from ckpttool.formats import sniff_models

    model = sniff_models.known(head)
    if model is not None:
        return NotACheckpointError(f"this is {model.what}", file=probe.path, hint=model.hint)
    shown = head[:8].hex(" ")
    return NotACheckpointError("no format knows these bytes", file=probe.path, found=f"{shown} at the start")


def _zipped(probe: Probe) -> CkpttoolError:
    from ckpttool.formats import sniff_models

    archive = sniff_models.archived(probe.members)
    if archive is not None:
        return NotACheckpointError(f"this is {archive.what}", file=probe.path, hint=archive.hint)
    what = "a zip archive without a data.pkl or model.weights.h5"
    return UnsupportedError(f"this is {what}, which is not read by itself", file=probe.path, hint=_ZIP)


def _is_text(head: bytes) -> bool:
    if any(byte < 32 and byte not in b"\t\n\r\f" for byte in head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut by the end of what was looked at.
        return error.start >= len(head) - 3
    return True
