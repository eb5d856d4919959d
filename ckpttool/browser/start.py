"""Starting the browser: where there is a terminal, and what draws on it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys

from ckpttool.browser.look import look
from ckpttool.browser.opening import Opening
from ckpttool.errors import MissingExtraError, UsageError
from ckpttool.ops.findings import command
from ckpttool.ops.side_by_side import AUTO

HINT = "pip install 'ckpttool[browse]'"
# What is listed by then, or is no checkpoint, needs no screen that says that it is being opened.
_PATIENCE_S = 0.5


def browse(
    path: str, other: str | None = None, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> int:
    """Show what is at the path until a person leaves; return the exit status.

    Raise UsageError where there is no terminal, MissingExtraError without textual, and what listing raises.
    """
    require_terminal(path)
    if importlib.util.find_spec("textual") is None:
        raise MissingExtraError("the browser needs textual, which is not installed", hint=HINT)
    opening = Opening(path, lambda: look(path, other, glob=glob, by=by, layout=layout))
    from ckpttool.browser.app import Browser

    if opening.wait(_PATIENCE_S):
        opening.look()
    browser = Browser(opening)
    status = browser.run()
    if browser.fault is not None:
        raise browser.fault
    return status or 0


def require_terminal(path: str) -> None:
    """Raise UsageError unless a person sees what is drawn, and can answer."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if os.environ.get("TERM") == "dumb" or not all(each is not None and each.isatty() for each in streams):
        raise UsageError(
            "browse draws on a terminal, and this is none",
            hint=f"{command('inspect', path)} prints the same tree",
        )
