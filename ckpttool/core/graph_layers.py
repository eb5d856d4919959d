"""Group the operations of a program's graph into the layers that its names show, independent of framework.

The syntax is Python 3.7's, because the processes of users' models import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpttool.core import deferred

# TensorFlow's names of the functions that a signature calls.
_FUNCTION = deferred.compile(r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
# A variable is read under the name of the operation that uses it: dense/MatMul/ReadVariableOp; the kernel of
# a convolution over one axis is also reshaped.
_READS = deferred.compile(r"^(.*?)/?(?:(?:convolution|Conv1D)/ExpandDims_1|[^/]+)/ReadVariableOp(?:_\d+)?$")
# Scopes that layers of Keras open for their own steps.
_STEPS = deferred.compile(r"/(?:batchnorm|moments|Tensordot|einsum|while)(?:_\d+)?(?:/.*)?$")
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2")
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMul", "Einsum")
# Operations that are layers without weights.
_ALONE = deferred.compile(
    r"Relu6?|LeakyRelu|Elu|Selu|Tanh|Sigmoid|Softplus|Softmax|MaxPool.*|AvgPool.*|Reshape"
)


class GraphOperation:
    """One operation: names of the values that it takes and gives, and its attributes."""

    def __init__(
        self, name: str, kind: str, takes: Sequence[str], gives: Sequence[str], settings: dict[str, Any]
    ) -> None:
        self.name = _FUNCTION.sub("", name)
        self.kind = kind
        self.takes, self.gives = list(takes), list(gives)
        self.settings = settings


class GraphLayer:
    """Operations that are one layer: its input, output, and the constants that it uses.

    `before` is the value that the layer passes to its activation, "" if it includes none. `states` are what
    a loop over steps receives beside its input.
    """

    def __init__(self, path: str, operations: list[GraphOperation]) -> None:
        self.path = path
        self.operations = operations
        self.cls = ""
        self.takes = self.gives = self.before = ""
        self.states: list[str] = []
        self.stored: list[str] = []

    @property
    def inputs(self) -> list[str]:
        """What the layer receives."""
        return [self.takes, *self.states]

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes of the operation that names the class."""
        main = [operation for operation in self.operations if operation.kind == self.cls] or self.operations
        return main[0].settings


class LayerGrouping:
    """The layers of a graph, in the order of their operations.

    Args:
        operations: in an order in which each value is given before it is taken.
        constants: the names of all constants; `weights` of those that may be weights.
        outputs: the values that the graph returns.
    """

    def __init__(
        self,
        operations: Sequence[GraphOperation],
        constants: set[str],
        weights: set[str],
        outputs: Sequence[str],
    ) -> None:
        self._operations = list(operations)
        self._same: dict[str, str] = {}
        # For each value that depends on constants only: the weights among them.
        self._fixed: dict[str, set[str]] = {name: {name} & weights for name in constants}
        self._scopes: set[str] = set()
        self._computed = [operation for operation in self._operations if not self._fold(operation)]
        self._outputs = [self._original(name) for name in outputs]

    def layers(self) -> list[GraphLayer]:
        """Return the layers with weights, and operations that are layers without."""
        groups: dict[str, list[GraphOperation]] = {}
        for operation in self._computed:
            path = self._layer_scope(operation)
            if not path and (self._weights(operation) or _ALONE.fullmatch(operation.kind)):
                path = operation.name
            if path:
                groups.setdefault(path, []).append(operation)
        layers = [self._layer(path, operations) for path, operations in groups.items()]
        return [layer for layer in self._with_biases(layers) if layer.takes and layer.gives]

    def _original(self, name: str) -> str:
        """Return the value that a value repeats."""
        while name in self._same:
            name = self._same[name]
        return name

    def _fold(self, operation: GraphOperation) -> bool:
        """Return whether an operation computes nothing from the inputs, and record its values."""
        if operation.kind == "Placeholder":
            return True
        takes = [self._original(name) for name in operation.takes]
        if takes and operation.kind == "Identity":
            self._same[operation.gives[0]] = takes[0]
        fixed = all(name in self._fixed for name in takes)
        if fixed:
            names = set().union(*[self._fixed[name] for name in takes])
            read = _READS.match(operation.name)
            if names and read is not None and read.group(1):
                self._scopes.add(_STEPS.sub("", read.group(1)))
            for name in operation.gives:
                self._fixed.setdefault(name, names)
        elif operation.kind.endswith("While") and any(self._fixed.get(name) for name in takes):
            self._scopes.add(_STEPS.sub("", operation.name))
        return fixed or operation.kind == "Identity"

    def _weights(self, operation: GraphOperation) -> list[str]:
        """Return the weights that an operation uses, in order."""
        names: list[str] = []
        for name in operation.takes:
            names += sorted(self._fixed.get(self._original(name), ()))
        return names

    def _layer_scope(self, operation: GraphOperation) -> str:
        """Return the innermost scope of a layer that contains the operation, "" if none does."""
        steps = operation.name.split("/")
        for end in range(len(steps), 0, -1):
            if "/".join(steps[:end]) in self._scopes:
                return "/".join(steps[:end])
        return ""

    def _layer(self, path: str, operations: list[GraphOperation]) -> GraphLayer:
        layer_ = GraphLayer(path, operations)
        inside = {name for operation in operations for name in operation.gives}
        originals = [self._original(name) for operation in operations for name in operation.takes]
        outside = [name for name in originals if name not in inside and name not in self._fixed]
        layer_.takes = outside[0] if outside else ""
        used = self._used_elsewhere(operations)
        outputs = [name for operation in operations for name in operation.gives if name in used]
        layer_.gives = outputs[-1] if outputs else ""
        for operation in operations:
            for name in self._weights(operation):
                if name not in layer_.stored:
                    layer_.stored.append(name)
        layer_.cls = _layer_class(operations, len(layer_.stored))
        if layer_.cls == "RNN":
            layer_.states = [name for name in dict.fromkeys(outside) if name != layer_.takes]
        last = [operation for operation in operations if self._weights(operation)]
        if last and layer_.cls in (*_CONVOLUTIONS, *_PRODUCTS) and last[-1].gives[0] != layer_.gives:
            layer_.before = last[-1].gives[0]
        return layer_

    def _used_elsewhere(self, operations: list[GraphOperation]) -> set[str]:
        mine = {id(operation) for operation in operations}
        others = [operation for operation in self._computed if id(operation) not in mine]
        return {self._original(name) for other in others for name in other.takes} | {*self._outputs}

    def _with_biases(self, layers: list[GraphLayer]) -> Iterator[GraphLayer]:
        """Yield the layers; an addition of a vector belongs to the product before it."""
        after: dict[str, list[GraphLayer]] = {}
        for layer in layers:
            after.setdefault(layer.takes, []).append(layer)
        merged: set[int] = set()
        for layer in layers:
            if id(layer) in merged:
                continue
            users = after.get(layer.gives, [])
            alone = len(layer.operations) == 1 and layer.cls in (*_CONVOLUTIONS, *_PRODUCTS)
            if alone and len(users) == 1 and users[0].cls in ("AddV2", "Add", "BiasAdd") and users[0].stored:
                merged.add(id(users[0]))
                layer.stored += users[0].stored
                layer.gives = users[0].gives
            yield layer


def _layer_class(operations: list[GraphOperation], weights: int) -> str:
    """Return the kind of layer that a group of operations is."""
    kinds = [operation.kind for operation in operations]
    if any(kind.endswith("While") for kind in kinds):
        return "RNN"
    for kind in kinds:
        if kind.startswith("FusedBatchNorm"):
            return "BatchNorm"
    for known in (_CONVOLUTIONS, _PRODUCTS):
        for kind in kinds:
            if kind in known:
                return kind
    if "Rsqrt" in kinds and ("Mean" in kinds or "SquaredDifference" in kinds):
        return "LayerNorm"
    if "GatherV2" in kinds or "ResourceGather" in kinds:
        return "Gather"
    # The factors of a normalization with recorded statistics are computed from constants only.
    return "BatchNorm" if weights > 1 and any("batchnorm" in node.name for node in operations) else kinds[0]
