"""Stores whose objects have versions that can be asked for by name; Google's buckets.

What was listed is what is read, whatever is written meanwhile; no second look is needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool import limits
from ckpttool.errors import UnsupportedError
from ckpttool.places import Seen
from ckpttool.remote import deadlines
from ckpttool.remote.objects import Objects, require_same, seen_of

_KEPT = 100_000


class Pinned(Objects):
    """A store that is asked for the bytes of the version that was seen."""

    def __init__(self, scheme: str) -> None:
        """Remember no version yet."""
        super().__init__(scheme)
        self._versions: OrderedDict[tuple[str, Seen], str] = OrderedDict()

    def remember(self, place: str, seen: Seen, version: str) -> None:
        """Note which version was seen."""
        self._versions[place, seen] = version
        if len(self._versions) > _KEPT:
            self._versions.popitem(last=False)

    def version(self, place: str, seen: Seen) -> str:
        """Return the version that was seen, by another process perhaps; raise ChangedError if it is gone."""
        if (place, seen) not in self._versions:
            require_same(place, seen, seen_of(self.info(place)))
        return self._versions[place, seen]


class GS(Pinned):
    """Google Cloud Storage: an object's generation is its version."""

    def started(self) -> Any:
        """Return gcsfs's system for all buckets.

        Its own choice (`gcsfs.GCSFileSystem`) asks another service for each bucket's kind first, which wants
        credentials where a public bucket needs none (gcsfs/extended_gcsfs.py).
        """
        from aiohttp import ClientTimeout, TraceConfig
        from gcsfs.core import GCSFileSystem

        silence, trace = limits.current().fetch_seconds, TraceConfig()
        trace.on_request_start.append(_begun)
        trace.on_request_redirect.append(_redirected)
        trace.on_request_end.append(_answered)

        # It prints the traceback of what it raises too, unless somebody listens.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
        return GCSFileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            version_aware=True,
            requests_timeout=ClientTimeout(sock_connect=silence, sock_read=silence),
            session_kwargs={"trace_configs": [trace]},
        )

    def failures(self) -> tuple[type[Exception], ...]:
        """Return gcsfs's, and those of the connection and of the credentials."""
        from aiohttp import ClientError
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return HttpError, ClientError, GoogleAuthError

    def meant(self, error: Exception) -> type[Exception] | str | None:
        """Tell an answer that broke off, and one that permits nothing (gcsfs/retry.py, validate_response)."""
        from aiohttp import ClientPayloadError

        if isinstance(error, ClientPayloadError):
            return EOFError
        return PermissionError if str(error).startswith("Forbidden") else None

    def info(self, place: str) -> Mapping[str, Any]:
        """Return what is told of the object, and remember its generation."""
        found = super().info(place)
        if found.get("generation"):
            self.remember(place, seen_of(found), str(found["generation"]))
        return found

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return full names, as many as asked for."""
        found: list[str] = self.system.ls(place, detail=False, max_results=most)
        return found

    def bytes_of(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return the bytes of the generation that was seen."""
        exact = f"{place}#{self.version(place, seen)}"
        data: bytes = self.system.cat_file(exact, start=offset, end=offset + length)
        return data


async def _begun(_: object, __: object, ___: object) -> None:
    """Let the deadline end the request, and the library's other tries."""
    deadlines.request().hold()


async def _redirected(_: object, __: object, found: Any) -> None:
    """Raise UnsupportedError for a redirect to another host: Google's interface has none."""
    from ckpttool.remote.addresses import leads_away

    if leads_away(found.url, found.response.headers.get("Location", "")):
        raise UnsupportedError("the store leads to another server, which is not followed")


async def _answered(_: object, __: object, found: Any) -> None:
    """Count what arrives of the answer."""
    deadlines.request().watch(found.response.content)
