"""Lists of variables that are known by position alone: their members are called by the variables' full names.

TF-Agents' PolicySaver saves `model_variables`, all variables of a policy in one list, and no edge leads to
the networks that hold them (tf_agents/policies/policy_saver.py). `model_variables/3` tells nobody anything;
the variable's own name does.
"""

from __future__ import annotations

from collections import Counter

from ckpttool.formats.object_graph import VALUE, Graph, Node
from ckpttool.formats.object_graph.paths import Tree, is_optimizer
from ckpttool.leaf import Key, Path

_LISTS = frozenset(("model_variables",))


def of_lists(graph: Graph, tree: Tree) -> dict[int, Path]:
    """Return the path, by full name, of every variable that only such a list holds: `LIST/NAME/OF/VARIABLE`.

    A list counts if the root holds it (or it is called model_variables), it holds nothing but variables, and
    their names show that they come from more than one module. Variables of one name also keep their index.
    """
    if not graph or is_optimizer(graph[0]):
        return {}
    found: dict[int, Path] = {}
    for number, path in tree.paths.items():
        if graph[number].listlike and (len(path) == 1 or (path and path[-1].value in _LISTS)):
            found |= _named(graph, tree, number, path)
    return found


def _named(graph: Graph, tree: Tree, number: int, path: Path) -> dict[int, Path]:
    children = graph[number].children
    if not all(_is_named_variable(graph[child]) for child in children.values()):
        return {}
    names = {
        child: graph[child].attributes[0].full_name
        for edge, child in children.items()
        if tree.parents[child] == (number, edge)
    }
    if len({name.rpartition("/")[0] for name in names.values()}) < 2:
        return {}
    paths = {
        child: (*path, *(Key("attr", part) for part in name.split("/") if part))
        for child, name in names.items()
    }
    counts = Counter(paths.values())
    return {
        child: own if counts[own] == 1 else (*own, tree.paths[child][-1])
        for child, own in paths.items()
        if child in tree.paths
    }


def _is_named_variable(node: Node) -> bool:
    return (
        not node.children
        and len(node.attributes) == 1
        and node.attributes[0].name == VALUE
        and bool(node.attributes[0].full_name.strip("/"))
    )
