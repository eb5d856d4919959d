"""rl_games' A2C and PPO agents: `nn/NAME.pth` with the model's state_dict, epoch and frame.

Sources, in github.com/Denys88/rl_games: rl_games/algos_torch/network_builder.py (`A2CBuilder`:
actor_mlp, mu, sigma, value; critic_mlp where `separate` is set), models.py
(`ModelA2CContinuousLogStd`: observations go through running_mean_std), running_mean_std.py (`(x -
mean) / sqrt(var + 1e-5)`, clipped to [-5, 5]), players.py (`PpoPlayerContinuous`: mu is clipped to
[-1, 1] and mapped to the bounds, unless clip_actions is off; `PpoPlayerDiscrete`: a deterministic
one takes the largest of `logits`, which are a list of layers for several actions). The activation is in
the training settings, which the programs of Isaac Gym and Isaac Lab store beside the folder `nn`:
config.yaml, params/agent.yaml.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.kinds import ACTIVATION_SYNONYMS
from ckpttool.core.sidecar import NO_STATISTICS
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.optimizers_read import from_torch
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    CATEGORICAL,
    DICT_UNKNOWN,
    GAUSSIAN,
    LEFT_OPEN,
    AgentMetadata,
    ObservationNormalizer,
    RecognizedAgent,
    list_kernel_shapes,
    make_choices,
)
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    StatisticsRow,
    WritingTable,
    plan_torch_file,
    require_activation,
)
from ckpttool.mapping.rules import ConcatPart, Move, Plan, Rule, Settings, compose_rules

_MODEL = "model/a2c_network"
# Inside the model; before 1.5, beside it.
_NORMALIZERS = ("model/running_mean_std", "running_mean_std")
# Statistics of the returns (models.py, `normalize_value`), which only training needs.
KEPT = ("model/value_mean_std", "value_mean_std", "reward_mean_std")
_STATISTICS = {"running_mean": "mean", "running_var": "var", "count": "count"}

TABLE = LayoutTable(
    name="rl_games",
    statistics="in the file",
    plays=("A2C", "PPO"),
    writes=("A2C", "PPO"),
    title="rl_games' A2C and PPO: model with a2c_network (actor_mlp, mu and sigma or logits, value), epoch",
    framework="torch",
    optimizers={"optimizer": schema.JOINT},
    counters={"epoch": "iter", "frame": "num_timesteps"},
    facts=AgentMetadata(
        head="clip_affine",
        hidden="elu",
        epsilon=1e-5,
        lacks=LEFT_OPEN["rl_games"],
        distribution=GAUSSIAN._replace(
            assumed="sigma is the logarithm of the standard deviation: model continuous_a2c_logstd, which "
            "almost all settings of rl_games choose"
        ),
    ),
    branches={"sigma": "log_std"},
    tensors={f"{_MODEL}/sigma": "actor/log_std"},
    seen="models built by rl_games 1.6.5: A2C with one network or two; one or more discrete actions",
)
# network_builder.py, NetworkBuilder.BaseNetwork.__init__; the supported ones.
_ACTIVATIONS = {
    name: ACTIVATION_SYNONYMS[name.lower()]
    for name in ("relu", "tanh", "sigmoid", "elu", "selu", "gelu", "softplus", "swish", "None")
}


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a model with a `mu` or `logits` head; others are only listed."""
    names = set(tree.names.values())
    last = next((n for n in ("mu", "logits", "logits/0") if f"{_MODEL}/{n}/weight" in names), None)
    if last is None:
        return None
    heads = _list_heads(tree) if last == "logits/0" else []
    spread = f"+{_MODEL}/sigma" if f"{_MODEL}/sigma/weight" in names else ""
    trunk = f"{_MODEL}/actor_mlp"
    own = f"{_MODEL}/critic_mlp" if f"{_MODEL}/critic_mlp/0/weight" in names else trunk
    table = replace(
        TABLE,
        components={f"{trunk}+{_MODEL}/{last}{spread}": "actor", f"{own}+{_MODEL}/value": "value"},
        optimizer=lambda stored: from_torch(
            replace(stored, weights=_join_heads(stored.weights, heads, tree))
        ),
    )
    normalizer = next(
        (normalizer for normalizer in _NORMALIZERS if f"{normalizer}/running_mean" in names), None
    )
    if normalizer is not None:
        tensors = {f"{normalizer}/{name}": f"normalizer/{target}" for name, target in _STATISTICS.items()}
        table = replace(table, tensors={**table.tensors, **tensors})
    binding = bind(tree, table)
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    if last != "mu":
        # models.py, ModelA2C: CategoricalMasked(logits=logits); ModelA2CMultiDiscrete: one for each action.
        binding = binding.choosing(tree)
        binding = replace(binding, facts=binding.facts._replace(distribution=CATEGORICAL))
    if heads:
        moves = tuple((move.source, move.target, move.rule) for move in binding.moves.moves)
        joined = tuple(Move(*row) for row in _join_heads(moves, heads, tree))
        choices = make_choices([stop - start for _, start, stop in heads[::2]], single=False)
        facts = binding.facts.read(f"{_MODEL}/logits", choices=choices)
        binding = replace(binding, moves=replace(binding.moves, moves=joined), facts=facts)
    for module, what in (("rnn", "a recurrent memory"), ("actor_cnn", "convolutions")):
        if any(name.startswith((f"{_MODEL}/{module}/", f"{_MODEL}/a_{module}/")) for name in names):
            binding = binding.refused("actor", what)
    facts = binding.facts
    stats = binding.statistics(tree)
    if normalizer is not None and {"mean", "var"} <= stats.keys():
        facts = facts.read(
            normalizer, norm=ObservationNormalizer(stats["mean"], stats["var"], epsilon=1e-5, clip=5.0)
        )
    elif any(name.startswith(tuple(f"{normalizer}/" for normalizer in _NORMALIZERS)) for name in names):
        facts = facts.lacking(DICT_UNKNOWN)
    empty = {path for path, leaf in tree.plain() if tree.names[path] == "env_state" and leaf.value is None}
    return replace(binding, facts=facts, consumed=binding.consumed | empty)


def _list_heads(tree: Tree) -> list[tuple[Path, int, int]]:
    """Return the paths of the weight and the bias of every action's layer, with the places of its outputs."""
    paths = {name: path for path, name in tree.names.items()}
    heads: list[tuple[Path, int, int]] = []
    while weight := paths.get(f"{_MODEL}/logits/{len(heads) // 2}/weight"):
        leaf, bias = tree[weight], paths.get(f"{_MODEL}/logits/{len(heads) // 2}/bias")
        if not isinstance(leaf, Leaf) or bias is None:
            return []
        start = heads[-1][2] if heads else 0
        heads += [(path, start, start + leaf.shape[0]) for path in (weight, bias)]
    return heads


_Weights = tuple[tuple[Path, Path, Rule], ...]


def _join_heads(weights: _Weights, heads: Sequence[tuple[Path, int, int]], tree: Tree) -> _Weights:
    """Return the tensors with those of all actions' layers in place of the first one's, in file order."""
    joined = []
    for source, target, rule in weights:
        if source not in [path for path, _, _ in heads[:2]]:
            joined.append((source, target, rule))
            continue
        bias = source == heads[1][0]
        for path, start, stop in heads[bias::2]:
            part = ConcatPart(0 if bias else 1, start, stop, heads[-1][2])
            joined.append((path, target, compose_rules(rule, part)))
    order = {path: number for number, path in enumerate(tree)}
    return tuple(sorted(joined, key=lambda row: order[row[0]]))


def companions(location: str) -> Sequence[str]:
    """Return the training settings files of Isaac Gym's and Isaac Lab's programs."""
    folder = os.path.dirname(location)
    above = os.path.dirname(folder) if os.path.basename(folder) == "nn" else folder
    return (os.path.join(above, "config.yaml"), os.path.join(above, "params", "agent.yaml"))


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the activation and the action map from the settings."""
    recorded = {"/".join(str(step.value) for step in path): leaf for path, leaf in tree.plain()}

    def stated(name: str) -> ValueLeaf | None:
        leaves = [leaf for key, leaf in recorded.items() if f"/{key}".endswith(f"/params/{name}")]
        return leaves[0] if len(leaves) == 1 else None

    activation, mu = stated("network/mlp/activation"), stated("network/space/continuous/mu_activation")
    hidden = None if activation is None else activation.value
    last = str((mu and mu.value) or "None")
    where = os.path.basename(file)
    facts = _add_input_switch(binding.facts, stated("config/normalize_input"), where)
    if not isinstance(hidden, str):
        return replace(binding, facts=facts)
    facts = facts.without_lack("activation").read(where, hidden=_ACTIVATIONS.get(hidden, hidden))
    mapped = schema.read_switch(stated("config/clip_actions"), default=True)
    heads = {"None": ("clip_affine", "identity"), "tanh": ("affine", "unit_tanh")}
    head = heads.get(last)
    # These are settings of continuous actions.
    if facts.head != "argmax":
        if mapped is None:
            facts = facts.not_understood(
                "head", "chosen by clip_actions, which is neither true nor false", where
            )
        elif head is not None:
            facts = facts.read(where, head=head[0] if mapped else head[1])
        else:
            binding = binding.refused("actor", f"{last} after the last layer")
    if hidden not in _ACTIVATIONS:
        binding = binding.refused("actor", f"{hidden} activations")
    return replace(binding, facts=facts)


def _add_input_switch(facts: AgentMetadata, switch: ValueLeaf | None, where: str) -> AgentMetadata:
    """Return the facts with what the settings state on observation statistics, if the file has other ones."""
    normalises = schema.read_switch(switch, default=facts.norm is not None)
    if normalises is None or (facts.norm is not None and not normalises):
        state = "which is neither true nor false" if normalises is None else "although the file has them"
        text = f"switched off by normalize_input, {state}"
        return facts._replace(norm=None).not_understood("obs_norm", text, where)
    return facts.lacking(NO_STATISTICS) if normalises and facts.norm is None else facts


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a file for `A2CAgent.restore`, with a policy and a value of separate layers.

    Raise UnsupportedError for networks or an action map that A2CBuilder and its players cannot represent,
    e.g. hidden sizes of the value that are not those of the policy.
    """
    writing = _make_table(binding)
    file_plan = plan_torch_file(writing, binding, agent, settings)
    sizes = {
        part.component: [shape[-1] for shape in list_kernel_shapes(part, agent)[:-1]]
        for part in binding.parts
        if part.component in ("actor", "value")
    }
    if sizes["actor"] != sizes["value"]:
        raise UnsupportedError(
            "rl_games' networks have the same hidden sizes for policy and value",
            expected=str(sizes["actor"]),
            found=str(sizes["value"]),
        )
    activations = {canonical: name for name, canonical in _ACTIVATIONS.items()}
    activation = activations[require_activation(binding, "rl_games", activations)]
    targets = (*(move.target for move in file_plan.moves), *file_plan.added)
    normed = any("running_mean_std" in str(path[-1].value) for path in targets)
    spread = "" if binding.facts.head == "argmax" else ", fixed_sigma: True"
    needed = (
        f"configure network with separate: True, mlp.units {sizes['actor']}, activation {activation}{spread}"
        f"; config with normalize_input: {normed}, normalize_value: False"
    )
    return replace(file_plan, notes=(*file_plan.notes, needed))


_SAVED = key("model")


def _network_row(component: str, trunk: str, last: str, counts: tuple[int, ...] = ()) -> NetworkRow:
    names = LayerNames(f"a2c_network.{trunk}.{{s}}", f"a2c_network.{last}")
    ends = pairwise(accumulate(counts, initial=0))
    parts = {f"{names.last}.{choice}": outputs for choice, outputs in enumerate(ends)}
    return NetworkRow(component, (_SAVED,), names, parts=parts)


def _make_table(binding: RecognizedAgent) -> WritingTable:
    discrete = binding.facts.head == "argmax"
    last, choices = "logits" if discrete else "mu", binding.facts.choices
    several = choices.counts if choices is not None and not choices.single else ()
    places = {canonical: (_SAVED, key(f"running_mean_std.{name}")) for name, canonical in _STATISTICS.items()}
    rows: list[NetworkRow | SingleTensorRow | StatisticsRow] = [
        _network_row("actor", "actor_mlp", last, several),
        _network_row("value", "critic_mlp", "value"),
        StatisticsRow(places, "float64", epsilon=1e-5, clip=5.0, counter="float64"),
    ]
    if not discrete:
        rows.insert(0, SingleTensorRow("actor/log_std", (_SAVED, key("a2c_network.sigma")), (-1,)))
    return WritingTable(
        "rl_games",
        rows,
        "argmax" if discrete else "clip_affine",
        hidden="",
        counters={canonical: (key(counter),) for counter, canonical in TABLE.counters.items()},
        joint=(key("optimizer"),),
        needs=("actor", "value"),
        spaces=frozenset(("several",)),
        constants={
            **{(key(name),): ValueLeaf(0) for name in TABLE.counters},
            (key("env_state"),): ValueLeaf(None),
        },
        # network_builder.py, A2CBuilder: the order in which the modules are created.
        modules=tuple(f"a2c_network.{name}" for name in ("sigma", "actor_mlp", "critic_mlp", "value", last)),
    )
