"""TensorFlow SavedModels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import filesystem, limits, text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CodeReference, merge_references
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError, abbreviate_list
from ckpttool.core.source import File
from ckpttool.core.text import format_count
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, ValueLeaf
from ckpttool.encodings import protobuf
from ckpttool.formats import keras_config, tf_bundle, tf_saved_model_messages
from ckpttool.formats.keras_config import ConfigAudit, merge_audits
from ckpttool.formats.probe import Probe
from ckpttool.formats.tf_common import INPUT_LAYERS, class_name, is_inside, plain_facts
from ckpttool.formats.tf_saved_model_messages import (
    FieldMeter,
    MetaGraph,
    SavedObjects,
    Signature,
    TensorInfo,
    iter_field,
)

NAME = "saved_model"
TITLE = "TensorFlow SavedModel (folder with saved_model.pb and variables/)"
WRITES = False
FRAMEWORK = "tensorflow"

GRAPH = "saved_model.pb"
TEXT_GRAPH = "saved_model.pbtxt"
CHUNKED_GRAPH = "saved_model.cpb"
_GRAPHS = (GRAPH, TEXT_GRAPH, CHUNKED_GRAPH)
METADATA = "keras_metadata.pb"
VARIABLES = os.path.join("variables", "variables")


def claims(probe: Probe) -> str | None:
    """Return the SavedModel folder for a path: the folder itself, or the folder of the graph.

    A folder with variables/variables.index but without a graph also counts (TF-Agents writes these),
    unless it contains checkpoints itself.
    """
    if probe.kind == "file":
        # Keras's description of the layers belongs to the graph in the same folder.
        described = probe.name == METADATA and not probe.names.isdisjoint(_GRAPHS)
        return probe.folder if described or probe.name in _GRAPHS else None
    if probe.kind != "folder":
        return None
    if not probe.names.isdisjoint(_GRAPHS):
        return probe.path
    if "variables" not in probe.names or _holds_checkpoints(probe):
        return None
    return probe.path if filesystem.isfile(os.path.join(probe.path, f"{VARIABLES}.index")) else None


def _holds_checkpoints(probe: Probe) -> bool:
    if "checkpoint" in probe.names or any(name.endswith(".index") for name in probe.names):
        return True
    # A prefix may have a folder of the same name beside its index.
    return filesystem.isfile(f"{probe.path.rstrip('/')}.index")


FOLDER = "assets"
# tensorflow/core/protobuf/fingerprint.proto; tf_agents/policies/policy_saver.py of tensorflow/agents.
_NOTICED = ("fingerprint.pb", "keras_metadata.pb", "policy_specs.pbtxt", "saved_model.pbtxt")
MAX_LISTED = 1000
_SHOWN = 3


def companion_files(folder: str) -> list[str]:
    """Return which of the files that tools store beside the graph exist."""
    return [name for name in _NOTICED if filesystem.lexists(os.path.join(folder, name))]


def list_assets(folder: str, declared: Sequence[str], notes: list[str]) -> list[str]:
    """Return the names of the graph's assets and of the files in assets/; add notes on anything unusual."""
    outside = [name for name in declared if not is_inside(name)]
    if outside:
        notes.append(f"assets outside the folder, not checked: {abbreviate_list(outside, _SHOWN)}")
    top = os.path.join(folder, FOLDER)
    present: list[str] = []
    if filesystem.islink(top):
        notes.append(f"{FOLDER}/ is a symbolic link and is not followed")
    else:
        present = sorted(_iter_files(top))
        missing = sorted({name for name in declared if is_inside(name)} - set(present))
        if missing and len(present) < MAX_LISTED:
            notes.append(f"assets missing from {FOLDER}/: {abbreviate_list(missing, _SHOWN)}")
    names = list(dict.fromkeys([*declared, *present]))
    if len(names) > MAX_LISTED:
        notes.append(f"only the first {MAX_LISTED:,} assets are listed")
    return names[:MAX_LISTED]


def _iter_files(top: str) -> Iterator[str]:
    count = 0
    for folder, files in filesystem.walk(top):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), top)
            count += 1
            if count > MAX_LISTED:
                return


MAX_ENTRIES = 50_000  # total paths, tensors, functions and operations


class GraphDetails:
    """Facts from all graphs; `left_out` counts the facts omitted because of the limit."""

    def __init__(self, room: int = MAX_ENTRIES) -> None:
        self.left_out = 0
        self.initializers: dict[str, str] = {}
        self._room = room
        self._signatures: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._kinds: Counter[str] = Counter()

    def signature(self, name: str, what: Signature, used: Sequence[str], tags: Sequence[str]) -> None:
        """Add a signature; if another graph has the same one, append its own graph's tags to the name."""
        if name in self._signatures:
            name = f"{name} ({', '.join(tags)})"
        if self._take(1):
            self._signatures[name] = {
                "method": what.method,
                "inputs": self._tensors(what.inputs),
                "outputs": self._tensors(what.outputs),
                "variables": list(used[: self._take(len(used))]),
            }

    def function(self, name: str, holder: str | None, captures: Sequence[str]) -> None:
        """Add a concrete function: the path of its object, and the variables it captures."""
        if self._take(1):
            self._functions[name] = {
                "object": holder,
                "captures": list(captures[: self._take(len(captures))]),
            }

    def kinds(self, counts: Mapping[str, int]) -> None:
        """Count objects by kind."""
        self._kinds.update(counts)

    def document(self, graphs: Sequence[MetaGraph]) -> dict[str, Any]:
        """Return all facts as JSON values; empty without a graph."""
        if not graphs:
            return {}
        return {
            "tags": [list(graph.tags[: self._take(len(graph.tags))]) for graph in graphs],
            "producer": graphs[0].version or None,
            "signatures": self._signatures,
            "functions": self._functions,
            "initializers": dict(list(self.initializers.items())[: self._take(len(self.initializers))]),
            "objects": dict(self._kinds.most_common(self._take(len(self._kinds)))),
        }

    def _tensors(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        kept = list(tensors.items())[: self._take(len(tensors))]
        return {
            name: {"dtype": tensor.dtype, "shape": None if tensor.shape is None else list(tensor.shape)}
            for name, tensor in kept
        }

    def _take(self, count: int) -> int:
        part = min(count, self._room)
        self._room -= part
        self.left_out += count - part
        return part


_SIGNATURES = (
    "signatures"  # the root's edge to the map of signatures (saved_model/signature_serialization.py)
)


class VariableFact(NamedTuple):
    """Facts about one variable from a graph; None and "" mean unknown."""

    name: str
    trainable: bool | None


@dataclass(slots=True)
class GraphFacts:
    """Facts about the leaves from a graph, by path; `numbers` maps object numbers to paths."""

    variables: dict[Path, VariableFact] = field(default_factory=dict)
    numbers: dict[int, Path] = field(default_factory=dict)
    signatures: dict[str, list[Path]] = field(default_factory=dict)
    initializers: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def facts_by_objects(tree: Tree, graph: SavedObjects) -> GraphFacts:
    """Find each leaf's variable among the graph's objects: by path, as a slot, or by name."""
    facts = GraphFacts()
    loose: list[tuple[Path, Leaf]] = []
    different: list[str] = []
    for path, leaf in tree.tensors():
        number = _along_paths(tree, graph, path)
        if number is None and leaf.of is not None:
            number = _find_slot(tree, graph, path, leaf)
        if number is None or number in facts.numbers:
            loose.append((path, leaf))
        elif _fits(leaf, graph.variables[number]):
            facts.numbers[number] = path
        else:
            different.append(tree.names[path])
    named = _unique_names(graph, facts.numbers)
    for path, leaf in loose:
        number = named.get(leaf.name or "")
        if number is not None and number not in facts.numbers and _fits(leaf, graph.variables[number]):
            facts.numbers[number] = path
    facts.variables = {
        path: VariableFact(graph.variables[number].name, graph.variables[number].trainable)
        for number, path in facts.numbers.items()
    }
    facts.signatures = {
        name: _paths(graph.captures.get(function, ()), facts.numbers)
        for name, function in iter_signatures(graph)
    }
    if different:
        facts.notes.append(
            f"{_format_names(different)}: shape or type in the graph differs from the stored variable"
        )
    absent = [v.name for number, v in graph.variables.items() if number not in facts.numbers]
    if absent:
        facts.notes.append(
            f"variables in the graph that are not stored under the same path: {_format_names(absent)}"
        )
    return facts


def _along_paths(tree: Tree, graph: SavedObjects, path: Path) -> int | None:
    number = tf_saved_model_messages.find_object(graph, path)
    if number in graph.variables:
        return number
    for alias in tree.aliases.get(path, ()):
        number = tf_saved_model_messages.find_object(graph, alias.path)
        if number in graph.variables:
            return number
    return None


def _find_slot(tree: Tree, graph: SavedObjects, path: Path, leaf: Leaf) -> int | None:
    """Find a slot variable without an edge: its path is OPTIMIZER/slots/KIND/VARIABLE."""
    assert leaf.of is not None  # noqa: S101 - called for slots with an owner only
    optimizer = tf_saved_model_messages.find_object(graph, path[: max(0, len(path) - len(leaf.of) - 2)])
    of = _along_paths(tree, graph, leaf.of)
    if optimizer is None or of is None:
        return None
    number = graph.slots.get((optimizer, of, leaf.slot or ""))
    return number if number in graph.variables else None


def _fits(leaf: Leaf, variable: tf_saved_model_messages.SavedVariable) -> bool:
    if leaf.dtype != variable.dtype:
        return False
    shape = variable.shape
    if shape is None or len(shape) != len(leaf.shape):
        return shape is None
    return all(known in (-1, extent) for known, extent in zip(shape, leaf.shape, strict=True))


def _unique_names(graph: SavedObjects, paths: Mapping[int, Path]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    several = set()
    for number, variable in graph.variables.items():
        if number not in paths and variable.name:
            if variable.name in numbers:
                several.add(variable.name)
            numbers[variable.name] = number
    return {name: number for name, number in numbers.items() if name not in several}


def iter_signatures(graph: SavedObjects) -> Iterator[tuple[str, str]]:
    """Yield the signatures: name, and the concrete function it calls."""
    signatures = graph.children[0].get(_SIGNATURES) if graph.children else None
    for name, number in graph.children[signatures].items() if signatures is not None else ():
        for function in graph.functions.get(number, ()):
            yield name, function


def iter_functions(
    graph: SavedObjects, numbers: Mapping[int, Path]
) -> Iterator[tuple[str, int | None, list[Path]]]:
    """Yield the concrete functions: name, the object that contains it, and the variables it captures."""
    holders: dict[str, int] = {}
    for number, names in graph.functions.items():
        for name in names:
            holders.setdefault(name, number)
    for name in sorted(graph.captures):
        yield name, holders.get(name), _paths(graph.captures[name], numbers)


def _paths(captured: Iterable[int], numbers: Mapping[int, Path]) -> list[Path]:
    return list(dict.fromkeys(numbers[number] for number in captured if number in numbers))


def facts_by_nodes(tree: Tree, meta: MetaGraph, graph: tf_saved_model_messages.GraphNodes) -> GraphFacts:
    """Find each leaf's variables among the graph's nodes: those saved under its key, or with its name."""
    facts = GraphFacts()
    wholes: dict[bytes, list[bytes]] = {}
    for info in meta.variables.values():
        wholes.setdefault(info.whole or info.name, []).append(info.name)
    owners: dict[bytes, Path] = {}
    for path, leaf in tree.tensors():
        key = leaf.key.encode("utf-8", "surrogateescape")
        mine = graph.saved.get(key) or wholes.get(key) or ([key] if key in graph.nodes else [])
        owners |= dict.fromkeys(mine, path)
        for name in mine[:1]:
            variable = meta.variables.get(name)
            trainable = None if meta.trained is None or variable is None else name in meta.trained
            whole = variable.whole if variable is not None else b""
            facts.variables[path] = VariableFact(
                (whole or name).decode("utf-8", "surrogateescape"), trainable
            )
            first = tf_saved_model_messages.initializer_op(
                graph, name, variable.initializer if variable is not None else b""
            )
            if first is not None:
                facts.initializers[path] = first
    for signature, what in meta.signatures.items():
        outputs = [name for tensor in what.outputs.values() for name in tensor.names]
        inputs = [name for tensor in what.inputs.values() for name in tensor.names]
        used = tf_saved_model_messages.used_variables(graph, outputs, inputs)
        facts.signatures[signature] = list(dict.fromkeys(owners[name] for name in used if name in owners))
    return facts


def _format_names(names: list[str]) -> str:
    return abbreviate_list([name or "an unnamed variable" for name in names], _SHOWN)


MAX_MODULES = 20_000
_NODE = protobuf.Message({2: protobuf.INT32, 4: protobuf.TEXT, 5: protobuf.BINARY})
_KERAS = "_tf_keras_"


def audit_metadata(data: memoryview, meter: FieldMeter) -> ConfigAudit:
    """Audit every configuration in keras_metadata.pb; raise CkpttoolError if it is damaged."""
    audits = []
    for node in iter_field(1, data, meter):
        texts = map(bytes, iter_field(5, node, meter))
        audits += [keras_config.audit_json(document, METADATA) for document in texts if document]
    return keras_config.merge_audits(audits)


def audit_object_configs(graph: SavedObjects, where: str) -> ConfigAudit:
    """Audit the configurations that Keras before 2.5 stored in the graph's own objects."""
    texts = (user.metadata for user in graph.users.values() if user.identifier.startswith(_KERAS))
    return keras_config.merge_audits(keras_config.audit_json(bytes(text), where) for text in texts if text)


def _add_keras_metadata(graph: SavedObjects, data: memoryview, meter: FieldMeter) -> None:
    """Add the contents of keras_metadata.pb to the graph's objects; raise CkpttoolError if it is damaged.

    SavedMetadata.nodes (1) have node_id (2), identifier (4) and metadata (5).
    """
    for node in iter_field(1, data, meter):
        number, identifier, metadata = meter.decode(node, _NODE)
        user = graph.users.get(number)
        if user is not None and user.identifier == identifier:
            graph.users[number] = user._replace(metadata=metadata)


def module_containers(
    tree: Tree, graph: SavedObjects, parents: Mapping[int, tuple[int, str]]
) -> dict[Path, Container]:
    """Return a "module" for every object whose class the graph names, by its path.

    Objects on the way to a leaf have the path used by the leaf; others (layers without weights) have the
    shortest path. Keras describes a layer in JSON: until 2.4 in the object's own `metadata`, later in
    keras_metadata.pb beside saved_model.pb (tf_keras/protobuf/saved_metadata.proto). JSON is read as data: no
    class is looked up.
    """
    places = dict(_objects_on_paths(tree, graph))
    containers: dict[Path, Container] = {}
    for number, user in graph.users.items():
        module = _module(user) if len(containers) < MAX_MODULES else None
        if module is None:
            continue
        path = places.get(number)
        if path is None:
            edges = tf_saved_model_messages.path_to_object(parents, number)
            path = None if edges is None else tuple(PathStep("attr", edge) for edge in edges)
        if path is not None and path not in tree:
            containers.setdefault(path, module)
    for children in graph.children:
        for name in INPUT_LAYERS & children.keys():
            edges = tf_saved_model_messages.path_to_object(parents, children[name])
            if edges is not None:
                containers.setdefault(tuple(PathStep("attr", edge) for edge in edges), Container("list"))
    return dict(sorted(containers.items(), key=lambda item: len(item[0])))


def _objects_on_paths(tree: Tree, graph: SavedObjects) -> Iterator[tuple[int, Path]]:
    visited: set[Path] = set()
    for path, _ in tree.tensors():
        if path[:-1] not in visited:
            visited.add(path[:-1])
            for depth, number in enumerate(tf_saved_model_messages.follow_path(graph, path[:-1])):
                yield number, path[:depth]


def _module(user: tf_saved_model_messages.SavedUserObject) -> Container | None:
    if not user.identifier.startswith(_KERAS):
        return Container("module", user.registered, {}) if user.registered else None
    metadata = _object(user.metadata)
    name, config = class_name(metadata.get("class_name")), metadata.get("config")
    if name is None:
        return None
    settings = {**config} if isinstance(config, dict) else {}
    settings["name"] = metadata.get("name", settings.get("name"))
    return Container("module", name, plain_facts(settings))


def _object(data: bytes) -> dict[str, Any]:
    try:
        return text.parse_json(data, METADATA)
    except CkpttoolError:
        return {}


def note_damage(error: CkpttoolError) -> str:
    """Return the note on an unreadable keras_metadata.pb."""
    return f"cannot read {METADATA}, so layers are not described: {error.message}"


_EMPTY = "the SavedModel contains no variables; constants are part of its graph"


@dataclass(slots=True)
class _SavedModelLister:
    """Intermediate results while one SavedModel is listed."""

    path: str
    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: CkpttoolError | None = None  # reason for a missing graph
    judged: list[ConfigAudit] = field(default_factory=list)  # audit of Keras configurations
    operations: tuple[CodeReference, ...] = ()  # audit of the graphs
    unjudged: list[str] = field(default_factory=list)

    def inside(self, name: str) -> str:
        return os.path.join(self.path, name)

    def bytes_of(self, name: str) -> memoryview:
        """Read a file of the folder; raise CkpttoolError if it is not a regular file within the limit."""
        path = self.inside(name)
        file = File.stamp(path)
        if not filesystem.isfile(path):
            raise FormatError("it is not a regular file")
        if file.size > limits.current().graph_bytes:
            raise limits.limit_error("graph_bytes", "it is too large", file.size)
        data = file.read(0, file.size)
        self.files.append(file)
        if data.startswith(b"version https://git-lfs"):
            raise FormatError(
                "it is a Git LFS pointer instead of the file itself",
                hint="run git lfs pull to fetch the file",
            )
        return memoryview(data)


@dataclass(slots=True)
class _ListedGraph:
    """One MetaGraph with its decoded parts."""

    meta: MetaGraph
    nodes: tf_saved_model_messages.GraphNodes
    objects: SavedObjects | None


def read(location: str) -> Checkpoint:
    """List the variables of the SavedModel in the folder `location`, with the facts from its graph.

    If a graph is damaged, absent or too large, only its facts are missing, and a note explains why. Damaged
    variables are a FormatError, as in any tensor bundle, and so are variables of the graph that are missing
    from the folder. The folder layout is defined in tensorflow/python/saved_model/constants.py. The graph is
    read as data, never run: it contains the names of the variables, whether they are trained, and the
    signatures that use them.
    """
    folder = _SavedModelLister(location)
    graphs = _graphs(folder)
    bundle = _variables(folder, graphs)
    tree = bundle.tree if bundle is not None else Tree({})
    joined = _AnnotatedTree(folder, tree)
    for graph in graphs:
        joined.add(graph)
    version = next((graph.meta.version for graph in graphs if graph.meta.version), "")
    details = joined.details(graphs)
    details["assets"] = list_assets(
        location, [name for graph in graphs for name in graph.meta.assets], folder.notes
    )
    details["files"] = companion_files(location)
    configurations = merge_audits(folder.judged)
    writer = " ".join(["TensorFlow", *([version] if version else []), "SavedModel"]) if graphs else None
    return Checkpoint(
        location,
        NAME,
        joined.tree,
        (*folder.files, *(bundle.files if bundle is not None else ())),
        writer or (bundle.writer if bundle is not None else None),
        "crc32c" if bundle is not None else "none",
        (*folder.notes, *(bundle.notes if bundle is not None else ())),
        details,
        merge_references(folder.operations, configurations.code_references),
        (*configurations.unjudged, *folder.unjudged),
    )


def _graphs(folder: _SavedModelLister) -> list[_ListedGraph]:
    # Loaders try saved_model.pb first, then saved_model.pbtxt (tensorflow/python/saved_model/loader_impl.py,
    # parse_saved_model; tensorflow/cc/saved_model/reader.cc, ReadSavedModel); builds with a merger of chunks
    # prefer saved_model.cpb. A graph that is not read may contain anything, whichever is loaded.
    if filesystem.lexists(folder.inside(CHUNKED_GRAPH)):
        folder.unjudged.append(f"{CHUNKED_GRAPH}, a graph stored in chunks, is not supported")
    text = filesystem.lexists(folder.inside(TEXT_GRAPH))
    if text:
        beside = filesystem.lexists(folder.inside(GRAPH))
        note = f"; TensorFlow loads {GRAPH} instead" if beside else ""
        folder.unjudged.append(f"{TEXT_GRAPH}, a graph in text form, is not parsed{note}")
    if not filesystem.lexists(folder.inside(GRAPH)):
        folder.notes.append(
            f"the graph is in text form ({TEXT_GRAPH}), which is not parsed: variables are listed, but "
            "not signatures and functions"
            if text
            else f"{GRAPH} is missing: only variables/ is listed"
        )
        _read_keras_metadata(folder, None)
        return []
    meter = FieldMeter()
    try:
        data = folder.bytes_of(GRAPH)
        if not data:
            raise TruncatedError("it is empty")
        _audit_operations(folder, data)
        graphs = [_graph(meta, meter) for meta in tf_saved_model_messages.parse_saved_model(data, meter)]
        if not graphs:
            raise FormatError("it contains no graph")
    except CkpttoolError as error:
        folder.error = error
        reason = str(CkpttoolError(error.message, expected=error.expected, found=error.found))
        hint = f" ({error.hint})" if error.hint else ""
        folder.notes.append(f"cannot read {GRAPH}: {reason}{hint}; only variables/ is listed")
        folder.unjudged.append(f"cannot read {GRAPH}: {reason}")
        _read_keras_metadata(folder, None)
        return []
    _audit_keras(folder, graphs)
    return graphs


def _audit_operations(folder: _SavedModelLister, data: memoryview) -> None:
    # Not a top-level import: other formats' checkpoints are listed without the table of operations.
    from ckpttool.formats import tf_operations

    folder.operations = tf_operations.audit_saved_model(data, GRAPH, folder.path)


def _graph(meta: MetaGraph, meter: FieldMeter) -> _ListedGraph:
    objects = (
        None if meta.objects is None else tf_saved_model_messages.parse_object_graph(meta.objects, meter)
    )
    # If objects list the captures of functions, the nodes add nothing.
    has_children = objects is not None and bool(objects.children)
    graph = (
        tf_saved_model_messages.GraphNodes()
        if meta.nodes is None
        else tf_saved_model_messages.parse_graph_def(meta.nodes, meter, count_only=has_children)
    )
    return _ListedGraph(meta, graph, objects if has_children else None)


def _audit_keras(folder: _SavedModelLister, graphs: list[_ListedGraph]) -> None:
    with_objects = [graph.objects for graph in graphs if graph.objects is not None]
    folder.judged += [audit_object_configs(object_, GRAPH) for object_ in with_objects]
    _read_keras_metadata(folder, with_objects[0] if with_objects else None)


def _read_keras_metadata(folder: _SavedModelLister, objects: SavedObjects | None) -> None:
    """Audit the layer descriptions in keras_metadata.pb, and add them to the graph's objects."""
    if not filesystem.lexists(folder.inside(METADATA)):
        return
    try:
        data = folder.bytes_of(METADATA)
        folder.judged.append(audit_metadata(data, FieldMeter()))
        if objects is not None:
            _add_keras_metadata(objects, data, FieldMeter())
    except CkpttoolError as error:
        folder.notes.append(note_damage(error))
        folder.unjudged.append(f"cannot check {METADATA}: {error.message}")


def _variables(folder: _SavedModelLister, graphs: list[_ListedGraph]) -> Checkpoint | None:
    prefix = folder.inside(VARIABLES)
    if filesystem.lexists(f"{prefix}.index"):
        File.beside(f"{prefix}.index", folder.inside(GRAPH))
        bundle = tf_bundle.read(prefix)
        if not bundle.tree:
            folder.notes.append(_EMPTY if graphs else "variables/ contains no variables")
        return bundle
    declared = sum(_count_variables(graph) for graph in graphs)
    if folder.error is not None:
        raise FormatError(
            f"{folder.error.message.replace('it ', 'the graph ', 1)}, and the SavedModel has no "
            "variables/ to read instead",
            file=folder.inside(GRAPH),
            expected=folder.error.expected,
            found=folder.error.found,
            hint=folder.error.hint,
        ) from folder.error
    if declared:
        raise TruncatedError(
            f"index file missing: the graph has {format_count(declared, 'variable')}",
            file=f"{prefix}.index",
        )
    folder.notes.append(_EMPTY if graphs else "no variables found")
    return None


def _count_variables(graph: _ListedGraph) -> int:
    if graph.objects is not None:
        return len(graph.objects.variables)
    return len(graph.meta.variables)


class _AnnotatedTree:
    """The tree with the graphs' facts about its leaves, and the facts that belong to no leaf."""

    def __init__(self, folder: _SavedModelLister, tree: Tree) -> None:
        self._folder = folder
        self._leaves: dict[Path, Leaf | ValueLeaf] = dict(tree.leaves)
        self._containers: dict[Path, Container] = dict(tree.containers)
        self._known = tree
        self._position = {path: at for at, path in enumerate(tree)}
        self._details = GraphDetails()

    @property
    def tree(self) -> Tree:
        """The tree as far as it is known."""
        return Tree(self._leaves, self._known.aliases, self._containers)

    def details(self, graphs: list[_ListedGraph]) -> dict[str, Any]:
        """Return the facts as JSON values; add a note if some were omitted."""
        document = self._details.document([graph.meta for graph in graphs])
        if graphs:
            document["graph"] = {
                "nodes": sum(graph.nodes.count for graph in graphs),
                "functions": sum(graph.nodes.functions for graph in graphs),
            }
        if self._details.left_out:
            self._folder.notes.append(f"incomplete graph details: {self._details.left_out:,} entries omitted")
        return document

    def add(self, graph: _ListedGraph) -> None:
        """Add the facts from one graph."""
        if graph.objects is None:
            facts = facts_by_nodes(self._known, graph.meta, graph.nodes)
        else:
            facts = facts_by_objects(self._known, graph.objects)
            self._objects(graph.objects, facts)
        self._folder.notes += facts.notes
        for path, fact in facts.variables.items():
            leaf = self._leaves[path]
            if isinstance(leaf, Leaf):
                self._leaves[path] = _annotate_leaf(leaf, fact)
        names = self._known.names
        self._details.initializers |= {names[path]: op for path, op in facts.initializers.items()}
        for name, signature in graph.meta.signatures.items():
            used = self._named(facts.signatures.get(name, ()))
            self._details.signature(name, signature, used, graph.meta.tags)

    def _named(self, paths: Iterable[Path]) -> list[str]:
        """Return the display paths in tree order."""
        return [self._known.names[path] for path in sorted(paths, key=self._position.__getitem__)]

    def _objects(self, graph: SavedObjects, facts: GraphFacts) -> None:
        parents = tf_saved_model_messages.parent_edges(graph)
        for name, holder, used in iter_functions(graph, facts.numbers):
            edges = tf_saved_model_messages.path_to_object(parents, holder) if holder is not None else None
            shown = None if edges is None else "/".join(edges)
            self._details.function(name, shown, self._named(used))
        self._details.kinds(graph.kinds)
        self._containers |= module_containers(self._known, graph, parents)


def _annotate_leaf(leaf: Leaf, fact: VariableFact) -> Leaf:
    untrained = fact.trainable is False and leaf.role == "parameter"
    return replace(
        leaf,
        trainable=leaf.trainable if fact.trainable is None else fact.trainable,
        name=fact.name or leaf.name,
        role="buffer" if untrained else leaf.role,
    )
