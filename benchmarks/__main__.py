"""Runs all benchmarks but those of devices: `python -m benchmarks`; the status is 1 if a promise is broken.

Each runs in its own process, because some import a framework. `python -m benchmarks.gpu` measures devices.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

ALL = (
    *("listing", "scaling", "reading", "safetensors_files", "torch_files", "converting", "first_action"),
    *("playing", "engine_share", "evaluation_sweep", "updates", "verifying", "sandbox", "one_tensor"),
)


def main() -> int:
    """Run each and print its table; return 1 if one of them fails."""
    failed = []
    for name in ALL:
        print(f"\n# {title(name)}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed, or broke a promise: {', '.join(failed)}", flush=True)
    return int(bool(failed))


def title(name: str) -> str:
    """Return the first line of a benchmark's docstring, without importing the benchmark."""
    spec = importlib.util.find_spec(f"benchmarks.{name}")
    source = spec.loader.get_source(spec.name) if spec is not None else ""  # type: ignore[union-attr]
    return source.partition('"""')[2].partition("\n")[0].removesuffix('"""')


if __name__ == "__main__":
    sys.exit(main())
