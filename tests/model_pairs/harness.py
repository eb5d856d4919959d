"""Converts every model of one framework into its twin of the other, and compares what the twin computes.

Each framework runs in processes of its own, many models in one. The command's hint is followed where it
refuses; what it writes, or fills, must then compute the source's outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import math
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import warm
from tests.conftest import ROOT
from tests.model_pairs import programs as orders
from tests.model_pairs.programs import PROGRAMS, Program, program

RESULTS = Path(__file__).with_name("results.tsv")
OUTPUTS = 2e-5
# The files of each framework's model, and what of them says in which order an image is flattened.
SOURCES = {
    "torch": {
        "pt": "torch.pt",
        "whole": "whole.pt",
        "safetensors": "torch.safetensors",
        "npz": "torch.npz",
        "script": "script.pt",
        "onnx": "model.onnx",
    },
    "keras": {
        "keras": "functional.keras",
        "h5": "functional.h5",
        "weights": "functional_.weights.h5",
        "saved_model": "saved_model",
        "npz": "keras.npz",
        "objects": "functional_checkpoint",
        "own_weights": "subclassed_.weights.h5",
        "own_objects": "subclassed_checkpoint",
    },
}
TELLING = frozenset(("keras", "h5", "saved_model", "script", "onnx"))
# How a model is filled: by `--like` with its inputs' shapes and without, by load_into, by layer kinds alone.
WAYS = ("like", "bare", "into", "kinds")
# `corrected`: the assumption was wrong, and the option that its sentence names made it right.
STATES = ("right", "assumed", "corrected", "refused", "unloadable", "WRONG", "WRONG ASSUMED", "crash")
FINE = frozenset(("right", "assumed", "corrected"))
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.model_pairs import harness
harness.{call}
"""
_MOST_HINTS = 8
# What `--kind` says of layers.
_KINDS = {"embed": "embedding", "attention": "attention:{heads}", "depthwise": "depthwise"}
# Conversions of each program in each direction, of about 15 and 25, that are recorded.
EACH = 5
_AT_ONCE = 10  # programs in one process, which has ten minutes


@dataclass(frozen=True)
class Cell:
    """One conversion to the framework `target`: its state, the options that its hints gave, and why."""

    program: str
    target: str
    source: str
    way: str
    state: str
    options: tuple[str, ...] = ()
    sentence: str = ""


# --- In a process with one framework --------------------------------------------------------------------


def side(framework: str) -> Any:
    """Return the module that builds a framework's models."""
    if framework == "torch":
        from tests.model_pairs import torch_side

        return torch_side
    from tests.model_pairs import keras_side

    return keras_side


def make(framework: str, names: Sequence[str], folder: str, sources: Sequence[str] = ()) -> None:
    """Write the files of all programs' models, or those of these sources."""
    for name in names:
        at = Path(folder, name)
        at.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            side(framework).save(name, at, sources or [*SOURCES[framework]])


def judge(target: str, chosen: Sequence[tuple[str, str, str]], folder: str) -> None:
    """Fill the models of a framework from the other's files; print a line of JSON for each conversion."""
    import warnings

    warnings.simplefilter("ignore")
    for name, source, way in chosen:
        file = Path(folder, name, SOURCES[_other(target)][source])
        cell = attempt(target, name, source, way, file)
        print(json.dumps(asdict(cell)), flush=True)  # noqa: T201  # the parent reads it


def attempt(target: str, name: str, source: str, way: str, file: Path) -> Cell:
    """Convert one file, following hints, and compare the outputs."""
    return _Try(target, name, source, way, file).cell()


def _other(framework: str) -> str:
    return "keras" if framework == "torch" else "torch"


def conversions(
    names: Sequence[str],
    target: str,
    sources: Sequence[str] = (),
    ways: Sequence[str] = WAYS,
    stride: int = 0,
) -> list[tuple[str, str, str]]:
    """Return the conversions of these programs: program, file, way.

    With `stride`, every program gets that many by files and ways in turn, and one by layer kinds at least.
    """
    conversions: list[tuple[str, str, str]] = []
    for name in names:
        able = [
            (name, source, way)
            for source in SOURCES[_other(target)]
            for way in ways
            if (not sources or source in sources) and _applies(target, name, way)
        ]
        if stride and len(able) > stride:
            first = [*PROGRAMS].index(name) * stride
            step = max(1, len(able) // stride)
            chosen = [able[(first + number * step) % len(able)] for number in range(stride)]
            by_kinds = [one for one in able if one[2] == "kinds"]
            if by_kinds and not any(one in chosen for one in by_kinds):
                chosen.append(by_kinds[first // stride % len(by_kinds)])
            able = chosen
        conversions += able
    return conversions


def _applies(target: str, name: str, way: str) -> bool:
    # Names that are others in the target are what `--like` is for.
    if way == "bare":
        return target == "torch"
    # A Keras layer that repeats another over time has a name of its own, as no layer of PyTorch has.
    other = "__" in name or any(line.op == "td_conv" for line in program(name).lines)
    return not (way == "kinds" and other)


class WrongError(Exception):
    """The twin computes something else."""


class _UnloadableError(Exception):
    """The framework does not load what was written."""


class _RefusedError(Exception):
    """The command refused; its text has the hint."""


class _Try:
    def __init__(self, target: str, name: str, source: str, way: str, file: Path) -> None:
        self.target, self.name, self.source, self.way, self.file = target, name, source, way, file
        self.attempt = program(name)
        self.side = side(target)
        self.options: list[str] = []
        self.match: list[tuple[str, str]] = []
        self.flatten: list[str] = []
        self.unflatten: list[str] = []
        self.kinds: list[str] = []
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.assumed: tuple[str, ...] = ()
        self.corrected = False
        # What the layers are called that a file only numbers.
        names = file.parent / "names.json"
        numbered = source == "objects" and names.exists()
        self.names: dict[str, str] = json.loads(names.read_text(encoding="utf-8")) if numbered else {}
        if way in ("like", "into"):
            self.shapes = tuple(self.side.shapes(self.attempt))

    def cell(self) -> Cell:
        """Convert, follow hints, judge."""
        sentence = ""
        for _ in range(_MOST_HINTS):
            try:
                self._convert()
            except WrongError as error:
                if self._correct():
                    continue
                state = "WRONG ASSUMED" if self.assumed else "WRONG"
                return self._cell(state, f"{error}; {'; '.join(self.assumed)}")
            except _UnloadableError as error:
                return self._cell("unloadable", str(error))
            except _RefusedError as error:
                sentence = str(error)
                if not self._follow(sentence):
                    return self._cell("refused", sentence)
            except Exception:  # noqa: BLE001  # a crash is a result
                return self._cell("crash", traceback.format_exc()[-300:])
            else:
                state = "corrected" if self.corrected else "assumed" if self.assumed else "right"
                return self._cell(state, "; ".join(self.assumed))
        return self._cell("refused", f"hints without an end: {sentence}")

    def _cell(self, state: str, sentence: str) -> Cell:
        text = " ".join(sentence.replace(str(self.file.parent), "").split())
        return Cell(self.name, self.target, self.source, self.way, state, tuple(self.options), text[:400])

    # --- Conversion -------------------------------------------------------------------------------------

    def _convert(self) -> None:
        from ckpttool.core import CkpttoolError

        try:
            net = self._into() if self.way == "into" else self._written()
        except CkpttoolError as error:
            raise _RefusedError(f"{error} [{error.hint or ''}]") from None
        outputs = self.side.outputs(net) if self.target == "torch" else self.side.outputs(net, self.attempt)
        style = "subclassed_" if self.source.startswith("own_") else "functional_"
        file = f"{style}outputs.npz" if self.target == "torch" else "torch_outputs.npz"
        with np.load(self.file.parent / file) as archive:
            for name, value in zip(archive.files, outputs, strict=True):
                compare(value, archive[name])

    def _into(self) -> Any:
        from ckpttool.conversion.filling import load_into

        net = self._new(5)
        options = {"flatten": self.flatten, "unflatten": self.unflatten, "kinds": self.kinds}
        args = {name: [tuple(value.rsplit("=", 1)) for value in values] for name, values in options.items()}
        # The referee is this harness: without it, the command would refuse what it finds wrong.
        done = load_into(net, str(self.file), match=self.match, shapes=self.shapes, verify=False, **args)
        self.assumed = done.report.assumed
        return net

    def _new(self, seed: int) -> Any:
        return self.side.build(self.name, seed=seed) if self.target == "torch" else self._keras(seed)

    def _keras(self, seed: int) -> Any:
        return self.side.build(self.name, self._style, seed)

    @property
    def _style(self) -> str:
        return "functional" if self.way in ("like", "into") else "subclassed"

    def _written(self) -> Any:
        from ckpttool import convert, fill

        form = "torch" if self.target == "torch" else "keras"
        target = self.file.parent / f"to_{self.source}_{self.way}.{'pt' if form == 'torch' else 'weights.h5'}"
        target.unlink(missing_ok=True)
        Path(f"{target}.ckpttool.json").unlink(missing_ok=True)
        if self.way == "kinds":
            done: Any = convert(
                str(self.file),
                str(target),
                to=form,
                layout="none",
                kinds=self.kinds,
                flatten=self.flatten,
                unflatten=self.unflatten,
                force=True,
            )
        else:
            written = _like(self.target, self.name, self.shapes, self._style)
            done = fill(
                str(self.file),
                str(target),
                written,
                to=form,
                kinds=self.kinds,
                flatten=self.flatten,
                unflatten=self.unflatten,
                match=[f"{one}={other}" for one, other in self.match],
                force=True,
                verify=False,
            )
        report = done.report
        self.assumed = tuple(report.assumed)
        if not report.complete or not target.exists():
            raise _RefusedError(
                "; ".join((*report.notes, f"unused {report.unused[:4]}, missing {report.missing[:4]}"))
            )
        try:
            if self.target == "torch":
                return self.side.load(self.name, target)
            return self.side.load(self.name, self._style, target)
        except Exception as error:  # noqa: BLE001  # whatever the framework raises
            raise _UnloadableError(str(error)[:300]) from None

    # --- Hints ------------------------------------------------------------------------------------------

    def _correct(self) -> bool:
        """Take the options that assumptions name for a model that is otherwise; say whether any is new."""
        before = len(self.options)
        text = _options("; ".join(self.assumed))
        for option, values in (("--flatten", self.flatten), ("--unflatten", self.unflatten)):
            for match_text in re.findall(rf"{option} '([^']+)'", text):
                if not any(value.rpartition("=")[0] == match_text.rpartition("=")[0] for value in values):
                    self._add(values, match_text, f"{option} {match_text}")
        self.corrected = self.corrected or len(self.options) > before
        return len(self.options) > before

    def _follow(self, text: str) -> bool:
        """Take the option that a refusal names; say whether there was a new one."""
        before, text = len(self.options), _options(text)
        if "--input-shape" in text and not self.shapes:
            self.shapes = tuple(self.side.shapes(self.attempt))
            self.options.append("--input-shape")
        for source, target in re.findall(r"--match '([^'=]+)=([^']+)'", text):
            if target != "TARGET" and len(self.options) == before:
                self._add(self.match, (source, target), f"--match {source}={target}")
        proposed = re.search(r"match=\{'([^']+)': '([^']+)'\}", text)
        if proposed:
            self._add(self.match, (proposed[1], proposed[2]), f"match {proposed[1]}={proposed[2]}")
        if "could fill" in text or "are paired" in text:
            # No pair is proposed, but a user knows which layer is which.
            for name in dict.fromkeys(line.name for line in self.attempt.lines if line.name):
                other = self.attempt.torch_names.get(name, name)
                source, target = (name, other) if self.target == "torch" else (other, name)
                source = next((key for key, known in self.names.items() if known == name), source)
                listed, _, places = text.partition("could fill")
                match = re.search(rf"[\w/]*\b{source}\b", listed)
                if "are paired" in text or (match and re.search(rf"\b{target}\b", places)):
                    source = match[0] if match else source
                    self._add(self.match, (source, target), f"--match {source}={target}")
        for option, values in (("--flatten", self.flatten), ("--unflatten", self.unflatten)):
            for title in dict.fromkeys(re.findall(rf"{option} '([^'=]+)=", text)):
                proposals = re.findall(rf"{option} '({re.escape(title)}=(?:no|[0-9,+]+))'", text)
                if any(value.startswith(f"{title}=") for value in values):
                    continue
                # A user knows what stands before and behind a layer.
                own = self.names.get(title, title)
                known = orders.parts(self.attempt, own, proposals, makes=option == "--unflatten")
                if known is None:
                    continue
                fitting = next((proposal for proposal in proposals if _parts(proposal) == known), None)
                if fitting is None and known != "no" and "places,channels" in text:
                    fitting = f"{title}={known}"
                if fitting is not None:
                    self._add(values, fitting, f"{option} {fitting}")
        lines_by_name = {line.name: line for line in self.attempt.lines if line.op in _KINDS}
        for kind in re.findall(r"--kind '([^']+)'", text)[:1]:
            title = kind.partition("=")[0]
            line = lines_by_name.get(title.rpartition("/")[2])
            # A user knows what the layer is, and how many heads it has.
            if line is not None:
                own = _KINDS[line.op].format(**line.args)
                kind = f"{title}={own}"
            self._add(self.kinds, kind, f"--kind {kind}")
        return len(self.options) > before

    def _add(self, values: list[Any], value: Any, option: str) -> None:
        if value not in values:
            values.append(value)
            self.options.append(option)


def _options(text: str) -> str:
    """Return a text with the arguments of load_into and of convert as options of the command line."""
    text = re.sub(r"(flatten|unflatten|kinds)=\['([^']+)=([^'=]+)'\]", r"\1={'\2': '\3'}", text)
    return re.sub(
        r"(flatten|unflatten|kinds)=\{'([^']+)': '([^']+)'\}",
        lambda match: f"--{match[1].replace('kinds', 'kind')} '{match[2]}={match[3]}'",
        text,
    )


def _parts(text: str) -> str:
    """Return what an option says as places,channels: the sides of an image multiplied."""
    extents = []
    for part in text.rpartition("=")[2].split("+"):
        *sides, channels = part.split(",")
        extents.append(",".join(filter(None, (str(math.prod(map(int, sides))) if sides else "", channels))))
    return "+".join(extents)


def compare(actual: np.ndarray, expected: np.ndarray) -> None:
    """Raise WrongError unless the values are equal within the tolerance."""
    if actual.shape != expected.shape:
        raise WrongError(f"shapes {actual.shape} and {expected.shape}")
    largest = float(np.max(np.abs(actual - expected))) / max(1e-3, float(np.max(np.abs(expected))))
    if not largest <= OUTPUTS:
        raise WrongError(f"outputs differ by {largest:.1%}")


def _like(target: str, name: str, shapes: Sequence[tuple[int, ...]], style: str) -> Any:
    from ckpttool.conversion import filling
    from ckpttool.networks import ModelSpec
    from tests.shared_runners import InThisProcess

    filling.ModelProcess = InThisProcess  # type: ignore[assignment,misc]
    if target == "torch":
        return ModelSpec("tests.model_pairs.torch_side:build", {"name": name, "seed": 5}, tuple(shapes))
    arguments = {"name": name, "style": style, "seed": 5}
    return ModelSpec("tests.model_pairs.keras_side:build", arguments, tuple(shapes))


# --- The whole ------------------------------------------------------------------------------------------


def run(
    names: Sequence[str],
    folder: Path,
    targets: Iterable[str] = ("torch", "keras"),
    sources: Sequence[str] = (),
    ways: Sequence[str] = WAYS,
    stride: int = 0,
) -> Iterator[Cell]:
    """Make the models of these programs, convert them, and go through all cells; see `conversions`."""
    for part in [list(names[start : start + _AT_ONCE]) for start in range(0, len(names), _AT_ONCE)]:
        chosen = {target: conversions(part, target, sources, ways, stride) for target in targets}
        for target in filter(chosen.get, chosen):
            missing = [name for name in part if not (folder / name / _DONE[_other(target)]).exists()]
            if missing:
                call = f"make({_other(target)!r}, {missing!r}, {str(folder)!r}, {list(sources)!r})"
                _child(_other(target), call, folder)
        for target, cells in chosen.items():
            call = f"judge({target!r}, {cells!r}, {str(folder)!r})"
            for line in _child(target, call, folder).splitlines() if cells else ():
                if line.startswith('{"program"'):
                    values = json.loads(line)
                    yield Cell(**{**values, "options": tuple(values["options"])})


# What is written last of a program's models.
_DONE = {"torch": "torch_outputs.npz", "keras": "functional_outputs.npz"}


def _child(framework: str, call: str, folder: Path) -> str:
    status, output = warm.run(
        "torch" if framework == "torch" else "tensorflow", _PROGRAM.format(root=str(ROOT), call=call), folder
    )
    if status:
        raise RuntimeError(f"{call[:100]} ended with {status}:\n{output[-4000:]}")
    return output


def is_determined(cell: Cell, twin: Program) -> bool:
    """Say whether the source, with the target's own model where there is one, determines the answer.

    A file of weights alone says nothing of an order that is not its framework's own.
    """
    if twin.natural:
        return True
    return cell.source in TELLING and cell.way != "kinds"


def totals(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the states of these cells by number, and how many are right of those that are determined."""
    sure = [cell for cell in cells if is_determined(cell, program(cell.program))]
    good = sum(cell.state in FINE for cell in sure)
    return {**Counter(cell.state for cell in cells), "sure": len(sure), "good": good}


_PAGE = """# Model pairs

Made by `python docs/generate.py` from `tests/model_pairs/*.tsv`, which have every
conversion; do not edit it by hand.

{programs} models, each built in Keras 3 and in PyTorch, also with different names. The target framework must
compute the source's outputs within {tolerance:g} of their size. Hints of refusals are followed.
`python -m tests.model_pairs` makes {each} conversions per model and
direction, and one by layer kinds: {cells} of {every} possible ones are recorded.

| outcome | meaning |
|---|---|
| right | equal outputs |
| assumed | the same, with a named assumption that holds |
| corrected | right with the option that the report names |
| refused | an error, or not loadable |
| wrong | other outputs, with or without (*silent*) an assumption |
| determined | the files and the target model determine the order of flattened images |

"""
WAYS = {
    "like": "`convert --like` with input shapes",
    "bare": "`convert --like` without them",
    "into": "`load_into` a live model",
    "kinds": "`convert` by layer kinds",
}
COUNTED = ("right", "assumed", "corrected")


def page() -> str:
    """Return the page with the recorded shares by direction and way."""
    cells = list(recorded().values())
    every = sum(len(conversions([*PROGRAMS], target)) for target in ("torch", "keras"))
    text = _PAGE.format(
        programs=len(PROGRAMS), tolerance=OUTPUTS, each=EACH, cells=f"{len(cells):,}", every=f"{every:,}"
    )
    whole = totals(cells)
    text += (
        f"**{whole['good']:,} of {whole['sure']:,} determined conversions are right "
        f"({whole['good'] / max(1, whole['sure']):.1%})**; {whole.get('WRONG', 0)} of all {len(cells):,} are "
        f"wrong without a message.\n\n## Conversions by command\n\n"
        f"| to | command | {' | '.join(COUNTED)} | refused | wrong: with, silent | right of determined |\n"
        f"|---|---|{'---:|' * (len(COUNTED) + 3)}\n"
    )
    for target, title in (("torch", "PyTorch"), ("keras", "Keras")):
        for way, name in WAYS.items():
            if mine := [cell for cell in cells if (cell.target, cell.way) == (target, way)]:
                result = totals(mine)
                counts = [*(result.get(column, 0) for column in COUNTED), len(mine)]
                counts[-1] -= sum(counts[:-1]) + result.get("WRONG", 0) + result.get("WRONG ASSUMED", 0)
                wrong = f"{result.get('WRONG ASSUMED', 0)}, {result.get('WRONG', 0)}"
                text += f"| {title} | {name} | {' | '.join(map(str, counts))} | {wrong} "
                text += f"| {result['good']} of {result['sure']} |\n"
    return text + _refused(cells)


def _refused(cells: Sequence[Cell]) -> str:
    """Return the conversions that are not right, by model and direction."""
    columns: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.state not in FINE:
            state = "" if cell.state == "refused" else f" ({cell.state})"
            key = cell.program.removesuffix("__renamed"), cell.target
            columns.setdefault(key, []).append(f"`{cell.source}` {cell.way}{state}")
    text = "\n## Refused conversions\n\n"
    for (name, target), which in sorted(columns.items()):
        side = "PyTorch" if target == "torch" else "Keras"
        text += f"- `{name}` to {side}: {', '.join(dict.fromkeys(which))}\n"
    return text


def escaped(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return re.sub(r"[|<>`*_\[\]{}]", r"\\\g<0>", text)


def summary(cells: Sequence[Cell]) -> str:
    """Return the states by source and way, as a table."""
    rows = []
    keys = dict.fromkeys((cell.source, cell.way) for cell in cells)
    for key in keys:
        mine = [cell for cell in cells if (cell.source, cell.way) == key]
        counts = Counter(cell.state for cell in mine)
        sure = [cell for cell in mine if is_determined(cell, program(cell.program))]
        good = sum(cell.state in FINE for cell in sure)
        share = f"{good / len(sure):.0%}" if sure else "-"
        rows.append(f"{key[0]:12} {key[1]:6} " + " ".join(f"{counts[s]:5}" for s in STATES) + f"  {share}")
    head = f"{'source':12} {'way':6} " + " ".join(f"{s[:5]:>5}" for s in STATES) + "  right of determined"
    sure = [cell for cell in cells if is_determined(cell, program(cell.program))]
    good = sum(cell.state in FINE for cell in sure)
    total = Counter(cell.state for cell in cells)
    share = good / max(1, len(sure))
    last = f"{len(cells)} conversions: {dict(total)}; right {share:.1%} of {len(sure)} determined"
    return "\n".join((head, *rows, last))


def record(cells: Sequence[Cell]) -> None:
    """Write the cells, one line each; those that were not run stay as they are recorded."""
    every = recorded() | {(cell.program, cell.target, cell.source, cell.way): cell for cell in cells}
    lines = sorted(
        "\t".join((c.program, c.target, c.source, c.way, c.state, " ".join(c.options), c.sentence[:200]))
        for c in every.values()
    )
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded() -> dict[tuple[str, ...], Cell]:
    """Return the recorded cells by program, target, file and way."""
    cells = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        *key, state, options, sentence = line.split("\t")
        cells[tuple(key)] = Cell(*key, state, (options,) if options else (), sentence)
    return cells


def changes(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each cell whose state is not the recorded one."""
    before = recorded()
    pairs = [(before.get((cell.program, cell.target, cell.source, cell.way)), cell) for cell in cells]
    return [
        f"{new.program} to {new.target} from {new.source} by {new.way}: {old.state if old else 'new'} -> "
        f"{new.state} {new.sentence}"
        for old, new in pairs
        if old is None or old.state != new.state
    ]


def main() -> None:
    """Run the pairs and print what is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_pairs", description=__doc__)
    parser.add_argument("--only", default="*", help="patterns of programs' names, separated by commas")
    parser.add_argument("--to", default="torch,keras", help="the targets' frameworks")
    parser.add_argument("--sources", default="", help="files of the source, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--each", type=int, default=EACH, help="conversions per program and direction; 0: all (hours)"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if a state is not that of {RESULTS.name}"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", help="leave the files in this folder, and use what it has"
    )
    options = parser.parse_args()
    patterns = options.only.split(",")
    names = [name for name in PROGRAMS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    folder = Path(options.keep or tempfile.mkdtemp(prefix="model_pairs"))
    folder.mkdir(exist_ok=True)
    sources = [source_name for source_name in options.sources.split(",") if source_name]
    targets, ways = options.to.split(","), options.ways.split(",")
    cells = []
    try:
        for cell in run(names, folder, targets, sources, ways, options.each):
            cells.append(cell)
            if cell.state not in FINE:
                print(  # noqa: T201
                    f"{cell.program:26} {cell.source:11} {cell.way:5} {cell.state:8} "
                    f"{' '.join(cell.options)} {cell.sentence[:300]}",
                    flush=True,
                )
    finally:
        if options.record:
            record(cells)
    print(summary(cells))  # noqa: T201
    if not options.keep:
        shutil.rmtree(folder)
    different = changes(cells) if options.check else []
    print(*different, sep="\n")  # noqa: T201
    sys.exit(bool(different) or any(cell.state in ("WRONG", "crash") for cell in cells))
