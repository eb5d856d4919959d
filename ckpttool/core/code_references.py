"""Code references of a file: names to import, functions to call, code; each with a verdict.

The file is only read: nothing is imported, called or compiled. Plain data is rebuilt here as data, or is a
data class of the standard library. Classes are names outside the standard library that are only imported,
or known to create nothing but data. An unknown class is one of which an instance is created: its own code
runs. Code acts by itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, Literal

from ckpttool.core.deferred import dataclass

# Plain data is rebuilt here as data, or is a data class of the standard library. Classes are names outside
# the standard library that are only imported, or known to create nothing but data. An unknown class is one
# of which an instance is created: its own code runs. Code acts by itself.
Verdict = Literal["plain data", "needs classes", "unknown class", "would run code"]
PLAIN: Verdict = "plain data"
CLASSES: Verdict = "needs classes"
UNKNOWN: Verdict = "unknown class"
CODE: Verdict = "would run code"
VERDICTS = (PLAIN, CLASSES, UNKNOWN, CODE)  # from harmless to dangerous
_RANK = {verdict: rank for rank, verdict in enumerate(VERDICTS)}
# Verdicts that fail a check: what an allow list does not name.
UNSAFE = frozenset((UNKNOWN, CODE))

# Loader that would import or run it: an unpickler, Keras, TorchScript's interpreter, TensorFlow's runtime,
# onnxruntime; for a program or library inside an archive, whatever unpacks it.
By = Literal["pickle", "keras", "torchscript", "tensorflow", "onnx", "program"]


@dataclass(frozen=True, slots=True)
class CodeReference:
    """One name that a file refers to.

    `calls` is the number of calls (0: only referenced), `offset` its first occurrence, in bytes of
    the file or of the member `where` (None: the file itself, or no bytes of any file).
    """

    name: str
    verdict: Verdict
    calls: int = 0
    offset: int | None = None
    where: str | None = None
    by: By = "pickle"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def merge_references(*groups: Iterable[CodeReference]) -> tuple[CodeReference, ...]:
    """Merge the records of a checkpoint: one per name, with the worst verdict and its first occurrence."""
    references: dict[str, CodeReference] = {}
    for group in groups:
        for reference in group:
            known = references.get(reference.name)
            if known is None:
                references[reference.name] = reference
                continue
            worse = reference if _RANK[reference.verdict] > _RANK[known.verdict] else known
            references[reference.name] = replace(worse, calls=known.calls + reference.calls)
    return tuple(references.values())


def relocate_references(references: Iterable[CodeReference], where: str) -> tuple[CodeReference, ...]:
    """Return the records with their locations in the member or file `where`."""
    return tuple(replace(name, where=f"{where}/{name.where}" if name.where else where) for name in references)


def worse_verdict(one: Verdict, other: Verdict) -> Verdict:
    """Return the worse of two verdicts."""
    return one if _RANK[one] >= _RANK[other] else other


# Names of pickles that the user allows besides the built-in list.
_ALLOWED: ContextVar[frozenset[str]] = ContextVar("allowed", default=frozenset())


@contextlib.contextmanager
def allowing(names: Iterable[str]) -> Iterator[None]:
    """Treat these names in pickles as known classes, in checkpoints that are opened meanwhile.

    Names are dotted: a module stands for everything in it.
    """
    token = _ALLOWED.set(_ALLOWED.get() | frozenset(names))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def apply_allowed(references: Iterable[CodeReference]) -> tuple[CodeReference, ...]:
    """Return the records, with the names that the user allows as known classes (see `allowing`)."""
    allowed = _ALLOWED.get()
    return tuple(
        replace(reference, verdict=CLASSES)
        if reference.by == "pickle" and reference.verdict in UNSAFE and _is_allowed(reference.name, allowed)
        else reference
        for reference in references
    )


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if name in allowed:
        return True
    steps = name.split(".")
    known = next((end for end in range(1, len(steps)) if ".".join(steps[:end]) in allowed), None)
    # A module that the allowed one imports is not part of it: `my_project.os.system`.
    return known is not None and not any(
        step in sys.stdlib_module_names or step.startswith("__") for step in steps[known:]
    )


def worst_verdict(references: Iterable[CodeReference]) -> Verdict:
    """Return the worst verdict; a file without references is plain data."""
    return max((name.verdict for name in references), key=lambda verdict: _RANK[verdict], default=PLAIN)


def filter_verdict(references: Iterable[CodeReference], verdict: Verdict) -> list[CodeReference]:
    """Return the records with one verdict."""
    return [reference for reference in references if reference.verdict == verdict]


def unsafe_references(references: Iterable[CodeReference]) -> list[CodeReference]:
    """Return the records that fail a check."""
    return [reference for reference in references if reference.verdict in UNSAFE]


def dangerous_calls(references: Iterable[CodeReference]) -> list[str]:
    """Return the names of dangerous functions that unpickling would call."""
    return [name.name for name in references if name.verdict == CODE and name.calls and name.by == "pickle"]
