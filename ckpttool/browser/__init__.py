"""Terminal browser: its start, where there is a terminal and textual is installed."""

from __future__ import annotations

import contextvars
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable

from ckpttool.browser.model import BrowserListing, list_for_browser
from ckpttool.commands.diff import AUTO
from ckpttool.commands.inspect import format_command
from ckpttool.core.errors import MissingExtraError, UsageError

# Opening what is browsed behind the caller: small checkpoints are there at once, others take seconds.


class BackgroundListing:
    """A listing on its way. `title` names it while it is."""

    def __init__(self, title: str, list_it: Callable[[], BrowserListing]) -> None:
        """Begin."""
        self.title = title
        self._list_it = list_it
        self._listing: BrowserListing | None = None
        self._error: Exception | None = None
        # The limits that were chosen hold there too.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), daemon=True, name="opening")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait that long at most; say whether it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def listing(self) -> BrowserListing:
        """Return what was listed; raise what stood in the way."""
        self._thread.join()
        if self._listing is None:
            raise self._error or RuntimeError("nothing was listed")
        return self._listing

    def _work(self) -> None:
        # A listing makes many objects and no rubbish, which nobody need go through again and again.
        gc.disable()
        try:
            self._listing = self._list_it()
        except Exception as error:  # noqa: BLE001  # kept for whoever asks for the listing
            self._error = error
        finally:
            gc.freeze()
            gc.enable()


# Starting the browser: where there is a terminal, and what draws on it is installed.

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
    opening = BackgroundListing(path, lambda: list_for_browser(path, other, glob=glob, by=by, layout=layout))
    from ckpttool.browser.app import Browser

    if opening.wait(_PATIENCE_S):
        opening.listing()
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
            hint=f"{format_command('inspect', path)} prints the same tree",
        )
