"""Tianshou policies: policy.state_dict() of 0.4 to 1.x, algorithm's of 2.x, or {"model", "obs_rms"}.

Sources in github.com/thu-ml/tianshou: tianshou/utils/net/continuous.py: Actor outputs max_action *
tanh, ActorProb's mean is unbounded in every example, and SAC applies tanh to it
(policy/modelfree/sac.py); by default, and in 2.x's high-level factory (highlevel/module/actor.py),
tanh limits it. policy/base.py (2.x: algorithm/algorithm_base.py), `map_action`: then the action is
clipped to [-1, 1] ("clip"; SAC's is already inside) and scaled to [low, high]. Hidden layers are
ReLU (utils/net/common.py), those of PPO and related algorithms tanh
(examples/mujoco/mujoco_ppo.py). utils/statistics.py, RunningMeanStd.norm: the observation
statistics, epsilon inside the square root. In 2.x `algorithm.state_dict()` adds the optimizers in
the order policy, critic, critic2.

Q-networks of discrete actions (policy/modelfree/{dqn,c51,qrdqn}.py): a Net with as many outputs as
actions, or with as many for each action as `support` or `tau_hat` have entries, which lie together. C51's
examples end with a softmax over the atoms. Rainbow's noisy layers (utils/net/discrete.py, NoisyLinear) have
their means `mu_W` and `mu_bias` in evaluation. BDQ (utils/net/common.py, BranchingNet) has a network for
each of several actions, and one for the state's value. IQN samples fractions in evaluation too, and FQF has
a network for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError, abbreviate_list
from ckpttool.core.sidecar import Scores
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, index, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind, bind_means
from ckpttool.libraries.recognize import LayoutTable, list_display_names, read_pickled_module
from ckpttool.libraries.schema import (
    NORMALIZER,
    AgentMetadata,
    ObservationNormalizer,
    RecognizedAgent,
    make_float32_tensor,
    read_number,
    read_numbers,
)
from ckpttool.libraries.write import (
    LIST,
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    find_quantiles,
    has_q_policy,
    has_value_network,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import KEEP, Move, Plan, Settings, ToTensor

_SIGMA = {"sigma/model/0": "log_std"}
_CRITICS = {"critic": "q1", "critic1": "q1", "critic2": "q2"}

TABLE = LayoutTable(
    name="tianshou",
    statistics="obs_rms in the checkpoint",
    plays=(
        "TD3",
        "DDPG",
        "SAC",
        "TD3+BC",
        "PPO",
        "discrete SAC",
        "DQN",
        "C51",
        "QR-DQN",
        "Rainbow",
        "BDQ",
        "FQF",
        "IQN (drawn)",
    ),
    writes=("TD3", "DDPG", "SAC", "PPO", "DQN", "C51", "QR-DQN", "BDQ"),
    title="Tianshou's policy.pth (TD3, DDPG, SAC, TD3+BC; PPO and relatives; DQN, C51, QR-DQN, Rainbow, BDQ)",
    framework="torch",
    components={
        "policy/actor": "actor",
        "actor": "actor",
        "actor_old/module": "actor_target",
        "actor_old": "actor_target",
        **{stored: f"critic/{q}" for stored, q in _CRITICS.items()},
        **{f"{stored}_old/module": f"critic_target/{q}" for stored, q in _CRITICS.items()},
        **{f"{stored}_old": f"critic_target/{q}" for stored, q in _CRITICS.items()},
    },
    optimizers={
        "_optimizers/0": "actor_optimizer",
        "_optimizers/1": "critic_optimizer/q1",
        "_optimizers/2": "critic_optimizer/q2",
    },
    # utils/net/continuous.py: SIGMA_MIN, SIGMA_MAX.
    facts=AgentMetadata(
        head="tanh_clip_affine",
        hidden="relu",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["tianshou"],
        distribution=schema.LIMITED_GAUSSIAN,
    ),
    rooted=True,
    seen="TD3 and TD3+BC on Pendulum from public runs; all of them saved by 0.4.11, 0.5.1, 1.2.0 and 2.0.1"
    " (DQN, C51, QR-DQN by the last three, Rainbow by 1.2.0 and 2.0.1, BDQ, FQF, IQN by 2.0.1)",
    branches=_SIGMA,
    tensors={"alpha/_log_alpha": "temperature/log_alpha"},
)
_SAC = replace(
    TABLE,
    facts=AgentMetadata(
        "affine", "relu", 1e-5, lacks=schema.LEFT_OPEN["tianshou sac"], distribution=schema.LIMITED_GAUSSIAN
    ),
)
# PPO, A2C, NPG, TRPO, and GAIL, whose `disc_net` has observation and action as inputs: the critic is a state
# value, the mean is clipped to [-1, 1].
_ON_POLICY = replace(
    TABLE,
    components={"policy/actor": "actor", "actor": "actor", "critic": "value", "disc_net": "discriminator"},
    optimizers={"_optimizers/0": schema.JOINT},
    facts=AgentMetadata(
        head="clip_affine",
        hidden="tanh",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["tianshou ppo"],
        distribution=schema.GAUSSIAN._replace(
            assumed="sigma is the standard deviation of a normal distribution: dist_fn, which examples pass"
        ),
    ),
    branches={},
    tensors={"actor/sigma_param": "actor/log_std", "policy/actor/sigma_param": "actor/log_std"},
)

# DQN, C51 and QR-DQN: a target shows that the network is a Q-network.
_TARGETS = ("model_old/module/model", "model_old/model")
_Q_NETWORKS = replace(
    TABLE,
    components={
        "policy/model/model": "critic/q1",
        "model/model": "critic/q1",
        **dict.fromkeys(_TARGETS, "critic_target/q1"),
    },
    optimizers={"_optimizers/0": "critic_optimizer"},
    facts=AgentMetadata(head="argmax", hidden="relu", epsilon=1e-5, lacks=schema.LEFT_OPEN["tianshou q"]),
    branches={},
    # A parameter in 2.x, which the optimizer lists.
    tensors=dict.fromkeys(("policy/support", "support"), "critic/q_support"),
)
_STREAM = deferred.compile(r"(?:^|/)model/[QV]/")
_DEEP_STREAM = deferred.compile(r"(?:^|/)model/[QV]/model/[1-9]")
_MEANS = {"mu_W": "weight", "mu_bias": "bias"}
_NOISE = frozenset(("sigma_W", "sigma_bias", "eps_p", "eps_q"))
_FRACTION_NETS = (
    ("policy/model", "critic"),
    ("model", "critic"),
    ("model_old/module", "critic_target"),
    ("model_old", "critic_target"),
)
# IQN and FQF: an encoder and a head, the embedding of fractions between them, and FQF's network of these.
_PROPOSALS = ("fraction_model", "propose_model")
_FRACTIONS = replace(
    _Q_NETWORKS,
    components={
        **{
            f"{net}/preprocess/model/model+{net}/last/model": f"{component}/q1"
            for net, component in _FRACTION_NETS
        },
        **{f"{net}/embed_model/net": f"{component}/q2" for net, component in _FRACTION_NETS},
        **{f"{top}{name}": "critic/q3" for top in ("", "policy/") for name in _PROPOSALS},
    },
)
_ENCODER = deferred.compile(r"(?:policy/)?model/preprocess/model/model/\d+/weight")
_LINEAR = (
    "no activation follows the last layer before the fractions, as in the library's examples: "
    "its width is a Net's action_shape (test/discrete/test_fqf.py)"
)
_STREAMED = "the streams Q and V have the activation of the layers before them, which dueling_param may state"
# The parameter whose entries are one action's outputs, with what these are.
QUANTILES: Scores = "quantiles_last"
WRITTEN_SCORES: Mapping[Scores, Scores] = {"quantiles": QUANTILES, "value_first": "dueling"}
_DISTRIBUTIONS: Mapping[str, Scores] = {"support": "atoms", "tau_hat": QUANTILES}
_STREAMS: tuple[Scores, ...] = ("dueling", "dueling_atoms", "dueling_quantiles")
_DUELING_DISTRIBUTIONS: Mapping[Scores, Scores] = {"atoms": "dueling_atoms", QUANTILES: "dueling_quantiles"}
# A dueling Net has further layers for the advantages (q1) and for the state's value.
_DUELING = replace(
    _Q_NETWORKS,
    components={
        f"{net}+{net.removesuffix('model')}{module}": f"{canonical.partition('/')[0]}/{head}"
        for net, canonical in _Q_NETWORKS.components.items()
        for module, head in (("Q", "q1"), ("V", "q2"))
    },
)

_BRANCH = deferred.compile(
    r"((?:policy/model|model|model_old/module|model_old)/)branches/(\d+)/model/0/weight"
)
# A dueling Net without common hidden layers is two streams.
_DUELING_ALONE = replace(
    _Q_NETWORKS,
    components={net.partition("+")[2]: canonical for net, canonical in _DUELING.components.items()},
)
_ONLINE = tuple(f"{top}model/{net}/" for top in ("", "policy/") for net in ("model", "Q"))
_OLD = tuple(f"model_old/{top}{net}/" for top in ("", "module/") for net in ("model", "Q"))

# A state_dict key: the same networks as separate dicts have another layout.
_ACTOR = deferred.compile(r"(?:policy\.)?actor\.(preprocess|last|mu)\..*")
_TARGETS = ("critic_old", "critic1_old")
_EPSILON = 2.0**-23  # RunningMeanStd's default: that of float32
_LARGEST = 1 << 62
_OBS_RMS = key("obs_rms")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # policy.pth is no evidence
    """Return the recognised agent of a policy whose actor is `preprocess` and a last layer."""
    module = read_pickled_module(tree)
    if module is not None:
        binding = _bind_policy(module.state)
        return None if binding is None else _add_attributes(module.bound(binding), tree)
    return _bind_policy(tree)


def _bind_policy(tree: Tree) -> RecognizedAgent | None:
    heads = {match[1] for path in tree if path and (match := _ACTOR.fullmatch(str(path[-1].value)))}
    if not heads:
        return _bind_q_network(tree)
    if "preprocess" not in heads or len(heads) < 2:
        return None
    narrow, wide = (
        _count_inputs(tree, "actor"),
        _count_inputs(tree, "critic") or _count_inputs(tree, "critic1"),
    )
    # Discrete SAC's Q-functions also have only the observation as input; there are two, with targets.
    # Networks that share their tensors (a target that is a copy) have the other names.
    modules = {step for name in list_display_names(tree) for step in name.split("/")}
    q_functions = modules & {"critic1", "critic2", "critic_old", "critic1_old"}
    alike = wide is not None and wide == narrow
    # The policy alone, as in 2.x: a standard deviation that is a parameter means PPO or a related algorithm.
    alone = wide is None and bool(modules & {"sigma_param"})
    on_policy = (alike and not q_functions) or alone
    if wide is None and not alone and "mu" not in heads and not modules & {"actor_old", *_TARGETS}:
        # REINFORCE with discrete actions, or imitation of either kind: the environment has to show it.
        return None
    binding = bind(tree, _ON_POLICY if on_policy else _SAC if "mu" in heads else TABLE)
    if binding is None:
        return None
    if alike and "mu" not in heads:
        # Logits or probabilities of discrete actions; tianshou/policy/modelfree/{pg,discrete_sac}.py: a
        # deterministic policy takes the most probable one.
        evidence = f"{binding.evidence} with discrete actions"
        binding = replace(binding.choosing(tree), evidence=evidence)
    return _add_statistics(binding, tree)


def _bind_q_network(tree: Tree) -> RecognizedAgent | None:
    """Bind a Q-network as it is in evaluation: the means of noisy layers are its weights."""
    return bind_means(
        tree, _MEANS, _NOISE, lambda name: _bind_values(name) or _bind_branches(name) or _bind_fractions(name)
    )


def _bind_branches(tree: Tree) -> RecognizedAgent | None:
    """Bind the network of BDQ, which has a branch for each action, and its target."""
    matches = [match for name in tree.names.values() if (match := _BRANCH.fullmatch(name))]
    components = {}
    for net, number in (match.groups() for match in matches):
        critic = "critic_target" if net.startswith("model_old") else "critic"
        branches = sum(match[1] == net for match in matches)
        components[f"{net}common+{net}branches/{number}"] = f"{critic}/q{int(number) + 1}"
        components[f"{net}common+{net}value"] = f"{critic}/q{branches + 1}"
    if {part.partition("/")[0] for part in components.values()} != {"critic", "critic_target"}:
        return None
    binding = bind(tree, replace(_Q_NETWORKS, components=components))
    titles = set() if binding is None else {part.title for part in binding.parts}
    if binding is None or not {*components.values()} <= titles:
        return None
    return _add_statistics(binding.choosing(tree, "branches", where="model.branches"), tree)


def _bind_fractions(tree: Tree) -> RecognizedAgent | None:
    """Bind the networks of IQN, whose fractions are drawn, or of FQF, which has a network for them."""
    modules = {step for name in tree.names.values() for step in name.split("/")}
    if not {"model_old", "embed_model"} <= modules:
        return None
    binding = bind(tree, _FRACTIONS)
    titles = set() if binding is None else {part.title for part in binding.parts}
    if binding is None or not {"critic/q1", "critic/q2"} <= titles:
        return None
    scores: Scores = "proposed_fractions" if "critic/q3" in titles else "drawn_fractions"
    binding = binding.choosing(tree, scores, where="model.embed_model").assuming(_LINEAR)
    weights = [name for name in tree.names.values() if _ENCODER.fullmatch(name)]
    parts = tuple(part._replace(encoder=len(weights)) if part.acts else part for part in binding.parts)
    left = frozenset(path for path, name in tree.names.items() if name in ("tau_hat", "policy/tau_hat"))
    return _add_statistics(replace(binding, parts=parts, consumed=binding.consumed | left), tree)


def _bind_values(tree: Tree) -> RecognizedAgent | None:
    """Bind the Q-network of DQN, C51, QR-DQN or Rainbow, and its target."""
    names = {name: path for path, name in tree.names.items()}
    every = tuple(list_display_names(tree))
    if not any(name.startswith(_OLD) for name in every):
        return None
    if not any(name.startswith(_ONLINE) for name in every):
        return None
    streams = any(_STREAM.search(name) for name in names)
    tables = (_DUELING, _DUELING_ALONE) if streams else (_Q_NETWORKS,)
    binding = next((agent for table in tables if (agent := bind(tree, table)) is not None), None)
    dueling = binding is not None and {"critic/q1", "critic/q2"} <= {part.title for part in binding.parts}
    if streams and not dueling:
        binding = bind(tree, _Q_NETWORKS)
    if binding is None or not any(part.title == "critic/q1" for part in binding.parts):
        return None
    if streams and not dueling:
        return binding.choosing(tree).refused("critic", "a dueling network of other layers than dense ones")
    if any(_DEEP_STREAM.search(name) for name in names):
        binding = binding.assuming(_STREAMED)
    for parameter, scores in _DISTRIBUTIONS.items():
        name = next((name for name in (parameter, f"policy/{parameter}") if name in names), None)
        leaf = None if name is None else tree[names[name]]
        if name is not None and isinstance(leaf, Leaf):
            support = read_numbers(leaf) if scores == "atoms" else ()
            kind = _DUELING_DISTRIBUTIONS[scores] if dueling else scores
            binding = binding.choosing(tree, kind, support, leaf.size, name)
            if scores != "atoms":  # the quantiles follow from their number
                binding = replace(binding, consumed=binding.consumed | {names[name]})
            return _add_statistics(binding, tree)
    binding = binding.choosing(tree, "dueling", where="model.V") if dueling else binding.choosing(tree)
    return _add_statistics(binding, tree)


def _add_attributes(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the bounds and the action map from a pickled policy's attributes."""
    recorded = {
        tuple(step.value for step in path if step.value not in ("_modules", "policy")): leaf
        for path, leaf in tree.items()
    }

    def value(*names: str) -> object:
        leaf = recorded.get(names)
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    low, high = (read_numbers(recorded.get(("action_space", end))) for end in ("low", "high"))
    facts = binding.facts.bounded("action_space", low, high) or binding.facts
    if facts.action_high is None or ("action_bound_method",) not in recorded:
        return replace(binding, facts=facts)
    limit, method = value("actor", "max_action"), value("action_bound_method")
    deterministic = ("actor", "_unbounded") not in recorded
    bounded = deterministic or value("actor", "_unbounded") is False
    soft = facts.head == "affine"  # SAC applies tanh to the mean
    if value("action_scaling") is not True or method not in ("clip", "tanh", None):
        return replace(binding, facts=facts).refused(
            "actor", "actions that are not scaled to the action bounds"
        )
    if soft or (bounded and limit == 1.0 and method != "tanh") or (not bounded and method == "tanh"):
        head = "affine"
    elif bounded and limit == facts.action_high[0] and method == "clip":
        head = "tanh_clip_affine"
    elif not bounded and method == "clip":
        head = "clip_affine"
    else:
        reason = f"an action map with max_action {limit} and action_bound_method {method}"
        return replace(binding, facts=facts).refused("actor", reason)
    facts = facts.without_lack("action bounds", "action map").read("action_bound_method", head=head)
    return replace(binding, facts=facts)


def _count_inputs(tree: Tree, component: str) -> int | None:
    """Return the number of inputs of a component's first matrix.

    A critic on the actor's own `preprocess` has further names for its tensors,
    or in files without these only its last layer.
    """
    own = [
        (f"/{tree.names[path]}", leaf)
        for path, leaf in tree.tensors()
        if f"/{component}/" in f"/{tree.names[path]}"
    ]
    if own and component != "actor" and all(f"/{component}/last/" in name for name, _ in own):
        return _count_inputs(tree, "actor")
    matrices = (leaf for name, leaf in own if name.endswith("/weight") and len(leaf.shape) == 2)
    return next((leaf.shape[1] for leaf in matrices), None)


def _is_stated(leaf: Leaf | ValueLeaf | None) -> bool:
    return isinstance(leaf, Leaf) or (leaf is not None and leaf.value is not None)


def _add_statistics(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the observation statistics, if the checkpoint dict contains them."""
    places = {name: (_OBS_RMS, attr(name)) for name in ("mean", "var", "count", "eps", "clip_max")}
    mean, var = (tree.get(places[name]) for name in ("mean", "var"))
    if not isinstance(mean, Leaf) or not isinstance(var, Leaf):
        return binding
    epsilon, clip = (
        value
        if (value := read_number(tree.get(places[name]))) is not None and 0 <= value < _LARGEST
        else None
        for name in ("eps", "clip_max")
    )
    stated = {name for name in ("eps", "clip_max") if _is_stated(tree.get(places[name]))}
    unclear = stated - {name for name, value in (("eps", epsilon), ("clip_max", clip)) if value is not None}
    if unclear:
        text = f"whose {abbreviate_list(sorted(unclear), 2)} is no number from 0"
        return replace(binding, facts=binding.facts.not_understood("obs_norm", text, "obs_rms"))
    norm = ObservationNormalizer(
        mean, var, epsilon=_EPSILON if epsilon is None else epsilon, clip=clip or None
    )
    moves = [Move(places[name], (attr(NORMALIZER), attr(name)), KEEP) for name in ("mean", "var")]
    count = tree.get(places["count"])
    if isinstance(count, ValueLeaf) and type(count.value) is int and 0 <= count.value < _LARGEST:
        moves.append(Move(places["count"], (attr(NORMALIZER), attr("count")), ToTensor("int64")))
    return replace(
        binding,
        moves=replace(binding.moves, moves=(*binding.moves.moves, *moves)),
        facts=binding.facts.read("obs_rms", norm=norm),
        consumed=binding.consumed | {places[name] for name in ("eps", "clip_max") if places[name] in tree},
    )


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the `algorithm.state_dict()` of version 2, including optimizers.

    Raise UnsupportedError for networks or an action map that the library's Actor and Critic cannot
    represent.
    """
    return plan_torch_file(_make_table(binding, agent), binding, agent, settings)


_OPTIMIZERS = key("_optimizers")
_STATES: Mapping[Path, Container] = {(_OPTIMIZERS,): LIST}
_ONE = "create its Actor with max_action=1, so that tanh is mapped to the action bounds"


def _network_row(component: str, stored: str, last: str = "last", **branches: str) -> NetworkRow:
    hidden = f"{stored}.preprocess.model.model.{{s}}"
    heads = {canonical: f"{stored}.{name}.model.0" for canonical, name in branches.items()}
    return NetworkRow(component, (), LayerNames(hidden, f"{stored}.{last}.model.0", heads, norm=hidden))


def _make_table(binding: RecognizedAgent, agent: Tree) -> WritingTable:
    if has_q_policy(binding):
        return _make_q_table(binding, agent)
    if has_value_network(binding):
        discrete = binding.facts.head == "argmax"
        rows: list[NetworkRow | SingleTensorRow] = [
            _network_row("actor", "policy.actor", "last" if discrete else "mu"),
            _network_row("value", "critic"),
        ]
        if not discrete:
            rows.insert(0, SingleTensorRow("actor/log_std", (key("policy.actor.sigma_param"),), (-1, 1)))
        return WritingTable(
            "Tianshou",
            rows,
            "argmax" if discrete else "clip_affine",
            joint=(_OPTIMIZERS, index(0)),
            needs=("actor", "value"),
            containers=_STATES,
        )
    soft, qs = is_gaussian(binding), [("q1", "critic"), ("q2", "critic2")][: max(count_critics(binding), 1)]
    rows = [
        _network_row("actor", "policy.actor", "mu", log_std="sigma")
        if soft
        else _network_row("actor", "policy.actor")
    ]
    for q, name in qs:
        rows += [_network_row(f"critic/{q}", name), _network_row(f"critic_target/{q}", f"{name}_old.module")]
    if soft:
        rows.append(SingleTensorRow("temperature/log_alpha", (key("alpha._log_alpha"),), (1,), optional=True))
    else:
        rows.append(_network_row("actor_target", "actor_old.module"))
    trained = ("actor_optimizer", *(f"critic_optimizer/{q}" for q, _ in qs))
    clips = soft or binding.facts.head == "tanh_clip_affine"
    return WritingTable(
        "Tianshou",
        rows,
        "affine" if soft or not clips else "tanh_clip_affine",
        optimizers={name: (_OPTIMIZERS, index(number)) for number, name in enumerate(trained)},
        fresh=True,
        needs=("actor", "critic"),
        containers=_STATES,
        notes=() if clips else (_ONE,),
    )


def _make_q_table(binding: RecognizedAgent, agent: Tree) -> WritingTable:
    """Return the table of DQN, C51 or QR-DQN, whose Net is all of the policy's model.

    C51's optimizer also lists the support, which has no gradient.
    """
    choices, quantiles = binding.facts.choices, find_quantiles(binding, agent, QUANTILES)
    rows: list[NetworkRow | SingleTensorRow] = []
    constants: dict[Path, Leaf | ValueLeaf] = {}
    if quantiles:
        constants[key("tau_hat"),] = _make_midpoints(quantiles.number)
    if choices is not None and choices.support:
        atoms = replace(make_float32_tensor(choices.support), role="parameter")
        rows.append(SingleTensorRow("critic/q_support", (key("policy.support"),), default=atoms))
    rows += _list_joined_rows(binding, agent) or [
        NetworkRow(component, (), LayerNames(f"{net}.model.model.{{s}}"), quantiles and quantiles.swapped)
        for component, net in (("critic/q1", "policy.model"), ("critic_target/q1", "model_old.module"))
    ]
    return WritingTable(
        "Tianshou",
        rows,
        "argmax",
        optimizers={"critic_optimizer": (_OPTIMIZERS, index(0))},
        fresh=True,
        needs=("critic",),
        values=False,
        constants=constants,
        containers=_STATES,
        scores=("values", "atoms", "quantiles", QUANTILES, "branches", "value_first", *_STREAMS),
        spaces=frozenset(("several",))
        if choices is not None and choices.scores == "branches"
        else frozenset(),
        notes=("create C51's Net with softmax=True",) if choices is not None and choices.support else (),
    )


def _list_joined_rows(binding: RecognizedAgent, agent: Tree) -> list[NetworkRow]:
    """Return the rows of a dueling Net, or of a BranchingNet; none for one chain of layers.

    The layers that all chains share come first. A Net may have none; a BranchingNet has at least one.
    A last layer that gives the value and then the advantages becomes one layer of each stream.
    """
    choices = binding.facts.choices
    if choices is not None and choices.scores == "value_first":
        return [
            NetworkRow(
                component,
                (),
                LayerNames(f"{net}.model.model.{{s}}", ""),
                parts={f"{net}.Q.model.0": (1, 1 + sum(choices.counts)), f"{net}.V.model.0": (0, 1)},
            )
            for component, net in (("critic/q1", "policy.model"), ("critic_target/q1", "model_old.module"))
        ]
    acting = [part for part in binding.parts if part.chooses and part.state_value is not None]
    if not acting or choices is None:
        return []
    pairs = [(part, chain) for part in acting for chain in part.chains[1:]]
    shared = min(
        min(schema.count_shared_layers(agent, *pair), *(len(chain.layers) - 1 for chain in pair))
        for pair in pairs
    )
    branches = choices.scores == "branches"
    if branches and not shared:
        raise UnsupportedError("the branches of Tianshou's BranchingNet have a layer in common")
    streams = [*(f"branches.{n}" for n in range(len(choices.counts))), "value"] if branches else ["Q", "V"]
    rows = []
    for component, net in (("critic", "policy.model"), ("critic_target", "model_old.module")):
        if shared:
            trunk = f"{net}.{'common' if branches else 'model'}.model.{{s}}"
            rows.append(NetworkRow(f"{component}/q1", (), LayerNames(trunk), span=slice(0, shared)))
        for number, stream in enumerate(streams, 1):
            names, own = LayerNames(f"{net}.{stream}.model.{{s}}"), slice(shared, None)
            rows.append(NetworkRow(f"{component}/q{number}", (), names, span=own, trunk=number > 1))
    return rows


def _make_midpoints(number: int) -> Leaf:
    """Return the middles of as many equal intervals from 0 to 1, float32 [1, n, 1], as QRDQN computes them.

    The ends are those of torch.linspace, which counts from the nearer end and rounds once.
    """
    numbers, step = np.arange(number + 1, dtype="f8"), float(np.float32(1) / np.float32(number))
    near = numbers < (number + 1) // 2
    ends = np.where(near, step * numbers, 1 - step * (number - numbers)).astype("f4")
    middles = (ends[:-1] + ends[1:]) / np.float32(2)
    return replace(make_float32_tensor(middles.tolist()), shape=(1, number, 1), role="buffer")
