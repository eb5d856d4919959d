"""Settings in YAML as data: every tag is inert, no object is made, aliases and depth are bounded.

PyYAML's parser gives nodes (yaml/composer.py); only its rules for plain numbers, truth values and null are
used (yaml/constructor.py, SafeConstructor). RL-Zoo's files are dumps of `collections.OrderedDict`, a list of
pairs under a Python tag (rl_zoo3/exp_manager.py, `_save_config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ckpttool.errors import FormatError
from ckpttool.leaf import Path, ValueLeaf, index, key
from ckpttool.tree import Tree

_BYTES = 64 << 10
_DEPTH, _VALUES, _FLOWS = 30, 20_000, 500
_STANDARD = "tag:yaml.org,2002:"
_ORDERED = "collections.OrderedDict"


def read(file: str) -> Tree:
    """Return the values of a YAML file by path; raise FormatError when it is too large or no YAML."""
    if os.path.getsize(file) > _BYTES:
        what = "the file is too large for settings"
        raise FormatError(what, file=file, expected=f"at most {_BYTES:,} bytes")
    # Not at the top: few commands meet such a file.
    import yaml

    with open(file, "rb") as stream:
        text = stream.read()
    # The parser's work grows with the square of how deep flow collections are nested.
    if text.count(b"[") + text.count(b"{") > _FLOWS:
        raise FormatError("the settings hold too many lists", file=file, expected=f"at most {_FLOWS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        leaves: dict[Path, ValueLeaf] = {}
        for path, value in _values(node, (), yaml.SafeLoader("")):
            if len(leaves) >= _VALUES:
                most = f"at most {_VALUES:,}"
                raise FormatError("the settings have too many values", file=file, expected=most)
            leaves[path] = ValueLeaf(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError("the file is not YAML", file=file) from error
    return Tree(leaves)


def _values(node: Any, path: Path, loader: Any, depth: int = 0) -> Iterator[tuple[Path, Any]]:
    """Give every scalar below a node; a dump of an OrderedDict is a mapping."""
    if depth > _DEPTH:
        raise ValueError(f"values are nested more than {_DEPTH} deep")
    kind = getattr(node, "id", None)
    if kind == "scalar":
        yield path, _scalar(node, loader)
    elif kind == "mapping" or str(getattr(node, "tag", "")).endswith(_ORDERED):
        for name, value in _pairs(node):
            yield from _values(value, (*path, key(str(name.value)[:200])), loader, depth + 1)
    elif kind == "sequence":
        for position, value in enumerate(node.value):
            yield from _values(value, (*path, index(position)), loader, depth + 1)


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    if node.id == "mapping":
        yield from node.value
        return
    # - - - name
    #     - value
    for each in node.value[0].value if node.value and node.value[0].id == "sequence" else ():
        if each.id == "sequence" and len(each.value) == 2 and each.value[0].id == "scalar":
            yield each.value[0], each.value[1]


def _scalar(node: Any, loader: Any) -> Any:
    plain = {
        "null": loader.construct_yaml_null,
        "bool": loader.construct_yaml_bool,
        "int": loader.construct_yaml_int,
        "float": loader.construct_yaml_float,
    }
    found = plain.get(node.tag.removeprefix(_STANDARD))
    return found(node) if found is not None else str(node.value)
