"""Whose orientation the arrays of a tree have: PyTorch's weight [out, in] or TensorFlow's kernel [in, out].

A container such as npz, safetensors or a pickle belongs to no framework. The names of a module's tensors
decide, then what the file records of its writer, never the container. A bias shows which axis is the output.

Arrays that only numbers name (`pickle.dump(model.get_weights())`, `np.savez(*arrays)`) are rows. A row is
read as layers where all of it fits: each matrix, then its bias, each layer taking what an earlier returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError, some
from ckpttool.leaf import Leaf, Path, key
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
# A layer and its tensor in one word: `fc1_weight`.
_JOINED = re.compile(r"(.+)_(weights?|kernel|bias(?:es)?|[wb])")
_BIASES = {"weight": "bias", "w": "b", "weights": "biases"}
# The last step of a name that is a number only, or a word and a number.
_NUMBERED = re.compile(r"(.*?)_?(\d{1,6})", re.ASCII)
_KERNEL: Mapping[str, str] = {"torch": "weight", "tensorflow": "kernel"}
# The vectors of a norm in the order of Keras's get_weights, by their number; PyTorch has no statistics among
# its parameters.
_NORM: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "torch": {2: ("weight", "bias")},
    "tensorflow": {2: ("gamma", "beta"), 4: ("gamma", "beta", "moving_mean", "moving_variance")},
}
_TITLES: Mapping[str, str] = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
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
        joined = None if _TORCH.fullmatch(name) or _TENSORFLOW.fullmatch(name) else _JOINED.fullmatch(name)
        if joined:
            module, name = [*module, joined[1]], joined[2]
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
    if not any(said):
        return _of_rows(tree, recorded, target)
    if bool(said.torch) != bool(said.tensorflow) and not said.unclear:
        names: Framework = "torch" if said.torch else "tensorflow"
        # `weight` is TensorFlow's word too where the file says so.
        return recorded if recorded == "tensorflow" else names
    if recorded is not None and (not said.unclear or recorded == target):
        return recorded
    raise _undecided("nothing shows whether matrices are [out, in] (PyTorch) or [in, out] (TensorFlow)", said)


class Rows(NamedTuple):
    """A tree whose arrays without names are layers, where each of its leaves was, and what was assumed."""

    tree: Tree
    sources: Mapping[Path, Path]
    assumed: tuple[str, ...] = ()


def with_layers(tree: Tree, framework: str, *, stated: bool = False) -> Rows:
    """Return the tree with its rows as layers by number; unchanged where it has none.

    With `stated`, a user says whose orientation the arrays have. Raise MappingError where rows look like a
    network and have no reading as the framework's layers.
    """
    same = Rows(tree, {path: path for path in tree})
    found = [] if any(evidence(tree)) else [row for row in _rows(tree) if _is_network(row)]
    if not found:
        return same
    layers = _reading(found, framework, stated=stated)
    if layers is None:
        raise MappingError(
            f"arrays without names, whose shapes are not those of {_TITLES[framework]} layers in a row",
            path=some([tree.names[path] for row in found for path, _ in row], _SHOWN),
            hint="--to npz copies the arrays as they are; a file with names (a state_dict) converts",
        )
    places: dict[Path, Path] = {}
    dot = "." if framework == "torch" else "/"
    for row, each in zip(found, layers, strict=True):
        paths = iter(row)
        for number, names in enumerate(each):
            for name in names:
                path, _ = next(paths)
                # A list of one layer is the layer.
                own = name if len(each) == 1 and len(path) > 1 else f"{number}{dot}{name}"
                places[path] = (*path[:-1], key(own))
    if len(set(places.values())) < len(places):
        return same
    leaves = {places[path]: replace(leaf, role="parameter") for row in found for path, leaf in row}
    inside = {path[:-1] for path in places}
    shown = some([tree.names[path] for row in found for path, _ in row], _SHOWN)
    what = f"{shown}: arrays without names, read as layers in this order, each matrix before its bias"
    return Rows(
        Tree(
            {**leaves, **{path: leaf for path, leaf in tree.items() if path not in places}},
            {},
            {path: held for path, held in tree.containers.items() if path not in inside},
        ),
        {places.get(path, path): path for path in tree},
        (what,),
    )


_Row = list[tuple[Path, Leaf]]


def _rows(tree: Tree) -> list[_Row]:
    """Return the floating point arrays that only numbers tell apart, in the order of their numbers."""
    found: dict[tuple[Path, str], list[tuple[int, Path, Leaf]]] = {}
    for path, leaf in tree.tensors():
        last = _NUMBERED.fullmatch(str(path[-1].value)) if path else None
        if last is None or leaf.role in ("slot", "replay") or "float" not in leaf.dtype:
            continue
        found.setdefault((path[:-1], last[1]), []).append((int(last[2]), path, leaf))
    return [
        [(path, leaf) for _, path, leaf in sorted(row, key=lambda each: each[0])] for row in found.values()
    ]


def _is_network(row: _Row) -> bool:
    """Whether arrays look like weights: a matrix before a vector of its length, or matrices in a chain."""
    shapes = [leaf.shape for _, leaf in row]
    for one, other in pairwise(shapes):
        if len(one) < 2 or min(one) == 0:
            continue
        if (len(other) == 1 and other[0] in one) or (len(other) == len(one) > 2 and one != other):
            return True
        if len(one) == len(other) == 2 and (one[-1] == other[0] or one[0] == other[-1]):
            return True
    return False


def _of_rows(tree: Tree, recorded: Framework | None, target: str | None) -> Framework | None:
    """Return whose orientation rows of arrays have, by what a file records or by the only reading.

    Raise MappingError where both readings are possible, or none.
    """
    rows = [row for row in _rows(tree) if _is_network(row)]
    if not rows:
        return None
    if recorded is not None and recorded == target:
        return recorded
    able: list[Framework] = [
        framework for framework in WORDS.values() if _reading(rows, framework) is not None
    ]
    if len(able) == 1 and recorded in (None, able[0]):
        return able[0]
    said = Evidence(
        unclear=tuple(tree.names[path] for row in rows for path, leaf in row if len(leaf.shape) > 1)
    )
    raise _undecided(
        "nothing shows whether arrays without names are [out, in] (PyTorch) or [in, out] (TensorFlow)",
        said,
    )


def _reading(
    rows: Sequence[_Row], framework: str, *, stated: bool = False
) -> list[list[tuple[str, ...]]] | None:
    """Return the names of every layer's arrays, row by row, in a framework's axes; None if they do not fit.

    Unless the orientation is stated, every layer behind the first must take what an earlier one returns: in
    each row, or through all of them.
    """
    shapes = [[leaf.shape for _, leaf in row] for row in rows]
    each = [_layers(row, framework) for row in shapes]
    found = [[layer.names for layer in row] for row in each if row is not None]
    if len(found) < len(rows):
        return None
    chains = [[layer for layer in row or () if layer.returns] for row in each]
    whole = [layer for row in chains for layer in row]
    chained = all(len(row) > 1 and _is_chain(row) for row in chains) or (len(whole) > 1 and _is_chain(whole))
    return found if stated or chained else None


class _Layer(NamedTuple):
    """A layer's arrays by name, how many features it takes and returns, and whether it is a convolution."""

    names: tuple[str, ...]
    takes: int = 0
    returns: int = 0
    image: bool = False


def _is_chain(layers: Sequence[_Layer]) -> bool:
    """Whether each layer takes what an earlier one returns (flattened, behind a convolution)."""
    return all(
        any(
            layer.takes == before.returns
            or (before.image and not layer.image and layer.takes % before.returns == 0)
            for before in layers[:number]
        )
        for number, layer in enumerate(layers)
        if number
    )


def _layers(shapes: Sequence[Shape], framework: str) -> list[_Layer] | None:
    """Return the layers that arrays in a row are, in a framework's axes; None where one has no place."""
    found: list[_Layer] = []
    at = 0
    while at < len(shapes):
        layer = _vectors(shapes[at:], found, framework) if len(shapes[at]) == 1 else None
        layer = layer or _recurrent(shapes[at:], framework) or _matrix(shapes[at:], framework)
        if layer is None:
            return None
        found.append(layer)
        at += len(layer.names)
    return found


def _vectors(shapes: Sequence[Shape], before: Sequence[_Layer], framework: str) -> _Layer | None:
    """Return the norm that the first arrays are, of what the layer before them returns."""
    returned = next((layer.returns for layer in reversed(before) if layer.returns), 0)
    for many, names in sorted(_NORM[framework].items(), reverse=True):
        if list(shapes[:many]) == [(returned,)] * many:
            return _Layer(names)
    return None


def _recurrent(shapes: Sequence[Shape], framework: str) -> _Layer | None:
    """Return the LSTM or GRU that the first arrays are."""
    if len(shapes) < 2 or not len(shapes[0]) == len(shapes[1]) == 2:
        return None
    turn = -1 if framework == "torch" else 1
    (takes, gates), (units, others) = (shape[::turn] for shape in shapes[:2])
    if gates != others or units == 0 or gates not in (3 * units, 4 * units):
        return None
    biases = [shape for shape in shapes[2:4] if shape == (gates,)]
    if framework == "torch":
        names: tuple[str, ...] = ("weight_ih_l0", "weight_hh_l0")
        more: tuple[str, ...] = ("bias_ih_l0", "bias_hh_l0") if len(biases) == 2 else ()
    else:
        names = ("kernel", "recurrent_kernel")
        more = ("bias",) if shapes[2:3] in ([(gates,)], [(2, gates)]) else ()
    return _Layer((*names, *more), takes, units)


def _matrix(shapes: Sequence[Shape], framework: str) -> _Layer | None:
    """Return the dense layer or convolution that the first arrays are."""
    shape = shapes[0]
    if not 2 <= len(shape) <= 5 or 0 in shape:
        return None
    takes, returns = (shape[1], shape[0]) if framework == "torch" else (shape[-2], shape[-1])
    has_bias = list(shapes[1:2]) == [(returns,)] and not _is_norm(shapes[1:], framework)
    names: tuple[str, ...] = (_KERNEL[framework], "bias") if has_bias else (_KERNEL[framework],)
    return _Layer(names, takes, returns, len(shape) > 2)


def _is_norm(shapes: Sequence[Shape], framework: str) -> bool:
    """Whether the vectors that come next are those of a norm without a bias before them."""
    count = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))
    return count in _NORM[framework]


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
        if not any(names):
            try:
                return decided(tree, None, target) or native
            except MappingError as error:
                raise error.located(file=checkpoint.path) from None
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
