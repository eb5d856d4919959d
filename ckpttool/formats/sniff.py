"""Says what a file is that no format claims: the wrong download, another kind of archive, plain text."""

from __future__ import annotations

import os
import shlex
import zlib
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import limits
from ckpttool.errors import CkpttoolError, NotACheckpointError, NotFoundError, UnsupportedError
from ckpttool.formats.probe import Probe

if TYPE_CHECKING:
    from ckpttool.wire.asked import Asked


class _Known(NamedTuple):
    start: bytes
    what: str
    hint: str | None = None
    at: int = 0


# RFC 1952; the opcode PROTO (Lib/pickle.py), which every pickle since version 2 begins with.
_GZIP, _PICKLE, _SHOWN = b"\x1f\x8b", b"\x80", 64
_TAR = "tar://MEMBER::ARCHIVE reads a member of a tar archive, compressed or not"
_JOBLIB = "where you trust it, joblib.load reads it in Python, and numpy.savez writes its arrays"
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
    _Known(b"\x78\x01", "zlib data, perhaps a joblib file", _JOBLIB),
    _Known(b"\x78\x5e", "zlib data, perhaps a joblib file", _JOBLIB),
    _Known(b"\x78\x9c", "zlib data, perhaps a joblib file", _JOBLIB),
    _Known(b"\x78\xda", "zlib data, perhaps a joblib file", _JOBLIB),
    _Known(b"ustar", "a tar archive", _TAR, 257),
)


def explain(probe: Probe) -> CkpttoolError:
    """Return the error that names what is at the path."""
    head = probe.head
    if probe.refused is not None:
        return probe.refused
    if not head and probe.size:
        return NotFoundError("the file cannot be read", file=probe.path)
    if not head:
        return NotACheckpointError("the file is empty", file=probe.path)
    wrong = _wrong(head)
    if wrong is not None and head.startswith(_GZIP) and _unpacked(head).startswith(_PICKLE):
        plain = shlex.quote(f"{os.path.splitext(probe.name)[0]}-unpacked.pkl")
        hint = f"gzip -dc {shlex.quote(probe.path)} > {plain}; ckpttool inspect {plain}"
        return NotACheckpointError("this is a pickle packed by gzip", file=probe.path, hint=hint)
    if wrong is not None:
        return NotACheckpointError(f"this is {wrong.what}", file=probe.path, hint=wrong.hint)
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
    return NotACheckpointError(
        "unrecognised file format",
        file=probe.path,
        found=f"{shown} at the start",
        hint="ckpttool formats lists what can be read",
    )


def _unpacked(head: bytes) -> bytes:
    """Return the first bytes that a gzip member holds, none of what is damaged."""
    try:
        return zlib.decompressobj(31).decompress(head, _SHOWN)
    except zlib.error:
        return b""


def _wrong(head: bytes) -> _Known | None:
    start = head.lstrip()[:64].lower()
    for known in _WRONG:
        if head.startswith(known.start, known.at) or (not known.at and start.startswith(known.start)):
            return known
    return None


def is_other(probe: Probe) -> bool:
    """Say whether a file that no format claims belongs to another program: text, a model that only runs."""
    if not probe.head or _wrong(probe.head) is not None:
        return False
    if _is_text(probe.head):
        return True
    from ckpttool.formats import sniff_models

    model = sniff_models.known(probe.head)
    return model is not None and not model.weights and not (model.graph and _is_large(probe))


def operations(probe: Probe) -> tuple[Asked, ...]:
    """Return what running a graph of TensorFlow would do to the machine; nothing for another file."""
    from ckpttool.formats import sniff_models
    from ckpttool.formats.saved_model import asking

    model = sniff_models.known(probe.head)
    if model is None or not model.graph or _is_large(probe):
        return ()
    return asking.asks([memoryview(probe.start(probe.size))], probe.name)


def _is_large(probe: Probe) -> bool:
    return probe.size > limits.current().graph_bytes


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
