"""Keys of the browser: their actions, for the screens, the last line and the help."""

from __future__ import annotations

from ckpttool.core.deferred import NamedTuple


class BrowserKey(NamedTuple):
    """Keys as shown and as Textual names them, the action, and its description.

    `word` labels the key in the last line ("" to omit it). `two` is true for keys that need two
    checkpoints.
    """

    shown: str
    names: str
    action: str
    does: str
    word: str = ""
    two: bool = False


TREE: tuple[BrowserKey, ...] = (
    BrowserKey(
        "↵",
        "enter",
        "enter",
        "fold or unfold a module; show a tensor's values; go from an alias to its tensor",
        "open",
    ),
    BrowserKey(
        "/", "slash", "search", "search for part of a name, a pattern with * or ?, or a native key", "search"
    ),
    BrowserKey("n  N", "n", "following(False)", "next and previous match"),
    BrowserKey("", "N", "following(True)", ""),
    BrowserKey("v", "v", "values", "show the values as a table", "values"),
    BrowserKey("h", "h", "histogram", "show the histogram, one line per range", "bars"),
    BrowserKey("d  D", "d", "difference(False)", "next and previous difference", "difference", two=True),
    BrowserKey("", "D", "difference(True)", "", two=True),
    BrowserKey("a", "a", "alias", "cycle through the aliases of a tensor", "alias"),
    BrowserKey(
        "o", "o", "relative", "go from a slot to its parameter, or from a parameter to its slots", "slot"
    ),
    BrowserKey("b", "b", "back", "go back after a jump"),
    BrowserKey("↑ ↓", "", "", "move (also PageUp, PageDown, Home, End)"),
    BrowserKey("→ ←", "", "", "unfold; fold, or go to the parent module"),
    BrowserKey("e", "e", "everything", "unfold everything in a module"),
    BrowserKey("s", "s", "sort", "sort order: as in the file, by size, by name"),
    BrowserKey("Tab", "tab", "other_pane", "switch between scrolling the details and the tree"),
    BrowserKey("i", "i", "about", "show format, notes and what loading would import and call", "info"),
    BrowserKey("?", "question_mark,f1", "help", "show this help", "help"),
    BrowserKey("q", "q,ctrl+q", "leave", "leave", "quit"),
)

VALUES: tuple[BrowserKey, ...] = (
    BrowserKey("↑ ↓ ← →", "", "", "move (also PageUp, PageDown, Home, End)", "move"),
    BrowserKey(
        "[ ]",
        "left_square_bracket",
        "table(-1)",
        "previous and next table, for three or more axes",
        "table",
    ),
    BrowserKey("", "right_square_bracket", "table(1)", ""),
    BrowserKey("g", "g", "go", "go to an index, e.g. 3, 17", "go to"),
    BrowserKey("x", "x", "side", "switch between left, right and left - right", "side", two=True),
    BrowserKey("Esc", "escape,q", "leave", "back", "back"),
)

PAGE: tuple[BrowserKey, ...] = (
    BrowserKey("↑ ↓", "", "", "scroll (also PageUp, PageDown, Home, End)", "scroll"),
    BrowserKey("Esc", "escape,q,enter", "leave", "back", "back"),
)
