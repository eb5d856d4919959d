"""The networks of restored agents as Keras models, in a process without PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def compare(folder: Path) -> dict[str, Any]:
    """Compare the models of the agents in paths.json with the agents themselves."""
    return {path: _compare(path) for path in json.loads((folder / "paths.json").read_text())}


def compare_steps(folder: Path) -> dict[str, Any]:
    """Compare the models of a policy with memory, over two steps, and of one with images."""
    import numpy as np
    import tensorflow as tf

    import ckpttool

    differences = {}
    for path in map(str, sorted(folder.glob("*_agent.*"))):
        agent = ckpttool.load_agent(path)
        shape = agent.observation_space.shape
        obs = np.random.default_rng(0).integers(0, 255, (5, *shape)).astype(np.float32)
        if len(shape) == 1:
            obs = obs / 128 - 1
        model = next(iter(agent.networks("tensorflow").values()))
        known, after = (agent.scores(obs), None) if agent.choices else agent.predict(obs)
        pairs, states = [], [np.zeros_like(array) for array in after or ()]
        with tf.GradientTape() as tape:
            output, *states = model(obs, *states) if states else [model(obs)]
            pairs += [(output, known), *zip(states, after or (), strict=True)]
            if states:
                output, *states = model(obs, *states)
                pairs.append((output, agent.predict(obs, after)[0]))
            loss = tf.reduce_sum(output)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        differences[Path(path).stem] = {
            "apart": max(float(np.abs(variable.numpy() - own).max()) for variable, own in pairs),
            "compared": len(pairs),
            "gradients": all(gradient is not None for gradient in gradients),
        }
    return differences


def _compare(path: str) -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    import ckpttool

    agent = ckpttool.load_agent(path)
    width = sum(agent.observation_space.shape)
    obs = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32)
    modules = agent.networks("tensorflow")
    actor = modules["actor"]
    gaussian = path.endswith(("ppo_box.zip", "sac.zip"))
    with tf.GradientTape() as tape:
        output = actor(obs)
        loss = tf.reduce_sum(output)
        if gaussian:
            mean, deviation = actor.distribution(obs)
            loss = tf.reduce_sum(mean) + tf.reduce_sum(tf.math.log(deviation))
    weights = actor.trainable_variables
    gradients = tape.gradient(loss, [weight.value for weight in weights])
    known = agent.scores(obs) if agent.choices is not None else agent.act(obs)
    stored = {leaf.array().tobytes() for _, leaf in ckpttool.open(path).tree.tensors()}
    arrays = [weight.numpy() for weight in weights]
    holds = {
        "weights": all(a.tobytes() in stored or a.T.tobytes() in stored for a in arrays),
        "gradients": all(gradient is not None for gradient in gradients),
        "model": isinstance(actor, keras.Model),
    }
    critic = 0.0
    if "critic_1" in modules:
        actions = np.zeros((9, sum(agent.action_space.shape)), np.float32)
        values = modules["critic_1"](obs, actions).numpy()
        expected = agent.q_values(obs, actions)[:, :1]
        critic = float(np.abs(values - expected).max() / max(1.0, np.abs(expected).max()))
    if gaussian:
        pairs = zip((mean, deviation), agent.distribution(obs), strict=True)
        holds["distribution"] = all(np.allclose(a, b, 1e-5, 1e-6) for a, b in pairs)
    keras.optimizers.SGD(0.1).apply(gradients, weights)
    holds["trained"] = not np.allclose(actor(obs).numpy(), known, 1e-5, 1e-5)
    holds["separate"] = np.array_equal(agent.act(obs), ckpttool.load_agent(path).act(obs))
    return {"apart": float(np.abs(output.numpy() - known).max()), "critic": critic, "holds": holds}


def run_code(folder: Path) -> dict[str, float]:
    """Run the code beside each converted agent; return how far its actions are from the agent's."""
    import runpy

    import numpy as np

    apart = {}
    for name, file in json.loads((folder / "code.json").read_text()).items():
        arrays = np.load(folder / f"{name}.obs.npz")
        code = runpy.run_path(str(folder / f"{name}.py"))
        actions = code["act"](code["load"](file), arrays["obs"])
        assert actions.shape == arrays["actions"].shape
        assert actions.dtype == arrays["actions"].dtype
        apart[name] = float(np.abs(actions - arrays["actions"]).max() / max(1.0, np.abs(actions).max()))
    return apart
