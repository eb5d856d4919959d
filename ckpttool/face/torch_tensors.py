"""A leaf as a torch.Tensor: the one place of the face that imports PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool import dtypes
from ckpttool.errors import MissingExtraError, UnsupportedError
from ckpttool.face.handle import own_bytes
from ckpttool.leaf import Leaf

if TYPE_CHECKING:
    import torch


def tensor(leaf: Leaf) -> torch.Tensor:
    """Read the leaf into a tensor on the CPU with memory of its own; quantized types as plain integers.

    Raise UnsupportedError for a type that this PyTorch lacks, MissingExtraError without PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "torch() needs PyTorch, which is not installed", hint="pip install 'ckpttool[torch]'"
        ) from error
    name = dtypes.plain_name(leaf.dtype)
    kind = getattr(torch, dtypes.BY_NAME[name].torch or "", None)
    if kind is None or name in dtypes.PACKED:
        raise UnsupportedError(f"PyTorch {torch.__version__} has no tensors of type {leaf.dtype}")
    if not leaf.size:
        return torch.empty(leaf.shape, dtype=kind)
    # The array's memory becomes the tensor's.
    return torch.frombuffer(own_bytes(leaf), dtype=kind).reshape(leaf.shape)
