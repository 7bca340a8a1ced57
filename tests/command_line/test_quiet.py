"""What the command keeps off the terminal, and what it leaves there."""

import logging

import pytest

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.kernels import progress


def test_what_takes_long_is_said_where_warnings_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
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
