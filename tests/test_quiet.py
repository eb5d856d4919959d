"""--quiet: rows, findings and what was written; no sums and verdicts, no notes, no next steps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process

SIDECAR = f"{TORCH_SAMPLE}.ckpttool.json"
HEAD = r" +min +max +mean +std zeros\n"
DIGEST = "[0-9a-f]{64}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiet")
    np.savez(folder / "nan.npz", a=np.array([np.nan, 1.0]))
    np.savez(folder / "one.npz", a=np.array([2.0, 1.0]))
    (folder / "steps").mkdir()
    for step in (1, 2):
        np.savez(folder / "steps" / f"step-{step}.npz", a=np.zeros(2))
    return folder


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("inspect one.npz", 0, r" +parameters +size\na +float64\[2\].*\n"),
        ("inspect one.npz --graph one.dot", 0, r"wrote one\.dot\n"),
        ("inspect steps", 0, r"step +size .*\n( +\d .*npz\n){2}"),
        ("digest one.npz", 0, rf"{DIGEST}  a\n\n{DIGEST}  one\.npz\n"),
        (f"digest one.npz --check {SIDECAR}", 1, rf"{DIGEST}  a\n\n{DIGEST}  one\.npz\ndiffers: .*\n"),
        ("stats one.npz", 0, rf"{HEAD}a .*\n"),
        ("stats nan.npz", 1, rf"{HEAD}a .*\na: 1 of 2 is NaN\n"),
        ("diff one.npz one.npz", 0, ""),
        ("diff nan.npz one.npz", 1, r"a: 1 of 2 differ\n    nan -> 2 at \[0\]\n    largest .*\n"),
        (
            f"diff {TORCH_SAMPLE} {TF_SAMPLE} --glob critic/q2/0/bias",
            1,
            r"critic/q2/0/bias: .*\n(    .*\n){2}",
        ),
        ("doctor one.npz", 0, ""),
        ("doctor nan.npz", 1, r"numbers: a: 1 of 2 is NaN\n    fix: .*\n"),
        ("check one.npz", 0, ""),
        ("check one.npz nan.npz", 1, r"nan\.npz: numbers: a: 1 NaN of 2 numbers\n"),
        ("convert one.npz one.safetensors", 0, rf"wrote one\.safetensors\nsha256 {DIGEST}\n"),
        ("convert one.npz x.pt --dry-run", 0, r"a\n    -> a  keep  \[2\]\n"),
        ("report one.npz --out one.html", 0, r"wrote one\.html\n"),
    ],
)
def test_only_what_was_asked_for_is_printed(command: str, status: int, message: str, folder: Path) -> None:
    ran = in_process(*command.split(), "--quiet", cwd=folder)
    assert ran.status == status, ran.err
    assert re.fullmatch(message, ran.out), ran.out
