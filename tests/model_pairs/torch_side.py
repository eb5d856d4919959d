"""The programs in PyTorch: built, saved in every form, filled and judged. Runs in a process with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.model_pairs.programs import Line, Program, program

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONVT = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOL = {1: nn.functional.max_pool1d, 2: nn.functional.max_pool2d, 3: nn.functional.max_pool3d}
EPSILON = 1e-3


def _layer(line: Line) -> nn.Module | None:
    args, taken, made = line.args, line.ins[0].shape, line.out.shape
    rank = len(taken) - 1
    if line.op in ("conv", "convt"):
        kinds = _CONV if line.op == "conv" else _CONVT
        return kinds[rank](taken[0], made[0], args["kernel"], args["stride"])
    if line.op == "td_conv":
        return nn.Conv2d(taken[1], made[1], args["kernel"])
    if line.op == "depthwise":
        return _CONV[rank](taken[0], taken[0], args["kernel"], groups=taken[0])
    if line.op == "dense":
        return nn.Linear(taken[-1], made[-1], bias=args.get("bias", True))
    if line.op == "bn":
        return _NORM[rank](taken[0], eps=EPSILON)
    if line.op == "ln":
        return nn.LayerNorm(taken[-1], eps=EPSILON)
    if line.op == "prelu":
        return nn.PReLU(taken[0])
    if line.op in ("lstm", "gru"):
        return (nn.LSTM if line.op == "lstm" else nn.GRU)(taken[-1], made[-1], batch_first=True)
    if line.op == "attention":
        return nn.MultiheadAttention(taken[-1], args["heads"], batch_first=True)
    if line.op == "embed":
        return nn.Embedding(args["words"], made[-1])
    if line.op == "positions":
        return Positions(taken)
    return None


class Positions(nn.Module):
    """A trained table of positions, added."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Net(nn.Module):
    """A program's model; its layers are attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.program = program(name)
        for line in self.program.lines:
            layer = _layer(line)
            if layer is not None and not hasattr(self, self._name(line)):
                self.add_module(self._name(line), layer)

    def _name(self, line: Line) -> str:
        return self.program.torch_names.get(line.name, line.name)

    def forward(self, *given: Tensor) -> Any:
        values = {each.number: x for each, x in zip(self.program.inputs, given, strict=True)}
        for line in self.program.lines:
            layer = self.get_submodule(self._name(line)) if line.name else None
            values[line.out.number] = _step(line, layer, [values[each.number] for each in line.ins])
        made = tuple(values[each.number] for each in self.program.outputs)
        return made if len(made) > 1 else made[0]


def _step(line: Line, layer: Any, given: list[Tensor]) -> Tensor:
    x, op = given[0], line.op
    if op in ("lstm", "gru"):
        y = layer(x)[0]
        return y if line.args["sequences"] else y[:, -1]
    if op == "attention":
        return layer(x, x, x, need_weights=False)[0]
    if op == "td_conv":
        y = layer(x.flatten(0, 1))
        return y.reshape(len(x), x.shape[1], *y.shape[1:])
    if layer is not None:
        return layer(x)
    if op == "flatten":
        start = 2 if line.ins[0].kind == "frames" else 1
        if line.args["order"] == "last":
            x = torch.movedim(x, start, -1)
        return x.flatten(start)
    if op == "image":
        if line.args["order"] == "last":
            channels, *size = line.out.shape
            return torch.movedim(x.reshape(len(x), *size, channels), -1, 1)
        return x.reshape(len(x), *line.out.shape)
    if op == "attend":
        q, k, v = given
        return torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
    size = len(line.ins[0].shape) - 1
    return {
        "relu": lambda: torch.relu(x),
        "pool": lambda: _POOL[size](x, 2),
        "gap": lambda: x.mean(tuple(range(2, size + 2))),
        "mean": lambda: x.mean(1),
        "shuffle": lambda: torch.pixel_shuffle(x, line.args["factor"]),
        "unshuffle": lambda: torch.pixel_unshuffle(x, line.args["factor"]),
        "scale": lambda: x * given[1][(...,) + (None,) * size],
        "step": lambda: x.unsqueeze(1),
        "rows": lambda: x.flatten(1),
        "patches": lambda: x.flatten(2).transpose(1, 2),
        "concat": lambda: torch.cat(given, 1 if line.out.kind == "image" else -1),
        "add": lambda: given[0] + given[1],
        "multiply": lambda: given[0] * given[1],
    }[op]()


def build(name: str, seed: int = 0) -> Net:
    """Return a program's model with random weights and statistics."""
    torch.manual_seed(seed)
    net = Net(name).eval()
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if value.is_floating_point():
                scale = 1.5 / max(1, value[0].numel()) ** 0.5 if value.ndim > 1 else 0.5
                value.copy_(torch.randn_like(value) * scale)
                if key.endswith("running_var"):
                    value.copy_(value.abs() + 0.5)
    return net


def inputs(made: Program, seed: int = 1) -> list[np.ndarray]:
    """Return random inputs as PyTorch takes them."""
    draw = np.random.default_rng(seed)
    return [
        draw.integers(0, made.words, (3, *each.shape))
        if each.kind == "tokens"
        else draw.standard_normal((3, *each.shape)).astype(np.float32)
        for each in made.inputs
    ]


def outputs(net: Net) -> list[np.ndarray]:
    """Return what the model makes of the program's inputs, images with their channels first."""
    with torch.no_grad():
        made = net.eval()(*map(torch.from_numpy, inputs(net.program)))
    return [each.numpy() for each in (made if isinstance(made, tuple) else (made,))]


def save(name: str, folder: Path, sources: Sequence[str]) -> None:
    """Write the model in these forms beside the outputs that it has."""
    from safetensors.torch import save_file

    net = build(name)
    torch.save(net.state_dict(), folder / "torch.pt")
    torch.save(net, folder / "whole.pt")
    state = {key: value.contiguous() for key, value in net.state_dict().items()}
    save_file(state, folder / "torch.safetensors", metadata={"format": "pt"})
    np.savez(folder / "torch.npz", **{key: value.numpy() for key, value in state.items()})
    given = tuple(map(torch.from_numpy, inputs(net.program)))
    if "script" in sources:
        with torch.no_grad():
            torch.jit.trace(net, given, check_trace=False).save(str(folder / "script.pt"))
    if "onnx" in sources:
        import warnings

        # Without gradients an attention is one operation, which the exporter does not know.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Norms stay layers of their own.
            kept = torch.onnx.TrainingMode.PRESERVE
            torch.onnx.export(net, given, str(folder / "model.onnx"), dynamo=False, training=kept)
    np.savez(folder / "torch_outputs.npz", *outputs(net))


def shapes(made: Program) -> list[tuple[int, ...]]:
    """Return the shapes of a program's inputs in PyTorch."""
    return [each.shape for each in made.inputs]


def load(name: str, file: Path) -> Net:
    """Return a model that loaded what was written for it; raise what PyTorch raises."""
    net = build(name, 5)
    state = torch.load(file, weights_only=True)
    wanted = net.state_dict()
    if state.keys() != wanted.keys():
        # Keras's numbered layers, and the list of variables that it exports, in the order of the model.
        layers = dict.fromkeys(key.rpartition(".")[0].removeprefix("variables.") for key in state)
        ours = dict.fromkeys(key.rpartition(".")[0] for key in wanted)
        numbered = all(each.isdecimal() for each in layers)
        names = sorted(layers, key=int) if numbered else list(layers)
        if len(layers) == len(ours) and (numbered or set(names) == set(ours)):
            places = dict(zip(names, ours, strict=True)) if numbered else {each: each for each in names}
            state = {
                f"{places[key.rpartition('.')[0].removeprefix('variables.')]}.{key.rpartition('.')[2]}": value
                for key, value in state.items()
            }
    net.load_state_dict(state, strict=True)
    return net
