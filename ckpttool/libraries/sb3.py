"""Stable-Baselines3, its contrib package and RL Zoo."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ckpttool.core import deferred, filesystem
from ckpttool.core.activations import NO_IMAGE, WeightUse, framework_order
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.kinds import TORCH_ACTIVATIONS
from ckpttool.core.optimizers import ADAM, RMSPROP
from ckpttool.core.sidecar import (
    NO_ACTIVATIONS,
    NO_BOUNDS,
    STATISTICS_UNKNOWN,
    LedgerEntry,
    Scores,
    Sidecar,
    unknown_fact,
)
from ckpttool.core.sidecar_parsing import are_arguments
from ckpttool.core.source import Shape
from ckpttool.core.tree import Alias, Leaf, Path, PathStep, Record, Tree, ValueLeaf, attr, index, key
from ckpttool.encodings import pickle_values
from ckpttool.encodings.pickle_values import Global, PickleObject, dumps
from ckpttool.formats import pickles
from ckpttool.libraries import optimizers_read, recurrent_layers, schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import TORCH_CLASSES, LayoutTable, called_activation, read_pickled_module
from ckpttool.libraries.schema import (
    DICT_UNKNOWN,
    DISCRETE_CHOICE,
    AgentMetadata,
    AgentNetwork,
    BatchNorm,
    Choices,
    EncoderInput,
    ObservationNormalizer,
    PolicyEncoder,
    RecognizedAgent,
    list_kernel_shapes,
    make_settings_note,
    matches_action_map,
    require_action_bounds,
)
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    find_quantiles,
    has_q_policy,
    has_value_network,
    is_gaussian,
    plan_torch_file,
    require_activation,
)
from ckpttool.mapping.layer_kinds import kernel_permutation
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Move, Plan, Settings, ToTensor

_POLICY, _DATA = key("policy"), attr("data")
_TEXT = deferred.compile(r"[-+\w.]+")
# By the last part of a class name in torch.nn or TensorFlow.
_ACTIVATIONS = {
    **TORCH_ACTIVATIONS,
    "relu": "relu",
    "tanh": "tanh",
    "elu": "elu",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
}
_IMAGE_AXES = 3
_MOST_PIXELS = 1 << 18
IMAGES = "image observations"
"""Entry among a network's unplaced tensors if its observations are images."""
_UNKNOWN_IMAGES = f"{IMAGES} whose bounds are unknown: only those from 0 to 255 are divided by 255"


def add_settings_metadata(known: AgentMetadata, tree: Tree) -> AgentMetadata:
    """Return the facts with the spaces' bounds and the activation from the settings.

    Sources: gymnasium/spaces/box.py and gym/spaces/box.py (`low`, `high`);
    stable_baselines3/common/save_util.py and stable_baselines/common/save_util.py (`data_to_json`: attributes
    as text beside the pickle); stable_baselines3/common/preprocessing.py (`is_image_space`,
    `preprocess_obs`).
    """
    low, high = (read_bound(tree, end) for end in ("low", "high"))
    known = known.bounded("data/action_space", low or (), high or ()) or known
    space = _read_observation_space(tree)
    if space is not None:
        known = known.read("data/observation_space", observation_space=space)
    # common/preprocessing.py, preprocess_obs: Discrete and MultiDiscrete observations are one-hot.
    parts = _list_space_parts(tree).items()
    discrete = {name or schema.OBSERVATION: _read_part_choices(tree, name, part) for name, part in parts}
    if one_hot := {name: part for name, part in discrete.items() if part is not None}:
        known = known.read("data/observation_space", one_hot=one_hot)
    name = read_activation(tree)
    if name is not None:
        known = known.read("data/policy_kwargs", hidden=name)
    kind = _space_class(tree, "observation_space")
    if kind.endswith(".Dict"):
        known = known.lacking(
            unknown_fact("architecture", "how the parts of a Dict observation are combined")
        )
    return known


def read_bound(tree: Tree, end: str) -> tuple[float, ...] | None:
    """Return the actions' `low` or `high`; None if it is incomplete or infinite."""
    numbers = _read_space_bound(_member(tree, "action_space", end))
    return numbers if numbers and all(map(math.isfinite, numbers)) else None


def _read_space_bound(leaf: Leaf | ValueLeaf | None) -> tuple[float, ...]:
    """Return the numbers of a space's `low` or `high`; none if they are incomplete."""
    if isinstance(leaf, Leaf) and leaf.dtype == "uint8" and leaf.size <= _MOST_PIXELS:
        return tuple(map(float, bytes(leaf.read())))
    if isinstance(leaf, Leaf):
        return schema.read_numbers(leaf)
    text = leaf.value if isinstance(leaf, ValueLeaf) else None
    return _parse_numbers(text) if isinstance(text, str) and "..." not in text else ()


def _read_observation_space(tree: Tree) -> schema.ObservationSpace | None:
    """Return the bounds of the observations, by the names of a Dict's parts."""
    library = _space_class(tree, "observation_space").partition(".")[0]
    if (_DATA, key("unknown_observation_bounds")) in tree:
        return None
    parts = {
        name or schema.OBSERVATION: (
            _read_space_bound(tree.get((*part, attr("low"))) or tree.get((*part, key("low")))),
            _read_space_bound(tree.get((*part, attr("high"))) or tree.get((*part, key("high")))),
        )
        for name, part in _list_space_parts(tree).items()
    }
    return schema.make_observation_space(library, parts)


def _read_part_choices(tree: Tree, part: str, path: Path) -> Choices | None:
    """Return the discrete observations of a Dict's part, or of the whole space (""); None for others."""
    if not part:
        return _read_space(tree, "observation_space")
    space = tree.containers.get(path)
    members = {name: tree.get((*path, attr(name))) for name in ("n", "nvec", "start")}
    return _make_choices(str(space.name).rpartition(".")[2], members) if space is not None else None


def _parse_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers in NumPy's text for an array, e.g. `[-1. -1.]`; none for other text."""
    try:
        return tuple(float(word) for word in _TEXT.findall(text))
    except ValueError:
        return ()


def read_activation(tree: Tree) -> str | None:
    """Return the activation named in `policy_kwargs`; an unknown class keeps its full name."""
    leaf = _member(tree, "policy_kwargs", "activation_fn")
    if leaf is None:
        leaf = _member(tree, "policy_kwargs", "act_fun")
    if leaf is None:
        # A custom function or class: a name that no supported activation has.
        return _read_partial(tree) or read_class_name(tree, "policy_kwargs", "activation_fn")
    if not isinstance(leaf, ValueLeaf) or not isinstance(leaf.value, Record | str):
        return str(leaf.value) if isinstance(leaf, ValueLeaf) else "?"
    full = leaf.value.name if isinstance(leaf.value, Record) else leaf.value.strip("<>'").split("'")[-1]
    is_known = full.startswith((TORCH_CLASSES, "tensorflow."))
    return _ACTIVATIONS.get(full.rpartition(".")[2], full) if is_known else full


def _read_partial(tree: Tree) -> str | None:
    """Return the activation of a functools.partial, with its arguments unless they change no number."""
    path = (_DATA, key("policy_kwargs"), key("activation_fn"))
    container = tree.containers.get(path)
    if container is None or container.name != "functools.partial":
        return None
    # functools.partial.__reduce__: the class, its arguments, its named arguments.
    state = (*path, attr("__state__"))
    values = {
        location[len(state) :]: leaf.value
        for location, leaf in tree.items()
        if isinstance(leaf, ValueLeaf) and location[: len(state)] == state
    }
    callee = values.get((index(0),))
    full = callee.name if isinstance(callee, Record) else "?"
    listed = [value for path, value in values.items() if path[:1] == (index(1),) and len(path) > 1]
    named = {
        str(location[1].value): value
        for location, value in values.items()
        if location[:1] == (index(2),) and len(location) > 1
    }
    function = called_activation(full, listed, named)
    if function is not None:
        return function
    texts = [*map(repr, listed), *(f"{name}={value!r}" for name, value in named.items())]
    shown = ", ".join((full.rpartition(".")[2], *texts))
    return f"functools.partial({shown})"


def read_class_name(tree: Tree, *names: str) -> str | None:
    """Return the full name of a class in the settings, None if there is none; `?` for an unknown name.

    cloudpickle stores a custom class by value: its name is among the arguments of its constructor call.
    """
    path = (_DATA, *(key(name) for name in names))
    leaf = tree.get(path)
    if isinstance(leaf, ValueLeaf):
        return leaf.value.name if isinstance(leaf.value, Record) else None
    below = [other for other in tree if other[: len(path)] == path]
    if not below:
        return None
    module, name = (
        _read_text(tree, (*path, attr("__module__")), (*path, key("__module__"))),
        _read_text(tree, (*path, attr("__args__"), index(1))),
    )
    return f"{module or '?'}.{name or '?'}"


def _read_text(tree: Tree, *paths: Path) -> str | None:
    values = (leaf.value for path in paths if isinstance(leaf := tree.get(path), ValueLeaf))
    return next((value for value in values if isinstance(value, str)), None)


def read_setting(tree: Tree, group: str, name: str, default: Any) -> Any:
    """Return the plain value of one entry in a group of settings."""
    leaf = _member(tree, group, name)
    return leaf.value if isinstance(leaf, ValueLeaf) else default


def has_box_actions(tree: Tree) -> bool:
    """Return whether the actions are bounded numbers, or their space is unknown."""
    kind = _space_class(tree, "action_space")
    return not kind or kind.endswith((".Box", "Box"))


def read_choices(tree: Tree, scores: Scores = "values") -> Choices | None:
    """Return the numbered actions of a Discrete or MultiDiscrete action space; None for others.

    The library gives the environment numbers from 0, whatever the space's `start` is.
    """
    choices = _read_space(tree, "action_space")
    return None if choices is None else choices._replace(starts=(0,) * len(choices.counts), scores=scores)


def read_binary_choices(tree: Tree) -> Choices | None:
    """Return the actions of a MultiBinary space (gymnasium/spaces/multi_binary.py); None for others."""
    if _space_class(tree, "action_space").rpartition(".")[2] != "MultiBinary":
        return None
    count = _read_whole(_member(tree, "action_space", "n"))
    return schema.make_binary_choices(*count) if len(count) == 1 and 0 < count[0] < _MOST_PIXELS else None


def _read_space(tree: Tree, space: str) -> Choices | None:
    kind = _space_class(tree, space).rpartition(".")[2]
    return _make_choices(kind, {name: _member(tree, space, name) for name in ("n", "nvec", "start")})


def _make_choices(kind: str, members: Mapping[str, Leaf | ValueLeaf | None]) -> Choices | None:
    """Return the discrete values of a space of this class; None for other or incomplete spaces.

    gymnasium/spaces/discrete.py and multi_discrete.py: `n`, `nvec` and `start`; files of Gym have no start.
    """
    count, counts, starts = (_read_whole(members[name]) for name in ("n", "nvec", "start"))
    if kind == "Discrete":
        return schema.make_choices(count, starts, single=True)
    return schema.make_choices(counts, starts, single=False) if kind == "MultiDiscrete" else None


def _read_whole(leaf: Leaf | ValueLeaf | None) -> tuple[int, ...]:
    """Return the whole numbers of an entry: a number, an array, or NumPy's text for an array."""
    value = leaf.value if isinstance(leaf, ValueLeaf) else None
    if isinstance(value, str) and "..." not in value:
        numbers = _parse_numbers(value)
        return tuple(map(int, numbers)) if all(number.is_integer() for number in numbers) else ()
    return schema.read_whole_numbers(leaf)


def read_image_scaling(tree: Tree) -> str | None:
    """Return the entry of images, which may be divided by 255, among the unplaced tensors, None for others.

    common/preprocessing.py, is_image_space: three axes of bytes; of other types only if images are not
    normalised.
    """
    shape = (_DATA, key("observation_space"), attr("_shape"))
    axes = sum(path[:3] == shape for path in tree)
    dtype = tree.get((_DATA, key("observation_space"), attr("dtype")))
    name = dtype.value.summary if isinstance(dtype, ValueLeaf) and isinstance(dtype.value, Record) else ""
    if axes != _IMAGE_AXES or name.startswith("f"):
        return None
    return _UNKNOWN_IMAGES if _is_image_space(tree, "", _shape(tree, shape)) is None else IMAGES


def _space_class(tree: Tree, name: str) -> str:
    """Return the class of a space, "" if the file does not contain it."""
    container = tree.containers.get((_DATA, key(name)))
    if container is not None and container.kind == "record":
        return container.name or ""
    leaf = tree.get((_DATA, key(name)))
    if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, Record):
        return leaf.value.name
    kind = tree.get((_DATA, key(name), key(":type:")))
    text = kind.value if isinstance(kind, ValueLeaf) else None
    return text.strip("<>").split("'")[-2] if isinstance(text, str) and text.count("'") > 1 else ""


def _member(tree: Tree, group: str, name: str) -> Leaf | ValueLeaf | None:
    """Return an attribute of an unpickled object, or an entry stored as JSON."""
    steps: tuple[PathStep, ...] = (attr(name), key(name))
    return next((leaf for step in steps if (leaf := tree.get((_DATA, key(group), step))) is not None), None)


_STATE_DICT, _CONSTRUCTOR = key("state_dict"), key("data")
_KWARGS = (_DATA, key("policy_kwargs"))
_SPACES = ("observation_space", "action_space")
# Attributes of a pickled policy under other names than the arguments of its constructor.
_ATTRIBUTES: Mapping[str, Path] = {"_squash_output": (key("squash_output"),), "actor_kwargs": ()}
_MODULE_STATE = frozenset(("_modules", "_parameters", "_buffers", "optimizer", "training", "action_dist"))
# Modules that together only a whole policy of the library has: PPO and A2C; SAC; TD3; DQN; QR-DQN.
_WHOLE_POLICIES = (
    ("action_net.", "value_net."),
    ("actor.latent_pi.", "actor.mu.", "critic.qf0."),
    ("actor.mu.0.", "critic.qf0."),
    ("q_net.q_net.", "q_net_target.q_net."),
    ("quantile_net.quantile_net.", "quantile_net_target.quantile_net."),
)
_SPACE_ARRAY = deferred.compile(r"(?:.+\.)?_?(observation_space|action_space)\.(.+)")
_ACTOR_ALONE = deferred.compile(r"(?:mu|latent_pi)\.\d")


class PolicyAlone(NamedTuple):
    """A policy in the form of an algorithm's file, with the path in its own file of every entry."""

    tree: Tree
    sources: Mapping[Path, Path]


def read_policy_alone(tree: Tree) -> PolicyAlone | None:
    """Return a policy that was saved by its own `save`, as a state_dict or as a whole module; else None.

    Sources in github.com/DLR-RM/stable-baselines3: common/policies.py, BaseModel.save (a state_dict, and as
    `data` the constructor's arguments) and the attributes of BasePolicy; `_get_constructor_parameters` of
    every policy, in which an actor has its features extractor itself instead of a class.
    """
    module = read_pickled_module(tree)
    if module is not None:
        tensors = {(_POLICY, *target): path for target, path in module.sources.items()}
        whole = _is_whole_policy(str(entry[0].value) for entry in module.state)
        return _view(tree, tensors, ()) if whole else None
    saved = any(path[:1] == (_CONSTRUCTOR,) for path in tree) and any(p[:1] == (_STATE_DICT,) for p in tree)
    base: Path = (_STATE_DICT,) if saved else ()
    named = (path for path in tree if path and path[:-1] == base and path[-1].kind == "key")
    names = {path: str(path[-1].value) for path in named}
    alone = saved and any(map(_ACTOR_ALONE.match, names.values()))
    if not alone and not _is_whole_policy(names.values()):
        return None
    tensors = {}
    for path, name in names.items():
        # A converted module has the arrays of its spaces among its tensors.
        space = _SPACE_ARRAY.fullmatch(name)
        target = (_DATA, key(space[1]), key(space[2])) if space else (_POLICY, key(name))
        tensors[(_POLICY, key(f"actor.{name}")) if alone else target] = path
    return _view(tree, tensors, (_CONSTRUCTOR,))


def _is_whole_policy(names: Iterable[str]) -> bool:
    known = tuple(names)
    return any(
        all(any(name.startswith(module) for name in known) for module in modules)
        for modules in _WHOLE_POLICIES
    )


def _view(tree: Tree, tensors: Mapping[Path, Path], settings: Path) -> PolicyAlone:
    """Return the tensors with the settings below a path: arguments of a constructor, or attributes."""
    paths = {path: path for path in tree} | {
        a.path: path for path, rest in tree.aliases.items() for a in rest
    }
    sources = dict(tensors)
    for path, source in paths.items():
        target = _setting_place(path, settings)
        if target is not None:
            sources.setdefault(target, source)
    leaves = {target: tree[source] for target, source in sources.items()}
    containers = {
        target: container
        for path, container in tree.containers.items()
        if (target := _setting_place(path, settings)) is not None
    }
    extractor = tree.containers.get((*settings, key("features_extractor")))
    for target, record in (
        ((*_KWARGS, key(_EXTRACTOR_CLASS)), extractor if settings else None),
        ((_DATA, key("policy_class")), None if settings else tree.containers.get(())),
    ):
        if record is not None and record.name:
            leaves[target] = ValueLeaf(Record(record.name))
    places = {source: target for target, source in tensors.items()}
    aliases = {
        places[path]: tuple(Alias((_POLICY, *alias.path[len(path) - 1 :]), alias.key) for alias in rest)
        for path, rest in tree.aliases.items()
        if settings and path in places and places[path][0] == _POLICY
    }
    return PolicyAlone(Tree(leaves, aliases, containers), sources)


def _setting_place(path: Path, settings: Path) -> Path | None:
    """Return the path of a setting in an algorithm's file; None for other entries."""
    cut = len(settings)
    if len(path) <= cut or path[:cut] != settings:
        return None
    first, rest = str(path[cut].value), path[cut + 1 :]
    if first in _SPACES:
        return (_DATA, key(first), *rest)
    if settings:
        return (*_KWARGS, key(first), *rest)
    if first in _MODULE_STATE:
        return None
    return (*_KWARGS, *_ATTRIBUTES.get(first, (key(first),)), *rest)


_TENSORS = {"ra_mean": "mean", "ra_var": "var", "scale": "scale", "bias": "offset"}
_COUNT = "steps"
_EPSILON = 1e-3


class PolicyNorms(NamedTuple):
    """The norms of a policy, their moves, the names of all their tensors, and the assumptions."""

    norms: tuple[BatchNorm, ...] = ()
    moves: tuple[Move, ...] = ()
    names: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()


def find_policy_norms(tree: Tree, component: str) -> PolicyNorms:
    """Return the policy's batch renormalisation, empty if it has none or an unsupported one.

    Sources in github.com/Stable-Baselines-Team/stable-baselines3-contrib: sb3_contrib/crossq/policies.py (one
    before every linear layer, `mu` included; `batch_norm_eps` is 0.001 unless `policy_kwargs` changes it) and
    sb3_contrib/common/torch_layers.py (BatchRenorm: evaluation uses the running statistics).
    """
    modules = _list_chain_modules(tree, component)
    norms = [name for name, group in modules.items() if "ra_mean" in group]
    layers = [name for name in modules if name not in norms]
    if not norms or any(set(modules[name]) != {*_TENSORS, _COUNT} for name in norms):
        return PolicyNorms()
    order = list(modules)
    # Each is followed by the layer that it normalises.
    before = [order[order.index(name) + 1 : order.index(name) + 2] for name in norms]
    if before != [[name] for name in layers[: len(norms)]]:
        return PolicyNorms()
    epsilon_setting = read_setting(tree, "policy_kwargs", "batch_norm_eps", None)
    epsilon = epsilon_setting if isinstance(epsilon_setting, float) else _EPSILON
    sentence = f"batch renormalisation with epsilon {epsilon:g}: default of library stable_baselines3"
    return PolicyNorms(
        tuple(BatchNorm(number, epsilon) for number in range(len(norms))),
        tuple(
            Move(modules[name][stored], (*schema.batch_norm_path(component, number), attr(canonical)), KEEP)
            for number, name in enumerate(norms)
            for stored, canonical in _TENSORS.items()
        ),
        frozenset(tree.names[path] for name in norms for path in modules[name].values()),
        () if isinstance(epsilon_setting, float) else (sentence,),
    )


def _list_chain_modules(tree: Tree, component: str) -> dict[str, dict[str, Path]]:
    """Return the modules of a policy's chain in file order, with their tensors."""
    pattern = re.compile(rf"{component}\.(latent_pi\.\d+|mu(?:\.0)?)\.(\w+)")
    modules: dict[str, dict[str, Path]] = {}
    for path in tree:
        if len(path) == 2 and path[0] == _POLICY and (name := pattern.fullmatch(str(path[1].value))):
            modules.setdefault(name[1], {})[name[2]] = path
    return modules


_SPACE = (_DATA, key("observation_space"))
_LIBRARY = "stable_baselines3.common.torch_layers."
_EXTRACTORS = {f"{_LIBRARY}{name}" for name in ("NatureCNN", "CombinedExtractor", "FlattenExtractor")}
_CONVOLUTIONS = ("cnn.0", "cnn.2", "cnn.4")
# Kernel sizes and strides of the convolutions of Mnih et al. 2015.
_NATURE_SIZES, NATURE_STRIDES = (8, 4, 3), (4, 2, 1)
_LINEAR = "linear.0"
_INSIDE = "features_extractor."
# Each part is searched in the whole tree, and a file may contain any number.
_MOST_PARTS = 100
_LSTM = "lstm_actor."
_ASSUMED = "image encoder NatureCNN (strides 4, 2, 1; ReLU): default of library stable_baselines3"

NamedTensors = Mapping[str, Path]


def find_encoder(tree: Tree, component: str, unplaced: tuple[str, ...]) -> PolicyEncoder | None:
    """Return the encoder before a policy's layers; None if there is none or it is unknown.

    `unplaced` are the names of the policy's tensors that are not in its layers. Sources in
    github.com/DLR-RM/stable-baselines3: stable_baselines3/common/torch_layers.py (NatureCNN, whose
    convolutions have strides 4, 2 and 1; CombinedExtractor, which concatenates the parts of a Dict in the
    space's order and flattens all but images), common/preprocessing.py (`preprocess_obs`: images are divided
    by 255), common/vec_env/vec_transpose.py (policies receive images with the channels first). LSTM:
    github.com/Stable-Baselines-Team/stable-baselines3-contrib, sb3_contrib/common/recurrent/policies.py.
    """
    spaces = _read_space_shapes(tree)
    tensors = _list_encoder_tensors(tree, component)
    own = {name: path for name, path in tensors.items() if not name.startswith(_LSTM)}
    several = len(spaces) > 1 or "" not in spaces
    if not spaces or not _is_library_extractor(tree):
        return None
    streams: list[EncoderInput] = []
    moves: list[Move] = []
    for name, shape in spaces.items():
        prefix = f"extractors.{name}." if several else ""
        mine = {name.removeprefix(prefix): own.pop(name) for name in list(own) if name.startswith(prefix)}
        stream = _read_input(tree, name, shape, mine)
        if stream is None:
            return None
        streams.append(stream)
        moves += move_encoder(component, stream.name, (*_CONVOLUTIONS, _LINEAR) if mine else (), mine)
    recurrent = {name.removeprefix(_LSTM): path for name, path in tensors.items() if name.startswith(_LSTM)}
    read = recurrent_layers.read_recurrent_layers(tree, component, recurrent, "torch")
    normed = find_policy_norms(tree, component)
    if own or read is None or not (moves or recurrent or several or normed.norms or IMAGES in unplaced):
        return None
    covered = {tree.names[path] for path in tensors.values()} | {IMAGES, _UNKNOWN_IMAGES} | normed.names
    cells, turned = read
    return PolicyEncoder(
        tuple(streams),
        cells,
        normed.norms,
        (*moves, *turned, *normed.moves),
        frozenset(covered) & frozenset(unplaced),
        (*((_ASSUMED,) if moves else ()), *normed.assumed),
    )


def _is_library_extractor(tree: Tree) -> bool:
    """Return whether the features extractor's class is the library's own."""
    group = (_DATA, key("policy_kwargs"), key("features_extractor_class"))
    # A custom class is pickled with everything that it consists of.
    leaves = [leaf for path, leaf in tree.items() if path[: len(group)] == group]
    names = [
        leaf.value.name for leaf in leaves if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, Record)
    ]
    return not leaves or (len(leaves) == 1 and set(names) <= _EXTRACTORS and bool(names))


def _read_space_shapes(tree: Tree) -> dict[str, Shape]:
    """Return the shapes of a Dict's parts by name, or of a single space by ""; none for unsupported ones.

    A discrete observation is a one-hot row.
    """
    shapes: dict[str, Shape] = {}
    for name, part_path in _list_space_parts(tree).items():
        space = tree.containers.get(part_path)
        if space is not None and str(space.name).endswith((".Box", ".MultiBinary")):
            shapes[name] = _shape(tree, (*part_path, attr("_shape")))
        elif (choices := _read_part_choices(tree, name, part_path)) is not None:
            shapes[name] = (sum(choices.counts),)
        else:
            return {}
    return shapes


def _list_space_parts(tree: Tree) -> dict[str, Path]:
    """Return the places of a Dict's parts by name, or that of another space by ""."""
    parts = (*_SPACE, attr("spaces"))
    names = dict.fromkeys(str(p[3].value) for p in tree if p[:3] == parts and len(p) > len(parts))
    if len(names) > _MOST_PARTS:
        return {}
    return {name: (*parts, key(name)) for name in names} or {"": _SPACE}


def _shape(tree: Tree, location: Path) -> Shape:
    leaves = [tree[path] for path in tree if path[: len(location)] == location and len(path) > len(location)]
    sizes = [leaf.value for leaf in leaves if isinstance(leaf, ValueLeaf) and type(leaf.value) is int]
    return tuple(sizes) if len(sizes) == len(leaves) else ()


def _list_encoder_tensors(tree: Tree, component: str) -> dict[str, Path]:
    """Return the tensors before the policy's layers: extractor tensors by name, an LSTM's by full name."""
    names: dict[str, Path] = {
        str(path[1].value): path for path in tree if len(path) == 2 and path[0] == _POLICY
    }
    # A Q-network's component is `critic` in the canonical tree; DQN and QR-DQN name their modules otherwise.
    modules = [component, *(component.replace("critic", name) for name in ("q_net", "quantile_net"))]
    prefixes = [f"{module}.features_extractor." for module in modules]
    for prefix in (*prefixes, "pi_features_extractor.", "features_extractor."):
        inside = {name.removeprefix(prefix): path for name, path in names.items() if name.startswith(prefix)}
        if inside:
            break
    return inside | {name: path for name, path in names.items() if name.startswith(_LSTM)}


def _read_input(tree: Tree, part: str, shape: Shape, tensors: NamedTensors) -> EncoderInput | None:
    """Return the encoder of a Dict's part, or of the whole space (""), None if it is not the library's.

    An extractor without tensors flattens. An image whose bounds the file does not show is unknown then.
    """
    if not shape:
        return None
    name, divided = part or schema.OBSERVATION, 1.0
    image = _is_image_space(tree, part, shape)
    if image is not False and read_setting(tree, "policy_kwargs", "normalize_images", True) is not False:
        divided = 1 / 255
    if not tensors and len(shape) < _IMAGE_AXES:
        return EncoderInput(name, shape)
    if not tensors:
        return None if image is None else EncoderInput(name, shape, divided, flattened=image)
    modules = (*_CONVOLUTIONS, _LINEAR)
    if set(tensors) != {f"{module}.{suffix}" for module in modules for suffix in ("weight", "bias")}:
        return None
    if not fits_nature_encoder(shape, [_leaf_shape(tree, tensors[f"{module}.weight"]) for module in modules]):
        return None
    return EncoderInput(name, shape, divided, NATURE_STRIDES, 1)


def _is_image_space(tree: Tree, part: str, shape: Shape) -> bool | None:
    """Return whether the library divides and transposes such images; None if the file does not show it.

    common/preprocessing.py, is_image_space: bytes of three axes, from 0 to 255.
    """
    part_path = _list_space_parts(tree).get(part, ())
    dtype = tree.get((*part_path, attr("dtype")))
    record = dtype.value if isinstance(dtype, ValueLeaf) else None
    if not isinstance(record, Record) or record.name != "numpy.dtype" or len(shape) != _IMAGE_AXES:
        return None
    if record.summary != "u1":
        return False
    bounds = [_read_space_bound(tree.get((*part_path, attr(end)))) for end in ("low", "high")]
    if (_DATA, key("unknown_observation_bounds")) in tree or {*map(len, bounds)} != {math.prod(shape)}:
        return None
    return {*bounds[0]} == {0.0} and {*bounds[1]} == {255.0}


def read_encoder_orders(tree: Tree) -> dict[Path, WeightUse]:
    """Return the orders that the library's own features extractors give to the layers of a policy.

    NatureCNN flattens the image of its last convolution; what follows an extractor takes vectors.
    """
    spaces = _read_space_shapes(tree)
    if not spaces or not _is_library_extractor(tree) or any(list_custom_classes(tree, *_CLASSES)):
        return {}
    several = len(spaces) > 1 or "" not in spaces
    names: dict[str, Path] = {
        str(path[1].value): path for path in tree if len(path) == 2 and path[0] == _POLICY
    }
    inside = {name: name[: name.index(_INSIDE) + len(_INSIDE)] for name in names if _INSIDE in name}
    uses: dict[Path, WeightUse] = {}
    for start in dict.fromkeys(inside.values()):
        own = {name.removeprefix(start): names[name] for name, prefix in inside.items() if prefix == start}
        for name, shape in spaces.items():
            prefix = f"extractors.{name}." if several else ""
            mine = {name.removeprefix(prefix): own.pop(name) for name in list(own) if name.startswith(prefix)}
            flattened = not mine and len(shape) >= _IMAGE_AXES
            if flattened or _read_input(tree, name, shape, mine) is None:
                return {}
            if mine:
                channels = _leaf_shape(tree, mine[f"{_CONVOLUTIONS[-1]}.weight"])[0]
                dense = mine[f"{_LINEAR}.weight"]
                parts = ((_leaf_shape(tree, dense)[1] // channels, channels),)
                uses[dense] = WeightUse(framework_order(parts, "torch"))
        if own:
            return {}
    after = {path: WeightUse(NO_IMAGE) for name, path in names.items() if name not in inside}
    return {**after, **uses} if uses else {}


def fits_nature_encoder(images: Shape, kernels: Sequence[Shape]) -> bool:
    """Return whether three convolutions and a dense layer, of these shapes, are the encoder of such images.

    Images are [channels, height, width], kernels in PyTorch's order.
    """
    if len(images) != 3:
        return False
    channels, height, width = images
    *convolutions, dense = kernels
    for kernel, size, stride in zip(convolutions, _NATURE_SIZES, NATURE_STRIDES, strict=True):
        if kernel[1:] != (channels, size, size):
            return False
        channels, height, width = kernel[0], (height - size) // stride + 1, (width - size) // stride + 1
    return dense[1:] == (channels * height * width,)


def _leaf_shape(tree: Tree, path: Path) -> Shape:
    leaf = tree[path]
    return leaf.shape if isinstance(leaf, Leaf) else ()


def move_encoder(
    component: str, stream: str, modules: Sequence[str], tensors: NamedTensors
) -> Iterator[Move]:
    """Yield the moves of an encoder's convolutions, and of the dense layer `linear.0`, from their modules."""
    for number, module in enumerate(modules):
        layer_path = schema.stream_layer_path(component, stream, number)
        turned = TRANSPOSE if module == _LINEAR else kernel_permutation(2)
        yield Move(tensors[f"{module}.weight"], (*layer_path, schema.KERNEL), turned)
        yield Move(tensors[f"{module}.bias"], (*layer_path, schema.BIAS), KEEP)


_STATISTICS = ("vecnormalize.pkl", "vec_normalize.pkl", "obs_rms.pkl")
STATISTICS_FILE = _STATISTICS[0]
_VEC_ENV = "stable_baselines3.common.vec_env.vec_normalize"
_MEAN_STD = Global("stable_baselines3.common.running_mean_std", "RunningMeanStd")
_VEC_EPSILON, _VEC_CLIP = 1e-8, 10.0
_UNLIMITED = 1e30  # stands for VecNormalize without clipping
_SETTINGS = ("config.yml", "args.yml")
_STEPS = deferred.compile(r"(.*)_(\d+_steps)")
_RUN = deferred.compile(r"(.+)_\d+")
# Environment arguments that only affect rendering.
_DRAWN = ("render_mode", "width", "height", "camera_id", "camera_name", "default_camera_config")
_MISSING = unknown_fact(
    "observation statistics",
    "the observation statistics used in training (config.yml contains normalize)",
    decides=True,
)


def companions(location: str) -> list[str]:
    """Return the files that RL-Zoo, callbacks and the hub store beside an agent, the nearest first.

    Statistics come before the settings that require them. Sources in github.com/DLR-RM/rl-baselines3-zoo:
    rl_zoo3/exp_manager.py (`_save_config`, `save_trained_model`: `<folder>/<env>/vecnormalize.pkl`,
    `config.yml`, `args.yml`), rl_zoo3/utils.py (`get_saved_hyperparams`: what `normalize` means).
    stable_baselines3/common/callbacks.py, CheckpointCallback (`_checkpoint_path`);
    common/vec_env/vec_normalize.py for how statistics are used. On the hub the file is called
    vec_normalize.pkl.
    """
    folder, name = os.path.split(os.path.normpath(location))
    stem = os.path.splitext(name)[0]
    steps = _STEPS.fullmatch(stem)
    own = [os.path.join(folder, f"{steps[1]}_vecnormalize_{steps[2]}.pkl")] if steps else []
    folders = list(_list_folders(folder, stem))
    names = (*_STATISTICS, *_SETTINGS)
    return [*own, *(os.path.join(folder, file) for file in names for folder in folders)]


def names_environment(location: str) -> bool:
    """Return whether a file beside the agent records its environment."""
    files = (companion for companion in companions(location) if os.path.basename(companion) == _SETTINGS[1])
    return any(filesystem.isfile(file) for file in files)


def _list_folders(folder: str, stem: str) -> Iterator[str]:
    yield os.path.join(folder, stem)
    # Example: for logs/td3/Pendulum-v1_3/best_model.zip the statistics are in .../Pendulum-v1_3/Pendulum-v1.
    run = _RUN.fullmatch(os.path.basename(filesystem.abspath(folder)))
    if run is not None and run[1] != stem:
        yield os.path.join(folder, run[1])
    yield folder


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the facts from one of the files; the same object if there are none."""
    name = os.path.basename(file)
    if name == _SETTINGS[0]:
        return _add_hyperparameters(binding, tree)
    if name == _SETTINGS[1]:
        return _arguments(binding, tree)
    return _add_statistics(binding, tree, name)


def _add_statistics(binding: RecognizedAgent, tree: Tree, name: str) -> RecognizedAgent:
    """Add the running statistics; `norm_obs` may state that observations were not normalised."""
    if "norm" in binding.facts.origins:
        return binding
    entries = tree.entries
    mean, var = (entries.get(f"{at}{n}") for at, n in (("obs_rms/", "mean"), ("obs_rms/", "var")))
    if mean is None and not any(shown.startswith(("obs_rms", "ret_rms")) for shown in entries):
        mean, var = entries.get("mean"), entries.get("var")
    normalises = schema.read_switch(entries.get("norm_obs"), default=True)
    stated = {shown.partition("/")[0] for shown in entries}
    numbers = ("epsilon", "clip_obs")
    unclear = [n for n in numbers if n in stated and schema.read_number(entries.get(n)) is None]
    unclear += ["norm_obs"] if normalises is None or ("norm_obs" in stated - entries.keys()) else []
    if normalises is not False and unclear:
        text = f"in a file whose {abbreviate_list(unclear, 3)} is no single value"
        return replace(binding, facts=binding.facts.not_understood("obs_norm", text, name))
    if not normalises:
        return replace(binding, facts=binding.facts.read(name, norm=None))
    sizes: dict[str, int] = {}
    if not isinstance(mean, Leaf) or not isinstance(var, Leaf):
        parts = _read_dict_statistics(entries)
        if not parts:
            return binding
        fronts = [front for component, front in binding.fronts.items() if component == "actor"]
        rows = {stream.name: stream.size for front in fronts for stream in front.streams if not stream.image}
        # In the order of the policy's inputs, in which a conversion has them as one row.
        parts = {part: parts[part] for part in sorted(parts, key=[*rows, *parts].index)}
        mean, var = (
            schema.make_float64_tensor([n for part in parts.values() for n in part[i]]) for i in (0, 1)
        )
        sizes = {part: len(numbers[0]) for part, numbers in parts.items()}
        if any(rows.get(part) != size or len(parts[part][1]) != size for part, size in sizes.items()):
            facts = binding.facts.without_lack(STATISTICS_UNKNOWN).lacking(DICT_UNKNOWN)
            return replace(binding, facts=facts)
    epsilon, clip = (schema.read_number(entries.get(setting)) for setting in numbers)
    limit = read_default_clip(tree) if clip is None else clip
    norm = ObservationNormalizer(
        mean,
        var,
        epsilon=_VEC_EPSILON if epsilon is None else epsilon,
        clip=None if limit is None or limit >= _UNLIMITED else limit,
        parts=sizes,
    )
    if epsilon is None or clip is None:
        shown = "no clipping" if norm.clip is None else f"clipped to {norm.clip:g}"
        sentence = f"observations are normalised with {name}: epsilon {norm.epsilon:g}, {shown}"
        norm, binding = norm._replace(assumed=sentence), binding.assuming(sentence)
    return replace(binding, facts=binding.facts.read(name, norm=norm))


def _read_dict_statistics(
    entries: Mapping[str, Leaf | ValueLeaf],
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return mean and variance of the parts of a Dict observation that VecNormalize normalises."""
    names = [shown.split("/") for shown in entries]
    keys = dict.fromkeys(name[1] for name in names if name[0] == "obs_rms" and len(name) > 2)
    chosen = [
        leaf.value
        for shown, leaf in entries.items()
        if shown.startswith("norm_obs_keys/") and isinstance(leaf, ValueLeaf)
    ]
    return {
        part: (
            schema.read_numbers(entries.get(f"obs_rms/{part}/mean")),
            schema.read_numbers(entries.get(f"obs_rms/{part}/var")),
        )
        for part in (map(str, chosen) if chosen else keys)
    }


def read_default_clip(tree: Tree) -> float | None:
    """Return the limit of normalised observations that a statistics file does not contain, None without one.

    VecNormalize has one by default; the library's own RunningMeanStd may be saved alone.
    """
    names = {str(container.name) for container in tree.containers.values()}
    return _VEC_CLIP if any(name.startswith("stable_baselines") for name in names) else None


def _add_hyperparameters(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Read from the hyperparameters whether statistics are needed, and the environment's wrappers."""
    entries = tree.entries
    # In another program's config.yml a missing key means nothing; the zoo's always names the policy.
    named = {shown.partition("/")[0] for shown in entries}
    facts = (
        binding.facts.without_lack(STATISTICS_UNKNOWN) if named & {"policy", "normalize"} else binding.facts
    )
    if _needs_statistics(entries) and "norm" not in binding.facts.origins:
        facts = facts.lacking(_MISSING)
    wrappers = tuple(
        named
        for group in ("env_wrapper", "vec_env_wrapper")
        for named in _list_wrappers(_nest_settings(tree, group))
    )
    stack = _plain_value(entries, "frame_stack")
    if isinstance(stack, int) and not isinstance(stack, bool) and stack > 1:
        facts = facts.read(_SETTINGS[0], stacked=stack)
    if wrappers or facts.stacked > 1:
        facts = facts.read(_SETTINGS[0], wrappers=wrappers)
    facts = _add_environment_arguments(facts, _SETTINGS[0], _nest_settings(tree, "env_kwargs"))
    return binding if facts == binding.facts else replace(binding, facts=facts)


def _nest_settings(tree: Tree, group: str) -> Any:
    """Return the settings under a name as lists, mappings and plain values."""
    settings: dict[Any, Any] = {}
    for path, leaf in tree.plain():
        if path[:1] != (key(group),):
            continue
        target = settings
        for step in path[:-1]:
            target = target.setdefault(step, {})
        target[path[-1]] = leaf.value
    return _to_plain(settings.get(key(group)))


def _to_plain(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if all(step.kind == "index" for step in node):
        return [_to_plain(child) for child in node.values()]
    return {str(step.value): _to_plain(child) for step, child in node.items()}


def _list_wrappers(node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the wrappers: a name, a mapping of a name to its arguments, or a list of those."""
    for item in node if isinstance(node, list) else [node]:
        if isinstance(item, str):
            yield item, {}
        elif isinstance(item, dict):
            for name, arguments in item.items():
                yield name, arguments if isinstance(arguments, dict) else {}


def _add_environment_arguments(facts: AgentMetadata, file: str, arguments: Any) -> AgentMetadata:
    """Return the facts with environment arguments, except large ones and those that may name a file."""
    if not isinstance(arguments, dict) or not arguments:
        return facts
    used = {name: value for name, value in arguments.items() if name not in _DRAWN}
    plain = {name: value for name, value in used.items() if are_arguments({name: value})}
    all_of_them = {**facts.env_arguments, **plain}
    if not are_arguments(all_of_them):
        plain = {}
    left = sorted(used.keys() - plain.keys())
    if left:
        what = f"environment arguments in {file} ({abbreviate_list(left, 3)}): only a few numbers are used"
        facts = facts.lacking(unknown_fact("environment", what, decides=True))
    return facts.read(file, env_arguments=all_of_them) if plain else facts


def _needs_statistics(entries: Mapping[str, Leaf | ValueLeaf]) -> bool:
    # `normalize` is a boolean, or the text of a dict of VecNormalize's arguments.
    setting = _plain_value(entries, "normalize")
    if isinstance(setting, str):
        return re.search(r"norm_obs['\"]?\s*[:=]\s*(False|0)\b", setting) is None
    # A mapping of arguments also enables it; norm_obs is true unless set to false.
    groups = ("normalize", "normalize_kwargs")
    quiet = any(
        schema.read_switch(entries.get(f"{group}/norm_obs"), default=True) is False for group in groups
    )
    return (bool(setting) or any(shown.startswith("normalize/") for shown in entries)) and not quiet


def _arguments(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Add the environment's plain id and its arguments; an id that requires an import is not used."""
    entries = tree.entries
    env = schema.plain_id(_plain_value(entries, "env"))
    facts = binding.facts if env is None else binding.facts.read(_SETTINGS[1], env=env)
    facts = _add_environment_arguments(facts, _SETTINGS[1], _nest_settings(tree, "env_kwargs"))
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _plain_value(entries: Mapping[str, Leaf | ValueLeaf], name: str) -> object:
    leaf = entries.get(name)
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def statistics_beside(known: Sidecar) -> tuple[str, bytes]:
    """Return name and contents of the file that the library's `VecNormalize.load` reads.

    The statistics are frozen. Its spaces are those of the agent's own file, which the library compares with
    them. Rewards are not normalised, because their statistics are unknown.
    """
    norm, choices = known.obs_norm or {}, schema.known_choices(known)
    clip, size = norm.get("clip"), len(norm["mean"])
    unbounded = ([-math.inf] * size, [math.inf] * size)
    ends = schema.observation_bounds(known.observation_space).get(schema.OBSERVATION, unbounded)
    observed = [row * (size // len(row)) if len(row) in (1, size) else [] for row in ends]
    bounds = [known.action_low or (-1.0,), known.action_high or (1.0,)]
    state = {
        "num_envs": 1,
        "observation_space": _make_box(observed if all(observed) else unbounded),
        "action_space": _make_box(bounds) if choices is None else _encode_choices(choices),
        "render_mode": None,
        "reset_infos": [{}],
        "norm_obs": True,
        "norm_obs_keys": None,
        "obs_rms": _make_running_statistics(_make_array(norm["mean"]), _make_array(norm["var"])),
        "ret_rms": _make_running_statistics(_make_array(0.0), _make_array(1.0)),
        "clip_obs": _UNLIMITED if clip is None else float(clip),
        "clip_reward": 10.0,
        "gamma": 0.99,
        "epsilon": float(norm.get("epsilon", 1e-8)),
        "training": False,
        "norm_reward": False,
        "old_reward": _make_array([]),
    }
    return STATISTICS_FILE, dumps(_make_object(Global(_VEC_ENV, "VecNormalize"), state), pickles.PROTOCOL)


def _make_box(ends: Sequence[Sequence[float]]) -> PickleObject:
    low, high = (_make_array(end, "f4") for end in ends)
    return pickles.encode_box(Global("gymnasium.spaces.box", "Box"), low, high)


def _encode_choices(choices: Choices) -> PickleObject:
    """Return a call of the space of discrete actions.

    gymnasium/spaces/discrete.py: Discrete(n, seed, start); multi_discrete.py: MultiDiscrete(nvec, dtype,
    seed, start), without a start in old versions.
    """
    if choices.single:
        arguments: tuple[Any, ...] = (choices.counts[0], None, choices.starts[0])
        return PickleObject(Global("gymnasium.spaces.discrete", "Discrete"), arguments, 0)
    arguments = (list(choices.counts),)
    if any(choices.starts):
        arguments = (*arguments, Global("numpy", "int64"), None, list(choices.starts))
    return PickleObject(Global("gymnasium.spaces.multi_discrete", "MultiDiscrete"), arguments, 0)


def _make_running_statistics(mean: PickleObject, var: PickleObject) -> PickleObject:
    return _make_object(_MEAN_STD, {"mean": mean, "var": var, "count": 1e4})


def _make_object(name: Global, state: Mapping[str, Any]) -> PickleObject:
    """Return an object of the class without calling its code, as pickle does."""
    return PickleObject(Global("copyreg", "__newobj__"), (name,), 0, state=dict(state))


def _make_array(numbers: Sequence[float] | float, dtype: str = "f8") -> PickleObject:
    """Return an array [n], or [] of one number."""
    shape = () if isinstance(numbers, float) else (len(numbers),)
    values = [numbers] if isinstance(numbers, float) else numbers
    code = {"f4": "f", "f8": "d"}[dtype]
    return pickle_values.pickle_array(dtype, shape, struct.pack(f"<{len(values)}{code}", *values))


_WHOSE = "Stable-Baselines3"
_PACKAGE = "stable_baselines3"
QUANTILES: Scores = "quantiles"
WRITTEN_SCORES: Mapping[Scores, Scores] = {"quantiles_last": QUANTILES}
_VARIABLES = key("pytorch_variables")
_MODULES = {name: "linear.Identity" if name == "linear" else cls for cls, name in TORCH_ACTIVATIONS.items()}
_MEMBERS = {
    "actor_optimizer": "actor.optimizer",
    "critic_optimizer": "critic.optimizer",
    "temperature_optimizer": "ent_coef_optimizer",
}
_COUNTERS = {"_n_updates": "total_it", "num_timesteps": "num_timesteps"}
_LOG_ALPHA = (attr(schema.TEMPERATURE), attr("log_alpha"))


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a file of TD3, DDPG, SAC, PPO, A2C, DQN or QR-DQN for the library's own `load`.

    Missing targets are copied from the online networks. Raise UnsupportedError for networks or an action map
    that the library's policies cannot represent, UsageError if the action space is unknown. Sources in
    github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py (modules and their
    order), common/torch_layers.py (`create_mlp`: a layer, its activation, ...), ddpg/ddpg.py (one critic).
    """
    if has_q_policy(binding):
        writing, policy = _make_q_table(binding, agent)
    elif has_value_network(binding):
        writing, policy = _make_on_policy_table(binding, agent)
    else:
        writing, policy = _make_actor_critic_table(binding, agent)
    notes = ["training settings (gamma, tau, noise, ...) are set to the library's defaults"]
    if (attr(schema.NORMALIZER), attr("mean")) in agent or binding.facts.norm is not None:
        file = STATISTICS_FILE
        load = f'VecNormalize.load("{file}", venv)'
        notes.append(f"observation statistics are in {file} beside the target; load them with {load}")
    counters = {canonical: (_DATA, key(counter)) for counter, canonical in _COUNTERS.items()}
    writing = replace(writing, counters=counters, notes=(*notes, *writing.notes))
    file_plan = plan_torch_file(writing, binding, agent, settings)
    # The library's zip needs no containers, but the settings to build the policy.
    added = {**file_plan.added, **_make_settings(policy, binding, agent)}
    notes = [*file_plan.notes, *_list_rate_notes(file_plan, agent)]
    return replace(
        file_plan,
        added=added,
        assumed=(*file_plan.assumed, *policy.assumed),
        containers={},
        notes=tuple(notes),
    )


def _list_rate_notes(written: Plan, agent: Tree) -> Iterator[str]:
    """Yield what the one setting `learning_rate`, which training uses for all optimizers, cannot be."""
    leaves = {
        move.target: move.rule.leaf(agent[move.source])
        for move in written.moves
        if move.target[-1] == key("lr")
    }
    leaves |= {path: leaf for path, leaf in written.added.items() if path[-1] == key("lr")}
    values = {str(path[0].value): leaf.value for path, leaf in leaves.items() if isinstance(leaf, ValueLeaf)}
    rates = {name: rate for name, rate in values.items() if isinstance(rate, int | float)}
    own = next((rates[name] for name in ("policy.optimizer", "actor.optimizer") if name in rates), None)
    for name, rate in rates.items():
        if own is not None and (rate < 0 or rate != own):
            yield f"learning rate of {name}: {rate:g} is only in its state; learning_rate is {max(own, 0):g}"


class _PolicyClass(NamedTuple):
    """A policy class of the library, its default activation, and its networks by their names in `net_arch`.

    Without a name there, `net_arch` is the list of the only network's sizes. `arguments` are further ones.
    """

    name: str
    activation: str
    networks: Mapping[str, str]
    arguments: Mapping[str, int] = MappingProxyType({})
    assumed: tuple[str, ...] = ()


def _make_actor_critic_table(binding: RecognizedAgent, agent: Tree) -> tuple[WritingTable, _PolicyClass]:
    """Return the table of TD3, DDPG or SAC, and the policy class."""
    soft = is_gaussian(binding)
    rows = [_policy("actor", soft=soft), *([] if soft else [_policy("actor_target", soft=False)])]
    for component in ("critic", "critic_target"):
        rows += [
            NetworkRow(f"{component}/q{number + 1}", (_POLICY,), LayerNames(f"{component}.qf{number}.{{s}}"))
            for number in range(count_critics(binding))
        ]
    # The library stores the logarithm of the entropy coefficient with shape [1].
    temperature = (
        SingleTensorRow("temperature/log_alpha", (_VARIABLES, key("log_ent_coef")), (1,))
        if _LOG_ALPHA in agent
        else SingleTensorRow("temperature/alpha", (_VARIABLES, key("ent_coef_tensor")), optional=True)
    )
    writing = WritingTable(
        _WHOSE,
        [*rows, *([temperature] if soft else [])],
        head="",
        hidden="",
        optimizers={name: (key(member),) for name, member in _MEMBERS.items()},
        needs=("actor", "critic"),
    )
    name = "sac.policies.SACPolicy" if soft else "td3.policies.TD3Policy"
    arguments = {"n_critics": count_critics(binding)}
    return writing, _PolicyClass(f"{_PACKAGE}.{name}", "relu", {"pi": "actor", "qf": "critic"}, arguments)


def _make_on_policy_table(binding: RecognizedAgent, agent: Tree) -> tuple[WritingTable, _PolicyClass]:
    """Return the table of PPO or A2C, which differ in the optimizer, and the policy class."""
    discrete = binding.facts.head == "argmax"
    rows: list[NetworkRow | SingleTensorRow] = [
        NetworkRow(canonical, (_POLICY,), LayerNames(f"mlp_extractor.{stored}_net.{{s}}", last))
        for canonical, stored, last in (("actor", "policy", "action_net"), ("value", "value", "value_net"))
    ]
    if not discrete:
        rows.insert(0, SingleTensorRow("actor/log_std", (_POLICY, key("log_std")), (-1,)))
    trained = any(path[0] == attr(schema.JOINT) for path in agent)
    family = optimizers_read.CanonicalOptimizer(schema.JOINT, agent, {}, {}).family if trained else None
    # RMSpropTFLike adds epsilon inside the square root: another library's state is not its own.
    own = binding.layout == TABLE.name and family is RMSPROP
    writing = WritingTable(
        _WHOSE,
        rows,
        "argmax" if discrete else "clip",
        hidden="",
        needs=("actor", "value"),
        joint=(_OPTIMIZER,) if trained and (own or family is ADAM) else None,
        family=RMSPROP if own else ADAM,
        spaces=frozenset(("several", "starts")),
        modules=(
            "log_std",
            "mlp_extractor.policy_net",
            "mlp_extractor.value_net",
            "action_net",
            "value_net",
        ),
    )
    name = f"{_PACKAGE}.common.policies.ActorCriticPolicy"
    assumed = () if own else ("the algorithm is PPO; A2C.load reads the same file",)
    return writing, _PolicyClass(name, "tanh", {"pi": "actor", "vf": "value"}, assumed=assumed)


def _make_q_table(binding: RecognizedAgent, agent: Tree) -> tuple[WritingTable, _PolicyClass]:
    """Return the table of DQN or QR-DQN, whose outputs are [quantiles, actions], and the policy class."""
    quantiles = find_quantiles(binding, agent, QUANTILES)
    net = "quantile_net" if quantiles else "q_net"
    rows = [
        NetworkRow(part, (_POLICY,), LayerNames(f"{module}.{net}.{{s}}"), quantiles and quantiles.swapped)
        for part, module in (("critic/q1", net), ("critic_target/q1", f"{net}_target"))
    ]
    writing = WritingTable(
        _WHOSE,
        rows,
        "argmax",
        hidden="",
        optimizers={"critic_optimizer": (_OPTIMIZER,)},
        needs=("critic",),
        values=False,
        scores=("values", QUANTILES, "quantiles_last"),
        spaces=frozenset(("starts",)),
    )
    if quantiles:
        name, arguments = "sb3_contrib.qrdqn.policies.QRDQNPolicy", {"n_quantiles": quantiles.number}
    else:
        name, arguments = f"{_PACKAGE}.dqn.policies.DQNPolicy", {}
    return writing, _PolicyClass(name, "relu", {"": "critic"}, arguments)


def _policy(component: str, *, soft: bool) -> NetworkRow:
    # create_mlp: Linear 0, activation 1, Linear 2, ...
    names = LayerNames(f"{component}.mu.{{s}}")
    if soft:
        names = LayerNames("actor.latent_pi.{s}", "actor.mu", {"log_std": "actor.log_std"})
    return NetworkRow(component, (_POLICY,), names)


def _make_settings(
    policy: _PolicyClass, binding: RecognizedAgent, agent: Tree
) -> dict[Path, Leaf | ValueLeaf]:
    """Return the settings that the library needs: spaces, sizes, activation, class of the policy."""
    heads = {
        name: [part for part in binding.parts if part.component == component]
        for name, component in policy.networks.items()
    }
    sizes = {name: _sizes(agent, parts[0]) for name, parts in heads.items()}
    if "qf" in sizes:
        _require_q_functions(sizes, [_sizes(agent, part) for part in heads["qf"]])
    group, module = (_DATA, key("policy_kwargs")), _MODULES[require_activation(binding, _WHOSE, _MODULES)]
    module = module if "." in module else f"activation.{module}"
    inputs = next(iter(sizes.values()))[0]
    values: dict[Path, Leaf | ValueLeaf] = {
        (_DATA, key("policy_class")): ValueLeaf(Record(policy.name)),
        (_DATA, key("observation_space"), attr("_shape"), index(0)): ValueLeaf(inputs),
        **dict(_make_action_space(binding, agent)),
        **{(*group, key(name)): ValueLeaf(value) for name, value in policy.arguments.items()},
    }
    if binding.layout != TABLE.name:  # a file of this layout keeps its own, of any type
        ends = schema.observation_bounds(binding.facts.observation_space).get(schema.OBSERVATION, ())
        for name, row in zip(("low", "high"), ends, strict=False):
            if all(len(end) in (1, inputs) for end in ends):
                values[*_SPACE, attr(name)] = schema.make_float32_tensor(row * (inputs // len(row)))
    if module != f"activation.{_MODULES[policy.activation]}":  # the default is not stored in its file
        values[*group, key("activation_fn")] = ValueLeaf(Record(f"torch.nn.modules.{module}"))
    for name, widths in sizes.items():
        names = [key(name)] if name else []
        for position, width in enumerate(widths[1:-1]):
            values[*group, key("net_arch"), *names, index(position)] = ValueLeaf(width)
    return values


def _require_q_functions(sizes: Mapping[str, list[int]], every: Sequence[list[int]]) -> None:
    """Raise UnsupportedError unless the Q-functions are alike, of observation and action."""
    if any(size != sizes["qf"] for size in every) or sizes["qf"][-1] != 1:
        raise UnsupportedError("Stable-Baselines3 requires Q-functions of the same size with one output")
    if sizes["qf"][0] != sizes["pi"][0] + sizes["pi"][-1]:
        raise UnsupportedError(
            "Stable-Baselines3's Q-functions must receive observation and action at the first layer"
        )


def _make_action_space(binding: RecognizedAgent, agent: Tree) -> Iterator[tuple[Path, Leaf | ValueLeaf]]:
    """Yield the bounds of a Box, or the numbers of a Discrete or MultiDiscrete space.

    A Q-network chooses one action; what other discrete outputs mean follows from the space only.
    """
    space, choices = (_DATA, key("action_space")), binding.facts.choices
    if choices is None and has_q_policy(binding):
        acting = next(part for part in binding.parts if part.acts)
        choices = Choices((_sizes(agent, acting)[-1],), (0,))
    if choices is None and binding.facts.head == "argmax":
        raise UsageError(
            "unknown discrete actions, which a Stable-Baselines3 file must contain",
            hint="pass --env ID, whose action space shows whether they are one choice or several",
        )
    if choices is None:
        low, high = _bounds(binding, agent)
        yield (*space, attr("low")), schema.make_float32_tensor(low)
        yield (*space, attr("high")), schema.make_float32_tensor(high)
    elif choices.single:
        yield (*space, attr("n")), ValueLeaf(choices.counts[0])
        yield (*space, attr("start")), ValueLeaf(choices.starts[0])
    else:
        for name, numbers in (("nvec", choices.counts), ("start", choices.starts)):
            for position, number in enumerate(numbers):
                yield (*space, attr(name), index(position)), ValueLeaf(number)


def _bounds(binding: RecognizedAgent, agent: Tree) -> tuple[Sequence[float], Sequence[float]]:
    facts = binding.facts
    if has_value_network(binding):
        return require_action_bounds(facts, agent, "a Stable-Baselines3 file")
    fits = matches_action_map(facts, agent, "affine")
    if fits is False:
        raise UnsupportedError(
            "Stable-Baselines3 maps tanh to the action bounds, but this agent uses another action map",
            found=facts.head,
        )
    return require_action_bounds(facts, agent, "a Stable-Baselines3 file")


def _sizes(agent: Tree, part: AgentNetwork) -> list[int]:
    """Return the widths of a network: its inputs, its hidden layers, its outputs."""
    shapes = list_kernel_shapes(part, agent)
    return [shapes[0][0], *(shape[1] for shape in shapes)]


# The library compares these with the environment's space; a conversion to the same layout keeps them.
OBSERVATION_SPACE: tuple[Path, ...] = tuple(
    (_DATA, key("observation_space"), attr(end)) for end in ("low", "high")
)
TABLE = LayoutTable(
    name="stable_baselines3",
    statistics="vecnormalize.pkl",
    plays=(
        "TD3",
        "DDPG",
        "SAC",
        "TQC",
        "CrossQ",
        "PPO",
        "A2C",
        "TRPO",
        "ARS",
        "MaskablePPO",
        "RecurrentPPO",
        "DQN",
        "QR-DQN",
    ),
    writes=("TD3", "DDPG", "SAC", "PPO", "A2C", "DQN", "QR-DQN"),
    title="Stable-Baselines3 agent (TD3, DDPG, SAC, TQC; PPO, A2C, TRPO; DQN, QR-DQN; ARS)",
    framework="torch",
    components={f"policy/{name}": name for name in schema.NETWORKS},
    optimizers={
        "actor/optimizer": "actor_optimizer",
        "critic/optimizer": "critic_optimizer",
        "ent_coef_optimizer": "temperature_optimizer",
    },
    # sac/policies.py: LOG_STD_MIN, LOG_STD_MAX.
    facts=AgentMetadata(
        head="affine",
        hidden="relu",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["stable_baselines"],
        distribution=schema.LIMITED_GAUSSIAN,
    ),
    branches={"log_std": "log_std"},
    tensors={
        # gSDE's matrix of standard deviations is not a layer: it only scales noise in training.
        "policy/actor/log_std": "actor/log_std",
        **{
            f"{variables}/{stored}": f"temperature/{canonical}"
            for variables in ("pytorch_variables", "tensors")
            for stored, canonical in (("log_ent_coef", "log_alpha"), ("ent_coef_tensor", "alpha"))
        },
    },
    seen="agents from rl-trained-agents; every algorithm, saved by the library and its contrib 2.9.2",
)
# Policies of PPO and A2C, whose networks are assembled from the library's separate parts.
_ON_POLICY = replace(
    TABLE,
    components={"actor": "actor", "value": "value"},
    optimizers={"policy/optimizer": schema.JOINT},
    # common/distributions.py: DiagGaussianDistribution.
    facts=TABLE.facts._replace(head="clip", hidden="tanh", distribution=schema.GAUSSIAN),
    branches={},
    tensors={"policy/log_std": "actor/log_std"},
)
# ARS: a single policy without an optimizer; its only layer may have no bias.
_SEARCHED = replace(
    _ON_POLICY,
    components={"actor": "actor"},
    optimizers={},
    facts=TABLE.facts._replace(distribution=None),
    tensors={},
    matrices=True,
)
# DQN and QR-DQN: a network that outputs a value, or its quantiles, for every action.
_Q_NETWORKS = {
    f"policy/{name}{target}/{name}": f"critic{target}/q1"
    for target in ("", "_target")
    for name in ("q_net", "quantile_net")
}
_DISCRETE = replace(
    TABLE,
    components=_Q_NETWORKS,
    optimizers={"policy/optimizer": "critic_optimizer"},
    facts=AgentMetadata(head="identity", hidden="relu", epsilon=1e-5),
    branches={},
    tensors={},
)
_PARTS = {"action_net": "actor", "mlp_extractor.policy_net": "actor", "mlp_extractor.shared_net": "actor"} | {
    "value_net": "value",
    "mlp_extractor.value_net": "value",
}
_PART = deferred.compile(
    r"(mlp_extractor\.(?:policy|value|shared)_net|action_net|value_net|features_extractor)\."
)
_EXTRACTOR = deferred.compile(
    r"(?:(actor|actor_target|critic|critic_target|q_net|quantile_net|q_net_target|quantile_net_target)\.)?"
    r"(?:pi_)?features_extractor\."
)
# sb3_contrib/common/recurrent/policies.py; without a separate LSTM a recurrent value has a layer `critic`.
_MEMORY = deferred.compile(r"lstm_actor\.|(lstm_critic\.|critic\.(?:weight|bias)$)")
_ACTOR = deferred.compile(r"actor\.(?:mu|latent_pi)\.")
_Q = deferred.compile(r"(q_net|quantile_net)\.\1\.")
_VALUE = deferred.compile(r"(?:mlp_extractor\.value_net|value_net)\.")
_OPTIMIZER = key("policy.optimizer")
_CLIP_MEAN = 2.0
_EXTRACTOR_CLASS = "features_extractor_class"
_LIBRARIES = ("stable_baselines3.", "sb3_contrib.", "stable_baselines.")
_CLASSES = ((("policy_class",), "policy"), (("policy_kwargs", _EXTRACTOR_CLASS), "extractor"))


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a file written by an algorithm's `save`, or of a policy saved alone.

    Networks other than MLPs are only listed; a policy for discrete actions is not run. Sources in
    github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py and
    common/policies.py (ContinuousCritic, ActorCriticPolicy) for the networks; common/policies.py,
    `BasePolicy.predict` and `unscale_action`, for the action: a squashed one is mapped from [-1, 1] to [low,
    high], others are clipped to the bounds. sac/policies.py, Actor: with gSDE the mean is clipped to
    [-clip_mean, clip_mean] before it is squashed. Hidden layers are ReLU, in common/policies.py Tanh. TQC:
    github.com/Stable-Baselines-Team/stable-baselines3-contrib, sb3_contrib/tqc/policies.py; sb3_contrib/ars/
    policies.py: ReLU and tanh to the bounds in ARSPolicy, one matrix clipped to the bounds in
    ARSLinearPolicy. dqn/policies.py: up to version 2.3 the optimizer also lists the target's parameters,
    which it never updates.
    """
    policy = read_policy_alone(tree)
    if policy is None:
        return _recognise_algorithm(tree)
    binding = _recognise_algorithm(policy.tree)
    if binding is None:
        return None
    # What the view adds (names of classes) is in no entry of the file.
    consumed = binding.consumed & policy.sources.keys()
    return replace(binding, consumed=consumed).moved(policy.sources.__getitem__)


def _recognise_algorithm(tree: Tree) -> RecognizedAgent | None:
    names = [str(path[1].value) for path in tree if len(path) == 2 and path[0] == _POLICY]
    if any(map(_ACTOR.match, names)):
        # The dense layers of features extractors would look like a policy's first.
        inside = {path for paths in _list_extractor_tensors(tree).values() for path in paths}
        outside = {path: leaf for path, leaf in tree.items() if path not in inside}
        binding = bind(tree.with_leaves(outside), TABLE)
    elif any(map(_Q.match, names)):
        binding = _bind_discrete(tree)
    elif any(_PART.match(name) for name in names):
        binding = _bind_on_policy(tree, _ON_POLICY if any(map(_VALUE.match, names)) else _SEARCHED)
    else:
        return None
    return (
        _add_metadata(binding, tree).entered(*list_custom_classes(tree, *_CLASSES))
        if binding is not None
        else None
    )


def list_custom_classes(tree: Tree, *settings: tuple[tuple[str, ...], str]) -> Iterator[LedgerEntry]:
    """Yield an entry for each setting with a custom class, which is not run."""
    for names, what in settings:
        kind = read_class_name(tree, *names)
        if kind is not None and not kind.startswith(_LIBRARIES):
            value = f"{what} class {kind}: the library's own class is used instead"
            yield LedgerEntry("not used", "custom code", value, "/".join(("data", *names)), decides=True)


def _bind_on_policy(tree: Tree, table: LayoutTable) -> RecognizedAgent | None:
    """Bind a tree after regrouping its modules into policy and value."""
    sources: dict[Path, Path] = {}
    for path in tree:
        module = _PART.match(str(path[1].value)) if len(path) == 2 and path[0] == _POLICY else None
        component = _PARTS.get(module[1]) if module else None
        sources[path if component is None else (key(component), path[1])] = path
    binding = bind(Tree({target: tree[path] for target, path in sources.items()}), table)
    if binding is None or not any(part.component == "actor" for part in binding.parts):
        return None
    binding = binding.moved(lambda path: sources[path])
    # Policies of PPO and A2C that act in a Box have deviations.
    deviations = (_POLICY, key("log_std")) in tree
    if not _space_class(tree, "action_space") and table is _ON_POLICY and not deviations:
        return binding.choosing(tree)
    if not has_box_actions(tree):
        # common/distributions.py: CategoricalDistribution, MultiCategoricalDistribution, Bernoulli.
        drawn = None if table is _SEARCHED else schema.CATEGORICAL
        binding = replace(binding, facts=binding.facts._replace(distribution=drawn))
        return add_choices(binding, read_choices(tree) or read_binary_choices(tree), "actor")
    return _add_ars_action_map(binding, tree) if table is _SEARCHED else binding


def _add_ars_action_map(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding of ARS's policy with the action map of its class."""
    kind = (read_class_name(tree, "policy_class") or "").rpartition(".")[2]
    numbered = any(layer.name[-1].isdigit() for part in binding.parts for layer in part.layers)
    # Since contrib 1.7 a linear policy is an MLP without hidden layers, with numbered layers.
    linear = kind == "ARSLinearPolicy" if kind.startswith("ARS") else not numbered
    squashed = read_setting(tree, "policy_kwargs", "squash_output", not linear)
    if squashed is False and not linear:
        # Some versions build a tanh regardless.
        return binding.refused("actor", "squash_output=False, whose effect depends on the library version")
    return binding if squashed else replace(binding, facts=binding.facts._replace(head="clip"))


def _bind_discrete(tree: Tree) -> RecognizedAgent | None:
    """Bind the networks of DQN or QR-DQN; parameters that their optimizer never updated are the target's."""
    online = sum(path[0] == _POLICY and _Q.match(str(path[1].value)) is not None for path in tree)
    group = (_OPTIMIZER, key("param_groups"), index(0), key("params"))
    updated = {path[2].value for path in tree if path[:2] == (_OPTIMIZER, key("state"))}
    targets = {(*group, index(number)) for number in range(online, 2 * online) if number not in updated}
    more = frozenset(targets & tree.keys())
    binding = bind(
        replace(tree, leaves={path: leaf for path, leaf in tree.items() if path not in more}), _DISCRETE
    )
    if binding is None:
        return None
    # sb3_contrib/qrdqn/policies.py, QuantileNetwork.forward: [batch, quantiles, actions].
    quantiles = any(str(path[1].value).startswith("quantile_net.") for path in tree if path[0] == _POLICY)
    binding = replace(binding, consumed=binding.consumed | more)
    if not _space_class(tree, "action_space") and not quantiles:
        return binding.choosing(tree)
    choices = read_choices(tree, "quantiles" if quantiles else "values")
    return add_choices(binding.with_q_policies(), choices, "critic")


def add_choices(binding: RecognizedAgent, choices: Choices | None, component: str) -> RecognizedAgent:
    """Return the binding with the discrete actions of the file; without them its policy is not played."""
    if choices is None:
        return binding.refused(component, DISCRETE_CHOICE)
    return replace(binding, facts=binding.facts.read("data/action_space", head="argmax", choices=choices))


def _add_metadata(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with bounds, activations and counters from the file; settings are not converted."""
    facts = add_settings_metadata(binding.facts, tree)
    unplaced = dict(binding.unplaced)
    limited = (_POLICY, key("actor.mu.0.weight")) in tree and (_POLICY, key("actor.log_std")) in tree
    if limited:
        clip = read_setting(tree, "policy_kwargs", "clip_mean", _CLIP_MEAN)
        facts = facts._replace(head="clip_tanh_affine")
        if clip != _CLIP_MEAN:
            unplaced["actor"] = (*unplaced.get("actor", ()), f"a mean clipped to {clip}")
    # common/distributions.py, StateDependentNoiseDistribution: [features, actions] instead of [actions].
    deviations = (tree.get((_POLICY, key(name))) for name in ("log_std", "actor.log_std"))
    if any(isinstance(deviation, Leaf) and len(deviation.shape) == 2 for deviation in deviations):
        facts = facts._replace(distribution=schema.ActionDistribution("gsde"))
    if read_setting(tree, "policy_kwargs", "squash_output", False) is True:
        facts = facts._replace(head="affine")
    facts = _add_class_defaults(facts, tree)
    # Weights alone have neither an activation nor the settings whose default it is.
    settings = ((_DATA, key("policy_class")), (*_KWARGS, key("activation_fn")))
    if not any(path[: len(setting)] == setting for path in tree for setting in settings):
        facts = facts.lacking(NO_ACTIVATIONS)
        bounded = facts.head == "argmax" or facts.action_low is not None
        facts = facts if bounded else facts.lacking(NO_BOUNDS)
    if images := read_image_scaling(tree):
        seeing = dict.fromkeys(["actor", *(part.component for part in binding.parts)])
        unplaced |= {component: (*unplaced.get(component, ()), images) for component in seeing}
    for component, paths in _list_extractor_tensors(tree).items():
        names = [tree.names[path] for path in paths]
        unplaced[component] = tuple(dict.fromkeys((*unplaced.get(component, ()), *names)))
    fronts = {
        part.component: front
        for part in binding.parts
        if part.acts and (front := find_encoder(tree, part.component, unplaced.get(part.component, ())))
    }
    if fronts:
        facts = facts.without_lack("architecture")
    counters = tuple(_move_counters(tree))
    moves = (*binding.moves.moves, *counters)
    used = {move.source for move in moves}
    stored = [path for path in tree if path and path[0].kind == "attr" and path not in used]
    empty = [path for path, leaf in tree.plain() if len(path) == 1 and leaf.value is None]
    notes = binding.moves.notes
    if stored:
        notes = (*notes, make_settings_note(len(stored), "data"))
    return replace(
        binding,
        moves=replace(binding.moves, moves=moves, notes=notes),
        facts=facts,
        consumed=binding.consumed | frozenset(stored) | frozenset(empty),
        unplaced=unplaced,
        fronts=fronts,
    )


def _add_class_defaults(facts: AgentMetadata, tree: Tree) -> AgentMetadata:
    """Return the facts with the defaults of the library's own policy class.

    The file contains the class and all its constructor arguments: omitted ones have their defaults.
    """
    kind = read_class_name(tree, "policy_class")
    arguments = (_DATA, key("policy_kwargs"))
    stated = arguments in tree.containers or any(path[:2] == arguments for path in tree)
    if kind is None or not kind.startswith(_LIBRARIES) or not stated:
        return facts
    if "hidden" not in facts.origins:
        facts = facts.read("data/policy_kwargs", hidden=facts.hidden)
    return facts.read("data/policy_class", head=facts.head)


def _list_extractor_tensors(tree: Tree) -> dict[str, list[Path]]:
    """Return the extractor and memory tensors, which are not in layers, by component."""
    tensors: dict[str, list[Path]] = {}
    for path in tree:
        name = str(path[1].value) if len(path) == 2 and path[0] == _POLICY else ""
        if extractor := _EXTRACTOR.match(name):
            # A policy of PPO or A2C has one extractor for all networks, or one each.
            component = (extractor[1] or "actor").replace("quantile_net", "q_net").replace("q_net", "critic")
            tensors.setdefault(component, []).append(path)
        elif memory := _MEMORY.match(name):
            tensors.setdefault("value" if memory[1] else "actor", []).append(path)
    return tensors


def _move_counters(tree: Tree) -> list[Move]:
    """Return the moves of the counts of updates and environment steps."""
    counters = []
    for stored, canonical in _COUNTERS.items():
        path = (_DATA, key(stored))
        leaf = tree.get(path)
        if isinstance(leaf, ValueLeaf) and type(leaf.value) is int and 0 <= leaf.value < 1 << 62:
            counters.append(Move(path, (attr(canonical),), ToTensor("int64")))
    return counters
