"""Compute networks with ONNX Runtime."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckpttool.networks.network import InputAdapter, Network, Observation, State, require_cpu

NAME = "onnxruntime"

_ACTION = "/action"


def versions() -> dict[str, str]:
    """Return the versions of the runtime and of the library that builds the model."""
    import onnx
    import onnxruntime

    return {"onnxruntime": str(onnxruntime.__version__), "onnx": str(onnx.__version__)}


def build(network: Network, device: str = "cpu") -> OnnxRuntimePolicy:
    """Build a model of the network and return its policy; raise UsageError for devices except the CPU."""
    require_cpu("onnxruntime", device)
    return OnnxRuntimePolicy(network)


class OnnxRuntimePolicy:
    """A network as a session of the runtime, with one thread by default."""

    device = "cpu"

    def __init__(self, network: Network) -> None:
        from ckpttool.networks.network_graph import network_graph
        from ckpttool.networks.onnx_export import encode_graph

        self._feeds = InputAdapter(network)
        self._names = [name for name, _ in network.inputs]
        places = [f"/{n}" for n in range(len(network.nodes))]
        self._model = encode_graph(network_graph(network, places, _ACTION), {})
        self._run = self._session(1)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        feeds = self._feeds(obs, state)
        action, *after = self._run(None, dict(zip(self._names, feeds, strict=True)))
        return self._feeds.joined(action), tuple(after)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Limit the number of threads in the block, with another session if necessary."""
        before = self._run
        if count != 1:
            self._run = self._session(count)
        try:
            yield
        finally:
            self._run = before

    def _session(self, threads: int) -> Any:

        return create_session(self._model, threads).run


_ERRORS_ONLY = 3  # ORT_LOGGING_LEVEL_ERROR (onnxruntime/core/session/onnxruntime_c_api.h)


def onnx_engine() -> str:
    """Return the name and version of the library that runs models here."""
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"
    import onnx

    return f"the reference evaluator of onnx {onnx.__version__}"


def create_session(model: bytes, threads: int = 1) -> Any:
    """Return an onnxruntime CPU session; the last bits of results depend on its number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_model(model: bytes, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the model's one output for inputs by name, [batch, width] each."""
    if importlib.util.find_spec("onnxruntime") is not None:
        return np.asarray(create_session(model).run(None, dict(inputs))[0])
    from onnx.reference import ReferenceEvaluator

    outputs: Any = ReferenceEvaluator(model).run(None, dict(inputs))
    return np.asarray(outputs[0])
