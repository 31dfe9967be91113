"""Sizes, names, words and rules of src/flexmarl, held by `make check`: a line for each breach, and exit code 1 if any.

python checks/house.py            the breaches
python checks/house.py --sizes    files, lines and small files, by folder
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "flexmarl"
SHARED_NAMES = {"__init__", "__main__", "interface", "settings", "base"}
"""File names that say a part's role; every other name is unique, so that a reader who greps it finds one file."""
LONGEST_FUNCTION = 50
"""Lines of the body, without signature and docstring."""
SMALL = 40
"""Lines under which a file should join the one it is read with."""
ENTRIES = ("credit/estimators/", "tools/", "records/")
"""Folders whose files are entries of a table, or records: each may be small."""
AT_MOST = {"files": 403, "lines": 76_500, "small files": 6}
"""The package may not outgrow this; whoever makes it smaller lowers the number."""
OPENERS = re.compile(r"(What|Of|Who|Whose|Those|One (that|who|which|of)|Whether (it|there|not|to))\b")
"""Words that open no docstring: a sentence has a subject."""

RULE = "Decides"
"""First word of a rule's docstring."""
NOT_IN_RULES = frozenset(
    {
        *("asyncio", "threading", "subprocess", "time", "datetime"),
        *("torch", "transformers", "ray"),
        *("http", "urllib", "socket", "httpx", "requests", "starlette"),
    }
)
"""Packages that no rule imports, anywhere in its file: event loop, clock, devices, other processes, network."""


def files() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The path below the package."""
    return path.relative_to(PACKAGE).as_posix()


def small_files(paths: list[Path]) -> list[str]:
    """Files that are too small to be read by themselves."""
    return [
        name
        for path in paths
        if path.stem not in SHARED_NAMES
        and not (name := name_of(path)).startswith(ENTRIES)
        and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
    ]


def breaches() -> Iterator[str]:
    """Every breach, as a line that says where and what."""
    paths = files()
    sizes = {
        "files": len(paths),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths),
        "small files": len(small_files(paths)),
    }
    for what, number in sizes.items():
        if number > AT_MOST[what]:
            yield f"{number} {what}, at most {AT_MOST[what]} are wanted: merge what is read together"
    yield from shared_file_names(paths)
    trees = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    yield from shared_class_names(trees)
    for name, tree in trees.items():
        yield from long_functions(name, tree)
        yield from openers(name, tree)
        yield from impure_rules(name, tree)
    yield from circles(trees)


def shared_file_names(paths: list[Path]) -> Iterator[str]:
    """File names that two folders use."""
    names = defaultdict(list)
    for path in paths:
        if path.stem not in SHARED_NAMES:
            names[path.stem].append(name_of(path))
    for shared in names.values():
        if len(shared) > 1:
            yield f"{', '.join(shared)}: one file name for several things"


def shared_class_names(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Public classes that share a name."""
    names = defaultdict(list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(file)
    for name, shared in sorted(names.items()):
        if len(shared) > 1:
            yield f"class {name} is in {', '.join(shared)}: one name for several things"


def long_functions(file: str, tree: ast.Module) -> Iterator[str]:
    """Functions that are longer than a screen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{file}:{node.lineno}: {node.name} has {lines} lines, at most {LONGEST_FUNCTION} are wanted"


def openers(file: str, tree: ast.Module) -> Iterator[str]:
    """Docstrings that open without a subject."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and OPENERS.match(text):
                    yield f"{file}:{statement.lineno}: a docstring opens with {text.split()[0]!r}: {text[:60]!r}"


def statements(tree: ast.Module, *, in_functions: bool) -> Iterator[ast.stmt]:
    """Statements of a module that run: all but those under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(node, ast.stmt):
                yield node
            waiting += ast.iter_child_nodes(node)


def imports(tree: ast.Module, *, in_functions: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports when it runs, `package.module.name` for a name of it."""
    for node in statements(tree, in_functions=in_functions):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)


def impure_rules(file: str, tree: ast.Module) -> Iterator[str]:
    """Imports with which a rule would not be one. The modules that a rule imports are not looked into."""
    if (ast.get_docstring(tree) or "").startswith(RULE):
        for line, name in imports(tree, in_functions=True):
            if name.split(".")[0] in NOT_IN_RULES:
                yield f"{file}:{line}: a module that decides imports {name}: hand its result in, or word it as a loop"


def circles(trees: dict[str, ast.Module]) -> Iterator[str]:
    """The first circle of modules that import one another while they are loaded; it breaks whoever loads it first."""
    modules = {module_of(file): tree for file, tree in trees.items()}
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = [name for _, name in imports(tree, in_functions=False)]
        graph[module] = {own for name in named for own in (name, name.rpartition(".")[0]) if own in modules} - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import one another in a circle: {' -> '.join(reversed(error.args[1]))}"


def module_of(file: str) -> str:
    """The module's name, from the file's path below the package."""
    return ".".join([PACKAGE.name, *file.removesuffix(".py").removesuffix("/__init__").split("/")])


def print_sizes() -> None:
    """Prints files, lines and small files of each folder."""
    paths = files()
    counts = Counter(name_of(path).split("/")[0] for path in paths)
    lines: Counter[str] = Counter()
    for path in paths:
        lines[name_of(path).split("/")[0]] += len(path.read_text(encoding="utf-8").splitlines())
    for folder in sorted(counts):
        print(f"{folder:16} {counts[folder]:4} files {lines[folder]:6} lines")
    print(f"{'all':16} {len(paths):4} files {sum(lines.values()):6} lines, {len(small_files(paths))} small files")


def main() -> None:
    """Prints what was asked for."""
    if "--sizes" in sys.argv[1:]:
        print_sizes()
        return
    found = list(breaches())
    print("\n".join(found) or "the house is in order")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
