"""Amazon's S3 and whatever speaks its language, by s3fs: ranges of the version that was seen (`If-Match`)."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession

from ckpttool import limits
from ckpttool.errors import ChangedError, MissingExtraError, NotFoundError, UnsupportedError
from ckpttool.places import Found, Seen
from ckpttool.remote import deadlines
from ckpttool.remote.objects import Objects, require_same, seen_of, system

_OPEN = 64
_MOVED, _REGION = (301, 302, 303, 307, 308), "x-amz-bucket-region"
_PAGE = 1000  # keys of a listing: ListObjectsV2 gives no more (docs.aws.amazon.com/AmazonS3/latest/API)


class S3(Objects):
    """S3 and whatever speaks its language; a bucket of which no key is known is read as the public does."""

    def __init__(self, scheme: str) -> None:
        """Take keys from where AWS's own tools take them, else none."""
        super().__init__(scheme)
        self._open: OrderedDict[str, Any] = OrderedDict()
        from botocore.exceptions import NoCredentialsError

        self._no_credentials = NoCredentialsError

    def started(self) -> Any:
        """Return s3fs's file system, with the keys of the environment."""
        return _started()

    def failures(self) -> tuple[type[Exception], ...]:
        """Return botocore's, and those of the connection, which come through where an answer breaks off."""
        from aiohttp import ClientError as ConnectionFailure
        from botocore.exceptions import BotoCoreError, ClientError

        return BotoCoreError, ClientError, ConnectionFailure

    def meant(self, error: Exception) -> type[Exception] | str | None:
        """Tell an answer that broke off, one that did not come, and a redirect."""
        from aiohttp import ClientPayloadError
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
            return TimeoutError
        inner = getattr(error, "kwargs", {}).get("error")  # of a botocore.exceptions.HTTPClientError
        if isinstance(inner, UnsupportedError):
            return inner.message
        return EOFError if isinstance(error, ClientPayloadError) else None

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return full names, a page for every request."""
        bucket, key, _ = self.system.split_path(place)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found: list[str] = []
        more: dict[str, str] = {}
        while len(found) < most:
            page = self.system.call_s3(
                "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", MaxKeys=_PAGE, **more
            )
            keys = [each["Key"] for each in page.get("Contents", ())]
            keys += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
            found += [f"{bucket}/{each}" for each in keys if each != prefix]
            if not page.get("NextContinuationToken"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        return found

    def look(self, place: str) -> Found:
        """Return what is there now; the first look finds out whether there are keys."""
        try:
            return super().look(place)
        except NotFoundError as error:
            if not isinstance(error.__cause__, self._no_credentials):
                raise
        self.system = _started(anon=True)
        return super().look(place)

    def bytes_of(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return the bytes of the version that was seen: an open file of s3fs asks for no other."""
        # s3fs/core.py, S3File: it keeps the ETag that it found, and sends it with each range.
        file = self._open.get(place)
        if file is None or seen_of(file.details) != seen:
            file = self.system.open(place, "rb", cache_type="none")
            require_same(place, seen, seen_of(file.details))
            self._open[place] = file
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return _ranged(file, place, offset, length)


def _ranged(file: Any, place: str, offset: int, length: int) -> bytes:
    from s3fs.utils import FileExpired

    try:
        # Not by seek and read: a position is no thread's own.
        data: bytes = file.cache.fetcher(offset, offset + length)
    except FileExpired as error:
        raise ChangedError("the file changed after it was listed", file=place) from error
    return data


def _started(**options: Any) -> Any:
    if "http_session_cls" not in inspect.signature(AioConfig).parameters:
        raise MissingExtraError(
            "s3:// needs a newer aiobotocore", hint="pip install --upgrade 'ckpttool[s3]' aiobotocore"
        )
    silence = limits.current().fetch_seconds
    settings = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "retries": {"max_attempts": 3},
        "http_session_cls": _Connections,
    }
    return system("s3", config_kwargs=settings, **options)


class _Connections(AIOHTTPSession):  # type: ignore[misc]  # without types
    """The connections of a client, which follow no redirect.

    Nor do those of botocore: where a bucket's region is another one, it makes a request of its own. aiohttp
    would go wherever the answer leads.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        return _Session(await super()._get_session(proxy_url))


class _Session:
    """A session of aiohttp, as far as aiobotocore uses it."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        """Return the answer itself; what arrives of its body is progress.

        Raise UnsupportedError for a redirect that names no region: botocore would ask for that region, and be
        redirected, without end.
        """
        deadlines.request().hold()
        answer = await self._session.request(*arguments, allow_redirects=False, **options)
        if answer.status in _MOVED and _REGION not in answer.headers:
            answer.release()
            raise UnsupportedError("the store leads to another server, which is not followed")
        deadlines.request().watch(answer.content)
        return answer
