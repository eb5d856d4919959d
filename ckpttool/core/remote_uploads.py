"""Uploads to object stores: in parts with checksums that the store confirms, continued after a failure."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Callable, Coroutine, Iterator
from io import RawIOBase
from typing import Any

from ckpttool.core.atomic_write import WorkerThread
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import ChangedError
from ckpttool.core.source import crc32c
from ckpttool.core.text import parse_json_value

# Sizes of parts. S3: 5 MiB to 5 GiB, at most 10,000 of one object
# (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html). Google: multiples of 256 KiB
# (https://cloud.google.com/storage/docs/performing-resumable-uploads#chunked-upload).
PART = 8 << 20
_PARTS = 10_000

Job = Callable[[], Coroutine[Any, Any, Any]]
Runner = Callable[[Job], object]
"""Runs a request to its end: on the event loop, within the time limit, with translated errors."""


class SentPart(NamedTuple):
    """A part that the store has: its number from 1, its size in bytes, its checksums as the store states."""

    number: int
    size: int
    etag: str
    crc32c: str


def encode_crc(crc: int) -> str:
    """Return a CRC-32C as both stores write it: big-endian, in base64."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def require_same_bytes(location: str, *, same: bool) -> None:
    """Raise ChangedError unless the store confirmed the checksum of what was sent."""
    if not same:
        raise ChangedError("the store received other bytes than were sent", file=location)


class UploadStream(RawIOBase):
    """A file that is written from its beginning to its end, into an object.

    A worker thread sends the parts, of which it keeps two. The checksum before every written buffer is kept,
    so that the bytes of any of them can be compared without reading them back.
    """

    def __init__(self, location: str, upload: Upload, run: Runner, lane: WorkerThread, part: int) -> None:
        """Send to `upload` in parts of `part` bytes by `run`."""
        self.name = location
        self._upload, self._run, self._lane, self._part = upload, run, lane, part
        self._buffer = bytearray()
        self._number = 0
        self._at, self._crc = 0, 0
        self._before = {0: 0}

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._at

    def write(self, data: Any) -> int:
        """Queue the bytes and return their number; raise the error of an earlier part."""
        view = memoryview(data).cast("B")
        self._crc = crc32c(view, self._crc)
        self._at += len(view)
        self._before[self._at] = self._crc
        nbytes = len(view)
        while view:
            room = self._part - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            # The last part is announced as such, so a full one waits for the next byte.
            if len(self._buffer) == self._part and view:
                self._hand_on()
        return nbytes

    def complete(self) -> None:
        """Send what is left and make the object visible."""
        self._hand_on(last=True)
        self._lane.wait()
        self._run(functools.partial(self._upload.finish, self._crc))

    def has_bytes(self, offset: int, length: int, crc: int) -> bool:
        """Return whether exactly these bytes were written there; False if no buffer began or ended there."""
        before, after = self._before.get(offset), self._before.get(offset + length)
        return before is not None and after is not None and combine_crc32c(before, crc, length) == after

    def _hand_on(self, *, last: bool = False) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._number += 1
        send = functools.partial(self._upload.send, self._number, data, crc32c(data), last=last)
        self._lane.do(functools.partial(self._run, send), len(data))


@contextlib.contextmanager
def open_upload(upload: Upload, location: str, nbytes: int, run: Runner) -> Iterator[UploadStream]:
    """Yield a stream for an object of about that size; it is visible when the block ends without an error."""
    part = PART * max(1, -(-nbytes * 2 // (PART * _PARTS)))
    with WorkerThread(backlog=part) as lane:
        run(upload.begin)
        stream = UploadStream(location, upload, run, lane, part)
        yield stream
        stream.complete()


# CRC-32C of joined data, as in zlib's crc32_combine, with the polynomial of RFC 3720, 12.1, bits reversed.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31  # x^0
_BYTE = 1 << 23  # x^8


def combine_crc32c(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32C of data with the checksum `first` and `nbytes` more with the checksum `second`."""
    power, base = _ONE, _BYTE
    while nbytes:
        if nbytes & 1:
            power = _multiply(power, base)
        base, nbytes = _multiply(base, base), nbytes >> 1
    return _multiply(power, first) ^ second


def _multiply(one: int, other: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


class S3Upload:
    """A multipart upload to S3, with a CRC-32C of each part that the service verifies."""

    def __init__(self, system: Any, location: str) -> None:
        """Write to the object at `location` through s3fs's file system."""
        self._system, self._target = system, location
        bucket, key, _ = system.split_path(location)
        self._object = {"Bucket": bucket, "Key": key}
        self._id = ""
        self._known: dict[int, SentPart] = {}
        self._sent: list[SentPart] = []

    async def begin(self) -> None:
        """Continue the latest unfinished upload to this name, or begin one."""
        bucket, key = self._object.values()
        with contextlib.suppress(PermissionError):  # not everyone who may write may list
            listed = await self._call("list_multipart_uploads", Bucket=bucket, Prefix=key)
            own = [upload for upload in listed.get("Uploads") or () if upload["Key"] == key]
            if own:
                self._id = max(own, key=lambda upload: upload["Initiated"])["UploadId"]
                self._known = {part.number: part async for part in self._list_parts()}
        if not self._id:
            answer = await self._call("create_multipart_upload", **self._object, ChecksumAlgorithm="CRC32C")
            self._id = answer["UploadId"]

    async def _list_parts(self) -> Any:
        marker: dict[str, int] = {}
        while True:
            page = await self._call("list_parts", **self._object, UploadId=self._id, **marker)
            for part in page.get("Parts") or ():
                yield SentPart(part["PartNumber"], part["Size"], part["ETag"], part.get("ChecksumCRC32C", ""))
            if not page.get("IsTruncated"):
                return
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    async def send(self, number: int, data: bytes, crc: int, *, last: bool) -> None:  # noqa: ARG002
        """Send a part unless an interrupted program sent the same."""
        known = self._known.get(number)
        if known is None or known.size != len(data) or not _is_confirmed(known, data, crc):
            answer = await self._call(
                "upload_part",
                **self._object,
                UploadId=self._id,
                PartNumber=number,
                Body=data,
                ChecksumCRC32C=encode_crc(crc),
            )
            known = SentPart(number, len(data), answer["ETag"], answer.get("ChecksumCRC32C", ""))
            require_same_bytes(self._target, same=_is_confirmed(known, data, crc))
        self._sent.append(known)

    async def finish(self, crc: int) -> None:  # noqa: ARG002  # each part has its own
        """Make an object of the parts."""
        parts = [
            {"PartNumber": part.number, "ETag": part.etag}
            | ({"ChecksumCRC32C": part.crc32c} if part.crc32c else {})
            for part in self._sent
        ]
        await self._call(
            "complete_multipart_upload", **self._object, UploadId=self._id, MultipartUpload={"Parts": parts}
        )

    async def _call(self, name: str, **options: Any) -> Any:
        return await self._system._call_s3(name, **options)


def _is_confirmed(part: SentPart, data: bytes, crc: int) -> bool:
    """Return whether the store's checksum is that of the data.

    A store that states no CRC-32C of a part has its MD5 as the ETag, or none that can be compared.
    """
    if part.crc32c:
        return part.crc32c == encode_crc(crc)
    return part.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


class GSUpload:
    """A resumable upload to Google Cloud Storage, whose CRC-32C the service states at the end.

    Its address is a secret that is nowhere kept, so another program begins the object anew.
    """

    def __init__(self, system: Any, location: str) -> None:
        """Write to the object at `location` through gcsfs's file system."""
        self._system, self._target = system, location
        self._bucket, self._key, _ = system.split_path(location)
        self._location, self._done = "", 0
        self._answer: dict[str, Any] = {}

    async def begin(self) -> None:
        """Request the address of a new upload."""
        from gcsfs.core import initiate_upload

        self._location = await initiate_upload(self._system, self._bucket, self._key)

    async def send(self, number: int, data: bytes, crc: int, *, last: bool) -> None:  # noqa: ARG002
        """Send the next part; the last one states the object's size."""
        from gcsfs.core import UnclosableBytesIO  # aiohttp warns of large bodies that are not files

        end = self._done + len(data)
        span = f"bytes {self._done}-{end - 1}" if data else "bytes *"
        headers = {"Content-Range": f"{span}/{end if last else '*'}", "Content-Length": str(len(data))}
        reply, text = await self._call("PUT", self._location, headers=headers, data=UnclosableBytesIO(data))
        if last:
            value = parse_json_value(bytes(text), "the store's response")
            self._answer = value if isinstance(value, dict) else {}
        else:
            kept = str(reply.get("Range", "")).rpartition("-")[2]
            require_same_bytes(self._target, same=kept == str(end - 1))
        self._done = end

    async def finish(self, crc: int) -> None:
        """Compare the object's checksum; remove an object of other bytes."""
        same = (self._answer.get("crc32c"), self._answer.get("size")) == (encode_crc(crc), str(self._done))
        if not same:
            await self._system._rm_file(self._target)
        require_same_bytes(self._target, same=same)

    async def _call(self, *words: Any, **options: Any) -> Any:
        return await self._system._call(*words, **options)


Upload = S3Upload | GSUpload
"""One object on its way: created by a store, called for each part in order."""
