"""The program of the process that holds a user's model: it imports what the user names (see beside.py)."""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpttool.agents.messages import Message, pipes, serve
from ckpttool.agents.skeleton import factory, keras_models, tensorflow_modules, torch_models
from ckpttool.errors import UnsupportedError, UsageError, WorkerError

OWNERS = {"torch": torch_models, "keras": keras_models, "tensorflow": tensorflow_modules}  # type: dict[str, Any]


class Session:
    """The model that this process holds, its framework, and what a call told of its modules."""

    def __init__(self) -> None:
        self.model: Any = None
        self.framework = ""
        self.known: dict[int, dict[str, Any]] = {}

    @property
    def owner(self) -> Any:
        """The module that knows this framework's models."""
        return OWNERS[self.framework]


def _build(session: Session, message: Message) -> Message:
    made = factory.made(message["factory"], message["arguments"])
    framework = factory.framework(made)
    if framework is None or isinstance(made, type):
        kind = made.__name__ if isinstance(made, type) else type(made).__name__
        raise UsageError(
            "{} makes no model".format(message["factory"]),
            expected="a torch.nn.Module, a keras.Model or a tf.Module",
            found=kind,
        )
    session.model, session.framework = made, framework
    return {"framework": framework, "class": type(made).__name__, "forms": list(session.owner.FORMS)}


def _describe(session: Session, message: Message) -> Message:
    shapes, guessed = message["shapes"] or [], message["guessed"] or []
    session.known = session.owner.build(session.model, shapes, guessed)
    modules = session.owner.describe(session.model)
    for module in modules:
        module.update(session.known.get(module.pop("id"), {}))
    return {"modules": modules}


def _save(session: Session, message: Message) -> Message:
    form = message["form"]
    if form not in session.owner.FORMS:
        raise UnsupportedError(f"a {session.framework} model is not loaded from this form", found=form)
    return {"file": session.owner.save(session.model, message["file"], form)}


def _number(session: Session, message: Message) -> Message:
    del message
    return {"done": session.owner.number(session.model)}


def _load(session: Session, message: Message) -> Message:
    try:
        session.owner.load(session.model, message["file"], message["form"])
    except Exception as error:
        raise WorkerError("the model does not load what was written: " + factory.last_line(error)) from error
    return {}


def _close(_session: Session, _: Message) -> Message:
    # Frameworks abort now and then while an interpreter shuts down; nothing here is left to save.
    os._exit(0)


HANDLERS = {
    "build": _build,
    "describe": _describe,
    "save": _save,
    "number": _number,
    "load": _load,
    "close": _close,
}


def main() -> None:
    """Hold a model for the process that started this one."""
    with pipes() as (requests, answers):
        serve(Session(), HANDLERS, requests, answers)


if __name__ == "__main__":
    main()
    sys.exit(0)
