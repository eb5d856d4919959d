"""AgileRL's agents: what `agent.save_checkpoint` writes since 2.0, with the arguments of every network.

Sources, in github.com/AgileRL/AgileRL: agilerl/algorithms/core/base.py (`get_checkpoint_dict`,
`save_checkpoint`: dill; `network_info` has the class, `init_dict` and `state_dict` of each network, and the
optimizers), agilerl/networks (a network is an encoder and a head), agilerl/utils/evolvable_networks.py
(`create_mlp`: each dense layer, its layer norm, its activation; an `output_layernorm` has no parameters),
agilerl/algorithms (`get_action`): DQN takes the largest value, DDPG and TD3 map the output's range to the
bounds (`rescale_action`; before 2.4 otherwise), PPO outside training clips a sample of the distribution
to the bounds, or maps its tanh to them (`squash_output`). It always draws: its mean, or its most probable
action, is played. agilerl/wrappers/agent.py (`RSNorm`: epsilon inside the root). Discrete actions count
from 0, whatever the space's `start` is. Rainbow (agilerl/networks/custom_modules.py,
`DuelingDistributionalMLP`: `model` gives the state's value, `advantage_net` the advantages) has noisy layers
(agilerl/modules/custom_components.py, which act by their means in evaluation), and limits the probabilities
of its atoms from below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.kinds import TORCH_ACTIVATIONS
from ckpttool.core.tree import Leaf, Path, Record, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries import sb3, schema
from ckpttool.libraries.binding import bind, bind_means
from ckpttool.libraries.optimizers_read import OptimizerMoves, StoredOptimizer, from_torch
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent
from ckpttool.mapping.rules import Fill, constant_tensor

TABLE = LayoutTable(
    name="agilerl",
    statistics="in the file (RSNorm)",
    plays=("DQN", "CQN", "Rainbow", "DDPG", "TD3", "PPO"),
    title="AgileRL's DQN, CQN, Rainbow, DDPG, TD3, PPO: network_info with modules and optimizers",
    framework="torch",
    facts=AgentMetadata(head="", hidden="relu", epsilon=1e-5),
    seen="written by AgileRL 2.4.3 and 2.58.0: DQN, DDPG, TD3, PPO; Rainbow by 2.58.0",
)

_INFO = "network_info"
_MODULES, _OPTIMIZERS = f"{_INFO}/modules", f"{_INFO}/optimizers"
_ACTOR, _Q, _CRITIC, _VALUE = "DeterministicActor", "QNetwork", "ContinuousQNetwork", "ValueNetwork"
_STOCHASTIC, _RAINBOW = "StochasticActor", "RainbowQNetwork"
# The classes of an algorithm's networks by their names, and what the networks are.
_ROLES: Mapping[str, Mapping[str, str]] = {
    "actor": {_ACTOR: "actor", _STOCHASTIC: "actor", _Q: "critic/q1", _RAINBOW: "critic/q1"},
    "actor_target": {_ACTOR: "actor_target", _Q: "critic_target/q1", _RAINBOW: "critic_target/q1"},
    "critic": {_CRITIC: "critic/q1", _VALUE: "value"},
    "critic_target": {_CRITIC: "critic_target/q1"},
    **{f"critic_{n}": {_CRITIC: f"critic/q{n}"} for n in (1, 2)},
    **{f"critic_target_{n}": {_CRITIC: f"critic_target/q{n}"} for n in (1, 2)},
}
_OF_OPTIMIZERS = {
    "optimizer": "critic_optimizer",
    "actor_optimizer": "actor_optimizer",
    "critic_optimizer": "critic_optimizer",
    "critic_1_optimizer": "critic_optimizer/q1",
    "critic_2_optimizer": "critic_optimizer/q2",
}
_LAYER = deferred.compile(r"\w+_(linear_layer_(\d+|output)|layer_norm_\d+)")
_LAST_NORM = deferred.compile(r"(.*_)linear_layer_output\.bias")
_STATISTICS = "wrapper_attrs/obs_rms"
_SPACES = ("observation_space", "action_space")
_MEANS = {"weight_mu": "weight", "bias_mu": "bias"}
_NOISE = frozenset(f"{name}_{kind}" for name in ("weight", "bias") for kind in ("sigma", "epsilon"))
_DATA = attr("data")  # the place of the spaces in a file of Stable-Baselines3, whose reader reads them


class _StoredNetwork(NamedTuple):
    """A network of the file: its name, its class without the module, its place in the canonical agent."""

    name: str
    kind: str
    role: str

    @property
    def parts(self) -> tuple[str, str]:
        """The names of the encoder's and the head's layers in the state_dict."""
        heads = {_STOCHASTIC: "head_net/_wrapped/model", _RAINBOW: "head_net/advantage_net"}
        return "encoder/model", heads.get(self.kind, "head_net/model")

    @property
    def chains(self) -> dict[str, tuple[str, str]]:
        """The parts of every chain of layers, by the chain's place in the canonical agent."""
        value = {self.role.replace("q1", "q2"): (self.parts[0], "head_net/model")}
        return {self.role: self.parts, **(value if self.kind == _RAINBOW else {})}


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a checkpoint with the classes of AgileRL's own networks."""
    return bind_means(tree, _MEANS, _NOISE, _bind_networks)


def _bind_networks(tree: Tree) -> RecognizedAgent | None:
    values = {tree.names[path]: leaf.value for path, leaf in tree.plain()}
    networks = list(_list_networks(values))
    policy = next((network for network in networks if network.name == "actor"), None)
    if policy is None:
        return None
    state = _add_plain_norms(tree, values, networks)
    added = frozenset(path for path in state if path not in tree)
    table = _make_table(values, networks, added)
    # Other encoders than dense layers are no chain: only the head of such a network is listed.
    heads = {names.rpartition("+")[2]: role for names, role in table.components.items()}
    bound = (bind(state, candidate) for candidate in (table, replace(table, components=heads)))
    roles = ((agent, {part.title for part in agent.parts}) for agent in bound if agent is not None)
    binding = next((agent for agent, titles in roles if policy.role in titles), None)
    if binding is None:
        return None
    binding = _move_plain_norms(binding, added)
    facts = sb3.add_settings_metadata(binding.facts, _take_spaces(tree))
    places = {name: where.removeprefix(f"{_DATA.value}/") for name, where in facts.origins.items()}
    binding = replace(binding, facts=facts._replace(origins=places))
    binding = _add_statistics(_add_action_map(binding, tree, values, policy), values, tree)
    binding = _add_activations(_refuse_other_layers(binding, tree, values, networks), values, networks)
    # The agent's other attributes are settings, spaces, metrics and arguments.
    used = {move.source for move in binding.moves.moves} | binding.consumed
    tops = (*(f"{_MODULES}/{name}" for name in _ROLES), *(f"{_OPTIMIZERS}/{name}" for name in _OF_OPTIMIZERS))
    kept = ("wrapper_", *(f"{top}_state_dict/" for top in tops))
    rest = (path for path in tree if path not in used and not tree.names[path].startswith(kept))
    return replace(binding, consumed=binding.consumed.union(rest))


def _list_networks(values: Mapping[str, object]) -> Iterator[_StoredNetwork]:
    for name, roles in _ROLES.items():
        recorded = values.get(f"{_MODULES}/{name}_cls")
        kind = recorded.name if isinstance(recorded, Record) else ""
        if kind.startswith("agilerl.networks.") and (role := roles.get(kind.rpartition(".")[2])) is not None:
            yield _StoredNetwork(name, kind.rpartition(".")[2], role)


def _make_table(
    values: Mapping[str, object], networks: list[_StoredNetwork], added: frozenset[Path]
) -> LayoutTable:
    """Return the table of the file's networks and optimizers; `added` tensors are in no optimizer."""

    def bind_optimizer(optimizer: StoredOptimizer) -> OptimizerMoves:
        weights = tuple(weight for weight in optimizer.weights if weight[0] not in added)
        return from_torch(replace(optimizer, weights=weights))

    components = {
        "+".join(f"{_MODULES}/{network.name}_state_dict/{part}" for part in parts): role
        for network in networks
        for role, parts in network.chains.items()
    }
    own = {n: canonical for n, canonical in _OF_OPTIMIZERS.items() if f"{_OPTIMIZERS}/{n}_cls" in values}
    if any(network.role == "value" for network in networks):
        own = {"optimizer": schema.JOINT}
    return replace(
        TABLE,
        components=components,
        optimizers={f"{_OPTIMIZERS}/{name}_state_dict": canonical for name, canonical in own.items()},
        tensors={
            f"{_MODULES}/actor_state_dict/head_net/log_std": "actor/log_std",
            **{f"{_STATISTICS}/{name}": f"normalizer/{name}" for name in ("mean", "var", "count")},
        },
        optimizer=bind_optimizer,
    )


def _add_plain_norms(tree: Tree, values: Mapping[str, object], networks: list[_StoredNetwork]) -> Tree:
    """Return the tree with the scale and the offset of layer norms without parameters, after their layers."""
    normed = {
        f"{_MODULES}/{network.name}_state_dict/{part}"
        for network in networks
        for part, kind in zip(network.parts, ("encoder", "head"), strict=True)
        if values.get(f"{_MODULES}/{network.name}_init_dict/{kind}_config/output_layernorm") is True
    }
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        leaves[path] = leaf
        last = _LAST_NORM.fullmatch(str(path[-1].value)) if path else None
        if last is None or not isinstance(leaf, Leaf) or tree.names[path].rsplit("/", 2)[0] not in normed:
            continue
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            location = (*path[:-1], key(f"{last[1]}layer_norm_output.{name}"))
            leaves[location] = constant_tensor(leaf.dtype, leaf.shape, value, display(location), "buffer")
    return Tree(leaves, tree.aliases, tree.containers)


def _move_plain_norms(binding: RecognizedAgent, added: frozenset[Path]) -> RecognizedAgent:
    """Return the binding in which added tensors are made of the bias before them, which is in the file."""
    moves = []
    for move in binding.moves.moves:
        if move.source not in added:
            moves.append(move)
            continue
        named = str(move.source[-1].value).replace("layer_norm", "linear_layer").rpartition(".")
        value = 1.0 if named[2] == "weight" else 0.0
        moves.append(replace(move, source=(*move.source[:-1], key(f"{named[0]}.bias")), rule=Fill(value)))
    return replace(binding, moves=replace(binding.moves, moves=tuple(moves)))


def _take_spaces(tree: Tree) -> Tree:
    """Return the pickled spaces where Stable-Baselines3 has them; arrays may be shared under other names."""
    leaves = {
        (_DATA, *location): leaf
        for path, leaf in tree.items()
        for location in (path, *(alias.path for alias in tree.aliases.get(path, ())))
        if location and location[0].value in _SPACES
    }
    named = {(_DATA, *path): c for path, c in tree.containers.items() if path and path[0].value in _SPACES}
    return Tree(leaves, containers=named)


def _add_action_map(
    binding: RecognizedAgent, tree: Tree, values: Mapping[str, object], policy: _StoredNetwork
) -> RecognizedAgent:
    """Return the binding with the map of the network's output to an action of the space."""
    spaces, facts = _take_spaces(tree), binding.facts
    space = tree.containers.get((key("action_space"),))
    kind = str(space.name).rpartition(".")[2] if space is not None else ""
    settings = f"{_MODULES}/{policy.name}_init_dict"
    if kind == "Box" and not isinstance(values.get("agilerl_version"), str):
        reason = "the action map of a version before 2.4, which records no version"
        return replace(binding, facts=facts._replace(head="affine")).refused("actor", reason)
    if policy.kind == _STOCHASTIC and kind == "Box":
        head = "affine" if values.get(f"{settings}/squash_output") is True else "clip"
        facts = facts.read(f"{settings}/squash_output", head=head)._replace(distribution=schema.GAUSSIAN)
        return replace(binding, facts=facts)
    choices = sb3.read_choices(spaces) or sb3.read_binary_choices(spaces)
    if policy.kind == _ACTOR and kind == "Box":
        output = values.get(f"{settings}/head_config/output_activation")
        # rescale_action returns the output itself if a bound is infinite.
        bounded = facts.action_low is not None
        facts = facts.read(settings, head="affine" if bounded else "unit_tanh")
        binding = replace(binding, facts=facts)
        return binding if output == "Tanh" else binding.refused("actor", f"the output activation {output}")
    if policy.kind == _STOCHASTIC and choices is not None:
        facts = facts.read("action_space", head="argmax", choices=choices)
        return replace(binding, facts=facts._replace(distribution=schema.CATEGORICAL))
    if policy.kind == _Q and choices is not None and choices.single:
        facts = facts.read("action_space", head="argmax", choices=choices)
        return replace(binding, facts=facts).with_q_policies()
    support = schema.read_numbers(tree.get((key("support"),)))
    if policy.kind == _RAINBOW and choices is not None and choices.single and support:
        choices = choices._replace(scores="dueling_limited_atoms", support=support)
        facts = facts.read("action_space", head="argmax", choices=choices)
        return replace(binding, facts=facts).with_q_policies(choices.scores)
    binding = replace(binding, facts=facts._replace(head="argmax")).with_q_policies()
    return binding.refused(policy.role.partition("/")[0], f"actions in {kind}")


def _add_statistics(binding: RecognizedAgent, values: Mapping[str, object], tree: Tree) -> RecognizedAgent:
    """Return the binding with the statistics of RSNorm, which has them of the parts of other observations."""
    wrapper = values.get("wrapper_cls")
    if not isinstance(wrapper, Record):
        return binding
    statistics, epsilon = binding.statistics(tree), values.get(f"{_STATISTICS}/epsilon")
    if not wrapper.name.endswith(".RSNorm") or {*statistics} != {"mean", "var", "count"}:
        return binding.refused(binding.parts[0].component, f"{wrapper.name} around the agent")
    if not isinstance(epsilon, float):
        return binding.refused(binding.parts[0].component, f"{_STATISTICS} without an epsilon")
    norm = schema.ObservationNormalizer(statistics["mean"], statistics["var"], epsilon=epsilon)
    return replace(binding, facts=binding.facts.read(_STATISTICS, norm=norm))


def _refuse_other_layers(
    binding: RecognizedAgent, tree: Tree, values: Mapping[str, object], networks: list[_StoredNetwork]
) -> RecognizedAgent:
    """Return the binding in which networks with modules of other encoders are refused by their names."""
    for network in networks:
        component = network.role.partition("/")[0]
        start = f"{_MODULES}/{network.name}_state_dict/"
        parts = {part for parts in network.chains.values() for part in parts}
        names = {tree.names[path] for path, _ in tree.tensors()}
        names |= {display(alias.path) for aliases in tree.aliases.values() for alias in aliases}
        strange = []
        for name in sorted(name.removeprefix(start) for name in names if name.startswith(start)):
            part, _, module = name.rpartition("/")[0].rpartition("/")
            if name != "head_net/log_std" and (part not in parts or not _LAYER.fullmatch(module)):
                strange.append(f"{network.name}/{name}")
        settings = f"{_MODULES}/{network.name}_init_dict"
        strange += [
            f"{network.name}: {option}"
            for option in ("simba", "recurrent")
            if values.get(f"{settings}/{option}") is True
        ]
        if values.get(f"{settings}/encoder_cls") is not None:
            strange.append(f"{network.name}: encoder_cls")
        if strange:
            binding = binding.refused(component, *strange)
    return binding


def _add_activations(
    binding: RecognizedAgent, values: Mapping[str, object], networks: list[_StoredNetwork]
) -> RecognizedAgent:
    """Return the binding with the activations of its networks; unknown ones are refused."""
    for network in networks:
        part = next((part for part in binding.parts if part.title == network.role), None)
        if part is None:
            continue
        dense = [layer for layer in part.layers if layer.kind == "dense"]
        stems = [layer.name[-1].partition("_linear_layer_")[0] for layer in dense]
        encoder = stems.count(stems[0])
        settings = f"{_MODULES}/{network.name}_init_dict"
        recorded = [
            *[values.get(f"{settings}/encoder_config/activation")] * (encoder - 1),
            values.get(f"{settings}/encoder_config/output_activation"),
            *[values.get(f"{settings}/head_config/activation")] * (len(dense) - encoder - 1),
        ]
        known = {"Identity": "linear", **TORCH_ACTIVATIONS}
        names = [
            "linear" if value is None else known.get(value) if isinstance(value, str) else None
            for value in recorded
        ]
        component = network.role.partition("/")[0]
        if None in names:
            strange = next(value for value, name in zip(recorded, names, strict=True) if name is None)
            binding = binding.refused(component, f"the activation {strange}")
            continue
        own = tuple(name for name in names if name is not None)
        if network.name == "actor":
            binding = replace(binding, facts=binding.facts.read(settings, activations=own))
        else:
            binding = replace(binding, facts=binding.facts.read_network(component, settings, own))
    return binding
