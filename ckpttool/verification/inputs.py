"""Inputs of two models: the same numbers for both sides, in each side's order of axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, ValueLeaf
from ckpttool.formats import npz
from ckpttool.formats.detect import open_checkpoint
from ckpttool.networks.worker import parse_input_shape

if TYPE_CHECKING:
    from ckpttool.networks.messages import InputRow
    from ckpttool.networks.model_runner import Opened

_FREE = 8  # the length of an axis that a model leaves open


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input of a side: its shape without the batch, its declared dtype, and a fixed batch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class InputPair:
    """An input of both sides: the names and shapes without the batch, and B's order of axes."""

    a: str
    b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype: str = "float32"
    transposed: str = ""
    below: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "a": self.a,
            "b": self.b,
            "shape_a": list(self.shape_a),
            "shape_b": list(self.shape_b),
            "dtype": self.dtype,
            "transposed": bool(self.transposed),
        }


# Where B has the channels of A's input, and how their axis moves there, batch included.
_MOVES = {"first": (-1, 1), "last": (1, -1), "first in each frame": (-1, 2), "last in each frame": (2, -1)}
OPPOSITE = {
    "first": "last",
    "last": "first",
    "first in each frame": "last in each frame",
    "last in each frame": "first in each frame",
    "": "",
}


def move_channels(array: np.ndarray, how: str) -> np.ndarray:
    """Return the array with channels moved, or itself if `how` is empty."""
    return np.ascontiguousarray(np.moveaxis(array, *_MOVES[how])) if how else array


def _moved(shape: Sequence[Any], how: str) -> tuple[Any, ...]:
    """Return a shape without batch after the move."""
    extents = list(shape)
    if how:
        start, end = (axis if axis < 0 else axis - 1 for axis in _MOVES[how])
        extent = extents.pop(start)
        extents.insert(len(extents) if end < 0 else end, extent)
    return tuple(extents)


class InputResolver:
    """Pairs the inputs of two sides; every assumption is a sentence in `assumed`."""

    def __init__(self, opened: Sequence[Opened], transpose: bool | None) -> None:
        self._declared = [[_declared_input(row) for row in host["inputs"]] for host in opened]
        self._channels = [str(host["channels"]) for host in opened]
        self._transpose = transpose
        self.assumed: list[str] = []

    def pairs(
        self, shapes: Mapping[str, tuple[int, ...]], given_b: Sequence[tuple[int, ...]] = ()
    ) -> list[InputPair]:
        """Return the pairs.

        `shapes` are shapes of A's inputs by name, "" for one without a name; `given_b` are those of a B
        that declares none, in order.
        """
        a, b = self._declared
        a = _with_shapes(a, shapes)
        if given_b and not b and len(given_b) == (len(a) or len(given_b)):
            names = [input_.name for input_ in a] or [f"input {index}" for index in range(len(given_b))]
            b = [ModelInput(*row) for row in zip(names, given_b, strict=True)]
        if a and b:
            return [self._pair(x, y) for x, y in self._by_name(a, b)]
        if a:
            return [self._derived(input_, 0) for input_ in a]
        if b:
            return [self._derived(input_, 1) for input_ in b]
        raise UsageError(
            "neither model declares its inputs",
            hint="pass the shape of each input of A without the batch: --input-shape N,N,...",
        )

    def _by_name(self, a: list[ModelInput], b: list[ModelInput]) -> list[tuple[ModelInput, ModelInput]]:
        if len(a) != len(b):
            raise UsageError(
                f"A has {format_count(len(a), 'input')} and B has {len(b)}",
                found=f"{', '.join(x.name for x in a)}; {', '.join(x.name for x in b)}",
            )
        named = {input_.name: input_ for input_ in b}
        if {input_.name for input_ in a} == {*named}:
            return [(input_, named[input_.name]) for input_ in a]
        if len(a) > 1:
            rows = ", ".join(f"{x.name} = {y.name}" for x, y in zip(a, b, strict=True))
            self.assumed.append(f"inputs are paired by order: {rows}")
        return list(zip(a, b, strict=True))

    def _pair(self, a: ModelInput, b: ModelInput) -> InputPair:
        how = self._order(a, b)
        expected = _moved(a.shape, how)
        if len(expected) != len(b.shape) or any(
            x != y for x, y in zip(expected, b.shape, strict=True) if x is not None and y is not None
        ):
            raise UsageError(
                f"input {a.name} of A and {b.name} of B have different shapes",
                expected=str(list(a.shape)),
                found=str(list(b.shape)),
                hint=self._shape_hint(a, b),
            )
        filled = tuple(
            x if x is not None else (y if y is not None else _FREE)
            for x, y in zip(a.shape, _moved(b.shape, OPPOSITE[how]), strict=True)
        )
        return InputPair(a.name, b.name, filled, _moved(filled, how), transposed=how)

    def _shape_hint(self, a: ModelInput, b: ModelInput) -> str | None:
        """Return the option that makes the shapes equal; None if the models have different inputs."""
        if self._transpose is not None and self._fitting_orders(a, b):
            return f"leave out --{'' if self._transpose else 'no-'}transpose-inputs"
        declared = next((input_ for input_ in self._declared[0] if input_.name == a.name), None)
        if None in b.shape or not (declared is None or _is_compatible(declared.shape, b.shape)):
            return None
        return f"use --input-shape {','.join(map(str, b.shape))}"

    def _fitting_orders(self, a: ModelInput, b: ModelInput) -> list[str]:
        """Return the orders of A's axes in which it has B's shape."""
        if len(a.shape) < 2:
            return [""] * _is_compatible(a.shape, b.shape)
        ways = ["", "first", "last", *(["first in each frame", "last in each frame"] * (len(a.shape) > 3))]
        return [how for how in ways if _is_compatible(_moved(a.shape, how), b.shape)]

    def _order(self, a: ModelInput, b: ModelInput) -> str:
        """Return how B orders the axes of A's input."""
        if len(a.shape) < 2:
            return ""
        by_layers = self._by_channels(len(a.shape))
        if self._transpose is not None:
            return (by_layers or "first") if self._transpose else ""
        fits = self._fitting_orders(a, b)
        if len(fits) != 1:
            preferred = [
                how for how in (by_layers, f"{by_layers} in each frame") if by_layers and how in fits
            ]
            fits = preferred or fits
        how = fits[0] if fits else ""
        if how:
            self.assumed.append(
                f"B's input {b.name} is A's with channels {how}: A declares {list(a.shape)}, B "
                f"{list(b.shape)} (--no-transpose-inputs turns this off)"
            )
        return how

    def _by_channels(self, rank: int) -> str:
        a, b = self._channels
        return b if rank > 1 and a and b and a != b else ""

    def _derived(self, known: ModelInput, side: int) -> InputPair:
        """Return the pair of an input that only one side declares."""
        shape = tuple(_FREE if extent is None else extent for extent in known.shape)
        how = self._by_channels(len(shape))
        if self._transpose is not None:
            how = (how or "first") if self._transpose and len(shape) > 1 else ""
        elif how:
            self.assumed.append(
                f"B's inputs are A's with channels {how}: the convolutions of A have channels "
                f"{OPPOSITE[how]}, those of B {how} (--no-transpose-inputs turns this off)"
            )
        if side == 0:
            return InputPair(known.name, known.name, shape, _moved(shape, how), transposed=how)
        return InputPair(known.name, known.name, _moved(shape, OPPOSITE[how]), shape, transposed=how)


def _is_compatible(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    return len(one) == len(other) and all(
        x is None or y is None or x == y for x, y in zip(one, other, strict=True)
    )


def _declared_input(row: InputRow) -> ModelInput:
    return ModelInput(row["name"], tuple(row["shape"]), row["dtype"], row["batch"])


def _with_shapes(declared: list[ModelInput], shapes: Mapping[str, tuple[int, ...]]) -> list[ModelInput]:
    """Return the inputs with the shapes that the user gives, by name or in order."""
    if not shapes:
        return declared
    if not declared:
        return [ModelInput(*row) for row in zip(input_names(shapes), shapes.values(), strict=True)]
    inputs = list(declared)
    for index, (name, shape) in enumerate(shapes.items()):
        at = next((n for n, value in enumerate(declared) if value.name == name), index if not name else None)
        if at is None or at >= len(inputs):
            raise UsageError(
                f"A has no input {name}", found=abbreviate_list([input_.name for input_ in declared], 8)
            )
        if not _is_compatible(shape, declared[at].shape):
            raise UsageError(
                f"input {declared[at].name} of A has another shape",
                expected=str(list(declared[at].shape)),
                found=str(list(shape)),
            )
        inputs[at] = replace(inputs[at], shape=shape)
    return inputs


def input_names(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of inputs whose shapes the user gives; one without a name has its number."""
    return [name or f"input {index}" for index, name in enumerate(shapes)]


def parse_named_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse `NAME=3,32,32` or `3,32,32`, several in order; raise UsageError if one is invalid.

    `NAME=` is one number for each row.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, shape = text.rpartition("=")
        key = name if equals else ("" if "" not in shapes else f"input {len(shapes)}")
        shapes[key] = parse_input_shape(shape) if shape or not equals else ()
    return shapes


_BATCH, _LARGE_BATCH, _SMALLEST = 32, 8, 4
_FEWEST, _MOST_NUMBERS = 2, 1 << 20
_LARGE_MODEL, HUGE_MODEL = 1 << 22, 1 << 24
_UNLIMITED = 1000  # integers of an input that is looked up nowhere, e.g. the number of a step
_FURTHER_ROWS, _FURTHER_ROUNDS, _WIDE = 4, 7, 10.0


def draw_inputs(
    pairs: Sequence[InputPair], batch: int | None, size: int = 0, seed: int = 0
) -> list[np.ndarray]:
    """Return A's inputs: always the same for one seed; the last rows are small and large.

    `size` is the number of weights: a large model gets fewer rows, a huge one two, the last ten times larger.
    """
    generator = np.random.default_rng(seed)
    largest = max(math.prod(pair.shape_a) for pair in pairs)
    most = _BATCH if size < _LARGE_MODEL else _LARGE_BATCH
    huge = size >= HUGE_MODEL and batch is None
    rows = batch or (_FEWEST if huge else max(_SMALLEST, min(most, _MOST_NUMBERS // max(largest, 1))))
    scales = np.ones(rows)
    if huge:
        scales[-1] = _WIDE
    elif rows >= _SMALLEST:
        scales[-2:] = 0.1, 3.0
    arrays = []
    for pair in pairs:
        shape = (rows, *pair.shape_a)
        if pair.dtype == "bool" or _is_mask(pair):
            arrays.append(_draw_mask(generator, shape).astype(pair.dtype))
        elif pair.below is not None or pair.dtype.startswith(("int", "uint")):
            arrays.append(_draw_integers(generator, shape, pair).astype(pair.dtype))
        else:
            drawn = (generator.standard_normal(shape).T * scales).T
            arrays.append(drawn.astype(pair.dtype))
    return arrays


def _is_mask(pair: InputPair) -> bool:
    """Return whether an input is a mask by its name, which limits it to 0 and 1.

    Other numbers in an attention mask outweigh the scores: then queries and keys do not matter.
    """
    return any("mask" in name.lower() for name in (pair.a, pair.b))


def _draw_mask(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros and ones; each last axis begins with a one, because nothing attends to an empty row."""
    drawn = generator.integers(0, 2, shape)
    drawn[: len(drawn) // 4] = 1
    if len(shape) > 1:
        drawn[..., 0] = 1
    return drawn


def _draw_integers(generator: np.random.Generator, shape: tuple[int, ...], pair: InputPair) -> np.ndarray:
    """Return integers with the first and the last one: 0 is often the padding, at the end of a sequence.

    Those without a limit are small in half of the rows: they may be numbers or switches.
    """
    if pair.below is None:
        below = {"int8": 1 << 7, "uint8": 1 << 8}.get(pair.dtype, _UNLIMITED)
        drawn = generator.integers(0, below, shape)
        drawn[1 : len(drawn) // 2] %= 2
        return drawn
    drawn = generator.integers(0, pair.below, shape)
    flat = drawn.reshape(len(drawn), -1)
    flat[0, 0] = pair.below - 1
    if flat.shape[1] > 1:
        flat[::2, -max(1, flat.shape[1] // 4) :] = 0
    else:
        flat[1:2] = 0
    return drawn


def further_inputs(
    pairs: Sequence[InputPair], batch: int | None, arrays: Sequence[np.ndarray], size: int = 0
) -> list[tuple[str, list[np.ndarray]]]:
    """Return more inputs with their titles: large numbers, and other rows for a model of a fixed batch.

    Those of a huge model (by its `size`, see draw_inputs) have large numbers already.
    """
    draws = []
    if batch is not None and batch < _SMALLEST * 2:
        rounds = range(1, _FURTHER_ROUNDS + 1)
        draws += [("other random numbers", draw_inputs(pairs, batch, seed=seed)) for seed in rounds]
    if any(array.dtype.kind == "f" for array in arrays) and (size < HUGE_MODEL or batch is not None):
        rows = [array if batch else array[:_FURTHER_ROWS] for array in arrays]
        wide = [
            (row * _WIDE).astype(row.dtype) if row.dtype.kind == "f" and not _is_mask(pair) else row
            for pair, row in zip(pairs, rows, strict=True)
        ]
        draws.append(("numbers ten times as large", wide))
    return draws


class InputFile:
    """The arrays of a file by the name of A's input; each one begins with the batch."""

    def __init__(self, file: str, declared: Sequence[str]) -> None:
        """Read the arrays for the `declared` inputs of A, which are the file's own names if A declares none.

        Raise UsageError for arrays that are no inputs, or are not those of A.
        """
        self.file = file
        self.notes: list[str] = []
        checkpoint = open_checkpoint(file)
        if checkpoint.format != npz.NAME:
            raise UsageError(
                "the inputs are not arrays of NumPy",
                file=file,
                expected="an .npz file with one array for each input",
                found=checkpoint.format,
            )
        entries = {checkpoint.tree.names[path]: entry for path, entry in checkpoint.tree.items()}
        self.arrays = {
            name: _input_array(file, key, entries[key]) for name, key in self._keys(entries, declared).items()
        }

    def _keys(self, names: Collection[str], declared: Sequence[str]) -> dict[str, str]:
        """Return the file's name for each input of A: the same one, or that in the same place."""
        if not declared or {*declared} == {*names}:
            return {name: name for name in declared or names}
        if len(declared) != len(names) or {*declared} & {*names}:
            raise UsageError(
                f"A has {format_count(len(declared), 'input')}, the file has other arrays",
                file=self.file,
                expected=abbreviate_list(list(declared), 8),
                found=abbreviate_list(list(names), 8),
            )
        if len(declared) > 1:
            rows = ", ".join(f"{key} = {name}" for key, name in zip(names, declared, strict=True))
            self.notes.append(f"arrays of {self.file} are A's inputs in order: {rows}")
        return dict(zip(declared, names, strict=True))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes without the batch."""
        return {name: array.shape[1:] for name, array in self.arrays.items()}

    def inputs(self, pairs: Sequence[InputPair], batch: int | None) -> list[np.ndarray]:
        """Return the arrays in the order of the pairs; raise UsageError for one that does not fit its input.

        `batch` is the number of rows that a model requires, None for any.
        """
        arrays = [self.arrays[pair.a] for pair in pairs]
        for pair, array in zip(pairs, arrays, strict=True):
            expected = (len(array) if batch is None else batch, *pair.shape_a)
            if array.shape != expected:
                raise UsageError(
                    f"input {pair.a} has another shape",
                    file=self.file,
                    expected=str(list(expected)),
                    found=str(list(array.shape)),
                )
            self._check_values(pair, array)
        return arrays

    def _check_values(self, pair: InputPair, array: np.ndarray) -> None:
        """Raise UsageError if the model's dtype does not hold whole numbers; note rounded ones."""
        with np.errstate(all="ignore"):
            same = np.array_equal(array.astype(pair.dtype).astype(array.dtype), array, equal_nan=True)
        if same:
            return
        if array.dtype.kind == "f" and pair.dtype.startswith("float"):
            self.notes.append(f"input {pair.a} is rounded from {array.dtype} to {pair.dtype}")
            return
        raise UsageError(
            f"input {pair.a} has numbers that the model's {pair.dtype} does not hold",
            file=self.file,
            expected=pair.dtype,
            found=str(array.dtype),
        )


def _input_array(file: str, name: str, entry: Leaf | ValueLeaf) -> np.ndarray:
    """Return an array of numbers with at least one row; raise UsageError for anything else."""
    array = entry.array() if isinstance(entry, Leaf) and entry.dtype != "string" else None
    if array is None or array.dtype.kind not in "biuf":
        kind = entry.dtype if isinstance(entry, Leaf) else "an object or a string"
        raise UsageError("an input is not an array of numbers", file=file, path=name, found=kind)
    if not array.ndim or not len(array):
        raise UsageError(
            "an input has no rows",
            file=file,
            path=name,
            expected="an array that begins with the batch",
            found=str(list(array.shape)),
        )
    return array
