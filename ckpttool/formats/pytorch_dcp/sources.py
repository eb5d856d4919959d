"""Where the bytes of a distributed checkpoint's tensors come from: items of shards, opened when read."""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.torch_pickle import embedded
from ckpttool.leaf import Leaf
from ckpttool.source import Buffer, File, Shape


class SavedTensor(NamedTuple):
    """One tensor that torch.save wrote at a place in a shard; it must be what the metadata say it is."""

    file: File
    offset: int
    length: int
    dtype: str
    shape: Shape

    def read(self) -> Buffer:
        """Return the tensor's bytes; raise FormatError when the item holds something else."""
        held = embedded.listed(self.file, self.offset, self.length).tree.get(())
        if not isinstance(held, Leaf) or (held.dtype, held.shape) != (self.dtype, self.shape):
            found = f"{held.dtype}{list(held.shape)}" if isinstance(held, Leaf) else "no tensor"
            raise FormatError(
                "an item is not the tensor that the metadata announce",
                file=self.file.path,
                offset=self.offset,
                expected=f"{self.dtype}{list(self.shape)}",
                found=found,
            )
        return held.read()
