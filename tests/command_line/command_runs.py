"""Runs of the command line in this process or in a subprocess."""

import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from unittest.mock import patch

import pytest

# Imported before a test captures stderr: megatron's first import needs the real one, for its faulthandler.
import megatron_mamba_cache.mcore.engine  # noqa: F401
from megatron_mamba_cache.command_line.main import main

REPOSITORY = Path(__file__).parents[2]

needs_installation = pytest.mark.skipif(
    not any(distributions(name="megatron-mamba-cache")), reason="this package is imported, not installed"
)


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a command."""

    status: int
    stdout: str
    stderr: str


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """Run `generate` with the arguments in this process, on the device that it has.

    `--device cpu` is for `run_process`: a process that uses a GPU cannot leave it, and one that hides it loses it.
    """
    capsys.readouterr()
    status = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return Finished(status, captured.out, captured.err)


def run_script_here(capsys: pytest.CaptureFixture[str], script: Path, *arguments: object) -> Finished:
    """Run a script in this process, in which torch and megatron are already imported."""
    capsys.readouterr()
    status = 0
    with patch.object(sys, "argv", [str(script), *map(str, arguments)]), patch.object(sys, "path", sys.path.copy()):
        sys.path.insert(0, str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
    captured = capsys.readouterr()
    return Finished(status, captured.out, captured.err)


def run_process(*arguments: object, cwd: Path, import_first: Path | None = None) -> Finished:
    """Run Python with the arguments and the repository importable.

    Args:
        import_first: Folder of packages that are imported instead of the installed ones.
    """
    folders = [str(folder) for folder in (import_first, REPOSITORY) if folder is not None]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        # One thread: several would wait for each other on a machine that runs other tests too.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)
