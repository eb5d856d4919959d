"""Writes an agent's zip: settings as JSON, variables as NumPy's archive, and their names in order.

Sources, in github.com/hill-a/stable-baselines: stable_baselines/common/base_class.py
(`_save_to_file_zip`, `_load_from_file`), stable_baselines/common/save_util.py (`data_to_json`,
`params_to_bytes`). What JSON cannot hold is a pickle that names a class of the library, or calls gym's Box
with its two arrays (gym/spaces/box.py), as every version of gym can.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import IO, Any

from ckpttool.errors import UnsupportedError
from ckpttool.formats import whole
from ckpttool.formats.pickled import making
from ckpttool.formats.pickled.settings import SERIALIZED
from ckpttool.formats.probe import Piece
from ckpttool.formats.stable_baselines2.listing import DATA
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, key
from ckpttool.tree import Tree
from ckpttool.wire import npy
from ckpttool.wire.pickle_values import Global
from ckpttool.wire.pickle_writer import dumps
from ckpttool.wire.zip_writer import Writer

_BOX = Global("gym.spaces.box", "Box")
_POLICY = (*DATA, key("policy"))


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file; raise UnsupportedError for a tree that is no agent of the library."""
    policy = tree.get(_POLICY)
    if not isinstance(policy, ValueLeaf) or not isinstance(policy.value, Record):
        raise UnsupportedError("only an agent can be written as a file of Stable-Baselines 2")
    variables = {path: leaf for path, leaf in tree.tensors() if path[: len(DATA)] != DATA}
    codes = {path: making.code(leaf, path) for path, leaf in variables.items()}
    data = _settings(tree)
    return (Piece("", lambda stream: _write(stream, data, variables, codes)),)


def _write(
    stream: IO[bytes], data: Mapping[str, Any], variables: Mapping[Path, Leaf], codes: Mapping[Path, str]
) -> None:
    inner = io.BytesIO()
    arrays = Writer(inner)
    for path, leaf in variables.items():
        header = npy.header(("|" if codes[path].endswith("1") else "<") + codes[path], leaf.shape)
        arrays.add(_name(path) + npy.SUFFIX, header, whole.data(leaf, path))
    arrays.close()
    archive = Writer(stream)
    archive.add("data", json.dumps(data, indent=4).encode("ascii"))
    archive.add("parameters", inner.getbuffer())
    archive.add("parameter_list", json.dumps([_name(path) for path in variables]).encode("ascii"))
    archive.close()


def _name(path: Path) -> str:
    """Return a variable's name, which TensorFlow lists by its first output."""
    return "/".join(str(step.value) for step in path) + ":0"


def _settings(tree: Tree) -> dict[str, Any]:
    """Return the settings as JSON holds them, what it cannot hold as pickles."""
    made: dict[str, Any] = {}
    for path, leaf in tree.items():
        if path[: len(DATA)] == DATA and len(path) > len(DATA):
            _put(made, path[len(DATA) :], leaf)
    return {name: _json(value) for name, value in made.items()}


def _put(made: dict[str, Any], path: Path, leaf: Leaf | ValueLeaf) -> None:
    at: Any = made
    for step, after in pairwise(path):
        at = _entered(at, step, [] if after.kind == "index" else {})
    _entered(at, path[-1], leaf.value if isinstance(leaf, ValueLeaf) else making.array(leaf, path))


def _entered(at: Any, step: Key, value: Any) -> Any:
    """Return the entry of a dict or list at the step, which is `value` if there is none yet."""
    if isinstance(at, list):
        if step.value == len(at):
            at.append(value)
        return at[-1]
    return at.setdefault(step.value, value)


def _json(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() >= {"low", "high"}:
        return _pickled(f"<class '{_BOX.full}'>", making.box(_BOX, value["low"], value["high"]))
    named = _named(value)
    if named is value or named == value:
        return value
    kind = "type" if isinstance(named, Global) else type(value).__name__
    return _pickled(f"<class '{kind}'>", named)


def _named(value: Any) -> Any:
    """Return the value with every inert name as the pickle's name of that class or function."""
    if isinstance(value, Record):
        return making.named(value)
    if isinstance(value, dict):
        return {step: _named(inner) for step, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner) for inner in value]
    return value


def _pickled(kind: str, value: Any) -> dict[str, str]:
    return {":type:": kind, SERIALIZED: base64.b64encode(dumps(value, making.PROTOCOL)).decode("ascii")}
