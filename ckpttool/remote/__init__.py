"""Places elsewhere that are read by parts: web servers, object stores, and members of archives.

The only home of fsspec. Nothing here is imported before somebody names a URL; what each store needs is
imported when it is mounted.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple
from urllib.parse import unquote

from ckpttool import places, urls
from ckpttool.errors import MissingExtraError, UsageError, choice


class _Scheme(NamedTuple):
    """The module and class of a store, the libraries that it needs, and the extra that installs them."""

    module: str
    store: str
    requires: tuple[str, ...]
    extra: str


_WEB = _Scheme("ckpttool.remote.web", "Web", ("fsspec", "aiohttp"), "remote")
_S3 = _Scheme("ckpttool.remote.s3", "S3", ("fsspec", "s3fs"), "s3")
_GS = _Scheme("ckpttool.remote.pinned", "GS", ("fsspec", "gcsfs"), "gs")
_HF = _Scheme("ckpttool.remote.hub", "HF", ("fsspec", "aiohttp", "huggingface_hub"), "hf")
_MEMORY = _Scheme("ckpttool.remote.objects", "Objects", ("fsspec",), "remote")
_SCHEMES = {
    "http": _WEB,
    "https": _WEB,
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "hf": _HF,
    "memory": _MEMORY,
}
_ARCHIVES = ("zip", "tar")


def mount(text: str) -> str:
    """Make what a URL means readable, with what lies beside and below it; return the place of it.

    Nothing is asked of a server yet. Raise UsageError for a URL that says no place, MissingExtraError when a
    library is missing.
    """
    turned = urls.turned(text)
    if turned is None:
        raise UsageError(
            "the archive is not named", file=text, hint="zip://inner/ckpt-1::/path/archive.zip names both"
        )
    outermost, *inner = urls.links(turned)
    place = _mounted(outermost)
    for link in inner:
        place = _inside(place, link)
    return place


def _mounted(link: str) -> str:
    """Return the place of a plain URL or of a local path."""
    scheme, colon, rest = link.partition("://")
    if not colon or not urls.is_url(link):
        return link
    scheme = scheme.lower()
    if scheme in ("file", "local"):
        return unquote(rest.removeprefix("localhost"))
    known = _SCHEMES.get(scheme)
    if known is None:
        every = (*_SCHEMES, *_ARCHIVES, "file")
        raise UsageError(f"there is no scheme {scheme!r}", file=link, hint=choice(scheme, every))
    if not rest.strip("/"):
        raise UsageError("the URL names no place", file=link)
    missing = [name for name in known.requires if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{scheme}:// needs {', '.join(missing)}, which is not installed",
            file=link,
            hint=f"pip install 'ckpttool[{known.extra}]'",
        )
    store = getattr(importlib.import_module(known.module), known.store)
    place: str = store.mount(f"{scheme}://{rest}")
    return place


def _inside(outer: str, link: str) -> str:
    """Return the place of an archive's member; the archive may lie anywhere itself."""
    from ckpttool.remote.archives import Archive

    kind, _, inner = link.partition("://")
    start = f"{outer}::{kind}://{urls.TOP}"
    known = places.store(start)
    if not (isinstance(known, Archive) and known.start == start):  # what was listed, or unpacked, stays
        places.mount(start + "/", Archive(outer, kind))
    inner = inner.removeprefix(urls.TOP + "/").strip("/")
    return f"{start}/{inner}" if inner not in ("", urls.TOP) else start
