"""One name for every entry of a tree, for formats whose entries have names and no paths."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ckpttool.formats.recorded.values import is_text
from ckpttool.leaf import Path, exact


def named(
    paths: Iterable[Path],
    spelled: Callable[[Path], str],
    reserved: Collection[str] = (),
    safe: Callable[[str], str] = str,
) -> dict[Path, str]:
    """Return a name for each path: as `spelled`, or unambiguously where that is taken or no text.

    Paths come in order, and the first of several with one spelling has it. `safe` makes an unambiguous name
    one that the format can hold.
    """
    taken = set(reserved)
    names: dict[Path, str] = {}
    for path in paths:
        name = spelled(path)
        if name in taken or not _is_text(name):
            name = _free(safe(exact(path)), taken)
        taken.add(name)
        names[path] = name
    return names


def _free(name: str, taken: set[str]) -> str:
    plain = name.encode("ascii", "backslashreplace").decode("ascii").replace("\0", "\\0")
    number, found = 1, plain
    while found in taken:
        number += 1
        found = f"{plain} {number}"
    return found


def _is_text(name: str) -> bool:
    return "\0" not in name and is_text(name)
