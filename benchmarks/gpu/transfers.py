"""Residency: copies between host and device, and waits of the host, counted while episodes are played.

On a GPU the profiler counts them. On the CPU, where no tensor is copied to another device, PyTorch's modes
count what would be a copy: a number that the host reads, and a tensor made of the host's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu import networks
from benchmarks.gpu.checks import TASKS, Enough, task
from benchmarks.gpu.parts import Absent, Check, Context, Figure, Part, require
from ckpttool.evaluation.rollout import RolloutSpec, rollouts
from ckpttool.networks import stack_networks

Found = list[Check | Figure]

# What the host may do in a hundred steps: copy how many episodes are finished, and wait for that.
READS, WAITS = 1, 1
# Rollouts of so many times a hundred steps are compared.
SHORT, LONG = 2, 6
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Counts(NamedTuple):
    """Copies from host to device, copies back, and waits of the host."""

    up: float
    down: float
    waits: float

    def beyond(self, other: Counts, rounds: int) -> Counts:
        """Return what was more than in `other`, for each of so many rounds."""
        return Counts(*((a - b) / rounds for a, b in zip(self, other, strict=True)))


def counted(context: Context, work: Callable[[], object]) -> Counts:
    """Run the work and count its copies and waits."""
    return _profiled(context, work) if context.cuda else _dispatched(work)


def _profiled(context: Context, work: Callable[[], object]) -> Counts:
    from torch.profiler import ProfilerActivity, profile

    context.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        context.wait()
    counts = [(item.key, item.count) for item in profiler.key_averages()]

    def number(*names: str) -> int:
        return sum(count for name, count in counts if name.startswith(names))

    return Counts(number("Memcpy HtoD"), number("Memcpy DtoH"), number(*_WAITS))


# Calls that give the host a tensor's numbers, and operations that make a tensor of the host's.
_READS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose"})
_READS |= {f"__{name}__" for name in ("bool", "int", "float", "index", "complex", "array", "contains")}
_MADE = frozenset({"lift_fresh", "scalar_tensor"})


def _dispatched(work: Callable[[], object]) -> Counts:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    copies = {"up": 0, "down": 0}

    class Calls(TorchFunctionMode):
        """Counts calls that would be copies if the device were another."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, inputs = getattr(function, "__name__", ""), kwargs or {}
            placed = inputs.get("device") is not None or any(isinstance(a, torch.device | str) for a in args)
            copies["down"] += name in _READS
            copies["up"] += name == "cuda" or (name == "to" and placed)
            return function(*args, **inputs)

    class Operations(TorchDispatchMode):
        """Counts tensors that are made of the host's numbers."""

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies["up"] += operation.overloadpacket.__name__ in _MADE
            return operation(*args, **(kwargs or {}))

    with Calls(), Operations():
        work()
    return Counts(copies["up"], copies["down"], copies["down"])


def counting(context: Context) -> Found:
    """Count known copies: a profiler that sees none would prove nothing."""
    require("torch")
    import torch

    there = torch.zeros(3, device=context.workspace)

    def work(times: int) -> Callable[[], object]:
        def copy() -> None:
            for _ in range(times):
                torch.tensor([1.0, 2.0], device=context.workspace)
                float(there[0])

        def inferred() -> None:
            with torch.inference_mode():
                copy()

        return inferred

    work(1)()
    counts = counted(context, work(7)).beyond(counted(context, work(2)), 5)
    if context.cuda and not any(counts):
        raise Absent("the profiler records no copies on this machine")
    return [
        Check("copies up that are counted", counts.up, 1, "at least"),
        Check("copies down that are counted", counts.down, 1, "at least"),
        Check("waits that are counted", counts.waits, 1, "at least"),
    ]


def _rollout(context: Context, policy: Any, environments: Any, rounds: int) -> Counts:
    """Return the counts of the beginning of a rollout: so many times a hundred steps."""
    count = 0

    def progress(*_: int) -> None:
        nonlocal count
        count += 1
        if count == rounds:
            raise Enough

    def work() -> None:
        with suppress(Enough):
            rollouts(policy, environments, RolloutSpec(16), progress=progress)

    counts = counted(context, work)
    if count != rounds:
        raise RuntimeError(f"the rollout ended after {count} looks of {rounds}")
    return counts


def in_the_loop(env: str) -> Callable[[Context], Found]:
    """Return the check of what a hundred more steps of a task cost in copies and waits."""

    def check(context: Context) -> Found:
        obs_dim, limit = TASKS[env]
        require("torch")
        policy = context.build(networks.task_actor(obs_dim, limit))
        with task(env, 4) as environments:
            _rollout(context, policy, environments, 1)  # warm: comparisons, libraries
            few, many = (_rollout(context, policy, environments, rounds) for rounds in (SHORT, LONG))
        counts = many.beyond(few, LONG - SHORT)
        note = f"{LONG} times a hundred steps beside {SHORT}"
        return [
            Check("copies to the device, each hundred steps", counts.up, 0, note=note),
            Check("copies to the host, each hundred steps", counts.down, READS, note=note),
            # The host must look whether episodes are finished: a count of none would be blind.
            Check("copies to the host that are counted", many.down, 1, "at least"),
            Check("waits, each hundred steps", counts.waits, WAITS, note=note),
        ]

    return check


def uploads(context: Context) -> Found:
    """Count the copies to the device of a whole evaluation, from building the policy on."""
    require("torch")
    obs_dim, limit = TASKS["Pendulum-v1"]
    members = [networks.task_actor(obs_dim, limit, seed) for seed in range(16)]

    def evaluation(count: int, episodes: int) -> float:
        def work() -> None:
            with task("Pendulum-v1", 2 * count) as environments:
                policy = context.build(stack_networks(members[:count]))
                rollouts(policy, environments, RolloutSpec(episodes), members=count)

        return counted(context, work).up

    evaluation(1, 2)
    more = 4 if context.quick else 8
    alone, longer, together = evaluation(1, 2), evaluation(1, more), evaluation(16, 2)
    return [
        Check("more copies for more episodes", longer - alone, 0),
        Check("more copies for 16 checkpoints than for one", together - alone, 0),
    ]


def step_copies(context: Context) -> Found:
    """Count what a call with arrays of the host costs: its observations up, its actions down, one wait."""
    context.require_cuda("copies of a policy's step")
    network = networks.actor((256, 256))
    policy, obs = context.build(network), np.ones((16, networks.OBS_DIM), np.float32)
    for _ in range(4):
        policy.step(obs)

    def calls(count: int) -> Callable[[], object]:
        return lambda: [policy.step(obs) for _ in range(count)]

    counts = counted(context, calls(30)).beyond(counted(context, calls(10)), 20)
    return [
        Check("copies up, each call", counts.up, 1),
        Check("copies down, each call", counts.down, 1),
        Check("waits, each call", counts.waits, 1),
    ]


PARTS = (
    Part("the counting itself", counting),
    *(Part(f"{env} in the loop", in_the_loop(env), 120) for env in TASKS),
    Part("uploads of an evaluation", uploads, 120),
    Part("a call with arrays of the host", step_copies),
)
