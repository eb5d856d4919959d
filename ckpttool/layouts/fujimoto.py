"""The TD3 authors' own files: PREFIX_actor, PREFIX_critic and their optimizers, layers l1 to l6.

Source: github.com/sfujim/TD3, TD3.py, `TD3.save` and the classes Actor and Critic: an action is max_action
(one number) times tanh; the critic keeps Q1 in l1..l3 and Q2 in l4..l6; targets and the update counter are
not saved. In DDPG.py the critic's l2 takes the action. github.com/sfujim/TD3_BC, main.py, normalises
observations with the dataset's mean and std, which it does not save. Copies of the program keep two critics
in files of their own (`_critic_1`) and save the targets.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.writing import Names, Network, Writing, written
from ckpttool.leaf import attr, key
from ckpttool.ledger import NO_BOUNDS, unknown
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Tree

# `crtic` is how one much-copied program spells it.
_SPLIT = {f"{name}{n}": f"q{n}" for name in ("critic_", "crtic_", "critic") for n in (1, 2)}

TABLE = Table(
    name="fujimoto",
    title="TD3 authors' files: PREFIX_actor, PREFIX_critic, ... (or one of them)",
    framework="torch",
    components={
        "actor": "actor",
        "critic": "critic",
        "actor_target": "actor_target",
        "critic_target": "critic_target",
        **{theirs: f"critic/{q}" for theirs, q in _SPLIT.items()},
        **{f"{theirs}_target": f"critic_target/{q}" for theirs, q in _SPLIT.items()},
    },
    optimizers={
        "actor_optimizer": "actor_optimizer",
        "critic_optimizer": "critic_optimizer",
        **{f"{theirs}_optimizer": f"critic_optimizer/{q}" for theirs, q in _SPLIT.items()},
    },
    counters={},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5, lacks=(NO_BOUNDS,)),
    optimizer=optimizers.from_torch,
    late=True,
    seen="TD3 on HalfCheetah, two seeds of a public run; split critics on BipedalWalker and LunarLander",
)

# What makes the targets that the files lack (TD3.py, `load`: actor_target = copy.deepcopy(actor)).
COPIES_TARGETS = "the authors' load()"
_LAYER = re.compile(r"l[1-9]\.(weight|bias)")
_MORE = frozenset(
    ("total_it", "actor_target", "critic_target", "value", "value_target", "normalizer", "log_alpha")
)
_MEMBER = re.compile(r"actor|cri?tic")
_STATISTICS = unknown(
    "observation statistics", "the mean and std of the dataset that observations were normalised with"
)


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
        return _told(_single(tree, _component(stored, name)), name)
    top = {str(path[0].value) for path in tree if path}
    if top & _MORE and not top & _SPLIT.keys():
        return None  # one dict with targets and what else an agent has: td3_torch
    return _told(bind(tree, TABLE), name)


def _told(binding: Binding | None, name: str) -> Binding | None:
    """Return the binding with what the file's name says: TD3_BC's agents need statistics."""
    if binding is None or not name.startswith("TD3_BC"):
        return binding
    return replace(binding, facts=binding.facts.lacking(_STATISTICS))


def _component(stored: list[str], name: str) -> str:
    members = _MEMBER.findall(name)
    if members:
        return "actor" if members[-1] == "actor" else "critic"
    return "critic" if "l4.weight" in stored else "actor"


def _single(tree: Tree, component: str) -> Binding | None:
    binding = bind(tree.under((key(component),)), TABLE)
    if binding is None:
        return None
    evidence = f"one {component} file with l1, l2, ..."
    return replace(binding.moved(lambda path: path[1:]), evidence=evidence)


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: four files that the authors' `TD3.load` takes.

    Targets, counters, statistics and a Gaussian's second head have no place there and stay behind. Raise
    UnsupportedError for networks or an action map that their classes cannot be.
    """
    heads = {part.title: len(part.layers) for part in binding.parts if part.component == "critic"}
    rows = [Network("actor", (key("actor"),), _LAYERS)]
    first = 1
    for number in (1, 2):
        title = f"critic/q{number}"
        if title in heads:
            rows.append(Network(title, (key("critic"),), _LAYERS._replace(first=first)))
            first += heads[title]
    writing = Writing(
        "the TD3 authors' program",
        rows,
        "tanh",
        optimizers={name: (key(name),) for name in canonical.OPTIMIZED},
        needs=("actor", "critic"),
        late=True,
        notes=_notes(binding, agent),
    )
    return written(writing, binding, agent, told)


_LAYERS = Names("l{n}", "l{n}")


def _notes(binding: Binding, agent: Tree) -> tuple[str, ...]:
    """Say what `TD3.load` does without, and what it cannot do without."""
    notes = []
    if {part.component for part in binding.parts} & {"actor_target", "critic_target"}:
        notes.append("on loading, targets are copies of the online networks")
    absent = [name for name in canonical.OPTIMIZED if not any(path[0] == attr(name) for path in agent)]
    if absent:
        notes.append(f"the source has no {', '.join(absent)}, whose file `TD3.load` opens")
    return tuple(notes)
