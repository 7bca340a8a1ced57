"""Admission of requests: API keys, tenants, the queue."""

import base64

import pytest

from megatron_mamba_cache.server.errors import ApiError
from megatron_mamba_cache.server.limits import QueueGate, ServerLimits
from megatron_mamba_cache.server.tenants import ApiKeys, Tenant


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"me:{key}".encode()).decode()


def test_api_key_is_accepted_as_bearer_token_or_basic_password() -> None:
    keys = ApiKeys(["red", "blue"])
    assert keys.owner_of("Bearer red") == keys.owner_of("bearer  red") == keys.owner_of(basic("red"))
    assert keys.owner_of("Bearer red") != keys.owner_of("Bearer blue")
    for wrong in ("", "red", "Bearer", "Bearer Red", "Bearer redd", "Basic red", "Basic !", basic("x"), "Bearer é"):
        assert keys.owner_of(wrong) is None


def test_all_clients_have_the_same_owner_when_no_keys_are_configured() -> None:
    assert ApiKeys().owner_of("") == ApiKeys().owner_of("Bearer x") == "" and not ApiKeys().are_needed


def test_only_admin_keys_may_administrate_when_there_are_admin_keys() -> None:
    keys = ApiKeys(["red"], ["boss"])
    assert keys.may_administrate(keys.owner_of("Bearer boss") or "")
    assert not keys.may_administrate(keys.owner_of("Bearer red") or "")
    one = ApiKeys(["red"])
    assert one.may_administrate(one.owner_of("Bearer red") or "")


@pytest.mark.parametrize("wrong", [" red", "red\n", "r\x00d", "clé", "\ud800", "re\td"])
def test_api_keys_that_cannot_be_sent_in_a_header_are_refused(wrong: str) -> None:
    for keys in (([wrong], []), (["red"], [wrong])):
        with pytest.raises(ValueError, match="API key"):
            ApiKeys(*keys)
    assert ApiKeys(["a b"]).owner_of("Bearer a b") is not None


@pytest.mark.parametrize("keys", [([""], []), ([" "], []), ([], ["boss"])])
def test_empty_api_keys_are_refused(keys: tuple[list[str], list[str]]) -> None:
    with pytest.raises(ValueError, match="API key"):
        ApiKeys(*keys)


def test_tenant_names_differ_by_owner_and_salt() -> None:
    names = {tenant.name for tenant in (Tenant(), Tenant("a"), Tenant("b"), Tenant("a", "b"), Tenant("", "ab"))}
    assert len(names) == 5 and Tenant("a", "b").name == Tenant("a", "b").name and Tenant().name == ""


def test_full_queue_sends_retry_after_until_a_request_leaves() -> None:
    now = [0.0]
    gate = QueueGate(ServerLimits(max_running=2, max_queued=1), lambda: now[0])
    gate.enter(2)
    with pytest.raises(ApiError) as found:
        gate.enter(2)
    assert found.value.status == 429 and found.value.headers()["Retry-After"] == "1" and gate.num_inside == 2
    gate.enter(1)
    for _ in range(2):
        now[0] += 200.0
        gate.leave()
    assert gate.retry_after_s() == 10  # a tenth of one request, at a rate of one in 100 s
    gate.enter(2)
    assert gate.num_inside == 3 and gate.num_refused == 1


def test_request_with_more_choices_than_the_limit_gets_400() -> None:
    with pytest.raises(ApiError) as found:
        QueueGate(ServerLimits(max_running=2, max_queued=1), lambda: 0.0).enter(4)
    assert found.value.status == 400


@pytest.mark.parametrize("wrong", [{"max_running": 0}, {"drain_s": 0}, {"max_buffered_bytes": 1}, {"max_queued": -1}])
def test_error_names_the_limit_that_is_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerLimits(**wrong)
