"""Runs functions of a test file in a process of its own, where TensorFlow may be imported.

TensorFlow takes seconds to start, and many tests ask for a child. So one process imports it, does nothing
else, and forks a child for every call: what a child does to TensorFlow ends with it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 600


def run(file: str, function: str, folder: Path) -> Any:
    """Call `function(folder)` of the Python file in a child; return what it returns, through JSON.

    The child works in `folder`, and what it writes there stays. TensorFlow and PyTorch must not meet in one
    process, and a test process has PyTorch.
    """
    return run_each(file, {function: folder})[function]


def run_each(file: str, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Call several functions in one child, each in its folder, one after the other."""
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    places = {name: str(folder) for name, folder in folders.items()}
    asked = {"file": os.path.abspath(file), "folders": places}
    parent.stdin.write(json.dumps(asked) + "\n")
    parent.stdin.flush()
    said = parent.stdout.readline()
    if json.loads(said or '"TensorFlow did not start"'):
        raise RuntimeError(f"{', '.join(folders)} failed in the child process:\n{json.loads(said or '0')}")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name, folder in folders.items()}


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one, which closes its stdin."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    started = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **quiet},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def serve() -> None:
    """Fork a child for every line of stdin, and answer with what went wrong in it, or with nothing."""
    import tensorflow  # noqa: F401  # what all children share

    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            for stream in (1, 2):
                os.dup2(theirs, stream)
            _answer(**json.loads(line))
        os.close(theirs)
        with open(ours, encoding="utf-8", errors="replace") as pipe:
            told = pipe.read()[-4000:]
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps(f"status {code}\n{told}" if code else ""), flush=True)  # noqa: T201  # the answer


def _answer(file: str, folders: dict[str, str]) -> None:
    """Call the functions in this child, and end it."""
    status = 1
    signal.alarm(TIMEOUT_S)
    try:
        os.chdir(next(iter(folders.values())))
        functions = runpy.run_path(file)
        for name, place in folders.items():
            os.chdir(place)
            answer = functions[name](Path(place))
            Path(place, f"{name}.json").write_text(json.dumps(answer))
        status = 0
    except BaseException:  # noqa: BLE001  # told to the test that asked
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
