"""Every code block in the documentation is run, or only parsed if its marker says that it needs other hardware."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import REPOSITORY, Block, blocks_of, error_of, matches, pages, pip_lines, without_pip
from tests.docs.command_lines import arguments_in, parsed

BLOCKS = [block for page in pages() for block in blocks_of(page)]
PAGES = [pytest.param(page, id=page.name) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_has_a_valid_run_or_print_marker(page: Path) -> None:
    blocks = blocks_of(page)
    num_fences = len(re.findall(r"^\s*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert num_fences == 2 * len(blocks), "a fence is not closed, is indented, or is not made of three backticks"
    assert [error for index in range(len(blocks)) if (error := error_of(blocks, index))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_html_comment_is_the_marker_of_a_code_block(page: Path) -> None:
    comments = page.read_text(encoding="utf-8").count("<!--")
    assert comments == len(blocks_of(page))


def test_most_code_blocks_are_executed() -> None:
    kinds = [block.kind for block in BLOCKS]
    assert kinds.count("run") > 2 * kinds.count("needs")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind in ("run", "needs", "file")], ids=str)
def test_kind_of_a_code_block_is_derived_from_its_language(block: Block) -> None:
    match block.language:
        case "bash":
            for arguments in arguments_in(block.text):
                parsed(arguments)
        case "python":
            tree = ast.parse(block.text)
            for module in imported_modules(tree) if block.kind != "run" else ():
                assert importlib.util.find_spec(module) is not None, module
        case "yaml":
            assert list(yaml.safe_load_all(block.text))
        case "json":
            assert all(json.loads(line) for line in block.text.splitlines())
        case "text":
            assert block.kind == "file"
        case "nginx":
            assert block.text.count("{") == block.text.count("}") > 0
        case _:
            pytest.fail(f"{block}: no check for {block.language!r}")


def imported_modules(tree: ast.Module) -> set[str]:
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_code_block_without_a_marker_raises_an_error(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "page.md"
    bare = Block(page, 1, "bash", "true\n", "", ())
    assert error_of([bare], 0) is not None
    assert error_of([Block(page, 1, "bash", "true\n", "run", ("elsewhere",))], 0) is not None
    assert error_of([Block(page, 1, "text", "so\n", "prints", ())], 0) is not None
    assert error_of([Block(page, 1, "bash", "true\n", "needs", ("luck",))], 0) is not None


def test_our_commands_are_found_after_launchers_and_pipes() -> None:
    text = "torchrun -m megatron_mamba_cache serve \\\n --port 0 &\nX=1 mamba-cache doctor | grep ready\n"
    assert arguments_in(text) == [["serve", "--port", "0"], ["doctor"]]
    with pytest.raises(Exception, match="--no-such-flag"):
        parsed(["serve", "--no-such-flag"])


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nb\nc\n", False),
        ("...\nb\n...\n", "a\nb\nc\n", True),
        ("b\n", "a\nb\n", False),
        ("a\n", "a\nb\n", False),
        ("a\n...\na\n", "a\n", False),
        ("12 tokens in 5.77 s (133 tokens/s), 83.3 %\n", "12 tokens in 15.1 s (9 tokens/s), 83.3 %\n", True),
        ("12 tokens in 5.77 s, 83.3 %\n", "12 tokens in 5.77 s, 83.4 %\n", False),
        ("12 tokens in 5.77 s\n", "13 tokens in 5.77 s\n", False),
    ],
)
def test_output_is_compared_except_times_and_ellipses(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed, times_vary=True) is same


def test_only_pip_install_lines_are_skipped() -> None:
    text = "pip install -e '.[server,hf]'\npip install -e . && python x.py\necho pip install\n"
    assert without_pip(text) == "python x.py\necho pip install\n"
    assert pip_lines(text) == ["pip install -e '.[server,hf]'", "pip install -e ."]
