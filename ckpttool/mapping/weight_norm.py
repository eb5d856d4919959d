"""Weight norm: the pairs of direction and magnitude that PyTorch stores, folded into weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import deferred, dtypes
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.source import Buffer, Shape, Source, as_array
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr, key

if TYPE_CHECKING:
    import numpy as np


_OLD = deferred.compile(r"(?P<module>(?:.*\.)?)(?P<name>\w+)_g", re.DOTALL)
_NEW = deferred.compile(r"(?P<module>(?:.*\.)?)parametrizations\.(?P<name>\w+)\.original0", re.DOTALL)
_SPECTRAL = deferred.compile(r"(?:.*\.)?(?:parametrizations\.\w+\.\d+\._u|\w+_orig)", re.DOTALL)
_WEIGHT = "{module}{name}"
_FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))


class WeightNormSource(NamedTuple):
    """The weight computed from a direction and a length, in float64 and rounded once."""

    direction: Source
    length: Source
    dtype: str
    shape: Shape
    length_shape: Shape

    def read(self) -> Buffer:
        """Return the weight's bytes."""
        import numpy as np

        v = as_array(self.direction.read(), self.dtype, self.shape).astype(np.float64)
        g = as_array(self.length.read(), self.dtype, self.length_shape).astype(np.float64)
        weight = np.ascontiguousarray(_fold_arrays(v, g).astype(dtypes.numpy_dtype(self.dtype)))
        return weight.reshape(-1).view(np.uint8).data


def _fold_arrays(v: np.ndarray, g: np.ndarray) -> np.ndarray:
    import numpy as np

    over = tuple(axis for axis in range(v.ndim) if not g.ndim or g.shape[axis] == 1)
    norm = np.sqrt(np.square(v).sum(axis=over, keepdims=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        # If a direction is zero, torch also divides by zero.
        folded: np.ndarray = v * (g / norm)
    return folded


@dataclass(frozen=True, slots=True)
class WeightNormFold:
    """A tree without weight norm.

    `merged` maps each new weight to the leaves it was computed from; `lost` are entries that cannot be
    kept: optimizer state of the removed parameters. `spectral` are tensors of spectral norm, which
    stay.
    """

    tree: Tree
    merged: Mapping[Path, tuple[Path, Path]]
    lost: tuple[Path, ...]
    spectral: tuple[Path, ...]


class _WeightNormPair(NamedTuple):
    length: Path
    direction: Path
    weight: Path
    leaf: Leaf


def merge_weight_norm(tree: Tree) -> WeightNormFold:
    """Return the tree with every pair of weight norm as one weight, in the place of its direction.

    weight = g * v / ||v||, the norm over all axes except those along which g varies. Sources:
    torch/nn/utils/weight_norm.py (NAME_g, NAME_v), torch/nn/utils/parametrizations.py (_WeightNorm:
    parametrizations.NAME.original0 is g, original1 is v), aten/src/ATen/native/WeightNorm.cpp
    (norm_except_dim). Spectral norm has similar names (NAME_orig, NAME_u, NAME_v;
    parametrizations.NAME.original) but is different: its weight depends on a power iteration, and it is not
    changed.
    """
    pairs = {pair.direction: pair for pair in _find_pairs(tree)}
    gone = {pair.length for pair in pairs.values()}
    tops = _affected_optimizers(tree, gone | pairs.keys()) if pairs else frozenset()
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    lost: list[Path] = []
    for path, leaf in tree.items():
        if _is_below(path, tops):
            lost.append(path)
        elif path in pairs:
            leaves[pairs[path].weight] = pairs[path].leaf
        elif path not in gone:
            leaves[path] = leaf
    aliases = {path: others for path, others in tree.aliases.items() if path in leaves}
    containers = {path: c for path, c in tree.containers.items() if not _is_below(path, tops)}
    for top, stems in _parametrization_names(pairs.values()).items():
        if top in containers:
            containers[top] = _drop_versions(containers[top], stems)
    merged = {pair.weight: (pair.length, pair.direction) for pair in pairs.values()}
    spectral = tuple(path for path, _ in tree.tensors() if _SPECTRAL.fullmatch(_dotted_name(path)[0]))
    return WeightNormFold(Tree(leaves, aliases, containers), merged, tuple(lost), spectral)


def describe_weight_norm(tree: Tree) -> Iterator[str]:
    """Yield a sentence for weights stored in parts, with the option that folds them into one."""
    folds = [pair.leaf.key for pair in _find_pairs(tree)]
    if folds:
        yield (
            f"{abbreviate_list(folds, 3)}: weight norm stores a direction and a length (use "
            "--fold-weight-norm to fold them into a single weight)"
        )
    spectral = [tree.names[path] for path, _ in tree.tensors() if _SPECTRAL.fullmatch(_dotted_name(path)[0])]
    if spectral:
        yield (
            f"{abbreviate_list(spectral, 3)}: the weight of spectral norm depends on its power iteration "
            "(before saving the model, use torch.nn.utils.parametrize.remove_parametrizations or "
            "remove_spectral_norm)"
        )


def _find_pairs(tree: Tree) -> Iterator[_WeightNormPair]:
    for path, length in tree.tensors():
        name, renamed = _dotted_name(path)
        if (match := _OLD.fullmatch(name)) is not None:
            other = "{module}{name}_v"
            more: tuple[str, ...] = ("{module}{name}_orig",)
        elif (match := _NEW.fullmatch(name)) is not None:
            other = "{module}parametrizations.{name}.original1"
            # A third part, or a parametrization with its own state, is not plain weight norm.
            more = tuple(f"{{module}}parametrizations.{{name}}.{m}" for m in ("original2", "0._u", "1._u"))
        else:
            continue
        forms = {form: renamed(form.format(**match.groupdict())) for form in (other, *more, _WEIGHT)}
        direction = tree.get(forms[other])
        if not isinstance(direction, Leaf) or not _shapes_fit(length, direction):
            continue
        if not any(forms[form] in tree for form in (*more, _WEIGHT)):
            source = WeightNormSource(
                direction.source, length.source, direction.dtype, direction.shape, length.shape
            )
            ended, start = (_dotted_name(forms[form])[0] for form in (other, _WEIGHT))
            native = direction.key.removesuffix(ended) + start
            leaf = replace(direction, source=source, key=native)
            yield _WeightNormPair(path, forms[other], forms[_WEIGHT], leaf)


def _shapes_fit(length: Leaf, direction: Leaf) -> bool:
    """Return whether the shapes are those of weight norm: one length for all, or one along a single axis."""
    if length.dtype != direction.dtype or length.dtype not in _FLOATS or not direction.shape:
        return False
    if not length.shape:
        return True
    if len(length.shape) != len(direction.shape):
        return False
    pairs = list(zip(length.shape, direction.shape, strict=True))
    return all(n in (1, m) for n, m in pairs) and sum(n != 1 for n, _ in pairs) <= 1


def _dotted_name(path: Path) -> tuple[str, Callable[[str], Path]]:
    """Return a tensor's name in its module, and what makes the path of another.

    A state_dict has the name in one key, a TorchScript program in one attribute for each part.
    """
    depth = len(path)
    while depth and path[depth - 1].kind == "attr":
        depth -= 1
    if depth < len(path):
        name = ".".join(str(step.value) for step in path[depth:])
        return name, lambda other: (*path[:depth], *map(attr, other.split(".")))
    last = path[-1].value if path and path[-1].kind == "key" else ""
    return str(last) if isinstance(last, str) else "", lambda other: (*path[:-1], key(other))


def _is_below(path: Path, tops: frozenset[Path]) -> bool:
    return bool(tops) and any(path[:depth] in tops for depth in range(len(path) + 1))


def _affected_optimizers(tree: Tree, ended: set[Path]) -> frozenset[Path]:
    """Return the paths of optimizers that trained folded parameters, or may have trained them.

    They number all their parameters, of which there are now fewer.
    """
    owners: dict[Path, list[Path | None]] = {
        path[:-1]: [] for path in tree.containers if len(path) > 1 and path[-1].value == "param_groups"
    }
    for path, leaf in tree.tensors():
        if leaf.role == "slot" and path[:-3] in owners:
            owners[path[:-3]].append(leaf.of)
    return frozenset(top for top, of in owners.items() if not of or any(o is None or o in ended for o in of))


def _parametrization_names(pairs: Collection[_WeightNormPair]) -> dict[Path, set[str]]:
    """Return by dict the modules that contained its parametrizations: `l1.parametrizations.weight`."""
    names: dict[Path, set[str]] = {}
    for pair in pairs:
        name = _dotted_name(pair.length)[0]
        if name.endswith(".original0"):
            names.setdefault(pair.length[:-1], set()).add(name.removesuffix(".original0"))
    return names


def _drop_versions(container: Container, stems: set[str]) -> Container:
    """Return the container without the versions of the removed modules."""
    state = container.state
    metadata = state.get("_metadata") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(metadata, dict):
        return container
    ended = stems | {stem.rpartition(".")[0] for stem in stems}
    kept = {n: v for n, v in metadata.items() if n not in ended and str(n).rpartition(".")[0] not in stems}
    return container._replace(state={**state, "_metadata": type(metadata)(kept)})
