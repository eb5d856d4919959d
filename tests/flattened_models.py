"""Models that flatten images, in Keras and in PyTorch, and their conversions with `--like-source`.

`main` writes outcomes.json: by model and direction, what the conversions with and without `--like` make of a
file of weights, and how far the outputs of the loaded file are from the source's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.commands.convert import convert, fill
from ckpttool.conversion import filling
from ckpttool.networks import ModelSpec
from ckpttool.verification import two_models
from tests.shared_runners import InThisProcess

# The shape of the images, channels last.
SHAPES = {
    "several": (7, 8, 3),
    "pooled": (12, 10, 2),
    "branches": (6, 7, 2),
    "moved": (6, 5, 3),
    "subclass": (7, 6, 3),
}
# The framework of a source and its model: all, and those that every run of the suite converts.
SOURCES = tuple(f"{source} {name}" for name in SHAPES for source in ("keras", "torch"))
QUICK = ("torch moved", "keras subclass")
# A subclassed Keras model does not state the shape of its inputs.
UNSTATED = ("subclass",)
SUFFIXES = {"keras": ".weights.h5", "torch": ".pt"}


def keras_several() -> Any:
    """Several convolutions with as many channels, named against their order."""
    import keras
    from keras import layers

    image = x = keras.Input(SHAPES["several"])
    for name, channels in (("zeta", 4), ("alpha", 6), ("mid", 4)):
        x = layers.Conv2D(channels, 3 if name == "zeta" else 2, activation="relu", name=name)(x)
    x = layers.Dense(8, activation="relu", name="b")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(4, name="a")(x))


def torch_several() -> Any:
    """Return the twin of keras_several."""
    from torch import nn

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zeta, self.alpha, self.mid = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 2), nn.Conv2d(6, 4, 2)
            self.b, self.a = nn.Linear(4 * 3 * 4, 8), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            x = self.mid(self.alpha(self.zeta(x).relu()).relu()).relu()
            return self.a(self.b(x.flatten(1)).relu())

    return Several()


def keras_pooled() -> Any:
    """A flattening behind a pooling, in a Sequential with automatic names."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(SHAPES["pooled"]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(4, 2, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(2),
        ]
    )


def torch_pooled() -> Any:
    """Return the twin of keras_pooled."""
    from torch import nn

    front = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(2 * 1 * 4, 8), nn.Tanh(), nn.Linear(8, 2))


def keras_branches() -> Any:
    """Two branches, which are joined against their order."""
    import keras
    from keras import layers

    image = keras.Input(SHAPES["branches"])
    one = layers.Flatten()(layers.Conv2D(4, 3, name="c_one")(image))
    two = layers.Flatten()(layers.Conv2D(4, 5, name="c_two")(image))
    both = [layers.Dense(8, name="d_two")(two), layers.Dense(8, name="d_one")(one)]
    return keras.Model(image, layers.Dense(3, name="out")(layers.Concatenate()(both)))


def torch_branches() -> Any:
    """Return the twin of keras_branches."""
    import torch
    from torch import nn

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_one, self.c_two = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 5)
            self.d_one, self.d_two, self.out = (
                nn.Linear(4 * 5 * 4, 8),
                nn.Linear(2 * 3 * 4, 8),
                nn.Linear(16, 3),
            )

        def forward(self, x: Any) -> Any:
            both = self.d_two(self.c_two(x).flatten(1)), self.d_one(self.c_one(x).flatten(1))
            return self.out(torch.cat(both, 1))

    return Branches()


def keras_moved() -> Any:
    """A model that flattens its images with the channels first, as PyTorch does."""
    import keras
    from keras import layers

    image = keras.Input(SHAPES["moved"])
    x = layers.Permute((3, 1, 2))(layers.Conv2D(5, 3, name="conv")(image))
    return keras.Model(image, layers.Dense(4, name="head")(layers.Flatten()(x)))


def torch_moved() -> Any:
    """Return the twin of keras_moved."""
    from torch import nn

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 5, 3), nn.Linear(4 * 3 * 5, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.conv(x).flatten(1))

    return Moved()


def keras_subclass() -> Any:
    """A subclassed model, which its first call builds."""
    import keras
    from keras import layers, ops

    class Subclass(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.zeta, self.alpha = layers.Conv2D(6, 3, activation="relu"), layers.Conv2D(4, 3)
            self.hidden, self.out = layers.Dense(8, activation="relu"), layers.Dense(4)

        def call(self, x: Any) -> Any:
            x = self.alpha(self.zeta(x))
            return self.out(self.hidden(ops.reshape(x, (ops.shape(x)[0], -1))))

    return Subclass()


def torch_subclass() -> Any:
    """Return the twin of keras_subclass."""
    from torch import nn

    class Subclass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zeta, self.alpha = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
            self.hidden, self.out = nn.Linear(3 * 2 * 4, 8), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.out(self.hidden(self.alpha(self.zeta(x).relu()).flatten(1)).relu())

    return Subclass()


def _first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[-1], *shape[:-1])


def _write_sources(name: str) -> None:
    """Write the weights of both models, with numbers of their own."""
    import torch

    model = globals()[f"keras_{name}"]()
    model(np.zeros((1, *SHAPES[name]), "float32"))
    generator = np.random.default_rng(0)
    model.set_weights(
        [generator.standard_normal(weight.shape).astype("float32") for weight in model.get_weights()]
    )
    model.save_weights(f"{name}.weights.h5")
    torch.save(globals()[f"torch_{name}"]().state_dict(), f"{name}.pt")


def _outputs(framework: str, name: str, file: str) -> np.ndarray:
    """Return what the framework's own model computes from a file of its weights."""
    images = np.random.default_rng(1).standard_normal((3, *SHAPES[name])).astype("float32")
    model = globals()[f"{framework}_{name}"]()
    if framework == "keras":
        model(images)
        model.load_weights(file)
        return np.asarray(model(images))
    import torch

    model.load_state_dict(torch.load(file), strict=True)
    with torch.no_grad():
        return model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()


def _tensors(file: str) -> list[bytes]:
    """Return the numbers of all tensors of a file."""
    arrays: list[Any] = []
    if file.endswith(".h5"):
        import h5py

        with h5py.File(file) as opened:
            opened.visititems(
                lambda _, array: arrays.append(array[()]) if isinstance(array, h5py.Dataset) else None
            )
    else:
        import torch

        arrays = [tensor.numpy() for tensor in torch.load(file).values()]
    return sorted(str(array.shape).encode() + np.ascontiguousarray(array).tobytes() for array in arrays)


def _notes(done: Any) -> dict[str, Any]:
    return {
        "written": done.written,
        "stated": [note for note in done.report.notes if "--flatten" in note],
        "assumed": [note for note in done.report.assumed if "flatten" in note],
    }


def _converted(name: str, source: str, target: str) -> dict[str, Any]:
    """Return what both conversions of a model make."""
    shapes = {"keras": SHAPES[name], "torch": _first(SHAPES[name])}
    source_factory, own = (f"flattened_models:{framework}_{name}" for framework in (source, target))
    file, target_file = f"{name}{SUFFIXES[source]}", f"{source}-{name}{SUFFIXES[target]}"
    like = ModelSpec(own, shapes=(shapes[target],) if name in UNSTATED else ())
    filled = fill(file, target_file, like, like_source=source_factory)
    assert filled.proof is not None, filled.report
    one, other = _outputs(source, name, file), _outputs(target, name, target_file)
    stated = source == "keras" and name not in UNSTATED
    code = ModelSpec(source_factory, shapes=() if stated else (shapes[source],))
    plain = convert(file, f"plain-{target_file}", like_source=code)
    return {
        "like": {**_notes(filled), "verified": filled.proof.verified},
        "far": float(np.abs(one - other).max() / np.abs(one).max()),
        "plain": {**_notes(plain), "same": _tensors(target_file) == _tensors(f"plain-{target_file}")},
    }


def main(folder: str, *sources: str) -> None:
    """Convert each source to the other framework; write the outcomes."""
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).parent))
    filling.ModelProcess = InThisProcess  # type: ignore[assignment,misc]
    two_models.ModelProcess = InThisProcess  # type: ignore[assignment,misc]
    outcomes: dict[str, Any] = {}
    for name in dict.fromkeys(name.partition(" ")[2] for name in sources):
        _write_sources(name)
    for title in sources:
        source, _, name = title.partition(" ")
        outcomes[title] = _converted(name, source, "torch" if source == "keras" else "keras")
    Path("outcomes.json").write_text(json.dumps(outcomes))
