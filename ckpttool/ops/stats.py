"""`stats`: what the numbers of every tensor and module are like, and what of it is no good sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool import limits, urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.globs import matcher, nothing
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path
from ckpttool.ops import moments
from ckpttool.ops.moments import Moments
from ckpttool.ops.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np

# Moments of squared gradients: torch's and Keras's names for those of Adam, AMSGrad and RMSprop.
_SQUARES = frozenset(("v", "vhat", "rms", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "accumulator"))
# Gradients of this size and above are those of a training that has come apart, of that size and below those
# of one that does not learn: sqrt(v) estimates a gradient.
_EXPLODED, _VANISHED = 1e6, 1e-12
# Which axis counts the units that a layer gives: Keras's kernels have it last, torch's weights first.
_UNITS = {"kernel": -1, "weight": 0}


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor's moments; `histogram` counts its finite numbers in equal parts from lowest to highest.

    `signs` are sentences about what is no good sign. A histogram is empty where all numbers are one.
    """

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
    """All tensors at and below a module together."""

    path: str
    tensors: int
    moments: Moments

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "tensors": self.tensors, **self.moments.document()}


@dataclass(frozen=True, slots=True)
class Stats:
    """The tensors with numbers, in the order of the file, and the modules above them.

    `left_out` names tensors without numbers (strings).
    """

    path: str
    format: str
    layout: str | None
    tensors: tuple[TensorStats, ...]
    modules: tuple[ModuleStats, ...]
    left_out: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """Say whether everything is a number: neither NaN nor infinite."""
        return not any(amiss(each.path.split("/"), each.leaf, each.moments) for each in self.tensors)

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
    path: str, glob: str | None = None, layout: str | None = None, progress: Progress = silent
) -> Stats:
    """Read every tensor whose path matches `glob`, one at a time, checksums verified.

    Raise what opening and reading raise, with the tensor's path, and UsageError for a `glob` that no path
    matches.
    """
    checkpoint = open_checkpoint(path)
    return stats_of(checkpoint, recognised(checkpoint, layout), glob, progress)


def stats_of(
    checkpoint: Checkpoint,
    binding: Binding | None,
    glob: str | None = None,
    progress: Progress = silent,
    seen: Callable[[Path, Leaf, np.ndarray], None] | None = None,
) -> Stats:
    """Return the stats of a checkpoint that is already listed, and of which the agent is known.

    `seen` is handed every array while it is in memory, for whoever wants to know more of it.
    """
    tree = checkpoint.tree
    keep = matcher(glob)
    chosen = [(at, leaf) for at, leaf in tree.tensors() if keep(tree.names[at])]
    if glob is not None and not chosen:
        raise nothing(glob, [tree.names[at] for at, _ in tree.tensors()], checkpoint.path)
    total, done = sum(leaf.nbytes for _, leaf in chosen), 0
    found, left_out = [], []
    for at, leaf in chosen:
        if leaf.dtype == "string":
            left_out.append(tree.names[at])
            continue
        try:
            array = leaf.array()
            found.append(tensor_stats(tree.names[at], at, leaf, array))
            if seen is not None:
                seen(at, leaf, array)
        except CkpttoolError as error:
            raise error.located(file=checkpoint.path, path=tree.names[at]) from error
        done += leaf.nbytes
        progress(done, total)
    return Stats(
        urls.spelled(checkpoint.path),
        checkpoint.format,
        None if binding is None else binding.layout,
        tuple(found),
        tuple(_modules(found)),
        tuple(left_out),
    )


def tensor_stats(name: str, path: Path, leaf: Leaf, array: np.ndarray) -> TensorStats:
    """Return the stats of one tensor of numbers that has been read."""
    known = moments.of(array)
    return TensorStats(
        name, leaf, known, moments.histogram(array, known), tuple(signs(path, leaf, known, array))
    )


def _modules(found: list[TensorStats]) -> Iterator[ModuleStats]:
    sums: dict[str, tuple[int, Moments]] = {"": (0, Moments())}
    for each in found:
        steps = each.path.split("/")
        if len(steps) > limits.current().path_depth:
            raise limits.exceeded("path_depth", "a tensor lies too deep", len(steps))
        for end in range(len(steps)):
            above = "/".join(steps[:end])
            count, known = sums.get(above, (0, Moments()))
            sums[above] = (count + 1, known + each.moments)
    return (ModuleStats(path, count, known) for path, (count, known) in sums.items())


def signs(path: Path, leaf: Leaf, known: Moments, array: np.ndarray | None = None) -> Iterator[str]:
    """Give a sentence for each thing that training would not leave behind if it went well.

    Units are looked at where the whole array is there.
    """
    for count, what in amiss([str(step.value) for step in path], leaf, known):
        yield f"{count:,} of {known.size:,} {'is' if count == 1 else 'are'} {what}"
    if not known.finite or leaf.dtype == "bool":
        return
    if leaf.role == "slot" and leaf.slot in _SQUARES:
        yield from _of_squares(known)
    elif leaf.role == "parameter" and array is not None:
        yield from _of_units(path, array, known)


def amiss(steps: Sequence[str], leaf: Leaf, known: Moments) -> list[tuple[int, str]]:
    """Return how many elements are "NaN", and how many "infinite" that should not be; nothing for none.

    `steps` are those of the tensor's path. The open sides of a space that an agent keeps are infinite
    (`observation_space`: gymnasium/spaces/box.py).
    """
    is_bound = leaf.role == "other" and any(step.endswith("_space") for step in steps)
    counts = ((known.nans, "NaN"), (0 if is_bound else known.infs, "infinite"))
    return [(count, word) for count, word in counts if count]


def _of_squares(known: Moments) -> Iterator[str]:
    if known.low < 0:
        yield f"a mean of squares is negative ({known.low:.3g})"
    elif known.high == 0:
        yield "never updated: its weights have had no gradient"
    elif known.high <= _VANISHED**2:
        yield f"vanished: gradients of {known.high**0.5:.1g} at most"
    elif known.high >= _EXPLODED**2:
        yield f"exploded: gradients of {known.high**0.5:.1g}"


def _of_units(path: Path, array: np.ndarray, known: Moments) -> Iterator[str]:
    import numpy as np

    if known.size > 1 and known.high == known.low == 0 and array.ndim > 1:
        yield "all zeros"
        return
    axis = _UNITS.get(str(path[-1].value if path else "").lstrip("_").rpartition(".")[2])
    if axis is None or array.ndim < 2 or not known.zeros:
        return
    others = tuple(at for at in range(array.ndim) if at != axis % array.ndim)
    dead = int(np.sum(~np.any(array != 0, axis=others)))
    if dead:
        takes = "takes nothing in: its" if dead == 1 else "take nothing in: their"
        yield f"{dead:,} of {array.shape[axis]:,} units {takes} weights are zero"
