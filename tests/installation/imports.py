"""Imports of source files and the modules that they reach, without importing them."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}
_GUARD = "require_extra"

Statement = ast.Import | ast.ImportFrom
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module.

    Args:
        target: Its dotted name; that of `from a import b` is a.b, which may also be a name in a.
        extra: That its function or class has checked with `require_extra`; "" for what has to be there.
        is_optional: True if the importing code handles a missing module.
    """

    target: str
    extra: str = ""
    is_optional: bool = False


class Sources:
    """Packages and scripts by module name.

    Args:
        roots: A folder for each package, or a file for each script, by name.
    """

    def __init__(self, roots: dict[str, Path]) -> None:
        self._files: dict[str, Path] = {}
        self._imports: dict[str, list[Import]] = {}
        for name, root in roots.items():
            for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
                parts = [name, *(file.relative_to(root).with_suffix("").parts if root.is_dir() else ())]
                self._files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file

    def imports(self, module: str) -> list[Import]:
        """Return all imports of a module except in `TYPE_CHECKING` blocks."""
        if module not in self._imports:
            file = self._files[module]
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            self._imports[module] = list(_imports_of(ast.parse(file.read_text(encoding="utf-8")), package))
        return self._imports[module]

    def third_parties(self, entries: Iterable[str], extras: Iterable[str] = ()) -> dict[str, str]:
        """Return each top-level package that these modules need at last, and a module that imports it.

        Args:
            entries: Modules where a command starts; all that they import is followed, in functions too.
            extras: Whose guarded imports are followed as well.
        """
        queue, seen, found = list(entries), set[str](), dict[str, str]()
        while queue:
            module = queue.pop()
            if module in seen:
                continue
            seen.add(module)
            for one in self.imports(module):
                if one.is_optional or (one.extra and one.extra not in extras):
                    continue
                inner = self._known(one.target)
                top = one.target.partition(".")[0]
                if inner:
                    parts = inner.split(".")
                    packages = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
                    queue += [package for package in packages if package in self._files]
                elif top not in sys.stdlib_module_names:
                    found.setdefault(top, module)
        return found

    def _known(self, target: str) -> str:
        while target and target not in self._files:
            target = target.rpartition(".")[0]
        return target


def _imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Yield a module's imports, names made absolute."""
    for statement, extra, is_optional in _statements(tree, "", False):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield Import(alias.name, extra, is_optional)
        else:
            parts = package.split(".")
            base = parts[: len(parts) - statement.level + 1] if statement.level else []
            base += statement.module.split(".") if statement.module else []
            for alias in statement.names:
                yield Import(".".join([*base, alias.name]), extra, is_optional)


def _statements(node: ast.AST, extra: str, is_optional: bool) -> Iterator[tuple[Statement, str, bool]]:
    """Yield import statements below a node with the extra that guards them and whether they may fail."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, Function | ast.ClassDef):
        extra = _required_extra(node) or extra
    if isinstance(node, Statement):
        yield node, extra, is_optional
    elif isinstance(node, ast.Try):
        handles = is_optional or any(_names(handler.type) & _IMPORT_ERRORS for handler in node.handlers)
        for child in ast.iter_child_nodes(node):
            yield from _statements(child, extra, handles if child in node.body else is_optional)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _statements(child, extra, is_optional)


def _required_extra(node: Function | ast.ClassDef) -> str:
    """Return the extra that a function, or a method of a class, checks for."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == _GUARD:
            return str(ast.literal_eval(call.args[0]))
    return ""


def _names(kind: ast.expr | None) -> set[str]:
    return {"Exception"} if kind is None else {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
