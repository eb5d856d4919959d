"""Users' simulators, plugged in as `module:factory`: episodes, refusals, and what the results state."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.evaluation import environments
from ckpttool.evaluation.rollout import ExplorationNoise, Rollout, RolloutSpec, rollouts
from ckpttool.evaluation.simulators import DeviceVector, is_factory
from ckpttool.networks import Dense, Network, stack_networks
from ckpttool.testing.backends import CELL, chain, dense
from tests.conftest import ROOT, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_device_rollout import torch_policy

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

SOURCE = '''
import torch

class Simulator:
    """Row r plays episodes of 1 + (r + k) % 5 steps, k = 0, 1, ...; each step pays the episode's length."""

    obs_dim, action_low, action_high = 3, -2.0, 2.0
    versions = {"physics": "1.2"}

    def __init__(self, num_envs, device):
        self.rows = torch.arange(num_envs, device=device)
        self.seeds = []

    def reset(self, seed):
        self.seeds.append(seed)
        self.played = torch.zeros_like(self.rows)
        self.left = self.long()
        return self.obs()

    def long(self):
        return 1 + (self.rows + self.played) % 5

    def obs(self):
        return torch.stack([self.rows, self.left, self.played], 1).float()

    def step(self, actions):
        assert actions.shape == (len(self.rows), 1) and actions.dtype == torch.float32
        rewards = self.long().float()
        self.left = self.left - 1
        over = self.left == 0
        odd = self.played % 2 == 1
        self.played = self.played + over
        self.left = torch.where(over, self.long(), self.left)
        return self.obs(), rewards, over & odd, over & ~odd

class Program:
    """Episode of seed s starts at s and pays it; it goes down by one in every step, and ends at 0."""

    obs_dim, action_low, action_high, max_episode_steps = 3, [-2], [2], 4

    def starts(self, seeds):
        return torch.tensor(seeds, dtype=torch.float64)

    def observe(self, state):
        return state[0].float()[:, None].expand(-1, 3)

    def step(self, state, actions):
        return (state[0] - 1,), state[0], state[0] <= 1

def program(num_envs, device):
    return Program()

def fails(num_envs, device):
    raise RuntimeError("no licence")

def changed(**replaced):
    def make(num_envs, device):
        made = Simulator(num_envs, device)
        for name, value in replaced.items():
            setattr(made, name, value)
        return made
    return make

def stepping(change):
    def make(num_envs, device):
        made = Simulator(num_envs, device)
        step = made.step
        made.step = lambda actions: change(*step(actions))
        return made
    return make

no_bounds = lambda num_envs, device: type("Bare", (), {"obs_dim": 3})()
no_step = changed(step=None)
no_sizes = changed(obs_dim=0)
crossed = changed(action_low=3.0)
few_bounds = changed(action_low=[-1.0, -1.0])
words = changed(action_low="low")
wide = stepping(lambda o, r, t, c: (torch.cat([o, o], 1), r, t, c))
floats = stepping(lambda o, r, t, c: (o, r, t.float(), c))
column = stepping(lambda o, r, t, c: (o, r[:, None], t, c))
whole = stepping(lambda o, r, t, c: (o, r.long(), t, c))
arrays = stepping(lambda o, r, t, c: (o.numpy(), r, t, c))
five = stepping(lambda o, r, t, c: (o, r, t, c, {}))
elsewhere = stepping(lambda o, r, t, c: (o, r.to("meta"), t, c))
unpaid = stepping(lambda o, r, t, c: (o, torch.where(o[:, 2] == 1, float("nan"), r), t, c))
unseen = stepping(lambda o, r, t, c: (torch.where(o[:, 2:] == 1, float("nan"), o), r, t, c))
def crash(o, r, t, c):
    raise ValueError("the world\\nhas ended \\x1b[31m")
crashes = stepping(crash)
class Guarded(Simulator):
    @property
    def obs_dim(self):
        raise OSError("no device")
class Sticky(Simulator):
    def close(self):
        raise RuntimeError("cannot close")
def unseeded(num_envs, device):
    made = Simulator(num_envs, device)
    reset = made.reset
    made.reset = lambda: reset(0)
    return made
endless = stepping(lambda o, r, t, c: (o, r, t & False, c & False))
def capped(num_envs, device):
    made = endless(num_envs, device)
    made.max_episode_steps = 50
    return made
nothing = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with the module `own_simulator`, in which the test runs."""
    (tmp_path / "own_simulator.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_simulator", None)


STILL = chain(3, Dense(np.zeros((3, 1), np.float32)))


def play(
    name: str, num_envs: int, what: RolloutSpec, network: Network = STILL, members: int = 1
) -> tuple[Rollout, ...]:
    with environments.make_vector_env(
        f"own_simulator:{name}", num_envs, engine="device", trusted=True
    ) as vector:
        return rollouts(torch_policy(network), vector, what, members=members)


def lengths(row: int) -> Iterator[int]:
    """Yield how long the episodes of a row of the simulator are."""
    number = row
    while True:
        yield 1 + number % 5
        number += 1


@pytest.mark.parametrize(("episodes", "rows"), [(12, 4), (13, 4), (3, 5), (1, 1), (500, 3)])
@pytest.mark.parametrize("members", [1, 2])
def test_every_row_plays_its_share_of_episodes(module: Path, episodes: int, rows: int, members: int) -> None:
    """Short episodes of one row do not take the place of another row's long ones."""
    played = play(
        "Simulator", rows * members, RolloutSpec(episodes, 3), stack_networks([STILL] * members), members
    )
    for member, one in enumerate(played):
        expected = []
        for row in range(rows):
            several = lengths(member * rows + row)
            expected += [(line * rows + row, line, next(several)) for line in range(-(-episodes // rows))]
        expected = sorted(expected)[:episodes]
        assert one.lengths.tolist() == [long for _, _, long in expected]
        assert one.returns.tolist() == [long * long for _, _, long in expected]
        assert one.terminated.tolist() == [line % 2 == 1 for _, line, _ in expected]
        assert one.truncated.tolist() == [line % 2 == 0 for _, line, _ in expected]
        assert one.steps == one.lengths.sum()
        assert (one.episodes, one.num_envs, one.engine) == (episodes, rows, "device")
        assert one.seeds.tolist() == []


def test_a_program_of_ones_own_starts_from_seeds(module: Path) -> None:
    (rollout,) = play("program", 3, RolloutSpec(7, 1))
    assert rollout.seeds.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rollout.lengths.tolist() == [1, 2, 3, 4, 4, 4, 4]
    assert rollout.returns.tolist() == [1, 3, 6, 10, 14, 18, 22]
    assert rollout.terminated.tolist() == [True, True, True, True, False, False, False]
    assert rollout.truncated.tolist() == [False, False, False, True, True, True, True]


def test_the_result_names_no_seeds_and_the_code_that_played(module: Path, golden: Golden) -> None:
    common = (
        "eval",
        TORCH_SAMPLE,
        "--engine",
        "device",
        "--backend",
        "torch",
        "--env",
        "own_simulator:Simulator",
    )
    ran = in_process(
        *common, "--episodes", "6", "--num-envs", "3", "--csv", "rows.csv", "--json", "--out", "all.jsonl"
    )
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["protocol"]["seeds"] == []
    assert document["env"] == document["environment"]["id"] == "own_simulator:Simulator"
    assert len(document["returns"]) == 6
    assert document["versions"]["physics"] == "1.2"
    digest = document["versions"]["own_simulator"]
    assert any("1000" in note for note in document["notes"])
    assert [line.split(",")[3] for line in Path("rows.csv").read_text().splitlines()[1:]] == [""] * 6
    # A result is taken up again only while the simulator's code is the same.
    again = in_process(*common, "--episodes", "6", "--num-envs", "3", "--json", "--out", "all.jsonl").json()
    assert again["returns"] == document["returns"]
    with (module / "own_simulator.py").open("a") as file:
        file.write("# other code\n")
    sys.modules.pop("own_simulator")
    other = in_process(*common, "--episodes", "6", "--num-envs", "3", "--json").json()
    assert other["versions"]["own_simulator"] != digest
    assert other["fingerprint"] != document["fingerprint"]
    shown = in_process(*common, "--episodes", "2")
    assert shown.status == 0, shown.err
    golden("\n".join(line for line in shown.out.splitlines() if "seed" in line))


@pytest.mark.parametrize("more", [("--jobs", "2"), ("--runs",), ()])
def test_several_checkpoints_play_in_it(module: Path, more: tuple[str, ...]) -> None:
    ran = in_process(
        "eval", TORCH_SAMPLE, TORCH_SAMPLE.parent / "ckpt-12500.pt", "--episodes", "4", "--json", *more,
        "--engine", "device", "--backend", "torch", "--env", "own_simulator:Simulator",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    document = ran.json()
    assert [evaluation["lengths"] for evaluation in document["evaluations"]]
    assert [evaluation["protocol"]["seeds"] for evaluation in document["evaluations"]] == [[], []]
    # Two samples of independent episodes, too few to tell the checkpoints apart.
    means = [evaluation["mean"] for evaluation in document["evaluations"]]
    (_, second) = document["ranking"]
    assert second["behind"]["value"] == min(means) - max(means)
    assert second["behind"]["ci95"][0] < second["behind"]["value"] < second["behind"]["ci95"][1]
    assert not document["best"]["certain"]
    if "--runs" in more:
        assert [run["mean"] for run in document["runs"]["runs"]] == means


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Missing", ()),
        ("Simulatr", ("Simulator",)),
        ("nothing", ("int",)),
        ("fails", ("RuntimeError: no licence",)),
        ("no_bounds", ("action_low", "action_high", "Bare")),
        ("no_step", ("step",)),
        ("no_sizes", ("obs_dim", "found 0")),
        ("crossed", ("[3.0]",)),
        ("few_bounds", ("action",)),
        ("words", ("action_low", "'low'")),
        ("wide", ("observations", "float32 [2, 6] on cpu", "[2, 3]")),
        ("floats", ("terminated", "found float32 [2]", "bool")),
        ("column", ("rewards", "[2, 1]")),
        ("whole", ("rewards", "int64")),
        ("arrays", ("observations", "ndarray")),
        ("five", ("step", "tuple of 5")),
        ("elsewhere", ("rewards", "on meta", "on cpu")),
        ("unpaid", ("reward", "episode 0")),
        ("unseen", ("observation", "episode 2")),
        (
            "crashes",
            (
                "step",
                "ValueError",
            ),
        ),
        ("Guarded", ("OSError: no device",)),
        (
            "unseeded",
            (
                "reset",
                "TypeError",
            ),
        ),
        ("capped", ("max_episode_steps", "50")),
    ],
)
def test_a_simulator_that_does_not_fit_is_one_sentence(
    module: Path, name: str, attributes: tuple[str, ...]
) -> None:
    ran = in_process(
        "eval", TORCH_SAMPLE, "--episodes", "4", "--num-envs", "2",
        "--engine", "device", "--backend", "torch", "--env", f"own_simulator:{name}",
    )  # fmt: skip
    sentence = refused(ran)
    for attribute in (name if name not in ("Simulatr",) else "", *attributes):
        assert attribute in ran.err.replace("\n", " "), ran.err
    assert "\x1b" not in ran.err
    assert "Traceback" not in sentence


@pytest.mark.parametrize(
    ("env", "more"),
    [
        pytest.param("no_such_module:make", (), id="no-module"),
        pytest.param("own_simulator:Simulator", ("--video", "film.gif"), id="video"),
        pytest.param("own_simulator:Simulator", ("--noise", "0.1"), id="noise"),
        pytest.param("own_simulator:Simulator", ("--backend", "numpy"), id="numpy"),
        pytest.param(
            "own_simulator:Simulator", ("--adapter", "zero_contact_forces"), id="zero_contact_forces"
        ),
        pytest.param("own_simulator:Simulator", ("--engine", "gymnasium"), id="gymnasium"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(
    module: Path, env: str, more: tuple[str, ...], golden: Golden
) -> None:
    if "--engine" in more or "--video" in more:
        pytest.importorskip("gymnasium")
    common = ("eval", TORCH_SAMPLE, "--engine", "device", "--backend", "torch", "--env", env, *more)
    ran = in_process(*common)
    refused(ran)
    golden(re.sub(r"gymnasium [\d.]+ (.*): .*", r"gymnasium N \1", ran.err))  # the rest is gymnasium's


@pytest.mark.parametrize("name", ["Task", "make", "made_with"])
def test_a_gymnasium_environment_of_a_module_plays_when_its_hint_is_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    source = (
        "import gymnasium\nfrom gymnasium.envs.classic_control.pendulum import PendulumEnv as Task\n"
        "def make(): return gymnasium.wrappers.TimeLimit(Task(), 5)\n"
        "def made_with(g=9.0): return gymnasium.wrappers.TimeLimit(Task(g=g), 5)\n"
    )
    (tmp_path / "own_tasks.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("eval", TORCH_SAMPLE, "--episodes", "1", "--env")
    try:
        hint = " ".join(in_process(*words, f"own_tasks:{name}").err.partition("hint: ")[2].split())
        steps = re.fullmatch(r"add (.+) to the module own_tasks, then pass (\S+) to --env", hint)
        assert steps is not None, hint
        line, env = (step.replace("NAME", "Mine") for step in steps.groups())
        (tmp_path / "own_tasks.py").write_text(f"{source}{line[:-1]}, max_episode_steps=5)\n")
        sys.modules.pop("own_tasks")
        followed = in_process(*words, env)
    finally:
        sys.modules.pop("own_tasks", None)
        gymnasium.registry.pop("Mine-v0", None)
    assert followed.status == 0, followed.out + followed.err


def test_a_simulator_that_fails_to_close_has_played(module: Path) -> None:
    assert len(play("Sticky", 2, RolloutSpec(3))[0].returns) == 3


def test_only_a_person_may_name_a_factory(module: Path) -> None:
    with pytest.raises(UsageError):
        environments.make_vector_env("own_simulator:Simulator", engine="device")
    assert "own_simulator" not in sys.modules


def test_which_names_are_factories() -> None:
    assert is_factory("package.module:factory")
    assert is_factory("module:Class.make")
    for other in ("Pendulum-v1", "module:Env-v0", "module:", ":factory", "mo-dule:factory", "a b:c"):
        assert not is_factory(other)


def test_a_policy_with_memory_or_of_another_size_is_refused(module: Path) -> None:
    with pytest.raises(UsageError):
        play("Simulator", 2, RolloutSpec(2), CELL)
    with pytest.raises(EnvironmentMismatchError) as refusal:
        play("Simulator", 2, RolloutSpec(2), chain(4, dense(4, 1)))
    assert (refusal.value.expected, refusal.value.found) == ("[batch, 3]", "[batch, 4]")
    with pytest.raises(EnvironmentMismatchError) as refusal:
        play("Simulator", 2, RolloutSpec(2), chain(3, dense(3, 2)))
    assert (refusal.value.expected, refusal.value.found) == ("[2, 1]", "[2, 2]")
    with pytest.raises(CkpttoolError):
        play("Simulator", 3, RolloutSpec(2, noise=ExplorationNoise(0.1)))


def test_the_policy_and_the_simulator_share_a_device(module: Path) -> None:
    import torch

    with environments.make_vector_env("own_simulator:Simulator", 2, engine="device", trusted=True) as vector:
        task: Any = vector.task  # type: ignore[attr-defined]  # a DeviceVector
        task.device = torch.device("meta")
        with pytest.raises(UsageError) as refusal:
            rollouts(torch_policy(STILL), vector, RolloutSpec(2))
    assert (refusal.value.expected, refusal.value.found) == ("cpu", "meta")


@pytest.mark.parametrize(
    ("replaced", "result"),
    [
        ({"step": lambda self, s, a: ((s[0], s[0]), s[0], None)}, "float64 [3] on cpu, float64 [3] on cpu"),
        ({"step": lambda self, s, a: ((s[0].float(),), s[0], None)}, "float32 [3] on cpu"),
        ({"step": lambda self, s, a: (s, s[0])}, "tuple of 2"),
        ({"observe": lambda self, s: s[0]}, "float64 [3] on cpu"),
        ({"starts": lambda self, seeds: np.zeros(2)}, "float64 [2]"),
        ({"starts": lambda self, seeds: ["a"] * len(seeds)}, ""),
        ({"step": lambda self, s, a: (s, s[0], None), "max_episode_steps": None}, "neither"),
    ],
)
def test_a_program_that_does_not_fit_is_refused(
    module: Path, replaced: dict[str, Any], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import own_simulator  # type: ignore[import-not-found]  # written by the fixture

    for name, value in replaced.items():
        monkeypatch.setattr(own_simulator.Program, name, value)
    with pytest.raises((EnvironmentMismatchError, UsageError)) as refusal:
        play("program", 2, RolloutSpec(2))
    assert result in str(refusal.value.found)


def test_a_member_at_fault_does_not_take_the_others_along(module: Path, golden: Golden) -> None:
    broken = chain(3, Dense(np.full((3, 1), np.nan, np.float32)))
    with pytest.raises(CkpttoolError) as caught:
        play("Simulator", 4, RolloutSpec(3), stack_networks([STILL, broken]), 2)
    golden(caught.value)


def test_a_simulator_that_writes_its_tensors_in_place_is_played(module: Path) -> None:
    import own_simulator
    import torch

    class InPlace(own_simulator.Simulator):  # type: ignore[misc]
        def obs(self) -> Any:
            if not hasattr(self, "state"):
                self.state = torch.zeros(len(self.rows), 3)
            self.state.copy_(super().obs())
            return self.state

    with environments.make_vector_env("own_simulator:Simulator", 3, engine="device", trusted=True) as plain:
        (expected,) = rollouts(torch_policy(chain(3, dense(3, 1))), plain, RolloutSpec(9))
    own_simulator.Simulator = InPlace
    with environments.make_vector_env("own_simulator:Simulator", 3, engine="device", trusted=True) as vector:
        for _ in range(2):
            (rollout,) = rollouts(torch_policy(chain(3, dense(3, 1))), vector, RolloutSpec(9))
            np.testing.assert_array_equal(rollout.returns, expected.returns)
        simulator: Any = vector.task._task  # type: ignore[attr-defined]
        simulator.state.zero_()  # outside of the rollout too
        assert simulator.seeds


@pytest.mark.parametrize(("name", "seeds"), [("heavy_pendulum", 0), ("learned_pendulum", 8)])
def test_the_examples_play(name: str, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    ran = in_process(
        "eval", TORCH_SAMPLE, "--env", f"device_tasks:{name}", "--engine", "device", "--backend", "torch",
        "--episodes", "8", "--num-envs", "4", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["lengths"] == [200] * 8
    assert len(document["protocol"]["seeds"]) == seeds
    # An agent of Pendulum stays upright in the model; a heavier rod it swings up less often.
    assert document["mean"] > (-400 if seeds else -1500)


@pytest.mark.parametrize("name", ["heavy_pendulum", "learned_pendulum"])
def test_the_examples_stay_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tests.transfers import count_transfers

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    policy = torch_policy(STILL)
    with (
        policy.threads(1),
        environments.make_vector_env(f"device_tasks:{name}", 4, engine="device", trusted=True) as vector,
    ):
        transfers = count_transfers(policy.act, torch.device("cpu"), vector, RolloutSpec(99), looks=2)  # type: ignore[arg-type]  # a DeviceVector
    assert (transfers.host_reads, transfers.uploads) == (2, 0)


class Replay:
    """A stand-in for a captured graph, which calls the body; a broken one leaves every other call out."""

    def __init__(self, body: Any, *, broken: bool) -> None:
        self.body, self.broken, self.calls = body, broken, 0

    def replay(self) -> None:
        self.calls += 1
        if not (self.broken and self.calls % 2):
            self.body()


@pytest.mark.parametrize("name", ["Simulator", "program"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_graph_of_several_steps_plays_the_same(
    module: Path, name: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bookkeeping around a capture, with stand-ins for what needs CUDA."""
    import torch

    from ckpttool.evaluation import torch_rollout
    from ckpttool.networks import torch_programs

    def captured(body: Any, _position: Any) -> tuple[Replay, None]:
        for _ in range(4):
            body()
        return Replay(body, broken=broken), None

    monkeypatch.setattr(torch_programs, "capture_graph", captured)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    (expected,) = play(name, 3, RolloutSpec(20, 1))
    with (
        environments.make_vector_env(f"own_simulator:{name}", 3, engine="device", trusted=True) as vector,
        torch.no_grad(),
    ):
        assert isinstance(vector, DeviceVector)
        game = torch_rollout._DeviceRollout(
            torch_policy(STILL).act, torch.device("cpu"), vector, RolloutSpec(20, 1), 1
        )
        if broken and name == "Simulator":
            with pytest.raises(UnsupportedError):
                game.graph()
            return
        replay = game.graph()
        for _ in range(10 * (1 + broken)):
            replay()
        game.steps = 100
        assert game.look().finished == 20
        result = game.result(0, 1.0, interrupted=False)
    np.testing.assert_array_equal(result.returns, expected.returns)
    np.testing.assert_array_equal(result.lengths, expected.lengths)
    np.testing.assert_array_equal(result.terminated, expected.terminated)
