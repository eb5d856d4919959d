"""Layers of recorded computations: the code of a TorchScript archive, the graph of an ONNX model or a Saver.

All are read as a graph, whose shapes are traced (ckpttool.graphs). Shapes include the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import Tree
from ckpttool.libraries.recognize import SAVER_FORMATS
from ckpttool.listing.input_shapes import require_shapes_used, with_batch
from ckpttool.listing.layers import DEEPEST, LISTS, Architecture, ArchitectureLayer, Extents, sum_macs

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.graphs.shapes import TracedCall


_TORCH_MODULES = "torch.nn.modules."
_INPUT = "input"
# A part of a class name that distinguishes copies of a class.
_MANGLED = deferred.compile(r"\.___torch_mangle_[0-9]+")


def describe_script(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    """Return the models of the file with their layers; `shapes` are input shapes by layer path."""
    from ckpttool.graphs.shapes import trace_graph
    from ckpttool.graphs.torchscript import read_for_shapes
    from ckpttool.graphs.torchscript_code import traced_inputs

    inputs_by_name = with_batch(shapes)
    # The inputs of a script have no names, only an order.
    names = [""] if "" in inputs_by_name else [f"input {number}" for number in range(len(inputs_by_name))]
    if inputs_by_name.keys() - set(names):
        hint = "name the inputs in their order: --input-shape 'input 0=N,N,...'"
        raise UsageError(f"no input {next(iter(inputs_by_name.keys() - set(names)))!r}", hint=hint)
    inputs = [inputs_by_name[name] for name in names if name in inputs_by_name]
    inputs = inputs or [leaf.shape for leaf in traced_inputs(checkpoint)]
    graph = read_for_shapes(checkpoint, [inputs] if inputs else [])
    trace = None if graph is None else trace_graph(graph, {})
    if trace is None:
        if shapes:
            raise UsageError(
                "the TorchScript code cannot be evaluated for this input",
                file=checkpoint.path,
                hint="check --input-shape; code that depends on values cannot be evaluated",
            )
        return ()
    tree = checkpoint.tree
    modules = {
        "/".join(str(step.value) for step in path): _MANGLED.sub("", container.name).removeprefix(
            "__torch__."
        )
        for path, container in tree.containers.items()
        if container.kind == "record" and container.name
    }
    root = _GraphLayers(tree, trace.calls, modules).root("", trace.outputs[0] if trace.outputs else None)
    named = tuple((f"input {number}", shape) for number, shape in enumerate(inputs))
    return (Architecture("TorchScript code", root, named, batch=True),)


def describe_graph(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    """Return the models of the file with their layers; `shapes` are input shapes by layer path."""
    from ckpttool.graphs.graph import read_graph
    from ckpttool.graphs.shapes import trace_graph

    graph = read_graph(checkpoint)
    if graph is None:
        return ()
    saver = checkpoint.format in SAVER_FORMATS
    details = checkpoint.details.get("inputs")
    names = list(details) if isinstance(details, Mapping) else [value.name for value in graph.inputs if saver]
    inputs_by_name = with_batch(shapes)
    if "" in shapes and len(names) > 1:
        numbers = ",".join(map(str, shapes[""]))
        options = " ".join(f"--input-shape '{name}={numbers}'" for name in names)
        raise UsageError(f"the graph has {len(names)} inputs", file=checkpoint.path, hint=options)
    if "" in inputs_by_name and names:
        inputs_by_name[names[0]] = inputs_by_name.pop("")
    trace = trace_graph(graph, inputs_by_name, open_inputs=saver)
    require_shapes_used(inputs_by_name, {*names}, iter(names))
    if trace is None:
        return ()
    kind = "program" if saver else str(checkpoint.details.get("name") or "graph")
    output = trace.outputs[0] if len(trace.outputs) == 1 else None
    root = _GraphLayers(checkpoint.tree, trace.calls, {}).root(kind, output)
    assumed = ("extents that are not fixed are 1",) if trace.assumed else ()
    # A Saver's graph names no results: these are the ends of its networks.
    ends = abbreviate_list([value.name for value in graph.outputs], 8)
    notes = (f"ends of networks: {ends}",) if saver else ()
    source = "Saver's graph" if saver else "ONNX graph"
    return (Architecture(source, root, trace.inputs, batch=True, assumed=assumed, notes=notes),)


class _GraphLayers:
    """The operations of a graph as layers, grouped by their modules.

    `modules` are the classes of modules by path; without them, the folders in the names of operations are
    modules of an unknown class (`/layer1/conv1/Conv`).
    """

    def __init__(self, tree: Tree, calls: Sequence[TracedCall], modules: Mapping[str, str]) -> None:
        self.calls, self.modules = calls, modules
        self.sizes = {
            "/".join(str(step.value) for step in path): leaf.size
            for path, leaf in tree.tensors()
            if leaf.role == "parameter"
        }
        # Sums by module: a search among all tensors for each of them would be quadratic.
        self.totals: Counter[str] = Counter()
        for name, size in self.sizes.items():
            for end, character in enumerate(f"/{name}"):
                if character == "/":
                    self.totals[name[: max(end - 1, 0)]] += size
        self.steps: list[tuple[str, ...]] = []
        for number, call in enumerate(calls):
            title = f"{call.kind}_{number}"
            steps = (call.name.strip("/") or title).split("/")
            steps = [*self._called(call.scope), title] if modules else [step for step in steps if step]
            self.steps.append(tuple(steps[:DEEPEST]))

    def _called(self, scope: Sequence[str]) -> Iterator[str]:
        """Yield the steps of a scope; a list of modules is not called itself, only its entries are."""
        start = 0
        for end in range(1, len(scope) + 1):
            if self.modules.get("/".join(scope[:end]), "").rpartition(".")[2] not in LISTS:
                yield "/".join(scope[start:end])
                start = end

    def root(self, kind: str, output: Extents | None) -> ArchitectureLayer:
        """Return the whole model; `kind` is its class if that is not listed."""
        return replace(self._group((), range(len(self.calls)), kind), output=output)

    def _layers(self, numbers: Sequence[int], depth: int) -> Iterator[ArchitectureLayer]:
        """Yield the operations with these positions as layers and groups of layers."""
        runs = [list(run) for _, run in groupby(numbers, lambda number: self._step(number, depth))]
        names = {number: "/".join(self._path(run, depth)) for run in runs for number in run}
        before = _INPUT
        for run in runs:
            sources = (source for number in run for source in self.calls[number].inputs if source not in run)
            listed = tuple(dict.fromkeys(names.get(source, _INPUT) for source in sources))
            layer = self._layer(run, self._path(run, depth))
            yield replace(layer, inputs=() if listed in ((), (before,)) else listed)
            before = layer.path

    def _step(self, number: int, depth: int) -> Any:
        """Return what operations of one module have in common at a level."""
        steps = self.steps[number]
        return steps[: depth + 1] if len(steps) > depth + 1 else number

    def _path(self, run: Sequence[int], depth: int) -> tuple[str, ...]:
        return self.steps[run[0]][: depth + 1]

    def _layer(self, run: Sequence[int], path: tuple[str, ...]) -> ArchitectureLayer:
        call = self.calls[run[0]]
        if "/".join(path) in self.modules or len(run) > 1:
            return self._group(path, run, "block")
        weights = ("/".join(str(step.value) for step in weight) for weight in call.weights)
        return ArchitectureLayer(
            path="/".join(path),
            kind=call.kind,
            cls=call.kind,
            parameters=0 if self.modules else sum(self.sizes.get(weight_name, 0) for weight_name in weights),
            output=call.output,
            macs=call.macs,
        )

    def _group(self, path: tuple[str, ...], run: Sequence[int], kind: str) -> ArchitectureLayer:
        """Return a module with its parts; those of torch's own modules are not listed."""
        name = "/".join(path)
        cls = self.modules.get(name, "")
        below = tuple(self._layers(run, len(path)))
        linked = any(layer.inputs or layer.flow == "graph" for layer in below)
        inside = not cls.startswith(_TORCH_MODULES) or cls.endswith(".Sequential")
        size = self.totals[name] if self.modules else sum(layer.parameters for layer in below)
        return ArchitectureLayer(
            path=name,
            kind=cls.rpartition(".")[2] or kind,
            cls=cls,
            parameters=size,
            output=below[-1].output if below else None,
            macs=sum_macs(layer.macs for layer in below),
            flow="graph" if linked else "chain",
            below=below if inside else (),
        )
