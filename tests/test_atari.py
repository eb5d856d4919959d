"""Atari agents and the preprocessing of their games: as Stable-Baselines3's and CleanRL's code has it."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool import load_agent
from ckpttool.commands.evaluate import evaluate
from ckpttool.core import CkpttoolError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.core.installation import install_extra
from ckpttool.evaluation import environments, gymnasium_engine, wrappers
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.wrappers import WrapperSpec
from tests.conftest import in_process

pytestmark = pytest.mark.environment
PONG, INVADERS = "PongNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4"
needs_games = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("ale_py", "cv2", "stable_baselines3"))),
    reason="ale-py, OpenCV or Stable-Baselines3 is not installed",
)
ACTIONS, ATOMS = 6, 11


# CleanRL's agents: the modules of dqn_atari.py, c51_atari.py and ppo_atari.py.


def image_modules() -> list[nn.Module]:
    convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    return [*convolutions, nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 24), nn.ReLU()]


class QNetwork(nn.Module):
    def __init__(self, outputs: int, *more: nn.Module) -> None:
        super().__init__()
        self.network = nn.Sequential(*image_modules(), *more, nn.Linear(24, outputs))


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*image_modules())
        self.actor, self.critic = nn.Linear(24, ACTIONS), nn.Linear(24, 1)


def save_cleanrl(kind: str, path: Path) -> tuple[str, Any]:
    """Save a script's agent; return the path, and the function from images to the scores of the actions."""
    torch.manual_seed(0)
    if kind == "ppo":
        agent = PolicyAndValue()
        torch.save(agent.state_dict(), path)
        return str(path), lambda images: agent.actor(agent.network(images / 255.0))
    network = QNetwork(ACTIONS * ATOMS if kind == "c51" else ACTIONS)
    if kind == "dqn":
        torch.save(network.state_dict(), path)
        return str(path), lambda images: network.network(images / 255.0)
    atoms = torch.linspace(-10, 10, ATOMS)
    network.register_buffer("atoms", atoms)
    torch.save({"model_weights": network.state_dict(), "args": {"env_id": PONG, "n_atoms": ATOMS}}, path)
    return str(path), lambda images: (
        network.network(images / 255.0).view(len(images), ACTIONS, ATOMS).softmax(2) * atoms
    ).sum(2)


@pytest.mark.parametrize("kind", ["dqn", "c51", "ppo"])
def test_cleanrl_scripts_choose_the_same_actions(kind: str, tmp_path: Path) -> None:
    path, score = save_cleanrl(kind, tmp_path / "a.cleanrl_model")
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), dtype=np.uint8)
    agent = load_agent(path)
    with torch.no_grad():
        expected = score(torch.tensor(images)).numpy()
    np.testing.assert_allclose(agent.scores(images), expected, atol=1e-5)
    np.testing.assert_array_equal(agent.predict(images)[0], expected.argmax(1))
    assert sum("image encoder" in entry.value for entry in agent.ledger if entry.use == "assumed") == 1
    assert not any("without weights" in entry.value for entry in agent.ledger)
    ran = in_process("inspect", path, "--json")
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("change", ["more modules", "kernel", "input"])
def test_other_networks_of_images_are_refused(change: str, tmp_path: Path) -> None:
    network = QNetwork(ACTIONS, nn.Linear(24, 24), nn.ReLU())
    if change != "more modules":
        network = QNetwork(ACTIONS)
        network.network[4] = nn.Conv2d(64, 64, 5 if change == "kernel" else 3, 1)
        network.network[7] = nn.Linear(64 * (25 if change == "kernel" else 36), 24)
    torch.save(network.state_dict(), tmp_path / "a.cleanrl_model")
    with pytest.raises(UnsupportedError):
        load_agent(str(tmp_path / "a.cleanrl_model"))


def test_the_value_of_shared_images_is_not_run(tmp_path: Path) -> None:
    path, _ = save_cleanrl("ppo", tmp_path / "a.cleanrl_model")
    with pytest.raises(UnsupportedError):
        load_agent(path).networks("torch", "value")


# Stacked images, in the order of each library.


@pytest.fixture
def pictures() -> Iterator[Any]:
    """Register environments of images with the channels last, first, and without an axis for them."""
    gymnasium = pytest.importorskip("gymnasium")
    names = {}
    for word, shape in (("Last", (5, 4, 2)), ("First", (2, 5, 4)), ("Grey", (5, 4))):

        class Picture(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
            action_space = gymnasium.spaces.Discrete(2)
            size = shape

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                return self.np_random.integers(0, 256, self.size, np.uint8), {}

            def step(self, _: Any) -> Any:
                return self.np_random.integers(0, 256, self.size, np.uint8), 0.0, False, False, {}

        names[word] = f"Picture{word}-v0"
        gymnasium.register(names[word], Picture)
    yield names
    for name in names.values():
        del gymnasium.registry[name]


def stacks(env: str, wrapper: WrapperSpec) -> list[np.ndarray]:
    """Return the observations of the second row: two episodes of four steps."""
    observed = []
    with environments.make_vector_env(env, 2, wrappers=[wrapper]) as vector:
        rows = np.arange(2)
        for seed in (3, 4):
            vector.reset(rows, np.array([9, seed]))
            observed.append(np.array(vector.obs[1]))
            for _ in range(4):
                vector.step(np.zeros((2, 1), np.int64), rows)
                observed.append(np.array(vector.obs[1]))
        assert vector.spec.shapes == {"obs": observed[0].shape}
    return observed


@pytest.mark.parametrize("layout", ["Last", "First", "Grey"])
def test_stacked_images_are_those_of_vec_frame_stack(pictures: Mapping[str, str], layout: str) -> None:
    library = pytest.importorskip("stable_baselines3.common.vec_env")
    gymnasium = importlib.import_module("gymnasium")
    vector = library.VecFrameStack(library.DummyVecEnv([lambda: gymnasium.make(pictures[layout])]), 3)
    expected = []
    for seed in (3, 4):
        vector.seed(seed)
        expected.append(vector.reset()[0].copy())
        expected += [vector.step(np.array([0]))[0][0].copy() for _ in range(4)]
    observed = stacks(pictures[layout], WrapperSpec("VecFrameStack", {"n_stack": 3}))
    np.testing.assert_array_equal(observed, expected)


def test_bounds_of_stacked_grids_are_those_of_vec_frame_stack() -> None:
    stacked = pytest.importorskip("stable_baselines3.common.vec_env.stacked_observations")
    gymnasium = importlib.import_module("gymnasium")
    low = np.arange(6.0).reshape(2, 3)
    env = SimpleNamespace(
        observation_space=gymnasium.spaces.Box(low, low + 9, dtype=np.float64),
        action_space=gymnasium.spaces.Discrete(2),
    )
    wrapper = wrappers.FrameStack(gymnasium_engine.describe_env(env), 1, 2, repeat_bounds=True)
    space = stacked.StackedObservations(1, 2, env.observation_space).stacked_observation_space
    np.testing.assert_array_equal(wrapper.spec.observation_bounds["obs"], (space.low, space.high))


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_stacked_images_are_those_of_gymnasium(pictures: Mapping[str, str], padding: str) -> None:
    gymnasium = importlib.import_module("gymnasium")
    inner = gymnasium.make(pictures["Grey"])
    env = gymnasium.wrappers.FrameStackObservation(inner, 3, padding_type=padding)
    expected = []
    for seed in (3, 4):
        expected.append(env.reset(seed=seed)[0])
        expected += [env.step(0)[0] for _ in range(4)]
    arguments = {"stack_size": 3, "padding_type": padding}
    observed = stacks(pictures["Grey"], WrapperSpec("FrameStackObservation", arguments))
    np.testing.assert_array_equal(observed, expected)


def test_wrappers_of_rows_are_refused_around_images(pictures: Mapping[str, str]) -> None:
    for name in ("TimeFeatureWrapper", "NoopResetEnv", "MaxAndSkipEnv", "FireResetEnv"):
        with pytest.raises(UnsupportedError):
            environments.make_vector_env(pictures["Last"], 1, wrappers=[WrapperSpec(name, {})])
    outer = [WrapperSpec("VecFrameStack", {"n_stack": 2}), WrapperSpec("FireResetEnv", {})]
    with pytest.raises(UnsupportedError):
        environments.make_vector_env(pictures["Last"], 1, wrappers=outer)


# The wrappers of a game, on a game of numbers: its steps end at once, soon and late.


def make_game(ends: Sequence[int], library: Any) -> Any:
    """Return a game whose observations count its steps; its n-th episode has ends[n] steps."""

    class Game(library.Env):
        observation_space = library.spaces.Box(0, 255, (2, 2, 3), np.uint8)
        action_space = library.spaces.Discrete(4)

        def __init__(self) -> None:
            self.episode, self.calls = -1, []
            self.ale = SimpleNamespace(lives=lambda: 1)

        def get_action_meanings(self) -> list[str]:
            return ["NOOP", "FIRE", "RIGHT", "LEFT"]

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.episode, self.steps = self.episode + 1, 0
            return np.full((2, 2, 3), 200, np.uint8), {}

        def step(self, action: int) -> Any:
            self.calls.append(int(action))
            self.steps += 1
            ended = self.steps >= ends[min(self.episode, len(ends) - 1)]
            return np.full((2, 2, 3), 7 * self.steps % 199, np.uint8), float(action), ended, False, {}

    return Game()


@pytest.mark.parametrize("ends", [(1000,), (3, 1000), (40,), (2, 3, 4, 50)])
@pytest.mark.parametrize("sticky", [0.0, 0.5])
def test_steps_of_a_game_are_those_of_the_library(ends: Sequence[int], sticky: float) -> None:
    library = pytest.importorskip("stable_baselines3.common.atari_wrappers")
    gymnasium = importlib.import_module("gymnasium")
    monitor = importlib.import_module("stable_baselines3.common.monitor").Monitor
    chain: list[tuple[str, dict[str, Any]]] = [
        ("NoopResetEnv", {}),
        ("MaxAndSkipEnv", {}),
        ("FireResetEnv", {}),
    ]
    if sticky:
        chain.insert(0, ("StickyActionEnv", {"action_repeat_probability": sticky}))
    library_game, own_game = (make_game(ends, gymnasium) for _ in range(2))
    env: Any = monitor(library_game)
    for name, arguments in chain:
        env = getattr(library, name)(env, **arguments)
    specs = [WrapperSpec(name, arguments) for name, arguments in chain]
    games, _ = wrappers.split_game_wrappers(specs)
    wrapped = gymnasium_engine.wrap_game(own_game, games)
    np.testing.assert_array_equal(wrapped.reset(seed=5)[0], env.reset(seed=5)[0])
    total = 0.0
    for action in np.random.default_rng(0).integers(0, 4, 30).tolist():
        image, _, terminated, _, info = env.step(action)
        outcome = wrapped.step(action)
        total += outcome[1]
        np.testing.assert_array_equal(outcome[0], image)
        assert outcome[2] == terminated
        if terminated:
            assert total == info["episode"]["r"]
            break
    assert own_game.calls == library_game.calls


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setattr(environments, "is_atari_installed", lambda: False)
    monkeypatch.setattr(gymnasium_engine, "is_atari_installed", lambda: False)
    path, _ = save_cleanrl("dqn", tmp_path / "a.cleanrl_model")
    for env in ("ALE/Nothing-v5", "NothingNoFrameskip-v4"):
        with pytest.raises(MissingExtraError) as caught:
            evaluate(path, env)
        assert caught.value.hint == install_extra("atari")
    monkeypatch.setitem(sys.modules, "cv2", None)
    monkeypatch.setattr(gymnasium_engine.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError):
        gymnasium_engine.wrap_game(
            make_game((3,), importlib.import_module("gymnasium")), [(gymnasium_engine.WarpFrame, {})]
        )


# Real games.


@pytest.fixture(scope="module")
def invader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a DQN of random weights, whose choices depend on the image, and its path."""
    library = pytest.importorskip("stable_baselines3")
    torch.manual_seed(1)
    model = library.DQN("CnnPolicy", make_library_env(), buffer_size=2, device="cpu")
    for module in model.q_net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=2 / module.weight[0].numel() ** 0.5)
            nn.init.normal_(module.bias, std=0.1)
    path = tmp_path_factory.mktemp("atari") / "agent.zip"
    model.save(path)
    return model, path


def make_library_env(seed: int = 0, game: str = INVADERS, *, terminal: bool = False) -> Any:
    gymnasium_engine.register_games(game, ())
    env_util = importlib.import_module("stable_baselines3.common.env_util")
    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    env = env_util.make_atari_env(game, 1, wrapper_kwargs={"terminal_on_life_loss": terminal})
    env.seed(seed)
    return vec_env.VecFrameStack(env, 4)


CHAIN = (WrapperSpec("AtariWrapper", {}), WrapperSpec("VecFrameStack", {"n_stack": 4}))


@needs_games
@pytest.mark.slow
def test_frames_and_actions_are_those_of_the_library(invader: Any) -> None:
    model, path = invader
    library_env = make_library_env(7)
    whole = WrapperSpec("AtariWrapper", {"terminal_on_life_loss": False})
    obs = library_env.reset()
    agent = load_agent(str(path))
    chosen = []
    with environments.make_vector_env(INVADERS, 1, wrappers=(whole, CHAIN[1])) as own_env:
        row = np.arange(1)
        own_env.reset(row, np.array([7]))
        for _ in range(200):
            np.testing.assert_array_equal(np.asarray(own_env.obs), obs)
            action = model.predict(obs, deterministic=True)[0]
            np.testing.assert_array_equal(agent.predict(obs.transpose(0, 3, 1, 2))[0], action)
            chosen.append(int(action[0]))
            obs, _, done, _ = library_env.step(action)
            _, ended, _ = own_env.step(action[:, None], row)
            assert bool(done[0]) == bool(ended[0])
            if done[0]:
                break
    assert len(chosen) == 200
    assert len({*chosen}) > 1


@needs_games
@pytest.mark.parametrize("game", ["BreakoutNoFrameskip-v4", INVADERS])
def test_a_game_goes_on_after_a_lost_life_as_in_the_library(game: str) -> None:
    """The library's episode ends with a life: its stack is emptied, FIRE is pressed, the game goes on."""
    library_env = make_library_env(7, game, terminal=True)
    obs = library_env.reset()
    lives, total = 0, 0.0
    with environments.make_vector_env(game, 1, wrappers=CHAIN) as own_env:
        row = np.arange(1)
        own_env.reset(row, np.array([7]))
        for action in np.random.default_rng(1).integers(2, 4, 1500).tolist():
            np.testing.assert_array_equal(np.asarray(own_env.obs), obs)
            obs, _, done, info = library_env.step(np.array([action]))
            rewards, ended, _ = own_env.step(np.array([[action]]), row)
            total, over = total + float(rewards[0]), "episode" in info[0]
            lives += bool(done[0])
            assert bool(ended[0]) == over
            if over:
                assert total == info[0]["episode"]["r"]
                break
    assert over
    assert lives > 2


@needs_games
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"noop_max": 0},
        {"frame_skip": 1, "screen_size": 60},
        {"grayscale_newaxis": True},
        {"grayscale_obs": False},
    ],
)
def test_preprocessing_of_gymnasium_is_that_of_the_library(arguments: dict[str, Any]) -> None:
    gymnasium = importlib.import_module("gymnasium")
    gymnasium_engine.register_games(INVADERS, ())
    library_env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(INVADERS), **arguments)
    obs, images = library_env.reset(seed=3)[0], set()
    with environments.make_vector_env(
        INVADERS, 1, wrappers=[WrapperSpec("gymnasium.wrappers.AtariPreprocessing", arguments)]
    ) as own_env:
        own_env.reset(np.arange(1), np.array([3]))
        for action in np.random.default_rng(0).integers(0, 6, 60):
            np.testing.assert_array_equal(np.asarray(own_env.obs)[0], obs)
            obs, reward, ended, _, _ = library_env.step(int(action))
            rewards, over, _ = own_env.step(np.array([[action]]), np.arange(1))
            assert (float(rewards[0]), bool(over[0])) == (reward, ended)
            images.add(obs.tobytes())
    assert len(images) > 1


@needs_games
def test_an_agent_plays_behind_the_preprocessing_of_gymnasium(tmp_path: Path) -> None:
    path, _ = save_cleanrl("dqn", tmp_path / "a.cleanrl_model")
    chain = ("AtariPreprocessing", "FrameStackObservation:stack_size=4")
    result = evaluate(path, INVADERS, Protocol(episodes=1, wrappers=chain))
    assert result.rollout.lengths[0] > 20
    used = {entry.value for entry in result.ledger if entry.what == "wrapper" and entry.use == "used"}
    assert len(used) == len(chain)


@needs_games
@pytest.mark.parametrize(
    ("game", "arguments", "error"),
    [
        ("ALE/SpaceInvaders-v5", {}, UsageError),
        (INVADERS, {"scale_obs": True}, UnsupportedError),
        (INVADERS, {"noop_max": -1}, UsageError),
    ],
)
def test_other_preprocessing_of_gymnasium_is_refused(
    game: str, arguments: dict[str, Any], error: type[CkpttoolError]
) -> None:
    with pytest.raises(error):
        environments.make_vector_env(game, 1, wrappers=[WrapperSpec("AtariPreprocessing", arguments)])


@needs_games
@pytest.mark.slow
def test_returns_of_seeded_episodes_are_those_of_the_library(invader: Any) -> None:
    model, path = invader
    library = importlib.import_module("stable_baselines3.common.evaluation")
    expected = []
    for seed in (1000, 1001, 1002):
        env = make_library_env(seed, terminal=True)
        returns, _ = library.evaluate_policy(model, env, n_eval_episodes=1, return_episode_rewards=True)
        expected += returns
    result = evaluate(str(path), INVADERS, Protocol(episodes=3))
    assert result.rollout.returns.tolist() == expected
    assert len({*expected}) > 1
    assumed = " ".join(result.assumed)
    assert "AtariWrapper" in assumed
    assert "VecFrameStack" in assumed


@needs_games
def test_stated_preprocessing_is_used(invader: Any, tmp_path: Path) -> None:
    _, path = invader
    (tmp_path / "agent.zip").write_bytes(path.read_bytes())
    name = "stable_baselines3.common.atari_wrappers.AtariWrapper"
    (tmp_path / "config.yml").write_text(
        f"!!python/object/apply:collections.OrderedDict\n- - - env_wrapper\n    - - {name}\n"
        "  - - frame_stack\n    - 4\n  - - policy\n    - CnnPolicy\n"
    )
    ran = in_process("eval", tmp_path / "agent.zip", "--env", INVADERS, "--episodes", "1", "--json")
    assert ran.status == 0, ran.err
    ledger = [entry for entry in ran.json()["ledger"] if entry["what"] == "wrapper"]
    assert {entry["use"] for entry in ledger} == {"used"}
    assert all("config.yml" in entry["where"] for entry in ledger)


@needs_games
@pytest.mark.parametrize("kind", ["sb3", "cleanrl"])
def test_a_game_that_repeats_actions_itself_requires_wrappers(
    kind: str, invader: Any, tmp_path: Path
) -> None:
    path = str(invader[1]) if kind == "sb3" else save_cleanrl("dqn", tmp_path / "a.cleanrl_model")[0]
    with pytest.raises(UsageError) as caught:
        evaluate(path, "ALE/SpaceInvaders-v5")
    commands = str(caught.value.hint).split(", or, if its wrappers repeated actions too: ")
    assert len(commands) == 2
    command = shlex.split(commands[0])
    ran = in_process(*command[1:], "--episodes", "1", "--json")
    assert ran.status == 0, ran.err
    assert ran.json()["lengths"][0] > 20


@needs_games
def test_cleanrl_preprocessing_is_that_of_its_script(tmp_path: Path) -> None:
    path, _ = save_cleanrl("dqn", tmp_path / "a.cleanrl_model")
    library = importlib.import_module("stable_baselines3.common.atari_wrappers")
    gymnasium, cv2 = importlib.import_module("gymnasium"), importlib.import_module("cv2")
    gymnasium_engine.register_games(INVADERS, ())
    env = gymnasium.make(INVADERS)
    for name in ("NoopResetEnv", "MaxAndSkipEnv", "FireResetEnv"):
        if name != "FireResetEnv" or "FIRE" in env.unwrapped.get_action_meanings():
            env = getattr(library, name)(env)

    def image(obs: np.ndarray) -> np.ndarray:
        # gymnasium 0.28, wrappers/resize_observation.py and gray_scale_observation.py.
        resized = cv2.resize(obs, (84, 84), interpolation=cv2.INTER_AREA)
        return np.asarray(cv2.cvtColor(resized, cv2.COLOR_RGB2GRAY))

    frames = [image(env.reset(seed=3)[0])] * 4
    chain = [
        wrappers.parse_wrapper(text.format(frames=4)) for text in wrappers.ATARI_PREPROCESSING["cleanrl"]
    ]
    with environments.make_vector_env(INVADERS, 1, wrappers=chain) as vector:
        vector.reset(np.arange(1), np.array([3]))
        for action in np.random.default_rng(0).integers(0, 6, 40):
            np.testing.assert_array_equal(np.asarray(vector.obs)[0], frames)
            frames = [*frames[1:], image(env.step(int(action))[0])]
            vector.step(np.array([[action]]), np.arange(1))
    assert load_agent(path) is not None


@needs_games
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("NoopResetEnv", {"noop_max": 0}),
        ("NoopResetEnv", {"noop_max": 2.5}),
        ("AtariWrapper", {"frame_skip": 0}),
        ("AtariWrapper", {"other": 1}),
        ("ResizeObservation", {"shape": 8.5}),
        ("ResizeObservation", {"shape": [84]}),
        ("ResizeObservation", {"shape": [84, 0]}),
    ],
)
def test_arguments_of_atari_wrappers_are_checked(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        environments.make_vector_env(INVADERS, 1, wrappers=[WrapperSpec(name, arguments)])


@needs_games
@pytest.mark.parametrize("name", ["AtariWrapper", "WarpFrame", "GrayScaleObservation"])
def test_images_of_other_environments_are_not_preprocessed(name: str) -> None:
    with pytest.raises(UnsupportedError):
        environments.make_vector_env("Pendulum-v1", 1, wrappers=[WrapperSpec(name, {})])


@needs_games
def test_an_unknown_game_is_named(invader: Any) -> None:
    with pytest.raises(CkpttoolError):
        evaluate(str(invader[1]), "ALE/NoSuchGame-v5")
