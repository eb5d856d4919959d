"""TensorFlow object graphs: paths, roles, aliases, trees, writing."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from ckpttool.core import deferred, limits, text
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import FormatError, UnsupportedError
from ckpttool.core.optimizers import KERAS_LISTS, RMSPROP_LISTS
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, attr, display
from ckpttool.encodings import protobuf
from ckpttool.encodings.protobuf import Message
from ckpttool.formats.tf_common import class_name, plain_facts

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "VARIABLE_VALUE"
MARK = "/.ATTRIBUTES/"

# TrackableObjectGraph: nodes. TrackableObject: children, attributes, slot_variables, registered_saver.
_GRAPH = {1: protobuf.DELIMITED}
_OBJECT = dict.fromkeys((1, 2, 3, 4), protobuf.DELIMITED)
_CHILD = Message({1: protobuf.INT32, 2: protobuf.TEXT})
_ATTRIBUTE = Message(dict.fromkeys((1, 2, 3), protobuf.TEXT))
_SLOT = Message({1: protobuf.INT32, 2: protobuf.TEXT, 3: protobuf.INT32})
# RegisteredSaver: name (object_name is the saver's name for the object).
_SAVER = Message({1: protobuf.TEXT})


class ObjectAttribute(NamedTuple):
    """A saved value of an object: the attribute's name, the variable's own name, the bundle key."""

    name: str
    full_name: str
    key: str


class SlotEntry(NamedTuple):
    """Slot `variable` of kind `name` of the variable `of` (node numbers)."""

    of: int
    name: str
    variable: int


class ObjectNode(NamedTuple):
    """One object: its children by edge name in stored order, its values, its slot variables.

    With `listlike`, every child's name is a decimal index, as in a list. `saver` is the registered
    saver that wrote the object's tensors under its own choice of keys.
    """

    children: dict[str, int]
    attributes: tuple[ObjectAttribute, ...]
    slots: tuple[SlotEntry, ...]
    listlike: bool
    saver: str = ""


_EMPTY = ObjectNode({}, (), (), listlike=False)

Graph = list[ObjectNode]


def parse_graph(data: bytes) -> Graph:
    """Decode a TrackableObjectGraph; node 0 is the root.

    Raise FormatError for an id without a node, LimitError for too many objects, edges and values. Field
    numbers: tensorflow/core/protobuf/trackable_object_graph.proto.
    """
    left = limits.current().graph_parts
    messages = [protobuf.as_message(value) for _, value in _fields(data, left, _GRAPH)]
    left -= len(messages)
    graph = []
    for message in messages:
        node = _parse_node(message, len(messages), left)
        left -= len(node.children) + len(node.attributes) + len(node.slots)
        graph.append(node)
    return graph


def _fields(data: bytes, most: int, schema: protobuf.Schema) -> Iterable[tuple[int, int | bytes]]:
    # A field takes at least two bytes.
    return (
        protobuf.parse_fields(data, schema) if len(data) <= 2 * most else _limited_fields(data, most, schema)
    )


def _limited_fields(data: bytes, most: int, schema: protobuf.Schema) -> Iterator[tuple[int, int | bytes]]:
    for count, field_ in enumerate(protobuf.iter_fields(data, schema)):
        if count > most:
            raise limits.limit_error("graph_parts", "the object graph has too many parts", None)
        yield field_


def _parse_node(data: bytes, count: int, left: int) -> ObjectNode:
    if not data:
        return _EMPTY
    children: dict[str, int] = {}
    saver: list[bytes] = []
    attributes: list[ObjectAttribute] = []
    slots: list[SlotEntry] = []
    for number, value in _fields(data, left, _OBJECT):
        if number == 1:
            # An absent id is 0, the root, which exists in a graph with this child.
            target, name = protobuf.decode(protobuf.as_message(value), _CHILD)
            if name in children:
                raise FormatError(f"an object has two children named {name!r}", path=KEY)
            children[name] = _id(target, count)
        elif number == 2:
            attributes.append(ObjectAttribute(*protobuf.decode(protobuf.as_message(value), _ATTRIBUTE)))
        elif number == 3:
            of, name, variable = protobuf.decode(protobuf.as_message(value), _SLOT)
            slots.append(SlotEntry(_id(of, count), name, _id(variable, count)))
        else:
            saver.append(protobuf.as_message(value))
    (called,) = protobuf.decode(protobuf.merge_messages(saver, b""), _SAVER)
    return ObjectNode(children, tuple(attributes), tuple(slots), is_listlike(children), called)


def _id(number: int, count: int) -> int:
    if not 0 <= number < count:
        raise FormatError(
            "the object graph refers to an object that does not exist",
            path=KEY,
            expected=f"a number below {count}",
            found=str(number),
        )
    return number


def is_listlike(children: Collection[str]) -> bool:
    """Return whether there are children and all their names are decimal indices."""
    return bool(children) and all(map(_is_index, children))


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and (name[0] != "0" or name == "0")


def edge_step(node: ObjectNode, edge: str) -> PathStep:
    """Return the path step for one of the node's edges."""
    return PathStep("index", int(edge)) if node.listlike else PathStep("attr", edge)


def path_of_key(key: str) -> tuple[PathStep, ...]:
    """Return the path in a bundle key, for entries that no object in the graph names.

    The key's edges are escaped by `.` -> `..` and `/` -> `.S`
    (tensorflow/python/trackable/trackable_utils.py). A key without the mark is of another kind and is
    kept unchanged: registered savers choose their own keys.
    """
    edges, mark, attribute = key.partition(MARK)
    if not mark:
        return tuple(PathStep("attr", part) for part in key.split("/"))
    steps = [PathStep("attr", unescape_edge(edge)) for edge in edges.split("/")]
    if attribute != VALUE:
        steps.append(PathStep("attr", unescape_edge(attribute)))
    return tuple(steps)


def unescape_edge(edge: str) -> str:
    """Convert an edge or attribute from its form in keys to its form in the object."""
    return edge.replace("..", "\0").replace(".S", "/").replace("\0", ".")


def escape_edge(edge: str) -> str:
    """Convert an edge or attribute to its form in keys; the inverse of `unescaped`."""
    return edge.replace(".", "..").replace("/", ".S")


def attribute_path(name: str, suffix: str = "") -> tuple[PathStep, ...]:
    """Return the steps from an object to its attribute: none for a variable's value.

    The proto contains a name as in the object, or escaped if the object serializes itself
    (`_serialize_to_tensors`; tensorflow/python/checkpoint/save_util.py), so that the key escapes it
    twice. `suffix` is the additional part of the bundle key.
    """
    if name == VALUE and not suffix:
        return ()
    plain = unescape_edge(name)
    return (PathStep("attr", (plain if escape_edge(plain) == name else name) + suffix),)


OWN, CONTAINER, ODD, PRIVATE, OPTIMIZER, LIST = range(6)

_CONTAINER = deferred.compile(r"_functional|_operations|_layers|layer-\d+|layer_with_weights-\d+")
_BOOKKEEPING = frozenset(
    ("keras_api", "variables", "trainable_variables", "non_trainable_variables", "regularization_losses")
)
_OPTIMIZER_LISTS = frozenset(("_variables", "_trainable_variables", "_trainable_variables_indices"))


class ObjectTree(NamedTuple):
    """The canonical tree of the objects that can be reached from the root.

    `parents` contains each object's parent and edge; `paths` its path, in the tree's preorder with
    children as stored; `deep` counts the objects just below the depth limit, which have no path.
    """

    parents: dict[int, tuple[int, str]]
    paths: dict[int, Path]
    deep: int


def is_optimizer(node: ObjectNode) -> bool:
    """Return whether an object is an optimizer, judging by its children.

    Keras 3 and Keras 2.11 store `_iterations` and `_learning_rate`, older versions `iter` and `decay`
    (an agent may also have an `iter`); optimizers of TF1 only have slots.
    """
    edges = node.children
    modern = "_iterations" in edges and ("_learning_rate" in edges or "_variables" in edges)
    return bool(node.slots) or modern or ("iter" in edges and "decay" in edges)


def choose_paths(graph: Graph) -> ObjectTree:
    """Choose one path for every object.

    The key of a variable is only the shortest path at the time it was saved, so an optimizer's list of
    variables or `agent.best = agent.actor.l1` steals it. The canonical path is the first one that a
    depth-first walk in the order of creation meets, when the walk takes an edge of a better tier wherever
    there is one left:

    0  OWN        ordinary edges: attributes, list items, dict entries
    1  CONTAINER  the numbered lists in which Keras keeps layers (`_functional`, `_operations`, `layer-3`)
    2  ODD        an edge to a shared object from one whose own parts are all of another size:
                  `agent.best` is a layer where agent's own parts are networks; `actor.critic` is a network
                  where actor's own parts are layers
    3  PRIVATE    bookkeeping: `variables`, `keras_api`, `_`-edges to shared objects and to lists, and lists
                  that hold only variables of others (`agent.params = agent.actor.trainable_variables`)
    4  OPTIMIZER  edges out of an optimizer
    5  LIST       an optimizer's `_variables` and `_trainable_variables`, whose entries are named elsewhere

    An object's size is the number of levels below it. Depth-first in the order of creation, because an alias
    is made after the object that it points at, and so after the owner of that object.
    """
    if not graph:
        return ObjectTree({}, {}, 0)
    parents = _choose(graph, _tiers(graph))
    return ObjectTree(parents, *_spell_paths(graph, parents))


def _tiers(graph: Graph) -> list[list[int]]:
    tiers = [_plain_tiers(node, graph) if node.children else [] for node in graph]
    owners = _owners(graph, tiers)
    sizes = _sizes(graph, tiers, owners)
    for number, node in enumerate(graph):
        if not node.children or tiers[number][0] >= OPTIMIZER:
            continue
        children = list(node.children.values())
        shared = [owners[child] == _SEVERAL for child in children]
        if not any(shared):
            continue
        if node.listlike and all(shared) and not any(graph[child].children for child in children):
            tiers[number] = [PRIVATE] * len(children)
        else:
            own = [sizes[child] for child in children if owners[child] == number and sizes[child]]
            tiers[number] = _lower_tiers(node, tiers[number], own, shared, sizes)
    return tiers


def _plain_tiers(node: ObjectNode, graph: Graph) -> list[int]:
    if is_optimizer(node):
        return [LIST if edge in _OPTIMIZER_LISTS else OPTIMIZER for edge in node.children]
    return [_plain_tier(edge, graph[child]) for edge, child in node.children.items()]


def _plain_tier(edge: str, child: ObjectNode) -> int:
    if edge.startswith(("_", "layer")) and _CONTAINER.fullmatch(edge):
        return CONTAINER
    # `self._net = ...` is a valid name; Keras's internal lists are not.
    if edge in _BOOKKEEPING or (edge.startswith("_") and child.listlike):
        return PRIVATE
    return OWN


def _lower_tiers(
    node: ObjectNode, tiers: list[int], own: list[int], shared: list[bool], sizes: list[int]
) -> list[int]:
    least, most = min(own, default=0), max(own, default=0)
    judged = []
    for (edge, child), tier, several in zip(node.children.items(), tiers, shared, strict=True):
        if several and sizes[child] and tier == OWN:
            odd = own and not least <= sizes[child] <= most
            judged.append(PRIVATE if edge.startswith("_") else ODD if odd else OWN)
        else:
            judged.append(tier)
    return judged


_NOBODY, _SEVERAL = -1, -2


def _owners(graph: Graph, tiers: list[list[int]]) -> list[int]:
    # The only object with an ordinary edge to each object, or _SEVERAL.
    owners = [_NOBODY] * len(graph)
    for number, node in enumerate(graph):
        for child, tier in zip(node.children.values(), tiers[number], strict=True):
            if tier <= CONTAINER and child and child != number and owners[child] != number:
                owners[child] = number if owners[child] == _NOBODY else _SEVERAL
    return owners


def _sizes(graph: Graph, tiers: list[list[int]], owners: list[int]) -> list[int]:
    # Levels under each object, over the parts that it alone owns; over all its parts if it owns none.
    sizes = [-1 if node.children else 0 for node in graph]
    for start, size in enumerate(sizes):
        stack = [start] if size < 0 else []
        while stack:
            number = stack[-1]
            parts = _parts(graph[number], tiers[number], owners, number)
            if sizes[number] == -1:
                sizes[number] = 0  # stops at a cycle
                stack += [part for part in parts if sizes[part] == -1]
            else:
                sizes[number] = 1 + max((sizes[part] for part in parts), default=-1)
                stack.pop()
    return sizes


def _parts(node: ObjectNode, tiers: list[int], owners: list[int], number: int) -> list[int]:
    pairs = zip(node.children.values(), tiers, strict=True)
    ordinary = [part for part, tier in pairs if tier <= CONTAINER and part != number]
    return [part for part in ordinary if owners[part] == number] or ordinary


def _choose(graph: Graph, tiers: list[list[int]]) -> dict[int, tuple[int, str]]:
    """Return the parent and edge of each reachable object in the canonical tree."""
    parents: dict[int, tuple[int, str]] = {0: (-1, "")}
    fresh: list[tuple[int, int, str]] = []  # tier 0, a stack: depth first
    later: tuple[deque[tuple[int, int, str]], ...] = tuple(deque() for _ in range(LIST + 1))
    number = 0
    while True:
        own = []
        for (edge, child), tier in zip(graph[number].children.items(), tiers[number], strict=True):
            if child in parents:
                continue
            if tier == OWN:
                own.append((child, number, edge))
            else:
                later[tier].append((child, number, edge))
        fresh += reversed(own)
        while True:
            step = _next_edge(fresh, later, parents)
            if step is None:
                return parents
            number, parent, edge = step
            parents[number] = (parent, edge)
            if graph[number].children:
                break


def _next_edge(
    fresh: list[tuple[int, int, str]],
    later: tuple[deque[tuple[int, int, str]], ...],
    parents: dict[int, tuple[int, str]],
) -> tuple[int, int, str] | None:
    while fresh:
        edge = fresh.pop()
        if edge[0] not in parents:
            return edge
    for waiting in later:
        while waiting:
            edge = waiting.popleft()
            if edge[0] not in parents:
                return edge
    return None


def _spell_paths(graph: Graph, parents: dict[int, tuple[int, str]]) -> tuple[dict[int, Path], int]:
    """Return the canonical paths in the order of the canonical tree, with children as stored."""
    waiting: list[tuple[int, Path]] = [(0, ())]
    paths: dict[int, Path] = {}
    deep, most = 0, limits.current().graph_depth
    while waiting:
        number, path = waiting.pop()
        paths[number] = path
        node = graph[number]
        chosen = [(edge, child) for edge, child in node.children.items() if parents[child] == (number, edge)]
        if len(path) < most:
            waiting += [(child, (*path, edge_step(node, edge))) for edge, child in reversed(chosen)]
        else:
            deep += len(chosen)
    return paths, deep


# Limits for malicious graphs: real ones give an object a handful of paths.
MAX_ALIASES = 63
MAX_ROUTES = 200_000


class ObjectAliases(NamedTuple):
    """Further paths of each object, shortest first.

    `capped` counts the objects with more than MAX_ALIASES of them; `complete` is true if no walk was
    cut short.
    """

    paths: dict[int, tuple[Path, ...]]
    capped: int
    complete: bool


class _Route(NamedTuple):
    """A route to `node`: first `before` (another route, or an object's canonical path), then `edge`.

    Routes are compared by length, then in the order in which they were `order`.
    """

    length: int
    order: int
    node: int
    before: _Route | int
    edge: PathStep


def find_aliases(graph: Graph, tree: ObjectTree, ids: set[int]) -> ObjectAliases:
    """Return the paths of the objects `ids` that differ from their canonical ones.

    A route starts with an edge outside the canonical tree and continues with any edge. The work is
    therefore proportional to the number of routes, and the rest of the graph costs nothing.
    """
    walk = _RouteSearch(graph, tree)
    walk.start()
    complete = walk.extend()
    paths, capped = {}, 0
    for number in ids & walk.routes.keys():
        routes = sorted(walk.routes[number])
        capped += len(routes) > MAX_ALIASES
        paths[number] = tuple(_spell_route(route, tree.paths) for route in routes[:MAX_ALIASES])
    return ObjectAliases(paths, capped, complete)


def _spell_route(route: _Route, canonical: dict[int, Path]) -> Path:
    steps = []
    at: _Route | int = route
    while isinstance(at, _Route):
        steps.append(at.edge)
        at = at.before
    return (*canonical[at], *reversed(steps))


class _RouteSearch:
    """Routes found so far, and a queue of those still to follow, shortest first."""

    def __init__(self, graph: Graph, tree: ObjectTree) -> None:
        self.routes: dict[int, list[_Route]] = {}
        self._graph = graph
        self._tree = tree
        self._heap: list[_Route] = []
        self._route_count = 0
        # The paths are in preorder, so that an object's descendants follow it directly.
        self._position = {number: at for at, number in enumerate(tree.paths)}
        self._below = dict.fromkeys(tree.paths, 1)
        for number in reversed(tree.paths):
            if number:
                self._below[tree.parents[number][0]] += self._below[number]

    def start(self) -> None:
        """Find the routes that consist of a canonical path and one more edge."""
        parents = self._tree.parents
        for number, path in self._tree.paths.items():
            node = self._graph[number]
            for edge, child in node.children.items():
                if parents[child] != (number, edge) and not self._over(child, number):
                    self._keep(len(path) + 1, child, number, edge_step(node, edge))

    def extend(self) -> bool:
        """Follow the routes, shortest first; return whether all were followed within the limit."""
        limit = self._route_count + MAX_ROUTES + 8 * len(self._graph)
        deepest = limits.current().graph_depth
        while self._heap and self._route_count < limit:
            route = heapq.heappop(self._heap)
            known = self.routes.setdefault(route.node, [])
            known.append(route)
            if len(known) > MAX_ALIASES or route.length >= deepest:
                continue
            node = self._graph[route.node]
            for edge, child in node.children.items():
                if not self._on(route, child):
                    self._keep(route.length + 1, child, route, edge_step(node, edge))
        return not self._heap

    def _keep(self, length: int, node: int, before: _Route | int, edge: PathStep) -> None:
        self._route_count += 1
        route = _Route(length, self._route_count, node, before, edge)
        if self._graph[node].children:
            heapq.heappush(self._heap, route)
        else:
            self.routes.setdefault(node, []).append(route)

    def _on(self, route: _Route, node: int) -> bool:
        # Return whether the route already passes the object.
        if not self._graph[node].children:
            return False
        at: _Route | int = route
        while isinstance(at, _Route):
            if at.node == node:
                return True
            at = at.before
        return self._over(node, at)

    def _over(self, upper: int, lower: int) -> bool:
        # Return whether `upper` is `lower` or on its canonical path. An object without a position is too deep
        # for a path.
        first = self._position.get(upper, -1)
        return first < 0 or first <= self._position[lower] < first + self._below[upper]


ATTRIBUTE = "OBJECT_CONFIG_JSON"


def module_container(data: bytes) -> Container | None:
    """Return the module that a configuration describes; None if it has no class.

    Raise FormatError if it is not a JSON object. TensorFlow up to 1.13 saved, with every object that has a
    `get_config`, a string attribute OBJECT_CONFIG_JSON: `{"class_name": CLASS, "config": CONFIG}`
    (Checkpointable._gather_saveables_for_checkpoint in tensorflow/python/training/checkpointable/base.py;
    tensorflow/python/util/serialization.py). Later versions keep the constant but write nothing. The JSON is
    only read as data: no class is looked up, and nothing in it is run.
    """
    record = text.parse_json(data, "the configuration")
    name, config = class_name(record.get("class_name")), record.get("config")
    return Container("module", name, plain_facts(config)) if name and isinstance(config, dict) else None


# Keras keeps one list of slot variables for each kind, in the order of `_trainable_variables`
# (keras/src/optimizers/*.py).
_SLOT_LISTS = KERAS_LISTS | {
    "_linears": "linear",
    "_model_variables_moving_average": "average",
    "_accumulated_gradients": "gradient",
    "_r": "r",
    "_c": "c",
    "_v": "v",
    "adam_velocities": "v",
}
# Ends of Keras slot names: 3 writes `adam/dense_kernel_momentum`, 2.11 to 2.15 `Adam/m/dense/kernel`.
_ENDINGS = {"momentum": "m", "velocity": "v", "velocity_hat": "vhat", "m": "m", "v": "v", "vhat": "vhat"}
# Sonnet's optimizers are plain modules with lists of slots, one for each variable, without references to a
# network's variables: their slots' names end in the list's scope and the variable's own name,
# `adam/m/linear/w` (dm-sonnet: sonnet/src/optimizers/adam.py, rmsprop.py, momentum.py). By edge: the scope
# and the kind.
_SONNET = (
    {"m": ("m", "m"), "v": ("v", "v")},
    {"mom": ("momentum", "momentum"), "ms": ("rms", "rms"), "mg": ("mg", "mg")},
    {"accumulated_momentum": ("accumulated_momentum", "momentum")},
)
# Children of an object with running statistics: Keras's Normalization
# (keras/src/layers/preprocessing/normalization.py; Keras 2 names them mean and variance), and the averages in
# Sonnet's BatchNorm (sonnet/src/moving_averages.py). The second set are those that are statistics themselves.
_STATISTICS = (
    (("adapt_mean", "adapt_variance", "count"), ("adapt_mean", "adapt_variance", "count")),
    (("mean", "variance", "count"), ("mean", "variance", "count")),
    (("_hidden", "average", "_counter"), ("_hidden", "average")),
)
_LONGEST_NAME = 4096  # of a slot whose owner is searched in it: the owner's name may end at any `_`
_VARIABLE_LISTS = frozenset(("_variables", "_trainable_variables"))


class SlotVariable(NamedTuple):
    """A slot variable: its kind, the object that it belongs to (None: unknown), and its optimizer."""

    kind: str
    of: int | None
    optimizer: int
    listed: bool  # reached by its own edge, so that it already has a path


class VariableRoles(NamedTuple):
    """Facts about variables from the optimizers of a graph, by node number."""

    slots: dict[int, SlotVariable]
    trained: frozenset[int]
    settings: frozenset[int]
    statistics: frozenset[int]


def find_roles(graph: Graph) -> VariableRoles:
    """Find the slots of every optimizer, its trained variables and its own settings."""
    slots: dict[int, SlotVariable] = {}
    trained: set[int] = set()
    settings: set[int] = set()
    walked: set[int] = set()  # a list shared by many optimizers is read once, for the first of them
    known: dict[int, dict[str, int]] = {}
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        own = node.children.get("_trainable_variables", number)
        if own not in known:
            known[own] = _members(graph, node, "_trainable_variables")
            trained.update(known[own].values())
        members = known[own]
        for slot in node.slots:
            slots.setdefault(slot.variable, SlotVariable(slot.name, slot.of, number, listed=False))
        for variable, kind, of in _slots_in_lists(graph, node, members, walked):
            slots.setdefault(variable, SlotVariable(kind, of, number, listed=True))
        settings.update(_settings(graph, node))
    _slots_by_name(graph, slots, trained, settings)
    _add_sonnet_slots(graph, slots, trained)
    kept = {variable: slot for variable, slot in slots.items() if variable not in trained}
    statistics = frozenset(_statistics(graph))
    return VariableRoles(kept, frozenset(trained), frozenset(settings - slots.keys()), statistics)


def _statistics(graph: Graph) -> Iterable[int]:
    for node in graph:
        for whole, running in _STATISTICS:
            if all(edge in node.children and graph[node.children[edge]].attributes for edge in whole):
                yield from (node.children[edge] for edge in running)


def _members(graph: Graph, node: ObjectNode, edge: str) -> dict[str, int]:
    child = node.children.get(edge)
    if child is None:
        return {}
    return {name: n for name, n in graph[child].children.items() if graph[n].attributes}


def _slots_in_lists(
    graph: Graph, node: ObjectNode, trained: dict[str, int], walked: set[int]
) -> Iterable[tuple[int, str, int | None]]:
    rmsprop = "_average_gradients" in node.children or _is_rmsprop(graph, node)
    for edge, child in node.children.items():
        if edge in _VARIABLE_LISTS or child in walked:
            continue
        walked.add(child)
        members = _members(graph, node, edge)
        # An unknown list belongs to the variables one by one if it has one entry for each.
        if not (edge in _SLOT_LISTS or members.keys() <= trained.keys()):
            continue
        kind = (RMSPROP_LISTS.get(edge) if rmsprop else None) or _SLOT_LISTS.get(edge) or edge.strip("_")
        for name, variable in members.items():
            yield variable, kind, trained.get(name)


def _is_rmsprop(graph: Graph, node: ObjectNode) -> bool:
    """Return whether Keras 3 named the update counter after the class, as in `rm_sprop_1/iteration`."""
    child = node.children.get("_iterations")
    attributes = graph[child].attributes if child is not None else ()
    return any(attribute.full_name.replace("_", "").lower().startswith("rmsprop") for attribute in attributes)


def _settings(graph: Graph, node: ObjectNode) -> Iterable[int]:
    for child in node.children.values():
        if graph[child].attributes:
            yield child


def _slots_by_name(
    graph: Graph, slots: dict[int, SlotVariable], trained: set[int], settings: set[int]
) -> None:
    """Complete a slot from its own name; leave the owner open if a name is not unique."""
    owners: dict[str, int] | None = None
    ownerless: dict[int, list[int]] = {}
    walked: set[int] = set()
    for variable, slot in slots.items():
        if slot.of is None and graph[variable].attributes:
            ownerless.setdefault(slot.optimizer, []).append(variable)
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        whole = node.children.get("_variables", number)
        members = {} if whole in walked else _members(graph, node, "_variables")
        walked.add(whole)
        candidates = dict.fromkeys((*members.values(), *ownerless.get(number, ())))
        loose = [
            n
            for n in candidates
            if n not in settings and n not in trained and (n not in slots or slots[n].of is None)
        ]
        if loose and owners is None:
            owners = _unique_names(graph, slots, trained)
        for variable in loose:
            owner = _owner_by_name(graph[variable].attributes[0].full_name, owners or {})
            if owner is not None:
                kind = slots[variable].kind if variable in slots else owner[0]
                slots[variable] = SlotVariable(kind, owner[1], number, listed=True)
            elif variable not in slots:
                slots[variable] = SlotVariable("", None, number, listed=True)


def _unique_names(graph: Graph, slots: dict[int, SlotVariable], trained: set[int]) -> dict[str, int]:
    candidates = trained or {n for n, node in enumerate(graph) if node.attributes and n not in slots}
    names: dict[str, int] = {}
    for variable in candidates:
        if graph[variable].attributes:
            name = graph[variable].attributes[0].full_name
            names[name] = -1 if name in names else variable
            flat = name.replace("/", "_")
            if flat != name:
                names[flat] = -1 if flat in names else variable
    return {name: variable for name, variable in names.items() if name and variable >= 0}


def _owner_by_name(full_name: str, owners: dict[str, int]) -> tuple[str, int] | None:
    if len(full_name) > _LONGEST_NAME:
        return None
    first, _, rest = full_name.partition("/")
    if first in _ENDINGS and rest in owners:
        # The optimizer inside a LossScaleOptimizer of Keras 2 has no name there: `m/dense/kernel`.
        return _ENDINGS[first], owners[rest]
    kind, slash, name = rest.partition("/")
    if slash and name in owners:
        return _ENDINGS.get(kind, kind), owners[name]
    for at, letter in enumerate(rest):
        if letter == "_" and rest[:at] in owners:
            ending = rest[at + 1 :]
            return _ENDINGS.get(ending, ending), owners[rest[:at]]
    return None


def _add_sonnet_slots(graph: Graph, slots: dict[int, SlotVariable], trained: set[int]) -> None:
    names: set[str] | None = None
    owners: dict[str, int] = {}
    walked: set[int] = set()  # a list shared by many objects is read once
    for number, node in enumerate(graph):
        lists = next((lists for lists in _SONNET if lists.keys() <= node.children.keys()), None)
        if lists is None:
            continue
        if names is None:
            names = {node.attributes[0].full_name for node in graph if node.attributes}
            owners = _unique_names(graph, slots, trained)
        for edge, (scope, kind) in lists.items():
            if node.children[edge] in walked:
                continue
            walked.add(node.children[edge])
            for variable in _members(graph, node, edge).values():
                _, separator, name = graph[variable].attributes[0].full_name.partition(f"/{scope}/")
                # Two networks may use the same variable names: the slot is certain, its owner is not.
                if separator and name in names:
                    slots.setdefault(variable, SlotVariable(kind, owners.get(name), number, listed=True))


def slot_path(optimizer: Path, kind: str, of: Path) -> Path:
    """Return the path of a slot variable without an edge: `OPTIMIZER/slots/KIND/VARIABLE`."""
    # Not under the kind itself: SGD has a setting called momentum beside its slots of that name.
    return (*optimizer, PathStep("attr", "slots"), PathStep("attr", kind), *of)


def slot_optimizer(path: Path, leaf: Leaf) -> Path:
    """Return the path of a slot's optimizer, whether the slot has a separate path or is in a list."""
    if leaf.of is not None and leaf.slot is not None:
        short = len(path) - len(leaf.of) - 2
        if short >= 0 and path == slot_path(path[:short], leaf.slot, leaf.of):
            return path[:short]
    return path[:-2]


Steps = tuple[str, ...]

# Attributes stored under longer keys than in the graph: lookup tables (tensorflow/python/ops/lookup_ops.py)
# and dataset iterators (tensorflow/python/data/ops/iterator_ops.py).
_PAIR = ("-keys", "-values")
_ITERATOR, _STATE = "ITERATOR", "_STATE"
_SLOT_KEY = ".OPTIMIZER_SLOT"  # tensorflow/python/trackable/trackable_utils.py


def edgeless_slots(tree: Tree) -> dict[Path, Path]:
    """Return the optimizer's path for every slot without an edge."""
    paths = {}
    for path, leaf in tree.tensors():
        if leaf.role == "slot" and leaf.of is not None:
            for of in (leaf.of, *(alias.path for alias in tree.aliases.get(leaf.of, ()))):
                optimizer = path[: len(path) - len(of) - 2]
                if leaf.of in tree and path == slot_path(optimizer, leaf.slot or "", of):
                    paths[path] = optimizer
                    break
    return {path: target for path, target in paths.items() if _owner_of(tree, path) not in paths}


def _owner_of(tree: Tree, path: Path) -> Path | None:
    leaf = tree[path]
    return leaf.of if isinstance(leaf, Leaf) else None


def assign_keys(tree: Tree, slots: dict[Path, Path]) -> dict[Path, str]:
    """Return every leaf's key: its own if it belongs to an object's value and is free, else from its path."""
    keys: dict[Path, str] = {}
    used: set[str] = set()
    for path, leaf in tree.tensors():
        if MARK in leaf.key and leaf.key not in used and not leaf.key.startswith("\0"):
            keys[path] = leaf.key
            used.add(leaf.key)
    for path, leaf in tree.tensors():
        if path not in keys:
            keys[path] = _unused_key(_object_name(path, leaf, slots), used)
            used.add(keys[path])
    return {path: keys[path] for path, _ in tree.tensors()}


def _object_name(path: Path, leaf: Leaf, slots: dict[Path, Path]) -> str:
    if path in slots and leaf.of is not None:
        parts = [*_escaped(leaf.of), _SLOT_KEY, *_escaped(slots[path]), escape_edge(leaf.slot or "")]
        return "/".join(parts)
    return "/".join(_escaped(path))


def _escaped(path: Path) -> list[str]:
    return [escape_edge(step) for step in path_edges(path)]


def _unused_key(name: str, used: set[str]) -> str:
    key, number = f"{name}{MARK}{VALUE}", 0
    while key in used:
        number += 1
        key = f"{name}_{number}{MARK}{VALUE}"
    return key


def leaf_attribute(path: Path, key: str, keys: set[str]) -> tuple[str, str] | None:
    """Return the name and key of the attribute that contains a leaf; None for the value of a variable."""
    _, _, stored = key.partition(MARK)
    name = unescape_edge(stored)
    if stored in ("", VALUE) or not path or attribute_path(name) != path[-1:]:
        return None
    for own, other in (_PAIR, _PAIR[::-1]):
        whole = key.removesuffix(own)
        if name != own and whole != key and whole not in keys and whole + other in keys:
            return name.removesuffix(own), whole
    if name == _ITERATOR + _STATE:
        return _ITERATOR, key.removesuffix(_STATE)
    return name, key


def list_position(tree: Tree, path: Path, leaf: Leaf) -> Path:
    """Return the list position of a variable identified by its name (see of_lists); () if none."""
    for alias in tree.aliases.get(path, ()):
        items, item = alias.path[:-1], alias.path[-1:]
        name = tuple(attr(part) for part in (leaf.name or "").split("/") if part)
        # The root is not a list: an alias there is another name of the variable, such as Keras's `_kernel`.
        if name and items and path in ((*items, *name), (*items, *name, *item)):
            return alias.path
    return ()


def path_edges(path: Path) -> Steps:
    """Return the path's edges as text, for all kinds of steps."""
    return tuple(str(step.value) for step in path)


_LISTS = frozenset(("model_variables",))


def paths_in_lists(graph: Graph, tree: ObjectTree) -> dict[int, Path]:
    """Return the path, by full name, of every variable found only in such a list: `LIST/NAME/OF/VARIABLE`.

    A list counts if it is a child of the root (or is called model_variables), contains only variables, and
    their names come from more than one module. Variables with the same name also keep their index. TF-Agents'
    PolicySaver saves `model_variables`, all variables of a policy in one list, without edges to the networks
    that contain them (tf_agents/policies/policy_saver.py). `model_variables/3` is not informative; the
    variable's own name is.
    """
    if not graph or is_optimizer(graph[0]):
        return {}
    paths: dict[int, Path] = {}
    for number, path in tree.paths.items():
        if graph[number].listlike and (len(path) == 1 or (path and path[-1].value in _LISTS)):
            paths |= _name_members(graph, tree, number, path)
    return paths


def _name_members(graph: Graph, tree: ObjectTree, number: int, path: Path) -> dict[int, Path]:
    children = graph[number].children
    if not all(_is_named_variable(graph[child]) for child in children.values()):
        return {}
    names = {
        child: graph[child].attributes[0].full_name
        for edge, child in children.items()
        if tree.parents[child] == (number, edge)
    }
    if len({name.rpartition("/")[0] for name in names.values()}) < 2:
        return {}
    paths = {
        child: (*path, *(PathStep("attr", part) for part in name.split("/") if part))
        for child, name in names.items()
    }
    counts = Counter(paths.values())
    return {
        child: own if counts[own] == 1 else (*own, tree.paths[child][-1])
        for child, own in paths.items()
        if child in tree.paths
    }


def _is_named_variable(node: ObjectNode) -> bool:
    return (
        not node.children
        and len(node.attributes) == 1
        and node.attributes[0].name == VALUE
        and bool(node.attributes[0].full_name.strip("/"))
    )


# Keras 3 stores the kernel of a layer as `_kernel`, Keras 2 and most modules as `kernel`
# (keras/src/layers/core/dense.py, embedding.py).
_TWINS = {"kernel": "_kernel", "embeddings": "_embeddings"}
_TWINS |= {private: public for public, private in _TWINS.items()}
_APART = (attr(".ATTRIBUTES"),)
_ROUNDS = 16


def plan_graph(tree: Tree) -> tuple[Graph, dict[Path, str]]:
    """Return the graph and the keys, in its order, under which TensorFlow restores a tree of tensors.

    A leaf keeps its key if that belongs to one of TensorFlow's objects; other leaves get a key from their
    path. Reading gives each leaf the same path again; an alias that would become the canonical path is left
    out. Raise UnsupportedError if two leaves have the same path. A path's steps are the edges from the root,
    with one object for each prefix of a path. All paths of a leaf lead to one variable; other objects are not
    merged, even if one had two paths in the source tree: TensorFlow restores such an object through either
    path (tensorflow/python/checkpoint/restore.py, CheckpointPosition.bind_object).
    """
    slots = edgeless_slots(tree)
    keys = assign_keys(tree, slots)
    dropped: set[Steps] = set()
    for _ in range(_ROUNDS):
        draft = _ObjectGraphDraft(tree, keys, slots, dropped)
        graph = draft.numbered()
        winners = draft.displacing(graph) - dropped
        if not winners:
            break
        dropped |= winners
    return graph, {path: keys[path] for path in draft.order()}


def encode_graph(graph: Graph) -> bytes:
    """Return the TrackableObjectGraph (tensorflow/core/protobuf/trackable_object_graph.proto)."""
    valued = _objects_with_values(graph)
    return b"".join(
        protobuf.encode_message(1, _encode_node(node, has)) for node, has in zip(graph, valued, strict=True)
    )


def _encode_node(node: ObjectNode, has_values: bool) -> bytes:
    parts = [
        protobuf.encode_message(1, protobuf.encode_int(1, n) + protobuf.encode_text(2, edge))
        for edge, n in node.children.items()
    ]
    for name, full_name, key in node.attributes:
        parts.append(
            protobuf.encode_message(
                2,
                protobuf.encode_text(1, name)
                + protobuf.encode_text(2, full_name)
                + protobuf.encode_text(3, key),
            )
        )
    for of, kind, variable in node.slots:
        parts.append(
            protobuf.encode_message(
                3,
                protobuf.encode_int(1, of) + protobuf.encode_text(2, kind) + protobuf.encode_int(3, variable),
            )
        )
    # A BoolValue, for every object (tensorflow/python/checkpoint/util.py, add_checkpoint_values_check).
    parts.append(protobuf.encode_message(5, protobuf.encode_int(1, has_values)))
    return b"".join(parts)


def _objects_with_values(graph: Graph) -> list[bool]:
    """Record for each object whether it or a descendant has values."""
    parents: list[list[int]] = [[] for _ in graph]
    for number, node in enumerate(graph):
        for child in node.children.values():
            parents[child].append(number)
    valued = [bool(node.attributes or node.slots) for node in graph]
    waiting = [number for number, has in enumerate(valued) if has]
    while waiting:
        for parent in parents[waiting.pop()]:
            if not valued[parent]:
                valued[parent] = True
                waiting.append(parent)
    return valued


@dataclass(eq=False, slots=True)
class _DraftObject:
    """An object of the graph under construction."""

    children: dict[str, _DraftObject] = field(default_factory=dict)
    attributes: list[ObjectAttribute] = field(default_factory=list)
    slots: list[tuple[_DraftObject, str, _DraftObject]] = field(default_factory=list)


class _ObjectGraphDraft:
    """The objects of a tree without the aliases `dropped`; `homes` is each leaf's object and its steps."""

    def __init__(
        self, tree: Tree, keys: dict[Path, str], slots: dict[Path, Path], dropped: set[Steps]
    ) -> None:
        self._tree = tree
        self._root = _DraftObject()
        self._homes: dict[Path, tuple[_DraftObject, Steps]] = {}
        self._dropped = dropped
        self._add_leaves(keys, slots)
        self._add_aliases(slots)
        for path, optimizer in slots.items():
            leaf = tree[path]
            if isinstance(leaf, Leaf) and leaf.of is not None:  # ensured by _slots
                slot = _DraftObject(attributes=[ObjectAttribute(VALUE, leaf.name or "", keys[path])])
                owner, _ = self._homes[leaf.of]
                self._at(path_edges(optimizer)).slots.append((owner, leaf.slot or "", slot))
                self._homes[path] = slot, path_edges(path)
        self._add_twins(slots)

    def numbered(self) -> Graph:
        """Return the graph, with objects numbered breadth first and slots last, as in TensorFlow."""
        order = [self._root]
        self._numbers = {self._root: 0}
        waiting = deque(order)
        while waiting:
            for child in waiting.popleft().children.values():
                if child not in self._numbers:
                    self._numbers[child] = len(order)
                    order.append(child)
                    waiting.append(child)
        for draft in tuple(order):
            for _, _, slot in draft.slots:
                self._numbers[slot] = len(order)
                order.append(slot)
        return [self._node(draft) for draft in order]

    def order(self) -> list[Path]:
        """Return the leaves' paths in the order of their object numbers."""
        return sorted(self._homes, key=lambda path: self._numbers[self._homes[path][0]])

    def displacing(self, graph: Graph) -> set[Steps]:
        """Return the aliases that a reader would use as the canonical paths of their leaves."""
        chosen = choose_paths(graph)
        paths = chosen.paths | paths_in_lists(graph, chosen)
        homes = set()
        for draft, steps in self._homes.values():
            path = paths.get(self._numbers[draft])
            if path is not None and path_edges(path) != steps:
                homes.add(path_edges(path))
        return homes

    def _node(self, draft: _DraftObject) -> ObjectNode:
        numbers = self._numbers
        children = {edge: numbers[child] for edge, child in draft.children.items()}
        slots = tuple(SlotEntry(numbers[of], kind, numbers[slot]) for of, kind, slot in draft.slots)
        return ObjectNode(children, tuple(draft.attributes), slots, is_listlike(children))

    def _at(self, steps: Steps) -> _DraftObject:
        draft = self._root
        for step in steps:
            draft = draft.children.setdefault(step, _DraftObject())
        return draft

    def _add_leaves(self, keys: dict[Path, str], slots: dict[Path, Path]) -> None:
        every = set(keys.values())
        for path, leaf in self._tree.tensors():
            if path in slots:
                continue
            steps, name, key = path_edges(path), VALUE, keys[path]
            attribute = leaf_attribute(path, key, every)
            if attribute is not None:
                steps, (name, key) = steps[:-1], attribute
            elif path[-1:] == _APART and leaf_attribute(path[:-1], keys.get(path[:-1], ""), every):
                # The reader renames a variable whose name is an attribute of the object that contains it.
                steps = steps[:-1]
            draft = self._at(path_edges(list_position(self._tree, path, leaf)) or steps)
            if all(attribute.name != name for attribute in draft.attributes):
                draft.attributes.append(ObjectAttribute(name, leaf.name or "", key))
            elif attribute is None:
                raise UnsupportedError("two tensors have the same path", path=display(path))
            self._homes[path] = draft, steps

    def _add_aliases(self, slots: dict[Path, Path]) -> None:
        # Shortest first: everything under a shared object is already shared.
        for steps, draft, shared in sorted(self._aliases(slots), key=lambda alias: len(alias[0])):
            parent = self._at(steps[:-1]) if steps else self._root
            there = parent.children.setdefault(steps[-1], draft) if steps else self._root
            if there is not draft and not shared:
                raise UnsupportedError("two tensors have the same path", path="/".join(steps))

    def _aliases(self, slots: dict[Path, Path]) -> Iterator[tuple[Steps, _DraftObject, bool]]:
        for path, others in self._tree.aliases.items():
            if path not in self._homes or path in slots:
                continue
            draft, own = self._homes[path]
            tail = len(path) - len(own)  # 1 for an attribute that is not a variable's value
            for alias in others:
                steps = path_edges(alias.path)
                steps = steps[: len(steps) - tail]
                if steps not in self._dropped:
                    yield steps, draft, bool(tail)

    def _add_twins(self, slots: dict[Path, Path]) -> None:
        for path, leaf in self._tree.tensors():
            if MARK not in leaf.key and path not in slots and path:
                twin = _TWINS.get(str(path[-1].value))
                if twin is not None and (*path_edges(path[:-1]), twin) not in self._dropped:
                    self._at(path_edges(path[:-1])).children.setdefault(twin, self._homes[path][0])
