"""Faults of the models of ported_torch.py, written before `verify` saw them.

`python -m tests.ported_faults` compares all. The layer and the words of the cause are what a person would
have to know to mend it.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.planted_faults import (
    DIRECTIONS,
    PROGRAMS,
    Fault,
    Finding,
    PlantedFaults,
    blocks,
    drawn,
    exchange,
    on_all,
    part,
    put,
    rows,
    several,
    swap,
    swap_all,
)

_SWAPPED = "has the weights of|exchanged"
_STATISTICS = "(running|moving)_(mean|var)"
_BETWEEN = "|multiply.*|add.*|subtract.*|conc.*|get_item.*|reshape.*|transpose.*|true_divide.*"

PORTED_FAULTS = {
    # Inverted residual blocks
    "relu for relu6 in a block": Fault(
        "mobile", "depth|project|relu.*", options={"act": "relu"}, words="relu6.*relu"
    ),
    "swish for hard swish": Fault(
        "mobile",
        "head|tail|silu.*|hard.*|global.*",
        options={"tail": "silu"},
        words="(hard ?(swish|silu)|relu6.tail . 3. / 6).*(silu|swish|sigmoid)",
    ),
    "activation of a linear bottleneck": Fault(
        "mobile",
        "tail|norm3|relu.*" + _BETWEEN,
        options={"bottleneck": "relu6"},
        words="relu6|norm3, B computes (relu|hardtanh|clip)",
    ),
    "depthwise filters in reverse": Fault(
        "mobile", "depth", put("depth.weight", lambda x: x.flip(0)), words="reverse|order"
    ),
    "statistics with the wrong momentum": Fault(
        "mobile",
        "norm2",
        several(
            put("norm2.running_mean", lambda x: 0.9 * x), put("norm2.running_var", lambda x: 0.9 * x + 0.1)
        ),
        words=_STATISTICS,
    ),
    "deviation stored for the variance": Fault(
        "mobile",
        "norm1",
        put("norm1.running_var", lambda x: x.sqrt()),
        words="(running|moving)_var.*(root|power)",
    ),
    "block without its residual": Fault(
        "mobile", "tail" + _BETWEEN, options={"skip": False}, words=r"A adds|\+.*B computes [^+]*$"
    ),
    # Gates of channels and of positions
    "softmax over channels": Fault(
        "channel_gates", "out" + _BETWEEN, options={"gate": "softmax"}, words="sigmoid.*softmax"
    ),
    "gated input added": Fault(
        "channel_gates", "out" + _BETWEEN, options={"use": "+"}, words=r"A computes [^+]*, B.*\+|B adds"
    ),
    "kernel over channels in reverse": Fault(
        "channel_gates", "gate", put("gate.weight", lambda x: x.flip(2)), words="reverse"
    ),
    "maximum before the mean": Fault(
        "spatial_gates", "gate" + _BETWEEN, options={"order": "max mean"}, words="order|conc|parts"
    ),
    "minimum for the maximum over channels": Fault(
        "spatial_gates", "gate" + _BETWEEN, options={"order": "mean min"}, words="max.*min"
    ),
    "reflected borders of a gate": Fault(
        "spatial_gates", "gate|pad.*", options={"mode": "reflect"}, words="reflect"
    ),
    "inverted gate": Fault(
        "spatial_gates", "out" + _BETWEEN, options={"use": "1-"}, words=r"1 - sigmoid|sigmoid\(-|- "
    ),
    # Attention of a recurrent decoder
    "output before the context": Fault(
        "attended", "mix" + _BETWEEN, options={"order": "output first"}, words="order|parts|conc"
    ),
    "softmax over the decoder's steps": Fault(
        "attended", "mix" + _BETWEEN, options={"axis": 1}, words="softmax over|axis|queries|softmax.transpose"
    ),
    "scores divided by a root": Fault(
        "attended", "mix" + _BETWEEN, options={"scaled": True}, words="scal|times|divi|/ 2.4"
    ),
    "decoder from zeros": Fault("attended", "decode", options={"state": "zero"}, words="state|B computes 0"),
    "attended steps without tanh": Fault(
        "attended", "head|mix", options={"last": ""}, words="tanh.*no activation"
    ),
    "gates of a decoder's GRU": Fault(
        "attended", "decode", on_all(blocks(3, 1, 0, 2), "decode."), words="order"
    ),
    # Recurrent actors
    "actions of half the range": Fault(
        "recurrent_actor",
        "outputs|mean|value" + _BETWEEN,
        options={"size": 1.0},
        words=r"2 (times|\*)|tanh.mean. . 2, B computes tanh.mean.$",
    ),
    "actions clipped": Fault(
        "recurrent_actor",
        "outputs|mean|value|clip.*" + _BETWEEN,
        options={"squash": "clip"},
        words="tanh.*(clip|hardtanh)",
    ),
    "value of the cell's state": Fault(
        "recurrent_actor", "value", options={"value": "cell"}, words="state|step of rnn"
    ),
    "first step of a policy": Fault(
        "recurrent_actor", "mean|value|get_item.*", options={"step": 0}, words="step|slice"
    ),
    "recurrent kernel transposed": Fault(
        "recurrent_actor",
        "rnn",
        put("rnn.weight_hh_l0", lambda x: x.reshape(4, 7, 7).transpose(1, 2).reshape(28, 7)),
        words="transposed",
    ),
    "bias of a cell doubled": Fault(
        "recurrent_actor", "rnn", on_all(lambda x: 2 * x, "rnn.bias"), words=r"2 times"
    ),
    # Masks and positions
    "mask inverted": Fault(
        "masked_encoder",
        "proj",
        options={"mask": "inverted"},
        words="mask|inver|keep|<= 0, B computes input 1 > 0",
    ),
    "mask of the queries": Fault("masked_encoder", "proj", options={"mask": "queries"}, words="mask|queries"),
    "no mask": Fault("masked_encoder", "proj", options={"mask": "none"}, words="mask"),
    "sines and cosines in turn": Fault(
        "masked_encoder",
        "query|key|value" + _BETWEEN,
        options={"waves": "next"},
        words="other numbers|order|constant",
    ),
    "positions doubled": Fault(
        "masked_encoder",
        "query|key|value" + _BETWEEN,
        options={"rate": 2.0},
        words="times|other numbers|constant",
    ),
    "scaled behind the softmax": Fault(
        "masked_encoder", "proj", options={"scale": "after"}, words="scal|divi|times|/ 2"
    ),
    "values not biased": Fault(
        "masked_encoder", "value", put("value.bias", lambda x: 0 * x), words="bias.* zero"
    ),
    # Decoders with a memory
    "memory of the input": Fault(
        "cross_decoder", "cross", options={"values": "x"}, words="memory|input 1|norm1"
    ),
    "memory before the input": Fault(
        "cross_decoder",
        "own|cross",
        options={"order": "cross first"},
        words="order|calls|called in the place",
    ),
    "heads of a memory's attention": Fault("cross_decoder", "cross", options={"heads": 4}, words="heads"),
    "gelu for relu in a decoder": Fault(
        "cross_decoder", "down|up|gelu.*", options={"act": "gelu"}, words="relu.*gelu"
    ),
    "attentions exchanged": Fault("cross_decoder", "own", swap_all("own", "cross"), words=_SWAPPED),
    "keys and values of a memory exchanged": Fault(
        "cross_decoder", "cross", on_all(blocks(3, 0, 2, 1), "cross.in_proj"), words="order|exchanged"
    ),
    "output kernel of a memory transposed": Fault(
        "cross_decoder", "cross", put("cross.out_proj.weight", lambda x: x.T), words="transposed"
    ),
    # Windows
    "windows not turned back": Fault(
        "windows", "proj|roll.*" + _BETWEEN, options={"back": False}, words="roll|shift|moved|order"
    ),
    "bias of positions transposed": Fault(
        "windows", "proj|bias", options={"bias": "turned"}, words="transposed|axes|bias"
    ),
    "no bias of positions": Fault("windows", "proj|bias", options={"bias": "none"}, words="bias"),
    "windows of distant positions": Fault(
        "windows", "qkv" + _BETWEEN, options={"apart": "far"}, words="order|axes|transpos"
    ),
    "bias of another window": Fault("windows", r"proj|bias|\(model\)", put("bias", drawn(0)), words="bias"),
    # Capsules
    "vectors of length one": Fault(
        "capsules", "second" + _BETWEEN, options={"squash": "unit"}, words="square|first"
    ),
    "vectors not squashed": Fault(
        "capsules",
        "second" + _BETWEEN,
        options={"squash": "none"},
        words="square|B computes first|B does not",
    ),
    "squashed over the vectors": Fault(
        "capsules", "second" + _BETWEEN, options={"axis": 1}, words="axis|over"
    ),
    "vectors of every fourth feature": Fault(
        "capsules", "second" + _BETWEEN, options={"groups": "outer"}, words="order|axes|transpose"
    ),
    # Distributions of returns
    "advantages around the mean atom": Fault(
        "rainbow", "outputs|value|advantage" + _BETWEEN, options={"mean": -1}, words="mean|axis"
    ),
    "support from -5": Fault(
        "rainbow",
        "outputs|value|advantage" + _BETWEEN,
        options={"low": -5.0},
        words="shift|adds|other numbers|constant|5",
    ),
    "atoms before actions of advantages": Fault(
        "rainbow",
        "outputs|value|advantage" + _BETWEEN,
        options={"turned": True},
        words="order|columns|axes|transposed|transpose",
    ),
    "shares of values and advantages apart": Fault(
        "rainbow",
        "outputs|value|advantage|softmax.*" + _BETWEEN,
        options={"shares": "apart"},
        words="softmax",
    ),
    "value left out": Fault(
        "rainbow", "outputs|advantage" + _BETWEEN, options={"shares": "no value"}, words="value"
    ),
    # Cells by hand
    "input before the state": Fault(
        "dreamer_cell", "gates|conc.*", options={"order": "xh"}, words="order|parts|conc"
    ),
    "update not held back": Fault(
        "dreamer_cell", "head|outputs" + _BETWEEN, options={"late": 0.0}, words=r"- 1|-1|sigmoid"
    ),
    "reset and candidate exchanged": Fault(
        "dreamer_cell", "head|outputs|norm" + _BETWEEN, options={"parts": "cru"}, words="third|part|order"
    ),
    "update of the old state": Fault(
        "dreamer_cell", "head|outputs" + _BETWEEN, options={"use": "old"}, words="1 -|sigmoid|update"
    ),
    "reset outside": Fault(
        "dreamer_cell", "head|outputs" + _BETWEEN, options={"reset": "outside"}, words="tanh"
    ),
    "rows of the gates in another order": Fault(
        "dreamer_cell", "gates", on_all(blocks(3, 0, 2, 1), "gates."), words="order"
    ),
    # Logarithmic scales
    "inputs on their own scale": Fault(
        "symlog_net", "first" + _BETWEEN, options={"squash": "none"}, words="log"
    ),
    "logarithms of base 2": Fault(
        "symlog_net", "first" + _BETWEEN, options={"squash": "log2"}, words=r"1\.44|0\.693|log|times"
    ),
    "outputs on the logarithmic scale": Fault(
        "symlog_net", "outputs|head" + _BETWEEN, options={"last": "linear"}, words="exp"
    ),
    "activation before a norm": Fault(
        "symlog_net", "norm|first|silu.*", options={"late": True}, words="silu|order"
    ),
    # Bottlenecks
    "stride of the first convolution": Fault(
        "bottleneck", "conv1", options={"strided": "first"}, words="stride"
    ),
    "mean pooling for a strided shortcut": Fault(
        "bottleneck", "side|average.*", options={"shortcut": "mean"}, words="stride|pool|mean"
    ),
    "shortcut without its norm": Fault(
        "bottleneck", "head|norm|relu.*|global.*" + _BETWEEN, options={"shortcut": "no norm"}, words="norm"
    ),
    "strided convolution padded at the end": Fault(
        "bottleneck", "conv2|zero_pad.*", options={"end": True}, words="pad"
    ),
    "no activation behind a bottleneck": Fault(
        "bottleneck", "head|relu.*|global.*" + _BETWEEN, options={"last": ""}, words="relu"
    ),
    "gamma of a last norm zero": Fault(
        "bottleneck", "norm3", put("norm3.weight", lambda x: 0 * x), words="(weight|gamma) is (zero|0)"
    ),
    "gamma and beta exchanged": Fault(
        "bottleneck", "norm2", exchange("norm2.weight", "norm2.bias"), words="exchanged"
    ),
    "norms of a shortcut and a branch exchanged": Fault(
        "bottleneck", "norm3?", swap_all("norm", "norm3"), words=_SWAPPED
    ),
    # Convolutions over time
    "dilation by 4": Fault("tcn_block", "conv2|.*pad.*", options={"dilation": 4}, words="dilation|pad"),
    "no activation behind a sum": Fault(
        "tcn_block", "head|relu.*|get_item.*" + _BETWEEN, options={"last": ""}, words="relu"
    ),
    "no shortcut over time": Fault(
        "tcn_block", "head|relu.*|get_item.*" + _BETWEEN, options={"skip": ""}, words="side"
    ),
    "norm of a kernel lost": Fault(
        "tcn_block",
        "conv2",
        put("conv2.weight", lambda x: x / x.flatten(1).norm(dim=1)[:, None, None]),
        words="norm of the weights|each row",
    ),
    # IMPALA
    "pixels to 255": Fault(
        "impala", "conv" + _BETWEEN, options={"divisor": 1.0}, words="normali[sz]er|times|scale|255|0.0039"
    ),
    "pooling padded at the end": Fault(
        "impala", "res1|res2|max_pool.*|.*pad.*|relu.*", options={"pool": "end"}, words="pad|pool"
    ),
    "first activation of a block missing": Fault(
        "impala", "res1|relu.*", options={"first": False}, words="relu"
    ),
    "residual of the activation": Fault(
        "impala", "hidden|relu.*|flatten.*" + _BETWEEN, options={"keep": "relu"}, words="relu"
    ),
    "no activation before flattening": Fault(
        "impala", "hidden|relu.*|flatten.*" + _BETWEEN, options={"last": False}, words="relu"
    ),
    "kernels of a block exchanged": Fault("impala", "res[12]", swap("res1", "res2"), words=_SWAPPED),
    # Bags of words
    "padding counted": Fault(
        "bag", "hidden" + _BETWEEN, options={"mask": "none"}, words="mask|0|not_equal|input"
    ),
    "words left out for padding": Fault(
        "bag", "hidden" + _BETWEEN, options={"mask": "inverted"}, words="mask|equal|invert|=="
    ),
    "mean over the whole length": Fault(
        "bag", "hidden" + _BETWEEN, options={"over": "length"}, words="7|count|sum|divi"
    ),
    "divided by the root of the count": Fault(
        "bag", "hidden" + _BETWEEN, options={"over": "root"}, words="root|sqrt"
    ),
    "words one row later": Fault(
        "bag", "embed", put("embed.weight", lambda x: x.roll(1, 0)), words="order|rows"
    ),
    # Siamese networks
    "difference with its sign": Fault(
        "siamese", "head|abs.*" + _BETWEEN, options={"difference": "none"}, words="abs"
    ),
    "squared difference": Fault(
        "siamese",
        "head|abs.*|square.*|power.*" + _BETWEEN,
        options={"difference": "square"},
        words="square|\\*|power",
    ),
    "product before the difference": Fault(
        "siamese", "head" + _BETWEEN, options={"order": "pd"}, words="order|parts|conc"
    ),
    "logits for chances": Fault(
        "siamese", "head|outputs", options={"last": ""}, words="sigmoid.*no activation"
    ),
    "tanh in a tower": Fault("siamese", "second|first", options={"active": "tanh"}, words="relu.*tanh"),
    # Sets
    "mean of a set": Fault(
        "deep_sets", "out" + _BETWEEN, options={"pool": "mean"}, words="sum.*mean|5 times|0\\.2"
    ),
    "largest of a set": Fault("deep_sets", "out|max.*" + _BETWEEN, options={"pool": "max"}, words="sum.*max"),
    "activation behind the sum": Fault(
        "deep_sets", "out|second|relu.*|sum.*", options={"late": True}, words="relu"
    ),
    "members not centred": Fault("deep_sets", "first" + _BETWEEN, options={"centred": False}, words="mean"),
    # Similarities
    "matrix transposed in the code": Fault(
        "bilinear",
        "outputs|matrix|one|two|.*model.*" + _BETWEEN,
        options={"matrix": "turned"},
        words="transposed|axes|transpose",
    ),
    "matrix transposed": Fault(
        "bilinear", "outputs|matrix|one|two|.*model.*", put("matrix", lambda x: x.T), words="transposed"
    ),
    "lengths kept": Fault(
        "bilinear",
        "outputs|matrix|one|two|.*model.*" + _BETWEEN,
        options={"unit": False},
        words="length|norm|root",
    ),
    "temperature 1": Fault(
        "bilinear",
        "outputs|matrix|one|two|.*model.*" + _BETWEEN,
        options={"heat": 1.0},
        words="10 (times|\\*)|0\\.1 (times|\\*)|/ 0.1",
    ),
    # Mixtures
    "exp for elu and 1": Fault(
        "mixture_density", "outputs|sigma|elu.*|exp.*" + _BETWEEN, options={"spread": "exp"}, words="elu.*exp"
    ),
    "logarithms of shares": Fault(
        "mixture_density",
        "outputs|mu|pi|.*softmax.*" + _BETWEEN,
        options={"weigh": "log_softmax"},
        words="log",
    ),
    "means before members": Fault(
        "mixture_density",
        "outputs|mu|pi" + _BETWEEN,
        options={"turned": True},
        words="order|axes|columns|transpose",
    ),
    "sigmoid for shares of means": Fault(
        "mixture_density",
        "outputs|mu|pi|sigmoid.*" + _BETWEEN,
        options={"weigh": "sigmoid"},
        words="softmax.*sigmoid",
    ),
    # Random features
    "half a turn": Fault(
        "fourier",
        "hidden|project|sin.*|cos.*" + _BETWEEN,
        options={"turn": 3.14159265},
        words="sin|times|6.28.*3.14",
    ),
    "cosines before sines": Fault(
        "fourier", "hidden" + _BETWEEN, options={"order": "cs"}, words="order|parts|conc"
    ),
    "pairs of sines and cosines": Fault(
        "fourier", "hidden" + _BETWEEN, options={"order": "next"}, words="order"
    ),
    "features of another seed": Fault(
        "fourier", "hidden|project" + _BETWEEN + r"|\(model\)", put("project", drawn(0)), words="project"
    ),
    # Diffusion
    "sines of the time first": Fault(
        "diffusion", "time1" + _BETWEEN, options={"order": "sc"}, words="order|parts|conc|sin"
    ),
    "shorter periods": Fault(
        "diffusion", "time1" + _BETWEEN, options={"period": 1e3}, words="other numbers|constant|sin|cos"
    ),
    "groups of a second norm": Fault("diffusion", "norm2", options={"groups": 4}, words="groups"),
    "block scaled by a root": Fault(
        "diffusion", "outputs|conv2" + _BETWEEN, options={"skip": 0.70710678}, words=r"1\.41|0\.707"
    ),
    "time without activation": Fault(
        "diffusion", "time2|time1|silu.*", options={"active": False}, words="silu"
    ),
    # States as inputs
    "states of a step exchanged": Fault("stepper", "rnn", options={"states": "ch"}, words="state|input"),
    "new states in another order": Fault(
        "stepper", "outputs|head|rnn|[012]", options={"returns": "ch"}, words="order|output"
    ),
    "old state returned": Fault(
        "stepper", "outputs|head|rnn|[012]", options={"returns": "old"}, words="input 1|state"
    ),
    "head on the cell's state": Fault("stepper", "head", options={"out": "c"}, words="state"),
    "forget gate with 1 more": Fault(
        "stepper", "rnn", put("rnn.bias_ih_l0", part(6, 12, lambda x: x + 1)), words="bias.*differs"
    ),
    # Normalized observations
    "epsilon outside the root": Fault(
        "observations",
        "hidden|variance|mean|clip.*" + _BETWEEN,
        options={"eps": "outside"},
        words="root|sqrt|0\\.01|epsilon",
    ),
    "divided by the variance": Fault(
        "observations",
        "hidden|variance|mean|clip.*" + _BETWEEN,
        options={"root": False},
        words="root|sqrt|variance|normalizer",
    ),
    "wider clipping": Fault("observations", "hidden|clip.*" + _BETWEEN, options={"high": 5.0}, words="clip"),
    "clipped first": Fault(
        "observations", "hidden|variance|mean|clip.*" + _BETWEEN, options={"early": True}, words="clip"
    ),
    "mean not subtracted": Fault(
        "observations",
        "hidden|variance|mean|clip.*" + _BETWEEN,
        options={"centre": False},
        words="mean|normalizer",
    ),
    "statistics of another run": Fault(
        "observations",
        "hidden|variance|mean|clip.*" + _BETWEEN,
        several(put("mean", drawn(0)), put("variance", lambda x: x * 2)),
        words="mean|variance|normalizer",
    ),
    # Separable convolutions
    "no activation before a separable convolution": Fault(
        "xception", "depth|relu.*", options={"early": False}, words="relu"
    ),
    "mean pooling of a separable convolution": Fault(
        "xception",
        "head|max_pool.*|average_pool.*|global.*" + _BETWEEN,
        options={"pool": "mean"},
        words="maximum.*mean|max.*average",
    ),
    "shortcut subtracted": Fault("xception", "head|global.*" + _BETWEEN, options={"skip": "-"}, words="-"),
    "bias of a pointwise convolution twice": Fault(
        "xception", "point", put("point.bias", lambda x: 2 * x), words="2 times"
    ),
    "pointwise weights in 4 bits": Fault(
        "xception",
        "point",
        put("point.weight", lambda x: (x / x.abs().max() * 7).round() * x.abs().max() / 7),
        words="rounded|bits",
    ),
    "row of a kernel moved": Fault(
        "xception", "depth", put("depth.weight", lambda x: x.roll(1, 2)), words="order"
    ),
    # Sentences
    "last step of both directions": Fault(
        "sentence", "mix" + _BETWEEN, options={"states": "last step"}, words="step|state"
    ),
    "halves of a state exchanged": Fault(
        "sentence", "mix" + _BETWEEN, options={"halves": "bf"}, words="order|parts|conc"
    ),
    "mean of all steps": Fault("sentence", "mix|mean.*" + _BETWEEN, options={"states": "mean"}, words="mean"),
    "weights of the directions exchanged": Fault(
        "sentence",
        "both",
        several(
            *(
                exchange(f"both.{k}_l0", f"both.{k}_l0_reverse")
                for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
        ),
        words="exchanged",
    ),
    # Gemma
    "weight of a norm without 1": Fault(
        "gemma_block", "norm|gate|up", options={"one": False}, words=r"1 \+|\+ 1|adds|weight"
    ),
    "exact gelu of a gate": Fault(
        "gemma_block",
        "down|gate|gelu.*" + _BETWEEN,
        options={"approximate": "none"},
        words="tanh gelu.*exact gelu",
    ),
    "outputs not capped": Fault("gemma_block", "outputs|out" + _BETWEEN, options={"cap": 0.0}, words="tanh"),
    "higher cap": Fault("gemma_block", "outputs|out" + _BETWEEN, options={"cap": 5.0}, words="tanh"),
    "words not scaled": Fault(
        "gemma_block", "norm|gate|up" + _BETWEEN, options={"scale": 1.0}, words=r"2\.83|2\.828"
    ),
    "larger epsilon": Fault("gemma_block", "norm|gate|up", options={"eps": 1e-2}, words="epsilon|0\\.01"),
    # Slopes of distances
    "slopes of the heads exchanged": Fault(
        "alibi", "proj", options={"slopes": (0.25, 0.5)}, words="bias|other numbers|constant|slope"
    ),
    "next step seen": Fault("alibi", "proj", options={"diagonal": 2}, words="mask|causal|hidden"),
    "slopes upwards": Fault(
        "alibi", "proj", options={"sign": 1.0}, words="bias|other numbers|constant|slope|-1"
    ),
    "features before heads": Fault(
        "alibi", "proj" + _BETWEEN, options={"joined": "features first"}, words="order|heads|transpose"
    ),
    # Positions
    "positions from the first row": Fault(
        "positions",
        "norm|places" + _BETWEEN,
        options={"offset": 0},
        words="index|indices|rows|\\+ 2|constant|other numbers|moved|other input",
    ),
    "no kind of text": Fault("positions", "norm" + _BETWEEN, options={"kinds": False}, words="kinds"),
    "epsilon of a first norm": Fault("positions", "norm", options={"eps": 1e-2}, words="epsilon is 1e-12"),
    "last word for the first": Fault(
        "positions", "mix|get_item.*", options={"use": "last"}, words="first step.*last step|slice"
    ),
    "mean of the words": Fault("positions", "mix|get_item.*|mean.*", options={"use": "mean"}, words="mean"),
    "relu for tanh of a pooler": Fault("positions", "head|mix", options={"last": "relu"}, words="tanh.*relu"),
    "rows of a table turned": Fault(
        "positions", "places", put("places.weight", lambda x: x.flip(0)), words="reverse|order"
    ),
    "rows of kinds exchanged": Fault(
        "positions", "kinds", put("kinds.weight", rows(0, 1)), words="order|rows|reverse"
    ),
}


def directions(name: str) -> tuple[str, str]:
    """Return the directions of a fault: between PyTorch models, and between the frameworks, in turn."""
    return "torch-torch", DIRECTIONS[[*PORTED_FAULTS].index(name) % 2]


def outcome(row: Finding) -> str:
    """Return what becomes of the cause."""
    return "right" if row.cause_right else "wrong" if row.cause else "none"


def main(
    faults: Mapping[str, Fault] = PORTED_FAULTS, chosen: Callable[[str], Sequence[str]] = directions
) -> None:
    """Print a row for each fault and direction, and their shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns of `MODEL: FAULT`")
    parser.add_argument(
        "--programs", action="store_true", help="let B be a program exported from A's framework"
    )
    options = parser.parse_args()
    names = [
        name
        for name, fault in faults.items()
        if not options.names or any(re.search(pattern, f"{fault.model}: {name}") for pattern in options.names)
    ]
    path = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    counts: Counter[str] = Counter()
    chosen = (lambda _: PROGRAMS) if options.programs else chosen
    with tempfile.TemporaryDirectory() as folder:
        planted = PlantedFaults(Path(folder), names, faults, chosen)
        for row in planted.findings(chosen):
            counts.update(
                ("all", f"cause {outcome(row)}", *("found",) * row.detected, *("layer",) * row.layer_right)
            )
            marks = "".join("-+"[flag] for flag in (row.detected, row.layer_right)) + outcome(row)[0]
            print(  # noqa: T201
                f"{marks} {faults[row.fault].model}: {row.fault} | {row.direction} | {row.layer} "
                f"({row.where}, {row.confirmed}) | {row.cause}",
                flush=True,
            )
    print(dict(counts))  # noqa: T201


if __name__ == "__main__":
    main()
