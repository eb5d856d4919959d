"""Silent errors of a mapper, replayed one at a time: `convert --like` must refuse each.

A case is a Keras model with random numbers, its counterpart in PyTorch, and what a mapper without one rule
would write: its values are exchanged after the mapping. model_proofs.py converts and records the outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core import Inline, Leaf, Tree, display
from ckpttool.mapping import fill_model, kind_notes

Arrays = dict[str, np.ndarray]

# Models in Keras: functions import it, so that this file can be imported without.


def keras_images() -> Any:
    """Every kind of convolution, a norm and a dense layer."""
    from keras import Model, layers

    inputs = layers.Input((8, 7, 4))
    x = layers.Conv2D(8, 3, padding="same", groups=2, activation="tanh", name="grouped")(inputs)
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, activation="tanh", name="depth")(x)
    x = layers.SeparableConv2D(12, 3, padding="same", name="separable")(x)
    x = layers.LeakyReLU(name="leaky")(x)
    x = layers.Conv2DTranspose(12, 3, activation="tanh", name="up")(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.LayerNormalization(name="norm")(x)
    return Model(inputs, layers.Dense(5, name="head")(x))


def keras_both() -> Any:
    """A recurrent layer in both directions."""
    from keras import Sequential, layers

    cell = layers.Bidirectional(layers.LSTM(5), name="both")
    return Sequential([layers.Input((7, 3)), cell, layers.Dense(2, name="head")])


def keras_cell() -> Any:
    """A GRU with two biases."""
    from keras import Sequential, layers

    return Sequential([layers.Input((7, 3)), layers.GRU(5, name="rnn"), layers.Dense(2, name="head")])


def keras_tower() -> Any:
    """Dense layers of equal shapes."""
    from keras import Sequential, layers

    rows = [layers.Dense(8, activation="tanh", name=name) for name in ("first", "second", "third")]
    return Sequential([layers.Input((8,)), *rows, layers.Dense(2, name="head")])


def keras_attention() -> Any:
    """Attention with as many heads as dimensions per head, and a residual connection."""
    from keras import Model, layers

    inputs = layers.Input((6, 16))
    y = layers.MultiHeadAttention(4, 4, name="attention")(inputs, inputs)
    return Model(inputs, layers.Dense(2, name="head")(layers.Add()([inputs, y])))


def keras_table() -> Any:
    """A square embedding."""
    from keras import Sequential, layers

    rows = [layers.Embedding(6, 6, name="table"), layers.Flatten(), layers.Dense(3, name="head")]
    return Sequential([layers.Input((5,), dtype="int32"), *rows])


# The same in PyTorch.


def images(eps: float = 1e-3, slope: float = 0.3) -> Any:
    """Return the counterpart of `keras_images`."""
    from collections import OrderedDict

    import torch
    from torch import nn

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
            self.depth = nn.Conv2d(8, 16, 3, padding=1, groups=8)
            rows = OrderedDict(
                depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
                pointwise=nn.Conv2d(16, 12, 1),
            )
            self.separable, self.leaky = nn.Sequential(rows), nn.LeakyReLU(slope)
            self.up, self.norm = nn.ConvTranspose2d(12, 12, 3), nn.LayerNorm(12, eps=eps)
            self.head = nn.Linear(12, 5)

        def forward(self, x: Any) -> Any:
            x = torch.tanh(self.depth(torch.tanh(self.grouped(x))))
            x = torch.tanh(self.up(self.leaky(self.separable(x))))
            return self.head(self.norm(x.mean((2, 3))))

    return Images()


def small_epsilon() -> Any:
    """Return `images` with the epsilon that PyTorch has by default."""
    return images(eps=1e-5)


def small_slope() -> Any:
    """Return `images` with the slope that PyTorch has by default."""
    return images(slope=0.01)


def _recurrent(cell: Callable[[], Any], name: str, width: int, *, both: bool) -> Any:
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, cell())
            self.head = nn.Linear(width, 2)

        def forward(self, x: Any) -> Any:
            sequence, last = getattr(self, name)(x)
            return self.head(torch.cat([*last[0]], 1) if both else sequence[:, -1])

    return Recurrent()


def both() -> Any:
    """Return the counterpart of `keras_both`."""
    from torch import nn

    return _recurrent(lambda: nn.LSTM(3, 5, batch_first=True, bidirectional=True), "both", 10, both=True)


def cell() -> Any:
    """Return the counterpart of `keras_cell`."""
    from torch import nn

    return _recurrent(lambda: nn.GRU(3, 5, batch_first=True), "rnn", 5, both=False)


def tower() -> Any:
    """Return the counterpart of `keras_tower`."""
    import torch
    from torch import nn

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            for layer in (self.first, self.second, self.third):
                x = torch.tanh(layer(x))
            return self.head(x)

    return Tower()


def attention() -> Any:
    """Return the counterpart of `keras_attention`."""
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Any) -> Any:
            return self.head(x + self.attention(x, x, x, need_weights=False)[0])

    return Attention()


def table() -> Any:
    """Return the counterpart of `keras_table`."""
    from collections import OrderedDict

    from torch import nn

    return nn.Sequential(OrderedDict(table=nn.Embedding(6, 6), flat=nn.Flatten(), head=nn.Linear(30, 3)))


# What a mapper without a rule writes.


def _turned(name: str, *axes: int) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {name: arrays[name].transpose(axes)}


def _read_as(name: str, *axes: int) -> Callable[[Arrays], Arrays]:
    """Return the fault in which a tensor's numbers stay in the order of Keras, whose axes these are."""
    return lambda arrays: {name: arrays[name].transpose(axes).reshape(arrays[name].shape)}


def _swapped(*pairs: tuple[str, str]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {
        name: arrays[other] for one, two in pairs for name, other in ((one, two), (two, one))
    }


def _blocks(order: tuple[int, ...], *names: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {
        name: np.concatenate([np.split(arrays[name], len(order))[index] for index in order]) for name in names
    }


def _heads(arrays: Arrays) -> Arrays:
    """Return the tensors with dimensions before heads: 3 parts, 4 heads, 4 dimensions each."""
    return {
        f"attention.in_proj_{name}": np.stack(
            [
                part.reshape(4, 4, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)
                for part in np.split(arrays[f"attention.in_proj_{name}"], 3)
            ]
        ).reshape(arrays[f"attention.in_proj_{name}"].shape)
        for name in ("weight", "bias")
    }


def _one_bias(arrays: Arrays) -> Arrays:
    both = arrays["rnn.bias_ih_l0"] + arrays["rnn.bias_hh_l0"]
    return {"rnn.bias_ih_l0": both, "rnn.bias_hh_l0": np.zeros_like(both)}


_IN_PROJ = ("attention.in_proj_weight", "attention.in_proj_bias")
_LSTM = [f"both.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


@dataclass(frozen=True)
class ReplayedFault:
    """A model, the layers of the source and of the target that differ first, and what is exchanged.

    `factory` builds a target with another setting.
    """

    model: str
    a: str
    b: str
    change: Callable[[Arrays], Arrays] | None = None
    factory: str = ""

    @property
    def like(self) -> str:
        """The target's factory."""
        return f"replayed_faults:{self.factory or self.model}"

    @contextlib.contextmanager
    def switch(self) -> Any:
        """Convert without the rule inside the block."""
        right, settings = fill_model.fill, kind_notes.recorded_differences

        def fill(*arguments: Any) -> Any:
            result = right(*arguments)
            return (
                result if self.change is None else replace(result, tree=_exchanged(result.tree, self.change))
            )

        fill_model.fill = fill
        if self.factory:
            kind_notes.recorded_differences = lambda *_: iter(())
        try:
            yield
        finally:
            fill_model.fill, kind_notes.recorded_differences = right, settings


def _exchanged(tree: Tree, change: Callable[[Arrays], Arrays]) -> Tree:
    names = {path: display(path).replace("/", ".") for path, _ in tree.tensors()}
    arrays = {name: tree[path].array() for path, name in names.items()}  # type: ignore[union-attr]
    other = change(arrays)
    assert any(not np.array_equal(array, arrays[name]) for name, array in other.items())
    leaves = dict(tree.items())
    for path, name in names.items():
        leaf = leaves[path]
        if name in other and isinstance(leaf, Leaf):
            data = np.ascontiguousarray(other[name], arrays[name].dtype).tobytes()
            leaves[path] = replace(leaf, source=Inline(data))
    return Tree(leaves, tree.aliases, tree.containers)


_Case = ReplayedFault
FAULTS = {
    "grouped kernel": _Case("images", "grouped", "grouped", _read_as("grouped.weight", 2, 3, 1, 0)),
    "depthwise kernel": _Case("images", "depth", "depth", _read_as("depth.weight", 2, 3, 1, 0)),
    "multiplier before channels": _Case(
        "images",
        "depth",
        "depth",
        lambda arrays: {
            name: arrays[name].reshape(8, 2, -1).swapaxes(0, 1).reshape(arrays[name].shape)
            for name in ("depth.weight",)
        },
    ),
    "separable kernel": _Case(
        "images",
        "separable",
        "separable.pointwise",
        _read_as("separable.depthwise.weight", 2, 3, 1, 0),
    ),
    "transposed convolution": _Case("images", "up", "up", _turned("up.weight", 1, 0, 2, 3)),
    "flipped convolution": _Case(
        "images", "up", "up", lambda arrays: {"up.weight": arrays["up.weight"][:, :, ::-1, ::-1]}
    ),
    "kernel's space": _Case("images", "grouped", "grouped", _turned("grouped.weight", 0, 1, 3, 2)),
    "epsilon of a layer norm": _Case("images", "norm", "norm", factory="small_epsilon"),
    "slope": _Case("images", "leaky", "leaky", factory="small_slope"),
    "directions": _Case("both", "both", "both", _swapped(*((name, f"{name}_reverse") for name in _LSTM))),
    "gates of an LSTM": _Case("both", "both", "both", _blocks((0, 2, 1, 3), *_LSTM)),
    "square recurrent kernel": _Case(
        "both",
        "both",
        "both",
        lambda arrays: {
            "both.weight_hh_l0": arrays["both.weight_hh_l0"].reshape(4, 5, 5).swapaxes(1, 2).reshape(20, 5)
        },
    ),
    "biases of a GRU": _Case("cell", "rnn", "rnn", _swapped(("rnn.bias_ih_l0", "rnn.bias_hh_l0"))),
    "reset gate": _Case("cell", "rnn", "rnn", _one_bias),
    "equal shapes": _Case(
        "tower",
        "second",
        "second",
        _swapped(("second.weight", "third.weight"), ("second.bias", "third.bias")),
    ),
    "one bias": _Case("tower", "third", "third", lambda arrays: {"third.bias": 0 * arrays["third.bias"]}),
    "heads": _Case("attention", "attention", "attention", _heads),
    "parts of the projection": _Case("attention", "attention", "attention", _blocks((1, 0, 2), *_IN_PROJ)),
    "output of the heads": _Case(
        "attention", "attention", "attention", _turned("attention.out_proj.weight", 1, 0)
    ),
    "embedding": _Case("table", "table", "table", _turned("table.weight", 1, 0)),
}
RIGHT = tuple(dict.fromkeys(fault.model for fault in FAULTS.values()))


def write_keras(name: str) -> None:
    """Write a Keras model with random numbers."""
    model = globals()[f"keras_{name}"]()
    generator = np.random.default_rng(0)
    model.set_weights([0.5 * generator.standard_normal(weight.shape) for weight in model.get_weights()])
    model.save(f"{name}-replayed.keras")


def main() -> None:
    """Convert every case, and those of model_proofs.py; print what becomes of each, and record it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", action="store_true", help="keep the rows")
    options = parser.parse_args()
    from tests import model_proofs
    from tests.test_model_proof import FAULTS as SWITCHED

    layers = {**SWITCHED, **{name: (fault.a, fault.b) for name, fault in FAULTS.items()}}
    outcomes: dict[str, Any] = {}
    for run in (model_proofs.main, model_proofs.replay):
        with tempfile.TemporaryDirectory() as folder:
            run(folder)
            outcomes |= json.loads(Path(folder, "outcomes.json").read_bytes())
            os.chdir("/")
    rows = []
    for name, expected in layers.items():
        first = outcomes[name].get("first_difference") or {}
        row = {
            "fault": name,
            "refused": not outcomes[name]["written"] and not outcomes[name]["within"],
            "layer_right": (first.get("a"), first.get("b")) == expected,
            "cause": first.get("cause"),
        }
        rows.append(row)
        print(json.dumps(row))  # noqa: T201
    if options.record:
        from benchmarks import verifying

        verifying.record("replays", rows)


if __name__ == "__main__":
    main()
