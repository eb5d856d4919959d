"""Statistics of observations that a checkpoint holds beside or inside its networks, under any usual name.

Layouts read the statistics of their own libraries. This finds those of programs of one's own:
`{actor, critic, obs_rms: {mean, var, count}}`, the state_dict of a normaliser, `obs_mean` and `obs_std`. The
names of the buffers show the class, and with it the formula:

rsl_rl/modules/normalization.py, EmpiricalNormalization: (x - _mean) / (_std + 1e-2)
skrl/resources/preprocessors/torch/running_standard_scaler.py: (x - mean) / (sqrt(var) + 1e-8), limited to 5
rl_games/algos_torch/running_mean_std.py: (x - mean) / sqrt(var + 1e-5), limited to 5 (without norm_only)
gymnasium/wrappers/stateful_observation.py, NormalizeObservation: (x - mean) / sqrt(var + 1e-8)
keras/src/layers/preprocessing/normalization.py, Normalization: (x - mean) / max(sqrt(variance), 1e-7)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.layouts import small_arrays
from ckpttool.layouts.canonical import NORMALIZER, Binding, Norm
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr
from ckpttool.ledger import unknown
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Reshape
from ckpttool.tree import Tree

DICT_UNKNOWN = unknown(
    "observation statistics", "how the parts of a Dict observation are normalised", decides=True
)
"""What an agent lacks whose file holds statistics of several parts of an observation."""

_STATISTIC = {
    "mean": "mean",
    "running_mean": "mean",
    "var": "var",
    "variance": "var",
    "running_var": "var",
    "running_variance": "var",
    "std": "std",
    "running_std": "std",
}
_COUNT = frozenset(("count", "current_count", "n", "num", "num_samples"))
_EPSILON, _CLIP = ("epsilon", "eps"), ("clip", "clip_obs", "clip_max", "clip_range", "clip_threshold")
# The limit that a wrapper's object has beside the statistics (VecNormalize: obs_rms, clip_obs, epsilon).
_CLIP_OF_OBSERVATIONS = ("clip_obs", "obs_clip", "clip_observation", "clip_observations", "observation_clip")
_PAIR = re.compile(rf"(\w+?)_({'|'.join(sorted(_STATISTIC, key=len, reverse=True))})")
_OBSERVED = re.compile(
    r"(^|_)(obs|observations?|states?|inputs?|rms|norm|normali[sz](er|ation|e)|running|scaler|filter|stats?"
    r"|statistics|preprocessor|whiten\w*)(_|$)"
)
_OTHER = re.compile(
    r"(^|_)(ret|returns?|rews?|rewards?|adv|advantages?|values?|critics?|vf?|qf?|images?|grads?|acts?|actions?"
    r"|priv\w*|next|targets?)(_|$)"
)
# Siblings that show a batch norm, which is a layer of the network.
_LAYER = frozenset(("weight", "bias", "gamma", "beta", "scale", "offset", "kernel", "num_batches_tracked"))
_MOST = 1 << 16


class _Formula(NamedTuple):
    """How a class that has buffers of these names normalises."""

    whose: str
    epsilon: float
    outside: bool = False
    clip: float | None = None
    std: bool = False


_EMPIRICAL = _Formula("rsl_rl's EmpiricalNormalization", 1e-2, outside=True, std=True)
_SCALER = _Formula("skrl's RunningStandardScaler", 1e-8, outside=True, clip=5.0)
_RL_GAMES = _Formula("rl_games' RunningMeanStd", 1e-5, clip=5.0)
_WRAPPER = _Formula("Gymnasium's NormalizeObservation", 1e-8)
# The root of var + 1e-14 is Keras's maximum wherever the variance is not about 1e-14 itself.
_KERAS = _Formula("Keras's Normalization", 1e-14)
_PLAIN = _Formula("(x - mean) / std", 0.0, std=True)


@dataclass
class _Group:
    """Mean, variance and deviation that stand together, by what they are; numbers as stored."""

    where: str
    rows: dict[str, Leaf] = field(default_factory=dict)
    paths: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    rest: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of values; 0 for a group that is no statistics."""
        rows = [self.rows.get(name) for name in ("mean", "var", "std")]
        sizes = {row.size for row in rows if row is not None}
        whole = rows[0] is not None and (rows[1] is not None or rows[2] is not None)
        return sizes.pop() if whole and len(sizes) == 1 else 0

    @property
    def formula(self) -> _Formula:
        if {"_mean", "_std"} <= self.names:
            return _EMPIRICAL
        if "running_variance" in self.names:
            return _SCALER
        if {"running_mean", "running_var"} <= self.names:
            return _RL_GAMES
        if "variance" in self.names:
            return _KERAS
        return _PLAIN if "var" not in self.rows else _WRAPPER

    def number(self, names: Sequence[str]) -> float | None:
        """Return a setting that stands beside the statistics."""
        return next((self.numbers[name] for name in names if name in self.numbers), None)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of observations: the numbers with their formula, and where they stand.

    `assumed` names what of the formula no file holds, None if the file holds all of it. `moves` bring the
    tensors to the canonical agent, `consumed` are entries that carry no more.
    """

    where: str
    size: int
    norm: Norm
    assumed: str | None
    moves: tuple[Move, ...]
    consumed: frozenset[Path]

    @property
    def paths(self) -> frozenset[Path]:
        """All entries that the statistics consist of."""
        return self.consumed | {move.source for move in self.moves}


def found(tree: Tree, taken: Collection[Path] = ()) -> tuple[Statistics, ...]:
    """Return all statistics of observations in the tree, outside of the entries `taken`."""
    return tuple(_statistics(group) for group in _groups(tree, taken) if group.size)


def applied(binding: Binding, tree: Tree, size: int) -> Binding:
    """Return the binding with the statistics of observations that its layout does not read.

    `size` is the number of the policy's observations. Nothing is applied where the layout knows statistics
    already, or where several differ.
    """
    if _knows(binding):
        return binding
    # A layout may carry a normaliser's tensors under names that it does not know.
    taken = {move.source for move in binding.moves.moves if move.target[0] != attr(NORMALIZER)}
    taken |= binding.consumed
    every = found(tree, taken)
    fitting = [each for each in every if each.size == size]
    if len(fitting) == 1:
        return with_statistics(binding, fitting[0])
    parts = [each for each in every if each.size < size]
    if not fitting and len(parts) > 1 and sum(each.size for each in parts) == size:
        return replace(binding, facts=binding.facts.lacking(DICT_UNKNOWN))
    return binding


def with_statistics(binding: Binding, chosen: Statistics) -> Binding:
    """Return the binding of an agent that normalises its observations with these statistics."""
    facts = binding.facts.without_lack("observation statistics").read(chosen.where, norm=chosen.norm)
    kept = (move for move in binding.moves.moves if move.source not in chosen.paths)
    assumed = (*binding.moves.assumed, *([] if chosen.assumed is None else [chosen.assumed]))
    moves = replace(binding.moves, moves=(*kept, *chosen.moves), assumed=assumed)
    return replace(binding, facts=facts, moves=moves, consumed=binding.consumed | chosen.consumed)


def _knows(binding: Binding) -> bool:
    mean = (attr(NORMALIZER), attr("mean"))
    moved = any(move.target == mean for move in binding.moves.moves)
    return moved or binding.facts.norm is not None or "norm" in binding.facts.said


def _groups(tree: Tree, taken: Collection[Path]) -> list[_Group]:
    """Return what stands together: below one name, or with one prefix (`obs_mean`, `obs_std`)."""
    groups: dict[tuple[str, ...], _Group] = {}
    layers: set[tuple[str, ...]] = set()
    for segments, leaf, paths in rows(tree, taken):
        last = segments[-1].removesuffix(":0").lower()
        if last in _LAYER:
            layers.add(segments[:-1])
        at, name = _placed(segments[:-1], last)
        if not _is_observed(at):
            continue
        group = groups.setdefault(at, _Group("/".join(at if at == segments[:-1] else segments)))
        what = _STATISTIC.get(name.lstrip("_"))
        if isinstance(leaf, Leaf) and what is not None and leaf.size == max(leaf.shape, default=0) > 0:
            group.rows.setdefault(what, leaf)
            group.paths.setdefault(what, paths)
            group.names.add(name)
        elif name.lstrip("_") in _COUNT:
            group.names.add(name)
            group.rest += paths
            if isinstance(leaf, Leaf) and leaf.size == 1:
                group.rows.setdefault("count", leaf)
                group.paths.setdefault("count", paths)
        elif (number := _number(leaf)) is not None:
            group.numbers[name.lstrip("_")] = number
            group.rest += paths
    for at, group in groups.items():
        _add_wrapper_settings(group, at[:-1], tree, taken)
    return [group for at, group in groups.items() if at not in layers]


def _add_wrapper_settings(group: _Group, above: tuple[str, ...], tree: Tree, taken: Collection[Path]) -> None:
    """Give a group the limit, and from a normaliser's object the epsilon, that stand one level higher."""
    normalises = bool(above) and _OBSERVED.search(above[-1].lower()) is not None
    for path, leaf in tree.items():
        segments = tuple(tree.names.get(path, "").split("/"))
        name, number = segments[-1].lower().lstrip("_"), _number(leaf)
        if number is None or segments[:-1] != above or path in taken:
            continue
        if name in _CLIP_OF_OBSERVATIONS:
            group.numbers.setdefault("clip", number)
        elif normalises and name in _EPSILON:
            group.numbers.setdefault("epsilon", number)
        else:
            continue
        group.rest += (path,)


def rows(
    tree: Tree, taken: Collection[Path]
) -> list[tuple[tuple[str, ...], Leaf | ValueLeaf, tuple[Path, ...]]]:
    """Return tensors and values with their names' segments; a list of numbers as one row."""
    listed: dict[Path, list[tuple[Path, float]]] = {}
    rows: list[tuple[tuple[str, ...], Leaf | ValueLeaf, tuple[Path, ...]]] = []
    for path, leaf in tree.items():
        if path in taken or not path or (isinstance(leaf, Leaf) and leaf.role == "slot"):
            continue
        if isinstance(leaf, ValueLeaf) and path[-1].kind == "index" and isinstance(leaf.value, int | float):
            listed.setdefault(path[:-1], []).append((path, float(leaf.value)))
        elif isinstance(leaf, ValueLeaf) or not leaf.dtype.startswith(("string", "complex")):
            rows.append((tuple(tree.names[path].split("/")), leaf, (path,)))
    for items in listed.values():
        if 1 < len(items) <= _MOST:
            name = tuple(tree.names[items[0][0]].split("/")[:-1])
            row = small_arrays.tensor([value for _, value in items], "/".join(name))
            rows.append((name, row, tuple(path for path, _ in items)))
    return [row for row in rows if row[0]]


def _placed(above: tuple[str, ...], last: str) -> tuple[tuple[str, ...], str]:
    """Return the group of a tensor and its name there: `obs_mean` is `mean` of the group `obs`."""
    if last.lstrip("_") in _STATISTIC:
        return above, last
    pair = _PAIR.fullmatch(last)
    if pair is None or pair[1] in ("running",):
        return above, last
    return (*above, pair[1]), pair[2]


def _is_observed(at: tuple[str, ...]) -> bool:
    """Return whether a group's name is that of observations, and not of rewards, values or images."""
    near = [segment.lower() for segment in at[-3:] if not segment.isdigit()]
    # `v` of an observation's statistics is a velocity.
    letters = ("v", "q") if any(re.search(r"(^|_)(ob|obs|observations?)(_|$)", each) for each in near) else ()
    others = (each for each in near if each not in ("actor_critic", "ac", *letters))
    return any(_OBSERVED.search(each) for each in near[-2:]) and not any(map(_OTHER.search, others))


def _number(leaf: Leaf | ValueLeaf) -> float | None:
    if isinstance(leaf, Leaf):
        return float(leaf.array().reshape(-1)[0]) if leaf.size == 1 and "float" in leaf.dtype else None
    value = leaf.value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _statistics(group: _Group) -> Statistics:
    import numpy as np

    formula, size = group.formula, group.size
    epsilon, clip = group.number(_EPSILON), group.number(_CLIP)
    by_std = formula.std and "std" in group.rows
    used = ("mean", "std" if by_std or "var" not in group.rows else "var")
    epsilon_used = formula.epsilon if epsilon is None else epsilon
    if formula is _PLAIN and epsilon is None and not np.all(group.rows["std"].array() != 0):
        epsilon_used = 1e-8
    norm = Norm(
        group.rows["mean"],
        group.rows.get("var") if used[1] == "var" else None,
        group.rows["std"] if used[1] == "std" else None,
        epsilon=epsilon_used,
        clip=formula.clip if clip is None else clip,
        outside=formula.outside or used[1] == "std",
    )
    named = dict(group.rows)
    moves, consumed = [], set(group.rest)
    for name in ("mean", "var", "std", "count"):
        paths = group.paths.get(name, ())
        if len(paths) != 1:
            consumed |= set(paths)
            continue
        shape = () if name == "count" else (size,)
        rule = KEEP if named[name].shape == shape else Reshape(shape)
        moves.append(Move(paths[0], (attr(NORMALIZER), attr(name)), rule))
        consumed.discard(paths[0])
    assumed = None if epsilon is not None and clip is not None else _assumption(group, norm, formula)
    norm = norm._replace(assumed=assumed is not None)
    return Statistics(group.where, size, norm, assumed, tuple(moves), frozenset(consumed))


def _assumption(group: _Group, norm: Norm, formula: _Formula) -> str:
    place = "added to the deviation" if norm.outside else "inside the root"
    limit = "no limit" if norm.clip is None else f"limited to {norm.clip:g}"
    how = f"epsilon {norm.epsilon:g} {place}, {limit}"
    return f"observations are normalised with {group.where} by the formula {_of(formula)}: {how}"


def _of(formula: _Formula) -> str:
    return formula.whose if formula is _PLAIN else f"of {formula.whose}"
