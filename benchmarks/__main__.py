"""Runs all benchmarks: `python -m benchmarks`; the status is 1 if a promise is broken."""

from __future__ import annotations

import sys

from benchmarks import (
    converting,
    evaluation_sweep,
    first_action,
    latency,
    listing,
    on_device,
    playing,
    reading,
    safetensors_files,
    scaling,
    torch_files,
    updates,
)

ALL = (
    listing,
    scaling,
    reading,
    safetensors_files,
    torch_files,
    converting,
    first_action,
    latency,
    on_device,
    playing,
    evaluation_sweep,
    updates,
)


def main() -> int:
    """Run each and print its table."""
    status = 0
    for benchmark in ALL:
        print(f"\n# {(benchmark.__doc__ or '').splitlines()[0]}", flush=True)
        status |= benchmark.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
