"""From flat names back to the nesting that was saved, and to what each tensor is for.

Source: torch/distributed/checkpoint/_nested_dict.py (flatten_state_dict) and _traverse.py (set_element).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttool import limits
from ckpttool.errors import FormatError, some
from ckpttool.formats.pytorch_dcp.metadata import Steps
from ckpttool.leaf import Path, index, key
from ckpttool.tree import Container


def paths(names: Iterable[str], planned: Mapping[str, Steps]) -> dict[str, Path]:
    """Return every name's path; a name of which no nesting is told stands at the top, as it is.

    Raise FormatError when two names have one path, or one lies below another.
    """
    found: dict[str, Path] = {}
    for name in names:
        steps = planned.get(name, (name,))
        found[name] = tuple(key(step) if isinstance(step, str) else index(step) for step in steps)
    taken = set(found.values())
    if len(taken) != len(found):
        raise FormatError("two entries have one place in the nesting")
    for path in taken:
        if any(path[:depth] in taken for depth in range(1, len(path))):
            raise FormatError(f"an entry lies below another one: {some([str(s.value) for s in path], 6)}")
    return found


def containers(found: Iterable[Path]) -> tuple[dict[Path, Container], tuple[Path, ...]]:
    """Return the dicts and lists that hold the paths, and the lists' places that nothing fills."""
    kinds: dict[Path, str] = {(): "key"}
    items: dict[Path, set[int]] = {}
    for path in found:
        for depth, step in enumerate(path):
            if kinds.setdefault(path[:depth], step.kind) != step.kind:
                raise FormatError("a container of the nesting is a dict and a list at once")
            if isinstance(step.value, int):
                items.setdefault(path[:depth], set()).add(step.value)
    # set_element fills a list's gaps (what had no entries left no name) with None.
    gaps: list[Path] = []
    most = limits.current().list_gaps
    for top, numbers in items.items():
        missing = max(numbers) + 1 - len(numbers)
        if missing + len(gaps) > most:
            raise limits.exceeded("list_gaps", "a list of the nesting has too many gaps", missing + len(gaps))
        gaps += [(*top, index(n)) for n in range(max(numbers) if missing else 0) if n not in numbers]
    made = {top: Container("dict" if kind == "key" else "list") for top, kind in kinds.items()}
    return made, tuple(gaps)
