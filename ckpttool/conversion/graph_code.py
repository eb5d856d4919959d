"""Write the PyTorch module that computes a recorded graph with the weights of a converted file.

The meaning of operators is that of graphs/graph.py; an operator, an attribute or a constant that has no
statement here is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.conversion.model_code import TORCH_ATTRIBUTES
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.graphs.graph import Constant, Graph, OperatorNode
from ckpttool.mapping.rules import (
    AxisSlice,
    BlockOrder,
    ChannelOrder,
    ConcatPart,
    Move,
    Permute,
    Reshape,
    Rule,
    rule_steps,
)
from ckpttool.networks.network import SELU_ALPHA, SELU_SCALE

# Entries of a constant of the program that the code contains; larger ones are weights that no file has.
_MOST_ENTRIES = 256
# Names that modules of the code have already, and names that statements use.
_TAKEN = TORCH_ATTRIBUTES | {"tensor"}
_USED = frozenset(("self", "torch", "nn", "F", "float", "tuple", "tensors", "TENSORS", "Model", "load"))
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
    model.load_state_dict(tensors(torch.load(path, weights_only=True)), strict=True)
    return model.eval()


def tensors(value, name=""):
    \"\"\"Return the tensors of nested dictionaries by their dotted names.\"\"\"
    if not isinstance(value, dict):
        return {name: value} if torch.is_tensor(value) else {}
    parts = (tensors(each, f"{name}.{key}" if name else str(key)) for key, each in value.items())
    return {key: each for part in parts for key, each in part.items()}
"""

_ACT = """

def act(model, *observations):
    \"\"\"Return the actions, and the next states of a policy that receives states.\"\"\"
    with torch.no_grad():
        results = model(*(torch.as_tensor(each, dtype=torch.float32) for each in observations))
    actions, *states = results if isinstance(results, tuple) else (results,)
    actions = actionsEND.numpy()
    return (actions, *(each.numpy() for each in states)) if states else actions
"""
# Functions of the code that recurrent layers use; the gates have ONNX's order.
_HELPERS = {
    "divide": '''def divide(a, b):
    """Return a / b; whole numbers are divided without a rest."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")''',
    "run_cell": '''def run_cell(cell, x, w, r, bias, states, directions):
    """Return the outputs [steps, directions, batch, units] and the last states [directions, batch, units]."""
    outputs, lasts = [], []
    states = states or [torch.zeros(len(w), x.shape[1], r.shape[2])] * 2
    for n, step in enumerate(directions):
        state, steps = [each[n] for each in states], []
        for entry in x if step > 0 else x.flip(0):
            state = cell(entry, state, w[n], r[n], *bias[n].chunk(2))
            steps.append(state[0])
        outputs.append(torch.stack(steps[::step]))
        lasts.append(state)
    return (torch.stack(outputs, 1), *map(torch.stack, zip(*lasts)))''',
    "batch_first": """def batch_first(results):
    outputs, *states = results
    return (outputs.permute(2, 0, 1, 3), *(each.transpose(0, 1) for each in states))""",
    "lstm_cell": """def lstm_cell(x, state, w, r, bias, bias_state):
    i, o, f, g = (x @ w.T + state[0] @ r.T + bias + bias_state).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c""",
    "gru_cell": """def gru_cell(x, state, w, r, bias, bias_state):
    h = state[0]
    (zx, rx, nx), (zh, rh, nh) = (x @ w.T + bias).chunk(3, -1), (h @ r.T + bias_state).chunk(3, -1)
    z = (zx + zh).sigmoid()
    return ((1 - z) * (nx + (rx + rh).sigmoid() * nh).tanh() + z * h,)""",
}

Arguments = Sequence[str]
Emit = Callable[["_GraphWriter", OperatorNode, Arguments], str]


def write_graph_code(
    graph: Graph,
    tree: Tree,
    moves: Sequence[Move],
    written: Tree,
    about: Sequence[str],
    act: str | None = None,
) -> str:
    """Return the text of a module that defines `Model` and `load(path)`.

    Args:
        graph: what the source computes.
        tree: the tree that the moves convert; its leaves have the bytes of the graph's constants.
        moves: the conversion of each leaf.
        written: the tree of the written file, a state dictionary with dotted names.
        about: lines about the file, for comments.
        act: what turns the output of a policy into actions, "" for nothing; None for another model, whose
            code has no function `act`.

    Raise UnsupportedError for what has no statement.

    """
    text = _GraphWriter(graph, tree, moves, written).text(about)
    return text if act is None else text + _ACT.replace("END", act)


def _refusal(what: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"--code cannot write {what}", found=found, hint="leave out --code")


class _GraphWriter:
    """Statements of a graph; `names` are the variables of its values, `literals` its small constants."""

    def __init__(self, graph: Graph, tree: Tree, moves: Sequence[Move], written: Tree) -> None:
        self.graph, self.tree, self.written = graph, tree, written
        # Names may have changed before the moves: a leaf's bytes show which entry it became.
        self.moves: dict[int, list[Move]] = {}
        for move in moves:
            if isinstance(leaf := tree[move.source], Leaf):
                self.moves.setdefault(id(leaf.source), []).append(move)
        self.names: dict[str, str] = {}
        self.constants: Mapping[str, Constant] = graph.constants
        self.lines: list[str] = []
        self.indent = 8
        self.helpers: set[str] = set()

    def text(self, about: Sequence[str]) -> str:
        """Return the whole module."""
        rows = []
        for path, leaf in self.written.tensors():
            kind = (leaf.dtype, leaf.shape, leaf.role == "parameter" and leaf.dtype.startswith("float"))
            names = [path, *(alias.path for alias in self.written.aliases.get(path, ()))]
            rows += [f"    {python_literal(self._key(name))}: {kind!r}," for name in names]
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
        blocks = [table, *(_HELPERS[name] for name in sorted(self.helpers)), "class Model"]
        return (
            f"{head}\n\n{comments}\n{_HEAD.replace('class Model', (chr(10) * 3).join(blocks))}\n"
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
        usable = is_word(name) and name.isascii() and name not in {*_USED, *_HELPERS, *self.names.values()}
        self.names[name] = name if usable and not re.fullmatch(r"[vx]\d+", name) else otherwise
        return self.names[name]

    def value(self, name: str) -> str:
        """Return the expression of a value: a variable, a tensor of the file, or a small constant."""
        if name in self.names:
            return self.names[name]
        constant = self.constants[name]
        if isinstance(constant.leaf, Leaf) and id(constant.leaf.source) in self.moves:
            return self._stored(self.moves[id(constant.leaf.source)], constant.rule)
        array = self.array(name)
        numbers = re.sub(r"\binf\b", 'float("inf")', repr(array.tolist()))
        return f"torch.tensor({numbers}, dtype=torch.{array.dtype.name})"

    def array(self, name: str) -> np.ndarray:
        """Return a constant that the code contains; raise UnsupportedError for another value."""
        constant = self.constants.get(name)
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

    def _stored(self, moves: Sequence[Move], rule: Rule) -> str:
        """Return the expression of a tensor of the source, in the form that `rule` gives it."""
        parts: list[tuple[str, tuple[Rule, ...]]] = []
        for move in moves:
            source, key = self.tree[move.source], self._key(move.target)
            stored = move.rule.leaf(source)
            if move.target not in self.written or not isinstance(stored, Leaf):
                raise _refusal("a constant that the written file does not contain", key)
            parts.append((f"self.tensor({python_literal(key)})", rule_steps(move.rule.inverse(source))))
        expression = self._joined(parts)
        for step in rule_steps(rule):
            expression = self._changed(expression, step)
        return expression

    def _joined(self, parts: Sequence[tuple[str, tuple[Rule, ...]]]) -> str:
        """Return the expression of a tensor from its parts and the steps that each still needs."""
        groups: dict[tuple[int, int, tuple[Rule, ...]], list[tuple[int, int, str]]] = {}
        for expression, steps in parts:
            changed = expression
            for number, step in enumerate(steps):
                if isinstance(step, ConcatPart):
                    rows = groups.setdefault((step.axis, step.whole, steps[number + 1 :]), [])
                    rows.append((step.start, step.stop, changed))
                    break
                changed = self._changed(changed, step)
            else:
                # A tensor that has several names in the file.
                return changed
        joined = []
        for (axis, whole, rest), rows in groups.items():
            ends = [0, *(stop for _, stop, _ in sorted(rows))]
            if [start for start, _, _ in sorted(rows)] != ends[:-1] or ends[-1] != whole:
                raise _refusal("a weight of which the file contains a part", rows[0][2])
            joined.append((f"torch.cat([{', '.join(text for _, _, text in sorted(rows))}], {axis})", rest))
        return self._joined(joined)

    def _changed(self, expression: str, rule: Rule) -> str:
        match rule:
            case Permute(axes):
                return f"{expression}.permute{axes!r}"
            case Reshape(shape):
                return f"{expression}.reshape{tuple(shape)!r}"
            case AxisSlice(axis, start, stop):
                return f"{expression}.narrow({axis}, {start}, {stop - start})"
            case BlockOrder(axis, order):
                blocks = f"{expression}.unflatten({axis}, ({len(order)}, -1))"
                return f"{blocks}[{':, ' * axis}{list(order)}].flatten({axis}, {axis + 1})"
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
        if any(node.outputs[1:]) and node.op not in _SEVERAL:
            raise _refusal("an operator with several results", node.op)
        static = node.inputs[1:] if node.op in _STATIC else ()
        arguments = [self.value(name) if name and name not in static else "" for name in node.inputs]
        expression = emit(self, node, arguments)
        if node.op not in _SEVERAL:
            self.line(f"{self._variable(node.outputs[0], f'v{len(self.lines)}')} = {expression}")
        elif expression:
            self.line(f"{', '.join(self.results(node))}, = {expression}")

    def line(self, text: str) -> None:
        """Add a statement."""
        self.lines.append(" " * self.indent + text)

    def results(self, node: OperatorNode) -> list[str]:
        """Return a variable for each result of a node."""
        return [self._variable(name, f"v{len(self.lines)}_{n}") for n, name in enumerate(node.outputs)]

    def branch(self, head: str, graph: Graph, results: Sequence[str]) -> None:
        """Add the statements of a graph inside another one, which assign its outputs to the results."""
        self.line(head)
        outer, self.constants = self.constants, {**self.constants, **graph.constants}
        self.indent += 4
        for node in graph.nodes:
            self._add(node)
        for result, output in zip(results, graph.outputs, strict=True):
            self.line(f"{result} = {self.value(output.name)}")
        self.constants, self.indent = outer, self.indent - 4


# The statements, by operator: how it is written, and the attributes that are understood.

# Inputs after the first are numbers of the statement.
_STATIC = frozenset(
    (
        "Squeeze",
        "Unsqueeze",
        "ReduceMean",
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "Pad",
        "Clip",
        "Slice",
        "Split",
    )
)
# Operators with several results: their expression is a tuple, or "" if they add statements themselves.
_SEVERAL = frozenset(("Split", "If", "LSTM", "GRU"))


def _number(value: float) -> str:
    return repr(value) if np.isfinite(value) else f'float("{value}")'


def _require(node: OperatorNode, **usual: object) -> None:
    """Raise UnsupportedError for an attribute with another value than the usual one."""
    for name, value in usual.items():
        if node.attributes.get(name, value) != value:
            raise _refusal(f"{node.op} with this {name}", str(node.attributes[name]))


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
    kernel = writer.constants.get(node.inputs[1])
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
    if node.inputs[1] not in writer.constants:
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
    if axes == (-1,) and steps == (1,):
        return f"{arguments[0]}[..., {starts[0]}:{ends[0]}]"
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


def _division(writer: _GraphWriter, _: OperatorNode, arguments: Arguments) -> str:
    writer.helpers.add("divide")
    return f"divide({arguments[0]}, {arguments[1]})"


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


def _split(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axis = node.attributes.get("axis", 0)
    if len(node.inputs) > 1 and node.inputs[1]:
        return f"{arguments[0]}.split({list(writer.numbers(node.inputs[1]))}, {axis})"
    return f"{arguments[0]}.split(-(-{arguments[0]}.shape[{axis}] // {len(node.outputs)}), {axis})"


def _if(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    results = writer.results(node)
    writer.branch(f"if {arguments[0]}:", node.attributes["then_branch"], results)
    writer.branch("else:", node.attributes["else_branch"], results)
    return ""


_RECURRENT = (
    "activation_alpha",
    "activation_beta",
    "hidden_size",
    "direction",
    "activations",
    "linear_before_reset",
    "layout",
    "input_forget",
)
_DIRECTIONS = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}


def _recurrent(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get, lstm = node.attributes.get, node.op == "LSTM"
    directions = _DIRECTIONS[get("direction", "forward")]
    usual = ("sigmoid", "tanh", *["tanh"] * lstm) * len(directions)
    if tuple(map(str.lower, get("activations", usual))) != usual:
        raise _refusal(f"{node.op} with these activations", ", ".join(get("activations", usual)))
    # The usual functions have neither alpha nor beta.
    _require(node, input_forget=0, **({} if lstm else {"linear_before_reset": 1}))
    x, w, r, bias, *rest = (*arguments, "", "", "", "", "")[:8]
    states = [each for each in rest[1:] if each]
    if rest[0] or arguments[7:] or len(states) not in (0, 1 + lstm):
        raise _refusal(f"{node.op} with lengths, peepholes or one state", node.title)
    cell, batch_first = "lstm_cell" if lstm else "gru_cell", get("layout", 0)
    writer.helpers |= {cell, "run_cell", *(["batch_first"] * batch_first)}
    bias = bias or f"torch.zeros({len(directions)}, 2 * {w}.shape[1])"
    x, *states = (f"{each}.transpose(0, 1)" if batch_first else each for each in (x, *states))
    call = f"run_cell({cell}, {x}, {w}, {r}, {bias}, [{', '.join(states)}], {directions})"
    return f"{f'batch_first({call})' if batch_first else call}[:{len(node.outputs)}]"


def _attention(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get = node.attributes.get
    heads, mask = get("q_num_heads"), (*arguments, "")[3]
    _require(node, kv_num_heads=heads, left_window_size=-1, right_window_size=-1, softcap=0.0)
    if any(arguments[4:]) or (mask and get("is_causal", 0)):
        raise _refusal("an attention with this mask, past keys or lengths", node.title)
    split = f".unflatten(-1, ({heads}, -1)).transpose(1, 2)" if heads else ""
    q, k, v = (f"{each}{split}" for each in arguments[:3])
    more = f"{mask or None}, is_causal={bool(get('is_causal', 0))}, scale={get('scale')}"
    joined = ".transpose(1, 2).flatten(2)" if heads else ""
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, {more}){joined}"


def _gather(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axis = node.attributes.get("axis", 0)
    if axis < -1:
        raise _refusal("a choice of entries on an axis counted from the end", node.title)
    return f"{arguments[0]}[{'..., ' if axis < 0 else ':, ' * axis}{arguments[1]}]"


def _triangle(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    offset = writer.numbers(node.inputs[1])[0] if len(node.inputs) > 1 else 0
    return f"{arguments[0]}.{'triu' if node.attributes.get('upper', 1) else 'tril'}({offset})"


def _full(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    value = node.attributes.get("value")
    array = np.zeros(1, np.float32) if value is None else value.array()
    sizes = f"tuple({arguments[0]}.tolist())"
    return f"torch.full({sizes}, {_number(array.item())}, dtype=torch.{array.dtype.name})"


def _shape(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    part = "" if start is end is None else f"[{'' if start is None else start}:{'' if end is None else end}]"
    return f"torch.tensor({arguments[0]}.shape{part}, dtype=torch.int64)"


def _fold(function: str) -> Emit:
    return lambda _, __, arguments: reduce(lambda a, b: f"torch.{function}({a}, {b})", arguments)


def _last(text: str, *ignored: str, **usual: object) -> tuple[Emit, tuple[str, ...]]:
    """Return the row of a norm over the axes from `axis` on."""

    def emit(_: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
        _require(node, stash_type="float32", **usual)
        scale, bias = (*arguments[1:], "None", "None")[:2]
        values = {"axis": -1, "epsilon": 1e-5, "num_groups": 0, **node.attributes}
        return text.format(arguments[0], scale, bias or None, **values)

    return emit, ("axis", "epsilon", "num_groups", "stash_type", *ignored)


# Functions of one tensor without settings.
_PLAIN = {
    row.onnx: f"nn.{row.torch}()({{0}})"
    for row in ACTIVATION_KINDS.values()
    if row.onnx and row.torch and row.is_plain and row.name not in ("gelu", "selu")
}
_OF_TORCH = (
    *("Exp", "Log", "Sqrt", "Abs", "Neg", "Erf", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Asin", "Acos"),
    *("Atan", "Asinh", "Acosh", "Atanh", "Ceil", "Floor", "Round", "Sign", "IsNaN"),
)
_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Equal": "==", "Greater": ">", "GreaterOrEqual": ">="}
_SIGNS |= {"Less": "<", "LessOrEqual": "<=", "And": "&", "Or": "|", "Xor": "^"}
_WINDOW = ("kernel_shape", "strides", "pads", "ceil_mode", "auto_pad")
_POOLED = "{0}.flatten(2).mean(-1).reshape(*{0}.shape[:2], *[1] * ({0}.ndim - 2))"
_STATEMENTS: Mapping[str, tuple[Emit, tuple[str, ...]]] = {
    **{op: (_function(text), ()) for op, text in _PLAIN.items()},
    **{op: (_function(f"{{0}} {sign} {{1}}"), ()) for op, sign in _SIGNS.items()},
    **{op: (_function(f"torch.{op.lower()}({{0}})"), ()) for op in _OF_TORCH},
    "Not": (_function("~{0}"), ()),
    "Where": (_function("torch.where({0}, {1}, {2})"), ()),
    "Max": (_fold("maximum"), ()),
    "Min": (_fold("minimum"), ()),
    "Sum": (lambda _, __, arguments: " + ".join(arguments), ()),
    "Pow": (_function("torch.pow({0}, {1}).to({0}.dtype)"), ()),
    "Softplus": (_function("F.softplus({0})"), ()),
    "PRelu": (_function("torch.where({0} < 0, {0} * {1}, {0})"), ()),
    "Celu": (_with_attribute("F.celu({0}, {alpha!r})", alpha=1.0), ("alpha",)),
    "Selu": (
        _with_attribute("{gamma!r} * F.elu({0}, {alpha!r})", alpha=SELU_ALPHA, gamma=SELU_SCALE),
        ("alpha", "gamma"),
    ),
    "Swish": (_with_attribute("{0} * torch.sigmoid({alpha!r} * {0})", alpha=1.0), ("alpha",)),
    "HardSigmoid": (
        _with_attribute("torch.clamp({0} * {alpha!r} + {beta!r}, 0, 1)", alpha=0.2, beta=0.5),
        ("alpha", "beta"),
    ),
    "LayerNormalization": _last("F.layer_norm({0}, {0}.shape[{axis}:], {1}, {2}, {epsilon!r})"),
    "RMSNormalization": _last("F.rms_norm({0}, {0}.shape[{axis}:], {1}, {epsilon!r})"),
    "GroupNormalization": _last("F.group_norm({0}, {num_groups}, {1}, {2}, {epsilon!r})"),
    "InstanceNormalization": _last("F.instance_norm({0}, None, None, {1}, {2}, eps={epsilon!r})"),
    "Split": (_split, ("axis", "num_outputs")),
    "If": (_if, ("then_branch", "else_branch")),
    "LSTM": (_recurrent, _RECURRENT),
    "GRU": (_recurrent, _RECURRENT),
    "Attention": (
        _attention,
        (
            "q_num_heads",
            "kv_num_heads",
            "is_causal",
            "scale",
            "left_window_size",
            "right_window_size",
            "softcap",
        ),
    ),
    "ArgMax": (
        _with_attribute("{0}.argmax({axis}, keepdim={keepdims} == 1)", axis=0, keepdims=1),
        ("axis", "keepdims"),
    ),
    "Einsum": (lambda _, n, a: f"torch.einsum({n.attributes['equation']!a}, {', '.join(a)})", ("equation",)),
    "Gather": (_gather, ("axis",)),
    "Compress": (_with_attribute("{0}.index_select({axis}, {1}.nonzero().flatten())"), ("axis",)),
    "Expand": (_function("{0}.broadcast_to(torch.broadcast_shapes({0}.shape, tuple({1}.tolist())))"), ()),
    "ConstantOfShape": (_full, ("value",)),
    "Trilu": (_triangle, ("upper",)),
    "Size": (_function("torch.tensor({0}.numel())"), ()),
    "Shape": (_shape, ("start", "end")),
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
