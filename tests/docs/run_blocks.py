"""Run the code blocks of the documentation as written, in the environment of the Python that runs this.

    python -m tests.docs.run_blocks --environment base|server|test [--page README.md ...]
        [--as-written | --pip-lines | --first]

Imports the standard library only. Every page runs in its own copy of the repository's layout, so that files written by
blocks leave no trace, and without its `pip install` lines: `--pip-lines` prints them and runs nothing. `--as-written`
runs them too, and everything in the repository itself.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .blocks import ENVIRONMENTS, REPOSITORY, Block, blocks_of, matches, pages, pip_lines, without_pip
from .processes import BlockError, PythonWorker, ServerProcess

_USUAL_PORT = 5000
_TIMEOUT_S = 3600


def blocks_to_run(page: Path, environment: str) -> list[Block]:
    """Return a page's blocks of one environment, with the files that they read and the output that they promise."""
    taken: list[Block] = []
    wanted = False
    for block in blocks_of(page):
        if block.kind != "prints":
            wanted = block.kind == "run" and block.values[0] == environment
        if wanted or block.kind == "file":
            taken.append(block)
    return taken if any(block.kind == "run" for block in taken) else []


@contextmanager
def folder_like_repository() -> Iterator[Path]:
    """Create a folder with links to the repository's files, and return it."""
    with tempfile.TemporaryDirectory() as name:
        for entry in REPOSITORY.iterdir():
            if entry.name != ".git":
                (Path(name) / entry.name).symlink_to(entry)
        yield Path(name)


class BlockRunner:
    """Runs blocks in a folder; as a context, it ends the processes that blocks have left.

    Args:
        environment: Variables of the processes.
        port: Port that servers and clients use instead of the default port.
        installs: If True, run `pip install` lines too.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], port: int = _USUAL_PORT, *, installs: bool = False
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._port = port
        self._installs = installs
        self._server: ServerProcess | None = None
        self._python: PythonWorker | None = None

    def __enter__(self) -> "BlockRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.stop()
        self._stop_server()

    def run(self, blocks: Sequence[Block]) -> None:
        """Run blocks in order.

        Raises:
            BlockError: At the first that fails, or prints something else than the page says.
        """
        printed = ""
        for block in blocks:
            match block.kind:
                case "file":
                    (self._folder / block.values[0]).write_text(block.text, encoding="utf-8")
                case "prints":
                    check_printed(block, printed.replace(f":{self._port}", f":{_USUAL_PORT}"))
                case _:
                    printed = self._printed_by(block)

    def _printed_by(self, block: Block) -> str:
        text = self._text(block)
        if block.language == "python":
            self._python = self._python or PythonWorker(self._folder, self._environment)
            return self._python.run(block, text)
        if not block.serves:
            return self._shell(block, text)
        if self._server is None or self._server.text != text:
            self._stop_server()
            server = ServerProcess(block, text, self._folder, self._environment)
            server.wait_until_it_serves()
            self._server = server
        return self._server.printed()

    def _stop_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.stop()

    def _shell(self, block: Block, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=REPOSITORY if block.values[0] == "test" else self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise BlockError(f"{block} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def _text(self, block: Block) -> str:
        text = without_pip(block.text) if block.language == "bash" and not self._installs else block.text
        if self._port == _USUAL_PORT:
            return text
        text = text.replace(f":{_USUAL_PORT}", f":{self._port}")
        return text.replace("mamba-cache serve", f"mamba-cache serve --port {self._port}")


def check_printed(block: Block, printed: str) -> None:
    """Raise `BlockError` if `printed` differs from the text of a block of kind "prints"."""
    if not matches(block.text, printed, times_vary="times vary" in block.values):
        raise BlockError(f"{block}: the page says\n{block.text}\nbut this was printed\n{printed}")


def main() -> int:
    """Run the blocks that the flags select, and return the exit status."""
    parser = argparse.ArgumentParser(description="Run the code blocks of the documentation as written.")
    parser.add_argument("--environment", choices=ENVIRONMENTS, required=True)
    parser.add_argument("--page", nargs="+", type=Path, help="default: the README and all pages of docs/")
    parser.add_argument("--as-written", action="store_true", help="run pip install lines too, in the repository itself")
    parser.add_argument("--pip-lines", action="store_true", help="print the pip install lines and run nothing")
    parser.add_argument("--first", action="store_true", help="print the first block as written and run nothing")
    arguments = parser.parse_args()
    chosen = [page.resolve() for page in arguments.page] if arguments.page else pages()
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for page in chosen:
        blocks = blocks_to_run(page, arguments.environment)
        if arguments.first and blocks:
            print(blocks[0].text)
            return 0
        if arguments.pip_lines:
            for block in blocks:
                for line in pip_lines(block.text) if block.language == "bash" else ():
                    print(line)
            continue
        if not blocks:
            continue
        began = time.monotonic()
        try:
            chosen_folder = nullcontext(REPOSITORY) if arguments.as_written else folder_like_repository()
            with chosen_folder as folder, BlockRunner(folder, environment, installs=arguments.as_written) as runner:
                runner.run(blocks)
        except BlockError as error:
            print(error, file=sys.stderr)
            return 1
        count = sum(block.kind == "run" for block in blocks)
        print(f"{page.relative_to(REPOSITORY)}: {count} blocks in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
