"""Describe the layers of a model: classes, settings, order, output shapes, multiply-accumulate operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpttool.commands.dataflow import FlowStage, FlowStrip, StageKind
from ckpttool.commands.inspect import is_script
from ckpttool.core.errors import CkpttoolError, UsageError, is_system_error, suggest_choice
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, display
from ckpttool.formats.keras_config import (
    CELLS,
    KerasConfig,
    class_from_name,
    config_of,
    list_references,
    snake_case,
)
from ckpttool.libraries.layer_shapes import (
    ACTIVATION_CLASSES,
    Extents,
    KerasCall,
    KerasOutput,
    TorchModule,
    TorchOutput,
    UnknownShapeError,
    keras_rule,
    require_fit,
    torch_rule,
)
from ckpttool.libraries.model_steps import is_foreign
from ckpttool.libraries.recognize import PICKLED_MODULES, TORCH_CLASSES

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.libraries.activation_orders import TracedCall
    from ckpttool.libraries.script_orders import ScriptCall

# A layer is described from what the file records: its class and settings, the order in which layers are
# applied, and shapes by arithmetic. Nothing is executed. The code of a custom class is not in the file: the
# order of its parts and its output shape are unknown, unless the file records them elsewhere.

# How the parts of a layer relate: applied in order, as a recorded graph, or by code outside the file.
Flow = Literal["chain", "graph", "parts"]

# A model with more layers is not described, and layers nested more deeply are not.
_MOST_LAYERS, _DEEPEST = 20_000, 64
# Fewer alike layers than this are listed one by one.
_FEWEST_ALIKE = 3
_INPUT = "InputLayer"
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class ArchitectureLayer:
    """One layer; `output` and `macs` are None if unknown, `macs` and `parameters` include the parts.

    `known` means that the class is one of the framework itself. `inputs` are the paths of the layers whose
    outputs it receives, if these are not only that of the layer before it.
    """

    path: str
    kind: str
    cls: str
    known: bool = True
    detail: str = ""
    activation: str = ""
    parameters: int = 0
    output: Extents | None = None
    macs: int | None = None
    inputs: tuple[str, ...] = ()
    flow: Flow = "chain"
    below: tuple[ArchitectureLayer, ...] = ()

    @property
    def name(self) -> str:
        """The last step of the path."""
        return self.path.rpartition("/")[2]

    @property
    def title(self) -> str:
        """The class with its activation, marked if its code is not in the file."""
        return f"{self.kind} {self.activation}".rstrip() if self.known else f"{self.kind} (unknown class)"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "kind": self.kind,
            "class": self.cls,
            "known": self.known,
            "detail": self.detail or None,
            "activation": self.activation or None,
            "parameters": self.parameters,
            "output": None if self.output is None else list(self.output),
            "macs": self.macs,
            "inputs": list(self.inputs),
            "flow": self.flow if self.below else None,
            "layers": [layer.document() for layer in self.below],
        }


@dataclass(frozen=True, slots=True)
class Architecture:
    """The layers of one model, and what describes them in the file (`source`).

    `inputs` are shapes by name. Shapes omit the batch axis unless `batch`; operations are counted for one
    sample, or for the whole input if the shapes include the batch.
    """

    source: str
    root: ArchitectureLayer
    inputs: tuple[tuple[str, Extents], ...] = ()
    batch: bool = False
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "inputs": [{"name": name, "shape": list(shape)} for name, shape in self.inputs],
            "batch": self.batch,
            "parameters": self.root.parameters,
            "macs": self.root.macs,
            "model": self.root.document(),
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }


class LayerGroup(NamedTuple):
    """Consecutive layers that differ only in the numbers of their names; `first` stands for all."""

    first: ArchitectureLayer
    number: int
    last: ArchitectureLayer


def describe_architecture(checkpoint: Checkpoint, shapes: Sequence[str] = ()) -> tuple[Architecture, ...]:
    """Return the models whose layers the checkpoint records; none for weights alone.

    Args:
        checkpoint: any checkpoint; no tensor is read.
        shapes: input shapes without the batch, "3,32,32" or "PATH=3,32,32" for the input of one layer.

    """
    wanted = _parse_shapes(shapes)
    found: tuple[Architecture, ...] = ()
    try:
        found = _describe(checkpoint, wanted)
    except UsageError:
        raise
    except CkpttoolError as error:
        # The listing does not depend on it; commands that run the model report the error.
        if is_system_error(error):
            raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        if wanted:
            raise UsageError(
                "the model's configuration has an unexpected structure", file=checkpoint.path
            ) from None
    if wanted and not found:
        raise UsageError(
            "--input-shape requires a file that describes its layers",
            file=checkpoint.path,
            hint="a pickled module, a Keras model, TorchScript, ONNX; weights alone list no layers",
        )
    return found


def _describe(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    if checkpoint.format in ("keras_zip", "keras_h5"):
        return _describe_keras(checkpoint, shapes)
    if checkpoint.format == "onnx":
        return _describe_onnx(checkpoint, shapes)
    if is_script(checkpoint):
        return _describe_script(checkpoint, shapes)
    return _describe_torch(checkpoint, shapes)


def _parse_shapes(shapes: Sequence[str]) -> dict[str, Extents]:
    """Return the shapes by layer path, "" for the whole model."""
    found: dict[str, Extents] = {}
    for text in shapes:
        name, equals, numbers = text.rpartition("=")
        if not re.fullmatch(r"[0-9]{1,9}([,x][0-9]{1,9})*", numbers) or (equals and not name):
            raise UsageError(f"invalid input shape {text!r}", hint="e.g. --input-shape 3,32,32")
        path = name.replace(".", "/")
        if path in found:
            raise UsageError(f"two input shapes for {name or 'the model'}")
        found[path] = tuple(map(int, re.split("[,x]", numbers)))
    return found


def _require_used(shapes: Mapping[str, Extents], used: set[str], known: Iterator[str]) -> None:
    """Raise UsageError for a shape whose layer does not exist."""
    for path in shapes:
        if path not in used:
            what = f"no layer {path!r}" if path else "the order of the layers is not in the file"
            names = [name for name in known if name]
            hint = suggest_choice(path, names[:_SUGGESTED]) if names else None
            if not path and names:
                hint = f"name the layer that receives the input: --input-shape {names[0]}=..."
            raise UsageError(what, hint=hint)


_SUGGESTED = 12


def fold_alike(layers: Sequence[ArchitectureLayer]) -> list[ArchitectureLayer | LayerGroup]:
    """Return the layers with each run of at least three alike ones as a group."""
    found: list[ArchitectureLayer | LayerGroup] = []
    start = 0
    while start < len(layers):
        end = start + 1
        form = _form(layers[start])
        while end < len(layers) and _form(layers[end]) == form:
            end += 1
        if end - start < _FEWEST_ALIKE or not _DIGITS.search(layers[start].name):
            found += layers[start:end]
        else:
            found.append(LayerGroup(layers[start], end - start, layers[end - 1]))
        start = end
    return found


def _form(layer: ArchitectureLayer) -> object:
    """Return a layer without the numbers in its names; equal for layers that are listed together."""
    below = tuple(map(_form, layer.below))
    inputs = tuple(_DIGITS.sub("#", each) for each in layer.inputs)
    name = _DIGITS.sub("#", layer.name)
    own = (layer.cls, layer.detail, layer.activation, layer.parameters, layer.output, layer.macs, layer.flow)
    return name, own, inputs, below


def outline_layers(root: ArchitectureLayer) -> str:
    """Return the classes of a model's layers in one line: `Conv2d -> ReLU -> Block (x12)`.

    Layers that the file does not order are in braces, each after its name; a graph is one line of arrows
    per chain.
    """
    if not root.below or (root.flow == "parts" and root.known and root.kind not in _LISTS):
        return root.title
    if root.flow == "parts" and root.kind in _LISTS:
        return f"[{', '.join(map(_outline_entry, fold_alike(root.below)))}]"
    if root.flow == "parts":
        parts = [f"{_group_name(each)}: {_outline_entry(each)}" for each in fold_alike(root.below)]
        return f"{{{'; '.join(parts)}}}"
    return "; ".join(" -> ".join(map(_outline_entry, fold_alike(run))) for run in _runs(root))


def _outline_entry(entry: ArchitectureLayer | LayerGroup) -> str:
    layer = entry.first if isinstance(entry, LayerGroup) else entry
    unknown = layer.flow == "parts" and not layer.known
    text = layer.title if unknown else outline_layers(layer)
    if not isinstance(entry, LayerGroup):
        return text
    return f"({text}) (x{entry.number})" if "->" in text else f"{text} (x{entry.number})"


def _group_name(entry: ArchitectureLayer | LayerGroup) -> str:
    return f"{entry.first.name}...{entry.last.name}" if isinstance(entry, LayerGroup) else entry.name


def format_extents(shape: Extents) -> str:
    """Return a shape as text; an unknown extent is a question mark."""
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"


# The picture: one strip per chain of layers.


def architecture_strips(found: Sequence[Architecture]) -> tuple[FlowStrip, ...]:
    """Return the models as strips; layers in unrecorded order have a strip each."""
    return tuple(strip for each in found for strip in _strips(each.root, _first_input(each), each.notes))


def _first_input(found: Architecture) -> Extents | None:
    return found.inputs[0][1] if len(found.inputs) == 1 else None


def _strips(root: ArchitectureLayer, given: Extents | None, notes: Sequence[str] = ()) -> Iterator[FlowStrip]:
    stages = [] if given is None else [_stage("input", "input", given)]
    title = root.path or root.title
    if root.flow != "parts" or not root.below:
        for run in _runs(root):
            first, joined = run[0], ", ".join(run[0].inputs)
            name = title if first is (root.below or (root,))[0] else f"{title}: {first.name} <- {joined}"
            own = tuple(stage for layer in run for stage in _stages(layer))
            yield FlowStrip(name, (*stages, *own), notes=tuple(notes))
            stages, notes = [], ()
        return
    note = f"the code of {root.kind} is not in the file: the order of its parts is unknown"
    for number, entry in enumerate(fold_alike(root.below)):
        layer = entry.first if isinstance(entry, LayerGroup) else entry
        for strip in _strips(layer, None, (note, *notes) if not number else ()):
            alike = (f"{entry.number - 1} more",) if isinstance(entry, LayerGroup) else ()
            yield replace(strip, alike=alike)


def _runs(root: ArchitectureLayer) -> list[list[ArchitectureLayer]]:
    """Return the layers as runs in which each receives only the output of the one before it."""
    runs: list[list[ArchitectureLayer]] = []
    for layer in root.below or (root,):
        if layer.kind == _INPUT:
            continue
        if not runs or layer.inputs:
            runs.append([])
        runs[-1].append(layer)
    return runs


def _stages(layer: ArchitectureLayer) -> Iterator[FlowStage]:
    if layer.known and layer.flow == "chain" and layer.below:
        for entry in fold_alike(layer.below):
            if isinstance(entry, LayerGroup):
                first = replace(entry.first, kind=f"{entry.first.kind} x{entry.number}", below=())
                size = entry.first.parameters * entry.number
                yield from _stages(replace(first, parameters=size, output=entry.last.output))
            else:
                yield from _stages(entry)
        return
    kind: StageKind = "layer" if layer.parameters else "map"
    if not layer.known:
        kind = "unknown"
    elif layer.kind in ACTIVATION_CLASSES:
        kind = "activation"
    yield _stage(kind, layer.title, layer.output, layer.parameters, layer.detail)


def _stage(
    kind: StageKind, name: str, shape: Extents | None, parameters: int = 0, detail: str = ""
) -> FlowStage:
    known = None if shape is None or None in shape else tuple(extent or 0 for extent in shape)
    text = "" if shape is None or known is not None else format_extents(shape)
    return FlowStage(kind, name, known, parameters, ", ".join(filter(None, (detail, text))))


# Pickled torch modules: classes and settings are recorded, the code of `forward` is not. torch's own classes
# are those of torch/nn/modules (torch 2.x); a Sequential applies its parts in the order of `_modules`.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LISTS = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict"))


def _describe_torch(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    tree = checkpoint.tree
    reader = _TorchReader(tree, shapes)
    if not reader.modules or len(reader.modules) > _MOST_LAYERS:
        return ()
    found = []
    for root in reader.roots():
        reader.assumed, reader.given, reader.notes = [], [], []
        layer, _ = reader.layer(root, None)
        inputs, assumed, notes = tuple(reader.given), tuple(reader.assumed), tuple(reader.notes)
        found.append(Architecture("pickled module", layer, inputs, assumed=assumed, notes=notes))
    _require_used(shapes, reader.used, map(reader.name, reader.modules))
    return tuple(found)


@dataclass
class _TorchReader:
    """Reads the modules of one file; `shapes` are input shapes by module name."""

    tree: Tree
    shapes: Mapping[str, Extents]
    modules: dict[Path, str] = field(init=False)
    children: dict[Path, list[Path]] = field(default_factory=dict)
    opaque: set[Path] = field(default_factory=set)
    hooked: set[Path] = field(default_factory=set)
    parameters: dict[Path, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    given: list[tuple[str, Extents]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the modules: records with torch's dicts of parameters and modules."""
        held = self.tree.containers
        self.modules = {
            path: each.name
            for path, each in held.items()
            if each.kind == "record" and each.name and (*path, PICKLED_MODULES) in held
        }
        for path in self.modules:
            if self._is_part(path):
                self.children.setdefault(path[:-2], []).append(path)
        for path, leaf in self.tree.items():
            self._add_leaf(path, leaf)
        for path in held:
            self._add_hooks(path)

    def _is_part(self, path: Path) -> bool:
        return len(path) > 1 and path[-2] == PICKLED_MODULES and path[:-2] in self.modules

    def _add_leaf(self, path: Path, leaf: Leaf | ValueLeaf) -> None:
        self._add_hooks(path)
        if isinstance(leaf, ValueLeaf):
            # A part that is not a separate module: the same object as another one, a scripted module.
            if leaf.value is not None and self._is_part(path):
                self.opaque.add(path[:-2])
        elif leaf.role == "parameter":
            for end in range(len(path)):
                if path[:end] in self.modules:
                    self.parameters[path[:end]] = self.parameters.get(path[:end], 0) + leaf.size

    def _add_hooks(self, path: Path) -> None:
        for end, step in enumerate(path[:-1]):
            if step.value in _HOOKS and path[:end] in self.modules:
                self.hooked.add(path[:end])

    def roots(self) -> list[Path]:
        """Return the modules that are not a part of another one."""
        return [path for path in self.modules if not self._is_part(path)]

    def name(self, path: Path) -> str:
        """Return a module's name: its path without the dicts of modules."""
        return display(tuple(step for step in path if step != PICKLED_MODULES))

    def layer(self, path: Path, shape: Extents | None, depth: int = 0) -> tuple[ArchitectureLayer, Any]:
        """Return a module and the shape of its output with the batch, None if unknown."""
        cls, name = self.modules[path], self.name(path)
        if name in self.shapes:
            self.used.add(name)
            shape = (1, *self.shapes[name])
            self.given.append((name, shape[1:]))
        elif shape is None and not depth:
            shape = self._first_size(path)
        own = cls.startswith(TORCH_CLASSES)
        kind = cls.rpartition(".")[2]
        module = TorchModule(self.tree, path, kind if own else "")
        result, below, flow = self._computed(module, shape, depth)
        if path in self.hooked:
            self.notes.append(f"{name or kind} has forward hooks, whose code is not in the file")
            result = None
        layer = ArchitectureLayer(
            path=name,
            kind=kind,
            cls=cls,
            known=own,
            detail=_torch_detail(module) if own else "",
            parameters=self.parameters.get(path, 0),
            output=None if result is None else result.shape[1:],
            macs=None if result is None else result.macs,
            flow=flow,
            below=below,
        )
        return layer, None if result is None or kind in _TUPLES else result.shape

    def _computed(
        self, module: TorchModule, shape: Extents | None, depth: int
    ) -> tuple[TorchOutput | None, tuple[ArchitectureLayer, ...], Flow]:
        """Return the output of a module, its parts, and how they relate."""
        parts = self.children.get(module.path, []) if depth < _DEEPEST else []
        # A list has an input only where a torch class applies its parts in order (TransformerEncoder).
        applied = module.cls == "Sequential" or (module.cls == "ModuleList" and shape is not None)
        if applied and module.path not in self.opaque:
            return self._sequence(module, parts, shape, depth)
        inputs: Mapping[str, Extents] = {}
        result = None
        if shape is not None and module.cls:
            result, inputs = self._apply(module, shape)
        below = []
        for part in parts:
            given = inputs.get(str(part[-1].value))
            below.append(self.layer(part, given, depth + 1)[0])
        if result is not None and inputs:
            macs = [each.macs for each in below]
            total = None if None in macs else sum(each or 0 for each in macs)
            result = None if total is None else result._replace(macs=result.macs + total)
        return result, tuple(below), "parts"

    def _sequence(
        self, module: TorchModule, parts: Sequence[Path], shape: Extents | None, depth: int
    ) -> tuple[TorchOutput | None, tuple[ArchitectureLayer, ...], Flow]:
        below: list[ArchitectureLayer] = []
        value, total = shape, (0 if shape is not None else None)
        for part in parts:
            given = None if self.modules[part].rpartition(".")[2] in _LISTS else value
            layer, value = self.layer(part, given, depth + 1)
            below.append(layer)
            total = None if total is None or layer.macs is None else total + layer.macs
        if value is None or total is None or len(parts) < len(self.children.get(module.path, ())):
            return None, tuple(below), "chain"
        return TorchOutput(value, total), tuple(below), "chain"

    def _apply(self, module: TorchModule, shape: Extents) -> tuple[TorchOutput | None, Mapping[str, Extents]]:
        """Return a torch layer's output, and the inputs of its parts by name."""
        known = tuple(extent for extent in shape if extent is not None)
        try:
            if module.cls in _ENCODERS:
                return _encode(self, module, known)
            rule = torch_rule(module.cls)
            return (None if rule is None else rule(module, known)), {}
        except (UnknownShapeError, IndexError, ValueError, ZeroDivisionError):
            self.misfit(module, shape)
            return None, {}

    def misfit(self, module: TorchModule, shape: Extents) -> None:
        """Raise UsageError if the shapes are the user's and do not fit; note it otherwise."""
        name, what = self.name(module.path), f"{module.cls} {_torch_detail(module)}".strip()
        sentence = f"{what} cannot be applied to {format_extents(shape[1:])}"
        if self.shapes:
            raise UsageError(sentence, path=name or None, hint="check --input-shape")
        self.notes.append(f"{name}: {sentence}")

    def _first_size(self, path: Path) -> Extents | None:
        """Return the input of a chain that begins with a dense layer: as many features as it has inputs."""
        here = path
        while self.modules[here] == f"{TORCH_CLASSES}container.Sequential" and self.children.get(here):
            here = self.children[here][0]
        if here == path or self.modules[here] != f"{TORCH_CLASSES}linear.Linear":
            return None
        size = TorchModule(self.tree, here, "Linear").value("in_features")
        if type(size) is not int:
            return None
        self.assumed.append(f"input [{size}], the size of {self.name(here)}")
        self.given.append((self.name(path), (size,)))
        return (1, size)


_TUPLES = frozenset(("LSTM", "GRU", "RNN", "LSTMCell", "MultiheadAttention"))
_ENCODERS = frozenset(("TransformerEncoder", "TransformerEncoderLayer"))


def _encode(
    reader: _TorchReader, module: TorchModule, shape: tuple[int, ...]
) -> tuple[TorchOutput, Mapping[str, Extents]]:
    """Return the output of a transformer encoder, and the inputs of its parts."""
    require_fit(len(shape) == 3)
    if module.cls == "TransformerEncoder":
        return TorchOutput(shape), {"layers": shape, "norm": shape}
    linear = next(
        (part for part in reader.children.get(module.path, ()) if part[-1].value == "linear1"), None
    )
    require_fit(linear is not None)
    wide = (*shape[:-1], TorchModule(module.tree, linear or (), "Linear").size("out_features"))
    names = ("self_attn", "linear1", "norm1", "norm2", "dropout1", "dropout2")
    return TorchOutput(shape), {**dict.fromkeys(names, shape), "linear2": wide, "dropout": wide}


# Settings as text.

# Settings that are shown if they differ from the default of the framework, by name.
_SHOWN_SETTINGS: Mapping[str, tuple[Any, str]] = {
    "stride": (1, "stride {}"),
    "padding": (0, "padding {}"),
    "dilation": (1, "dilation {}"),
    "groups": (1, "groups {}"),
    "padding_mode": ("zeros", "{} padding"),
    "eps": (1e-5, "eps {}"),
    "p": (None, "p {}"),
    "num_groups": (None, "{} groups"),
    "num_heads": (None, "{} heads"),
    "num_layers": (1, "{} layers"),
    "bidirectional": (False, "bidirectional"),
    "batch_first": (None, ""),
    "negative_slope": (0.01, "slope {}"),
    "alpha": (1.0, "alpha {}"),
    "ceil_mode": (False, "ceil"),
    "output_size": (None, "to {}"),
    "scale_factor": (None, "x{}"),
    "size": (None, "to {}"),
    "start_dim": (1, "from axis {}"),
    "end_dim": (-1, "to axis {}"),
}
_SIZES = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
    ("num_embeddings", "embedding_dim"),
)


def _torch_detail(module: TorchModule) -> str:
    """Return a module's sizes and its settings other than the defaults."""
    words = []
    for taken, made in _SIZES:
        sizes = [module.value(each) for each in (taken, made)]
        if all(type(each) is int for each in sizes):
            words.append(
                f"{sizes[0]} -> {sizes[1]}" if taken != "num_embeddings" else f"{sizes[0]} x {sizes[1]}"
            )
    kernel = module.value("kernel_size")
    if kernel is not None:
        rank = int(module.cls[-2]) if re.search(r"[123]d\Z", module.cls) else 1
        words.append(_window_text((kernel,) * rank if isinstance(kernel, int) else kernel))
    width = module.value("embed_dim")
    words += [f"{width} features"] if type(width) is int else []
    for name, (default, text) in _SHOWN_SETTINGS.items():
        value = module.value(name)
        if value is None or value == () or not text or _is_default(value, default):
            continue
        if name == "stride" and kernel is not None and _axes(value) == _axes(kernel):
            continue
        words.append(text.format(_axes_text(value)))
    return ", ".join(words)


def _axes(value: Any) -> Any:
    """Return one number for a tuple of equal ones."""
    equal = isinstance(value, tuple) and value and all(each == value[0] for each in value)
    return value[0] if equal else value


def _is_default(value: Any, default: Any) -> bool:
    return default is not None and _axes(value) == default


def _axes_text(value: Any) -> str:
    value = _axes(value)
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return clean(text)[:_WORD]


def _window_text(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return clean(text)[:_WORD]


_WORD = 40


# Keras models: the configuration lists layers, settings, the graph, and often shapes (keras/src/models,
# keras/src/layers). Shapes have no batch axis; an extent of any length is None.

_MODELS = ("Sequential", "Functional", "Model")
_KerasReference = tuple[str, int, int]


def _describe_keras(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.formats.keras_tree import config_document

    document = config_document(checkpoint.format, checkpoint.path)
    if document is None:
        return ()
    reader = _KerasReader(checkpoint.tree, shapes)
    outputs = (shapes[""],) if "" in shapes else ()
    reader.used |= {""} & set(shapes)
    if outputs:
        reader.inputs.append(("", outputs[0]))
    root, _ = reader.call(document, "", [*outputs], 0)
    if reader.count > _MOST_LAYERS:
        return ()
    _require_used(shapes, reader.used, (layer.path for layer in walk_layers(root)))
    return (Architecture("Keras configuration", root, tuple(reader.inputs), notes=tuple(reader.notes)),)


def walk_layers(layer: ArchitectureLayer) -> Iterator[ArchitectureLayer]:
    """Yield a layer and its parts at any depth."""
    yield layer
    for each in layer.below:
        yield from walk_layers(each)


@dataclass
class _KerasReader:
    """Reads one configuration; `shapes` are input shapes by layer path."""

    tree: Tree
    shapes: Mapping[str, Extents]
    sums: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    inputs: list[tuple[str, Extents]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        """Count the parameters under each path."""
        for path, leaf in self.tree.tensors():
            if leaf.role == "parameter":
                steps = self.tree.names[path].split("/")
                for end in range(len(steps)):
                    name = "/".join(steps[:end])
                    self.sums[name] = self.sums.get(name, 0) + leaf.size

    def call(
        self, document: Mapping[str, Any], path: str, given: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        """Return a layer or model, and the shapes of its outputs; None for unknown ones."""
        config = config_of(dict(document))
        cls, settings = str(config.cls or "?"), config.settings
        own = not is_foreign(document) and (_is_listed(document) or class_from_name(snake_case(cls)) == cls)
        self.count += 1
        if path in self.shapes and path:
            self.used.add(path)
            given = [self.shapes[path]]
            self.inputs.append((path, self.shapes[path]))
        if own and cls in _MODELS and isinstance(settings.get("layers"), list) and depth < _DEEPEST:
            return self._model(document, path, given, depth)
        result = self._apply(cls, settings, given, path) if own else None
        layer = ArchitectureLayer(
            path=path,
            kind=cls,
            cls=_full_class(document, cls),
            known=own,
            detail=_keras_detail(settings),
            activation=_keras_activation(cls, settings),
            parameters=self.sums.get(path, 0),
            output=None if result is None else result.outputs[0],
            macs=None if result is None else result.macs,
        )
        return layer, () if result is None else result.outputs

    def _apply(
        self, cls: str, settings: Mapping[str, Any], given: Sequence[Extents | None], path: str
    ) -> KerasOutput | None:
        if cls == _INPUT:
            shape = given[0] if given else _input_shape(settings)
            return None if shape is None else KerasOutput((shape,))
        known = tuple(each for each in given if each is not None)
        known = known or tuple(each for each in [_input_shape(settings)] if each is not None)
        rule = keras_rule(cls)
        if rule is None or not known or len(known) < len(given):
            return None
        try:
            return rule(KerasCall(cls, settings, known))
        except (UnknownShapeError, IndexError, ValueError, ZeroDivisionError, TypeError):
            if self.shapes:
                shown = " and ".join(map(format_extents, known))
                raise UsageError(
                    f"{cls} cannot be applied to {shown}", path=path or None, hint="check --input-shape"
                ) from None
            return None

    def _model(
        self, document: Mapping[str, Any], path: str, given: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        config = config_of(dict(document))
        entries = [each for each in config.settings["layers"] if isinstance(each, dict)]
        chain = config.cls == "Sequential"
        reading = _KerasModelReader(self, path, depth)
        outputs = reading.sequence(config, entries, given) if chain else reading.graph(config, entries, given)
        macs = [layer.macs for layer in reading.layers]
        layer = ArchitectureLayer(
            path=path,
            kind=str(config.cls),
            cls=_full_class(document, str(config.cls)),
            parameters=self.sums.get(path, 0),
            output=outputs[0] if len(outputs) == 1 else None,
            macs=None if None in macs else sum(each or 0 for each in macs),
            flow="graph" if any(each.inputs for each in reading.layers) else "chain",
            below=tuple(reading.layers),
        )
        return layer, outputs


@dataclass
class _KerasModelReader:
    """Reads the layers of one Sequential or functional model."""

    reader: _KerasReader
    path: str
    depth: int
    layers: list[ArchitectureLayer] = field(default_factory=list)
    values: dict[_KerasReference, Extents | None] = field(default_factory=dict)
    recorded: dict[_KerasReference, Extents] = field(default_factory=dict)

    def below(self, name: str) -> str:
        """Return the path of a layer."""
        return f"{self.path}/{name}" if self.path else name

    def sequence(
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], given: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a Sequential model; return its output."""
        value = given[0] if given else _batch_shape(config.settings.get("build_input_shape"))
        for number, entry in enumerate(entries):
            inner = config_of(entry)
            recorded = entry.get("build_config")
            if value is None and isinstance(recorded, dict):
                value = _batch_shape(recorded.get("input_shape"))
                if value is not None and self.layers and self.layers[-1].output is None:
                    self.layers[-1] = replace(self.layers[-1], output=value)
            self._note_input(number, inner, value)
            layer, outputs = self.reader.call(
                entry, self.below(_layer_name(entry)), [] if value is None else [value], self.depth + 1
            )
            if layer.kind == _INPUT and outputs and not self.depth:
                self.reader.inputs.append((layer.name, outputs[0] or ()))
            self.layers.append(layer)
            value = outputs[0] if outputs else None
        return (value,)

    def _note_input(self, number: int, inner: KerasConfig, value: Extents | None) -> None:
        """Record the input of a model without an input layer, which its first layer or its build states."""
        shape = value if value is not None else _input_shape(inner.settings)
        if number or self.depth or inner.cls == _INPUT or shape is None:
            return
        if not any(name == "" for name, _ in self.reader.inputs):
            self.reader.inputs.append(("", shape))

    def graph(
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], given: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a functional model in the order of their use; return its outputs."""
        inputs = [each[0] for each in list_references(config.settings.get("input_layers"))]
        waiting = []
        for entry in entries:
            nodes = entry.get("inbound_nodes")
            calls = [list_references(node) for node in nodes] if isinstance(nodes, list) else []
            for node in nodes if isinstance(nodes, list) else []:
                self.recorded.update(_recorded_shapes(node))
            waiting.append((entry, calls))
        places: dict[str, int] = {}
        while waiting:
            later = []
            for entry, calls in waiting:
                name = _layer_name(entry)
                if all(ref in self.values for refs in calls for ref in refs):
                    outer = given[inputs.index(name)] if name in inputs[: len(given)] else None
                    self._node(entry, calls, outer, places)
                else:
                    later.append((entry, calls))
            if len(later) == len(waiting):
                self._unconnected(later)
                break
            waiting = later
        ends = list_references(config.settings.get("output_layers"))
        return tuple(self.values.get(ref) for ref in ends)

    def _unconnected(self, later: Sequence[tuple[dict[str, Any], Any]]) -> None:
        """Add layers whose inputs are not listed, or that are called more than once in a circle."""
        for entry, _ in later:
            name = self.below(_layer_name(entry))
            self.layers.append(replace(self.reader.call(entry, name, [None], self.depth + 1)[0], macs=None))

    def _node(
        self,
        entry: dict[str, Any],
        calls: Sequence[Sequence[_KerasReference]],
        outer: Extents | None,
        places: dict[str, int],
    ) -> None:
        """Add one layer with the shapes of all its calls."""
        name = _layer_name(entry)
        layer, macs = None, []
        for number, refs in enumerate(calls or [()]):
            shapes = [self.values.get(ref) for ref in refs]
            made, outputs = self.reader.call(
                entry, self.below(name), shapes if refs else [outer] if outer else [], self.depth + 1
            )
            if not calls and not self.depth and outputs:
                self.reader.inputs.append((name, outputs[0] or ()))
            known = outputs or (self.recorded.get((name, number, 0)),)
            for place, value in enumerate(known):
                self.values[name, number, place] = value
            macs.append(made.macs)
            layer = layer or (made if made.output is not None else replace(made, output=known[0]))
        assert layer is not None  # noqa: S101 - there is at least one call
        sources = list(dict.fromkeys(ref[0] for refs in calls for ref in refs))
        last = self.layers[-1].name if self.layers else ""
        listed = () if sources in ([], [last]) else tuple(map(self.below, sources))
        detail = f"called {len(calls)} times" if len(calls) > 1 else ""
        total = None if None in macs else sum(each or 0 for each in macs)
        words = ", ".join(filter(None, (layer.detail, detail)))
        self.layers.append(replace(layer, inputs=listed, macs=total, detail=words))
        places[name] = len(self.layers) - 1


def _layer_name(entry: Mapping[str, Any]) -> str:
    config = config_of(dict(entry))
    return str(entry.get("name") or config.name or snake_case(str(config.cls)))


def _is_listed(document: Mapping[str, Any]) -> bool:
    """Return whether the configuration names the module of the class (Keras 3)."""
    return isinstance(document.get("module"), str)


def _full_class(document: Mapping[str, Any], cls: str) -> str:
    module, registered = document.get("module"), document.get("registered_name")
    if isinstance(registered, str) and ">" in registered:
        return registered
    return f"{module}.{cls}" if isinstance(module, str) and module else cls


def _batch_shape(shape: Any) -> Extents | None:
    """Return a recorded shape without its first axis, the batch."""
    if not isinstance(shape, list) or not shape:
        return None
    if not all(each is None or (type(each) is int and each > 0) for each in shape[1:]):
        return None
    return tuple(shape[1:])


def _input_shape(settings: Mapping[str, Any]) -> Extents | None:
    return _batch_shape(settings.get("batch_shape") or settings.get("batch_input_shape"))


def _recorded_shapes(node: Any) -> dict[_KerasReference, Extents]:
    """Return the shapes of a node's inputs that Keras 3 writes beside their origin."""
    found: dict[_KerasReference, Extents] = {}
    waiting = [node]
    while waiting and len(found) < _MOST_LAYERS:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            history, shape = value.get("keras_history"), _batch_shape(value.get("shape"))
            if isinstance(history, list) and shape is not None:
                found.update(dict.fromkeys(list_references(value), shape))
            else:
                waiting += value.values()
    return found


def _keras_detail(settings: Mapping[str, Any]) -> str:
    """Return a layer's sizes and its settings other than the defaults."""
    words = []
    for name, text in (("units", "{} units"), ("filters", "{} filters")):
        if type(value := settings.get(name)) is int:
            words.append(text.format(value))
    windows = (settings.get(name) for name in ("kernel_size", "pool_size"))
    words += [_window_text(tuple(value)) for value in windows if isinstance(value, list)]
    window = settings.get("pool_size")
    strides = settings.get("strides")
    if isinstance(strides, list) and strides != window and _axes(tuple(strides)) != 1:
        words.append(f"stride {_axes_text(tuple(strides))}")
    for name, default, text in _KERAS_SETTINGS:
        value = settings.get(name)
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and not isinstance(value, dict) and _axes(value) != default:
            words.append(text.format(_axes_text(value)))
    inner = settings.get("layer")
    if isinstance(inner, dict):
        own = config_of(inner)
        words.append(f"{own.cls} {_keras_detail(own.settings)}".strip())
    return ", ".join(words)


def _keras_activation(cls: str, settings: Mapping[str, Any]) -> str:
    """Return a layer's activation; empty for the default of its class."""
    activation = settings.get("activation")
    default = "tanh" if cls in CELLS else "linear"
    return clean(activation)[:_WORD] if isinstance(activation, str) and activation != default else ""


_KERAS_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("padding", "valid", "padding {}"),
    ("dilation_rate", 1, "dilation {}"),
    ("groups", 1, "groups {}"),
    ("data_format", "channels_last", "{}"),
    ("depth_multiplier", 1, "multiplier {}"),
    ("epsilon", 1e-3, "eps {}"),
    ("rate", None, "rate {}"),
    ("target_shape", None, "to {}"),
    ("dims", None, "axes {}"),
    ("n", None, "{} times"),
    ("input_dim", None, "{} entries"),
    ("output_dim", None, "{} features"),
    ("num_heads", None, "{} heads"),
    ("key_dim", None, "{} features"),
    ("equation", None, "{}"),
    ("merge_mode", "concat", "merge {}"),
    ("negative_slope", 0, "slope {}"),
)


# Recorded computations: the code of a TorchScript archive and the graph of an ONNX model are evaluated on
# shapes alone (libraries/script_orders.py, activation_orders.py). Shapes include the batch.

_CONTAINERS = frozenset(("Sequential", "ModuleList", "ModuleDict"))
_GIVEN = "input"
# A part of a class name that distinguishes copies of a class.
_MANGLED = re.compile(r"\.___torch_mangle_[0-9]+")


def _describe_script(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.libraries.script_orders import trace_script

    given = _whole_shapes(shapes)
    found = trace_script(checkpoint, tuple(given.values()))
    if found is None:
        if shapes:
            raise UsageError("the TorchScript code cannot be evaluated for this input", file=checkpoint.path)
        return ()
    inputs, call = found
    root = _script_layer(call, "", checkpoint.tree)
    named = tuple((f"input {number}", shape) for number, shape in enumerate(inputs))
    return (Architecture("TorchScript code", root, named, batch=True),)


def _whole_shapes(shapes: Mapping[str, Extents]) -> dict[str, tuple[int, ...]]:
    """Return the user's shapes with a batch of 1."""
    return {name: (1, *(extent or 1 for extent in shape)) for name, shape in shapes.items()}


def _script_layer(call: ScriptCall, name: str, tree: Tree) -> ArchitectureLayer:
    """Return a call as a layer; a torch module's own code is not listed."""
    from ckpttool.libraries.script_orders import is_own_module

    own = is_own_module(call.cls)
    inner = call.below if call.kind in _CONTAINERS or not own else []
    names = _call_names(inner, name)
    below = []
    for number, (each, path) in enumerate(zip(inner, names, strict=True)):
        layer = _script_layer(each, path, tree)
        below.append(replace(layer, inputs=_sources(each.inputs, number, names)))
    size = len(call.path)
    trained = (
        leaf.size for path, leaf in tree.tensors() if path[:size] == call.path and leaf.role == "parameter"
    )
    return ArchitectureLayer(
        path=name,
        kind=call.kind,
        cls=_MANGLED.sub("", call.cls).removeprefix("__torch__."),
        parameters=sum(trained) if call.path or not name else 0,
        output=call.output,
        macs=call.macs,
        flow="graph" if any(each.inputs for each in below) else "chain",
        below=tuple(below),
    )


def _call_names(calls: Sequence[ScriptCall], above: str) -> list[str]:
    """Return a path for each call: the module's, or a function's name and number."""
    found = []
    for number, call in enumerate(calls):
        name = "/".join(str(step.value) for step in call.path)
        found.append(name or "/".join(filter(None, (above, f"{call.kind}_{number}"))))
    return found


def _sources(inputs: Sequence[int], number: int, names: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the operations whose results are used, unless only that of the one before."""
    if list(inputs) in ([], [number - 1]):
        return ()
    return tuple(names[each] if each >= 0 else _GIVEN for each in inputs)


def _describe_onnx(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.libraries.activation_orders import trace_onnx

    details = checkpoint.details.get("inputs")
    names = list(details) if isinstance(details, Mapping) else []
    given = _whole_shapes(shapes)
    if "" in given and len(names) == 1:
        given[names[0]] = given.pop("")
    found = trace_onnx(checkpoint, given)
    _require_used(given, {*names}, iter(names))
    if found is None:
        return ()
    layers = _OnnxLayers(checkpoint.tree, found.calls)
    below = layers.group(range(len(found.calls)), 0)
    root = _sum_layers("", str(checkpoint.details.get("name") or "graph"), below)
    assumed = ("extents that are not fixed are 1",) if found.assumed else ()
    return (Architecture("ONNX graph", root, found.inputs, batch=True, assumed=assumed),)


def _sum_layers(path: str, kind: str, below: Sequence[ArchitectureLayer]) -> ArchitectureLayer:
    """Return a group of layers in their recorded order."""
    macs = [layer.macs for layer in below]
    linked = any(layer.inputs or layer.flow == "graph" for layer in below)
    return ArchitectureLayer(
        path=path,
        kind=kind,
        cls="",
        parameters=sum(layer.parameters for layer in below),
        output=below[-1].output if below else None,
        macs=None if None in macs else sum(each or 0 for each in macs),
        flow="graph" if linked else "chain",
        below=tuple(below),
    )


class _OnnxLayers:
    """The operators of a graph as layers, grouped by the folders in their names (`/layer1/conv1/Conv`)."""

    def __init__(self, tree: Tree, calls: Sequence[TracedCall]) -> None:
        self.tree, self.calls = tree, calls
        names = (call.name.strip("/") or f"{call.kind}_{number}" for number, call in enumerate(calls))
        self.steps = [[step for step in name.split("/") if step][:_DEEPEST] for name in names]
        self.names = ["/".join(steps[:-1] or steps) for steps in self.steps]

    def group(self, numbers: Sequence[int], depth: int) -> list[ArchitectureLayer]:
        """Return the operators with these positions as layers and groups of layers."""
        found: list[ArchitectureLayer] = []
        start = 0
        while start < len(numbers):
            steps = self.steps[numbers[start]]
            end = start + 1
            if len(steps) > depth + 1:
                while end < len(numbers) and self.steps[numbers[end]][: depth + 1] == steps[: depth + 1]:
                    end += 1
            inside = numbers[start:end]
            name = "/".join(steps[: depth + 1])
            if len(inside) == 1:
                found.append(self._layer(inside[0], name))
            else:
                found.append(_sum_layers(name, "block", self.group(inside, depth + 1)))
            start = end
        return found

    def _layer(self, number: int, path: str) -> ArchitectureLayer:
        call = self.calls[number]
        held = (self.tree.get(weight) for weight in call.weights)
        return ArchitectureLayer(
            path=path,
            kind=call.kind,
            cls=call.kind,
            parameters=sum(leaf.size for leaf in held if isinstance(leaf, Leaf) and leaf.role == "parameter"),
            output=call.output,
            macs=call.macs,
            inputs=_sources(call.inputs, number, self.names),
        )
