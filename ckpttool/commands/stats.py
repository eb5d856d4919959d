"""Compute statistics and differences of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpttool.core import limits, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import keep_open
from ckpttool.core.text import compile_glob, describe_record, no_match_error, render_record
from ckpttool.core.tree import Leaf, Path
from ckpttool.formats.detect import open_checkpoint
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.listing import processes
from ckpttool.verification.array_differences import Values, iter_values
from ckpttool.verification.moments import Moments, compute_moments, histogram

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
            count_nonfinite(tensor.path.split("/"), tensor.leaf, tensor.moments) for tensor in self.tensors
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "finite": self.finite,
            "tensors": [tensor.document() for tensor in self.tensors],
            "modules": [module.document() for module in self.modules],
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


@keep_open()
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
    rows, left_out = [], []
    if processes.is_spread(jobs, ray):
        left_out = [tree.names[at] for at, leaf in chosen if leaf.dtype == "string"]
        chosen = [(at, leaf) for at, leaf in chosen if leaf.dtype != "string"]
        entries = [
            ((tree.names[at], at, leaf, histograms), tree.names[at], leaf.nbytes) for at, leaf in chosen
        ]
        rows = list(processes.map_entries(_entry_stats, entries, (checkpoint,), progress, jobs=jobs, ray=ray))
        chosen = []
    for at, leaf in chosen:
        if leaf.dtype == "string":
            left_out.append(tree.names[at])
            continue
        try:
            values = leaf.values()
            rows.append(tensor_stats(tree.names[at], at, leaf, values, counted=histograms))
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
        tuple(rows),
        tuple(_modules(rows)) if histograms else (),
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


def _modules(tensors: list[TensorStats]) -> Iterator[ModuleStats]:
    sums: dict[str, tuple[int, Moments]] = {"": (0, Moments())}
    for tensor in tensors:
        steps = tensor.path.split("/")
        if len(steps) > limits.current().deepest_path:
            raise limits.limit_error("path_depth", "a tensor path has too many levels", len(steps))
        for end in range(len(steps)):
            above = "/".join(steps[:end])
            count, known = sums.get(above, (0, Moments()))
            sums[above] = (count + 1, known + tensor.moments)
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
