"""One action and one update of DDPG and TD3: PyTorch and TensorFlow, each eager and compiled."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

OBS, ACT, HIDDEN, BATCH = 17, 6, (400, 300), 100
GAMMA, TAU, ALGORITHMS = 0.99, 0.005, ("DDPG", "TD3")
BASE = "torch eager"
WAYS = (BASE, "torch.compile", "tf eager", "tf.function")
ROUNDS, LEAST_S = 3, 1.0


def batch(dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Return observations, actions, rewards, next observations and whether to go on."""
    random = np.random.default_rng(0)
    shapes = ((BATCH, OBS), (BATCH, ACT), (BATCH, 1), (BATCH, OBS))
    return (*(random.standard_normal(s).astype(dtype) for s in shapes), np.ones((BATCH, 1), dtype))


def timed(call: Callable[[], object]) -> float:
    """Return microseconds per call, after as many calls to warm up as are timed at first."""
    for _ in range(20):
        call()
    count, start = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < LEAST_S:
        call()
        count += 1
    return elapsed_s / count * 1e6


def by_torch(algorithm: str, *, compiled: bool) -> tuple[float, float]:
    """Return microseconds of one action and of one update in PyTorch."""
    import copy

    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)

    def mlp(inputs: int, outputs: int, *end: torch.nn.Module) -> torch.nn.Module:
        one, two = HIDDEN
        relu, linear = torch.nn.ReLU, torch.nn.Linear
        return torch.nn.Sequential(
            linear(inputs, one), relu(), linear(one, two), relu(), linear(two, outputs), *end
        )

    twins = 2 if algorithm == "TD3" else 1
    actor = mlp(OBS, ACT, torch.nn.Tanh())
    critics = torch.nn.ModuleList(mlp(OBS + ACT, 1) for _ in range(twins))
    slow_actor, slow_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    of_actor = torch.optim.Adam(actor.parameters(), 1e-3)
    of_critics = torch.optim.Adam(critics.parameters(), 1e-3)
    s, a, r, s2, on = (torch.from_numpy(array) for array in batch())

    def losses() -> torch.Tensor:
        with torch.no_grad():
            a2 = slow_actor(s2)
            if algorithm == "TD3":
                a2 = (a2 + (torch.randn_like(a2) * 0.2).clamp(-0.5, 0.5)).clamp(-1, 1)
            joined = torch.cat([s2, a2], 1)
            q2 = torch.stack([q(joined) for q in slow_critics]).amin(0)
            y = r + on * GAMMA * q2
        return sum(torch.nn.functional.mse_loss(q(torch.cat([s, a], 1)), y) for q in critics)

    def gain() -> torch.Tensor:
        return -critics[0](torch.cat([s, actor(s)], 1)).mean()

    if compiled:
        losses, gain = torch.compile(losses), torch.compile(gain)

    def update() -> None:
        of_critics.zero_grad()
        losses().backward()
        of_critics.step()
        of_actor.zero_grad()
        gain().backward()
        of_actor.step()
        with torch.no_grad():
            for fast, slow in ((actor, slow_actor), (critics, slow_critics)):
                torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), TAU)

    act = torch.compile(actor) if compiled else actor
    one = s[:1]

    def action() -> np.ndarray:
        with torch.no_grad():
            return act(one).numpy()

    return timed(action), timed(update)


def by_tensorflow(algorithm: str, *, compiled: bool) -> tuple[float, float]:
    """Return microseconds of one action and of one update in TensorFlow with Keras."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def mlp(inputs: int, outputs: int, end: str | None) -> keras.Model:
        layers = [keras.layers.Dense(n, "relu") for n in HIDDEN]
        return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(outputs, end)])

    twins = 2 if algorithm == "TD3" else 1
    actors = [mlp(OBS, ACT, "tanh") for _ in range(2)]
    critics, slow_critics = ([mlp(OBS + ACT, 1, None) for _ in range(twins)] for _ in range(2))
    actor, slow_actor = actors
    slow_actor.set_weights(actor.get_weights())
    for fast, slow in zip(critics, slow_critics, strict=True):
        slow.set_weights(fast.get_weights())
    of_actor, of_critics = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    q_variables = [v for q in critics for v in q.trainable_variables]
    of_actor.build(actor.trainable_variables)
    of_critics.build(q_variables)
    s, a, r, s2, on = (tf.constant(array) for array in batch())

    def update() -> None:
        a2 = slow_actor(s2)
        if algorithm == "TD3":
            noise = tf.clip_by_value(tf.random.normal(tf.shape(a2)) * 0.2, -0.5, 0.5)
            a2 = tf.clip_by_value(a2 + noise, -1.0, 1.0)
        joined = tf.concat([s2, a2], 1)
        y = r + on * GAMMA * tf.reduce_min(tf.stack([q(joined) for q in slow_critics]), 0)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean((q(tf.concat([s, a], 1)) - y) ** 2) for q in critics])
        of_critics.apply_gradients(zip(tape.gradient(loss, q_variables), q_variables, strict=True))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critics[0](tf.concat([s, actor(s)], 1)))
        mine = actor.trainable_variables
        of_actor.apply_gradients(zip(tape.gradient(loss, mine), mine, strict=True))
        for fast, slow in ((actor, slow_actor), *zip(critics, slow_critics, strict=True)):
            for new, old in zip(fast.variables, slow.variables, strict=True):
                old.assign(old + TAU * (new - old))

    one = s[:1]
    act = tf.function(lambda x: actor(x)) if compiled else actor
    step = tf.function(update) if compiled else update
    return timed(lambda: act(one).numpy()), timed(step)


def child(way: str, algorithm: str) -> None:
    """Print what one way takes."""
    run = by_torch if way.startswith("torch") else by_tensorflow
    print(*run(algorithm, compiled=way in ("torch.compile", "tf.function")))


def main() -> int:
    """Print microseconds and ratios to PyTorch as it comes; nothing is promised here."""
    for algorithm in ALGORITHMS:
        result: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                command = [sys.executable, "-W", "ignore", __file__, way, algorithm]
                ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode:
                    raise RuntimeError(f"{way} failed: {ran.stderr[-2000:]}")
                action, update = ran.stdout.split()[-2:]
                result[way].append((float(action), float(update)))
        print(f"\n{algorithm}, {OBS}-400-300-{ACT}, batch {BATCH}, one thread, {ROUNDS} rounds")
        for way, rounds in result.items():
            line = f"{way:<14}"
            for n, what in enumerate(("action", "update")):
                ratio = statistics.median(b[n] / a[n] for a, b in zip(result[BASE], rounds, strict=True))
                line += f"  {what} {statistics.median(t[n] for t in rounds):8.0f} us  x{ratio:<5.2f}"
            print(line)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(*sys.argv[1:])
    else:
        sys.exit(main())
