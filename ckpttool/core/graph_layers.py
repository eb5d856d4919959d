"""Group the operations of a program's graph into the layers that its names show, independent of framework.

The syntax is Python 3.7's, because the processes of users' models import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpttool.core import deferred

# TensorFlow's names of the functions that a signature calls.
_FUNCTION = deferred.compile(r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
# A variable is read under the name of the operation that uses it: dense/MatMul/ReadVariableOp.
_READS = deferred.compile(r"^(.*?)/?[^/]+/ReadVariableOp(?:_\d+)?$")
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

    `before` is the value that the layer passes to its activation, "" if it includes none.
    """

    def __init__(self, path: str, operations: list[GraphOperation]) -> None:
        self.path = path
        self.operations = operations
        self.cls = ""
        self.takes = self.gives = self.before = ""
        self.held: list[str] = []

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes of the operation that names the class."""
        main = [each for each in self.operations if each.kind == self.cls] or self.operations
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
        self._computed = [each for each in self._operations if not self._fold(each)]
        self._outputs = [self._original(name) for name in outputs]

    def layers(self) -> list[GraphLayer]:
        """Return the layers with weights, and operations that are layers without."""
        groups: dict[str, list[GraphOperation]] = {}
        for each in self._computed:
            path = self._layer_scope(each)
            if not path and (self._weights(each) or _ALONE.fullmatch(each.kind)):
                path = each.name
            if path:
                groups.setdefault(path, []).append(each)
        found = [self._layer(path, operations) for path, operations in groups.items()]
        return [each for each in self._with_biases(found) if each.takes and each.gives]

    def _original(self, name: str) -> str:
        """Return the value that a value repeats."""
        while name in self._same:
            name = self._same[name]
        return name

    def _fold(self, each: GraphOperation) -> bool:
        """Return whether an operation computes nothing from the inputs, and record its values."""
        if each.kind == "Placeholder":
            return True
        takes = [self._original(name) for name in each.takes]
        if takes and each.kind == "Identity":
            self._same[each.gives[0]] = takes[0]
        fixed = all(name in self._fixed for name in takes)
        if fixed:
            held = set().union(*[self._fixed[name] for name in takes])
            read = _READS.match(each.name)
            if held and read is not None and read.group(1):
                self._scopes.add(_STEPS.sub("", read.group(1)))
            for name in each.gives:
                self._fixed.setdefault(name, held)
        elif each.kind.endswith("While") and any(self._fixed.get(name) for name in takes):
            self._scopes.add(_STEPS.sub("", each.name))
        return fixed or each.kind == "Identity"

    def _weights(self, each: GraphOperation) -> list[str]:
        """Return the weights that an operation uses, in order."""
        found: list[str] = []
        for name in each.takes:
            found += sorted(self._fixed.get(self._original(name), ()))
        return found

    def _layer_scope(self, each: GraphOperation) -> str:
        """Return the innermost scope of a layer that contains the operation, "" if none does."""
        steps = each.name.split("/")
        for end in range(len(steps), 0, -1):
            if "/".join(steps[:end]) in self._scopes:
                return "/".join(steps[:end])
        return ""

    def _layer(self, path: str, operations: list[GraphOperation]) -> GraphLayer:
        found = GraphLayer(path, operations)
        inside = {name for each in operations for name in each.gives}
        taken = [self._original(name) for each in operations for name in each.takes]
        outside = [name for name in taken if name not in inside and name not in self._fixed]
        found.takes = outside[0] if outside else ""
        used = self._used_elsewhere(operations)
        given = [name for each in operations for name in each.gives if name in used]
        found.gives = given[-1] if given else ""
        for each in operations:
            for name in self._weights(each):
                if name not in found.held:
                    found.held.append(name)
        found.cls = _layer_class(operations, len(found.held))
        last = [each for each in operations if self._weights(each)]
        if last and found.cls in (*_CONVOLUTIONS, *_PRODUCTS) and last[-1].gives[0] != found.gives:
            found.before = last[-1].gives[0]
        return found

    def _used_elsewhere(self, operations: list[GraphOperation]) -> set[str]:
        mine = {id(each) for each in operations}
        others = [each for each in self._computed if id(each) not in mine]
        return {self._original(name) for each in others for name in each.takes} | {*self._outputs}

    def _with_biases(self, layers: list[GraphLayer]) -> Iterator[GraphLayer]:
        """Yield the layers; an addition of a vector belongs to the product before it."""
        after: dict[str, list[GraphLayer]] = {}
        for each in layers:
            after.setdefault(each.takes, []).append(each)
        merged: set[int] = set()
        for each in layers:
            if id(each) in merged:
                continue
            users = after.get(each.gives, [])
            alone = len(each.operations) == 1 and each.cls in (*_CONVOLUTIONS, *_PRODUCTS)
            if alone and len(users) == 1 and users[0].cls in ("AddV2", "Add", "BiasAdd") and users[0].held:
                merged.add(id(users[0]))
                each.held += users[0].held
                each.gives = users[0].gives
            yield each


def _layer_class(operations: list[GraphOperation], weights: int) -> str:
    """Return the kind of layer that a group of operations is."""
    kinds = [each.kind for each in operations]
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
    return "BatchNorm" if weights > 1 and any("batchnorm" in each.name for each in operations) else kinds[0]
