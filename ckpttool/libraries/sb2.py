"""Stable-Baselines (2)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ckpttool.core import deferred
from ckpttool.core.errors import UnsupportedError, abbreviate_list
from ckpttool.core.sidecar import STATISTICS_UNKNOWN, Scores, unknown_fact
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import Leaf, Path, Record, Tree, ValueLeaf, attr, index, key
from ckpttool.libraries import sb3, schema, write
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    AgentMetadata,
    AgentNetwork,
    ObservationNormalizer,
    RecognizedAgent,
    list_kernel_shapes,
    make_float64_tensor,
    make_settings_note,
    read_numbers,
    require_action_bounds,
)
from ckpttool.libraries.write import (
    KERAS,
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    copy_shared_tensors,
    make_edge_path,
    parse_edge_path,
    require_activation,
)
from ckpttool.mapping.rules import Move, Plan, Settings, ToValue

_RANGE = (attr("data"), key("observation_range"))
_SUMS = tuple(
    (attr("input"), attr("obs_rms"), attr(name)) for name in ("runningsum", "runningsumsq", "count")
)
_LEAST = 1e-2
LIMITED, COUNTED = "data/observation_range", "input/obs_rms"


def add_ddpg_statistics(known: AgentMetadata, tree: Tree, obs_dim: int) -> AgentMetadata:
    """Return the facts with DDPG's observation processing [obs_dim]; may read three small tensors.

    Sources in github.com/hill-a/stable-baselines: stable_baselines/ddpg/ddpg.py (`setup_model`: normalised if
    `normalize_observations` is set, then always clipped to `observation_range`);
    stable_baselines/common/mpi_running_mean_std.py (mean = sum / count, the variance at least 0.01).
    """
    ends = [tree.get((*_RANGE, index(n))) for n in range(2)]
    low, high = (leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in ends)
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low != -high:
        return known.lacking(
            unknown_fact("observation statistics", "the observation limits (observation_range)")
        )
    normalized = tree.get((attr("data"), key("normalize_observations")))
    if not isinstance(normalized, ValueLeaf) or normalized.value is not True:
        if math.isinf(high):
            return known
        norm = ObservationNormalizer(
            make_float64_tensor([0.0] * obs_dim), make_float64_tensor([1.0] * obs_dim), clip=float(high)
        )
        return known.read(LIMITED, norm=norm)
    sums, squares, count = (read_numbers(tree.get(path)) for path in _SUMS)
    if len(sums) != obs_dim or len(squares) != obs_dim or len(count) != 1 or not count[0] > 0:
        return known.lacking(
            unknown_fact(
                "observation statistics",
                "the mean and std used by DDPG to normalise observations",
                decides=True,
            )
        )
    mean = [total / count[0] for total in sums]
    var = [max(s / count[0] - m * m, _LEAST) for s, m in zip(squares, mean, strict=True)]
    return known.read(
        COUNTED,
        norm=ObservationNormalizer(make_float64_tensor(mean), make_float64_tensor(var), clip=float(high)),
    )


companions = sb3.companions


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the facts from a zoo file; DDPG's own limits take precedence."""
    limits = binding.facts.norm
    if limits is None or limits.clip is None or binding.facts.origins.get("norm") != LIMITED:
        return sb3.read_companion(binding, file, tree)
    recorded = {name: where for name, where in binding.facts.origins.items() if name != "norm"}
    bare = replace(binding, facts=binding.facts._replace(norm=None, origins=recorded))
    companion = sb3.read_companion(bare, file, tree)
    if companion is bare:
        return binding
    norm = companion.facts.norm
    if norm is None:
        kept = companion.facts.read(LIMITED, norm=limits)
    else:
        clip = limits.clip if norm.clip is None else min(norm.clip, limits.clip)
        kept = companion.facts._replace(norm=norm._replace(clip=clip))
    return replace(companion, facts=kept)


_WHOSE = "Stable-Baselines 2"
_DATA = attr("data")
_ALPHA, _LOG_ALPHA = ((attr(schema.TEMPERATURE), attr(name)) for name in ("alpha", "log_alpha"))
# tensorflow/contrib/layers/python/layers/layers.py, layer_norm.
_EPSILON = 1e-12
_LAYER_NORM = "LayerNorm_{i}"
# Activations in `policy_kwargs`; the library's default is ReLU.
_ACTIVATIONS = {
    "tanh": "tensorflow.python.ops.math_ops.tanh",
    "sigmoid": "tensorflow.python.ops.math_ops.sigmoid",
    "elu": "tensorflow.python.ops.gen_nn_ops.elu",
}


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a file for `TD3.load`, `SAC.load` or `DDPG.load`, depending on the agent's kind.

    Raise UnsupportedError for networks or an action map that the library's policies cannot represent,
    UsageError if the action bounds are unknown. Sources in github.com/hill-a/stable-baselines:
    stable_baselines/td3/policies.py, sac/policies.py, ddpg/policies.py (scopes, and one list of sizes for all
    networks), sac/sac.py (`log_ent_coef` is a variable only with `ent_coef` "auto"), common/base_class.py
    (`load`: all other settings have their defaults).
    """
    kind = "sac" if write.is_gaussian(binding) else "td3" if write.count_critics(binding) > 1 else "ddpg"
    file_plan = copy_shared_tensors(
        write.plan_torch_file(_make_table(kind, agent), binding, agent, settings), agent
    )
    parts = [part for part in binding.parts if part.component in schema.RUN]
    alone = kind == "sac" and _ALPHA in agent and _LOG_ALPHA not in agent
    moves = (*file_plan.moves, *([Move(_ALPHA, (_DATA, key("ent_coef")), ToValue())] if alone else ()))
    notes = ["training settings (gamma, tau, noise, ...) are set to the library's defaults"]
    if any(path[0].value in schema.OPTIMIZERS for path in agent):
        notes.append("Stable-Baselines 2 does not save optimizers")
    added = {**file_plan.added, **_make_settings(kind, binding, agent, parts)}
    return replace(file_plan, moves=moves, added=added, containers={}, notes=(*file_plan.notes, *notes))


def _make_table(kind: str, agent: Tree) -> WritingTable:
    rows: list[NetworkRow | SingleTensorRow] = [*_list_rows(kind)]
    if kind == "sac" and not (_ALPHA in agent and _LOG_ALPHA not in agent):
        default = Leaf("float32", (), Inline(struct.pack("<f", 0.0)), "", "parameter")
        rows.append(
            SingleTensorRow("temperature/log_alpha", parse_edge_path("model/log_ent_coef"), (), default)
        )
    # DDPG's critic receives the action later, which is checked here.
    return WritingTable(
        _WHOSE,
        rows,
        "affine",
        hidden="",
        needs=("actor", "critic"),
        values=kind != "ddpg",
        kinds=KERAS,
        path=_variable,
    )


def _variable(entry: Path, layer: str, weight: str) -> Path:
    return make_edge_path(entry, layer.replace("LayerNorm_0", "LayerNorm"), weight)


def _list_rows(kind: str) -> Iterator[NetworkRow]:
    """Yield the networks of a policy in the order in which it creates them."""
    for scope, last in _ORDER[kind]:
        title = "/".join(_component_name((*scope.split("/"), "fc0", "kernel"))[:-2])
        component, _, head = title.partition("/")
        component_title = (
            f"{component}/{head.replace('qf', 'q') or 'q1'}" if component in schema.CRITICS else component
        )
        branches = {"log_std": last[1]} if last[1:] else {}
        names = LayerNames("fc{i}", last[0], branches, _LAYER_NORM)
        yield NetworkRow(component_title, parse_edge_path(scope), names)


def _make_settings(
    kind: str, binding: RecognizedAgent, agent: Tree, parts: Sequence[AgentNetwork]
) -> dict[Path, Leaf | ValueLeaf]:
    """Return the settings that the library needs: spaces, sizes, activation, class of the policy."""
    policy = next(part for part in parts if part.acts)
    kernels = {part.title: list_kernel_shapes(part, agent) for part in parts}
    obs_dim, act_dim = kernels[policy.title][0][0], kernels[policy.title][-1][1]
    sizes = _sizes(kernels)
    _require_late_action(kind, kernels, obs_dim, act_dim)
    normed = _has_layer_norms(binding, parts)
    low, high = require_action_bounds(binding.facts, agent, f"a {_WHOSE} file")
    infinite = [math.inf] * obs_dim
    name = f"stable_baselines.{kind}.policies.{'Ln' if normed else ''}MlpPolicy"
    values: dict[str, Leaf | ValueLeaf] = {
        "policy": ValueLeaf(Record(name)),
        "observation_space/low": schema.make_float32_tensor([-bound for bound in infinite]),
        "observation_space/high": schema.make_float32_tensor(infinite),
        "action_space/low": schema.make_float32_tensor(low),
        "action_space/high": schema.make_float32_tensor(high),
        "n_envs": ValueLeaf(1),
        "_vectorize_action": ValueLeaf(False),
    }
    if kind == "sac" and not (_ALPHA in agent and _LOG_ALPHA not in agent):
        values["ent_coef"] = ValueLeaf("auto")
    if kind == "ddpg":
        # The agent's own clipping without normalisation, else infinity.
        norm, limit = binding.facts.norm, math.inf
        if norm is not None and norm.clip is not None and norm.var is not None:
            plain = not any(read_numbers(norm.mean)) and all(number == 1 for number in read_numbers(norm.var))
            limit = norm.clip if plain else limit
        values |= {"observation_range/0": ValueLeaf(-limit), "observation_range/1": ValueLeaf(limit)}
    values |= {f"policy_kwargs/layers/{n}": ValueLeaf(size) for n, size in enumerate(sizes)}
    activation = require_activation(binding, _WHOSE, {"relu", *_ACTIVATIONS})
    if activation != "relu":
        values["policy_kwargs/act_fun"] = ValueLeaf(Record(_ACTIVATIONS[activation]))
    return {_setting(name): leaf for name, leaf in values.items()}


def _setting(name: str) -> Path:
    first, *rest = name.split("/")
    inner = attr if first.endswith("_space") else key
    return (_DATA, key(first), *(index(int(step)) if step.isdigit() else inner(step) for step in rest))


def _sizes(kernels: dict[str, list[tuple[int, ...]]]) -> list[int]:
    """Return the hidden layer widths, which are the same in all networks of the library."""
    sizes = {title: tuple(shape[1] for shape in shapes[:-1]) for title, shapes in kernels.items()}
    if len(set(sizes.values())) != 1 or not next(iter(sizes.values())):
        shown = ", ".join(f"{title} {list(sizes)}" for title, sizes in sizes.items())
        raise UnsupportedError(f"{_WHOSE} requires the same hidden layer sizes in all networks", found=shown)
    return list(next(iter(sizes.values())))


def _require_late_action(
    kind: str, kernels: dict[str, list[tuple[int, ...]]], obs_dim: int, act_dim: int
) -> None:
    """Raise UnsupportedError unless a DDPG's critic receives the action at its second layer."""
    critic = kernels.get("critic/q1", [])
    if kind == "ddpg" and critic and (critic[0][0], critic[1][0]) != (obs_dim, critic[0][1] + act_dim):
        raise UnsupportedError(
            f"the critic of {_WHOSE}'s DDPG must receive the action at its second layer",
            found="critic/q1 receives it elsewhere",
        )


def _has_layer_norms(binding: RecognizedAgent, parts: Sequence[AgentNetwork]) -> bool:
    """Return whether every hidden layer has a layer norm; raise UnsupportedError if only some do."""
    kinds = [[layer.kind for layer in part.layers] for part in parts]
    normed = [kind.count("layer_norm") for kind in kinds]
    if not any(normed):
        return False
    if any(kind != ["dense", "layer_norm"] * (len(kind) // 2) + ["dense"] for kind in kinds):
        raise UnsupportedError(f"{_WHOSE} requires layer norms after all hidden layers or after none")
    if binding.facts.epsilon != _EPSILON:
        raise UnsupportedError(
            f"{_WHOSE} requires layer norms with an epsilon of {_EPSILON:g}",
            found=f"{binding.facts.epsilon:g}",
        )
    return True


TABLE = LayoutTable(
    name="stable_baselines2",
    statistics="vecnormalize.pkl; DDPG's in the file",
    plays=("TD3", "DDPG", "SAC", "DQN", "PPO2", "A2C", "ACER", "ACKTR", "PPO1", "TRPO"),
    writes=("TD3", "DDPG", "SAC"),
    title="Stable-Baselines 2 agent (TD3, DDPG, SAC; DQN; PPO2, A2C, ACER, ACKTR, PPO1, TRPO)",
    framework="tensorflow",
    components={name: name for name in (*schema.NETWORKS, *schema.VALUES)},
    facts=AgentMetadata(
        head="affine", hidden="relu", epsilon=1e-12, lacks=schema.LEFT_OPEN["stable_baselines"]
    ),
    # TensorFlow names the first of two outputs in one scope `dense` (the mean), and numbers the second.
    branches={"dense_1": "log_std"},
    tensors={"model/log_ent_coef": "temperature/log_alpha"},
    seen="ten agents from rl-baselines-zoo; agents saved by version 2.10.2",
)
_Q_NETWORKS = replace(
    TABLE,
    components={f"{name}/{head}": f"{name}/{head}" for name in schema.CRITICS for head in ("q1", "q2")},
    facts=TABLE.facts._replace(head="argmax"),
    branches={},
    tensors={},
)
_ON_POLICY = replace(
    TABLE,
    components={"pi": "actor", "vf": "value"},
    facts=TABLE.facts._replace(head="clip", hidden="tanh"),
    branches={},
    tensors={"pi/logstd": "actor/log_std"},
)
_SHARED = replace(_ON_POLICY, components={"shared+pi": "actor", "shared+vf": "value"})
_PARAMS = attr("params")
_PLACES = {
    ("model", "pi"): ("actor",),
    ("model", "values_fn"): ("critic",),
    ("model", "values_fn", "vf"): ("value",),
    ("model", "qf"): ("critic",),
    ("target", "pi"): ("actor_target",),
    ("target", "values_fn"): ("critic_target",),
    ("target", "values_fn", "vf"): ("value_target",),
    ("target", "qf"): ("critic_target",),
}
_Q_SCOPES = {("deepq", "model"): "critic", ("deepq", "target_q_func", "model"): "critic_target"}
_STREAMS = {"action_value": "q1", "state_value": "q2"}
_WEIGHTS = {"weights": "kernel", "w": "kernel", "biases": "bias", "b": "bias"}
_ON_POLICY_LAYER = deferred.compile(r"(shared|pi|vf)(?:_(fc\d+))?")
# Variables that no action depends on.
_TRAINING_ONLY = deferred.compile(
    r"deepq/(eps|param_noise_\w+|perturbed_model/.*|adaptive_model/.*)|model/q/[wb]|oldpi/.*"
)
_NUMBERED = deferred.compile(r"(LayerNorm|fully_connected)(?:_(\d+))?")
_POLICY = deferred.compile(r"stable_baselines\.(ddpg|sac|td3)\.policies\.(?:Mlp|FeedForward)Policy")
# The order in which a policy creates its networks, which files without names follow. A network is its path
# and the names of its layers after the hidden ones.
_ORDER: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]] = {
    "ddpg": (
        ("model/pi", ("pi",)),
        ("model/qf", ("qf_output",)),
        ("target/pi", ("pi",)),
        ("target/qf", ("qf_output",)),
    ),
    "sac": (
        ("model/pi", ("dense", "dense_1")),
        ("model/values_fn/vf", ("vf",)),
        ("model/values_fn/qf1", ("qf1",)),
        ("model/values_fn/qf2", ("qf2",)),
        ("target/values_fn/vf", ("vf",)),
    ),
    "td3": (
        ("model/pi", ("dense",)),
        ("model/values_fn/qf1", ("qf1",)),
        ("model/values_fn/qf2", ("qf2",)),
        ("target/pi", ("dense",)),
        ("target/values_fn/qf1", ("qf1",)),
        ("target/values_fn/qf2", ("qf2",)),
    ),
}
_HIDDEN = 2


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a file with the library's variables.

    A file without variable names is recognised if the variables fit the networks of the policy's class, which
    is the library's own, or in shape those of DQN or of an on-policy algorithm. Sources in
    github.com/hill-a/stable-baselines: stable_baselines/td3/policies.py, sac/policies.py and ddpg/policies.py
    for the networks (64 and 64 units, ReLU; `policy_kwargs` may change both); common/math_util.py,
    `unscale_action`, for the action: tanh, from [-1, 1] to [low, high]. The layer norm is that of
    tensorflow/contrib/layers/python/layers/layers.py, whose epsilon is 1e-12. Optimizers are not saved.
    deepq/policies.py: a dueling network has two separate chains, `action_value` and `state_value`, and hidden
    layers with ReLU. common/policies.py (`mlp_extractor`, tanh) and common/distributions.py
    (`proba_distribution_from_latent`: `pi`, its `logstd`, and `q`, which only ACER's training uses);
    common/base_class.py, `predict`: a mean is clipped to the bounds. Before the option net_arch all hidden
    layers of the policy came before those of the value.
    """
    names = {path: tuple(str(step.value) for step in path) for path in tree if path[:1] != (_DATA,)}
    assumed: tuple[str, ...] = ()
    repeated: frozenset[Path] = frozenset()
    if any(path[0] == _PARAMS for path in names if path):
        named = _name_variables(tree)
        if named is None:
            return None
        names, policy, repeated = named
        assumed = (f"the variables have no names: they are read in the order in which {policy} creates them",)
    table, sources = _choose_table(tree, names)
    binding = bind(Tree({target: tree[path] for target, path in sources.items()}), table) if sources else None
    if binding is None or not any(part.acts or table is _Q_NETWORKS for part in binding.parts):
        return None
    moves = tuple(replace(move, source=sources[move.source]) for move in binding.moves.moves)
    used = {move.source for move in moves} | repeated
    settings = [path for path in tree if path[:1] == (_DATA,) and path not in used]
    idle = [path for path, name in names.items() if _TRAINING_ONLY.fullmatch("/".join(name))]
    notes = (make_settings_note(len(settings), "data"),) if settings else ()
    if idle:
        shown = abbreviate_list(sorted("/".join(names[path]) for path in idle), 3)
        notes = (*notes, f"not converted, because no action depends on it: {shown}")
    consumed = (
        binding.consumed
        | frozenset((*settings, *idle))
        | repeated
        | frozenset(path for path in _SUMS if path in tree)
    )
    binding = replace(binding, moves=replace(binding.moves, moves=moves), consumed=consumed)
    binding = replace(binding, facts=_read_metadata(tree, binding, sources)).assuming(*assumed).noted(*notes)
    binding = binding.entered(*sb3.list_custom_classes(tree, (("policy",), "policy")))
    return binding if table is TABLE else _add_choices(binding, tree, names)


def _choose_table(tree: Tree, names: Mapping[Path, tuple[str, ...]]) -> tuple[LayoutTable, dict[Path, Path]]:
    """Return the table of the file's algorithm, and its variables by their paths in the components."""
    if any(name[:1] == ("deepq",) for name in names.values()):
        table, rename = _Q_NETWORKS, _q_network_name
    elif ("model", "pi", "w") in names.values():
        shared = any(name[1].startswith("shared_fc") for name in names.values() if len(name) > 1)
        table, rename = _SHARED if shared else _ON_POLICY, _on_policy_name
    elif sb3.has_box_actions(tree) and any(name[:2] in _PLACES and len(name) > 2 for name in names.values()):
        table, rename = TABLE, _component_name
    else:
        return TABLE, {}
    other = {name[2] for name in names.values() if name[:2] == ("model", "pi")} - {"w", "b", "logstd"}
    if table in (_ON_POLICY, _SHARED) and other:
        return table, {}
    return table, {tuple(map(attr, rename(name))): path for path, name in names.items()}


def _q_network_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a variable's name in the Q-function that it belongs to; other names stay."""
    for scope, component in _Q_SCOPES.items():
        inner = names[len(scope) :]
        if names[: len(scope)] == scope and len(inner) > 1 and inner[0] in _STREAMS:
            layers = map(_number_scope, inner[1:-1])
            return (component, _STREAMS[inner[0]], *layers, _WEIGHTS.get(inner[-1], inner[-1]))
    return names


def _on_policy_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a variable's name in the policy, the value, or the layers that they share; other names stay."""
    layer = _ON_POLICY_LAYER.fullmatch(names[1]) if names[:1] == ("model",) and len(names) == 3 else None
    if layer is None:
        return names
    if names[2] not in _WEIGHTS:
        return (layer[1], names[2])
    return (layer[1], layer[2] or "out", _WEIGHTS[names[2]])


def _add_choices(
    binding: RecognizedAgent, tree: Tree, names: Mapping[Path, tuple[str, ...]]
) -> RecognizedAgent:
    """Return the binding of DQN or an on-policy agent with its actions; refuse layers of other kinds."""
    q_network = not any(part.acts for part in binding.parts)
    dueling = q_network and any(part.title == "critic/q2" for part in binding.parts)
    scores: Scores = "dueling" if dueling else "values"
    if q_network:
        binding = binding.with_q_policies(scores)
    else:
        other = {name[1] for name in names.values() if name[:1] == ("model",) and len(name) > 2}
        strange = sorted(step for step in other if step != "q" and not _ON_POLICY_LAYER.fullmatch(step))
        if strange:
            reason = f"layers other than dense ones: {', '.join(strange)}"
            binding = binding.refused("actor", reason).refused("value", reason)
    if ("model", "pi", "logstd") in names.values():
        return binding
    if not any(path[:2] == (_DATA, key("action_space")) for path in tree):
        # The weights without the settings: DQN's actions are one choice.
        return binding.choosing(tree, scores, where="deepq/model/state_value")
    return sb3.add_choices(binding, sb3.read_choices(tree, scores), "critic" if q_network else "actor")


def _component_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a variable's name within its component; the first layer norm of a scope gets a number too."""
    for length in (3, 2):
        component = _PLACES.get(names[:length])
        if component is not None and len(names) > length + 1:
            inner, layer = names[length:-2], names[-2]
            # A Q-function's last layer has its scope's name, whose number is not a layer number.
            layer = "out" if inner and layer == inner[-1] else layer
            return (*component, *inner, _number_scope(layer), names[-1])
    return names


def _number_scope(step: str) -> str:
    """Return a layer's scope with a number: TensorFlow numbers repeated scopes from the second on."""
    match = _NUMBERED.fullmatch(step)
    return f"{match[1]}_{match[2] or 0}" if match else step


def _read_metadata(tree: Tree, binding: RecognizedAgent, sources: Mapping[Path, Path]) -> AgentMetadata:
    facts = sb3.add_settings_metadata(binding.facts, tree)
    if (_DATA, key("her_obs_space")) in tree.containers:
        facts = facts.lacking(
            unknown_fact("architecture", "how HER concatenates the parts of an observation")
        )
    first = (attr("actor"), index(0), attr("kernel"))
    kernels = [tree[move.source] for move in binding.moves.moves if move.target == first]
    ddpg = any(str(path[1].value) == "qf_output" for path in sources if len(path) > 1)
    if ddpg and kernels and isinstance(kernels[0], Leaf):
        # They are the algorithm's own: VecNormalize may have been in use as well.
        facts = add_ddpg_statistics(facts, tree, kernels[0].shape[0]).lacking(STATISTICS_UNKNOWN)
    return facts


def _value(tree: Tree, name: str) -> object:
    leaf = tree.get((_DATA, key(name)))
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def _name_variables(tree: Tree) -> tuple[dict[Path, tuple[str, ...]], str, frozenset[Path]] | None:
    """Return names for a list of variables, the policy that creates them, and the repeated variables."""
    policy = _value(tree, "policy")
    listed = [path for path, leaf in tree.tensors() if len(path) == 2 and path[0] == _PARAMS]
    if [path[1] for path in listed] != [index(number) for number in range(len(listed))]:
        return None
    if not listed or not isinstance(policy, Record):
        return None
    match = _POLICY.fullmatch(policy.name)
    if match is None:
        names = _name_by_shape(tree, [leaf.shape for path, leaf in tree.tensors() if path in listed])
        return None if names is None else (dict(zip(listed, names, strict=True)), policy.name, frozenset())
    expected = [name for component, last in _ORDER[match[1]] for name in _variables(tree, component, last)]
    # Older versions list the variables of both graphs, followed by all of them a second time.
    if not expected or len(listed) % len(expected):
        return None
    first, rest = listed[: len(expected)], listed[len(expected) :]
    if not all(schema.are_equal(tree, path, first[n % len(expected)]) for n, path in enumerate(rest)):
        return None
    return dict(zip(first, expected, strict=True)), match[0], frozenset(rest)


def _name_by_shape(tree: Tree, shapes: Sequence[Shape]) -> list[tuple[str, ...]] | None:
    """Return names for DQN's or an on-policy algorithm's variables; None unless one order fits the shapes."""
    choices = sb3.read_choices(tree)
    outputs = sum(choices.counts) if choices is not None else len(sb3.read_bound(tree, "low") or ())
    if shapes[:1] == [()] and choices is not None and len(shapes) % 2:
        half = len(shapes) // 2
        layers = _split_layers(shapes[1 : 1 + half])
        if layers is None or shapes[1 : 1 + half] != shapes[1 + half :]:
            return None
        inner = _name_streams(layers, outputs)
        names = [("deepq", "eps"), *((*scope, *name) for scope in _Q_SCOPES for name in inner)]
        return names if inner else None
    fitting = [
        names for names in _list_on_policy_orders(len(shapes)) if _fits_on_policy(names, shapes, outputs)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _split_layers(shapes: Sequence[Shape]) -> list[tuple[Shape, bool]] | None:
    """Return the kernel's shape of each dense layer, and whether a layer norm follows; None for others."""
    layers: list[tuple[Shape, bool]] = []
    start = 0
    while start < len(shapes):
        kernel = shapes[start]
        if len(kernel) != 2 or list(shapes[start + 1 : start + 2]) != [kernel[1:]]:
            return None
        normed = list(shapes[start + 2 : start + 4]) == [kernel[1:]] * 2
        layers.append((kernel, normed))
        start += 4 if normed else 2
    return layers


def _name_streams(layers: Sequence[tuple[Shape, bool]], outputs: int) -> list[tuple[str, ...]]:
    """Return the variables' names in a Q-network's scope, none if it has other layers than DQN's."""
    half = len(layers) // 2
    first, second = layers[:half], layers[half:]
    dueling = first[:-1] == second[:-1] and [name[0][1] for name in (*first[-1:], *second[-1:])] == [
        outputs,
        1,
    ]
    names: list[tuple[str, ...]] = []
    for stream, chain in zip(_STREAMS, (first, second) if dueling else (layers,), strict=False):
        width = chain[0][0][0]
        for number, ((rows, columns), normed) in enumerate(chain):
            if rows != width or (normed and number == len(chain) - 1):
                return []
            width = columns
            names += [(stream, f"fully_connected_{number}", name) for name in ("weights", "biases")]
            names += [(stream, f"LayerNorm_{number}", name) for name in ("beta", "gamma") if normed]
        if width != (1 if stream == "state_value" else outputs):
            return []
    return names


def _list_on_policy_orders(count: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield the possible names of `count` variables: hidden layers in pairs, or the policy's first."""
    hidden, rest = divmod(count - 6, 4)
    if hidden < 0 or rest > 1:
        return
    pairs = [(f"pi_fc{number}", f"vf_fc{number}") for number in range(hidden)]
    by_pair = [name for pair in pairs for name in pair]
    by_network = [pair[side] for side in range(2) for pair in pairs]
    for layers in [by_pair] if by_pair == by_network else [by_pair, by_network]:
        heads = ("vf", "pi", "q")
        names: list[tuple[str, ...]] = [
            ("model", layer, name) for layer in (*layers, *heads) for name in "wb"
        ]
        if rest:
            names.insert(-2, ("model", "pi", "logstd"))
        yield names


def _fits_on_policy(names: Sequence[tuple[str, ...]], shapes: Sequence[Shape], outputs: int) -> bool:
    """Return whether the shapes are those of a policy, a value and Q-values with these names."""
    sizes = dict(zip(names, shapes, strict=True))
    if any(sizes[name] != sizes[(*name[:2], "w")][1:] for name in names if name[2] == "b"):
        return False
    if sizes.get(("model", "pi", "logstd"), (1, outputs)) != (1, outputs):
        return False
    kernels = {
        top: [sizes[name] for name in names if name[2] == "w" and name[1].partition("_")[0] == top]
        for top in ("pi", "vf", "q")
    }
    chains = [kernels["pi"], kernels["vf"], [*kernels["vf"][:-1], *kernels["q"]]]
    ends = (outputs, 1, outputs)
    return all(
        all(len(shape) == 2 for shape in chain)
        and all(one[1] == other[0] for one, other in pairwise(chain))
        and chain[0][0] == chains[0][0][0]
        and chain[-1][1] == end
        for chain, end in zip(chains, ends, strict=True)
    )


def _variables(tree: Tree, component: str, last: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    sizes = [path for path in tree if path[:3] == (_DATA, key("policy_kwargs"), key("layers"))]
    hidden = [f"fc{number}" for number in range(len(sizes) or _HIDDEN)]
    for layer in (*hidden, *last):
        for name in ("kernel", "bias"):
            yield (*component.split("/"), layer, name)
