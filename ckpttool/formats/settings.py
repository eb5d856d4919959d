"""Settings as JSON and gin-config spell them, as plain values."""

from __future__ import annotations

import ast
import re
from typing import Any

from ckpttool import limits
from ckpttool.leaf import Leaf, Path, ValueLeaf, index, key
from ckpttool.tree import Container, Tree


def tree(settings: dict[str, Any], what: str) -> Tree:
    """Return an object of JSON as a tree: a leaf for every text, number, true, false and null.

    `what` names it in the error: LimitError for more levels than the limit allows.
    """
    most = limits.current().json_depth
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    containers: dict[Path, Container] = {}

    def add(value: Any, path: Path) -> None:
        if len(path) > most:
            raise limits.exceeded("json_depth", f"{what} is nested too deeply", len(path))
        if isinstance(value, dict):
            containers[path] = Container("dict")
            for name, inner in value.items():
                add(inner, (*path, key(name)))
        elif isinstance(value, list):
            containers[path] = Container("list")
            for number, inner in enumerate(value):
                add(inner, (*path, index(number)))
        else:
            leaves[path] = ValueLeaf(value)

    add(settings, ())
    return Tree(leaves, {}, containers)


# github.com/google/gin-config, docs/index.md: `scope/module.Name.parameter = value`, an operative config too.
_BINDING = re.compile(r"^(?:[\w./-]+/)?([\w.]+)\.(\w+)\s*=\s*\\?\s*(.+)$|^(\w+)\s*=\s*\\?\s*(.+)$")


def gin(text: str) -> dict[str, Any]:
    """Return the values that a gin-config file binds, by the name of what takes them and its parameter.

    A reference (`@tf.keras.activations.tanh`) is its last name; what else is no literal is left out.
    """
    found: dict[str, Any] = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        match = _BINDING.match(line.partition("#")[0].strip())
        owner, name, value, macro, other = match.groups() if match is not None else (None,) * 5
        plain = _gin_value(str(value if macro is None else other))
        place = found if macro is not None else found.setdefault(str(owner).rpartition(".")[2], {})
        if plain is not None and isinstance(place, dict):
            place[str(macro or name)] = plain
    return {name: value for name, value in found.items() if value != {}}


def _gin_value(text: str) -> Any:
    text = text.strip()
    if text.startswith("@"):
        return re.split(r"[./]", text[1:].removesuffix("()"))[-1]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, tuple) else value
