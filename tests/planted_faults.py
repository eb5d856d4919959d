"""Faults planted in one of two models, and what `verify` of both finds: `python -m tests.planted_faults`.

The models are those of pair_models.py in PyTorch and of pair_keras.py in Keras. In each direction A is the
right source and B the conversion with the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import verifying
from ckpttool.commands.verify import Verification, verify
from ckpttool.networks import ModelSpec
from tests import agent_nets, pair_models, ported_torch, warm
from tests.conftest import ROOT
from tests.pair_models import SHAPES
from tests.shared_runners import shared_runners

State = dict[str, Any]
DIRECTIONS = ("torch-keras", "keras-torch")
# B is a program that was exported from the framework of A.
PROGRAMS = ("torch-onnx", "keras-program")
# The framework that exports a kind of program.
EXPORTERS = {"onnx": "torch", "script": "torch", "program": "keras"}
# Models with layers of their own in Keras: their files have weights only.
OWN = (
    "text",
    "decoder",
    "gated",
    "normalized",
    "convnext",
    "patches",
    "tied_decoder",
    *ported_torch.OWN,
    *agent_nets.SHAPES,
)
# Names of layers of the PyTorch models, where Keras's differ.
KERAS_NAMES: dict[str, dict[str, str]] = {
    "mlp": {"0": "first", "2": "second", "4": "third"},
    "cnn": {"0": "conv", "1": "norm", "4": "conv2", "7": "head"},
    "words": {"0": "embed", "2": "head"},
    "activated": {"0": "first", "1": "first", "2": "second", "3": "norm"},
}


@dataclass(frozen=True)
class Fault:
    """A change of the state or of the code's options, and the layer where it must be found.

    `words` is a pattern for the cause. `keras` are the fields that are otherwise where B is a Keras model.
    """

    model: str
    layer: str
    change: Callable[[State], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)
    where: str = "layer"
    words: str = ""
    keras: dict[str, Any] = field(default_factory=dict)


def put(name: str, make: Callable[[Any], Any]) -> Callable[[State], None]:
    """Return a change of one tensor."""

    def change(state: State) -> None:
        state[name] = make(state[name]).contiguous()

    return change


def blocks(count: int, *order: int) -> Callable[[Any], Any]:
    """Return a change of the order of a tensor's blocks."""

    def turned(value: Any) -> Any:
        import torch

        return torch.cat([value.chunk(count)[index] for index in order])

    return turned


def on_all(make: Callable[[Any], Any], words: str = "") -> Callable[[State], None]:
    """Return a change of all tensors of floats whose names contain the words."""

    def change(state: State) -> None:
        for name, value in state.items():
            if words in name and value.dtype.is_floating_point:
                state[name] = make(value).contiguous()

    return change


def swap(*names: str) -> Callable[[State], None]:
    """Return an exchange of two layers' tensors."""

    def change(state: State) -> None:
        for end in ("weight", "bias"):
            one, other = (f"{name}.{end}" for name in names)
            state[one], state[other] = state[other], state[one]

    return change


def without(*words: str) -> Callable[[State], None]:
    """Return a change that removes tensors."""

    def change(state: State) -> None:
        for name in [name for name in state if any(word in name for word in words)]:
            del state[name]

    return change


def averaged(value: Any) -> Any:
    """Return what a moving average may hold."""
    return value * 0.98 + 0.01 * value.flip(0)


def untied(state: State) -> None:
    """Give the output layer numbers of its own."""
    state["out.weight"] = state["out.weight"] * 0.5


def forgotten_statistics(state: State) -> None:
    """Reset a batch norm's statistics."""
    state["1.running_mean"] = state["1.running_mean"] * 0
    state["1.running_var"] = state["1.running_var"] * 0 + 1


def rows(*order: int) -> Callable[[Any], Any]:
    """Return an exchange of two rows."""

    def change(value: Any) -> Any:
        value = value.clone()
        value[list(order)] = value[list(order[::-1])]
        return value

    return change


def exchange(one: str, other: str) -> Callable[[State], None]:
    """Return an exchange of two tensors."""

    def change(state: State) -> None:
        state[one], state[other] = state[other].clone(), state[one].clone()

    return change


def swap_all(one: str, other: str) -> Callable[[State], None]:
    """Return an exchange of all tensors of two layers."""

    def change(state: State) -> None:
        for name in [name for name in state if name.startswith(f"{one}.")]:
            exchange(name, name.replace(one, other, 1))(state)

    return change


def several(*changes: Callable[[State], None]) -> Callable[[State], None]:
    """Return several changes."""

    def change(state: State) -> None:
        for change in changes:
            change(state)

    return change


def drawn(scale: float) -> Callable[[Any], Any]:
    """Return a change by random numbers of this size."""

    def change(value: Any) -> Any:
        import torch

        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
        return noise if scale == 0 else value + scale * noise

    return change


def quantized(value: Any) -> Any:
    """Round to 8 bits with one scale."""
    scale = value.abs().max() / 127
    return (value / scale).round() * scale


def forgotten_bias(state: State) -> None:
    """Add 1 to the forget gate of an LSTM with five units."""
    state["both.bias_ih_l0"][5:10] += 1


STRAIGHT = {"stride": (1, 1)}  # Keras has no dilation of a strided convolution
FAULTS = {
    "LoRA dropped": Fault("text", "mix", without("lora"), {"lora": False}, words="lora_a, lora_b"),
    "BN statistics not copied": Fault("cnn", "1", forgotten_statistics, words="statistics"),
    "epsilon": Fault("block", "norm", options={"eps": 1e-6}, words="epsilon is 1e-05 in A and 1e-06"),
    "padding": Fault("vision", "conv", options={"padding": 0}, words="padding"),
    "exact against tanh gelu": Fault(
        "block", "up|down", options={"approximate": "tanh"}, where="between", words="exact gelu, .* tanh gelu"
    ),
    "transposed square kernel": Fault("mlp", "2", put("2.weight", lambda x: x.T), words="transposed"),
    "swapped heads": Fault(
        "block",
        "attention",
        put("attention.in_proj_weight", blocks(6, 1, 0, 2, 3, 4, 5)),
        words="order",
    ),
    "bfloat16 cast": Fault("mlp", "0", on_all(lambda x: x.bfloat16().float()), words="bfloat16"),
    "normaliser": Fault(
        "vision",
        "conv",
        without("mean"),
        {},
        {"mean": (0.1, 0.5, 0.9)},
        where="between",
        words="mean of .model"
        r"|/ 0\.3, B computes input 0$",
    ),
    "permuted flatten": Fault(
        "cnn",
        "7",
        put("7.weight", lambda x: x.reshape(4, 5, 2, 3).permute(0, 2, 3, 1).reshape(4, 30)),
        words="order",
        keras={"change": put("7.weight", lambda x: x.reshape(4, 2, 3, 5).permute(0, 3, 1, 2).reshape(4, 30))},
    ),
    "EMA for raw weights": Fault("mlp", "0", on_all(averaged), words="EMA"),
    "missing bias": Fault("vision", "conv2", without("conv2.bias"), {"bias": False}, words="bias"),
    "wrong activation": Fault("activated", "1", options={"activation": "SiLU"}, words="silu"),
    "q/k swapped": Fault(
        "block", "attention", on_all(blocks(3, 1, 0, 2), "in_proj"), words="queries|query|order"
    ),
    "dropped position embedding": Fault(
        "text",
        "query|key",  # both receive it, in either order
        without("position"),
        {"position": False},
        where="between",
        words="position",
    ),
    "gate order of LSTM": Fault("lstm", "rnn", on_all(blocks(4, 0, 2, 1, 3), "rnn."), words="gates|order"),
    "gate order of GRU": Fault("gru", "rnn", on_all(blocks(3, 1, 0, 2), "rnn."), words="gates|order"),
    "dilation": Fault(
        "vision", "conv2", options={**STRAIGHT, "dilation": 2}, right=STRAIGHT, words="dilation"
    ),
    "stride order": Fault("vision", "conv2", options={"stride": (1, 2)}, words="stride"),
    "dropout left on": Fault(
        "text",
        "mix",
        options={"dropout": True},
        where="between",
        words="dropout",
        keras={"layer": "dropout.*"},  # a layer there
    ),
    "channel order": Fault("cnn", "0", put("0.weight", lambda x: x.flip(1)), words="reverse"),
    "layer order": Fault(
        "text",
        "mix",
        swap("mix", "up"),
        words="weights of A's up"
        r"|has the (kernel|weight), bias of A's",
    ),
    "wrong statistics axis": Fault("text", "mix", options={"axis": 1}, where="between", words="mean.*axis"),
    "tied weights untied": Fault(
        "text",
        "out|outputs",  # Keras's tied layer has no tensors, and is no layer of a pair
        untied,
        {"tied": False},
        words="tied|embed|out",
    ),
    "frozen scale": Fault("text", "up", without("scale"), {"scale": False}, where="between", words="scale"),
    "q/k layers swapped": Fault("text", "key|query", swap("query", "key"), words="key|query"),
    "padding mode": Fault("vision", "conv", options={"mode": "reflect"}, words="mode|padding"),
    "pooling": Fault("vision", "pool", options={"pool": True}, words="counting of padding"),
}
# Faults of further architectures; `where` is either.
_DIFFERS = "differs from A's|has the weights of"
MORE_FAULTS = {
    "dropped residual": Fault(
        "residual", "down", options={"skip": False}, words="A adds|\\+.*B computes [^+]*$"
    ),
    "activation before the sum": Fault("residual", "down", options={"early": True}, words=r"A computes .*\+"),
    "padding at the end": Fault("residual", "down", options={"end": True}, words="padding"),
    "convolutions exchanged": Fault(
        "residual", "conv1|norm1", swap("conv1", "conv2"), words="weights of A's conv2"
    ),
    "batch norms exchanged": Fault("residual", "norm1", swap_all("norm1", "norm2"), words="of A's norm2"),
    "scale and shift exchanged": Fault(
        "residual", "norm1", exchange("norm1.weight", "norm1.bias"), words="exchanged"
    ),
    "mean and variance exchanged": Fault(
        "residual",
        "norm2",
        several(
            exchange("norm2.running_mean", "norm2.running_var"), put("norm2.running_var", lambda x: x.abs())
        ),
        words="(running|moving)_mean has the numbers of A's (running|moving)_var",
    ),
    "epsilon of a batch norm": Fault(
        "residual", "norm2", options={"eps": 1e-3}, words="epsilon is 1e-05 .* 0.001"
    ),
    "maximum for mean": Fault(
        "residual", "head|global_.*", options={"pool": "max"}, words="mean.*maximum|max"
    ),
    "nearest for bilinear": Fault(
        "upsampler", "mix|up_sampling.*|conc.*", options={"mode": "nearest"}, words="nearest|interpol|upsampl"
    ),
    "aligned corners": Fault(
        "upsampler",
        "mix|up_sampling.*|conc.*",
        options={"align": True},
        words="upsampl",
    ),
    "concatenation exchanged": Fault(
        "upsampler", "mix|conc.*", options={"swapped": True}, words="concatenation|parts of"
    ),
    "transposed convolution's channels": Fault(
        "upsampler", "up", put("up.weight", lambda x: x.transpose(0, 1)), words="transposed"
    ),
    "transposed convolution reversed": Fault(
        "upsampler", "up", put("up.weight", lambda x: x.flip(2, 3)), words="reverse|order"
    ),
    "last activation": Fault("upsampler", "out|outputs", options={"last": "Tanh"}, words="sigmoid.*tanh"),
    "missing last activation": Fault(
        "upsampler",
        "out|outputs",
        options={"last": "Identity"},
        keras={"options": {"last": "linear"}},
        words="sigmoid.*no activation",
    ),
    "multiplier of a depthwise convolution": Fault(
        "separable",
        "depth",
        put("depth.weight", lambda x: x.reshape(4, 2, 1, 3, 3).transpose(0, 1).reshape(8, 1, 3, 3)),
        words="order",
    ),
    "height and width exchanged": Fault(
        "separable", "depth", put("depth.weight", lambda x: x.transpose(2, 3)), words="transposed"
    ),
    "dilation of a grouped convolution": Fault(
        "separable", "group", options={"dilation": 1}, words="dilation"
    ),
    "filters exchanged": Fault(
        "separable", "group", put("group.weight", rows(1, 4)), words="order|2 of 6 rows"
    ),
    "squared activation": Fault("separable", "point|group", options={"after": "relu6"}, words="relu.*relu6"),
    "hard sigmoid": Fault(
        "squeeze",
        "fc2|mix",
        options={"gate": "hardsigmoid"},
        words="sigmoid.*hard ?sigmoid" r"|sigmoid\(.*fc2.*\), B computes relu6\(.*fc2.* \+ 3\) / 6",
        keras={"layer": "fc2|mix|re.*|mul.*"},
    ),
    "gate dropped": Fault("squeeze", "mix", options={"use": ""}, words=r"\*"),
    "gate added": Fault("squeeze", "mix", options={"use": "add"}, words=r"\*.*\+"),
    "squeezed maximum": Fault("squeeze", "fc1|global.*", options={"pool": "max"}, words="max"),
    "symmetric for causal padding": Fault("temporal", "conv1", options={"causal": False}, words="padding"),
    "time reversed": Fault("temporal", "conv2", put("conv2.weight", lambda x: x.flip(2)), words="reverse"),
    "first for last step": Fault("temporal", "head", options={"step": 0}, words="slice"),
    "dilation of a causal convolution": Fault(
        "temporal", "conv1", options={"dilation": 1}, words="dilation|padding"
    ),
    "axes of a volume": Fault(
        "volume", "conv", put("conv.weight", lambda x: x.permute(0, 1, 4, 3, 2)), words="transposed"
    ),
    "mean for maximum pooling": Fault(
        "volume", "head|.*pooling.*", options={"pool": "avg"}, words="max|mean|pool"
    ),
    "flattened in another order": Fault(
        "volume",
        "head|flatten.*",
        options={"last": True},
        words="order",
        keras={"options": {"last": False}},
    ),
    "causal mask missing": Fault("decoder", "proj", options={"causal": False}, words="causal|masked_fill"),
    "scores not scaled": Fault(
        "decoder",
        "proj",
        options={"scale": False},
        words="scaled|/ 2, B" r"|query @ key\) / 2.*B computes.*\(?query @ key( |,|\))",
    ),
    "number of heads": Fault(
        "decoder", "proj", options={"heads": 4}, words="heads|shapes" r"|of shape \[2, .*of shape \[4, "
    ),
    "softmax over queries": Fault("decoder", "proj", options={"axis": -2}, words="softmax|axis"),
    "queries and values exchanged": Fault(
        "decoder", "query|value", swap("query", "value"), words="weights of A's value"
    ),
    "positions shifted": Fault(
        "decoder", r"norm|position|\(model\)", put("position", lambda x: x.roll(1, 0)), words="position"
    ),
    "rows of a table exchanged": Fault(
        "decoder", "embed", put("embed.weight", rows(3, 5)), words="order|2 of 17 rows"
    ),
    "embedding not scaled": Fault("decoder", "norm|position", options={"embed": 1.0}, words="times|2.828"),
    "zero bias of the queries": Fault("decoder", "query", put("query.bias", lambda x: x * 0), words="zero"),
    "epsilon of a layer norm": Fault("decoder", "norm", options={"eps": 1e-3}, words="epsilon"),
    "fresh layer norm": Fault(
        "decoder",
        "norm2",
        several(put("norm2.weight", lambda x: x * 0 + 1), put("norm2.bias", lambda x: x * 0)),
        words="weight|bias|gamma|beta",
    ),
    "norm after the sum": Fault(
        "decoder", "norm|query|key|value", options={"post": True}, words="another order of layers"
    ),
    "last residual dropped": Fault(
        "decoder", "out", options={"skip": False}, words=r"A adds|\+.*B computes [^+]*$"
    ),
    "order of a fused projection": Fault(
        "fused", "qkv", on_all(blocks(3, 1, 0, 2), "qkv"), words="order|differs"
    ),
    "fused heads": Fault("fused", "proj", options={"inner": True}, words="order|heads|transpose"),
    "order of fused parts": Fault(
        "fused",
        "proj",
        options={"order": "vkq"},
        words="order|queries|values|quer" r"|slice\(qkv, 0, 1.*B computes.*slice\(qkv, 2, 3",
    ),
    "halves of a gate": Fault(
        "gated",
        "down",
        options={"first": False},
        words="half"
        r"|silu\(slice\(up, 0.*B computes slice",
    ),
    "halves of a gate's weights": Fault("gated", "up", on_all(blocks(2, 1, 0), "up."), words="order"),
    "gelu for silu": Fault(
        "gated",
        "down",
        options={"activation": "gelu"},
        words="silu.*gelu"
        r"|silu.*erfc",
    ),
    "epsilon of an own norm": Fault("gated", "norm", options={"eps": 1e-2}, words="epsilon"),
    "scale of a norm without 1": Fault("gated", "norm", put("norm.weight", lambda x: x - 1), words="-1 plus"),
    "deviation for half of it": Fault("vae", "decode", options={"half": False}, words="spread . 0.5|/ 2"),
    "heads exchanged": Fault("vae", "mean|spread", swap("mean", "spread"), words="weights of A's"),
    "outputs exchanged": Fault(
        "vae", "outputs|decode|spread|0", options={"swapped": True}, words="output|order"
    ),
    "state and action exchanged": Fault(
        "critic", "hidden|conc.*", options={"swapped": True}, words="concatenation|parts of"
    ),
    "maximum for minimum": Fault("critic", "outputs|q1|q2", options={"difference": True}, words="max|min"),
    "advantages around nothing": Fault("dueling", "outputs|advantage", options={"mean": ""}, words="mean"),
    "advantages around the maximum": Fault(
        "dueling", "outputs|advantage", options={"mean": "max"}, words="mean|max"
    ),
    "mean over the batch": Fault(
        "dueling", "outputs|advantage", options={"axis": 0}, words="mean|batch|axis"
    ),
    "experts exchanged": Fault("mixture", "one|two", swap("one", "two"), words="weights of A's"),
    "sigmoid for softmax": Fault(
        "mixture", "gate|out", options={"gate": "sigmoid"}, words="softmax.*sigmoid"
    ),
    "variance for deviation": Fault(
        "normalized", "hidden|normalizer", options={"root": False}, words="normalizer|sqrt"
    ),
    "clip missing": Fault(
        "normalized",
        "hidden",
        options={"clip": 0.0},
        words="clip"
        r"|maximum\(minimum.*B computes \(input",
    ),
    "stale statistics": Fault(
        "normalized",
        r"hidden|normalizer|\(model\)",
        put("centre", lambda x: x + 0.2),
        words="centre|normalizer",
    ),
    "shared slope": Fault(
        "slopes", "prelu", put("prelu.weight", lambda x: x * 0 + x.mean()), words="everywhere"
    ),
    "slope of a leaky relu": Fault("slopes", "leak", options={"slope": 0.2}, words="slope|leaky"),
    "alpha of an elu": Fault("slopes", "elu", options={"alpha": 0.5}, words="alpha|elu"),
    "groups of a norm": Fault("groups", "norm", options={"groups": 4}, words="groups"),
    "directions exchanged": Fault(
        "stacked",
        "both",
        several(
            *(
                exchange(f"both.{name}_l0", f"both.{name}_l0_reverse")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
        ),
        words="_reverse|backward",
    ),
    "bias of the forget gate": Fault("stacked", "both", forgotten_bias, words=_DIFFERS),
    "recurrent gates transposed": Fault(
        "stacked",
        "gru",
        put("gru.weight_hh_l0", lambda x: x.reshape(3, 6, 6).transpose(1, 2).reshape(18, 6)),
        words="order|transposed",
    ),
    "no recurrent bias": Fault("stacked", "gru", put("gru.bias_hh_l0", lambda x: x * 0), words="zero|bias"),
    "mean over steps": Fault("stacked", "head", options={"last": "mean"}, words="mean|step"),
    "tables exchanged": Fault(
        "recommender", "user|item", exchange("user.weight", "item.weight"), words="weights of A's"
    ),
    "sum for product": Fault("recommender", "hidden", options={"use": "add"}, words=r"\*.*\+"),
    "pixels not scaled": Fault(
        "pixels",
        "conv|rescaling.*",
        options={"scale": 1.0},
        words=r"times|\*|/ 255, B computes input 0",
    ),
    "pixels around zero": Fault(
        "pixels",
        "conv|rescaling.*",
        options={"offset": 0.5},
        words="normali[sz]er|shift|adds|- 0.5$"
        r"|\+ -0\.5$",
    ),
    "colors in reverse": Fault(
        "pixels", "conv|rescaling.*", options={"reverse": True}, words="order|reverse|flip"
    ),
    "half precision of one layer": Fault(
        "mlp", "2", put("2.weight", lambda x: x.half().float()), words="float16"
    ),
    "an earlier step": Fault("gru", "rnn", on_all(drawn(1e-2)), words="another step"),
    "a fresh layer": Fault("vision", "conv2", put("conv2.weight", drawn(0)), words=_DIFFERS),
    "not a number": Fault("mlp", "2", put("2.bias", lambda x: x / (x != x[3])), words="finite"),
    "sign": Fault("cnn", "4", put("4.weight", lambda x: -x), words="-1 times"),
    "8 bits": Fault("block", "norm|attention|up", on_all(quantized, "weight"), words="8 bits"),
    "scaled weights": Fault("words", "2", put("2.weight", lambda x: x * 1.1), words="1.1 times"),
    "last row zero": Fault(
        "block", "down", put("down.weight", lambda x: x * (x != x[-1])), words="1 of 8 rows"
    ),
    "norm of the weights lost": Fault(
        "mlp", "4", put("4.weight", lambda x: x / x.norm(dim=1, keepdim=True)), words="norm of the weights"
    ),
}


def part(start: int, end: int, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change of some rows."""

    def change(value: Any) -> Any:
        value = value.clone()
        value[start:end] = make(value[start:end])
        return value

    return change


def fresh_decoder(state: State) -> None:
    """Give the decoder a copy of the encoder's weights that was trained further."""
    state["other.weight"] = state["encode.weight"].T * 0.9


_SWAPPED, _JOINED, _ADDED = "weights of A's", "concatenation|parts of", r"adds|\+"
# Faults of kinds and architectures that were chosen when all above were found.
LATER_FAULTS = {
    "shortcut before the norm": Fault("preactivated", "side", options={"shared": False}, words=r"relu\(norm"),
    "norm of a block skipped": Fault(
        "preactivated", "side|conv1|norm|re_lu.*", options={"normed": False}, words="norm"
    ),
    "convolution of a shortcut dropped": Fault(
        "preactivated", "head|global.*|add.*", options={"shortcut": False}, words=r"side"
    ),
    "averaged variance": Fault(
        "preactivated", "norm1", put("norm1.running_var", lambda x: 0.9 * x + 0.1), words=_DIFFERS
    ),
    "shift of a norm subtracted": Fault(
        "preactivated", "norm1", put("norm1.bias", lambda x: -x), words="-1 times"
    ),
    "branches joined in another order": Fault(
        "branches", "mix|conc.*|re_lu.*", options={"order": "5 3 1 pool"}, words=_JOINED
    ),
    "averaged branch": Fault(
        "branches", "pooled|.*pooling.*", options={"pool": "avg"}, words="max.*(mean|av)"
    ),
    "branches exchanged": Fault("branches", "one|pooled", swap("one", "pooled"), words=_SWAPPED),
    "dilated branch": Fault("branches", "three", options={"dilation": 2}, words="dilation"),
    "wide kernel transposed": Fault(
        "branches", "five", put("five.weight", lambda x: x.transpose(2, 3)), words="transposed"
    ),
    "new channels first": Fault(
        "dense_block", "grow2|conc.*|norm", options={"new_first": True}, words=_JOINED
    ),
    "no activation before an append": Fault(
        "dense_block", "grow1|grow2|conc.*", options={"active": False}, words="relu"
    ),
    "new channels of a norm": Fault(
        "dense_block", "norm", put("norm.weight", part(8, 12, lambda x: x * 0 + 1)), words=_DIFFERS
    ),
    "channels rotated": Fault(
        "dense_block", "grow2", put("grow2.weight", lambda x: x.roll(4, 1)), words="order"
    ),
    "mean pooling before a deep layer": Fault(
        "unet", "deep|.*pooling.*", options={"pool": "avg"}, words="max.*(mean|av)"
    ),
    "skip before its activation": Fault("unet", "mix|conc.*", options={"early": True}, words="relu"),
    "skip one pixel to the right": Fault("unet", "mix|conc.*", options={"shift": 1}, words="moved|roll"),
    "no bias of a transposed convolution": Fault("unet", "up", put("up.bias", lambda x: x * 0), words="zero"),
    "transposed convolution turned": Fault(
        "unet", "up", put("up.weight", lambda x: x.transpose(2, 3)), words="transposed"
    ),
    "epsilon of a channel norm": Fault("convnext", "norm", options={"eps": 1e-3}, words="epsilon"),
    "tanh gelu in a block": Fault(
        "convnext", "down|up|gelu.*", options={"gelu": "tanh"}, words="exact gelu.*tanh gelu"
    ),
    "layer scale missing": Fault("convnext", "head|global.*|add.*", options={"scaled": False}, words="scale"),
    "residual of a wide block missing": Fault(
        "convnext", "head|global.*|add.*", options={"skip": False}, words=_ADDED
    ),
    "norm over the whole image": Fault(
        "convnext", "norm", options={"whole": True}, words="axis|axes|all positions|whole|group"
    ),
    "wide kernel reversed": Fault(
        "convnext", "depth", put("depth.weight", lambda x: x.flip(3)), words="reverse"
    ),
    "positions not turned": Fault(
        "mixer", "rows1|permute.*", options={"turned": False}, words="order|transposed|axes"
    ),
    "layer norms exchanged": Fault("mixer", "norm2?", swap_all("norm", "norm2"), words="of A's norm2"),
    "residual over positions missing": Fault("mixer", "norm2", options={"skip": False}, words=_ADDED),
    "largest position": Fault("mixer", "head|global.*", options={"pool": "max"}, words="mean.*max"),
    "relu for gelu over positions": Fault(
        "mixer", "rows[12]", options={"activation": "relu"}, words="gelu.*relu"
    ),
    "token behind the patches": Fault(
        "patches", "norm|token|position", options={"token": "last"}, words="order|token|concat"
    ),
    "mean for the token": Fault("patches", "head|outputs", options={"use": "mean"}, words="first step|mean"),
    "patches by column": Fault(
        "patches", "norm|token|position", options={"turned": True}, words="order|transposed|axes|transpose"
    ),
    "heads of a module": Fault("patches", "attention", options={"heads": 4}, words="heads"),
    "position of zeros": Fault(
        "patches", "norm|position", put("position", lambda x: x * 0), words="position"
    ),
    # The model itself owns the token.
    "token of another model": Fault(
        "patches", r"norm|token|position|\(model\)", put("token", drawn(0)), words="token"
    ),
    "no output bias of attention": Fault(
        "patches", "attention", put("attention.out_proj.bias", lambda x: x * 0), words="zero"
    ),
    "keys in reverse": Fault(
        "cross_attention", "key", options={"keys": "reverse"}, words="flip|order|reverse"
    ),
    "scores by the whole width": Fault(
        "cross_attention", "proj", options={"width": 8}, words="scal|times|/ 2, B computes .*/ 2.8"
    ),
    "keys and values exchanged": Fault("cross_attention", "key|value", swap("key", "value"), words=_SWAPPED),
    "sigmoid for shares": Fault("cross_attention", "proj", options={"active": "sigmoid"}, words="sigmoid"),
    "interleaved angles": Fault(
        "rotary", "proj", options={"pairs": "next"}, words="interleaved|pairs|concatenation.*stack"
    ),
    "base of the angles": Fault(
        "rotary",
        "proj",
        options={"base": 5e5},
        words="base|angle|0.1, 0.01" r"|key \* \[1, 1.*B computes.*key \* \[1, 1",
    ),
    "values turned": Fault(
        "rotary", "proj", options={"values": True}, words="values|A computes value, B computes concatenation"
    ),
    "turned backwards": Fault(
        "rotary",
        "proj",
        options={"reverse": True},
        words="backw|reverse|-1 times" r"|key \* \[0, .*key \* \[-0, ",
    ),
    "shared heads tiled": Fault(
        "shared_heads",
        "proj",
        options={"tiled": True},
        words="in turn|expand.*repeat" r"|tile\(key\).*repeat\(key",
    ),
    "narrow heads": Fault(
        "shared_heads", "proj", options={"heads": 8}, words="heads|expand.*expand" r"|expand\(.*tile\("
    ),
    "shared heads not scaled": Fault("shared_heads", "proj", options={"scaled": False}, words="scal|/ 2, B"),
    "gate and value exchanged": Fault("swiglu", "gate|up", swap("gate", "up"), words=_SWAPPED),
    "activation of the value": Fault("swiglu", "down", options={"on": "up"}, words=r"silu\(gate\).*silu\(up"),
    "layer norm for a root-mean-square norm": Fault(
        "swiglu", "norm", options={"norm": "layer"}, words="mean"
    ),
    "gelu in a gated block": Fault("swiglu", "down", options={"activation": "gelu"}, words="silu.*gelu"),
    "sum for a gate": Fault("swiglu", "down", options={"use": "+"}, words=r"\*.*\+"),
    "filter and gate exchanged": Fault("wavenet", "filter|gate", swap("filter", "gate"), words=_SWAPPED),
    "tanh for a gate": Fault("wavenet", "keep|skip", options={"gate": "tanh"}, words=r"sigmoid.*tanh\(gate"),
    "padding behind the sequence": Fault(
        "wavenet", "filter|gate|zero_pad.*", options={"late": True}, words="pad"
    ),
    "steps of a gate in reverse": Fault(
        "wavenet", "gate", put("gate.weight", lambda x: x.flip(2)), words="reverse"
    ),
    "skip of the input": Fault("wavenet", "skip", options={"skip": "input"}, words="B computes start"),
    "dilation of a gate": Fault(
        "wavenet", "filter|gate|zero_pad.*", options={"dilation": 1}, words="dilation|pad"
    ),
    "state exchanged": Fault("translator", "decode", options={"exchanged": True}, words="state"),
    "state of zeros": Fault("translator", "decode", options={"state": "zero"}, words="B computes 0"),
    "encoder in reverse": Fault(
        "translator", "encode", options={"reverse": True}, words="flip|order|reverse"
    ),
    "gates of a decoder": Fault(
        "translator", "decode", on_all(blocks(4, 0, 2, 1, 3), "decode."), words="order"
    ),
    "sigmoid for shares of steps": Fault(
        "pooled_steps", "head", options={"weigh": "sigmoid"}, words="softmax.*sigmoid"
    ),
    "mean for shares of steps": Fault("pooled_steps", "head", options={"weigh": "mean"}, words="mean"),
    "no tanh before scores": Fault(
        "pooled_steps", "score|hidden", options={"active": ""}, words="tanh.*no activation"
    ),
    "bias of one gate": Fault(
        "pooled_steps", "rnn", put("rnn.bias_hh_l0", part(12, 18, lambda x: x * 0)), words=_DIFFERS + "|zero"
    ),
    "mean of directions": Fault(
        "both_ways", "head|both", options={"merge": "ave"}, words=r"2 times|0\.5 \*|ave|B computes .*/ 2$"
    ),
    "product of directions": Fault("both_ways", "head|both", options={"merge": "mul"}, words=r"\*|mul"),
    "direction not turned back": Fault(
        "both_ways", "head|both", options={"turned": True}, words="flip|reverse|backward"
    ),
    "first of both directions": Fault("both_ways", "head|both", options={"step": 0}, words="step|slice"),
    "kernel of one direction transposed": Fault(
        "both_ways",
        "both",
        put("both.weight_hh_l0", lambda x: x.reshape(3, 5, 5).transpose(1, 2).reshape(15, 5)),
        words="order|transposed",
    ),
    "scale without 1": Fault("conditioned", "conv2", options={"one": False}, words="A adds|1 \\+|.\\+ 1, B"),
    "scale and shift of a condition exchanged": Fault(
        "conditioned",
        "conv2",
        options={"exchanged": True},
        words="half"
        r"|slice\(condition, 0.*B computes.*slice\(condition, \[0, 6\]",
    ),
    "activation before a condition": Fault("conditioned", "conv2", options={"late": True}, words="relu"),
    "condition subtracted": Fault("conditioned", "conv2", options={"sign": -1.0}, words="-|times|adds"),
    "halves of a condition's weights": Fault(
        "conditioned", "condition", on_all(blocks(2, 1, 0), "condition."), words="order"
    ),
    "softmax over actions": Fault("atoms", "outputs|values", options={"axis": 1}, words="softmax|axis"),
    "support from zero": Fault(
        "atoms", "outputs|values", options={"low": 0.0}, words=r"shift|adds|10 plus|\[-10, .*\[0, "
    ),
    "atoms before actions": Fault(
        "atoms", "outputs|values|.*", options={"turned": True}, words="in 3 columns|transpose"
    ),
    "sigmoid for atoms": Fault("atoms", "outputs|values", options={"shares": "sigmoid"}, words="sigmoid"),
    "clip for tanh": Fault(
        "gaussian", "outputs|mean|log", options={"squash": "clip"}, words="tanh.*(clip|hardtanh)"
    ),
    "upper limit of a deviation": Fault("gaussian", "outputs|log|mean", options={"high": 0.5}, words="clip"),
    "softplus for exp": Fault(
        "gaussian", "outputs|log|mean", options={"spread": "softplus"}, words="softplus"
    ),
    "range of actions": Fault(
        "gaussian", "outputs|mean|log", options={"size": 1.0}, words=r"2 (times|\*)|tanh.mean. . 2, B"
    ),
    "rounded head": Fault(
        "gaussian", "log", put("log.weight", lambda x: x.bfloat16().float()), words="bfloat16"
    ),
    "pixels by half of their range": Fault(
        "encoder", "conv", options={"divisor": 127.5}, words="normali[sz]er|times|scale|/ 127.5"
    ),
    "norm after tanh": Fault("encoder", "norm|trunk", options={"late": True}, words="tanh|order of layers"),
    "no tanh behind a norm": Fault("encoder", "head|norm", options={"last": ""}, words="tanh.*no activation"),
    "flattened with the channels last": Fault(
        "encoder", "trunk|flatten.*", options={"flat": "last"}, words="order"
    ),
    "cosines from zero": Fault(
        "quantiles",
        "wave",
        options={"start": 0},
        words="cos|-3.14.* plus"
        r"|\[3\.142, 6.*\[0, 3\.142",
    ),
    "sum with quantiles": Fault("quantiles", "hidden", options={"use": "+"}, words=r"\*.*\+"),
    "no activation of quantiles": Fault(
        "quantiles", "hidden|wave|multiply.*", options={"active": False}, words="relu"
    ),
    "edges turned": Fault(
        "graph_net", "second", options={"turned": True}, words="transposed|turned|transpose"
    ),
    "no second sum over edges": Fault("graph_net", "head", options={"second": False}, words="input 1|edges"),
    "loops added": Fault("graph_net", "second", options={"loops": True}, words="adds|\\+"),
    "words by one": Fault("factors", "embed", options={"shift": 1}, words="index|integer|shift|\\+ 1"),
    "products not halved": Fault(
        "factors",
        "hidden",
        options={"half": 1.0},
        words="times|0.5, B"
        r"|0\.5 \* \(square",
    ),
    "products subtracted": Fault(
        "factors",
        "hidden",
        options={"order": -1},
        words="-1 times|A computes .{1,2}sum.*B computes .?sum.embed .. 2"
        r"|B computes 0\.5 \* \(sum\(embed \*\* 2",
    ),
    "row of a table zero": Fault(
        "factors", "embed", put("embed.weight", part(3, 4, lambda x: x * 0)), words="1 of 11 rows"
    ),
    "carry exchanged": Fault("highway", "head", options={"carry": "exchanged"}, words="gate"),
    "carry not gated": Fault("highway", "head", options={"carry": ""}, words="gate|start"),
    "gate and change exchanged": Fault("highway", "gate|change", swap("gate", "change"), words=_SWAPPED),
    "bias of a gate subtracted": Fault("highway", "gate", put("gate.bias", lambda x: -x), words="-1 times"),
    "tanh for a highway's gate": Fault(
        "highway", "gate|head", options={"gate": "tanh"}, words="sigmoid.*tanh"
    ),
    "pieces apart": Fault("maxout", "out", options={"pieces": "outer"}, words="order|max|transpose"),
    "mean of pieces": Fault("maxout", "out", options={"use": "mean"}, words="max.*mean"),
    "rate of a sine": Fault(
        "waves",
        "second",
        options={"rate": 1.0},
        words="sin|first . 3"
        r"|3 \* first",
    ),
    "cosine for sine": Fault("waves", "second", options={"form": "cos"}, words="sin.*cos"),
    "sine missing": Fault("waves", "out", options={"again": False}, words="sin"),
    "channels not shuffled": Fault("shuffled", "group2", options={"shuffle": False}, words="order|transpose"),
    "width before depth": Fault(
        "shuffled", "last", options={"space": "width first"}, words="order|transpose"
    ),
    "filters of two groups exchanged": Fault(
        "shuffled", "group1", put("group1.weight", rows(0, 5)), words="2 of 8 rows"
    ),
    "mean over words": Fault("ngrams", "out|global.*", options={"pool": "mean"}, words="max.*mean"),
    "lengths in another order": Fault("ngrams", "out|conc.*", options={"order": "32"}, words=_JOINED),
    "kernel one word late": Fault(
        "ngrams", "three", put("three.weight", lambda x: x.roll(1, 2)), words="order"
    ),
    "elu for relu over words": Fault(
        "ngrams", "out|two|three|global.*", options={"active": "elu"}, words="relu.*elu"
    ),
    "epsilon of an instance norm": Fault("styled", "norm", options={"eps": 0.1}, words="epsilon"),
    "slope behind a norm": Fault("styled", "out|leak", options={"active": "less leaky"}, words="slope|leaky"),
    "norm without scale": Fault(
        "styled", "norm", without("norm."), {"affine": False}, words="weight|gamma|scale|affine"
    ),
    "kernel of a transposed convolution transposed": Fault(
        "styled", "up", put("up.weight", lambda x: x.transpose(2, 3)), words="transposed"
    ),
    "decoder trained further": Fault(
        "tied_decoder",
        r"outputs|other|shift|\(model\)",
        fresh_decoder,
        {"tied": False},
        words=r"0\.1 (times|\*)|B computes other",
    ),
    "no last shift": Fault(
        "tied_decoder", r"outputs|shift|\(model\)", options={"bias": False}, words="shift"
    ),
    "tanh for sigmoid of a code": Fault(
        "tied_decoder", "latent|encode", options={"active": "tanh"}, words="sigmoid.*tanh"
    ),
    "code reversed": Fault(
        "tied_decoder", "latent", put("latent.weight", lambda x: x.flip(0)), words="reverse"
    ),
    "product with the last output": Fault(
        "cross_network", "out|cross2", options={"first": False}, words="start|cross1"
    ),
    "crossed without residuals": Fault("cross_network", "cross2|out", options={"skip": False}, words=_ADDED),
    "sum for crossed products": Fault("cross_network", "cross2|out", options={"use": "+"}, words=r"\*.*\+"),
    "crossed layers exchanged": Fault("cross_network", "cross[12]", swap("cross1", "cross2"), words=_SWAPPED),
}
FAULTS |= MORE_FAULTS | LATER_FAULTS
# The others are variants.
PROMISED = [
    name
    for name in FAULTS
    if name not in MORE_FAULTS
    and name not in LATER_FAULTS
    and name not in ("q/k layers swapped", "padding mode", "pooling")
]


@dataclass(frozen=True)
class Finding:
    """What `verify` finds of a fault in one direction."""

    fault: str
    direction: str
    expected: str
    detected: bool
    layer: str
    where: str
    confirmed: bool
    cause: str
    layer_right: bool
    cause_right: bool


def spec(framework: str, model: str, options: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the factory of a model; `framework` is torch or keras."""
    if model in agent_nets.SHAPES:
        return ModelSpec(f"agent_nets:{framework}_net", {"name": model, **(options or {})})
    family = "ported" if model in ported_torch.SHAPES else "pair"
    module = "pair_models" if (family, framework) == ("pair", "torch") else f"{family}_{framework}"
    return ModelSpec(f"{module}:{model}", dict(options or {}) or None)


def build_torch(model: str, options: Mapping[str, Any]) -> Any:
    """Return a model in PyTorch."""
    if model in agent_nets.SHAPES:
        return agent_nets.torch_net(model, **options)
    return getattr(ported_torch if model in ported_torch.SHAPES else pair_models, model)(**options)


def framework_of(factory: str) -> str:
    """Return the framework of a factory of these models."""
    return "tensorflow" if "_keras:" in factory or factory.endswith(":keras_net") else "torch"


def input_shapes(model: str, framework: str) -> tuple[str, ...]:
    """Return the shapes of a model's inputs as options of `verify`, images in the framework's order."""
    shapes = tuple((SHAPES | ported_torch.SHAPES | agent_nets.SHAPES)[model].split(";"))
    name, equals, sizes = shapes[0].rpartition("=")
    first, *rest = sizes.split(",")
    channels_last = framework == "keras" and (len(rest) > 1 or model in ("temporal", "tcn_block"))
    return (name + equals + ",".join((*rest, first)), *shapes[1:]) if channels_last else shapes


class Sides:
    """The files of right models and of faults in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keras: list[dict[str, Any]] = []
        self._written: dict[str, str] = {}

    def torch(self, title: str, model: str, right: Mapping[str, Any], change: Any = None) -> str:
        """Write a state_dict, as `.pt` and `.npz`; return the `.pt` file."""
        import numpy as np
        import torch

        state = pair_models.torch_state(build_torch(model, right))
        state = {name: value.clone() for name, value in state.items()}
        if change is not None:
            change(state)
        file = str(self._folder / f"{title}.pt")
        torch.save(state, file)
        np.savez(self._folder / f"{title}.npz", **{name: value.numpy() for name, value in state.items()})
        return file

    def traced(self, title: str, model: str, options: Mapping[str, Any], form: str) -> str:
        """Export a torch model with the numbers of a state_dict as ONNX or TorchScript; return the file."""
        import torch

        net = build_torch(model, options).eval()
        net.load_state_dict(torch.load(self._folder / f"{title}.pt"))
        shapes = dict(row.rpartition("=")[::2] for row in input_shapes(model, "torch"))
        names, file = [name or "x" for name in shapes], str(self._folder / f"{title}.{form}")
        rows = [[2, *(int(size) for size in shape.split(",") if size)] for shape in shapes.values()]
        for dtypes in itertools.product((torch.float32, torch.int64), repeat=len(rows)):
            inputs = tuple(torch.ones(row, dtype=dtype) for row, dtype in zip(rows, dtypes, strict=True))
            with contextlib.suppress(Exception):
                net(*inputs)
                break
        axes = {name: {0: "n"} for name in names}
        # ONNX has not all operations of PyTorch.
        with warnings.catch_warnings(), contextlib.suppress(torch.onnx.errors.OnnxExporterError):
            warnings.simplefilter("ignore")
            if form == "script":
                torch.jit.save(torch.jit.trace(net, inputs), file)
                return file
            kept = torch.onnx.TrainingMode.PRESERVE  # else norms are folded into convolutions
            torch.onnx.export(
                net, inputs, file, dynamo=False, input_names=names, dynamic_axes=axes, training=kept
            )
        return file

    def program(self, title: str, model: str, options: Mapping[str, Any]) -> str:
        """List the export of a Keras model as a SavedModel; return its folder."""
        row = {"file": f"{title}.program", "model": model, "options": dict(options), "state": f"{title}.npz"}
        self._keras.append(row)
        return str(self._folder / row["file"])

    def keras(self, title: str, model: str, options: Mapping[str, Any]) -> str:
        """List a Keras model with the numbers of a written state_dict; return its file."""
        file = f"{title}.weights.h5" if model in OWN else f"{title}.keras"
        row = {"file": file, "model": model, "options": dict(options), "state": f"{title}.npz"}
        self._keras.append(row)
        return str(self._folder / file)

    def write(self) -> None:
        """Write the Keras models."""
        (self._folder / "keras.json").write_text(json.dumps(self._keras), encoding="utf-8")
        program = "from pathlib import Path; from tests import pair_keras; pair_keras.write(Path.cwd())"
        status, output = warm.run("tensorflow", program, self._folder)
        if status:
            raise RuntimeError(output[-4000:])


def layer_names(path: str) -> list[str]:
    """Return a layer's path, and its parts as the code has them: an export numbers them."""
    return [path, *(re.sub(r"_\d+$", "", part).lower() for part in re.split("[/.]", path))]


def slug(title: str) -> str:
    """Return a file name."""
    return re.sub(r"\W+", "_", title)


class PlantedFaults:
    """Right and wrong files for some faults, and their comparison in both directions."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = tuple(FAULTS),
        faults: Mapping[str, Fault] = FAULTS,
        chosen: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        chosen = chosen or (lambda _: DIRECTIONS)
        self.names = list(names)
        self.faults = faults
        sides = Sides(folder)
        self._files: dict[tuple[str, str, str], str] = {}
        for name in self.names:
            fault, title = faults[name], slug(name)
            forms = {form for direction in chosen(name) for form in direction.split("-")}
            for framework in ("torch", "keras"):
                change = fault.keras.get("change", fault.change) if framework == "keras" else fault.change
                options = fault.keras.get("options", fault.options) if framework == "keras" else fault.options
                # The state_dicts of the Keras models, too.
                files = [
                    sides.torch(f"{title}_right", fault.model, fault.right),
                    sides.torch(f"{title}_{framework}", fault.model, fault.right, change),
                ]
                sorts = {"right": ("right", fault.right), "wrong": (framework, options)}
                for (sort, (end, own)), file in zip(sorts.items(), files, strict=True):
                    at = f"{title}_{end}", fault.model, own
                    self._files[name, framework, sort] = file if framework == "torch" else sides.keras(*at)
                    for form in forms & EXPORTERS.keys():
                        if EXPORTERS[form] == framework and any(
                            form == direction.split("-")[sort == "wrong"] for direction in chosen(name)
                        ):
                            written = sides.program(*at) if form == "program" else sides.traced(*at, form)
                            self._files[name, form, sort] = written
        sides.write()

    def compare(self, name: str, direction: str) -> Verification:
        """Run `verify` with the right source as A, and the fault in B."""
        fault = self.faults[name]
        a, b = direction.split("-")
        files = (self._files[name, a, "right"], self._files[name, b, "wrong"])
        wrong = fault.keras.get("options", fault.options) if b == "keras" else fault.options
        likes = [
            None if form in EXPORTERS or file.endswith(".keras") else spec(form, fault.model, options)
            for file, form, options in zip(files, (a, b), (fault.right, wrong), strict=True)
        ]
        shapes = () if files[0].endswith(".keras") else input_shapes(fault.model, EXPORTERS.get(a, a))
        code = not {a, b}.isdisjoint(("program", "script"))
        return verify(*files, like_a=likes[0], like_b=likes[1], input_shapes=shapes, run_code=code)

    def find(self, name: str, direction: str) -> Finding:
        """Return what the comparison finds."""
        fault = self.faults[name]
        try:
            comparison = self.compare(name, direction)
        except Exception as error:  # noqa: BLE001  # a crash is a finding
            return Finding(
                name, direction, "", False, "", "", False, f"{type(error).__name__}: {error}", False, False
            )
        first = comparison.models.first if comparison.models is not None else None
        expected = fault.layer
        in_keras = direction.endswith(("keras", "program"))
        if in_keras:
            expected = fault.keras.get("layer", KERAS_NAMES.get(fault.model, {}).get(expected, expected))
        words = fault.keras.get("words", fault.words) if in_keras else fault.words
        cause = "" if first is None else first.cause or ""
        return Finding(
            name,
            direction,
            expected,
            not comparison.within,
            "" if first is None else first.b,
            "" if first is None else first.where,
            first is not None and first.confirmed,
            cause,
            first is not None and any(re.fullmatch(expected, part) for part in layer_names(first.b)),
            bool(cause) and re.search(words, cause, re.IGNORECASE) is not None,
        )

    def findings(self, directions: Callable[[str], Sequence[str]]) -> Iterator[Finding]:
        """Compare all in these directions, with one process for each framework."""
        with shared_runners(framework_of):
            for name in self.names:
                for direction in directions(name):
                    a, b = direction.split("-")
                    if all(
                        map(os.path.exists, (self._files[name, a, "right"], self._files[name, b, "wrong"]))
                    ):
                        yield self.find(name, direction)


def directions(name: str) -> tuple[str, ...]:
    """Return the directions of a fault: Keras has no mode of padding; later faults have one each, in turn."""
    if name in LATER_FAULTS:
        start = [*LATER_FAULTS].index(name) % 2
        return DIRECTIONS[start : start + 1]
    return DIRECTIONS[1:] if name == "padding mode" else DIRECTIONS


def recorded() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(verifying.figures()["faults"])


def main() -> None:
    """Print a row for each fault and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns of `MODEL: FAULT`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="keep the rows")
    options = parser.parse_args()
    names = [
        name
        for name, fault in FAULTS.items()
        if not options.names or any(re.search(pattern, f"{fault.model}: {name}") for pattern in options.names)
    ]
    path = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in PlantedFaults(Path(folder), names).findings(directions):
            rows.append(asdict(row))
            if not options.json:
                marks = "".join("-+"[flag] for flag in (row.detected, row.layer_right, row.cause_right))
                print(  # noqa: T201
                    f"{marks} {row.fault:28} {row.direction:12} {row.expected:10} {row.layer:10} "
                    f"{row.where:8} {row.confirmed!s:5} {row.cause}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=1))  # noqa: T201
    if options.record:
        # Faults that were not compared keep their rows.
        every = {(row["fault"], row["direction"]): row for row in (*recorded(), *rows)}
        order = [(name, direction) for name in FAULTS for direction in directions(name)]
        verifying.record("faults", [every[key] for key in order if key in every])


if __name__ == "__main__":
    main()
