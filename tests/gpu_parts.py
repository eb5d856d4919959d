"""Parts that fail in every way, for the children of tests/test_gpu_command.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.parts import Absent, Check, Context, Figure, Part

NOT_INSTALLED = "a library is not installed"
NO_DEVICE = "there is no device"


def fine(context: Context) -> list[Check | Figure]:
    return [Check("small", 1.0, 2.0), Figure("size", 3.0, "us", {"rows": 1})]


def beyond(context: Context) -> list[Check | Figure]:
    return [Check("small", 3.0, 2.0)]


def raises(context: Context) -> list[Check | Figure]:
    raise FileNotFoundError(f"no such file: {os.path.join(context.folder, 'secret', 'weights.pt')}")


def absent(context: Context) -> list[Check | Figure]:
    raise Absent(NOT_INSTALLED)


def crashes(context: Context) -> list[Check | Figure]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leaves(context: Context) -> list[Check | Figure]:
    os._exit(0)


def hangs(context: Context) -> list[Check | Figure]:
    # What the part has started hangs with it, and holds its output.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    time.sleep(1000)
    return []


def facts(context: Context) -> dict[str, object]:
    return {
        "device": {"kind": "cpu", "name": "Test Device", "cores": 2},
        "versions": {},
        "absent": {"jax": "not installed"},
    }


def missing(context: Context) -> dict[str, object]:
    raise Absent(NO_DEVICE)


PARTS = (
    Part("first", fine),
    Part("raises", raises),
    Part("after", fine),
    Part("crashes", crashes),
    Part("beyond", beyond),
    Part("hangs", hangs, 0.5),
    Part("leaves", leaves),
    Part("absent", absent),
    Part("alone", fine, fresh=True),
    Part("last", fine),
)
FACTS = (Part("device", facts), Part("fine", fine))
GREEN = (Part("fine", fine), Part("absent", absent))
MISSING = (Part("device", missing),)
