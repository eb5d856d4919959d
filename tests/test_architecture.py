"""The layers of whole models: order, output shapes and operations are those of the frameworks themselves."""

from __future__ import annotations

import functools
import json
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import pytest

from tests import warm
from tests.conftest import TORCH_SAMPLE, Terminal, in_process, refused
from tests.golden_texts import Golden

# Each program builds the models, saves them, and prints what the framework itself computes: the output shape
# of every layer, and the multiply-accumulate operations of the model.

TORCH = textwrap.dedent("""
    import copy, json, torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    def block(channels):
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    act = nn.ReLU()
    encoder = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.0)
    MODELS = {
        "image": (nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, ceil_mode=True), nn.Dropout2d(), block(8), block(8), block(8),
            nn.AdaptiveAvgPool2d((3, None)), nn.Flatten(), nn.Linear(120, 10), nn.Softmax(-1)), (3, 37, 19)),
        "grouped": (nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=4, padding="same"),
            nn.Conv2d(8, 8, (3, 1), dilation=(2, 1), bias=False),
            nn.LeakyReLU(0.2), nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, output_padding=1, groups=2),
            nn.GELU(), nn.AvgPool2d(2, ceil_mode=True, padding=1)), (4, 11, 13)),
        "signal": (nn.Sequential(
            nn.ReflectionPad1d((2, 1)), nn.Conv1d(5, 12, 3), nn.GroupNorm(3, 12), nn.GLU(1),
            nn.ConvTranspose1d(6, 4, 3, stride=2), nn.AdaptiveMaxPool1d(7), nn.Flatten(1, -1),
            nn.Linear(28, 3)), (5, 21)),
        "volume": (nn.Sequential(
            nn.Conv3d(2, 4, 3, padding="valid"), nn.InstanceNorm3d(4), nn.MaxPool3d(2), nn.Flatten(2),
            nn.Linear(12, 5)), (2, 6, 6, 8)),
        "shuffle": (nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular"), nn.PixelShuffle(2),
            nn.Upsample(scale_factor=1.5),
            nn.PixelUnshuffle(3), nn.ZeroPad2d((1, 2, 0, 1)), nn.LPPool2d(2, 2), nn.Unflatten(1, (3, -1)),
            nn.Flatten(1, 2)), (1, 6, 8)),
        "mlp": (nn.Sequential(
            nn.Linear(17, 32), act, nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32, bias=False), act),
            nn.Dropout(), nn.Linear(32, 4), nn.Tanh()), (17,)),
        "encoder": (nn.Sequential(
            nn.Linear(9, 16), nn.TransformerEncoder(encoder, 3, nn.LayerNorm(16)), nn.Linear(16, 2)), (7, 9)),
        "lstm": (nn.LSTM(6, 10, num_layers=2, bidirectional=True, batch_first=True), (5, 6)),
        "gru": (nn.GRU(6, 10, num_layers=3, batch_first=True), (5, 6)),
    }
    class Residual(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
            self.second = nn.ConvTranspose2d(channels, channels, 3, padding=1, groups=2)

        def forward(self, x):
            return torch.relu(x + self.second(self.norm(self.first(x))))

    class Recorded(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
            self.blocks = nn.ModuleList(Residual(8) for _ in range(4))
            self.pool, self.head = nn.MaxPool2d(2, ceil_mode=True), nn.Linear(8, 5)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.pool(x).mean((2, 3)))

    MODELS["recorded"] = (Recorded(), (3, 34, 30))
    EXPORTED = ("image", "grouped", "signal", "shuffle", "mlp", "encoder", "lstm", "gru", "recorded")
    found = {}
    torch.backends.mkldnn.enabled = False
    for name, (model, shape) in MODELS.items():
        model.train()
        torch.save(model, name + ".pt")
        shapes = {}
        for path, each in model.named_modules(remove_duplicate=False):
            def keep(module, given, made, path=path):
                made = made[0] if isinstance(made, tuple) else made
                shapes[path.replace(".", "/")] = list(made.shape[1:])
            each.register_forward_hook(keep)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.rand(2, *shape))
        if name in EXPORTED:
            plain, example = copy.deepcopy(model).eval(), torch.rand(1, *shape)
            for each in plain.modules():
                each._forward_hooks.clear()
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                torch.jit.save(torch.jit.trace(plain, example), name + ".traced.pt")
                if name in ("grouped", "mlp", "recorded"):
                    torch.onnx.export(plain, (example,), name + ".onnx", dynamo=False)
        found[name] = {"shape": shape, "shapes": shapes, "macs": counter.get_total_flops() / 4,
                       "parameters": sum(each.numel() for each in model.parameters())}
    print("RESULT" + json.dumps(found))
""")

KERAS = textwrap.dedent("""
    import json, math, keras, numpy as np, tensorflow as tf
    from keras import Input, Model, Sequential, layers as L

    def residual(x, filters):
        y = L.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return L.Add()([x, L.BatchNormalization()(y)])

    image = x = Input((20, 24, 3), name="image")
    x = L.Conv2D(8, 5, strides=(2, 3), activation="relu")(x)
    for _ in range(3):
        x = residual(x, 8)
    inner = Sequential(
        [Input((8, 7, 8)), L.MaxPooling2D(2, padding="same"), L.Flatten(), L.Dense(6)], name="inner")
    MODELS = {"residual": Model(image, L.Dense(2, activation="tanh")(inner(x)))}
    MODELS["windows"] = Sequential([
        Input((15, 14, 4)), L.ZeroPadding2D(((1, 2), (0, 3))), L.SeparableConv2D(6, 3, depth_multiplier=2),
        L.DepthwiseConv2D((3, 2), depth_multiplier=2, padding="same"),
        L.Conv2D(8, 3),
        L.Conv2DTranspose(5, 3, strides=2, padding="same"), L.Cropping2D((1, 2)), L.UpSampling2D(2),
        L.AveragePooling2D((3, 2), strides=2), L.GlobalMaxPooling2D(keepdims=True)])
    MODELS["signal"] = Sequential([
        Input((16, 5)), L.Conv1D(6, 3, padding="causal", strides=2), L.MaxPooling1D(2),
        L.Conv1DTranspose(4, 3), L.LSTM(7, return_sequences=True, unroll=True),
        L.Bidirectional(L.GRU(3, return_sequences=True, unroll=True)),
        L.TimeDistributed(L.Dense(4)), L.SimpleRNN(5, unroll=True), L.RepeatVector(3), L.Permute((2, 1)),
        L.Reshape((3, -1)), L.GlobalAveragePooling1D()])
    one, two = Input((6,), name="one"), Input((6,), name="two")
    shared = L.Dense(5, activation="elu", name="shared")
    joined = L.Concatenate()([shared(one), shared(two), one])
    MODELS["inputs"] = Model([one, two], [L.Dense(2, name="left")(joined), L.Dense(1, name="right")(joined)])
    words = x = Input((9,), name="words")
    x = L.Embedding(30, 8)(x)
    x = L.Add()([x, L.MultiHeadAttention(2, 4, dropout=0.1)(x, x)])
    x = L.LayerNormalization()(x)
    MODELS["attention"] = Model(words, L.EinsumDense("abc,cd->abd", output_shape=(9, 3))(x))
    MODELS["volume"] = Sequential(
        [Input((6, 7, 8, 2)), L.Conv3D(3, 2), L.AveragePooling3D(2), L.Flatten(), L.Dense(2)])
    any_size = x = Input((None, None, 3), name="any")
    x = L.GlobalAveragePooling2D()(L.Conv2D(9, 3, groups=3, dilation_rate=2)(x))
    MODELS["any"] = Model(any_size, L.Dense(4)(x))

    query, keys, values = Input((3, 8)), Input((5, 8)), Input((5, 6))
    mask = Input((3, 5), dtype="bool")
    x = L.MultiHeadAttention(2, 4, value_dim=3)(query, attention_mask=mask, key=keys, value=values)
    x = L.Bidirectional(L.GRU(3, unroll=True), backward_layer=L.LSTM(3, unroll=True, go_backwards=True))(x)
    MODELS["wrapped"] = Model([query, keys, values, mask], L.SpectralNormalization(L.Dense(7))(x))
    around, again, between = Input((6,)), L.Dense(6, name="again"), L.Dense(6, name="between")
    MODELS["repeated"] = Model(around, again(between(again(again(around)))))
    steps = Input((3, 4))
    MODELS["average"] = Model(steps, L.Dense(2)(keras.ops.average(steps, axis=1)))

    def count(model):
        # The operations of the traced graph, with a batch of 1.
        given = [tf.TensorSpec((1, *each.shape[1:]), each.dtype) for each in model.inputs]
        graph = tf.function(model).get_concrete_function(given if len(given) > 1 else given[0]).graph
        total = 0
        for op in graph.get_operations():
            kind, made = op.type, op.outputs[0].shape.num_elements() if op.outputs else 0
            if kind in ("MatMul", "BatchMatMulV2"):
                turned = op.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
                total += made * op.inputs[0].shape[-2 if turned else -1]
            elif kind in ("Conv2D", "Conv3D"):
                total += made * op.inputs[1].shape[:-1].num_elements()
            elif kind == "DepthwiseConv2dNative":
                total += made * op.inputs[1].shape[:2].num_elements()
            elif kind == "Conv2DBackpropInput":
                total += op.inputs[2].shape[:-1].num_elements() * op.inputs[1].shape.num_elements()
            elif kind == "Einsum":
                left, right = op.get_attr("equation").decode().split("->")[0].split(",")
                sizes = dict(zip(left, op.inputs[0].shape)) | dict(zip(right, op.inputs[1].shape))
                total += math.prod(sizes.values())
        return total

    def shapes(model, above=""):
        found = {}
        for layer in model.layers:
            found[above + layer.name] = list(layer._inbound_nodes[0].output_tensors[0].shape[1:])
            if hasattr(layer, "layers"):
                found |= shapes(layer, above + layer.name + "/")
        return found

    found = {}
    for name, model in MODELS.items():
        model.save(name + ".keras")
        if name in ("residual", "signal"):
            model.save(name + ".h5")
        whole = all(None not in each.shape[1:] for each in model.inputs)
        found[name] = {"shapes": shapes(model), "macs": count(model) if whole else None,
                       "parameters": sum(each.shape.num_elements() if hasattr(each.shape, "num_elements")
                                         else math.prod(each.shape) for each in model.trainable_variables)}
    print("RESULT" + json.dumps(found))
""")


@functools.cache
def expected(framework: str, folder: Path) -> Any:
    def make(places: Mapping[str, Path]) -> Any:
        program = TORCH if framework == "torch" else KERAS
        status, printed = warm.run(framework, program, places[framework])
        assert status == 0, printed
        return json.loads(printed.partition("RESULT")[2])

    folder.mkdir()
    return warm.once("architecture", make, {framework: folder})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architecture")


def layers(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield model
    for layer in model["layers"]:
        yield from layers(layer)


def described(*words: object, cwd: Path | None = None) -> dict[str, Any]:
    ran = in_process("inspect", *words, "--json", cwd=cwd)
    assert ran.status == 0, ran.out
    (architecture,) = ran.json()["architecture"]
    return architecture


@pytest.mark.parametrize(
    "name", ["image", "grouped", "signal", "volume", "shuffle", "mlp", "encoder", "lstm", "gru"]
)
def test_layers_of_pickled_modules_have_torchs_shapes_and_operations(name: str, models: Path) -> None:
    reference = expected("torch", models / "torch")[name]
    shape = ",".join(map(str, reference["shape"]))
    architecture = described(models / "torch" / f"{name}.pt", "--input-shape", shape)
    shapes = {layer["path"]: layer["output"] for layer in layers(architecture["model"])}
    assert reference["shapes"].items() <= shapes.items()
    assert (architecture["macs"], architecture["parameters"]) == (reference["macs"], reference["parameters"])


@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "windows",
        "signal",
        "inputs",
        "attention",
        "volume",
        "any",
        "wrapped",
        "repeated",
        "average",
    ],
)
def test_layers_of_keras_models_have_keras_shapes_and_operations(name: str, models: Path) -> None:
    reference = expected("tensorflow", models / "keras")[name]
    for file in (models / "keras").glob(f"{name}.*"):
        architecture = described(file)
        shapes = {layer["path"]: layer["output"] for layer in layers(architecture["model"])}
        assert reference["shapes"].items() <= shapes.items()
        # The operations of a function that is no layer are not counted.
        assert architecture["macs"] == (None if name == "average" else reference["macs"])
        assert architecture["parameters"] == reference["parameters"]


@pytest.mark.parametrize(
    "name", ["image", "grouped", "signal", "shuffle", "mlp", "encoder", "lstm", "gru", "recorded"]
)
def test_traced_code_has_torchs_shapes_and_operations(name: str, models: Path) -> None:
    reference = expected("torch", models / "torch")[name]
    architecture = described(models / "torch" / f"{name}.traced.pt")
    for layer in layers(architecture["model"]):
        known = layer["output"] is not None
        # Operations that the evaluation of code leaves out end the shapes, and never make wrong ones.
        assert known or name in PARTLY
        assert not known or layer["output"][1:] == reference["shapes"].get(layer["path"], layer["output"][1:])
    assert architecture["macs"] == reference["macs"] or (architecture["macs"] is None and name in PARTLY)
    assert architecture["parameters"] == reference["parameters"]


def test_modules_of_a_list_are_layers_of_traced_code(models: Path) -> None:
    """The list itself is not called; what a block adds to its own input comes from outside of it."""
    expected("torch", models / "torch")
    model = described(models / "torch" / "recorded.traced.pt")["model"]
    blocks = [f"blocks/{number}" for number in range(4)]
    assert [layer["path"] for layer in model["layers"] if layer["parameters"]] == ["stem", *blocks, "head"]
    assert sum(layer["parameters"] for layer in model["layers"]) == model["parameters"]
    for block in model["layers"][1:5]:
        assert (block["kind"], block["flow"]) == ("Residual", "graph")
        assert [layer["path"].rpartition("/")[2] for layer in block["layers"][:3]] == [
            "first",
            "norm",
            "second",
        ]
        assert block["layers"][3]["inputs"] == ["input", f"{block['path']}/second"]


@pytest.mark.parametrize("name", ["grouped", "mlp", "recorded"])
def test_onnx_graphs_have_torchs_shapes_and_operations(name: str, models: Path) -> None:
    reference = expected("torch", models / "torch")[name]
    architecture = described(models / "torch" / f"{name}.onnx")
    assert architecture["model"]["output"][1:] == reference["shapes"][""]
    assert architecture["macs"] == reference["macs"]
    assert all(layer["output"] is not None for layer in layers(architecture["model"]))


PARTLY = ("grouped", "signal", "encoder", "lstm", "gru")


# Whole modules without torch: pickles of classes that look like its own.

CLASSES = textwrap.dedent("""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
            self.blocks = nn.ModuleList(Block() for _ in range(12))
            self.head = nn.Linear(8, 2)

    act, lin = nn.ReLU(), nn.Linear(4, 4)
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked[0].register_forward_hook(print)
    torch.save(Net(), "net.pt")
    torch.save(nn.Sequential(nn.Linear(4, 4), act, lin, act, lin), "shared.pt")
    torch.save(nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 2)), "between.pt")
    torch.save(hooked, "hooked.pt")
    torch.save({"actor": nn.Sequential(nn.Linear(3, 2), nn.Tanh()), "critic": nn.Linear(5, 1)}, "agents.pt")
    torch.save(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12))), "deep.pt")
""")


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    status, printed = warm.run("torch", CLASSES, folder)
    assert status == 0, printed
    return folder


def by_path(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {layer["path"]: layer for layer in layers(model)}


def test_the_parts_of_an_unknown_class_have_no_order_and_no_shapes(modules: Path) -> None:
    architecture = described(modules / "net.pt")
    model, parts = architecture["model"], by_path(architecture["model"])
    assert (model["kind"], model["known"], model["flow"], model["output"], architecture["macs"]) == (
        "Net", False, "parts", None, None,
    )  # fmt: skip
    assert list(parts)[1:5] == ["features", "features/0", "features/1", "features/2"]
    assert parts["features"]["flow"] == "chain"
    assert parts["blocks/11"]["class"].endswith("Block")
    assert not parts["blocks/11"]["known"]
    assert (parts["head"]["parameters"], parts["head"]["output"]) == (18, None)


def test_a_part_gets_the_shape_that_is_given_for_it(modules: Path) -> None:
    shapes = ("--input-shape", "features=3,8,8", "--input-shape", "blocks.3.first=4")
    architecture = described(modules / "net.pt", *shapes)
    parts = by_path(architecture["model"])
    assert parts["features"]["output"] == [288]
    assert parts["features"]["macs"] == 8 * 3 * 9 * 36
    assert parts["blocks/3/first"]["output"] == [8]
    assert parts["blocks/4/first"]["output"] is None
    assert (architecture["model"]["output"], architecture["macs"]) == (None, None)


def test_shapes_end_at_an_unknown_class(modules: Path) -> None:
    parts = by_path(described(modules / "between.pt")["model"])
    assert [parts[path]["output"] for path in ("0", "1", "2", "")] == [[4], None, None, None]


def test_a_shared_module_is_applied_as_often_as_it_is_listed(modules: Path) -> None:
    architecture = described(modules / "shared.pt")
    assert [layer["kind"] for layer in architecture["model"]["layers"]] == [
        "Linear",
        "ReLU",
        "Linear",
        "ReLU",
        "Linear",
    ]
    assert (architecture["macs"], architecture["parameters"]) == (3 * 16, 2 * 20)
    assert architecture["assumed"]


def test_the_output_of_a_module_with_hooks_is_unknown(modules: Path) -> None:
    architecture = described(modules / "hooked.pt", "--input-shape", "4")
    assert [layer["output"] for layer in architecture["model"]["layers"]] == [None, None]
    assert len(architecture["notes"]) == 1


def test_each_module_of_a_file_is_a_model(modules: Path) -> None:
    models = in_process("inspect", modules / "agents.pt", "--json").json()["architecture"]
    assert [(model["model"]["path"], model["model"]["kind"]) for model in models] == [
        ("actor", "Sequential"), ("critic", "Linear"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shapes",
    [["5"], ["3x"], ["=3"], ["nothing=3"], ["-1"], ["3", "3"], [""], ["99999999999999"], ["0=4,4,4"]],
)
def test_a_wrong_input_shape_is_refused(shapes: list[str], modules: Path) -> None:
    words = [word for shape in shapes for word in ("--input-shape", shape)]
    ran = in_process("inspect", modules / "between.pt", *words)
    if shapes == ["0=4,4,4"]:  # any number of axes may come before the features
        assert ran.status == 0
    else:
        refused(ran)


def test_weights_alone_have_no_layers() -> None:
    assert in_process("inspect", TORCH_SAMPLE, "--json").json()["architecture"] == []
    refused(in_process("inspect", TORCH_SAMPLE, "--input-shape", "3"))


@pytest.mark.parametrize("name", ["net", "deep", "between", "agents"])
def test_layers_as_text(name: str, modules: Path, golden: Golden) -> None:
    golden(in_process("inspect", f"{name}.pt", "--depth", 1, cwd=modules))


@pytest.mark.parametrize("name", ["net", "deep"])
def test_layers_fit_a_terminal(name: str, modules: Path, golden: Golden) -> None:
    environment = {"TERM": "dumb", "COLUMNS": "80", "LINES": "24"}
    ran = in_process("inspect", f"{name}.pt", cwd=modules, env=environment, kind=Terminal)
    lines = ran.out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    golden(ran)


def test_layers_as_a_picture(modules: Path, tmp_path: Path) -> None:
    for name in ("net", "deep", "between"):
        file = tmp_path / f"{name}.svg"
        drawn = in_process("inspect", modules / f"{name}.pt", "--dataflow", "--graph", file, "--json").json()
        root = ElementTree.fromstring(file.read_text())
        texts = {element.text for element in root.iter() if element.tag.endswith("text")}
        stages = [stage for strip in drawn["dataflow"]["networks"] for stage in strip["stages"]]
        assert stages
        assert {stage["name"] for stage in stages} <= texts


def nested(depth: int) -> dict[str, Any]:
    layer: dict[str, Any] = {"class_name": "Dense", "config": {"name": "d", "units": 3}}
    for number in range(depth):
        layer = {"class_name": "Sequential", "config": {"name": f"s{number}", "layers": [layer]}}
    return layer


def keras_file(folder: Path, config: object) -> Path:
    """Write a .keras archive with this configuration and no weights."""
    weights = folder / "w.h5"
    with h5py.File(weights, "w") as file:
        file.create_group("layers")
    with zipfile.ZipFile(folder / "m.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.0.0"}))
        archive.write(weights, "model.weights.h5")
    return folder / "m.keras"


@pytest.mark.parametrize(
    "layer",
    [
        {"class_name": "Dense", "config": {"units": 10**30}},
        {"class_name": "Dense", "config": {"units": "many"}},
        {"class_name": "Conv2D", "config": {"filters": 3, "kernel_size": [[3], 3], "strides": {}}},
        {"class_name": "Conv2D", "config": {"filters": 3, "kernel_size": [0, 0], "strides": [0, 0]}},
        {"class_name": "Reshape", "config": {"target_shape": [0, -1]}},
        {"class_name": "Reshape", "config": {"target_shape": [-1, -1]}},
        {"class_name": "Permute", "config": {"dims": ["a", None]}},
        {"class_name": "EinsumDense", "config": {"equation": "ab,bc->ad", "output_shape": [None, {}]}},
        {"class_name": "Concatenate", "config": {"axis": 70}},
        {"class_name": "TimeDistributed", "config": {"layer": {"class_name": "Flatten", "config": None}}},
        {"class_name": "Bidirectional", "config": {"layer": 3}},
        {"class_name": "MultiHeadAttention", "config": {"num_heads": 2, "key_dim": [1]}},
        {"class_name": ["Dense"], "config": {}},
        nested(60),
    ],
    ids=str,
)  # fmt: skip
def test_a_strange_configuration_is_listed_without_shapes(layer: dict[str, Any], tmp_path: Path) -> None:
    entries = [{"class_name": "InputLayer", "config": {"batch_shape": [None, 4, 4, 3]}}, layer]
    config = {"class_name": "Sequential", "config": {"name": "m", "layers": entries}}
    ran = in_process("inspect", keras_file(tmp_path, config), "--json")
    assert ran.status == 0, ran.out
    for model in ran.json()["architecture"]:
        known = [layer["output"] for layer in layers(model["model"])][2:]
        assert layer["class_name"] == "Sequential" or known == [None]


def test_a_class_without_a_module_is_not_keras_own(tmp_path: Path) -> None:
    own = {"module": None, "class_name": "Dense", "config": {"units": 3}, "registered_name": "Dense"}
    entries = [{"class_name": "InputLayer", "config": {"batch_shape": [None, 4]}}, own]
    model = described(keras_file(tmp_path, {"class_name": "Sequential", "config": {"layers": entries}}))
    assert [layer["known"] for layer in model["model"]["layers"]] == [True, False]
    assert model["macs"] is None


def functional(layers: list[dict[str, Any]], last: str) -> dict[str, Any]:
    first = {"class_name": "InputLayer", "name": "in", "inbound_nodes": []}
    first["config"] = {"name": "in", "batch_shape": [None, 3]}
    ends = {"input_layers": [["in", 0, 0]], "output_layers": [[last, 0, 0]]}
    return {"class_name": "Functional", "config": {"layers": [first, *layers], **ends}}


def dense(name: str, source: str) -> dict[str, Any]:
    config = {"name": name, "units": 3}
    return {"class_name": "Dense", "name": name, "config": config, "inbound_nodes": [[[source, 0, 0]]]}


def called_twice(depth: int) -> dict[str, Any]:
    """Return models in models, each of which is called twice by the one around it."""
    model = dense("last", "in")
    for _ in range(depth):
        inner = {**model, "name": "last", "inbound_nodes": [[["in", 0, 0]], [["in", 0, 0]]]}
        model = functional([inner], "last")
    return model


def growing(layer: dict[str, Any], count: int) -> dict[str, Any]:
    entry = {"class_name": "InputLayer", "config": {"batch_shape": [None, 8, 8, 3]}}
    return {"class_name": "Sequential", "config": {"layers": [entry, *[layer] * count]}}


CHAIN = [dense(f"d{n}", f"d{n - 1}" if n else "in") for n in range(3000)]
LARGE = {
    "models in models": called_twice(40),
    "reversed": functional(CHAIN[::-1], "d2999"),
    "images": growing({"class_name": "UpSampling2D", "config": {"size": [2**19, 2**19]}}, 1000),
    "features": growing({"class_name": "Dense", "config": {"units": 10**4000}}, 1),
    "axes": growing({"class_name": "Reshape", "config": {"target_shape": [1] * 5000 + [-1]}}, 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_sizes_and_calls_of_a_configuration_are_limited(name: str, tmp_path: Path) -> None:
    ran = in_process("inspect", keras_file(tmp_path, LARGE[name]), "--json")
    assert ran.status == 0, ran.out
    for model in ran.json()["architecture"]:
        assert model["model"]["output"] is None
        assert len(json.dumps(model)) < 1 << 20


@pytest.mark.parametrize(("name", "shapes"), [("inputs", ["6"]), ("residual", ["20,30,3"])])
def test_a_shape_that_the_stored_weights_do_not_fit_is_refused(
    name: str, shapes: list[str], models: Path
) -> None:
    expected("tensorflow", models / "keras")
    refused(in_process("inspect", models / "keras" / f"{name}.keras", "--input-shape", *shapes))


def test_the_shape_of_a_list_of_modules_is_refused(modules: Path) -> None:
    refused(in_process("inspect", modules / "net.pt", "--input-shape", "blocks=4"))


def test_settings_other_than_the_defaults_of_their_class_are_listed(tmp_path: Path) -> None:
    import torch
    from torch import nn

    rows = {
        "plain": nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.RMSNorm(4), nn.MaxPool2d(2)),
        "set": nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=3), nn.LayerNorm(4, 1e-3), nn.RMSNorm(4, 1e-5), nn.MaxPool2d(2, 1)
        ),
    }
    details = {}
    for name, module in rows.items():
        torch.save(module, tmp_path / f"{name}.pt")
        model = described(tmp_path / f"{name}.pt")["model"]
        details[name] = [layer["detail"] for layer in layers(model)][1:]
    assert details["plain"] == ["3 -> 4, 3x3", None, None, "2x2"]
    assert details["set"] == ["3 -> 4, 3x3, stride 3", "eps 0.001", "eps 1e-05", "2x2, stride 1"]


def test_each_norm_of_keras_has_its_own_default_of_epsilon(tmp_path: Path) -> None:
    def norm(cls: str, epsilon: float) -> dict[str, Any]:
        config = {"name": f"{cls}_{epsilon}", "epsilon": epsilon}
        return {"class_name": cls, "module": "keras.layers", "config": config}

    rows = [norm(cls, n) for cls in ("LayerNormalization", "RMSNormalization") for n in (1e-3, 1e-6)]
    file = keras_file(tmp_path, {"class_name": "Sequential", "module": "keras", "config": {"layers": rows}})
    model = described(file)["model"]
    assert [layer["detail"] for layer in layers(model)][1:] == [None, "eps 1e-06", "eps 0.001", None]
