"""Settings in YAML as data: every tag is inert, no object is made, aliases and depth are bounded.

PyYAML's parser gives nodes (yaml/composer.py); only its rules for plain numbers, truth values and null are
used (yaml/constructor.py, SafeConstructor). RL-Zoo's files are dumps of `collections.OrderedDict`, a list of
pairs under a Python tag (rl_zoo3/exp_manager.py, `_save_config`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool import limits, places
from ckpttool.errors import FormatError
from ckpttool.leaf import Key, Path, ValueLeaf, index, key
from ckpttool.tree import Tree

# The parser's work grows with the square of how deep flow collections are nested.
_FLOWS = 500
_LONGEST_NAME = 200
_STANDARD = "tag:yaml.org,2002:"
_ORDERED = "collections.OrderedDict"


def read(file: str) -> Tree:
    """Return the values of a YAML file by path; raise FormatError when it is too large or no YAML."""
    most, size = limits.current(), places.getsize(file)
    if size > most.yaml_bytes:
        raise limits.exceeded("yaml_bytes", "the file is too large for settings", size, file=file)
    # Not at the top: few commands meet such a file.
    import yaml

    text = places.content(file)
    if text.count(b"[") + text.count(b"{") > _FLOWS:
        raise FormatError("the settings hold too many lists", file=file, expected=f"at most {_FLOWS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        leaves: dict[Path, ValueLeaf] = {}
        # A node has bytes of its own, unless an alias repeats it.
        for path, value in _values(node, yaml.SafeLoader(""), 2 + 2 * len(text), most.json_depth):
            leaves[path] = ValueLeaf(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = str(error).partition("\n")[0] if type(error) is ValueError else None
        raise FormatError("the settings cannot be read as YAML", file=file, found=told) from error
    return Tree(leaves)


def _values(node: Any, loader: Any, visits: int, levels: int) -> Iterator[tuple[Path, Any]]:
    """Give every scalar below a node; a dump of an OrderedDict is a mapping.

    Raise ValueError for more than `visits` nodes, an alias counted each time, or more than `levels` levels.
    """
    stack: list[tuple[Any, Path]] = [(node, ())]
    for _ in range(visits):
        if not stack:
            return
        node, path = stack.pop()
        if len(path) > levels:
            raise ValueError("the values are nested too deeply")
        kind = getattr(node, "id", None)
        below: list[tuple[Any, Path]] = []
        if kind == "scalar":
            yield path, _scalar(node, loader)
        elif kind == "mapping" or str(getattr(node, "tag", "")).endswith(_ORDERED):
            below = [(value, (*path, _name(name))) for name, value in _pairs(node)]
        elif kind == "sequence":
            below = [(value, (*path, index(position))) for position, value in enumerate(node.value)]
        stack += reversed(below)
        if len(stack) > visits:
            break
    if stack:
        raise ValueError("the aliases repeat more values than the file has bytes")


def _name(node: Any) -> Key:
    name = str(node.value)
    if node.id != "scalar":
        raise ValueError("a key is a list or a mapping")
    if node.tag == f"{_STANDARD}merge" or len(name) > _LONGEST_NAME:
        # What << merges would be left out, and what uses the settings would take defaults instead.
        raise ValueError(f"the key {name[:40]!r} is not read")
    return key(name)


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
    tag = node.tag.removeprefix(_STANDARD)
    found = plain.get(tag)
    if found is None:
        return str(node.value)
    try:
        value = found(node)
        # Python prints no number of more digits, unless it is let.
        return value if not isinstance(value, int) or str(value) else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML looks words up and takes text apart as it comes: !!bool maybe, !!float "".
        raise ValueError(f"{str(node.value)[:40]!r} is no {tag}") from error
