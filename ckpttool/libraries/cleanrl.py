"""CleanRL's files: a tuple of state_dicts (actor, qf1, qf2), or one state_dict of a PPO, DQN or C51 agent.

Source: github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action.py, ddpg_continuous_action.py,
sac_continuous_action.py (classes Actor, QNetwork, SoftQNetwork; `torch.save((actor.state_dict(),
...))`): ReLU, and an action is tanh of the last layer times the buffer action_scale plus
action_bias. Targets and optimizers are not saved. cleanrl/ppo_continuous_action.py (class Agent):
tanh between layers, the mean itself clipped to the bounds by ClipAction; NormalizeObservation's
statistics are not saved. cleanrl/dqn.py (`q_network.state_dict()`), c51.py (`{"model_weights":
q_network.state_dict(), "args": vars(args)}`; the buffer `atoms` has the values of the atoms, the last layer
the atoms of each action together) and ppo.py (class Agent): networks in `network`, or `actor` and `critic`.
dqn_atari.py, c51_atari.py and ppo_atari.py: `network` starts with convolutions on [4, 84, 84] divided by 255,
with strides 4, 2 and 1; ppo_atari's `actor` and `critic` are one layer each after it.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, index, key
from ckpttool.libraries import sb3, schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    AgentMetadata,
    EncoderInput,
    PolicyEncoder,
    RecognizedAgent,
    make_float32_tensor,
    require_action_bounds,
)
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    has_q_policy,
    has_value_network,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

_MAP = ("action_scale", "action_bias")

TABLE = LayoutTable(
    name="cleanrl",
    plays=("TD3", "DDPG", "SAC", "PPO", "DQN", "C51"),
    writes=("TD3", "DDPG", "SAC", "PPO", "DQN", "C51"),
    title="CleanRL's TD3, DDPG, SAC: a tuple of state_dicts; PPO, DQN, C51: one of them",
    framework="torch",
    components={"0": "actor", "1": "critic/q1", "2": "critic/q2"},
    # sac_continuous_action.py: LOG_STD_MIN, LOG_STD_MAX, the range of a tanh.
    facts=AgentMetadata(
        head="affine",
        hidden="relu",
        epsilon=1e-5,
        distribution=schema.GAUSSIAN._replace(limits=(-5.0, 2.0), limited="tanh"),
    ),
    branches=schema.LOG_STD,
    tensors={f"0/{name}": f"actor/{name}" for name in _MAP},
)
_PPO = replace(
    TABLE,
    components={"actor_mean": "actor", "critic": "value"},
    facts=AgentMetadata(
        "clip", "tanh", 1e-5, lacks=schema.LEFT_OPEN["cleanrl ppo"], distribution=schema.GAUSSIAN
    ),
    branches={},
    tensors={"actor_logstd": "actor/log_std"},
)

# Agents with discrete actions; the suffix of the library's files is the evidence for these names.
_SUFFIX = ".cleanrl_model"
_DISCRETE = replace(
    TABLE, facts=AgentMetadata(head="argmax", hidden="relu", epsilon=1e-5), branches={}, tensors={}
)
_DQN = replace(_DISCRETE, components={"network": "critic/q1"})
_C51 = replace(
    _DISCRETE,
    components={"model_weights/network": "critic/q1"},
    tensors={"model_weights/atoms": "critic/q_support"},
)
_CATEGORICAL = replace(
    _DISCRETE,
    components={"actor": "actor", "critic": "value"},
    facts=AgentMetadata(head="argmax", hidden="tanh", epsilon=1e-5, distribution=schema.CATEGORICAL),
)
_ARGUMENTS, _WEIGHTS = key("args"), key("model_weights")

# What ppo_atari's Agent has, and no other.
_SHARED = ("network.0", "actor", "critic")

# The last layer of an Actor: TD3's and DDPG's, SAC's.
_LAST = ("fc_mu.weight", "fc_mean.weight")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a tuple that begins with CleanRL's Actor, or of another agent's dict."""
    if (_WEIGHTS, key("atoms")) in tree and (_WEIGHTS, key("network.0.weight")) in tree:
        return _bind_c51(tree)
    if name.endswith(_SUFFIX) and {(key(f"{head}.weight"),) for head in _SHARED} <= tree.keys():
        return _bind_shared(tree)
    if name.endswith(_SUFFIX) and (key("network.0.weight"),) in tree:
        binding = bind(tree, _DQN)
        return None if binding is None else _add_image_encoder(binding, tree, ()).choosing(tree)
    if name.endswith(_SUFFIX) and {(key("actor.0.weight"),), (key("critic.0.weight"),)} <= tree.keys():
        return bind(tree, _CATEGORICAL)
    if (key("actor_logstd"),) in tree and (key("actor_mean.0.weight"),) in tree:
        return bind(tree, _PPO)
    if not any((index(0), key(last)) in tree for last in _LAST):
        return None
    return bind(tree, TABLE)


_CONVOLUTIONS = tuple(f"network.{number}" for number in (0, 2, 4))
_DENSE = ("network.7", "network.9")
_IMAGES = (4, 84, 84)
_ENCODER = "image encoder (observations [4, 84, 84] divided by 255; strides 4, 2, 1; ReLU)"
_ASSUMED = f"{_ENCODER}: default of library cleanrl"


def _bind_shared(tree: Tree) -> RecognizedAgent | None:
    """Return the recognised agent of ppo_atari.py, whose policy and value share the network of images."""
    component = {path: key("value" if str(path[0].value).startswith("critic.") else "actor") for path in tree}
    leaves = {(title, *path): tree[path] for path, title in component.items()}
    table = replace(_CATEGORICAL, components={"actor": "actor", "value": "value"}, facts=_IMAGE_FACTS)
    binding = bind(Tree(leaves), table)
    if binding is None:
        return None
    images = tuple(name.removeprefix("actor/") for name in binding.unplaced.get("actor", ()))
    binding = replace(binding.moved(lambda path: path[1:]), unplaced={**binding.unplaced, "actor": images})
    binding = _add_image_encoder(binding, tree, ())
    return binding.refused("value", "the network of images that it shares with the policy")


_IMAGE_FACTS = _CATEGORICAL.facts._replace(hidden="relu")


def _add_image_encoder(binding: RecognizedAgent, tree: Tree, root: Path) -> RecognizedAgent:
    """Return the binding with the convolutions of `network`, if it starts with those, as an encoder."""
    acting = next((part for part in binding.parts if part.acts or part.component == "critic"), None)
    paths = {
        f"{module}.{name}": (*root, key(f"{module}.{name}"))
        for module in (*_CONVOLUTIONS, _DENSE[0])
        for name in ("weight", "bias")
    }
    leaves = {name: leaf for name, path in paths.items() if isinstance(leaf := tree.get(path), Leaf)}
    modules = {str(path[-1].value).rpartition(".")[0] for path in tree if path[:-1] == root}
    more = {name for name in modules if name.startswith("network.")} - {*_CONVOLUTIONS, *_DENSE}
    if acting is None or len(leaves) < len(paths) or more:
        return binding
    kernels = [leaves[f"{module}.weight"].shape for module in (*_CONVOLUTIONS, _DENSE[0])]
    if not sb3.fits_nature_encoder(_IMAGES, kernels):
        return binding
    moves = tuple(sb3.move_encoder(acting.component, schema.OBSERVATION, _CONVOLUTIONS, paths))
    front = PolicyEncoder(
        (EncoderInput(schema.OBSERVATION, _IMAGES, 1 / 255, sb3.NATURE_STRIDES),),
        moves=moves,
        covers=frozenset(tree.names[move.source] for move in moves),
        assumed=(_ASSUMED,),
    )
    return replace(binding, fronts={acting.component: front})


def _bind_c51(tree: Tree) -> RecognizedAgent | None:
    """Return the recognised agent of C51: as many actions as the last layer has groups of atoms."""
    binding = bind(tree, _C51)
    atoms = schema.read_numbers(tree[_WEIGHTS, key("atoms")])
    if binding is None or not atoms:
        return None
    binding = _add_image_encoder(binding, tree, (_WEIGHTS,))
    binding = binding.choosing(tree, "atoms", atoms, len(atoms), "model_weights/atoms")
    facts = binding.facts
    env = tree.get((_ARGUMENTS, key("env_id")))
    if isinstance(env, ValueLeaf) and (plain := schema.plain_id(env.value)) is not None:
        facts = facts.read("args", env=plain)
    rest_of = frozenset(path for path in tree if path[0] == _ARGUMENTS)
    return replace(binding, facts=facts, consumed=binding.consumed | rest_of)


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the tuple, or the one state_dict, that CleanRL's own classes load strictly.

    Raise UsageError if the action bounds are unknown, which are two of the actor's buffers in TD3, DDPG and
    SAC, and UnsupportedError for networks or an action map that CleanRL's classes cannot represent.
    """
    if has_q_policy(binding):
        return plan_torch_file(_make_q_table(binding), binding, agent, settings)
    if has_value_network(binding):
        return plan_torch_file(_make_ppo_table(binding), binding, agent, settings)
    soft = is_gaussian(binding)
    names = LayerNames("fc{n}", "fc_mean", {"log_std": "fc_logstd"}) if soft else LayerNames("fc{n}", "fc_mu")
    rows: list[NetworkRow | SingleTensorRow] = [
        SingleTensorRow(f"actor/{name}", (index(0), key(name))) for name in _MAP
    ]
    rows.append(NetworkRow("actor", (index(0),), names))
    qs = (1, 2)[: count_critics(binding)]
    rows += [NetworkRow(f"critic/q{n}", (index(n),), LayerNames("fc{n}")) for n in qs]
    writing = WritingTable(
        "CleanRL",
        rows,
        "affine",
        depth=3,
        needs=("actor", "critic"),
        containers={(): Container("tuple")},
    )
    file_plan = plan_torch_file(writing, binding, agent, settings)
    require_action_bounds(binding.facts, agent, "CleanRL's actor")
    return file_plan


_NAMED = f"name the file *{_SUFFIX}: its names alone are no evidence of CleanRL"


def _make_ppo_table(binding: RecognizedAgent) -> WritingTable:
    """Return the table of ppo.py's Agent, or of ppo_continuous_action.py's."""
    discrete = binding.facts.head == "argmax"
    policy = "actor.{s}" if discrete else "actor_mean.{s}"
    rows: list[NetworkRow | SingleTensorRow] = [
        NetworkRow("value", (), LayerNames("critic.{s}")),
        NetworkRow("actor", (), LayerNames(policy)),
    ]
    if not discrete:
        rows.append(SingleTensorRow("actor/log_std", (key("actor_logstd"),), (1, -1)))
    return WritingTable(
        "CleanRL",
        rows,
        "argmax" if discrete else "clip",
        hidden="tanh",
        depth=3,
        needs=("actor", "value"),
        notes=(_NAMED,) if discrete else (),
    )


def _make_q_table(binding: RecognizedAgent) -> WritingTable:
    """Return the table of dqn.py's QNetwork, or of c51.py's with the arguments that its evaluation reads."""
    support = binding.facts.choices.support if binding.facts.choices is not None else ()
    entry = (_WEIGHTS,) if support else ()
    rows: list[NetworkRow | SingleTensorRow] = [NetworkRow("critic/q1", entry, LayerNames("network.{s}"))]
    arguments: dict[str, float | str] = {}
    if support:
        atoms = replace(make_float32_tensor(support), role="buffer")
        rows.append(SingleTensorRow("critic/q_support", (_WEIGHTS, key("atoms")), default=atoms))
        arguments = {"n_atoms": len(support), "v_min": support[0], "v_max": support[-1]}
    if support and binding.facts.env is not None:
        arguments["env_id"] = binding.facts.env
    return WritingTable(
        "CleanRL",
        rows,
        "argmax",
        depth=3,
        needs=("critic",),
        values=False,
        constants={(_ARGUMENTS, key(name)): ValueLeaf(value) for name, value in arguments.items()},
        containers={(_ARGUMENTS,): Container("dict")} if support else {},
        notes=() if support else (_NAMED,),
        scores=("values", "atoms"),
    )
