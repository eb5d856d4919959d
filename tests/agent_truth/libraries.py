"""Agents that more RL libraries build with their own classes, and act with by their own code.

RLlib's modules and policies with their connectors and filters, rl_games' network builder, ElegantRL's actors,
PFRL's and TorchRL's modules, rsl_rl's and skrl's model classes, d3rlpy's encoders and scalers, Tianshou's
algorithms, and Stable-Baselines3's settings that agents.py leaves out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.agent_truth.agents import ACT, OBS, Agent, _box_env, _encoder, _kwargs, _sb3, scrambled

MODULES = {
    "rllib": "ray.rllib.algorithms.ppo",
    "rllib_policies": "ray.rllib.algorithms.ppo",
    "rl_games": "rl_games.algos_torch.models",
    "elegantrl": "elegantrl.agents",
    "pfrl": "pfrl",
    "torchrl": "torchrl.modules",
    "rsl_rl_models": "rsl_rl.models",
    "skrl_models": "skrl.utils.model_instantiators.torch",
    "d3rlpy_more": "d3rlpy",
    "tianshou_more": "tianshou.algorithm",
    "sb3_more": "stable_baselines3",
    "contrib_more": "sb3_contrib",
}
"""By name of the agents' generator, what must be importable."""

Write = Callable[[Path, np.ndarray], tuple[str, Any]]
_STATISTICS = np.random.default_rng(7)
MEAN = _STATISTICS.normal(size=OBS)
VAR = _STATISTICS.uniform(0.3, 3, OBS)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _torch() -> Any:
    return _module("torch")


def _boxes(low: float, high: float) -> tuple[Any, Any]:
    box = _module("gymnasium").spaces.Box
    observed = box(-np.inf, np.inf, (OBS,), np.float32)
    return observed, box(np.full(ACT, low, np.float32), np.full(ACT, high, np.float32))


# --- RLlib ----------------------------------------------------------------------------------------------


def _rl_module(kind: str, *, normed: float | None = None, alone: bool = False, **model: Any) -> Write:
    """Write an RLModule: in its own folder, or in an algorithm's with the connectors."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = _torch()
        columns = _module("ray.rllib.core.columns").Columns
        spec = _module("ray.rllib.core.rl_module.rl_module").RLModuleSpec
        library = f"ray.rllib.algorithms.{kind}"
        upper = kind.upper()
        class_ = getattr(
            _module(f"{library}.torch.default_{kind}_torch_rl_module"), f"Default{upper}TorchRLModule"
        )
        catalog = getattr(_module(f"{library}.{kind}_catalog"), f"{upper}Catalog")
        config = _module("ray.rllib.core.rl_module.default_model_config").DefaultModelConfig
        output = vars(config(**{"fcnet_hiddens": [16, 8], **model}))
        output |= {"twin_q": True} if kind == "sac" else {}
        observed, acts = _boxes(-1, 3)
        module = spec(
            module_class=class_,
            observation_space=observed,
            action_space=acts,
            model_config=output,
            catalog_class=catalog,
        ).build()
        scrambled(module)
        folder, x = path, obs
        if not alone:
            folder = path / "learner_group" / "learner" / "rl_module" / "default_policy"
        module.save_to_path(str(folder.absolute()))
        if not alone:
            (path / "rllib_checkpoint.json").write_text('{"checkpoint_version": "2.1"}')
        if normed is not None:
            filters = _module("ray.rllib.connectors.env_to_module.mean_std_filter")
            connector = filters.MeanStdFilter(clip_by_value=normed or None)
            connector.input_observation_space, connector.input_action_space = observed, acts
            episode = _module("ray.rllib.env.single_agent_episode").SingleAgentEpisode
            rows = [MEAN + np.sqrt(VAR) * row for row in np.random.default_rng(3).normal(size=(50, OBS))]

            def through(array: np.ndarray, *, learns: bool) -> np.ndarray:
                one = episode(
                    observations=[array.astype(np.float32)], observation_space=observed, action_space=acts
                )
                connector._update_stats = learns
                connector(rl_module=module, batch={}, episodes=[one], explore=False, shared_data={})
                return np.asarray(one.get_observations(-1), np.float32)

            for row in rows:
                through(row, learns=True)
            position = path / "env_runner" / "env_to_module_connector" / "000_MeanStdFilter"
            connector.save_to_path(str(position.absolute()))
            x = np.stack([through(row, learns=False) for row in obs])
        with torch.no_grad():
            inputs = module.forward_inference({columns.OBS: torch.from_numpy(x)})[columns.ACTION_DIST_INPUTS]
            kind_ = module.get_inference_action_dist_cls()
            action = kind_.from_logits(inputs).to_deterministic().sample().numpy()
        return str(path), _module("ray.rllib.utils.spaces.space_utils").unsquash_action(action, acts)

    return write


def rllib() -> Iterator[Agent]:
    """Yield agents of RLlib's new API stack."""
    for name, write in {
        "ppo_default": _rl_module("ppo"),
        "ppo_separate": _rl_module("ppo", vf_share_layers=False),
        "ppo_relu": _rl_module("ppo", fcnet_activation="relu"),
        "ppo_swish": _rl_module("ppo", fcnet_activation="swish", vf_share_layers=False),
        "ppo_linear": _rl_module("ppo", fcnet_activation="linear"),
        "ppo_free_log_std": _rl_module("ppo", free_log_std=True),
        "ppo_free_separate": _rl_module("ppo", free_log_std=True, vf_share_layers=False),
        "ppo_head": _rl_module("ppo", head_fcnet_hiddens=[6], head_fcnet_activation="tanh"),
        "ppo_layer_norm": _rl_module("ppo", fcnet_use_layernorm=True),
        "ppo_head_layer_norm": _rl_module("ppo", head_fcnet_hiddens=[6], head_fcnet_use_layernorm=True),
        "ppo_filter": _rl_module("ppo", normed=10.0),
        "ppo_filter_small_clip": _rl_module("ppo", normed=1.0, fcnet_activation="relu"),
        "ppo_module_alone": _rl_module("ppo", alone=True, fcnet_activation="relu"),
        "sac_default": _rl_module("sac"),
        "sac_relu": _rl_module("sac", fcnet_activation="relu"),
        "sac_head": _rl_module("sac", head_fcnet_hiddens=[6], head_fcnet_activation="swish"),
        "sac_filter": _rl_module("sac", normed=10.0, fcnet_activation="relu"),
        "sac_module_alone": _rl_module("sac", alone=True, head_fcnet_hiddens=[6]),
        "sac_layer_norm": _rl_module("sac", fcnet_use_layernorm=True),
    }.items():
        # What the library plays of SAC without noise has no tanh.
        known = {"head": "clip_affine"} if name.startswith("sac") else {}
        yield Agent(f"rllib_{name}", write, -1, 3, known)


def _rl_policy(kind: str, *, normed: bool = False, **config: Any) -> Write:
    """Write a policy of the old API stack by its own export."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        library = _module(f"ray.rllib.algorithms.{kind}")
        built = getattr(library, f"{kind.upper()}Config")()
        built = built.api_stack(
            enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
        ).framework("torch")
        built = built.training(**config).environment("Pendulum-v1")
        space, acts = _boxes(-1, 3)
        settings = built.to_dict() | {"num_gpus": 0, "__policy_id": "default_policy"}
        class_ = (
            _module("ray.rllib.algorithms.ppo.ppo_torch_policy").PPOTorchPolicy
            if kind == "ppo"
            else _module("ray.rllib.algorithms.sac.sac_torch_policy").SACTorchPolicy
        )
        policy = class_(space, acts, settings)
        scrambled(policy.model)
        policy.export_checkpoint(str(path.absolute()))
        actions, _, _ = policy.compute_actions(obs, explore=False)
        return str(path), _module("ray.rllib.utils.spaces.space_utils").unsquash_action(
            np.asarray(actions), acts
        )

    return write


def rllib_policies() -> Iterator[Agent]:
    """Yield policies of RLlib's old API stack."""
    small = {"fcnet_hiddens": [16, 8]}
    for name, write in {
        "ppo": _rl_policy("ppo", model=small),
        "ppo_relu": _rl_policy("ppo", model=small | {"fcnet_activation": "relu"}),
        "ppo_shared": _rl_policy("ppo", model=small | {"vf_share_layers": True}),
        "ppo_free_log_std": _rl_policy("ppo", model=small | {"free_log_std": True}),
        "ppo_post": _rl_policy("ppo", model=small | {"post_fcnet_hiddens": [6]}),
        "sac": _rl_policy("sac", policy_model_config=small),
        "sac_tanh": _rl_policy("sac", policy_model_config=small | {"fcnet_activation": "tanh"}),
        "sac_post": _rl_policy(
            "sac", policy_model_config=small | {"post_fcnet_hiddens": [6], "post_fcnet_activation": "tanh"}
        ),
    }.items():
        yield Agent(f"rllib_policy_{name}", write, -1, 3)


# --- rl_games -------------------------------------------------------------------------------------------


def _rl_games(*, normed: bool = False, sac: bool = False, config: bool = False, **arguments: Any) -> Write:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch, yaml = _torch(), _module("yaml")
        builders = _module("rl_games.algos_torch.network_builder")
        models = _module("rl_games.algos_torch.models")
        observed = torch.from_numpy(obs)
        mlp = {
            "units": [16, 8],
            "activation": arguments.get("activation", "elu"),
            "initializer": {"name": "default"},
            "d2rl": arguments.get("d2rl", False),
        }
        if sac:
            continuous: dict[str, Any] = {}
        else:
            continuous = {
                "continuous": {
                    "mu_activation": arguments.get("mu_activation", "None"),
                    "sigma_activation": "None",
                    "mu_init": {"name": "default"},
                    "sigma_init": {"name": "const_initializer", "val": 0},
                    "fixed_sigma": arguments.get("fixed_sigma", True),
                }
            }
        network = {
            "name": "actor_critic",
            "separate": arguments.get("separate", False),
            "space": continuous,
            "mlp": mlp,
        }
        if arguments.get("normalization"):
            network["normalization"] = arguments["normalization"]
        builder = builders.A2CBuilder()
        builder.load(network)
        model = models.ModelA2CContinuousLogStd(builder).build(
            {
                "actions_num": ACT,
                "input_shape": (OBS,),
                "num_seqs": 1,
                "value_size": 1,
                "normalize_value": normed,
                "normalize_input": normed,
            }
        )
        scrambled(model)
        if normed:
            model.running_mean_std.running_mean.copy_(torch.from_numpy(MEAN))
            model.running_mean_std.running_var.copy_(torch.from_numpy(VAR))
        model.eval()
        path.mkdir()
        (path / "nn").mkdir()
        file = path / "nn" / "agent.pth"
        saved = {
            "model": model.state_dict(),
            "epoch": 3,
            "frame": 300,
            "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
            "last_mean_rewards": 1.0,
            "env_state": None,
        }
        torch.save(saved, file)
        if config:
            document = {
                "params": {
                    "algo": {"name": "a2c_continuous"},
                    "model": {"name": "continuous_a2c_logstd"},
                    "network": network,
                    "config": {"clip_actions": True, "normalize_input": normed},
                }
            }
            (path / "config.yaml").write_text(yaml.safe_dump(document))
        with torch.no_grad():
            mu = model(
                {
                    "is_train": False,
                    "prev_actions": None,
                    "obs": observed,
                    "rnn_states": None,
                }
            )["mus"]
        # common/player.py and algos_torch/players.py: limited to [-1, 1], then to the bounds.
        torch_ext = _module("rl_games.algos_torch.players")
        low, high = torch.full((ACT,), -1.0), torch.full((ACT,), 3.0)
        return str(file), torch_ext.rescale_actions(low, high, torch.clamp(mu, -1.0, 1.0)).numpy()

    return write


def rl_games() -> Iterator[Agent]:
    """Yield agents of rl_games' A2C builder."""
    known = {"activation": "elu", "head": "clip_affine"}
    for name, write, more in (
        ("plain", _rl_games(), {}),
        ("config", _rl_games(config=True), {}),
        ("normalized", _rl_games(normed=True), {}),
        ("normalized_config", _rl_games(normed=True, config=True), {}),
        ("relu", _rl_games(activation="relu", normed=True), {"activation": "relu"}),
        ("relu_config", _rl_games(activation="relu", normed=True, config=True), {"activation": "relu"}),
        ("separate", _rl_games(separate=True, normed=True), {}),
        ("learned_sigma", _rl_games(fixed_sigma=False, normed=True), {}),
        ("layer_norm", _rl_games(normalization="layer_norm"), {}),
        ("mu_tanh", _rl_games(mu_activation="tanh", config=True), {"head": "affine"}),
        ("d2rl", _rl_games(d2rl=True), {}),
    ):
        yield Agent(f"rl_games_{name}", write, -1, 3, known | more)


# --- ElegantRL ------------------------------------------------------------------------------------------


def _elegantrl(
    kind: str, *, state: bool = False, normed: bool = True, activation: str | None = None
) -> Write:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = _torch()
        nets = _module("elegantrl.agents.net")
        actor = getattr(nets, kind)(dims=[16, 8], state_dim=OBS, action_dim=ACT)
        if activation is not None:
            own = getattr(torch.nn, activation)
            name = "net_s" if hasattr(actor, "net_s") else "net"
            net = getattr(actor, name)
            for number, layer in enumerate(net):
                if isinstance(layer, torch.nn.ReLU):
                    net[number] = own()
        torch.manual_seed(0)
        scrambled(actor)
        actor.state_avg.data[:] = torch.from_numpy(MEAN) if normed else 0
        actor.state_std.data[:] = torch.from_numpy(np.sqrt(VAR)) if normed else 1
        path.mkdir()
        file = path / "act.pth"
        torch.save(actor.state_dict() if state else actor, file)
        with torch.no_grad():
            return str(file), 1 + 2 * actor(torch.from_numpy(obs)).numpy()

    return write


def elegantrl() -> Iterator[Agent]:
    """Yield ElegantRL's actors, whole and as state_dicts."""
    for name, write, known in (
        ("td3", _elegantrl("Actor"), {}),
        ("sac", _elegantrl("ActorSAC"), {}),
        ("fix_sac", _elegantrl("ActorFixSAC"), {}),
        ("ppo", _elegantrl("ActorPPO"), {}),
        ("td3_state", _elegantrl("Actor", state=True), {}),
        ("sac_state", _elegantrl("ActorSAC", state=True), {}),
        ("ppo_state_plain", _elegantrl("ActorPPO", state=True, normed=False), {}),
        ("td3_gelu", _elegantrl("Actor", activation="GELU"), {}),
        ("sac_tanh", _elegantrl("ActorSAC", activation="Tanh"), {}),
        ("ppo_hardswish", _elegantrl("ActorPPO", activation="Hardswish"), {}),
        ("td3_tanh_state", _elegantrl("Actor", activation="Tanh", state=True), {"activation": "tanh"}),
    ):
        yield Agent(f"elegantrl_{name}", write, -1, 3, known)


# --- PFRL -----------------------------------------------------------------------------------------------


def _pfrl(kind: str, activation: str = "ReLU", *, normed: bool = False) -> Write:
    """Write the folder that an agent of PFRL saves: model.pt or policy.pt, and obs_normalizer.pt."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch, pfrl = _torch(), _module("pfrl")
        nn, policies = torch.nn, _module("pfrl.policies")
        function = getattr(nn, activation)
        path.mkdir()
        x = torch.from_numpy(obs)
        if kind == "ppo":
            policy = nn.Sequential(
                nn.Linear(OBS, 16),
                function(),
                nn.Linear(16, 8),
                function(),
                nn.Linear(8, ACT),
                policies.GaussianHeadWithStateIndependentCovariance(
                    action_size=ACT,
                    var_type="diagonal",
                    var_func=lambda x: torch.exp(2 * x),
                    var_param_init=0,
                ),
            )
            value = nn.Sequential(nn.Linear(OBS, 16), function(), nn.Linear(16, 1))
            model = pfrl.nn.Branched(policy, value)
            scrambled(model)
            torch.save(model.state_dict(), path / "model.pt")
            observed = x
            if normed:
                normalizer = pfrl.nn.EmpiricalNormalization(OBS, clip_threshold=5)
                normalizer.experience(torch.from_numpy((MEAN + np.sqrt(VAR) * obs).astype(np.float32)))
                torch.save(normalizer.state_dict(), path / "obs_normalizer.pt")
                observed = normalizer(x, update=False)
            with torch.no_grad():
                return str(path / "model.pt"), policy(observed).mean.numpy()
        policy = nn.Sequential(
            nn.Linear(OBS, 16),
            function(),
            nn.Linear(16, 8),
            function(),
            nn.Linear(8, ACT),
            pfrl.nn.BoundByTanh(low=np.full(ACT, -1, np.float32), high=np.full(ACT, 3, np.float32)),
            policies.DeterministicHead(),
        )
        scrambled(policy)
        torch.save(policy.state_dict(), path / "policy.pt")
        q = nn.Sequential(nn.Linear(OBS + ACT, 16), nn.ReLU(), nn.Linear(16, 1))
        torch.save(q.state_dict(), path / "q_func1.pt")
        with torch.no_grad():
            return str(path / "policy.pt"), policy(x).mean.numpy()

    return write


def pfrl() -> Iterator[Agent]:
    """Yield agents of PFRL."""
    linear, tanh = {"head": "identity"}, {"head": "affine"}
    yield Agent("pfrl_ppo", _pfrl("ppo", "Tanh"), -1, 3, {"activation": "tanh"} | linear)
    yield Agent(
        "pfrl_ppo_normalized", _pfrl("ppo", "Tanh", normed=True), -1, 3, {"activation": "tanh"} | linear
    )
    yield Agent("pfrl_td3", _pfrl("td3"), -1, 3, {"activation": "relu"} | tanh)


# --- TorchRL --------------------------------------------------------------------------------------------


def _torchrl(activation: str, *, tanh: bool, form: str = "actor", normed: bool = False) -> Write:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = _torch()
        modules, tensors = _module("torchrl.modules"), _module("tensordict.nn")
        network = modules.MLP(
            in_features=OBS,
            out_features=2 * ACT,
            num_cells=[16, 8],
            activation_class=getattr(torch.nn, activation),
        )
        scrambled(network)
        net = torch.nn.Sequential(network, modules.NormalParamExtractor())
        low, high = torch.full((ACT,), -1.0), torch.full((ACT,), 3.0)
        actor = modules.ProbabilisticActor(
            tensors.TensorDictModule(net, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=modules.TanhNormal if tanh else modules.IndependentNormal,
            distribution_kwargs={"low": low, "high": high} if tanh else {},
        )
        value = modules.ValueOperator(
            modules.MLP(in_features=OBS, out_features=1, num_cells=[16]), ["observation"]
        )
        saved = {"actor": actor.state_dict(), "critic": value.state_dict()}
        if form == "policy":
            saved = {"policy_state_dict": actor.state_dict(), "value_state_dict": value.state_dict()}
        x = torch.from_numpy(obs)
        if normed:
            saved["obs_norm"] = {"loc": torch.from_numpy(MEAN), "scale": torch.from_numpy(np.sqrt(VAR))}
            x = ((x - saved["obs_norm"]["loc"]) / saved["obs_norm"]["scale"]).float()
        torch.save(saved, f"{path}.pt")
        exploration = _module("torchrl.envs.utils")
        with torch.no_grad(), exploration.set_exploration_type(exploration.ExplorationType.DETERMINISTIC):
            output = actor(_module("tensordict").TensorDict({"observation": x}, [len(x)]))
        return f"{path}.pt", output["action"].numpy()

    return write


def torchrl() -> Iterator[Agent]:
    """Yield actors of TorchRL."""
    squashed = {"head": "affine"}
    yield Agent("torchrl_tanh_normal", _torchrl("Tanh", tanh=True), -1, 3, {"activation": "tanh"} | squashed)
    yield Agent(
        "torchrl_policy_relu",
        _torchrl("ReLU", tanh=True, form="policy"),
        -1,
        3,
        {"activation": "relu"} | squashed,
    )
    yield Agent(
        "torchrl_normal", _torchrl("Tanh", tanh=False), -1, 3, {"activation": "tanh", "head": "identity"}
    )
    yield Agent(
        "torchrl_normalized",
        _torchrl("ReLU", tanh=True, normed=True),
        -1,
        3,
        {"activation": "relu"} | squashed,
    )


# --- rsl_rl ---------------------------------------------------------------------------------------------


def _rsl_rl(
    class_: str = "MLPModel",
    activation: str = "elu",
    *,
    distribution: Mapping[str, Any],
    normed: bool = False,
    settings: bool = False,
    distilled: bool = False,
    **more: Any,
) -> Write:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch, models = _torch(), _module("rsl_rl.models")
        observed = _module("tensordict").TensorDict({"policy": torch.from_numpy(obs)}, batch_size=[len(obs)])
        groups = {name: ["policy"] for name in ("actor", "critic", "student", "teacher")}
        common = {"hidden_dims": [16, 8], "activation": activation, "obs_normalization": normed, **more}
        roles = ("student", "teacher") if distilled else ("actor", "critic")
        first = getattr(models, class_)(
            observed, groups, roles[0], ACT, distribution_cfg=dict(distribution), **common
        )
        second = models.MLPModel(
            observed,
            groups,
            roles[1],
            ACT if distilled else 1,
            hidden_dims=[16, 8],
            activation=activation,
            obs_normalization=normed,
        )
        for network in (first, second):
            scrambled(network)
            if normed:
                for _ in range(3):
                    network.obs_normalizer.update(torch.from_numpy(obs) * 3 + 1)
            network.eval()
        saved = {
            f"{role}_state_dict": net.state_dict() for role, net in zip(roles, (first, second), strict=True)
        }
        saved |= {"optimizer_state_dict": {"state": {}, "param_groups": []}, "iter": 3, "infos": None}
        (path / "params").mkdir(parents=True)
        torch.save(saved, path / "model_3.pt")
        if settings:
            one = {"class_name": class_, **common, "distribution_cfg": dict(distribution)}
            (path / "params" / "agent.yaml").write_text(
                _module("yaml").safe_dump({roles[0]: one, roles[1]: one | {"class_name": "MLPModel"}})
            )
        with torch.no_grad():
            return str(path / "model_3.pt"), first(observed).numpy()

    return write


def rsl_rl_models() -> Iterator[Agent]:
    """Yield agents of rsl_rl's model classes and distributions."""
    scalar = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    log = scalar | {"std_type": "log"}
    spread = {"class_name": "HeteroscedasticGaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    beta = {"class_name": "BetaDistribution"}
    for name, write, known in (
        ("log_std", _rsl_rl(distribution=log, normed=True), {}),
        ("log_std_settings", _rsl_rl(distribution=log, normed=True, settings=True), {}),
        ("relu_settings", _rsl_rl(activation="relu", distribution=scalar, settings=True), {}),
        ("lrelu_settings", _rsl_rl(activation="lrelu", distribution=scalar, settings=True), {}),
        ("mish_settings", _rsl_rl(activation="mish", distribution=scalar, settings=True), {}),
        ("selu_settings", _rsl_rl(activation="selu", distribution=scalar, settings=True), {}),
        ("state_dependent", _rsl_rl(distribution=spread, normed=True), {}),
        ("state_dependent_log", _rsl_rl(distribution=spread | {"std_type": "log"}, settings=True), {}),
        ("beta", _rsl_rl(distribution=beta, settings=True), {}),
        ("gru", _rsl_rl("RNNModel", distribution=scalar, rnn_type="gru", rnn_hidden_dim=8), {}),
        ("distilled", _rsl_rl(distribution=scalar, distilled=True), {"activation": "elu"}),
        ("distilled_settings", _rsl_rl(distribution=scalar, distilled=True, normed=True, settings=True), {}),
    ):
        yield Agent(f"rsl_rl_{name}", write, -100, 100, known)


# --- skrl -----------------------------------------------------------------------------------------------


def _skrl(
    kind: str, activation: str, *, normed: bool = False, output: str | None = None, shared: bool = False
) -> Write:
    """Write a model of skrl's instantiators; an action is what its `act` gives."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = _torch()
        instantiators = _module("skrl.utils.model_instantiators.torch")
        space, acts = _boxes(-2, 2)
        layers = [{"name": "net", "input": "OBSERVATIONS", "layers": [16, 8], "activations": activation}]
        common = {"observation_space": space, "state_space": space, "action_space": acts, "device": "cpu"}
        last = f"{output}(ACTIONS)" if output else "ACTIONS"
        if shared:
            both = instantiators.shared_model(
                **common,
                structure=["GaussianMixin", "DeterministicMixin"],
                roles=["policy", "value"],
                parameters=[
                    {"network": layers, "output": last, "clip_actions": False},
                    {"network": layers, "output": "ONE", "clip_actions": False},
                ],
            )
            policy = value = both
            both.init_state_dict(role="policy")
            both.init_state_dict(role="value")
        else:
            maker = instantiators.gaussian_model if kind == "gaussian" else instantiators.deterministic_model
            policy = maker(**common, network=layers, output=last, clip_actions=False)
            value = instantiators.deterministic_model(**common, network=layers, output="ONE")
        for net in (policy, value):
            net.compute({"observations": torch.from_numpy(obs), "states": torch.from_numpy(obs)}, "policy")
        scrambled(policy)
        if value is not policy:
            scrambled(value)
        x = torch.from_numpy(obs)
        saved = {
            "policy": policy.state_dict(),
            "value": value.state_dict(),
            "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        }
        if kind == "deterministic":
            saved = {
                "policy": policy.state_dict(),
                "target_policy": policy.state_dict(),
                "critic": value.state_dict(),
            }
        if normed:
            scaler = _module("skrl.resources.preprocessors.torch").RunningStandardScaler(
                size=OBS, device="cpu"
            )
            scaler(x * 3 + 1, train=True)
            saved["observation_preprocessor"] = scaler.state_dict()
            x = scaler(x)
        torch.save(saved, f"{path}.pt")
        with torch.no_grad():
            outputs = policy.act({"observations": x, "states": x}, role="policy")
            action = outputs[-1].get("mean_actions", outputs[0]) if kind == "gaussian" else outputs[0]
        return f"{path}.pt", action.numpy()

    return write


def skrl_models() -> Iterator[Agent]:
    """Yield agents whose models skrl's instantiators build."""
    linear = {"head": "identity"}
    for name, write, known in (
        ("gaussian_elu", _skrl("gaussian", "elu"), {"activation": "elu"} | linear),
        ("gaussian_elu_normed", _skrl("gaussian", "elu", normed=True), {"activation": "elu"} | linear),
        (
            "gaussian_tanh_normed",
            _skrl("gaussian", "tanh", normed=True),
            {"activation": "tanh"} | linear,
        ),
        (
            "gaussian_tanh_output",
            _skrl("gaussian", "relu", output="2.0 * tanh"),
            {"activation": "relu", "head": "tanh"},
        ),
        (
            "deterministic_tanh_output",
            _skrl("deterministic", "relu", output="2.0 * tanh"),
            {"activation": "relu", "head": "tanh"},
        ),
        (
            "shared",
            _skrl("gaussian", "elu", normed=True, shared=True),
            {"activation": "elu"} | linear,
        ),
    ):
        yield Agent(f"skrl_model_{name}", write, -2, 2, known)


# --- d3rlpy ---------------------------------------------------------------------------------------------


def d3rlpy_more() -> Iterator[Agent]:
    """Yield agents of d3rlpy's encoders and scalers that agents.py leaves out."""
    from tests.agent_truth.agents import _d3rlpy

    def between(d3: Any) -> Any:
        return d3.preprocessing.MinMaxObservationScaler(
            minimum=np.linspace(-3, -1, OBS), maximum=np.linspace(1, 4, OBS)
        )

    def standard(d3: Any) -> Any:
        return d3.preprocessing.StandardObservationScaler(mean=MEAN, std=np.sqrt(VAR))

    def actions(d3: Any) -> Any:
        return d3.preprocessing.MinMaxActionScaler(
            minimum=np.array([-2.0, -1.0]), maximum=np.array([2.0, 3.0])
        )

    both = {"observation_scaler": standard, "action_scaler": actions}
    for name, kind, low, high, arguments in (
        ("td3_min_max", "TD3", -1, 1, {"observation_scaler": between}),
        ("sac_standard", "SAC", -1, 1, {"observation_scaler": standard}),
        ("sac_both", "SAC", -2, 3, both),
        ("ddpg", "DDPG", -1, 1, {}),
        ("awac", "AWAC", -1, 1, {}),
        ("td3_plus_bc", "TD3PlusBC", -1, 1, {"observation_scaler": standard}),
        ("iql", "IQL", -1, 1, {}),
        ("bc", "BC", -1, 1, {}),
        ("bc_tanh_standard", "BC", -1, 1, {"encoder_factory": _encoder(activation="tanh")} | both),
        ("bear", "BEAR", -1, 1, {}),
        ("crr", "CRR", -1, 1, {}),
        ("cal_ql", "CalQL", -1, 1, {}),
        ("rebrac", "ReBRAC", -1, 1, {}),
        ("td3_batch_norm", "TD3", -1, 1, {"actor_encoder_factory": _encoder(use_batch_norm=True)}),
        ("td3_dropout", "TD3", -1, 1, {"actor_encoder_factory": _encoder(dropout_rate=0.3)}),
        ("td3_gelu", "TD3", -1, 1, {"actor_encoder_factory": _encoder(activation="gelu")}),
        ("plas", "PLAS", -1, 1, {}),
        ("bcq", "BCQ", -1, 1, {}),
    ):
        yield Agent(f"d3rlpy_more_{name}", _d3rlpy(kind, **arguments), low, high)


# --- Tianshou -------------------------------------------------------------------------------------------


def _tianshou(kind: str, activation: str = "ReLU", form: str = "state", **arguments: Any) -> Write:
    """Write an algorithm of Tianshou 2: its state_dict, its policy whole, or with statistics beside it."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        torch = _torch()
        common, continuous = _module("tianshou.utils.net.common"), _module("tianshou.utils.net.continuous")
        algorithms = _module("tianshou.algorithm")
        optim = _module("tianshou.algorithm.optim").AdamOptimizerFactory(lr=1e-3)
        data = _module("tianshou.data").Batch
        _, acts = _boxes(-1, 3)
        function = getattr(torch.nn, activation)

        def net(size: int = OBS, **more: Any) -> Any:
            return common.Net(state_shape=(size,), hidden_sizes=[16, 8], activation=function, **more)

        if kind == "ppo":
            actor = continuous.ContinuousActorProbabilistic(
                preprocess_net=net(), action_shape=(ACT,), unbounded=True, **arguments
            )
            from_modules = _module("tianshou.algorithm.modelfree.reinforce").ProbabilisticActorPolicy
            dist = lambda pair: torch.distributions.Independent(torch.distributions.Normal(*pair), 1)  # noqa: E731
            policy = from_modules(
                actor=actor,
                dist_fn=dist,
                action_space=acts,
                deterministic_eval=True,
                action_bound_method=arguments.pop("bound", "clip"),
            )
            critic = continuous.ContinuousCritic(preprocess_net=net())
            whole = algorithms.PPO(policy=policy, critic=critic, optim=optim)
        elif kind == "sac":
            actor = continuous.ContinuousActorProbabilistic(
                preprocess_net=net(), action_shape=(ACT,), unbounded=True, conditioned_sigma=True, **arguments
            )
            policy = _module("tianshou.algorithm.modelfree.sac").SACPolicy(actor=actor, action_space=acts)
            critics = [continuous.ContinuousCritic(preprocess_net=net(OBS + ACT)) for _ in range(2)]
            whole = algorithms.SAC(
                policy=policy,
                policy_optim=optim,
                critic=critics[0],
                critic_optim=optim,
                critic2=critics[1],
                critic2_optim=optim,
            )
        else:
            actor = continuous.ContinuousActorDeterministic(
                preprocess_net=net(), action_shape=(ACT,), max_action=arguments.get("max_action", 3.0)
            )
            policy = _module("tianshou.algorithm.modelfree.ddpg").ContinuousDeterministicPolicy(
                actor=actor, action_space=acts, exploration_noise=None
            )
            critic = continuous.ContinuousCritic(preprocess_net=net(OBS + ACT))
            whole = algorithms.DDPG(policy=policy, policy_optim=optim, critic=critic, critic_optim=optim)
        scrambled(whole)
        path.mkdir()
        file, x = path / "policy.pth", obs
        if form == "whole":
            torch.save(policy, file)
        elif form == "policy":
            torch.save(policy.state_dict(), file)
        elif form == "statistics":
            rms = _module("tianshou.utils").RunningMeanStd(MEAN, VAR)
            rms.count = 100
            torch.save({"model": whole.state_dict(), "obs_rms": rms}, file)
            x = np.asarray(rms.norm(obs), np.float32)
        else:
            torch.save(whole.state_dict(), file)
        whole.eval()
        with torch.no_grad():
            actions = policy(data(obs=x, info={})).act
        return str(file), policy.map_action(actions.numpy())

    return write


def tianshou_more() -> Iterator[Agent]:
    """Yield agents of Tianshou's algorithms, which act by their own policies."""
    for name, write, known in (
        ("ppo", _tianshou("ppo", "Tanh"), {"activation": "tanh", "head": "clip_affine"}),
        (
            "ppo_statistics",
            _tianshou("ppo", "Tanh", "statistics"),
            {"activation": "tanh", "head": "clip_affine"},
        ),
        ("sac", _tianshou("sac"), {}),
        ("sac_statistics", _tianshou("sac", form="statistics"), {}),
        ("sac_tanh", _tianshou("sac", "Tanh"), {"activation": "tanh"}),
        ("ddpg_max_action", _tianshou("ddpg"), {}),
        ("ddpg_one", _tianshou("ddpg", max_action=1.0), {"head": "affine"}),
        ("ppo_policy", _tianshou("ppo", "Tanh", "policy"), {"activation": "tanh", "head": "clip_affine"}),
        ("sac_policy", _tianshou("sac", form="policy"), {}),
        ("ddpg_policy", _tianshou("ddpg", form="policy"), {}),
        ("sac_whole", _tianshou("sac", "SiLU", "whole"), {}),
        ("ddpg_whole", _tianshou("ddpg", "GELU", "whole", max_action=1.0), {}),
    ):
        yield Agent(f"tianshou_more_{name}", write, -1, 3, known)


# --- Stable-Baselines3 ----------------------------------------------------------------------------------


def _dict_sb3(package: str, kind: str, **more: Any) -> Write:
    """Write an agent of an environment with a Dict observation, flattened by the library's own extractor."""

    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        spaces = _module("gymnasium").spaces
        env = _box_env(-1, 3)
        env.observation_space = spaces.Dict(
            {
                "b": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "a": spaces.Box(-np.inf, np.inf, (OBS - 2,), np.float32),
            }
        )
        env.reset = lambda **_: (env.observation_space.sample(), {})
        arguments = {name: value() if callable(value) else value for name, value in more.items()}
        model = getattr(_module(package), kind)("MultiInputPolicy", env, device="cpu", seed=0, **arguments)
        scrambled(model.policy)
        model.save(f"{path}.zip")
        return f"{path}.zip", model.predict(
            {"a": obs[:, : OBS - 2], "b": obs[:, OBS - 2 :]}, deterministic=True
        )[0]

    return write


def sb3_more() -> Iterator[Agent]:
    """Yield agents of Stable-Baselines3's settings."""
    s = "stable_baselines3"

    def kwargs(**more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: dict(more)

    expln = kwargs(use_expln=True)
    for name, write in {
        "ppo_expln": _sb3(s, "PPO", use_sde=True, policy_kwargs=expln, low=-1, high=3),
        "ppo_full_std": _sb3(s, "PPO", use_sde=True, policy_kwargs=kwargs(full_std=False), low=-1, high=3),
        "ppo_no_share": _sb3(s, "PPO", policy_kwargs=kwargs(share_features_extractor=False), low=-1, high=3),
        "ppo_no_normalize": _sb3(s, "PPO", policy_kwargs=kwargs(normalize_images=False), low=-1, high=3),
        "ppo_log_std": _sb3(
            s, "PPO", policy_kwargs=kwargs(log_std_init=-2.0, ortho_init=False), low=-1, high=3
        ),
        "ppo_arch_only_vf": _sb3(
            s, "PPO", policy_kwargs=kwargs(net_arch={"pi": [], "vf": [8]}), low=-1, high=3
        ),
        "ppo_silu": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="SiLU"), low=-1, high=3),
        "ppo_mish": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="Mish"), low=-1, high=3),
        "ppo_selu": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="SELU"), low=-1, high=3),
        "ppo_identity": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="Identity"), low=-1, high=3),
        "ppo_hardtanh": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="Hardtanh"), low=-1, high=3),
        "ppo_prelu": _sb3(s, "PPO", policy_kwargs=_kwargs(activation_fn="PReLU"), low=-1, high=3),
        "sac_arch": _sb3(s, "SAC", policy_kwargs=kwargs(net_arch={"pi": [6], "qf": [8, 4]}), low=-1, high=3),
        "sac_no_layers": _sb3(s, "SAC", policy_kwargs=kwargs(net_arch={"pi": [], "qf": [8]}), low=-1, high=3),
        "sac_expln": _sb3(s, "SAC", use_sde=True, policy_kwargs=expln, low=-1, high=3),
        "sac_softplus": _sb3(s, "SAC", policy_kwargs=_kwargs(activation_fn="Softplus"), low=-1, high=3),
        "sac_sde_sample": _sb3(s, "SAC", use_sde=True, use_sde_at_warmup=True, low=-1, high=3),
        "td3_share": _sb3(s, "TD3", policy_kwargs=kwargs(share_features_extractor=True), low=-1, high=3),
        "ddpg_sigmoid": _sb3(s, "DDPG", policy_kwargs=_kwargs(activation_fn="Sigmoid"), low=-1, high=3),
        "a2c_rms": _sb3(s, "A2C", use_rms_prop=True, use_sde=True, low=-1, high=3),
    }.items():
        yield Agent(f"sb3_more_{name}", write, -1, 3)
    yield Agent("sb3_more_ppo_dict", _dict_sb3(s, "PPO"), -1, 3)
    yield Agent("sb3_more_sac_dict", _dict_sb3(s, "SAC", buffer_size=10), -1, 3)


def contrib_more() -> Iterator[Agent]:
    """Yield agents of sb3_contrib's settings."""
    s = "sb3_contrib"

    def kwargs(**more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: dict(more)

    for name, write in {
        "tqc_gsde": _sb3(s, "TQC", use_sde=True, low=-1, high=3),
        "tqc_tanh": _sb3(s, "TQC", policy_kwargs=_kwargs(activation_fn="Tanh"), low=-1, high=3),
        "crossq_arch": _sb3(
            s, "CrossQ", policy_kwargs=kwargs(net_arch={"pi": [6, 4], "qf": [8]}), low=-1, high=3
        ),
        "crossq_no_norm": _sb3(s, "CrossQ", policy_kwargs=kwargs(batch_norm=False), low=-1, high=3),
        "crossq_eps": _sb3(s, "CrossQ", policy_kwargs=kwargs(batch_norm_eps=0.5), low=-1, high=3),
        "trpo_gsde": _sb3(s, "TRPO", use_sde=True, low=-1, high=3),
        "ars_arch": _sb3(s, "ARS", policy_kwargs=kwargs(net_arch=[6]), low=-1, high=3),
    }.items():
        yield Agent(f"contrib_more_{name}", write, -1, 3)


LIBRARIES: Mapping[str, Callable[[], Iterator[Agent]]] = {
    "rllib": rllib,
    "rllib_policies": rllib_policies,
    "rl_games": rl_games,
    "elegantrl": elegantrl,
    "pfrl": pfrl,
    "torchrl": torchrl,
    "rsl_rl_models": rsl_rl_models,
    "skrl_models": skrl_models,
    "d3rlpy_more": d3rlpy_more,
    "tianshou_more": tianshou_more,
    "sb3_more": sb3_more,
    "contrib_more": contrib_more,
}
