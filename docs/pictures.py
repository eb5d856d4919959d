"""Write the pictures of the pages from evaluations of the samples: `python -m docs.pictures [NAME ...]`.

Without names, all. Returns are equal to the last bit only on one kind of machine, so that the files are not
compared with new ones.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TORCH, TENSORFLOW = "sample_ckpts/td3_pendulum_torch", "sample_ckpts/td3_pendulum_tf"

# The file, the option that writes it and the arguments of `eval`.
PICTURES = {
    "learning_curve.svg": ("--plot", TORCH, "--episodes", "20"),
    "returns.svg": ("--plot", f"{TORCH}/ckpt-15000.pt", "--episodes", "100"),
    "two_algorithms.svg": ("--plot", TORCH, "--curve", "--against", TENSORFLOW, "--episodes", "20"),
    "film_strip.png": ("--strip", f"{TORCH}/ckpt-15000.pt", "--episodes", "20", "--strip-frames", "6"),
}


def write_picture(name: str) -> None:
    """Evaluate the agents and replace the picture."""
    option, *arguments = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / name
        command = (sys.executable, "-m", "ckpttool", "eval", *arguments, option, str(picture))
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)  # noqa: S603  # our own program
        (DOCS / name).write_bytes(picture.read_bytes())


def main() -> int:
    """Write the pictures."""
    for name in sys.argv[1:] or PICTURES:
        write_picture(name)
        sys.stdout.write(f"wrote docs/{name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
