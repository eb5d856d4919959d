"""Predictions of agents with every backend, and those of their own libraries: `--document` writes them.

The zoo's agents need the corpus beside the project, stable_baselines3 and, for ARS, QR-DQN, TQC and TRPO,
sb3_contrib; the status is 1 if a prediction differs by more than 1e-6 of its scale: the largest output of the
last layer, at least 1. The observations are normal; if the agent normalises, with its own mean and deviation.
Of every library in tests/agent_truth that this interpreter, or one of `--python`, can import, agents with
random weights are made, and act on observations some of which are large: one of continuous actions, and all
of tests/agent_truth/discrete.py, whose values or logits are compared, and whose actions must be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT.parent / "shared" / "corpus" / "torch" / "sb3_zoo"
DOCUMENT = ROOT / "benchmarks" / "results" / "predictions.md"
BACKENDS = ("numpy", "torch", "tensorflow", "onnxruntime")
LIMIT = 1e-6
ROWS = 200

# A process of its own: the library makes optimizers, which a process with TensorFlow cannot.
_LIBRARY = """
import importlib, json, pickle, sys
from pathlib import Path
import gymnasium, numpy as np, stable_baselines3 as sb3
# Files of Gym's time name its modules; Gymnasium's have the same classes.
for name in ("", ".spaces", ".spaces.box", ".spaces.discrete", ".spaces.space"):
    sys.modules["gym" + name] = importlib.import_module("gymnasium" + name)
classes = {name: getattr(sb3, name.upper()) for name in ("a2c", "ddpg", "dqn", "ppo", "sac", "td3")}
if importlib.util.find_spec("sb3_contrib"):
    import sb3_contrib
    classes |= {name: getattr(sb3_contrib, name.upper()) for name in ("ars", "qrdqn", "tqc", "trpo")}
rows, answer = int(sys.argv[1]), {}
# Schedules and buffers of these old files are functions by value, which other versions cannot load.
known = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
for file in map(Path, sys.argv[2:]):
    algorithm = file.parent.parent.name
    if algorithm not in classes:
        continue
    model = classes[algorithm].load(file, device="cpu", custom_objects=known)
    obs = np.random.default_rng(3).normal(size=(rows, *model.observation_space.shape))
    statistics, norm = file.with_suffix("") / "vecnormalize.pkl", None
    if statistics.exists():
        norm = pickle.loads(statistics.read_bytes())
    if norm is not None and norm.norm_obs:
        obs = obs * np.sqrt(norm.obs_rms.var) + norm.obs_rms.mean
    obs = obs.astype("f4")
    given = norm.normalize_obs(obs) if norm is not None and norm.norm_obs else obs
    answer[str(file)] = [obs.tolist(), model.predict(given, deterministic=True)[0].tolist()]
print(json.dumps(answer))
"""


class Row(NamedTuple):
    """One agent: the largest difference of a prediction by backend, relative to `scale`.

    `rounding` is the library's own difference from float64: cosines of large angles round in its float32 too.
    """

    agent: str
    actions: str
    scale: float
    differences: Mapping[str, float]
    rounding: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Return whether no backend differs by more than the limit, or twice the library's own rounding."""
        return max(self.differences.values()) <= max(LIMIT, 2 * self.rounding)


def predicted(files: Sequence[Path]) -> dict[str, list[Any]]:
    """Return observations and the library's predictions by file."""
    run = [sys.executable, "-c", _LIBRARY, str(ROWS), *map(str, files)]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    record: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return record


def available() -> list[str]:
    """Return the backends that are installed."""
    return [name for name in BACKENDS if name == "numpy" or importlib.util.find_spec(name) is not None]


def compare(title: str, file: str, obs: np.ndarray, expected: np.ndarray, facts: Any = None) -> Row:
    """Return the differences of an agent's predictions from those of its library."""
    from ckpttool.evaluation.loaded_agent import load_agent

    differences = {}
    with load_agent(file, facts=facts) as agent:
        actions, scale = agent._action_title(), _scale(agent, obs)
    for backend in available():
        with load_agent(file, facts=facts, backend=backend) as agent:
            differences[backend] = float(np.abs(agent.predict(obs)[0] - expected).max()) / scale
    return Row(title, actions, scale, differences)


def compare_libraries(folder: Path, pythons: Sequence[str]) -> Iterator[Row]:
    """Make an agent of every library that an interpreter can import, and yield its differences.

    It is the first one whose recorded verdict is right; bounds are given as a person would give them.
    """
    from ckpttool.evaluation.agent_facts import AgentFacts
    from tests.agent_truth import matrix
    from tests.agent_truth.agents import generators

    needed = {library: module.partition(".")[0] for library, (module, _) in generators().items()}
    installed = {python: _installed(python, {*needed.values()}) for python in pythons}
    recorded = [row for row in matrix.recorded().values() if row.state in (matrix.RIGHT, matrix.ASSUMED)]
    for library in generators():
        names = [verdict.agent for verdict in recorded if verdict.library == library]
        again = library.endswith(("_more", "_models")) or library in ("zoo", "variants")
        able = [python for python in pythons if needed[library] in installed[python]]
        for python in able if names and not again else ():
            command = [python, "-m", "tests.agent_truth.agents", str(folder), library, names[0]]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600)
            document = folder / f"{names[0]}.json"
            case = json.loads(document.read_text()) if document.exists() else {}
            if done.returncode or case.get("env", "") is not None:  # not installed, or judged by an episode
                continue
            low, high = (case[end] for end in ("low", "high"))
            obs, truth = np.load(folder / "obs.npy"), np.load(document.with_suffix(".npy"))
            yield compare(names[0], case["file"], obs, truth, AgentFacts(action_low=low, action_high=high))
            break


def _installed(python: str, modules: Iterable[str]) -> set[str]:
    """Return which of these packages an interpreter has."""
    program = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"
    done = subprocess.run([python, "-c", program, *modules], check=True, capture_output=True, text=True)
    return {*done.stdout.split()}


def compare_discrete(
    folder: Path, pythons: Sequence[str], backends: Sequence[str] | None = None
) -> Iterator[Row]:
    """Make the agents of discrete actions, and yield the differences of their scores; other actions are 1."""
    from ckpttool.core import UnsupportedError
    from ckpttool.evaluation.agent_facts import AgentFacts
    from ckpttool.evaluation.loaded_agent import load_agent
    from tests.agent_truth import discrete

    by_library: dict[str, list[str]] = {}
    for name, item in discrete.AGENTS.items():
        by_library.setdefault(item.module.partition(".")[0], []).append(name)
    for python in pythons:
        # A process for each library, so that what one of them raises costs none of the others.
        for library in by_library.keys() & _installed(python, by_library):
            command = [python, "-m", "tests.agent_truth.discrete", str(folder), *by_library[library]]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
            if done.returncode:
                print(f"failed: {library} with {python}: {done.stderr.strip().rpartition(chr(10))[2]}")
    for name, item in discrete.AGENTS.items():
        document = folder / f"{name.replace(' ', '_')}.json"
        if not document.exists():
            print(f"not made: {name}")
            continue
        case, obs = json.loads(document.read_text()), discrete.observations(item.shape)
        actions, scores = (np.load(document.with_suffix(f".{end}.npy")) for end in ("actions", "scores"))
        activation = dict(case["known"]).get("activation")
        facts = AgentFacts(activations=activation.split(",")) if activation else None
        differences = {}
        try:
            for backend in available() if backends is None else backends:
                with load_agent(case["file"], case["env"], facts=facts, backend=backend) as agent:
                    title, scale = agent._action_title(), _scale(agent, obs)
                    equal = np.array_equal(agent.act(obs), actions.reshape(agent.act(obs).shape))
                    differences[backend] = (
                        float(np.abs(agent.scores(obs) - scores).max()) / scale if equal else 1.0
                    )
            with load_agent(case["file"], case["env"], facts=facts, dtype="float64") as agent:
                rounding = float(np.abs(agent.scores(obs) - scores).max()) / scale
        except UnsupportedError as error:
            print(f"refused: {name}: {error.found}")
            continue
        yield Row(name, title, scale, differences, rounding)


def _scale(agent: Any, obs: np.ndarray) -> float:
    """Return the largest output of the last layer, or angle whose cosine is taken, at least 1."""
    open_ = agent._policy_network(agent._part, dataclasses.replace(agent._settings, head="identity"))
    angles = [np.pi * node.layer.number for node in open_.nodes if type(node.layer).__name__ == "Cosines"]
    last = max(number for number, node in enumerate(open_.nodes) if type(node.layer).__name__ == "Dense")
    open_ = dataclasses.replace(open_, nodes=open_.nodes[: last + 1], output=len(open_.inputs) + last)
    return max(1.0, *angles, float(np.abs(agent._backend.build(open_, "cpu").step(obs)[0]).max()))


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    names = available()
    if not rows:
        return "No agents were compared."
    lines = [
        f"| agent | actions | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for row in rows:
        cells = (f"{row.differences[name]:.1e}" if row.differences[name] else "0" for name in names)
        own = f" (its own rounding: {row.rounding:.1e})" if row.rounding > LIMIT else ""
        lines.append(f"| {row.agent}{own} | {row.actions} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Compare all agents; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", action="store_true")
    parser.add_argument("--python", action="append", default=[], help="interpreter that has more libraries")
    arguments = parser.parse_args()
    files = sorted(ZOO.glob("*/*/*.zip"))
    if not files or importlib.util.find_spec("stable_baselines3") is None:
        print("skipped: needs the corpus and stable_baselines3")
        return 0
    rows = []
    for file, (obs, expected) in predicted(files).items():
        title = f"{Path(file).parent.parent.name} {Path(file).stem}"
        rows.append(compare(title, file, np.asarray(obs, np.float32), np.asarray(expected)))
    print(table(rows))
    pythons = [sys.executable, *arguments.python]
    with tempfile.TemporaryDirectory() as folder:
        results = list(compare_libraries(Path(folder), pythons))
    print(table(results))
    with tempfile.TemporaryDirectory() as folder:
        choosing = list(compare_discrete(Path(folder), pythons))
    print(table(choosing))
    worst = max(max(row.differences.values()) for row in (*rows, *results, *choosing))
    print(f"\n{len(rows)} of {len(files)} agents, {ROWS} observations; largest difference {worst:.1e}")
    if arguments.document:
        head = (
            f"Largest difference from Stable-Baselines3's own prediction of {ROWS} observations,\n"
            "relative to the largest output of the last layer, at least 1: `python -m benchmarks.predictions "
            "--document`."
        )
        more = (
            "One agent with random weights of each library, made and asked by the library itself\n"
            "(`tests/agent_truth`), on 64 observations, with the same measure:"
        )
        last = (
            "Agents of discrete actions, which their libraries make with random weights\n"
            f"(`tests/agent_truth/discrete.py`), on {ROWS} observations. All actions are equal;\n"
            "the differences are those of values or logits, with the same measure:"
        )
        texts = ("# Predictions", head, table(rows), more, table(results), last, table(choosing))
        DOCUMENT.write_text("\n\n".join(texts) + "\n")
    return int(not all(row.is_equal for row in (*rows, *results, *choosing)))


if __name__ == "__main__":
    sys.exit(main())
