"""Demo on a sample: inspect a TensorFlow agent, convert it, verify the conversion, play both."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = "sample_ckpts/td3_pendulum_tf/ckpt-15000"
CONVERTED = "demo_out/agent.pt"

STEPS = (
    ("Inspect the actor of a TensorFlow checkpoint.", f"inspect {SAMPLE} --glob 'actor/**'"),
    ("Convert the whole agent to PyTorch.", f"convert {SAMPLE} {CONVERTED} --to torch --force"),
    ("Verify the conversion: each side runs in its own framework.", f"verify {SAMPLE} {CONVERTED}"),
    ("Play the original ...", f"eval {SAMPLE} --episodes 20 --backend tensorflow"),
    ("... and the converted agent.", f"eval {CONVERTED} --episodes 20 --backend torch"),
)


def main() -> int:
    """Run every step; stop at the first one that fails."""
    (ROOT / "demo_out").mkdir(exist_ok=True)
    for title, command in STEPS:
        print(f"\n# {title}\n$ ckpttool {command}\n", flush=True)
        arguments = [sys.executable, "-m", "ckpttool", *shlex.split(command)]
        done = subprocess.run(arguments, cwd=ROOT, check=False)  # noqa: S603  # our own command
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
