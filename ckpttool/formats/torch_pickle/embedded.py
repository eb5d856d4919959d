"""What torch.save wrote into the middle of another file: a member of an agent's archive, a shard's item."""

from __future__ import annotations

from ckpttool.errors import FormatError
from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle import archive, legacy, magic
from ckpttool.source import File
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format


def listed(file: File, offset: int, length: int) -> Listed:
    """List what torch.save wrote into `length` bytes from `offset` of the file.

    Raise FormatError when the bytes are not in a form that torch writes.
    """
    head = file.read(offset, min(magic.STREAM_LENGTH, length))
    if head.startswith(magic.ZIP):
        return archive.listed(zip.read(file, offset, length))
    if magic.STREAM.match(head):
        return legacy.listed(file, offset, length)
    raise FormatError("these bytes are not what torch.save writes", file=file.path, offset=offset)
