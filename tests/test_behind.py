"""Work behind the caller: in order, nothing lost, errors where they belong, and no thread left over."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.write import save
from ckpttool.core import (
    ChecksumError,
    File,
    Inline,
    Leaf,
    Tree,
    UsageError,
    WorkerThread,
    atomic_write,
    create_file,
    key,
)
from ckpttool.core.source import LARGE
from ckpttool.formats import open_checkpoint
from tests.conftest import ROOT
from tests.trees import leaf, tensorflow_tree

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_thread_outlives_its_work() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpttool-lane"]


# --- Lanes -------------------------------------------------------------------------------------------


def test_jobs_are_done_in_order_on_another_thread() -> None:
    done: list[tuple[int, int]] = []
    with WorkerThread() as lane:
        for number in range(100):
            lane.do(lambda number=number: done.append((number, threading.get_ident())))
        lane.wait()
        assert lane.idle
    assert [number for number, _ in done] == list(range(100))
    assert {thread for _, thread in done} != {threading.get_ident()}


def test_an_error_is_raised_where_the_lane_is_used_next() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ChecksumError("damaged", file="x", path="y")

    def used(use: Callable[[WorkerThread], object]) -> None:
        with WorkerThread() as lane:
            lane.do(fail)
            while not lane.idle:
                pass
            use(lane)

    for use in (lambda lane: lane.do(lambda: done.append("after")), lambda lane: lane.wait(), lambda _: None):
        with pytest.raises(ChecksumError) as caught:
            used(use)
        assert (caught.value.file, caught.value.path) == ("x", "y")
    assert not done


def test_an_error_of_the_caller_leaves_undone_what_waits() -> None:
    started, go, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        started.set()
        go.wait(10)
        done.append("first")

    def interrupted(lane: WorkerThread) -> None:
        lane.do(slow)
        lane.do(lambda: done.append("second"))
        started.wait(10)
        threading.Timer(0.05, go.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WorkerThread() as lane:
        interrupted(lane)
    assert done == ["first"]


def test_what_is_dropped_is_not_done() -> None:
    go, done = threading.Event(), []
    with WorkerThread() as lane:
        lane.do(lambda: go.wait(10))
        lane.do(lambda: done.append("second"))
        lane.drop()
        go.set()
    assert not done


def test_the_caller_waits_while_too_much_is_before_the_lane() -> None:
    go = threading.Event()
    with WorkerThread(backlog=10) as lane:
        lane.do(lambda: go.wait(10), 11)
        threading.Timer(0.1, go.set).start()
        assert not go.is_set()
        lane.do(lambda: None, 1)
        assert go.is_set()


# --- Files -------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0, 1, 100, 65_535, 65_536, 70_000, MIB + 1]), max_size=12), st.integers(0, 255)
)
def test_a_file_has_all_that_was_written_in_order(tmp_path: Path, sizes: list[int], first: int) -> None:
    target, written = tmp_path / "x", io.BytesIO()
    with WorkerThread() as disk, create_file(str(target), disk) as stream:
        for number, size in enumerate(sizes):
            data = bytes([(first + number) % 256]) * size
            stream.write((data, bytearray(data), memoryview(data))[number % 3])
            written.write(data)
            if number == 5:
                stream.flush()
                assert target.read_bytes() == written.getvalue()
    assert target.read_bytes() == written.getvalue()
    target.unlink()


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError), create_file(str(tmp_path / "x")) as stream:
        stream.write(b"other")
    assert (tmp_path / "x").read_text() == "mine"


# --- Conversions -------------------------------------------------------------------------------------


def matrices(folder: Path, count: int = 24) -> Path:
    """Write kernels of 1 MiB and one above the size that is read in pieces."""
    generator = np.random.default_rng(0)
    shapes = [(512, 512)] * count + [(1024, LARGE // 4096 + 1)]
    arrays = {f"l{n}/kernel": generator.random(s, dtype=np.float32) for n, s in enumerate(shapes)}
    save(tensorflow_tree(arrays), str(folder / "source"), "tf1")
    return folder / "source"


def full_after(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    class Disk(atomic_write.FileIO):
        room = nbytes

        def write(self, data: object) -> int:
            Disk.room -= len(memoryview(data))  # type: ignore[arg-type]
            if Disk.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)  # type: ignore[arg-type]

    monkeypatch.setattr(atomic_write, "FileIO", Disk)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("nbytes", [0, 300_000, 9 * MIB, 28 * MIB])
def test_a_disk_that_is_full_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    source = matrices(tmp_path)
    before = names(tmp_path)
    full_after(monkeypatch, nbytes)
    with pytest.raises(UsageError) as caught:
        convert(str(source), str(tmp_path / "target.pt"))
    assert caught.value.file == str(tmp_path / "target.pt")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == before


@pytest.mark.parametrize("number", [0, 7, 24])
def test_a_damaged_tensor_in_the_middle(tmp_path: Path, number: int) -> None:
    source = matrices(tmp_path)
    data = Path(f"{source}.data-00000-of-00001")
    span = dict(open_checkpoint(str(source)).tree.tensors())[key_of(source, f"l{number}/kernel")].source
    with data.open("r+b") as file:
        file.seek(span.offset + span.length - 1)  # type: ignore[attr-defined]
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    before = names(tmp_path)
    for _ in range(3):
        with pytest.raises(ChecksumError) as caught:
            convert(str(source), str(tmp_path / "target.pt"))
        assert caught.value.path == f"l{number}/weight"
        with pytest.raises(ChecksumError) as caught:
            digest(str(source))
        assert caught.value.path == f"l{number}/kernel"
    assert names(tmp_path) == before


def key_of(source: Path, name: str) -> tuple:  # type: ignore[type-arg]
    tree = open_checkpoint(str(source)).tree
    return next(path for path, shown in tree.names.items() if shown == name)


def test_a_source_is_read_once_for_the_target_and_for_its_own_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = matrices(tmp_path), tmp_path / "target.pt"
    data, read = f"{source}.data-00000-of-00001", [0]
    small, large = File.read, File.read_large

    def counted(whole: Callable[..., object]) -> Callable[..., object]:
        def reading(file: File, offset: int, length: int, *rest: object) -> object:
            read[0] += length if file.path == data else 0
            return whole(file, offset, length, *rest)

        return reading

    monkeypatch.setattr(File, "read", counted(small))
    monkeypatch.setattr(File, "read_large", counted(large))
    convert(str(source), str(target))
    # Beside that, the first bytes are looked at each time that the file is listed, and the last ones once:
    # the comment of an archive behind the data may have 64 KiB.
    assert 0 <= read[0] - os.stat(data).st_size <= 4096 + (1 << 16)
    assert receipt_digest(target) == digest(str(source)).sha256


@pytest.mark.parametrize("part", ["l3", "l24"])
def test_what_is_not_converted_counts_for_the_digest_of_the_source(tmp_path: Path, part: str) -> None:
    source, target = matrices(tmp_path), tmp_path / "target.pt"
    convert(str(source), str(target), part=part)
    assert receipt_digest(target) == digest(str(source)).sha256


def test_bytes_that_stay_what_they_are_are_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"t{n}": np.full(n * 100_000, n, np.float32) for n in range(1, 5)}
    source, target = tmp_path / "source.safetensors", tmp_path / "target.npz"
    save(tensorflow_tree(arrays), str(source))
    hashed, real = [0], hashlib.sha256

    def counted(data: bytes = b"") -> object:
        hashed[0] += len(data)
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    convert(str(source), str(target))
    assert hashed[0] == sum(array.nbytes for array in arrays.values())
    monkeypatch.undo()
    assert receipt_digest(target) == digest(str(source)).sha256
    assert (
        json.loads(Path(f"{target}.ckpttool.json").read_text())["target_sha256"] == digest(str(target)).sha256
    )


def receipt_digest(target: Path) -> str:
    """Return the source's digest as the receipt of a conversion tells it."""
    return str(json.loads(Path(f"{target}.ckpttool.json").read_text())["source"]["sha256"])


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = matrices(tmp_path)
    before = names(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "target.pt"), progress=stop)
    assert names(tmp_path) == before


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.sampled_from([0, 1, 16_383, 16_384, 70_001, LARGE // 4, LARGE // 4 + 3]), min_size=1, max_size=6
    ),
    st.sampled_from([("torch", ".pt"), ("tf1", ""), ("npz", ".npz"), ("safetensors", ".safetensors")]),
)
def test_any_tree_is_read_back_as_it_was(sizes: list[int], to: tuple[str, str]) -> None:
    generator = np.random.default_rng(len(sizes))
    arrays = {f"t{n}": generator.random(size, dtype=np.float32) for n, size in enumerate(sizes)}
    tree = Tree({(key(name),): leaf(array, name) for name, array in arrays.items()})
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/x{to[1]}"
        done = save(tree, target, to[0], sync=False)
        read_back = open_checkpoint(target).tree
        assert {read_back.names[path]: item.array().tobytes() for path, item in read_back.tensors()} == {
            name: array.tobytes() for name, array in arrays.items()
        }
        assert done.sha256 == digest(target).sha256


def test_the_disk_has_every_file_and_folder_before_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    tree = Tree({(key("a"),): Leaf("uint8", (4,), Inline(b"data"), "a")})
    save(tree, str(tmp_path / "x.pt"))
    assert [Path(name).parent for name in synced] == [tmp_path, tmp_path.parent]
    synced.clear()
    save(tree, str(tmp_path / "y.pt"), sync=False)
    assert not synced


PEAK = """
import json, resource, sys
from ckpttool.commands.convert import convert
convert(*sys.argv[1:], sync=False)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""


@pytest.mark.long
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    # 160 MiB; a child's peak is no less than its parent's was, so a small parent starts them.
    source, small = matrices(tmp_path, 156), tmp_path / "small"
    save(tensorflow_tree({"l/kernel": np.ones((4, 4), np.float32)}), str(small), "tf1")
    starter = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    peaks = []
    for path in (small, source):
        command = [sys.executable, "-c", starter, PEAK, str(path), f"{path}.pt"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        peaks.append(json.loads(done.stdout))
    assert peaks[1] - peaks[0] < 64
