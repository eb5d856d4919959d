"""Follows TorchScript's code as text to the steps that a policy computes; nothing of it is compiled or run.

An archive's `code/` is a small language of assignments and calls that looks like Python
(torch/csrc/jit/serialization/python_print.cpp). A forward that is one chain of known operations is followed;
anything else is
refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError
from ckpttool.formats.torch_pickle import archive, names, script
from ckpttool.layouts.model_steps import Cell, Step, Weights
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr
from ckpttool.source import File, Shape
from ckpttool.tree import Tree
from ckpttool.wire import zip as archives

_CALLS, _DEEP, _ELEMENTS = 5_000, 40, 4096
_TOP = "__torch__"
_RECURRENT = f"{_TOP}.torch.nn.modules.rnn"
_CELL_KINDS = frozenset(("lstm", "gru"))
_CELLS = frozenset(("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"))


class UnknownError(Exception):
    """The code does something that is not followed."""


class Module(NamedTuple):
    """An object of the archive: a module, by its path."""

    path: Path


class Tensor(NamedTuple):
    """A parameter, a buffer or a constant, by its path."""

    path: Path


class _State(NamedTuple):
    """The next value of a buffer in which a recurrent layer keeps its state, by its path."""

    path: Path


class _Function(NamedTuple):
    """A function of the archive's code, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Flow:
    """What the input has become: the steps up to here."""

    steps: tuple[Step, ...] = ()
    lead: int | None = None
    """the position of an axis of extent 1 that the code has put before the last one"""

    def then(self, kind: str, value: Any = None) -> _Flow:
        return _Flow((*self.steps, Step(kind, (f"step {len(self.steps)}",), value)), self.lead)


def of_script(checkpoint: Checkpoint) -> tuple[Step, ...] | None:
    """Return the steps of a TorchScript archive's forward, None if the checkpoint is no such archive.

    Raise UnsupportedError for code that cannot be followed: it may compute anything of its layers.
    """
    texts = code(checkpoint)
    if texts is None:
        return None
    try:
        return Reader(checkpoint.tree, texts).forward()
    except (
        UnknownError,
        CkpttoolError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as error:
        word = str(error) if isinstance(error, UnknownError) else ""
        cells = {_short(held.name) for held in checkpoint.tree.containers.values() if held.name} & _CELLS
        raise UnsupportedError(
            "the TorchScript code is not one chain of known operations",
            file=checkpoint.path,
            found=", ".join(sorted(cells)) or word or None,
            hint=None
            if cells
            else "if its layers are one chain all the same: ckpttool convert writes them without the code, "
            "--to torch, and eval takes that file with --activation",
        ) from None


def code(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return a TorchScript archive's code by module, None if the checkpoint is no such archive."""
    root = checkpoint.tree.containers.get(())
    if root is None or not (root.name or "").startswith(f"{_TOP}.") or len(checkpoint.files) != 1:
        return None
    try:
        opened = archives.read(File.stamp(checkpoint.files[0].path))
        top = names.top(opened.members, opened.file.path)
        if not script.is_script(opened.members, top):
            return None
        return script.texts(opened.members, top, opened.source)
    except CkpttoolError:
        return None


def traced_inputs(checkpoint: Checkpoint) -> tuple[Shape, ...]:
    """Return the shapes of the inputs with which the archive's forward was traced, () if it was not."""
    try:
        opened = archives.read(File.stamp(checkpoint.files[0].path))
        return archive.traced_inputs(opened, names.top(opened.members, opened.file.path))
    except CkpttoolError:
        return ()


def _short(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass
class Reader:
    """Evaluates the code on one unknown input."""

    tree: Tree
    texts: Mapping[str, str]
    calls: int = 0
    depth: int = 0
    parsed: dict[str, ast.Module] = field(default_factory=dict)
    overwritten: list[_Flow] = field(default_factory=list)
    carried: set[Path] = field(default_factory=set)

    def forward(self) -> tuple[Step, ...]:
        """Return the steps of the archive's forward."""
        found = self._method((), "forward", [_Flow()])
        if not isinstance(found, _Flow):
            raise UnknownError
        cells = [step.value for step in found.steps if step.kind in _CELL_KINDS]
        if {path for cell in cells for path in cell.states} != self.carried:
            raise UnknownError("a state that is not kept")
        return found.steps

    def _method(self, module: Path, name: str, given: Sequence[Any]) -> Any:
        container = self.tree.containers.get(module)
        where, _, cls = ((container.name if container is not None else None) or "").rpartition(".")
        if where.startswith(_RECURRENT) and cls.lower() in _CELL_KINDS and name.startswith("forward"):
            return self._cell(module, cls.lower(), given)
        return self._called(module, name, given)

    def _called(self, module: Path, name: str, given: Sequence[Any]) -> Any:
        """Return what the code of a module's method gives."""
        container = self.tree.containers.get(module)
        where, _, cls = ((container.name if container is not None else None) or "").rpartition(".")
        for node in self._module(where).body:
            if isinstance(node, ast.ClassDef) and node.name == cls:
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == name:
                        return self._run(part, [Module(module), *given])
        raise UnknownError

    def _cell(self, module: Path, kind: str, given: Sequence[Any]) -> Any:
        """Return what PyTorch's own recurrent layer gives, whose states are buffers that begin at zero."""
        flow, states = given if len(given) == 2 else (None, None)
        buffers = states if isinstance(states, list) else [states]
        settings = {name: self._of(module, name) for name in ("num_layers", "bidirectional", "batch_first")}
        plain = settings["num_layers"] == 1 and settings["bidirectional"] is False
        plain = plain and self._of(module, "proj_size") == 0
        lead = 1 if settings["batch_first"] else 0
        if not isinstance(flow, _Flow) or not all(isinstance(buffer, Tensor) for buffer in buffers):
            raise UnknownError(kind.upper())
        if not plain or flow.lead != lead or len(buffers) != (2 if kind == "lstm" else 1):
            raise UnknownError(kind.upper())
        paths = [buffer.path for buffer in buffers if isinstance(buffer, Tensor)]
        for path in paths:
            leaf = self.tree.get(path)
            if not isinstance(leaf, Leaf) or math.prod(leaf.shape) > _ELEMENTS or leaf.array().any():
                raise UnknownError(f"{kind.upper()} from a state that is not zero")
        after = [_State(path) for path in paths]
        cell = Cell(module, tuple(paths))
        return [flow.then(kind, cell), after if isinstance(states, list) else after[0]]

    def _function(self, name: str, given: Sequence[Any]) -> Any:
        where, _, last = name.rpartition(".")
        for node in self._module(where).body:
            if isinstance(node, ast.FunctionDef) and node.name == last:
                return self._run(node, given)
        raise UnknownError

    def _module(self, name: str) -> ast.Module:
        if name not in self.parsed:
            text = self.texts.get(name)
            if text is None:
                raise UnknownError
            self.parsed[name] = ast.parse(text)
        return self.parsed[name]

    def _run(self, function: ast.FunctionDef, given: Sequence[Any]) -> Any:
        self.calls += 1
        if self.calls > _CALLS or self.depth > _DEEP:
            raise UnknownError
        named = [each.arg for each in function.args.args]
        known = [self._value(each, {}) for each in function.args.defaults]
        if len(given) < len(named):
            given = [*given, *known[len(known) - (len(named) - len(given)) :]]
        if len(given) != len(named):
            raise UnknownError
        self.depth += 1
        done, value = self._block(function.body, dict(zip(named, given, strict=True)))
        self.depth -= 1
        if not done:
            raise UnknownError
        return value

    def _block(self, body: Sequence[ast.stmt], scope: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether a return was met, and its value."""
        for node in body:
            if isinstance(node, ast.Return) and node.value is not None:
                return True, self._value(node.value, scope)
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], self._value(node.value, scope), scope)
            elif isinstance(node, ast.If):
                test = self._value(node.test, scope)
                if not isinstance(test, bool):
                    raise UnknownError
                done, value = self._block(node.body if test else node.orelse, scope)
                if done:
                    return True, value
            elif not isinstance(node, ast.Pass):
                raise UnknownError
        return False, None

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, list) and len(value) == len(target.elts):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part, scope)
        else:
            raise UnknownError

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in scope and not any(scope[node.id] is each for each in self.overwritten):
                return scope[node.id]
            raise UnknownError
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, scope)
            if _is_number(value):
                return -value
            raise UnknownError
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(each, scope) for each in node.elts]
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.Call) and not node.keywords:
            return self._call(node, scope)
        raise UnknownError

    def _attribute(self, node: ast.Attribute, scope: Mapping[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "CONSTANTS":
            return self._of((attr("CONSTANTS"),), node.attr)
        if (name := _dotted(node)) is not None and name.startswith(f"{_TOP}."):
            return _Function(name)
        owner = self._value(node.value, scope)
        if isinstance(owner, Module):
            return self._of(owner.path, node.attr)
        raise UnknownError

    def _of(self, module: Path, name: str) -> Any:
        """Return an attribute of a module; `training` is that of evaluation."""
        if name == "training":
            return False
        path = (*module, attr(name))
        leaf = self.tree.get(path)
        if isinstance(leaf, Leaf):
            return Tensor(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        for first, others in self.tree.aliases.items():
            if any(alias.path == path for alias in others):
                return Tensor(first)
        if path in self.tree.containers:
            return Module(path)
        return self._final(module, name)

    def _final(self, module: Path, name: str) -> Any:
        """Return a constant of a module's class: `eps : Final[float] = 1e-05`."""
        container = self.tree.containers.get(module)
        where, _, cls = ((container.name if container is not None else None) or "").rpartition(".")
        for node in self._module(where).body:
            for part in node.body if isinstance(node, ast.ClassDef) and node.name == cls else ():
                if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
                    continue
                if part.value is not None and part.target.id == name:
                    return self._value(part.value, {})
        raise UnknownError

    def _call(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        called = _dotted(node.func)
        if called == "annotate" and len(node.args) == 2:
            return self._value(node.args[1], scope)
        if called is None or called.partition(".")[0] in scope:
            function = scope.get(called or "")
            if isinstance(function, _Function):
                return self._function(function.name, [self._value(a, scope) for a in node.args])
            if not isinstance(node.func, ast.Attribute):
                raise UnknownError
            owner = self._value(node.func.value, scope)
            if not isinstance(owner, Module):
                raise UnknownError
            return self._method(owner.path, node.func.attr, [self._value(a, scope) for a in node.args])
        return self._applied(called, [self._value(each, scope) for each in node.args])

    def _applied(self, called: str, given: list[Any]) -> Any:
        """Return what a function or an operation gives."""
        if called == "getattr" and len(given) == 2 and isinstance(given[0], Module):
            return self._of(given[0].path, str(given[1]))
        if called == "unchecked_cast" and len(given) == 2:
            return given[1]
        if called.startswith(f"{_TOP}."):
            return self._function(called, given)
        operation = _OPERATIONS.get(called.removesuffix("_"))
        if operation is None:
            raise UnknownError(called)
        if called.endswith("_"):
            # It overwrites its input, under whichever names that has.
            self.overwritten += [each for each in given if isinstance(each, _Flow)]
        self.calls += 1
        if self.calls > _CALLS:
            raise UnknownError
        try:
            return operation(self, given)
        except (UnknownError, ValueError) as error:
            raise UnknownError(
                str(error) if isinstance(error, UnknownError) and str(error) else called
            ) from None

    def numbers(self, value: Any) -> list[float]:
        """Return a number, or a small tensor's numbers."""
        if _is_number(value):
            return [float(value)]
        leaf = self.tree.get(value.path) if isinstance(value, Tensor) else None
        if not isinstance(leaf, Leaf) or math.prod(leaf.shape) > _ELEMENTS or len(leaf.shape) > 2:
            raise UnknownError
        if len(leaf.shape) == 2 and leaf.shape[0] != 1:
            raise UnknownError
        return [float(number) for number in leaf.array().astype("float64").reshape(-1)]


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flow(value: Any) -> _Flow:
    if not isinstance(value, _Flow):
        raise UnknownError
    return value


def _linear(_: Reader, given: Sequence[Any]) -> _Flow:
    flow, weight, bias = given if len(given) > 2 else (*given, None)
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        raise UnknownError
    return _flow(flow).then("dense", Weights(weight.path, None if bias is None else bias.path))


def _layer_norm(_: Reader, given: Sequence[Any]) -> _Flow:
    flow, shape, weight, bias, epsilon = given[:5]
    ready = isinstance(weight, Tensor) and isinstance(bias, Tensor) and _is_number(epsilon)
    if not ready or not isinstance(shape, list) or len(shape) != 1:
        raise UnknownError
    return _flow(flow).then("layer_norm", Weights(weight.path, bias.path, float(epsilon)))


def _activation(name: str, *allowed: object) -> Callable[[Reader, Sequence[Any]], _Flow]:
    """Return the reading of an activation whose further arguments must be these, as far as they are given."""

    def read(_: Reader, given: Sequence[Any]) -> _Flow:
        flow, *rest = given
        if len(rest) > len(allowed) or any(a != b for a, b in zip(rest, allowed, strict=False)):
            raise UnknownError
        return _flow(flow).then("activation", name)

    return read


def _same(_: Reader, given: Sequence[Any]) -> _Flow:
    return _flow(given[0])


def _affine(flow: _Flow, scale: list[float], offset: list[float]) -> _Flow:
    """Return `flow * scale + offset`, one step with an affine map before it."""
    steps = flow.steps
    if steps and steps[-1].kind == "affine":
        before, shift = steps[-1].value
        size = max(map(len, (before, shift, scale, offset)))
        before, shift, scale, offset = (_wide(v, size) for v in (before, shift, scale, offset))
        offset = [s * b + o for s, b, o in zip(scale, shift, offset, strict=True)]
        scale = [s * b for s, b in zip(scale, before, strict=True)]
        flow = replace(flow, steps=steps[:-1])
    return flow.then("affine", (scale, offset))


def _wide(values: Sequence[float], size: int) -> list[float]:
    if len(values) not in (1, size):
        raise UnknownError
    return [*values] * (size if len(values) == 1 else 1)


def _flatten(_: Reader, given: Sequence[Any]) -> _Flow:
    # A policy that begins with a dense layer takes rows: flattening one from its second axis on changes none.
    flow, *axes = given
    if axes not in ([1], [1, -1]):
        raise UnknownError("torch.flatten")
    return _flow(flow)


def _unsqueeze(_: Reader, given: Sequence[Any]) -> _Flow:
    flow, axis = _flow(given[0]), given[1]
    if flow.lead is not None or axis not in (0, 1):
        raise UnknownError
    return replace(flow, lead=axis)


def _squeeze(_: Reader, given: Sequence[Any]) -> _Flow:
    flow, axis = _flow(given[0]), given[1]
    if flow.lead is None or axis != flow.lead:
        raise UnknownError
    return replace(flow, lead=None)


def _whole_slice(_: Reader, given: Sequence[Any]) -> Any:
    # `buffer[:] = value` is a slice of all of it, and a copy into that.
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise UnknownError
    return given[0]


def _copy(reader: Reader, given: Sequence[Any]) -> Any:
    buffer, value = given[:2]
    same = isinstance(buffer, Tensor) and isinstance(value, _State) and buffer.path == value.path
    if not same or len(given) != 2:
        raise UnknownError("torch.copy_")
    reader.carried.add(value.path)
    return buffer


def _scaled(sign: int) -> Callable[[Reader, Sequence[Any]], _Flow]:
    def read(reader: Reader, given: Sequence[Any]) -> _Flow:
        one, two = given[:2]
        if len(given) != 2:
            raise UnknownError
        if isinstance(two, _Flow) and sign > 0:
            one, two = two, one
        numbers = reader.numbers(two)
        if sign < 0:
            if 0.0 in numbers:
                raise UnknownError
            numbers = [1 / number for number in numbers]
        return _affine(_flow(one), numbers, [0.0])

    return read


def _shifted(sign: int) -> Callable[[Reader, Sequence[Any]], _Flow]:
    def read(reader: Reader, given: Sequence[Any]) -> _Flow:
        one, two, *alpha = given
        if alpha not in ([], [1]):
            raise UnknownError
        if isinstance(two, _Flow) and sign > 0:
            one, two = two, one
        return _affine(_flow(one), [1.0], [sign * number for number in reader.numbers(two)])

    return read


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Reader, Sequence[Any]], bool]:
    """Return the reading of a comparison of two numbers, such as the check of a probability."""

    def read(_: Reader, given: Sequence[Any]) -> bool:
        if len(given) != 2 or not all(map(_is_number, given)):
            raise UnknownError
        return compare(*given)

    return read


_OPERATIONS: dict[str, Callable[[Reader, Sequence[Any]], Any]] = {
    "torch.linear": _linear,
    "torch.layer_norm": _layer_norm,
    **{f"torch.{name}": _activation(name) for name in ("relu", "tanh", "sigmoid", "silu")},
    "torch.elu": _activation("elu", 1, 1, 1),
    "torch.leaky_relu": _activation("leaky_relu", 0.01),
    "torch.softplus": _activation("softplus", 1, 20),
    "torch.gelu": _activation("gelu", "none"),
    "torch.mul": _scaled(1),
    "torch.div": _scaled(-1),
    "torch.add": _shifted(1),
    "torch.sub": _shifted(-1),
    **{f"torch.{name}": _compared(getattr(operator, name)) for name in ("lt", "gt", "le", "ge", "eq", "ne")},
    # What acts in training alone, and what changes nothing.
    "torch.dropout": _same,
    "torch.detach": _same,
    "torch.contiguous": _same,
    "torch.flatten": _flatten,
    "torch.unsqueeze": _unsqueeze,
    "torch.squeeze": _squeeze,
    "torch.slice": _whole_slice,
    "torch.copy": _copy,
}
