"""rsl_rl's PPO agents: `model_N.pt` with one state_dict (versions 1 to 3) or one per network (4, 5).

Sources, in github.com/leggedrobotics/rsl_rl: rsl_rl/runners/on_policy_runner.py (`save`),
rsl_rl/modules/actor_critic.py (`act_inference`: the mean itself), rsl_rl/models/mlp_model.py and
rsl_rl/algorithms/ppo.py (`save`) since 4.0, rsl_rl/modules/distribution.py,
rsl_rl/modules/normalizer.py (`(x - mean) / (std + 0.01)`). ELU unless the training settings choose
another activation; it is stored there (Isaac Lab: params/agent.yaml) and not in the file. Scaling
or clipping of the action by the environment is not part of the agent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.kinds import ACTIVATION_SYNONYMS
from ckpttool.core.tree import PathStep, Tree, ValueLeaf, attr, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import AgentMetadata, ObservationNormalizer, RecognizedAgent
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    StatisticsRow,
    WritingTable,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

_MODEL = "model_state_dict"
_STATISTICS = {"_mean": "mean", "_var": "var", "_std": "std", "count": "count"}

TABLE = LayoutTable(
    name="rsl_rl",
    statistics="in the file",
    plays=("PPO", "distillation"),
    writes=("continuous PPO",),
    title="rsl_rl's PPO: model_state_dict with actor, critic, std; or actor_state_dict, critic_state_dict",
    framework="torch",
    components={
        f"{_MODEL}/actor": "actor",
        f"{_MODEL}/critic": "value",
        "actor_state_dict/mlp": "actor",
        "critic_state_dict/mlp": "value",
        # Distillation: the student acts.
        f"{_MODEL}/student": "actor",
        "student_state_dict/mlp": "actor",
    },
    optimizers={"optimizer_state_dict": schema.JOINT},
    counters={"iter": "iter"},
    # modules/distribution.py, GaussianDistribution: std_range. Versions before 5.0 do not limit it.
    facts=AgentMetadata(
        head="identity",
        hidden="elu",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["rsl_rl"],
        distribution=schema.GAUSSIAN._replace(limits=(math.log(1e-6), math.log(1e6))),
    ),
    tensors={
        f"{_MODEL}/std": "actor/std",
        f"{_MODEL}/log_std": "actor/log_std",
        # Before 5.0 the model contains them itself, later its distribution.
        "actor_state_dict/std": "actor/std",
        "actor_state_dict/log_std": "actor/log_std",
        **{
            f"{role}_state_dict/distribution/{spread}_param": f"actor/{spread}"
            for role in ("actor", "student")
            for spread in ("std", "log_std")
        },
    },
    seen="written by rsl_rl 2.2.4, 2.3.3, 3.0.0, 3.3.0, 4.0.0 and 5.5.1: PPO",
)

# Normalisers of the policy's and the critic's observations: versions 1 and 2, 3, since 4.
_CRITIC = {
    "obs_norm_state_dict": "critic_obs_norm_state_dict",
    f"{_MODEL}/actor_obs_normalizer": f"{_MODEL}/critic_obs_normalizer",
    "actor_state_dict/obs_normalizer": "critic_state_dict/obs_normalizer",
    "student_state_dict/obs_normalizer": "teacher_state_dict/obs_normalizer",
    f"{_MODEL}/student_obs_normalizer": f"{_MODEL}/teacher_obs_normalizer",
}
# Without either, the last layer outputs the standard deviation as well (3.1 and later, optional).
_DEVIATIONS = frozenset((attr("actor"), attr(name)) for name in ("std", "log_std"))
_EVIDENCE = deferred.compile(rf"({_MODEL}/(actor|student)|(actor|student)_state_dict/mlp)/0/weight")
# rsl_rl/utils/utils.py, resolve_nn_activation; the supported ones.
_NAMES = "elu relu lrelu tanh sigmoid gelu swish softplus selu mish identity"
_ACTIVATIONS = {name: ACTIVATION_SYNONYMS[name] for name in _NAMES.split()}
_RECURRENT = deferred.compile(rf"({_MODEL}/memory_[as]|(actor|student)_state_dict/rnn)/")
_CNN = deferred.compile(rf"({_MODEL}/(actor|student)_cnns?|(actor|student)_state_dict/cnns?)/")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a file with rsl_rl's names; `critic` becomes a value."""
    names = set(tree.names.values())
    if not any(map(_EVIDENCE.fullmatch, names)) or "iter" not in names:
        return None
    table, normalizer = TABLE, next((prefix for prefix in _CRITIC if f"{prefix}/_mean" in names), None)
    if normalizer is not None:
        prefixes = {normalizer: "", _CRITIC[normalizer]: "critic_"}
        tensors = {
            f"{p}/{n}": f"normalizer/{w}{canonical}"
            for p, w in prefixes.items()
            for n, canonical in _STATISTICS.items()
        }
        table = replace(table, tensors={**table.tensors, **tensors})
    binding = bind(tree, table)
    if binding is None:
        return None
    unplaced = dict(binding.unplaced)
    if not any(move.target in _DEVIATIONS for move in binding.moves.moves):
        unplaced["actor"] = ("a last layer that outputs both the mean and the standard deviation",)
    for pattern, what in ((_RECURRENT, "a recurrent memory before the layers"), (_CNN, "convolutions")):
        if any(map(pattern.match, names)):
            unplaced["actor"] = (what,)
    empty = {path for path, leaf in tree.plain() if tree.names[path] == "infos" and leaf.value is None}
    binding = replace(binding, unplaced=unplaced, consumed=binding.consumed | empty)
    return (
        binding if normalizer is None else replace(binding, facts=_add_normalizer(binding, tree, normalizer))
    )


def companions(location: str) -> Sequence[str]:
    """Return the training settings file of Isaac Lab (scripts/.../rsl_rl/train.py)."""
    return (os.path.join(os.path.dirname(location), "params", "agent.yaml"),)


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the activation from the settings, per network since version 4."""
    recorded = {
        "/".join(str(step.value) for step in path): str(leaf.value)
        for path, leaf in tree.plain()
        if path and path[-1].value == "activation"
    }
    of_both = recorded.get("policy/activation", "")
    of_both = of_both or recorded.get("student/activation", "")
    policy, value = (recorded.get(f"{name}/activation", of_both) for name in ("actor", "critic"))
    if not policy:
        return binding
    where = os.path.join(*file.split(os.sep)[-2:])
    facts = binding.facts.without_lack("activation")
    facts = facts.read(where, hidden=_ACTIVATIONS.get(policy, policy))
    unplaced = dict(binding.unplaced)
    if policy not in _ACTIVATIONS:
        unplaced |= dict.fromkeys(("actor", "value"), (f"{policy} activations",))
    elif value in _ACTIVATIONS:
        facts = facts.read_network("value", where, (_ACTIVATIONS[value],))
    else:
        unplaced["value"] = (f"{value or 'unknown'} activations",)
    return replace(binding, facts=facts, unplaced=unplaced)


def _add_normalizer(binding: RecognizedAgent, tree: Tree, where: str) -> AgentMetadata:
    statistics = binding.statistics(tree)
    mean, std = statistics.get("mean"), statistics.get("std")
    if mean is None or std is None:
        return binding.facts
    return binding.facts.read(where, norm=ObservationNormalizer(mean, std=std, epsilon=1e-2, outside=True))


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the file of version 5 that `OnPolicyRunner.load` reads.

    Raise UnsupportedError for networks or an action map that its MLPModel cannot represent.
    """
    return plan_torch_file(_make_table(agent), binding, agent, settings)


_ACTOR, _CRITIC_DICT = key("actor_state_dict"), key("critic_state_dict")
_MLP = LayerNames("mlp.{s}")


def _normalizer_row(entry: PathStep, owner: str) -> StatisticsRow:
    places = {canonical: (entry, key(f"obs_normalizer.{name}")) for name, canonical in _STATISTICS.items()}
    return StatisticsRow(places, "float32", (1, -1), epsilon=1e-2, outside=True, owner=owner)


def _make_table(agent: Tree) -> WritingTable:
    log = (attr("actor"), attr("log_std")) in agent
    deviation = "log_std" if log else "std"
    rows = (
        _normalizer_row(_ACTOR, ""),
        SingleTensorRow(f"actor/{deviation}", (_ACTOR, key(f"distribution.{deviation}_param")), (-1,)),
        NetworkRow("actor", (_ACTOR,), _MLP),
        _normalizer_row(_CRITIC_DICT, "critic_"),
        NetworkRow("value", (_CRITIC_DICT,), _MLP),
    )
    return WritingTable(
        "rsl_rl",
        rows,
        "identity",
        hidden="elu",
        counters={"iter": (key("iter"),)},
        joint=(key("optimizer_state_dict"),),
        needs=("actor", "value"),
        constants={(key("iter"),): ValueLeaf(0), (key("infos"),): ValueLeaf(None)},
    )
