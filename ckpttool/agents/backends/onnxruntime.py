"""The onnxruntime backend: the network as an ONNX model, run on the CPU; least time for middling batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckpttool.agents.execute import Feeds
from ckpttool.agents.network import Network
from ckpttool.agents.policy import Observation, State
from ckpttool.errors import UsageError

NAME = "onnxruntime"

_ACTION = "/action"


def versions() -> dict[str, str]:
    """Return the runtime's version, and that of the library that makes the model."""
    import onnx
    import onnxruntime

    return {"onnxruntime": str(onnxruntime.__version__), "onnx": str(onnx.__version__)}


def build(network: Network, device: str = "cpu") -> OnnxRuntimePolicy:
    """Make a model of the network and return its policy; raise UsageError for any device but the CPU."""
    if device not in {"cpu", "auto"}:
        raise UsageError(f"the onnxruntime backend has no device {device!r}", hint="it computes on cpu")
    return OnnxRuntimePolicy(network)


class OnnxRuntimePolicy:
    """A network as a session of the runtime, of one thread unless told otherwise."""

    device = "cpu"

    def __init__(self, network: Network) -> None:
        from ckpttool.agents import onnx_model

        self._feeds = Feeds(network)
        self._names = [name for name, _ in network.inputs]
        self._model = onnx_model.encode(network, [f"/{n}" for n in range(len(network.nodes))], _ACTION, {})
        self._run = self._session(1)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        given = self._feeds(obs, state)
        action, *after = self._run(None, dict(zip(self._names, given, strict=True)))
        return self._feeds.joined(action), tuple(after)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Compute with that many threads inside the block: another session, where it is not one."""
        before = self._run
        if count != 1:
            self._run = self._session(count)
        try:
            yield
        finally:
            self._run = before

    def _session(self, threads: int) -> Any:
        from ckpttool.agents import onnx_run

        return onnx_run.session(self._model, threads).run
