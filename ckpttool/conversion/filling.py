"""Load a checkpoint into a user's model."""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import numpy as np

from ckpttool.conversion import layer_options, parts, targets
from ckpttool.conversion.filling_by_outputs import Choice, FillTrials, TrialSource, decide_by_outputs
from ckpttool.conversion.general import describe_sources, read_state_dicts
from ckpttool.conversion.ledger import ModelLedger, account_for_tensors
from ckpttool.conversion.option_keywords import takes_options
from ckpttool.conversion.options import ModelFileOptions
from ckpttool.conversion.parts import without_copies
from ckpttool.conversion.plan import report_moves
from ckpttool.conversion.preparation import NO_PREPARATION, PreparationOptions, PreparedTree, prepare_tree
from ckpttool.conversion.targets import TARGETS, TargetKind
from ckpttool.core import deferred, sidecar
from ckpttool.core.activations import CallPlace, FeaturePart, WeightUse, parse_order
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import is_widening, numpy_code
from ckpttool.core.errors import CkpttoolError, MappingError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.kinds import LAYER_TYPES, list_kinds
from ckpttool.core.sidecar import LedgerEntries, OmittedTensor, Sidecar
from ckpttool.core.source import Buffer, KeptSource, Shape, Span
from ckpttool.core.text import compile_glob, describe_record, format_count, render_record
from ckpttool.core.tree import Container, Leaf, Path, Role, Tree, ValueLeaf, attr, display
from ckpttool.evaluation import evidence, restore
from ckpttool.formats import onnx
from ckpttool.formats.detect import ensure_open, open_checkpoint
from ckpttool.formats.probe import format_framework
from ckpttool.graphs.graph import Graph, read_graph
from ckpttool.graphs.interpreter import evaluate
from ckpttool.graphs.weights import extract_module
from ckpttool.libraries import onnx_policies, tf_names
from ckpttool.libraries.activation_orders import annotate_orders, with_orders
from ckpttool.libraries.optimizer_settings import sidecar_settings
from ckpttool.libraries.optimizer_states import (
    ConvertedOptimizers,
    OptimizerSettings,
    build_torch_state,
    convert_optimizers,
    stage_keras_optimizer,
)
from ckpttool.libraries.recognize import KERAS_FORMATS, SAVER_FORMATS, recognize_checkpoint
from ckpttool.libraries.schema import RUN
from ckpttool.mapping import fill_model, orientation
from ckpttool.mapping.fill_model import (
    NO_SOURCE_LAYER,
    STATES,
    FillSource,
    MatchOptions,
    ModelModule,
    Skeleton,
)
from ckpttool.mapping.flattening import list_open_orders
from ckpttool.mapping.layer_kinds import LayerOption
from ckpttool.mapping.layers import DENSE_OUT_IN, LINEAR_IN_OUT, OWN_CALL, ModuleInfo, find_layers
from ckpttool.mapping.rules import MappingReport, MoveList, canonical_tree
from ckpttool.mapping.solver import Ambiguity, FillResult, LayerMatch, Misfit
from ckpttool.networks import live_trees, model_child
from ckpttool.networks.live import assign
from ckpttool.networks.live_trees import LiveSource, dtype_and_shape
from ckpttool.networks.messages import Requests
from ckpttool.networks.tracing import probe_module
from ckpttool.networks.worker import ModelProcess, ModelSpec, as_model_spec
from ckpttool.verification.proof import (
    LiveHost,
    ModelMismatchError,
    ModelProof,
    ProofRequest,
    common_rounding,
    preserve_state,
    prove_live,
)
from ckpttool.verification.sides import ModelHost

if TYPE_CHECKING:
    from ckpttool.networks.model_runner import ModelRequests

# The `--to` targets that a framework loads into its own model.
FORMS = ("torch", "tf", "keras")
WEIGHTS = ".weights.h5"
_FRAMEWORKS = {"torch": "torch", "keras": "tensorflow", "tensorflow": "tensorflow"}


def choose_model_form(kind: TargetKind) -> str:
    """Return the form in which a model loads a target of the kind; raise UsageError without one."""
    form = next((form for form in FORMS if TARGETS[form] == kind), None)
    if form is None:
        words = ", ".join(FORMS)
        raise UsageError(
            f"--like writes only formats that a framework's own model can load: {words}",
            found=kind.format,
            hint="choose a target such as model.pt, or convert without --like",
        )
    return form


class TargetModel:
    """The model that a `Like` names, in a separate process; a context manager that ends it and cleans up."""

    def __init__(self, spec: ModelSpec, form: str | None = None, target: str | None = None) -> None:
        self._spec, self._form, self._target = spec, form or "", target
        self._built: Mapping[str, Any] = {}
        self.process = ModelProcess("model's process", spec.python)
        self._ask = cast("ModelRequests", Requests(self.process.request))
        self._folder = tempfile.TemporaryDirectory(prefix="ckpttool-")
        # Of the tensors in the description of the model.
        self._keys: Mapping[Path, str | int] = {}
        self.shapes, self.tensors = spec.shapes, dict[Path, Any]()
        # The model's own numbers, before anything else is put into it; None until they are needed.
        self._own: Tree | None = None
        self._filled = False

    def __enter__(self) -> TargetModel:
        self.process.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.__exit__(kind, error, trace)
        self._folder.cleanup()

    def skeleton(self, guessed: Sequence[Shape], _: str | None = None) -> Skeleton:
        """Build the model and return its skeleton; `guessed` are the input shapes if none are given.

        Raise UsageError when there is no such model or it cannot load this form, MappingError when the
        form does not contain all of its weights.
        """
        built = self._build()
        framework = str(built["framework"])
        self._form = self._form or str(built["forms"][-1])
        if self._form not in built["forms"]:
            raise UsageError(
                f"{self._spec.factory} creates a {framework} model, which cannot load {self._form}",
                hint=targets.suggest_targets(self._target, built["forms"]),
            )
        shapes, guesses = ([*map(list, shapes)] for shapes in (self._spec.shapes, guessed))
        modules = self._ask.describe(shapes=shapes, guessed=guesses)["modules"]
        outline = self._ask.outline(file=os.path.join(self._folder.name, "first"), form=self._form)
        tree = open_checkpoint(outline["file"]).tree
        if not outline["whole"]:
            own = {path: replace(leaf, source=_OwnNumbers(self, path)) for path, leaf in tree.tensors()}
            tree = tree.with_leaves({**tree.leaves, **own})
        if self._form == "keras" and all("vars/" not in leaf.key for _, leaf in tree.tensors()):
            raise UnsupportedError(
                "the model's Keras version is too old for .weights.h5 files",
                hint=targets.suggest_targets(self._target, ["tf"]),
            )
        places: dict[str | int, Path]
        if self._ask.number()["done"]:
            places = dict(_numbered_weights(tree, open_checkpoint(self._save("second")).tree))
        else:
            places = _key_places(tree)
        self._require_all(modules, places)
        self._keys = {path: key for key, path in places.items()}
        return build_model_skeleton(tree, modules, places, framework)

    @property
    def title(self) -> str:
        """The model's name in reports: its factory."""
        return self._spec.factory

    def inputs(self) -> tuple[Shape, ...]:
        """Return the shapes of the inputs that the model itself states, () if it does not state them all."""
        self._build()
        rows = self._ask.open(kind="factory")["inputs"]
        return known_shapes(rows)

    def source_inputs(self) -> tuple[Shape, ...]:
        """Return the shapes of the inputs, with channels last."""
        torch = self._build()["framework"] == "torch"
        return with_last_channels(self._spec.shapes or self.inputs(), torch=torch)

    def own_numbers(self) -> Tree:
        """Return the model as it was built; MappingError once it has other numbers."""
        if self._own is None:
            if self._filled:
                raise MappingError("the model's own values were needed after it was filled")
            self._own = open_checkpoint(self._save("own")).tree
        return self._own

    @contextlib.contextmanager
    def running(self) -> Iterator[ModelHost]:
        """Yield what calls the model."""
        self.own_numbers()  # a call may change them
        yield self.process

    def assign(self, filling: FillResult, _: Skeleton) -> Callable[[], None]:
        """Put the values of a filling into the model, which loads a file before it is compared."""
        self.own_numbers()
        self._filled = True
        folder, keys = self.process.folder, list[str | int]()
        for path, leaf in filling.tree.tensors():
            if path in self._keys and leaf.dtype != "string":
                array = leaf.array()
                # NumPy writes only its own types.
                array = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
                np.save(folder / f"value-{len(keys)}.npy", array, allow_pickle=False)
                keys.append(self._keys[path])
        self._ask.put(keys=keys)
        return lambda: None

    def _build(self) -> Mapping[str, Any]:
        factory, arguments = self._spec.factory, self._spec.arguments
        self._built = self._built or self._ask.build(factory=factory, arguments=arguments)
        return self._built

    def _save(self, name: str) -> str:
        """Have the framework save the model; return the path to open."""
        file = os.path.join(self._folder.name, name)
        return str(self._ask.save(file=file, form=self._form)["file"])

    def prove(self, written: Checkpoint, moved: ConvertedOptimizers) -> None:
        """Load the output into the model and its optimizers strictly, compare every tensor.

        Raise WorkerError if one of them does not load it, MappingError if values differ afterwards.
        """
        file, optimizers = self.staged(written), list(moved.documents)
        self._filled = True
        self._ask.load(file=file, form=self._form, optimizers=optimizers)
        cut, parts, others = len(moved.prefix), dict[str | int, Path](), dict[Path, Leaf]()
        rows: list[tuple[str | int, str, int, int]] = []
        for location, leaf in written.tree.tensors():
            if leaf.role == "counter" or display(location[:1]) in moved.names:
                continue  # TensorFlow counts its saves; the model itself has no optimizer
            key = self._keys.get(location[cut:])
            source = leaf.source.base if isinstance(leaf.source, KeptSource) else leaf.source
            if key is not None and isinstance(source, Span) and numpy_code(leaf.dtype):
                parts[key] = location
                rows.append((key, source.file.path, source.offset, source.length))
            else:
                others[location] = leaf
        differing = [parts[key] for key in self._ask.differing(parts=rows)["keys"]]
        # What no weight identifies, e.g. the state of a random generator, is compared in a file of the model.
        stored = dict(open_checkpoint(self._save("again")).tree.tensors()) if others else {}
        differing += (
            location
            for location, leaf in others.items()
            if location[cut:] not in stored or bytes(leaf.read()) != bytes(stored[location[cut:]].read())
        )
        if differing:
            name = written.tree.names[differing[0]]
            raise MappingError("the model's values differ from the written ones", path=name)

    def staged(self, written: Checkpoint) -> str:
        """Return the path from which the framework loads a file that has no final name yet."""
        file = os.path.abspath(written.path)
        if self._form != "keras":
            return file
        # Keras uses the suffix, which a file gets only with its final name.
        link = os.path.join(self._folder.name, f"written{WEIGHTS}")
        if not os.path.lexists(link):
            os.symlink(file, link)
        return link

    def _require_all(self, modules: Sequence[Mapping[str, Any]], places: Mapping[str | int, Path]) -> None:
        lost = [
            "/".join((*module["path"], name))
            for module in modules
            for name, number in module["tensors"]
            if number not in places
        ]
        if lost:
            raise MappingError(
                f"{self._form} cannot store {len(lost)} of the model's weights",
                path=abbreviate_list(lost, 3),
                hint="--to keras" if self._form == "tf" else None,
            )


class _OwnNumbers(NamedTuple):
    """A tensor of the model as it was built, which its process writes only if it is read."""

    model: TargetModel
    path: Path

    def read(self) -> Buffer:
        """Return the bytes; MappingError once the model has other numbers."""
        leaf = self.model.own_numbers()[self.path]
        assert isinstance(leaf, Leaf)  # noqa: S101 - the same model has the same tensors
        return leaf.read()


def _key_places(tree: Tree) -> dict[str | int, Path]:
    """Return the paths of tensors by the keys of a state_dict, those of tied tensors included."""
    places: dict[str | int, Path] = {leaf.key: path for path, leaf in tree.tensors()}
    return places | {a.key: path for path, others in tree.aliases.items() for a in others if a.key}


def _numbered_weights(first: Tree, second: Tree) -> Iterator[tuple[int, Path]]:
    """Yield the weights by number: every element of a tensor has its weight's number plus one as bits.

    A tensor that did not change belongs to no weight: the state of a random generator.
    """
    for path, leaf in second.tensors():
        before = first.get(path)
        data = bytes(leaf.read())
        width = len(data) // leaf.size if leaf.size else 0
        if not width or before is None or leaf.role in ("counter", "slot"):
            continue
        number = int.from_bytes(data[:width], "little")
        if data == data[:width] * leaf.size and number:
            yield number - 1, path


def known_shapes(rows: Iterable[Mapping[str, Any]]) -> tuple[Shape, ...]:
    """Return the shapes of a model's inputs, () if an extent is open."""
    shapes = tuple(tuple(row["shape"] or ()) for row in rows)
    return shapes if all(shape and None not in shape for shape in shapes) else ()


def with_last_channels(shapes: Iterable[Shape], *, torch: bool) -> tuple[Shape, ...]:
    """Return input shapes with the channels of images last, where PyTorch has them first."""
    return tuple((*shape[1:], shape[0]) if torch and len(shape) > 2 else tuple(shape) for shape in shapes)


def build_model_skeleton(
    tree: Tree, modules: Sequence[Mapping[str, Any]], places: Mapping[str | int, Path], framework: str
) -> Skeleton:
    """Return the skeleton of a model of a framework (torch, keras, tensorflow).

    `modules` are as networks.model_child describes them, `places` maps the tensors that they name to
    their paths in `tree`.
    """
    parts = [_part(module, places, framework) for module in modules]
    order = {path: number for number, path in places.items() if isinstance(number, int)}
    order = order or {path: number for number, (path, _) in enumerate(tree.tensors())}
    weights = "model.variables" if framework == "tensorflow" else "model.weights"
    return Skeleton(_FRAMEWORKS[framework], tree, parts, order, weights)


def _part(module: Mapping[str, Any], places: Mapping[str | int, Path], framework: str) -> ModelModule:
    names = module.get("names", {})
    tensors = {names.get(name, name): places[number] for name, number in module["tensors"]}
    orders = {side: parse_order(order) for side, order in module.get("orders", {}).items()}
    cls, settings = _class_of(module, framework)
    call = CallPlace(
        int(module.get("call", -1)), *(int(module.get(name, "0"), 16) for name in ("after", "leads"))
    )
    parts = tuple(FeaturePart(*part) for part in module.get("parts", ()))
    return ModelModule(
        tuple(module["path"]), cls, settings, tensors, orders, call, parts, cut=bool(module.get("cut"))
    )


# The framework class of a dense layer whose matrix has this form.
_DENSE = {
    ("torch", "out_in"): "Linear",
    ("torch", "in_out"): LINEAR_IN_OUT,
    ("keras", "in_out"): "Dense",
    ("keras", "out_in"): DENSE_OUT_IN,
    ("tensorflow", "out_in"): DENSE_OUT_IN,
}
_OWN_CLASS = {"torch": "Module", "keras": "Layer", "tensorflow": "Module"}


def _class_of(module: Mapping[str, Any], framework: str) -> tuple[str, Mapping[str, Any]]:
    """Return a module's class and settings; by its computation if its own class defines the call."""
    own, computes = module.get("own"), module.get("computes")
    if not own:
        return module["class"], module["settings"]
    settings = {**module["settings"], OWN_CALL: own}
    if computes is None:
        return module["class"], settings
    kind = computes.get("kind")
    cls = _DENSE.get((framework, computes.get("form", ""))) if kind == "dense" else None
    if kind in LAYER_TYPES and kind != "dense":
        cls = next(iter(getattr(LAYER_TYPES[kind], framework, ())), None)
    if "epsilon" in computes:
        settings["epsilon" if framework == "keras" else "eps"] = computes["epsilon"]
    # It computes something else than these classes, or it is unknown.
    return cls or _OWN_CLASS[framework], {**settings, OWN_CALL: ""}


class LiveModel:
    """A torch.nn.Module, tf.Module, Keras model or layer; `shapes` are input shapes without the batch."""

    def __init__(self, model: Any, shapes: Sequence[Shape] = ()) -> None:
        """Store the model; raise UsageError if it is not one."""
        self.model, self.framework = model, model_child.require_model(model, "not a model")
        self.runner = model_child.wrap_model(model)
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.tensors: dict[Path, Any] = {}

    @property
    def title(self) -> str:
        """The model's name in reports: its class."""
        return f"a live {type(self.model).__name__}"

    def source_inputs(self) -> tuple[Shape, ...]:
        """Return the shapes of the inputs, with channels last."""
        stated = self.shapes or known_shapes(self.runner.inputs())
        return with_last_channels(stated, torch=self.framework == "torch")

    def skeleton(self, guessed: Sequence[Shape] = (), source: str | None = None) -> Skeleton:
        """Return the skeleton, with present values in its tree; afterwards `tensors` contains what it names.

        The model is called once, with zeros, if it has no weights before (`guessed` is its input shape
        then, if none was given), if shapes were given, or, for Keras, if `source` is another framework:
        only a call shows how it orders flattened values. Raise UsageError when it cannot be called, has no
        tensors, or still has some without a shape.
        """
        called: Mapping[int, Mapping[str, Any]] = {}
        # For other frameworks than Keras, `build` itself calls only models without weights.
        built = self.framework == "keras" and bool(self.model.weights) and getattr(self.model, "built", True)
        foreign = source not in (None, _FRAMEWORKS[self.framework])
        if foreign or self.shapes or not built:
            with preserve_state(self.model):
                called = self.runner.build([*map(list, self.shapes)], [*map(list, guessed)])
        modules = self.runner.describe(called)
        tree, places = self._torch() if self.framework == "torch" else self._numbered(modules)
        for path, leaf in tree.plain():
            if leaf.role == "other":
                raise _shapeless(tree.names[path])
        if not self.tensors:
            raise UsageError("the model has no tensors to fill", found=type(self.model).__name__)
        return build_model_skeleton(tree, modules, places, self.framework)

    @contextlib.contextmanager
    def running(self) -> Iterator[ModelHost]:
        """Yield what calls the model, whose state is restored; raise UnsupportedError except on the CPU."""
        if self.framework == "torch" and any(param.device.type != "cpu" for param in self.model.parameters()):
            raise UnsupportedError("the model is not on the CPU")
        with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder, preserve_state(self.model):
            yield LiveHost(pathlib.Path(folder), self.model)

    def assign(self, filling: FillResult, skeleton: Skeleton) -> Callable[[], None]:
        """Put the values of a filling into the model; return what restores the former ones."""
        kept, names = {*skeleton.named()[1].values()} - {*filling.unfilled}, skeleton.tree.names
        leaves = ((path, leaf) for path, leaf in filling.tree.tensors() if path in kept)
        return assign([(names[path], self.tensors[path], leaf) for path, leaf in leaves])

    def _torch(self) -> tuple[Tree, dict[str | int, Path]]:
        tree = live_trees.state_dict(self.model)
        for path, leaf in tree.tensors():
            assert isinstance(leaf.source, LiveSource)  # noqa: S101 - what live.state_dict makes
            self.tensors[path] = leaf.source.tensor
        return tree, _key_places(tree)

    def _numbered(self, modules: Sequence[Mapping[str, Any]]) -> tuple[Tree, dict[str | int, Path]]:
        """Return TensorFlow's or Keras's variables by the modules that hold them, others by their names."""
        places: dict[str | int, Path] = {}
        for module in modules:
            for name, number in module["tensors"]:
                places.setdefault(number, tuple(map(attr, (*module["path"], name))))
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        for number, variable in enumerate(self.runner.variables()):
            own = live_trees.variable_name(variable) or f"variable {number}"
            path = places.setdefault(number, (attr(own),))
            form = dtype_and_shape(variable)
            if form is None:
                raise _shapeless(own)
            trained = bool(getattr(variable, "trainable", False))
            role: Role = "parameter" if trained else "buffer"
            leaves[path] = Leaf(*form, LiveSource(variable), own, role, trainable=trained, name=own)
            self.tensors[path] = variable
        return Tree(leaves), places


def _shapeless(name: str) -> UsageError:
    return UsageError(
        "the model has tensors without a shape before its first call",
        path=name,
        hint="call it once, or pass the shapes of its inputs",
    )


# Formats that store tensors alphabetically, regardless of the program's order.
_SORTED = frozenset(("npz", "safetensors", "sharded", "tensorflow_v1"))
# The canonical agent has dense kernels [in, out] and names that mappings recognise as TensorFlow's.
_CANONICAL = "tensorflow"
_SHOWN = 3
_NORMS = ("layer_norm", "rms_norm")
_OF_VECTORS = list_kinds("dense", "batch_norm", "norm", "activation") - {"layer_norm_images"}
_BY = {
    "order": "in order",
    "numbers": "by numbers",
    "calls": "by calls",
    "words": "by words",
    "outputs": "by outputs",
    "only fit": "as the only fit",
}
_COUNTED = {**_BY, "given": "as given"}


class ModelSource(NamedTuple):
    """The source of a model's values: the prepared tree, its framework and how reliable its order is.

    `agent` is true for the networks of a recognised agent by canonical names. `shapes` are those of the
    inputs of the source's own model, with channels last, () unless all are known.
    """

    ready: PreparedTree
    fills: FillSource
    agent: bool = False
    shapes: tuple[Shape, ...] = ()

    @property
    def tree(self) -> Tree:
        """The prepared tree."""
        return self.fills.tree

    @property
    def framework(self) -> str:
        """The framework whose naming the tree uses."""
        return self.fills.framework

    def model_spec(self, like: ModelSpec | str | None) -> ModelSpec | None:
        """Return the code of the source's model, with the shapes of its inputs."""
        model = None if like is None else as_model_spec(like)
        if model is not None and self.framework == "tensorflow":
            return replace(model, shapes=model.shapes or self.shapes)
        return model

    def guessed(self) -> tuple[Shape, ...]:
        """Return input shapes from the source's model, a configuration, or a dense first layer."""
        if self.shapes:
            return self.shapes
        layers = find_layers(self.tree, self.framework)
        kinds = [{kind.name for kind in layer.kinds} for layer in layers]
        # The first layer that a file lists need not be the one that is called first.
        if kinds[:1] != [{"dense"}] or any(not names <= _OF_VECTORS for names in kinds):
            return ()
        kind = layers[0].kinds[0]
        group = layers[0].group(self.tree)
        row = next(row for row in kind.read(group).rows if row.canonical == "kernel")
        shape = getattr(row.rule.leaf(group[row.stored]), "shape", ())
        return ((shape[0],),) if shape else ()


def model_source(
    checkpoint: Checkpoint,
    part: str | None,
    options: PreparationOptions = NO_PREPARATION,
    known: Sidecar | None = None,
    source: str | None = None,
    shapes: Sequence[Shape] = (),
) -> ModelSource:
    """Return the checkpoint, or a part of it, with its own names.

    Raise UsageError where nothing is under the path, or names cannot be restored, MappingError where the
    orientation is ambiguous.

    Args:
        checkpoint: what fills the model.
        part: the path below which its tensors lie; None for all.
        options: which names and weights are changed before the mapping.
        known: the checkpoint's sidecar.
        source: the stated orientation of its arrays, "torch" or "tf".
        shapes: shapes of the inputs of the filled model, without the batch.
    """
    if checkpoint.format == onnx.NAME:
        checkpoint = onnx_policies.read_as_state_dict(checkpoint)
    else:
        tree = with_orders(checkpoint.tree, checkpoint, shapes)
        checkpoint = replace(checkpoint, tree=_with_own_norms(tree, checkpoint))
    tree, lost = (checkpoint.tree, ()) if part is None else parts.select_part(checkpoint.tree, part)
    restore.require_shards(tree)
    ready, described = _as_saved(prepare_tree(checkpoint.tree, tree, part, options, known))
    ready = ready._replace(lost=(*lost, *ready.lost))
    framework = _detect_framework(checkpoint, ready.tree, source)
    try:
        rows = orientation.group_unnamed_arrays(ready.tree, framework, stated=source is not None)
    except MappingError as error:
        raise error.located(file=checkpoint.path) from None
    if rows.tree is ready.tree:
        in_order = _lists_in_order(checkpoint, ready.tree, framework)
        # A graph numbers the layers of a scope in call order.
        by_graph = checkpoint.format in SAVER_FORMATS and tf_names.has_named_variables(ready.tree)
        fills = FillSource(ready.tree, framework, in_order, by_graph, described)
        return ModelSource(ready, fills, shapes=_recorded_shapes(checkpoint))
    names = {name: ready.names[path] for name, path in rows.sources.items()}
    rules = {name: ready.rules[path] for name, path in rows.sources.items() if path in ready.rules}
    rules |= {target: rule.name for target, rule in rows.rules.items()}
    ready = ready._replace(tree=rows.tree, names=names, rules=rules, notes=(*ready.notes, *rows.assumed))
    return ModelSource(ready, FillSource(ready.tree, framework))


def _recorded_shapes(checkpoint: Checkpoint) -> tuple[Shape, ...]:
    """Return the shapes of a Keras model's inputs without the batch, () unless all are recorded."""
    if checkpoint.format not in KERAS_FORMATS:
        return ()
    with contextlib.suppress(CkpttoolError):
        graph = read_graph(checkpoint)
        shapes = [(value.shape or ("",))[1:] for value in graph.inputs] if graph is not None else []
        fixed = [tuple(extent for extent in shape if isinstance(extent, int)) for shape in shapes]
        if all(shape and len(known) == len(shape) for shape, known in zip(shapes, fixed, strict=True)):
            return tuple(fixed)
    return ()


_FRAMEWORK_CLASS = "__torch__.torch."
# The last one is an image, whose channels PyTorch has first.
_PROBED_SHAPES = ((4,), (3, 2), (3, 2, 2))


def _with_own_norms(tree: Tree, checkpoint: Checkpoint) -> Tree:
    """Return the tree with the norms that modules of a program's own classes compute.

    The nodes of such a module in the file's graph are evaluated for generated numbers.
    """
    modules: dict[Path, dict[Path, Leaf]] = {}
    for path, leaf in tree.tensors():
        modules.setdefault(path[:-1], {})[path] = leaf
    vectors = {
        owner: tensors
        for owner, tensors in modules.items()
        if _is_own_class(checkpoint.tree.containers.get(owner))
        and all(len(leaf.shape) == 1 for leaf in tensors.values())
    }
    try:
        graph = read_graph(checkpoint) if vectors else None
    except CkpttoolError:
        graph = None
    if graph is None:
        return tree
    leaves = dict(tree.items())
    for owner, tensors in vectors.items():
        computed = _probe_nodes(graph, owner, {str(path[-1].value): leaf for path, leaf in tensors.items()})
        if computed.get("kind") in _NORMS:
            facts = {"role": computed["kind"], "settings": {"epsilon": computed["epsilon"]}}
            for path, leaf in tensors.items():
                leaves[path] = replace(leaf, use=(leaf.use or WeightUse())._replace(**facts))
    return Tree(leaves, tree.aliases, tree.containers)


def _is_own_class(container: Container | None) -> bool:
    """Return whether a container is a TorchScript module of a class that is not PyTorch's."""
    name = "" if container is None else str(container.name)
    return name.startswith("__torch__.") and not name.startswith(_FRAMEWORK_CLASS)


def _probe_nodes(graph: Graph, owner: Path, tensors: Mapping[str, Leaf]) -> dict[str, Any]:
    """Return what the nodes of a module with vectors compute (see networks.probe_module), {} if unknown."""
    module = extract_module(graph, tuple(str(step.value) for step in owner))
    if module is None:
        return {}
    values = {name: leaf.array() for name, leaf in tensors.items()}
    features = max(leaf.shape[0] for leaf in tensors.values())

    def call(x: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(x, -1, 1) if x.ndim > 3 else x
        output = evaluate(module, {module.inputs[0].name: moved})[module.outputs[0].name]
        return np.moveaxis(output, 1, -1) if x.ndim > 3 else output

    for outer in _PROBED_SHAPES:
        with contextlib.suppress(CkpttoolError, ValueError):
            return probe_module(values, (*outer, features), call)
    return {}


def _as_saved(ready: PreparedTree) -> tuple[PreparedTree, Mapping[Path, ModuleInfo]]:
    """Return the tree with whole modules as state_dicts, without copies from Keras's export.

    The second result is what the file records of the whole modules that contained the tensors.
    """
    described: Mapping[Path, ModuleInfo] = {}
    tree, sources = read_state_dicts(ready.tree)
    if tree is not ready.tree:
        described = describe_sources(ready.tree, sources)
        rules = {new: ready.rules[old] for new, old in sources.items() if old in ready.rules}
        names = {new: ready.names[old] for new, old in sources.items()}
        ready = ready._replace(tree=tree, names=names, rules=rules)
    return ready._replace(tree=without_copies(ready.tree)), described


def observe_source(
    source: ModelSource, like: ModelSpec | str, shapes: Sequence[Shape], choices: Sequence[LayerOption] = ()
) -> ModelSource:
    """Return the source with the orders of flattened images that a call of its own model shows.

    The model is built only if a layer's order is unknown. `shapes` are those of its inputs, with channels
    last, if neither `like` nor the model states them. Raise UsageError if the model has other layers, or
    cannot be called.
    """
    tree, framework = source.tree, source.framework
    layers = find_layers(tree, framework, choices, source.fills.described)
    if source.agent or not list_open_orders(tree, layers):
        return source
    spec = as_model_spec(like)
    with TargetModel(spec) as model:
        stated = model.inputs()
        skeleton = model.skeleton(stated or shapes)
    if skeleton.framework != framework:
        raise UsageError(
            f"{spec.factory} builds a model of {skeleton.framework}",
            expected=f"the source's, of {framework}",
        )
    modules = {path: part for part in skeleton.parts for path in part.tensors.values()}
    pairs = _pair_tensors(source.fills, skeleton)
    orders = {
        id(tree[path]): _observed_orders(modules[other]) for path, other in pairs.items() if other in modules
    }
    if not any(use.takes or use.makes for use in orders.values()):
        raise UsageError(
            f"{spec.factory} was not called, so the order of its flattened images is unknown"
            if pairs
            else f"{spec.factory} has none of the source's layers",
            hint=f"add --input-shape {'C,H,W' if framework == 'torch' else 'H,W,C'}" if pairs else None,
        )
    tree = annotate_orders(tree, orders)
    return source._replace(
        ready=source.ready._replace(tree=tree),
        fills=replace(source.fills, tree=tree),
        shapes=stated or spec.shapes or tuple(shapes),
    )


def _pair_tensors(source: FillSource, skeleton: Skeleton) -> Mapping[Path, Path]:
    """Return the tensors of the source's model that the source's are: by keys in the file, else by layers."""
    keys = {leaf.key: path for path, leaf in skeleton.tree.tensors()}
    paths = {path: keys[leaf.key] for path, leaf in source.tree.tensors() if leaf.key in keys}
    if all(path in paths for path, leaf in source.tree.tensors() if leaf.role in STATES):
        return paths
    filling = fill_model.fill(source, skeleton, MatchOptions(strict=False))
    return {move.source: move.target for move in filling.moves}


def _observed_orders(module: ModelModule) -> WeightUse:
    """Return the orders of a module's input and output that a call showed."""
    return WeightUse(*module.observed_orders(), module.call)


def agent_source(checkpoint: Checkpoint, part: str | None, layout: str | None) -> ModelSource:
    """Return the agent's networks, or one of them, by canonical names.

    Raise UsageError where no layout recognises the agent, or it has no such network.
    """
    binding = recognize_checkpoint(checkpoint, layout)
    if binding is None:
        raise UsageError("no layout recognises an agent in this checkpoint", file=checkpoint.path)
    moves = tuple(move for move in binding.moves.moves if move.target[0].value in RUN)
    tree = canonical_tree(checkpoint.tree, MoveList(moves))
    names = {display(move.target): checkpoint.tree.names[move.source] for move in moves}
    if part is not None:
        try:
            tree = parts.select_part(tree, part)[0]
        except UsageError as error:
            hint = f"choose one of the agent's networks: {', '.join(part.title for part in binding.parts)}"
            raise UsageError(error.message, file=checkpoint.path, path=part, hint=hint) from None
    start = "" if part is None else f"{part.strip('/')}/"
    own = {path: names[f"{start}{display(path)}"] for path in tree}
    note = f"read as an agent of layout {binding.layout}"
    return ModelSource(PreparedTree(tree, own, {}, notes=(note,)), FillSource(tree, _CANONICAL), agent=True)


def source_names(ready: PreparedTree, filling: FillResult) -> frozenset[str]:
    """Return the checkpoint names of the entries that fill the model."""
    return frozenset(ready.names[move.source] for move in filling.moves)


def build_fill_report(ready: PreparedTree, skeleton: Skeleton, filling: FillResult) -> MappingReport:
    """Return the mapping of every source entry and every model tensor."""
    counts = Counter(match.by for match in filling.matched)
    counted = [f"{n} {_COUNTED.get(by, f'by {by}')}" for by, n in counts.items()]
    many = "layer" if len(filling.matched) == 1 else "layers"
    notes = [f"{len(filling.matched)} {many} matched: {', '.join(counted)}"] if counted else []
    for by, word in _BY.items():
        pairs = [f"{m.source} -> {m.target}" for m in filling.matched if m.by == by]
        notes += [f"{word}: {abbreviate_list(pairs, _SHOWN)}"] if pairs else []
    notes += left_out_notes(ready)
    names = skeleton.tree.names
    lines = report_moves(ready, filling.tree, filling.moves)
    return MappingReport(
        tuple(
            replace(line, by=filling.evidence.get(move.target))
            for line, move in zip(lines, filling.moves, strict=True)
        ),
        (*(ready.names[path] for path in filling.unused), *ready.lost),
        tuple(names[path] for path in filling.unfilled),
        filling.assumed,
        (*ready.notes, *notes, *(a.sentence for a in filling.ambiguous), *filling.notes),
    )


def left_out_notes(ready: PreparedTree, used: Collection[Path] = ()) -> Iterator[str]:
    """Yield a note on tensors that are neither part of a model nor used otherwise."""
    others = [
        ready.names[path]
        for path, leaf in ready.tree.tensors()
        if leaf.role not in (*STATES, "counter") and path not in used
    ]
    if others:
        yield f"not part of a model, left out: {abbreviate_list(others, _SHOWN)}"


def _detect_framework(checkpoint: Checkpoint, tree: Tree, source: str | None) -> str:
    """Return the framework whose naming the source uses; without evidence, the one that maps more arrays."""
    native = format_framework(checkpoint.format)
    detected = orientation.checkpoint_orientation(checkpoint, tree, native, source)
    if detected in ("torch", "tensorflow"):
        return detected
    counts = {
        name: sum(len(layer.tensors) for layer in find_layers(tree, name)) for name in ("torch", "tensorflow")
    }
    return max(counts, key=lambda name: counts[name])


def _lists_in_order(checkpoint: Checkpoint, tree: Tree, framework: str) -> bool:
    """Return whether the tree lists layers in creation order, not by name."""
    if checkpoint.format in _SORTED or (framework == "tensorflow" and tf_names.has_named_variables(tree)):
        return False
    # keras/src/saving/saving_lib.py, _walk_saveable: attributes in alphabetical order.
    return checkpoint.format != "keras_h5" or all("/vars/" not in leaf.key for _, leaf in tree.tensors())


# The `layout` value that lets the layouts recognise the agent.
AUTO = "auto"
Pairs = Mapping[str, str] | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ModelLoadResult:
    """Result of filling a model: `filled` of its tensors have the checkpoint's values, or would have.

    `matched` lists by layer its source and how it was found ("given", "name", "outputs", "words",
    "numbers", "calls", "only fit", "creation", "order"), `report` the rule of every tensor, the model
    tensors that are `missing`, the checkpoint tensors that are `unused`, and assumptions. `left_out` are
    those that fill nothing for a reason. `different` pairs belong together but do not fit; `ambiguous`
    ones have no evidence which is which. `cast` are tensors whose number type changes in the model.
    `loaded` is false for a dry run. The `ledger` lists what else in or beside the checkpoint may affect
    the model's outputs (evaluation/evidence.py); see `decides`. `proof` is whether the filled model
    computes what the checkpoint's model computes, where that runs.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    model: str
    path: str
    filled: int
    report: MappingReport
    matched: tuple[LayerMatch, ...]
    ambiguous: tuple[Ambiguity, ...]
    different: tuple[Misfit, ...]
    cast: tuple[str, ...]
    loaded: bool
    ledger: LedgerEntries = ()
    left_out: tuple[OmittedTensor, ...] = ()
    proof: ModelProof | None = None

    @property
    def complete(self) -> bool:
        """Return whether the whole model is filled."""
        return not self.report.missing

    @property
    def decides(self) -> bool:
        """Return whether checkpoint data missing in the model certainly changes its outputs."""
        return sidecar.has_open_entries(self.ledger)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "model": self.model,
            "path": self.path,
            "loaded": self.loaded,
            "complete": self.complete,
            "filled": self.filled,
            "matched": [match.document() for match in self.matched],
            "mapped": [entry.document() for entry in self.report.mapped],
            "missing": list(self.report.missing),
            "unused": list(self.report.unused),
            "left_out": [entry.document() for entry in self.left_out],
            "different": [entry.document() for entry in self.different],
            "ambiguous": [entry.document() for entry in self.ambiguous],
            "cast": list(self.cast),
            "assumed": list(self.report.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.report.notes),
            "verification": None if self.proof is None else self.proof.document(),
        }


class ModelFillPlan(NamedTuple):
    """How a source fills a model, whose optimizers are planned on request only."""

    model: str
    source: ModelSource
    target: Skeleton
    filling: FillResult
    report: MappingReport
    optimizers: ConvertedOptimizers | None = None
    ledger: ModelLedger = ModelLedger()
    # Constants of the source's graph that its outputs show to be no weights.
    spare: tuple[str, ...] = ()

    @property
    def prepared(self) -> PreparedTree:
        """The prepared tree of the source."""
        return self.source.ready

    @property
    def skeleton(self) -> Tree:
        """The tensors of the model."""
        return self.target.tree

    @property
    def values(self) -> dict[Path, Leaf]:
        """The leaves that fill the model, by paths in the model."""
        reached = {*self.target.named()[1].values()} - {*self.filling.unfilled}
        return {path: leaf for path, leaf in self.filling.tree.tensors() if path in reached}

    def account(
        self, checkpoint: Checkpoint, part: str | None, patterns: Sequence[str], option: str
    ) -> ModelFillPlan:
        """Return the plan with what becomes of the checkpoint's tensors that fill nothing.

        `patterns` are those that may be left out, `option` is what precedes one where the user writes it.
        """
        moved = None if self.optimizers is None else self.optimizers.plan
        used = () if moved is None else (*(move.source for move in moved.moves), *moved.consumed, *moved.kept)
        ledger = account_for_tensors(
            checkpoint,
            self.prepared,
            self.filling,
            used=used,
            part=part,
            patterns=patterns,
            option=option,
            agent=self.source.agent,
        ).without(self.spare)
        report = replace(self.report, unused=ledger.unused, notes=(*self.report.notes, *ledger.notes()))
        return self._replace(ledger=ledger, report=report)

    def proof(
        self, options: FillOptions | ModelFileOptions, skipped: str | None, *, rounded: bool
    ) -> ProofRequest:
        """Return what runs the source's model, and what keeps the outputs from being comparable.

        `skipped` is why nothing is to be compared; numbers are `rounded` to the types of the model.
        """
        like = self.source.model_spec(options.like_source)
        common = None
        if rounded and skipped is None:
            filled = [self.skeleton[path] for path in self.values]
            common, skipped = common_rounding(self.filling.moves, filled, merged=bool(self.prepared.rules))
        missing = bool(self.report.missing)
        return ProofRequest(like, options.run_code, skipped, options.part, common, incomplete=missing)


@dataclass(frozen=True, slots=True)
class FillOptions:
    """The options of `load_into`.

    Args:
        layout: read the checkpoint as an agent of this layout, by canonical names; "auto": of any
            layout.
        part: use only what lies under this path, or one network of an agent ("actor", "critic/q1").
        strict: change nothing unless all of the model is filled and all weights of the checkpoint are
            used.
        allow_unused: patterns of the checkpoint's tensors that may be left out although `strict`.
        match: names of layers or modules that belong together, the checkpoint's and the model's.
        shapes: shapes of the model's inputs without the batch, for a model that has no weights before
            its first call or flattens images.
        flatten: `{"dense": "7,7,64"}`, the shape of the image that a layer receives flattened, in the
            model's order; "no": none.
        unflatten: the shape of the image that a dense layer's output becomes.
        kinds: `{"table": "embedding"}`, the kind of a layer that could be of several kinds.
        accept_order: pair layers by order where no other evidence decides.
        from_: orientation of the checkpoint's matrices ("torch" or "tf") where it has no evidence.
        fold_weight_norm: make one weight of the checkpoint's two tensors of weight norm.
        dry_run: return the report and change nothing.
        optimizer: the model's optimizer (of PyTorch, or a built one of Keras), to be given the state of
            the checkpoint's optimizer.
        verify: where the checkpoint contains a model that runs (Keras with its configuration, ONNX), run it
            beside the filled one; if an output differs, restore the model's former values and raise
            MappingError.
        like_source: the code that builds the checkpoint's model ("module:factory" or a ModelSpec), to run it.
        run_code: run a checkpoint whose file contains code (SavedModel, TorchScript, Lambda layers).
    """

    layout: str | None = None
    part: str | None = None
    strict: bool = True
    allow_unused: Sequence[str] = ()
    match: Pairs = ()
    shapes: Sequence[Shape] = ()
    flatten: Pairs = ()
    unflatten: Pairs = ()
    kinds: Pairs = ()
    accept_order: bool = False
    from_: str | None = None
    fold_weight_norm: bool = False
    dry_run: bool = False
    optimizer: Any = None
    verify: bool = True
    like_source: ModelSpec | str | None = None
    run_code: bool = False

    def matching(self) -> MatchOptions:
        """Return how layers are matched; raise UsageError for an invalid statement."""
        kinds, flatten, unflatten = (
            [f"{name}={value}" for name, value in _items(statements)]
            for statements in (self.kinds, self.flatten, self.unflatten)
        )
        return MatchOptions(
            layer_options.parse_layer_options(kinds, flatten, unflatten),
            _items(self.match),
            strict=False,
            accept_order=self.accept_order,
        )


class FurtherLoadKeywords(TypedDict, total=False):
    """Fields of FillOptions that `load_into` takes as keywords without listing them."""

    fold_weight_norm: bool
    run_code: bool


def _items(pairs: Pairs) -> tuple[tuple[str, str], ...]:
    return tuple(pairs.items() if isinstance(pairs, Mapping) else pairs)


@takes_options(FillOptions)
def load_into(
    model: Any,
    path: str | os.PathLike[str] | Checkpoint,
    options: FillOptions | None = None,
    *,
    layout: str | None = None,
    part: str | None = None,
    strict: bool = True,
    allow_unused: Sequence[str] = (),
    match: Pairs = (),
    shapes: Sequence[Shape] = (),
    flatten: Pairs = (),
    unflatten: Pairs = (),
    kinds: Pairs = (),
    accept_order: bool = False,
    from_: str | None = None,
    dry_run: bool = False,
    optimizer: Any = None,
    verify: bool = True,
    like_source: ModelSpec | str | None = None,
    **further: Unpack[FurtherLoadKeywords],
) -> ModelLoadResult:
    """Fill a live torch.nn.Module, tf.Module or Keras model in place; return what was matched, and how.

    Raise MappingError if strict and model and checkpoint weights do not correspond completely;
    otherwise unmatched tensors stay unchanged. A dry run returns the whole report; a model without
    weights is still built by a call. Types and devices of the model stay. Errors of opening and
    reading are passed on; nothing has changed then either.

    Args:
        model: the live model, filled in place.
        path: the checkpoint: a file, prefix or folder, or what `ckpttool.open` returned.
        options: how to fill the model; keywords replace its fields.
        further: the other fields of FillOptions, which follow.

    >>> import ckpttool, torch
    >>> names = ["l1", "l2", "l3"]
    >>> sizes = [(3, 64), (64, 64), (64, 1)]
    >>> actor = torch.nn.ModuleDict({n: torch.nn.Linear(*size) for n, size in zip(names, sizes)})
    >>> done = ckpttool.load_into(actor, "sample_ckpts/td3_pendulum_tf/ckpt-15000", part="policy/actor")
    >>> done.filled, done.matched[0].source, done.matched[0].by, done.report.mapped[0].rule
    (6, 'l1', 'name', 'transpose')
    """
    options = options or FillOptions()
    target = LiveModel(model, options.shapes)
    checkpoint = ensure_open(path)
    met = plan_model_fill(target, checkpoint, options)
    if options.strict and not options.dry_run:
        _require_complete(met, checkpoint, options.part)
    names, tensors, values = met.skeleton.names, dict(met.skeleton.tensors()), met.values
    cast = tuple(names[path] for path, leaf in values.items() if tensors[path].dtype != leaf.dtype)
    rounded = any(not is_widening(leaf.dtype, tensors[path].dtype) for path, leaf in values.items())
    proof, report = None, met.report
    if not options.dry_run:
        undo = _assign_values(target, met, options.optimizer)
        request = met.proof(options, _why_not_proved(met, options), rounded=rounded)
        proof = _prove(target, checkpoint, request, undo)
        report = replace(report, assumed=(*report.assumed, *proof.assumed))
    return ModelLoadResult(
        target.title,
        checkpoint.path,
        len(values),
        report,
        met.filling.matched,
        met.filling.ambiguous,
        met.filling.misfits,
        cast,
        not options.dry_run,
        met.ledger.settle(evidence.unconverted_entries(checkpoint, source_names(met.prepared, met.filling))),
        met.ledger.left_out,
        proof,
    )


def _why_not_proved(met: ModelFillPlan, options: FillOptions) -> str | None:
    if not options.verify:
        return "verify=False was used"
    if met.source.agent:
        return "the checkpoint was read as an agent"
    if options.part is not None and options.like_source is None:
        return "a part of the checkpoint was used; like_source= names the code that builds it"
    return None


def _prove(
    target: LiveModel,
    checkpoint: Checkpoint,
    request: ProofRequest,
    undo: Callable[[], None],
) -> ModelProof:
    """Compare the outputs; restore the model's former values and raise MappingError if they differ."""
    try:
        return prove_live(checkpoint, target.model, target.shapes, request)
    except ModelMismatchError as error:
        undo()
        first = None if error.proof.comparison is None else error.proof.comparison.first
        raise MappingError(
            "the filled model computes something else than the checkpoint's model, so its former values were "
            "restored",
            file=checkpoint.path,
            path=None if first is None else first.b,
            found=None if first is None else first.cause,
            hint=(first.fix if first is not None else None) or "verify=False skips the comparison",
        ) from None
    except BaseException:
        undo()
        raise


def plan_model_fill(
    target: LiveModel | ModelSpec, checkpoint: Checkpoint, options: FillOptions
) -> ModelFillPlan:
    """Return how a checkpoint fills a model, in this process or a separate one; nothing changes."""
    matching = options.matching()
    source = _select_source(checkpoint, options, target.shapes)
    with TargetModel(target) if isinstance(target, ModelSpec) else contextlib.nullcontext(target) as model:
        met = plan_fill(
            model, checkpoint, source, matching, options.like_source, options.allow_unused, options.part
        )
    if options.optimizer is not None:
        met = _plan_optimizer(met)
    return met.account(checkpoint, options.part, options.allow_unused, "allow_unused=")


def _plan_optimizer(met: ModelFillPlan) -> ModelFillPlan:
    """Return the plan with the checkpoint's optimizers in the form of the model's framework."""
    form = "torch" if met.target.framework == "torch" else "tf"
    settings = OptimizerSettings(sidecar_settings(None))
    conversion = convert_optimizers(met.source.tree, met.filling, met.target, form, settings)
    plan, report = conversion.plan, met.report
    if plan.missing:
        raise MappingError("the checkpoint lacks optimizer state", path=abbreviate_list(plan.missing, _SHOWN))
    notes = (*report.notes, *(plan.notes or conversion.reasons))
    return met._replace(
        optimizers=conversion, report=replace(report, assumed=(*report.assumed, *plan.assumed), notes=notes)
    )


def _assign_values(target: LiveModel, met: ModelFillPlan, optimizer: Any) -> Callable[[], None]:
    """Put the values into the model, and the state into its optimizer if there is one.

    Return the function that restores the former values.
    """
    names = met.skeleton.names
    values = [(names[path], target.tensors[path], leaf) for path, leaf in met.values.items()]
    if optimizer is None or met.optimizers is None:
        return assign(values)
    if target.framework != "torch":
        return assign([*values, *stage_keras_optimizer(optimizer, target.tensors, met.optimizers)])
    parameters = {id(parameter): name for name, parameter in target.model.named_parameters()}
    state = build_torch_state(optimizer, parameters, _make_torch_tensor, met.optimizers)
    before, undo = optimizer.state_dict(), assign(values)
    optimizer.load_state_dict(state)

    def undo_both() -> None:
        optimizer.load_state_dict(before)
        undo()

    return undo_both


def _make_torch_tensor(leaf: Leaf) -> Any:
    torch: Any = sys.modules["torch"]
    tensor = torch.zeros(leaf.shape, dtype=getattr(torch, leaf.dtype))
    assign([("state", tensor, leaf)])
    return tensor


def _fill_without(
    source: ModelSource, skeleton: Skeleton, matching: MatchOptions, patterns: Sequence[str]
) -> FillResult:
    """Fill the skeleton; tensors that the user leaves out do not keep their layers from being recognised.

    A layer with a tensor that no kind of layer has, e.g. a low-rank weight beside its kernel, fills nothing.
    """
    filling = fill_model.fill(source.fills, skeleton, matching)
    matches = [compile_glob(pattern) for pattern in patterns]
    left = {path for path in filling.unused if any(match(source.ready.names[path]) for match in matches)}
    if not left or not filling.unfilled:
        return filling
    tree = source.fills.tree
    kept = tree.with_leaves({path: leaf for path, leaf in tree.items() if path not in left})
    again = fill_model.fill(replace(source.fills, tree=kept), skeleton, matching)
    return again if len(again.unfilled) < len(filling.unfilled) else filling


def plan_fill(
    target: TargetModel | LiveModel,
    checkpoint: Checkpoint,
    inputs: ModelSource,
    matching: MatchOptions,
    like_source: ModelSpec | str | None,
    patterns: Sequence[str],
    part: str | None,
) -> ModelFillPlan:
    """Return how a source fills a model; errors of the mapping name the checkpoint.

    Args:
        target: the model.
        checkpoint: what the source was read from.
        inputs: the source: its tensors by name.
        matching: what the user states about layers and pairs.
        like_source: the code of the source's model, which a call observes.
        patterns: patterns of names of source tensors that the user leaves out.
        part: the part of the checkpoint that is the source.
    """
    if like_source is not None:
        inputs = observe_source(inputs, like_source, target.source_inputs(), matching.choices)
    skeleton = target.skeleton(inputs.guessed(), inputs.framework)
    spare: tuple[str, ...] = ()
    try:
        source = TrialSource(checkpoint, inputs.framework, inputs.model_spec(like_source), part)
        for options in _with_orders(matching, checkpoint, like_source):
            filling = _fill_without(inputs, skeleton, options, patterns)
            if not filling.misfits:
                filling, spare = _decide_by_outputs(target, source, inputs, skeleton, options, filling)
            if not filling.unfilled:
                break
    except CkpttoolError as error:
        raise error.located(file=error.file or checkpoint.path) from error.__cause__
    linked = set(skeleton.named()[1].values())
    # A tensor that no module holds by name cannot be filled.
    alone = tuple(path for path in target.tensors if path not in linked)
    filling = replace(filling, unfilled=(*filling.unfilled, *alone))
    report = build_fill_report(inputs.ready, skeleton, filling)
    return ModelFillPlan(target.title, inputs, skeleton, filling, report, spare=spare)


def _with_orders(matching: MatchOptions, checkpoint: Checkpoint, like: object) -> Iterator[MatchOptions]:
    """Yield the options without orders, then with those of creation and of storage, which decide last.

    That of creation is assumed if the source has no computation, and is no legacy `.h5`, which only counts.
    """
    options = replace(matching, accept_order=False)
    yield options
    if like is None and not (checkpoint.format == "keras_h5" and checkpoint.details["layout"] == "h5"):
        with contextlib.suppress(CkpttoolError):
            options = replace(options, by_creation=read_graph(checkpoint) is None)
    if options.by_creation:
        yield options
    if matching.accept_order:
        yield replace(options, accept_order=True)


def _decide_by_outputs(
    target: TargetModel | LiveModel,
    source: TrialSource,
    model_source: ModelSource,
    skeleton: Skeleton,
    matching: MatchOptions,
    filling: FillResult,
) -> tuple[FillResult, tuple[str, ...]]:
    """Return the filling in which outputs decide what names and shapes leave open.

    Open are ambiguous layers, the order of joined parts, and whether buffers that only one side has are
    needed. The second result are constants of the source's graph that are no weights.
    """
    graph = source.checkpoint.format == onnx.NAME
    spare = tuple(onnx_policies.list_unread_constants(source.checkpoint)[0]) if graph else ()
    trees = model_source.fills.tree, skeleton.tree

    def fill(decided: Choice) -> FillResult:
        options = replace(matching, decided=decided.pairs, part_orders=decided.orders)
        return fill_model.without_buffers(
            fill_model.fill(model_source.fills, skeleton, options), *trees, spare
        )

    first = fill_model.without_buffers(filling, *trees, spare)
    settled = not (first.ambiguous or first.assumed_parts)
    if settled and (first.unfilled or first.unused or first.assumed == filling.assumed):
        return filling, ()  # there is nothing that outputs could decide
    calls = {"/".join(part.name): part.call.number for part in skeleton.parts}
    trials = FillTrials(
        fill, lambda filling: target.assign(filling, skeleton), calls, target.running, target.shapes
    )
    decided, missing = decide_by_outputs(source, trials, first)
    if missing and filling.ambiguous:
        filling = replace(
            filling, ambiguous=tuple(replace(group, missing=missing) for group in filling.ambiguous)
        )
    return (filling, ()) if decided is None else (decided, spare)


def _select_source(checkpoint: Checkpoint, options: FillOptions, shapes: Sequence[Shape]) -> ModelSource:
    layout, part = options.layout, options.part
    if layout is not None:
        return agent_source(checkpoint, part, None if layout == AUTO else layout)
    try:
        preparation = PreparationOptions(fold=options.fold_weight_norm)
        return model_source(checkpoint, part, preparation, source=options.from_, shapes=shapes)
    except UsageError:
        # A network of an agent has its canonical name, regardless of its codebase's name for it.
        if part is None or recognize_checkpoint(checkpoint) is None:
            raise
        return agent_source(checkpoint, part, None)


def _require_complete(met: ModelFillPlan, checkpoint: Checkpoint, part: str | None) -> None:
    """Raise MappingError unless model and checkpoint weights correspond completely.

    The error names mismatches, else missing model tensors, else unused checkpoint tensors.
    """
    if met.filling.misfits:
        misfit = met.filling.misfits[0]
        error = misfit.error.located(file=checkpoint.path)
        if misfit.setting:
            raise error
        if "--fold-weight-norm" in misfit.found:
            error.hint = "use --fold-weight-norm"
            raise error
        error.hint = (
            "use a model with the checkpoint's layers and sizes, or pair layers with match={SOURCE: TARGET}"
        )
        if (stated := _KIND.search(f"{error.expected} {error.found}")) is not None:
            error.hint = _kind_options(stated)
        raise error
    names = [met.skeleton.names[path] for path in met.filling.unfilled]
    if not names:
        _require_used(met, checkpoint, part)
        return
    raise MappingError(
        f"{format_count(len(names), 'tensor')} of {met.model} would not be filled, so nothing was changed",
        file=checkpoint.path,
        path=abbreviate_list(names, _SHOWN),
        found="; ".join(met.ledger.kinds()) or None,
        hint=_hint(met, checkpoint, part),
    )


def _require_used(met: ModelFillPlan, checkpoint: Checkpoint, part: str | None) -> None:
    unused = met.ledger.unused
    if not unused:
        return
    networks = _agent_networks(checkpoint, part)
    parts = f" (set part= to one of {networks})" if networks else ""
    raise MappingError(
        f"{format_count(len(unused), 'weight')} of the checkpoint without a place in {met.model}, so nothing "
        "was filled",
        file=checkpoint.path,
        path=abbreviate_list(unused, _SHOWN),
        found="; ".join(met.ledger.kinds()) or None,
        hint=f"use allow_unused=[{_unused_patterns(unused)}] to leave them out{parts}",
    )


_NUMBER, _INNER_STEPS = deferred.compile(r"\d+"), deferred.compile(r"(?<=.)/.*")
_MOST_PATTERNS = 240  # characters


def _unused_patterns(unused: Sequence[str]) -> str:
    """Return patterns that together match these tensors, one for those that only numbers distinguish.

    Used tensors that a pattern matches stay used.
    """
    counted, outer = (
        dict.fromkeys(pattern.sub(wild, name) for name in unused)
        for pattern, wild in ((_NUMBER, "*"), (_INNER_STEPS, "/**"))
    )
    ways = (unused if len(unused) <= _SHOWN else counted, counted, outer)
    written = (", ".join(map(repr, way)) for way in ways)
    return next((pattern for pattern in written if len(pattern) <= _MOST_PATTERNS), "'**'")


# The hint of an error for a layer of an unknown class: the layer, and its possible kinds.
_KIND = deferred.compile(r"--kind '([^']*)=([^'=]*)' to convert it as one(?:, or ((?:\w| )+))?")
_STATED = deferred.compile("--(?:kind|flatten|unflatten) '")


def _kind_options(kind: re.Match[str]) -> str:
    """Return the option that states a layer's kind, for each possible kind."""
    layer, first, others = kind.groups()
    names = [first, *(others.split(" or ") if others else ())]
    options = " or ".join(f"--kind '{layer}={name}'" for name in names)
    return f"{options}, depending on what it computes"


def _agent_networks(checkpoint: Checkpoint, part: str | None) -> str:
    """Return the networks of the agent in a whole checkpoint, "" if there is none."""
    binding = None if part is not None else recognize_checkpoint(checkpoint)
    return "" if binding is None else abbreviate_list([part.title for part in binding.parts], _SHOWN)


def _hint(met: ModelFillPlan, checkpoint: Checkpoint, part: str | None) -> str:
    filling, tree = met.filling, met.skeleton
    if networks := _agent_networks(checkpoint, part):
        return f"set part= to one network: {networks}"
    if filling.ambiguous:
        return filling.ambiguous[0].sentence
    unfit = (note for note in filling.notes if note.startswith(NO_SOURCE_LAYER) or _STATED.search(note))
    hint = next(unfit, "use dry_run=True for the full report, or strict=False to fill what matches")
    own = not met.ledger.unused and all(
        getattr(tree[path], "role", "") == "buffer" for path in filling.unfilled
    )
    # Tables that the model computes itself, and whatever else it has and does not train.
    kept = own and hint.startswith(NO_SOURCE_LAYER)
    return f"{hint}; use strict=False if the model's own values are right" if kept else hint
