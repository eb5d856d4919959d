"""The rows of the page's tree: modules, tensors and values in the order in which the page shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool import documents
from ckpttool.ops.modules import Module, entries, given, kind, through
from ckpttool.ops.moments import Moments
from ckpttool.ops.rows import TensorRow, ValueRow, shown_value
from ckpttool.ops.stats import TensorStats
from ckpttool.ops.summary import Summary
from ckpttool.report.pictures import Picture
from ckpttool.shown import clean, shortened

# Characters of one name and of a whole path: a file may have names of any length.
_NAME, _PATH, _VALUE = 120, 400, 300
# Aliases that are named; of the others there is a count.
_ALIASES = 12
_NUMBERS = ("min", "max", "mean", "std", "norm")


def name(text: str) -> str:
    """Return one step of a path as the page shows it."""
    return shortened(clean(text), _NAME) or '""'


def path(text: str) -> str:
    """Return a path or a native key as the page shows it."""
    return shortened(clean(text), _PATH)


@dataclass(frozen=True, slots=True)
class Known:
    """What reading the tensors told of them, by display path."""

    stats: Mapping[str, TensorStats]
    pictures: Mapping[str, Picture]


def rows(found: Summary, known: Known, marks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Give an object for each row, those of a module after it: `level` says below what it stands.

    `marks` are what `comparison` says of paths. Values that are empty are left out: most are of most rows.
    """
    slots: dict[str, list[str]] = {}
    for row in found.tensors:
        if row.of is not None and row.leaf.role == "slot":
            slots.setdefault(row.of, []).append(row.path)
    numbers = {row.path: number for number, row in enumerate(found.tensors)}
    waiting = _below(found.modules[0], 0) if found.modules else []
    while waiting:
        level, shown, entry = waiting.pop()
        if isinstance(entry, Module):
            shown, entry = through(shown, entry)
            yield {"level": level, "name": name(shown), **_module(entry)}
            waiting += _below(entry, level + 1)
        elif isinstance(entry, TensorRow):
            own = [numbers[each] for each in slots.get(entry.path, ())]
            mark = marks.get(entry.path)
            yield {"level": level, "name": name(shown), **_tensor(entry, known, numbers, own), **_mark(mark)}
        else:
            yield {"level": level, "name": name(shown), **_value(entry), **_mark(marks.get(entry.path))}


def _below(module: Module, level: int) -> list[tuple[int, str, TensorRow | ValueRow | Module]]:
    """Return what stands in the module, the last first."""
    return [(level, shown, entry) for shown, entry in reversed(entries(module, "file"))]


def _module(module: Module) -> dict[str, Any]:
    what = shortened(kind(module), _NAME)
    return _told(
        {
            "path": path(module.path),
            "kind": what if module.built else f"{what or 'object'}, not built",
            "tensors": module.tensors,
            "parameters": module.parameters,
            "nbytes": module.nbytes,
            "module": True,
        }
    )


def _tensor(row: TensorRow, known: Known, numbers: Mapping[str, int], slots: list[int]) -> dict[str, Any]:
    leaf = row.leaf
    stats, picture = known.stats.get(row.path), known.pictures.get(row.path)
    people = given(row.aliases)
    names = people or list(row.aliases)
    return _told(
        {
            "id": numbers[row.path],
            "path": path(row.path),
            "key": path(leaf.key) if leaf.key != row.path else "",
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "size": leaf.size,
            "nbytes": leaf.nbytes,
            "role": "" if leaf.role == "parameter" else leaf.role,
            "frozen": leaf.trainable is False and leaf.role == "parameter",
            "slot": clean(leaf.slot or ""),
            "of": None if row.of is None else numbers.get(row.of),
            "slots": slots,
            "also": name(people[0]) if people else "",
            "aliases": [path(each) for each in names[:_ALIASES]],
            "more": max(0, len(row.aliases) - _ALIASES),
            "stats": None if stats is None else numbers_of(stats.moments),
            "histogram": [] if stats is None else list(stats.histogram),
            "signs": [] if stats is None else [clean(sign) for sign in stats.signs],
            "picture": None if picture is None else picture.document(),
        }
    )  # fmt: skip


def numbers_of(found: Moments) -> dict[str, Any]:
    """Return what is known of a tensor's numbers, with as many digits as anyone reads."""
    told = found.document()
    told.update({each: float(f"{told[each]:.6g}") for each in _NUMBERS if isinstance(told[each], float)})
    return {key: value for key, value in told.items() if value != 0 or key in _NUMBERS}


def _value(row: ValueRow) -> dict[str, Any]:
    told = documents.plain(shown_value(row.leaf))
    return {
        "path": path(row.path),
        "type": name(told["type"]),
        "value": shortened(clean(str(told["value"])), _VALUE),
    }


def _mark(mark: int | None) -> dict[str, int]:
    return {} if mark is None else {"change": mark}


def _told(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is not empty: ten thousand rows say little else. A shape and a number may be."""
    return {
        key: value
        for key, value in values.items()
        if key == "shape" or not (value is None or value is False or value == "" or value == [])
    }
