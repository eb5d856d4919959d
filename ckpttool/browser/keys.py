"""The keys of the browser: what each does, for the screens, their last line and the help."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """Keys as they are shown and as Textual names them, the action, and what it does.

    `word` is what the last line says of it; "" where that does not name it. `two` is for two checkpoints.
    """

    shown: str
    names: str
    action: str
    does: str
    word: str = ""
    two: bool = False


TREE: tuple[Key, ...] = (
    Key("↵", "enter", "enter", "unfold or fold a module; a tensor's values; a name's tensor", "open"),
    Key("/", "slash", "search", "search: part of a name, a pattern with * or ?, a native key", "search"),
    Key("n  N", "n", "following(False)", "next and previous hit"),
    Key("", "N", "following(True)", ""),
    Key("v", "v", "values", "the values as a table", "values"),
    Key("h", "h", "histogram", "the histogram, a line for each range", "bars"),
    Key("d  D", "d", "difference(False)", "next and previous difference", "difference", two=True),
    Key("", "D", "difference(True)", "", two=True),
    Key("a", "a", "alias", "go round the names of one tensor", "alias"),
    Key("o", "o", "relative", "from a slot to its parameter; from that to its slots", "slot"),
    Key("b", "b", "back", "back from a jump"),
    Key("↑ ↓", "", "", "move; PageUp, PageDown, Home, End too"),
    Key("→ ←", "", "", "unfold; fold, or go to the module above"),
    Key("e", "e", "everything", "unfold all in a module"),
    Key("s", "s", "sort", "order: as in the file, by size, by name"),
    Key("Tab", "tab", "other_pane", "scroll the details instead, and back"),
    Key("i", "i", "about", "format, notes, what loading the file asks for", "info"),
    Key("?", "question_mark,f1", "help", "this page", "help"),
    Key("q", "q,ctrl+q", "leave", "leave", "quit"),
)

VALUES: tuple[Key, ...] = (
    Key("↑ ↓ ← →", "", "", "move; PageUp, PageDown, Home, End too", "move"),
    Key(
        "[ ]",
        "left_square_bracket",
        "table(-1)",
        "the table before and after, of three axes and more",
        "table",
    ),
    Key("", "right_square_bracket", "table(1)", ""),
    Key("g", "g", "go", "go to an index such as 3, 17", "go to"),
    Key("x", "x", "side", "left, right, left - right", "side", two=True),
    Key("Esc", "escape,q", "leave", "back", "back"),
)

PAGE: tuple[Key, ...] = (
    Key("↑ ↓", "", "", "scroll; PageUp, PageDown, Home, End too", "scroll"),
    Key("Esc", "escape,q,enter", "leave", "back", "back"),
)
