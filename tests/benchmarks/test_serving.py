"""The serving benchmark sends turns as the load describes, and its results match their definitions."""

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pytest import approx
from torch.autograd.profiler_util import FunctionEvent

from tests.command_line.command_runs import REPOSITORY, run_process, run_script_here


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("loads.conversation_load")


@pytest.fixture
def serving(load: ModuleType) -> ModuleType:
    return import_module("serving")


@pytest.fixture
def open_loop(load: ModuleType) -> ModuleType:
    return import_module("loads.open_loop")


@pytest.fixture
def figures(load: ModuleType) -> ModuleType:
    return import_module("measuring.serving_figures")


@pytest.fixture
def skippable_tokens(load: ModuleType) -> Any:
    return import_module("loads.prefix_bound").skippable_tokens


@pytest.fixture
def tiny(load: ModuleType) -> Any:
    return import_module("loads.serving_engine").SHAPES["tiny"]


def some_conversations(load: ModuleType) -> list[Any]:
    """Return two conversations of several turns with the same prefix, and one that arrives between them."""
    prefix = tuple(range(130))
    return [
        load.Conversation(0.0, prefix, (load.Turn(0.0, (1, 2, 3), 70), load.Turn(0.05, (4,) * 20, 3))),
        load.Conversation(0.3, prefix, (load.Turn(0.0, (7, 8), 2), load.Turn(0.0, (9,), 1), load.Turn(0.1, (5,), 2))),
        load.Conversation(0.1, (), (load.Turn(0.0, (11,) * 40, 5),)),
    ]


def test_every_turn_arrives_on_time_with_the_real_history(serving: ModuleType, load: ModuleType, tiny: Any) -> None:
    sessions = some_conversations(load)
    served = serving.serve_all(tiny, sessions, [serving.Variant("full", 0)])["full, K = 0"]
    turns = served.load.turns
    assert [turn.arrival for turn in turns] == sorted(turn.arrival for turn in turns)
    assert sorted((turn.conversation, turn.turn) for turn in turns) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    by_turn = {(turn.conversation, turn.turn): turn for turn in turns}
    for (index, number), turn in by_turn.items():
        planned = sessions[index].turns[number]
        before = by_turn.get((index, number - 1))
        if before is None:
            assert turn.arrival == sessions[index].arrival_s
            assert turn.prompt == [*sessions[index].prefix, *planned.new_tokens]
        else:
            assert turn.arrival == before.token_moments[-1] + planned.think_s
            assert turn.prompt == [*before.prompt, *before.reply, *planned.new_tokens]
        assert len(turn.reply) == len(turn.token_moments) == planned.num_reply
        assert turn.arrival <= turn.admitted < turn.token_moments[0]
        assert turn.token_moments == sorted(turn.token_moments)


def test_no_mode_skips_more_tokens_than_an_ideal_cache(serving: ModuleType, load: ModuleType, tiny: Any) -> None:
    variants = [serving.Variant(mode, drafts) for mode in serving.MODES for drafts in (0, 3)]
    found = {name: each.figures for name, each in serving.serve_all(tiny, some_conversations(load), variants).items()}
    assert len(found) == 6 and all(each.num_ended == 6 and each.num_unsent == 0 for each in found.values())
    # Conversation 0 has 203 tokens before its second turn. Blocks of 64 cache 128 of them, or 192 with the reply.
    for drafts in (0, 3):
        assert found[f"no cache, K = {drafts}"].cached_tokens == 0
        assert found[f"prompt boundaries, K = {drafts}"].cached_tokens == 4 * 128
        assert found[f"full, K = {drafts}"].cached_tokens == 3 * 128 + 192
    assert {each.skippable_tokens for each in found.values()} == {3 * 128 + 192}
    assert all(each.peak_state_gib > 0 and each.step_s > 0 for each in found.values())


def test_workload_ends_after_its_time_limit(serving: ModuleType, load: ModuleType, tiny: Any) -> None:
    late = load.Conversation(60.0, (), (load.Turn(0.0, (1, 2), 3),))
    endless = load.Conversation(0.0, (), (load.Turn(0.0, (1,) * 30, 4000), load.Turn(0.0, (1,), 1)))
    found = serving.serve(serving.model_of(tiny), tiny, [endless, late], serving.Variant("full", 0), 1.0)
    assert found.figures.num_requests == 1 and found.figures.num_ended == 0 and found.figures.num_unsent == 2
    assert 1.0 <= found.load.seconds < 5.0
    assert found.figures.generated_per_s > 0 and found.figures.per_token is None


def test_turns_beyond_the_maximum_request_length_are_left_out(open_loop: ModuleType, load: ModuleType) -> None:
    turns = tuple(load.Turn(0.0, (1,) * 10, 5) for _ in range(3))
    conversation = load.Conversation(1.0, (0,) * 20, turns)
    for max_length, num_turns in ((65, 3), (64, 2), (50, 2), (49, 1), (35, 1)):
        assert open_loop.fitting([conversation], max_length) == [replace(conversation, turns=turns[:num_turns])]
    assert open_loop.fitting([conversation], 34) == []


def test_time_with_a_stopped_clock_does_not_count(open_loop: ModuleType) -> None:
    clock = open_loop.LoadClock()
    with clock.stopped():
        open_loop.time.sleep(0.2)
    assert clock.now() < 0.1
    clock.sleep_until(0.15)
    assert clock.now() >= 0.15


def turn_of(open_loop: ModuleType, prompt: list[int], reply: list[int], admitted: float | None, **more: Any) -> Any:
    """Return a turn that generates one token per second after its admission."""
    moments = [] if admitted is None else [admitted + 1 + index for index in range(len(reply))]
    return open_loop.ServedTurn(0, 0, 0.0, prompt, admitted=admitted, reply=reply, token_moments=moments, **more)


@pytest.mark.parametrize(
    ("prompt", "admitted", "in_fours", "in_twos"),
    [
        ([1, 2, 3, 4, 5], 0.0, 0, 0),  # in the same step
        ([1, 2, 3, 4, 5], 0.5, 4, 4),
        ([1, 2, 3, 4], 0.5, 0, 2),  # the last prompt token needs prefill
        ([1, 2, 3, 9, 9], 0.5, 0, 2),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 12], 3.5, 4, 6),  # token 8 was generated but not processed yet
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 12], 4.5, 8, 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 9.0, 8, 10),  # the newest token is never processed
        ([1, 2, 3, 4, 5], None, 0, 0),
    ],
)
def test_upper_bound_for_skipped_tokens_is_the_longest_known_prefix(
    open_loop: ModuleType,
    skippable_tokens: Any,
    prompt: list[int],
    admitted: float | None,
    in_fours: int,
    in_twos: int,
) -> None:
    known = turn_of(open_loop, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], 0.0)  # tokens arrive at 1.0, 2.0, ..., 6.0
    asking = turn_of(open_loop, prompt, [0], admitted)
    assert skippable_tokens([known, asking], 4) == [0, in_fours]  # a request cannot hit its own blocks
    assert skippable_tokens([known, asking], 2) == [0, in_twos]


def test_reply_tokens_count_as_known_once_they_are_generated(open_loop: ModuleType, skippable_tokens: Any) -> None:
    first = turn_of(open_loop, [1], [2, 3, 4, 5, 6], 0.0)
    text = [1, 2, 3, 4, 5, 6, 7]
    found = [skippable_tokens([first, turn_of(open_loop, text, [0], moment)], 1)[1] for moment in (0.5, 1.5, 2.5, 9.0)]
    assert found == [1, 1, 2, 5]


def test_percentiles_are_measured_values(figures: ModuleType) -> None:
    assert figures.percentiles([3.0]) == figures.Percentiles(3.0, 3.0, 3.0)
    assert figures.percentiles(range(100, 0, -1)) == figures.Percentiles(50, 95, 99)
    assert figures.percentiles([1, 2, 3, 4]) == figures.Percentiles(2, 4, 4)
    assert figures.percentiles([]) is None


def test_summary_statistics_match_their_definitions(figures: ModuleType, open_loop: ModuleType) -> None:
    turns = [
        open_loop.ServedTurn(0, 0, 0.0, [1] * 8, 0.5, [1.0, 1.5, 2.0], [1, 1, 1], 0),
        open_loop.ServedTurn(0, 1, 3.0, [1] * 12, 3.0, [3.25], [1], 4),
        open_loop.ServedTurn(1, 0, 4.0, [2] * 10, 6.0, [7.0, 8.0], [], 8),  # still runs at the end
        open_loop.ServedTurn(2, 1, 9.0, [3] * 10),  # still waits
    ]
    gpu = open_loop.GpuTime(num_steps=4, wall_s=2.0, busy_s=1.5, waiting_s=1.0)
    load = open_loop.ServedLoad(turns, 5, 10.0, num_steps=8, step_s=4.0, peak_slots=3, gpu=gpu)
    found = figures.figures_of(load, block_size=4, slot_bytes=2**29)
    assert (found.num_requests, found.num_ended, found.num_unsent) == (4, 2, 5)
    assert found.first_token == figures.Percentiles(1.0, 3.0, 3.0)  # of 1.0, 0.25, 3.0, and 1.0 of a waiting request
    assert found.first_token_later == figures.Percentiles(0.25, 1.0, 1.0)
    assert found.wait == figures.Percentiles(0.5, 2.0, 2.0)
    assert found.per_token == figures.Percentiles(0.5, 0.5, 0.5)
    assert (found.generated_per_s, found.tokens_per_s) == (0.6, 3.6)
    assert (found.prompt_tokens, found.cached_tokens, found.skippable_tokens) == (20, 4, 8)
    assert (found.hit_rate, found.best_hit_rate) == (0.2, 0.4)
    assert found.peak_state_gib == 1.5 and found.step_s == 0.5
    assert found.host_s == 0.25 and found.gpu_idle_share == approx(0.25)


def test_overlapping_kernels_count_once(load: ModuleType) -> None:
    covered = import_module("measuring.gpu_time").covered
    assert covered([]) == 0
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9), (9, 10)]) == 8


def test_gpu_time_counts_kernels_and_copies_and_host_time_excludes_waits(load: ModuleType) -> None:
    gpu_time = import_module("measuring.gpu_time")
    on_gpu = {"device_type": gpu_time.DeviceType.CUDA}
    events = [
        FunctionEvent(0, "state_verify", 0, 100, 300, **on_gpu),
        FunctionEvent(1, "Memcpy DtoH", 0, 250, 400, **on_gpu),
        FunctionEvent(2, "a range of the user's", 0, 0, 9000, is_user_annotation=True, **on_gpu),
        FunctionEvent(3, "cudaLaunchKernel", 0, 90, 95),
        FunctionEvent(4, "cudaMemcpyAsync", 0, 100, 350),
        FunctionEvent(5, "cudaStreamSynchronize", 0, 350, 400),
    ]
    assert gpu_time.busy_s(events) == approx(300e-6)
    assert gpu_time.waiting_s(events) == approx(300e-6)


def test_profiled_events_are_classified(load: ModuleType) -> None:
    gpu_time = import_module("measuring.gpu_time")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(8) @ torch.ones(8)
    kinds = [event.device_type == gpu_time.DeviceType.CPU for event in profile.events()]
    assert kinds and all(kinds)  # DeviceType values of events are equal to, but not identical with, the enum's


@pytest.mark.long
def test_script_prints_a_table_and_writes_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script, file = REPOSITORY / "benchmarks" / "serving.py", tmp_path / "figures.json"
    flags = ["--shape", "tiny", "--sessions", 4, "--tokens-scale", 0.05, "--time-scale", 0.001, "--json", file]
    finished = run_process(script, *flags, "--modes", "full", "--drafts", 0, cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    assert finished.stdout.startswith("| | full, K = 0 |\n|---|---:|\n| requests | ")
    assert "GPU" not in finished.stdout
    document = json.loads(file.read_text())
    assert document["machine"].startswith("Machine: ")
    figures = document["engines"]["full, K = 0"]
    assert len(figures["requests"]) == figures["num_ended"] >= 4
    assert all(len(request["token_moments"]) >= 1 for request in figures["requests"])


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_plots_without_matplotlib_are_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--shape", "tiny", "--plots", tmp_path / "plots"]
    finished = run_script_here(capsys, REPOSITORY / "benchmarks" / "serving.py", *flags)
    assert finished.status == 2 and "pip install matplotlib" in finished.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "x.jsonl", "--rate", "2"], "a file says how fast"),
        (["--trace", "x.jsonl"], "x.jsonl"),
        (["--rate", "0"], "must be more than 0, found 0"),
    ],
)
def test_invalid_flag_exits_with_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run_script_here(capsys, REPOSITORY / "benchmarks" / "serving.py", "--shape", "tiny", *flags)
    assert finished.status == 2 and message in finished.stderr.splitlines()[-1]


def test_plots_are_written_with_matplotlib(serving: ModuleType, load: ModuleType, tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    served = serving.serve_all(tiny, some_conversations(load)[2:], [serving.Variant("full", 0)])
    plots = import_module("measuring.serving_plots")
    files = plots.write_plots(tmp_path, {"full": [0.1, 0.2]}, {"full": served["full, K = 0"].figures})
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files) and len(files) == 2
