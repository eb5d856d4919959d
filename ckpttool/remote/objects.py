"""Object stores and other file systems of fsspec, read by ranges.

What a store gives as a version of an object (an ETag, a hash, a generation) is its identity. S3 is asked for
bytes of just that version (`If-Match`); of others it is looked up again after every read.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import fsspec

from ckpttool import places
from ckpttool.errors import ChangedError, NotFoundError, TruncatedError
from ckpttool.places import Found, Seen
from ckpttool.remote.stores import Remembering, tag_of

# The first that an entry has. Sources: s3fs/core.py (_info), gcsfs/core.py (_process_object),
# huggingface_hub/hf_file_system.py (info), fsspec/implementations/memory.py (info).
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "oid", "md5Hash", "LastModified", "mtime", "created")
_TIMES = ("LastModified", "mtime", "created")
# What these libraries raise besides OSError: no common base, and none is loaded that is not needed.
_FAILURES = {
    "s3": (("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError")),
    "gs": (("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError")),
}
_OPEN = 64


class Objects:
    """A store that fsspec knows by its scheme."""

    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, scheme: str) -> None:
        """Use the settings of the store's own library: its environment variables and files."""
        self.scheme = scheme
        self.system: Any = _system(scheme, **self.options)
        self._failures = tuple(
            getattr(importlib.import_module(module), name)
            for module, name in _FAILURES.get({"s3a": "s3", "gcs": "gs"}.get(scheme, scheme), ())
        )

    @classmethod
    def mount(cls, url: str) -> str:
        """Mount the folder of a URL; return the place of what it names."""
        place = url.rstrip("/")
        scheme = place.partition("://")[0]
        store = _store(cls, scheme)
        parent = place.rpartition("/")[0]
        places.mount(place + "/" if parent.endswith("/") else parent + "/", store)
        return place

    def look(self, place: str) -> Found:
        """Return what is there now; raise NotFoundError if nobody can tell."""
        try:
            with self._explained(place):
                found = self.system.info(place)
        except FileNotFoundError as error:
            if "bucket" in str(error).lower():
                raise NotFoundError("there is no such bucket", file=place) from error
            return None
        return "folder" if found.get("type") == "directory" else seen_of(found)

    def names(self, place: str) -> list[str]:
        """Return the names in a folder."""
        try:
            with self._explained(place):
                found = self.system.ls(place, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def part(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if another version is there now."""
        try:
            with self._explained(place):
                data = self.bytes_of(place, seen, offset, length)
        except FileNotFoundError as error:
            raise ChangedError("the file went away after it was listed", file=place) from error
        if len(data) != length:
            raise TruncatedError(
                "the store gives another number of bytes than was asked for",
                file=place,
                offset=offset,
                expected=f"{length:,}",
                found=f"{len(data):,}",
            )
        return data

    def bytes_of(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return what the store gives for the range."""
        data: bytes = self.system.cat_file(place, start=offset, end=offset + length)
        require_same(place, seen, seen_of(self.system.info(place)))
        return data

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        """Turn what the library raises into a sentence; what is not there stays FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except PermissionError as error:
            raise NotFoundError("the store permits no reading", file=place) from error
        except TimeoutError as error:
            raise NotFoundError("the store does not answer in time", file=place) from error
        except (OSError, ValueError, NotImplementedError, *self._failures) as error:
            kind = type(error).__name__
            raise NotFoundError("the store cannot be read", file=place, found=kind) from error


class S3(Objects):
    """S3 and whatever speaks its language; a bucket of which no key is known is read as the public does."""

    options: ClassVar[Mapping[str, Any]] = {
        "config_kwargs": {"connect_timeout": 15, "read_timeout": 30, "retries": {"max_attempts": 3}},
    }

    def __init__(self, scheme: str) -> None:
        """Take keys from where AWS's own tools take them, else none."""
        super().__init__(scheme)
        self._open: OrderedDict[str, Any] = OrderedDict()
        from botocore.exceptions import NoCredentialsError

        self._no_credentials = NoCredentialsError

    def look(self, place: str) -> Found:
        """Return what is there now; the first look finds out whether there are keys."""
        try:
            return super().look(place)
        except NotFoundError as error:
            if not isinstance(error.__cause__, self._no_credentials):
                raise
        self.system = _system("s3", anon=True, **self.options)
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


def _system(scheme: str, **options: Any) -> Any:
    # What a listing said stays true for nobody; settings of the environment may have changed.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)


_STORES: dict[str, Remembering] = {}


def _store(cls: type[Objects], scheme: str) -> Remembering:
    """Return the one store of a scheme: its connections are shared."""
    if scheme not in _STORES:
        _STORES[scheme] = Remembering(cls(scheme))
    return _STORES[scheme]


def seen_of(found: Mapping[str, Any]) -> Seen:
    """Return a file's identity of what a store tells of it."""
    told = next((found[name] for name in _VERSIONS if found.get(name)), "")
    said = told.isoformat() if isinstance(told, datetime.datetime) else str(told)
    changed = next((found[name] for name in _TIMES if isinstance(found.get(name), datetime.datetime)), None)
    mtime_ns = 0 if changed is None else int(changed.timestamp()) * 10**9
    return Seen(int(found.get("size") or 0), mtime_ns, tag_of(said))


def require_same(place: str, seen: Seen, now: Seen) -> None:
    """Raise ChangedError unless both are one version."""
    if now != seen:
        raise ChangedError("the file changed after it was listed", file=place)
