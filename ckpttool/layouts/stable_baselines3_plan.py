"""Where a canonical agent goes in a file of Stable-Baselines3, and what the library is told to build.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py (modules
and their order), common/torch_layers.py (`create_mlp`: a layer, its activation, ...), ddpg/ddpg.py (one
critic).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.layouts import adam, canonical
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.renamed import action_bounds, dense_parts, named, scaled_tanh
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Reshape, ToValue
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
_MEMBERS = {
    "actor_optimizer": "actor.optimizer",
    "critic_optimizer": "critic.optimizer",
    "temperature_optimizer": "ent_coef_optimizer",
}
_COUNTERS = {"total_it": "_n_updates", "num_timesteps": "num_timesteps"}
_SAVES = (attr("save_counter"),)
_LOG_ALPHA, _ALPHA = ((attr(canonical.TEMPERATURE), attr(name)) for name in ("log_alpha", "alpha"))


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes: a TD3, DDPG or SAC that the library's own `load` takes.

    Targets that the agent lacks are copies. Raise UnsupportedError for networks or an action map that the
    library's policies cannot be, UsageError when nobody says the action bounds.
    """
    actor, critics = _networks(binding)
    gaussian = "log_std" in dict(actor.branches)
    moves, assumed = _weights(binding, agent, gaussian=gaussian)
    optimized = {"actor_optimizer": "actor.", "critic_optimizer": "critic."}
    added = _data(binding, agent, actor, critics)
    missing: list[str] = []
    consumed = [path for path in agent if canonical.mapped_by_sidecar(path)]
    temperature = _temperature(agent) if gaussian else []
    for name, member in _MEMBERS.items():
        prefix = optimized.get(name)
        mine = temperature if prefix is None else [m for m in moves if _entry(m).startswith(prefix)]
        if any(path[0] == attr(name) for path in agent) and mine:
            state = adam.ToTorch(name, mine, agent, told.get(name, {}), binding.defaults)
            moves += [replace(move, target=_member(move.target, member)) for move in state.moves()]
            added |= {_member(path, member): leaf for path, leaf in state.added().items()}
            assumed += state.assumed()
            missing += state.missing()
            consumed += state.consumed()
    moves += temperature
    moves += [
        Move(path, (_DATA, key(theirs)), ToValue())
        for ours, theirs in _COUNTERS.items()
        if (path := (attr(ours),)) in agent
    ]
    notes = ["the settings of training (gamma, tau, noise, ...) are the library's defaults"]
    if (attr(canonical.NORMALIZER), attr("mean")) in agent or binding.facts.norm is not None:
        notes.append("observation statistics are in the sidecar: the library keeps them in another file")
    if _SAVES in agent:
        consumed.append(_SAVES)
        notes.append("save_counter, TensorFlow's count of saves, stays behind")
    return Plan(tuple(moves), added, {}, tuple(assumed), tuple(missing), tuple(consumed), tuple(notes))


def _networks(binding: Binding) -> tuple[Part, tuple[Part, ...]]:
    actors, critics = (dense_parts(binding, name, _WHOSE) for name in ("actor", "critic"))
    wiring = [[layer.kind for layer in part.layers] for part in critics]
    if len(actors) != 1 or not critics or any(each != wiring[0] for each in wiring):
        raise UnsupportedError(
            "Stable-Baselines3 saves one actor and Q-functions that are alike",
            found=", ".join(part.title for part in (*actors, *critics)) or "neither",
        )
    return actors[0], critics


def _entry(move: Move) -> str:
    return str(move.target[1].value) if move.target[0] == _POLICY else ""


def _member(path: Path, member: str) -> Path:
    return (key(member), *path[1:])


def _weights(binding: Binding, agent: Tree, *, gaussian: bool) -> tuple[list[Move], list[str]]:
    """Return the moves of every network, and a sentence for every target that is a copy."""
    moves: list[Move] = []
    assumed: list[str] = []
    networks = [name for name in canonical.NETWORKS if not (gaussian and name == "actor_target")]
    for component in sorted(networks, key=["actor", "actor_target", "critic", "critic_target"].index):
        parts = dense_parts(binding, component, _WHOSE)
        if not parts:
            parts = dense_parts(binding, component.removesuffix("_target"), _WHOSE)
            assumed.append(f"{component} is a copy: the source has none")
        for number, part in enumerate(parts):
            module = f"qf{number}" if component.startswith("critic") else "mu"
            for move in _named(part, agent, module, gaussian=gaussian and module == "mu"):
                stored = str(move.target[1].value)
                moves.append(replace(move, target=(_POLICY, key(f"{component}.{stored}"))))
    return moves, assumed


def _named(part: Part, agent: Tree, module: str, *, gaussian: bool) -> Iterator[Move]:
    depth = len(part.layers)
    if not gaussian:
        # create_mlp: Linear 0, activation 1, Linear 2, ...
        yield from named(part, agent, _POLICY, [f"{module}.{2 * n}" for n in range(depth)])
        return
    yield from named(part, agent, _POLICY, [*(f"latent_pi.{2 * n}" for n in range(depth - 1)), "mu"])
    yield from named(part, agent, _POLICY, ["log_std"], branch="log_std")


def _temperature(agent: Tree) -> list[Move]:
    """Return the move of the entropy coefficient's logarithm, which the library keeps as one number [1]."""
    found = agent.get(_LOG_ALPHA)
    if isinstance(found, Leaf):
        rule = KEEP if found.shape == (1,) else Reshape((1,))
        return [Move(_LOG_ALPHA, (_VARIABLES, key("log_ent_coef")), rule)]
    return [Move(_ALPHA, (_VARIABLES, key("ent_coef_tensor")), KEEP)] if _ALPHA in agent else []


def _data(
    binding: Binding, agent: Tree, actor: Part, critics: Sequence[Part]
) -> dict[Path, Leaf | ValueLeaf]:
    """Return the settings that the library must be told: spaces, sizes, activation, class of the policy."""
    low, high = _bounds(binding, agent)
    gaussian = "log_std" in dict(actor.branches)
    sizes = {"pi": _sizes(agent, actor), "qf": _sizes(agent, critics[0])}
    if any(_sizes(agent, part) != sizes["qf"] for part in critics) or sizes["qf"][-1] != 1:
        raise UnsupportedError("Stable-Baselines3 has Q-functions of one size that give one number")
    if sizes["qf"][0] != sizes["pi"][0] + sizes["pi"][-1]:
        raise UnsupportedError(
            "Stable-Baselines3's Q-functions take observation and action at the first layer"
        )
    group = (_DATA, key("policy_kwargs"))
    module = _activation(binding)
    values: dict[Path, Leaf | ValueLeaf] = {
        (_DATA, key("policy_class")): ValueLeaf(
            Record(f"stable_baselines3.{'sac.policies.SACPolicy' if gaussian else 'td3.policies.TD3Policy'}")
        ),
        (_DATA, key("observation_space"), attr("_shape"), index(0)): ValueLeaf(sizes["pi"][0]),
        (_DATA, key("action_space"), attr("low")): _box(low),
        (_DATA, key("action_space"), attr("high")): _box(high),
        (*group, key("n_critics")): ValueLeaf(len(critics)),
        (*group, key("activation_fn")): ValueLeaf(Record(f"torch.nn.modules.{module}")),
    }
    for name, widths in sizes.items():
        for position, width in enumerate(widths[1:-1]):
            values[*group, key("net_arch"), key(name), index(position)] = ValueLeaf(width)
    return values


def _bounds(binding: Binding, agent: Tree) -> tuple[Sequence[float], Sequence[float]]:
    facts = binding.facts
    fits = scaled_tanh(facts, agent)
    if fits is False:
        raise UnsupportedError(
            "Stable-Baselines3 maps tanh to the action bounds, and this agent's actions are made otherwise",
            found=facts.head,
        )
    if facts.action_low is not None and facts.action_high is not None:
        return facts.action_low, facts.action_high
    known = action_bounds(agent)
    if known is None:
        raise UsageError(
            "nothing says the action bounds, and a file of Stable-Baselines3 must",
            hint="a sidecar's action_low and action_high would (docs/sidecar.md)",
        )
    return known


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
