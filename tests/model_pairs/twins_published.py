"""Models of keras.applications that torchvision has, too, and those of Transformers in both frameworks.

Needs torchvision, transformers<4.50 and tf_keras, which are no dependencies: `python -m
tests.model_pairs.twins --published`. The images' sides are odd, as both libraries pad even ones differently,
and torchvision's models have Keras's epsilon. All have their own random initial numbers, with others added so
that no two vectors are equal.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_pairs import hugging_face, twins
from tests.model_pairs.nobuco_peer import define_operators

CLASSES = 10
# torchvision's function, and arguments of Keras's, by the name of Keras's function.
APPLICATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet50": ("resnet50", {}),
    "VGG16": ("vgg16", {"include_top": False}),
    "MobileNetV2": ("mobilenet_v2", {}),
    "MobileNetV3Small": ("mobilenet_v3_small", {"include_preprocessing": False}),
    "DenseNet121": ("densenet121", {}),
    "EfficientNetB0": ("efficientnet_b0", {}),
    "EfficientNetV2S": ("efficientnet_v2_s", {"include_preprocessing": False}),
    "ConvNeXtTiny": ("convnext_tiny", {"include_preprocessing": False}),
}
_SIDE = 33


def _noise(value: np.ndarray, draw: np.random.Generator, *, positive: bool) -> np.ndarray:
    noisy = value + draw.normal(0, 0.1, value.shape)
    return (np.abs(noisy) + 0.3 if positive else noisy).astype(np.float32)


class _Keras(twins.Keras):
    def build(self, pair: twins.Twins, seed: int) -> Any:
        """Return the model with its own random numbers and others added to vectors."""
        import keras

        keras.utils.set_random_seed(seed)
        model = pair.make()[0]()
        draw = np.random.default_rng(seed)
        for variable in model.weights:
            if sum(extent > 1 for extent in variable.shape) == 1 and "normalization/" not in variable.path:
                positive = "variance" in variable.path
                variable.assign(_noise(np.asarray(variable), draw, positive=positive))
        return model


class _Torch(twins.Torch):
    def build(self, pair: twins.Twins, seed: int) -> Any:
        """Return the model with its own random numbers and others added to vectors."""
        import torch

        torch.manual_seed(seed)
        model = pair.make()[1]()
        draw = np.random.default_rng(seed)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point() and sum(extent > 1 for extent in tensor.shape) == 1:
                    noisy = _noise(tensor.numpy(), draw, positive=name.endswith("running_var"))
                    tensor.copy_(torch.from_numpy(noisy))
        return model.eval()


def _torch_transformer(name: str) -> Any:
    define_operators()  # Transformers imports torchvision
    return hugging_face.torch_model(name)


def keras_application(name: str) -> Any:
    """Return a model of keras.applications that gives the logits of ten classes, or features."""
    import keras

    arguments = {"classes": CLASSES, "classifier_activation": None, **APPLICATIONS[name][1]}
    if not arguments.get("include_top", True):
        del arguments["classes"], arguments["classifier_activation"]
    return getattr(keras.applications, name)(weights=None, input_shape=(_SIDE, _SIDE, 3), **arguments)


def torch_application(name: str) -> Any:
    """Return the same of torchvision, with what Keras has otherwise: epsilon, ResNet's strides and biases."""
    import torch
    from torch import nn

    define_operators()
    import torchvision

    model = getattr(torchvision.models, APPLICATIONS[name][0])(num_classes=CLASSES)
    epsilon = 1.001e-5 if name in ("ResNet50", "DenseNet121") else 1e-3
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = epsilon
        elif type(module).__name__ == "Bottleneck":
            module.conv1.stride, module.conv2.stride = module.conv2.stride, (1, 1)
        if name == "ResNet50" and isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
    if name == "VGG16":
        return model.features
    if name == "EfficientNetB0":
        return _Scaled(model)
    return model


def _Scaled(model: Any) -> Any:  # noqa: N802  # makes a module
    """Return the model of pixels of 0 to 255, as Keras's is."""
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x / 255)

    return Scaled()


class _TransformersKeras(twins.Keras):
    def outputs(self, model: Any, pair: twins.Twins, seed: int, scale: float = 1.0) -> list[np.ndarray]:
        """Return all outputs: hidden states, and what a pooler makes of them."""
        x = twins.random_inputs(pair, "keras", seed, scale)
        outputs = model(dict(zip(pair.keys, x, strict=True)), training=False)
        return [output.numpy() for output in outputs.to_tuple()]

    def save(self, model: Any, form: str, folder: Path, pair: twins.Twins) -> str:
        """Write the model as its library does, as a SavedModel, or as a checkpoint."""
        import tensorflow as tf

        if form == "h5":
            model.save_pretrained(folder / form, safe_serialization=False)
            return str(folder / form / "tf_model.h5")
        if form == "keras_safetensors":
            model.save_pretrained(folder / form, safe_serialization=True)
            return str(folder / form / "model.safetensors")
        if form == "saved_model":
            rows = [
                tf.TensorSpec((None, *x.shape[1:]), x.dtype) for x in twins.random_inputs(pair, "keras", 1)
            ]
            keys = pair.keys

            @tf.function(input_signature=rows)
            def serve(*inputs: Any) -> Any:
                return dict(model(dict(zip(keys, inputs, strict=True)), training=False))

            tf.saved_model.save(model, str(folder / form), signatures=serve)
            return str(folder / form)
        return super().save(model, form, folder, pair)


class _TransformersTorch(twins.Torch):
    def outputs(self, model: Any, pair: twins.Twins, seed: int, scale: float = 1.0) -> list[np.ndarray]:
        """Return all outputs: hidden states, and what a pooler makes of them."""
        import torch

        x = map(torch.from_numpy, twins.random_inputs(pair, "torch", seed, scale))
        with torch.no_grad():
            outputs = model.eval()(**dict(zip(pair.keys, x, strict=True)))
        return [output.numpy() for output in outputs.to_tuple()]

    def save(self, model: Any, form: str, folder: Path, pair: twins.Twins) -> str:
        """Write the model as its library does, or its program."""
        import torch

        if form in ("pt", "safetensors"):
            model.save_pretrained(folder / form, safe_serialization=form == "safetensors")
            return str(folder / form / ("pytorch_model.bin" if form == "pt" else "model.safetensors"))
        keys = pair.keys

        class Traced(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *inputs: torch.Tensor) -> Any:
                return self.model(**dict(zip(keys, inputs, strict=True))).to_tuple()

        return super().save(Traced().eval(), form, folder, pair)


def _register() -> None:
    def make(keras_side: Any, torch_side: Any, name: str) -> Any:
        return functools.partial(keras_side, name), functools.partial(torch_side, name)

    for name in APPLICATIONS:
        out = "img" if name == "VGG16" else "v"
        twins.PAIRS[f"application_{name}"] = twins.Twins(
            (("img", _SIDE, _SIDE, 3),),
            out,
            functools.partial(make, keras_application, torch_application, name),
            twins.PUBLISHED_APPLICATIONS,
            (_Keras, _Torch),
        )
    for name in hugging_face.CONFIGURATIONS:
        inputs = hugging_face.inputs(name)
        twins.PAIRS[f"transformers_{name}"] = twins.Twins(
            tuple(
                ("ids", x.shape[1], 50) if x.dtype.kind == "i" else ("v", *x.shape[1:])
                for x in inputs.values()
            ),
            "v",
            functools.partial(make, hugging_face.keras_model, _torch_transformer, name),
            twins.PUBLISHED_TRANSFORMERS,
            (_TransformersKeras, _TransformersTorch),
            tuple(inputs),
        )


_register()
