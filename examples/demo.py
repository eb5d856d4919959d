"""Shows the main job on a sample: look into a TensorFlow agent, convert it, prove it, play both."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = "sample_ckpts/td3_pendulum_tf/ckpt-15000"
CONVERTED = "demo_out/agent.pt"

STEPS = (
    ("What is in this TensorFlow checkpoint?", f"inspect {SAMPLE} --glob 'actor/**'"),
    ("Convert the whole agent to PyTorch.", f"convert {SAMPLE} {CONVERTED} --to torch --force"),
    ("Is it the same agent? TensorFlow and PyTorch each run their own.", f"verify {SAMPLE} {CONVERTED}"),
    ("Play the original ...", f"eval {SAMPLE} --episodes 20 --backend tensorflow"),
    ("... and the converted one.", f"eval {CONVERTED} --episodes 20 --backend torch"),
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
