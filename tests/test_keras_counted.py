"""Optimizers of Keras before 2.4, whose slots have only numbers: which variable each belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import Inline, attr, display
from ckpttool.core import Path as LeafPath
from ckpttool.formats import (
    Hdf5Dataset,
    KerasConfig,
    TrainedVariable,
    named_leaves,
    open_checkpoint,
    order_from_slots,
)
from tests.golden_texts import Golden

WEIGHTS = {"dense_1": {"kernel": (3, 5), "bias": (5,)}, "dense_2": {"kernel": (5, 2), "bias": (2,)}}
SHAPES = [shape for layer in WEIGHTS.values() for shape in layer.values()]


def attributes(name: str) -> LeafPath:
    return tuple(map(attr, name.split("/")))


def built_model(
    path: Path,
    cls: str,
    shapes: list[tuple[int, ...]],
    first: tuple[str, ...],
    words: tuple[str, ...] = (),
    **config: object,
) -> str:
    """Write a model of two dense layers and its optimizer; slot number n is full of n.

    Keras 2.3 names the slots by `words` and the number of the variable.
    """
    with h5py.File(path, "w") as file:
        for layer, weights in WEIGHTS.items():
            group = file.create_group(f"model_weights/{layer}")
            group.attrs["weight_names"] = [f"{layer}/{name}:0".encode() for name in weights]
            for name, shape in weights.items():
                group[f"{layer}/{name}:0"] = np.zeros(shape, np.float32)
        file["model_weights"].attrs["layer_names"] = [layer.encode() for layer in WEIGHTS]
        settings = {"optimizer_config": {"class_name": cls, "config": config}}
        file.attrs["training_config"] = json.dumps(settings).encode()
        file.attrs["keras_version"] = b"2.0.5"
        slots = [f"{word}_{n}:0" for word in words for n in range(len(SHAPES))]
        slots = slots or [f"training/{cls}/Variable_{n}:0" if n else "Variable:0" for n in range(len(shapes))]
        names = [*first, *slots]
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [name.encode() for name in names]
        for name in first:
            group[name] = np.int64(9)
        for n, (name, shape) in enumerate(zip(names[len(first) :], shapes, strict=True)):
            group[name] = np.full(shape, n if shape != (1,) else 0, np.float32)
    return str(path)


@pytest.mark.parametrize(
    ("cls", "kinds", "first", "config", "more"),
    [
        ("Adam", ["m", "v"], ("iterations_1:0",), {}, []),
        ("Adam", ["m", "v"], ("Adam/iterations:0",), {"amsgrad": False}, [(1,)] * 4),
        ("Adam", ["m", "v", "vhat"], ("Adam/iterations:0",), {"amsgrad": True}, []),
        ("Adamax", ["m", "u"], ("Adamax/iterations:0",), {}, []),
        ("Nadam", ["m", "v"], ("Nadam/iterations:0", "Nadam/m_schedule:0"), {}, []),
        ("SGD", ["momentum"], ("SGD/iterations:0",), {"momentum": 0.0}, []),
        ("RMSprop", ["rms"], (), {}, []),
        ("Adagrad", ["accumulator"], (), {}, []),
        ("Adadelta", ["accumulated_grad", "accumulated_delta"], (), {}, []),
    ],
)
def test_slots_belong_to_the_variables_in_their_order(
    tmp_path: Path,
    cls: str,
    kinds: list[str],
    first: tuple[str, ...],
    config: dict[str, object],
    more: list[tuple[int, ...]],
) -> None:
    file = built_model(tmp_path / "m.h5", cls, SHAPES * len(kinds) + more, first, **config)
    leaves = open_checkpoint(file).tree.leaves
    slots = sorted((int(leaf.array().flat[0]), leaf) for leaf in leaves.values() if leaf.role == "slot")
    order = ["dense_1/kernel", "dense_1/bias", "dense_2/kernel", "dense_2/bias"]
    assert [(leaf.slot, display(leaf.of or ())) for _, leaf in slots] == [
        (k, o) for k in kinds for o in order
    ]
    assert [n for n, _ in slots] == list(range(len(kinds) * 4))
    assert sum(leaf.role == "counter" for leaf in leaves.values()) == len(first[:1])
    assert len(leaves) == 4 + len(first) + 4 * len(kinds) + len(more)


@pytest.mark.parametrize(
    ("cls", "kinds", "words"),
    [
        ("Adam", ["m", "v"], ("m", "v")),
        ("Adamax", ["m", "u"], ("m", "u")),
        ("SGD", ["momentum"], ("moment",)),
        ("RMSprop", ["rms"], ("accumulator",)),
        ("Adagrad", ["accumulator"], ("accumulator",)),
        ("Adadelta", ["accumulated_grad", "accumulated_delta"], ("accumulator", "delta_accumulator")),
    ],
)
def test_numbered_slots_belong_to_the_variables_with_these_numbers(
    tmp_path: Path, cls: str, kinds: list[str], words: tuple[str, ...]
) -> None:
    first = (f"{cls}/iterations:0",)
    leaves = open_checkpoint(
        built_model(tmp_path / "m.h5", cls, SHAPES * len(kinds), first, words)
    ).tree.leaves
    slots = {int(leaf.array().flat[0]): leaf for leaf in leaves.values() if leaf.role == "slot"}
    order = ["dense_1/kernel", "dense_1/bias", "dense_2/kernel", "dense_2/bias"]
    assert [(slots[n].slot, display(slots[n].of or ())) for n in sorted(slots)] == [
        (k, o) for k in kinds for o in order
    ]
    for other in (tuple(f"x{word}" for word in words), words[::-1]):
        if other != words:
            wrong = built_model(tmp_path / "w.h5", cls, SHAPES * len(kinds), first, other)
            assert all(leaf.of is None for leaf in open_checkpoint(wrong).tree.leaves.values())


def step(file: Path) -> tuple[Any, ...]:
    """Make a step of the optimizer in a file; return its facts, the numbers of steps, and mean moments."""
    import torch

    contents = torch.load(file, weights_only=True)
    model = torch.nn.ModuleDict({"dense_1": torch.nn.Linear(3, 5), "dense_2": torch.nn.Linear(5, 2)})
    model.load_state_dict(contents["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(contents["optimizer"])
    model["dense_2"](model["dense_1"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    group = optimizer.param_groups[0]
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    moments = [float(optimizer.state[p]["exp_avg_sq"].mean()) for p in model.parameters()]
    return group["lr"], group["amsgrad"], steps, [round(m) for m in moments]


@pytest.mark.parametrize("words", [(), ("m", "v", "vhat")])
def test_an_adam_with_placeholders_of_maxima_steps_in_torch(tmp_path: Path, words: tuple[str, ...]) -> None:
    shapes = [*SHAPES, *SHAPES, *[(1,)] * 4]
    source = built_model(
        tmp_path / "m.h5", "Adam", shapes, ("Adam/iterations:0",), words, amsgrad=False, lr=0.0005
    )
    assert convert(source, str(tmp_path / "m.pt")).written
    assert step(tmp_path / "m.pt") == (0.0005, False, [10, 10, 10, 10], [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("cls", "shapes"),
    [
        ("Adam", SHAPES),
        ("Adam", [*SHAPES, *reversed(SHAPES)]),
        ("Adam", [*SHAPES, *SHAPES, (1,)]),
        ("Adam", [*SHAPES, *SHAPES, *SHAPES]),
        ("Adagrad", [*SHAPES, (1,), (1,), (1,), (1,)]),
        ("Own", SHAPES),
    ],
)
def test_what_does_not_fit_belongs_to_nothing(
    tmp_path: Path, cls: str, shapes: list[tuple[int, ...]], golden: Golden
) -> None:
    checkpoint = open_checkpoint(built_model(tmp_path / "m.h5", cls, shapes, ("iterations:0",)))
    slots = [leaf for leaf in checkpoint.tree.leaves.values() if leaf.role == "slot"]
    assert len(slots) == len(shapes)
    assert {leaf.of for leaf in slots} == {None}
    golden("\n".join(checkpoint.notes))


def test_the_last_layer_is_not_taken_for_a_longer_one_cut_short() -> None:
    """Keras lists `fc` before `lstm` where the optimizer has them the other way round."""
    shapes = {"lstm": [(5, 24), (6, 24), (24,)], "fc": [(6, 2), (2,)]}
    layers = {
        name: [TrainedVariable(attributes(f"{name}/{n}"), s) for n, s in enumerate(own)]
        for name, own in shapes.items()
    }
    order = order_from_slots([*shapes["lstm"], *shapes["fc"]], [layers["fc"], layers["lstm"]])
    assert order == [*layers["lstm"], *layers["fc"]]


@pytest.mark.parametrize("name", ["SGD/m/dense_1/kernel", "m/dense_1/kernel", "SGD/dense_1/kernel/momentum"])
def test_sgd_of_keras_2_has_momentum_under_three_names(name: str) -> None:
    owner = attributes("dense_1/kernel")
    slot = Hdf5Dataset(name, 0, "float32", (3, 5), Inline(bytes(60)))
    leaves, complete = named_leaves(
        [(name, slot)], attributes("optimizer"), KerasConfig("SGD", {}), {"dense_1/kernel": owner}
    )
    assert complete
    assert [(leaf.slot, leaf.of) for leaf in leaves.values()] == [("momentum", owner)]
