"""Terminal browser: start-up, checks for a terminal and for textual, background listing."""

from __future__ import annotations

import contextvars
import gc
import os
import sys
import threading
from collections.abc import Callable

from ckpttool.browser.listing import BrowserListing, list_for_browser
from ckpttool.conversion.alignment import AUTO
from ckpttool.core.urls import format_command
from ckpttool.core.errors import UsageError
from ckpttool.core.installation import require_package


class BackgroundListing:
    """Listing in progress in a background thread; `title` names it meanwhile."""

    def __init__(self, title: str, list_it: Callable[[], BrowserListing]) -> None:
        """Start the listing."""
        self.title = title
        self._list_it = list_it
        self._listing: BrowserListing | None = None
        self._error: Exception | None = None
        # Keep the user's limits in the thread.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), daemon=True, name="opening")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; return whether the listing is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def listing(self) -> BrowserListing:
        """Return the listing, or raise the error that stopped it."""
        self._thread.join()
        if self._listing is None:
            raise self._error or RuntimeError("the listing thread ended without a result")
        return self._listing

    def _work(self) -> None:
        # A listing creates many objects but no garbage, so skip garbage collection.
        gc.disable()
        try:
            self._listing = self._list_it()
        except Exception as error:  # noqa: BLE001  # kept for the caller of the listing
            self._error = error
        finally:
            gc.freeze()
            gc.enable()


# A listing or an error that arrives this early needs no waiting screen.
_PATIENCE_S = 0.5


def browse(
    path: str, other: str | None = None, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> int:
    """Show the checkpoint at the path until the user quits; return the exit status.

    Raise UsageError without a terminal, MissingExtraError without textual, and any error of listing.

    Args:
        path: the checkpoint.
        other: a checkpoint to compare it with, as `diff` does.
        glob: a pattern for the paths of the entries that are shown.
        by: how entries are paired: "auto", or what `diff` offers.
        layout: the layout by which the agent of the first checkpoint is read.
    """
    require_terminal(path)
    require_package("textual", "the browser requires textual", "browse")
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
    """Raise UsageError unless stdin, stdout and stderr are a terminal."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if os.environ.get("TERM") == "dumb" or not all(
        stream is not None and stream.isatty() for stream in streams
    ):
        raise UsageError(
            "browse requires a terminal",
            hint=f"to print the same tree: {format_command('inspect', path)}",
        )
