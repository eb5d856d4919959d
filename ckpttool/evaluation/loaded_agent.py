"""Restore an agent as an object that acts in the caller's own loop."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries, Sidecar
from ckpttool.core.text import render_record
from ckpttool.evaluation import restore
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import (
    ActionBounds,
    build_part_network,
    derive_network_settings,
    require_even_bounds,
    require_facts,
)
from ckpttool.evaluation.environments import import_gymnasium
from ckpttool.evaluation.gymnasium_engine import OBS, EnvSpec, encode_one_hot
from ckpttool.evaluation.playing import (
    assume_choices,
    choose_environment,
    policy_part,
    prepare_agent,
    read_sampling,
    require_backend,
    sampling_entries,
)
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.rollout import ActionSampler, NormalSampler, Sampler
from ckpttool.libraries import schema
from ckpttool.libraries.schema import VALUES, AgentNetwork, Choices
from ckpttool.networks.build import UNBOUNDED, NetworkSettings, own_draws, policy_network
from ckpttool.networks.network import NOISE, Backend, Dtype, Network, Observation, Policy, State

_NUMPY, _TORCH, _TENSORFLOW = "numpy", "torch", "tensorflow"


@dataclass(frozen=True, slots=True)
class _PolicySetup:
    """A policy's network with the agent's facts, settings and ledger, and the environment if it has one."""

    agent: restore.Agent
    network: Network
    settings: NetworkSettings
    ledger: LedgerEntries
    spec: EnvSpec | None


def load_agent(
    path: str,
    env: str | None = None,
    *,
    device: str = "cpu",
    backend: str | None = None,
    facts: AgentFacts | None = None,
    network: str = "actor",
    layout: str | None = None,
    dtype: Dtype = "float32",
) -> LoadedAgent:
    """Restore the agent at `path` as an object that acts: `agent.act(observations)`.

    Args:
        path: a checkpoint file, prefix or folder, as for `evaluate`.
        env: a Gymnasium id. It gives action bounds that no file contains, and its spaces are compared with
            the agent's. It is needed only if the bounds are unknown.
        device: "cpu", "cuda", "cuda:N" or "auto".
        backend: "numpy", "torch", "tensorflow" or another backend; None is numpy on the CPU, else torch.
        facts: facts that no file contains, e.g. the activations of a state_dict.
        network: the policy to act with, e.g. "actor_target".
        layout: the layout, if it is not to be recognised.
        dtype: the float type of the computation.

    Raise UsageError if a fact is missing, EnvironmentMismatchError if agent and environment do not match.

    >>> import ckpttool
    >>> agent = ckpttool.load_agent("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt")
    >>> agent.act([1.0, 0.0, 0.0]).shape
    (1,)
    """
    name = backend or (_NUMPY if device == "cpu" else _TORCH)
    how = Protocol(device=device, backend=name, network=network, dtype=dtype)
    require_backend(how)
    agent = restore.restore_agent(path, layout, facts or NO_FACTS, network)
    part = agent.part(agent.title(network))
    if part is not None and own_draws(agent.tree, part, schema.known_choices(agent.known)) is not None:
        how = replace(how, stochastic=True)
    bounded = agent.known.action_low is not None or agent.known.head in UNBOUNDED
    prepared = _in_environment(agent, env, how) if env is not None or not bounded else _alone(agent, how)
    return LoadedAgent(prepared, how)


def _in_environment(agent: restore.Agent, env: str | None, how: Protocol) -> _PolicySetup:
    """Return the policy as it is played in the environment that is given or recorded."""
    environment = choose_environment(agent, env, how)
    with environment.make(1) as vector:
        spec = vector.spec
    agent = assume_choices(agent, spec)
    entrant = prepare_agent(agent, environment, how, spec)
    return _PolicySetup(agent, entrant.network, entrant.settings, entrant.ledger, spec)


def _alone(agent: restore.Agent, how: Protocol) -> _PolicySetup:
    """Return the policy with the facts of its files alone."""
    agent = assume_choices(agent, None)
    require_facts(agent)
    part = policy_part(agent, how.network)
    settings, assumed = derive_network_settings(agent, ActionBounds((), (), None))
    if settings.choices is None and settings.action_low:
        require_even_bounds(agent, settings)
    front = agent.front(part.title)
    sampling = read_sampling(agent, part, settings, how)[0] if how.stochastic else settings
    network = policy_network(agent.tree, part, sampling, front)
    more = sidecar.assumption_entries("architecture", front.assumed) if front is not None else ()
    more = (*more, *sampling_entries(agent, how))
    ledger = sidecar.drop_known_bounds(sidecar.merge_entries(agent.ledger, assumed, more))
    return _PolicySetup(agent, network.cast(how.dtype), settings, ledger, None)


class LoadedAgent:
    """An agent on a device: its policy, its critics, and the facts that they are computed with.

    Observations are those of the environment, not normalised: the agent applies its own statistics. The
    object can be used from several threads, one call at a time. `close`, or leaving a `with` block, frees the
    memory of the device.
    """

    def __init__(self, prepared: _PolicySetup, how: Protocol) -> None:
        """Put the policy on the device; use `load_agent` to make one."""
        self._agent, self._how = prepared.agent, how
        self._settings, self._spec = prepared.settings, prepared.spec
        self._network = prepared.network
        self._part = policy_part(self._agent, how.network)
        self._backend = cast(Backend, plugins.find("backends", how.backend).load())
        self._policies: dict[str, Policy] = {}
        self._lock = threading.Lock()
        self._stream = ActionSampler.stream(0)
        inner = {NOISE, *(slot.name for slot in self._network.states)}
        self._shapes = {n: s for n, s in self._network.input_shapes.items() if n not in inner}
        discrete = prepared.agent.binding.facts.one_hot if self._spec is None else self._spec.one_hot
        # Wrappers and stacks of observations have other widths: those are given as rows.
        self._one_hot = {n: c for n, c in discrete.items() if self._shapes.get(n) == (sum(c.counts),)}
        self._open = True
        self.ledger = prepared.ledger
        self.device = self._policy("sample" if self._how.stochastic else "act").device

    def __repr__(self) -> str:
        """Return the file, the layout and the sizes in one line."""
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in self._shapes.items())
        return (
            f"<LoadedAgent {self.path} ({self._agent.binding.layout}): {shown} -> {self._action_title()}, "
            f"{self._how.backend} on {self.device}>"
        )

    _repr_html_ = render_record

    def document(self) -> dict[str, Any]:
        """Return the JSON object: the file, the sizes, the device and what was assumed."""
        return {
            "path": urls.display_url(self.path),
            "layout": self._agent.binding.layout,
            "observations": {name: list(shape) for name, shape in self._shapes.items()},
            "actions": self._action_title(),
            "backend": self._how.backend,
            "device": self.device,
            "assumed": list(self.assumed),
        }

    def __enter__(self) -> LoadedAgent:
        """Return the agent itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the memory."""
        self.close()

    def close(self) -> None:
        """Free the memory of the networks; the agent cannot act afterwards."""
        with self._lock:
            self._policies.clear()
            self._open = False

    @property
    def path(self) -> str:
        """The checkpoint's path."""
        return self._agent.checkpoint.path

    @property
    def facts(self) -> Sidecar:
        """All known facts; `provenance` has the origin of each: "read from ...", "given" or "assumed ..."."""
        return self._agent.known

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed because no file contains it, as sentences."""
        return sidecar.assumption_sentences(self.ledger)

    @property
    def choices(self) -> Choices | None:
        """The discrete actions; None for continuous ones."""
        return self._settings.choices

    @property
    def observation_space(self) -> Any:
        """The Gymnasium space of observations, unbounded where no bounds are known; needs gymnasium."""
        spaces = import_gymnasium().spaces
        types = {} if self._spec is None else {n: np.dtype(kind) for n, _, kind in self._spec.observation}
        boxes: dict[str, Any] = {}
        for name, shape in self._shapes.items():
            if name in self._one_hot:
                boxes[name] = _make_discrete_space(spaces, self._one_hot[name])
                continue
            dtype = types.get(name, np.dtype(np.float32))
            low, high = (np.broadcast_to(end, shape).astype(dtype) for end in self._observed(name, dtype))
            boxes[name] = spaces.Box(low, high, dtype=dtype.type)
        return boxes[OBS] if list(boxes) == [OBS] else spaces.Dict(boxes)

    def _observed(self, name: str, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """Return the bounds of an input: the environment's, those of the files, or those of its type."""
        if self._spec is not None and name in self._spec.observation_bounds:
            return self._spec.observation_bounds[name]
        ends = schema.observation_bounds(self._agent.known.observation_space).get(name, ())
        shape = self._shapes[name]
        size = int(np.prod(shape))
        if ends and {*map(len, ends)} <= {1, size}:
            low, high = (np.reshape(end, shape if len(end) == size else ()) for end in ends)
            return low, high
        if dtype.kind == "f":
            return -np.inf, np.inf
        return np.iinfo(dtype).min, np.iinfo(dtype).max

    @property
    def action_space(self) -> Any:
        """The Gymnasium space of actions; needs gymnasium."""
        spaces, choices = import_gymnasium().spaces, self.choices
        if choices is None:
            low, high = (np.asarray(b, np.float32) for b in self._bounds())
            return spaces.Box(low, high, dtype=np.float32)
        return _make_discrete_space(spaces, choices)

    def seed(self, seed: int) -> None:
        """Begin the random numbers of sampled actions, as `evaluate` does for the episode of that seed."""
        self._stream = ActionSampler.stream(seed)

    def act(
        self, observations: Observation | Any, *, deterministic: bool = True, epsilon: float | None = None
    ) -> Any:
        """Return the actions for observations, one or a batch, an array or a dict of arrays.

        Discrete observations are integers: one or [n], of a MultiDiscrete space [k] or [n, k]. A batch
        [n, ...] gives [n, actions] (Discrete: int64 [n]), one observation [...] gives [actions] (Discrete: an
        int64 number). NumPy arrays give NumPy arrays; PyTorch tensors give a tensor on their device, and on
        the agent's device the numbers are not copied to the host.

        `deterministic=False` draws actions as training did, by the policy's probabilities or its standard
        deviation; `epsilon` is the probability of a uniform one, for Q-networks; such actions are drawn on
        the host. The random numbers begin with `seed`, 0 at first. Raise UsageError for a policy with
        memory, whose state `predict` carries, and UnsupportedError for one that is not sampled, e.g. of TD3,
        or is always sampled (Tianshou's IQN, RLlib's noisy layers) without `deterministic=False`.
        """
        if self._network.states:
            raise UsageError("the policy has memory", hint="use predict, which takes and returns the state")
        if not deterministic or epsilon is not None:
            return self._sample(observations, epsilon)[0]
        if _is_tensor(observations):
            return self._act_on_tensor(observations)
        return self._as_actions(self._step("act", cast(Observation, observations))[0])

    def predict(
        self,
        observation: Observation,
        state: State | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,  # the signature of Stable-Baselines3
    ) -> tuple[np.ndarray, State | None]:
        """Return the actions and the next state, as Stable-Baselines3's `predict` does.

        stable_baselines3/common/policies.py, BasePolicy.predict: `episode_start` [n] marks the rows whose
        state is reset. `evaluate_policy` and loops that were written for that library accept the agent.
        `deterministic=False` is that of `act`.
        """
        carried = tuple(state or ())
        if carried and episode_start is not None:
            kept = ~np.asarray(episode_start, np.bool_).reshape(-1)
            carried = tuple(
                array * kept.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype) for array in carried
            )
        if not deterministic:
            actions, after = self._sample(observation, None, carried)
            return np.asarray(actions), after or None
        actions, after = self._step("act", observation, carried)
        return np.asarray(self._as_actions(actions)), after or None

    def distribution(self, observations: Observation) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation, [n, actions], of the normal numbers that actions are made of.

        They are those to which the noise is added: of Stable-Baselines3's SAC in front of tanh, of its PPO
        in front of the clipping to the bounds. Raise UnsupportedError for discrete actions (see `scores`)
        and for policies that are not sampled.
        """
        if self.choices is not None:
            raise UnsupportedError("discrete actions have probabilities, not a deviation", file=self.path)
        _, mean, deviation = np.split(self._step("distribution", observations)[0], 3, axis=-1)
        return mean, deviation

    def scores(self, observations: Observation) -> np.ndarray:
        """Return what discrete actions are chosen by, [n, values]: Q-values, or a policy's logits.

        Raise UsageError for continuous actions.
        """
        if self.choices is None:
            raise UsageError("the actions are continuous", hint="use q_values or value")
        return self._step("scores", observations)[0]

    def q_values(self, observations: Observation, actions: np.ndarray | None = None) -> np.ndarray:
        """Return the values of actions, [n, critics]; of a Q-network for discrete actions, those of all.

        `actions` are in the critics' own units: those of the environment, but -1 to 1 in agents of
        Stable-Baselines3. Raise UsageError if the file holds no critic.
        """
        if (
            actions is None
            and self.choices is not None
            and policy_part(self._agent, self._how.network).chooses
        ):
            return self.scores(observations)
        titles = [part.title for part in self._agent.binding.parts if part.component == "critic"]
        if not titles or actions is None:
            raise UsageError(
                "the file holds no critic" if not titles else "the values of actions need the actions",
                file=self.path,
            )
        observations = self._encoded(observations)
        single = self._is_single(observations)
        inputs = {OBS: np.asarray(observations), "action": np.asarray(actions)}
        if single:
            inputs = {name: array[None] for name, array in inputs.items()}
        values = [self._run(title, lambda critic: critic.step(inputs)[0]) for title in titles]
        joined = np.concatenate(values, axis=-1)
        return joined[0] if single else joined

    def value(self, observations: Observation) -> np.ndarray:
        """Return the state values [n]; raise UsageError if the file holds no value network."""
        title = next((p.title for p in self._agent.binding.parts if p.component == VALUES[0]), None)
        if title is None:
            raise UsageError("the file holds no state-value network", file=self.path)
        return self._step(title, observations)[0][..., 0]

    def networks(self, framework: str, *names: str) -> dict[str, Any]:
        """Return the agent's networks as modules of "torch" or "tensorflow" that can be trained, by name.

        Names are "actor", "critic_1", "q", "value", ..., and "actor_target", "critic_target_1", ...; without
        `names` all are returned. They are copies on the CPU whose trained weights are those of the file: a
        torch.nn.Module (networks.torch_programs.NetworkModule) or a keras.Model
        (networks.tensorflow_training.NetworkModel). "actor" returns what `act` does, or the logits of
        discrete actions; its `distribution` returns a Gaussian policy's mean and standard deviation. "q" and
        "value" return what `q_values` and `value` do; a critic takes observations and actions. A policy with
        memory takes its states after the observations and also returns the next ones.

        Raise MissingExtraError without the framework, UsageError for an unknown name, and UnsupportedError
        for a network of other layers.
        """
        if framework not in (_TORCH, _TENSORFLOW):
            raise UsageError(
                f"networks of {framework!r} cannot be trained", expected=f"{_TORCH} or {_TENSORFLOW}"
            )
        make = plugins.find("backends", framework).load().module
        titles = {_module_name(part): part for part in self._agent.binding.parts}
        unknown = [name for name in names if name not in titles]
        if unknown:
            known = ", ".join(titles)
            raise UsageError(f"no network named {unknown[0]!r}", file=self.path, expected=known)
        with self._lock:
            return {name: self._module(make, titles[name]) for name in names or titles}

    def _module(self, make: Callable[..., Any], part: AgentNetwork) -> Any:
        """Return one network as a module of a framework, made by the backend's function."""
        agent, settings, front = self._agent, self._settings, self._agent.front(part.title)
        if not part.acts:
            whole = agent.runnable(part.title)
            return make(build_part_network(agent, whole or part, settings).cast(self._how.dtype))
        if (front is not None and front.norms) or any(layer.kind == "batch_norm" for layer in part.layers):
            raise UnsupportedError(
                f"{part.title} has batch norms, whose training changes statistics: it cannot be trained here",
                file=self.path,
            )
        part = agent.playable(part.title) or part
        drawn = False
        if settings.choices is not None:
            settings = settings.scores
        else:
            with suppress(UnsupportedError):
                settings, _ = read_sampling(agent, part, settings, Protocol(stochastic=True))
                settings, drawn = replace(settings, output="distribution"), True
        return make(self._policy_network(part, settings), drawn=drawn)

    def _sample(self, observations: Any, epsilon: float | None, state: State = ()) -> tuple[Any, State]:
        """Return drawn actions and the next state.

        The rows of a batch take their random numbers in turn from one stream.
        """
        _, sampler = self._sampling if epsilon is None else self._read_sampling(Protocol(epsilon=epsilon))
        on_host = observations.detach().cpu().numpy() if _is_tensor(observations) else observations
        if isinstance(sampler, NormalSampler):
            outputs, after = self._step("sample", on_host, state, sampler)
            actions = self._as_actions(outputs)
        else:
            scores, after = self._step("scores", on_host, state)
            rows = np.atleast_2d(scores)
            if not np.isfinite(rows).all():
                raise CkpttoolError("the policy's scores are not finite", file=self.path)
            with self._lock:
                drawn = sampler.choose(rows, [self._stream] * len(rows))
            actions = self._as_actions(drawn[0] if scores.ndim == 1 else drawn)
        if not _is_tensor(observations):
            return actions, after
        from ckpttool.networks.torch_backend import as_tensor

        return as_tensor(np.asarray(actions)).to(observations.device), after

    @cached_property
    def _sampling(self) -> tuple[NetworkSettings, Sampler]:
        """The settings of the network whose actions are drawn, and how; the ledger notes the assumptions."""
        how = Protocol(stochastic=True)
        sampling = self._read_sampling(how)
        self.ledger = sidecar.merge_entries(self.ledger, sampling_entries(self._agent, how))
        return sampling

    def _read_sampling(self, how: Protocol) -> tuple[NetworkSettings, Sampler]:
        return read_sampling(self._agent, self._part, self._settings, how)

    def _policy(self, role: str) -> Policy:
        """Return a network on the device: "act", "scores", or the one of that title."""
        if role not in self._policies:
            self._policies[role] = self._backend.build(self._build(role), self._how.device)
        return self._policies[role]

    def _build(self, role: str) -> Network:
        if role == ("sample" if self._how.stochastic else "act"):
            return self._network
        if role == "act":  # of a policy whose actions are always drawn: refused
            return self._policy_network(self._part, replace(self._settings, output="action"))
        if role in ("scores", "sample", "distribution"):
            settings = self._settings.scores if role == "scores" else self._sampling[0]
            if role == "distribution":
                settings = replace(settings, output="distribution")
            return self._policy_network(self._part, settings)
        part = self._agent.runnable(role)
        if part is None:
            raise UsageError(f"the checkpoint has no network {role}", file=self.path)
        return build_part_network(self._agent, part, self._settings).cast(self._how.dtype)

    def _policy_network(self, part: AgentNetwork, settings: NetworkSettings) -> Network:
        """Return a policy's network, for observations in the environment's shapes if there is one."""
        shapes = None if self._spec is None else self._spec.shapes
        network = policy_network(self._agent.tree, part, settings, self._agent.front(part.title), shapes)
        return network.cast(self._how.dtype)

    def _step(
        self, role: str, observations: Observation, state: State = (), sampler: NormalSampler | None = None
    ) -> tuple[np.ndarray, State]:
        """Return a network's outputs, those of one observation without the batch, and the next state.

        A `sampler` draws the network's noise.
        """
        observations = self._arranged(self._encoded(observations))
        single = self._is_single(observations)
        inputs: Any = observations
        if single and isinstance(observations, Mapping):
            inputs = {name: np.asarray(value)[None] for name, value in observations.items()}
        elif single:
            inputs = np.asarray(observations)[None]

        def step(policy: Policy) -> tuple[np.ndarray, State]:
            if sampler is None:
                return policy.step(inputs, state)
            rows = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
            return policy.step(sampler.with_noise(inputs, [self._stream] * rows), state)

        outputs, after = self._run(role, step)
        return outputs[0] if single else outputs, after

    def _run(self, role: str, call: Callable[[Policy], Any]) -> Any:
        """Return what the call gives for a network, one call at a time; raise UsageError after `close`."""
        with self._lock:
            if not self._open:
                raise UsageError("the agent is closed", file=self.path)
            return call(self._policy(role))

    def _encoded(self, observations: Any) -> Any:
        """Return the observations with whole numbers of discrete inputs as one-hot rows."""
        if not self._one_hot:
            return observations
        if isinstance(observations, Mapping):
            return {name: self._encode(name, value) for name, value in observations.items()}
        return self._encode(next(iter(self._shapes)), observations)

    def _encode(self, name: str, values: Any) -> Any:
        choices, numbers = self._one_hot.get(name), np.asarray(values)
        return (
            values if choices is None or numbers.dtype.kind not in "iu" else encode_one_hot(numbers, choices)
        )

    def _arranged(self, observations: Any) -> Any:
        """Return the observations in the policy's shapes: images with channels first, a vector as one row.

        stable_baselines3/common/policies.py, `obs_to_tensor`, and torch_layers.py, FlattenExtractor.
        """
        if not isinstance(observations, Mapping):
            return _arrange(observations, next(iter(self._shapes.values())))
        return {
            name: _arrange(value, self._shapes[name]) if name in self._shapes else value
            for name, value in observations.items()
        }

    def _is_single(self, observations: Any) -> bool:
        """Return whether this is one observation; raise EnvironmentMismatchError for another rank."""
        name, shape = next(iter(self._shapes.items()))
        array = observations.get(name) if isinstance(observations, Mapping) else observations
        rank = -1 if array is None else int(array.ndim) if _is_tensor(array) else np.ndim(array)
        if rank not in (len(shape), len(shape) + 1):
            raise EnvironmentMismatchError(
                "the observations do not match the policy's",
                expected=f"{list(shape)} or [batch, {', '.join(map(str, shape))}]",
                found="nothing under that name"
                if array is None
                else str(list(array.shape if hasattr(array, "shape") else np.shape(array))),
            )
        return bool(rank == len(shape))

    def _as_actions(self, actions: Any) -> Any:
        """Return a network's output as the environment's actions: whole numbers for discrete ones."""
        if self.choices is None:
            return actions
        whole = actions.astype(np.int64) if isinstance(actions, np.ndarray) else actions.long()
        return whole[..., 0] if self.choices.single else whole

    def _act_on_tensor(self, observations: Any) -> Any:
        """Return the actions on the tensor's device, computed there if the agent is there."""
        from ckpttool.networks.torch_backend import as_tensor

        if self._one_hot:
            actions = np.asarray(self.act(observations.detach().cpu().numpy()))
            return as_tensor(actions).to(observations.device)
        observations = self._arranged(observations)
        single = self._is_single(observations)
        rows = observations[None] if single else observations

        def act(policy: Any) -> Any:
            if hasattr(policy, "act") and str(rows.device) == self.device and len(self._shapes) == 1:
                return policy.act(rows)
            return as_tensor(policy.step(rows.detach().cpu().numpy())[0]).to(rows.device)

        actions = self._run("act", act)
        return self._as_actions(actions[0] if single else actions)

    def _bounds(self) -> tuple[Any, Any]:
        if self._settings.action_low:
            return self._settings.action_low, self._settings.action_high
        width = self._network.width
        return np.full(width, -np.inf), np.full(width, np.inf)

    def _action_title(self) -> str:
        return self.choices.title if self.choices is not None else f"action [{self._network.width}]"


def _module_name(part: AgentNetwork) -> str:
    """Return the name of a network among modules: `critic_1`, `critic_target_1`, `q`, `actor`."""
    if part.chooses:
        return part.component.replace(schema.CRITICS[0], "q")
    return part.component if part.head is None else f"{part.component}_{part.head.removeprefix('q')}"


def _make_discrete_space(spaces: Any, choices: Choices) -> Any:
    """Return the Gymnasium space of discrete values."""
    if choices.scores == "bernoulli":
        return spaces.MultiBinary(len(choices.counts))
    if choices.single:
        return spaces.Discrete(choices.counts[0], start=choices.starts[0])
    return spaces.MultiDiscrete(choices.counts, start=choices.starts)


def _is_tensor(value: object) -> bool:
    """Return whether a value is a PyTorch tensor, without importing PyTorch."""
    return type(value).__module__.partition(".")[0] == _TORCH and hasattr(value, "detach")


def _arrange(value: Any, shape: tuple[int, ...]) -> Any:
    """Return one observation or a batch in the policy's shape, if it differs only in its axes."""
    value = value if _is_tensor(value) or isinstance(value, np.ndarray) else np.asarray(value)
    actual = tuple(value.shape)
    if actual[-len(shape) :] == shape:
        return value
    if len(shape) == 3 and len(actual) in (3, 4) and actual[-3:] == (*shape[1:], shape[0]):
        return value.movedim(-1, -3) if _is_tensor(value) else np.moveaxis(value, -1, -3)
    if len(shape) == 1 and len(actual) > 2 and math.prod(actual[1:]) == shape[0]:
        return value.reshape(actual[0], *shape)
    return value.reshape(shape) if len(shape) == 1 < len(actual) and math.prod(actual) == shape[0] else value
