"""Messages that the command hides, and those that it shows."""

import faulthandler
import logging
import signal
import sys
import warnings

import pytest

from megatron_mamba_cache.command_line.launch import Launch
from megatron_mamba_cache.command_line.processes import speaking_for_all
from megatron_mamba_cache.command_line.quiet import LEVELS, own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.kernels import progress
from megatron_mamba_cache.replicas.launch import _Quiet
from tests.command_line.command_runs import REPOSITORY, run_here, run_process


def test_progress_of_slow_phases_is_shown_even_if_warnings_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = logging.getLogger("megatron_mamba_cache.mcore.engine")
    with quiet_libraries():
        warnings.warning("seen")
        with own_warnings_hidden():
            warnings.warning("hidden")
            progress._LOG.warning("compiling ...")
            progress._LOG.info("detail")
        warnings.warning("seen again")
    assert capsys.readouterr().err.splitlines() == ["WARNING: seen", "WARNING: compiling ...", "WARNING: seen again"]
    assert progress._LOG.level == logging.NOTSET


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_log_level_filters_our_messages(level: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.getLogger("megatron_mamba_cache.mcore.engine")
    with quiet_libraries(level):
        for name in ("debug", "info", "warning", "error"):
            getattr(own, name)("%s", name)
    assert capsys.readouterr().err.splitlines() == [f"{name.upper()}: {name}" for name in shown]


@pytest.mark.parametrize("level", LEVELS)
def test_library_warnings_are_hidden_unless_debugging(level: str) -> None:
    others = [logging.getLogger(name) for name in ("megatron.core.ssm", "torch.distributed.checkpoint")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_libraries(level):
            warnings.warn("Apex is not installed", stacklevel=1)
            assert [logger.isEnabledFor(logging.WARNING) for logger in others] == [level == "debug"] * 2
            assert all(logger.isEnabledFor(logging.ERROR) for logger in others)
        assert len(caught) == (level == "debug")


def test_quiet_process_logs_only_errors(capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.getLogger("megatron_mamba_cache.mcore.engine")
    with quiet_libraries(), speaking_for_all(Launch(rank=1, num_processes=2)):
        own.warning("also seen by the first")
        own.error("broken")
    assert capsys.readouterr().err.splitlines() == ["ERROR: broken"]


def test_coordinator_process_applies_the_log_levels_of_its_parent() -> None:
    code = (
        "import warnings, logging, sys\n"
        "from megatron_mamba_cache.replicas.launch import _Quiet\n"
        "quiet = _Quiet(hides_warnings=True, levels=(40, 40, 40, 30))\n"
        "quiet.apply()\n"
        "import megatron_mamba_cache.replicas.serving_coordinator\n"
        "warnings.warn('hidden')\n"
        "logging.getLogger('megatron.core').warning('hidden')\n"
    )
    done = run_process("-c", code, cwd=REPOSITORY)
    assert (done.status, done.stderr) == (0, "")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with quiet_libraries():
            assert _Quiet.of_this_process() == _Quiet(True, (40, 40, 40, 30))
        with quiet_libraries("debug"):
            assert _Quiet.of_this_process() == _Quiet(False, (10, 10, 10, 10))


def test_signal_that_ends_a_command_prints_no_stack_trace(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:  # as megatron's import does
        faulthandler.register(number, file=sys.__stderr__, all_threads=False, chain=True)
    assert run_here(capsys, "--random-model", "--num-tokens-to-generate", 1).status == 0
    assert not any([faulthandler.unregister(number) for number in numbers])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
