"""Blocks of the documentation run as written and print the output on the pages.

Here, with `--run-long`, those that take seconds: Python blocks, all in one process, and those that ask a server.
`python -m tests.docs.run_blocks` runs every block, in the environment that its page asks for, and so does `--run-slow`.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY, Block, blocks_of, pages, without_pip
from tests.docs.processes import BlockError
from tests.docs.run_blocks import BlockRunner, blocks_to_run, folder_like_repository

HIDDEN_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # pages show what a CPU prints


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[BlockRunner]:
    """Return a runner whose commands are this Python's and this checkout's, and whose servers take a free port."""
    for name, module in (("python", ""), ("mamba-cache", " -m megatron_mamba_cache")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        script.chmod(0o755)
    environment = (
        os.environ
        | HIDDEN_GPU
        | {
            "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with folder_like_repository() as folder, BlockRunner(folder, environment, port) as found:
        yield found


def asks_a_server(page: Path) -> bool:
    """Return True if blocks of a page need a server that another block starts."""
    return bool(served_by(page))


def served_by(page: Path) -> list[str]:
    """Return the blocks of a page that start servers; pages with equal blocks can share a server."""
    return [without_pip(block.text) for block in blocks_of(page) if block.serves]


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page with their output."""
    found: list[Block] = []
    is_wanted = False
    for block in blocks_of(page):
        if block.kind != "prints":
            is_wanted = block.kind == "run" and block.language == "python"
        if is_wanted:
            found.append(block)
    return found


@pytest.mark.long
def test_python_blocks_print_the_output_shown_on_the_page(runner: BlockRunner) -> None:
    blocks = [block for page in pages() if not asks_a_server(page) for block in python_blocks(page)]
    assert sum(block.kind == "prints" for block in blocks) > 5
    runner.run(blocks)


@pytest.mark.long
def test_server_blocks_print_the_output_shown_on_the_page(
    runner: BlockRunner, one_world_at_a_time: Callable[[], AbstractContextManager[None]]
) -> None:
    asking = sorted((page for page in pages() if asks_a_server(page)), key=served_by)
    blocks = [block for page in asking for block in blocks_to_run(page, "server")]
    assert sum(block.kind == "prints" for block in blocks) > 3
    with one_world_at_a_time():
        runner.run(blocks)


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["base", "server"])
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in pages()])
def test_every_code_block_on_the_page_prints_its_output(page: Path, environment: str, runner: BlockRunner) -> None:
    runner.run(blocks_to_run(page, environment))


def block(kind: str, language: str, text: str, *values: str) -> Block:
    """Return a code block that is not on any page."""
    return Block(REPOSITORY / "docs" / "page.md", 1, language, text, kind, values)


def test_code_block_with_different_output_fails(runner: BlockRunner) -> None:
    with pytest.raises(BlockError, match="but this was printed\n3"):
        runner.run([block("run", "python", "print(1 + 2)", "base"), block("prints", "text", "4\n")])
    with pytest.raises(BlockError, match="but this was printed\nb"):
        runner.run([block("run", "bash", "echo b", "base"), block("prints", "text", "a\n")])


def test_code_block_that_fails_or_prints_nothing_fails(runner: BlockRunner) -> None:
    with pytest.raises(BlockError, match="ended with status 3"):
        runner.run([block("run", "bash", "exit 3", "base")])
    with pytest.raises(BlockError, match="ZeroDivisionError"):
        runner.run([block("run", "python", "1 / 0", "base")])
    with pytest.raises(BlockError, match="no port"):
        runner.run([block("run", "bash", "echo no port >&2; exit 1", "server", "serves")])


def test_python_blocks_have_separate_namespaces_unless_marked_as_continued(runner: BlockRunner) -> None:
    first = block("run", "python", "a = 1", "base")
    runner.run([first, block("run", "python", "print(a)", "base", "continues"), block("prints", "text", "1\n")])
    with pytest.raises(BlockError, match="NameError"):
        runner.run([first, block("run", "python", "print(a)", "base")])


def test_files_of_a_page_exist_only_while_it_runs(runner: BlockRunner) -> None:
    runner.run(
        [block("file", "json", "{}\n", "x.json"), block("run", "bash", "test -f x.json && test -d docs", "base")]
    )
    assert not (REPOSITORY / "x.json").exists()
