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


def run(model: bytes, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the model's one output on the inputs by name, [batch, width] each."""
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        # The last bits of a sum depend on how many threads share it.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, dict(given))[0])
    from onnx.reference import ReferenceEvaluator

    found: Any = ReferenceEvaluator(model).run(None, dict(given))
    return np.asarray(found[0])
