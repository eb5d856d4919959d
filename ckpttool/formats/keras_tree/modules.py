"""The `.weights.h5` layout of Keras 3 (and tf_keras since 2.12): a group for each object, `vars/<i>` in it.

Source: keras/src/saving/saving_lib.py (_save_state, _save_container_state, H5IOStore). Layers of a Sequential
or functional model stand under `layers` by their class; other objects stand under the attribute that holds
them; the user's name is an attribute of the group `vars`, which tf_keras does not write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.formats.hdf5 import Dataset, Index
from ckpttool.formats.keras_tree import classes, optimizers
from ckpttool.formats.keras_tree.config import NOTHING, Config, child, config_of, stored_names
from ckpttool.formats.keras_tree.legacy import names
from ckpttool.leaf import Key, Leaf, Path, Role, attr, index
from ckpttool.tree import Container

VARS = "vars"
# TF 2.12 to 2.15 used the second name (keras/src/saving/saving_lib.py, H5IOStore.get).
LAYERS = ("layers", "_layer_checkpoint_dependencies")
METRICS = "metrics"
UNPLACED = 1 << 30
# Layers, and operations as layers, that may put an image's axes into another order.
_REORDERS = re.compile(r"(?:permute|transpose|swapaxes|moveaxis|lambda|einsum)(?:_\d+)?", re.ASCII)
_MATRIX = 2


@dataclass
class Node:
    """One stored object or container: its group, its variables, what is below it.

    `slots` is what the file says of an optimizer's variables (keras_tree.optimizers, listed_leaves), `holds`
    whether there is a variable in it or below it.
    """

    group: str
    rank: tuple[int, ...]
    name: str | None = None
    saved: bool = False
    variables: list[Dataset] = field(default_factory=list)
    below: dict[str, Node] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)
    holds: bool = False


def is_modules(found: Index) -> bool:
    """Say whether any group is one of Keras 3's."""
    return any(path == VARS or path.endswith(f"/{VARS}") for path in found.groups)


def nodes(found: Index) -> tuple[Node, list[Dataset]]:
    """Return the root of the stored objects, and the datasets that stand outside any of them."""
    made: dict[str, Node] = {"": Node("", ())}
    strays = []
    for position, group in enumerate(found.groups.values()):
        parent, _, last = group.path.rpartition("/")
        if not group.path:
            continue
        if last == VARS and parent in made:
            made[parent].saved = True
            name = group.attributes.get("name")
            made[parent].name = name if isinstance(name, str) and name else None
            made[parent].slots = names(group, optimizers.SLOTS)
        elif parent in made:
            # Without creation order the file's own order is that of names; what came first lies in front.
            ordered = found.groups[parent].ordered
            node = made[group.path] = Node(group.path, (position,) if ordered else (group.address, position))
            made[parent].below[last] = node
    for dataset in found.datasets.values():
        owner, _, last = dataset.path.rpartition("/")
        parent, _, group_name = owner.rpartition("/")
        if group_name == VARS and parent in made:
            made[parent].variables.append(dataset)
        else:
            strays.append(dataset)
    for node in made.values():
        node.variables.sort(key=lambda each: _number(each.path.rpartition("/")[2]))
        above: Node | None = node if node.variables else None
        while above is not None and not above.holds:
            above.holds = True
            above = made[above.group.rpartition("/")[0]] if above.group else None
    return made[""], strays


def _number(name: str) -> tuple[bool, int, str]:
    return not name.isdecimal(), int(name[:9]) if name.isdecimal() else 0, name


class Member(NamedTuple):
    """An object below another one: its node, its path from there, its class and settings.

    `place` is its position in the model's configuration, `container` the group of the list that holds it.
    """

    node: Node
    steps: Path
    config: Config
    place: int = UNPLACED
    container: str | None = None


class Walk:
    """Goes through the objects in Keras's order and collects leaves, containers and what is trained."""

    def __init__(self, config: Config, root: Node) -> None:
        """Start from a model's root; `config` says more than the file does, if there is one."""
        self.leaves: dict[Path, Leaf] = {}
        self.containers: dict[Path, Container] = {}
        self.optimizers: list[tuple[Node, Path]] = []
        # What each object trains, in the order in which its model lists it, but for the objects `unsure`.
        self.trained: list[tuple[Path, list[optimizers.Trained]]] = []
        self.unsure: list[Path] = []
        self.unnamed = 0
        # tf_keras writes no names, and its models list their own variables last (src/engine/training.py).
        self._own_last = root.name is None
        self._unknown_order = not config.layers() and _reorders(root)
        self._go(root, config)

    def _go(self, root: Node, config: Config) -> None:
        own: list[tuple[Path, list[optimizers.Trained]]] = []
        stack: list[tuple[Member, Path, bool | None]] = [
            (Member(root, (), config), (), None if config.cls is None else True)
        ]
        while stack:
            member, at, trainable = stack.pop()
            node = member.node
            found = member.config.trainable
            trainable = False if found is False else trainable if trainable is not None else found
            path = self._free((*at, *member.steps), node)
            if self._is_optimizer(node):
                self.optimizers.append((node, path))
                inner = [Member(below, (attr(edge),), NOTHING) for edge, below in node.below.items()]
                stack += [(each, path, None) for each in reversed(inner)]
                continue
            cls = member.config.cls
            if node.saved or node.variables:
                if _is_counter(node, member):
                    self.leaves[path] = leaf(node.variables[0], "counter")
                    continue
                trained = self._variables(node, path, cls, member.config, trainable)
                (own if node is root and self._own_last else self.trained).append((path, trained))
                self._contain(node, path, cls, member.config)
            members = self._members(node, path, cls, member.config)
            stack += [(each, path, trainable) for each in reversed(members)]
        self.trained += own

    def _free(self, path: Path, node: Node) -> Path:
        if path in self.containers or path in self.leaves:
            return tuple(map(attr, node.group.split("/")))
        return path

    def _is_apart(self, node: Node) -> bool:
        return METRICS in node.group.split("/") or self._is_optimizer(node)

    def _is_optimizer(self, node: Node) -> bool:
        if node.group in ("optimizer", f"optimizer/{optimizers.INNER}"):
            return True
        first = node.variables[0] if node.variables else None
        named = optimizers.class_of(node.name) is not None or node.slots
        return bool(named) and first is not None and not first.shape and "int" in first.dtype

    def _variables(
        self, node: Node, path: Path, cls: str | None, config: Config, trainable: bool | None
    ) -> list[optimizers.Trained]:
        roles = classes.variables(cls, config.settings, [each.shape for each in node.variables])
        other = METRICS in node.group.split("/")[:-1]
        trained = []
        for number, dataset in enumerate(node.variables):
            last = dataset.path.rpartition("/")[2]
            role: Role = "other" if other else "parameter" if roles is None else roles[number].role
            if roles is not None and not other and roles[number].name != classes.UNNAMED:
                place: Path = (*path, attr(roles[number].name))
            else:
                place = (*path, attr(VARS), index(int(last)) if _plain(last) else attr(last))
                self.unnamed += not other
            if place in self.leaves:
                place = tuple(map(attr, dataset.path.split("/")))
            # A quantized kernel is not trained, whatever its layer says.
            learns = trainable if role == "parameter" and "int" not in dataset.dtype else False
            self.leaves[place] = leaf(dataset, role, learns)
            if role == "parameter" and learns is not False:
                trained.append(optimizers.Trained(place, dataset.shape))
        return trained

    def _contain(self, node: Node, path: Path, cls: str | None, config: Config) -> None:
        facts = {"group": node.group} | ({"layer": node.name} if node.name is not None else {})
        if self._unknown_order:
            facts |= {"takes_order": "other", "makes_order": "other"}
        self.containers[path] = Container("module", cls, config.facts() | facts)

    def _members(self, node: Node, path: Path, cls: str | None, config: Config) -> list[Member]:
        members: list[Member] = []
        for edge, below in node.below.items():
            if edge in LAYERS and not below.saved:
                members += _listed(below, config)
            elif not below.saved and below.below and not below.variables:
                members += _contained(below, attr(edge), config)
            else:
                members.append(Member(below, (attr(edge),), _known(child(config, edge), below, edge)))
        return self._ordered(members, path, cls, configured=bool(config.layers()))

    def _ordered(
        self, members: list[Member], path: Path, cls: str | None, *, configured: bool
    ) -> list[Member]:
        """Return the members in the order in which the object lists their variables, if that can be known."""
        members = sorted(members, key=lambda each: (each.place, each.node.rank))
        if cls in classes.ATTENTION or cls == "Bidirectional":
            return sorted(
                members, key=lambda each: classes.PARTS.get(str(each.steps[-1].value), len(classes.PARTS))
            )
        holders = [m for m in members if m.node.holds and not self._is_apart(m.node)]
        if len(holders) < 2 or (configured and all(m.place < UNPLACED for m in holders)):
            return members
        if len({m.container for m in holders}) == 1 and holders[0].container is not None:
            if not _numbers_agree(holders):
                self.unsure.append(path)
            return members
        # Attributes are stored in alphabetical order; the numbers in Keras's names tell which came first.
        names = [classes.numbered(m.node.name or "") for m in holders]
        if (
            len({stem for stem, _ in names}) > 1
            or classes.class_of(names[0][0]) is None
            or len({*names}) < len(names)
        ):
            self.unsure.append(path)
            return members
        chosen = {id(m) for m in holders}
        numbered = iter(sorted(holders, key=lambda m: classes.numbered(m.node.name or "")[1]))
        return [next(numbered) if id(m) in chosen else m for m in members]


def _reorders(root: Node) -> bool:
    """Say whether a model of images lists layers that reorder axes, whose settings the file does not have.

    Source: keras/src/saving/saving_lib.py, which makes a group for every layer of a functional model.
    """
    found, convolves = False, False
    waiting = [root]
    while waiting:
        node = waiting.pop()
        waiting += node.below.values()
        convolves |= any(len(each.shape) > _MATRIX for each in node.variables)
        name = node.group.rpartition("/")[2]
        found |= not node.variables and _REORDERS.fullmatch(name) is not None
    return found and convolves


def _listed(container: Node, config: Config) -> Iterator[Member]:
    known = stored_names(config.layers())
    places = {name: place for place, name in enumerate(known)}
    for name, node in container.below.items():
        told = _known(known.get(name, NOTHING), node, name, stored=True)
        step = attr(node.name or told.name or name)
        yield Member(node, (step,), told, places.get(name, UNPLACED), container.group)


def _contained(container: Node, step: Key, config: Config) -> Iterator[Member]:
    """Give the objects in a list or dict, and in lists and dicts inside it."""
    told = config.settings.get(str(step.value))
    known = stored_names([config_of(each) for each in told]) if isinstance(told, list) else {}
    stack: list[tuple[Node, Path]] = [(container, (step,))]
    while stack:
        node, steps = stack.pop()
        for name, below in node.below.items():
            if not below.saved and below.below and not below.variables:
                stack.append((below, (*steps, attr(name))))
                continue
            found = known.get(name, NOTHING) if node is container else NOTHING
            given = below.name is not None and classes.numbered(below.name)[0] != classes.numbered(name)[0]
            shown = below.name if given and below.name is not None else name
            told = _known(found, below, name, stored=True)
            yield Member(below, (*steps, attr(shown)), told, container=container.group)


def _known(config: Config, node: Node, name: str, *, stored: bool = False) -> Config:
    """Return the settings, with the class that the file itself tells where they are absent."""
    if config.cls is not None:
        return config
    cls = classes.class_of(name) if stored else None
    if name == "seed_generator":
        cls = "SeedGenerator"
    if cls is None and node.name is not None and node.variables:
        cls = classes.class_of(node.name)
        if classes.variables(cls, {}, [each.shape for each in node.variables]) is None:
            cls = None
    return Config(cls, config.settings)


def _numbers_agree(members: Iterable[Member]) -> bool:
    """Say whether layers of one class come in the order of their numbers."""
    last: dict[str, int] = {}
    for member in members:
        stem, number = classes.numbered(member.node.group.rpartition("/")[2])
        if number < last.get(stem, -1):
            return False
        last[stem] = number
    return True


def _is_counter(node: Node, member: Member) -> bool:
    """Say whether this is a count that has a group of its own name, as keras_h5.place gives it one."""
    if node.below or len(node.variables) != 1 or not member.steps or member.config.cls is not None:
        return False
    (only,) = node.variables
    return node.name == member.steps[-1].value and not only.shape and only.dtype in ("int64", "int32")


def _plain(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name[:18])) == name


def leaf(dataset: Dataset, role: Role = "parameter", trainable: bool | None = None) -> Leaf:
    """Return a dataset as a leaf."""
    return Leaf(dataset.dtype, dataset.shape, dataset.source, dataset.path, role, trainable=trainable)
