"""A torch.nn.Module: described, saved as its state_dict, loaded strictly."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ckpttool.agents.skeleton.calls import Calls, Probes, known
from ckpttool.agents.skeleton.factory import has_own_call, known_class, last_line, plain_facts
from ckpttool.agents.skeleton.tracing import TorchTrace, Trace
from ckpttool.errors import UsageError

FORMS = ("torch",)


def build(model: Any, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Give lazy parameters their shapes by a call; return what a call tells of modules (see calls.known).

    `shapes` are the inputs' without their batch, as the user gives them. Raise UsageError when the model
    cannot be called with them.
    """
    lazy = [n for n, p in model.named_parameters() if type(p).__name__ == "UninitializedParameter"]
    if lazy and not (shapes or guessed):
        raise UsageError(
            "the model has parameters without a shape before its first call",
            path=lazy[0],
            hint="--input-shape 17 or --input-shape 4,84,84 tells what it is called with",
        )
    if not (shapes or lazy):
        # A configuration tells of images whose channels stand last.
        for each in _guesses(guessed):
            try:
                return _without_inputs(_followed(model, each), each)
            except Exception:  # noqa: BLE001, S112 - the shape was a guess
                continue
        return {}
    return _followed(model, shapes or guessed)


def _without_inputs(told: dict[int, dict[str, Any]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Return what a call tells, without the order of vectors of a guessed length.

    A module that takes one may take a flattened image, which a model that flattens takes as a vector too.
    """
    vectors = [[[1, shape[0]]] for shape in guessed if len(shape) == 1]
    for each in told.values():
        takes = each.get("orders", {}).get("in")
        if isinstance(takes, dict) and [list(part) for part in takes["parts"] or ()] in vectors:
            del each["orders"]["in"]
    return told


def _guesses(guessed: list[list[int]]) -> list[list[list[int]]]:
    if not guessed:
        return []
    first = [[shape[-1], *shape[:-1]] if len(shape) > 2 else shape for shape in guessed]
    rows = [[*shape[1:], shape[0]] if len(shape) == 2 else shape for shape in first]
    frames = [[s[0], s[-1], *s[1:-1]] if len(s) > 3 else s for s in guessed]
    return [first, rows, frames, guessed]


def _followed(model: Any, shapes: list[list[int]]) -> dict[int, dict[str, Any]]:
    calls, trace, probes = Calls(), TorchTrace(), Probes()

    def noted(module: Any, given: Any, made: Any) -> None:
        _note(calls, trace, module, given, made)
        if vars(module).get("_parameters") and has_own_call(module, "forward"):
            probes.note(module, given)

    hooks = [module.register_forward_hook(noted) for module in model.modules()]
    found: dict[int, dict[str, Any]] = {}
    trained = [(module, module.training) for module in model.modules()]
    try:
        _call(model.eval(), shapes, calls, trace)
        for hook in hooks:
            hook.remove()
        found = probes.found(_held, _computed)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in trained:
            module.training = training
    told = known(calls, trace)
    for module, each in found.items():
        told.setdefault(module, {}).update(each)
    return told


def _held(module: Any) -> dict[str, Any]:
    """Return a module's own tensors by name, as arrays; raise ValueError if it has modules besides."""
    if vars(module).get("_modules"):
        raise ValueError("a module with others in it")
    held = {**vars(module).get("_parameters", {}), **vars(module).get("_buffers", {})}
    return {name: each.detach().cpu().numpy() for name, each in held.items() if each is not None}


def _computed(module: Any, x: Any, like: Any) -> Any:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        return module(torch.from_numpy(x).to(like.device, like.dtype)).cpu().numpy()


def _note(calls: Calls, trace: Trace, module: Any, given: Any, made: Any) -> None:
    calls.note(module, given, made)
    calls.flow(module, given, made)
    if vars(module).get("_parameters") or vars(module).get("_buffers"):
        name = known_class(module)
        channels = any(part in name for part in ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "PReLU"))
        trace.module(module, given, made, lambda rank: 1 if channels else rank - 1)


def _call(model: Any, shapes: list[list[int]], calls: Calls, trace: TorchTrace) -> None:
    torch: Any = sys.modules["torch"]

    def call(dtype: Any) -> None:
        given = [torch.zeros((1, *shape), dtype=dtype) for shape in shapes]
        trace.border(given, 1)
        with trace.following():
            made = model(*given)
        trace.border(made, 1)

    with torch.no_grad(), _functions(torch, calls):
        try:
            call(torch.get_default_dtype())
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            try:  # a model that looks words up wants whole numbers
                call(torch.int64)
            except Exception:  # noqa: BLE001 - the first answer is the one to tell
                shown = " and ".join(map(str, shapes))
                raise UsageError(
                    f"the model cannot be called with inputs of shape {shown}: {last_line(error)}"
                ) from error


def _functions(torch: Any, calls: Calls) -> Any:
    """Return a context in which torch's functions are noted too: pooling, flattening, reshaping."""
    try:
        mode = torch.overrides.TorchFunctionMode
    except AttributeError:  # before torch 1.13
        return contextlib.nullcontext()

    def noted(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del self, types
        made = function(*args, **(kwargs or {}))
        if type(made).__name__ == "Tensor" and args:
            calls.note(None, args[0], made)
        calls.flow(None, (args, kwargs or {}), made)
        return made

    return type("Functions", (mode,), {"__torch_function__": noted})()


def describe(model: Any) -> list[dict[str, Any]]:
    """Return every module in the order of definition; a tensor is named by its key in the state_dict."""
    known = model.state_dict(keep_vars=True)
    modules = []
    for path, module in model.named_modules():
        held = vars(module)
        names = [*held.get("_parameters", ()), *held.get("_buffers", ())]
        keys = {name: path + "." + name if path else name for name in names}
        modules.append(
            {
                "id": id(module),
                "path": path.split(".") if path else [],
                "class": known_class(module),
                "own": type(module).__name__ if has_own_call(module, "forward") else "",
                "facts": plain_facts(held),
                "tensors": [[name, key] for name, key in keys.items() if key in known],
            }
        )
    return modules


def number(model: Any) -> bool:
    """Say that keys tell whose a tensor is."""
    del model
    return False


def save(model: Any, file: str, form: str) -> str:
    """Write the state_dict; return the file."""
    del form
    torch: Any = sys.modules["torch"]
    torch.save(model.state_dict(), file + ".pt")
    return file + ".pt"


def load(model: Any, file: str, form: str) -> None:
    """Load the file strictly."""
    del form
    torch: Any = sys.modules["torch"]
    model.load_state_dict(torch.load(file, map_location="cpu"), strict=True)
