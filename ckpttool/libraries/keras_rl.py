"""keras-rl and keras-rl2: a DDPG agent's actor and critic, both files or one; a DQN's single file.

Source: rl/agents/ddpg.py in github.com/keras-rl/keras-rl (`save_weights`, `select_action`: the
actor's output is the action, without clipping or scaling), github.com/taylormcnally/keras-rl2
likewise. Networks are the user's own Keras models: a file contains their layers, but not the
activations or how the critic concatenates its two inputs (in examples/ddpg_pendulum.py the action
comes first). The defaults are those of that example: ReLU, a linear last layer.

rl/agents/dqn.py, sarsa.py and cem.py save one model (`NAME.h5f`): the largest of its outputs is the
action (rl/policy.py, GreedyQPolicy). With `enable_dueling_network` it has one output more than actions,
which an environment shows: the state's value comes first. Of its three types the largest value is that of
the same action; `avg`, the default, subtracts the mean of the advantages.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.tree import Leaf, Path, Tree, attr, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import LEFT_OPEN, AgentMetadata, RecognizedAgent
from ckpttool.libraries.write import (
    KERAS,
    LayerNames,
    NetworkRow,
    WritingTable,
    make_edge_path,
    plan_torch_file,
)
from ckpttool.mapping.rules import Move, Plan, Settings

TABLE = LayoutTable(
    name="keras_rl",
    plays=("DDPG", "DQN", "SARSA", "CEM"),
    writes=("DDPG",),
    title="keras-rl's DDPG: NAME_actor.h5f, NAME_critic.h5f, or one of them; DQN, SARSA, CEM: NAME.h5f",
    framework="tensorflow",
    components={"actor": "actor", "critic": "critic/q1"},
    user_written=True,
    facts=AgentMetadata(
        head="identity",
        hidden="relu",
        epsilon=1e-3,
        lacks=LEFT_OPEN["keras_rl"],
    ),
    seen="DDPG on Pendulum from a public run; DDPG, DQN saved by keras-rl2 1.0.5 under TensorFlow 2.12",
)

_MEMBERS = ("actor", "critic")
# The order of the inputs of DDPG's critic depends on the user's model.
NEVER_RUN = frozenset(("critic",))
SUFFIX = ".h5f"
_ONE = deferred.compile(r".*_(actor|critic)\.h5f")
_ORDER = "the order in which the model concatenates observation and action"


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of files with keras-rl's names; one file is a single network."""
    one = _ONE.fullmatch(name)
    if one is not None:
        return _disable_critic(_bind_single(tree, one[1]))
    tops = {str(path[0].value) for path in tree if path}
    if not name.endswith(SUFFIX):
        return None
    return _disable_critic(bind(tree, TABLE)) if tops == set(_MEMBERS) else _bind_q_network(tree)


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
    binding = bind(deeper, TABLE)
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


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan both files of a DDPGAgent, with Keras's own layer names.

    The models are the user's own: notes state the action map and the order of the critic's inputs.
    Raise UnsupportedError for two Q-functions and for layers other than dense ones.
    """
    names = LayerNames("dense_{n}")
    first = sum(len(part.layers) for part in binding.parts if part.component == "actor") + 1
    facts = binding.facts
    actor, critic = (", ".join(dict.fromkeys(facts.activations_of(name))) for name in ("actor", "critic"))
    hidden = actor if actor == critic else f"{actor} (actor) and {critic} (critic)"
    table = WritingTable(
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
            f"build the models with {hidden} in hidden layers, and the action map ({facts.head}) "
            "in the actor",
            "build the critic with the observation before the action",
        ),
    )
    return replace(plan_torch_file(table, binding, agent, settings), containers={})
