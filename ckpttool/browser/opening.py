"""Opening what is browsed behind the caller: small checkpoints are there at once, others take seconds."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable

from ckpttool.browser.look import Look


class Opening:
    """A listing on its way. `title` names it while it is."""

    def __init__(self, title: str, list_it: Callable[[], Look]) -> None:
        """Begin."""
        self.title = title
        self._list_it = list_it
        self._look: Look | None = None
        self._error: Exception | None = None
        # The limits that were chosen hold there too.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), daemon=True, name="opening")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait that long at most; say whether it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def look(self) -> Look:
        """Return what was listed; raise what stood in the way."""
        self._thread.join()
        if self._look is None:
            raise self._error or RuntimeError("nothing was listed")
        return self._look

    def _work(self) -> None:
        # A listing makes many objects and no rubbish, which nobody need go through again and again.
        gc.disable()
        try:
            self._look = self._list_it()
        except Exception as error:  # noqa: BLE001  # kept for whoever asks for the listing
            self._error = error
        finally:
            gc.freeze()
            gc.enable()
