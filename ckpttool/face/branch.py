"""What lies below one path of a checkpoint, as a mapping from names to handles and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from ckpttool.errors import NameNotFoundError, some
from ckpttool.face.handle import Handle
from ckpttool.globs import matcher
from ckpttool.leaf import Leaf, Path, Plain, ValueLeaf, display
from ckpttool.naming import meant, modules_of
from ckpttool.shown import clean, count, size
from ckpttool.tree import Tree

_LONGEST = 200
_SHOWN = 12
# How a name begins that is spelled exactly (leaf.exact).
_EXACT = (".", "[")


class Branch(Mapping[str, Any]):
    """A module of a checkpoint, or the whole one: names below it, in the order of the file.

    Iterating gives the names of tensors and values; `[]` and `in` also know modules ("l1"), second paths,
    native keys and dotted names.

    >>> import ckpttool
    >>> actor = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")["policy/actor"]
    >>> list(actor)[:2]
    ['l1/kernel', 'l1/bias']
    >>> actor["l1"]
    <Branch policy/actor/l1: 2 tensors, 256 parameters, 1.02 kB>
    >>> sum(handle.size for handle in actor.tensors().values())
    4481
    """

    def __init__(self, tree: Tree, name: str = "", file: str | None = None) -> None:
        """View the tree below `name`, the whole tree by default; `file` is for errors."""
        self.name = name
        self._tree, self._file = tree, file

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The path of every entry in the whole tree, by its name below this module."""
        names = self._tree.names
        if not self.name:
            return {shown: path for path, shown in names.items()}
        start = f"{self.name}/"
        found = {
            shown[len(start) :] if shown.startswith(start) else shown: path
            for path, shown in names.items()
            if shown.startswith(start) or (shown[:1] in _EXACT and display(path).startswith(start))
        }
        inside = set(found.values())
        for path, seconds in self._tree.aliases.items():
            for second in seconds:
                # What has no path of its own here, such as a weight that another module shares.
                if path not in inside and (shown := display(second.path)).startswith(start):
                    found.setdefault(shown[len(start) :], path)
                    inside.add(path)
        return found

    def tensor(self, name: str) -> Handle:
        """Return the tensor of that name; raise NameNotFoundError if there is none."""
        found = self[name]
        if not isinstance(found, Handle):
            raise self._unknown(name, f"{_said(name)} is {_kind(found)}, not a tensor")
        return found

    def module(self, name: str) -> Branch:
        """Return the module of that name; raise NameNotFoundError if there is none."""
        found = self[f"{name.rstrip('/')}/"]
        if not isinstance(found, Branch):
            raise self._unknown(name, f"{_said(name)} is {_kind(found)}, not a module")
        return found

    def tensors(self) -> dict[str, Handle]:
        """Return the tensors by their names below this module."""
        return {name: entry for name, entry in self.items() if isinstance(entry, Handle)}

    def plain(self) -> dict[str, Plain]:
        """Return the values that are no tensors by their names below this module."""
        return {name: entry for name, entry in self.items() if not isinstance(entry, Handle)}

    def modules(self) -> tuple[str, ...]:
        """Return the names of all modules below, outermost first."""
        return tuple(modules_of(self.paths))

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries whose names match: `*` within a segment, `**` across segments.

        A pattern may begin at any segment: `actor/**` finds `policy/actor/l1/kernel` too.
        """
        keep = matcher(pattern)
        return {name: self._entry(path) for name, path in self.paths.items() if keep(name)}

    def __getitem__(self, name: str) -> Any:
        """Return a Handle, a plain value, or the Branch of a module; raise NameNotFoundError for no name.

        A slash at the end asks for the module where a tensor has the same name.
        """
        if not isinstance(name, str):
            raise TypeError(f"entries are called by strings, not by {type(name).__name__}")
        found = self._meant(name)
        if found is None:
            raise self._unknown(name, f"nothing here is called {_said(name)}")
        if isinstance(found, str):
            return Branch(self._tree, found, self._file)
        if len(found) > 1:
            raise self._unknown(name, f"{len(found)} entries are called {_said(name)}", found)
        return self._entry(found[0])

    def __contains__(self, name: object) -> bool:
        """Say whether something here has the name, be it several entries."""
        return isinstance(name, str) and self._meant(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Go through the names of tensors and values."""
        return iter(self.paths)

    def __len__(self) -> int:
        """Return the number of tensors and values."""
        return len(self.paths)

    def _meant(self, name: str) -> tuple[Path, ...] | str | None:
        """Return the paths that a name means, or the whole name of a module; None if nothing has it."""
        wanted = name.strip("/")
        for spelling in dict.fromkeys((name, wanted, wanted.replace(".", "/"))):
            whole = f"{self.name}/{spelling}".strip("/")
            # Display names and modules come before the names that have to be gathered first.
            if not name.endswith("/") and (path := self._shown(spelling)) is not None:
                return (path,)
            if spelling and self._is_module(f"{whole}/"):
                return whole
            if not name.endswith("/") and (found := self._known(spelling)):
                return found
        return None

    def _shown(self, name: str) -> Path | None:
        return self.paths.get(name) if self.name else self._tree.naming.shown.get(name)

    def _is_module(self, start: str) -> bool:
        tree = self._tree
        if any(shown.startswith(start) for shown in tree.names.values()):
            return True
        seconds = (second.path for others in tree.aliases.values() for second in others)
        return any(display(path).startswith(start) for path in seconds)

    def _known(self, name: str) -> tuple[Path, ...]:
        naming = self._tree.naming
        if not self.name:
            return naming.find(name)
        # A native key is one of the whole checkpoint.
        inside = set(self.paths.values())
        return naming.find(f"{self.name}/{name}") or tuple(p for p in naming.find(name) if p in inside)

    def listed(self) -> Iterator[tuple[str, Leaf | ValueLeaf]]:
        """Go through the leaves by their names below this module."""
        return ((name, self._tree[path]) for name, path in self.paths.items())

    def _entry(self, path: Path) -> Any:
        leaf = self._tree[path]
        if not isinstance(leaf, Leaf):
            return leaf.value
        names = (self._tree.alias_name(each) for each in self._tree.aliases.get(path, ()))
        return Handle(self._tree.names[path], leaf, tuple(names))

    def _unknown(self, name: str, message: str, several: tuple[Path, ...] = ()) -> NameNotFoundError:
        if several:
            hint = f"they are {', '.join(clean(self._tree.names[path]) for path in several[:_SHOWN])}"
        elif close := meant(name.strip("/"), [*self.paths, *self.modules()]):
            hint = f"did you mean {' or '.join(map(clean, close))}"
        else:
            tops = dict.fromkeys(each.partition("/")[0] for each in self.paths)
            hint = f"there are {some([clean(each) for each in tops], _SHOWN)}"
        place = clean(self.name) or None
        return NameNotFoundError(message, file=self._file, path=place, hint=hint)

    def __repr__(self) -> str:
        return f"<Branch {clean(self.name) or '(all)'}: {self.summary}>"

    @property
    def summary(self) -> str:
        """The counts and sums in words."""
        leaves = [leaf for path in self.paths.values() if isinstance(leaf := self._tree[path], Leaf)]
        parameters = sum(leaf.size for leaf in leaves if leaf.role == "parameter")
        words = [count(len(leaves), "tensor"), count(parameters, "parameter")]
        words.append(size(sum(leaf.nbytes for leaf in leaves)))
        plain = len(self) - len(leaves)
        return ", ".join(words if not plain else [*words, count(plain, "value")])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Give rich the lines that a terminal shows: the modules with their sums, folded where long."""
        from ckpttool.face import outline

        for line in outline.lines(repr(self)[1:-1], self.listed(), options.max_width):
            yield console.render_str(line, markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a tree to unfold; every name in it is text."""
        from ckpttool.face import markup

        return markup.branch(repr(self)[1:-1], self.listed())

    def _ipython_key_completions_(self) -> list[str]:
        """Return what a notebook completes after `[`."""
        return [*self.modules(), *self]


def _said(name: str) -> str:
    shown = clean(name)
    return repr(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...")


def _kind(entry: object) -> str:
    if isinstance(entry, Handle):
        return "a tensor"
    return "a module" if isinstance(entry, Branch) else "a plain value"
