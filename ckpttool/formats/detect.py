"""Detection: find the checkpoint for a path."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from ckpttool.core import atomic_write, deferred, dtypes, filesystem, limits, plugins, urls
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import DeferredModule, NamedTuple
from ckpttool.core.errors import CkpttoolError, FormatError, NotACheckpointError, UsageError, abbreviate_list
from ckpttool.core.limits import Limits
from ckpttool.core.source import DeflatedSpan, File, Span, Storage, StoragePart, StridedView, keep_open
from ckpttool.encodings import archives
from ckpttool.formats import pickle_signatures
from ckpttool.formats.probe import HEAD, Format, Probe

if TYPE_CHECKING:
    import zipfile

    from ckpttool.core import code_references
    from ckpttool.core.code_references import CodeReference
else:
    # Most files refer to no code.
    code_references = DeferredModule("ckpttool.core.code_references")


# Locations of the model inside a run folder, regardless of other files: Spinning Up's `_pytorch_simple_save`
# and `_tf_simple_save` (spinup/utils/logx.py).
_RUNS = (("pyt_save", "model.pt"), ("tf1_save",))
# Shard names in transformers and accelerate.
_SHARD = deferred.compile(
    r"(?P<stem>.+-)(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.(safetensors|bin|pt|pth))"
)
_MOST_SHARDS = 10_000


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
    with keep_open():
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


@keep_open()
def read_location(location: CheckpointLocation) -> Checkpoint:
    """List the checkpoint; add the code in its files to the audit by its format."""
    try:
        checkpoint = add_code_scan(location.format.read(location.location))
    except FormatError as error:  # of a helper that decodes bytes, without the file
        error.file = error.file or urls.display_url(location.location)
        raise
    if not checkpoint.code_references:
        return checkpoint
    return replace(checkpoint, code_references=code_references.apply_allowed(checkpoint.code_references))


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
        from ckpttool.formats.unknown_files import not_found_error  # for errors only

        raise not_found_error(probe)
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


_DEPTH = 4  # nesting depth of archives and compressors
_HEAD, _PIECE = 512, 4096
_SMALL = 16 << 10
_ZIP, _NPY, _TAR = b"PK\x03\x04", b"\x93NUMPY", b"ustar"
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


def _program(where: str) -> CodeReference:
    return code_references.CodeReference(where, code_references.CODE, by="program")


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
    known = (
        {reference.name for reference in code_references.unsafe_references(checkpoint.code_references)}
        if checkpoint.code_references
        else ()
    )
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
        rows = scan.code_references
        if rows and name:
            rows = code_references.relocate_references(rows, name)
        references += [row for row in rows if row.name not in known]
        unjudged += [f"{name}: {content}" if name else content for content in (*scan.unread, *scan.ambiguous)]
    if not references and not unjudged:
        return checkpoint
    return replace(
        checkpoint,
        code_references=code_references.merge_references(checkpoint.code_references, references),
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
            self.code_references.append(_program(os.path.basename(file.path)))
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
            acting, end = tuple(code_references.unsafe_references(name.code_references)), name.end
        if end is None and pickle_signatures.JOBLIB in data:
            from ckpttool.formats.pickles import scan_joblib

            name = scan_joblib(self._all(content))
            acting, end = tuple(code_references.unsafe_references(name.code_references)), name.end
        self.code_references += code_references.relocate_references(acting, where) if where else acting
        return end or (0 if acting else None)

    def _member(
        self, content: _ContentReader, name: str, where: str, depth: int, *, alone: bool = True
    ) -> None:
        """Scan a member of an archive; `where` is its whole name."""
        with self.reasons(where):
            if self.programs and _is_program(name, content):
                self.code_references.append(_program(where))
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
                    self.code_references.append(_program(at))
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
    return tuple(code_references.unsafe_references(scan.code_references)), scan.end


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
