"""textconv: what git lays side by side is of the file's bytes alone, and nothing makes git stop."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.digest import digest
from ckpttool.commands.textconv import textconv
from ckpttool.conversion.write import save
from ckpttool.core import Alias, Tree, ValueLeaf, display, key
from ckpttool.formats import open_checkpoint
from tests.bundle_writer import bundle, entry, header, shape, table
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.pickles import ACTING
from tests.trees import keys, leaf, torch_tree

ATTRIBUTES = """
*.pt diff=ckpttool
*.index diff=ckpttool
*.lfs filter=stand-in diff=ckpttool -text
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def written(folder: Path, name: str = "agent.pt", **changes: object) -> Path:
    """Write an agent of a few entries; `changes` replace some, with `_` for what a name cannot have."""
    generator = np.random.default_rng(0)
    entries: dict[str, object] = {
        "net/l1.weight": generator.standard_normal((8, 3)).astype(np.float32),
        "net/l1.bias": np.zeros(8, np.float32),
        "net/l10.bias": np.full(2, 0.1, np.float32),
        "steps": np.array(7, np.int64),
        "lr": 3e-4,
    }
    named = {item.replace("/", "_").replace(".", "_"): item for item in entries}
    entries |= {named.get(name, name): value for name, value in changes.items()}
    folder.mkdir(exist_ok=True)
    save(torch_tree(entries), str(folder / name), force=True)  # type: ignore[arg-type]
    return folder / name


# --- One file ---------------------------------------------------------------------------------------


def test_every_entry_has_one_line_with_its_digest_and_numbers(tmp_path: Path) -> None:
    file = written(tmp_path)
    lines = textconv(str(file))
    assert "pytorch" in lines[0]
    digests = {tensor.path: tensor.sha256 for tensor in digest(str(file)).tensors}
    assert lines[1:] == (
        "lr = 0.0003",
        f"net/l1/bias float32[8] {digests['net/l1/bias'][:12]} 0 to 0, mean 0, std 0",
        f"net/l1/weight float32[8, 3] {digests['net/l1/weight'][:12]} {_range(file)}",
        "net/l10/bias float32[2] = [0.1, 0.1]",
        "steps int64[] = 7",
    )


def _range(file: Path) -> str:
    tree = open_checkpoint(str(file)).tree
    array = next(item.array() for path, item in tree.tensors() if display(path) == "net/l1/weight")
    array = array.astype(np.float64)
    return f"{array.min():.4g} to {array.max():.4g}, mean {array.mean():.4g}, std {array.std():.4g}"


def test_the_order_of_the_file_and_its_name_do_not_count(tmp_path: Path) -> None:
    first = written(tmp_path)
    tree = open_checkpoint(str(first)).tree
    save(Tree(dict(reversed(tree.leaves.items())), tree.aliases), str(tmp_path / "other.pt"))
    assert textconv(str(first)) == textconv(str(tmp_path / "other.pt"))


def test_what_is_not_finite_is_counted_and_aliases_are_named(tmp_path: Path) -> None:
    array = np.array([np.nan, np.inf, 1, 2, 3], np.float32)
    tree = Tree({keys("a"): leaf(array, "a")}, {keys("a"): (Alias((key("b"),)),)})
    save(tree, str(tmp_path / "x.pt"))
    lines = textconv(str(tmp_path / "x.pt"))
    assert lines[1].endswith(" 1 to 3, mean 2, std 0.8165, 1 NaN, 1 infinite")
    assert {"a", "b"} <= set(lines[2].split())


def test_what_loading_would_run_comes_first(tmp_path: Path, golden: Golden) -> None:
    data, name = ACTING["GLOBAL + REDUCE"]
    (tmp_path / "x.pkl").write_bytes(data)
    golden("\n".join(line for line in textconv(str(tmp_path / "x.pkl"))[:3] if name in line))


def test_long_texts_and_control_characters_stay_in_their_line(tmp_path: Path) -> None:
    save(
        Tree({keys("a"): ValueLeaf("x" * 5000), (key("b\n\x1b[1m"),): ValueLeaf(b"12")}),
        str(tmp_path / "x.pt"),
    )
    ran = in_process("textconv", tmp_path / "x.pt")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("a = 'xxx")
    assert "(5,002 characters, sha256 " in lines[1]
    assert lines[2].startswith("b\\n\\x1b[1m = 2 bytes, sha256 ")
    assert max(map(len, lines)) < 300


def test_an_index_is_told_without_its_shards_and_the_same_with_them(tmp_path: Path) -> None:
    shutil.copy(f"{TF_SAMPLE}.index", tmp_path)
    alone = textconv(str(tmp_path / f"{TF_SAMPLE.name}.index"))
    assert alone == textconv(f"{TF_SAMPLE}.index")
    whole = {tensor.key: tensor for tensor in digest(str(TF_SAMPLE)).tensors}
    assert len(alone) == 1 + len(whole)
    forms = {f"{tensor.dtype}{list(tensor.shape)}" for tensor in whole.values()}
    assert {line.split(" ", 1)[1].rpartition(" crc32c ")[0] for line in alone[1:]} == forms
    assert any(line.startswith("policy/actor/l1/kernel float32[3, 64] crc32c ") for line in alone)
    assert not [line for line in alone if "missing" in line or "ckpt-15000" in line]


def test_a_tensor_that_changes_its_bytes_changes_its_line_of_the_index(tmp_path: Path) -> None:
    lines = []
    for value in (b"\0\0\0\0", b"\0\0\x80\x3f"):
        prefix = bundle(tmp_path / "ckpt-1", {"v": value, "w": bytes(4)})
        lines.append(textconv(f"{prefix}.index"))
    (before, after) = lines
    assert [line.split()[0] for line, other in zip(before, after, strict=True) if line != other] == ["v"]


def test_inspect_lists_an_index_whose_graph_is_in_a_missing_shard(tmp_path: Path, golden: Golden) -> None:
    shutil.copy(f"{TF_SAMPLE}.index", tmp_path)
    ran = in_process("inspect", tmp_path / TF_SAMPLE.name, "--json")
    assert ran.status == 0
    assert len(ran.json()["tensors"]) == 78
    golden("\n".join(ran.json()["notes"]))


# --- What is no checkpoint by itself ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.data-00000-of-00001", b"\0\1"),
        ("x.pt", TORCH_SAMPLE.read_bytes()[:5000]),
        ("x.pt", b""),
        ("x.pt", b"\x93what"),
        ("x.index", table([(b"", header()), (b"w", entry(1, shape(2), 0, 1, bytes(4)))])),
    ],
    ids=["shard", "cut short", "empty", "unknown", "damaged index"],
)
def test_a_file_that_is_none_is_told_by_a_sentence_and_a_digest(
    tmp_path: Path, name: str, data: bytes, golden: Golden
) -> None:
    (tmp_path / name).write_bytes(data)
    ran = in_process("textconv", tmp_path / name)
    assert (ran.status, ran.err) == (0, "")
    first, second = ran.out.splitlines()
    golden(first)
    assert str(tmp_path) not in first
    assert second.startswith(f"{len(data):,} byte")
    (tmp_path / name).write_bytes(data + b"\0")
    assert textconv(str(tmp_path / name)) != (first, second)


def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text(POINTER)
    assert "\n".join(textconv(str(tmp_path / "x.pt"))) + "\n" == POINTER


def test_a_tensor_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    at = data.index(np.full(2, 0.1, np.float32).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    lines = textconv(str(file))
    assert "lr = 0.0003" in lines
    assert "checksum" in next(line for line in lines if line.startswith("net/l10/bias"))


def test_no_file_at_all_is_no_failure_either(tmp_path: Path) -> None:
    ran = in_process("textconv", tmp_path / "none.pt")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out


# --- Git itself -------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        env={**environment, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_shows_the_line_of_the_tensor_that_changed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    git(repository, "config", "diff.ckpttool.textconv", f"{sys.executable} -m ckpttool textconv")
    # What Git LFS does, with a stand-in for its program: what is stored is not what is checked out.
    for way in ("clean", "smudge"):
        git(repository, "config", f"filter.stand-in.{way}", r"tr '\000-\377' '\200-\377\000-\177'")
    (repository / ".gitattributes").write_text(ATTRIBUTES)
    for steps in (7, 8):
        written(repository, steps=np.array(steps))
        bundle(repository / "ckpt-1", {"v": np.float32(steps).tobytes(), "w": bytes(4)})
        if steps == 8:
            (repository / "broken.pt").write_bytes(TORCH_SAMPLE.read_bytes()[:5000])
            written(tmp_path).rename(repository / "large.lfs")
        git(repository, "add", "--all")
        git(repository, "commit", "-q", "-m", str(steps))
    stored = (
        git(repository, "rev-parse", "HEAD:large.lfs"),
        git(repository, "hash-object", "--no-filters", "large.lfs"),
    )
    assert stored[0] != stored[1]
    shown = git(repository, "diff", "HEAD~1", "HEAD", "--", "agent.pt", "*.index", "*.lfs", "broken.pt")
    lines = [line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert "Binary files" not in shown
    assert [line for line in lines if "steps" in line][:2] == ["-steps int64[] = 7", "+steps int64[] = 8"]
    assert [line.split(" crc32c ")[0] for line in lines if "crc32c" in line] == [
        "-v float32[1]",
        "+v float32[1]",
    ]
    # Two new files: one that is no checkpoint, one that Git's filter brings back.
    assert len([line for line in lines if line.startswith("+5,000 bytes, sha256 ")]) == 1
    assert [line for line in lines if line.startswith("+lr")] == ["+lr = 0.0003"]
    assert len(lines) == 2 + 2 + 2 + 6
