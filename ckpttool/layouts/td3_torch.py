"""One PyTorch file per agent: a dict with a state_dict for each network and optimizer, and counters.

This is what `convert --to torch` writes for an agent, and what examples/train_td3.py saves.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.layouts import adam, canonical
from ckpttool.layouts.canonical import Binding, Facts, Part, PartLayer
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display, key
from ckpttool.mapping.kinds import SPELLING
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, ToValue
from ckpttool.tree import Container, Tree

_STATISTICS = ("normalizer/mean", "normalizer/var", "normalizer/std", "normalizer/count")

TABLE = Table(
    name="td3_torch",
    title="TD3/DDPG/SAC agent as one dict of state_dicts (actor, critic, targets, optimizers)",
    framework="torch",
    components={name: name for name in (*canonical.NETWORKS, *canonical.VALUES)},
    optimizers={name: name for name in canonical.ALL_OPTIMIZED},
    counters={"total_it": "total_it", "save_counter": "save_counter"},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-5),
    optimizer=adam.from_torch,
    branches=canonical.LOG_STD,
    tensors={
        "log_alpha": "temperature/log_alpha",
        **{f"normalizer/{n}": f"normalizer/{n}" for n in _STATISTICS},
    },
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
    for component in (*canonical.NETWORKS, *canonical.VALUES):
        layers = [m for p in binding.parts if p.component == component for m in _layers(p, agent)]
        # Layers in the order of the file, but weight before bias in each: so torch counts parameters.
        layers.sort(key=lambda layer: min(order[move.source] for move in layer))
        if layers:
            containers[key(component),] = _ORDERED
            moves += [move for layer in layers for move in layer]
    single = tuple(_single(agent))
    moves += single
    containers |= {move.target[:1]: _DICT for move in single if len(move.target) > 1}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    consumed: list[Path] = [path for path in agent if canonical.mapped_by_sidecar(path)]
    for name, network in canonical.ALL_OPTIMIZED.items():
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


def _single(agent: Tree) -> Iterator[Move]:
    """Go through the tensors that are no layer's: they are entries by their canonical names."""
    names = {ours: theirs for theirs, ours in TABLE.tensors.items()}
    for path in agent:
        name = names.get(display(path))
        if name is not None:
            yield Move(path, tuple(map(key, name.split("/"))), KEEP)


def _layers(part: Part, agent: Tree) -> Iterator[list[Move]]:
    placed: list[tuple[int | str, PartLayer]] = [*enumerate(part.layers), *part.branches]
    for position, layer in placed:
        moves = []
        for weight in SPELLING["torch", layer.kind].weights:
            source = canonical.weight(part, position, weight.canonical)
            if source in agent:
                target = (key(part.component), key(".".join((*layer.name, weight.name))))
                moves.append(Move(source, target, weight.to_canonical.inverse(agent[source])))
        yield moves
