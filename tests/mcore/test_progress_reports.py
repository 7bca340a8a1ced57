"""Progress reports to a coordinator contain every token once, despite errors."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord

from megatron_mamba_cache.mcore.request_states import RequestCounts, TierTokens
from megatron_mamba_cache.replicas.front_end import PROGRESS, STREAMS
from megatron_mamba_cache.replicas.progress_reports import ProgressReports


@dataclass(slots=True)
class Wire:
    """Forwards messages unless it is broken."""

    is_broken: bool = False
    tokens: list[int] = field(default_factory=list)
    reported: list[dict[str, Any]] = field(default_factory=list)

    def send(self, message: bytes) -> None:
        if self.is_broken:
            raise ConnectionError("no route")
        kind, news = msgpack.unpackb(message)
        assert kind == PROGRESS
        for _, progress in news:
            assert progress["start"] == len(self.tokens)
            self.tokens += progress["tokens"]
            self.reported.append(progress)


def engine_with(request: Any) -> Any:
    record = DynamicInferenceRequestRecord(requests=[request])
    return SimpleNamespace(
        requests={0: SimpleNamespace(record=record)},
        counts_of=lambda _: RequestCounts(tiers=TierTokens(3, 2)),
    )


def test_tokens_unsent_after_an_error_are_sent_with_the_next_report() -> None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(**{STREAMS: True}),
        generated_tokens=[5],
        generated_log_probs=None,
        generated_top_n_logprobs=None,
    )
    wire = Wire()
    reports = ProgressReports(engine_with(request), wire)
    reports.send([0])
    request.generated_tokens += [6, 7]
    wire.is_broken = True
    with pytest.raises(ConnectionError):
        reports.send([0])
    wire.is_broken = False
    request.generated_tokens += [8]
    reports.send([0])
    assert wire.tokens == [5, 6, 7, 8]
    assert {
        (reported["cached_tokens_from_host"], reported["cached_tokens_from_disk"]) for reported in wire.reported
    } == {(3, 2)}
