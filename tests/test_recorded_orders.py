"""The orders that a file's own computation records, and those of a live tf.Module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import (
    Container,
    Inline,
    Leaf,
    Tree,
    WeightUse,
    attr,
    framework_order,
    plain_order,
)
from ckpttool.core.activations import UNKNOWN
from ckpttool.graphs import Graph, OperatorNode, Value
from ckpttool.graphs.builder import GraphBuilder
from ckpttool.graphs.torchscript import apply_operation
from ckpttool.graphs.torchscript_translator import ScriptTranslator
from ckpttool.graphs.torchscript_values import InputShapeError
from ckpttool.libraries.activation_orders import trace_graph_orders
from tests import tensorflow_child, warm
from tests.conftest import ROOT


def leaf(*shape: int) -> Leaf:
    return Leaf("float32", shape, Inline(np.zeros(shape, "<f4").tobytes()), "weight")


WEIGHT, SECOND, FILTER = (attr("weight"),), (attr("second"),), (attr("filter"),)
WEIGHTS = Tree({WEIGHT: leaf(24, 7), SECOND: leaf(7, 3), FILTER: leaf(2, 2, 2)})


def orders_of(inputs: dict[str, tuple[int, ...]], *rows: tuple) -> dict:
    """Return the orders in a graph; a row is an operator, its inputs (constants as lists), and attributes."""
    build = GraphBuilder()
    for n, (op, names, *attributes) in enumerate(rows):
        read = [
            name
            if isinstance(name, str)
            else build.number(name, "int64")
            if isinstance(name, list)
            else build.stored(name, WEIGHTS[name], str(name[0].value))
            for name in names
        ]
        build.nodes.append(OperatorNode(op, tuple(read), (f"v{n}",), attributes[0] if attributes else {}))
    graph = Graph(
        tuple(build.nodes),
        tuple(Value(name, "float32", shape) for name, shape in inputs.items()),
        (Value(f"v{len(rows) - 1}"),),
        build.constants,
    )
    return dict(trace_graph_orders(graph, WEIGHTS, 1))


def test_a_vector_between_images_is_a_part_of_its_own():
    images = [("Conv", (name, FILTER)) for name in "ab"]
    flat = [("Flatten", (name,), {"axis": 1}) for name in ("v0", "v1")]
    joined = ("Concat", ("v2", "vector", "v3"), {"axis": 1})
    inputs = {"a": (1, 2, 6), "b": (1, 2, 6), "vector": (1, 4)}
    orders = orders_of(inputs, *images, *flat, joined, ("MatMul", ("v4", WEIGHT)))
    assert orders[WEIGHT].takes == framework_order(((5, 2), (1, 4), (5, 2)), "torch")
    assert orders[WEIGHT].makes == plain_order(7)


def test_a_layer_takes_parts_of_one_origin_in_all_calls_one_after_the_other():
    def parts(*calls):
        rows = []
        for one, other, columns in calls:
            rows.append(("Concat", (f"x{one}", f"x{other}"), {"axis": 1}))
            rows.append(("Gather", (f"v{len(rows) - 1}", [*columns]), {"axis": 1}))
            rows.append(("MatMul", (f"v{len(rows) - 1}", WEIGHT)))
        orders = orders_of({f"x{n}": (1, 12) for n in range(4)}, *rows)
        return [(part.size, part.origin, part.number) for part in orders[WEIGHT].parts if part.size]

    plain, between = np.arange(24), np.arange(24).reshape(2, 12).T.ravel()
    recorded = [(12, "input", 1), (12, "input", 0)]
    assert parts((1, 0, plain)) == parts((1, 0, plain), (1, 0, plain)) == recorded
    for calls in ([(1, 0, between)], [(1, 0, plain[::-1])], [(1, 0, plain), (3, 2, plain)]):
        assert sorted(parts(*calls)) == [(12, "mixed", -1)] * 2


def test_only_the_layer_behind_an_unknown_operation_has_an_unknown_order():
    layers = [("Unknown", ("x",)), ("MatMul", ("v0", WEIGHT)), ("MatMul", ("v1", SECOND))]
    orders = orders_of({"x": (1, 24)}, *layers)
    assert orders[WEIGHT].takes == UNKNOWN
    assert orders[SECOND].takes is None
    # A layer whose output has another width than the next one takes is not evaluated.
    assert orders_of({"x": (1, 24)}, *layers[:2], ("MatMul", ("v1", WEIGHT))) == {}


def test_two_calls_that_take_an_image_differently_have_no_order():
    turned = ("Transpose", ("v0",), {"perm": (0, 2, 1)})
    flat = [("Flatten", (name,), {"axis": 1}) for name in ("v0", "v1")]
    rows = [("Conv", ("x", FILTER)), turned, *flat]
    calls = [("MatMul", (name, WEIGHT)) for name in ("v2", "v3")]
    orders = orders_of({"x": (1, 2, 13)}, *rows, *calls)
    assert orders[WEIGHT].takes == UNKNOWN
    assert orders_of({"x": (1, 2, 13)}, *rows, calls[0])[WEIGHT].takes == framework_order(((12, 2),), "torch")


@pytest.mark.parametrize(
    "row",
    [("Reshape", ("x", [1, 23])), ("Reshape", ("x", [1, -1, -1])), ("MatMul", ("x", SECOND))],
)
def test_a_shape_that_does_not_fit_is_not_evaluated(row):
    assert orders_of({"x": (1, 24)}, row, ("MatMul", ("x", WEIGHT))) == {}
    assert orders_of({"x": (1, 24)}, ("MatMul", ("x", WEIGHT)))


CODE = """class Net(Module):
  def forward(self: __torch__.Net,
    x: Tensor) -> Tensor:
    y = torch.conv2d(x, self.conv, None, [1, 1], [0, 0], [1, 1])
    for i in range(2):
      y = torch.relu(y)
    if torch.eq(torch.dim(y), 4):
      z = {move}
    else:
      ops.prim.RaiseException("no image", "builtins.ValueError")
    return torch.linear(torch.flatten(z, 1), self.dense, None)
"""


IMAGE_TREE = Tree(
    {(attr("conv"),): leaf(4, 3, 2, 2), (attr("dense"),): leaf(7, 24)},
    {},
    {(): Container("record", "__torch__.Net")},
)


def orders_of_code(move: str, shape: tuple[int, ...] = (2, 3, 3, 4)) -> dict[str, WeightUse]:
    """Return the orders in code with a convolution, an image [2, 4, 2, 3] and a dense layer."""
    translator = ScriptTranslator(
        IMAGE_TREE,
        {"__torch__": CODE.format(move=move)},
        operation=apply_operation,
        integers=set(),
        shapes=[shape],
    )
    orders = trace_graph_orders(translator.graph(()), IMAGE_TREE, 1)
    return {str(path[0].value): use for path, use in orders.items()}


@pytest.mark.parametrize(
    ("move", "order"),
    [
        ("y", framework_order(((6, 4),), "torch")),
        ("torch.permute(y, [0, 2, 3, 1])", framework_order(((6, 4),), "tensorflow")),
        ("torch.movedim(y, 1, -1)", framework_order(((6, 4),), "tensorflow")),
        ("torch.transpose(torch.flatten(y, 2), 1, 2)", framework_order(((6, 4),), "tensorflow")),
        ('torch.einsum("bchw->bhwc", [y])', framework_order(((6, 4),), "tensorflow")),
        ("torch.adaptive_avg_pool2d(y, [2, 3])", framework_order(((6, 4),), "torch")),
        (
            "torch.adaptive_avg_pool2d(torch.permute(y, [0, 1, 3, 2]), [2, 3])",
            framework_order(((6, 4),), "torch"),
        ),
        ("torch.group_norm(torch.mul(y, 2), 2)", framework_order(((6, 4),), "torch")),
        ("torch.softplus(torch.add(y, torch.sigmoid(y)))", framework_order(((6, 4),), "torch")),
        # The entries of an image that are repeated have no order.
        ("torch.repeat(torch.mean(y, [3], True), [1, 1, 1, 3])", UNKNOWN),
        ("torch.unknown_operation(y)", UNKNOWN),
        ("torch.sort(y, 1)[0]", UNKNOWN),
    ],
)
def test_the_code_of_a_script_shows_the_order(move, order):
    assert orders_of_code(move)["dense"].takes == order


def test_code_that_does_not_fit_an_image_is_refused():
    """The convolution has three channels, the code raises an exception for what is no image."""
    for shape in ((2, 4, 3, 4), (2, 3, 3, 5), (3, 3, 4), (2, 24)):
        with pytest.raises(InputShapeError):
            orders_of_code("y", shape)


def test_branches_of_a_condition_on_values_must_agree():
    """Both branches are evaluated; a permutation in one of them leaves the order open."""
    condition = "if torch.gt(torch.sum(y), 0):\n      z = {}\n    else:\n      z = {}\n    z = z"
    for branches, order in (
        (("torch.mul(y, 2)", "y"), framework_order(((6, 4),), "torch")),
        (("torch.flip(y, [1])", "torch.flip(y, [1])"), None),
        (("torch.flip(y, [1])", "y"), UNKNOWN),
    ):
        code = CODE.replace("      z = {move}", "      z = y").replace(
            "    return", f"    {condition.format(*branches)}\n    return"
        )
        translator = ScriptTranslator(
            IMAGE_TREE, {"__torch__": code}, operation=apply_operation, integers=set(), shapes=[(2, 3, 3, 4)]
        )
        takes = trace_graph_orders(translator.graph(()), IMAGE_TREE, 1)[attr("dense"),].takes
        assert takes == order or (order is None and takes not in (None, UNKNOWN))


OPAQUE = """class Net(Module):
  def forward(self: __torch__.Net,
    x: Tensor) -> Tensor:
    y = torch.conv2d(x, self.conv, None, [1, 1], [0, 0], [1, 1])
    z = (self.inner).forward(torch.flatten(y, 1), )
    return torch.linear(z, self.dense, None)
class Inner(Module):
  def forward(self: __torch__.Inner,
    x: Tensor) -> Tensor:
    if torch.gt(torch.sum(x), 0):
      return torch.linear(x, self.weight, None)
    return x
"""


def test_layers_in_a_module_without_translation_have_unknown_orders():
    """Its result depends on values, so that the weights in it appear in no node."""
    inner, dense = (attr("inner"), attr("weight")), (attr("dense"),)
    tree = Tree(
        {
            (attr("conv"),): leaf(4, 3, 2, 2),
            inner: leaf(24, 24),
            dense: leaf(7, 24),
            (attr("free"),): leaf(7, 24),
        },
        {},
        {(): Container("record", "__torch__.Net"), inner[:1]: Container("record", "__torch__.Inner")},
    )
    translator = ScriptTranslator(
        tree, {"__torch__": OPAQUE}, operation=apply_operation, integers=set(), shapes=[(2, 3, 3, 4)]
    )
    orders = trace_graph_orders(translator.graph(()), tree, 1)
    assert orders[inner] == WeightUse(UNKNOWN, UNKNOWN)
    assert orders[dense].takes == UNKNOWN
    assert (attr("free"),) not in orders


# --- A live tf.Module -----------------------------------------------------------------------------------

_MODULE = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
import tensorflow as tf
import ckpttool
from ckpttool.core.errors import MappingError

class Layer(tf.Module):
    def __init__(self, shape):
        super().__init__()
        self.w = tf.Variable(tf.zeros(shape), name="w")
        self.b = tf.Variable(tf.zeros(shape[-1]), name="b")

class Net(tf.Module):
    def __init__(self, move):
        super().__init__()
        self.conv, self.dense, self.move = Layer((2, 2, 3, 4)), Layer((24, 7)), move

    @tf.function
    def __call__(self, x):
        x = self.move(tf.nn.relu(tf.nn.conv2d(x, self.conv.w, 1, "VALID") + self.conv.b))
        return tf.reshape(x, (-1, 24)) @ self.dense.w + self.dense.b

draw = np.random.default_rng(0)
state = {{"conv.weight": draw.standard_normal((4, 3, 2, 2), "f4"), "conv.bias": np.zeros(4, "f4"),
          "dense.weight": draw.standard_normal((7, 24), "f4"), "dense.bias": np.zeros(7, "f4")}}
np.savez("torch.npz", **state)

def fill(move, **options):
    net = Net(move)
    done = ckpttool.load_into(net, "torch.npz", shapes=[(3, 4, 3)], from_="torch", **options)
    return net.dense.w.numpy(), done.report.assumed

first, _ = fill(lambda x: tf.transpose(x, (0, 3, 1, 2)))
np.testing.assert_array_equal(first, state["dense.weight"].T)
last, assumed = fill(lambda x: x)
wanted = state["dense.weight"].reshape(7, 4, 6).transpose(2, 1, 0).reshape(24, 7)
np.testing.assert_array_equal(last, wanted)
assert any("flatten={{'dense': 'no'}}" in each for each in assumed), assumed
same, _ = fill(lambda x: x, flatten={{"dense": "no"}})
np.testing.assert_array_equal(same, state["dense.weight"].T)
try:
    fill(lambda x: tf.transpose(x, (0, 2, 3, 1))[:, ::-1])
except MappingError as error:
    assert "flatten={{'dense': 'no'}}" in (error.hint or ""), error.hint
else:
    raise AssertionError("an order of the model's own was assumed")
"""


@pytest.mark.tensorflow
def test_a_live_module_of_tensorflow_shows_the_order_that_it_takes(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow")
    status, output = warm.run("tensorflow", _MODULE.format(root=str(ROOT)), tmp_path)
    assert status == 0, output[-2000:]
