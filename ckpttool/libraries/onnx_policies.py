"""Layers of ONNX graphs as a PyTorch state_dict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import MappingError, abbreviate_list
from ckpttool.core.kinds import gate_order
from ckpttool.core.tree import Container, Leaf, Path, Tree, key
from ckpttool.graphs import onnx
from ckpttool.graphs.graph import Graph, OperatorNode
from ckpttool.graphs.onnx import module_of_node, split_scope
from ckpttool.graphs.operators import COMBINATIONS, MOVEMENTS, operator_kind
from ckpttool.libraries.activation_orders import with_orders
from ckpttool.mapping.layer_kinds import LayerFacts, LayerOption
from ckpttool.mapping.layers import describe_table
from ckpttool.mapping.rules import (
    KEEP,
    TRANSPOSE,
    BlockOrder,
    Label,
    Move,
    Plan,
    Reshape,
    Rule,
    apply_plan,
    chain_rules,
    slice_rule,
)

_TORCH = deferred.compile(
    r"(?:(.*)[./])?(weight|bias|running_mean|running_var|(?:weight|bias)_[ih]h_l\d+(?:_reverse)?)"
)
_PARTS = deferred.compile(
    r"(?:(.*?)/)?(?:(?:Cast|BiasAdd|MatMul|Add|Conv2D|batchnorm)(?:_\d+)?/)?(?:ReadVariableOp(?:_\d+)?(?::0)?|kernel|bias)"
)
_RECURRENT = {
    op: gate_order(kind, "onnx", "torch")
    for op, kind in (("LSTM", "lstm"), ("GRU", "gru"), ("RNN", "simple_rnn"))
}
_SAME = frozenset(("Identity", "Cast", "Dropout"))
_STATES = frozenset(("Expand", "Concat", "Slice", *_RECURRENT))
_SHAPED = frozenset(("Unsqueeze", "Squeeze", "Reshape"))
# Operators on a recurrent layer's tensors in graphs from exporters without constant folding.
_CUT = frozenset(("Slice", "Concat", "Unsqueeze", "Gather"))
_CELL = deferred.compile(r"(.+)[./]((?:weight|bias)_[ih]h_l\d+(?:_reverse)?)")


_VERSION = deferred.compile(r"-\d+\Z")


class _OnnxLayerTensor(NamedTuple):
    """One tensor of a layer: its name in the layer, the source constant, and the rule to convert it."""

    name: str
    path: Path
    rule: Rule = KEEP


@dataclass(slots=True)
class _OnnxLayer:
    """One layer: the node that computes it, its kind, its tensors."""

    node: OperatorNode
    kind: str
    uses: list[_OnnxLayerTensor]
    facts: LayerFacts = field(default_factory=LayerFacts)


def plan_state_dict(checkpoint: Checkpoint) -> tuple[Plan, tuple[LayerOption, ...]]:
    """Return the plan from a model's constants to a state_dict, and the kinds that only the graph shows.

    Raise MappingError if it has no layers. Sources: onnx/docs/Operators.md (the inputs of each operator);
    torch/onnx/utils.py and torch/onnx/_internal (names of nodes are paths of modules: `/actor/actor.0/Gemm`),
    tf2onnx (names of TensorFlow's operations). Exporters may transpose, rename or concatenate weights, so the
    operator, not the name, determines a weight's orientation.
    """
    reader = _OnnxLayerFinder(checkpoint.tree, onnx.read(checkpoint))
    layers = reader.layers()
    if not layers:
        raise MappingError(
            "the graph has no layer of a supported kind",
            file=checkpoint.path,
            found=abbreviate_list(sorted({node.op for node in reader.nodes}), 6),
            hint="run ckpttool inspect to list its constants and operators",
        )
    names, assumed = _name_layers(layers, checkpoint.tree)
    moves: list[Move] = []
    labels: dict[Path, Label] = {}
    choices: list[LayerOption] = []
    used: set[Path] = set()
    for layer, name in zip(layers, names, strict=True):
        for use in layer.uses:
            target = (key(".".join((*name, use.name))),)
            if target in labels or (use is layer.uses[0] and use.path in used):
                continue  # a layer that is used twice, or a tied weight, also if one use transposes it
            moves.append(Move(use.path, target, use.rule))
            labels[target] = Label(
                "buffer" if use.name.startswith("running_") else "parameter", key=str(target[0].value)
            )
        if layer.uses[0].path not in used:
            choices.append(_make_choice(layer, name))
        used.update(use.path for use in layer.uses)
    kept, zeros, lost, notes = _sort_unused(checkpoint.tree, reader, used)
    consumed = tuple(
        path for path, leaf in checkpoint.tree.tensors() if leaf.role == "other" and path not in used
    )
    plan = Plan(
        tuple(moves),
        containers={(): Container("OrderedDict")},
        assumed=tuple(assumed),
        consumed=tuple(path for path in (*consumed, *zeros) if path not in lost),
        notes=(*notes, *_note_arithmetic(reader, layers)),
        labels=labels,
        kept=kept,
    )
    return plan, tuple(choice for choice in choices if choice.kind)


def read_as_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """Return the state_dict of a model's layers as a checkpoint, with parameters outside of layers."""
    plan, _ = plan_state_dict(checkpoint)
    lone = {path: (key(str(path[0].value)),) for path in _lone_parameters(checkpoint.tree, plan)}
    plan = replace(
        plan,
        moves=(*plan.moves, *(Move(path, target, KEEP) for path, target in lone.items())),
        labels={
            **plan.labels,
            **{target: Label("parameter", key=str(target[0].value)) for target in lone.values()},
        },
        kept=tuple(path for path in plan.kept if path not in lone),
    )
    notes = (*checkpoint.notes, *plan.assumed, *plan.notes)
    tree = with_orders(apply_plan(checkpoint.tree, plan), checkpoint, sources=map_weight_constants(plan))
    return replace(checkpoint, format="pytorch", tree=tree, notes=notes)


# A parameter that an exporter wrote unchanged keeps its name; names of computed constants are the exporter's.
_PARAMETER = deferred.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)


def _lone_parameters(tree: Tree, plan: Plan) -> Iterator[Path]:
    """Yield the parameters with names of the program that no layer reads, such as a scale or a token."""
    used = {move.source for move in plan.moves} | {*plan.consumed}
    names = {str(move.target[-1].value) for move in plan.moves}
    for path, leaf in tree.tensors():
        name = str(path[0].value)
        free = len(path) == 1 and path not in used and name not in names
        if free and leaf.role == "parameter" and _PARAMETER.fullmatch(name):
            yield path


def list_unread_constants(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the names of constants that no layer reads: those that may be weights, and the others."""
    (plan, _), tree = plan_state_dict(checkpoint), checkpoint.tree
    used, other = {move.source for move in plan.moves}, {*plan.consumed, *plan.kept}
    names = [(path, tree.names[path]) for path, _ in tree.tensors() if path not in used]
    alone = {*_lone_parameters(tree, plan)}
    lost = [name for path, name in names if path not in other and path not in alone]
    return lost, [name for path, name in names if path in other and path not in alone]


def map_weight_constants(plan: Plan) -> dict[Path, Path]:
    """Return, for each weight stored as one whole constant, that constant."""
    return {move.target: move.source for move in plan.moves}


def _make_choice(layer: _OnnxLayer, name: tuple[str, ...]) -> LayerOption:
    title = "/".join(".".join(name).split("."))
    ambiguous = layer.kind in ("embedding", "depthwise", "dense", "convolution", "prelu")
    return LayerOption(title, lambda other: other == title, layer.kind if ambiguous else None, layer.facts)


class _OnnxLayerFinder:
    """Finds the layers among the nodes of a graph."""

    def __init__(self, tree: Tree, graph: Graph) -> None:
        self.tree = tree
        # An operator of an old version that the table does not have has its version in its name.
        self.nodes = [replace(node, op=_VERSION.sub("", node.op)) for node in graph.nodes]
        # Whether each constant of the graph itself is transposed.
        self.source: dict[str, tuple[Path, bool]] = {
            name: (constant.path, False)
            for name, constant in graph.constants.items()
            if constant.path is not None and len(constant.path) == 1
        }
        self.by_output = {name: node for node in self.nodes for name in node.outputs if name}
        self.users: dict[str, list[OperatorNode]] = {}
        for node in self.nodes:
            self._follow(node)
            for name in node.inputs:
                self.users.setdefault(name, []).append(node)
        self.refused: list[str] = []

    def _follow(self, node: OperatorNode) -> None:
        """Treat the output of a node as the constant it copies, if the node changes no number."""
        if len(node.inputs) < 1 or node.inputs[0] not in self.source or len(node.outputs) < 1:
            return
        path, turned = self.source[node.inputs[0]]
        leaf = self.tree[path]
        if node.op in _SAME and not (node.op == "Cast" and node.attributes.get("to") != "float32"):
            self.source[node.outputs[0]] = (path, turned)
        elif node.op == "Transpose" and isinstance(leaf, Leaf) and len(leaf.shape) == 2:
            exchanged = tuple(node.attributes.get("perm", (1, 0))) == (1, 0)
            self.source[node.outputs[0]] = (path, turned != exchanged)
        elif node.op in _SHAPED and isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=0):
            # Axes of extent 1 do not change a row.
            self.source[node.outputs[0]] = (path, turned)

    def constant(self, node: OperatorNode, number: int) -> tuple[Path, bool, Leaf] | None:
        """Return the constant input of a node, whether it is transposed first, and its leaf."""
        name = node.inputs[number] if len(node.inputs) > number else ""
        source = self.source.get(name)
        leaf = self.tree[source[0]] if source is not None else None
        return (*source, leaf) if source is not None and isinstance(leaf, Leaf) else None

    def layers(self) -> list[_OnnxLayer]:
        """Return the layers in the order of computation."""
        layers: list[_OnnxLayer] = []
        for node in self.nodes:
            layers += _RULES[node.op](self, node) if node.op in _RULES else []
        return [*layers, *self._cells({use.path for layer in layers for use in layer.uses})]

    def _cells(self, used: set[Path]) -> Iterator[_OnnxLayer]:
        """Yield recurrent layers under PyTorch's own names; the graph slices and joins their tensors."""
        nodes = [node for node in self.nodes if node.op in _RECURRENT]
        groups: dict[str, list[_OnnxLayerTensor]] = {}
        for path in self.tree if nodes else ():
            name = _CELL.fullmatch(str(path[0].value)) if len(path) == 1 and path not in used else None
            users = {node.op for node in self.users.get(str(path[0].value), ())}
            if name is not None and users and users <= _CUT:
                groups.setdefault(name[1], []).append(_OnnxLayerTensor(name[2], path))
        for uses in groups.values():
            yield _OnnxLayer(nodes[0], nodes[0].op.lower(), uses)

    def weight(self, node: OperatorNode, number: int, *, stored: bool) -> _OnnxLayerTensor | None:
        """Return a matrix in state_dict layout, [out, in]; `stored` means that the operator uses it as is."""
        constant = self.constant(node, number)
        if constant is None or len(constant[2].shape) != 2:
            return None
        path, turned, _ = constant
        return _OnnxLayerTensor("weight", path, KEEP if stored != turned else TRANSPOSE)

    def row(
        self, node: OperatorNode, number: int, name: str, width: int | None = None
    ) -> _OnnxLayerTensor | None:
        """Return a row of numbers, without axes of extent 1 before it."""
        constant = self.constant(node, number)
        if constant is None or constant[1] or (width is not None and constant[2].size != width):
            return None
        path, _, leaf = constant
        if leaf.size != max(leaf.shape, default=0) or not leaf.shape:
            return None
        return _OnnxLayerTensor(name, path, KEEP if len(leaf.shape) == 1 else Reshape((leaf.size,)))

    def follower(self, node: OperatorNode, op: str) -> tuple[OperatorNode, int] | None:
        """Return the only consumer of a value if it has a constant operand, and that operand's position."""
        users = self.users.get(node.outputs[0], []) if node.outputs else []
        if len(users) != 1 or users[0].op != op or len(users[0].inputs) != 2:
            return None
        other = 1 - users[0].inputs.index(node.outputs[0])
        return (users[0], other) if users[0].inputs[other] in self.source else None


def _gemm(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    weight = reader.weight(node, 1, stored=bool(node.attributes.get("transB", 0)))
    if weight is None or node.attributes.get("transA", 0):
        return []
    if node.attributes.get("alpha", 1.0) != 1.0 or node.attributes.get("beta", 1.0) != 1.0:
        reader.refused.append(f"{node.title} (Gemm with alpha or beta)")
        return []
    bias = reader.row(node, 2, "bias")
    return [_OnnxLayer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _matmul(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    weight = reader.weight(node, 1, stored=False)
    if weight is None:
        return []
    leaf = reader.tree[weight.path]
    width = leaf.shape[1 if weight.rule is TRANSPOSE else 0] if isinstance(leaf, Leaf) else None
    after = reader.follower(node, "Add")
    bias = reader.row(*after, "bias", width) if after is not None else None
    return [_OnnxLayer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _convolution(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    constant = reader.constant(node, 1)
    if constant is None or constant[1]:
        return []
    kind, group = "convolution", node.attributes.get("group", 1)
    if group > 1:
        if constant[2].shape[1] != 1 or node.op == "ConvTranspose":
            reader.refused.append(f"{node.title} ({node.op} in {group} groups)")
            return []
        kind = "depthwise"
    bias = reader.row(node, 2, "bias")
    layer = _OnnxLayer(
        node, kind, [_OnnxLayerTensor("weight", constant[0]), *([bias] if bias is not None else [])]
    )
    if kind == "depthwise":
        layer.facts = LayerFacts(number=constant[2].shape[0] // group)
    return [layer]


def _row_reader(kind: str, *names: str) -> Callable[[_OnnxLayerFinder, OperatorNode], list[_OnnxLayer]]:
    """Return the handler of an operator whose inputs after the first are rows with these names."""

    def read(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
        rows = [reader.row(node, number + 1, name) for number, name in enumerate(names)]
        uses = [use for use in rows if use is not None]
        return [_OnnxLayer(node, kind, uses)] if uses and rows[0] is not None else []

    return read


def _match_layer_norm(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    """Return a layer norm built from small operators: a quotient by a root, a product, a sum."""
    root = reader.by_output.get(node.inputs[1]) if len(node.inputs) > 1 else None
    scaled = reader.follower(node, "Mul")
    if root is None or root.op != "Sqrt" or scaled is None:
        return []
    weight = reader.row(*scaled, "weight")
    shifted = reader.follower(scaled[0], "Add")
    bias = reader.row(*shifted, "bias") if shifted is not None else None
    return [_OnnxLayer(node, "layer_norm", [weight, bias])] if weight is not None and bias is not None else []


def _embedding(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    constant = reader.constant(node, 0)
    used = node.inputs[1] in reader.source if len(node.inputs) > 1 else True
    if (
        constant is None
        or constant[1]
        or used
        or len(constant[2].shape) != 2
        or node.attributes.get("axis", 0)
    ):
        return []
    return [_OnnxLayer(node, "embedding", [_OnnxLayerTensor("weight", constant[0])])]


def _recurrent(reader: _OnnxLayerFinder, node: OperatorNode) -> list[_OnnxLayer]:
    """Return a recurrent layer, whose tensors contain both directions and both biases."""
    order = _RECURRENT[node.op]
    weights = [reader.constant(node, number) for number in (1, 2)]
    biases = reader.constant(node, 3)
    if any(weight is None or weight[1] or len(weight[2].shape) != 3 for weight in weights):
        return []
    title = node.title
    if node.op == "GRU" and not node.attributes.get("linear_before_reset", 0):
        reader.refused.append(f"{title} (a GRU with linear_before_reset = 0)")
        return []
    if node.attributes.get("activations") is not None or (len(node.inputs) > 7 and node.inputs[7]):
        reader.refused.append(f"{title} ({node.op} with non-default activations or peepholes)")
        return []
    uses: list[_OnnxLayerTensor] = []
    for name, weight in zip(("weight_ih", "weight_hh"), weights, strict=True):
        if weight is None:
            return []
        directions, rows, columns = weight[2].shape
        for number in range(directions):
            turn = _direction_rule(order, number, directions, (rows, columns))
            uses.append(_OnnxLayerTensor(f"{name}_l0{'_reverse' * number}", weight[0], turn))
    if biases is not None:
        directions, both = biases[2].shape
        for number in range(directions):
            for half, name in enumerate(("bias_ih", "bias_hh")):
                cut = slice_rule(half * both // 2, (half + 1) * both // 2, both, 1)
                turn = chain_rules(cut, _direction_rule(order, number, directions, (both // 2,)))
                uses.append(_OnnxLayerTensor(f"{name}_l0{'_reverse' * number}", biases[0], turn))
    return [_OnnxLayer(node, node.op.lower(), uses)]


def _direction_rule(order: tuple[int, ...], number: int, directions: int, shape: tuple[int, ...]) -> Rule:
    blocks = BlockOrder(0, order) if len(order) > 1 else KEEP
    return chain_rules(slice_rule(number, number + 1, directions), Reshape(shape), blocks)


_RULES: dict[str, Callable[[_OnnxLayerFinder, OperatorNode], list[_OnnxLayer]]] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "BatchNormalization": _row_reader("batch_norm", "weight", "bias", "running_mean", "running_var"),
    "LayerNormalization": _row_reader("layer_norm", "weight", "bias"),
    **dict.fromkeys(
        ("InstanceNormalization", "GroupNormalization"), _row_reader("layer_norm", "weight", "bias")
    ),
    "PRelu": _row_reader("prelu", "weight"),
    "Div": _match_layer_norm,
    "Gather": _embedding,
    **dict.fromkeys(_RECURRENT, _recurrent),
}


def _name_layers(layers: Sequence[_OnnxLayer], tree: Tree) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a name for each layer, and a sentence if names do not come from the tensors."""
    used: Counter[tuple[str, ...]] = Counter()
    first: dict[Path, tuple[str, ...]] = {}
    names: list[tuple[str, ...]] = []
    numbered: list[str] = []
    for number, layer in enumerate(layers):
        # The vectors beside a tied weight are those of a second layer.
        own = (
            layer.uses if layer.uses[0].path not in first else [e for e in layer.uses if e.path not in first]
        )
        if not own:
            names.append(first[layer.uses[0].path])
            continue
        stored = [_module_of_tensor(str(use.path[0].value)) for use in own]
        known = next((name for name in stored if name), None)
        beside = first.get(layer.uses[0].path, ("layers", str(number)))
        name = known or module_of_node(layer.node.name) or beside
        used[name] += 1
        if used[name] > 1:
            name = (*name[:-1], f"{name[-1]}_{used[name]}")
        if known is None:
            numbered.append(f"{tree.names[own[0].path]} is {'.'.join((*name, own[0].name))}")
        first.update(dict.fromkeys((use.path for use in own), name))
        names.append(name)
    assumed = [f"names taken from the graph's nodes: {abbreviate_list(numbered, 3)}"] if numbered else []
    return names, assumed


def _module_of_tensor(stored: str) -> tuple[str, ...] | None:
    """Return the module in a constant's own name, None for an exporter's number."""
    if "::" in stored:
        return None
    match = _TORCH.fullmatch(stored) or _PARTS.fullmatch(stored)
    if match is None or not match[1]:
        return None
    return split_scope(match[1])


def _takes_settings(op: str) -> bool:
    """Return whether vectors are settings or factors of an operator, which no module of a state_dict has."""
    return op == "Resize" or (
        op != "PRelu" and (operator_kind(op) in COMBINATIONS or operator_kind(op) in MOVEMENTS)
    )


def _sort_unused(
    tree: Tree, reader: _OnnxLayerFinder, used: set[Path]
) -> tuple[tuple[Path, ...], tuple[Path, ...], frozenset[Path], tuple[str, ...]]:
    """Sort constants of no layer: kept in the sidecar, unneeded zeros, lost ones; the last are notes."""
    kept: list[Path] = []
    lost: list[str] = []
    zeros: list[Path] = []
    gone: set[Path] = set()
    by_path: dict[Path, set[str]] = {}
    for name, (path, _) in reader.source.items():
        by_path.setdefault(path, set()).update(node.op for node in reader.users.get(name, ()))
    for path, leaf in tree.items():
        if path in used or (isinstance(leaf, Leaf) and leaf.role == "other"):
            continue
        operators = by_path.get(path, set()) - _SAME - {"Transpose"}
        plain = isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=1)
        if isinstance(leaf, Leaf) and operators <= _STATES and not plain and not leaf.array().any():
            zeros.append(path)  # the initial state of a recurrent layer
        elif isinstance(leaf, Leaf) and describe_table(leaf) is not None:
            zeros.append(path)  # positions or a mask, which a program computes
        elif not plain or len(path) > 1 or not all(map(_takes_settings, operators)):
            gone.add(path)
            lost.append(f"{tree.names[path]} ({', '.join(sorted(operators)) or 'no operator of the graph'})")
        else:
            kept.append(path)
    notes = []
    if reader.refused:
        notes.append(f"not converted: {abbreviate_list(reader.refused, 4)}")
    if lost:
        notes.append(f"constants not used by a supported layer: {abbreviate_list(lost, 4)}")
    return tuple(kept), tuple(zeros), frozenset(gone), tuple(notes)


def _note_arithmetic(reader: _OnnxLayerFinder, layers: Sequence[_OnnxLayer]) -> Iterator[str]:
    """Yield a note on operators outside the layers, which a weights file cannot represent."""
    own = {id(layer.node) for layer in layers}
    shapes = _SAME | {"Shape", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
    operators = Counter(node.op for node in reader.nodes if id(node) not in own and node.op not in shapes)
    if operators:
        words = abbreviate_list([name for name, _ in operators.most_common()], 6)
        yield f"the graph also computes {words}, which a weights file cannot represent"
