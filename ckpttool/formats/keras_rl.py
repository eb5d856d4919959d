"""keras-rl's two files of one DDPG agent, `NAME_actor.h5f` and `NAME_critic.h5f`, under the name given to it.

Source: rl/agents/ddpg.py in github.com/keras-rl/keras-rl, `DDPGAgent.save_weights`: `_actor` and `_critic`
come before the suffix, and `.h5f` is the one of its examples. Keras decides what each is: HDF5, or with
tf.keras, to which `.h5f` says nothing, a tensor bundle of that prefix (keras/engine/training.py,
`save_weights`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UnsupportedError
from ckpttool.formats.listed import joined
from ckpttool.formats.probe import Piece, Probe
from ckpttool.leaf import Key, Leaf, display, key
from ckpttool.tree import Container
from ckpttool.wire.asked import merged, standing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import IO

    from ckpttool.tree import Tree

NAME = "keras_rl"
TITLE = "keras-rl's NAME_actor.h5f and NAME_critic.h5f"
WRITES = True
FRAMEWORK = "tensorflow"

_MEMBERS = ("actor", "critic")
_SUFFIX = ".h5f"
_KINDS = ("", ".index")


def claims(probe: Probe) -> str | None:
    """Return the name with its suffix if no file has it but an actor's and a critic's were made of it."""
    if probe.kind != "missing":
        return None
    stem = probe.path.removesuffix(_SUFFIX)
    folder, name = os.path.split(stem)
    there = all(_is_there(folder, f"{name}_{member}{_SUFFIX}", probe.names) for member in _MEMBERS)
    return stem + _SUFFIX if name and there else None


def _is_there(folder: str, name: str, names: Collection[str]) -> bool:
    return any(name + kind in names and places.isfile(os.path.join(folder, name + kind)) for kind in _KINDS)


def read(location: str) -> Checkpoint:
    """List both networks, each as what its bytes say; native keys are `actor:dense_1/kernel:0`."""
    from ckpttool.formats.resolve import open_checkpoint

    stem = location.removesuffix(_SUFFIX)
    parts = {member: open_checkpoint(f"{stem}_{member}{_SUFFIX}") for member in _MEMBERS}
    tree = joined({key(member): one.tree for member, one in parts.items()}, _native, Container("dict"))
    both = tuple(parts.values())
    checked = all(one.integrity == "crc32c" for one in both)
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=tuple(file for one in both for file in one.files),
        writer=both[0].writer,
        integrity="crc32c" if checked else "none",
        notes=tuple(dict.fromkeys(note for one in both for note in one.notes)),
        asks=merged(*(standing(one.asks, member) for member, one in parts.items())),
        unjudged=tuple(f"{member}: {each}" for member, one in parts.items() for each in one.unjudged),
    )


def _native(member: Key, name: str) -> str:
    return f"{member.value}:{name}"


def pieces(tree: Tree) -> tuple[Piece, ...]:
    """Return both files, HDF5; raise UnsupportedError for a tensor that is no layer's of the two networks."""
    members: dict[str, dict[str, dict[str, Leaf]]] = {member: {} for member in _MEMBERS}
    for path, leaf in tree.tensors():
        if len(path) != 3 or path[0].value not in members:
            raise UnsupportedError("keras-rl keeps layers of an actor and a critic", path=display(path))
        member, layer, weight = (str(step.value) for step in path)
        members[member].setdefault(layer, {})[_name(leaf, member, layer, weight)] = leaf
    return tuple(Piece(f"_{member}{_SUFFIX}", _writer(layers)) for member, layers in members.items())


def _name(leaf: Leaf, member: str, layer: str, weight: str) -> str:
    """Return the weight's name below its layer: the file's own on the way back (Keras 1: `dense_1_W:0`)."""
    own = f"{member}:{layer}/"
    return leaf.key.removeprefix(own) if leaf.key.startswith(own) else f"{layer}/{weight}:0"


def _writer(layers: Mapping[str, Mapping[str, Leaf]]) -> Callable[[IO[bytes]], None]:
    from ckpttool.formats import keras_legacy

    def write(stream: IO[bytes]) -> None:
        stream.write(keras_legacy.data(layers))

    return write
