"""Settings files as plain values: JSON, gin-config and YAML.

YAML is read as data: every tag is inert, no object is created, aliases and depth are bounded. PyYAML's
parser produces nodes (yaml/composer.py); only its rules for plain numbers, booleans and null are used
(yaml/constructor.py, SafeConstructor). RL-Zoo's files are dumps of `collections.OrderedDict`, a list of
pairs under a Python tag (rl_zoo3/exp_manager.py, `_save_config`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from ckpttool.core import deferred, filesystem, limits
from ckpttool.core.errors import FormatError
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, ValueLeaf, index, key

# The parser's run time grows with the square of the nesting depth of flow collections.
_FLOWS = 500
_LONGEST_NAME = 200
_STANDARD = "tag:yaml.org,2002:"
_ORDERED = "collections.OrderedDict"


def read_yaml(file: str) -> Tree:
    """Return the values of a YAML file by path; raise FormatError if it is too large or invalid YAML."""
    most, size = limits.current(), filesystem.getsize(file)
    if size > most.yaml_bytes:
        raise limits.limit_error("yaml_bytes", "the settings file is too large", size, file=file)
    # Not a top-level import: few commands read YAML.
    import yaml

    text = filesystem.read_bytes(file)
    if text.count(b"[") + text.count(b"{") > _FLOWS:
        raise FormatError("the settings hold too many lists", file=file, expected=f"at most {_FLOWS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        leaves: dict[Path, ValueLeaf] = {}
        # Each node has its own bytes, unless it is repeated by an alias.
        for path, value in _iter_values(node, yaml.SafeLoader(""), 2 + 2 * len(text), most.json_depth):
            leaves[path] = ValueLeaf(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else None
        raise FormatError("cannot parse the settings as YAML", file=file, found=reason) from error
    return Tree(leaves)


def _iter_values(node: Any, loader: Any, visits: int, levels: int) -> Iterator[tuple[Path, Any]]:
    """Yield every scalar under a node; a dump of an OrderedDict is read as a mapping.

    Raise ValueError for more than `visits` nodes (aliases count each time) or more than `levels`
    levels.
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
            below = [(value, (*path, _mapping_key(name))) for name, value in _pairs(node)]
        elif kind == "sequence":
            below = [(value, (*path, index(position))) for position, value in enumerate(node.value)]
        stack += reversed(below)
        if len(stack) > visits:
            break
    if stack:
        raise ValueError("expanding the aliases gives more values than the file has bytes")


def _mapping_key(node: Any) -> PathStep:
    name = str(node.value)
    if node.id != "scalar":
        raise ValueError("a key must be a scalar, not a list or a mapping")
    if node.tag == f"{_STANDARD}merge" or len(name) > _LONGEST_NAME:
        # The values merged by << would be missing, and users of the settings would silently fall back to
        # defaults.
        raise ValueError(f"unsupported key {name[:40]!r}")
    return key(name)


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    if node.id == "mapping":
        yield from node.value
        return
    # - - - name
    #     - value
    for pair in node.value[0].value if node.value and node.value[0].id == "sequence" else ():
        if pair.id == "sequence" and len(pair.value) == 2 and pair.value[0].id == "scalar":
            yield pair.value[0], pair.value[1]


def _scalar(node: Any, loader: Any) -> Any:
    plain = {
        "null": loader.construct_yaml_null,
        "bool": loader.construct_yaml_bool,
        "int": loader.construct_yaml_int,
        "float": loader.construct_yaml_float,
    }
    tag = node.tag.removeprefix(_STANDARD)
    convert = plain.get(tag)
    if convert is None:
        return str(node.value)
    try:
        value = convert(node)
        # Python refuses to print numbers with more digits by default.
        return value if not isinstance(value, int) or str(value) else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML converts text without validating it: !!bool maybe, !!float "".
        raise ValueError(f"{str(node.value)[:40]!r} is not a valid {tag}") from error


def tree_from_json(settings: dict[str, Any], what: str) -> Tree:
    """Return a JSON object as a tree: a leaf for every string, number, true, false and null.

    `what` is its name in errors; raise LimitError if the object is nested too deeply.
    """
    most = limits.current().json_depth
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    containers: dict[Path, Container] = {}

    def add(value: Any, path: Path) -> None:
        if len(path) > most:
            raise limits.limit_error("json_depth", f"{what} is nested too deeply", len(path))
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


# github.com/google/gin-config, docs/index.md: `scope/module.Name.parameter = value`; also used for operative
# configs.
_BINDING = deferred.compile(r"^(?:[\w./-]+/)?([\w.]+)\.(\w+)\s*=\s*\\?\s*(.+)$|^(\w+)\s*=\s*\\?\s*(.+)$")


def parse_gin(text: str) -> dict[str, Any]:
    """Return the bindings of a gin-config file, by configurable name and parameter.

    A reference (`@tf.keras.activations.tanh`) becomes its last name; other non-literals are omitted.
    """
    bindings: dict[str, Any] = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        match = _BINDING.match(line.partition("#")[0].strip())
        owner, name, value, macro, other = match.groups() if match is not None else (None,) * 5
        plain = _gin_value(str(value if macro is None else other))
        target = bindings if macro is not None else bindings.setdefault(str(owner).rpartition(".")[2], {})
        if plain is not None and isinstance(target, dict):
            target[str(macro or name)] = plain
    return {name: value for name, value in bindings.items() if value != {}}


def _gin_value(text: str) -> Any:
    text = text.strip()
    if text.startswith("@"):
        return re.split(r"[./]", text[1:].removesuffix("()"))[-1]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, tuple) else value
