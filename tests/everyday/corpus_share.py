"""Measure how many real checkpoints convert to the other framework, and list why the others do not.

usage: python -m tests.everyday.corpus_share [CORPUS] [--match TEXT] [--list] [--record]

Each checkpoint below CORPUS/tf goes to torch, each below CORPUS/torch to tf, without options; where that does
not work and the message names options, with these. Files that make up one agent (PREFIX_actor, PREFIX_critic,
...) are converted together and one by one.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ckpttool.commands.convert import convert
from ckpttool.core import CkpttoolError
from ckpttool.listing.candidates import collect_candidates
from tests.conftest import in_process
from tests.everyday.more import option

RESULTS = Path(__file__).with_name("corpus.tsv")
CORPUS = Path(__file__).parents[2].parent / "shared" / "corpus"
TARGETS = {"tf": "torch", "torch": "tf"}
_FEW = 12  # options that are followed
_NUMBER = re.compile(r"\d+")
_SHARD = re.compile(r"\.data-\d+|\.index$|\.meta$|-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One conversion; `cause` is empty if it was written, else the error or the entries that are unmapped.

    `options` are those that the message names, if it was written with them.
    """

    path: str
    target: str
    cause: str = ""
    hint: str = ""
    options: str = ""


def sources(folder: str) -> Iterator[str]:
    """Yield the checkpoints below a folder, and the files of an agent that is stored in several."""
    candidates = collect_candidates([folder])
    paths = {candidate.path for candidate in candidates.candidates.values()}
    paths |= {path for path in candidates.parts if not _SHARD.search(path)}
    paths |= {path.removesuffix("_actor") for path in paths if path.endswith("_actor")}
    saved_models = {path for path in paths if os.path.isfile(os.path.join(path, "saved_model.pb"))}
    for path in sorted(paths):
        inside = any(path.startswith(f"{model}/") for model in saved_models)
        # evaluations.npz is a table of returns, which has no other framework.
        if not inside and os.path.basename(path) != "evaluations.npz":
            yield path


def attempt(path: str, to: str) -> Attempt:
    """Convert one checkpoint into a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = convert(path, os.path.join(folder, "out"), to=to, sync=False)
        except CkpttoolError as error:
            message = " ".join(error.message.split())
            return Attempt(path, to, f"{error.kind}: {message}", error.hint or "")
    if built.written:
        return Attempt(path, to)
    if built.report.complete:
        return Attempt(path, to, "written networks differ")
    parts = [f"unmapped {name}" for name in built.report.unused[:3]]
    parts += [f"missing {name}" for name in built.report.missing[:3]]
    # What the message says about the cause: an option, or a state that is not converted.
    parts += [note for note in built.report.notes if "--" in note or "not converted" in note][:1]
    return Attempt(path, to, "; ".join(parts))


def attempts(corpus: str, match: str = "") -> Iterator[Attempt]:
    """Try every checkpoint of a corpus whose path contains `match`."""
    for folder, to in TARGETS.items():
        for path in sources(os.path.join(corpus, folder)):
            if match in path:
                tried = attempt(path, to)
                yield replace(tried, options=_followed(path, to)) if "--" in tried.cause else tried


def _followed(path: str, to: str) -> str:
    """Return the options that messages name one after another, if the conversion works with them."""
    options = ""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_FEW):
            words = ("--to", to, "--force", *shlex.split(options))
            ran = in_process("convert", path, os.path.join(folder, "out"), *words)
            if ran.status == 0:
                return options
            more = option(ran.out + ran.err, path)
            # A size that the user fills in is no option to follow.
            if not more or more in options or re.search(r"\b[HW],", more):
                return ""
            options = f"{options} {more}".strip()
    return ""


def _common(cause: str) -> str:
    """Return a cause without the path of the checkpoint that a file belongs to."""
    return cause.partition("; it belongs to ")[0]


def main() -> int:
    """Print the share per framework, then the failures grouped by cause."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", nargs="?", default=str(CORPUS))
    parser.add_argument("--match", default="")
    parser.add_argument("--list", action="store_true", help="list what converts too")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    tried = list(attempts(options.corpus, options.match))
    if options.record:
        lines = [
            "\t".join(
                (item.target, os.path.relpath(item.path, options.corpus), _common(item.cause), item.options)
            )
            for item in tried
        ]
        RESULTS.write_text("\n".join([datetime.now(UTC).date().isoformat(), *lines]) + "\n", encoding="utf-8")
    for folder, to in TARGETS.items():
        mine = [tried_row for tried_row in tried if tried_row.target == to]
        sys.stdout.write(f"{folder} -> {to}: {sum(not item.cause for item in mine)} of {len(mine)} convert, ")
        sys.stdout.write(f"{sum(bool(item.options) for item in mine)} more with options of the message\n")
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for tried_row in tried:
        if tried_row.cause:
            groups[f"{tried_row.target} | {_NUMBER.sub('N', _common(tried_row.cause))}"].append(tried_row)
    for cause, members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        sys.stdout.write(f"\n{len(members)} x {cause}\n")
        for member in members:
            sys.stdout.write(f"    {os.path.relpath(member.path, options.corpus)}\n")
        if members[0].hint:
            sys.stdout.write(f"    hint: {members[0].hint}\n")
    if options.list:
        sys.stdout.write("\nconverted\n")
        for tried_row in tried:
            if not tried_row.cause:
                sys.stdout.write(f"    {os.path.relpath(tried_row.path, options.corpus)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
