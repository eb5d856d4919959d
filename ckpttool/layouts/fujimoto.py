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

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import adam, canonical
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.renamed import action_bounds, dense_parts, named, one_number_each, scaled_tanh
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.tree import Container, Tree

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
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5, lacks=("the action bounds",)),
    optimizer=adam.from_torch,
    seen="TD3 on HalfCheetah, two seeds of a public run; split critics on BipedalWalker and LunarLander",
)

_LAYER = re.compile(r"l[1-9]\.(weight|bias)")
_MORE = frozenset(
    ("total_it", "actor_target", "critic_target", "value", "value_target", "normalizer", "log_alpha")
)
_MEMBER = re.compile(r"actor|cri?tic")
_STATISTICS = "the mean and std of the dataset that observations were normalised with"
_DICT, _ORDERED = Container("dict"), Container("OrderedDict")


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
    UnsupportedError for networks that their classes cannot be.
    """
    actors, critics = (
        dense_parts(binding, c, "the TD3 authors' program") for c in canonical.OPTIMIZED.values()
    )
    if len(actors) != 1 or len(critics) not in (1, 2):
        raise UnsupportedError(
            "the TD3 authors' program saves one actor and one or two Q-functions",
            found=", ".join(part.title for part in (*actors, *critics)),
        )
    one_number_each(critics, agent, "the TD3 authors' program")
    moves: list[Move] = []
    containers: dict[Path, Container] = {(): _DICT}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    consumed = [path for path in agent if path[0] == attr("actor") and canonical.mapped_by_sidecar(path)]
    for name, parts in (("actor_optimizer", actors), ("critic_optimizer", critics)):
        top, first, mine = key(canonical.OPTIMIZED[name]), 1, list[Move]()
        for part in parts:
            numbers = range(first, first + len(part.layers))
            mine += named(part, agent, top, [f"l{number}" for number in numbers])
            first = numbers.stop
        state = adam.ToTorch(name, mine, agent, told.get(name, {}), binding.defaults)
        if any(path[0] == attr(name) for path in agent):
            moves += [*mine, *state.moves()]
            added |= state.added()
            containers |= {(top,): _ORDERED} | state.containers()
            assumed += state.assumed()
            missing += state.missing()
            consumed += state.consumed()
        else:
            moves += mine
            containers[top,] = _ORDERED
    return Plan(
        tuple(moves),
        added,
        containers,
        tuple(assumed),
        tuple(missing),
        tuple(consumed),
        _notes(binding, agent),
    )


def _max_action(facts: Facts, agent: Tree) -> bool:
    """Say whether the agent's actions are one number times tanh."""
    bounds = action_bounds(agent)
    if facts.head == "tanh" or bounds is None:
        return facts.head == "tanh"
    low, high = bounds
    even = all(value == high[0] for value in high) and all(value == -high[0] for value in low)
    return even and scaled_tanh(facts, agent) is True


def _notes(binding: Binding, agent: Tree) -> tuple[str, ...]:
    """Say what the authors' classes do that this agent did not, and what they do without being told."""
    notes = []
    facts = binding.facts
    if {part.component for part in binding.parts} & {"actor_target", "critic_target"}:
        notes.append("targets are not saved by the TD3 authors' program: on loading they are copies")
    absent = [name for name in canonical.OPTIMIZED if not any(path[0] == attr(name) for path in agent)]
    if absent:
        notes.append(f"the source has no {', '.join(absent)}, whose file `TD3.load` opens")
    if not _max_action(facts, agent):
        notes.append(f"the authors' Actor gives max_action * tanh, this agent's action map is {facts.head}")
    if any(name != "relu" for name in facts.activations or (facts.hidden,)):
        notes.append("the authors' classes have ReLU after hidden layers, this agent has not")
    return tuple(notes)
