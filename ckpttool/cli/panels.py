"""Option panels: a dataclass is one titled group in a command's help, and one argument of its function."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, TypeGuard, get_args, get_type_hints

import typer


class OptionPanel:
    """Base of dataclasses whose fields are the options in one panel of a command's help.

    A field is annotated like a parameter of a typer command; its default is the option's default.
    Mutually exclusive options raise UsageError in `__post_init__`.
    """

    TITLE: ClassVar[str]

    def __init_subclass__(cls, title: str) -> None:
        cls.TITLE = title


def given_options(panel: OptionPanel) -> Iterator[str]:
    """Yield the words of a command line that set the panel's options, except those with their defaults."""
    for each, shown in zip(dataclasses.fields(panel), _panel_parameters(type(panel)), strict=True):  # type: ignore[arg-type]
        value, (option,) = getattr(panel, each.name), shown.annotation.__metadata__
        factory = each.default_factory
        if value is None or value == (each.default if factory is dataclasses.MISSING else factory()):
            continue
        # typer takes the first name of an annotated option for its default.
        names = [str(name) for name in (option.default, *(option.param_decls or ()))]
        name = next((n for n in names if n.startswith("--")), f"--{each.name.replace('_', '-')}")
        for one in value if isinstance(value, list) else [value]:
            yield name.split("/")[-1 if one is False else 0]
            if not isinstance(one, bool):
                yield from map(str, one if isinstance(one, tuple) else (one,))


def takes_panels(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command with the options of every `OptionPanel` parameter of this function."""
    hints = get_type_hints(command, include_extras=True)
    panels = {name: hint for name, hint in hints.items() if _is_panel(hint)}
    shown: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        if each.name in panels:
            shown += _panel_parameters(panels[each.name])
        else:
            shown.append(each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> int:
        for name, panel in panels.items():
            given[name] = panel(**{each.name: given.pop(each.name) for each in dataclasses.fields(panel)})
        return command(**given)

    # typer reads both attributes, and neither may be the wrapped function's.
    run.__signature__ = inspect.Signature(shown, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown} | {"return": int}
    return run


def _is_panel(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and issubclass(hint, OptionPanel)


def _panel_parameters(panel: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field, with its option under the panel's title."""
    hints = get_type_hints(panel, include_extras=True)
    for each in dataclasses.fields(panel):
        value, *notes = get_args(hints[each.name])
        (option,) = (copy.copy(note) for note in notes if isinstance(note, typer.models.OptionInfo))
        option.rich_help_panel = panel.TITLE
        # Create a separate list for every call of the command.
        if each.default_factory is not dataclasses.MISSING:
            option.default_factory = each.default_factory
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option]
        )
