"""`python -m tests.hostile.differential [--mutants N] [FORMAT ...]`: our readers and the reference readers.

Every mutant of a seed (mutations.py), and every crafted file, is read by ckpttool and by the format's own
reader (readers.py), each in a separate process. The two must agree on every name, type, shape and byte, or
ckpttool must refuse the file, or the reference must refuse it for a reason that REASONS names. Anything
else is a fault; its files are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.case import BAIT
from tests.hostile.mutations import kinds, mutant
from tests.hostile.readers import OPAQUE, OURS, ROOT, UNREADABLE, Answer, Form, attempts
from tests.hostile.seeds import SEEDS, Seed

BATCH = 250
CRAFTED = "crafted"
_PAGE = ROOT / "benchmarks" / "results" / "hostile.md"
_MEMORY = Path("/dev/shm")  # Linux; elsewhere the usual folder does

# Outcomes of one file. The last four are faults.
OUTCOMES = ("refused", "equal", "explained", "different", "unexplained", "unverified", "failed")
FAULTS = OUTCOMES[3:]

# Why ckpttool reads what a reference reader does not: a pattern of the reference's error, by reader.
_CLASSES = "the reference refuses classes and opcodes outside its allow list, ckpttool lists inert records"
_CALLS = "the reference fails in a call that ckpttool lists as an inert record"
_RECORDS = "torch reads records that hold no values (version, alignment, serialization id) as well"
_CODE = "torch compiles the code, which ckpttool lists and never runs"
_TORCH = {
    r"Unsupported|WeightsUnpickler error|safe_globals|Weights only load failed": _CLASSES,
    r"not callable|positional argument|invalid combination|has no attribute|is not iterable": _CALLS,
    r"invalid literal for int|parse the version|hasRecord|with version": _RECORDS,
    "not in a subdirectory": "members of other folders are named, and not read",
    "dictionary update sequence": "weights_only takes no attributes with slots for an OrderedDict",
    "UnicodeDecodeError": "torch logs an id of the file, which must be text",
    "unsupported multidisk": "torch needs a zip64 locator that counts one disk, ckpttool does not use it",
    "TorchScript archives|legacy .tar format": "torch reads this form without weights_only alone",
}
_ZIP_VERSION = {
    "zip file version": "zipfile refuses by the version that a member asks for, ckpttool by what it uses"
}
REASONS: Mapping[str, Mapping[str, str]] = {
    "torch": _TORCH,
    "sb3": _TORCH | _ZIP_VERSION,
    "torch_tar": {
        "class outside the allow list": _CLASSES,
        "Can't get attribute|KeyError": "a class or device that decides no number must exist in torch",
    },
    "pickle": {
        "too deep, or has too many parts": "the value contains itself, which ckpttool lists as such",
        "class outside the allow list": _CLASSES,
        r"data type .* not understood|\(\) argument|sub-type of ndarray|integer is required": _CALLS,
    },
    "tensorflow": {
        "UnicodeDecodeError": "TensorFlow's Python interface cannot name a tensor that is not UTF-8",
        "Failed to find the saved tensor slices": "TensorFlow refuses a name that is not UTF-8",
        "not found in checkpoint file": "TensorFlow reads parts of an entry that hold no values, too",
    },
    "safetensors": {
        "unknown variant": "a tensor of a type that the library does not have is listed, and not read",
        "header too large": "the file has another format, which ckpttool recognises by its bytes",
    },
    "h5py": {
        "temporary file space": "the HDF5 library refuses by its path what it reads as an open file",
        "codec can't decode": "h5py has no field of a name that is not UTF-8, ckpttool notes its dataset",
        "No member name": "h5py has no type for a compound with a nameless field, ckpttool notes its dataset",
        "Insufficient precision": "NumPy has no type for these numbers, ckpttool notes their dataset",
        "too many links": "h5py ends at a loop of links, which ckpttool notes",
    },
    "torch_dcp": {
        "Missing key in checkpoint|MetadataIndex": "torch refuses the whole where the metadata lists parts",
        "metadata is None": _CALLS,
    },
    "torch_script": {
        "<--- HERE|Unknown type|undefined value|INTERNAL ASSERT FAILED|not in the map|token|but found": _CODE,
        "Expression of type|code import": _CODE,
        "PROTO opcode|Unknown opcode": "torch's reader of pickles in C++ knows fewer opcodes than Python's",
        "failed reading file code/|failed locating file constants.pkl|hasRecord": _RECORDS,
        **{text: _TORCH[text] for text in ("UnicodeDecodeError", "unsupported multidisk")},
    },
    "onnx": {
        "Wire format was corrupt": "the library decodes parts that hold no constants, too",
    },
    "saved_model": {
        "Wire format was corrupt|bad UTF-8": "TensorFlow decodes the values of nodes and functions as well",
        "an entry of a map": "protobuf's Python library drops such entries, that of C++ reads them",
    },
    "numpy": _ZIP_VERSION,
    "keras_zip": _ZIP_VERSION,
}
_BROKEN = "the reference crashes, hangs or runs out of memory"
_CHANGING = "the reference gives other numbers each time: it returns memory that it never wrote"
_NO_VALUES = "ckpttool lists names without values"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one file; `why` is the reason, the error or the first difference."""

    outcome: str
    why: str = ""


@dataclass
class Tally:
    """The outcomes of the files of one format; `faults` are the first of them.

    `broken` counts the files on which the reference crashed, hung or ran out of memory, `misread` those of
    which it returned other numbers than a checksum in the file protects.
    """

    name: str
    files: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    misread: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the line of JSON."""
        return {
            "format": self.name,
            "files": self.files,
            **{outcome: self.counts[outcome] for outcome in OUTCOMES},
            "reference_broken": self.broken,
            "reference_misread": self.misread,
            "reasons": dict(self.reasons.most_common()),
            "seconds": round(self.seconds, 1),
            "faults": self.faults,
        }


def slug(seed: Seed) -> str:
    """Return a seed's name as the command line has it: `tf-bundle-index`."""
    return re.sub(r"[^a-z0-9]+", "-", seed.name.lower()).strip("-")


BY_SLUG = {slug(seed): seed for seed in SEEDS}


def verdict(reader: str | None, mine: Answer, answer: Answer | None, truth: Form | None = None) -> Verdict:
    """Compare two answers; `truth` is what a file holds that checksums must protect."""
    word, detail, form = mine
    if word == "refused":
        return Verdict("refused")
    if word != "read":
        return Verdict("failed", f"{word} {detail}")
    if truth is not None and form != truth:
        return Verdict("unverified", difference(form, truth)[0])
    if answer is None or reader is None:
        return Verdict("equal")
    word, detail, other = answer
    if word == "read":
        form = _compared(reader, form)
        result, refused = difference(form, other)
        if result or not refused:
            return Verdict("different", result) if result else Verdict("equal")
        detail = refused
    if word in ("crash", "hang", "memory"):
        return Verdict("explained", _BROKEN)
    if word != "read" and set(form.values()) <= {OPAQUE}:
        return Verdict("explained", _NO_VALUES)
    for pattern, reason in REASONS.get(reader, {}).items():
        if re.search(pattern, detail):
            return Verdict("explained", reason)
    return Verdict("unexplained", detail)


def difference(mine: Form, answer: Form) -> tuple[str, str]:
    """Return the first difference of two forms, and the reference's error about a tensor that ckpttool reads.

    What ckpttool lists as opaque, a record of a class, may be anything in the reference, and hides what is
    below it.
    """
    refused = ""
    mine, answer = _without_labels(mine, answer)
    opaque = tuple(name for name, value in mine.items() if value == OPAQUE)
    for name in sorted({*mine, *answer}):
        one, other = mine.get(name), answer.get(name)
        if one in (other, OPAQUE) or (
            one is None and (other == OPAQUE or (opaque and name.startswith(opaque)))
        ):
            continue
        if one is not None and other is not None and other.startswith(UNREADABLE):
            refused = other
            continue
        return f"{name}: ckpttool {one}, reference {other}", refused
    return "", refused


_TENSOR = re.compile(r"[a-z]\w*\[")
# How a reader names an entry of a dict whose key is a tuple, a class, a tensor or bytes.
_LABEL = re.compile(r"""\[["']+(?:[(<]|tensor\()""")


def _without_labels(mine: Form, expected: Form) -> tuple[Form, Form]:
    """Return the forms without the entries whose keys are no text, if both give these the same values.

    The readers spell such keys in different ways.
    """
    own = {name: value for name, value in mine.items() if name not in expected}
    other = {name: value for name, value in expected.items() if name not in mine}
    if not other or not all(map(_LABEL.search, other)) or sorted(own.values()) != sorted(other.values()):
        return mine, expected
    both = mine.keys() & expected.keys()
    return {name: mine[name] for name in both}, {name: expected[name] for name in both}


class Workplace:
    """A temporary folder that holds the files of a batch, each in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckpttool-", dir=_MEMORY if _MEMORY.is_dir() else None))

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def home(self, number: int) -> Path:
        """Return the folder of a file of the batch, which is empty."""
        target = self.folder / f"{number}" / "case"
        shutil.rmtree(target.parent, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def answers(self, reader: str | None, paths: Sequence[str]) -> tuple[list[Answer], list[Answer | None]]:
        """Let ckpttool and the reference read the files at the same time."""
        with ThreadPoolExecutor(1) as other:
            pending = other.submit(lambda: list(attempts(reader, paths, self.folder)) if reader else [])
            mine = list(attempts(OURS, paths, self.folder))
            return mine, list(pending.result()) if reader else [None] * len(paths)


def compare(seed: Seed, mutants: int, first: int, keep: Path | None) -> Tally:
    """Compare the readers on so many mutants of a seed, of all kinds in turn."""
    tally, began = Tally(slug(seed)), time.monotonic()
    names = kinds(seed)
    plan = [(names[number % len(names)], number) for number in range(first, first + mutants)]
    with Workplace() as location:
        truth = _truth(seed, location, tally)
        for start in range(0, len(plan), BATCH):
            part = plan[start : start + BATCH]
            paths = [_filled(location.home(at), seed, kind, number) for at, (kind, number) in enumerate(part)]
            mine, expected = location.answers(seed.peer, paths)
            for at, (kind, number) in enumerate(part):
                true_form = truth if seed.covered and kind in ("bits", "spans") else None
                outcome = verdict(seed.peer, mine[at], expected[at], true_form)
                if outcome.outcome == "different" and _changing(seed, paths[at], expected[at], location):
                    outcome = Verdict("explained", _CHANGING)
                _count(tally, outcome, expected[at], true_form)
                if outcome.outcome in FAULTS:
                    _keep(tally, outcome, f"{kind}-{number}", location.folder / f"{at}" / "case", keep)
    tally.seconds = time.monotonic() - began
    return tally


def _changing(seed: Seed, path: str, expected: Answer | None, workplace: Workplace) -> bool:
    """Return whether the reference reads the file differently when it reads it again."""
    return [expected] != list(attempts(seed.peer or OURS, [path], workplace.folder))


def _filled(home: Path, seed: Seed, kind: str | None, number: int) -> str:
    for name, data in (mutant(seed, kind, number) if kind else seed.contents()).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    return str(home / seed.path)


def _truth(seed: Seed, workplace: Workplace, tally: Tally) -> Form:
    """Return what the sound seed holds; the readers must agree on it."""
    path = _filled(workplace.home(0), seed, None, 0)
    (mine,), (expected,) = workplace.answers(seed.peer, [path])
    outcome = verdict(seed.peer, mine, expected)
    if outcome.outcome != ("equal" if seed.read else "refused"):
        tally.counts[outcome.outcome] += 1
        tally.faults.append(
            f"the seed itself: {outcome.outcome} {outcome.why} {mine[:2]} {expected and expected[:2]}"
        )
    return mine[2]


def _count(tally: Tally, outcome: Verdict, expected: Answer | None, truth: Form | None = None) -> None:
    tally.files += 1
    tally.counts[outcome.outcome] += 1
    tally.broken += expected is not None and expected[0] in ("crash", "hang", "memory")
    if truth is not None and expected is not None and expected[0] == "read":
        tally.misread += _is_misread(tally.name, truth, expected[2])
    if outcome.outcome == "explained":
        tally.reasons[outcome.why] += 1


def _is_misread(name: str, truth: Form, form: Form) -> bool:
    """Return whether the reference gave other names or numbers, and no error for any of them."""
    truth = _compared(BY_SLUG[name].peer, truth)
    unread = any(value.startswith(UNREADABLE) for value in form.values())
    return not unread and bool(difference(truth, form)[0])


def _compared(reader: str | None, form: Form) -> Form:
    """Return the part of a form that the reference reads as well.

    Of Stable-Baselines3's archives these are the parameters, of TorchScript the tensors of modules.
    """
    if reader == "sb3":
        return {name: value for name, value in form.items() if name.startswith("[")}
    if reader == "torch_script":
        return {
            name: value
            for name, value in form.items()
            if _TENSOR.match(value) and not name.startswith(".CONSTANTS.")
        }
    return form


def _keep(tally: Tally, outcome: Verdict, name: str, home: Path, keep: Path | None) -> None:
    if len(tally.faults) < 200:
        tally.faults.append(f"{name}: {outcome.outcome}: {outcome.why}")
    if keep is not None and tally.counts[outcome.outcome] <= 200:
        target = keep / tally.name / f"{outcome.outcome}-{name}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(home, target, symlinks=True)
        (target / "WHY.txt").write_text(f"{outcome.why}\n", encoding="utf-8", errors="replace")


# Crafted files.

_SUFFIXES = {
    **dict.fromkeys((".pt", ".pth"), "torch"),
    **dict.fromkeys((".npz", ".npy"), "numpy"),
    **dict.fromkeys((".h5", ".hdf5"), "h5py"),
    ".safetensors": "safetensors",
    ".keras": "keras_zip",
    ".pkl": "pickle",
    ".zip": "sb3",
    ".tar": "torch_tar",
}


def reference(path: Path) -> str | None:
    """Return the reference reader for a path, by its name and what lies beside it."""
    try:
        if path.with_name(f"{path.name}.index").exists():
            return "tensorflow"
    except OSError:  # a name that is too long
        return None
    return _SUFFIXES.get(path.suffix) if path.is_file() else None


def crafted(keep: Path | None) -> Tally:
    """Compare the readers on every crafted file of this folder for which there is a reference."""
    from tests.test_hostile import CASES

    tally, began = Tally(CRAFTED), time.monotonic()
    with Workplace() as workplace:
        waiting: dict[str, list[tuple[Path, str]]] = {}
        for number, case in enumerate(CASES):
            home = workplace.home(number)
            (home.parent / BAIT).write_bytes(b"\x11" * 4096)
            path = case.make(home)
            reader = reference(path)
            if reader is not None:
                waiting.setdefault(reader, []).append((path, case.name))
        for reader, files in waiting.items():
            mine, expected = workplace.answers(reader, [str(path) for path, _ in files])
            for (path, name), one, other in zip(files, mine, expected, strict=True):
                outcome = verdict(reader, one, other)
                _count(tally, outcome, other)
                if outcome.outcome in FAULTS:
                    _keep(tally, outcome, f"{name} ({reader})", path.parent, keep)
    tally.seconds = time.monotonic() - began
    return tally


# The table of benchmarks/results/hostile.md.

_HEAD = (
    "| format | mutants | refused | equal | only the reference refuses | silent differences | other faults"
    " | reference: crash, hang, memory | reference: damage read |"
)
_MARK = "differential"


def _row(tally: Mapping[str, Any]) -> str:
    name = BY_SLUG[tally["format"]].name if tally["format"] in BY_SLUG else "crafted files"
    other = sum(tally[outcome] for outcome in FAULTS[1:])
    counts = (tally["files"], tally["refused"], tally["equal"], tally["explained"], tally["different"], other)
    counts = (*counts, tally["reference_broken"], tally["reference_misread"])
    return f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |"


def document(tallies: Iterable[Mapping[str, Any]], page: Path = _PAGE) -> None:
    """Write the rows of these formats into the table of the page; other rows stay."""
    text = page.read_text(encoding="utf-8")
    start, stop = (text.index(f"<!-- {mark}{_MARK} -->") for mark in ("", "/"))
    table = text[start:stop].splitlines()
    rows = {line.split("|")[1].strip(): line for line in table if line.startswith("| ") and line != _HEAD}
    rows |= {row.split("|")[1].strip(): row for row in map(_row, tallies)}
    order = [*(seed.name for seed in SEEDS), "crafted files"]
    body = [rows[name] for name in order if name in rows]
    built = "\n".join([f"<!-- {_MARK} -->", _HEAD, "|---|" + "---:|" * 8, *body, ""])
    page.write_text(text[:start] + built + text[stop:], encoding="utf-8")


def run(names: Sequence[str], mutants: int, first: int = 0, keep: Path | None = None) -> Iterator[Tally]:
    """Compare the readers of these formats, of all if there are none."""
    for name in names or [*BY_SLUG, CRAFTED]:
        yield crafted(keep) if name == CRAFTED else compare(BY_SLUG[name], mutants, first, keep)


def main() -> int:
    """Print a line of JSON for each format; return 1 if there are faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.differential")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join([*BY_SLUG, CRAFTED])}")
    parser.add_argument("--mutants", type=int, default=20_000, help="mutants of each format")
    parser.add_argument("--seed", type=int, default=0, help="number of the first mutant")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/differential"), help="folder for faulty inputs"
    )
    parser.add_argument(
        "--document", action="store_true", help="write the counts into benchmarks/results/hostile.md"
    )
    options = parser.parse_args()
    faulty = False
    for name in options.formats:
        if name not in (*BY_SLUG, CRAFTED):
            parser.error(f"unknown format {name!r} (choose from {', '.join([*BY_SLUG, CRAFTED])})")
    for tally in run(options.formats, options.mutants, options.seed, options.keep):
        counts = tally.document()
        sys.stdout.write(json.dumps(counts) + "\n")
        sys.stdout.flush()
        faulty = faulty or any(counts[outcome] for outcome in FAULTS)
        if options.document:
            document([counts])
    return int(faulty)


if __name__ == "__main__":
    sys.exit(main())
