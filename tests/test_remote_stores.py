"""Object stores: Google's buckets and the hub by servers of our own, and what commands make of any URL."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpttool
from ckpttool.core import (
    ChangedError,
    CkpttoolError,
    LimitError,
    Limits,
    NotFoundError,
    TruncatedError,
    filesystem,
    limits,
    urls,
)
from ckpttool.encodings import protobuf
from ckpttool.evaluation import training_logs
from ckpttool.listing import folder
from tests.conftest import SAMPLES, TF_SAMPLE, TORCH_SAMPLE, Terminal, in_process, refused
from tests.golden_texts import Golden
from tests.store_servers import Buckets, Hub, serving
from tests.web_server import Site, s3_settings, saved
from tests.web_server import serving as serving_pages

pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mount anew, and ask no proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(filesystem, "_MOUNTED", {})
    if importlib.util.find_spec("fsspec") is not None:
        from ckpttool.core import remote_sites

        monkeypatch.setattr(remote_sites, "_STORES", {})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
    state = Hub(page=4)
    state.commit("models/user/agent", SAMPLES)
    with serving(state):
        from huggingface_hub import constants

        template = f"{state.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield state


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Buckets]:
    pytest.importorskip("gcsfs", reason="the extra `gs` is not installed")
    state = Buckets(tmp_path)
    shutil.copytree(TF_SAMPLE.parent, tmp_path / "bucket" / "run" / "agent")
    with serving(state):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", state.url)
        yield state


def largest(checkpoint: ckpttool.Checkpoint):
    return max((leaf for _, leaf in checkpoint.tree.tensors()), key=lambda leaf: leaf.nbytes)


def sparse(file: Path, count: int = 80, number: int = 1 << 25) -> None:
    """Write a safetensors file of zeros that nobody has written."""
    header = {
        f"l{n}": {"dtype": "F32", "shape": [number], "data_offsets": [4 * number * n, 4 * number * (n + 1)]}
        for n in range(count)
    }
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + 4 * number * count)


# The hub


def test_the_hub_is_read_by_parts_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    expected = ckpttool.digest(str(TF_SAMPLE)).sha256
    for url in (
        "hf://user/agent@main/td3_pendulum_tf/ckpt-15000",
        f"hf://models/user/agent@{hub.repositories['models/user/agent'][0][0]}/td3_pendulum_tf",
    ):
        assert ckpttool.digest(url).sha256 == expected
    # What was listed is read, whatever is pushed meanwhile; the next look sees what is new.
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    data = saved(first, elements=400_000).read_bytes()
    (second / "model.safetensors").write_bytes(data[:-4] + b"\0\0\0\0")
    hub.commit("datasets/user/data", first)
    url = "hf://datasets/user/data/model.safetensors"
    checkpoint = ckpttool.open(url)
    hub.commit("datasets/user/data", second)
    assert bytes(largest(checkpoint).read()) == data[-1_600_000:]
    assert ckpttool.digest(url).sha256 == ckpttool.digest(str(second / "model.safetensors")).sha256


def test_ten_gigabytes_at_the_hub_are_listed_by_kilobytes(hub: Hub, tmp_path: Path) -> None:
    sparse(tmp_path / "big.safetensors")
    hub.commit("models/user/big", tmp_path)
    document = in_process("inspect", "hf://user/big/big.safetensors", "--json").json()
    assert document["totals"]["nbytes"] == 10_737_418_240
    assert hub.moved < 200_000, hub.moved
    assert len(hub.requests) < 16, hub.requests


def test_the_token_goes_to_the_hub_and_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_TOPSECRET")
    ran = in_process("inspect", "hf://user/agent/td3_pendulum_torch/ckpt-15000.pt", "--json")
    assert ran.status == 0, ran.err
    tokens = [
        h.get("authorization")
        for h, (_, at) in zip(hub.headers, hub.requests, strict=True)
        if "cdn" not in at
    ]
    assert set(tokens) == {"Bearer hf_TOPSECRET"}
    assert "SECRET" not in ran.out + ran.err


WRONG = (
    "hf://user/nothing/a.pt",
    "hf://user/agent@nowhere/a.pt",
    "hf://user/agent/td3_pendulum_torch/ckpt-1500.pt",
    "hf://buckets/user/agent/a.pt",
    "hf://user",
)


def test_what_is_wrong_at_the_hub_is_one_sentence(hub: Hub, golden: Golden) -> None:
    for url in WRONG:
        golden(refused(in_process("inspect", url)))
    url = "hf://user/agent/td3_pendulum_torch/ckpt-15000.pt"
    for odd in ("403", "cut"):
        hub.odd = odd
        golden(refused(in_process("inspect", url)))
    hub.odd = "whole"  # of what is small
    assert ckpttool.digest(url).sha256 == ckpttool.digest(str(TORCH_SAMPLE)).sha256


# Google's buckets


def test_a_bucket_is_read_by_parts_of_one_generation(buckets: Buckets, golden: Golden) -> None:
    expected = ckpttool.digest(str(TF_SAMPLE)).sha256
    for url in ("gs://bucket/run/agent/ckpt-15000", "gcs://bucket/run/agent/"):
        assert ckpttool.digest(url).sha256 == expected
    reads = [path for _, path in buckets.requests if "alt=media" in path]
    assert reads
    assert all("generation=1" in path for path in reads)
    saved(buckets.root / "bucket", elements=1_000_000)
    checkpoint = ckpttool.open("gs://bucket/model.safetensors")
    buckets.generation = "2"
    with pytest.raises(ChangedError) as caught:
        largest(checkpoint).read()
    golden(caught.value)
    with pytest.raises(ChangedError):
        checkpoint.files[0].require_unchanged()


def test_ten_gigabytes_in_a_bucket_are_listed_by_kilobytes(buckets: Buckets) -> None:
    sparse(buckets.root / "bucket" / "big.safetensors")
    document = in_process("inspect", "gs://bucket/big.safetensors", "--json").json()
    assert document["totals"]["nbytes"] == 10_737_418_240
    assert buckets.moved < 200_000, buckets.moved
    assert len(buckets.requests) < 16, buckets.requests


def test_what_is_wrong_in_a_bucket_is_one_sentence(buckets: Buckets, golden: Golden) -> None:
    golden(refused(in_process("inspect", "gs://nobucket/a.pt")))
    with pytest.raises(NotFoundError) as caught:
        ckpttool.open("gs://bucket/run/agent/ckpt-1500")
    golden(caught.value)
    assert "gs://bucket/run/agent/ckpt-15000" in str(caught.value.hint)
    buckets.odd = "403"
    golden(refused(in_process("inspect", "gs://bucket/run/agent/ckpt-15000")))


# S3, and what is the same for all


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
    with serving_pages(tmp_path) as site:
        for name, value in s3_settings(site.url).items():
            monkeypatch.setenv(name, value)
        shutil.copytree(TF_SAMPLE.parent, tmp_path / "bucket" / "run" / "agent")
        yield site


def test_an_answer_that_breaks_off_is_one_sentence(
    bucket: Site, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    from s3fs import core

    monkeypatch.setattr(core.S3FileSystem, "retries", 1)
    saved(bucket.root / "bucket")
    bucket.odd["/bucket/model.safetensors"] = "short"
    with pytest.raises(TruncatedError) as caught:
        ckpttool.open("s3://bucket/model.safetensors")
    golden(caught.value)


def test_a_store_without_versions_is_looked_up_after_each_read(bucket: Site) -> None:
    file = saved(bucket.root / "bucket", elements=1_000_000)
    bucket.odd["/bucket/model.safetensors"] = "untagged"
    checkpoint = ckpttool.open("s3://bucket/model.safetensors")
    bucket.begin()
    assert bytes(largest(checkpoint).read()) == file.read_bytes()[-4_000_000:]
    assert [verb for verb, _ in bucket.requests][-1] == "HEAD"
    assert not any("if-match" in headers for headers in bucket.headers)
    with file.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ChangedError):
        largest(checkpoint).read()


def test_a_bucket_that_may_not_be_listed_is_read(bucket: Site, golden: Golden) -> None:
    bucket.odd["list"] = "403"
    assert ckpttool.open("s3://bucket/run/agent/ckpt-15000").format == "tensor_bundle"
    golden(refused(in_process("inspect", "s3://bucket/run/agent")))


def test_a_folder_is_listed_up_to_a_limit_and_a_file_in_it_is_found(bucket: Site, golden: Golden) -> None:
    with limits.using(Limits(folder_files=5)):
        assert ckpttool.open("s3://bucket/run/agent/ckpt-15000").format == "tensor_bundle"
        with pytest.raises(LimitError) as caught:
            folder.list_checkpoints("s3://bucket/run/agent")
        golden(caught.value)
    assert "folder_files" in str(caught.value.hint)


def test_a_folder_of_checkpoints_asks_for_each_file_once(bucket: Site) -> None:
    bucket.begin()
    document = in_process("inspect", "s3://bucket/run/agent", "--json").json()
    assert [row["step"] for row in document["checkpoints"]] == [2500, 5000, 7500, 10000, 12500, 15000]
    heads = [path for verb, path in bucket.requests if verb == "HEAD"]
    assert max(map(heads.count, heads)) <= 2  # s3fs asks again when it opens a file
    assert len(bucket.requests) < 70


# Commands


@pytest.fixture(scope="module")
def samples() -> Iterator[Site]:
    with serving_pages(SAMPLES) as site:
        yield site


def test_eval_takes_patterns_folders_and_members_and_shows_them_as_they_are_typed(
    bucket: Site, tmp_path: Path, golden: Golden
) -> None:
    shutil.make_archive(str(tmp_path / "bucket" / "a"), "zip", SAMPLES)
    play = ("eval", "--env", "Pendulum-v1", "--episodes", "1")
    names = ("ckpt-10000", "ckpt-15000")
    for url in ("s3://bucket/run/agent/{}", "zip://td3_pendulum_tf/{}::s3://bucket/a.zip"):
        table = tmp_path / f"{url[:3]}.csv"
        ran = in_process(*play, url.format("ckpt-1[05]*"), "--csv", table, "--json")
        assert ran.status == 0, ran.err
        assert "::zip" not in ran.out + table.read_text()
        document = ran.json()
        for name in names:
            assert url.format(name) + "," in table.read_text()
        assert [run["checkpoint"] for run in document["evaluations"]] == [url.format(name) for name in names]
        assert document["best"]["checkpoint"] in [url.format(name) for name in names]
    ran = in_process(*play, "zip://td3_pendulum_tf/ckpt-15000::s3://bucket/a.zip")
    assert ran.out.startswith("zip://td3_pendulum_tf/ckpt-15000::s3://bucket/a.zip ")
    process = in_process(*play, "zip://td3_pendulum_tf/ckpt-1[05]*::s3://bucket/a.zip", kind=Terminal)
    assert "ckpttool eval 'zip://td3_pendulum_tf/ckpt-1[05]*::s3://bucket/a.zip'" in process.out
    assert "::zip" not in process.out
    golden(refused(in_process(*play, "s3://bucket/run/agent/x-*")))
    golden(refused(in_process(*play, "s3://bucket/*/agent/ckpt-15000")))


def test_training_curves_beside_a_run_elsewhere_are_found(bucket: Site, tmp_path: Path) -> None:
    run = tmp_path / "bucket" / "run"
    (run / "logs").mkdir()
    records = [protobuf.event_file_header(1.0), protobuf.summary_record(1.0, 5, {"eval/mean_reward": -3.0})]
    (run / "logs" / f"{protobuf.NAME}.1.host").write_bytes(b"".join(records))
    location = filesystem.resolve_path("s3://bucket/run")
    (curve,) = training_logs.find_training_logs(
        [f"{location}/agent/ckpt-15000", f"{location}/agent/ckpt-12500"]
    ).curves
    assert curve.values.tolist() == [-3.0]
    assert curve.document()["files"] == [f"s3://bucket/run/logs/{protobuf.NAME}.1.host"]
    # Above what was named nothing is asked for.
    bucket.begin()
    filesystem._MOUNTED.clear()
    assert (
        training_logs.find_training_logs([filesystem.resolve_path("s3://bucket/run/agent/ckpt-15000")]).curves
        == ()
    )
    assert not [path for _, path in bucket.requests if "logs" in path]


def test_a_report_is_named_after_what_was_asked_and_written_here(
    samples: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.make_archive(str(tmp_path / "a"), "zip", SAMPLES / "td3_pendulum_torch")
    url = samples.url + "/td3_pendulum_torch/ckpt-15000.pt?sig=SECRET"
    assert in_process("report", url).status == 0
    assert in_process("report", "zip://ckpt-2500.pt::a.zip", url, "--glob", "actor/**").status == 0
    assert sorted(path.name for path in tmp_path.glob("*.html")) == [
        "ckpt-15000.pt.report.html",
        "ckpt-2500.pt-ckpt-15000.pt.report.html",
    ]
    for page in tmp_path.glob("*.html"):
        assert "SECRET" not in page.read_text()
    assert "<title>ckpt-2500.pt" in (tmp_path / "ckpt-2500.pt-ckpt-15000.pt.report.html").read_text()
    assert urls.base_name("zip://::s3://bucket/a.zip") == "a.zip"


def test_what_is_browsed_may_lie_elsewhere(samples: Site, tmp_path: Path) -> None:
    pytest.importorskip("textual", reason="the extra `browse` is not installed")
    from tests.test_browse import Played, play

    shutil.make_archive(str(tmp_path / "a"), "zip", SAMPLES)

    async def stated(played: Played) -> None:
        assert "ckpt-15000" in played.lines()[0]
        assert "zip:" not in played.lines()[0]
        played.to("policy/actor/l1/bias")
        await played.settled()
        assert any("float32" in line for line in played.lines())

    for url in (
        f"{samples.url}/td3_pendulum_tf/ckpt-15000",
        f"zip://td3_pendulum_tf/ckpt-15000::{tmp_path}/a.zip",
    ):
        play(stated, url)


def test_a_store_that_fails_is_asked_once(bucket: Site) -> None:
    bucket.odd["*"] = "418"
    with pytest.raises((NotFoundError, CkpttoolError)) as caught:
        ckpttool.open("s3://bucket/run/agent/ckpt-15000")
    assert caught.value.file == "s3://bucket/run/agent/ckpt-15000"
    assert len(bucket.requests) <= 6, bucket.requests
