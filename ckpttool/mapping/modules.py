"""Groups a tree's tensors by module, as layer kinds know them: what stands together, under which names.

Sources: torch/nn/modules/rnn.py (one module keeps `weight_ih_l0`, `weight_ih_l0_reverse`, `weight_ih_l1`);
keras/src/layers/attention/multi_head_attention.py (`_query_dense`, ..., called `query`, ... and
`attention_output`); keras/src/layers/rnn/rnn.py and bidirectional.py (`cell`, `forward_layer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping.kinds import COMPOSED, IN_OUT, OUT_IN, ROW_BIAS, Kind, oriented
from ckpttool.mapping.kinds import asked as asked_for
from ckpttool.tree import Tree

Name = tuple[str, ...]
_PART = re.compile(r"(?P<stored>(?:weight|bias)_(?:ih|hh|hr))_(?P<part>l\d+(?:_reverse)?)")
# What holds a recurrent layer's variables: its cell, by attribute or by the name of its class.
_CELL = re.compile(r"cell|(?:basic_)?(?:lstm|gru|simple_rnn|rnn)_cell(?:_\d+)?")
_PROJECTION = re.compile(r"_?(query|key|value|output)(?:_dense)?|attention_(output)")
_NORMS = ("layer_norm", "layer_norm_images")
# A layer and its tensor in one word, of a program that keeps parameters and no layers: `fc1_weight`.
_JOINED = re.compile(r"(?P<layer>.+)_(?P<stored>weights?|kernel|bias(?:es)?|embeddings|gamma|beta|[wbWB])")
# A tensor and its layer's number: `W1` beside `b1`.
_COUNTED = re.compile(r"(?P<stored>[wbWB]|weights?|bias)_?(?P<number>\d{1,4})", re.ASCII)
# Short names of a matrix and a bias, as each framework's layers call them.
_SHORT = {
    "torch": {"w": "weight", "b": "bias", "weights": "weight", "kernel": "weight", "biases": "bias"},
    "tensorflow": {"w": "w", "b": "b", "weight": "kernel"},
}
# The kinds of the frameworks' own classes. Wrappers and containers, which have no tensors, are not here.
_CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("Dense", "EinsumDense", "Linear", "LazyLinear", "NonDynamicallyQuantizableLinear"), ("dense",)
    ),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), ("embedding",)),
    "PReLU": ("prelu",),
    **dict.fromkeys(("LayerNorm", "LayerNormalization", "GroupNorm", "GroupNormalization"), _NORMS),
    **{f"InstanceNorm{n}d": ("layer_norm", "batch_norm") for n in (1, 2, 3)},
    **dict.fromkeys(("RMSNorm", "RMSNormalization"), ("rms_norm",)),
    **dict.fromkeys(("BatchNormalization", "SyncBatchNormalization", "SyncBatchNorm"), ("batch_norm",)),
    "BatchNormalizationV1": ("batch_norm",),
    **{f"BatchNorm{n}d": ("batch_norm",) for n in (1, 2, 3)},
    **{f"{name}{n}D": ("convolution",) for n in (1, 2, 3) for name in ("Conv", "Convolution")},
    **{f"{name}{n}DTranspose": ("convolution",) for n in (1, 2, 3) for name in ("Conv", "Convolution")},
    **{f"Conv{n}d": ("convolution", "depthwise") for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": ("convolution",) for n in (1, 2, 3)},
    **{f"Depthwise{name}{n}D": ("depthwise",) for n in (1, 2) for name in ("Conv", "Convolution")},
    **{f"Separable{name}{n}D": ("separable",) for n in (1, 2) for name in ("Conv", "Convolution")},
    **dict.fromkeys(("LSTM", "LSTMCell", "CuDNNLSTM", "LSTMV1", "LSTMV2", "BasicLSTMCell"), ("lstm",)),
    **dict.fromkeys(("GRU", "GRUCell", "CuDNNGRU", "GRUV1", "GRUV2"), ("gru", "gru_reset_before")),
    **dict.fromkeys(("RNN", "RNNCell", "SimpleRNN", "SimpleRNNCell", "BasicRNNCell"), ("simple_rnn",)),
    **dict.fromkeys(("MultiHeadAttention", "MultiheadAttention"), ("attention",)),
}
# Classes that hold other layers, whose tensors they may be said to have.
_HOLDERS = frozenset(
    (
        "Bidirectional",
        "TimeDistributed",
        "RNN",
        "StackedRNNCells",
        "Sequential",
        "Functional",
        "SpectralNormalization",
    )
)
# What a live model's own classes are called by their framework's base (agents/skeleton/factory.py).
_BASES = frozenset(("Module", "Layer", "Model"))
# GPT-2's x @ W, in Transformers (transformers/pytorch_utils.py, formerly modeling_utils.py, and
# modeling_tf_utils.py). agents/skeleton/factory.py names the classes of live models so.
_IN_OUT_CLASSES = {
    "transformers.pytorch_utils.Conv1D": IN_OUT,
    "transformers.modeling_utils.Conv1D": IN_OUT,
    "transformers.modeling_tf_utils.TFConv1D": ROW_BIAS,
}
# A live model's dense layers with the orientation of the other framework, as a call of them shows.
LINEAR_IN_OUT, DENSE_OUT_IN = "Linear [in, out]", "Dense [out, in]"
_TURNED = {LINEAR_IN_OUT: IN_OUT, DENSE_OUT_IN: OUT_IN}
# The setting that names a class of a program's own whose call nobody compared with its base's.
OWN_CALL = "(own call)"


class About(NamedTuple):
    """What the file says of a module besides its tensors: its class and plain settings.

    `own` says that the class is a program's, and not one of a framework.
    """

    cls: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})
    own: bool = False


NOT_TOLD = About()


def about_class(name: str, settings: Mapping[str, Any]) -> About:
    """Return what is known of a module whose class has this full name in Python."""
    full = re.sub(r"___torch_mangle_\d+\.", "", name.removeprefix("__torch__."))
    return About(full, settings, own=not full.startswith("torch."))._replace(
        cls=full if full in _IN_OUT_CLASSES else full.rpartition(".")[2]
    )


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


def modules(
    tree: Tree,
    framework: str,
    asked: Mapping[str, Callable[[str], bool]],
    described: Mapping[Path, About] | None = None,
    named: Callable[[str], bool] | None = None,
) -> Iterator[Module]:
    """Go through the modules in the order of the tree, those that are several below one as one.

    `described` has for tensors of whole modules what the file says of their module. `named` says of which
    names somebody states a kind: `fc1_weight` is a tensor of the layer `fc1` then.

    `asked` says by kind for which modules somebody wants a kind that is not recognised by itself.
    """
    found = _by_name(tree, framework, named or (lambda _: False))
    composed: dict[_At, Module] = {}
    taken: set[_At] = set()
    for whole, members in _composed(tree, found, framework, asked):
        composed[members[0]] = whole
        taken.update(members)
    for at, module in found.items():
        if at in composed or at not in taken:
            yield _as_layer(tree, composed.get(at, module), framework, described or {})


_At = tuple[Name, str]


def joined(name: str) -> tuple[str, str] | None:
    """Return the layer and the tensor that one word names, None for other words.

    `fc1_weight` is the weight of `fc1`, `W1` that of `layer1`.
    """
    found = _JOINED.fullmatch(name)
    if found:
        return found["layer"], found["stored"]
    found = _COUNTED.fullmatch(name)
    return (f"layer{found['number']}", found["stored"]) if found else None


def _by_name(tree: Tree, framework: str, named: Callable[[str], bool]) -> dict[_At, Module]:
    found: dict[_At, Module] = {}
    for path, shown in _tensors(tree, framework):
        *module, name = shown.removesuffix(":0").split("/")
        one = joined(name)
        if one is not None and named("/".join((*module, one[0]))):
            module, name = [*module, one[0]], one[1]
        if name in ("W", "B") or named("/".join(module)):
            name = _SHORT[framework].get(name.lower(), name)
        if framework == "tensorflow" and module[-1:] == ["vars"] and name.isdecimal():
            # Variables of a Keras layer that only have numbers stand beside those that have names.
            module, name = module[:-1], f"vars/{name}"
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


def _as_layer(tree: Tree, module: Module, framework: str, described: Mapping[Path, About]) -> Module:
    """Return the module under its layer's name, with what containers say of it."""
    # The module itself, not those that it is made of.
    stored = min(module.tensors, key=lambda name: name.count("/"))
    path = module.tensors[stored]
    if path in described:
        return module._replace(about=NOT_TOLD if "/" in stored else described[path])
    about = _about(tree, path[: -1 - stored.count("/")])
    if framework == "tensorflow" and len(module.name) > 1 and _CELL.fullmatch(module.last):
        outer = _about(tree, path[:-2])
        about = About(about.cls or outer.cls, {**outer.settings, **about.settings}, about.own)
        return module._replace(name=module.name[:-1], about=about)
    return module._replace(about=about)


def _about(tree: Tree, path: Path) -> About:
    container = tree.containers.get(path)
    if container is None or container.kind != "module":
        return NOT_TOLD
    settings = container.state if isinstance(container.state, dict) else {}
    name = container.name or _numbered_class(settings)
    own = ">" in str(settings.get("registered_name", ""))
    return About(name if name in _IN_OUT_CLASSES else name.rpartition(".")[2], settings, own)


def _numbered_class(settings: Mapping[str, Any]) -> str:
    """Return the class, in snake case, of a layer that Keras's file has by class and number."""
    above, _, name = str(settings.get("group", "")).rpartition("/")
    return re.sub(r"_\d+\Z", "", name) if above.rpartition("/")[2] in _LISTS else ""


# Groups of Keras's files that hold a model's layers by class and number (keras/src/saving/saving_lib.py).
_LISTS = frozenset(("layers", "_layers"))


def narrowed(
    kinds: tuple[Kind, ...], group: Mapping[str, Leaf], about: About, *, classes: bool = True
) -> tuple[Kind, ...]:
    """Return the kinds that are left by what the file says of the module, and where two come to the same.

    Where `classes` matter, a layer of a class that is no layer of those kinds keeps them with the reason why
    it is not converted.
    """
    named = _of_class(kinds, group, about)
    if named is not None:
        return named
    # What several modules make together has no class that would matter.
    classes = classes and not any("/" in name for name in group if not name.startswith("vars/"))
    why = _unknown_class(kinds, group, about) if classes else None
    if why is not None:
        return tuple(replace(kind, refused=why) if kind.refused is None else kind for kind in kinds)
    if about.settings.get("reset_after") is True:
        kinds = tuple(kind for kind in kinds if kind.name != "gru_reset_before")
    if {kind.name for kind in kinds} == {"convolution", "depthwise"} and not _matters(kinds[0], group):
        kinds = tuple(kind for kind in kinds if kind.name == "convolution")
    return kinds


def _of_class(kinds: tuple[Kind, ...], group: Mapping[str, Leaf], about: About) -> tuple[Kind, ...] | None:
    """Return the kinds of the module's class, None where the class does not decide."""
    if about.cls in _IN_OUT_CLASSES:
        able = (*kinds, *oriented(group, kinds[0].framework))
        return tuple(kind for kind in able if kind.form == _IN_OUT_CLASSES[about.cls])[:1] or None
    if about.cls in _TURNED:
        able = oriented(group, kinds[0].framework)
        return tuple(kind for kind in able if kind.form == _TURNED[about.cls]) or None
    if about.own or about.cls not in _CLASSES:
        return None
    if about.cls == "EinsumDense":
        return _einsum(group, about) or None
    named = tuple(kind for kind in kinds if kind.name in _CLASSES[about.cls])
    named = named or tuple(
        kind for kind in asked_for(group, kinds[0].framework) if kind.name in _CLASSES[about.cls]
    )
    if not named:
        return None
    if (groups := about.settings.get("groups")) is not None and named[0].framework == "torch":
        # Depthwise convolutions of Keras have no bound on their channels; of PyTorch they are groups.
        weight = max(group.values(), key=lambda leaf: len(leaf.shape)).shape
        depthwise = groups == about.settings.get("in_channels") and groups > 1 and weight[1] == 1
        wanted = "depthwise" if depthwise else "convolution"
        named = tuple(kind for kind in named if kind.name == wanted) or named
    if about.settings.get("reset_after") is True:
        named = tuple(kind for kind in named if kind.name != "gru_reset_before") or named
    if about.settings.get("reset_after") is False:
        named = tuple(kind for kind in kinds if kind.name == "gru_reset_before") or named
    why = _other_function(about)
    if why is not None:
        named = tuple(replace(kind, refused=why) for kind in named)
    return named[:1] if len({kind.name for kind in named}) == 1 else named


def _other_function(about: About) -> str | None:
    """Return why a layer of a known class computes what the other framework's does not."""
    settings = about.settings
    if settings.get("rms_scaling") is True:
        return "rms_scaling divides by the deviation and subtracts no mean, which no layer of PyTorch does"
    if about.cls.startswith("ConvTranspose") and settings.get("groups", 1) != 1:
        return "a transposed convolution of several groups has no equivalent in Keras"
    if settings.get("quantization_config") is not None or settings.get("quantization_mode") is not None:
        return "its numbers are quantised"
    return None


_EQUATION = re.compile(
    r"(?P<more>(?:\.\.\.)?[a-zA-Z]*)(?P<in>[a-zA-Z]),(?P<kernel>[a-zA-Z]{2})->(?P<made>\S*)(?P<out>[a-zA-Z])"
)


def _einsum(group: Mapping[str, Leaf], about: About) -> tuple[Kind, ...]:
    """Return the kinds of an EinsumDense: its equation or its bias says which axis has the outputs."""
    able = oriented(group, "tensorflow")
    found = _EQUATION.fullmatch(str(about.settings.get("equation", "")).replace(" ", ""))
    if found is not None and found["made"] == found["more"] and found["in"] != found["out"]:
        orders = {found["in"] + found["out"]: "", found["out"] + found["in"]: OUT_IN}
        form = orders.get(found["kernel"])
        return tuple(kind for kind in able if kind.form == form) or _refused(able, _EINSUM)
    if about.settings.get("equation") is not None:
        return _refused(able, _EINSUM)
    return able


_EINSUM = "its equation is that of no dense layer"


def _refused(kinds: tuple[Kind, ...], why: str) -> tuple[Kind, ...]:
    return tuple(replace(kind, refused=why) for kind in kinds[:1])


def _unknown_class(kinds: tuple[Kind, ...], group: Mapping[str, Leaf], about: About) -> str | None:
    """Return why a class decides against every kind, None where it is not known or holds other layers."""
    if not about.cls or (about.cls in _HOLDERS and not about.own):
        return None
    if about.cls == "Module" and kinds[0].framework == "tensorflow":
        return None  # a tf.Module: TensorFlow itself has no layers, and Sonnet's are this
    name = "the model's own" if about.cls in _BASES else about.cls
    if not about.own and about.cls in _CLASSES:
        return f"its tensors are not those of its class, {about.cls}"
    able = list(dict.fromkeys(kind.option for kind in (*kinds, *oriented(group, kinds[0].framework))))
    return f"its class ({name}) is no layer that is known; --kind '{TITLE}={able[0]}' converts it as one" + (
        f", or {' or '.join(able[1:])}" if able[1:] else ""
    )


def misfit(about: About, framework: str) -> tuple[Kind, ...]:
    """Return a refused kind for tensors that no kind has and that are of a class which is a layer's."""
    if about.own or about.cls not in _CLASSES:
        return ()
    return (Kind("misfit", framework, (), refused=f"its tensors are not those of its class, {about.cls}"),)


# Stands in a reason for the name of the layer.
TITLE = "\0"


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
