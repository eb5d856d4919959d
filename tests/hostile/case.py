"""The contract of a crafted file: how it is made, which line of the list it covers, what must happen."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile import watched
from tests.hostile.watched import Seen

# What hostile files point at, outside of their own folder.
BAIT = "bait.bin"


@dataclass(frozen=True)
class Case:
    """A crafted file and the statuses that the commands must have.

    `make` writes it into an empty folder beside BAIT (`../bait.bin`) and returns the path for the commands.
    `inspect`, `digest`, `convert`, `eval` and `strict` (inspect --strict) are statuses (None: not run).
    `shows` is a name that inspect prints of a file that it lists. Sentences are in tests/golden/hostile.txt,
    and with `table` the rows of inspect's table too.
    """

    name: str
    line: str
    make: Callable[[Path], Path]
    inspect: int = 2
    digest: int | None = 2
    convert: int | None = 2
    strict: int | None = None
    shows: str = ""
    options: tuple[str, ...] = ()
    eval: int | None = None
    table: bool = False


class Prepared:
    """A case whose file lies in a folder, with its commands and the statuses wanted."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.home, self.out = case, folder / "case", folder / "out"
        self.home.mkdir(parents=True)
        self.out.mkdir()
        (folder / BAIT).write_bytes(b"\x11" * 4096)
        path = case.make(self.home)
        self.before = _state(self.home)
        self.commands = _commands(case, path, self.out)

    @property
    def words(self) -> list[tuple[object, ...]]:
        """Return the words of the commands."""
        return [(*self.case.options, *words) for words, _ in self.commands]


def examine(cases: Sequence[Case], folder: Path) -> dict[Case, tuple[list[str], str]]:
    """Run the commands on the cases, each in a folder of its own below this one.

    Return the faults of each, a sentence for one, and what people see (`_shown`).
    """
    folders = [folder / str(number) for number in range(len(cases))]
    prepared = {folder: Prepared(case, folder) for folder, case in zip(folders, cases, strict=True)}
    runs = watched.run({folder: preparation.words for folder, preparation in prepared.items()})
    return {preparation.case: _judge(preparation, runs[folder]) for folder, preparation in prepared.items()}


def _judge(prepared: Prepared, runs: list[Seen]) -> tuple[list[str], str]:
    case, home, out, commands = prepared.case, prepared.home, prepared.out, prepared.commands
    wrong: list[str] = []
    for (words, expected), run in zip(commands, runs, strict=True):
        wrong += [f"{words[0]} {words[-1]}: {what}" for what in faults(run, expected, home, out)]
    if case.inspect == 0 and case.shows not in runs[0].out:
        wrong.append(f"inspect does not show {case.shows!r}: {runs[0].out[:300]}")
    # A file that cannot be listed is refused in the same words by all commands.
    for (words, expected), run in zip(commands[1:], runs[1:], strict=True):
        alike = _refusal(run.err, words[0]) == _refusal(runs[0].err, "inspect")
        if case.inspect == expected == 2 and words[-1] != "--json" and not alike:
            wrong.append(f"{words[0]} refuses it in other words: {run.err.strip()}")
    if _state(home) != prepared.before:
        wrong.append("the input is not what it was")
    left = sorted(path.name for path in out.iterdir())
    if left and (case.convert == 2 or left not in (["made.npz", "made.npz.ckpttool.json"], ["made.npz"])):
        wrong.append(f"left behind: {left}")
    shown = _shown(case, [words[0] for words, _ in commands], runs)
    return wrong, shown.replace(str(home.parent), "TMP")


def _shown(case: Case, commands: list[object], runs: list[Seen]) -> str:
    """Return inspect's refusal, or its notes and the refusals of the commands that always run."""
    if any("hdf5_memory" in option for option in case.options):
        return ""  # how a library ends without memory depends on what it has already
    if case.inspect == 2:
        return _short(case, runs[0].err)
    lines = [
        line
        for line in runs[0].out.splitlines()
        if line.startswith(("note: ", "RUNS CODE: ", "NEEDS CLASSES: ", "NOT CHECKED: "))
    ]
    if case.table:
        lines += runs[0].out.splitlines()[5:]
    always = {
        "convert": case.convert,
        "digest": case.digest if case.convert is None else None,
        "eval": case.eval,
    }
    for command, run in zip(commands, runs, strict=True):
        if always.get(str(command)) == 2:
            lines += run.err.splitlines()
    return _short(case, "\n".join(lines))


def _short(case: Case, text: str) -> str:
    """Return the text without what differs between machines, folders and versions of libraries."""
    for pattern, put in (*_VARYING, *(_OF_HDF5 if case.name.startswith(("hdf5-", "keras-")) else ())):
        text = re.sub(pattern, put, text)
    return text


_VARYING = (
    (r"(\S)\1{15,}", r"\1\1\1..."),  # how much of a long name is printed depends on its folder
    (r"[\d,]+ bytes are free", "N bytes are free"),
    (r"bytes from [\d,]+", "bytes from N"),
    (r"expand [\d,]+ stored", "expand N stored"),
    (r"Error -\d+ while \w+ data: [\w ]+", "..."),
    (r"(the HDF5 library cannot read the file): .*", r"\1: ..."),
    (r"(the HDF5 reader process) (?:was killed by signal|exited with status) \d+", r"\1 ended"),
)
_OF_HDF5 = (
    (r"at byte \d+", "at byte N"),
    (r"\b[0-9a-f]{8}\b|(?<=of )[\d,]+(?= bytes)", "N"),
    (r"(stores?) [\d,]+", r"\1 N"),
)


def _commands(case: Case, path: Path, out: Path) -> list[tuple[tuple[object, ...], int]]:
    """Return the commands to run with the statuses wanted.

    What refuses to list a file refuses it alike whatever the command: one such file in three is given to
    another one too. Of those that list, one in three is shown as JSON and digested too; converting reads all
    that digesting does. CKPTTOOL_HOSTILE=whole has all commands run on all.
    """
    look: tuple[object, ...] = ("inspect", path)
    every = [
        (look, case.inspect),
        ((*look, "--strict"), case.strict),
        ((*look, "--json"), case.inspect),
        (("digest", path), case.digest),
        (("convert", path, out / "made.npz", "--allow-missing"), case.convert),
        (("eval", path, "--episodes", "1"), case.eval),
    ]
    chance = zlib.crc32(case.name.encode()) % 3
    if os.environ.get("CKPTTOOL_HOSTILE") != "whole":
        more = zlib.crc32(case.name.encode() * 2) % 3
        if case.inspect == 2:
            every = [every[0], every[1], *([every[2 + more]] * (chance == 0)), every[5]]
        elif chance:
            del every[2]
            if case.digest == case.convert:
                del every[2]
    return [(words, expected) for words, expected in every if expected is not None]


def faults(observed: Seen, code: int, home: Path, out: Path) -> list[str]:
    """Return what a command did that no command may do, or that it did not end as it must."""
    text = observed.out + observed.err
    wrong = []
    if observed.status != code:
        wrong.append(
            f"status {observed.status} instead of {code}: {observed.err.strip()[:300] or observed.out[:300]}"
        )
    if "Traceback" in text or "unexpected" in observed.err.partition("\n")[0]:
        wrong.append(f"a traceback: {text[-600:]}")
    if observed.seconds > watched.SECONDS - 1:
        wrong.append(f"took {observed.seconds:.1f} s")
    if observed.memory > watched.MEMORY:
        wrong.append(f"took {observed.memory >> 20:,} MiB")
    if not text.replace("\n", "").isprintable():
        wrong.append(f"prints {sorted({letter for letter in text if not letter.isprintable()} - {chr(10)})}")
    lines = _refusal(observed.err, "").count("\n")
    if observed.status == 2 and not observed.out.startswith("{") and (observed.out or lines > 2):
        wrong.append(f"more than a sentence: {text[:400]}")
    wrong += [f"opened {path}" for path in observed.read if _foreign(path, home, out)]
    wrong += [f"wrote {path}" for path in observed.written if not _below(path, out) and path != os.devnull]
    wrong += [f"{event} {first}" for event, first in observed.acts if not _own(event, first, out)]
    return wrong


def _refusal(text: str, command: object) -> str:
    """Return a refusal without what commands say in their own words: the file of a folder, their help."""
    return re.sub(r"\Ausing .*\n", "", text).replace(f"ckpttool {command} --help", "ckpttool --help")


def _below(path: str, folder: Path) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _foreign(path: str, home: Path, out: Path) -> bool:
    """Say whether a path belongs neither to the case nor to Python."""
    # A link may lead out of the folder.
    path = os.path.realpath(path)
    if _below(path, home) or _below(path, out):
        return False
    own = ("/proc/self/", "/proc/mounts", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime", "/usr/")
    return _below(path, home.parent) or path.startswith("/etc/") or not path.startswith((*own, *_PYTHON))


_PYTHON = tuple(
    {str(watched.ROOT), os.path.realpath(os.sys.prefix), os.sys.prefix, os.sys.base_prefix}  # type: ignore[attr-defined]
)


def _own(event: str, first: str, out: Path) -> bool:
    """Say whether an event is the writer's work beside the target, or the process that reads HDF5."""
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        return "python" in first
    return event in ("os.remove", "os.rename", "os.link", "os.mkdir") and f"{out}" in first


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return what tells whether anything in the folder changed: sizes, times, bytes, names."""
    state: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        known = path.lstat()
        whole = path.is_file() and os.access(path, os.R_OK) and known.st_size < 64 << 20
        data = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
        state[str(path)] = (known.st_mode, known.st_size, known.st_mtime_ns, data)
    return state
