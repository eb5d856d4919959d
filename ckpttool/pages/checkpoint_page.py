"""Page of a checkpoint, or of two: tree of tensors, heat maps, differences, conversion, verification."""

from __future__ import annotations

import base64
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.commands.diff import Diff, compare_alignment
from ckpttool.commands.doctor import Diagnosis, examine_agent
from ckpttool.commands.inspect import summary
from ckpttool.commands.stats import Stats, TensorStats, compute_stats, tensor_stats
from ckpttool.conversion.alignment import ChangedEntry, Entry, align_checkpoints
from ckpttool.conversion.reconversion import ComparisonSide
from ckpttool.core import filesystem, sidecar, sidecar_parsing, text, urls
from ckpttool.core.atomic_write import Progress, ignore_progress, report_part
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, FormatError
from ckpttool.core.source import File, Shape, StreamedArray
from ckpttool.core.text import clean, describe_record, shorten
from ckpttool.core.tree import Leaf, Path, ValueLeaf, display, json_value
from ckpttool.listing import audit
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.modules import (
    ModuleSummary,
    describe_module_kind,
    group_by_module,
    module_entries,
    skip_wrapping_modules,
    user_given_names,
)
from ckpttool.listing.rows import TensorRow, ValueRow
from ckpttool.listing.signatures import signature_lines
from ckpttool.pages.computation import Computation, find_computation
from ckpttool.pages.rendering import (
    FIRST,
    NAME_LENGTH,
    EvaluationSection,
    build_chart,
    build_strips,
    embed_json,
    find_results,
    format_exactly,
    format_name,
    format_path,
    pack_objects,
    parse_number,
    rank_results,
    read_evaluations,
    render_template,
    typeset_minus,
)
from ckpttool.verification.array_differences import ArrayDifference, Values
from ckpttool.verification.moments import Moments, compute_moments, histogram

# Bytes of all pictures on a page, less those that the row of a tensor takes from them; maximum and minimum
# cells per picture; maximum side length.
_ALL, _ROW = 3 << 20, 60
_MOST, _LEAST, _LONGEST = 4096, 64, 160
# Numbers processed together.
_PIECE = 1 << 18
# Byte values of cells: 0 for no number, else `_ZERO` plus or minus up to 127 steps.
_ZERO, _STEPS = 128, 127
# Tensors with the units on the last axis; all others have them on the first.
_UNITS_LAST = frozenset(("kernel", "embeddings"))


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Position of a picture's cells in the buffer, and what they show.

    `rows` and `columns` count cells, `height` and `width` the numbers of the matrix that represents the
    tensor, `scale` is the value of the outermost step.
    """

    at: int
    rows: int
    columns: int
    height: int
    width: int
    scale: float

    def document(self) -> list[float]:
        """Return the array that the page's script reads."""
        return [self.at, self.rows, self.columns, self.height, self.width, float(f"{self.scale:.4g}")]


def cell_budget(tensors: int) -> int:
    """Return the maximum number of cells per picture for this number of tensors."""
    return max(_LEAST, min(_MOST, (_ALL - _ROW * tensors) // max(1, tensors)))


class HeatMapBuffer:
    """Cells of all pictures so far, at most `most` per picture."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._cells = bytearray()

    def add(self, path: str, array: Values) -> HeatMap | None:
        """Shrink the tensor at a display path to a picture; None if it has fewer than two numbers."""
        if array.size < 2:
            return None
        shape = matrix_shape(path, array.shape)
        cells = shrink_matrix(array, shape, self._most)
        return self._kept(cells, shape, _largest_magnitude(cells))

    def pair(self, path: str, left: Values, right: Values) -> list[HeatMap]:
        """Shrink two tensors of one shape to pictures of one scale, and their difference to a third."""
        if left.size < 2:
            return []
        shape = matrix_shape(path, left.shape)
        one, other = (shrink_matrix(tensor, shape, self._most) for tensor in (left, right))
        with np.errstate(invalid="ignore", over="ignore"):
            # The mean of differences is the difference of means.
            more = other - one
        scale = max(_largest_magnitude(one), _largest_magnitude(other))
        return [
            *(self._kept(tensor, shape, scale) for tensor in (one, other)),
            self._kept(more, shape, _largest_magnitude(more)),
        ]

    def _kept(self, cells: np.ndarray, shape: tuple[int, int], scale: float) -> HeatMap:
        at = len(self._cells)
        self._cells += _quantize_cells(cells, scale)
        # Base64 encodes three bytes as four letters: align each picture to such a group.
        self._cells += bytes(-len(self._cells) % 3)
        rows, columns = cells.shape
        return HeatMap(at, rows, columns, *shape, scale)

    def encoded(self) -> str:
        """Return all cells in base64."""
        return base64.b64encode(self._cells).decode()


def matrix_shape(path: str, shape: Shape) -> tuple[int, int]:
    """Return height and width of a tensor as a matrix, one row (for Keras's kernels one column) per unit.

    A convolution's other axes are flattened: one filter is one row (PyTorch) or column (Keras).
    """
    size = math.prod(shape)
    if len(shape) < 2:
        return 1, size
    last = len(shape) > 2 and path.rpartition("/")[2] in _UNITS_LAST
    rows = math.prod(shape[:-1]) if last else shape[0]
    return rows, size // rows if rows else 0


def _iter_strips(array: Values, width: int, rows: int) -> Iterator[np.ndarray]:
    """Yield a matrix in strips of that many rows; of complex numbers their magnitudes."""
    if isinstance(array, StreamedArray):
        strips = array.blocks(rows * width)
    else:
        flat = array.reshape(-1)
        strips = (flat[at : at + rows * width] for at in range(0, flat.size, rows * width))
    for strip in strips:
        numbers = np.abs(strip) if strip.dtype.kind == "c" else strip
        yield numbers.reshape(-1, width)


def shrink_matrix(array: Values, shape: tuple[int, int], most: int) -> np.ndarray:
    """Return the cells of a matrix of that shape, each the mean of a block of numbers.

    A block that contains a non-finite number gets no mean. Memory use beside the array is small.
    """
    height, width = shape
    columns = max(1, min(width, math.isqrt(most), _LONGEST))
    rows = max(1, min(height, most // columns, _LONGEST))
    columns = max(1, min(width, most // rows, _LONGEST))
    tall, wide = -(-height // rows), -(-width // columns)
    starts = np.arange(0, width, wide)
    counts = np.minimum(starts + wide, width) - starts
    cells = np.empty((-(-height // tall), len(starts)))
    with np.errstate(invalid="ignore", over="ignore"):
        for row, strip in enumerate(_iter_strips(array, width, tall)):
            cells[row] = _sum_blocks(strip, starts, wide) / (counts * len(strip))
    return cells


def _sum_blocks(strip: np.ndarray, starts: np.ndarray, wide: int) -> np.ndarray:
    """Return the sums of a row of blocks in float64, copying at most _PIECE numbers at a time."""
    width = strip.shape[1]
    if width > _PIECE:
        return np.array([strip[:, at : at + wide].sum(dtype=np.float64) for at in starts])
    sums = np.zeros(len(starts))
    step = max(1, _PIECE // width)
    for row in range(0, len(strip), step):
        sums += np.add.reduceat(strip[row : row + step].astype(np.float64), starts, axis=1).sum(axis=0)
    return sums


def _largest_magnitude(cells: np.ndarray) -> float:
    numbers = np.abs(cells[np.isfinite(cells)])
    return float(numbers.max()) if numbers.size else 0.0


def _quantize_cells(cells: np.ndarray, scale: float) -> bytes:
    finite = np.isfinite(cells)
    steps = np.where(finite, cells, 0.0) / (scale or 1.0) * _STEPS
    return bytes(np.where(finite, np.rint(steps) + _ZERO, 0).astype(np.uint8).tobytes())


# Maximum characters of a value.
_VALUE = 300
# Maximum number of aliases listed; the rest is counted.
_ALIASES = 12
_NUMBERS = ("min", "max", "mean", "std", "norm")


@dataclass(frozen=True, slots=True)
class TensorReadings:
    """Results of reading the tensors, by display path."""

    stats: Mapping[str, TensorStats]
    pictures: Mapping[str, HeatMap]


def tree_rows(
    result: CheckpointSummary,
    known: TensorReadings,
    marks: Mapping[str, int],
    above: tuple[int, int] = (0, 0),
) -> Iterator[dict[str, Any]]:
    """Yield an object for each row, a module before its entries; `level` is the depth.

    `marks` are the marks from `comparison`, by path; `above` counts the levels and the tensors of rows
    before these. Empty values are omitted, because most are empty in most rows.
    """
    slots: dict[str, list[str]] = {}
    for row in result.tensors:
        if row.of is not None and row.leaf.role == "slot":
            slots.setdefault(row.of, []).append(row.path)
    numbers = {row.path: number for number, row in enumerate(result.tensors, above[1])}
    waiting = _module_entries(result.modules[0], above[0]) if result.modules else []
    while waiting:
        level, shown, entry = waiting.pop()
        if isinstance(entry, ModuleSummary):
            shown, entry = skip_wrapping_modules(shown, entry)
            yield {"level": level, "name": format_name(shown), **_module_row(entry)}
            waiting += _module_entries(entry, level + 1)
        elif isinstance(entry, TensorRow):
            own = [numbers[slot] for slot in slots.get(entry.path, ())]
            mark = marks.get(entry.path)
            yield {
                "level": level,
                "name": format_name(shown),
                **_tensor_row(entry, known, numbers, own),
                **_change_mark(mark),
            }
        else:
            yield {
                "level": level,
                "name": format_name(shown),
                **_value_row(entry),
                **_change_mark(marks.get(entry.path)),
            }


def _module_entries(
    module: ModuleSummary, level: int
) -> list[tuple[int, str, TensorRow | ValueRow | ModuleSummary]]:
    """Return the entries of the module in reverse order."""
    return [(level, shown, entry) for shown, entry in reversed(module_entries(module, "file"))]


def _module_row(module: ModuleSummary) -> dict[str, Any]:
    what = shorten(describe_module_kind(module), NAME_LENGTH)
    return _drop_empty(
        {
            "path": format_path(module.path),
            "kind": what if module.built else f"{what or 'object'}, not built",
            "tensors": module.tensors,
            "parameters": module.parameters,
            "nbytes": module.nbytes,
            "module": True,
        }
    )


def _tensor_row(
    row: TensorRow, known: TensorReadings, numbers: Mapping[str, int], slots: list[int]
) -> dict[str, Any]:
    leaf = row.leaf
    stats, picture = known.stats.get(row.path), known.pictures.get(row.path)
    people = user_given_names(row.aliases)
    names = people or list(row.aliases)
    return _drop_empty(
        {
            "id": numbers[row.path],
            "path": format_path(row.path),
            "key": format_path(leaf.key) if leaf.key != row.path else "",
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "size": leaf.size,
            "nbytes": leaf.nbytes,
            "role": "" if leaf.role == "parameter" else leaf.role,
            "frozen": leaf.trainable is False and leaf.role == "parameter",
            "slot": clean(leaf.slot or ""),
            "of": None if row.of is None else numbers.get(row.of),
            "slots": slots,
            "also": format_name(people[0]) if people else "",
            "aliases": [format_path(name) for name in names[:_ALIASES]],
            "more": max(0, len(row.aliases) - _ALIASES) or None,
            "stats": None if stats is None else format_moments(stats.moments),
            "histogram": [] if stats is None else list(stats.histogram),
            "signs": [] if stats is None else [clean(sign) for sign in stats.signs],
            "picture": None if picture is None else picture.document(),
        }
    )  # fmt: skip


def format_moments(moments: Moments) -> dict[str, Any]:
    """Return a tensor's moments, rounded to six significant digits; whole numbers keep all digits."""
    document = moments.document()
    document.update({name: _round(document[name]) for name in _NUMBERS if isinstance(document[name], float)})
    return {key: value for key, value in document.items() if value != 0 or key in _NUMBERS}


def _round(value: float) -> float:
    # No rounded number may look like a whole one with all its digits.
    return float(f"{value:.6g}") if abs(value) < 1e6 or abs(value) >= 2**53 else float(round(value))


def _value_row(row: ValueRow) -> dict[str, Any]:
    shown_value = text.replace_nonfinite(json_value(row.leaf))
    return {
        "path": format_path(row.path),
        "type": format_name(shown_value["type"]),
        "value": shorten(clean(str(shown_value["value"])), _VALUE),
    }


def _change_mark(mark: int | None) -> dict[str, int]:
    return {} if mark is None else {"change": mark}


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Return the non-empty values, to keep the page small; an empty shape and zeros stay."""
    return {
        key: value
        for key, value in values.items()
        if key == "shape" or not (value is None or value is False or value == "" or value == [])
    }


# Maximum number of changes with pictures: both sides are read once more for each.
PICTURED = 500
# Maximum number of entries listed that only one side has.
ALONE = 500
_VALUE_LENGTH = 80


# Marks of rows that only one side has.
ONLY_LEFT, ONLY_RIGHT = -1, -2


@dataclass(frozen=True, slots=True)
class ComparisonSection:
    """`changes` are objects for the page, largest first; `marks` map the paths of rows to changes.

    A mark is the number of a change, or ONLY_LEFT for an entry that the other checkpoint lacks.
    """

    diff: Diff
    changes: list[dict[str, Any]]
    marks: dict[str, int]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    slots: tuple[SlotComparison, ...]
    """optimizer state by kind; empty if it is the same"""


@dataclass(frozen=True, slots=True)
class SlotComparison:
    """Slot variables of one kind of one optimizer that differ, with the norms of both sides.

    The norms are empty where not all tensors were read for the page.
    """

    optimizer: str
    slot: str
    tensors: int
    largest: str
    norms: tuple[str, str]


def compare_section(diff: Diff, summary: CheckpointSummary, pictures: HeatMapBuffer) -> ComparisonSection:
    """Return the section on differences; tensors with pictures are read again, one at a time."""
    places = _paths_by_canonical(diff, summary)
    marks = {path: ONLY_LEFT for name in diff.only_left for path in places.get(name, (name,))}
    changes = []
    for number, change in enumerate(diff.changed):
        marks.update(dict.fromkeys(places.get(change.path, (change.path,)), number))
        changes.append({**_change_object(change), **_compare_values(change, pictures, number)})
    left, right = (
        tuple(format_path(name) for name in names[:ALONE]) for names in (diff.only_left, diff.only_right)
    )
    return ComparisonSection(diff, changes, marks, (left, right), tuple(_compare_slots(diff, changes)))


def rows_only_right(
    diff: Diff, summary: CheckpointSummary, pictures: HeatMapBuffer, tensors: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of entries that only the second checkpoint has, after `tensors` ones of the first.

    `summary` lists the second checkpoint; one tensor at a time is in memory.
    """
    places = _paths_by_canonical(diff, summary)
    paths = {path for name in diff.only_right for path in places.get(name, (name,))}
    rows = tuple(row for row in summary.tensors if row.path in paths)
    values = tuple(row for row in summary.values if row.path in paths)
    if not rows and not values:
        return
    stats, heat_maps = {}, {}
    for row in rows:
        if row.leaf.dtype == "string":
            continue
        try:
            array = row.leaf.array()
            stats[row.path] = tensor_stats(row.path, row.keys, row.leaf, array)
            picture = pictures.add(row.path, array)
        except CkpttoolError as error:
            raise error.located(file=summary.checkpoint.path, path=row.path) from error
        if picture is not None:
            heat_maps[row.path] = picture
    entries: list[TensorRow | ValueRow] = [*rows, *values]
    modules = group_by_module(((entry.path, entry) for entry in entries), summary.checkpoint.tree.containers)
    root = {key: value for key, value in _module_row(modules[0]).items() if key != "kind"}
    yield {"level": 0, "name": "Only in B", **root, "path": "Only in B"}
    yield from tree_rows(
        replace(summary, tensors=rows, values=values, modules=modules),
        TensorReadings(stats, heat_maps),
        dict.fromkeys(paths, ONLY_RIGHT),
        (1, tensors),
    )


def _compare_slots(diff: Diff, changes: Sequence[Mapping[str, Any]]) -> Iterator[SlotComparison]:
    """Yield the differences of slot variables by optimizer and kind."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, change in enumerate(diff.changed):
        if isinstance(change.left, Leaf) and change.left.role == "slot" and change.values is not None:
            groups.setdefault((_optimizer_name(change.path), change.left.slot or ""), []).append(number)
    for (optimizer, slot), numbers in sorted(groups.items()):
        largest = max(values.max_abs for n in numbers if (values := diff.changed[n].values) is not None)
        sides = [changes[number].get("sides") for number in numbers]
        norms = ("", "")
        if all(values and isinstance(values[side].get("norm"), float) for values in sides for side in (0, 1)):
            squares = [sum(values[side]["norm"] ** 2 for values in sides if values) for side in (0, 1)]
            norms = (format_exactly(math.sqrt(squares[0]), 3), format_exactly(math.sqrt(squares[1]), 3))
        yield SlotComparison(
            format_path(optimizer), clean(slot), len(numbers), format_exactly(largest, 3), norms
        )


def _optimizer_name(path: str) -> str:
    """Return the part of a slot's path up to the optimizer, else its first step."""
    steps = path.split("/")
    end = next((at for at, step in enumerate(steps) if "optim" in step.lower()), 0)
    return "/".join(steps[: end + 1])


def _paths_by_canonical(diff: Diff, summary: CheckpointSummary) -> dict[str, list[str]]:
    """Map canonical paths to paths in the first checkpoint; empty if entries were compared by path."""
    if diff.by == "path":
        return {}
    tree, binding = summary.checkpoint.tree, summary.binding
    places: dict[str, list[str]] = {}
    for move in binding.moves.moves if binding is not None else ():
        places.setdefault(display(move.target), []).append(tree.names[move.source])
    return places


def _compare_values(change: ChangedEntry, pictures: HeatMapBuffer, number: int) -> dict[str, Any]:
    """Read both sides once more; return their pictures, histograms in common bins, and moments."""
    left, right = change.left, change.right
    if (
        number >= PICTURED
        or change.values is None
        or not isinstance(left, Leaf)
        or not isinstance(right, Leaf)
        or "string" in (left.dtype, right.dtype)
    ):
        return {}
    arrays = left.values(), right.values()
    moments = [compute_moments(array) for array in arrays]
    both = moments[0] + moments[1]
    bins = [list(histogram(array, both)) for array in arrays]
    return {
        "pictures": [picture.document() for picture in pictures.pair(change.path, *arrays)],
        "sides": [format_moments(moment) for moment in moments],
        **({"bins": bins, "range": [both.low, both.high]} if bins[0] and left.size > 1 else {}),
    }


def _change_object(change: ChangedEntry) -> dict[str, Any]:
    fields = {"path": format_path(change.path), "what": change.what}
    if change.values is None:
        return {
            **fields,
            "sentence": f"{_describe_entry(change.left)} → {_describe_entry(change.right)}",
            "share": None,
        }
    values = change.values
    return {
        **fields,
        **({"note": note} if (note := "; ".join(_change_notes(change, values))) else {}),
        "share": values.different / values.size,
        "max_abs": format_exactly(values.max_abs, 3),
        "max_rel": format_exactly(values.max_rel, 3),
        "cosine": "" if values.cosine is None else typeset_minus(f"{values.cosine:.6f}"),
        "different": f"{values.different:,} of {values.size:,}",
        "at": str(list(values.at)) if values.at else "",
        "left": _format_value(values.left),
        "right": _format_value(values.right),
    }


def _change_notes(change: ChangedEntry, values: ArrayDifference) -> Iterator[str]:
    kinds = [entry.dtype for entry in (change.left, change.right) if isinstance(entry, Leaf)]
    if len(set(kinds)) > 1:
        yield " → ".join(kinds)
    if values.nans:
        yield f"NaN on one side only: {values.nans:,}"


def _describe_entry(entry: Entry) -> str:
    if isinstance(entry, ValueLeaf):
        return shorten(clean(str(json_value(entry)["value"])), _VALUE_LENGTH)
    return f"{entry.dtype}{list(entry.shape)}"


def _format_value(value: object) -> str:
    return format_exactly(value) if isinstance(value, float) else shorten(clean(str(value)), _VALUE_LENGTH)


_FACTS = (
    "env",
    "obs_dim",
    "action_low",
    "action_high",
    "head",
    "activations",
    "obs_norm",
    "epsilon",
    "optimizers",
)
_TEXT, _RULES, _SENTENCES = 160, 2000, 50


@dataclass(frozen=True, slots=True)
class ConversionSection:
    """Receipt of a conversion, or a sidecar with facts only (`source` is then empty).

    `facts` are name, value and provenance; `rules` are source, rule and target; `belongs` is whether
    the receipt was written for these weights (None if it does not record a digest).
    """

    __repr__ = describe_record

    source: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str, str], ...]
    rules: tuple[tuple[str, str, str], ...]
    more: int
    kinds: tuple[tuple[str, int], ...]
    parity: tuple[tuple[str, str, str, bool], ...]
    assumed: tuple[str, ...]
    residue: tuple[str, ...]
    unmapped: tuple[tuple[str, str], ...]
    belongs: bool | None


def read_conversion(file: str, sha256: str) -> ConversionSection:
    """Read a sidecar or the output of `convert --json`; raise FormatError for other files."""
    record = text.load_json(file, "the conversion report", "sidecar_bytes")
    if "target_sha256" in record:
        return conversion_from_sidecar(sidecar_parsing.read_sidecar(file), sha256)
    if not isinstance(record.get("mapped"), list):
        raise FormatError(
            "not a conversion report",
            file=file,
            expected="a sidecar or the output of convert --json",
        )
    unmapped = tuple(
        (word, item) for word in ("unused", "missing") for item in _format_items(record.get(word))
    )
    source = tuple((word, _format_text(record[word])) for word in ("source", "target") if word in record)
    digest = record.get("digest")
    belongs = digest == sha256 if isinstance(digest, str) else None
    return _build_conversion(record["mapped"], record, source=source, unmapped=unmapped, belongs=belongs)


def conversion_from_sidecar(record: sidecar.Sidecar, sha256: str) -> ConversionSection:
    """Return the section for a sidecar."""
    values = record.document()
    facts = tuple(
        (name, _format_text(values[name]), _format_text(record.provenance.get(name, "")))
        for name in _FACTS
        if values[name] is not None
    )
    source = tuple(
        (name, _format_text(value)) for name, value in (record.source or {}).items() if value is not None
    )
    return _build_conversion(
        record.rules, values, source=source, facts=facts, belongs=record.target_sha256 == sha256
    )


def _build_conversion(
    rules: Any,
    record: Mapping[str, Any],
    *,
    source: tuple[tuple[str, str], ...],
    facts: tuple[tuple[str, str, str], ...] = (),
    unmapped: tuple[tuple[str, str], ...] = (),
    belongs: bool | None,
) -> ConversionSection:
    moves = [rule for rule in rules if isinstance(rule, dict)]
    text = [tuple(str(move.get(name, "")) for name in ("source", "rule", "target")) for move in moves]
    table = tuple(
        (format_path(one), _format_text(rule), format_path(other)) for one, rule, other in text[:_RULES]
    )
    kinds = Counter(_format_text(rule) for _, rule, _ in text).most_common()
    return ConversionSection(
        source,
        facts,
        table,
        max(0, len(moves) - _RULES),
        tuple(kinds),
        tuple(_parity_row(row) for row in _as_list(record.get("parity")) if isinstance(row, dict)),
        _format_items(record.get("assumed")),
        tuple(_format_text(item) for item in _as_list(record.get("residue"))[:_SENTENCES]),
        unmapped[:_RULES],
        belongs,
    )


def _parity_row(record: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    return (
        _format_text(record.get("name")),
        _format_text(record.get("max_abs")),
        _format_text(record.get("max_rel")),
        record.get("within") is True,
    )


def _format_items(value: object) -> tuple[str, ...]:
    return tuple(_format_text(item) for item in _as_list(value)[:_RULES])


def _as_list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _format_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(clean(text), _TEXT)


_LONG_SENTENCE = 600
_MOST_LAYERS, _MOST_OUTPUTS = 2000, 200
# Of a long table: layers before and after the first difference; the rest is folded.
_WHOLE, _BEFORE, _AFTER = 40, 12, 8
# Bars are logarithmic, from the smallest error of float64 to 1.
_DECADES = 16


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output or network: the difference, relative too, and each side's error from float64."""

    name: str
    inputs: str
    difference: str
    relative: str
    errors: tuple[str, str]
    within: bool


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer of both sides: errors relative to A's largest number; `bar` is the output's, from 0 to 1."""

    number: int
    a: str
    b: str
    classes: str
    inputs: str
    outputs: str
    bar: float
    within: bool
    first: bool


@dataclass(frozen=True, slots=True)
class DivergenceBox:
    """Where two models part, in sentences; `heading` is `cause` or `suspected cause`."""

    where: str
    heading: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class VerificationSection:
    """Result of `verify --json`; `layers` are those next to the first difference, `every` is a long table.

    `belongs` is whether one side is this page's checkpoint; `covers` are sentences on what was compared.
    """

    sides: tuple[str, str]
    engines: tuple[str, str]
    within: bool
    belongs: bool
    tolerance: str
    outputs: tuple[OutputRow, ...]
    layers: tuple[LayerRow, ...]
    every: tuple[LayerRow, ...]
    more: int
    first: DivergenceBox | None
    covers: tuple[str, ...]
    assumed: tuple[str, ...]
    not_compared: tuple[str, ...]


def read_verification(file: str, path: str) -> VerificationSection:
    """Read the output of `verify --json` for this checkpoint; raise FormatError for other files."""
    record = text.load_json(file, "the verification", "sidecar_bytes")
    networks, sides = record.get("networks"), (record.get("a"), record.get("b"))
    if not isinstance(networks, list) or not all(isinstance(side, str) for side in sides):
        raise FormatError(
            "not a verification",
            file=file,
            expected="the output of verify --json",
            hint="write it by ckpttool verify A B --json > verification.json",
        )
    models = _as_object(record.get("models"))
    first = _as_object(models.get("first_difference"))
    every = _layer_rows(models.get("layers"), first)
    layers = _near_first(every)
    engines = [_format_word(engine) for engine in _as_list(models.get("engines") or record.get("backends"))]
    return VerificationSection(
        (_format_word(sides[0]), _format_word(sides[1])),
        (engines[0], engines[1]) if len(engines) == 2 else ("", ""),
        record.get("within") is True,
        any(_is_same(str(side), path) for side in sides),
        _format_word(record.get("tolerance", ""), _LONG_SENTENCE),
        tuple(_output_row(_as_object(network)) for network in networks[:_MOST_OUTPUTS]),
        layers,
        every if len(layers) < len(every) else (),
        max(0, len(_as_list(models.get("layers"))) - len(every)),
        _divergence(first) if first else None,
        tuple(_covered(record, models)),
        _sentences(record.get("assumed")),
        _sentences(record.get("not_compared")),
    )


def _is_same(name: str, path: str) -> bool:
    if urls.is_url(name) or urls.is_url(path):
        return name == path
    return os.path.abspath(name) == os.path.abspath(path) or (
        os.path.basename(name) == os.path.basename(path) and not os.path.exists(name)
    )


def _layer_rows(document: object, first: Mapping[str, Any]) -> tuple[LayerRow, ...]:
    rows: list[LayerRow] = []
    marked = False
    for number, row in enumerate(map(_as_object, _as_list(document)[:_MOST_LAYERS])):
        here = not marked and bool(first) and (row.get("a"), row.get("b")) == (first.get("a"), first.get("b"))
        marked = marked or here
        error = parse_number(row.get("outputs"))
        classes = dict.fromkeys(_format_word(row.get(name, "")) for name in ("class_a", "class_b"))
        rows.append(
            LayerRow(
                number + 1,
                _format_word(row.get("a", "")),
                _format_word(row.get("b", "")),
                " / ".join(classes),
                _format_error(parse_number(row.get("inputs"))),
                _format_error(error),
                _bar(error),
                row.get("within") is True,
                here,
            )
        )
    return tuple(rows)


def _near_first(every: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """Return all rows of a short table, else those next to the first difference or at the end."""
    if len(every) <= _WHOLE:
        return every
    at = next((index for index, row in enumerate(every) if row.first or not row.within), len(every))
    return every[max(0, at - _BEFORE) : at + _AFTER]


def _output_row(record: Mapping[str, Any]) -> OutputRow:
    names = ("max_abs", "max_rel", "error_a", "error_b")
    between, relative, *errors = (_format_error(parse_number(record.get(name))) for name in names)
    count = record.get("n")
    inputs = f"{count:,}" if isinstance(count, int) else ""
    return OutputRow(
        _format_word(record.get("name", "")),
        inputs,
        between,
        relative,
        (errors[0], errors[1]),
        record.get("within") is True,
    )


def _divergence(record: Mapping[str, Any]) -> DivergenceBox:
    a, b = _format_word(record.get("a", "")), _format_word(record.get("b", ""))
    pair = a if a == b else f"{a} of A and {b} of B"
    after = record.get("after")
    begin = _format_word(after) if isinstance(after, str) else "the inputs"
    where = f"between {begin} and {pair}" if record.get("where") == "between" else f"in {pair}"
    heading = "Cause" if record.get("confirmed") is True else "Suspected cause"
    return DivergenceBox(
        where, heading, *(_format_word(record.get(name) or "", _LONG_SENTENCE) for name in ("cause", "fix"))
    )


def _covered(record: Mapping[str, Any], models: Mapping[str, Any]) -> list[str]:
    """Return what else was compared."""
    sentences = []
    if models:
        both = "Both models also ran in float64." if models.get("float64") is True else ""
        sentences += [both or "Only float32 was compared: not both models run in float64."]
    updates = [_as_object(update) for update in _as_list(_as_object(record.get("training")).get("updates"))]
    if updates:
        right = sum(update.get("within") is True for update in updates)
        sentences.append(f"Training steps: {right} of {len(updates)} updates within their bounds.")
    contents = _as_object(record.get("contents"))
    if contents:
        wrong = len(_as_list(contents.get("discrepancies")))
        sentences.append(
            f"Contents: {_format_word(contents.get('equal', 0))} entries equal, {wrong} different."
        )
    return sentences


def _sentences(value: object) -> tuple[str, ...]:
    return tuple(_format_word(sentence, _LONG_SENTENCE) for sentence in _as_list(value)[:_MOST_OUTPUTS])


def _bar(error: float) -> float:
    if not error > 0:
        return 0.0 if error == 0 else 1.0
    return min(1.0, max(0.0, 1 + math.log10(error) / _DECADES)) if math.isfinite(error) else 1.0


def _format_error(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "0" if value == 0 else ("∞" if math.isinf(value) else f"{value:.1e}")


def _format_word(value: object, most: int = _TEXT) -> str:
    return shorten(clean(str(value)), most)


def _as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# Pictures per change: each side, and their difference.
_OF_A_CHANGE = 3


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Files with more about a checkpoint: evaluations, and the reports of its conversion and verification."""

    evaluations: Sequence[str] = ()
    conversion: str | None = None
    verification: str | None = None


@dataclass(frozen=True, slots=True)
class ReportContents:
    """Contents of the page; `rows` are the tree's rows, `pictures` the cells of all heat maps in base64.

    `signs` counts the tensors with a warning sign, `files` are all files read.
    """

    __repr__ = describe_record

    summary: CheckpointSummary
    sha256: str
    diagnosis: Diagnosis
    conversion: ConversionSection | None
    results: EvaluationSection
    comparison: ComparisonSection | None
    rows: list[dict[str, Any]]
    pictures: str
    signs: int
    files: tuple[File, ...]
    networks: Computation | None = None
    verification: VerificationSection | None = None
    others: Computation | None = None
    """those of the second checkpoint, without boxes if unknown; None if they are the same, or without one"""


def gather_contents(
    path: str,
    other: str | None = None,
    *,
    inputs: ReportInputs,
    glob: str | None = None,
    layout: str | None = None,
    progress: Progress = ignore_progress,
) -> ReportContents:
    """Read the checkpoint at the path, and its differences from `other`; raise any error of reading.

    At most one tensor of each checkpoint is in memory at a time.

    Args:
        path: the checkpoint.
        other: the one that it is compared with.
        inputs: files of results that the page shows.
        glob: a pattern for the paths of tensors.
        layout: the layout of the first checkpoint.
        progress: called with the bytes read so far, and all.
    """
    evaluations = read_evaluations(inputs.evaluations)
    listing = summary(path, glob, layout)
    checkpoint = listing.checkpoint
    files = (*checkpoint.files, *_input_files(checkpoint.path, inputs))
    stages = 2 if other is None else 3
    sha256 = digest_checkpoint(checkpoint, report_part(progress, 0, stages)).sha256
    conversion = _load_conversion(checkpoint.path, sha256, inputs.conversion)
    checked = inputs.verification
    verification = None if checked is None else read_verification(checked, checkpoint.path)
    changes = others = second = None
    drawn = len(listing.tensors)
    if other is not None:
        second = summary(other)
        files += second.checkpoint.files
        sides = ComparisonSide(checkpoint, listing.binding), ComparisonSide(second.checkpoint, second.binding)
        changes = compare_alignment(
            align_checkpoints(*sides, glob=glob), progress=report_part(progress, 1, stages)
        )
        others = find_computation(second.checkpoint, second.binding, None) or Computation(())
        drawn += _OF_A_CHANGE * min(PICTURED, len(changes.changed)) + len(changes.only_right)
    pictures = HeatMapBuffer(cell_budget(drawn))
    values, readings = _read_tensors(listing, glob, pictures, report_part(progress, stages - 1, stages))
    comparison = None if changes is None else compare_section(changes, listing, pictures)
    rows = list(tree_rows(listing, readings, {} if comparison is None else comparison.marks))
    if changes is not None and second is not None:
        rows += rows_only_right(changes, second, pictures, len(listing.tensors))
    networks = find_computation(checkpoint, listing.binding, sha256)
    return ReportContents(
        listing,
        sha256,
        examine_agent(checkpoint, listing.binding, values, sha256),
        conversion,
        evaluations,
        comparison,
        rows,
        pictures.encoded(),
        sum("signs" in row for row in rows),
        files,
        networks,
        verification,
        None if others == networks else others,
    )


def _read_tensors(
    listing: CheckpointSummary, glob: str | None, pictures: HeatMapBuffer, progress: Progress
) -> tuple[Stats, TensorReadings]:
    """Read every tensor once, for both its moments and its heat map."""
    heat_maps: dict[str, HeatMap] = {}
    names = listing.checkpoint.tree.names

    def add_heat_map(at: Path, _: Leaf, values: Values) -> None:
        if (heat_map := pictures.add(names[at], values)) is not None:
            heat_maps[names[at]] = heat_map

    values = compute_stats(listing.checkpoint, listing.binding, glob, progress, observe=add_heat_map)
    return values, TensorReadings({tensor.path: tensor for tensor in values.tensors}, heat_maps)


def _input_files(path: str, inputs: ReportInputs) -> tuple[File, ...]:
    """Return the documents read with the checkpoint, including its own sidecar."""
    documents = (*inputs.evaluations, inputs.conversion or sidecar.sidecar_path(path))
    checked = () if inputs.verification is None else (inputs.verification,)
    return tuple(File.stamp(file) for file in (*documents, *checked) if filesystem.isfile(file))


def _load_conversion(path: str, sha256: str, file: str | None) -> ConversionSection | None:
    if file is not None:
        return read_conversion(file, sha256)
    own_sidecar = sidecar.load_sidecar(path)
    return None if own_sidecar is None else conversion_from_sidecar(own_sidecar, sha256)


_STYLES = ("page.css", "tree.css", "computation.css", "verification.css", "print.css")
# In dependency order.
_SCRIPTS = (
    *("theme.js", "elements.js", "dagre.min.js", "computation.js", "pictures.js", "drawing.js", "panel.js"),
    *("rows.js", "tree.js", "search.js", "tables.js", "page.js"),
)
# Characters per line of signatures; maximum number of format details.
_COLUMNS, _TOLD = 100, 24


def render_page(contents: ReportContents) -> bytes:
    """Return the page in UTF-8; the same contents give the same bytes."""
    strips, ends = build_strips(contents.results.results)
    return render_template(
        "page.html",
        _STYLES,
        _SCRIPTS,
        found=contents,
        checkpoint=contents.summary.checkpoint,
        audit=audit.build_audit_document(contents.summary.checkpoint.code_references),
        signatures=signature_lines(contents.summary.checkpoint.details, _COLUMNS),
        details=_format_details(contents.summary.checkpoint.details),
        chart=build_chart(contents.results.curves),
        ranks=rank_results(contents.results.results, best_first=len(contents.results.results) > FIRST),
        strips=strips,
        strip_ends=ends,
        owners=_mark_own_results(contents),
        agent=contents.summary.binding is not None,
        data=embed_json(_page_data(contents)),
    )


def _mark_own_results(contents: ReportContents) -> dict[int, tuple[str, str]]:
    """Return class and text of a mark for each result of a checkpoint of this page, by its number."""
    words, paths = ["this checkpoint"], [contents.summary.checkpoint.path]
    if contents.comparison is not None:
        words, paths = ["A", "B"], [*paths, contents.comparison.diff.right]
    owners, _ = find_results(paths, contents.results.results)
    return {number: ("ok", words[at]) for number, at in owners.items()}


def _format_details(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a format's scalar details, e.g. Keras's version or safetensors' metadata."""
    flat = {**details, **(details["metadata"] if isinstance(details.get("metadata"), Mapping) else {})}
    plain = [(name, str(value)) for name, value in flat.items() if isinstance(value, str | int | float)]
    return plain[:_TOLD]


def _page_data(data: ReportContents) -> dict[str, Any]:
    changes = [] if data.comparison is None else _compact_changes(data.rows, data.comparison.changes)
    return {"rows": pack_objects(_compact_rows(data.rows)), "changes": pack_objects(changes)}


def _compact_changes(
    rows: Sequence[Mapping[str, Any]], changes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the changes without what most of them share: the path of their row, and that values differ."""
    paths: dict[int, str] = {}
    for row in rows:
        if "change" in row:
            paths.setdefault(row["change"], row.get("path", ""))
    compact = []
    for number, change in enumerate(changes):
        shared = {"path": paths.get(number), "what": "values"} if change["share"] is not None else {}
        compact.append(
            {key: value for key, value in change.items() if key not in shared or value != shared[key]}
        )
    return compact


def _compact_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows without what the page's script derives: paths of names, and numbers of elements."""
    above: list[str] = []
    for row in rows:
        del above[row["level"] :]
        path = row.get("path", "")  # of the only tensor of a file
        compact = {key: value for key, value in row.items() if key not in ("path", "size", "stats")}
        if path != "/".join([*above[-1:], row["name"]]):
            compact["path"] = path
        for key, value in row.get("stats", {}).items():
            if (key, value) != ("elements", row.get("size")):
                compact[f"stats.{key}"] = value
        above.append(path)
        yield compact
