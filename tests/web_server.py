"""A web server of the tests: gives parts of files, counts what it moves, and misbehaves when told to."""

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
from xml.sax.saxutils import escape

import numpy as np


@dataclass
class Site:
    """The files below a folder; `odd` says by path, or for "*", in which way an answer is wrong."""

    root: Path
    url: str = ""
    odd: dict[str, str] = field(default_factory=dict)
    version: str = "1"
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    moved: int = 0

    def begin(self) -> None:
        """Count anew."""
        self.requests.clear()
        self.headers.clear()
        self.moved = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def site(self) -> Site:
        return self.server.site  # type: ignore[attr-defined]  # serving() sets it

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        self.site.requests.append((self.command, self.path))
        self.site.headers.append({name.lower(): value for name, value in self.headers.items()})
        odd = self.site.odd.get(path) or self.site.odd.get("*", "")
        file = self.site.root / path.lstrip("/")
        if "list-type" in address.query and "list" in self.site.odd:
            return self._say(int(self.site.odd["list"]))
        if "list-type" in address.query:
            return self._listed(path, parse_qs(address.query))
        if odd.isdigit():
            return self._say(int(odd))
        if odd.startswith("to "):
            return self._say(302, {"Location": odd[3:]})
        if file.is_dir() and odd == "page":
            links = "".join(f'<a href="{path.name}">x</a>' for path in sorted(file.iterdir()))
            return self._say(200, {"Content-Type": "text/html"}, (links + '<a href="/etc/x">y</a>').encode())
        if not file.is_file():
            return self._say(404)
        return self._file(file, odd, body=body)

    def _file(self, file: Path, odd: str, *, body: bool) -> None:
        size = file.stat().st_size
        tag = f'"{hashlib.md5(f"{file}{size}{self.site.version}".encode()).hexdigest()}"'
        headers = {"ETag": tag, "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "x-amz-request-id": "1"}
        if odd == "untagged":
            del headers["ETag"]
        if (version := self.headers.get("If-Match")) is not None and version != tag:
            message = b"<Message>At least one of the pre-conditions you specified did not hold</Message>"
            code = b"<Code>PreconditionFailed</Code>"
            return self._say(412, {}, b"<Error>" + code + message + b"</Error>")
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or odd == "whole":
            return self._say(200, headers, file.read_bytes() if body else b"", size)
        first, last = int(match[1]), min(int(match[2] or size), size - 1)
        if first >= size:
            return self._say(416, {**headers, "Content-Range": f"bytes */{size}"})
        with file.open("rb") as stream:
            stream.seek(first)
            data = stream.read(last - first + 1)
        content_range = {"Content-Range": f"bytes {first}-{last}/{size}"}
        if odd == "larger":
            content_range = {"Content-Range": f"bytes {first}-{last}/{10**15}"}
        elif odd == "shifted":
            content_range = {"Content-Range": f"bytes {first + 1}-{last + 1}/{size + 1}"}
        elif odd == "untold":
            content_range = {}
        elif odd == "packed":
            content_range["Content-Encoding"] = "gzip"
        elif odd == "more":
            data += b"more"
        short = len(data) // 2 if odd == "short" else None
        return self._say(206, {**headers, **content_range}, data, short=short)

    def _listed(self, path: str, query: dict[str, list[str]]) -> None:
        """Answer S3's ListObjectsV2."""
        bucket = self.site.root / path.strip("/")
        if not bucket.is_dir():
            message = b"<Message>The specified bucket does not exist</Message>"
            return self._say(404, {}, b"<Error><Code>NoSuchBucket</Code>" + message + b"</Error>")
        prefix = query.get("prefix", [""])[0]
        keys = [str(path.relative_to(bucket)) for path in sorted(bucket.rglob("*")) if path.is_file()]
        matching = [key for key in keys if key.startswith(prefix)]
        deep = {key[: key.index("/", len(prefix)) + 1] for key in matching if "/" in key[len(prefix) :]}
        plain = (
            matching
            if "delimiter" not in query
            else [key for key in matching if "/" not in key[len(prefix) :]]
        )
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{(bucket / key).stat().st_size}</Size>"
            "<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key in plain
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(deep)]
        body = f"<ListBucketResult><KeyCount>{len(rows)}</KeyCount>{''.join(rows)}</ListBucketResult>"
        return self._say(200, {"Content-Type": "application/xml"}, body.encode())

    def _say(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        length: int | None = None,
        *,
        short: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(length or len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            # Counted first: the reader may have all of it, and count anew, before this thread goes on.
            self.site.moved += len(body)
            try:
                self.wfile.write(body if short is None else body[:short])
            except OSError:  # who asked has gone
                self.close_connection = True
        if short is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


@contextmanager
def serving(root: Path) -> Iterator[Site]:
    """Serve the folder on a port of this machine while the block runs."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        site = Site(root, f"http://127.0.0.1:{server.server_address[1]}")
        server.site = site  # type: ignore[attr-defined]  # for the handlers
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


def s3_settings(url: str) -> dict[str, str]:
    """Return the environment in which AWS's libraries take the site for S3, and ask nobody else."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


def saved(folder: Path, name: str = "model.safetensors", elements: int = 100_000) -> Path:
    """Write a safetensors file of one tensor of random numbers."""
    array = np.random.default_rng(0).standard_normal(elements).astype("<f4")
    header = {"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, array.nbytes]}}
    text = json.dumps(header).encode()
    file = folder / name
    file.write_bytes(len(text).to_bytes(8, "little") + text + array.tobytes())
    return file
