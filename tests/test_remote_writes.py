"""Targets in object stores, in moto's S3 and in fake-gcs-server: both are programs of other people."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import google_crc32c
import numpy as np
import pytest

from benchmarks import sharding
from ckpttool.commands.convert import convert
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import ChangedError, CkpttoolError, FormatError, TargetExistsError, UsageError, filesystem
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint
from tests.conftest import ROOT, TORCH_SAMPLE, in_process
from tests.web_server import s3_settings

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")

STORES = {
    "s3": ("moto_server", "s3fs", "-H 127.0.0.1 -p {port}"),
    "gs": (
        "fake-gcs-server",
        "gcsfs",
        "-scheme http -host 127.0.0.1 -port {port} -backend memory "
        "-public-host 127.0.0.1:{public} -external-url http://127.0.0.1:{public}",
    ),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The addresses of the servers that are installed, each started once."""
    with Programs() as stack:
        started = {scheme: stack.start(scheme) for scheme in STORES if shutil.which(STORES[scheme][0])}
        yield {scheme: url for scheme, url in started.items() if url is not None}


class Programs:
    """Programs that end with the block."""

    def __enter__(self) -> Programs:
        self.programs: list[subprocess.Popen[bytes]] = []
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.kill()
            program.wait()

    def start(self, scheme: str, *, counted: bool = False) -> str | None:
        """Start the server of a scheme with an empty bucket; return its address, None if it ends at once.

        A launcher of pyenv is on the path also where the program is installed for another Python. With
        `counted`, the address is that of a proxy (`self.proxy`).
        """
        name, _, words = STORES[scheme]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        public = port
        if counted:
            self.proxy = sharding.Throttle(port, 30e6)
            public = self.proxy.port
        command = [name, *words.format(port=port, public=public).split()]
        self.programs.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True)
        )
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if self.programs[-1].poll() is not None:
                return None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        if scheme == "s3":
            urlopen(Request(f"{url}/bucket", method="PUT")).close()
        else:
            body = Request(f"{url}/storage/v1/b", b'{"name": "bucket"}', {"Content-Type": "application/json"})
            urlopen(body).close()
        return f"http://127.0.0.1:{public}"


def store_settings(scheme: str, url: str) -> dict[str, str]:
    """Return the environment in which a store's library finds the server."""
    emulated = {"STORAGE_EMULATOR_HOST": url} if scheme == "gs" else {}
    return {**s3_settings(url), "NO_PROXY": "127.0.0.1", **emulated}


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, servers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A URL below which nothing is stored."""
    scheme: str = request.param
    pytest.importorskip(STORES[scheme][1], reason=f"the extra `{scheme}` is not installed")
    if scheme not in servers:
        pytest.skip(f"{STORES[scheme][0]} is not installed, or does not start")
    for name, value in store_settings(scheme, servers[scheme]).items():
        monkeypatch.setenv(name, value)
    from ckpttool.core import remote_sites

    monkeypatch.setattr(filesystem, "_MOUNTED", {})
    monkeypatch.setattr(remote_sites, "_STORES", {})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return f"{scheme}://bucket/{tmp_path.name}"


@pytest.fixture
def s3(store: str) -> str:
    if not store.startswith("s3"):
        pytest.skip("this is about multipart uploads")
    return store


def listed(url: str) -> dict[str, bytes]:
    """Return all objects below a URL."""
    system = fsspec_system(url)
    return {
        name.partition(url.partition("://")[2] + "/")[2]: system.cat_file(name) for name in system.find(url)
    }


def fsspec_system(url: str) -> Any:
    import fsspec

    return fsspec.filesystem(url.partition("://")[0], use_listings_cache=False, skip_instance_cache=True)


def shards_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.endswith(".ckpttool.json")}


def large(folder: Path) -> Path:
    """Write 24 MB in four tensors."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    state = {f"layers.{n}.weight": random.standard_normal((1000, 500 * n)).astype("f4") for n in (1, 2, 4, 5)}
    save_file(state, folder / "source.safetensors")
    return folder / "source.safetensors"


@pytest.mark.parametrize("jobs", [None, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a/model.safetensors", {"shard_size": "50KB"}),
        ("a/dcp", {"to": "dcp", "shard_size": "50KB"}),
        ("a/ckpt-1", {"to": "tf", "shards": 3}),
    ],
)
def test_an_object_store_has_the_bytes_of_local_files(
    store: str, tmp_path: Path, name: str, options: dict[str, Any], jobs: int | None
) -> None:
    system = fsspec_system(store)
    system.put_file(str(TORCH_SAMPLE), f"{store}/source.pt")
    done = convert(f"{store}/source.pt", f"{store}/{name}", jobs=jobs, **options)
    assert os.listdir() == []
    (tmp_path / "a").mkdir()
    here = convert(str(TORCH_SAMPLE), str(tmp_path / name), **options)
    local = {
        str(file.relative_to(tmp_path / "a")): file.read_bytes()
        for file in (tmp_path / "a").rglob("*")
        if file.is_file()
        and file.name != "checkpoint"  # TensorFlow's state file, which is replaced each time
    }
    stored = listed(f"{store}/a")
    assert shards_of(stored) == shards_of(local)
    assert stored.keys() == local.keys()  # the sidecar too, and no journal
    assert done.digest == here.digest
    assert digest_checkpoint(open_checkpoint(done.target)).sha256 == done.digest


def test_an_interrupted_conversion_continues(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.core import remote_uploads

    source, target = large(tmp_path), f"{store}/model.safetensors"
    monkeypatch.setattr(remote_uploads, "PART", 5 << 20)
    sent: list[tuple[str, int]] = []
    count_parts(monkeypatch, sent, most=3)
    with pytest.raises(CkpttoolError):
        convert(str(source), target, shard_size="12MB")
    assert not any(name.endswith("index.json") for name in listed(store))
    complete = [name for name in listed(store) if name.endswith(".safetensors")]
    assert complete == ["model-00001-of-00003.safetensors"]
    first, sent[:] = list(sent), []
    count_parts(monkeypatch, sent, most=100)
    convert(str(source), target, shard_size="12MB")
    assert not set(complete) & {os.path.basename(name) for name, _ in sent}
    if store.startswith("s3"):  # a part is sent once, whatever happens
        assert not set(sent) & set(first)
    (tmp_path / "here").mkdir()
    convert(str(source), str(tmp_path / "here" / "model.safetensors"), shard_size="12MB")
    local = {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}
    assert shards_of(listed(store)) == shards_of(local)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", STORES)
def test_kills_while_parts_are_sent_cost_what_was_in_hand(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From store to store; a worker is killed, then the command, then it is run again."""
    pytest.importorskip(STORES[scheme][1], reason=f"the extra `{scheme}` is not installed")
    source = sharding.random_file(tmp_path / "source.safetensors", 96 * 10**6, 12)
    size, shard = source.stat().st_size, 16 * 10**6
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    for directory in (work, temporary, tmp_path / "here"):
        directory.mkdir()
    options = ("--shard-size", "17MB", "--quiet")
    assert in_process("convert", source, tmp_path / "here" / "model.safetensors", *options).status == 0
    with Programs() as programs:
        url = programs.start(scheme, counted=True) if shutil.which(STORES[scheme][0]) else None
        if url is None:
            pytest.skip(f"{STORES[scheme][0]} is not installed, or does not start")
        for name, value in store_settings(scheme, url).items():
            monkeypatch.setenv(name, value)
        small = {"chunksize": 1 << 20} if scheme == "gs" else {}  # aiohttp warns of large ones
        fsspec_system(f"{scheme}://bucket").put_file(
            str(source), f"{scheme}://bucket/source.safetensors", **small
        )
        programs.proxy.up = programs.proxy.down = 0
        words = (f"{scheme}://bucket/source.safetensors", f"{scheme}://bucket/made/model.safetensors")
        command = [sys.executable, "-m", "ckpttool", "convert", *words, *options, "--jobs", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
        statuses = []
        for kills in (("worker", 20 * 10**6), ("driver", 50 * 10**6)), ():
            with subprocess.Popen(command, env=environment, cwd=work) as driver:
                for victim, sent in kills:
                    while driver.poll() is None and programs.proxy.up < sent:
                        time.sleep(0.005)
                    workers = sharding.family(driver.pid)[1:]
                    os.kill(driver.pid if victim == "driver" else workers[-1], signal.SIGKILL)
                statuses.append(driver.wait(timeout=240))
        assert statuses == [-signal.SIGKILL, 0]
        sent, read = programs.proxy.up, programs.proxy.down
        stored = shards_of(listed(f"{scheme}://bucket/made"))
    local = {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}
    assert stored == shards_of(local)
    # Three processes were lost, each with a shard. S3 keeps the parts that it has, unless the shard was
    # complete and its record not yet written; Google keeps none.
    assert size < sent <= 1.05 * size + 3 * shard
    assert size < read <= 1.05 * size + 3 * shard
    assert os.listdir(work) == []
    assert sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file()) < 1 << 16


def count_parts(monkeypatch: pytest.MonkeyPatch, sent: list[tuple[str, int]], most: int) -> None:
    """Record the parts of shards that a store receives; break the connection after `most`."""
    from ckpttool.core import remote_uploads

    def watch(call: Any, location: str, name: str) -> Any:
        async def watched(*words: Any, **options: Any) -> Any:
            data = options.get("Body", options.get("data"))
            if data is not None and location.endswith(".safetensors"):
                if len(sent) >= most:
                    raise ConnectionResetError
                sent.append((location, zlib.crc32(data if isinstance(data, bytes) else data.getvalue())))
            return await call(*words, **options)

        return watched

    for kind, name in ((remote_uploads.S3Upload, "_call"), (remote_uploads.GSUpload, "_call")):
        original = ORIGINAL.setdefault(kind, kind._call)

        def call(self: Any, *words: Any, original: Any = original, name: str = name, **options: Any) -> Any:
            return watch(lambda *w, **o: original(self, *w, **o), self._target, name)(*words, **options)

        monkeypatch.setattr(kind, "_call", call)


ORIGINAL: dict[type, Any] = {}


def test_bytes_that_the_store_does_not_confirm_are_an_error(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.core import remote_uploads

    monkeypatch.setattr(remote_uploads, "_is_confirmed", lambda *_: False)
    monkeypatch.setattr(remote_uploads.GSUpload, "_call", another_answer(remote_uploads.GSUpload._call))
    with pytest.raises(ChangedError):
        convert(str(TORCH_SAMPLE), f"{store}/model.safetensors", shard_size="50KB")
    assert not any(name.endswith(("index.json", ".safetensors")) for name in listed(store))


def another_answer(call: Any) -> Any:
    """Return Google's answer with the checksum of other bytes."""

    async def changed(*words: Any, **options: Any) -> Any:
        headers, text = await call(*words, **options)
        return headers, re.sub(rb'"crc32c": ?"[^"]*"', b'"crc32c":"AAAAAA=="', bytes(text))

    return changed


def test_a_confirmation_is_compared_with_what_was_sent() -> None:
    from ckpttool.core.remote_uploads import SentPart, _is_confirmed, encode_crc

    data = b"some bytes"
    right = encode_crc(google_crc32c.value(data))
    md5 = hashlib.md5(data).hexdigest()
    assert _is_confirmed(SentPart(1, 10, "any", right), data, google_crc32c.value(data))
    assert _is_confirmed(SentPart(1, 10, f'"{md5}"', ""), data, google_crc32c.value(data))
    assert not _is_confirmed(SentPart(1, 10, f'"{md5}"', encode_crc(1)), data, google_crc32c.value(data))
    assert not _is_confirmed(SentPart(1, 10, '"0"', ""), data, google_crc32c.value(data))


def test_a_wrong_byte_in_a_shard_is_found(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.core.remote_uploads import UploadStream

    write = UploadStream.write

    def damaged(self: UploadStream, data: Any) -> int:
        changed = bytearray(data)
        if len(changed) > 5000 and self.name.endswith("-00002-of-00006.safetensors"):
            changed[17] ^= 1
        return write(self, changed)

    monkeypatch.setattr(UploadStream, "write", damaged)
    with pytest.raises(FormatError):
        convert(str(TORCH_SAMPLE), f"{store}/model.safetensors", shard_size="50KB")
    assert not any(name.endswith("index.json") for name in listed(store))


def test_different_outputs_leave_no_index(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.conversion import format_conversion

    def differ(*_: object) -> None:
        raise FormatError("the outputs differ")

    monkeypatch.setattr(format_conversion.TargetWriter, "_receipt", differ)
    with pytest.raises(FormatError):
        convert(str(TORCH_SAMPLE), f"{store}/model.safetensors", shard_size="50KB")
    assert not any(name.endswith(("index.json", "ckpttool.json")) for name in listed(store))


def test_nothing_in_a_store_is_replaced(store: str) -> None:
    target = f"{store}/model.safetensors"
    convert(str(TORCH_SAMPLE), target, shard_size="50KB")
    before = listed(store)
    with pytest.raises(TargetExistsError):
        convert(str(TORCH_SAMPLE), target, shard_size="50KB")
    with pytest.raises(UsageError):
        convert(str(TORCH_SAMPLE), target, shard_size="50KB", force=True)
    assert listed(store) == before


def test_another_conversion_is_not_continued(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = large(tmp_path), f"{store}/model.safetensors"
    count_parts(monkeypatch, [], most=1)
    with pytest.raises(CkpttoolError):
        convert(str(source), target, shard_size="8MB")
    count_parts(monkeypatch, [], most=100)
    with pytest.raises(UsageError):
        convert(str(source), target, shard_size="12MB")
    convert(str(source), target, shard_size="8MB")


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("https://example.com/model.safetensors", {"shard_size": "5GB"}),
        ("hf://user/name/model.safetensors", {"shard_size": "5GB"}),
        ("s3://bucket/agent.onnx", {}),
        ("s3://bucket/agent.pt", {"like": "tests.models:Net"}),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_request(target: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        convert(str(TORCH_SAMPLE), target, ConversionOptions(**options))


@pytest.mark.parametrize(
    ("name", "options"),
    [("model.safetensors", {}), ("agent.pt", {}), ("agent", {"to": "npz"}), ("1", {"to": "tf"})],
)
def test_another_target_than_one_file_is_named(store: str, name: str, options: dict[str, str]) -> None:
    words = [word for option in options.items() for word in (f"--{option[0]}", option[1])]
    with pytest.raises(UsageError) as error:
        convert(str(TORCH_SAMPLE), f"{store}/{name}", **options)
    verb, *rest = str(error.value.hint).split()
    command = [f"{store}/{name}", *words, *rest] if verb == "add" else rest
    ran = in_process("convert", str(TORCH_SAMPLE), *command)
    assert ran.status == 0, ran.err
    assert any(name.endswith((".index", ".index.json")) for name in listed(store))


def test_a_missing_bucket_is_one_sentence(store: str) -> None:
    ran = in_process(
        "convert", str(TORCH_SAMPLE), f"{store[:5]}nobucket/model.safetensors", "--shard-size", "50KB"
    )
    assert (ran.status, ran.out) == (2, "")
    assert "no such bucket" in ran.err


def test_checksums_of_joined_data() -> None:
    from ckpttool.core.remote_uploads import combine_crc32c

    random = np.random.default_rng(0)
    for one, other in ((0, 0), (0, 5), (7, 0), (1, 1), (1000, 70_001), (3, 1 << 20)):
        first, second = random.bytes(one), random.bytes(other)
        assert combine_crc32c(
            google_crc32c.value(first), google_crc32c.value(second), other
        ) == google_crc32c.value(first + second)


@pytest.mark.parametrize(
    ("scheme", "variable"), [("s3", "AWS_ENDPOINT_URL"), ("gs", "STORAGE_EMULATOR_HOST")]
)
def test_a_store_that_is_not_there_is_named_at_once(
    scheme: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries try again for up to half a minute; a conversion names the target, not its journal."""
    from ckpttool.core import remote_sites

    pytest.importorskip(STORES[scheme][1], reason=f"the extra `{scheme}` is not installed")
    monkeypatch.setattr(filesystem, "_MOUNTED", {})
    monkeypatch.setattr(remote_sites, "_STORES", {})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nothing listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for name, value in store_settings(scheme, url).items():
            monkeypatch.setenv(name, value)
        np.savez(tmp_path / "source.npz", w=np.ones(9, np.float32))
        location, start = f"{scheme}://bucket/model.safetensors", time.monotonic()
        for words in (
            ["inspect", location],
            ["convert", tmp_path / "source.npz", location, "--shard-size", "1KB"],
        ):
            ran = in_process(*words)
            assert ran.status == 2
            assert ran.err.startswith(f"ckpttool: {location}")
            assert f" {variable} " in ran.err
        assert time.monotonic() - start < 20
