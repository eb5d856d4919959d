"""TF-Agents: DDPG, TD3, SAC and PPO agents, and the policies that PolicySaver exports.

Sources in github.com/tensorflow/agents: tf_agents/utils/common.py (`Checkpointer`, `scale_to_spec`: an action
is the middle of the bounds plus half their distance times tanh), tf_agents/agents/ddpg/actor_network.py and
critic_network.py (lists of layers as private attributes; the action joins what `_observation_layers` give),
tf_agents/agents/{ddpg,td3,sac,ppo}/ (the attributes of an agent), tf_agents/networks/
actor_distribution_network.py, normal_projection_network.py (a mean with tanh and scaled, a deviation that is
a bias or a layer), tf_agents/agents/sac/tanh_normal_projection_network.py (one layer for both, the mean
first; `SquashToSpecNormal.mode` is tanh, scaled), tf_agents/policies/policy_saver.py (`_all_assets`). Every
network's default activation is ReLU, and no file names another one. PPO's policy sees observations through
tf_agents/utils/tensor_normalizer.py: epsilon 1e-3 inside the root, then limited to [-5, 5]; PPO's own
examples have tanh. A Sequential (agents/ddpg/examples/v2/train_eval.py) has the same layers under
`_sequential_layers`.

TD3's and SAC's agents hand the critics' variables to the optimizer in the order of their memory addresses
(td3_agent.py, `ObjectIdentitySet`), so that a Keras 2.11 optimizer's lists cannot be written for them. SAC's
makes legacy optimizers of Keras's newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.layouts import optimizers, tf_agents_specs
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.optimizers.keras_older import ToSlots
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.writing import Lone, Names, Network, Writing, critics, gaussian
from ckpttool.layouts.writing_graph import KERAS, edge, graph, number, place
from ckpttool.leaf import Key, Leaf, Path, attr, display
from ckpttool.ledger import NO_ACTIVATIONS, NO_BOUNDS, NO_STATISTICS
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Alias, Tree

_POLICIES = {"_actor_network": "actor", "_actor_net": "actor", "_target_actor_network": "actor_target"}
_CRITICS = {
    f"{prefix}_critic_network{number}": f"{ours}/{head}"
    for prefix, ours in (("", "critic"), ("_target", "critic_target"))
    for number, head in (("", "q1"), ("_1", "q1"), ("_2", "q2"))
}
_VALUES = {"_value_net": "value", "_value_network": "value"}
# A policy that adds noise, or takes the mode, has the other one inside.
_INSIDE = ("", "_wrapped_policy/")
_JOINED = "_projection_layer"
# CategoricalProjectionNetwork of discrete actions has a layer of this name too: what only SAC's agent has,
# and what agents of discrete actions have.
_OF_SAC = frozenset(("_log_alpha", "_critic_network_1", "_critic_network_2"))
_NOT_SAC = frozenset(("_value_net", "_value_network", "_q_network", "_target_q_network"))
# Critics that are no chain. A Sequential of the examples flattens a dict: the action comes first.
_CANNOT = {
    "_action_layers": "layers of the action's own",
    "_sequential_layers": "the order in which a Sequential joins observation and action",
}
# keras/src/saving/legacy/saved_model/layer_serialization.py: lists of variables beside the attributes.
_KERAS = frozenset(map(attr, ("keras_api", "variables", "trainable_variables", "regularization_losses")))
_ASSETS, _REF, _ACTOR = (attr("_all_assets"),), (attr("ref"),), (attr("_actor_network"),)
_ONLY_POLICIES = frozenset(map(attr, ("_mlp_layers", "_sequential_layers", "_projection_networks")))
_ATTRIBUTES = frozenset(map(attr, ("_actor_network", "_wrapped_policy")))


def _chains() -> dict[str, str]:
    """Return each network's layers by its class's attributes, and last its whole, for what is left."""
    found: dict[str, str] = {}
    for theirs, ours in (_POLICIES | _VALUES).items():
        last = "_postprocessing_layers" if ours == "value" else "_projection_networks"
        for inside in _INSIDE:
            name = inside + theirs
            found |= {f"{name}/{layers}": ours for layers in ("_mlp_layers", "_sequential_layers")}
            found[f"{name}/_encoder+{name}/{last}"] = ours
    for name, ours in _CRITICS.items():
        parts = ("_observation_layers", "_action_layers", "_joint_layers")
        found["+".join(f"{name}/{part}" for part in parts)] = ours
        found[f"{name}/_sequential_layers"] = ours
    wholes = {inside + name: ours for name, ours in (_POLICIES | _VALUES).items() for inside in _INSIDE}
    return {**found, **wholes, **_CRITICS}


TABLE = Table(
    name="tf_agents",
    title="TF-Agents: Checkpointer's or PolicySaver's DDPG, TD3, SAC, PPO",
    framework="tensorflow",
    components=_chains(),
    optimizers={
        "_actor_optimizer": "actor_optimizer",
        "_critic_optimizer": "critic_optimizer",
        "_alpha_optimizer": "temperature_optimizer",
    },
    counters={"_train_step_counter": "total_it", "train_step": "total_it", "save_counter": "save_counter"},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-3, lacks=(NO_BOUNDS,)),
    optimizer=optimizers.from_keras,
    rooted=True,
    seen="DDPG, TD3, SAC (0.6.0 and 0.19.0), PPO saved by the library: checkpoints and exported policies",
    branches={"_stddev_projection_layer": "std"},
    tensors={
        "_log_alpha": "temperature/log_alpha",
        **{
            f"{inside}{name}/_projection_networks/_bias/bias": f"{ours}/std_bias"
            for name, ours in _POLICIES.items()
            for inside in _INSIDE
        },
    },
)

_NORMALIZER = "_observation_normalizer"


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # a prefix's name says nothing
    """Return the way to the canonical agent if a policy stands under TF-Agents' private attributes."""
    tree = _plainly(tree)
    names = {each: path for path, each in _names(tree)}
    segments = [tuple(each.split("/")) for each in names]
    if not any({"_actor_network", "_actor_net"} & set(each[1:3]) for each in segments):
        return None
    joined = [path for each, path in names.items() if each.split("/")[-2:-1] == [_JOINED]]
    halved = bool(joined)
    agent = {step for each in segments for step in each}
    certain = not _OF_SAC.isdisjoint(agent)
    if halved and not (_is_even(tree, joined) and (certain or _NOT_SAC.isdisjoint(agent))):
        return None
    binding = bind(tree, replace(TABLE, joined=halved))
    if binding is None:
        return None
    for segment, left in _CANNOT.items():
        if any(segment in each[2:-2] for each in segments if set(_CRITICS) & set(each[:2])):
            found = (*binding.unplaced.get("critic", ()), left)
            binding = replace(binding, unplaced={**binding.unplaced, "critic": found})
    if halved and not certain:
        said = f"the last layer of the policy ({_JOINED}) holds means and deviations, as SAC's does"
        binding = replace(binding, moves=replace(binding.moves, assumed=(*binding.moves.assumed, said)))
    if any("_value_net" in each[1:2] for each in segments):
        binding = replace(binding, facts=binding.facts.lacking(NO_ACTIVATIONS))
    return _normalised(binding, names, tree)


def _is_even(tree: Tree, paths: Sequence[Path]) -> bool:
    """Say whether a layer's outputs can be halves: means and deviations."""
    return all(
        isinstance(leaf := tree[path], Leaf) and leaf.shape[-1:] and not leaf.shape[-1] % 2 for path in paths
    )


def _plainly(tree: Tree) -> Tree:
    """Return an exported policy's tree without the names that Keras gives every variable once more.

    In 0.6 the policy's attributes stand in a list, `_all_assets/0/ref`, which has lost their names: what has
    a policy's layers is `_actor_network`.
    """
    others = [alias.path for aliases in tree.aliases.values() for alias in aliases]
    listed: dict[Key, Path] = {
        path[1]: _ACTOR for path in others if path[2:3] == _REF and set(path[3:4]) & _ONLY_POLICIES
    }
    listed |= {path[1]: () for path in others if path[2:3] == _REF and set(path[3:4]) & _ATTRIBUTES}

    def named(path: Path) -> Path:
        kept = listed.get(path[1]) if path[:1] == _ASSETS and path[2:3] == _REF else None
        return path if kept is None else (*_ASSETS, *kept, *path[3:])

    plain = {
        path: tuple(Alias(named(alias.path), alias.key) for alias in aliases if not _KERAS & set(alias.path))
        for path, aliases in tree.aliases.items()
    }
    return Tree(tree.leaves, plain, tree.containers)


def _names(tree: Tree) -> Iterator[tuple[Path, str]]:
    """Go through the tensors by all their names."""
    for path, _ in tree.tensors():
        yield path, tree.names[path]
        yield from ((path, display(alias.path)) for alias in tree.aliases.get(path, ()))


def _normalised(binding: Binding, names: Mapping[str, Path], tree: Tree) -> Binding:
    """Return the binding with the statistics through which a policy sees observations."""
    places = [each.partition(f"/{_NORMALIZER}/")[0] for each in names if f"/{_NORMALIZER}/" in each]
    if not places:
        return binding
    found = {
        each.split("/")[-2]: leaf
        for each, path in names.items()
        if each.startswith(f"{places[0]}/{_NORMALIZER}/")
        and each.endswith("/0")
        and isinstance(leaf := tree[path], Leaf)
    }
    norm = tf_agents_specs.statistics(found)
    if norm is None:
        return replace(binding, facts=binding.facts.lacking(NO_STATISTICS))
    return replace(binding, facts=binding.facts.read(_NORMALIZER, norm=norm))


def companions(location: str) -> Sequence[str]:
    """Return the specs that PolicySaver writes beside its graph, for the folder or a file in it."""
    return tf_agents_specs.companions(location)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the bounds of the action that the specs tell."""
    return tf_agents_specs.told_by(binding, file, tree)


_WHOSE = "TF-Agents"
# Every stack of layers begins with a Flatten, number 0 (networks/utils.py, mlp_layers).
_ACTOR_NAMES = Names("_mlp_layers/{n}", "_mlp_layers/{n}")
_SAC_NAMES = Names(
    "_encoder/_postprocessing_layers/{n}", "_projection_networks/_projection_layer", joined=True
)
_CRITIC_NAMES = Names("_joint_layers/{n}", "_joint_layers/{n}")


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: what `Checkpointer(agent=..., ...)` of DDPG, TD3 or SAC restores.

    Networks are ActorNetwork or, of a Gaussian policy, ActorDistributionNetwork with a
    TanhNormalProjectionNetwork; CriticNetwork with joint layers only. Optimizers are those of
    `tf.keras.optimizers.legacy`. Raise UnsupportedError for networks that these cannot be.
    """
    sac, twin = gaussian(binding), critics(binding) > 1 or gaussian(binding)
    rows: list[Network | Lone] = [
        Network("actor", place("agent/_actor_network"), _SAC_NAMES if sac else _ACTOR_NAMES)
    ]
    if not sac:
        rows.append(Network("actor_target", place("agent/_target_actor_network"), _ACTOR_NAMES))
    for component, theirs in (("critic", "_critic_network"), ("critic_target", "_target_critic_network")):
        for head, end in (("q1", "_1"), ("q2", "_2")) if twin else (("q1", ""),):
            rows.append(Network(f"{component}/{head}", place(f"agent/{theirs}{end}"), _CRITIC_NAMES))
    rows.append(Lone("update_target/counter", place("agent/_update_target/_counter"), (), number(0, "int64")))
    if sac:
        rows.append(Lone("temperature/log_alpha", place("agent/_log_alpha"), (), number(0.0, "float32")))
    written = Writing(
        _WHOSE,
        rows,
        "affine",
        optimizers={
            ours: place(f"agent/{theirs}")
            for theirs, ours in TABLE.optimizers.items()
            if sac or ours != "temperature_optimizer"
        },
        counters={"total_it": place("agent/_train_step_counter"), "save_counter": place("save_counter")},
        needs=("actor", "critic"),
        kinds=KERAS,
        path=edge,
        notes=("optimizers are those of tf.keras.optimizers.legacy",),
    )
    return graph(written, binding, agent, told, ToSlots)
