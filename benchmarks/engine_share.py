"""The engine's share of `eval`: MuJoCo's batch alone beside the whole loop, 64 environments on one thread.

The loop's steps are recorded once; the engine then takes the same steps from the same states. `floor` is
that engine with what no loop avoids: the policy's arithmetic, and for every new episode Gymnasium's draws and
the engine's `forward`. Shares are medians of rounds in turn, by CPU time and by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from benchmarks.playing import actor, prepare
from ckpttool.evaluation import playing
from ckpttool.evaluation.environments import make_vector_env
from ckpttool.evaluation.fast_engines import MujocoVector
from ckpttool.evaluation.rollout import RolloutSpec, _RolloutLoop, rollouts
from ckpttool.networks import Policy

TASKS = (
    *("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher", "Swimmer", "Hopper", "Walker2d"),
    *("HalfCheetah", "Ant", "Humanoid"),
)
ENVIRONMENTS, STEPS, ROUNDS, SEED, PROMISE = 64, 300, 5, 1000, 0.8


class Timed(NamedTuple):
    """Microseconds of one step of all environments, by CPU time and by the clock."""

    processor: float
    clock: float


class Step(NamedTuple):
    """One recorded call of the engine: its states before, the rows, and the substeps."""

    states: np.ndarray
    observations: np.ndarray
    rows: np.ndarray | None
    substeps: int


class Recorder:
    """MuJoCo's batch, which also records the calls of `step`."""

    def __init__(self, vector: MujocoVector) -> None:
        self._vector, self._batch, self.steps = vector, vector._batch, list[Step]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def step(self, rows: np.ndarray | None, nstep: int) -> None:
        """Record the states and step."""
        self.steps.append(Step(self._batch.state.copy(), self._vector._rows.copy(), rows, nstep))
        self._batch.step(rows, nstep=nstep)


def timed(work: Callable[[], object]) -> Timed:
    """Return the time of a call in microseconds."""
    clock, processor = time.perf_counter_ns(), time.process_time_ns()
    work()
    return Timed((time.process_time_ns() - processor) / 1e3, (time.perf_counter_ns() - clock) / 1e3)


def mean(times: list[Timed]) -> Timed:
    """Return the sums of both, per step."""
    return Timed(*(sum(column) / STEPS for column in zip(*times, strict=True)))


def restored_policy(env: str) -> Policy:
    """Return the policy that `eval` builds of a random actor with two layers of 256."""
    with make_vector_env(env, 1) as vector:
        sizes = (vector.spec.obs_dim, 256, 256, vector.spec.action_dim)
    policies: list[Policy] = []

    def kept(policy: Policy, *arguments: Any, **named: Any) -> Any:
        policies.append(policy)
        return rollouts(policy, *arguments, **named)

    from ckpttool.commands.evaluate import evaluate
    from ckpttool.evaluation.protocol import Protocol

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), env, actor(sizes))
        playing.rollouts = kept
        try:
            evaluate(f"{folder}/{env}_actor", env, Protocol(1, SEED, 1, backend="numpy"))
        finally:
            playing.rollouts = rollouts
    return policies[0]


def play(policy: Policy, vector: MujocoVector) -> _RolloutLoop:
    """Play the first steps as `eval` does."""
    loop = _RolloutLoop(policy, vector, RolloutSpec(10**6, SEED), 1)
    loop._begin(np.arange(ENVIRONMENTS))
    for _ in range(STEPS):
        loop._tick()
    return loop


def shares(task: str, rounds: int) -> tuple[float, float, str]:
    """Return the share by CPU time, the highest possible one, and a row of the table."""
    env = f"{task}-v5"
    policy = restored_policy(env)

    def vector() -> MujocoVector:
        return MujocoVector(lambda: gymnasium.make(env), ENVIRONMENTS, 1)

    recorded, alone = vector(), vector()
    recorded._batch = recorder = Recorder(recorded)
    with policy.threads(1):  # type: ignore[attr-defined]  # NumPy's
        loop = play(policy, recorded)
        rows = []
        for _ in range(rounds):
            fresh = vector()
            whole = mean([timed(lambda fresh=fresh: play(policy, fresh))])
            engine, policies = [], []
            for step in recorder.steps:
                alone._batch.state[:] = step.states
                engine.append(timed(lambda step=step: alone._batch.step(step.rows, nstep=step.substeps)))
                policies.append(timed(lambda step=step: policy.step(step.observations)))
            resets = [timed(lambda number=number: draw(alone, number)) for number in range(loop.finished)]
            rows.append((whole, mean(engine), mean(policies), mean(resets or [Timed(0, 0)])))
    whole, engine, policies, resets = (
        Timed(*(statistics.median(values) for values in zip(*times, strict=True)))
        for times in zip(*rows, strict=True)
    )
    share, clock = (statistics.median(row[1][kind] / row[0][kind] for row in rows) for kind in range(2))
    floor = statistics.median(row[1][0] / (row[1][0] + row[2][0] + row[3][0]) for row in rows)
    row = (
        f"{task:<24} {share:5.2f} {clock:5.2f} {floor:6.2f} {whole.processor:8.0f} {engine.processor:8.0f}"
        f" {policies.processor:7.0f} {resets.processor:7.0f} {loop.finished / STEPS:8.2f}"
    )
    return share, floor, row


def draw(vector: MujocoVector, number: int) -> None:
    """Draw one start state as Gymnasium does, and compute what depends on it."""
    vector._env.np_random = np.random.Generator(np.random.PCG64(SEED + number))
    vector._env.reset_model()
    vector._batch.forward(np.array([number % ENVIRONMENTS], np.int32))


def main() -> int:
    """Print shares and microseconds per step of 64 environments; return 1 if a share breaks the promise.

    A task whose floor is below the promise cannot keep it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(f"{'task':<24}   CPU clock  floor    whole   engine  policy   resets  episodes/step")
    broken = False
    for task in options.tasks:
        share, floor, row = shares(task, options.rounds)
        broken |= share < PROMISE <= floor
        print(row, flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
