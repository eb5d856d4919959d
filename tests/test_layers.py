"""Layers of a tree: recognised by names, siblings and ranks; there and back; what has to be asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.commands.convert import convert
from ckpttool.conversion.layer_options import parse_layer_options
from ckpttool.conversion.write import save
from ckpttool.core import Alias, Container, Leaf, MappingError, Tree, UsageError, WeightUse, display, key
from ckpttool.mapping import Move, Plan, apply_plan, conversion_by_kinds, convert_layer, find_layers
from ckpttool.mapping.kind_table import COMPOSED, KINDS
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from tests.conftest import in_process
from tests.golden_texts import Golden
from tests.trees import attributes, keys, tensorflow_tree, torch_tree

Arrays = dict[str, np.ndarray]
sizes = st.integers(1, 4)


def arrays(tree: Tree) -> dict[str, bytes]:
    return {tree.names[path]: bytes(leaf.read()) for path, leaf in tree.tensors()}


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


# --- There and back ----------------------------------------------------------------------------------


def dense(i: int, o: int, _: int) -> dict[str, tuple[int, ...]]:
    return {"a/kernel": (i, o), "a/bias": (o,)}


def convolution(dimensions: int) -> Callable[[int, int, int], dict[str, tuple[int, ...]]]:
    return lambda i, o, k: {"a/kernel": (*range(k, k + dimensions), i + 1, o + 1), "a/bias": (o + 1,)}


def cell(gates: int, where: str = "a/cell") -> Callable[[int, int, int], dict[str, tuple[int, ...]]]:
    def shapes(i: int, u: int, _: int) -> dict[str, tuple[int, ...]]:
        bias = (2, gates * u) if gates == 3 else (gates * u,)
        names = {"kernel": (i, gates * u), "recurrent_kernel": (u, gates * u), "bias": bias}
        return {f"{where}/{name}": shape for name, shape in names.items()}

    return shapes


def both_ways(i: int, u: int, k: int) -> dict[str, tuple[int, ...]]:
    return cell(4, "a/forward_layer/cell")(i, u, k) | cell(4, "a/backward_layer/cell")(i, u, k)


def attention(h: int, d: int, _: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("query", "key", "value"):
        shapes |= {f"a/_{name}_dense/kernel": (h * d, h, d), f"a/_{name}_dense/bias": (h, d)}
    return shapes | {"a/_output_dense/kernel": (h, d, h * d), "a/_output_dense/bias": (h * d,)}


# Shapes of a Keras layer by three sizes, and what is said of it on the way back.
KERAS: dict[str, tuple[Callable[[int, int, int], dict[str, tuple[int, ...]]], str]] = {
    "dense": (dense, ""),
    "square": (lambda i, _, __: {"a/kernel": (i, i)}, "dense"),
    "embedding": (lambda i, o, _: {"a/embeddings": (i, o)}, "embedding"),
    "conv1": (convolution(1), ""),
    "conv2": (convolution(2), ""),
    "conv3": (convolution(3), ""),
    "depthwise": (
        lambda c, m, k: {"a/kernel": (k, 2, c + 1, m + 1), "a/bias": ((c + 1) * (m + 1),)},
        "depthwise:M",
    ),
    "batch_norm": (
        lambda c, _, __: dict.fromkeys(("a/gamma", "a/beta", "a/moving_mean", "a/moving_variance"), (c,)),
        "",
    ),
    "plain_batch_norm": (lambda c, _, __: dict.fromkeys(("a/moving_mean", "a/moving_variance"), (c,)), ""),
    "layer_norm": (lambda c, _, __: {"a/gamma": (c,), "a/beta": (c,)}, ""),
    "scale": (lambda c, _, __: {"a/gamma": (c,)}, "layer_norm"),
    "prelu": (lambda c, _, __: {"a/alpha": (1, 1, c)}, "prelu:2"),
    "lstm": (cell(4), ""),
    "gru": (cell(3), ""),
    "rnn": (cell(1), ""),
    "both_ways": (both_ways, ""),
    "attention": (attention, "attention:I"),
}


@pytest.mark.parametrize("name", KERAS)
@given(i=sizes, o=sizes, k=sizes)
def test_keras_layers_come_back_as_they_were(name: str, i: int, o: int, k: int) -> None:
    shapes, option = KERAS[name]
    tree = tensorflow_tree(filled(shapes(i, o, k)))
    there = apply_plan(tree, conversion_by_kinds.plan_to_torch(tree))
    option = option.replace("M", str(o + 1)).replace("I", str(i))
    plan = conversion_by_kinds.plan_to_tensorflow(
        there, parse_layer_options([f"a={option}"] if option else [], [])
    )
    assert not [note for note in plan.notes if "--kind" in note]
    assert arrays(apply_plan(there, plan)) == arrays(tree)


@given(i=sizes, u=sizes, layers=st.integers(1, 3), two=st.booleans())
def test_stacked_torch_layers_come_back_but_for_their_second_biases(
    i: int, u: int, layers: int, two: bool
) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for way in ("", "_reverse")[: 1 + two]:
            inputs = i if layer == 0 else u * (1 + two)
            shapes |= {
                f"r.weight_ih_l{layer}{way}": (4 * u, inputs),
                f"r.weight_hh_l{layer}{way}": (4 * u, u),
            }
            shapes |= {f"r.bias_{part}_l{layer}{way}": (4 * u,) for part in ("ih", "hh")}
    source = filled(shapes)
    tree = torch_tree(dict(source))
    there = apply_plan(tree, conversion_by_kinds.plan_to_tensorflow(tree))
    assert len(there) == len(tree) * 3 // 4
    again = apply_plan(there, conversion_by_kinds.plan_to_torch(there))
    arrays = {
        name: leaf.array()
        for name, leaf in zip(again.names.values(), again.leaves.values(), strict=True)
        if isinstance(leaf, Leaf)
    }
    for layer in range(layers):
        for way in ("", "_reverse")[: 1 + two]:
            name = f"r/weight_ih_l{layer}{way}" if layers == 1 else f"r_l{layer}/weight_ih_l0{way}"
            assert (arrays[name] == source[f"r.weight_ih_l{layer}{way}"]).all()
            both = [source[f"r.bias_{part}_l{layer}{way}"] for part in ("ih", "hh")]
            assert (arrays[name.replace("weight", "bias")] == both[0] + both[1]).all()


FORMS: dict[str, Callable[[int, int], dict[str, tuple[int, ...]]]] = {
    "keras": lambda i, u: {"a/kernel": (i, 4 * u), "a/recurrent_kernel": (u, 4 * u), "a/bias": (4 * u,)},
    "cudnn": lambda i, u: {"a/kernel": (i, 4 * u), "a/recurrent_kernel": (u, 4 * u), "a/bias": (8 * u,)},
    "sonnet": lambda i, u: {"a/_w_i": (i, 4 * u), "a/_w_h": (u, 4 * u), "a/b": (4 * u,)},
    "baselines": lambda i, u: {"a/wx": (i, 4 * u), "a/wh": (u, 4 * u), "a/b": (4 * u,)},
    "tf1": lambda i, u: {"a/basic_lstm_cell/kernel": (i + u, 4 * u), "a/basic_lstm_cell/bias": (4 * u,)},
}
# The gates in the order of each form, and what is added to the forget gate when it runs.
GATES = {"keras": "ifgo", "sonnet": "ifgo", "baselines": "ifog", "tf1": "igfo"}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def step(gates: dict[str, np.ndarray]) -> np.ndarray:
    return sigmoid(gates["o"]) * np.tanh(sigmoid(gates["i"]) * np.tanh(gates["g"]))


@pytest.mark.parametrize("form", GATES)
def test_the_gates_of_every_lstm_are_where_they_belong(form: str) -> None:
    import torch

    weights = filled(FORMS[form](3, 5))
    first, bias = next(iter(weights.values()))[:3], list(weights.values())[-1]
    inputs = np.linspace(-1, 1, 3, dtype=np.float32)
    parts = dict(zip(GATES[form], np.split(inputs @ first + bias, 4), strict=True))
    tree = tensorflow_tree(weights)
    converted = apply_plan(tree, conversion_by_kinds.plan_to_torch(tree))
    cell = torch.nn.LSTM(3, 5)
    cell.load_state_dict(
        {
            name.removeprefix("a/"): torch.from_numpy(leaf.array().copy())
            for name, leaf in zip(converted.names.values(), converted.leaves.values(), strict=True)
            if isinstance(leaf, Leaf)
        }
    )
    output = cell(torch.from_numpy(inputs)[None, None])[0].detach().numpy().reshape(-1)
    np.testing.assert_allclose(output, step(parts), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@given(i=sizes, u=sizes)
def test_every_form_of_an_lstm_is_written_as_it_was_read(form: str, i: int, u: int) -> None:
    tree = tensorflow_tree(filled(FORMS[form](i, u)))
    (source,) = find_layers(tree, "tensorflow")
    there = apply_plan(tree, conversion_by_kinds.plan_to_torch(tree))
    (layer,) = find_layers(there, "torch")
    assert source.kind.form == {"keras": ""}.get(form, form)
    done = convert_layer(there, layer, layer.kind, source.kind)
    moves = tuple(Move(path, attributes(name), rule) for path, name, rule in done.moves)
    back = apply_plan(there, Plan(moves, {attributes(name): leaf for name, leaf in done.added.items()}))
    assert arrays(back) == {name: bytes(leaf.read()) for name, leaf in source.group(tree).items()}


OTHER_WIDTHS = {
    **{f"a/_{name}_dense/kernel": (width, 2, 3) for name, width in (("query", 5), ("key", 7), ("value", 8))},
    **{f"a/_{name}_dense/bias": (2, 3) for name in ("query", "key", "value")},
    "a/_output_dense/kernel": (2, 3, 4),
    "a/_output_dense/bias": (4,),
}


@pytest.mark.parametrize("shapes", [OTHER_WIDTHS, {"a/weight": (3, 5), "a/bias": (1, 5)}], ids=min)
def test_a_kind_writes_the_shapes_that_it_reads(shapes: dict[str, tuple[int, ...]]) -> None:
    """The canonical form determines them: no axis has the size of another."""
    tree = tensorflow_tree(filled(shapes))
    (layer,) = find_layers(tree, "tensorflow")
    done = convert_layer(tree, layer, layer.kind, layer.kind, layer.facts._replace(number=2))
    there = apply_plan(
        tree, Plan(tuple(Move(path, attributes(name), rule) for path, name, rule in done.moves))
    )
    assert arrays(there) == {name: bytes(leaf.read()) for name, leaf in layer.group(tree).items()}


def test_an_attention_over_other_widths_keeps_three_projections() -> None:
    import torch

    twin = torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)
    source = {f"a.{name}": tensor.numpy().copy() for name, tensor in twin.state_dict().items()}
    there = apply_plan(
        tree := torch_tree(dict(source)),
        conversion_by_kinds.plan_to_tensorflow(tree, parse_layer_options(["a=attention:2"], [])),
    )
    shapes = {there.names[path]: leaf.shape for path, leaf in there.tensors()}
    assert shapes["a/_key_dense/kernel"] == (6, 2, 4)
    assert shapes["a/_value_dense/kernel"] == (5, 2, 4)
    back = apply_plan(there, conversion_by_kinds.plan_to_torch(there))
    assert arrays(back) == {name: data for name, data in arrays(tree).items() if "num" not in name}


def test_an_attention_that_is_wider_than_its_input_is_refused(golden: Golden) -> None:
    plan = conversion_by_kinds.plan_to_torch(
        tensorflow_tree(filled(attention(2, 3, 0) | {"a/_query_dense/kernel": (5, 2, 3)}))
    )
    assert not plan.moves
    golden("\n".join(plan.notes))


def test_a_tied_tensor_goes_to_both_of_its_layers() -> None:
    tensors = filled({"dec.weight": (7, 4), "dec.bias": (7,)})
    tree = torch_tree(dict(tensors))
    tied = Tree(tree.leaves, {keys("dec.weight"): (Alias(keys("emb.weight"), "emb.weight"),)})
    there = apply_plan(
        tied, conversion_by_kinds.plan_to_tensorflow(tied, parse_layer_options(["emb=embedding"], []))
    )
    arrays = {there.names[path]: leaf.array() for path, leaf in there.tensors()}
    assert (arrays["emb/embeddings"] == tensors["dec.weight"]).all()
    assert (arrays["dec/kernel"] == tensors["dec.weight"].T).all()


# --- What nobody can know ----------------------------------------------------------------------------

AMBIGUOUS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[str, ...]]] = {
    "a matrix alone": ({"a.weight": (4, 4)}, ("dense", "embedding")),
    "a vector alone": ({"a.weight": (4,)}, ("layer_norm", "rms_norm", "prelu")),
    "one input channel": ({"a.weight": (4, 1, 3, 3), "a.bias": (4,)}, ("convolution", "depthwise")),
    "an image's norm": (
        {"a.weight": (2, 4, 4), "a.bias": (2, 4, 4)},
        ("layer_norm", "layer_norm_images"),
    ),
}


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 1, 4), (2, 4, 1), (4,)])
def test_only_a_bias_of_the_weights_shape_makes_a_norm_of_several_axes(shape: tuple[int, ...]) -> None:
    # A row of dense layers, as of an ensemble, has matrices [members, in, out] and biases [members, 1, out].
    plan = conversion_by_kinds.plan_to_tensorflow(
        torch_tree(dict(filled({"a.weight": (2, 4, 4), "a.bias": shape})))
    )
    assert any("layer_norm" in note for note in plan.notes) == (shape == (2, 4, 4))


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_may_be_several_kinds_is_asked_for(case: str, golden: Golden) -> None:
    shapes, kinds = AMBIGUOUS[case]
    tree = torch_tree(dict(filled(shapes)))
    plan = conversion_by_kinds.plan_to_tensorflow(tree)
    assert not plan.moves
    (note,) = (note for note in plan.notes if "--kind" in note)
    assert all(f"--kind 'a={kind}'" in note for kind in kinds)
    (layer,) = find_layers(tree, "torch")
    assert tuple(dict.fromkeys(kind.name for kind in layer.kinds)) == kinds
    with pytest.raises(MappingError) as caught:
        _ = layer.kind
    golden(caught.value)
    targets = set()
    for kind in kinds:
        result = conversion_by_kinds.plan_to_tensorflow(tree, parse_layer_options([f"a={kind}"], []))
        assert len(result.moves) == len(shapes)
        targets.add(tuple((display(move.target), move.rule) for move in result.moves))
    assert len(targets) == len(kinds)  # they really go different ways


LSTM_16 = {"rnn.weight_ih_l0": (128, 16), "rnn.weight_hh_l0": (128, 32)}
NORM_32 = {"norm.weight": (32,), "norm.bias": (32,)}
HEAD = {"out.weight": (4, 32), "out.bias": (4,)}
POINTWISE = {"pw.weight": (16, 8, 1, 1), "pw.bias": (16,)}
# Kinds by title for which names and widths are evidence; layers that are not named stay open.
EVIDENCE: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, str]]] = {
    "an embedding before an LSTM": ({"z.weight": (50, 16), **LSTM_16, **HEAD}, {"z": "embedding"}),
    "a dense layer before an LSTM": ({"z.weight": (16, 7), **LSTM_16, **HEAD}, {"z": "dense"}),
    "a square before an LSTM": ({"z.weight": (16, 16), **LSTM_16, **HEAD}, {}),
    "a square with a name before an LSTM": (
        {"x_embedding.weight": (16, 16), **LSTM_16},
        {"x_embedding": "embedding"},
    ),
    "a branch beside an LSTM": (
        {"z.weight": (16, 9), "z.bias": (16,), "y.weight": (50, 16), **LSTM_16},
        {},
    ),
    "a head after an LSTM": ({**LSTM_16, "a.weight": (50, 32)}, {"a": "dense"}),
    "a table between an encoder and a decoder": (
        {"z.weight": (32, 9), "z.bias": (32,), "y.weight": (512, 32), "x.weight": (9, 32), "x.bias": (9,)},
        {},
    ),
    "tables of BERT": (
        {
            "b.word_embeddings.weight": (100, 32),
            "b.position_embeddings.weight": (32, 32),
            "b.token_type_embeddings.weight": (2, 32),
            **NORM_32,
        },
        {f"b/{name}_embeddings": "embedding" for name in ("word", "position", "token_type")},
    ),
    "a name that widths contradict": ({"embedding.weight": (16, 7), **LSTM_16}, {}),
    "a dense name that widths contradict": ({"fc.weight": (50, 16), **LSTM_16}, {}),
    "layers without biases": ({"l1.weight": (64, 9), "l2.weight": (4, 64)}, {"l1": "dense", "l2": "dense"}),
    "equal layers without biases": (
        {"l1.weight": (64, 9), "l2.weight": (64, 64), "l3.weight": (4, 64)},
        {"l1": "dense", "l2": "dense", "l3": "dense"},
    ),
    "squares without biases": ({"l1.weight": (64, 64), "l2.weight": (64, 64)}, {}),
    "two tables": ({"z.weight": (50, 16), "y.weight": (4, 16)}, {}),
    "a first convolution": (
        {"z.weight": (8, 1, 3, 3), "z.bias": (8,), "y.weight": (16, 8, 3, 3), "y.bias": (16,)},
        {"z": "convolution"},
    ),
    "a lone first convolution": (
        {"conv1.weight": (8, 1, 3, 3), "conv1.bias": (8,)},
        {"conv1": "convolution"},
    ),
    "a convolution between layers, as in Mamba": (
        {"y.weight": (9, 7), "y.bias": (9,), "conv1d.weight": (18, 1, 4), "conv1d.bias": (18,), **HEAD},
        {},
    ),
    "a convolution that pools, as in PiT": (
        {
            "z.weight": (16, 3, 7, 7),
            "z.bias": (16,),
            "pool.conv.weight": (32, 1, 3, 3),
            "pool.conv.bias": (32,),
        },
        {},
    ),
    "a first convolution of a colour image": (
        {"conv1.weight": (3, 1, 3, 3), "y.weight": (16, 3, 3, 3), "y.bias": (16,)},
        {},
    ),
    "a depthwise convolution by name": ({"conv_dw.weight": (8, 1, 3, 3)}, {"conv_dw": "depthwise"}),
    "a window between 8 channels and a window of one": (
        {"z.weight": (8, 2, 3, 3), "z.bias": (8,), "y.weight": (8, 1, 3, 3), **POINTWISE},
        {"y": "depthwise"},
    ),
    "a second branch": (
        {"z.weight": (8, 2, 3, 3), "z.bias": (8,), "y.weight": (8, 1, 3, 3), "x.weight": (9, 8, 3, 3)},
        {},
    ),
    "a channel before a window of one": ({"z.weight": (8, 1, 3, 3), **POINTWISE}, {}),
    "a target network": (
        {f"{net}.{name}": shape for net in "zy" for name, shape in {"a.weight": (50, 16), **LSTM_16}.items()},
        {"z/a": "embedding", "y/a": "embedding"},
    ),
}


@pytest.mark.parametrize("case", EVIDENCE)
def test_names_and_widths_decide_the_kind(case: str) -> None:
    shapes, kinds = EVIDENCE[case]
    tree = torch_tree(dict(filled(shapes)))
    placed = conversion_by_kinds.convert_to_tensorflow(tree)
    decided = {layer.title: layer.kind.name for layer, _, _ in placed.done if layer.evidence}
    assert decided == kinds
    # Each decision is an assumption, whose option selects the other kind.
    for title in kinds:
        (line,) = (text for text in placed.assumed if f"--kind '{title}=" in text and " read as " in text)
        option = re.findall(rf"--kind '({re.escape(title)}=\w+)'", line)
        (other,) = parse_layer_options(option, [])
        stated = {
            layer.title: layer.kind.name
            for layer, _, _ in conversion_by_kinds.convert_to_tensorflow(tree, [other]).done
        }
        assert stated[title] == other.kind != kinds[title]


def test_files_sorted_by_name_give_no_evidence_by_order() -> None:
    shapes = {"a.weight": (50, 32), "b.weight_ih_l0": (128, 16), "b.weight_hh_l0": (128, 32)}
    last_first = conversion_by_kinds.convert_to_tensorflow(torch_tree(dict(filled(shapes))))
    assert not [layer for layer, _, _ in last_first.done if layer.evidence]


def test_layers_that_are_asked_for_alike_share_a_sentence(golden: Golden) -> None:
    tree = torch_tree(dict(filled({f"blocks.{n}.weight": (4, 4) for n in range(9)})))
    (note,) = conversion_by_kinds.plan_to_tensorflow(tree).notes
    golden(note)


@pytest.mark.parametrize(
    ("bias", "kinds"),
    [((6,), {"depthwise"}), ((2,), {"convolution"}), (None, {"convolution"})],
)
def test_a_bias_tells_a_depthwise_kernel(bias: tuple[int, ...] | None, kinds: set[str]) -> None:
    shapes = {"a/kernel": (5, 5, 3, 2)} | ({"a/bias": bias} if bias else {})
    (layer,) = find_layers(tensorflow_tree(filled(shapes)), "tensorflow")
    assert {kind.name for kind in layer.kinds} == kinds


@pytest.mark.parametrize(
    ("cls", "kind"),
    [("DepthwiseConv2D", "depthwise"), ("Conv2D", "convolution"), ("Conv2DTranspose", "convolution")],
)
def test_the_class_in_the_file_tells_the_kind(cls: str, kind: str) -> None:
    tree = tensorflow_tree(filled({"a/kernel": (3, 3, 4, 1)}))
    assert len(find_layers(tree, "tensorflow")[0].kinds) == 2
    known = Tree(tree.leaves, {}, {attributes("a"): Container("module", cls)})
    assert find_layers(known, "tensorflow")[0].kind.name == kind


def test_a_forget_bias_that_is_told_is_not_assumed() -> None:
    tree = tensorflow_tree(filled(FORMS["tf1"](3, 2)))
    for options, value in (([], 1.0), (["a=lstm:0"], 0.0)):
        plan = conversion_by_kinds.plan_to_torch(tree, parse_layer_options(options, []))
        second = apply_plan(tree, plan)[(key("a.bias_hh_l0"),)]
        assert isinstance(second, Leaf)
        assert second.array().tolist() == [0, 0, value, value, 0, 0, 0, 0]
        assert bool(plan.assumed) == (not options)


def test_a_note_says_what_the_file_tells(golden: Golden) -> None:
    tree = tensorflow_tree(filled({"n/gamma": (3,), "n/beta": (3,)}))
    golden("\n".join(conversion_by_kinds.plan_to_torch(tree).notes))
    containers = {attributes("n"): Container("module", "LayerNormalization", {"epsilon": 0.002})}
    (note,) = conversion_by_kinds.plan_to_torch(Tree(tree.leaves, {}, containers)).notes
    assert "epsilon 0.002" in note


REFUSED = {
    "a gru that resets before": {"a/kernel": (3, 6), "a/recurrent_kernel": (2, 6), "a/bias": (6,)},
    "a gru of sonnet": {"a/_w_i": (3, 6), "a/_w_h": (2, 6), "a/b": (6,)},
    "a gru of tensorflow 1": {
        f"a/gru_cell/{gate}/{name}": shape
        for gate, width in (("gates", 4), ("candidate", 2))
        for name, shape in (("kernel", (5, width)), ("bias", (width,)))
    },
    "a projection": {
        "a/lstm_cell/kernel": (5, 16),
        "a/lstm_cell/bias": (16,),
        "a/lstm_cell/projection/kernel": (4, 2),
    },
    "slopes for every place": {"a/alpha": (3, 3, 4)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_equivalent_is_refused_with_a_sentence(case: str, golden: Golden) -> None:
    plan = conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(REFUSED[case])))
    assert not plan.moves
    golden("\n".join(plan.notes))


def test_a_gru_without_a_bias_does_not_say_when_it_resets() -> None:
    tree = tensorflow_tree(filled({"a/kernel": (3, 6), "a/recurrent_kernel": (2, 6)}))
    assert not conversion_by_kinds.plan_to_torch(tree).moves
    assert len(conversion_by_kinds.plan_to_torch(tree, parse_layer_options(["a=gru"], [])).moves) == 2
    about = {attributes("a"): Container("module", "GRU", {"reset_after": True})}
    assert len(conversion_by_kinds.plan_to_torch(Tree(tree.leaves, {}, about)).moves) == 2


# --- Flattened images --------------------------------------------------------------------------------


def convolutional(extra: int = 0) -> Tree:
    shapes = {"conv/kernel": (3, 3, 2, 4), "conv/bias": (4,), "fc/kernel": (3 * 2 * 4 + extra, 5)}
    return tensorflow_tree(filled(shapes | {"fc/bias": (5,), "out/kernel": (5, 2), "out/bias": (2,)}))


def test_a_flattened_image_is_asked_for_and_reordered() -> None:
    tree = convolutional()
    plan = conversion_by_kinds.plan_to_torch(tree)
    assert {display(move.target) for move in plan.moves} == {
        f"{layer}/{name}" for layer in ("conv", "out") for name in ("weight", "bias")
    }
    (note,) = (note for note in plan.notes if "--flatten" in note)
    assert "--flatten 'fc=6,4'" in note
    assert "--flatten 'fc=no'" in note
    there = apply_plan(tree, conversion_by_kinds.plan_to_torch(tree, parse_layer_options([], ["fc=3,2,4"])))
    image = np.random.default_rng(1).standard_normal((3, 2, 4)).astype(np.float32)
    kernel, weight = (
        next(leaf.array() for path, leaf in side.tensors() if display(path) == name)
        for side, name in ((tree, "fc/kernel"), (there, "fc/weight"))
    )
    np.testing.assert_allclose(
        weight @ image.transpose(2, 0, 1).reshape(-1), image.reshape(-1) @ kernel, rtol=1e-5, atol=1e-6
    )
    back = apply_plan(
        there, conversion_by_kinds.plan_to_tensorflow(there, parse_layer_options([], ["fc=3,2,4"]))
    )
    assert arrays(back) == arrays(tree)


def test_a_layer_that_takes_no_image_is_not_reordered() -> None:
    plan = conversion_by_kinds.plan_to_torch(convolutional(extra=1), parse_layer_options([], ["fc=no"]))
    rules = {display(move.target): move.rule.name for move in plan.moves}
    assert rules["fc/weight"] == "transpose"


def test_a_second_head_on_an_image_is_asked_for_too() -> None:
    shapes = {
        "conv/weight": (4, 2, 3, 3),
        "value/weight": (9, 24),
        "value2/weight": (1, 9),
        "adv/weight": (9, 24),
    }
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    tree = torch_tree(dict(filled({name: both for name in shapes for both in [shapes[name]]} | biases)))
    notes = conversion_by_kinds.plan_to_tensorflow(tree).notes
    names = [note.split()[0] for note in notes if "--flatten" in note]
    assert names == ["value", "adv"]


def test_a_norm_over_a_flattened_image_tells_no_channels() -> None:
    norm = dict.fromkeys(("n/gamma", "n/beta", "n/moving_mean", "n/moving_variance"), (24,))
    shapes = {"conv/kernel": (3, 3, 2, 4), "conv/bias": (4,)} | norm | {"fc/kernel": (24, 5), "fc/bias": (5,)}
    notes = conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(shapes))).notes
    assert sorted(note.split()[0] for note in notes if "--flatten" in note) == ["fc", "n"]


def test_a_file_that_lists_layers_by_name_is_asked_for_too() -> None:
    shapes = {"actor/kernel": (24, 5), "actor/bias": (5,), "body/kernel": (3, 3, 2, 4), "body/bias": (4,)}
    notes = conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(shapes))).notes
    assert [note.split()[0] for note in notes if "--flatten" in note] == ["actor"]
    # The layer before it gives as many numbers, but nothing else takes what the convolution gives.
    known = {"a_first/kernel": (7, 24), "a_first/bias": (24,)} | shapes
    assert _refusal_options(known) == {"actor": "--flatten", "a_first": "--unflatten"}
    pooled = known | {"pooled/kernel": (4, 2), "pooled/bias": (2,)}
    plan = conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(pooled)))
    assert len(plan.moves) == len(pooled)


def _refusal_options(shapes: Mapping[str, tuple[int, ...]], flatten: Sequence[str] = ()) -> dict[str, str]:
    """Return by layer the option that its refusal names."""
    notes = conversion_by_kinds.plan_to_torch(
        tensorflow_tree(filled(shapes)), parse_layer_options([], list(flatten))
    ).notes
    return {note.split()[0]: match[1] for note in notes if (match := re.search(r"(--(?:un)?flatten)", note))}


_CONV = {"conv/kernel": (3, 3, 2, 4), "conv/bias": (4,)}


def _dense(name: str, *sizes: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": sizes, f"{name}/bias": sizes[1:]}


@pytest.mark.parametrize(
    ("others", "stated", "requested"),
    [
        # A gate that is multiplied with the image, the layer of a decoder, a second head behind them.
        (_dense("gate", 3, 24) | _dense("out", 24, 2), ["out=6,4", "gate=no"], {"gate": "--unflatten"}),
        (_dense("expand", 5, 24) | _dense("mean", 24, 5), ["mean=6,4"], {"expand": "--unflatten"}),
        (
            _dense("one", 24, 5) | _dense("two", 24, 5) | _dense("out", 5, 2),
            ["one=6,4"],
            {"two": "--flatten"},
        ),
        (_dense("mix", 24, 24) | _dense("out", 24, 2), ["mix=6,4", "out=no"], {"mix": "--unflatten"}),
        # An image and numbers beside it: no multiple of the channels.
        (_dense("vector", 3, 7) | _dense("hidden", 31, 2), ["vector=no"], {"hidden": "--flatten"}),
    ],
)
def test_layers_as_wide_as_a_flattened_image_are_refused(others, stated, requested) -> None:
    assert _refusal_options(_CONV | others, stated) == requested


def test_every_layer_whose_outputs_may_become_an_image_is_refused() -> None:
    shapes = _dense("noise", 5, 48) | _dense("label", 3, 24)
    shapes |= {"up/kernel": (2, 2, 3, 6), "up/bias": (3,)}
    assert _refusal_options(shapes) == {"noise": "--unflatten", "label": "--unflatten"}


@pytest.mark.parametrize(("inputs", "named"), [(3072, True), (90, True), (3074, False), (33, False)])
def test_a_dense_layer_as_wide_as_a_picture_is_assumed_to_take_none(inputs, named) -> None:
    plan = conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(_dense("fc", inputs, 4))))
    assert len(plan.moves) == 2
    assert any("--flatten" in sentence for sentence in plan.assumed) == named


def test_the_statistics_after_a_transposed_convolution_tell_its_channels() -> None:
    norm = dict.fromkeys(("n/gamma", "n/beta", "n/moving_mean", "n/moving_variance"), (4,))
    shapes = {"c/kernel": (3, 3, 4, 99), **norm, "out/kernel": (36, 2)}
    assert _decided(conversion_by_kinds.plan_to_torch(tensorflow_tree(filled(shapes)))) == {"out": "3,3,4"}


def _decided(plan: Plan) -> dict[str, str]:
    """Return the images that layers are assumed to take; nothing else may be open."""
    assert not any("--flatten" in note for note in plan.notes), plan.notes
    sentences = (re.match(r"(\S+) takes ([\d,]+) flattened", sentence) for sentence in plan.assumed)
    return {match[1]: match[2] for match in sentences if match}


def _convolutions(**channels: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Return PyTorch's kernels and biases of convolutions from one number of channels to another."""
    kernels = {f"{name}.weight": (outputs, inputs, 3, 3) for name, (inputs, outputs) in channels.items()}
    return kernels | {f"{name}.bias": (outputs,) for name, (_, outputs) in channels.items()}


def _linear(**sizes: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    kernels = {f"{name}.weight": (outputs, inputs) for name, (inputs, outputs) in sizes.items()}
    return kernels | {f"{name}.bias": (outputs,) for name, (_, outputs) in sizes.items()}


_TRUNK = _convolutions(conv1=(4, 32), conv2=(32, 64), conv3=(64, 64))


@pytest.mark.parametrize(
    ("shapes", "decided"),
    [
        pytest.param(_TRUNK | _linear(fc=(3136, 512), q=(512, 6)), {"fc": "7,7,64"}, id="a Q-network"),
        pytest.param(
            _TRUNK | _linear(value=(3136, 64), gain=(3136, 64), v=(64, 1), a=(64, 6)),
            {"value": "7,7,64", "gain": "7,7,64"},
            id="two heads, whose hidden sizes are the channels",
        ),
        pytest.param(
            _convolutions(stem=(2, 64), policy=(64, 32), value=(64, 3)) | _linear(pi=(288, 9), v=(27, 1)),
            {"pi": "3,3,32", "v": "3,3,3"},
            id="two images",
        ),
        pytest.param(_TRUNK | _linear(fc=(64 * 42, 9)), {"fc": "42,64"}, id="a board of 6 x 7 places"),
        pytest.param(
            {k.replace("conv", f"{side}.conv"): v for k, v in _TRUNK.items() for side in ("actor", "critic")}
            | _linear(mu=(3136, 2), v=(3136, 1)),
            {"mu": "7,7,64", "v": "7,7,64"},
            id="a trunk for each",
        ),
        pytest.param(
            _TRUNK | _linear(fc=(3136, 8), joint=(8 + 5, 4)), {"fc": "7,7,64"}, id="numbers joined later"
        ),
    ],
)
def test_the_image_that_no_convolution_takes_is_that_of_the_only_layer_of_its_size(
    shapes: dict[str, tuple[int, ...]], decided: dict[str, str]
) -> None:
    plan = conversion_by_kinds.plan_to_tensorflow(torch_tree(dict(filled(shapes))))
    assert _decided(plan) == decided
    assert len(plan.moves) == len(shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(_TRUNK | _linear(fc=(64 * 47, 9)), id="a prime number of places"),
        pytest.param(_convolutions(c=(3, 4)) | _linear(fc=(80, 2)), id="few channels and no square"),
        pytest.param(_TRUNK | _linear(fc=(3136, 9), pooled=(64, 9)), id="the image is pooled as well"),
        pytest.param(_TRUNK | _linear(wide=(3, 3136), fc=(3136, 9)), id="a vector of that size"),
        pytest.param(_TRUNK | _linear(side=(3, 64), fc=(3136, 9)), id="a vector may fill the last places"),
        pytest.param(_TRUNK | _linear(fc=(3136, 9), other=(1024, 9)), id="two sizes for one image"),
        pytest.param(_TRUNK | _linear(fc=(2 * 3136, 9)), id="two images of one encoder"),
        pytest.param(
            _convolutions(a=(1, 4), b=(1, 16)) | _linear(fc=(64, 9)), id="two images of the same size"
        ),
        pytest.param(
            {"c.weight": (32, 64, 3, 3)} | _linear(fc=(512, 9)), id="a convolution that may be transposed"
        ),
        pytest.param(
            _TRUNK | _linear(fc=(3136, 9), back=(9, 64 * 9)) | _convolutions(up=(64, 4)), id="a decoder"
        ),
        pytest.param(
            _TRUNK
            | _linear(fc=(3136, 9))
            | {"attn.in_proj_weight": (192, 64), "attn.in_proj_bias": (192,)}
            | _linear(**{"attn.out_proj": (64, 64)}),
            id="an attention",
        ),
    ],
)
def test_an_image_of_which_sizes_leave_more_than_one_reading_stays_unknown(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    plan = conversion_by_kinds.plan_to_tensorflow(torch_tree(dict(filled(shapes))))
    assert not any("flattened, because" in sentence for sentence in plan.assumed)
    assert len(plan.moves) < len(shapes)


def test_the_option_for_the_other_case_of_an_assumed_image_keeps_the_order() -> None:
    rows = filled(_TRUNK | _linear(fc=(3136, 6)))
    rules = {}
    for option in ((), ("fc=no",), ("fc=7,7,64",)):
        plan = conversion_by_kinds.plan_to_tensorflow(
            torch_tree(dict(rows)), parse_layer_options([], list(option))
        )
        (rules[option],) = (
            m.rule.name for m in plan.moves if rows[str(m.source[-1].value)].shape == (6, 3136)
        )
        assert any("flattened, because" in sentence for sentence in plan.assumed) == (not option)
    assert rules[()] == rules["fc=7,7,64",] != rules["fc=no",]


def test_an_image_beside_other_numbers_is_asked_for_with_its_form() -> None:
    tree = torch_tree(dict(filled(_convolutions(c=(3, 5)) | _linear(fc=(335, 2)))))
    (note,) = (note for note in conversion_by_kinds.plan_to_tensorflow(tree).notes if "--flatten" in note)
    assert re.findall(r"'fc=([^']+)'", note) == ["PLACES,5+NUMBERS", "no"]
    options = parse_layer_options([], ["fc=65,5+10"])
    assert len(conversion_by_kinds.plan_to_tensorflow(tree, options).moves) == 4


def _mnist() -> dict[str, np.ndarray]:
    """Return a network of two convolutions, pooled after each, and a dense layer."""
    rows = {"conv1": (8, 1, 3, 3), "conv2": (16, 8, 3, 3), "fc1": (10, 7 * 7 * 16)}
    shapes = {f"{name}.weight": shape for name, shape in rows.items()}
    return dict(filled(shapes | {f"{name}.bias": shape[:1] for name, shape in rows.items()}))


def test_the_image_is_that_of_the_convolution_that_no_other_one_takes() -> None:
    plan = conversion_by_kinds.plan_to_tensorflow(
        torch_tree(_mnist()), parse_layer_options(["conv1=convolution"], [])
    )
    assert _decided(plan) == {"fc1": "7,7,16"}


def test_an_image_that_another_convolution_takes_is_refused() -> None:
    tree = torch_tree(_mnist())
    (note,) = (
        note
        for note in conversion_by_kinds.plan_to_tensorflow(tree, parse_layer_options([], ["fc1=98,8"])).notes
        if "--flatten" in note
    )
    assert re.findall(r"'fc1=([\w,]+)'", note) == ["7,7,16"]
    right = conversion_by_kinds.plan_to_tensorflow(
        tree, parse_layer_options(["conv1=convolution"], ["fc1=7,7,16"])
    )
    assert len(right.moves) == len(tree.leaves)
    # The first image may have a head that the file contains.
    both = _mnist() | dict(filled({"head.weight": (2, 98 * 8), "head.bias": (2,)}))
    plan = conversion_by_kinds.plan_to_tensorflow(
        torch_tree(both), parse_layer_options(["conv1=convolution"], ["head=98,8", "fc1=7,7,16"])
    )
    assert len(plan.moves) == len(both)


@pytest.mark.parametrize(
    "names",
    [
        # HDF5 lists groups by name: neither the order of calls, nor sorted where names end in numbers.
        ("stem", "body", "out"),
        ("layers/conv2d_9", "layers/conv2d_10", "layers/dense"),
        ("z_first", "y_last", "a_out"),
    ],
)
@pytest.mark.parametrize(("places", "decided"), [(169, True), (1, False)])
def test_the_order_in_a_keras_weights_file_is_no_evidence(
    names: tuple[str, str, str], places: int, decided: bool, tmp_path: Path
) -> None:
    h5py = pytest.importorskip("h5py")
    # With one place, the layer may take the last image, or two places of the first.
    shapes = {names[0]: (3, 3, 1, 16), names[1]: (3, 3, 16, 32), names[2]: (places * 32, 10)}
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        for name, shape in shapes.items():
            file[f"{name}/vars/0"] = np.ones(shape, np.float32)
            file[f"{name}/vars/1"] = np.ones(shape[-1:], np.float32)
            file[name].attrs["name"] = name.rpartition("/")[2]
    ran = in_process("convert", "m.weights.h5", "m.pt", "--json", cwd=tmp_path)
    stated = [sentence for sentence in ran.json()["assumed"] if "flattened, because" in sentence]
    assert [re.findall(r" takes ([\d,]+)", sentence) for sentence in stated] == [["13,13,32"]] * decided
    assert ran.status == (0 if decided else ran.status)


def test_an_image_that_no_convolution_ends_in_may_be_that_of_each() -> None:
    rows = {"a": (8, 1, 3, 3), "b": (16, 1, 3, 3), "fc": (10, 784)}
    shapes = {f"{name}.weight": shape for name, shape in rows.items()}
    tree = torch_tree(dict(filled(shapes | {f"{name}.bias": shape[:1] for name, shape in rows.items()})))
    (note,) = (note for note in conversion_by_kinds.plan_to_tensorflow(tree).notes if "--flatten" in note)
    assert re.findall(r"'fc=([\w,]+)'(?: for (\w))?", note) == [("98,8", "a"), ("7,7,16", "b"), ("no", "")]


# --- The command -------------------------------------------------------------------------------------


def test_every_layer_that_needs_a_kind_has_its_option() -> None:
    shapes = {f"{name}.weight": (5, 4) for name in "abc"}
    plan = conversion_by_kinds.plan_to_tensorflow(torch_tree(dict(filled(shapes))))
    (note,) = (note for note in plan.notes if "--kind" in note)
    for kind in ("dense", "embedding"):
        assert " ".join(f"--kind '{name}={kind}'" for name in "abc") in note
    options = [f"{name}=embedding" for name in "abc"]
    assert (
        len(
            conversion_by_kinds.plan_to_tensorflow(
                torch_tree(dict(filled(shapes))), parse_layer_options(options, [])
            ).moves
        )
        == 3
    )


@pytest.mark.parametrize(
    ("shapes", "assumed"),
    [
        ({"n.weight": (3, 6, 6)}, ["n"]),
        ({"n.weight": (3, 6, 6), "n.bias": (3,)}, []),
        ({"n.weight": (3, 6, 5)}, []),
    ],
)
def test_a_lone_weight_like_an_image_is_an_assumed_convolution(
    shapes: Mapping[str, tuple[int, ...]], assumed: list[str]
) -> None:
    plan = conversion_by_kinds.plan_to_tensorflow(torch_tree(dict(filled(shapes))))
    assert [sentence.partition(":")[0] for sentence in plan.assumed] == assumed


@pytest.mark.parametrize(
    ("name", "assumed"), [("film", ["film"]), ("norm_1", []), ("ln", []), ("plan", ["plan"])]
)
def test_gamma_and_beta_without_a_word_for_a_norm_are_assumed_to_be_one(
    name: str, assumed: list[str]
) -> None:
    tree = tensorflow_tree(dict(filled({f"{name}/gamma": (4,), f"{name}/beta": (4,)})))
    assert [text.partition(":")[0] for text in conversion_by_kinds.plan_to_torch(tree).assumed] == assumed


def saved(folder: Path) -> None:
    save(
        torch_tree(dict(filled({"enc.weight": (4, 4), "fc.weight": (4, 4), "fc.bias": (4,)}))),
        str(folder / "m.pt"),
    )


def test_the_command_says_what_it_must_be_told(tmp_path: Path, golden: Golden) -> None:
    saved(tmp_path)
    ran = in_process("convert", "m.pt", "ckpt-1", "--to", "tf", "--json", cwd=tmp_path)
    assert ran.status == 1
    assert ran.json()["unused"] == ["enc/weight"]
    golden("\n".join(ran.json()["notes"]))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
    ran = in_process("convert", "m.pt", "ckpt-1", "--to", "tf", "--kind", "enc=embedding", cwd=tmp_path)
    assert ran.status == 0, ran.err


@pytest.mark.parametrize(
    "options",
    [
        ["--kind", "enc=embeding"],
        ["--kind", "enc=convolution"],
        ["--kind", "encoder=dense"],
        ["--kind", "enc"],
        ["--flatten", "fc=7x7"],
        ["--flatten", "fc=7,7,3"],
        ["--flatten", "enc=2,2", "--kind", "enc=embedding"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_one_sentence(options: list[str], tmp_path: Path, golden: Golden) -> None:
    saved(tmp_path)
    ran = in_process("convert", "m.pt", "ckpt-1", "--to", "tf", *options, cwd=tmp_path)
    golden(ran)
    assert ran.status == 2
    assert "Traceback" not in ran.err


def test_kinds_are_for_what_goes_by_kinds(tmp_path: Path, golden: Golden) -> None:
    saved(tmp_path)
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "m.pt"), str(tmp_path / "n.pt"), kinds=["enc=dense"])
    golden(caught.value)


# --- The tables --------------------------------------------------------------------------------------


def test_every_kind_of_one_framework_is_one_of_the_other_or_refused() -> None:
    of = {
        framework: {k.name for k in KINDS if k.framework == framework}
        for framework in ("tensorflow", "torch")
    }
    refused = {kind.name for kind in KINDS if kind.refused is not None}
    assert of["tensorflow"] ^ of["torch"] == refused - (of["tensorflow"] & of["torch"])
    assert all("/" in "".join(weight.name for weight in kind.weights) for kind in COMPOSED)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["kernel", "weight", "bias", "w", "b", "gamma", "alpha", "cell/kernel", "query/kernel"]
            ),
            st.lists(st.integers(0, 3), max_size=5),
        ),
        max_size=6,
    )
)
def test_no_tree_is_a_surprise(entries: list[tuple[str, list[int]]]) -> None:
    """Whatever stands in a tree: it is mapped, refused with a sentence, or not a layer."""
    tree = tensorflow_tree({f"a/{name}": np.zeros(shape, np.float32) for name, shape in entries})
    for plan in (
        conversion_by_kinds.plan_to_torch(tree),
        conversion_by_kinds.plan_to_tensorflow(
            torch_tree({f"a.{n}": np.zeros(s, np.float32) for n, s in entries})
        ),
    ):
        assert len({move.source for move in plan.moves}) <= len(entries)


@pytest.mark.parametrize("make", [torch_tree, tensorflow_tree])
def test_a_deviation_alone_is_no_layer(make: Callable[[Mapping[str, np.ndarray]], Tree]) -> None:
    tree = make({"head/log_std": np.zeros(2, "f4"), "head/std": np.zeros(2, "f4")})
    assert not find_layers(tree, "torch" if make is torch_tree else "tensorflow")


@pytest.mark.parametrize("names", [("kernel", "bias"), ("w", "b"), ("weights", "biases")])
@pytest.mark.parametrize("role", ["in_out", "out_in"])
def test_a_recorded_product_tells_the_orientation_of_a_square_matrix(
    names: tuple[str, str], role: str
) -> None:
    values = filled({f"a/{names[0]}": (3, 3), f"a/{names[1]}": (3,)})
    plain = tensorflow_tree(values)
    roles = dict(zip(names, (role, "added"), strict=True))
    leaves = {
        path: replace(leaf, use=WeightUse(role=roles[str(path[-1].value)]))
        if isinstance(leaf, Leaf)
        else leaf
        for path, leaf in plain.items()
    }
    tree = Tree(leaves, plain.aliases, plain.containers)
    (layer,) = find_layers(tree, "tensorflow")
    (kind,) = layer.kinds
    assert kind.name == "dense"
    assert kind.weights[0].to_canonical == (KEEP if role == "in_out" else TRANSPOSE)
    # The option that states it is accepted for these names.
    option = parse_layer_options([f"a={kind.option}"], (), ())
    (same,) = find_layers(plain, "tensorflow", option)
    assert [kind.weights[0].to_canonical for kind in same.kinds] == [kind.weights[0].to_canonical]


@pytest.mark.parametrize("name", ["kernel", "embeddings", "w"])
@pytest.mark.parametrize("role", ["in_out", "out_in"])
def test_no_option_is_offered_that_turns_a_recorded_product(name: str, role: str) -> None:
    plain = tensorflow_tree(filled({f"a/{name}": (4, 3)}))
    leaves = {
        path: replace(leaf, use=WeightUse(role=role)) if isinstance(leaf, Leaf) else leaf
        for path, leaf in plain.items()
    }
    tree = Tree(leaves, plain.aliases, plain.containers)
    (kind,) = find_layers(tree, "tensorflow")[0].kinds
    offered = re.findall(r"=(\w+)'", kind.refused or "")
    assert offered == (["embedding"] if name == "embeddings" else [])
    for option in offered:
        stated = parse_layer_options([f"a={option}"], (), ())
        (kind,) = find_layers(tree, "tensorflow", stated)[0].kinds
        assert (kind.name, kind.refused) == ("embedding", None)
