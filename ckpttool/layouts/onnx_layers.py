"""The layers of an ONNX graph as a PyTorch state_dict: which constant is which weight, by its operator.

Sources: onnx/docs/Operators.md (the inputs of each operator); torch/onnx/utils.py and torch/onnx/_internal
(names of nodes are paths of modules: `/actor/actor.0/Gemm`), tf2onnx (names of TensorFlow's operations).
An exporter may transpose, rename or join weights: the operator says how a weight is oriented, never its name.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UnsupportedError, UsageError, some
from ckpttool.formats.onnx import listing
from ckpttool.formats.onnx.model import Model, Node
from ckpttool.layouts import onnx_steps
from ckpttool.layouts.recorded_orders import with_orders
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.mapping.kinds import Told
from ckpttool.mapping.layers import Choice
from ckpttool.mapping.parts import Blocks, taken
from ckpttool.mapping.plan import Label, Plan, build
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Reshape, Rule, chained
from ckpttool.tree import Container, Tree

_TORCH = re.compile(
    r"(?:(.*)[./])?(weight|bias|running_mean|running_var|(?:weight|bias)_[ih]h_l\d+(?:_reverse)?)"
)
_PARTS = re.compile(
    r"(?:(.*?)/)?(?:(?:Cast|BiasAdd|MatMul|Add|Conv2D|batchnorm)(?:_\d+)?/)?(?:ReadVariableOp(?:_\d+)?(?::0)?|kernel|bias)"
)
# Operators whose constants are settings and single factors, which no module of a state_dict holds.
_ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Clip", "Where", "Equal", "Less"))
_ELEMENTWISE |= {
    "Greater",
    "Reshape",
    "Expand",
    "Concat",
    "Slice",
    "Gather",
    "Pad",
    "Split",
    "Tile",
    "Unsqueeze",
}
_RECURRENT = {"LSTM": (4, (0, 2, 3, 1)), "GRU": (3, (1, 0, 2)), "RNN": (1, (0,))}
_SAME = frozenset(("Identity", "Cast", "Dropout"))
_STATES = frozenset(("Expand", "Concat", "Slice", *_RECURRENT))
_SHAPED = frozenset(("Unsqueeze", "Squeeze", "Reshape"))
# What an exporter that folds no constants makes of the tensors of a recurrent layer.
_CUT = frozenset(("Slice", "Concat", "Unsqueeze", "Gather"))
_CELL = re.compile(r"(.+)[./]((?:weight|bias)_[ih]h_l\d+(?:_reverse)?)")


class _Use(NamedTuple):
    """One tensor of a layer: its name there, the constant that it is, and the rule that makes it."""

    name: str
    path: Path
    rule: Rule = KEEP


@dataclass(slots=True)
class _Layer:
    """One layer: the node that computes it, its kind, its tensors."""

    node: Node
    kind: str
    uses: list[_Use]
    told: Told = field(default_factory=Told)


class Layers(NamedTuple):
    """The plan to a state_dict, and what the graph says of layers whose kind their tensors do not tell."""

    plan: Plan
    choices: tuple[Choice, ...]


def to_state_dict(checkpoint: Checkpoint) -> Layers:
    """Return the way from a model's constants to a state_dict; raise MappingError where it has no layers."""
    model = listing.parsed(checkpoint.files[0])
    reader = _Reader(checkpoint.tree, model)
    layers = reader.layers()
    if not layers:
        raise MappingError(
            "the graph has no layer of a known kind",
            file=checkpoint.path,
            found=some(sorted({node.title for node in model.graph.nodes}), 6),
            hint="ckpttool inspect shows its constants and operators",
        )
    names, assumed = _named(layers, checkpoint.tree)
    moves: list[Move] = []
    labels: dict[Path, Label] = {}
    placed: dict[tuple[Path, str], Path] = {}
    flattened = dict(_flattened(checkpoint))
    choices: list[Choice] = []
    for layer, name in zip(layers, names, strict=True):
        for use in layer.uses:
            place = (key(".".join((*name, use.name))),)
            if (use.path, use.rule.name) in placed:
                continue  # a layer that is used twice
            placed[use.path, use.rule.name] = place
            moves.append(Move(use.path, place, use.rule))
            labels[place] = Label(
                "buffer" if use.name.startswith("running_") else "parameter", key=str(place[0].value)
            )
        choices.append(_choice(layer, name, flattened))
    used = {move.source for move in moves}
    rest = _rest(checkpoint.tree, reader, used)
    consumed = tuple(
        path for path, leaf in checkpoint.tree.tensors() if leaf.role == "other" and path not in used
    )
    plan = Plan(
        tuple(moves),
        containers={(): Container("OrderedDict")},
        assumed=tuple(assumed),
        consumed=tuple(path for path in (*consumed, *rest.zeros) if path not in rest.lost),
        notes=(*rest.notes, *_arithmetic(model, layers)),
        labels=labels,
        kept=rest.kept,
    )
    return Layers(plan, tuple(choice for choice in choices if choice.kind or choice.told.flatten is not None))


def as_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """Return the state_dict that a model's layers are, as the checkpoint of a model."""
    plan = to_state_dict(checkpoint).plan
    notes = (*checkpoint.notes, *plan.assumed, *plan.notes)
    tree = with_orders(build(checkpoint.tree, plan), checkpoint, sources=sources(plan))
    return replace(checkpoint, format="pytorch", tree=tree, notes=notes)


def sources(plan: Plan) -> dict[Path, Path]:
    """Return the constant of each weight that is one of them, as a whole."""
    return {move.target: move.source for move in plan.moves}


def _choice(layer: _Layer, name: tuple[str, ...], flattened: Mapping[Path, tuple[int, ...]]) -> Choice:
    title = "/".join(".".join(name).split("."))
    told = layer.told
    shape = next((flattened[use.path] for use in layer.uses if use.path in flattened), None)
    kind = {"batch_norm": None, "layer_norm": None}.get(layer.kind, layer.kind)
    if layer.kind == "dense" and shape is not None:
        told = told._replace(flatten=shape)
    ambiguous = kind if layer.kind in ("embedding", "depthwise", "dense", "convolution", "prelu") else None
    return Choice(title, lambda other: other == title, ambiguous, told)


class _Reader:
    """Finds the layers among the nodes of a graph."""

    def __init__(self, tree: Tree, model: Model) -> None:
        self.tree, self.model = tree, model
        self.nodes = list(model.graph.nodes)
        self.source: dict[str, tuple[Path, bool]] = {}
        for path, _ in tree.tensors():
            if len(path) == 1:
                self.source[str(path[0].value)] = (path, False)
        self.by_output = {name: node for node in self.nodes for name in node.outputs if name}
        self.users: dict[str, list[Node]] = {}
        for node in self.nodes:
            self._follow(node)
            for name in node.inputs:
                self.users.setdefault(name, []).append(node)
        self.refused: list[str] = []

    def _follow(self, node: Node) -> None:
        """Let the output of a node that changes no number of a constant be that constant."""
        if len(node.inputs) < 1 or node.inputs[0] not in self.source or len(node.outputs) < 1:
            return
        path, turned = self.source[node.inputs[0]]
        leaf = self.tree[path]
        if node.op in _SAME and not (node.op == "Cast" and node.get("to") != 1):
            self.source[node.outputs[0]] = (path, turned)
        elif node.op == "Transpose" and isinstance(leaf, Leaf) and len(leaf.shape) == 2:
            exchanged = tuple(node.get("perm", (1, 0))) == (1, 0)
            self.source[node.outputs[0]] = (path, turned != exchanged)
        elif node.op in _SHAPED and isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=0):
            # Axes of extent 1 around a row: it stays the row that it is.
            self.source[node.outputs[0]] = (path, turned)

    def constant(self, node: Node, number: int) -> tuple[Path, bool, Leaf] | None:
        """Return the constant that a node takes, whether it is transposed before, and its leaf."""
        name = node.inputs[number] if len(node.inputs) > number else ""
        found = self.source.get(name)
        leaf = self.tree[found[0]] if found is not None else None
        return (*found, leaf) if found is not None and isinstance(leaf, Leaf) else None

    def layers(self) -> list[_Layer]:
        """Return the layers in the order of computation."""
        found: list[_Layer] = []
        for node in self.nodes:
            rule = _RULES.get(node.op) if node.title == node.op else None
            made = rule(self, node) if rule is not None else None
            found += made or []
        return [*found, *self._cells({use.path for layer in found for use in layer.uses})]

    def _cells(self, used: set[Path]) -> Iterator[_Layer]:
        """Yield recurrent layers under PyTorch's own names, whose tensors the graph cuts and joins itself."""
        nodes = [node for node in self.nodes if node.op in _RECURRENT and node.title == node.op]
        groups: dict[str, list[_Use]] = {}
        for path in self.tree if nodes else ():
            name = _CELL.fullmatch(str(path[0].value)) if len(path) == 1 and path not in used else None
            users = {node.op for node in self.users.get(str(path[0].value), ())}
            if name is not None and users and users <= _CUT:
                groups.setdefault(name[1], []).append(_Use(name[2], path))
        for uses in groups.values():
            yield _Layer(nodes[0], nodes[0].op.lower(), uses)

    def weight(self, node: Node, number: int, *, stored: bool) -> _Use | None:
        """Return a matrix as a state_dict has it, [out, in]; `stored` says that the operator takes it so."""
        found = self.constant(node, number)
        if found is None or len(found[2].shape) != 2:
            return None
        path, turned, _ = found
        return _Use("weight", path, KEEP if stored != turned else TRANSPOSE)

    def row(self, node: Node, number: int, name: str, width: int | None = None) -> _Use | None:
        """Return a row of numbers, without axes of extent 1 before it."""
        found = self.constant(node, number)
        if found is None or found[1] or (width is not None and found[2].size != width):
            return None
        path, _, leaf = found
        if leaf.size != max(leaf.shape, default=0) or not leaf.shape:
            return None
        return _Use(name, path, KEEP if len(leaf.shape) == 1 else Reshape((leaf.size,)))

    def follower(self, node: Node, op: str) -> tuple[Node, int] | None:
        """Return the only user of a node's value if it takes a constant too, and the place of that one."""
        users = self.users.get(node.outputs[0], []) if node.outputs else []
        if len(users) != 1 or users[0].op != op or len(users[0].inputs) != 2:
            return None
        other = 1 - users[0].inputs.index(node.outputs[0])
        return (users[0], other) if users[0].inputs[other] in self.source else None


def _gemm(reader: _Reader, node: Node) -> list[_Layer]:
    weight = reader.weight(node, 1, stored=bool(node.get("transB", 0)))
    if weight is None or node.get("transA", 0):
        return []
    if node.get("alpha", 1.0) != 1.0 or node.get("beta", 1.0) != 1.0:
        reader.refused.append(f"{node.name or node.outputs[0]} (Gemm with alpha or beta)")
        return []
    bias = reader.row(node, 2, "bias")
    return [_Layer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _matmul(reader: _Reader, node: Node) -> list[_Layer]:
    weight = reader.weight(node, 1, stored=False)
    if weight is None:
        return []
    leaf = reader.tree[weight.path]
    width = leaf.shape[1 if weight.rule is TRANSPOSE else 0] if isinstance(leaf, Leaf) else None
    after = reader.follower(node, "Add")
    bias = reader.row(*after, "bias", width) if after is not None else None
    return [_Layer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _convolution(reader: _Reader, node: Node) -> list[_Layer]:
    found = reader.constant(node, 1)
    if found is None or found[1]:
        return []
    kind, group = "convolution", node.get("group", 1)
    if group > 1:
        if found[2].shape[1] != 1 or node.op == "ConvTranspose":
            reader.refused.append(f"{node.name or node.outputs[0]} ({node.op} in {group} groups)")
            return []
        kind = "depthwise"
    bias = reader.row(node, 2, "bias")
    layer = _Layer(node, kind, [_Use("weight", found[0]), *([bias] if bias is not None else [])])
    if kind == "depthwise":
        layer.told = Told(number=found[2].shape[0] // group)
    return [layer]


def _rows(kind: str, *names: str) -> Callable[[_Reader, Node], list[_Layer]]:
    """Return the reading of an operator whose inputs after the first are rows of these names."""

    def read(reader: _Reader, node: Node) -> list[_Layer]:
        found = [reader.row(node, number + 1, name) for number, name in enumerate(names)]
        uses = [use for use in found if use is not None]
        return [_Layer(node, kind, uses)] if uses and found[0] is not None else []

    return read


def _written_norm(reader: _Reader, node: Node) -> list[_Layer]:
    """Return a layer norm that is made of small operators: a quotient by a root, a product, a sum."""
    root = reader.by_output.get(node.inputs[1]) if len(node.inputs) > 1 else None
    scaled = reader.follower(node, "Mul")
    if root is None or root.op != "Sqrt" or scaled is None:
        return []
    weight = reader.row(*scaled, "weight")
    shifted = reader.follower(scaled[0], "Add")
    bias = reader.row(*shifted, "bias") if shifted is not None else None
    return [_Layer(node, "layer_norm", [weight, bias])] if weight is not None and bias is not None else []


def _embedding(reader: _Reader, node: Node) -> list[_Layer]:
    found = reader.constant(node, 0)
    taken_ = node.inputs[1] in reader.source if len(node.inputs) > 1 else True
    if found is None or found[1] or taken_ or len(found[2].shape) != 2 or node.get("axis", 0):
        return []
    return [_Layer(node, "embedding", [_Use("weight", found[0])])]


def _recurrent(reader: _Reader, node: Node) -> list[_Layer]:
    """Return a recurrent layer, whose tensors hold both directions and both biases."""
    gates, order = _RECURRENT[node.op]
    weights = [reader.constant(node, number) for number in (1, 2)]
    biases = reader.constant(node, 3)
    if any(each is None or each[1] or len(each[2].shape) != 3 for each in weights):
        return []
    title = node.name or node.outputs[0]
    if node.op == "GRU" and not node.get("linear_before_reset", 0):
        reader.refused.append(f"{title} (a GRU that resets before the product)")
        return []
    if node.get("activations") is not None or (len(node.inputs) > 7 and node.inputs[7]):
        reader.refused.append(f"{title} ({node.op} with other activations or peepholes)")
        return []
    uses: list[_Use] = []
    for name, each in zip(("weight_ih", "weight_hh"), weights, strict=True):
        if each is None:
            return []
        directions, rows, columns = each[2].shape
        for number in range(directions):
            turn = _turned(order, number, directions, (rows, columns))
            uses.append(_Use(f"{name}_l0{'_reverse' * number}", each[0], turn))
    if biases is not None:
        directions, both = biases[2].shape
        for number in range(directions):
            for half, name in enumerate(("bias_ih", "bias_hh")):
                cut = taken(half * both // 2, (half + 1) * both // 2, both, 1)
                turn = chained(cut, _turned(order, number, directions, (both // 2,)))
                uses.append(_Use(f"{name}_l0{'_reverse' * number}", biases[0], turn))
    return [_Layer(node, node.op.lower(), uses)] if gates else []


def _turned(order: tuple[int, ...], number: int, directions: int, shape: tuple[int, ...]) -> Rule:
    blocks = Blocks(0, order) if len(order) > 1 else KEEP
    return chained(taken(number, number + 1, directions), Reshape(shape), blocks)


_RULES: dict[str, Callable[[_Reader, Node], list[_Layer]]] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "BatchNormalization": _rows("batch_norm", "weight", "bias", "running_mean", "running_var"),
    "LayerNormalization": _rows("layer_norm", "weight", "bias"),
    "InstanceNormalization": _rows("layer_norm", "weight", "bias"),
    "PRelu": _rows("prelu", "weight"),
    "Div": _written_norm,
    "Gather": _embedding,
    **dict.fromkeys(_RECURRENT, _recurrent),
}


# Names.


def _named(layers: Sequence[_Layer], tree: Tree) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a name for each layer, and a sentence where names are not those of the tensors."""
    taken_: Counter[tuple[str, ...]] = Counter()
    first: dict[Path, tuple[str, ...]] = {}
    found: list[tuple[str, ...]] = []
    given: list[str] = []
    for number, layer in enumerate(layers):
        shared = first.get(layer.uses[0].path)
        if shared is not None:
            found.append(shared)
            continue
        stored = [_of_tensor(str(use.path[0].value)) for use in layer.uses]
        name = next((each for each in stored if each), None)
        if name is None:
            name = _of_node(layer.node) or ("layers", str(number))
            given.append(f"{tree.names[layer.uses[0].path]} is {'.'.join((*name, layer.uses[0].name))}")
        taken_[name] += 1
        if taken_[name] > 1:
            name = (*name[:-1], f"{name[-1]}_{taken_[name]}")
        first[layer.uses[0].path] = name
        found.append(name)
    assumed = [f"names from the graph's nodes: {some(given, 3)}"] if given else []
    return found, assumed


def _of_tensor(stored: str) -> tuple[str, ...] | None:
    """Return the module that a constant's own name says it is of, None for an exporter's number."""
    if "::" in stored:
        return None
    found = _TORCH.fullmatch(stored) or _PARTS.fullmatch(stored)
    if found is None or not found[1]:
        return None
    return _spelled(found[1])


def _of_node(node: Node) -> tuple[str, ...] | None:
    """Return the module that a node's name says it is in: `/actor/actor.0/Gemm` is actor.0."""
    scope, slash, _ = node.name.rpartition("/")
    return _spelled(scope) if slash and scope.strip("/") else None


def _spelled(scope: str) -> tuple[str, ...]:
    steps: list[str] = []
    for step in re.split(r"/+", scope.strip("/")):
        # Of the parts of a Sequential the exporter writes the whole name behind the Sequential's own.
        if steps and step.startswith(f"{steps[-1]}."):
            step = step[len(steps[-1]) + 1 :]
        steps += [part for part in step.replace(":", "_").split(".") if part]
    return tuple(steps) or ("model",)


# What is no layer.


class _Rest(NamedTuple):
    """Constants of no layer: what the sidecar keeps, zeros that nothing needs, what is lost, and notes."""

    kept: tuple[Path, ...]
    zeros: tuple[Path, ...]
    lost: frozenset[Path]
    notes: tuple[str, ...]


def _rest(tree: Tree, reader: _Reader, used: set[Path]) -> _Rest:
    """Sort the constants that no layer has."""
    kept: list[Path] = []
    lost: list[str] = []
    zeros: list[Path] = []
    gone: set[Path] = set()
    by_path: dict[Path, set[str]] = {}
    for name, (path, _) in reader.source.items():
        by_path.setdefault(path, set()).update(node.title for node in reader.users.get(name, ()))
    for path, leaf in tree.items():
        if path in used or (isinstance(leaf, Leaf) and leaf.role == "other"):
            continue
        operators = by_path.get(path, set()) - _SAME - {"Transpose"}
        plain = isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=1)
        if isinstance(leaf, Leaf) and operators <= _STATES and not plain and not leaf.array().any():
            zeros.append(path)  # the first state of a recurrent layer
        elif isinstance(leaf, ValueLeaf) or not plain or not operators <= _ELEMENTWISE or len(path) > 1:
            gone.add(path)
            lost.append(f"{tree.names[path]} ({', '.join(sorted(operators)) or 'no operator of the graph'})")
        else:
            kept.append(path)
    notes = []
    if reader.refused:
        notes.append(f"not converted: {some(reader.refused, 4)}")
    if lost:
        notes.append(f"constants of no layer that is known: {some(lost, 4)}")
    return _Rest(tuple(kept), tuple(zeros), frozenset(gone), tuple(notes))


def _arithmetic(model: Model, layers: Sequence[_Layer]) -> Iterator[str]:
    """Yield a note on what the graph computes besides its layers, which no file of weights holds."""
    own = {id(layer.node) for layer in layers}
    shapes = _SAME | {"Constant", "Shape", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
    operators = Counter(
        node.title for node in model.graph.nodes if id(node) not in own and node.op not in shapes
    )
    if operators:
        words = some([name for name, _ in operators.most_common()], 6)
        yield f"the graph also computes {words}, which a file of weights does not hold"


def _flattened(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the shape (height, width, channels) of what each dense layer takes flattened, by its weight.

    A layer whose image has the channels last needs no change: its shape is ().
    """
    with contextlib.suppress(MappingError, UnsupportedError, UsageError):
        yield from onnx_steps.flattened(checkpoint)
