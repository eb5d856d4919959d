"""Evidence in files beside a checkpoint: statistics, and settings of its program."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import deferred, filesystem, sidecar
from ckpttool.core import text as documents
from ckpttool.core.deferred import DeferredModule, NamedTuple
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.sidecar import LedgerEntry, Topic
from ckpttool.evaluation.evidence_effect import ConversionUsage, PolicyUsage

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.evaluation import vocabulary
else:
    # Most checkpoints contain nothing but the agent.
    vocabulary = DeferredModule("ckpttool.evaluation.vocabulary")


# Words in the names of statistics files beside a checkpoint, and of settings files.
_STATISTICS_WORDS = deferred.compile(
    r"(vec_?)?norm(ali[sz](e|er|ation))?|vecnormali[sz]e|\w*rms|stats?|statistics|(z|mean_?std_?)?filter|scal(er|ing)"
    r"|whiten(ing)?|preproc(essor)?|running|mean|std|var|meanstd"
)
_NORMALISER_FILE = deferred.compile(
    r"^(vec_?normalize\w*|(obs_?|observation_?|state_?)?normali[sz]er\w*|(obs|observation|state)_?(rms|norm|stats?"
    r"|statistics|mean_?std|scaler)\w*|running_mean_std\w*|norm(alization)?_?(stats?|params)\w*|rms)\."
)
_RUN_PART = deferred.compile(
    r"(best|final|last|latest|check_?points?|ckpts?|models?|policy|policies|weights|saves?|saved|evals?|env(ironment)?s?)"
    r"(_(models?|policy|check_?points?|ckpts?|weights))?"
)
# Keras writes the weights of models only as `.weights.h5` (keras/src/saving/saving_api.py).
_STATISTICS_FILE = deferred.compile(
    r"(.+)(?<!\.weights)\.(pkl|pickle|pt|pth|npz|npy|json|h5|hdf5|safetensors|csv|txt)"
)
_SETTINGS_WORDS = deferred.compile(
    r"config(uration)?|conf|cfg|params?|args|flags|options?|opts|hparams|hyper|hyperparam(eter)?s?|settings|agent"
)
_SETTINGS_FILE = deferred.compile(r"(.+)\.(ya?ml|json|toml|txt|gin)", re.IGNORECASE)
_NAMESPACE = deferred.compile(r"""(\w+)=('[^']*'|"[^"]*"|[^,()\[\]]+)""")
_WORDS = deferred.compile(r"[^._\-\s]+")
_MOST_OPENED, _LARGEST = 40, 1 << 20
_MOST_NEIGHBOURS = 100
_NUMBER = deferred.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def list_folder_evidence(
    checkpoint: Checkpoint, facts: PolicyUsage | ConversionUsage
) -> Iterator[LedgerEntry]:
    """Yield evidence in files of the checkpoint's run: statistics, and settings in its folder."""
    if filesystem.find_store(checkpoint.path) is not None:
        return
    folder = os.path.dirname(filesystem.abspath(checkpoint.path))
    own = {os.path.basename(file.path) for file in checkpoint.files} | {os.path.basename(checkpoint.path)}
    own |= set(facts.files)
    unread: list[str] = []
    beside, subfolders = _list_side_files(folder, "", unread)
    below = [
        file
        for name in subfolders
        if os.path.isdir(os.path.join(folder, name))
        for file in _list_side_files(folder, name, unread)[0]
    ]
    stem = tuple(_WORDS.findall(os.path.basename(checkpoint.path).lower()))
    # Settings of no particular name belong to the checkpoint whose name has the same words.
    side_files = [
        file
        for file in (*beside, *below)
        if file.name not in own
        and (file.is_statistics or file.is_settings or file.words[:-1] == stem[: len(file.words) - 1])
    ]
    side_files += _list_run_statistics(folder, unread)
    for problem in unread:
        yield LedgerEntry(
            "cannot be known", "observation statistics", "files in folders that were not listed", problem
        )
    paths = ((file, os.path.join(folder, file.name)) for file in side_files)
    files = [side_file for side_file, file in paths if os.path.isfile(file) and not os.path.islink(file)]
    # Statistics change the observations: they are read first.
    files.sort(key=lambda file: not file.is_statistics)
    for side_file in files[:_MOST_OPENED]:
        file = os.path.join(folder, side_file.name)
        entries = (
            _statistics_file(file, side_file.name, checkpoint, facts)
            if side_file.is_statistics
            else _settings_file(file, side_file.name, facts)
        )
        yield from (replace(entry, beside=True) for entry in entries)
    if left := files[_MOST_OPENED:]:
        what: Topic = "observation statistics" if left[0].is_statistics else "architecture"
        value = f"{len(left):,} more files of statistics or settings, which were not read"
        yield LedgerEntry("cannot be known", what, value, folder)


class _SideFile(NamedTuple):
    """A file whose name is that of statistics or settings; `words` are those of the name, in lower case."""

    name: str
    words: tuple[str, ...]
    is_statistics: bool
    is_settings: bool  # of every checkpoint in the folder


def _list_run_statistics(folder: str, unread: list[str]) -> Iterator[_SideFile]:
    """Yield files of normalisers in the folder above a checkpoint's, and in the folders beside it.

    Other runs may be in those: a folder belongs to the same run if its name or the checkpoint's is one of a
    run's parts (`best`, `checkpoints`, `stats`).
    """
    part = _RUN_PART.fullmatch(os.path.basename(folder).lower())
    above, _ = _list_side_files(folder, os.pardir, unread)
    try:
        with os.scandir(os.path.dirname(folder)) as listed:
            names = sorted(entry.name for entry in listed if entry.is_dir(follow_symlinks=False))
    except OSError:
        names = []  # `unread` has the folder
    words = ((name, name.lower()) for name in names if name != os.path.basename(folder))
    run = [
        name for name, low in words if part or _RUN_PART.fullmatch(low) or _STATISTICS_WORDS.fullmatch(low)
    ]
    if left := len(run[_MOST_NEIGHBOURS:]):
        unread.append(f"{os.path.dirname(folder)}: {left:,} more folders of the run")
    for name in run[:_MOST_NEIGHBOURS]:
        above = (*above, *_list_side_files(folder, os.path.join(os.pardir, name), unread)[0])
    for side_file in above:
        if side_file.is_statistics and _NORMALISER_FILE.search(os.path.basename(side_file.name).lower()):
            yield side_file


def _list_side_files(folder: str, below: str, unread: list[str]) -> tuple[Sequence[_SideFile], Sequence[str]]:
    """Return the files of statistics and settings in a folder, and the subfolders that may contain some.

    With `below`, list that subfolder. A folder that cannot be listed is added to `unread`.
    """
    listed = os.path.join(folder, below) if below else folder
    try:
        return _side_files(folder, below, filesystem.folder_state(listed))
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        unread.append(f"{listed}: {error.strerror}")
        return (), ()


@functools.lru_cache(maxsize=256)
def _side_files(folder: str, below: str, _state: Hashable) -> tuple[Sequence[_SideFile], Sequence[str]]:
    """List a folder once for all checkpoints in it, while it does not change."""
    files, subfolders = [], []
    for name in sorted(os.listdir(os.path.join(folder, below) if below else folder)):
        lower = name.lower()
        if name == ".hydra" or _STATISTICS_WORDS.fullmatch(lower):
            subfolders.append(name)
        if name.startswith(".") or name.endswith(sidecar.SUFFIX):
            continue  # a sidecar records the conversion of another checkpoint, or other weights
        words = (*_WORDS.findall(lower), *_WORDS.findall(below))
        statistics = _STATISTICS_FILE.fullmatch(lower) and any(map(_STATISTICS_WORDS.fullmatch, words))
        settings = _SETTINGS_FILE.fullmatch(name)
        if statistics or settings:
            general = settings is not None and any(map(_SETTINGS_WORDS.fullmatch, words))
            files.append(_SideFile(os.path.join(below, name), words, bool(statistics), general))
    return files, subfolders


def _statistics_file(
    file: str, name: str, checkpoint: Checkpoint, facts: PolicyUsage | ConversionUsage
) -> Iterator[LedgerEntry]:
    """Yield the entry for a statistics file; one that belongs to this policy has its number of values."""
    sizes = None if facts.normalised else _statistics_sizes(file)
    if sizes is None:
        return  # the statistics in use come from another file or from the command line
    observed = set(facts.observed)
    fits = not observed.isdisjoint(sizes)
    base = os.path.basename(name).lower()
    if _NORMALISER_FILE.search(base) is None:
        # A `stats.json` of any program counts only if it has a mean and a deviation of each observation.
        fits = fits and (
            any(sizes.count(width) > 1 for width in observed) or base.endswith((".npy", ".csv", ".txt"))
        )
        if not fits:
            return
    other = sizes and not fits
    value = (
        "whose size differs from that of an observation"
        if other
        else "whose size matches that of an observation"
        if fits
        else ""
    )
    hint = facts.hint(os.path.normpath(os.path.join(os.path.dirname(checkpoint.path), name)))
    yield LedgerEntry(
        "not used", "observation statistics", value, name, decides=fits, hint=None if other else hint
    )


def _statistics_sizes(file: str) -> Sequence[int] | None:
    """Return the lengths of a file's number rows, empty if it cannot be read; None for a network."""
    from ckpttool.formats.detect import open_checkpoint
    from ckpttool.libraries.schema import read_switch

    try:
        if os.path.getsize(file) > _LARGEST:
            return ()
        if file.endswith((".csv", ".txt")):
            return _text_sizes(file)
        if file.endswith(".json"):
            document = documents.load_json(file, "the statistics", "sidecar_bytes")
            rows = [document, *(group for group in document.values() if isinstance(group, dict))]
            return [len(row) for group in rows for row in group.values() if isinstance(row, list)]
        tree = open_checkpoint(file).tree
        if read_switch(tree.entries.get("norm_obs"), default=True) is False:
            return None
        tensors = [leaf for _, leaf in tree.tensors()]
        if any(sum(extent > 1 for extent in leaf.shape) > 1 for leaf in tensors):
            return None  # a matrix means another checkpoint
        return [leaf.size for leaf in tensors if leaf.size > 1]
    except (CkpttoolError, OSError):
        return ()


def _text_sizes(file: str) -> Sequence[int] | None:
    """Return the row lengths and the row count of a small table of numbers, None for any other text."""
    with open(file, encoding="utf-8", errors="replace") as source:
        lines = source.read(1 << 16).splitlines()
    rows = [line.replace(",", " ").replace(";", " ").split() for line in lines if line.strip()]
    words = [word for row in rows for word in row]
    if not words or len(rows) > 4 < len(words) / len(rows) or not all(map(_NUMBER.fullmatch, words)):
        return None
    return (*map(len, rows), len(rows))


def _namespace(file: str) -> dict[str, str] | None:
    """Return the arguments in a text file with the repr of a Namespace, None for any other text."""
    with open(file, encoding="utf-8", errors="replace") as source:
        text = source.read(1 << 16).strip()
    if not re.match(r"\w*(Namespace|Args|Config)\(", text):
        return None
    return {name: value.strip().strip("'\"") for name, value in _NAMESPACE.findall(text)}


def _settings_file(file: str, name: str, facts: PolicyUsage | ConversionUsage) -> Iterator[LedgerEntry]:
    """Yield the settings in a file beside the checkpoint that differ from the values used."""
    from ckpttool.formats import settings

    try:
        if os.path.getsize(file) > _LARGEST:
            return
        if name.lower().endswith(".json"):
            tree = settings.tree_from_json(documents.load_json(file, "settings"), "the file")
        elif name.lower().endswith(".toml"):
            import tomllib

            with open(file, "rb") as source:
                tree = settings.tree_from_json(tomllib.load(source), "the file")
        elif name.lower().endswith(".gin"):
            with open(file, encoding="utf-8") as text:
                tree = settings.tree_from_json(settings.parse_gin(text.read()), "the file")
        elif name.lower().endswith(".txt") and (namespace := _namespace(file)) is not None:
            tree = settings.tree_from_json(namespace, "the file")
        else:
            tree = settings.read_yaml(file)
    except (CkpttoolError, OSError, ValueError, TypeError, RecursionError):
        return  # any program may use this file name
    for path, leaf in tree.items():
        shown = "/".join(str(step.value) for step in path)
        what = vocabulary.classify_topic(shown)
        if what is None:
            continue
        entry = facts.entry(vocabulary.AgentEvidence(what, shown, leaf, name))
        if entry is not None:
            yield entry
