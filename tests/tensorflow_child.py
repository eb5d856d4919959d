"""Runs a function of a test file in a process of its own, where TensorFlow may be imported."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT = 600


def run(file: str, function: str, folder: Path) -> Any:
    """Call `function(folder)` of the Python file in a child; return what it returns, through JSON.

    The child works in `folder`, and what it writes there stays. TensorFlow and PyTorch must not meet in one
    process, and a test process has PyTorch.
    """
    return run_each(file, {function: folder})[function]


def run_each(file: str, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Call several functions in one child, each in its folder: TensorFlow takes seconds to start."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, __file__, os.path.abspath(file), *(f"{n}={f}" for n, f in folders.items())],
        cwd=next(iter(folders.values())),
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{', '.join(folders)} failed in the child process:\n{done.stderr[-4000:]}")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name, folder in folders.items()}


if __name__ == "__main__":
    functions = runpy.run_path(sys.argv[1])
    for asked in sys.argv[2:]:
        name, _, place = asked.partition("=")
        os.chdir(place)
        answer = functions[name](Path(place))
        Path(place, f"{name}.json").write_text(json.dumps(answer))
