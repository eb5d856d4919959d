"""A process with a user's model: it is built and filled there (model_child), and runs there (model_runner).

The run does not depend on the filling: it loads the written file with the framework's own loader.
"""

from __future__ import annotations

from pathlib import Path

from ckpttool.networks import model_child, model_runner
from ckpttool.networks.messages import Message, message_pipes, serve

# The syntax of this file is Python 3.7's, because environments with old frameworks have old interpreters.


class HostSession:
    """The model of this process: built and filled by one session, run by the other."""

    def __init__(self, folder: Path) -> None:
        self.filled = model_child.ModelSession()
        self.run = model_runner.RunnerSession(folder, self._wrap)
        self._made = None  # type: Message | None

    def answer(self, do: str, message: Message) -> Message:
        """Answer one request."""
        if do in model_child.HANDLERS:
            if do == "build":
                self._made = message
            return model_child.HANDLERS[do](self.filled, message)
        return model_runner.HANDLERS[do](self.run, message)

    def _wrap(self) -> model_runner.ModelRunner:
        made = self._made or {}
        return model_runner.wrap_model(
            self.filled.model, lambda: model_child.call_factory(made["factory"], made["arguments"])
        )


def _answer(session: HostSession, message: Message) -> Message:
    return session.answer(message["do"], message)


HANDLERS = dict.fromkeys((*model_runner.HANDLERS, *model_child.HANDLERS), _answer)


def main(folder: str) -> None:
    """Run the process that holds a model for its parent."""
    with message_pipes() as (requests, answers):
        serve(HostSession(Path(folder)), HANDLERS, requests, answers)
