"""Stacked networks: what may be stacked, what the arrays become, and the way back to each member."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest

from ckpttool.core import EnvironmentMismatchError, UsageError, plugins
from ckpttool.networks import (
    Activation,
    Affine,
    Clip,
    Dense,
    Flatten,
    LayerNorm,
    Network,
    StateSlot,
    network,
    network_arrays,
    select_member,
    stack_networks,
    stack_structure,
    value_shapes,
)
from ckpttool.testing.backends import ACTOR, CELL, chain, dense, normal, renewed
from tests.golden_texts import Golden


def test_equal_structures_are_equal_keys() -> None:
    assert stack_structure(ACTOR) == stack_structure(renewed(ACTOR))
    assert hash(stack_structure(ACTOR)) == hash(stack_structure(renewed(ACTOR)))


@pytest.mark.parametrize(
    "other",
    [
        ACTOR.cast("float64"),
        chain(3, dense(3, 2), Activation("relu")),
        chain(3, dense(3, 2), Activation("tanh", 0.5)),
        chain(3, Dense(normal(3, 2)), Activation("tanh")),
        chain(3, dense(3, 3), Activation("tanh")),
        Network((("other", 3),), chain(3, dense(3, 2), Activation("tanh")).nodes, 2),
        replace(chain(3, dense(3, 2), Activation("tanh")), output=1),
    ],
)
def test_other_structures_are_other_keys(other: Network, golden: Golden) -> None:
    network = ACTOR if other.inputs == ACTOR.inputs else chain(3, dense(3, 2), Activation("tanh"))
    assert stack_structure(network) != stack_structure(other)
    with pytest.raises(UsageError) as caught:
        stack_networks([network, other])
    golden(caught.value)


def test_an_epsilon_is_part_of_the_structure() -> None:
    first, second = (chain(4, LayerNorm(normal(4), normal(4), epsilon)) for epsilon in (1e-3, 1e-5))
    assert stack_structure(first) != stack_structure(second)


@pytest.mark.parametrize("network", [CELL, chain(6, Flatten()), chain(4, Affine(normal(2, 2), normal(2, 2)))])
def test_what_knows_the_batch_or_the_past_is_not_stacked(network: Network) -> None:
    assert stack_structure(network) is None
    with pytest.raises(UsageError):
        stack_networks([network, network])


def test_a_state_without_a_layer_of_its_own_is_not_stacked() -> None:
    network = replace(chain(3, dense(3, 3)), states=(StateSlot("obs", (3,), 1),))
    assert stack_structure(network) is None


def test_a_stack_has_a_member_axis_and_gives_its_members_back() -> None:
    actors = [renewed(ACTOR) for _ in range(3)]
    stacked = stack_networks(actors)
    assert stacked.members == 3
    assert stacked.width == ACTOR.width
    assert {array.shape[0] for array in network_arrays(stacked)} == {3}
    assert {array.ndim for array in network_arrays(stacked)} == {3}
    assert value_shapes(stacked) == value_shapes(ACTOR)
    for number, actor in enumerate(actors):
        back = select_member(stacked, number)
        assert stack_structure(back) == stack_structure(actor)
        for array, expected in zip(network_arrays(back), network_arrays(actor), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_one_is_its_own_stack_and_a_stack_is_not_stacked_again() -> None:
    assert stack_networks([ACTOR]) is ACTOR
    twice = stack_networks([ACTOR, ACTOR])
    with pytest.raises(UsageError):
        stack_networks([twice, twice])


def test_a_stack_travels() -> None:
    stacked = stack_networks([chain(2, dense(2, 2), Clip(normal(2), normal(2) + 5))] * 2)
    file = io.BytesIO()
    document = json.loads(json.dumps(network.write_network(stacked, file)))
    file.seek(0)
    back = network.read_network(document, file)
    assert back.members == 2
    assert all(
        np.array_equal(a, b) for a, b in zip(network_arrays(back), network_arrays(stacked), strict=True)
    )


def test_rows_that_cannot_be_divided_are_refused(golden: Golden) -> None:
    policy = plugins.find("backends", "numpy").load().build(stack_networks([ACTOR, ACTOR, ACTOR]))
    with pytest.raises(EnvironmentMismatchError) as caught:
        policy.step(np.ones((4, 17), np.float32))
    golden(caught.value)
