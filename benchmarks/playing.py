"""Steps per second of evaluation: ckpttool beside Stable-Baselines3, a plain loop and envpool."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

import benchmarks.players

ROUNDS = 5
ONE, EIGHT = "Stable-Baselines3, 1 env", "Stable-Baselines3, 8 Dummy envs"


class Player(NamedTuple):
    """One way to play: episodes long enough to be timed, and how many environments at once."""

    name: str
    episodes: int
    rows: int


class Contest(NamedTuple):
    """An environment, the sizes of its actor, who plays, and what is promised against whom."""

    env: str
    sizes: tuple[int, ...]
    players: dict[str, Player]
    promises: dict[str, float]


def _players(episodes: int, few: int, rows: int) -> dict[str, Player]:
    return {
        ONE: Player("sb3", few, 1),
        EIGHT: Player("sb3", 8 * few, 8),
        "Gymnasium loop, torch": Player("loop", few, 1),
        "envpool, torch": Player("pool", episodes, rows),
        "ckpttool, its engine without a policy": Player("no_policy", episodes, rows),
        "ckpttool eval": Player("ours", episodes, rows),
        "ckpttool eval --backend onnxruntime": Player("ours_onnx", episodes, rows),
    }


OURS = "ckpttool eval"
ENGINE = "ckpttool, its engine without a policy"
CONTESTS = (
    Contest(
        "HalfCheetah-v5",
        (17, 256, 256, 6),
        _players(100, 3, 100),
        {ONE: 10.5, "envpool, torch": 1.1, ENGINE: 0.8},
    ),
    Contest("Ant-v5", (105, 256, 256, 8), _players(40, 6, 20), {ONE: 3.7, ENGINE: 0.8}),
)


def actor(sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return a random actor, the same every time: kernels [in, out] and biases."""
    random = np.random.default_rng(0)
    weights = {}
    for n, (rows, columns) in enumerate(pairwise(sizes)):
        reach = rows**-0.5
        weights[f"kernel{n}"] = random.uniform(-reach, reach, (rows, columns)).astype(np.float32)
        weights[f"bias{n}"] = random.uniform(-reach, reach, columns).astype(np.float32)
    return weights


def actor_weights(path: str) -> dict[str, np.ndarray]:
    """Return the weights of a TD3 actor of that file, in the same form."""
    import ckpttool

    tree = ckpttool.open(path).tree
    named = {str(path[-1].value): leaf.array() for path, leaf in tree.tensors()}
    weights = {}
    for n in range(len(named) // 2):
        weights[f"kernel{n}"] = np.ascontiguousarray(named[f"l{n + 1}.weight"].T)
        weights[f"bias{n}"] = named[f"l{n + 1}.bias"]
    return weights


def prepare(folder: Path, env: str, stored: dict[str, np.ndarray]) -> str:
    """Write the weights for the peers, and as the TD3 authors' file for us."""
    import torch

    path = folder / f"{env}.npz"
    np.savez(path, **stored)
    layers = {
        f"l{n + 1}.{name}": torch.tensor(value)
        for n in range(len(stored) // 2)
        for name, value in (("weight", stored[f"kernel{n}"].T.copy()), ("bias", stored[f"bias{n}"]))
    }
    torch.save(layers, folder / f"{env}_actor")
    return str(path)


def rate(player: Player, env: str, weights: str, python: str) -> float | None:
    """Return steps per second of a fresh process; None if its library is not installed."""
    command = [python, benchmarks.players.__file__, player.name, env, weights]
    # MuJoCo writes a log into the folder that it is in, for those who do not stop it.
    ran = subprocess.run(
        [*command, str(player.episodes), str(player.rows)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(weights).parent,
    )
    if "ModuleNotFoundError" in ran.stderr:
        return None
    if ran.returncode:
        raise RuntimeError(f"{player.name} failed: {ran.stderr[-2000:]}")
    steps, seconds = ran.stdout.split()[-2:]
    return int(steps) / float(seconds)


def play(contest: Contest, weights: str, envpool_python: str, rounds: int) -> dict[str, list[float]]:
    """Let all play in turn, round after round, so that a busy machine slows all of them alike."""
    rates: dict[str, list[float]] = {name: [] for name in contest.players}
    for _ in range(rounds):
        for name, player in contest.players.items():
            python = envpool_python if player.name == "pool" else sys.executable
            steps_per_s = rate(player, contest.env, weights, python)
            if steps_per_s is not None:
                rates[name].append(steps_per_s)
    return {name: measured for name, measured in rates.items() if measured}


def main(arguments: list[str] | None = None) -> int:
    """Print steps per second and ratios; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cheetah", help="a TD3 actor file for HalfCheetah-v5; default: a random one")
    parser.add_argument("--envpool-python", default=sys.executable, help="an interpreter that has envpool")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments or [])
    status = 0
    for contest in CONTESTS:
        stored = (
            actor_weights(options.cheetah)
            if options.cheetah and contest is CONTESTS[0]
            else actor(contest.sizes)
        )
        with tempfile.TemporaryDirectory() as folder:
            weights = prepare(Path(folder), contest.env, stored)
            rates = play(contest, weights, options.envpool_python, options.rounds)
        print(f"\n{contest.env}, actor {'-'.join(map(str, contest.sizes))}, {options.rounds} rounds")
        for name, measured in rates.items():
            ratio = statistics.median(a / b for a, b in zip(measured, rates[ONE], strict=True))
            print(f"{name:<40} {statistics.median(measured):>9,.0f} steps/s  x{ratio:.2f}")
        for name, least in contest.promises.items():
            if name in rates:
                kept = statistics.median(a / b for a, b in zip(rates[OURS], rates[name], strict=True))
                print(f"{'kept' if kept >= least else 'BROKEN'}: {kept:.2f}x {name}, promised {least:g}")
                status |= kept < least
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
