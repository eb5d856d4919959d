"""`check`: many checkpoints before they are committed or merged; for each what must not be in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool import plugins, urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path
from ckpttool.ops import asking, moments, stats
from ckpttool.ops.entries import Entry, entries
from ckpttool.ops.findings import Finding, data_alone
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.recorded_shapes import Recorded, drift
from ckpttool.shown import count
from ckpttool.source import as_array
from ckpttool.wire import asked

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """One checkpoint: what was found, or the error that kept it from being read (then nothing is known)."""

    path: str
    format: str | None = None
    layout: str | None = None
    tensors: int = 0
    findings: tuple[Finding, ...] = ()
    error: CkpttoolError | None = None

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
    """All checkpoints that the paths stood for, in order, each once."""

    checkpoints: tuple[Checked, ...]

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
        return {"clean": self.clean, "checkpoints": [each.document() for each in self.checkpoints]}


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
    """Look at every checkpoint that the paths stand for (see entries.entries), one after the other.

    One that cannot be read is told of with the others. Raise UsageError for an unknown layout, and
    NotFoundError for a pattern that nothing matches.
    """
    wanted = wanted or Wanted()
    if wanted.layout is not None:
        plugins.find("layouts", wanted.layout)
    asked_for = entries(paths)
    found = []
    for entry in asked_for:
        found.append(_checked(entry, wanted))
        progress(len(found), len(asked_for))
    return Check(tuple(found))


def _checked(entry: Entry, wanted: Wanted) -> Checked:
    try:
        checkpoint = entry.open()
        layout, misfit = _layout(checkpoint, wanted.layout)
        findings = [*_loading(checkpoint, wanted), *misfit]
        if wanted.recorded is not None:
            findings += drift(checkpoint, layout, wanted.recorded)
        if wanted.numbers:
            findings += _numbers(checkpoint)
    except CkpttoolError as error:
        return Checked(urls.spelled(entry.path), error=error.located(file=entry.path))
    count = sum(1 for _ in checkpoint.tree.tensors())
    return Checked(urls.spelled(checkpoint.path), checkpoint.format, layout, count, tuple(findings))


def _loading(checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Finding]:
    bad = (asked.CODE, asked.CLASSES) if wanted.strict else (asked.CODE,)
    if asked.verdict(checkpoint.asks) in bad:
        yield Finding("loading", asking.sentence(checkpoint.asks), data_alone(checkpoint.path))


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
