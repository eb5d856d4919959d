"""What lies beside a checkpoint and is read with it: sidecars and settings are data, whatever they say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.conversion.write import save
from tests.conftest import TORCH_SAMPLE
from tests.hostile.case import BAIT, Case
from tests.trees import torch_tree

_LINE = "sidecars and configs are data"
_MODULE = "open('owned', 'w').close()\n"


def _with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    """Return the maker of the sample whose sidecar was changed, and of a module that acts when imported."""

    def make(folder: Path) -> Path:
        path = Path(shutil.copy(TORCH_SAMPLE, folder / "agent.pt"))
        record = json.loads(Path(f"{TORCH_SAMPLE}.ckpttool.json").read_text())
        change(record)
        Path(f"{path}.ckpttool.json").write_text(json.dumps(record))
        (folder / "hostile_module.py").write_text(_MODULE)
        return path

    return make


def _beside(data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = Path(shutil.copy(TORCH_SAMPLE, folder / "agent.pt"))
        Path(f"{path}.ckpttool.json").write_bytes(data)
        return path

    return make


def _sparse(folder: Path) -> Path:
    path = _beside(b'{"schema": 1}')(folder)
    os.truncate(f"{path}.ckpttool.json", 1 << 34)
    return path


def _linked(folder: Path) -> Path:
    path = Path(shutil.copy(TORCH_SAMPLE, folder / "agent.pt"))
    Path(f"{path}.ckpttool.json").symlink_to(f"../{BAIT}")
    return path


def _fifo(folder: Path) -> Path:
    path = Path(shutil.copy(TORCH_SAMPLE, folder / "agent.pt"))
    os.mkfifo(f"{path}.ckpttool.json")
    return path


def _rsl_rl(settings: str, link: bool = False) -> Callable[[Path], Path]:
    """Return the maker of a run of rsl_rl, whose settings lie beside its checkpoints (libraries/rsl_rl.py)."""  # noqa: E501

    def make(folder: Path) -> Path:
        rng = np.random.default_rng(0)
        sizes = {"actor": (3, 4, 2), "critic": (3, 4, 1)}
        entries: dict[str, Any] = {"iter": 100, "infos": None, "model_state_dict/std": np.ones(2, np.float32)}
        for name, (inputs, hidden, outputs) in sizes.items():
            for at, (rows, columns) in enumerate(((hidden, inputs), (outputs, hidden))):
                weight = rng.normal(size=(rows, columns)).astype(np.float32)
                entries[f"model_state_dict/{name}.{2 * at}.weight"] = weight
                entries[f"model_state_dict/{name}.{2 * at}.bias"] = np.zeros(rows, np.float32)
        save(torch_tree(entries), str(folder / "model_100.pt"))
        (folder / "params").mkdir()
        (folder / "hostile_module.py").write_text(_MODULE)
        if link:
            (folder / "params" / "agent.yaml").symlink_to(f"../../{BAIT}")
        else:
            (folder / "params" / "agent.yaml").write_text(settings)
        return folder / "model_100.pt"

    return make


_TAGS = """policy: {activation: elu}
x: !!python/object/apply:os.getcwd []
y: !!python/name:hostile_module.z ''
z: !!python/object/new:subprocess.Popen [[true]]
"""
_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)

# What a sidecar says is read by whatever runs or maps an agent: inspect and digest look at the weights alone.
CASES = (
    Case(
        "beside-env-module",
        _LINE,
        _with(lambda d: d["env"].update(id="hostile_module:X-v0")),
        0,
        0,
        0,
        eval=2,
    ),
    Case("beside-env-dotted", _LINE, _with(lambda d: d["env"].update(id="os.getcwd")), 0, 0, 0, eval=2),
    Case("beside-env-traversal", _LINE, _with(lambda d: d["env"].update(id="../../x-v0")), 0, 0, 0, eval=2),
    Case("beside-env-escape", _LINE, _with(lambda d: d["env"].update(id="\x1b[2Jx\n-v0")), 0, 0, 0, eval=2),
    Case(
        "beside-env-kwargs", _LINE, _with(lambda d: d["env"].update(kwargs={"xml_file": "/etc/passwd"})), 0, 0
    ),
    Case("beside-env-no-object", _LINE, _with(lambda d: d.update(env="Pendulum-v1")), 0, 0),
    Case("beside-other-weights", _LINE, _with(lambda d: d.update(target_sha256="0" * 64)), 0, 0, eval=2),
    Case(
        "beside-head-code",
        _LINE,
        _with(lambda d: d.update(head="__import__('os').getcwd()")),
        0,
        0,
        0,
        eval=2,
    ),
    Case(
        "beside-head-template", _LINE, _with(lambda d: d.update(head="{{7*7}}{0.__class__}")), 0, 0, 0, eval=2
    ),
    Case("beside-activation-code", _LINE, _with(lambda d: d.update(activations=["os.getcwd"] * 2)), 0, 0, 0),
    Case("beside-bounds-infinite", _LINE, _with(lambda d: d.update(action_high=[1e999])), 0, 0, eval=2),
    Case("beside-bounds-crossed", _LINE, _with(lambda d: d.update(action_high=[-3.0])), 0, 0, eval=2),
    Case("beside-bounds-huge", _LINE, _with(lambda d: d.update(action_high=[10**400])), 0, 0, eval=2),
    Case("beside-schema", _LINE, _with(lambda d: d.update(schema=99)), 0, 0, eval=2),
    Case("beside-not-json", _LINE, _beside(b"import os"), 0, 0, eval=2),
    Case("beside-not-utf-8", _LINE, _beside(b'{"schema": 1, "x": "\xff"}'), 0, 0),
    Case("beside-no-object", _LINE, _beside(b"[]"), 0, 0),
    Case("beside-empty", _LINE, _beside(b""), 0, 0),
    Case("beside-nested", _LINE, _beside(b"[" * 100_000), 0, 0),
    Case("beside-5000-digits", _LINE, _beside(b'{"schema": ' + b"1" * 5000 + b"}"), 0, 0),
    Case("beside-16-GiB", _LINE, _sparse, 0, 0),
    Case("beside-link-out", _LINE, _linked, 0, 0, eval=2),
    Case("beside-fifo", _LINE, _fifo, 0, 0, 0),
    Case("beside-yaml-tags", _LINE, _rsl_rl(_TAGS), 0, 0, 0),
    Case("beside-yaml-laughs", _LINE, _rsl_rl(_LAUGHS), 0, 0, None),
    Case("beside-yaml-nested", _LINE, _rsl_rl("[" * 50_000), 0, 0),
    Case("beside-yaml-link-out", _LINE, _rsl_rl("", link=True), 0, 0),
)
