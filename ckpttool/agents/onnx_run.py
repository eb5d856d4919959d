"""Runs an ONNX model's bytes: by onnxruntime, or by the reference evaluator of the onnx library."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

_ERRORS_ONLY = 3  # ORT_LOGGING_LEVEL_ERROR (onnxruntime/core/session/onnxruntime_c_api.h)


def engine() -> str:
    """Return the name and version of what runs models here."""
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"
    import onnx

    return f"the reference evaluator of onnx {onnx.__version__}"


def session(model: bytes, threads: int = 1) -> Any:
    """Return onnxruntime's session of the model on the CPU: the last bits depend on the number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: bytes, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the model's one output on the inputs by name, [batch, width] each."""
    if importlib.util.find_spec("onnxruntime") is not None:
        return np.asarray(session(model).run(None, dict(given))[0])
    from onnx.reference import ReferenceEvaluator

    found: Any = ReferenceEvaluator(model).run(None, dict(given))
    return np.asarray(found[0])
