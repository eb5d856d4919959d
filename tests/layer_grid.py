"""Layers of both frameworks by kind and hyper-parameter, converted both ways and run by the other framework.

    python -m tests.layer_grid [NAME ...]

A process of each framework makes layers with random numbers, saves each in files of its own and records its
outputs (`build`), and later fills layers from the converted files, strictly, and records theirs (`load`).
Every conversion must give equal outputs or be refused. Where a file has no classes, `assumed` may name what
was taken for granted. test_layer_grid.py runs a sample.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Pair:
    """The same layer in both frameworks, by the expressions that make it.

    Without one of the two the other framework has no such layer: every conversion must be refused. `shape` is
    the input's, batch first and channels last; `images` are turned for PyTorch. `arguments` is how often the
    input is passed, `words` says that it is whole numbers below 6. `kinds` are the conversion's options
    (`--kind`) from PyTorch, `back` those from Keras. `only` is the one direction that is tried. `refuses` are
    sources that do not hold enough; `known` says that only files with the layers' classes do.
    """

    torch: str
    keras: str
    shape: tuple[int, ...]
    images: bool = False
    arguments: int = 1
    words: bool = False
    kinds: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    only: str = ""
    refuses: tuple[str, ...] = ()
    known: bool = False


FROM_TORCH, FROM_KERAS = "from torch", "from keras"
LAST = (2, 6, 3)
# Files whose variables have numbers and no names: one vector of a norm may be its scale or its offset.
NUMBERED = ("model.weights.h5",)


def _dense() -> dict[str, Pair]:
    pairs = {}
    for bias in (True, False):
        for n_in, n_out in ((4, 3), (5, 5)):
            pairs[f"dense {n_in}x{n_out} bias={bias}"] = Pair(
                f"nn.Linear({n_in}, {n_out}, bias={bias})",
                f"layers.Dense({n_out}, use_bias={bias})",
                (2, n_in),
                kinds=() if bias else ("layer=dense",),
            )
    for name, torch in (
        ("embedding", "nn.Embedding(6, 4)"),
        ("padded embedding", "nn.Embedding(6, 4, padding_idx=0)"),
    ):
        pairs[name] = Pair(torch, "layers.Embedding(6, 4)", (2, 3), words=True, kinds=("layer=embedding",))
    pairs["square embedding"] = Pair(
        "nn.Embedding(6, 6)", "layers.Embedding(6, 6)", (2, 3), words=True, kinds=("layer=embedding",)
    )
    return pairs


def _convolutions() -> dict[str, Pair]:
    pairs = {}
    space = {1: (9,), 2: (7, 8), 3: (5, 6, 5)}
    for n in (1, 2, 3):
        for bias in (True, False):
            for groups, channels, out in ((1, 4, 6), (2, 4, 6), (1, 1, 4), (1, 4, 1), (1, 3, 3)):
                pairs[f"conv{n}d {channels}>{out} groups={groups} bias={bias}"] = Pair(
                    f"nn.Conv{n}d({channels}, {out}, 3, stride=2, groups={groups}, bias={bias})",
                    f"layers.Conv{n}D({out}, 3, strides=2, groups={groups}, use_bias={bias})",
                    (2, *space[n], channels),
                    images=True,
                    kinds=("layer=convolution",),
                    back=("layer=convolution",),
                )
            for channels, out in ((3, 5), (4, 4), (3, 1), (1, 3)):
                pairs[f"conv{n}d transposed {channels}>{out} bias={bias}"] = Pair(
                    f"nn.ConvTranspose{n}d({channels}, {out}, 3, stride=2, bias={bias})",
                    f"layers.Conv{n}DTranspose({out}, 3, strides=2, use_bias={bias})",
                    (2, *space[n], channels),
                    images=True,
                    kinds=("layer=convolution",),
                    back=("layer=convolution",),
                )
            pairs[f"conv{n}d transposed, padded, bias={bias}"] = Pair(
                f"nn.ConvTranspose{n}d(3, 5, 4, stride=2, padding=1, bias={bias})",
                f"layers.Conv{n}DTranspose(5, 4, strides=2, use_bias={bias}, padding='same')",
                (2, *space[n], 3),
                images=True,
            )
            if n < 3:
                for multiplier in (1, 2):
                    for channels in (1, 3):
                        outputs = channels * multiplier
                        pairs[f"depthwise{n}d {channels} x{multiplier} bias={bias}"] = Pair(
                            f"nn.Conv{n}d({channels}, {outputs}, 3, groups={channels}, bias={bias})",
                            f"layers.DepthwiseConv{n}D(3, depth_multiplier={multiplier}, use_bias={bias})",
                            (2, *space[n], channels),
                            images=True,
                            kinds=(f"layer=depthwise:{multiplier}",),
                            back=("layer=depthwise",),
                        )
                pairs[f"separable{n}d bias={bias}"] = Pair(
                    f"nn.Sequential(OrderedDict(depthwise=nn.Conv{n}d(3, 6, 3, groups=3, bias=False), "
                    f"pointwise=nn.Conv{n}d(6, 5, 1, bias={bias})))",
                    f"layers.SeparableConv{n}D(5, 3, depth_multiplier=2, use_bias={bias})",
                    (2, *space[n], 3),
                    images=True,
                    kinds=("layer=separable:2",),
                )
    for n in (1, 2):
        pairs[f"grouped conv{n}d transposed"] = Pair(
            f"nn.ConvTranspose{n}d(4, 6, 3, groups=2)", "", (2, *space[n], 4), images=True
        )
    return pairs


def _norms() -> dict[str, Pair]:
    pairs = {}
    for affine in (True, False):
        for n in (1, 2, 3):
            pairs[f"batch norm {n}d affine={affine}"] = Pair(
                f"nn.BatchNorm{n}d(3, eps=1e-3, affine={affine})",
                f"layers.BatchNormalization(scale={affine}, center={affine})",
                (2, *(4, 5, 6)[:n], 3),
                images=True,
            )
    for bias in (True, False):
        pairs[f"layer norm bias={bias}"] = Pair(
            f"nn.LayerNorm(6, eps=1e-3, bias={bias})",
            f"layers.LayerNormalization(center={bias})",
            (2, 5, 6),
            kinds=("layer=layer_norm",),
            refuses=() if bias else NUMBERED,
        )
        pairs[f"layer norm over two axes bias={bias}"] = Pair(
            f"nn.LayerNorm((5, 6), eps=1e-3, bias={bias})",
            f"layers.LayerNormalization(axis=[1, 2], center={bias})",
            refuses=() if bias else NUMBERED,
            shape=(2, 5, 6),
            kinds=("layer=layer_norm",),
        )
        pairs[f"layer norm over a square bias={bias}"] = Pair(
            f"nn.LayerNorm((6, 6), eps=1e-3, bias={bias})",
            f"layers.LayerNormalization(axis=[1, 2], center={bias})",
            refuses=() if bias else NUMBERED,
            shape=(2, 6, 6),
            kinds=("layer=layer_norm",),
        )
    for name, size in (("images", (3, 4, 5)), ("equal images", (4, 4, 4))):
        channels, *space = size
        pairs[f"layer norm over {name}"] = Pair(
            f"nn.LayerNorm({size}, eps=1e-3)",
            "layers.LayerNormalization(axis=[1, 2, 3])",
            (2, *space, channels),
            images=True,
            kinds=("layer=layer_norm_images",),
            back=("layer=layer_norm_images",),
        )
    pairs["layer norm without scale"] = Pair(
        "nn.LayerNorm(6, eps=1e-3)",
        "layers.LayerNormalization(scale=False)",
        (2, 5, 6),
        only=FROM_KERAS,
        refuses=NUMBERED,
    )
    pairs["layer norm that does not centre"] = Pair(
        "", "layers.LayerNormalization(center=False, rms_scaling=True)", (2, 5, 6), known=True
    )
    pairs["rms norm"] = Pair(
        "nn.RMSNorm(6, eps=1e-6)",
        "layers.RMSNormalization(epsilon=1e-6)",
        (2, 5, 6),
        kinds=("layer=rms_norm",),
    )
    pairs["rms norm over two axes"] = Pair(
        "nn.RMSNorm((5, 6), eps=1e-6)",
        "layers.RMSNormalization(axis=[1, 2], epsilon=1e-6)",
        (2, 5, 6),
        kinds=("layer=rms_norm",),
    )
    pairs["rms norm over a square"] = Pair(
        "nn.RMSNorm((6, 6), eps=1e-6)",
        "layers.RMSNormalization(axis=[1, 2], epsilon=1e-6)",
        (2, 6, 6),
        kinds=("layer=rms_norm",),
    )
    for groups in (1, 2, 4):
        pairs[f"group norm of {groups}"] = Pair(
            f"nn.GroupNorm({groups}, 4, eps=1e-3)",
            f"layers.GroupNormalization(groups={groups})",
            (2, 5, 5, 4),
            images=True,
        )
    pairs["instance norm"] = Pair(
        "nn.InstanceNorm2d(4, eps=1e-3, affine=True)",
        "layers.GroupNormalization(groups=-1)",
        (2, 5, 5, 4),
        images=True,
    )
    pairs["batch norm without statistics"] = Pair(
        "nn.BatchNorm2d(3, eps=1e-3, track_running_stats=False)", "", (2, 4, 5, 3), images=True, known=True
    )
    pairs["prelu of channels"] = Pair(
        "nn.PReLU(3)", "layers.PReLU(shared_axes=[1, 2])", (2, 5, 4, 3), images=True, kinds=("layer=prelu:2",)
    )
    pairs["prelu of a sequence"] = Pair(
        "nn.PReLU(3)", "layers.PReLU(shared_axes=[1])", (2, 5, 3), images=True, kinds=("layer=prelu:1",)
    )
    pairs["prelu of one"] = Pair(
        "nn.PReLU()",
        "layers.PReLU(shared_axes=[1, 2, 3])",
        (2, 5, 4, 3),
        images=True,
        kinds=("layer=prelu:2",),
    )
    pairs["prelu of a vector"] = Pair(
        "nn.PReLU(3)", "layers.PReLU()", (2, 3), images=False, kinds=("layer=prelu",)
    )
    pairs["prelu of places"] = Pair("", "layers.PReLU()", (2, 5, 4, 3))
    pairs["prelu of columns"] = Pair("", "layers.PReLU(shared_axes=[2, 3])", (2, 5, 4, 3))
    return pairs


def _recurrent() -> dict[str, Pair]:
    pairs = {}
    cells = {"LSTM": "LSTM", "GRU": "GRU", "RNN": "SimpleRNN"}
    for torch, keras in cells.items():
        for bias in (True, False):
            gru = ", reset_after=True" if torch == "GRU" else ""
            for size in (5, 3):
                pairs[f"{torch} {size} bias={bias}"] = Pair(
                    f"nn.{torch}(3, {size}, batch_first=True, bias={bias})",
                    f"layers.{keras}({size}, return_sequences=True, use_bias={bias}{gru})",
                    LAST,
                    back=("layer=gru",) if torch == "GRU" and not bias else (),
                )
            pairs[f"{torch} both ways bias={bias}"] = Pair(
                f"nn.{torch}(3, 4, batch_first=True, bidirectional=True, bias={bias})",
                f"layers.Bidirectional(layers.{keras}(4, return_sequences=True, use_bias={bias}{gru}))",
                LAST,
                back=("**=gru",) if torch == "GRU" and not bias else (),
            )
    pairs["GRU that resets before"] = Pair(
        "", "layers.GRU(5, return_sequences=True, reset_after=False)", LAST
    )
    pairs["GRU that resets before, without bias"] = Pair(
        "", "layers.GRU(5, return_sequences=True, reset_after=False, use_bias=False)", LAST
    )
    pairs["projected LSTM"] = Pair("nn.LSTM(3, 5, proj_size=2, batch_first=True)", "", LAST)
    pairs["projected LSTM to its width"] = Pair("nn.LSTM(3, 5, proj_size=4, batch_first=True)", "", LAST)
    pairs["relu RNN"] = Pair(
        "nn.RNN(3, 5, nonlinearity='relu', batch_first=True)",
        "layers.SimpleRNN(5, activation='relu', return_sequences=True)",
        LAST,
    )
    return pairs


def _composed() -> dict[str, Pair]:
    pairs = {}
    for heads in (1, 2, 4):
        for bias in (True, False):
            pairs[f"attention heads={heads} bias={bias}"] = Pair(
                f"nn.MultiheadAttention(8, {heads}, batch_first=True, bias={bias})",
                f"layers.MultiHeadAttention(num_heads={heads}, key_dim={8 // heads}, use_bias={bias})",
                (2, 6, 8),
                arguments=2,
                kinds=(f"layer=attention:{heads}",),
            )
    pairs["attention of a width of its own"] = Pair(
        "", "layers.MultiHeadAttention(num_heads=2, key_dim=3)", (2, 6, 8), arguments=2
    )
    pairs["attention with biases of keys"] = Pair(
        "nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)", "", (2, 6, 8)
    )
    pairs["grouped query attention"] = Pair("", "layers.GroupQueryAttention(4, 4, 2)", (2, 6, 8), arguments=2)
    pairs["bilinear"] = Pair("nn.Bilinear(4, 4, 3)", "", (2, 4), known=True)
    pairs["weight norm"] = Pair("torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))", "", (2, 4))
    with_norm = "torch.nn.utils.weight_norm(nn.Linear(4, 3))"
    pairs["old weight norm"] = Pair(with_norm, "", (2, 4))
    pairs["spectral norm"] = Pair(
        "torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))", "", (2, 4)
    )
    pairs["old spectral norm"] = Pair("torch.nn.utils.spectral_norm(nn.Linear(4, 3))", "", (2, 4))
    for n_in, n_out in ((4, 3), (4, 4)):
        pairs[f"einsum dense {n_in}x{n_out}"] = Pair(
            f"nn.Linear({n_in}, {n_out})",
            f"layers.EinsumDense('abc,cd->abd', output_shape=(None, {n_out}), bias_axes='d')",
            (2, 5, n_in),
            back=("layer=dense",),
        )
    pairs["turned einsum dense"] = Pair(
        "nn.Linear(4, 4)",
        "layers.EinsumDense('abc,dc->abd', output_shape=(None, 4), bias_axes='d')",
        (2, 5, 4),
        back=("layer=dense_out_in",),
        only=FROM_KERAS,
    )
    pairs["turned einsum dense without bias"] = Pair(
        "nn.Linear(4, 4, bias=False)",
        "layers.EinsumDense('abc,dc->abd', output_shape=(None, 4))",
        (2, 5, 4),
        back=("layer=dense_out_in",),
        only=FROM_KERAS,
    )
    pairs["einsum dense over three axes"] = Pair(
        "", "layers.EinsumDense('abc,cde->abde', output_shape=(None, 2, 3), bias_axes='de')", (2, 5, 4)
    )
    pairs["lora dense"] = Pair(
        "nn.Linear(4, 3)", "Lora(layers.Dense(3))", (2, 4), only=FROM_KERAS, refuses=("keras/ckpt",)
    )
    pairs["quantised dense"] = Pair("", "Quantised(layers.Dense(3))", (2, 4))
    pairs["own [in, out] layer"] = Pair(
        "Own(torch.randn(4, 3), 3)",
        "layers.Dense(3)",
        (2, 4),
        kinds=("layer=dense_in_out",),
        only=FROM_TORCH,
    )
    pairs["own wide [in, out] layer"] = Pair(
        "Own(torch.randn(3, 5), 5)",
        "layers.Dense(5)",
        (2, 3),
        kinds=("layer=dense_in_out",),
        only=FROM_TORCH,
    )
    pairs["own square [in, out] layer"] = Pair(
        "Own(torch.randn(4, 4), 4)",
        "layers.Dense(4)",
        (2, 4),
        kinds=("layer=dense_in_out",),
        only=FROM_TORCH,
    )
    pairs["own [out, in] kernel"] = Pair(
        "nn.Linear(4, 3)",
        "OutIn(3)",
        (2, 4),
        back=("layer=dense_out_in",),
        only=FROM_KERAS,
        refuses=("model.keras", "model.weights.h5"),
    )
    pairs["own square [out, in] kernel"] = Pair(
        "nn.Linear(4, 4)",
        "OutIn(4)",
        (2, 4),
        back=("layer=dense_out_in",),
        only=FROM_KERAS,
        refuses=("model.keras",),
    )
    pairs["own gamma and beta"] = Pair("", "Film()", (2, 4), known=True)
    return pairs


PAIRS: dict[str, Pair] = {**_dense(), **_convolutions(), **_norms(), **_recurrent(), **_composed()}


def layer_input(name: str) -> np.ndarray:
    """Return the input of a layer."""
    pair = PAIRS[name]
    generator = np.random.default_rng(3)
    if pair.words:
        return generator.integers(0, 6, pair.shape)
    return generator.standard_normal(pair.shape).astype(np.float32)


def number(name: str) -> int:
    """Return a layer's number, its folder's name."""
    return list(PAIRS).index(name)


# --- PyTorch -----------------------------------------------------------------------------------------


def torch_modules() -> dict[str, Any]:
    """Return what the expressions of PyTorch may name."""
    from collections import OrderedDict

    import torch
    from torch import nn

    class Own(nn.Module):
        def __init__(self, weight: Any, outputs: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))

        def forward(self, x: Any) -> Any:
            return x @ self.weight + self.bias

    # Pickled by name, as classes of a program are.
    for cls in (Own,):
        cls.__qualname__ = cls.__name__
        cls.__module__ = "__main__"
        import __main__

        setattr(__main__, cls.__name__, cls)
    return {"torch": torch, "nn": nn, "OrderedDict": OrderedDict, "Own": Own}


def torch_call(pair: Pair, module: Any, data: np.ndarray) -> np.ndarray:
    import torch

    x = torch.from_numpy(data)
    with torch.no_grad():
        if pair.images:
            output = torch.movedim(module(torch.movedim(x, -1, 1)), 1, -1)
        else:
            twice = isinstance(module, torch.nn.Bilinear)
            both = isinstance(module, torch.nn.MultiheadAttention)
            output = module(*[x] * (1 + twice + 2 * both))
    return np.asarray(output[0] if isinstance(output, tuple) else output)


def torch_build(folder: Path, names_wanted: list[str]) -> None:
    """Save every layer of PyTorch as a state_dict and as a whole module, below the name `layer`."""
    names = torch_modules()
    torch = names["torch"]
    generator = torch.Generator().manual_seed(1)
    for name in names_wanted:
        pair = PAIRS[name]
        if not pair.torch or pair.only == FROM_KERAS:
            continue
        position = folder / str(number(name))
        position.mkdir(parents=True, exist_ok=True)
        module = torch.nn.ModuleDict({"layer": eval(pair.torch, names)})
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                value = torch.randn(tensor.shape, generator=generator) * 0.4
                tensor.copy_(value.abs() + 0.5 if key.endswith("running_var") else value)
        module.eval()
        np.save(position / "torch.npy", torch_call(pair, module["layer"], layer_input(name)))
        torch.save(module.state_dict(), position / "torch.pt")
        # Parametrised modules are not pickled.
        with contextlib.suppress(RuntimeError):
            torch.save(module, position / "torch_whole.pt")


def torch_load(jobs: dict[str, list[str]]) -> dict[str, Any]:
    names = torch_modules()
    torch = names["torch"]
    result: dict[str, Any] = {}
    for name, files in jobs.items():
        pair = PAIRS[name]
        for file in files:
            try:
                module = torch.nn.ModuleDict({"layer": eval(pair.torch, names)})
                module.load_state_dict(torch.load(file, weights_only=True), strict=True)
                module.eval()
                result[file] = torch_call(pair, module["layer"], layer_input(name)).tolist()
            except Exception as error:  # noqa: BLE001
                result[file] = f"{type(error).__name__}: {error}"
    return result


# --- Keras -------------------------------------------------------------------------------------------


def keras_modules() -> dict[str, Any]:
    import keras

    class OutIn(keras.layers.Layer):
        def __init__(self, units: int, **more: Any) -> None:
            super().__init__(**more)
            self.units = units

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(name="kernel", shape=(self.units, shape[-1]))
            self.bias = self.add_weight(name="bias", shape=(self.units,))

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(self.kernel)) + self.bias

        def get_config(self) -> Any:
            return {**super().get_config(), "units": self.units}

    class Film(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.gamma = self.add_weight(name="gamma", shape=(shape[-1],))
            self.beta = self.add_weight(name="beta", shape=(shape[-1],))

        def call(self, x: Any) -> Any:
            return x * self.gamma + self.beta

    def lora(layer: Any) -> Any:
        layer.build((2, 4))
        layer.enable_lora(2)
        return layer

    def quantised(layer: Any) -> Any:
        layer.build((2, 4))
        layer.quantize("int8")
        return layer

    return {
        "keras": keras,
        "layers": keras.layers,
        "OutIn": OutIn,
        "Film": Film,
        "Lora": lora,
        "Quantised": quantised,
    }


def keras_call(pair: Pair, layer: Any, data: np.ndarray) -> np.ndarray:
    return np.asarray(layer(*[data] * pair.arguments))


def _model(keras: Any, pair: Pair, names: dict[str, Any]) -> tuple[Any, Any]:
    """Return a layer and a model of it alone, where it is called `layer`."""
    layer = eval(pair.keras, names)
    inputs = keras.Input(pair.shape[1:], dtype="int64" if pair.words else "float32")
    layer.name = "layer"
    return layer, keras.Model(inputs, layer(*[inputs] * pair.arguments))


def keras_build(folder: Path, names_wanted: list[str]) -> None:
    """Save every layer of Keras as TensorFlow's objects (attribute `layer`) and as a whole model."""
    import tensorflow as tf

    names = keras_modules()
    keras = names["keras"]
    generator = np.random.default_rng(5)
    for name in names_wanted:
        pair = PAIRS[name]
        if not pair.keras or pair.only == FROM_TORCH:
            continue
        saved = folder / str(number(name))
        saved.mkdir(parents=True, exist_ok=True)
        layer, model = _model(keras, pair, names)
        for variable in layer.weights:
            if "int8" in str(variable.dtype) or "seed" in variable.path:
                continue
            value = generator.standard_normal(tuple(variable.shape)).astype(np.float32) * 0.4
            variable.assign(np.abs(value) + 0.5 if "variance" in variable.path else value)
        np.save(saved / "keras.npy", keras_call(pair, layer, layer_input(name)))
        tf.train.Checkpoint(layer=layer).write(str(saved / "keras" / "ckpt"))
        model.save(saved / "model.keras")
        model.save_weights(saved / "model.weights.h5")


def keras_load(jobs: dict[str, list[str]]) -> dict[str, Any]:
    import tensorflow as tf

    names = keras_modules()
    keras = names["keras"]
    outputs: dict[str, Any] = {}
    for name, files in jobs.items():
        pair = PAIRS[name]
        for file in files:
            try:
                layer, _ = _model(keras, pair, names)
                if file.endswith(".h5"):

                    class Model(keras.Model):  # type: ignore[misc]
                        """The layer as an attribute."""

                    model = Model()
                    model.layer = layer
                    model.built = True
                    model.load_weights(file)
                else:
                    status = tf.train.Checkpoint(layer=layer).restore(file)
                    status.assert_existing_objects_matched()
                outputs[file] = keras_call(pair, layer, layer_input(name)).tolist()
            except Exception as error:  # noqa: BLE001
                outputs[file] = f"{type(error).__name__}: {str(error)[:600]}"
    return outputs


def run(framework: str, what: str, folder: Path) -> None:
    """Build the layers that `build.json` names, or load the files of `FRAMEWORK_jobs.json`."""
    if what == "build":
        expected = json.loads((folder / "build.json").read_text())
        (torch_build if framework == "torch" else keras_build)(folder, expected)
        return
    jobs = json.loads((folder / f"{framework}_jobs.json").read_text())
    answer = (torch_load if framework == "torch" else keras_load)(jobs)
    (folder / f"{framework}_answers.json").write_text(json.dumps(answer))


# --- Here --------------------------------------------------------------------------------------------

TOLERANCE = 1e-5
SOURCES = {
    FROM_TORCH: ("torch.pt", "torch_whole.pt"),
    FROM_KERAS: ("keras/ckpt", "model.keras", "model.weights.h5"),
}
# Files that have no classes of layers.
UNKNOWN = frozenset(("torch.pt", "keras/ckpt"))
_FRAMEWORKS = {"torch": "torch", "keras": "tensorflow"}


class Cell(NamedTuple):
    """One conversion: layer, direction, source, form and path of the target, options; and what came of it."""

    name: str
    direction: str
    source: str
    to: str
    options: tuple[str, ...]
    target: str
    written: bool
    assumed: tuple[str, ...]
    reason: str

    def fault(self, answer: Any, requested: Path) -> str:
        """Return what is wrong, "" if nothing is; `answer` are outputs, or why the target does not load."""
        pair = PAIRS[self.name]
        alone = not (pair.torch and pair.keras)
        options = pair.kinds if self.direction == FROM_TORCH else pair.back
        needed = bool(options) and not self.options
        decided = not (self.source in UNKNOWN and (pair.known or not self.options))
        if not self.written:
            allowed = alone or needed or self.source in pair.refuses
            return "" if allowed else f"refused: {self.reason}"
        if alone:
            return "written, and has no equivalent" if decided or not pair.known else ""
        if isinstance(answer, str):
            return answer if decided and not needed else ""
        outputs, expected = np.array(answer), np.load(requested)
        equal = outputs.shape == expected.shape and float(np.abs(outputs - expected).max()) <= TOLERANCE
        return "" if equal or (self.assumed and not decided) else "other outputs, and nothing said"


def _child(framework: str, what: str, folder: Path) -> None:
    from tests import warm

    root = str(Path(__file__).resolve().parent.parent)
    program = (
        f"import sys; sys.path.insert(0, {root!r})\nfrom pathlib import Path\nfrom tests import layer_grid\n"
        f"layer_grid.run({framework!r}, {what!r}, Path({str(folder)!r}))"
    )
    status, output = warm.run(_FRAMEWORKS[framework], program, folder)
    if status:
        raise RuntimeError(output[-2000:])


def _cells(name: str, folder: Path) -> Iterator[Cell]:
    """Convert what there is of one layer."""
    from ckpttool.commands.convert import convert
    from ckpttool.core import CkpttoolError

    pair = PAIRS[name]
    for direction, sources in SOURCES.items():
        options = pair.kinds if direction == FROM_TORCH else pair.back
        for source in sources:
            saved = folder / str(number(name)) / source
            if not (saved.exists() or Path(f"{saved}.index").exists()):
                continue
            for kinds in dict.fromkeys(((), options)):
                for to in ("tf", "keras") if direction == FROM_TORCH else ("torch",):
                    stem = f"made_{source.replace('/', '_')}_{len(kinds)}_{to}"
                    suffix = {"tf": "/ckpt-1", "keras": ".weights.h5", "torch": ".pt"}[to]
                    target = folder / str(number(name)) / f"{stem}{suffix}"
                    target.parent.mkdir(exist_ok=True)
                    written, assumed, reason = False, (), ""
                    try:
                        done = convert(str(saved), str(target), to=to, kinds=kinds, sync=False, verify=False)
                        written, assumed = done.written and done.report.complete, done.report.assumed
                        reason = "; ".join(done.report.notes)
                    except CkpttoolError as error:
                        reason = str(error)
                    yield Cell(name, direction, source, to, kinds, str(target), written, assumed, reason)


def faults(names: Sequence[str], folder: Path) -> tuple[list[str], int, int]:
    """Convert layers both ways; return what is wrong, how many conversions there were and were equal."""
    (folder / "build.json").write_text(json.dumps(list(names)))
    for framework in _FRAMEWORKS:
        _child(framework, "build", folder)
    cells = [cell for name in names for cell in _cells(name, folder)]
    answers: dict[str, Any] = {}
    for framework in _FRAMEWORKS:
        jobs: dict[str, list[str]] = {}
        for cell in cells:
            pair = PAIRS[cell.name]
            if cell.written and pair.torch and pair.keras and (cell.to == "torch") == (framework == "torch"):
                jobs.setdefault(cell.name, []).append(cell.target)
        (folder / f"{framework}_jobs.json").write_text(json.dumps(jobs))
        _child(framework, "load", folder)
        answers |= json.loads((folder / f"{framework}_answers.json").read_text())
    wrong = []
    for cell in cells:
        file = "torch.npy" if cell.direction == FROM_TORCH else "keras.npy"
        fault = cell.fault(answers.get(cell.target), folder / str(number(cell.name)) / file)
        if fault:
            options = " ".join(cell.options)
            wrong.append(f"{cell.name}, {cell.source} to {cell.to} {options}: {fault}")
    return wrong, len(cells), sum(isinstance(answers.get(cell.target), list) for cell in cells)


def main() -> None:
    """Run the layers whose names contain an argument, all without one; exit 1 where one is wrong."""
    names = [name for name in PAIRS if not sys.argv[1:] or any(pattern in name for pattern in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        wrong, cells, run_again = faults(names, Path(folder))
    sys.stdout.write("".join(f"{fault}\n" for fault in wrong))
    sys.stdout.write(f"{len(names)} layers, {cells} conversions, {run_again} run again, {len(wrong)} wrong\n")
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
