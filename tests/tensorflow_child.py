"""Runs a function of a test file in a process of its own, where TensorFlow may be imported."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT = 600


def run(file: str, function: str, folder: Path) -> Any:
    """Call `function(folder)` of the Python file in a child; return what it returns, through JSON.

    The child works in `folder`, and what it writes there stays. TensorFlow and PyTorch must not meet in one
    process, and a test process has PyTorch.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, __file__, os.path.abspath(file), function, str(folder)],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{function} failed in the child process:\n{done.stderr[-4000:]}")
    return json.loads((folder / f"{function}.json").read_text())


if __name__ == "__main__":
    source, name, place = sys.argv[1:]
    answer = runpy.run_path(source)[name](Path(place))
    Path(place, f"{name}.json").write_text(json.dumps(answer))
