"""Cold listing of one TD3 checkpoint: ckpttool beside numpy's import, TensorFlow and PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from benchmarks.measure import Cost, compare, table

SAMPLES = Path(__file__).resolve().parent.parent / "sample_ckpts"
TF = str(SAMPLES / "td3_pendulum_tf" / "ckpt-15000")
TORCH = str(SAMPLES / "td3_pendulum_torch" / "ckpt-15000.pt")

FLOOR = "import numpy"
LIMIT = 2.5
FASTER_THAN_TENSORFLOW, FASTER_THAN_TORCH = 10.0, 5.0


def commands(bundle: str = TF, file: str = TORCH) -> dict[str, list[str]]:
    """Return what is timed; a framework that is not installed is left out."""
    python = [sys.executable, "-c"]
    tool = str(Path(sys.executable).with_name("ckpttool"))
    commands = {
        FLOOR: [*python, "import numpy"],
        "ckpttool inspect (TensorFlow)": [tool, "inspect", bundle],
        "ckpttool inspect --json (TensorFlow)": [tool, "inspect", bundle, "--json"],
        "ckpttool inspect (PyTorch)": [tool, "inspect", file],
        "ckpttool inspect --json (PyTorch)": [tool, "inspect", file, "--json"],
    }
    if importlib.util.find_spec("tensorflow"):
        code = f"import tensorflow as tf; print(tf.train.list_variables({bundle!r}))"
        commands["tf.train.list_variables"] = [*python, code]
    if importlib.util.find_spec("torch"):
        commands["torch.load"] = [*python, f"import torch; print(torch.load({file!r}, weights_only=True))"]
    return commands


def main() -> int:
    """Print the table and the verdicts; return 1 if a promise is broken."""
    costs = compare(commands())
    print(table(costs, FLOOR))
    return int(not all(verdicts(costs)))


def verdicts(costs: dict[str, Cost]) -> list[bool]:
    """Print and return whether each promise holds."""
    kept = []
    for name, framework, peer, factor in (
        ("ckpttool inspect (TensorFlow)", "TensorFlow", "tf.train.list_variables", FASTER_THAN_TENSORFLOW),
        ("ckpttool inspect (PyTorch)", "PyTorch", "torch.load", FASTER_THAN_TORCH),
    ):
        ratio = costs[name].ratio(costs[FLOOR])
        kept.append(ratio <= LIMIT)
        print(f"{name}: {ratio:.2f}x {FLOOR} (promised: at most {LIMIT:g})")
        if peer in costs:
            faster = costs[peer].ratio(costs[name])
            kept.append(faster >= factor)
            print(f"{name}: {faster:.1f}x faster than {framework} (promised: at least {factor:g})")
    return kept


if __name__ == "__main__":
    sys.exit(main())
