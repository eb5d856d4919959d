"""Pendulum in arrays: Gymnasium's numbers, whatever rows move, and no more than Pendulum."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpttool.core import MissingExtraError, UnsupportedError, UsageError
from ckpttool.evaluation import environments, fast_engines
from ckpttool.evaluation.gymnasium_engine import Agreement, VectorEnv
from tests.conftest import TORCH_SAMPLE, in_process
from tests.golden_texts import Golden

gymnasium = pytest.importorskip("gymnasium")
pytestmark = pytest.mark.environment

SEEDS = (0, 1, 1000, 2**32 - 1)


def require_equal(vector: VectorEnv, result: Any, expected: Any) -> None:
    """Compare numbers with Gymnasium's: bits where the engine found equal bits, rounding elsewhere."""
    assert np.asarray(result).dtype == np.asarray(expected).dtype
    if vector.agreement is not None and vector.agreement.exact:
        np.testing.assert_array_equal(result, expected)
    else:
        # The rounding of one step, grown by 200 of them.
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_it_is_taken_of_itself_where_nothing_else_is_asked(golden: Golden) -> None:
    assert environments.make_vector_env("Pendulum-v1", 2).engine == fast_engines.PENDULUM_ENGINE
    assert environments.make_vector_env("Pendulum-v1", 2, engine="gymnasium").engine == "gymnasium"
    with pytest.raises(UsageError) as caught:
        environments.make_vector_env("MountainCarContinuous-v0", engine=fast_engines.PENDULUM_ENGINE)
    golden(caught.value)


@pytest.mark.parametrize("kwargs", [{}, {"g": 9.81}])
def test_every_number_is_gymnasiums(kwargs: dict[str, float]) -> None:
    """1,000 steps of each seed: five whole episodes, random torques, some beyond the bounds."""
    random = np.random.default_rng(0)
    rows = np.arange(len(SEEDS))
    with (
        environments.make_vector_env(
            "Pendulum-v1", 4, trusted_arguments=True, kwargs=kwargs, engine="gymnasium"
        ) as reference_env,
        environments.make_vector_env(
            "Pendulum-v1", 4, trusted_arguments=True, kwargs=kwargs, engine=fast_engines.PENDULUM_ENGINE
        ) as own_env,
    ):
        assert own_env.spec.observation == reference_env.spec.observation
        assert own_env.spec.versions == reference_env.spec.versions
        for episode in range(5):
            seeds = (np.array(SEEDS) + episode) % 2**32
            for env in (own_env, reference_env):
                env.reset(rows, seeds)
            for step in range(200):
                # Rows need not move together.
                moving = rows if step < 150 else rows[step % 2 :: 2]
                actions = random.uniform(-3, 3, (len(rows), 1)).astype(np.float32)
                outcome, expected = own_env.step(actions, moving), reference_env.step(actions, moving)
                for mine, its in zip(outcome, expected, strict=True):
                    require_equal(own_env, mine, its)
                require_equal(own_env, np.asarray(own_env.obs), np.asarray(reference_env.obs))
            for env in (own_env, reference_env):
                ended = [env.step(actions, rows)[2].tolist() for _ in range(30)]
                assert ended[-1] == [True] * len(rows)


@pytest.mark.skipif(
    (platform.machine(), platform.libc_ver()[0]) != ("x86_64", "glibc") or np.__version__ < "2",
    reason="NumPy 2 on x86-64 with glibc; elsewhere rounding may differ",
)
def test_the_bits_are_gymnasiums_whatever_the_processor_has() -> None:
    """tests/test_processors.py runs this without AVX-512 and AVX2 as well."""
    with environments.make_vector_env("Pendulum-v1", 2) as vector:
        assert vector.agreement is not None
        assert vector.agreement.exact


def test_rounding_is_no_refusal_but_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = fast_engines.Pendulum.advance

    def rounded(*arguments: Any) -> Any:
        state, rewards, ended = advance(*arguments)
        return tuple(np.nextafter(column, np.inf) for column in state), np.nextafter(rewards, np.inf), ended

    monkeypatch.setattr(fast_engines.Pendulum, "advance", rounded)
    ran = in_process("eval", TORCH_SAMPLE, "--episodes", "2", "--engine", "pendulum.batch", "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    agreement = Agreement.read(document["agreement"])
    assert agreement is not None
    assert agreement.steps == 64
    *rounded_off, ends = agreement.deviations
    assert all(0 < deviation.largest < deviation.tolerance for deviation in rounded_off)
    assert (ends.quantity, ends.largest) == ("terminations", 0)
    assert agreement.document() == document["agreement"]
    assert agreement.note("pendulum.batch")[0] in document["notes"]


def test_gymnasium_itself_has_no_agreement_to_report() -> None:
    ran = in_process("eval", TORCH_SAMPLE, "--episodes", "1", "--engine", "gymnasium", "--json")
    assert ran.json()["agreement"] is None
    assert Agreement.read(None) is None


def test_what_is_no_number_is_no_rounding() -> None:
    from ckpttool.evaluation.gymnasium_engine import measure_deviation

    nan, inf = np.nan, np.inf
    for actual, expected in ((nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf)):
        assert measure_deviation("x", [actual], [expected], 1e-6).largest == inf
    for same in (nan, inf, -inf, 0.0):
        assert measure_deviation("x", [same], [same], 0.0).largest == 0
    assert measure_deviation("x", np.zeros(2), np.zeros(3), 1.0).largest == inf


def changed(how: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return what makes a Pendulum whose steps another version of the library computes."""

    def make() -> Any:
        env = gymnasium.make("Pendulum-v1", disable_env_checker=True)
        bare = env.unwrapped
        step = bare.step
        bare.step = lambda action: how(bare, lambda arguments=action: step(arguments))
        return env

    return make


def paid_otherwise(bare: Any, step: Any) -> Any:
    speed = bare.state[1]
    obs, reward, *more = step()
    # Only where the pendulum is fast: the first steps of an episode never are.
    return obs, reward - 1e-4 * (abs(speed) > 7.5), *more


def pulled_otherwise(bare: Any, step: Any) -> Any:
    bare.g = 9.81
    try:
        return step()
    finally:
        bare.g = 10.0


def stepped_otherwise(bare: Any, step: Any) -> Any:
    bare.dt = 0.0501
    try:
        return step()
    finally:
        bare.dt = 0.05


def turned_otherwise(bare: Any, step: Any) -> Any:
    outcome = step()
    bare.state = np.array([(bare.state[0] + np.pi) % (2 * np.pi) - np.pi, bare.state[1]])
    return outcome


def ended_otherwise(_bare: Any, step: Any) -> Any:
    obs, reward, _, *more = step()
    return obs, reward, abs(float(obs[2])) > 7.5, *more


def seen_otherwise(_bare: Any, step: Any) -> Any:
    obs, *more = step()
    return obs[[1, 0, 2]], *more


@pytest.mark.parametrize(
    "how",
    [
        paid_otherwise,
        pulled_otherwise,
        stepped_otherwise,
        turned_otherwise,
        ended_otherwise,
        seen_otherwise,
        lambda bare, step: step(bare.max_torque * np.tanh([0.5])),
    ],
)
def test_another_pendulum_is_not_taken_for_this_one(how: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(UnsupportedError) as refused:
        fast_engines.ArrayVector(fast_engines.Pendulum, changed(how), 2)
    assert refused.value.expected
    assert refused.value.hint


def test_a_pendulum_without_its_constants_is_refused() -> None:
    def bare() -> Any:
        env = gymnasium.make("Pendulum-v1", disable_env_checker=True)
        del env.unwrapped.dt
        return env

    with pytest.raises(UnsupportedError):
        fast_engines.ArrayVector(fast_engines.Pendulum, bare, 2)


def test_rows_of_one_seed_begin_alike_and_nothing_is_drawn(golden: Golden) -> None:
    with environments.make_vector_env("Pendulum-v1", 3, engine=fast_engines.PENDULUM_ENGINE) as env:
        assert not np.any(env.obs)
        env.reset(np.array([0, 2]), np.array([7, 7]))
        obs = np.asarray(env.obs)
        np.testing.assert_array_equal(obs[0], obs[2])
        assert not obs[1].any()
        with pytest.raises(UnsupportedError) as caught:
            env.frame(0)
        golden(caught.value)
    with pytest.raises(UsageError):
        fast_engines.ArrayVector(fast_engines.Pendulum, lambda: None, 0)


def test_without_gymnasium_every_number_is_the_same(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    reference_env = environments.make_vector_env("Pendulum-v1", len(SEEDS))
    monkeypatch.setattr(environments, "is_gymnasium_installed", lambda: False)
    own_env = environments.make_vector_env("Pendulum-v1", len(SEEDS), obs_dim=3)
    assert own_env.notes == (fast_engines.StandalonePendulum().note,)
    for field in (
        "id",
        "observation",
        "action_low",
        "action_high",
        "max_episode_steps",
        "render_fps",
        "arguments",
    ):
        assert getattr(own_env.spec, field) == getattr(reference_env.spec, field)
    rows, random = np.arange(len(SEEDS)), np.random.default_rng(0)
    for env in (own_env, reference_env):
        env.reset(rows, np.array(SEEDS))
    for _ in range(200):
        actions = random.uniform(-3, 3, (len(rows), 1)).astype(np.float32)
        outcome, expected = own_env.step(actions, rows), reference_env.step(actions, rows)
        assert all((mine == its).all() for mine, its in zip(outcome, expected, strict=True))
        np.testing.assert_array_equal(np.asarray(own_env.obs), np.asarray(reference_env.obs))
    assert outcome[2].all()
    for refused in ({"engine": "gymnasium"}, {"pictures": True}, {"kwargs": {"g": 9.81}, "trusted": True}):
        with pytest.raises(MissingExtraError) as caught:
            environments.make_vector_env("Pendulum-v1", **refused)
        golden(caught.value)
