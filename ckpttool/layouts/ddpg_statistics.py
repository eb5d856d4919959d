"""How DDPG of Stable-Baselines 2 treats observations before its networks: statistics, and limits always.

Sources in github.com/hill-a/stable-baselines: stable_baselines/ddpg/ddpg.py (`setup_model`: normalised where
`normalize_observations` says so, then limited to `observation_range`, which is done without statistics too);
stable_baselines/common/mpi_running_mean_std.py (mean = sum / count, the variance at least 0.01).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ckpttool.layouts import zoo
from ckpttool.layouts.canonical import Binding, Facts, Norm
from ckpttool.layouts.small_arrays import numbers, tensor
from ckpttool.leaf import Path, ValueLeaf, attr, index, key
from ckpttool.ledger import unknown
from ckpttool.tree import Tree

_RANGE = (attr("data"), key("observation_range"))
_SUMS = tuple(
    (attr("input"), attr("obs_rms"), attr(name)) for name in ("runningsum", "runningsumsq", "count")
)
_LEAST = 1e-2
LIMITED, COUNTED = "data/observation_range", "input/obs_rms"


def used(tree: Tree) -> frozenset[Path]:
    """Return the variables that the statistics are computed from."""
    return frozenset(path for path in _SUMS if path in tree)


def facts(known: Facts, tree: Tree, obs_dim: int) -> Facts:
    """Return the facts with what DDPG does to observations [obs_dim]; three small tensors may be read."""
    ends = [tree.get((*_RANGE, index(n))) for n in range(2)]
    low, high = (leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in ends)
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low != -high:
        return known.lacking(
            unknown("observation statistics", "the limits of observations (observation_range)")
        )
    told = tree.get((attr("data"), key("normalize_observations")))
    if not isinstance(told, ValueLeaf) or told.value is not True:
        if math.isinf(high):
            return known
        norm = Norm(tensor([0.0] * obs_dim), tensor([1.0] * obs_dim), clip=float(high))
        return known.read(LIMITED, norm=norm)
    sums, squares, count = (numbers(tree.get(path)) for path in _SUMS)
    if len(sums) != obs_dim or len(squares) != obs_dim or len(count) != 1 or not count[0] > 0:
        return known.lacking(
            unknown(
                "observation statistics",
                "the mean and std that DDPG normalised observations with",
                decides=True,
            )
        )
    mean = [each / count[0] for each in sums]
    var = [max(s / count[0] - m * m, _LEAST) for s, m in zip(squares, mean, strict=True)]
    return known.read(COUNTED, norm=Norm(tensor(mean), tensor(var), clip=float(high)))


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with what a file of the zoo says besides; DDPG's own limits stay."""
    limits = binding.facts.norm
    if limits is None or limits.clip is None or binding.facts.said.get("norm") != LIMITED:
        return zoo.told_by(binding, file, tree)
    said = {name: where for name, where in binding.facts.said.items() if name != "norm"}
    bare = replace(binding, facts=binding.facts._replace(norm=None, said=said))
    found = zoo.told_by(bare, file, tree)
    if found is bare:
        return binding
    norm = found.facts.norm
    if norm is None:
        kept = found.facts.read(LIMITED, norm=limits)
    else:
        clip = limits.clip if norm.clip is None else min(norm.clip, limits.clip)
        kept = found.facts._replace(norm=norm._replace(clip=clip))
    return replace(found, facts=kept)
