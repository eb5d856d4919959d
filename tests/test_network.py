"""The network's own laws: casting, the checks before a backend sees it, the way to another process."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from ckpttool.core import EnvironmentMismatchError, FormatError, UnsupportedError, UsageError
from ckpttool.networks import (
    Activation,
    Affine,
    Clip,
    Concat,
    Dense,
    Flatten,
    InputAdapter,
    LayerNorm,
    Network,
    Node,
    StateSlot,
    dtype_of,
    network,
    network_arrays,
    value_shapes,
)
from tests.golden_texts import Golden


def dense(rows: int, columns: int, dtype: str = "float32") -> Dense:
    return Dense(np.ones((rows, columns), dtype), np.zeros(columns, dtype))


def chain(width: int, *layers: object) -> Network:
    nodes = tuple(Node(layer, (i,)) for i, layer in enumerate(layers))
    return Network((("obs", width),), nodes, len(layers))


EVERY_KIND = Network(
    inputs=(("obs", 3), ("action", 2), ("h", 4)),
    nodes=(
        Node(Flatten(), (0,)),
        Node(Concat(), (3, 1)),
        Node(dense(5, 4), (4,)),
        Node(LayerNorm(np.ones(4, "f4"), np.zeros(4, "f4"), np.float32(1e-5)), (5,)),
        Node(Concat(), (6, 2)),
        Node(Dense(np.ones((8, 4), "f4")), (7,)),
        Node(Activation("leaky_relu", 0.3), (8,)),
        Node(Affine(np.full(4, 2, "f4"), np.ones(4, "f4")), (9,)),
        Node(Clip(np.zeros(4, "f4"), np.ones(4, "f4")), (10,)),
    ),
    output=11,
    states=(StateSlot("h", (4,), 9),),
)


def test_cast_changes_every_array_and_nothing_else() -> None:
    wide = EVERY_KIND.cast("float64")
    assert {a.dtype.name for a in network_arrays(wide)} == {"float64"}
    assert dtype_of(wide) == "float64"
    assert dtype_of(EVERY_KIND) == "float32"
    assert [type(n.layer) for n in wide.nodes] == [type(n.layer) for n in EVERY_KIND.nodes]


def test_shapes_follow_the_graph() -> None:
    assert value_shapes(EVERY_KIND) == [
        (3,),
        (2,),
        (4,),
        (3,),
        (5,),
        (4,),
        (4,),
        (8,),
        (4,),
        (4,),
        (4,),
        (4,),
    ]


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(chain(17, dense(3, 4)), id="dense"),
        pytest.param(chain(3, Dense(np.ones((3, 4)), np.ones(5))), id="bias"),
        pytest.param(chain(3, Affine(np.ones(2), np.ones(2))), id="affine"),
        pytest.param(chain(3, LayerNorm(np.ones(2), np.ones(2), 0)), id="norm"),
        pytest.param(Network((("obs", 3),), (Node(Flatten(), (1,)),), 1), id="itself"),
        pytest.param(Network((("obs", 3),), (), 5), id="output"),
        pytest.param(Network((("obs", 3), ("h", 2)), (), 0, (StateSlot("h", (2,), 0),)), id="state"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(network: Network, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        value_shapes(network)
    golden(caught.value)


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float16", "float16")])
def test_other_types_than_one_float_are_refused(dtypes: tuple[str, str], golden: Golden) -> None:
    with pytest.raises(UnsupportedError) as caught:
        dtype_of(chain(3, dense(3, 3, dtypes[0]), dense(3, 3, dtypes[1])))
    golden(caught.value)


class TestFeeds:
    def test_one_array_is_cast(self) -> None:
        (array,) = InputAdapter(chain(3, dense(3, 1)))(np.ones((2, 3)))
        assert array.dtype == np.float32

    @pytest.mark.parametrize("shape", [(2, 4), (3,), (2, 3, 1), (0, 4)])
    def test_a_wrong_shape_says_both(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(EnvironmentMismatchError) as caught:
            InputAdapter(chain(3, dense(3, 1)))(np.ones(shape))
        assert "3" in str(caught.value)

    def test_a_single_number_is_refused(self) -> None:
        with pytest.raises(EnvironmentMismatchError):
            InputAdapter(chain(3, dense(3, 1)))(np.float64(1))

    def test_an_input_that_is_flattened_may_have_axes(self) -> None:
        (array,) = InputAdapter(chain(6, Flatten(), dense(6, 1)))(np.arange(12.0).reshape(2, 3, 2))
        np.testing.assert_array_equal(array, np.arange(12.0).reshape(2, 6))

    @pytest.mark.parametrize("names", [("obs",), ("obs", "action", "goal"), ()])
    def test_names_must_be_the_networks(self, names: tuple[str, ...]) -> None:
        with pytest.raises(EnvironmentMismatchError, match="obs, action"):
            InputAdapter(EVERY_KIND)({name: np.ones((1, 3)) for name in names})

    def test_one_array_for_two_inputs_is_refused(self, golden: Golden) -> None:
        with pytest.raises(EnvironmentMismatchError) as caught:
            InputAdapter(EVERY_KIND)(np.ones((1, 3)))
        golden(caught.value)

    def test_batches_must_agree(self) -> None:
        with pytest.raises(EnvironmentMismatchError, match="'action'"):
            InputAdapter(EVERY_KIND)({"obs": np.ones((2, 3)), "action": np.ones((1, 2))})

    def test_state_begins_with_zeros(self) -> None:
        arrays = InputAdapter(EVERY_KIND)({"action": np.ones((2, 2)), "obs": np.ones((2, 3))})
        assert [a.shape for a in arrays] == [(2, 3), (2, 2), (2, 4)]
        assert not arrays[2].any()

    def test_too_much_state_is_refused(self) -> None:
        with pytest.raises(UsageError, match="slots"):
            InputAdapter(chain(3, dense(3, 1)))(np.ones((1, 3)), (np.ones((1, 3)),))


class TestSerial:
    def test_there_and_back(self) -> None:
        file = io.BytesIO()
        document = json.loads(json.dumps(network.write_network(EVERY_KIND, file)))
        file.seek(0)
        back = network.read_network(document, file)
        assert (back.inputs, back.output, back.states[0].name) == (EVERY_KIND.inputs, 11, "h")
        assert back.states[0].shape == (4,)
        for node, reference in zip(back.nodes, EVERY_KIND.nodes, strict=True):
            assert (type(node.layer), node.inputs) == (type(reference.layer), reference.inputs)
        for mine, other in zip(network_arrays(back), network_arrays(EVERY_KIND), strict=True):
            np.testing.assert_array_equal(mine, other, strict=True)
        assert back.nodes[6].layer == Activation("leaky_relu", 0.3)
        assert back.nodes[3].layer.epsilon == np.float32(1e-5)

    def test_a_document_without_its_arrays_is_refused(self) -> None:
        document = network.write_network(EVERY_KIND, io.BytesIO())
        file = io.BytesIO()
        np.savez(file)
        file.seek(0)
        with pytest.raises(FormatError, match="incomplete"):
            network.read_network(document, file)
