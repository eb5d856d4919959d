"""The start: from a checkpoint file to the first action in a fresh process, beside importing PyTorch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.gpu import networks
from benchmarks.gpu.groups import ROOT
from benchmarks.gpu.limits import ratio
from benchmarks.gpu.parts import Check, Context, Figure, Part, require

Found = list[Check | Figure]

IMPORT, FIRST, PLAIN = "import torch", "from file to first action", "torch.load, a module and one call"
READY = "import torch, first tensor on the device"

_OURS = """
import sys
import numpy as np
from ckpttool.core import plugins
from ckpttool.networks.build import policy_network
from ckpttool.evaluation.restore import restore_agent as restore
from ckpttool.evaluation.agent_networks import ActionBounds as Bounds, derive_network_settings as wire
path, device = sys.argv[1:]
agent = restore(path)
wiring, _ = wire(agent, Bounds([-2.0], [2.0], "the task"))
network = policy_network(agent.tree, agent.playable("actor"), wiring)
policy = plugins.find("backends", "torch").load().build(network, device)
action, _ = policy.step(np.zeros((1, 3), np.float32))
assert action.shape == (1, 1) and np.isfinite(action).all()
"""
_PLAIN = """
import sys
import torch
path, device = sys.argv[1:]
held = torch.load(path, weights_only=True, map_location=device)["actor"]
sizes = [held[f"l{n}.weight"].shape for n in (1, 2, 3)]
layers = [torch.nn.Linear(columns, rows) for rows, columns in sizes]
one, two, three = layers
module = torch.nn.Sequential(one, torch.nn.ReLU(), two, torch.nn.ReLU(), three, torch.nn.Tanh())
for number, layer in enumerate(layers, 1):
    layer.weight.data, layer.bias.data = held[f"l{number}.weight"], held[f"l{number}.bias"]
with torch.inference_mode():
    module(torch.zeros(1, 3, device=device)).mul(2).cpu().numpy()
"""


def first_action(context: Context) -> Found:
    """Measure whole fresh processes in turn; each must end well."""
    require("torch")
    (path,) = networks.write_agents(context.folder, 1)
    device = str(context.workspace)
    programs = {
        IMPORT: ["import torch"],
        READY: [f"import torch; torch.zeros(1, device={device!r}).cpu()"],
        FIRST: [_OURS, path, device],
        PLAIN: [_PLAIN, path, device],
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(3 if context.quick else 5):
        for name, (program, *arguments) in programs.items():
            start = time.perf_counter()
            _run(program, arguments)
            if number:  # the first fills the page cache
                times[name].append(time.perf_counter() - start)
    figures: Found = []
    for name, durations in times.items():
        beside = {}
        if name == FIRST:
            beside = {f"{other} / this": ratio(times[other], durations) for other in (IMPORT, READY, PLAIN)}
        figures.append(Figure(name, statistics.median(durations), "s", {"rounds": len(durations)}, beside))
    return figures


def _run(program: str, arguments: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(lines[-1])


def command(context: Context) -> Found:
    """Measure the command `ckpttool eval`: 64 files in one command, and one file."""
    require("torch")
    count = 4 if context.quick else 64
    paths = networks.write_agents(context.folder, count)
    common = ["eval", "--env", "Pendulum-v1", "--engine", "device", "--backend", "torch", "--quiet"]
    common += ["--device", str(context.workspace), "--episodes", "5"]
    times: dict[str, list[float]] = {"one": [], "all": []}
    for _ in range(1 if context.quick else 2):
        for name, files in {"one": paths[:1], "all": paths}.items():
            start = time.perf_counter()
            program = "import sys; from ckpttool.cli import main; sys.argv[0] = 'ckpttool'; sys.exit(main())"
            _run(program, [*common, *files])
            times[name].append(time.perf_counter() - start)
    apart = count * min(times["one"])
    settings = {"checkpoints": count, "episodes": 5}
    beside = {"as many commands (one of them timed)": apart / min(times["all"])}
    return [Figure("ckpttool eval of all files, one command", min(times["all"]), "s", settings, beside)]


PARTS = (
    Part("from file to first action", first_action, 150),
    Part("one command for all checkpoints", command, 120),
)
