"""One PyTorch file per agent: a dict with a state_dict for each network and optimizer, and counters.

This is what `convert --to torch` writes for an agent, and what examples/train_td3.py saves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.canonical import Binding, Facts, Part, PartLayer
from ckpttool.layouts.memory import remembered
from ckpttool.layouts.table import Table, bind, is_all
from ckpttool.layouts.writing import together
from ckpttool.leaf import Path, attr, display, key
from ckpttool.mapping.kinds import SPELLING
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, ToValue
from ckpttool.tree import Container, Tree

_COUNTERS = ("total_it", "save_counter", "num_timesteps", "iter", "global_step")
_STATISTICS = [f"{whose}{name}" for whose in ("", "critic_") for name in canonical.STATISTICS]
_ALONE = ("actor/log_std", "actor/std", "actor_target/log_std", "critic/q_support", "critic_target/q_support")

TABLE = Table(
    name="td3_torch",
    title="TD3/DDPG/SAC agent as one dict of state_dicts (actor, critic, targets, optimizers)",
    framework="torch",
    components={name: name for name in (*canonical.NETWORKS, *canonical.VALUES)},
    optimizers={name: name for name in canonical.OPTIMIZERS},
    counters={name: name for name in _COUNTERS},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5),
    optimizer=optimizers.from_torch,
    branches=canonical.BRANCHES,
    late=True,
    tensors={
        "log_alpha": "temperature/log_alpha",
        "alpha": "temperature/alpha",
        **{f"normalizer/{n}": f"normalizer/{n}" for n in _STATISTICS},
        **{name: name for name in _ALONE},
    },
    seen="sample_ckpts/td3_pendulum_torch",
)

_DICT, _ORDERED = Container("dict"), Container("OrderedDict")
_SPLIT = re.compile(r"cri?tic_?[12]")
_THEIRS = re.compile(r"l[1-9]\.(weight|bias)")
# Without any of these it is the authors' set of files if layers are called as theirs; the latter only beside
# an actor.
_OURS = frozenset(("total_it", "actor_target"))
_ALSO = frozenset(("critic_target", *canonical.VALUES, canonical.NORMALIZER, "log_alpha"))


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent if the dict's entries are named so."""
    top = {path[0].value for path in tree if 0 < len(path) < 3}
    theirs = any(_THEIRS.match(str(path[-1].value)) for path in tree if len(path) == 2)
    bare = not theirs and ("critic" in top or top == {"actor"})
    alone = not theirs and top == {"critic"}
    if not (top & _OURS or alone or ("actor" in top and (top & _ALSO or bare))):
        return None
    if any(_SPLIT.fullmatch(str(path[0].value)) for path in tree if path):
        return None  # with critics apart too
    binding = bind(tree, TABLE)
    if binding is None or not is_all(binding, tree):
        return None
    return remembered(binding, tree, TABLE.framework)


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: layers keep the names and the order that their source gave them.

    `told` are the optimizers' settings that are known from elsewhere (a sidecar).
    """
    order = {move.target: number for number, move in enumerate(binding.moves.moves)}
    moves: list[Move] = []
    single = list(_single(agent))
    containers: dict[Path, Container] = {(): _DICT}
    for component in (*canonical.NETWORKS, *canonical.VALUES):
        parts = [part for part in binding.parts if part.component == component]
        apart = canonical.apart(parts)
        layers = [move for part in parts for move in _layers(part, agent, named=apart)]
        # Layers in the order of the file, but weight before bias in each: so torch counts parameters.
        layers.sort(key=lambda layer: min(order[move.source] for move in layer))
        if layers:
            containers[key(component),] = _ORDERED
            # torch lists a module's own parameters before those of its layers.
            moves += [move for move in single if move.target[0] == key(component)]
            moves += [move for layer in layers for move in layer]
    moves += [move for move in single if move not in moves]
    for move in single:
        if len(move.target) > 1:
            containers.setdefault(move.target[:1], _DICT)
    weights = Plan(
        tuple(moves),
        containers=containers,
        consumed=tuple(path for path in agent if canonical.mapped_by_sidecar(path)),
        notes=_notes(containers),
    )
    states = [
        optimizers.ToTorch(
            name,
            [move for move in moves if canonical.trains(name, move.source)],
            agent,
            told.get(name, {}),
            binding.defaults,
        ).plan()
        for name in canonical.OPTIMIZERS
        if any(path[0] == attr(name) for path in agent)
    ]
    counters = (Move(path, (key(path[0].value),), ToValue()) for path in agent if len(path) == 1)
    return together(weights, *states, Plan(tuple(counters)))


def _notes(containers: Collection[Path]) -> tuple[str, ...]:
    absent = [name for name in canonical.NETWORKS if (key(name),) not in containers]
    return (f"the source has no {', '.join(absent)}",) if absent else ()


def _single(agent: Tree) -> Iterator[Move]:
    """Go through the tensors that are no layer's: they are entries by their canonical names."""
    names = {ours: theirs for theirs, ours in TABLE.tensors.items()}
    for path in agent:
        name = names.get(display(path))
        if name is not None:
            yield Move(path, tuple(map(key, name.split("/"))), KEEP)


def _layers(part: Part, agent: Tree, *, named: bool) -> Iterator[list[Move]]:
    above = (part.head,) if named and part.head is not None else ()
    placed: list[tuple[int | str, PartLayer]] = [*enumerate(part.layers), *part.branches]
    for position, layer in placed:
        moves = []
        for weight in SPELLING["torch", layer.kind].weights:
            source = canonical.weight(part, position, weight.canonical)
            if source in agent:
                name = (*above, *canonical.written(position, layer), weight.name)
                target = (key(part.component), key(".".join(name)))
                moves.append(Move(source, target, weight.to_canonical.inverse(agent[source])))
        yield moves
