"""Observation statistics that a user states: a file, or their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckpttool.core import text as documents
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import Leaf, ValueLeaf
from ckpttool.evaluation.agent_facts import MAX_FLOAT32

_MEAN = ("mean", "running_mean")
_VAR = ("var", "running_var", "variance")
_STD = ("std", "running_std")
# Names of statistics other than those of observations, in the files of Stable-Baselines3 and others.
_OTHERS = ("ret", "ret_rms", "return", "returns", "reward", "reward_rms", "rewards", "value", "critic")
# gymnasium/wrappers/stateful_observation.py and stable_baselines3/common/vec_env/vec_normalize.py.
_EPSILON = 1e-8


def parse_statistics(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return observation statistics in sidecar form; raise UsageError for missing or invalid ones."""
    file = source if isinstance(source, str) else None
    statistics = _read_statistics_file(source) if isinstance(source, str) else dict(source)
    names = ("mean", "var", "std", "epsilon", "clip")
    mean, var, std, epsilon, clip = (_read_numbers(statistics, name, file) for name in names)
    if mean is None or (var is None and std is None):
        raise UsageError("observation statistics need mean and var (or std)", file=file)
    var = std**2 if var is None else var
    epsilon = _EPSILON if epsilon is None else float(epsilon)
    if mean.ndim != 1 or mean.shape != var.shape or not len(mean):
        raise UsageError(
            "mean and variance of the observations must be vectors of equal length",
            file=file,
            found=f"{list(mean.shape)} and {list(var.shape)}",
        )
    numbers = np.concatenate([mean, var, [epsilon]])
    if not (np.abs(numbers) <= MAX_FLOAT32).all() or (var < 0).any() or epsilon < 0:
        raise UsageError("observation statistics are not finite, or a variance is negative", file=file)
    if (var + epsilon == 0).any():
        raise UsageError("an observation variance and epsilon are both zero", file=file)
    if clip is not None and not 0 < float(clip) <= MAX_FLOAT32:
        raise UsageError("the clip limit of normalised observations must be a positive number", file=file)
    parts = {"parts": dict(statistics["parts"])} if statistics.get("parts") else {}
    limit = clip and float(clip)
    return {"mean": mean.tolist(), "var": var.tolist(), "epsilon": epsilon, "clip": limit, **parts}


def _read_numbers(statistics: Mapping[str, Any], name: str, file: str | None) -> Any:
    """Return an entry of statistics in float64, None without one; raise UsageError for anything else."""
    value = _as_array(statistics.get(name))
    try:
        numbers = None if value is None else np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UsageError("observation statistics must be numbers", file=file, path=name) from None
    if numbers is not None and numbers.ndim and name in ("epsilon", "clip"):
        raise UsageError(f"{name} of observation statistics must be one number", file=file, path=name)
    return numbers


def _as_array(value: Any) -> np.ndarray | Any:
    return value.array() if isinstance(value, Leaf) else value


def _join_parts(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a Dict observation's parts as one, with the size of each."""
    rows = {
        name: [_as_array(group.get(what)).reshape(-1) for what in ("mean", "var")]
        for name, group in groups.items()
    }
    mean, var = (np.concatenate(column) for column in zip(*rows.values(), strict=True))
    return {"mean": mean, "var": var, "parts": {name: row[0].size for name, row in rows.items()}}


def _read_statistics_file(file: str) -> dict[str, Any]:
    from ckpttool.formats.detect import open_checkpoint
    from ckpttool.libraries.sb3 import read_default_clip

    if file.endswith(".json"):
        record = documents.load_json(file, "the statistics", "sidecar_bytes")
        return dict(inner if isinstance(inner := record.get("obs_norm"), Mapping) else record)
    tree = open_checkpoint(file).tree
    named = {tuple(shown.split("/")): tree[path] for path, shown in tree.names.items()}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for segments, leaf in named.items():
        for what, names in (("mean", _MEAN), ("var", _VAR), ("std", _STD)):
            if segments[-1:] and segments[-1] in names and isinstance(leaf, Leaf):
                groups.setdefault(segments[:-1], {}).setdefault(what, leaf)
    whole = {at: g for at, g in groups.items() if "mean" in g and ("var" in g or "std" in g)}
    own_groups = {at: g for at, g in whole.items() if not at or at[-1] not in _OTHERS} or whole
    wrapped = any(str(container.name).endswith(".VecNormalize") for container in tree.containers.values())
    if (wrapped or len(own_groups) > 1) and {at[:-1] for at in own_groups} == {("obs_rms",)}:
        own_groups = {("obs_rms",): _join_parts({at[-1]: group for at, group in own_groups.items()})}
    if len(own_groups) != 1:
        raise UsageError(
            "the file contains no mean and var of observations"
            if not own_groups
            else "the file contains several sets of statistics",
            file=file,
            expected="entries `mean` and `var` (or `std`) side by side",
            found=abbreviate_list(
                ["/".join(at) or "the top" for at in own_groups]
                or ["/".join(s) for s in named]
                or ["nothing"],
                4,
            ),
        )
    ((at, group),) = own_groups.items()
    if _scalar_value(named, ("norm_obs",)) is False:
        raise UsageError("the file records that observations were not normalised", file=file, path="norm_obs")
    settings = {"epsilon": ["epsilon"], "clip": ["clip", "clip_obs"]}
    numbers = {}
    for setting, spellings in settings.items():
        values = (_scalar_value(named, (*prefix, name)) for prefix in (at, ()) for name in spellings)
        numbers[setting] = next((value for value in values if value is not None), None)
    if numbers["clip"] is None:
        numbers["clip"] = read_default_clip(tree)
    return {**group, **numbers}


def _scalar_value(named: Mapping[tuple[str, ...], Leaf | ValueLeaf], at: tuple[str, ...]) -> Any:
    """Return the value, also that of a tensor with one element; other tensors, and a list for a container."""
    leaf = named.get(at)
    if isinstance(leaf, Leaf):
        return leaf.array().reshape(-1)[0].item() if math.prod(leaf.shape) == 1 else leaf
    within = [path for path in named if path[: len(at)] == at]
    return leaf.value if leaf is not None else within or None
