"""Writes the folder of one RLModule: its state, the class and arguments that make it, what the folder holds.

Sources, in github.com/ray-project/ray: rllib/utils/checkpoints.py (`Checkpointable.save_to_path`,
`from_checkpoint`), rllib/core/rl_module/rl_module.py (`get_ctor_args_and_kwargs`). The pickles name RLlib's
classes, and call gymnasium's Box with its two arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

from ckpttool.errors import UnsupportedError
from ckpttool.formats.pickled import making
from ckpttool.formats.probe import Piece
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, display, key
from ckpttool.tree import Tree
from ckpttool.wire import pickle_numpy
from ckpttool.wire.pickle_values import Global, Object
from ckpttool.wire.pickle_writer import dumps

# What a tree says of the module's class and its arguments, plain values all: they get a file of their own.
ARGUMENTS = attr("arguments")
CLASS = (ARGUMENTS, key("class"))
_STATE, _MADE, _ABOUT = "module_state.pkl", "class_and_ctor_args.pkl", "metadata.json"
_VERSION = "2.1"
_BOX = Global("gymnasium.spaces.box", "Box")


def pieces(tree: Tree) -> tuple[Piece, ...]:
    """Return the folder's files; raise UnsupportedError for a tree that is no module of RLlib's."""
    made = tree.get(CLASS)
    if not isinstance(made, ValueLeaf) or not isinstance(made.value, Record):
        raise UnsupportedError("only an agent can be written as a module of RLlib")
    state = {path: leaf for path, leaf in tree.tensors() if path[0] != ARGUMENTS}
    for path, leaf in state.items():
        _require_array(leaf, path)
    about = {"class_and_ctor_args_file": _MADE, "state_file": "module_state", "checkpoint_version": _VERSION}
    arguments = dumps(_arguments(tree, made.value), making.PROTOCOL)
    text = json.dumps(about).encode("ascii")
    return (
        Piece(f"/{_MADE}", lambda stream: _put(stream, arguments)),
        Piece(f"/{_ABOUT}", lambda stream: _put(stream, text)),
        Piece(f"/{_STATE}", lambda stream: _write(stream, state)),
    )


def _put(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)


def _require_array(leaf: Leaf, path: Path) -> None:
    making.code(leaf, path)
    if len(path) != 1:
        raise UnsupportedError("a module of RLlib keeps its tensors in one dict", path=display(path))


def _write(stream: IO[bytes], state: Mapping[Path, Leaf]) -> None:
    arrays = {str(path[0].value): making.array(leaf, path) for path, leaf in state.items()}
    stream.write(dumps(arrays, making.PROTOCOL))


def _arguments(tree: Tree, made: Record) -> dict[str, Any]:
    found: dict[Any, Any] = {}
    for path, leaf in tree.plain():
        if path[0] == ARGUMENTS and path != CLASS:
            at = found
            for step in path[1:-1]:
                at = at.setdefault(step.value, {})
            at[path[-1].value] = leaf.value
    return {
        "class": making.named(made),
        "ctor_args_and_kwargs": ((), {name: _argument(value) for name, value in found.items()}),
    }


def _argument(value: Any) -> Any:
    """Return an argument: a dict counted from 0 is a list, one of `low` and `high` a space."""
    if isinstance(value, Record):
        return making.named(value)
    if not isinstance(value, dict):
        return value
    inner = {name: _argument(each) for name, each in value.items()}
    if inner and all(isinstance(name, int) for name in inner):
        return list(inner.values())
    if inner.keys() == {"low", "high"}:
        return making.box(_BOX, *(_numbers(inner[end]) for end in ("low", "high")))
    return inner


def _numbers(values: list[float]) -> Object:
    return pickle_numpy.stored("f4", (len(values),), struct.pack(f"<{len(values)}f", *values))
