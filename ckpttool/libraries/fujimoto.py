"""The TD3 authors' code (sfujim/TD3): files of one agent with a common prefix."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.sidecar import STATISTICS_UNKNOWN
from ckpttool.core.tree import Tree, attr, key
from ckpttool.libraries import schema
from ckpttool.libraries.recognize import LayoutTable, LibraryPlugin
from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent
from ckpttool.mapping.rules import Plan, Settings

# `crtic` is the spelling in a widely copied program.
_SPLIT = {f"{name}{n}": f"q{n}" for name in ("critic_", "crtic_", "critic") for n in (1, 2)}

# Buffers of an actor's class with the map from tanh to the action, as CleanRL's has them.
_SCALES = ("action_scale", "max_action", "action_limit", "act_limit", "action_bound")
ACTION_MAP = {
    **dict.fromkeys(
        (f"actor/{name}" for name in _SCALES),
        "actor/action_scale",
    ),
    "actor/action_bias": "actor/action_bias",
}


def add_action_map(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the action map in an actor's buffers, which a target actor repeats."""
    targets = {move.target for move in binding.moves.moves}
    if (attr("actor"), attr("action_scale")) not in targets:
        return binding
    names = {f"actor_target/{name.partition('/')[2]}" for name in ACTION_MAP}
    repeated = {
        path for path, name in tree.names.items() if any(f"/{name}".endswith(f"/{name_}") for name_ in names)
    }
    binding = binding.without({tree.names[path] for path in repeated})
    facts = binding.facts._replace(head="affine").without_lack("action map", "action bounds")
    return replace(binding, facts=facts, consumed=binding.consumed | repeated)


FUJIMOTO_TABLE = LayoutTable(
    name="fujimoto",
    plays=("TD3", "DDPG"),
    writes=("TD3", "DDPG"),
    title="TD3 authors' files: PREFIX_actor, PREFIX_critic, ... (or only one of them)",
    framework="torch",
    components={
        "actor": "actor",
        "critic": "critic",
        "actor_target": "actor_target",
        "critic_target": "critic_target",
        **{stored: f"critic/{q}" for stored, q in _SPLIT.items()},
        **{f"{stored}_target": f"critic_target/{q}" for stored, q in _SPLIT.items()},
    },
    optimizers={
        "actor_optimizer": "actor_optimizer",
        "critic_optimizer": "critic_optimizer",
        **{f"{stored}_optimizer": f"critic_optimizer/{q}" for stored, q in _SPLIT.items()},
    },
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["fujimoto"]),
    tensors=ACTION_MAP,
    late=True,
    seen="TD3 on HalfCheetah, two seeds from a public run; split critics on BipedalWalker and LunarLander",
)

AUTHORS_LAYER = deferred.compile(r"l[1-9]\.(weight|bias)")
_MORE = frozenset(
    ("total_it", "actor_target", "critic_target", "value", "value_target", "normalizer", "log_alpha")
)
_MEMBER = deferred.compile(r"actor|cri?tic")


def recognize_fujimoto(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a set of files, or of one actor or critic file.

    A set has the authors' layer names; a single file is identified by its name (`..._critic`), and without
    such a name six layers are a critic. Source: github.com/sfujim/TD3, TD3.py, `TD3.save` and the classes
    Actor and Critic: an action is max_action (one number) times tanh; the critic keeps Q1 in l1..l3 and Q2 in
    l4..l6; targets and the update counter are not saved. In DDPG.py the action enters the critic at l2.
    github.com/sfujim/TD3_BC, main.py, normalises observations with the dataset's mean and std, which it does
    not save. Copies of the program store two critics in separate files (`_critic_1`) and save the targets.
    """
    steps = {step.value for path in tree for step in path}
    stored = {str(step) for step in steps if AUTHORS_LAYER.fullmatch(str(step))}
    if not stored:
        return None
    first = next(iter(tree))
    if len(first) == 1 and all(AUTHORS_LAYER.fullmatch(str(path[0].value)) for path in tree):
        if "l4.weight" not in stored and not _MEMBER.search(name):
            return None  # three layers of any program may have these names
        from ckpttool.libraries.binding import bind

        component = "actor" if _MEMBER.findall(name)[-1:] == ["actor"] else "critic"
        binding = bind(tree.under((key(component),)), FUJIMOTO_TABLE)
        if binding is not None:
            evidence = f"one {component} file with l1, l2, ..."
            binding = replace(binding.moved(lambda path: path[1:]), evidence=evidence)
        return _add_file_metadata(binding, name)
    top = {str(path[0].value) for path in tree if path}
    if top & _MORE and not top & _SPLIT.keys():
        return None  # one dict with targets and further entries: td3_torch
    from ckpttool.libraries.binding import bind

    binding = bind(tree, FUJIMOTO_TABLE)
    return None if binding is None else _add_file_metadata(add_action_map(binding, tree), name)


def _add_file_metadata(binding: RecognizedAgent | None, name: str) -> RecognizedAgent | None:
    """Return the binding with the facts in the file's name: TD3_BC's agents need statistics."""
    if binding is None or not name.startswith("TD3_BC"):
        return binding
    return replace(binding, facts=binding.facts.lacking(STATISTICS_UNKNOWN))


def plan_fujimoto(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the four files that the authors' `TD3.load` reads.

    Targets, counters, statistics and a Gaussian's second head have no place there and are not
    converted. Raise UnsupportedError for networks or an action map that the authors' classes cannot
    represent.
    """
    from ckpttool.libraries.write import LayerNames, NetworkRow, WritingTable, plan_torch_file

    heads = {part.title: len(part.layers) for part in binding.parts if part.component == "critic"}
    layers = LayerNames("l{n}")
    rows = [NetworkRow("actor", (key("actor"),), layers)]
    first = 1
    for number in (1, 2):
        title = f"critic/q{number}"
        if title in heads:
            rows.append(NetworkRow(title, (key("critic"),), layers._replace(first=first)))
            first += heads[title]
    writing = WritingTable(
        "the TD3 authors' program",
        rows,
        "tanh",
        optimizers={name: (key(name),) for name in schema.OPTIMIZED},
        needs=("actor", "critic"),
        late=True,
        notes=_notes(binding, agent),
    )
    return plan_torch_file(writing, binding, agent, settings)


def _notes(binding: RecognizedAgent, agent: Tree) -> tuple[str, ...]:
    """Return notes on what `TD3.load` works without, and what it requires."""
    notes = []
    if {part.component for part in binding.parts} & {"actor_target", "critic_target"}:
        notes.append("when loading, targets are copied from the online networks")
    absent = [name for name in schema.OPTIMIZED if not any(path[0] == attr(name) for path in agent)]
    if absent:
        notes.append(f"the source has no {', '.join(absent)}, but `TD3.load` opens that file")
    return tuple(notes)


# Source of the targets that the files lack (TD3.py, `load`: actor_target = copy.deepcopy(actor)).
FUJIMOTO = LibraryPlugin(
    FUJIMOTO_TABLE, recognize_fujimoto, plan_fujimoto, COPIES_TARGETS="the authors' load()"
)
