"""Makes agents with the libraries that are installed, and records the actions that the libraries compute.

`python -m tests.agent_truth.agents FOLDER LIBRARY [NAME...]` writes for each agent, or for those of these
names, its files and `NAME.json`: what a person who trained it knows. A library that is not installed is left
out, and named in `absent.json`.
Faithful small modules stand for programs that are no libraries (CleanRL, Spinning Up, TD3's authors).
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

OBS, ACT = 5, 2
MODULES = {
    "stable_baselines3": "stable_baselines3",
    "sb3_contrib": "sb3_contrib",
    "zoo": "sb3_contrib",
    "tianshou": "tianshou.algorithm",
    "d3rlpy": "d3rlpy",
    "rsl_rl": "rsl_rl.models",
    "skrl": "skrl",
    "programs": "torch",
    "variants": "torch",
    "keras": "keras",
}
"""By library, what must be importable."""


class Agent(NamedTuple):
    """One agent: what writes it to a path without suffix, and what its trainer knows.

    `write` returns the file, and the actions for the observations (or the return of an episode).
    `known` are options of the command line that state the truth (activation, head). `open` is a word for what
    the file does not hold and no option states: whatever is wrong must be named with it.
    """

    name: str
    write: Callable[[Path, np.ndarray], tuple[str, Any]]
    low: float = -2.0
    high: float = 2.0
    known: Mapping[str, str] = {}
    env: str | None = None
    open: str = ""


def observations() -> np.ndarray:
    """Return what every agent sees: float32 [64, 5], some of it large."""
    return (2 * np.random.default_rng(0).normal(size=(64, OBS))).astype(np.float32)


def scrambled(module: Any) -> None:
    """Give a module weights with which every activation and every bound matters."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            wide = parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 4.0
            parameter.copy_(1.5 * torch.randn_like(parameter) / wide)


def _box_env(low: float, high: float, obs: int = OBS) -> Any:
    gymnasium = importlib.import_module("gymnasium")
    box = gymnasium.spaces.Box

    class Env(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = box(-np.inf, np.inf, (obs,), np.float32)
        action_space = box(np.full(ACT, low, np.float32), np.full(ACT, high, np.float32))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(obs, np.float32), {}

        def step(self, _: Any) -> Any:
            return np.zeros(obs, np.float32), 0.0, True, False, {}

    return Env()


def _sb3(package: str, kind: str, policy: str | Callable[[], Any] = "MlpPolicy", **more: Any) -> Any:
    low, high = more.pop("low", -2.0), more.pop("high", 2.0)

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        arguments = {name: value() if callable(value) else value for name, value in more.items()}
        named = policy if isinstance(policy, str) else policy()
        model = getattr(importlib.import_module(package), kind)(
            named, _box_env(low, high), device="cpu", seed=0, **arguments
        )
        scrambled(model.policy)
        model.save(f"{path}.zip")
        return f"{path}.zip", model.predict(obs, deterministic=True)[0]

    return write


def _kwargs(**more: str) -> Callable[[], dict[str, Any]]:
    """Return policy_kwargs whose values are names of torch.nn's classes or of the classes below."""

    def output() -> dict[str, Any]:
        nn = importlib.import_module("torch").nn
        return {key: getattr(nn, value, None) or _own(value) for key, value in more.items()}

    return output


def _own(name: str) -> Any:
    """Return a class that a program might define itself."""
    torch = importlib.import_module("torch")
    if name == "Sine":
        return type("Sine", (torch.nn.Module,), {"forward": lambda _, x: torch.sin(x)})
    layers = importlib.import_module("stable_baselines3.common.torch_layers")

    class Doubled(layers.BaseFeaturesExtractor):  # type: ignore[misc, name-defined]
        def __init__(self, space: Any) -> None:
            super().__init__(space, OBS)

        def forward(self, x: Any) -> Any:
            return 2 * torch.sin(x)

    return Doubled


def _negative_policy() -> Any:
    policies = importlib.import_module("stable_baselines3.common.policies")

    class Negative(policies.ActorCriticPolicy):  # type: ignore[misc, name-defined]
        def _predict(self, obs: Any, deterministic: bool = False) -> Any:
            return -super()._predict(obs, deterministic)

    return Negative


def stable_baselines3() -> Iterator[Agent]:
    """Yield agents of Stable-Baselines3."""
    s = "stable_baselines3"
    yield Agent("sb3_ppo", _sb3(s, "PPO"))
    yield Agent("sb3_ppo_relu", _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="ReLU")))
    yield Agent(
        "sb3_ppo_elu_asymmetric",
        _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="ELU"), low=-1, high=3),
        -1,
        3,
    )
    yield Agent("sb3_ppo_gsde", _sb3(s, "PPO", use_sde=True))
    yield Agent(
        "sb3_ppo_gsde_squashed", _sb3(s, "PPO", use_sde=True, policy_kwargs=lambda: {"squash_output": True})
    )
    yield Agent("sb3_ppo_no_layers", _sb3(s, "PPO", policy_kwargs=lambda: {"net_arch": []}))
    yield Agent(
        "sb3_ppo_arch", _sb3(s, "PPO", policy_kwargs=lambda: {"net_arch": {"pi": [8, 6, 4], "vf": [5]}})
    )
    yield Agent("sb3_ppo_own_policy", _sb3(s, "PPO", _negative_policy))
    yield Agent(
        "sb3_ppo_own_extractor", _sb3(s, "PPO", policy_kwargs=_kwargs(features_extractor_class="Doubled"))
    )
    yield Agent("sb3_ppo_own_activation", _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="Sine")))
    yield Agent("sb3_a2c_asymmetric", _sb3(s, "A2C", low=-1, high=3), -1, 3)
    yield Agent("sb3_sac", _sb3(s, "SAC", low=-1, high=3), -1, 3)
    yield Agent("sb3_sac_gsde", _sb3(s, "SAC", use_sde=True))
    yield Agent(
        "sb3_sac_gsde_no_clip", _sb3(s, "SAC", use_sde=True, policy_kwargs=lambda: {"clip_mean": 0.0})
    )
    yield Agent(
        "sb3_sac_own_extractor", _sb3(s, "SAC", policy_kwargs=_kwargs(features_extractor_class="Doubled"))
    )
    yield Agent("sb3_td3", _sb3(s, "TD3", low=-1, high=3), -1, 3)
    yield Agent("sb3_td3_gelu", _sb3(s, "TD3", policy_kwargs=_kwargs(activation_fn="GELU")))
    yield Agent("sb3_td3_leaky", _sb3(s, "TD3", policy_kwargs=_kwargs(activation_fn="LeakyReLU")))
    yield Agent("sb3_td3_own_activation", _sb3(s, "TD3", policy_kwargs=_kwargs(activation_fn="Sine")))
    yield Agent("sb3_ddpg", _sb3(s, "DDPG"))


def sb3_contrib() -> Iterator[Agent]:
    """Yield agents of Stable-Baselines3's contrib."""
    s = "sb3_contrib"
    yield Agent("contrib_ars", _sb3(s, "ARS"))
    yield Agent("contrib_ars_tanh", _sb3(s, "ARS", policy_kwargs=_kwargs(activation_fn="Tanh")))
    yield Agent("contrib_ars_linear", _sb3(s, "ARS", "LinearPolicy"))
    yield Agent(
        "contrib_ars_linear_bias", _sb3(s, "ARS", "LinearPolicy", policy_kwargs=lambda: {"with_bias": True})
    )
    yield Agent(
        "contrib_ars_linear_squashed",
        _sb3(s, "ARS", "LinearPolicy", policy_kwargs=lambda: {"squash_output": True}),
    )
    yield Agent("contrib_ars_not_squashed", _sb3(s, "ARS", policy_kwargs=lambda: {"squash_output": False}))
    yield Agent("contrib_trpo", _sb3(s, "TRPO"))
    yield Agent("contrib_tqc", _sb3(s, "TQC", low=-1, high=3), -1, 3)
    yield Agent("contrib_crossq", _sb3(s, "CrossQ"))
    yield Agent("contrib_crossq_tanh", _sb3(s, "CrossQ", policy_kwargs=_kwargs(activation_fn="Tanh")))


def _wrapped(config: str, wrap: Callable[[Any], Any], *, normalize: bool = False, stack: int = 1) -> Any:
    """Write a PPO agent for Pendulum as the RL zoo lays it out; the library's predict gives its return."""

    def write(path: Path, _: np.ndarray) -> tuple[str, Any]:
        gymnasium = importlib.import_module("gymnasium")
        sb3 = importlib.import_module("stable_baselines3")
        vec = importlib.import_module("stable_baselines3.common.vec_env")
        env = vec.DummyVecEnv([lambda: wrap(gymnasium.make("Pendulum-v1"))])
        beside = path / "Pendulum-v1"
        beside.mkdir(parents=True)
        if normalize:
            env = vec.VecNormalize(env)
            rng = np.random.default_rng(1)
            env.obs_rms.mean, env.obs_rms.var = (
                rng.normal(size=env.obs_rms.mean.shape),
                rng.uniform(0.5, 2, env.obs_rms.var.shape),
            )
            env.save(str(beside / "vecnormalize.pkl"))
            env.training = env.norm_reward = False
        if stack > 1:
            env = vec.VecFrameStack(env, stack)
        model = sb3.PPO("MlpPolicy", env, device="cpu", seed=0)
        scrambled(model.policy)
        model.save(str(path / "Pendulum-v1.zip"))
        (beside / "config.yml").write_text(f"policy: MlpPolicy\n{config}")
        (beside / "args.yml").write_text("env: Pendulum-v1\nenv_kwargs: null\n")
        env.seed(1000)
        obs, total, done = env.reset(), 0.0, False
        while not done:
            obs, reward, dones, _ = env.step(model.predict(obs, deterministic=True)[0])
            total, done = total + float(reward[0]), bool(dones[0])
        return str(path / "Pendulum-v1.zip"), total

    return write


def _wrapper(module: str, name: str, **arguments: Any) -> Callable[[Any], Any]:
    return lambda env: getattr(importlib.import_module(module), name)(env, **arguments)


def zoo() -> Iterator[Agent]:
    """Yield agents of the RL zoo: a policy, its settings, wrappers and statistics."""
    time, contrib = (
        "env_wrapper: sb3_contrib.common.wrappers.TimeFeatureWrapper\n",
        "sb3_contrib.common.wrappers",
    )
    timed = _wrapper(contrib, "TimeFeatureWrapper")
    pendulum = "Pendulum-v1"

    def plain(env: Any) -> Any:
        return env

    yield Agent("zoo_plain", _wrapped("", plain), env=pendulum)
    yield Agent("zoo_normalized", _wrapped("normalize: true\n", plain, normalize=True), env=pendulum)
    yield Agent("zoo_time_feature", _wrapped(time, timed), env=pendulum)
    yield Agent(
        "zoo_time_normalized", _wrapped(time + "normalize: true\n", timed, normalize=True), env=pendulum
    )
    yield Agent("zoo_frame_stack", _wrapped("frame_stack: 4\n", plain, stack=4), env=pendulum)
    yield Agent(
        "zoo_normalized_stack",
        _wrapped("frame_stack: 3\nnormalize: true\n", plain, normalize=True, stack=3),
        env=pendulum,
    )
    yield Agent(
        "zoo_all",
        _wrapped(time + "frame_stack: 2\nnormalize: true\n", timed, normalize=True, stack=2),
        env=pendulum,
    )
    rescaled = _wrapper(
        "gymnasium.wrappers", "RescaleAction", min_action=np.float32(-1), max_action=np.float32(1)
    )
    rescale = "env_wrapper:\n  - gymnasium.wrappers.RescaleAction: {min_action: -1, max_action: 1}\n"
    yield Agent("zoo_rescaled", _wrapped(rescale, rescaled), env=pendulum)
    own = "env_wrapper: my_project.wrappers.TimeFeatureWrapper\n"
    yield Agent("zoo_own_wrapper", _wrapped(own, timed), env=pendulum)
    yield Agent(
        "zoo_unnamed_time_feature", _wrapped("", timed), env=pendulum, known={"wrapper": "TimeFeatureWrapper"}
    )


def _tianshou(kind: str, activation: str = "ReLU", **args: Any) -> Any:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = importlib.import_module("torch")
        common = importlib.import_module("tianshou.utils.net.common")
        continuous = importlib.import_module("tianshou.utils.net.continuous")
        base = importlib.import_module("tianshou.algorithm.algorithm_base")
        spaces = importlib.import_module("gymnasium").spaces
        box = spaces.Box(np.full(ACT, -2, np.float32), np.full(ACT, 2, np.float32))
        net = common.Net(state_shape=(OBS,), hidden_sizes=[16, 8], activation=getattr(torch.nn, activation))
        built = {"max_action": 2.0} | args
        if kind == "deterministic":
            actor = continuous.ContinuousActorDeterministic(preprocess_net=net, action_shape=(ACT,), **built)
        else:
            actor = continuous.ContinuousActorProbabilistic(preprocess_net=net, action_shape=(ACT,), **args)
        inputs = OBS if kind == "ppo" else OBS + ACT
        q = common.Net(state_shape=(inputs,), hidden_sizes=[16, 8], activation=getattr(torch.nn, activation))
        critic = continuous.ContinuousCritic(preprocess_net=q)
        whole = torch.nn.Module()
        whole.policy = torch.nn.Module()
        whole.policy.actor = actor
        whole.critic = critic
        if kind != "ppo":
            whole.critic_old = torch.nn.Module()
            whole.critic_old.module = critic
        scrambled(whole)
        torch.save(whole.state_dict(), f"{path}.pth")
        with torch.no_grad():
            output = actor(obs)[0]
            raw = output[0] if isinstance(output, tuple) else output
            raw = torch.tanh(raw) if kind == "sac" else raw

        class Mapped(base.Policy):  # type: ignore[misc, name-defined]
            def forward(self, *_: Any, **__: Any) -> Any: ...

        mapping = Mapped(action_space=box, action_scaling=True, action_bound_method="clip")
        return f"{path}.pth", mapping.map_action(raw.numpy())

    return write


def tianshou() -> Iterator[Agent]:
    """Yield agents of Tianshou 2: those of its examples, and those of its high-level factory."""
    yield Agent("tianshou_td3_examples", _tianshou("deterministic"))
    yield Agent(
        "tianshou_td3_high_level", _tianshou("deterministic", max_action=1.0), known={"head": "affine"}
    )
    yield Agent("tianshou_td3_tanh", _tianshou("deterministic", "Tanh"), known={"activation": "tanh"})
    yield Agent("tianshou_ppo_examples", _tianshou("ppo", "Tanh", unbounded=True))
    yield Agent(
        "tianshou_ppo_high_level",
        _tianshou("ppo", unbounded=False),
        known={"activation": "relu", "head": "affine"},
    )
    yield Agent("tianshou_sac_examples", _tianshou("sac", unbounded=True, conditioned_sigma=True))
    yield Agent(
        "tianshou_sac_silu",
        _tianshou("sac", "SiLU", unbounded=True, conditioned_sigma=True),
        known={"activation": "silu"},
    )


def _d3rlpy(kind: str, suffix: str = ".d3", **inputs: Any) -> Any:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        d3 = importlib.import_module("d3rlpy")
        output = {key: value(d3) if callable(value) else value for key, value in inputs.items()}
        algo = getattr(d3.algos, f"{kind}Config")(**output).create(device="cpu:0")
        algo.create_impl((OBS,), ACT)
        for module in vars(algo.impl.modules).values():
            if hasattr(module, "parameters"):
                scrambled(module)
        if suffix == ".d3":
            algo.save(f"{path}.d3")
        else:
            path.mkdir()
            algo.save_model(str(path / "model_1.pt"))
            importlib.import_module("d3rlpy.base").save_config(
                algo, importlib.import_module("d3rlpy.logging").FileAdapter(str(path))
            ) if suffix == ".params" else None
        file = f"{path}.d3" if suffix == ".d3" else str(path / "model_1.pt")
        return file, algo.predict(obs)

    return write


def _encoder(**arguments: Any) -> Callable[[Any], Any]:
    return lambda d3: d3.models.VectorEncoderFactory(hidden_units=[16, 8], **arguments)


def d3rlpy() -> Iterator[Agent]:
    """Yield agents of d3rlpy 2."""
    yield Agent("d3rlpy_td3", _d3rlpy("TD3"), -1, 1)
    yield Agent("d3rlpy_sac", _d3rlpy("SAC"), -1, 1)
    yield Agent("d3rlpy_sac_tanh", _d3rlpy("SAC", actor_encoder_factory=_encoder(activation="tanh")), -1, 1)
    yield Agent(
        "d3rlpy_td3_swish_norm",
        _d3rlpy("TD3", actor_encoder_factory=_encoder(activation="swish", use_layer_norm=True)),
        -1,
        1,
    )
    yield Agent("d3rlpy_cql", _d3rlpy("CQL"), -1, 1)
    scaled = {
        "observation_scaler": lambda d3: d3.preprocessing.StandardObservationScaler(
            mean=np.linspace(-1, 1, OBS), std=np.linspace(0.5, 2, OBS)
        )
    }
    yield Agent("d3rlpy_td3_scaled", _d3rlpy("TD3", **scaled), -1, 1)
    mapped = {
        "action_scaler": lambda d3: d3.preprocessing.MinMaxActionScaler(
            minimum=np.array([-2.0, -1.0]), maximum=np.array([2.0, 3.0])
        )
    }
    yield Agent("d3rlpy_iql_action_scaler", _d3rlpy("IQL", **mapped), -2, 3)
    yield Agent("d3rlpy_bare_weights", _d3rlpy("TD3", ".pt"), -1, 1)


def _rsl_rl(activation: str = "elu", *, norm: bool = False) -> Any:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = importlib.import_module("torch")
        tensors = importlib.import_module("tensordict")
        model = importlib.import_module("rsl_rl.models").MLPModel
        observed = tensors.TensorDict({"policy": torch.from_numpy(obs)}, batch_size=[len(obs)])
        groups = {"actor": ["policy"], "critic": ["policy"]}
        common = {"hidden_dims": [16, 8], "activation": activation, "obs_normalization": norm}
        spread = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
        actor = model(observed, groups, "actor", ACT, distribution_cfg=spread, **common)
        critic = model(observed, groups, "critic", 1, **common)
        for network in (actor, critic):
            scrambled(network)
            if norm:
                network.obs_normalizer.update(torch.from_numpy(obs) * 3 + 1)
                network.eval()
        saved = {
            "actor_state_dict": actor.state_dict(),
            "critic_state_dict": critic.state_dict(),
            "iter": 3,
            "infos": None,
        }
        torch.save(saved, f"{path}.pt")
        with torch.no_grad():
            return f"{path}.pt", actor(observed).numpy()

    return write


def rsl_rl() -> Iterator[Agent]:
    """Yield agents of rsl_rl 5."""
    yield Agent("rsl_rl", _rsl_rl(), -100, 100)
    yield Agent("rsl_rl_normalized", _rsl_rl(norm=True), -100, 100)
    yield Agent("rsl_rl_tanh", _rsl_rl("tanh"), -100, 100, {"activation": "tanh"})
    yield Agent("rsl_rl_relu_normalized", _rsl_rl("relu", norm=True), -100, 100, {"activation": "relu"})


def _skrl(activation: str, head: str, *, norm: bool = False) -> Any:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = importlib.import_module("torch")
        nn = torch.nn
        kind = getattr(nn, activation)
        policy = nn.Module()
        policy.net = nn.Sequential(nn.Linear(OBS, 16), kind(), nn.Linear(16, 8), kind(), nn.Linear(8, ACT))
        policy.log_std_parameter = nn.Parameter(torch.zeros(ACT))
        value = nn.Module()
        value.net = nn.Sequential(nn.Linear(OBS, 16), kind(), nn.Linear(16, 1))
        scrambled(policy)
        saved = {"policy": policy.state_dict(), "value": value.state_dict()}
        observed = torch.from_numpy(obs)
        if norm:
            scalers = importlib.import_module("skrl.resources.preprocessors.torch")
            scaler = scalers.RunningStandardScaler(size=OBS, device="cpu")
            scaler(observed * 3 + 1, train=True)
            saved["state_preprocessor"] = scaler.state_dict()
            observed = scaler(observed)
        torch.save(saved, f"{path}.pt")
        with torch.no_grad():
            mean = policy.net(observed)
        return f"{path}.pt", (2 * torch.tanh(mean) if head == "tanh" else mean).numpy()

    return write


def skrl() -> Iterator[Agent]:
    """Yield agents of skrl 2, whose models are the user's own."""
    yield Agent("skrl_ppo_elu", _skrl("ELU", "identity"), known={"activation": "elu", "head": "identity"})
    yield Agent(
        "skrl_ppo_elu_normalized",
        _skrl("ELU", "identity", norm=True),
        known={"activation": "elu", "head": "identity"},
    )
    yield Agent("skrl_ppo_relu_tanh", _skrl("ReLU", "tanh"), known={"activation": "relu", "head": "tanh"})


def chain(names: Sequence[str], sizes: Sequence[int], activation: str) -> Any:
    """Return a module with dense layers of these names, and what they compute without the last function."""
    torch = importlib.import_module("torch")
    module = torch.nn.Module()
    for name, one, other in zip(names, sizes, sizes[1:], strict=False):
        setattr(module, name, torch.nn.Linear(one, other))
    function = getattr(torch, activation, None) or getattr(torch.nn.functional, activation)

    def run(x: Any) -> Any:
        for name in names[:-1]:
            x = function(getattr(module, name)(x))
        return getattr(module, names[-1])(x)

    return module, run


def _program(kind: str, activation: str = "relu") -> Any:
    """Write the file of a program that is no library; see the layouts' sources for each."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = importlib.import_module("torch")
        sizes, wide = (OBS, 16, 8, ACT), (OBS + ACT, 16, 8, 1)
        observed, nn = torch.from_numpy(obs), torch.nn
        if kind in ("fujimoto", "fujimoto_folder"):
            module, run = chain(("l1", "l2", "l3"), sizes, activation)
            scrambled(module)
            torch.save(module.state_dict(), f"{path}_actor")
            critic, _ = chain(("l1", "l2", "l3"), wide, "relu")
            torch.save(critic.state_dict(), f"{path}_critic")
            output = 2 * torch.tanh(run(observed))
            return f"{path}_actor", output.detach().numpy()
        if kind in ("cleanrl_td3", "cleanrl_sac"):
            last = "fc_mu" if kind == "cleanrl_td3" else "fc_mean"
            module, run = chain(("fc1", "fc2", last), sizes, activation)
            if kind == "cleanrl_sac":
                module.fc_logstd = nn.Linear(8, ACT)
            scrambled(module)
            module.register_buffer("action_scale", torch.full((1, ACT), 2.0))
            module.register_buffer("action_bias", torch.full((1, ACT), 1.0))
            critic, _ = chain(("fc1", "fc2", "fc3"), wide, "relu")
            torch.save(
                (module.state_dict(), critic.state_dict(), critic.state_dict()), f"{path}.cleanrl_model"
            )
            return f"{path}.cleanrl_model", (torch.tanh(run(observed)) * 2 + 1).detach().numpy()
        if kind == "cleanrl_ppo":
            whole = nn.Module()
            whole.actor_mean = nn.Sequential(
                nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, ACT)
            )
            whole.critic = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 1))
            whole.actor_logstd = nn.Parameter(torch.zeros(1, ACT))
            scrambled(whole)
            torch.save(whole.state_dict(), f"{path}.cleanrl_model")
            return f"{path}.cleanrl_model", whole.actor_mean(observed).clamp(-2, 2).detach().numpy()
        if kind == "spinningup_ddpg":
            whole = nn.Module()
            whole.pi, whole.q = nn.Module(), nn.Module()
            whole.pi.pi = nn.Sequential(
                nn.Linear(OBS, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, ACT), nn.Tanh()
            )
            whole.q.q = nn.Sequential(nn.Linear(OBS + ACT, 16), nn.ReLU(), nn.Linear(16, 1), nn.Identity())
            scrambled(whole)
            torch.save(whole.state_dict(), f"{path}.pt")
            return f"{path}.pt", (2 * whole.pi.pi(observed)).detach().numpy()
        whole = nn.Module()  # spinningup_ppo
        whole.pi, whole.v = nn.Module(), nn.Module()
        whole.pi.log_std = nn.Parameter(torch.zeros(ACT))
        whole.pi.mu_net = nn.Sequential(
            nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, ACT), nn.Identity()
        )
        whole.v.v_net = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 1), nn.Identity())
        scrambled(whole)
        torch.save(whole.state_dict(), f"{path}.pt")
        return f"{path}.pt", whole.pi.mu_net(observed).detach().numpy()

    return write


def programs() -> Iterator[Agent]:
    """Yield agents of programs that are no libraries."""
    yield Agent("fujimoto_td3", _program("fujimoto"))
    yield Agent("fujimoto_tanh_layers", _program("fujimoto", "tanh"), known={"activation": "tanh"})
    yield Agent("cleanrl_td3", _program("cleanrl_td3"), -1, 3)
    yield Agent("cleanrl_sac", _program("cleanrl_sac"), -1, 3)
    yield Agent("cleanrl_ppo", _program("cleanrl_ppo"))
    yield Agent("spinningup_ddpg", _program("spinningup_ddpg"))
    yield Agent("spinningup_ppo", _program("spinningup_ppo"), -100, 100)


def generators() -> dict[str, tuple[str, Callable[[], Iterator[Agent]]]]:
    """Return by library what must be importable, and what yields its agents."""
    from tests.agent_truth import libraries, tf_actors, variants

    own: dict[str, Callable[[], Iterator[Agent]]] = {
        "stable_baselines3": stable_baselines3,
        "sb3_contrib": sb3_contrib,
        "zoo": zoo,
        "tianshou": tianshou,
        "d3rlpy": d3rlpy,
        "rsl_rl": rsl_rl,
        "skrl": skrl,
        "programs": programs,
        "variants": variants.variants,
        "keras": tf_actors.keras_actors,
    }
    by_library = {name: (MODULES[name], generator) for name, generator in own.items()}
    return by_library | {name: (libraries.MODULES[name], item) for name, item in libraries.LIBRARIES.items()}


def available(library: str) -> bool:
    """Return whether the library can be imported."""
    try:
        importlib.import_module(generators()[library][0])
    except ImportError:
        return False
    return True


def write(folder: Path, library: str, names: Sequence[str] = ()) -> None:
    """Write the library's agents, or those of these names, into the folder, and `absent.json`."""
    obs = observations()
    np.save(folder / "obs.npy", obs)
    absent = [] if available(library) else [library]
    (folder / "absent.json").write_text(json.dumps(absent))
    for agent in generators()[library][1]() if not absent else ():
        if names and agent.name not in names:
            continue
        file, truth = agent.write(folder / agent.name, obs)
        if agent.env is None:
            np.save(folder / f"{agent.name}.npy", np.asarray(truth, np.float32))
        document = {"library": library, "file": file, "low": agent.low, "high": agent.high}
        document |= {"known": list(agent.known.items()), "env": agent.env, "open": agent.open}
        document |= {"return": truth if agent.env is not None else None}
        (folder / f"{agent.name}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
