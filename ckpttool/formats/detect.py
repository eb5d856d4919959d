"""Detection: find the checkpoint for a path."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from ckpttool.core import atomic_write, deferred, dtypes, filesystem, limits, plugins, text, urls
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import (
    CODE,
    CodeReference,
    apply_allowed,
    merge_references,
    relocate_references,
    unsafe_references,
)
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    CkpttoolError,
    NotACheckpointError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.limits import Limits
from ckpttool.core.source import DeflatedSpan, File, Span, Storage, StoragePart, StridedView
from ckpttool.encodings import archives
from ckpttool.formats import pickle_signatures
from ckpttool.formats.probe import HEAD, Format, Probe

if TYPE_CHECKING:
    import zipfile


# Locations of the model inside a run folder, regardless of other files: Spinning Up's `_pytorch_simple_save`
# and `_tf_simple_save` (spinup/utils/logx.py).
_RUNS = (("pyt_save", "model.pt"), ("tf1_save",))
_SUGGESTIONS = 5
_LOOKED_AT = 200
# Shard names in transformers and accelerate.
_SHARD = deferred.compile(
    r"(?P<stem>.+-)(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.(safetensors|bin|pt|pth))"
)
_MOST_SHARDS = 10_000
# orbax/checkpoint/_src/metadata and tensorstore's OCDBT driver.
_ORBAX = frozenset(("_CHECKPOINT_METADATA", "manifest.ocdbt", "_sharding"))


class CheckpointLocation(NamedTuple):
    """A format and the location that it reads (a prefix if the given path was its `.index`)."""

    format: Format
    location: str

    def __reduce__(self) -> tuple[Callable[..., CheckpointLocation], tuple[str, str]]:
        """Pickle the name of the format: a module cannot be pickled."""
        return _restore_location, (self.format.NAME, self.location)


def _restore_location(name: str, location: str) -> CheckpointLocation:
    return CheckpointLocation(cast(Format, plugins.find("formats", name).load()), location)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """List everything at the path without reading a tensor.

    Raise NotFoundError, NotACheckpointError or UnsupportedError if there is nothing to list, and
    FormatError if the bytes are damaged.
    """
    location = filesystem.resolve_path(os.fspath(path))
    if filesystem.find_store(location) is not None:
        with filesystem.read_session() as visit:
            checkpoint = _open_path(location)
            return replace(checkpoint, notes=(*checkpoint.notes, *visit.notes))
    return _open_path(location)


def ensure_open(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Return the checkpoint, opened if a path is given."""
    return path if isinstance(path, Checkpoint) else open_checkpoint(os.fspath(path))


def _open_path(path: str) -> Checkpoint:
    claim = resolve(path)
    checkpoint = _add_location_notes(path, claim, read_location(claim))
    if is_hidden_name(os.path.basename(path)) or not is_hidden_name(os.path.basename(claim.location)):
        return checkpoint
    note = (
        f"an earlier conversion to {path} was interrupted; reading the previous files from {claim.location}"
    )
    return replace(checkpoint, notes=(note, *checkpoint.notes))


def _find_backup(path: str) -> CheckpointLocation | None:
    """Return the newest backup if the replacement of a set of files was interrupted, else None."""
    for prefix in atomic_write.find_backups(path) if filesystem.find_store(path) is None else ():
        for format_ in matching_formats(Probe(prefix), plugins.BUILT_IN["formats"]):
            return format_
    return None


def read_location(found: CheckpointLocation) -> Checkpoint:
    """List the checkpoint; add the code in its files to the audit by its format."""
    checkpoint = add_code_scan(found.format.read(found.location))
    return replace(checkpoint, code_references=apply_allowed(checkpoint.code_references))


def _add_location_notes(path: str, location: CheckpointLocation, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its format's note on how the path led to it."""
    redirected = getattr(location.format, "redirected", None)
    note = redirected(Probe(path), location.location) if redirected is not None else None
    notes = [sentence for sentence in (note, note_other_shards(checkpoint)) if sentence]
    return replace(checkpoint, notes=(*notes, *checkpoint.notes)) if notes else checkpoint


def find_other_shards(checkpoint: Checkpoint) -> tuple[int, int, tuple[str, ...]] | None:
    """Return the number of a single shard of a Hugging Face model, the total and the names of missing ones.

    None for another file.
    """
    if len(checkpoint.files) != 1:
        return None
    folder, name = os.path.split(checkpoint.files[0].path)
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return None
    total = int(shard["total"])
    if not 1 < total <= _MOST_SHARDS:
        return None
    numbers = (f"{number:05d}" for number in range(1, total + 1))
    others = [
        f"{shard['stem']}{n}-of-{shard['total']}{shard['suffix']}" for n in numbers if n != shard["number"]
    ]
    missing = [other for other in others if not filesystem.isfile(os.path.join(folder, other))]
    return int(shard["number"]), total, tuple(missing)


def note_other_shards(checkpoint: Checkpoint) -> str | None:
    """Return a note that names the other shards, if the file is one shard of a Hugging Face model."""
    shards = find_other_shards(checkpoint)
    if shards is None:
        return None
    number, total, missing = shards
    rest = (
        f"missing: {abbreviate_list(list(missing), 3)}"
        if missing
        else "open the index or the folder to read all shards"
    )
    return f"shard {number} of {total}: the tensors of the other shards are not included ({rest})"


def resolve(path: str) -> CheckpointLocation:
    """Return the format that reads the path; raise an error that describes the path otherwise."""
    probe = _probe_path(path)
    location = _locate(probe)
    if location is None:
        raise _not_found_error(probe)
    return location


def find_location(path: str) -> CheckpointLocation | None:
    """Return the format that reads the path, or None; only `resolve` seeks what the user may have meant."""
    return _locate(_probe_path(path))


def _probe_path(path: str) -> Probe:
    if "\0" in path or not path:
        raise UsageError(
            "a path must not be empty or contain a NUL byte",
            file=path.replace("\0", "\\0"),
            hint="give the path of a checkpoint; a variable of the shell may be empty",
        )
    path = filesystem.resolve_path(path)
    probe = _find_run_model(Probe(path))
    if probe.kind == "special":
        raise NotACheckpointError(
            "the path is a device, socket or pipe, not a checkpoint",
            file=path,
            hint=f"to read what a pipe contains: ckpttool inspect - < {shlex.quote(path)}",
        )
    return probe


def _locate(probe: Probe) -> CheckpointLocation | None:
    location = find_format(probe)
    return _find_backup(probe.path) if location is None and probe.kind == "missing" else location


def find_format(probe: Probe) -> CheckpointLocation | None:
    """Return the format that reads the path; raise UsageError if several match it."""
    claims = claiming_formats(probe)
    if len(claims) > 1:
        names = " and ".join(claim.format.NAME for claim in claims)
        raise UsageError(f"the path matches more than one format: {names}", file=probe.path)
    return claims[0] if claims else None


def claiming_formats(probe: Probe) -> list[CheckpointLocation]:
    """Return the matches of the built-in formats; if there are none, those of plugins."""
    formats = plugins.BUILT_IN["formats"]
    return matching_formats(probe, formats) or matching_formats(
        probe, (plugin for plugin in plugins.installed("formats") if plugin not in formats)
    )


def _find_run_model(probe: Probe) -> Probe:
    """Return the single model in a run folder, or in the subfolder that contains it, else the path."""
    if probe.kind != "folder":
        return probe
    for parts in _RUNS:
        for inner in (parts, parts[1:] if probe.name == parts[0] else ()):
            if inner and inner[0] in probe.names:
                inner_probe = Probe(os.path.join(probe.path, *inner))
                if inner_probe.kind == ("file" if len(parts) > 1 else "folder"):
                    return inner_probe
    return probe


def matching_formats(probe: Probe, requested: Iterable[plugins.Plugin]) -> list[CheckpointLocation]:
    """Return the formats that match the path, with the location that each would read."""
    formats = (cast(Format, plugin.load()) for plugin in requested if may_claim(plugin, probe))
    return [CheckpointLocation(f, location) for f in formats if (location := f.claims(probe)) is not None]


def may_claim(plugin: plugins.Plugin, probe: Probe) -> bool:
    """Return whether detection needs to import the module: signature matches, or it has none."""
    row = plugin.signature
    if row is None:
        return True
    if probe.kind == "folder":
        return _names_match(row.folder, probe) or (row.nested and _has_one_entry(probe))
    if probe.kind != "file":
        return _names_match(row.prefix, probe)
    name = probe.name.lower()
    return (
        probe.head.startswith(row.magic, row.offset)
        or name.endswith(row.suffixes)
        or (row.infix != "" and row.infix in name)
        or (row.end != b"" and probe.tail.endswith(row.end))
        or (row.members != () and _has_member(probe, row.members))
        or (row.pickle and pickle_signatures.find_pickle_format(probe) == plugin.name)
    )


def _names_match(parts: tuple[str, ...], probe: Probe) -> bool:
    return parts == plugins.ANY or any(part in name for part in parts for name in probe.names)


def _has_one_entry(probe: Probe) -> bool:
    return sum(not name.startswith(".") for name in probe.names) == 1


def _has_member(probe: Probe, ends: tuple[str, ...]) -> bool:
    return probe.damage is not None or any(name.endswith(ends) for name in probe.members)


def _not_found_error(probe: Probe) -> CkpttoolError:
    if probe.kind == "missing":
        if (error := filesystem.access_error(probe.path)) is not None:
            return error
        if filesystem.lexists(probe.path):
            target = os.readlink(probe.path)
            hint = f"restore the file that it points to: {os.path.join(os.path.dirname(probe.path), target)}"
            return NotFoundError("broken symbolic link", file=probe.path, hint=hint)
        return NotFoundError("checkpoint not found", file=probe.path, hint=_explain_missing_path(probe))
    if probe.kind == "folder":
        names = sorted(probe.names)
        if _ORBAX & set(names):
            return NotACheckpointError(
                "this is an Orbax checkpoint (JAX), which is not supported",
                file=probe.path,
                hint="restore it with orbax.checkpoint and save its arrays with numpy.savez",
            )
        here = _latest_first(_readable(probe.path, names[:_LOOKED_AT]))
        if len(here) > 1 and filesystem.find_store(probe.path) is None:
            # Numbered files belong to one run that continues.
            message = f"this folder contains {len(here)} checkpoints, and no file names the latest"
            return NotACheckpointError(message, file=probe.path, hint=_did_you_mean(here))
        message = f"no checkpoint found in this folder{'' if names else ': it is empty'}"
        shown = abbreviate_list(names, _SUGGESTIONS) if names else None
        hint = _suggest_below(probe) or "use the path of a checkpoint or of its folder"
        return NotACheckpointError(message, file=probe.path, found=shown, hint=hint)
    if filesystem.find_store(probe.path) is None and not os.access(probe.path, os.R_OK):
        return NotFoundError("no permission to read the file", file=probe.path)
    return unknown_file_error(probe)


def _explain_missing_path(probe: Probe) -> str | None:
    """Return a hint for a path that does not exist: what the shell or the user meant."""
    path = probe.path
    if (hint := _explain_windows_path(path)) is not None:
        return hint
    if (scheme := re.match(r"(https?|s3|gs|hf):/(?!/)", path)) is not None:
        return f"did you mean {scheme[1]}://{path[scheme.end() :]}"
    if path.startswith("~"):
        return "~ is the home folder only at the start of a word without quotes"
    if (variable := re.match(r"\$\{?\w+\}?", path)) is not None:
        return f"the shell did not replace {variable[0]}: use no single quotes"
    if glob.has_magic(path) and filesystem.find_store(path) is None:
        names = sorted(itertools.islice(glob.iglob(path), _LOOKED_AT))
        return _did_you_mean(_latest_first(names)) or "no file matches this pattern"
    stem = path.removesuffix(".meta")
    if stem != path and os.path.isfile(f"{stem}.index"):
        return _did_you_mean([stem])
    return _suggest_similar(probe) or _explain_missing_folder(path)


def _explain_missing_folder(path: str) -> str | None:
    """Return a hint for a path whose folder does not exist, or has no file of a similar name."""
    folder = os.path.dirname(path.rstrip("/"))
    if filesystem.find_store(path) is not None:
        return None
    if os.path.isfile(folder):
        return _did_you_mean([folder])
    if folder and not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    inner = Probe(folder or os.curdir)
    locations = _readable(inner.path, sorted(inner.names)[:_LOOKED_AT])
    if not locations:
        return "no checkpoint lies in the same folder"
    names = [os.path.basename(location) for location in locations]
    return f"checkpoints in the same folder: {abbreviate_list(names, _SUGGESTIONS)}"


def _latest_first(locations: list[str]) -> list[str]:
    """Sort by name; among names that differ only in numbers, the highest number is first."""

    def numbers(location: str) -> list[tuple[int, str]]:
        # No int(): it accepts at most 4,300 digits.
        digits = (digits.lstrip("0") for digits in re.findall(r"[0-9]+", os.path.basename(location)))
        return [(len(digits), digits) for digits in digits]

    ordered = sorted(locations, key=numbers, reverse=True)
    return sorted(ordered, key=lambda location: re.sub(r"[0-9]+", "0", os.path.basename(location)))


# A drive or a network share, or backslashes instead of slashes.
_WINDOWS_PATH = deferred.compile(r"(?P<drive>[A-Za-z]):[\\/]|\\\\[^\\]+\\|[^/\\]+\\[^/]+\Z")


def _explain_windows_path(path: str) -> str | None:
    """Return a hint for a Windows path on a POSIX system, with the path in WSL; None for another path."""
    match = _WINDOWS_PATH.match(path) if os.name == "posix" else None
    if match is None:
        return None
    drive, plain = match["drive"], path.replace("\\", "/")
    if drive is not None:
        return f"this is a Windows path; in WSL it is /mnt/{drive.lower()}{plain[2:]}"
    return f"this is a Windows path; with slashes it is {plain}"


def _suggest_similar(probe: Probe) -> str | None:
    import difflib

    names = {name.lower(): name for name in sorted(probe.names)}
    close = [
        names[near] for near in difflib.get_close_matches(probe.name.lower(), sorted(names), 4 * _SUGGESTIONS)
    ]
    return _did_you_mean(_readable(os.path.dirname(probe.path), close))


def _suggest_below(probe: Probe) -> str | None:
    """Suggest checkpoints in the folder, else in the nearest folders under it."""
    level, left = [probe], _LOOKED_AT
    while level and left > 0:
        readable, below = [], []
        for inner_probe in level:
            names = sorted(inner_probe.names)[: max(left, 0)]
            left -= len(names)
            readable += _readable(inner_probe.path, names)
            below += _subfolders(inner_probe, names)
        if readable:
            return _did_you_mean(readable)
        level = below
    return None


def _subfolders(probe: Probe, names: Iterable[str]) -> list[Probe]:
    """Return the local folders among the names: no links, which may form cycles, and no hidden names."""
    if filesystem.find_store(probe.path) is not None:
        return []
    inner = (Probe(os.path.join(probe.path, name)) for name in names if not name.startswith("."))
    return [probe for probe in inner if probe.kind == "folder" and not os.path.islink(probe.path)]


def _readable(folder: str, names: Iterable[str]) -> list[str]:
    """Return the distinct locations that the names stand for; for remote folders only the names."""
    if filesystem.find_store(folder) is not None:
        return [os.path.join(folder, name) for name in names]
    locations: dict[str, None] = {}
    for name in names:
        inner = Probe(os.path.join(folder, name))
        if is_hidden_name(name) or name.startswith(".") or inner.kind not in ("file", "folder"):
            continue
        with contextlib.suppress(CkpttoolError):
            for format_ in matching_formats(inner, plugins.BUILT_IN["formats"]):
                locations.setdefault(format_.location)
    return list(locations)


def _did_you_mean(locations: list[str]) -> str | None:
    if not locations:
        return None
    more = f" (and {len(locations) - _SUGGESTIONS} more)" if len(locations) > _SUGGESTIONS else ""
    return f"did you mean {', '.join(map(urls.display_url, locations[:_SUGGESTIONS]))}{more}"


class _FileSignature(NamedTuple):
    start: bytes | tuple[bytes, ...]
    what: str
    hint: str | None = None
    at: int = 0


# RFC 1952; the opcode PROTO (Lib/pickle.py), the first opcode of every pickle since protocol 2.
_GZIP, _PICKLE = b"\x1f\x8b", b"\x80"
_TAR_HINT = "use tar://MEMBER::ARCHIVE to read a member of a tar archive, compressed or not"
_JOBLIB = "if you trust the file, load it with joblib.load and save its arrays with numpy.savez"
_ZIP_HINT = "use zip://MEMBER::ARCHIVE to read a member"
# First bytes, in the order of the checks. Sources: the Git LFS pointer specification, RFC 1952, the HDF5 file
# format specification section II.A, APPNOTE.TXT, POSIX.1-2017 pax (ustar).
_WRONG = (
    _FileSignature(b"version https://git-lfs", "a Git LFS pointer, not the file itself", "git lfs pull"),
    _FileSignature(
        (b"<!doctype html", b"<html"), "an HTML page, not a checkpoint", "download the file itself"
    ),
    _FileSignature(b"\x1f\x8b", "a gzip archive", _TAR_HINT),
    _FileSignature(b"BZh", "a bzip2 archive", _TAR_HINT),
    _FileSignature(b"\xfd7zXZ\x00", "an xz archive", _TAR_HINT),
    _FileSignature(b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    _FileSignature((b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"), "zlib data, possibly a joblib file", _JOBLIB),
    _FileSignature(b"ustar", "a tar archive", _TAR_HINT, 257),
)
_EXPORT = "load it with its own program and save its arrays with numpy.savez"
_NO_WEIGHTS = "point to the file that contains the weights"
# Files of other programs, by first bytes that no text has or that mark a text file. Sources: the programs'
# own format documents, under the names given here.
_GGUF, _GGML = b"GGUF", (b"lmgg", b"fmgg", b"tjgg", b"algg")
_OTHERS = (
    _FileSignature(
        _GGUF,
        "a GGUF model (llama.cpp), which is not supported",
        "use the checkpoint that it was converted from",
    ),
    _FileSignature(_GGML, "a GGML model (llama.cpp, whisper.cpp), which is not supported", _EXPORT),
    _FileSignature(b"\xba\x16\x4f\x2f", "a fastText model, which is not supported", _EXPORT),
    _FileSignature(b"\x12\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "MXNet arrays, which are not supported", _EXPORT),
    _FileSignature(
        b"MATLAB 5.0 MAT-file",
        "a MATLAB file",
        "load it with scipy.io.loadmat and save its arrays with numpy.savez",
    ),
    _FileSignature(b"SQLite format 3\0", "an SQLite database", _NO_WEIGHTS),
    _FileSignature(b"PAR1", "a Parquet table", _NO_WEIGHTS),
    _FileSignature(b"ARROW1", "an Arrow table", _NO_WEIGHTS),
    _FileSignature(b"FEA1", "a Feather table", _NO_WEIGHTS),
    _FileSignature(b"\x89PNG\r\n", "a PNG image", _NO_WEIGHTS),
    _FileSignature(b"\xff\xd8\xff", "a JPEG image", _NO_WEIGHTS),
    _FileSignature(b"GIF8", "a GIF image", _NO_WEIGHTS),
    _FileSignature(b"%PDF-", "a PDF document", _NO_WEIGHTS),
    _FileSignature(b"ftyp", "a video (MP4)", _NO_WEIGHTS, 4),
    _FileSignature(b"\x1a\x45\xdf\xa3", "a video (Matroska or WebM)", _NO_WEIGHTS),
    _FileSignature(b"WEBP", "a WebP image", _NO_WEIGHTS, 8),
    _FileSignature(b"AVI ", "a video (AVI)", _NO_WEIGHTS, 8),
    _FileSignature(b"WAVE", "a sound file (WAV)", _NO_WEIGHTS, 8),
    _FileSignature(b"OggS", "an Ogg media file", _NO_WEIGHTS),
    _FileSignature((b"II*\0", b"MM\0*"), "a TIFF image", _NO_WEIGHTS),
    _FileSignature(b"\x7fELF", "a program or shared library (ELF)", _NO_WEIGHTS),
    _FileSignature(b"MZ", "a Windows program or library", _NO_WEIGHTS),
    _FileSignature(b"\xcf\xfa\xed\xfe", "a macOS program or library", _NO_WEIGHTS),
    _FileSignature(b"\0asm", "a WebAssembly module", _NO_WEIGHTS),
    _FileSignature(b"DUCK", "a DuckDB database", _NO_WEIGHTS, 8),
    _FileSignature(b"\xff\xff\xff\xff\x10\0\0\0", "an Arrow stream", _NO_WEIGHTS),
    _FileSignature(b"Obj\x01", "an Avro table", _NO_WEIGHTS),
    _FileSignature(b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    _FileSignature(b"Rar!\x1a\x07", "a RAR archive", "unpack it first"),
)
# llama.cpp and whisper.cpp; flatbuffers of TensorFlow Lite, PyTorch Mobile, ExecuTorch and ONNX Runtime.
_MODEL_STARTS = (_GGUF, *_GGML)
_MODEL_IDENTIFIER = deferred.compile(rb".{4}(?:TFL3|PTMF|ET[0-9]{2}|ORTM)", re.DOTALL)
# Text files commonly found next to checkpoints, by suffix.
_TEXTS = {
    **dict.fromkeys((".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".gin"), "settings"),
    **dict.fromkeys((".csv", ".tsv"), "a table"),
    **dict.fromkeys((".py", ".sh", ".ipynb"), "a program"),
    ".xml": "XML, e.g. an OpenVINO model description",
    ".prototxt": "a Caffe model description",
}


def unknown_file_error(probe: Probe) -> CkpttoolError:
    """Return an error that describes the file at the path."""
    head = probe.head
    if probe.refused is not None:
        return probe.refused
    if not head and probe.size:
        return NotFoundError("the file cannot be read", file=probe.path)
    if not head:
        return NotACheckpointError("the file is empty", file=probe.path, hint="copy or download it again")
    wrong = _match_signature(head)
    if (compressed := _compressed_error(probe)) is not None:
        return compressed
    if wrong is not None:
        advice = _archive_hint("tar", probe) if wrong.hint == _TAR_HINT else wrong.hint
        return NotACheckpointError(f"this is {wrong.what}", file=probe.path, hint=advice)
    if probe.damage is not None:
        return probe.damage
    if head.startswith(b"PK"):
        return _zip_error(probe)
    if (named := _foreign_file_error(probe)) is not None:
        return named

    model = match_model(head)
    if model is not None:
        return NotACheckpointError(f"this is {model.what}", file=probe.path, hint=model.hint)
    shown = head[:8].hex(" ")
    return NotACheckpointError(
        "unrecognised file format",
        file=probe.path,
        found=f"first bytes {shown}",
        hint="run ckpttool formats to list the supported formats",
    )


def _compressed_error(probe: Probe) -> NotACheckpointError | None:
    """Return the error for a file that gzip compressed; None for anything else, and for a tar archive."""
    inner = _gunzip_head(probe.head) if probe.head.startswith(_GZIP) else b""
    pickled = inner.startswith(_PICKLE)
    archived = len(inner) < _TAR_MARK or inner.startswith(_TAR, _TAR_MARK - len(_TAR))
    if not pickled and (archived or probe.name.lower().endswith((".tgz", ".tar.gz"))):
        return None
    stem, suffix = os.path.splitext(os.path.splitext(probe.name)[0])
    plain = shlex.quote(f"{stem}-unpacked{'.pkl' if pickled else suffix}")
    hint = f"gzip -dc {shlex.quote(probe.path)} > {plain}; ckpttool inspect {plain}"
    what = "a gzip-compressed pickle" if pickled else "a file compressed with gzip"
    return NotACheckpointError(f"this is {what}", file=probe.path, hint=hint)


def _foreign_file_error(probe: Probe) -> NotACheckpointError | None:
    """Return the error for a file of another program, or a text file; None for anything else."""
    head = probe.head
    other = next((known for known in _OTHERS if head.startswith(known.start, known.at)), None)
    if other is not None:
        return NotACheckpointError(f"this is {other.what}", file=probe.path, hint=other.hint)
    if not _is_text(head):
        return None
    what = _TEXTS.get(os.path.splitext(probe.name)[1].lower())
    if what is None and head.startswith((b"<?xml", b"<svg")):
        what = "XML"
    kind = f" ({what})" if what else ""
    message = f"this is a text file{kind}, not a checkpoint"
    return NotACheckpointError(message, file=probe.path, hint=_NO_WEIGHTS)


def _gunzip_head(head: bytes) -> bytes:
    """Return the first decompressed bytes of a gzip member; nothing if it is damaged."""
    try:
        return zlib.decompressobj(31).decompress(head, _HEAD)
    except zlib.error:
        return b""


def _match_signature(head: bytes) -> _FileSignature | None:
    start = head.lstrip()[:64].lower()
    for known in _WRONG:
        if head.startswith(known.start, known.at) or (not known.at and start.startswith(known.start)):
            return known
    return None


def is_text_or_graph(probe: Probe) -> bool:
    """Return whether an unmatched file is text, or a TensorFlow graph, whose operations are checked."""
    if not probe.head or is_broken(probe):
        return False
    if _may_be_graph(probe):
        # Bytes of a graph may look like another file's: only one that was judged, or plain text, is let go.
        return list_operations(probe) is not None or _is_text(probe.start(min(probe.size, _TEXT_BYTES)))
    return _is_text(probe.head)


def is_broken(probe: Probe) -> bool:
    """Return whether an unmatched file is a wrong download, an archive, empty or not readable."""
    return not probe.head or probe.damage is not None or _match_signature(probe.head) is not None


def is_marked_model(probe: Probe) -> bool:
    """Return whether a file with any name has the signature of another program's model."""
    return probe.head.startswith(_MODEL_STARTS) or _MODEL_IDENTIFIER.match(probe.head) is not None


@lru_cache(maxsize=4)
def list_operations(probe: Probe) -> tuple[CodeReference, ...] | None:
    """Return the operations of a TensorFlow graph or an ONNX model that do more than compute.

    Return None for a file that is neither, or a graph that cannot be judged.
    """
    from ckpttool.formats import onnx, tf_operations

    if onnx.claims(probe) is not None:
        return onnx.audit_file(File.stamp(probe.path))
    if not _may_be_graph(probe) or probe.size > limits.current().graph_bytes:
        return None
    return tf_operations.audit_graph(memoryview(probe.start(probe.size)), probe.name)


def is_unjudged_graph(probe: Probe) -> bool:
    """Return whether the file begins like a TensorFlow graph whose operations cannot be judged."""
    model = match_model(probe.head)
    return model is not None and model.graph and list_operations(probe) is None


def list_model_calls(probe: Probe) -> tuple[CodeReference, ...]:
    """Return what creating the model in a JSON file would run; nothing for another file.

    `model.to_json()` of Keras writes such files, and a folder with config.json is an unpacked `.keras` file.
    """
    if not probe.head.lstrip().startswith(b"{") or probe.size > limits.current().json_bytes:
        return ()
    data = probe.start(probe.size)
    # JSON may write any letter of a key as \\u and its number.
    if b"class_name" not in data and b"\\u" not in data:
        return ()
    from ckpttool.formats.keras_config import audit_document

    value = text.parse_json_value(data, probe.name)
    if not isinstance(value, dict) or not {"class_name", "config"} <= value.keys():
        return ()
    return tuple(unsafe_references(audit_document(value, probe.name)))


# Names of frozen graphs (GraphDef) and of a Saver's graphs (MetaGraphDef).
_GRAPH_SUFFIXES = (".pb", ".meta")
_TEXT_BYTES = 64 << 20


def _may_be_graph(probe: Probe) -> bool:
    model = match_model(probe.head)
    return probe.name.lower().endswith(_GRAPH_SUFFIXES) or (model is not None and model.graph)


def _zip_error(probe: Probe) -> CkpttoolError:

    archive = match_archive(probe.members)
    if archive is not None:
        return NotACheckpointError(f"this is {archive.what}", file=probe.path, hint=archive.hint)
    what = "a zip archive without a data.pkl or model.weights.h5"
    hint = _archive_hint("zip", probe)
    return UnsupportedError(f"this is {what}, which cannot be read directly", file=probe.path, hint=hint)


def _archive_hint(scheme: str, probe: Probe) -> str:
    """Return the command that lists the checkpoints in an archive; inside another, the form of a path."""
    if "::" in probe.path or "://" in probe.path:
        return _ZIP_HINT if scheme == "zip" else _TAR_HINT
    command = shlex.join(("ckpttool", "inspect", f"{scheme}://::{probe.path}"))
    compressed = scheme == "tar" and probe.head[257:262] != b"ustar"
    return f"if it contains a tar archive: {command}" if compressed else command


def _is_text(head: bytes) -> bool:
    if any(byte < 32 and byte not in b"\t\n\r\f" for byte in head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut off at the end of the examined bytes.
        return error.start >= len(head) - 3
    return True


class ForeignArchive(NamedTuple):
    """A member name that identifies the type of a zip archive."""

    member: re.Pattern[str]
    what: str
    hint: str


class ForeignModel(NamedTuple):
    """A pattern for a file's first bytes, what the file is, and which file to use instead."""

    start: re.Pattern[bytes]
    what: str
    hint: str
    graph: bool = False  # a TensorFlow graph, whose operations are checked


# A protobuf length: a varint of at most five bytes.
_LENGTH = rb"[\x80-\xff]{0,4}[\0-\x7f]"

# Sources: tensorflow/lite/schema/schema.fbs (file_identifier, byte 4); tensorflow/core/framework/graph.proto
# and node_def.proto (a node: its name, its operation); tensorflow/core/protobuf/meta_graph.proto (in a
# MetaInfoDef, stripped_op_list: operations by name) and saved_model.proto (version 1, then a MetaGraphDef);
# torch/csrc/jit/serialization/mobile_bytecode.fbs and executorch/schema/program.fbs (file_identifier).
# coremltools/mlmodel/format/Model.proto (specificationVersion, description); caffe/proto/caffe.proto
# (NetParameter: name, layer = 100).
# flax/serialization.py (`to_bytes`: a list is a map from "0" on) and the msgpack specification.
MODELS = (
    ForeignModel(
        deferred.compile(rb".{4}PTMF", re.DOTALL),
        "a PyTorch Mobile model (flatbuffer), which is for inference only",
        "use the TorchScript file or the checkpoint that it was converted from",
    ),
    ForeignModel(
        deferred.compile(rb".{4}ET\d\d", re.DOTALL),
        "an ExecuTorch program, which is for inference only",
        "use the checkpoint that it was converted from",
    ),
    ForeignModel(
        deferred.compile(rb".{4}TFL3", re.DOTALL),
        "a TensorFlow Lite model, which is for inference only",
        "use the checkpoint, SavedModel or Keras file that it was converted from",
    ),
    ForeignModel(
        deferred.compile(
            rb"\x0a%b\x0a%b[\w./>\-]+\x12[\x01-\x7f][A-Z_][\w>]*[\x0a\x12\x1a\x22\x2a]" % (_LENGTH, _LENGTH)
        ),
        "a TensorFlow graph (GraphDef; any weights are stored as constants), not a checkpoint",
        "use the checkpoint or SavedModel that it was converted from",
        graph=True,
    ),
    ForeignModel(
        deferred.compile(rb"\x0a%b\x12%b\x0a%b\x0a[\x01-\x7f][A-Z_][\w>]*\W" % (_LENGTH, _LENGTH, _LENGTH)),
        "a TensorFlow graph without its checkpoint (MetaGraphDef, the content of a Saver's .meta file)",
        "point to the prefix of the matching .index and .data files",
        graph=True,
    ),
    ForeignModel(
        deferred.compile(rb"\x08\x01\x12%b\x0a%b[\x0a\x12\x1a\x22]" % (_LENGTH, _LENGTH)),
        "the graph of a SavedModel with a different file name",
        "rename it to saved_model.pb, next to its variables folder, and point to the folder of both",
        graph=True,
    ),
    ForeignModel(
        deferred.compile(rb"\x08[\x01-\x1f]\x12%b\x0a%b(?:\x0a%b)?[\w.]" % (_LENGTH, _LENGTH, _LENGTH)),
        "a Core ML model, which is for inference only",
        "use the checkpoint that it was converted from",
    ),
    ForeignModel(
        deferred.compile(rb"\x0a%b[\w\-. ]+\xa2\x06" % _LENGTH),
        "a Caffe model, which is not supported",
        "load it with Caffe and save its arrays with numpy.savez",
    ),
    ForeignModel(
        deferred.compile(rb"[\x81-\x8f](?:\xa1[0-9][\x80-\x9f\xdc-\xdf]|\xa6params[\x80-\x8f\xde\xdf])"),
        "msgpack parameters as written by Flax (JAX; also CleanRL's JAX scripts), which are not supported",
        "load it with flax.serialization and save its arrays with numpy.savez",
    ),
)


# Sources: torch/export/pt2_archive/constants.py, and torch/export/__init__.py (`save`) before 2.8;
# caffe2/serialize/inline_container.h (the history of versions) for TorchScript before 1.2;
# torch/package/package_exporter.py (`_finalize_zip`).
ARCHIVES = (
    ForeignArchive(
        deferred.compile(r"[^/]+/archive_format|serialized_exported_program\.(json|pt)"),
        "a torch.export program (.pt2), which is for inference only",
        "load it with torch.export.load and save the state_dict of the result",
    ),
    ForeignArchive(
        deferred.compile(r"[^/]+/model\.json"),
        "a TorchScript file of PyTorch 1.0 or 1.1",
        "load it in that PyTorch version and save its state_dict",
    ),
    ForeignArchive(
        deferred.compile(r"[^/]+/\.data/(extern_modules|python_version)"),
        "a torch.package archive, whose pickles have user-defined names",
        "save the state_dict of the object that it contains",
    ),
)


def match_archive(members: Iterable[str]) -> ForeignArchive | None:
    """Return the archive type that the member names of a zip archive indicate."""
    names = list(members)
    return next((archive for archive in ARCHIVES if any(map(archive.member.fullmatch, names))), None)


def match_model(head: bytes) -> ForeignModel | None:
    """Return the model type that matches the file's first bytes."""
    return next((model for model in MODELS if model.start.match(head)), None)


_DEPTH = 4  # nesting depth of archives and compressors
_HEAD, _PIECE = 512, 4096
_SMALL = 16 << 10
_ZIP, _NPY, _TAR = b"PK\x03\x04", b"\x93NUMPY", b"ustar"
_TAR_MARK = 262  # where the mark of a tar header ends
# torch.save storages: raw numbers, which no loader unpickles (torch/serialization.py, _save).
_STORAGE = deferred.compile(r"(?:[^/]+/)?(?:data|constants)/\d+")
# TorchScript's code, which the format reports (torch_zip.audit_script).
_COMPILED = deferred.compile(r"[^/]+/code/.+\.py")
# The member that makes an archive TorchScript.
_CONSTANTS = deferred.compile(r"[^/]+/constants\.pkl")
# Programs and libraries by name. torch/_inductor/package (the payload of AOTInductor is compiled code);
# torch/package/package_importer.py (the modules that its pickles import from outside).
_PROGRAM = deferred.compile(
    r"(?:.*/)?(?:[^/]+\.(?:so(?:\.[0-9.]+)?|dll|dylib|pyd|exe|pyc|pyo|pyw?|pyz|sh|bash|zsh|bat|cmd|ps1|cubin|o)"
    r"|data/aotinductor/.+|\.data/extern_modules)",
    re.IGNORECASE | re.DOTALL,
)
# First bytes of programs: ELF, Mach-O (both byte orders, both widths, several architectures), WebAssembly,
# and the line that names an interpreter. A Windows program also has "PE" where byte 60 points.
_STARTS = (
    b"\x7fELF",
    *(bytes.fromhex(magic) for magic in ("feedface", "feedfacf", "cefaedfe", "cffaedfe", "cafebabe")),
    b"\0asm",
    b"#!/",
)
_WINDOWS, _POINTER, _PE = b"MZ", 60, b"PE\0\0"
# torch/serialization.py, _legacy_load: the pickles of a stream before its storages.
_STREAM_PICKLES = 5
_MOST_PICKLES = 8  # scanned behind the first one; any makes the file ambiguous
# HDF5 file format specification II.A: the signature is at byte 0, 512, 1024, 2048 and so on.
_SIGNATURE, _USER_BLOCK = b"\x89HDF\r\n\x1a\n", 512
# joblib/numpy_pickle_compat.py: `ZF`, the decompressed length in 19 characters, then zlib.
_OLD_JOBLIB, _OLD_JOBLIB_HEADER = b"ZF0x", 21

# Formats that check the pickle at the start of their files themselves.
_PICKLED = frozenset(
    (
        "d3rlpy",
        "pickle",
        "pytorch",
        "pytorch_dcp",
        "pytorch_legacy",
        "pytorch_set",
        "rllib",
        "stable_baselines2",
    )
)

# A shard is a sequence of archives, each checked by the format, and not an archive itself.
_WHOLE = frozenset(("pytorch_dcp",))

_HDF5, _ARCHIVED_HDF5, _TORCH_TAR = "keras_h5", "keras_zip", "pytorch_tar"
# Formats whose pickles may contain an archive in bytes, at the end of the file.
_EMBEDDING = _PICKLED - {"pytorch_legacy"}
# APPNOTE.TXT 4.3.16: the end record of a central directory; its comment ends the file.
_END, _COMMENT = b"PK\x05\x06", 22 + (1 << 16)

_Engine = Callable[[], Any]


class CodeScan(NamedTuple):
    """The names that run code, each with its member or layer, and the parts that could not be checked.

    `unread` has a sentence for each part that may contain code and could not be read, `ambiguous` one for
    each part that only some loaders read.
    """

    code_references: tuple[CodeReference, ...]
    unread: tuple[str, ...]
    ambiguous: tuple[str, ...] = ()


class _ContentReader(NamedTuple):
    """Bytes read from the start on demand; `size` is the maximum number to read.

    With a `file` they are the file's own bytes, from `offset` on.
    """

    size: int
    start: Callable[[int], bytes]
    file: File | None = None
    offset: int = 0


def add_code_scan(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the code in its files added to the audit by its format."""
    if checkpoint.format in _WHOLE:
        return checkpoint
    references, unjudged = [], list(checkpoint.unjudged)
    known = {reference.name for reference in unsafe_references(checkpoint.code_references)}
    arrays = _array_storages(checkpoint)
    for file in checkpoint.files:
        scan = scan_for_code(
            file,
            pickle=checkpoint.format not in _PICKLED,
            arrays=arrays,
            plain=checkpoint.plain,
            programs=True,
            format=checkpoint.format,
        )
        name = "" if len(checkpoint.files) == 1 else os.path.basename(file.path)
        references += [
            name
            for name in (relocate_references(scan.code_references, name) if name else scan.code_references)
            if name.name not in known
        ]
        unjudged += [f"{name}: {content}" if name else content for content in (*scan.unread, *scan.ambiguous)]
    if not references and not unjudged:
        return checkpoint
    return replace(
        checkpoint,
        code_references=merge_references(checkpoint.code_references, references),
        unjudged=tuple(dict.fromkeys(unjudged)),
    )


def _array_storages(checkpoint: Checkpoint) -> frozenset[Storage]:
    """Return the storages that the format has read as numeric arrays, which contain no pickle."""
    sources = [leaf.source for _, leaf in checkpoint.tree.tensors() if leaf.dtype in dtypes.BY_NAME]
    views = (source.storage if isinstance(source, StridedView) else source for source in sources)
    bases = (source.base if isinstance(source, StoragePart) else source for source in views)
    return frozenset(base for base in bases if isinstance(base, Span | DeflatedSpan))


def _open_trailing_zip(file: File) -> zipfile.ZipFile | None:
    """Return the archive that Python's zipfile finds from the end of a file with another start."""
    if file.size < len(_ZIP) or file.read(0, len(_ZIP)) == _ZIP or _END not in _tail(file):
        return None
    import zipfile

    try:
        archive = zipfile.ZipFile(io.BufferedReader(archives.FileStream(file)))
        return archive if archive.namelist() else None
    except (ValueError, CkpttoolError, zipfile.BadZipFile):
        return None


def _tail(file: File) -> bytes:
    length = min(file.size, _COMMENT)
    return file.read(file.size - length, length)


def _has_signature(file: File) -> bool:
    """Return whether the HDF5 library finds a file behind a start of another kind."""
    if filesystem.find_store(file.path) is not None:
        return False  # HDF5 opens local files, and each place would be a request
    at = _USER_BLOCK
    while at + len(_SIGNATURE) <= file.size:
        if file.read(at, len(_SIGNATURE)) == _SIGNATURE:
            return True
        at *= 2
    return False


def scan_for_code(
    file: File,
    *,
    pickle: bool = True,
    arrays: Set[Storage] = frozenset(),
    plain: Set[Storage] = frozenset(),
    programs: bool = False,
    format: str | None = None,  # noqa: A002  # the word of the whole package
) -> CodeScan:
    """Scan the file for code.

    A format checks what its own library loads. Other loaders read other parts of the same bytes: `numpy.load`
    the pickle of an array of objects, `joblib.load` compressed data, any program a member of an archive,
    `pickle.load` a pickle at the start of a file, and called again, the next one. Nothing is run here, and
    nothing is written.

    Args:
        file: the file.
        pickle: scan a pickle at its start as well, which formats of pickles check themselves.
        arrays: storages that are known to be numbers.
        plain: pickles that are known to be data for any reader (Checkpoint.plain).
        programs: report members that are programs or libraries.
        format: the format that reads the file; parts that another format would read are then reported.
    """
    scanner = _CodeScanner(arrays, plain, programs=programs)
    with scanner.reasons("the file"):
        scanner.content(_file_content(file, 0, file.size), "", 0, pickle=pickle)
    if format is not None:
        with scanner.reasons("the file"):
            scanner.other_formats(file, format)
    return scanner.result()


def scan_behind(file: File, at: int, stop: int) -> CodeScan:
    """Scan the bytes `at` to `stop` of the file, which follow the end of a pickle or stream."""
    scanner = _CodeScanner(frozenset())
    with scanner.reasons("the file"):
        scanner.behind(_file_content(file, at, stop - at), "", 0, at)
    return scanner.result()


class _CodeScanner:
    """One scan of a file; `room` is the number of bytes that may still be held in memory."""

    def __init__(
        self, arrays: Set[Storage], plain: Set[Storage] = frozenset(), *, programs: bool = False
    ) -> None:
        self.arrays, self.plain = arrays, plain
        self.programs = programs
        self.code_references: list[CodeReference] = []
        self.unread: list[str] = []
        self.ambiguous: list[str] = []
        self.room = limits.current().unpacked_bytes

    def result(self) -> CodeScan:
        """Return what the scan has found."""
        unread, ambiguous = (tuple(dict.fromkeys(names)) for names in (self.unread, self.ambiguous))
        return CodeScan(tuple(self.code_references), unread, ambiguous)

    def other_formats(self, file: File, format: str) -> None:  # noqa: A002  # as in scan_for_code
        """Report a start or an end that another loader opens as a separate file, or that is a program."""
        if _starts_program(_file_content(file, 0, file.size)):
            self.code_references.append(CodeReference(os.path.basename(file.path), CODE, by="program"))
        archive = _open_trailing_zip(file)
        if archive is not None:
            with archive:
                self._zip_stream(archive, "", 1)
            if format not in _EMBEDDING:
                self.ambiguous.append("a zip archive follows the data, and some loaders open that archive")
        if format not in (_HDF5, _ARCHIVED_HDF5) and _has_signature(file):
            self.ambiguous.append("an HDF5 file follows the start of the file, and Keras opens that file")
        if format != _TORCH_TAR and archives.is_tar_header(file.read(0, min(archives.BLOCK, file.size))):
            self.ambiguous.append("the file is also a tar archive, which torch.load opens")

    @contextlib.contextmanager
    def reasons(self, where: str) -> Iterator[None]:
        """Turn errors from reading `where` into a line of `unread`; raise operating system errors."""
        try:
            yield
        except CkpttoolError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.unread.append(f"{where}: {error.message}")
        except MemoryError:
            raise
        except Exception as error:  # Python's archive readers raise many kinds of errors
            if isinstance(error, OSError) and error.errno is not None:
                raise
            self.unread.append(f"{where}: {str(error) or type(error).__name__}")

    def content(
        self, content: _ContentReader, where: str, depth: int, *, pickle: bool = True, alone: bool = True
    ) -> None:
        """Scan bytes as a pickle, and as any container of pickles; `alone`: nothing may follow a pickle."""
        head = content.start(_HEAD)
        end = self._pickle(head, content, where) if pickle else None
        if end and alone and end < content.size:
            stream = pickle_signatures.STREAM.match(head) is not None
            self.behind(_skip(content, end), where, depth, end, stream=stream)
        if head.startswith(_NPY):
            self._array(head, content, where)
        elif head.startswith(_ZIP) or head[257:262] == _TAR or _decompressor(head) is not None:
            if depth >= _DEPTH:
                self.unread.append(f"{where}: archives are nested too deeply")
                return
            with self.reasons(where or "the file"):
                self._archive(head, content, where, depth + 1)

    def behind(
        self, content: _ContentReader, where: str, depth: int, at: int, *, stream: bool = False
    ) -> None:
        """Scan what follows the end of a pickle at byte `at`; in torch's `stream`, four more pickles do."""
        for number in range(_STREAM_PICKLES - 1 if stream else _MOST_PICKLES):
            head = content.start(_HEAD)
            other = head.startswith((_ZIP, _NPY))
            end = self._pickle(head, content, where)
            if not stream and not number and (other or end is not None):
                what = "another file" if other else "another pickle"
                self.ambiguous.append(f"{what} follows the end of {where or 'the data'}, at byte {at:,}")
            if other:
                self.content(content, where, max(depth, 1), pickle=False)
            if not end or number + 1 == _MOST_PICKLES:
                return
            content, at = _skip(content, end), at + end

    def _pickle(self, head: bytes, content: _ContentReader, where: str) -> int | None:
        """Scan a pickle; return its end, 0 if it has none, None for bytes that are no pickle."""
        marked = head.startswith(b"\x80")
        if not marked and not pickle_signatures.may_be_pickle(head, content.size):
            return None
        # Bytes that begin like a pickle are scanned as one; a small one needs a single pass.
        if marked and content.size <= _SMALL:
            data = content.start(content.size)
            acting, end = _find_code(data, limits.current())
        else:
            name, data = pickle_signatures.scan_head(content.start, content.size, _SMALL if marked else HEAD)
            if not marked and not pickle_signatures.is_pickle(name, data, content.size):
                return None
            acting, end = tuple(unsafe_references(name.code_references)), name.end
        if end is None and pickle_signatures.JOBLIB in data:
            from ckpttool.formats.pickles import scan_joblib

            name = scan_joblib(self._all(content))
            acting, end = tuple(unsafe_references(name.code_references)), name.end
        self.code_references += relocate_references(acting, where) if where else acting
        return end or (0 if acting else None)

    def _member(
        self, content: _ContentReader, name: str, where: str, depth: int, *, alone: bool = True
    ) -> None:
        """Scan a member of an archive; `where` is its whole name."""
        with self.reasons(where):
            if self.programs and _is_program(name, content):
                self.code_references.append(CodeReference(where, CODE, by="program"))
            self.content(content, where, depth, alone=alone)

    def _array(self, head: bytes, content: _ContentReader, where: str) -> None:
        """Scan the pickle after the header of an array of objects (numpy/lib/_format_impl.py)."""
        layout, at = ("<H", 10) if head[6:7] == b"\1" else ("<I", 12)
        if len(head) < at:
            return
        stop = at + int(struct.unpack_from(layout, head, 8)[0])
        if stop > limits.current().array_header_bytes:
            self.unread.append(f"{where or 'the file'}: an array's header is too long")
        elif b"O" in content.start(stop)[at:]:
            rest = _skip(content, stop)
            end = self._pickle(rest.start(_HEAD), rest, where)
            if end and end < rest.size:
                self.behind(_skip(rest, end), where, 0, stop + end)

    def _archive(self, head: bytes, content: _ContentReader, where: str, depth: int) -> None:
        engine = _decompressor(head)
        if engine is not None:
            self._packed(engine, content, where, depth)
        elif not head.startswith(_ZIP):
            self._tar(content, where, depth)
        elif content.file is not None:
            self._zip(archives.read_zip(content.file, content.offset, content.size), where, depth)
        else:
            self._held_zip(content, where, depth)

    def _zip(self, archive: archives.ZipArchive, where: str, depth: int) -> None:
        torch = any(name.endswith("/data.pkl") for name in archive.members)
        script = any(map(_CONSTANTS.fullmatch, archive.members))
        for name in archive.members:
            if name.endswith("/"):
                continue
            source = archive.source(name)
            storage = torch and _STORAGE.fullmatch(name)
            if (storage or not torch) and source in self.arrays:
                continue
            at = _join_location(where, name)
            content = _member_content(source)
            if storage or source in self.plain:
                # No loader unpickles a storage, and a pickle of data is known to be one.
                if self.programs and _starts_program(content):
                    self.code_references.append(CodeReference(at, CODE, by="program"))
            elif script and _COMPILED.fullmatch(name):
                with self.reasons(at):
                    self.content(content, at, depth)
            else:
                self._member(content, name, at, depth)

    def _held_zip(self, content: _ContentReader, where: str, depth: int) -> None:
        import zipfile

        with zipfile.ZipFile(io.BytesIO(self._all(content))) as archive:
            self._zip_stream(archive, where, depth)

    def _zip_stream(self, archive: zipfile.ZipFile, where: str, depth: int) -> None:
        torch = any(name.endswith("/data.pkl") for name in archive.namelist())
        for info in archive.infolist():
            if info.is_dir() or (torch and _STORAGE.fullmatch(info.filename)):
                continue
            at = _join_location(where, info.filename)
            with self.reasons(at), archive.open(info) as stream:
                content = _ContentReader(info.file_size, _head_reader(stream))
                self._member(content, info.filename, at, depth)

    def _tar(self, content: _ContentReader, where: str, depth: int) -> None:
        import tarfile

        from ckpttool.formats.torch_legacy import TAR_MEMBERS

        torch = False
        with self._stream(content) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for number, info in enumerate(archive):
                torch = torch or (not number and info.name == "sys_info")
                member = archive.extractfile(info) if info.isreg() else None
                if member is not None:
                    # Sequences of pickles and numbers that the format checks.
                    alone = not (torch and info.name in TAR_MEMBERS)
                    inner = _ContentReader(info.size, _head_reader(member))
                    self._member(inner, info.name, _join_location(where, info.name), depth, alone=alone)

    def _packed(self, engine: _Engine, content: _ContentReader, where: str, depth: int) -> None:
        if content.start(len(_OLD_JOBLIB)) == _OLD_JOBLIB:
            content = _skip(content, _OLD_JOBLIB_HEADER)
        inner = _ContentReader(self.room, lambda length: _decompress_head(engine, content, length))
        self.content(inner, f"{where} (unpacked)".lstrip(), depth)

    def _stream(self, content: _ContentReader) -> Any:
        if (
            content.file is not None
            and not content.offset
            and filesystem.find_store(content.file.path) is None
        ):
            return open(content.file.path, "rb")
        return io.BytesIO(self._all(content))

    def _all(self, content: _ContentReader) -> bytes:
        data = content.start(min(content.size, self.room + 1))
        if len(data) > self.room:
            raise limits.limit_error("unpacked_bytes", "the unpacked size is too large", None)
        self.room -= len(data)
        return data


def _is_program(name: str, content: _ContentReader) -> bool:
    return _PROGRAM.fullmatch(name) is not None or _starts_program(content)


def _starts_program(content: _ContentReader) -> bool:
    """Return whether bytes begin like a program or library of any system."""
    head = content.start(_POINTER + 4)
    if not head.startswith(_WINDOWS) or len(head) < _POINTER + 4:
        return head.startswith(_STARTS)
    at = int.from_bytes(head[_POINTER:], "little")
    return at < _PIECE and content.start(at + len(_PE))[at:] == _PE


@lru_cache(maxsize=8)
def _find_code(pickle: bytes, _: Limits) -> tuple[tuple[CodeReference, ...], int | None]:
    """Return the names in a pickle that run code, and its end; runs often repeat small pickles."""
    # Not a top-level import: most scanned files are not pickles.
    from ckpttool.encodings.pickle_reader import scan_pickle

    scan = scan_pickle(pickle)
    return tuple(unsafe_references(scan.code_references)), scan.end


def _join_location(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name


def _file_content(file: File, offset: int, size: int) -> _ContentReader:
    return _ContentReader(size, lambda length: file.read(offset, min(length, size)), file, offset)


def _skip(content: _ContentReader, at: int) -> _ContentReader:
    return _ContentReader(max(0, content.size - at), lambda length: content.start(at + length)[at:])


def _member_content(source: Storage) -> _ContentReader:
    if isinstance(source, Span):
        return _file_content(source.file, source.offset, source.length)
    packed = _file_content(source.base.file, source.base.offset, source.base.length)
    bare: _Engine = lambda: zlib.decompressobj(-zlib.MAX_WBITS)  # noqa: E731
    return _ContentReader(
        source.length, lambda length: _decompress_head(bare, packed, min(length, source.length))
    )


def _head_reader(stream: Any) -> Callable[[int], bytes]:
    def start(length: int) -> bytes:
        stream.seek(0)
        return bytes(stream.read(length))

    return start


def _decompressor(head: bytes) -> _Engine | None:
    """Return the decompressor for bytes that begin like gzip, bz2, lzma, zlib or old joblib data."""
    if head.startswith(b"\x1f\x8b"):
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    if head.startswith(b"BZh"):
        import bz2

        return bz2.BZ2Decompressor
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        import lzma

        return lzma.LZMADecompressor
    # RFC 1950: method 8 with a window, and the two bytes together a multiple of 31.
    bare = len(head) > 2 and head[0] & 0x8F == 0x08 and int.from_bytes(head[:2]) % 31 == 0
    return zlib.decompressobj if bare or head.startswith(_OLD_JOBLIB) else None


def _decompress_head(make: _Engine, content: _ContentReader, length: int) -> bytes:
    """Return the first `length` decompressed bytes; for damaged data, those before the damage."""
    window = 4 * _PIECE
    while True:
        packed = content.start(window)
        head = _decompress(make, packed, length)
        if len(head) >= length or len(packed) >= content.size or len(packed) < window:
            return head
        window *= 8


def _decompress(make: _Engine, packed: bytes, length: int) -> bytes:
    output, engine, at = bytearray(), make(), 0
    while at < len(packed) and len(output) < length:
        piece = packed[at : at + _PIECE]
        try:
            output += engine.decompress(piece, length - len(output))
        except Exception:  # noqa: BLE001  # three libraries with different errors: the first error counts
            break
        at += len(piece)
        if engine.eof:
            # gzip, bz2 and xz readers treat several concatenated streams as one.
            at -= len(engine.unused_data)
            engine = make()
    return bytes(output)
