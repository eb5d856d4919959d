"""Lines on a SavedModel's signatures and an ONNX model's graph: inputs and outputs with shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.core.text import clean, format_count

_SHOWN = 12


def signature_lines(details: Mapping[str, Any], width: int) -> list[str]:
    """Return a few lines of details of a SavedModel or ONNX model; none for other formats."""
    lines = _onnx_lines(details, width)
    tags = details.get("tags")
    if isinstance(tags, list | tuple) and tags:
        # One list per graph.
        sets = [", ".join(map(str, tag)) if isinstance(tag, list | tuple) else str(tag) for tag in tags]
        lines.append(clean(f"tags {'; '.join(sets)}"))
    signatures = details.get("signatures")
    if not isinstance(signatures, Mapping):
        return lines
    import textwrap

    for name, signature in list(signatures.items())[:_SHOWN]:
        text = f"{_tensors(signature, 'inputs')} -> {_tensors(signature, 'outputs')}"
        lines += [
            clean(f"signature {name}"),
            *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    "),
        ]
    if len(signatures) > _SHOWN:
        lines.append(f"and {format_count(len(signatures) - _SHOWN, 'more signature')}")
    return lines


def _onnx_lines(details: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines of an ONNX model: operator set versions, inputs and outputs, operator counts."""
    opsets, operators = details.get("opsets"), details.get("operators")
    if not isinstance(opsets, Mapping) or not isinstance(operators, Mapping):
        return []
    import textwrap

    versions = ", ".join(f"{domain} {version}" for domain, version in list(opsets.items())[:_SHOWN])
    counted = [f"{name} {number}" for name, number in list(operators.items())[:_SHOWN]]
    more = ["..."] if len(operators) > _SHOWN else []
    text = f"{_tensors(details, 'inputs')} -> {_tensors(details, 'outputs')}"
    return [
        clean(f"graph {details.get('name') or ''}".rstrip() + f", opset {versions}"),
        *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    "),
        *textwrap.wrap(
            clean(", ".join((*counted, *more))), width, initial_indent="  ", subsequent_indent="    "
        ),
    ]


def _tensors(signature: object, which: str) -> str:
    tensors = signature.get(which) if isinstance(signature, Mapping) else None
    if not isinstance(tensors, Mapping) or not tensors:
        return "nothing"
    return ", ".join(clean(f"{name} {_format_signature(tensor)}".strip()) for name, tensor in tensors.items())


def _format_signature(tensor: object) -> str:
    if not isinstance(tensor, Mapping):
        return ""
    shape = tensor.get("shape")
    extents = "[...]" if shape is None else "[" + ", ".join(_extent(e) for e in shape) + "]"
    return f"{tensor.get('dtype') or ''}{extents}"


def _extent(extent: object) -> str:
    # TensorFlow writes -1 for an unknown extent (tensorflow/core/framework/tensor_shape.proto).
    return "?" if extent in (None, -1) else str(extent)
