"""The batch renormalisation of CrossQ's policy: which norm stands before which layer.

Sources in github.com/Stable-Baselines-Team/stable-baselines3-contrib: sb3_contrib/crossq/policies.py (one
before every linear layer, `mu` included; `batch_norm_eps` is 0.001 unless `policy_kwargs` says otherwise) and
sb3_contrib/common/torch_layers.py (BatchRenorm: a policy that acts takes the running statistics).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpttool.layouts import baselines_settings, fronts
from ckpttool.layouts.fronts import BatchNorm
from ckpttool.leaf import Path, attr, key
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Tree

_POLICY = key("policy")
_TENSORS = {"ra_mean": "mean", "ra_var": "var", "scale": "scale", "bias": "offset"}
_COUNT = "steps"
_EPSILON = 1e-3


class Norms(NamedTuple):
    """The norms of a policy, their moves, the names of all their tensors, and what was assumed."""

    norms: tuple[BatchNorm, ...] = ()
    moves: tuple[Move, ...] = ()
    names: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()


def found(tree: Tree, component: str) -> Norms:
    """Return what the policy's batch renormalisation is, nothing if it has none or one of another form."""
    modules = _modules(tree, component)
    norms = [name for name, group in modules.items() if "ra_mean" in group]
    layers = [name for name in modules if name not in norms]
    if not norms or any(set(modules[name]) != {*_TENSORS, _COUNT} for name in norms):
        return Norms()
    order = list(modules)
    # Each is followed by the layer that it stands before.
    before = [order[order.index(name) + 1 : order.index(name) + 2] for name in norms]
    if before != [[name] for name in layers[: len(norms)]]:
        return Norms()
    told = baselines_settings.setting(tree, "policy_kwargs", "batch_norm_eps", None)
    epsilon = told if isinstance(told, float) else _EPSILON
    said = f"batch renormalisation with epsilon {epsilon:g}: habit of layout stable_baselines3"
    return Norms(
        tuple(BatchNorm(number, epsilon) for number in range(len(norms))),
        tuple(
            Move(modules[name][theirs], (*fronts.norm(component, number), attr(ours)), KEEP)
            for number, name in enumerate(norms)
            for theirs, ours in _TENSORS.items()
        ),
        frozenset(tree.names[path] for name in norms for path in modules[name].values()),
        () if isinstance(told, float) else (said,),
    )


def _modules(tree: Tree, component: str) -> dict[str, dict[str, Path]]:
    """Return the modules of a policy's chain in the order of the file, with their tensors."""
    pattern = re.compile(rf"{component}\.(latent_pi\.\d+|mu(?:\.0)?)\.(\w+)")
    found: dict[str, dict[str, Path]] = {}
    for path in tree:
        if len(path) == 2 and path[0] == _POLICY and (name := pattern.fullmatch(str(path[1].value))):
            found.setdefault(name[1], {})[name[2]] = path
    return found
