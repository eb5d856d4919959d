"""The files in folders and patterns that count as checkpoints, so that `check` misses none of them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.core import code_references, deferred, filesystem, limits
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.code_references import CodeReference
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, NotACheckpointError, NotFoundError, UnsupportedError
from ckpttool.core.source import File
from ckpttool.core.text import natural_sort_key
from ckpttool.formats import detect, tf_common, unknown_files
from ckpttool.formats.detect import CheckpointLocation
from ckpttool.formats.probe import Probe
from ckpttool.listing import paths

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
_ZIP = b"PK\x03\x04"


def suffix_kind(name: str) -> str | None:
    """Return the kind of a file name's suffix (see SUFFIXES); None for a suffix that no checkpoint has."""
    name = name.lower()
    stem = next((name.removesuffix(end) for end in _PACKED if name.endswith(end)), name)
    if _SHARD.fullmatch(name):
        return OWN
    kind = SUFFIXES.get(os.path.splitext(f"x{stem}")[1])
    return OWN if kind == SHARED and stem != name else kind


@dataclass(frozen=True, slots=True)
class CheckCandidate:
    """One path to check: its format, or the reason why no format reads it.

    `code_references` is code found in a file that no format reads; `order` sorts results by argument. The
    format of a `pending` archive is found by who reads it, which lists the archive as well.
    """

    path: str
    order: tuple[int, list[tuple[int, str]]]
    location: CheckpointLocation | None = None
    error: CkpttoolError | None = None
    code_references: tuple[CodeReference, ...] = ()
    pending: bool = False

    def locate(self) -> CheckCandidate | None:
        """Return the candidate with its format; None if only `settle` determines what it is."""
        try:
            location = detect.find_format(Probe(self.path)) if self.pending else self.location
        except CkpttoolError:
            return None
        alone = location is not None and location.location == self.path
        return replace(self, location=location, pending=False) if alone or not self.pending else None

    @property
    def name(self) -> str | None:
        """The name of the format that reads it."""
        return None if self.location is None else self.location.format.NAME

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

    candidates: dict[str, CheckCandidate] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unchecked: dict[str, CkpttoolError] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    _argument: int = 0
    _names: int = 0
    _visited: set[str] = field(default_factory=set)

    def ordered(self) -> list[CheckCandidate]:
        """Return all candidates in opening order: outer folders before their contents."""
        # A folder may stand for its index file, which is also listed by its own name.
        files = (candidate for candidate in self.candidates.values() if candidate.path.endswith(".json"))
        indexes = {(os.path.dirname(file.path), file.name) for file in files if file.name}
        every = (item for item in self.candidates.values() if (item.path, item.name) not in indexes)
        return sorted(every, key=lambda candidate: (candidate.rank, candidate.order))

    def beside(self, path: str, location: str) -> CheckCandidate:
        """Return a candidate for a file that is listed after its checkpoint."""
        argument = self.candidates[file_identity(location)].order[0]
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
        location: CheckpointLocation | None = None,
        error: CkpttoolError | None = None,
        references: tuple[CodeReference, ...] = (),
    ) -> None:
        order = (self._argument, natural_sort_key(path))
        self.candidates.setdefault(
            file_identity(path), CheckCandidate(path, order, location, error, references)
        )

    def _named(self, path: str) -> None:
        try:
            location = detect.resolve(path)
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
            self._put(location.location, location)

    def _whole(self, folder: str) -> None:
        before = self._total()
        self._folder(folder)
        if self._total() == before:
            self._named(folder)

    def _total(self) -> int:
        return len(self.candidates) + len(self.unchecked)

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
        for name in sorted(names, key=lambda name: (name.count(os.sep), natural_sort_key(name))):
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
            visible = frozenset(name for name in names if not is_hidden_name(name))
            for name in sorted(names, key=natural_sort_key):
                path = os.path.join(folder, name)
                if not filesystem.isdir(path):
                    self._file(path, None if is_hidden_name(name) else visible)
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
            locations = detect.claiming_formats(Probe(folder))
        except CkpttoolError as error:
            self._put(folder, error=error)
            return
        for location in locations:
            # A state file may name a checkpoint in another folder, which is checked there.
            if f"{location.location}/".startswith(f"{folder.rstrip('/')}/"):
                self._put(location.location, location)

    def settle(self, pending: CheckCandidate) -> list[CheckCandidate]:
        """Return the candidates that a pending one turns out to be."""
        real = file_identity(pending.path)
        del self.candidates[real]
        self._argument, known = pending.order[0], {*self.candidates}
        name = os.path.basename(pending.path)
        self._detect(Probe(pending.path), real, suffix_kind(name))
        return [candidate for identity, candidate in self.candidates.items() if identity not in known]

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
        if kind == OWN and probe.head.startswith(_ZIP):
            order = (self._argument, natural_sort_key(path))
            self.candidates.setdefault(real, CheckCandidate(path, order, pending=True))
        elif name == tf_common.NAME and tf_common.is_state_file(probe.head):
            self.skipped.append(path)
        else:
            self._detect(probe, real, kind)

    def _detect(self, probe: Probe, real: str, kind: str | None) -> None:
        path = probe.path
        if probe.kind != "file":
            self._no_file(probe, kind)
            return
        try:
            location = detect.find_format(probe)
        except CkpttoolError as error:
            if kind == FOREIGN:
                self._leave_unchecked(path, error, find_unclaimed_code(path))
            else:
                self._put(path, error=error, references=find_unclaimed_code(path))
            return
        if location is None:
            self._unclaimed(probe, kind)
            return
        self._put(location.location, location)
        if file_identity(location.location) != real:
            self.parts.setdefault(path, location.location)

    def _no_file(self, probe: Probe, kind: str | None) -> None:
        if kind is None:
            self.skipped.append(probe.path)
            return
        try:
            location = detect.resolve(probe.path)
        except CkpttoolError as error:
            self._put(probe.path, error=error)
        else:
            self._put(location.location, location)

    def _unclaimed(self, probe: Probe, kind: str | None) -> None:
        if kind == ARCHIVE and self._archive(probe):
            return
        references = find_unclaimed_code(probe.path, probe)
        if self._is_unchecked(probe, kind):
            self._leave_unchecked(probe.path, _unchecked_reason(probe), references)
        elif references:
            self._put(
                probe.path,
                error=None if kind is None else unknown_files.unknown_file_error(probe),
                references=references,
            )
        elif (
            self._is_other(probe)
            if kind == SHARED
            else kind is None and not unknown_files.is_unjudged_graph(probe)
        ):
            # Files that ckpttool writes beside a checkpoint belong to it.
            if not (probe.name.endswith(paths.BESIDE) and probe.head.startswith(b"{")):
                self.skipped.append(probe.path)
        else:
            self._put(probe.path, error=unknown_files.unknown_file_error(probe))

    def _is_other(self, probe: Probe) -> bool:
        return probe.name in _BESIDE_GRAPH or unknown_files.is_text_or_graph(probe)

    def _is_unchecked(self, probe: Probe, kind: str | None) -> bool:
        """Return whether the file is a model of another program, by its suffix or its content."""
        if kind == SHARED:
            return not self._is_other(probe) and not unknown_files.is_broken(probe)
        return kind == FOREIGN or (kind is None and unknown_files.is_marked_model(probe))

    def _archive(self, probe: Probe) -> bool:
        """Search each member of an archive; return whether that was possible."""
        scheme = "zip" if probe.head.startswith(b"PK") else "tar"
        if probe.path.count("::") >= _DEPTH or not probe.head:
            return False
        try:
            scanned = detect.scan_for_code(File.stamp(probe.path))
            folder = filesystem.resolve_path(f"{scheme}://::{probe.path}")
            filesystem.listdir(folder)
        except (CkpttoolError, OSError):
            return False
        if scanned.unread:
            reason = UnsupportedError(
                f"cannot read the contents of the archive: {scanned.unread[0]}", file=probe.path
            )
            self._put(probe.path, error=reason, references=scanned.code_references)
            return True
        before = self._total()
        self._folder(folder)
        if self._total() == before:
            self.skipped.append(probe.path)
        return True


def _unchecked_reason(probe: Probe) -> CkpttoolError:
    if unknown_files.is_text_or_graph(probe):
        suffix = os.path.splitext(probe.name)[1]
        return UnsupportedError(f"{suffix} is the suffix of another program's models", file=probe.path)
    return unknown_files.unknown_file_error(probe)


def collect_candidates(paths: Sequence[str]) -> CandidateCollector:
    """Return the candidates of the paths; each file counts once, at its first position."""
    collector = CandidateCollector()
    with filesystem.read_session():
        for path in paths:
            collector.add(path, alone=len(paths) == 1)
    return collector


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
        programs = model or unknown_files.match_archive(probe.members) is not None
        scanned = detect.scan_for_code(File.stamp(path), programs=programs)
        unsafe = code_references.unsafe_references(code_references.apply_allowed(scanned.code_references))
        return (
            *unsafe,
            *(unknown_files.list_operations(probe) or ()),
            *unknown_files.list_model_calls(probe),
        )
    except (CkpttoolError, OSError):
        return ()


def find_other_formats(candidate: CheckCandidate) -> tuple[str, ...]:
    """Return sentences on parts of a refused file that another loader would open."""
    if candidate.name is None or not filesystem.isfile(candidate.path):
        return ()
    try:
        return detect.scan_for_code(File.stamp(candidate.path), format=candidate.name).ambiguous
    except (CkpttoolError, OSError):
        return ()
