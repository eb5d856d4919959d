"""TD3: state_dicts of torch modules, and tf.Module objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, pairwise

from ckpttool.core import deferred
from ckpttool.core.source import Shape
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, attr, display, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind, is_whole_tree, number_layers
from ckpttool.libraries.fujimoto import ACTION_MAP, AUTHORS_LAYER, add_action_map
from ckpttool.libraries.recognize import ANY, LayoutTable, LibraryPlugin, find_orders, has_module_layer
from ckpttool.libraries.recurrent_layers import add_recurrent_layers
from ckpttool.libraries.schema import (
    AgentLayer,
    AgentMetadata,
    AgentNetwork,
    RecognizedAgent,
    list_kernel_shapes,
)
from ckpttool.mapping.kind_table import SPELLING
from ckpttool.mapping.rules import KEEP, Label, Move, Plan, Rule, Settings, ToValue

# Network tensors outside layers: a state-independent standard deviation, atom values.
_SINGLE_TENSORS = (
    "actor/log_std",
    "actor/std",
    "actor_target/log_std",
    "critic/q_support",
    "critic_target/q_support",
)

# Statistics of a critic's own observations; those of the policy's are in the sidecar.
_SEEN = tuple(f"{schema.NORMALIZER}/critic_{name}" for name in schema.STATISTICS)

TF_TABLE = LayoutTable(
    name="td3_tf",
    plays=("TD3", "DDPG"),
    writes=ANY,
    title="TD3/DDPG agent object saved by tf.train.Checkpoint (TF-Eager port, tf2rl)",
    framework="tensorflow",
    components={name: name for name in (*schema.NETWORKS, *schema.VALUES)},
    optimizers={name: name for name in schema.OPTIMIZERS},
    counters={
        "total_it": "total_it",
        "_it": "total_it",
        "save_counter": "save_counter",
        "num_timesteps": "num_timesteps",
    },
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-3, lacks=schema.LEFT_OPEN["td3"]),
    rooted=True,
    late=True,
    user_written=True,
    branches=schema.BRANCHES,
    tensors={
        **{name: f"temperature/{name}" for name in ("log_alpha", "alpha")},
        **{name: name for name in _SINGLE_TENSORS},
        **ACTION_MAP,
        **{name.partition("/")[2]: name for name in _SEEN},
    },
    seen="sample_ckpts/td3_pendulum_tf",
)


# The attribute of tf.train.Checkpoint that holds the agent, as in Checkpoint(policy=agent).
ROOT = attr("policy")
# Agents of other libraries with the same network names: keras-rl by its files, Acme by its targets.
_KERAS_RL, _ACME = ".h5f", frozenset(("target_policy", "target_critic"))


def recognize_tf(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent if the networks have these names."""
    if name.endswith(_KERAS_RL) or any(_ACME & set(name.split("/")[:2]) for name in tree.names.values()):
        return None
    binding = bind(tree, TF_TABLE)
    if binding is None or not is_whole_tree(binding, tree):
        return None
    recognized = _add_memory(add_action_map(binding, tree), tree, TF_TABLE.framework)
    return recognized if _is_agent(recognized, tree) else None


def _add_memory(binding: RecognizedAgent, tree: Tree, framework: str) -> RecognizedAgent:
    """Return the binding with recurrent layers; those whose order nothing decides are refused."""
    binding = add_recurrent_layers(binding, tree, framework)
    for component, front in binding.fronts.items():
        rows: dict[Path, dict[PathStep, tuple[Path, Shape]]] = {}
        for move in front.moves:
            if isinstance(leaf := move.rule.leaf(tree[move.source]), Leaf):
                rows.setdefault(move.target[:-1], {})[move.target[-1]] = move.source, leaf.shape
        cells = [(row[schema.KERNEL], row[schema.RECURRENT][1]) for row in rows.values()]
        names = [tuple(tree.names[path].split("/")) for (path, _), _ in cells]
        orders, _ = find_orders(names, [(shape[0], units[0]) for (_, shape), units in cells])
        if orders != [tuple(range(len(names)))]:
            binding = binding.refused(component, f"{schema.UNKNOWN_ORDER} (recurrent)")
    return binding


def _is_agent(binding: RecognizedAgent, tree: Tree) -> bool:
    """Return whether the checkpoint contains more than a chain of layers under the common name `actor`."""
    return (
        bool(binding.fronts)
        or any(not part.acts for part in binding.parts)
        or any(path[0] == ROOT for path in tree)
    )


def plan_tf(binding: RecognizedAgent, agent: Tree, stated: Settings) -> Plan:
    """Plan `tf.train.Checkpoint(policy=agent)` with Keras 3 layers.

    Layers keep their names and order from the source; those of a torch Sequential become a Keras
    Sequential's, whose activations are arguments of its layers.
    """
    from ckpttool.libraries import optimizers_read, optimizers_write
    from ckpttool.libraries.write import SAVES, merge_plans

    # The temperature and a critic's statistics are outside networks.
    outside = (path for path in agent if path[0] == attr(schema.TEMPERATURE) or display(path) in _SEEN)
    weights = (*_order_weights(binding, agent), *(Move(p, (ROOT, *p[1:]), KEEP) for p in outside))
    counters = tuple(
        Move(
            path,
            path if path == SAVES else (ROOT, *path),
            optimizers_write.make_tensor_rule(agent[path], "int64"),
        )
        for path in agent
        if len(path) == 1
    )
    labels = {m.target: Label("parameter", display(m.target[1:])) for m in weights}
    labels |= {move.target: Label("counter", display(move.target[-1:])) for move in counters}
    present = [name for name in schema.OPTIMIZERS if any(path[0] == attr(name) for path in agent)]
    states = (
        optimizers_write.KerasOptimizerWriter(
            optimizers_read.CanonicalOptimizer(name, agent, stated.get(name, {}), binding.defaults),
            f"adam_{number}" if number else "adam",
            [move for move in weights if schema.is_trained_by(name, move.source)],
            (ROOT, attr(name)),
        ).plan()
        for number, name in enumerate(present)
    )
    networks = Plan(
        weights,
        labels=labels,
        consumed=tuple(path for path in agent if schema.mapped_by_sidecar(path)),
        notes=_note_absent_networks({move.source[0].value for move in weights}),
    )
    return merge_plans(networks, *states, Plan(counters))


def _order_weights(binding: RecognizedAgent, agent: Tree) -> tuple[Move, ...]:
    rules: dict[tuple[str, ...], tuple[Path, Rule]] = {}
    for component in (*schema.NETWORKS, *schema.VALUES):
        bare = (tuple(map(attr, name.split("/"))) for name in _SINGLE_TENSORS)
        for path in bare:
            if path[0] == attr(component) and path in agent:
                rules[str(ROOT.value), component, str(path[-1].value)] = path, KEEP
        for source, name, rule in chain(*_list_layers(component, binding, agent, "tensorflow")):
            rules[str(ROOT.value), component, *name] = source, rule
    written = {name: rule.leaf(agent[source]) for name, (source, rule) in rules.items()}
    shapes = {name: leaf.shape if isinstance(leaf, Leaf) else () for name, leaf in written.items()}
    # An agent's layers are numbered by any library, some from 0 and some from 1.
    from ckpttool.mapping.keras_names import object_graph_paths, sequential_names

    names = sequential_names(shapes, first=1)
    paths = object_graph_paths(names.values())
    return tuple(Move(source, paths[names[name]], rule) for name, (source, rule) in rules.items())


def _list_layers(
    component: str, binding: RecognizedAgent, agent: Tree, framework: str
) -> list[list[tuple[Path, tuple[str, ...], Rule]]]:
    """Return a component's layers in the source's order, each with its tensors in the framework's order.

    A tensor has its canonical path, its name within the component, and the rule that writes it.
    """
    order = {move.target: number for number, move in enumerate(binding.moves.moves)}
    parts = [part for part in binding.parts if part.component == component]
    if not any(reason.startswith(schema.UNKNOWN_ORDER) for reason in binding.unplaced.get(component, ())):
        # Layers that only the source's library orders get numbers.
        parts = [number_layers(part) if _is_unordered(part, agent) else part for part in parts]
    names = [layer.name for part in parts for layer in part.layers]
    layers = []
    for part in parts:
        # Networks that share layer names have their own as a prefix.
        above = (part.head,) if len(set(names)) < len(names) and part.head is not None else ()
        placed: list[tuple[int | str, AgentLayer]] = [*enumerate(part.layers), *part.branches]
        for position, layer in placed:
            # A further head gets a name common to all layouts.
            own = isinstance(position, int) or layer.name[-1] in schema.LOG_STD
            name = (*above, *(layer.name if own else (str(position),)))
            layers.append(
                [
                    (source, (*name, weight.name), weight.to_canonical.inverse(agent[source]))
                    for weight in SPELLING[framework, layer.kind].weights
                    if (source := schema.canonical_weight_path(part, position, weight.canonical)) in agent
                ]
            )
    return sorted(filter(None, layers), key=lambda layer: min(order[source] for source, _, _ in layer))


def _is_unordered(part: AgentNetwork, agent: Tree) -> bool:
    """Return whether neither the sizes nor the names of a chain's layers give their order."""
    shapes = list_kernel_shapes(part, agent)
    names = [layer.name for layer in part.layers if layer.kind == "dense"]
    if part.streams or len(shapes) != len(names):
        return False
    late = next((two[0] - one[-1] for one, two in pairwise(shapes) if two[0] != one[-1]), None)
    orders, _ = find_orders(names, [(shape[0], shape[-1]) for shape in shapes], late)
    return orders != [tuple(range(len(names)))]


def _tf_companions(location: str) -> Sequence[str]:
    from ckpttool.libraries import tf2rl  # its trainer writes a file of arguments beside its checkpoints

    return tf2rl.companions(location)


def _read_tf_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    from ckpttool.libraries import tf2rl

    return tf2rl.read_companion(binding, file, tree)


TF = LibraryPlugin(
    TF_TABLE, recognize_tf, plan_tf, companions=_tf_companions, read_companion=_read_tf_companion
)


_COUNTERS = ("total_it", "save_counter", "num_timesteps", "iter", "global_step")
_TORCH_STATISTICS = [f"{whose}{name}" for whose in ("", "critic_") for name in schema.STATISTICS]

TORCH_TABLE = LayoutTable(
    name="td3_torch",
    plays=("TD3", "DDPG", "SAC"),
    writes=ANY,
    title="TD3/DDPG/SAC agent as one dict of state_dicts (actor, critic, targets, optimizers)",
    framework="torch",
    components={name: name for name in (*schema.NETWORKS, *schema.VALUES)},
    optimizers={name: name for name in schema.OPTIMIZERS},
    counters={name: name for name in _COUNTERS},
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["td3"]),
    branches=schema.BRANCHES,
    late=True,
    user_written=True,
    tensors={
        "log_alpha": "temperature/log_alpha",
        "alpha": "temperature/alpha",
        **{f"normalizer/{n}": f"normalizer/{n}" for n in _TORCH_STATISTICS},
        **{name: name for name in _SINGLE_TENSORS},
        **ACTION_MAP,
    },
    seen="sample_ckpts/td3_pendulum_torch",
)

_TORCH_SPLIT = deferred.compile(r"cri?tic_?[12]")
# Without any of these, the authors' layer names mean their set of files; the last names only count beside an
# actor.
_OURS = frozenset(("total_it", "actor_target"))
_ALSO = frozenset(("critic_target", *schema.VALUES, schema.NORMALIZER, "log_alpha"))


def recognize_torch(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent if the dict's entries have these names.

    Written by `convert --to torch` for an agent, and by examples/train_td3.py.
    """
    top = {path[0].value for path in tree if 0 < len(path) < 3}
    by_authors = any(AUTHORS_LAYER.match(str(path[-1].value)) for path in tree if len(path) == 2)
    bare = not by_authors and ("critic" in top or top == {"actor"})
    alone = not by_authors and "critic" in top and top <= {*schema.CRITICS}
    if not (top & _OURS or alone or ("actor" in top and (top & _ALSO or bare))):
        return None
    if any(_TORCH_SPLIT.fullmatch(str(path[0].value)) for path in tree if path):
        return None  # with separate critics too
    if has_module_layer(tree):
        return None
    binding = bind(tree, TORCH_TABLE)
    if binding is None or not is_whole_tree(binding, tree):
        return None
    return _add_memory(add_action_map(binding, tree), tree, TORCH_TABLE.framework)


def plan_torch(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan one dict of state_dicts; layers keep their names and order from the source.

    `settings` are optimizer settings from elsewhere (a sidecar).
    """
    from ckpttool.libraries import optimizers_read, optimizers_write
    from ckpttool.libraries.write import DICT, ORDERED, merge_plans

    moves: list[Move] = []
    # Tensors outside layers become entries under their canonical names; a sidecar holds the action map.
    names = {target: stored for stored, target in TORCH_TABLE.tensors.items() if stored not in ACTION_MAP}
    named = [(path, names[display(path)].split("/")) for path in agent if display(path) in names]
    single = [Move(path, tuple(map(key, name)), KEEP) for path, name in named]
    containers: dict[Path, Container] = {(): DICT}
    for component in (*schema.NETWORKS, *schema.VALUES):
        # Layers in file order, but weight before bias in each, as torch numbers parameters.
        layers = _list_layers(component, binding, agent, "torch")
        if layers:
            containers[key(component),] = ORDERED
            # torch lists a module's own parameters before those of its submodules.
            moves += [move for move in single if move.target[0] == key(component)]
            moves += [
                Move(source, (key(component), key(".".join(name))), rule)
                for source, name, rule in chain(*layers)
            ]
    moves += [move for move in single if move not in moves]
    for move in single:
        if len(move.target) > 1:
            containers.setdefault(move.target[:1], DICT)
    weights = Plan(
        tuple(moves),
        containers=containers,
        consumed=tuple(path for path in agent if schema.mapped_by_sidecar(path)),
        notes=_note_absent_networks({path[0].value for path in containers if path}),
    )
    states = [
        optimizers_write.TorchOptimizerWriter(
            optimizers_read.CanonicalOptimizer(name, agent, settings.get(name, {}), binding.defaults),
            [move for move in moves if schema.is_trained_by(name, move.source)],
        ).plan()
        for name in schema.OPTIMIZERS
        if any(path[0] == attr(name) for path in agent)
    ]
    counters = (Move(path, (key(path[0].value),), ToValue()) for path in agent if len(path) == 1)
    return merge_plans(weights, *states, Plan(tuple(counters)))


def _note_absent_networks(present: Collection[object]) -> tuple[str, ...]:
    absent = [name for name in schema.NETWORKS if name not in present]
    return (f"the source has no {', '.join(absent)}",) if absent else ()


TORCH = LibraryPlugin(TORCH_TABLE, recognize_torch, plan_torch)
