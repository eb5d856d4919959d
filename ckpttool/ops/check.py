"""`check`: many checkpoints before they are committed or merged; for each what must not be in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool import places, plugins, urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError, of_the_system
from ckpttool.formats import resolve
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path
from ckpttool.ops import asking, candidates, moments, stats
from ckpttool.ops.candidates import Candidate
from ckpttool.ops.findings import Finding, data_alone, unjudged, weightless
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.recorded_shapes import Recorded, drift
from ckpttool.shown import count
from ckpttool.source import as_array
from ckpttool.wire import asked
from ckpttool.wire.asked import Asked

_SHOWN = 8
_NAMED = 100  # files that count as no checkpoint, in the document


@dataclass(frozen=True, slots=True)
class Checked:
    """One checkpoint: what was found, and the error that kept it from being read, or read to its end.

    `file` is where the findings are shown: the path, or of a folder or prefix its first file.
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
        told = None if error is None else {"kind": error.kind, "message": str(error), "hint": error.hint}
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "tensors": self.tensors,
            "findings": [each.document() for each in self.findings],
            "error": told,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """All checkpoints that the paths stood for, in order, each once; `skipped` names the other files."""

    checkpoints: tuple[Checked, ...]
    skipped: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Say whether everything was read and nothing found."""
        return not any(each.findings or each.error for each in self.checkpoints)

    @property
    def failed(self) -> tuple[Checked, ...]:
        """Those that could not be read."""
        return tuple(each for each in self.checkpoints if each.error is not None)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        names = [urls.spelled(name) for name in self.skipped[:_NAMED]]
        return {
            "clean": self.clean,
            "checkpoints": [each.document() for each in self.checkpoints],
            "skipped": {"count": len(self.skipped), "names": names},
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a checkpoint is held against.

    `strict` asks for plain data, `numbers` has every tensor read (its checksum compared, every number
    finite), `layout` is the one that must recognise it, `recorded` what its tensors must be.
    """

    strict: bool = False
    numbers: bool = True
    layout: str | None = None
    recorded: Recorded | None = None


def check(paths: Sequence[str], wanted: Wanted | None = None, progress: Progress = silent) -> Check:
    """Look at every checkpoint that the paths stand for, one after the other (see candidates.collect).

    One that cannot be read is told of with the others. A file that belongs to a checkpoint of several is
    judged with it, once. Raise UsageError for an unknown layout, and NotFoundError for a pattern that nothing
    matches.
    """
    wanted = wanted or Wanted()
    if wanted.layout is not None:
        plugins.find("layouts", wanted.layout)
    collected = candidates.collect(paths)
    ordered = collected.ordered()
    found: list[tuple[Candidate, Checked]] = []
    taken = _JudgedFiles()
    for number, each in enumerate(ordered):
        if not taken.has(each.path):
            found.append((each, _checked(each, wanted, taken)))
        progress(number + 1, len(ordered))
    failed = {candidates.identity(each.path) for each, checked in found if checked.error is not None}
    for path, location in collected.parts.items():
        wrong = None if taken.has(path) or candidates.identity(location) in failed else candidates.stray(path)
        if wrong is not None:
            found.append((collected.beside(path, location), _unused(path, *wrong)))
    found.sort(key=lambda pair: pair[0].order)
    skipped = (name for name in collected.skipped if not taken.has(name))
    return Check(tuple(checked for _, checked in found), tuple(skipped))


class _JudgedFiles:
    """The files that were judged with a checkpoint, so that none of them gets a second verdict."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, checkpoint: Checkpoint) -> None:
        """Take the files of a checkpoint."""
        real = [candidates.identity(file.path) for file in checkpoint.files]
        self._files.update(real)
        self._folders.update(map(os.path.dirname, real))

    def has(self, path: str) -> bool:
        """Say whether a file, or files of a folder or prefix, were judged."""
        real = candidates.identity(path)
        return real in self._files or real in self._folders or f"{real}.index" in self._files


def _unused(path: str, asks: Sequence[Asked], error: CkpttoolError | None) -> Checked:
    return Checked(urls.spelled(path), findings=_acting(asks), error=error, file=path)


def _checked(each: Candidate, wanted: Wanted, taken: _JudgedFiles) -> Checked:
    name = urls.spelled(each.path)
    if each.error is not None or each.found is None:
        return Checked(name, findings=_acting(each.asks), error=each.error, file=each.path)
    findings: list[Finding] = []
    try:
        checkpoint = resolve.read(each.found)
        layout = _judge(checkpoint, wanted, findings)
    except CkpttoolError as error:
        reason = error.located(file=each.path)
    except Exception as error:  # noqa: BLE001  # the other files are to be judged whatever this one does
        fault = CkpttoolError(f"an unexpected {type(error).__name__}: {error}")
        reason = (of_the_system(error) or fault).located(file=each.path)
    else:
        taken.add(checkpoint)
        tensors = sum(1 for _ in checkpoint.tree.tensors())
        return Checked(
            urls.spelled(checkpoint.path),
            checkpoint.format,
            layout,
            tensors,
            tuple(findings),
            file=_shown(checkpoint),
        )
    kept = tuple(findings) or _acting(candidates.acting(each.path))
    return Checked(name, findings=kept, error=reason, file=each.path)


def _shown(checkpoint: Checkpoint) -> str:
    """Return a file that stands for the checkpoint: a folder or a prefix is none."""
    if places.isfile(checkpoint.path) or not checkpoint.files:
        return checkpoint.path
    return checkpoint.files[0].path


def _judge(checkpoint: Checkpoint, wanted: Wanted, findings: list[Finding]) -> str | None:
    """Add what is found, and return the layout; what cannot be read leaves what was found before."""
    findings += _loading(checkpoint, wanted)
    findings += weightless(checkpoint, values=False)
    layout, misfit = _layout(checkpoint, wanted.layout)
    findings += misfit
    if wanted.recorded is not None:
        findings += drift(checkpoint, layout, wanted.recorded)
    if wanted.numbers:
        findings += _numbers(checkpoint)
    return layout


def _acting(asks: Sequence[Asked]) -> tuple[Finding, ...]:
    """Return the finding for code in a file that cannot be read as a checkpoint."""
    if not asks:
        return ()
    return (Finding("loading", asking.sentence(asked.merged(asks)), None),)


def _loading(checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Finding]:
    bad = (asked.CODE, asked.CLASSES) if wanted.strict else (asked.CODE,)
    if asked.verdict(checkpoint.asks) in bad:
        yield Finding("loading", asking.sentence(checkpoint.asks), data_alone(checkpoint.path))
    yield from unjudged(checkpoint.unjudged)


def _layout(checkpoint: Checkpoint, layout: str | None) -> tuple[str | None, list[Finding]]:
    """Return the layout that recognises it, and a finding if that is not the one asked for."""
    try:
        binding = recognised(checkpoint, layout)
    except UsageError as error:
        if layout is None:
            raise
        return None, [Finding("layout", error.message)]
    return (None if binding is None else binding.layout), []


def _numbers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Read every tensor, one at a time; give those with numbers that are none."""
    bad: list[tuple[str, str]] = []
    for path, leaf in checkpoint.tree.tensors():
        name = checkpoint.tree.names[path]
        try:
            said = _not_finite(path, leaf)
        except CkpttoolError as error:
            raise error.located(path=name) from error
        if said:
            bad.append((name, said))
    for name, said in bad[:_SHOWN]:
        yield Finding("numbers", f"{name}: {said}")
    if len(bad) > _SHOWN:
        more = count(len(bad) - _SHOWN, "more tensor")
        yield Finding("numbers", f"and {more} with numbers that are not finite")


def _not_finite(path: Path, leaf: Leaf) -> str:
    import numpy as np

    data = leaf.read()
    try:
        array = as_array(data, leaf.dtype, leaf.shape)
    except UnsupportedError:
        return ""
    if array.dtype.kind in "iub" or np.isfinite(array).all():
        return ""
    known = moments.of(array)
    counts = [f"{n:,} {word}" for n, word in stats.amiss([str(step.value) for step in path], leaf, known)]
    return f"{' and '.join(counts)} of {count(known.size, 'number')}" if counts else ""
