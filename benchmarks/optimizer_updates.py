"""Update errors of every optimizer in both frameworks, against NumPy's float64 reference.

    python -m benchmarks.optimizer_updates [FILE.md]

A policy and its value continue with A2C's loss from a state of 40 updates; each framework takes 1 and 100
steps. An error is |update - reference| / |reference|, the largest of all networks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpttool.networks import Activation, Dense, Learner, Network, Node, Worker
from ckpttool.networks.policy_training import A2C, OptimizerSetup
from ckpttool.verification.policy_training import make_batches
from ckpttool.verification.update_comparison import compare_train_steps

OBS, ACT, HIDDEN, STEPS, COUNT = 6, 2, 32, 100, 40
ADAM = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
ROOT = {"learning_rate": 1e-3, "rho": 0.99, "epsilon": 1e-5}
MOMENTUM = {"learning_rate": 1e-3, "momentum": 0.9}
Kind = tuple[str, dict[str, float], tuple[str, ...], float, bool]
# Family, settings, slots, L2 penalty of kernels, and whether epsilon is PyTorch's.
KINDS: dict[str, Kind] = {
    "SGD": ("SGD", {"learning_rate": 1e-3}, (), 0.0, True),
    "SGD, momentum": ("SGD", MOMENTUM, ("buffer",), 0.0, True),
    "SGD, Nesterov": ("SGD", {**MOMENTUM, "nesterov": 1.0}, ("buffer",), 0.0, True),
    "RMSprop": ("RMSprop", ROOT, ("rms",), 0.0, True),
    "RMSprop, centered, momentum": ("RMSprop", {**ROOT, "momentum": 0.5}, ("rms", "mg", "buffer"), 0.0, True),
    "Adam, epsilon of PyTorch": ("Adam", ADAM, ("m", "v"), 0.0, True),
    "Adam, epsilon of Keras": ("Adam", ADAM, ("m", "v"), 0.0, False),
    "Adam, AMSGrad": ("Adam", ADAM, ("m", "v", "vhat"), 0.0, True),
    "Adam, L2 of kernels": ("Adam", ADAM, ("m", "v"), 0.01, True),
    "Adagrad": (
        "Adagrad",
        {"learning_rate": 1e-3, "epsilon": 1e-7, "initial_accumulator_value": 0.1},
        ("squares",),
        0.0,
        True,
    ),
    "Adamax": ("Adamax", ADAM, ("m", "u"), 0.0, True),
    "Adadelta": (
        "Adadelta",
        {"learning_rate": 0.1, "rho": 0.95, "epsilon": 1e-7},
        ("mean_squares", "mean_deltas"),
        0.0,
        True,
    ),
    "AdamW": ("Adam", {**ADAM, "weight_decay": 0.01}, ("m", "v"), 0.0, True),
}


def network(generator: np.random.Generator, width: int) -> Network:
    """Return a small network of observations."""

    def dense(n_in: int, n_out: int) -> Dense:
        kernel = generator.normal(size=(n_in, n_out)) / np.sqrt(n_in)
        return Dense(kernel.astype(np.float32), (generator.normal(size=n_out) / 10).astype(np.float32))

    layers = (dense(OBS, HIDDEN), Activation("tanh"), dense(HIDDEN, width))
    return Network((("obs", OBS),), tuple(Node(layer, (n,)) for n, layer in enumerate(layers)), len(layers))


def learner(kind: Kind) -> Learner:
    """Return a policy with one optimizer that has made COUNT updates."""
    family, settings, names, l2, corrected = kind
    generator = np.random.default_rng(3)
    networks = {"actor": network(generator, 2 * ACT), "value": network(generator, 1)}
    bounds = np.zeros(ACT)
    agent = Learner(A2C, networks, {}, (), {}, {}, bounds, bounds)
    arrays = [array for title in networks for array in agent.arrays(title)]
    slots = {
        name: tuple(
            generator.uniform(0.5, 1.5, array.shape) * 1e-4 * (2 if name == "vhat" else 1)
            if name in ("v", "vhat", "rms", "squares", "u", "mean_squares", "mean_deltas")
            else generator.normal(size=array.shape) * 1e-3
            for array in arrays
        )
        for name in names
    }
    decays = tuple(l2 * (array.ndim == 2) for array in arrays)
    setup = OptimizerSetup(family, tuple(networks), settings, COUNT, slots, decays, corrected=corrected)
    return replace(agent, optimizers={"optimizer": setup})


def rows(workers: list[Worker]) -> list[str]:
    """Return the table's rows: the errors of TensorFlow and of PyTorch, and between both."""
    rows = []
    for name, kind in KINDS.items():
        agent = learner(kind)
        moved = compare_train_steps((agent, agent), make_batches(agent, STEPS), workers).moved
        cells = []
        for dtype in ("float64", "float32"):
            for step in (1, STEPS):
                mine = [update for update in moved if (update.dtype, update.step) == (dtype, step)]
                sides = ([update.error_a for update in mine], [update.error_b for update in mine])
                cells += [f"{max(errors):.0e}" for errors in sides]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


HEAD = """# Update errors of optimizers

`python -m benchmarks.optimizer_updates benchmarks/results/optimizers.md` writes this table:
|update - reference| / |reference| after 1 and 100 steps, against the float64 update rules of the papers in
NumPy. Each framework continues from the same state of 40 updates, so the difference between two frameworks, in
either direction, is at most the sum of two errors. Bounds: 1e-10 in float64; 1e-4 in float32, or the rounding
of the weights themselves.

| optimizer | float64, 1: Keras | PyTorch | 100: Keras | PyTorch | float32, 1: Keras | PyTorch | 100: Keras | PyTorch |
|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501 - a Markdown table


def main() -> None:
    """Print or write the table."""
    with Worker("tensorflow", threads=1) as one, Worker("torch", threads=1) as other:
        text = HEAD + "\n".join(rows([one, other])) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
