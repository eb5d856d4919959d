"""The browser as a program of the terminal: it waits for the listing, then shows it, and ends in order."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from ckpttool.browser.lines import Piece, fitted
from ckpttool.browser.main_screen import MainScreen
from ckpttool.browser.opening import Opening
from ckpttool.browser.panes import Bar, Found

_POLL_S = 0.05
_INTERRUPTED = 130


class Browser(App[int]):
    """Show what is opened. `fault` is what ended it before its time."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (72, "-wide")]  # noqa: RUF012  # as Textual types it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+q", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    Bar { height: 1; }
    #body { height: 1fr; layout: horizontal; }
    #tree { width: 52%; height: 1fr; }
    #details { width: 1fr; height: 1fr; border-left: solid ansi_bright_black; padding-left: 1; }
    .-narrow #body { layout: vertical; }
    .-narrow #tree { width: 100%; }
    .-narrow #details { width: 100%; border-left: none; border-top: solid ansi_bright_black; }
    #asking { height: 1; layout: horizontal; }
    #slash { width: 1; }
    #hits { width: 24; }
    Page, GridPane { height: 1fr; }
    Input, Input:focus { height: 1; border: none; padding: 0; width: 1fr; background: ansi_default; }
    """

    def __init__(self, opening: Opening) -> None:
        # The terminal's own colours: whoever chose them can read them.
        super().__init__(ansi_color=True)
        self.opening = opening
        self.fault: Exception | None = None

    def compose(self) -> ComposeResult:
        """Say what is being opened, until it is."""
        said = f"opening {self.opening.title} ..."
        bar = Bar()
        bar.show(lambda cells: (Piece(fitted(said, cells), "dim"),))
        yield bar

    def on_mount(self) -> None:
        """Wait for the listing."""
        if self.opening.wait(0):
            self._opened()
        else:
            self.set_timer(_POLL_S, self.on_mount)

    def _opened(self) -> None:
        try:
            look = self.opening.look()
        except Exception as error:  # noqa: BLE001  # the command tells it, as it does without a screen
            self._end(error)
        else:
            self.push_screen(MainScreen(look, self._failed))

    def on_found(self, message: Found) -> None:
        """Take up what the reading thread found."""
        message.take()

    def _failed(self, error: Exception) -> None:
        # In the reading thread.
        self.post_message(Found(lambda: self._end(error)))

    def _handle_exception(self, error: Exception) -> None:
        # Textual would draw a traceback; our command line has one place for what nobody expected.
        self._end(error)
        if self.is_headless:
            super()._handle_exception(error)

    def _end(self, error: Exception) -> None:
        self.fault = error
        self.exit(1)

    def action_interrupt(self) -> None:
        """End as a program does that is interrupted."""
        self.exit(_INTERRUPTED)
