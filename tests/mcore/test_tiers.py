"""Engines whose prefixes are offloaded to host and disk and restored: tokens match the oracle."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.errors import CacheError
from megatron_mamba_cache.mcore.mixers.mamba2 import CachingMambaMixer
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from megatron_mamba_cache.policy.tiers import disk_moves
from megatron_mamba_cache.policy.tiers.copies import Lane
from megatron_mamba_cache.tiers import cache_directory, entry_files
from tests.mcore.engine_runs import (
    EngineRun,
    Hybrid,
    allow_every_cached_form,
    cache_config,
    some_tokens,
    tiny_hybrid,
    with_host_tier,
    with_one_budget,
)
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.random_workloads import GATED_DELTA_MODELS, QUANTIZATION_MARGIN
from tests.mcore.tier_conversations import BLOCK, NUM_TEXTS, PROMPT_LEN, Conversations, on_disk, small_device
from tests.recurrences.toy import on_cpu


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Hybrid:
    """Return a tiny model with some of its sizes changed."""
    return tiny_hybrid(**request.param)


REPOSITORY = Path(__file__).parents[2]


subjects = pytest.mark.parametrize(
    "subject",
    [
        pytest.param({}, id="mamba2"),
        pytest.param({"is_toy": True}, id="toy", marks=on_cpu),
        pytest.param(GATED_DELTA_MODELS[0], id="gated-delta"),
    ],
    indirect=True,
)


def resolve(run: EngineRun) -> None:
    """Wait for all copies, and assert that nothing is held."""
    run.assert_exact()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_restore_starts_for_a_request_waiting_at_the_request_limit(
    run_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap while it waits, and its prefix is restored when the running request ends."""
    capture_without_cuda(monkeypatch)
    subject = tiny_hybrid()
    config = with_one_budget(cache_config(subject.sizes, max_sequence_length=256, max_requests=1), subject.shape, 12)
    graphs = {"num_cuda_graphs": 3, "cuda_graph_prefill_tokens": 40, "run_ahead": run_ahead}
    run = EngineRun.start(subject, replace(with_host_tier(config, subject.shape, 120), **graphs))
    texts = [some_tokens(PROMPT_LEN, seed=seed) for seed in range(20)]
    for number, text in enumerate(texts):
        run.run(number, text, 10)
        run.end_copies()
    run.add(100, some_tokens(30, seed=77), 40)
    for _ in range(6):
        run.step()
    run.add(101, [*texts[0], *some_tokens(5, seed=3)], 5)
    num_early, tiers = 0, run.context.runner.memory.below.tiers
    began = None
    for number in range(8):
        run.step()
        num_early += run.context.overlapped_step is not None
        began = number if began is None and tiers.takes_room else began
    print(num_early, "steps overlapped; the copy began in step", began)
    assert 100 in run.engine.requests and (num_early >= 5 if run_ahead else not num_early)
    assert began is not None and began < 3
    run.end_copies()
    run.finish()
    assert run.counters.prompt_tokens_from_host >= 96
    run.assert_exact()


@subjects
def test_later_conversation_turns_are_restored_from_host_memory(subject: Hybrid) -> None:
    run, talks = EngineRun.start(subject, small_device(subject)), Conversations()
    assert talks.turn(run) == [0] * NUM_TEXTS
    for _ in range(2):
        resolve(run)
        wanted = talks.most
        assert talks.turn(run) == wanted
    run.assert_exact()
    counters = run.counters
    assert counters.prompt_tokens_from_host > counters.prompt_tokens_skipped / 2
    assert counters.states_restored_from_host >= 2 * (NUM_TEXTS - 1)
    assert counters.host_restores_failed == 0


def test_most_conversations_are_recomputed_without_a_host_tier() -> None:
    config = replace(small_device(tiny_hybrid()), host_cache_gb=None)
    run, talks = EngineRun.start(tiny_hybrid(), config), Conversations()
    talks.turn(run)
    assert sum(talks.turn(run)) < NUM_TEXTS * PROMPT_LEN / 2


def test_tenants_do_not_share_offloaded_prefixes() -> None:
    run, talks = EngineRun.start(tiny_hybrid(), small_device(tiny_hybrid())), Conversations()
    talks.turn(run, tenant="one")
    resolve(run)
    again = Conversations()
    assert again.turn(run, tenant="two") == [0] * NUM_TEXTS
    resolve(run)
    assert Conversations().turn(run, tenant="one") == [96] * NUM_TEXTS


@subjects
def test_resumed_engine_restores_prefixes_from_before_the_suspend(subject: Hybrid) -> None:
    run, talks = EngineRun.start(subject, small_device(subject)), Conversations()
    talks.turn(run)
    run.engine.suspend()
    run.engine.resume()
    wanted = talks.most
    assert talks.turn(run) == wanted
    run.assert_exact()


@pytest.mark.parametrize("is_suspended", [False, True])
def test_flush_empties_the_host_tier(is_suspended: bool) -> None:
    run, talks = EngineRun.start(tiny_hybrid(), small_device(tiny_hybrid())), Conversations()
    talks.turn(run)
    if is_suspended:
        run.engine.suspend()
    run.engine.flush()
    run.engine.resume()
    assert talks.turn(run) == [0] * NUM_TEXTS
    run.assert_exact()


def test_cancelled_request_releases_the_blocks_being_restored() -> None:
    run, talks = EngineRun.start(tiny_hybrid(), small_device(tiny_hybrid())), Conversations()
    talks.turn(run)
    resolve(run)
    for number, text in enumerate(talks.texts[:3]):
        run.add(100 + number, text, 10)
    run.step()
    for number in range(3):
        run.engine.cancel_request(100 + number)
    assert not run.engine.requests
    run.assert_nothing_held()
    assert not run.context.cache.tiers.takes_room


@subjects
def test_restarted_engine_restores_prefixes_from_disk(tmp_path: Path, subject: Hybrid) -> None:
    config = on_disk(small_device(subject), tmp_path)
    run, talks = EngineRun.start(subject, config), Conversations()
    talks.turn(run)
    resolve(run)
    num_files = len(list(tmp_path.rglob("*.boundary")))
    print(f"{num_files} files: the last boundary of each of {NUM_TEXTS} texts, and those inside them that were evicted")
    assert run.counters.states_written_to_disk == num_files and NUM_TEXTS < num_files <= 2 * NUM_TEXTS
    run.engine.close()
    run = EngineRun.start(subject, config)
    wanted = talks.most
    assert talks.turn(run) == wanted
    assert run.counters.prompt_tokens_from_disk == sum(wanted)
    run.assert_exact()


@pytest.mark.parametrize("is_repeated", [False, True])
def test_states_at_prompt_ends_are_written_to_disk(is_repeated: bool, tmp_path: Path) -> None:
    limits = {"max_sequence_length": 256, "max_requests": 2}
    roomy = with_one_budget(cache_config(tiny_hybrid().sizes, **limits), tiny_hybrid().shape, 40)
    config = on_disk(with_host_tier(roomy, tiny_hybrid().shape, 200), tmp_path)
    prompts = [some_tokens(PROMPT_LEN, seed=number) for number in range(20)]
    run = EngineRun.start(tiny_hybrid(), config)
    for number, prompt in enumerate(prompts):
        for again in range(1 + is_repeated):
            run.run(2 * number + again, prompt, 20)  # the reply ends after another boundary
    resolve(run)
    run.engine.close()
    run = EngineRun.start(tiny_hybrid(), config)
    skipped = []
    for number, prompt in enumerate(prompts):
        run.run(number, prompt, 2)
        skipped.append(run.engine.cached_tokens(number))
    print(skipped)
    assert skipped == [96] * len(prompts) if is_repeated else skipped[0] == 96 and skipped.count(96) < 8
    run.assert_exact()


def test_flushed_disk_entries_are_not_restored_by_the_next_engine(tmp_path: Path) -> None:
    config = on_disk(small_device(tiny_hybrid()), tmp_path)
    run, talks = EngineRun.start(tiny_hybrid(), config), Conversations()
    talks.turn(run)
    resolve(run)
    run.engine.flush()
    run = EngineRun.start(tiny_hybrid(), config)  # the first was not even closed
    assert talks.turn(run) == [0] * NUM_TEXTS
    resolve(run)
    run = EngineRun.start(tiny_hybrid(), config)
    wanted = talks.most
    assert talks.turn(run) == wanted
    run.assert_exact()


def test_flush_for_new_weights_invalidates_disk_entries_of_old_weights(tmp_path: Path) -> None:
    subject = tiny_hybrid()
    model = random_hybrid_model(subject.sizes)
    config = on_disk(small_device(subject), tmp_path)
    run, talks = EngineRun.start(replace(subject, model=model), config), Conversations()
    talks.turn(run)
    resolve(run)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    run.engine.flush("new")
    run = EngineRun.start(subject, config)
    assert talks.turn(run) == [0] * NUM_TEXTS
    run.assert_exact()


def test_failed_disk_flush_empties_memory_and_keeps_the_disk_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    run, talks = EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), tmp_path)), Conversations()
    talks.turn(run)
    resolve(run)
    with monkeypatch.context() as patch:
        patch.setattr(cache_directory.os, "replace", full)
        with pytest.raises(CacheError, match=r"cannot use --disk-cache-dir .*no space left"):
            run.engine.flush()
    files = sorted(tmp_path.rglob("*.boundary"))
    assert talks.turn(run) == [0] * NUM_TEXTS
    run.engine.flush()
    resolve(run)
    assert sorted(tmp_path.rglob("*.boundary")) == files
    run.assert_exact()


def test_deleted_engine_leaves_no_thread_without_close() -> None:
    def num_lanes() -> int:
        gc.collect()
        return sum(thread.name in {lane.value for lane in Lane} for thread in threading.enumerate())

    before = num_lanes()
    run = EngineRun.start(tiny_hybrid(), small_device(tiny_hybrid()))
    assert num_lanes() == before + 2
    del run
    assert num_lanes() == before


def test_different_weights_of_the_same_version_share_no_disk_entries(tmp_path: Path) -> None:
    subject = tiny_hybrid()
    config = on_disk(small_device(subject), tmp_path)
    run, talks = EngineRun.start(subject, config), Conversations()
    talks.turn(run)
    resolve(run)
    other = random_hybrid_model(replace(subject.sizes, seed=subject.sizes.seed + 1))
    run = EngineRun.start(replace(subject, model=other), config)
    assert talks.turn(run) == [0] * NUM_TEXTS


def test_engine_with_other_settings_restores_no_disk_entries(tmp_path: Path) -> None:
    subject = tiny_hybrid()
    config = on_disk(small_device(subject), tmp_path)
    run, talks = EngineRun.start(subject, config), Conversations()
    talks.turn(run)
    resolve(run)
    model = random_hybrid_model(subject.sizes)
    for mixer in model.modules():
        if isinstance(mixer, CachingMambaMixer):
            mixer.time_step_limit = (0.5, float("inf"))
    run = EngineRun.start(replace(subject, model=model), config)
    assert talks.turn(run) == [0] * NUM_TEXTS


def test_prefix_is_stored_again_after_its_file_was_corrupt(tmp_path: Path) -> None:
    """Nothing is written after an unreadable entry."""
    config = on_disk(small_device(tiny_hybrid()), tmp_path)
    run, talks = EngineRun.start(tiny_hybrid(), config), Conversations()
    talks.turn(run)
    resolve(run)
    for path in tmp_path.rglob("*.boundary"):
        path.write_bytes(path.read_bytes()[:-9] + bytes(1) + path.read_bytes()[-8:])
    for _ in range(3):  # a text has two files, which are found to be bad one after the other
        run.engine.close()
        run, wanted = EngineRun.start(tiny_hybrid(), config), talks.most
        found = talks.turn(run)
        print(found, run.counters.disk_reads_failed)
        resolve(run)
    assert found == wanted and run.counters.disk_reads_failed == 0
    run.assert_exact()


def test_every_state_reaches_the_disk_although_only_one_write_runs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_moves, "MOST_STORES", 1)
    run = EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), tmp_path))
    Conversations().turn(run)
    resolve(run)
    counters = run.counters
    assert counters.states_written_to_disk == counters.states_written_to_host > NUM_TEXTS / 2
    assert len(list(tmp_path.rglob("*.boundary"))) == counters.states_written_to_disk


def test_idle_engine_completes_disk_copies_of_finished_requests(tmp_path: Path) -> None:
    run = EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), tmp_path))
    run.run(0, some_tokens(PROMPT_LEN, seed=0), 10)
    assert run.engine.has_idle_copies
    until = time.monotonic() + 20
    while run.engine.has_idle_copies and time.monotonic() < until:
        run.engine.land_idle_copies()
        time.sleep(0.005)
    assert run.counters.states_written_to_disk == run.counters.states_written_to_host > 0
    run.assert_exact()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: path.write_bytes((old := path.read_bytes())[:-9] + bytes([old[-9] ^ 1]) + old[-8:]),
        lambda path: path.unlink(),
    ],
)
def test_corrupt_disk_file_is_a_cache_miss_and_is_removed(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    config = on_disk(small_device(tiny_hybrid()), tmp_path)
    run, talks = EngineRun.start(tiny_hybrid(), config), Conversations()
    talks.turn(run)
    resolve(run)
    run = EngineRun.start(tiny_hybrid(), config)
    spoilt = sorted(tmp_path.rglob("*.boundary"))
    for path in spoilt:
        spoil(path)
    contents = {path: path.read_bytes() for path in spoilt if path.exists()}
    assert talks.turn(run) == [0] * NUM_TEXTS
    resolve(run)
    assert run.counters.disk_reads_failed == NUM_TEXTS
    last = [path for path in spoilt if path.name.split("-")[2] == str(PROMPT_LEN // BLOCK)]
    print(f"{len(last)} of {len(spoilt)} end a text, and are read first")
    assert len(last) == NUM_TEXTS
    assert not any(path.exists() and path.read_bytes() == contents[path] for path in last)
    run.assert_exact()


def test_full_disk_makes_no_request_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    config = on_disk(small_device(tiny_hybrid()), tmp_path)
    run, talks = EngineRun.start(tiny_hybrid(), config), Conversations()
    monkeypatch.setattr(entry_files, "_write_all", full)
    talks.turn(run)
    resolve(run)
    assert run.counters.disk_writes_failed == run.counters.states_written_to_host
    assert not list(tmp_path.rglob("*.boundary"))
    wanted = talks.most
    assert talks.turn(run) == wanted
    run.assert_exact()


@subjects
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantized_states_are_restored_exactly_from_host_and_disk(
    tmp_path: Path, subject: Hybrid, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_every_cached_form(monkeypatch)
    config = on_disk(small_device(subject, cached_state_dtype=dtype), tmp_path)
    run, talks = EngineRun.start(subject, config), Conversations()
    talks.turn(run)
    wanted = talks.most
    run.assert_nothing_held()
    assert talks.turn(run) == wanted
    run.assert_nothing_held()
    assert run.counters.prompt_tokens_from_host > run.counters.prompt_tokens_skipped / 2
    form = run.context._below._disk.directory.form
    assert form.state_bytes == run.context.shape.cached_layout(run.context.cache_config).aligned_bytes
    run.engine.close()
    run = EngineRun.start(subject, config)
    wanted = talks.most
    assert talks.turn(run) == wanted
    assert run.counters.prompt_tokens_from_disk == sum(wanted)
    run.assert_near_oracle(run.finished, QUANTIZATION_MARGIN)
    run.assert_nothing_held()


@pytest.mark.parametrize("first_dtype", ["live", "int8"])
def test_disk_entries_in_another_state_format_are_ignored(first_dtype: str, tmp_path: Path) -> None:
    forms = [first_dtype, *({"live", "int8"} - {first_dtype})]
    for dtype in forms:
        config = on_disk(small_device(tiny_hybrid(), cached_state_dtype=dtype), tmp_path)
        run = EngineRun.start(tiny_hybrid(), config)
        assert Conversations().turn(run) == [0] * NUM_TEXTS
        run.assert_nothing_held()
        run.engine.close()


def test_two_engines_share_a_disk_cache_directory(tmp_path: Path) -> None:
    config = on_disk(small_device(tiny_hybrid()), tmp_path)
    first, second = (EngineRun.start(tiny_hybrid(), config) for _ in range(2))
    talks = Conversations()
    talks.turn(first)
    resolve(first)
    deadline = time.monotonic() + 30
    while len(second.context._below._disk.index) < first.counters.states_written_to_disk:
        assert time.monotonic() < deadline
        second.context.memory.below.land(wait=False)
        time.sleep(0.05)
    wanted = talks.most
    assert talks.turn(second) == wanted
    second.assert_exact()
    first.engine.close()
    second.engine.close()


_SERVED = """
import json, sys, time
from pathlib import Path
from tests.mcore.engine_runs import EngineRun, tiny_hybrid
from tests.mcore.tier_conversations import Conversations, on_disk, small_device
run, talks = EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), Path(sys.argv[1]))), Conversations()
talks.turn(run)
run.context.memory.below.drain()
print("written", json.dumps(talks.texts), flush=True)
time.sleep(600)
"""


def test_conversations_of_a_killed_engine_are_restored_from_disk(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVED, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    ) as killed:
        assert killed.stdout is not None
        reported = next(line for line in killed.stdout if line.startswith("written "))
        killed.send_signal(signal.SIGKILL)
    talks = Conversations()
    talks.texts = json.loads(reported.removeprefix("written "))
    wanted = talks.most
    run = EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), tmp_path))
    assert talks.turn(run) == wanted
    run.assert_exact()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_gb": 2.0**19}, "this host has only .* GiB available: lower --host-cache-gb"),
        ({"host_cache_gb": 1e-6}, "too small for a state and the KV before it: set --host-cache-gb to "),
        ({"host_cache_gb": 0}, "it must be a number of GiB, more than 0"),
        ({"disk_cache_gb": 1e-6, "disk_cache_dir": "x"}, "one entry takes .* bytes: set --disk-cache-gb to "),
    ],
)
def test_invalid_tier_sizes_are_refused_with_a_one_line_error(
    tmp_path: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        EngineRun.start(tiny_hybrid(), replace(small_device(tiny_hybrid()), **settings))
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_gb": 1.0, "host_cache_gb": 1.0, "prefix_caching": False}, "but requires prefix_caching=True"),
        ({"disk_cache_dir": "x"}, "disk_cache_dir is 'x', but requires --host-cache-gb"),
        ({"cache_gb": 1.0, "host_cache_gb": 1.0, "disk_cache_gb": 3.0}, "but requires --disk-cache-dir"),
    ],
)
def test_tier_settings_without_their_prerequisite_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**settings)


def test_unusable_disk_cache_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CacheError, match=f"cannot use --disk-cache-dir {file}: "):
        EngineRun.start(tiny_hybrid(), on_disk(small_device(tiny_hybrid()), file))


def test_kv_blocks_restored_from_the_host_survive_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored KV is written to memory of former states, which steps clear before they read it."""
    subject = tiny_hybrid()
    limits = cache_config(subject.sizes, max_sequence_length=160, max_requests=2)
    config = with_host_tier(with_one_budget(limits, subject.shape, 5), subject.shape, 60)
    run, talks = EngineRun.start(subject, config), Conversations()
    talks.turn(run)
    resolve(run)
    for number, text in enumerate(talks.texts):
        run.add(100 + number, text, 10)
        with monkeypatch.context() as patch:
            raise_once(patch, run.context.cache, "plan")
            with pytest.raises(InjectedError):
                run.step()
        run.finish()
    assert run.counters.states_restored_from_host
    run.assert_exact()


def test_restore_that_fails_to_get_a_slot_releases_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run, talks = EngineRun.start(tiny_hybrid(), small_device(tiny_hybrid())), Conversations()
    talks.turn(run)
    resolve(run)
    run.add(100, talks.texts[0], 10)
    with monkeypatch.context() as patch:
        raise_once(patch, run.context.cache.slots, "reserve")
        with pytest.raises(InjectedError):
            run.step()
    run.context.check_integrity()
    run.finish()
    assert run.counters.states_restored_from_host
    run.assert_exact()
