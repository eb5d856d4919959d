"""Repositories of the Hugging Face hub: listed by its own client, read as of any web server."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from ckpttool import places
from ckpttool.errors import ChangedError, UnsupportedError
from ckpttool.places import Seen
from ckpttool.remote import answers
from ckpttool.remote.objects import seen_of
from ckpttool.remote.pinned import Pinned

if TYPE_CHECKING:
    import aiohttp

    from ckpttool.remote.web import Web

# Of a file that is given as a whole: the hub may do so with what git itself keeps, which is at most 10 MB
# (https://huggingface.co/docs/hub/repositories-getting-started).
_SMALL = 16 << 20


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


class HF(Pinned):
    """The Hugging Face hub: the commit that a branch names when a visit first asks is read, and no other."""

    def started(self) -> Any:
        """Return the hub's client, with the token of its own settings."""
        from huggingface_hub import HfApi

        return HfApi()

    def failures(self) -> tuple[type[Exception], ...]:
        """Return what the client raises, by whatever library of connections it was built on."""
        from huggingface_hub.errors import HfHubHTTPError

        return tuple(each for each in HfHubHTTPError.__mro__ if each.__module__ != "builtins")

    def meant(self, error: Exception) -> type[Exception] | str | None:
        """Tell what is missing."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return "the repository's owner has not let you in"
        if isinstance(error, errors.RepositoryNotFoundError):
            return "there is no such repository, or it is private and HF_TOKEN does not open it"
        if isinstance(error, errors.RevisionNotFoundError):
            return "there is no such revision"
        answer = getattr(error, "response", None)
        return PermissionError if getattr(answer, "status_code", None) in answers.DENIED else None

    def info(self, place: str) -> Mapping[str, Any]:
        """Return the file's size and its blob, of the commit that this visit reads."""
        file = _file(place)
        commit = self._commit(file)
        if not file.path:
            return {"type": "directory"}
        found = self.system.get_paths_info(file.repository, [file.path], revision=commit, repo_type=file.kind)
        if not found:
            raise FileNotFoundError(place)
        if not hasattr(found[0], "blob_id"):
            return {"type": "directory"}
        told = {"size": found[0].size, "blob_id": found[0].blob_id}
        self.remember(place, seen_of(told), commit)
        return told

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return the names, a page for every request."""
        file = _file(place)
        found = self.system.list_repo_tree(
            file.repository, file.path or None, revision=self._commit(file), repo_type=file.kind
        )
        return [each.path for each in itertools.islice(found, most)]

    def bytes_of(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return the bytes of the commit that was seen: asked for, and judged, as of any web server."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        file, commit = _file(place), self.version(place, seen)
        url = hf_hub_url(
            file.repository, file.path, repo_type=file.kind, revision=commit, endpoint=self.system.endpoint
        )
        headers = {
            **build_hf_headers(token=self.system.token),
            "Range": f"bytes={offset}-{offset + length - 1}",
        }
        take = functools.partial(_part, place, seen, offset, length)
        return _web().asked(place, headers, take, url)

    def _commit(self, file: _File) -> str:
        known = places.visiting().versions
        name = f"{file.kind}:{file.repository}@{file.revision}"
        if name not in known:
            # Not what else is told of a repository: a list of all of its files.
            found = self.system.repo_info(
                file.repository, revision=file.revision, repo_type=file.kind, expand=["sha"]
            )
            known[name] = found.sha
        return known[name]


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
