"""The configuration that a `.d3` file holds: what d3rlpy is told to build around an agent's weights.

Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`LearnableConfigWithShape`, `LearnableConfig`),
d3rlpy/models/encoders.py (`VectorEncoderFactory`), d3rlpy/preprocessing, d3rlpy/optimizers/optimizers.py.
Fields that a factory makes must be there; the library fills in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.layouts.action_maps import action_bounds
from ckpttool.layouts.canonical import Binding, Norm, Part
from ckpttool.layouts.d3rlpy_settings import ACTIVATIONS
from ckpttool.layouts.limits import shapes
from ckpttool.layouts.normalizers import flat, spread
from ckpttool.layouts.writing import critics, gaussian
from ckpttool.leaf import Path, ValueLeaf, index, key
from ckpttool.tree import Container, Tree

VERSION = "2.8.1"  # of which the names and the configuration are
_NONE: Mapping[str, Any] = {"type": "none", "params": {}}
_ADAM: Mapping[str, Any] = {"type": "adam", "params": {"lr_scheduler_factory": _NONE}}
_NAMES = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def config(binding: Binding, agent: Tree) -> dict[str, Any]:
    """Return the configuration as JSON holds it.

    Raise UnsupportedError for networks that the library's encoders cannot be, UsageError when nobody says the
    action bounds.
    """
    parts = {part.title: part for part in binding.parts}
    sizes = shapes(parts["actor"], agent)
    params: dict[str, Any] = {
        "observation_scaler": _observations(binding.facts.norm),
        "action_scaler": _actions(agent),
        "reward_scaler": _NONE,
        **_networks(binding, agent, parts),
    }
    kind = "bc" if not critics(binding) else "sac" if gaussian(binding) else "td3"
    kind = "ddpg" if kind == "td3" and critics(binding) == 1 else kind
    return {
        "observation_shape": [sizes[0][0]],
        "action_size": sizes[-1][1],
        "config": {"type": kind, "params": params},
    }


def _networks(binding: Binding, agent: Tree, parts: Mapping[str, Part]) -> dict[str, Any]:
    actor = _encoder(parts["actor"], binding, agent)
    if not critics(binding):
        policy = "stochastic" if gaussian(binding) else "deterministic"
        return {"optim_factory": _ADAM, "encoder_factory": actor, "policy_type": policy}
    heads = [_encoder(part, binding, agent) for part in parts.values() if part.component == "critic"]
    if any(each != heads[0] for each in heads):
        raise UnsupportedError("d3rlpy has Q-functions of one size")
    optimizers = ("actor", "critic", *(("temp",) if gaussian(binding) else ()))
    return {
        **{f"{name}_optim_factory": _ADAM for name in optimizers},
        "actor_encoder_factory": actor,
        "critic_encoder_factory": heads[0],
        "q_func_factory": {"type": "mean", "params": {}},
        "n_critics": len(heads),
    }


def _encoder(part: Part, binding: Binding, agent: Tree) -> dict[str, Any]:
    widths = [shape[1] for shape in shapes(part, agent)[:-1]]
    names = list(binding.facts.activations or (binding.facts.hidden,))
    names = (names + names[-1:] * len(widths))[: len(widths)]
    first, last = names[0], names[-1]
    if any(name != first for name in names[:-1]) or not {first, last} <= _NAMES.keys():
        raise UnsupportedError("d3rlpy's encoders do not have these activations", found=", ".join(names))
    found: dict[str, Any] = {"hidden_units": widths, "activation": _NAMES[first]}
    if last != first:
        found["last_activation"] = _NAMES[last]
    return {"type": "vector", "params": found}


def _actions(agent: Tree) -> Mapping[str, Any]:
    bounds = action_bounds(agent)
    if bounds is None:
        raise UsageError(
            "unknown action bounds, which a file of d3rlpy holds",
            hint="--bounds LOW HIGH; --to d3rlpy_model needs none",
        )
    low, high = bounds
    if set(low) == {-1.0} and set(high) == {1.0}:
        return _NONE
    return {"type": "min_max", "params": {"minimum": low, "maximum": high}}


def _observations(norm: Norm | None) -> Mapping[str, Any]:
    if norm is None or norm.clip is not None:
        return _NONE
    numbers = {"mean": flat(norm.mean).tolist(), "std": spread(norm).tolist()}
    return {"type": "standard", "params": {**numbers, "eps": 0.0}}


def leaves(value: object, at: Path) -> Iterator[tuple[Path, ValueLeaf | Container]]:
    """Go through settings as entries of a tree: their containers and their plain values."""
    if isinstance(value, Mapping):
        yield at, Container("dict")
        for name, inner in value.items():
            yield from leaves(inner, (*at, key(name)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield at, Container("list")
        for number, inner in enumerate(value):
            yield from leaves(inner, (*at, index(number)))
    elif value is None or isinstance(value, str | int | float):
        yield at, ValueLeaf(value)
