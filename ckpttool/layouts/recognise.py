"""Asks every layout whether a tree is one of its agents."""

from __future__ import annotations

from typing import cast

from ckpttool import plugins
from ckpttool.errors import UsageError
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.plan import Layout
from ckpttool.tree import Tree


def recognise(tree: Tree, name: str, layout: str | None = None) -> Binding | None:
    """Return the tree's way to the canonical agent, or None when no layout knows it.

    `name` is the checkpoint's file name; `layout` names the one to ask. Raise UsageError when the named
    layout does not fit, or when two layouts claim the tree.
    """
    if layout is not None:
        binding = _load(plugins.find("layouts", layout)).recognise(tree, name)
        if binding is None:
            raise UsageError(f"the checkpoint is not of layout {layout}")
        return binding
    found = [b for p in plugins.BUILT_IN["layouts"] if (b := _load(p).recognise(tree, name)) is not None]
    if not found:
        ours = {plugin.name for plugin in plugins.BUILT_IN["layouts"]}
        strangers = [p for p in plugins.installed("layouts") if p.name not in ours]
        found = [b for p in strangers if (b := _load(p).recognise(tree, name)) is not None]
    if len(found) > 1:
        names = " and ".join(binding.layout for binding in found)
        raise UsageError(f"layouts {names} both claim the checkpoint", hint="name one with --layout")
    return found[0] if found else None


def _load(plugin: plugins.Plugin) -> Layout:
    return cast(Layout, plugin.load())
