"""Agents of discrete actions that RL libraries build with their own classes, and their actions.

`python -m tests.agent_truth.discrete FOLDER [NAME...]` writes those whose library can be imported and that
the folder lacks: the agent's files, `NAME.json` (file, facts that no file contains, environment),
`NAME.actions.npy` and `NAME.scores.npy`: the library's own actions for `observations()`, and the values or
logits that it chooses them by. Networks have odd widths, and ELU where the library has a choice.

CleanRL and Spinning Up are checkouts on the interpreter's path; that of Spinning Up has no
`spinup/__init__.py`, which needs TensorFlow 1.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

OBS, ACTIONS, SEVERAL = 6, 3, (3, 2)
IMAGES = (4, 84, 84)
ENV = "Acrobot-v1"
"""An environment of as many observations and actions."""
HIDDEN = (17, 9)
ATOMS, LOW, HIGH = 11, -3.0, 7.0


class Outputs(NamedTuple):
    """The file of an agent, and what its library computes for the observations."""

    file: str
    actions: Any
    scores: Any


class DiscreteAgent(NamedTuple):
    """One agent: what must be importable, what writes it, and what a person who trained it knows.

    `known` are options of the command line; `env` is given where no file contains the number of actions.
    `shape` is that of one observation.
    """

    module: str
    write: Callable[[Path, np.ndarray], Outputs]
    known: Mapping[str, str] = {}
    env: str | None = None
    shape: tuple[int, ...] = (OBS,)


def observations(shape: tuple[int, ...] = (OBS,)) -> np.ndarray:
    """Return what an agent sees: float32 [200, OBS], some of it large, or uint8 images of squares."""
    draw = np.random.default_rng(0)
    if shape != IMAGES:
        return (2 * draw.normal(size=(200, *shape))).astype(np.float32)
    # One colour on black: images that have little in common, whose values round less.
    squares = draw.integers(0, 2, (200, IMAGES[0], 3, 3), dtype=np.uint8)
    squares *= draw.integers(0, 2, (200, IMAGES[0], 1, 1), dtype=np.uint8)
    squares *= draw.integers(128, 256, (200, 1, 1, 1)).astype(np.uint8)
    return squares.repeat(IMAGES[1] // 3, axis=2).repeat(IMAGES[2] // 3, axis=3)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _scramble(*modules: Any) -> None:
    """Give modules weights with which every action is the best of some observations."""
    from tests.agent_truth.agents import scrambled

    for module in modules:
        scrambled(module)
        for parameter in module.parameters():
            if parameter.ndim == 1 and parameter.numel() == ACTIONS:
                parameter.data.zero_()
        for norm in module.modules():
            if type(norm).__name__ == "LayerNorm" and norm.weight is not None:
                norm.weight.data = 1 + norm.weight.data / 4


def _spaces(counts: tuple[int, ...] = ()) -> tuple[Any, Any]:
    spaces = _module("gymnasium").spaces
    observation_space = spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    return observation_space, spaces.MultiDiscrete(counts) if counts else spaces.Discrete(ACTIONS)


def _tensor(obs: np.ndarray) -> Any:
    return _module("torch").from_numpy(obs)


def _chosen(scores: Any, counts: tuple[int, ...] = (ACTIONS,)) -> np.ndarray:
    """Return the largest of each choice, for libraries that leave the choice to the caller."""
    parts = np.split(np.asarray(scores), np.cumsum(counts)[:-1], axis=1)
    best = np.stack([part.argmax(1) for part in parts], 1)
    return best[:, 0] if len(counts) == 1 else best


# Stable-Baselines3 and its contrib.


def _sb3(package: str, kind: str, counts: tuple[int, ...] = (), **more: Any) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        gymnasium, torch = _module("gymnasium"), _module("torch")
        space, acts = _spaces(counts)

        class Env(gymnasium.Env):  # type: ignore[misc, name-defined]
            observation_space, action_space = space, acts

        kwargs = {"net_arch": list(HIDDEN), "activation_fn": torch.nn.ELU}
        model = getattr(_module(package), kind)(
            "MlpPolicy", Env(), device="cpu", seed=0, policy_kwargs=kwargs, **more
        )
        policy = model.policy
        _scramble(policy)
        model.save(f"{path}.zip")
        with torch.no_grad():
            if hasattr(policy, "action_net"):
                features = policy.mlp_extractor.forward_actor(policy.extract_features(_tensor(obs)))
                features = features[0] if isinstance(features, tuple) else features
                scores = policy.action_net(features)
            elif hasattr(policy, "quantile_net"):
                scores = policy.quantile_net(_tensor(obs)).mean(1)
            else:
                scores = (policy.q_net if hasattr(policy, "q_net") else policy)(_tensor(obs))
        return Outputs(f"{path}.zip", model.predict(obs, deterministic=True)[0], scores)

    return write


# Tianshou.


def _tianshou(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, algorithms = _module("torch"), _module("tianshou.algorithm")
        common, discrete = _module("tianshou.utils.net.common"), _module("tianshou.utils.net.discrete")
        optim = _module("tianshou.algorithm.optim").AdamOptimizerFactory(lr=1e-3)
        _, acts = _spaces()
        net = functools.partial(common.Net, state_shape=(OBS,), hidden_sizes=HIDDEN, activation=torch.nn.ELU)
        support = {"num_atoms": ATOMS, "v_min": LOW, "v_max": HIGH}
        streams = ({"hidden_sizes": [5]}, {"hidden_sizes": [4]})

        def modules(name: str) -> Any:
            return _module(f"tianshou.algorithm.modelfree.{name}")

        if kind in ("dqn", "dueling"):
            model = net(action_shape=(ACTIONS,), dueling_param=streams if kind == "dueling" else None)
            policy = modules("dqn").DiscreteQLearningPolicy(model=model, action_space=acts)
            whole = algorithms.DQN(policy=policy, optim=optim, target_update_freq=9)
        elif kind in ("c51", "rainbow"):
            linear = {"linear_layer": discrete.NoisyLinear} if kind == "rainbow" else {}
            dueling = tuple({**stream, **linear} for stream in streams) if linear else None
            model = net(action_shape=(ACTIONS,), num_atoms=ATOMS, softmax=True, dueling_param=dueling)
            policy = modules("c51").C51Policy(model=model, action_space=acts, **support)
            algorithm = algorithms.RainbowDQN if linear else algorithms.C51
            whole = algorithm(policy=policy, optim=optim, target_update_freq=9)
        elif kind == "qrdqn":
            model = net(action_shape=(ACTIONS,), num_atoms=ATOMS)
            policy = modules("qrdqn").QRDQNPolicy(model=model, action_space=acts)
            whole = algorithms.QRDQN(policy=policy, optim=optim, num_quantiles=ATOMS, target_update_freq=9)
        elif kind == "fqf":
            inner = net(action_shape=HIDDEN[-1])
            model = discrete.FullQuantileFunction(
                preprocess_net=inner, action_shape=(ACTIONS,), hidden_sizes=[7], num_cosines=13
            )
            fractions = discrete.FractionProposalNetwork(ATOMS, inner.get_output_dim())
            policy = modules("fqf").FQFPolicy(model=model, fraction_model=fractions, action_space=acts)
            whole = algorithms.FQF(
                policy=policy,
                optim=optim,
                fraction_optim=optim,
                num_fractions=ATOMS,
                target_update_freq=9,
            )
        else:
            actor = discrete.DiscreteActor(
                preprocess_net=net(), action_shape=(ACTIONS,), softmax_output=False
            )
            critic = discrete.DiscreteCritic(preprocess_net=net())
            policy = modules("reinforce").DiscreteActorPolicy(
                actor=actor, action_space=acts, deterministic_eval=True
            )
            whole = algorithms.PPO(policy=policy, critic=critic, optim=optim)
        _scramble(whole)
        torch.save(whole.state_dict(), f"{path}.pth")
        whole.eval()
        with torch.no_grad():
            result = policy(_module("tianshou.data").Batch(obs=obs, info={}))
            if kind == "ppo":
                scores = actor(obs)[0]
            elif kind == "fqf":
                weights = result.fractions.taus[:, 1:] - result.fractions.taus[:, :-1]
                scores = (weights[:, None] * result.logits).sum(2)
            else:
                scores = policy.compute_q_value(result.logits, None)
        return Outputs(f"{path}.pth", np.asarray(result.act), scores)

    return write


# RLlib.


def _rl_module(kind: str, counts: tuple[int, ...] = (), **model: Any) -> Any:
    """Return what writes the folder of an RLModule of the new API stack."""

    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, library = _module("torch"), f"ray.rllib.algorithms.{kind}"
        upper = kind.upper()
        class_ = _module(f"{library}.torch.default_{kind}_torch_rl_module")
        config = _module("ray.rllib.core.rl_module.default_model_config").DefaultModelConfig
        settings = vars(config(fcnet_hiddens=list(HIDDEN), fcnet_activation="elu")) | model
        observed, acts = _spaces(counts)
        module = (
            _module("ray.rllib.core.rl_module.rl_module")
            .RLModuleSpec(
                module_class=getattr(class_, f"Default{upper}TorchRLModule"),
                observation_space=observed,
                action_space=acts,
                model_config=settings,
                catalog_class=getattr(_module(f"{library}.{kind}_catalog"), f"{upper}Catalog"),
            )
            .build()
        )
        _scramble(module)
        module.save_to_path(str(path.absolute()))
        columns = _module("ray.rllib.core.columns").Columns
        with torch.no_grad():
            batch = {columns.OBS: _tensor(obs)}
            if kind == "dqn":
                scores = module.compute_q_values(batch)["qf_preds"]
                return Outputs(str(path), module.forward_inference(batch)[columns.ACTIONS], scores)
            scores = module.forward_inference(batch)[columns.ACTION_DIST_INPUTS]
            drawn = module.get_inference_action_dist_cls()
            actions = drawn.from_logits(scores).to_deterministic().sample()
        return Outputs(str(path), actions, scores)

    return write


def _rl_policy(kind: str, counts: tuple[int, ...] = (), **config: Any) -> Any:
    """Return what exports a policy of the old API stack."""

    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, library = _module("torch"), _module(f"ray.rllib.algorithms.{kind}")
        settings = getattr(library, f"{kind.upper()}Config")()
        settings = settings.api_stack(
            enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
        ).framework("torch")
        settings = settings.training(
            model={"fcnet_hiddens": list(HIDDEN), "fcnet_activation": "elu"}, **config
        ).environment(ENV)
        inputs = settings.to_dict() | {"num_gpus": 0, "__policy_id": "default_policy"}
        modules = _module(f"ray.rllib.algorithms.{kind}.{kind}_torch_policy")
        policy = getattr(modules, f"{kind.upper()}TorchPolicy")(*_spaces(counts), inputs)
        _scramble(policy.model)
        policy.export_checkpoint(str(path.absolute()))
        actions, _, _ = policy.compute_actions(obs, explore=False)
        with torch.no_grad():
            batch = _module("ray.rllib.policy.sample_batch").SampleBatch({"obs": _tensor(obs)})
            if kind == "dqn":
                scores = modules.compute_q_values(policy, policy.model, batch, explore=False)[0]
            else:
                scores, _ = policy.model(batch)
        return Outputs(str(path), actions, scores)

    return write


# What algorithms/dqn/dqn.py adds to a module's settings.
_DQN_SETTINGS = {"epsilon": [(0, 1.0)], "num_atoms": 1, "double_q": True, "v_min": LOW, "v_max": HIGH}


# ElegantRL.


def _elegantrl(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch = _module("torch")
        net = getattr(_module("elegantrl.agents.net"), kind)([*HIDDEN, 5], OBS, ACTIONS)
        _scramble(net)
        statistics = np.random.default_rng(7)
        net.state_avg.data[:] = torch.from_numpy(statistics.normal(size=OBS))
        net.state_std.data[:] = torch.from_numpy(statistics.uniform(0.5, 2, OBS))
        for name, value in (("value_avg", 0.0), ("value_std", 1.0)):
            if hasattr(net, name):
                getattr(net, name).data[:] = value
        path.mkdir()
        torch.save(net, path / "act.pth")
        with torch.no_grad():
            scores = net(_tensor(obs))
            if kind == "ActorDiscretePPO":
                # `forward` is the number of the largest output.
                chosen = scores
                scores = net.net(net.state_norm(_tensor(obs)))
                return Outputs(str(path / "act.pth"), chosen, scores)
            return Outputs(str(path / "act.pth"), scores.argmax(1), scores)

    return write


# TorchRL.


def _torchrl(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, modules, nn = _module("torch"), _module("torchrl.modules"), _module("tensordict.nn")
        one_hot = _module("torchrl.data").OneHot(ACTIONS)
        shape = (ATOMS, ACTIONS) if kind == "atoms" else ACTIONS
        net = modules.MLP(OBS, shape, num_cells=list(HIDDEN), activation_class=torch.nn.ELU)
        support = torch.linspace(LOW, HIGH, ATOMS)
        if kind == "values":
            actor = modules.QValueActor(net, in_keys=["observation"], spec=one_hot)
        elif kind == "atoms":
            actor = modules.DistributionalQValueActor(
                net, in_keys=["observation"], spec=one_hot, support=support
            )
        else:
            inner = nn.TensorDictModule(net, ["observation"], ["logits"])
            actor = modules.ProbabilisticActor(
                inner, ["logits"], distribution_class=torch.distributions.Categorical
            )
        _scramble(net)
        torch.save(actor.state_dict(), f"{path}.pt")
        exploration = _module("torchrl.envs.utils")
        with torch.no_grad(), exploration.set_exploration_type(exploration.ExplorationType.DETERMINISTIC):
            inputs = _module("tensordict").TensorDict({"observation": _tensor(obs)}, [len(obs)])
            actions = actor(inputs)["action"]
            scores = net(_tensor(obs))
        if kind == "atoms":
            scores = (scores.softmax(1) * support[:, None]).sum(1)
        return Outputs(f"{path}.pt", actions if kind == "logits" else actions.long().argmax(1), scores)

    return write


# AgileRL.


def _agilerl(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, algorithms = _module("torch"), _module("agilerl.algorithms")
        config = {
            "latent_dim": 9,
            "encoder_config": {"hidden_size": list(HIDDEN), "activation": "ELU"},
            "head_config": {"hidden_size": [19], "activation": "Tanh"},
        }
        support = {"num_atoms": ATOMS, "v_min": LOW, "v_max": HIGH} if kind == "RainbowDQN" else {}
        agent = getattr(algorithms, kind)(*_spaces(), net_config=config, **support)
        _scramble(agent.actor)
        agent.save_checkpoint(f"{path}.pt")
        agent.set_training_mode(training=False)
        agent.actor.eval()
        with torch.no_grad():
            if kind == "PPO":
                # Its `get_action` always draws.
                scores = agent.actor.head_net.wrapped(agent.actor.encoder(_tensor(obs)))
                return Outputs(f"{path}.pt", _chosen(scores), scores)
            scores = agent.actor(_tensor(obs))
            playing = {"training": False} if kind == "RainbowDQN" else {}
            return Outputs(f"{path}.pt", agent.get_action(obs, **playing), scores)

    return write


# skrl, rl_games, d3rlpy.


def _skrl(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, models = _module("torch"), _module("skrl.utils.model_instantiators.torch")
        space, acts = _spaces()
        inputs = {"input": "STATES" if hasattr(models, "Shape") else "OBSERVATIONS"}
        layers = [{"name": "net", **inputs, "layers": list(HIDDEN), "activations": "elu"}]
        common = {"observation_space": space, "action_space": acts, "device": "cpu", "network": layers}
        make = {"dqn": models.deterministic_model, "ppo": models.categorical_model}[kind]
        net = make(**common, output="ACTIONS")
        net.compute({"states": _tensor(obs), "observations": _tensor(obs)}, "policy")  # makes the layers
        _scramble(net)
        other = models.deterministic_model(**common, output="ACTIONS" if kind == "dqn" else "ONE")
        first, second = ("q_network", "target_q_network") if kind == "dqn" else ("policy", "value")
        saved = {first: net.state_dict(), second: other.state_dict()}
        saved["optimizer"] = {"state": {}, "param_groups": []}
        torch.save(saved, f"{path}.pt")
        with torch.no_grad():
            scores = net.compute({"states": _tensor(obs), "observations": _tensor(obs)}, "policy")[0]
        return Outputs(f"{path}.pt", _chosen(scores), scores)

    return write


def _rl_games(counts: tuple[int, ...] = ()) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, yaml = _module("torch"), _module("yaml")
        builder = _module("rl_games.algos_torch.network_builder").A2CBuilder()
        models = _module("rl_games.algos_torch.models")
        mlp = {"units": list(HIDDEN), "activation": "elu", "initializer": {"name": "default"}, "d2rl": False}
        space = {"multi_discrete" if counts else "discrete": {}}
        network = {"name": "actor_critic", "separate": False, "space": space, "mlp": mlp}
        builder.load(network)
        model = (models.ModelA2CMultiDiscrete if counts else models.ModelA2C)(builder).build(
            {
                "actions_num": list(counts) or ACTIONS,
                "input_shape": (OBS,),
                "num_seqs": 1,
                "value_size": 1,
                "normalize_value": True,
                "normalize_input": True,
            }
        )
        _scramble(model)
        statistics = np.random.default_rng(7)
        model.running_mean_std.running_mean.copy_(torch.from_numpy(statistics.normal(size=OBS)))
        model.running_mean_std.running_var.copy_(torch.from_numpy(statistics.uniform(0.5, 2, OBS)))
        model.eval()
        (path / "nn").mkdir(parents=True)
        saved = {"model": model.state_dict(), "epoch": 3, "frame": 300, "env_state": None}
        torch.save(saved | {"optimizer": {"state": {}, "param_groups": []}}, path / "nn" / "agent.pth")
        name = "multi_discrete_a2c" if counts else "discrete_a2c"
        document = {"params": {"model": {"name": name}, "network": network}}
        document["params"]["algo"] = {"name": "a2c_discrete"}
        document["params"]["config"] = {"normalize_input": True}
        (path / "config.yaml").write_text(yaml.safe_dump(document))
        with torch.no_grad():
            inputs = {"is_train": False, "prev_actions": None, "obs": _tensor(obs), "rnn_states": None}
            logits = model.a2c_network({**inputs, "obs": model.norm_obs(inputs["obs"])})[0]
            chosen = model(inputs)["logits"]  # and normalises the observations in `given`
        # algos_torch/players.py, PpoPlayerDiscrete.get_action: the largest, of several ones of each.
        chosen = torch.cat(chosen, -1) if counts else chosen
        scores = torch.cat(logits, -1) if counts else logits
        actions = _chosen(chosen, counts or (ACTIONS,))
        return Outputs(str(path / "nn" / "agent.pth"), actions, scores)

    return write


def _d3rlpy(kind: str, quantiles: bool = False, critics: int = 1) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, d3rlpy = _module("torch"), _module("d3rlpy")
        encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=list(HIDDEN), activation="tanh")
        names = {
            "DiscreteSACConfig": ("actor_encoder_factory", "critic_encoder_factory"),
        }.get(kind, ("encoder_factory",))
        more: dict[str, Any] = dict.fromkeys(names, encoder)
        if quantiles:
            more["q_func_factory"] = d3rlpy.models.QRQFunctionFactory(n_quantiles=ATOMS)
        if critics > 1:
            more["n_critics"] = critics
        agent = getattr(d3rlpy.algos, kind)(**more).create(device="cpu:0")
        agent.create_impl((OBS,), ACTIONS)
        modules = [item for item in vars(agent.impl.modules).values() if isinstance(item, torch.nn.Module)]
        _scramble(*modules)
        agent.save(f"{path}.d3")
        with torch.no_grad():
            if kind in ("DiscreteBCConfig", "DiscreteSACConfig"):
                # Its distributions have logarithms of the probabilities.
                policy = agent.impl.modules.imitator if "BC" in kind else agent.impl.policy
                scores = policy._fc(policy._encoder(_tensor(obs)))
            else:
                scores = agent.impl._q_func_forwarder.compute_expected_q(_tensor(obs))
        return Outputs(f"{path}.d3", agent.predict(obs), scores)

    return write


# TF-Agents and keras-rl (TensorFlow 2.15 with Keras 2).


def _tf_agents(kind: str) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        tf = _module("tensorflow")
        from tests.agent_truth.tf_libraries import scramble

        tensors, ts = _module("tf_agents.specs.tensor_spec"), _module("tf_agents.trajectories.time_step")
        networks, agents = "tf_agents.networks", "tf_agents.agents"
        spec = tensors.TensorSpec((OBS,), tf.float32, "observation")
        acts = tensors.BoundedTensorSpec((), tf.int32, 0, ACTIONS - 1, "action")
        steps, adam = ts.time_step_spec(spec), tf.keras.optimizers.Adam(1e-3)
        layers = {"fc_layer_params": HIDDEN, "activation_fn": tf.keras.activations.elu}
        if kind == "dqn":
            net = _module(f"{networks}.q_network").QNetwork(spec, acts, **layers)
            agent = _module(f"{agents}.dqn.dqn_agent").DqnAgent(steps, acts, q_network=net, optimizer=adam)
        elif kind == "c51":
            net = _module(f"{networks}.categorical_q_network").CategoricalQNetwork(
                spec, acts, num_atoms=ATOMS, **layers
            )
            agent = _module(f"{agents}.categorical_dqn.categorical_dqn_agent").CategoricalDqnAgent(
                steps, acts, categorical_q_network=net, optimizer=adam
            )
        else:
            actor = _module(f"{networks}.actor_distribution_network").ActorDistributionNetwork(
                spec, acts, **layers
            )
            value = _module(f"{networks}.value_network").ValueNetwork(spec, **layers)
            agent = _module(f"{agents}.ppo.ppo_clip_agent").PPOClipAgent(
                steps, acts, optimizer=adam, actor_net=actor, value_net=value, normalize_observations=False
            )
        agent.initialize()
        scramble([*agent.policy.variables(), *agent.collect_policy.variables()])
        _module("tf_agents.utils.common").Checkpointer(
            str(path), max_to_keep=1, agent=agent, global_step=tf.Variable(0, dtype=tf.int64)
        ).save(0)
        policy = _module("tf_agents.policies.greedy_policy").GreedyPolicy(agent.policy)
        step = ts.restart(tf.constant(obs), batch_size=len(obs))
        actions = policy.action(step).action.numpy()
        if kind == "ppo":
            scores = actor(tf.constant(obs), step.step_type, ())[0].logits_parameter()
        elif kind == "dqn":
            scores = net(tf.constant(obs))[0]
        else:
            scores = tf.reduce_sum(tf.nn.softmax(net(tf.constant(obs))[0]) * agent._support, -1)
        return Outputs(str(path), actions, scores.numpy())

    return write


def _keras_rl(*, dueling: bool) -> Any:
    def write(path: Path, obs: np.ndarray) -> Outputs:
        tf = _module("tensorflow")
        from tests.agent_truth.tf_libraries import scramble

        # The library copies its models, whose dueling layer is a function by value.
        getattr(tf.keras.__internal__, "enable_unsafe_deserialization", lambda: None)()
        models, layers = tf.keras.models, tf.keras.layers
        widths = (*HIDDEN, ACTIONS)
        model = models.Sequential([layers.Flatten(input_shape=(1, OBS))])
        for number, width in enumerate(widths):
            model.add(layers.Dense(width, activation="elu" if number < len(HIDDEN) else None))
        agent = _module("rl.agents.dqn").DQNAgent(
            model=model,
            nb_actions=ACTIONS,
            memory=_module("rl.memory").SequentialMemory(limit=9, window_length=1),
            policy=_module("rl.policy").GreedyQPolicy(),
            enable_dueling_network=dueling,
        )
        agent.compile(tf.keras.optimizers.legacy.Adam(1e-3))
        scramble(agent.model.variables)
        path.mkdir()
        agent.save_weights(str(path / "dqn_weights.h5f"))
        scores = agent.compute_batch_q_values(list(obs[:, None]))
        agent.training = False
        actions = np.array([agent.test_policy.select_action(q_values=row) for row in scores])
        return Outputs(str(path / "dqn_weights.h5f"), actions, scores)

    return write


# CleanRL and Spinning Up: classes of scripts, whose agents sample the actions of actors.


def _cleanrl(kind: str) -> Any:
    """Return what saves the agent of cleanrl/<kind>.py, whose widths are fixed."""

    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, script = _module("torch"), _module(f"cleanrl.{kind}")
        spaces = SimpleNamespace(single_observation_space=_spaces()[0], single_action_space=_spaces()[1])
        support = {"n_atoms": ATOMS, "v_min": LOW, "v_max": HIGH} if kind.startswith("c51") else {}
        actor_critic = kind.startswith("ppo")
        net = script.Agent(spaces) if actor_critic else script.QNetwork(spaces, **support)
        _scramble(net)
        compute = net.get_action_and_value if actor_critic else net.get_action if support else net
        file, observed = f"{path}.cleanrl_model", _tensor(obs).float()
        *_, last = (net.actor if actor_critic else net.network).modules()
        outputs: list[Any] = []
        last.register_forward_hook(lambda *call: outputs.append(call[2]))
        with torch.no_grad():
            compute(observed)
            # Images differ less than they have in common; every action is to be the best of some.
            last.bias -= outputs.pop().mean(0)
            computed = compute(observed)
            if support:
                atoms = [net.get_action(observed, torch.full((len(observed),), n))[1] for n in range(ACTIONS)]
                scores = torch.stack([(item * net.atoms).sum(1) for item in atoms], 1)
            else:
                scores = outputs[0]
        state, arguments = net.state_dict(), vars(script.Args(env_id=ENV, **support))
        torch.save({"model_weights": state, "args": arguments} if support else state, file)
        return Outputs(file, computed[0] if support else _chosen(scores), scores)

    return write


def _spinningup(kind: str) -> Any:
    """Return what saves the actor and critic of spinup/algos/pytorch/<kind>/core.py as a whole."""

    def write(path: Path, obs: np.ndarray) -> Outputs:
        torch, spaces = _module("torch"), _module("gym").spaces
        space, acts = spaces.Box(-np.inf, np.inf, (OBS,), np.float32), spaces.Discrete(ACTIONS)
        agent = _module(f"spinup.algos.pytorch.{kind}.core").MLPActorCritic(space, acts, HIDDEN, torch.nn.ELU)
        _scramble(agent)
        file = path / "pyt_save" / "model.pt"
        file.parent.mkdir(parents=True)
        torch.save(agent, file)
        logits: list[Any] = []
        agent.pi.logits_net.register_forward_hook(lambda *call: logits.append(call[2]))
        agent.act(_tensor(obs))
        return Outputs(str(file), _chosen(logits[0]), logits[0])

    return write


ELU, RELU = {"activation": "elu"}, {"activation": "relu"}
AGENTS: Mapping[str, DiscreteAgent] = {
    "sb3 DQN": DiscreteAgent("stable_baselines3", _sb3("stable_baselines3", "DQN", buffer_size=9)),
    "sb3 PPO": DiscreteAgent("stable_baselines3", _sb3("stable_baselines3", "PPO")),
    "sb3 PPO of several": DiscreteAgent("stable_baselines3", _sb3("stable_baselines3", "PPO", SEVERAL)),
    "sb3 A2C": DiscreteAgent("stable_baselines3", _sb3("stable_baselines3", "A2C")),
    "contrib QRDQN": DiscreteAgent("sb3_contrib", _sb3("sb3_contrib", "QRDQN", buffer_size=9)),
    "contrib TRPO": DiscreteAgent("sb3_contrib", _sb3("sb3_contrib", "TRPO")),
    "contrib MaskablePPO": DiscreteAgent("sb3_contrib", _sb3("sb3_contrib", "MaskablePPO", SEVERAL)),
    **{
        f"tianshou {kind}": DiscreteAgent("tianshou.algorithm", _tianshou(kind), ELU, ENV)
        for kind in ("dqn", "c51", "qrdqn", "ppo")
    },
    # The layers of streams and heads have ReLU where nothing is stated.
    **{
        f"tianshou {kind}": DiscreteAgent(
            "tianshou.algorithm", _tianshou(kind), {"activation": "elu,elu,relu"}, ENV
        )
        for kind in ("dueling", "rainbow")
    },
    "tianshou fqf": DiscreteAgent(
        "tianshou.algorithm", _tianshou("fqf"), {"activation": "elu,elu,linear,relu"}, ENV
    ),
    "rllib DQN": DiscreteAgent("ray.rllib", _rl_module("dqn", dueling=False, **_DQN_SETTINGS)),
    "rllib dueling DQN": DiscreteAgent("ray.rllib", _rl_module("dqn", dueling=True, **_DQN_SETTINGS)),
    "rllib PPO": DiscreteAgent("ray.rllib", _rl_module("ppo")),
    "rllib PPO of several": DiscreteAgent("ray.rllib", _rl_module("ppo", SEVERAL)),
    "rllib old DQN": DiscreteAgent("ray.rllib", _rl_policy("dqn", dueling=False)),
    "rllib old dueling DQN": DiscreteAgent("ray.rllib", _rl_policy("dqn", dueling=True)),
    "rllib old C51": DiscreteAgent(
        "ray.rllib", _rl_policy("dqn", dueling=True, num_atoms=ATOMS, v_min=LOW, v_max=HIGH)
    ),
    "rllib old PPO": DiscreteAgent("ray.rllib", _rl_policy("ppo")),
    "rllib old PPO of several": DiscreteAgent("ray.rllib", _rl_policy("ppo", SEVERAL)),
    **{
        f"elegantrl {kind}": DiscreteAgent("elegantrl.agents", _elegantrl(kind))
        for kind in ("QNet", "QNetDuel", "QNetTwin", "QNetTwinDuel", "ActorDiscretePPO")
    },
    **{
        f"torchrl {kind}": DiscreteAgent("torchrl.modules", _torchrl(kind), ELU, ENV)
        for kind in ("values", "atoms", "logits")
    },
    **{
        f"agilerl {kind}": DiscreteAgent("agilerl.algorithms", _agilerl(kind))
        for kind in ("DQN", "RainbowDQN", "PPO")
    },
    **{f"skrl {kind}": DiscreteAgent("skrl", _skrl(kind), ELU, ENV) for kind in ("dqn", "ppo")},
    "rl_games A2C": DiscreteAgent("rl_games.algos_torch.models", _rl_games(), env=ENV),
    "rl_games A2C of several": DiscreteAgent("rl_games.algos_torch.models", _rl_games(SEVERAL)),
    "d3rlpy DQN": DiscreteAgent("d3rlpy", _d3rlpy("DQNConfig")),
    "d3rlpy quantiles": DiscreteAgent("d3rlpy", _d3rlpy("DoubleDQNConfig", quantiles=True)),
    "d3rlpy mean": DiscreteAgent("d3rlpy", _d3rlpy("DQNConfig", critics=3)),
    "d3rlpy CQL": DiscreteAgent("d3rlpy", _d3rlpy("DiscreteCQLConfig")),
    "d3rlpy SAC": DiscreteAgent("d3rlpy", _d3rlpy("DiscreteSACConfig")),
    "d3rlpy BC": DiscreteAgent("d3rlpy", _d3rlpy("DiscreteBCConfig")),
    **{
        f"tf_agents {kind}": DiscreteAgent("tf_agents.agents", _tf_agents(kind), ELU, ENV)
        for kind in ("dqn", "c51", "ppo")
    },
    "keras_rl DQN": DiscreteAgent("rl.agents", _keras_rl(dueling=False), ELU, ENV),
    "keras_rl dueling DQN": DiscreteAgent("rl.agents", _keras_rl(dueling=True), ELU, ENV),
    **{f"cleanrl {kind}": DiscreteAgent(f"cleanrl.{kind}", _cleanrl(kind)) for kind in ("dqn", "c51", "ppo")},
    **{
        f"cleanrl {kind}": DiscreteAgent(f"cleanrl.{kind}", _cleanrl(kind), shape=IMAGES)
        for kind in ("dqn_atari", "c51_atari", "ppo_atari")
    },
    **{
        f"spinningup {kind}": DiscreteAgent(f"spinup.algos.pytorch.{kind}.core", _spinningup(kind))
        for kind in ("ppo", "vpg")
    },
}


def importable(module: str) -> bool:
    """Return whether a library can be imported."""
    try:
        _module(module)
    except ImportError:
        return False
    return True


def main(folder: Path, *names: str) -> None:
    """Write the agents of the libraries that can be imported, and a document of each."""
    for name, agent in AGENTS.items():
        title = name.replace(" ", "_")
        if (names and name not in names) or (folder / f"{title}.json").exists():
            continue
        if not importable(agent.module):
            continue
        written = agent.write(folder / title, observations(agent.shape))
        for end, array in (("actions", written.actions), ("scores", written.scores)):
            detached = array.detach() if hasattr(array, "detach") else array
            np.save(folder / f"{title}.{end}.npy", np.asarray(detached))
        document = {"name": name, "file": written.file, "known": list(agent.known.items()), "env": agent.env}
        (folder / f"{title}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
