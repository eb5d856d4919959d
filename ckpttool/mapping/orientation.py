"""Orientation of a tree's arrays: PyTorch's weight [out, in] or TensorFlow's kernel [in, out].

A container such as npz, safetensors or a pickle belongs to no framework. The names of a module's tensors
decide, then the file's record of its writer, never the container. A bias shows the output axis.

Arrays named only by numbers (`pickle.dump(model.get_weights())`, `np.savez(*arrays)`) are rows. A row is
read as layers if all of it fits: each matrix, then its bias, with each layer's input being the output of an
earlier one. Names and shapes are also the evidence for the kind of a layer that its tensors leave open.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from ckpttool.core import deferred
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError, UsageError, abbreviate_list
from ckpttool.core.kinds import list_kinds
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, key
from ckpttool.mapping.layers import RECURRENT_KIND_NAMES, Layer, canonical_tensors
from ckpttool.mapping.rules import KEEP, Plan, Reshape, Rule, chain_rules, relocate_sources

_SHOWN = 3
Framework = Literal["torch", "tensorflow"]
# Values of `--from`.
WORDS: Mapping[str, Framework] = {"torch": "torch", "tf": "tensorflow"}
# Values of `format` in safetensors metadata; flax and haiku have kernels [in, out].
_WRITERS: Mapping[str, Framework] = {
    "pt": "torch",
    "torch": "torch",
    "mlx": "torch",
    "tf": "tensorflow",
    "flax": "tensorflow",
    "jax": "tensorflow",
}
# Formats that can contain arrays from any program.
NEUTRAL = frozenset(("npz", "pickle", "safetensors", "sharded", "rllib"))
# Tensor names used by only one framework's layers. `weight` alone is used by torch and some others.
_TORCH = deferred.compile(
    r"in_proj_(?:weight|bias)|(?:weight|bias)_(?:ih|hh)_l\d+(?:_reverse)?|running_(?:mean|var)|num_batches_tracked"
    r"|weight_[gv]"
)
_TENSORFLOW = deferred.compile(
    r"(?:(?:depthwise|pointwise|recurrent)_)?kernel|moving_(?:mean|variance)|embeddings|biases"
)
# Words of TensorFlow, flax and haiku that torch models also use.
_WEAK = deferred.compile(r"gamma|embedding|scale")
_MATRIX = deferred.compile(r"[wW](?:\d+|_\w+)?|weights?_?\d+|theta\d*|matrix")
# A layer and its tensor in one word: `fc1_weight`.
_JOINED = deferred.compile(r"(.+)_(weights?|kernel|bias(?:es)?|[wb])")
_BIASES = {"weight": "bias", "w": "b", "weights": "biases"}
# The last step of a name if it is only a number, or a word and a number.
_NUMBERED = deferred.compile(r"(.*?)_?(\d{1,6})", re.ASCII)
# A matrix or a bias in one word with its layer, as programs with tf.Variable name them: `l1_w`, `1w`, `W1`.
_WORDS = r"(?P<matrix>[wW](?:eights?)?|kernel)|(?P<bias>[bB](?:ias(?:es)?)?)"
_AFTER = deferred.compile(rf"(?P<layer>[0-9]{{1,4}}|.+(?=_))_?(?:{_WORDS})")
_BEFORE = deferred.compile(rf"(?:{_WORDS})(?:_?(?P<number>\d{{1,4}})|_(?P<layer>\w+))?", re.ASCII)
_KERNEL: Mapping[str, str] = {"torch": "weight", "tensorflow": "kernel"}
# The vectors of a norm in the order of Keras's get_weights, by count; PyTorch has no statistics among its
# parameters.
_NORM: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "torch": {2: ("weight", "bias")},
    "tensorflow": {2: ("gamma", "beta"), 4: ("gamma", "beta", "moving_mean", "moving_variance")},
}
_TITLES: Mapping[str, str] = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
# Between the steps of a path in one name.
_DOTS: Mapping[str, str] = {"torch": ".", "tensorflow": "/"}


class OrientationEvidence(NamedTuple):
    """Tensor names that are evidence for each framework, and those used by layers of either."""

    torch: tuple[str, ...] = ()
    tensorflow: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


def gather_evidence(tree: Tree) -> OrientationEvidence:
    """Return the evidence of orientation in the names and shapes of a tree's tensors."""
    strong: tuple[list[str], list[str], list[str]] = ([], [], [])
    weak: list[str] = []
    for module in _iter_modules(tree):
        shapes = {name: leaf.shape for name, (_, leaf) in module.items()}
        for name, (shown, _) in module.items():
            side = _classify_names(name, shapes)
            if side is not None:
                strong[side].append(shown)
            elif _WEAK.fullmatch(name):
                weak.append(shown)
    if not strong[0]:
        strong[1].extend(weak)
    return OrientationEvidence(*map(tuple, strong))


def _classify_names(name: str, shapes: Mapping[str, Shape]) -> int | None:
    """Return 0 for torch, 1 for TensorFlow, 2 for either, None for no evidence."""
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
    # The output axis of a transposed torch convolution is the second.
    outputs = shape[-1:] if usual else shape[:1] if len(shape) == 2 else shape[:2]
    return usual if bias[0] in outputs else 2


def _iter_modules(tree: Tree) -> Iterator[dict[str, tuple[str, Leaf]]]:
    """Yield the modules of a tree: floating-point tensors with their full names, by own name."""
    modules: dict[tuple[str, ...], dict[str, tuple[str, Leaf]]] = {}
    for path, leaf in tree.tensors():
        if leaf.role in ("slot", "replay") or "float" not in leaf.dtype:
            continue
        shown = tree.names[path]
        *module, name = re.split(r"[/.]", shown.removesuffix(":0"))
        joined = None if _TORCH.fullmatch(name) or _TENSORFLOW.fullmatch(name) else _JOINED.fullmatch(name)
        if joined:
            module, name = [*module, joined[1]], joined[2]
        modules.setdefault(tuple(module), {})[name.lstrip("_")] = shown, leaf
    yield from modules.values()


def infer_orientation(tree: Tree, writer: str | None = None, target: str | None = None) -> Framework | None:
    """Return the framework whose orientation the arrays have; None if nothing in the tree looks like a layer.

    `writer` is the framework recorded in the file, which is sufficient for a `target` of that
    framework. Raise MappingError if there are layers and the evidence is contradictory or missing.
    """
    evidence = gather_evidence(tree)
    recorded = _WRITERS.get(writer or "")
    if writer == "mlx" and any(len(leaf.shape) > 2 for _, leaf in tree.tensors()):
        raise _undecided_error("MLX orders the axes of convolutions differently", evidence)
    if not any(evidence):
        return _infer_row_orientation(tree, recorded, target)
    if bool(evidence.torch) != bool(evidence.tensorflow) and not evidence.unclear:
        names: Framework = "torch" if evidence.torch else "tensorflow"
        # `weight` is also TensorFlow's name if the file records TensorFlow.
        return recorded if recorded == "tensorflow" else names
    if recorded is not None and (not evidence.unclear or recorded == target):
        return recorded
    raise _undecided_error(
        "cannot infer whether matrices are [out, in] (PyTorch) or [in, out] (TensorFlow)", evidence
    )


class LayeredTree(NamedTuple):
    """A tree whose arrays are layers, the original paths of its leaves, and the assumptions.

    `rules` are the first steps from an original leaf, e.g. a bias [1, n], to the tree's.
    """

    tree: Tree
    sources: Mapping[Path, Path]
    assumed: tuple[str, ...] = ()
    rules: Mapping[Path, Rule] = MappingProxyType({})

    def plan(self, plan: Plan) -> Plan:
        """Return a plan for this tree as a plan for the original one."""
        moves = (
            replace(move, rule=chain_rules(self.rules.get(move.source, KEEP), move.rule))
            for move in plan.moves
        )
        first = replace(plan, moves=tuple(moves), assumed=(*self.assumed, *plan.assumed))
        return relocate_sources(first, self.sources)


def group_unnamed_arrays(tree: Tree, framework: str, *, stated: bool = False) -> LayeredTree:
    """Return the tree with its rows as numbered layers; unchanged if it has none.

    With `stated`, the orientation comes from the user. Raise MappingError if rows look like a network
    but cannot be read as the framework's layers.
    """
    same = LayeredTree(tree, {path: path for path in tree})
    pairs = _find_pairs(tree) if framework == "tensorflow" else []
    if pairs:
        return _group_pairs(tree, pairs)
    lists = _find_rows(tree)
    named = [row for row in _join_lists(tree, lists) if framework == "tensorflow" and _are_named(row)]
    if named:
        return _group_named(tree, named)
    unnamed = [] if any(gather_evidence(tree)) else [row for row in lists if _is_network(row)]
    if not unnamed:
        return same
    layers = _name_arrays(unnamed, framework, stated=stated)
    if layers is None and all(_is_of_object(leaf) for row in unnamed for _, leaf in row):
        return same
    if layers is None:
        raise MappingError(
            f"unnamed arrays, whose shapes do not match a sequence of {_TITLES[framework]} layers",
            path=abbreviate_list([tree.names[path] for row in unnamed for path, _ in row], _SHOWN),
            hint="use --to npz to copy the arrays unchanged, or convert a file with names (a state_dict)",
        )
    places = {
        path: (*path[:-1], key(own))
        for row, layer in zip(unnamed, layers, strict=True)
        for (path, _), own in zip(row, layer, strict=True)
    }
    if len(set(places.values())) < len(places):
        return same
    inside = {path[:-1] for path in places}
    first = {path: replace(leaf, role="parameter") for row in unnamed for path, leaf in row}
    ordered = Tree(
        {**first, **{path: leaf for path, leaf in tree.items() if path not in places}},
        {},
        {path: container for path, container in tree.containers.items() if path not in inside},
    )
    shown = abbreviate_list([tree.names[path] for row in unnamed for path, _ in row], _SHOWN)
    what = f"{shown}: unnamed arrays, read as layers in this order, each matrix before its bias"
    many = max(_count_networks(layer, framework) for layer in layers)
    if many > 1:
        what += f"; the shapes start anew, so they are {many} networks"
    rows = {path for row in unnamed for path in _row_biases(row)}
    return _rename(ordered, places, rows)._replace(assumed=(what,))


def _is_of_object(leaf: Leaf) -> bool:
    """Return whether Keras 3 saved the array as one of the variables of an object, e.g. a custom layer."""
    return "/vars/" in leaf.key


# The variables of Keras's layers that follow another one of the same layer, which they need.
_FOLLOWS: Mapping[str, frozenset[str]] = {
    "bias": frozenset(("kernel", "depthwise_kernel")),
    "recurrent_kernel": frozenset(("kernel",)),
    "pointwise_kernel": frozenset(("depthwise_kernel",)),
    "beta": frozenset(("gamma",)),
    "moving_mean": frozenset(("gamma", "beta")),
    "moving_variance": frozenset(("moving_mean",)),
}
_FIRST = frozenset(("kernel", "depthwise_kernel", "gamma", "embeddings"))


def _own_name(leaf: Leaf) -> str:
    return (leaf.name or "").removesuffix(":0").rpartition("/")[2]


def _are_named(row: _Row) -> bool:
    """Return whether a list's variables all have recorded names, and some those of Keras's layers."""
    names = [_own_name(leaf) for _, leaf in row]
    return all(names) and not _FIRST.isdisjoint(names)


def _group_named(tree: Tree, rows: Sequence[_Row]) -> LayeredTree:
    """Return the tree with the variables of lists as numbered layers, by the names of the variables.

    A model lists its variables layer by layer (keras/src/layers/layer.py, Layer.variables).
    """
    places: dict[Path, Path] = {}
    for row in rows:
        layers: list[list[tuple[Path, Leaf]]] = []
        for path, leaf in row:
            own = _own_name(leaf)
            names = {_own_name(layer) for _, layer in layers[-1]} if layers else set()
            if own in names or names.isdisjoint(_FOLLOWS.get(own, ())):
                layers.append([])
            layers[-1].append((path, leaf))
        for name, layer in zip(_number_named(layers), layers, strict=True):
            for path, leaf in layer:
                above = path[:-2] if _is_below_its_name(path, leaf) else path[:-1]
                places[path] = (*above, key(f"{name}/{_own_name(leaf)}"))
    shown = abbreviate_list([tree.names[path] for row in rows for path, _ in row], _SHOWN)
    what = f"{shown}: a list of variables, read as layers in this order by the variables' names"
    return _rename(tree, places, set())._replace(assumed=(what,))


def _is_below_its_name(path: Path, leaf: Leaf) -> bool:
    return len(path) > 1 and str(path[-2].value) == _own_name(leaf)


def _join_lists(tree: Tree, rows: Sequence[_Row]) -> Iterator[_Row]:
    """Yield the lists, also those of members below their names (`kernel/0`, `bias/1`, `recurrent_kernel`)."""
    parents: set[Path] = set()
    for row in rows:
        if all(_is_below_its_name(*member) for member in row):
            parents.add(row[0][0][:-2])
        else:
            yield row
    for parent in sorted(parents):
        yield [
            (path, leaf)
            for path, leaf in tree.tensors()
            if (path[:-2] == parent and _is_below_its_name(path, leaf))
            or (path[:-1] == parent and str(path[-1].value) == _own_name(leaf))
        ]


# The parts of an attention in Keras's order (keras/src/layers/attention/multi_head_attention.py).
_PROJECTIONS = ("query", "key", "value", "attention_output")


def _number_named(layers: Sequence[_Row]) -> list[str]:
    """Return the number of each layer in a list; the four projections of an attention share one."""
    kernels = [layer[0][1].shape if _own_name(layer[0][1]) == "kernel" else () for layer in layers]
    names: list[str] = []
    while (at := len(names)) < len(layers):
        number, parts = len({name.partition("/")[0] for name in names}), kernels[at : at + 4]
        if len(parts) == len(_PROJECTIONS) and all(len(shape) == 3 for shape in parts):
            (_, *query), (_, *key_), (_, *value), (*output, _) = parts
            # Biases of the inner projections have the axes of the heads, unlike those of convolutions.
            biases = [leaf.shape for layer in layers[at : at + 3] for _, leaf in layer[1:]]
            if query == key_ and value == output and biases in ([], [(*query,), (*key_,), (*value,)]):
                names += [f"{number}/{part}" for part in _PROJECTIONS]
                continue
        names.append(str(number))
    return names


def _count_networks(names: Sequence[str], framework: str) -> int:
    """Return how many networks the names of `_name_arrays` number."""
    dot = _DOTS[framework]
    return len({name.split(dot)[0] for name in names if name.count(dot) > 1}) or 1


class _Pair(NamedTuple):
    """A matrix and its bias, and the last step of their layer's path."""

    layer: str
    matrix: Path
    bias: Path


def _find_pairs(tree: Tree) -> list[_Pair]:
    """Return the layers of matrices [in, out] and biases that their names pair.

    A bias has as many numbers as the matrix has outputs, as a vector or as a row [1, out].
    """
    groups: dict[tuple[Path, str], dict[str, dict[str, Path]]] = {}
    for path, leaf in tree.tensors():
        if not path or leaf.role in ("slot", "replay") or "float" not in leaf.dtype:
            continue
        above, _, name = str(path[-1].value).removesuffix(":0").rpartition("/")
        match = _AFTER.fullmatch(name) or _BEFORE.fullmatch(name)
        if match is not None:
            words = match.groupdict()
            own = words["layer"] or words.get("number") or ""
            own = f"layer{own}" if own.isdigit() else own
            kind = "matrix" if words["matrix"] else "bias"
            groups.setdefault((path[:-1], above), {}).setdefault(own, {})[kind] = path
    pairs: list[_Pair] = []
    for (_, above), named in groups.items():
        layers = {own: layer for own, layer in named.items() if len(layer) == 2 and _is_pair(tree, layer)}
        if len(layers) < len(named) and "" in layers:
            continue  # e.g. a cell with a recurrent kernel
        for own, layer in layers.items():
            # In `l1/w1`, the module is the layer; `w` beside `w_1` is the first of several.
            single = len(layers) == 1 and (above or len(layer["matrix"]) > 1)
            name = "" if single else own or ("layer0" if len(layers) > 1 else "")
            # A layer of a known kind needs no names.
            if own or name or len(_shape(tree[layer["bias"]])) > 1:
                title = "/".join(part for part in (above, name) if part)
                pairs.append(_Pair(title, layer["matrix"], layer["bias"]))
    return pairs


def _shape(leaf: Leaf | ValueLeaf) -> Shape:
    return leaf.shape if isinstance(leaf, Leaf) else ()


def _is_pair(tree: Tree, paths: Mapping[str, Path]) -> bool:
    matrix, bias = _shape(tree[paths["matrix"]]), _shape(tree[paths["bias"]])
    return len(matrix) > 1 and bias in (matrix[-1:], (1, *matrix[-1:]))


def _group_pairs(tree: Tree, pairs: Sequence[_Pair]) -> LayeredTree:
    """Return the tree with kernels and biases of layers, and the moments of optimizers in their shapes."""
    places: dict[Path, Path] = {}
    for pair in pairs:
        for path, stored in ((pair.matrix, "kernel"), (pair.bias, "bias")):
            places[path] = (*path[:-1], key(f"{pair.layer}/{stored}" if pair.layer else stored))
    return _rename(tree, places, {pair.bias for pair in pairs if len(_shape(tree[pair.bias])) == 2})


def _rename(tree: Tree, places: dict[Path, Path], rows: set[Path]) -> LayeredTree:
    """Return the tree with leaves at their places, and the biases of `rows`, [1, n], as vectors.

    The moments of an optimizer follow their parameters.
    """
    rules: dict[Path, Rule] = {}
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        owner = leaf.of if isinstance(leaf, Leaf) else None
        if owner in places and path[: len(owner)] == owner:
            places[path] = (*places[owner], *path[len(owner) :])
        target = places.get(path, path)
        if isinstance(leaf, Leaf) and {path, owner} & rows and len(leaf.shape) == 2:
            rules[target] = Reshape(leaf.shape[1:])
        renamed = _apply(rules.get(target), leaf) if isinstance(leaf, Leaf) else leaf
        if isinstance(renamed, Leaf) and owner is not None:
            renamed = replace(renamed, of=places.get(owner, owner))
        leaves[target] = renamed
    return LayeredTree(
        Tree(leaves, {}, tree.containers),
        {places.get(path, path): path for path in tree},
        rules=rules,
    )


def _apply(rule: Rule | None, leaf: Leaf) -> Leaf:
    result = leaf if rule is None else rule.leaf(leaf)
    assert isinstance(result, Leaf)  # noqa: S101 - of a leaf
    return result


_Row = list[tuple[Path, Leaf]]


def _find_rows(tree: Tree) -> list[_Row]:
    """Return the floating-point arrays distinguished only by numbers, in the order of their numbers."""
    rows: dict[tuple[Path, str], list[tuple[int, Path, Leaf]]] = {}
    first: dict[tuple[Path, str], tuple[Path, Leaf]] = {}
    for path, leaf in tree.tensors():
        last = _NUMBERED.fullmatch(str(path[-1].value)) if path else None
        if leaf.role in ("slot", "replay") or "float" not in leaf.dtype:
            continue
        if last is not None:
            rows.setdefault((path[:-1], last[1]), []).append((int(last[2]), path, leaf))
        elif path:
            first[path[:-1], str(path[-1].value)] = path, leaf
    for name, row in rows.items():
        # TensorFlow names variables without a name `Variable`, `Variable_1`, ...
        if name in first and min(row, key=lambda item: item[0])[0] == 1:
            row.append((0, *first[name]))
    return [
        [(path, leaf) for _, path, leaf in sorted(row, key=lambda item: item[0])] for row in rows.values()
    ]


def _row_biases(row: _Row) -> list[Path]:
    """Return the biases [1, n], if each matrix of the row has such a bias after it."""
    shapes = [leaf.shape for _, leaf in row]
    rows = list(zip(shapes[::2], shapes[1::2], strict=False))
    if len(shapes) % 2 or not all(len(m) > 1 and bias == (1, m[-1]) for m, bias in rows):
        return []
    return [path for path, _ in row[1::2]]


def _is_network(row: _Row) -> bool:
    """Return whether arrays look like weights: a matrix before its vector, or chained matrices."""
    shapes = [leaf.shape for _, leaf in row]
    for one, other in pairwise(shapes):
        if len(one) < 2 or min(one) == 0:
            continue
        if (len(other) == 1 and other[0] in one) or (len(other) == len(one) > 2 and one != other):
            return True
        if len(one) == len(other) == 2 and (one[-1] == other[0] or one[0] == other[-1]):
            return True
    return False


def _infer_row_orientation(tree: Tree, recorded: Framework | None, target: str | None) -> Framework | None:
    """Return the orientation of rows of arrays, from a file's record or because only one fits.

    Raise MappingError if both orientations fit, or neither.
    """
    rows = [row for row in _find_rows(tree) if _is_network(row)]
    if not rows:
        return None
    if recorded is not None and recorded == target:
        return recorded
    able: list[Framework] = [
        framework for framework in WORDS.values() if _name_arrays(rows, framework) is not None
    ]
    if len(able) == 1 and recorded in (None, able[0]):
        return able[0]
    evidence = OrientationEvidence(
        unclear=tuple(tree.names[path] for row in rows for path, leaf in row if len(leaf.shape) > 1)
    )
    raise _undecided_error(
        "cannot infer whether unnamed arrays are [out, in] (PyTorch) or [in, out] (TensorFlow)",
        evidence,
    )


def _name_arrays(rows: Sequence[_Row], framework: str, *, stated: bool = False) -> list[list[str]] | None:
    """Return the last steps of every row's paths as layers, in a framework's axes; None if they do not fit.

    Unless the orientation is stated, every layer of several must have a bias, or its input match the output
    of an earlier one: within each row, or across all rows.
    """
    flat = [_row_biases(row) if framework == "tensorflow" else {} for row in rows]
    shapes = [
        [leaf.shape[-1:] if path in rules else leaf.shape for path, leaf in row]
        for row, rules in zip(rows, flat, strict=True)
    ]
    candidates = [_recognize_layers(row, framework) for row in shapes]
    if None in candidates:
        return None
    chains = [[layer for layer in row or () if layer.returns] for row in candidates]
    whole = [layer for row in chains for layer in row]
    chained = all(len(row) > 1 and _is_chain(row) for row in chains) or (len(whole) > 1 and _is_chain(whole))
    paired = len(whole) > 1 and all(len(layer.names) > 1 for layer in whole)
    if not (stated or chained or paired):
        return None
    dot = _DOTS[framework]
    return [
        _number(layers or [], dot, alone=len(row[0][0]) > 1, several=not chained)
        for row, layers in zip(rows, candidates, strict=True)
    ]


def _number(layers: Sequence[_ArrayLayer], dot: str, *, alone: bool, several: bool) -> list[str]:
    """Return the names of layers' arrays: layer and array, or network, layer and array.

    `alone` leaves out the number of one layer. With `several`, a first layer that occurs again starts
    another network.
    """
    sizes = [(layer.takes, layer.returns) for layer in layers]
    starts = [at for at, size in enumerate(sizes) if size == sizes[0]] if several else [0]
    names: list[str] = []
    for at, layer in enumerate(layers):
        network = sum(start <= at for start in starts) - 1
        steps = [str(network), str(at - starts[network])] if len(starts) > 1 else [str(at)]
        if alone and len(layers) == 1:
            steps = []
        names += [dot.join((*steps, name)) for name in layer.names]
    return names


class _ArrayLayer(NamedTuple):
    """A layer's arrays by name, its input and output sizes, and whether it is a convolution."""

    names: tuple[str, ...]
    takes: int = 0
    returns: int = 0
    image: bool = False


def _is_chain(layers: Sequence[_ArrayLayer]) -> bool:
    """Return whether each layer's input matches an earlier output (flattened, after a convolution)."""
    return all(
        any(
            layer.takes == before.returns
            or (before.image and not layer.image and layer.takes % before.returns == 0)
            for before in layers[:number]
        )
        for number, layer in enumerate(layers)
        if number
    )


def _recognize_layers(shapes: Sequence[Shape], framework: str) -> list[_ArrayLayer] | None:
    """Return the layers in a row of arrays, in a framework's axes; None if an array does not fit."""
    layers: list[_ArrayLayer] = []
    at = 0
    while at < len(shapes):
        layer = _recognize_norm(shapes[at:], layers, framework) if len(shapes[at]) == 1 else None
        layer = (
            layer or _recognize_recurrent(shapes[at:], framework) or _recognize_matrix(shapes[at:], framework)
        )
        if layer is None:
            return None
        layers.append(layer)
        at += len(layer.names)
    return layers


def _recognize_norm(
    shapes: Sequence[Shape], before: Sequence[_ArrayLayer], framework: str
) -> _ArrayLayer | None:
    """Return the norm formed by the first arrays, for the output of the layer before them."""
    returned = next((layer.returns for layer in reversed(before) if layer.returns), 0)
    for many, names in sorted(_NORM[framework].items(), reverse=True):
        if list(shapes[:many]) == [(returned,)] * many:
            return _ArrayLayer(names)
    return None


def _recognize_recurrent(shapes: Sequence[Shape], framework: str) -> _ArrayLayer | None:
    """Return the LSTM or GRU formed by the first arrays."""
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
    return _ArrayLayer((*names, *more), takes, units)


def _recognize_matrix(shapes: Sequence[Shape], framework: str) -> _ArrayLayer | None:
    """Return the dense layer or convolution formed by the first arrays."""
    shape = shapes[0]
    if not 2 <= len(shape) <= 5 or 0 in shape:
        return None
    takes, returns = (shape[1], shape[0]) if framework == "torch" else (shape[-2], shape[-1])
    has_bias = list(shapes[1:2]) == [(returns,)] and not _is_norm(shapes[1:], framework)
    names: tuple[str, ...] = (_KERNEL[framework], "bias") if has_bias else (_KERNEL[framework],)
    return _ArrayLayer(names, takes, returns, len(shape) > 2)


def _is_norm(shapes: Sequence[Shape], framework: str) -> bool:
    """Return whether the next vectors are those of a norm without a bias before them."""
    count = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))
    return count in _NORM[framework]


def checkpoint_orientation(
    checkpoint: Checkpoint, tree: Tree, native: str, stated: str | None = None, target: str | None = None
) -> str:
    """Return the framework whose orientation a checkpoint's tree has: "torch", "tensorflow" or "numpy".

    The evidence decides for formats that contain arrays of any program, and for HDF5 files not written by
    Keras; arrays that do not look like layers belong to the format's own framework. Raise MappingError as
    `infer_orientation` does.

    Args:
        checkpoint: its format and its record of the writer.
        tree: its tensors, or a part of them.
        native: the framework of its format.
        stated: the user's option, a word of WORDS.
        target: the framework of the output.
    """
    if stated is not None:
        if stated not in WORDS:
            raise UsageError("invalid value for --from; choose torch or tf", found=stated)
        return WORDS[stated]
    if checkpoint.format == "keras_h5" and checkpoint.writer is None:
        if all(_is_of_object(leaf) for _, leaf in tree.tensors()):
            return native
        names = gather_evidence(tree)
        if not any(names):
            try:
                return infer_orientation(tree, None, target) or native
            except MappingError as error:
                raise error.located(file=checkpoint.path) from None
        return "torch" if names.torch and not (names.tensorflow or names.unclear) else native
    if checkpoint.format not in NEUTRAL:
        return native
    metadata = checkpoint.details.get("metadata")
    writer = metadata.get("format") if isinstance(metadata, dict) else None
    try:
        orientation = infer_orientation(tree, writer if isinstance(writer, str) else None, target)
    except MappingError as error:
        raise error.located(file=checkpoint.path) from None
    return orientation or native


def _undecided_error(what: str, evidence: OrientationEvidence) -> MappingError:
    return MappingError(
        what,
        path=abbreviate_list(evidence.unclear or (*evidence.torch[:2], *evidence.tensorflow[:2]), _SHOWN),
        hint="use --from torch or --from tf",
    )


_MATRIX_KINDS = frozenset(("dense", "embedding"))
_WINDOW_KINDS = frozenset(("convolution", "depthwise"))
_NORM_KINDS = list_kinds("norm", "batch_norm")
# Last words of layer names. Sources: transformers/models/{bert,gpt2,llama}/modeling_*.py; the classes of
# torch/nn/modules (Linear, Embedding) and Keras (Dense); `fc` for fully connected; `conv_dw` of timm.
_EMBEDDING_NAME = deferred.compile(
    r"(?:.*_)?embeddings?|(?:tok_|token_|pos_|word_)?emb(?:ed)?|embed_\w+|wte|wpe"
)
_DENSE_NAME = deferred.compile(
    r"(?:.*_)?(?:fc|linear|lin|dense|proj|projection|logits)|(?:[qkvo]|qkv|up|down|gate|in|out)_?proj"
    r"|lm_head|classifier|score_head"
)
_CONVOLUTION_NAME = deferred.compile(r"(?:.*_)?conv(?:olution)?(?:[123]d)?|cnn|c")
_DEPTHWISE_NAME = deferred.compile(r"(?:.*_)?(?:dw|dwconv|depthwise)(?:_.*)?|dw_?conv|conv_?dw|depth_?conv")
_STEM_NUMBER = deferred.compile(r"_?\d+")
# Channels of a colour image and frames of a stack: a first depthwise convolution may take them.
_IMAGE_CHANNELS = frozenset((3, 4))
_BY_NAME = "of the name"


class _Widths(NamedTuple):
    """Input and output sizes that a layer has, or may have if its kind is unknown."""

    takes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    known: bool = True


def decide_kinds(tree: Tree, result: Sequence[Layer], *, ordered: bool) -> tuple[Layer, ...]:
    """Return PyTorch layers with the kind for which there is evidence, and the evidence itself.

    With `ordered`, the file lists the layers in the order in which the model creates them. A PyTorch matrix
    without a bias is a dense layer or an embedding, and a weight [C, 1, ...] a convolution of one channel or
    a depthwise one. If no class is recorded, the name of the layer and the widths of the layers around it are
    evidence. Evidence that is missing or contradictory decides nothing: the layer keeps all of its kinds.
    Each decision is an assumption, because a program may use any name and any width.
    """
    unknown = [at for at, layer in enumerate(result) if _is_undecided(layer)]
    if not unknown:
        return tuple(result)
    layers, widths = list(result), [_layer_widths(tree, layer) for layer in result]
    neighbours = _Neighbours(tree, layers, widths, ordered=ordered)
    decisions = (neighbours.named, neighbours.matrix, neighbours.window, neighbours.twin)
    changed = True
    while changed:
        changed = False
        for at, decide in itertools.product(unknown, decisions):
            decided = decide(at) if _is_undecided(layers[at]) else None
            if decided is not None:
                kinds = tuple(kind for kind in layers[at].kinds if kind.name == decided[0])
                layers[at] = layers[at]._replace(kinds=kinds, evidence=decided[1])
                widths[at] = _layer_widths(tree, layers[at])
                changed = True
    return tuple(layers)


def _is_undecided(layer: Layer) -> bool:
    """Return whether tensors leave the kind of a PyTorch layer open, and no class or option decides."""
    names = layer.kind_names
    unknown = not (layer.is_given or any(kind.refused for kind in layer.kinds))
    return unknown and names in (_MATRIX_KINDS, _WINDOW_KINDS) and layer.kinds[0].framework == "torch"


def _last_word(layer: Layer) -> str:
    """Return the last step of a layer's name without its number."""
    return re.sub(r"_?\d+\Z", "", layer.name[-1]).lower() if layer.name else ""


def _weight_shape(tree: Tree, layer: Layer) -> tuple[int, ...]:
    return max((leaf.shape for leaf in layer.group(tree).values()), key=len)


def _layer_widths(tree: Tree, layer: Layer) -> _Widths:
    """Return the sizes of a layer; if it may be dense or an embedding, all sizes of both."""
    names = layer.kind_names
    if names in (_MATRIX_KINDS, _WINDOW_KINDS):
        rows, columns = _weight_shape(tree, layer)[:2]
        outputs = {rows, columns} if names == _MATRIX_KINDS else {rows}
        return _Widths(frozenset({columns}), frozenset(outputs), known=False)
    shapes = {}
    with contextlib.suppress(MappingError):  # refused because of its kind
        shapes = {name: leaf.shape for name, leaf in canonical_tensors(tree, layer, layer.kinds[0]).items()}
    kind = layer.kinds[0].name
    if kind == "embedding" and "embeddings" in shapes:
        return _Widths(makes=frozenset(shapes["embeddings"][-1:]))
    if kind in RECURRENT_KIND_NAMES and {"kernel", "recurrent_kernel"} <= shapes.keys():
        units = shapes["recurrent_kernel"][0]
        return _Widths(frozenset(shapes["kernel"][:1]), frozenset((units, 2 * units)))
    if kind in ("dense", "convolution") and "kernel" in shapes:
        takes, makes = shapes["kernel"][-2:]
        return _Widths(frozenset((takes,)), frozenset((makes,)))
    if kind == "depthwise" and "kernel" in shapes:
        channels = frozenset((shapes["kernel"][-2] * shapes["kernel"][-1],))
        return _Widths(channels, channels)
    width = frozenset(size for shape in shapes.values() for size in shape if len(shape) == 1)
    return _Widths(width, width) if kind in _NORM_KINDS else _Widths()


class _Neighbours:
    """The layers of a file, as evidence for the kind of those that their own tensors leave open.

    Each method returns the kind of the layer at an index, and why; None if it finds no evidence.
    """

    def __init__(self, tree: Tree, layers: list[Layer], widths: list[_Widths], *, ordered: bool) -> None:
        self.tree, self.layers, self.widths, self.ordered = tree, layers, widths, ordered
        self.stems = [_STEM_NUMBER.sub("", layer.title) for layer in layers]
        self.windows = [at for at, layer in enumerate(layers) if layer.kind_names & _WINDOW_KINDS]
        rows: dict[str, list[int]] = {"": list(range(len(layers)))}
        if not ordered:
            # In files sorted by name, only layers of the same numbering are neighbours.
            rows = {stem: [] for stem in self.stems}
            for at in sorted(range(len(layers)), key=lambda at: _numbers(layers[at])):
                rows[self.stems[at]].append(at)
        self.following = {at: after for row in rows.values() for at, after in pairwise(row)}
        self.preceding = {after: at for at, after in self.following.items()}

    def _shape(self, at: int) -> tuple[int, ...]:
        return _weight_shape(self.tree, self.layers[at])

    def _kinds(self, at: int) -> frozenset[str]:
        return self.layers[at].kind_names

    def _before(self, at: int) -> list[_Widths]:
        """Return the sizes of the layers before one: of all others if the order is unknown."""
        return self.widths[:at] + ([] if self.ordered else self.widths[at + 1 :])

    def _after(self, at: int) -> list[_Widths]:
        return self.widths[at + 1 :] + ([] if self.ordered else self.widths[:at])

    def _used(self, at: int) -> frozenset[int]:
        """Return the input sizes of the other layers."""
        return _union(width.takes for other, width in enumerate(self.widths) if other != at)

    def named(self, at: int) -> tuple[str, str] | None:
        """Return the kind that a name states, unless widths contradict it."""
        word = _last_word(self.layers[at])
        if self._kinds(at) == _WINDOW_KINDS:
            return ("depthwise", _BY_NAME) if _DEPTHWISE_NAME.fullmatch(word) else None
        (rows, columns), inputs = self._shape(at), self._used(at)
        if _EMBEDDING_NAME.fullmatch(word) and (columns in inputs or rows not in inputs):
            return "embedding", _BY_NAME
        if _DENSE_NAME.fullmatch(word) and (rows in inputs or columns not in inputs):
            return "dense", _BY_NAME
        return None

    def matrix(self, at: int) -> tuple[str, str] | None:
        """Return the kind of a matrix without a bias that the widths show, unless a name contradicts them."""
        if self._kinds(at) != _MATRIX_KINDS:
            return None
        word, decided = _last_word(self.layers[at]), self._matrix(at)
        stated = {"dense": _DENSE_NAME, "embedding": _EMBEDDING_NAME}
        contradicted = any(
            pattern.fullmatch(word) for kind, pattern in stated.items() if decided and kind != decided[0]
        )
        return None if contradicted else decided

    def _matrix(self, at: int) -> tuple[str, str] | None:
        """Return the kind of a matrix [rows, columns].

        A dense layer turns columns into rows, an embedding outputs columns.
        """
        rows, columns = self._shape(at)
        before, after = self.preceding.get(at), self.following.get(at)
        previous = self.widths[before] if before is not None else _Widths()
        following = self.widths[after] if after is not None else _Widths()
        inputs = self._used(at)
        users = [following] if self.ordered else self._after(at)
        used = _union(user.takes for user in users if user.known)
        if (
            columns in used
            and rows not in inputs
            and columns not in _union(width.makes for width in self._before(at))
        ):
            return "embedding", f"a later layer takes its {columns:,} columns, and none its {rows:,} rows"
        if rows != columns and columns not in inputs and rows in following.takes | used:
            return "dense", f"a later layer takes its {rows:,} rows, and none its {columns:,} columns"
        if before is None or not previous.known or columns not in previous.makes:
            return self._after_image(columns, inputs)
        continued = rows in following.takes and rows != columns
        numbered = self._kinds(before) == {"dense"} and self.stems[before] == self.stems[at]
        if continued or numbered or columns not in _union(width.takes for width in self._after(at)):
            return "dense", f"the layer before it outputs its {columns:,} columns"
        return None

    def _after_image(self, columns: int, inputs: frozenset[int]) -> tuple[str, str] | None:
        """Return that a matrix is dense if it takes a flattened image, and no layer takes its columns."""
        images = _union(self.widths[at].makes for at in self.windows)
        if columns not in inputs and any(1 < image < columns and columns % image == 0 for image in images):
            return "dense", f"a flattened image may have its {columns:,} columns, and no layer takes them"
        return None

    def window(self, at: int) -> tuple[str, str] | None:
        """Return the kind of a weight [channels, 1, ...]."""
        if self._kinds(at) != _WINDOW_KINDS:
            return None
        shape = self._shape(at)
        others = [other for other in self.windows if other != at]
        is_produced = any(
            shape[0] in self.widths[other].makes for other in others if other < at or not self.ordered
        )
        # A window of one place takes the channels of a depthwise convolution.
        is_consumed = any(
            (there := self._shape(other))[1] == shape[0] and max(there[2:]) > 1 for other in others
        )
        first = not others or (is_consumed if not self.ordered else at < others[0])
        # Between other layers, also `conv` is often depthwise (Mamba, Nystromformer).
        shown = is_consumed or (at == 0 and _CONVOLUTION_NAME.fullmatch(_last_word(self.layers[at])))
        if first and shown and not is_produced and shape[0] not in _IMAGE_CHANNELS:
            which = "no layer before it" if self.ordered else "no other layer"
            return "convolution", f"{which} outputs {shape[0]:,} channels"
        after = at + 1
        while after < len(self.layers) and self._kinds(after) <= _NORM_KINDS:
            after += 1
        between = self.ordered and is_produced and after < len(self.layers) and max(shape[2:]) > 1
        if between and self._shape(after)[1:] == (shape[0], *(1 for _ in shape[2:])):
            return "depthwise", f"it is between a layer of {shape[0]:,} channels and a window of one place"
        return None

    def twin(self, at: int) -> tuple[str, str] | None:
        """Return the kind of the same layer in an equal network of the file, e.g. a target network."""
        name, before = self.layers[at].name, self.preceding.get(at)
        if before is not None and self._shape(at)[0] in self.widths[before].makes:
            return None
        for other in self.layers:
            same = other.evidence and other.name[1:] == name[1:] and other.name[:1] != name[:1]
            if same and self._network(other) == self._network(self.layers[at]):
                return other.kinds[0].name, f"it is as in {other.title}"
        return None

    def _network(self, layer: Layer) -> list[object]:
        """Return the names and shapes of all layers in the part of the file that contains the layer."""
        return [
            (other.name[1:], other.part, {name: leaf.shape for name, leaf in other.group(self.tree).items()})
            for other in self.layers
            if other.name[:1] == layer.name[:1]
        ]


def _union(sizes: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sizes)


def _numbers(layer: Layer) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", layer.title)]
