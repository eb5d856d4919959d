"""FastTD3 and FastSAC."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.sidecar import NO_STATISTICS, OUTPUT_RANGE
from ckpttool.core.tree import Leaf, Tree, ValueLeaf, attr, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable, LibraryPlugin
from ckpttool.libraries.schema import (
    AgentMetadata,
    ObservationNormalizer,
    RecognizedAgent,
    list_distribution_notes,
)
from ckpttool.mapping.rules import Plan, Settings, constant_tensor

if TYPE_CHECKING:
    from ckpttool.libraries.write import WritingTable


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
            f"{stored}/{name}": f"normalizer/{whose}{name_}"
            for stored, whose in _NORMALIZERS.items()
            for name, name_ in _STATISTICS.items()
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
    """Return the recognised agent of a file with the names used by `save_params`.

    Sources, in github.com/younggyoseo/FastTD3: fast_td3/fast_td3_utils.py (`save_params`;
    `EmpiricalNormalization`: `(x - mean) / (std + 0.01)`), fast_td3/fast_td3.py (`Actor`: tanh of the last
    layer; `Critic`: two networks that output the logits of `num_atoms` atoms, whose values are the buffer
    q_support; ReLU), fast_sac/fast_sac.py, fast_td3/environments (with Isaac Lab an action is multiplied by
    the argument action_bounds).
    """
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
        bounds = recorded.get("action_bounds")
        if not isinstance(bounds, int | float):
            return facts
        high = float(bounds)
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
    stated = None if setting is None else schema.read_switch(setting, default=True)
    mean, std = (tree.get((key(where), key(name))) for name in ("_mean", "_std"))
    if setting is not None and stated is None:
        text = "whose switch obs_normalization is no single value"
        return replace(binding, facts=facts.not_understood("obs_norm", text, "args"))
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
        places = {name_: (key(normalizer), key(stored)) for stored, name_ in _STATISTICS.items()}
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
