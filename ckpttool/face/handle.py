"""A tensor of a checkpoint by its name: known at once, read when its value is asked for, whole or in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool import dtypes
from ckpttool.face.slicing import taken
from ckpttool.leaf import Leaf, Role
from ckpttool.shown import clean
from ckpttool.source import Shape, as_array, gathered, pieces

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Handle:
    """One tensor, unread. `name` is its own, `aliases` are all others that lead to the same storage.

    >>> import ckpttool
    >>> kernel = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")["policy/actor/l1/kernel"]
    >>> kernel
    <Handle policy/actor/l1/kernel float32[3, 64] parameter>
    >>> kernel.nbytes, kernel.key
    (768, 'policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE')
    >>> kernel[:2, 10:40:10].numpy().shape
    (2, 3)
    """

    name: str
    leaf: Leaf
    aliases: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The extent of every axis."""
        return self.leaf.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.leaf.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.leaf.size

    @property
    def dtype(self) -> str:
        """Our name of the element type, such as "float32" or "bfloat16" (ckpttool.dtypes)."""
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the value; 0 for strings, which have no fixed size."""
        return self.leaf.nbytes

    @property
    def key(self) -> str:
        """The name that the owning framework lists."""
        return self.leaf.key

    @property
    def role(self) -> Role:
        """What the tensor is for: a parameter, a buffer, an optimizer's slot, a counter, ..."""
        return self.leaf.role

    @property
    def trainable(self) -> bool | None:
        """Whether the tensor is trained; None where the file does not tell."""
        return self.leaf.trainable

    def numpy(self) -> np.ndarray:
        """Read the value into an array of the caller's own; strings as objects of `bytes`.

        Raise UnsupportedError for a type without numbers that NumPy (with ml_dtypes) has, FormatError for
        damaged bytes, ChangedError where the file is no longer the one that was listed.
        """
        import numpy as np

        if self.leaf.dtype == "string":
            words = np.empty(self.leaf.size, object)
            words[:] = self.leaf.strings()
            return words.reshape(self.shape)
        dtypes.numpy_dtype(self.leaf.dtype)  # before anything is read
        return as_array(own_bytes(self.leaf).data, self.leaf.dtype, self.leaf.shape)

    def torch(self, device: Any = None) -> torch.Tensor:
        """Read the value into a torch.Tensor with memory of its own, on `device` if one is named.

        Raise UnsupportedError for a type that PyTorch lacks (strings), MissingExtraError without PyTorch.
        """
        from ckpttool.face.torch_tensors import tensor

        made = tensor(self.leaf)
        return made if device is None else made.to(device)

    def tf(self) -> Any:
        """Read the value into a tf.Tensor; strings too.

        Raise UnsupportedError for a type that TensorFlow lacks, MissingExtraError without TensorFlow.
        """
        from ckpttool.face.tensorflow_tensors import tensor

        return tensor(self)

    def item(self) -> Any:
        """Read a tensor of one element as a plain value of Python; raise ValueError for one of more."""
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the value for NumPy's own functions; `copy=False` is refused, since reading makes an array."""
        if copy is False:
            raise ValueError("reading a tensor makes an array: it cannot be had without a copy")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Handle:
        """Return a part of the tensor, unread: by numbers, slices (with steps) and `...`.

        Of a tensor that lies in a file as it is only the bytes are read that the part spans; where a checksum
        covers more than these, all that it covers is read, and checked, once. Raise IndexError and TypeError
        as NumPy does.
        """
        return replace(self, leaf=taken(self.leaf, index))

    def __iter__(self) -> Iterator[Handle]:
        """Go through the parts along the first axis; raise TypeError for a tensor without axes."""
        if not self.shape:
            raise TypeError("a tensor without axes has no parts")
        return (self[at] for at in range(self.shape[0]))

    def __repr__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return f"<Handle {clean(self.name)} {self.dtype}[{extents}] {self.role}>"

    def __rich_repr__(self) -> Iterator[Any]:
        """Give rich what it shows of a handle."""
        yield self.name
        yield "dtype", self.dtype
        yield "shape", self.shape
        yield "role", self.role
        yield "key", self.key, self.name
        yield "aliases", self.aliases, ()

    def _repr_html_(self) -> str:
        """Return what a notebook shows of a handle; every name in it is text."""
        from ckpttool.face.markup import handle

        return handle(self)


def own_bytes(leaf: Leaf) -> np.ndarray:
    """Read a leaf's bytes into new writable memory: uint8 [nbytes]; what is large is held once.

    Raise FormatError unless the source gives all of them.
    """
    return gathered(pieces(leaf.source), leaf.nbytes)
