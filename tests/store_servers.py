"""Servers of the tests that speak as two stores do: Hugging Face's hub, Google Cloud Storage.

What they answer was compared with what fake-gcs-server answers, and read from huggingface_hub/hf_api.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Versions = list[tuple[str, Path]]


@dataclass
class Hub:
    """Repositories by kind and name (`models/user/repo`), each with its commits, the newest last.

    `odd` is what is wrong with every answer: a status, or "whole" for files without parts, "cut" for a
    connection that ends too early, "to URL" for a redirect. `link` is the server of a listing's next pages.
    """

    repositories: dict[str, Versions] = field(default_factory=dict)
    url: str = ""
    odd: str = ""
    link: str = ""
    page: int = 1000
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    moved: int = 0

    def commit(self, repository: str, folder: Path) -> str:
        """Make the folder the newest commit; return its name."""
        versions = self.repositories.setdefault(repository, [])
        versions.append((hashlib.sha1(f"{repository}{len(versions)}".encode()).hexdigest(), folder))
        return versions[-1][0]


@dataclass
class Buckets:
    """Buckets as folders below `root`; an object's generation is `generation`, all others are gone."""

    root: Path
    url: str = ""
    generation: str = "1"
    odd: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    moved: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _begin(self) -> tuple[str, dict[str, list[str]]]:
        self.state = self.server.state  # type: ignore[attr-defined]  # serving() sets it
        address = urlsplit(self.path)
        self.state.requests.append((self.command, self.path))
        self.state.headers.append({name.lower(): value for name, value in self.headers.items()})
        return address.path, parse_qs(address.query)

    def _say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.state.odd == "cut" and status == 206:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            self.wfile.write(body)
            self.state.moved += len(body)

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._say(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _part(self, file: Path, tag: str) -> None:
        size = file.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or self.state.odd == "whole":
            return self._say(200, file.read_bytes(), {"ETag": tag})
        first, last = int(match[1]), min(int(match[2] or size), size - 1)
        if first >= size:
            return self._say(416, b"", {"Content-Range": f"bytes */{size}"})
        with file.open("rb") as stream:
            stream.seek(first)
            data = stream.read(last - first + 1)
        return self._say(206, data, {"ETag": tag, "Content-Range": f"bytes {first}-{last}/{size}"})


class _HubHandler(_Handler):
    """huggingface_hub/hf_api.py: repo_info, list_repo_tree, get_paths_info; file_download.py: hf_hub_url."""

    state: Hub

    def do_GET(self) -> None:
        path, query = self._begin()
        if self.state.odd.isdigit():
            return self._say(int(self.state.odd))
        if self.state.odd.startswith("to "):
            return self._say(302, b"", {"Location": self.state.odd[3:] + self.path})
        if (match := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(/.*)?", path)) is not None:
            kind, name, rest = match.groups()
            verb, _, tail = (rest or "/revision/main").lstrip("/").partition("/")
            revision, _, inner = tail.partition("/")
            repository = self._resolve(f"{kind}/{name}", unquote(revision))
            if repository is None:
                return None
            commit, folder = repository
            if verb == "revision":
                return self._json({"_id": "1", "id": name, "sha": commit})
            return self._tree(folder, unquote(inner), query)
        if path.startswith("/cdn/"):
            commit, _, inner = path.removeprefix("/cdn/").partition("/")
            every = {name: folder for item in self.state.repositories.values() for name, folder in item}
            return self._part(every[commit] / unquote(inner), f'"{inner}"')
        match = re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        if match is not None:
            kind, name, revision, inner = match.groups()
            repository = self._resolve(f"{kind or 'models'}/{name}", unquote(revision))
            if repository is None:
                return None
            if not (repository[1] / unquote(inner)).is_file():
                return self._say(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self._say(302, b"", {"Location": f"/cdn/{repository[0]}/{inner}?X-Amz-Signature=SECRET"})
        return self._say(404)

    def do_POST(self) -> None:
        path, _ = self._begin()
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if self.state.odd.isdigit():
            return self._say(int(self.state.odd))
        match = re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)/paths-info/([^/]+)", path)
        assert match is not None, path
        repository = self._resolve(f"{match[1]}/{match[2]}", unquote(match[3]))
        if repository is None:
            return None
        places = (repository[1] / name for name in form["paths"])
        return self._json([_entry(repository[1], path) for path in places if path.exists()])

    def _resolve(self, repository: str, revision: str) -> tuple[str, Path] | None:
        versions = self.state.repositories.get(repository)
        if versions is None:
            # To a stranger a private repository is none.
            self._say(401, b'{"error":"x"}', {"X-Error-Code": "RepoNotFound"})
            return None
        named = dict(versions)
        commit = versions[-1][0] if revision == "main" else revision
        if commit not in named:
            self._say(404, b'{"error":"x"}', {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, named[commit]

    def _tree(self, folder: Path, inner: str, query: dict[str, list[str]]) -> None:
        directory = folder / inner
        if not directory.is_dir():
            return self._say(404, b'{"error":"x"}', {"X-Error-Code": "EntryNotFound"})
        start = int(query.get("cursor", ["0"])[0])
        names = sorted(directory.iterdir())
        page = names[start : start + self.state.page]
        more = start + len(page)
        address = f"{self.state.link or self.state.url}{urlsplit(self.path).path}?cursor={more}"
        link = {"Link": f'<{address}>; rel="next"'} if more < len(names) else {}
        return self._json([_entry(folder, path) for path in page], link)


def _entry(folder: Path, file: Path) -> dict[str, object]:
    path = str(file.relative_to(folder))
    if file.is_dir():
        return {"type": "directory", "oid": "1" * 40, "size": 0, "path": path}
    size = file.stat().st_size
    with file.open("rb") as stream:  # enough of it to tell what the tests make apart
        oid = hashlib.sha1(stream.read(1 << 20) + str(size).encode()).hexdigest()
    lfs = {"oid": hashlib.sha256(oid.encode()).hexdigest(), "size": size, "pointerSize": 134}
    return {"type": "file", "oid": oid, "size": size, "path": path, "lfs": lfs}


class _BucketsHandler(_Handler):
    """Google's JSON API: objects.get, objects.list, media (https://cloud.google.com/storage/docs/json_api)."""

    state: Buckets

    def do_GET(self) -> None:
        path, query = self._begin()
        if self.state.odd.isdigit():
            problem = {"error": {"code": int(self.state.odd), "message": "no"}}
            return self._say(int(self.state.odd), json.dumps(problem).encode())
        match = re.fullmatch(r"/(download/)?storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path)
        if match is None or not (bucket := self.state.root / match[2]).is_dir():
            problem = {"error": {"code": 404, "message": "The specified bucket does not exist."}}
            return self._say(404, json.dumps(problem).encode())
        if not match[3]:
            return self._listed(bucket, query)
        file = bucket / unquote(match[3])
        generation = query.get("generation", [self.state.generation])[0]
        if not file.is_file() or generation != self.state.generation:
            problem = {"error": {"code": 404, "message": "No such object"}}
            return self._say(404, json.dumps(problem).encode())
        if match[1]:
            return self._part(file, f'"{generation}"')
        return self._json(self._object(bucket, file))

    def _object(self, bucket: Path, file: Path) -> dict[str, object]:
        return {
            "kind": "storage#object",
            "name": str(file.relative_to(bucket)),
            "bucket": bucket.name,
            "generation": self.state.generation,
            "size": str(file.stat().st_size),
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def _listed(self, bucket: Path, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        start, most = int(query.get("pageToken", ["0"])[0]), int(query.get("maxResults", ["1000"])[0])
        every = sorted(str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file())
        below = [key[len(prefix) :] for key in every if key.startswith(prefix)]
        names = list(dict.fromkeys(key.partition("/")[0] + ("/" if "/" in key else "") for key in below))
        page = [prefix + name for name in names[start : start + most]]
        document: dict[str, object] = {"kind": "storage#objects"}
        if start + most < len(names):
            document["nextPageToken"] = str(start + most)
        document["prefixes"] = [name for name in page if name.endswith("/")]
        document["items"] = [self._object(bucket, bucket / name) for name in page if not name.endswith("/")]
        return self._json(document)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


@contextmanager
def serving(state: Hub | Buckets, port: int = 0) -> Iterator[None]:
    """Serve on a port of this machine while the block runs."""
    handler = _HubHandler if isinstance(state, Hub) else _BucketsHandler
    with _Server(("127.0.0.1", port), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.state = state  # type: ignore[attr-defined]  # for the handlers
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
