"""What Keras 2 says about its layers in a SavedModel, as plain facts for the tree's containers.

Keras describes a layer in JSON: until 2.4 in the object's own `metadata`, later in keras_metadata.pb beside
saved_model.pb (tf_keras/protobuf/saved_metadata.proto). JSON is read as data: no class is looked up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import CkpttoolError
from ckpttool.formats.saved_model import objects
from ckpttool.formats.saved_model.messages import Meter, of_number
from ckpttool.leaf import Key, Path
from ckpttool.tree import Container, Tree
from ckpttool.wire import protobuf

METADATA = "keras_metadata.pb"
MAX_JSON = 4 << 20  # bytes of one description; a whole model's configuration is in that of the model
MAX_MODULES = 20_000
MAX_TEXT, MAX_ITEMS = 200, 16  # of one fact
_KERAS = "_tf_keras_"


def merge(graph: objects.Objects, data: memoryview, meter: Meter) -> None:
    """Add what keras_metadata.pb says to the graph's objects; raise CkpttoolError if it is damaged.

    SavedMetadata.nodes (1) have node_id (2), identifier (4) and metadata (5).
    """
    for node in of_number(1, data, meter):
        number, identifier, metadata = 0, "", b""
        for part, value in meter.fields(node):
            if part == 2:
                number = protobuf.number(value)
            elif part == 4:
                identifier = protobuf.text(value)
            elif part == 5:
                metadata = bytes(protobuf.message(value))
        user = graph.users.get(number)
        if user is not None and user.identifier == identifier:
            graph.users[number] = user._replace(metadata=metadata)


def containers(
    tree: Tree, graph: objects.Objects, parents: Mapping[int, tuple[int, str]]
) -> dict[Path, Container]:
    """Return a "module" for every object whose class the graph names, by its path.

    Objects on the way to a leaf have the path that the leaf has; others (layers without weights) have the
    shortest.
    """
    places = dict(_on_the_way(tree, graph))
    found: dict[Path, Container] = {}
    for number, user in graph.users.items():
        module = _module(user) if len(found) < MAX_MODULES else None
        if module is None:
            continue
        path = places.get(number)
        if path is None:
            edges = objects.steps(parents, number)
            path = None if edges is None else tuple(Key("attr", edge) for edge in edges)
        if path is not None and path not in tree:
            found.setdefault(path, module)
    return dict(sorted(found.items(), key=lambda item: len(item[0])))


def _on_the_way(tree: Tree, graph: objects.Objects) -> Iterator[tuple[int, Path]]:
    seen: set[Path] = set()
    for path, _ in tree.tensors():
        if path[:-1] not in seen:
            seen.add(path[:-1])
            for depth, number in enumerate(objects.walk(graph, path[:-1])):
                yield number, path[:depth]


def _module(user: objects.User) -> Container | None:
    if not user.identifier.startswith(_KERAS):
        return Container("module", user.registered, {}) if user.registered else None
    told = _object(user.metadata)
    name = told.get("class_name")
    if not isinstance(name, str) or len(name) > MAX_TEXT:
        return None
    state = {"layer": told["name"]} if isinstance(told.get("name"), str) and _is_fact(told["name"]) else {}
    config = told.get("config")
    for fact, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            # A tuple, or an object (an initializer, an activation that is a layer): its class is fact enough.
            value = value.get("items" if value.get("class_name") == "__tuple__" else "class_name", value)
        if fact != "name" and len(fact) <= MAX_TEXT and _is_fact(value):
            # JSON has no infinities, and yet Python reads them from it.
            state[fact] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    # A registered class is spelled `Package>Class`.
    return Container("module", name.rpartition(">")[2], state)


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_JSON:
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_fact(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_ITEMS and all(_is_item(v) for v in value)
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, bool | int | float)


def _is_item(value: object) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return finite and not isinstance(value, list) and _is_fact(value)


def damaged(error: CkpttoolError) -> str:
    """Return the note about a keras_metadata.pb that cannot be read."""
    return f"{METADATA} cannot be read, so nothing is said about layers: {error.message}"
