"""Converts ordinary files beyond the matrix and compares every tensor and moment with what the source had.

usage: python -m tests.everyday.more [--only PATTERN,...] [--side torch|tensorflow] [--all]

A conversion is right if every parameter whose axes are known stands in the result under a name that ends as
its own, and the moments of its optimizer are those of that parameter. A refusal names options in its hint or
its notes: those are tried once.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpttool.formats import open_checkpoint
from tests.conftest import Ran, in_process
from tests.everyday.cases import TARGETS
from tests.everyday.matrix import SUFFIXES, _child

_OPTION = re.compile(r"--fold-weight-norm|--(?:flatten|optimizer|weights|part) (?:'[^']*'|[^\s;,)]+)")
_SLOTS = {
    "exp_avg": ("m", "exp_avg"),
    "exp_avg_sq": ("v", "exp_avg_sq"),
    "square_avg": ("rms", "square_avg", "v", "accumulated_grad"),
    "sum": ("accumulator", "sum"),
}


class WrongError(Exception):
    """The result holds other numbers than the source."""


def verdict(folder: Path, to: str) -> tuple[str, str]:
    """Return works, opt, refused, crash or WRONG, and why."""
    source = (folder / "path").read_text()
    target = folder / f"to_{to}{SUFFIXES[to]}"
    with np.load(folder / "truth.npz") as file:
        facts = dict(file)
    ran = in_process("convert", source, target, "--to", to, "--force")
    state, options = "works", ""
    for _ in range(6):
        more = option(ran.out + ran.err, folder.name) if ran.status in {1, 2} else ""
        if not more or more in options:
            break
        options = f"{options} {more}".strip()
        ran = in_process("convert", source, target, "--to", to, "--force", *shlex.split(options))
        state = "opt"
    if ran.status not in {0, 1, 2} or "Traceback" in ran.err or "unexpected" in ran.err:
        return "crash", ran.err[-300:]
    if ran.status:
        return "refused", _reason(ran)
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", ran.out + ran.err):
        return "WRONG", "control characters"
    if "axes stay as" in ran.out + ran.err:
        return "opt", "a note says that axes are those of the source"
    try:
        compare(str(target), facts, to, part="--part" in options)
    except WrongError as error:
        return "WRONG", f"{error} {options}"
    return state, options


def option(text: str, name: str) -> str:
    """Return the option that a message names; of kinds the one that the file's name tells."""
    # The number of heads stands in the program alone: MultiheadAttention(8, 2).
    kinds = re.findall(r"--kind '([^'=]+)=([\w:]+)'", text.replace(":HEADS", ":2"))
    if kinds:
        layer = kinds[0][0]
        able = [kind for title, kind in kinds if title == layer]
        fitting = [
            kind
            for kind in able
            if kind in f"{name} {layer}" or (kind == "embedding" and re.search("tied|sparse", name))
        ]
        return f"--kind '{layer}={(fitting or able)[0]}'"
    match = _OPTION.search(text)
    return match[0] if match else ""


def _reason(ran: Ran) -> str:
    lines = [
        line
        for line in (ran.out + ran.err).splitlines()
        if re.match(r"unmapped|missing|note|ckpttool|hint", line)
    ]
    return " / ".join(lines)[:600]


def compare(target: str, facts: dict[str, np.ndarray], to: str, *, part: bool) -> None:
    """Raise WrongError unless every parameter of the source is in the target, with its own moments."""
    tree = open_checkpoint(target).tree
    result: dict[tuple[int, ...], list[tuple[object, np.ndarray]]] = {}
    slots: dict[object, list[tuple[str, np.ndarray]]] = {}
    for path, leaf in tree.tensors():
        if leaf.dtype in {"string", "variant", "resource"}:
            continue
        if leaf.slot is not None and leaf.of is not None:
            slots.setdefault(leaf.of, []).append((str(leaf.slot), np.asarray(leaf.array(), np.float64)))
        elif leaf.dtype != "bool" and "int" not in leaf.dtype and "complex" not in leaf.dtype:
            result.setdefault(leaf.shape, []).append((path, np.asarray(leaf.array(), np.float64)))
    plain = to in {"safetensors", "npz"}
    lost = []
    for key, fact in facts.items():
        kind, _, title = key.partition("|")
        parameter = title.partition("|")[2]
        framework = {"weight": "torch", "turned": "tf"}.get(kind)
        if framework is None or (not plain and (framework == "torch") != (to == "torch")):
            continue
        if plain and framework == "tf":
            continue  # either order of axes may stand in a file of arrays
        shapes = [fact, facts[f"turned|{title}"]] if plain else [fact]
        same = [
            path
            for shape in shapes
            for path, array in result.get(shape.shape, ())
            if np.allclose(array, shape, rtol=1e-2 if array.dtype == np.float16 else 1e-6, atol=1e-8)
        ]
        if not same:
            lost.append(title)
            continue
        del parameter
        moments = [n for n in facts if n.endswith(f"|{title}") and n.partition("|")[0] in _SLOTS]
        if plain or not moments or not slots:
            continue
        for name in moments:
            slot = name.partition("|")[0]
            value = facts[name if to == "torch" else f"turned:{name}"]
            mine = [array for path in same for kind_, array in slots.get(path, ()) if kind_ in _SLOTS[slot]]
            if not any(a.shape == value.shape and np.allclose(a, value, rtol=1e-5) for a in mine):
                raise WrongError(f"{slot} of {title} is not in the result")
    if lost and not part:
        raise WrongError(f"{len(lost)} parameters are not in the result, e.g. {lost[0]}")


def folders(side: str, names: list[str], path: Path) -> Iterator[tuple[str, Path]]:
    """Make the files of a side, and yield their folders."""
    module = f"more_{side}"
    for line in _child(side, module, f"module.make({names!r}, {str(path)!r})", path).splitlines():
        if line.startswith("unmade"):
            print(line)  # noqa: T201
    for name in names:
        folder = path / name.replace(":", "_").replace("+", "_")
        if (folder / "path").exists():
            yield name, folder


def listed(side: str, folder: Path) -> list[str]:
    """Return the names of a side's files."""
    output = _child(side, f"more_{side}", "print('names ' + ' '.join(module.MAKERS))", folder)
    return next(line for line in output.splitlines() if line.startswith("names ")).split()[1:]


def main() -> int:
    """Print what does not work and the rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*")
    parser.add_argument("--side", default="torch,tensorflow")
    parser.add_argument("--to", default=",".join(TARGETS))
    parser.add_argument("--keep")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    home = Path(options.keep or tempfile.mkdtemp(prefix="more"))
    home.mkdir(exist_ok=True)
    patterns = options.only.split(",")
    for side in options.side.split(","):
        names = [n for n in listed(side, home) if any(fnmatch.fnmatch(n, p) for p in patterns)]
        for name, folder in folders(side, names, home):
            for to in options.to.split(","):
                state, why = verdict(folder, to)
                counts[state] += 1
                if state not in {"works", "opt"} or options.all:
                    print(f"{name:34} {to:11} {state:8} {why}", flush=True)  # noqa: T201
    total = sum(counts.values())
    print(total, dict(counts), f"{(counts['works'] + counts['opt']) / max(total, 1):.1%}")  # noqa: T201
    return int(bool(counts["WRONG"] or counts["crash"]))


if __name__ == "__main__":
    sys.exit(main())
