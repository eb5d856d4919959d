"""skrl's agents: `agent_N.pt`, `best_agent.pt`: state_dicts of models, optimizers and preprocessors.

Sources, in github.com/Toni-SM/skrl: skrl/agents/torch/base.py (`save`, `checkpoint_modules`), and
below it ddpg, td3, sac, ppo; skrl/models/torch/deterministic.py and gaussian.py (`act`: the output
of the model's own `compute`, clipped to the bounds only if configured); running_standard_scaler.py
in skrl/resources/preprocessors/torch (`(x - mean) / (sqrt(var) + 1e-8)`, clipped to [-5, 5]). SAC's
entropy coefficient is not saved.

Models are the user's own code, or built from a description (skrl/utils/model_instantiators/torch),
so a file contains neither activations nor the action map in `compute`. The defaults here are those
of skrl's own examples: ReLU and tanh times the upper bound with DDPG, TD3, SAC; ELU and the plain
mean with PPO.

Discrete actions: q_network of dqn and ddqn has a value for each, the policy of PPO and A2C logits without a
log_std_parameter (skrl/models/torch/categorical.py, multicategorical.py, which always sample).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf, Path, Tree, attr, key
from ckpttool.libraries import layer_connections, schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable, list_display_names
from ckpttool.libraries.schema import AgentMetadata, ObservationNormalizer, RecognizedAgent
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    StatisticsRow,
    WritingTable,
    count_critics,
    has_q_policy,
    has_value_network,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

TABLE = LayoutTable(
    name="skrl",
    statistics="preprocessor in the file",
    plays=("DDPG", "TD3", "SAC", "PPO", "A2C", "DQN", "DDQN"),
    writes=("DDPG", "TD3", "PPO", "A2C", "DQN"),
    title="skrl's agents: DDPG, TD3, SAC (policy, critic_1, critic_2), PPO, A2C (policy, value), DQN",
    framework="torch",
    components={
        "policy": "actor",
        "target_policy": "actor_target",
        "critic": "critic/q1",
        "critic_1": "critic/q1",
        "critic_2": "critic/q2",
        "target_critic": "critic_target/q1",
        "target_critic_1": "critic_target/q1",
        "target_critic_2": "critic_target/q2",
        "value": "value",
        "q_network": "critic/q1",
        "target_q_network": "critic_target/q1",
    },
    optimizers={
        "policy_optimizer": "actor_optimizer",
        "critic_optimizer": "critic_optimizer",
        "optimizer": schema.JOINT,
    },
    user_written=True,
    # skrl/models/torch/gaussian.py: the noise is added to what the model's own compute returns.
    facts=AgentMetadata(
        head="tanh",
        hidden="relu",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["skrl"],
        distribution=schema.LIMITED_GAUSSIAN._replace(
            place="action",
            assumed="the logarithm of the standard deviation is limited to -20 to 2: default of library skrl",
        ),
    ),
    branches=schema.LOG_STD,
    tensors={"policy/log_std_parameter": "actor/log_std"},
    seen="written by skrl 1.0.0, 1.4.3 and 2.1.1: DDPG, TD3, SAC, PPO; 1.4.3: DQN, DDQN, categorical PPO",
)

_STATISTICS = {"running_mean": "mean", "running_variance": "var", "current_count": "count"}
# Since 2.0 a policy receives observations; before, its input was called the state.
# Statistics of the returns, which only training needs: no other library has a place for them.
KEPT = ("value_preprocessor",)
_PREPROCESSORS = ("observation_preprocessor", "state_preprocessor")
_EVIDENCE = frozenset(
    ("target_policy", "critic_1", "target_critic", "policy_optimizer", "value_preprocessor", *_PREPROCESSORS)
)


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a dict with skrl's names."""
    top = {path[0].value for path in tree if len(path) > 1}
    top |= {alias.path[0].value for others in tree.aliases.values() for alias in others}
    q_network = "q_network" in top and bool(top & {"target_q_network", "optimizer", *_PREPROCESSORS})
    if not q_network and ("policy" not in top or not (top & _EVIDENCE or {"value", "optimizer"} <= top)):
        return None
    table, preprocessor = (
        TABLE,
        next((p for p in _PREPROCESSORS if f"{p}/running_mean" in tree.names.values()), None),
    )
    if "value" in top:
        table = replace(table, facts=table.facts._replace(head="identity", hidden="elu"))
    if q_network:
        table = replace(table, optimizers={"optimizer": "critic_optimizer"})
    if preprocessor is not None:
        tensors = {f"{preprocessor}/{name}": f"normalizer/{target}" for name, target in _STATISTICS.items()}
        table = replace(table, tensors={**table.tensors, **tensors})
    shared = _find_shared_head(tree)
    if shared is not None:
        tree = _drop_other_role(tree, shared)
    binding = bind(tree, table)
    # A Gaussian policy has a log standard deviation, its own or a head; without one the outputs are logits.
    categorical = (
        binding is not None
        and (shared is not None or has_value_network(binding))
        and any(part.component == "actor" for part in binding.parts)
        and all(move.target[:2] != (attr("actor"), attr("log_std")) for move in binding.moves.moves)
        and not binding.unplaced.get("actor")
    )
    if binding is not None and (q_network or categorical):
        # Whether a categorical model outputs logits or probabilities (unnormalized_log_prob) is not saved.
        binding = replace(binding, facts=binding.facts._replace(distribution=None)).choosing(tree)
    if binding is None or preprocessor is None:
        return binding
    stats = binding.statistics(tree)
    norm = None
    if "mean" in stats and "var" in stats:
        norm = ObservationNormalizer(stats["mean"], stats["var"], epsilon=1e-8, clip=5.0, outside=True)
    return replace(binding, facts=binding.facts.read(preprocessor, norm=norm))


def _find_shared_head(tree: Tree) -> str | None:
    """Return the module of the value's own layers in one model for both roles, None for two models.

    It is saved twice, under both names: `value_layer` of skrl/utils/model_instantiators/torch/shared.py, or a
    class of the user's own.
    """
    names = [name.partition("/") for name in list_display_names(tree)]
    policy, value = ({name for top, _, name in names if top == role} for role in ("policy", "value"))
    if value and value != policy:
        return None
    modules = {name.partition("/")[0] for name in policy if "/" in name}
    heads = [module for module in modules if layer_connections.find_stream([module]) is False]
    return heads[0] if len(heads) == 1 and len(modules) > 2 else None


def _drop_other_role(tree: Tree, head: str) -> Tree:
    """Return the tree without a shared model's other role, whose own layers are those of `head`."""
    kept = {
        path: leaf
        for path, leaf in tree.items()
        if path[0].value != "value" and not tree.names[path].startswith(f"policy/{head}/")
    }
    return Tree(kept, {}, tree.containers)


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a file for `Agent.load` of version 2, with skrl's own models.

    Those are the models that its instantiators build from a list of layers. Raise UnsupportedError for
    networks or an action map that they cannot represent.
    """
    if is_gaussian(binding):
        raise UnsupportedError(
            "skrl's own models do not support a standard deviation that depends on the observation"
        )
    return plan_torch_file(_make_table(binding, agent), binding, agent, settings)


_MODEL = "net_container.{s}"
_SEEN = key(_PREPROCESSORS[0])


def _model_row(component: str, stored: str) -> NetworkRow:
    return NetworkRow(component, (key(stored),), LayerNames(_MODEL))


def _make_table(binding: RecognizedAgent, agent: Tree) -> WritingTable:
    spread = isinstance(agent.get((attr("actor"), attr("log_std"))), Leaf)
    places = {canonical: (_SEEN, key(statistic)) for statistic, canonical in _STATISTICS.items()}
    rows: list[NetworkRow | SingleTensorRow | StatisticsRow] = []
    discrete = binding.facts.head == "argmax"
    if has_q_policy(binding):
        return _make_q_table(places)
    if spread or (has_value_network(binding) and not discrete):
        rows.append(SingleTensorRow("actor/log_std", (key("policy"), key("log_std_parameter")), (-1,)))
    rows.append(_model_row("actor", "policy"))
    if has_value_network(binding):
        rows.append(_model_row("value", "value"))
    else:
        numbers = {"q1": "_1", "q2": "_2"} if count_critics(binding) > 1 or spread else {"q1": ""}
        if not spread:
            rows.append(_model_row("actor_target", "target_policy"))
        rows += [_model_row(f"critic/{q}", f"critic{number}") for q, number in numbers.items()]
        rows += [_model_row(f"critic_target/{q}", f"target_critic{number}") for q, number in numbers.items()]
    rows.append(_scaler_row(places))
    on_policy = "argmax" if discrete else "identity"
    choices = binding.facts.choices
    several = choices is not None and not choices.single
    return WritingTable(
        "skrl",
        rows,
        on_policy if has_value_network(binding) else "tanh",
        hidden="elu" if has_value_network(binding) else "relu",
        optimizers={
            target: (key(stored),) for stored, target in TABLE.optimizers.items() if target != schema.JOINT
        },
        joint=(key("optimizer"),) if has_value_network(binding) else None,
        needs=("actor", "value") if has_value_network(binding) else ("actor", "critic"),
        spaces=frozenset(("several",)),
        notes=("create the policy with multicategorical_model",) if several else (),
    )


def _make_q_table(places: Mapping[str, Path]) -> WritingTable:
    """Return the table of DQN and DDQN, whose models are deterministic ones."""
    return WritingTable(
        "skrl",
        (
            _model_row("critic/q1", "q_network"),
            _model_row("critic_target/q1", "target_q_network"),
            _scaler_row(places),
        ),
        "argmax",
        optimizers={"critic_optimizer": (key("optimizer"),)},
        needs=("critic",),
        values=False,
    )


def _scaler_row(places: Mapping[str, Path]) -> StatisticsRow:
    return StatisticsRow(places, "float64", epsilon=1e-8, outside=True, clip=5.0, counter="float64")
