"""Write the PyTorch module or Keras model that computes a graph with the weights of a converted file.

The meaning of operators is that of graphs/graph.py; an operator, an attribute or a constant that has no
statement here is refused by its name. Images have ONNX's order of axes in both frameworks.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from ckpttool.conversion.graph_modules import (
    TORCH_ATTRIBUTES,
    Form,
    GraphModules,
    Item,
    Items,
    Names,
    number_code,
)
from ckpttool.conversion.graph_texts import (
    ACT,
    ACT_WITH_STATES,
    BLOCK,
    KERNEL_LANGUAGES,
    LANGUAGES,
    ONE_HOT,
    SELECTED,
    STATES,
    Language,
)
from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, display
from ckpttool.graphs.builder import needed_nodes
from ckpttool.graphs.graph import Constant, Graph, OpenShape, OperatorNode, Value
from ckpttool.graphs.interpreter import evaluate
from ckpttool.graphs.operators import look_up_operator
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

# Entries of a constant of a file that the code contains; larger ones are weights. Those of a program may be
# statistics of observations.
_MOST_ENTRIES, _MOST_OF_PROGRAM = 256, 1 << 16
# Entries of a constant inside a statement.
_MOST_IN_LINE = 8
# Names that modules of the code have already, and names that statements use.
_TAKEN = TORCH_ATTRIBUTES | {"_buffers", "_modules", "_parameters", "_non_persistent_buffers_set"}
_USED = frozenset(("self", "torch", "nn", "F", "np", "keras", "ops", "float", "tuple", "tensors", "len"))
_USED |= {"range", "sorted", "TENSORS", "Model", "load"}
Arguments = Sequence[str]
# A template of both frameworks, or that of PyTorch and that of Keras.
Pair = str | tuple[str, str]
Emit = Callable[["_GraphWriter", OperatorNode, Arguments], str]


class Method(NamedTuple):
    """A graph that the code computes: its method's name, "" for the call of the model, and a docstring."""

    graph: Graph
    name: str = ""
    text: str = ""


class PolicyCalls(NamedTuple):
    """What turns a policy's output, an array, into actions; what its inputs are.

    Args:
        result: the code behind the array, `output`.
        encodings: the discrete observations of each input.
        states: the shape of each state, without the batch; they are the last inputs, and begin with zeros.

    """

    result: str
    encodings: tuple[Choices | None, ...]
    states: tuple[tuple[int, ...], ...] = ()


def write_graph_code(
    methods: Sequence[Method],
    plan: GraphPlan,
    target: str,
    about: Sequence[str],
    calls: PolicyCalls | None = None,
) -> str:
    """Return the text of a module that defines `Model` and `load(path)`.

    Args:
        methods: what the source computes; the first one is what `act` calls.
        plan: the conversion of the leaves that the graphs' constants are.
        target: the name of the target's kind, one of LANGUAGES.
        about: lines about the file, for comments.
        calls: how a policy is called; None for another model, whose code has no function `act`.

    Raise UnsupportedError for what has no statement.
    """
    code = _ModelCode(methods, plan, target)
    return code.text(about) + (code.act(calls) if calls is not None else "")


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

    def __init__(
        self, graph: Graph, plan: GraphPlan, language: Language, file: _GraphWriter | None = None
    ) -> None:
        graph = _without_turns(_with_layers(graph))
        self.graph, self.plan, self.language = graph, plan, language
        self.last_uses = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
        self.last_uses |= dict.fromkeys((value.name for value in graph.outputs), len(graph.nodes))
        self.reuses = not _has_branches(graph)
        # Names may have changed before the moves: a leaf's bytes show which entry it became.
        self.moves: dict[int, list[Move]] = {}
        for move in plan.moves:
            if isinstance(leaf := plan.tree[move.source], Leaf):
                self.moves.setdefault(id(leaf.source), []).append(move)
        self.names: dict[str, str] = {}
        self.constants: Mapping[str, Constant] = graph.constants
        self.lines: list[str] = []
        self.indent = 8
        # Expressions of values that the next statement contains, and where layers are called.
        self.pending: dict[str, str] = {}
        self.calls: dict[int, Names] = {}
        self.runs: Mapping[int, tuple[Names, int]] = {}
        # Those of all graphs of a file.
        self.helpers: set[str] = set() if file is None else file.helpers
        self.sums: dict[Path, Move] = {} if file is None else file.sums
        tensors = self._stored_tensors() if file is None else {}
        self.modules: GraphModules = GraphModules(language, tensors) if file is None else file.modules
        self.forms: dict[str, Form] = {} if file is None else file.forms
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

    def method(self, name: str, text: str) -> str:
        """Return the method that computes the graph; without a name it is the call of its class."""
        inputs = [self._variable(value.name, f"x{at}") for at, value in enumerate(self.graph.inputs)]
        nodes, at = self.graph.nodes, 0
        while at < len(nodes):
            names, after = self.runs.get(at, ((), at + 1))
            node = replace(nodes[at], outputs=nodes[after - 1].outputs) if names else nodes[at]
            self._add(node, after - 1, names)
            at = after
        results = ", ".join(
            self.pending.get(value.name) or self.value(value.name) for value in self.graph.outputs
        )
        space = " " * 8
        return "\n".join(
            [
                f"    def {name or self.language.method}(self, {', '.join(inputs)}):",
                *[f'{space}"""{text}"""'] * bool(text),
                *self.lines,
                f"{space}return {results}",
            ]
        )

    @property
    def arguments(self) -> str:
        """The variables of the inputs, with their shapes."""
        shapes = (value.shape or () for value in self.graph.inputs)
        return "; ".join(
            self.names[value.name]
            + f" [{', '.join(str(extent or 'batch') for extent in shape)}]" * bool(shape)
            for value, shape in zip(self.graph.inputs, shapes, strict=True)
        )

    def sequences(self) -> dict[Names, tuple[Items, int, int]]:
        """Return the modules whose layers are computed one after the other, with the first and last node."""
        nodes: dict[Names, list[int]] = {}
        for at, names in self.calls.items():
            nodes.setdefault(names[:-1], []).append(at)
        chains = {names: self._chain(numbers) for names, numbers in nodes.items() if names}
        return {names: chain for names, chain in chains.items() if chain is not None}

    def _chain(self, numbers: Sequence[int]) -> tuple[Items, int, int] | None:
        items: list[Item] = []
        nodes, at = self.graph.nodes, numbers[0]
        for number in numbers:
            if number != at or (items and nodes[at].inputs[0] != nodes[at - 1].outputs[0]):
                return None
            after: list[str] = []
            while self._follows(at) and (function := _module_of(nodes[at + 1])):
                after.append(function)
                at += 1
            names = self.calls[number]
            items.append(Item(names[-1], self.modules.layers[names], tuple(after)))
            at += 1
            if number != numbers[-1] and self.uses[nodes[at - 1].outputs[0]] != 1:
                return None
        return tuple(items), numbers[0], at

    def _follows(self, at: int) -> bool:
        """Return whether only the next node uses a node's result, as its first input."""
        nodes, name = self.graph.nodes, self.graph.nodes[at].outputs[0]
        return at + 1 < len(nodes) and nodes[at + 1].inputs[:1] == (name,) and self.uses[name] == 1

    def _stored_tensors(self) -> dict[Names, Leaf]:
        """Return the tensors of the written file; raise UnsupportedError for two of one name."""
        tensors: dict[Names, Leaf] = {}
        # Optimizers have tensors of their own alone, a batch norm counts beside its parameters.
        networks = {path[:-1] for path, leaf in self.plan.written.tensors() if leaf.role not in _OF_TRAINING}
        for path, leaf in self.plan.written.tensors():
            if leaf.role == "slot" or (leaf.role in _OF_TRAINING and path[:-1] not in networks):
                continue
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
            return (*steps[:-1], steps[-1].removeprefix("_"))
        name = ".".join(steps)
        if isinstance(leaf, Leaf) and self.language.keyed:
            name = leaf.key.replace("/", ".")
        names = tuple(name.split("."))
        if not all(name and name.isprintable() and name not in _TAKEN for name in names):
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
            return self.modules.constant(array, name)
        numbers = re.sub(r"\binf\b", 'float("inf")', repr(array.tolist()))
        return self.write(_LITERAL, numbers, array.dtype.name)

    def array(self, name: str) -> np.ndarray:
        """Return a constant that the code contains; raise UnsupportedError for another value."""
        constant = self.constants.get(name)
        if constant is None:
            raise _refusal("an operator whose shape or axes are computed", name)
        array = constant.read(name)
        most = _MOST_OF_PROGRAM if constant.path is None else _MOST_ENTRIES
        if array.size > most or array.dtype.name not in (
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
        needed |= {word for text in self.pending.values() for word in re.findall(r"\b(?:x|v\d+)\b", text)}
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
                alike = np.isfinite(array).all() and (array == array.flat[0]).all()
                if alike and array.dtype in (np.float32, np.float64):
                    number = array.flat[0]
                    arguments[at] = number_code(number) if array.dtype == np.float32 else repr(float(number))
        return arguments

    def _add(self, node: OperatorNode, at: int = 0, sequence: Names = ()) -> None:
        """Add a node, or the first one of a sequence of layers with the outputs of its last one."""
        emit = _find_statement(node)
        inner = [name for name in node.inputs if name in self.pending]
        inner = inner if len(inner) == 1 and node.op in _INLINE and not sequence else []
        for name in node.inputs:
            if name in self.pending and name not in inner:
                self._assign(name, at - 1)
        self.names |= dict.fromkeys(inner, _PENDING)
        static = node.inputs[1:] if node.op in _STATIC else ()
        arguments = [self.value(name) if name and name not in static else "" for name in node.inputs]
        if node.op in ("Add", "Sub", "Mul"):
            arguments = self._operands(node, arguments)
        expression = emit(self, node, arguments)
        layer = expression.removesuffix(f"({arguments[0]})") if arguments else ""
        if sequence:
            expression = f"{self.modules.sequence(sequence)}({arguments[0]})"
        elif layer in self.modules.called:
            self.calls[at] = self.modules.called[layer]
        for name in inner:
            expression = self._with_pending(expression, name, at)
        self._add_results(node, expression, at)

    def _add_results(self, node: OperatorNode, expression: str, at: int) -> None:
        if node.op in _JOINING and self.uses[node.outputs[0]] == 1 and set(node.inputs) <= self.joined:
            # A tensor of a layer in parts: an expression of that layer's call.
            self.joined.add(node.outputs[0])
            self.names[node.outputs[0]] = expression
        elif node.op not in _SEVERAL and self._stays_inside(node, at, expression):
            self.pending[node.outputs[0]] = expression
        elif node.op not in _SEVERAL:
            self.line(f"{self._variable(node.outputs[0], self._free_variable(at))} = {expression}")
        elif expression:
            names = self.results(node)
            self.line(f"{', '.join(names)}{',' * (len(names) == 1)} = {expression}")

    def _assign(self, name: str, at: int) -> str:
        """Add a statement for a value that was to be inside the next one; return its variable."""
        text = self.pending.pop(name)
        variable = self._variable(name, self._free_variable(at))
        self.line(f"{variable} = {text}")
        return variable

    def _with_pending(self, expression: str, name: str, at: int) -> str:
        """Return an expression with that of its input, or with a variable if it is used twice or is long."""
        text = self.pending[name]
        if expression.count(_PENDING) != 1 or len(expression) + len(text) > _LONGEST:
            return expression.replace(_PENDING, self._assign(name, at - 1))
        del self.pending[name], self.names[name]
        is_argument = re.search(rf"\w\({_PENDING}[,)]", expression) is not None
        outer = ast.parse(text, mode="eval").body
        simple = isinstance(outer, (ast.Call, ast.Name, ast.Subscript, ast.Attribute))
        return expression.replace(_PENDING, text if is_argument or simple else f"({text})")

    def _stays_inside(self, node: OperatorNode, at: int, expression: str) -> bool:
        """Return whether a value has no variable: the only output, or one that the next node uses alone."""
        name, nodes = node.outputs[0], self.graph.nodes
        if not self.reuses or self.uses[name] != 1:
            return False
        if [value.name for value in self.graph.outputs] == [name]:
            return True
        follows = at + 1 < len(nodes) and name in nodes[at + 1].inputs and nodes[at + 1].op in _INLINE
        return follows and at + 1 not in self.runs and len(expression) < _LONGEST

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


class _ModelCode:
    """The classes and functions of the code of one file."""

    def __init__(self, methods: Sequence[Method], plan: GraphPlan, target: str) -> None:
        self.plan, self.language = plan, _language(target, plan.written)
        self.skipped: list[str] = []
        self.arguments = ""
        self.methods: list[Method] = []
        drafts: list[_GraphWriter] = []
        for method in methods:
            writer = _GraphWriter(method.graph, plan, self.language, drafts[0] if drafts else None)
            try:
                writer.method("", "")
            except UnsupportedError as error:
                if method is methods[0]:
                    raise
                self.skipped.append(f"{method.name.removesuffix('_output')}: {error.message}")
                continue
            drafts.append(writer)
            self.methods.append(method)
        self.modules, self.helpers = drafts[0].modules, drafts[0].helpers
        texts = []
        for method, runs in zip(self.methods, self._plan_sequences(drafts), strict=True):
            writer = _GraphWriter(method.graph, plan, self.language, drafts[0])
            writer.runs = runs
            texts.append(writer.method("", method.text))
            self.arguments = self.arguments or writer.arguments
        self.tops = self._find_classes(texts)
        self.names = self._name_methods()
        call = f"def {self.language.method}("
        self.texts = [
            re.sub(rf"\bself\.{top}\b", "self", text) if top else text
            for top, text in zip(self.tops, texts, strict=True)
        ]
        self.texts = [
            text.replace(call, f"def {name}(", 1) if name else text
            for name, text in zip(self.names, self.texts, strict=True)
        ]

    def _plan_sequences(self, writers: Sequence[_GraphWriter]) -> list[dict[int, tuple[Names, int]]]:
        """Return where the layers of a sequence are computed in each graph, for those of PyTorch."""
        chains = [{} if self.language.keras else writer.sequences() for writer in writers]
        runs: list[dict[int, tuple[Names, int]]] = [{} for _ in writers]
        for names in dict.fromkeys(names for own in chains for names in own):
            parents = [{call[:-1] for call in writer.calls.values()} for writer in writers]
            users = [n for n, own in enumerate(parents) if names in own]
            items = {chains[n][names][0] if names in chains[n] else () for n in users}
            if len(items) == 1 and self.modules.plan_sequence(names, *items):
                for n in users:
                    _, start, after = chains[n][names]
                    runs[n][start] = (names, after)
        return runs

    def _find_classes(self, texts: Sequence[str]) -> list[str]:
        """Return the module at the top that each graph computes with, "" for graphs without a class."""
        constants = {name.lower() for name in self.modules.constants}
        tops = [{*re.findall(r"\bself\.(\w+)", text)} - constants for text in texts]
        alone = all(len(own) == 1 and self.modules.may_be_class(*own) for own in tops)
        if self.language.keras or not alone or len(set().union(*tops)) < 2:
            return [""] * len(texts)
        return [own.pop() for own in tops]

    def _name_methods(self) -> list[str]:
        """Return the name of each method, "" for the call of its class."""
        names = []
        shorts = [method.name.rpartition("/")[2] for method in self.methods]
        for top, method, short in zip(self.tops, self.methods, shorts, strict=True):
            others = [other for above, other in zip(self.tops, shorts, strict=True) if above == top]
            unique = others.count(short) == 1 and short not in self.modules.every_name
            name = re.sub(r"\W", "_", short if unique else method.name, flags=re.ASCII)
            names.append("" if top and len(others) == 1 else name)
        return names

    def _class(self, head: str, text: str, statements: Sequence[str], methods: Sequence[str]) -> str:
        inside = "\n\n".join(methods)
        lines = [self.language.start, *statements, *self.modules.buffers(inside)]
        init = "\n".join(f"{' ' * 8}{line}" for line in lines)
        return f"{head}\n{text}    def __init__(self):\n{init}\n{self.modules.methods()}\n{inside}"

    def text(self, about: Sequence[str]) -> str:
        """Return the text without `act`."""
        classes: dict[str, str] = {}
        owners: dict[str, str] = {}
        for top in dict.fromkeys(filter(None, self.tops)):
            inside = [text for text, one in zip(self.texts, self.tops, strict=True) if one == top]
            title = f'    """The networks of {top.replace("_target", "")}."""\n\n'
            body = self._class("", title, self.modules.statements(top=(top,)), inside)
            name = "".join(word.capitalize() for word in top.split("_"))
            free = is_word(name) and name not in ("Model", "Block", *classes.values())
            owners[top] = classes.setdefault(body, name if free else f"{name}Network{len(classes)}")
        texts = [f"class {name}(nn.Module):{body}" for body, name in classes.items()]
        inside = [text for text, top in zip(self.texts, self.tops, strict=True) if not top]
        head = f"class Model({self.language.base}):"
        texts.append(self._class(head, "", self.modules.statements(owners), inside).rstrip())
        blocks = [*self.modules.blocks(), *[BLOCK] * any("Block(" in text for text in texts)]
        blocks += [self.language.helpers[name] for name in sorted(self.helpers)]
        lines = [*about, *(f"not computed here: {reason}" for reason in self.skipped)]
        comments = "\n".join(
            "# " + clean(line).encode("ascii", "backslashreplace").decode() for line in lines
        )
        title = '"""A converted model: `load(path)` returns it with its weights.'
        flat = all(len(path) == 1 and isinstance(leaf, Leaf) for path, leaf in self.plan.written.items())
        load = self.language.load_flat if flat else self.language.load
        code = "\n\n\n".join([*blocks, *texts]) + "\n" + load.replace("SELECTION", self._selection())
        head = self.language.head
        if not re.search(r"\bF\.", code):
            head = head.replace("from torch.nn import functional as F\n", "")
        return f'{title} Inputs: {self.arguments}."""\n\n{comments}\n{head}{code}'

    def _selection(self) -> str:
        """Return the statements that choose the tensors of the model's modules in the file."""
        renamed, whole = self.modules.renamed("state"), len([*self.plan.written.tensors()])
        text = f"    state = {renamed}\n" * (renamed != "state")
        return text + SELECTED * (len(self.modules.tensors) < whole)

    def act(self, calls: PolicyCalls) -> str:
        """Return the function from observations to actions, and what it needs."""
        single = len(calls.encodings) - len(calls.states) == 1
        arguments = "observations" + ", *states" * bool(calls.states) if single else "*observations"
        observed, text = f"[{arguments}]" if single else "observations", ""
        if calls.states:
            states = STATES.replace("COUNT", str(len(calls.encodings) - len(calls.states)))
            text += f"\n\n# The size of each state.\nSTATES = {calls.states!r}\n{states}"
            observed = f"with_states({observed})"
        if any(calls.encodings):
            spaces = [one and (one.counts, one.starts, one.single) for one in calls.encodings]
            about = "Counts and first numbers of discrete observations."
            text += f"\n\n# {about}\nSPACES = {spaces!r}\n{ONE_HOT}"
            observed = f"encoded({observed})"
        call, run = ".".join(filter(None, ("model", self.tops[0], self.names[0]))), self.language.run
        if observed == "[observations]":
            run = re.sub(r"\*\((.*\W)each(\W.*) for each in OBSERVED\)", r"\1observations\2", run)
        run = run.replace("OBSERVED", observed).replace("model(", f"{call}(")
        act = ACT_WITH_STATES if calls.states else ACT
        act = act.replace("ARGUMENTS", arguments).replace("RUN", run)
        return text + act.replace("RESULT", calls.result)


def _language(target: str, written: Tree) -> Language:
    """Return the language of a target: arrays that have the names of Keras are loaded into its layers."""
    names = {str(path[-1].value).rpartition(".")[2].removeprefix("_") for path, _ in written.tensors()}
    return (KERNEL_LANGUAGES if target in KERNEL_LANGUAGES and "kernel" in names else LANGUAGES)[target]


_OF_TRAINING = frozenset(("slot", "counter"))
# Inputs after the first are numbers of the statement.
_STATIC = frozenset(("Squeeze", "Unsqueeze", "Pad", "Clip", "Slice", "Split"))
_STATIC |= {f"Reduce{kind}" for kind in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp")}
# Operators that join terms of a sum for a layer, and change none of them.
_JOINING = frozenset(("Concat", "Unsqueeze", "Reshape", "Identity"))
# Operators with several results: their expression is a tuple, or "" if they add statements themselves.
_SEVERAL = frozenset(("Split", "If", "LSTM", "GRU", "RNN"))


def _number(value: float) -> str:
    return repr(value) if np.isfinite(value) else f'float("{value}")'


def _find_statement(node: OperatorNode) -> Emit:
    """Return what writes an operator; raise UnsupportedError for one that cannot be written."""
    emit, known = _STATEMENTS.get(node.op) or (_spelled_statement(node), ())
    if emit is None:
        about = f"{node.op} in {node.title}" if node.title else node.op
        reason = node.attributes.get("not_understood")
        raise _refusal("this operator or layer", ", ".join(filter(None, (about, reason))))
    if unknown := node.attributes.keys() - set(known):
        raise _refusal(f"{node.op} with this attribute", min(unknown))
    if any(node.outputs[1:]) and node.op not in _SEVERAL:
        raise _refusal("an operator with several results", node.op)
    return emit


def _spelled_statement(node: OperatorNode) -> Emit | None:
    """Return what calls the function that an operator is in both frameworks, by the names in its row."""
    row = look_up_operator(node.op)
    names = [] if row is None else [getattr(row.spelling, one).split()[:1] for one in ("torch", "keras")]
    if row is None or not all(names) or row.spelling.inputs != len(node.inputs):
        return None
    (torch,), (keras,) = names
    arguments = ", ".join(f"{{{n}}}" for n in range(len(node.inputs)))
    function = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", keras).lower()
    return _expression((f"torch.{torch}({arguments})", f"ops.{function}({arguments})"), {})


def _require(node: OperatorNode, **usual: object) -> None:
    """Raise UnsupportedError for an attribute with another value than the usual one."""
    for name, value in usual.items():
        if node.attributes.get(name, value) != value:
            raise _refusal(f"{node.op} with this {name}", str(node.attributes[name]))


def _expression(text: Pair, defaults: Mapping[str, Any]) -> Emit:
    return lambda writer, node, arguments: writer.write(text, *arguments, **{**defaults, **node.attributes})


def _module_of(node: OperatorNode) -> str:
    """Return the constructor of PyTorch's module that an operator of one tensor is, "" for others."""
    settings = dict(node.attributes)
    if node.op == "Flatten" and settings.pop("axis", 1) == 1:
        return "nn.Flatten()"
    slope = repr(settings.pop("alpha", 0.01)) if node.op == "LeakyRelu" else ""
    plain = node.op in _CLASSES and len(node.inputs) == 1 and not settings
    return f"nn.{_CLASSES[node.op]}({slope})" if plain else ""


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
        f"{'torch' if row.name in ('relu', 'tanh', 'sigmoid') else 'F'}.{row.name}({{0}})",
        f"keras.activations.{row.keras[0]}({{0}})",
    )
    for row in ACTIVATION_KINDS.values()
    if row.onnx and row.torch and row.keras and row.is_plain and row.name not in ("gelu", "selu")
}
_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Equal": "==", "Greater": ">", "GreaterOrEqual": ">="}
_SIGNS |= {"Less": "<", "LessOrEqual": "<=", "And": "&", "Or": "|", "Xor": "^"}
# The classes of PyTorch's modules that functions of one tensor are.
_CLASSES = {
    row.onnx: row.torch
    for row in ACTIVATION_KINDS.values()
    if row.onnx in (*_PLAIN, "LeakyRelu", "Elu", "Celu", "Selu", "Gelu", "Softplus") and row.torch
}
# Operators that compute each entry from the same entry of their first input.
_BY_ENTRY = frozenset((*_PLAIN, "Identity", "Add", "Sub", "Mul", "LeakyRelu", "Elu", "Celu", "Selu", "Gelu"))
# Operators whose statement contains what the statement before it computes.
_INLINE = _BY_ENTRY | {"Clip", "Cast", "Max", "Min", "Exp", "Sqrt", "Reciprocal", "Softplus", "HardSigmoid"}
_PENDING, _LONGEST = "pending_", 72
_SELU = {"alpha": SELU_ALPHA, "gamma": SELU_SCALE}
# Operators that one expression is: the attributes with their defaults, and the templates.
_EXPRESSIONS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    *((op, {}, *texts) for op, texts in _PLAIN.items()),
    *((op, {}, f"{{0}} {sign} {{1}}", f"{{0}} {sign} {{1}}") for op, sign in _SIGNS.items()),
    ("IsNaN", {}, "torch.isnan({0})", "ops.isnan({0})"),
    ("Identity", {}, "{0}", "{0}"),
    ("Reciprocal", {}, "1 / {0}", "1 / {0}"),
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
