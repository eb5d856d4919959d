"""Runs functions of a test file in a process of its own, where TensorFlow may be imported."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import warm

PROGRAM = """
import json, os, runpy
from pathlib import Path

functions = runpy.run_path({file!r})
for name, place in {folders!r}.items():
    os.chdir(place)
    answer = functions[name](Path(place))
    Path(place, name + ".json").write_text(json.dumps(answer))
"""


def require(*names: str) -> None:
    """Skip the test where a library is missing, which pytest.importorskip would import into this process."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run(file: str, function: str, folder: Path, *, once: bool = False) -> Any:
    """Call `function(folder)` of the Python file in a child; return what it returns, through JSON.

    The child works in `folder`, and what it writes there stays. TensorFlow and PyTorch must not meet in one
    process, and a test process has PyTorch. With `once`, the folder is empty, and all programs of xdist that
    ask for the same share one child.
    """
    return run_each(file, {function: folder}, once=once)[function]


def run_each(file: str, folders: Mapping[str, Path], *, once: bool = False) -> dict[str, Any]:
    """Call several functions in one child, each in its folder, one after the other."""
    if once:
        answers: dict[str, Any] = warm.once(file, lambda places: run_each(file, places), folders)
        return answers
    places = {name: str(folder) for name, folder in folders.items()}
    program = PROGRAM.format(file=os.path.abspath(file), folders=places)
    status, output = warm.run("tensorflow", program, next(iter(folders.values())))
    if status:
        raise RuntimeError(f"{', '.join(folders)} ended with {status} in the child:\n{output[-4000:]}")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name, folder in folders.items()}
