"""How people call what a tree holds: its display name, a second path, a native key; and what they meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from ckpttool import limits
from ckpttool.leaf import Leaf, Path, ValueLeaf, display, exact

# A path and the native key that the format stores for it: what tree.Alias is.
Second = tuple[Path, str | None]
# Names that a wrong one is compared with, letter by letter: all of a tree of millions would take minutes.
_COMPARED = 5_000
_MEANT = 3


class Naming:
    """The names of a tree's leaves, and the paths that each means."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf | ValueLeaf],
        names: Mapping[Path, str],
        aliases: Mapping[Path, Iterable[Second]],
    ) -> None:
        self._leaves, self._names, self._aliases = leaves, names, aliases

    @cached_property
    def shown(self) -> Mapping[str, Path]:
        """The paths by their display names."""
        return {name: path for path, name in self._names.items()}

    @cached_property
    def _others(self) -> tuple[Mapping[str, list[Path]], ...]:
        """Every further name with the paths that it means: display names and second paths before keys."""
        places: dict[str, list[Path]] = {}
        keys: dict[str, list[Path]] = {}
        for path, leaf in self._leaves.items():
            seconds = list(self._aliases.get(path, ()))
            for each in (path, *(second for second, _ in seconds)):
                _note(places, display(each), path)
                _note(places, exact(each), path)
            native = (leaf.key, leaf.name) if isinstance(leaf, Leaf) else ()
            for key in (*native, *(key for _, key in seconds)):
                if key:
                    _note(keys, key, path)
        return places, keys

    def find(self, name: str) -> tuple[Path, ...]:
        """Return the paths that the name means: none, one, or several entries that share the name."""
        shown = self.shown.get(name)
        if shown is not None:
            return (shown,)
        return next((tuple(found) for names in self._others if (found := names.get(name))), ())


def _note(names: dict[str, list[Path]], name: str, path: Path) -> None:
    known = names.setdefault(name, [])
    if path not in known:
        known.append(path)


def modules_of(names: Iterable[str]) -> Iterator[str]:
    """Go through the modules that display names lie in, outermost first, each once.

    A name of more steps than limits.path_depth is passed over: its modules' names grow with their square.
    """
    seen: set[str] = set()
    deepest = limits.current().path_depth
    for name in names:
        if name.count("/") >= deepest:
            continue
        at = name.find("/")
        while at >= 0:
            if (above := name[:at]) and above not in seen:
                seen.add(above)
                yield above
            at = name.find("/", at + 1)


def meant(name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return those of the known names that somebody may mean who says `name`, at most three."""
    import difflib

    ending = [each for each in known if each.endswith(f"/{name}")]
    if ending:
        return tuple(ending[:_MEANT])
    # What is wrong may be a letter, or also that the name is not whole.
    steps = name.count("/") + 1
    ends: dict[str, list[str]] = {}
    for each in known[:_COMPARED]:
        ends.setdefault("/".join(each.split("/")[-steps:]), []).append(each)
    close = difflib.get_close_matches(name, known[:_COMPARED], 1)
    return tuple(close or ends.get(next(iter(difflib.get_close_matches(name, ends, 1)), ""), ())[:_MEANT])
