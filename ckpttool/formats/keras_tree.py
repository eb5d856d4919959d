"""Trees of Keras models and their optimizers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ckpttool.core import deferred, text
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import FormatError
from ckpttool.core.optimizers import ADAM, FAMILIES, SGD, find_class
from ckpttool.core.source import File, Shape
from ckpttool.core.tree import Alias, Container, Leaf, Path, PathStep, Role, Tree, attr, index
from ckpttool.encodings import archives
from ckpttool.formats import hdf5, keras_config
from ckpttool.formats.file_listing import FileListing, is_file_name
from ckpttool.formats.hdf5 import Hdf5Dataset, Hdf5Group, Hdf5Index
from ckpttool.formats.keras_config import (
    NOTHING,
    KerasConfig,
    child_config,
    config_of,
    note_lambdas,
    parse_config,
    snake_case,
    split_number,
    stored_names,
)
from ckpttool.formats.tf_object_graph import slot_path

OPTIMIZER: Path = (attr("optimizer"),)


def list_model(
    index: Hdf5Index, config: KerasConfig = NOTHING, optimizer: KerasConfig = NOTHING
) -> FileListing:
    """Return the model in the datasets; `config` and `optimizer` are additional information on it.

    Raise FormatError if attributes name weights that do not exist. Three layouts: `h5` (Keras 1 and 2:
    attributes name layers and weights), `weights.h5` (Keras 3: groups of numbered variables), and `datasets`
    (any other h5 file). A model's configuration, if the file has one, is read as data; no class named in it
    is looked up.
    """
    audit = keras_config.audit_attributes(index)
    return replace(
        _list_by_structure(index, config, optimizer),
        code_references=audit.code_references,
        unjudged=audit.unjudged,
    )


def _list_by_structure(index: Hdf5Index, config: KerasConfig, optimizer: KerasConfig) -> FileListing:
    if is_legacy(index):
        return _list_legacy(index)
    if is_modules(index):
        return _list_modules(index, config, optimizer)
    leaves = {tuple(map(attr, d.path.split("/"))): dataset_leaf(d) for d in index.datasets.values()}
    return FileListing(
        Tree(leaves, _aliases(index, leaves)), notes=index.notes, details={"layout": "datasets"}
    )


def _list_modules(index: Hdf5Index, config: KerasConfig, optimizer: KerasConfig) -> FileListing:
    root, strays = build_nodes(index)
    walk = KerasWalk(config, root)
    leaves = dict(walk.leaves)
    containers = dict(walk.containers)
    notes = list(index.notes)
    for dataset in strays:
        path = tuple(map(attr, dataset.path.split("/")))
        leaves[path] = dataset_leaf(dataset)
    chosen = optimizer
    owners = {leaf.key: (path, leaf.shape) for path, leaf in walk.leaves.items()} if walk.optimizers else {}
    for node, at in walk.optimizers:
        mine = node.group == "optimizer"
        inner = bool(at) and at[-1].value == INNER  # an optimizer may be the whole file
        known = config_of(optimizer.settings.get(INNER)) if inner else optimizer
        recorded = known if (mine or inner) and known.cls else KerasConfig(optimizer_class(node.name), {})
        slots = listed_leaves(node.variables, at, node.slots, owners)
        complete = slots is not None
        if slots is None:
            of = find_trained_network(at[:-1] if inner else at, walk)
            slots, complete = optimizer_leaves(
                node.variables, at, recorded, trained_variables(node, recorded, of, walk)
            )
        leaves |= slots
        facts = {"group": node.group} | ({"layer": node.name} if node.name is not None else {})
        containers[at] = Container("module", recorded.cls, recorded.facts() | facts)
        chosen = recorded if mine else chosen
        if not complete:
            notes.append(
                f"{node.group or 'optimizer'}: the file does not record which variable each slot belongs to"
            )
    keys = {leaf.key for leaf in leaves.values()}
    for dataset in index.datasets.values():
        if dataset.path not in keys:
            leaves[tuple(map(attr, dataset.path.split("/")))] = dataset_leaf(dataset, "other")
    if walk.unnamed:
        notes.append(f"variables with a number instead of a name: {walk.unnamed:,}")
    details = {"layout": "weights.h5", "model": config.cls, "name": root.name or config.name}
    return FileListing(
        Tree(leaves, _aliases(index, leaves), containers),
        notes=(*notes, *note_lambdas(config)),
        details={**details, "optimizer": chosen.cls},
    )


def _list_legacy(index: Hdf5Index) -> FileListing:
    top = index.groups[""].attributes
    about = index.groups[find_weights_group(index)].attributes
    text, training = top.get("model_config"), top.get("training_config")
    settings, notes = parse_config(text if isinstance(text, str) else None, "model_config")
    trained, more = parse_config(training if isinstance(training, str) else None, "training_config")
    config, optimizer = (
        config_of(settings),
        optimizer_config(trained.get("optimizer_config")),
    )
    leaves, containers, owners = _list_weights(index, config)
    saved = legacy_optimizer(index)
    trains = [
        TrainedVariable(path, leaf.shape)
        for path, leaf in leaves.items()
        if leaf.role == "parameter" and leaf.trainable is not False
    ]
    state, complete = leaves_by_count(saved, OPTIMIZER, optimizer, trains), True
    if state is None:
        state, complete = named_leaves(saved, OPTIMIZER, optimizer, owners)
    if state:
        containers[OPTIMIZER] = Container("module", optimizer.cls, optimizer.facts())
    named = {leaf.key for leaf in (*leaves.values(), *state.values())}
    strays = [d for d in index.datasets.values() if d.path not in named]
    for dataset in strays:
        leaves[tuple(map(attr, dataset.path.split("/")))] = dataset_leaf(dataset, "other")
    leaves |= state
    odd = [name for name in ("model_config", "training_config") if name in top and top[name] is None]
    notes = (*index.notes, *notes, *more, *note_lambdas(config))
    notes = (*notes, *(f"attribute {name} is not text; layer information is not available" for name in odd))
    if strays:
        notes = (*notes, f"datasets not listed in any attribute: {len(strays):,}")
    if not complete:
        notes = (*notes, "optimizer: the file does not record which variable each slot belongs to")
    details = {"layout": "h5", "model": config.cls, "name": config.name, "optimizer": optimizer.cls}
    versions = {key: about.get(key) or top.get(key) for key in ("keras_version", "backend")}
    tree = Tree(leaves, _aliases(index, leaves), containers)
    return FileListing(tree, notes=notes, details={**details, **versions})


def _list_weights(
    index: Hdf5Index, config: KerasConfig
) -> tuple[dict[Path, Leaf], dict[Path, Container], dict[str, Path]]:
    leaves: dict[Path, Leaf] = {}
    containers: dict[Path, Container] = {}
    owners: dict[str, Path | None] = {}
    weights = list(iter_legacy_weights(index))
    siblings: dict[str, set[str]] = {}
    for weight in weights:
        siblings.setdefault(weight.layer, set()).add(weight.name)
    settings = KerasSettings(config)
    for weight in weights:
        path = weight_path(weight, siblings[weight.layer])
        if path in leaves:
            path = tuple(map(attr, weight.dataset.path.split("/")))
        if path in leaves:
            raise FormatError(f"weight {weight.name[:200]} is listed twice")
        trainable = None
        for at, layer in settings.down_to(path):
            trainable = False if layer.trainable is False else trainable if trainable is False else True
            if at not in containers:
                containers[at] = Container("module", layer.cls, layer.facts())
        role = weight_role(path)
        one = dataset_leaf(weight.dataset, role, trainable if role == "parameter" else False)
        leaves[path] = Leaf(
            one.dtype, one.shape, one.source, one.key, one.role, trainable=one.trainable, name=weight.name
        )
        name = weight.name.removesuffix(":0")
        owners[name] = None if name in owners else path
    return leaves, containers, {name: path for name, path in owners.items() if path is not None}


def _aliases(index: Hdf5Index, leaves: Mapping[Path, Leaf]) -> dict[Path, tuple[Alias, ...]]:
    by_key = {leaf.key: path for path, leaf in leaves.items()}
    aliases: dict[Path, tuple[Alias, ...]] = {}
    for name, first in index.same.items():
        path = by_key.get(first)
        if path is not None:
            alias = Alias(tuple(map(attr, name.split("/"))), name)
            aliases[path] = (*aliases.get(path, ()), alias)
    return aliases


def config_document(format_: str, location: str) -> dict[str, Any] | None:
    """Return the configuration in a .keras archive or a legacy .h5 model, None without one.

    Unlike the tree it lists layers without weights, and the connections of a functional model's layers.
    """
    if format_ == "keras_zip":
        archive = archives.read_zip(File.stamp(location))
        if "config.json" not in archive.members:
            return None
        text: object = bytes(archive.source("config.json").read())
    elif format_ == "keras_h5" and not location.endswith(".json"):
        text = (
            hdf5.read_index(hdf5.whole_file(File.stamp(location))).groups[""].attributes.get("model_config")
        )
    else:
        return None
    return parse_config(text, "the configuration")[0] or None if isinstance(text, str | bytes) else None


def writer_version(details: Mapping[str, Any]) -> int | None:
    """Return the major version of Keras that wrote a file with these details, None if unknown."""
    version = str(details.get("keras_version") or "").partition(".")[0]
    return int(version) if version.isdecimal() else None


TOP = "top_level_model_weights"
# Keras 1 names of non-trainable weights and of the two weights of a dense or convolutional layer.
_BUFFERS = frozenset(
    ("moving_mean", "moving_variance", "running_mean", "running_std", "mean", "variance", "vector_u")
)
_OTHER = frozenset(("count", "seed_generator_state", "seed"))
_KERAS1 = {"W": "kernel", "b": "bias"}


class KerasWeight(NamedTuple):
    """One named weight: its layer, its name as saved, its dataset."""

    layer: str
    name: str
    dataset: Hdf5Dataset


# What Keras writes beside the names of layers (keras/src/legacy/saving/legacy_h5_format.py).
_WRITER = frozenset(("backend", "keras_version", "model_config", "training_config"))


def is_legacy(index: Hdf5Index) -> bool:
    """Return whether Keras 1 or 2 wrote the file: its root, or its group of weights, names the layers.

    Other programs use the attribute `layer_names` too. Keras always adds its version, or to the group of each
    layer the names of its weights; without both, the file is listed as plain datasets. Source:
    keras/src/legacy/saving/legacy_h5_format.py, save_weights_to_hdf5_group, load_attributes_from_hdf5_group,
    save_optimizer_weights_to_hdf5_group; in tf_keras tf_keras/src/saving/legacy/hdf5_format.py.
    """
    root, inside = index.groups[""], index.groups.get("model_weights")
    named = [group for group in (root, inside) if group is not None and _named(group)]
    if not named:
        return False
    if any(_WRITER & group.attributes.keys() for group in (root, *named)):
        return True
    tops = {group.path for group in named}
    return any(
        group.path and group.path.rpartition("/")[0] in tops and _has_names(group, "weight_names")
        for group in index.groups.values()
    )


def _named(group: Hdf5Group) -> bool:
    return _has_names(group, "layer_names")


def _has_names(group: Hdf5Group, attribute: str) -> bool:
    return attribute in group.attributes or f"{attribute}0" in group.attributes


def read_names(group: Hdf5Group, attribute: str) -> list[str]:
    """Return a list of names; lists too long for an HDF5 attribute are split into numbered pieces.

    Raise FormatError for other attribute types: Keras would derive different names from them.
    """
    if attribute in group.attributes:
        return _require_names(group, attribute)
    names: list[str] = []
    number = 0
    while f"{attribute}{number}" in group.attributes:
        names += _require_names(group, f"{attribute}{number}")
        number += 1
    return names


def _require_names(group: Hdf5Group, attribute: str) -> list[str]:
    stored = group.attributes[attribute]
    if not isinstance(stored, list):
        raise FormatError(f"attribute {attribute} of group /{group.path[:200]} is not a list of names")
    return stored


def find_weights_group(index: Hdf5Index) -> str:
    """Return the path of the group with the layers ("" is the root), following Keras's choice."""
    below = "layer_names" not in index.groups[""].attributes and "model_weights" in index.groups
    return "model_weights" if below else ""


def iter_legacy_weights(index: Hdf5Index) -> Iterator[KerasWeight]:
    """Yield the model's weights in the attributes' order; raise FormatError for a missing one."""
    group = index.groups[find_weights_group(index)]
    prefix = f"{group.path}/" if group.path else ""
    listed = list(dict.fromkeys(read_names(group, "layer_names")))
    if TOP not in listed and prefix + TOP in index.groups:
        listed.append(TOP)
    for layer in listed:
        inside = index.groups.get(prefix + layer)
        if inside is None:
            raise FormatError(f"layer {layer[:200]} is listed but missing from the file")
        for name in dict.fromkeys(read_names(inside, "weight_names")):
            yield KerasWeight(layer, name, _dataset(index, f"{prefix}{layer}/{name}"))


def legacy_optimizer(index: Hdf5Index) -> list[tuple[str, Hdf5Dataset]]:
    """Yield the optimizer's variables by name, in order."""
    group = index.groups.get("optimizer_weights")
    if group is None:
        return []
    return [
        (n, _dataset(index, f"optimizer_weights/{n}"))
        for n in dict.fromkeys(read_names(group, "weight_names"))
    ]


def _dataset(index: Hdf5Index, path: str) -> Hdf5Dataset:
    path = index.same.get(path, path)
    dataset = index.datasets.get(path)
    if dataset is None:
        raise FormatError(f"weight {path[:200]} is listed but missing from the file")
    return dataset


def weight_path(weight: KerasWeight, siblings: Set[str]) -> Path:
    """Return a weight's path: the layer, then its name without the layer's name and without `:0`.

    `siblings` are the names of the layer's weights.
    """
    parts = weight.name.removesuffix(":0").split("/")
    if weight.layer in parts[:-1]:
        # The name of a subclassed model is first: agent/dense_2/kernel in layer dense_2.
        parts = parts[parts.index(weight.layer) + 1 :]
    elif parts[-1].startswith(f"{weight.layer}_"):
        parts[-1] = parts[-1][len(weight.layer) + 1 :]
        # Keras 1 wrote the two names with Theano, which appends no suffix.
        old = {f"{weight.layer}_{name}" for name in _KERAS1}
        both = {name.removesuffix(":0") for name in siblings} == old
        parts[-1] = _KERAS1.get(parts[-1], parts[-1]) if both else parts[-1]
    return tuple(map(attr, parts if weight.layer == TOP else (weight.layer, *parts)))


def weight_role(path: Path) -> Role:
    """Return the role of a weight, based on its name."""
    last = str(path[-1].value)
    return "buffer" if last in _BUFFERS else "other" if last in _OTHER else "parameter"


class KerasSettings:
    """A model's configuration, looked up by the paths of its weights."""

    def __init__(self, root: KerasConfig) -> None:
        """Store the model; layers are looked up on demand."""
        self._known: dict[Path, KerasConfig] = {(): root}
        self._below: dict[Path, dict[str | None, KerasConfig]] = {}

    def down_to(self, path: Path) -> Iterator[tuple[Path, KerasConfig]]:
        """Yield the layers from the model to a weight, as far as the configuration names them."""
        for depth in range(len(path)):
            at = path[:depth]
            if at not in self._known:
                self._known[at] = self._layer(path[: depth - 1], str(path[depth - 1].value))
            if self._known[at].cls is None:
                return
            yield at, self._known[at]

    def _layer(self, parent: Path, name: str) -> KerasConfig:
        if parent not in self._below:
            self._below[parent] = {layer.name: layer for layer in self._known[parent].layers()}
        return self._below[parent].get(name, NOTHING)


VARS = "vars"
# TF 2.12 to 2.15 used the second name (keras/src/saving/saving_lib.py, H5IOStore.get).
LAYERS = ("layers", "_layer_checkpoint_dependencies")
METRICS = "metrics"
UNPLACED = 1 << 30
# Layers, and operations as layers, that may reorder the axes of an image.
_REORDERS = deferred.compile(r"(?:permute|transpose|swapaxes|moveaxis|lambda|einsum)(?:_\d+)?", re.ASCII)
_MATRIX = 2


@dataclass
class KerasNode:
    """One stored object or container: its group, its variables, its children.

    `slots` is the file's record of an optimizer's variables (keras_tree.optimizers, listed_leaves),
    `holds` whether it contains a variable at any depth.
    """

    group: str
    rank: tuple[int, ...]
    name: str | None = None
    saved: bool = False
    variables: list[Hdf5Dataset] = field(default_factory=list)
    below: dict[str, KerasNode] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)
    holds: bool = False


def _has_normalized_kernel(node: KerasNode) -> bool:
    """Return whether the variables are a SpectralNormalization's: its layer's kernel, and one row of it."""
    layer = node.below.get("layer")
    if layer is None or len(node.variables) != 2 or not layer.variables:
        return False
    kernel, row = (variable.shape for variable in node.variables)
    return kernel == layer.variables[0].shape and row == (1, *kernel[-1:])


def is_modules(result: Hdf5Index) -> bool:
    """Return whether any group belongs to Keras 3."""
    return any(path == VARS or path.endswith(f"/{VARS}") for path in result.groups)


def build_nodes(result: Hdf5Index) -> tuple[KerasNode, list[Hdf5Dataset]]:
    """Return the root of the stored objects, and the datasets outside all of them.

    Source: keras/src/saving/saving_lib.py (_save_state, _save_container_state, H5IOStore). Layers of a
    Sequential or functional model are under `layers` by their class; other objects are under their attribute;
    the user's name is an attribute of the group `vars`, which tf_keras does not write.
    """
    nodes: dict[str, KerasNode] = {"": KerasNode("", ())}
    strays = []
    for position, group in enumerate(result.groups.values()):
        parent, _, last = group.path.rpartition("/")
        if not group.path:
            continue
        if last == VARS and parent in nodes:
            nodes[parent].saved = True
            name = group.attributes.get("name")
            nodes[parent].name = name if isinstance(name, str) and name else None
            nodes[parent].slots = read_names(group, SLOTS)
        elif parent in nodes:
            # Without creation order the file order is alphabetical; older objects have lower addresses.
            ordered = result.groups[parent].ordered
            node = nodes[group.path] = KerasNode(
                group.path, (position,) if ordered else (group.address, position)
            )
            nodes[parent].below[last] = node
    for dataset in result.datasets.values():
        owner, _, last = dataset.path.rpartition("/")
        parent, _, group_name = owner.rpartition("/")
        if group_name == VARS and parent in nodes:
            nodes[parent].variables.append(dataset)
        else:
            strays.append(dataset)
    for node in nodes.values():
        node.variables.sort(key=lambda node: _number(node.path.rpartition("/")[2]))
        above: KerasNode | None = node if node.variables else None
        while above is not None and not above.holds:
            above.holds = True
            above = nodes[above.group.rpartition("/")[0]] if above.group else None
    return nodes[""], strays


def _number(name: str) -> tuple[bool, int, str]:
    return not name.isdecimal(), int(name[:9]) if name.isdecimal() else 0, name


class KerasMember(NamedTuple):
    """A child object: its node, its path relative to the parent, its class and settings.

    `position` is its position in the model's configuration, `container` the group of the list that
    contains it.
    """

    node: KerasNode
    steps: Path
    config: KerasConfig
    position: int = UNPLACED
    container: str | None = None


class KerasWalk:
    """Visit the objects in Keras's order and collect leaves, containers and trained variables."""

    def __init__(self, config: KerasConfig, root: KerasNode) -> None:
        """Start at a model's root; `config` adds information to the file, if there is one."""
        self.leaves: dict[Path, Leaf] = {}
        self.containers: dict[Path, Container] = {}
        self.optimizers: list[tuple[KerasNode, Path]] = []
        # Variables that each object trains, in its model's order, except for the objects `unsure`.
        self.trained: list[tuple[Path, list[TrainedVariable]]] = []
        self.unsure: list[Path] = []
        self.unnamed = 0
        # tf_keras writes no names, and its models list their own variables last (src/engine/training.py).
        self._own_last = root.name is None
        self._unknown_order = not config.layers() and _reorders(root)
        self._go(root, config)

    def _go(self, root: KerasNode, config: KerasConfig) -> None:
        own: list[tuple[Path, list[TrainedVariable]]] = []
        stack: list[tuple[KerasMember, Path, bool | None]] = [
            (KerasMember(root, (), config), (), None if config.cls is None else True)
        ]
        while stack:
            member, at, trainable = stack.pop()
            node = member.node
            flag = member.config.trainable
            trainable = False if flag is False else trainable if trainable is not None else flag
            path = self._free((*at, *member.steps), node)
            if self._is_optimizer(node):
                self.optimizers.append((node, path))
                inner = [KerasMember(below, (attr(edge),), NOTHING) for edge, below in node.below.items()]
                stack += [(member, path, None) for member in reversed(inner)]
                continue
            cls = member.config.cls
            if node.saved or node.variables:
                if _is_counter(node, member):
                    self.leaves[path] = dataset_leaf(node.variables[0], "counter")
                    continue
                trained = self._variables(node, path, cls, member.config, trainable)
                (own if node is root and self._own_last else self.trained).append((path, trained))
                self._contain(node, path, cls, member.config)
            members = self._members(node, path, cls, member.config)
            stack += [(member, path, trainable) for member in reversed(members)]
        self.trained += own

    def _free(self, path: Path, node: KerasNode) -> Path:
        if path in self.containers or path in self.leaves:
            return tuple(map(attr, node.group.split("/")))
        return path

    def _is_apart(self, node: KerasNode) -> bool:
        return METRICS in node.group.split("/") or self._is_optimizer(node)

    def _is_optimizer(self, node: KerasNode) -> bool:
        if node.group in ("optimizer", f"optimizer/{INNER}"):
            return True
        first = node.variables[0] if node.variables else None
        named = optimizer_class(node.name) is not None or node.slots
        return bool(named) and first is not None and not first.shape and "int" in first.dtype

    def _variables(
        self, node: KerasNode, path: Path, cls: str | None, config: KerasConfig, trainable: bool | None
    ) -> list[TrainedVariable]:
        cls = keras_config.SPECTRAL if cls is None and _has_normalized_kernel(node) else cls
        roles = keras_config.layer_variables(cls, config.settings, [value.shape for value in node.variables])
        other = METRICS in node.group.split("/")[:-1]
        trained = []
        for number, dataset in enumerate(node.variables):
            last = dataset.path.rpartition("/")[2]
            role: Role = "other" if other else "parameter" if roles is None else roles[number].role
            if roles is not None and not other and roles[number].name != keras_config.UNNAMED:
                location: Path = (*path, attr(roles[number].name))
            else:
                location = (*path, attr(VARS), index(int(last)) if _is_plain_number(last) else attr(last))
                self.unnamed += not other
            if location in self.leaves:
                location = tuple(map(attr, dataset.path.split("/")))
            # A quantized kernel is not trained, whatever its layer's settings are.
            learns = trainable if role == "parameter" and "int" not in dataset.dtype else False
            self.leaves[location] = dataset_leaf(dataset, role, learns)
            if role == "parameter" and learns is not False:
                trained.append(TrainedVariable(location, dataset.shape))
        return trained

    def _contain(self, node: KerasNode, path: Path, cls: str | None, config: KerasConfig) -> None:
        facts = {"group": node.group} | ({"layer": node.name} if node.name is not None else {})
        if self._unknown_order:
            facts["axis_order"] = "unknown"
        self.containers[path] = Container("module", cls, config.facts() | facts)

    def _members(
        self, node: KerasNode, path: Path, cls: str | None, config: KerasConfig
    ) -> list[KerasMember]:
        members: list[KerasMember] = []
        for edge, below in node.below.items():
            if edge in LAYERS and not below.saved:
                members += _iter_members(below, config)
            elif not below.saved and below.below and not below.variables:
                members += _iter_contained(below, attr(edge), config)
            else:
                members.append(
                    KerasMember(below, (attr(edge),), _infer_class(child_config(config, edge), below, edge))
                )
        return self._ordered(members, path, cls, configured=bool(config.layers()))

    def _ordered(
        self, members: list[KerasMember], path: Path, cls: str | None, *, configured: bool
    ) -> list[KerasMember]:
        """Return the members in the order in which the object lists their variables, if it is known."""
        members = sorted(members, key=lambda member: (member.position, member.node.rank))
        if cls in keras_config.ATTENTION or cls == "Bidirectional":
            return sorted(
                members,
                key=lambda name: keras_config.PARTS.get(str(name.steps[-1].value), len(keras_config.PARTS)),
            )
        holders = [m for m in members if m.node.holds and not self._is_apart(m.node)]
        if len(holders) < 2 or (configured and all(m.position < UNPLACED for m in holders)):
            return members
        if len({m.container for m in holders}) == 1 and holders[0].container is not None:
            if _numbers_agree(holders):
                return members
            # HDF5 reuses freed space, so that a later object may have a lower address. Keras numbers the
            # layers of one class in their order (keras/src/saving/saving_lib.py, _save_container_state).
            self.unsure.append(path)
            return _in_number_order(members, holders)
        # Attributes are stored in alphabetical order; the numbers in Keras's names give the creation order.
        names = [keras_config.split_number(m.node.name or "") for m in holders]
        if (
            len({stem for stem, _ in names}) > 1
            or keras_config.class_from_name(names[0][0]) is None
            or len({*names}) < len(names)
        ):
            self.unsure.append(path)
            return members
        chosen = {id(m) for m in holders}
        numbered = iter(sorted(holders, key=lambda m: keras_config.split_number(m.node.name or "")[1]))
        return [next(numbered) if id(m) in chosen else m for m in members]


def _reorders(root: KerasNode) -> bool:
    """Return whether an image model lists layers that reorder axes, without settings in the file.

    Source: keras/src/saving/saving_lib.py, which makes a group for every layer of a functional model.
    """
    reorders, convolves = False, False
    waiting = [root]
    while waiting:
        node = waiting.pop()
        waiting += node.below.values()
        convolves |= any(len(variable.shape) > _MATRIX for variable in node.variables)
        name = node.group.rpartition("/")[2]
        reorders |= not node.variables and _REORDERS.fullmatch(name) is not None
    return reorders and convolves


def _iter_members(container: KerasNode, config: KerasConfig) -> Iterator[KerasMember]:
    known = stored_names(config.layers())
    places = {name: number for number, name in enumerate(known)}
    for name, node in container.below.items():
        inferred = _infer_class(known.get(name, NOTHING), node, name, stored=True)
        step = attr(node.name or inferred.name or name)
        yield KerasMember(node, (step,), inferred, places.get(name, UNPLACED), container.group)


def _iter_contained(container: KerasNode, step: PathStep, config: KerasConfig) -> Iterator[KerasMember]:
    """Yield the objects in a list or dict, including nested lists and dicts."""
    setting = config.settings.get(str(step.value))
    known = stored_names([config_of(item) for item in setting]) if isinstance(setting, list) else {}
    stack: list[tuple[KerasNode, Path]] = [(container, (step,))]
    while stack:
        node, steps = stack.pop()
        for name, below in node.below.items():
            if not below.saved and below.below and not below.variables:
                stack.append((below, (*steps, attr(name))))
                continue
            stored = known.get(name, NOTHING) if node is container else NOTHING
            # A name that Keras gives to each layer of a class is no name of the program's.
            own = below.name is not None and keras_config.class_from_name(below.name) is None
            renamed = own and split_number(str(below.name))[0] != split_number(name)[0]
            shown = below.name if renamed and below.name is not None else name
            setting = _infer_class(stored, below, name, stored=True)
            yield KerasMember(below, (*steps, attr(shown)), setting, container=container.group)


def _infer_class(config: KerasConfig, node: KerasNode, name: str, *, stored: bool = False) -> KerasConfig:
    """Return the settings; if they are missing, with the class recorded in the file."""
    if config.cls is not None:
        return config
    cls = keras_config.class_from_name(name) if stored else None
    if name == "seed_generator":
        cls = "SeedGenerator"
    if cls is None and node.name is not None and node.variables:
        cls = keras_config.class_from_name(node.name)
        if keras_config.layer_variables(cls, {}, [variable.shape for variable in node.variables]) is None:
            cls = None
    return KerasConfig(cls, config.settings)


def _numbers_agree(members: Iterable[KerasMember]) -> bool:
    """Return whether layers of one class are in the order of their numbers."""
    last: dict[str, int] = {}
    for member in members:
        stem, number = keras_config.split_number(member.node.group.rpartition("/")[2])
        if number < last.get(stem, -1):
            return False
        last[stem] = number
    return True


def _in_number_order(members: Sequence[KerasMember], holders: Iterable[KerasMember]) -> list[KerasMember]:
    """Return the members with the layers of each class in the order of their numbers."""
    classes: dict[str, list[tuple[int, KerasMember]]] = {}
    stems = {}
    for member in holders:
        stem, number = keras_config.split_number(member.node.group.rpartition("/")[2])
        classes.setdefault(stem, []).append((number, member))
        stems[id(member)] = stem
    rows = {
        stem: iter([member for _, member in sorted(row, key=lambda member: member[0])])
        for stem, row in classes.items()
    }
    return [next(rows[stems[id(member)]]) if id(member) in stems else member for member in members]


def _is_counter(node: KerasNode, member: KerasMember) -> bool:
    """Return whether this is a counter with a group of its own name, as keras_h5.place creates it."""
    if node.below or len(node.variables) != 1 or not member.steps or member.config.cls is not None:
        return False
    (only,) = node.variables
    return node.name == member.steps[-1].value and not only.shape and only.dtype in ("int64", "int32")


def _is_plain_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name[:18])) == name


def dataset_leaf(
    dataset: Hdf5Dataset,
    role: Role = "parameter",
    trainable: bool | None = None,
    *,
    of: Path | None = None,
    slot: str | None = None,
) -> Leaf:
    """Return a dataset as a leaf.

    Args:
        dataset: its bytes, type and shape; its path is the leaf's key.
        role: what the leaf is in the model.
        trainable: whether an optimizer may change it; None if unknown.
        of: the path of the variable whose slot it is.
        slot: the kind of that slot.
    """
    return Leaf(dataset.dtype, dataset.shape, dataset.source, dataset.path, role, of, slot, trainable)


Round = tuple[str, ...]

# Of classes that are not converted.
_ROUNDS: dict[str, tuple[Round, ...]] = {
    **dict.fromkeys(("Nadam", "Lamb", "ScheduleFreeAdamW"), (("m", "v"),)),
    "Ftrl": (("accumulator", "linear"),),
    "Lion": (("m",),),
}
_CLASSES = {
    snake_case(name): name
    for name in (
        *("AdamW", *(family.name for family in FAMILIES), *_ROUNDS),
        *("Adafactor", "Muon", "LossScaleOptimizer"),
    )
}
# Default names with other spellings (tf_keras names an AdamW "AdamW", Keras 3.0 an RMSprop "rmsprop").
_CLASSES |= {"adamw": "AdamW", "rmsprop": "RMSprop", "r_m_sprop": "RMSprop"}
_SCALAR = "float"
INNER = "inner_optimizer"  # keras/src/optimizers/loss_scale_optimizer.py
_SCALED: tuple[tuple[str, Role], ...] = (
    *(("iterations", "counter"), ("learning_rate", "other")),
    *(("step_counter", "other"), ("dynamic_scale", "other")),
)
# The attribute that names weights in older Keras files; here it names an optimizer's variables.
SLOTS = "weight_names"


class TrainedVariable(NamedTuple):
    """A variable that the optimizer trains."""

    path: Path
    shape: Shape


def optimizer_class(name: str | None) -> str | None:
    """Return the optimizer's class from the name that Keras gave it, if it is a Keras optimizer."""
    return _CLASSES.get(snake_case(split_number(name)[0])) if name else None


def optimizer_config(value: object) -> KerasConfig:
    """Return an optimizer's configuration; `model.compile("adam")` may record only its name."""
    if isinstance(value, str):
        return KerasConfig(optimizer_class(value), {})
    config = config_of(value)
    if "lr" not in config.settings:
        return config
    # Before Keras 2.3, the learning rate is `lr`.
    settings = {"learning_rate" if name == "lr" else name: value for name, value in config.settings.items()}
    return config._replace(settings=settings)


def slot_rounds(cls: str | None, settings: Mapping[str, Any]) -> tuple[Round, ...] | None:
    """Return the kinds of slots, round after round; None for a class with an unknown order."""
    own, family = _ROUNDS.get(cls or ""), find_class(cls.lower() if cls else None)
    if family is not None:
        # A file without settings has the momentum of SGD.
        used = {"momentum": 1.0 if family is SGD else 0.0, **settings}
        own = family.keras_kinds([s.name for s in family.specs if not s.setting or used.get(s.setting)])
    if own is None:
        return None
    first: tuple[Round, ...] = (("average",),) if settings.get("use_ema") is True else ()
    if settings.get("gradient_accumulation_steps"):
        first += (("gradient",),)
    return first + own


def optimizer_leaves(
    datasets: Sequence[Hdf5Dataset], at: Path, config: KerasConfig, trained: Sequence[TrainedVariable] | None
) -> tuple[dict[Path, Leaf], bool]:
    """Return an optimizer's leaves, and whether every slot was matched to its variable.

    `trained` are the trained variables in the optimizer's order, None if that order is unknown. Counts and
    shapes must agree exactly; otherwise no slot is assigned to a variable. Keras 3 numbers them in creation
    order: iteration, learning rate, then one round after another over the trained variables
    (keras/src/optimizers/base_optimizer.py, build and add_optimizer_variables, and
    keras/src/optimizers/*.py). tf_keras 2.11 and later does the same without a learning rate
    (tf_keras/src/optimizers/*.py).
    """
    if config.cls == "LossScaleOptimizer" and len(datasets) >= len(_SCALED):
        return _loss_scale_leaves(datasets, at), True
    order = _slot_order(datasets, config, trained)
    for number, kinds in ((n, _match_slots(datasets[n:], order, trained)) for n in setting_counts(datasets)):
        if kinds is None:
            continue
        settings = _settings(datasets[:number], at)
        for dataset, kind, of in kinds:
            settings[slot_path(at, kind, of)] = dataset_leaf(dataset, "slot", of=of, slot=kind)
        rest = datasets[number + len(kinds) :]
        for n, dataset in enumerate(rest):
            name = "u_product" if config.cls == "Nadam" and not n else f"vars/{number + len(kinds) + n}"
            settings[(*at, *map(attr, name.split("/")))] = dataset_leaf(dataset, "other")
        return settings, True
    start = max(setting_counts(datasets))
    settings = _settings(datasets[:start], at)
    for number, dataset in enumerate(datasets[start:], start):
        last = dataset.path.rpartition("/")[2] or str(number)
        settings[*at, attr("vars"), attr(last)] = dataset_leaf(dataset, "slot" if dataset.shape else "other")
    return settings, start == len(datasets)


def _slot_order(
    datasets: Sequence[Hdf5Dataset], config: KerasConfig, trained: Sequence[TrainedVariable] | None
) -> tuple[Round, ...] | None:
    """Return the kinds of slots, round after round.

    A weights file has no settings: for Adam, use the variant whose shapes fit, if it is the only one.
    """
    if config.settings or config.cls not in ("Adam", "AdamW"):
        return slot_rounds(config.cls, config.settings)
    able = [slot_rounds(config.cls, settings) for settings in _ADAMS]
    fits = [
        order
        for order in able
        if any(_match_slots(datasets[n:], order, trained) is not None for n in setting_counts(datasets))
    ]
    return fits[0] if len(fits) == 1 else able[0]


_ADAMS: tuple[Mapping[str, Any], ...] = (
    {},
    {"amsgrad": True},
    {"use_ema": True},
    {"amsgrad": True, "use_ema": True},
)


def _loss_scale_leaves(datasets: Sequence[Hdf5Dataset], at: Path) -> dict[Path, Leaf]:
    """Return the variables of a LossScaleOptimizer: its own four, then all of the inner optimizer.

    Source: keras/src/optimizers/loss_scale_optimizer.py, build and variables.
    """
    leaves = _settings(datasets, at, _SCALED)
    for number, dataset in enumerate(datasets[len(_SCALED) :], len(_SCALED)):
        last = dataset.path.rpartition("/")[2] or str(number)
        leaves[*at, attr("vars"), attr(last)] = dataset_leaf(dataset, "other")
    return leaves


def listed_leaves(
    datasets: Sequence[Hdf5Dataset], at: Path, names: Sequence[str], owners: Mapping[str, tuple[Path, Shape]]
) -> dict[Path, Leaf] | None:
    """Return an optimizer's leaves if the file records the meaning of each, as ckpttool's files do.

    `names` has `KIND/DATASET` for every slot and an empty string for other variables; `owners` are the
    model's variables by dataset. Return None if anything disagrees.
    """
    settings = [d for d, name in zip(datasets, names, strict=False) if not name]
    if len(names) != len(datasets) or max(setting_counts(settings)) != len(settings):
        return None
    leaves = _settings(settings, at)
    for dataset, name in zip(datasets, names, strict=True):
        kind, _, of = name.partition("/")
        if not name:
            continue
        path, shape = owners.get(of, (None, None))
        if path is None or shape != dataset.shape or not kind or slot_path(at, kind, path) in leaves:
            return None
        leaves[slot_path(at, kind, path)] = dataset_leaf(dataset, "slot", of=path, slot=kind)
    return leaves


def setting_counts(datasets: Sequence[Hdf5Dataset]) -> list[int]:
    """Return how many leading variables may be settings: the iteration, then 0 or 1 learning rates."""
    if not datasets or datasets[0].shape or "int" not in datasets[0].dtype:
        return [0]
    if len(datasets) > 1 and not datasets[1].shape and _SCALAR in datasets[1].dtype:
        return [2, 1]
    return [1]


_SETTINGS: tuple[tuple[str, Role], ...] = (("iterations", "counter"), ("learning_rate", "other"))


def _settings(
    datasets: Sequence[Hdf5Dataset], at: Path, named: tuple[tuple[str, Role], ...] = _SETTINGS
) -> dict[Path, Leaf]:
    pairs = zip(named, datasets, strict=False)
    return {(*at, attr(name)): dataset_leaf(dataset, role) for (name, role), dataset in pairs}


def _match_slots(
    slots: Sequence[Hdf5Dataset], order: tuple[Round, ...] | None, trained: Sequence[TrainedVariable] | None
) -> list[tuple[Hdf5Dataset, str, Path]] | None:
    if order is None or trained is None:
        return None
    expected = [(kind, one) for kinds in order for one in trained for kind in kinds]
    # Nadam ends with an additional scalar.
    extra = slots[len(expected) :]
    if len(slots) < len(expected) or len(extra) > 1 or any(dataset.shape for dataset in extra):
        return None
    pairs = list(zip(slots, expected, strict=False))
    if any(dataset.shape != one.shape for dataset, (_, one) in pairs):
        return None
    return [(dataset, kind, one.path) for dataset, (kind, one) in pairs]


# Prefixes and suffixes of slot names: Keras 2 `Adam/dense/kernel/m`, 2.11 `Adam/m/dense/kernel`, 3
# `adam/dense_kernel_momentum` (save_optimizer_weights_to_hdf5_group of legacy_h5_format.py).
_KINDS = {spec.ending: spec.keras for family in (*FAMILIES, ADAM) for spec in family.specs}
_KINDS["gradient_accumulator"] = "gradient"
_COUNTERS = frozenset(("iter", "iteration", "iterations"))


def named_leaves(
    datasets: Sequence[tuple[str, Hdf5Dataset]], at: Path, config: KerasConfig, owners: Mapping[str, Path]
) -> tuple[dict[Path, Leaf], bool]:
    """Return the leaves of an optimizer with named variables, and whether every slot was matched.

    `owners` are the model's variables by their saved names (a name that two share is absent).
    """
    leaves: dict[Path, Leaf] = {}
    flat = {name.replace("/", "_"): path for name, path in owners.items()}
    complete = True
    for name, dataset in datasets:
        short = name.removesuffix(":0")
        parts = short.removeprefix("training/").split("/")
        last = parts[-1]
        # Names begin with the optimizer's name, in Keras 2.11 to 2.15 with the kind (`m/dense/kernel`).
        owner = _find_owner("/".join(parts[1:]), owners, flat) or _find_owner("/".join(parts), owners, flat)
        if last in _COUNTERS:
            path, leaf = (*at, attr("iterations")), dataset_leaf(dataset, "counter")
        elif owner is not None:
            kind = _kind(owner[0], config.cls or optimizer_class(parts[0]))
            path, leaf = slot_path(at, kind, owner[1]), dataset_leaf(dataset, "slot", of=owner[1], slot=kind)
        else:
            role: Role = "slot" if dataset.shape else "other"
            complete = complete and not dataset.shape
            path, leaf = (*at, *map(attr, parts[1:] or parts)), dataset_leaf(dataset, role)
        leaves[path if path not in leaves else (*at, *map(attr, short.split("/")))] = leaf
    return leaves, complete


def _kind(word: str, cls: str | None) -> str:
    family = find_class(cls.lower() if cls else None)
    if family is SGD and word == "m":
        return "momentum"
    own = {spec.ending: spec.keras for spec in family.specs} if family is not None else {}
    return own.get(word) or _KINDS.get(word, word)


def _find_owner(rest: str, owners: Mapping[str, Path], flat: Mapping[str, Path]) -> tuple[str, Path] | None:
    kind, slash, name = rest.partition("/")
    if slash and name in owners:
        return kind, owners[name]
    name, slash, kind = rest.rpartition("/")
    if slash and name in owners:
        return kind, owners[name]
    for at, letter in enumerate(rest):
        if letter == "_" and rest[:at] in flat and len(rest) - at <= 32:
            return rest[at + 1 :], flat[rest[:at]]
    return None


_UNNAMED = deferred.compile(r"(?:.*/)?Variable(_\d+)?(:0)?", re.DOTALL)
_NUMBERED = deferred.compile(r"(?:.*/)?([a-z_]+)_(\d+)(:0)?", re.DOTALL)
_UNNAMED_CLASSES = ("Nadam", *(family.name for family in FAMILIES))
# The words before the number; SGD calls its momentum `moment`, RMSprop and others theirs `accumulator`.
_WORDS = {
    "momentum": "moment",
    "rms": "accumulator",
    "accumulated_grad": "accumulator",
    "accumulated_delta": "delta_accumulator",
}


def leaves_by_count(
    datasets: Sequence[tuple[str, Hdf5Dataset]],
    at: Path,
    config: KerasConfig,
    trained: Sequence[TrainedVariable],
) -> dict[Path, Leaf] | None:
    """Return an optimizer's leaves, or None if its slots have names or do not fit the variables.

    `trained` are in the model's order. Counts and shapes must agree exactly. Source: keras/optimizers.py of
    Keras 2.0 to 2.3 and tensorflow/python/keras/optimizers.py of TensorFlow 1.4 to 1.13: `get_updates` sets
    `self.weights = [self.iterations] + ms + vs + vhats` and the like, each list over the model's trainable
    weights. RMSprop, Adagrad and Adadelta have no iteration there. An Adam without amsgrad has vhats of one
    zero each since 2.1; SGD has its moments even without momentum.
    """
    settings = [dataset for dataset in datasets if not dataset[1].shape]
    slots = [dataset for dataset in datasets if dataset[1].shape]
    amsgrad = config.settings.get("amsgrad") is True
    rounds = slot_rounds(config.cls, {"amsgrad": amsgrad}) if config.cls in _UNNAMED_CLASSES else None
    kinds = [kind for kinds in rounds or () for kind in kinds]
    if not kinds or not trained:
        return None
    expected = [(kind, one) for kind in kinds for one in trained]
    rest = slots[len(expected) :]
    if len(slots) < len(expected) or any(dataset.shape != (1,) for _, dataset in rest):
        return None
    if rest and (config.cls != "Adam" or len(rest) != len(trained)):
        return None
    numbered = [(kind, number) for kind in (*kinds, "vhat") for number in range(len(trained))]
    if not all(_UNNAMED.fullmatch(name) for name, _ in slots) and not all(
        _is_numbered(name, *slot) for (name, _), slot in zip(slots, numbered, strict=False)
    ):
        return None
    leaves: dict[Path, Leaf] = {}
    for (_, dataset), (kind, one) in zip(slots, expected, strict=False):
        if dataset.shape != one.shape:
            return None
        path = slot_path(at, kind, one.path)
        leaves[path] = dataset_leaf(dataset, "slot", of=one.path, slot=kind)
    for name, dataset in (*settings, *rest):
        counts = re.fullmatch(r"iterations?(_\d+)?(:0)?", name.rpartition("/")[2]) is not None
        last = (attr("iterations"),) if counts else tuple(map(attr, name.removesuffix(":0").split("/")))
        path = (*at, *last) if (*at, *last) not in leaves else (*at, *map(attr, name.split("/")))
        role: Role = "counter" if counts else "other"
        leaves[path] = dataset_leaf(dataset, role)
    return leaves if len(leaves) == len(datasets) else None


def _is_numbered(name: str, kind: str, number: int) -> bool:
    match = _NUMBERED.fullmatch(name)
    return match is not None and (match[1], int(match[2])) == (_WORDS.get(kind, kind), number)


_MOST = 64  # limit on optimizers: each is compared with every layer
_ENDS = ("_optimizer", "_optim", "_opt")


def find_trained_network(at: Path, walk: KerasWalk) -> Path | None:
    """Return what the optimizer at this path trains: `X` for `X_optimizer`, or all its siblings.

    None if there is no such object, for several optimizers without a deciding name, for more than _MOST, and
    for an optimizer that is the whole file.
    """
    if len(walk.optimizers) > _MOST or not at:
        return None
    beside = at[:-1]
    name = str(at[-1].value)
    for end in _ENDS:
        sibling = (*beside, attr(name.removesuffix(end)))
        if name.endswith(end) and sibling in walk.containers:
            return sibling
    others = [other for _, other in walk.optimizers if not other or other[-1].value != INNER]
    alone = sum(other[: len(beside)] == beside for other in others) == 1
    return beside if alone or name == "optimizer" else None


def trained_variables(
    node: KerasNode, config: KerasConfig, of: Path | None, walk: KerasWalk
) -> list[TrainedVariable] | None:
    """Return the variables that an optimizer trains, in its order; None unless it is unambiguous.

    Keras does not store this (keras/src/saving/saving_lib.py). Assumptions: an optimizer visits its layers
    one after another (keras/src/layers/layer.py, trainable_variables), and every slot has its variable's
    shape.
    """
    if of is None:
        return None
    cut = len(of)
    layers = [variable for path, variable in walk.trained if variable and path[:cut] == of]
    if not any(path[:cut] == of for path in walk.unsure):
        return [one for layer in layers for one in layer]
    rounds = slot_rounds(config.cls, config.settings)
    if not rounds:
        return None
    count, step = sum(map(len, layers)), len(rounds[0])
    for start in setting_counts(node.variables):
        slots = node.variables[start : start + count * step : step]
        order = order_from_slots([one.shape for one in slots], layers)
        if order is not None:
            return order
    return None


def order_from_slots(
    slots: Sequence[Shape], layers: Sequence[Sequence[TrainedVariable]]
) -> list[TrainedVariable] | None:
    """Return the trained variables in the optimizer's order, derived from the first slots' shapes.

    An optimizer visits layer after layer, each in its own order; the shapes must identify the next
    layer at every step, and every layer must occur. Otherwise return None.
    """
    waiting: dict[tuple[Shape, ...], list[Sequence[TrainedVariable]]] = {}
    for layer in layers:
        waiting.setdefault(tuple(one.shape for one in layer), []).append(layer)
    if any(len(same) > 1 for same in waiting.values()):
        return None
    lengths = sorted({len(shapes) for shapes in waiting})
    order: list[TrainedVariable] = []
    for _ in layers:
        at = len(order)
        left = [n for n in lengths if at + n <= len(slots)]
        fits = [matches for n in left if (matches := waiting.get(tuple(slots[at : at + n])))]
        if len(fits) != 1:
            return None
        (layer,) = fits[0]
        order += layer
        fits[0].clear()
    return order


def read_shards(file: File) -> tuple[tuple[File, ...], Hdf5Index]:
    """Return the map, its shards from the same folder, and their merged content.

    Source: keras/src/saving/saving_lib.py, ShardedH5IOStore: `{"metadata": {"total_size": bytes},
    "weight_map": {"/layers/dense/vars": ["model_00000.weights.h5", ...]}}`; a group may be in several files.
    """
    record = text.load_json(file.path, "the shard map of a .weights.h5 file")
    names = shard_names(record, file.path)
    folder = os.path.dirname(file.path)
    shards = [File.beside(os.path.join(folder, name), file.path) for name in names]
    return (file, *shards), merge_shards(
        [hdf5.read_index(hdf5.whole_file(shard)) for shard in shards], file.path
    )


def shard_names(document: dict[str, Any], path: str) -> list[str]:
    """Return the names of the shards in order; raise FormatError for one in another folder."""
    weights = document.get("weight_map")
    if not isinstance(weights, dict):
        raise FormatError("the file is not the shard map of a .weights.h5 file", file=path)
    names: dict[str, None] = {}
    for value in weights.values():
        for name in value if isinstance(value, list) else [value]:
            if not is_file_name(name):
                raise FormatError("a shard must be a file in the same folder as the map", file=path)
            names[name] = None
    if not names:
        raise FormatError("the map lists no shards", file=path)
    return sorted(names)


def merge_shards(indexes: Iterable[Hdf5Index], path: str) -> Hdf5Index:
    """Return the groups and datasets of all shards; raise FormatError for a duplicate dataset."""
    groups: dict[str, Hdf5Group] = {}
    datasets: dict[str, Hdf5Dataset] = {}
    same: dict[str, str] = {}
    notes: list[str] = []
    base = 0
    for one in indexes:
        for name, group in one.groups.items():
            # Objects in a later shard were created later.
            groups.setdefault(name, group._replace(address=base + group.address))
        for name, dataset in one.datasets.items():
            if name in datasets:
                raise FormatError(f"dataset {name[:200]} is in two shards", file=path)
            datasets[name] = dataset
        same |= one.same
        notes += one.notes
        base += 1 << 62
    return Hdf5Index(groups, datasets, same, tuple(notes))
