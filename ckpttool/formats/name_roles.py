"""The role of a tensor from its name alone: a weight, a buffer, a counter or other state."""

from __future__ import annotations

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.tree import Path, Role

_STATISTICS = frozenset(
    ("moving_mean", "moving_variance", "moving_mean_squared", "moving_stddev", "renorm_mean", "renorm_stddev")
)
_COUNTERS = frozenset(("_iterations", "iterations", "iter", "save_counter", "step_counter", "global_step"))
# Under these edges are metrics and the state of mixed-precision training.
_APART = frozenset(("keras_api", "loss_scale"))
_NO_NUMBERS = frozenset(("bool", "string", "variant"))
_INTEGERS = frozenset(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))


def role_by_name(
    path: Path, full_name: str, dtype: str, shape: tuple[int, ...], *, setting: bool = False
) -> Role:
    """Return the role of a variable that is not a slot.

    Args:
        path: its path in the tree.
        full_name: TensorFlow's name of the variable.
        dtype: its element type.
        shape: its shape: counters and settings are scalars.
        setting: an optimizer contains it directly.
    """
    steps = [str(step.value) for step in path]
    last = steps[-1] if steps else ""
    if last in _COUNTERS and dtype in _INTEGERS:
        return "counter"
    if setting:
        return "other"
    if "replay" in f"{full_name} {'/'.join(steps)}".lower():
        return "replay"
    if last in _STATISTICS:
        return "buffer"
    if dtype in _INTEGERS and not shape and "seed" not in full_name:
        return "counter"
    if dtype in _INTEGERS or dtype in _NO_NUMBERS or not _APART.isdisjoint(steps):
        return "other"
    return "parameter"


# stable_baselines/common/running_mean_std.py, RunningMeanStd; gymnasium's has the same names.
_MOMENTS = frozenset(("mean", "var"))
# Other state of VecNormalize (stable_baselines3/common/vec_env/vec_normalize.py).
_BESIDE_STATISTICS = frozenset(("observation_space", "action_space", "old_obs", "old_reward", "ret_rms"))


class PickledArrayRole(NamedTuple):
    """The role of a tensor; `of` and `slot` as in a Leaf."""

    role: Role
    of: Path | None = None
    slot: str | None = None


def dotted_name(path: Path) -> str:
    """Return the dotted name of a path."""
    return ".".join(str(step.value) for step in path)


def role_by_last_name(path: Path, dtype: str, shape: tuple[int, ...]) -> PickledArrayRole:
    """Return an array's role based on its name alone: weights, statistics (RunningMeanStd), or a counter."""
    last = path[-1].value if path else None
    if not dtype:
        return PickledArrayRole("other")
    if last in _MOMENTS:
        return PickledArrayRole("buffer")
    if not _BESIDE_STATISTICS.isdisjoint(step.value for step in path):
        return PickledArrayRole("other")
    return PickledArrayRole(role_by_name(path, dotted_name(path), dtype, shape))
