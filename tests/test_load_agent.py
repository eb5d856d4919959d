"""`load_agent`: the object acts as Stable-Baselines3's own model does, and as `eval` plays."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import EnvironmentMismatchError, UnsupportedError, UsageError
from tests import warm_sb3
from tests.conftest import TF_SAMPLE

pytestmark = [pytest.mark.torch, pytest.mark.environment]
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("stable_baselines3") is None, reason="needs stable-baselines3"
)
SAMPLE = str(TF_SAMPLE)

# Agents of Stable-Baselines3 in an environment of this program, what they predict for 200 observations, and
# their logits, Q-values and state values.
MADE = """
import json, sys
import gymnasium, numpy as np, stable_baselines3 as sb3, torch
from gymnasium import spaces

folder = sys.argv[1]

class Task(gymnasium.Env):
    observation_space = spaces.Box(-5, 5, (3,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}

net = lambda: dict(policy_kwargs=dict(net_arch=[7, 5], activation_fn=torch.nn.ELU), device="cpu", seed=3)
one, two = spaces.Discrete(5), spaces.MultiDiscrete([2, 4, 3])
box = spaces.Box(np.float32([-2, 0]), np.float32([2, 3]))
made = {
    "dqn": sb3.DQN("MlpPolicy", Task(one), buffer_size=8, **net()),
    "ppo": sb3.PPO("MlpPolicy", Task(one), **net()),
    "several": sb3.PPO("MlpPolicy", Task(two), **net()),
    "a2c": sb3.A2C("MlpPolicy", Task(one), **net()),
    "td3": sb3.TD3("MlpPolicy", Task(box), buffer_size=8, **net()),
    "sac": sb3.SAC("MlpPolicy", Task(box), buffer_size=8, **net()),
    "ppo_box": sb3.PPO("MlpPolicy", Task(box), **net()),
    "a2c_box": sb3.A2C("MlpPolicy", Task(box), **net()),
    "ppo_sde": sb3.PPO("MlpPolicy", Task(box), use_sde=True, **net()),
    "sac_sde": sb3.SAC("MlpPolicy", Task(box), use_sde=True, buffer_size=8, **net()),
}
for name in ("ppo_box", "a2c_box"):
    made[name].policy.log_std.data = torch.tensor([-1.5, 0.4])
# Deviations beyond both limits, as well as within.
made["sac"].actor.log_std.bias.data = torch.tensor([-19.9, 1.9])
obs = np.random.default_rng(5).normal(size=(200, 3)).astype("f4")
answer = {"obs": obs.tolist()}
for name, model in made.items():
    model.save(f"{folder}/{name}.zip")
    with torch.no_grad():
        given, policy = torch.as_tensor(obs), model.policy
        scores = values = qs = None
        if name == "dqn":
            scores = policy.q_net(given)
        elif hasattr(policy, "predict_values"):
            values = policy.predict_values(given)[:, 0]
            found = policy.get_distribution(given).distribution
            if name in ("ppo", "a2c"):
                scores = found.logits
        else:
            qs = torch.cat(policy.critic(given, torch.zeros(200, 2)), 1)
        drawn = {}
        noise = torch.as_tensor(np.random.default_rng([9, 2]).standard_normal((200, 2)), dtype=torch.float32)
        asked = torch.as_tensor(np.random.default_rng(2).uniform(-0.9, 0.9, (200, 2)), dtype=torch.float32)
        if name in ("ppo_box", "a2c_box"):
            dist = policy.get_distribution(given).distribution
            sample = np.clip((dist.mean + dist.stddev * noise).numpy(), box.low, box.high)
            drawn = {"mean": dist.mean, "std": dist.stddev, "sample": sample}
            drawn["log_prob"] = dist.log_prob(asked).sum(1)
        elif name == "sac":
            mean, log_std, _ = policy.actor.get_action_dist_params(given)
            dist = policy.actor.action_dist.proba_distribution(mean, log_std)
            sample = policy.unscale_action(torch.tanh(mean + log_std.exp() * noise).numpy())
            std = dist.distribution.stddev
            drawn = {"mean": mean, "std": std, "sample": sample, "log_prob": dist.log_prob(asked)}
        drawn = {n: v.tolist() for n, v in drawn.items()}
    answer[name] = {
        **drawn,
        "actions": model.predict(obs, deterministic=True)[0].tolist(),
        "first": model.predict(obs[0], deterministic=True)[0].tolist(),
        **{n: v.tolist() for n, v in (("scores", scores), ("values", values), ("qs", qs)) if v is not None},
    }
json.dump(answer, open(f"{folder}/answer.json", "w"))
print("null")
"""
NAMES = ("dqn", "ppo", "several", "a2c", "td3", "sac", "ppo_box", "a2c_box", "ppo_sde", "sac_sde")
GAUSSIAN = ("sac", "ppo_box", "a2c_box")


@pytest.fixture(scope="module")
def saved_agents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("agents")
    warm_sb3.built(MADE, folder)
    return folder, json.loads((folder / "answer.json").read_text())


@needs_library
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_an_agent_acts_as_its_library_does(
    saved_agents: tuple[Path, dict[str, Any]], name: str, backend: str
) -> None:
    folder, answer = saved_agents
    obs, expected = np.array(answer["obs"], np.float32), answer[name]
    with ckpttool.load_agent(str(folder / f"{name}.zip"), backend=backend) as agent:
        actions, state = agent.predict(obs)
        assert state is None
        np.testing.assert_allclose(actions, expected["actions"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(agent.act(obs), actions)
        first = agent.act(obs[0])
        assert np.shape(first) == np.shape(expected["first"])
        np.testing.assert_allclose(first, expected["first"], rtol=1e-5, atol=1e-6)
        assert agent.action_space.contains(first.astype(agent.action_space.dtype))
        assert agent.observation_space.low.tolist() == [-5] * 3
        assert agent.observation_space.high.tolist() == [5] * 3
        assert (actions.dtype == np.int64) == (agent.choices is not None)
        if "values" in expected:
            np.testing.assert_allclose(agent.value(obs), expected["values"], rtol=1e-5, atol=1e-6)
        if "qs" in expected:
            values = agent.q_values(obs, np.zeros((200, 2)))
            np.testing.assert_allclose(values, expected["qs"], rtol=1e-5, atol=1e-6)
        if "scores" in expected:
            # The library's logits are normalised to probabilities of sum 1.
            own_scores, reference = agent.scores(obs), np.array(expected["scores"])
            if name != "dqn":
                own_scores = own_scores - np.logaddexp.reduce(own_scores, axis=-1, keepdims=True)
            np.testing.assert_allclose(own_scores, reference, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("backend", ["numpy", "torch", "onnxruntime"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_a_gaussian_policy_draws_from_the_distribution_of_its_library(
    saved_agents: tuple[Path, dict[str, Any]], name: str, backend: str
) -> None:
    folder, answer = saved_agents
    obs, expected = np.array(answer["obs"], np.float32), answer[name]
    agent = ckpttool.load_agent(str(folder / f"{name}.zip"), backend=backend)
    mean, std = agent.distribution(obs)
    np.testing.assert_allclose(mean, expected["mean"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(std, expected["std"], rtol=1e-5, atol=1e-12)
    # The density of the library: normal, and for SAC that of tanh of a normal number.
    asked_actions = np.random.default_rng(2).uniform(-0.9, 0.9, (200, 2)).astype("f4").astype("f8")
    raw = np.arctanh(asked_actions) if name == "sac" else asked_actions
    log_density = -0.5 * ((raw - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    squashed = np.log(1 - asked_actions**2 + 1e-6) if name == "sac" else 0
    shown = (log_density - squashed).sum(axis=1)
    np.testing.assert_allclose(shown, expected["log_prob"], rtol=1e-4)
    # The same noise gives the library's action.
    agent.seed(9)
    np.testing.assert_allclose(agent.act(obs, deterministic=False), expected["sample"], rtol=1e-4, atol=1e-5)
    agent.seed(9)
    single, _ = agent.predict(obs[0], deterministic=False)
    np.testing.assert_allclose(single, expected["sample"][0], rtol=1e-4, atol=1e-5)


@needs_library
@pytest.mark.parametrize(
    ("name", "words"), [("td3", "deterministic"), ("ppo_sde", "gSDE"), ("sac_sde", "gSDE")]
)
def test_policies_without_a_deviation_of_their_own_are_not_sampled(
    saved_agents: tuple[Path, dict[str, Any]], name: str, words: str
) -> None:
    agent = ckpttool.load_agent(str(saved_agents[0] / f"{name}.zip"))
    for call in (agent.distribution, lambda obs: agent.act(obs, deterministic=False)):
        with pytest.raises(UnsupportedError, match=words):
            call(np.zeros(3, np.float32))


@needs_library
@pytest.mark.parametrize("name", ["dqn", "several", "ppo"])
@pytest.mark.parametrize("to", ["torch", "tf", "keras", "onnx"])
def test_discrete_agents_act_the_same_after_a_conversion(
    saved_agents: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, to: str
) -> None:
    folder, answer = saved_agents
    obs = np.array(answer["obs"], np.float32)
    target = str(tmp_path / {"keras": "a.weights.h5", "torch": "a.pt", "onnx": "a.onnx"}.get(to, "a"))
    done = ckpttool.convert(str(folder / f"{name}.zip"), target, to=to)
    assert done.written
    if to == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        scores, actions = onnxruntime.InferenceSession(target).run(None, {"obs": obs})
        actions = actions[:, 0] if name != "several" else actions
        assert scores.shape == (200, 9 if name == "several" else 5)
    else:
        actions = ckpttool.load_agent(target).act(obs)
    np.testing.assert_array_equal(actions, answer[name]["actions"])


@needs_library
@pytest.mark.parametrize("name", ["dqn", "ppo", "td3"])
def test_an_agent_is_compared_with_its_own_onnx_file(
    saved_agents: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    """The file holds one network, which its receipt names; a Q-network's values are compared."""
    pytest.importorskip("onnx")
    source, target = str(saved_agents[0] / f"{name}.zip"), str(tmp_path / "a.onnx")
    ckpttool.convert(source, target, to="onnx")
    for order in ((source, target), (target, source)):
        verification = ckpttool.verify(*order)
        first = {"dqn": "critic/q1" if order[0] == source else "actor"}.get(name, "actor")
        assert [(network.name, network.within) for network in verification.networks] == [(first, True)]
        assert verification.within
    if name == "dqn":
        assert verification.networks[0].n == 1000
        other = ckpttool.verify(str(saved_agents[0] / "ppo.zip"), target)  # a policy of the same sizes
        assert not other.within


@needs_library
def test_another_first_action_is_that_of_the_space(
    saved_agents: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Stable-Baselines3 has no other first action; a sidecar can state one."""
    folder, answer = saved_agents
    target = tmp_path / "a.pt"
    ckpttool.convert(str(folder / "ppo.zip"), str(target), to="torch")
    receipt = tmp_path / "a.pt.ckpttool.json"
    stated = json.loads(receipt.read_text())
    stated["choices"]["starts"] = [-2]
    receipt.write_text(json.dumps(stated))
    agent = ckpttool.load_agent(str(target))
    assert agent.action_space.start == -2
    np.testing.assert_array_equal(
        agent.act(np.array(answer["obs"], np.float32)), np.array(answer["ppo"]["actions"]) - 2
    )


@needs_library
def test_a_discrete_agent_needs_an_environment_of_its_actions(
    saved_agents: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = saved_agents
    for env in ("Pendulum-v1", "CartPole-v1"):  # continuous actions; two discrete ones instead of five
        with pytest.raises(EnvironmentMismatchError):
            ckpttool.load_agent(str(folder / "dqn.zip"), env)


@needs_library
def test_the_librarys_own_evaluation_takes_the_agent(corpus: Path) -> None:
    path = corpus / "torch/sb3_zoo/dqn/CartPole-v1_1/CartPole-v1.zip"
    program = """
import json, sys
import gymnasium, ckpttool
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
agent = ckpttool.load_agent(sys.argv[1])
env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
print(json.dumps(evaluate_policy(agent, env, n_eval_episodes=4, return_episode_rewards=True)[0]))
"""
    assert warm_sb3.run_program(program, str(path)) == [500.0] * 4
    played = ckpttool.evaluate(str(path), protocol=ckpttool.Protocol(episodes=4))
    assert played.rollout.returns.tolist() == [500.0] * 4


@needs_library
def test_tensors_stay_tensors(saved_agents: tuple[Path, dict[str, Any]]) -> None:
    import torch

    folder, answer = saved_agents
    obs = np.array(answer["obs"], np.float32)
    for backend in ("numpy", "torch"):
        for name in ("sac", "dqn"):
            agent = ckpttool.load_agent(str(folder / f"{name}.zip"), backend=backend)
            actions = agent.act(torch.from_numpy(obs))
            assert isinstance(actions, torch.Tensor)
            np.testing.assert_allclose(actions.numpy(), agent.act(obs), rtol=1e-6, atol=1e-6)
            assert agent.act(torch.from_numpy(obs[0])).shape == agent.act(obs[0]).shape


@needs_library
def test_on_the_agents_device_nothing_is_copied(saved_agents: tuple[Path, dict[str, Any]]) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    folder, answer = saved_agents
    agent = ckpttool.load_agent(str(folder / "sac.zip"), backend="torch")
    obs = torch.tensor(answer["obs"], dtype=torch.float32)
    agent.act(obs)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        agent.act(obs)
    assert not {event.key for event in profiler.key_averages()} & {"aten::_to_copy", "aten::item"}


def test_an_agent_without_bounds_names_what_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "ckpt-15000"
    for part in Path(TF_SAMPLE).parent.glob("ckpt-15000.*"):
        if not part.name.endswith(".json"):
            (tmp_path / part.name).write_bytes(part.read_bytes())
    with pytest.raises(UsageError) as caught:
        ckpttool.load_agent(str(target))
    assert "env='Pendulum-v1'" in str(caught.value.hint)
    agent = ckpttool.load_agent(str(target), "Pendulum-v1")
    assert agent.action_space.high.tolist() == [2.0]
    assert any("action bounds" in sentence for sentence in agent.assumed)


def test_observations_of_another_shape_are_refused() -> None:
    agent = ckpttool.load_agent(SAMPLE)
    for shape in ((4,), (2, 4), (), (1, 2, 3)):
        with pytest.raises(EnvironmentMismatchError):
            agent.act(np.zeros(shape, np.float32))
    with pytest.raises(UnsupportedError):
        agent.predict(np.zeros(3), deterministic=False)
    with pytest.raises(UsageError):
        agent.scores(np.zeros(3))
    with pytest.raises(UsageError):
        agent.value(np.zeros(3))


def test_a_closed_agent_does_not_act() -> None:
    with ckpttool.load_agent(SAMPLE) as agent:
        agent.act(np.zeros(3))
    with pytest.raises(UsageError):
        agent.act(np.zeros(3))


def test_no_call_of_a_closed_agent_computes_anything() -> None:
    import torch

    obs, actions = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    agent = ckpttool.load_agent(SAMPLE, backend="torch")
    calls = (
        lambda: agent.act(torch.zeros(2, 3)),
        lambda: agent.predict(obs),
        lambda: agent.q_values(obs, actions),
    )
    for call in calls:
        call()
    agent.close()
    for call in calls:
        with pytest.raises(UsageError):
            call()


def test_facts_include_the_choices_of_the_environment(tmp_path: Path) -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    torch.save(net.state_dict(), tmp_path / "q_net.pt")
    facts = ckpttool.AgentFacts(activations="relu")
    with ckpttool.load_agent(str(tmp_path / "q_net.pt"), "CartPole-v1", facts=facts) as agent:
        assert agent.choices is not None
        assert agent.facts.choices == agent.choices.document()
        assert agent.facts.head == "argmax"


def test_several_threads_get_the_actions_of_their_own_observations() -> None:
    agent = ckpttool.load_agent(SAMPLE)
    rows = np.random.default_rng(0).normal(size=(8, 50, 3)).astype(np.float32)
    expected = [agent.act(row) for row in rows]
    result: dict[int, list[np.ndarray]] = {}

    def work(number: int) -> None:
        result[number] = [agent.act(rows[number]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, every in result.items():
        for actions in every:
            np.testing.assert_array_equal(actions, expected[number])


@pytest.mark.parametrize(
    "more",
    [
        {"noise": 0.1},
        {"wrappers": ("RescaleAction:min_action=-1,max_action=1",)},
        {"wrappers": ("ActionNoiseWrapper",)},
        {"wrappers": ("ActionSmoothingWrapper",)},
        {"wrappers": ("HistoryWrapper",)},
    ],
    ids=str,
)
def test_what_needs_continuous_actions_is_refused_for_discrete_ones(
    more: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    width = 10 if "HistoryWrapper" in str(more) else 4
    torch.save(torch.nn.Sequential(torch.nn.Linear(width, 2)).state_dict(), tmp_path / "q_net.pt")
    facts = ckpttool.AgentFacts(activations="relu")
    with pytest.raises((UsageError, UnsupportedError), match="actions"):
        ckpttool.evaluate(
            str(tmp_path / "q_net.pt"), "CartPole-v1", ckpttool.Protocol(episodes=1, **more), facts=facts
        )


def test_a_linear_q_network_plays(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    torch.save(net.state_dict(), tmp_path / "q_net.pt")
    evaluation = ckpttool.evaluate(str(tmp_path / "q_net.pt"), "CartPole-v1", ckpttool.Protocol(episodes=3))
    assert any("argmax" in sentence for sentence in evaluation.assumed)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    expected = net(torch.from_numpy(obs)).argmax(1).numpy()
    np.testing.assert_array_equal(
        ckpttool.load_agent(str(tmp_path / "q_net.pt"), "CartPole-v1").act(obs), expected
    )


# The library's own model of each zoo agent, and its actions for 200 observations, normalised as in training.
ZOO = """
import json, pickle, sys
import numpy as np, stable_baselines3 as sb3
from pathlib import Path

# Files of Gym's time name its modules; Gymnasium's have the same classes.
import gymnasium
for name in ("", ".spaces", ".spaces.box", ".spaces.discrete", ".spaces.space"):
    sys.modules["gym" + name] = __import__("importlib").import_module("gymnasium" + name)
classes = {name: getattr(sb3, name.upper()) for name in ("a2c", "ddpg", "dqn", "ppo", "sac", "td3")}
answer = {}
for file in json.loads(sys.argv[1]):
    algorithm = Path(file).parent.parent.name
    if algorithm not in classes:
        continue
    # Schedules and buffers of these old files are functions by value, which other versions cannot load.
    known = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    model = classes[algorithm].load(file, device="cpu", custom_objects=known)
    shape = model.observation_space.shape
    obs = np.random.default_rng(3).normal(size=(200, *shape)).astype("f4")
    statistics = Path(file).with_suffix("") / "vecnormalize.pkl"
    given = obs
    if statistics.exists():
        with statistics.open("rb") as stream:
            norm = pickle.load(stream)
        if norm.norm_obs:
            given = norm.normalize_obs(obs)
    answer[file] = [obs.tolist(), model.predict(given, deterministic=True)[0].tolist()]
print(json.dumps(answer))
"""


@needs_library
@pytest.mark.corpus
def test_the_agents_of_the_zoo_predict_as_their_library(corpus: Path) -> None:
    files = [str(path) for path in sorted((corpus / "torch/sb3_zoo").glob("*/*/*.zip"))]
    answer = warm_sb3.run_program(ZOO, json.dumps(files))
    assert len(answer) >= 15
    for file, (obs, known) in answer.items():
        for backend in ("numpy", "torch"):
            agent = ckpttool.load_agent(file, backend=backend)
            actions, _ = agent.predict(np.array(obs, np.float32))
            # Rounding is relative to the mean before it is limited, which is up to ten times the action.
            scale = max(1.0, float(np.abs(known).max()))
            np.testing.assert_allclose(actions, known, rtol=0, atol=1e-5 * scale, err_msg=f"{file} {backend}")
