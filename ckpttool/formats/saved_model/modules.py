"""What Keras 2 says about its layers in a SavedModel, as plain facts for the tree's containers.

Keras describes a layer in JSON: until 2.4 in the object's own `metadata`, later in keras_metadata.pb beside
saved_model.pb (tf_keras/protobuf/saved_metadata.proto). JSON is read as data: no class is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool import documents
from ckpttool.errors import CkpttoolError
from ckpttool.formats.keras_facts import class_of, facts
from ckpttool.formats.keras_tree import asking
from ckpttool.formats.keras_tree.asking import Judged
from ckpttool.formats.saved_model import METADATA, objects
from ckpttool.formats.saved_model.messages import Meter, of_number
from ckpttool.leaf import Key, Path
from ckpttool.tree import Container, Tree
from ckpttool.wire import protobuf

MAX_MODULES = 20_000
_NODE = {2: protobuf.NUMBER, 4: protobuf.DELIMITED, 5: protobuf.DELIMITED}
_KERAS = "_tf_keras_"


def judged(data: memoryview, meter: Meter) -> Judged:
    """Judge every configuration in keras_metadata.pb; raise CkpttoolError if it is damaged."""
    found = []
    for node in of_number(1, data, meter):
        for part, value in meter.fields(node, _NODE):
            if part == 5 and (text := bytes(protobuf.message(value))):
                found.append(asking.judged(text, METADATA))
    return asking.together(found)


def stored(graph: objects.Objects, where: str) -> Judged:
    """Judge the configurations that Keras before 2.5 kept in the graph's own objects."""
    texts = (user.metadata for user in graph.users.values() if user.identifier.startswith(_KERAS))
    return asking.together(asking.judged(bytes(text), where) for text in texts if text)


def merge(graph: objects.Objects, data: memoryview, meter: Meter) -> None:
    """Add what keras_metadata.pb says to the graph's objects; raise CkpttoolError if it is damaged.

    SavedMetadata.nodes (1) have node_id (2), identifier (4) and metadata (5).
    """
    for node in of_number(1, data, meter):
        number, identifier, metadata = 0, "", b""
        for part, value in meter.fields(node, _NODE):
            if part == 2:
                number = protobuf.int32(value)
            elif part == 4:
                identifier = protobuf.text(value)
            else:
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
    name, config = class_of(told.get("class_name")), told.get("config")
    if name is None:
        return None
    settings = {**config} if isinstance(config, dict) else {}
    settings["name"] = told.get("name", settings.get("name"))
    return Container("module", name, facts(settings))


def _object(data: bytes) -> dict[str, Any]:
    try:
        return documents.parse(data, METADATA)
    except CkpttoolError:
        return {}


def damaged(error: CkpttoolError) -> str:
    """Return the note about a keras_metadata.pb that cannot be read."""
    return f"{METADATA} cannot be read, so nothing is said about layers: {error.message}"
