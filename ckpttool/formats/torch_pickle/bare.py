"""Pickles that Python's pickle wrote of torch's tensors: each storage is a stream of torch's in the midst.

Source: torch/storage.py (`TypedStorage.__reduce__`, `_load_from_bytes`: torch.save without the zip form).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.errors import FormatError
from ckpttool.formats.torch_pickle import legacy, tensors
from ckpttool.formats.torch_pickle.stream import Held
from ckpttool.formats.torch_pickle.views import Storage
from ckpttool.source import File, Inline, Span
from ckpttool.wire.asked import Asked
from ckpttool.wire.pickle_reader import Builder, Stored


class Inner:
    """The storages within one file; `found` counts them, `asked` is what unpickling them would ask for."""

    def __init__(self, file: File) -> None:
        """Look for storages in this file, which is one pickle."""
        self.file = file
        self.found = 0
        self.asked: list[Asked] = []

    @property
    def builders(self) -> Mapping[str, Builder]:
        """How torch's tensors are rebuilt from such storages."""
        return {**tensors.REBUILD, "torch.storage._load_from_bytes": self._storage}

    def _storage(self, args: tuple[Any, ...]) -> object:
        data = args[0] if len(args) == 1 else None
        if isinstance(data, Stored):
            made = legacy.storage(self.file, data.at, data.length, self.asked)
        elif isinstance(data, bytes):
            made = self._held(data)
        else:
            return NotImplemented
        self.found += 1
        # Its own key was an address, and addresses are used again.
        made.key = f"{self.found}"
        return made

    def _held(self, data: bytes) -> Storage:
        """Return the storage of a stream that protocols below 3 keep as text (Lib/pickle.py, save_bytes)."""
        stream = Held(self.file.path, len(data), 0, 0)
        stream.data = data
        try:
            made = legacy.storage(stream, 0, len(data), self.asked)
        except FormatError as error:
            # A place in the text's bytes would name the wrong byte of the file.
            error.offset = None
            raise
        span = made.bytes
        if isinstance(span, Span):
            made.bytes = Inline(data[span.offset : span.offset + span.length])
        return made
