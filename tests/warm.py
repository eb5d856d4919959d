"""A process that has imported a framework, does nothing else, and forks a child for each program.

TensorFlow and PyTorch take seconds to start. What a program does to them ends with its child, so each meets a
framework that is as new as after an import.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

TIMEOUT_S = 600
# What nearly all programs for it import besides: a second, every time.
BESIDES = {
    "tensorflow": ("hypothesis", "ckpttool.commands.convert", "ckpttool.networks.messages", "tests.conftest")
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run(framework: str, program: str, folder: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a Python program as `python -c` does, in the folder; return its status and all that it printed."""
    parent = _parent(framework)
    assert parent.stdin is not None
    assert parent.stdout is not None
    asked = {"program": program, "folder": str(folder), "env": dict(env or os.environ)}
    parent.stdin.write(json.dumps(asked) + "\n")
    parent.stdin.flush()
    answer = parent.stdout.readline()
    assert answer, f"{framework} does not start, or its process has died"
    status, output = json.loads(answer)
    return status, output


@functools.cache
def _parent(framework: str) -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one, which closes its stdin."""
    started = subprocess.Popen(
        [sys.executable, __file__, framework],
        env={**os.environ, **QUIET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def serve() -> None:
    """Fork a child for every line of stdin, and answer with its status and output."""
    # A source checkout is enough: the package need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    for name in (sys.argv[1], *BESIDES.get(sys.argv[1], ())):
        importlib.import_module(name)
    # A collection in a child would look at, and so copy, every page of what is here.
    gc.freeze()
    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            for stream in (1, 2):
                os.dup2(theirs, stream)
            _run(**json.loads(line))
        os.close(theirs)
        with open(ours, encoding="utf-8", errors="replace") as pipe:
            output = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), output]), flush=True)  # noqa: T201  # the answer


def _run(program: str, folder: str, env: dict[str, str]) -> NoReturn:
    """Run the program in this child, and end it."""
    status = 1
    signal.alarm(TIMEOUT_S)
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update({**env, **QUIET})
        sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        messages = sys.modules.get("ckpttool.networks.messages")
        if messages is not None:
            messages.remove_generated_files()
        os._exit(status)


if __name__ == "__main__":
    serve()
