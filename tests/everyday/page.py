"""Makes docs/everyday.md of the recorded results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.everyday.cases import CASES, COLUMNS, Case
from tests.everyday.matrix import Cell, recorded

HEAD = """# Everyday checkpoints

Made by `python docs/generate.py` from `tests/everyday/`; do not edit it by hand.

{files} ordinary files, each made by its framework in a few lines, and what each command does with them.
**{working} of {cells} cells work ({share:.1%})**; none is wrong.

A conversion to torch, tf or keras works if the lines that it prints load the result strictly into the user's
model (`load_state_dict`, `assert_existing_objects_matched`, `load_weights`), the model computes the same
outputs within {tolerance:g} of their size, and, where the file holds an optimizer, makes the same two updates
from there (with `--part`, which converts the network alone, outputs are compared). `inspect` works
if it finds every parameter, `onnx` if ONNX Runtime computes the same actions, and `eval` if the returns
on Pendulum-v1 are those of the framework's own policy.

| mark | meaning |
|---|---|
| yes | works at the first try |
| opt | works with an option, or after a command, that the first message names |
| 1, 2, ... | does not work; the note says why |
| - | does not apply: not a policy |

PyTorch trains two biases of an LSTM, Keras their sum; PyTorch's groups have learning rates of their own,
Keras's optimizer has one. The next updates differ by nature: a note of the conversion must say so, and
outputs are compared.

"""
GROUPS = (
    ("PyTorch and RL libraries", ("torch",)),
    ("TensorFlow and Keras 3", ("tensorflow",)),
    ("Keras 2 and 1", ("keras_2",)),
)
SHORT = {"safetensors": "safet."}


def page() -> str:
    """Return the page."""
    from tests.everyday.verdicts import OUTPUTS

    cells = recorded()
    working = sum(cell.state == "works" for cell in cells.values())
    notes: dict[str, int] = {}
    head = HEAD.format(
        files=len(CASES), working=working, cells=len(cells), share=working / len(cells), tolerance=OUTPUTS
    )
    parts = [head]
    for title, sides in GROUPS:
        parts.append(f"## {title}\n\n| file | {' | '.join(SHORT.get(c, c) for c in COLUMNS)} |\n")
        parts.append(f"|---|{'---|' * len(COLUMNS)}\n")
        for case in CASES:
            if case.side in sides:
                marks = [_mark(case, column, cells, notes) for column in COLUMNS]
                parts.append(f"| {case.title} | {' | '.join(marks)} |\n")
        parts.append("\n")
    parts.append("## What does not work\n\n")
    parts += [f"{number}. {sentence}\n" for sentence, number in notes.items()]
    parts.append("" if notes else "Every cell works.\n")
    return "".join([*parts, *_corpus()])


def _corpus() -> Iterator[str]:
    """Yield the section on checkpoints of other people."""
    from tests.everyday.corpus_share import RESULTS

    if not RESULTS.exists():
        return
    date, *lines = RESULTS.read_text(encoding="utf-8").splitlines()
    tried = [line.split("\t") for line in lines]
    yield "\n## Checkpoints of other people\n\n"
    yield f"Measured on {date} by `python -m tests.everyday.corpus_share`:\n\n"
    for to, title in (("torch", "TensorFlow to PyTorch"), ("tf", "PyTorch to TensorFlow")):
        mine = [(cause, options) for target, _, cause, options in tried if target == to]
        done, more = sum(not cause for cause, _ in mine), sum(bool(options) for _, options in mine)
        none = sum("no network" in cause or "no tensor is of a layer" in cause for cause, _ in mine)
        yield f"- {title}: {done} of {len(mine)} convert without options, {more} more with options that the "
        yield f"message names; {none} hold no network or no known layer (single tensors, statistics).\n"
    causes: dict[tuple[str, str], list[str]] = {}
    for target, path, cause, options in tried:
        if cause:
            title = f"to {target}: {re.sub(r'[0-9]+', 'N', cause)}".replace("|", "\\|").replace("<", "&lt;")
            causes.setdefault((title[:330], "yes" if options else "no"), []).append(path)
    yield "\nThe others, by cause, and whether the options that the message names convert them:\n\n"
    yield "| files | with options | cause | e.g. |\n|---|---|---|---|\n"
    for (cause, able), paths in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"| {len(paths)} | {able} | {cause} | `{paths[0]}` |\n"


def _mark(case: Case, column: str, cells: Mapping[tuple[str, str], Cell], notes: dict[str, int]) -> str:
    if not case.applies(column):
        return "-"
    cell = cells[case.name, column]
    if cell.state == "works":
        return "opt" if cell.options else "yes"
    sentence = cell.sentence.replace("|", "\\|").replace("<", "&lt;")
    return str(notes.setdefault(sentence, len(notes) + 1))
