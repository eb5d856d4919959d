"""Steps on a CUDA device: page-locked buffers on the host's side, one captured graph for each batch shape.

Launching a small network's kernels one by one takes longer than running them; a captured graph is one launch
(https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs"). Imported only where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Result = TypeVar("Result")

# Libraries choose their kernels and take their workspaces in the first calls, which a capture may not hold.
WARM_UPS = 3
# An array goes up in pieces: while one travels, the host fills the buffer of the next.
PIECE_BYTES = 1 << 20
# Graphs and buffers are kept for so many batch shapes; an evaluation has one.
MOST_SHAPES = 8


class CudaRun:
    """Runs a function of tensors on a device for arrays of the host, with one wait per call."""

    def __init__(self, run: Run, place: torch.device, *, graphs: bool) -> None:
        self._run, self._place, self._graphs = run, place, graphs
        self._shapes: dict[tuple[tuple[int, ...], ...], _Shape] = {}

    def __call__(self, given: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results as arrays of the caller's own."""
        with torch.cuda.device(self._place):
            return self._of(given)(given)

    def _of(self, given: Sequence[np.ndarray]) -> _Shape:
        key = tuple(array.shape for array in given)
        if key not in self._shapes:
            if len(self._shapes) == MOST_SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[key] = _Shape(self._run, given, self._place, self._graphs)
        return self._shapes[key]


class _Shape:
    """The buffers of one batch shape, and its graph."""

    def __init__(self, run: Run, given: Sequence[np.ndarray], place: torch.device, graphs: bool) -> None:
        self._inputs = [torch.from_numpy(np.zeros_like(array)).to(place) for array in given]
        self._uploads = [_Upload(tensor) for tensor in self._inputs]
        self._launch: Callable[[], list[torch.Tensor]] = lambda: run(self._inputs)
        if graphs:
            self._launch = _replaying(*captured(self._launch, place))
        self._found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._launch()]

    def __call__(self, given: Sequence[np.ndarray]) -> list[np.ndarray]:
        for upload, array in zip(self._uploads, given, strict=True):
            upload(array)
        for room, result in zip(self._found, self._launch(), strict=True):
            room.copy_(result, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return [room.numpy().copy() for room in self._found]


class _Upload:
    """Copies arrays to one tensor on a device, through two page-locked buffers in turn."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target.view(-1)
        self._most = max(1, min(target.numel(), PIECE_BYTES // target.element_size()))
        self._rooms = [torch.empty(self._most, dtype=target.dtype, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._rooms]  # type: ignore[no-untyped-call]  # as Stream

    def __call__(self, array: np.ndarray) -> None:
        flat = array.reshape(-1)
        for number, start in enumerate(range(0, flat.size, self._most)):
            piece = flat[start : start + self._most]
            room, sent = self._rooms[number % 2], self._sent[number % 2]
            sent.synchronize()  # what lay here before has left; at once if nothing did
            room[: piece.size].numpy()[:] = piece
            self._target[start : start + piece.size].copy_(room[: piece.size], non_blocking=True)
            sent.record()


def _replaying(graph: torch.cuda.CUDAGraph, results: Result) -> Callable[[], Result]:
    def launch() -> Result:
        graph.replay()
        return results

    return launch


def captured(body: Callable[[], Result], place: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph that does what `body` launches, and its result, which every replay writes anew.

    `body` runs a few times before it is captured; it may use no value on the host.
    """
    # One stream for both: libraries keep a handle per stream, and may not make one during a capture.
    stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    stream.wait_stream(torch.cuda.current_stream(place))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            body()
    torch.cuda.current_stream(place).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = body()
    return graph, result
