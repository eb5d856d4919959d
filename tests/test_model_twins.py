"""Models of independent names: what decides which layer fills which, and what an own layer computes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ckpttool.conversion.layer_options import format_layer_options, parse_layer_options
from ckpttool.conversion.options import ConversionOptions, require_compatible
from ckpttool.core import (
    ActivationTracker,
    Inline,
    Leaf,
    MappingError,
    Tree,
    UsageError,
    WeightUse,
    attr,
    framework_order,
)
from ckpttool.core.activations import MIXED, CallPlace, FeaturePart, common_parts
from ckpttool.mapping import BlockOrder, LayerCandidate, add_call_places, fill_model, find_layers, solve
from ckpttool.mapping.feature_orders import AssumedParts, FeatureReordering, arrange_parts, stated_parts
from ckpttool.mapping.layer_kinds import LayerFacts
from ckpttool.mapping.solver import BIAS, PLACE
from ckpttool.networks import probe_module
from tests.model_pairs import twins

ROOT = Path(__file__).parents[1]


def test_recorded_twins_are_never_wrong_without_a_word():
    cells = twins.recorded()
    assert len({cell.pair for cell in cells}) >= 140
    states = Counter(cell.state for cell in cells)
    assert set(states) <= set(twins.STATES)
    assert not states["WRONG"] + states["crash"]
    assert {cell.pair for cell in cells if cell.state == "WRONG ASSUMED"} <= twins.UNDECIDED
    record = ("assumed", "corrected", "followed", "refused", "WRONG ASSUMED")
    assert all(cell.sentence for cell in cells if cell.state in record)
    assert all(cell.sentence.isprintable() for cell in cells)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_a_sample_of_twins_computes_the_same():
    names = ("own_xw_torch", "aspp_parallel_dilated", "dueling_functional_unnamed", "dreamer_v3_head")
    forms = "keras,script,pt,saved_model"
    command = [sys.executable, "-m", "tests.model_pairs.twins", *names, "--sources", forms, "--tries", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    states = {tuple(line.split("\t")[:2]): line.split("\t")[2] for line in done.stdout.splitlines()}
    # What a layer computes, a dilation, and the flow of calls decide.
    assert [states[name, form] for name in names[:3] for form in ("keras", "script")] == ["right"] * 6
    # Numbers of a list, whatever the addresses in the file; variables of a list by their names.
    assert [states[names[3], form] for form in ("keras", "saved_model")] == ["assumed"] * 2
    # A state_dict has none of them: what is taken from it is named, or refused.
    assert not {"right", "WRONG", "crash"} & {states[name, "pt"] for name in names}
    assert not {"WRONG", "crash"} & {*states.values()}


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "forms", "refused"),
    [
        # Learned queries: only their layers' words differ between `query`, `key` and `value`.
        ("set_transformer", "keras,script,pt", ""),
        # Keys and values are one layer in PyTorch's model.
        ("perceiver_io", "keras,script,pt", ""),
        # Keras has its own attention, PyTorch's model four linear layers and a mask.
        ("decision_transformer_stacked", "script,onnx", ""),
        # Nothing records the order of the rows behind convolutions in a state_dict.
        ("maml_functional", "saved_model,script,onnx,pt", "pt"),
        # Group norms, which ONNX had as several operators.
        ("unet1d_diffusion", "script,onnx", ""),
    ],
)
def test_queries_attentions_and_parameters_of_own_classes_are_filled_both_ways(name, forms, refused):
    command = [sys.executable, "-m", "tests.model_pairs.twins", name, "--sources", forms, "--tries", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    states = {line.split("\t")[1]: line.split("\t")[2] for line in done.stdout.splitlines()}
    assert {*states} == {*forms.split(",")}
    for form, state in states.items():
        assert state in (("refused",) if form == refused else ("right", "assumed")), (form, done.stdout)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_parts_that_two_models_join_or_use_in_other_orders_are_arranged_or_named():
    names = ("ddpg_critic_action_first", "geglu_swapped_halves")
    command = [sys.executable, "-m", "tests.model_pairs.twins", *names]
    command += ["--sources", "keras,script,pt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    rows = {tuple(line.split("\t")[:2]): line.split("\t")[2:] for line in done.stdout.splitlines()}
    # Both computations record which part comes from which layer.
    assert [rows[names[0], form][0] for form in ("keras", "script")] == ["right"] * 2
    # Neither a state_dict does, nor a .keras file of custom classes: the option that is named makes it right.
    named = {("ddpg_critic_action_first", "pt"): "joint"}
    named |= {
        ("geglu_swapped_halves", form): "gate_up" if form == "keras" else "proj" for form in ("keras", "pt")
    }
    # Where a file records the whole computation, outputs decide.
    assert rows["geglu_swapped_halves", "script"][0] == "right"
    for key, layer in named.items():
        state, sentence = rows[key]
        assert state == "corrected"
        assert sentence.split()[0] == layer
        assert f"flatten={{'{layer}': 'parts:2,1'}}" in sentence


def test_a_tracker_tells_what_a_row_joins_and_whether_it_is_cut():
    tracker = ActivationTracker()
    one, other = tracker.plain((1, 3)), tracker.plain((1, 2))
    assert tracker.results(np.concatenate([other[0], one[0]])) == ((1, 2), (0, 3))
    assert tracker.results(one[0]) == ((0, 3),)
    # Entries in another order, and twice.
    between = np.concatenate([one[0, :1], other[0], one[0, 1:]])
    assert tracker.results(between) == ((-1, 3), (1, 2))
    for row in (one[0][::-1], np.concatenate([one[0], one[0]])):
        assert tracker.results(row)[0][0] == -1
        assert len(tracker.results(row)) == 2
    assert tracker.results(np.array([-1, 0])) == ()
    tracker.cut(one[:, :1])
    assert tracker.is_cut(one[0])
    assert not tracker.is_cut(other[0])
    whole = ActivationTracker()
    row = whole.plain((2, 3))
    whole.cut(row[:1])
    assert not whole.is_cut(row[0])


JOINED = (FeaturePart(2, "input", 1), FeaturePart(3, "call", 0))


@pytest.mark.parametrize(
    ("other", "actual", "rules", "assumed"),
    [
        (JOINED, JOINED, {}, 0),
        (JOINED, JOINED[::-1], {"kernel": BlockOrder(0, (2, 3, 4, 0, 1))}, 0),
        ((), JOINED, {}, 1),
        (JOINED, (), {}, 1),
        (JOINED, (FeaturePart(2), FeaturePart(3, "call", 0)), {}, 1),
        (JOINED, (FeaturePart(2, "input", 0), FeaturePart(3, "call", 0)), {}, 1),
        # Two parts of one origin are not told apart.
        ((FeaturePart(2, "call", 1),) * 2, (FeaturePart(2, "call", 1),) * 2, {}, 1),
        ((), (), {}, 0),
    ],
)
def test_joined_parts_are_the_same_moved_or_assumed(other, actual, rules, assumed):
    tree = Tree({(attr("l"), attr("kernel")): Leaf("float32", (5, 4), Inline(bytes(80)), "l/kernel")})
    only = find_layers(tree, "tensorflow")[0]
    order = arrange_parts(only, only.kinds[0], FeatureReordering(), other, LayerFacts(parts=actual), (5, 4))
    assert order.rules == rules
    assert len(order.assumed) == assumed
    assert all("l takes" in sentence for sentence in order.assumed)
    cut = arrange_parts(only, only.kinds[0], FeatureReordering(), (), LayerFacts(cut=True), (5, 4))
    assert len(cut.assumed) == 1
    assert [parts.orders for parts in cut.assumed_parts] == [((0, 1), (1, 0))]
    # One rule for each order of the parts.
    for parts in order.assumed_parts:
        rows = np.arange(sum(parts.sizes))
        moved = {tuple(rows[[*parts.rule(order, 0).order]]) for order in parts.orders}
        assert len(moved) == len(parts.orders)


def test_sizes_that_only_one_order_has_tell_joined_parts_apart():
    tree = Tree({(attr("l"), attr("kernel")): Leaf("float32", (5, 4), Inline(bytes(80)), "l/kernel")})
    only = find_layers(tree, "tensorflow")[0]
    sizes = FeaturePart(3), FeaturePart(2)
    for facts, orders in ((LayerFacts(parts=sizes[::-1]), ((1, 0),)), (LayerFacts(parts=sizes), ((0, 1),))):
        arranged = arrange_parts(only, only.kinds[0], FeatureReordering(), sizes, facts, (5, 4))
        assert [parts.orders for parts in arranged.assumed_parts] == [orders]
        assert "parts:" not in arranged.assumed[0]


def _filled_rows(source_parts, model_parts, options=(), framework="torch"):
    """Return the rows of a dense kernel in a model's order of the parts that it takes, and the result."""
    values = np.arange(20, dtype=np.float32).reshape(5, 4) // 4
    path = attr("l"), attr("kernel")
    leaf = Leaf("float32", (5, 4), Inline(values.tobytes()), "l/kernel", use=WeightUse(parts=source_parts))
    torch = framework == "torch"
    shape, name, cls = ((4, 5), "weight", "Linear") if torch else ((5, 4), "kernel", "Dense")
    weight_path = (attr("m"), attr(name))
    own = Tree({weight_path: Leaf("float32", shape, Inline(bytes(80)), f"m/{name}")})
    part = fill_model.ModelModule(("m",), cls, {}, {name: weight_path}, parts=model_parts)
    matching = fill_model.MatchOptions(parse_layer_options([], [*options]))
    source = fill_model.FillSource(Tree({path: leaf}), "tensorflow")
    done = fill_model.fill(source, fill_model.Skeleton(framework, own, [part]), matching)
    rows = done.tree[weight_path].array()
    return [int(row) for row in (rows[0] if torch else rows[:, 0])], done


def test_parts_are_put_in_the_order_that_sizes_or_the_user_tell():
    sizes = FeaturePart(3), FeaturePart(2)
    rows, done = _filled_rows(sizes, sizes[::-1])
    assert (rows, len(done.assumed)) == ([3, 4, 0, 1, 2], 1)
    rows, done = _filled_rows((), sizes)
    assert (rows, len(done.assumed), len(done.assumed_parts)) == ([0, 1, 2, 3, 4], 1, 1)
    (option,) = re.findall(r"--flatten '([^']+)'", done.assumed[0])
    rows, done = _filled_rows((), sizes, [option])
    assert (rows, done.assumed, done.assumed_parts) == ([2, 3, 4, 0, 1], (), ())
    # Where no order is open, or none can be changed, a statement is an error.
    for framework, parts in (("torch", ()), ("tensorflow", sizes)):
        with pytest.raises(UsageError):
            _filled_rows((), parts, [option], framework)


@pytest.mark.parametrize(
    ("option", "stated"), [("--flatten", {"takes": (1, 0, 2)}), ("--unflatten", {"makes": (1, 0, 2)})]
)
def test_a_stated_order_of_parts_is_one_that_is_open(option, stated):
    texts = {"--flatten": [], "--unflatten": [], option: ["l=parts:2,1,3"]}
    options = parse_layer_options([], *texts.values())
    assert format_layer_options(options) == ([], *texts.values())
    tree = Tree({(attr("l"), attr("kernel")): Leaf("float32", (6, 6), Inline(bytes(144)), "l/kernel")})
    only = find_layers(tree, "tensorflow", options)[0]
    assert only.facts.part_orders == stated
    side, order = next(iter(stated.items()))
    thirds = AssumedParts("", "l", side, (2, 2, 2), (tuple(range(3)), order))
    assert list(stated_parts(only, [thirds])) == [(thirds, order)]
    for parts in ([], [thirds._replace(orders=thirds.orders[:1])], [thirds._replace(side="other")]):
        with pytest.raises(UsageError) as refused:
            list(stated_parts(only, parts))
        assert refused.value.path == "l"
        assert refused.value.hint


@pytest.mark.parametrize("name", ["flatten", "unflatten"])
def test_an_order_of_parts_is_refused_without_a_model(name):
    with pytest.raises(UsageError) as refused:
        require_compatible(ConversionOptions(**{name: ["l=parts:2,1"]}), exported=False)
    assert f"--{name}" in str(refused.value)
    require_compatible(ConversionOptions(**{name: ["l=parts:2,1"]}, like="a:b"), exported=False)
    require_compatible(ConversionOptions(**{name: ["l=2,1"]}), exported=False)


def test_calls_that_join_other_results_leave_no_origin():
    assert common_parts([]) == ()
    assert common_parts([JOINED, JOINED]) == JOINED
    for other in ((), JOINED[::-1]):
        assert common_parts([JOINED, other]) == (FeaturePart(2, MIXED), FeaturePart(3, MIXED))


IMAGE, MOVED = FeaturePart(6, "call", 2), FeaturePart(6, MIXED)


@pytest.mark.parametrize(
    ("images", "other", "actual", "assumed"),
    [
        # One image in another order than its layer made it.
        ([(3, 2)], (MOVED, FeaturePart(0, MIXED)), (), 0),
        ([(3, 2)], (MOVED, FeaturePart(0, MIXED)), (FeaturePart(2), FeaturePart(4)), 1),
        ([(1, 6)], (MOVED, FeaturePart(0, MIXED)), (), 1),
        # The only image, beside vectors of which the recorded origins tell the order.
        ([(1, 3), (3, 2), (1, 2)], (JOINED[1], MOVED, JOINED[0]), (JOINED[1], IMAGE, JOINED[0]), 0),
        ([(3, 2), (1, 5)], (MOVED, *JOINED), (IMAGE, *JOINED), 0),
        ([(3, 2), (1, 5)], (MOVED, *JOINED), (IMAGE, *JOINED[::-1]), 1),
        ([(3, 2), (1, 5)], (MOVED, FeaturePart(2), FeaturePart(3)), (IMAGE, *JOINED), 1),
        ([(3, 2), (1, 2)], (MOVED, FeaturePart(2, MIXED)), (IMAGE, JOINED[0]), 1),
        ([(3, 2), (1, 2)], (MOVED, FeaturePart(2, "input", 0)), (IMAGE, JOINED[0]), 1),
        # Two images of one size, and of two.
        ([(3, 2), (3, 2)], (MOVED, MOVED), (IMAGE, IMAGE._replace(number=3)), 1),
        ([(3, 2), (3, 2)], (IMAGE, IMAGE._replace(number=3)), (IMAGE, IMAGE._replace(number=3)), 0),
        ([(3, 2), (2, 3)], (MOVED, MOVED), (IMAGE, IMAGE._replace(number=3)), 0),
    ],
)
def test_images_tell_joined_parts_apart(images, other, actual, assumed):
    count = sum(places * channels for places, channels in images)
    values = Inline(bytes(16 * count))
    tree = Tree({(attr("l"), attr("kernel")): Leaf("float32", (count, 4), values, "l/kernel")})
    order = framework_order(images, "tensorflow")
    only = find_layers(tree, "tensorflow")[0]
    only = only._replace(facts=only.facts._replace(takes=order))
    facts = LayerFacts(parts=actual, takes=order)
    reordering = arrange_parts(only, only.kinds[0], FeatureReordering(), other, facts, (count, 4))
    assert not reordering.rules
    assert len(reordering.assumed) == assumed


# --- What a layer computes ------------------------------------------------------------------------------


def _weights(seed=3, **shapes):
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("activation", [lambda x: x, lambda x: np.maximum(x, 0), np.tanh])
def test_a_square_matrix_is_told_by_what_its_layer_computes(activation):
    weights = _weights(weight=(6, 6), bias=(6,))
    w, b = weights["weight"], weights["bias"]
    assert probe_module(weights, (2, 6), lambda x: activation(x @ w + b)) == {
        "kind": "dense",
        "form": "in_out",
    }
    assert probe_module(weights, (2, 6), lambda x: activation(x @ w.T + b)) == {
        "kind": "dense",
        "form": "out_in",
    }


def test_a_matrix_that_both_or_no_orientation_explains_is_no_layer():
    weights = _weights(weight=(6, 6))
    w = weights["weight"]
    assert probe_module({"weight": w + w.T}, (2, 6), lambda x: x @ (w + w.T)) == {}
    assert probe_module(weights, (2, 6), lambda x: x @ w @ w) == {}
    assert probe_module(weights, (2, 6), lambda x: x @ (w / np.linalg.norm(w))) == {}


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-6])
def test_norms_are_told_from_scales_and_from_each_other(epsilon):
    weights = _weights(weight=(6,), bias=(6,))
    scale, offset = weights["weight"], weights["bias"]

    def layer_norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + offset

    def rms_norm(x, by=scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * by

    alone = {"weight": scale}
    assert probe_module(weights, (4, 6), layer_norm) == {"kind": "layer_norm", "epsilon": epsilon}
    assert probe_module(alone, (4, 6), rms_norm) == {"kind": "rms_norm", "epsilon": epsilon}
    assert probe_module(alone, (4, 6), lambda x: rms_norm(x, 1 + scale)) == {}
    assert probe_module(weights, (4, 6), lambda x: x * scale + offset) == {}


def test_a_module_of_other_tensors_is_not_compared():
    for shapes in ({"weight": (2, 3, 3)}, {"a": (3, 3), "b": (3, 3)}, {"other": (3,)}):
        with pytest.raises(ValueError, match=r"layer|scale"):
            probe_module(_weights(**shapes), (2, 3), lambda x: x)


# --- Which layer fills which ----------------------------------------------------------------------------

KIND = frozenset({("dense", (8, 8))})


def layer(name, *, call=-1, after=0, leads=0, settings=()):
    call_place = CallPlace(call, after, leads)
    return LayerCandidate(tuple(name.split("/")), KIND, name, -1, call_place, frozenset(settings))


def matches(sources, targets, **how):
    solution = solve(sources, targets, **how)
    return {sources[p.source].title: targets[p.target].title for p in solution.pairs}, solution


def test_a_common_word_does_not_pair_names_that_each_have_another_one():
    sources = [layer("post_attention_layernorm"), layer("input_layernorm")]
    targets = [layer("self_attention_layernorm"), layer("feedforward_layernorm")]
    pairs, solution = matches(sources, targets)
    assert pairs == {}
    assert solution.ambiguous


def test_a_word_of_one_side_alone_is_no_objection():
    pairs, _ = matches([layer("value_dense"), layer("advantage_dense")], [layer("advantage"), layer("value")])
    assert pairs == {"value_dense": "value", "advantage_dense": "advantage"}


def test_settings_tell_layers_apart():
    sources = [layer(f"rate{n}", settings={("dilation", n)}) for n in (1, 2, 3)]
    targets = [layer(f"convs/{3 - n}", settings={("dilation", n)}) for n in (1, 2, 3)]
    pairs, _ = matches(sources, targets)
    assert pairs == {"rate1": "convs/2", "rate2": "convs/1", "rate3": "convs/0"}


def chain(names, order):
    """Return layers that are listed as `names` and called in this order."""
    positions = {name: n for n, name in enumerate(order)}
    return [layer(name, call=positions[name], after=(1 << positions[name]) - 1) for name in names]


def test_the_flow_of_calls_decides_whatever_names_say():
    sources = chain(["head", "up1", "up2"], ["up2", "up1", "head"])
    targets = chain(["up1", "up2", "out"], ["up1", "up2", "out"])
    pairs, solution = matches(*add_call_places(sources, targets)[:2])
    assert pairs == {"up2": "up1", "up1": "up2", "head": "out"}
    # Names that belong to other layers are said.
    assert {targets[p.target].title for p in solution.renamed} == {"up1", "up2"}


def test_layers_that_stand_beside_each_other_share_a_place():
    sources = [layer("a", call=0), layer("b", call=1), layer("c", call=2, after=0b11)]
    targets = [layer("x", call=0), layer("y", call=1), layer("z", call=2, after=0b11)]
    *sides, by_outputs = add_call_places(sources, targets)
    pairs, solution = matches(*sides)
    assert pairs == {"c": "z"}
    assert len(solution.ambiguous) == 1
    assert not by_outputs


def test_layers_that_stand_beside_each_other_lead_to_different_outputs():
    sources = [layer("a", call=0, leads=0b01), layer("b", call=1, leads=0b10)]
    targets = [layer("x", call=0, leads=0b10), layer("y", call=1, leads=0b01)]
    *sides, by_outputs = add_call_places(sources, targets)
    assert matches(*sides)[0] == {"a": "y", "b": "x"}
    assert by_outputs
    # A model with other outputs leaves the layers as they are.
    *sides, by_outputs = add_call_places(sources, [layer("x", call=0), layer("y", call=1)])
    assert matches(*sides)[0] == {}
    assert not by_outputs


@pytest.mark.parametrize(
    "actual",
    [
        [layer("x", call=0), layer("y", call=1), layer("z", call=2, after=0b11)],
        [layer("x", call=0), layer("y"), layer("z", call=2)],
    ],
)
def test_another_flow_or_an_unseen_call_is_no_evidence(actual):
    *sides, _ = add_call_places(chain(["a", "b", "c"], ["a", "b", "c"]), actual)
    assert not any(name == PLACE for side in sides for candidate in side for name, _ in candidate.settings)


def test_the_items_of_a_list_pair_with_those_of_another_list():
    sources = [layer(f"heads/sequential{n}/dense{n}")._replace(listed=True) for n in ("", "_1", "_2")]
    targets = [layer(f"nets/{n}/0", call=n) for n in range(3)]
    pairs, solution = matches(sources, targets)
    assert pairs == {candidate.title: targets[n].title for n, candidate in enumerate(sources)}
    assert len(solution.numbered) == 3
    # Networks that are no items of a list are numbered as the program made them.
    assert matches([layer(one.title.removeprefix("heads/")) for one in sources], targets)[0] == {}


@pytest.mark.parametrize("name", ["fc_{}", "fc{}", "block_{}/dense", "net/fc{}"])
def test_numbers_from_zero_and_from_one_are_no_equal_names(name):
    sources, targets = ([layer(name.format(n)) for n in numbers] for numbers in (range(3), range(1, 4)))
    pairs, solution = matches(sources, targets)
    assert pairs == {one.title: other.title for one, other in zip(sources, targets, strict=True)}
    # Which is said: the names alone would pair others.
    assert len(solution.numbered) == 3


def test_numbers_of_a_part_of_a_model_are_its_names():
    sources, targets = ([layer(f"fc{n}") for n in numbers] for numbers in (range(4), (1, 2)))
    assert matches(sources, targets)[0] == {"fc1": "fc1", "fc2": "fc2"}
    # Not if they are spelled differently, and one side counts from zero.
    assert matches([layer(f"fc_{n}") for n in range(4)], targets)[0] == {}


def test_q_and_value_name_one_thing_in_a_model_without_keys():
    assert matches([layer("value")], [layer("q")])[0] == {"value": "q"}
    keys = frozenset({("dense", (8, 4))})
    sides = [[layer(name), layer("key")._replace(signatures=keys)] for name in ("value", "q")]
    assert matches(*sides)[0] == {"key": "key"}


def test_a_lone_tensor_has_a_place_among_the_calls():
    def block(scale, after):
        return LayerCandidate(
            (scale,), frozenset({("tensor", (8,))}), scale, -1, CallPlace(after, 1), lone=True
        )

    sources = [layer("a", call=0), block("s", 1), layer("b", call=2, after=0b11), block("t", 3)]
    targets = [layer("x", call=0), block("u", 1), layer("y", call=2, after=0b11), block("v", 3)]
    sources[3], targets[3] = (one._replace(call=CallPlace(3, 0b111)) for one in (sources[3], targets[3]))
    assert matches(*add_call_places(sources, targets)[:2])[0] == {"a": "x", "s": "u", "b": "y", "t": "v"}
    # Where only one side shows them, layers are still placed without them.
    targets[1] = targets[1]._replace(call=CallPlace(1, 0))
    assert matches(*add_call_places(sources, targets)[:2])[0] == {"a": "x", "b": "y"}


def test_numbers_of_a_model_that_calls_its_layers_in_another_order_pair_nothing():
    sources = [layer(f"ls/{n}") for n in range(3)]
    targets = chain(["fc1", "fc2", "fc3"], ["fc3", "fc2", "fc1"])
    assert matches(sources, targets)[0] == {}
    assert len(matches(sources, chain(["fc1", "fc2", "fc3"], ["fc1", "fc2", "fc3"]))[0]) == 3


def normed_blocks(names, *, calls=None, widths=(8, 8, 8)):
    """Return convolutions and batch norms with these names; `calls` are the names in the order of calls."""
    items = []
    for name in names:
        width = widths[sum("conv" in one.title for one in items) % len(widths)]
        norm = "conv" not in name
        shapes = ("batch_norm", (8,)) if norm else ("convolution", ("kernel", (3, 3, 8 + len(items), width)))
        number = calls.index(name) if calls else -1
        call_place = CallPlace(number, (1 << max(number, 0)) - 1) if calls else CallPlace()
        items.append(LayerCandidate(tuple(name.split("/")), frozenset({shapes}), name, -1, call_place))
    return items


CONVOLUTIONS = ["a_conv", "b_conv", "c_conv"]
CALLED = ["a_conv", "a", "b_conv", "b", "c_conv", "c"]
BEFORE = ["a", "a_conv", "b", "b_conv", "c", "c_conv"]


@pytest.mark.parametrize(
    ("other", "in_order", "calls", "widths"),
    [
        # Names: of a file that lists the layers in any order.
        ([*CONVOLUTIONS, "bn_c", "b_bn", "a_batch_norm"], False, CALLED, (8, 8, 8)),
        # The list of a program, with names that do not pair.
        (["a_conv", "n", "b_conv", "m", "c_conv", "k"], True, CALLED, (8, 8, 8)),
        ([*CONVOLUTIONS, "n", "m", "k"], True, CALLED, ()),
        # The model normalizes what a layer takes, the file seems to say what it gives.
        (["a_conv", "n", "b_conv", "m", "c_conv", "k"], True, BEFORE, ()),
        ([*CONVOLUTIONS, "bn_c", "b_bn", "a_bn"], False, BEFORE, ()),
        ([*CONVOLUTIONS, "bn_c", "b_bn", "a_bn", "c_bn"], False, CALLED, ()),
        # A norm with the name of a layer that has another number of channels.
        ([*CONVOLUTIONS, "bn_c", "b_bn", "a_bn"], False, CALLED, (8, 8, 4)),
    ],
)
def test_batch_norms_pair_as_the_layers_whose_results_they_take(other, in_order, calls, widths):
    sources, targets = normed_blocks(other, widths=widths or (8,)), normed_blocks(CALLED, calls=calls)
    for n, one in enumerate(targets):  # kernels of three shapes
        if "conv" in one.title:
            same = next(source for source in sources if source.title == one.title)
            targets[n] = one._replace(signatures=same.signatures, name=(f"x{n}",))
        else:
            targets[n] = one._replace(name=(f"y{n}",))
    solution = solve(sources, targets, in_order=in_order)
    norms = {pair.source: pair.target for pair in solution.normed}
    assert len(norms) == widths.count(8)
    order = sorted(norms, reverse=not in_order)
    assert [norms[n] for n in order] == sorted(norms.values())


MASK = np.tri(4, dtype=bool).reshape(1, 1, 4, 4)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("table", "kept"),
    [
        (np.arange(6).reshape(1, 6), True),
        (np.zeros((1, 6), np.int64), True),
        (MASK, True),
        (np.array([[2, 0, 1, 3]]), False),
        (np.arange(6).reshape(2, 3), False),
        (MASK.transpose(0, 1, 3, 2), False),
        (np.arange(6, dtype=np.float32), False),
    ],
)
@pytest.mark.parametrize("in_model", [False, True])
def test_an_integer_table_that_programs_compute_is_named_and_another_one_refused(
    tmp_path, table, kept, in_model
):
    import torch

    from ckpttool import load_into

    models = [torch.nn.Sequential(torch.nn.Linear(4, 3)) for _ in range(2)]
    models[in_model].register_buffer("table", torch.from_numpy(table.copy()))
    torch.save(models[0].state_dict(), tmp_path / "a.pt")
    if kept:
        done = load_into(models[1], tmp_path / "a.pt")
        assert [sentence for sentence in done.report.assumed if sentence.startswith("table: ")]
        assert torch.equal(models[0][0].weight, models[1][0].weight)
        assert not in_model or torch.equal(models[1].table, torch.from_numpy(table))
    else:
        with pytest.raises(MappingError):
            load_into(models[1], tmp_path / "a.pt")


@pytest.mark.torch
def test_a_matrix_that_a_file_has_twice_fills_once(tmp_path):
    import torch

    from ckpttool import load_into

    model = torch.nn.Linear(4, 3, bias=False)
    for other, error in ((model.weight + 1, True), (model.weight, False)):
        rows = {"weight": model.weight.detach(), "tied.weight": other.detach().clone()}
        torch.save(rows, tmp_path / "a.pt")
        with pytest.raises(MappingError) if error else contextlib.nullcontext():
            load_into(torch.nn.Linear(4, 3, bias=False), tmp_path / "a.pt")


@pytest.mark.torch
def test_the_search_for_tied_matrices_reads_each_once(tmp_path, monkeypatch):
    import torch

    from ckpttool import load_into
    from ckpttool.mapping import fill_model

    read, model = [], torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    rows = {**model.state_dict(), **{f"other.{n}": torch.rand(3, 3) for n in range(5)}}
    torch.save(rows, tmp_path / "a.pt")
    monkeypatch.setattr(fill_model, "hash_tensor", lambda leaf: read.append(leaf) or str(len(read)))
    load_into(model, tmp_path / "a.pt", allow_unused=["other/*"])
    assert len(read) == len({id(leaf) for leaf in read}) == 10


@pytest.mark.parametrize("dilations", [(1, 1), (1, 2)])
def test_layers_of_one_shape_pair_by_their_biases_or_without_them(dilations):
    sources = [layer(name)._replace(settings=frozenset({(BIAS, name == "x")})) for name in ("x", "y")]
    targets = [layer(name)._replace(settings=frozenset({(BIAS, name == "a")})) for name in ("b", "a")]
    assert matches(sources, targets)[0] == {"x": "a", "y": "b"}
    # All of one side have biases, as norms were merged into them: another setting decides, if there is one.
    sources, targets = (
        [
            one._replace(settings=frozenset({(BIAS, side == 0 or n == 0), ("dilation", dilations[n])}))
            for n, one in enumerate(side_layers)
        ]
        for side, side_layers in enumerate((sources, targets))
    )
    assert matches(sources, targets)[0] == ({"x": "b", "y": "a"} if dilations == (1, 2) else {})


@pytest.mark.torch
@pytest.mark.parametrize(
    ("names", "extents", "paired"),
    [
        # Numbers of both sides, a word of both sides, the user.
        (("block_0_scale/gamma", "block_1_scale/gamma"), (1, 1), True),
        (("layer_scale/gamma",), (1, 1), True),
        (("shift/values",), (1, 1), {"shift/values": "blocks/0/scale"}),
        # Only a length, layers of one length, another extent.
        (("shift/values",), (1, 1), False),
        (("left/gamma", "right/gamma"), (1, 1), False),
        (("layer_scale/gamma",), (2, 1), False),
    ],
)
def test_a_vector_pairs_with_one_of_other_axes_by_name_or_calls(tmp_path, names, extents, paired):
    import torch

    from ckpttool import load_into

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.scale = torch.nn.Parameter(torch.zeros(4, *extents))

    net = torch.nn.Module()
    net.blocks = torch.nn.ModuleList(Block() for _ in names)
    arrays = {
        f"block_{n}_conv/kernel": np.random.default_rng(n).random((3, 3, 3, 4)) for n in range(len(names))
    }
    arrays |= {f"block_{n}_conv/bias": np.full(4, n) for n in range(len(names))}
    arrays |= {name: np.arange(4) + n for n, name in enumerate(names)}
    np.savez(tmp_path / "a.npz", **{name: value.astype(np.float32) for name, value in arrays.items()})
    match = paired if isinstance(paired, dict) else {}
    if not paired:
        with pytest.raises(MappingError):
            load_into(net, tmp_path / "a.npz", from_="tf")
        return
    done = load_into(net, tmp_path / "a.npz", from_="tf", match=match)
    assert [block.scale[:, 0, 0].tolist() for block in net.blocks] == [
        arrays[name].tolist() for name in names
    ]
    assert all(any(sentence.startswith(name) for sentence in done.report.assumed) for name in names)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.torch
@pytest.mark.parametrize(
    ("axes", "recognized"), [((0, 2, 3, 1), True), ((0, 3, 2, 1), True), ((0, 1, 2, 3), False)]
)
def test_an_own_norm_of_images_is_recognized_in_a_traced_program(tmp_path, axes, recognized):
    import torch

    from ckpttool import open as open_checkpoint
    from ckpttool.conversion.filling import model_source

    class Norm(torch.nn.LayerNorm):
        def forward(self, x):
            back = [axes.index(n) for n in range(4)]
            return super().forward(x.permute(*axes)).permute(*back)

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), Norm(5))
    with torch.no_grad():
        net[1].weight.copy_(torch.arange(5) + 0.5)
        net[1].bias.copy_(torch.arange(5) - 2.5)
    torch.jit.trace(net.eval(), torch.zeros(1, 3, 5, 5)).save(str(tmp_path / "a.pt"))
    tree = model_source(open_checkpoint(tmp_path / "a.pt"), None).tree
    roles = {leaf.use.role for path, leaf in tree.tensors() if tree.names[path].startswith("1/") and leaf.use}
    assert ("layer_norm" in roles) == recognized
