"""Path patterns: `*` within one segment, `**` across segments."""

from __future__ import annotations

import re
from collections.abc import Callable


def matcher(glob: str | None) -> Callable[[str], bool]:
    """Return a test for display paths.

    A pattern may begin at any segment (`actor/**` finds `policy/actor/l1/kernel`); with a leading slash
    it begins at the root.
    """
    if glob is None:
        return lambda _: True
    pattern = re.compile(("" if glob.startswith("/") else "(?:.*/)?") + _translated(glob.lstrip("/")))
    return lambda path: pattern.fullmatch(path) is not None


def _translated(glob: str) -> str:
    pieces = re.split(r"(\*\*/?|\*|\?)", glob)
    wild = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(piece) or re.escape(piece) for piece in pieces)
