"""Maps a tree without a known layout by its layers' kinds: TensorFlow variables and a torch state_dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool import dtypes
from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Path, key
from ckpttool.mapping import cautions, flattened
from ckpttool.mapping.kinds import UNTOLD
from ckpttool.mapping.layers import Choice, Done, Layer, converted, layers, spelled
from ckpttool.mapping.modules import About, Name
from ckpttool.mapping.names import tensorflow_names, torch_names
from ckpttool.mapping.plan import Label, Plan, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Container, Tree

_STATISTICS = frozenset(("moving_mean", "moving_variance"))


class Placed(NamedTuple):
    """What becomes of a tree's layers, under the names that their tensors get; and what is said of it.

    `refused` are the tensors of layers that are not converted; a note gives the reason. `oriented` says which
    axes of matrices were taken for their outputs where neither a class nor a shape decides, and which layers
    take as many numbers as a picture has.
    """

    done: tuple[tuple[Layer, Done, Mapping[str, Name]], ...]
    notes: tuple[str, ...]
    refused: frozenset[Path] = frozenset()
    oriented: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of all tensors in the target."""
        return tuple(name for _, _, names in self.done for name in names.values())

    @property
    def left(self) -> tuple[Path, ...]:
        """The source tensors of converted layers that the target has no place for."""
        return tuple(path for _, done, _ in self.done for path in done.left)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences on defaults that were taken."""
        said = dict.fromkeys(said for _, done, _ in self.done for said in done.assumed)
        return (*said, *self.oriented)

    def moves(self, paths: Mapping[Name, Path]) -> tuple[Move, ...]:
        """Return the moves to the paths that the names get."""
        return tuple(
            Move(source, paths[names[stored]], rule)
            for _, done, names in self.done
            for source, stored, rule in done.moves
        )

    def added(self, paths: Mapping[Name, Path]) -> dict[Path, Leaf]:
        """Return the tensors that only the target has, by the paths that their names get."""
        return {
            paths[names[stored]]: leaf for _, done, names in self.done for stored, leaf in done.added.items()
        }


def placed_torch(tree: Tree, given: Sequence[Choice] = ()) -> Placed:
    """Return what becomes of the layers of a TensorFlow tree in PyTorch."""
    return _placed(tree, layers(tree, "tensorflow", given), "torch", torch_names)


def placed_tensorflow(
    tree: Tree, given: Sequence[Choice] = (), described: Mapping[Path, About] | None = None
) -> Placed:
    """Return what becomes of the layers of a PyTorch tree in TensorFlow; see layers() for `described`."""
    return _placed(tree, layers(tree, "torch", given, described), "tensorflow", tensorflow_names)


def to_torch(tree: Tree, given: Sequence[Choice] = ()) -> Plan:
    """Return the plan for every layer whose kind is sure: `a/l1/kernel` goes to `a.l1.weight`.

    Replayed experience is no layer's: its tensors go as they are. What no kind names (other ranks, other
    siblings) has no move and is reported as unused, and so is a layer that may be of several kinds: a note
    names them.
    """
    placed = placed_torch(tree, given)
    paths = {name: (key(".".join(name)),) for name in placed.names}
    moves = (*placed.moves(paths), *_experience(tree))
    containers: dict[Path, Container] = {(): Container("OrderedDict")}
    return Plan(
        moves, placed.added(paths), containers, placed.assumed, consumed=placed.left, notes=placed.notes
    )


def _experience(tree: Tree) -> Iterator[Move]:
    for path, leaf in tree.tensors():
        if leaf.role == "replay" and dtypes.BY_NAME[leaf.dtype].torch is not None:
            yield Move(path, (key(tree.names[path].replace("/", ".")),), KEEP)


def to_tensorflow(tree: Tree, given: Sequence[Choice] = ()) -> Plan:
    """Return the inverse of `to_torch`, `a.l1.weight` to `a/l1/kernel`, with each target's label.

    A number in a name is an item of a list, as in a Sequential, and goes on being one.
    """
    placed = placed_tensorflow(tree, given)
    paths = edges(placed.names)
    labels = {paths[name]: label(name) for name in placed.names}
    return Plan(
        placed.moves(paths),
        placed.added(paths),
        assumed=placed.assumed,
        consumed=placed.left,
        notes=placed.notes,
        labels=labels,
    )


def label(name: Name) -> Label:
    """Return the label of a layer's variable in TensorFlow."""
    return Label("buffer" if name[-1] in _STATISTICS else "parameter", "/".join(name))


def _placed(
    tree: Tree,
    found: tuple[Layer, ...],
    framework: str,
    naming: Callable[[tuple[Layer, ...]], Callable[[Layer, str], Name]],
) -> Placed:
    done: list[tuple[Layer, Done, Mapping[str, Name]]] = []
    refused: list[str] = []
    not_done: set[Path] = set()
    asked: dict[cautions.Why, list[str]] = {}
    named = naming(found)
    unknown = flattened.unknown(tree, found)
    for layer in found:
        if layer.title in unknown:
            refused.append(unknown[layer.title])
            not_done.update(layer.tensors.values())
            continue
        ways, why = _ways(tree, layer, framework)
        if len(ways) == 1 and not why:
            stored = dict.fromkeys((*(name for _, name, _ in ways[0].moves), *ways[0].added))
            done.append((layer, ways[0], {name: named(layer, name) for name in stored}))
        else:
            reason = why[0] if len(layer.kinds) == 1 else cautions.ambiguous(layer)
            asked.setdefault(reason, []).append(layer.title)
            not_done.update(layer.tensors.values())
    refused += [reason.sentence(titles) for reason, titles in asked.items()]
    left = [tree.names[path] for _, made, _ in done for path in made.left]
    said = (*cautions.left(left), *cautions.notes(layer for layer, _, _ in done))
    oriented = cautions.without_classes([(layer, layer.group(tree)) for layer, _, _ in done])
    converted_ = tuple(layer for layer, _, _ in done)
    pictures = (
        *flattened.taken_as_they_are(tree, converted_),
        *flattened.shuffled_as_they_are(tree, converted_),
    )
    return Placed(tuple(done), (*refused, *said), frozenset(not_done), (*oriented, *pictures))


def _ways(tree: Tree, layer: Layer, framework: str) -> tuple[list[Done], list[cautions.Why]]:
    """Return what can become of a layer, each outcome once, and why a kind that it may be has none."""
    ways: list[Done] = []
    why: list[cautions.Why] = []
    frameworks = ("tensorflow" if framework == "torch" else "torch", framework)
    for kind in layer.kinds:
        try:
            target = spelled(tree, layer, kind, framework)
            made = flattened.reordering(tree, layer, kind, UNTOLD, frameworks)
            told = layer.told._replace(flatten=made.flatten)
            done = converted(tree, layer._replace(told=told), kind, target, told, made.rules)
            done = done._replace(assumed=(*done.assumed, *made.assumed))
        except MappingError as error:
            why.append(cautions.refused(error))
            continue
        if not any(done.moves == other.moves and done.added.keys() == other.added.keys() for other in ways):
            ways.append(done)
    return ways, why
