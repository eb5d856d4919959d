"""TorchScript code: the language in an archive's folder `code/`, interpreted without running it.

The language consists of assignments and calls and looks like Python. Source:
torch/csrc/jit/serialization/python_print.cpp.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import File
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr
from ckpttool.encodings import archives
from ckpttool.formats import torch_tree, torch_zip
from ckpttool.graphs.graph import OpaqueError

_CALLS, _DEEP = 5_000, 40
_TOP = "__torch__"


class ScriptModule(NamedTuple):
    """An object of the archive: a module, by its path."""

    path: Path


class ScriptTensor(NamedTuple):
    """A parameter, a buffer or a constant, by its path."""

    path: Path


class ScriptFunction(NamedTuple):
    """A function in the archive's code, by its name."""

    name: str


def read_code(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return a TorchScript archive's code by module, None if the checkpoint is not an archive."""
    root = checkpoint.tree.containers.get(())
    if root is None or not (root.name or "").startswith(f"{_TOP}.") or len(checkpoint.files) != 1:
        return None
    try:
        opened = archives.read_zip(File.stamp(checkpoint.files[0].path))
        top = torch_tree.find_top_folder(opened.members, opened.file.path)
        if not torch_zip.is_script(opened.members, top):
            return None
        return torch_zip.script_texts(opened.members, top, opened.source)
    except CkpttoolError:
        return None


def traced_inputs(checkpoint: Checkpoint) -> tuple[Leaf, ...]:
    """Return the inputs with which the archive's forward was traced, () if it was not traced."""
    try:
        opened = archives.read_zip(File.stamp(checkpoint.files[0].path))
        return torch_zip.traced_inputs(opened, torch_tree.find_top_folder(opened.members, opened.file.path))
    except CkpttoolError:
        return ()


@dataclass
class ScriptInterpreter:
    """Interprets the code; a subclass gives tensors and operations their meaning."""

    tree: Tree
    texts: Mapping[str, str]
    calls: int = 0
    depth: int = 0
    parsed: dict[str, ast.Module] = field(default_factory=dict)

    def _called(self, module: Path, name: str, arguments: Sequence[Any]) -> Any:
        """Return the result of calling a module's method."""
        return self._run(self._find_method(module, name), [ScriptModule(module), *arguments])

    def _function(self, name: str, arguments: Sequence[Any]) -> Any:
        return self._run(self._find_function(name), arguments)

    def _class(self, module: Path) -> str:
        container = self.tree.containers.get(module)
        return (container.name if container is not None else None) or ""

    def _class_body(self, module: Path) -> Iterator[ast.stmt]:
        where, _, cls = self._class(module).rpartition(".")
        for node in self._module(where).body:
            if isinstance(node, ast.ClassDef) and node.name == cls:
                yield from node.body

    def _find_method(self, module: Path, name: str) -> ast.FunctionDef:
        for part in self._class_body(module):
            if isinstance(part, ast.FunctionDef) and part.name == name:
                return part
        raise OpaqueError(f"{self._class(module).rpartition('.')[2]}.{name}")

    def _find_function(self, name: str) -> ast.FunctionDef:
        where, _, last = name.rpartition(".")
        for node in self._module(where).body:
            if isinstance(node, ast.FunctionDef) and node.name == last:
                return node
        raise OpaqueError

    def _module(self, name: str) -> ast.Module:
        if name not in self.parsed:
            text = self.texts.get(name)
            if text is None:
                raise OpaqueError
            self.parsed[name] = ast.parse(text)
        return self.parsed[name]

    def _run(self, function: ast.FunctionDef, arguments: Sequence[Any]) -> Any:
        self.calls += 1
        if self.calls > _CALLS or self.depth > _DEEP:
            raise OpaqueError
        named = [argument.arg for argument in function.args.args]
        known = [self._value(default, {}) for default in function.args.defaults]
        if len(arguments) < len(named):
            arguments = [*arguments, *known[len(known) - (len(named) - len(arguments)) :]]
        if len(arguments) != len(named):
            raise OpaqueError
        self.depth += 1
        done, value = self._block(function.body, dict(zip(named, arguments, strict=True)))
        self.depth -= 1
        if not done:
            raise OpaqueError
        return value

    def _block(self, body: Sequence[ast.stmt], scope: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether a return statement was reached, and its value."""
        raise NotImplementedError

    def _statement(self, node: ast.stmt, scope: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether a statement is a return statement, and its value."""
        if isinstance(node, ast.Return) and node.value is not None:
            return True, self._value(node.value, scope)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], self._value(node.value, scope), scope)
        elif not isinstance(node, ast.Pass):
            raise OpaqueError(f"a statement that is not supported: {type(node).__name__}")
        return False, None

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, list) and len(value) == len(target.elts):
            for element, part in zip(target.elts, value, strict=True):
                self._assign(element, part, scope)
        else:
            raise OpaqueError

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in scope:
                return scope[node.id]
            raise OpaqueError
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(element, scope) for element in node.elts]
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        raise OpaqueError

    def _attribute(self, node: ast.Attribute, scope: Mapping[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "CONSTANTS":
            return self._of((attr("CONSTANTS"),), node.attr)
        if (name := dotted_name(node)) is not None and name.startswith(f"{_TOP}."):
            return ScriptFunction(name)
        owner = self._value(node.value, scope)
        if isinstance(owner, ScriptModule):
            return self._of(owner.path, node.attr)
        raise OpaqueError

    def _of(self, module: Path, name: str) -> Any:
        """Return an attribute of a module; `training` is False."""
        if name == "training":
            return False
        path = (*module, attr(name))
        leaf = self.tree.get(path)
        if isinstance(leaf, Leaf):
            return ScriptTensor(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        if path in self.tree.shared:
            return ScriptTensor(self.tree.shared[path])
        if path in self.tree.containers:
            return ScriptModule(path)
        return self._final(module, name)

    def _final(self, module: Path, name: str) -> Any:
        """Return a constant of a module's class: `eps : Final[float] = 1e-05`."""
        for part in self._class_body(module):
            if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
                continue
            if part.value is not None and part.target.id == name:
                return self._value(part.value, {})
        raise OpaqueError


def dotted_name(node: ast.expr) -> str | None:
    """Return the name `a.b.c` that an expression is, None for another one."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a number, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
