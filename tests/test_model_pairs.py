"""A sample of the pairs of models: flattened images go by their order, and the referee finds a wrong one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckpttool.conversion.layer_options import parse_layer_options
from ckpttool.core import ActivationTracker, AxisOrder, UsageError, framework_order
from ckpttool.mapping import BlockOrder, ChannelOrder, parse_rule
from ckpttool.networks import Trace
from tests.model_pairs import harness, peers, programs

SAMPLE = ("cnn2d_first", "residual_decoder")
# Models that reorder axes by themselves, whose files hold what they compute.
REORDERED = {
    "keras": (("cnn2d_last", "both_sides_last", "super_resolution", "vae_last"), ("script", "onnx")),
    "torch": (("cnn2d_first", "both_sides_first", "super_resolution", "decoder_first"), ("saved_model",)),
}


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize(("target", "source"), [("torch", "keras"), ("keras", "pt")])
def test_models_compute_the_same_after_a_conversion(target, source, tmp_path):
    cells = list(harness.run(SAMPLE, tmp_path, (target,), (source,), ("into",)))
    assert len(cells) == len(SAMPLE)
    for cell in cells:
        if harness.is_determined(cell, programs.program(cell.program)):
            assert cell.state in {"right", "assumed"}, cell
        else:
            # What a file of weights cannot tell is named.
            assert cell.state in {"assumed", "refused", "corrected"}, cell


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("part", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["torch", "keras"])
def test_a_file_that_holds_the_computation_determines_every_order(target, part, tmp_path):
    names, sources = REORDERED[target][0][part], REORDERED[target][1]
    cells = list(harness.run(names, tmp_path, (target,), sources, ("into",)))
    assert len(cells) == len(names) * len(sources)
    assert {cell.state for cell in cells} == {"right"}, cells


@pytest.mark.torch
@pytest.mark.tensorflow
def test_the_hint_for_a_model_that_lists_a_layer_that_reorders_axes_works(tmp_path):
    names = ("cnn2d_first", "decoder_first")
    cells = list(harness.run(names, tmp_path, ("torch",), ("weights",), ("into", "kinds")))
    assert {cell.state for cell in cells} == {"right"}, cells
    assert all(any("flatten" in option for option in cell.options) for cell in cells)


@pytest.mark.torch
@pytest.mark.parametrize("shapes", [(), ((90,),)])
def test_a_first_dense_layer_as_wide_as_a_picture_is_assumed_to_take_none(shapes, tmp_path):
    import torch

    from ckpttool.conversion.filling import load_into

    values = np.random.default_rng(0).standard_normal((90, 7)).astype(np.float32)
    np.savez(tmp_path / "keras.npz", **{"fc1/kernel": values, "fc1/bias": values[0]})
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(90, 7))
    done = load_into(net, str(tmp_path / "keras.npz"), shapes=shapes)
    assert any("fc1" in sentence and "30,3" in sentence for sentence in done.report.assumed) == (not shapes)


def test_the_recorded_conversions_are_the_selection():
    assert len(programs.PROGRAMS) >= 120
    names = [*programs.PROGRAMS]
    expected = {
        (name, target, source, way)
        for target in ("torch", "keras")
        for name, source, way in harness.conversions(names, target, stride=harness.EACH)
    }
    cells = harness.recorded()
    assert set(cells) <= expected
    assert len(cells) >= 300
    assert not {"WRONG", "WRONG ASSUMED", "crash"} & {cell.state for cell in cells.values()}
    whole = harness.totals([*cells.values()])
    assert whole["good"] >= 0.8 * whole["sure"]


def test_the_recorded_outcomes_of_other_converters_have_ckpttool_beside_each() -> None:
    outcomes = peers.recorded()
    tools = {(outcome.program, outcome.target): set() for outcome in outcomes}
    for outcome in outcomes:
        tools[outcome.program, outcome.target].add(outcome.tool)
    for (name, target), own in tools.items():
        if name.startswith(peers.TWINS):  # ckpttool's outcomes are those of `twins`
            assert own <= {"nobuco", "keras_torch", "keras_torch_weights", "onnx2torch"}, name
            continue
        expected = set(peers.TOOLS[target]) if name in programs.PROGRAMS else {"ckpttool", "transformers"}
        expected -= set() if name in peers.SAME else {"nobuco"}
        assert own == expected, name
    own_outcomes = [outcome for outcome in outcomes if outcome.tool.startswith("ckpttool")]
    assert not {"WRONG", "crash"} & {outcome.state for outcome in own_outcomes}
    assert all(outcome.seconds > 0 for outcome in outcomes if not outcome.program.startswith(peers.TWINS))


def test_a_global_pooling_leaves_nothing_to_assume():
    pooled = [cell for cell in harness.recorded().values() if cell.program in ("cnn1d_gap", "cnn2d_gap")]
    assert pooled
    assert {cell.state for cell in pooled} == {"right"}, pooled


def test_what_is_added_without_the_axis_of_the_batch_has_one_order():
    trace = Trace()
    one, two, total = np.zeros((1, 24)), np.zeros(24), np.zeros((1, 24))
    trace.activations.take(trace.entries(one).reshape(1, 3, 2, 4), 3)
    trace.entries(two)
    assert trace.kept([one, two], total)
    trace.activations.finish()
    assert trace.activations.order(trace.entries(two)) == framework_order(((6, 4),), "tensorflow")


def test_an_axis_has_the_order_in_which_an_image_was_flattened():
    flow = ActivationTracker()
    image = flow.image((1, 3, 4, 5), 1)
    vector = flow.plain((1, 2))
    flat = np.concatenate([image.reshape(1, -1), vector], 1)
    flow.finish()
    assert flow.order(flat[0]) == framework_order(((20, 3), (1, 2)), "torch")
    assert flow.order(np.moveaxis(image, 1, -1).reshape(-1)) == framework_order(((20, 3),), "tensorflow")


def test_what_a_convolution_takes_is_an_image_already():
    flow = ActivationTracker()
    image = flow.plain((1, 24))
    flow.take(image.reshape(1, 2, 3, 4), 3)
    flow.finish()
    assert flow.order(image[0]) == framework_order(((6, 4),), "tensorflow")


def test_an_entry_that_cannot_be_followed_has_no_order():
    flow = ActivationTracker()
    entries = flow.image((1, 2, 3, 4), 1)[0].reshape(-1)
    entries[3] = -1
    flow.finish()
    assert flow.order(entries) is None


@pytest.mark.parametrize("parts", [((4, 3),), ((4, 3), (1, 2)), ((1, 2), (2, 2), (3, 5))])
def test_reordered_channels_come_back_and_are_spelled(parts):
    rule = ChannelOrder(1, "first", parts)
    count = sum(math.prod(part) for part in parts)
    before = np.arange(2 * count).reshape(2, count)
    order = framework_order(parts, "torch").positions
    np.testing.assert_array_equal(rule.apply(before), before[:, list(order)])
    assert parse_rule(rule.name) == rule
    assert ChannelOrder(1, "last", parts).apply(rule.apply(before)).tolist() == before.tolist()


def test_single_entries_are_reordered_as_blocks():
    np.testing.assert_array_equal(BlockOrder(0, (2, 0, 1)).apply(np.array([5, 6, 7])), [7, 5, 6])


def test_parts_of_a_flattened_image_are_written_with_plus():
    (choice,) = parse_layer_options([], ["a=7,7,64+5"])
    assert choice.facts.takes == AxisOrder(((49, 64), (1, 5)), ())
    (choice,) = parse_layer_options([], [], ["a=7,7,64"])
    assert choice.facts.makes == AxisOrder(((49, 64),), ())


@pytest.mark.parametrize("text", ["a=", "a=7,,7", "a=7+", "a=0,3", "a=x"])
def test_a_shape_that_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError):
        parse_layer_options([], [], [text])
