"""Which files below folders and patterns count as checkpoints, so that `check` lets none of them through."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool import limits, places, plugins
from ckpttool.errors import (
    CkpttoolError,
    NotACheckpointError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckpttool.formats import checkpoint_state, code_scan, resolve, sniff
from ckpttool.formats.probe import Probe
from ckpttool.formats.resolve import Resolved
from ckpttool.ops import entries
from ckpttool.ops.rows import natural
from ckpttool.source import File
from ckpttool.wire.asked import Asked
from ckpttool.writing import hidden

# Suffixes that checkpoints have and little else: such a file must be read, or it fails the check.
_OWN = (
    "ckpt cleanrl_model cloudpickle cpb d3 dill distcp h5 h5f hdf5 joblib keras mar msgpack msgpck npy npz "
    "onnx pickle pkl pt pt2 pth ptl pyt safetensors t7 th"
)
# Suffixes that other programs use too: such a file counts unless it is text, or a model that only runs.
_SHARED = "bin index meta model p pb"
# Archives: what they hold counts, each member by itself.
_ARCHIVES = "tar tbz2 tgz txz zip"
_PACKED = (".bz2", ".gz", ".lzma", ".xz", ".z", ".zst")
_SHARD = re.compile(r".+\.data-\d{5}-of-\d{5}", re.DOTALL)
OWN, SHARED, ARCHIVE = "own", "shared", "archive"
SUFFIXES: Mapping[str, str] = {
    f".{name}": kind
    for kind, names in ((OWN, _OWN), (SHARED, _SHARED), (ARCHIVE, _ARCHIVES))
    for name in names.split()
}
# What version control keeps for itself: no repository can hold a folder of these names.
_REPOSITORIES = frozenset((".git", ".hg", ".svn"))
# TensorFlow puts it beside every graph: five hashes (tensorflow/core/protobuf/fingerprint.proto).
_FINGERPRINT = "fingerprint.pb"
_DEPTH = 3  # archives inside one another


def kind_of(name: str) -> str | None:
    """Return what the suffix of a file's name says (see SUFFIXES); None for one that no checkpoint has."""
    name = name.lower()
    stem = next((name.removesuffix(end) for end in _PACKED if name.endswith(end)), name)
    if _SHARD.fullmatch(name):
        return OWN
    found = SUFFIXES.get(os.path.splitext(f"x{stem}")[1])
    return OWN if found == SHARED and stem != name else found


@dataclass(frozen=True, slots=True)
class Candidate:
    """One path to judge: who reads it, or why nobody does; `asks` is code in what nobody reads.

    `order` puts results in the order of the arguments.
    """

    path: str
    order: tuple[int, list[tuple[int, str]]]
    found: Resolved | None = None
    error: CkpttoolError | None = None
    asks: tuple[Asked, ...] = ()

    @property
    def name(self) -> str | None:
        """The name of the format that reads it."""
        return None if self.found is None else self.found.format.NAME

    @property
    def rank(self) -> int:
        """Say in which turn it is opened: folders first, then sets of files, then files."""
        if places.isdir(self.path):
            return 0
        if not places.isfile(self.path):
            return 1
        return 2 if self.path.endswith(".json") else 3


@dataclass
class Candidates:
    """What the arguments stand for; `skipped` are files that count as no checkpoint.

    `parts` are files of a checkpoint of several: by each the checkpoint that it should belong to.
    """

    found: dict[str, Candidate] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    _argument: int = 0
    _names: int = 0
    _visited: set[str] = field(default_factory=set)

    def ordered(self) -> list[Candidate]:
        """Return all in the order in which they are opened: outer folders before what lies in them."""
        # A folder may stand for the index in it, which is there by its own name.
        files = (each for each in self.found.values() if each.path.endswith(".json"))
        indexes = {(os.path.dirname(each.path), each.name) for each in files if each.name}
        every = (each for each in self.found.values() if (each.path, each.name) not in indexes)
        return sorted(every, key=lambda each: (each.rank, each.order))

    def beside(self, path: str, location: str) -> Candidate:
        """Return a candidate for a file that stands in the order behind its checkpoint."""
        argument = self.found[identity(location)].order[0]
        return Candidate(path, (argument, natural(path)))

    def add(self, path: str, *, alone: bool) -> None:
        """Add what an argument stands for; raise NotFoundError for a pattern that nothing matches."""
        path = places.named(path)
        if places.isdir(path):
            self._whole(path)
        elif glob.has_magic(path) and not places.lexists(path):
            self._pattern(path)
        elif alone or not path.endswith(entries.BESIDE) or self._is_claimed(path):
            self._named(path)
        self._argument += 1

    def _is_claimed(self, path: str) -> bool:
        try:
            return _claimed(Probe(path)) is not None
        except CkpttoolError:
            return True

    def _put(
        self,
        path: str,
        found: Resolved | None = None,
        error: CkpttoolError | None = None,
        asks: tuple[Asked, ...] = (),
    ) -> None:
        order = (self._argument, natural(path))
        self.found.setdefault(identity(path), Candidate(path, order, found, error, asks))

    def _named(self, path: str) -> None:
        try:
            found = resolve.resolve(path)
        except CkpttoolError as error:
            archive = kind_of(os.path.basename(path)) == ARCHIVE and places.isfile(path)
            if not (archive and self._archive(Probe(path)) and self.skipped[-1:] != [path]):
                self._put(path, error=error, asks=acting(path))
        else:
            self._put(found.location, found)

    def _whole(self, folder: str) -> None:
        before = len(self.found)
        self._folder(folder)
        if len(self.found) == before:
            self._named(folder)

    def _pattern(self, pattern: str) -> None:
        names = entries.matching(pattern)
        if not names:
            raise NotFoundError("nothing matches the pattern", file=pattern)
        # A link that leads back gives a file many names: the shortest is its own.
        for name in sorted(names, key=lambda each: (each.count(os.sep), natural(each))):
            if places.isdir(name):
                self._folder(name)
            else:
                self._file(name, None)

    def _folder(self, top: str) -> None:
        """Look at everything below a folder, hidden or not; links are followed, each folder once."""
        waiting: list[str] = [top]
        links: list[str] = []
        while waiting or links:
            # What a link leads to comes last, so that files go by their own names.
            folder = waiting.pop() if waiting else links.pop()
            real = identity(folder)
            if real in self._visited:
                continue
            self._visited.add(real)
            try:
                names = places.listdir(folder)
            except OSError as error:
                reason = NotFoundError(f"the folder cannot be listed: {error.strerror}", file=folder)
                self._put(folder, error=reason)
                continue
            self._count(len(names), top)
            self._claimed_folder(folder)
            known = frozenset(name for name in names if not hidden(name))
            for name in sorted(names, key=natural):
                path = os.path.join(folder, name)
                if not places.isdir(path):
                    self._file(path, None if hidden(name) else known)
                elif name in _REPOSITORIES:
                    self.skipped.append(path)
                else:
                    (links if places.islink(path) else waiting).append(path)

    def _count(self, more: int, top: str) -> None:
        self._names += more
        if self._names > limits.current().checked_files:
            what = "there are more files below the folder than are checked"
            raise limits.exceeded("checked_files", what, self._names, file=top)

    def _claimed_folder(self, folder: str) -> None:
        try:
            found = _claims(Probe(folder))
        except CkpttoolError as error:
            self._put(folder, error=error)
            return
        for each in found:
            # A state file may name a checkpoint of another folder: that is judged where it lies.
            if f"{each.location}/".startswith(f"{folder.rstrip('/')}/"):
                self._put(each.location, each)

    def _file(self, path: str, names: frozenset[str] | None) -> None:
        real = identity(path)
        if real in self._visited:
            return
        self._visited.add(real)
        name = os.path.basename(path)
        kind = kind_of(name)
        probe = Probe(path)
        if names is not None:
            probe.names = names  # what `names` would find, without a look at the folder for each file
        if probe.kind != "file":
            self._no_file(probe, kind)
            return
        if name == checkpoint_state.NAME and checkpoint_state.begins(probe.head):
            self.skipped.append(path)
            return
        try:
            found = _claimed(probe)
        except CkpttoolError as error:
            self._put(path, error=error, asks=acting(path))
            return
        if found is None:
            self._unclaimed(probe, kind)
            return
        self._put(found.location, found)
        if identity(found.location) != real:
            self.parts.setdefault(path, found.location)

    def _no_file(self, probe: Probe, kind: str | None) -> None:
        if kind is None:
            self.skipped.append(probe.path)
            return
        try:
            found = resolve.resolve(probe.path)
        except CkpttoolError as error:
            self._put(probe.path, error=error)
        else:
            self._put(found.location, found)

    def _unclaimed(self, probe: Probe, kind: str | None) -> None:
        if kind == ARCHIVE and self._archive(probe):
            return
        asks = acting(probe.path)
        if asks:
            self._put(probe.path, error=None if kind is None else sniff.explain(probe), asks=asks)
        elif kind is None or (kind == SHARED and self._is_other(probe)):
            # What we write beside a checkpoint belongs to it.
            if not (probe.name.endswith(entries.BESIDE) and probe.head.startswith(b"{")):
                self.skipped.append(probe.path)
        else:
            self._put(probe.path, error=sniff.explain(probe))

    def _is_other(self, probe: Probe) -> bool:
        return probe.name == _FINGERPRINT or sniff.is_other(probe)

    def _archive(self, probe: Probe) -> bool:
        """Look at each member of an archive; say whether that was possible."""
        scheme = "zip" if probe.head.startswith(b"PK") else "tar"
        if probe.path.count("::") >= _DEPTH or not probe.head:
            return False
        try:
            unread = code_scan.scan(File.stamp(probe.path)).unread
            place = places.named(f"{scheme}://::{probe.path}")
            places.listdir(place)
        except (CkpttoolError, OSError):
            return False
        if unread:
            reason = UnsupportedError(f"the archive cannot be looked into: {unread[0]}", file=probe.path)
            self._put(probe.path, error=reason)
            return True
        before = len(self.found)
        self._folder(place)
        if len(self.found) == before:
            self.skipped.append(probe.path)
        return True


def collect(paths: Sequence[str]) -> Candidates:
    """Return what the paths stand for; each file counts once, where it came first."""
    found = Candidates()
    with places.visit():
        for path in paths:
            found.add(path, alone=len(paths) == 1)
    return found


def identity(path: str) -> str:
    """Return where links lead, of a member of an archive too: one file has one."""
    outer, link, inner = path.partition("::")
    return (
        f"{places.realpath(outer)}{link}{inner}" if places.store(path) is not None else places.realpath(path)
    )


def stray(path: str) -> tuple[tuple[Asked, ...], CkpttoolError | None] | None:
    """Return what is wrong with a file that its checkpoint does not use: code, or the suffix of data."""
    asks = acting(path)
    if kind_of(os.path.basename(path)) == OWN:
        return asks, NotACheckpointError("no checkpoint uses this file", file=path)
    return (asks, None) if asks else None


def _claims(probe: Probe) -> list[Resolved]:
    """Return the claims of our formats; where there are none, those of other people's."""
    ours = plugins.BUILT_IN["formats"]
    names = {plugin.name for plugin in ours}
    found = resolve.claims(probe, ours)
    others = (plugin for plugin in plugins.installed("formats") if plugin.name not in names)
    return found or resolve.claims(probe, others)


def _claimed(probe: Probe) -> Resolved | None:
    """Return who reads a file; raise UsageError if two formats do, and what their claims raise."""
    found = _claims(probe)
    if len(found) > 1:
        both = " and ".join(each.format.NAME for each in found)
        raise UsageError(f"formats {both} both claim the path", file=probe.path)
    return found[0] if found else None


def acting(path: str) -> tuple[Asked, ...]:
    """Return the code in a file that no format reads."""
    if not places.isfile(path):
        return ()
    try:
        return (*code_scan.scan(File.stamp(path)).asks, *sniff.operations(Probe(path)))
    except (CkpttoolError, OSError):
        return ()
