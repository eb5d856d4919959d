"""Repositories of the Hugging Face hub, read as of any web server.

The hub's own client makes the addresses and knows the token. It does not send the requests: it would follow a
redirect, or the link to a listing's next page, to any server, and wait for any time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from ckpttool import documents, places
from ckpttool.errors import ChangedError, NotFoundError, UnsupportedError
from ckpttool.places import Seen
from ckpttool.remote import answers
from ckpttool.remote.addresses import leads_away
from ckpttool.remote.objects import seen_of
from ckpttool.remote.pinned import Pinned

if TYPE_CHECKING:
    import aiohttp

    from ckpttool.remote.web import Web

# Of a file that is given as a whole: the hub may do so with what git itself keeps, which is at most 10 MB
# (https://huggingface.co/docs/hub/repositories-getting-started).
_SMALL = 16 << 20
_LARGEST = 16 << 20  # of an answer of the interface: a page has a thousand entries
_REASONS = {
    "GatedRepo": "the repository's owner has not let you in",
    "RepoNotFound": "there is no such repository, or it is private and HF_TOKEN does not open it",
    "RevisionNotFound": "there is no such revision",
}


class _Page(NamedTuple):
    """An answer of the interface, and the URL of the one that follows."""

    value: Any
    following: str | None


class _File(NamedTuple):
    """A path in a repository of the hub; `revision` is a branch, a tag or a commit."""

    kind: str
    repository: str
    revision: str
    path: str


# hf://[TYPE/]USER/NAME[@REVISION][/PATH] (https://huggingface.co/docs/huggingface_hub/guides/hf_file_system).
_ADDRESS = re.compile(
    r"hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class _Hub:
    """The hub's interface, with the token of the hub's own settings."""

    def __init__(self) -> None:
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils import validate_repo_id

        self.endpoint = constants.ENDPOINT.rstrip("/")
        self._offline, self._valid = constants.HF_HUB_OFFLINE, validate_repo_id
        # Not by the library's build_hf_headers, which asks the hub for a list of programs first.
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self.headers = {"User-Agent": "ckpttool", **({"Authorization": f"Bearer {token}"} if token else {})}

    def asked(self, place: str, file: _File, rest: str, form: dict[str, str] | None = None) -> _Page:
        """Return what the hub answers about a repository: JSON, and where the next page is."""
        self._valid(file.repository)
        url = f"{self.endpoint}/api/{file.kind}s/{file.repository}/{rest}"
        return self.page(place, url, form)

    def page(self, place: str, url: str, form: dict[str, str] | None = None) -> _Page:
        """Return what the hub answers at one of its URLs."""
        if self._offline:
            raise NotFoundError("HF_HUB_OFFLINE is set, so the hub is not asked", file=place)
        take = functools.partial(_page, place)
        return _web().asked(place, self.headers, take, url, form, stays=True)


class HF(Pinned):
    """The Hugging Face hub: the commit that a branch names when a visit first asks is read, and no other."""

    def started(self) -> Any:
        """Return the hub's interface."""
        return _Hub()

    def info(self, place: str) -> Mapping[str, Any]:
        """Return the file's size and its blob, of the commit that this visit reads."""
        file = _file(place)
        commit = self._commit(place, file)
        if not file.path:
            return {"type": "directory"}
        found = self.system.asked(place, file, f"paths-info/{quote(commit, '')}", {"paths": file.path}).value
        entries = _entries(place, found)
        if not entries:
            raise FileNotFoundError(place)
        if entries[0].get("type") != "file":
            return {"type": "directory"}
        size, blob = entries[0].get("size"), entries[0].get("oid")
        if not isinstance(size, int) or not isinstance(blob, str) or size < 0:
            raise UnsupportedError("the hub tells neither the size nor the version of the file", file=place)
        told = {"size": size, "blob_id": blob}
        self.remember(place, seen_of(told), commit)
        return told

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return the names, a page for every request."""
        file = _file(place)
        where = f"tree/{quote(self._commit(place, file), '')}" + (file.path and f"/{quote(file.path, '')}")
        page = self.system.asked(place, file, where)
        found = _entries(place, page.value)
        while page.following is not None and len(found) < most:
            page = self.system.page(place, page.following)
            found += _entries(place, page.value)
        return [str(each.get("path", "")) for each in found[:most]]

    def bytes_of(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return the bytes of the commit that was seen: asked for, and judged, as of any web server."""
        from huggingface_hub import hf_hub_url

        file, commit = _file(place), self.version(place, seen)
        url = hf_hub_url(
            file.repository, file.path, repo_type=file.kind, revision=commit, endpoint=self.system.endpoint
        )
        headers = {**self.system.headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        take = functools.partial(_part, place, seen, offset, length)
        return _web().asked(place, headers, take, url)

    def _commit(self, place: str, file: _File) -> str:
        known = places.visiting().versions
        name = f"{file.kind}:{file.repository}@{file.revision}"
        if name not in known:
            # Not what else is told of a repository: a list of all of its files.
            found = self.system.asked(place, file, f"revision/{quote(file.revision, '')}?expand=sha").value
            commit = found.get("sha") if isinstance(found, dict) else None
            if not isinstance(commit, str) or not commit:
                raise UnsupportedError("the hub does not tell the commit of the revision", file=place)
            known[name] = commit
        return known[name]


async def _page(place: str, answer: aiohttp.ClientResponse) -> _Page:
    """Return an answer of the interface as JSON; raise NotFoundError with the reason that it gives."""
    # huggingface_hub/utils/_http.py, hf_raise_for_status
    reason = answer.headers.get("X-Error-Code", "")
    if reason == "EntryNotFound" or (answer.status == 404 and not reason):
        raise FileNotFoundError(place)
    if reason in _REASONS:
        raise NotFoundError(_REASONS[reason], file=place)
    answers.require_ok(place, answer)
    data = bytearray()
    async for piece in answer.content.iter_chunked(answers.PIECE):
        data += piece
        if len(data) > _LARGEST:
            raise UnsupportedError("the hub answers with very much", file=place, found=f"{len(data):,} bytes")
    value = documents.value(bytes(data), "the hub's answer")
    following = answer.links.get("next")
    if following is None:
        return _Page(value, None)
    link = str(following.get("url", ""))
    if leads_away(answer.url, link):
        raise UnsupportedError("the hub's list goes on at another server, which is not followed", file=place)
    return _Page(value, link)


def _entries(place: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UnsupportedError("the hub answers with something that is no list of files", file=place)
    return value


async def _part(place: str, seen: Seen, offset: int, length: int, answer: aiohttp.ClientResponse) -> bytes:
    if answer.status == 206:
        first, last, total = answers.told(place, answer)
        if total != seen.size:
            raise ChangedError("the file changed after it was listed", file=place)
        if (first, last) != (offset, offset + length - 1):
            raise UnsupportedError("the server gives another part than was asked for", file=place)
        return await answers.exactly(place, answer, length)
    answers.require_ok(place, answer)
    if seen.size > _SMALL:
        raise UnsupportedError("the server gives no part of the file", file=place)
    return (await answers.exactly(place, answer, seen.size))[offset : offset + length]


def _file(place: str) -> _File:
    match = _ADDRESS.fullmatch(place)
    if place.startswith("hf://buckets/"):
        raise UnsupportedError("of the hub repositories are read, buckets are not", file=place)
    if match is None:
        raise FileNotFoundError(place)
    kind, repository, revision, path = match.groups()
    return _File((kind or "models").removesuffix("s"), repository, unquote(revision or "main"), path or "")


@functools.cache
def _web() -> Web:
    from ckpttool.remote.web import Web

    return Web("", "", "")
