"""What each command prints about the samples, as golden texts: tests/golden/golden_commands.txt."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ckpttool.cli.app import COMMANDS
from tests.conftest import ROOT, Ran, in_process
from tests.golden_texts import Golden

TF, TORCH = "sample_ckpts/td3_pendulum_tf/ckpt-15000", "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt"
EARLIER = "sample_ckpts/td3_pendulum_tf/ckpt-12500"

COMMAND_LINES = {
    "inspect": ("inspect", TF),
    "inspect-depth": ("inspect", TORCH, "--depth", 2),
    "inspect-names": ("inspect", TORCH, "--names", "--depth", 1),
    "inspect-folder": ("inspect", "sample_ckpts/td3_pendulum_tf", "--depth", 1),
    "digest": ("digest", TORCH, "--glob", "actor/**"),
    "stats": ("stats", TORCH, "--glob", "actor/**"),
    "diff": ("diff", TF, EARLIER, "--glob", "policy/actor/**"),
    "doctor": ("doctor", TF),
    "check": ("check", "sample_ckpts"),
    "convert": ("convert", TF, "TMP/agent.pt"),
    "convert-dry-run": ("convert", TORCH, "TMP/agent", "--to", "tf", "--dry-run"),
    "textconv": ("textconv", TORCH),
    "formats": ("formats",),
    "layouts": ("layouts",),
    "limits": ("limits",),
    "schema": ("schema",),
}
# Numbers that depend on the machine: rounding of a matrix product, speed, sizes of pages.
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


def run(*arguments: object, folder: Path) -> Ran:
    """Run a command in the checkout; TMP in an argument is the test's folder."""
    return in_process(*(str(argument).replace("TMP", str(folder)) for argument in arguments), cwd=ROOT)


def without_numbers(text: str) -> str:
    return re.sub(" +", " ", NUMBER.sub("N", text))


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_command(name: str, tmp_path: Path, golden: Golden) -> None:
    ran = run(*COMMAND_LINES[name], folder=tmp_path)
    assert ran.status in (0, 1)
    golden(ran)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_verify(tmp_path: Path, golden: Golden, shared_workers: None) -> None:
    """A conversion passes, another run's agent fails."""
    assert run("convert", TF, "TMP/agent.pt", folder=tmp_path).status == 0
    for other, status in ((f"{tmp_path}/agent.pt", 0), (TORCH, 1)):
        ran = run("verify", TF, other, folder=tmp_path)
        assert ran.status == status
        golden(without_numbers(ran.out.replace(str(tmp_path), "TMP")))


@pytest.mark.environment
def test_eval(tmp_path: Path, golden: Golden) -> None:
    ran = run("eval", TORCH, "--env", "Pendulum-v1", "--episodes", 2, folder=tmp_path)
    assert ran.status == 0
    golden(without_numbers(ran.out))


class _Text(HTMLParser):
    """Collects the text of a page, without scripts, styles and drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "svg")
        if tag == "section":
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(" ".join(data.split()))


def test_report(tmp_path: Path, golden: Golden) -> None:
    """The sentences, headings and labels of the page; names and numbers of tensors are left out."""
    ran = run("report", TF, EARLIER, "--out", "TMP/change.html", folder=tmp_path)
    assert ran.status == 0
    golden(_page_words(tmp_path / "change.html"))
    # A page of a run, with a layer that vanishes and a checkpoint that cannot be read.
    (tmp_path / "run").mkdir()
    for step, weights in enumerate((1.0, 0.0, 2.0), 1):
        np.savez(tmp_path / "run" / f"ckpt-{step}.npz", **{"layer/weight": np.full((2, 2), weights)})
    (tmp_path / "run" / "ckpt-3.npz").write_bytes(b"PK\3\4")
    assert run("report", "TMP/run", "--out", "TMP/run.html", folder=tmp_path).status == 0
    golden(_page_words(tmp_path / "run.html"))


def _page_words(file: Path) -> str:
    page = _Text()
    page.feed(file.read_text(encoding="utf-8"))
    words = dict.fromkeys(
        line for line in page.lines if len(re.findall("[A-Za-z]{2,}", line)) > 1 and "/" not in line
    )
    return without_numbers("\n".join(words))


@pytest.mark.parametrize("name", ["", *(command.name for command in COMMANDS)])
def test_help(name: str, tmp_path: Path, golden: Golden) -> None:
    ran = run(*([name] if name else []), "--help", folder=tmp_path)
    assert ran.status == 0
    golden(ran.out)
