"""Keras files: weights and models in HDF5, .keras archives, and the pairs of keras-rl."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from ckpttool.core import deferred, dtypes, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import FormatError, UnsupportedError, locate_errors
from ckpttool.core.optimizers import FAMILIES
from ckpttool.core.source import File
from ckpttool.core.tree import Leaf, Path, PathStep, Tree, attr, display
from ckpttool.encodings import archives
from ckpttool.encodings.archives import ZipArchive
from ckpttool.formats import file_listing, hdf5, keras_tree
from ckpttool.formats.file_listing import FileListing, join_checkpoints
from ckpttool.formats.hdf5 import Hdf5Dataset, Hdf5Group, Hdf5Index
from ckpttool.formats.keras_config import (
    PARTS,
    ConfigAudit,
    audit_json,
    class_from_name,
    config_of,
    merge_audits,
    parse_config,
    snake_case,
    variables_by_shape,
)
from ckpttool.formats.keras_tree import SLOTS, list_model, optimizer_class, optimizer_config
from ckpttool.formats.probe import FormatDefinition, OutputFile, Probe, WritingFormatDefinition
from ckpttool.formats.tf_object_graph import slot_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import h5py  # type: ignore[import-untyped]


NAME = "keras_h5"
TITLE = "Keras HDF5 file (.h5, .weights.h5)"
WRITES = True
FRAMEWORK = "tensorflow"

MAGIC = b"\x89HDF\r\n\x1a\n"
_BLOCK = 512


def claims(probe: Probe) -> str | None:
    """Return the path of an HDF5 file, or of the JSON map of a sharded `.weights.h5`."""
    if probe.kind != "file":
        return None
    # A .keras file of Keras 3 is a zip archive; one of its HDF5 members may begin where a user block would
    # end.
    zipped = probe.head.startswith(b"PK") and probe.name.lower().endswith(".keras")
    if probe.head.startswith(MAGIC) or (_has_suffix(probe.name) and not zipped and _has_user_block(probe)):
        return probe.path
    if probe.name.endswith(".weights.json") and probe.head.lstrip().startswith(b"{"):
        return probe.path
    return None


def _has_suffix(name: str) -> bool:
    return name.lower().endswith((".h5", ".hdf5", ".h5f", ".hdf", ".he5", ".keras"))


def _has_user_block(probe: Probe) -> bool:
    """Return whether the file begins with a user block of 512 bytes times a power of two.

    Source: HDF5 File Format Specification 3.0, II.A.
    """
    block = _BLOCK
    try:
        while block < probe.size:
            if filesystem.read_bytes(probe.path, block, len(MAGIC)) == MAGIC:
                return True
            block *= 2
    except OSError:
        return False
    return False


def read(location: str) -> Checkpoint:
    """List the file; raise FormatError if it is damaged, UnsupportedError if it refers to other files.

    Other HDF5 files are listed as plain datasets. Sources: keras/src/legacy/saving/legacy_h5_format.py,
    keras/src/saving/saving_lib.py.
    """
    file = File.stamp(location)
    if location.endswith(".json"):
        files, index = keras_tree.read_shards(file)
    else:
        files, index = (file,), hdf5.read_index(hdf5.whole_file(file))
    with locate_errors(file=file.path):
        listing = list_model(index)
    version = listing.details.get("keras_version")
    writer = f"Keras {version}" if isinstance(version, str) else None
    return replace(listing, writer=writer).checkpoint(location, NAME, *files)


VARS = "vars"
_ATTRIBUTE = 64512


def pieces(tree: Tree, *, root: str | None = None) -> tuple[OutputFile, ...]:
    """Return the single `.weights.h5` file for the tree; raise UnsupportedError if it cannot be stored.

    `root` is the attribute that holds the model, for trees of a tf.train.Checkpoint. Source:
    keras/src/saving/saving_lib.py, H5IOStore: a group `vars` with an attribute `name` for every object, with
    numbered datasets, bfloat16 as two opaque bytes with an attribute `dtype`. Groups record creation order,
    objects have no timestamps.
    """
    places = place_tree(tree, root)
    for path, leaf in tree.tensors():
        row = dtypes.BY_NAME[leaf.dtype]
        if (row.extension and row.name != "bfloat16") or not row.itemsize or row.name.startswith("q"):
            raise UnsupportedError(
                f"a .weights.h5 file cannot store {leaf.dtype} tensors", path=display(path)
            )
    groups = _groups(places)
    return (OutputFile("", lambda stream: _write(stream, places, groups)),)


def stored(tree: Tree, *, root: str | None = None) -> Tree:
    """Return the tree with the paths and keys that it will have when the file is read."""
    places = place_tree(tree, root)
    datasets = {
        path: Hdf5Dataset(path, number, leaf.dtype, leaf.shape, leaf.source)
        for number, (path, leaf) in enumerate(places.datasets.items())
    }
    groups = {
        path: Hdf5Group(path, number, True, attributes)
        for number, (path, attributes) in enumerate(_groups(places).items())
    }
    return list_model(Hdf5Index(groups, datasets, {}, ())).tree


def _groups(places: KerasPlacement) -> dict[str, dict[str, Any]]:
    """Return every group with its attributes, parents first."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for group, name in places.groups.items():
        _add(groups, f"{group}/{VARS}".lstrip("/"))
        if name is not None:
            groups[f"{group}/{VARS}".lstrip("/")]["name"] = name
    for path in places.datasets:
        _add(groups, path.rpartition("/")[0])
    for group, slots in places.slots.items():
        groups[f"{group}/{VARS}"] |= _split_attribute(slots)
    both = groups.keys() & places.datasets.keys()
    if both:
        raise UnsupportedError("a tensor and a group have the same name", path=min(both))
    return groups


def _add(groups: dict[str, dict[str, Any]], path: str) -> None:
    parts = path.split("/") if path else []
    for depth in range(1, len(parts) + 1):
        groups.setdefault("/".join(parts[:depth]), {})


def _split_attribute(names: list[str]) -> dict[str, list[str]]:
    """Return a list as attributes of at most _ATTRIBUTE bytes each, numbered as in Keras.

    Source: keras/src/legacy/saving/legacy_h5_format.py, save_attributes_to_hdf5_group.
    """
    width = max(len(name.encode()) for name in names)
    step = max(1, _ATTRIBUTE // max(1, width))
    if len(names) <= step:
        return {SLOTS: names}
    starts = range(0, len(names), step)
    return {f"{SLOTS}{number}": names[at : at + step] for number, at in enumerate(starts)}


def _write(stream: IO[bytes], places: KerasPlacement, groups: dict[str, dict[str, Any]]) -> None:
    if stream.readable():
        _fill(stream, places, groups)
        return
    # The library reads back its own output, which a write-only stream does not allow.
    with open(stream.name, "r+b") as both:
        _fill(both, places, groups)


def _fill(stream: IO[bytes], places: KerasPlacement, groups: dict[str, dict[str, Any]]) -> None:
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, stream)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    created = h5py.h5f.create(
        b"weights", h5py.h5f.ACC_TRUNC, _ordered_properties(h5py, h5py.h5p.FILE_CREATE), access
    )
    with h5py.File(created) as file:
        groups_: dict[str, h5py.Group] = {"": file["/"]}
        for path, attributes in groups.items():
            group = _require_group(h5py, groups_, path)
            for name, value in attributes.items():
                # Fixed-width strings, as Keras writes lists of names.
                group.attrs[name] = [text.encode() for text in value] if isinstance(value, list) else value
        for path, leaf in places.datasets.items():
            parent, _, last = path.rpartition("/")
            array = leaf.array()
            dataset = groups_[parent].create_dataset(last, data=array, track_times=False)
            if leaf.dtype == "bfloat16":
                dataset.attrs["dtype"] = leaf.dtype


def _require_group(h5py: Any, created: dict[str, h5py.Group], path: str) -> Any:
    """Return the group; create it and its parents if necessary."""
    missing = []
    while path not in created:
        path, _, last = path.rpartition("/")
        missing.append(last)
    for last in reversed(missing):
        gcpl = _ordered_properties(h5py, h5py.h5p.GROUP_CREATE)
        group = h5py.Group(h5py.h5g.create(created[path].id, last.encode(), gcpl=gcpl))
        path = f"{path}/{last}" if path else last
        created[path] = group
    return created[path]


def _ordered_properties(h5py: Any, kind: Any) -> Any:
    """Return the creation properties of a group with member order and without timestamps."""
    properties = h5py.h5p.create(kind)
    properties.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    properties.set_obj_track_times(False)
    return properties


# Writer metadata: kernels have the orientation of Keras 2.
_WRITER = {"keras_version": b"2.3.1", "backend": b"tensorflow"}


def build_legacy_file(layers: Mapping[str, Mapping[str, Leaf]]) -> bytes:
    """Return the file of these layers, each with its weights by name (`dense_1/kernel:0`), in order.

    Source: keras/src/legacy/saving/legacy_h5_format.py, `save_weights_to_hdf5_group`. Keras loads in that
    order.
    """
    import h5py

    def texts(names: Iterable[str]) -> np.ndarray:
        return np.array([name.encode() for name in names], "S")

    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        root.attrs["layer_names"] = texts(layers)
        for name, value in _WRITER.items():
            root.attrs[name] = np.bytes_(value)
        for layer, weights in layers.items():
            group = root.create_group(layer)
            group.attrs["weight_names"] = texts(weights)
            for path, leaf in weights.items():
                group.create_dataset(path, data=leaf.array(), track_times=False)
    return file.getvalue()


# The order in which Keras layers create their variables; no layer uses the reverse order for any two.
_ORDER = (
    *("embeddings", "kernel", "depthwise_kernel", "pointwise_kernel", "recurrent_kernel", "gamma", "alpha"),
    *("scale", "bias", "beta", "mean", "moving_mean", "variance", "moving_variance", "count", "state"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
# Layers identified by their variables, recurrent ones by the gates of their cells.
_BY_NAMES = {
    frozenset(("embeddings",)): "embedding",
    frozenset(("alpha",)): "p_re_lu",
    frozenset(("mean", "variance", "count")): "normalization",
}
_CELL, _BY_GATES = "cell", {1: "simple_rnn", 3: "gru", 4: "lstm"}
_CONVOLUTIONS = {2: "dense", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
# Edges of tf.train.Checkpoint to a Keras model's layers (keras/src/models/sequential.py, functional.py).
_SEQUENCES = ("_operations", "_layers")
_INNER = "_functional"
# Dense layers of attention, with private attributes in checkpoints and public ones in Keras files.
_PROJECTIONS = frozenset(f"_{name}" for name in PARTS if name.endswith("_dense"))
COUNTER = "save_counter"
_OPTIMIZER = (attr("optimizer"),)
LAYERS = "layers"


class KerasPlacement(NamedTuple):
    """The place of everything: datasets by path in order, and each object's group with its name.

    An object's group is named after its own attribute. Keras itself saves an object whose attribute
    sorts after `layers` as one of the model's layers, by class and number. It does not find it there,
    and then uses the attribute (saving_lib.py, _load_state); a wrong number would load another layer's
    weights. `slots` maps an optimizer's group to the meaning of its variables (keras_tree.optimizers,
    listed_leaves).
    """

    datasets: dict[str, Leaf]
    groups: dict[str, str | None]
    slots: dict[str, list[str]]


def place_tree(tree: Tree, root: str | None = None) -> KerasPlacement:
    """Return the place of every leaf; raise UnsupportedError for the first leaf without one.

    A tree that was read from a `.weights.h5` keeps its places. In any other tree, modules become groups by
    their attributes, and numbered modules become the layers of a Sequential model. With `root`, the model is
    the subtree under that attribute, and tf.train.Checkpoint's own save counter is omitted. Without such an
    attribute, a checkpoint of one network becomes that network's file, and its optimizer `optimizer`:
    `model.load_weights` can load the output of `Checkpoint(net=model, opt=opt)`. Source:
    keras/src/saving/saving_lib.py, _save_state and _save_container_state.
    """
    for path, value in tree.plain():
        raise UnsupportedError(
            f"a .weights.h5 file stores tensors only, not {type(value.value).__name__}", path=display(path)
        )
    for path, leaf in tree.tensors():
        if leaf.dtype == "string":
            raise UnsupportedError("a .weights.h5 file cannot store strings", path=display(path))
    top = tree.containers.get(())
    if top is not None and isinstance(top.state, dict) and top.state.get("group") == "":
        return _original_placement(tree)
    return _PlacementBuilder(tree, root).placed()


def _original_placement(tree: Tree) -> KerasPlacement:
    groups: dict[str, str | None] = {}
    for container in tree.containers.values():
        state = container.state if isinstance(container.state, dict) else {}
        group, name = state.get("group"), state.get("layer")
        if isinstance(group, str):
            groups[group] = name if isinstance(name, str) else None
    datasets: dict[str, Leaf] = {}
    for path, leaf in tree.tensors():
        if leaf.key in datasets:
            raise UnsupportedError("two tensors map to the same place in the file", path=display(path))
        datasets[leaf.key] = leaf
        if leaf.role == "counter" and path not in tree.containers and leaf.key.endswith("/vars/0"):
            groups.setdefault(leaf.key.removesuffix("/vars/0"), str(path[-1].value))
    places = {path: leaf.key for path, leaf in tree.tensors()}
    return KerasPlacement(datasets, groups, _slots_by_group(datasets, places))


def _slots_by_group(datasets: dict[str, Leaf], places: Mapping[Path, str]) -> dict[str, list[str]]:
    """Return the meaning of the variables in every group with slots; `places` are the leaves' datasets."""
    slots: dict[str, dict[int, str]] = {}
    # Keras numbers them without gaps: a number above the number of datasets is not from Keras.
    numbers = {str(number): number for number in range(len(datasets))}
    for path, leaf in datasets.items():
        group, _, number = path.rpartition("/vars/")
        owner = places.get(leaf.of) if leaf.of is not None else None
        if leaf.role == "slot" and owner is not None and leaf.slot and number in numbers:
            slots.setdefault(group, {})[numbers[number]] = f"{leaf.slot}/{owner}"
    return {
        group: [members.get(number, "") for number in range(max(members) + 1)]
        for group, members in slots.items()
        if max(members) < len(datasets)
    }


class _PlacementBuilder:
    """Places for a tree that was not read from a Keras file."""

    def __init__(self, tree: Tree, root: str | None) -> None:
        self.tree = tree
        self.paths = {path: path for path, _ in tree.tensors()}
        if () in self.paths:
            raise UnsupportedError("a tensor without a name cannot be stored in a Keras file")
        self.alone = False
        if root is not None:
            alone = None if any(path[0].value == root for path in self.paths) else self._alone()
            self.alone, root = alone is not None, alone or root
            self.paths = {
                path: path[1:] if path[0].value == root and len(path) > 1 else path
                for path in self.paths
                if path[-1].value != COUNTER
            }
        self.names = {path: _strip_private_edges(moved) for path, moved in self.paths.items()}
        self.slots = OptimizerSlots({path: self._leaf(path) for path in self.paths}, self.names)
        self.modules: dict[Path, dict[str, Leaf]] = {}
        self.groups: dict[Path, str] = {(): ""}

    def _alone(self) -> str | None:
        """Return the attribute of a tf.train.Checkpoint that contains its only network."""
        if not any(len(path) == 1 and path[0].value == COUNTER for path in self.paths):
            return None
        weights = [path for path in self.paths if self._leaf(path).role in ("parameter", "buffer")]
        tops = {str(path[0].value) for path in weights}
        # A layer that is itself an attribute of the model has its variables directly under it.
        return tops.pop() if len(tops) == 1 and all(len(path) > 2 for path in weights) else None

    def _leaf(self, path: Path) -> Leaf:
        leaf = self.tree[path]
        assert isinstance(leaf, Leaf)  # noqa: S101  # `paths` are the tensors' paths
        return leaf

    def placed(self) -> KerasPlacement:
        """Return the places; optimizers are last, because they are not part of the model's variables."""
        below: dict[Path, dict[PathStep, None]] = {}
        for path, name in self.names.items():
            leaf = self._leaf(path)
            if self.slots.owns(path):
                continue
            if leaf.role == "slot":
                raise UnsupportedError(
                    "this slot does not belong to a complete optimizer", path=display(path)
                )
            module = name if leaf.role == "counter" else name[:-1]
            self.modules.setdefault(module, {})[str(name[-1].value)] = leaf
            for depth in range(len(module)):
                below.setdefault(module[:depth], {})[module[depth]] = None
        self._name_groups(below)
        datasets: dict[str, Leaf] = {}
        groups: dict[str, str | None] = {"": None}
        for module, members in self.modules.items():
            group, leaves = self.groups[module], _order_leaves(members)
            title = str(module[-1].value) if module else "model"
            known = variables_by_shape([leaf.shape for leaf in leaves]) is not None
            # A number is the place of a layer in a sequence.
            if not (known or title.isdecimal() or class_from_name(title)):
                # Keras's own name of a layer, by which its variables are known.
                title = layer_class(members, {}) or title
            groups[group] = title
            for number, leaf in enumerate(leaves):
                datasets[f"{group}/vars/{number}".lstrip("/")] = leaf
        # The order in the file, not in the tree: there a bias may precede its kernel.
        position = {id(leaf): number for number, leaf in enumerate(datasets.values())}
        for at, leaves in self.slots.complete(position):
            at = _OPTIMIZER if self.alone and len(self.slots.slots) == 1 else at
            group = "/".join(_group_name(step) for step in at)
            groups[group] = self._optimizer_name(at, leaves[0]) or "optimizer"
            for number, leaf in enumerate(leaves):
                datasets[f"{group}/vars/{number}"] = leaf
        where = {id(leaf): path for path, leaf in datasets.items()}
        places = {path: where[id(self._leaf(path))] for path in self.paths if id(self._leaf(path)) in where}
        return KerasPlacement(datasets, groups, _slots_by_group(datasets, places))

    @staticmethod
    def _optimizer_name(at: Path, counter: Leaf) -> str | None:
        """Return Keras's name for the optimizer, as in its counter's name (`adam_1/iteration`)."""
        name = (counter.name or "").partition("/")[0]
        return name if optimizer_class(name) is not None else str(at[-1].value) if at else None

    def _name_groups(self, below: dict[Path, dict[PathStep, None]]) -> None:
        for parent, steps in below.items():
            self._name_below(parent, list(steps), below)

    def _name_below(
        self, parent: Path, steps: list[PathStep], below: dict[Path, dict[PathStep, None]]
    ) -> None:
        # Parents are visited before their children: a parent's own group has its name.
        base = self.groups[parent]
        numbered = all(_is_number(step) for step in steps)
        counts: dict[str, int] = {}
        for step in steps:
            path = (*parent, step)
            word = _group_name(step)
            if numbered:
                stem = self._class(path, below)
                if stem is None:
                    raise UnsupportedError(
                        "a .weights.h5 file names list items by their class, but the source does not "
                        "record the class",
                        path=display(path),
                        hint="use --to tf to keep list indices",
                    )
                number = counts.get(stem, 0)
                counts[stem] = number + 1
                word = f"{stem}_{number}" if number else stem
                container = self.tree.containers.get(parent)
                listed = container is not None and container.kind in ("list", "tuple")
                word = word if listed else f"{LAYERS}/{word}"
            self.groups[path] = f"{base}/{word}" if base else word

    def _class(self, path: Path, below: dict[Path, dict[PathStep, None]]) -> str | None:
        """Return a module's class in snake case, from the tree or from its variables."""
        container = self.tree.containers.get(path)
        if container is not None and container.kind == "module" and container.name:
            return snake_case(container.name)
        members = self.modules.get(path, {})
        if not members and below.get(path) and all(_is_number(step) for step in below[path]):
            return "sequential"
        return layer_class(members, self.modules.get((*path, attr(_CELL)), {}))


def layer_class(members: Mapping[str, Leaf], cell: Mapping[str, Leaf]) -> str | None:
    """Return a Keras layer's class in snake case, from its variables or those of its cell."""
    if not members:
        return _recurrent_class(cell)
    names = {name.removeprefix("_") for name in members}
    if "kernel" in names and names <= {"kernel", "bias"}:
        rank = next(len(leaf.shape) for name, leaf in members.items() if name.endswith("kernel"))
        if rank in _CONVOLUTIONS:
            return _CONVOLUTIONS[rank]
    if {"moving_mean", "moving_variance"} <= names:
        return "batch_normalization"
    if names <= {"gamma", "beta"}:
        return "layer_normalization"
    return _BY_NAMES.get(frozenset(names))


def _recurrent_class(cell: Mapping[str, Leaf]) -> str | None:
    """Return the class of a recurrent layer, based on the gates of its cell."""
    members = {name.removeprefix("_"): leaf for name, leaf in cell.items()}
    if not {"kernel", "recurrent_kernel"} <= members.keys() <= {"kernel", "recurrent_kernel", "bias"}:
        return None
    shape = members["recurrent_kernel"].shape
    gates = [number for number in _BY_GATES if len(shape) == 2 and shape[1] == number * shape[0] > 0]
    return _BY_GATES[gates[0]] if gates else None


def _strip_private_edges(path: Path) -> Path:
    """Return the path without tf.train.Checkpoint's private edges between a model and its layers.

    The last step names the variable.
    """
    *above, last = path
    return (
        *(
            step._replace(value=str(step.value)[1:]) if step.value in _PROJECTIONS else step
            for step in above
            if step.value != _INNER and step.value not in _SEQUENCES
        ),
        last,
    )


def _is_number(step: PathStep) -> bool:
    return isinstance(step.value, int) or (isinstance(step.value, str) and step.value.isdecimal())


def _group_name(step: PathStep) -> str:
    word = str(step.value)
    if not word or word == "." or "/" in word or "\0" in word:
        raise UnsupportedError("an HDF5 group cannot have this name", path=word[:200])
    return word


def _order_leaves(members: dict[str, Leaf]) -> list[Leaf]:
    names = [name.removeprefix("_") for name in members]
    if all(name in _RANK for name in names):
        return [
            leaf for _, leaf in sorted(zip(names, members.values(), strict=True), key=lambda m: _RANK[m[0]])
        ]
    # keras/src/layers/layer.py, save_own_variables: trainable variables first.
    return sorted(members.values(), key=lambda leaf: leaf.role != "parameter")


_ROUNDS = (
    *((("m",),), (("accumulator", "linear"),)),  # Lion and Ftrl
    *(
        family.keras_kinds({*family.always, *more})
        for family in FAMILIES
        for count in range(len(family.specs))
        for more in itertools.combinations({*family.keras_slots} - {*family.always}, count)
    ),
    *(family.keras_kinds(family.keras_slots) for family in FAMILIES),
)
_BY_KINDS = {frozenset(kind for kinds in rounds for kind in kinds): rounds for rounds in _ROUNDS}
_SETTINGS = {"iterations": 0, "iteration": 0, "learning_rate": 1}


class OptimizerSlots:
    """The optimizers of a tree, found by their slots.

    Keras 3 stores an optimizer as one numbered list: iteration, learning rate, then each round of slots over
    the trained variables. Source: keras/src/optimizers/base_optimizer.py; the order of the rounds:
    keras/src/optimizers/*.py.
    """

    def __init__(self, leaves: Mapping[Path, Leaf], names: Mapping[Path, Path]) -> None:
        """Find the optimizers among the leaves; `names` are their paths in the output."""
        self.leaves, self.names = leaves, names
        self.slots: dict[Path, dict[tuple[str, Path], Path]] = {}
        for path, leaf in leaves.items():
            if leaf.role == "slot" and leaf.of is not None and leaf.of in leaves and leaf.slot:
                self.slots.setdefault(slot_optimizer(path, leaf), {})[leaf.slot, leaf.of] = path
        self.settings: dict[Path, dict[int, Path]] = {at: {} for at in self.slots}
        for path in leaves:
            name = str(path[-1].value).removeprefix("_")
            if path[:-1] in self.settings and name in _SETTINGS:
                self.settings[path[:-1]].setdefault(_SETTINGS[name], path)

    def owns(self, path: Path) -> bool:
        """Return whether the leaf belongs to an optimizer."""
        leaf = self.leaves[path]
        if leaf.role == "slot":
            of = leaf.of if leaf.of is not None else ()
            return self.slots.get(slot_optimizer(path, leaf), {}).get((leaf.slot or "", of)) == path
        return path in self.settings.get(path[:-1], {}).values()

    def complete(self, position: Mapping[int, int]) -> Iterator[tuple[Path, list[Leaf]]]:
        """Yield the optimizers: the path of each and its variables in Keras's order.

        `position` maps a leaf's identity to its position in the file.

        A learning rate computed by a schedule is not a variable. Raise UnsupportedError for an optimizer
        that lacks a slot or its iteration.
        """
        for at, slots in self.slots.items():
            first = next(iter(slots.values()))
            rounds = _BY_KINDS.get(frozenset(kind for kind, _ in slots))
            if rounds is None or 0 not in self.settings[at]:
                lacks = "slot kinds that no Keras optimizer has" if rounds is None else "no iteration counter"
                raise UnsupportedError(
                    f"the slot cannot be stored: its optimizer has {lacks}", path=display(first)
                )
            trained = [path for path in self.leaves if any((kind, path) in slots for kind in rounds[0])]
            trained.sort(key=lambda path: position.get(id(self.leaves[path]), -1))
            order = [path for _, path in sorted(self.settings[at].items())]
            for kinds in rounds:
                for one in trained:
                    for kind in kinds:
                        if (kind, one) not in slots:
                            sentence = f"the optimizer has no {kind} slot for this variable"
                            raise UnsupportedError(sentence, path=display(one))
                        order.append(slots[kind, one])
            yield self._moved(at, first), [self.leaves[path] for path in order]

    def _moved(self, at: Path, example: Path) -> Path:
        # A prefix removed from every path is not part of the optimizer's path either.
        return at[len(example) - len(self.names[example]) :] if self.names[example] != example else at


ARCHIVE_NAME = "keras_zip"
ARCHIVE_TITLE = "Keras 3 model (.keras)"

CONFIG, METADATA = "config.json", "metadata.json"
WEIGHTS, SHARDS, PICKLED = "model.weights.h5", "model.weights.json", "model.weights.npz"
# The first member's name in a local header (30 bytes), for archives with a damaged or missing end.
_FIRST = deferred.compile(rb"(metadata|config)\.json", re.ASCII)


def archive_claims(probe: Probe) -> str | None:
    """Return the path of a zip with a configuration and weights, or of a damaged one with that start."""
    if probe.damage is not None:
        return probe.path if _FIRST.match(probe.head, archives.LOCAL.size) else None
    weights = any(name in probe.members for name in (WEIGHTS, SHARDS, PICKLED))
    return probe.path if weights and CONFIG in probe.members else None


def read_archive(location: str) -> Checkpoint:
    """List the model; read the configuration as data, without looking up or running anything in it.

    Raise FormatError if archive or weights are damaged, UnsupportedError if the weights are pickled. Source:
    keras/src/saving/saving_lib.py, _save_model_to_fileobj. The HDF5 file is stored uncompressed, so leaves
    are spans of the archive; its CRC-32 is verified once, when the first leaf is read.
    """
    file = File.stamp(location)
    archive = archives.read_zip(file)
    config, notes = _read_document(archive, CONFIG)
    metadata, more = _read_document(archive, METADATA)
    judges = [
        audit_json(bytes(archive.source(n).read()), n) for n in (CONFIG, METADATA) if n in archive.members
    ]
    weights = _weight_members(archive)
    index = keras_tree.merge_shards([hdf5.read_index(archive.source(name)) for name in weights], file.path)
    model, compiled = config_of(config), config.get("compile_config")
    optimizer = optimizer_config(compiled.get("optimizer") if isinstance(compiled, dict) else None)
    with locate_errors(file=file.path):
        listing = list_model(index, model, optimizer)
    version = metadata.get("keras_version")
    details = {key: value for key, value in metadata.items() if isinstance(value, str)}
    judgement = merge_audits([*judges, ConfigAudit(listing.code_references, listing.unjudged)])
    assets = sum(name.startswith("assets/") for name in archive.members)
    known = {CONFIG, METADATA, SHARDS, *weights}
    others = [name for name in archive.members if name not in known and not name.startswith("assets/")]
    notes += (
        *more,
        *((f"assets not read: {assets:,}",) if assets else ()),
        *file_listing.note_unknown_members(others),
        *listing.notes,
    )
    return FileListing(
        listing.tree,
        f"Keras {version}" if isinstance(version, str) else None,
        "crc32" if archive.recorded else "none",
        notes,
        {**listing.details, **details},
        judgement.code_references,
        judgement.unjudged,
    ).checkpoint(location, ARCHIVE_NAME, file)


def _read_document(archive: ZipArchive, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    member = archive.members.get(name)
    if member is None:
        return {}, (f"the archive has no {name}",)
    if member.size > limits.current().json_bytes:
        raise limits.limit_error("json_bytes", f"{name} is too large", member.size, file=archive.file.path)
    with locate_errors(file=archive.file.path):
        return parse_config(bytes(archive.source(name).read()), name)


def _weight_members(archive: ZipArchive) -> Sequence[str]:
    path = archive.file.path
    if WEIGHTS in archive.members:
        return [WEIGHTS]
    if SHARDS in archive.members:
        return keras_tree.shard_names(_read_document(archive, SHARDS)[0], path)
    if PICKLED in archive.members:
        raise UnsupportedError(f"{PICKLED} contains pickled objects, which are not read", file=path)
    raise FormatError(f"the archive has no {WEIGHTS}", file=path)


KERAS_ARCHIVE = FormatDefinition(
    NAME=ARCHIVE_NAME,
    TITLE=ARCHIVE_TITLE,
    FRAMEWORK=FRAMEWORK,
    claims=archive_claims,
    read=read_archive,
)


KERAS_RL_NAME = "keras_rl"
KERAS_RL_TITLE = "keras-rl agent (NAME_actor.h5f and NAME_critic.h5f)"

_MEMBERS = ("actor", "critic")
_SUFFIX = ".h5f"
_KINDS = ("", ".index")


def keras_rl_claims(probe: Probe) -> str | None:
    """Return the base name with suffix if no such file exists, but its actor and critic files do."""
    if probe.kind != "missing":
        return None
    stem = probe.path.removesuffix(_SUFFIX)
    folder, name = os.path.split(stem)
    there = all(_member_exists(folder, f"{name}_{member}{_SUFFIX}", probe.names) for member in _MEMBERS)
    return stem + _SUFFIX if name and there else None


def _member_exists(folder: str, name: str, names: Collection[str]) -> bool:
    return any(
        name + kind in names and filesystem.isfile(os.path.join(folder, name + kind)) for kind in _KINDS
    )


def read_keras_rl(location: str) -> Checkpoint:
    """List both networks, each in its detected format; native keys are `actor:dense_1/kernel:0`.

    Source: rl/agents/ddpg.py in github.com/keras-rl/keras-rl, `DDPGAgent.save_weights`: `_actor` and
    `_critic` precede the suffix, and its examples use `.h5f`. Keras chooses the format of each: HDF5, or with
    tf.keras, which does not recognise `.h5f`, a tensor bundle with that prefix (keras/engine/training.py,
    `save_weights`).
    """
    from ckpttool.formats.detect import open_checkpoint

    stem = location.removesuffix(_SUFFIX)
    parts = {member: open_checkpoint(f"{stem}_{member}{_SUFFIX}") for member in _MEMBERS}
    return join_checkpoints(location, KERAS_RL_NAME, parts)


def keras_rl_pieces(tree: Tree) -> tuple[OutputFile, ...]:
    """Return both HDF5 files; raise UnsupportedError for a tensor outside the two networks' layers."""
    members: dict[str, dict[str, dict[str, Leaf]]] = {member: {} for member in _MEMBERS}
    for path, leaf in tree.tensors():
        if len(path) != 3 or path[0].value not in members:
            raise UnsupportedError(
                "a keras-rl agent can only store layers of an actor and a critic", path=display(path)
            )
        member, layer, weight = (str(step.value) for step in path)
        members[member].setdefault(layer, {})[_weight_name(leaf, member, layer, weight)] = leaf
    return tuple(OutputFile(f"_{member}{_SUFFIX}", _writer(layers)) for member, layers in members.items())


def _weight_name(leaf: Leaf, member: str, layer: str, weight: str) -> str:
    """Return the weight's name under its layer: its original name if it had one (Keras 1: `dense_1_W:0`)."""
    own = f"{member}:{layer}/"
    return leaf.key.removeprefix(own) if leaf.key.startswith(own) else f"{layer}/{weight}:0"


def _writer(layers: Mapping[str, Mapping[str, Leaf]]) -> Callable[[IO[bytes]], None]:

    def write(stream: IO[bytes]) -> None:
        stream.write(build_legacy_file(layers))

    return write


KERAS_RL = WritingFormatDefinition(
    NAME=KERAS_RL_NAME,
    TITLE=KERAS_RL_TITLE,
    FRAMEWORK=FRAMEWORK,
    claims=keras_rl_claims,
    read=read_keras_rl,
    pieces=keras_rl_pieces,
)
