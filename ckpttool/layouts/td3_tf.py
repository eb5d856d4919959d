"""The TD3 authors' agent ported to TensorFlow: one object with networks and optimizers as attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.layouts import arguments, canonical, keras_rl, optimizers
from ckpttool.layouts.canonical import Binding, Facts, Part, PartLayer
from ckpttool.layouts.memory import remembered
from ckpttool.layouts.optimizers.keras_write import as_tensor
from ckpttool.layouts.table import Table, bind, is_all
from ckpttool.leaf import Path, attr, display
from ckpttool.mapping.kinds import SPELLING
from ckpttool.mapping.plan import Label, Plan, Settings, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule
from ckpttool.tree import Tree

# Tensors of a network that are no layer's: a deviation for all observations, the values of atoms.
_BARE = ("actor/log_std", "actor/std", "actor_target/log_std", "critic/q_support", "critic_target/q_support")

# Statistics of what a critic alone observes: those of the policy's observations are in the sidecar.
_SEEN = tuple(f"{canonical.NORMALIZER}/critic_{name}" for name in canonical.STATISTICS)

TABLE = Table(
    name="td3_tf",
    title="TD3/DDPG agent object saved by tf.train.Checkpoint (TF-Eager port, tf2rl)",
    framework="tensorflow",
    components={name: name for name in (*canonical.NETWORKS, *canonical.VALUES)},
    optimizers={name: name for name in canonical.OPTIMIZERS},
    counters={
        "total_it": "total_it",
        "_it": "total_it",
        "save_counter": "save_counter",
        "num_timesteps": "num_timesteps",
    },
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-3),
    optimizer=optimizers.from_keras,
    rooted=True,
    late=True,
    branches=canonical.BRANCHES,
    tensors={
        **{name: f"temperature/{name}" for name in ("log_alpha", "alpha")},
        **{name: name for name in _BARE},
        **{name.partition("/")[2]: name for name in _SEEN},
    },
    seen="sample_ckpts/td3_pendulum_tf",
)


# The attribute of tf.train.Checkpoint under which the agent stands, as in Checkpoint(policy=agent).
ROOT = attr("policy")
SAVES = (attr("save_counter"),)  # tf.train.Checkpoint's own
_ACME = frozenset(("target_policy", "target_critic"))


def recognise(tree: Tree, name: str) -> Binding | None:
    """Return the tree's way to the canonical agent if its networks are named so."""
    if name.endswith(keras_rl.SUFFIX) or any(
        _ACME & set(each.split("/")[:2]) for each in tree.names.values()
    ):
        return None
    binding = bind(tree, TABLE)
    if binding is None or not is_all(binding, tree):
        return None
    found = remembered(binding, tree, TABLE.framework)
    return found if _is_agent(found, tree) else None


def _is_agent(binding: Binding, tree: Tree) -> bool:
    """Return whether the checkpoint holds more than a chain of layers that anyone may call `actor`."""
    return (
        bool(binding.fronts)
        or any(not part.acts for part in binding.parts)
        or any(path[0] == ROOT for path in tree)
    )


def companions(location: str) -> Sequence[str]:
    """Return the file of arguments that tf2rl's trainer writes beside its checkpoints."""
    return arguments.companions(location)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the environment that the arguments name."""
    return arguments.told_by(binding, file, tree)


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: `tf.train.Checkpoint(policy=agent)` with Keras 3 layers.

    Layers keep the names and the order that their source gave them; those of a torch Sequential are a Keras
    Sequential's, whose activations are arguments of its layers.
    """
    weights = (*_weights(binding, agent), *_single(agent))
    labels = {m.target: Label("parameter", display(m.target[1:])) for m in weights}
    state = _optimizers(weights, binding, agent, told)
    counters = tuple(_counters(agent))
    labels |= {move.target: Label("counter", display(move.target[-1:])) for move in counters}
    networks = {move.source[0].value for move in weights}
    absent = [name for name in canonical.NETWORKS if name not in networks]
    return Plan(
        (*weights, *(move for each in state for move in each.moves), *counters),
        {path: leaf for each in state for path, leaf in each.added.items()},
        aliases={path: others for each in state for path, others in each.aliases.items()},
        labels=labels | {path: label for each in state for path, label in each.labels.items()},
        assumed=tuple(line for each in state for line in each.assumed),
        missing=tuple(name for each in state for name in each.missing),
        consumed=(
            *(path for path in agent if canonical.mapped_by_sidecar(path)),
            *(path for each in state for path in each.consumed),
        ),
        notes=(
            *((f"the source has no {', '.join(absent)}",) if absent else ()),
            *(note for each in state for note in each.notes),
        ),
        told={name: settings for each in state for name, settings in each.told.items()},
    )


def _weights(binding: Binding, agent: Tree) -> tuple[Move, ...]:
    order = {move.target: number for number, move in reversed(tuple(enumerate(binding.moves.moves)))}
    flat: list[tuple[Path, tuple[str, ...], str]] = []
    for component in (*canonical.NETWORKS, *canonical.VALUES):
        parts = [part for part in binding.parts if part.component == component]
        apart = canonical.apart(parts)
        found = [layer for part in parts for layer in _layers(part, agent, named=apart) if layer]
        bare = (tuple(map(attr, name.split("/"))) for name in _BARE if name.startswith(f"{component}/"))
        flat += [(path, (component, str(path[-1].value)), "") for path in bare if path in agent]
        for layer in sorted(found, key=lambda layer: min(order[source] for source, _, _ in layer)):
            flat += layer
    paths = edges((str(ROOT.value), *name) for _, name, _ in flat)
    moves = []
    for source, name, kind in flat:
        rule: Rule = KEEP
        if kind:
            weights = SPELLING["tensorflow", kind].weights
            rule = next(w.to_canonical for w in weights if w.name == name[-1]).inverse(agent[source])
        moves.append(Move(source, paths[str(ROOT.value), *name], rule))
    return tuple(moves)


def _single(agent: Tree) -> Iterator[Move]:
    """Go through the tensors that belong to no network: the temperature, a critic's statistics."""
    for path in agent:
        if path[0] == attr(canonical.TEMPERATURE) or display(path) in _SEEN:
            yield Move(path, (ROOT, *path[1:]), KEEP)


def _layers(part: Part, agent: Tree, *, named: bool) -> Iterator[list[tuple[Path, tuple[str, ...], str]]]:
    """Go through the layers: of each its tensors' canonical paths, their edges below the agent, its kind."""
    sequential = all(layer.name and layer.name[-1].isdigit() for layer in part.layers)
    above = (part.head,) if named and part.head is not None else ()
    placed: list[tuple[int | str, PartLayer]] = [*enumerate(part.layers), *part.branches]
    for position, layer in placed:
        name = (*above, *canonical.written(position, layer))
        if sequential and isinstance(position, int):
            # keras/src/models/sequential.py: the input layer is number 0.
            name = (*name[:-1], "_functional", "_operations", str(position + 1))
        yield [
            (source, (part.component, *name, weight.name), layer.kind)
            for weight in SPELLING["tensorflow", layer.kind].weights
            if (source := canonical.weight(part, position, weight.canonical)) in agent
        ]


def _optimizers(weights: tuple[Move, ...], binding: Binding, agent: Tree, told: Settings) -> list[Plan]:
    present = [name for name in canonical.OPTIMIZERS if any(path[0] == attr(name) for path in agent)]
    return [
        optimizers.ToKeras(
            name,
            f"adam_{number}" if number else "adam",
            [move for move in weights if canonical.trains(name, move.source)],
            agent,
            (ROOT, attr(name)),
            told.get(name, {}),
            binding.defaults,
        ).plan()
        for number, name in enumerate(present)
    ]


def _counters(agent: Tree) -> Iterator[Move]:
    for path in agent:
        if len(path) == 1:
            yield Move(path, path if path == SAVES else (ROOT, *path), as_tensor(agent[path], "int64"))
