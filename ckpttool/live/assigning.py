"""Puts values into the tensors of a live model: all of them, or none.

Every value is read, checked and brought to its tensor's type before the first tensor changes; when one cannot
be changed after all, those before it get back what they had.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ckpttool import dtypes
from ckpttool.errors import MappingError, UnsupportedError
from ckpttool.face.handle import Handle
from ckpttool.face.torch_tensors import tensor
from ckpttool.leaf import Leaf
from ckpttool.live import kinds
from ckpttool.live.tensors import Live, described
from ckpttool.source import as_array


def assign(values: Iterable[tuple[str, Any, Leaf]]) -> None:
    """Put values into live tensors: the name of each, a variable or torch.Tensor, and the unread value.

    All values are held in memory at once. Types of the model stay (bfloat16 stays bfloat16), and so do
    devices; gradients are not recorded. Raise what reading raises, MappingError for a value of another shape
    or sort, UnsupportedError for a tensor that cannot be changed.
    """
    staged = [_staged(name, variable, leaf) for name, variable, leaf in values]
    done: list[_Torch | _Variable] = []
    try:
        for each in staged:
            each.swap()
            done.append(each)
    except BaseException as error:
        for each in reversed(done):
            each.swap()
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        name = staged[len(done)].name
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"the tensor cannot be changed: {reason}", path=name) from error


def _staged(name: str, variable: Any, leaf: Leaf) -> _Torch | _Variable:
    said = described(variable)
    if said is None or said[1] != leaf.shape or not dtypes.alike(said[0], leaf.dtype):
        expected = "a tensor with a shape" if said is None else f"{said[0]}{list(said[1])}"
        found = f"{leaf.dtype}{list(leaf.shape)}"
        raise MappingError("the value does not fit the model", path=name, expected=expected, found=found)
    if hasattr(variable, "assign"):
        return _Variable(name, variable, leaf, said[0])
    return _Torch(name, variable, leaf)


class _Torch:
    """A torch.Tensor and the value that it is to have next."""

    def __init__(self, name: str, held: Any, leaf: Leaf) -> None:
        if held.is_meta:
            raise UnsupportedError(
                "the model is on the meta device and has no memory for a value",
                path=name,
                hint="model.to_empty(device=...) gives it some",
            )
        torch: Any = sys.modules["torch"]
        if held.is_inference() and not torch.is_inference_mode_enabled():
            raise UnsupportedError("the tensor was made in inference mode and changes only there", path=name)
        self.name, self._held = name, held
        self._next = tensor(leaf).to(held.dtype)

    def swap(self) -> None:
        """Exchange the tensor's value and the next one."""
        torch: Any = sys.modules["torch"]
        with torch.no_grad():
            before = self._held.detach().to("cpu", copy=True)
            self._held.copy_(self._next)
        self._next = before


class _Variable:
    """A variable of TensorFlow or Keras and the value that it is to have next."""

    def __init__(self, name: str, held: Any, leaf: Leaf, dtype: str) -> None:
        self.name, self._held, self._dtype = name, held, dtype
        value = Handle(name, leaf).numpy()
        self._next = value if dtype == "string" else value.astype(dtypes.numpy_dtype(dtype), copy=False)
        self._shape = leaf.shape
        # A graph of TensorFlow 1 has no value here, and assigning would only add to the graph.
        self._now()

    def _now(self) -> Any:
        if self._dtype == "string":
            return kinds.plain_value(self._held).numpy()
        return as_array(Live(self._held).read(), self._dtype, self._shape)

    def swap(self) -> None:
        """Exchange the variable's value and the next one."""
        before = self._now()
        self._held.assign(self._next)
        self._next = before
