"""Plots of evaluations in files: the returns of one checkpoint, the learning curve of several."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool import search_paths
from ckpttool.errors import CkpttoolError, MissingExtraError, UsageError
from ckpttool.ops.training_step import ANY_UNIT
from ckpttool.writing import Output, require_new, write_atomically

if TYPE_CHECKING:
    from ckpttool.ops.algorithms import Algorithm, Comparison
    from ckpttool.ops.evaluation import Evaluation
    from ckpttool.ops.ranking import Point
    from ckpttool.ops.training_curve import TrainingCurve

HINT = "pip install 'ckpttool[eval]'"
# What would say when and by whom: without it the same numbers give the same file.
_SILENT: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
# Its type in matplotlib is a list of all names of one version.
_STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Names come from files: a dollar sign is a dollar sign.
    "text.parse_math": False,
    "svg.hashsalt": "ckpttool",
    "svg.fonttype": "none",
    "path.simplify": True,
}
_WIDTH, _HEIGHT, _BELOW = 8.0, 4.0, 2.6  # inches
_DPI = 120
_RC = "MATPLOTLIBRC"


def require(target: str) -> None:
    """Raise unless a plot can be written to `target`: a known suffix, a new file, matplotlib installed."""
    if _suffix(target) not in _SILENT:
        raise UsageError(
            "the plot's name does not say what to write",
            file=target,
            hint=f"a plot ends in {', '.join(_SILENT)}",
        )
    require_new(target, hint="take another name")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a plot needs matplotlib, which is not installed", hint=HINT)


class Drawn(NamedTuple):
    """What a plot shows: evaluations, their curve, curves that training logged, algorithms compared."""

    found: Sequence[Evaluation]
    curve: Sequence[Point] = ()
    training: Sequence[TrainingCurve] = ()
    algorithms: Sequence[Algorithm] = ()
    comparison: Comparison | None = None
    unit: str = ANY_UNIT


def write(
    target: str,
    found: Sequence[Evaluation],
    curve: Sequence[Point] = (),
    training: Sequence[TrainingCurve] = (),
    algorithms: Sequence[Algorithm] = (),
    comparison: Comparison | None = None,
    unit: str = ANY_UNIT,
) -> None:
    """Draw evaluations into a new file, and below them the curves that were logged while training.

    One checkpoint shows how its returns and lengths are distributed; several their means over training
    steps, or beside each other where no steps are known; training runs the mean and the interquartile mean
    of each algorithm with intervals over its runs. The same values give the same bytes. Raise CkpttoolError
    for a return that is not finite.
    """
    for one in found:
        if not np.isfinite(one.rollout.returns).all():
            raise CkpttoolError("a return that is not finite cannot be drawn", file=one.checkpoint)
    mpl = _matplotlib()
    from matplotlib.figure import Figure

    from ckpttool.cli import plot_panels as panels

    # No pyplot: it would look for a display and keep every figure.
    with mpl.rc_context(), warnings.catch_warnings():
        # No style but ours: neither ./matplotlibrc nor the user's own file changes a plot.
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # Of a character that the typeface does not have.
        warnings.filterwarnings("ignore", message="Glyph")
        rows = 2 if training else 1
        figure = Figure((_WIDTH, _HEIGHT + (_BELOW if training else 0)), dpi=_DPI, layout="constrained")
        grid = figure.add_gridspec(rows, 4, height_ratios=[_HEIGHT, _BELOW][:rows])
        if len(algorithms) > 1 or any(len(each.runs) > 1 for each in algorithms):
            above = None
            panels.algorithms(figure, grid[0, :], algorithms, comparison, unit)
        elif len(found) == 1:
            panels.returns(figure.add_subplot(grid[0, :3]), found[0])
            panels.lengths(figure.add_subplot(grid[0, 3]), found[0])
            above = None
        elif curve:
            above = panels.learning(figure.add_subplot(grid[0, :]), found, curve, unit)
        else:
            above = None
            panels.beside(figure.add_subplot(grid[0, :]), found)
        if training:
            shared = above if curve and panels.alike(curve, training) else None
            panels.logged(figure.add_subplot(grid[1, :], sharex=shared), training)
        suffix = _suffix(target)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], metadata=_SILENT[suffix])

    def put(stream: IO[bytes]) -> None:
        stream.write(drawn.getbuffer())

    write_atomically((Output(target, put),))


def _matplotlib() -> Any:
    """Import matplotlib without the settings in ./matplotlibrc or in the user's own file."""
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    spec = importlib.util.find_spec("matplotlib")
    package = os.path.dirname(str(spec.origin if spec is not None else None))
    chosen = os.environ.get(_RC)
    try:
        os.environ[_RC] = os.path.join(package, "mpl-data", "matplotlibrc")
        with search_paths.elsewhere(package):
            return importlib.import_module("matplotlib")
    finally:
        os.environ.pop(_RC)
        if chosen is not None:
            os.environ[_RC] = chosen


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()
