"""Every layer kind against both frameworks: converted weights give the outputs that they gave before."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.core import File, Inline, Leaf, NotUnderstood, Span, UnsupportedError, attr, kinds
from ckpttool.graphs.keras import read_document
from ckpttool.libraries.graph_programs import lower_policy
from ckpttool.libraries.model_steps import ChainStep
from ckpttool.mapping import (
    apply_plan,
    conversion_by_kinds,
    feature_orders,
    kind_notes,
    kind_table,
    layer_kinds,
    layers,
)
from tests import keras_layers, tensorflow_child
from tests.keras_layers import LAYERS
from tests.trees import tensorflow_tree

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
KINDS = ["square=dense", "embedding=embedding", "prelu=prelu:2", "depthwise=depthwise:2"]
KINDS += ["separable=separable:2", "attention=attention:2"]
FLATTEN = ["dense=no", "square=no"]


class Last:
    """Calls a module on arrays whose channels are last."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, inputs: Any) -> Any:
        import torch

        return torch.movedim(self.module(torch.movedim(inputs, -1, 1)), 1, -1)


def twins() -> dict[str, Any]:
    """Return a torch module for each of the layers."""
    from torch import nn

    separable = OrderedDict(depthwise=nn.Conv2d(3, 6, 3, groups=3, bias=False), pointwise=nn.Conv2d(6, 5, 1))
    return {
        "dense": nn.Linear(7, 5),
        "square": nn.Linear(7, 7, bias=False),
        "embedding": nn.Embedding(6, 6),
        "conv1": nn.Conv1d(4, 5, 3, dilation=2),
        "conv2": nn.Conv2d(4, 6, (3, 2), stride=2, groups=2),
        "conv3": nn.Conv3d(3, 5, 2),
        "transposed": nn.ConvTranspose2d(3, 5, 3, stride=2),
        "depthwise": nn.Conv2d(3, 6, 3, groups=3),
        "separable": nn.Sequential(separable),
        "batch_norm": nn.BatchNorm2d(3, eps=1e-3),
        "unscaled": nn.BatchNorm2d(3, eps=1e-3),
        "layer_norm": nn.LayerNorm(6, eps=1e-3),
        "prelu": nn.PReLU(3),
        "lstm": nn.LSTM(3, 5, batch_first=True),
        "gru": nn.GRU(3, 5, batch_first=True),
        "rnn": nn.RNN(3, 5, batch_first=True),
        "both_ways": nn.LSTM(3, 4, bidirectional=True, batch_first=True),
        "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        "group_norm": nn.GroupNorm(2, 4, eps=1e-3),
    }


IMAGES = frozenset(("conv1", "conv2", "conv3", "transposed", "depthwise", "separable", "batch_norm"))
IMAGES |= frozenset(("unscaled", "prelu", "group_norm"))


def outputs(modules: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch

    outputs = {}
    for name, array in keras_layers.inputs().items():
        module = modules[name].eval()
        tensor = torch.from_numpy(array)
        with torch.no_grad():
            if name == "attention":
                output = module(tensor, tensor, tensor)[0]
            else:
                output = Last(module)(tensor) if name in IMAGES else module(tensor)
        outputs[name] = np.asarray(output[0] if isinstance(output, tuple) else output)
    return outputs


def randomised(modules: dict[str, Any]) -> torch.nn.ModuleDict:
    import torch

    generator = torch.Generator().manual_seed(1)
    whole = torch.nn.ModuleDict(modules)
    for name, tensor in whole.state_dict().items():
        if tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator) * 0.4
            tensor.copy_(value.abs() + 0.5 if name.endswith("running_var") else value)
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("kinds")
    (folder / "from_torch").mkdir()
    modules = twins()
    torch.save(randomised(modules).state_dict(), folder / "torch.pt")
    np.savez(folder / "torch.npz", **outputs(modules))
    for name, to in (("from_torch/ckpt-1", "tf"), ("from_torch.weights.h5", "keras")):
        done = convert(
            str(folder / "torch.pt"), str(folder / name), to=to, kinds=KINDS, flatten=FLATTEN, sync=False
        )
        assert done.report.complete, (done.report.unused, done.report.notes)
    assert tensorflow_child.run(keras_layers.__file__, "run", folder) == ["keras", "tf_keras"]
    return folder


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def loaded(
    folder: Path, request: pytest.FixtureRequest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what a library's layers gave, and what torch's give with their weights, loaded strictly."""
    import torch

    # pytest may make this fixture twice, because workers take tests in any order.
    target = folder / f"{request.param}.pt"
    done = convert(str(folder / request.param / "ckpt"), str(target), flatten=FLATTEN, force=True, sync=False)
    assert done.report.complete, (done.report.unused, done.report.notes)
    modules = twins()
    reference = dict(np.load(folder / f"{request.param}.npz"))
    whole = torch.nn.ModuleDict({name: modules[name] for name in reference})
    state = torch.load(target, weights_only=True)
    assert whole.load_state_dict(state, strict=True)
    return reference, outputs(modules)


@pytest.mark.parametrize("name", LAYERS)
def test_keras_layers_give_the_same_in_torch(
    name: str, loaded: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
) -> None:
    reference, own_outputs = loaded
    if name not in reference:
        assert name in keras_layers.ONLY_KERAS_3
        return
    np.testing.assert_allclose(own_outputs[name], reference[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["keras_restored", "tf_keras_restored", "keras_loaded"])
def test_torch_layers_give_the_same_in_keras(way: str, folder: Path) -> None:
    own_outputs, reference = np.load(folder / "torch.npz"), np.load(folder / f"{way}.npz")
    assert len(reference.files) >= len(LAYERS) - 3
    for name in reference.files:
        np.testing.assert_allclose(reference[name], own_outputs[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("there", ["from_torch/ckpt-1", "from_torch.weights.h5"])
def test_the_way_back_gives_the_first_file_again(there: str, folder: Path, tmp_path: Path) -> None:
    done = convert(str(folder / there), str(tmp_path / "back.pt"), sync=False)
    assert done.report.complete, (done.report.unused, done.report.notes)
    assert done.digest == digest(str(folder / "torch.pt")).sha256


@pytest.mark.parametrize(
    ("name", "module"),
    [("one", "LSTM"), ("two", "LSTM"), ("three", "RNN"), ("four", "LSTM"), ("five", "GRU")],
)
def test_cells_of_tensorflow_1_and_cudnn(name: str, module: str, folder: Path) -> None:
    import torch

    cells = dict(np.load(folder / "cells.npz"))
    weights = {
        path: value for path, value in cells.items() if path.startswith(name) and "outputs" not in path
    }
    tree = tensorflow_tree(weights)
    plan = conversion_by_kinds.plan_to_torch(tree)
    there = apply_plan(tree, plan)
    state = {
        there.names[path].replace("/", ".").removeprefix(f"{name}."): torch.from_numpy(leaf.array().copy())
        for path, leaf in there.tensors()
    }
    cell = getattr(torch.nn, module)(keras_layers.CELLS_INPUT[2], keras_layers.UNITS, batch_first=True)
    cell.load_state_dict(state, strict=True)
    sequence = np.random.default_rng(4).standard_normal(keras_layers.CELLS_INPUT).astype(np.float32)
    with torch.no_grad():
        output = cell(torch.from_numpy(sequence))[0].numpy()
    np.testing.assert_allclose(output, cells[f"{name}/outputs"], rtol=0, atol=TOLERANCE)
    assumed = [sentence for sentence in plan.assumed if "forget bias" in sentence]
    assert len(assumed) == (name in ("one", "two"))


def leaf(rank: int) -> Leaf:
    return Leaf("float32", (2,) * rank, Span(File("x", 0, 0, 0), 0, 0), "x")


@pytest.mark.parametrize(
    "kind", kind_table.KINDS, ids=lambda kind: f"{kind.framework} {kind.name} {kind.form}"
)
def test_kinds_found_by_their_names_are_all_that_fit(kind: layer_kinds.LayerKind) -> None:
    whole = {weight.name: leaf(weight.rank) for weight in kind.weights}
    groups = [
        whole,
        {w.name: leaf(w.rank) for w in kind.weights if not w.optional},
        *({name: leaf for name, leaf in whole.items() if name != left} for left in whole),
        {name: leaf(len(item.shape) + 1) for name, item in whole.items()},
        {**whole, "more": leaf(1)},
        {},
    ]
    for group in groups:
        for framework in ("torch", "tensorflow"):
            fitting = [kind for kind in kind_table.KINDS if kind.framework == framework and kind.fits(group)]
            plain = tuple(kind for kind in fitting if kind.modules is None)
            usual = tuple(kind for kind in plain if not kind.is_selected)
            # The unusual orientation of a matrix counts where a bias leaves no other.
            biased = len(group) > 1 and any(len(leaf.shape) == 1 for leaf in group.values())
            assert kind_table.candidate_kinds(group, framework) == (usual or (plain if biased else ()))


# The catalogue (core/kinds.py) against the frameworks' own signatures.


def _defaults(cls: type) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}


def test_the_catalogue_has_the_names_and_defaults_of_pytorch() -> None:
    from torch import nn
    from torch.nn.modules import linear

    for row in kinds.LAYER_TYPES.values():
        for name in row.torch:
            for title in kinds.ranked(name):
                cls = getattr(nn, title, None) or getattr(linear, title)
                known = _defaults(cls)
                for setting in kinds.SETTINGS:
                    default = setting.torch_default
                    if setting.name == "epsilon":
                        default = kinds.default_epsilon(cls.__name__, "PyTorch")
                    if setting.torch in known and setting.torch_default is not None and row.settings:
                        assert known[setting.torch] == default, (cls, setting.name)
    for kind in kinds.ACTIVATION_KINDS.values():
        if kind.torch:
            known = _defaults(getattr(nn, kind.torch))
            assert all(
                known[name] in (default, inspect.Parameter.empty) for name, default in kind.arguments.items()
            ), kind.name
            # `linear` is the matrix product there.
            assert hasattr(nn.functional, kind.name)


def test_activations_compute_what_pytorch_computes() -> None:
    import torch
    from torch import nn

    from ckpttool.graphs import Value, evaluate
    from ckpttool.graphs.builder import ACTIVATION_NODES, GraphBuilder

    x = np.linspace(-8, 8, 97, dtype=np.float32)
    for name, rule in ACTIVATION_NODES.items():
        kind = kinds.ACTIVATION_KINDS[name]
        if not kind.torch or not kind.is_plain:
            continue
        build = GraphBuilder()
        result = rule(build.one, lambda number, build=build: build.number(number, "float32"), "x")
        graph = build.graph([Value("x", "float32", (97,))], [Value(result, "float32")])
        outputs = evaluate(graph, {"x": x})[result]
        expected = getattr(nn, kind.torch)()(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(outputs, expected, rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_kind_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a new norm is found by its classes, compared by its epsilon, and named in a cause."""
    row = kinds.LAYER_TYPES["rms_norm"]._replace(
        name="layer_norm",
        torch=("PowerNorm",),
        keras=("PowerNormalization",),
        words="power_?norm",
        family="power",
        epsilons={"PyTorch": 0.5, "Keras": 0.25},
        note="power norms: a note",
    )
    monkeypatch.setattr(kinds, "LAYER_TYPES", {**kinds.LAYER_TYPES, "layer_norm": row})
    for module in (kind_notes, feature_orders):
        monkeypatch.setattr(module, "LAYER_TYPES", kinds.LAYER_TYPES)
    kinds.kinds_by_class.cache_clear()
    try:
        assert kinds.find_family("my.PowerNorm2") == "power"
        assert kinds.default_epsilon("PowerNorm", "PyTorch") == 0.5
        about = layers.ModuleInfo("PowerNorm", {"eps": 0.125})
        leaf = Leaf("float32", (5,), Inline(b""), "")
        source = tensorflow_tree({"a/gamma": np.ones(5, np.float32), "a/beta": np.ones(5, np.float32)})
        (layer,) = layers.find_layers(source, "tensorflow")
        target = layer._replace(kinds=(kind_table.SPELLING["torch", "layer_norm"],), about=about)
        assert layers.narrow_kinds(
            (kind_table.SPELLING["torch", "layer_norm"],), {"weight": leaf, "bias": leaf}, about
        )
        (sentence,) = kind_notes.describe_differences([(layer, target)], foreign=True)
        assert "0.25" in sentence
        assert "0.125" in sentence
        assert kind_notes.describe_kinds([layer]) == ("power norms: a note",)
    finally:
        kinds.kinds_by_class.cache_clear()


@pytest.mark.parametrize(
    ("names", "library", "default"), [("gamma beta", "Keras", 1e-3), ("scale offset", "Sonnet", 1e-5)]
)
def test_an_unrecorded_epsilon_is_the_one_of_the_library(names: str, library: str, default: float) -> None:
    """Sonnet's layer norms (scale, offset) have another default than Keras's."""
    tree = tensorflow_tree({f"a/{name}": np.ones(5, np.float32) for name in names.split()})
    (source,) = layers.find_layers(tree, "tensorflow")
    for epsilon in (1e-3, 1e-5):
        about = layers.ModuleInfo("LayerNorm", {"eps": epsilon})
        target = source._replace(kinds=(kind_table.SPELLING["torch", "layer_norm"],), about=about)
        sentences = [*kind_notes.describe_differences([(source, target)], foreign=True)]
        assert len(sentences) == (epsilon != default)
        assert all(library in sentence for sentence in sentences)


def test_depthwise_convolutions_note_their_padding() -> None:
    shapes = {"a/depthwise_kernel": np.ones((3, 3, 4, 2), np.float32), "a/bias": np.ones(8, np.float32)}
    plain = {"b/kernel": np.ones((3, 3, 4, 2), np.float32)}
    pair = layers.find_layers(tensorflow_tree({**shapes, **plain}), "tensorflow")
    both = {layer.kinds[0].name for layer in pair}
    assert both == {"depthwise", "convolution"}
    assert len(kind_notes.describe_kinds(pair)) == 1
    assert kind_notes.describe_kinds(pair[:1]) == kind_notes.describe_kinds(pair[1:])


def _keras_chain(*layers: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    rows = [
        {"class_name": cls, "module": "keras.layers", "config": {"name": f"{cls}_{number}", **settings}}
        for number, (cls, settings) in enumerate(layers)
    ]
    return {"class_name": "Sequential", "module": "keras", "config": {"name": "m", "layers": rows}}


def _read_steps(document: dict[str, Any], *names: str) -> Sequence[ChainStep] | None:
    """Return the steps of a Keras model whose dense layers, with these names, have 3 inputs and outputs."""
    shapes = {"kernel": (3, 3), "bias": (3,)}
    tensors = {
        f"{name}/{tensor}": np.ones(shape, np.float32) for name in names for tensor, shape in shapes.items()
    }
    return lower_policy(read_document(document, tensorflow_tree(tensors), version=3), "actor", "m").steps


@pytest.mark.parametrize("name", [*kinds.KERAS_ACTIVATIONS, "leaky_relu", "softmax", "own"])
def test_activations_of_policies_are_steps_of_keras_models(name: str) -> None:
    document = _keras_chain(("Dense", {"units": 3, "activation": name}), ("Dense", {"units": 3}))
    if name == "softmax":
        with pytest.raises(UnsupportedError):
            _read_steps(document, "Dense_0", "Dense_1")
        return
    steps = _read_steps(document, "Dense_0", "Dense_1")
    assert steps is not None
    functions = [step.value for step in steps if step.kind == "activation"]
    known = {**kinds.KERAS_ACTIVATIONS, "leaky_relu": "leaky_relu(0.2)", "linear": None}
    stated = NotUnderstood("own", "the model's configuration")
    assert functions == [function for function in [known.get(name, stated)] if function is not None]


def _functional(calls: dict[str, list[str]], last: str) -> dict[str, Any]:
    rows = [
        {
            "class_name": "Dense" if sources else "InputLayer",
            "module": "keras.layers",
            "name": name,
            "config": {"name": name, "units": 3, "batch_shape": [None, 3]},
            "inbound_nodes": [[[source[0], int(source[1:] or 0), 0, {}]] for source in sources],
        }
        for name, sources in calls.items()
    ]
    config = {"layers": rows, "input_layers": [["x", 0, 0]], "output_layers": [[last, 0, 0]]}
    return {"class_name": "Functional", "module": "keras", "config": {"name": "m", **config}}


@pytest.mark.parametrize(
    ("calls", "last", "chain"),
    [
        ({"x": [], "a": ["x"], "b": ["a"]}, "b", True),
        ({"b": ["a"], "x": [], "a": ["x"]}, "b", True),  # in any order
        ({"x": [], "a": ["x"], "b": ["x"]}, "b", False),  # a layer beside the chain
        ({"x": [], "a": ["x"], "b": ["a"]}, "a", False),  # a layer after the output
        ({"x": [], "a": ["x", "a"], "b": ["a1"]}, "b", False),  # a layer that is called twice
        ({"x": [], "b": ["a"], "a": ["b"]}, "b", False),  # a cycle
    ],
)  # fmt: skip
def test_only_models_whose_layers_follow_one_another_are_chains(
    calls: dict[str, list[str]], last: str, chain: bool
) -> None:
    try:
        steps = _read_steps(_functional(calls, last), "a", "b") or ()
    except UnsupportedError:
        steps = ()
    weights = [step.value.weight for step in steps if step.kind == "dense"]
    assert (weights == [(attr("a"), attr("kernel")), (attr("b"), attr("kernel"))]) == chain
