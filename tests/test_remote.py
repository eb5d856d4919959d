"""URLs: the same checkpoint wherever it lies, few bytes for a listing, and servers that are no friends."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core import (
    ChangedError,
    CkpttoolError,
    File,
    FormatError,
    LimitError,
    Limits,
    MissingExtraError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    filesystem,
    limits,
    urls,
)
from tests.conftest import SAMPLES, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.web_server import Site, s3_settings, saved, serving

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")

BUNDLES = [str(path)[: -len(".index")] for path in sorted(SAMPLES.rglob("*.index"))]
ARCHIVES = [str(path) for path in sorted(SAMPLES.rglob("*.pt"))]


@pytest.fixture(scope="module")
def samples() -> Iterator[Site]:
    with serving(SAMPLES) as site:
        yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def below(path: str | Path) -> str:
    return "/" + str(Path(path).relative_to(SAMPLES))


# The same checkpoint


@pytest.mark.parametrize("path", [*BUNDLES, *ARCHIVES], ids=lambda path: below(path))
def test_every_sample_read_by_url_is_the_same(path: str, samples: Site) -> None:
    here, there = ckpttool.digest(path), ckpttool.digest(samples.url + below(path))
    assert there.sha256 == here.sha256
    assert there.checksums == here.checksums == "verified"
    assert there.path == samples.url + below(path)


def test_a_folder_its_state_file_and_a_shard_stand_for_the_same(samples: Site) -> None:
    samples.odd["/td3_pendulum_tf/"] = "page"
    here = [entry.path for entry in ckpttool.open(str(TF_SAMPLE)).files]
    for end in ("/", "/checkpoint", "/ckpt-15000.index", "/ckpt-15000.data-00000-of-00001"):
        checkpoint = ckpttool.open(f"{samples.url}/td3_pendulum_tf{end}")
        assert [Path(file.path).name for file in checkpoint.files] == [Path(path).name for path in here], end


def test_memory_and_archives_in_archives_are_the_same(samples: Site, tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    names = [f"{TF_SAMPLE.name}{end}" for end in (".index", ".data-00000-of-00001")]
    inner, middle = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name in names:
            archive.write(TF_SAMPLE.parent / name, f"run/{name}", zipfile.ZIP_DEFLATED)
            memory.pipe(f"/agents/{name}", (TF_SAMPLE.parent / name).read_bytes())
    with tarfile.open(fileobj=middle, mode="w:gz") as archive:
        member = tarfile.TarInfo("./x/inner.zip")
        member.size = len(inner.getvalue())
        archive.addfile(member, io.BytesIO(inner.getvalue()))
    memory.pipe("/agents/outer.tar.gz", middle.getvalue())
    expected = ckpttool.digest(str(TF_SAMPLE)).sha256
    for url in (
        "memory://agents/ckpt-15000",
        "zip://run/ckpt-15000::tar://x/inner.zip::memory://agents/outer.tar.gz",
        "zip://run::tar://x/inner.zip::memory://agents/outer.tar.gz",
    ):
        result = ckpttool.digest(url)
        assert result.sha256 == expected
        assert result.path in (url, url.replace("run::", "run/ckpt-15000::"))


@pytest.mark.parametrize("name", ["a.zip", "deflated.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
@pytest.mark.parametrize("where", ["local", "url"])
def test_members_of_archives_are_the_same(name: str, where: str, site: Site) -> None:
    path = site.root / name
    member = "runs/one/agent.pt"
    if name.endswith("zip"):
        kind = "zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.mkdir("runs/one")
            how = zipfile.ZIP_STORED if name == "a.zip" else zipfile.ZIP_DEFLATED
            archive.write(TORCH_SAMPLE, member, how)
    else:
        kind = "tar"
        with tarfile.open(path, f"w:{name.partition('.tar')[2].lstrip('.')}") as archive:
            archive.add(SAMPLES / "td3_pendulum_torch", "runs/none", recursive=False)
            archive.add(TORCH_SAMPLE, member)
    url = f"{kind}://{member}::{path if where == 'local' else f'{site.url}/{name}'}"
    packed = where == "url" and name.startswith("a.tar.")
    assert bool(ckpttool.open(url).notes) == packed  # else parts of it were read
    result = ckpttool.digest(url)
    assert result.sha256 == ckpttool.digest(str(TORCH_SAMPLE)).sha256
    assert result.path == url
    if packed:
        ranges = [headers.get("range", "") for headers in site.headers]
        assert len([item for item in ranges if item.startswith("bytes=65536-")]) == 1, "it was fetched twice"


def test_an_hdf5_file_is_fetched_once_and_said_to_be(site: Site, golden: Golden) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(site.root / "m.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.arange(60_000, dtype="f4").reshape(200, 300)
        file["layers/dense/vars/1"] = np.ones(300, "f4")
    here = ckpttool.digest(str(site.root / "m.weights.h5")).sha256
    url = f"{site.url}/m.weights.h5"
    checkpoint = ckpttool.open(url)
    golden.replace(site.url, "SITE")
    golden("\n".join(checkpoint.notes))
    before = site.moved
    assert np.array_equal(
        np.frombuffer(
            max((leaf for _, leaf in checkpoint.tree.tensors()), key=lambda e: e.nbytes).read(), "<f4"
        ),
        np.arange(60_000, dtype="f4"),
    )
    assert site.moved == before, "what is here is fetched again"
    assert ckpttool.digest(url).sha256 == here
    site.version = "2"
    with limits.using(Limits(fetched_bytes=100_000)), pytest.raises(LimitError) as caught:
        ckpttool.open(url)
    golden(caught.value)


# Few bytes


def test_ten_gigabytes_of_safetensors_are_listed_by_kilobytes(site: Site) -> None:
    count, width = 80, 1 << 25
    header = {
        f"layers.{n}.weight": {
            "dtype": "F32",
            "shape": [width],
            "data_offsets": [4 * width * n, 4 * width * (n + 1)],
        }
        for n in range(count)
    }
    text = json.dumps(header).encode()
    with (site.root / "big.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + 4 * width * count)
    document = in_process("inspect", f"{site.url}/big.safetensors", "--json").json()
    assert document["totals"]["nbytes"] == 10_737_418_240
    assert site.moved < 200_000, site.moved
    assert len(site.requests) < 10, site.requests


@pytest.mark.torch
def test_ten_gigabytes_of_torch_are_listed_by_kilobytes(site: Site) -> None:
    torch = pytest.importorskip("torch")
    with torch.serialization.skip_data():  # memory that nobody touches, holes instead of bytes
        torch.save({f"l{n}.weight": torch.empty(1 << 25) for n in range(80)}, site.root / "big.pt")
    summary = ckpttool.summary(f"{site.url}/big.pt")
    assert summary.totals.nbytes == 10_737_418_240
    assert site.moved < 1_000_000, site.moved


def test_a_listing_asks_for_the_beginning_the_index_and_no_more(samples: Site) -> None:
    samples.begin()
    ckpttool.open(samples.url + below(TORCH_SAMPLE))
    ranges = [headers.get("range") for headers in samples.headers]
    assert ranges[0] == "bytes=0-65535"
    assert len(ranges) <= 5
    assert {headers.get("accept-encoding") for headers in samples.headers} == {"identity"}
    samples.begin()
    ckpttool.open(samples.url + below(TF_SAMPLE))
    assert samples.moved < 200_000
    assert len(samples.requests) <= 6


def test_a_large_tensor_is_one_request(site: Site) -> None:
    file = saved(site.root, elements=2_000_000)
    checkpoint = ckpttool.open(f"{site.url}/{file.name}")
    ((_, leaf),) = checkpoint.tree.tensors()
    site.begin()
    assert bytes(leaf.read()) == file.read_bytes()[-8_000_000:]
    assert len(site.requests) == 1
    assert site.moved == 8_000_000


@given(st.lists(st.tuples(st.integers(0, 199_999), st.integers(1, 90_000)), min_size=1, max_size=8))
def test_blocks_give_what_the_file_holds(reads: list[tuple[int, int]]) -> None:
    from ckpttool.core import BlockCache

    data = np.random.default_rng(1).bytes(200_000)
    stat = filesystem.FileStat(len(data), 0, 0)
    requests: list[tuple[int, int]] = []

    def fetch(_: str, __: filesystem.FileStat, offset: int, length: int) -> bytes:
        assert 0 < length <= len(data) - offset
        requests.append((offset, length))
        return data[offset : offset + length]

    blocks = BlockCache(fetch)
    for offset, length in reads:
        length = min(length, len(data) - offset)
        assert blocks.read("x", stat, offset, length) == data[offset : offset + length]
        fetched = len(requests)
        assert blocks.read("x", stat, offset, length) == data[offset : offset + length]
        assert len(requests) == fetched, "the same bytes were fetched again"


def test_small_reads_one_after_the_other_are_few_requests(site: Site) -> None:
    (site.root / "x").write_bytes(bytes(4 << 20))
    file = File.stamp(filesystem.resolve_path(f"{site.url}/x"))
    site.begin()
    for at in range(0, 4 << 20, 1000):
        file.read(at, min(1000, (4 << 20) - at))
    assert len(site.requests) <= 10
    assert site.moved <= 4 << 20


# Servers that are no friends


def test_a_server_without_ranges_is_fetched_once_up_to_a_limit(site: Site, golden: Golden) -> None:
    file = saved(site.root)
    site.odd["/" + file.name] = "whole"
    url = f"{site.url}/{file.name}"
    assert ckpttool.digest(url).sha256 == ckpttool.digest(str(file)).sha256
    assert not ckpttool.open(url).notes, "the header is at the beginning"
    shutil.copy(TORCH_SAMPLE, site.root / "a.pt")
    site.odd["/a.pt"] = "whole"
    checkpoint = ckpttool.open(f"{site.url}/a.pt")
    golden.replace(site.url, "SITE")
    golden("\n".join(checkpoint.notes))
    site.version = "2"
    golden(refused(in_process("--limit", "fetched_bytes=100K", "inspect", f"{site.url}/a.pt")))


def test_a_file_that_changes_between_listing_and_reading_is_an_error(site: Site, golden: Golden) -> None:
    file = saved(site.root, elements=1_000_000)
    checkpoint = ckpttool.open(f"{site.url}/{file.name}")
    ((_, leaf),) = checkpoint.tree.tensors()
    checkpoint.files[0].require_unchanged()
    site.version = "2"
    with pytest.raises(ChangedError) as caught:
        leaf.read()
    golden.replace(site.url, "SITE")
    golden(caught.value)
    with pytest.raises(ChangedError):
        checkpoint.files[0].require_unchanged()
    file.unlink()
    with pytest.raises(ChangedError) as caught:
        leaf.read()
    golden(caught.value)


LIES = {
    "larger": ChangedError,
    "shifted": UnsupportedError,
    "untold": UnsupportedError,
    "packed": UnsupportedError,
    "more": UnsupportedError,
    "short": TruncatedError,
    "401": NotFoundError,
    "403": NotFoundError,
    "404": NotFoundError,
    "418": NotFoundError,
    "503": NotFoundError,
    "to file:///etc/passwd": NotFoundError,
    "to ftp://127.0.0.1/x": NotFoundError,
    "to /model.safetensors": NotFoundError,
}


@pytest.mark.parametrize("odd", LIES)
def test_what_a_server_does_wrong_is_one_sentence(
    odd: str, site: Site, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    from ckpttool.core import remote_sites

    monkeypatch.setattr(remote_sites, "_PAUSES", (0.0, 0.0))
    file = saved(site.root)
    url = f"{site.url}/{file.name}"
    site.odd["/" + file.name] = odd
    with pytest.raises(LIES[odd]) as caught:
        _read_all(url)
    golden.replace(site.url, "SITE")
    golden(caught.value)
    assert caught.value.file == url
    site.odd.clear()
    checkpoint = ckpttool.open(url)
    site.odd["/" + file.name] = odd
    ((_, leaf),) = checkpoint.tree.tensors()
    with pytest.raises(CkpttoolError):
        leaf.read()


def _read_all(url: str) -> None:
    for _, leaf in ckpttool.open(url).tree.tensors():
        leaf.read()


def test_hosts_that_do_not_answer(golden: Golden) -> None:
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open("http://127.0.0.1:1/x.pt")
    golden(caught.value)
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open("http://nobody.invalid/x.pt")
    golden(caught.value)


def test_a_user_and_a_signature_are_sent_and_never_shown(site: Site, tmp_path: Path) -> None:
    file = saved(site.root)
    secret = site.url.replace("//", "//anna:pass@") + f"/{file.name}?sig=SECRET"
    for arguments in (["inspect"], ["digest"], ["doctor"], ["stats"]):
        ran = in_process(*arguments, secret, "--json")
        assert "SECRET" not in ran.out + ran.err
        assert "pass" not in ran.out.replace("passed", "") + ran.err
        assert f"{site.url}/{file.name}" in ran.out
    assert any(path.endswith("?sig=SECRET") for _, path in site.requests)
    assert any("authorization" in headers for headers in site.headers)
    assert in_process("convert", secret, tmp_path / "out.npz").status == 0
    assert b"SECRET" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    text = refused(in_process("inspect", secret.replace("model", "no\x1b[31mne\u202e")))
    assert "SECRET" not in text
    assert "\x1b" not in text
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open("https://anna:pass@127.0.0.1:1/x?sig=SECRET#f")
    assert "SECRET" not in str(caught.value) + repr(caught.value)
    assert caught.value.file == "https://127.0.0.1:1/x"


def test_two_urls_of_one_folder_keep_their_own_signatures(site: Site) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        saved(site.root, name)
    assert ckpttool.diff(f"{site.url}/a.safetensors?sig=1", f"{site.url}/b.safetensors?sig=2").identical
    requests = {path for _, path in site.requests if "ckpttool.json" not in path and "safetensors" in path}
    assert requests == {"/a.safetensors?sig=1", "/b.safetensors?sig=2"}


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:{port}/evil.safetensors", "../evil.safetensors", "%2e%2e/evil.safetensors"]
)
def test_a_name_that_a_file_tells_leads_nowhere_else(name: str, site: Site) -> None:
    """Neither to a URL, from a local folder too, nor out of the checkpoint's folder."""
    folder = site.root / "deep"
    folder.mkdir()
    saved(site.root, "evil.safetensors")
    name = name.format(port=site.url.rpartition(":")[2])
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for path in ("model.safetensors.index.json", f"{site.url}/deep/model.safetensors.index.json"):
            site.begin()
            with pytest.raises(CkpttoolError):
                _read_all(path)
            assert not any("evil" in path for _, path in site.requests)


@pytest.mark.parametrize("name", ["run-2/x.safetensors", "x.safetensors", "run/../x.safetensors"])
def test_a_file_beside_another_is_in_its_folder(name: str, site: Site) -> None:
    for folder in (site.root, site.root / "run", site.root / "run-2"):
        folder.mkdir(exist_ok=True)
        saved(folder, "x.safetensors")
    owner = f"{site.url}/run/index.json"
    inside, outside = (filesystem.resolve_path(f"{site.url}/{path}") for path in ("run/x.safetensors", name))
    assert File.beside(inside, owner).size
    with pytest.raises(UnsupportedError):
        File.beside(outside, owner)


def test_a_local_path_that_looks_like_a_url_is_not_asked(site: Site, tmp_path: Path) -> None:
    assert filesystem.find_store(f"{site.url}/x") is None  # nobody has named it
    assert not filesystem.isfile("s3://bucket/key")
    odd = tmp_path / "http:" / "host"
    odd.mkdir(parents=True)
    shutil.copy(TORCH_SAMPLE, odd / "a.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert ckpttool.open("./http://host/a.pt").format == "pytorch"


def test_a_file_outside_of_the_owners_folder_is_not_read(site: Site, golden: Golden) -> None:
    saved(site.root)
    owner = filesystem.resolve_path(f"{site.url}/in/index.json")
    for path in (f"{site.url}/model.safetensors", f"{site.url}/in/../model.safetensors"):
        filesystem.resolve_path(path)
        with pytest.raises(UnsupportedError) as caught:
            File.beside(path, owner)
        golden.replace(site.url, "SITE")
        golden(caught.value)


# Archives that are no friends


def test_hostile_archives_are_one_sentence(tmp_path: Path, golden: Golden) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("../out.pt", b"x"), ("/etc/out.pt", b"x"), ("same", b"1"), ("./same", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with pytest.raises(FormatError) as caught:
        ckpttool.open(f"tar://same::{tmp_path}/a.tar")
    golden(caught.value)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        link = tarfile.TarInfo("link.pt")
        link.type, link.linkname = tarfile.SYMTYPE, str(TORCH_SAMPLE)
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("../out.pt"))
    for name in ("link.pt", "../out.pt", "out.pt"):
        with pytest.raises(NotFoundError):
            ckpttool.open(f"tar://{name}::{tmp_path}/b.tar")
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz", compresslevel=9) as archive:
        member = tarfile.TarInfo("zeros")
        member.size = 3 << 20
        archive.addfile(member, io.BytesIO(bytes(3 << 20)))
    with limits.using(Limits(fetched_bytes=1 << 20)), pytest.raises(LimitError) as caught:
        ckpttool.open(f"tar://zeros::{tmp_path}/bomb.tar.gz")
    golden(caught.value)
    for name in ("a.tar.gz", "a.tar"):
        (tmp_path / f"cut.{name}").write_bytes(
            (tmp_path / ("bomb.tar.gz" if "gz" in name else "a.tar")).read_bytes()[:700]
        )
        with pytest.raises(FormatError, match="damaged"):
            ckpttool.open(f"tar://zeros::{tmp_path}/cut.{name}")
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open(f"zip://x::{tmp_path}/absent.zip")
    golden(caught.value)
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open(f"zip://x::{tmp_path}/pipe.zip")
    golden(caught.value)


def test_an_archive_by_itself_says_how_its_members_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(TORCH_SAMPLE, "a.pt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(TORCH_SAMPLE, "a.pt")
    for kind, name in (("tar", "a.tar.gz"), ("zip", "a.zip")):
        ran = in_process("inspect", tmp_path / name)
        *_, command = ran.err.strip().rpartition(": ")
        assert shlex.split(command) == ["ckpttool", "inspect", f"{kind}://::{tmp_path / name}"]
        assert in_process(*shlex.split(command)[1:]).status == 0
        with pytest.raises(CkpttoolError) as caught:
            ckpttool.open(str(tmp_path / name))
        assert str(caught.value.hint).endswith(f"ckpttool.summary('{kind}://::{tmp_path / name}')")


def test_an_archive_that_changes_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(saved(tmp_path), "m.safetensors")
    checkpoint = ckpttool.open(f"zip://m.safetensors::{tmp_path}/a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        archive.writestr("more", b"1")
    ((_, leaf),) = checkpoint.tree.tensors()
    with pytest.raises(ChangedError):
        leaf.read()


# S3


@pytest.fixture
def bucket(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
    from ckpttool.core import remote_sites

    monkeypatch.setattr(remote_sites, "_STORES", {})
    monkeypatch.setattr(filesystem, "_MOUNTED", {})
    for name, value in s3_settings(site.url).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(TF_SAMPLE.parent, site.root / "bucket" / "run" / "agent")
    return site


def test_s3_is_read_by_ranges_of_one_version(bucket: Site, golden: Golden) -> None:
    expected = ckpttool.digest(str(TF_SAMPLE)).sha256
    for url in ("s3://bucket/run/agent/ckpt-15000", "s3://bucket/run/agent", "s3://bucket/run/agent/"):
        assert ckpttool.digest(url).sha256 == expected
    reads = [
        h
        for h, (verb, _) in zip(bucket.headers, bucket.requests, strict=True)
        if "range" in h and verb == "GET"
    ]
    assert reads
    assert all("if-match" in headers for headers in reads)
    checkpoint = ckpttool.open("s3://bucket/run/agent/ckpt-15000")
    leaf = max((leaf for _, leaf in checkpoint.tree.tensors()), key=lambda entry: entry.nbytes)
    bucket.version = "2"
    file = next(file for file in checkpoint.files if ".data-" in file.path)
    filesystem.find_store(file.path).blocks._kept.clear()  # type: ignore[union-attr]  # as if it had never been read
    with pytest.raises(ChangedError):
        leaf.read()
    listed = in_process("inspect", "s3://bucket/run/agent", "--json").json()["checkpoints"]
    assert [row["step"] for row in listed] == [2500, 5000, 7500, 10000, 12500, 15000]
    golden(refused(in_process("inspect", "s3://bucket/run/agent/ckpt-1500")))
    golden(refused(in_process("inspect", "s3://nobucket/x")))
    bucket.odd["*"] = "403"
    golden(refused(in_process("inspect", "s3://bucket/run/agent/ckpt-15000")))


def test_a_public_bucket_needs_no_key(bucket: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert ckpttool.open("s3://bucket/run/agent/ckpt-15000").format == "tensor_bundle"
    assert not any("authorization" in headers for headers in bucket.headers)


# What is said


WRONG = {
    "zip://x": UsageError,
    "ftp://host/x": UsageError,
    "htps://host/x": UsageError,
    "s3://": UsageError,
    "tar://a::zip://b": UsageError,
    "http://[::1/x.pt": NotFoundError,
    "http://host:abc/x.pt": NotFoundError,
    "file:///nobody/x.pt": NotFoundError,
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_one_sentence(url: str, golden: Golden) -> None:
    with pytest.raises(WRONG[url]) as caught:
        ckpttool.open(url)
    golden(caught.value)
    refused(in_process("inspect", url))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for scheme, extra in {"https": "remote", "s3": "s3", "gs": "gs", "hf": "hf"}.items():
        with pytest.raises(MissingExtraError) as caught:
            ckpttool.open(f"{scheme}://unmounted/repo/file.pt")
        golden(caught.value)
        assert caught.value.hint == f"pip install 'ckpttool[{extra}]'"


def test_a_web_server_is_read_without_the_libraries_of_stores(samples: Site) -> None:
    program = (
        "import sys, ckpttool; ckpttool.open(sys.argv[1]); "
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", program, samples.url + below(TORCH_SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "aiohttp" in loaded
    assert not loaded & {"s3fs", "aiobotocore", "botocore", "gcsfs", "huggingface_hub"}


def test_every_command_that_reads_takes_a_url_and_none_writes_to_one(
    samples: Site, tmp_path: Path, golden: Golden
) -> None:
    tf, torch = samples.url + below(TF_SAMPLE), samples.url + below(TORCH_SAMPLE)
    assert in_process("diff", tf, str(TF_SAMPLE)).status == 0
    assert in_process("stats", torch, "--quiet").status == 0
    here, there = (in_process("doctor", path, "--json") for path in (str(TORCH_SAMPLE), torch))
    assert [f["kind"] for f in there.json()["findings"]] == [f["kind"] for f in here.json()["findings"]]
    assert in_process("convert", tf, tmp_path / "agent.pt", "--quiet").status == 0
    assert in_process("diff", tmp_path / "agent.pt", str(TF_SAMPLE)).status == 0
    for target in ("https://host/a.pt", "s3://bucket/a.pt"):
        golden(refused(in_process("convert", str(TF_SAMPLE), target)))


@given(
    st.lists(st.sampled_from(["zip://a/b", "tar://c.zip", "zip://d.tar"]), max_size=3),
    st.sampled_from(["/x/y.zip", "rel.tar", "s3://bucket/k", "https://host/p.zip"]),
)
def test_a_chain_is_spelled_as_it_was_typed(inner: list[str], outermost: str) -> None:
    typed = "::".join([*inner, outermost])
    turned = urls.normalize_chain(typed)
    assert turned is not None
    assert urls.display_url(turned) == typed
    assert urls.display_url(typed) == typed
    assert urls.split_chain(turned) == [outermost, *reversed(inner)]


@given(st.text(max_size=40), st.text(st.characters(exclude_characters="/?#@"), max_size=10))
def test_no_secret_is_spelled(query: str, user: str) -> None:
    shown = urls.display_url(f"https://{user}:TOPSECRET@host/path?{query}TOPSECRET")
    assert "TOPSECRET" not in shown
    assert (
        urls.display_url(f"zip://m::https://{user}:TOPSECRET@host/p?{query}TOPSECRET")
        == "zip://m::https://host/p"
    )
