"""Graphs of SavedModels: layers and operations compute what TensorFlow computes from the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpttool
from ckpttool.core import CkpttoolError, Tree, UnsupportedError, framework_order, plain_order
from ckpttool.core.activations import UNKNOWN
from ckpttool.formats.tf_functions import FunctionNode, GraphFunction
from ckpttool.graphs import Value, evaluate, read_graph, tensorflow
from ckpttool.libraries.activation_orders import read_orders
from tests import graph_models
from tests.tensorflow_child import require, run, run_each

pytestmark = pytest.mark.tensorflow
CHILD = graph_models.__file__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("tensorflow", "keras")
    path = tmp_path_factory.mktemp("graphs")
    run_each(CHILD, dict.fromkeys(("build", "build_nodes", "build_images"), path))
    return path


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def require_same_numbers(folder: Path) -> int:
    """Compare all signatures of a SavedModel; return their number."""
    arrays, checkpoint = load_arrays(folder / "arrays.npz"), ckpttool.open(str(folder / "model"))
    names = [key.removesuffix("/input") for key in arrays if key.endswith("/input")]
    for name in (name for name in names if name != "counter"):
        graph = tensorflow.read(checkpoint, name)
        assert graph is not None, name
        outputs = evaluate(graph, {"value": arrays[f"{name}/input"]})
        keys = [key for key in arrays if key.startswith(f"{name}/output/")]
        assert sorted(outputs) == sorted(key.rpartition("/")[2] for key in keys), name
        for key in keys:
            own, expected = outputs[key.rpartition("/")[2]], arrays[key]
            assert (own.dtype, own.shape) == (expected.dtype, expected.shape), key
            wide = expected.astype(np.float64)
            scale = max(1.0, float(np.abs(wide).max(initial=0, where=np.isfinite(wide))))
            np.testing.assert_allclose(own.astype(np.float64), wide, rtol=0, atol=1e-6 * scale, err_msg=key)
    return len(names)


def test_operations_and_layers_compute_what_tensorflow_does(folder: Path) -> None:
    assert require_same_numbers(folder) == len(graph_models.USUAL) + 27


@pytest.mark.slow
def test_all_other_layers_compute_what_keras_does(tmp_path: Path) -> None:
    require("tensorflow", "keras")
    run(CHILD, "build_all", tmp_path)
    assert require_same_numbers(tmp_path) == 55


def test_variables_are_unread_leaves_of_the_tree(folder: Path) -> None:
    checkpoint = ckpttool.open(str(folder / "model"))
    graph = tensorflow.read(checkpoint, "depthwise")
    assert graph is not None
    stored = [constant for constant in graph.constants.values() if constant.path is not None]
    assert [leaf.leaf is checkpoint.tree[leaf.path] for leaf in stored if leaf.path] == [True, True]
    assert {constant.shape for constant in stored} == {(8, 1, 3, 3), (8,)}
    (node,) = [node for node in graph.nodes if node.op == "Conv"]
    assert (node.attributes["group"], node.attributes["auto_pad"]) == (4, "SAME_UPPER")
    assert node.scope == tuple(node.name.split("/")[:-1])


def test_a_signature_must_be_chosen(folder: Path) -> None:
    checkpoint = ckpttool.open(str(folder / "model"))
    with pytest.raises(UnsupportedError, match="several signatures"):
        read_graph(checkpoint)
    with pytest.raises(UnsupportedError) as refused:
        tensorflow.read(checkpoint, "none")
    assert refused.value.found == "none"


def test_a_variable_that_is_changed_before_it_is_read_is_refused(folder: Path) -> None:
    arrays = load_arrays(folder / "arrays.npz")
    graph = tensorflow.read(ckpttool.open(str(folder / "model")), "counter")
    assert graph is not None
    with pytest.raises(UnsupportedError) as refused:
        evaluate(graph, {"value": arrays["counter/input"]})
    assert refused.value.found == "tf.raw_ops.ReadVariableOp"


def test_graphs_of_tensorflow_1_compute_the_same(folder: Path) -> None:
    arrays = load_arrays(folder / "nodes.npz")
    graph = read_graph(ckpttool.open(str(folder / "plain")))
    assert graph is not None
    assert (graph.inputs[0].name, graph.inputs[0].shape) == ("value", ("", 6))
    outputs = evaluate(graph, {"value": arrays["value"]})
    np.testing.assert_allclose(outputs["result"], arrays["plain"], rtol=0, atol=1e-6)
    changed = read_graph(ckpttool.open(str(folder / "changed")))
    assert changed is not None
    with pytest.raises(UnsupportedError) as refused:
        evaluate(changed, {"value": arrays["value"]})
    assert str(refused.value.found).startswith("tf.raw_ops.")


@pytest.mark.parametrize("name", ["orders", "functions"])
def test_orders_of_flattened_images_are_those_of_all_functions(name: str, folder: Path) -> None:
    """A sort leaves the order open, and so do two functions that flatten in different ways."""
    orders = read_orders(ckpttool.open(str(folder / name)))
    takes = {str(path[-1].value): order.takes for path, order in orders.items()}
    image = ((6, 4),)
    assert {key: takes[key] for key in ("last", "first", "rows", "open", "both", "recurrent")} == {
        "last": framework_order(image, "tensorflow"),
        "first": framework_order(image, "torch"),
        "rows": framework_order(image, "tensorflow"),
        "open": UNKNOWN,
        "both": UNKNOWN,
        "recurrent": plain_order(7),
    }


def test_real_saved_models_compute_what_they_are_named_for(corpus: Path) -> None:
    """TensorFlow Serving's examples: x / 2 + 2, and x / 2 + 3."""
    for name, offset in (("plus_two_tf2_cpu", 2), ("plus_two_mkl", 2), ("plus_three", 3)):
        folder = corpus / "tf" / "savedmodel" / f"serving_saved_model_half_{name}" / "00000123"
        graph = read_graph(ckpttool.open(str(folder)))
        assert graph is not None
        outputs = evaluate(graph, {"x": np.array([[1.0], [-3.0]], np.float32)})
        assert outputs["y"].tolist() == [[0.5 + offset], [-1.5 + offset]]


def test_operations_with_unexpected_inputs_are_opaque_or_refused() -> None:
    """Each operation without attributes, with none to three inputs, some of them not tensors."""
    value = tensorflow.TensorName("a", "float32")
    for op in tensorflow.list_operations():
        for argument in (value, None, tensorflow.VariableName(()), tensorflow.TensorList(value)):
            for count in range(4):
                nodes = {"n": FunctionNode(op, ("a",) * count, {})}
                translator = tensorflow.FunctionTranslator({}, Tree({}))
                try:
                    results = translator.call(GraphFunction(("a",), nodes, ("n:output:0",)), [argument])
                except CkpttoolError:
                    continue
                assert len(results) == 1


@pytest.mark.parametrize(("before", "after"), [((0, 0), (0, 0)), ((1, 2), (0, 0)), ((2, 0), (2, 4))])
def test_an_image_comes_back_from_its_blocks_without_what_was_padded(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    shape = (2, 8 - before[0] - after[0], 9 - before[1] - after[1], 3)
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    translator = tensorflow.FunctionTranslator({}, Tree({}))
    nodes = {
        "s": FunctionNode("SpaceToBatchND", ("x", "blocks", "widths"), {}),
        "b": FunctionNode("BatchToSpaceND", ("s:output:0", "blocks", "widths"), {}),
    }
    constants = [translator.constant(np.array(row)) for row in ([2, 3], [*zip(before, after, strict=True)])]
    function = GraphFunction(("x", "blocks", "widths"), nodes, ("b:output:0",))
    (result,) = translator.call(function, [tensorflow.TensorName("x", "float32"), *constants])
    graph = translator.graph([Value("x", "float32")], {"y": result})
    np.testing.assert_array_equal(evaluate(graph, {"x": image})["y"], image)
