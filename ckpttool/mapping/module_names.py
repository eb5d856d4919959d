"""Dotted names of modules and parameters: wrappers found in them, taken out, put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

Segments = tuple[str, ...]

# torch/optim/swa_utils.py, AveragedModel: its own buffer stands beside the module that it wraps.
_AVERAGED = "n_averaged"
_DEEPEST = 100

# Names as a tree of segments; the empty one marks where a name ends.
_Node = dict[str, "_Node"]


class Wrapped(NamedTuple):
    """The wrappers around one module: `at` is its plain name, `segments` what names below it carry.

    `averaged` says behind how many of the segments AveragedModel's `n_averaged` stands, if it is there.
    """

    at: Segments
    segments: Segments
    averaged: int | None = None


class Plain(NamedTuple):
    """The plain form of every name, and what it was wrapped in."""

    names: Mapping[str, str]
    wrapped: tuple[Wrapped, ...]


def plain(names: Sequence[str], wrappers: Collection[str], first: Collection[str] = ()) -> Plain | None:
    """Return the plain form of each name; None when no wrapper is around all names of a module.

    `first` are further segments that count as wrappers around the whole.
    """
    root: _Node = {}
    for name in names:
        node = root
        segments = name.split(".")
        if len(segments) > _DEEPEST or "" in segments:
            return None
        for segment in segments:
            node = node.setdefault(segment, {})
        node[""] = {}
    wrapped: list[Wrapped] = []
    found = dict(_names(root, (), (), wrappers, first, wrapped))
    if not wrapped or len(set(found.values())) != len(found):
        return None
    return Plain({".".join(old): ".".join(new) for old, new in found.items()}, tuple(wrapped))


def _names(
    node: _Node,
    old: Segments,
    new: Segments,
    wrappers: Collection[str],
    first: Collection[str],
    wrapped: list[Wrapped],
) -> Iterator[tuple[Segments, Segments]]:
    """Go through old and plain names below a node, noting the wrappers that are left out."""
    segments: list[str] = []
    averaged: int | None = None
    while (wrapper := _only(node, wrappers if new else {*wrappers, *first})) is not None:
        if _AVERAGED in node:
            if averaged is not None or _AVERAGED in node[wrapper]:
                break
            averaged = len(segments)
            yield (*old, _AVERAGED), (*new, _AVERAGED)
        segments.append(wrapper)
        old, node = (*old, wrapper), node[wrapper]
    if segments:
        wrapped.append(Wrapped(new, tuple(segments), averaged))
    for segment, below in node.items():
        if not segment:
            yield old, new
        else:
            yield from _names(below, (*old, segment), (*new, segment), wrappers, first, wrapped)


def _only(node: _Node, wrappers: Collection[str]) -> str | None:
    """Return the wrapper that everything below the node is in; `n_averaged` may stand beside `module`."""
    inner = [segment for segment in node if segment != _AVERAGED or node[segment].keys() != {""}]
    if len(inner) != 1 or inner[0] not in wrappers or "" in node[inner[0]]:
        return None
    return inner[0] if len(node) == 1 or inner[0] == "module" else None


def decorated(name: str, wrapped: Sequence[Wrapped]) -> str:
    """Return what the plain name was."""
    places = {each.at: each for each in wrapped}
    segments = tuple(name.split("."))
    out: list[str] = []
    for depth, segment in enumerate(segments):
        if (each := places.get(segments[:depth])) is not None:
            mine = segment == _AVERAGED and depth == len(segments) - 1
            out += each.segments[: each.averaged] if mine else each.segments
        out.append(segment)
    return ".".join(out)


def without(
    metadata: Mapping[str, object], wrapped: Sequence[Wrapped]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return `_metadata`, which is by module, under plain names, and the wrappers' own entries apart."""
    places = {_module(each.at, wrapped): each for each in wrapped}
    kept: dict[str, object] = {}
    apart: dict[str, object] = {}
    for name, said in metadata.items():
        plain_name = _plain_module(tuple(name.split(".")) if name else (), places)
        if plain_name is None or plain_name in kept:
            apart[name] = said
        else:
            kept[plain_name] = said
    return kept, apart


def within(
    metadata: Mapping[str, object], wrapped: Sequence[Wrapped], apart: Mapping[str, object]
) -> dict[str, object]:
    """Return `_metadata` as it was: each wrapper's entry before those of the modules in it."""
    found: dict[str, object] = {}
    for name, said in metadata.items():
        segments = tuple(name.split(".")) if name else ()
        full = _inside(segments, wrapped)
        for depth in range(len(full)):
            outer = ".".join(full[:depth])
            if outer in apart:
                found.setdefault(outer, apart[outer])
        found[".".join(full)] = said
    return found | {name: said for name, said in apart.items() if name not in found}


def _module(at: Segments, wrapped: Sequence[Wrapped]) -> Segments:
    """Return the full name of the outermost wrapper around a module of that plain name."""
    return tuple(decorated(".".join(at), wrapped).split(".")) if at else ()


def _inside(module: Segments, wrapped: Sequence[Wrapped]) -> Segments:
    """Return the full name of the module itself, inside of its wrappers."""
    own = next((each.segments for each in wrapped if each.at == module), ())
    return (*_module(module, wrapped), *own)


def _plain_module(full: Segments, places: Mapping[Segments, Wrapped]) -> str | None:
    """Return a module's plain name; None for a wrapper."""
    out: list[str] = []
    at = 0
    while True:
        each = places.get(full[:at])
        if each is not None:
            if full[at : at + len(each.segments)] != each.segments:
                return None
            at += len(each.segments)
        if at == len(full):
            return ".".join(out)
        out.append(full[at])
        at += 1
