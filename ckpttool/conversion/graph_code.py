"""Write the PyTorch module or Keras model that computes a graph with the weights of a converted file.

The meaning of operators is that of graphs/graph.py; an operator, an attribute or a constant that has no
statement here is refused by its name. Images have ONNX's order of axes in both frameworks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from ckpttool.conversion.graph_modules import Form, GraphModules
from ckpttool.conversion.graph_texts import ACT, ACT_WITH_STATES, LANGUAGES, ONE_HOT, STATES
from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.conversion.model_code import TORCH_ATTRIBUTES, Names, number_code, torch_function
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, display
from ckpttool.graphs.builder import needed_nodes
from ckpttool.graphs.graph import Constant, Graph, OpenShape, OperatorNode, Value
from ckpttool.graphs.interpreter import evaluate
from ckpttool.graphs.shapes import infer_shapes
from ckpttool.libraries.schema import Choices
from ckpttool.mapping.rules import (
    KEEP,
    AxisSlice,
    BlockOrder,
    Cast,
    ChannelOrder,
    ConcatPart,
    Move,
    Permute,
    Reshape,
    Rule,
    SumTerm,
    chain_rules,
    rule_steps,
)
from ckpttool.networks.network import SELU_ALPHA, SELU_SCALE

# Entries of a constant of the program that the code contains; larger ones are weights that no file has.
_MOST_ENTRIES = 256
# Entries of a constant inside a statement.
_MOST_IN_LINE = 8
# Names that modules of the code have already, and names that statements use.
_TAKEN = TORCH_ATTRIBUTES | {f"constant_{number}" for number in range(1, 100)}
_USED = frozenset(("self", "torch", "nn", "F", "np", "keras", "ops", "float", "tuple", "tensors", "len"))
_USED |= {"range", "sorted", "TENSORS", "Model", "load"}
Arguments = Sequence[str]
# A template of both frameworks, or that of PyTorch and that of Keras.
Pair = str | tuple[str, str]
Emit = Callable[["_GraphWriter", OperatorNode, Arguments], str]


def write_graph_code(
    graph: Graph,
    plan: GraphPlan,
    target: str,
    about: Sequence[str],
    calls: PolicyCalls | None = None,
) -> str:
    """Return the text of a module that defines `Model` and `load(path)`.

    Args:
        graph: what the source computes.
        plan: the conversion of the leaves that the graph's constants are.
        target: the name of the target's kind, one of LANGUAGES.
        about: lines about the file, for comments.
        calls: how a policy is called; None for another model, whose code has no function `act`.

    Raise UnsupportedError for what has no statement.
    """
    language = LANGUAGES[target]
    text = _GraphWriter(graph, plan, target).text(about)
    if calls is None:
        return text
    single = len(calls.encodings) - len(calls.states) == 1
    arguments = "observations" + ", *states" * bool(calls.states) if single else "*observations"
    observed = f"[{arguments}]" if single else "observations"
    if calls.states:
        count = str(len(calls.encodings) - len(calls.states))
        text += f"\n\n# The size of each state.\nSTATES = {calls.states!r}\n{STATES.replace('COUNT', count)}"
        observed = f"with_states({observed})"
    if any(calls.encodings):
        spaces = [
            encoding and (encoding.counts, encoding.starts, encoding.single) for encoding in calls.encodings
        ]
        text += f"\n\n# Counts and first numbers of discrete observations.\nSPACES = {spaces!r}\n{ONE_HOT}"
        observed = f"encoded({observed})"
    act = ACT_WITH_STATES if calls.states else ACT
    run = language.run.replace("OBSERVED", observed)
    return text + act.replace("ARGUMENTS", arguments).replace("RUN", run).replace("END", calls.result)


class PolicyCalls(NamedTuple):
    """What turns a policy's output, an array, into actions; what its inputs are.

    Args:
        result: the code behind the array.
        encodings: the discrete observations of each input.
        states: the shape of each state, without the batch; they are the last inputs, and begin with zeros.

    """

    result: str
    encodings: tuple[Choices | None, ...]
    states: tuple[tuple[int, ...], ...] = ()


class GraphPlan(NamedTuple):
    """A conversion as the code needs it.

    Args:
        tree: the tree that the moves convert; its leaves have the bytes of the graph's constants.
        moves: the conversion of each leaf.
        written: the tree of the written file.
        paths: where the written file has what the moves make.
    """

    tree: Tree
    moves: Sequence[Move]
    written: Tree
    paths: Mapping[Path, Path]


def _refusal(what: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"--code cannot write {what}", found=found, hint="leave out --code")


class _StoredPart(NamedTuple):
    """The expression of a tensor of the file, the leaf that it is, and the steps that it still needs."""

    expression: str
    leaf: Leaf
    steps: tuple[Rule, ...]


def _leaf_after(rule: Rule, leaf: Leaf) -> Leaf:
    """Return the leaf that a rule makes, of which only the shape is used."""
    changed = rule.leaf(leaf)
    return changed if isinstance(changed, Leaf) else leaf


def _sliced(expression: str, axis: int, start: int, stop: int) -> str:
    return f"{expression}[{':, ' * axis}{start}:{stop}]"


_LITERAL = ("torch.tensor({0}, dtype=torch.{1})", 'ops.convert_to_tensor({0}, dtype="{1}")')
_PERMUTE = ("{0}.permute{1!r}", "ops.transpose({0}, {1!r})")
_RESHAPE = ("{0}.reshape({1})", "ops.reshape({0}, {1})")
_CAST = ("{0}.to(torch.{to})", 'ops.cast({0}, "{to}")')
_CONCAT = ("torch.cat([{0}], {1})", "ops.concatenate([{0}], {1})")


def _with_layers(graph: Graph) -> Graph:
    """Return the graph with one node for a product and its bias, and for x * sigmoid(x).

    Values that are another one by another name are left out, unless a branch may use them.
    """
    nodes = {output: node for node in graph.nodes for output in node.outputs if output}
    uses = _count_uses(graph)
    joined: dict[int, OperatorNode | None] = {}
    same: dict[str, str] = {}
    for last in graph.nodes:
        pairs = [last.inputs[:2], last.inputs[1::-1]] if last.op in ("Add", "Mul") else []
        for name, other in (pair for pair in pairs if len(pair) == 2):
            first = nodes.get(name)
            if first is None or uses[name] != 1:
                continue
            if last.op == "Mul" and first.op == "Sigmoid" and first.inputs[0] == other:
                joined |= {
                    id(first): None,
                    id(last): replace(last, op="Swish", inputs=(other,), attributes={}),
                }
            elif last.op == "Add" and first.op == "MatMul" and _is_bias(graph, first.inputs[1], other):
                whole = replace(first, op="Gemm", inputs=(*first.inputs, other), outputs=last.outputs)
                joined |= {id(first): None, id(last): whole}
        if last.op == "Identity" and not _has_branches(graph):
            same[last.outputs[0]] = same.get(last.inputs[0], last.inputs[0])
            joined[id(last)] = None
    kept = [one for node in graph.nodes if (one := joined.get(id(node), node)) is not None]
    return _renamed(graph, kept, same)


def _known_shapes(graph: Graph) -> Mapping[str, OpenShape | None]:
    """Return the shapes of a graph's values, none where they cannot be computed."""
    try:
        return infer_shapes(graph)
    except CkpttoolError:
        return {}


def _known_ranks(graph: Graph, shapes: Mapping[str, OpenShape | None]) -> dict[str, int]:
    """Return the numbers of the values' axes, as far as they are known, also without an input's shape."""
    ranks = {name: len(shape) for name, shape in shapes.items() if shape is not None}
    for node in graph.nodes:
        kernel = graph.constants.get(node.inputs[1]) if node.op == "Conv" else None
        own = {ranks.get(name, 0) for name in node.inputs if name and name not in graph.constants}
        same = node.op in _BY_ENTRY or node.op in ("BatchNormalization", "MaxPool", "AveragePool")
        if kernel is not None and kernel.shape:
            ranks.setdefault(node.outputs[0], len(kernel.shape))
        elif same and len(own) == 1 and own != {0}:
            ranks.setdefault(node.outputs[0], *own)
    return ranks


def _is_bias(graph: Graph, matrix: str, bias: str) -> bool:
    """Return whether a constant has an entry for each column of a constant matrix."""
    shapes = [graph.constants[name].shape if name in graph.constants else None for name in (matrix, bias)]
    return len(shapes[0] or ()) == 2 and shapes[1] == (shapes[0] or ())[1:]


def _count_uses(graph: Graph) -> Counter[str]:
    """Return how often each value is used, also by the branches."""
    uses = Counter(value.name for value in graph.outputs)
    for node in graph.nodes:
        uses.update(node.inputs)
        for branch in node.attributes.values():
            uses += _count_uses(branch) if isinstance(branch, Graph) else Counter()
    return uses


def _renamed(graph: Graph, nodes: Sequence[OperatorNode], same: Mapping[str, str]) -> Graph:
    """Return the graph with these nodes, which have the names in `same` instead of others."""
    outputs = tuple(value._replace(name=same.get(value.name, value.name)) for value in graph.outputs)
    moved = (replace(node, inputs=tuple(same.get(name, name) for name in node.inputs)) for node in nodes)
    return replace(graph, nodes=tuple(moved), outputs=outputs)


def _without_turns(graph: Graph) -> Graph:
    """Return the graph without transposes of which the second undoes the first.

    Between them are only functions of single entries. So are images of convolutions, whose channels are last
    in a policy's network and in files of Keras.
    """
    nodes = {output: node for node in graph.nodes for output in node.outputs if output}
    uses = _count_uses(graph)
    replaced: dict[str, str] = {}
    for last in graph.nodes if not _has_branches(graph) else ():
        name = last.inputs[0] if last.op == "Transpose" else ""
        while uses[name] == 1 and name in nodes and _is_by_entry(nodes[name], graph):
            name = nodes[name].inputs[0]
        first = nodes.get(name)
        if first is None or first.op != "Transpose" or uses[name] != 1 or name in replaced:
            continue
        order, back = (node.attributes.get("perm", ()) for node in (first, last))
        if order and [order[axis] for axis in back] == [*range(len(order))]:
            replaced |= {name: first.inputs[0], last.outputs[0]: last.inputs[0]}
    for name in replaced:
        while replaced[name] in replaced:
            replaced[name] = replaced[replaced[name]]
    kept = [node for node in graph.nodes if node.outputs[0] not in replaced]
    return _renamed(graph, kept, replaced)


def _has_branches(graph: Graph) -> bool:
    return any(isinstance(value, Graph) for node in graph.nodes for value in node.attributes.values())


def _is_by_entry(node: OperatorNode, graph: Graph) -> bool:
    """Return whether an operator computes each entry from the same entry of its first input."""
    sizes = [graph.constants[n].shape if n in graph.constants else None for n in node.inputs[1:]]
    return node.op in _BY_ENTRY and all(shape in ((), (1,)) for shape in sizes)


class _GraphWriter:
    """Statements of a graph; `names` are the variables of its values."""

    def __init__(self, graph: Graph, plan: GraphPlan, target: str) -> None:
        graph = _without_turns(_with_layers(graph))
        self.graph, self.plan = graph, plan
        self.last_uses = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
        self.last_uses |= dict.fromkeys((value.name for value in graph.outputs), len(graph.nodes))
        self.reuses = not _has_branches(graph)
        self.language = LANGUAGES[target]
        # Names may have changed before the moves: a leaf's bytes show which entry it became.
        self.moves: dict[int, list[Move]] = {}
        for move in plan.moves:
            if isinstance(leaf := plan.tree[move.source], Leaf):
                self.moves.setdefault(id(leaf.source), []).append(move)
        self.names: dict[str, str] = {}
        self.constants: Mapping[str, Constant] = graph.constants
        self.lines: list[str] = []
        self.indent = 8
        self.helpers: set[str] = set()
        self.sums: dict[Path, Move] = {}
        self.modules = GraphModules(self.language, self._stored_tensors())
        self.forms: dict[str, Form] = {}
        self.shapes = _known_shapes(graph)
        self.uses = _count_uses(graph)
        self.ranks = _known_ranks(graph, self.shapes)
        self.joined = {name for name, constant in graph.constants.items() if constant.path is not None}

    def pick(self, pair: Pair) -> str:
        """Return the template of the framework; both have the one of a single text."""
        return pair if isinstance(pair, str) else pair[self.language.column]

    def write(self, pair: Pair, *arguments: object, **settings: object) -> str:
        """Return an expression: the template of the framework with these arguments."""
        return self.pick(pair).format(*arguments, **settings)

    def text(self, about: Sequence[str]) -> str:
        """Return the whole module."""
        arguments = [self._variable(value.name, f"x{at}") for at, value in enumerate(self.graph.inputs)]
        for at, node in enumerate(self.graph.nodes):
            self._add(node, at)
        results = ", ".join(self.value(value.name) for value in self.graph.outputs)
        shapes = [
            name
            + f" [{', '.join(str(extent or 'batch') for extent in value.shape or ())}]" * bool(value.shape)
            for name, value in zip(arguments, self.graph.inputs, strict=True)
        ]
        comments = "\n".join(
            "# " + clean(line).encode("ascii", "backslashreplace").decode() for line in about
        )
        space = " " * 8
        method = [
            f"    def {self.language.method}(self, {', '.join(arguments)}):",
            *self.lines,
            f"{space}return {results}",
        ]
        title = (
            f'"""A converted model: `load(path)` returns it with its weights. Inputs: {"; ".join(shapes)}."""'
        )
        blocks = [*self.modules.blocks(), *(self.language.helpers[name] for name in sorted(self.helpers))]
        head = self.language.head.replace("class Model", (chr(10) * 3).join([*blocks, "class Model"]))
        init = "".join(f"{space}{line}\n" for line in self.modules.statements())
        code = f"{init}{self.modules.methods()}\n" + "\n".join(method) + "\n"
        flat = all(len(path) == 1 and isinstance(leaf, Leaf) for path, leaf in self.plan.written.items())
        load = self.language.load_flat if flat else self.language.load
        return f"{title}\n\n{comments}\n{head}{code}" + load.replace("STATE", self.modules.renamed("state"))

    def _stored_tensors(self) -> dict[Names, Leaf]:
        """Return the tensors of the written file; raise UnsupportedError for two of one name."""
        tensors: dict[Names, Leaf] = {}
        for path, leaf in self.plan.written.tensors():
            # Files of named tensors have one of the names of a shared one.
            others = () if self.language.keyed else self.plan.written.aliases.get(path, ())
            for one in (path, *(alias.path for alias in others)):
                names = self._names(one)
                if names in tensors:
                    raise _refusal("two tensors with one name", ".".join(names))
                if not self.language.keras or leaf.role in ("parameter", "buffer"):
                    tensors[names] = leaf
        return tensors

    def _names(self, path: Path) -> Names:
        """Return the names of a tensor of the written file, in PyTorch those of its state."""
        leaf, steps = self.plan.written.get(path), [str(step.value) for step in path]
        if self.language.keras:
            return tuple(steps)
        name = ".".join(steps)
        if isinstance(leaf, Leaf) and self.language.keyed:
            name = leaf.key.replace("/", ".")
        names = tuple(name.split("."))
        if not all(re.fullmatch(r"\w+", name, re.ASCII) and name not in _TAKEN for name in names):
            raise _refusal("a tensor with such a name", ".".join(names))
        return names

    def _variable(self, name: str, otherwise: str) -> str:
        ends = (*self.graph.inputs, *self.graph.outputs)
        word = re.sub(r"[\W_]+", "_", name).strip("_") if any(name == item.name for item in ends) else name
        used = {*_USED, *self.language.helpers, *self.names.values()}
        usable = is_word(word) and word.isascii() and word not in used
        self.names[name] = word if usable and not re.fullmatch(r"[vx]\d+", word) else otherwise
        return self.names[name]

    def value(self, name: str) -> str:
        """Return the expression of a value: a variable, a tensor of the file, or a small constant."""
        if name in self.names:
            return self.names[name]
        constant = self.constants[name]
        if isinstance(constant.leaf, Leaf) and id(constant.leaf.source) in self.moves:
            moves = self.moves[id(constant.leaf.source)]
            terms = any(isinstance(step, SumTerm) for move in moves for step in rule_steps(move.rule))
            if terms and not self._is_added(name):
                raise _refusal("a term of a sum that is used by itself", name)
            return self._stored(moves, constant.rule)
        array = self.array(name)
        if array.dtype == np.float32 and array.size > _MOST_IN_LINE:
            return self.modules.constant(array)
        numbers = re.sub(r"\binf\b", 'float("inf")', repr(array.tolist()))
        return self.write(_LITERAL, numbers, array.dtype.name)

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
        parts: list[_StoredPart] = []
        paths = [(move, self.plan.paths.get(move.target, move.target)) for move in moves]
        # A Keras file has one of the names of a shared tensor; parts that are missing are refused below.
        for move, path in [path for path in paths if path[1] in self.plan.written] or paths:
            source = self.plan.tree[move.source]
            stored = move.rule.leaf(source)
            if path not in self.plan.written or not isinstance(stored, Leaf):
                raise _refusal("a constant that the written file does not contain", display(move.target))
            steps = rule_steps(move.rule)
            names = self._names(path)
            expression = self.modules.tensor(names)
            self.forms[expression] = Form(names, stored.shape)
            if steps and isinstance(steps[-1], SumTerm):
                # The other terms of the sum are zeros: see `_is_added`.
                first = self.sums.setdefault(path, move)
                expression = expression if first == move else f"(0 * {expression})"
                steps = steps[:-1]
            inverse = chain_rules(*steps).inverse(source) if steps else KEEP
            parts.append(_StoredPart(expression, stored, rule_steps(inverse)))
        expression, leaf = self._joined(parts)
        for step in rule_steps(rule):
            expression, leaf = self._changed(expression, leaf, step), _leaf_after(step, leaf)
        return expression

    def _joined(self, parts: Sequence[_StoredPart]) -> tuple[str, Leaf]:
        """Return the expression of a tensor from its parts and the steps that each still needs."""
        groups: dict[tuple[int, int, tuple[Rule, ...]], list[tuple[int, int, str, Leaf]]] = {}
        for part in parts:
            changed, leaf = part.expression, part.leaf
            for number, step in enumerate(part.steps):
                if isinstance(step, ConcatPart):
                    rows = groups.setdefault((step.axis, step.whole, part.steps[number + 1 :]), [])
                    rows.append((step.start, step.stop, changed, leaf))
                    break
                changed, leaf = self._changed(changed, leaf, step), _leaf_after(step, leaf)
            else:
                # A tensor that has several names in the file.
                return changed, leaf
        joined = []
        for (axis, whole, rest), rows in groups.items():
            rows.sort(key=lambda row: row[:2])
            ends = [0, *(stop for _, stop, _, _ in rows)]
            if [start for start, _, _, _ in rows] != ends[:-1] or ends[-1] != whole:
                raise _refusal("a weight of which the file contains a part", rows[0][2])
            leaf = rows[0][3]
            shape = (*leaf.shape[:axis], whole, *leaf.shape[axis + 1 :])
            text = self.write(_CONCAT, ", ".join(text for _, _, text, _ in rows), axis)
            joined.append(_StoredPart(text, replace(leaf, shape=shape), rest))
        return self._joined(joined)

    def _changed(self, expression: str, leaf: Leaf, rule: Rule) -> str:
        match rule:
            case Permute(axes):
                return self.turned(expression, axes)
            case Reshape(shape):
                return self.write(_RESHAPE, expression, tuple(shape))
            case Cast(dtype):
                return self.write(_CAST, expression, to=dtype)
            case AxisSlice(axis, start, stop):
                return _sliced(expression, axis, start, stop)
            case BlockOrder(axis, order):
                size = leaf.shape[axis] // len(order)
                pieces = [_sliced(expression, axis, at * size, (at + 1) * size) for at in order]
                return self.write(_CONCAT, ", ".join(pieces), axis)
            case ChannelOrder(axis, to, parts):
                pieces, start = [], 0
                for part in parts:
                    length = part[0] * part[1]
                    piece = _sliced(expression, axis, start, start + length)
                    if min(part) > 1:
                        sizes = part if to == "first" else part[::-1]
                        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
                        order = (*range(axis), axis + 1, axis, *range(axis + 2, len(leaf.shape) + 1))
                        split = self.write(_RESHAPE, piece, (*before, *sizes, *after))
                        turned = self.write(_PERMUTE, split, order)
                        piece = self.write(_RESHAPE, turned, (*before, length, *after))
                    pieces.append(piece)
                    start += length
                return pieces[0] if len(pieces) == 1 else self.write(_CONCAT, ", ".join(pieces), axis)
        raise _refusal("a weight that is stored in another form", rule.name)

    def turned(self, expression: str, axes: Sequence[int]) -> str:
        """Return a transposed value; one that is transposed twice in a row is as it was."""
        if (form := self.forms.get(expression)) is None:
            return self.write(_TURNED if axes == (1, 0) else _PERMUTE, expression, tuple(axes))
        before = form.axes or range(len(axes))
        order = tuple(before[axis] for axis in axes)
        plain = next(text for text, one in self.forms.items() if one == form._replace(axes=()))
        if order == (*range(len(order)),):
            return plain
        text = self.write(_TURNED if order == (1, 0) else _PERMUTE, plain, order)
        self.forms[text] = form._replace(axes=order)
        return text

    def layer(
        self, kind: str, tensors: Sequence[str], constructor: Pair, *sizes: object, shape: OpenShape = ()
    ) -> str | None:
        """Return the layer of the framework that has these tensors, None if the file has no such module."""
        forms = [self.forms[tensor] for tensor in tensors if tensor in self.forms]
        text = self.write(constructor, *sizes)
        return self.modules.layer(kind, forms, text, shape) if text and len(forms) == len(tensors) else None

    def values_of(self, name: str) -> np.ndarray | None:
        """Return what a value of the graph is that constants alone decide, None for another one."""
        nodes = needed_nodes(self.graph.nodes, needed := {name})
        if needed & {value.name for value in self.graph.inputs}:
            return None
        if not nodes:
            return self.constants[name].read(name)
        return evaluate(replace(self.graph, nodes=nodes, inputs=(), outputs=(Value(name),)), {})[name]

    def _free_variable(self, at: int) -> str:
        """Return a variable that no node after this one uses, and that is no argument."""
        if not self.reuses:
            return f"v{len(self.lines)}"
        needed = {name for value, name in self.names.items() if self.last_uses.get(value, -1) > at}
        needed |= {self.names[value.name] for value in self.graph.inputs}
        names = itertools.chain(("x",), (f"v{number}" for number in itertools.count(1)))
        return next(name for name in names if name not in needed)

    def _operands(self, node: OperatorNode, arguments: list[str]) -> list[str]:
        """Return the arguments of a sum or product, with a number instead of a tensor of one."""
        for name, (at, other) in zip(node.inputs, ((0, -1), (1, 0)), strict=False):
            constant, shape = self.constants.get(name), self.shapes.get(node.inputs[other])
            if constant is None or constant.path is not None or node.inputs[other] in self.constants:
                continue
            same = shape is not None and self.shapes.get(node.outputs[0]) == shape
            if constant.shape == () or (same and _MOST_ENTRIES >= np.prod(constant.shape or ()) > 0):
                array = self.array(name)
                if array.dtype == np.float32 and np.isfinite(array).all() and (array == array.flat[0]).all():
                    arguments[at] = number_code(array.flat[0])
        return arguments

    def _add(self, node: OperatorNode, at: int = 0) -> None:
        emit, known = _STATEMENTS.get(node.op, (None, ()))
        if emit is None:
            about = f"{node.op} in {node.title}" if node.title else node.op
            reason = node.attributes.get("not_understood")
            raise _refusal("this operator or layer", ", ".join(filter(None, (about, reason))))
        if unknown := node.attributes.keys() - set(known):
            raise _refusal(f"{node.op} with this attribute", min(unknown))
        if any(node.outputs[1:]) and node.op not in _SEVERAL:
            raise _refusal("an operator with several results", node.op)
        static = node.inputs[1:] if node.op in _STATIC else ()
        arguments = [self.value(name) if name and name not in static else "" for name in node.inputs]
        if node.op in ("Add", "Sub", "Mul"):
            arguments = self._operands(node, arguments)
        expression = emit(self, node, arguments)
        if node.op in _JOINING and self.uses[node.outputs[0]] == 1 and set(node.inputs) <= self.joined:
            # A tensor of a layer in parts: an expression of that layer's call.
            self.joined.add(node.outputs[0])
            self.names[node.outputs[0]] = expression
        elif node.op not in _SEVERAL:
            self.line(f"{self._variable(node.outputs[0], self._free_variable(at))} = {expression}")
        elif expression:
            names = self.results(node)
            self.line(f"{', '.join(names)}{',' * (len(names) == 1)} = {expression}")

    def line(self, text: str) -> None:
        """Add a statement."""
        self.lines.append(" " * self.indent + text)

    def _is_added(self, name: str) -> bool:
        """Return whether a value is only used as a term of a sum, such as that of an LSTM's two biases."""
        users = [node for node in self.graph.nodes if name in node.inputs]
        return all(
            node.op == "Add"
            or (node.op in ("LSTM", "RNN") and node.inputs.index(name) == 3)
            or (node.op in _JOINING and all(map(self._is_added, node.outputs)))
            for node in users
        )

    def results(self, node: OperatorNode) -> list[str]:
        """Return a variable for each result of a node."""
        return [
            self._variable(name, f"v{len(self.lines)}_{n}")
            if not self.reuses or name in self.last_uses
            else "_"
            for n, name in enumerate(node.outputs)
        ]

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


# Inputs after the first are numbers of the statement.
_STATIC = frozenset(("Squeeze", "Unsqueeze", "Pad", "Clip", "Slice", "Split"))
_STATIC |= {f"Reduce{kind}" for kind in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp")}
# Operators that join terms of a sum for a layer, and change none of them.
_JOINING = frozenset(("Concat", "Unsqueeze", "Reshape", "Identity"))
# Operators with several results: their expression is a tuple, or "" if they add statements themselves.
_SEVERAL = frozenset(("Split", "If", "LSTM", "GRU", "RNN"))


def _number(value: float) -> str:
    return repr(value) if np.isfinite(value) else f'float("{value}")'


def _require(node: OperatorNode, **usual: object) -> None:
    """Raise UnsupportedError for an attribute with another value than the usual one."""
    for name, value in usual.items():
        if node.attributes.get(name, value) != value:
            raise _refusal(f"{node.op} with this {name}", str(node.attributes[name]))


def _expression(text: Pair, defaults: Mapping[str, Any]) -> Emit:
    return lambda writer, node, arguments: writer.write(text, *arguments, **{**defaults, **node.attributes})


def _linear(writer: _GraphWriter, matrix: str, bias: str = "") -> str | None:
    """Return the layer of a matrix [in, out] and its bias, None if these are not the tensors of one."""
    form, other = writer.forms.get(matrix), writer.forms.get(bias)
    if form is None or len(form.shape) != 2:
        return None
    sizes = [form.shape[axis] for axis in form.axes or (0, 1)]
    if bias and (other is None or other.shape != (sizes[1],)):
        return None
    pair = ("nn.Linear({0}, {1}{2})", "keras.layers.Dense({1}{2})")
    bare = "" if bias else writer.pick((", bias=False", ", use_bias=False"))
    return writer.layer("Linear", [matrix, *([bias] if bias else [])], pair, *sizes, bare)


def _product(writer: _GraphWriter, _: OperatorNode, arguments: Arguments) -> str:
    layer = _linear(writer, arguments[1])
    return f"{layer}({arguments[0]})" if layer else writer.write(_PRODUCT, *arguments)


def _gemm(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get = node.attributes.get
    left, right = (
        writer.turned(argument, (1, 0)) if get(flag, 0) else argument
        for argument, flag in zip(arguments, ("transA", "transB"), strict=False)
    )
    if get("alpha", 1.0) == get("beta", 1.0) == 1 and (layer := _linear(writer, right, *arguments[2:])):
        return f"{layer}({left})"
    product = writer.write(_PRODUCT, left, right)
    product = product if get("alpha", 1.0) == 1 else f"{get('alpha')!r} * ({product})"
    if len(arguments) < 3 or not arguments[2]:
        return product
    scale = "" if get("beta", 1.0) == 1 else f"{get('beta')!r} * "
    return f"{product} + {scale}{arguments[2]}"


def _padding(node: OperatorNode, axes: int) -> list[tuple[int, int]]:
    """Return the padding before and behind each axis; refuse one that depends on the input's size."""
    if node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise _refusal(f"{node.op} with this padding", str(node.attributes["auto_pad"]))
    pads = tuple(node.attributes.get("pads", (0,) * 2 * axes))
    return [*zip(pads[:axes], pads[axes:], strict=True)]


def _convolution_settings(
    strides: Sequence[int], padding: Sequence[int], dilations: Sequence[int], groups: int
) -> str:
    """Return the keywords of PyTorch's convolutions that have another value than the usual one."""
    settings = {"stride": (strides, 1), "padding": (padding, 0), "dilation": (dilations, 1)}
    more = "".join(
        f", {name}={numbers[0] if len({*numbers}) == 1 else numbers}"
        for name, (numbers, usual) in settings.items()
        if {*numbers} != {usual}
    )
    return more + f", groups={groups}" * (groups != 1)


def _convolution_layer(
    writer: _GraphWriter, node: OperatorNode, arguments: Arguments, settings: tuple[Any, Any, Any, int]
) -> str | None:
    """Return the layer of a convolution; in Keras its input has the padding, and its channels last."""
    kernel = writer.constants[node.inputs[1]].shape
    assert kernel is not None  # noqa: S101 - see `_convolution`
    (out, inside, *size), groups = kernel, settings[3]
    tensors = [*arguments[1:2], *(argument for argument in arguments[2:3] if argument)]
    if writer.language.keras:
        strides, _, dilations, _ = settings
        more = ", use_bias=False" * (len(tensors) < 2) + f", groups={groups}" * (groups != 1)
        more += f", strides={strides}" * (max(strides) > 1) + f", dilation_rate={dilations}" * (
            max(dilations) > 1
        )
        text = f"keras.layers.Conv{len(size)}D({out}, {tuple(size)}{more})"
    else:
        extent = size[0] if len({*size}) == 1 else tuple(size)
        more = _convolution_settings(*settings) + ", bias=False" * (len(tensors) < 2)
        text = f"nn.Conv{len(size)}d({inside * groups}, {out}, {extent}{more})"
    return writer.layer("Conv", tensors, text, shape=(*[""] * (len(size) + 1), inside * groups))


def _convolution(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    kernel = writer.constants.get(node.inputs[1])
    axes = len((kernel and kernel.shape) or ()) - 2
    if kernel is None or axes not in (1, 2, 3):
        raise _refusal("a convolution whose kernel is computed", node.title)
    get, ones = node.attributes.get, (1,) * axes
    strides, dilations = tuple(get("strides", ones)), tuple(get("dilations", ones))
    if get("auto_pad") == "SAME_UPPER" and strides == ones:
        # More at the end, as in both frameworks.
        wide = [(extent - 1) * step for extent, step in zip((kernel.shape or ())[2:], dilations, strict=True)]
        pads = [(extent // 2, extent - extent // 2) for extent in wide]
    else:
        pads = _padding(node, axes)
    bias, groups = (arguments[2] if len(arguments) > 2 and arguments[2] else "None"), get("group", 1)
    if writer.language.keras:
        if max(strides) > 1 and max(dilations) > 1:
            raise _refusal("a convolution with strides and dilations", node.title)
        if layer := _convolution_layer(writer, node, arguments, (strides, None, dilations, groups)):
            writer.helpers.add("channels_last")
            return f"channels_last({layer}, {arguments[0]}, {pads})"
        writer.helpers.add("convolve")
        return f"convolve({arguments[0]}, {arguments[1]}, {bias}, {strides}, {pads}, {dilations}, {groups})"
    even = all(before == after for before, after in pads)
    sides = tuple(side for pair in reversed(pads) for side in pair)
    source = arguments[0] if even else f"F.pad({arguments[0]}, {sides})"
    padding = tuple(before for before, _ in pads) if even else (0,) * axes
    if layer := _convolution_layer(writer, node, arguments, (strides, padding, dilations, groups)):
        return f"{layer}({source})"
    more = _convolution_settings(strides, padding, dilations, groups)
    return f"F.conv{axes}d({source}, {arguments[1]}, {bias}{more})"


def _pool(kind: str) -> Emit:
    def emit(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
        get = node.attributes.get
        size = tuple(node.attributes["kernel_shape"])
        pads = _padding(node, len(size))
        steps, counted = tuple(get("strides", (1,) * len(size))), bool(get("count_include_pad", 0))
        if get("ceil_mode", 0) or any(dilation != 1 for dilation in get("dilations", ())):
            raise _refusal(f"{node.op} with this window", node.title)
        if writer.language.keras:
            writer.helpers.add("pool")
            return f"pool({arguments[0]}, {python_literal(kind)}, {size}, {steps}, {pads}, {counted})"
        if any(before != after for before, after in pads):
            raise _refusal(f"{node.op} with this window", node.title)
        more = "" if kind == "max" else f", count_include_pad={counted}"
        before = tuple(before for before, _ in pads)
        return f"F.{kind}_pool{len(size)}d({arguments[0]}, {size}, {steps}, {before}{more})"

    return emit


def _reshape(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.inputs[1] not in writer.constants:
        return writer.write(_RESHAPE, arguments[0], writer.write(_NUMBERS, arguments[1]))
    sizes = writer.numbers(node.inputs[1])
    if 0 in sizes and node.attributes.get("allowzero", 0):
        raise _refusal("a reshape to no elements", node.title)
    kept = [str(size) if size else writer.write(_EXTENT, arguments[0], at) for at, size in enumerate(sizes)]
    return writer.write(_RESHAPE, arguments[0], f"[{', '.join(kept)}]")


def _slice(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    starts, ends, *rest = (writer.numbers(name) for name in node.inputs[1:] if name)
    axes = rest[0] if rest else tuple(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else (1,) * len(starts)
    # TensorFlow's ends have 32 bits.
    stops = ["" if end >= 2**31 - 1 else str(end) for end in ends]
    if axes == (-1,) and steps == (1,):
        return f"{arguments[0]}[..., {starts[0]}:{stops[0]}]"
    if min(axes) < 0 or min(steps) < 1:
        raise _refusal("a slice of these axes or steps", node.title)
    words = {
        axis: f"{start}:{stop}" + f":{step}" * (step > 1)
        for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True)
    }
    return f"{arguments[0]}[{', '.join(words.get(axis, ':') for axis in range(max(axes) + 1))}]"


def _pad(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    pads = writer.numbers(node.inputs[1])
    count = len(pads) // 2
    _, _, value, chosen = (*node.inputs, "", "")[:4]
    axes = writer.numbers(chosen) if chosen else tuple(range(count))
    if node.attributes.get("mode", "constant") != "constant" or min((*pads, *axes)) < 0:
        raise _refusal("a padding of this kind", node.title)
    sides = {axis: (pads[at], pads[at + count]) for at, axis in enumerate(axes)}
    filled = _number(writer.array(value).item()) if value else "0.0"
    return writer.write(_PAD, arguments[0], sides, filled)


def _division(writer: _GraphWriter, _: OperatorNode, arguments: Arguments) -> str:
    writer.helpers.add("divide")
    return f"divide({arguments[0]}, {arguments[1]})"


def _reduce(functions: tuple[str, str], inner: Pair = "{0}", outer: Pair = "{0}") -> Emit:
    """Return the writer of a reduction of a function of the entries, and of a function of the result."""

    def emit(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
        axes = writer.numbers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else ()
        if not axes:
            raise _refusal(f"{node.op} over all axes", node.title)
        kept = bool(node.attributes.get("keepdims", 1))
        entries, function = writer.write(inner, arguments[0]), writer.pick(functions)
        return writer.write(outer, writer.write(_REDUCTION, entries, axes, kept, function=function))

    return emit


def _squeeze(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axes = writer.numbers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    return writer.write(("{0}.squeeze({2})", "ops.squeeze({0}, {1})"), arguments[0], axes, axes or "")


def _unsqueeze(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axes = writer.numbers(node.inputs[1])
    if min(axes) < 0:
        raise _refusal("new axes counted from the end", node.title)
    expression = arguments[0]
    for axis in sorted(axes):
        expression = writer.write(("{0}.unsqueeze({1})", "ops.expand_dims({0}, {1})"), expression, axis)
    return expression


def _clip(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    ends = [writer.array(name).item() if name else None for name in (*node.inputs[1:], "", "")[:2]]
    none = ("None", 'float("{}inf")')
    low, high = (
        writer.write(none, sign) if end is None else _number(end)
        for end, sign in zip(ends, ("-", ""), strict=True)
    )
    return writer.write(("torch.clamp({0}, {1}, {2})", "ops.clip({0}, {1}, {2})"), arguments[0], low, high)


def _flatten(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.attributes.get("axis", 1) != 1:
        raise _refusal("a flattening of other axes", node.title)
    return writer.write(("{0}.flatten(1)", "ops.reshape({0}, (ops.shape({0})[0], -1))"), arguments[0])


def _keras_norm(kind: str, epsilon: float, more: str = "") -> str:
    return f"keras.layers.{kind}Normalization(epsilon={epsilon!r}{more})"


def _batch_norm(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if node.attributes.get("training_mode", 0):
        raise _refusal("a batch norm in training", node.title)
    source, scale, bias, mean, variance = arguments
    epsilon = node.attributes.get("epsilon", 1e-5)
    rank, form = writer.ranks.get(node.inputs[0], 0), writer.forms.get(scale)
    if rank in (2, 3, 4, 5) and form is not None:
        (size,), more = form.shape, "" if epsilon == 1e-5 else f", eps={epsilon!r}"
        texts = (f"nn.BatchNorm{max(rank - 2, 1)}d({size}{more})", _keras_norm("Batch", epsilon, ", axis=1"))
        shape: OpenShape = ("", size, *[""] * (rank - 2))
        if layer := writer.layer("BatchNormalization", [scale, bias, mean, variance], texts, shape=shape):
            return f"{layer}({source})"
    if not writer.language.keras:
        return f"F.batch_norm({source}, {mean}, {variance}, {scale}, {bias}, eps={epsilon!r})"
    writer.helpers.add("by_channel")
    scale, bias, mean, variance = (f"by_channel({source}, {name})" for name in (scale, bias, mean, variance))
    return f"({source} - {mean}) / ops.sqrt({variance} + {epsilon!r}) * {scale} + {bias}"


def _split(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axis, count = node.attributes.get("axis", 0), len(node.outputs)
    if len(node.inputs) > 1 and node.inputs[1]:
        sizes = [*writer.numbers(node.inputs[1])]
        ends = np.cumsum(sizes)[:-1].tolist()
        pair = ("{0}.split({1}, {2})", "ops.split({0}, {3}, {2})")
        return writer.write(pair, arguments[0], sizes, axis, ends)
    shape = writer.shapes.get(node.inputs[0]) or ()
    extent = shape[axis] if -len(shape) <= axis < len(shape) else ""
    if isinstance(extent, int) and extent % count == 0:
        return writer.write(("{0}.chunk({1}, {2})", "ops.split({0}, {1}, {2})"), arguments[0], count, axis)
    size = writer.write(_EXTENT, arguments[0], axis)
    pair = (
        "{0}.split(-(-{1} // {3}), {2})",
        "ops.split({0}, [n * -(-{1} // {3}) for n in range(1, {3})], {2})",
    )
    return writer.write(pair, arguments[0], size, axis, count)


def _if(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    results = writer.results(node)
    writer.branch(f"if {arguments[0]}:", node.attributes["then_branch"], results)
    writer.branch("else:", node.attributes["else_branch"], results)
    return ""


_RECURRENT = (
    *("activation_alpha", "activation_beta", "hidden_size", "direction", "activations"),
    *("linear_before_reset", "layout", "input_forget"),
)
_DIRECTIONS = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}


# The order of ONNX's gates among those of PyTorch's layers.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


def _memory(writer: _GraphWriter, node: OperatorNode, names: Sequence[str]) -> str | None:
    """Return the layer of PyTorch whose tensors are those of a recurrent operator, None without one."""
    reset_first = node.op == "GRU" and not node.attributes.get("linear_before_reset", 0)
    directions = _DIRECTIONS[node.attributes.get("direction", "forward")]
    arrays = [writer.values_of(name) for name in names]
    if reset_first or directions[0] < 0 or len(arrays) != 3 or any(array is None for array in arrays):
        return None
    w, r, bias = (array for array in arrays if array is not None)
    units, width = r.shape[2], w.shape[2]
    ends = ("_l0", "_l0_reverse")[: len(directions)]
    every = [f"{name}{end}" for end in ends for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    expected = [part for n in range(len(ends)) for part in (w[n], r[n], *np.split(bias[n], 2))]

    def reordered(leaf: Leaf) -> np.ndarray:
        array = leaf.array()
        blocks = array.reshape(len(_GATES[node.op]), -1, *array.shape[1:])
        return blocks[list(_GATES[node.op])].reshape(array.shape)

    for module, leaves in writer.modules.of_names(every):
        pairs = zip(map(reordered, leaves), expected, strict=True)
        if all(np.array_equal(stored, array) for stored, array in pairs):
            more = ", bidirectional=True" * (len(ends) == 2)
            return writer.modules.claim(module, every, f"nn.{node.op}({width}, {units}{more})")
    return None


def _recurrent(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get, lstm = node.attributes.get, node.op == "LSTM"
    directions = _DIRECTIONS[get("direction", "forward")]
    usual = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}[node.op]
    usual *= len(directions)
    if tuple(map(str.lower, get("activations", usual))) != usual:
        raise _refusal(f"{node.op} with these activations", ", ".join(get("activations", usual)))
    # The usual functions have neither alpha nor beta.
    _require(node, input_forget=0)
    x, w, r, bias, *rest = (*arguments, "", "", "", "", "")[:8]
    states = [name for name in rest[1:] if name]
    if rest[0] or arguments[7:] or len(states) not in (0, 1 + lstm):
        raise _refusal(f"{node.op} with lengths, peepholes or one state", node.title)
    layer = (
        None if writer.language.keras else _memory(writer, node, [name for name in node.inputs[1:4] if name])
    )
    if layer is not None:
        batch_first = get("layout", 0)
        writer.helpers |= {"run_memory", *(["batch_first"] * batch_first)}
        if batch_first:
            x, *states = (writer.write(_SWAPPED, name) for name in (x, *states))
        call = f"run_memory({layer}, {x}, [{', '.join(states)}])"
        return f"{f'batch_first({call})' if batch_first else call}[:{len(node.outputs)}]"
    reset_first = node.op == "GRU" and not get("linear_before_reset", 0)
    cell = "reset_first_cell" if reset_first else f"{node.op.lower()}_cell"
    batch_first = get("layout", 0)
    writer.helpers |= {cell, "run_cell", *(["batch_first"] * batch_first)}
    zeros = ("torch.zeros({0}, 2 * {1}.shape[1])", "ops.zeros(({0}, 2 * {1}.shape[1]))")
    bias = bias or writer.write(zeros, len(directions), w)
    if batch_first:
        x, *states = (writer.write(_SWAPPED, name) for name in (x, *states))
    call = f"run_cell({cell}, {x}, {w}, {r}, {bias}, [{', '.join(states)}], {directions})"
    return f"{f'batch_first({call})' if batch_first else call}[:{len(node.outputs)}]"


def _attention(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    get = node.attributes.get
    heads, mask = get("q_num_heads"), (*arguments, "")[3]
    _require(node, kv_num_heads=heads, left_window_size=-1, right_window_size=-1, softcap=0.0)
    if any(arguments[4:]) or (mask and get("is_causal", 0)):
        raise _refusal("an attention with this mask, past keys or lengths", node.title)
    causal, scale, parts = bool(get("is_causal", 0)), get("scale"), arguments[:3]
    if writer.language.keras:
        writer.helpers |= {"attend", *(["split_heads", "join_heads"] if heads else [])}
        q, k, v = (f"split_heads({part}, {heads})" if heads else part for part in parts)
        call = f"attend({q}, {k}, {v}, {mask or None}, {causal}, {scale})"
        return f"join_heads({call})" if heads else call
    split = f".unflatten(-1, ({heads}, -1)).transpose(1, 2)" if heads else ""
    q, k, v = (f"{part}{split}" for part in parts)
    joined = ".transpose(1, 2).flatten(2)" if heads else ""
    more = f"{mask or None}, is_causal={causal}, scale={scale}"
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, {more}){joined}"


def _swish(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    if (alpha := node.attributes.get("alpha", 1.0)) == 1:
        return writer.write(_PLAIN["Swish"], *arguments)
    pair = ("{0} * torch.sigmoid({1!r} * {0})", "{0} * ops.sigmoid({1!r} * {0})")
    return writer.write(pair, *arguments, alpha)


def _gather(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axis = node.attributes.get("axis", 0)
    if axis < -1:
        raise _refusal("a choice of entries on an axis counted from the end", node.title)
    form = writer.forms.get(arguments[0])
    if form is not None and len(form.shape) == 2 and axis == 0 and node.inputs[1] not in writer.constants:
        texts = ("nn.Embedding({0}, {1})", "keras.layers.Embedding({0}, {1})")
        if layer := writer.layer("Embedding", arguments[:1], texts, *form.shape):
            return f"{layer}({arguments[1]})"
    pair = ("{0}[{2}{1}]", "ops.take({0}, {1}, axis={3})")
    return writer.write(pair, *arguments, "..., " if axis < 0 else ":, " * axis, axis)


def _arg_max(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    axis, kept = node.attributes.get("axis", 0), bool(node.attributes.get("keepdims", 1))
    pair = ("{0}.argmax({1}, keepdim={2})", 'ops.cast(ops.argmax({0}, {1}, keepdims={2}), "int64")')
    return writer.write(pair, arguments[0], axis, kept)


def _triangle(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    offset = writer.numbers(node.inputs[1])[0] if len(node.inputs) > 1 else 0
    name = "triu" if node.attributes.get("upper", 1) else "tril"
    return writer.write(("{0}.{1}({2})", "ops.{1}({0}, {2})"), arguments[0], name, offset)


def _full(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    value = node.attributes.get("value")
    array = np.zeros(1, np.float32) if value is None else value.array()
    pair = ("torch.full({0}, {1}, dtype=torch.{2})", 'ops.full({0}, {1}, dtype="{2}")')
    return writer.write(pair, writer.write(_NUMBERS, arguments[0]), _number(array.item()), array.dtype.name)


def _shape(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    part = "" if start is end is None else f"[{'' if start is None else start}:{'' if end is None else end}]"
    extents = writer.write(("{0}.shape", "ops.shape({0})"), arguments[0])
    return writer.write(_LITERAL, f"{extents}{part}", "int64")


def _fold(function: str) -> Emit:
    def emit(writer: _GraphWriter, _: OperatorNode, arguments: Arguments) -> str:
        package = writer.pick(("torch", "ops"))
        return reduce(lambda a, b: f"{package}.{function}({a}, {b})", arguments)

    return emit


_NORMS = {
    "LayerNormalization": "F.layer_norm({0}, {0}.shape[{axis}:], {1}, {2}, {epsilon!r})",
    "RMSNormalization": "F.rms_norm({0}, {0}.shape[{axis}:], {1}, {epsilon!r})",
    "GroupNormalization": "F.group_norm({0}, {num_groups}, {1}, {2}, {epsilon!r})",
    "InstanceNormalization": "F.instance_norm({0}, None, None, {1}, {2}, eps={epsilon!r})",
}
_KERAS_NORMS = {
    "LayerNormalization": "normalize({0}, {axes}, {1}, {2}, {epsilon!r})",
    "RMSNormalization": (
        "{0} / ops.sqrt(ops.mean(ops.square({0}), {axes}, keepdims=True) + {epsilon!r}) * {1}"
    ),
    "GroupNormalization": "normalize_groups({0}, {num_groups}, {1}, {2}, {epsilon!r})",
    "InstanceNormalization": "normalize_groups({0}, {0}.shape[1], {1}, {2}, {epsilon!r})",
}


def _norm(writer: _GraphWriter, node: OperatorNode, arguments: Arguments) -> str:
    """Return a norm over the axes from `axis` on, or over those of a group of channels."""
    _require(node, stash_type="float32")
    scale, bias = (*arguments[1:], "None", "None")[:2]
    values: dict[str, Any] = {"axis": -1, "epsilon": 1e-5, "num_groups": 0, **node.attributes}
    axis, form = values["axis"], writer.forms.get(scale)
    if form is not None and len(form.shape) == 1 and bias and axis == -1:
        (size,), epsilon = form.shape, values["epsilon"]
        more = "" if epsilon == 1e-5 else f", eps={epsilon!r}"
        texts = {
            "LayerNormalization": (f"nn.LayerNorm({size}{more})", _keras_norm("Layer", epsilon)),
            "GroupNormalization": (f"nn.GroupNorm({values['num_groups']}, {size}{more})", ""),
        }.get(node.op)
        if texts is not None and (layer := writer.layer(node.op, [scale, bias], texts)):
            return f"{layer}({arguments[0]})"
    if writer.language.keras and node.op != "RMSNormalization":
        grouped = node.op != "LayerNormalization"
        writer.helpers |= {"normalize", *(["normalize_groups", "by_channel"] if grouped else [])}
    values["axes"] = tuple(range(axis, 0)) if axis < 0 else f"tuple(range({axis}, len({arguments[0]}.shape)))"
    pair = (_NORMS[node.op], _KERAS_NORMS[node.op])
    return writer.write(pair, arguments[0], scale, bias or None, **values)


_NORM_ATTRIBUTES = ("axis", "epsilon", "num_groups", "stash_type")


_TURNED = ("{0}.T", "ops.transpose({0})")
_SWAPPED = ("{0}.transpose(0, 1)", "ops.swapaxes({0}, 0, 1)")
_PRODUCT = ("{0} @ {1}", "ops.matmul({0}, {1})")
_EXTENT = ("{0}.shape[{1}]", "ops.shape({0})[{1}]")
# Numbers that are computed: sizes for a function that needs them.
_NUMBERS = ("tuple({0}.tolist())", "tuple(ops.convert_to_numpy({0}).tolist())")
_SIZE, _SQUARE = ("torch.abs({0})", "ops.abs({0})"), ("torch.square({0})", "ops.square({0})")
_REDUCTION = ("{0}.{function}({1}, keepdim={2})", "ops.{function}({0}, {1}, keepdims={2})")
_PAD = (
    "F.pad({0}, [pad for axis in reversed(range({0}.ndim)) for pad in {1!r}.get(axis, (0, 0))], value={2})",
    "ops.pad({0}, [{1!r}.get(axis, (0, 0)) for axis in range(len({0}.shape))], constant_values={2})",
)
# Functions of one tensor without settings.
_PLAIN = {
    row.onnx: (
        f"{torch_function(row.name)}({{0}})".replace("nn.functional", "F"),
        f"keras.activations.{row.keras[0]}({{0}})",
    )
    for row in ACTIVATION_KINDS.values()
    if row.onnx and row.torch and row.keras and row.is_plain and row.name not in ("gelu", "selu")
}
_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Equal": "==", "Greater": ">", "GreaterOrEqual": ">="}
_SIGNS |= {"Less": "<", "LessOrEqual": "<=", "And": "&", "Or": "|", "Xor": "^"}
# Operators that compute each entry from the same entry of their first input.
_BY_ENTRY = frozenset((*_PLAIN, "Identity", "Add", "Sub", "Mul", "LeakyRelu", "Elu", "Celu", "Selu", "Gelu"))
_SAME = ("Exp", "Log", "Sqrt", "Abs", "Erf", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Ceil", "Floor", "Round")
_INVERSES = ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")
_SELU = {"alpha": SELU_ALPHA, "gamma": SELU_SCALE}
# Operators that one expression is: the attributes with their defaults, and the templates.
_EXPRESSIONS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    *((op, {}, *texts) for op, texts in _PLAIN.items()),
    *((op, {}, f"{{0}} {sign} {{1}}", f"{{0}} {sign} {{1}}") for op, sign in _SIGNS.items()),
    *((op, {}, f"torch.{op.lower()}({{0}})", f"ops.{op.lower()}({{0}})") for op in (*_SAME, "Sign", "IsNaN")),
    *((op, {}, f"torch.{op.lower()}({{0}})", f"ops.arc{op[1:]}({{0}})") for op in _INVERSES),
    ("Identity", {}, "{0}", "{0}"),
    ("Reciprocal", {}, "1 / {0}", "1 / {0}"),
    ("Neg", {}, "torch.neg({0})", "ops.negative({0})"),
    ("Not", {}, "~{0}", "ops.logical_not({0})"),
    ("Where", {}, "torch.where({0}, {1}, {2})", "ops.where({0}, {1}, {2})"),
    ("Pow", {}, "torch.pow({0}, {1}).to({0}.dtype)", "ops.cast(ops.power({0}, {1}), {0}.dtype)"),
    ("Tile", {}, "{0}.tile(tuple({1}.tolist()))", "ops.tile({0}, ops.convert_to_numpy({1}).tolist())"),
    ("Softplus", {}, "F.softplus({0})", "ops.softplus({0})"),
    ("PRelu", {}, "torch.where({0} < 0, {0} * {1}, {0})", "ops.where({0} < 0, {0} * {1}, {0})"),
    ("Elu", {"alpha": 1.0}, "F.elu({0}, {alpha!r})", "ops.elu({0}, {alpha!r})"),
    ("Celu", {"alpha": 1.0}, "F.celu({0}, {alpha!r})", "ops.celu({0}, {alpha!r})"),
    ("Selu", _SELU, "{gamma!r} * F.elu({0}, {alpha!r})", "{gamma!r} * ops.elu({0}, {alpha!r})"),
    ("LeakyRelu", {"alpha": 0.01}, "F.leaky_relu({0}, {alpha!r})", "ops.leaky_relu({0}, {alpha!r})"),
    (
        "HardSigmoid",
        {"alpha": 0.2, "beta": 0.5},
        "torch.clamp({0} * {alpha!r} + {beta!r}, 0, 1)",
        "ops.clip({0} * {alpha!r} + {beta!r}, 0.0, 1.0)",
    ),
    (
        "Gelu",
        {"approximate": "none"},
        "F.gelu({0}, approximate={approximate!r})",
        "ops.gelu({0}, approximate={approximate!r} == 'tanh')",
    ),
    ("Softmax", {"axis": -1}, "{0}.softmax({axis})", "ops.softmax({0}, axis={axis})"),
    ("LogSoftmax", {"axis": -1}, "{0}.log_softmax({axis})", "ops.log_softmax({0}, axis={axis})"),
    (
        "Compress",
        {"axis": 0},
        "{0}.index_select({axis}, {1}.nonzero().flatten())",
        "ops.take({0}, np.flatnonzero(ops.convert_to_numpy({1})), axis={axis})",
    ),
    (
        "Expand",
        {},
        "{0}.broadcast_to(torch.broadcast_shapes({0}.shape, tuple({1}.tolist())))",
        "ops.broadcast_to({0}, np.broadcast_shapes({0}.shape, tuple(ops.convert_to_numpy({1}).tolist())))",
    ),
    ("Size", {}, "torch.tensor({0}.numel())", 'ops.convert_to_tensor(ops.size({0}), dtype="int64")'),
    ("Cast", {"to": ""}, *_CAST),
    ("Transpose", {"perm": ()}, "{0}.permute{perm!r}", "ops.transpose({0}, {perm!r})"),
    (
        "GlobalAveragePool",
        {},
        "{0}.flatten(2).mean(-1).reshape(*{0}.shape[:2], *[1] * ({0}.ndim - 2))",
        "ops.mean({0}, tuple(range(2, len({0}.shape))), keepdims=True)",
    ),
)
_WINDOW = ("kernel_shape", "strides", "pads", "ceil_mode", "auto_pad")
_ATTENTION = ("q_num_heads", "kv_num_heads", "is_causal", "scale", "left_window_size", "right_window_size")
_STATEMENTS: Mapping[str, tuple[Emit, tuple[str, ...]]] = {
    **{op: (_expression((one, other), own), tuple(own)) for op, own, one, other in _EXPRESSIONS},
    **dict.fromkeys(_NORMS, (_norm, _NORM_ATTRIBUTES)),
    "Swish": (_swish, ("alpha",)),
    "Max": (_fold("maximum"), ()),
    "Min": (_fold("minimum"), ()),
    "Sum": (lambda _, __, arguments: " + ".join(arguments), ()),
    "Mean": (lambda _, __, arguments: f"({' + '.join(arguments)}) / {len(arguments)}", ()),
    "Split": (_split, ("axis", "num_outputs")),
    "If": (_if, ("then_branch", "else_branch")),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (_recurrent, _RECURRENT)),
    "Attention": (_attention, (*_ATTENTION, "softcap")),
    "Einsum": (
        lambda w, n, a: f"{w.pick(('torch', 'ops'))}.einsum({n.attributes['equation']!a}, {', '.join(a)})",
        ("equation",),
    ),
    "Gather": (_gather, ("axis",)),
    "ArgMax": (_arg_max, ("axis", "keepdims")),
    "ConstantOfShape": (_full, ("value",)),
    "Trilu": (_triangle, ("upper",)),
    "Shape": (_shape, ("start", "end")),
    "Div": (_division, ()),
    "MatMul": (_product, ()),
    "Gemm": (_gemm, ("alpha", "beta", "transA", "transB")),
    "Conv": (_convolution, ("strides", "pads", "dilations", "group", "auto_pad", "kernel_shape")),
    "BatchNormalization": (_batch_norm, ("epsilon", "momentum", "training_mode")),
    "MaxPool": (_pool("max"), (*_WINDOW, "dilations", "storage_order")),
    "AveragePool": (_pool("avg"), (*_WINDOW, "count_include_pad")),
    "Flatten": (_flatten, ("axis",)),
    "Reshape": (_reshape, ("allowzero",)),
    "Clip": (_clip, ()),
    "Slice": (_slice, ()),
    "Pad": (_pad, ("mode",)),
    "Concat": (lambda w, n, a: w.write(_CONCAT, ", ".join(a), n.attributes["axis"]), ("axis",)),
    "Squeeze": (_squeeze, ()),
    "Unsqueeze": (_unsqueeze, ()),
    "ReduceMean": (_reduce(("mean", "mean")), ("keepdims",)),
    "ReduceSum": (_reduce(("sum", "sum")), ("keepdims",)),
    "ReduceMax": (_reduce(("amax", "max")), ("keepdims",)),
    "ReduceMin": (_reduce(("amin", "min")), ("keepdims",)),
    "ReduceL1": (_reduce(("sum", "sum"), _SIZE), ("keepdims",)),
    "ReduceL2": (_reduce(("sum", "sum"), _SQUARE, ("torch.sqrt({0})", "ops.sqrt({0})")), ("keepdims",)),
    "ReduceSumSquare": (_reduce(("sum", "sum"), _SQUARE), ("keepdims",)),
    "ReduceLogSumExp": (_reduce(("logsumexp", "logsumexp")), ("keepdims",)),
}
