"""Play seven new users from an empty home, and follow every hint that is printed.

usage: python -m tests.everyday.users [NAME ...] [--record] [--jobs N] [--folder FOLDER]

A user (tests/everyday/newcomers.py) types commands in a terminal of 24 lines and 80 columns. Each `next:`,
`hint:`, `fix:` and `try:` is followed as printed, in a copy of the folder as it was then, and so is what that
prints. `load:` lines run in a process with the framework that they name. A hint is

- right: its command ends with status 0 or 1;
- a next fact: it is refused with another sentence, which concerns the file and not the command's words;
- a list: it names what is missing (options, values, files), not a command;
- FAIL: anything else.

Placeholders are filled only with a choice that the hint lists. --record writes the figures to users.tsv.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import difflib
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ckpttool.cli.app import COMMANDS
from ckpttool.cli.keywords import _merge_keywords
from tests.everyday.newcomers import USERS, User
from tests.refusals import calls_of, cut_sentence

RESULTS = Path(__file__).with_name("users.tsv")
ROWS, COLUMNS = 24, 80
TIMEOUT_S = 600
DEEPEST = 3
VERDICTS = ("right", "next fact", "list", "FAIL")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_LABEL = re.compile(r"( *)(next|hint|fix|try|load): (.*)")
_PROGRAM = re.compile(
    r"(?:(?<=^)|(?<=: )|(?<= or )|(?<=run )|(?<=\())"
    r"(?=(?:ckpttool|git lfs|pipx?|uvx?|unzip|gunzip|/\S+ -m pip) )"
)
_INSTALLS = re.compile(r"pip|pipx inject|uv (?:pip|tool)")
_PLACEHOLDER = re.compile(r"\.\.\.|[A-Z][A-Z0-9_]*(?:[,:=.][A-Z][A-Z0-9_]*)*(?:\.\.\.)?")
# What states that the words of a command are wrong, whatever the file contains.
_WRONG_WORDS = re.compile(
    "missing argument|no option|unknown option|unexpected|does not take|already exists|no such file|"
    "unknown command|requires|not found"
)
# A cell of a notebook: shows the last expression as a notebook does, and errors with their notes.
CELL = """
import ast, html, re, sys, traceback
import ckpttool
tree = ast.parse(sys.argv[1])
last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
scope = {"ckpttool": ckpttool}
try:
    exec(compile(tree, "cell", "exec"), scope)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), scope) if last else None
    page = getattr(value, "_repr_html_", lambda: None)()
    plain = page and html.unescape(re.sub("<style.*?</style>|<[^>]*>", "\\n", page, flags=re.S))
    print(re.sub(r"\\n\\s*", "\\n", plain) if page else repr(value))
except (ckpttool.CkpttoolError, TypeError, AttributeError, KeyError) as error:
    print("".join(traceback.format_exception_only(error)))
    sys.exit(2)
"""
# Runs `load:` lines. What they take from the user's own program is a stand-in.
LOADER = """
import builtins, re, sys
import numpy as np
lines = open(sys.argv[1]).read()
if "torch" in lines: import torch
if re.search(r"\\b(tf|keras)\\.", lines): import keras, tensorflow as tf

class Module:
    def load_state_dict(self, state):
        assert state and all(isinstance(key, str) for key in state), state
    def load_weights(self, file):
        import h5py
        shapes = []
        h5py.File(file).visititems(lambda _, item: shapes.append(getattr(item, "shape", None)))
        assert any(shapes), file

def at(root, path):
    for part in path:
        if not hasattr(root, part): setattr(root, part, tf.Module())
        root = getattr(root, part)
    return root

def stored(prefix):
    # Objects of the user's own classes: modules with a variable for each of the file.
    root = tf.Module()
    for name, _ in tf.train.list_variables(prefix):
        *path, last = name.partition("/.ATTRIBUTES/")[0].split("/")
        if "/.ATTRIBUTES/VARIABLE_VALUE" in name and last.isidentifier():
            setattr(at(root, path), last, tf.Variable(tf.train.load_variable(prefix, name)))
    return root

def described():
    # As the printed comments describe the objects: names, then what each is.
    root, text = tf.Module(), re.sub(r"\\n# +(?=[A-Z])", " ", lines)
    for names, expression in re.findall(r"^# ([\\w., ]+): (keras\\.Sequential\\(.*\\))$", text, re.M):
        for name in names.split(", "):
            *path, last = name.split(".")
            setattr(at(root, path), last, eval(expression, {"keras": keras, **vars(keras.layers)}))
    return root

class Names(dict):
    def __missing__(self, name):
        if hasattr(builtins, name) or name in globals(): raise KeyError(name)
        if name == "observations":
            model, axis = self["model"], 1 if hasattr(self["model"], "parameters") else 0
            weights = model.parameters() if axis else model.weights
            return np.zeros((2, next(w.shape[axis] for w in weights if len(w.shape) == 2)), np.float32)
        file = re.search(r'restore\\("([^"]*)"', lines)
        root = None if file is None else described() if whole else stored(file[1])
        return Module() if root is None else getattr(root, name, root)

whole = "keras.Sequential(" in lines
if "restore(" in lines:  # these are a part of the objects: the comments name this call for it
    lines = lines.replace(".assert_consumed()", ".assert_existing_objects_matched()", 1)
exec(compile(lines, "load", "exec"), globals(), Names())
"""


class Screen(NamedTuple):
    """What a command printed."""

    command: str
    status: int
    text: str
    elapsed_s: float

    @property
    def refusal(self) -> str:
        """The sentence of a refused command, without its hint."""
        return " ".join(self.text.partition("hint: ")[0].split())

    @property
    def crashed(self) -> bool:
        return self.status not in (0, 1, 2) or "Traceback (most recent" in self.text


class Hint(NamedTuple):
    """A labelled line of a screen, unwrapped."""

    label: str
    text: str


class Outcome(NamedTuple):
    """One printed hint, what was run for it, and how that is judged."""

    printed_by: str
    hint: Hint
    command: str
    verdict: str
    shown: str


@dataclass
class Tally:
    """The figures of one user."""

    name: str
    commands: int = 0
    words: int = 0
    elapsed_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    dead_ends: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        verdicts = Counter(outcome.verdict for outcome in self.outcomes)
        numbers = (self.commands, self.words, round(self.elapsed_s), len(self.outcomes))
        return (self.name, *map(str, (*numbers, *(verdicts[v] for v in VERDICTS), len(self.dead_ends))))


HEADER = ("user", "commands", "words", "seconds", "hints", *VERDICTS, "dead ends")


def recorded() -> list[dict[str, str]]:
    """Return the recorded rows."""
    head, *rows = (line.split("\t") for line in RESULTS.read_text(encoding="utf-8").splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


# --- Hints ----------------------------------------------------------------------------------------------


def hints_on(text: str) -> Iterator[Hint]:
    """Yield the hints on a screen; successive `load:` lines are one."""
    lines, loading = text.splitlines(), []
    while lines:
        match = _LABEL.fullmatch(lines.pop(0))
        if match is None:
            continue
        label, body = match[2], match[3]
        if label == "load":
            loading.append(body)
            continue
        while body.endswith("\\") and lines:
            body = body[:-1] + lines.pop(0).lstrip()
        while label != "next" and lines and re.match("    (?! )", lines[0]) and not _LABEL.match(lines[0]):
            body = f"{body} {lines.pop(0).strip()}"
        yield Hint(label, body)
    if loading:
        yield Hint("load", "\n".join(loading))


def steps_of(hint: str, command: str, refusal: str) -> list[str]:
    """Return the commands that a reader of a hint types next; none if it lists what is missing."""
    if command.startswith(">>> "):
        return _cells_of(hint, command.removeprefix(">>> "), refusal)
    commands = [cut_sentence(piece) for piece in _PROGRAM.split(hint) if _PROGRAM.match(piece)]
    if commands:
        return [text for text in commands if not _open_placeholders(_words(text))]
    words = _words(re.split(r" [|<>]", command)[0])
    meant = re.match(r"did you mean (\S+?)[?,]", hint)
    if meant:
        refused = [word for word in words[1:] if word in refusal]
        close = difflib.get_close_matches(meant[1], refused or words[1:], 1, 0.3)
        return [shlex.join(meant[1] if word == close[0] else word for word in words)] if close else []
    return list(_changed(words, hint))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _open_placeholders(words: Sequence[str]) -> list[str]:
    return [word for word in words[1:] if _PLACEHOLDER.fullmatch(word) and word not in ("A", "B")]


def _changed(words: list[str], hint: str) -> Iterator[str]:
    """Yield the command with the options of a hint: one command for each alternative."""
    command = next((c for c in COMMANDS if len(words) > 1 and c.name == words[1]), None)
    if command is None or words[0] != "ckpttool":
        return
    options = {name: param for param in command.parser().params for name in param.opts}
    for alternative in re.split(r",? or (?=--|the target)|; ", hint):
        changed, complete, any_option = list(words), True, False
        for match in re.finditer(r"(leave out )?(?<![\w-])(--[a-z][\w-]*)((?:[= ](?!--)\S+)*)", alternative):
            param, values = options.get(match[2]), _words(match[3].replace("=", " ", 1))
            count = 0 if param is None or param.is_flag else param.nargs
            if match[1] or (param is not None and not param.multiple):
                while match[2] in changed:
                    at = changed.index(match[2])
                    del changed[at : at + 1 + count]
            any_option = True
            if match[1]:
                continue
            choices = re.match(r" ?[A-Z]+ \(([\w, ]+)\)", match[3])
            values = (
                [choices[1].split(", ")[0]] if choices else [value.rstrip(",.:") for value in values[:count]]
            )
            complete &= len(values) == count and not _open_placeholders(["", *values])
            changed += [match[2], *values]
        target = re.search(r"the target (\S+?)[,.]?(?: |$)", alternative)
        if target and words[1] == "convert" and len(words) > 3:
            changed[3] = target[1]
        if (any_option or target) and complete:
            yield shlex.join(changed)


def _cells_of(hint: str, cell: str, refusal: str) -> list[str]:
    """Return the calls in a hint, or the refused call with the keywords that it names."""
    renamed = re.match(r"the function of the command (\w+) is ckpttool\.(\w+)", hint)
    if renamed:
        return [f">>> {cell.replace(renamed[1], renamed[2], 1)}"]
    meant = re.match(r"did you mean (\S+?)[?,]", hint)
    if meant:
        close = difflib.get_close_matches(meant[1], re.findall(r"[\w./]+", cell), 1, 0.3)
        return [f">>> {cell.replace(close[0], meant[1], 1)}"] if close else []
    calls = list(calls_of(hint))
    if calls and not hint.startswith("use "):
        return [f">>> {call}" for call in calls if "..." not in call]
    # A choice of those that the hint lists takes the place of NAME.
    chosen = re.sub(r"='NAME' \((\w+)[^)]*\)", r"='\1'", hint)
    record = re.search(r"; in (\w+=ckpttool\.\w+)\(\.\.\.\)", chosen)
    words = re.findall(
        r"(?<![\w.])[a-z_]+=(?:ckpttool\.\w+\([^()]*\)|'[^']*'|[\w.+-]+)", chosen.split("; in ")[0]
    )
    if record:
        own = ("env", "layout", "network", "to", "backend", "device")
        inside = [word for word in words if word.partition("=")[0] not in own]
        words = [*(word for word in words if word not in inside), f"{record[1]}({', '.join(inside)})"]
    if not words or not cell.endswith(")") or any(re.search(r"='?[A-Z]{2,}", word) for word in words):
        return []
    call = ast.parse(cell, mode="eval").body
    assert isinstance(call, ast.Call)
    wrong = re.search("unexpected keyword argument '(\\w+)'", refusal)
    kept = [ast.unparse(word) for word in call.keywords if wrong is None or word.arg != wrong[1]]
    arguments = [*map(ast.unparse, call.args), *_merge_keywords([*kept, *words])]
    return [f">>> {ast.unparse(call.func)}({', '.join(arguments)})"]


# --- Terminal -------------------------------------------------------------------------------------------


def run_command(command: str, folder: Path, env: dict[str, str]) -> Screen:
    """Run a shell command, or a notebook's cell behind `>>> `, in a terminal."""
    words = ["bash", "--norc", "-c", command]
    if command.startswith(">>> "):
        words = ["python", "-c", CELL, command.removeprefix(">>> ")]
    began, (controller, terminal) = time.monotonic(), pty.openpty()
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
    process = subprocess.Popen(
        words, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=env, start_new_session=True
    )
    os.close(terminal)
    data, status = bytearray(), None
    while status is None or select.select([controller], [], [], 0)[0]:
        if select.select([controller], [], [], 0.1)[0]:
            try:
                data += os.read(controller, 65536)
            except OSError:
                break
        elif " browse " in command and time.monotonic() - began > 5:
            with contextlib.suppress(OSError):
                os.write(controller, b"q")
        elif time.monotonic() - began > TIMEOUT_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = process.poll()
    os.close(controller)
    # A line that is drawn again, as progress is, shows its last state.
    text = re.sub(r"[^\n]*\r(?!\n)", "", _ESCAPES.sub("", bytes(data).decode(errors="replace"))).replace(
        "\r", ""
    )
    return Screen(command, process.wait(), text, time.monotonic() - began)


def copy_folder(folder: Path, parent: Path) -> Path:
    """Return a copy of the folder as it is now, in an own folder of the parent."""
    copy = Path(tempfile.mkdtemp(prefix="state", dir=parent)) / folder.name
    shutil.copytree(folder, copy, symlinks=True)
    return copy


class Session:
    """One user at a terminal.

    Args:
        user: the user.
        folder: an empty folder, for the home and all copies.
        jobs: hints that are followed at the same time.
    """

    def __init__(self, user: User, folder: Path, jobs: int) -> None:
        self.user, self.tally, self.keys = user, Tally(user.name), set[tuple[str, str]]()
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        self.env = user.environment(self.home)
        self.pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self.running: list[concurrent.futures.Future[None]] = []
        self.log = (folder / "log.txt").open("w", encoding="utf-8")

    def play(self) -> Tally:
        """Type all commands of the user, follow what they print, and return the figures."""
        self.user.prepare(self.work)
        for number, command in enumerate(self.user.commands, 1):
            screen = run_command(command, self.work, self.env)
            self.tally.commands += 1
            self.tally.words += len(screen.text.split())
            self.tally.elapsed_s += screen.elapsed_s
            self.write(screen, 0)
            show(f"{self.user.name} {number}/{len(self.user.commands)} {screen.status} {command}")
            if screen.crashed:
                self.judge(Outcome(command, Hint("", ""), command, "FAIL", screen.text))
            help_ = re.search("did you mean|choose from|--help", screen.text)
            if screen.status == 2 and help_ is None and not list(hints_on(screen.text)):
                self.tally.dead_ends.append(f"{command}: {screen.refusal}")
            self.follow(screen, self.work, 0)
        while self.running:
            self.running.pop().result()
        self.pool.shutdown()
        self.log.close()
        return self.tally

    def follow(self, screen: Screen, folder: Path, depth: int) -> None:
        """Follow each hint of a screen that was not printed before, in a copy of the folder."""
        for hint in hints_on(screen.text):
            option_of = screen.command if not _PROGRAM.search(hint.text) else ""
            if depth >= DEEPEST or (hint.text, option_of) in self.keys:
                continue
            self.keys.add((hint.text, option_of))
            steps = ["load"] if hint.label == "load" else steps_of(hint.text, screen.command, screen.refusal)
            if not steps:
                self.judge(Outcome(screen.command, hint, "", "list", ""))
            for step in steps:
                copy = copy_folder(folder, self.work.parent)
                self.running.append(self.pool.submit(self.take, screen, hint, step, copy, depth))

    def take(self, screen: Screen, hint: Hint, step: str, folder: Path, depth: int) -> None:
        """Run one step of a hint and judge it."""
        if hint.label == "load":
            (folder / "load.txt").write_text("\n".join((self.user.program, hint.text)))
            step = f"{sys.executable} -c {shlex.quote(LOADER)} load.txt"
        elif _INSTALLS.match(step):
            step = f"{step} > /dev/null && {screen.command}"
        after = run_command(step, folder, self.env)
        self.write(after, depth + 1)
        if hint.label == "load":
            verdict = "right" if after.status == 0 else "FAIL"
        elif after.crashed:
            verdict = "FAIL"
        elif after.status != 2:
            verdict = "right"
        else:
            # A file that the user named is missing, or exists already.
            file = re.search(r"([^\s']+): (?:checkpoint not found|the target already exists)", after.refusal)
            typed = file is not None and file[1] in screen.command
            wrong = not typed and _WRONG_WORDS.search(after.refusal)
            verdict = "FAIL" if wrong or after.refusal == screen.refusal else "next fact"
        self.judge(Outcome(screen.command, hint, step, verdict, after.text if verdict != "right" else ""))
        self.follow(after, folder, depth + 1)
        shutil.rmtree(folder.parent)

    def judge(self, outcome: Outcome) -> None:
        self.tally.outcomes.append(outcome)
        if outcome.verdict == "FAIL":
            show(format_outcome(outcome))

    def write(self, screen: Screen, depth: int) -> None:
        print(
            f"{'  ' * depth}$ {screen.command}   [{screen.status}, {screen.elapsed_s:.1f} s]", file=self.log
        )
        print(screen.text, file=self.log, flush=True)


def show(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def format_outcome(outcome: Outcome) -> str:
    command = "python load.txt" if "import builtins" in outcome.command else outcome.command
    lines = (
        f"  {outcome.verdict}: {outcome.printed_by}",
        f"    {outcome.hint.label}: {outcome.hint.text}",
        f"    -> {command}",
        *(f"       {line}" for line in outcome.shown.strip().splitlines()[-4:]),
    )
    return "\n".join(lines)


def main() -> None:
    """Play the users of the command line and print their figures; the status is 1 if a hint fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.everyday.users")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"users: {', '.join(USERS)}")
    parser.add_argument("--record", action="store_true", help="write users.tsv")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="hints followed at once")
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept, with the logs")
    options = parser.parse_args()
    tallies = []
    with contextlib.ExitStack() as stack:
        parent = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="users")))
        for name in options.names or USERS:
            reason = USERS[name].missing()
            if reason:
                show(f"{name}: skipped, {reason}")
                continue
            folder = parent / name
            shutil.rmtree(folder, ignore_errors=True)
            tallies.append(Session(USERS[name], folder, options.jobs).play())
            show("\t".join(HEADER), "\t".join(tallies[-1].row()))
    for tally in tallies:
        show(f"{tally.name}:", *(f"  dead end: {end}" for end in tally.dead_ends))
        for outcome in tally.outcomes:
            if outcome.verdict != "right":
                show(format_outcome(outcome))
    rows = [tally.row() for tally in tallies]
    show(*map("\t".join, [HEADER, *rows]))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    show(f"processor time of all commands: {children.ru_utime + children.ru_stime:.0f} s")
    if options.record:
        RESULTS.write_text("".join("\t".join(row) + "\n" for row in [HEADER, *rows]), encoding="utf-8")
    sys.exit(any(outcome.verdict == "FAIL" for tally in tallies for outcome in tally.outcomes))


if __name__ == "__main__":
    main()
