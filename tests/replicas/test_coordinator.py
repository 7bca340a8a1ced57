"""Routing of prompts to replicas and of replies to clients, despite malformed messages."""

from typing import Any

import msgpack
import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.replicas.prompt_keys import KeySalt
from megatron_mamba_cache.replicas.wire import Hello, pack_hello
from tests.replicas.peers import KEYS, SALT, TOKENS, Service


def test_request_goes_to_the_replica_with_its_prefix_and_the_reply_to_its_client(service: Service) -> None:
    first, second = service.replicas("ab")
    client, other = service.client(), service.client("other")
    second.report([KEYS[2]])
    client.submit(7, TOKENS)
    request_id = second.take()
    second.finish(request_id, [5, 6])
    client_request_id, answer = client.answer()
    assert (client_request_id, answer["generated_tokens"], answer["generated_text"]) == (7, [5, 6], "5 6")
    assert first.hears_nothing() and other.hears_nothing()


def test_interrupted_reply_has_its_whole_text_in_the_first_part(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    monkeypatch.setattr(
        service.coordinator.tokenizer, "detokenize", lambda tokens: bytes(tokens).decode(errors="replace")
    )
    client.submit(7, TOKENS)
    request_id, known = replica.take(), {"prompt": "1", "sampling_params": {}}
    parts = [{"request_id": request_id, "generated_tokens": tokens} | known for tokens in ([0x61, 0xC3], [0xA9, 0x62])]
    replica.send(Headers.ENGINE_REPLY, [{"requests": parts, "latency": None}])
    _, _, record = client.receive()
    assert "".join(part["generated_text"] for part in record["requests"]) == "aéb"


def test_router_computes_the_same_keys_as_replicas_for_text_and_tenants(service: Service) -> None:
    _, second, third = service.replicas("abc")
    second.report([KEYS[2]])
    third.report([block_keys(SALT.root_of("red"), TOKENS, SALT.block_size)[2]])
    client = service.client()
    client.submit(0, " ".join(map(str, TOKENS)))
    assert second.receive()[2] == " ".join(map(str, TOKENS))
    client.submit(1, TOKENS, spec={"tenant": "red"})
    assert third.receive()[3]["spec"]["tenant"] == "red"


def test_router_ignores_cached_keys_with_an_old_salt(service: Service) -> None:
    first, second = service.replicas("ab")
    second.report([KEYS[2]])
    second.report([], KeySalt("model", "1", 1, 4), were_flushed=True)
    first.report([])
    client = service.client()
    client.submit(0, TOKENS)
    first.take()


@pytest.mark.parametrize("service", [{"policy": "round-robin"}], indirect=True)
def test_round_robin_policy_ignores_cached_prefixes(service: Service) -> None:
    replicas = service.replicas("abc")
    replicas[1].report([KEYS[2]])
    client = service.client()
    for number in range(6):
        client.submit(number, TOKENS)
        replicas[number % 3].take()


MALFORMED: dict[str, Any] = {
    "no_msgpack": b"\xc1",
    "no_list": msgpack.packb(3),
    "empty_list": msgpack.packb([]),
    "unknown_word": msgpack.packb(["what"]),
    "unknown_number": msgpack.packb([99]),
    "registration_of_megatron": b"",
    "hello_without_fields": msgpack.packb(["hello", {}]),
    "bare_hello": msgpack.packb(["hello"]),
    "second_hello": pack_hello(Hello("b")),
    "hello_out_of_range": msgpack.packb(["hello", {"replica": "x", "member": 2, "num_members": 2, "domain": ""}]),
    "report_of_half_a_key": msgpack.packb(
        ["keys", {"salt": None, "flushed": False, "published": b"1", "dropped": b""}]
    ),
    "report_without_fields": msgpack.packb(["keys", {"published": b""}]),
    "salt_of_no_block": msgpack.packb(
        ["keys", {"salt": ["m", "0", 0, 0], "flushed": False, "published": b"", "dropped": b""}]
    ),
    "reply_to_nothing": msgpack.packb([Headers.ENGINE_REPLY.value, [{"requests": [{"request_id": 99}]}]]),
    "reply_of_nothing": msgpack.packb([Headers.ENGINE_REPLY.value, [{}]]),
    "unexpected_answer": msgpack.packb([Headers.PAUSE_ACK.value]),
    "request_from_a_replica": msgpack.packb([Headers.SUBMIT_REQUEST.value, 0, [1], {}]),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_messages_do_not_affect_other_peers(service: Service, message: str) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    second.report([KEYS[2]])
    second.send_bytes(MALFORMED[message])
    client.submit(0, TOKENS)
    second.finish(second.take(), [5])
    assert client.answer()[1]["generated_tokens"] == [5]
    assert first.hears_nothing()


def test_malformed_reply_fails_its_request(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(3, TOKENS)
    request = {"request_id": replica.take(), "prompt": "1"}
    replica.send(Headers.ENGINE_REPLY, [{"requests": [request], "latency": None}])
    assert "its reply cannot be read" in client.error()


def test_malformed_record_does_not_affect_other_replies_in_the_message(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    for number in range(2):
        client.submit(number, TOKENS)
    done = [{"requests": [{"request_id": replica.take(), "prompt": "1", "generated_tokens": [5]}]} for _ in range(2)]
    nonsense = [{}, 3, {"requests": []}, {"requests": [{"request_id": [1]}]}]
    replica.send(Headers.ENGINE_REPLY, [*nonsense, done[0], *nonsense, done[1]])
    assert [client.answer()[0] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("prompt", ["1 two 3", [1, "2"], [2**40], {"1": 2}, None])
def test_malformed_prompt_fails_only_its_own_request(service: Service, prompt: Any) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(3, prompt)
    assert "the request cannot be read" in client.error()
    assert replica.hears_nothing()


def test_reply_from_another_replica_is_ignored(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.submit(3, TOKENS)
    request_id = first.take()
    second.finish(request_id, [1])
    assert client.hears_nothing()
    first.finish(request_id, [2])
    assert client.answer()[1]["generated_tokens"] == [2]
