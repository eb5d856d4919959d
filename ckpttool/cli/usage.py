"""Errors of the command line: what is wrong with the words of a command, and the command to run instead."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.core import urls
from ckpttool.core.errors import (
    ChangedError,
    CkpttoolError,
    DeadlineError,
    EnvironmentMismatchError,
    FormatError,
    LimitError,
    MappingError,
    NotACheckpointError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    WorkerError,
    did_you_mean,
)

if TYPE_CHECKING:
    import typer.core

NAME = "ckpttool"
# The command that takes several checkpoints, for one that takes a single one.
_FOR_TWO = {"inspect": "diff", "digest": "diff", "stats": "diff", "doctor": "check", "PATH": "diff"}
# What other programs call a command.
_SYNONYMS = {
    **dict.fromkeys(("cat", "info", "list", "ls", "print", "show", "summary", "tree", "view"), "inspect"),
    **dict.fromkeys(("enjoy", "evaluate", "play", "render", "rollout", "run", "score", "test"), "eval"),
    **dict.fromkeys(("export", "save", "to", "transform"), "convert"),
    **dict.fromkeys(("checksum", "hash", "sha256"), "digest"),
    **dict.fromkeys(("audit", "lint", "scan"), "check"),
    **dict.fromkeys(("prove", "validate"), "verify"),
    **dict.fromkeys(("cmp", "compare"), "diff"),
    **dict.fromkeys(("open", "tui"), "browse"),
    **dict.fromkeys(("html", "page"), "report"),
}

# Options before the command, with their values.
_PROGRAM_OPTIONS = {"--limit": "NAME=N"}

Commands = Sequence[str]
LoadCommand = Callable[[str], "typer.core.TyperCommand"]


def convert_usage_error(
    error: Any, words: Sequence[str], commands: Commands, load: LoadCommand
) -> UsageError:
    """Return our own error for a usage error of typer, with a next step.

    Args:
        error: the error; its class moved between typer's versions, so its attributes decide.
        words: the arguments of the program.
        commands: the names of all commands.
        load: returns a command by its name.
    """
    text = str(error.format_message()).strip()
    name = _command_name(error, words, commands)
    command = None if name not in commands else load(name)
    if getattr(error, "option_name", None) and hasattr(error, "possibilities"):
        return _unknown_option(error, name, words, commands, load)
    if (unknown := re.match(r"No such command '(.+?)'", text)) is not None:
        return _unknown_command(unknown[1], words, commands, load)
    param = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and command is not None:
        return UsageError(_lower(text), hint=_usage(command, words))
    if (extra := _extra_words(text, words)) and name:
        return _too_many_paths(error, name, extra, words, command)
    if param is not None and (number := _number_error(param, text)) is not None:
        sentence = f"invalid value for '{param.opts[0]}'"
        return UsageError(sentence, expected=number[0], found=number[1], hint=_help(name))
    return UsageError(_lower(text), hint=_option_hint(text, name, command))


def complete_not_found(error: CkpttoolError, words: Sequence[str]) -> None:
    """Set the hint of a missing path whose place among the words shows what was meant."""
    paths = [word for word in words[1:] if not word.startswith("-")]
    if not isinstance(error, NotFoundError) or len(paths) < 2:
        return
    if words[0] == "convert" and error.file == paths[0] and os.path.exists(paths[1]):
        swapped = {paths[0]: paths[1], paths[1]: paths[0]}
        error.hint = shlex.join((NAME, *(swapped.get(word, word) for word in words)))
    elif words[0] == "report" and error.file == paths[1] and paths[1].endswith((".html", ".htm")):
        at = list(words).index(paths[1])
        error.hint = shlex.join((NAME, *words[:at], "--out", *words[at:]))


def fill_hint(error: CkpttoolError, words: Sequence[str]) -> None:
    """Give an error without a hint the next step of its kind."""
    command = words[0] if words and not words[0].startswith("-") else ""
    if error.hint is not None:
        return
    if isinstance(error, LimitError):
        error.hint = f"{NAME} limits"
    elif isinstance(error, ChangedError | DeadlineError):
        error.hint = "run the command again"
    elif isinstance(error, FormatError):
        error.hint = "if the file is damaged, copy or download it again"
    elif isinstance(error, UnsupportedError | MappingError) and error.file is not None:
        # Only what the user named is opened again: a file beside it may be a link to elsewhere.
        if command != "inspect" and error.file in words and _can_be_listed(error.file):
            error.hint = shlex.join((NAME, "inspect", urls.display_url(error.file)))
    elif isinstance(error, EnvironmentMismatchError):
        instead = " instead" if "--env" in words else ""
        error.hint = f"pass --env ID of the environment in which the agent was trained{instead}"
    elif isinstance(error, WorkerError) and "--python" in words[:-1]:
        python = words[list(words).index("--python") + 1]
        error.hint = f"check the interpreter: {shlex.join((python, '--version'))}"
    elif isinstance(error, UsageError | NotFoundError | NotACheckpointError):
        error.hint = _help(command)


def _can_be_listed(path: str) -> bool:
    from ckpttool.formats.detect import open_checkpoint

    try:
        open_checkpoint(path)
    except (CkpttoolError, OSError):
        return False
    return True


def complete_inspect_hint(error: CkpttoolError, words: Sequence[str]) -> None:
    """Set the path in a hint to inspect the source of this command."""
    bare = f"run {NAME} inspect to "
    if error.hint is None or bare not in error.hint:
        return
    path = next((word for word in words[1:] if not word.startswith("-")), None)
    if path is not None:
        command = shlex.join((NAME, "inspect", path))
        error.hint = error.hint.replace(bare, f"run {command} to ")


def _command_name(error: Any, words: Sequence[str], commands: Commands) -> str:
    """Return the command that the error is about; "" for the program's own options."""
    context = getattr(error, "ctx", None)
    if context is not None and context.parent is not None:
        return str(context.info_name)
    return next((word for word in words if word in commands), "") if context is None else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _help(name: str) -> str:
    return f"{NAME} {name} --help" if name and name != "PATH" else f"{NAME} --help"


def _usage(command: Any, words: Sequence[str]) -> str:
    """Return the command with its arguments: those given, then the names of the missing ones."""
    missing = _missing_arguments(command, words[1:])
    if missing == ["DST"] and "--to" not in words:
        from ckpttool.conversion.targets import list_targets

        return f"add a target such as agent.pt, or another name with --to: {list_targets()}"
    return f"{shlex.join((NAME, *words))} {' '.join(missing)}"


def _missing_arguments(command: Any, words: Sequence[str]) -> list[str]:
    """Return the names of the arguments that the words after a command lack."""
    names = [param.metavar or param.name for param in command.params if param.param_type_name == "argument"]
    return [name for name in names[len(_arguments(command, words)) :] if not name.startswith("[")]


def _arguments(command: Any, words: Sequence[str]) -> list[str]:
    """Return the words that are no options and no values of options."""
    values = {
        name: param.nargs
        for param in command.params
        if param.param_type_name == "option" and not (param.is_flag or param.count)
        for name in param.opts
    }
    positional: list[str] = []
    skipped = 0
    for word in words:
        if skipped:
            skipped -= 1
        elif word.startswith("-") and word != "-":
            skipped = values.get(word, 0)
        else:
            positional.append(word)
    return positional


def _unknown_command(word: str, words: Sequence[str], commands: Commands, load: LoadCommand) -> UsageError:
    import difflib

    near = difflib.get_close_matches(word.lower(), commands, 1)
    if word.lower() == "version":
        return UsageError(f"unknown command '{word}'", hint=f"{NAME} --version")
    meant = _SYNONYMS.get(word.lower()) or next(iter(near), None)
    if meant is None:
        return UsageError(f"unknown command '{word}'", hint=f"{NAME} --help lists all commands")
    suggested = "" if word.lower() in _SYNONYMS else f"; {did_you_mean(repr(meant))}"
    behind = words[list(words).index(word) + 1 :]
    missing = [] if "help" in words else _missing_arguments(load(meant), behind)
    hint = " ".join((_replace_word(words, word, [meant]), *missing))
    return UsageError(f"unknown command '{word}'{suggested}", hint=hint)


def _replace_word(words: Sequence[str], word: str, by: list[str]) -> str:
    at = list(words).index(word)
    return shlex.join((NAME, *words[:at], *by, *words[at + 1 :]))


def _unknown_option(
    error: Any, name: str, words: Sequence[str], commands: Commands, load: LoadCommand
) -> UsageError:
    option, near = str(error.option_name), _similar(str(error.option_name), error.possibilities)
    written = next((word for word in words if re.match(rf"{re.escape(option)}\w", word)), option)
    sentence = f"unknown option '{written}'"
    if not name and option in words and option.lstrip("-") in commands:
        return UsageError(sentence, hint=_replace_word(words, option, [option.lstrip("-")]))
    if name in commands and f"-{written}" in _options(load(name)):
        return UsageError(sentence, hint=f"{did_you_mean(f'-{written}')} see {_help(name)}")
    if name in commands and {f"{option}-a", f"{option}-b"} <= _options(load(name)):
        return UsageError(sentence, hint=f"{did_you_mean(f'{option}-a', f'{option}-b')} see {_help(name)}")
    if name in commands and (file := next((w for w in words if w.startswith("-") and os.path.isfile(w)), "")):
        hint = _replace_word(words, file, [os.path.join(os.curdir, file)])
        return UsageError(f"the path '{file}' looks like an option", hint=hint)
    if not name and (command := next((word for word in words if word in commands), None)) is not None:
        before = list(words[: list(words).index(command)])
        if before and set(before) <= _options(load(command)):
            meant = (*words[len(before) :], *before)
            return UsageError(f"{option} comes after the command", hint=shlex.join((NAME, *meant)))
    if name and option in _PROGRAM_OPTIONS:
        hint = f"{option} comes before the command: {NAME} {option} {_PROGRAM_OPTIONS[option]} {name} ..."
        return UsageError(sentence, hint=hint)
    others = [candidate for candidate in commands if name and option in _options(load(candidate))]
    if others and name not in commands:  # a path is listed and diagnosed without a command
        owner = "eval" if "eval" in others else others[0]
        return UsageError(sentence, hint=shlex.join((NAME, owner, *words)))
    if others:
        return UsageError(sentence, hint=f"{option} is an option of {', '.join(others)}; see {_help(name)}")
    return UsageError(sentence, hint=f"{f'{did_you_mean(near[0])} see ' if near else ''}{_help(name)}")


def _similar(option: str, possibilities: Sequence[str] | None) -> list[str]:
    """Return the options that are similar without their dashes, which all have in common."""
    import difflib

    names = {possibility.lstrip("-"): possibility for possibility in possibilities or ()}
    return [names[name] for name in difflib.get_close_matches(option.lstrip("-"), names)]


def _options(command: Any) -> set[str]:
    return {name for param in command.params for name in param.opts if name.startswith("-")}


def _option_hint(text: str, name: str, command: Any) -> str:
    """Return the help command, after the form of an option that has too few values."""
    match = re.search(r"Option '(--[\w-]+)' requires", text)
    for param in command.params if match is not None and command is not None else ():
        if match is not None and match[1] in param.opts and param.metavar:
            return f"{match[1]} {param.metavar}; see {_help(name)}"
    return _help(name)


def _number_error(param: Any, text: str) -> tuple[str, str] | None:
    """Return the expected number and the value, for an option whose value is no number or out of range."""
    name = str(getattr(param.type, "name", "")).partition(" ")[0]
    number = {"int": "a whole number", "integer": "a whole number", "float": "a number"}.get(name)
    match = re.search(r": (?:'(.*)'|(\S+)) is not (?:a valid|in the range)", text)
    if number is None or match is None:
        return None
    least = getattr(param.type, "min", None)
    value = match[1] if match[2] is None else match[2]
    return number if least is None else f"{number} of at least {least}", value or "nothing"


def _extra_words(text: str, words: Sequence[str]) -> list[str]:
    """Return the words that the command does not take, in their order."""
    listed = re.search(r"unexpected extra argument(?:s|\(s\))? \((.+)\)", text)
    if listed is None:
        return []
    return [word for word in words if re.search(rf"(?<!\S){re.escape(word)}(?!\S)", listed[1])]


def _too_many_paths(
    error: Any, name: str, extra: list[str], words: Sequence[str], command: Any
) -> UsageError:
    """Return the error for more words than the command takes."""
    from ckpttool.conversion.targets import EXPORTS, TARGETS, name_target

    first = str(getattr(error.ctx, "params", {}).get("path") or "")
    if os.path.exists(whole := " ".join((first, *extra))):
        rest = [word for word in words if word not in (first, *extra)]
        return UsageError("a path with blanks needs quotes", hint=shlex.join((NAME, *rest, whole)))
    if name == "PATH" and extra[0] in _SYNONYMS.values():
        return UsageError(f"unknown command '{first}'", hint=shlex.join((NAME, extra[0], first, *extra[1:])))
    if (setting := _option_without_dashes(extra[0], command)) is not None:
        return UsageError(f"unexpected argument '{extra[0]}'", hint=_replace_word(words, extra[0], setting))
    if name in _FOR_TWO and first:
        other = _FOR_TWO[name] if len(extra) == 1 else "check"
        what = "ckpttool PATH" if name == "PATH" else name
        return UsageError(f"{what} takes one checkpoint", hint=shlex.join((NAME, other, first, *extra)))
    known = (*TARGETS, *EXPORTS, "pytorch", "tensorflow")
    if name == "convert" and "--to" not in words and (target := next((w for w in words if w in known), None)):
        last = name_target(extra[-1], target)
        meant = (*(last if word == extra[-1] else word for word in words if word != target), "--to", target)
        return UsageError("convert takes a source and a target", hint=shlex.join((NAME, *meant)))
    return UsageError(f"unexpected argument '{extra[0]}'", hint=_help(name))


def _option_without_dashes(word: str, command: Any) -> list[str] | None:
    """Return the option and its value that `depth=2` stands for; None for another word."""
    name, equals, value = word.partition("=")
    option = f"--{name}"
    return [option, value] if equals and command is not None and option in _options(command) else None
