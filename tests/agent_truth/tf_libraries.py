"""Agents of TF-Agents 0.19 (TensorFlow 2.15), for a Python that has it; their policies give the actions.

`python tests/agent_truth/tf_libraries.py FOLDER` writes them: no file of this package is imported, because
that Python need not have the packages of the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

OBS, ACT = 5, 2


def observations() -> np.ndarray:
    """Return what every agent sees, as `tests.agent_truth.agents` has it."""
    return (2 * np.random.default_rng(0).normal(size=(64, OBS))).astype(np.float32)


def scramble(variables: Any) -> None:
    """Give variables values with which every activation and every bound matters."""
    rng = np.random.default_rng(7)
    for variable in variables:
        shape = tuple(variable.shape)
        if "float" not in str(variable.dtype) or "ormalizer" in variable.name:
            continue
        wide = shape[0] ** 0.5 if len(shape) > 1 else 4.0
        variable.assign((1.5 * rng.normal(size=shape) / wide).astype("float32"))


def _specs(low: Any, high: Any, discrete: int = 0) -> tuple[Any, Any, Any]:
    import tensorflow as tf
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step as ts

    observation = tensor_spec.TensorSpec((OBS,), tf.float32, "observation")
    if discrete:
        action = tensor_spec.BoundedTensorSpec((), tf.int32, 0, discrete - 1, "action")
    else:
        action = tensor_spec.BoundedTensorSpec((ACT,), tf.float32, low, high, "action")
    return observation, action, ts.time_step_spec(observation)


def _ppo(kind: str, low: Any, high: Any, **more: Any) -> Any:
    import tensorflow as tf
    from tf_agents.agents.ppo import ppo_agent, ppo_clip_agent
    from tf_agents.networks import actor_distribution_network, value_network

    observation, action, time = _specs(low, high, more.pop("discrete", 0))
    function = getattr(tf.keras.activations, more.pop("activation", "tanh"))
    projected = more.pop("projected", {})
    actor = actor_distribution_network.ActorDistributionNetwork(
        observation, action, fc_layer_params=(16, 8), activation_fn=function, **projected
    )
    value = value_network.ValueNetwork(observation, fc_layer_params=(16, 8), activation_fn=function)
    agent_class = ppo_clip_agent.PPOClipAgent if kind == "clip" else ppo_agent.PPOAgent
    return agent_class(
        time, action, optimizer=tf.keras.optimizers.Adam(1e-3), actor_net=actor, value_net=value, **more
    )


def _sac(low: Any, high: Any, **more: Any) -> Any:
    import tensorflow as tf
    from tf_agents.agents.ddpg import critic_network
    from tf_agents.agents.sac import sac_agent, tanh_normal_projection_network
    from tf_agents.networks import actor_distribution_network, normal_projection_network

    observation, action, time = _specs(low, high)
    kind = more.pop("projection", "tanh_normal")
    function = getattr(tf.keras.activations, more.pop("activation", "relu"))
    networks = {
        "tanh_normal": tanh_normal_projection_network.TanhNormalProjectionNetwork,
        "std_transform": lambda spec: tanh_normal_projection_network.TanhNormalProjectionNetwork(
            spec, std_transform=tf.exp
        ),
        "normal": lambda spec: normal_projection_network.NormalProjectionNetwork(
            spec, mean_transform=None, state_dependent_std=True, std_transform=sac_agent.std_clip_transform,
            scale_distribution=True,
        ),
    }  # fmt: skip
    actor = actor_distribution_network.ActorDistributionNetwork(
        observation, action, fc_layer_params=(16, 8), activation_fn=function,
        continuous_projection_net=networks[kind],
    )  # fmt: skip
    critic = critic_network.CriticNetwork((observation, action), joint_fc_layer_params=(16, 8))
    adam = tf.keras.optimizers.legacy.Adam
    return sac_agent.SacAgent(
        time, action, actor_network=actor, critic_network=critic, actor_optimizer=adam(1e-3),
        critic_optimizer=adam(1e-3), alpha_optimizer=adam(1e-3), **more,
    )  # fmt: skip


def _td3(kind: str, low: Any, high: Any, activation: str = "relu") -> Any:
    import tensorflow as tf
    from tf_agents.agents.ddpg import actor_network, critic_network, ddpg_agent
    from tf_agents.agents.td3 import td3_agent

    observation, action, time = _specs(low, high)
    function = getattr(tf.keras.activations, activation)
    actor = actor_network.ActorNetwork(observation, action, fc_layer_params=(16, 8), activation_fn=function)
    critic = critic_network.CriticNetwork((observation, action), joint_fc_layer_params=(16, 8))
    adam = tf.keras.optimizers.legacy.Adam
    agent_class = td3_agent.Td3Agent if kind == "td3" else ddpg_agent.DdpgAgent
    return agent_class(
        time, action, actor_network=actor, critic_network=critic, actor_optimizer=adam(1e-3),
        critic_optimizer=adam(1e-3),
    )  # fmt: skip


def _reinforce(low: Any, high: Any, **more: Any) -> Any:
    import tensorflow as tf
    from tf_agents.agents.reinforce import reinforce_agent
    from tf_agents.networks import actor_distribution_network

    observation, action, time = _specs(low, high, more.pop("discrete", 0))
    actor = actor_distribution_network.ActorDistributionNetwork(
        observation, action, fc_layer_params=(16, 8), activation_fn=tf.keras.activations.relu
    )
    return reinforce_agent.ReinforceAgent(
        time, action, actor_network=actor, optimizer=tf.keras.optimizers.Adam(1e-3), **more
    )


def _dqn() -> Any:
    import tensorflow as tf
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.networks import q_network

    observation, action, time = _specs(0, 1, 3)
    network = q_network.QNetwork(observation, action, fc_layer_params=(16, 8))
    return dqn_agent.DqnAgent(time, action, q_network=network, optimizer=tf.keras.optimizers.Adam(1e-3))


AGENTS: dict[str, tuple[Any, Any, Any, dict[str, str]]] = {
    "ppo_tanh": (lambda lo, hi: _ppo("ppo", lo, hi), -2, 2, {"activation": "tanh"}),
    "ppo_relu": (lambda lo, hi: _ppo("ppo", lo, hi, activation="relu"), -2, 2, {"activation": "relu"}),
    "ppo_plain": (
        lambda lo, hi: _ppo("ppo", lo, hi, normalize_observations=False), -2, 2, {"activation": "tanh"},
    ),
    "ppo_clip": (lambda lo, hi: _ppo("clip", lo, hi), -1, 3, {"activation": "tanh"}),
    "ppo_rows": (lambda lo, hi: _ppo("ppo", lo, hi), [-1, -2], [3, 2], {"activation": "tanh"}),
    "ppo_discrete": (lambda lo, hi: _ppo("ppo", lo, hi, discrete=4), 0, 3, {}),
    "sac": (_sac, -1, 3, {}),
    "sac_exp": (lambda lo, hi: _sac(lo, hi, projection="std_transform"), -2, 2, {}),
    "sac_normal": (lambda lo, hi: _sac(lo, hi, projection="normal"), -2, 2, {}),
    "sac_tanh": (lambda lo, hi: _sac(lo, hi, activation="tanh"), -2, 2, {"activation": "tanh"}),
    "td3": (lambda lo, hi: _td3("td3", lo, hi), -2, 2, {}),
    "td3_rows": (lambda lo, hi: _td3("td3", lo, hi), [-1, -2], [3, 2], {}),
    "td3_tanh": (lambda lo, hi: _td3("td3", lo, hi, "tanh"), -2, 2, {"activation": "tanh"}),
    "ddpg": (lambda lo, hi: _td3("ddpg", lo, hi), -1, 3, {}),
    "reinforce": (_reinforce, -2, 2, {}),
    "reinforce_normalized": (lambda lo, hi: _reinforce(lo, hi, normalize_returns=True), -2, 2, {}),
    "reinforce_discrete": (lambda lo, hi: _reinforce(lo, hi, discrete=4), 0, 3, {}),
    "dqn": (lambda _lo, _hi: _dqn(), 0, 2, {}),
}  # fmt: skip
FORMS = ("policy", "checkpointer", "bare")


def _prepared(name: str) -> Any:
    make, low, high, _ = AGENTS[name]
    agent = make(low, high)
    agent.initialize()
    everything = [*agent.policy.variables(), *agent.collect_policy.variables()]
    scramble(everything)
    normalizer = getattr(agent, "_observation_normalizer", None)
    if normalizer is not None:
        normalizer.update(np.asarray(observations() * 3 + 1))
    return agent


def _actions(agent: Any) -> np.ndarray:
    import tensorflow as tf
    from tf_agents.policies import greedy_policy
    from tf_agents.trajectories import time_step as ts

    policy = greedy_policy.GreedyPolicy(agent.policy)
    obs = tf.constant(observations())
    action = policy.action(ts.restart(obs, batch_size=len(obs)), policy.get_initial_state(len(obs))).action
    return np.asarray(action)


def _save(agent: Any, form: str, path: Path) -> str:
    import tensorflow as tf
    from tf_agents.policies import greedy_policy, policy_saver
    from tf_agents.utils import common

    if form == "policy":
        policy_saver.PolicySaver(greedy_policy.GreedyPolicy(agent.policy)).save(str(path))
        return str(path)
    if form == "collect":
        policy_saver.PolicySaver(agent.collect_policy).save(str(path))
        return str(path)
    step = tf.compat.v1.train.get_or_create_global_step()
    if form == "checkpointer":
        common.Checkpointer(
            str(path), max_to_keep=1, agent=agent, policy=agent.policy, global_step=step
        ).save(0)
        return str(path)
    return str(tf.train.Checkpoint(agent=agent).write(str(path / "ckpt")))


def main(folder: Path, expected: str = "") -> None:
    """Write every agent in every form, and a document of each."""
    np.save(folder / "obs.npy", observations())
    for name, (_, low, high, known) in AGENTS.items():
        if expected not in name:
            continue
        agent = _prepared(name)
        truth = _actions(agent)
        for form in FORMS:
            title = f"tfagents_{name}_{form}"
            file = _save(agent, form, folder / title)
            np.save(folder / f"{title}.npy", truth)
            rows = [np.broadcast_to(np.asarray(bound, float), (ACT,)).tolist() for bound in (low, high)]
            document = {"library": "tf_agents", "file": file, "low": rows[0], "high": rows[1], "env": None}
            document |= {"known": list(known.items()), "return": None}
            (folder / f"{title}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
