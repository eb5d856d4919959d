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
_EXPORT = "load it with its own program and write its arrays with numpy.savez"
_NO_WEIGHTS = "name the file that holds the weights"
# Files of other programs, by first bytes that no text has or that a text begins with. Sources: the
# programs' own documents of their formats, by the names that are given here.
_OTHERS = (
    _Known(
        b"GGUF", "a GGUF model (llama.cpp), which is not read", "use the checkpoint that it was made from"
    ),
    *(
        _Known(magic, "a GGML model (llama.cpp, whisper.cpp), which is not read", _EXPORT)
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
    _Known(b"\xba\x16\x4f\x2f", "a fastText model, which is not read", _EXPORT),
    _Known(b"\x12\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "arrays of MXNet, which are not read", _EXPORT),
    _Known(
        b"MATLAB 5.0 MAT-file", "a file of MATLAB", "scipy.io.loadmat reads it; numpy.savez writes its arrays"
    ),
    _Known(b"SQLite format 3\0", "an SQLite database", _NO_WEIGHTS),
    _Known(b"PAR1", "a Parquet table", _NO_WEIGHTS),
    _Known(b"ARROW1", "an Arrow table", _NO_WEIGHTS),
    _Known(b"FEA1", "a Feather table", _NO_WEIGHTS),
    _Known(b"\x89PNG\r\n", "a PNG image", _NO_WEIGHTS),
    _Known(b"\xff\xd8\xff", "a JPEG image", _NO_WEIGHTS),
    _Known(b"GIF8", "a GIF image", _NO_WEIGHTS),
    _Known(b"%PDF-", "a PDF document", _NO_WEIGHTS),
    _Known(b"ftyp", "a video", _NO_WEIGHTS, 4),
    _Known(b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    _Known(b"Rar!\x1a\x07", "a RAR archive", "unpack it first"),
)
# What text files beside checkpoints are, by their suffixes.
_TEXTS = {
    **dict.fromkeys((".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".gin"), "settings"),
    **dict.fromkeys((".csv", ".tsv"), "a table"),
    **dict.fromkeys((".py", ".sh", ".ipynb"), "a program"),
    **dict.fromkeys((".log", ".txt", ".md"), "text"),
    ".xml": "XML, as OpenVINO describes models",
    ".prototxt": "the description of a Caffe model",
}


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
    if (named := _of_another(probe)) is not None:
        return named
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


def _of_another(probe: Probe) -> NotACheckpointError | None:
    """Return the error for a file of another program, or a text file, None for anything else."""
    head = probe.head
    other = next((known for known in _OTHERS if head.startswith(known.start, known.at)), None)
    if other is not None:
        return NotACheckpointError(f"this is {other.what}", file=probe.path, hint=other.hint)
    if not _is_text(head):
        return None
    what = _TEXTS.get(os.path.splitext(probe.name)[1].lower())
    kind = f" ({what})" if what else ""
    message = f"this is a text file{kind}, not a checkpoint"
    return NotACheckpointError(message, file=probe.path, hint=_NO_WEIGHTS)


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
