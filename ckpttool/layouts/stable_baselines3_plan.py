"""Where a canonical agent goes in a file of Stable-Baselines3, and what the library is told to build.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py (modules
and their order), common/torch_layers.py (`create_mlp`: a layer, its activation, ...), ddpg/ddpg.py (one
critic).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import canonical, zoo
from ckpttool.layouts.action_maps import acts_as, told_bounds
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.writing import Lone, Names, Network, Writing, critics, gaussian, written
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.source import Inline
from ckpttool.tree import Tree

_WHOSE = "Stable-Baselines3"
_POLICY, _DATA, _VARIABLES = key("policy"), attr("data"), key("pytorch_variables")
_MODULES = {"relu": "ReLU", "tanh": "Tanh", "elu": "ELU", "leaky_relu": "LeakyReLU", "silu": "SiLU"} | {
    "gelu": "GELU",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "linear": "linear.Identity",
}
_DEFAULT = "activation.ReLU"
_MEMBERS = {
    "actor_optimizer": "actor.optimizer",
    "critic_optimizer": "critic.optimizer",
    "temperature_optimizer": "ent_coef_optimizer",
}
_COUNTERS = {"total_it": "_n_updates", "num_timesteps": "num_timesteps"}
_LOG_ALPHA = (attr(canonical.TEMPERATURE), attr("log_alpha"))


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes: a TD3, DDPG or SAC that the library's own `load` takes.

    Targets that the agent lacks are copies. Raise UnsupportedError for networks or an action map that the
    library's policies cannot be, UsageError when nobody says the action bounds.
    """
    soft = gaussian(binding)
    rows = [_policy("actor", soft=soft), *([] if soft else [_policy("actor_target", soft=False)])]
    for component in ("critic", "critic_target"):
        rows += [_q(component, number) for number in range(critics(binding))]
    notes = ["the settings of training (gamma, tau, noise, ...) are the library's defaults"]
    if (attr(canonical.NORMALIZER), attr("mean")) in agent or binding.facts.norm is not None:
        file = zoo.STATISTICS_FILE
        load = f'VecNormalize.load("{file}", venv)'
        notes.append(f"observation statistics are in {file} beside the target: {load}")
    writing = Writing(
        _WHOSE,
        [*rows, *(_temperature(agent) if soft else [])],
        head="",
        hidden="",
        optimizers={name: (key(member),) for name, member in _MEMBERS.items()},
        counters={ours: (_DATA, key(theirs)) for ours, theirs in _COUNTERS.items()},
        needs=("actor", "critic"),
        notes=tuple(notes),
    )
    found = written(writing, binding, agent, told)
    # The library's zip needs no containers, but to be told what to build.
    return replace(found, added={**found.added, **_data(binding, agent)}, containers={})


def statistics_beside(
    norm: Mapping[str, Any], low: Sequence[float] | None, high: Sequence[float] | None
) -> tuple[str, bytes]:
    """Return the name of the library's own file of statistics, and what it holds."""
    return zoo.STATISTICS_FILE, zoo.statistics_file(norm, low or (-1.0,), high or (1.0,))


def _policy(component: str, *, soft: bool) -> Network:
    # create_mlp: Linear 0, activation 1, Linear 2, ...
    names = Names(f"{component}.mu.{{s}}", f"{component}.mu.{{s}}")
    if soft:
        names = Names("actor.latent_pi.{s}", "actor.mu", {"log_std": "actor.log_std"})
    return Network(component, (_POLICY,), names)


def _q(component: str, number: int) -> Network:
    pattern = f"{component}.qf{number}.{{s}}"
    return Network(f"{component}/q{number + 1}", (_POLICY,), Names(pattern, pattern))


def _temperature(agent: Tree) -> list[Lone]:
    """Return the row of the entropy coefficient's logarithm, which the library keeps as one number [1]."""
    if _LOG_ALPHA in agent:
        return [Lone("temperature/log_alpha", (_VARIABLES, key("log_ent_coef")), (1,))]
    return [Lone("temperature/alpha", (_VARIABLES, key("ent_coef_tensor")), optional=True)]


def _data(binding: Binding, agent: Tree) -> dict[Path, Leaf | ValueLeaf]:
    """Return the settings that the library must be told: spaces, sizes, activation, class of the policy."""
    low, high = _bounds(binding, agent)
    actor = next(part for part in binding.parts if part.component == "actor")
    heads = [part for part in binding.parts if part.component == "critic"]
    sizes = {"pi": _sizes(agent, actor), "qf": _sizes(agent, heads[0])}
    if any(_sizes(agent, part) != sizes["qf"] for part in heads) or sizes["qf"][-1] != 1:
        raise UnsupportedError("Stable-Baselines3 has Q-functions of one size that give one number")
    if sizes["qf"][0] != sizes["pi"][0] + sizes["pi"][-1]:
        raise UnsupportedError(
            "Stable-Baselines3's Q-functions take observation and action at the first layer"
        )
    group = (_DATA, key("policy_kwargs"))
    module = _activation(binding)
    values: dict[Path, Leaf | ValueLeaf] = {
        (_DATA, key("policy_class")): ValueLeaf(
            Record(
                f"stable_baselines3.{'sac.policies.SAC' if gaussian(binding) else 'td3.policies.TD3'}Policy"
            )
        ),
        (_DATA, key("observation_space"), attr("_shape"), index(0)): ValueLeaf(sizes["pi"][0]),
        (_DATA, key("action_space"), attr("low")): _box(low),
        (_DATA, key("action_space"), attr("high")): _box(high),
        (*group, key("n_critics")): ValueLeaf(len(heads)),
    }
    if module != _DEFAULT:  # the library's own default is no setting in its file
        values[*group, key("activation_fn")] = ValueLeaf(Record(f"torch.nn.modules.{module}"))
    for name, widths in sizes.items():
        for position, width in enumerate(widths[1:-1]):
            values[*group, key("net_arch"), key(name), index(position)] = ValueLeaf(width)
    return values


def _bounds(binding: Binding, agent: Tree) -> tuple[Sequence[float], Sequence[float]]:
    facts = binding.facts
    fits = acts_as(facts, agent, "affine")
    if fits is False:
        raise UnsupportedError(
            "Stable-Baselines3 maps tanh to the action bounds, and this agent's actions are made otherwise",
            found=facts.head,
        )
    return told_bounds(facts, agent, "a file of Stable-Baselines3")


def _sizes(agent: Tree, part: Part) -> list[int]:
    """Return the widths of a network: its inputs, its hidden layers, its outputs."""
    kernels = [agent[canonical.weight(part, n, "kernel")] for n in range(len(part.layers))]
    shapes = [leaf.shape for leaf in kernels if isinstance(leaf, Leaf)]
    return [shapes[0][0], *(shape[1] for shape in shapes)]


def _activation(binding: Binding) -> str:
    facts = binding.facts
    hidden = set(facts.activations or (facts.hidden,))
    known: Mapping[str, str] = _MODULES
    if len(hidden) != 1 or not hidden <= known.keys():
        raise UnsupportedError(
            "Stable-Baselines3 has one activation in all hidden layers", found=", ".join(sorted(hidden))
        )
    module = known[hidden.pop()]
    return module if "." in module else f"activation.{module}"


def _box(numbers: Sequence[float]) -> Leaf:
    return Leaf("float32", (len(numbers),), Inline(struct.pack(f"<{len(numbers)}f", *numbers)), "", "other")
