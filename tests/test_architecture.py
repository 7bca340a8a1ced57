"""The package's rules: imports between floors, lengths of modules and functions, and forbidden names."""

import ast
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatron_mamba_cache.errors
from megatron_mamba_cache.mcore.megatron_settings import SET_BY_MEGATRON

PACKAGE_ROOT = Path(megatron_mamba_cache.errors.__file__).parent

FLOORS = (
    ("errors", "config", "installation", "metrics", "public_names"),
    ("policy", "kernels"),
    ("recurrences", "grammars", "tiers"),
    ("speculation", "ranks", "planning"),
    ("step",),
    ("mcore",),
    ("models", "replicas"),
    ("build",),
    ("server",),
    ("command_line", "__main__"),
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
SEPARATE_PARTS = ({"policy", "kernels"},)
WEB_PACKAGES = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}

MAX_MODULE_LINES = 300
MAX_CLASS_LINES = 500
MAX_FUNCTION_LINES = 50
BANNED_WORDS = {"utils", "helper", "manager", "meta"}
BANNED_VERBS = ("do_", "maybe_")

WITHOUT_MEGATRON = {
    "mcore": "checks the installed release",
}
"""Modules of mcore that import nothing of Megatron, and why they are there."""
OWNERS = {"context", "ctx", "runner", "step", "overlapped_step", "overlapped_steps", "queue"}
"""Names of objects whose attributes only they themselves set."""
OWNING_CLASSES = {"MambaCacheContext", "StepRunner", "Step", "OverlappedSteps", "OverlappedStep", "QueueState"}
"""Their classes: what these declare is set on `self` alone, whatever the object is called."""
RECORDS = {"RunningRequest", "StateCursor"}
"""Classes whose fields change by their own methods alone, whatever the object is called: no field is set, and no list
in one is changed, from outside."""
LIST_CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "add", "discard", "update"}

RECURRENT_WORDS = re.compile(r"ssm|mamba|kda|convs?$|convol|rings?$")
"""How words of one recurrence begin; outside its folder, its mixer and the models, code knows state tensors only."""
HOMES_OF_RECURRENCES = (("recurrences",), ("mcore", "mixers"), ("models",))
FIXED_NAMES = {
    # CONTRACT: public names, and fields of CacheConfig.
    *("MambaSlotAllocator", "with_mamba_cache", "conv_state_dtype", "ssm_state_dtype"),
    "prefix_caching_mamba_gb",
    # Megatron's classes, attributes and parameters.
    *("MambaInferenceStateConfig", "MambaLayer", "MambaLayerSubmodules", "MambaMixer", "MambaMixerSubmodules"),
    *("MambaModel", "MambaStack", "MambaStackSubmodules", "MAMBA", "mamba_bda", "mamba_layer", "conv_bias", "d_conv"),
    *("mamba_conv_states", "mamba_metadata", "mamba_slot_allocator", "mamba_ssm_states", "mamba_states_cache"),
    "request_to_mamba_state_idx",
}
"""Identifiers that others have chosen. The package's own name, MambaCache..., is free too."""

CURSOR_CHANGES = {"accept", "resolve", "add_slots", "remove_last_slot", "release_buffer"}
"""Methods of `StateCursor` that change it; only draft states use them, whatever the object is called."""
CURSOR_NAMESAKES = {
    *("draft_states.accept", "uniforms.accept"),
    *("drafts.resolve", "memory.resolve", "self.resolve", "path.resolve"),
}
"""Methods and fields of other objects that are called like these."""
ATTRIBUTE_DICTS = {
    "command_line.arguments": {"vars(arguments)"},
    "models.checkpoints.common_state": {"vars(found)", "self.__dict__"},
    "public_names": {"vars(sys.modules[package])"},
    "mcore.model_reading": {"vars(owner)"},
}
"""The only uses of objects' attributes as dicts: a namespace, objects of unknown classes, a module."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed file; `name` is its path below the package, () for the package's own `__init__`."""

    name: tuple[str, ...]
    is_package: bool
    source: str
    tree: ast.Module

    @property
    def label(self) -> str:
        return ".".join(self.name) or "__init__"


@dataclass(frozen=True, slots=True)
class Package:
    """All modules of a package by name."""

    root_name: str
    modules: dict[tuple[str, ...], Module]

    def internal_imports(self, module: Module) -> set[tuple[str, ...]]:
        """Return the modules of the package that `module` imports anywhere, `TYPE_CHECKING` blocks included."""
        paths = [path[1:] for path in _imported_paths(module, self.root_name) if path[0] == self.root_name]
        return {self._longest_known(path) for path in paths}

    def external_imports(self, module: Module) -> set[str]:
        """Return the top-level names of other packages that `module` imports anywhere."""
        return {path[0] for path in _imported_paths(module, self.root_name)} - {self.root_name}

    def _longest_known(self, path: tuple[str, ...]) -> tuple[str, ...]:
        while path and path not in self.modules:
            path = path[:-1]
        return path


def parsed(source: str) -> ast.Module:
    """Parse a module; CPython 3.11 raises if another thread builds a syntax tree meanwhile (its issue 106905)."""
    for _ in range(10):
        try:
            return ast.parse(source)
        except SystemError as error:
            found = error
    raise found


def read_package(root: Path) -> Package:
    """Parse every module below `root`."""
    modules = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).with_suffix("").parts
        is_package = path[-1] == "__init__"
        name = path[:-1] if is_package else path
        source = file.read_text(encoding="utf-8")
        modules[name] = Module(name, is_package, source, parsed(source))
    return Package(root.name, modules)


@cache
def this_package() -> Package:
    """Parse every module of the package, once for all checks."""
    return read_package(PACKAGE_ROOT)


def _imported_paths(module: Module, root_name: str) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute_path(module, root_name, node.level, node.module or "")
            yield from ((*origin, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _name_of(node.func) in ("import_module", "__import__"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                target = name.value.lstrip(".")
                yield _absolute_path(module, root_name, len(name.value) - len(target), target)


def _absolute_path(module: Module, root_name: str, level: int, name: str) -> tuple[str, ...]:
    """Return the path that `level` dots and `name` mean in a module."""
    path = tuple(name.split(".")) if name else ()
    here = (root_name, *module.name) if module.is_package else (root_name, *module.name[:-1])
    return here[: len(here) - level + 1] + path if level else path


def floor_violations(package: Package) -> Iterator[str]:
    """Yield imports that go up, cross between parts kept separate, or leave a part without a floor."""
    for module in package.modules.values():
        if not module.name:
            continue  # The package's own __init__ only gathers public names, and imports them lazily.
        part = module.name[0]
        if part not in FLOOR_OF:
            yield f"{module.label}: no floor is named for {part!r}; add it to FLOORS"
            continue
        for target in sorted(package.internal_imports(module)):
            # The package's own __init__ names what every floor offers, so only the top floor may import it.
            floor = FLOOR_OF.get(target[0], len(FLOORS)) if target else len(FLOORS) - 1
            if floor > FLOOR_OF[part]:
                yield f"{module.label}: imports {'.'.join(target) or '__init__'} of a higher floor"
            elif target and part != target[0] and any({part, target[0]} <= parts for parts in SEPARATE_PARTS):
                yield f"{module.label}: imports {'.'.join(target)}, but the two know nothing of each other"


def dependency_violations(package: Package) -> Iterator[str]:
    """Yield imports of torch that policy reaches, of megatron below mcore, and of web packages outside of server."""
    for module in package.modules.values():
        if not module.name:
            continue
        if module.name[0] == "policy":
            for reached in _reachable(package, module):
                for name in sorted(package.external_imports(reached) & {"torch", "triton"}):
                    yield f"{module.label}: policy reaches {name} through {reached.label}"
        if module.name[0] != "server":
            for name in sorted(package.external_imports(module) & WEB_PACKAGES):
                yield f"{module.label}: imports {name} outside of the server"
        is_below_mcore = FLOOR_OF.get(module.name[0], 0) < FLOOR_OF["mcore"]
        if is_below_mcore and "megatron" in package.external_imports(module):
            yield f"{module.label}: imports megatron below mcore"


def mcore_violations(package: Package) -> Iterator[str]:
    """Yield modules of mcore that import nothing of Megatron without a stated reason, and reasons that are stale."""
    modules = [module for module in package.modules.values() if not _is_empty(module)]
    imports = {module.label: "megatron" in package.external_imports(module) for module in modules}
    for label, imports_megatron in imports.items():
        if label.split(".")[0] == "mcore" and imports_megatron == (label in WITHOUT_MEGATRON):
            yield f"{label}: {'drop its reason' if imports_megatron else 'imports nothing of megatron; move it down'}"


def _is_empty(module: Module) -> bool:
    """Return whether a module is a package's `__init__` with nothing but a docstring."""
    return module.is_package and len(module.tree.body) <= 1


def ownership_violations(package: Package) -> Iterator[str]:
    """Yield what reaches into a context, runner or step from outside, and what bypasses attributes, one a line."""
    private = {name for name in _owned_attributes(package) if name.startswith("_")}
    fields = _record_fields(package)
    for module in package.modules.values():
        found: dict[int, str] = {}
        for node in ast.walk(module.tree):
            breach = _breach(node, private, ATTRIBUTE_DICTS.get(module.label, set())) or _record_breach(node, fields)
            if breach is not None:
                found.setdefault(getattr(node, "lineno", 0), breach)
        yield from (f"{module.label}:{line}: {breach}" for line, breach in sorted(found.items()))


def _breach(node: ast.AST, private: Container[str], allowed_dicts: Container[str]) -> str | None:
    """Return how a node breaks the rule of ownership, if it does."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return None if ast.unparse(node) in allowed_dicts else ast.unparse(node)
    if isinstance(node, ast.Attribute):
        return _attribute_breach(node, private)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        is_of_owner = isinstance(node.value, ast.Attribute) and _reaches_through_owner(node.value.value)
        return f"sets {ast.unparse(node)} from outside" if is_of_owner else None
    if isinstance(node, ast.Call) and _name_of(node.func) == "vars":
        return None if ast.unparse(node) in allowed_dicts else ast.unparse(node)
    if isinstance(node, ast.Call) and node.args and _name_of(node.func) in _SETTERS:
        owner = node.args[0]
        return f"sets an attribute of {_name_of(owner)} from outside" if _reaches_through_owner(owner) else None
    return None


def _attribute_breach(node: ast.Attribute, private: Container[str]) -> str | None:
    if _name_of(node.value) in ("self", "cls"):
        return None
    if node.attr in private or (_is_private(node.attr) and _is_owner(_name_of(node.value))):
        verb = "reads" if isinstance(node.ctx, ast.Load) else "sets"
        return f"{verb} {ast.unparse(node)} from outside"
    is_set = isinstance(node.ctx, ast.Store | ast.Del) and _reaches_through_owner(node.value)
    return f"sets {ast.unparse(node)} from outside" if is_set and node.attr not in SET_BY_MEGATRON else None


def _record_breach(node: ast.AST, fields: Container[str]) -> str | None:
    """Return how a node changes a field of a record from outside, if it does."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LIST_CHANGES:
        changed = node.func.value
    elif isinstance(node, ast.Call) and _name_of(node.func) in _SETTERS and len(node.args) > 1:
        owner, name = node.args[:2]
        is_field = isinstance(name, ast.Constant) and name.value in fields and _name_of(owner) != "self"
        return f"sets {ast.unparse(name)} of {ast.unparse(owner)} from outside" if is_field else None
    while isinstance(changed, ast.Subscript):
        changed = changed.value
    is_field = isinstance(changed, ast.Attribute) and changed.attr in fields and _name_of(changed.value) != "self"
    return f"changes {ast.unparse(changed)} from outside" if changed is not None and is_field else None


def cursor_violations(package: Package) -> Iterator[str]:
    """Yield uses of methods that change a request's cursor, outside of the module with its draft states."""
    for module in package.modules.values():
        if module.label == "policy.draft_states":
            continue
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Attribute) and node.attr in CURSOR_CHANGES):
                continue
            if f"{_name_of(node.value)}.{node.attr}" not in CURSOR_NAMESAKES:
                yield f"{module.label}:{node.lineno}: {ast.unparse(node)} changes a cursor"


def _record_fields(package: Package) -> set[str]:
    """Return the fields that the records declare."""
    classes = (node for module in package.modules.values() for node in ast.walk(module.tree))
    bodies = (node.body for node in classes if isinstance(node, ast.ClassDef) and node.name in RECORDS)
    declared = (node.target for body in bodies for node in body if isinstance(node, ast.AnnAssign))
    return {target.id for target in declared if isinstance(target, ast.Name)}


def _reaches_through_owner(node: ast.expr) -> bool:
    """Return whether an expression is an owner, or an attribute or item of one."""
    while True:
        if _is_owner(_name_of(node)):
            return True
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return False
        node = node.value


def _is_owner(name: str) -> bool:
    return name.lstrip("_") in OWNERS


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def _owned_attributes(package: Package) -> set[str]:
    """Return the attributes that the owning classes set on themselves."""
    classes = (node for module in package.modules.values() for node in ast.walk(module.tree))
    bodies = (node for node in classes if isinstance(node, ast.ClassDef) and node.name in OWNING_CLASSES)
    return {
        node.attr
        for body in bodies
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name_of(node.value) == "self"
    }


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _reachable(package: Package, module: Module) -> Iterator[Module]:
    seen, queue = {module.name}, [module]
    while queue:
        current = queue.pop()
        yield current
        targets = sorted(package.internal_imports(current) - seen - {()})
        seen.update(targets)
        queue.extend(package.modules[target] for target in targets)


def cycle_violations(package: Package) -> Iterator[str]:
    """Yield the first import cycle between modules."""
    graph = {module.name: package.internal_imports(module) - {()} for module in package.modules.values() if module.name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " <- ".join(".".join(name) for name in error.args[1])


def size_violations(package: Package) -> Iterator[str]:
    """Yield modules that are too long, and functions that are and do not say why."""
    for module in package.modules.values():
        num_lines = len(module.source.splitlines())
        if num_lines > MAX_MODULE_LINES and not _is_one_class(module, num_lines):
            yield f"{module.label}: {num_lines} lines, at most {MAX_MODULE_LINES}"
        for function in _functions(module):
            num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if num_lines > MAX_FUNCTION_LINES and "long because" not in (ast.get_docstring(function) or "").lower():
                yield f"{module.label}.{function.name}: {num_lines} lines; shorten it or say 'long because ...'"


def name_violations(package: Package) -> Iterator[str]:
    """Yield modules and functions whose names say nothing."""
    for module in package.modules.values():
        words = {word for part in module.name for word in part.split("_")}
        for word in sorted(words & BANNED_WORDS):
            yield f"{module.label}: {word!r} says nothing"
        for function in _functions(module):
            if function.name.lstrip("_").startswith(BANNED_VERBS):
                yield f"{module.label}.{function.name}: the name does not say what is done"


def vocabulary_violations(package: Package) -> Iterator[str]:
    """Yield identifiers with a word of one recurrence, outside its folder, its mixer and the models."""
    for module in package.modules.values():
        if any(module.name[: len(home)] == home for home in HOMES_OF_RECURRENCES):
            continue
        found = {name for node in ast.walk(module.tree) for name in _identifiers(node)}
        for name in sorted(found.union(module.name) - FIXED_NAMES):
            words = [word.lower() for word in _WORDS.findall(name.replace("MambaCache", ""))]
            if any(map(RECURRENT_WORDS.match, words)) or _D_STATE.search(" ".join(words)):
                yield f"{module.label}: {name!r} is a word of one recurrence"


_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_D_STATE = re.compile(r"\bd states?\b")


def _identifiers(node: ast.AST) -> tuple[str, ...]:
    """Return the identifiers that a node itself has."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
            return (name,)
        case ast.alias(name=name, asname=own):
            return (name.split(".")[-1], *([own] if own else []))
    return ()


def launch_violations(package: Package) -> Iterator[str]:
    """Yield launches of Triton kernels that leave the fusion of multiply and add to Triton's default, which changes."""
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            kernel = ast.unparse(node.func.value)
            if kernel.endswith("kernel") and all(keyword.arg != "enable_fp_fusion" for keyword in node.keywords):
                yield f"{module.label}: {kernel} is launched without enable_fp_fusion"


def _is_one_class(module: Module, num_lines: int) -> bool:
    """Return whether one class takes up most of a module: it is one idea, and splitting it would hide that."""
    lengths = [(node.end_lineno or 0) - node.lineno for node in module.tree.body if isinstance(node, ast.ClassDef)]
    return num_lines <= MAX_CLASS_LINES and max(lengths, default=0) > 3 * num_lines / 4


def _functions(module: Module) -> Iterator[Function]:
    return (node for node in ast.walk(module.tree) if isinstance(node, Function))


Check = Callable[[Package], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    floor_violations,
    dependency_violations,
    mcore_violations,
    ownership_violations,
    cursor_violations,
    cycle_violations,
    size_violations,
    name_violations,
    launch_violations,
    vocabulary_violations,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_follows_the_architecture_rules(check: Check) -> None:
    package = this_package()
    assert ("errors",) in package.modules
    assert list(check(package)) == []


LONG_BODY = "    x = 1\n" * 60
SOUND = {
    "errors": "",
    "policy/align": "import numpy\nfrom pkg.errors import E",
    "speculation/verifier": "import torch\nfrom pkg.policy import align",
    "mcore/context": "import megatron.core",
    "server/app": "import fastapi",
    "__main__": "from pkg import C",
}
RECORD = {"policy/align": "class RunningRequest:\n    computed: int\n    blocks: list[int]\n"}
PLANTED = {
    "upward_import": ({"policy/align": "from pkg.recurrences import pool", "recurrences/pool": ""}, "higher floor"),
    "relative_upward_import": ({"policy/align": "from ..state import pool", "recurrences/pool": ""}, "higher floor"),
    "relative_string_import": (
        {"policy/align": 'm = import_module("..mcore.context", __package__)'},
        "imports mcore.context of a higher floor",
    ),
    "string_import": ({"policy/align": 'm = importlib.import_module("pkg.mcore.context")'}, "higher floor"),
    "facade_import": ({"policy/align": "from pkg import Context"}, "higher floor"),
    "type_checking_import": (
        {"policy/align": "if TYPE_CHECKING:\n    from pkg.recurrences.pool import P", "recurrences/pool": ""},
        "higher floor",
    ),
    "local_import": ({"config": "def load():\n    import pkg.policy.align", "policy/align": ""}, "higher floor"),
    "policy_in_kernels": ({"kernels/copy": "import pkg.policy.align", "policy/align": ""}, "know nothing"),
    "kernels_in_policy": ({"policy/align": "import pkg.kernels.copy", "kernels/copy": ""}, "know nothing"),
    "part_without_floor": ({"extras": ""}, "no floor"),
    "torch_in_policy": ({"policy/align": "from torch import Tensor"}, "reaches torch"),
    "torch_reached_by_policy": ({"policy/align": "from pkg import config", "config": "import torch"}, "reaches torch"),
    "megatron_below_mcore": ({"recurrences/pool": "from megatron.core import x"}, "below mcore"),
    "speculation_in_state": (
        {"recurrences/pool": "import pkg.speculation.drafter", "speculation/drafter": ""},
        "higher floor",
    ),
    "mcore_in_speculation": ({"speculation/drafter": "import pkg.mcore.context"}, "higher floor"),
    "megatron_in_speculation": ({"speculation/drafter": "from megatron.core import x"}, "below mcore"),
    "command_line_in_server": (
        {"server/app": "import pkg.command_line.launch", "command_line/launch": ""},
        "higher floor",
    ),
    "web_package_in_mcore": (
        {"mcore/context": "from fastapi import FastAPI\nimport megatron.core"},
        "outside of the server",
    ),
    "web_package_in_command_line": ({"command_line/serve": "import uvicorn"}, "outside of the server"),
    "mcore_without_megatron": ({"mcore/sizes": "import torch"}, "imports nothing of megatron"),
    "attribute_set_from_outside": (
        {"step/run": "def f(context):\n    context.running_requests = ()"},
        "sets context.running_requests",
    ),
    "attribute_of_a_part_set": ({"step/run": "def f(a):\n    a.runner.counts += 1"}, "sets a.runner.counts"),
    "attribute_set_by_name": (
        {"step/run": "def f(runner):\n    setattr(runner, 'rows', ())"},
        "an attribute of runner",
    ),
    "attribute_of_an_alias_set": (
        {"step/run": "class StepRunner:\n    def f(self):\n        self._own = 1\ndef g(r):\n    r._own = 2"},
        "sets r._own",
    ),
    "attribute_of_a_part_of_an_owner_set": (
        {"step/run": "def f(context, x):\n    context.runner.memory.slots = x"},
        "sets context.runner.memory.slots",
    ),
    "item_of_an_attribute_set": (
        {"step/run": "def f(context, x):\n    context.running_requests[0] = x"},
        "sets context.running_requests[0]",
    ),
    "item_of_an_attribute_deleted": (
        {"step/run": "def f(a):\n    del a.context.running_requests[0]"},
        "sets a.context.running_requests[0]",
    ),
    "private_attribute_called": (
        {"step/run": "def f(runner):\n    runner._graphs.drop()"},
        "reads runner._graphs",
    ),
    "private_attribute_of_a_part_called": (
        {"step/run": "def f(a):\n    a._runner._at_work.clear()"},
        "reads a._runner._at_work",
    ),
    "private_attribute_of_an_alias_read": (
        {"step/run": "class StepRunner:\n    def f(self):\n        self._own = 1\ndef g(r):\n    return r._own"},
        "reads r._own",
    ),
    "field_of_a_request_set": (RECORD | {"step/run": "def f(r):\n    r.computed += 1"}, "changes r.computed"),
    "fields_of_a_request_set_together": (
        RECORD | {"step/run": "def f(a):\n    n, a.rows[0].computed = 1, 2"},
        "changes a.rows[0].computed",
    ),
    "field_of_a_request_deleted": (RECORD | {"step/run": "def f(r):\n    del r.computed"}, "changes r.computed"),
    "field_of_a_request_set_by_name": (
        RECORD | {"step/run": "def f(r):\n    setattr(r, 'computed', 1)"},
        "sets 'computed' of r",
    ),
    "list_of_a_request_changed": (
        RECORD | {"step/run": "def f(r):\n    r.blocks.append(1)"},
        "changes r.blocks",
    ),
    "item_of_a_list_of_a_request_set": (
        RECORD | {"step/run": "def f(r):\n    r.blocks[0] = 1"},
        "changes r.blocks",
    ),
    "swapped_attributes": ({"step/run": "class R:\n    def f(self):\n        return vars(self)"}, "vars(self)"),
    "attributes_updated": ({"step/run": "def f(x):\n    vars(x).update(rows=())"}, "vars(x)"),
    "cursor_changed": ({"step/run": "def f(row):\n    row.cursor.accept(2)"}, "row.cursor.accept changes a cursor"),
    "cursor_of_another_name_changed": (
        {"step/run": "def f(row):\n    at = row.cursor\n    at.accept(2)"},
        "at.accept changes a cursor",
    ),
    "method_of_a_cursor_passed_on": (
        {"step/run": "def f(request, then):\n    then(request.cursor.resolve)"},
        "request.cursor.resolve changes a cursor",
    ),
    "set_of_a_request_changed": (
        RECORD | {"step/run": "def f(r):\n    r.blocks.add(1)"},
        "changes r.blocks",
    ),
    "copied_dict": ({"step/run": "class R:\n    def f(self):\n        return dict(self.__dict__)"}, "self.__dict__"),
    "updated_dict": ({"step/run": "class R:\n    def f(self):\n        self.__dict__.update(a=1)"}, "self.__dict__"),
    "item_of_a_dict_set": ({"step/run": "def f(runner):\n    runner.__dict__['_step'] = None"}, "runner.__dict__"),
    "cycle": ({"recurrences/a": "from pkg.recurrences import b", "recurrences/b": "from . import a"}, "import cycle"),
    "long_module": ({"recurrences/pool": "x = 1\n" * 301}, "301 lines"),
    "long_class_among_others": (
        {"recurrences/pool": "class A:\n" + "    x = 1\n" * 200 + "class B:\n" + "    x = 1\n" * 200},
        "402 lines",
    ),
    "very_long_class": ({"recurrences/pool": "class A:\n" + "    x = 1\n" * 500}, "501 lines"),
    "long_function": ({"recurrences/pool": f"class Pool:\n  def grow(self):\n{LONG_BODY}"}, "61 lines"),
    "word_of_a_recurrence": ({"step/run": "def f(pool):\n    return pool.ssm_states"}, "'ssm_states' is a word of one"),
    "class_of_a_recurrence": ({"policy/buffers": "class RequestRings: ..."}, "'RequestRings' is a word of one"),
    "size_of_a_recurrence": ({"step/run": "def f(d_state): ..."}, "'d_state' is a word of one"),
    "sizes_of_a_recurrence": ({"step/run": "num_d_states = 1"}, "'num_d_states' is a word of one"),
    "words_of_a_recurrence": ({"step/run": "def f(x):\n    match x:\n        case [*convs]: ..."}, "'convs' is a word"),
    "word_joined_to_another": ({"step/run": "ssmstates = 1"}, "'ssmstates' is a word of one"),
    "module_of_a_recurrence": ({"policy/ssm_chunks": "x = 1"}, "'ssm_chunks' is a word of one"),
    "renamed_import_of_a_recurrence": (
        {"step/run": "from pkg.recurrences.pool import conv as taps", "recurrences/pool": ""},
        "'conv' is a word of one",
    ),
    "default_fp_fusion": ({"kernels/ops": "def f(x):\n    _add_kernel[(1,)](x=x)"}, "without enable_fp_fusion"),
    "banned_module": ({"recurrences/pool_utils": ""}, "'utils'"),
    "banned_function": ({"recurrences/pool": "def _maybe_grow(): ..."}, "_maybe_grow"),
}


def write_package(root: Path, files: dict[str, str]) -> Package:
    for name, source in files.items():
        file = root / "pkg" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return read_package(root / "pkg")


def all_violations(package: Package) -> list[str]:
    return [violation for check in CHECKS for violation in check(package)]


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_architecture_violation_is_the_only_one_found(planted: str, tmp_path: Path) -> None:
    files, message = PLANTED[planted]
    violations = all_violations(write_package(tmp_path, SOUND | files))
    assert len(violations) == 1 and message in violations[0]


def test_package_without_violations_passes(tmp_path: Path) -> None:
    facade = {"__init__": "from pkg.mcore.context import C", "policy/__init__": "", "policy/metadata": ""}
    assert all_violations(write_package(tmp_path, SOUND | facade)) == []


def test_assignments_to_own_fields_pass_for_classes_of_the_same_name(tmp_path: Path) -> None:
    methods = "    def f(self):\n        self.computed = 1\n        self.blocks.append(1)\n"
    sources = {"policy/align": RECORD["policy/align"] + methods, "step/run": f"class R:\n{methods}"}
    assert all_violations(write_package(tmp_path, SOUND | sources)) == []


def test_long_function_passes_when_a_reason_is_listed(tmp_path: Path) -> None:
    source = f'def grow():\n    """Grow.\n\n    Long because it is one kernel.\n    """\n{LONG_BODY}'
    assert all_violations(write_package(tmp_path, SOUND | {"recurrences/pool": source})) == []


def test_long_module_with_a_single_class_passes(tmp_path: Path) -> None:
    one_class = {"recurrences/pool": "class A:\n" + "    x = 1\n" * 400}
    assert all_violations(write_package(tmp_path, SOUND | one_class)) == []
