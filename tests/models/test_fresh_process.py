"""Errors of a process that has not built a Megatron model."""

import subprocess
import sys

from tests.command_line.command_runs import REPOSITORY

CODE = """
import torch
from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models import DraftModelDrafter

for call in (build_engine, DraftModelDrafter):
    try:
        call(torch.nn.Linear(2, 2))
    except TypeError as error:
        print(error)
"""


def test_invalid_model_is_refused_before_process_groups_exist() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.count("model must be a MambaModel, found Linear(") == 2
