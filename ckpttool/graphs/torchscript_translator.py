"""Translation of TorchScript code to nodes of a graph: statements, modules, conditions and effects."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, ValueLeaf, attr, index, key
from ckpttool.graphs.builder import GraphBuilder, body
from ckpttool.graphs.graph import Graph, OpaqueError, OpenShape, OperatorNode, Value
from ckpttool.graphs.shapes import ShapeTracer
from ckpttool.graphs.torchscript_code import (
    ScriptFunction,
    ScriptInterpreter,
    ScriptModule,
    ScriptTensor,
    dotted_name,
)
from ckpttool.graphs.torchscript_numbers import LAST, NUMBERS
from ckpttool.graphs.torchscript_values import (
    InputMapping,
    InputShapeError,
    NumberValue,
    PartsValue,
    RaisedError,
    ShapeRange,
    SizesValue,
    TensorMemory,
    TensorValue,
    UnknownValue,
)
from ckpttool.mapping.rules import KEEP, Rule

# Steps of all loops together.
_STEPS = 5_000
# PyTorch's own code checks shapes of inputs; these checks are not part of the computation.
_TORCH = "__torch__.torch."
_DICTS = frozenset(map(attr, ("_modules", "_parameters", "_buffers")))
_FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass
class ScriptTranslator(ScriptInterpreter):
    """Translates the code; `operation` applies an operation, `integers` are the inputs of type int64.

    With `shapes`, those of all inputs in order, every shape that they determine is a number: conditions
    and loops that depend on it are evaluated, and InputShapeError is raised if an operation does not fit.
    """

    operation: Callable[[ScriptTranslator, str, list[Any], Mapping[str, Any]], Any] = field(kw_only=True)
    integers: set[str] = field(kw_only=True)
    build: GraphBuilder = field(default_factory=GraphBuilder)
    branches: int = 0
    effects: int = 0
    steps: int = 0
    tensors: dict[Path, TensorValue] = field(default_factory=dict)
    attributes: dict[tuple[Path, str], Any] = field(default_factory=dict)
    overwritten: dict[Path, None] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    where: list[str] = field(default_factory=list)
    shapes: Sequence[Shape] | None = None
    # Whether the shapes of the inputs include a batch.
    is_batched: bool = False

    def __post_init__(self) -> None:
        """Trace the shapes of values if those of the inputs are known."""
        self._tracer = ShapeTracer(Graph((), (), (), self.build.constants), {})
        if self.shapes is not None:
            self._left = [*self.shapes]
            self.build.inspect = self._trace

    def _trace(self, node: OperatorNode) -> None:
        self._tracer.add(node)
        if self._tracer.misfits:
            raise InputShapeError(node.op)

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a value, None if it is unknown."""
        return self._tracer.shape(name)

    def known(self, name: str) -> bool | int | float | None:
        """Return the number that a value without axes is for these inputs, None if it is unknown."""
        constant = self.build.constants.get(name)
        if self.shapes is None or (
            constant is not None and (constant.path is not None or constant.shape != ())
        ):
            return None
        array = self._tracer.known.get(name) if constant is None else constant.read(name)
        return array.item() if array is not None and array.size == 1 else None

    def graph(self, recorded: Sequence[Leaf]) -> Graph:
        """Return the graph of `forward`; `recorded` are the inputs with which it was traced."""
        self.is_batched = self.shapes is not None and not recorded
        arguments = list(self._arguments(recorded))
        result = self._called((), "forward", arguments)
        if self.shapes is not None and self._left:
            raise InputShapeError("another number of inputs")
        outputs: dict[str, Value] = {}
        for title, value in self._flat(result, ""):
            tensor = self.tensor(value)
            name = self.build.unique_name(title or "output")
            outputs[name] = Value(name, tensor.dtype)
            self.build.nodes.append(OperatorNode("Identity", (tensor.name,), (name,), {}))
        for path in self.overwritten:
            tensor = self.tensor(ScriptTensor(path))
            name = self.build.unique_name(f"{_title(path)}/next")
            outputs[name] = Value(name, tensor.dtype)
            self.build.nodes.append(OperatorNode("Identity", (tensor.name,), (name,), {}))
        return self.build.graph([*self.inputs.values()], [*outputs.values()])

    def _flat(self, value: Any, title: str) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of a result, with names from the keys of dicts."""
        if isinstance(value, list):
            for item in value:
                yield from self._flat(item, title)
        elif isinstance(value, dict):
            for name, item in value.items():
                yield from self._flat(item, str(name) if not title else f"{title}.{name}")
        elif isinstance(value, PartsValue):
            yield from self._flat(value.take(None), title)
        elif value is not None:
            yield title, value

    # Inputs.

    def _arguments(self, recorded: Sequence[Leaf]) -> Iterator[Any]:
        """Yield the values of `forward`'s arguments; optional ones have their default."""
        function = self._find_method((), "forward")
        arguments = function.args.args[1:]
        required = len(arguments) - len(function.args.defaults)
        leaves = iter(recorded)
        for argument in arguments[:required]:
            yield self._argument(argument.arg, argument.annotation, leaves)

    def _argument(self, name: str, annotation: ast.expr | None, leaves: Iterator[Leaf]) -> Any:
        if isinstance(annotation, ast.Subscript):
            kind = dotted_name(annotation.value)
            inner = annotation.slice
            if kind == "Tuple":
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return [self._argument(f"{name}_{n}", part, leaves) for n, part in enumerate(parts)]
            if kind == "Optional":
                return self._argument(name, inner, leaves)
            if kind == "Dict":
                return InputMapping(name)
        kind = dotted_name(annotation) if annotation is not None else "Tensor"
        if kind in ("int", "float", "bool"):
            dtype = {"int": "int64", "float": "float64", "bool": "bool"}[kind]
            self.inputs[name] = Value(self.build.unique_name(name), dtype, ())
            return NumberValue(name, dtype)
        if kind != "Tensor":
            raise OpaqueError(f"an input of type {kind or 'unknown'}")
        return self.add_input(name, next(leaves, None))

    def add_input(self, name: str, recorded: Leaf | None = None) -> TensorValue:
        """Return a new input of the graph; `recorded` is the one with which the archive was traced."""
        dtype = "int64" if name in self.integers else self.float_type
        rank = None
        if recorded is not None:
            dtype, rank = recorded.dtype, len(recorded.shape)
        shape: OpenShape | None = None if rank is None else ("",) * rank
        title = self.build.unique_name(name)
        if self.shapes is not None:
            if not self._left:
                raise InputShapeError("another number of inputs")
            shape = self._tracer.shapes[title] = self._left.pop(0)
            rank = len(shape)
        self.inputs[name] = Value(title, dtype, shape)
        return TensorValue(title, dtype, rank, TensorMemory(0), entry=None if recorded is not None else name)

    @cached_property
    def float_type(self) -> str:
        """The type of inputs: that of the archive's first parameter with fractions."""
        leaves = [leaf for _, leaf in self.tree.tensors() if leaf.dtype in _FLOATS]
        parameters = [leaf for leaf in leaves if leaf.role == "parameter"]
        return next((leaf.dtype for leaf in (*parameters, *leaves)), "float32")

    # The language.

    def _called(self, module: Path, name: str, arguments: Sequence[Any]) -> Any:
        cls = self._class(module)
        scope = tuple(str(step.value) for step in module)
        return self._guarded(
            cls,
            (scope, cls.rpartition(".")[0]),
            lambda: self._run_method(module, name, arguments),
            arguments,
        )

    def _run_method(self, module: Path, name: str, arguments: Sequence[Any]) -> Any:
        """Return the result of a method; with known shapes, a module without operations is a node as well."""
        count = self.build.count
        result = super()._called(module, name, arguments)
        unchanged = isinstance(result, TensorValue) and any(result is argument for argument in arguments)
        if self.shapes is None or count != self.build.count or not unchanged:
            return result
        return self.view(result, self.build.one("Identity", result.name), result.rank)

    def _function(self, name: str, arguments: Sequence[Any]) -> Any:
        where = name.rpartition(".")[0]
        return self._guarded(
            name,
            (self.build.scope, where),
            lambda: super(ScriptTranslator, self)._function(name, arguments),
            arguments,
        )

    def _guarded(
        self, title: str, location: tuple[tuple[str, ...], str], call: Callable[[], Any], args: Sequence[Any]
    ) -> Any:
        """Return the result of a call; one that cannot be translated is an opaque node."""
        before = (self.build.scope, self.depth, self.effects, self.build.location, len(self.build.nodes))
        self.build.scope = location[0]
        self.where.append(location[1])
        try:
            return call()
        except OpaqueError:
            whole = self.shapes is not None and len(self.where) == 1
            if whole or self.effects != before[2] or not self._tensor_names(args):
                raise
            del self.build.nodes[before[4] :]
            # The whole name, because a class may have the name of an operator.
            return self.opaque(re.sub(r"\.___torch_mangle_\d+", "", title), args)
        finally:
            self.where.pop()
            self.build.scope, self.depth, self.build.location = before[0], before[1], before[3]

    def opaque(
        self, title: str, arguments: Sequence[Any], settings: Mapping[str, Any] | None = None
    ) -> TensorValue:
        """Return the result of a node that the table of operators does not have."""
        name = self.build.add(title, self._tensor_names(arguments), **(settings or {}))[0]
        return TensorValue(name, None, None, self.new_storage())

    def _tensor_names(self, arguments: Sequence[Any]) -> list[str]:
        names = []
        for value in arguments:
            if isinstance(value, TensorValue | ScriptTensor):
                names.append(self.tensor(value).name)
            elif isinstance(value, NumberValue):
                names.append(value.name)
            elif isinstance(value, list):
                names += self._tensor_names(value)
            elif isinstance(value, dict):
                names += self._tensor_names([*value.values()])
        return names

    def _block(self, body_: Sequence[ast.stmt], scope: dict[str, Any]) -> tuple[bool, Any]:
        for node in body_:
            self.build.location = f"{self.where[-1] if self.where else ''} line {node.lineno}"
            done, value = self._statement(node, scope)
            if done:
                return True, value
        return False, None

    def _statement(self, node: ast.stmt, scope: dict[str, Any]) -> tuple[bool, Any]:
        if isinstance(node, ast.Expr):
            self._value(node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self._value(node.value, scope), scope)
        elif isinstance(node, ast.For | ast.While):
            return self._loop(node, scope)
        elif isinstance(node, ast.If):
            test = self._value(node.test, scope)
            if isinstance(test, NumberValue) and (number := self.known(test.name)) is not None:
                test = bool(number)
            if isinstance(test, NumberValue | TensorValue):
                self._branch(node, self.number(test, "bool"), scope)
                return False, None
            return self._block(node.body if self._truth(test) else node.orelse, scope)
        else:
            return super()._statement(node, scope)
        return False, None

    def _loop(self, node: ast.For | ast.While, scope: dict[str, Any]) -> tuple[bool, Any]:
        values: Any = ()
        if isinstance(node, ast.For):
            values = self._value(node.iter, scope)
            values = values.take(None) if isinstance(values, PartsValue) else values
            if not isinstance(values, list | range):
                raise OpaqueError("a loop whose length depends on a tensor")
        entries = iter(values)
        while True:
            if isinstance(node, ast.For):
                try:
                    self._assign(node.target, next(entries), scope)
                except StopIteration:
                    break
            elif not self._truth(self._value(node.test, scope)):
                break
            self._count_step()
            done, result = self._block(node.body, scope)
            if done:
                return True, result
        return False, None

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise OpaqueError("a loop with too many steps")

    def _truth(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OpaqueError("a condition that depends on a tensor")
        return value

    def _branch(self, node: ast.If, condition: str, scope: dict[str, Any]) -> None:
        """Add a condition whose value the graph computes, and merge the variables of its branches."""
        sides = []
        for statements in (node.body, node.orelse):
            inner: dict[str, Any] | None = dict(scope)
            self.branches += 1
            try:
                with self.build.branch() as nodes:
                    done, _ = self._block(statements, inner or {})
            except RaisedError:
                done, inner = False, None
            finally:
                self.branches -= 1
            if done:
                raise OpaqueError("a result that depends on a condition")
            sides.append((inner, nodes))
        for n, (inner, _) in enumerate(sides):
            if inner is not None:
                continue
            other, rest = sides[1 - n]
            if other is None:
                raise RaisedError
            # The inputs for which the code raises an exception have no result.
            if not self.where or not self.where[-1].startswith(_TORCH):
                with self.build.branch() as nodes:
                    self.build.add("RaiseException", (), 0)
                check, empty = body(nodes, ()), body((), ())
                then, orelse = (check, empty) if n == 0 else (empty, check)
                self.build.add("If", (condition,), 0, then_branch=then, else_branch=orelse)
            self.build.nodes += rest
            scope.update(other)
            return
        self._merge(condition, sides, scope)

    def _merge(self, condition: str, sides: Sequence[Any], scope: dict[str, Any]) -> None:
        (one, first), (two, second) = sides
        pairs: list[tuple[str, str]] = []
        names: list[Any] = []
        for name in {**one, **two}:
            if name not in one or name not in two:
                scope[name] = UnknownValue(name)
            else:
                scope[name] = self._joined(one[name], two[name], pairs, names)
        if not pairs and not first and not second:
            return
        then = body(first, [name for name, _ in pairs])
        orelse = body(second, [name for _, name in pairs])
        outputs = self.build.add("If", (condition,), len(pairs), then_branch=then, else_branch=orelse)
        for value, name in zip(names, outputs, strict=True):
            value.name = name

    def _joined(self, one: Any, two: Any, pairs: list[tuple[str, str]], names: list[Any]) -> Any:
        """Return the variable after a condition; one that differs becomes an output of the branches."""
        if one is two:
            return one
        if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
            return [self._joined(a, b, pairs, names) for a, b in zip(one, two, strict=True)]
        if isinstance(one, TensorValue | ScriptTensor) and isinstance(two, TensorValue | ScriptTensor):
            a, b = self.tensor(one), self.tensor(two)
            if a is b:
                return one
            if a.dtype != b.dtype:
                return UnknownValue("tensors of different types")
            pairs.append((a.name, b.name))
            rank = a.rank if a.rank == b.rank else None
            names.append(TensorValue("", a.dtype, rank, self.new_storage()))
            return names[-1]
        if isinstance(one, NUMBERS) and isinstance(two, NUMBERS):
            first, second = self.as_number(one), self.as_number(two)
            if not isinstance(one, NumberValue) and type(one) is type(two) and one == two:
                return one
            if first.dtype == second.dtype:
                pairs.append((first.name, second.name))
                names.append(NumberValue("", first.dtype))
                return names[-1]
        if type(one) is type(two) and one == two:
            return one
        return UnknownValue(f"{type(one).__name__} or {type(two).__name__}")

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Tuple):
            count = len(target.elts)
            if isinstance(value, PartsValue):
                value = value.take(count)
            elif isinstance(value, SizesValue):
                value = self._unpacked_sizes(value, count)
            elif isinstance(value, TensorValue):
                names = self.build.add("TupleUnpack", (value.name,), count)
                value = [TensorValue(name, None, None, self.new_storage()) for name in names]
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, scope)
            if not isinstance(owner, ScriptModule):
                raise OpaqueError("an assignment to an attribute")
            self._set_attribute(owner.path, target.attr, value)
            return
        super()._assign(target, value, scope)

    def _set_attribute(self, module: Path, name: str, value: Any) -> None:
        self.require_outside_branch()
        self.effects += 1
        self.attributes[module, name] = value
        if isinstance(value, TensorValue | ScriptTensor):
            path = (*module, attr(name))
            if isinstance(self.tree.get(path), Leaf):
                self.overwritten[path] = None
                self.tensors[path] = self.tensor(value)

    def require_outside_branch(self) -> None:
        """Refuse an effect in a branch that may not be taken."""
        if self.branches:
            raise OpaqueError("an effect that depends on a condition")

    def _unpacked_sizes(self, value: SizesValue, count: int) -> list[Any]:
        if len(value.parts) != 1:
            raise OpaqueError("a shape of unknown length")
        (part,) = value.parts
        if part.start == 0 and part.end is None and not self.branches:
            part.tensor.rank = count
        return [self.extent(part.tensor, part.start + n) for n in range(count)]

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Subscript):
            owner, at = self._value(node.value, scope), self._value(node.slice, scope)
            return self.item(owner, at)
        if isinstance(node, ast.Dict):
            keys = [self._value(part, scope) for part in node.keys if part is not None]
            return dict(zip(keys, (self._value(value, scope) for value in node.values), strict=True))
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, scope)
            return self.apply("torch.neg", [value], {}) if isinstance(value, NumberValue) else -value
        if isinstance(node, ast.Name) and node.id not in scope and node.id in ("inf", "nan"):
            return float(node.id)
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) > LAST:
            raise OpaqueError("a number of more than 64 bits")
        return super()._value(node, scope)

    def item(self, owner: Any, at: Any) -> Any:
        """Return an entry of a list, dict or shape."""
        if isinstance(owner, InputMapping):
            if at not in owner.entries:
                owner.entries[at] = self.add_input(f"{owner.name}.{at}")
            return owner.entries[at]
        if isinstance(owner, list) and isinstance(at, int) and -len(owner) <= at < len(owner):
            return owner[at]
        if isinstance(owner, dict) and at in owner:
            return owner[at]
        if isinstance(owner, PartsValue) and isinstance(at, int):
            return owner.take(None)[at]
        if isinstance(owner, SizesValue) and isinstance(at, int):
            part = owner.parts[0 if at >= 0 else -1]
            if isinstance(part, ShapeRange) and at >= 0 and part.start >= 0 and part.end is None:
                return self.extent(part.tensor, part.start + at)
            if isinstance(part, ShapeRange) and at < 0 and (part.end is None or part.end < 0):
                return self.extent(part.tensor, at + (part.end or 0))
        raise OpaqueError("an entry of an unknown list")

    def _of(self, module: Path, name: str) -> Any:
        if (module, name) in self.attributes:
            return self.attributes[module, name]
        value = super()._of(module, name)
        return self._stored_list(value.path) if isinstance(value, ScriptModule) else value

    @cached_property
    def _children(self) -> Mapping[Path, Mapping[Any, None]]:
        """The names directly below each path of the archive, in order."""
        children: dict[Path, dict[Any, None]] = {}
        for path in (*self.tree, *self.tree.containers, *self.tree.shared):
            for depth, step in enumerate(path):
                children.setdefault(path[:depth], {})[step.value] = None
        return children

    def _stored_list(self, path: Path) -> Any:
        """Return a module, or a list, tuple or dict of the archive."""
        container = self.tree.containers.get(path)
        if container is None or container.kind not in ("list", "tuple", "dict"):
            return ScriptModule(path)
        step = key if container.kind == "dict" else index
        names = self._children.get(path, {})
        values: dict[Any, Any] = {}
        for name in names:
            child = (*path, step(name))
            leaf = self.tree.get(child)
            if isinstance(leaf, ValueLeaf):
                values[name] = leaf.value
            elif isinstance(leaf, Leaf) or child in self.tree.shared:
                values[name] = ScriptTensor(self.tree.shared.get(child, child))
            else:
                values[name] = self._stored_list(child)
        if container.kind == "dict":
            return values
        return [values[n] for n in range(len(values))]

    def _call(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        called = dotted_name(node.func)
        if called in ("annotate", "unchecked_cast"):
            return self._value(node.args[1], scope)
        if called == "uninitialized":
            return UnknownValue("not set")
        if called == "ops.prim.RaiseException":
            raise RaisedError("RaiseException")
        if called is None or called.partition(".")[0] in scope:
            return self._call_value(node, scope.get(called or ""), scope)
        if called.startswith("__torch__.") and self._is_check(called, None):
            return None
        named = {word.arg: self._value(word.value, scope) for word in node.keywords if word.arg}
        values = self._values(node.args, scope)
        where = self.where[-1] if self.where else ""
        self.build.location = f"{where} line {node.lineno}, column {node.col_offset + 1}"
        return self.apply(called, values, named)

    def _call_value(self, node: ast.Call, function: Any, scope: Mapping[str, Any]) -> Any:
        """Return the result of calling a function or method that a variable holds."""
        if isinstance(function, ScriptFunction):
            if self._is_check(function.name, None):
                return None
            return self._function(function.name, self._values(node.args, scope))
        owner = self._value(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
        if not isinstance(owner, ScriptModule) or not isinstance(node.func, ast.Attribute):
            raise OpaqueError("a call of an unknown value")
        if self._is_check(node.func.attr, owner.path):
            return None
        return self._called(owner.path, node.func.attr, self._values(node.args, scope))

    def _values(self, nodes: Sequence[ast.expr], scope: Mapping[str, Any]) -> list[Any]:
        return [self._value(node, scope) for node in nodes]

    def _is_check(self, name: str, module: Path | None) -> bool:
        """Return whether a function of PyTorch's own code only checks its arguments."""
        where = name.rpartition(".")[0] if module is None else self._class(module).rpartition(".")[0]
        if not f"{where}.".startswith(_TORCH):
            return False
        try:
            function = self._find_function(name) if module is None else self._find_method(module, name)
        except OpaqueError:
            return False
        returns = function.returns
        if dotted_name(returns) != "NoneType" if returns is not None else True:
            return False
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                return False
            if isinstance(node, ast.Call):
                called = (dotted_name(node.func) or "").rpartition(".")[2]
                if called in ("append", "_set_item") or (called.endswith("_") and not called.endswith("__")):
                    return False
        return True

    # Values.

    def new_storage(self) -> TensorMemory:
        """Return the storage of a tensor that shares it with no other."""
        return TensorMemory(self.branches)

    def tensor(self, value: Any) -> TensorValue:
        """Return a value as a tensor; refuse others and overwritten ones."""
        if isinstance(value, ScriptTensor):
            value = self.tensors.get(value.path) or self._load(value.path)
        if isinstance(value, NumberValue):
            return TensorValue(value.name, value.dtype, 0, self.new_storage())
        if isinstance(value, bool | int | float):
            number = self.as_number(value)
            dtype = "float32" if isinstance(value, float) else number.dtype
            return TensorValue(self.build.number(value, dtype), dtype, 0, self.new_storage())
        if not isinstance(value, TensorValue):
            raise OpaqueError(f"a tensor is expected, found {type(value).__name__}")
        if value.version != value.storage.version or not value.storage.is_current():
            raise OpaqueError("a tensor that was overwritten through another one")
        if value.rank is None and (shape := self.shape(value.name)) is not None:
            value.rank = len(shape)
        return value

    def _load(self, path: Path, rule: Rule = KEEP) -> TensorValue:
        leaf = self.tree.get(path)
        if not isinstance(leaf, Leaf):
            raise OpaqueError("a tensor that is not listed")
        name = self.build.stored(path, leaf, _title(path), rule)
        wrapped = path[0].value == "CONSTANTS" and not leaf.shape and leaf.dtype in ("float64", "int64")
        value = TensorValue(name, leaf.dtype, len(leaf.shape), TensorMemory(0), wrapped=wrapped)
        if rule == KEEP:
            self.tensors[path] = value
        return value

    def stored_leaf(self, value: Any) -> Leaf | None:
        """Return the leaf of a stored tensor that was not overwritten, None for other values."""
        if not isinstance(value, ScriptTensor):
            return None
        tensor, leaf = self.tensor(value), self.tree.get(value.path)
        unchanged = tensor.name == self.build.stored(value.path, leaf, _title(value.path)) if leaf else False
        return leaf if isinstance(leaf, Leaf) and unchanged else None

    def changed(self, value: Any, rule: Rule) -> str:
        """Return the name of a stored tensor, changed by a rule."""
        return self._load(value.path, rule).name

    def new(self, name: str, dtype: str | None, rank: int | None) -> TensorValue:
        """Return a tensor with its own storage."""
        return TensorValue(name, dtype, rank, self.new_storage())

    def view(self, of: TensorValue, name: str, rank: int | None) -> TensorValue:
        """Return a tensor that may share the storage of another one."""
        return TensorValue(name, of.dtype, rank, of.storage, of.storage.version)

    def part(self, of: TensorValue, name: str, rank: int | None) -> TensorValue:
        """Return one of several parts of a tensor that do not overlap."""
        return TensorValue(name, of.dtype, rank, TensorMemory(of.storage.depth, of.storage))

    def overwrite(self, target: Any, value: TensorValue) -> TensorValue:
        """Give a tensor new values; others with the same storage cannot be used any more."""
        tensor = self.tensor(target)
        if tensor.storage.depth < self.branches:
            raise OpaqueError("an effect that depends on a condition")
        self.effects += 1
        changed = tensor.storage.overwrite()
        tensor.name, tensor.version, tensor.entry = value.name, tensor.storage.version, None
        for path, other in self.tensors.items():
            if other.storage in changed:
                self.overwritten[path] = None
        return tensor

    def as_number(self, value: Any) -> NumberValue:
        """Return a number as a value of the graph."""
        if isinstance(value, NumberValue):
            return value
        if isinstance(value, TensorValue | ScriptTensor):
            tensor = self.tensor(value)
            if tensor.dtype is None:
                raise OpaqueError("a number of unknown type")
            name = tensor.name
            if tensor.rank != 0:
                name = self.build.one("Reshape", name, self.build.number([], "int64"))
            return NumberValue(name, tensor.dtype)
        if not isinstance(value, bool | int | float):
            raise OpaqueError(f"a number is expected, found {type(value).__name__}")
        dtype = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float64"
        return NumberValue(self.build.number(value, dtype), dtype)

    def number(self, value: Any, dtype: str) -> str:
        """Return the name of a number in this type."""
        if isinstance(value, bool | int | float):
            return self.build.number(value, dtype)
        number = self.as_number(value)
        return number.name if number.dtype == dtype else self.build.one("Cast", number.name, to=dtype)

    def extent(self, tensor: TensorValue, axis: int | NumberValue) -> int | NumberValue:
        """Return the extent of an axis."""
        shape = self.shape(tensor.name)
        if shape is not None and isinstance(axis, int):
            return shape[axis]
        sizes = self.build.one("Shape", tensor.name)
        return NumberValue(self.build.one("Gather", sizes, self.number(axis, "int64")), "int64")

    def sizes(self, value: Any) -> str:
        """Return the name of a list of extents, int64."""
        parts = value.parts if isinstance(value, SizesValue) else value
        if isinstance(parts, int | NumberValue):
            parts = [parts]
        if not isinstance(parts, list | tuple):
            raise OpaqueError("a list of numbers is expected")
        if all(isinstance(part, int) and not isinstance(part, bool) for part in parts):
            return self.build.number(list(parts), "int64")
        names = []
        for part in parts:
            if isinstance(part, ShapeRange):
                ends = {} if part.end is None else {"end": part.end}
                names.append(self.build.one("Shape", part.tensor.name, start=part.start, **ends))
            else:
                shape = self.build.number([1], "int64")
                names.append(self.build.one("Reshape", self.number(part, "int64"), shape))
        return self.build.one("Concat", *names, axis=0) if len(names) != 1 else names[0]

    # Operations.

    def apply(self, called: str, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of an operation or function; an unknown one with tensors is opaque."""
        if called == "getattr" and len(arguments) == 2 and isinstance(arguments[0], ScriptModule):
            return self._of(arguments[0].path, str(arguments[1]))
        if called.startswith("__torch__."):
            return self._function(called, arguments)
        result = self.operation(self, called, arguments, named)
        number = self.known(result.name) if isinstance(result, NumberValue) else None
        return result if number is None else number


def _title(path: Path) -> str:
    """Return the name of a tensor, without the dicts that pickled modules have."""
    return ".".join(str(step.value) for step in path if step not in _DICTS)
