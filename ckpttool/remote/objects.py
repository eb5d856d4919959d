"""Object stores and other file systems of fsspec, read by ranges.

What a store gives as a version of an object (an ETag, a hash, a generation) is its identity. S3
(ckpttool.remote.s3) is asked for bytes of just that version, as are the stores of ckpttool.remote.pinned;
another is looked up again after every read.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec

from ckpttool import limits, places
from ckpttool.errors import ChangedError, CkpttoolError, NotFoundError, TruncatedError
from ckpttool.places import Found, Seen
from ckpttool.remote import deadlines
from ckpttool.remote.stores import PERMITS_NOT, Remembering, tag_of

# The first that an entry has. Sources: s3fs/core.py (_info), gcsfs/core.py (_process_object),
# huggingface_hub/hf_file_system.py (info), fsspec/implementations/memory.py (info).
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "oid", "md5Hash", "LastModified", "mtime", "created")
_TIMES = ("LastModified", "mtime", "created")
_ANY: tuple[type[Exception], ...] = (OSError, ValueError, NotImplementedError, RecursionError)


class Objects:
    """A store that fsspec knows by its scheme."""

    def __init__(self, scheme: str) -> None:
        """Use the settings of the store's own library: its environment variables and files."""
        deadlines.prepare_loop()
        self.scheme = scheme
        self.system: Any = self.started()
        self._failures = (*_ANY, *self.failures())

    def started(self) -> Any:
        """Return the library's own file system."""
        return system(self.scheme)

    def failures(self) -> tuple[type[Exception], ...]:
        """Return what the library raises besides OSError: these have no common base."""
        return ()

    @classmethod
    def mount(cls, url: str) -> str:
        """Mount the folder of a URL; return the place of what it names."""
        place = url.rstrip("/")
        scheme = place.partition("://")[0]
        store = _store(cls, scheme, place)
        parent = place.rpartition("/")[0]
        places.mount(place + "/" if parent.endswith("/") else parent + "/", store)
        return place

    def look(self, place: str) -> Found:
        """Return what is there now; raise NotFoundError if nobody can tell."""
        try:
            with self._explained(place):
                found = self.info(place)
        except FileNotFoundError as error:
            if "specified bucket does not exist" in str(error):  # a name may have the word
                raise NotFoundError("there is no such bucket", file=place) from error
            return None
        return "folder" if found.get("type") == "directory" else seen_of(found)

    def meant(self, error: Exception) -> type[Exception] | str | None:  # noqa: ARG002  # of no known library
        """Return what an error of the library means: one of Python's, a sentence, or None."""
        return None

    def info(self, place: str) -> Mapping[str, Any]:
        """Return what the library tells of a place now; raise FileNotFoundError if there is nothing."""
        found: Mapping[str, Any] = self.system.info(place)
        return found

    def names(self, place: str, most: int) -> list[str]:
        """Return the names in a folder; a store that gives pages is asked for `most` of them."""
        try:
            with self._explained(place):
                found = self.listed(place, most)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except NotFoundError as error:
            # Many a bucket lets files be read and not be listed: it cannot tell.
            if PERMITS_NOT in error.message:
                return []
            raise
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def listed(self, place: str, most: int) -> Iterable[str]:  # noqa: ARG002  # asked for all at once
        """Return full names of what is in a folder."""
        found: list[str] = self.system.ls(place, detail=False)
        return found

    def part(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if another version is there now."""
        try:
            with self._explained(place):
                data = self.bytes_of(place, seen, offset, length)
        except FileNotFoundError as error:
            raise ChangedError("the file changed after it was listed, or went away", file=place) from error
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
        require_same(place, seen, seen_of(self.info(place)))
        return data

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        """Turn what the library raises into a sentence; what is not there stays FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except CkpttoolError as error:
            raise error.located(file=place) from error.__cause__
        except self._failures as error:
            means = self.meant(error) or type(error)
            if isinstance(means, str):
                raise NotFoundError(means, file=place) from error
            if issubclass(means, PermissionError):
                raise NotFoundError(f"the store {PERMITS_NOT}", file=place) from error
            if issubclass(means, TimeoutError):
                raise deadlines.stalled(place) from error
            if issubclass(means, EOFError):
                raise TruncatedError("the store stopped before all bytes had come", file=place) from error
            raise NotFoundError("the store cannot be read", file=place, found=means.__name__) from error


def system(scheme: str, **options: Any) -> Any:
    """Return the library's file system for a scheme, which remembers nothing."""
    # What a listing said stays true for nobody; settings of the environment may have changed.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)


_STORES: dict[tuple[str, float], Remembering] = {}


def _store(cls: type[Objects], scheme: str, place: str) -> Remembering:
    """Return the one store of a scheme: its connections are shared, which wait as long as the limit says."""
    known = scheme, limits.current().fetch_seconds
    if known not in _STORES:
        # Libraries look for keys here already: at a cloud's metadata server, if need be.
        allowance = deadlines.Allowance()
        server = allowance.run(place, 0, functools.partial(cls, scheme))
        _STORES[known] = Remembering(server, allowance=allowance)
    return _STORES[known]


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
