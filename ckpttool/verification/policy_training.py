"""Prepare a recognised agent for training: networks, vectors and optimizers of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.optimizers import BUFFER, FLAGS, VELOCITY, OptimizerFamily
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr
from ckpttool.evaluation.agent_networks import build_part_network
from ckpttool.evaluation.restore import Agent
from ckpttool.libraries import optimizer_settings, schema
from ckpttool.libraries.optimizers_read import CanonicalOptimizer
from ckpttool.libraries.schema import JOINT, AgentNetwork
from ckpttool.mapping.rules import ToValue, canonical_tree
from ckpttool.networks import numpy_backend
from ckpttool.networks.build import NetworkSettings
from ckpttool.networks.network import TRAINED, Concat, Dense, Network, Node
from ckpttool.networks.policy_training import (
    A2C,
    DDPG,
    DISCOUNT,
    LOG_STD,
    PPO,
    SAC,
    TD3,
    TEMPERATURE,
    Learner,
    OptimizerSetup,
    TrainingBatch,
)
from ckpttool.verification.tolerances import STATE_BOUND, is_equal, relative_distance

BATCH = 100
MISSING = (
    "random numbers: no file contains a generator's state",
    "the replay buffer or the last rollout",
    "learning-rate and clip-range schedules",
    "environment state, and observation statistics that training updates",
)
INSTEAD = "use --all instead of --train-step: it compares weights, optimizer state and settings"
_WEIGHTS = ("kernel", "bias", "scale", "offset")
_TEMPERATURE_PATH = (attr(schema.TEMPERATURE), attr("log_alpha"))
_LOG_STD_PATH = (attr("actor"), attr("log_std"))


def _list_settings(family: OptimizerFamily) -> list[str]:
    """Return the numbers that an update without momentum uses."""
    return [name for name in family.settings if name not in (*FLAGS, "momentum")]


class LearnerReader:
    """Reads the networks and optimizers of one agent from its canonical tree.

    `assumed` and `notes` are sentences on what its checkpoint lacks.
    """

    def __init__(self, agent: Agent, settings: NetworkSettings) -> None:
        self._agent, self._settings = agent, settings
        self._tree: Tree = canonical_tree(agent.checkpoint.tree, agent.binding.moves)
        self._stated = optimizer_settings.sidecar_settings(agent.sidecar)
        placement = optimizer_settings.epsilon_placement(agent.sidecar, agent.binding.layout)
        self._corrected = placement == optimizer_settings.CORRECTED
        self._parts = {part.title: part for part in agent.binding.parts}
        self.assumed: list[str] = []
        self.notes: list[str] = []

    def learner(self) -> Learner:
        """Return the learner; raise UnsupportedError for other algorithms and optimizers."""
        critics = tuple(title for title, part in self._parts.items() if part.component == "critic")
        actor = self._agent.runnable("actor") or self._parts.get("actor")
        if critics and actor is None:
            titles = ", ".join(self._parts)
            raise self._refused(
                "critics without an actor choose discrete actions, which training steps do not support",
                titles,
            )
        if actor is None or not (critics or "value" in self._parts):
            raise UsageError(
                "a training step needs an actor and a critic",
                file=self._agent.checkpoint.path,
                found=", ".join(self._parts),
                hint="train the networks as models: --like-a MODULE:FACTORY --like-b MODULE:FACTORY",
            )
        if critics and "value" in self._parts:
            raise self._refused("the first version of SAC, with a state value, is not trained here")
        if not critics:
            return self._on_policy()
        return self._off_policy(critics) if actor.branches else self._deterministic(critics)

    def _deterministic(self, critics: tuple[str, ...]) -> Learner:
        """Return the agent as TD3 (two critics or more) or DDPG (one) would continue to train it."""
        networks, slow = self._with_targets(
            {"actor": self._deterministic_actor, **dict.fromkeys(critics, self._critic)}
        )
        trained = {"actor_optimizer": ("actor",), "critic_optimizer": critics}
        setups = {name: self._optimizer(name, titles) for name, titles in trained.items()}
        low, high = self._bounds()
        algorithm = TD3 if len(critics) > 1 else DDPG
        count = self._tree.get((attr("total_it"),))
        value = None if count is None else ToValue().leaf(count)
        updates = value.value if isinstance(value, ValueLeaf) and isinstance(value.value, int) else 0
        return Learner(algorithm, networks, {}, critics, slow, setups, low, high, updates=updates)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = self._settings.action_low, self._settings.action_high
        return np.asarray(low, np.float64), np.asarray(high, np.float64)

    def _with_targets(
        self, makers: Mapping[str, Callable[[str], Network]]
    ) -> tuple[dict[str, Network], dict[str, str]]:
        """Return networks and their targets, which are copies if the checkpoint lacks them, and the pairs."""
        networks, slow = {}, {}
        for title, make in makers.items():
            networks[title] = make(title)
            component, _, head = title.partition("/")
            slow[title] = f"{component}_target" + (f"/{head}" if head else "")
            if slow[title] in self._parts:
                networks[slow[title]] = make(slow[title])
            else:
                networks[slow[title]] = networks[title]
                self.notes.append(
                    f"no {slow[title]} in the checkpoint: training starts from a copy of {title}"
                )
        return networks, slow

    def _deterministic_actor(self, title: str) -> Network:
        part = self._agent.runnable(title)
        if part is None or part.branches:
            raise self._refused(f"{title} is a Gaussian policy, which TD3 does not train")
        return build_part_network(self._agent, part, self._settings)

    def _off_policy(self, critics: tuple[str, ...]) -> Learner:
        networks, slow = self._with_targets(dict.fromkeys(critics, self._critic))
        networks = {"actor": self._actor(), **networks}
        trained = {"actor_optimizer": ("actor",), "critic_optimizer": critics}
        vectors = self._vectors(_TEMPERATURE_PATH, TEMPERATURE)
        if vectors:
            trained["temperature_optimizer"] = (TEMPERATURE,)
        else:
            self.assumed.append("the temperature is 0.2 and constant: the checkpoint contains no other")
        setups = {name: self._optimizer(name, titles) for name, titles in trained.items()}
        low, high = self._bounds()
        return Learner(SAC, networks, vectors, critics, slow, setups, low, high)

    def _on_policy(self) -> Learner:
        value = build_part_network(self._agent, self._parts["value"], self._settings)
        networks = {"actor": self._actor(), "value": value}
        vectors = self._vectors(_LOG_STD_PATH, LOG_STD)
        width = len(self._settings.action_low)
        if networks["actor"].width == width and not vectors:
            raise self._refused("the checkpoint contains no standard deviation of the policy")
        policy = ("actor", *vectors)
        own = {str(path[0].value) for path in self._tree}
        if {"actor_optimizer", "value_optimizer"} & own and JOINT not in own:
            trained: dict[str, tuple[str, ...]] = {"actor_optimizer": policy, "value_optimizer": ("value",)}
        else:
            trained = {JOINT: (*policy, "value")}
        setups = {name: self._optimizer(name, titles) for name, titles in trained.items()}
        algorithm = A2C if any(setup.family == "RMSprop" for setup in setups.values()) else PPO
        self.assumed.append(f"the algorithm is {algorithm}, by its optimizer; no file names it")
        bounds = np.zeros(width)
        return Learner(algorithm, networks, vectors, (), {}, setups, bounds, bounds)

    def _vectors(self, path: Path, title: str) -> dict[str, np.ndarray]:
        leaf = self._tree.get(path)
        return {title: leaf.array().astype(np.float64).reshape(-1)} if isinstance(leaf, Leaf) else {}

    def _actor(self) -> Network:
        """Return the actor with raw outputs: the mean, then the log standard deviation of a branch."""
        part = self._agent.runnable("actor")
        if part is None or part.program is not None:
            raise self._refused("the actor is not a chain of dense layers")
        network = build_part_network(self._agent, part, replace(self._settings, head="identity"))
        branch = next((layer for name, layer in part.branches if name == "log_std"), None)
        if branch is None and part.branches:
            raise self._refused("the policy's deviation is not a log standard deviation")
        if branch is None:
            return network
        last = max(n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense))
        tensors = [self._tree.get((*part.prefix, attr("log_std"), attr(name))) for name in ("kernel", "bias")]
        kernel, bias = (
            leaf.array().astype(np.float32) if isinstance(leaf, Leaf) else None for leaf in tensors
        )
        if kernel is None:
            raise self._refused("the policy's deviation has no kernel")
        first = len(network.inputs) + len(network.nodes)
        heads = (
            Node(Dense(kernel, bias), network.nodes[last].inputs),
            Node(Concat(), (network.output, first)),
        )
        return replace(network, nodes=(*network.nodes, *heads), output=first + 1)

    def _critic(self, title: str) -> Network:
        part = self._agent.runnable(title) or self._parts[title]
        network = build_part_network(self._agent, part, self._settings)
        if network.width != 1:
            raise self._refused(
                f"{title} outputs a distribution of values, which training steps do not support"
            )
        return network

    def _optimizer(self, name: str, titles: tuple[str, ...]) -> OptimizerSetup:
        weights = [path for title in titles for path in self._weights(title)]
        known = CanonicalOptimizer(name, self._tree, self._stated.get(name, {}), self._agent.binding.defaults)
        family = known.family.name
        rates = ("decay", "lr_decay")
        if known.family.update is None or known.value("maximize") or any(map(known.number, rates)):
            raise self._refused(f"{name} has an update rule that training steps do not support", family)
        self._assume(name, known, family)
        file = self._agent.checkpoint.path
        settings = {
            setting: known.common_number(setting, weights, file) for setting in _list_settings(known.family)
        }
        decays, apart = known.decays(weights, file)
        if apart and decays[0]:
            settings["weight_decay"] = decays[0]
        names = [s.name for s in known.family.specs if not s.setting or known.value(s.setting)]
        slots = {slot: self._slot(known, slot, weights) for slot in names if slot != VELOCITY}
        if "momentum" in known.family.arguments and (
            momentum := known.common_number("momentum", weights, file)
        ):
            settings["momentum"] = momentum
            settings["nesterov"] = float(bool(known.value("nesterov")))
            slots["buffer"] = self._buffer(known, settings["learning_rate"], weights)
        return OptimizerSetup(
            family,
            titles,
            settings,
            int(known.number("step") or 0),
            slots,
            tuple(0.0 if apart else decay for decay in decays),
            corrected=self._corrected,
        )

    def _assume(self, name: str, known: CanonicalOptimizer, family: str) -> None:
        if any(path[0] == attr(name) for path in self._tree):
            missing = [
                setting
                for setting in _list_settings(known.family)
                if not known.has(setting) and setting in known.defaults
            ]
            self.assumed += [known.assumed(setting) for setting in missing]
        else:
            owner = next(iter(known.defaults.values())).library
            self.assumed.append(
                f"no {name} in the checkpoint: training starts with a new {family} with {owner}'s defaults"
            )
        if known.family.epsilon and family != "Adam":
            self.notes.append(f"{name}: epsilon is added as Keras does ({known.family.epsilon})")

    def _weights(self, title: str) -> Iterator[Path]:
        """Yield the canonical paths of the trained arrays, in the order of the network's."""
        if title in (TEMPERATURE, LOG_STD):
            yield _TEMPERATURE_PATH if title == TEMPERATURE else _LOG_STD_PATH
            return
        part: AgentNetwork = self._parts[title]
        for position in range(len(part.layers)):
            for name in _WEIGHTS:
                path = schema.canonical_weight_path(part, position, name)
                if path in self._tree:
                    yield path
        for branch, _ in part.branches:
            for name in ("kernel", "bias"):
                path = (*part.prefix, attr(branch), attr(name))
                if path in self._tree:
                    yield path

    def _slot(
        self, known: CanonicalOptimizer, slot: str, weights: Sequence[Path], factor: float = 1.0
    ) -> tuple[np.ndarray, ...]:
        arrays = known.slot_arrays(slot, weights, self._agent.checkpoint.path, factor)
        return tuple(np.atleast_1d(array) for array in arrays)

    def _buffer(
        self, known: CanonicalOptimizer, rate: float, weights: Sequence[Path]
    ) -> tuple[np.ndarray, ...]:
        """Return the sums of gradients without the learning rate."""
        if VELOCITY in known.slots:
            return self._slot(known, VELOCITY, weights, known.family.folded / rate)
        return self._slot(known, BUFFER, weights)

    def _refused(self, reason: str, description: str | None = None) -> UnsupportedError:
        return UnsupportedError(reason, file=self._agent.checkpoint.path, found=description, hint=INSTEAD)


def make_batches(
    learner: Learner, steps: int, statistics: Mapping[str, Any] | None = None
) -> list[TrainingBatch]:
    """Return fixed batches at the scale that the agent expects, the same for both sides: float32.

    Actions of PPO and A2C are samples of A's own policy, and their old probabilities its own, slightly
    changed.
    """
    generator = np.random.default_rng(0)
    double = learner.cast("float64")
    engine = numpy_backend.learn(double)
    obs_dim = learner.networks["actor"].input_shapes["obs"][0]
    mean, deviation = np.zeros(obs_dim), np.ones(obs_dim)
    if statistics is not None:
        mean, deviation = np.asarray(statistics["mean"]), np.sqrt(np.asarray(statistics["var"]))
    draw = generator.standard_normal

    def observations() -> np.ndarray:
        observations: np.ndarray = mean + deviation * draw((BATCH, obs_dim))
        return observations

    batches = []
    for _ in range(steps):
        if learner.critics:
            batches.append(_off_policy_batch(double, observations, generator))
        else:
            obs = observations()
            batches.append(_on_policy_batch(double, engine, obs, generator))
    if learner.critics:
        first = batches[0].arrays
        values = engine.forward(learner.critics[0], first["obs"], first["action"])
        scale = (1 - DISCOUNT) * float(np.sqrt(np.square(values).mean())) or 1.0
        batches = [
            TrainingBatch({**batch.arrays, "reward": batch.arrays["reward"] * scale}) for batch in batches
        ]
    return [batch.cast("float32") for batch in batches]


def _off_policy_batch(learner: Learner, observations: Any, generator: np.random.Generator) -> TrainingBatch:
    act = (BATCH, len(learner.low))
    return TrainingBatch(
        {
            "obs": observations(),
            "action": generator.uniform(learner.low, learner.high, act),
            "next_obs": observations(),
            "reward": generator.standard_normal((BATCH, 1)),
            "not_done": (generator.random((BATCH, 1)) < 0.95).astype(np.float64),
            "noise": generator.standard_normal(act),
            "next_noise": generator.standard_normal(act),
        }
    )


def _on_policy_batch(
    learner: Learner, engine: Any, obs: np.ndarray, generator: np.random.Generator
) -> TrainingBatch:
    output, values = engine.forward("actor", obs), engine.forward("value", obs)
    apart = LOG_STD in learner.vectors
    mean, log_std = (output, learner.vectors[LOG_STD]) if apart else np.split(output, 2, axis=1)
    noise = generator.standard_normal(mean.shape)
    log_prob = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=1, keepdims=True)
    size = float(np.sqrt(np.square(values).mean())) or 1.0
    return TrainingBatch(
        {
            "obs": obs,
            "action": mean + np.exp(log_std) * noise,
            "old_log_prob": log_prob + 0.1 * generator.standard_normal(log_prob.shape),
            "advantage": generator.standard_normal((BATCH, 1)),
            "returns": values + size * generator.standard_normal((BATCH, 1)),
        }
    )


class TensorState(NamedTuple):
    """The state of one trained tensor: its optimizer's settings, number of updates, and slots."""

    settings: Mapping[str, float]
    step: int
    slots: Mapping[str, np.ndarray]


def compare_states(a: Learner, b: Learner) -> tuple[str, ...]:
    """Return a sentence for every kind of state and network that differs, with its first tensor."""
    one, other = _list_states(a), _list_states(b)
    sentences: dict[tuple[str, str], str] = {}
    for name in one.keys() & other.keys():
        for kind, sentence in _differences(name, one[name], other[name]):
            sentences.setdefault((name.rpartition("/")[0].rpartition("/")[0], kind), sentence)
    return tuple(sentences[key] for key in sorted(sentences))


def _differences(name: str, one: TensorState, other: TensorState) -> Iterator[tuple[str, str]]:
    for setting in sorted(one.settings.keys() | other.settings.keys()):
        values = one.settings.get(setting, 0.0), other.settings.get(setting, 0.0)
        if not is_equal(*values):
            yield setting, f"{setting} of {name} is {values[0]:g} in A and {values[1]:g} in B"
    if one.step != other.step:
        yield "step", f"the number of updates of {name} is {one.step} in A and {other.step} in B"
    for slot in sorted(one.slots.keys() | other.slots.keys()):
        x, y = (side.slots.get(slot, np.zeros(1)) for side in (one, other))
        if x.any() != y.any():
            yield slot, f"only {'A' if x.any() else 'B'} contains {slot} of {name}"
        elif x.shape != y.shape or relative_distance(x, y) > STATE_BOUND:
            yield slot, f"{slot}, a moment of the optimizer, differs for {name}"


def _list_states(learner: Learner) -> dict[str, TensorState]:
    """Return the state of every trained tensor by name."""
    states: dict[str, TensorState] = {}
    for optimizer in learner.optimizers.values():
        names = [name for title in optimizer.titles for name in _tensor_names(learner, title)]
        step = optimizer.step if optimizer.family == "Adam" else 0
        for n, name in enumerate(names):
            settings = {
                **optimizer.settings,
                "l2": optimizer.l2[n],
                "amsgrad": float("vhat" in optimizer.slots),
            }
            slots = {slot: arrays[n] for slot, arrays in optimizer.slots.items() if arrays}
            states[name] = TensorState(settings, step, slots)
    return states


def _tensor_names(learner: Learner, title: str) -> Iterator[str]:
    """Yield the names of a network's trained arrays, in order."""
    if title not in learner.networks:
        yield title
        return
    layers = [node.layer for node in learner.networks[title].nodes if type(node.layer) in TRAINED]
    for number, layer in enumerate(layers):
        for name in TRAINED[type(layer)]:
            if getattr(layer, name) is not None:
                yield f"{title}/{number}/{name}"
