"""Operators on signals: Fourier transforms, window functions, filter banks."""

from __future__ import annotations

from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.dtypes import np
from ckpttool.graphs.operators import operator, require_size


def _complex(x: np.ndarray) -> np.ndarray:
    """Return the numbers of a last axis of length 1 (real) or 2 (real and imaginary parts)."""
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def _pairs(z: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.stack([z.real, z.imag], -1).astype(dtype)


@operator("DFT")
def _fourier_transform(
    x: np.ndarray,
    length: np.ndarray | None = None,
    axis: np.ndarray | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> np.ndarray:
    along = -2 if axis is None else int(np.asarray(axis).reshape(()))
    along = along % x.ndim
    # The inverse of a one-sided transform restores the half that was left out.
    usual = 2 * (x.shape[along] - 1) if inverse and onesided else x.shape[along]
    count = usual if length is None else int(np.asarray(length).reshape(()))
    require_size([*x.shape[:along], count, *x.shape[along + 1 :]])
    if inverse and onesided:
        return np.fft.irfft(_complex(x), count, along)[..., None].astype(x.dtype)
    if inverse:
        return _pairs(np.fft.ifft(_complex(x), count, along), x.dtype)
    result = np.fft.fft(_complex(x), count, along)
    return _pairs(np.take(result, range(count // 2 + 1), along) if onesided else result, x.dtype)


@operator("STFT")
def _short_time_transform(
    signal: np.ndarray,
    step: np.ndarray,
    window: np.ndarray | None = None,
    length: np.ndarray | None = None,
    *,
    onesided: int = 1,
) -> np.ndarray:
    hop = int(np.asarray(step).reshape(()))
    sizes = [int(np.asarray(length).reshape(()))] if length is not None else []
    count = sizes[0] if sizes else (len(window) if window is not None else signal.shape[1])
    frames = 1 + (signal.shape[1] - count) // hop
    require_size([signal.shape[0], frames, count])
    z, parts = _complex(signal if signal.ndim == 3 else signal[..., None]), []
    for frame in range(frames):
        part = z[:, frame * hop : frame * hop + count]
        parts.append(np.fft.fft(part if window is None else part * window, count, 1))
    result = np.stack(parts, 1)
    return _pairs(result[..., : count // 2 + 1] if onesided else result, signal.dtype)


_COSINES = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


def _define_window(name: str) -> None:
    constant, first, second = _COSINES[name]

    def compute(size: np.ndarray, *, output_datatype: str = "float32", periodic: int = 1) -> np.ndarray:
        count = int(np.asarray(size).reshape(()))
        require_size([count])
        angle = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
        window = constant - first * np.cos(angle) + second * np.cos(2 * angle)
        return np.asarray(window).astype(dtypes.numpy_dtype(output_datatype))

    operator(name, shapes=lambda call: [(int(np.asarray(call.value(0)).reshape(())),)])(compute)


for _name in _COSINES:
    _define_window(_name)


@operator("MelWeightMatrix")
def _mel_weights(*inputs: np.ndarray, output_datatype: str = "float32") -> np.ndarray:
    bins, length, rate, low, high = (np.asarray(number).reshape(()) for number in inputs)
    rows, count = int(length) // 2 + 1, int(bins)
    require_size([rows, count + 2])
    points: Any = np.arange(count + 2, dtype=np.float64)
    first, last = (2595 * np.log10(1 + float(edge) / 700) for edge in (low, high))
    points = points * ((last - first) / (count + 2)) + first
    hertz = 700 * (10 ** (points / 2595) - 1)
    edges = ((int(length) + 1) * hertz // int(rate)).astype(np.int64)
    result = np.zeros((rows, count))
    for n in range(count):
        lower, center, upper = edges[n : n + 3]
        if center == lower:
            result[center, n] = 1
        else:
            places = np.arange(lower, center + 1)
            result[places, n] = (places - lower) / (center - lower)
        if upper > center:
            places = np.arange(center, upper)
            result[places, n] = (upper - places) / (upper - center)
    return result.astype(dtypes.numpy_dtype(output_datatype))
