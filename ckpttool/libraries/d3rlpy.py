"""d3rlpy: configuration, `.d3` files and model files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import deferred
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.sidecar import NO_ACTIVATIONS, OUTPUT_RANGE, LedgerEntry, Scores
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, index, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    CRITICS,
    DISCRETE_CHOICE,
    AgentMetadata,
    AgentNetwork,
    Choices,
    ObservationNormalizer,
    RecognizedAgent,
    action_bounds,
    list_distribution_notes,
    list_kernel_shapes,
    make_float64_tensor,
)
from ckpttool.libraries.write import (
    DICT,
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    compute_divisor,
    count_critics,
    is_gaussian,
    plan_torch_file,
    to_float64_row,
)
from ckpttool.mapping.rules import Plan, Settings, constant_tensor

ConfigValues = Mapping[str, object]

_PARAMS = "config/params/"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "tanh": "tanh", "swish": "silu", "none": "linear"}


def read_values(tree: Tree, *top: str) -> dict[str, object]:
    """Return the plain values under a path, by the rest of their names."""
    cut = len(top)
    return {
        "/".join(str(step.value) for step in path[cut:]): leaf.value
        for path, leaf in tree.items()
        if isinstance(leaf, ValueLeaf) and tuple(step.value for step in path[:cut]) == top
    }


def add_config_metadata(binding: RecognizedAgent, configuration: ConfigValues, where: str) -> RecognizedAgent:
    """Return the binding with the facts from the configuration; `where` is the configuration's location.

    Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`LearnableConfigWithShape`),
    d3rlpy/models/encoders.py, d3rlpy/models/utility.py (`create_activation`), d3rlpy/preprocessing/.
    """
    mine = {
        name.removeprefix(_PARAMS): value for name, value in configuration.items() if name.startswith(_PARAMS)
    }
    size, discrete = configuration.get("action_size"), _is_discrete(configuration)
    if discrete:
        binding = _add_choices(binding, mine, size, where)
    facts = binding.facts
    for what in ("action map", "observation statistics", "activation"):
        facts = facts.without_lack(what)
    if not discrete:
        facts = _add_bounds(facts, mine, size, where)
        drawn = _DISTRIBUTIONS.get(str(configuration.get("config/type", "")))
        facts = facts._replace(distribution=drawn)
    facts = _add_normalizer(facts, mine, configuration.get("observation_shape/0"), where)
    return _add_activations(replace(binding, facts=facts), mine, where)


# d3rlpy/algos/qlearning/{sac,cql,iql,awac,crr}.py and torch/*_impl.py: SAC and related algorithms add the
# noise in front of tanh; the others behind it, within [-1, 1].
_UNIT = schema.LIMITED_GAUSSIAN._replace(place="unit")
_DISTRIBUTIONS = {
    **dict.fromkeys(("sac", "cql", "cal_ql", "bear"), schema.LIMITED_GAUSSIAN),
    "crr": _UNIT,
    "iql": _UNIT._replace(limits=(-5.0, 2.0), limited="sigmoid"),
    "awac": _UNIT._replace(limits=(-6.0, 0.0), limited="sigmoid"),
}
_Q_LEARNING = frozenset(("dqn", "double_dqn", "nfq"))
# Algorithms of discrete actions that choose the best of a network's outputs.
_BEST_OUTPUT = _Q_LEARNING | {"discrete_cql", "discrete_sac", "discrete_bc"}
# d3rlpy/models/torch/q_functions: DiscreteQRQFunction has the quantiles of one action together.
_SCORES: Mapping[object, Scores] = {"mean": "values", "qr": "quantiles_last"}


def _is_discrete(configuration: ConfigValues) -> bool:
    kind = str(configuration.get("config/type", ""))
    return kind.startswith("discrete") or kind in _Q_LEARNING


def _add_choices(
    binding: RecognizedAgent, configuration: ConfigValues, size: object, where: str
) -> RecognizedAgent:
    """Return the binding of an agent that chooses the best of `size` actions, the first of which is 0.

    dqn_impl.py, bc_impl.py, sac_impl.py in d3rlpy/algos/qlearning/torch (`inner_predict_best_action`): by the
    mean of all Q-functions, or by a policy's logits.
    """
    binding = binding.with_q_policies()
    acting = next(part for part in binding.parts if part.acts)
    stated = configuration.get("q_func_factory/type", "mean") if acting.chooses else "mean"
    scores = _SCORES.get(stated)
    if not isinstance(size, int) or not 0 < size < 1 << 16 or scores is None:
        return binding.refused(acting.component, DISCRETE_CHOICE)
    if acting.chooses and count_critics(binding) > 1:
        scores = "mean" if scores == "values" else "mean_quantiles"
    choices = Choices((size,), (0,), scores)
    binding = replace(binding, facts=binding.facts.read(where, head="argmax", choices=choices))
    return binding.with_q_policies(scores)


def _add_bounds(facts: AgentMetadata, configuration: ConfigValues, size: object, where: str) -> AgentMetadata:
    kind = configuration.get("action_scaler/type", "none")
    outputs = f"{where} {OUTPUT_RANGE}"  # of an action scaler those in a data set
    if kind == "none" and isinstance(size, int) and 0 < size < 1 << 16:
        # Without scaling, an action is tanh itself.
        return facts.read(outputs, action_low=(-1.0,) * size, action_high=(1.0,) * size)
    low, high = (_numbers(configuration, f"action_scaler/params/{name}") for name in ("minimum", "maximum"))
    if kind != "min_max" or not low or len(low) != len(high):
        return facts.not_understood("head", f"an action scaler ({kind})", where)
    return facts.read(outputs, action_low=low, action_high=high)


def _add_normalizer(
    facts: AgentMetadata, configuration: ConfigValues, size: object, where: str
) -> AgentMetadata:
    kind = configuration.get("observation_scaler/type", "none")
    if kind == "none":
        return facts
    params = "observation_scaler/params/"
    norm = None
    if kind == "standard":
        epsilon = configuration.get(f"{params}eps", 0.0)
        mean, std = _numbers(configuration, f"{params}mean"), _numbers(configuration, f"{params}std")
        if isinstance(epsilon, float) and mean and len(mean) == len(std):
            norm = _make_normalizer(mean, std)._replace(epsilon=epsilon, outside=True)
    elif kind == "min_max":
        low, high = _numbers(configuration, f"{params}minimum"), _numbers(configuration, f"{params}maximum")
        if low and len(low) == len(high):
            middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
            norm = _make_normalizer(middle, half)
    elif kind == "pixel" and isinstance(size, int) and 0 < size < 1 << 16:
        norm = _make_normalizer([0.0] * size, [255.0] * size)
    if norm is None:
        return facts.not_understood("obs_norm", f"an observation scaler ({kind})", where)
    return facts.read(where, norm=norm)


def _make_normalizer(mean: Sequence[float], std: Sequence[float]) -> ObservationNormalizer:
    return ObservationNormalizer(make_float64_tensor(mean, "mean"), std=make_float64_tensor(std, "std"))


def _add_activations(binding: RecognizedAgent, configuration: ConfigValues, where: str) -> RecognizedAgent:
    """Return the binding with the activations of the policy and of the other networks."""
    parts = sorted(binding.parts, key=lambda part: not part.acts)
    names = _list_activations(configuration, parts[0])
    facts, unplaced = binding.facts, dict(binding.unplaced)
    if names is not None:
        facts = facts.read(where, activations=names)
    elif stated := _list_stated_functions(configuration, parts[0]):
        facts = facts.not_understood("activations", ", ".join(stated), where)
    else:
        facts = facts.lacking(NO_ACTIVATIONS)
    for part in parts[1:]:
        others = _list_activations(configuration, part)
        if others is not None:
            facts = facts.read_network(part.component, where, others)
        elif names is not None:
            shown = ", ".join(_list_stated_functions(configuration, part)) or "unknown"
            reason = f"{part.title} ({shown} activations)"
            unplaced[part.component] = (*unplaced.get(part.component, ()), reason)
    return replace(binding, facts=facts, unplaced=unplaced)


_FACTORIES = {
    **dict.fromkeys(CRITICS, ("critic_encoder_factory", "encoder_factory")),
    "actor": ("actor_encoder_factory", "encoder_factory"),
    "actor_target": ("actor_encoder_factory",),
    "value": ("value_encoder_factory",),
}


def _list_activations(configuration: ConfigValues, part: AgentNetwork) -> tuple[str, ...] | None:
    """Return the activation after each hidden layer of the network, None if unknown."""
    factories = _FACTORIES.get(part.component, ("critic_encoder_factory",))
    params = next((f"{name}/params/" for name in factories if f"{name}/type" in configuration), "")
    name = ACTIVATIONS.get(str(configuration.get(f"{params}activation")))
    hidden = sum(layer.kind == "dense" for layer in part.layers) - 1
    if name is None or hidden < 1:
        return None
    last: str | None = name
    if configuration.get(f"{params}exclude_last_activation"):
        last = "linear"
    elif configuration.get(f"{params}last_activation"):
        last = ACTIVATIONS.get(str(configuration[f"{params}last_activation"]))
    return None if last is None else (*(name,) * (hidden - 1), last)


def _list_stated_functions(configuration: ConfigValues, part: AgentNetwork) -> list[str]:
    """Return the activations that the configuration states, understood or not."""
    factories = _FACTORIES.get(part.component, ("critic_encoder_factory",))
    names = [f"{factory}/params/{key}" for factory in factories for key in ("activation", "last_activation")]
    values = [configuration[name] for name in names if configuration.get(name) is not None]
    kinds = [configuration.get(f"{factory}/type") for factory in factories]
    return [
        *map(str, values),
        *(f"an encoder {kind}" for kind in kinds if kind not in (None, "vector", "default")),
    ]


def _numbers(configuration: ConfigValues, name: str) -> tuple[float, ...]:
    """Return a list of numbers, empty if it has other entries."""
    numbers: list[float] = []
    while isinstance(number := configuration.get(f"{name}/{len(numbers)}"), int | float):
        numbers.append(float(number))
    return tuple(numbers)


VERSION = "2.8.1"  # version of the names and the configuration
_NONE: Mapping[str, Any] = {"type": "none", "params": {}}
_ADAM: Mapping[str, Any] = {"type": "adam", "params": {"lr_scheduler_factory": _NONE}}
_NAMES = {canonical: name for name, canonical in ACTIVATIONS.items()}


def build_config(binding: RecognizedAgent, agent: Tree) -> dict[str, Any]:
    """Return the configuration as stored in JSON.

    Raise UnsupportedError for networks that the library's encoders cannot represent, UsageError if the action
    bounds are unknown. Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`LearnableConfigWithShape`,
    `LearnableConfig`), d3rlpy/models/encoders.py (`VectorEncoderFactory`), d3rlpy/preprocessing,
    d3rlpy/optimizers/optimizers.py. Fields created by a factory are required; the library fills in the
    others.
    """
    parts = {part.title: part for part in binding.parts}
    sizes = list_kernel_shapes(parts["actor"], agent)
    norm, scaler = binding.facts.norm, _NONE
    if norm is not None and norm.clip is None:
        numbers = {"mean": to_float64_row(norm.mean).tolist(), "std": compute_divisor(norm).tolist()}
        scaler = {"type": "standard", "params": {**numbers, "eps": 0.0}}
    params: dict[str, Any] = {
        "observation_scaler": scaler,
        "action_scaler": _action_scaler(agent),
        "reward_scaler": _NONE,
        **_networks(binding, agent, parts),
    }
    kind = "bc" if not count_critics(binding) else "sac" if is_gaussian(binding) else "td3"
    kind = "ddpg" if kind == "td3" and count_critics(binding) == 1 else kind
    return {
        "observation_shape": [sizes[0][0]],
        "action_size": sizes[-1][1],
        "config": {"type": kind, "params": params},
    }


def _networks(binding: RecognizedAgent, agent: Tree, parts: Mapping[str, AgentNetwork]) -> dict[str, Any]:
    actor = _encoder_factory(parts["actor"], binding, agent)
    if not count_critics(binding):
        policy = "stochastic" if is_gaussian(binding) else "deterministic"
        return {"optim_factory": _ADAM, "encoder_factory": actor, "policy_type": policy}
    heads = [_encoder_factory(part, binding, agent) for part in parts.values() if part.component == "critic"]
    if any(head != heads[0] for head in heads):
        raise UnsupportedError("d3rlpy requires all Q-functions to have the same size")
    optimizers = ("actor", "critic", *(("temp",) if is_gaussian(binding) else ()))
    return {
        **{f"{name}_optim_factory": _ADAM for name in optimizers},
        "actor_encoder_factory": actor,
        "critic_encoder_factory": heads[0],
        "q_func_factory": {"type": "mean", "params": {}},
        "n_critics": len(heads),
    }


def _encoder_factory(part: AgentNetwork, binding: RecognizedAgent, agent: Tree) -> dict[str, Any]:
    widths = [shape[1] for shape in list_kernel_shapes(part, agent)[:-1]]
    names = list(binding.facts.activations_of(part.component))
    names = (names + names[-1:] * len(widths))[: len(widths)]
    first, last = names[0], names[-1]
    if any(name != first for name in names[:-1]) or not {first, last} <= _NAMES.keys():
        raise UnsupportedError("d3rlpy's encoders do not support these activations", found=", ".join(names))
    parameters: dict[str, Any] = {"hidden_units": widths, "activation": _NAMES[first]}
    if last != first:
        parameters["last_activation"] = _NAMES[last]
    return {"type": "vector", "params": parameters}


def _action_scaler(agent: Tree) -> Mapping[str, Any]:
    bounds = action_bounds(agent)
    if bounds is None:
        raise UsageError(
            "unknown action bounds, which a d3rlpy file must contain",
            hint="pass --bounds LOW HIGH, or use --to d3rlpy_model, which needs none",
        )
    low, high = bounds
    if set(low) == {-1.0} and set(high) == {1.0}:
        return _NONE
    return {"type": "min_max", "params": {"minimum": low, "maximum": high}}


def list_config_leaves(value: object, at: Path) -> Iterator[tuple[Path, ValueLeaf | Container]]:
    """Yield settings as tree entries: their containers and their plain values."""
    if isinstance(value, Mapping):
        yield at, Container("dict")
        for name, inner in value.items():
            yield from list_config_leaves(inner, (*at, key(name)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield at, Container("list")
        for number, inner in enumerate(value):
            yield from list_config_leaves(inner, (*at, index(number)))
    elif value is None or isinstance(value, str | int | float):
        yield at, ValueLeaf(value)


_HIDDEN = "_encoder._layers.{s}"
_OPTIMIZERS = {"actor_optimizer": "actor_optim", "critic_optimizer": "critic_optim"}
_CONFIG = "this file does not contain scalers and activations: pass them to d3rlpy"
_TORCH = (key("torch"),)
_TRAINING = "training settings (gamma, tau, ...) are set to the library's defaults"
_SCALED = "observation statistics are written as the configuration's observation scaler"
_LIMIT = "observation statistics are in the sidecar: d3rlpy does not clip normalised observations"
_MEAN = LayerNames(_HIDDEN, "_mu", {"log_std": "_logstd"})
_PLAIN = LayerNames(_HIDDEN, "_fc")


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan d3rlpy's dict of state_dicts: TD3's or DDPG's, SAC's, or BC's for a policy alone.

    Missing targets are copied from the online networks, missing optimizers start with their defaults. Raise
    UnsupportedError for networks or an action map that the library's modules cannot represent. Sources, in
    github.com/takuseno/d3rlpy: d3rlpy/torch_utility.py (`Checkpointer`: every module and optimizer of the
    algorithm is required), ddpg_impl.py, sac_impl.py and bc_impl.py in d3rlpy/algos/qlearning/torch
    (`Modules`), encoders.py and policies.py in d3rlpy/models/torch (names), d3rlpy/optimizers/optimizers.py.
    """
    return plan_torch_file(_choose_table(binding), binding, agent, settings)


def plan_d3(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a `.d3` file: that dict under `torch`, and the configuration.

    Raise the errors of `plan`, and those of `build_config`.
    """
    # The configuration contains what the other form's note requests.
    writing = replace(_choose_table(binding), hidden="", notes=(_TRAINING,))
    file_plan = plan_torch_file(writing, binding, agent, settings)
    configuration = dict(list_config_leaves(build_config(binding, agent), (key("config"),)))
    norm = binding.facts.norm
    values = {path: leaf for path, leaf in configuration.items() if isinstance(leaf, ValueLeaf)}
    return replace(
        file_plan,
        moves=tuple(replace(move, target=(*_TORCH, *move.target)) for move in file_plan.moves),
        added={
            **{(*_TORCH, *path): leaf for path, leaf in file_plan.added.items()},
            **values,
            (key("version"),): ValueLeaf(VERSION),
        },
        containers={
            (): DICT,
            **{(*_TORCH, *path): container for path, container in file_plan.containers.items()},
            **{path: leaf for path, leaf in configuration.items() if isinstance(leaf, Container)},
        },
        notes=(*file_plan.notes, *([_SCALED if norm.clip is None else _LIMIT] if norm is not None else ())),
    )


def _choose_table(binding: RecognizedAgent) -> WritingTable:
    soft, count = is_gaussian(binding), count_critics(binding)
    names = _MEAN if soft else _PLAIN
    if not count:
        rows: list[NetworkRow | SingleTensorRow] = [NetworkRow("actor", (key("imitator"),), names)]
        return _make_table(rows, {"actor_optimizer": "optim"})
    rows = [NetworkRow("actor", (key("policy"),), names)]
    for component, entry in (("critic", "q_funcs"), ("critic_target", "targ_q_funcs")):
        rows += [
            NetworkRow(f"{component}/q{n + 1}", (key(entry),), LayerNames(f"{n}.{_HIDDEN}", f"{n}._fc"))
            for n in range(count)
        ]
    if not soft:
        rows.append(NetworkRow("actor_target", (key("targ_policy"),), names))
        return _make_table(rows, _OPTIMIZERS)
    # sac.py, initial_temperature: 1, whose logarithm is 0.
    zero = constant_tensor("float32", (1, 1), 0)
    rows.append(SingleTensorRow("temperature/log_alpha", (key("log_temp"), key("_parameter")), (1, 1), zero))
    return _make_table(rows, {**_OPTIMIZERS, "temperature_optimizer": "temp_optim"})


def _make_table(rows: list[NetworkRow | SingleTensorRow], optimizers: dict[str, str]) -> WritingTable:
    places: dict[str, Path] = {canonical: (key(name), key("optim")) for canonical, name in optimizers.items()}
    return WritingTable(
        "d3rlpy",
        rows,
        "affine",
        optimizers=places,
        fresh=True,
        constants={(path[0], key("lr_scheduler")): ValueLeaf(None) for path in places.values()},
        notes=(_CONFIG,),
    )


TABLE = LayoutTable(
    name="d3rlpy",
    statistics="scalers in the configuration",
    plays=(
        "TD3",
        "DDPG",
        "SAC",
        "TD3+BC",
        "CQL",
        "Cal-QL",
        "IQL",
        "AWAC",
        "BC",
        "ReBRAC",
        "CRR",
        "BEAR",
        "DQN",
        "NFQ",
        "discrete CQL",
        "discrete SAC",
        "discrete BC",
    ),
    reads=("PLAS", "BCQ"),
    writes=("TD3", "DDPG", "SAC", "BC"),
    title="d3rlpy's agents: TD3, DDPG, SAC, TD3+BC, CQL, IQL, AWAC, BC, ...; DQN, discrete CQL, SAC, BC",
    framework="torch",
    components={
        "policy": "actor",
        "targ_policy": "actor_target",
        "value_func": "value",
    },
    optimizers={
        "actor_optim": "actor_optimizer",
        "critic_optim": "critic_optimizer",
        "temp_optim": "temperature_optimizer",
    },
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["d3rlpy"]),
    rooted=True,
    seen="written by d3rlpy 2.0.2, 2.3.0 and 2.8.1: TD3, DDPG, SAC, TD3+BC, CQL, IQL, AWAC, BC, ReBRAC, ..."
    "; by 2.8.1: DQN, NFQ, discrete CQL, SAC, BC",
    branches=schema.LOG_STD,
    tensors={
        "log_temp/_parameter": "temperature/log_alpha",
        "policy/_logstd": "actor/log_std",
        "targ_policy/_logstd": "actor_target/log_std",
    },
)

# Paths of Q-functions, and of an imitator's policy, which has no Q-functions.
_CRITICS = {"q_funcs": "critic", "targ_q_funcs": "critic_target"}
_OLD_CRITICS = {"_q_func/_q_funcs": "critic", "_targ_q_func/_q_funcs": "critic_target"}
_IMITATOR = {"imitator": "actor"}
_EVIDENCE = deferred.compile(
    r"(torch/)?(_?)(policy|imitator|q_funcs/0|q_func/_q_funcs/0)/_encoder/(_layers|_fcs|_last_layers|_fc)/"
)
# Each Q-function is matched separately: no trained ensemble is larger.
_NUMBER, _ENSEMBLE = deferred.compile(r"[0-9]{1,4}"), 50
# Algorithms whose `policy` depends on more than the observation, or acts in a latent space.
_DECODERS = ("vae_decoder", "imitator")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a `.d3` file, or of a dict of its state_dicts.

    Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`dump_learnable`, `save_config`),
    d3rlpy/torch_utility.py (`Checkpointer`; `get_state_dict` until 2.0, whose names begin with an
    underscore), d3rlpy/models/torch/policies.py (an action is tanh of the last layer),
    d3rlpy/models/torch/encoders.py (norms come after the activation), d3rlpy/algos/qlearning/base.py
    (`predict`: observation scaler before, action scaler after), d3rlpy/preprocessing/action_scalers.py and
    observation_scalers.py.
    """
    match = next(filter(None, map(_EVIDENCE.match, tree.names.values())), None)
    # Part of a .d3 file without its configuration, which might specify discrete actions.
    if match is None or (name.endswith(".d3") and not match[1]):
        return None
    naming = _D3rlpyNaming(tree, match[1] or "", match[2])
    configuration = read_values(tree, "config")
    table = naming.table()
    binding = bind(tree, table) if table.components else None
    if binding is None:
        return None
    critics = any(part.component == "critic" for part in binding.parts)
    if configuration and critics and naming.discrete() != _is_discrete(configuration):
        return None  # networks of another algorithm than the configuration's
    if naming.discrete():
        binding = _refuse_combined(binding.choosing(tree), naming, configuration)
    else:
        binding = binding.noted(*list_distribution_notes(binding, tree))
    binding = replace(
        binding.entered(*naming.chosen()),
        unplaced={**binding.unplaced, **naming.left},
        consumed=binding.consumed.union(
            # Settings, which are read as facts, and absent schedulers.
            path
            for path, leaf in tree.plain()
            if path[0].value in ("config", "version")
            or (path[-1].value == "lr_scheduler" and leaf.value is None)
        ),
    )
    return add_config_metadata(binding, configuration, "config") if configuration else binding


def _refuse_combined(
    binding: RecognizedAgent, naming: _D3rlpyNaming, configuration: ConfigValues
) -> RecognizedAgent:
    """Refuse Q-functions that do not choose alone; a configuration shows what several ones output."""
    if naming.has(f"{naming.mark}imitator"):
        return binding.refusing_policy("an imitator that limits the choice of actions (BCQ)")
    kind = str(configuration.get("config/type", ""))
    if configuration and kind not in _BEST_OUTPUT:
        return binding.refusing_policy(f"actions of the algorithm {kind}")
    if not any(part.chooses for part in binding.parts):
        return binding
    if not configuration:
        # Functions of mean values and of quantiles have the same names.
        binding = replace(binding, facts=binding.facts.lacking(schema.QUANTILES))
    if not configuration and sum(part.component == "critic" for part in binding.parts) > 1:
        return binding.refused("critic", "the mean of several Q-functions, without the configuration")
    return binding


def companions(location: str) -> Sequence[str]:
    """Return the params.json that d3rlpy's logger writes beside its model files."""
    return (os.path.join(os.path.dirname(location), "params.json"),) if location.endswith(".pt") else ()


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the facts from a version 2 params.json."""
    values = read_values(tree)
    return (
        add_config_metadata(binding, values, os.path.basename(file)) if "config/type" in values else binding
    )


class _D3rlpyNaming:
    """Contents of a file: `top` is the prefix of its names, `mark` the underscore of versions before 2.0."""

    def __init__(self, tree: Tree, top: str, mark: str) -> None:
        self.top, self.mark = top, mark
        cut = len(top)
        self.leaves = {
            name[cut:]: leaf for path, name in tree.names.items() if isinstance(leaf := tree[path], Leaf)
        }
        self.plain = {name[cut:] for path, name in tree.names.items() if isinstance(tree[path], ValueLeaf)}
        self.left: dict[str, tuple[str, ...]] = {}

    def table(self) -> LayoutTable:
        """Return the names of this file's version, without networks that cannot be run or converted."""
        named = {self.mark + component: canonical for component, canonical in TABLE.components.items()}
        if not self.has(self.mark + "policy"):
            named = {self.mark + component: canonical for component, canonical in _IMITATOR.items()}
        for stem, canonical in (_OLD_CRITICS if self.mark else _CRITICS).items():
            numbers = sorted({int(n) for n in self._steps(stem) if _NUMBER.fullmatch(n)})[:_ENSEMBLE]
            named |= {f"{stem}/{number}": f"{canonical}/q{number + 1}" for number in numbers}
        components = {part: canonical for part, canonical in named.items() if self._usable(part, canonical)}
        optimizers = {self._optimizer(self.mark + t): canonical for t, canonical in TABLE.optimizers.items()}
        if not self.has(self.mark + "policy"):
            has_critic = any(component.startswith("critic/") for component in named.values())
            name = self._optimizer(self.mark + "optim")
            optimizers = {name: "critic_optimizer" if has_critic else "actor_optimizer"}
        tensors = {self.mark + tensor: canonical for tensor, canonical in TABLE.tensors.items()}
        return replace(TABLE, components=components, optimizers=optimizers, tensors=tensors)

    def has(self, component: str) -> bool:
        """Return whether any entry is under the name."""
        return next(self._steps(component), None) is not None

    def discrete(self) -> bool:
        """Return whether the Q-functions have the policy's input size, i.e. no action input."""
        if any(map(self._has_decoder, _DECODERS)):
            return False  # BCQ's policy also has the action as input
        policy = self._first(self.mark + "policy")
        critic = self._first("_q_func/_q_funcs/0" if self.mark else "q_funcs/0")
        return critic is not None and policy in (critic, None)

    def chosen(self) -> Iterator[LedgerEntry]:
        """Yield an entry if d3rlpy chooses among actions sampled from its policy."""
        # BEAR has a decoder beside a Gaussian policy; CRR's policy has a target, and no temperature (SAC,
        # AWAC) or IQL value (d3rlpy/algos/qlearning/torch/bear_impl.py, crr_impl.py).
        crr = self.has(f"{self.mark}targ_policy") and not any(
            self.has(self.mark + other) for other in ("log_temp", "value_func")
        )
        if self.has(f"{self.mark}policy/_mu") and (crr or any(map(self._has_decoder, _DECODERS))):
            value = "choosing the sampled action with the highest value: the policy's mean is used instead"
            yield LedgerEntry("not used", "action map", value, decides=True)

    def _has_decoder(self, name: str) -> bool:
        return self.has(self.mark + name) and self.has(f"{self.mark}policy")

    def _steps(self, component: str) -> Iterator[str]:
        cut = component.count("/") + 1
        for name in self.leaves:
            if name.startswith(component + "/"):
                yield name.split("/")[cut]

    def _first(self, component: str) -> int | None:
        shapes = (
            leaf.shape
            for name, leaf in self.leaves.items()
            if name.startswith(f"{component}/_encoder/") and name.endswith("/weight")
        )
        first = next(shapes, ())
        return first[1] if len(first) == 2 else None

    def _optimizer(self, name: str) -> str:
        # Since 2.6 a learning rate scheduler is stored beside it (d3rlpy/optimizers/optimizers.py).
        return (
            f"{name}/optim"
            if self.has(f"{name}/optim") or any(plain.startswith(f"{name}/optim/") for plain in self.plain)
            else name
        )

    def _usable(self, prefix: str, canonical: str) -> bool:
        """Return whether the schema can represent this network; if not, record why."""
        mine = {n: leaf for n, leaf in self.leaves.items() if n.startswith(prefix + "/")}
        component = canonical.partition("/")[0]
        reason = _find_obstacle(mine)
        partial = any(map(self._has_decoder, _DECODERS)) and not self.has(f"{prefix}/_mu")
        if reason is None and component in ("actor", "actor_target") and partial:
            reason = "only a part of the policy: a decoder or a perturbation computes the action"
        if reason is not None:
            self.left[component] = (*self.left.get(component, ()), f"{self.top}{prefix} ({reason})")
        return bool(mine) and reason is None


def _find_obstacle(mine: Mapping[str, Leaf]) -> str | None:
    """Return why the schema cannot represent this network, or None."""
    if any(len(leaf.shape) > 2 for leaf in mine.values()):
        return "convolutions"
    if any(name.endswith("/running_mean") for name in mine):
        return "batch norm"
    if any(name.count("/_layers/") > 1 for name in mine):
        return "residual blocks"
    if any(len(leaf.shape) == 1 and name.endswith("/weight") for name, leaf in mine.items()):
        return "layer norm after the activation"
    if any("/_embed/" in name for name in mine):
        return "implicit quantiles"
    return None
