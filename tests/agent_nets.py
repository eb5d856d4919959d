"""Networks of agents, written once for PyTorch and Keras; their options are faults of exported_faults.py.

A network is a function of the layers and operations of a framework, and of the inputs. Images have the axes
of the framework; everything else is [batch, ...] in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Net = Callable[..., Any]


def _torch_operations() -> type:
    import torch
    from torch import nn
    from torch.nn import functional

    class TorchNet(nn.Module):
        def __getattr__(self, name: str) -> Any:
            """Return a layer, or an operation of PyTorch."""
            if name in self.__dict__.get("_modules", ()):
                return self._modules[name]
            return getattr(functional if name in ("softplus", "elu", "silu", "gelu") else torch, name)

        def __init__(
            self, net: Net, shapes: Sequence[Sequence[int]], whole: Sequence[bool], options: Any
        ) -> None:
            super().__init__()
            self.net, self.options = net, options
            dtypes = [torch.int64 if integers else torch.float32 for integers in whole]
            self(*(torch.zeros(2, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))

        def forward(self, *inputs: Any) -> Any:
            return self.net(self, *inputs, **self.options)

        def layer(self, name: str, create: Callable[[], Any]) -> Any:
            if name not in self._modules:
                self._modules[name] = create()
            return self._modules[name]

        def dense(self, x: Any, width: int, name: str, bias: bool = True) -> Any:
            return self.layer(name, lambda: nn.Linear(x.shape[-1], width, bias=bias))(x)

        def conv(self, x: Any, width: int, size: int, name: str, stride: int = 1) -> Any:
            return self.layer(name, lambda: nn.Conv2d(x.shape[1], width, size, stride))(x)

        def layer_norm(self, x: Any, name: str, eps: float = 1e-5) -> Any:
            return self.layer(name, lambda: nn.LayerNorm(x.shape[-1], eps=eps))(x)

        def embedding(self, x: Any, rows: int, width: int, name: str) -> Any:
            return self.layer(name, lambda: nn.Embedding(rows, width))(x)

        def lstm(self, x: Any, width: int, name: str, state: Any = None) -> Any:
            state = None if state is None else tuple(part[None] for part in state)
            y, (h, c) = self.layer(name, lambda: nn.LSTM(x.shape[-1], width, batch_first=True))(x, state)
            return y, h[0], c[0]

        def gru(self, x: Any, width: int, name: str, state: Any = None) -> Any:
            y, h = self.layer(name, lambda: nn.GRU(x.shape[-1], width, batch_first=True))(
                x, None if state is None else state[None]
            )
            return y, h[0]

        def pixels(self, x: Any) -> Any:
            """Return an image flattened, channels last."""
            return x.permute(0, 2, 3, 1).flatten(1)

        def channels_in_reverse(self, x: Any) -> Any:
            return x.flip(1)

        def expand(self, x: Any, axis: int) -> Any:
            return x.unsqueeze(axis)

        def concat(self, rows: Sequence[Any], axis: int = -1) -> Any:
            return torch.cat(list(rows), axis)

        def reshape(self, x: Any, *shape: int) -> Any:
            return x.reshape(-1, *shape)

        def swap(self, x: Any, one: int, other: int) -> Any:
            return x.transpose(one, other)

        def mean(self, x: Any, axis: int, keepdims: bool = False) -> Any:
            return x.mean(axis, keepdim=keepdims)

        def sum(self, x: Any, axis: int, keepdims: bool = False) -> Any:
            return x.sum(axis, keepdim=keepdims)

        def max(self, x: Any, axis: int, keepdims: bool = False) -> Any:
            return x.amax(axis, keepdim=keepdims)

        def clip(self, x: Any, low: float, high: float) -> Any:
            return x.clamp(low, high)

        def sort(self, x: Any) -> Any:
            return torch.sort(x, -1)[0]

        def flip(self, x: Any, axis: int) -> Any:
            return x.flip(axis)

        def hidden_after(self, size: int) -> Any:
            """Return a causal mask [size, size]: true where a later step is hidden."""
            return torch.ones(size, size).triu(1) > 0

    return TorchNet


def _keras_operations() -> type:
    import keras
    import numpy as np
    from keras import layers, ops

    class KerasNet:
        swap, expand = map(staticmethod, (ops.swapaxes, ops.expand_dims))

        def __getattr__(self, name: str) -> Any:
            """Return an operation of Keras."""
            return getattr(ops, name)

        def __init__(self) -> None:
            self._layers: dict[str, Any] = {}

        def build(
            self, net: Net, names: Sequence[str], shapes: Sequence[Any], whole: Sequence[bool], options: Any
        ) -> Any:
            inputs = [
                layers.Input(shape, name=name or None, dtype="int32" if integers else None)
                for name, shape, integers in zip(names, shapes, whole, strict=True)
            ]
            return keras.Model(inputs, net(self, *inputs, **options))

        def layer(self, name: str, create: Callable[[], Any]) -> Any:
            if name not in self._layers:
                self._layers[name] = create()
            return self._layers[name]

        def gelu(self, x: Any) -> Any:
            return ops.gelu(x, approximate=False)

        def dense(self, x: Any, width: int, name: str, bias: bool = True) -> Any:
            return self.layer(name, lambda: layers.Dense(width, use_bias=bias, name=name))(x)

        def conv(self, x: Any, width: int, size: int, name: str, stride: int = 1) -> Any:
            return self.layer(name, lambda: layers.Conv2D(width, size, stride, name=name))(x)

        def layer_norm(self, x: Any, name: str, eps: float = 1e-5) -> Any:
            return self.layer(name, lambda: layers.LayerNormalization(epsilon=eps, name=name))(x)

        def embedding(self, x: Any, rows: int, width: int, name: str) -> Any:
            return self.layer(name, lambda: layers.Embedding(rows, width, name=name))(x)

        def lstm(self, x: Any, width: int, name: str, state: Any = None) -> Any:
            cell = self.layer(
                name, lambda: layers.LSTM(width, return_sequences=True, return_state=True, name=name)
            )
            return cell(x, initial_state=None if state is None else list(state))

        def gru(self, x: Any, width: int, name: str, state: Any = None) -> Any:
            cell = self.layer(
                name, lambda: layers.GRU(width, return_sequences=True, return_state=True, name=name)
            )
            return cell(x, initial_state=state)

        def pixels(self, x: Any) -> Any:
            return layers.Flatten()(x)

        def channels_in_reverse(self, x: Any) -> Any:
            return ops.flip(x, -1)

        def reshape(self, x: Any, *shape: int) -> Any:
            return ops.reshape(x, (-1, *shape))

        def concat(self, rows: Sequence[Any], axis: int = -1) -> Any:
            return ops.concatenate(list(rows), axis)

        def hidden_after(self, size: int) -> Any:
            return ops.convert_to_tensor(np.triu(np.ones((size, size)), 1) > 0)

    return KerasNet


# The networks.


def dueling_pixels(
    o: Any,
    x: Any,
    scale: float = 255.0,
    frames: str = "old first",
    centre: str = "mean",
    twice: bool = False,
    flat: str = "relu",
) -> Any:
    """A dueling network of values of actions from stacked frames."""
    x = o.channels_in_reverse(x) if frames == "new first" else x
    x = o.relu(o.conv(x / scale, 4, 3, "conv1", 2))
    x = o.pixels(o.conv(x, 5, 2, "conv2"))
    x = o.relu(x) if flat == "relu" else x
    value, advantage = o.relu(o.dense(x, 6, "value1")), o.relu(o.dense(x, 6, "adv1"))
    value, advantage = o.dense(value, 1, "value2"), o.dense(advantage, 3, "adv2")
    centres = {"mean": o.mean, "max": o.max}
    advantage = advantage - centres[centre](advantage, -1, keepdims=True) if centre else advantage
    return (2 * value if twice else value) + advantage


def sac_head(
    o: Any,
    x: Any,
    rescaled: bool = True,
    low: float = -5.0,
    halves: str = "mean first",
    correction: str = "softplus",
    centre: float = 0.5,
    spread: str = "exp",
) -> Any:
    """A squashed Gaussian policy with the logarithm of its density at the mean, and a deviation."""
    h = o.silu(o.dense(x, 8, "body"))
    both = o.dense(h, 6, "both")
    mean, log_std = (both[:, :3], both[:, 3:]) if halves == "mean first" else (both[:, 3:], both[:, :3])
    log_std = low + 0.5 * (2.0 - low) * (o.tanh(log_std) + 1) if rescaled else o.clip(log_std, low, 2.0)
    std = o.exp(log_std) if spread == "exp" else o.softplus(log_std)
    if correction == "softplus":
        lost = 2 * (math.log(2) - mean - o.softplus(-2 * mean))
    else:
        lost = o.log(1 - o.tanh(mean) * o.tanh(mean) + 1e-6) if correction == "root" else 0 * mean
    return 2.0 * o.tanh(mean) + centre, o.sum(-log_std - lost, -1, keepdims=True), std


def recurrent_ppo(
    o: Any,
    obs: Any,
    start: Any,
    h: Any,
    c: Any,
    reset: str = "both",
    inverted: bool = False,
    joined: str = "obs first",
    active: str = "tanh",
    value: str = "memory",
) -> Any:
    """An actor and a critic with an LSTM, whose state a flag of a new episode resets."""
    keep = start if inverted else 1 - start
    x = o.dense(obs, 5, "body")
    x = o.tanh(x) if active == "tanh" else x
    parts = [x, obs[:, :2]] if joined == "obs first" else [obs[:, :2], x]
    h, c = (h * keep if reset in ("both", "h") else h), (c * keep if reset in ("both", "c") else c)
    y, h, c = o.lstm(o.expand(o.concat(parts), 1), 5, "memory", (h, c))
    return (
        o.log_softmax(o.dense(y[:, 0], 4, "pi"), -1),
        o.dense(y[:, 0] if value == "memory" else x, 1, "vf"),
        h,
        c,
    )


def gated_memory(
    o: Any,
    x: Any,
    past: Any,
    bias: float = 2.0,
    swapped: bool = False,
    active: bool = True,
    order: str = "past first",
    scale: float = 0.5,
    masked: bool = True,
) -> Any:
    """A block of a gated transformer: attention to a memory and to itself, joined by the gates of a GRU."""
    whole = o.concat([past, x] if order == "past first" else [x, past], 1)
    y = o.layer_norm(whole, "norm")
    q, k, v = o.dense(y[:, -4:], 4, "query"), o.dense(y, 4, "key"), o.dense(y, 4, "value")
    scores = o.matmul(q, o.swap(k, 1, 2)) * scale
    if masked:
        scores = o.where(o.hidden_after(7)[3:], -1e9 * o.ones_like(scores), scores)
    y = o.dense(o.matmul(o.softmax(scores, -1), v), 6, "proj")
    y = o.relu(y) if active else y
    r = o.sigmoid(o.dense(y, 6, "wr", bias=False) + o.dense(x, 6, "ur", bias=False))
    z = o.sigmoid(o.dense(y, 6, "wz", bias=False) + o.dense(x, 6, "uz", bias=False) - bias)
    new = o.tanh(o.dense(y, 6, "wg", bias=False) + o.dense(r * x, 6, "ug", bias=False))
    return z * x + (1 - z) * new if swapped else (1 - z) * x + z * new


def world_vae(
    o: Any,
    x: Any,
    noise: Any,
    drawn: str = "spread",
    one: bool = True,
    over: str = "sum",
    last: str = "sigmoid",
    prior: str = "-",
    half: float = 0.5,
) -> Any:
    """A variational encoder with noise as an input, its divergence, and a prediction of the reward."""
    h = o.elu(o.dense(x, 8, "encode"))
    mean, log_var = o.dense(h, 3, "mean"), o.dense(h, 3, "log_var")
    z = mean + (o.exp(0.5 * log_var) * noise if drawn == "spread" else noise)
    terms = o.exp(log_var) + mean * mean - log_var - (1.0 if one else 0.0)
    kl = half * (o.sum(terms, -1, keepdims=True) if over == "sum" else o.mean(terms, -1, keepdims=True))
    y = o.dense(o.elu(o.dense(z, 8, "decode")), 6, "pixels")
    reward = o.dense(o.concat([z, noise] if prior == "-" else [noise, z]), 1, "reward")
    return o.sigmoid(y) if last == "sigmoid" else y, kl, reward


def routed_experts(
    o: Any,
    x: Any,
    best: int = 2,
    renormed: bool = True,
    warmth: float = 1.0,
    use: str = "weighed",
    inner: str = "gelu",
    first: bool = True,
) -> Any:
    """Four experts, of which each row uses the two with the largest shares."""
    shares = o.softmax(o.dense(x, 4, "gate") / warmth, -1)
    top = o.max(shares, -1, keepdims=True)
    second = o.max(o.where(shares >= top, 0 * shares, shares), -1, keepdims=True)
    chosen = o.where(shares >= (second if best == 2 else top), shares, 0 * shares)
    chosen = chosen / o.sum(chosen, -1, keepdims=True) if renormed else chosen
    h = getattr(o, inner)(o.dense(x, 20, "experts"))
    rows = o.reshape(h, 4, 5) if first else o.swap(o.reshape(h, 5, 4), 1, 2)
    mixed = o.sum(rows * o.expand(chosen, 2), 1) if use == "weighed" else o.max(rows * o.expand(chosen, 2), 1)
    return o.dense(mixed, 3, "out")


def modulated(
    o: Any,
    x: Any,
    task: Any,
    early: bool = True,
    apart: str = "halves",
    active: str = "before",
    turned: bool = False,
    bounded: bool = False,
) -> Any:
    """Features that a task scales and shifts, behind a norm."""
    both = o.dense(o.relu(o.dense(task, 7, "task_in")), 12, "film")
    if apart == "halves":
        gamma, beta = both[:, :6], both[:, 6:]
    else:
        pairs = o.reshape(both, 6, 2)
        gamma, beta = pairs[:, :, 0], pairs[:, :, 1]
    gamma = o.flip(gamma, 1) if turned else gamma
    gamma = o.tanh(gamma) if bounded else gamma
    y = o.dense(x, 6, "body")
    y = o.layer_norm(y, "norm") if early else y
    y = o.relu(y) if active == "both" else y
    y = y * (1 + gamma) + beta
    y = y if early else o.layer_norm(y, "norm")
    return o.dense(o.relu(y), 3, "head")


def truncated_critics(
    o: Any,
    x: Any,
    action: Any,
    dropped: str = "top",
    sorted_: bool = True,
    count: int = 2,
    over: str = "mean",
    joined: str = "x first",
) -> Any:
    """Quantiles of two critics, sorted together, without the largest ones."""
    both = o.concat([x, action] if joined == "x first" else [action, x])
    rows = [o.dense(o.relu(o.dense(both, 8, f"q{n}_in")), 5, f"q{n}_out") for n in (1, 2)]
    whole = o.concat(rows)
    whole = o.sort(whole) if sorted_ else whole
    left = whole[:, : 10 - count] if dropped == "top" else whole[:, count:]
    return o.mean(left, -1, keepdims=True) if over == "mean" else o.max(left, -1, keepdims=True)


def pop_art(
    o: Any,
    x: Any,
    deviation: float = 3.0,
    mean: float = 1.5,
    centred: bool = True,
    limit: float = 2.0,
    root: bool = False,
) -> Any:
    """Values in the units of returns from normalized observations."""
    x = (x - 0.3 if centred else x) / 0.8
    x = o.clip(x, -limit, limit)
    h = o.tanh(o.dense(x, 8, "body1"))
    h = o.tanh(o.dense(h, 8, "body2")) + h
    value = o.dense(h, 1, "value")
    value = o.sign(value) * (o.sqrt(o.abs(value) + 1) - 1) if root else value
    return value * deviation + mean, o.dense(h, 3, "policy")


def entity_pool(
    o: Any,
    units: Any,
    there: Any,
    count: str = "there",
    hidden: str = "low",
    use: str = "both",
    order: str = "mean first",
    masked: bool = True,
) -> Any:
    """The mean and the maximum over the units that exist."""
    h = o.relu(o.dense(units, 6, "unit"))
    m = o.expand(there, 2)
    total = o.sum(h * m if masked else h, 1)
    mean = total / (o.sum(m, 1) + 1e-3) if count == "there" else total / 5.0
    top = o.max(o.where(m > 0, h, (-1e9 if hidden == "low" else 0.0) * o.ones_like(h)), 1)
    parts = [mean, o.tanh(top)] if order == "mean first" else [o.tanh(top), mean]
    return o.dense(o.concat(parts), 3, "head")


def discrete_world(
    o: Any,
    x: Any,
    h: Any,
    mix: float = 0.01,
    over: str = "classes",
    update: float = 1.0,
    reset: str = "product",
    active: str = "silu",
) -> Any:
    """A recurrent world model with a normed cell and groups of classes."""
    joint = o.layer_norm(
        o.dense(o.concat([getattr(o, active)(o.dense(x, 6, "embed")), h]), 15, "cell", bias=False),
        "cell_norm",
    )
    r, new, u = joint[:, :5], joint[:, 5:10], joint[:, 10:]
    new = o.tanh(o.sigmoid(r) * new if reset == "product" else new)
    u = o.sigmoid(u - update)
    h = u * new + (1 - u) * h
    logits = o.reshape(o.dense(h, 12, "prior"), 3, 4)
    probs = o.softmax(logits, -1 if over == "classes" else 1)
    return h, o.log((1 - mix) * probs + mix / 4 + (0.0 if mix else 1e-8))


def decision_steps(
    o: Any,
    returns: Any,
    states: Any,
    actions: Any,
    steps: Any,
    token: int = 1,
    order: str = "rsa",
    timed: str = "all",
    causal: bool = True,
    last: str = "tanh",
) -> Any:
    """Three steps of returns, states and actions, of which a transformer predicts the actions."""
    time = o.embedding(steps, 9, 6, "time")
    rows = {"r": o.dense(returns, 6, "r"), "s": o.dense(states, 6, "s"), "a": o.dense(actions, 6, "a")}
    timed_rows = "rsa" if timed == "all" else "rs"
    whole = o.stack([rows[name] + time if name in timed_rows else rows[name] for name in order], 2)
    x = o.layer_norm(o.reshape(whole, 9, 6), "norm")
    scores = o.matmul(o.dense(x, 6, "query"), o.swap(o.dense(x, 6, "key"), 1, 2)) / 6**0.5
    if causal:
        scores = o.where(o.hidden_after(9), -1e9 * o.ones_like(scores), scores)
    x = x + o.dense(o.matmul(o.softmax(scores, -1), o.dense(x, 6, "value")), 6, "proj")
    action = o.dense(o.reshape(x, 3, 3, 6)[:, :, token], 2, "act")
    return o.tanh(action) if last == "tanh" else action


def mixed_values(
    o: Any,
    values: Any,
    state: Any,
    positive: str = "abs",
    active: str = "elu",
    shifted: bool = True,
    turned: bool = False,
) -> Any:
    """The values of three agents, joined by weights that a network computes from the state."""
    w1, w2 = o.dense(state, 12, "w1"), o.dense(state, 4, "w2")
    if positive:
        w1, w2 = getattr(o, positive)(w1), getattr(o, positive)(w2)
    w1 = o.swap(o.reshape(w1, 4, 3), 1, 2) if turned else o.reshape(w1, 3, 4)
    h, shift = o.matmul(o.expand(values, 1), w1)[:, 0], o.dense(state, 4, "b1")
    h = getattr(o, active)(h + shift if shifted else h)
    y = o.sum(h * w2, -1, keepdims=True)
    return y + o.dense(o.relu(o.dense(state, 4, "b2_in")), 1, "b2_out")


SHAPES = {
    "dueling_pixels": "4,9,9",
    "sac_head": "5",
    "recurrent_ppo": "obs=5;start=1;h=5;c=5",
    "gated_memory": "x=4,6;past=3,6",
    "world_vae": "x=6;noise=3",
    "routed_experts": "6",
    "modulated": "x=5;task=4",
    "truncated_critics": "x=5;action=2",
    "pop_art": "6",
    "entity_pool": "units=5,4;there=5",
    "discrete_world": "x=4;h=5",
    "decision_steps": "returns=3,1;states=3,4;actions=3,2;steps=3",
    "mixed_values": "values=3;state=5",
}
WHOLE = ("steps",)


def _parsed(name: str) -> tuple[list[str], list[tuple[int, ...]]]:
    rows = [row.rpartition("=")[::2] for row in SHAPES[name].split(";")]
    return [row[0] for row in rows], [tuple(map(int, row[1].split(","))) for row in rows]


def torch_net(name: str, **options: Any) -> Any:
    """Return a network in PyTorch."""
    names, shapes = _parsed(name)
    return _torch_operations()(globals()[name], shapes, [title in WHOLE for title in names], options).eval()


def keras_net(name: str, **options: Any) -> Any:
    """Return a network in Keras."""
    names, shapes = _parsed(name)
    shapes = [(*shape[1:], shape[0]) if len(shape) > 2 else shape for shape in shapes]
    return _keras_operations()().build(
        globals()[name], names, shapes, [title in WHOLE for title in names], options
    )
