"""The role of a tensor from its name and its neighbours: a weight, a buffer, a counter or other state."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.tree import Path, Role


class TensorRole(NamedTuple):
    """The role of a tensor; the fields are those of Leaf."""

    role: Role
    slot: str | None = None


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


def dotted_name(path: Path) -> str:
    """Return the dotted name of a path."""
    return ".".join(str(step.value) for step in path)


def role_by_last_name(path: Path, dtype: str, shape: tuple[int, ...]) -> TensorRole:
    """Return an array's role based on its name alone: weights, statistics (RunningMeanStd), or a counter."""
    last = path[-1].value if path else None
    if not dtype:
        return TensorRole("other")
    if last in _MOMENTS:
        return TensorRole("buffer")
    if not _BESIDE_STATISTICS.isdisjoint(step.value for step in path):
        return TensorRole("other")
    return TensorRole(role_by_name(path, dotted_name(path), dtype, shape))


# Buffer names of torch modules (torch/nn/modules/batchnorm.py).
_BUFFERS: dict[object, Role] = {
    "running_mean": "buffer",
    "running_var": "buffer",
    "num_batches_tracked": "counter",
}


def role_by_module_name(path: Path) -> Role | None:
    """Return the role of a standard buffer or counter name in torch modules; None for other names."""
    last = path[-1].value if path else None
    return _BUFFERS.get(last.rpartition(".")[2]) if isinstance(last, str) else None


def find_optimizers(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of optimizer state_dicts (torch/optim/optimizer.py): `state` and `param_groups`.

    Also handle those that torch.distributed.checkpoint.state_dict flattened into names like
    `state.l1.weight.exp_avg`.
    """
    groups: dict[Path, set[str]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            first = str(step.value).partition(".")[0]
            if step.kind == "key" and first in ("state", "param_groups"):
                groups.setdefault(path[:depth], set()).add(first)
    return frozenset(top for top, names in groups.items() if len(names) == 2)


def tensor_role(path: Path, known: Collection[Path]) -> TensorRole:
    """Return the role of the tensor at the path; `known` are the optimizer paths."""
    for depth in range(len(path)):
        if path[:depth] in known:
            return _optimizer_role(path[depth:])
    return TensorRole(role_by_module_name(path) or "parameter")


def _optimizer_role(path: Path) -> TensorRole:
    if str(path[0].value).partition(".")[0] != "state":
        return TensorRole("other")
    last = str(path[-1].value)
    name = last.rpartition(".")[2] if len(path) == 1 else last
    return TensorRole("counter") if name == "step" else TensorRole("slot", name)
