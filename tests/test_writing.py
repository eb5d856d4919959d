"""The one writer: whatever ends it and whenever, what stands at the target is the old or the new, whole."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.write import save
from ckpttool.core import (
    ChangedError,
    File,
    FormatError,
    NotFoundError,
    Output,
    TargetExistsError,
    UsageError,
    atomic_write,
    filesystem,
    is_hidden_name,
    require_new,
    sidecar,
    write_atomically,
)
from ckpttool.formats import open_checkpoint, resolve, tf_bundle
from ckpttool.listing import folder
from tests import warm
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.hostile import kill
from tests.trees import torch_tree

STEPS = ("replace", "rename", "link", "unlink", "fsync", "mkdir")


def put(content: bytes, stream: Any) -> None:
    stream.write(content)


def single(target: Path, content: bytes) -> list[Output]:
    """A file and what is about it."""
    return [
        Output(str(target), partial(put, content)),
        Output(f"{target}.about", partial(put, b"about " + content), follows=True),
    ]


def indexed(target: Path, content: bytes) -> list[Output]:
    """Two parts and an index that lists them by number and count, as TensorFlow's does."""
    more = next(n for n in range(3, 9) if not list(target.parent.glob(f"{target.name}.?of{n}")))
    empty = [f".{number}of{more}" for number in range(2, more)]
    return [
        Output(str(target), partial(put, content + b"0"), suffix=".0of2", meanwhile=f".0of{more}"),
        Output(str(target), partial(put, content + b"1"), suffix=".1of2", meanwhile=f".1of{more}"),
        *(Output(str(target), partial(put, b""), suffix=end, meanwhile=end, extra=True) for end in empty),
        Output(
            str(target), partial(put, content + b" of %d" % more), suffix=".i", meanwhile=".i", extra=True
        ),
        Output(str(target), partial(put, content + b" of 2"), suffix=".i", indexes=True),
        Output(f"{target}.about", partial(put, b"about " + content), follows=True),
    ]


def several(target: Path, content: bytes) -> list[Output]:
    """A set that no index describes."""
    return [
        *(Output(str(target), partial(put, content), suffix=end) for end in ("_actor", "_critic")),
        Output(f"{target}.about", partial(put, b"about " + content), follows=True),
    ]


def write(make: Make, target: Path, content: bytes, **options: bool) -> None:
    """Write what `make` makes, in place of the files that an index there lists."""

    def replaced() -> list[str]:
        index = Path(f"{target}.i")
        count = int(index.read_bytes()[-1:]) if index.exists() else 0
        return [f"{target}.{number}of{count}" for number in range(count)]

    write_atomically(make(target, content), replaced=replaced, **options)


Make = Callable[[Path, bytes], list[Output]]
MAKERS: list[Make] = [single, indexed, several]


def receipts(file: str) -> set[bytes]:
    return {
        Path(file).read_bytes()
        for file in (file, *atomic_write.find_pending_files(file))
        if os.path.exists(file)
    }


def stands(make: Make, target: Path) -> bytes | None:
    """Return which content a reader finds; raise AssertionError for none and for a mixture."""
    if make is several and not os.path.lexists(f"{target}_actor"):
        backups = atomic_write.find_backups(str(target))
        if not backups:
            return None
        target = Path(backups[0])
    if make is single:
        content = target.read_bytes() if target.exists() else None
    elif make is indexed:
        index = Path(f"{target}.i").read_bytes() if os.path.exists(f"{target}.i") else None
        content, count = (None, 0) if index is None else (index.partition(b" of ")[0], int(index[-1:]))
        assert index is None or [Path(f"{target}.{n}of{count}").read_bytes() for n in range(count)] == [
            (content or b"") + b"0",
            (content or b"") + b"1",
            *[b""] * (count - 2),
        ]
    else:
        parts = {
            Path(f"{target}{end}").read_bytes()
            for end in ("_actor", "_critic")
            if os.path.exists(f"{target}{end}")
        }
        assert len(parts) <= 1, parts
        content = parts.pop() if parts else None
    assert content is None or b"about " + content in receipts(f"{target}.about")
    return content


class Killed(BaseException):
    """Nothing that the writer does after this has an effect: as far as files go, its process is dead."""


class Steps:
    """Counts what changes a folder or a file, and raises instead of one of these steps, or acts before it."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        at: int = 0,
        error: BaseException | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.done, self._at, self._error, self._before = 0, at, error, before
        patch.setattr(os, "fsync", lambda _: None)  # the disk has its own speed
        for name in STEPS:
            patch.setattr(os, name, self._stepping(getattr(os, name)))
        patch.setattr(atomic_write, "_open_exclusive", self._stepping(atomic_write._open_exclusive))
        patch.setattr(atomic_write._BackgroundFile, "_put", self._stepping(atomic_write._BackgroundFile._put))

    def _stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*arguments: Any, **named: Any) -> Any:
            self.done += 1
            dead = isinstance(self._error, Killed) and self.done > self._at
            if self._error is not None and (dead or self.done == self._at):
                raise self._error
            if self.done == self._at:
                self._before()
            return function(*arguments, **named)

        return stepping


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def attempts(make: Make, path: Path, *, links: bool, force: bool) -> int:
    """Return how many steps a replacement takes."""
    with pytest.MonkeyPatch.context() as patch:
        fresh(make, path, force=force)
        if not links:
            patch.setattr(os, "link", no_links)
        steps = Steps(patch)
        write(make, path / "x", b"new", force=force)
    assert stands(make, path / "x") == b"new"
    return steps.done


def fresh(make: Make, path: Path, *, force: bool) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    if force:
        write(make, path / "x", b"old", sync=False)


FAILURES = {
    "EIO": (OSError(errno.EIO, "no"), True),
    "EIO, no links": (OSError(errno.EIO, "no"), False),
    "Ctrl-C": (KeyboardInterrupt(), True),
    "killed": (Killed(), True),
    "killed, no links": (Killed(), False),
}


@pytest.mark.parametrize(("error", "links"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("force", [True, False], ids=["over", "fresh"])
@pytest.mark.parametrize("make", MAKERS)
def test_whatever_ends_it_at_any_step_leaves_old_or_new(
    make: Make, force: bool, links: bool, error: BaseException, tmp_path: Path
) -> None:
    location = tmp_path / "place"
    outcomes = set()
    for at in range(1, attempts(make, location, links=links, force=force) + 1):
        fresh(make, location, force=force)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(UsageError, OSError, type(error)):
            if not links:
                patch.setattr(os, "link", no_links)
            Steps(patch, at, error)
            write(make, location / "x", b"new", force=force)
        if not isinstance(error, Killed):
            left = [name for name in os.listdir(location) if is_hidden_name(name)]
            # Only an unlink that failed leaves one.
            assert len(left) <= 1, left
        outcomes.add(stands(make, location / "x"))
        write(make, location / "x", b"last", force=True, sync=False)
        assert stands(make, location / "x") == b"last"
    assert outcomes == {b"old" if force else None, b"new"}


def test_a_second_ctrl_c_does_not_stop_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, often = os.unlink, iter([KeyboardInterrupt])

    def interrupted(*arguments: Any, **named: Any) -> None:
        for error in often:
            raise error
        unlink(*arguments, **named)

    def stop(_: object) -> None:
        monkeypatch.setattr(os, "unlink", interrupted)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically([Output(str(tmp_path / "x"), stop)])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("make", MAKERS)
def test_of_many_writers_with_force_the_last_wins_whole(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "x"
    contents = [str(number).encode() for number in range(12)]

    def write(content: bytes) -> None:
        write_atomically(make(target, content), force=True, sync=False)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if make is single and target.exists():
            assert target.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert stands(make, target) in contents
    assert not [name for name in os.listdir(tmp_path) if is_hidden_name(name)]


@pytest.mark.parametrize("make", MAKERS)
def test_of_many_writers_one_wins_whole(make: Make, tmp_path: Path) -> None:
    won: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            write_atomically(make(tmp_path / "x", content), sync=False)
            won.append(content)
        except TargetExistsError:
            pass

    threads = [threading.Thread(target=write, args=(str(number).encode(),)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert stands(make, tmp_path / "x") == won[0]
    assert not [name for name in os.listdir(tmp_path) if is_hidden_name(name)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_name_that_another_program_takes_at_any_step_stays_its_own(make: Make, tmp_path: Path) -> None:
    location = tmp_path / "place"
    names = {output.file for output in make(location / "x", b"") if not output.extra}
    refused_at = dict.fromkeys(names, 0)
    for at in range(1, attempts(make, location, links=True, force=False) + 1):
        for name in sorted(names):
            fresh(make, location, force=False)
            used: list[str] = []

            def take(name: str = name, names: list[str] = used) -> None:
                with contextlib.suppress(FileExistsError), open(name, "xb") as file:
                    file.write(b"theirs")
                    names.append(name)

            with pytest.MonkeyPatch.context() as patch:
                Steps(patch, at, before=take)
                refused_name = None
                try:
                    write(make, location / "x", b"new")
                except TargetExistsError as error:
                    refused_name = error.file
            assert refused_name == (name if used else None), f"taken at step {at}"
            if used:
                refused_at[name] += 1
                assert Path(name).read_bytes() == b"theirs"
                # What is about the others is named after them.
                assert os.listdir(location) == [Path(name).name] or name.endswith(".about")
    assert all(refused_at.values()), refused_at


# --- Killed -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tf", "fujimoto"])
def test_a_conversion_that_is_killed_leaves_old_or_new(kind: str) -> None:
    command = [sys.executable, "-m", "tests.hostile.kill", "--every", "9", "--quick", kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert '"old"' in done.stdout
    assert '"new"' in done.stdout
    assert ("backup" in done.stdout) == (kind == "fujimoto")


# --- Names --------------------------------------------------------------------------------------------


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"precious")
    for name, leads in (("x", tmp_path / "real"), ("y", tmp_path / "nowhere")):
        (tmp_path / name).symlink_to(leads)
        with pytest.raises(TargetExistsError):
            write_atomically(single(tmp_path / name, b"new"))
        write_atomically(single(tmp_path / name, b"new"), force=True)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "real").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_somebody_s_link_at_the_temporary_name_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").write_bytes(b"precious")
    (tmp_path / "taken").symlink_to("real")
    monkeypatch.setattr(atomic_write, "temporary_path", lambda _: str(tmp_path / "taken"))
    with pytest.raises(UsageError):
        write_atomically([Output(str(tmp_path / "x"), partial(put, b"new"))])
    assert (tmp_path / "real").read_bytes() == b"precious"


@pytest.mark.parametrize("make", MAKERS)
def test_permissions_are_the_umask_s_or_those_of_the_old_file(make: Make, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(make(tmp_path / "x", b"old"))
        files = sorted(tmp_path.iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}
        for file in files:
            file.chmod(0o664)
        write_atomically(make(tmp_path / "x", b"new"), force=True)
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o664}
    finally:
        os.umask(before)


def test_a_name_as_long_as_a_name_may_be(tmp_path: Path) -> None:
    target = tmp_path / ("\N{SNOWMAN}" * 80)  # 240 bytes of the 255
    write_atomically([Output(str(target), partial(put, b"x"))])
    assert target.read_bytes() == b"x"


def test_what_was_left_is_no_checkpoint(tmp_path: Path) -> None:
    for end in (".index", ".data-00000-of-00001"):
        shutil.copy(f"{TF_SAMPLE}{end}", tmp_path)
        shutil.copy(f"{TF_SAMPLE}{end}", atomic_write.temporary_path(str(tmp_path / "ckpt-9")) + end)
    shutil.copy(TORCH_SAMPLE, atomic_write.temporary_path(str(tmp_path / "agent.pt")))
    shutil.copy(TORCH_SAMPLE, atomic_write.temporary_path(str(tmp_path / "agent.pt.ckpttool.residue.pt")))
    assert resolve(str(tmp_path)).location == str(tmp_path / TF_SAMPLE.name)
    assert [row.path for row in folder.list_checkpoints(str(tmp_path))] == [str(tmp_path / TF_SAMPLE.name)]
    text = refused(in_process("inspect", tmp_path / "ckpt-8"))
    assert "ckpttool-tmp" not in text


# --- Source and target --------------------------------------------------------------------------------


def test_a_hard_link_of_the_source_is_the_source(tmp_path: Path, golden: Golden) -> None:
    source = tmp_path / "a.pt"
    shutil.copy(TORCH_SAMPLE, source)
    os.link(source, tmp_path / "b.pt")
    with pytest.raises(UsageError) as caught:
        convert(str(source), str(tmp_path / "b.pt"), force=True)
    golden(caught.value)


def test_a_shard_of_the_source_under_another_prefix_is_the_source(tmp_path: Path, golden: Golden) -> None:
    for end in (".index", ".data-00000-of-00001"):
        shutil.copy(f"{TF_SAMPLE}{end}", tmp_path / f"a{end}")
    os.link(tmp_path / "a.data-00000-of-00001", tmp_path / "b.data-00000-of-00001")
    before = (tmp_path / "a.data-00000-of-00001").read_bytes()
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "a"), str(tmp_path / "b"), to="tf", force=True)
    golden(caught.value)
    assert (tmp_path / "a.data-00000-of-00001").read_bytes() == before


def test_names_that_differ_in_case_may_be_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    source, target = tmp_path / "agent.pt", tmp_path / "AGENT.pt"
    shutil.copy(TORCH_SAMPLE, source)
    there = os.path.lexists
    # A file system that takes both names for one, as those of macOS and Windows do.
    monkeypatch.setattr(os.path, "lexists", lambda path: there(str(path).replace("AGENT", "agent")))
    monkeypatch.setattr(os.path, "samefile", lambda a, b: str(a).lower() == str(b).lower())
    with pytest.raises(UsageError) as caught:
        require_new(str(target), (File.stamp(str(source)),), force=True)
    golden(caught.value)


def rewritten(path: Path) -> None:
    """Change a byte in place, and put back the times, as `rsync --inplace --times` does."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        stream.write(b"\x55")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: os.replace(shutil.copy(TORCH_SAMPLE, f"{path}.new"), path),
    "appended": lambda path: os.truncate(path, path.stat().st_size + 1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "rewritten": lambda path: path.write_bytes(path.read_bytes()),
    "rewritten with its old times": lambda path: rewritten(path),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_source_that_changes_while_it_is_read(
    change: Callable[[Path], object], late: bool, tmp_path: Path
) -> None:
    source = tmp_path / "a.pt"
    shutil.copy(TORCH_SAMPLE, source)
    changed = False

    def progress(done: int, total: int) -> None:
        nonlocal changed
        if not changed and done >= (total if late else 1):
            changed = True
            change(source)

    out = tmp_path / "out"
    out.mkdir()
    (out / "x.npz").write_bytes(b"old")
    with pytest.raises((ChangedError, FormatError, NotFoundError)):
        convert(str(source), str(out / "x.npz"), progress=progress, force=True)
    assert changed
    assert [path.name for path in out.iterdir()] == ["x.npz"]
    assert (out / "x.npz").read_bytes() == b"old"


def test_a_file_rewritten_in_the_moment_of_the_look_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for content in range(40):
        file.write_bytes(b"%02d" % content)
        known = File.stamp(str(file))
        with file.open("r+b") as stream:  # in place, and of the same size
            stream.write(b"no")
        with pytest.raises(ChangedError):
            known.read(0, 2)


def test_a_source_is_left_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    shutil.copy2(TORCH_SAMPLE, source)
    source.chmod(0o444)
    before = (source.read_bytes(), source.stat())
    for words in (["inspect"], ["digest"], ["convert", tmp_path / "x.npz"]):
        assert in_process(words[0], source, *words[1:]).status == 0
    after = source.stat()
    assert source.read_bytes() == before[0]
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_mode) == (
        before[1].st_mtime_ns,
        before[1].st_ctime_ns,
        before[1].st_mode,
    )


def test_a_disk_that_cannot_be_read_is_the_source_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(FormatError, match="Input/output") as caught:
        digest(str(TORCH_SAMPLE))
    assert caught.value.file == str(TORCH_SAMPLE)


# --- Folders and room ---------------------------------------------------------------------------------


def test_a_folder_that_goes_away_is_not_made_again(tmp_path: Path, golden: Golden) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def gone(stream: Any) -> None:
        stream.write(b"x")
        shutil.rmtree(out)

    with pytest.raises(UsageError) as caught:
        write_atomically([Output(str(out / "x"), gone), Output(str(out / "y"), partial(put, b""))])
    golden(caught.value)
    assert not out.exists()


def test_a_target_that_becomes_a_folder(tmp_path: Path, golden: Golden) -> None:
    def check(_: str) -> None:
        (tmp_path / "x").mkdir()

    with pytest.raises(UsageError) as caught:
        write_atomically([Output(str(tmp_path / "x"), partial(put, b"new"), check)], force=True)
    golden(caught.value)
    assert os.listdir(tmp_path) == ["x"]


def without_free_space(text: str) -> str:
    return re.sub(r"[\d,]+ bytes are free", "N bytes are free", text)


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EIO", "EFBIG", "EROFS", "EACCES"])
def test_every_error_of_the_disk_is_a_sentence(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    whole = atomic_write._BackgroundFile._put

    def failing(self: Any, data: memoryview) -> None:
        whole(self, data[:100])
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr(atomic_write._BackgroundFile, "_put", failing)
    target = tmp_path / "x.npz"
    target.write_bytes(b"old")
    ran = in_process("convert", TORCH_SAMPLE, target, "--force")
    refused(ran)
    golden(without_free_space(ran.err))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
    assert target.read_bytes() == b"old"


def test_room_is_asked_for_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(atomic_write, "create_file", None)
    for to in ("torch", "tf", "npz", "safetensors"):
        text = refused(in_process("convert", TF_SAMPLE, tmp_path / "x", "--to", to))
        assert "1,000" in text
        assert not os.listdir(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 600 KiB: one agent finds room on it, two do not."""
    location = tmp_path / "small"
    location.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(location)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield location
    subprocess.run(["umount", "-l", str(location)], check=True)


@pytest.mark.parametrize(
    ("to", "requested"), [("torch", True), ("torch", False), ("tf", False), ("keras", False)]
)
def test_a_full_disk_leaves_the_old_one(
    to: str, requested: bool, small: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    target = small / "x"
    convert(str(TF_SAMPLE), str(target), to=to)
    known = {path.name: path.read_bytes() for path in small.iterdir()}
    (small / "ballast").write_bytes(bytes(200 << 10))
    if not requested:
        monkeypatch.setattr(filesystem, "free_bytes", lambda _: None)
    text = refused(in_process("convert", TF_SAMPLE, target, "--to", to, "--force"))
    assert str(target) in text
    golden(without_free_space(text))
    (small / "ballast").unlink()
    assert {path.name: path.read_bytes() for path in small.iterdir()} == known


# --- Sets ---------------------------------------------------------------------------------------------


def saved_set(target: Path, value: float) -> str:
    """Save a set of two files; return its digest."""
    actor, critic = (np.full((2, 2), value + offset, "f4") for offset in (0, 1))
    save(
        torch_tree({"actor/l1.weight": actor, "critic/l1.weight": critic}),
        str(target),
        "fujimoto",
        force=True,
    )
    return digest(str(target)).sha256


def interrupted(target: Path) -> None:
    """Leave the set as a program does that dies in the middle of its replacement."""
    dead = False

    def killed(*_: Any, **__: Any) -> None:
        nonlocal dead
        dead = True
        raise Killed

    def unless_dead(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if dead:
            raise Killed
        return function(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "rename", "replace"):
            patch.setattr(os, name, partial(unless_dead, getattr(os, name)))
        patch.setattr(atomic_write.PendingFile, "name", killed)
        with pytest.raises(Killed):
            saved_set(target, 7)


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return everything below a folder: kind, inode, and content or destination."""
    files: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        files[str(path.relative_to(folder))] = (status.st_mode, status.st_ino, what)
    return files


def test_an_interrupted_replacement_is_read_from_its_backup(tmp_path: Path) -> None:
    target = tmp_path / "x"
    before = saved_set(target, 0)
    interrupted(target)
    assert not (tmp_path / "x_actor").exists()
    listed = contents(tmp_path)
    assert digest(str(target)).sha256 == before
    assert is_hidden_name(open_checkpoint(str(target)).path)
    ran = in_process("inspect", target, "--json").json()
    assert any(".ckpttool-old-" in note for note in ran["notes"])
    assert contents(tmp_path) == listed
    # Nobody but a person removes what an interrupted program left.
    after = saved_set(target, 3)
    assert digest(str(target)).sha256 == after
    assert listed.items() <= contents(tmp_path).items()


@pytest.mark.parametrize("change", ["lost", "cut", "touched", "one more"])
def test_a_backup_that_is_not_complete_is_not_read(change: str, tmp_path: Path) -> None:
    target = tmp_path / "x"
    saved_set(target, 0)
    interrupted(target)
    backup = Path(f"{atomic_write.find_backups(str(target))[0]}_critic")
    if change == "lost":
        backup.unlink()
    elif change == "cut":
        os.truncate(backup, backup.stat().st_size - 1)
    elif change == "touched":
        os.utime(backup, (0, 0))
    else:
        shutil.copy(backup, f"{backup}_target")
    assert not atomic_write.find_backups(str(target))
    with pytest.raises(NotFoundError):
        open_checkpoint(str(target))


def test_of_two_backups_the_newest_is_read(tmp_path: Path) -> None:
    target = tmp_path / "x"
    digests = []
    for value in (0, 1):
        digests.append(saved_set(target, value))
        interrupted(target)
    assert len(atomic_write.find_backups(str(target))) == 2
    assert digest(str(target)).sha256 == digests[1]


def test_a_stray_member_of_the_set_is_not_joined_to_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "x_critic_target").write_bytes(b"of a conversion that was interrupted")
    with pytest.raises(TargetExistsError) as caught:
        saved_set(tmp_path / "x", 0)
    assert caught.value.file == str(tmp_path / "x_critic_target")


# What anybody may have put beside a target, under names that ckpttool uses or has used.
PLANTED: dict[str, Callable[[str, str], str]] = {
    "record": lambda name, end: f".{name}.ckpttool-swap",
    "backup": lambda name, end: f".{name}.ckpttool-old-{'0' * 16}0123456789ab{end}",
    "short backup": lambda name, end: f".{name}.ckpttool-old-0123456789ab{end}",
    "temporary": lambda name, end: f".{name}.ckpttool-tmp-0123456789ab{end}",
    "receipt": lambda name, end: f".{name}.ckpttool.json.ckpttool-tmp-0123456789ab",
    "next": lambda name, end: f".{name}.ckpttool.json.ckpttool-tmp-next0123456789ab",
    "residue": lambda name, end: f".{name}.ckpttool.residue.pt.ckpttool-tmp-0123456789ab",
}
TARGETS = {
    "torch": ("agent.pt", ""),
    "safetensors": ("agent.safetensors", ""),
    "npz": ("agent.npz", ""),
    "keras": ("agent.weights.h5", ""),
    "tf": ("agent-7", ".index"),
    "tf1": ("agent-7", ".index"),
    "fujimoto": ("agent", "_actor"),
    "keras_rl": ("agent.h5f", "_actor.h5f"),
}


def plant(path: Path, kind: str, precious: Path) -> None:
    """Put something of that kind at the path; whatever it leads to lies in the precious folder."""
    if kind == "record":
        own = [path.name for path in path.parent.iterdir()]
        stem = path.name.replace("-swap", "-old-0123456789ab")
        document = {"schema": 1, "stem": stem, "names": own, "kept": {}, "target_sha256": "0" * 64}
        path.write_text(json.dumps(document))
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_bytes(b"precious")
    elif kind == "link":
        path.symlink_to(precious / "mine")
    elif kind == "link to a folder":
        path.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious / "mine", path)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("to", TARGETS)
def test_planted_files_change_nothing_and_are_left_alone(to: str, tmp_path: Path) -> None:
    name, end = TARGETS[to]
    source, precious, location = tmp_path / "source.pt", tmp_path / "precious", tmp_path / "place"
    save(kill.agent(0, 1 if to == "keras_rl" else 2), str(source))
    precious.mkdir()
    (precious / "mine").write_bytes(b"precious")
    location.mkdir()
    for other in ("agent-notes", "agent_thesis.tex", f"{name}.bak"):
        (location / other).write_bytes(b"mine")
    base = name.removesuffix(".h5f")
    for number, kind in enumerate(("record", "folder", "link", "link to a folder", "hard link", "fifo")):
        for title, make in PLANTED.items():
            planted = make(base if title in ("record", "backup", "short backup", "temporary") else name, end)
            path = location / planted.replace("0123456789ab", f"0123456789{number:02x}")
            if not os.path.lexists(path):
                plant(path, kind, precious)
    words = ["convert", source, location / name, "--to", to, "--allow-missing"]
    planted, kept = contents(location), contents(precious)
    refused(in_process(*words, "--layout", "no such layout"))
    assert contents(location) == planted
    for option in ([], ["--force"]):
        ran = in_process(*words, *option)
        assert ran.status == 0, ran.err
        assert planted.items() <= contents(location).items()
    standing = contents(location)
    refused(in_process(*words))
    assert contents(location) == standing
    assert contents(precious) == kept


@pytest.mark.parametrize(
    "target", ["/dev/stdout", "/dev/null", "/dev/fd/1", "/proc/self/fd/1", "/proc/self/comm", "link", "fifo"]
)
def test_a_target_of_the_system_is_refused(target: str, tmp_path: Path) -> None:
    if target == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        target = str(tmp_path / "link")
    elif target == "fifo":
        os.mkfifo(tmp_path / "fifo")
        target = str(tmp_path / "fifo")
    before = os.lstat(target)
    code = (
        f"from ckpttool.core.atomic_write import *; write_atomically([Output({target!r}, print)], force=True)"
    )
    with (tmp_path / "out").open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    assert b"TargetExistsError" in done.stderr
    for command in (
        ["convert", TORCH_SAMPLE, target, "--to", "torch"],
        ["report", TORCH_SAMPLE, "--out", target],
    ):
        refused(in_process(*command, "--force"))
    after = os.lstat(target)
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)


def test_a_shard_under_an_interim_name_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "ckpt-1"
    convert(str(TF_SAMPLE), str(target), to="tf")
    for stray in ("00000-of-00002", "00001-of-00002", "00002-of-00003"):
        (tmp_path / f"ckpt-1.data-{stray}").write_bytes(b"mine")
    convert(str(TF_SAMPLE), str(target), to="tf", force=True)
    assert digest(str(target)).sha256 == digest(str(TF_SAMPLE)).sha256
    kept = [path.read_bytes() for path in sorted(tmp_path.glob("ckpt-1.data-*"))]
    assert kept[1:] == [b"mine"] * 3


def test_a_receipt_without_its_name_is_found_by_its_digest(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    receipt = Path(sidecar.sidecar_path(str(tmp_path / "x.pt")))
    shutil.copy(receipt, atomic_write.temporary_path(str(receipt)))
    Path(atomic_write.temporary_path(str(receipt))).write_bytes(receipt.read_bytes()[:100])  # cut short
    os.mkfifo(atomic_write.temporary_path(str(receipt)))
    receipt.write_text(receipt.read_text().replace('"target_sha256": "', '"target_sha256": "0'))
    done = convert(str(tmp_path / "x.pt"), str(tmp_path / "y.npz"))
    assert done.written


def test_a_locked_folder_is_an_error_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_LOCKED_S", 0.1)
    (tmp_path / "x").write_bytes(b"old")
    with atomic_write.lock_folders([str(tmp_path)]), pytest.raises(UsageError) as caught:
        write_atomically([Output(str(tmp_path / "x"), partial(put, b"new"))], force=True)
    assert caught.value.file == str(tmp_path)
    assert contents(tmp_path).keys() == {"x"}
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_sidecar_s_name_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        convert(str(TF_SAMPLE), str(tmp_path / "a.pt.ckpttool.json"), to="torch")
    assert not os.listdir(tmp_path)


BETWEEN = """
import numpy as np, tensorflow as tf
found, right = (tf.train.load_checkpoint(name) for name in ("between", "usual"))
names = right.get_variable_to_shape_map()
assert names and names == found.get_variable_to_shape_map()
for name in names:
    np.testing.assert_array_equal(found.get_tensor(name), right.get_tensor(name))
"""


@pytest.mark.tensorflow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_reads_the_set_that_stands_in_between(tmp_path: Path) -> None:
    tree = open_checkpoint(str(TF_SAMPLE)).tree
    for piece in tf_bundle.pieces(tree, between=str(tmp_path / "x")):
        for name, suffix in (("between", piece.meanwhile), ("usual", "" if piece.extra else piece.suffix)):
            if suffix:
                with open(tmp_path / f"{name}{suffix}", "wb") as stream:
                    piece.write(stream)
    assert sorted(path.name for path in tmp_path.glob("between*")) == [
        "between.data-00000-of-00002",
        "between.data-00001-of-00002",
        "between.index",
    ]
    status, output = warm.run("tensorflow", BETWEEN, tmp_path)
    assert status == 0, output
