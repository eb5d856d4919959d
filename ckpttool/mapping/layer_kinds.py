"""Layer kinds: parameters of each in PyTorch, Keras and TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import MappingError
from ckpttool.core.kinds import count_gates, gate_order
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import Leaf
from ckpttool.mapping.rules import (
    KEEP,
    TRANSPOSE,
    AxisSlice,
    BlockOrder,
    Permute,
    Reshape,
    Rule,
    SumTerm,
    chain_rules,
    constant_tensor,
)

if TYPE_CHECKING:
    from ckpttool.core.activations import AxisOrder, Parts


NOTHING: Mapping[str, Leaf] = MappingProxyType({})
Group = Mapping[str, Leaf]
Name = tuple[str, ...]


class WeightSpec(NamedTuple):
    """One tensor of a layer: its stored and canonical names, its rank, the rule to the canonical form."""

    name: str
    canonical: str
    rank: int
    to_canonical: Rule = KEEP
    optional: bool = False


class TensorMapping(NamedTuple):
    """One mapping between a stored tensor and a canonical one.

    When reading, the rule produces the canonical tensor; when writing, the stored one. A tensor may
    have several rows: it is split or concatenated.
    """

    stored: str
    canonical: str
    rule: Rule = KEEP


class LayerMapping(NamedTuple):
    """A layer's mapping between its stored and its canonical tensors.

    `fills` are tensors without a counterpart on the other side, by canonical name when reading, by
    stored name when writing. `left` are names without a place on the other side. `assumed` are
    sentences.
    """

    rows: tuple[TensorMapping, ...]
    fills: Mapping[str, Leaf] = NOTHING
    left: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


class LayerFacts(NamedTuple):
    """Facts about one layer besides its tensors.

    `number` is a value that a kind needs and the tensors do not show: an attention's heads, a
    depthwise convolution's multiplier, the shared axes of a PReLU. `flatten` is the shape (H, W, C)
    of the image that a dense layer receives flattened; () means that there is none. `target_shapes` are the
    target's own shapes by stored name. `takes` and `makes` are the orders of its input and output
    features, UNKNOWN if they could not be followed, None without evidence. `parts` are those of its input's
    features; `cut` means that the target uses its output in parts. `part_orders` are the orders that the user
    states: by side, the numbers of the target's parts in the source's order.
    """

    number: int | None = None
    flatten: Shape | None = None
    target_shapes: Mapping[str, Shape] = MappingProxyType({})
    takes: AxisOrder | None = None
    makes: AxisOrder | None = None
    parts: Parts = ()
    cut: bool = False
    part_orders: Mapping[str, tuple[int, ...]] = MappingProxyType({})


NO_FACTS = LayerFacts()


class LayerOption(NamedTuple):
    """An option for the layers whose names match a pattern: their kind, or other facts."""

    pattern: str
    fits: Callable[[str], bool]
    kind: str | None = None
    facts: LayerFacts = NO_FACTS


Reading = Callable[[Group, LayerFacts], LayerMapping]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One way in which a framework stores one kind of layer.

    Without `reading`, the weights' own rules are used; it may return rows of optional tensors that the layer
    does not have. Writing is the inverse of reading tensors of the `shapes` that a canonical layer has in the
    framework, unless `writing` does more; `multiplier` is the canonical kernel whose last axis is the number
    in the facts for that. `also` is a condition besides names and ranks. `form` names the variant if a
    framework has several; "" is the one that is written. `modules` is a pattern for the module's name if that
    distinguishes the kind from another. `asked` means that the kind is used only if an option or the file
    selects it; `refused` is the reason why it is not converted. The canonical form has TensorFlow's
    orientation and keeps every distinction of the stored forms: a recurrent cell has two biases and its gates
    have one order, the three projections of an attention are three matrices.
    """

    name: str
    framework: str
    weights: tuple[WeightSpec, ...]
    form: str = ""
    also: Callable[[Group], bool] | None = None
    reading: Reading | None = None
    writing: Reading | None = None
    shapes: Callable[[Group, LayerFacts], Mapping[str, Shape]] | None = None
    multiplier: str = ""
    modules: str | None = None
    opt_in: bool = False
    refused: str | None = None
    _names: Mapping[str, WeightSpec] = field(init=False, repr=False, compare=False)
    _needed: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the weights by name."""
        object.__setattr__(self, "_names", {weight.name: weight for weight in self.weights})
        object.__setattr__(self, "_needed", frozenset(w.name for w in self.weights if not w.optional))

    def fits(self, group: Group) -> bool:
        """Return whether exactly these tensors form such a layer."""
        return (
            bool(group)
            and group.keys() <= self._names.keys()
            and group.keys() >= self._needed
            and all(len(leaf.shape) == self._names[name].rank for name, leaf in group.items())
            and (self.also is None or self.also(group))
        )

    @property
    def option(self) -> str:
        """The name in `--kind`; a kind that is only used on request includes its form."""
        return f"{self.name}_{self.form}" if self.is_selected else self.name

    @property
    def is_selected(self) -> bool:
        """Whether one module's tensors are of this kind only if an option or the file selects it."""
        return self.opt_in and bool(self.form) and not self.is_composed

    @property
    def is_composed(self) -> bool:
        """Whether the tensors are in several child modules."""
        return any("/" in weight.name for weight in self.weights)

    @property
    def namings(self) -> Iterator[frozenset[str]]:
        """Every possible set of tensor names of such a layer."""
        optional = self._names.keys() - self._needed
        for number in range(len(optional) + 1):
            yield from (self._needed.union(more) for more in combinations(optional, number))

    def read(self, group: Group, facts: LayerFacts = NO_FACTS) -> LayerMapping:
        """Return the mapping from stored tensors to canonical ones; raise MappingError if there is none."""
        weights = (TensorMapping(w.name, w.canonical, w.to_canonical) for w in self.weights)
        mapping = LayerMapping(tuple(weights)) if self.reading is None else self.reading(group, facts)
        return mapping._replace(rows=tuple(row for row in mapping.rows if row.stored in group))

    def write(self, canonical: Group, facts: LayerFacts = NO_FACTS) -> LayerMapping:
        """Return the mapping from canonical tensors to stored ones; raise MappingError if there is none."""
        if self.writing is not None:
            return self.writing(canonical, facts)
        required = [w.canonical for w in self.weights if w.canonical and not w.optional]
        require_tensors(self, canonical, required)
        if self.shapes is not None:
            return self._invert_reading(self.shapes(canonical, facts), canonical, facts)
        rows = tuple(
            TensorMapping(w.name, w.canonical, w.to_canonical.inverse(canonical[w.canonical]))
            for w in self.weights
            if w.canonical in canonical
        )
        return LayerMapping(rows, left=leftover_names(canonical, rows))

    def _invert_reading(
        self, shapes: Mapping[str, Shape], canonical: Group, facts: LayerFacts
    ) -> LayerMapping:
        if self.multiplier:
            facts = facts._replace(number=canonical[self.multiplier].shape[-1])
        like = next(iter(canonical.values()))
        stored = {name: placeholder_leaf(like, shape) for name, shape in shapes.items()}
        reading = self.read(stored, facts)
        rows = tuple(
            TensorMapping(row.stored, row.canonical, row.rule.inverse(stored[row.stored]))
            for row in reading.rows
            if row.canonical in canonical
        )
        return LayerMapping(rows, left=leftover_names(canonical, rows), assumed=reading.assumed)


def leftover_names(canonical: Group, rows: Iterable[TensorMapping]) -> tuple[str, ...]:
    """Return the canonical names that no row produces."""
    used = {row.canonical for row in rows}
    return tuple(name for name in canonical if name not in used)


def require_tensors(kind: LayerKind, canonical: Group, names: Iterable[str]) -> None:
    """Raise MappingError unless the canonical layer has these tensors."""
    missing = [name for name in names if name not in canonical]
    if missing:
        raise MappingError(
            f"{kind.name} in {kind.framework} needs tensors that the source layer lacks",
            expected=", ".join(missing),
        )


# Attention's canonical form has matrices [in, heads * depth] and vectors; only Keras's shapes contain the
# number of heads. Sources: keras/src/layers/attention/multi_head_attention.py; torch/nn/modules/activation.py
# (MultiheadAttention).
PROJECTIONS = ("query", "key", "value")
_OUT = "output"
_ALL = (*PROJECTIONS, _OUT)
HEADS = "the number of heads cannot be inferred from PyTorch's tensors"


def _merge_heads(name: str, shape: Shape) -> Rule:
    """Return the rule that merges heads and depth into one axis: the first for outputs, else the last."""
    rows = prod(shape[:-1]) if name == _OUT else shape[0]
    return Reshape((rows, prod(shape) // rows))


def _read_keras(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
    rows = []
    for name in _ALL:
        heads = _merge_heads(name, group[f"{name}/kernel"].shape)
        rows.append(TensorMapping(f"{name}/kernel", f"{name}_kernel", heads))
        if (bias := group.get(f"{name}/bias")) is not None:
            flat = chain_rules(*(() if name == _OUT else (Reshape((bias.size,)),)))
            rows.append(TensorMapping(f"{name}/bias", f"{name}_bias", flat))
    return LayerMapping(tuple(rows))


def _keras_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:
    require_tensors(KERAS, canonical, [f"{name}_kernel" for name in _ALL])
    heads = facts.number or _head_count(facts)
    if heads is None:
        raise MappingError(HEADS)
    shapes: dict[str, Shape] = {}
    for name in _ALL:
        kernel, bias = canonical[f"{name}_kernel"].shape, canonical.get(f"{name}_bias")
        width = kernel[0 if name == _OUT else 1]
        if heads < 1 or width % heads:
            raise MappingError(
                "the attention width is not a multiple of the number of heads",
                expected=str(width),
                found=f"{heads} heads",
            )
        split = (heads, width // heads)
        shapes[f"{name}/kernel"] = (*split, kernel[1]) if name == _OUT else (kernel[0], *split)
        if bias is not None:
            shapes[f"{name}/bias"] = bias.shape if name == _OUT else split
    return shapes


def _head_count(facts: LayerFacts) -> int | None:
    shape = facts.target_shapes.get("query/kernel")
    return shape[1] if shape is not None and len(shape) == 3 else None


def _read_torch(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
    width = group["out_proj/weight"].shape[0]
    rows = []
    for number, name in enumerate(PROJECTIONS):
        cut = AxisSlice(0, number * width, (number + 1) * width, 3 * width)
        if "in_proj_weight" in group:
            rows.append(TensorMapping("in_proj_weight", f"{name}_kernel", chain_rules(cut, TRANSPOSE)))
        else:
            rows.append(TensorMapping(f"{name[0]}_proj_weight", f"{name}_kernel", TRANSPOSE))
        rows.append(TensorMapping("in_proj_bias", f"{name}_bias", cut))
    rows.append(TensorMapping("out_proj/weight", "output_kernel", TRANSPOSE))
    rows.append(TensorMapping("out_proj/bias", "output_bias"))
    return LayerMapping(tuple(rows))


def _torch_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
    require_tensors(TORCH, canonical, [f"{name}_kernel" for name in _ALL])
    kernels = {name: canonical[f"{name}_kernel"].shape for name in _ALL}
    width = kernels["query"][0]
    if any(kernels[name][1] != width for name in _ALL) or kernels[_OUT][0] != width:
        raise MappingError(
            "nn.MultiheadAttention requires equal input, inner and output widths (heads times depth)",
            expected=str(width),
            found=", ".join(f"{name} {list(shape)}" for name, shape in kernels.items()),
        )
    shapes: dict[str, Shape] = {"in_proj_weight": (3 * width, width)}
    if any(kernels[name][0] != width for name in PROJECTIONS):
        shapes = {f"{name[0]}_proj_weight": kernels[name][::-1] for name in PROJECTIONS}
    if any(f"{name}_bias" in canonical for name in PROJECTIONS):
        shapes["in_proj_bias"] = (3 * width,)
    return {**shapes, "out_proj/weight": (width, width), "out_proj/bias": (width,)}


def _keras_fits(group: Group) -> bool:
    inner = {group[f"{name}/kernel"].shape[1:] for name in ("query", "key")}
    outer = group["output/kernel"].shape[:2]
    return len(inner) == 1 and outer == group["value/kernel"].shape[1:]


def _torch_fits(group: Group) -> bool:
    rows, width = group["out_proj/weight"].shape
    apart = all(f"{name[0]}_proj_weight" in group for name in PROJECTIONS)
    whole = "in_proj_weight" in group and group["in_proj_weight"].shape == (3 * width, width)
    return rows == width and whole != apart


_OPTIONAL = (("in_proj_weight", 2), *((f"{name[0]}_proj_weight", 2) for name in PROJECTIONS))
KERAS = LayerKind(
    "attention",
    "tensorflow",
    tuple(
        weight
        for name in _ALL
        for weight in (
            WeightSpec(f"{name}/kernel", f"{name}_kernel", 3),
            WeightSpec(f"{name}/bias", f"{name}_bias", 1 if name == _OUT else 2, optional=True),
        )
    ),
    also=_keras_fits,
    reading=_read_keras,
    shapes=_keras_shapes,
)
TORCH = LayerKind(
    "attention",
    "torch",
    (
        *(WeightSpec(name, "", rank, optional=True) for name, rank in _OPTIONAL),
        WeightSpec("in_proj_bias", "", 1, optional=True),
        WeightSpec("out_proj/weight", "output_kernel", 2),
        WeightSpec("out_proj/bias", "output_bias", 1, optional=True),
    ),
    also=_torch_fits,
    reading=_read_torch,
    shapes=_torch_shapes,
)


@cache
def own_attention(framework: str, children: tuple[tuple[str, tuple[str, ...]], ...], form: str) -> LayerKind:
    """Return an attention of several linear layers, as programs build their own.

    If heads interleave (GPT-NeoX's `query_key_value`), the rows have another order, which is not supported.

    Args:
        framework: the one of the linear layers.
        children: each layer's name and the projections that it outputs, of equal widths; the output's last.
        form: one of `attention_forms`.
    """
    axis, turned = (0, TRANSPOSE) if framework == "torch" and not form else (1, KEEP)
    stored = dict(attention_forms(framework))[form]

    def read(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
        rows = []
        for child, parts in children:
            kernel, bias = (f"{child}/{name}" for name in stored)
            width = group[kernel].shape[axis] // len(parts)
            for number, part in enumerate(parts):
                bounds = (number * width, (number + 1) * width, len(parts) * width)
                of_kernel, of_bias = ((AxisSlice(n, *bounds),) if len(parts) > 1 else () for n in (axis, 0))
                rows.append(TensorMapping(kernel, f"{part}_kernel", chain_rules(*of_kernel, turned)))
                rows.append(TensorMapping(bias, f"{part}_bias", chain_rules(*of_bias)))
        joined = [
            f"{child} outputs {', '.join(parts)} of the attention in this order"
            for child, parts in children
            if len(parts) > 1
        ]
        return LayerMapping(tuple(rows), assumed=tuple(joined))

    def shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
        require_tensors(TORCH, canonical, [f"{name}_kernel" for name in _ALL])
        result: dict[str, Shape] = {}
        for child, parts in children:
            widths = {canonical[f"{part}_kernel"].shape for part in parts}
            if len(widths) != 1:
                raise MappingError(
                    "one layer for several projections of an attention requires equal widths",
                    found=", ".join(str(list(shape)) for shape in sorted(widths)),
                )
            (inputs, width) = widths.pop()
            shape = (inputs, width * len(parts))
            result |= {
                f"{child}/{stored[0]}": shape if axis else shape[::-1],
                f"{child}/{stored[1]}": shape[1:],
            }
        return result

    def fits(group: Group) -> bool:
        widths: dict[str, int] = {}
        for child, parts in children:
            width, bias = group[f"{child}/{stored[0]}"].shape[axis], group.get(f"{child}/{stored[1]}")
            if width % len(parts) or (bias is not None and bias.shape != (width,)):
                return False
            widths |= dict.fromkeys(parts, width // len(parts))
        inner = group[f"{children[-1][0]}/{stored[0]}"].shape[1 - axis]
        return widths["query"] == widths["key"] and widths["value"] == inner

    weights = tuple(
        WeightSpec(f"{child}/{name}", "", rank, optional=rank == 1)
        for child, _ in children
        for name, rank in zip(stored, (2, 1), strict=True)
    )
    title = "separate" if all(len(parts) == 1 for _, parts in children) else "fused"
    return LayerKind(
        "attention", framework, weights, f"{title}_{form}".rstrip("_"), fits, read, shapes=shapes, opt_in=True
    )


def attention_forms(framework: str) -> tuple[tuple[str, tuple[str, str]], ...]:
    """Return how programs store the linear layers of their own attentions: form, names of matrix and bias.

    GPT-2 of Transformers has matrices as [in, out]. Keras files may only number variables.
    """
    if framework == "torch":
        return ("", ("weight", "bias")), ("in_out", ("weight", "bias"))
    return ("", ("kernel", "bias")), ("numbered", ("vars/0", "vars/1"))


# Projections by the words of a linear layer's name. Sources: timm/layers/attention.py (qkv, proj); GPT-2 in
# Transformers (Conv1D) and nanoGPT (c_attn, c_proj); juho-lee/set_transformer (fc_q); lucidrains/perceiver
# (to_q, to_kv, to_out).
_ROLES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "wq", "query", "queries"), ("query",)),
    **dict.fromkeys(("k", "wk", "key", "keys"), ("key",)),
    **dict.fromkeys(("v", "wv", "value", "values"), ("value",)),
    **dict.fromkeys(("kv", "wkv"), ("key", "value")),
    **dict.fromkeys(("qkv", "wqkv", "c_attn"), PROJECTIONS),
    **dict.fromkeys(("", "o", "wo", "out", "output", "c"), (_OUT,)),
}
_ANY_LAYER = frozenset(("to", "proj", "projection", "linear", "lin", "fc", "dense", "net", "layer", "w"))


def attention_children(names: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...] | None:
    """Return the linear layers of an attention among those of one module, with the projections of each.

    Their names state them; the output's may be the only other one. None if they are no attention.
    """
    roles: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        words = "_".join(word for word in name.lower().strip("_").split("_") if word not in _ANY_LAYER)
        roles.setdefault(_ROLES.get(words, ()), []).append(name)
    outputs = roles.pop((_OUT,), None) or roles.get((), [])
    roles.pop((), None)
    children = [(names[0], parts) for parts, names in roles.items() if len(names) == 1]
    projected = sorted(part for _, parts in children for part in parts)
    if len(outputs) != 1 or len(children) < len(roles) or projected != sorted(PROJECTIONS):
        return None
    return (*children, (outputs[0], (_OUT,)))


KINDS: tuple[LayerKind, ...] = (KERAS, TORCH)


def _matrix(rank: int, kernel: str, bias: str = "bias", rule: Rule = KEEP) -> tuple[WeightSpec, ...]:
    """Return a kernel and its bias, which a layer may lack."""
    return WeightSpec(kernel, "kernel", rank, rule), WeightSpec(bias, "bias", 1, optional=True)


_BIAS = WeightSpec("bias", "bias", 1, optional=True)


def kernel_permutation(dimensions: int) -> Permute:
    """Return the permutation of a torch weight [O, I, ...] to a kernel [..., I, O].

    A transposed convolution's kernel is [H, W, O, I] in TensorFlow and [I, O, H, W] in PyTorch: the
    permutation is the same, so that both are one kind. Sources: keras/src/layers/convolutional/base_conv.py,
    base_conv_transpose.py, base_depthwise_conv.py and base_separable_conv.py;
    tf_keras/src/layers/convolutional/base_depthwise_conv.py (`depthwise_kernel`); sonnet/src/conv.py;
    torch/nn/modules/conv.py.
    """
    return Permute((*range(2, dimensions + 2), 1, 0))


def _convolution_kinds(dimensions: int) -> tuple[LayerKind, ...]:
    rank = dimensions + 2
    spelled = (("", "kernel", "bias"), ("sonnet", "w", "b"), ("slim", "weights", "biases"))
    weights = _matrix(rank, "weight", rule=kernel_permutation(dimensions))
    return (
        *(LayerKind("convolution", "tensorflow", _matrix(rank, k, b), f, _has_bias) for f, k, b in spelled),
        LayerKind("convolution", "torch", weights, also=_has_torch_bias),
        # Keras's transposed convolutions have no groups.
        LayerKind(
            "grouped_transposed_convolution",
            "torch",
            (WeightSpec("weight", "kernel", rank), WeightSpec("bias", "bias", 1)),
            also=_is_grouped,
            refused="a grouped transposed convolution has no equivalent in Keras",
        ),
    )


def _has_bias(group: Group) -> bool:
    """Return whether the bias is as long as the kernel's last axis, or if transposed as the one before."""
    kernel = max(group.values(), key=lambda leaf: len(leaf.shape))
    return all(leaf is kernel or leaf.shape[0] in kernel.shape[-2:] for leaf in group.values())


def _has_torch_bias(group: Group) -> bool:
    """Return whether the bias is as long as O in [O, I, ...], or in [I, O, ...] if transposed."""
    return "bias" not in group or group["bias"].shape[0] in group["weight"].shape[:2]


def _is_grouped(group: Group) -> bool:
    """Return whether the weight is [I, O / groups, ...] and the bias [O]."""
    inputs, outputs = group["weight"].shape[:2]
    length = group["bias"].shape[0]
    groups = length // outputs if outputs else 0
    return (
        groups > 1 and length == groups * outputs and inputs % groups == 0 and length not in (inputs, outputs)
    )


def _is_depthwise(group: Group) -> bool:
    """Return whether a torch weight [C * M, 1, ...] and its bias can belong to a depthwise convolution."""
    weight, bias = group["weight"], group.get("bias")
    return weight.shape[1] == 1 and (bias is None or bias.shape[0] == weight.shape[0])


def _has_multiplied_bias(group: Group) -> bool:
    """Return whether a kernel [..., C, M] has a bias for each output channel, [C * M]."""
    kernel = next(leaf for name, leaf in group.items() if name.endswith("kernel"))
    bias = group.get("bias")
    return bias is None or bias.shape[0] == kernel.shape[-1] * kernel.shape[-2]


def _depthwise_rule(channels: int, multiplier: int, space: Shape) -> Rule:
    """Return the rule from a torch weight [C * M, 1, ...] to a kernel [..., C, M], the multiplier fastest."""
    last = Permute((*range(2, len(space) + 2), 0, 1))
    return chain_rules(Reshape((channels, multiplier, *space)), last)


def _read_torch_depthwise(group: Group, facts: LayerFacts) -> LayerMapping:
    weight = group["weight"]
    rule, assumed = depthwise_kernel_rule(weight, facts)
    return LayerMapping(
        (TensorMapping("weight", "kernel", rule), TensorMapping("bias", "bias")), assumed=assumed
    )


def depthwise_kernel_rule(weight: Leaf, facts: LayerFacts) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule from a torch weight [C * M, 1, ...] to a kernel [..., C, M], and what was assumed of M.

    M is given as a number, or by the kernel of the target; otherwise it is 1.
    """
    outputs, space = weight.shape[0], weight.shape[2:]
    shape = next((s for name, s in facts.target_shapes.items() if name.endswith("kernel")), None)
    multiplier = facts.number or (shape[-1] if shape else 1)
    if multiplier < 1 or outputs % multiplier:
        raise MappingError(
            "the number of outputs of a depthwise convolution is not a multiple of its multiplier",
            expected=f"a multiple of {multiplier}",
            found=str(outputs),
        )
    rule = _depthwise_rule(outputs // multiplier, multiplier, space)
    known = facts.number or shape or outputs == 1
    return rule, () if known else ("depthwise convolutions have one output per channel",)


def _depthwise_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
    *space, channels, multiplier = canonical["kernel"].shape
    return {"weight": (channels * multiplier, 1, *space), "bias": (channels * multiplier,)}


def _depthwise_kinds(dimensions: int) -> tuple[LayerKind, ...]:
    rank = dimensions + 2
    return tuple(
        LayerKind("depthwise", "tensorflow", _matrix(rank, name), form, _has_multiplied_bias)
        for form, name in (("", "kernel"), ("tf_keras", "depthwise_kernel"))
    )


def _numbered_bias_fits(group: Group) -> bool:
    names = {"vars/0": "kernel", "vars/1": "bias"}
    return _has_multiplied_bias({names[stored]: leaf for stored, leaf in group.items()})


# Numbered variables in a Keras file (keras/src/layers/convolutional/base_depthwise_conv.py, build).
NUMBERED_DEPTHWISE = tuple(
    LayerKind("depthwise", "tensorflow", _matrix(rank, "vars/0", "vars/1"), also=_numbered_bias_fits)
    for rank in (3, 4)
)

_TORCH_DEPTHWISE = tuple(
    LayerKind(
        "depthwise",
        "torch",
        _matrix(dimensions + 2, "weight"),
        also=_is_depthwise,
        reading=_read_torch_depthwise,
        shapes=_depthwise_shapes,
        multiplier="kernel",
    )
    for dimensions in (1, 2)
)


def _read_two_convolutions(group: Group, facts: LayerFacts) -> LayerMapping:
    rule, assumed = depthwise_kernel_rule(group["depthwise/weight"], facts)
    pointwise = kernel_permutation(len(group["pointwise/weight"].shape) - 2)
    rows = (
        TensorMapping("depthwise/weight", "depthwise_kernel", rule),
        TensorMapping("pointwise/weight", "pointwise_kernel", pointwise),
        TensorMapping("pointwise/bias", "bias"),
    )
    return LayerMapping(rows, assumed=assumed)


def _separable_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
    *space, channels, multiplier = canonical["depthwise_kernel"].shape
    *window, inputs, outputs = canonical["pointwise_kernel"].shape
    shapes = {"depthwise": (channels * multiplier, 1, *space), "pointwise": (outputs, inputs, *window)}
    return {**{f"{name}/weight": shape for name, shape in shapes.items()}, "pointwise/bias": (outputs,)}


def _separable_kind(dimensions: int) -> LayerKind:
    rank = dimensions + 2
    names = ("depthwise_kernel", "pointwise_kernel")
    return LayerKind("separable", "tensorflow", (*(WeightSpec(name, name, rank) for name in names), _BIAS))


# Common names of the two modules in PyTorch programs; each is a separate convolution by default.
_TORCH_SEPARABLE = tuple(
    LayerKind(
        "separable",
        "torch",
        (
            WeightSpec("depthwise/weight", "depthwise_kernel", dimensions + 2),
            WeightSpec("pointwise/weight", "pointwise_kernel", dimensions + 2),
            WeightSpec("pointwise/bias", "bias", 1, optional=True),
        ),
        reading=_read_two_convolutions,
        shapes=_separable_shapes,
        multiplier="depthwise_kernel",
        opt_in=True,
    )
    for dimensions in (1, 2)
)
CONVOLUTION_KINDS: tuple[LayerKind, ...] = (
    *(kind for dimensions in (1, 2, 3) for kind in _convolution_kinds(dimensions)),
    *(kind for dimensions in (1, 2) for kind in _depthwise_kinds(dimensions)),
    *_TORCH_DEPTHWISE,
    *(_separable_kind(dimensions) for dimensions in (1, 2)),
    *_TORCH_SEPARABLE,
)


def channels_first_rule(shape: Shape, outputs: int) -> Rule:
    """Return the rule from a channels-last kernel [H * W * C, out] to the weight [out, C * H * W].

    TensorFlow flattens an image with channels last, PyTorch with channels first.
    """
    rank = len(shape)
    return chain_rules(
        Reshape((*shape, outputs)),
        Permute((rank, rank - 1, *range(rank - 1))),
        Reshape((outputs, prod(shape))),
    )


def _check_flatten_shape(shape: Shape, inputs: int) -> Shape:
    if prod(shape) != inputs:
        raise MappingError(
            "the image shape does not match the inputs of the dense layer",
            expected=f"{inputs} inputs",
            found=" x ".join(map(str, shape)),
        )
    return shape


def _read_dense(group: Group, facts: LayerFacts) -> LayerMapping:
    weight = group["weight"]
    rule: Rule = TRANSPOSE
    if facts.flatten:
        outputs, inputs = weight.shape
        there = channels_first_rule(_check_flatten_shape(facts.flatten, inputs), outputs)
        rule = there.inverse(TRANSPOSE.leaf(weight))
    return LayerMapping((TensorMapping("weight", "kernel", rule), TensorMapping("bias", "bias")))


def _dense_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
    inputs, outputs = canonical["kernel"].shape
    return {"weight": (outputs, inputs), "bias": (outputs,)}


def _fits_bias(outputs: int, group: Group) -> bool:
    """Return whether the bias, if there is one, is as long as the matrix's output axis."""
    matrix = next(leaf.shape for leaf in group.values() if len(leaf.shape) == 2)
    return all(len(leaf.shape) != 1 or leaf.shape[0] == matrix[outputs] for leaf in group.values())


_KERNEL_BIASED, _WEIGHT_BIASED = partial(_fits_bias, 1), partial(_fits_bias, 0)


def _transposed_kind(name: str, bias: str, framework: str, form: str) -> LayerKind:
    """Return a dense layer whose matrix has the orientation of the other framework.

    Sources: keras/src/layers/core/dense.py and embedding.py;
    tensorflow/python/keras/legacy_tf_layers/core.py; tf_slim (`weights`, `biases`); sonnet/src/linear.py
    (`w`, `b`); torch/nn/modules/linear.py and sparse.py.
    """
    rule, also = (TRANSPOSE, _WEIGHT_BIASED) if form == OUT_IN else (KEEP, _KERNEL_BIASED)
    return LayerKind("dense", framework, _matrix(2, name, bias, rule), form, also, opt_in=True)


def _row_bias_kind() -> LayerKind:
    """Return the dense layer of Transformers' TFConv1D: x @ weight + bias [1, out]."""

    def read(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
        bias = TensorMapping("bias", "bias", Reshape(group["bias"].shape[1:]))
        return LayerMapping((TensorMapping("weight", "kernel"), bias))

    def shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
        kernel = canonical["kernel"].shape
        return {"weight": kernel, "bias": (1, kernel[1])}

    def fits(group: Group) -> bool:
        return group["bias"].shape == (1, group["weight"].shape[1])

    weights = (WeightSpec("weight", "kernel", 2), WeightSpec("bias", "bias", 2))
    return LayerKind("dense", "tensorflow", weights, ROW_BIAS, fits, read, shapes=shapes)


def _pointwise_kind(name: str, framework: str, rank: int) -> LayerKind:
    """Return a convolution with a window of one place: a dense layer over the channels."""
    ones = (1,) * (rank - 2)

    def matrix(shape: Shape) -> Shape:
        return shape[:2] if framework == "torch" else shape[-2:]

    turned: Rule = TRANSPOSE if framework == "torch" else KEEP

    def read(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
        rule = chain_rules(Reshape(matrix(group[name].shape)), turned)
        return LayerMapping((TensorMapping(name, "kernel", rule), TensorMapping("bias", "bias")))

    def shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:  # noqa: ARG001  # as all shapes
        inputs, outputs = canonical["kernel"].shape
        kernel = (outputs, inputs, *ones) if framework == "torch" else (*ones, inputs, outputs)
        return {name: kernel, "bias": (outputs,)}

    def fits(group: Group) -> bool:
        shape = group[name].shape
        spatial = shape[2:] if framework == "torch" else shape[:-2]
        outputs = shape[0] if framework == "torch" else shape[-1]
        return spatial == ones and ("bias" not in group or group["bias"].shape == (outputs,))

    weights = _matrix(rank, name)
    return LayerKind("dense", framework, weights, POINTWISE, fits, read, shapes=shapes, opt_in=True)


POINTWISE = "pointwise"
_MATRICES = (("weight", "torch"), ("kernel", "tensorflow"))
# Matrices of user-defined layers: [in, out] in PyTorch (x @ W, as in GPT-2's Conv1D), [out, in] in Keras.
IN_OUT, OUT_IN = "in_out", "out_in"
ROW_BIAS = "row_bias"
DENSE_TORCH = LayerKind(
    "dense",
    "torch",
    _matrix(2, "weight", rule=TRANSPOSE),
    also=_WEIGHT_BIASED,
    reading=_read_dense,
    shapes=_dense_shapes,
)


def _computed_weight_kind(framework: str, why: str, *names: tuple[str, int]) -> LayerKind:
    """Return a layer whose weight is computed from other tensors, which is not supported."""
    weights = tuple(WeightSpec(name, "", rank, optional=name == "bias") for name, rank in names)
    return LayerKind("computed_weight", framework, weights, refused=why)


_LORA = (
    "its weight has a LoRA update whose alpha is not in the file: use model.save() or "
    "model.save_weights(), which store the sum"
)
_QUANTISED = "its weight is quantised: a float copy of the layer would lose the scale"
WEIGHT_NORM = "it uses weight norm: use --fold-weight-norm to fold the two tensors into a single weight"
_SPECTRAL_NORM = (
    "it uses spectral norm, whose weight depends on a power iteration: remove spectral norm before saving"
)
# Sources: keras/src/layers/core/{dense,einsum_dense,embedding}.py (enable_lora, quantize);
# torch/nn/utils/{weight_norm,spectral_norm,parametrizations}.py
_COMPUTED = (
    *(
        _computed_weight_kind(
            "tensorflow", _LORA, ("kernel", rank), ("bias", 1), ("lora_kernel_a", rank), ("lora_kernel_b", 2)
        )
        for rank in (2, 3, 4, 5)
    ),
    _computed_weight_kind(
        "tensorflow", _LORA, ("embeddings", 2), ("lora_embeddings_a", 2), ("lora_embeddings_b", 2)
    ),
    *(
        _computed_weight_kind(
            "tensorflow", _QUANTISED, ("kernel", rank), ("bias", 1), ("kernel_scale", scale)
        )
        for rank in (2, 3)
        for scale in (1, 2, 3)
    ),
    _computed_weight_kind("tensorflow", _QUANTISED, ("embeddings", 2), ("embeddings_scale", 1)),
    *(
        kind
        for rank in (2, 3, 4, 5)
        for kind in (
            _computed_weight_kind("torch", WEIGHT_NORM, ("bias", 1), ("weight_g", rank), ("weight_v", rank)),
            _computed_weight_kind("torch", WEIGHT_NORM, ("original0", rank), ("original1", rank)),
            _computed_weight_kind(
                "torch", _SPECTRAL_NORM, ("bias", 1), ("weight_orig", rank), ("weight_u", 1), ("weight_v", 1)
            ),
            _computed_weight_kind("torch", _SPECTRAL_NORM, ("original", rank)),
        )
    ),
)
DENSE_KINDS: tuple[LayerKind, ...] = (
    LayerKind("dense", "tensorflow", _matrix(2, "kernel"), also=_KERNEL_BIASED),
    LayerKind("dense", "tensorflow", _matrix(2, "w", "b"), "sonnet", _KERNEL_BIASED),
    LayerKind("dense", "tensorflow", _matrix(2, "weights", "biases"), "slim", _KERNEL_BIASED),
    # A program's own names: without a bias there is no evidence against an embedding.
    LayerKind(
        "dense",
        "tensorflow",
        (WeightSpec("weight", "kernel", 2), WeightSpec("bias", "bias", 1)),
        "own",
        _KERNEL_BIASED,
    ),
    DENSE_TORCH,
    # RLlib's layer whose weights are drawn at every call (rllib/models/torch/modules/noisy_layer.py).
    LayerKind(
        "dense",
        "torch",
        (
            WeightSpec("w", "kernel", 2),
            WeightSpec("b", "bias", 1),
            WeightSpec("sigma_w", "kernel_deviation", 2),
            WeightSpec("sigma_b", "bias_deviation", 1),
        ),
        "noisy",
        refused="a layer whose weights are drawn at every call has no equivalent",
    ),
    *(_pointwise_kind(name, framework, rank) for name, framework in _MATRICES for rank in (3, 4)),
    _transposed_kind("weight", "bias", "torch", IN_OUT),
    *(
        _transposed_kind(name, bias, "tensorflow", OUT_IN)
        for name, bias in (("kernel", "bias"), ("w", "b"), ("weights", "biases"))
    ),
    _row_bias_kind(),
    *_COMPUTED,
    LayerKind("embedding", "tensorflow", (WeightSpec("embeddings", "embeddings", 2, KEEP),)),
    LayerKind("embedding", "torch", (WeightSpec("weight", "embeddings", 2, KEEP),)),
)


# Layer and group norm are stored in the same way in each framework and are one kind here. Sources:
# keras/src/layers/normalization/*.py, keras/src/layers/activations/prelu.py; sonnet/src/layer_norm.py;
# torch/nn/modules/batchnorm.py, normalization.py, activation.py.
_TAKEN_FOR_GRANTED = {"scale": 1.0, "offset": 0.0}
_PAIR = {"scale": "weight", "offset": "bias"}
_SPELLED = {"scale": "gamma", "offset": "beta"}


def _norm_weights(scale: str, offset: str, rank: int = 1) -> tuple[WeightSpec, ...]:
    return WeightSpec(scale, "scale", rank, optional=True), WeightSpec(offset, "offset", rank, optional=True)


def _write_pair(canonical: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every writing
    """Write `weight` and `bias`; PyTorch's norms with a bias also have a weight."""
    rows = tuple(TensorMapping(stored, name) for name, stored in _PAIR.items() if name in canonical)
    if "scale" in canonical:
        return LayerMapping(rows, left=leftover_names(canonical, rows))
    like = canonical["offset"]
    fills = {"weight": constant_tensor(like.dtype, like.shape, _TAKEN_FOR_GRANTED["scale"])}
    return LayerMapping(rows, fills, leftover_names(canonical, rows), ("norms without gamma get weight 1",))


def _write_batch(canonical: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every writing
    """Write a batch norm; PyTorch's has either both weight and bias, or neither."""
    require_tensors(BATCH_TORCH, canonical, ("mean", "variance"))
    names = {**_PAIR, "mean": "running_mean", "variance": "running_var"}
    rows = tuple(TensorMapping(stored, name) for name, stored in names.items() if name in canonical)
    like = canonical["mean"]
    absent = [name for name in _PAIR if name not in canonical]
    fills = {}
    assumed = []
    if len(absent) == 1:
        value = _TAKEN_FOR_GRANTED[absent[0]]
        fills[_PAIR[absent[0]]] = constant_tensor(like.dtype, like.shape, value)
        assumed = [f"batch norms without {_SPELLED[absent[0]]} get {_PAIR[absent[0]]} {value:g}"]
    # A norm without statistics counts no batches: torch uses the number only with momentum=None.
    fills["num_batches_tracked"] = constant_tensor("int64", (), 0, role="buffer")
    return LayerMapping(rows, fills, leftover_names(canonical, rows), tuple(assumed))


def _read_batch(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
    names = {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "variance"}
    rows = tuple(TensorMapping(stored, name) for stored, name in names.items())
    return LayerMapping(rows, left=tuple(name for name in group if name not in names))


def _write_batch_keras(canonical: Group, facts: LayerFacts) -> LayerMapping:
    """Write a batch norm; if the target needs gamma and beta and the source lacks them, they are 1 and 0."""
    require_tensors(BATCH_KERAS, canonical, ("mean", "variance"))
    rows = tuple(TensorMapping(stored, name) for name, stored in _BATCH.items() if name in canonical)
    like = canonical["mean"]
    fills = {
        stored: constant_tensor(like.dtype, like.shape, _TAKEN_FOR_GRANTED[name])
        for name, stored in _SPELLED.items()
        if name not in canonical and stored in facts.target_shapes
    }
    return LayerMapping(rows, fills, leftover_names(canonical, rows))


_BATCH = {**_SPELLED, "mean": "moving_mean", "variance": "moving_variance"}
BATCH_KERAS = LayerKind(
    "batch_norm",
    "tensorflow",
    (
        *_norm_weights("gamma", "beta"),
        WeightSpec("moving_mean", "mean", 1),
        WeightSpec("moving_variance", "variance", 1),
    ),
    writing=_write_batch_keras,
)
BATCH_TORCH = LayerKind(
    "batch_norm",
    "torch",
    (
        *_norm_weights("weight", "bias"),
        WeightSpec("running_mean", "mean", 1),
        WeightSpec("running_var", "variance", 1),
        WeightSpec("num_batches_tracked", "", 0, optional=True),
    ),
    reading=_read_batch,
    writing=_write_batch,
)


def _shares_axes(shape: Shape) -> bool:
    return all(extent == 1 for extent in shape[:-1])


def _read_alpha(group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG001  # as every reading
    shape = group["alpha"].shape
    if not _shares_axes(shape):
        raise MappingError(
            "a PReLU with one slope per place has no equivalent in PyTorch: share its spatial axes",
            found=str(list(shape)),
        )
    return LayerMapping((TensorMapping("alpha", "alpha", Reshape((shape[-1],)) if len(shape) > 1 else KEEP),))


def _alpha_shapes(canonical: Group, facts: LayerFacts) -> Mapping[str, Shape]:
    (channels,) = canonical["alpha"].shape
    return {"alpha": facts.target_shapes.get("alpha", (*(1,) * (facts.number or 0), channels))}


def _image_norm_kinds(rank: int) -> tuple[LayerKind, ...]:
    """Return the kinds of a layer norm over whole images: [H, W, C] in Keras, [C, H, W] in PyTorch."""
    last = Permute((*range(1, rank), 0))
    kept, moved = "layer_norm", "layer_norm_images"
    torch = tuple(WeightSpec(stored, name, rank, last, optional=True) for name, stored in _PAIR.items())
    return (
        LayerKind(kept, "tensorflow", _norm_weights("gamma", "beta", rank)),
        LayerKind(kept, "torch", _norm_weights("weight", "bias", rank), also=_has_both),
        LayerKind(moved, "tensorflow", _norm_weights("gamma", "beta", rank)),
        LayerKind(moved, "torch", torch, also=_has_both),
    )


def _has_weight(group: Group) -> bool:
    return "weight" in group


def _has_both(group: Group) -> bool:
    # A single weight with several axes belongs to another layer, as one with a bias of another shape does.
    return group.keys() >= {*_PAIR.values()} and len({leaf.shape for leaf in group.values()}) == 1


AXES = "axes"
NORM_KINDS: tuple[LayerKind, ...] = (
    LayerKind("layer_norm", "tensorflow", _norm_weights("gamma", "beta")),
    LayerKind("layer_norm", "tensorflow", tuple(WeightSpec(n, n, 1) for n in _PAIR), "sonnet"),
    LayerKind("layer_norm", "torch", _norm_weights("weight", "bias"), also=_has_weight, writing=_write_pair),
    *_image_norm_kinds(2)[:2],
    *_image_norm_kinds(3),
    *_image_norm_kinds(4),
    BATCH_KERAS,
    BATCH_TORCH,
    LayerKind("rms_norm", "tensorflow", (WeightSpec("scale", "scale", 1),)),
    LayerKind("rms_norm", "torch", (WeightSpec("weight", "scale", 1),)),
    # Over several axes: a matrix that only the class distinguishes from a dense layer's.
    LayerKind("rms_norm", "tensorflow", (WeightSpec("scale", "scale", 2),)),
    LayerKind("rms_norm", "torch", (WeightSpec("weight", "scale", 2),), AXES, opt_in=True),
    LayerKind("layer_norm", "torch", (WeightSpec("weight", "scale", 2),), AXES, opt_in=True),
    *(
        LayerKind("prelu", "tensorflow", (alpha,), reading=_read_alpha, shapes=_alpha_shapes)
        for alpha in (WeightSpec("alpha", "alpha", rank) for rank in (1, 2, 3, 4))
    ),
    LayerKind("prelu", "torch", (WeightSpec("weight", "alpha", 1),)),
)


KERNELS = ("kernel", "recurrent_kernel")
BIASES = ("bias_input", "bias_recurrent")


class _CellForm(NamedTuple):
    """Storage form of a cell: names of kernels and biases, form of biases.

    Biases are one for both, two in a row ("long", as in cuDNN), two rows ("rows"), or two tensors ("apart").
    The canonical form uses Keras's order of gates (LSTM i, f, g, o; GRU z, r, h), a kernel [in, gates *
    units], a recurrent kernel [units, gates * units] and two biases, which a GRU must keep separate and an
    LSTM adds. Sources: keras/src/layers/rnn/lstm.py, gru.py, simple_rnn.py;
    tf_keras/src/saving/legacy/hdf5_format.py (_convert_rnn_weights: the cuDNN forms);
    sonnet/src/recurrent.py; stable_baselines/common/tf_layers.py (lstm); torch/nn/modules/rnn.py.
    """

    kind: str
    framework: str
    names: tuple[str, ...]
    biases: Literal["one", "long", "rows", "apart"]
    form: str = ""

    def record(self) -> LayerKind:
        """Return the form as a kind."""
        rank = 2 if self.biases == "rows" else 1
        weights = (
            *(WeightSpec(name, canonical, 2) for name, canonical in zip(self.names, KERNELS, strict=False)),
            *(WeightSpec(name, BIASES[0], rank, optional=self.biases != "long") for name in self.names[2:]),
        )
        return LayerKind(self.kind, self.framework, weights, self.form, self.fits, self.read, self.write)

    def fits(self, group: Group) -> bool:
        """Return whether the shapes are those of a cell: gates times units, with biases of that length."""
        kernel, recurrent = (self._canonical(group[name].shape) for name in self.names[:2])
        biases = [group[name].shape for name in self.names[2:] if name in group]
        units, width = recurrent
        return (
            width == count_gates(self.kind) * units
            and kernel[1] == width
            and all(shape == self._length(width) for shape in biases)
            and len(biases) in (0, len(self.names) - 2)
        )

    def read(self, group: Group, facts: LayerFacts) -> LayerMapping:  # noqa: ARG002  # as every reading
        """Return the mapping from a cell's tensors to canonical ones."""
        kernels = [self._canonical(group[name].shape) for name in self.names[:2]]
        rows = list(self._kernels(*kernels))
        if self.names[2] in group:
            rows += self._biases(kernels[0][1])
        return LayerMapping(tuple(rows))

    def write(self, canonical: Group, facts: LayerFacts) -> LayerMapping:
        """Return the mapping from canonical tensors to a cell's; a missing bias is 0."""
        require_tensors(self.record(), canonical, KERNELS)
        like, biases = canonical["kernel"], [name for name in BIASES if name in canonical]
        width = like.shape[1]
        shapes = (*(self._canonical(canonical[name].shape) for name in KERNELS), *[self._length(width)] * 2)
        stored = {n: placeholder_leaf(like, shape) for n, shape in zip(self.names, shapes, strict=False)}
        rows: list[TensorMapping] = []
        fills: dict[str, Leaf] = {}
        for row in self.read(stored, facts).rows:
            back = row.rule.inverse(stored[row.stored])
            if self.biases == "one" and row.canonical in BIASES:
                terms = (SumTerm(len(biases)),) if len(biases) > 1 else ()
                rows += [TensorMapping(row.stored, name, chain_rules(back, *terms)) for name in biases]
            elif row.canonical in canonical:
                rows.append(TensorMapping(row.stored, row.canonical, back))
            elif biases:
                fills |= apply_rule(row.stored, back, constant_tensor(like.dtype, (width,), 0.0))
        if not biases:
            zeros = constant_tensor(like.dtype, self._length(width), 0.0)
            fills = {name: zeros for name in self.names[2:] if name in facts.target_shapes}
        return LayerMapping(tuple(rows), fills)

    def _canonical(self, shape: Shape) -> Shape:
        return shape if self.framework == "tensorflow" else shape[::-1]

    def _length(self, width: int) -> Shape:
        return {"long": (2 * width,), "rows": (2, width)}.get(self.biases, (width,))

    def _reordered(self, axis: int) -> Rule:
        order = gate_order(self.kind, self.form or self.framework)
        return KEEP if order == tuple(sorted(order)) else BlockOrder(axis, order)

    def _kernels(self, kernel: Shape, recurrent: Shape) -> Iterator[TensorMapping]:
        """Yield the mappings to the canonical kernels, which have these shapes."""
        turned: Rule = KEEP if self.framework == "tensorflow" else TRANSPOSE
        gates = count_gates(self.kind)
        rules = (turned, turned)
        if self.biases == "long":
            rules = (
                _cudnn_input_rule(kernel[0], gates, recurrent[0]),
                _cudnn_recurrent_rule(gates, recurrent[0]),
            )
        for name, canonical, rule in zip(self.names, KERNELS, rules, strict=False):
            yield TensorMapping(name, canonical, chain_rules(rule, self._reordered(1)))

    def _biases(self, width: int) -> tuple[TensorMapping, ...]:
        """Return the mappings from stored biases to canonical ones of a given length."""
        cuts: tuple[Rule, ...] = (KEEP, KEEP)
        if self.biases == "long":
            cuts = AxisSlice(0, 0, width, 2 * width), AxisSlice(0, width, 2 * width, 2 * width)
        elif self.biases == "rows":
            cuts = tuple(chain_rules(AxisSlice(0, n, n + 1, 2), Reshape((width,))) for n in (0, 1))
        names = (self.names[2], self.names[-1])
        rows = zip(names, BIASES, cuts, strict=True)
        mappings = tuple(
            TensorMapping(name, canonical, chain_rules(cut, self._reordered(0)))
            for name, canonical, cut in rows
        )
        return mappings[:1] if self.biases == "one" else mappings


def _cudnn_input_rule(inputs: int, gates: int, units: int) -> Rule:
    """Return the rule for cuDNN's input kernel: each gate's elements of [units, in] as [in, units]."""
    return chain_rules(
        Reshape((inputs, gates, units)),
        Permute((1, 0, 2)),
        Reshape((gates, units, inputs)),
        Permute((2, 0, 1)),
        Reshape((inputs, gates * units)),
    )


def _cudnn_recurrent_rule(gates: int, units: int) -> Rule:
    """Return the rule for cuDNN's recurrent kernel: each gate's kernel is transposed."""
    return chain_rules(Reshape((units, gates, units)), Permute((2, 1, 0)), Reshape((units, gates * units)))


def placeholder_leaf(leaf: Leaf, shape: Shape) -> Leaf:
    """Return a leaf of another shape, without bytes, to compute a rule's inverse."""
    return Leaf(leaf.dtype, shape, Inline(b""), "")


def apply_rule(name: str, rule: Rule, leaf: Leaf) -> dict[str, Leaf]:
    """Return the result of a rule on a leaf, with a name."""
    result = rule.leaf(leaf)
    return {name: result} if isinstance(result, Leaf) else {}


_KERAS = ("kernel", "recurrent_kernel", "bias")
TORCH_CELL_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
RECURRENT_KINDS: tuple[LayerKind, ...] = tuple(
    form.record()
    for form in (
        _CellForm("lstm", "tensorflow", _KERAS, "one"),
        _CellForm("lstm", "tensorflow", _KERAS, "long", "cudnn"),
        _CellForm("lstm", "tensorflow", ("w_i", "w_h", "b"), "one", "sonnet"),
        _CellForm("lstm", "tensorflow", ("wx", "wh", "b"), "one", "baselines"),
        _CellForm("lstm", "torch", TORCH_CELL_WEIGHTS, "apart"),
        _CellForm("gru", "tensorflow", _KERAS, "rows"),
        _CellForm("gru", "tensorflow", _KERAS, "long", "cudnn"),
        _CellForm("gru", "torch", TORCH_CELL_WEIGHTS, "apart"),
        _CellForm("simple_rnn", "tensorflow", _KERAS, "one"),
        _CellForm("simple_rnn", "torch", TORCH_CELL_WEIGHTS, "apart"),
    )
)
