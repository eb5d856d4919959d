"""The TD3 authors' own files: PREFIX_actor, PREFIX_critic and their optimizers, layers l1 to l6.

Source: github.com/sfujim/TD3, TD3.py, `TD3.save` and the classes Actor and Critic: the critic keeps Q1
in l1..l3 and Q2 in l4..l6; targets and the update counter are not saved.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool.layouts import adam
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Path, key
from ckpttool.tree import Tree

TABLE = Table(
    name="fujimoto",
    title="TD3 authors' files: PREFIX_actor, PREFIX_critic, ... (or one of them)",
    framework="torch",
    components={"actor": "actor", "critic": "critic"},
    optimizers={"actor_optimizer": "actor_optimizer", "critic_optimizer": "critic_optimizer"},
    counters={},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5),
    optimizer=adam.from_torch,
    seen="TD3 on HalfCheetah by two seeds of a public run",
)

_LAYER = re.compile(r"l[1-9]\.(weight|bias)")


def recognise(tree: Tree, name: str) -> Binding | None:
    """Return the way to the canonical agent of a set of files, or of one actor or critic file.

    A set has layers named by the authors; one file tells what it is by its name (`..._critic`), and
    without such a name six layers are a critic, three an actor.
    """
    stored = [str(step.value) for path in tree for step in path if _LAYER.fullmatch(str(step.value))]
    if not stored:
        return None
    first = next(iter(tree))
    if len(first) == 1 and all(_LAYER.fullmatch(str(path[0].value)) for path in tree):
        return _single(tree, _component(stored, name))
    if any(path[0].value in ("total_it", "actor_target") for path in tree if path):
        return None
    return bind(tree, TABLE)


def _component(stored: list[str], name: str) -> str:
    if "critic" in name or "l4.weight" in stored:
        return "critic"
    return "actor"


def _single(tree: Tree, component: str) -> Binding | None:
    top = key(component)

    def under(path: Path) -> Path:
        return (top, *path)

    wrapped = Tree(
        {under(path): leaf for path, leaf in tree.items()},
        {
            under(path): tuple(alias._replace(path=under(alias.path)) for alias in aliases)
            for path, aliases in tree.aliases.items()
        },
    )
    binding = bind(wrapped, TABLE)
    if binding is None:
        return None
    moves = tuple(replace(move, source=move.source[1:]) for move in binding.moves.moves)
    return replace(
        binding, moves=replace(binding.moves, moves=moves), evidence=f"one {component} file with l1, l2, ..."
    )
