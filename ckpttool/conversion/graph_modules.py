"""The modules of a graph's code: layers of the framework, and the tensors of the file that are in none.

A layer is a module of the file whose tensors are all those of one operator, each in the form in which the
framework's own layer has it. In PyTorch the modules have the names of the file's tensors, so that its state
loads strictly; in Keras each variable is assigned by its key in the file.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ckpttool.conversion.graph_texts import BLOCK, LAYER, TENSORS, Language
from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.conversion.model_code import array_code, is_number, is_safe
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.graphs.graph import OpenShape

# The tensors of the layer that an operator is, in PyTorch and in Keras.
_NAMES = {
    "Linear": (("weight", "bias"), ("kernel", "bias")),
    "Conv": (("weight", "bias"), ("kernel", "bias")),
    "Embedding": (("weight",), ("embeddings",)),
    "LayerNormalization": (("weight", "bias"), ("gamma", "beta")),
    "GroupNormalization": (("weight", "bias"), ("gamma", "beta")),
    "BatchNormalization": (
        ("weight", "bias", "running_mean", "running_var"),
        ("gamma", "beta", "moving_mean", "moving_variance"),
    ),
}
# Of a batch norm of PyTorch, which nothing computes with.
_COUNT = "num_batches_tracked"


class StoredTensor(NamedTuple):
    """A tensor of the file: the names of its module and its own, its key, and whether it is trained."""

    names: tuple[str, ...]
    key: str
    dtype: str
    shape: tuple[int, ...]
    trained: bool


class Form(NamedTuple):
    """A tensor of the file as an operator has it: its axes in another order, or as they are."""

    tensor: StoredTensor
    axes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Node:
    """A module: those below it, its own tensors, and what makes the layer that it is."""

    children: dict[str, _Node] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    layer: str = ""
    shape: OpenShape = ()
    """The shape of the layer's inputs, for Keras; () if its own tensors decide it."""

    @property
    def numbered(self) -> bool:
        """Return whether it only has numbered modules."""
        return bool(self.children) and not self.tensors and all(map(is_number, self.children))

    @property
    def counted(self) -> bool:
        """Return whether it only has modules numbered from 0 without a gap."""
        return self.numbered and sorted(map(int, self.children)) == [*range(len(self.children))]

    def walk(self, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _Node]]:
        """Yield the module and those below it, with their names."""
        yield names, self
        for name, child in self.children.items():
            yield from child.walk((*names, name))


class GraphModules:
    """The tensors of a file as modules of the code; `layer` makes those of an operator a layer."""

    def __init__(self, language: Language, tensors: Sequence[StoredTensor]) -> None:
        self.language, self.root = language, _Node()
        self.constants: list[np.ndarray] = []
        self.by_itself: Counter[str] = Counter()
        modules = [tensor.names[:-1] for tensor in tensors]
        # The name of a layer stays, and numbers stay below the name of their sequence.
        shortest = min((len(names) for names in modules), default=0)
        self.cut = min(len(_common_names(modules)), max(0, shortest - 1))
        while self.cut and any(is_number(names[self.cut]) for names in modules):
            self.cut -= 1
        numbers = shortest > 0 and all(is_number(names[0]) for names in modules)
        self.wrapper = "layers" if numbers and not self.cut else ""
        for tensor in tensors:
            node = self.root
            for name in self._own_names(tensor)[:-1]:
                node = node.children.setdefault(name, _Node())
            node.tensors[tensor.names[-1]] = tensor

    def _own_names(self, tensor: StoredTensor) -> tuple[str, ...]:
        names = tensor.names[self.cut :]
        return (self.wrapper, *names) if self.wrapper else names

    def tensor(self, tensor: StoredTensor) -> str:
        """Return the expression of a tensor."""
        self.by_itself[tensor.key] += 1
        if self.language.keras:
            return f"self.tensor({python_literal(tensor.key)})"
        return self._access(self._own_names(tensor))

    def constant(self, array: np.ndarray) -> str:
        """Return the expression of float32 numbers that the code contains, equal ones once."""
        known = (n for n, one in enumerate(self.constants) if one.tobytes() == array.tobytes())
        number = next((n for n in known if self.constants[n].shape == array.shape), len(self.constants))
        self.constants += [array] * (number == len(self.constants))
        name = f"CONSTANT_{number + 1}"
        return f"ops.convert_to_tensor({name})" if self.language.keras else f"self.{name.lower()}"

    def layer(
        self, kind: str, forms: Sequence[Form | None], constructor: str, shape: OpenShape = ()
    ) -> str | None:
        """Return the expression of the layer whose tensors these are; None if they are not those of one.

        Args:
            kind: the operator, a row of `_NAMES`.
            forms: the tensors in the order of that row; those behind the last one are left out.
            constructor: what makes the layer.
            shape: the shape of its inputs, for Keras; open extents are no numbers.
        """
        tensors = [form.tensor for form in forms if form is not None]
        names = _NAMES[kind][self.language.column][: len(forms)]
        if not tensors or len(tensors) != len(forms) or any(t.dtype != "float32" for t in tensors):
            return None
        if not _has_axes(kind, forms[0], self.language):
            return None
        layer = self.claim(dict(zip(names, tensors, strict=True)), constructor, shape)
        if layer is not None:
            self.by_itself.subtract(tensor.key for tensor in tensors)
        return layer

    def claim(
        self, tensors: Mapping[str, StoredTensor], constructor: str, shape: OpenShape = ()
    ) -> str | None:
        """Return the expression of the layer that has exactly these tensors by name, None without one."""
        node, own = self.root, self._own_names(next(iter(tensors.values())))[:-1]
        for name in own:
            node = node.children[name]
        whole = {name: one for name, one in node.tensors.items() if name != _COUNT}
        if not own or node.children or whole != tensors or node.layer not in ("", constructor):
            return None
        node.layer, node.shape = constructor, shape
        return self._access(own)

    def of_names(self, names: Sequence[str]) -> Iterator[dict[str, StoredTensor]]:
        """Yield the tensors of each module that has exactly these, in this order."""
        for _, node in self.root.walk():
            if {*node.tensors} == {*names}:
                yield {name: node.tensors[name] for name in names}

    def _access(self, names: Sequence[str]) -> str:
        if self.language.keras:
            return f"self.{self._attribute(names)}"
        text, node = "self", self.root
        for name in names:
            if node.numbered:
                text += f"[{name}]" if node.counted else f"[{python_literal(name)}]"
            else:
                text = f"{text}.{name}" if is_safe(name) else f"getattr({text}, {python_literal(name)})"
            node = node.children.get(name, _Node())
        return text

    def _attribute(self, names: Sequence[str]) -> str:
        """Return the attribute of a layer in Keras, whose files need not have its name."""
        name = re.sub(r"\W", "_", "_".join(names), flags=re.ASCII)
        return name if is_safe(name) else f"layer_{name}"

    # Texts.

    def blocks(self) -> list[str]:
        """Return the constants and classes before the model."""
        rows = [
            f"CONSTANT_{n} = {array_code(array)}" + f".reshape({array.shape})" * (array.ndim != 1)
            for n, array in enumerate(self.constants, 1)
        ]
        if self.language.keras:
            left = [f"    {python_literal(t.key)}: {t[2:]!r}," for _, _, t in self._left()]
            return [*rows, *(["\n".join((*TENSORS, *left, "}"))] if left else [])]
        return [*rows, *([BLOCK] if "Block(" in "\n".join(self.statements()) else [])]

    def statements(self) -> list[str]:
        """Return the statements that make the modules."""
        if self.language.keras:
            return [*self._keras_statements()]
        lines = []
        for name, child in self.root.children.items():
            text = self._construct(child, 8)
            lines.append(f"self.{name} = {text}" if is_safe(name) else f"self.add_module({name!a}, {text})")
        for name, tensor in self.root.tensors.items():
            kind = "parameter" if tensor.trained else "buffer"
            value = self._zeros(tensor)
            assigned = tensor.trained and is_safe(name)
            lines.append(f"self.{name} = {value}" if assigned else f"self.register_{kind}({name!a}, {value})")
        for number in range(1, len(self.constants) + 1):
            value = f"torch.from_numpy(CONSTANT_{number})"
            lines.append(f'self.register_buffer("constant_{number}", {value}, persistent=False)')
        return lines

    def methods(self) -> str:
        """Return the methods of the model beside its computation."""
        if not self.language.keras:
            return ""
        layers = any(node.layer for _, node in self.root.walk())
        return LAYER * layers + self.language.tensor * any(True for _ in self._left(whole=True))

    def renamed(self, state: str) -> str:
        """Return the state of the file with the names of the modules."""
        if self.wrapper:
            return f'{{f"{self.wrapper}.{{name}}": value for name, value in {state}.items()}}'
        first = next((t for _, node in self.root.walk() for t in node.tensors.values()), None)
        if first is None or not self.cut:
            return state
        prefix = ".".join(first.names[: self.cut]) + "."
        return f"{{name.removeprefix({python_literal(prefix)}): value for name, value in {state}.items()}}"

    def _zeros(self, tensor: StoredTensor) -> str:
        dtype = "" if tensor.dtype == "float32" else f", dtype=torch.{tensor.dtype}"
        zeros = f"torch.zeros({tensor.shape!r}{dtype})"
        return f"nn.Parameter({zeros})" if tensor.trained else zeros

    def _unused(self, node: _Node) -> str:
        """Return what makes the layer that a matrix and its bias are if nothing computes with them."""
        names = _NAMES["Linear"][self.language.column]
        matrix, bias = map(node.tensors.get, names)
        if matrix is None or len(matrix.shape) != 2 or not {*node.tensors} <= {*names} or node.children:
            return ""
        size = matrix.shape[1] if self.language.keras else matrix.shape[0]
        if any(t.dtype != "float32" or not t.trained for t in node.tensors.values()):
            return ""
        if (bias is not None and bias.shape != (size,)) or self.by_itself[matrix.key]:
            return ""
        bare = "" if bias is not None else (", use_bias=False" if self.language.keras else ", bias=False")
        if self.language.keras:
            return f"keras.layers.Dense({size}{bare})"
        return f"nn.Linear({matrix.shape[1]}, {size}{bare})"

    def _construct(self, node: _Node, indent: int) -> str:
        if layer := node.layer or self._unused(node):
            return layer
        rows = {name: self._construct(child, indent + 4) for name, child in node.children.items()}
        rows |= {name: self._zeros(tensor) for name, tensor in node.tensors.items()}
        space, end = " " * (indent + 4), " " * indent
        if node.counted:
            lines, around = [rows[str(number)] for number in range(len(rows))], ("nn.ModuleList([", "])")
        elif all(map(is_word, rows)):
            lines, around = [f"{name}={text}" for name, text in rows.items()], ("Block(", ")")
        else:
            lines = [f"{python_literal(name)}: {text}" for name, text in rows.items()]
            around = ("nn.ModuleDict({", "})") if node.numbered else ("Block(**{", "})")
        return f"{around[0]}\n" + "".join(f"{space}{line},\n" for line in lines) + f"{end}{around[1]}"

    def _layers(self) -> Iterator[tuple[tuple[str, ...], _Node, str]]:
        for names, node in self.root.walk():
            if names and (layer := node.layer or self._unused(node)):
                yield names, node, layer

    def _left(self, *, whole: bool = False) -> Iterator[tuple[tuple[str, ...], _Node, StoredTensor]]:
        """Yield the tensors of no layer; if `whole`, also those that are used by themselves."""
        layers = {names for names, _, _ in self._layers()}
        for names, node in self.root.walk():
            for tensor in node.tensors.values():
                if names not in layers or (whole and self.by_itself[tensor.key] > 0):
                    yield names, node, tensor

    def _keras_statements(self) -> Iterator[str]:
        yield "self.stored = {}"
        for names, node, layer in self._layers():
            order = next(own for _, own in _NAMES.values() if {*node.tensors} <= {*own})
            keys = [node.tensors[name].key for name in order if name in node.tensors]
            first = node.tensors[order[0]].shape
            # Kernels have the size of the inputs before that of the outputs.
            shape = node.shape or (*[""] * max(len(first) - 1, 1), first[max(len(first) - 2, 0)])
            built = tuple(extent if isinstance(extent, int) else None for extent in shape)
            listed = ", ".join(map(python_literal, keys))
            yield f"self.{self._attribute(names)} = self.layer({layer}, {built!r}, {listed})"
        if any(True for _ in self._left()):
            yield "for name, (dtype, shape, trained) in TENSORS.items():"
            yield "    self.stored[name] = self.add_weight("
            yield '        shape=shape, dtype=dtype, initializer="zeros", trainable=trained,'
            yield '        name=name.replace("/", "_"),'
            yield "    )"


def _common_names(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names above all modules."""
    columns = itertools.takewhile(lambda column: len({*column}) == 1, zip(*paths, strict=False))
    return tuple(column[0] for column in columns)


def _has_axes(kind: str, form: Form | None, language: Language) -> bool:
    """Return whether an operator has a tensor as the framework's layer does."""
    assert form is not None  # noqa: S101 - the caller has looked
    rank = len(form.tensor.shape)
    if rank == 2 and kind == "Linear" and not language.keras:
        return form.axes == (1, 0)
    if rank > 2 and kind == "Conv" and language.keras:
        return form.axes == (rank - 1, rank - 2, *range(rank - 2))
    return not form.axes
