"""What a person may want to do next, as commands with the paths that were just named: on a terminal alone."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpttool import urls
from ckpttool.cli import output
from ckpttool.cli.columns import DIM, PLAIN, styled
from ckpttool.errors import CkpttoolError
from ckpttool.shown import clean

if TYPE_CHECKING:
    from ckpttool.ops.convert import Conversion
    from ckpttool.ops.difference import Diff
    from ckpttool.ops.doctor import Diagnosis
    from ckpttool.ops.folder import Folder
    from ckpttool.ops.stats import Stats
    from ckpttool.ops.summary import Summary
    from ckpttool.ops.sweep import Sweep
    from ckpttool.ops.verify import Verification

# The words of a few commands, without the program's name.
Steps = list[tuple[str, ...]]
# What one framework wrote is most often wanted in the other one.
_TENSORFLOW = ("tensor_bundle", "tensorflow_v1", "saved_model", "keras_h5", "keras_zip", "keras_rl")


def tell(after: Callable[..., Steps], *found: Any, quiet: bool) -> None:
    """Print what a function says of what was found, a command a line to be copied; never into a pipe."""
    if quiet or not sys.stdout.isatty():
        return
    for words in after(*found):
        line = f"next: {clean(shlex.join(('ckpttool', *words)))}"
        output.write(f"{DIM}{line}{PLAIN}" if styled() else line)


def after_inspect(found: Summary | Folder) -> Steps:
    """Return what is done with an agent, or with a model that is none."""
    from ckpttool.ops.summary import Summary

    if not isinstance(found, Summary):
        return []
    path = urls.spelled(found.checkpoint.path)
    if found.layout is None:
        return [("stats", path), ("doctor", path)]
    tensorflow = found.checkpoint.format in _TENSORFLOW
    other = ("agent.pt",) if tensorflow else ("ckpt-1", "--to", "tf")
    return [("convert", path, *other), _play(path)]


def after_digest(path: str) -> Steps:
    """Return how the same numbers are recognised later."""
    return [("digest", path, "--check", "saved.json")]


def after_stats(path: str, found: Stats) -> Steps:
    """Return what says more of numbers that are no good sign."""
    bad = not found.finite or any(each.signs for each in found.tensors)
    return [("doctor", path)] if bad else []


def after_diff(left: str, right: str, found: Diff) -> Steps:
    """Return what says whether two agents act alike all the same."""
    agents = None not in found.layouts
    return [("verify", left, right)] if agents and not found.identical else []


def after_doctor(path: str, found: Diagnosis) -> Steps:
    """Return what a healthy agent is for."""
    return [_play(path)] if found.layout is not None and not found.findings else []


def after_convert(found: Conversion) -> Steps:
    """Return the same without --dry-run, or what proves and plays the agent that was written."""
    if found.written:
        played = [("verify", found.source, found.target), _play(found.target)]
        return played if found.parity and not found.target.endswith(".onnx") else [("inspect", found.target)]
    words = sys.argv[1:]
    if "--dry-run" not in words or not found.report.complete:
        return []
    if "--glob" in words:
        at = words.index("--glob")
        del words[at : at + 2]
    return [tuple(word for word in words if word != "--dry-run" and not word.startswith("--glob="))]


def after_verify(second: str, found: Verification) -> Steps:
    """Return how the one that is the same agent is played."""
    return [_play(second)] if found.within else []


def after_eval(found: Sweep, env: str | None) -> Steps:
    """Return how the best of several is scored more exactly, or one is seen."""
    told = ("--env", env) if env is not None else ()
    if found.best is not None:
        return [("eval", urls.spelled(found.best.checkpoint), *told, "--episodes", "100")]
    return [
        ("eval", urls.spelled(each.checkpoint), *told, "--video", "agent.mp4")
        for each in found.evaluations[:1]
    ]


def _play(path: str) -> tuple[str, ...]:
    from ckpttool import sidecar

    # Nothing is fetched to say this.
    told = None
    if not urls.is_url(path):
        with contextlib.suppress(CkpttoolError):
            told = sidecar.load(path)
    # A sidecar may name the environment; without one a person has to.
    return ("eval", path) if told is not None and told.env else ("eval", path, "--env", "ID")
