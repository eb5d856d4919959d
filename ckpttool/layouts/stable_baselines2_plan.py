"""Where a canonical agent goes in a file of Stable-Baselines 2, and what the library is told to build.

Sources in github.com/hill-a/stable-baselines: stable_baselines/td3/policies.py, sac/policies.py,
ddpg/policies.py (scopes, and one list of sizes for all networks), sac/sac.py (`log_ent_coef` is a variable
only with `ent_coef` "auto"), common/base_class.py (`load`: what else an algorithm is has its default).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import canonical, writing
from ckpttool.layouts.action_maps import told_bounds
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.limits import shapes
from ckpttool.layouts.small_arrays import numbers
from ckpttool.layouts.writing import Lone, Names, Network, Writing
from ckpttool.layouts.writing_graph import KERAS, edge, place, unshared
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToValue
from ckpttool.source import Inline
from ckpttool.tree import Tree

_WHOSE = "Stable-Baselines 2"
_DATA = attr("data")
_ALPHA, _LOG_ALPHA = ((attr(canonical.TEMPERATURE), attr(name)) for name in ("alpha", "log_alpha"))
# tensorflow/contrib/layers/python/layers/layers.py, layer_norm.
_EPSILON = 1e-12
_NORM = "LayerNorm_{i}"
# What `policy_kwargs` calls an activation; the library's own is ReLU.
_ACTIVATIONS = {
    "tanh": "tensorflow.python.ops.math_ops.tanh",
    "sigmoid": "tensorflow.python.ops.math_ops.sigmoid",
    "elu": "tensorflow.python.ops.gen_nn_ops.elu",
}


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes: what `TD3.load`, `SAC.load` or `DDPG.load` takes, by the agent's kind.

    Raise UnsupportedError for networks or an action map that the library's policies cannot be, UsageError
    when nobody says the action bounds.
    """
    kind = "sac" if writing.gaussian(binding) else "td3" if writing.critics(binding) > 1 else "ddpg"
    made = unshared(writing.written(_writing(kind, agent), binding, agent, told), agent)
    parts = [part for part in binding.parts if part.component in canonical.RUN]
    alone = kind == "sac" and _ALPHA in agent and _LOG_ALPHA not in agent
    moves = (*made.moves, *([Move(_ALPHA, (_DATA, key("ent_coef")), ToValue())] if alone else ()))
    notes = ["the settings of training (gamma, tau, noise, ...) are the library's defaults"]
    if any(path[0].value in canonical.OPTIMIZERS for path in agent):
        notes.append("optimizers are not saved by Stable-Baselines 2")
    added = {**made.added, **_data(kind, binding, agent, parts)}
    return replace(made, moves=moves, added=added, containers={}, notes=(*made.notes, *notes))


def _writing(kind: str, agent: Tree) -> Writing:
    rows: list[Network | Lone] = [*{"sac": _sac, "td3": _td3, "ddpg": _ddpg}[kind]()]
    if kind == "sac" and not (_ALPHA in agent and _LOG_ALPHA not in agent):
        rows.append(_log_ent_coef())
    # DDPG's critic takes the action later, which is looked at here.
    return Writing(
        _WHOSE,
        rows,
        "affine",
        hidden="",
        needs=("actor", "critic"),
        values=kind != "ddpg",
        kinds=KERAS,
        path=_variable,
    )


def _variable(entry: Path, layer: str, weight: str) -> Path:
    return edge(entry, layer.replace("LayerNorm_0", "LayerNorm"), weight)


def _log_ent_coef() -> Lone:
    default = Leaf("float32", (), Inline(struct.pack("<f", 0.0)), "", "parameter")
    return Lone("temperature/log_alpha", place("model/log_ent_coef"), (), default)


def _td3() -> Iterator[Network]:
    for top, end in (("model", ""), ("target", "_target")):
        yield Network(f"actor{end}", place(f"{top}/pi"), Names("fc{i}", "dense", norm=_NORM))
        for head, scope in (("q1", "qf1"), ("q2", "qf2")):
            names = Names("fc{i}", scope, norm=_NORM)
            yield Network(f"critic{end}/{head}", place(f"{top}/values_fn/{scope}"), names)


def _sac() -> Iterator[Network]:
    yield Network("actor", place("model/pi"), Names("fc{i}", "dense", {"log_std": "dense_1"}, _NORM))
    for ours, top, scope in (
        ("value", "model", "vf"),
        ("critic/q1", "model", "qf1"),
        ("critic/q2", "model", "qf2"),
        ("value_target", "target", "vf"),
    ):
        yield Network(ours, place(f"{top}/values_fn/{scope}"), Names("fc{i}", scope, norm=_NORM))


def _ddpg() -> Iterator[Network]:
    for top, end in (("model", ""), ("target", "_target")):
        yield Network(f"actor{end}", place(f"{top}/pi"), Names("fc{i}", "pi", norm=_NORM))
        yield Network(f"critic{end}/q1", place(f"{top}/qf"), Names("fc{i}", "qf_output", norm=_NORM))


def _data(kind: str, binding: Binding, agent: Tree, parts: Sequence[Part]) -> dict[Path, Leaf | ValueLeaf]:
    """Return the settings that the library must be told: spaces, sizes, activation, class of the policy."""
    policy = next(part for part in parts if part.acts)
    kernels = {part.title: shapes(part, agent) for part in parts}
    obs_dim, act_dim = kernels[policy.title][0][0], kernels[policy.title][-1][1]
    sizes = _sizes(kernels)
    _require_joined(kind, kernels, obs_dim, act_dim)
    normed = _normed(binding, parts)
    low, high = told_bounds(binding.facts, agent, f"a file of {_WHOSE}")
    infinite = [math.inf] * obs_dim
    name = f"stable_baselines.{kind}.policies.{'Ln' if normed else ''}MlpPolicy"
    values: dict[str, Leaf | ValueLeaf] = {
        "policy": ValueLeaf(Record(name)),
        "observation_space/low": _array([-each for each in infinite]),
        "observation_space/high": _array(infinite),
        "action_space/low": _array(low),
        "action_space/high": _array(high),
        "n_envs": ValueLeaf(1),
        "_vectorize_action": ValueLeaf(False),
    }
    if kind == "sac" and not (_ALPHA in agent and _LOG_ALPHA not in agent):
        values["ent_coef"] = ValueLeaf("auto")
    if kind == "ddpg":
        limit = _limit(binding)
        values |= {"observation_range/0": ValueLeaf(-limit), "observation_range/1": ValueLeaf(limit)}
    values |= {f"policy_kwargs/layers/{n}": ValueLeaf(size) for n, size in enumerate(sizes)}
    activation = _activation(binding)
    if activation != "relu":
        values["policy_kwargs/act_fun"] = ValueLeaf(Record(_ACTIVATIONS[activation]))
    return {_setting(name): leaf for name, leaf in values.items()}


def _setting(name: str) -> Path:
    first, *rest = name.split("/")
    inner = attr if first.endswith("_space") else key
    return (_DATA, key(first), *(index(int(step)) if step.isdigit() else inner(step) for step in rest))


def _sizes(kernels: dict[str, list[tuple[int, ...]]]) -> list[int]:
    """Return the widths of the hidden layers, which all networks of the library have in common."""
    found = {title: tuple(shape[1] for shape in each[:-1]) for title, each in kernels.items()}
    if len(set(found.values())) != 1 or not next(iter(found.values())):
        shown = ", ".join(f"{title} {list(sizes)}" for title, sizes in found.items())
        raise UnsupportedError(f"{_WHOSE} has hidden layers of the same sizes in all networks", found=shown)
    return list(next(iter(found.values())))


def _require_joined(kind: str, kernels: dict[str, list[tuple[int, ...]]], obs_dim: int, act_dim: int) -> None:
    """Raise UnsupportedError unless a DDPG's critic takes the action at its second layer."""
    critic = kernels.get("critic/q1", [])
    if kind == "ddpg" and critic and (critic[0][0], critic[1][0]) != (obs_dim, critic[0][1] + act_dim):
        raise UnsupportedError(
            f"{_WHOSE}'s DDPG has a critic that takes the action at its second layer",
            found="critic/q1 takes it elsewhere",
        )


def _normed(binding: Binding, parts: Sequence[Part]) -> bool:
    """Say whether every hidden layer is followed by a layer norm; raise UnsupportedError if only some are."""
    kinds = [[layer.kind for layer in part.layers] for part in parts]
    normed = [each.count("layer_norm") for each in kinds]
    if not any(normed):
        return False
    if any(each != ["dense", "layer_norm"] * (len(each) // 2) + ["dense"] for each in kinds):
        raise UnsupportedError(f"{_WHOSE} has layer norms after all hidden layers or none")
    if binding.facts.epsilon != _EPSILON:
        raise UnsupportedError(
            f"{_WHOSE} has layer norms with an epsilon of {_EPSILON:g}", found=f"{binding.facts.epsilon:g}"
        )
    return True


def _limit(binding: Binding) -> float:
    """Return what DDPG limits observations to, which it always does: the agent's own limit, else infinity."""
    norm = binding.facts.norm
    if norm is None or norm.clip is None or norm.var is None:
        return math.inf
    plain = not any(numbers(norm.mean)) and all(each == 1 for each in numbers(norm.var))
    return norm.clip if plain else math.inf


def _activation(binding: Binding) -> str:
    facts = binding.facts
    hidden = set(facts.activations or (facts.hidden,))
    if len(hidden) != 1 or not hidden <= {"relu", *_ACTIVATIONS}:
        raise UnsupportedError(
            f"{_WHOSE} has one activation in all hidden layers", found=", ".join(sorted(hidden))
        )
    return hidden.pop()


def _array(values: Sequence[float]) -> Leaf:
    return Leaf("float32", (len(values),), Inline(struct.pack(f"<{len(values)}f", *values)), "", "other")
