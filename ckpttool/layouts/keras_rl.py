"""keras-rl and keras-rl2: the weights of a DDPG agent's actor and critic, both files or one of them.

Source: rl/agents/ddpg.py in github.com/keras-rl/keras-rl (`save_weights`, `select_action`: the actor's output
is the action, nothing limits or scales it), github.com/taylormcnally/keras-rl2 likewise. Networks are the
user's own Keras models: a file has their layers, but neither activations nor how the critic joins its two
inputs (in examples/ddpg_pendulum.py the action comes first). Habits are those of that example: ReLU, a linear
last layer.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool.layouts import adam
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Path, key
from ckpttool.mapping.report import Move
from ckpttool.tree import Tree

TABLE = Table(
    name="keras_rl",
    title="keras-rl's DDPG: NAME_actor.h5f and NAME_critic.h5f, or one of them",
    framework="tensorflow",
    components={"actor": "actor", "critic": "critic/q1"},
    optimizers={},
    counters={},
    facts=Facts(
        head="identity",
        hidden="relu",
        epsilon=1e-3,
        lacks=("the activations", "what the model makes of its last layer"),
    ),
    optimizer=adam.from_keras,
    seen="DDPG on Pendulum of a public run; DDPG saved by keras-rl2 1.0.5 under TensorFlow 2.12",
)

_MEMBERS = ("actor", "critic")
SUFFIX = ".h5f"
_ONE = re.compile(r".*_(actor|critic)\.h5f")
_ORDER = "the order in which the model joins observation and action"


def recognise(tree: Tree, name: str) -> Binding | None:
    """Return the way to the canonical agent of files that keras-rl called so; one is a network alone."""
    one = _ONE.fullmatch(name)
    if one is not None:
        return _told(_single(tree, one[1]))
    tops = {str(path[0].value) for path in tree if path}
    return _told(bind(tree, TABLE)) if name.endswith(SUFFIX) and tops == set(_MEMBERS) else None


def _single(tree: Tree, component: str) -> Binding | None:
    """Bind one network's layers as if they stood below its component."""

    def below(path: Path) -> Path:
        return (key(component), *path)

    deeper = Tree({below(path): leaf for path, leaf in tree.items()})
    binding = bind(deeper, TABLE)
    if binding is None:
        return None
    moves = tuple(Move(move.source[1:], move.target, move.rule) for move in binding.moves.moves)
    return replace(binding, moves=replace(binding.moves, moves=moves), evidence=f"one {component} file")


def _told(binding: Binding | None) -> Binding | None:
    """Return the binding without a critic that could be run: nobody knows what it sees first."""
    if binding is None or not any(part.component == "critic" for part in binding.parts):
        return binding
    left = (*binding.unplaced.get("critic", ()), _ORDER)
    return replace(binding, unplaced={**binding.unplaced, "critic": left})
