"""Runs Stable-Baselines3 in children of a process that has imported it, which takes six seconds.

That the writer begins a process of its own for it is what the tests without FORKING show.
"""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import warm


def run_program(program: str, *arguments: str) -> Any:
    """Run a program with these arguments; return what the last line that it prints says as JSON."""
    status, output = _run(program, arguments)
    assert status == 0, output
    return json.loads(output.splitlines()[-1])


def built(program: str, folder: Path, *arguments: str) -> Any:
    """Do as `asked`, with the empty folder as the first argument, once for all programs of xdist."""
    return warm.once(
        (program, arguments), lambda places: run_program(program, str(places[""]), *arguments), {"": folder}
    )


def _run(program: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    before = f"import sys\nsys.argv[1:] = {list(arguments)!r}\n"
    return warm.run("stable_baselines3", before + program, Path("/"), env)


def _forked(
    command: Sequence[str], *, env: Mapping[str, str], **_: Any
) -> subprocess.CompletedProcess[bytes]:
    """Do as subprocess.run does with the command of formats/sb3.py."""
    program, *arguments = command[command.index("-c") + 1 :]
    status, output = _run(program, arguments, env)
    return subprocess.CompletedProcess(command, status, b"", output.encode())


# To take the place of `subprocess` in the writer.
FORKING = types.SimpleNamespace(
    run=_forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
