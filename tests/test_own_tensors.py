"""Learned queries, own attentions, group norms of old exports: what the graph or a call shows of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ckpttool.core import framework_order, plain_order
from ckpttool.formats import open_checkpoint
from ckpttool.graphs import evaluate, read_graph
from ckpttool.libraries.onnx_policies import plan_state_dict
from ckpttool.mapping.layer_kinds import attention_children
from ckpttool.networks.tracing import TorchTrace

torch = pytest.importorskip("torch")


def traced(parameters: dict[str, Any], x: Any, call: Any) -> TorchTrace:
    """Return the trace of a call that may take parameters; `call` gets the trace and a function `layer`."""
    trace = TorchTrace()
    for number, tensor in enumerate(parameters.values()):
        trace.add_own(tensor, number)
    trace.border((x,), 1)

    def layer(name: str, inputs: Any) -> Any:
        outputs = inputs * 1.0
        trace.module(_Named(name), inputs, outputs, lambda rank: rank - 1)
        return outputs

    with torch.no_grad(), trace.following():
        call(layer)
    return trace


class _Named:
    """A module; all of one name are the same."""

    every: ClassVar[dict[str, _Named]] = {}

    def __new__(cls, name: str) -> _Named:
        return cls.every.setdefault(name, super().__new__(cls))


def order_of(trace: TorchTrace, name: str) -> Any:
    assert not trace.failed
    return trace.orders()[id(_Named(name))]["in"]


def test_a_learned_query_has_a_plain_order_whatever_is_done_to_it() -> None:
    query, x = torch.randn(3, 12), torch.randn(2, 5, 12)
    trace = traced({"q": query}, x, lambda layer: layer("one", layer("two", query[None].repeat(2, 1, 1) * 2)))
    assert order_of(trace, "one") == order_of(trace, "two") == plain_order(12).document()


def test_an_image_of_parameters_that_is_flattened_has_no_known_order() -> None:
    image, x = torch.randn(1, 3, 2, 2), torch.randn(2, 5)
    trace = traced({"i": image}, x, lambda layer: layer("flat", image.flatten(1)))
    assert order_of(trace, "flat")["parts"] is None


def test_what_comes_from_numpy_has_no_known_order() -> None:
    query, x = torch.randn(3, 12), torch.randn(2, 5, 12)
    trace = traced(
        {"q": query}, x, lambda layer: layer("far", query + torch.from_numpy(x.numpy()[0, :3] * 2))
    )
    assert order_of(trace, "far")["parts"] is None


def test_a_class_token_does_not_hide_the_order_of_the_patches() -> None:
    token, x = torch.randn(1, 1, 12), torch.randn(1, 3, 2, 2)
    trace = traced({"t": token}, x, lambda layer: layer("in", torch.cat([token, x.reshape(1, 1, 12)], 1)))
    assert order_of(trace, "in") == framework_order(((4, 3),), "torch").document()


def test_a_product_with_an_own_matrix_records_the_order_of_its_rows() -> None:
    mean, deviation, x = torch.randn(7, 12), torch.randn(7, 12), torch.randn(2, 3, 2, 2)
    trace = traced(
        {"mean": mean, "deviation": deviation},
        x,
        lambda _: torch.nn.functional.linear(x.flatten(1), mean + deviation * 0.5),
    )
    orders = trace.orders()
    assert orders[0]["in"] == orders[1]["in"] == framework_order(((4, 3),), "torch").document()


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("q_net", "k_net", "v_net", "proj_net"), "q_net k_net v_net proj_net"),
        (("to_q", "to_kv", "to_out"), "to_q to_kv to_out"),
        (("qkv", "proj"), "qkv proj"),
        (("c_attn", "c_proj"), "c_attn c_proj"),
        (("query", "key", "value", "merge"), "query key value merge"),
        (("wq", "wk", "wv", "wo", "gate"), "wq wk wv wo"),
        (("q", "k", "v"), None),  # the output may be elsewhere
        (("q", "k", "v", "up", "down"), None),
        (("q", "q_proj", "k", "v", "out"), None),
        (("query_key_value", "dense"), None),  # heads interleave
        (("fc1", "fc2"), None),
    ],
)
def test_names_state_the_linear_layers_of_an_attention(names: tuple[str, ...], parts: str | None) -> None:
    children = attention_children(names)
    assert (None if children is None else " ".join(name for name, _ in children)) == parts


class TestGroupNormsOfOldExports:
    """PyTorch's exporter writes five operators for a group norm before operator set 21."""

    @pytest.fixture
    def exported(self, tmp_path: Path) -> Any:
        pytest.importorskip("onnx", reason="the extra `onnx` makes the models")

        def export(model: Any, x: Any, change: Any = None) -> tuple[str, Any]:
            import warnings

            import onnx

            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape))
            path = str(tmp_path / "m.onnx")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                training = torch.onnx.TrainingMode.PRESERVE
                torch.onnx.export(model.eval(), (x,), path, dynamo=False, training=training)
            if change is not None:
                proto = onnx.load(path)
                change(proto.graph)
                onnx.save(proto, path)
            return path, model(x).detach().numpy()

        return export

    @pytest.mark.parametrize("shape", [(4,), (4, 9), (4, 7, 9)])
    @pytest.mark.parametrize("groups", [2, 4])
    def test_they_are_one_operator_with_the_module_s_numbers(
        self, shape: tuple[int, ...], groups: int, exported: Any
    ) -> None:
        from torch import nn

        first = {1: nn.Linear(4, 8), 2: nn.Conv1d(4, 8, 3), 3: nn.Conv2d(4, 8, 3)}[len(shape)]
        model = nn.Sequential(first, nn.GroupNorm(groups, 8, eps=0.01), nn.ReLU())
        x = torch.randn(2, *shape)
        path, expected = exported(model, x)
        checkpoint = open_checkpoint(path)
        graph = read_graph(checkpoint)
        assert graph is not None
        operators = [node.op for node in graph.nodes if node.op not in ("Conv", "Gemm", "Relu")]
        assert operators == ["GroupNormalization"]
        assert graph.nodes[-2].attributes == {"num_groups": groups, "epsilon": pytest.approx(0.01)}
        (outputs,) = evaluate(graph, {graph.inputs[0].name: x.numpy()}).values()
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
        plan, _ = plan_state_dict(checkpoint)
        written = {str(move.target[-1].value) for move in plan.moves}
        assert {"1.weight", "1.bias"} <= written

    def test_other_scales_and_axes_stay_as_they_are(self, exported: Any) -> None:
        from torch import nn

        def other_scale(graph: Any) -> None:
            import onnx

            node = next(node for node in graph.node if node.name.endswith("Constant_1"))
            value = np.array([1, 2], np.float32)
            node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(value))

        model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8))
        path, _ = exported(model, torch.randn(2, 4, 9), other_scale)
        graph = read_graph(open_checkpoint(path))
        assert graph is not None
        assert "InstanceNormalization" in [node.op for node in graph.nodes]
