"""What newcomers type wrongly (wrong_usages.tsv): one sentence and a next step, whatever it is."""

from __future__ import annotations

import csv
import gzip
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpttool
from ckpttool.cli import keywords
from ckpttool.conversion.write import save
from tests import refusals
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, Ran, in_process, zipped
from tests.golden_texts import Golden
from tests.trees import torch_tree

with open(ROOT / "tests" / "wrong_usages.tsv", encoding="utf-8", newline="") as table:
    ROWS = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1048576\n"
HTML = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


_AGENTS = (
    *("agent.pt", "old.pt", "a b.pt", "-x.pt"),
    *("run/ckpt-1.pt", "run/ckpt-2.pt", "runs/a/ckpt-1.pt", "runs/b/ckpt-1.pt"),
)


def dense(**sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the weights and biases of dense layers of the given numbers of outputs and inputs."""
    weights = {f"{name}.weight": np.ones(size, np.float32) for name, size in sizes.items()}
    return weights | {f"{name}.bias": np.ones(size[0], np.float32) for name, size in sizes.items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a newcomer's folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("nothing", "run", "lost", "runs", "runs/a", "runs/b"):
        (folder / name).mkdir()
    for name in _AGENTS:
        shutil.copy(TORCH_SAMPLE, folder / name)
    shutil.copy(f"{TORCH_SAMPLE}.ckpttool.json", folder / "agent.pt.ckpttool.json")
    shutil.copy(f"{TF_SAMPLE}.index", folder / "lost" / "ckpt-1.index")
    contents = {
        "empty.pt": b"",
        "picture.png": PNG,
        "zips.zip": zipped({"a.zip": zipped({"b.txt": b"text"})}),
        "photos.zip": zipped({"one.png": PNG, "two.png": PNG}),
        "photos.tgz": gzip.compress(bytes(1024), mtime=0),
        "train.py": b"import torch\n",
        "returns.csv": b"episode,return\n0,-120.5\n",
        "pointer.pt": LFS.encode(),
        "page.pt": HTML.encode(),
        "cut.pt": TORCH_SAMPLE.read_bytes()[:5000],
        "x.safetensors": bytes([8, *bytes(7)]) + b'{"a":1}',
        "log.txt": b"hello",
        "bad.toml": b"x = [",
        "returns.json": b"[]",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "link.pt").symlink_to("gone.pt")
    networks = {
        "q.npz": {"q_net.0": (8, 4), "q_net.2": (2, 8)},
        "branch.npz": {"trunk": (8, 3), "steer": (1, 8), "gas": (1, 8)},
    }
    for name, sizes in networks.items():
        save(torch_tree(dense(**sizes)), str(folder / name))
    arrays = dense(pi=(2, 3))
    for name in ("weights.npz", "old.npz"):
        save(torch_tree(arrays), str(folder / name))
    save(torch_tree({"conv.weight": np.ones((2, 3, 3, 3), np.float32)}), str(folder / "vision.npz"))
    optimizer = {"state.0.exp_avg": np.ones(3, np.float32), "state.0.exp_avg_sq": np.ones(3, np.float32)}
    save(torch_tree(optimizer), str(folder / "optimizer.pt"))
    return folder


def require_next_step(ran: Ran) -> None:
    """Assert that a command was refused in one sentence, with a next step."""
    assert ran.status == 2, ran.out
    assert not ran.out
    lines = ran.err.splitlines()
    assert lines[0].startswith("ckpttool: "), ran.err
    assert len(lines) == 2, ran.err
    assert lines[1].startswith("hint: "), ran.err
    assert not lines[0].startswith("ckpttool: unexpected ") or "argument" in lines[0], ran.err
    assert len(ran.err) < 3 * 160, ran.err
    assert ran.err.replace("\n", "").isprintable()


def test_no_mistake_is_listed_twice() -> None:
    assert len(ROWS) >= 120
    for column in ("mistake", "command"):
        assert len({row[column] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row["mistake"] for row in ROWS])
def test_a_command_in_a_hint_is_not_refused_like_the_first(row: dict[str, str], home: Path) -> None:
    ran = in_process(*shlex.split(row["command"]), cwd=home)
    refusals.follow(ran.err, home, in_process)


@pytest.mark.parametrize("row", ROWS, ids=[row["mistake"] for row in ROWS])
def test_a_wrong_usage_leads_on(row: dict[str, str], home: Path, golden: Golden) -> None:
    if row["command"].startswith("eval"):
        pytest.importorskip("gymnasium")
    before = sorted(home.rglob("*"))
    ran = in_process(*shlex.split(row["command"]), cwd=home)
    golden.replace(str(home), "HOME")
    golden(f"$ ckpttool {row['command']}\n{ran.err}")
    require_next_step(ran)
    assert sorted(home.rglob("*")) == before


def refused_call(call: str) -> str | None:
    """Return the sentence and the hint of a refused call, None of one that is not."""
    try:
        eval(call, {"ckpttool": ckpttool})
    except ckpttool.CkpttoolError as error:
        return f"{error} {error.hint}"
    except TypeError as error:  # of other keywords than the function's, or of text for a number
        known = re.search("unexpected keyword|missing 1 required|not supported between", str(error))
        if known is None:
            raise
    return None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("row", ROWS, ids=[row["mistake"] for row in ROWS])
def test_a_wrong_call_leads_on_in_python(
    row: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong in Python too names no option; the calls in its hint are not refused alike."""
    monkeypatch.chdir(home)
    call = keywords._translate_command(f"ckpttool {row['command']}")
    if not call.startswith("ckpttool.") or "no JSON" in row["mistake"]:
        pytest.skip("no call")
    error = str(refused_call(call))
    assert not refusals.OPTION.search(error)
    for words in refusals.calls_of(error):
        assert refused_call(words) != error
