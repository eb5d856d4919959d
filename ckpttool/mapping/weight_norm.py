"""Weight normalisation taken out of a torch state_dict: direction and length become one weight again.

weight = g * v / ||v||, the norm over all axes but those along which g varies. Sources:
torch/nn/utils/weight_norm.py (NAME_g, NAME_v), torch/nn/utils/parametrizations.py (_WeightNorm:
parametrizations.NAME.original0 is g, original1 is v), aten/src/ATen/native/WeightNorm.cpp (norm_except_dim).
Spectral norm has names like these (NAME_orig, NAME_u, NAME_v; parametrizations.NAME.original) and is another
thing: its weight depends on a power iteration, and it is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import some
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.source import Buffer, Shape, Source, as_array
from ckpttool.tree import Container, Tree

if TYPE_CHECKING:
    import numpy as np

_OLD = re.compile(r"(?P<module>(?:.*\.)?)(?P<name>\w+)_g", re.DOTALL)
_NEW = re.compile(r"(?P<module>(?:.*\.)?)parametrizations\.(?P<name>\w+)\.original0", re.DOTALL)
_SPECTRAL = re.compile(r"(?:.*\.)?(?:parametrizations\.\w+\.\d+\._u|\w+_orig)", re.DOTALL)
_WEIGHT = "{module}{name}"
_FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))


class WeightOf(NamedTuple):
    """The weight that a direction and a length stand for, computed in float64 and rounded once."""

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
        weight = np.ascontiguousarray(_folded(v, g).astype(dtypes.numpy_dtype(self.dtype)))
        return weight.reshape(-1).view(np.uint8).data


def _folded(v: np.ndarray, g: np.ndarray) -> np.ndarray:
    import numpy as np

    over = tuple(axis for axis in range(v.ndim) if not g.ndim or g.shape[axis] == 1)
    norm = np.sqrt(np.square(v).sum(axis=over, keepdims=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Where a direction is zero, torch divides by zero too.
        folded: np.ndarray = v * (g / norm)
    return folded


@dataclass(frozen=True, slots=True)
class Folded:
    """A tree without weight norm.

    `made` names for each new weight the leaves it was made of; `lost` are what cannot come along: state of
    optimizers that trained what is no more. `spectral` are tensors of spectral norm, which stay.
    """

    tree: Tree
    made: Mapping[Path, tuple[Path, Path]]
    lost: tuple[Path, ...]
    spectral: tuple[Path, ...]


class _Pair(NamedTuple):
    length: Path
    direction: Path
    weight: Path
    leaf: Leaf


def folded(tree: Tree) -> Folded:
    """Return the tree with every pair of weight norm as one weight, at the place of its direction."""
    pairs = {pair.direction: pair for pair in _pairs(tree)}
    gone = {pair.length for pair in pairs.values()}
    tops = _untrained(tree, gone | pairs.keys()) if pairs else frozenset()
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    lost: list[Path] = []
    for path, leaf in tree.items():
        if _inside(path, tops):
            lost.append(path)
        elif path in pairs:
            leaves[pairs[path].weight] = pairs[path].leaf
        elif path not in gone:
            leaves[path] = leaf
    aliases = {path: others for path, others in tree.aliases.items() if path in leaves}
    containers = {path: c for path, c in tree.containers.items() if not _inside(path, tops)}
    for top, stems in _stems(pairs.values()).items():
        if top in containers:
            containers[top] = _without(containers[top], stems)
    made = {pair.weight: (pair.length, pair.direction) for pair in pairs.values()}
    spectral = tuple(path for path, _ in tree.tensors() if _SPECTRAL.fullmatch(_name(path)))
    return Folded(Tree(leaves, aliases, containers), made, tuple(lost), spectral)


def notes(tree: Tree) -> Iterator[str]:
    """Yield a sentence for weights that are stored in parts, with what makes one weight of them."""
    folds = [pair.leaf.key for pair in _pairs(tree)]
    if folds:
        yield f"{some(folds, 3)}: weight norm stores a direction and a length (--fold-weight-norm makes one)"
    spectral = [tree.names[path] for path, _ in tree.tensors() if _SPECTRAL.fullmatch(_name(path))]
    if spectral:
        yield (
            f"{some(spectral, 3)}: the weight of spectral norm depends on its power iteration (save the "
            "model after torch.nn.utils.parametrize.remove_parametrizations or remove_spectral_norm)"
        )


def _pairs(tree: Tree) -> Iterator[_Pair]:
    for path, length in tree.tensors():
        name = _name(path)
        if (found := _OLD.fullmatch(name)) is not None:
            other = "{module}{name}_v"
            more: tuple[str, ...] = ("{module}{name}_orig",)
        elif (found := _NEW.fullmatch(name)) is not None:
            other = "{module}parametrizations.{name}.original1"
            # A third part, or a parametrization with a state of its own, is more than weight norm.
            more = tuple(f"{{module}}parametrizations.{{name}}.{m}" for m in ("original2", "0._u", "1._u"))
        else:
            continue
        place = {
            form: (*path[:-1], key(form.format(**found.groupdict()))) for form in (other, *more, _WEIGHT)
        }
        direction = tree.get(place[other])
        if not isinstance(direction, Leaf) or not _fit(length, direction):
            continue
        if not any(place[form] in tree for form in (*more, _WEIGHT)):
            source = WeightOf(direction.source, length.source, direction.dtype, direction.shape, length.shape)
            native = direction.key.removesuffix(_name(place[other])) + _name(place[_WEIGHT])
            leaf = replace(direction, source=source, key=native)
            yield _Pair(path, place[other], place[_WEIGHT], leaf)


def _fit(length: Leaf, direction: Leaf) -> bool:
    """Say whether the shapes are those of weight norm: one length for all, or one along a single axis."""
    if length.dtype != direction.dtype or length.dtype not in _FLOATS or not direction.shape:
        return False
    if not length.shape:
        return True
    if len(length.shape) != len(direction.shape):
        return False
    pairs = list(zip(length.shape, direction.shape, strict=True))
    return all(n in (1, m) for n, m in pairs) and sum(n != 1 for n, _ in pairs) <= 1


def _name(path: Path) -> str:
    last = path[-1] if path else None
    return last.value if last is not None and last.kind == "key" and isinstance(last.value, str) else ""


def _inside(path: Path, tops: frozenset[Path]) -> bool:
    return bool(tops) and any(path[:depth] in tops for depth in range(len(path) + 1))


def _untrained(tree: Tree, ended: set[Path]) -> frozenset[Path]:
    """Return where optimizers stand that trained what is folded, or of which that is not known.

    They number all their parameters, of which there are fewer now.
    """
    owners: dict[Path, list[Path | None]] = {
        path[:-1]: [] for path in tree.containers if len(path) > 1 and path[-1].value == "param_groups"
    }
    for path, leaf in tree.tensors():
        if leaf.role == "slot" and path[:-3] in owners:
            owners[path[:-3]].append(leaf.of)
    return frozenset(top for top, of in owners.items() if not of or any(o is None or o in ended for o in of))


def _stems(pairs: Collection[_Pair]) -> dict[Path, set[str]]:
    """Return by dict the modules that held the parametrizations in it: `l1.parametrizations.weight`."""
    found: dict[Path, set[str]] = {}
    for pair in pairs:
        name = _name(pair.length)
        if name.endswith(".original0"):
            found.setdefault(pair.length[:-1], set()).add(name.removesuffix(".original0"))
    return found


def _without(container: Container, stems: set[str]) -> Container:
    """Return the container without the versions of the modules that are no more."""
    state = container.state
    told = state.get("_metadata") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(told, dict):
        return container
    ended = stems | {stem.rpartition(".")[0] for stem in stems}
    kept = {n: v for n, v in told.items() if n not in ended and str(n).rpartition(".")[0] not in stems}
    return container._replace(state={**state, "_metadata": type(told)(kept)})
