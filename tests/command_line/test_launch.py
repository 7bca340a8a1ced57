"""Processes of a launch: parallel sizes must fit their number, and each prompt line goes to one replica."""

from argparse import Namespace

import pytest

from megatron_mamba_cache.command_line import main as main_module
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.launch import Launch, deal_lines
from megatron_mamba_cache.command_line.prompts import PromptLine


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Namespace:
    return Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )


def test_launch_without_torchrun_has_one_process() -> None:
    assert Launch.of_environment({}) == Launch(0, 1, 0)
    assert Launch().is_first


def test_torchrun_sets_the_process_index() -> None:
    assert Launch.of_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Launch(5, 8, 1)
    with pytest.raises(UsageError, match="RANK=x"):
        Launch.of_environment({"RANK": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("found", "num_replicas"), [(sizes(), 8), (sizes(2), 4), (sizes(2, 2), 2), (sizes(expert=4), 8), (sizes(4, 2), 1)]
)
def test_replica_count_is_processes_divided_by_model_size(found: Namespace, num_replicas: int) -> None:
    assert Launch(0, 8).num_replicas(found) == num_replicas


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (sizes(3), "needs a number of processes divisible by 3, found 8"),
        (sizes(4, 4), "torchrun --nproc-per-node 16"),
        (sizes(2, 2, 4), "times --expert-model-parallel-size 4 needs a number of processes divisible by 16"),
        (sizes(pipeline=0), "--pipeline-model-parallel-size is 0; it must be at least 1"),
    ],
)
def test_parallel_sizes_that_do_not_divide_the_processes_are_refused(found: Namespace, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Launch(0, 8).num_replicas(found)


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_only_the_first_process_reports_an_error(
    rank: str, num_lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    assert main_module.main(["generate", "--tensor-model-parallel-size", "3"]) == main_module.EXIT_USAGE
    assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_sessions_stay_on_one_replica_and_run_in_order() -> None:
    sessions = ["a", None, "b", "a", None, "c", "b", "a", 1, 1]
    lines = [PromptLine(number, "x", session=session) for number, session in enumerate(sessions)]
    shares = deal_lines(lines, 3)
    assert sorted(line.request_id for share in shares for line in share) == list(range(len(lines)))
    assert all([line.request_id for line in share] == sorted(line.request_id for line in share) for share in shares)
    assert [[line.request_id for line in share] for share in shares] == [[0, 3, 4, 7], [1, 5], [2, 6, 8, 9]]
    assert deal_lines(lines, 1) == [lines]
