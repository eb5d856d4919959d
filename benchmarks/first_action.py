"""From the start of the process to the first action: our backends beside Stable-Baselines3 and torch."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.measure import compare, table

AGENT = Path(__file__).parents[1] / "sample_ckpts" / "td3_pendulum_torch" / "ckpt-15000.pt"
ENV = "Pendulum-v1"
FLOOR, PEER = "import numpy", "Stable-Baselines3: load, predict"

OURS = """
import sys
import numpy as np
from ckpttool.core import plugins
from ckpttool.commands import evaluate as op
from ckpttool.evaluation import playing
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent as restore
path, env, backend = sys.argv[1:]
how = Protocol(episodes=1, backend=backend)
agent = restore(path)
place = playing.choose_environment(agent, env, how)
with place.make(1) as vector:
    entrant = playing.prepare_agent(agent, place, how, vector.spec)
    policy = plugins.find("backends", backend).load().build(entrant.network, "cpu")
    vector.reset(np.arange(1), np.arange(1))
    policy.step(vector.obs)
"""
SB3 = """
import sys
import gymnasium
from stable_baselines3 import TD3
model = TD3.load(sys.argv[1], device="cpu")
model.predict(gymnasium.make(sys.argv[2]).reset(seed=0)[0], deterministic=True)
"""
TORCH = """
import sys
import gymnasium, torch
held = torch.load(sys.argv[1], weights_only=True)["actor"]
x = torch.from_numpy(gymnasium.make(sys.argv[2]).reset(seed=0)[0])[None]
names = [name[:-7] for name in held if name.endswith(".weight")]
for name in names:
    x = torch.nn.functional.linear(x, held[name + ".weight"], held[name + ".bias"])
    x = x.tanh() if name == names[-1] else x.relu()
"""
# The embedded backend is the one that must start at once.
MOST_OF_PEER = 0.25


def main() -> int:
    """Print seconds and ratios; return 1 if the promise is broken."""
    from ckpttool import convert

    with tempfile.TemporaryDirectory() as folder:
        zipped = f"{folder}/agent.zip"
        convert(str(AGENT), zipped, to="sb3")
        python = [sys.executable, "-c"]
        commands = {
            FLOOR: [*python, "import numpy"],
            "gymnasium.make alone": [*python, f"import gymnasium; gymnasium.make('{ENV}').reset(seed=0)"],
            **{
                f"ckpttool, {backend}": [*python, OURS, str(AGENT), ENV, backend]
                for backend in ("numpy", "onnxruntime", "torch", "tensorflow")
            },
            "torch.load, linear layers": [*python, TORCH, str(AGENT), ENV],
            PEER: [*python, SB3, zipped, ENV],
        }
        costs = compare(commands, rounds=7)
    print(table(costs, FLOOR))
    ratio = costs["ckpttool, numpy"].ratio(costs[PEER])
    kept = ratio <= MOST_OF_PEER
    print(f"{'kept' if kept else 'BROKEN'}: {ratio:.2f} of Stable-Baselines3's time, at most {MOST_OF_PEER}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
