"""What the datasets of Keras's files mean: the tree of a model and its optimizer, whoever wrote it.

Three layouts: `h5` (Keras 1 and 2: attributes name layers and weights), `weights.h5` (Keras 3: groups of
numbered variables), and `datasets` (an h5 file of something else). A model's configuration, if the file has
one, is read as data; no class that it names is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.errors import CkpttoolError, FormatError
from ckpttool.formats import hdf5
from ckpttool.formats.hdf5 import Index
from ckpttool.formats.keras_tree import asking, counted, legacy, modules, optimizers, pairs
from ckpttool.formats.keras_tree.config import NOTHING, Config, config_of, lambdas, parse, with_flattened
from ckpttool.formats.keras_tree.flow import annotated, with_calls
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.source import File
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire import zip as zip_archive
from ckpttool.wire.asked import Asked

OPTIMIZER: Path = (attr("optimizer"),)


@dataclass(frozen=True, slots=True)
class Model:
    """A listed model: its tree, what a person should know, and the facts that only Keras has."""

    tree: Tree
    notes: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    asks: tuple[Asked, ...] = ()
    unjudged: tuple[str, ...] = ()


def model(index: Index, config: Config = NOTHING, optimizer: Config = NOTHING) -> Model:
    """Return the model that the datasets hold; `config` and `optimizer` are what is known of it beside them.

    Raise FormatError when attributes name weights that are not there.
    """
    found = asking.attributes(index)
    return replace(_model(index, config, optimizer), asks=found.asks, unjudged=found.unjudged)


def _model(index: Index, config: Config, optimizer: Config) -> Model:
    if legacy.is_legacy(index):
        return _legacy(index)
    if modules.is_modules(index):
        return _modules(index, config, optimizer)
    leaves = {tuple(map(attr, d.path.split("/"))): modules.leaf(d) for d in index.datasets.values()}
    return Model(Tree(leaves, _aliases(index, leaves)), index.notes, {"layout": "datasets"})


def _modules(index: Index, config: Config, optimizer: Config) -> Model:
    root, strays = modules.nodes(index)
    walk = modules.Walk(with_calls(annotated(with_flattened(config))), root)
    leaves = dict(walk.leaves)
    containers = dict(walk.containers)
    notes = list(index.notes)
    for dataset in strays:
        path = tuple(map(attr, dataset.path.split("/")))
        leaves[path] = modules.leaf(dataset)
    found = optimizer
    owners = {leaf.key: (path, leaf.shape) for path, leaf in walk.leaves.items()} if walk.optimizers else {}
    for node, at in walk.optimizers:
        mine = node.group == "optimizer"
        inner = at[-1].value == optimizers.INNER
        known = config_of(optimizer.settings.get(optimizers.INNER)) if inner else optimizer
        told = known if (mine or inner) and known.cls else Config(optimizers.class_of(node.name), {})
        slots = optimizers.listed_leaves(node.variables, at, node.slots, owners)
        complete = slots is not None
        if slots is None:
            of = pairs.network(at[:-1] if inner else at, walk)
            slots, complete = optimizers.leaves(node.variables, at, told, pairs.trained(node, told, of, walk))
        leaves |= slots
        facts = {"group": node.group} | ({"layer": node.name} if node.name is not None else {})
        containers[at] = Container("module", told.cls, told.facts() | facts)
        found = told if mine else found
        if not complete:
            notes.append(f"{node.group}: the file does not say which variable each of its slots belongs to")
    keys = {leaf.key for leaf in leaves.values()}
    for dataset in index.datasets.values():
        if dataset.path not in keys:
            leaves[tuple(map(attr, dataset.path.split("/")))] = modules.leaf(dataset, "other")
    if walk.unnamed:
        notes.append(f"variables that the file numbers and does not name: {walk.unnamed:,}")
    details = {"layout": "weights.h5", "model": config.cls, "name": root.name or config.name}
    return Model(
        Tree(leaves, _aliases(index, leaves), containers),
        (*notes, *lambdas(config)),
        {**details, "optimizer": found.cls},
    )


def _legacy(index: Index) -> Model:
    top = index.groups[""].attributes
    about = index.groups[legacy.top(index)].attributes
    text, training = top.get("model_config"), top.get("training_config")
    found, notes = parse(text if isinstance(text, str) else None, "model_config")
    trained, more = parse(training if isinstance(training, str) else None, "training_config")
    config, optimizer = (
        with_calls(annotated(with_flattened(config_of(found)))),
        optimizers.told(trained.get("optimizer_config")),
    )
    leaves, containers, owners = _weights(index, config)
    saved = legacy.optimizer(index)
    trains = [
        optimizers.Trained(path, leaf.shape)
        for path, leaf in leaves.items()
        if leaf.role == "parameter" and leaf.trainable is not False
    ]
    state, complete = counted.leaves(saved, OPTIMIZER, optimizer, trains), True
    if state is None:
        state, complete = optimizers.named_leaves(saved, OPTIMIZER, optimizer, owners)
    if state:
        containers[OPTIMIZER] = Container("module", optimizer.cls, optimizer.facts())
    named = {leaf.key for leaf in (*leaves.values(), *state.values())}
    strays = [d for d in index.datasets.values() if d.path not in named]
    for dataset in strays:
        leaves[tuple(map(attr, dataset.path.split("/")))] = modules.leaf(dataset, "other")
    leaves |= state
    odd = [name for name in ("model_config", "training_config") if name in top and top[name] is None]
    notes = (*index.notes, *notes, *more, *lambdas(config))
    notes = (*notes, *(f"attribute {name} is not a text: nothing is said about layers" for name in odd))
    if strays:
        notes = (*notes, f"datasets that no attribute names: {len(strays):,}")
    if not complete:
        notes = (*notes, "optimizer: the file does not say which variable each of its slots belongs to")
    details = {"layout": "h5", "model": config.cls, "name": config.name, "optimizer": optimizer.cls}
    versions = {key: about.get(key) or top.get(key) for key in ("keras_version", "backend")}
    tree = Tree(leaves, _aliases(index, leaves), containers)
    return Model(tree, notes, {**details, **versions})


def _weights(index: Index, config: Config) -> tuple[dict[Path, Leaf], dict[Path, Container], dict[str, Path]]:
    leaves: dict[Path, Leaf] = {}
    containers: dict[Path, Container] = {}
    owners: dict[str, Path | None] = {}
    weights = list(legacy.weights(index))
    siblings: dict[str, set[str]] = {}
    for weight in weights:
        siblings.setdefault(weight.layer, set()).add(weight.name)
    settings = legacy.Settings(config)
    for weight in weights:
        path = legacy.path_of(weight, siblings[weight.layer])
        if path in leaves:
            path = tuple(map(attr, weight.dataset.path.split("/")))
        if path in leaves:
            raise FormatError(f"weight {weight.name[:200]} is named twice")
        trainable = None
        for at, layer in settings.down_to(path):
            trainable = False if layer.trainable is False else trainable if trainable is False else True
            if at not in containers:
                containers[at] = Container("module", layer.cls, layer.facts())
        role = legacy.role_of(path)
        one = modules.leaf(weight.dataset, role, trainable if role == "parameter" else False)
        leaves[path] = Leaf(
            one.dtype, one.shape, one.source, one.key, one.role, trainable=one.trainable, name=weight.name
        )
        name = weight.name.removesuffix(":0")
        owners[name] = None if name in owners else path
    return leaves, containers, {name: path for name, path in owners.items() if path is not None}


def _aliases(index: Index, leaves: Mapping[Path, Leaf]) -> dict[Path, tuple[Alias, ...]]:
    by_key = {leaf.key: path for path, leaf in leaves.items()}
    found: dict[Path, tuple[Alias, ...]] = {}
    for name, first in index.same.items():
        path = by_key.get(first)
        if path is not None:
            alias = Alias(tuple(map(attr, name.split("/"))), name)
            found[path] = (*found.get(path, ()), alias)
    return found


def named(file: str, make: Callable[[], Model]) -> Model:
    """Return what `make` returns; an error of its gets the file's name."""
    try:
        return make()
    except CkpttoolError as error:
        raise error.located(file=file) from error.__cause__


def config_document(format_: str, location: str) -> dict[str, Any] | None:
    """Return the configuration that a .keras archive or a legacy .h5 model holds, None without one.

    Unlike the tree it lists layers without weights, and how a functional model joins its layers.
    """
    if format_ == "keras_zip":
        archive = zip_archive.read(File.stamp(location))
        if "config.json" not in archive.members:
            return None
        text: object = bytes(archive.source("config.json").read())
    elif format_ == "keras_h5" and not location.endswith(".json"):
        text = hdf5.index(hdf5.whole(File.stamp(location))).groups[""].attributes.get("model_config")
    else:
        return None
    return parse(text, "the configuration")[0] or None if isinstance(text, str | bytes) else None
