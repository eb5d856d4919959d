"""Whose orientation the arrays of a tree have: PyTorch's weight [out, in] or TensorFlow's kernel [in, out].

A container such as npz, safetensors or a pickle belongs to no framework. The names of a module's tensors
decide, then what the file records of its writer, never the container. A bias shows which axis is the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError, some
from ckpttool.leaf import Leaf
from ckpttool.source import Shape
from ckpttool.tree import Tree

Framework = Literal["torch", "tensorflow"]
# Words of `--from`.
WORDS: Mapping[str, Framework] = {"torch": "torch", "tf": "tensorflow"}
# What writers of safetensors record in the metadata `format`; flax and haiku have kernels [in, out].
_WRITERS: Mapping[str, Framework] = {
    "pt": "torch",
    "torch": "torch",
    "mlx": "torch",
    "tf": "tensorflow",
    "flax": "tensorflow",
    "jax": "tensorflow",
}
# Formats that hold arrays of any program.
NEUTRAL = frozenset(("npz", "pickle", "safetensors", "sharded", "rllib"))
# Names of tensors that only one framework's layers have. `weight` alone is torch's word, and some others'.
_TORCH = re.compile(
    r"in_proj_(?:weight|bias)|(?:weight|bias)_(?:ih|hh)_l\d+(?:_reverse)?|running_(?:mean|var)|num_batches_tracked"
    r"|weight_[gv]"
)
_TENSORFLOW = re.compile(
    r"(?:(?:depthwise|pointwise|recurrent)_)?kernel|moving_(?:mean|variance)|embeddings|biases"
)
# Words of TensorFlow, flax and haiku that models of torch use as well.
_WEAK = re.compile(r"gamma|embedding|scale")
_MATRIX = re.compile(r"[wW](?:\d+|_\w+)?|weights?_?\d+|theta\d*|matrix")
_BIASES = {"weight": "bias", "w": "b", "weights": "biases"}
_SHOWN = 3


class Evidence(NamedTuple):
    """The names of tensors that speak for each framework, and those that look like layers of either."""

    torch: tuple[str, ...] = ()
    tensorflow: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


def evidence(tree: Tree) -> Evidence:
    """Return what the names and shapes of a tree's tensors say of their orientation."""
    strong: tuple[list[str], list[str], list[str]] = ([], [], [])
    weak: list[str] = []
    for module in _modules(tree):
        shapes = {name: leaf.shape for name, (_, leaf) in module.items()}
        for name, (shown, _) in module.items():
            side = _side(name, shapes)
            if side is not None:
                strong[side].append(shown)
            elif _WEAK.fullmatch(name):
                weak.append(shown)
    if not strong[0]:
        strong[1].extend(weak)
    return Evidence(*map(tuple, strong))


def _side(name: str, shapes: Mapping[str, Shape]) -> int | None:
    """Return 0 for torch, 1 for TensorFlow, 2 for what may be either, None for what says nothing."""
    if _TORCH.fullmatch(name):
        return 0
    if _TENSORFLOW.fullmatch(name):
        return 1
    shape = shapes[name]
    if len(shape) < 2:
        return None
    if name not in _BIASES:
        return 2 if _MATRIX.fullmatch(name) else None
    usual, bias = int(name != "weight"), shapes.get(_BIASES[name], ())
    if len(bias) != 1 or shape[0] == shape[-1]:
        return usual
    # A transposed convolution of torch has its outputs second.
    outputs = shape[-1:] if usual else shape[:1] if len(shape) == 2 else shape[:2]
    return usual if bias[0] in outputs else 2


def _modules(tree: Tree) -> Iterator[dict[str, tuple[str, Leaf]]]:
    """Go through the modules of a tree: their floating point tensors, with whole names, by own name."""
    found: dict[tuple[str, ...], dict[str, tuple[str, Leaf]]] = {}
    for path, leaf in tree.tensors():
        if leaf.role in ("slot", "replay") or "float" not in leaf.dtype:
            continue
        shown = tree.names[path]
        *module, name = re.split(r"[/.]", shown.removesuffix(":0"))
        found.setdefault(tuple(module), {})[name.lstrip("_")] = shown, leaf
    yield from found.values()


def decided(tree: Tree, writer: str | None = None, target: str | None = None) -> Framework | None:
    """Return whose orientation the arrays have; None where nothing in the tree looks like a layer.

    `writer` is what the file records of the framework that it was written for, which is enough for a `target`
    of this framework. Raise MappingError where layers are there and the evidence is contradictory or missing.
    """
    said = evidence(tree)
    recorded = _WRITERS.get(writer or "")
    if writer == "mlx" and any(len(leaf.shape) > 2 for _, leaf in tree.tensors()):
        raise _undecided("MLX orders the axes of convolutions otherwise", said)
    if bool(said.torch) != bool(said.tensorflow) and not said.unclear:
        names: Framework = "torch" if said.torch else "tensorflow"
        # `weight` is TensorFlow's word too where the file says so.
        return recorded if recorded == "tensorflow" else names
    if not any(said):
        return None
    if recorded is not None and (not said.unclear or recorded == target):
        return recorded
    raise _undecided("nothing shows whether matrices are [out, in] (PyTorch) or [in, out] (TensorFlow)", said)


def of_checkpoint(
    checkpoint: Checkpoint, tree: Tree, native: str, said: str | None = None, target: str | None = None
) -> str:
    """Return the framework whose orientation a checkpoint's tree has: "torch", "tensorflow" or "numpy".

    `native` is the framework of its format, `said` what a user states (a word of WORDS), `target` the
    framework of what it becomes. The evidence decides for formats that hold arrays of any program, and for
    HDF5 files that no Keras wrote; arrays that look like no layers are of the format's own. Raise
    MappingError as `decided` does.
    """
    if said is not None:
        if said not in WORDS:
            raise UsageError("--from takes torch or tf", found=said)
        return WORDS[said]
    if checkpoint.format == "keras_h5" and checkpoint.writer is None:
        names = evidence(tree)
        return "torch" if names.torch and not (names.tensorflow or names.unclear) else native
    if checkpoint.format not in NEUTRAL:
        return native
    metadata = checkpoint.details.get("metadata")
    writer = metadata.get("format") if isinstance(metadata, dict) else None
    try:
        found = decided(tree, writer if isinstance(writer, str) else None, target)
    except MappingError as error:
        raise error.located(file=checkpoint.path) from None
    return found or native


def _undecided(what: str, said: Evidence) -> MappingError:
    return MappingError(
        what,
        path=some(said.unclear or (*said.torch[:2], *said.tensorflow[:2]), _SHOWN),
        hint="--from torch or --from tf states it",
    )
