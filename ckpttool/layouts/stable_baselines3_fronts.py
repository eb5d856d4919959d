"""What stands before the layers of a Stable-Baselines3 policy: its features extractor, its contrib's LSTM.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/common/torch_layers.py (NatureCNN, whose
convolutions have strides 4, 2 and 1; CombinedExtractor, which joins the parts of a Dict in the space's order,
those that are no images flattened), common/preprocessing.py (`preprocess_obs`: images are divided by 255),
common/vec_env/vec_transpose.py (policies see images with the channels first). LSTM:
github.com/Stable-Baselines-Team/stable-baselines3-contrib, sb3_contrib/common/recurrent/policies.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.layouts import baselines_settings, fronts, memory, stable_baselines3_norms
from ckpttool.layouts.fronts import Front, Stream
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, key
from ckpttool.mapping.kinds.convolutions import to_last
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from ckpttool.source import Shape
from ckpttool.tree import Tree

_POLICY, _DATA = key("policy"), attr("data")
_SPACE = (_DATA, key("observation_space"))
_LIBRARY = "stable_baselines3.common.torch_layers."
_EXTRACTORS = {f"{_LIBRARY}{name}" for name in ("NatureCNN", "CombinedExtractor", "FlattenExtractor")}
_CONVOLUTIONS = ("cnn.0", "cnn.2", "cnn.4")
_SIZES, _STRIDES = (8, 4, 3), (4, 2, 1)
_LINEAR = "linear.0"
# Each part is looked up in the whole tree, and a file may claim any number.
_MOST_PARTS = 100
_LSTM = "lstm_actor."
_ASSUMED = "image encoder NatureCNN (strides 4, 2, 1; ReLU): habit of layout stable_baselines3"

Tensors = Mapping[str, Path]


def found(tree: Tree, component: str, unplaced: tuple[str, ...]) -> Front | None:
    """Return what stands before a policy's layers; None where that is nothing, or nothing known.

    `unplaced` are the names of the policy's tensors that its layers do not take.
    """
    spaces = _spaces(tree)
    tensors = _tensors(tree, component)
    own = {name: path for name, path in tensors.items() if not name.startswith(_LSTM)}
    several = len(spaces) > 1 or "" not in spaces
    if not spaces or not _known(tree):
        return None
    streams, moves = [], []
    for name, shape in spaces.items():
        prefix = f"extractors.{name}." if several else ""
        mine = {each.removeprefix(prefix): own.pop(each) for each in list(own) if each.startswith(prefix)}
        stream = _stream(tree, name or "obs", shape, mine)
        if stream is None:
            return None
        streams.append(stream)
        moves += _encoder(component, stream, mine)
    recurrent = {name.removeprefix(_LSTM): path for name, path in tensors.items() if name.startswith(_LSTM)}
    read = memory.cells(tree, component, recurrent, "torch")
    normed = stable_baselines3_norms.found(tree, component)
    if own or read is None or not (moves or recurrent or several or normed.norms):
        return None
    covered = {tree.names[path] for path in tensors.values()} | {baselines_settings.IMAGES} | normed.names
    cells, turned = read
    return Front(
        tuple(streams),
        cells,
        normed.norms,
        (*moves, *turned, *normed.moves),
        frozenset(covered) & frozenset(unplaced),
        (*((_ASSUMED,) if moves else ()), *normed.assumed),
    )


def _known(tree: Tree) -> bool:
    """Say whether the class of the features extractor is the library's own."""
    group = (_DATA, key("policy_kwargs"), key("features_extractor_class"))
    # A class of the program itself is pickled with all that it is made of.
    leaves = [leaf for path, leaf in tree.items() if path[: len(group)] == group]
    names = [
        leaf.value.name for leaf in leaves if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, Record)
    ]
    return not leaves or (len(leaves) == 1 and set(names) <= _EXTRACTORS and bool(names))


def _spaces(tree: Tree) -> dict[str, Shape]:
    """Return the shapes of the parts of a Dict by name, or that of a Box by ""; none where one is no Box."""
    parts = (*_SPACE, attr("spaces"))
    names = dict.fromkeys(str(p[3].value) for p in tree if p[:3] == parts and len(p) > len(parts))
    if len(names) > _MOST_PARTS:
        return {}
    places: dict[str, Path] = {name: (*parts, key(name)) for name in names} or {"": _SPACE}
    boxes = {
        name: place
        for name, place in places.items()
        if (space := tree.containers.get(place)) is not None and str(space.name).endswith(".Box")
    }
    if len(boxes) < len(places):
        return {}
    return {name: _shape(tree, (*place, attr("_shape"))) for name, place in boxes.items()}


def _shape(tree: Tree, place: Path) -> Shape:
    leaves = [tree[path] for path in tree if path[: len(place)] == place and len(path) > len(place)]
    sizes = [leaf.value for leaf in leaves if isinstance(leaf, ValueLeaf) and type(leaf.value) is int]
    return tuple(sizes) if len(sizes) == len(leaves) else ()


def _tensors(tree: Tree, component: str) -> dict[str, Path]:
    """Return the tensors before the policy's layers: by names in the extractor, an LSTM's by whole names."""
    names: dict[str, Path] = {
        str(path[1].value): path for path in tree if len(path) == 2 and path[0] == _POLICY
    }
    prefixes = (f"{component}.features_extractor.", "pi_features_extractor.", "features_extractor.")
    for prefix in prefixes:
        inside = {name.removeprefix(prefix): path for name, path in names.items() if name.startswith(prefix)}
        if inside:
            break
    return inside | {name: path for name, path in names.items() if name.startswith(_LSTM)}


def _stream(tree: Tree, name: str, shape: Shape, tensors: Tensors) -> Stream | None:
    """Return an input's way, None if it is not one of the library's."""
    if not shape:
        return None
    if not tensors:
        # Whether images that are only flattened are divided is decided by their bounds.
        return Stream(name, shape) if len(shape) < 3 else None
    modules = (*_CONVOLUTIONS, _LINEAR)
    if set(tensors) != {f"{module}.{each}" for module in modules for each in ("weight", "bias")}:
        return None
    kernels = [_leaf_shape(tree, tensors[f"{module}.weight"]) for module in modules]
    if len(shape) != 3 or any(k[2:] != (n, n) for k, n in zip(kernels, _SIZES, strict=False)):
        return None
    height, width = shape[1:]
    for size, stride in zip(_SIZES, _STRIDES, strict=True):
        height, width = (height - size) // stride + 1, (width - size) // stride + 1
    if kernels[0][1] != shape[0] or kernels[3][1:] != (kernels[2][0] * height * width,):
        return None
    divided = baselines_settings.setting(tree, "policy_kwargs", "normalize_images", True) is not False
    return Stream(name, shape, 1 / 255 if divided else 1.0, _STRIDES, 1)


def _leaf_shape(tree: Tree, path: Path) -> Shape:
    leaf = tree[path]
    return leaf.shape if isinstance(leaf, Leaf) else ()


def _encoder(component: str, stream: Stream, tensors: Tensors) -> list[Move]:
    if not tensors:
        return []
    moves = []
    for number, module in enumerate((*_CONVOLUTIONS, _LINEAR)):
        place = fronts.layer(component, stream.name, number)
        turned = TRANSPOSE if module == _LINEAR else to_last(2)
        moves.append(Move(tensors[f"{module}.weight"], (*place, fronts.KERNEL), turned))
        moves.append(Move(tensors[f"{module}.bias"], (*place, fronts.BIAS), KEEP))
    return moves
