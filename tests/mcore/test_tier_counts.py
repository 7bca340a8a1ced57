"""An engine's tier reports: restored tokens, bytes by use, copies in flight, failed copies."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.mcore.request_states import TierTokens
from megatron_mamba_cache.metrics import CacheSnapshot
from megatron_mamba_cache.tiers.copy_lanes import DeviceCopies
from tests.mcore.engine_runs import (
    EngineRun,
    cache_config,
    some_tokens,
    tiny_hybrid,
    with_host_tier,
    with_one_budget,
)

NUM_TEXTS = 6
PROMPT_LEN = 100
FOUND = 96
TEXTS = [some_tokens(PROMPT_LEN, seed=number) for number in range(NUM_TEXTS)]


def tier_config(directory: Path | None = None) -> CacheConfig:
    """Return settings with room for one text on the device and for all of them in the tiers."""
    subject = tiny_hybrid()
    config = with_one_budget(cache_config(subject.sizes, max_sequence_length=256, max_requests=2), subject.shape, 1)
    config = with_host_tier(config, subject.shape, 60)
    return config if directory is None else replace(config, disk_cache_dir=str(directory), disk_cache_gb=0.01)


def run_texts(run: EngineRun, first_id: int = 0) -> list[TierTokens]:
    """Run each text alone; return the restored tokens of each."""
    found = []
    for number, text in enumerate(TEXTS):
        run.run(first_id + number, text, 4)
        found.append(run.engine.tier_tokens(first_id + number))
    return found


def test_restored_token_counts_are_kept_after_a_request_finishes() -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config())
    assert run_texts(run) == [TierTokens()] * NUM_TEXTS
    run.assert_exact()
    found = run_texts(run, NUM_TEXTS)
    assert TierTokens(from_host=FOUND) in found
    for number, tokens in enumerate(found, NUM_TEXTS):
        assert tokens.from_host + tokens.from_disk <= run.engine.cached_tokens(number) == FOUND
        assert run.engine.tier_tokens(number) == tokens
    assert run.counters.prompt_tokens_from_host == sum(tokens.from_host for tokens in found)


def test_prefix_hits_on_the_device_are_not_counted_for_other_tiers() -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config())
    run.run(0, TEXTS[0], 4)
    run.run(1, TEXTS[0], 4)
    assert run.engine.cached_tokens(1) == FOUND and run.engine.tier_tokens(1) == TierTokens()
    assert run.engine.tier_tokens(99) == TierTokens()


def test_restarted_engine_reports_tokens_restored_from_disk(tmp_path: Path) -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config(tmp_path))
    run_texts(run)
    run.assert_exact()
    run.engine.close()
    run = EngineRun.start(tiny_hybrid(), tier_config(tmp_path))
    assert run_texts(run) == [TierTokens(from_disk=FOUND)] * NUM_TEXTS


def test_tier_bytes_by_use_sum_to_the_tier_size(tmp_path: Path) -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config(tmp_path))
    host = run.context._below._host
    before = run.context.snapshot()
    assert before.host_bytes["free"] == sum(before.host_bytes.values()) == host.bytes.numel()
    limit = before.disk_bytes["free"]
    assert before.disk_bytes == {"entries": 0, "free": limit} and limit > 0
    assert before.tier_copies == {"device": 0, "host": 0, "disk": 0}
    run_texts(run)
    run.context.memory.below._tier.drain()
    after = run.context.snapshot()
    assert sum(after.host_bytes.values()) == host.bytes.numel()
    assert after.host_bytes["states_cached"] == run.counters.states_written_to_host * host.slot_bytes
    assert after.host_bytes["kv_cached"] == NUM_TEXTS * FOUND // 16 * host.block_bytes
    assert after.host_bytes["kv_in_use"] == after.host_bytes["states_reserved"] == 0
    assert after.disk_bytes["entries"] == run.context._below._disk.index.num_bytes > 0
    assert sum(after.disk_bytes.values()) == limit
    assert CacheSnapshot.of_dict(after.as_dict()) == after


def test_running_tier_copies_are_reported_with_their_bytes() -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config())
    run.run(0, TEXTS[0], 4)  # its last boundary is on its way until the next step
    reported = run.context.snapshot()
    assert reported.tier_copies == {"device": 0, "host": 1}
    assert reported.host_bytes["states_reserved"] > 0 and reported.host_bytes["kv_in_use"] > 0
    run_texts(run, 1)
    run.assert_exact()
    run.add(100, TEXTS[0], 4)
    run.step()
    assert run.context.snapshot().tier_copies["device"] == 1
    run.finish()
    assert run.context.snapshot().tier_copies["device"] == 0


def test_snapshot_counts_states_being_written_to_disk(tmp_path: Path) -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config(tmp_path))
    run.run(0, TEXTS[0], 4)
    run.context.memory.below._tier._copies.wait([0])  # it is on the host now, and about to be stored
    run.context.memory.below.land(wait=False)
    assert run.context.snapshot().tier_copies == {"device": 0, "host": 0, "disk": 1}
    run.assert_exact()
    assert run.context.snapshot().tier_copies["disk"] == 0


def test_snapshot_has_no_tier_fields_without_tiers() -> None:
    run = EngineRun.start(tiny_hybrid(), cache_config(tiny_hybrid().sizes))
    run.run(0, TEXTS[0], 4)
    reported = run.context.snapshot()
    assert reported.host_bytes == reported.disk_bytes == reported.tier_copies == {}


def test_failed_restore_is_counted_as_the_miss_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config())
    run_texts(run)
    run.assert_exact()
    reasons = run.context.snapshot().counters.requests_without_hit
    assert reasons == {"new_prefix": NUM_TEXTS}

    def fail(*_: object) -> None:
        raise OSError("torn")

    monkeypatch.setattr(DeviceCopies, "_copy_parts", fail)
    run.run(NUM_TEXTS, TEXTS[0], 4)
    assert run.counters.host_restores_failed == 1 and run.engine.cached_tokens(NUM_TEXTS) == 0
    assert run.engine.tier_tokens(NUM_TEXTS) == TierTokens()
    assert run.context.snapshot().counters.requests_without_hit == {"new_prefix": NUM_TEXTS, "copy_failed": 1}


def test_flush_during_a_copy_is_not_counted_as_a_copy_failure() -> None:
    run = EngineRun.start(tiny_hybrid(), tier_config())
    run_texts(run)
    run.assert_exact()
    run.add(100, TEXTS[0], 4)
    run.step()
    assert run.context.snapshot().tier_copies["device"] == 1
    run.engine.flush()
    run.finish()
    assert run.context.snapshot().counters.requests_without_hit == {"new_prefix": NUM_TEXTS + 1}
