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
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpttool.conversion.graph_texts import LAYER, TENSORS, Language
from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf
from ckpttool.graphs.graph import OpenShape

Names = tuple[str, ...]
"""Names of the modules above a tensor, and its own."""
# Attributes of torch.nn.Module, and those of tf.Module, keras.Layer and keras.Model, which no submodule may
# replace.
_IN_TORCH = """
    T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double
    dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules
    named_parameters parameters register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module
    register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule share_memory state_dict to to_empty train training type xpu
    zero_grad
"""
_IN_KERAS = """
    build build_from_config call compiled compute_mask compute_metrics compute_output_shape
    compute_output_spec count_params dtype dtype_policy evaluate from_config get_compile_config
    get_config get_layer inbound_nodes input input_dtype input_spec layers load_own_variables
    load_weights losses metrics metrics_names metrics_variables name name_scope
    non_trainable_variables non_trainable_weights optimizer outbound_nodes output path predict
    quantization_mode quantize quantized_build remove_from_graph reset_metrics run_eagerly save
    save_own_variables save_weights set_state_tree set_weights stateless_call submodules summary
    supports_jit supports_masking symbolic_call to_json train_step trainable trainable_variables
    trainable_weights variable_dtype variables weights with_name_scope
"""
TORCH_ATTRIBUTES = frozenset(_IN_TORCH.split())
_RESERVED = TORCH_ATTRIBUTES | frozenset(_IN_KERAS.split())


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
_TORCH_TYPES = frozenset(
    ("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
) | {"complex64", "complex128", "uint16", "uint32", "uint64"}
# Of a batch norm of PyTorch, which nothing computes with.
_COUNT = "num_batches_tracked"
# What the class has besides its layers in Keras.
_METHODS = frozenset(("layer", "stored", "tensor"))


@dataclass(slots=True, eq=False)
class Module:
    """A module: its submodules and its own tensors, by name."""

    children: dict[str, Module] = field(default_factory=dict)
    tensors: dict[str, Leaf] = field(default_factory=dict)

    def at(self, names: Names) -> Module:
        """Return the module of these names."""
        return self if not names else self.children[names[0]].at(names[1:])

    def add(self, names: Names, leaf: Leaf) -> None:
        """Add a tensor, with the modules above it."""
        if len(names) == 1:
            self.tensors[names[0]] = leaf
        else:
            self.children.setdefault(names[0], Module()).add(names[1:], leaf)

    def walk(self, names: Names = ()) -> Iterator[tuple[Names, Module]]:
        """Yield the module and all modules below it, with their names."""
        yield names, self
        for name, child in self.children.items():
            yield from child.walk((*names, name))

    @property
    def numbered(self) -> bool:
        """Return whether the submodules are numbered, without other content."""
        return bool(self.children) and not self.tensors and all(map(is_number, self.children))

    @property
    def counted(self) -> bool:
        """Return whether the submodules are numbered from 0 without a gap."""
        return self.numbered and sorted(map(int, self.children)) == [*range(len(self.children))]


def is_number(name: str) -> bool:
    """Return whether a module's name is the number of an item."""
    return name.isascii() and name.isdecimal() and len(name) < 5 and str(int(name)) == name


def is_safe(name: str) -> bool:
    """Return whether a module may have this attribute in every framework."""
    return is_word(name) and name.isascii() and name not in _RESERVED and not name.startswith("_")


def number_code(value: np.floating[Any]) -> str:
    """Return a float32 as the shortest literal that is read as the same float32."""
    number = np.float32(value)
    if not np.isfinite(number):
        return f'float("{number}")'
    text = str(number)
    return text if "e" in text or "." in text else f"{text}.0"


def array_code(array: np.ndarray) -> str:
    """Return the code of the entries of a float32 array, without its shape."""
    numbers = [number_code(value) for value in array.astype(np.float32).ravel()]
    rows = [", ".join(numbers[start : start + 8]) for start in range(0, len(numbers), 8)]
    inner = ",\n    ".join(rows)
    return f"np.array([\n    {inner},\n], np.float32)"


class Form(NamedTuple):
    """A tensor of the file as an operator has it: its names, its shape there, and the order of its axes."""

    names: Names
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()


class Item(NamedTuple):
    """A layer of a sequence: its number, its constructor, and those of the functions after it."""

    name: str
    constructor: str
    after: tuple[str, ...] = ()


Items = tuple[Item, ...]


def is_trained(leaf: Leaf) -> bool:
    """Return whether a tensor is a parameter in the code."""
    return leaf.role == "parameter" and leaf.dtype.startswith("float")


class GraphModules:
    """The tensors of a file as modules of the code; `layer` makes those of an operator a layer."""

    def __init__(self, language: Language, tensors: Mapping[Names, Leaf]) -> None:
        self.language, self.root, self.tensors = language, Module(), tensors
        self.constants: dict[str, np.ndarray] = {}
        self.sequences: dict[Names, Items] = {}
        self.by_itself: Counter[Names] = Counter()
        self.layers: dict[Names, str] = {}
        self.called: dict[str, Names] = {}
        self.shapes: dict[Names, OpenShape] = {}
        self.attributes: dict[Names, str] = {}
        modules = [names[:-1] for names in tensors]
        # The name of a layer stays, and numbers stay below the name of their sequence.
        shortest = min(map(len, modules), default=0)
        columns = itertools.takewhile(lambda column: len({*column}) == 1, zip(*modules, strict=False))
        cut = min(sum(1 for _ in columns), max(0, shortest - 1))
        while cut and any(is_number(names[cut]) for names in modules):
            cut -= 1
        self.above = modules[0][:cut] if modules else ()
        numbers = shortest > 0 and all(is_number(names[0]) for names in modules)
        self.wrapper: Names = ("layers",) if numbers and not cut else ()
        for names, leaf in tensors.items():
            self.root.add(self._inside(names), leaf)
        self.every_name = {name for names, node in self.root.walk() for name in (*names[-1:], *node.tensors)}

    def _inside(self, names: Names) -> Names:
        return (*self.wrapper, *names[len(self.above) :])

    def tensor(self, names: Names) -> str:
        """Return the expression of a tensor."""
        inside = self._inside(names)
        self.by_itself[inside] += 1
        if self.language.keras:
            return f"self.tensor({python_literal(self._leaf(inside).key)})"
        return self._access(inside)

    def _leaf(self, inside: Names) -> Leaf:
        return self.root.at(inside[:-1]).tensors[inside[-1]]

    def constant(self, array: np.ndarray, name: str) -> str:
        """Return the expression of float32 numbers that the code contains, equal ones once.

        `name` is that of the graph; `obs/mean` and `action/scale` are named so in the code.
        """
        stem = re.sub(r"\W", "_", name, flags=re.ASCII) if re.match(r"(obs|action)/", name) else "constant"
        titles = (f"{stem}_{n}" if n > 1 or stem == "constant" else stem for n in itertools.count(1))
        for title in (title for title in titles if title not in self.every_name):
            known = self.constants.setdefault(title.upper(), array)
            if known.shape == array.shape and known.tobytes() == array.tobytes():
                break
        return f"ops.convert_to_tensor({title.upper()})" if self.language.keras else f"self.{title}"

    def layer(self, kind: str, forms: Sequence[Form], constructor: str, shape: OpenShape = ()) -> str | None:
        """Return the expression of the layer whose tensors these are; None if they are not those of one.

        Args:
            kind: the operator, a row of `_NAMES`.
            forms: the tensors in the order of that row; those behind the last one are left out.
            constructor: what makes the layer.
            shape: the shape of its inputs, for Keras; open extents are no numbers.
        """
        own = _NAMES[kind][self.language.column][: len(forms)]
        if [form.names[-1] for form in forms] != [*own] or len({form.names[:-1] for form in forms}) > 1:
            return None
        rank, axes = len(forms[0].shape), forms[0].axes
        if rank == 2 and kind == "Linear" and not self.language.keras:
            fits = axes == (1, 0)
        elif rank > 2 and kind == "Conv" and self.language.keras:
            fits = axes == (rank - 1, rank - 2, *range(rank - 2))
        else:
            fits = not axes
        layer = self.claim(forms[0].names[:-1], own, constructor, shape) if fits else None
        if layer is not None:
            self.by_itself.subtract(self._inside(form.names) for form in forms)
        return layer

    def claim(self, names: Names, own: Sequence[str], constructor: str, shape: OpenShape = ()) -> str | None:
        """Return the expression of a module as a layer, None if it has other tensors than the layer."""
        inside = self._inside(names)
        node = self.root.at(inside)
        # Every batch norm of PyTorch has a count, which its file may lack.
        expected = {*own, *([_COUNT] if "running_var" in own else [])}
        if not inside or node.children or {*node.tensors} != expected:
            return None
        floats = all(leaf.dtype == "float32" for name, leaf in node.tensors.items() if name != _COUNT)
        if not floats or self.layers.setdefault(inside, constructor) != constructor:
            return None
        self.shapes[inside] = shape
        self.called[text := self._access(inside)] = inside
        return text

    def of_names(self, own: Sequence[str]) -> Iterator[tuple[Names, list[Leaf]]]:
        """Yield the names of each module with exactly these tensors, and these in this order."""
        for inside, node in self.root.walk():
            if {*node.tensors} == {*own}:
                names = (*self.above, *inside[len(self.wrapper) :])
                yield names, [node.tensors[name] for name in own]

    def _access(self, inside: Names) -> str:
        if self.language.keras:
            return f"self.{self._attribute(inside)}"
        text, node = "self", self.root
        for number, name in enumerate(inside):
            if node.numbered:
                listed = node.counted or inside[:number] in self.sequences
                text += f"[{name}]" if listed else f"[{python_literal(name)}]"
            else:
                text = f"{text}.{name}" if is_safe(name) else f"getattr({text}, {python_literal(name)})"
            node = node.children.get(name, Module())
        return text

    def sequence(self, names: Names) -> str:
        """Return the expression of a module whose layers are computed one after the other."""
        return self._access(names)

    def plan_sequence(self, names: Names, items: Items) -> bool:
        """Note that a module computes these items, if they are all of it and have its numbers."""
        node = self.root.at(names)
        order = sorted(node.children, key=int) if names and node.numbered else []
        if [item.name for item in items] != order or not all(item.constructor for item in items):
            return False
        room = (int(b.name) - int(a.name) > len(a.after) for a, b in itertools.pairwise(items))
        if all(room):
            self.sequences[names] = items
        return names in self.sequences

    def _attribute(self, inside: Names) -> str:
        """Return the attribute of a layer in Keras, whose files need not have its name."""
        name = re.sub(r"\W", "_", "_".join(inside), flags=re.ASCII)
        name = name if is_safe(name) and name not in _METHODS else f"layer_{name}"
        others = {other for names, other in self.attributes.items() if names != inside}
        several = (f"{name}_{number}" for number in itertools.count(2))
        free = next(one for one in itertools.chain((name,), several) if one not in others)
        return self.attributes.setdefault(inside, free)

    # Texts.

    def blocks(self) -> list[str]:
        """Return the constants before the classes, and the tensors that are in no layer of Keras."""
        rows = [
            f"{name} = {array_code(array)}" + f".reshape({array.shape})" * (array.ndim != 1)
            for name, array in self.constants.items()
        ]
        if not self.language.keras:
            return rows
        left = [
            f"    {python_literal(leaf.key)}: {(leaf.dtype, leaf.shape, is_trained(leaf))!r},"
            for names, node in self.root.walk()
            if names not in self._every_layer()
            for leaf in node.tensors.values()
        ]
        return [*rows, *(["\n".join((*TENSORS, *left, "}"))] if left else [])]

    def statements(self, classes: Mapping[str, str] = MappingProxyType({}), top: Names = ()) -> list[str]:
        """Return the statements that make the modules of the model, or of the one named `top`.

        Modules at the top that have a separate class are instances of it.
        """
        if self.language.keras:
            return [*self._keras_statements()]
        lines, node = [], self.root.at(top)
        for name, child in node.children.items():
            own = None if top else classes.get(name)
            text = f"{own}()" if own else self._construct((*top, name), child, 8)
            lines.append(f"self.{name} = {text}" if is_safe(name) else f"self.add_module({name!a}, {text})")
        for name, leaf in node.tensors.items():
            kind = "parameter" if is_trained(leaf) else "buffer"
            plain = is_trained(leaf) and is_safe(name)
            start = f"self.{name} = " if plain else f"self.register_{kind}({name!a}, "
            lines.append(start + _zeros(leaf) + ")" * (not plain))
        return lines

    def buffers(self, methods: str) -> list[str]:
        """Return the statements that make the constants that the methods of a class of PyTorch use."""
        return [
            f'self.register_buffer("{name.lower()}", torch.from_numpy({name}), persistent=False)'
            for name in self.constants
            if not self.language.keras and re.search(rf"\bself\.{name.lower()}\b", methods)
        ]

    def may_be_class(self, name: str) -> bool:
        """Return whether a module at the top may have a separate class."""
        node = self.root.children.get(name)
        return (
            node is not None
            and bool(node.children)
            and (name,) not in self._every_layer()
            and all(map(is_safe, (name, *node.children, *node.tensors)))
        )

    def methods(self) -> str:
        """Return the methods of the model beside its computation."""
        if not self.language.keras:
            return ""
        layers, used = bool(self._every_layer()), any(count > 0 for count in self.by_itself.values())
        return LAYER * layers + self.language.tensor * used

    def renamed(self, state: str) -> str:
        """Return the state of the file with the names of the modules."""
        if self.wrapper:
            return f'{{f"layers.{{name}}": value for name, value in {state}.items()}}'
        if not self.above:
            return state
        prefix = python_literal(".".join(self.above) + ".")
        return f"{{name.removeprefix({prefix}): value for name, value in {state}.items()}}"

    def _every_layer(self) -> dict[Names, str]:
        """Return the layers, with matrices and their biases that nothing computes with."""
        keras = self.language.keras
        first, last = _NAMES["Linear"][keras]
        layers = dict(self.layers)
        for names, node in self.root.walk():
            matrix, bias = map(node.tensors.get, (first, last))
            if names in layers or matrix is None or node.children or {*node.tensors} - {first, last}:
                continue
            size = matrix.shape[-1 if keras else 0] if len(matrix.shape) == 2 else None
            plain = all(leaf.dtype == "float32" and is_trained(leaf) for leaf in node.tensors.values())
            if plain and self.by_itself[(*names, first)] < 1 and (bias is None or bias.shape == (size,)):
                bare = "" if bias is not None else (", use_bias=False" if keras else ", bias=False")
                start = "keras.layers.Dense(" if keras else f"nn.Linear({matrix.shape[-1]}, "
                layers |= {names: f"{start}{size}{bare})"} if size is not None else {}
        return {names: layers[names] for names, _ in self.root.walk() if names in layers}

    def _construct(self, names: Names, node: Module, indent: int) -> str:
        if layer := self._every_layer().get(names):
            return layer
        if names in self.sequences:
            layers: list[str] = []
            for item in self.sequences[names]:
                layers += ["nn.Identity()"] * (int(item.name) - len(layers))
                layers += [item.constructor, *item.after]
            inner = "".join(f"{' ' * (indent + 4)}{row},\n" for row in layers)
            return f"nn.Sequential(\n{inner}{' ' * indent})"
        rows = {n: self._construct((*names, n), child, indent + 4) for n, child in node.children.items()}
        rows |= {name: _zeros(leaf) for name, leaf in node.tensors.items()}
        space, end = " " * (indent + 4), " " * indent
        if node.counted:
            lines, around = [rows[str(number)] for number in range(len(rows))], ("nn.ModuleList([", "])")
        elif all(map(is_word, rows)):
            lines, around = [f"{name}={text}" for name, text in rows.items()], ("Block(", ")")
        else:
            lines = [f"{python_literal(name)}: {text}" for name, text in rows.items()]
            around = ("nn.ModuleDict({", "})") if node.numbered else ("Block(**{", "})")
        return f"{around[0]}\n" + "".join(f"{space}{line},\n" for line in lines) + f"{end}{around[1]}"

    def _keras_statements(self) -> Iterator[str]:
        layers = self._every_layer()
        yield "self.stored = {}"
        for names, layer in layers.items():
            tensors = self.root.at(names).tensors
            order = next(own for _, own in _NAMES.values() if {*tensors} <= {*own})
            keys = ", ".join(python_literal(tensors[name].key) for name in order if name in tensors)
            first = tensors[order[0]].shape
            # Kernels have the size of the inputs before that of the outputs.
            shape = self.shapes.get(names) or (*[""] * max(len(first) - 1, 1), first[max(len(first) - 2, 0)])
            built = tuple(extent if isinstance(extent, int) else None for extent in shape)
            yield f"self.{self._attribute(names)} = self.layer({layer}, {built!r}, {keys})"
        if any(node.tensors for names, node in self.root.walk() if names not in layers):
            yield "for name, (dtype, shape, trained) in TENSORS.items():"
            yield "    self.stored[name] = self.add_weight("
            yield '        shape=shape, dtype=dtype, initializer="zeros", trainable=trained,'
            yield '        name=name.replace("/", "_"),'
            yield "    )"


def _zeros(leaf: Leaf) -> str:
    if leaf.dtype not in _TORCH_TYPES:
        raise UnsupportedError(f"--code cannot write a tensor of {leaf.dtype}", found=leaf.key)
    dtype = "" if leaf.dtype == "float32" else f", dtype=torch.{leaf.dtype}"
    zeros = f"torch.zeros({leaf.shape!r}{dtype})"
    return f"nn.Parameter({zeros})" if is_trained(leaf) else zeros
