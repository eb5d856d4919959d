"""Observation statistics that a user states: a file, or their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckpttool.core import text as documents
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import Leaf, Tree, ValueLeaf
from ckpttool.evaluation.agent_facts import MAX_FLOAT32

# Names of statistics other than those of observations, in the files of Stable-Baselines3 and others.
_OTHERS = ("ret", "ret_rms", "return", "returns", "reward", "reward_rms", "rewards", "value", "critic")
# Names of the switch that VecNormalize and other programs store beside statistics.
_SWITCHES = ("norm_obs", "normalize_obs", "obs_normalization")
# gymnasium/wrappers/stateful_observation.py and stable_baselines3/common/vec_env/vec_normalize.py.
_EPSILON = 1e-8


def parse_statistics(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return observation statistics in sidecar form; raise UsageError for missing or invalid ones."""
    file = source if isinstance(source, str) else None
    statistics = _read_statistics_file(source) if isinstance(source, str) else _plain_statistics(source, None)
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


def _plain_statistics(record: Mapping[str, Any], file: str | None) -> dict[str, Any]:
    """Return statistics by their names here; raise UsageError for an entry that is none of them."""
    from ckpttool.libraries.schema import CLIP_NAMES, EPSILON_NAMES

    _require_known_settings({(name,): value for name, value in record.items() if name != "parts"}, (), file)
    spellings = {**dict.fromkeys(CLIP_NAMES, "clip"), **dict.fromkeys(EPSILON_NAMES, "epsilon")}
    return {spellings.get(name, name): value for name, value in record.items()}


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
    from ckpttool.libraries import schema
    from ckpttool.libraries.sb3 import read_default_clip

    if file.endswith(".json"):
        record = documents.load_json(file, "the statistics", "sidecar_bytes")
        return _plain_statistics(
            inner if isinstance(inner := record.get("obs_norm"), Mapping) else record, file
        )
    tree = open_checkpoint(file).tree
    named = {tuple(name.split("/")): leaf for name, leaf in tree.entries.items()}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for segments, leaf in named.items():
        what = schema.STATISTIC_NAMES.get(segments[-1].lstrip("_")) if segments else None
        if what is not None and isinstance(leaf, Leaf):
            groups.setdefault(segments[:-1], {}).setdefault(what, leaf)
    at, group = _choose_group(groups, tree, file)
    _require_known_settings(named, at, file)
    settings = {"epsilon": schema.EPSILON_NAMES, "clip": schema.CLIP_NAMES}
    numbers = {}
    for setting, spellings in settings.items():
        values = (_scalar_value(named, (*prefix, name)) for prefix in (at, ()) for name in spellings)
        numbers[setting] = next((value for value in values if value is not None), None)
    formula = schema.choose_formula([segments[-1] for segments in named if segments[:-1] == at])
    if numbers["clip"] is None:
        numbers["clip"] = read_default_clip(tree) or formula.clip
    epsilon = formula.epsilon if numbers["epsilon"] is None else numbers["epsilon"]
    if formula.outside and isinstance(epsilon, int | float):
        std = _as_array(group["std"]) if "std" in group else np.sqrt(_as_array(group["var"]))
        return {"mean": group["mean"], "var": (std + epsilon) ** 2, **numbers, "epsilon": 0.0}
    if numbers["epsilon"] is None and not formula.std:
        numbers["epsilon"] = formula.epsilon
    return {**group, **numbers}


def _choose_group(
    groups: Mapping[tuple[str, ...], dict[str, Any]], tree: Tree, file: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the location and the rows of the only statistics of observations; UsageError without them."""
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
                ["/".join(at) or "the top" for at in own_groups] or list(tree.names.values()) or ["nothing"],
                4,
            ),
        )
    return next(iter(own_groups.items()))


def _require_known_settings(
    named: Mapping[tuple[str, ...], Any], at: tuple[str, ...], file: str | None
) -> None:
    """Raise UsageError if a switch is off, or if an entry beside the statistics at `at` is not understood."""
    from ckpttool.libraries import schema

    understood = {*schema.STATISTIC_NAMES, *schema.EPSILON_NAMES, *schema.CLIP_NAMES, *schema.IDLE_NAMES}
    for segments, value in named.items():
        if segments[:1] and segments[0] in _SWITCHES:
            leaf = value if isinstance(value, Leaf | ValueLeaf) else ValueLeaf(value)
            if len(segments) > 1 or not schema.read_switch(leaf, default=True):
                what = "the file does not record that observations were normalised"
                raise UsageError(what, file=file, path=segments[0], expected="true")
        elif segments[:-1] == at and segments[-1].lstrip("_").lower() not in understood:
            raise UsageError(
                "the statistics have a setting that is not understood",
                file=file,
                path="/".join(segments),
                expected="mean and var (or std), optional epsilon and clip",
                hint="write mean, var, epsilon and clip as applied to FILE.json: --obs-norm FILE.json",
            )


def _scalar_value(named: Mapping[tuple[str, ...], Leaf | ValueLeaf], at: tuple[str, ...]) -> Any:
    """Return the value, also that of a tensor with one element; other tensors, and a list for a container."""
    leaf = named.get(at)
    if isinstance(leaf, Leaf):
        return leaf.array().reshape(-1)[0].item() if math.prod(leaf.shape) == 1 else leaf
    within = [path for path in named if path[: len(at)] == at]
    return leaf.value if leaf is not None else within or None
