"""A SavedModel's folder as one checkpoint: its bundle's variables, and what its graph says about them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import limits, places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.formats import saved_model, tensor_bundle
from ckpttool.formats.keras_tree.asking import Judged, together
from ckpttool.formats.saved_model import asking, assets, join, messages, modules, nodes, objects
from ckpttool.formats.saved_model.details import Details
from ckpttool.formats.saved_model.messages import MetaGraph, Meter
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.shown import count
from ckpttool.source import File
from ckpttool.tree import Container, Tree
from ckpttool.wire.asked import merged

_EMPTY = "the SavedModel holds no variables; constants are part of its graph"


@dataclass(slots=True)
class _Folder:
    """What is found while one SavedModel is listed."""

    path: str
    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: CkpttoolError | None = None  # why there is no graph
    judged: list[Judged] = field(default_factory=list)  # what configurations of Keras ask for
    unjudged: list[str] = field(default_factory=list)

    def inside(self, name: str) -> str:
        return os.path.join(self.path, name)

    def bytes_of(self, name: str) -> memoryview:
        """Read a file of the folder; raise CkpttoolError when that is impossible or unwise."""
        path = self.inside(name)
        file = File.stamp(path)
        if not places.isfile(path):
            raise FormatError("it is not a regular file")
        if file.size > limits.current().graph_bytes:
            raise limits.exceeded("graph_bytes", "it is too large", file.size)
        data = file.read(0, file.size)
        self.files.append(file)
        if data.startswith(b"version https://git-lfs"):
            raise FormatError("it is a Git LFS pointer, not the file itself", hint="git lfs pull fetches it")
        return memoryview(data)


@dataclass(slots=True)
class _Graph:
    """One MetaGraph with the parts of it that were looked into."""

    meta: MetaGraph
    nodes: nodes.Nodes
    objects: objects.Objects | None


def read(location: str) -> Checkpoint:
    """List the SavedModel in the folder; see saved_model.read."""
    folder = _Folder(location)
    graphs = _graphs(folder)
    bundle = _variables(folder, graphs)
    tree = bundle.tree if bundle is not None else Tree({})
    joined = _Joined(folder, tree)
    for graph in graphs:
        joined.add(graph)
    version = next((graph.meta.version for graph in graphs if graph.meta.version), "")
    details = joined.details(graphs)
    details["assets"] = assets.listed(
        location, [name for graph in graphs for name in graph.meta.assets], folder.notes
    )
    details["files"] = assets.beside(location)
    configurations = together(folder.judged)
    held = (graph.meta.nodes for graph in graphs if graph.meta.nodes is not None)
    operations = asking.asks(held, saved_model.GRAPH)
    writer = " ".join(["TensorFlow", *([version] if version else []), "SavedModel"]) if graphs else None
    return Checkpoint(
        location,
        saved_model.NAME,
        joined.tree,
        (*folder.files, *(bundle.files if bundle is not None else ())),
        writer or (bundle.writer if bundle is not None else None),
        "crc32c" if bundle is not None else "none",
        (*folder.notes, *(bundle.notes if bundle is not None else ())),
        details,
        merged(operations, configurations.asks),
        (*configurations.unjudged, *folder.unjudged),
    )


def _graphs(folder: _Folder) -> list[_Graph]:
    if places.lexists(folder.inside(saved_model.CHUNKED_GRAPH)):
        # tensorflow/python/saved_model/loader_impl.py takes it before saved_model.pb.
        folder.unjudged.append(f"{saved_model.CHUNKED_GRAPH}, a graph in chunks, is not read")
    if not places.lexists(folder.inside(saved_model.GRAPH)):
        text = places.lexists(folder.inside(saved_model.TEXT_GRAPH))
        folder.notes.append(
            f"the graph is in text form ({saved_model.TEXT_GRAPH}), which is not parsed: its variables are "
            "listed, its signatures and functions are not"
            if text
            else f"there is no {saved_model.GRAPH}: only variables/ is listed"
        )
        if text:
            folder.unjudged.append(f"{saved_model.TEXT_GRAPH}, a graph in text form, is not parsed")
        _metadata(folder, None)
        return []
    meter = Meter()
    try:
        data = folder.bytes_of(saved_model.GRAPH)
        if not data:
            raise TruncatedError("it is empty")
        graphs = [_graph(meta, meter) for meta in messages.parse(data, meter)]
        if not graphs:
            raise FormatError("it holds no graph")
    except CkpttoolError as error:
        folder.error = error
        reason = str(CkpttoolError(error.message, expected=error.expected, found=error.found))
        hint = f" ({error.hint})" if error.hint else ""
        folder.notes.append(f"{saved_model.GRAPH} cannot be read: {reason}{hint}; only variables/ is listed")
        folder.unjudged.append(f"{saved_model.GRAPH} cannot be read: {reason}")
        _metadata(folder, None)
        return []
    _keras(folder, graphs)
    return graphs


def _graph(meta: MetaGraph, meter: Meter) -> _Graph:
    found = None if meta.objects is None else objects.parse(meta.objects, meter)
    # Where objects say what functions capture, the nodes tell nothing more.
    told = found is not None and bool(found.children)
    graph = nodes.Nodes() if meta.nodes is None else nodes.parse(meta.nodes, meter, count_only=told)
    return _Graph(meta, graph, found if told else None)


def _keras(folder: _Folder, graphs: list[_Graph]) -> None:
    with_objects = [graph.objects for graph in graphs if graph.objects is not None]
    folder.judged += [modules.stored(each, saved_model.GRAPH) for each in with_objects]
    _metadata(folder, with_objects[0] if with_objects else None)


def _metadata(folder: _Folder, found: objects.Objects | None) -> None:
    """Judge what keras_metadata.pb says of layers, and add it to the graph's objects."""
    if not places.lexists(folder.inside(saved_model.METADATA)):
        return
    try:
        data = folder.bytes_of(saved_model.METADATA)
        folder.judged.append(modules.judged(data, Meter()))
        if found is not None:
            modules.merge(found, data, Meter())
    except CkpttoolError as error:
        folder.notes.append(modules.damaged(error))
        folder.unjudged.append(f"{saved_model.METADATA} cannot be judged: {error.message}")


def _variables(folder: _Folder, graphs: list[_Graph]) -> Checkpoint | None:
    prefix = folder.inside(saved_model.VARIABLES)
    if places.lexists(f"{prefix}.index"):
        File.beside(f"{prefix}.index", folder.inside(saved_model.GRAPH))
        bundle = tensor_bundle.read(prefix)
        if not bundle.tree:
            folder.notes.append(_EMPTY if graphs else "variables/ holds no variables")
        return bundle
    declared = sum(_declared(graph) for graph in graphs)
    if folder.error is not None:
        raise FormatError(
            f"{folder.error.message.replace('it ', 'the graph ', 1)}, and there are no variables beside it",
            file=folder.inside(saved_model.GRAPH),
            expected=folder.error.expected,
            found=folder.error.found,
            hint=folder.error.hint,
        ) from folder.error
    if declared:
        raise TruncatedError(
            f"the index is missing, and the graph has {count(declared, 'variable')}", file=f"{prefix}.index"
        )
    folder.notes.append(_EMPTY if graphs else "there are no variables")
    return None


def _declared(graph: _Graph) -> int:
    if graph.objects is not None:
        return len(graph.objects.variables)
    return len(graph.meta.variables)


class _Joined:
    """The tree with what the graphs say about its leaves, and the facts that belong to no leaf."""

    def __init__(self, folder: _Folder, tree: Tree) -> None:
        self._folder = folder
        self._leaves: dict[Path, Leaf | ValueLeaf] = dict(tree.leaves)
        self._containers: dict[Path, Container] = dict(tree.containers)
        self._known = tree
        self._position = {path: at for at, path in enumerate(tree)}
        self._details = Details()

    @property
    def tree(self) -> Tree:
        """The tree as far as it is known."""
        return Tree(self._leaves, self._known.aliases, self._containers)

    def details(self, graphs: list[_Graph]) -> dict[str, Any]:
        """Return the facts as JSON values; note what was left out of them."""
        found = self._details.document([graph.meta for graph in graphs])
        if graphs:
            found["graph"] = {
                "nodes": sum(graph.nodes.count for graph in graphs),
                "functions": sum(graph.nodes.functions for graph in graphs),
            }
        if self._details.left_out:
            self._folder.notes.append(
                f"details of the graph are not complete: {self._details.left_out:,} entries are left out"
            )
        return found

    def add(self, graph: _Graph) -> None:
        """Take over what one graph says."""
        if graph.objects is None:
            facts = join.by_nodes(self._known, graph.meta, graph.nodes)
        else:
            facts = join.by_objects(self._known, graph.objects)
            self._objects(graph.objects, facts)
        self._folder.notes += facts.notes
        for path, fact in facts.variables.items():
            leaf = self._leaves[path]
            if isinstance(leaf, Leaf):
                self._leaves[path] = _told(leaf, fact)
        names = self._known.names
        self._details.initializers |= {names[path]: op for path, op in facts.initializers.items()}
        for name, signature in graph.meta.signatures.items():
            used = self._named(facts.signatures.get(name, ()))
            self._details.signature(name, signature, used, graph.meta.tags)

    def _named(self, paths: Iterable[Path]) -> list[str]:
        """Return the display paths in the order of the tree."""
        return [self._known.names[path] for path in sorted(paths, key=self._position.__getitem__)]

    def _objects(self, graph: objects.Objects, facts: join.Facts) -> None:
        parents = objects.spell(graph)
        for name, holder, used in join.functions(graph, facts.numbers):
            edges = objects.steps(parents, holder) if holder is not None else None
            shown = None if edges is None else "/".join(edges)
            self._details.function(name, shown, self._named(used))
        self._details.kinds(graph.kinds)
        self._containers |= modules.containers(self._known, graph, parents)


def _told(leaf: Leaf, fact: join.Fact) -> Leaf:
    untrained = fact.trainable is False and leaf.role == "parameter"
    return replace(
        leaf,
        trainable=leaf.trainable if fact.trainable is None else fact.trainable,
        name=fact.name or leaf.name,
        role="buffer" if untrained else leaf.role,
    )
