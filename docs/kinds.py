"""Makes docs/kinds.md: what becomes of one layer of every kind, as the code maps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttool.commands.options import parse_layer_options
from ckpttool.core import Inline, Leaf, Path, Shape, Tree, attr, display, key
from ckpttool.mapping import Plan, apply_plan, flattening
from ckpttool.mapping.layers import KINDS

HEAD = """# Layer kinds

Made by `python docs/generate.py` from `ckpttool/mapping/layers.py`; do not edit it by hand. What kinds are for,
and what is asked when a layer may be of several, is in [mapping.md](mapping.md#layer-kinds).

Every table shows one layer of made-up sizes: its tensors as one framework stores them, and where they go.
Rules in a row are done from left to right; the other direction is the inverse, unless it is shown too. A
tensor that nothing fills is new: its numbers are 0, in a norm's weight 1, of an LSTM of TensorFlow 1 what
the cell adds when it runs.
"""  # noqa: E501
_U, _I = 5, 3
Shapes = Mapping[str, Shape]


def _gates(gates: int, *names: str, bias: Shape | None = None) -> Shapes:
    shapes = ((_I, gates * _U), (_U, gates * _U), bias or (gates * _U,))
    return dict(zip(names, shapes, strict=True))


_KERAS = ("cell/kernel", "cell/recurrent_kernel", "cell/bias")
_DENSES: Shapes = {
    f"_{name}_dense/{tensor}": shape
    for name in ("query", "key", "value")
    for tensor, shape in (("kernel", (8, 2, 4)), ("bias", (2, 4)))
}
# Title, tensors of a layer called `a`, what is said of it.
FROM_TENSORFLOW: tuple[tuple[str, Shapes, str], ...] = (
    ("Dense", {"kernel": (_I, _U), "bias": (_U,)}, ""),
    ("Dense of Sonnet and of baselines", {"w": (_I, _U), "b": (_U,)}, ""),
    ("Dense after a flattened image of 7 x 7 pixels and 2 channels", {"kernel": (98, _U)}, "a=7,7,2"),
    ("Embedding", {"embeddings": (7, _U)}, ""),
    ("Convolution of one dimension", {"kernel": (3, 2, _U), "bias": (_U,)}, ""),
    ("Convolution of two dimensions", {"kernel": (3, 3, 2, _U), "bias": (_U,)}, ""),
    ("Convolution of three dimensions", {"kernel": (3, 3, 3, 2, _U), "bias": (_U,)}, ""),
    ("Transposed convolution", {"kernel": (3, 3, _U, 2), "bias": (_U,)}, ""),
    ("Depthwise convolution", {"kernel": (3, 3, 4, 2), "bias": (8,)}, ""),
    (
        "Separable convolution",
        {"depthwise_kernel": (3, 3, 4, 2), "pointwise_kernel": (1, 1, 8, _U), "bias": (_U,)},
        "",
    ),
    ("Batch norm", dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), (_U,)), ""),
    ("Layer or group norm", {"gamma": (_U,), "beta": (_U,)}, ""),
    ("RMS norm", {"scale": (_U,)}, ""),
    ("PReLU", {"alpha": (1, 1, _U)}, ""),
    ("LSTM", _gates(4, *_KERAS), ""),
    ("LSTM of cuDNN", _gates(4, *_KERAS, bias=(8 * _U,)), ""),
    ("LSTM of Sonnet", _gates(4, "_w_i", "_w_h", "b"), ""),
    ("LSTM of baselines", _gates(4, "wx", "wh", "b"), ""),
    ("LSTM of TensorFlow 1", {"basic_lstm_cell/kernel": (8, 20), "basic_lstm_cell/bias": (20,)}, ""),
    ("GRU", _gates(3, *_KERAS, bias=(2, 3 * _U)), ""),
    ("Simple RNN", _gates(1, *_KERAS), ""),
    (
        "Bidirectional",
        {
            f"{way}_layer/{name}": s
            for way in ("forward", "backward")
            for name, s in _gates(4, *_KERAS).items()
        },
        "",
    ),
    (
        "Multi-head attention",
        {**_DENSES, "_output_dense/kernel": (2, 4, 8), "_output_dense/bias": (8,)},
        "",
    ),
)
FROM_TORCH: tuple[tuple[str, Shapes, str], ...] = (
    ("Depthwise convolution, of `--kind a=depthwise:2`", {"weight": (8, 1, 3, 3)}, "depthwise:2"),
    (
        "Batch norm",
        dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (_U,)) | {"num_batches_tracked": ()},
        "",
    ),
    ("PReLU, of `--kind a=prelu:2`", {"weight": (_U,)}, "prelu:2"),
    (
        "LSTM of two layers",
        {
            f"{name}_l{n}": shape
            for n, inputs in enumerate((_I, _U))
            for name, shape in (
                ("weight_ih", (20, inputs)),
                ("weight_hh", (20, _U)),
                ("bias_ih", (20,)),
                ("bias_hh", (20,)),
            )
        },
        "",
    ),
    (
        "Multi-head attention, of `--kind a=attention:2`",
        {
            "in_proj_weight": (24, 8),
            "in_proj_bias": (24,),
            "out_proj.weight": (8, 8),
            "out_proj.bias": (8,),
        },
        "attention:2",
    ),
)


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, "## TensorFlow to PyTorch\n"]
    parts += [_section(title, _tensorflow(shapes), said) for title, shapes, said in FROM_TENSORFLOW]
    parts.append("## PyTorch to TensorFlow\n")
    parts += [_section(title, _torch(shapes), said, back=True) for title, shapes, said in FROM_TORCH]
    parts.append("## Refused\n\n" + "\n".join(_refused()) + "\n")
    parts.append("## What a kind needs besides its weights\n\n" + "\n".join(_needs()) + "\n")
    return "\n".join(parts)


def _leaf(shape: Shape, dtype: str = "float32") -> Leaf:
    return Leaf(dtype, shape, Inline(b""), "")


def _tensorflow(shapes: Shapes) -> Tree:
    return Tree({tuple(map(attr, f"a/{name}".split("/"))): _leaf(shape) for name, shape in shapes.items()})


def _torch(shapes: Shapes) -> Tree:
    return Tree(
        {(key(f"a.{name}"),): _leaf(shape, "float32" if shape else "int64") for name, shape in shapes.items()}
    )


def _section(title: str, tree: Tree, said: str, *, back: bool = False) -> str:
    flatten = [said] if "," in said else []
    given = parse_layer_options([f"a={said}"] if said and not flatten else [], flatten)
    plan = flattening.plan_to_tensorflow(tree, given) if back else flattening.plan_to_torch(tree, given)
    rows = "\n".join(_rows(tree, plan))
    return f"### {title}\n\n| from | to | rule |\n|---|---|---|\n{rows}\n"


def _rows(tree: Tree, plan: Plan) -> Iterator[str]:
    there = apply_plan(tree, plan)
    for move in plan.moves:
        source, target = tree[move.source], there[move.target]
        if isinstance(source, Leaf) and isinstance(target, Leaf):
            yield f"| {_shown(move.source, source)} | {_shown(move.target, target)} | {move.rule.name} |"
    moved = {move.target for move in plan.moves}
    for path, leaf in plan.added.items():
        if path not in moved and isinstance(leaf, Leaf):
            yield f"| | {_shown(path, leaf)} | new |"
    for path in plan.consumed:
        leaf = tree[path]
        if isinstance(leaf, Leaf):
            yield f"| {_shown(path, leaf)} | | kept beside the target for the way back |"


def _shown(path: Path, leaf: Leaf) -> str:
    return f"`{display(path).removeprefix('a/')}` {list(leaf.shape)}"


def _refused() -> Iterator[str]:
    for name, why in dict.fromkeys((kind.name, kind.refused) for kind in KINDS if kind.refused):
        yield f"- `{name}`: {why}."


def _needs() -> Iterator[str]:
    yield from (f"- {note}." for note in flattening.NOTES.values())
