"""Path patterns: `*` within one segment, `**` across segments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ckpttool.errors import UsageError

# Paths whose steps a wrong one is compared with.
_COMPARED = 5_000


def matcher(glob: str | None) -> Callable[[str], bool]:
    """Return a test for display paths.

    A pattern may begin at any segment (`actor/**` finds `policy/actor/l1/kernel`); with a leading slash
    it begins at the root.
    """
    if glob is None:
        return lambda _: True
    pattern = re.compile(("" if glob.startswith("/") else "(?:.*/)?") + _translated(glob.lstrip("/")))
    return lambda path: pattern.fullmatch(path) is not None


def nothing(glob: str, known: Sequence[str], file: str | None = None) -> UsageError:
    """Return the error for a pattern that none of these paths matches, with what was probably meant."""
    steps = sorted({step for path in known[:_COMPARED] for step in path.split("/")})
    near = "/".join(_near(step, steps) for step in glob.split("/"))
    # A module's own name is no tensor's.
    candidates = [near, *([] if near.endswith("*") else [f"{near}/**"])]
    meant = next((each for each in candidates if any(map(matcher(each), known))), None)
    return UsageError(
        f"no path matches {glob}", file=file, hint=f"did you mean --glob '{meant}'" if meant else None
    )


def _near(step: str, known: Sequence[str]) -> str:
    if not step or step in known or re.search(r"[*?]", step):
        return step
    import difflib

    return next(iter(difflib.get_close_matches(step, known, 1)), step)


def _translated(glob: str) -> str:
    pieces = re.split(r"(\*\*/?|\*|\?)", glob)
    wild = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(piece) or re.escape(piece) for piece in pieces)
