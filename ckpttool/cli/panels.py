"""Option panels: a dataclass is one titled group in a command's help, and one argument of its function.

The docstring of a dataclass declares its options, under the titles of one or several panels:

    Evaluation:
        episodes (N): Episodes to play.
        jobs (N, --jobs -j): Play in N processes.
        seed (N, 0..4294967295): First seed.
        dtype (NAME, float32|float64): Precision of the policy.
        stochastic (--stochastic): Draw actions from the policy's distribution.

In parentheses are the placeholder of the value, the names of the option if another one than the field's, the
range of a number (from 1 by default for whole ones) and the words that a shell completes. A flag `--no-NAME`
of a field NAME that is true by default turns it off. Fields described without parentheses are no options. The
help ends with the first line that ends with a full stop; docs/api.md also shows the lines below it. A
field whose type is annotated like a parameter of a typer command needs no line: it is in the first panel.
Mutually exclusive options raise UsageError in `__post_init__`.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError

_SECTION = deferred.compile(r"(\S.*):")
_ENTRY = deferred.compile(r" {4}(\w+)(?: \((.*?)\))?:(?: (.*))?")
_RANGE = deferred.compile(r"(\d+)\.\.(\d*)")


class _Declaration(NamedTuple):
    """What a docstring states about a field: the panel, the words in parentheses, and the help."""

    title: str
    words: str | None
    help: str


def given_options(panel: Any) -> Iterator[str]:
    """Yield the words of a command line that set the panel's options, except those with their defaults."""
    for parameter, shown in zip(dataclasses.fields(panel), _panel_parameters(type(panel)), strict=True):
        value, (option,) = getattr(panel, parameter.name), shown.annotation.__metadata__
        factory = parameter.default_factory
        if value is None or value == (parameter.default if factory is dataclasses.MISSING else factory()):
            continue
        name = next(
            (n for n in _option_names(option) if n.startswith("--")), f"--{parameter.name.replace('_', '-')}"
        )
        for one in value if isinstance(value, list) else [value]:
            yield name.split("/")[-1 if one is False else 0]
            if not isinstance(one, bool):
                yield from map(str, one if isinstance(one, tuple) else (one,))


def _option_names(option: typer.models.OptionInfo) -> list[str]:
    # typer takes the first name of an annotated option for its default.
    return [str(name) for name in (option.default, *(option.param_decls or ()))]


@functools.cache
def option_fields(panel: Any) -> dict[str, str]:
    """Return the field of each option of a dataclass by the option's names."""
    options = ((entry.name, entry.annotation.__metadata__[0]) for entry in _panel_parameters(panel))
    return {
        word: name for name, option in options for names in _option_names(option) for word in names.split("/")
    }


def takes_panels(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command with the options of every dataclass that this function takes."""
    hints = get_type_hints(command, include_extras=True)
    panels: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    options = {name: [*_panel_parameters(panel)] for name, panel in panels.items()}
    shown: list[inspect.Parameter] = []
    for param in inspect.signature(command).parameters.values():
        if param.name not in panels:
            shown.append(param.replace(annotation=hints[param.name], kind=inspect.Parameter.KEYWORD_ONLY))
        shown += options.get(param.name, ())
    shown = _arrange(shown, list(options.values()), panels.values())

    @functools.wraps(command)
    def run(**arguments: Any) -> int:
        for name, panel in panels.items():
            arguments[name] = panel(**dict(_values(panel, options[name], arguments)))
        return command(**arguments)

    # typer reads both attributes, and neither may be the wrapped function's.
    run.__signature__ = inspect.Signature(shown, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown} | {"return": int}
    return run


def _values(
    panel: Any, options: Sequence[inspect.Parameter], values: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields with the values of their options, taken from those of the command."""
    defaults = {field.name: field.default for field in dataclasses.fields(panel)}
    for option in options:
        value = values.pop(option.name)
        if option.default is False and defaults[option.name] is True:
            yield option.name, not value
        elif value is not None or option.default is not None:
            yield option.name, value


def _arrange(
    shown: list[inspect.Parameter],
    options: Sequence[Sequence[inspect.Parameter]],
    panels: Iterable[Any],
) -> list[inspect.Parameter]:
    """Return the parameters in the order in which a dataclass of several panels lists its fields.

    The options of other dataclasses follow the field of theirs that it lists, or are the last of a panel.
    """
    every = [_declarations(panel) for panel in panels]
    several = [declared for declared in every if len({option.title for option in declared.values()}) > 1]
    listed = {name: option.title for declared in several for name, option in declared.items()}
    places = {name: number for number, name in enumerate(listed)}
    order = sorted(dict.fromkeys(listed.values()), key="Output".__eq__)  # what is written and printed: last
    titles = {title: number for number, title in enumerate(order)}
    ranks: dict[str, tuple[int, int]] = {}
    for group in options if listed else ():
        position = len(listed)
        for parameter in group:
            title = parameter.annotation.__metadata__[0].rich_help_panel
            position = places[parameter.name] if listed.get(parameter.name) == title else position
            ranks[parameter.name] = titles[title], position
    # What has no panel stays before the panels or after them.
    first = next((number for number, parameter in enumerate(shown) if parameter.name in ranks), 0)
    rest = {parameter.name: (-1 if at < first else len(titles), 0) for at, parameter in enumerate(shown)}
    return sorted(shown, key=lambda parameter: (rest | ranks)[parameter.name])


def _declarations(panel: Any) -> dict[str, _Declaration]:
    """Return what the docstrings of a dataclass and its bases state about fields; UsageError without any."""
    declared: dict[str, _Declaration] = {}
    for kind in reversed(panel.__mro__[:-1]):
        title, name = "", ""
        for line in inspect.cleandoc(vars(kind)["__doc__"] or "").splitlines():
            if head := _SECTION.fullmatch(line):
                title = head[1]
            elif title and (entry := _ENTRY.fullmatch(line)):
                name = entry[1]
                declared[name] = _Declaration(title, entry[2], entry[3] or "")
            elif name and line.startswith(" " * 8) and not declared[name].help.endswith("."):
                declared[name] = declared[name]._replace(help=f"{declared[name].help} {line.strip()}".strip())
    if not declared:
        raise UsageError("docstrings declare the options, and python -OO has none", hint="use python -O")
    return declared


def _panel_parameters(panel: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field that is an option, under the panel's title."""
    declared = _declarations(panel)
    first = next(iter(declared.values())).title
    options = [
        parameter
        for parameter in dataclasses.fields(panel)
        if parameter.name not in declared or declared[parameter.name].words is not None
    ]
    # Types of other fields may be imported for type checkers only.
    types = SimpleNamespace(__annotations__={parameter.name: parameter.type for parameter in options})
    names: dict[str, Any] = {}
    for kind in reversed(panel.__mro__):
        names |= vars(sys.modules[kind.__module__])
    hints = get_type_hints(types, names, include_extras=True)
    for parameter in options:
        hint, default = hints[parameter.name], parameter.default
        if parameter.name in declared:
            hint, option, default = _make_option(parameter.name, hint, default, declared[parameter.name])
        else:
            hint, *notes = get_args(hint)
            (option,) = (copy.copy(note) for note in notes if isinstance(note, typer.models.OptionInfo))
            option.rich_help_panel = first
        # Create a separate list for every call of the command.
        if parameter.default_factory is not dataclasses.MISSING:
            option.default_factory = parameter.default_factory
        yield inspect.Parameter(
            parameter.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=Annotated[hint, option],
        )


def complete_field(field: str | None, *words: str) -> Callable[[str], list[str]]:
    """Return the shell completion of a field: these words, or what `completion` offers for its name."""

    def offered(incomplete: str) -> list[str]:
        from ckpttool.cli import completion  # only a shell that completes a word needs it

        return completion.complete(field, words, incomplete)

    return offered


def _make_option(
    name: str, hint: Any, default: Any, declared: _Declaration
) -> tuple[Any, typer.models.OptionInfo, Any]:
    """Return the type, the option and the default of a field that a docstring declares."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    names: list[str] = []
    bounds: tuple[int | None, int | None] = (1, None) if int in (hint, *get_args(hint)) else (None, None)
    for number, word in enumerate((declared.words or "").split(", ")):
        if word.startswith("--"):
            names = word.split()
        elif limits := _RANGE.fullmatch(word):
            bounds = int(limits[1]), int(limits[2]) if limits[2] else None
        elif number and "|" in word:
            choices = tuple(word.split("|"))
        else:
            metavar = word or None
    if get_origin(hint) is collections.abc.Sequence:
        hint, default = list[str] | None, None
    if hint is bool and names and names[0].startswith("--no-"):
        default = not default
    option = typer.Option(
        *(names or [f"--{name.strip('_').replace('_', '-')}"]),
        metavar=metavar,
        help=declared.help,
        min=bounds[0],
        max=bounds[1],
        autocompletion=complete_field(name, *choices),
        show_default=bool not in get_args(hint),
        rich_help_panel=declared.title,
    )
    return hint, option, default
