"""Paths that no format claims: what a file is instead, and which checkpoint was meant."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import shlex
import zlib
from collections.abc import Iterable
from functools import lru_cache

from ckpttool.core import deferred, filesystem, limits, plugins, text, urls
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.code_references import CodeReference, unsafe_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    CkpttoolError,
    NotACheckpointError,
    NotFoundError,
    UnsupportedError,
    abbreviate_list,
    did_you_mean,
)
from ckpttool.core.source import File
from ckpttool.formats.detect import matching_formats
from ckpttool.formats.probe import Probe

_SUGGESTIONS = 5
_LOOKED_AT = 200
# orbax/checkpoint/_src/metadata and tensorstore's OCDBT driver.
_ORBAX = frozenset(("_CHECKPOINT_METADATA", "manifest.ocdbt", "_sharding"))


def not_found_error(probe: Probe) -> CkpttoolError:
    """Return an error that describes a path without a checkpoint, and names those that may be meant."""
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
            return NotACheckpointError(message, file=probe.path, hint=_suggest_locations(here))
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
        return did_you_mean(f"{scheme[1]}://{path[scheme.end() :]}")
    if path.startswith("~"):
        return "~ is the home folder only at the start of a word without quotes"
    if (variable := re.match(r"\$\{?\w+\}?", path)) is not None:
        return f"the shell did not replace {variable[0]}: use no single quotes"
    if glob.has_magic(path) and filesystem.find_store(path) is None:
        names = sorted(itertools.islice(glob.iglob(path), _LOOKED_AT))
        return _suggest_locations(_latest_first(names)) or "no file matches this pattern"
    stem = path.removesuffix(".meta")
    if stem != path and os.path.isfile(f"{stem}.index"):
        return _suggest_locations([stem])
    return _suggest_similar(probe) or _explain_missing_folder(path)


def _explain_missing_folder(path: str) -> str | None:
    """Return a hint for a path whose folder does not exist, or has no file of a similar name."""
    folder = os.path.dirname(path.rstrip("/"))
    if filesystem.find_store(path) is not None:
        return None
    if os.path.isfile(folder):
        return _suggest_locations([folder])
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
    return _suggest_locations(_readable(os.path.dirname(probe.path), close))


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
            return _suggest_locations(readable)
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


def _suggest_locations(locations: list[str]) -> str | None:
    names = [*map(urls.display_url, locations)]
    return did_you_mean(abbreviate_list(names, _SUGGESTIONS)) if names else None


class _FileSignature(NamedTuple):
    start: bytes | tuple[bytes, ...]
    what: str
    hint: str | None = None
    at: int = 0


# RFC 1952; the opcode PROTO (Lib/pickle.py), the first opcode of every pickle since protocol 2.
_GZIP, _PICKLE = b"\x1f\x8b", b"\x80"
_SHOWN = 512
_TAR, _TAR_MARK = b"ustar", 262  # the mark of a tar header, and where it ends
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


def _hint_checkpoint_of_graph(probe: Probe) -> str | None:
    """Return the command that lists the checkpoint beside a Saver's graph, otherwise None."""
    stem, suffix = os.path.splitext(probe.path)
    name = os.path.basename(stem)
    if suffix != ".meta" or probe.names.isdisjoint((name, f"{name}.index")):
        return None
    return f"ckpttool inspect {shlex.quote(stem)} lists the checkpoint, with which the graph is read"


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
        hint = _hint_checkpoint_of_graph(probe) or model.hint
        return NotACheckpointError(f"this is {model.what}", file=probe.path, hint=hint)
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
        return zlib.decompressobj(31).decompress(head, _SHOWN)
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
    what = "this is a zip archive without a data.pkl or model.weights.h5, which cannot be read directly"
    shown = abbreviate_list(sorted(probe.members), _SUGGESTIONS) if probe.members else None
    return UnsupportedError(what, file=probe.path, found=shown, hint=_archive_hint("zip", probe))


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
        "the graph of a TensorFlow checkpoint (MetaGraphDef, the content of a Saver's .meta file)",
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
