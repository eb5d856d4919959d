"""Asks every layout whether a tree is one of its agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import cast

from ckpttool import plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError
from ckpttool.formats import onnx
from ckpttool.layouts.canonical import NO_LAYOUT, Binding
from ckpttool.layouts.plan import Layout
from ckpttool.leaf import display
from ckpttool.mapping import decorations
from ckpttool.tree import Tree

_Asked = Callable[[Tree, str], Binding | None]
# More entries with tensors of their own than that are a model's modules, not things saved side by side.
_ENTRIES = 32
_MOST = 50_000


def recognised(checkpoint: Checkpoint, layout: str | None = None) -> Binding | None:
    """Return the agent in the checkpoint, None if no layout knows one; raise UsageError as `recognise`."""
    if checkpoint.format == onnx.NAME:
        # Names of constants are an exporter's: the graph says what a model computes, not a layout.
        if layout not in (None, NO_LAYOUT):
            raise UsageError("an ONNX model is of no layout", file=checkpoint.path, hint="leave out --layout")
        return None
    return recognise(checkpoint.tree, os.path.basename(checkpoint.path), layout)


def recognise(tree: Tree, name: str, layout: str | None = None) -> Binding | None:
    """Return the tree's way to the canonical agent, or None when no layout knows it.

    An agent may have been saved with wrappers around its modules (`module.`), or inside a dict of other
    things ("model", "epoch"): its names are looked at without the former, and in the entry that alone is an
    agent. `name` is the checkpoint's file name; `layout` names the one to ask, `none` for none at all. Raise
    UsageError when the named layout does not fit, or when two layouts claim the tree. A tree of very many
    entries is asked for its layout only when one is named: no agent has so many, and every layout looks at
    all of them.
    """
    if layout == NO_LAYOUT or (layout is None and len(tree) > _MOST):
        return None
    # Scanning installed packages takes as long as importing numpy: at most once, and after ours.
    asked = partial(_all, strangers=cache(_strangers)) if layout is None else _one(layout)
    found = _undecorated(tree, name, asked) or asked(tree, name) or _inside(tree, name, asked)
    if found is None and layout is not None:
        raise UsageError(f"the checkpoint is not of layout {layout}")
    return found


def _one(layout: str) -> _Asked:
    return _load(plugins.find("layouts", layout)).recognise


def _all(tree: Tree, name: str, strangers: Callable[[], Sequence[plugins.Plugin]]) -> Binding | None:
    found = _claims(plugins.BUILT_IN["layouts"], tree, name) or _claims(strangers(), tree, name)
    if len(found) > 1:
        names = " and ".join(binding.layout for binding in found)
        raise UsageError(f"layouts {names} both claim the checkpoint", hint="name one with --layout")
    return found[0] if found else None


def _claims(layouts: Iterable[plugins.Plugin], tree: Tree, name: str) -> list[Binding]:
    return [b for p in layouts if (b := _load(p).recognise(tree, name)) is not None]


def _strangers() -> list[plugins.Plugin]:
    ours = {plugin.name for plugin in plugins.BUILT_IN["layouts"]}
    return [p for p in plugins.installed("layouts") if p.name not in ours]


def _undecorated(tree: Tree, name: str, asked: _Asked) -> Binding | None:
    """Ask about the tree under the names that its modules have without their wrappers."""
    plain = decorations.undecorated(tree)
    if plain is None:
        return None
    binding = asked(plain[0], name)
    return binding.moved(lambda path: plain[1].get(path, path)) if binding is not None else None


def _inside(tree: Tree, name: str, asked: _Asked) -> Binding | None:
    """Ask about every entry of a dict that is a dict itself; None unless exactly one is an agent."""
    tops = {path[:1] for path, _ in tree.tensors() if len(path) > 1}
    if not 0 < len(tops) <= _ENTRIES:
        return None
    found = [(top, binding) for top in tops if (binding := asked(tree.below(top), name)) is not None]
    if len(found) != 1:
        return None
    top, binding = found[0]
    evidence = f"{display(top)}/: {binding.evidence}"
    return replace(binding.moved(lambda path: (*top, *path)), evidence=evidence)


def _load(plugin: plugins.Plugin) -> Layout:
    return cast(Layout, plugin.load())
