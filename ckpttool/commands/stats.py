"""Compute statistics and differences of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ckpttool.commands import processes
from ckpttool.core import limits, text, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.text import compile_glob, describe_record, no_match_error, render_record
from ckpttool.core.tree import Leaf, Path, ValueLeaf, json_value
from ckpttool.formats.detect import open_checkpoint
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.verification.array_differences import ArrayDifference, Values, iter_values

By = Literal["path", "agent", "model", "conversion"]
Sort = Literal["abs", "rel", "cosine"]
Entry = Leaf | ValueLeaf


class DeclaredEntry(NamedTuple):
    """An entry that only one side has because a conversion drops or adds it: no difference.

    `what` is "kept" (in the sidecar, or implied by the target), "dropped" (unmapped, and listed in the
    receipt) or "added" (by the writer of the format).
    """

    side: Literal["left", "right"]
    path: str
    what: Literal["kept", "dropped", "added"]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return self._asdict()


@dataclass(frozen=True, slots=True)
class ChangedEntry:
    """A tensor or value that both sides have, with different contents.

    `left` and `right` are the entries, `values` the difference of tensors with equal shapes (None if
    types or shapes are not comparable).
    """

    __repr__ = describe_record

    path: str
    left: Entry
    right: Entry
    values: ArrayDifference | None

    @property
    def what(self) -> Literal["kind", "shape", "dtype", "values"]:
        """Return the first difference: "kind", "shape", "dtype" or "values"."""
        if not (isinstance(self.left, Leaf) and isinstance(self.right, Leaf)):
            return "values" if type(self.left) is type(self.right) else "kind"
        if self.left.shape != self.right.shape:
            return "shape"
        return "dtype" if self.left.dtype != self.right.dtype else "values"

    def distance(self, sort: Sort) -> tuple[bool, bool, float]:
        """Return a sorting key with the biggest changes last: values, counters before weights, then form."""
        weight = isinstance(self.left, Leaf) and self.left.role in ("parameter", "buffer")
        if self.values is None:
            return isinstance(self.left, Leaf), weight, math.inf
        if sort == "cosine":
            return False, weight, 2.0 if self.values.cosine is None else 1.0 - self.values.cosine
        return False, weight, self.values.max_abs if sort == "abs" else self.values.max_rel

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "what": self.what,
            "left": _entry(self.left),
            "right": _entry(self.right),
            "values": None if self.values is None else self.values.document(),
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """Comparison of two checkpoints.

    `by` is how entries are paired: by path, by meaning in agents of `layouts`, by what fills a live
    model, or after converting one side to the other's form. `equal` counts the tensors that are
    equal, `only_left` and `only_right` name the entries that only one has, `declared` those that a
    conversion declares.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    left: str
    right: str
    formats: tuple[str, str]
    layouts: tuple[str | None, str | None]
    by: By
    equal: int
    changed: tuple[ChangedEntry, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    notes: tuple[str, ...]
    declared: tuple[DeclaredEntry, ...] = ()

    @property
    def identical(self) -> bool:
        """Return whether no difference was found."""
        return not (self.changed or self.only_left or self.only_right)

    @property
    def resized(self) -> bool:
        """Return whether any weight has another shape."""
        weights = (each.left for each in self.changed if each.what == "shape")
        return any(isinstance(each, Leaf) and each.role == "parameter" for each in weights)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "left": {"path": self.left, "format": self.formats[0], "layout": self.layouts[0]},
            "right": {"path": self.right, "format": self.formats[1], "layout": self.layouts[1]},
            "by": self.by,
            "identical": self.identical,
            "equal": self.equal,
            "changed": [each.document() for each in self.changed],
            "only_left": list(self.only_left),
            "only_right": list(self.only_right),
            "declared": [each.document() for each in self.declared],
            "notes": list(self.notes),
        }


def _entry(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueLeaf):
        return dict(text.replace_nonfinite(json_value(entry)))
    return {"key": entry.key, "dtype": entry.dtype, "shape": list(entry.shape)}


BINS = 16
# Magnitudes from which sums of numbers may overflow; squares below its inverse lose digits.
_LARGE = 1e280


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of `size` numbers; complex ones count by magnitude.

    `low`, `high`, `mean`, `std` (of the population) and `norm` (Euclidean) cover the finite numbers,
    NaN without any. `deviation` is the norm of the differences from the mean, `zeros`, `nans` and `infs` are
    counts.
    """

    size: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviation: float = 0.0
    zeros: int = 0
    nans: int = 0
    infs: int = 0

    @property
    def finite(self) -> int:
        """The number of values that are neither NaN nor infinite."""
        return self.size - self.nans - self.infs

    @property
    def std(self) -> float:
        """The standard deviation of the population."""
        return self.deviation / math.sqrt(self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.hypot(self.deviation, math.sqrt(self.finite) * self.mean)

    def __add__(self, other: Moments) -> Moments:
        """Return the combined moments (Chan, Golub and LeVeque 1979, for mean and deviation)."""
        finite = self.finite + other.finite
        delta = other.mean - self.mean
        share = other.finite / finite if finite else 0.0
        return Moments(
            self.size + other.size,
            min(self.low, other.low),
            max(self.high, other.high),
            self.mean + delta * share,
            math.hypot(self.deviation, other.deviation, delta * math.sqrt(self.finite * share)),
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infs + other.infs,
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON values; null where there are no finite numbers."""
        known = self.finite > 0
        values = (self.low, self.high, self.mean, self.std, self.norm)
        names = ("min", "max", "mean", "std", "norm")
        found: dict[str, Any] = text.replace_nonfinite(
            {
                "elements": self.size,
                **{name: value if known else None for name, value in zip(names, values, strict=True)},
                "zeros": self.zeros,
                "nans": self.nans,
                "infs": self.infs,
            }
        )
        return found


def compute_moments(array: Values) -> Moments:
    """Return the float64 moments of an array of numbers or booleans."""
    pieces = map(_piece_moments, iter_values(array))
    return sum(pieces, next(pieces, Moments()))


def histogram(array: Values, found: Moments) -> tuple[int, ...]:
    """Return the count of finite numbers in each of BINS equal intervals between the extremes.

    An interval contains its lower end, the last one both (numpy/lib/_histograms_impl.py).
    """
    if not found.finite or found.low == found.high or not math.isfinite(found.high - found.low):
        return ()
    edges = np.linspace(found.low, found.high, BINS + 1)
    above = np.zeros(BINS + 1, np.int64)  # numbers from each edge up, none above the last
    for piece in iter_values(array):
        numbers = piece if piece.dtype.char in "fd" else _to_real(piece)
        if found.finite < found.size:
            numbers = numbers[np.isfinite(numbers)]
        above[0] += numbers.size
        for at in range(1, BINS):
            above[at] += np.count_nonzero(numbers >= _round_up(edges[at], numbers.dtype))
    return tuple(int(count) for count in above[:-1] - above[1:])


def is_finite(piece: np.ndarray) -> bool:
    """Return whether all elements are numbers, neither NaN nor infinite."""
    return piece.dtype.kind in "iub" or bool(np.isfinite(piece).all())


def _round_up(edge: np.float64, dtype: np.dtype) -> Any:
    """Return the smallest number of the type that is not below the edge."""
    rounded = dtype.type(edge)
    return rounded if rounded >= edge else np.nextafter(rounded, dtype.type(np.inf))


def _to_real(piece: np.ndarray) -> np.ndarray:
    """Return a float64 copy, of complex numbers their magnitudes."""
    return np.abs(piece) if piece.dtype.kind == "c" else piece.astype(np.float64)


def _piece_moments(piece: np.ndarray) -> Moments:
    # The methods of arrays call these functions through Python, which takes longer than a layer of an agent.
    numbers = whole = _to_real(piece)
    nans = 0
    low, high = float(np.minimum.reduce(whole)), float(np.maximum.reduce(whole))
    if not (math.isfinite(low) and math.isfinite(high)):
        numbers, nans = whole[np.isfinite(whole)], int(np.isnan(whole).sum())
        if not numbers.size:
            return Moments(whole.size, nans=nans, infs=whole.size - nans)
        low, high = float(numbers.min()), float(numbers.max())
    infs = whole.size - numbers.size - nans
    zeros = piece.size - int(np.count_nonzero(piece != 0))
    # The sum of numbers near the largest float64 is infinite, that of their parts is not.
    large = max(-low, high) > _LARGE
    mean = np.add.reduce(numbers / numbers.size) if large else np.add.reduce(numbers) / numbers.size
    mean = float(mean) + 0.0  # which is not negative zero
    return Moments(piece.size, low, high, mean, euclidean_norm(numbers - mean), zeros, nans, infs)


def euclidean_norm(numbers: np.ndarray) -> float:
    """Return the norm of float64 numbers, also if their squares are above or below what float64 holds."""
    with np.errstate(over="ignore", invalid="ignore"):
        # np.dot would start the threads of BLAS, whose number decides how it rounds.
        total = float(np.add.reduce(np.square(numbers)))
    if 1 / _LARGE < total < math.inf:
        return math.sqrt(total)
    largest = float(np.abs(numbers).max(initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    scaled = numbers / largest
    return largest * math.sqrt(float(np.square(scaled).sum()))


# Moments of squared gradients: torch's and Keras's names for those of Adam, AMSGrad and RMSprop.
_SQUARES = frozenset(("v", "vhat", "rms", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "accumulator"))
# Gradients at or above this size mean diverged training, at or below that size none at all: sqrt(v) estimates
# a gradient.
_EXPLODED, _VANISHED = 1e6, 1e-12
# The axis of a layer's output units: last in Keras kernels, first in torch weights.
_UNITS = {"kernel": -1, "weight": 0}


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor's moments; `histogram` counts finite numbers in equal intervals between the extremes.

    `signs` are sentences about bad signs. The histogram is empty if all numbers are equal.
    """

    __repr__ = describe_record

    path: str
    leaf: Leaf
    moments: Moments
    histogram: tuple[int, ...]
    signs: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "key": self.leaf.key,
            "dtype": self.leaf.dtype,
            "shape": list(self.leaf.shape),
            "role": self.leaf.role,
            **self.moments.document(),
            "histogram": list(self.histogram),
            "signs": list(self.signs),
        }


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """All tensors at and below a module combined."""

    path: str
    tensors: int
    moments: Moments

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "tensors": self.tensors, **self.moments.document()}


@dataclass(frozen=True, slots=True)
class Stats:
    """The tensors of numbers, in file order, and the modules above them.

    `left_out` names the tensors without numbers (strings).
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    path: str
    format: str
    layout: str | None
    tensors: tuple[TensorStats, ...]
    modules: tuple[ModuleStats, ...]
    left_out: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """Return whether all values are numbers, neither NaN nor infinite."""
        return not any(
            count_nonfinite(each.path.split("/"), each.leaf, each.moments) for each in self.tensors
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "finite": self.finite,
            "tensors": [each.document() for each in self.tensors],
            "modules": [each.document() for each in self.modules],
            "left_out": list(self.left_out),
        }


def stats(
    path: str,
    glob: str | None = None,
    layout: str | None = None,
    progress: Progress = ignore_progress,
    *,
    jobs: int | None = None,
    ray: str | None = None,
) -> Stats:
    """Read the tensors of a checkpoint one at a time, and verify checksums.

    Errors of opening and reading are raised with the tensor's path; UsageError if no path matches
    `glob`.

    Args:
        path: The checkpoint.
        glob: A pattern for the paths of the tensors that are read.
        layout: The layout by which the agent is recognized; by default any that matches.
        progress: Called with the bytes that were read and their sum.
        jobs: Processes, each with one tensor at a time; by default this one alone.
        ray: Address of a Ray cluster whose processes read the tensors.

    >>> import ckpttool
    >>> numbers = ckpttool.stats("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt", "actor/l1/weight")
    >>> numbers.finite, round(numbers.tensors[0].moments.mean, 4)
    (True, -0.0631)

    """
    checkpoint = open_checkpoint(path)
    return compute_stats(
        checkpoint, recognize_checkpoint(checkpoint, layout), glob, progress, jobs=jobs, ray=ray
    )


def compute_stats(
    checkpoint: Checkpoint,
    binding: RecognizedAgent | None,
    glob: str | None = None,
    progress: Progress = ignore_progress,
    observe: Callable[[Path, Leaf, Values], None] | None = None,
    *,
    histograms: bool = True,
    jobs: int | None = None,
    ray: str | None = None,
) -> Stats:
    """Return the stats of a checkpoint already listed, with its agent.

    Args:
        checkpoint: what is read.
        binding: the agent in it, which names the slots of its optimizers.
        glob: a pattern for the paths of tensors.
        progress: called with the bytes read so far, and all.
        observe: called in this process with each tensor's values, an array while it is in memory or a stream.
        histograms: without them there are no modules either.
        jobs: processes that read.
        ray: address of the Ray cluster whose processes read instead.

    """
    tree = checkpoint.tree
    keep = compile_glob(glob)
    chosen = [(at, leaf) for at, leaf in tree.tensors() if keep(tree.names[at])]
    if glob is not None and not chosen:
        raise no_match_error(glob, [tree.names[at] for at, _ in tree.tensors()], checkpoint.path)
    total, done = sum(leaf.nbytes for _, leaf in chosen), 0
    found, left_out = [], []
    if processes.is_spread(jobs, ray):
        left_out = [tree.names[at] for at, leaf in chosen if leaf.dtype == "string"]
        chosen = [(at, leaf) for at, leaf in chosen if leaf.dtype != "string"]
        entries = [
            ((tree.names[at], at, leaf, histograms), tree.names[at], leaf.nbytes) for at, leaf in chosen
        ]
        found = list(
            processes.map_entries(_entry_stats, entries, (checkpoint,), progress, jobs=jobs, ray=ray)
        )
        chosen = []
    for at, leaf in chosen:
        if leaf.dtype == "string":
            left_out.append(tree.names[at])
            continue
        try:
            values = leaf.values()
            found.append(tensor_stats(tree.names[at], at, leaf, values, counted=histograms))
            if observe is not None:
                observe(at, leaf, values)
        except CkpttoolError as error:
            raise error.located(file=checkpoint.path, path=tree.names[at]) from error
        done += leaf.nbytes
        progress(done, total)
    return Stats(
        urls.display_url(checkpoint.path),
        checkpoint.format,
        None if binding is None else binding.layout,
        tuple(found),
        tuple(_modules(found)) if histograms else (),
        tuple(left_out),
    )


def _entry_stats(entry: tuple[str, Path, Leaf, bool]) -> TensorStats:
    name, path, leaf, counted = entry
    return tensor_stats(name, path, leaf, leaf.values(), counted=counted)


def tensor_stats(name: str, path: Path, leaf: Leaf, array: Values, *, counted: bool = True) -> TensorStats:
    """Return the stats of one numeric tensor.

    Args:
        name: how the tensor is called.
        path: its path in the tree, which may show a slot of an optimizer.
        leaf: its type and role.
        array: its values.
        counted: also make the histogram.

    """
    known = compute_moments(array)
    counts = histogram(array, known) if counted else ()
    return TensorStats(name, leaf, known, counts, tuple(find_warning_signs(path, leaf, known, array)))


def _modules(found: list[TensorStats]) -> Iterator[ModuleStats]:
    sums: dict[str, tuple[int, Moments]] = {"": (0, Moments())}
    for each in found:
        steps = each.path.split("/")
        if len(steps) > limits.current().path_depth:
            raise limits.limit_error("path_depth", "a tensor path has too many levels", len(steps))
        for end in range(len(steps)):
            above = "/".join(steps[:end])
            count, known = sums.get(above, (0, Moments()))
            sums[above] = (count + 1, known + each.moments)
    return (ModuleStats(path, count, known) for path, (count, known) in sums.items())


def find_warning_signs(path: Path, leaf: Leaf, known: Moments, array: Values | None = None) -> Iterator[str]:
    """Yield a sentence for each sign of failed training.

    Units are checked if the whole array is available.
    """
    for count, what in count_nonfinite([str(step.value) for step in path], leaf, known):
        yield f"{count:,} of {known.size:,} {'is' if count == 1 else 'are'} {what}"
    if not known.finite or leaf.dtype == "bool":
        return
    if leaf.role == "slot" and leaf.slot in _SQUARES:
        yield from _squared_slot_warnings(known)
    elif leaf.role == "parameter" and array is not None:
        yield from _unit_warnings(path, array, known)


def count_nonfinite(steps: Sequence[str], leaf: Leaf, known: Moments) -> list[tuple[int, str]]:
    """Return the counts of "NaN" and of unexpected "infinite" elements; nothing for none.

    `steps` are those of the tensor's path. The unbounded sides of an agent's space are infinite
    (`observation_space`: gymnasium/spaces/box.py).
    """
    is_bound = leaf.role == "other" and any(step.endswith("_space") for step in steps)
    counts = ((known.nans, "NaN"), (0 if is_bound else known.infs, "infinite"))
    return [(count, word) for count, word in counts if count]


def _squared_slot_warnings(known: Moments) -> Iterator[str]:
    if known.low < 0:
        yield f"negative mean of squared gradients ({known.low:.3g})"
    elif known.high == 0:
        yield "never updated: its weights received no gradient"
    elif known.high <= _VANISHED**2:
        yield f"vanishing gradients: at most {known.high**0.5:.1g}"
    elif known.high >= _EXPLODED**2:
        yield f"exploding gradients: up to {known.high**0.5:.1g}"


def _unit_warnings(path: Path, array: Values, known: Moments) -> Iterator[str]:
    if known.size > 1 and known.high == known.low == 0 and array.ndim > 1:
        yield "all zeros"
        return
    axis = _UNITS.get(str(path[-1].value if path else "").lstrip("_").rpartition(".")[2])
    if axis is None or array.ndim < 2 or not known.zeros:
        return
    dead = _count_dead(array, axis)
    if dead:
        takes = "is dead: all its input" if dead == 1 else "are dead: all their input"
        yield f"{dead:,} of {array.shape[axis]:,} units {takes} weights are zero"


def _count_dead(array: Values, axis: int) -> int:
    """Return the number of units, along the first or last axis, whose numbers are all zero."""
    alive, start = np.zeros(array.shape[axis], bool), 0
    inner = array.size // len(alive)
    for piece in iter_values(array):
        nonzero = piece != 0
        if axis:
            whole, lead = len(alive), min(-start % len(alive), piece.size)
            rows = nonzero[lead : piece.size - (piece.size - lead) % whole]
            rest = nonzero[lead + rows.size :]
            alive |= rows.reshape(-1, whole).any(axis=0)
            alive[whole - (-start % whole) :][:lead] |= nonzero[:lead]
            alive[: rest.size] |= rest
            if alive.all():
                return 0
        else:
            first, stop = start // inner, (start + piece.size - 1) // inner + 1
            rows = np.maximum(np.arange(first, stop) * inner - start, 0)
            alive[first:stop] |= np.logical_or.reduceat(nonzero, rows)
        start += piece.size
    return int(np.sum(~alive))
