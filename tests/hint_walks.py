"""Sixty refused commands of a fixed seed, and where their hints lead: `python -m tests.hint_walks`.

Commands are drawn from files, targets and options that people confuse. Each hint is followed as printed:
a command replaces the refused one, an option is added to it, and only placeholders get values, which a table
knows as the owner of the file does.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import shlex
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpttool.cli.app import COMMANDS
from tests import refusals
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Ran, in_process, zipped

SEED, COUNT, MOST_STEPS = 61, 60, 6
# What a walk ends with: a result, a refusal that lists what is missing, the same refusal again, or no hint
# that can be followed.
RESULT, FACT, LIST, FAILS, USELESS = "result", "next fact", "list", "fails", "useless"
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
    def forward(self, x):
        *hidden, last = self.children()
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x)

class Image(Net):
    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))

def policy(): return Net(fc1=nn.Linear(3, 8), fc2=nn.Linear(8, 8), mu=nn.Linear(8, 1))
def renamed(): return Net(first=nn.Linear(3, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 1))
def wider(): return Net(fc1=nn.Linear(3, 9), fc2=nn.Linear(9, 8), mu=nn.Linear(8, 1))
def arrays(): return Net(l1=nn.Linear(5, 32), l2=nn.Linear(32, 3))
def square(): return Net(l1=nn.Linear(6, 6), l2=nn.Linear(6, 6))
def image(): return Image(conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(80, 10))
def crossed(): return Net(mean=nn.Linear(4, 4), scale=nn.Linear(4, 4))
def needs(width): return policy()
number = 3
"""


def write_files(folder: Path) -> None:
    """Write what the commands name."""
    import torch
    from torch import nn

    (folder / "models.py").write_text(MODELS)
    models = types.ModuleType("models")
    vars(models)["__name__"] = "models"
    exec(MODELS, vars(models))
    sys.modules["models"], space = models, vars(models)
    models.Net.__module__ = "models"
    torch.manual_seed(0)
    for name in ("policy", "renamed", "wider", "image"):
        torch.save(space[name]().state_dict(), folder / f"{name}.pt")
    traced = torch.jit.trace(space["policy"](), torch.zeros(2, 3))
    traced.save(folder / "script.pt")
    torch.jit.trace(space["image"](), torch.zeros(2, 3, 7, 6)).save(folder / "image_script.pt")
    torch.save(space["policy"](), folder / "whole.pt")
    both = {"left": space["policy"]().state_dict(), "right": space["policy"]().state_dict()}
    torch.save(both, folder / "two.pt")
    rows = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})
    torch.save(rows.state_dict(), folder / "twins.pt")
    torch.save(nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4)}).state_dict(), folder / "attention.pt")
    net = space["policy"]()
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    adam.step()
    torch.save(adam.state_dict(), folder / "adam.pt")
    shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
    for end in ("index", "data-00000-of-00001"):
        shutil.copy(f"{TF_SAMPLE}.{end}", folder / f"ckpt-1.{end}")
    (folder / "run").mkdir()
    for number in (1, 2):
        shutil.copy(TORCH_SAMPLE, folder / "run" / f"ckpt-{number}.pt")
    draw = np.random.default_rng(0)

    def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {
            name.replace("__", "."): draw.standard_normal(shape).astype("float32")
            for name, shape in shapes.items()
        }

    del sys.modules["models"]
    np.savez(
        folder / "arrays.npz", **arrays(l1__weight=(5, 32), l1__bias=(32,), l2__weight=(32, 3), l2__bias=(3,))
    )
    np.savez(
        folder / "square.npz", **arrays(l1__weight=(6, 6), l1__bias=(6,), l2__weight=(6, 6), l2__bias=(6,))
    )
    np.savez(folder / "inputs.npz", x=np.ones((4, 3), np.float32))
    (folder / "cut.pt").write_bytes(TORCH_SAMPLE.read_bytes()[:5000])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "old.npz").write_bytes((folder / "arrays.npz").read_bytes())
    (folder / "photos.zip").write_bytes(zipped({"one.png": b"\x89PNG\r\n\x1a\n", "two.txt": b"text"}))
    (folder / "notes.txt").write_text("hello")


# What the owner of a file knows, by option; and by option and file.
KNOWN: dict[str, str] = {
    "--activation": "relu",
    "--head": "tanh",
    "--env": "Pendulum-v1",
    "--bounds": "-2 2",
    "--like": "models:policy",
    "--like-a": "models:policy",
    "--like-b": "models:policy",
    "--like-source": "models:policy",
    "--input-shape": "3",
    "--from": "torch",
    "--inputs": "inputs.npz",
    "--network": "left",
    "--part": "actor",
    "--to": "torch",
    "--kind": "attn=attention:4",
    "--like-args": '{"width":8}',
    "--like-args-b": '{"width":8}',
}
OF_FILE: dict[str, dict[str, str]] = {
    "image": {
        **dict.fromkeys(("--like", "--like-a", "--like-b", "--like-source"), "models:image"),
        "--input-shape": "3,7,6",
        "--flatten": "fc=4,5,4",
    },
    "arrays": {
        **dict.fromkeys(("--like", "--like-a", "--like-b", "--like-source"), "models:arrays"),
        "--input-shape": "5",
        "--from": "tf",
    },
    "square": {
        **dict.fromkeys(("--like", "--like-a", "--like-b", "--like-source"), "models:square"),
        "--input-shape": "6",
        "--from": "tf",
    },
    "twins": {"--match": "left=scale right=mean", "--like-b": "models:crossed", "--input-shape": "4"},
    "two": {"--part": "left"},
}
FILES = (
    *("policy.pt", "renamed.pt", "wider.pt", "image.pt", "script.pt", "image_script.pt", "whole.pt"),
    *("two.pt", "twins.pt", "attention.pt", "adam.pt", "agent.pt", "ckpt-1", "run", "arrays.npz"),
    *("square.npz", "cut.pt", "empty.pt", "photos.zip", "notes.txt", "agnet.pt"),
)
TARGETS = (
    *("out.pt", "out.npz", "out.h5", "out.weights.h5", "out.keras", "out.safetensors"),
    *("out.foo", "old.npz", "out", "out.zip"),
)
FACTS = "--activation relu --head tanh"
# By kind of refusal: the command, and what replaces its slots.
TEMPLATES: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "convert": (
        "convert {} {} {}",
        (
            FILES,
            TARGETS,
            (
                *("", "", "--to nzp", "--to tensorflow", "--part actr", "--layout fujimto", "--from jax"),
                *("--kind fc1=dens", "--flatten fc=9,9,9", "--optimizer non", "--to keras"),
            ),
        ),
    ),
    "fill": (
        "convert {} {} --like models:{} {}",
        (
            FILES,
            ("out.pt", "out.pt", "out.pt", "out.h5", "out.npz"),
            (
                *("policy", "policy", "renamed", "wider", "arrays", "square", "image", "crossed"),
                *("nothing", "number", "needs"),
            ),
            (
                "",
                "",
                "",
                "--match fc1=frist",
                "--input-shape 3x",
                "--like-args {{",
                "--part actr",
                "--from tf",
            ),
        ),
    ),
    "export": (
        "convert {} {} {}",
        (
            FILES,
            ("out.onnx", "out.onnx", "out.npz --to onnx", "out.pt --code out.py"),
            (
                *("", "", "--env Pendulum-v1", "--env Pendulm-v1", "--bounds 2 -2", "--head tahn"),
                *(f"{FACTS}", "--activation rely", "--env CartPole-v1"),
            ),
        ),
    ),
    "verify": (
        "verify {} {} {}",
        (
            FILES,
            FILES,
            (
                *(
                    "",
                    "",
                    "--run-code",
                    "--like-b models:policy",
                    "--like-a models:policy",
                    "--input-shape 4",
                ),
                *("--tolerance few", "--inputs nowhere.npz", "--inputs inputs.npz", "--like-b models:polcy"),
            ),
        ),
    ),
    "eval": (
        "eval {} --episodes 1 {} {}",
        (
            FILES,
            ("", "--env Pendulum-v1", "--env Pendulum-v1", "--env Pendulm-v1", "--env CartPole-v1"),
            (
                *("", "", FACTS, "--activation rely", "--network lft", "--obs-norm nowhere.npz"),
                *("--wrapper Clip", "--bounds 2", "--backend tensorfow", "--layout none"),
            ),
        ),
    ),
}


def draw_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield commands of all kinds in turn, without end."""
    draw = random.Random(SEED)
    known = set()
    for kind in itertools.cycle(TEMPLATES):
        template, slots = TEMPLATES[kind]
        words = shlex.split(template.format(*map(draw.choice, slots)), posix=True)
        if (text := shlex.join(words)) not in known:
            known.add(text)
            yield kind, words


PARSERS = {command.name: command.parser() for command in COMMANDS}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_PLACEHOLDER = re.compile(r"\.\.\.|[A-Z][A-Z_]*([:,.=][A-Za-z_.]*)*")
# A value that the owner has to state.
_ASKED = re.compile(r"^[A-Z][A-Z_]*$|\bVALUE\b|\bMODULE\b|\bN,N|=[A-Z]+$|:[A-Z]+$|\.\.\.")
_PROSE = re.compile(r"(?:to|if|of|for|or|and|names?|states?|selects?|is|with|the|as)\b")


def _values(command: str, option: str) -> int | None:
    """Return how many values an option of a command takes, None if it has no such option."""
    for param in PARSERS[command].params:
        if option in (*param.opts, *param.secondary_opts):
            return 0 if param.is_flag or option == "--" else param.nargs
    return None


@dataclass
class Walk:
    """A refused command, what was run after it with the printed refusals, and where that ends."""

    kind: str
    words: list[str]
    steps: list[tuple[str, str]] = field(default_factory=list)
    end: str = ""

    def known(self, option: str) -> str | None:
        """Return the value that the owner of the files knows."""
        files = " ".join(self.words)
        for name, facts in OF_FILE.items():
            if re.search(rf"(?<![\w.:]){name}[_.]", files) and option in facts:
                return facts[option]
        return KNOWN.get(option)

    def next_commands(self, ran: Ran) -> Iterator[list[str]]:
        """Yield the commands that the hints of a refusal lead to, in the order of the text."""
        for hint in dict.fromkeys(refusals.hints_of(ran.err + "\n" + ran.out)):
            commands = re.findall(r"(?<![`\w])ckpttool (?:--limit \S+ )?[a-z]+ [^;]*", hint)
            for text in commands:
                with contextlib.suppress(ValueError):
                    yield self._filled(shlex.split(refusals._WORDS.sub("", text).strip(" .<`,)"))[1:])
            if not commands:
                yield from self._without_options(hint)
                yield from self._with_options(hint)
                yield from self._with_words(hint)

    def _filled(self, words: list[str]) -> list[str]:
        """Return a command with the owner's values for placeholders."""
        filled: list[str] = []
        for index, word in enumerate(words):
            option = next((w for w in reversed(words[:index]) if w.startswith("--")), "")
            if not re.fullmatch(r"(?:\w+=)?(?:" + _PLACEHOLDER.pattern + ")", word):
                filled.append(word)
            elif option and words[index - 1].startswith("--") and (value := self.known(option)):
                filled += value.split()
            elif option == "--bounds":
                continue  # the second bound
            else:
                filled.append({"SOURCE": self.words[1]}.get(word, word.lower().replace("out", "result")))
        return filled

    def _without_options(self, hint: str) -> Iterator[list[str]]:
        for text in re.findall(r"leave out ((?:--[a-z-]+(?:,? and |, )?)+)", hint):
            words = self.words
            for option in _OPTION.findall(text):
                words = Walk(self.kind, words)._removed(option)
            yield words

    def _with_options(self, hint: str) -> Iterator[list[str]]:
        command = self.words[0]
        named = list(dict.fromkeys(_OPTION.findall(hint)))
        quoted = {m[1]: m[2] for m in re.finditer(r"(--[a-z-]+)[ =]('[^']*'|[^\s,;)]+(?: -?[\d.]+)?)", hint)}
        several = Counter(re.findall(r"(--[a-z-]+)[ =](?=['\w])", hint))
        for option in named:
            count = _values(command, option)
            if count is None:
                continue
            value = quoted.get(option, "").strip("'")
            if count == 0:
                yield self._added(option, [])
            elif not value or several[option] > 1 or _PROSE.match(value) or _ASKED.search(value):
                known = self.known(option)
                if known is None and value and not _PROSE.match(value):
                    known = value
                if known is not None:
                    yield self._added(option, known.split())
            else:
                yield self._added(option, value.split() if count > 1 else [value])
        # Several options that a hint asks for at once.
        if len(named) > 1:
            words = self.words
            for option in named:
                if (value := self.known(option)) is not None and _values(command, option):
                    words = Walk(self.kind, words)._added(option, value.split())
            yield words

    def _with_words(self, hint: str) -> Iterator[list[str]]:
        """Yield the command with a word that a hint names in the place of a similar one."""
        import difflib

        for name in re.findall(r"name the target ([\w.:-]+)", hint):
            yield [*self.words[:2], name, *self.words[3:]]
        for name in re.findall(r"(?:did you mean|target|try) '?([\w.:-]+)'?", hint):
            position = difflib.get_close_matches(name, self.words[1:], 1, 0.5)
            if position:
                yield [name if word == position[0] else word for word in self.words]

    def _added(self, option: str, values: Sequence[str]) -> list[str]:
        if option in ("--match", "--kind", "--flatten"):
            return [*self.words, *(word for value in values for word in (option, value))]
        return [*self._removed(option), option, *values]

    def _removed(self, option: str) -> list[str]:
        words, count = list(self.words), _values(self.words[0], option) or 0
        while option in words:
            at = words.index(option)
            del words[at : at + 1 + count]
        return words


def _same(words: Sequence[str]) -> str:
    """Return what commands with options in any order have in common."""
    return " ".join(sorted(f" {shlex.join(words)}".split(" --")))


def _sentence(ran: Ran) -> str:
    return " ".join(refusals.refusal(ran.err).split())


def _lists(ran: Ran) -> bool:
    """Return whether a refusal names what is missing, or several possible values."""
    hints = " ".join(refusals.hints_of(ran.err + "\n" + ran.out))
    incomplete = re.search("^(missing|unmapped|cannot be known)", ran.out, re.MULTILINE)
    placeholder = re.search(r"\b(?:ID|VALUE|MEMBER|MODULE:FACTORY|N,N)\b", hints)
    # What no option mends, e.g. a file that is cut: the owner has to get or name another one.
    words = hints and "--" not in hints and "ckpttool" not in hints
    return (ran.status == 1 and incomplete is not None) or bool(placeholder or words)


def walk(kind: str, words: list[str], home: Path) -> Walk | None:
    """Follow the hints of a command; None if it is not refused."""
    path = Walk(kind, words)
    ran = _run(words, home)
    if ran.status == 0 or (words[0] == "verify" and ran.status == 1):
        return None
    tried = {_same(words)}
    for _ in range(MOST_STEPS):
        path.steps.append((shlex.join(path.words), ran.err or ran.out))
        outcomes: list[tuple[list[str], Ran]] = []
        for following in path.next_commands(ran):
            # Options in another order are the same command.
            if not following or (text := _same(following)) in tried:
                continue
            tried.add(text)
            after = _run(following, home)
            outcomes.append((following, after))
            if after.status in (0, 1) or _sentence(after) != _sentence(ran):
                break
        if not outcomes:
            path.end = LIST if _lists(ran) else USELESS
            return path
        path.words, after = outcomes[-1]
        if "--help" in path.words or path.words[0] in ("inspect", "layouts", "backends"):
            path.steps.append((shlex.join(path.words), after.err))
            path.end = LIST if after.status == 0 else FAILS
            return path
        if after.status == 0 or (path.words[0] == "verify" and after.status == 1):
            path.steps.append((shlex.join(path.words), after.out))
            path.end = RESULT
            return path
        if _sentence(after) == _sentence(ran):
            path.steps += [(shlex.join(one), other.err) for one, other in outcomes]
            path.end = FAILS
            return path
        ran = after
    path.end = FACT
    return path


def _run(words: Sequence[str], home: Path) -> Ran:
    with tempfile.TemporaryDirectory(prefix="walk") as folder:
        copy = Path(folder) / "home"
        shutil.copytree(home, copy)
        return in_process(*words, cwd=copy)


def walks() -> Iterator[Walk]:
    """Yield the walks of the refused commands."""
    count = 0
    with tempfile.TemporaryDirectory(prefix="walks") as folder:
        home = Path(folder)
        write_files(home)
        for kind, words in draw_commands():
            path = walk(kind, words, home)
            if path is not None:
                yield path
                count += 1
            if count == COUNT:
                return


def main() -> None:
    """Print the walks."""
    ends: Counter[str] = Counter()
    for path in walks():
        ends[path.end] += 1
        print(f"=== {path.kind}: {path.end}")  # noqa: T201
        for command, text in path.steps:
            print(f"$ {command}\n{text.strip()[:700]}", flush=True)  # noqa: T201
    print(dict(ends))  # noqa: T201


if __name__ == "__main__":
    main()
