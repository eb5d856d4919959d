"""Makes docs/everyday.md of the recorded results: shares by kind of file and target, and refused cells."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.everyday.cases import CASES, COLUMNS, Case
from tests.everyday.matrix import Cell, recorded

HEAD = """# Everyday checkpoints

<!-- Made by `python docs/generate.py` from `tests/everyday/`; do not edit it by hand. -->

{files} ordinary files, each written by its framework in a few lines, and what each command does with them. **{working} of {cells}
cells work ({share:.1%})**. Every cell is in `tests/everyday/results.tsv`; `tests/everyday/cases.py` describes the files.

| command | a cell works if |
|---|---|
| `inspect` | every parameter is found |
| `torch`, `tf`, `keras` | the printed lines load the result strictly, outputs are equal within {tolerance:g} of their size, and two further updates of the optimizer are equal (`--part`: outputs only) |
| `safetensors`, `npz` | the same, loaded into the PyTorch model |
| `onnx` | ONNX Runtime computes the same actions |
| `eval` | returns on Pendulum-v1 are those of the framework's own policy |

Updates differ by nature for an LSTM with PyTorch's two biases and for groups with several learning rates; a note of the conversion
states it, and outputs are compared.

## Results by kind of file

`25+6` means that 25 files work at the first try and 6 with an option that the first message names. `-` does not apply.

"""  # noqa: E501
CODE = """
## Code of the networks

`convert --code` of every file whose computation is known. A process without ckpttool runs the code, which must load the whole file
strictly, and its actions or outputs are compared with those of the RL library or framework that wrote the file, with ONNX Runtime,
TorchScript or Keras, or else with the restored agent. `python -m tests.everyday.code_share --record` writes every verdict to
`tests/everyday/code.tsv`.

What no file states is given where the message requires it. Where a fact that changes the actions cannot be applied, such as a layer
of an own class, the exit status is 1 and names it. Weights alone do not show skip connections, further inputs, or norms elsewhere: the
first lines of the code state what is assumed. In both cases the code computes what the restored agent does. What is not written is
refused with exit status 2, or has entries for which the target has no place.

"""  # noqa: E501
NEW_USERS = """
## New users

Seven people with an empty home type commands in a terminal of 24 lines and 80 columns, as `tests/everyday/newcomers.py` lists them.
Every `next:`, `hint:`, `fix:` and `load:` that they see for the first time is followed as printed, and so is what that prints. `right`:
its command ends with status 0 or 1, its lines run. `next fact`: the command is refused with a new sentence about the file. `list`: no
command, but the options, values or files that are missing. `FAIL`: anything else. A dead end is a refusal without any of them. `words`
and `seconds` are those of the typed commands. `python -m tests.everyday.users --record` plays them again.

"""  # noqa: E501
# The first pattern that matches the side and the name of a case decides.
KINDS = (
    ("RL library agents", r"torch (cleanrl|authors|sb3)_"),
    ("`torch.save(model)`", r"torch whole_"),
    ("TorchScript", r"torch script_"),
    ("`torch.onnx.export`", r"torch onnx_"),
    (
        "DDP, compile, Lightning, Accelerate, Trainer, timm, EMA",
        r"torch (data_parallel|\w*distributed|compiled|lightning|accelerate|trainer|timm|averaged)$",
    ),
    ("`state_dict` and training dicts", r"torch "),
    ("TensorFlow 1: Saver, Estimator", r"tensorflow (saver_|estimator)"),
    (
        "`.keras`, `.h5`, `.weights.h5`",
        r"tensorflow (keras_|h5_|weights_|model_checkpoint|\w+_(keras|weights)$)",
    ),
    ("SavedModel", r"tensorflow (saved_model|exported)"),
    ("`tf.train.Checkpoint`", r"tensorflow "),
    ("Keras 2 and 1", r"keras_2 "),
)
PURPOSES = {
    "--flatten": "order of a flattened image",
    "--kind": "ambiguous layers: embedding or dense, attention heads",
    "--part": "one of several networks",
    "--optimizer": "hyperparameters missing from the file",
    "--head": "action map of a policy without a known layout",
    "--activation": "hidden activations of a policy without a known layout",
    "--network": "which network is the policy",
    "convert": "conversion to a state_dict first",
}


def page() -> str:
    """Return the page."""
    from tests.everyday.verdicts import OUTPUTS

    cells = recorded()
    working = sum(cell.state == "works" for cell in cells.values())
    share = working / len(cells)
    head = HEAD.format(files=len(CASES), working=working, cells=len(cells), share=share, tolerance=OUTPUTS)
    groups: dict[str, list[Case]] = {title: [] for title, _ in KINDS}
    for case in CASES:
        groups[_kind(case)].append(case)
    rows = [f"| kind | files | {' | '.join(COLUMNS)} |\n|---|---:|{'---|' * len(COLUMNS)}\n"]
    for title, cases in groups.items():
        cell_groups = ([cells[c.name, column] for c in cases if c.applies(column)] for column in COLUMNS)
        rows.append(f"| {title} | {len(cases)} | {' | '.join(map(_count, cell_groups))} |\n")
    sections = (_options(cells.values()), _refused(cells), _code(), _corpus(), _users())
    return "".join([head, *rows, *itertools.chain(*sections)])


def _kind(case: Case) -> str:
    return next(title for title, pattern in KINDS if re.match(pattern, f"{case.side} {case.name}"))


def _count(cells: list[Cell]) -> str:
    """Return how many work, how many of them with options, and of how many if some do not."""
    works = [cell for cell in cells if cell.state == "works"]
    more = sum(bool(cell.options) for cell in works)
    text = f"{len(works) - more}+{more}" if more else str(len(works))
    return "-" if not cells else text if len(works) == len(cells) else f"{text} of {len(cells)}"


def _options(cells: Iterable[Cell]) -> Iterator[str]:
    uses = Counter(name for cell in cells for name in dict.fromkeys(cell.options) if name in PURPOSES)
    yield "\n## Options in use\n\n| option | cells | purpose |\n|---|---:|---|\n"
    yield from (f"| `{name}` | {count} | {PURPOSES[name]} |\n" for name, count in uses.most_common())


def _refused(cells: dict[tuple[str, str], Cell]) -> Iterator[str]:
    yield "\n## Refused cells\n\n"
    refused = [(case, column) for case in CASES for column in COLUMNS if case.applies(column)]
    refused = [key for key in refused if cells[key[0].name, key[1]].state != "works"]
    yield "" if refused else "None.\n"
    for case, column in refused:
        yield f"- {case.title}, {column}: {_escaped(cells[case.name, column].sentence)}\n"


def _code() -> Iterator[str]:
    """Yield the section on the code of networks."""
    from tests.everyday.code_share import EQUAL, NAMES, STATES, recorded

    verdicts = recorded()
    yield CODE
    yield f"| files | code for | files | {' | '.join(STATES)} |\n|---|---|{'---:|' * (len(STATES) + 1)}\n"
    for kind, target in dict.fromkeys((verdict.set, verdict.target) for verdict in verdicts):
        states = [verdict.state for verdict in verdicts if (verdict.set, verdict.target) == (kind, target)]
        counts = [sum(state >= least for state in states) for least in range(EQUAL + 1)]
        yield f"| {NAMES[kind]} | {target} | {' | '.join(map(str, counts))} |\n"
    # Without what differs from file to file.
    reasons = Counter(
        (STATES[verdict.state], re.split(r" \(|; |: | by \d", verdict.words)[0])
        for verdict in verdicts
        if verdict.state < EQUAL
    )
    yield "\nWhy the others are not:\n\n"
    for (state, words), count in reasons.most_common():
        yield f"- {count} not {state}: {_escaped(words)}\n"


def _corpus() -> Iterator[str]:
    """Yield the section on checkpoints of other people."""
    from tests.everyday.corpus_share import RESULTS

    if not RESULTS.exists():
        return
    date, *lines = RESULTS.read_text(encoding="utf-8").splitlines()
    tried = [line.split("\t") for line in lines]
    yield f"\n## Public checkpoints\n\nMeasured on {date} by `python -m tests.everyday.corpus_share`; "
    yield "every file and cause is in `tests/everyday/corpus.tsv`.\n\n"
    yield "| direction | files | converted | with named options | without network or known layer |\n"
    yield "|---|---:|---:|---:|---:|\n"
    for to, title in (("torch", "TensorFlow to PyTorch"), ("tf", "PyTorch to TensorFlow")):
        mine = [(cause, options) for target, _, cause, options in tried if target == to]
        done, more = sum(not cause for cause, _ in mine), sum(bool(options) for _, options in mine)
        none = sum("no network" in cause or "no tensor is of a layer" in cause for cause, _ in mine)
        yield f"| {title} | {len(mine)} | {done} | {more} | {none} |\n"
    yield "\nOther refusals that no named option solves:\n\n"
    for target, path, cause, options in tried:
        if cause and not options and "no network" not in cause and "no tensor is of a layer" not in cause:
            yield f"- to {target}, `{path.rpartition('/')[2]}`: {_escaped(cause.partition(';')[0])}\n"


def _users() -> Iterator[str]:
    """Yield the section on new users."""
    from tests.everyday import users

    yield NEW_USERS
    yield f"| user | {' | '.join(users.HEADER[1:])} |\n|---|{'---:|' * (len(users.HEADER) - 1)}\n"
    rows = users.recorded()
    for row in rows:
        yield f"| {users.USERS[row['user']].title} | {' | '.join(row[name] for name in users.HEADER[1:])} |\n"
    sums = [str(sum(int(row[name]) for row in rows)) for name in users.HEADER[1:]]
    yield f"| all | {' | '.join(sums)} |\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
