"""Servers that stall, trickle or lead into private networks: they hold no command and reach nothing."""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpttool
from ckpttool.commands import inspect
from ckpttool.core import (
    CkpttoolError,
    DeadlineError,
    Limits,
    UnsupportedError,
    atomic_write,
    filesystem,
    limits,
)
from tests.store_servers import Hub
from tests.store_servers import serving as serving_store
from tests.web_server import Site, s3_settings, saved, serving

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")

from ckpttool.core import remote, remote_sites

HASTY = Limits(fetch_seconds=0.4)  # type: ignore[arg-type]  # tests have no seconds to spare
PUBLIC, PRIVATE = "93.184.215.14", "10.0.0.1"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mount anew, ask no proxy, and begin with new connections and allowances."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(filesystem, "_MOUNTED", {})
    remote_sites._http_filesystem.cache_clear()
    remote_sites._server_budget.cache_clear()
    from ckpttool.core import remote_sites as objects

    monkeypatch.setattr(objects, "_STORES", {})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    saved(tmp_path)
    with serving(tmp_path) as server:
        yield server


Connect = tuple[str, int]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, site: Site) -> list[Connect]:
    """Return where connections went; those to the public address arrive at the site, others nowhere."""
    connections: list[Connect] = []
    real = asyncio.selector_events.BaseSelectorEventLoop.sock_connect
    port = int(site.url.rpartition(":")[2])

    async def connect(loop: Any, sock: socket.socket, address: Any) -> None:
        connections.append((address[0], address[1]))
        if address[0] == PUBLIC:
            address = ("127.0.0.1", port)
        if address != ("127.0.0.1", port):
            raise ConnectionRefusedError(address)
        await real(loop, sock, address)

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_connect", connect)
    return connections


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return what names stand for: one address for each look-up, the last one for all later ones."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def looked_up(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        addresses = known.get(str(host).rstrip("."))
        if addresses is None:
            return real(host, port, *rest, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (item, int(port or 0))) for item in address.split()
        ]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return known


# Addresses


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 127.9.9.9 169.254.169.254 172.16.0.1 172.31.255.255",
        "192.168.1.1 192.88.99.1 3fff::1 5f00::1",
        "192.0.0.8 192.0.2.1 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255",
        ":: ::1 ::7f00:1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 2001:db8::1 100::1",
        "::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:127.0.0.1 2002:a00:1::1 2002:7f00:1:: 64:ff9b::a00:1",
        "64:ff9b::7f00:1 64:ff9b:1::1 2001:0:a00:1:: 2600::5efe:10.0.0.1 2600::200:5efe:a00:1",
        "localhost 10.0.0 nothing",
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    for address in text.split():
        assert not remote_sites.is_public(address), address


@pytest.mark.parametrize(
    "text",
    ["1.1.1.1", PUBLIC, "2606:4700::1111", "::ffff:1.1.1.1", "2002:101:101::", "64:ff9b::101:101"],
)
def test_addresses_that_are_public(text: str) -> None:
    assert remote_sites.is_public(text)


# Redirects

HIDDEN = [
    *(
        f"http://{host}/model.safetensors"
        for host in (PRIVATE, "169.254.169.254", "127.0.0.2", "0.0.0.0", "0")
    ),
    *(f"http://{host}/x" for host in ("2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "127.1", "10.1")),
    *(f"http://[{host}]/x" for host in ("::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "fe80::1", "fd00::1")),
    *(f"http://[{host}]/x" for host in ("2002:a00:1::1", "64:ff9b::a9fe:a9fe", "::", "ff02::1")),
    *(f"http://{host}/x" for host in ("localhost", "LOCALHOST.", "a.localhost", "100.64.0.1", "224.0.0.1")),
    f"//{PRIVATE}/x",
    f"///{PRIVATE}/x",
    f"http:\\\\{PRIVATE}\\x",
    f"http://{PUBLIC}@{PRIVATE}/x",
    f"http://user:word@{PUBLIC}/x",
    "http://hidden.example/x",
    "file:///etc/passwd",
    "ftp://127.0.0.1/x",
    "gopher://127.0.0.1/x",
    "data:text/plain,x",
    "http://",
    "http://[::1",
    "http://host:port/",
]


@pytest.mark.parametrize("location", HIDDEN)
def test_no_redirect_reaches_a_private_address(
    location: str, site: Site, connected: list[Connect], names: dict[str, list[str]]
) -> None:
    names["hidden.example"] = [PRIVATE]
    for name in ("localhost", "LOCALHOST", "a.localhost"):
        names[name] = ["127.0.0.1"]
    site.odd["/model.safetensors"] = f"to {location}"
    port = int(site.url.rpartition(":")[2])
    with pytest.raises(CkpttoolError) as caught:
        ckpttool.open(f"{site.url}/model.safetensors")
    assert caught.value.file == f"{site.url}/model.safetensors"
    assert set(connected) <= {("127.0.0.1", port)}


def test_a_later_redirect_reaches_no_private_address_either(
    site: Site, connected: list[Connect], names: dict[str, list[str]]
) -> None:
    names["public.example"] = [PUBLIC]
    site.odd["/model.safetensors"] = "to http://public.example/second"
    site.odd["/second"] = f"to http://{PRIVATE}/third"
    with pytest.raises(UnsupportedError):
        ckpttool.open(f"{site.url}/model.safetensors")
    assert (PUBLIC, 80) in connected
    assert PRIVATE not in dict(connected)


def test_a_public_redirect_is_followed_without_credentials(
    site: Site, connected: list[Connect], names: dict[str, list[str]]
) -> None:
    names["public.example"] = [PUBLIC]
    (site.root / "there").write_bytes((site.root / "model.safetensors").read_bytes())
    site.odd["/model.safetensors"] = "to http://public.example/there?sig=a%2Fb%20c"
    url = site.url.replace("//", "//anna:pass@") + "/model.safetensors"
    assert ckpttool.open(url).format == "safetensors"
    assert (PUBLIC, 80) in connected
    both = zip(site.requests[:2], site.headers[:2], strict=True)
    by_path = {path: headers for (_, path), headers in both}
    assert "authorization" in by_path["/model.safetensors"]
    assert "authorization" not in by_path["/there?sig=a%2Fb%20c"]
    assert by_path["/there?sig=a%2Fb%20c"]["range"].startswith("bytes=0-")


def test_a_redirect_on_the_named_host_keeps_its_credentials(site: Site) -> None:
    (site.root / "there").write_bytes((site.root / "model.safetensors").read_bytes())
    site.odd["/model.safetensors"] = "to /there"
    url = site.url.replace("//", "//anna:pass@") + "/model.safetensors"
    assert ckpttool.open(url).format == "safetensors"
    assert all("authorization" in headers for headers in site.headers)


def test_netrc_is_for_the_named_host_alone(
    site: Site,
    connected: list[Connect],
    names: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names["public.example"] = [PUBLIC]
    (site.root / "there").write_bytes((site.root / "model.safetensors").read_bytes())
    (tmp_path / "netrc").write_text("default login anna password word\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    site.odd["/model.safetensors"] = "to http://public.example/there"
    assert ckpttool.open(f"{site.url}/model.safetensors").format == "safetensors"
    sent = {(path, "authorization" in h) for (_, path), h in zip(site.requests, site.headers, strict=True)}
    assert ("/model.safetensors", True) in sent
    assert ("/there", True) not in sent


def test_a_token_goes_with_a_netrc_entry_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Hub()
    saved(tmp_path)
    state.commit("models/user/agent", tmp_path)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login anna password word\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving_store(state), hub_at(state.url, monkeypatch) as url:
        assert ckpttool.open(url).format == "safetensors"


def test_a_proxy_gets_its_password(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", site.url.replace("//", "//anna:pass@"))
    monkeypatch.setenv("no_proxy", "")
    assert ckpttool.open("http://named.example/model.safetensors").format == "safetensors"
    assert all("proxy-authorization" in headers for headers in site.headers)


def test_a_host_that_was_public_does_not_become_private(
    site: Site, connected: list[Connect], names: dict[str, list[str]]
) -> None:
    """DNS rebinding: the name is looked up again for another port, and has a private address now."""
    names["evil.example"] = [PUBLIC, PRIVATE]
    site.odd["/model.safetensors"] = "to http://evil.example:81/x"
    with pytest.raises(UnsupportedError):
        ckpttool.open("http://evil.example/model.safetensors")
    assert connected == [(PUBLIC, 80)]


def test_of_public_and_private_addresses_the_public_ones_are_tried(
    site: Site, connected: list[Connect], names: dict[str, list[str]]
) -> None:
    names["mixed.example"] = [f"{PRIVATE} {PUBLIC}"]
    assert ckpttool.open("http://mixed.example/model.safetensors").format == "safetensors"
    assert set(connected) == {(PUBLIC, 80)}


def test_behind_a_proxy_private_names_and_numbers_are_not_asked_for(
    site: Site, connected: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", site.url)
    monkeypatch.setenv("no_proxy", "")
    port = int(site.url.rpartition(":")[2])
    for name in (PRIVATE, "169.254.169.254", "localhost", "2130706433", "metadata.google.internal"):
        site.begin()
        site.odd["/model.safetensors"] = f"to http://{name}/x"
        with pytest.raises(CkpttoolError):
            ckpttool.open("http://named.example/model.safetensors")
        assert {path for _, path in site.requests} == {"http://named.example/model.safetensors"}
        filesystem._MOUNTED.clear()
    site.odd["/model.safetensors"] = "to http://other.example/there"
    (site.root / "there").write_bytes((site.root / "model.safetensors").read_bytes())
    assert ckpttool.open("http://named.example/model.safetensors").format == "safetensors"
    assert set(connected) == {("127.0.0.1", port)}


# Stores


@pytest.fixture
def s3(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
    for name, value in s3_settings(site.url).items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/model.safetensors"


@contextmanager
def hub_at(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    yield "hf://user/agent/model.safetensors"


def test_s3_follows_no_redirect(s3: str, site: Site, connected: list[Connect]) -> None:
    site.odd["*"] = f"to http://{PRIVATE}/x"
    with pytest.raises(CkpttoolError):
        ckpttool.open(s3)
    assert PRIVATE not in dict(connected)


def test_google_follows_no_redirect_to_another_host(
    site: Site, connected: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gcsfs", reason="the extra `gs` is not installed")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", site.url)
    site.odd["*"] = f"to http://{PRIVATE}/x"
    with pytest.raises(CkpttoolError) as caught:
        ckpttool.open("gs://bucket/model.safetensors")
    assert caught.value.file == "gs://bucket/model.safetensors"
    assert PRIVATE not in dict(connected)


def test_the_hub_follows_neither_redirects_nor_pages_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Hub(page=1)
    state.commit("models/user/agent", tmp_path)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"x")
    other = Hub()
    with serving_store(state), serving_store(other), hub_at(state.url, monkeypatch):
        for there in (other.url.replace("127.0.0.1", "localhost"), other.url):
            state.link = there
            with pytest.raises(UnsupportedError):
                filesystem.listdir(filesystem.resolve_path("hf://user/agent"))
        state.link, state.odd = "", f"to {other.url.replace('127.0.0.1', 'localhost')}"
        with pytest.raises(CkpttoolError):
            ckpttool.open("hf://user/agent/a.pt")
        with limits.using(Limits()), pytest.raises(CkpttoolError):
            filesystem.listdir(filesystem.resolve_path("hf://user/agent"))
        assert other.requests == []


# Deadlines

Send = Callable[[bytes], None]


_over = threading.Event()


def pause(seconds: float) -> None:
    """Wait; raise OSError once the test is over."""
    if _over.wait(seconds):
        raise OSError


def silent(_: Send, __: str) -> None:
    pause(20)


def dripping(send: Send, _: str) -> None:
    send(b"HTTP/1.1 206 Partial Content\r\nX-Long: ")
    while True:
        send(b"x")
        pause(0.05)


def processing(send: Send, _: str) -> None:
    while True:
        send(b"HTTP/1.1 102 Processing\r\n\r\n")


def circling(send: Send, path: str) -> None:
    pause(0.15)
    send(f"HTTP/1.1 302 Found\r\nLocation: {path}x\r\nContent-Length: 0\r\n\r\n".encode())


def busy(send: Send, _: str) -> None:
    send(b"HTTP/1.1 503 Busy\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n")


def trickling(send: Send, _: str) -> None:
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\nETag: 1\r\n\r\n")
    while True:
        send(b"x")
        pause(0.05)


def endless(send: Send, _: str) -> None:
    send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        send(b"1\r\nx\r\n")
        pause(0.05)


STALLS = [silent, dripping, processing, circling, busy, trickling, endless]


@contextmanager
def stalling(how: Callable[[Send, str], None]) -> Iterator[str]:
    """Serve connections by a function that has the request's path; give the URL."""
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while request := connection.recv(1 << 16):
                    how(connection.sendall, request.split()[1].decode())
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            connections.append(connection)
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        threads.append(threading.Thread(target=accept, daemon=True))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            _over.set()
            for connection in (listener, *connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(0.5)
            _over.clear()


@contextmanager
def ends_in_time() -> Iterator[None]:
    began = time.monotonic()
    with limits.using(HASTY), pytest.raises(DeadlineError) as caught:
        yield
    assert time.monotonic() - began < 15, "servers here are silent for 20 s"
    assert caught.value.kind == "timeout"
    assert "fetch_seconds" in str(caught.value.hint)


def _require_quiet() -> None:
    """Raise unless the requests of this process have ended, retries of libraries included."""
    until = time.monotonic() + 60
    while asyncio.all_tasks(remote.event_loop()):
        assert time.monotonic() < until, "a request goes on after its command ended"
        time.sleep(0.05)


@pytest.mark.parametrize("how", STALLS)
def test_a_server_that_stalls_is_left(how: Callable[[Send, str], None]) -> None:
    with stalling(how) as url:
        with ends_in_time():
            ckpttool.open(f"{url}/x.pt")
        _require_quiet()


@pytest.mark.parametrize("how", [silent, trickling])
@pytest.mark.parametrize("store", ["s3", "gs", "hf"])
def test_a_store_that_stalls_is_left(
    store: str, how: Callable[[Send, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
    pytest.importorskip(needs[store], reason=f"the extra `{store}` is not installed")
    with stalling(how) as url, hub_at(url, monkeypatch):
        for name, value in {**s3_settings(url), "STORAGE_EMULATOR_HOST": url}.items():
            monkeypatch.setenv(name, value)
        with ends_in_time():
            ckpttool.open(f"{store}://user/agent/model.safetensors")
        _require_quiet()


def test_a_name_that_is_looked_up_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def looked_up(*_: object, **__: object) -> None:
        over.wait(20)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with ends_in_time():
        ckpttool.open("http://slow.example/x.pt")
    over.set()


def test_a_page_that_stalls_is_left() -> None:
    def paged(send: Send, path: str) -> None:
        if path.endswith("/"):
            send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 9999\r\n\r\n")
            trickling(send, path)
        send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with stalling(paged) as url, ends_in_time():
        ckpttool.open(f"{url}/ckpt-1")


def test_a_stall_in_the_middle_ends_parallel_reads(tmp_path: Path) -> None:
    with stalling(silent) as url, ends_in_time():
        path = filesystem.resolve_path(f"{url}/x")
        store = filesystem.find_store(path)
        assert store is not None
        store.together(path, filesystem.FileStat(10**6, 0, 0), [(at, 100) for at in range(0, 10**6, 50_000)])


def test_a_member_of_an_archive_that_stalls_is_left() -> None:
    with stalling(silent) as url, ends_in_time():
        ckpttool.open(f"zip://a.pt::{url}/a.zip")


def test_a_slow_file_that_arrives_is_read(tmp_path: Path) -> None:
    """Longer than `fetch_seconds` in all, at a rate above `fetch_rate`."""
    data = saved(tmp_path, elements=2500).read_bytes()

    def slow(send: Send, _: str) -> None:
        send(f"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        for at in range(0, len(data), 1000):
            send(data[at : at + 1000])
            pause(0.1)

    def named(send: Send, path: str) -> None:
        if path == "/model.safetensors":
            return slow(send, path)
        return send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with stalling(named) as url, limits.using(Limits(fetch_seconds=0.8, fetch_rate=2000)):  # type: ignore[arg-type]
        assert ckpttool.digest(f"{url}/model.safetensors").sha256


def test_an_allowance_is_used_up_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now, started = [0.0], []
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def answer() -> int:
        now[0] += 0.1
        return 1

    async def stall() -> None:
        started.append(1)
        while True:
            now[0] += 0.1
            await asyncio.sleep(0.01)

    allowance = remote.WaitBudget()
    with limits.using(HASTY):
        for _ in range(8):  # together longer than the limit
            assert allowance.run("x", 0, answer) == 1
        for _ in range(2):
            with pytest.raises(DeadlineError):
                allowance.run("x", 0, stall)
        _require_quiet()
        assert len(started) == 1, "a request began although no second was left"
        now[0] += 5
        assert allowance.run("x", 0, answer) == 1


def test_the_time_in_which_the_process_stands_still_is_not_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, *(number / 10 for number in range(5)), *(3600 + number / 10 for number in range(1000))])
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with limits.using(Limits(fetch_seconds=5)):
        assert remote.WaitBudget().run("x", 0, lambda: asyncio.sleep(0.3)) is None


def test_bytes_beyond_those_that_were_asked_for_are_no_progress() -> None:
    class Stream:
        total_bytes = 0

    async def flood() -> None:
        remote.current_request().watch(stream)
        while True:
            stream.total_bytes += 1 << 20
            await asyncio.sleep(0.01)

    stream = Stream()
    known = Limits(fetch_seconds=0.2, fetch_rate=1 << 30)  # type: ignore[arg-type]
    with limits.using(known), pytest.raises(DeadlineError):
        remote.WaitBudget().run("x", 1000, flood)
    _require_quiet()


def test_what_a_job_raises_is_raised_and_its_context_holds() -> None:
    async def job() -> None:
        assert limits.current() is HASTY
        raise TimeoutError("its own")

    with limits.using(HASTY), pytest.raises(TimeoutError, match="its own"):
        remote.WaitBudget().run("x", 0, job)


def test_a_lane_is_left_at_once_when_its_caller_fails() -> None:
    def fail() -> None:
        with atomic_write.WorkerThread() as lane:
            lane.do(lambda: remote.WaitBudget().run("x", 0, lambda: asyncio.sleep(20)))
            time.sleep(0.1)
            raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert time.monotonic() - began < 15


def test_a_stall_is_never_taken_for_a_missing_file() -> None:
    with stalling(silent) as url:
        location = filesystem.resolve_path(f"{url}/x.pt")
        for ask in (filesystem.path_kind, filesystem.isfile, filesystem.lexists, filesystem.getsize):
            with ends_in_time():
                ask(location)


def test_ctrl_c_ends_a_command_at_once(tmp_path: Path) -> None:
    """While one thread reads ahead, another waits for a host's name, and the server stalls."""
    program = (
        "import socket, sys, threading, time\n"
        "socket.getaddrinfo = lambda *_, **__: time.sleep(60)\n"
        "from ckpttool.cli import main\n"
        "print('ready', flush=True)\n"
        "sys.argv = ['ckpttool', 'digest', 'http://slow.example/x.pt']\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=os.getcwd()
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(1.5)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert child.wait(60) == 130
        assert time.monotonic() - began < 40, "the host's name takes 60 s"


def test_a_folder_that_stalls_is_not_listed_in_part(tmp_path: Path) -> None:
    data = saved(tmp_path, elements=10).read_bytes()

    def folder(send: Send, path: str) -> None:
        if path == "/run/":
            page = b'<a href="a.safetensors">a</a><a href="b.safetensors">b</a><a href="c.safetensors">c</a>'
            send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(page) + page
            )
        elif path == "/run":
            send(b"HTTP/1.1 301 Moved\r\nLocation: /run/\r\nContent-Length: 0\r\n\r\n")
        elif path == "/run/c.safetensors":
            silent(send, path)
        elif path.endswith("b.safetensors"):
            send(b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        else:
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with stalling(folder) as url, ends_in_time():
        inspect.inspect_path(f"{url}/run")
