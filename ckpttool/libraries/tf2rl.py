"""tf2rl's and RLgraph's SAC; keras-rl's DDPG and DQN."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, key
from ckpttool.libraries import schema
from ckpttool.libraries.optimizers_write import LEGACY
from ckpttool.libraries.recognize import LayoutTable, LibraryPlugin, bind
from ckpttool.libraries.schema import LEFT_OPEN, AgentMetadata, RecognizedAgent
from ckpttool.libraries.write import (
    KERAS,
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    is_gaussian,
    make_edge_path,
    parse_edge_path,
    plan_object_graph,
    plan_torch_file,
)
from ckpttool.mapping.rules import Move, Plan, Settings

# Arguments of a tf2rl run, `args.txt` beside its checkpoints; only the environment is used.
#
# Source: github.com/keiohta/tf2rl, tf2rl/misc/prepare_output_dir.py: the command's arguments as JSON. Its
# examples call the environment `env_name`.

_NAME = "args.txt"
_KEYS = ("env_name", "env_id", "env")
# A plain environment id: the part before a colon would be imported.
_ENV = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+")


def list_argument_files(location: str) -> Sequence[str]:
    """Return the arguments file in the checkpoint's folder."""
    return (os.path.join(os.path.dirname(location), _NAME),)


def read_argument_file(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the environment from the arguments, unchanged if there is none."""
    for name in _KEYS:
        leaf = tree.get((key(name),))
        env = plain_id(leaf.value) if isinstance(leaf, ValueLeaf) else None
        if env is not None:
            return replace(binding, facts=binding.facts.read(os.path.basename(file), env=env))
    return binding


def plain_id(value: object) -> str | None:
    """Return the value if it is the plain id of an environment, None otherwise."""
    return value if isinstance(value, str) and _ENV.fullmatch(value) else None


# tf2rl's SAC agents; its TD3 and DDPG have the names of layout td3_tf.
#
# Sources in github.com/keiohta/tf2rl: tf2rl/experiments/trainer.py (`tf.train.Checkpoint(policy=...)`);
# tf2rl/algos/sac.py (CriticQ; until 1.0 also a state value, CriticV); tf2rl/policies/tfp_gaussian_actor.py,
# GaussianActor: an action without noise is max_action times tanh of `out_mean`. Hidden layers are ReLU:
# `base_layers`, in older versions `l1` and `l2`.

TABLE = LayoutTable(
    name="tf2rl",
    title="tf2rl's SAC: actor with out_mean and out_logstd, qf1, qf2 (its TD3 and DDPG are td3_tf)",
    framework="tensorflow",
    components={
        "actor": "actor",
        "qf1": "critic/q1",
        "qf2": "critic/q2",
        "qf1_target": "critic_target/q1",
        "qf2_target": "critic_target/q2",
        "vf": "value",
        "vf_target": "value_target",
    },
    optimizers={
        "actor_optimizer": "actor_optimizer",
        "qf1_optimizer": "critic_optimizer/q1",
        "qf2_optimizer": "critic_optimizer/q2",
        "vf_optimizer": "value_optimizer",
        "alpha_optimizer": "temperature_optimizer",
    },
    counters={"save_counter": "save_counter"},
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-3, lacks=LEFT_OPEN["tf2rl"]),
    rooted=True,
    seen="SAC trained and saved by 0.2.0, 1.0.0 and 1.1.5 under TensorFlow 2.21 with Keras 2",
    branches={"out_logstd": "log_std", "out_log_std": "log_std"},
    tensors={"log_alpha": "temperature/log_alpha"},
)


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # a prefix's name is no evidence
    """Return the recognised agent if the policy's last layer and the critics have these names."""
    ends = {tuple(each.split("/")[-3:-1]) for each in tree.names.values()}
    if ("actor", "out_mean") not in ends or not any("qf1" in each.split("/") for each in tree.names.values()):
        return None
    binding = bind(tree, TABLE)
    return None if binding is None else _drop_alpha(binding, tree)


def _drop_alpha(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding without the variable in which 1.0 and earlier also store exp(log_alpha)."""
    logs = [move.source for move in binding.moves.moves if move.target[-1] == attr("log_alpha")]
    alpha = {(*path[:-1], attr("alpha")) for path in logs} & tree.leaves.keys()
    return replace(binding, consumed=binding.consumed | alpha)


def companions(location: str) -> Sequence[str]:
    """Return the arguments file that the trainer writes beside its checkpoints."""
    return list_argument_files(location)


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the environment from the arguments."""
    return read_argument_file(binding, file, tree)


_WHOSE = "tf2rl"
_MLP = LayerNames("l{n}", "l{n}")
# tf2rl/algos/td3.py, Critic: both Q-functions in one module.
_SECOND = _MLP._replace(first=4)
_DEPTH = 3
_SAC = LayerNames("base_layers/{i}", "out_mean", {"log_std": "out_logstd"})
_Q = LayerNames("base_layers/{i}", "out_layer")


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the checkpoint that the trainer's `tf.train.Checkpoint(policy=agent)` restores.

    A Gaussian policy becomes a SAC of 1.1; others become a TD3, or with one Q-function a DDPG, whose
    classes have three layers each. Optimizers are those of Keras 2 up to 2.10, which tf2rl uses. Raise
    UnsupportedError for networks that its classes cannot represent.
    """
    if is_gaussian(binding):
        return plan_object_graph(_sac(), binding, agent, settings, LEGACY)
    deep = [
        part.title for part in binding.parts if len(part.layers) != _DEPTH and part.component in TABLE_TD3
    ]
    if deep:
        raise UnsupportedError(
            "tf2rl's TD3 and DDPG require networks with three layers", found=", ".join(deep)
        )
    twin = count_critics(binding) > 1
    rows = [NetworkRow(name, parse_edge_path(f"policy/{name}"), _MLP) for name in ("actor", "actor_target")]
    for name in ("critic", "critic_target"):
        rows.append(NetworkRow(f"{name}/q1", parse_edge_path(f"policy/{name}"), _MLP))
        rows += [NetworkRow(f"{name}/q2", parse_edge_path(f"policy/{name}"), _SECOND)] if twin else []
    made = WritingTable(
        _WHOSE,
        rows,
        "tanh",
        optimizers={
            name: parse_edge_path(f"policy/{name}") for name in ("actor_optimizer", "critic_optimizer")
        },
        counters={"save_counter": parse_edge_path("save_counter")}
        | ({"total_it": parse_edge_path("policy/_it")} if twin else {}),
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
    )
    return plan_object_graph(made, binding, agent, settings, LEGACY, "int32")


TABLE_TD3 = frozenset(("actor", "actor_target", "critic", "critic_target"))


def _sac() -> WritingTable:
    return WritingTable(
        _WHOSE,
        [
            NetworkRow("actor", parse_edge_path("policy/actor"), _SAC),
            *(NetworkRow(ours, parse_edge_path(f"policy/{theirs}"), _Q) for theirs, ours in _QS.items()),
            SingleTensorRow("temperature/log_alpha", parse_edge_path("policy/log_alpha"), (), optional=True),
        ],
        "tanh",
        optimizers={
            ours: parse_edge_path(f"policy/{theirs}")
            for theirs, ours in TABLE.optimizers.items()
            if ours != "value_optimizer"
        },
        counters={"save_counter": parse_edge_path("save_counter")},
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
    )


_QS = {theirs: ours for theirs, ours in TABLE.components.items() if theirs.startswith("qf")}


# RLgraph's SAC agent: variables written by `agent.store_model`, TensorFlow 1.
#
# Sources in github.com/rlgraph/rlgraph: rlgraph/graphs/tensorflow_executor.py (`store_model`: a
# tf.train.Saver of everything, replay memory included), rlgraph/agents/sac_agent.py (scopes `policy`,
# `sac-value-network`, the second one's `-1`, `target-`, `log_alpha`),
# rlgraph/components/action_adapters/ (`action-layer`: the mean, then the logarithm of the standard
# deviation), rlgraph/components/distributions/squashed_normal.py (an action without exploration is
# tanh of the mean, scaled from [-1, 1] to the bounds),
# rlgraph/components/neural_networks/value_function.py (`value-function-output`),
# rlgraph/components/neural_networks/sac/sac_networks.py (observation, then action). Layer names come
# from the user's configuration, which also is the only place with the activations; its examples use
# ReLU (rlgraph/tests/configs/sac_agent_for_pendulum.json).

RLGRAPH_TABLE = LayoutTable(
    name="rlgraph",
    title="RLgraph's SAC: policy, sac-value-network, log_alpha",
    framework="tensorflow",
    components={},
    optimizers={},
    counters={"global-timestep": "num_timesteps", "global-training-timestep": "total_it"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-3, lacks=LEFT_OPEN["rlgraph"]),
    seen="SAC built and saved by 0.5.5 under TensorFlow 1.14",
    tensors={"log_alpha": "temperature/log_alpha"},
    joined=True,
)

_VALUE_NETWORKS = {
    f"{prefix}sac-value-network{number}": f"{ours}/{head}"
    for prefix, ours in (("", "critic"), ("target-", "critic_target"))
    for number, head in (("", "q1"), ("-1", "q2"))
}
_HIDDEN, _ADAPTER = "policy/neural-network", "policy/action-adapter-0/action-network"
# The last layer of each network, and the name pattern of a stack's layers: SCOPE/dense/kernel.
_LAST_LAYERS = ("action-layer", "value-function-output")
_KERNEL = re.compile(r"(.+)/([^/]+)/dense/kernel")
_NUMBER = re.compile(r"(\d+)")


def recognize_rlgraph(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # a prefix's name is no evidence
    """Return the recognised agent of variables with the scopes of a SAC agent."""
    matches = [found for each in tree.names.values() if (found := _KERNEL.fullmatch(each))]
    stacks: dict[str, list[str]] = {}
    for match in matches:
        stacks.setdefault(match[1], []).append(match[2])
    if _ADAPTER not in stacks or not any(f"{critic}/dense-stack" in stacks for critic in _VALUE_NETWORKS):
        return None
    policy = [
        f"{stack}/{layer}" for stack in (_HIDDEN, _ADAPTER) for layer in _sort_stack(stacks.get(stack, ()))
    ]
    components = {"+".join(policy): "actor"}
    for critic, ours in _VALUE_NETWORKS.items():
        stack = f"{critic}/dense-stack"
        if stack in stacks:
            components["+".join(f"{stack}/{layer}" for layer in _sort_stack(stacks[stack]))] = ours
    # All other tensors of a network are unplaced.
    components |= {
        "policy": "actor",
        **{c: ours for c, ours in _VALUE_NETWORKS.items() if f"{c}/dense-stack" in stacks},
    }
    binding = bind(tree, replace(RLGRAPH_TABLE, components=components))
    return None if binding is None else _sort_moves(binding, tree, components)


def _sort_moves(binding: RecognizedAgent, tree: Tree, components: Iterable[str]) -> RecognizedAgent:
    """Return the binding with its moves in layer order, which the file does not preserve."""
    layers = [layer for names in components for layer in names.split("+")]
    ranks = {layer: number for number, layer in enumerate(layers)}

    def rank(move: Move) -> int:
        return ranks.get(tree.names[move.source].rpartition("/dense/")[0], len(ranks))

    moves = tuple(sorted(binding.moves.moves, key=rank))
    return replace(binding, moves=replace(binding.moves, moves=moves))


def _sort_stack(layers: Iterable[str]) -> list[str]:
    """Return a stack's layers sorted by name, numbers as numbers; the last layer is last."""

    def place(layer: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        parts = _NUMBER.split(layer)
        return layer in _LAST_LAYERS, [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]

    return sorted(layers, key=place)


RLGRAPH = LibraryPlugin(RLGRAPH_TABLE, recognize_rlgraph)


# keras-rl and keras-rl2: a DDPG agent's actor and critic, both files or one; a DQN's single file.
#
# Source: rl/agents/ddpg.py in github.com/keras-rl/keras-rl (`save_weights`, `select_action`: the
# actor's output is the action, without clipping or scaling), github.com/taylormcnally/keras-rl2
# likewise. Networks are the user's own Keras models: a file contains their layers, but not the
# activations or how the critic concatenates its two inputs (in examples/ddpg_pendulum.py the action
# comes first). The defaults are those of that example: ReLU, a linear last layer.
#
# rl/agents/dqn.py, sarsa.py and cem.py save one model (`NAME.h5f`): the largest of its outputs is the
# action (rl/policy.py, GreedyQPolicy). With `enable_dueling_network` it has one output more than actions,
# which an environment shows: the state's value comes first. Of its three types the largest value is that of
# the same action; `avg`, the default, subtracts the mean of the advantages.

KERAS_RL_TABLE = LayoutTable(
    name="keras_rl",
    title="keras-rl's DDPG: NAME_actor.h5f, NAME_critic.h5f, or one of them; DQN, SARSA, CEM: NAME.h5f",
    framework="tensorflow",
    components={"actor": "actor", "critic": "critic/q1"},
    optimizers={},
    counters={},
    facts=AgentMetadata(
        head="identity",
        hidden="relu",
        epsilon=1e-3,
        lacks=LEFT_OPEN["keras_rl"],
    ),
    seen="DDPG on Pendulum from a public run; DDPG saved by keras-rl2 1.0.5 under TensorFlow 2.12",
)

_MEMBERS = ("actor", "critic")
# The order of the inputs of DDPG's critic depends on the user's model.
_NEVER_RUN = frozenset(("critic",))
KERAS_RL_SUFFIX = ".h5f"
_ONE_FILE = re.compile(r".*_(actor|critic)\.h5f")
_ORDER = "the order in which the model concatenates observation and action"


def recognize_keras_rl(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of files with keras-rl's names; one file is a single network."""
    one = _ONE_FILE.fullmatch(name)
    if one is not None:
        return _disable_critic(_bind_single(tree, one[1]))
    tops = {str(path[0].value) for path in tree if path}
    if not name.endswith(KERAS_RL_SUFFIX):
        return None
    return _disable_critic(bind(tree, KERAS_RL_TABLE)) if tops == set(_MEMBERS) else _bind_q_network(tree)


def _bind_q_network(tree: Tree) -> RecognizedAgent | None:
    """Bind a model whose outputs are those of discrete actions; None for other layers than a dense chain."""
    binding = _bind_single(tree, "critic")
    if binding is None or binding.unplaced or len(binding.parts) != 1:
        return None
    moved = {move.source for move in binding.moves.moves}
    kernels = [tree[move.source] for move in binding.moves.moves if move.target[-1] == attr("kernel")]
    wide = isinstance(kernels[-1], Leaf) and kernels[-1].shape[1] > 1
    if not wide or any(path not in moved for path, _ in tree.tensors()):
        return None
    binding = replace(binding.choosing(tree), evidence="one Q-network")
    return replace(binding, facts=binding.facts.lacking(schema.DUELING))


def _bind_single(tree: Tree, component: str) -> RecognizedAgent | None:
    """Bind one network's layers as if they were under its component."""

    def below(path: Path) -> Path:
        return (key(component), *path)

    deeper = Tree({below(path): leaf for path, leaf in tree.items()})
    binding = bind(deeper, KERAS_RL_TABLE)
    if binding is None:
        return None
    moves = tuple(Move(move.source[1:], move.target, move.rule) for move in binding.moves.moves)
    return replace(binding, moves=replace(binding.moves, moves=moves), evidence=f"one {component} file")


def _disable_critic(binding: RecognizedAgent | None) -> RecognizedAgent | None:
    """Return the binding without a runnable critic: the order of its inputs is unknown."""
    if binding is None or not any(part.component == "critic" for part in binding.parts):
        return binding
    left = (*binding.unplaced.get("critic", ()), _ORDER)
    return replace(binding, unplaced={**binding.unplaced, "critic": left})


def plan_keras_rl(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan both files of a DDPGAgent, with Keras's own layer names.

    The models are the user's own: notes state the action map and the order of the critic's inputs.
    Raise UnsupportedError for two Q-functions and for layers other than dense ones.
    """
    names = LayerNames("dense_{n}", "dense_{n}")
    first = sum(len(part.layers) for part in binding.parts if part.component == "actor") + 1
    facts = binding.facts
    made = WritingTable(
        "keras-rl",
        [
            NetworkRow("actor", (key("actor"),), names),
            NetworkRow("critic/q1", (key("critic"),), names._replace(first=first)),
        ],
        "",
        hidden="",
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
        notes=(
            f"build the models with {', '.join(dict.fromkeys(facts.activations or (facts.hidden,)))} in "
            f"hidden layers, and the action map ({facts.head}) in the actor",
            "build the critic with the observation before the action",
        ),
    )
    return replace(plan_torch_file(made, binding, agent, settings), containers={})


KERAS_RL = LibraryPlugin(KERAS_RL_TABLE, recognize_keras_rl, plan_keras_rl, NEVER_RUN=_NEVER_RUN)
