"""One PyTorch file per agent: a dict with a state_dict for each network and optimizer, and counters.

This is what `convert --to torch` writes for an agent, and what examples/train_td3.py saves.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.layouts import adam, canonical
from ckpttool.layouts.canonical import Binding, Facts, Part
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, key
from ckpttool.mapping.kinds import SPELLING
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToValue
from ckpttool.tree import Container, Tree

TABLE = Table(
    name="td3_torch",
    title="TD3/DDPG agent as one dict of state_dicts (actor, critic, targets, optimizers)",
    framework="torch",
    components={name: name for name in canonical.NETWORKS},
    optimizers={name: name for name in canonical.OPTIMIZED},
    counters={"total_it": "total_it", "save_counter": "save_counter"},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5),
    optimizer=adam.from_torch,
    seen="sample_ckpts/td3_pendulum_torch",
)

_DICT, _ORDERED = Container("dict"), Container("OrderedDict")


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent if the dict's entries are named so."""
    if not any(path[0].value in ("total_it", "actor_target") for path in tree if 0 < len(path) < 3):
        return None  # without either it is the authors' set of files
    return bind(tree, TABLE)


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: layers keep the names and the order that their source gave them.

    `told` are the optimizers' settings that are known from elsewhere (a sidecar).
    """
    order = {move.target: number for number, move in enumerate(binding.moves.moves)}
    moves: list[Move] = []
    containers: dict[Path, Container] = {(): _DICT}
    for component in canonical.NETWORKS:
        layers = [m for p in binding.parts if p.component == component for m in _layers(p, agent)]
        # Layers in the order of the file, but weight before bias in each: so torch counts parameters.
        layers.sort(key=lambda layer: min(order[move.source] for move in layer))
        if layers:
            containers[key(component),] = _ORDERED
            moves += [move for layer in layers for move in layer]
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    consumed: list[Path] = []
    for name, network in canonical.OPTIMIZED.items():
        weights = [move for move in moves if move.source[0] == attr(network)]
        if any(path[0] == attr(name) for path in agent):
            state = adam.ToTorch(name, weights, agent, told.get(name, {}))
            moves += state.moves()
            added |= state.added()
            containers |= state.containers()
            assumed += state.assumed()
            missing += state.missing()
            consumed += state.consumed()
    moves += [Move(path, (key(path[0].value),), ToValue()) for path in agent if len(path) == 1]
    absent = [c for c in canonical.NETWORKS if (key(c),) not in containers]
    notes = (f"the source has no {', '.join(absent)}",) if absent else ()
    return Plan(tuple(moves), added, containers, tuple(assumed), tuple(missing), tuple(consumed), notes)


def _layers(part: Part, agent: Tree) -> Iterator[list[Move]]:
    for position, layer in enumerate(part.layers):
        moves = []
        for weight in SPELLING["torch", layer.kind].weights:
            source = canonical.weight(part, position, weight.canonical)
            if source in agent:
                target = (key(part.component), key(".".join((*layer.name, weight.name))))
                moves.append(Move(source, target, weight.to_canonical.inverse(agent[source])))
        yield moves
