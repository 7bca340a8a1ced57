"""Requests that cannot be served as they are: each fails alone, or finds another replica, and is answered. Their
clients are remembered as long as they are there.
"""

import time
from typing import Any

import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas.front_end import CANCELS
from megatron_mamba_cache.replicas.prompt_keys import prompt_tokens
from megatron_mamba_cache.replicas.requests_in_flight import readable_sampling
from megatron_mamba_cache.replicas.wire import Unsent, pack_unsent
from tests.replicas.peers import KEYS, TOKENS, Service

UNREADABLE: list[dict[str, Any]] = [
    {"top_n_logprobs": "5"},
    {"top_n_logprobs": None},
    {"return_prompt_top_n_logprobs": True, "skip_prompt_log_probs": True},
    {"__class__": 3},
    {"serialize": 1},
    {"spec": 5},
]


def test_requests_of_dead_replicas_go_to_a_living_replica(service: Service) -> None:
    first, _second = service.replica("a", domain="experts"), service.replica("b", domain="experts")
    other = service.replica("c")
    client = service.client()
    client.submit(0, TOKENS)
    first.take()
    service.kill(first)
    other.take()
    assert service.thread.is_alive()


@pytest.mark.parametrize("sampling", UNREADABLE)
def test_harmful_sampling_parameters_never_reach_a_replica(sampling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sampling parameter"):
        readable_sampling(sampling)


def test_extra_sampling_parameters_are_kept() -> None:
    sampling = {"num_tokens_to_generate": 3, "top_k": 1, "tenant": "red", "seed": 7}
    assert (
        readable_sampling(sampling) == sampling == {"num_tokens_to_generate": 3, "top_k": 1, "tenant": "red", "seed": 7}
    )


@pytest.mark.parametrize("token", [True, 1.0, "1", None, [1], 2**31, -(2**31) - 1, 2**70])
def test_token_ids_beyond_32_bits_are_refused(token: Any) -> None:
    least, most = -(2**31), 2**31 - 1
    assert prompt_tokens([least, 0, most], None, add_bos=False) == [least, 0, most]
    assert prompt_tokens([], None, add_bos=False) == []
    with pytest.raises(ValueError, match="a list of token ids, which are 32-bit integers"):
        prompt_tokens([1, token], None, add_bos=False)


@pytest.mark.parametrize("sampling", [*UNREADABLE, {"add_BOS": True}])
def test_malformed_request_gets_an_error_reply(service: Service, sampling: dict[str, Any]) -> None:
    (replica,) = service.replicas("a")
    replica.report([KEYS[2]])
    client = service.client()
    client.submit(0, " ".join(map(str, TOKENS)), **sampling)
    number, failed = client.answer()
    expected = {} if sampling in UNREADABLE else {"num_tokens_to_generate": 4} | sampling  # what the client can read
    assert number == 0 and failed["status"] == "FAILED" and failed["sampling_params"] == expected
    assert "the request cannot be read" in failed["events"][-2]["payload"]["message"]


def test_state_for_departed_clients_is_removed(service: Service) -> None:
    service.replicas("a")
    stays = service.client("stays")
    for number in range(8):
        service.kill(service.client(f"client{number}"))
    end = time.monotonic() + 60
    while len(service.coordinator._clients) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(service.coordinator._clients) == 1
    stays.submit(0, "no number")
    assert stays.answer()[0] == 0


def test_request_is_failed_and_cancelled_when_its_reply_is_too_large(
    service: Service,
) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    for number in range(2):
        client.submit(number, TOKENS)
    large, small = (replica.take() for replica in (first, second))
    second.send_bytes(pack_unsent(Unsent(large, "not its own")))
    second.send("unsent", large, 5)
    assert client.hears_nothing()
    first.send_bytes(pack_unsent(Unsent(large, "its reply is too large")))
    assert client.error() == "its reply is too large"
    assert first.receive() == [Headers.SUBMIT_REQUEST.value, large, [], {CANCELS: True}]
    second.finish(small, [5])
    assert client.answer()[0] == 1
