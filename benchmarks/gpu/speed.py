"""Speed beside eager PyTorch, as a user would write it, and beside what the device can do at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from benchmarks.gpu import networks
from benchmarks.gpu.checks import RETURN_TOLERANCE, TASKS, Enough, middle_difference, task
from benchmarks.gpu.limits import in_turn, ratio
from benchmarks.gpu.parts import Absent, Check, Context, Figure, Part, backend, float32_products, require
from ckpttool.evaluation.rollout import RolloutSpec, rollouts
from ckpttool.networks import Dense, Network, stack_networks

Found = list[Check | Figure]

EAGER, LIMIT = "eager PyTorch", "device limit"
ROWS = (1, 16, 1024, 16384)
TASK_ROWS = (1024, 4096, 16384, 65536, 262144)
CHECKPOINTS = 64
# A call that is slower than this is not measured round after round.
SLOWEST_CALL_S = 3.0
# The least that two hundred steps of a task may take to be measured.
SLOWEST_TASK_S = 10.0


def latencies(hidden: str) -> Callable[[Context], Found]:
    """Return the measurement of one actor: arrays of the host in and out, and tensors on the device."""

    def measure(context: Context) -> Found:
        require("torch")
        import torch

        network = networks.actor(networks.HIDDEN[hidden])
        policy, module = context.build(network), networks.module(network).to(context.workspace)
        results: Found = []
        for rows in (1, 16, 256) if context.quick else ROWS:
            obs = networks.observations(network, rows)
            there = torch.from_numpy(obs).to(context.workspace)
            with torch.inference_mode(), float32_products("ieee"):
                if (too_slow := _slow(lambda obs=obs: policy.step(obs))) is not None:
                    settings = {"network": hidden, "rows": rows}
                    results.append(Figure("host arrays", None, "us", settings, note=too_slow))
                    continue
                results += _host(context, policy, module, obs, hidden)
                results += _on_device(context, policy, module, there, hidden, network)
        return results

    return measure


def _slow(call: Callable[[], object]) -> str | None:
    call()
    start = time.perf_counter()
    call()
    elapsed_s = time.perf_counter() - start
    return f"not measured: one call takes {elapsed_s:.1f} s" if elapsed_s > SLOWEST_CALL_S else None


def _host(context: Context, policy: Any, module: Any, obs: np.ndarray, hidden: str) -> Iterator[Figure]:
    """Measure observations and actions as arrays of the host."""
    import torch

    device = context.workspace

    def eager() -> np.ndarray:
        actions: np.ndarray = module(torch.from_numpy(obs).to(device)).cpu().numpy()
        return actions

    def copies() -> None:
        there.copy_(room, non_blocking=True)
        back.copy_(action, non_blocking=True)
        context.wait()

    room = torch.from_numpy(obs.copy())
    action = module(room.to(device))
    back = torch.empty(action.shape, dtype=action.dtype)
    if context.cuda:
        room, back = room.pin_memory(), back.pin_memory()
    there = room.to(device)
    calls: dict[str, Callable[[], object]] = {"ours": lambda: policy.step(obs), EAGER: eager}
    calls["copies and a wait alone"] = copies
    times = in_turn(calls, context.wait, context.budget_s)
    own, plain, least = times.values()
    middle = statistics.median(own)
    settings = {"network": hidden, "rows": len(obs)}
    beside = {EAGER: ratio(plain, own), LIMIT: ratio(least, own)}
    yield Figure("host arrays", 1e6 * middle, "us", settings, beside)
    yield Figure("host arrays, eager PyTorch", 1e6 * statistics.median(plain), "us", settings)


def _on_device(
    context: Context, policy: Any, module: Any, there: Any, hidden: str, network: Network
) -> Iterator[Figure]:
    """Measure tensors that stay on the device, each call waited for, beside its products alone."""
    import torch

    kernels = [
        torch.from_numpy(node.layer.kernel).to(context.workspace)
        for node in network.nodes
        if isinstance(node.layer, Dense)
    ]
    hidden_rows = [torch.empty(len(there), kernel.shape[1], device=context.workspace) for kernel in kernels]
    units = networks.HIDDEN[hidden][0]
    square = torch.randn(units, units, device=context.workspace)
    wide, out = (torch.randn(len(there), units, device=context.workspace) for _ in range(2))

    def products() -> None:
        x = there
        for kernel, room in zip(kernels, hidden_rows, strict=True):
            x = torch.mm(x, kernel, out=room)

    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: policy.act(there),
        EAGER: lambda: module(there),
        "products": products,
        "square": lambda: torch.mm(wide, square, out=out),
    }

    def waited(call: Callable[[], object]) -> Callable[[], object]:
        def work() -> None:
            call()
            context.wait()

        return work

    if len(there) <= 16:
        calls = {name: waited(call) for name, call in calls.items()}
    times = in_turn(calls, context.wait, context.budget_s)
    own, plain, least, gemm = times.values()
    middle = statistics.median(own)
    # The rate of this actor's products as a share of the rate of one square product of its hidden units.
    rate = networks.flops(network) / (2 * units * units) * ratio(gemm, own)
    settings = {"network": hidden, "rows": len(there)}
    beside = {EAGER: ratio(plain, own), LIMIT: ratio(least, own)}
    if len(there) >= 1024:  # fewer rows are no matrix for a rate
        beside["GEMM rate"] = rate
    yield Figure("tensors on the device", 1e6 * middle, "us", settings, beside)
    yield Figure("tensors on the device, eager PyTorch", 1e6 * statistics.median(plain), "us", settings)


def by_backend(name: str) -> Callable[[Context], Found]:
    """Return the measurement of another backend's call, on the CPU and with one thread as in a rollout."""

    def measure(context: Context) -> Found:
        module = backend(name)
        figures: Found = []
        network = networks.actor((256, 256))
        policy = module.build(network, "cpu")
        several = None
        if name != "onnxruntime":
            several = module.build(
                stack_networks([networks.actor((256, 256), n) for n in range(CHECKPOINTS)]), "cpu"
            )
        sizes = [(policy, rows, 1) for rows in ((1, 64) if context.quick else ROWS)]
        sizes += [(several, rows, CHECKPOINTS) for rows in (1, 64) if several is not None]
        for built, rows, members in sizes:
            obs = networks.observations(network, rows * members)
            with built.threads(1) if hasattr(built, "threads") else nullcontext():
                times = in_turn(
                    {"step": lambda policy=built, obs=obs: policy.step(obs)}, lambda: None, context.budget_s
                )
            settings = {"network": "256x256", "rows": rows, "policies": members, "threads": 1}
            figures.append(
                Figure(f"{name} on the CPU", 1e6 * statistics.median(times["step"]), "us", settings)
            )
        return figures

    return measure


def jax_latency(context: Context) -> Found:
    """Measure the same actor as a function compiled by JAX, on JAX's own default device."""
    require("jax")
    import jax
    import jax.numpy as jnp

    network = networks.actor((256, 256))
    weights = [(n.layer.kernel, n.layer.bias) for n in network.nodes if isinstance(n.layer, Dense)]

    @jax.jit  # type: ignore[untyped-decorator]
    def act(x: Any) -> Any:
        for kernel, bias in weights[:-1]:
            x = jnp.maximum(x @ kernel + bias, 0)
        return jnp.tanh(x @ weights[-1][0] + weights[-1][1])

    figures: Found = []
    for rows in (1, 64) if context.quick else ROWS:
        obs = networks.observations(network, rows)
        times = in_turn({"step": lambda obs=obs: np.asarray(act(obs))}, lambda: None, context.budget_s)
        settings = {"network": "256x256", "rows": rows}
        name = f"jax.jit on {jax.default_backend()}"
        figures.append(Figure(name, 1e6 * statistics.median(times["step"]), "us", settings))
    return figures


def loop_rate(policy: Any, environments: Any, episodes: int, budget_s: float) -> tuple[float, int]:
    """Return the steps per second of a rollout's loop, and how many were timed.

    The first hundred steps of each row are not timed: what starts, compares and captures comes before them.
    """
    stamps: list[tuple[float, int]] = []

    def progress(_done: int, _total: int, steps: int) -> None:
        stamps.append((time.perf_counter(), steps))
        if len(stamps) > 2 and stamps[-1][0] - stamps[0][0] > budget_s:
            raise Enough

    with suppress(Enough):
        rollouts(policy, environments, RolloutSpec(episodes), progress=progress)
    # Steps that a report at the end repeats do not count: the last stamps may be equal.
    (began, first), (ended, last) = stamps[0], stamps[-1]
    if last <= first or ended <= began:
        raise RuntimeError(f"{len(stamps)} progress reports are too few to time the rollout")
    return (last - first) / (ended - began), last - first


def task_rates(env: str) -> Callable[[Context], Found]:
    """Return the measurement of a task whose episodes are whole on the device."""

    def measure(context: Context) -> Found:
        require("torch")
        obs_dim, limit = TASKS[env]
        network = networks.task_actor(obs_dim, limit)
        figures: Found = []
        rate = math.inf
        for rows in (64, 256) if context.quick else TASK_ROWS:
            settings = {"task": env, "rows": rows}
            if 200 * rows / rate > SLOWEST_TASK_S:
                note = f"not measured: 200 steps would take {200 * rows / rate:.0f} s"
                figures.append(Figure("steps on the device", None, "steps/s", settings, note=note))
                continue
            with task(env, rows) as environments:
                starts = time.perf_counter()
                (getattr(environments, "task", None) or environments.program).starts(np.arange(rows))
                starts = time.perf_counter() - starts
                factor = max(2, min(8, 32768 // rows))
                options: dict[str, dict[str, Any]] = {"ours": {}}
                if context.cuda:
                    options["no graphs"] = {"graphs": False}
                rates = {}
                for name, more in options.items():
                    policy = context.build(network, **more)
                    rates[name], timed = loop_rate(policy, environments, factor * rows, 5 * context.budget_s)
                    if name == "ours":
                        rate, steps = rates[name], timed
            beside = {"the same without graphs": rate / rates["no graphs"]} if context.cuda else {}
            if env == "Pendulum-v1":
                beside[EAGER] = rate / plain_pendulum(context, network, rows)
            settings |= {"steps": steps}
            note = f"start states: {starts:.2f} s on the host, not timed"
            figures.append(Figure("steps on the device", rate, "steps/s", settings, beside, note))
        return figures

    return measure


def plain_pendulum(context: Context, network: Network, rows: int) -> float:
    """Return the steps per second of Pendulum in a loop of eager PyTorch that counts returns alone."""
    import torch

    module, device = networks.module(network).to(context.workspace), context.workspace
    angle = torch.rand(rows, dtype=torch.float64, device=device)
    speed = torch.zeros(rows, dtype=torch.float64, device=device)
    returns = torch.zeros(rows, dtype=torch.float64, device=device)

    def step() -> None:
        nonlocal angle, speed, returns
        obs = torch.stack([angle.cos(), angle.sin(), speed], 1).float()
        torque = module(obs)[:, 0].clamp(-2, 2)
        upright = (angle + math.pi) % (2 * math.pi) - math.pi
        returns = returns - (upright**2 + 0.1 * speed**2 + 0.001 * torque**2)
        speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        angle = angle + speed * 0.05

    with torch.inference_mode(), _one_thread(context):
        durations = in_turn({"step": step}, context.wait, context.budget_s)["step"]
    return rows / statistics.median(durations)


def _one_thread(context: Context) -> Any:
    """Compute with one thread on the CPU, as ckpttool's rollouts do."""
    import torch

    class Threads:
        """Restores the number of threads."""

        def __enter__(self) -> None:
            self.before = torch.get_num_threads()
            torch.set_num_threads(1)

        def __exit__(self, *_: object) -> None:
            torch.set_num_threads(self.before)

    return nullcontext() if context.cuda else Threads()


def host_engines(context: Context) -> Found:
    """Measure Pendulum stepped on the host: in arrays, by Gymnasium's objects; and MuJoCo's HalfCheetah."""
    figures: Found = []
    plays: Mapping[str, tuple[str, int, Network]] = {
        "pendulum.batch": ("Pendulum-v1", 64 if context.quick else 1024, networks.task_actor(3, 2.0)),
        "gymnasium": ("Pendulum-v1", 8 if context.quick else 128, networks.task_actor(3, 2.0)),
        "mujoco.batch": ("HalfCheetah-v5", 2 if context.quick else 16, networks.actor((256, 256))),
    }
    for engine, (env, rows, network) in plays.items():
        settings = {"task": env, "rows": rows}
        for name in ("numpy", "torch"):
            device = context.device if name == "torch" else "cpu"
            title = f"steps on the host, {engine}, {name} on {'the device' if name == 'torch' else 'the CPU'}"
            try:
                with task(env, rows, engine if engine != "mujoco.batch" else "auto") as environments:
                    policy = (
                        context.build(network) if name == "torch" else backend(name).build(network, device)
                    )
                    played = rollouts(policy, environments, RolloutSpec(rows))[0]
            except Absent as absent:
                figures.append(Figure(title, None, "steps/s", settings, note=str(absent)))
                continue
            figures.append(Figure(title, played.steps_per_s, "steps/s", settings))
    return figures


def checkpoints_at_once(context: Context) -> Found:
    """Measure 64 checkpoint files: one sweep beside one evaluation after the other, in one process."""
    require("torch")
    from ckpttool.commands.evaluate import evaluate
    from ckpttool.commands.sweep import sweep
    from ckpttool.evaluation.protocol import Protocol

    count, env = (8 if context.quick else CHECKPOINTS), "Pendulum-v1"
    task(env, 1).close()
    paths = networks.write_agents(context.folder, count)
    how = Protocol(5, num_envs=5, device=context.device, backend="torch", engine="device")

    def apart() -> list[np.ndarray]:
        return [evaluate(path, env, how).rollout.returns for path in paths]

    def together() -> list[np.ndarray]:
        results = sweep(paths, env, how)
        if results.failed:
            raise RuntimeError(str(results.failed[0].error))
        return [evaluation.rollout.returns for evaluation in results.evaluations]

    pairs = zip(apart(), together(), strict=True)
    unequal = statistics.median(middle_difference(joint, alone) for alone, joint in pairs)
    times = _rounds({"apart": apart, "together": together}, 1 if context.quick else 2)
    settings = {"task": env, "checkpoints": count, "episodes": how.episodes}
    beside = {"one by one": ratio(times["apart"], times["together"])}
    return [
        Check("returns beside one by one", unequal, RETURN_TOLERANCE),
        Figure("a sweep of checkpoint files", statistics.median(times["together"]), "s", settings, beside),
    ]


def members_at_once(context: Context) -> Found:
    """Measure 64 policies in memory: stacked in one rollout beside one rollout after the other."""
    count, (obs_dim, limit) = (8 if context.quick else CHECKPOINTS), TASKS["Pendulum-v1"]
    members = [networks.task_actor(obs_dim, limit, seed) for seed in range(count)]
    rows, play = 5, RolloutSpec(5, 1000)

    def apart() -> None:
        for member in members:
            with task("Pendulum-v1", rows) as environments:
                rollouts(context.build(member), environments, play)

    def together() -> None:
        with task("Pendulum-v1", rows * count) as environments:
            rollouts(context.build(stack_networks(members)), environments, play, members=count)

    apart()
    together()
    times = _rounds({"apart": apart, "together": together}, 1 if context.quick else 2)
    settings = {"task": "Pendulum-v1", "checkpoints": count, "episodes": play.episodes}
    beside = {"one by one": ratio(times["apart"], times["together"])}
    name = "a stack of policies without files"
    return [Figure(name, statistics.median(times["together"]), "s", settings, beside)]


def _rounds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


PARTS = (
    *(Part(f"actor {hidden}", latencies(hidden), 120) for hidden in networks.HIDDEN),
    *(Part(f"steps of {env}", task_rates(env), 150) for env in TASKS),
    Part(f"{CHECKPOINTS} checkpoint files", checkpoints_at_once, 150),
    Part(f"{CHECKPOINTS} policies", members_at_once, 120),
    Part("steps on the host", host_engines, 90),
    Part("calls of numpy", by_backend("numpy"), 90, fresh=True),
    Part("calls of onnxruntime", by_backend("onnxruntime"), 90, fresh=True),
    Part("calls of tensorflow", by_backend("tensorflow"), 120, fresh=True),
    Part("calls of jax", jax_latency, 120, fresh=True),
)
