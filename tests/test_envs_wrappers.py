"""Environment wrappers of a training are played as their libraries play them, or refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.evaluation import environments, wrappers
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.playing import choose_environment
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent, wrapper_entries
from ckpttool.evaluation.wrappers import WrapperSpec
from tests import sb3_files as sb3
from tests.conftest import in_process

pytestmark = [
    pytest.mark.environment,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed"),
]
PENDULUM, STEPS = "Pendulum-v1", 7


def named(name: str, **arguments: Any) -> WrapperSpec:
    return WrapperSpec(name, arguments)


def played(specs: Sequence[WrapperSpec], actions: np.ndarray, env: str = PENDULUM) -> list[tuple[Any, ...]]:
    """Return (obs, reward, truncated) of the second of two rows; the first one starts and ends elsewhere."""
    with environments.make_vector_env(env, 2, wrappers=specs) as vector:
        rows = np.arange(2)
        vector.reset(rows, np.array([5, 3]))
        steps: list[tuple[Any, ...]] = [(vector.obs[1].copy(), 0.0, False)]
        for number, action in enumerate(actions):
            if number == 2:
                vector.reset(rows[:1], np.array([8]))
            row = rows[1:] if number == 3 else rows
            both = np.stack([np.zeros_like(action), action])
            rewards, _, truncated = vector.step(both, row)
            steps.append((vector.obs[1].copy(), float(rewards[-1]), bool(truncated[-1])))
    return steps


def actions_of(low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, (STEPS, 1)).astype(np.float32)


def plain(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the observations and rewards of the environment itself."""
    steps = played([], actions)
    return np.array([step[0] for step in steps]), np.array([step[1] for step in steps])


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """An environment of several inputs, one of them discrete; `ID` is its id."""
    gymnasium = importlib.import_module("gymnasium")
    spaces = gymnasium.spaces

    class Parts(gymnasium.Env):  # type: ignore[misc, name-defined]  # imported when it is installed
        ID = "CkpttoolParts-v0"
        observation_space = spaces.Dict(
            speed=spaces.Box(-1, 1, (2,)), grid=spaces.Box(-1, 1, (2, 3)), kind=spaces.Discrete(4)
        )
        action_space = spaces.Box(-1, 1, (1,))

        def look(self) -> dict[str, Any]:
            draw = self.np_random.uniform
            return {
                "grid": draw(-1, 1, (2, 3)).astype("f4"),
                "kind": int(self.np_random.integers(4)),
                "speed": draw(-1, 1, 2).astype("f4"),
            }

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return self.look(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.look(), float(action[0]), False, False, {}

    gymnasium.register(Parts.ID, Parts)
    yield Parts
    del gymnasium.registry[Parts.ID]


class TestFormulas:
    """What each wrapper shows, from the observations of the environment alone (see the module's sources)."""

    @pytest.mark.parametrize("name", ["sb3_contrib.common.wrappers.TimeFeatureWrapper", "TimeFeatureWrapper"])
    def test_a_time_feature_is_the_share_of_the_episode_that_is_left(self, name: str) -> None:
        actions = actions_of()
        observed = np.array([step[0] for step in played([named(name, max_steps=9)], actions)])
        np.testing.assert_array_equal(observed[:, :3], plain(actions)[0])
        # Pendulum's own limit of 200 steps, not the argument.
        np.testing.assert_allclose(observed[:, 3], 1 - np.arange(STEPS + 1) / 200, rtol=1e-6)

    def test_a_time_feature_in_test_mode_is_one(self) -> None:
        steps = played([named("TimeFeatureWrapper", test_mode=True)], actions_of())
        assert {step[0][3] for step in steps} == {1.0}

    def test_a_history_holds_observations_and_then_actions(self) -> None:
        actions = actions_of()
        obs, _ = plain(actions)
        steps = played([named("rl_zoo3.wrappers.HistoryWrapper", horizon=2)], actions)
        earlier_actions = [np.zeros(1), *actions]
        for number, (observation, _, _) in enumerate(steps):
            before = obs[number - 1] if number else np.zeros(3)
            two = (earlier_actions[number - 1] if number else np.zeros(1), earlier_actions[number])
            np.testing.assert_allclose(observation, np.concatenate([before, obs[number], *two]), rtol=1e-6)

    @pytest.mark.parametrize(
        ("name", "argument", "first"),
        [
            ("stable_baselines3.common.vec_env.VecFrameStack", "n_stack", "zero"),
            ("gymnasium.wrappers.FrameStackObservation", "stack_size", "reset"),
            ("gym.wrappers.FrameStack", "num_stack", "reset"),
        ],
    )
    def test_a_stack_of_frames_ends_with_the_newest(self, name: str, argument: str, first: str) -> None:
        actions = actions_of()
        obs, _ = plain(actions)
        blank = obs[0] if first == "reset" else np.zeros(3)
        for number, (observation, _, _) in enumerate(played([named(name, **{argument: 3})], actions)):
            frames = [obs[at] if at >= 0 else blank for at in range(number - 2, number + 1)]
            np.testing.assert_array_equal(observation, np.concatenate(frames))

    @pytest.mark.parametrize("outer", [[], [("FrameStackObservation", {"stack_size": 2})]])
    def test_flattened_inputs_are_those_of_the_library(
        self, outer: list[tuple[str, dict[str, Any]]], parts: Any
    ) -> None:
        actions = actions_of(-1, 1)
        chain = [("TimeLimit", {"max_episode_steps": 50}), ("FlattenObservation", {}), *outer]
        observed = np.array(
            [step[0] for step in played([named(n, **a) for n, a in chain], actions, parts.ID)]
        )
        library = importlib.import_module("gymnasium.wrappers")
        env = parts()
        for name, arguments in chain:
            env = getattr(library, name)(env, **arguments)
        rows = [env.reset(seed=3)[0], *(env.step(action)[0] for action in actions)]
        np.testing.assert_array_equal(observed, np.array(rows).reshape(len(rows), -1))
        assert observed.shape[1] == 12 * (1 + len(outer))

    def test_inputs_that_another_wrapper_changes_are_not_flattened(self, parts: Any) -> None:
        with pytest.raises(UnsupportedError):
            played(
                [named("FrameStack", num_stack=2), named("FlattenObservation")], actions_of()[:1], parts.ID
            )

    def test_rescaled_actions_reach_the_bounds(self) -> None:
        actions = actions_of(-1, 1)
        result = [named("gymnasium.wrappers.RescaleAction", min_action=-1, max_action=1.0)]
        with environments.make_vector_env(PENDULUM, wrappers=result) as vector:
            assert (vector.spec.action_low, vector.spec.action_high) == (-1, 1)
        np.testing.assert_allclose(
            [step[0] for step in played(result, actions)], plain(2 * actions)[0], rtol=1e-5
        )

    def test_smoothed_actions_are_a_moving_average_from_zero(self) -> None:
        actions, smooth, average = actions_of(), [], np.zeros(1, np.float32)
        for action in actions:
            average = np.float32(0.3) * average + np.float32(0.7) * action
            smooth.append(average)
        steps = played([named("rl_zoo3.wrappers.ActionSmoothingWrapper", smoothing_coef=0.3)], actions)
        np.testing.assert_allclose(
            [step[0] for step in steps], plain(np.array(smooth))[0], rtol=1e-5, atol=1e-6
        )

    def test_skipped_frames_repeat_the_action_and_add_rewards(self) -> None:
        actions = actions_of()[:3]
        obs, rewards = plain(np.repeat(actions, 2, axis=0))
        steps = played([named("rl_zoo3.wrappers.FrameSkip", skip=2)], actions)
        np.testing.assert_array_equal([step[0] for step in steps], obs[::2])
        np.testing.assert_allclose([step[1] for step in steps[1:]], rewards[1:].reshape(3, 2).sum(1))

    def test_a_time_limit_cuts_and_is_what_a_time_feature_counts(self) -> None:
        steps = played(
            [named("gymnasium.wrappers.TimeLimit", max_episode_steps=4), named("TimeFeatureWrapper")],
            actions_of(),
        )
        assert [step[2] for step in steps[:5]] == [False, False, False, False, True]
        np.testing.assert_allclose([step[0][3] for step in steps[:5]], [1, 0.75, 0.5, 0.25, 0], atol=1e-7)

    def test_masked_velocities_are_zeros(self) -> None:
        observed = np.array(
            [step[0] for step in played([named("rl_zoo3.wrappers.MaskVelocityWrapper")], actions_of())]
        )
        assert not observed[:, 2].any()
        assert observed[:, :2].any()

    def test_noise_depends_on_the_seed_of_the_episode_alone(self) -> None:
        noisy = [named("rl_zoo3.wrappers.ActionNoiseWrapper", noise_std=0.2)]
        first, again = (np.array([step[0] for step in played(noisy, actions_of())]) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert (first[1:] != plain(actions_of())[0][1:]).any()

    def test_what_changes_rewards_alone_leaves_observations_and_is_noted(self) -> None:
        actions = actions_of()
        for names in (wrappers.REWARDS, wrappers.HARMLESS):
            result = [named(f"gymnasium.wrappers.{name}") for name in sorted(names)]
            np.testing.assert_array_equal([step[0] for step in played(result, actions)], plain(actions)[0])
            uses = {entry.use for entry in wrapper_entries(result, "config.yml")}
            assert uses == ({"not used"} if names is wrappers.REWARDS else set())


def _zoo(name: str) -> Callable[..., Any]:
    pytest.importorskip("sb3_contrib", reason="sb3_contrib is not installed")
    if name == "TimeFeatureWrapper":
        return importlib.import_module("sb3_contrib.common.wrappers").TimeFeatureWrapper  # type: ignore[no-any-return]
    spec = importlib.util.find_spec("rl_zoo3")
    if spec is None or spec.origin is None:
        pytest.skip("rl_zoo3 is not installed")
    # The package itself imports what the wrappers do not need.
    where = importlib.util.spec_from_file_location("zoo_wrappers", Path(spec.origin).with_name("wrappers.py"))
    assert where is not None
    assert where.loader is not None
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


DIFFERENTIAL = [
    ("zoo", "TimeFeatureWrapper", {}),
    ("zoo", "HistoryWrapper", {"horizon": 3}),
    ("zoo", "ActionSmoothingWrapper", {"smoothing_coef": 0.4}),
    ("zoo", "MaskVelocityWrapper", {}),
    ("zoo", "FrameSkip", {"skip": 3}),
    ("zoo", "DelayedRewardWrapper", {"delay": 3}),
    ("gymnasium", "RescaleAction", {"min_action": -0.5, "max_action": 1.0}),
    ("gymnasium", "TimeLimit", {"max_episode_steps": 5}),
    ("gymnasium", "FrameStackObservation", {"stack_size": 3}),
    ("gymnasium", "FrameStackObservation", {"stack_size": 2, "padding_type": "zero"}),
    ("gymnasium", "TimeAwareObservation", {}),
    ("gymnasium", "TimeAwareObservation", {"normalize_time": True}),
    ("gymnasium", "ClipAction", {}),
]


@pytest.mark.parametrize(("library", "name", "arguments"), DIFFERENTIAL)
def test_the_library_shows_the_same(library: str, name: str, arguments: dict[str, Any]) -> None:
    gymnasium = importlib.import_module("gymnasium")
    kind = _zoo(name) if library == "zoo" else getattr(gymnasium.wrappers, name)
    if name == "RescaleAction":
        # Float32 as its Box, or it warns.
        arguments = {end: np.float32(value) for end, value in arguments.items()}
    reference_env = kind(gymnasium.make(PENDULUM, disable_env_checker=True), **arguments)
    actions = actions_of(-0.5, 1.0)
    expected = [(reference_env.reset(seed=3)[0], 0.0, False)]
    for action in actions:
        obs, reward, _, cut, _ = reference_env.step(action)
        expected.append((obs, reward, cut))
    prefix = "rl_zoo3.wrappers." if library == "zoo" else "gymnasium.wrappers."
    for step_result, other in zip(
        played(
            [
                named(
                    prefix + name, **{n: v.item() if hasattr(v, "item") else v for n, v in arguments.items()}
                )
            ],
            actions,
        ),
        expected,
        strict=True,
    ):
        np.testing.assert_allclose(step_result[0], np.ravel(other[0]), rtol=1e-6, atol=1e-6)
        assert step_result[2] == other[2]
        if name not in wrappers.REWARDS:
            np.testing.assert_allclose(step_result[1], other[1], rtol=1e-6)


class TestRefusals:
    @pytest.mark.parametrize("name", ["my.wrappers.TimeFeatureWrapper", "gymnasium.wrappers.Unheard", "Warp"])
    def test_an_unknown_wrapper_is_not_known_by_its_last_name(self, name: str) -> None:
        assert not wrappers.is_known_wrapper(named(name))

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("HistoryWrapper", {"horizon": 0}),
            ("HistoryWrapper", {"horizon": "9" * 400}),
            ("HistoryWrapper", {"horizon": True}),
            ("HistoryWrapper", {"horizon": 10**9}),
            ("HistoryWrapper", {"length": 2}),
            ("VecFrameStack", {}),
            ("VecFrameStack", {"n_stack": 2.5}),
            ("VecFrameStack", {"n_stack": 2, "channels_order": "first"}),
            ("VecFrameStack", {"n_stack": 2, "padding": [0.0]}),
            ("RescaleAction", {"min_action": 1, "max_action": -1}),
            ("RescaleAction", {"min_action": [1, 2, 3], "max_action": 4}),
            ("RescaleAction", {"min_action": "a", "max_action": None}),
            ("RescaleAction", {"min_action": float("nan"), "max_action": 1}),
            ("ActionNoiseWrapper", {"noise_std": "much"}),
            ("ActionNoiseWrapper", {"noise_std": -1.0}),
            ("TimeLimit", {}),
            ("TimeFeatureWrapper", {"max_steps": -5}),
        ],
    )
    def test_arguments_that_do_not_fit(self, name: str, arguments: dict[str, Any]) -> None:
        with pytest.raises((UsageError, UnsupportedError)):
            played([named(name, **arguments)], actions_of()[:1])

    def test_the_device_engine(self) -> None:
        pytest.importorskip("torch")
        with pytest.raises(UsageError) as refused:
            environments.make_vector_env(PENDULUM, 1, engine="device", wrappers=[named("TimeFeatureWrapper")])
        assert refused.value.hint is not None

    @pytest.mark.parametrize("text", ["TimeLimit:max_episode_steps", "TimeLimit:=4", "HistoryWrapper:a b=1"])
    def test_words_of_the_command_line(self, text: str) -> None:
        with pytest.raises(UsageError):
            wrappers.parse_wrapper(text)


def test_sizes_are_those_that_the_wrappers_show() -> None:
    chains = [
        [named("TimeFeatureWrapper")],
        [named("HistoryWrapper", horizon=3), named("TimeFeatureWrapper")],
        [named("TimeFeatureWrapper"), named("VecFrameStack", n_stack=4)],
        [named("Monitor"), named("NormalizeReward")],
    ]
    for chain in chains:
        with environments.make_vector_env(PENDULUM, wrappers=chain) as vector:
            assert wrappers.inner_obs_dim(vector.spec.obs_dim, 1, chain) == 3
            assert wrappers.changes_size(chain) == (vector.spec.obs_dim != 3)
        assert wrappers.deserialize_wrappers(wrappers.serialize_wrappers(chain)) == tuple(chain)


def agent(folder: Path, obs: int, config: str, args: str = "", *, norm: bool = False) -> tuple[str, Any]:
    """Write a PPO agent for Pendulum as the RL zoo lays it out; return its file and its policy."""
    torch = importlib.import_module("torch")
    torch.manual_seed(1)
    module = torch.nn.Module()
    module.log_std = torch.nn.Parameter(torch.zeros(1))
    hidden = {
        f"{name}_net": torch.nn.Sequential(*sb3.mlp((obs, 8, 8), torch.nn.Tanh), torch.nn.Tanh())
        for name in ("policy", "value")
    }
    module.mlp_extractor = sb3.owner(**hidden)
    module.action_net, module.value_net = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    data = sb3.settings(sb3.ON_POLICY, policy_kwargs={}, action_space=sb3.box([-2.0], [2.0]))
    if obs != sb3.OBS:
        del data["observation_space"]
    folder.mkdir(exist_ok=True)
    file = sb3.put(folder / f"{PENDULUM}.zip", sb3.members({"policy": module.state_dict()}, data))
    beside = folder / PENDULUM
    beside.mkdir()
    (beside / "config.yml").write_text(f"policy: MlpPolicy\n{config}")
    (beside / "args.yml").write_text(f"env: {PENDULUM}\n{args}")
    if norm:
        sb3.statistics(beside / "vecnormalize.pkl")

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            hidden = module.mlp_extractor.policy_net(torch.from_numpy(obs.astype(np.float32)))
            return np.clip(module.action_net(hidden).numpy(), -2, 2)  # type: ignore[no-any-return]

    return file, act


def returned(act: Any, see: Callable[[np.ndarray, int, bool], np.ndarray], seed: int = 1000) -> float:
    """Return the return of one episode of the environment itself; `see` is what the policy takes."""
    env = importlib.import_module("gymnasium").make(PENDULUM)
    obs, total, done, step = env.reset(seed=seed)[0], 0.0, False, 0
    while not done:
        obs, reward, ended, cut, _ = env.step(act(see(obs, step, step == 0)))
        total, done, step = total + reward, ended or cut, step + 1
    return total


class TestFiles:
    """What config.yml and args.yml of the RL zoo name is played."""

    def test_a_time_feature(self, tmp_path: Path) -> None:
        file, act = agent(tmp_path, 4, "env_wrapper: sb3_contrib.common.wrappers.TimeFeatureWrapper\n")
        evaluation = evaluate(file, protocol=Protocol(1))
        expected = returned(act, lambda obs, step, _: np.append(obs, np.float32(1 - step / 200)))
        assert evaluation.rollout.returns[0] == pytest.approx(expected, rel=1e-4)

    def test_frames_are_stacked_after_they_were_normalised(self, tmp_path: Path) -> None:
        file, act = agent(tmp_path, 9, "frame_stack: 3\nnormalize: true\n", norm=True)
        mean, var = np.linspace(-1, 1, 3), np.linspace(0.5, 2, 3)  # those of sb3_files.statistics
        frames: list[np.ndarray] = []

        def see(obs: np.ndarray, _: int, first: bool) -> np.ndarray:
            frames[:] = [np.zeros(3)] * 3 if first else frames
            frames[:] = [*frames[1:], np.clip((obs - mean) / np.sqrt(var + 1e-8), -5, 5)]
            return np.concatenate(frames)

        evaluation = evaluate(file, protocol=Protocol(1))
        assert evaluation.rollout.returns[0] == pytest.approx(returned(act, see), rel=1e-4)

    @pytest.mark.parametrize("config", ["", "frame_stack: 3\n"])
    @pytest.mark.parametrize("is_given", [True, False])
    def test_given_statistics_are_of_one_frame(self, tmp_path: Path, config: str, is_given: bool) -> None:
        if not is_given and not config:
            pytest.skip("nothing says that frames are stacked")
        recorded, _ = agent(tmp_path / "recorded", 9, "frame_stack: 3\nnormalize: true\n", norm=True)
        file, _ = agent(tmp_path / "alone", 9, config)
        facts = AgentFacts(obs_norm=str(Path(recorded).with_suffix("") / "vecnormalize.pkl"))
        how = Protocol(1, wrappers=("VecFrameStack:n_stack=3",) if is_given else None)
        evaluation = evaluate(file, PENDULUM, how, facts=facts)
        expected = evaluate(recorded, protocol=Protocol(1))
        assert evaluation.rollout.returns.tolist() == expected.rollout.returns.tolist()
        command = [
            "eval",
            file,
            "--env",
            PENDULUM,
            "--obs-norm",
            str(facts.obs_norm),
            "--episodes=1",
            "--json",
        ]
        ran = in_process(*command, *(["--wrapper", how.wrappers[0]] if how.wrappers else ()))
        assert ran.json()["returns"] == expected.rollout.returns.tolist()

    @pytest.mark.parametrize(("norm", "stacks"), [(False, 2), (True, 1)])
    def test_each_stack_that_a_hint_names_is_played(self, norm: bool, stacks: int, tmp_path: Path) -> None:
        file, _ = agent(tmp_path, 9, "", norm=norm)
        with pytest.raises(EnvironmentMismatchError) as caught:
            evaluate(file, PENDULUM, Protocol(1))
        named = re.findall(r"\w+:\w+=\d+", str(caught.value.hint))
        assert len(named) == stacks
        for wrapper in named:
            assert evaluate(file, PENDULUM, Protocol(1, wrappers=(wrapper,))).rollout.steps == 200

    def test_statistics_of_another_size_are_refused_by_size(self, tmp_path: Path) -> None:
        recorded, _ = agent(tmp_path / "recorded", 9, "frame_stack: 3\nnormalize: true\n", norm=True)
        file, _ = agent(tmp_path / "alone", 8, "")
        facts = AgentFacts(obs_norm=str(Path(recorded).with_suffix("") / "vecnormalize.pkl"))
        with pytest.raises(EnvironmentMismatchError) as caught:
            evaluate(file, PENDULUM, Protocol(1, wrappers=("HistoryWrapper:horizon=2",)), facts=facts)
        assert (caught.value.expected, caught.value.found) == ("8", "3")
        assert "--env" not in str(caught.value.hint)

    def test_a_list_of_wrappers_with_arguments_in_its_order(self, tmp_path: Path) -> None:
        config = (
            "env_wrapper:\n  - rl_zoo3.wrappers.FrameSkip:\n      skip: 2\n"
            "  - gymnasium.wrappers.TimeLimit:\n      max_episode_steps: 10\n"
            "  - sb3_contrib.common.wrappers.TimeFeatureWrapper\n"
        )
        file, _ = agent(tmp_path, 4, config)
        evaluation = evaluate(file, protocol=Protocol(2))
        assert evaluation.rollout.lengths.tolist() == [10, 10]
        names = re.findall(r"\b[A-Z]\w+", evaluation.surroundings["arguments"]["wrappers"])
        assert names == ["FrameSkip", "TimeLimit", "TimeFeatureWrapper"]
        assert "skip=2" in evaluation.surroundings["arguments"]["wrappers"]

    def test_an_ordered_dict_of_the_zoo(self, tmp_path: Path) -> None:
        file, _ = agent(tmp_path, 8, "")
        tag, wrapper = "!!python/object/apply:collections.OrderedDict", "rl_zoo3.wrappers.HistoryWrapper"
        config = f"{tag}\n- - - env_wrapper\n    - - {wrapper}: {{horizon: 2}}\n"
        (tmp_path / PENDULUM / "config.yml").write_text(config)
        assert evaluate(file, protocol=Protocol(1)).surroundings["observation"][0][1] == [8]

    def test_arguments_of_the_environment(self, tmp_path: Path) -> None:
        file, act = agent(tmp_path, 3, "env_kwargs: {g: 2.5}\n", "env_kwargs: {g: 3.5, render_mode: human}\n")
        evaluation = evaluate(file, protocol=Protocol(1))
        assert evaluation.surroundings["arguments"] == {"g": "3.5"}
        assert evaluation.rollout.returns[0] != pytest.approx(returned(act, lambda obs, *_: obs), rel=1e-4)

    def test_an_argument_that_may_name_a_file_is_not_taken(self, tmp_path: Path) -> None:
        file, _ = agent(tmp_path, 3, "env_kwargs: {xml_file: /etc/passwd}\n")
        evaluation = evaluate(file, protocol=Protocol(1))
        assert "xml_file" not in evaluation.surroundings["arguments"]
        (entry,) = (entry for entry in evaluation.ledger if "xml_file" in entry.value)
        assert entry.use == "cannot be known"

    @pytest.mark.parametrize("group", ["env_wrapper", "vec_env_wrapper"])
    @pytest.mark.parametrize("form", ["{}", "[{}]", "[{{{}: {{a: 1}}}}]", "{{{}: null}}"])
    def test_an_unknown_wrapper_is_refused_by_name(self, tmp_path: Path, group: str, form: str) -> None:
        name = "my_wrappers.TimeFeatureWrapper"
        file, _ = agent(tmp_path, 3, f"{group}: {form.format(name)}\n")
        with pytest.raises(UsageError) as refused:
            evaluate(file, protocol=Protocol(1))
        assert refused.value.found == name
        assert "--wrapper none" in str(refused.value.hint)
        assert evaluate(file, protocol=Protocol(1, wrappers=("none",))).notes

    def test_a_normaliser_without_statistics_is_refused(self, tmp_path: Path) -> None:
        file, _ = agent(tmp_path, 3, "env_wrapper: gymnasium.wrappers.NormalizeObservation\n")
        with pytest.raises(UsageError) as refused:
            evaluate(file, protocol=Protocol(1))
        assert "--obs-norm" in str(refused.value.hint)

    def test_a_given_wrapper_stands_in_for_a_file(self, tmp_path: Path) -> None:
        file, act = agent(tmp_path, 4, "")
        with pytest.raises(CkpttoolError) as refused:
            evaluate(file, protocol=Protocol(1))
        assert "--wrapper TimeFeatureWrapper" in str(refused.value.hint)
        evaluation = evaluate(file, protocol=Protocol(1, wrappers=("TimeFeatureWrapper",)))
        expected = returned(act, lambda obs, step, _: np.append(obs, np.float32(1 - step / 200)))
        assert evaluation.rollout.returns[0] == pytest.approx(expected, rel=1e-4)

    def test_a_result_is_not_that_of_other_wrappers(self, tmp_path: Path) -> None:
        """Results that a sweep keeps in a file are found again by all that decided them."""
        file, _ = agent(tmp_path, 4, "env_wrapper: TimeFeatureWrapper\n")
        one = choose_environment(restore_agent(file), None, Protocol())
        (tmp_path / PENDULUM / "config.yml").write_text(
            "env_wrapper: {TimeFeatureWrapper: {test_mode: true}}\n"
        )
        other = choose_environment(restore_agent(file), None, Protocol())
        assert one.identity != other.identity
