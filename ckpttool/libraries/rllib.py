"""RLlib: RLModules, and policies of the old API stack."""

from __future__ import annotations

import binascii
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import deferred, filesystem
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.sidecar import NO_BOUNDS, NO_ENVIRONMENT, NO_STATISTICS, LedgerEntry, Scores, unknown_fact
from ckpttool.core.source import Inline
from ckpttool.core.tree import Container, Leaf, Path, Record, Tree, ValueLeaf, attr, display, index, key
from ckpttool.libraries import schema, write
from ckpttool.libraries.binding import ENCODERS, JOINED, OUTPUT, bind, rejoin_last_layer
from ckpttool.libraries.recognize import LayoutTable, LibraryPlugin
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
    unpack_numbers,
)
from ckpttool.libraries.write import LayerNames, NetworkRow, WritingTable
from ckpttool.mapping.rules import Move, Plan, Settings

_WHOSE = "RLlib"
_ARGUMENTS = attr("arguments")
_ALGORITHMS = "ray.rllib.algorithms"
_ACTIVATIONS = ("relu", "tanh", "elu", "silu", "sigmoid", "linear")
_CLIP = 20.0  # default_model_config.py, log_std_clip_param


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a PPO module for a policy with a state value, else a SAC module.

    SAC's module is for inference only, without Q-functions, unless these encode observation and action
    separately, as RLlib's do. Raise UnsupportedError for a policy whose standard deviation does not depend on
    the observation, UsageError if the action bounds are unknown. Sources, in github.com/ray-project/ray:
    rllib/algorithms/sac/sac_catalog.py (a Q-function encodes observation and action separately before it
    concatenates them, so it is not an MLP; a module for inference has none),
    rllib/algorithms/ppo/ppo_catalog.py, rllib/core/rl_module/default_model_config.py (one list of sizes for
    all encoders, heads of one layer), rllib/core/models/torch/heads.py (`log_std_clip_param_const`).
    """
    ppo = write.has_value_network(binding)
    critics = [part for part in binding.parts if part.streams and part.title in _Q_MODULES]
    if critics:
        sizes = _list_sac_settings(binding, agent, critics)
    else:
        sizes = _list_common_settings(binding, agent, ppo=ppo)
    encoder, head = ("encoder.actor_encoder", "clip_affine") if ppo else ("pi_encoder", "affine")
    rows = [NetworkRow("actor", (), LayerNames(f"{encoder}.net.mlp.{{s}}", "pi.net.mlp.0", joined=True))]
    if ppo:
        rows.append(NetworkRow("value", (), LayerNames("encoder.critic_encoder.net.mlp.{s}", "vf.net.mlp.0")))
    only = "the module is for inference only: RLlib's Q-functions encode observation and action separately"
    notes = () if ppo or critics else (only,)
    table = WritingTable(_WHOSE, rows, head, hidden="", values=ppo, notes=notes)
    rest = tuple(part for part in binding.parts if part not in critics)
    file_plan = write.plan_torch_file(table, replace(binding, parts=rest), agent, settings)
    moves = [_move_to_head(move, sizes) for move in file_plan.moves] if critics else [*file_plan.moves]
    moves += [move for part in critics for move in _move_critic(part, agent)]
    heads = ("pi", "vf") if ppo else ("pi", *(_Q_MODULES[part.title] for part in critics))
    clips: dict[Path, Leaf | ValueLeaf] = {
        (key(f"{head}.log_std_clip_param_const"),): Leaf(
            "float32", (1,), Inline(struct.pack("<f", _CLIP)), "", "buffer"
        )
        for head in heads
    }
    twins = not critics or any(part.head == "q2" for part in critics)
    settings_ = {**sizes, **({"vf_share_layers": False} if ppo else {"twin_q": twins})}
    arguments = _arguments(binding, agent, settings_, ppo=ppo, inference=not ppo and not critics)
    empty: dict[Path, Container] = {
        (_ARGUMENTS, key("model_config"), key(name)): Container("list")
        for name, value in sizes.items()
        if value == []
    }
    return replace(
        file_plan, moves=tuple(moves), added={**file_plan.added, **clips, **arguments}, containers=empty
    )


def _move_to_head(move: Move, sizes: Mapping[str, Any]) -> Move:
    """Return the move of a policy's layer; its last hidden layers belong to the head."""
    module, _, rest = str(move.target[-1].value).partition(".net.mlp.")
    number, _, weight = rest.partition(".")
    encoder, head = (2 * len(sizes[f"{name}_hiddens"]) for name in ("fcnet", "head_fcnet"))
    if module == "pi":
        return replace(move, target=write.make_torch_path((), f"pi.net.mlp.{head}", weight))
    if int(number) < encoder:
        return move
    return replace(move, target=write.make_torch_path((), f"pi.net.mlp.{int(number) - encoder}", weight))


_Q_MODULES = {
    "critic/q1": "qf",
    "critic/q2": "qf_twin",
    "critic_target/q1": "target_qf",
    "critic_target/q2": "target_qf_twin",
}


def _move_critic(part: AgentNetwork, agent: Tree) -> Iterator[Move]:
    """Yield the moves of a Q-function of two encoders, their fusion and a head."""
    module, fused = _Q_MODULES[part.title], [layer.name[0] for layer in part.layers].count(JOINED)
    for position, (name, kind) in enumerate(part.layers):
        if kind != "dense":
            raise UnsupportedError(f"{_WHOSE} supports only dense layers", found=f"{part.title}: {kind}")
        number = int(name[-1])
        if name[0] == ENCODERS:
            layer = f"{module}_encoder.{ENCODERS}.{name[1]}.net.mlp.{2 * number}"
        elif name[0] == JOINED:
            last = number == fused - 1
            layer = f"{module}_encoder." + ("output_layer" if last else f"fusion_layers.{number}")
        else:
            layer = f"{module}.net.mlp.{2 * number}"
        for weight in write.TORCH["dense"].weights:
            source = schema.canonical_weight_path(part, position, weight.canonical)
            if source not in agent:
                raise UnsupportedError(f"{_WHOSE} requires layers with biases", path=display(source))
            rule = weight.to_canonical.inverse(agent[source])
            yield Move(source, write.make_torch_path((), layer, weight.name), rule)


def _list_sac_settings(
    binding: RecognizedAgent, agent: Tree, critics: Sequence[AgentNetwork]
) -> dict[str, object]:
    """Return the sizes and activations of a SAC module with its Q-functions.

    Raise UnsupportedError for networks that RLlib's catalog does not build from one setting for each kind.
    """
    kinds: dict[str, set[tuple[tuple[int, str], ...]]] = {}
    for part in (*(part for part in binding.parts if part.component == "actor"), *critics):
        names = binding.facts.activations_of(part.component)
        rows = zip(
            list_kernel_shapes(part, agent)[:-1], (*names, *names[-1:] * len(part.layers)), strict=False
        )
        owned: dict[str, list[tuple[int, str]]] = {JOINED: [], OUTPUT: []} if part.streams else {"policy": []}
        for layer, (shape, name) in zip(part.layers, rows, strict=False):
            owner = "/".join(layer.name[:-1]) if part.streams else "policy"
            owned.setdefault(owner, []).append((shape[1], name))
        for owner, row in owned.items():
            kinds.setdefault(owner.partition("/")[0], set()).add(tuple(row))
    encoder, joined, output, policy = (min(kinds[name]) for name in (ENCODERS, JOINED, OUTPUT, "policy"))
    functions = [{name for _, name in row} for row in (encoder, joined, output)]
    if (
        any(len(rows) > 1 for rows in kinds.values())
        or policy != (*encoder, *output)
        or joined[-1][0] != encoder[-1][0]
        or not all(len(names) <= 1 and names <= {*_ACTIVATIONS} for names in functions)
    ):
        raise UnsupportedError(
            f"{_WHOSE} requires the same sizes and activations in the policy and the Q-functions' encoders",
            found=f"policy {policy}, encoders {encoder}, fusion {joined}, head {output}",
        )
    settings: dict[str, object] = {}
    for name, layers, default in (
        ("fcnet", encoder, ""),
        ("fusionnet", joined[:-1], joined[-1][1]),
        ("head_fcnet", output, "relu"),
    ):
        settings[f"{name}_hiddens"] = [width for width, _ in layers]
        settings[f"{name}_activation"] = layers[0][1] if layers else default
    return settings


def _arguments(
    binding: RecognizedAgent, agent: Tree, model: Mapping[str, object], *, ppo: bool, inference: bool
) -> dict[Path, Leaf | ValueLeaf]:
    """Return the class of the module and its arguments: spaces, and the settings of the model."""
    low, high = require_action_bounds(binding.facts, agent, f"an {_WHOSE} module")
    name, cls = ("ppo", "PPO") if ppo else ("sac", "SAC")
    infinite = float("inf")
    actor = next(part for part in binding.parts if part.component == "actor")
    observations = list_kernel_shapes(actor, agent)[0][0]
    values: Mapping[str, object] = {
        "class": Record(
            f"{_ALGORITHMS}.{name}.torch.default_{name}_torch_rl_module.Default{cls}TorchRLModule"
        ),
        "catalog_class": Record(f"{_ALGORITHMS}.{name}.{name}_catalog.{cls}Catalog"),
        "inference_only": inference,
        "learner_only": False,
        "observation_space/low": [-infinite] * observations,
        "observation_space/high": [infinite] * observations,
        "action_space/low": list(low),
        "action_space/high": list(high),
        **{f"model_config/{setting}": value for setting, value in model.items()},
    }
    arguments: dict[Path, Leaf | ValueLeaf] = {}
    for argument, value in values.items():
        path = (_ARGUMENTS, *map(key, argument.split("/")))
        if isinstance(value, list):
            arguments |= {(*path, index(n)): ValueLeaf(item) for n, item in enumerate(value)}
        elif isinstance(value, Record | str | bool):
            arguments[path] = ValueLeaf(value)
    return arguments


def _list_common_settings(binding: RecognizedAgent, agent: Tree, *, ppo: bool) -> dict[str, object]:
    """Return the sizes and the activation of all networks of a module without hidden layers in its heads."""
    parts = [part for part in binding.parts if part.component in (("actor", "value") if ppo else ("actor",))]
    kernels = {part.title: list_kernel_shapes(part, agent) for part in parts}
    sizes = {tuple(shape[1] for shape in shapes[:-1]) for shapes in kernels.values()}
    if len(sizes) != 1:
        raise UnsupportedError(f"{_WHOSE} requires the same hidden layer sizes in all networks")
    return {
        "fcnet_hiddens": list(sizes.pop()),
        "fcnet_activation": write.require_activation(
            replace(binding, parts=tuple(parts)), _WHOSE, _ACTIVATIONS
        ),
    }


POLICY_TABLE = LayoutTable(
    name="rllib_policy",
    statistics="MeanStdFilter in the folder",
    plays=("SAC", "PPO", "DDPG", "TD3", "DQN", "C51"),
    title="RLlib policy of the old API stack (SAC, PPO; DDPG, TD3; DQN)",
    framework="torch",
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["rllib policy"]),
    seen="SAC, PPO and DQN as Ray 2.60 saves them",
)
_POLICY_DQN = POLICY_TABLE.facts._replace(head="argmax", hidden="tanh")
_POLICY_PPO = POLICY_TABLE.facts._replace(head="clip_affine", hidden="tanh")
_LARGEST = 1 << 16  # size limit of an unpacked bound in bytes
_DTYPES = {"<f4": "float32", "<f8": "float64", "<i4": "int32", "<i8": "int64"}
_SMALL = 1e-8  # rllib/utils/numpy.py, SMALL_NUMBER

Said = Mapping[str, Leaf | ValueLeaf]


def recognize_policy(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the folder's name is no evidence
    """Return the recognised agent of a checkpoint with one policy's weights.

    Sources, in github.com/ray-project/ray: rllib/models/torch/fcnet.py (`_hidden_layers`, `_logits`, a value
    branch that SAC does not use), rllib/algorithms/sac/sac_torch_model.py (`action_model`, `q_net`,
    `twin_q_net`, `log_alpha`), rllib/algorithms/ddpg/ddpg_torch_model.py (`policy_model`, `q_model`,
    `twin_q_model`: sigmoid of twice the last layer from 0 to 1 is tanh of it from -1 to 1),
    rllib/models/torch/torch_action_dist.py, rllib/utils/filter.py (`MeanStdFilter`: `(x - mean) / (std +
    1e-8)`), rllib/utils/serialization.py (spaces: an array is zlib of a .npy file in base64),
    rllib/utils/spaces/space_utils.py (`unsquash_action`), rllib/algorithms/dqn/dqn_torch_model.py
    (`advantage_module`, `value_module`, whose layers have ReLU, which no setting changes; with `num_atoms`
    the outputs are logits of values from `v_min` to `v_max`) and dqn_torch_policy.py (`compute_q_values`).
    """
    names = [tree.names[path].split("/") for path, _ in tree.tensors()]
    roots = {"/".join((*n[:2], "")) for n in names if n[0] == "policies" and n[2:3] == ["weights"]}
    # A policy's own folder has its weights at the top level.
    roots = roots or {"" for n in names if n[0] == "weights"}
    if len(roots) != 1:
        return None
    (policy,) = roots
    recorded = tree.entries
    table = _choose_policy_table(f"{policy}weights", recorded)
    binding = bind(tree, table) if table is not None else None
    if binding is not None and table is not None and table.facts is _POLICY_DQN:
        binding = _add_q_values(binding, tree, recorded, policy)
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    binding = _add_policy_choices(binding, recorded, policy)
    facts = _statistics(
        _bounds(_settings(binding.facts, recorded, policy), recorded, policy), recorded, policy
    )
    binding = _add_dueling_relu(replace(binding, facts=facts))
    # SAC's value branches are never used.
    idle = {path for path, _ in tree.tensors() if "/_value_branch/" in tree.names[path]}
    binding = _add_critic_activation(binding, recorded, policy)
    return _drop_settings(binding, tree, idle, ("other", "buffer"))


def _add_critic_activation(binding: RecognizedAgent, recorded: Said, policy: str) -> RecognizedAgent:
    """Return the binding with the activation of Q-functions beside a policy, if the settings have it."""
    for config in ("algorithm_state/config", f"{policy}policy_spec/config"):
        names = ("q_model_config/fcnet_activation", "critic_hidden_activation")
        stored = next((name for option in names if (name := _text(recorded, f"{config}/{option}"))), None)
        if binding.facts.head == "affine" and stored is not None:
            name = schema.RLLIB.get(stored, stored)
            return replace(binding, facts=binding.facts.read_network("critic", config, (name,)))
    return binding


def _choose_policy_table(weights: str, recorded: Said) -> LayoutTable | None:
    """Return the table of the algorithm that the weight names belong to."""

    def dense(network: str, layers: str = "_hidden_layers", last: str = "_logits") -> str:
        return f"{weights}/{network}{layers}+{weights}/{network}{last}"

    if any(name.startswith(f"{weights}/action_model/") for name in recorded):
        q = {"q_net": "q1", "twin_q_net": "q2"}
        critics = {dense(f"{name}/"): f"critic/{head}" for name, head in q.items()}
        return replace(
            POLICY_TABLE,
            components={dense("action_model/"): "actor", **critics},
            tensors={f"{weights}/log_alpha": "temperature/log_alpha"},
            joined=True,
        )
    if any(name.startswith(f"{weights}/policy_model/") for name in recorded):
        names = {"policy_model": "actor", "q_model": "critic/q1", "twin_q_model": "critic/q2"}
        return replace(POLICY_TABLE, components={f"{weights}/{n}": target for n, target in names.items()})
    if any(name.startswith(f"{weights}/advantage_module/") for name in recorded):
        names = {
            f"{weights}/_hidden_layers+{weights}/{module}": f"critic/{head}"
            for module, head in (("advantage_module", "q1"), ("value_module", "q2"))
        }
        return replace(POLICY_TABLE, components=names, facts=_POLICY_DQN)
    if f"{weights}/_logits/_model/0/weight" in recorded:
        value = f"{weights}/_value_branch_separate+{weights}/_value_branch"
        names = {dense(""): "actor", value: "value"}
        free = f"{weights}/_append_free_log_std/log_std"  # misc.py, AppendBiasLayer
        tensors = {free: "actor/log_std"} if free in recorded else {}
        return replace(POLICY_TABLE, components=names, facts=_POLICY_PPO, joined=not tensors, tensors=tensors)
    return None


def _add_q_values(
    binding: RecognizedAgent, tree: Tree, recorded: Said, policy: str
) -> RecognizedAgent | None:
    """Return the binding of DQN with what its outputs are, by the settings; refuse what they leave open."""
    weights = f"{policy}weights"
    heads = {part.head: part for part in binding.parts}
    if "q1" not in heads:
        return None
    dueling = any(name.startswith(f"{weights}/value_module/") for name in recorded)
    config = "algorithm_state/config"
    config = config if f"{config}/num_atoms" in recorded else f"{policy}policy_spec/config"
    leaves = [recorded.get(f"{config}/{name}") for name in ("num_atoms", "v_min", "v_max")]
    atoms, low, high = (leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in leaves)
    binding = binding.choosing(tree, "dueling" if dueling else "values", where=f"{weights}/value_module")
    if any(layer.kind != "dense" for part in binding.parts for layer in part.layers):
        return binding.refused("critic", "layer norms after the activations")
    if dueling != ("q2" in heads):
        return binding.refused("critic", "a state value of other layers than dense ones")
    outputs = 1 if atoms is None else atoms
    if not isinstance(outputs, int) or outputs < 1:
        return binding.refused("critic", f"num_atoms {outputs!r}")
    if outputs == 1:
        return binding
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return binding.refused("critic", "atoms without v_min and v_max")
    support = [low + number * (high - low) / (outputs - 1) for number in range(outputs)]
    scores: Scores = "dueling_atoms" if dueling else "atoms"
    return binding.choosing(tree, scores, support, outputs, f"{config}/num_atoms")


def _add_dueling_relu(binding: RecognizedAgent) -> RecognizedAgent:
    """Return the binding of DQN with ReLU after the hidden layers of its advantages and its state value."""
    acting = next(part for part in binding.parts if part.acts)
    if not acting.chooses:
        return binding
    hidden = (
        binding.facts.hidden if layer.name[0] == "_hidden_layers" else "relu" for layer in acting.layers[:-1]
    )
    return replace(binding, facts=binding.facts._replace(activations=tuple(hidden)))


def _settings(facts: AgentMetadata, recorded: Said, policy: str) -> AgentMetadata:
    """Return the facts with the environment and the activation from the algorithm's or policy's config."""
    for config in ("algorithm_state/config", f"{policy}policy_spec/config"):
        env = _text(recorded, f"{config}/env")
        if env is not None and ":" not in env and facts.env is None:
            facts = facts.read(config, env=env)
        model = "policy_model_config" if facts.head == "affine" else "model"
        # fcnet.py: if a network consists only of post layers, their activation applies.
        post = not any(name.startswith(f"{config}/{model}/fcnet_hiddens/") for name in recorded)
        post = post and any(name.startswith(f"{config}/{model}/post_fcnet_hiddens/") for name in recorded)
        activation = _text(recorded, f"{config}/{model}/{'post_' if post else ''}fcnet_activation")
        # DDPG's and TD3's (rllib/algorithms/ddpg/ddpg.py).
        activation = activation or _text(recorded, f"{config}/actor_hidden_activation")
        if activation is not None and "hidden" not in facts.origins:
            facts = facts.read(config, hidden=schema.RLLIB.get(activation, activation))
    return facts if facts.env is not None else facts.lacking(NO_ENVIRONMENT)


def _text(recorded: Said, name: str) -> str | None:
    leaf = recorded.get(name)
    return leaf.value if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, str) else None


def _bounds(facts: AgentMetadata, recorded: Said, policy: str) -> AgentMetadata:
    space = f"{policy}policy_spec/action_space/space"
    low, high = _array_bounds(recorded, space)
    facts = facts.bounded(space, low, high) or facts.lacking(NO_BOUNDS)
    space = f"{policy}policy_spec/observation_space/space"
    return _with_observation_space(facts, space, _array_bounds(recorded, space))


def _add_policy_choices(binding: RecognizedAgent, recorded: Said, policy: str) -> RecognizedAgent:
    """Return the binding with discrete actions, if the policy's space has them (serialization.py)."""
    where = f"{policy}policy_spec/action_space/space"
    kind = _text(recorded, f"{policy}policy_spec/action_space/type") or _text(recorded, f"{where}/space")
    counts: tuple[int, ...] = ()
    if kind in (None, "box"):
        return binding
    if kind == "discrete":
        counts = schema.read_whole_numbers(recorded.get(f"{where}/n"))
    elif kind == "multi-discrete":
        dtype = _text(recorded, f"{where}/dtype")
        counts = tuple(map(int, _array(_text(recorded, f"{where}/nvec"), dtype)))
    elif kind == "tuple":
        counts = _count_tuple_choices(recorded, f"{where}/spaces/")
    choices = schema.make_choices(counts, single=kind == "discrete")
    if choices is None or binding.facts.head not in (_POLICY_PPO.head, _POLICY_DQN.head):
        return binding.refused("actor", schema.DISCRETE_CHOICE)
    if binding.facts.choices is not None:
        known = binding.facts.choices
        choices = choices._replace(scores=known.scores, support=known.support)
    facts = binding.facts.read(where, head="argmax", choices=choices)
    return replace(rejoin_last_layer(binding), facts=facts)


def _count_tuple_choices(recorded: Said, spaces: str) -> tuple[int, ...]:
    """Return the number of values of each Discrete space in a Tuple; none if another space is among them."""
    fields = [name.removeprefix(spaces).split("/") for name in recorded if name.startswith(spaces)]
    counts = [
        schema.read_whole_numbers(recorded.get(f"{spaces}{number}/n"))
        for number in range(len({prefix for prefix, *_ in fields}))
    ]
    # MultiBinary, too, has a number.
    kinds = {_text(recorded, f"{spaces}{prefix}/space") for prefix, *_ in fields}
    plain = kinds <= {None, "discrete"} and all(len(field) == 2 for field in fields)
    return tuple(sizes[0] for sizes in counts) if plain and all(len(sizes) == 1 for sizes in counts) else ()


def _array_bounds(recorded: Said, space: str) -> tuple[tuple[float, ...], ...]:
    return tuple(
        _array(_text(recorded, f"{space}/{end}"), _text(recorded, f"{space}/dtype"))
        for end in ("low", "high")
    )


def _with_observation_space(
    facts: AgentMetadata, where: str, bounds: Sequence[tuple[float, ...]]
) -> AgentMetadata:
    """Return the facts with the bounds of observations that are a single array."""
    space = schema.make_observation_space("gymnasium", {schema.OBSERVATION: (bounds[0], bounds[1])})
    return facts if space is None else facts.read(where, observation_space=space)


def _array(text: str | None, dtype: str | None) -> tuple[float, ...]:
    """Return the numbers of an array serialized by RLlib; none if it is anything else."""
    if text is None or dtype not in _DTYPES:
        return ()
    try:
        data = zlib.decompressobj().decompress(binascii.a2b_base64(text), _LARGEST)
    except (zlib.error, ValueError):
        return ()
    # numpy/lib/format.py, version 1: the header length follows the magic and the version.
    if not data.startswith(b"\x93NUMPY\x01\x00") or len(data) < 10:
        return ()
    start = 10 + int.from_bytes(data[8:10], "little")
    if f"'{dtype}'".encode() not in data[10:start]:
        return ()
    return unpack_numbers(data[start:], _DTYPES[dtype])


def _statistics(facts: AgentMetadata, recorded: Said, policy: str) -> AgentMetadata:
    """Return the facts with the running statistics of a MeanStdFilter, if there is one."""
    statistics = f"algorithm_state/worker/filters/{policy.rstrip('/').rpartition('/')[2]}/running_stats"
    if f"{statistics}/mean_array" not in recorded:
        return facts
    pushes = recorded.get(f"{statistics}/num_pushes")
    if not isinstance(pushes, ValueLeaf) or not pushes.value:
        return facts.lacking(
            unknown_fact(
                "observation statistics", "observation statistics: the filter received no observations"
            )
        )
    norm = _limit(mean_std(recorded, statistics), recorded, statistics.rpartition("/")[0], _FILTER_ATTRIBUTES)
    return facts.lacking(NO_STATISTICS) if norm is None else facts.read(statistics, norm=norm)


# rllib/utils/filter.py, MeanStdFilter: whether it subtracts and divides, and the limit of the result.
_FILTER_ATTRIBUTES = ("demean", "destd", "clip")
# Its connector's settings (rllib/connectors/env_to_module/mean_std_filter.py).
_FILTER_SETTINGS = ("de_mean_to_zero", "de_std_to_one", "clip_by_value")


def _limit(
    norm: ObservationNormalizer | None, recorded: Said, folder: str, names: tuple[str, str, str]
) -> ObservationNormalizer | None:
    """Return the statistics with the limit of their filter; None for another formula or an unclear one."""
    flags = [schema.read_switch(recorded.get(f"{folder}/{name}"), default=True) for name in names[:2]]
    limit = recorded.get(f"{folder}/{names[2]}")
    clip = schema.read_number(limit)
    none = limit is None or (isinstance(limit, ValueLeaf) and limit.value in (None, False))
    return norm._replace(clip=clip or None) if norm and all(flags) and (none or clip is not None) else None


def mean_std(recorded: Said, folder: str) -> ObservationNormalizer | None:
    """Return the statistics of a RunningStat at `folder`: arrays, or RLlib's texts of them.

    None if it is incomplete or is not for observations.
    """
    rows = [recorded.get(f"{folder}/{name}") for name in ("mean_array", "sum_sq_diff_array")]
    pushes = recorded.get(f"{folder}/num_pushes")
    texts = [leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in rows]
    mean, squares = (
        _array(text, "<f8") if isinstance(text, str) else read_numbers(leaf)
        for text, leaf in zip(texts, rows, strict=True)
    )
    count = pushes.value if isinstance(pushes, ValueLeaf) and isinstance(pushes.value, int) else 0
    if count < 1 or not mean or len(mean) != len(squares):
        return None
    variances = [s / (count - 1) for s in squares] if count > 1 else [m * m for m in mean]
    return ObservationNormalizer(
        make_float64_tensor(mean, folder),
        make_float64_tensor(variances, folder),
        epsilon=_SMALL,
        outside=True,
    )


def _drop_settings(
    binding: RecognizedAgent, tree: Tree, idle: set[Path], roles: Collection[str]
) -> RecognizedAgent:
    """Drop entries that only training uses: settings, metrics, tensors of the `roles`, and `idle` ones.

    The latter belong to no layer, and no output depends on them.
    """
    moved = {move.source for move in binding.moves.moves}
    idle -= moved
    left = {path for path, _ in tree.plain()} | {p for p, leaf in tree.tensors() if leaf.role in roles}
    left |= {path for path, _ in tree.tensors() if tree.names[path].endswith("/weights/target_entropy")}
    binding = binding.without({tree.names[path] for path in idle})
    notes = (make_settings_note(len(left - moved)),) if left - moved else ()
    return replace(binding.noted(*notes), consumed=binding.consumed | frozenset((idle | left) - moved))


POLICY = LibraryPlugin(POLICY_TABLE, recognize_policy)


_MODULES = "learner_group/learner/rl_module"
_ARGUMENTS_FILE = "class_and_ctor_args.pkl"
_TUPLE = "/action_space/spaces/"
# First segments in a module's own folder: SAC's, PPO's.
_ENCODERS = ("pi_encoder", "encoder")
_LAYER_NORM = 1e-3

TABLE = LayoutTable(
    name="rllib",
    statistics="MeanStdFilter in the folder",
    plays=("SAC", "PPO", "APPO", "DQN"),
    writes=("SAC", "PPO whose deviation depends on the observation"),
    title="RLlib agent of the new API stack (SAC, PPO, APPO, DQN)",
    framework="torch",
    facts=AgentMetadata(
        head="affine", hidden="tanh", epsilon=_LAYER_NORM, lacks=schema.LEFT_OPEN["rllib sac"]
    ),
    seen="SAC, PPO and DQN as Ray 2.60 saves them",
    joined=True,
)
# PPO's mean is clipped to the bounds, without tanh.
_CONNECTORS = "env_runner/env_to_module_connector"
# Connectors that do not change observations of a single agent, and those whose effect shows in the size.
_NEUTRAL = deferred.compile(
    "AddObservationsFromEpisodesToBatch|AddStatesFromEpisodesToBatch|AddTimeDimToBatchAndZeroPad"
    "|AgentToModuleMapping|BatchIndividualItems|NumpyToTensor|FlattenObservations|WriteObservationsToEpisodes"
)
_FILTER = "MeanStdFilter"
_PPO = AgentMetadata(head="clip_affine", hidden="tanh", epsilon=_LAYER_NORM, lacks=schema.LEFT_OPEN["rllib"])


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the folder's name is no evidence
    """Return the recognised agent of a checkpoint with one RLModule, or of the module's own folder.

    Sources, in github.com/ray-project/ray: rllib/algorithms/sac/sac_catalog.py and
    torch/default_sac_torch_rl_module.py (`pi_encoder`, `pi`, `qf_encoder`, `qf`, their twins and targets),
    rllib/algorithms/ppo/ppo_catalog.py (`encoder`, `pi`, `vf`), rllib/core/rl_module/default_model_config.py
    (activations), rllib/models/torch/torch_distributions.py (the last layer outputs means, then log standard
    deviations), rllib/core/distribution/torch/torch_distribution.py (action without noise: PPO's mean; SAC's
    mean too, without the tanh applied to its samples, github.com/ray-project/ray/issues/51544),
    rllib/core/models/torch/primitives.py (layer norms),
    rllib/algorithms/dqn/torch/default_dqn_torch_rl_module.py (`af`, `vf`: Q-values are advantages minus their
    mean plus the state's value), rllib/utils/spaces/space_utils.py (`unsquash_action`: [-1, 1] goes to the
    bounds and is limited to them), rllib/connectors/env_to_module/mean_std_filter.py and
    rllib/utils/filter.py (observations become `(x - mean) / (std + 1e-8)`, clipped to `clip_by_value`),
    rllib/connectors/connector_pipeline_v2.py (each connector has a folder named after its class).
    """
    names = [tree.names[path].split("/") for path, _ in tree.tensors()]
    stored = [parts for parts in names if parts[:3] == _MODULES.split("/") and len(parts) > 4]
    modules = {"/".join(parts[:4]) + "/" for parts in stored}
    if not modules and any(parts[0] in _ENCODERS and parts[-3:-2] == ["mlp"] for parts in names):
        stored, modules = names, {""}
    if len(modules) != 1:
        return None
    (module,) = modules
    gaussian = any("pi_encoder" in parts[:5] for parts in stored)
    table = _choose_table(module, gaussian=gaussian)
    deviation = f"{module}pi/log_std"
    if deviation in tree.names.values():  # DefaultModelConfig.free_log_std
        table = replace(table, joined=False, tensors={deviation: "actor/log_std"})
    q_network = any(name.startswith(f"{module}af/") for name in tree.names.values())
    if q_network:
        table = replace(table, joined=False)
    binding = bind(tree, table)
    if binding is not None and q_network:
        dueling = any(name.startswith(f"{module}vf/") for name in tree.names.values())
        binding = binding.choosing(tree, "dueling" if dueling else "values", where=f"{module}vf")
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    facts = _add_filter_statistics(_add_hidden_relu(binding), tree)
    facts = _add_critic_activations(replace(binding, facts=facts), None, {})
    clips = {path for path, _ in tree.tensors() if tree.names[path].endswith("/log_std_clip_param_const")}
    return _drop_settings(replace(binding, facts=facts), tree, clips, ("other",))


def _add_filter_statistics(facts: AgentMetadata, tree: Tree) -> AgentMetadata:
    """Return the facts with the statistics of a MeanStdFilter among the connectors, if there is one."""
    recorded = tree.entries
    means = [name for name in recorded if name.startswith(_CONNECTORS) and name.endswith("/mean_array")]
    if not means:
        return facts
    agent = means[0].rpartition("/running_stats/")[0]
    norm = mean_std(recorded, f"{agent}/running_stats/0") if len(means) == 1 else None
    norm = _limit(norm, recorded, agent, _FILTER_SETTINGS)
    whole = all(f"{agent}/{name}" in recorded for name in _FILTER_SETTINGS)
    pushes = recorded.get(f"{agent}/running_stats/0/num_pushes")
    alone = isinstance(pushes, ValueLeaf) and pushes.value == 1  # its variance differs between versions
    if norm is None or alone or not whole:
        return facts.lacking(NO_STATISTICS)
    where = f"{agent.rpartition('/')[0] or agent}/state.pkl"
    return facts.read(where, norm=norm)


def _add_hidden_relu(binding: RecognizedAgent) -> AgentMetadata:
    """Return the facts with ReLU for hidden layers of the head, which has none by default."""
    actor = next(part for part in binding.parts if part.acts)
    encoder = ["encoder" in layer.name[0] for layer in actor.layers[:-1]]
    if all(encoder):
        return binding.facts
    habits = tuple(binding.facts.hidden if inside else "relu" for inside in encoder)
    return binding.facts._replace(activations=habits)


def _add_critic_activations(
    binding: RecognizedAgent, where: str | None, stated: Mapping[str, str]
) -> AgentMetadata:
    """Return the facts with the activations of Q-functions that encode their inputs separately.

    `stated` are those of the encoders (""), their fusion and the head, else RLlib's defaults.
    """
    facts = binding.facts
    functions = {ENCODERS: ("", facts.hidden), JOINED: ("fusion", "tanh"), OUTPUT: ("head", "relu")}
    for part in binding.parts:
        if part.streams:
            kinds = [functions[layer.name[0]] for layer in part.layers if layer.kind == "dense"]
            names = tuple(stated.get(name, default) for name, default in kinds[:-1])
            facts = facts.read_network(part.component, where, names)
    return facts


def _choose_table(module: str, *, gaussian: bool) -> LayoutTable:
    """Return the table of SAC's networks, which use tanh, or of PPO's."""
    if gaussian:
        names = {
            "pi_encoder+pi": "actor",
            "qf_encoder+qf": "critic/q1",
            "qf_twin_encoder+qf_twin": "critic/q2",
        }
        names |= {
            "target_qf_encoder+target_qf": "critic_target/q1",
            "target_qf_twin_encoder+target_qf_twin": "critic_target/q2",
        }
    else:
        names = {"encoder/actor_encoder+pi": "actor", "encoder/critic_encoder+vf": "value"}
        names["encoder/encoder+pi"] = "actor"  # one encoder for both
        # DQN: advantages or values, and a dueling one's state value.
        for target, name in (("", "critic"), ("_target_", "critic_target")):
            names |= {f"{target}encoder+{target}{n}": f"{name}/{q}" for n, q in (("af", "q1"), ("vf", "q2"))}
    placed = {
        "+".join(f"{module}{part}" for part in name.split("+")): canonical
        for name, canonical in names.items()
    }
    return replace(TABLE, components=placed, facts=TABLE.facts if gaussian else _PPO)


def companions(location: str) -> Sequence[str]:
    """Return the files in which RLlib stores each module's constructor arguments."""
    modules = _arguments_below(os.path.join(location, *_MODULES.split("/")))
    if modules is None:
        return (os.path.join(location, _ARGUMENTS_FILE),) if filesystem.isdir(location) else ()
    return [*modules, *(_arguments_below(os.path.join(location, *_CONNECTORS.split("/"))) or ())]


def _arguments_below(folder: str) -> list[str] | None:
    """Return the argument files in the subfolders of a folder, None if it cannot be listed."""
    try:
        names = sorted(filesystem.listdir(folder))
    except OSError:
        return None
    folders = [os.path.join(folder, name) for name in names]
    return [os.path.join(inner, _ARGUMENTS_FILE) for inner in folders if filesystem.isdir(inner)]


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with facts from a module's arguments or a connector's class.

    A module's arguments contain the action bounds and the activations.
    """
    above, name = os.path.split(os.path.dirname(file))
    if os.path.basename(above) == os.path.basename(_CONNECTORS):
        return _check_connector(binding, name)
    recorded = tree.entries
    facts = binding.facts
    low, high = (read_numbers(_find_only(recorded, f"action_space/{end}")) for end in ("low", "high"))
    facts = facts.bounded(_ARGUMENTS_FILE, low, high) or facts
    counts = [_find_only(recorded, f"action_space/{name}") for name in ("n", "nvec")]
    several = {name.partition(_TUPLE)[0] for name in recorded if _TUPLE in name}
    if any(number is not None for number in counts) or several:
        numbers = [schema.read_whole_numbers(number) for number in counts]
        numbers += [_count_tuple_choices(recorded, name + _TUPLE) for name in several]
        choices = schema.make_choices(next(filter(None, numbers), ()), single=bool(numbers[0]))
        if choices is None or facts.head not in (_PPO.head, "argmax"):
            return binding.refused("actor", schema.DISCRETE_CHOICE)
        if facts.choices is not None:
            choices = choices._replace(scores=facts.choices.scores)
        # The last layer was taken for means and deviations; it has the logits.
        binding = rejoin_last_layer(binding)
        facts = facts.without_lack("action bounds", "action map")
        facts = facts.read(_ARGUMENTS_FILE, head="argmax", choices=choices)
    bounds = tuple(read_numbers(_find_only(recorded, f"observation_space/{end}")) for end in ("low", "high"))
    facts = _with_observation_space(facts, _ARGUMENTS_FILE, bounds)
    settings = {"": "fcnet", "head": "head_fcnet", "fusion": "fusionnet"}
    stated = {}
    for name, setting in settings.items():
        if (leaf := _find_only(recorded, f"model_config/{setting}_activation")) is not None:
            # An unknown one keeps its text, which no supported one has; rllib/utils/framework.py,
            # `get_activation_fn`: None is linear.
            text = str(leaf.value) if isinstance(leaf, ValueLeaf) else "?"
            stated[name] = schema.RLLIB.get(text, text)
    inside, head = stated.get(""), stated.get("head")
    actor = next(part for part in binding.parts if part.acts)
    encoder = ["encoder" in layer.name[0] for layer in actor.layers[:-1]]
    if not all(encoder) and (inside or head):
        habit = facts.hidden
        own = tuple((inside or habit) if is_encoder else (head or "relu") for is_encoder in encoder)
        facts = facts.read(_ARGUMENTS_FILE, activations=own)
    elif inside:
        facts = facts.read(_ARGUMENTS_FILE, hidden=inside)
    if stated:
        facts = _add_critic_activations(replace(binding, facts=facts), _ARGUMENTS_FILE, stated)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _check_connector(binding: RecognizedAgent, name: str) -> RecognizedAgent:
    """Return the binding with an entry for a connector that changes observations and is not applied."""
    name = re.sub(r"^\d+[-_]", "", name)
    if _NEUTRAL.fullmatch(name) or (name == _FILTER and binding.facts.norm is not None):
        return binding
    if name == _FILTER:
        return replace(binding, facts=binding.facts.lacking(NO_STATISTICS))
    where = f"{_CONNECTORS}/{name}"
    return binding.entered(LedgerEntry("not used", "wrapper", f"connector {name}", where, decides=True))


def _find_only(recorded: Mapping[str, Leaf | ValueLeaf], ending: str) -> Leaf | ValueLeaf | None:
    leaves = [leaf for name, leaf in recorded.items() if name.endswith(f"/{ending}")]
    return leaves[0] if len(leaves) == 1 else None
