"""TD3: torch modules, tf.Module objects, the authors' code (sfujim/TD3) and FastTD3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.sidecar import NO_STATISTICS, OUTPUT_RANGE, STATISTICS_UNKNOWN
from ckpttool.core.source import Shape
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries import optimizers_read, schema, tf2rl
from ckpttool.libraries.recognize import (
    ANY,
    MODULE_LAYER,
    LayoutTable,
    LibraryPlugin,
    bind,
    find_orders,
    is_whole_tree,
    number_layers,
)
from ckpttool.libraries.schema import (
    AgentLayer,
    AgentMetadata,
    AgentNetwork,
    ObservationNormalizer,
    RecognizedAgent,
    add_recurrent_layers,
    list_distribution_notes,
    list_kernel_shapes,
)
from ckpttool.mapping.layers import SPELLING
from ckpttool.mapping.rules import (
    KEEP,
    Label,
    Move,
    Plan,
    Rule,
    Settings,
    ToValue,
    constant_tensor,
    object_graph_paths,
    sequential_names,
)

if TYPE_CHECKING:
    from ckpttool.libraries.write import WritingTable


# FastTD3's and FastSAC's files: state_dicts of actor, qnet and its target, normalizers, and the arguments.
#
# Sources, in github.com/younggyoseo/FastTD3: fast_td3/fast_td3_utils.py (`save_params`;
# `EmpiricalNormalization`: `(x - mean) / (std + 0.01)`), fast_td3/fast_td3.py (`Actor`: tanh of the last
# layer; `Critic`: two networks that output the logits of `num_atoms` atoms, whose values are the buffer
# q_support; ReLU), fast_sac/fast_sac.py, fast_td3/environments (with Isaac Lab an action is multiplied by the
# argument action_bounds).

_STATISTICS = {"_mean": "mean", "_var": "var", "_std": "std", "count": "count"}
_NORMALIZERS = {"obs_normalizer_state": "", "critic_obs_normalizer_state": "critic_"}

FASTTD3_TABLE = LayoutTable(
    name="fasttd3",
    statistics="in the file",
    plays=("FastTD3", "FastSAC"),
    writes=("FastTD3", "FastSAC"),
    title="FastTD3 and FastSAC: actor_state_dict, qnet_state_dict, normalizers, args",
    framework="torch",
    components={
        "actor_state_dict": "actor",
        "qnet_state_dict/qnet1": "critic/q1",
        "qnet_state_dict/qnet2": "critic/q2",
        "qnet_target_state_dict/qnet1": "critic_target/q1",
        "qnet_target_state_dict/qnet2": "critic_target/q2",
    },
    counters={"global_step": "global_step"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["fasttd3"]),
    branches=schema.LOG_STD,
    tensors={
        "qnet_state_dict/q_support": "critic/q_support",
        "qnet_target_state_dict/q_support": "critic_target/q_support",
        **{
            f"{theirs}/{name}": f"normalizer/{whose}{ours}"
            for theirs, whose in _NORMALIZERS.items()
            for name, ours in _STATISTICS.items()
        },
    },
)

# SimNormLinear: a dense layer, a norm, and a softmax over groups of numbers.
_SIMPLICIAL = deferred.compile(r"\w+_state_dict/.*(fc_head|net/\d+)/(linear|\d+/linear|[a-z_]+)/")
# A view can be wider than its file.
_MOST = 1 << 16
# Exploration settings, which do not affect the action without noise.
_EXPLORATION = ("noise_scales", "std_min", "std_max")


def recognize_fasttd3(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a file with the names used by `save_params`."""
    top = {path[0].value for path in tree if path}
    if not {"actor_state_dict", "qnet_state_dict"} <= top:
        return None
    binding = bind(tree, FASTTD3_TABLE)
    if binding is None:
        return None
    for component, entry in {"actor": "actor_state_dict", "critic": "qnet_state_dict"}.items():
        if any(_SIMPLICIAL.match(tree.names[path]) for path, _ in tree.tensors() if path[0] == key(entry)):
            binding = binding.refused(component, "a simplicial embedding (sim_type)")
    behind = frozenset(
        path
        for path in tree
        if path[0] == key("args") or (path[0] == key("actor_state_dict") and path[1].value in _EXPLORATION)
    )
    binding = binding.without({tree.names[path] for path in behind}).noted(
        *list_distribution_notes(binding, tree)
    )
    binding = replace(binding, facts=_add_arguments(binding.facts, tree), consumed=binding.consumed | behind)
    return _add_normalizer(binding, tree)


def _add_arguments(facts: AgentMetadata, tree: Tree) -> AgentMetadata:
    """Return the facts from the arguments: the environment, and whether it scales actions."""
    recorded = {
        path[1].value: leaf.value for path, leaf in tree.plain() if path[0] == key("args") and len(path) == 2
    }
    env, width = recorded.get("env_name"), _count_actions(tree)
    if not isinstance(env, str) or width is None or width > _MOST:
        return facts
    high = 1.0
    if env.startswith("Isaac-"):
        given = recorded.get("action_bounds")
        if not isinstance(given, int | float):
            return facts
        high = float(given)
    facts = facts.without_lack("action bounds")
    facts = facts.read(f"args {OUTPUT_RANGE}", action_low=(-high,) * width, action_high=(high,) * width)
    # HumanoidBench names are Gymnasium ids; other names belong to other suites.
    return facts.read("args", env=env) if env.startswith(("h1hand-", "h1-")) else facts


def _count_actions(tree: Tree) -> int | None:
    for path, leaf in tree.tensors():
        named = path[0] == key("actor_state_dict") and path[-1].value in ("fc_mu.0.weight", "fc_mu.weight")
        if named and len(leaf.shape) == 2:
            return leaf.shape[0]
    return None


def _add_normalizer(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the statistics, if the arguments state no other (train.py: nn.Identity)."""
    where, facts = "obs_normalizer_state", binding.facts
    setting = tree.get((key("args"), key("obs_normalization")))
    stated = setting.value if isinstance(setting, ValueLeaf) else None
    mean, std = (tree.get((key(where), key(name))) for name in ("_mean", "_std"))
    if stated is False:
        unused = {move.source for move in binding.moves.moves if move.target[0] == attr(schema.NORMALIZER)}
        kept = tuple(move for move in binding.moves.moves if move.source not in unused)
        return replace(
            binding,
            moves=replace(binding.moves, moves=kept),
            facts=facts.read("args/obs_normalization", norm=None),
            consumed=binding.consumed | unused,
        )
    if isinstance(mean, Leaf) and isinstance(std, Leaf):
        norm = ObservationNormalizer(mean, std=std, epsilon=1e-2, outside=True)
        return replace(binding, facts=facts.read(where, norm=norm))
    return replace(binding, facts=facts.lacking(NO_STATISTICS)) if stated is True else binding


def plan_fasttd3(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan `save_params`'s dict, without the training arguments.

    The result is FastSAC's if the standard deviation depends on the observation, else FastTD3's, whose
    critics output the logits of atoms. Raise UnsupportedError for other critics, and for an action map
    other than tanh's.
    """
    from ckpttool.libraries.write import count_critics, is_gaussian, plan_torch_file

    soft = is_gaussian(binding)
    atoms = isinstance(agent.get((attr("critic"), attr("q_support"))), Leaf)
    if count_critics(binding) and not soft and not atoms:
        raise UnsupportedError(
            "FastTD3's critics output logits of atoms, but this agent's critics output values"
        )
    return plan_torch_file(_make_table(soft=soft), binding, agent, settings)


_ACTOR = key("actor_state_dict")
_QNETS = {"critic": key("qnet_state_dict"), "critic_target": key("qnet_target_state_dict")}
# fast_td3.py, Actor.__init__: the bounds of the noise scale, and its value in one environment.
_BUFFERS = {"noise_scales": ((1, 1), 0.05), "std_min": ((), 0.05), "std_max": ((), 0.8)}
_ARGS = "the training arguments are not written: FastTD3 reads sizes and environment from them"


def _make_table(*, soft: bool) -> WritingTable:
    from ckpttool.libraries.write import (
        DICT,
        LayerNames,
        NetworkRow,
        SingleTensorRow,
        StatisticsRow,
        WritingTable,
    )

    rows: list[NetworkRow | SingleTensorRow | StatisticsRow] = []
    if not soft:
        rows += [
            SingleTensorRow(
                f"actor/{name}", (_ACTOR, key(name)), default=constant_tensor("float32", shape, value)
            )
            for name, (shape, value) in _BUFFERS.items()
        ]
    mean, spread = ("fc_mu", {"log_std": "fc_logstd"}) if soft else ("fc_mu.0", {})
    rows.append(NetworkRow("actor", (_ACTOR,), LayerNames("net.{s}", mean, spread)))
    for component, entry in _QNETS.items():
        if not soft:
            rows.append(SingleTensorRow(f"{component}/q_support", (entry, key("q_support"))))
        rows += [NetworkRow(f"{component}/q{n}", (entry,), LayerNames(f"qnet{n}.net.{{s}}")) for n in (1, 2)]
    for normalizer, owner in _NORMALIZERS.items():
        places = {ours: (key(normalizer), key(theirs)) for theirs, ours in _STATISTICS.items()}
        rows.append(StatisticsRow(places, "float32", (1, -1), epsilon=1e-2, outside=True, owner=owner))
    return WritingTable(
        "FastSAC" if soft else "FastTD3",
        rows,
        "affine",
        depth=4,
        counters={"global_step": (key("global_step"),)},
        needs=("actor", "critic"),
        values=soft,
        containers={(key(entry),): DICT for entry in _NORMALIZERS},
        constants={(key("global_step"),): ValueLeaf(0)},
        notes=(_ARGS,),
    )


FASTTD3 = LibraryPlugin(FASTTD3_TABLE, recognize_fasttd3, plan_fasttd3)


# The TD3 authors' own files: PREFIX_actor, PREFIX_critic and their optimizers, layers l1 to l6.
#
# Source: github.com/sfujim/TD3, TD3.py, `TD3.save` and the classes Actor and Critic: an action is max_action
# (one number) times tanh; the critic keeps Q1 in l1..l3 and Q2 in l4..l6; targets and the update counter are
# not saved. In DDPG.py the action enters the critic at l2. github.com/sfujim/TD3_BC, main.py, normalises
# observations with the dataset's mean and std, which it does not save. Copies of the program store two
# critics in separate files (`_critic_1`) and save the targets.

# `crtic` is the spelling in a widely copied program.
_SPLIT = {f"{name}{n}": f"q{n}" for name in ("critic_", "crtic_", "critic") for n in (1, 2)}

# Buffers of an actor's class with the map from tanh to the action, as CleanRL's has them.
_SCALES = ("action_scale", "max_action", "action_limit", "act_limit", "action_bound")
_ACTION_MAP = {
    **dict.fromkeys(
        (f"actor/{name}" for name in _SCALES),
        "actor/action_scale",
    ),
    "actor/action_bias": "actor/action_bias",
}


def _add_action_map(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the action map in an actor's buffers, which a target actor repeats."""
    targets = {move.target for move in binding.moves.moves}
    if (attr("actor"), attr("action_scale")) not in targets:
        return binding
    names = {f"actor_target/{name.partition('/')[2]}" for name in _ACTION_MAP}
    repeated = {
        path for path, name in tree.names.items() if any(f"/{name}".endswith(f"/{each}") for each in names)
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
        **{theirs: f"critic/{q}" for theirs, q in _SPLIT.items()},
        **{f"{theirs}_target": f"critic_target/{q}" for theirs, q in _SPLIT.items()},
    },
    optimizers={
        "actor_optimizer": "actor_optimizer",
        "critic_optimizer": "critic_optimizer",
        **{f"{theirs}_optimizer": f"critic_optimizer/{q}" for theirs, q in _SPLIT.items()},
    },
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["fujimoto"]),
    tensors=_ACTION_MAP,
    late=True,
    seen="TD3 on HalfCheetah, two seeds from a public run; split critics on BipedalWalker and LunarLander",
)

_AUTHORS_LAYER = deferred.compile(r"l[1-9]\.(weight|bias)")
_MORE = frozenset(
    ("total_it", "actor_target", "critic_target", "value", "value_target", "normalizer", "log_alpha")
)
_MEMBER = deferred.compile(r"actor|cri?tic")


def recognize_fujimoto(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a set of files, or of one actor or critic file.

    A set has the authors' layer names; a single file is identified by its name (`..._critic`), and
    without such a name six layers are a critic.
    """
    steps = {step.value for path in tree for step in path}
    stored = {str(step) for step in steps if _AUTHORS_LAYER.fullmatch(str(step))}
    if not stored:
        return None
    first = next(iter(tree))
    if len(first) == 1 and all(_AUTHORS_LAYER.fullmatch(str(path[0].value)) for path in tree):
        if "l4.weight" not in stored and not _MEMBER.search(name):
            return None  # three layers of any program may have these names
        component = "actor" if _MEMBER.findall(name)[-1:] == ["actor"] else "critic"
        binding = bind(tree.under((key(component),)), FUJIMOTO_TABLE)
        if binding is not None:
            evidence = f"one {component} file with l1, l2, ..."
            binding = replace(binding.moved(lambda path: path[1:]), evidence=evidence)
        return _add_file_metadata(binding, name)
    top = {str(path[0].value) for path in tree if path}
    if top & _MORE and not top & _SPLIT.keys():
        return None  # one dict with targets and further entries: td3_torch
    binding = bind(tree, FUJIMOTO_TABLE)
    return None if binding is None else _add_file_metadata(_add_action_map(binding, tree), name)


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
        **_ACTION_MAP,
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
    if name.endswith(_KERAS_RL) or any(_ACME & set(each.split("/")[:2]) for each in tree.names.values()):
        return None
    binding = bind(tree, TF_TABLE)
    if binding is None or not is_whole_tree(binding, tree):
        return None
    found = _add_memory(_add_action_map(binding, tree), tree, TF_TABLE.framework)
    return found if _is_agent(found, tree) else None


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
    from ckpttool.libraries import optimizers_write
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
    if not any(each.startswith(schema.UNKNOWN_ORDER) for each in binding.unplaced.get(component, ())):
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


TF = LibraryPlugin(
    TF_TABLE,
    recognize_tf,
    plan_tf,
    # tf2rl's trainer writes a file of arguments beside its checkpoints.
    companions=tf2rl.companions,
    read_companion=tf2rl.read_companion,
)


# One PyTorch file per agent: a dict with a state_dict for each network and optimizer, and counters.
#
# Written by `convert --to torch` for an agent, and by examples/train_td3.py.

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
        **_ACTION_MAP,
    },
    seen="sample_ckpts/td3_pendulum_torch",
)

_TORCH_SPLIT = deferred.compile(r"cri?tic_?[12]")
# Without any of these, the authors' layer names mean their set of files; the last names only count beside an
# actor.
_OURS = frozenset(("total_it", "actor_target"))
_ALSO = frozenset(("critic_target", *schema.VALUES, schema.NORMALIZER, "log_alpha"))


def recognize_torch(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent if the dict's entries have these names."""
    top = {path[0].value for path in tree if 0 < len(path) < 3}
    theirs = any(_AUTHORS_LAYER.match(str(path[-1].value)) for path in tree if len(path) == 2)
    bare = not theirs and ("critic" in top or top == {"actor"})
    alone = not theirs and "critic" in top and top <= {*schema.CRITICS}
    if not (top & _OURS or alone or ("actor" in top and (top & _ALSO or bare))):
        return None
    if any(_TORCH_SPLIT.fullmatch(str(path[0].value)) for path in tree if path):
        return None  # with separate critics too
    if any(map(MODULE_LAYER.fullmatch, tree.names.values())):
        return None
    binding = bind(tree, TORCH_TABLE)
    if binding is None or not is_whole_tree(binding, tree):
        return None
    return _add_memory(_add_action_map(binding, tree), tree, TORCH_TABLE.framework)


def plan_torch(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan one dict of state_dicts; layers keep their names and order from the source.

    `settings` are optimizer settings from elsewhere (a sidecar).
    """
    from ckpttool.libraries import optimizers_write
    from ckpttool.libraries.write import DICT, ORDERED, merge_plans

    moves: list[Move] = []
    # Tensors outside layers become entries under their canonical names; a sidecar holds the action map.
    names = {ours: theirs for theirs, ours in TORCH_TABLE.tensors.items() if theirs not in _ACTION_MAP}
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
