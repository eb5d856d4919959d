"""Correctness on the device: against float32 on the CPU and float64 in NumPy, and against itself."""

from __future__ import annotations

import gc
import importlib.util
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu import networks
from benchmarks.gpu.parts import (
    Absent,
    Check,
    Context,
    Figure,
    Part,
    backend,
    difference,
    float32_products,
    last_line,
    torch_policy,
    unlike,
)
from ckpttool.evaluation.gymnasium_engine import OBS, EnvSpec
from ckpttool.evaluation.rollout import Rollout, RolloutSpec, rollouts
from ckpttool.evaluation.simulators import DeviceVector
from ckpttool.networks import Network, stack_networks

Found = list[Check | Figure]

# Float32 rounds to 6e-8; sums of a thousand products stay below 1e-5, and TF32 is at 1e-4 and above.
TOLERANCE_32, TOLERANCE_64 = 1e-5, 1e-12
# TF32 is off by 2.4e-4 where float32 is exact; a convolution may be computed in another way than a product.
TF32_UNSEEN = 1e-6
# Rounding differs from device to device, and an unstable task lets it grow in some of its episodes.
RETURN_TOLERANCE = 1e-3
# A graph of each batch shape is kept for eight shapes: more than that are given.
SHAPES = (*range(1, 12), 1, 5, 64, 2)
CALLS = 3


def worst(
    policy: Any, network: Network, referee: Any, batches: Sequence[int], *, first_seed: int = 1
) -> float:
    """Return the largest difference between a policy and a referee over batches of observations.

    Each shape comes CALLS times with other numbers: a graph may be captured in a later call than the first,
    and a replay must take the new numbers.
    """
    largest = 0.0
    for number, rows in enumerate(batches):
        for call in range(CALLS):
            obs = networks.observations(network, rows, first_seed + CALLS * number + call)
            largest = max(largest, difference(policy.step(obs)[0], referee.step(obs)[0]))
    return largest


def layers(context: Context) -> Found:
    """Compare every kind of layer in float32 and in float64 with NumPy in float64."""
    checks: Found = []
    for name, network in networks.every_layer().items():
        referee = context.referee(network)
        narrow = worst(context.build(network), network, referee, (1, 33))
        wide = network.cast("float64")
        exact = worst(context.build(wide), wide, referee, (1, 33))
        checks.append(Check(f"{name}, float32", narrow, TOLERANCE_32))
        checks.append(Check(f"{name}, float64", exact, TOLERANCE_64))
    return checks


def policies(context: Context) -> Found:
    """Compare whole actors with float32 on the CPU and with float64 in NumPy."""
    checks: Found = []
    cases = {name: networks.actor(hidden) for name, hidden in networks.HIDDEN.items()}
    cases |= {"layer norms": networks.normed(), "two inputs": networks.critic(), "gated": networks.gated()}
    batches = (1, 3, 64) if context.quick else (1, 3, 64, 1000)
    for name, network in cases.items():
        policy, on_cpu = context.build(network), torch_policy(network, "cpu")
        checks.append(
            Check(
                f"{name}, NumPy float64",
                worst(policy, network, context.referee(network), batches),
                TOLERANCE_32,
            )
        )
        checks.append(
            Check(f"{name}, CPU float32", worst(policy, network, on_cpu, batches, first_seed=9), TOLERANCE_32)
        )
    return checks


def recurrent(context: Context) -> Found:
    """Carry the states of an LSTM and a GRU over twenty steps."""
    checks: Found = []
    for kind in ("lstm", "gru"):
        network = networks.recurrent(kind)
        policy, referee = context.build(network), context.referee(network)
        state: Any = ()
        expected_state: Any = ()
        largest = 0.0
        for number in range(20):
            obs = networks.observations(network, 5, number)
            action, state = policy.step(obs, state)
            expected, expected_state = referee.step(obs, expected_state)
            pairs = [(action, expected), *zip(state, expected_state, strict=True)]
            largest = max([largest, *(difference(*pair) for pair in pairs)])
        checks.append(Check(f"{kind}, 20 steps", largest, TOLERANCE_32))
    return checks


def pictures(context: Context) -> Found:
    """Compare a policy on images of 84 x 84 x 4."""
    network = networks.images()
    referee, policy = context.referee(network), context.build(network)
    largest = 0.0
    for number in range(2 * CALLS):
        rows = (1, 3)[number % 2]
        obs = networks.random(number).integers(0, 256, (rows, 84, 84, 4)).astype(np.float32)
        largest = max(largest, difference(policy.step(obs)[0], referee.step(obs)[0]))
    return [Check("NatureCNN", largest, TOLERANCE_32)]


def resident(context: Context) -> Found:
    """Compare `act`, whose tensors stay on the device, with `step`."""
    import torch

    checks: Found = []
    cases = {
        "actor": networks.normed(),
        "stack of 3": stack_networks([networks.normed(n) for n in range(3)]),
    }
    for name, network in cases.items():
        policy = context.build(network)
        obs = networks.observations(network, 12)
        tensor = policy.act(torch.from_numpy(obs).to(context.workspace))
        checks.append(Check(name, difference(tensor.cpu().numpy(), policy.step(obs)[0]), 1e-6))
        checks.append(Check(f"{name}, off the device", float(tensor.device != context.workspace), 0))
    return checks


def tf32(context: Context) -> Found:
    """Multiply numbers that TF32 rounds, with and without it, whatever the caller's settings are."""
    import torch

    units = 512
    # 1 + 2^-12 needs 12 bits after the point; TF32 keeps 10, bfloat16 7. Every product here is exact.
    value = np.float32(1 + 2**-12)
    square = networks.Dense(np.eye(units, dtype=np.float32))
    point = networks.Convolution(np.eye(units, dtype=np.float32)[None, None])
    network = networks.chain(units, square)
    image = networks.chain((4, 4, units), point, networks.Flatten())
    several = stack_networks([network, networks.chain(units, square)])
    obs, images = np.full((units, units), value), np.full((8, 4, 4, units), value)

    def error(of: Network, observations: np.ndarray, **options: Any) -> float:
        policy, exact = context.build(of, **options), np.float64(value)
        return max(float(abs(policy.step(observations)[0] - exact).max()) for _ in range(CALLS))

    checks: Found = [
        Check("dense, TF32 off", error(network, obs), TF32_UNSEEN),
        Check("stacked dense, TF32 off", error(several, obs), TF32_UNSEEN),
        Check("convolution, TF32 off", error(image, images), TF32_UNSEEN),
    ]
    with float32_products("tf32"):
        checks.append(Check("dense, where the caller has set TF32", error(network, obs), TF32_UNSEEN))
        checks.append(Check("convolution, where the caller has set TF32", error(image, images), TF32_UNSEEN))
        x, eye = (
            torch.from_numpy(item).to(context.workspace) for item in (obs, np.eye(units, dtype=np.float32))
        )
        rounds = float((torch.mm(x, eye).double() - float(value)).abs().max())
    if context.cuda and torch.cuda.get_device_capability(context.workspace) >= (8, 0):
        # Without it, a device that has no TF32 would pass the checks above.
        appears = error(network, obs, tf32=True)
        checks.append(Check("dense, TF32 on: the rounding shows", appears, 1e-4, "at least"))
        checks.append(Check("the caller's own products still round", rounds, 1e-4, "at least"))
    return checks


def stacks(context: Context) -> Found:
    """Compare 2 to 64 stacked members with each alone, and with NumPy in float64."""
    checks: Found = []
    for count in (2, 8) if context.quick else (2, 3, 8, 16, 64):
        members = [networks.normed(seed) for seed in range(count)]
        together = context.build(stack_networks(members))
        alone = [context.build(member) for member in members]
        exact = [context.referee(member) for member in members]
        apart, wrong = 0.0, 0.0
        for number in range(2 * CALLS):
            rows = (1, 16)[number % 2]
            obs = networks.observations(members[0], count * rows, number)
            blocks = [obs[n * rows :][:rows] for n in range(count)]
            actions = together.step(obs)[0]
            actions_of_each = [policy.step(block)[0] for policy, block in zip(alone, blocks, strict=True)]
            truth = [policy.step(block)[0] for policy, block in zip(exact, blocks, strict=True)]
            apart = max(apart, difference(actions, np.concatenate(actions_of_each)))
            wrong = max(wrong, difference(actions, np.concatenate(truth)))
        checks.append(Check(f"{count} members, each alone", apart, TOLERANCE_32))
        checks.append(Check(f"{count} members, NumPy float64", wrong, TOLERANCE_32))
    return checks


def graphs(context: Context) -> Found:
    """Compare captured graphs with eager launches, bit for bit, at shapes that come, go and come back."""
    context.require_cuda("CUDA graphs")
    checks: Found = []
    cases = {"actor": networks.actor((256, 256)), "layer norms": networks.normed()}
    for name, network in cases.items():
        captured, eager = context.build(network), context.build(network, graphs=False)
        different = 0.0
        for rows in (*SHAPES, 4096):
            for seed in range(CALLS):
                obs = networks.observations(network, rows, seed)
                different += unlike(captured.step(obs)[0], eager.step(obs)[0])
        checks.append(Check(f"{name}: elements with other bits", different, 0))
    return checks


def shapes(context: Context) -> Found:
    """Give batches of more shapes than are kept, some of them again."""
    network = networks.normed()
    policy, referee = context.build(network), context.referee(network)
    checks: Found = [
        Check(f"{len(set(SHAPES))} batch shapes", worst(policy, network, referee, SHAPES), TOLERANCE_32)
    ]
    # What a call returned is the caller's own, whatever later calls write.
    obs = networks.observations(network, 4)
    first = policy.step(obs)[0]
    kept = first.copy()
    policy.step(obs + 1)
    checks.append(Check("elements of a result that a later call changed", unlike(first, kept), 0))
    return checks


class Disturbed(Exception):  # noqa: N818 - raised on purpose
    """Raised inside a capture."""


def failing_capture(context: Context) -> Found:
    """Raise inside a capture, and wait inside one; the device and new captures must work afterwards."""
    context.require_cuda("captures")
    import torch

    from ckpttool.networks import torch_programs

    network = networks.normed()
    before, referee = context.build(network), context.referee(network)
    before.step(networks.observations(network, 7))
    tensor = torch.ones(4, device=context.workspace)

    def raises() -> list[Any]:
        doubled = tensor * 2
        if torch.cuda.is_current_stream_capturing():
            raise Disturbed
        return [doubled]

    def waits() -> list[Any]:
        return [tensor * float(tensor.sum())]

    checks: Found = []
    for name, body in {"an exception": raises, "a wait": waits}.items():
        raised = False
        try:
            with torch.inference_mode():
                torch_programs.capture_graph(body, context.workspace)
        except Exception:  # noqa: BLE001 - which one is the backend's matter
            raised = True
        checks.append(Check(f"{name} inside a capture is raised", float(raised), 1, "at least"))
        for which, policy in {"old": before, "new": context.build(network)}.items():
            error = worst(policy, network, referee, (1, 7, 9))
            checks.append(Check(f"after {name}: {which} policy", error, TOLERANCE_32))
    return checks


def out_of_memory(context: Context) -> Found:
    """Ask for a batch that does not fit: one clear error with the rows that fit, and a usable device."""
    context.require_cuda("errors about the device's memory")
    import torch

    from ckpttool.core import CkpttoolError

    network = networks.actor((1024, 1024))
    policy, referee = context.build(network), context.referee(network)
    policy.step(networks.observations(network, 8))
    reserved = torch.cuda.memory_reserved(context.workspace)
    total = torch.cuda.get_device_properties(context.workspace).total_memory
    room = 1 << 30
    rows = 4 * room // (4 * 1024)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + room) / total), context.workspace)
    message, fits, kind = "no error", "", None
    try:
        try:
            policy.step(np.zeros((rows, networks.OBS_DIM), np.float32))
        except Exception as error:  # noqa: BLE001 - its class is what is checked
            kind, message = type(error), last_line(error)
            fits = str(getattr(error, "expected", None) or "")
        clear = kind is not None and issubclass(kind, CkpttoolError)
        checks: Found = [Check("the error is ckpttool's own", float(clear), 1, "at least", note=message)]
        stated = re.search(r"\d[\d,]*", fits)
        fitting = int(stated[0].replace(",", "")) if stated else 0
        checks.append(Check("rows that fit, as the error states", fitting, 1, "at least", note=fits))
        if fitting:
            obs = networks.observations(network, fitting)
            action = policy.step(obs)[0]
            error = difference(action[:64], referee.step(obs[:64])[0])
            checks.append(Check("a batch of as many rows", error, TOLERANCE_32))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, context.workspace)
    checks.append(Check("the policy afterwards", worst(policy, network, referee, (1, 8, 64)), TOLERANCE_32))
    return checks


def two_devices(context: Context) -> Found:
    """Put policies on two devices by index, while the other is the current one."""
    context.require_cuda("several devices")
    import torch

    if (count := torch.cuda.device_count()) < 2:
        raise Absent(f"{count} CUDA device")
    checks: Found = []
    network = networks.normed()
    policies_ = {index: context.build(network, f"cuda:{index}") for index in (0, 1)}
    for index, policy in policies_.items():
        with torch.cuda.device(1 - index):
            error = worst(policy, network, context.referee(network), (1, 16, 3))
        checks.append(Check(f"cuda:{index}", error, TOLERANCE_32))
        checks.append(Check(f"cuda:{index} is another device", float(policy.device != f"cuda:{index}"), 0))
    return checks


@contextmanager
def busy(context: Context) -> Iterator[None]:
    """Multiply matrices on the device in another thread, on another stream."""
    import torch

    stop = threading.Event()
    started = threading.Event()

    def work() -> None:
        size = 2048 if context.cuda else 256
        with context.current(), torch.inference_mode():
            stream = torch.cuda.Stream(context.workspace) if context.cuda else None
            with torch.cuda.stream(stream):
                x = torch.ones(size, size, device=context.workspace)
                while not stop.is_set():
                    for _ in range(8):
                        torch.mm(x, x)
                    started.set()
                    if stream is not None:
                        stream.synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started.wait(20)
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def busy_device(context: Context) -> Found:
    """Compute while another stream keeps the device busy, with an old policy and a new one."""
    network = networks.normed()
    policy = context.build(network)
    inputs = [networks.observations(network, 64, seed) for seed in range(30)]
    idle = [policy.step(obs)[0] for obs in inputs]
    apart = 0.0
    with busy(context):
        during = context.build(network)
        for obs, expected in zip(inputs, idle, strict=True):
            apart = max(
                apart, difference(policy.step(obs)[0], expected), difference(during.step(obs)[0], expected)
            )
    # The same kernels in the same order on a GPU; a CPU's library may divide a sum otherwise.
    return [Check("busy beside idle", apart, 0 if context.cuda else 1e-6)]


class Countdown:
    """A task of four steps whose reward is its seed: cheap, and its returns are known."""

    notes = ()

    def __init__(self, steps: int = 4) -> None:
        one = np.ones(1, np.float32)
        self.steps = steps
        self.spec = EnvSpec("Countdown-v0", ((OBS, (3,), "float32"),), -one, one, steps, {})

    def compare(self, _device: Any) -> None:
        """Return None: no library has this task."""

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the seeds, and how many steps are left."""
        return seeds.astype(np.float64), np.full(len(seeds), float(self.steps))

    def observe(self, state: Any) -> Any:
        """Return float32 [rows, 3]."""
        import torch

        seed, left = state
        return torch.stack([seed * 0, left, left], 1).float()

    def step(self, state: Any, _actions: Any) -> Any:
        """Pay the seed; nothing terminates."""
        seed, left = state
        return (seed, left - 1), seed, left < 0

    def close(self) -> None:
        """Do nothing."""


def vector(program: Any, rows: int) -> Any:
    """Return rows of a task of one's own."""
    return DeviceVector(program, rows)


def memory(context: Context) -> Found:
    """Evaluate 200 times, each with a new policy and a new capture; memory must not grow."""
    import torch

    network = networks.normed(0)
    small = networks.task_actor(3, 1.0)
    times = 12 if context.quick else 200

    def once(seed: int) -> None:
        policy = context.build(small)
        rollouts(policy, vector(Countdown(), 8), RolloutSpec(16, seed))
        several = context.build(network)
        for _ in range(CALLS):
            several.step(networks.observations(network, 32, seed))

    def allocated() -> int:
        gc.collect()
        return int(torch.cuda.memory_allocated(context.workspace))

    def used() -> int:
        gc.collect()
        if context.cuda:
            context.wait()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(context.workspace)
            return int(total - free)
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    for seed in range(times // 4):
        once(seed)
    before = used(), allocated() if context.cuda else 0
    for seed in range(times):
        once(seed)
    grown = (used() - before[0]) / (1 << 20)
    kind = "the device's" if context.cuda else "the process's"
    # A leak of one captured graph each would be above 200 MiB; libraries may take a workspace or two.
    checks: Found = [Check(f"{times} evaluations: {kind} memory", grown, 16, unit="MiB")]
    if context.cuda:
        checks.append(
            Check(f"{times} evaluations: live tensors", allocated() - before[1], 0, unit="B"),
        )
    return checks


def task(env: str, rows: int, engine: str = "device") -> Any:
    """Return a task's environments; raise Absent where this engine does not have it here."""
    from ckpttool.core import MissingExtraError, UsageError
    from ckpttool.evaluation import environments

    try:
        return environments.make_vector_env(env, rows, engine=engine)
    except (MissingExtraError, UsageError) as error:
        raise Absent(last_line(error)) from None


class Enough(Exception):  # noqa: N818 - raised on purpose
    """Ends a rollout from which everything is known."""


TASKS = {"Pendulum-v1": (3, 2.0), "MountainCarContinuous-v0": (2, 1.0)}


def _played(context: Context, env: str, device: str, rows: int, play: RolloutSpec, **options: Any) -> Rollout:
    obs_dim, limit = TASKS[env]
    with task(env, rows) as environments:
        policy = context.build(networks.task_actor(obs_dim, limit), device, **options)
        return rollouts(policy, environments, play)[0]


def middle_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the median over episodes of the differences, relative above 1; infinity for other numbers."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return math.inf
    return float(np.median(abs(actual - expected) / np.maximum(1.0, abs(expected))))


def device_rollouts(env: str) -> Callable[[Context], Found]:
    """Return the check of a task's rollouts: on the device, on the CPU, by Gymnasium, and again."""

    def check(context: Context) -> Found:
        rows, play = 8, RolloutSpec(12, 3)
        own = _played(context, env, context.device, rows, play)
        again = _played(context, env, context.device, rows, play)
        on_cpu = _played(replace(context, make=torch_policy), env, "cpu", rows, play)
        checks: Found = [
            Check("returns, CPU", middle_difference(own.returns, on_cpu.returns), RETURN_TOLERANCE),
            Check("lengths, CPU", middle_difference(own.lengths, on_cpu.lengths), 0),
            Check("the same rollout again: returns with other bits", unlike(own.returns, again.returns), 0),
        ]
        if context.cuda:
            eager = _played(context, env, context.device, rows, play, graphs=False)
            name = "captured and eager: returns with other bits"
            checks.append(Check(name, unlike(own.returns, eager.returns), 0))
        for item in own.agreement.deviations if own.agreement is not None else ():
            checks.append(Check(f"a step beside Gymnasium's: {item.quantity}", item.largest, item.tolerance))
        if importlib.util.find_spec("gymnasium") is not None:
            obs_dim, limit = TASKS[env]
            with task(env, rows, "gymnasium") as environments:
                numpy_policy = backend("numpy").build(networks.task_actor(obs_dim, limit))
                expected_result = rollouts(numpy_policy, environments, play)[0]
            apart = middle_difference(own.returns, expected_result.returns)
            checks.append(Check("returns, Gymnasium", apart, RETURN_TOLERANCE))
        return checks

    return check


def host_rollouts(context: Context) -> Found:
    """Play environments of the host with a policy on the device."""
    network, play = networks.task_actor(3, 2.0), RolloutSpec(10, 5)

    def returns(policy: Any) -> np.ndarray:
        with task("Pendulum-v1", 10, "auto") as environments:
            return rollouts(policy, environments, play)[0].returns

    exact = returns(context.referee(network))
    apart = middle_difference(returns(context.build(network)), exact)
    return [Check("Pendulum-v1, NumPy float64", apart, RETURN_TOLERANCE)]


def known_returns(context: Context) -> Found:
    """Play a task whose returns are known, with two members and more episodes than rows."""
    members = [networks.task_actor(3, 1.0, seed) for seed in range(2)]
    play = RolloutSpec(13, 5)
    checks: Found = []
    for number, rollout in enumerate(
        rollouts(context.build(stack_networks(members)), vector(Countdown(), 2 * 4), play, members=2)
    ):
        expected = 4.0 * (5 + np.arange(13))
        checks.append(Check(f"member {number}: returns", difference(rollout.returns, expected), 0))
    return checks


def other_backend(name: str) -> Callable[[Context], Found]:
    """Return the check of another backend, on the device if it has it, else on the CPU."""

    def check(context: Context) -> Found:
        from ckpttool.core import UsageError

        module = backend(name)
        device, note = context.device, ""
        try:
            module.build(networks.normed(), device)
        except UsageError as error:
            device, note = "cpu", error.message
        checks: Found = []
        cases: Mapping[str, Network] = {
            "256x256": networks.actor((256, 256)),
            "layer norms": networks.normed(),
            "stack of 4": stack_networks([networks.normed(seed) for seed in range(4)]),
        }
        for title, network in cases.items():
            if name == "onnxruntime" and network.members > 1 and device != "cpu":
                continue
            policy = module.build(network, device)
            error = worst(policy, network, context.referee(network), (4, 64))
            checks.append(Check(f"{title} on {device}", error, TOLERANCE_32, note=note))
        return checks

    return check


PARTS = (
    Part("every layer", layers, 90),
    Part("actors", policies),
    Part("recurrent policies", recurrent),
    Part("image policies", pictures),
    Part("tensors that stay on the device", resident),
    Part("TF32", tf32),
    Part("stacked policies", stacks),
    Part("captured graphs", graphs),
    Part("batch shapes", shapes),
    Part("a capture that fails", failing_capture),
    Part("out of memory", out_of_memory),
    Part("two devices", two_devices),
    Part("a busy device", busy_device),
    Part("memory after evaluations", memory, 120),
    Part("known returns", known_returns),
    *(Part(f"rollouts of {env}", device_rollouts(env)) for env in TASKS),
    Part("rollouts of environments on the host", host_rollouts),
    *(
        Part(f"backend {name}", other_backend(name), 120, fresh=True)
        for name in ("numpy", "onnxruntime", "tensorflow")
    ),
)
