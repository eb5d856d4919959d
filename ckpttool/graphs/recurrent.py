"""Recurrent layers: LSTM, GRU and RNN over a sequence [steps, batch, inputs], in one or two directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.graphs.elementwise import sigmoid
from ckpttool.graphs.operators import OperatorCall, operator

_Function = Callable[["np.ndarray"], "np.ndarray"]
# By lowercase name: the function of an entry, alpha and beta, and the defaults of these; None if it has none.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], float | None, float | None]] = {
    "relu": (lambda x, _a, _b: np.maximum(x, 0), None, None),
    "tanh": (lambda x, _a, _b: np.tanh(x), None, None),
    "sigmoid": (lambda x, _a, _b: sigmoid(x), None, None),
    "softsign": (lambda x, _a, _b: x / (1 + np.abs(x)), None, None),
    "softplus": (lambda x, _a, _b: np.logaddexp(x, np.asarray(0, x.dtype)), None, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, _b: np.where(x < 0, a * x, x), 0.01, None),
    "thresholdedrelu": (lambda x, a, _b: np.where(x > a, x, 0), 1.0, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, _b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x), 1.0, None),
}


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> Iterator[_Function]:
    """Yield the functions; those that have an alpha or a beta take the next one of the lists."""
    next_alpha, next_beta = iter(alphas), iter(betas)
    for name in names:
        row = _ACTIVATIONS.get(name.lower())
        if row is None:
            raise UnsupportedError("an unknown activation of a recurrent layer", found=name)
        function, alpha, beta = row
        alpha = None if alpha is None else next(next_alpha, alpha)
        beta = None if beta is None else next(next_beta, beta)
        yield lambda x, f=function, a=alpha, b=beta: np.asarray(f(x, a, b)).astype(x.dtype)  # type: ignore[misc]


class _Weights(NamedTuple):
    """The weights of one direction: gates above each other, [gates * units, ...]."""

    inputs: np.ndarray
    states: np.ndarray
    bias_inputs: np.ndarray
    bias_states: np.ndarray
    peepholes: np.ndarray | None

    def gate(self, number: int) -> _Weights:
        """Return the weights of one gate."""
        units = self.states.shape[1]
        rows = slice(number * units, (number + 1) * units)
        inputs, states, bias_inputs, bias_states = (array[rows] for array in self[:4])
        return _Weights(inputs, states, bias_inputs, bias_states, None)

    def project(self, x: np.ndarray, h: np.ndarray) -> np.ndarray:
        """Return the sums of the gates for an input and a state, [batch, gates * units]."""
        return np.asarray(x @ self.inputs.T + h @ self.states.T + self.bias_inputs + self.bias_states)


class _Settings(NamedTuple):
    """Settings of a cell; `limit` clips the inputs of activations, None for no limit."""

    functions: tuple[_Function, ...]
    limit: float | None
    input_forget: int
    linear_before_reset: int

    def clipped(self, x: np.ndarray) -> np.ndarray:
        return x if self.limit is None else np.clip(x, -self.limit, self.limit)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[: len(x) // 2], x[len(x) // 2 :]


_State = tuple["np.ndarray", "np.ndarray"]
_Cell = Callable[["np.ndarray", _State, _Weights, _Settings], _State]


def _rnn_cell(x: np.ndarray, state: _State, weights: _Weights, settings: _Settings) -> _State:
    h = settings.functions[0](settings.clipped(weights.project(x, state[0])))
    return h, state[1]


def _gru_cell(x: np.ndarray, state: _State, weights: _Weights, settings: _Settings) -> _State:
    h, (inner, outer) = state[0], settings.functions
    z = inner(settings.clipped(weights.gate(0).project(x, h)))
    r = inner(settings.clipped(weights.gate(1).project(x, h)))
    last = weights.gate(2)
    if settings.linear_before_reset:
        candidate = x @ last.inputs.T + last.bias_inputs + r * (h @ last.states.T + last.bias_states)
    else:
        candidate = last.project(x, r * h)
    return (1 - z) * outer(settings.clipped(candidate)) + z * h, state[1]


def _lstm_cell(x: np.ndarray, state: _State, weights: _Weights, settings: _Settings) -> _State:
    (h, c), (gate, inner, outer) = state, settings.functions
    # The gates are input, output, forget and cell; peepholes are those of input, output and forget.
    i, o, f, g = np.split(weights.project(x, h), 4, 1)
    zero = np.zeros(h.shape[1], h.dtype)
    looks = [zero] * 3 if weights.peepholes is None else np.split(weights.peepholes, 3)
    i = gate(settings.clipped(i + looks[0] * c))
    f = 1 - i if settings.input_forget else gate(settings.clipped(f + looks[2] * c))
    c = f * c + i * inner(settings.clipped(g))
    return gate(settings.clipped(o + looks[1] * c)) * outer(c), c


_CELLS: dict[str, tuple[int, _Cell, tuple[str, ...]]] = {
    "LSTM": (4, _lstm_cell, ("Sigmoid", "Tanh", "Tanh")),
    "GRU": (3, _gru_cell, ("Sigmoid", "Tanh")),
    "RNN": (1, _rnn_cell, ("Tanh",)),
}


def _run_direction(
    x: np.ndarray,
    state: _State,
    run: tuple[_Cell, _Weights, _Settings],
    lengths: np.ndarray,
    *,
    reverse: bool,
) -> tuple[np.ndarray, _State]:
    """Return the outputs [steps, batch, units] and the last state; steps beyond a length are zeros."""
    cell, weights, settings = run
    outputs = np.zeros((*x.shape[:2], state[0].shape[1]), x.dtype)
    rows = np.arange(x.shape[1])
    for step in range(x.shape[0]):
        active = (step < lengths)[:, None]
        # In reverse, each sequence begins with its own last entry.
        position = np.where(step < lengths, lengths - 1 - step, step) if reverse else np.full(len(rows), step)
        after = cell(x[position, rows], state, weights, settings)
        state = (
            np.where(active, after[0], state[0]).astype(x.dtype),
            np.where(active, after[1], state[1]).astype(x.dtype),
        )
        outputs[position, rows] = np.where(active, state[0], 0)
    return outputs, state


def _recurrent_shape(call: OperatorCall) -> Sequence[Shape]:
    x, directions, units = call.shape(0), call.shape(1)[0], call.shape(2)[2]
    if len(x) != 3 or x[2] != call.shape(1)[2]:
        raise ValueError(x, call.shape(1))
    if call.get("layout"):
        return [(*x[:2], directions, units), *[(x[0], directions, units)] * (len(call.node.outputs) - 1)]
    return [(x[0], directions, x[1], units), *[(directions, x[1], units)] * (len(call.node.outputs) - 1)]


def _recurrent_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:  # noqa: ARG001  # as of any operator
    return math.prod(call.shape(0)[:2]) * (math.prod(call.shape(1)) + math.prod(call.shape(2)))


def _define(name: str) -> None:
    gates, cell, usual = _CELLS[name]

    @operator(name, shapes=_recurrent_shape, macs=_recurrent_macs, kind="recurrent", since=7)
    def compute(
        x: np.ndarray,
        w: np.ndarray,
        r: np.ndarray,
        b: np.ndarray | None = None,
        *rest: np.ndarray | None,
        activation_alpha: Sequence[float] = (),
        activation_beta: Sequence[float] = (),
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,  # noqa: ARG001  # that of r
        input_forget: int = 0,
        layout: int = 0,
        linear_before_reset: int = 0,
    ) -> tuple[np.ndarray, ...]:
        lengths, h, c, peepholes = (*rest, None, None, None, None)[:4]
        if layout:
            x, h, c = (None if array is None else np.swapaxes(array, 0, 1) for array in (x, h, c))  # type: ignore[assignment]
        directions, units = r.shape[0], r.shape[2]
        if directions != 1 + (direction == "bidirectional") or r.shape[1] != gates * units:
            raise ValueError(direction, r.shape)
        names = activations or usual * directions
        functions = tuple(_activations(names, activation_alpha, activation_beta))
        if len(functions) != len(usual) * directions:
            raise ValueError(names)
        steps, batch = x.shape[:2]
        biases = np.zeros((directions, 2 * gates * units), x.dtype) if b is None else b
        counts = np.full(batch, steps) if lengths is None else np.asarray(lengths, np.int64)
        empty = np.zeros((batch, units), x.dtype)
        results, lasts = [], []
        for n in range(directions):
            looks = None if peepholes is None else peepholes[n]
            weights = _Weights(w[n], r[n], *_halves(biases[n]), looks)
            selected = functions[n * len(usual) : (n + 1) * len(usual)]
            run = (cell, weights, _Settings(selected, clip, input_forget, linear_before_reset))
            state = (empty if h is None else h[n], empty if c is None else c[n])
            reverse = n == 1 or direction == "reverse"
            outputs, last = _run_direction(x, state, run, counts, reverse=reverse)
            results.append(outputs)
            lasts.append(last)
        whole = np.stack(results, 1)
        states = [np.stack([last[n] for last in lasts]) for n in range(1 + (name == "LSTM"))]
        if layout:
            return (whole.transpose(2, 0, 1, 3), *(np.swapaxes(array, 0, 1) for array in states))
        return (whole, *states)


for _name in _CELLS:
    _define(_name)
