"""TF-Agents."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.sidecar import NO_ACTIVATIONS, NO_STATISTICS
from ckpttool.core.tree import Alias, Leaf, Path, PathStep, Tree, ValueLeaf, attr, display, index, key
from ckpttool.formats.tf_common import INPUT_LAYERS
from ckpttool.libraries.binding import bind, rejoin_last_layer
from ckpttool.libraries.optimizers_write import LEGACY
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    DISCRETE_CHOICE,
    LEFT_OPEN,
    OBSERVATION,
    AgentMetadata,
    ObservationNormalizer,
    RecognizedAgent,
    make_choices,
    make_observation_space,
)
from ckpttool.libraries.write import (
    KERAS,
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    is_gaussian,
    make_edge_path,
    make_number,
    parse_edge_path,
    plan_object_graph,
)
from ckpttool.mapping.rules import Plan, Settings

_FILE = "policy_specs.pbtxt"
_EPSILON, _CLIP = 1e-3, 5.0
# tensorflow/core/framework/tensor.proto: numbers are in a field for their dtype, or all as bytes.
_TYPES = {
    "DT_FLOAT": ("f", "float_val"),
    "DT_DOUBLE": ("d", "double_val"),
    "DT_INT32": ("i", "int_val"),
    "DT_INT64": ("q", "int64_val"),
}
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class _Quotient:
    """Quotient of two float32 tensors of the same shape, computed when it is read."""

    above: Leaf
    below: Leaf

    def read(self) -> bytes:
        """Return the quotient's bytes; 0 where nothing was counted."""
        above, below = self.above.array(), self.below.array()
        quotient = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        data: bytes = quotient.astype("<f4").tobytes()
        return data


def read_statistics(leaves: Mapping[str, Leaf]) -> ObservationNormalizer | None:
    """Return the statistics in a normalizer's variables, by their attributes; None if unknown."""
    if {"_avg", "_m2", "_count"} <= leaves.keys():
        mean, above, below = (leaves[name] for name in ("_avg", "_m2", "_count"))
        if not mean.shape == above.shape == below.shape:
            return None
        if {leaf.dtype for leaf in (mean, above, below)} != {"float32"}:
            return None
        var = Leaf("float32", above.shape, _Quotient(above, below), "", "buffer")
        return ObservationNormalizer(mean, var, epsilon=_EPSILON, clip=_CLIP)
    if {"_mean_moving_avg", "_var_moving_avg"} <= leaves.keys():
        mean, var = leaves["_mean_moving_avg"], leaves["_var_moving_avg"]
        return ObservationNormalizer(mean, var, epsilon=_EPSILON, clip=_CLIP)
    return None


def companions(location: str) -> Sequence[str]:
    """Return possible spec locations: in the folder, beside its graph, above its variables."""
    above = os.path.dirname(location)
    return tuple(os.path.join(folder, _FILE) for folder in (location, above, os.path.dirname(above)))


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the actions, and the bounds that the specs contain.

    Sources in github.com/tensorflow/agents: tf_agents/policies/policy_saver.py (`policy_specs.pbtxt`, a
    StructuredValue of tensorflow/core/protobuf/struct.proto as text: tf_agents/specs/tensor_spec.py,
    to_pbtxt_file); tf_agents/utils/tensor_normalizer.py (StreamingTensorNormalizer: `_m2` over `_count` is
    the variance; EMATensorNormalizer: moving averages of both; `normalize`: epsilon 1e-3 inside the square
    root, clipped to [-5, 5]).
    """
    kinds = [tree.get((*spec, *_steps("dtype"))) for spec in _list_specs(tree, "action")]
    if any(isinstance(leaf, ValueLeaf) and str(leaf.value).startswith("DT_INT") for leaf in kinds):
        binding = _add_discrete_action(binding, file, tree)
    name, facts = os.path.basename(file), binding.facts
    action, observed = (_find_bounds(tree, name) for name in ("action", "observation"))
    if action is not None and facts.head != "argmax":
        facts = facts.without_lack("action bounds").read(name, action_low=action[0], action_high=action[1])
    # tf_agents/environments/suite_gym.py
    if observed is not None and (space := make_observation_space("gym", {OBSERVATION: observed})):
        facts = facts.read(name, observation_space=space)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _find_bounds(tree: Tree, name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    return next(filter(None, (_bounds(tree, spec) for spec in _list_specs(tree, name))), None)


def _add_discrete_action(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the integers that the specs' action is one of; refuse an array of them."""
    part = binding.policy or binding.parts[0]
    bounds = _find_bounds(tree, "action")
    ranked = any(list(_list_sizes(tree, spec, "shape")) for spec in _list_specs(tree, "action"))
    if bounds is None or ranked:
        return binding.refused(part.component, DISCRETE_CHOICE)
    (low,), (high,) = bounds
    if low and not part.chooses:
        # networks/categorical_projection_network.py counts from 0; tf_policy.py limits that to the spec.
        return binding.refused(
            part.component, f"discrete actions from {low:g} on, which an actor counts from 0"
        )
    choices = make_choices((int(high - low) + 1,), (int(low),), single=True)
    if choices is None:
        return binding.refused(part.component, DISCRETE_CHOICE)
    # The last layer of an exported policy was taken for means and deviations; it has the logits.
    kept = tuple(assumption for assumption in binding.moves.assumed if assumption != _HALVED)
    binding = rejoin_last_layer(replace(binding, moves=replace(binding.moves, assumed=kept)))
    facts = binding.facts.without_lack("action bounds", "action map")
    return replace(binding, facts=facts.read(os.path.basename(file), head="argmax", choices=choices))


def _list_specs(tree: Tree, name: str) -> Iterator[Path]:
    """Yield the bounded specs of that name."""
    for path, leaf in tree.items():
        if path[-2:] == (key("key"), index(0)) and isinstance(leaf, ValueLeaf) and leaf.value == name:
            yield (*path[:-2], *_steps("value"), *_steps("bounded_tensor_spec_value"))


def _steps(field: str) -> Path:
    return (key(field), index(0))


def _bounds(tree: Tree, spec: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    sizes = list(_list_sizes(tree, spec, "shape"))
    count = math.prod(sizes)
    if not 0 < count <= _MOST:
        return None
    low, high = (_read_bound(tree, (*spec, *_steps(name)), count) for name in ("minimum", "maximum"))
    return None if low is None or high is None else (low, high)


def _list_sizes(tree: Tree, spec: Path, field: str) -> Iterator[int]:
    """Yield the sizes of a shape's dimensions."""
    number = 0
    while True:
        path = (*spec, *_steps(field), key("dim"), index(number), *_steps("size"))
        leaf = tree.get(path)
        if not isinstance(leaf, ValueLeaf) or not isinstance(leaf.value, int):
            return
        yield leaf.value
        number += 1


def _read_bound(tree: Tree, spec: Path, count: int) -> tuple[float, ...] | None:
    """Return a tensor's numbers, or one number for all; None for another dtype or count."""
    kind = tree.get((*spec, *_steps("dtype")))
    if not isinstance(kind, ValueLeaf) or kind.value not in _TYPES:
        return None
    code, field = _TYPES[str(kind.value)]
    content = tree.get((*spec, *_steps("tensor_content")))
    if isinstance(content, ValueLeaf) and isinstance(content.value, str):
        data = content.value.encode("latin-1", "replace")
        whole = len(data) % struct.calcsize(code) == 0
        numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)) if whole else []
    else:
        numbers = []
        while isinstance(leaf := tree.get((*spec, key(field), index(len(numbers)))), ValueLeaf):
            if not isinstance(leaf.value, int | float):
                return None
            numbers.append(float(leaf.value))
    if len(numbers) == 1:
        numbers *= count
    return tuple(numbers) if len(numbers) == count and all(map(math.isfinite, numbers)) else None


_POLICIES = {"_actor_network": "actor", "_actor_net": "actor", "_target_actor_network": "actor_target"}
_CRITICS = {
    f"{prefix}_critic_network{number}": f"{canonical}/{head}"
    for prefix, canonical in (("", "critic"), ("_target", "critic_target"))
    for number, head in (("", "q1"), ("_1", "q1"), ("_2", "q2"))
}
_VALUES = {"_value_net": "value", "_value_network": "value"}
# A policy that adds noise, or uses the mode, wraps another one.
_INSIDE = ("", "_wrapped_policy/")
_JOINED = "_projection_layer"
_HALVED = f"the policy's last layer ({_JOINED}) contains means and standard deviations, as in SAC"
_Q_NETWORKS = {"_q_network": "critic/q1", "_target_q_network": "critic_target/q1"}
# CategoricalProjectionNetwork of discrete actions also has a layer of this name: attributes that only SAC's
# agent has, and attributes of agents with discrete actions.
_OF_SAC = frozenset(("_log_alpha", "_critic_network_1", "_critic_network_2"))
_NOT_SAC = frozenset(("_value_net", "_value_network", "_q_network", "_target_q_network"))
_OF_AGENTS = frozenset(("_train_step_counter", "_optimizer"))
# Critics that are not a chain. A Sequential in the examples flattens a dict: the action comes first.
_CANNOT = {
    "_action_layers": "separate layers for the action",
    "_sequential_layers": "the order in which a Sequential concatenates observation and action",
}
# keras/src/saving/legacy/saved_model/layer_serialization.py: lists of variables beside the attributes.
_KERAS = frozenset(map(attr, ("keras_api", "variables", "trainable_variables", "regularization_losses")))
_ASSETS, _REF, _ACTOR = (attr("_all_assets"),), (attr("ref"),), (attr("_actor_network"),)
_ONLY_POLICIES = frozenset(map(attr, ("_mlp_layers", "_sequential_layers", "_projection_networks")))
_WRAPPED = attr("_wrapped_policy")
_ATTRIBUTES = frozenset((attr("_actor_network"), _WRAPPED))


def _list_chains() -> dict[str, str]:
    """Return each network's layers by class attribute, and last the whole network for the rest."""
    chains: dict[str, str] = {}
    for stored, canonical in (_POLICIES | _VALUES).items():
        last = "_postprocessing_layers" if canonical == "value" else "_projection_networks"
        for inside in _INSIDE:
            name = inside + stored
            chains |= {f"{name}/{layers}": canonical for layers in ("_mlp_layers", "_sequential_layers")}
            chains[f"{name}/_encoder+{name}/{last}"] = canonical
    for name, canonical in _CRITICS.items():
        parts = ("_observation_layers", "_action_layers", "_joint_layers")
        chains["+".join(f"{name}/{part}" for part in parts)] = canonical
        chains[f"{name}/_sequential_layers"] = canonical
    wholes = {inside + name: target for name, target in (_POLICIES | _VALUES).items() for inside in _INSIDE}
    return {**chains, **wholes, **_CRITICS}


TABLE = LayoutTable(
    name="tf_agents",
    statistics="PPO's in the file",
    plays=("DDPG", "TD3", "SAC", "PPO", "REINFORCE", "DQN", "C51"),
    writes=("DDPG", "TD3", "SAC"),
    title="TF-Agents: Checkpointer's or PolicySaver's DDPG, TD3, SAC, PPO, DQN",
    framework="tensorflow",
    components=_list_chains(),
    optimizers={
        "_actor_optimizer": "actor_optimizer",
        "_critic_optimizer": "critic_optimizer",
        "_alpha_optimizer": "temperature_optimizer",
    },
    counters={"_train_step_counter": "total_it", "train_step": "total_it", "save_counter": "save_counter"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-3, lacks=LEFT_OPEN["tf_agents"]),
    rooted=True,
    seen="DDPG, TD3, SAC (0.6.0 and 0.19.0), PPO, DQN, C51 (0.19.0) saved by the library, also exported",
    branches={"_stddev_projection_layer": "std"},
    tensors={
        "_log_alpha": "temperature/log_alpha",
        "_update_target/_counter": "update_target/counter",
        **{
            f"{inside}{name}/_projection_networks/_bias/bias": f"{canonical}/std_bias"
            for name, canonical in _POLICIES.items()
            for inside in _INSIDE
        },
    },
)

# tf_agents/utils/common.py, Periodically: calls since the targets' last update. No other library counts them.
KEPT = ("agent/_update_target",)

_Q_TABLE = replace(
    TABLE,
    components={
        chain: canonical
        for stored, canonical in _Q_NETWORKS.items()
        for name in (inside + stored for inside in _INSIDE)
        for chain in (
            *(f"{top}/_encoder+{top}/_q_value_layer" for top in (name, f"{name}/_q_network")),
            f"{name}/_sequential_layers",
        )
    },
    optimizers={"_optimizer": "critic_optimizer"},
    branches={},
    tensors={"_update_target/_counter": "update_target/counter"},
)
_NORMALIZER = "_observation_normalizer"
_ATOM_RANGE = (-10.0, 10.0)  # categorical_dqn_agent.py, min_q_value and max_q_value


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # a prefix's name is no evidence
    """Return the recognised agent if a policy is stored under TF-Agents' private attributes.

    Sources in github.com/tensorflow/agents: tf_agents/utils/common.py (`Checkpointer`, `scale_to_spec`: an
    action is the middle of the bounds plus half their distance times tanh),
    tf_agents/agents/ddpg/actor_network.py and critic_network.py (lists of layers as private attributes; the
    action is concatenated with the output of `_observation_layers`), tf_agents/agents/{ddpg,td3,sac,ppo}/
    (the attributes of an agent), tf_agents/networks/actor_distribution_network.py,
    normal_projection_network.py (a mean with tanh and scaling, a standard deviation that is a bias or a
    layer), tf_agents/agents/sac/tanh_normal_projection_network.py (one layer for both, the mean first;
    `SquashToSpecNormal.mode` is tanh, scaled), tf_agents/policies/policy_saver.py (`_all_assets`). Every
    network's default activation is ReLU, and files do not record another one. PPO's policy normalises
    observations with tf_agents/utils/tensor_normalizer.py: epsilon 1e-3 inside the square root, then clipped
    to [-5, 5]; PPO's own examples have tanh. tf_agents/networks/q_network.py (`_encoder`, `_q_value_layer`)
    and categorical_q_network.py (a QNetwork with outputs for each atom of each action), policies/q_policy.py
    and greedy_policy.py: the mode of the logits is the action. policies/categorical_q_policy.py: the best
    action has the largest mean of `np.linspace(min_q_value, max_q_value, num_atoms)`, which no variable
    holds; because these values are equidistant and increase, the best action does not depend on them. A
    Sequential (agents/ddpg/examples/v2/train_eval.py) has the same layers under `_sequential_layers`.

    TD3's and SAC's agents pass the critics' variables to the optimizer in the order of their memory addresses
    (td3_agent.py, `ObjectIdentitySet`), so that a Keras 2.11 optimizer's lists cannot be written for them.
    SAC's makes legacy optimizers of Keras's newer ones.
    """
    binding = _recognize_networks(_drop_keras_names(tree))
    # Layers before the encoder's own, whose activations no file records: a Lambda is not even a variable.
    before = any(INPUT_LAYERS & {step.value for step in path} for path in (*tree.containers, *tree))
    if binding is None or not before:
        return binding
    return binding.refusing_policy("preprocessing layers, whose computation no file records")


def _recognize_networks(tree: Tree) -> RecognizedAgent | None:
    names = {name: path for path, name in _list_names(tree)}
    segments = [tuple(name.split("/")) for name in names]
    if not any({"_actor_network", "_actor_net"} & set(segment[1:3]) for segment in segments):
        return _bind_q_network(tree, segments)
    joined = [path for name, path in names.items() if name.split("/")[-2:-1] == [_JOINED]]
    agent = {step for segment in segments for step in segment}
    certain = not _OF_SAC.isdisjoint(agent)
    # Agents other than SAC only have one projection layer for discrete actions.
    leaves = [tree[path] for path in joined]
    even = all(isinstance(leaf, Leaf) and leaf.shape[-1:] and not leaf.shape[-1] % 2 for leaf in leaves)
    chooses = bool(joined) and not certain and (not even or not (_NOT_SAC | _OF_AGENTS).isdisjoint(agent))
    halved = bool(joined) and not chooses
    if halved and not even:
        return None
    binding = bind(tree, replace(TABLE, joined=halved))
    if binding is None:
        return None
    if chooses:
        binding = binding.choosing(tree)
    for segment, left in _CANNOT.items():
        if any(segment in steps[2:-2] for steps in segments if set(_CRITICS) & set(steps[:2])):
            reasons = (*binding.unplaced.get("critic", ()), left)
            binding = replace(binding, unplaced={**binding.unplaced, "critic": reasons})
    if halved and not certain:
        binding = binding.assuming(_HALVED)
    if any("_value_net" in segment[1:2] for segment in segments):
        binding = replace(binding, facts=binding.facts.lacking(NO_ACTIVATIONS))
    return _add_statistics(binding, names, tree)


def _bind_q_network(tree: Tree, segments: Sequence[tuple[str, ...]]) -> RecognizedAgent | None:
    """Bind a DQN agent, or its policy, or a categorical DQN's, whose atoms are in no file."""
    inside = [segment for segment in segments if "_q_network" in segment[1:3]]
    binding = bind(tree, _Q_TABLE) if inside else None
    if binding is None or not any(part.title == "critic/q1" for part in binding.parts):
        return None
    binding = binding.choosing(tree)
    if any(segment[1:].count("_q_network") > 1 for segment in inside):
        binding = replace(binding, facts=binding.facts._replace(atom_range=_ATOM_RANGE))
    if any("_sequential_layers" in segment for segment in inside):
        binding = replace(binding, facts=binding.facts.lacking(NO_ACTIVATIONS))
    return binding


def _drop_keras_names(tree: Tree) -> Tree:
    """Return an exported policy's tree without Keras's second names for its variables.

    In 0.6 the policy's attributes are stored in a list, `_all_assets/0/ref`, without their names: the
    entry with a policy's layers is `_actor_network`.
    """
    others = [alias.path for aliases in tree.aliases.values() for alias in aliases]
    listed: dict[PathStep, Path] = {
        path[1]: _ACTOR for path in others if path[2:3] == _REF and set(path[3:4]) & _ONLY_POLICIES
    }
    listed |= {path[1]: () for path in others if path[2:3] == _REF and set(path[3:4]) & _ATTRIBUTES}

    def named(path: Path) -> Path:
        kept = listed.get(path[1]) if path[:1] == _ASSETS and path[2:3] == _REF else None
        path = path if kept is None else (*_ASSETS, *kept, *path[3:])
        # A PPO agent's policy is already greedy, so saving its greedy policy wraps it twice.
        wraps = [n for n, step in enumerate(path) if step == _WRAPPED]
        return tuple(step for n, step in enumerate(path) if n not in wraps[1:])

    plain = {
        path: tuple(Alias(named(alias.path), alias.key) for alias in aliases if not _KERAS & set(alias.path))
        for path, aliases in tree.aliases.items()
    }
    return Tree(tree.leaves, plain, tree.containers)


def _list_names(tree: Tree) -> Iterator[tuple[Path, str]]:
    """Yield the tensors under all their names."""
    for path, _ in tree.tensors():
        yield path, tree.names[path]
        yield from ((path, display(alias.path)) for alias in tree.aliases.get(path, ()))


def _add_statistics(binding: RecognizedAgent, names: Mapping[str, Path], tree: Tree) -> RecognizedAgent:
    """Return the binding with the policy's observation statistics."""
    places = [name.partition(f"/{_NORMALIZER}/")[0] for name in names if f"/{_NORMALIZER}/" in name]
    if not places:
        return binding
    statistics = {
        name.split("/")[-2]: leaf
        for name, path in names.items()
        if name.startswith(f"{places[0]}/{_NORMALIZER}/")
        and name.endswith("/0")
        and isinstance(leaf := tree[path], Leaf)
    }
    norm = read_statistics(statistics)
    if norm is None:
        return replace(binding, facts=binding.facts.lacking(NO_STATISTICS))
    return replace(binding, facts=binding.facts.read(_NORMALIZER, norm=norm))


_WHOSE = "TF-Agents"
# Every stack of layers starts with a Flatten, number 0 (networks/utils.py, mlp_layers).
_ACTOR_NAMES = LayerNames("_mlp_layers/{n}")
_SAC_NAMES = LayerNames(
    "_encoder/_postprocessing_layers/{n}", "_projection_networks/_projection_layer", joined=True
)
_CRITIC_NAMES = LayerNames("_joint_layers/{n}")


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the checkpoint that `Checkpointer(agent=..., ...)` of DDPG, TD3 or SAC restores.

    Networks are ActorNetwork or, for a Gaussian policy, ActorDistributionNetwork with a
    TanhNormalProjectionNetwork; CriticNetwork with joint layers only. Optimizers are those of
    `tf.keras.optimizers.legacy`. Raise UnsupportedError for networks that these cannot represent.
    """
    sac, twin = is_gaussian(binding), count_critics(binding) > 1 or is_gaussian(binding)
    rows: list[NetworkRow | SingleTensorRow] = [
        NetworkRow("actor", parse_edge_path("agent/_actor_network"), _SAC_NAMES if sac else _ACTOR_NAMES)
    ]
    if not sac:
        rows.append(NetworkRow("actor_target", parse_edge_path("agent/_target_actor_network"), _ACTOR_NAMES))
    for component, stored in (("critic", "_critic_network"), ("critic_target", "_target_critic_network")):
        for head, end in (("q1", "_1"), ("q2", "_2")) if twin else (("q1", ""),):
            rows.append(
                NetworkRow(f"{component}/{head}", parse_edge_path(f"agent/{stored}{end}"), _CRITIC_NAMES)
            )
    numbers = {"update_target/counter": ("_update_target/_counter", make_number(0, "int64"))}
    if sac:
        numbers["temperature/log_alpha"] = "_log_alpha", make_number(0.0, "float32")
    rows += [
        SingleTensorRow(canonical, parse_edge_path(f"agent/{stored}"), (), default)
        for canonical, (stored, default) in numbers.items()
    ]
    written = WritingTable(
        _WHOSE,
        rows,
        "affine",
        optimizers={
            canonical: parse_edge_path(f"agent/{stored}")
            for stored, canonical in TABLE.optimizers.items()
            if sac or canonical != "temperature_optimizer"
        },
        counters={
            "total_it": parse_edge_path("agent/_train_step_counter"),
            "save_counter": parse_edge_path("save_counter"),
        },
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
        notes=("the optimizers are written for tf.keras.optimizers.legacy",),
    )
    return plan_object_graph(written, binding, agent, settings, LEGACY)
