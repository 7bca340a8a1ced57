"""Scripts that complete commands and flags in a shell."""

import shutil
import subprocess

import pytest

from megatron_mamba_cache.command_line.completion import SHELLS
from megatron_mamba_cache.command_line.main import main


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_has_each_command_and_its_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("generate", "serve", "chat", "plan", "doctor", "completion", "served-model-name", "trace", "config"):
        assert word in script, word


def test_the_script_of_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    complete = "\n".join(
        [
            script,
            "COMP_WORDS=(mamba-cache serve --served); COMP_CWORD=2; COMP_LINE='mamba-cache serve --served'",
            "_shtab_mamba_cache; printf '%s\\n' \"${COMPREPLY[@]}\"",
        ]
    )
    done = subprocess.run([bash, "-c", complete], capture_output=True, text=True, timeout=30, check=False)
    assert "--served-model-name" in done.stdout, done.stderr


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh5"]) == 2
    assert "invalid choice: 'tcsh5'" in capsys.readouterr().err
