"""Groups a tree's tensors by module, as layer kinds know them: what stands together, under which names.

Sources: torch/nn/modules/rnn.py (one module keeps `weight_ih_l0`, `weight_ih_l0_reverse`, `weight_ih_l1`);
keras/src/layers/attention/multi_head_attention.py (`_query_dense`, ..., called `query`, ... and
`attention_output`); keras/src/layers/rnn/rnn.py and bidirectional.py (`cell`, `forward_layer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping.kinds import COMPOSED, Kind
from ckpttool.tree import Tree

Name = tuple[str, ...]
_PART = re.compile(r"(?P<stored>(?:weight|bias)_(?:ih|hh|hr))_(?P<part>l\d+(?:_reverse)?)")
# What holds a recurrent layer's variables: its cell, by attribute or by the name of its class.
_CELL = re.compile(r"cell|(?:basic_)?(?:lstm|gru|simple_rnn|rnn)_cell(?:_\d+)?")
_PROJECTION = re.compile(r"_?(query|key|value|output)(?:_dense)?|attention_(output)")
_CLASSES = {
    "Dense": "dense",
    "Linear": "dense",
    "Embedding": "embedding",
    "PReLU": "prelu",
    "LayerNorm": "layer_norm",
    "LayerNormalization": "layer_norm",
    "GroupNorm": "layer_norm",
    "GroupNormalization": "layer_norm",
    "RMSNorm": "rms_norm",
    "RMSNormalization": "rms_norm",
    **{f"Conv{n}{d}": "convolution" for n in (1, 2, 3) for d in ("D", "DTranspose")},
    **{f"ConvTranspose{n}d": "convolution" for n in (1, 2, 3)},
    **{f"DepthwiseConv{n}D": "depthwise" for n in (1, 2)},
}


class About(NamedTuple):
    """What the file says of a module besides its tensors: its class and plain settings."""

    cls: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})


NOT_TOLD = About()


class Module(NamedTuple):
    """Tensors that stand together: the module's name, each tensor's path by its stored name.

    `last` is what the module that holds them is called, which a cell's layer is not.
    """

    name: Name
    tensors: dict[str, Path]
    part: str = ""
    last: str = ""
    about: About = NOT_TOLD

    def group(self, tree: Tree) -> dict[str, Leaf]:
        """Return the tensors by stored name."""
        return {name: leaf for name, path in self.tensors.items() if isinstance(leaf := tree[path], Leaf)}


def modules(tree: Tree, framework: str, asked: Mapping[str, Callable[[str], bool]]) -> Iterator[Module]:
    """Go through the modules in the order of the tree, those that are several below one as one.

    `asked` says by kind for which modules somebody wants a kind that is not recognised by itself.
    """
    found = _by_name(tree, framework)
    composed: dict[_At, Module] = {}
    taken: set[_At] = set()
    for whole, members in _composed(tree, found, framework, asked):
        composed[members[0]] = whole
        taken.update(members)
    for at, module in found.items():
        if at in composed or at not in taken:
            yield _as_layer(tree, composed.get(at, module), framework)


_At = tuple[Name, str]


def _by_name(tree: Tree, framework: str) -> dict[_At, Module]:
    found: dict[_At, Module] = {}
    for path, shown in _tensors(tree, framework):
        *module, name = shown.removesuffix(":0").split("/")
        match = _PART.fullmatch(name) if framework == "torch" else None
        # Sonnet's cells keep their kernels under private attributes (sonnet/src/recurrent.py).
        bare = name if framework == "torch" else name.removeprefix("_")
        part, stored = (match["part"], match["stored"]) if match else ("", bare)
        at = tuple(module)
        found.setdefault((at, part), Module(at, {}, part, at[-1] if at else "")).tensors[stored] = path
    return found


def _tensors(tree: Tree, framework: str) -> Iterator[tuple[Path, str]]:
    # What counts a batch norm's batches stands beside its statistics.
    roles = ("parameter", "buffer", "counter") if framework == "torch" else ("parameter", "buffer")
    for path, leaf in tree.tensors():
        if leaf.role in roles:
            yield path, tree.names[path]
            # A module of torch that shares a tensor lists it; objects of TensorFlow have many names for one.
            if framework == "torch":
                yield from ((path, display(alias.path)) for alias in tree.aliases.get(path, ()))


def _composed(
    tree: Tree, found: Mapping[_At, Module], framework: str, asked: Mapping[str, Callable[[str], bool]]
) -> Iterator[tuple[Module, list[_At]]]:
    """Go through what is one layer in several modules below one, with the modules that it is made of."""
    below: dict[Name, list[_At]] = {}
    for at in found:
        if at[0]:
            below.setdefault(at[0][:-1], []).append(at)
    able = [kind for kind in COMPOSED if kind.framework == framework]
    for parent, members in below.items():
        for kind in able:
            wanted = asked.get(kind.name)
            if kind.asked and (wanted is None or not wanted("/".join(parent))):
                continue
            own = [(parent, "")] if (parent, "") in found else []
            whole, used = _together(found, parent, [*own, *members], kind)
            if kind.fits(whole.group(tree)):
                yield whole, used
                break


def _together(
    found: Mapping[_At, Module], parent: Name, members: list[_At], kind: Kind
) -> tuple[Module, list[_At]]:
    children = {weight.name.split("/")[0] for weight in kind.weights if "/" in weight.name}
    whole = Module(parent, {}, last=parent[-1] if parent else "")
    used = []
    for at in members:
        child = _part_of(at[0]) if at[0] != parent else ""
        if child and child not in children:
            continue
        used.append(at)
        prefix = f"{child}/" if child else ""
        whole.tensors.update({f"{prefix}{stored}": path for stored, path in found[at].tensors.items()})
    return whole, sorted(used, key=lambda at: at == (parent, ""))


def _part_of(name: Name) -> str:
    match = _PROJECTION.fullmatch(name[-1])
    return match[1] or match[2] if match else name[-1]


def _as_layer(tree: Tree, module: Module, framework: str) -> Module:
    """Return the module under its layer's name, with what containers say of it."""
    path = next(iter(module.tensors.values()))
    about = _about(tree, path[:-1])
    if framework == "tensorflow" and len(module.name) > 1 and _CELL.fullmatch(module.last):
        outer = _about(tree, path[:-2])
        about = About(about.cls or outer.cls, {**outer.settings, **about.settings})
        return module._replace(name=module.name[:-1], about=about)
    return module._replace(about=about)


def _about(tree: Tree, path: Path) -> About:
    container = tree.containers.get(path)
    if container is None or container.kind != "module":
        return NOT_TOLD
    settings = container.state if isinstance(container.state, dict) else {}
    return About((container.name or "").rpartition(".")[2], settings)


def narrowed(kinds: tuple[Kind, ...], group: Mapping[str, Leaf], about: About) -> tuple[Kind, ...]:
    """Return the kinds that are left by what the file says of the module, and where two come to the same."""
    named = tuple(kind for kind in kinds if kind.name == _CLASSES.get(about.cls))
    if named:
        return named[:1]
    if about.settings.get("reset_after") is True:
        kinds = tuple(kind for kind in kinds if kind.name != "gru_reset_before")
    if {kind.name for kind in kinds} == {"convolution", "depthwise"} and not _matters(kinds[0], group):
        kinds = tuple(kind for kind in kinds if kind.name == "convolution")
    return kinds


def _matters(kind: Kind, group: Mapping[str, Leaf]) -> bool:
    """Say whether a kernel is another tensor as a depthwise convolution's than as a convolution's.

    Between [H, W, 1, M] and [M, 1, H, W] the two are one permutation. A kernel [H, W, C, M] with M > 1 is
    taken for a convolution's: the other would have another shape, so that nothing loads it by mistake.
    """
    weight = max(group.values(), key=lambda leaf: len(leaf.shape)).shape
    if kind.framework == "torch":
        return weight[0] > 1
    bias = [leaf.shape[0] for leaf in group.values() if len(leaf.shape) == 1]
    return weight[-2] > 1 and (weight[-1] == 1 or bool(bias))
