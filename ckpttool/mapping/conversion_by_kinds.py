"""Convert a tree without a known layout by layer kinds: TensorFlow variables and a torch state_dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError
from ckpttool.core.tree import Container, Leaf, Path, Tree, key
from ckpttool.mapping.feature_orders import plan_reordering
from ckpttool.mapping.flattening import (
    decide_images,
    describe_image_sized_inputs,
    describe_pixel_shuffles,
    find_unknown_orders,
    is_by_name,
)
from ckpttool.mapping.keras_names import object_graph_paths
from ckpttool.mapping.kind_notes import (
    LayerRefusal,
    describe_assumed_classes,
    describe_kinds,
    describe_leftovers,
    refusal_from_error,
    refuse_ambiguous,
)
from ckpttool.mapping.layer_kinds import NO_FACTS, LayerOption, Name
from ckpttool.mapping.layers import (
    Layer,
    LayerConversion,
    ModuleInfo,
    convert_layer,
    find_layers,
    framework_kind,
    tensorflow_names,
    torch_names,
)
from ckpttool.mapping.orientation import decide_kinds
from ckpttool.mapping.rules import KEEP, Label, Move, Plan

_STATISTICS = frozenset(("moving_mean", "moving_variance"))


class TreeConversion(NamedTuple):
    """Converted layers of a tree with the names of their tensors in the target, and notes.

    `refused` are the tensors of layers that are not converted; a note gives the reason. `oriented`
    records the assumed output axes of matrices for which neither a class nor a shape decides, and
    layers with as many inputs as an image has values.
    """

    done: tuple[tuple[Layer, LayerConversion, Mapping[str, Name]], ...]
    notes: tuple[str, ...]
    refused: frozenset[Path] = frozenset()
    oriented: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of all tensors in the target."""
        return tuple(name for _, _, names in self.done for name in names.values())

    @property
    def left(self) -> tuple[Path, ...]:
        """The source tensors of converted layers without a place in the target."""
        return tuple(path for _, done, _ in self.done for path in done.left)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences on assumed defaults."""
        sentence = dict.fromkeys(sentence for _, done, _ in self.done for sentence in done.assumed)
        return (*sentence, *self.oriented)

    def moves(self, paths: Mapping[Name, Path]) -> tuple[Move, ...]:
        """Return the moves to the paths for the names."""
        return tuple(
            Move(source, paths[names[stored]], rule)
            for _, done, names in self.done
            for source, stored, rule in done.moves
        )

    def added(self, paths: Mapping[Name, Path]) -> dict[Path, Leaf]:
        """Return the tensors that only the target has, by the paths for their names."""
        return {
            paths[names[stored]]: leaf for _, done, names in self.done for stored, leaf in done.added.items()
        }


def convert_to_torch(tree: Tree, options: Sequence[LayerOption] = ()) -> TreeConversion:
    """Return the conversion of a TensorFlow tree's layers to PyTorch."""
    return _convert_layers(tree, find_layers(tree, "tensorflow", options), "torch", torch_names)


def convert_to_tensorflow(
    tree: Tree, options: Sequence[LayerOption] = (), described: Mapping[Path, ModuleInfo] | None = None
) -> TreeConversion:
    """Return the conversion of a PyTorch tree's layers to TensorFlow; see layers() for `described`."""
    return _convert_layers(
        tree, find_layers(tree, "torch", options, described), "tensorflow", tensorflow_names
    )


def plan_to_torch(tree: Tree, options: Sequence[LayerOption] = ()) -> Plan:
    """Return the plan for every layer whose kind is certain: `a/l1/kernel` becomes `a.l1.weight`.

    Replay data belongs to no layer: its tensors are copied unchanged. Tensors that fit no kind (other
    ranks, other siblings) have no move and are reported as unused; so are layers that may be of
    several kinds, which a note lists.
    """
    placed = convert_to_torch(tree, options)
    paths = {name: (key(".".join(name)),) for name in placed.names}
    moves = (*placed.moves(paths), *_replay_moves(tree))
    containers: dict[Path, Container] = {(): Container("OrderedDict")}
    return Plan(
        moves, placed.added(paths), containers, placed.assumed, consumed=placed.left, notes=placed.notes
    )


def _replay_moves(tree: Tree) -> Iterator[Move]:
    for path, leaf in tree.tensors():
        if leaf.role == "replay" and dtypes.BY_NAME[leaf.dtype].torch is not None:
            yield Move(path, (key(tree.names[path].replace("/", ".")),), KEEP)


def plan_to_tensorflow(tree: Tree, options: Sequence[LayerOption] = ()) -> Plan:
    """Return the inverse of `to_torch`, `a.l1.weight` to `a/l1/kernel`, with each target's label.

    A number in a name is a list index, as in a Sequential, and stays one.
    """
    placed = convert_to_tensorflow(tree, options)
    paths = object_graph_paths(placed.names)
    labels = {paths[name]: variable_label(name) for name in placed.names}
    return Plan(
        placed.moves(paths),
        placed.added(paths),
        assumed=placed.assumed,
        consumed=placed.left,
        notes=placed.notes,
        labels=labels,
    )


def variable_label(name: Name) -> Label:
    """Return the label of a layer's variable in TensorFlow."""
    return Label("buffer" if name[-1] in _STATISTICS else "parameter", "/".join(name))


def _convert_layers(
    tree: Tree,
    layers: tuple[Layer, ...],
    framework: str,
    naming: Callable[[tuple[Layer, ...]], Callable[[Layer, str], Name]],
) -> TreeConversion:
    done: list[tuple[Layer, LayerConversion, Mapping[str, Name]]] = []
    refused: list[str] = []
    not_done: set[Path] = set()
    requested: dict[LayerRefusal, list[str]] = {}
    layers = decide_kinds(tree, layers, ordered=not is_by_name(tree, layers))
    layers, images = decide_images(tree, layers)
    named = naming(layers)
    unknown = find_unknown_orders(tree, layers)
    for layer in layers:
        if layer.title in unknown:
            refused.append(unknown[layer.title])
            not_done.update(layer.tensors.values())
            continue
        ways, why = _find_conversions(tree, layer, framework)
        if len(ways) == 1 and not why:
            stored = dict.fromkeys((*(name for _, name, _ in ways[0].moves), *ways[0].added))
            done.append((layer, ways[0], {name: named(layer, name) for name in stored}))
        else:
            reason = why[0] if len(layer.kinds) == 1 else refuse_ambiguous(layer)
            requested.setdefault(reason, []).append(layer.title)
            not_done.update(layer.tensors.values())
    refused += [reason.sentence(titles) for reason, titles in requested.items()]
    left = [tree.names[path] for _, conversion, _ in done for path in conversion.left]
    sentences = (*describe_leftovers(left), *describe_kinds(layer for layer, _, _ in done))
    oriented = describe_assumed_classes([(layer, layer.group(tree)) for layer, _, _ in done])
    converted_ = tuple(layer for layer, _, _ in done)
    pictures = (
        *images,
        *describe_image_sized_inputs(tree, converted_),
        *describe_pixel_shuffles(tree, converted_),
    )
    return TreeConversion(tuple(done), (*refused, *sentences), frozenset(not_done), (*oriented, *pictures))


def _find_conversions(
    tree: Tree, layer: Layer, framework: str
) -> tuple[list[LayerConversion], list[LayerRefusal]]:
    """Return the possible conversions of a layer without duplicates, and why some of its kinds have none."""
    ways: list[LayerConversion] = []
    why: list[LayerRefusal] = []
    frameworks = ("tensorflow" if framework == "torch" else "torch", framework)
    for kind in layer.kinds:
        try:
            target = framework_kind(tree, layer, kind, framework)
            reordering = plan_reordering(tree, layer, kind, NO_FACTS, frameworks)
            facts = layer.facts._replace(flatten=reordering.flatten)
            done = convert_layer(tree, layer._replace(facts=facts), kind, target, facts, reordering.rules)
            done = done._replace(assumed=(*done.assumed, *reordering.assumed))
        except MappingError as error:
            why.append(refusal_from_error(error))
            continue
        if not any(done.moves == other.moves and done.added.keys() == other.added.keys() for other in ways):
            ways.append(done)
    return ways, why
