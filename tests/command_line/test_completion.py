"""Scripts that complete commands and flags in a shell."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_mamba_cache.command_line.commands import SHELLS
from megatron_mamba_cache.command_line.main import main


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_has_each_command_and_its_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("generate", "serve", "chat", "plan", "doctor", "completion", "served-model-name", "trace", "config"):
        assert word in script, word


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("serve", "--served"), "--served-model-name"),
        (("plan", "--cached-state-dtype", "in"), "int8"),
        (("serve", "--config", "set"), "settings.yaml"),
        (("plan", "--trace", "set"), "settings.yaml"),
        (("generate", "--disk-cache-dir", "wei"), "weights"),
    ],
)
def test_bash_completes_flags_choices_and_paths(
    words: tuple[str, ...], completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    (tmp_path / "settings.yaml").touch()
    (tmp_path / "weights").mkdir()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = f"COMP_WORDS=(mamba-cache {' '.join(words)}); COMP_CWORD={len(words)}"
    complete = f"{script}\n{typed}\n_shtab_mamba_cache; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run([bash, "-c", complete], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.split() == [completed], done.stderr


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh5"]) == 2
    assert "invalid choice: 'tcsh5'" in capsys.readouterr().err
