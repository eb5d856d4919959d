"""What the suite's refusals suggest: each hint states facts only if something else states them as well.

A format that it suggests is one that the target's name allows, or it names another target.

`in_process` passes every refused command here, test_hints.py every hint of the golden texts.
"""

from __future__ import annotations

import ast
import contextlib
import html
import json
import os
import re
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# With CKPTTOOL_HINTS=1, the commands in the hints of all refused commands are run as well.
FOLLOWED = os.environ.get("CKPTTOOL_HINTS") == "1"
# Options of facts that a training program, not the user, decides.
FACTS = (
    *("--activation", "--head", "--bounds", "--env"),
    *("--input-shape", "--flatten", "--wrapper", "--adapter"),
)
_OPTION = re.compile(rf"({'|'.join(FACTS)})[ =]('[^']*'|[^\s';)]+)")
_PLACEHOLDER = re.compile(r"\.\.\.|[A-Z][A-Z_]*([,:][A-Z][A-Z_]*|,?\.\.\.)*")
# Answers that state no value: to play without wrappers, a layer that receives no flattened image.
_NONE = ("none", "no")


def hints_of(text: str) -> Iterator[str]:
    """Yield the hints in what a command printed: lines of text, or entries of JSON."""
    yield from re.findall(r"^ *hint: (.+)$", text, re.MULTILINE)
    for quoted in re.findall(r'"hint": ("(?:[^"\\]|\\.)*")', text):
        yield json.loads(quoted)


def invented_values(hint: str, stated: str) -> list[str]:
    """Return the options whose value is a guess.

    A value is none if `stated` contains it (the command and its message), if the hint lists several values
    of the option, or if a registry of environments lists it.
    """
    values = [(option, value.strip("',:")) for option, value in _OPTION.findall(hint)]
    choices = Counter(option for option, _ in dict.fromkeys(values))
    return [
        f"{option} {value}"
        for option, value in values
        if not (
            _PLACEHOLDER.fullmatch(value.rpartition("=")[2])
            or value.rpartition("=")[2] in _NONE
            or choices[option] > 1
            or re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-])", stated)
            or (option == "--env" and _is_registered(value))
            or (option == "--wrapper" and _are_stated(value, stated))
        )
    ]


def _are_stated(wrapper: str, stated: str) -> bool:
    """Return whether the message states each number among a wrapper's arguments: the bounds of training."""
    numbers = re.findall(r"=([-+.\w]+)", wrapper)
    return bool(numbers) and all(re.search(rf"(?<![\w.-]){re.escape(n)}(?![\w.])", stated) for n in numbers)


def _is_registered(env: str) -> bool:
    from ckpttool.evaluation import environments

    return env in environments.SIZES or env in environments.import_gymnasium().registry


def require_stated(words: tuple[object, ...], printed: str) -> None:
    """Assert that no hint of a refused command contains a value that nothing states."""
    for hint in hints_of(printed):
        assert not contradicted_targets(hint, tuple(map(str, words))), f"{words}\n{printed}"
        rest = printed.replace(hint, "").replace(json.dumps(hint), "")
        stated = " ".join((*map(str, words), rest))
        assert not invented_values(hint, stated), f"{shlex.join(map(str, words))}\n{printed}"


def contradicted_targets(hint: str, words: tuple[str, ...]) -> list[str]:
    """Return the formats in a hint to `convert` that the suffix of its target does not allow."""
    from ckpttool.conversion.targets import EXPORTS, TARGETS, infer_target_word
    from ckpttool.core import UsageError

    if words[:1] != ("convert",) or len(words) < 3 or re.search("target|ckpttool", hint):
        return []
    wrong = []
    for word in re.findall(r"--to (\w+)", hint):
        try:
            infer_target_word(words[2], word if word in (*TARGETS, *EXPORTS) else None)
        except UsageError:
            wrong.append(word)
    return wrong


_COMMAND = re.compile(r"ckpttool (?:--limit \S+ )?[a-z]+ .*")
# What a hint adds to a command in words.
_WORDS = re.compile(r" (?:lists|writes|records|shows|uses|to (?:list|see)) .*|, or ckpttool .*|; .*")


def cut_sentence(text: str) -> str:
    """Return the command at the start of a text, without the words that a sentence adds."""
    return re.sub(r"(?:,? or|,? and|[,:]|(?<!\.)\.)? *$", "", _WORDS.sub("", text))


def commands_of(hint: str) -> Iterator[list[str]]:
    """Yield the complete command of a hint: nothing in it stands for a name or a value."""
    for match in _COMMAND.findall(hint):
        words = shlex.split(cut_sentence(match).removesuffix(" <"))[1:]
        placeholders = [word for word in words if re.fullmatch(r"[A-Z][A-Z:_,]*(?:\.\w+|\.\.\.)?", word)]
        if not placeholders and len(words) > 1 and "<" not in words and "..." not in words:
            yield words


def refusal(printed: str) -> str:
    """Return the sentence of a refused command."""
    return printed.partition("\nhint: ")[0]


_following: list[str] = []


def follow(printed: str, folder: Path | None, run: Callable[..., Any]) -> None:
    """Assert that no command in a hint is refused for the same reason; each runs in a copy of the folder."""
    if _following:
        return
    for hint in hints_of(printed):
        for words in commands_of(hint):
            _following.append(hint)
            try:
                with tempfile.TemporaryDirectory(prefix="hints") as workplace:
                    copy = Path(workplace) / "copy"
                    shutil.copytree(folder, copy, symlinks=True) if folder is not None else copy.mkdir()
                    ran = run(*words, cwd=copy)
            finally:
                _following.clear()
            assert ran.status in (0, 1) or refusal(ran.err) != refusal(printed), f"{words}\n{ran.err}"


# --- In Python ------------------------------------------------------------------------------------------

_CALL = re.compile(r"ckpttool\.[a-z]\w*\(")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def calls_of(hint: str) -> Iterator[str]:
    """Yield the calls of public functions in a hint, as far as Python parses them."""
    for match in _CALL.finditer(hint):
        for end in re.finditer(r"\)", hint[match.start() :]):
            call = hint[match.start() : match.start() + end.end()]
            with contextlib.suppress(SyntaxError):
                ast.parse(call, mode="eval")
                yield call
                break
        else:
            raise AssertionError(f"no call: {hint}")


def sentences_of(result: Any) -> str:
    """Return what a person reads of a result: the texts of its document, and its table in a notebook."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)

    page = html.unescape(re.sub("<[^>]*>", "\n", result._repr_html_()))
    return "\n".join([*texts(result.document()), page])
