"""The texts around the statements of a graph: classes, functions and loading, in PyTorch and in Keras."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttool.core.deferred import NamedTuple

_TORCH_HEAD = """
import numpy as np
import torch
IMPORTSfrom torch import nn
from torch.nn import functional as F


"""
_TORCH_LOAD = """

def load(path):
    \"\"\"Return the model with the weights of the file.\"\"\"
    model, state = Model(), READ
SELECTION    model.load_state_dict(state, strict=True)
    return model.eval()
"""
BLOCK = '''class Block(nn.Module):
    """Modules and tensors by name; those that are not trained are buffers."""

    def __init__(self, /, **members):
        super().__init__()
        for name, member in members.items():
            if isinstance(member, (nn.Module, nn.Parameter)):
                setattr(self, name, member)
            else:
                self.register_buffer(name, member)'''
_READ_NESTED = "tensors(torch.load(path, weights_only=True))"
_NESTED = """

def tensors(value, name=""):
    \"\"\"Return the tensors of nested dictionaries and lists by their dotted names.\"\"\"
    if not isinstance(value, (dict, list, tuple)):
        return {name: value} if torch.is_tensor(value) else {}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    parts = (tensors(each, f"{name}.{key}" if name else str(key)) for key, each in entries)
    return {key: each for part in parts for key, each in part.items()}
"""
_DOTTED = '{name.replace("/", "."): value for name, value in FILE.items()}'
# Other entries are values and the tree; NumPy has no bfloat16.
_ARRAYS = """

def arrays(values, names):
    \"\"\"Return the tensors of these names.\"\"\"
    return {
        name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        if value.dtype.kind == "V" else torch.from_numpy(value)
        for name, value in values.items()
        if name in names
    }
"""
_KERAS_HEAD = """
IMPORTSimport keras
import numpy as np
from keras import ops


"""
SELECTED = """    names = model.state_dict()
    state = {name: value for name, value in state.items() if name in names}
"""
TENSORS = (
    "# Name, type and shape of each tensor that is in no layer, and whether it is trained.",
    "TENSORS = {",
)
LAYER = '''
    def layer(self, layer, shape, *names):
        """Return a layer, whose variables have these names in the file."""
        layer.build(shape)
        self.stored |= dict(zip(names, layer.weights, strict=True))
        return layer
'''
_KERAS_TENSOR = """
    def tensor(self, name):
        return ops.convert_to_tensor(self.stored[name])
"""
_KERAS_LOAD = """

def load(path):
    \"\"\"Return the model with the weights of the file, which must contain each in its shape.\"\"\"
    model = Model()
    with OPEN as file:
        for name, variable in model.stored.items():
            value = READ
            if value.shape != tuple(variable.shape):
                raise ValueError(f"{name} has the shape {value.shape} in the file, not {variable.shape}")
            variable.assign(value)
    return model
"""
ACT = """

def act(model, ARGUMENTS):
    \"\"\"Return the actions.\"\"\"
RUN
    output = np.asarray(results)
    return RESULT
"""
ACT_WITH_STATES = """

def act(model, ARGUMENTS):
    \"\"\"Return the actions and the next states; the states come after the observations.\"\"\"
RUN
    output, *states = map(np.asarray, results)
    return (RESULT, *states)
"""
_TORCH_RUN = """    with torch.no_grad():
        results = model(*(torch.as_tensor(each, dtype=torch.float32) for each in OBSERVED))"""
_KERAS_RUN = '    results = model(*(np.asarray(each, "float32") for each in OBSERVED))'
# Functions of the code.
_TORCH_HELPERS = {
    "divide": '''def divide(a, b):
    """Return a / b; whole numbers are divided without a rest."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")''',
    "run_memory": '''def run_memory(layer, x, states):
    """Return the outputs [steps, directions, batch, units] and the last states [directions, batch, units]."""
    first = (tuple(states) if isinstance(layer, nn.LSTM) else states[0]) if states else None
    outputs, last = layer(x, first)
    outputs = outputs.unflatten(-1, (-1, layer.hidden_size)).transpose(1, 2)
    return (outputs, *last) if isinstance(layer, nn.LSTM) else (outputs, last)''',
}
_KERAS_HELPERS = {
    "divide": '''def divide(a, b):
    """Return a / b; whole numbers are divided without a rest."""
    if "float" in keras.backend.standardize_dtype(a.dtype):
        return a / b
    return ops.sign(a) * ops.sign(b) * (ops.abs(a) // ops.abs(b))''',
    "convolve": '''def convolve(x, kernel, bias, strides, pads, dilations, groups):
    """Convolve x [batch, channels, ...] with a kernel [out, in, ...], padded by zeros on both sides."""
    axes = range(2, len(kernel.shape))
    x = ops.transpose(ops.pad(x, [(0, 0), (0, 0), *pads]), (0, *axes, 1))
    kernel = ops.transpose(kernel, (*axes, 1, 0))
    parts = zip(ops.split(x, groups, -1), ops.split(kernel, groups, -1))
    y = [ops.conv(part, w, strides, "valid", "channels_last", dilations) for part, w in parts]
    y = ops.concatenate(y, -1) if groups > 1 else y[0]
    y = y if bias is None else y + bias
    return ops.transpose(y, (0, len(kernel.shape) - 1, *(axis - 1 for axis in axes)))''',
    "channels_last": '''def channels_last(layer, x, pads):
    """Apply a layer to x [batch, channels, ...], padded by zeros on both sides, with the channels last."""
    x = ops.moveaxis(x, 1, -1)
    x = ops.pad(x, [(0, 0), *pads, (0, 0)]) if any(map(any, pads)) else x
    return ops.moveaxis(layer(x), -1, 1)''',
    "pool": '''def pool(x, kind, size, strides, pads, counted=True):
    """Return the largest or mean entries of the windows of x [batch, channels, ...]."""
    axes, sides = range(2, len(x.shape)), [(0, 0), (0, 0), *pads]
    def run(function, values, fill):
        values = ops.pad(values, sides, constant_values=fill) if any(map(any, pads)) else values
        values = function(ops.transpose(values, (0, *axes, 1)), size, strides, "valid", "channels_last")
        return ops.transpose(values, (0, len(x.shape) - 1, *(axis - 1 for axis in axes)))
    if kind == "max":
        return run(ops.max_pool, x, float("-inf"))
    mean = run(ops.average_pool, x, 0.0)
    return mean if counted else mean / run(ops.average_pool, ops.ones_like(x), 0.0)''',
    "normalize": '''def normalize(x, axes, scale, bias, epsilon):
    """Return x less its mean, over its deviation, times the scale plus the bias."""
    centred = x - ops.mean(x, axes, keepdims=True)
    x = centred / ops.sqrt(ops.mean(ops.square(centred), axes, keepdims=True) + epsilon)
    x = x if scale is None else x * scale
    return x if bias is None else x + bias''',
    "by_channel": '''def by_channel(x, values):
    """Return a value of each channel in the form of x [batch, channels, ...]."""
    return None if values is None else ops.reshape(values, (-1, *[1] * (len(x.shape) - 2)))''',
    "normalize_groups": '''def normalize_groups(x, groups, scale, bias, epsilon):
    """Normalize the channels of each group together."""
    rows = ops.reshape(x, (ops.shape(x)[0], groups, -1))
    y = ops.reshape(normalize(rows, -1, None, None, epsilon), ops.shape(x))
    y = y if scale is None else y * by_channel(x, scale)
    return y if bias is None else y + by_channel(x, bias)''',
    "attend": '''def attend(q, k, v, mask, causal, scale):
    """Return the values that the queries choose, [..., queries, size]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) * scale
    if causal:
        mask = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
    if mask is not None and "bool" in str(mask.dtype):
        scores = ops.where(mask, scores, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return ops.matmul(ops.softmax(scores, axis=-1), v)''',
    "split_heads": '''def split_heads(x, heads):
    """Return [batch, heads, steps, size] of [batch, steps, heads * size]."""
    return ops.transpose(ops.reshape(x, (*ops.shape(x)[:2], heads, x.shape[-1] // heads)), (0, 2, 1, 3))''',
    "join_heads": '''def join_heads(x):
    """Return [batch, steps, heads * size] of [batch, heads, steps, size]."""
    rows = ops.transpose(x, (0, 2, 1, 3))
    return ops.reshape(rows, (*ops.shape(rows)[:2], x.shape[1] * x.shape[3]))''',
}
# Those of both frameworks; the gates of recurrent layers have ONNX's order.
_CELLS = {
    "run_cell": '''def run_cell(cell, x, w, r, bias, states, directions):
    """Return the outputs [steps, directions, batch, units] and the last states [directions, batch, units]."""
    outputs, lasts = [], []
    states = states or [ops.zeros((w.shape[0], ops.shape(x)[1], r.shape[2]), dtype=x.dtype)] * 2
    for n, step in enumerate(directions):
        state, steps = [each[n] for each in states], []
        for at in range(x.shape[0])[::step]:
            state = cell(x[at], state, w[n], r[n], *ops.split(bias[n], 2))
            steps.append(state[0])
        outputs.append(ops.stack(steps[::step]))
        lasts.append(state)
    return (ops.stack(outputs, 1), *(ops.stack(each) for each in zip(*lasts)))''',
    "batch_first": """def batch_first(results):
    outputs, *states = results
    return (ops.transpose(outputs, (2, 0, 1, 3)), *(ops.swapaxes(each, 0, 1) for each in states))""",
    "lstm_cell": """def lstm_cell(x, state, w, r, bias, bias_state):
    gates = x @ ops.swapaxes(w, 0, 1) + state[0] @ ops.swapaxes(r, 0, 1) + bias + bias_state
    i, o, f, g = ops.split(gates, 4, -1)
    c = ops.sigmoid(f) * state[1] + ops.sigmoid(i) * ops.tanh(g)
    return ops.sigmoid(o) * ops.tanh(c), c""",
    "gru_cell": """def gru_cell(x, state, w, r, bias, bias_state):
    h = state[0]
    zx, rx, nx = ops.split(x @ ops.swapaxes(w, 0, 1) + bias, 3, -1)
    zh, rh, nh = ops.split(h @ ops.swapaxes(r, 0, 1) + bias_state, 3, -1)
    z = ops.sigmoid(zx + zh)
    return ((1 - z) * ops.tanh(nx + ops.sigmoid(rx + rh) * nh) + z * h,)""",
    "reset_first_cell": """def reset_first_cell(x, state, w, r, bias, bias_state):
    h, both = state[0], 2 * r.shape[1]
    sums = x @ ops.swapaxes(w, 0, 1) + bias + bias_state
    gates = ops.sigmoid(sums[:, :both] + h @ ops.swapaxes(r[:both], 0, 1))
    z, reset = ops.split(gates, 2, -1)
    return ((1 - z) * ops.tanh(sums[:, both:] + (reset * h) @ ops.swapaxes(r[both:], 0, 1)) + z * h,)""",
    "rnn_cell": """def rnn_cell(x, state, w, r, bias, bias_state):
    sums = x @ ops.swapaxes(w, 0, 1) + state[0] @ ops.swapaxes(r, 0, 1)
    return (ops.tanh(sums + bias + bias_state),)""",
}
_AS_TORCH = {"split": "tensor_split", "transpose": "permute"}


def _in_torch(text: str) -> str:
    """Return a function of keras.ops in the words of PyTorch."""
    text = text.replace("ops.shape(x)", "x.shape")
    return re.sub(r"\bops\.(\w+)", lambda match: f"torch.{_AS_TORCH.get(match[1], match[1])}", text)


ONE_HOT = """

def encoded(observations):
    \"\"\"Return the observations with one-hot rows instead of the numbers of discrete ones.\"\"\"
    inputs = list(observations)
    for at, space in enumerate(SPACES):
        if space is not None:
            counts, starts, single = space
            numbers = np.asarray(inputs[at])
            numbers = numbers.reshape(-1, 1) if single else numbers
            places = numbers - np.array(starts)
            if (places < 0).any() or (places >= np.array(counts)).any():
                raise ValueError(f"an observation is outside its space: {numbers.tolist()}")
            rows = [np.eye(count, dtype="float32")[places[:, n]] for n, count in enumerate(counts)]
            inputs[at] = np.concatenate(rows, -1)
    return inputs
"""


STATES = """

def with_states(inputs):
    \"\"\"Return the observations with zeros for the states, which are not given in the first step.\"\"\"
    zeros = [np.zeros((len(inputs[0]), *size), "float32") for size in STATES]
    return (*inputs, *zeros[len(inputs) - COUNT :])
"""


class Language(NamedTuple):
    """What differs between the codes of the frameworks; `column` is that of pairs of templates.

    Tensors have the keys of the file if it is `keyed`, else those of nested dictionaries.
    """

    column: int
    head: str
    load: str
    run: str
    method: str
    base: str
    start: str
    helpers: Mapping[str, str]
    keyed: bool = True

    @property
    def load_flat(self) -> str:
        """The function that loads a file of tensors by name, without further dictionaries."""
        return self.load.replace(_READ_NESTED, "torch.load(path, weights_only=True)").replace(_NESTED, "")

    @property
    def tensor(self) -> str:
        """The method that returns a tensor by its name in the file."""
        return _KERAS_TENSOR if self.keras else ""

    @property
    def keras(self) -> bool:
        """Return whether the code is for Keras."""
        return self.column == 1


def _keras(imports: str, opened: str, read: str, more: str = "") -> Language:
    head = _KERAS_HEAD.replace("IMPORTS", imports)
    load = _KERAS_LOAD.replace("OPEN", opened).replace("READ", read) + more
    start = "super().__init__(autocast=False)"
    return Language(1, head, load, _KERAS_RUN, "call", "keras.Model", start, _KERAS_HELPERS | _CELLS)


def _torch(imports: str, read: str, more: str = "") -> Language:
    head, load = _TORCH_HEAD.replace("IMPORTS", imports), _TORCH_LOAD.replace("READ", read) + more
    if more == _ARRAYS:
        load = load.replace("SELECTION", "SELECTION    state = arrays(state, model.state_dict())\n")
    helpers = _TORCH_HELPERS | {name: _in_torch(text) for name, text in _CELLS.items()}
    start = "super().__init__()"
    keyed = more != _NESTED
    return Language(0, head, load, _TORCH_RUN, "forward", "nn.Module", start, helpers, keyed=keyed)


# Keras writes bfloat16 as bytes of two, and names it in an attribute.
_STORED = """

def stored(dataset):
    kind = dataset.attrs.get("dtype")
    return np.asarray(dataset).view(kind) if kind == "bfloat16" else np.asarray(dataset)
"""
_BUNDLE = "contextlib.nullcontext(tf.train.load_checkpoint(path))"
LANGUAGES = {
    "torch": _torch("", _READ_NESTED, _NESTED),
    "safetensors": _torch(
        "from safetensors.torch import load_file\n", _DOTTED.replace("FILE", "load_file(path)")
    ),
    "npz": _torch("", _DOTTED.replace("FILE", "np.load(path)"), _ARRAYS),
    "keras": _keras("import h5py\n", "h5py.File(path)", "stored(file[name])", _STORED),
    "tf": _keras(
        "import contextlib\n\nimport tensorflow as tf\n", _BUNDLE, "np.asarray(file.get_tensor(name))"
    ),
}
"""Targets whose code can be written from a graph, and the language of each."""
KERNEL_LANGUAGES = {
    "safetensors": _keras(
        "from safetensors import safe_open\n", 'safe_open(path, "numpy")', "file.get_tensor(name)"
    ),
    "npz": _keras("", "np.load(path)", "file[name]"),
}
"""Languages of arrays that have the names of Keras's layers."""
