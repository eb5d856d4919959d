"""Write the PyTorch module that computes a recorded graph with the weights of a converted file.

The meaning of operators is that of graphs/graph.py; an operator, an attribute or a constant that has no
statement here is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.conversion.model_code import TORCH_ATTRIBUTES
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.graphs.graph import Graph, OperatorNode
from ckpttool.mapping.rules import ChannelOrder, Move, Permute, Reshape, Rule, rule_steps

# Entries of a constant of the program that the code contains; larger ones are weights that no file has.
_MOST_ENTRIES = 256
# Names that modules of the code have already, and names that statements use.
_TAKEN = TORCH_ATTRIBUTES | {"tensor"}
_USED = frozenset(("self", "torch", "nn", "F", "float", "tuple", "TENSORS", "Model", "load"))
_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, (dtype, shape, trained) in TENSORS.items():
            *path, last = name.split(".")
            module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            if trained:
                module.register_parameter(last, nn.Parameter(tensor))
            else:
                module.register_buffer(last, tensor)

    def tensor(self, name):
        path, _, last = name.rpartition(".")
        return getattr(self.get_submodule(path), last)
"""
_LOAD = """

def load(path):
    \"\"\"Return the model with the weights of the file.\"\"\"
    model = Model()
    model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    return model.eval()
"""

Arguments = Sequence[str]
Emit = Callable[["_GraphWriter", OperatorNode, Arguments], str]


def write_graph_code(
    graph: Graph, tree: Tree, moves: Sequence[Move], written: Tree, about: Sequence[str]
) -> str:
    """Return the text of a module that defines `Model` and `load(path)`.

    Args:
        graph: what the source computes.
        tree: the tree that the moves convert; its leaves have the bytes of the graph's constants.
        moves: the conversion of each leaf.
        written: the tree of the written file, a state dictionary with dotted names.
        about: lines about the file, for comments.

    Raise UnsupportedError for what has no statement.

    """
    return _GraphWriter(graph, tree, moves, written).text(about)


def _refusal(what: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"--code cannot write {what}", found=found, hint="leave out --code")


class _GraphWriter:
    """Statements of a graph; `names` are the variables of its values, `literals` its small constants."""

    def __init__(self, graph: Graph, tree: Tree, moves: Sequence[Move], written: Tree) -> None:
        self.graph, self.tree, self.written = graph, tree, written
        # Names may have changed before the moves: a leaf's bytes show which entry it became.
        self.moves = {id(leaf.source): move for move in moves if isinstance(leaf := tree[move.source], Leaf)}
        self.names: dict[str, str] = {}
        self.lines: list[str] = []

    def text(self, about: Sequence[str]) -> str:
        """Return the whole module."""
        rows = []
        for path, leaf in self.written.tensors():
            kind = (leaf.dtype, leaf.shape, leaf.role == "parameter" and leaf.dtype.startswith("float"))
            rows.append(f"    {python_literal(self._key(path))}: {kind!r},")
        if len(rows) != len(self.written):
            raise _refusal(
                "a file with entries that are no tensors", f"{len(self.written) - len(rows)} values"
            )
        arguments = [self._variable(value.name, f"x{at}") for at, value in enumerate(self.graph.inputs)]
        for node in self.graph.nodes:
            self._add(node)
        results = ", ".join(self.value(value.name) for value in self.graph.outputs)
        shapes = [
            f"{name} {list(value.shape or ())}"
            for name, value in zip(arguments, self.graph.inputs, strict=True)
        ]
        comments = "\n".join(
            "# " + clean(line).encode("ascii", "backslashreplace").decode() for line in about
        )
        forward = [
            f"    def forward(self, {', '.join(arguments)}):",
            *self.lines,
            f"        return {results}",
        ]
        head = (
            f'"""A converted model: `load(path)` returns it with its weights. Inputs: {"; ".join(shapes)}."""'
        )
        table = "\n".join(
            ["# Name, type and shape of each tensor, and whether it is trained.", "TENSORS = {", *rows, "}"]
        )
        return (
            f"{head}\n\n{comments}\n{_HEAD.replace('class Model', table + chr(10) * 3 + 'class Model')}\n"
            + "\n".join(forward)
            + "\n"
            + _LOAD
        )

    def _key(self, path: Path) -> str:
        steps = [str(step.value) for step in path]
        names = ".".join(steps).split(".")
        if not all(re.fullmatch(r"\w+", name, re.ASCII) and name not in _TAKEN for name in names):
            raise _refusal("a tensor with such a name", ".".join(steps))
        return ".".join(steps)

    def _variable(self, name: str, otherwise: str) -> str:
        usable = is_word(name) and name.isascii() and name not in {*_USED, *self.names.values()}
        self.names[name] = name if usable and not re.fullmatch(r"[vx]\d+", name) else otherwise
        return self.names[name]

    def value(self, name: str) -> str:
        """Return the expression of a value: a variable, a tensor of the file, or a small constant."""
        if name in self.names:
            return self.names[name]
        constant = self.graph.constants[name]
        if isinstance(constant.leaf, Leaf) and id(constant.leaf.source) in self.moves:
            return self._stored(self.moves[id(constant.leaf.source)], constant.rule)
        array = self.array(name)
        numbers = re.sub(r"\binf\b", 'float("inf")', repr(array.tolist()))
        return f"torch.tensor({numbers}, dtype=torch.{array.dtype.name})"

    def array(self, name: str) -> np.ndarray:
        """Return a constant that the code contains; raise UnsupportedError for another value."""
        constant = self.graph.constants.get(name)
        if constant is None:
            raise _refusal("an operator whose shape or axes are computed", name)
        array = constant.read(name)
        if array.size > _MOST_ENTRIES or array.dtype.name not in (
            "float32",
            "float64",
            "int32",
            "int64",
            "bool",
        ):
            raise _refusal("a constant that the written file does not contain", name)
        if np.isnan(array).any():
            raise _refusal("a constant that is NaN", name)
        return array

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return whole numbers that a constant contains."""
        return tuple(int(number) for number in self.array(name).ravel())

    def _stored(self, move: Move, rule: Rule) -> str:
        """Return the expression of a tensor of the file, in the form that `rule` gives the source."""
        source = self.tree[move.source]
        key = self._key(move.target)
        stored = move.rule.leaf(source)
        if move.target not in self.written or not isinstance(stored, Leaf) or not isinstance(source, Leaf):
            raise _refusal("a constant that the written file does not contain", key)
        at = f"self.tensor({python_literal(key)})"
        for step in (*rule_steps(move.rule.inverse(source)), *rule_steps(rule)):
            at = self._changed(at, step)
        return at

    def _changed(self, expression: str, rule: Rule) -> str:
        match rule:
            case Permute(axes):
                return f"{expression}.permute{axes!r}"
            case Reshape(shape):
                return f"{expression}.reshape{tuple(shape)!r}"
            case ChannelOrder(axis, to, parts):
                pieces, start = [], 0
                for part in parts:
                    length = part[0] * part[1]
                    piece = f"{expression}.narrow({axis}, {start}, {length})"
                    if min(part) > 1:
                        split = f"{piece}.unflatten({axis}, {tuple(part if to == 'first' else part[::-1])!r})"
                        piece = f"{split}.transpose({axis}, {axis + 1}).flatten({axis}, {axis + 1})"
                    pieces.append(piece)
                    start += length
                return pieces[0] if len(pieces) == 1 else f"torch.cat([{', '.join(pieces)}], {axis})"
        raise _refusal("a weight that is stored in another form", rule.name)

    def _add(self, node: OperatorNode) -> None:
        emit, known = _STATEMENTS.get(node.op, (None, ()))
        if emit is None:
            raise _refusal("this operator", node.op)
        if unknown := node.attributes.keys() - set(known):
            raise _refusal(f"{node.op} with this attribute", min(unknown))
        if any(node.outputs[1:]):
            raise _refusal("an operator with several results", node.op)
        static = node.inputs[1:] if node.op in _STATIC else ()
        arguments = [self.value(name) if name and name not in static else "" for name in node.inputs]
        expression = emit(self, node, arguments)
        self.lines.append(f"        {self._variable(node.outputs[0], f'v{len(self.lines)}')} = {expression}")


# The statements, by operator: how it is written, and the attributes that are understood.

# Inputs after the first are numbers of the statement.
_STATIC = frozenset(
    ("Squeeze", "Unsqueeze", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "Pad", "Clip", "Slice")
)


def _number(value: float) -> str:
    return repr(value) if np.isfinite(value) else f'float("{value}")'


def _function(text: str) -> Emit:
    return lambda _, __, arguments: text.format(*arguments)


def _with_attribute(text: str, **defaults: Any) -> Emit:
    return lambda _, node, arguments: text.format(*arguments, **{**defaults, **node.attributes})


def _gemm(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get = node.attributes.get
    flags = ("transA", "transB")
    left, right = (f"{a}.T" if get(flag, 0) else a for a, flag in zip(arguments, flags, strict=False))
    product = f"{left} @ {right}" if get("alpha", 1.0) == 1 else f"{get('alpha')!r} * ({left} @ {right})"
    if len(arguments) < 3 or not arguments[2]:
        return product
    scale = "" if get("beta", 1.0) == 1 else f"{get('beta')!r} * "
    return f"{product} + {scale}{arguments[2]}"


def _padding(node: OperatorNode, axes: int) -> tuple[tuple[int, ...] | str, str]:
    """Return the padding on both sides of each axis; refuse one that depends on the input's size."""
    if node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise _refusal(f"{node.op} with this padding", str(node.attributes["auto_pad"]))
    pads = tuple(node.attributes.get("pads", (0,) * 2 * axes))
    pairs = [pair for axis in reversed(range(axes)) for pair in (pads[axis], pads[axis + axes])]
    return (pads[:axes], "") if pads[:axes] == pads[axes:] else ((0,) * axes, f"{tuple(pairs)!r}")


def _convolution(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    kernel = writer.graph.constants.get(node.inputs[1])
    axes = len((kernel and kernel.shape) or ()) - 2
    if axes not in (1, 2, 3):
        raise _refusal("a convolution whose kernel is computed", node.title)
    get, ones = node.attributes.get, (1,) * axes
    # PyTorch, too, pads more at the end.
    same = get("auto_pad") == "SAME_UPPER" and tuple(get("strides", ones)) == ones
    pads, uneven = (python_literal("same"), "") if same else _padding(node, axes)
    bias = arguments[2] if len(arguments) > 2 and arguments[2] else "None"
    source = f"F.pad({arguments[0]}, {uneven})" if uneven else arguments[0]
    return (
        f"F.conv{axes}d({source}, {arguments[1]}, {bias}, stride={tuple(get('strides', ones))}, "
        f"padding={pads}, dilation={tuple(get('dilations', ones))}, groups={get('group', 1)})"
    )


def _pool(kind: str) -> Emit:
    def emit(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
        get = node.attributes.get
        size = tuple(node.attributes["kernel_shape"])
        pads, uneven = _padding(node, len(size))
        if uneven or get("ceil_mode", 0) or any(each != 1 for each in get("dilations", ())):
            raise _refusal(f"{node.op} with this window", node.title)
        counted = "" if kind == "max" else f", count_include_pad={bool(get('count_include_pad', 0))}"
        steps = tuple(get("strides", (1,) * len(size)))
        return f"F.{kind}_pool{len(size)}d({arguments[0]}, {size}, {steps}, {pads}{counted})"

    return emit


def _reshape(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.inputs[1] not in writer.graph.constants:
        return f"{arguments[0]}.reshape(tuple({arguments[1]}.tolist()))"
    sizes = writer.numbers(node.inputs[1])
    if 0 in sizes and node.attributes.get("allowzero", 0):
        raise _refusal("a reshape to no elements", node.title)
    kept = ", ".join(str(size) if size else f"{arguments[0]}.shape[{at}]" for at, size in enumerate(sizes))
    return f"{arguments[0]}.reshape({kept})"


def _slice(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    starts, ends, *rest = (writer.numbers(name) for name in node.inputs[1:] if name)
    axes = rest[0] if rest else tuple(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else (1,) * len(starts)
    if min(axes) < 0 or min(steps) < 1:
        raise _refusal("a slice of these axes or steps", node.title)
    kept = dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))
    words = [":".join(map(str, kept[axis])) if axis in kept else ":" for axis in range(max(axes) + 1)]
    return f"{arguments[0]}[{', '.join(words)}]"


def _pad(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    pads = writer.numbers(node.inputs[1])
    count = len(pads) // 2
    _, _, value, chosen = (*node.inputs, "", "")[:4]
    axes = writer.numbers(chosen) if chosen else tuple(range(count))
    if node.attributes.get("mode", "constant") != "constant" or min((*pads, *axes)) < 0:
        raise _refusal("a padding of this kind", node.title)
    sides = {axis: (pads[at], pads[at + count]) for at, axis in enumerate(axes)}
    filled = _number(writer.array(value).item()) if value else "0.0"
    source = arguments[0]
    every = f"for axis in reversed(range({source}.ndim)) for pad in {sides!r}.get(axis, (0, 0))"
    return f"F.pad({source}, [pad {every}], value={filled})"


def _division(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    constants = (writer.graph.constants.get(name) for name in node.inputs)
    leaves = (constant.leaf for constant in constants if constant is not None)
    # Whole numbers are divided without a rest; only constants state the type of their values.
    if not any(isinstance(leaf, Leaf) and leaf.dtype.startswith("float") for leaf in leaves):
        raise _refusal("a division of values whose type is unknown", node.title)
    return f"{arguments[0]} / {arguments[1]}"


def _reduce(function: str) -> Emit:
    def emit(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
        axes = writer.numbers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else ()
        if not axes:
            raise _refusal(f"{node.op} over all axes", node.title)
        return f"{arguments[0]}.{function}({axes!r}, keepdim={bool(node.attributes.get('keepdims', 1))})"

    return emit


def _squeeze(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if len(node.inputs) < 2 or not node.inputs[1]:
        return f"{arguments[0]}.squeeze()"
    return f"{arguments[0]}.squeeze({writer.numbers(node.inputs[1])!r})"


def _unsqueeze(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axes = writer.numbers(node.inputs[1])
    if min(axes) < 0:
        raise _refusal("new axes counted from the end", node.title)
    return arguments[0] + "".join(f".unsqueeze({axis})" for axis in sorted(axes))


def _clip(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    ends = [writer.array(name).item() if name else None for name in (*node.inputs[1:], "", "")[:2]]
    low, high = ("None" if end is None else _number(end) for end in ends)
    return f"torch.clamp({arguments[0]}, {low}, {high})"


def _flatten(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.attributes.get("axis", 1) != 1:
        raise _refusal("a flattening of other axes", node.title)
    return f"{arguments[0]}.flatten(1)"


def _batch_norm(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.attributes.get("training_mode", 0):
        raise _refusal("a batch norm in training", node.title)
    source, scale, bias, mean, variance = arguments
    epsilon = node.attributes.get("epsilon", 1e-5)
    return f"F.batch_norm({source}, {mean}, {variance}, {scale}, {bias}, eps={epsilon!r})"


# Functions of one tensor without settings.
_PLAIN = {
    row.onnx: f"nn.{row.torch}()({{0}})"
    for row in ACTIVATION_KINDS.values()
    if row.onnx and row.torch and row.is_plain and row.name not in ("gelu", "selu")
}
_WINDOW = ("kernel_shape", "strides", "pads", "ceil_mode", "auto_pad")
_POOLED = "{0}.flatten(2).mean(-1).reshape(*{0}.shape[:2], *[1] * ({0}.ndim - 2))"
_STATEMENTS: Mapping[str, tuple[Emit, tuple[str, ...]]] = {
    **{op: (_function(text), ()) for op, text in _PLAIN.items()},
    **{op: (_function(f"{{0}} {sign} {{1}}"), ()) for op, sign in (("Add", "+"), ("Sub", "-"), ("Mul", "*"))},
    **{o: (_function(f"torch.{o.lower()}({{0}})"), ()) for o in ("Exp", "Log", "Sqrt", "Abs", "Neg", "Erf")},
    "Reciprocal": (_function("1 / {0}"), ()),
    "Div": (_division, ()),
    "MatMul": (_function("{0} @ {1}"), ()),
    "Identity": (_function("{0}"), ()),
    "Gemm": (_gemm, ("alpha", "beta", "transA", "transB")),
    "Conv": (_convolution, ("strides", "pads", "dilations", "group", "auto_pad", "kernel_shape")),
    "BatchNormalization": (_batch_norm, ("epsilon", "momentum", "training_mode")),
    "MaxPool": (_pool("max"), (*_WINDOW, "dilations", "storage_order")),
    "AveragePool": (_pool("avg"), (*_WINDOW, "count_include_pad")),
    "GlobalAveragePool": (_function(_POOLED), ()),
    "Flatten": (_flatten, ("axis",)),
    "Reshape": (_reshape, ("allowzero",)),
    "Shape": (_function("torch.tensor({0}.shape)"), ()),
    "Cast": (_with_attribute("{0}.to(torch.{to})"), ("to",)),
    "Slice": (_slice, ()),
    "Pad": (_pad, ("mode",)),
    "Transpose": (_with_attribute("{0}.permute{perm!r}"), ("perm",)),
    "Concat": (lambda _, node, a: f"torch.cat([{', '.join(a)}], {node.attributes['axis']})", ("axis",)),
    "Softmax": (_with_attribute("{0}.softmax({axis})", axis=-1), ("axis",)),
    "LogSoftmax": (_with_attribute("{0}.log_softmax({axis})", axis=-1), ("axis",)),
    "Elu": (_with_attribute("F.elu({0}, {alpha!r})", alpha=1.0), ("alpha",)),
    "LeakyRelu": (_with_attribute("F.leaky_relu({0}, {alpha!r})", alpha=0.01), ("alpha",)),
    "Gelu": (
        _with_attribute("F.gelu({0}, approximate={approximate!r})", approximate="none"),
        ("approximate",),
    ),
    "Clip": (_clip, ()),
    "Squeeze": (_squeeze, ()),
    "Unsqueeze": (_unsqueeze, ()),
    "ReduceMean": (_reduce("mean"), ("keepdims",)),
    "ReduceSum": (_reduce("sum"), ("keepdims",)),
    "ReduceMax": (_reduce("amax"), ("keepdims",)),
    "ReduceMin": (_reduce("amin"), ("keepdims",)),
}
