"""Check checkpoint files for code and damage, and convert them to text for git."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from ckpttool.commands import stats
from ckpttool.commands.processes import count_jobs, pause_collection, run_tasks
from ckpttool.core import code_references, deferred, filesystem, limits, plugins, text, urls
from ckpttool.core.atomic_write import Progress, WorkerThread, ignore_progress, is_hidden_name, write_file
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CodeReference
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.digests import DigestRecorder
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    NotACheckpointError,
    NotFoundError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    from_system_error,
)
from ckpttool.core.source import Checksum, File, Span
from ckpttool.core.text import clean, describe_error, describe_record, format_count, natural_sort_key
from ckpttool.core.tree import Leaf, Path, Record, ValueLeaf
from ckpttool.core.tree_views import render_record
from ckpttool.formats import detect, tf_common, tf_object_graph
from ckpttool.formats.detect import CheckpointLocation, open_checkpoint
from ckpttool.formats.probe import Probe
from ckpttool.formats.tf_common import SlicedTensor
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing import audit, paths
from ckpttool.listing.findings import Finding, data_only_command, unjudged_findings, weightless_findings
from ckpttool.version import __version__

# Which files in folders and patterns count as checkpoints, so that `check` misses none of them.

# Suffixes used almost only by checkpoints: such a file must be readable, or the check fails.
_OWN = (
    "ckpt cleanrl_model cloudpickle cpb d3 dill distcp h5 h5f hdf5 joblib keras mar msgpack msgpck npy npz "
    "onnx pickle pkl pt pth pyt safetensors t7 th"
)
# Suffixes that other programs use too: such a file counts unless it is text or a TensorFlow graph.
_SHARED = "bin index meta model p params pb plan"
# Models of other programs (llama.cpp, TensorFlow Lite, Core ML, torch.export, ExecuTorch, ONNX Runtime,
# TensorRT, NNEF, Paddle, Caffe, MNN, RKNN, SNPE): only pickles and programs in such a file are checked.
_FOREIGN = (
    "caffemodel dlc engine ggml gguf llamafile mlmodel mlmodelc mlpackage mnn nnef ort pdiparams pdmodel "
    "pdopt pdparams pt2 pte ptl rknn tflite trt"
)
# Archives: each member is checked separately.
_ARCHIVES = "tar tbz2 tgz txz zip"
_PACKED = (".bz2", ".gz", ".lz4", ".lzma", ".xz", ".z", ".zst")
_SHARD = deferred.compile(r".+\.data-\d{5}-of-\d{5}", re.DOTALL)
OWN, SHARED, ARCHIVE, FOREIGN = "own", "shared", "archive", "foreign"
SUFFIXES: Mapping[str, str] = {
    f".{name}": kind
    for kind, names in ((OWN, _OWN), (SHARED, _SHARED), (ARCHIVE, _ARCHIVES), (FOREIGN, _FOREIGN))
    for name in names.split()
}
# Folders of version control systems; no repository can contain a folder with these names.
_REPOSITORIES = frozenset((".git", ".hg", ".svn"))
# TensorFlow writes these beside a graph: five hashes (tensorflow/core/protobuf/fingerprint.proto), and on
# request the source lines of the nodes (tensorflow/python/saved_model/constants.py, DEBUG_INFO_FILENAME_PB).
_BESIDE_GRAPH = frozenset(("fingerprint.pb", "saved_model_debug_info.pb"))
_DEPTH = 3  # maximum nesting of archives


def suffix_kind(name: str) -> str | None:
    """Return the kind of a file name's suffix (see SUFFIXES); None for a suffix that no checkpoint has."""
    name = name.lower()
    stem = next((name.removesuffix(end) for end in _PACKED if name.endswith(end)), name)
    if _SHARD.fullmatch(name):
        return OWN
    found = SUFFIXES.get(os.path.splitext(f"x{stem}")[1])
    return OWN if found == SHARED and stem != name else found


@dataclass(frozen=True, slots=True)
class CheckCandidate:
    """One path to check: its format, or the reason why no format reads it.

    `code_references` is code found in a file that no format reads; `order` sorts results by argument.
    """

    path: str
    order: tuple[int, list[tuple[int, str]]]
    found: CheckpointLocation | None = None
    error: CkpttoolError | None = None
    code_references: tuple[CodeReference, ...] = ()

    @property
    def name(self) -> str | None:
        """The name of the format that reads it."""
        return None if self.found is None else self.found.format.NAME

    @property
    def rank(self) -> int:
        """Position in the opening order: folders first, then multi-file checkpoints, then single files."""
        if filesystem.isdir(self.path):
            return 0
        if not filesystem.isfile(self.path):
            return 1
        return 2 if self.path.endswith(".json") else 3


@dataclass
class CandidateCollector:
    """Checkpoint candidates of the arguments; `skipped` are files that are not checkpoints.

    `unchecked` are models that no format reads, each with the reason. `parts` maps each file of a
    multi-file checkpoint to the checkpoint that it should belong to.
    """

    found: dict[str, CheckCandidate] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unchecked: dict[str, CkpttoolError] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    _argument: int = 0
    _names: int = 0
    _visited: set[str] = field(default_factory=set)

    def ordered(self) -> list[CheckCandidate]:
        """Return all candidates in opening order: outer folders before their contents."""
        # A folder may stand for its index file, which is also listed by its own name.
        files = (each for each in self.found.values() if each.path.endswith(".json"))
        indexes = {(os.path.dirname(each.path), each.name) for each in files if each.name}
        every = (each for each in self.found.values() if (each.path, each.name) not in indexes)
        return sorted(every, key=lambda each: (each.rank, each.order))

    def beside(self, path: str, location: str) -> CheckCandidate:
        """Return a candidate for a file that is listed after its checkpoint."""
        argument = self.found[file_identity(location)].order[0]
        return CheckCandidate(path, (argument, natural_sort_key(path)))

    def add(self, path: str, *, alone: bool) -> None:
        """Add the candidates of one argument; raise NotFoundError for a pattern without a match."""
        path = filesystem.resolve_path(path)
        if filesystem.isdir(path):
            self._whole(path)
        elif glob.has_magic(path) and not filesystem.lexists(path):
            self._pattern(path)
        elif alone or not path.endswith(paths.BESIDE) or self._is_claimed(path):
            self._named(path)
        self._argument += 1

    def _is_claimed(self, path: str) -> bool:
        try:
            return detect.find_format(Probe(path)) is not None
        except CkpttoolError:
            return True

    def _put(
        self,
        path: str,
        found: CheckpointLocation | None = None,
        error: CkpttoolError | None = None,
        references: tuple[CodeReference, ...] = (),
    ) -> None:
        order = (self._argument, natural_sort_key(path))
        self.found.setdefault(file_identity(path), CheckCandidate(path, order, found, error, references))

    def _named(self, path: str) -> None:
        try:
            found = detect.resolve(path)
        except CkpttoolError as error:
            kind = suffix_kind(os.path.basename(path))
            if kind == ARCHIVE and filesystem.isfile(path):
                if self._archive(Probe(path)) and self.skipped[-1:] != [path]:
                    return
            elif filesystem.isfile(path) and self._is_unchecked(Probe(path), kind):
                self._leave_unchecked(path, error, find_unclaimed_code(path))
                return
            self._put(path, error=error, references=find_unclaimed_code(path))
        else:
            self._put(found.location, found)

    def _whole(self, folder: str) -> None:
        before = self._total()
        self._folder(folder)
        if self._total() == before:
            self._named(folder)

    def _total(self) -> int:
        return len(self.found) + len(self.unchecked)

    def _leave_unchecked(
        self, path: str, error: CkpttoolError, references: tuple[CodeReference, ...] = ()
    ) -> None:
        """Record a model of another program; code in it is a finding all the same."""
        if references:
            self._put(path, references=references)
        # The files of a model in a folder are not counted one by one.
        if not any(path.startswith(f"{package}/") for package in self.unchecked):
            self.unchecked.setdefault(path, error)

    def _pattern(self, pattern: str) -> None:
        names = paths.match_paths(pattern)
        if not names:
            raise NotFoundError(
                "no file or folder matches the pattern",
                file=pattern,
                hint="a folder stands for everything below it: ckpttool check FOLDER",
            )
        # A link to a parent folder creates many names for a file: the shortest one is used.
        for name in sorted(names, key=lambda each: (each.count(os.sep), natural_sort_key(each))):
            if filesystem.isdir(name):
                self._folder(name)
            else:
                self._file(name, None)

    def _folder(self, top: str) -> None:
        """Search everything under a folder, including hidden files; links are followed, each folder once."""
        waiting: list[str] = [top]
        links: list[str] = []
        while waiting or links:
            # Link targets come last, so that files are listed by their own names.
            folder = waiting.pop() if waiting else links.pop()
            real = file_identity(folder)
            if real in self._visited:
                continue
            self._visited.add(real)
            try:
                names = filesystem.listdir(folder)
            except OSError as error:
                reason = NotFoundError(f"cannot list the folder: {error.strerror}", file=folder)
                self._put(folder, error=reason)
                continue
            self._count(len(names), top)
            if names and suffix_kind(os.path.basename(folder)) == FOREIGN:
                message = "this folder is a model of another program, which is not supported"
                self._leave_unchecked(folder, UnsupportedError(message, file=folder))
            self._claimed_folder(folder)
            known = frozenset(name for name in names if not is_hidden_name(name))
            for name in sorted(names, key=natural_sort_key):
                path = os.path.join(folder, name)
                if not filesystem.isdir(path):
                    self._file(path, None if is_hidden_name(name) else known)
                elif name in _REPOSITORIES:
                    self.skipped.append(path)
                else:
                    (links if filesystem.islink(path) else waiting).append(path)

    def _count(self, more: int, top: str) -> None:
        self._names += more
        if self._names > limits.current().checked_files:
            what = "the folder and its subfolders contain too many files"
            raise limits.limit_error("checked_files", what, self._names, file=top)

    def _claimed_folder(self, folder: str) -> None:
        try:
            found = detect.claiming_formats(Probe(folder))
        except CkpttoolError as error:
            self._put(folder, error=error)
            return
        for each in found:
            # A state file may name a checkpoint in another folder, which is checked there.
            if f"{each.location}/".startswith(f"{folder.rstrip('/')}/"):
                self._put(each.location, each)

    def _file(self, path: str, names: frozenset[str] | None) -> None:
        real = file_identity(path)
        if real in self._visited:
            return
        self._visited.add(real)
        name = os.path.basename(path)
        kind = suffix_kind(name)
        probe = Probe(path)
        if names is not None:
            probe.names = names  # set here to avoid listing the folder for each file
        if probe.kind != "file":
            self._no_file(probe, kind)
            return
        if name == tf_common.NAME and tf_common.is_state_file(probe.head):
            self.skipped.append(path)
            return
        try:
            found = detect.find_format(probe)
        except CkpttoolError as error:
            if kind == FOREIGN:
                self._leave_unchecked(path, error, find_unclaimed_code(path))
            else:
                self._put(path, error=error, references=find_unclaimed_code(path))
            return
        if found is None:
            self._unclaimed(probe, kind)
            return
        self._put(found.location, found)
        if file_identity(found.location) != real:
            self.parts.setdefault(path, found.location)

    def _no_file(self, probe: Probe, kind: str | None) -> None:
        if kind is None:
            self.skipped.append(probe.path)
            return
        try:
            found = detect.resolve(probe.path)
        except CkpttoolError as error:
            self._put(probe.path, error=error)
        else:
            self._put(found.location, found)

    def _unclaimed(self, probe: Probe, kind: str | None) -> None:
        if kind == ARCHIVE and self._archive(probe):
            return
        references = find_unclaimed_code(probe.path, probe)
        if self._is_unchecked(probe, kind):
            self._leave_unchecked(probe.path, _unchecked_reason(probe), references)
        elif references:
            self._put(
                probe.path,
                error=None if kind is None else detect.unknown_file_error(probe),
                references=references,
            )
        elif (
            self._is_other(probe) if kind == SHARED else kind is None and not detect.is_unjudged_graph(probe)
        ):
            # Files that ckpttool writes beside a checkpoint belong to it.
            if not (probe.name.endswith(paths.BESIDE) and probe.head.startswith(b"{")):
                self.skipped.append(probe.path)
        else:
            self._put(probe.path, error=detect.unknown_file_error(probe))

    def _is_other(self, probe: Probe) -> bool:
        return probe.name in _BESIDE_GRAPH or detect.is_text_or_graph(probe)

    def _is_unchecked(self, probe: Probe, kind: str | None) -> bool:
        """Return whether the file is a model of another program, by its suffix or its content."""
        if kind == SHARED:
            return not self._is_other(probe) and not detect.is_broken(probe)
        return kind == FOREIGN or (kind is None and detect.is_marked_model(probe))

    def _archive(self, probe: Probe) -> bool:
        """Search each member of an archive; return whether that was possible."""
        scheme = "zip" if probe.head.startswith(b"PK") else "tar"
        if probe.path.count("::") >= _DEPTH or not probe.head:
            return False
        try:
            scanned = detect.scan_for_code(File.stamp(probe.path))
            place = filesystem.resolve_path(f"{scheme}://::{probe.path}")
            filesystem.listdir(place)
        except (CkpttoolError, OSError):
            return False
        if scanned.unread:
            reason = UnsupportedError(
                f"cannot read the contents of the archive: {scanned.unread[0]}", file=probe.path
            )
            self._put(probe.path, error=reason, references=scanned.code_references)
            return True
        before = self._total()
        self._folder(place)
        if self._total() == before:
            self.skipped.append(probe.path)
        return True


def _unchecked_reason(probe: Probe) -> CkpttoolError:
    if detect.is_text_or_graph(probe):
        suffix = os.path.splitext(probe.name)[1]
        return UnsupportedError(f"{suffix} is the suffix of another program's models", file=probe.path)
    return detect.unknown_file_error(probe)


def collect_candidates(paths: Sequence[str]) -> CandidateCollector:
    """Return the candidates of the paths; each file counts once, at its first position."""
    found = CandidateCollector()
    with filesystem.read_session():
        for path in paths:
            found.add(path, alone=len(paths) == 1)
    return found


def file_identity(path: str) -> str:
    """Return the real path of a file, also of an archive member: equal for every name of the same file."""
    outer, link, inner = path.partition("::")
    return (
        f"{filesystem.realpath(outer)}{link}{inner}"
        if filesystem.find_store(path) is not None
        else filesystem.realpath(path)
    )


def describe_stray_file(path: str) -> tuple[tuple[CodeReference, ...], CkpttoolError | None] | None:
    """Return the problem with a file that its checkpoint does not use: code, or a data suffix."""
    references = find_unclaimed_code(path)
    if suffix_kind(os.path.basename(path)) == OWN:
        return references, NotACheckpointError("no checkpoint uses this file", file=path)
    return (references, None) if references else None


def find_unclaimed_code(path: str, probe: Probe | None = None) -> tuple[CodeReference, ...]:
    """Return the code references in a file that no format reads.

    Programs in archives count if the archive is a model; other archives may contain any files.
    """
    if not filesystem.isfile(path):
        return ()
    probe = probe or Probe(path)
    model = suffix_kind(os.path.basename(path)) in (OWN, FOREIGN)
    try:
        programs = model or detect.match_archive(probe.members) is not None
        scanned = detect.scan_for_code(File.stamp(path), programs=programs)
        unsafe = code_references.unsafe_references(code_references.apply_allowed(scanned.code_references))
        return (*unsafe, *(detect.list_operations(probe) or ()), *detect.list_model_calls(probe))
    except (CkpttoolError, OSError):
        return ()


def _find_other_formats(each: CheckCandidate) -> tuple[str, ...]:
    """Return sentences on parts of a refused file that another loader would open."""
    if each.name is None or not filesystem.isfile(each.path):
        return ()
    try:
        return detect.scan_for_code(File.stamp(each.path), format=each.name).ambiguous
    except (CkpttoolError, OSError):
        return ()


# Record of a good checkpoint, as saved by `inspect --json`, and the differences of another one.

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """Tensor names, types and shapes of a checkpoint, and its layout, as saved by `inspect --json`."""

    layout: str | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def read_shape_record(file: str) -> ShapeRecord:
    """Return the record that `inspect --json` saved.

    Raise NotFoundError for a missing file, and FormatError for another kind of document.
    """
    if not os.path.isfile(file):
        hint = f"ckpttool inspect PATH --json > {file} records the shapes of PATH"
        raise NotFoundError("file of recorded shapes not found", file=file, hint=hint)
    saved = text.load_json(file, "the recorded listing")
    try:
        forms = [(str(each["path"]), str(each["dtype"]), each["shape"]) for each in saved["tensors"]]
        tensors = {name: (dtype, tuple(map(int, shape))) for name, dtype, shape in forms}
        return ShapeRecord(None if saved["layout"] is None else str(saved["layout"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("not a document written by ckpttool inspect --json", file=file) from error


def find_drift(checkpoint: Checkpoint, layout: str | None, was: ShapeRecord) -> Iterator[Finding]:
    """Yield a finding for each difference from the record: layout, names, types, shapes.

    If the layout differs, all names differ, so only their number is reported.
    """
    shown = _SHOWN
    if was.layout is not None and layout != was.layout:
        yield Finding("layout", f"the layout is {layout or 'unknown'}, but {was.layout} is recorded")
        shown = 0
    tree = checkpoint.tree
    now = {tree.names[path]: (leaf.dtype, tuple(leaf.shape)) for path, leaf in tree.tensors()}
    changed = sorted(
        (n for n in {**was.tensors, **now} if was.tensors.get(n) != now.get(n)), key=natural_sort_key
    )
    for name in changed[:shown]:
        before, after = (_format_recorded(each.get(name)) for each in (was.tensors, now))
        yield Finding("layout", f"{name}: found {after}, recorded {before}")
    if len(changed) > shown:
        more = "more " if shown else ""
        yield Finding("layout", f"{len(changed) - shown:,} {more}tensors differ from the record")


def _format_recorded(form: tuple[str, tuple[int, ...]] | None) -> str:
    return "no tensor" if form is None else f"{form[0]}{list(form[1])}"


# `check`: check many checkpoints before they are committed or merged.

_NAMED = 100  # maximum number of skipped names in the document


@dataclass(frozen=True, slots=True)
class CheckpointVerdict:
    """Result for one checkpoint: its findings, and the error that kept it from being read completely.

    `file` is where findings are shown: the path, or the first file of a folder or prefix.
    """

    path: str
    format: str | None = None
    layout: str | None = None
    tensors: int = 0
    findings: tuple[Finding, ...] = ()
    error: CkpttoolError | None = None
    file: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        error = self.error
        error_document = (
            None if error is None else {"kind": error.kind, "message": str(error), "hint": error.hint}
        )
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "tensors": self.tensors,
            "findings": [each.document() for each in self.findings],
            "error": error_document,
        }


class UncheckedFile(NamedTuple):
    """A model that no format reads, and the reason; a file, or a folder."""

    path: str
    error: CkpttoolError

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": urls.display_url(self.path), "message": self.error.message, "hint": self.error.hint}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All checkpoints found under the paths, in order, each once.

    `unchecked` are models that no format reads; `skipped` lists the other files.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    checkpoints: tuple[CheckpointVerdict, ...]
    skipped: tuple[str, ...] = ()
    unchecked: tuple[UncheckedFile, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether everything was read and nothing was found."""
        return not self.unchecked and not any(each.findings or each.error for each in self.checkpoints)

    @property
    def status(self) -> int:
        """The exit status: 2 if something could not be read or checked, 1 for a finding."""
        return 2 if self.failed or self.unchecked else 0 if self.clean else 1

    @property
    def failed(self) -> tuple[CheckpointVerdict, ...]:
        """The checkpoints that could not be read."""
        return tuple(each for each in self.checkpoints if each.error is not None)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        names = [urls.display_url(name) for name in self.skipped[:_NAMED]]
        return {
            "clean": self.clean,
            "checkpoints": [each.document() for each in self.checkpoints],
            "skipped": {"count": len(self.skipped), "names": names},
            "not_checked": [each.document() for each in self.unchecked],
        }


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What each checkpoint is checked for.

    With `strict`, anything but plain data is a finding; with `numbers`, every tensor is read, its checksum
    verified and its values checked to be finite. `layout` is the layout that must match, `recorded` the
    expected tensors. `allowed` are dotted names of modules, classes and functions that pickles may use
    besides the built-in list.
    """

    strict: bool = False
    numbers: bool = True
    layout: str | None = None
    recorded: ShapeRecord | None = None
    allowed: frozenset[str] = frozenset()


def check(
    paths: str | Sequence[str],
    wanted: CheckOptions | None = None,
    progress: Progress = ignore_progress,
    *,
    jobs: int | None = None,
    ray: str | None = None,
) -> CheckResult:
    """Check every checkpoint found under the paths, or under one path (see `collect_candidates`).

    A checkpoint that cannot be read is reported with the others. A file of a multi-file checkpoint is
    checked with it, once. `jobs` is the number of processes: by default one per core if there are at
    least MANY checkpoints, else none but this one; `ray` is the address of a cluster for them. Raise
    UsageError for an unknown layout, and NotFoundError for a pattern without a match.

    >>> import ckpttool
    >>> checked = ckpttool.check(["sample_ckpts/td3_pendulum_torch"])
    >>> checked.clean, len(checked.checkpoints)
    (True, 6)
    """
    wanted = wanted or CheckOptions()
    if wanted.layout is not None:
        plugins.find("layouts", wanted.layout)
    with code_references.allowing(wanted.allowed):
        return _check_all([paths] if isinstance(paths, str) else paths, wanted, progress, (jobs, ray))


def _check_all(
    paths: Sequence[str], wanted: CheckOptions, progress: Progress, spread: tuple[int | None, str | None]
) -> CheckResult:
    collected = collect_candidates(paths)
    ordered = collected.ordered()
    found: list[tuple[CheckCandidate, CheckpointVerdict]] = []
    taken = _JudgedFiles()
    with contextlib.closing(_judge_ahead(ordered, wanted, *spread)) as judged:
        for number, (each, known) in enumerate(zip(ordered, judged, strict=True)):
            if not taken.has(each.path):
                verdict, files = known or _judge_candidate(each, wanted)
                taken.add(files)
                found.append((each, verdict))
            progress(number + 1, len(ordered))
    failed = {file_identity(each.path) for each, checked in found if checked.error is not None}
    for path, location in collected.parts.items():
        wrong = None if taken.has(path) or file_identity(location) in failed else describe_stray_file(path)
        if wrong is not None:
            found.append((collected.beside(path, location), _unused_file_verdict(path, *wrong)))
    found.sort(key=lambda pair: pair[0].order)
    skipped = (name for name in collected.skipped if not taken.has(name))
    unchecked = (UncheckedFile(*each) for each in collected.unchecked.items() if not taken.has(each[0]))
    return CheckResult(tuple(checked for _, checked in found), tuple(skipped), tuple(unchecked))


_TOGETHER = 8  # checkpoints of one task of a process
_Judged = tuple[CheckpointVerdict, tuple[str, ...]]
"""a verdict, and the identities of the files that were read for it"""


def _judge_ahead(
    ordered: Sequence[CheckCandidate], wanted: CheckOptions, jobs: int | None, ray: str | None
) -> Generator[_Judged | None, None, None]:
    """Yield what other processes found for each candidate; None for one that is judged in this one.

    These are the candidates on remote sites and in archives, and all of them if there is one job.
    """
    if ray is None and (jobs := count_jobs(len(ordered), jobs)) < 2:
        yield from itertools.repeat(None, len(ordered))
        return
    local = [each for each in ordered if filesystem.find_store(each.path) is None]
    tasks = [_CheckTask(local[at : at + _TOGETHER], wanted) for at in range(0, len(local), _TOGETHER)]
    paths = [each.path for each in local]
    judged = itertools.chain.from_iterable(run_tasks(tasks, paths, jobs, ray))
    for each in ordered:
        yield next(judged) if filesystem.find_store(each.path) is None else None


class _CheckTask(NamedTuple):
    """Candidates for another process."""

    candidates: Sequence[CheckCandidate]
    wanted: CheckOptions

    def run(self) -> list[_Judged]:
        """Return the verdict on each."""
        with code_references.allowing(self.wanted.allowed):
            return [_judge_candidate(each, self.wanted) for each in self.candidates]

    def single(self) -> list[_CheckTask]:
        """Return a task for each candidate."""
        return [self._replace(candidates=[each]) for each in self.candidates]

    def failed(self, error: CkpttoolError) -> list[_Judged]:
        """Return the verdict on the only candidate: it ended its process."""
        (each,) = self.candidates
        reason = error.located(file=each.path)
        return [(CheckpointVerdict(urls.display_url(each.path), error=reason, file=each.path), ())]


class _JudgedFiles:
    """Files that were checked as part of a checkpoint, so that none is checked twice."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, real: Sequence[str]) -> None:
        """Add the identities of a checkpoint's files."""
        self._files.update(real)
        self._folders.update(map(os.path.dirname, real))

    def has(self, path: str) -> bool:
        """Return whether a file, or files of a folder or prefix, were already checked."""
        real = file_identity(path)
        return real in self._files or real in self._folders or f"{real}.index" in self._files


def _unused_file_verdict(
    path: str, references: Sequence[CodeReference], error: CkpttoolError | None
) -> CheckpointVerdict:
    return CheckpointVerdict(
        urls.display_url(path), findings=_code_findings(references), error=error, file=path
    )


def _judge_candidate(each: CheckCandidate, wanted: CheckOptions) -> _Judged:
    """Return the verdict on a candidate, and the identities of its files if it could be read."""
    name = urls.display_url(each.path)
    if each.error is not None or each.found is None:
        findings = _code_findings(each.code_references)
        return CheckpointVerdict(name, findings=findings, error=each.error, file=each.path), ()
    found: list[Finding] = []
    try:
        with pause_collection():
            checkpoint = detect.read_location(each.found)
            layout = _judge(checkpoint, wanted, found)
    except CkpttoolError as error:
        reason = error.located(file=each.path)
    except Exception as error:  # noqa: BLE001  # the other files are to be judged whatever this one does
        fault = CkpttoolError(f"unexpected {type(error).__name__}: {error}")
        reason = (from_system_error(error) or fault).located(file=each.path)
    else:
        tensors = sum(1 for _ in checkpoint.tree.tensors())
        verdict = CheckpointVerdict(
            urls.display_url(checkpoint.path),
            checkpoint.format,
            layout,
            tensors,
            tuple(found),
            file=_representative_file(checkpoint),
        )
        return verdict, tuple(file_identity(file.path) for file in checkpoint.files)
    kept = tuple(found) or (
        *_code_findings(find_unclaimed_code(each.path)),
        *unjudged_findings(_find_other_formats(each)),
    )
    return CheckpointVerdict(name, findings=kept, error=reason, file=each.path), ()


def _representative_file(checkpoint: Checkpoint) -> str:
    """Return one file to represent the checkpoint, because a folder or prefix is not a file."""
    if filesystem.isfile(checkpoint.path) or not checkpoint.files:
        return checkpoint.path
    return checkpoint.files[0].path


def _judge(checkpoint: Checkpoint, wanted: CheckOptions, findings: list[Finding]) -> str | None:
    """Append findings and return the layout; on an error, the findings so far stay in the list."""
    findings += _loading_findings(checkpoint, wanted)
    findings += weightless_findings(checkpoint, values=False)
    layout, misfit = _recognize_layout(checkpoint, wanted.layout)
    findings += misfit
    if wanted.recorded is not None:
        findings += find_drift(checkpoint, layout, wanted.recorded)
    if wanted.numbers:
        findings += _number_findings(checkpoint)
    return layout


def _code_findings(references: Sequence[CodeReference]) -> tuple[Finding, ...]:
    """Return the finding for code in a file that cannot be read as a checkpoint."""
    if not references:
        return ()
    return (
        Finding(
            "loading", audit.summarize_audit(code_references.merge_references(references)).sentence, None
        ),
    )


def _loading_findings(checkpoint: Checkpoint, wanted: CheckOptions) -> Iterator[Finding]:
    worst = code_references.worst_verdict(checkpoint.code_references)
    if worst in code_references.UNSAFE or (wanted.strict and worst != code_references.PLAIN):
        yield Finding(
            "loading",
            audit.summarize_audit(checkpoint.code_references).sentence,
            data_only_command(checkpoint.path),
        )
    yield from unjudged_findings(checkpoint.unjudged)


def _recognize_layout(checkpoint: Checkpoint, layout: str | None) -> tuple[str | None, list[Finding]]:
    """Return the recognised layout, and a finding if it is not the requested one."""
    try:
        binding = recognize_checkpoint(checkpoint, layout)
    except UsageError as error:
        if layout is None:
            raise
        return None, [Finding("layout", error.message)]
    return (None if binding is None else binding.layout), []


def _number_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Read every tensor, one at a time, and yield those with NaN or infinite values."""
    bad: list[tuple[str, str]] = []
    for path, leaf in checkpoint.tree.tensors():
        name = checkpoint.tree.names[path]
        try:
            problem = _describe_nonfinite(path, leaf)
        except CkpttoolError as error:
            raise error.located(path=name) from error
        if problem:
            bad.append((name, problem))
    for name, problem in bad[:_SHOWN]:
        yield Finding("numbers", f"{name}: {problem}")
    if len(bad) > _SHOWN:
        more = format_count(len(bad) - _SHOWN, "more tensor")
        yield Finding("numbers", f"and {more} with NaN or infinite values")


def _read_values(leaf: Leaf) -> stats.Values | None:
    """Return the values of a tensor; None for elements that NumPy has no type for, which are read, too."""
    try:
        return leaf.values()
    except UnsupportedError:
        leaf.read()
        return None


def _describe_nonfinite(path: Path, leaf: Leaf) -> str:
    values = _read_values(leaf)
    # Every piece is read, because checksums are verified after the last one.
    if values is None or min(map(stats.is_finite, stats.iter_values(values)), default=True):
        return ""
    known = stats.compute_moments(values)
    counts = [
        f"{n:,} {word}" for n, word in stats.count_nonfinite([str(step.value) for step in path], leaf, known)
    ]
    return f"{' and '.join(counts)} of {format_count(known.size, 'number')}" if counts else ""


# `check` results as SARIF, the format in which code hosts accept findings of other programs.
#
# Source: Static Analysis Results Interchange Format (SARIF) Version 2.1.0, OASIS Standard; numbers in
# comments are its sections.

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_BASE = "%SRCROOT%"  # name used by code hosts for the root of a repository
_SARIF_FINGERPRINT = "ckpttoolFinding/v1"
_BEGINNING = 4096


class _SarifRule(NamedTuple):
    id: str
    name: str
    short: str
    full: str
    help: str
    level: Literal["error", "warning"]
    severity: str | None = None


_UNREADABLE = "ckpttool/unreadable"
# Keyed by the topic of a finding.
_RULES: Mapping[str, _SarifRule] = {
    "loading": _SarifRule(
        "ckpttool/loading",
        "LoadingRunsCode",
        "Loading the checkpoint would run code",
        "Loading the file calls or runs more than the allow lists name, e.g. a pickle that calls a function "
        "or creates an instance of an unknown class, a Keras Lambda layer, or a graph that reads files.",
        "Do not load the file. `ckpttool inspect FILE` lists the names; `ckpttool convert FILE safe.npz` "
        "keeps only the data.",
        "error",
        "9.0",
    ),
    "numbers": _SarifRule(
        "ckpttool/numbers",
        "NumbersNotFinite",
        "Tensors contain NaN or infinite values",
        "A tensor of the checkpoint contains NaN or infinite values.",
        "Go back to an earlier checkpoint of the run. `ckpttool stats FILE` shows the tensors.",
        "warning",
    ),
    "layout": _SarifRule(
        "ckpttool/layout",
        "LayoutDiffers",
        "Layout, names, types or shapes differ from the record",
        "The checkpoint does not have the requested layout, or its tensor names, types or shapes differ "
        "from those recorded by `ckpttool inspect --json`.",
        "If the change is intended, record the shapes again: `ckpttool inspect FILE --json > shapes.json`.",
        "error",
    ),
    "unreadable": _SarifRule(
        _UNREADABLE,
        "CheckpointUnreadable",
        "The checkpoint cannot be read",
        "The file is damaged, incomplete, empty, a Git LFS pointer, or in an unsupported format. Its "
        "contents are unknown.",
        "Fetch the file itself (`git lfs pull`), restore it, or remove it.",
        "error",
    ),
}
_ORDER = {topic: number for number, topic in enumerate(_RULES)}
_NOTIFICATIONS = {
    "error": "A file could not be checked",
    "not-checked": "A model of another program was not checked",
}


def write_sarif(
    found: CheckResult | None, status: int, target: str, problem: CkpttoolError | None = None
) -> None:
    """Write the results, or the error that stopped the check, to the SARIF file `target`.

    An existing SARIF file is replaced; raise TargetExistsError for any other existing target.
    """
    _require_sarif(target)
    content = json.dumps(build_sarif(found, status, problem), indent=1, ensure_ascii=True).encode() + b"\n"
    write_file(target, content, force=True)


def _require_sarif(target: str) -> None:
    if not os.path.lexists(target) or os.path.isdir(target):
        return
    start = filesystem.read_bytes(target, 0, _BEGINNING) if os.path.isfile(target) else b""
    if start and not (start.lstrip().startswith(b"{") and b'"runs"' in start and b"sarif" in start.lower()):
        raise TargetExistsError("the target already exists and is not a SARIF file", file=target)


def build_sarif(
    found: CheckResult | None, status: int, problem: CkpttoolError | None = None
) -> dict[str, Any]:
    """Return the SARIF log: one run, with a result for each finding and each unreadable file."""
    checked = () if found is None else found.checkpoints
    notes = [_notification(each.error, _location(each.file)) for each in checked if each.error is not None]
    if found is not None:
        notes += [_notification(each.error, _location(each.path), "not-checked") for each in found.unchecked]
    if problem is not None:
        notes.append(_notification(problem, None))
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "originalUriBaseIds": {_BASE: {"uri": _directory()}},
                "invocations": [
                    {
                        "executionSuccessful": not notes,
                        "exitCode": status,
                        "toolExecutionNotifications": notes,
                    }
                ],
                "results": list(_results(checked)),
                "properties": {
                    "skippedFiles": 0 if found is None else len(found.skipped),
                    "uncheckedFiles": 0 if found is None else len(found.unchecked),
                },
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "ckpttool",
        "version": __version__,
        "rules": [_descriptor(rule) for rule in _RULES.values()],
        "notifications": [
            {"id": f"ckpttool/{name}", "shortDescription": {"text": text}}
            for name, text in _NOTIFICATIONS.items()
        ],
    }


def _descriptor(rule: _SarifRule) -> dict[str, Any]:
    # 3.49; hosts show security-severity beside security findings.
    properties: dict[str, Any] = {"tags": ["checkpoint"]}
    if rule.severity is not None:
        properties = {"tags": ["checkpoint", "security"], "security-severity": rule.severity}
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.short},
        "fullDescription": {"text": rule.full},
        "help": {"text": rule.help, "markdown": rule.help},
        "defaultConfiguration": {"level": rule.level},
        "properties": properties,
    }


def _results(checked: Iterable[CheckpointVerdict]) -> Iterator[dict[str, Any]]:
    for each in checked:
        for finding in each.findings:
            fix = f". Fix: {finding.fix}" if finding.fix else ""
            yield _result(finding.topic, f"{finding.sentence}{fix}", finding.sentence, each)
        if each.error is not None:
            hint = f". Hint: {each.error.hint}" if each.error.hint else ""
            yield _result("unreadable", f"{describe_error(each.error)}{hint}", each.error.message, each)


def _result(topic: str, text: str, identity: str, checked: CheckpointVerdict) -> dict[str, Any]:
    rule = _RULES.get(topic, _RULES["layout"])
    location = _location(checked.file)
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    inner = urls.split_chain(urls.normalize_chain(checked.path) or checked.path)[1:]  # member of an archive
    text = f"{inner[-1]}: {text}" if inner else text
    digest = hashlib.sha256("\0".join((rule.id, uri, *inner, identity)).encode("utf-8", "surrogatepass"))
    return {
        "ruleId": rule.id,
        "ruleIndex": _ORDER.get(topic, _ORDER["layout"]),
        "level": rule.level,
        "message": {"text": clean(text)},
        "locations": [location],
        "partialFingerprints": {_SARIF_FINGERPRINT: digest.hexdigest()},
    }


def _notification(
    error: CkpttoolError, location: dict[str, Any] | None, name: str = "error"
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "descriptor": {"id": f"ckpttool/{name}", "index": list(_NOTIFICATIONS).index(name)},
        "level": "error",
        "message": {"text": describe_error(error)},
        "properties": {"kind": error.kind},
    }
    return found if location is None else {**found, "locations": [location]}


def _location(file: str) -> dict[str, Any]:
    # Hosts show findings beside lines; these files have no lines, so use line 1.
    return {"physicalLocation": {"artifactLocation": _artifact(file), "region": {"startLine": 1}}}


def _artifact(path: str) -> dict[str, Any]:
    """Return the path of a file relative to the working directory, or its full URI if it is elsewhere."""
    links = urls.split_chain(urls.normalize_chain(path) or path)
    if urls.is_url(links[0]):
        return {"uri": quote(urls.display_url(links[0]), safe=":/@+,;=!$&'()*~")}
    place = os.path.abspath(links[0])
    relative = os.path.relpath(place, os.getcwd())
    if relative == os.pardir or relative.startswith(os.pardir + os.sep):
        return {"uri": f"file://{_quote_path(place)}"}
    return {"uri": _quote_path(relative), "uriBaseId": _BASE}


def _quote_path(path: str) -> str:
    return quote(pathlib.PurePath(path).as_posix().encode("utf-8", "surrogateescape"), safe="/")


def _directory() -> str:
    # 3.14.14: a base ends with a slash.
    return f"file://{_quote_path(os.getcwd()).rstrip('/')}/"


# `textconv`: a checkpoint file as lines for `git diff`, from the bytes of this file only.

# Digits of a digest to show: among a million tensors, two share them once in five hundred cases.
_DIGITS = 12
# Longer texts are shown by length and digest.
_LONGEST = 200
# Up to this many values, a tensor is shown by its values instead of its statistics.
_FEW = 4
_SUFFIX = tf_object_graph.MARK + tf_object_graph.VALUE
# Maximum size of a text that is shown unchanged, in bytes.
_LONGEST_FILE = 1 << 20


def textconv(file: str) -> tuple[str, ...]:
    """Return the text form of a checkpoint: format, code that loading runs, then values and tensors by name.

    Only the file itself is read, because git puts an old version alone in a temporary folder. A
    TensorFlow index is therefore described without its shards, by its stored tensor checksums. No line
    contains the file name or alignment, so that a change of one tensor changes one line. An unreadable
    file yields a sentence, because an error would end the whole `git diff`.
    """
    try:
        try:
            with _isolate_file(file) as place:
                return tuple(_summary_lines(open_checkpoint(place)))
        except CkpttoolError as error:
            return _describe_raw_file(file, _message_without_file(error))
    except OSError as error:
        return (f"not readable: {error.strerror or type(error).__name__}",)


@contextlib.contextmanager
def _isolate_file(file: str) -> Iterator[str]:
    """Yield a path with the same bytes and file name, in a folder without other files."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder:
        place = os.path.join(folder, os.path.basename(file))
        os.symlink(os.path.realpath(file), place)
        yield place


def _describe_raw_file(file: str, sentence: str) -> tuple[str, ...]:
    """Return a text file (e.g. a Git LFS pointer) unchanged; for other bytes, the sentence and a digest."""
    if not os.path.isfile(file):
        return (sentence,)
    nbytes = os.path.getsize(file)
    if nbytes <= _LONGEST_FILE:
        with open(file, "rb") as stream, contextlib.suppress(UnicodeDecodeError):
            text = stream.read().decode().expandtabs()
            if text and text.replace("\r", "").replace("\n", "").isprintable():
                return tuple(text.splitlines())
    if tf_common.v2_base(file) is not None:
        sentence = "data shard of a TensorFlow checkpoint; its .index file shows which tensor changed"
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return (sentence, f"{format_count(nbytes, 'byte')}, sha256 {digest[:_DIGITS]}")


def _message_without_file(error: CkpttoolError) -> str:
    """Return the error message without the file name, which differs each time."""
    error.file = None
    return str(error)


def _summary_lines(checkpoint: Checkpoint) -> Iterator[str]:
    tree = checkpoint.tree
    binding = None
    with contextlib.suppress(UsageError):  # if two layouts match, show neither
        binding = recognize_checkpoint(checkpoint)
    yield f"format {checkpoint.format}" + (f", {checkpoint.writer}" if checkpoint.writer else "")
    if binding is not None:
        yield f"layout {binding.layout}"
    for verdict in (code_references.CODE, code_references.UNKNOWN, code_references.CLASSES):
        for each in sorted(
            code_references.filter_verdict(checkpoint.code_references, verdict), key=lambda each: each.name
        ):
            yield f"loading {'calls' if each.calls else 'imports'} {each.name} ({verdict})"
    names = [
        (tree.names[path].removesuffix(_SUFFIX), described) for path, described in _entry_lines(checkpoint)
    ]
    for path, aliases in tree.aliases.items():
        names += [(tree.alias_name(alias), f"alias of {tree.names[path]}") for alias in aliases]
    for name, described in sorted(names, key=lambda each: natural_sort_key(each[0])):
        yield f"{name} {described}"


def _entry_lines(checkpoint: Checkpoint) -> Iterator[tuple[Path, str]]:
    """Yield the description of each entry; one tensor is read while the previous one is hashed."""
    with WorkerThread() as lane:
        recorder = DigestRecorder(checkpoint, lane)
        read: dict[Path, str] = {}
        for path, leaf in recorder.checkpoint.tree.tensors():
            try:
                read[path] = _describe_numbers(leaf)
            except CkpttoolError as error:
                yield (
                    path,
                    f"{_format_leaf(leaf)} {_stored_checksums(checkpoint.tree[path]) or _message_without_file(error)}",  # noqa: E501
                )
        lane.wait()
        for path, numbers in read.items():
            digest = "" if numbers.startswith("=") else recorder.sha256(path)[:_DIGITS]
            yield path, " ".join(filter(None, (_format_leaf(checkpoint.tree[path]), digest, numbers)))
    for path, value in checkpoint.tree.plain():
        yield path, f"= {_describe_value(value)}"


def _format_leaf(leaf: Leaf | ValueLeaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Leaf) else ""


def _stored_checksums(leaf: Leaf | ValueLeaf) -> str:
    """Return the checksums in the index for a tensor whose bytes are in another file."""
    source = leaf.source if isinstance(leaf, Leaf) else None
    parts = [part for _, part in source.parts] if isinstance(source, SlicedTensor) else [source]
    found = [getattr(part, "checksum", None) for part in parts if not isinstance(part, Span)]
    return " ".join(f"{each.kind} {each.value:08x}" for each in found if isinstance(each, Checksum))


def _describe_value(leaf: ValueLeaf) -> str:
    value = leaf.value
    if isinstance(value, Record):
        return _shorten_text(f"{value.name} {value.summary}".rstrip())
    if isinstance(value, bytes):
        return f"{format_count(len(value), 'byte')}, sha256 {hashlib.sha256(value).hexdigest()[:_DIGITS]}"
    return _shorten_text(repr(value))


def _shorten_text(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:_LONGEST]}... ({len(text):,} characters, sha256 {digest[:_DIGITS]})"


def _describe_numbers(leaf: Leaf) -> str:
    """Read a tensor and describe it: a few values as they are, many by their statistics, none as ""."""
    array = _read_values(leaf)
    if array is None:
        return ""
    if isinstance(array, np.ndarray) and leaf.size <= _FEW:
        shown = ", ".join(map(str, array.reshape(-1)))
        return f"= [{shown}]" if leaf.shape else f"= {shown}"
    known = stats.compute_moments(array)
    found = [f"{n:,} {word}" for n, word in ((known.nans, "NaN"), (known.infs, "infinite")) if n]
    if known.finite:
        found.insert(0, f"{known.low:.4g} to {known.high:.4g}, mean {known.mean:.4g}, std {known.std:.4g}")
    return ", ".join(found)
