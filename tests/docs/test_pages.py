"""Links, flags, defaults and names in the documentation match the code."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.cache_flags import FLAGS
from megatron_mamba_cache.command_line.flag_sources import VLLM_FLAGS
from megatron_mamba_cache.replicas.settings import RoutingSettings
from tests.docs.blocks import REPOSITORY, pages

README = REPOSITORY / "README.md"
PAGES = [pytest.param(page, id=page.name) for page in pages()]
MEASURED = [*sorted((REPOSITORY / "benchmarks").rglob("*.md")), *sorted((REPOSITORY / "docs" / "notes").glob("*.md"))]
LINKING_PAGES = [*PAGES, *(pytest.param(page, id=f"{page.parent.name}/{page.name}") for page in MEASURED)]
MOST_LINES = 200
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")

FOREIGN = {
    "docker": {"--file", "--gpus", "--publish", "--shm-size", "--tag", "--volume"},
    "kubectl": {"--filename", "--from-file"},
    "vLLM": set(VLLM_FLAGS),
    "lm_eval": {"--tasks"},
    "pytest": {"--run-clients"},
    "torchrun": {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"},
    "the scripts in benchmarks/": {
        "--loads",
        "--max-seconds",
        "--quick",
        "--seeds",
        "--sessions",
        "--shape",
        "--time-scale",
    },
}
"""Flags of other programs."""


def own_flags() -> set[str]:
    """Return every flag of every command."""
    parsers = [command_parser()]
    flags: set[str] = set()
    while parsers:
        for action in parsers.pop()._actions:
            flags.update(action.option_strings)
            choices = action.choices if isinstance(action.choices, dict) else {}
            parsers.extend(choices.values())
    return flags


def prose_of(page: Path) -> str:
    """Return a page's text outside its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_does_not_exceed_its_maximum_length() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(prose_of(README))}
    assert {f"docs/{page.name}" for page in pages() if page != README} <= linked


@pytest.mark.parametrize("page", LINKING_PAGES)
def test_links_in_the_documentation_resolve(page: Path) -> None:
    for link in LINK.findall(prose_of(page)):
        if link.startswith(("http://", "https://")):
            assert urlsplit(link).netloc, link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(REPOSITORY), link
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_in_the_documentation_exists(page: Path) -> None:
    known = own_flags() | set().union(*FOREIGN.values())
    assert set(FLAG.findall(page.read_text(encoding="utf-8"))) <= known


def test_flags_of_other_programs_are_documented_and_differ_from_our_flags() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    foreign = set().union(*FOREIGN.values())
    assert foreign <= set(FLAG.findall(text))
    assert not foreign & own_flags()


def rows_of(page: Path) -> dict[str, list[str]]:
    """Return the cells of a page's table rows that begin with a name in backticks, by that name."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page.read_text(encoding="utf-8"), re.M)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}


def test_settings_page_matches_the_code() -> None:
    rows = rows_of(REPOSITORY / "docs" / "settings.md")
    assert set(rows) == {field.name for field in fields(CacheConfig)}
    for field in fields(CacheConfig):
        flags, default, _ = rows[field.name]
        shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert default == shown, field.name
        assert set(FLAG.findall(flags)) >= set(FLAGS.get(field.name, ())), field.name


def test_routing_settings_match_the_code() -> None:
    rows = rows_of(REPOSITORY / "docs" / "replicas.md")
    assert set(rows) == {field.name for field in fields(RoutingSettings)}
    for field in fields(RoutingSettings):
        shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert rows[field.name][0] == shown, field.name


def test_readme_plot_shows_the_recorded_measurements() -> None:
    table = (REPOSITORY / "benchmarks" / "results" / "turn_latency.md").read_text(encoding="utf-8")
    picture = (REPOSITORY / "docs" / "later_turn.svg").read_text(encoding="utf-8")
    widths = re.findall(r'<rect x="210" y="\d+" width="([\d.]+)"', picture)
    labels = re.findall(r">([\d.]+)</text>", picture)
    measured = re.findall(r"^\| [a-z ]+ \| [\d,]+ \| ([\d.]+) \|", table, re.M)
    assert len(measured) == 3 and labels == measured
    assert [float(width) for width in widths] == pytest.approx([2 * float(value) for value in measured], abs=0.1)


ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
MAPS = ARCHITECTURE, REPOSITORY / "docs" / "overlapped-steps.md"
MOST_LINES_OF_THE_MAP = 160
PACKAGE = REPOSITORY / "megatron_mamba_cache"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def prose_of_the_maps() -> str:
    """Return the text of the architecture pages, which name modules."""
    return "\n".join(map(prose_of, MAPS))


def paths_of(prose: str) -> set[str]:
    """Return the files and folders that a text names in backticks."""
    names = re.findall(r"`([\w./-]+)`", prose)
    return {name for name in names if name.endswith((".py", "/")) or name.startswith(("tests/", "docs/"))}


def test_architecture_page_does_not_exceed_its_word_limit() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_THE_MAP


def test_files_named_on_architecture_pages_exist() -> None:
    paths = paths_of(prose_of_the_maps())
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not ((PACKAGE / path).exists() or (REPOSITORY / path).exists())] == []


def test_architecture_page_names_every_folder_in_the_package() -> None:
    folders = {f"{init.parent.relative_to(PACKAGE)}/" for init in PACKAGE.rglob("*/__init__.py")}
    assert folders <= paths_of(prose_of(ARCHITECTURE))
    picture_text = re.search(r"^## The picture\n\n((?:    .*\n)+)", ARCHITECTURE.read_text(encoding="utf-8"), re.M)
    assert picture_text is not None
    top = {path.name + "/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"\b(\w+/|\w+\.py)", picture_text[1])) == top | modules


def test_readme_lists_the_folders_in_the_package() -> None:
    picture_text = re.search(r"^    megatron_mamba_cache/\n((?:      .*\n)+)", README.read_text(encoding="utf-8"), re.M)
    assert picture_text is not None
    assert set(re.findall(r"^      (\w+)/ ", picture_text[1], re.M)) == {
        init.parent.name for init in PACKAGE.glob("*/__init__.py")
    }


def test_identifiers_on_architecture_pages_exist() -> None:
    """A method is looked for in the class that the map names."""
    names = re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", prose_of_the_maps())
    own = {name for name in names if ("_" in name or name[0].isupper()) and not name.endswith(".py")} - {PACKAGE.name}
    assert len(own) > 30
    assert sorted(own - set().union(*names_by_file().values())) == []


PLACED_NAME = re.compile(r"`([\w.]+)`(?: and `([\w.]+)`)?\s+(?:\(|in\s+)`([\w/]+\.py)`")
NAMES_IN_FILE = re.compile(r"`([\w/]+\.py)`\s+\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


def placed_names() -> set[tuple[str, str]]:
    """Return each name that a map gives with its file, and that file: `Name` (`file`), in `file`, `file` (`Name`)."""
    prose = prose_of_the_maps()
    placed = {(name, file) for *names, file in PLACED_NAME.findall(prose) for name in names if name}
    for file, inside in NAMES_IN_FILE.findall(prose):
        placed |= {(name, file) for name in re.findall(r"`([\w.]+)`", inside)}
    return placed


def test_identifiers_on_architecture_pages_are_defined_in_the_named_files() -> None:
    placed, defined = placed_names(), names_by_file()
    assert len(placed) > 30
    assert sorted((name, file) for name, file in placed if name not in defined.get(file, ())) == []


def test_step_methods_are_called_in_the_documented_order() -> None:
    """Items 2 to 7 follow `StepRunner.run` from top to bottom."""
    life = prose_of(ARCHITECTURE).partition("## The life of a step")[2].partition("\n### ")[0]
    items = "".join(re.findall(r"^[2-7]\. .*\n(?:   .*\n)*", life, re.M))
    named = re.findall(r"`StepRunner\.(\w+)`", items)
    called = iter(calls_of("StepRunner.run"))
    assert len(named) > 3 and all(name in called for name in named), named


def test_methods_make_the_documented_calls() -> None:
    stated_calls = re.findall(r"`(\w+\.\w+)` calls\s+`(?:\w+\.)?(\w+)`", prose_of_the_maps())
    assert len(stated_calls) > 1
    assert [(caller, name) for caller, name in stated_calls if name not in calls_of(caller)] == []


def calls_of(method: str) -> list[str]:
    """Return the names of the calls of `Class.method`, in order."""
    of_class, _, name = method.partition(".")
    (definition,) = (
        item
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == of_class
        for item in node.body
        if isinstance(item, Function) and item.name == name
    )
    calls = sorted(
        (call.func.lineno, call.func.col_offset, getattr(call.func, "attr", getattr(call.func, "id", "")))
        for call in ast.walk(definition)
        if isinstance(call, ast.Call)
    )
    return [name for *_, name in calls]


@functools.cache
def names_by_file() -> dict[str, set[str]]:
    """Return the names defined in each file; methods as Class.method.

    These are the files of the package, and those of the tests that the maps name. A class has its inherited methods as
    well.
    """
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    named = (name for name in paths_of(prose_of_the_maps()) if name.startswith("tests/") and name.endswith(".py"))
    files |= {name: REPOSITORY / name for name in named if (REPOSITORY / name).exists()}
    trees = {file: ast.parse(path.read_text(encoding="utf-8")) for file, path in files.items()}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {file: set(_names_in(tree, classes)) for file, tree in trees.items()}


def _names_in(tree: ast.Module, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        if isinstance(node, ast.ClassDef):
            name = node.name
            methods = (item for line in _lineage(node, classes) for item in line.body if isinstance(item, Function))
            yield from (f"{name}.{method.name}" for method in methods)


def _lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _lineage(classes[base.id], classes)
