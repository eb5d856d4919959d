"""Makes the files of the matrix, runs the commands, and lets the frameworks judge what was written."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import warm
from tests.conftest import KERAS_2, ROOT, Ran, in_process
from tests.everyday.cases import CASES, COLUMNS, ENVIRONMENT, Case
from tests.everyday.verdicts import DifferenceError

RESULTS = Path(__file__).with_name("results.tsv")
SUFFIXES = {
    "torch": ".pt",
    "tf": "",
    "keras": ".weights.h5",
    "safetensors": ".safetensors",
    "npz": ".npz",
    "onnx": ".onnx",
}
ENVIRONMENTS = {
    "torch": {},
    "tensorflow": {"EVERYDAY_KERAS": "keras"},
    "keras_2": {"EVERYDAY_KERAS": "tf_keras", "TF_USE_LEGACY_KERAS": "1"},
}
# A hint to play what a conversion writes.
COPY = r"ckpttool convert \S+ OUT\.pt --to torch"
# What stands before the lines that a conversion prints.
LOAD = "load: "
# What a program that judges or makes files begins with.
PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
sys.path.append({keras_2!r})
from tests.everyday import {module} as module
{call}
"""


@dataclass(frozen=True)
class Cell:
    """One command on one file.

    Args:
        state: works, refused, fails (crash or unloadable) or WRONG.
        sentence: Why it does not work, as the command or the framework puts it.
        options: The options beyond the first try, which its message named.
    """

    case: str
    column: str
    state: str
    sentence: str = ""
    options: tuple[str, ...] = ()


def run(cases: Sequence[Case], columns: Sequence[str], folder: Path) -> list[Cell]:
    """Return the cells of these cases and columns; the files lie in the folder."""
    make(cases, folder)
    return judged([(case, column) for case in cases for column in columns if case.applies(column)], folder)


def judged(chosen: Iterable[tuple[Case, str]], folder: Path) -> list[Cell]:
    """Return these cells; the files lie in the folder already."""
    cells, results = [], []
    for case, column in chosen:
        cell = _command(case, column, folder / case.name)
        if cell.state == "works" and column in SUFFIXES:
            results.append((case, column, "--part" in cell.options))
        cells.append(cell)
    faults = _cells(results, folder)
    return [faults.get((c.case, c.column), c) if c.state == "works" else c for c in cells]


def make(cases: Sequence[Case], folder: Path) -> None:
    """Make the files, each framework in processes of its own."""
    for side in ENVIRONMENTS:
        names = [case.name for case in cases if case.side == side]
        if names:
            _child(side, f"{side}_files", f"module.make({names!r}, {str(folder)!r})", folder)


def _child(side: str, module: str, call: str, folder: Path) -> str:
    framework = "torch" if side == "torch" else "tensorflow"
    program = PROGRAM.format(root=str(ROOT), keras_2=str(KERAS_2), module=module, call=call)
    status, output = warm.run(framework, program, folder, {**os.environ, **ENVIRONMENTS[side]})
    if status:
        raise RuntimeError(f"{module} ended with {status}:\n{output[-4000:]}")
    return output


# --- The commands ---------------------------------------------------------------------------------------


def target(case: Case, column: str, folder: Path) -> Path:
    """Return where the result of a column is written."""
    return folder / f"to_{column}{SUFFIXES[column]}"


def loading(output: Path) -> Path:
    """Return where the lines that load a result are kept, as the conversion printed them."""
    return output.with_name(f"{output.name}.load.py")


def _command(case: Case, column: str, folder: Path) -> Cell:
    """Run the command of a cell, again with the options, or after the command, that its message names."""
    extra: tuple[str, ...] = ENVIRONMENT if column in {"onnx", "eval"} else ()
    ran = _run(case, column, folder, extra)
    path, first = case.path, ()
    if ran.status and re.search(COPY, ran.err + ran.out) and column in {"onnx", "eval"}:
        # The hint names a command: what it writes is played in the file's place.
        copied = in_process("convert", folder / case.path, folder / "copy.pt", "--to", "torch", "--force")
        if copied.status == 0:
            path, first = "copy.pt", ("convert", "--to", "torch")
            ran = _run(case, column, folder, extra, path)
    more = _hinted(ran, case) if column in {"onnx", "eval"} else case.options
    if ran.status and more and more[0] in ran.out + ran.err:
        ran = _run(case, column, folder, (*extra, *more), path)
        facts = _hinted(ran, case)
        if ran.status and facts and column in {"onnx", "eval"} and more[0] == "--network":
            more = (*more, *facts)
            ran = _run(case, column, folder, (*extra, *more))
    else:
        more = ()
    more = (*first, *more)
    if ran.status == 0 and column in {"inspect", "eval"}:
        return _looked(case, column, folder, ran, more)
    if ran.status == 0 and case.differs and column in {"torch", "tf", "keras"}:
        own = (case.side == "torch") == (column == "torch")
        if not own and case.differs not in ran.out + ran.err:
            return Cell(case.name, column, "WRONG", "no note says that updates differ", more)
    if ran.status == 0:
        return Cell(case.name, column, "works", "", more)
    sentence = " ".join(_sentence(ran).replace(f"{folder}/", "").split())
    crashed = ran.status not in {1, 2} or "Traceback" in ran.err or "unexpected" in ran.err
    return Cell(case.name, column, "fails" if crashed else "refused", sentence, more)


def _hinted(ran: Ran, case: Case) -> tuple[str, ...]:
    """Return the options that the hint names; no hint names the values of a case's own facts."""
    hint = "".join(re.findall(r"(?:hint: |\"hint\": \").*", ran.err + ran.out))
    name = re.search(r"(?:use )?(--network \w+)", hint)
    stated = [pair for pair in zip(case.facts[::2], case.facts[1::2], strict=True) if pair[0] in hint]
    return tuple(name[1].split()) if name else tuple(word for pair in stated for word in pair)


def _run(case: Case, column: str, folder: Path, options: Iterable[str], path: str = "") -> Ran:
    source = folder / (path or case.path)
    if column == "inspect":
        return in_process("inspect", source, "--json")
    if column == "eval":
        return in_process("eval", source, "--episodes", 2, "--json", *options)
    target_path = target(case, column, folder)
    ran = in_process("convert", source, target_path, "--to", column, "--force", *options)
    lines = [line.removeprefix(LOAD) for line in ran.out.splitlines() if line.startswith(LOAD)]
    loading(target_path).write_text("\n".join(lines), encoding="utf-8")
    return ran


def _sentence(ran: Ran) -> str:
    """Return the error, or what was not mapped."""
    lines = ran.err.strip().splitlines()
    if not lines and ran.out.startswith("{"):
        error = json.loads(ran.out).get("error") or {}
        lines = [error.get("message", ""), f"hint: {error['hint']}" if error.get("hint") else ""]
    unmapped = [line for line in ran.out.splitlines() + lines if line.startswith(("unmapped", "missing"))]
    if unmapped:
        return f"exit 1: {'; '.join(unmapped[:3])}" + ("; ..." if len(unmapped) > 3 else "")
    return " ".join(line.removeprefix("ckpttool: ") for line in lines)[:400] or f"exit {ran.status}"


def _looked(case: Case, column: str, folder: Path, ran: Ran, options: tuple[str, ...]) -> Cell:
    """Judge what `inspect` or `eval` printed."""
    with np.load(folder / "reference.npz") as file:
        reference = dict(file)
    document = json.loads(ran.out)
    if column == "eval":
        if "evaluations" in document:  # of a folder: the newest is what was made last
            document = max(document["evaluations"], key=lambda row: row["step"] or 0)
        returns, expected = np.array(document["returns"]), reference["returns"]
        if not np.allclose(returns, expected, rtol=1e-3):
            return Cell(case.name, column, "WRONG", f"returns {returns} instead of {expected}", options)
    else:
        elements = sum(int(np.prod(t["shape"])) for t in document["tensors"] if t["role"] == "parameter")
        if elements < int(reference["parameters"]):
            return Cell(
                case.name, column, "WRONG", f"{elements} parameters of {reference['parameters']}", options
            )
    return Cell(case.name, column, "works", "", options)


# --- The referees ---------------------------------------------------------------------------------------


def _cells(results: Sequence[tuple[Case, str, bool]], folder: Path) -> dict[tuple[str, str], Cell]:
    """Return the cells that a framework finds wanting."""
    by_side: dict[str, list[tuple[str, str, str, bool]]] = {}
    for case, column, part in results:
        side = "torch"
        if column == "tf":
            # A file of a Sequential names no edges of an object graph: those of Keras 3 are written.
            side = "keras_2" if case.side == "keras_2" and not case.path.endswith(".h5") else "tensorflow"
        elif column == "keras":
            side = "tensorflow"
        path = str(target(case, column, folder / case.name))
        by_side.setdefault(side, []).append((case.name, column, path, part))
    cells = {}
    for side, jobs in by_side.items():
        module = "torch_referee" if side == "torch" else "keras_referee"
        call = f"from tests.everyday.matrix import judge\njudge(module.judge, {jobs!r})"
        for line in _child(side, module, call, folder).splitlines():
            if line.startswith('{"case"'):
                cell = Cell(**{k: tuple(v) if k == "options" else v for k, v in json.loads(line).items()})
                cells[cell.case, cell.column] = cell
    return cells


def judge(referee: Any, requested: Sequence[tuple[str, str, str, bool]]) -> None:
    """Print, in a child, a line of JSON for each result that does not load or is wrong.

    Of a part, which is the network alone, there are outputs to compare and no updates.
    """
    from tests.everyday.verdicts import LoadingError

    named = {case.name: case for case in CASES}
    for name, column, path, part in requested:
        with np.load(Path(path).parent / "reference.npz") as file:
            reference = {n: file[n] for n in file.files if not (part and n.startswith("continued"))}
        try:
            referee(named[name], column, path, reference, loading(Path(path)).read_text(encoding="utf-8"))
        except LoadingError as error:
            cell = Cell(name, column, "fails", f"written, but does not load: {_one_line(error)}")
        except DifferenceError as error:
            cell = Cell(name, column, "WRONG", str(error))
        except Exception as error:  # noqa: BLE001  # a referee's own failure is shown, not hidden
            cell = Cell(name, column, "fails", f"referee: {type(error).__name__}: {_one_line(error)}")
        else:
            continue
        print(json.dumps(asdict(cell)), flush=True)  # noqa: T201  # the parent reads it


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# --- Recorded results -----------------------------------------------------------------------------------


def record(cells: Sequence[Cell]) -> None:
    """Write the cells, one line each."""
    lines = ["\t".join((c.case, c.column, c.state, " ".join(c.options), c.sentence)) for c in cells]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded() -> dict[tuple[str, str], Cell]:
    """Return the recorded cells by case and column."""
    cells = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        case, column, state, options, sentence = line.split("\t")
        cells[case, column] = Cell(case, column, state, sentence, tuple(options.split()))
    return cells


def changes(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each cell whose state is not the recorded one."""
    before = recorded()
    pairs = [(before.get((cell.case, cell.column)), cell) for cell in cells]
    return [
        f"{new.case} {new.column}: {old.state if old else 'new'} -> {new.state} {new.sentence}"
        for old, new in pairs
        if old is None or (old.state, old.options) != (new.state, new.options)
    ]


# --- The command line -----------------------------------------------------------------------------------


def main() -> None:
    """Run the matrix and print what does not work; the page is made by docs/generate.py."""
    parser = argparse.ArgumentParser(prog="python -m tests.everyday", description=__doc__)
    parser.add_argument("--only", default="*", help="patterns of the cases' names, separated by commas")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if a state is not that of {RESULTS.name}"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="leave the files in this folder")
    options = parser.parse_args()
    patterns = options.only.split(",")
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    folder = Path(options.keep or tempfile.mkdtemp(prefix="everyday"))
    folder.mkdir(exist_ok=True)
    cells = run(cases, options.columns.split(","), folder)
    for cell in cells:
        if cell.state != "works":
            print(f"{cell.case:24} {cell.column:12} {cell.state:8} {cell.sentence}")  # noqa: T201
    states = [cell.state for cell in cells]
    counts = {state: states.count(state) for state in ("works", "refused", "fails", "WRONG")}
    print(len(cells), "cells:", counts, f"{counts['works'] / len(cells):.1%}")  # noqa: T201
    if options.record:
        record(cells)
    if not options.keep:
        shutil.rmtree(folder)
    different = changes(cells) if options.check else []
    print(*different, sep="\n")  # noqa: T201
    sys.exit(bool(counts["WRONG"] or different))
