"""The audit of a file that needs more than plain data: its sentence, its notes, its JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ckpttool.core import code_references, deferred
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import By, CodeReference
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import FormatError, NotFoundError, UsageError, abbreviate_list, from_system_error
from ckpttool.core.text import clean
from ckpttool.listing.findings import unjudged_findings

_LINES = 20
_NAMED = 3
# Why each verdict matters, by the loader that would act.
_WHY: dict[By, str] = {
    "pickle": "pickle.load runs it, torch.load(weights_only=True) refuses it",
    "keras": "Keras uses it to create the model; safe_mode refuses lambdas only",
    "torchscript": "torch.jit.load compiles it",
    "tensorflow": "TensorFlow runs it with the model",
    "onnx": "it is neither an operator of ONNX nor a file beside the model",
    "program": "it is a program or library, which loaders of the archive import or start",
}

_ELSEWHERE = "they belong to other packages"
_WHY_CLASSES: Mapping[By, str] = {
    "keras": "Keras loads them where they are registered",
    "onnx": "onnxruntime needs the library that defines them",
}


def audit_notes(references: Iterable[CodeReference]) -> tuple[str, ...]:
    """Return a line per name that unpickling would call or could have called; a count after 20."""
    acting = [
        reference for reference in code_references.unsafe_references(references) if reference.by == "pickle"
    ]
    lines = [_call_note(reference) for reference in acting[:_LINES]]
    if len(acting) > _LINES:
        lines.append(
            f"unpickling this file would call {len(acting) - _LINES:,} more; use --json to list them"
        )
    return tuple(lines)


def _call_note(reference: CodeReference) -> str:
    if reference.verdict == code_references.UNKNOWN:
        return (
            f"unpickling this file would create an instance of {reference.name}, which runs that class's code"
        )
    if reference.calls:
        return (
            f"unpickling this file would call {reference.name}; nothing was run, and it is shown as a record"
        )
    return f"unpickling this file would import {reference.name}, which can run code; nothing was run"


_ALLOWED_NAME = deferred.compile(r"[^\W\d]\w*(\.[\w<>]+)*")


def read_allowed_names(names: Sequence[str], file: str | None = None) -> frozenset[str]:
    """Return the names of `--allow`, and those that a TOML file lists under `allow`.

    The file has a list of names, or a table from each name to the reason. Raise NotFoundError, FormatError
    or UsageError for a missing file, another document, and a name that is not dotted identifiers.
    """
    listed = list(names)
    if file is not None:
        listed += _read_allow_file(file)
    for name in listed:
        if not _ALLOWED_NAME.fullmatch(name):
            raise UsageError(
                f"not the name of a module, class or function: {name!r}",
                hint="use --allow MODULE with the name of a Python module",
            )
    return frozenset(listed)


_ALLOW_BYTES = 1 << 20


def _read_allow_file(file: str) -> list[str]:
    import tomllib

    try:
        with open(file, "rb") as stream:
            data = stream.read(_ALLOW_BYTES + 1)
        if len(data) > _ALLOW_BYTES:
            raise FormatError("too large for a file of allowed names", file=file)
        allow = tomllib.loads(data.decode()).get("allow")
    except FileNotFoundError as error:
        raise NotFoundError("file of allowed names not found", file=file) from error
    except OSError as error:
        raise from_system_error(error) or error from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a TOML document: {error}", file=file) from error
    if isinstance(allow, dict) and any(isinstance(rule, dict) for rule in allow.values()):
        raise FormatError("quote the names: a dot without quotes begins another table", file=file)
    reasons = allow.values() if isinstance(allow, dict) else ()
    names = list(allow) if isinstance(allow, list | dict) else []
    texts = (*names, *reasons)
    if allow is None or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise FormatError(
            "the file does not list allowed names",
            file=file,
            expected='allow = ["my_project.networks"], or a table with a reason for each name',
            found="no such list" if allow is None else type(allow).__name__,
        )
    return names


def build_audit_document(references: Iterable[CodeReference]) -> dict[str, Any]:
    """Return the JSON object: the worst verdict, and the verdict of every name."""
    listed = list(references)
    return {
        "verdict": code_references.worst_verdict(listed),
        "names": [reference.document() for reference in listed],
    }


LoadingLabel = Literal["SAFE to load", "NEEDS CLASSES", "RUNS CODE", "NOT CHECKED"]
SAFE: LoadingLabel = "SAFE to load"


class LoadingVerdict(NamedTuple):
    """The consequence of loading a file: `label`, what it is about, and whether `check` passes it."""

    label: LoadingLabel
    reason: str
    passes: bool

    @property
    def sentence(self) -> str:
        """The label with its reason."""
        return f"{self.label}: {self.reason}"


def judge_loading(opened: Checkpoint) -> LoadingVerdict:
    """Return the verdict on loading a checkpoint by its format's own library."""
    references = opened.code_references
    unsafe = code_references.worst_verdict(references) in code_references.UNSAFE
    if opened.unjudged and not unsafe:
        return LoadingVerdict("NOT CHECKED", next(unjudged_findings(opened.unjudged)).sentence, passes=False)
    if not references:
        return LoadingVerdict(SAFE, "plain data", passes=True)
    return summarize_audit(references)


def summarize_audit(references: Sequence[CodeReference]) -> LoadingVerdict:
    """Return the verdict on loading a file that refers to these names."""
    worst = code_references.worst_verdict(references)
    if worst == code_references.PLAIN:
        return LoadingVerdict(SAFE, "plain data", passes=True)
    chosen = code_references.filter_verdict(references, worst)
    names = abbreviate_list([clean(reference.name) for reference in chosen], _NAMED)
    if worst == code_references.UNKNOWN:
        why = "unknown, and pickle.load runs their code; --allow NAME if they are yours"
        return LoadingVerdict("NEEDS CLASSES", f"{names} ({why})", passes=False)
    if worst == code_references.CODE:
        return LoadingVerdict("RUNS CODE", f"{names} ({_WHY[chosen[0].by]})", passes=False)
    why = _WHY_CLASSES.get(chosen[0].by, _ELSEWHERE)
    if chosen[0].by == "pickle":
        why = "pickle.load imports them, torch.load(weights_only=True) refuses them"
    return LoadingVerdict("NEEDS CLASSES", f"{names} ({why})", passes=True)


def format_audit(references: Sequence[CodeReference]) -> list[str]:
    """Return a line per name, worst first: verdict, calls, name and location."""
    order = [
        reference
        for verdict in reversed(code_references.VERDICTS)
        for reference in code_references.filter_verdict(references, verdict)
    ]
    width = max((len(f"{reference.calls:,}") for reference in order), default=0)
    return [
        f"{reference.verdict:<14}  {_describe_calls(reference, width)}  {clean(reference.name)}"
        f"{_format_location(reference)}"
        for reference in order
    ]


def _describe_calls(reference: CodeReference, width: int) -> str:
    return f"called {reference.calls:>{width},}" if reference.calls else f"{'named':<{width + 7}}"


def _format_location(reference: CodeReference) -> str:
    lines = [] if reference.offset is None else [f"at byte {reference.offset:,}"]
    lines += [f"in {clean(reference.where)}"] if reference.where else []
    return f"  ({', '.join(lines)})" if lines else ""
