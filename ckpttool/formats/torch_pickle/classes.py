"""The classes of pickled modules, and their source code, which torch put beside them before its zip files.

Source: torch/serialization.py (persistent_id in _legacy_save): ("module", class, source file, source).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttool.errors import FormatError, some
from ckpttool.wire.pickle_reader import Global, Object

_SHOWN = 5


class Classes:
    """The source code of classes by their dotted names; it is text, which nobody compiles."""

    def __init__(self) -> None:
        """Know none yet."""
        self.known: dict[str, dict[str, str]] = {}

    def named(self, said: Sequence[object]) -> Global | Object:
        """Return the class of a persistent id that says class, source file and source; keep the last two.

        cloudpickle stores classes by value: those are objects that a call makes.
        """
        kind, file, text = said
        if not isinstance(kind, Global | Object) or not all(
            isinstance(each, str | bytes | None) for each in said[1:]
        ):
            raise FormatError("a persistent id does not name a class and its source")
        if text:
            self.known[_name(kind)] = {"file": _text(file), "source": _text(text)}
        return kind

    def notes(self) -> tuple[str, ...]:
        """Return the line that tells of them, none when there are none."""
        if not self.known:
            return ()
        names = some(list(self.known), _SHOWN)
        return (f"the source code of classes is in the file, as text that --json shows: {names}",)

    def details(self) -> dict[str, Any]:
        """Return `sources` as a part of a checkpoint's details; nothing when there are none."""
        return {"sources": self.known} if self.known else {}


def _name(kind: Global | Object) -> str:
    if isinstance(kind, Global):
        return kind.full
    # cloudpickle/cloudpickle.py, _make_skeleton_class(type, name, ...).
    said = [arg for arg in kind.args[:2] if type(arg) is str]
    return said[0] if said else kind.name


def _text(said: object) -> str:
    # Python 2 wrote bytes.
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said or "")
