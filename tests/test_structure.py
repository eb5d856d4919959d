"""Rules about the structure of the package, each derived from the code, and what looking loads.

A rule is a function from the package's sources to the offenders that it finds. Every rule is run on the
package, and on a wrong example below, which proves that it can fail.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

import ckpttool
from ckpttool.conversion.write import save
from ckpttool.core import key, plugins
from tests import nightly
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.conftest import ckpttool as run
from tests.golden_texts import Golden

PACKAGE = ROOT / "ckpttool"
# Lines and classes of each package, without the modules that a table names: a newcomer's format is free.
# They only fall: a higher one needs an entry in docs/decisions/0025-rooms.md that states what it pays for.
MOST = {
    "core": (10_300, 113),
    "encodings": (4_600, 33),
    "formats": (12_900, 113),
    "mapping": (10_500, 78),
    "graphs": (4_300, 38),
    "libraries": (12_100, 75),
    "networks": (10_600, 90),
    "evaluation": (13_900, 133),
    "listing": (5_100, 41),
    "verification": (7_700, 66),
    "conversion": (13_300, 76),
    "commands": (3_200, 23),
    "pages": (3_200, 38),
    "browser": (2_800, 33),
    "cli": (5_300, 21),
}
SHORTEST = 50
# A command resolves the path, calls one function and returns its record.
LONGEST_COMMAND = 400
# Files that import the next one at the top, from a command through the package that does its work.
LONGEST_CHAIN = {("commands/verify.py", "verification"): 4}
MOST_LINES = 80
MOST_PARAMETERS = 8
# Keywords of a function whose record declares them: a person chooses from these in an editor.
MOST_KEYWORDS = 15
# So many parameters a docstring may describe in sentences.
FEW = 4

# A package imports only from the rows above its own. The root package and its version stand outside.
LAYERS = (
    ("core",),
    ("encodings",),
    ("formats", "mapping"),
    ("graphs",),
    ("libraries",),
    ("networks",),
    ("evaluation",),
    ("listing",),
    ("verification",),
    ("conversion",),
    ("commands",),
    ("pages", "browser"),
    ("cli",),
)
LAYER = {package: number for number, row in enumerate(LAYERS) for package in row}
# Tables of modules as data, some without their package: nothing is imported before a row is chosen.
REGISTRY = "core/plugins.py"
TABLES = {
    REGISTRY: "formats",
    "cli/app.py": "cli",
    "graphs/graph.py": "graphs",
    "graphs/operators.py": "graphs",
}

KEPT = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Call)
# The nodes of each file, the module first.
Sources = dict[str, tuple[ast.AST, ...]]
Rule = Callable[[Sources], set[str]]


def parse(files: dict[str, str]) -> Sources:
    # The nodes stay: every collection of garbage would look at all that are there.
    gc.disable()
    try:
        return {file: tuple(walk(ast.parse(text, file))) for file, text in files.items()}
    finally:
        gc.enable()


def walk(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the module, and below it the nodes that rules look at."""
    yield module
    for node in ast.walk(module):
        if isinstance(node, KEPT) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node


def module_name(file: str) -> str:
    return ".".join(["ckpttool", *file.removesuffix(".py").split("/")]).removesuffix(".__init__")


def package_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the dotted names that imports name: `import a.b` gives a.b, `from a import b` gives a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_in_strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what strings name as `ckpttool.package.module` (importlib, lazy tables, `python -m`)."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^ckpttool(?:\.\w+)+", node.value)


def all_imports(file: str, nodes: tuple[ast.AST, ...]) -> set[str]:
    """Return every name imported at any depth, and modules named in strings (except the registry's)."""
    strings = () if file == REGISTRY else named_in_strings(nodes)
    return {*imported(nodes), *strings}


def external_roots(nodes: Iterable[ast.AST]) -> set[str]:
    return {name.partition(".")[0] for name in imported(nodes)}


def edges(sources: Sources) -> dict[tuple[str, str], set[str]]:
    """Return the pairs of packages of which one imports the other, with the importing files."""
    files_by_edge = defaultdict(set)
    for file, nodes in sources.items():
        for name in all_imports(file, nodes):
            here, there = package_of(file), f"{name}.".split(".")[1]
            if name.startswith("ckpttool.") and here != there and here in LAYER and there in LAYER:
                files_by_edge[here, there].add(file)
    return files_by_edge


# The rules.


def length(nodes: tuple[ast.AST, ...]) -> int:
    """Return the number of lines of a file."""
    body = cast(ast.Module, nodes[0]).body
    return body[-1].end_lineno or 0 if body else 0


def over_budget(sources: Sources) -> set[str]:
    """Find packages with more lines or classes than they may have."""
    lines, count, named = Counter[str](), Counter[str](), rows(sources)
    for file, nodes in sources.items():
        if file not in named:
            lines[package_of(file)] += length(nodes)
            count[package_of(file)] += sum(isinstance(node, ast.ClassDef) for node in nodes)
    return {
        f"{package}: {lines[package]} lines, {count[package]} classes"
        for package, most in MOST.items()
        if lines[package] > most[0] or count[package] > most[1]
    }


def long_commands(sources: Sources) -> set[str]:
    return {
        file
        for file, nodes in sources.items()
        if package_of(file) == "commands" and length(nodes) > LONGEST_COMMAND
    }


def long_import_chains(sources: Sources) -> set[str]:
    """Find the longest chain of imports from a command through a package, if it has too many files."""
    file_of = {module_name(file): file for file in sources}

    def longest(file: str, package: str) -> list[str]:
        names = set(imported(ast.iter_child_nodes(sources[file][0])))
        files = {file_of.get(name) or file_of.get(name.rpartition(".")[0]) for name in names} - {None, file}
        chains = [longest(str(there), package) for there in files if package_of(str(there)) == package]
        return [file, *max(chains, key=len, default=[])]

    return {
        " > ".join(chain)
        for (command, package), most in LONGEST_CHAIN.items()
        if command in sources and len(chain := longest(command, package)) > most
    }


def nested_folders(sources: Sources) -> set[str]:
    return {file for file in sources if file.count("/") > 1}


def relative_imports(sources: Sources) -> set[str]:
    return {
        file
        for file, nodes in sources.items()
        if any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
    }


def upward_imports(sources: Sources) -> set[str]:
    return {
        f"{file} imports {there}"
        for (here, there), files in edges(sources).items()
        if LAYER[there] >= LAYER[here]
        for file in files
    }


def package_cycles(sources: Sources) -> set[str]:
    """Find pairs of packages that reach each other, by imports at any depth and by names in strings."""
    reach = defaultdict(set)
    for here, there in edges(sources):
        reach[here].add(there)
    for middle in LAYER:
        for here in LAYER:
            if middle in reach[here]:
                reach[here] |= reach[middle]
    return {f"{a} <-> {b}" for a in LAYER for b in LAYER if a < b and b in reach[a] and a in reach[b]}


def classes(sources: Sources) -> Iterator[tuple[str, ast.ClassDef]]:
    for file, nodes in sources.items():
        yield from ((file, node) for node in nodes if isinstance(node, ast.ClassDef))


def repeated_class_names(sources: Sources) -> set[str]:
    count = Counter(node.name for _, node in classes(sources))
    return {f"{file}:{node.name}" for file, node in classes(sources) if count[node.name] > 1}


EVERYDAY = (
    "Beside|Done|Found|Given|Heard|Held|How|Kept|Known|Laid|Left|Lone|Made|Meant|Overheard|Own|Place|Room|Said"
    "|Seen|Shown|Side|Stuff|Taken|Thing|Told|Twin|Use|Way|Whole|Work|Written"
)
NOUNS = {"Embedding", "Feed", "Finding", "Mapping", "Padding", "Seed", "String", "Encoding"}


def words(name: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)


def names_without_a_noun(sources: Sources) -> set[str]:
    """Find classes whose last word is a participle, and those whose only word is an everyday one.

    Messages of the browser's library are events, which it names by a noun and a participle.
    """
    offenders = set()
    for file, node in classes(sources):
        *before, last = words(node.name)
        if before and any(isinstance(base, ast.Name) and base.id == "Message" for base in node.bases):
            continue
        alone = r".+ing|" + EVERYDAY if not before else r"(?!)"
        if last not in NOUNS and re.fullmatch(rf".+ed|{alone}", last):
            offenders.add(f"{file}:{node.name}")
    return offenders


def functions(sources: Sources) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, nodes in sources.items():
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield file, node


def long_functions(sources: Sources) -> set[str]:
    return {
        f"{file}:{node.name}"
        for file, node in functions(sources)
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    }


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def wide_functions(sources: Sources) -> set[str]:
    """Find functions of many parameters.

    Parameters of operators are the inputs and attributes of ONNX. Keywords that an options record declares
    are spelled out for editors, and the function passes none of them on.
    """
    offenders = set()
    for file, node in functions(sources):
        decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
        keywords = len(node.args.kwonlyargs) if "takes_options" in decorators else 0
        others = parameters(node) - keywords if "operator" not in decorators else 0
        if others > MOST_PARAMETERS or keywords > MOST_KEYWORDS:
            offenders.add(f"{file}:{node.name}")
    return offenders


def public_functions(sources: Sources) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions of modules, and those of classes, that other modules may call."""
    for file, nodes in sources.items():
        waiting = list(cast(ast.Module, nodes[0]).body)
        while waiting:
            node = waiting.pop()
            if (
                isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name[0] != "_"
            ):
                if isinstance(node, ast.ClassDef):
                    waiting += node.body
                else:
                    yield file, node


def undescribed_parameters(sources: Sources) -> set[str]:
    """Find public functions of many parameters that do not describe each of them.

    Parameters of commands have a help text, those of operators are the inputs and attributes of ONNX.
    """
    strings = (node.value for node in sources.get("cli/app.py", ()) if isinstance(node, ast.Constant))
    commands = {text for text in strings if isinstance(text, str)}
    return {
        f"{file}:{node.name}"
        for file, node in public_functions(sources)
        if sum(arg.arg not in ("self", "cls") for arg in [*node.args.args, *node.args.kwonlyargs]) > FEW
        if "Args:" not in (ast.get_docstring(node) or "")
        and f"{module_name(file)}:{node.name}" not in commands
        if not any(ast.unparse(item).startswith("operator(") for item in node.decorator_list)
    }


def runtime_nodes(file: str, nodes: tuple[ast.AST, ...]) -> list[ast.AST]:
    """Return a file's nodes; of a face, which lists what other packages may use, only what it runs.

    What the documented faces list is in use.
    """
    if not file.endswith("/__init__.py") or file == "graphs/__init__.py":
        return list(nodes)
    typing = [node for node in ast.iter_child_nodes(nodes[0]) if isinstance(node, ast.If)]
    skipped = {id(node) for block in typing for node in ast.walk(block)}
    return [node for node in nodes if id(node) not in skipped]


def importers(sources: Sources) -> dict[str, set[str]]:
    """Return the files that import each file, or name it in a string."""
    file_of = {module_name(file): file for file in sources}
    importers: dict[str, set[str]] = {file: set() for file in sources}
    for file, every in sources.items():
        nodes = runtime_nodes(file, every)
        for name in {*imported(nodes), *named_in_strings(nodes)}:
            target = file_of.get(name) or file_of.get(name.rpartition(".")[0])
            if target not in (None, file):
                importers[target].add(file)
    return importers


def rows(sources: Sources) -> set[str]:
    """Return the files that tables name as `module` or `module:name`, with or without their package."""
    files = set()
    for table, package in TABLES.items():
        for node in sources.get(table, ()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition(":")[0].removeprefix("ckpttool.")
                files |= {f"{name.replace('.', '/')}.py", f"{package}/{name}.py"}
    return files & sources.keys()


def fragments(sources: Sources) -> set[str]:
    """Find short files with one importer in their own package that is not the package's face.

    A row of a table, and a command, is a concept of its own.
    """
    names, named = set(), rows(sources)
    for file, by in importers(sources).items():
        if file in named or length(sources[file]) > SHORTEST:
            continue
        only = next(iter(by)) if len(by) == 1 else ""
        face = only.endswith("__init__.py") or package_of(file) in ("commands", "cli")
        if package_of(only) == package_of(file) and not face:
            names.add(file)
    return names


def dead_files(sources: Sources) -> set[str]:
    """Find files that nothing imports: neither a face nor a program that is started."""
    named = rows(sources)
    started = {
        name
        for nodes in sources.values()
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"from (ckpttool[\w.]+) import main", node.value)
    }
    return {
        file
        for file, by in importers(sources).items()
        if not by and Path(file).stem[:2] != "__" and module_name(file) not in started
        if file not in named and package_of(file) != "testing"  # which the tests of plug-ins import
    }


FRAMEWORKS = {"torch", "tensorflow", "keras", "gymnasium", "mujoco", "jax", "onnx", "onnxruntime", "ray"}
FRAMEWORK_FILES = {
    "networks/torch_backend.py": {"torch"},
    "networks/torch_programs.py": {"torch"},
    "networks/tensorflow_backend.py": {"tensorflow", "keras"},
    "networks/tensorflow_training.py": {"tensorflow", "keras"},
    "networks/onnx_backend.py": {"onnx", "onnxruntime"},
    "networks/onnx_export.py": {"onnx"},
    "evaluation/torch_rollout.py": {"torch"},
    # Imported in the process of the user's model.
    "networks/tracing.py": {"tensorflow", "torch"},
    # Tasks on the policy's device, imported when they are played.
    "evaluation/simulators.py": {"torch"},
    "evaluation/fast_engines.py": {"torch", "mujoco"},
    "evaluation/gymnasium_engine.py": {"gymnasium", "mujoco"},
    "evaluation/environments.py": {"gymnasium"},
    # Runs a model by its own framework, in a process of its own.
    "networks/model_runner.py": {"torch", "tensorflow", "keras", "onnx", "onnxruntime"},
    # Writes Stable-Baselines3's files with the library, in a process of its own.
    "formats/sb3_child.py": {"torch", "gymnasium"},
    # Converts a tensor to a framework's, imported on request.
    "core/handles.py": {"torch", "tensorflow"},
}


def framework_imports(sources: Sources) -> set[str]:
    return {
        f"{file} imports {name}"
        for file, nodes in sources.items()
        for name in (external_roots(nodes) & FRAMEWORKS) - FRAMEWORK_FILES.get(file, set())
    }


# Libraries, and the files or packages (a trailing slash) that may import them.
OWNERS = {
    ("typer",): ("cli/",),
    ("rich",): ("cli/", "browser/"),
    ("textual",): ("browser/",),
    ("jinja2", "markupsafe"): ("pages/",),
    ("matplotlib", "plotext"): ("cli/figures.py",),
    ("PIL", "imageio_ffmpeg"): ("evaluation/video.py",),
    ("pygame",): (),
    (
        "fsspec",
        "aiohttp",
        "yarl",
        "s3fs",
        "botocore",
        "gcsfs",
        "huggingface_hub",
        "requests",
        "http",
    ): ("core/remote",),
}


def library_imports(sources: Sources) -> set[str]:
    return {
        f"{file} imports {name}"
        for file, nodes in sources.items()
        for libraries, owners in OWNERS.items()
        for name in external_roots(nodes) & set(libraries)
        if not file.startswith(owners)
    }


def eager_imports(sources: Sources) -> set[str]:
    """Find what would be loaded with every command: matplotlib at the top, remote stores by an import."""
    offenders = set()
    for file, nodes in sources.items():
        if any(name.startswith("matplotlib") for name in imported(ast.iter_child_nodes(nodes[0]))):
            offenders.add(f"{file} imports matplotlib at the top")
        started = imported(runtime_nodes(file, nodes))
        remote = [name for name in started if name.startswith("ckpttool.core.remote")]
        if remote and not file.startswith("core/remote"):
            offenders.add(f"{file} imports core.remote without a URL")
    return offenders


def definitions_compiled_at_import(sources: Sources) -> set[str]:
    """Find classes and patterns that core/deferred.py would compile when they are first used."""
    names = {("dataclasses", "dataclass"), ("dataclasses", "field"), ("typing", "NamedTuple")}
    offenders = {
        f"{file} takes {name.name} from {node.module}"
        for file, nodes in sources.items()
        if file != "core/deferred.py"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if (node.module, name.name) in names
    }
    return offenders | {
        f"{file}:{call.lineno} compiles a pattern"
        for file, nodes in sources.items()
        for node in ast.iter_child_nodes(nodes[0])
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for call in ast.walk(node.value)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "re.compile"
    }


def replaced_unknown_facts(sources: Sources) -> set[str]:
    """Unknown facts are added and removed by topic (lacking, without_lack), never all at once."""
    return {
        f"{file}:{node.lineno}"
        for file, nodes in sources.items()
        if file != "libraries/schema.py"
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_replace"
        and any(keyword.arg == "lacks" for keyword in node.keywords)
    }


def names_of_formats(sources: Sources) -> set[str]:
    """Find files of mapping and networks that name a format."""
    return {
        file
        for file, nodes in sources.items()
        if package_of(file) in ("mapping", "networks")
        for node in nodes
        if isinstance(node, ast.Constant) and node.value in ("tensor_bundle", "pytorch")
    }


def suggestions_in_other_words(sources: Sources) -> set[str]:
    """Find suggestions of a similar word that `did_you_mean` (core/errors.py) does not write."""
    return {
        f"{file}:{node.lineno}"
        for file, nodes in sources.items()
        if file != "core/errors.py"
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "did you mean" in node.value
    }


# What is still to be mended: a rule allows these and no others, and no row outlives its offender.
REMAINING: dict[Rule, set[str]] = {}
RULES: tuple[Rule, ...] = (
    over_budget,
    long_commands,
    long_import_chains,
    nested_folders,
    relative_imports,
    upward_imports,
    package_cycles,
    repeated_class_names,
    names_without_a_noun,
    long_functions,
    wide_functions,
    undescribed_parameters,
    fragments,
    dead_files,
    framework_imports,
    library_imports,
    eager_imports,
    names_of_formats,
    suggestions_in_other_words,
    definitions_compiled_at_import,
    replaced_unknown_facts,
)


def section_titles(text: str) -> list[str]:
    """Return the comments at the margin that describe neither the line below nor the file's lint rules."""
    return re.findall(r"(?<=\n\n)((?:#(?! ruff: ).*\n)+)(?=\n)", text)


def test_no_comment_divides_a_file_into_sections() -> None:
    """A section that has a subject is a file; facts belong to the docstring of what they describe."""
    assert section_titles("x = 1\n\n# A.\n#\n# B.\n\n# Of y.\ny = 1\n") == ["# A.\n#\n# B.\n"]
    divided = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if section_titles(p.read_text())}
    assert divided == set()


def test_the_package_keeps_every_rule() -> None:
    sources = parse({str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))})
    offenders_by_rule = {rule: offenders for rule in RULES if (offenders := rule(sources))}
    broken = [
        f"{rule.__name__}: {rule.__doc__}\n{offenders}" for rule, offenders in offenders_by_rule.items()
    ]
    assert offenders_by_rule == REMAINING, "\n".join(broken)


LONG = "def f():\n" + "    x = 1\n" * MOST_LINES
# One wrong package for each rule, and what the rule finds in it.
WRONG: list[tuple[Rule, dict[str, str], set[str]]] = [
    (
        definitions_compiled_at_import,
        {
            "core/deferred.py": "from dataclasses import dataclass",
            "core/tree.py": "from dataclasses import field, replace",
            "core/text.py": "_WORD = (re.compile('a'), re.escape('b'))\ndef f():\n    return re.compile('c')",
        },
        {"core/tree.py takes field from dataclasses", "core/text.py:1 compiles a pattern"},
    ),
    (
        replaced_unknown_facts,
        {"libraries/sb3.py": "facts = facts._replace(head='clip', lacks=())"},
        {"libraries/sb3.py:1"},
    ),
    (
        over_budget,
        {"core/a.py": "x = 1\n" * (MOST["core"][0] + 1)},
        {f"core: {MOST['core'][0] + 1} lines, 0 classes"},
    ),
    (
        long_commands,
        {"commands/a.py": "x = 1\n" * (LONGEST_COMMAND + 1), "formats/npz.py": "x = 1\n" * 900},
        {"commands/a.py"},
    ),
    (
        long_import_chains,
        {
            "commands/verify.py": "from ckpttool.verification import a",
            **{
                f"verification/{one}.py": f"from ckpttool.verification.{two} import x"
                for one, two in zip("abc", "bcd", strict=True)
            },
            "verification/d.py": "def f():\n    from ckpttool.verification import a",
        },
        {" > ".join(("commands/verify.py", *(f"verification/{name}.py" for name in "abcd")))},
    ),
    (nested_folders, {"formats/tf/bundle.py": ""}, {"formats/tf/bundle.py"}),
    (relative_imports, {"core/tree.py": "from . import source"}, {"core/tree.py"}),
    (
        upward_imports,
        {"core/tree.py": "from ckpttool.formats import npz"},
        {"core/tree.py imports formats"},
    ),
    (
        upward_imports,
        {"encodings/npy.py": "def f():\n    import ckpttool.formats.npz"},
        {"encodings/npy.py imports formats"},
    ),
    (
        upward_imports,
        {"mapping/rules.py": "if TYPE_CHECKING:\n    from ckpttool.networks.network import Dense"},
        {"mapping/rules.py imports networks"},
    ),
    (
        package_cycles,
        {
            "networks/build.py": 'import_module("ckpttool.conversion.plan")',
            "conversion/plan.py": "from ckpttool.evaluation import rollout",
            "evaluation/rollout.py": "def f():\n    from ckpttool.networks import build",
        },
        {"conversion <-> networks", "conversion <-> evaluation", "evaluation <-> networks"},
    ),
    (
        repeated_class_names,
        {"core/tree.py": "class Entry: ...", "formats/npz.py": "def f():\n    class Entry: ..."},
        {"core/tree.py:Entry", "formats/npz.py:Entry"},
    ),
    (
        names_without_a_noun,
        {"core/a.py": "\n".join(f"class {n}: ..." for n in ("_Found", "Way", "KeysWanted", "Meeting"))},
        {"core/a.py:_Found", "core/a.py:Way", "core/a.py:KeysWanted", "core/a.py:Meeting"},
    ),
    (long_functions, {"core/a.py": LONG}, {"core/a.py:f"}),
    (
        wide_functions,
        {"core/a.py": "class A:\n    def f(self, a, b, c, d, e, f, *, g, **h): ..."},
        {"core/a.py:f"},
    ),
    (
        wide_functions,
        {
            "core/a.py": "@takes_options(A)\ndef f(a, *, b, c, d, e, f, g, h, i): ...",
            "core/b.py": f"@takes_options(A)\ndef f(a, *, {', '.join(f'b{n}' for n in range(16))}): ...",
        },
        {"core/b.py:f"},
    ),
    (
        undescribed_parameters,
        {
            "cli/app.py": 'COMMANDS = ("ckpttool.cli.app:run",)\ndef run(a, b, c, d, e): ...',
            "core/a.py": "class A:\n    def f(self, a, b, c, d): ...\n    def g(self, a, b, c, d, *, e): ...",
            "core/b.py": "@operator('A')\ndef f(a, b, c, d, e): ...",
            "core/c.py": "def f(a, b, c, d, e):\n    'Do.\\n\\n    Args:'",
        },
        {"core/a.py:g"},
    ),
    (
        fragments,
        {
            "formats/__init__.py": "if TYPE_CHECKING:\n    from ckpttool.formats.npz_rows import Row",
            "formats/npz.py": "from ckpttool.formats import npz_rows",
            "formats/npz_rows.py": "",
        },
        {"formats/npz_rows.py"},
    ),
    (dead_files, {"formats/old.py": ""}, {"formats/old.py"}),
    (framework_imports, {"core/tree.py": "def f():\n    import torch.nn"}, {"core/tree.py imports torch"}),
    (
        library_imports,
        {"commands/stats.py": "from rich.table import Table"},
        {"commands/stats.py imports rich"},
    ),
    (
        eager_imports,
        {"cli/drawings.py": "import matplotlib", "core/source.py": "from ckpttool.core import remote"},
        {"cli/drawings.py imports matplotlib at the top", "core/source.py imports core.remote without a URL"},
    ),
    (names_of_formats, {"networks/build.py": 'FORMAT = "pytorch"'}, {"networks/build.py"}),
    (
        suggestions_in_other_words,
        {"core/errors.py": '"did you mean a?"', "core/text.py": 'f"did you mean {a}"'},
        {"core/text.py:1"},
    ),
]


@pytest.mark.parametrize(("rule", "files", "expected"), WRONG, ids=[rule.__name__ for rule, *_ in WRONG])
def test_the_rule_finds_a_wrong_example(rule: Rule, files: dict[str, str], expected: set[str]) -> None:
    assert rule(parse(files)) == expected


def test_every_rule_has_a_wrong_example() -> None:
    assert {rule for rule, _, _ in WRONG} == set(RULES)


def face(package: str) -> dict[str, str]:
    """Return the names that a package offers to other programs, with their files."""
    nodes = ast.walk(ast.parse((PACKAGE / package / "__init__.py").read_text()))
    return {
        alias.name: node.module.rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module.startswith(f"ckpttool.{package}.")
        for alias in node.names
        if alias.name == alias.asname
    }


FACES = [package for package in LAYER if "package_face()" in (PACKAGE / package / "__init__.py").read_text()]


def test_a_face_names_what_its_files_define() -> None:
    assert len(FACES) >= 7
    for package in FACES:
        names = face(package)
        module = importlib.import_module(f"ckpttool.{package}")
        assert sorted(names) == module.__all__ == dir(module)
        for name, home in names.items():
            text = (PACKAGE / package / f"{home}.py").read_text()
            assert re.search(rf"^(class|def|async def) {name}\b|^{name}\b.*=", text, re.MULTILINE), name
            if package in ("core", "libraries"):  # modules that import no framework
                there = importlib.import_module(f"{module.__name__}.{home}")
                assert getattr(module, name) is getattr(there, name)
        with pytest.raises(AttributeError, match="nonsense"):
            _ = module.nonsense


def test_outside_code_imports_from_faces() -> None:
    faces = {f"ckpttool.{package}.{home}.{name}" for package in LAYER for name, home in face(package).items()}
    homes = {name.rpartition(".")[0] for name in faces}
    # Only a text that has a home's name, with any spaces at its dots, can import from it.
    possible = re.compile("|".join(re.escape(home).replace(r"\.", r"\s*\.\s*") for home in sorted(homes)))
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "docs", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if possible.search(text := path.read_text())
        for name in faces.intersection(imported(ast.walk(ast.parse(text))))
    }
    assert wrong == set()


LOOKING = """
import json, sys
import ckpttool
from ckpttool.libraries.recognize import recognize_tree as recognise
for path in json.loads(sys.argv[1]):
    checkpoint = ckpttool.open(path)
    assert len(checkpoint.tree) > 50
    assert recognise(checkpoint.tree, "x") is not None
    ckpttool.summary(path)
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def test_looking_at_every_sample_loads_no_framework_and_no_numpy() -> None:
    samples = [str(p)[: -len(".index")] for p in (ROOT / "sample_ckpts").rglob("*.index")]
    samples += [str(path) for path in (ROOT / "sample_ckpts").rglob("*.pt")]
    assert len(samples) >= 10
    command = [sys.executable, "-c", LOOKING, json.dumps(samples)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    drawing = {"typer", "rich", "jinja2", "textual"}
    assert not loaded & (FRAMEWORKS | drawing | {"numpy", "ml_dtypes", "zipfile", "pickle"})


LOADED = """
import sys
from ckpttool.cli import main
try:
    main()
except SystemExit:
    pass
names = [name for name in sys.modules if name.startswith("ckpttool.")]
print(*sorted(name.removeprefix("ckpttool.") for name in names), sep="\\n", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *[("inspect", kind) for kind in ("tf", "torch", "safetensors", "npz", "keras")],
        *[(command, "torch") for command in ("digest", "check", "convert")],
        ("convert", "safetensors"),
    ],
)
def test_a_command_loads_these_modules(command: str, kind: str, tmp_path: Path, golden: Golden) -> None:
    """Whatever a command imports is paid at each start: a new row of this list has a reason."""
    path = {"tf": str(TF_SAMPLE), "torch": str(TORCH_SAMPLE)}.get(kind, "")
    if not path:
        suffix = {"keras": ".weights.h5"}.get(kind, f".{kind}")
        save(
            ckpttool.open(str(TORCH_SAMPLE)).tree.below((key("actor"),)),
            path := str(tmp_path / f"a{suffix}"),
            kind,
        )
    words = [command, path, *([str(tmp_path / "out.npz")] if command == "convert" else [])]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    golden(done.stderr)


def test_importing_the_package_loads_almost_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ckpttool; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {name for name in ast.literal_eval(done.stdout) if name.startswith("ckpttool")}
    assert loaded == {"ckpttool", "ckpttool.version"}


def test_the_public_face_is_what_it_says() -> None:
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name) is not None
    visible = {name for name in dir(ckpttool) if not name.startswith("_")}
    assert visible == set(ckpttool.__all__)
    assert ckpttool.__version__
    with pytest.raises(AttributeError):
        _ = ckpttool.nonsense


def test_every_public_name_has_a_docstring() -> None:
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name).__doc__, name


def test_the_registry_loads_and_answers_to_its_names() -> None:
    for kind, known in plugins.BUILT_IN.items():
        for plugin in known:
            if not plugin.available():
                continue
            module = plugin.load()
            name = module.TABLE.name if kind == "layouts" else module.NAME
            assert name == plugin.name


COMMANDS = [
    "inspect",
    "digest",
    "check",
    "textconv",
    "convert",
    "verify",
    "eval",
    "report",
    "browse",
    "formats",
    "layouts",
    "backends",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    ran = in_process(command, "--help")
    assert ran.status == 0
    assert re.search("Examples?: ckpttool", ran.out)
    assert "--json" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_help_lists_every_command() -> None:
    ran = run("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in COMMANDS)


def test_samples_are_there() -> None:
    assert Path(f"{TF_SAMPLE}.index").is_file()
    assert TORCH_SAMPLE.is_file()


def test_no_test_imports_tensorflow_to_learn_whether_it_is_there() -> None:
    # Beside PyTorch it may end the process; tensorflow_child.require looks without importing.
    skips = re.compile(r'importorskip\(\s*"(keras|tensorflow|tf_keras)')
    assert [
        file.name for file in Path(__file__).parent.glob("test_*.py") if skips.search(file.read_text())
    ] == []


def test_the_quick_tests_are_there() -> None:
    listed = re.search(r"^QUICK := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    quick = listed[1].replace("\\\n", " ").split()
    assert [name for name in quick if not (ROOT / "tests" / f"test_{name}.py").is_file()] == []
    assert "structure" in quick


def test_the_rows_of_nightly_tests_fit_tests(request: pytest.FixtureRequest) -> None:
    """Of the modules that were collected here; a part of a module is not all of it."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("parts of modules are collected")
    collected, fitted = request.config.stash[nightly.COLLECTED], request.config.stash[nightly.FITTED]
    rows = {(module, test) for module, tests in nightly.NIGHTLY.items() for test in tests}
    assert {row for row in rows - fitted if row[0] in collected} == set()
    assert all((ROOT / "tests" / f"{module}.py").is_file() for module in nightly.NIGHTLY)


def test_one_command_runs_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as together

    runs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text()}
    apart = {"conversion_floor"} | {
        "claims",
        "claims_mujoco_py",
        "predictions",
    }  # converting starts it; need a corpus
    apart |= {"random_returns", "optimizer_updates", "capabilities"}  # write tables; compares revisions
    apart |= {"sharding"}  # proofs of minutes and gigabytes, each with its own words
    assert set(together.ALL) == runs - {"__main__"} - apart
    assert all(map(together.title, together.ALL))
    commands: list[str] = []

    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[-1])
        return subprocess.CompletedProcess(command, int("playing" in command[-1]))

    monkeypatch.setattr(subprocess, "run", fails)
    assert together.main() == 1
    assert commands == [f"benchmarks.{name}" for name in together.ALL]


def test_the_command_line_starts_without_numpy() -> None:
    heavy = {"numpy", "rich.table", "h5py", "textual"}
    program = f"import sys, ckpttool.cli.app; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
