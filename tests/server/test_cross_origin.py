"""Requests from pages of other origins are allowed only for listed origins, and never on admin routes."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.server_arguments import check_server_arguments
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.server.app import Server, ServerSettings
from megatron_mamba_cache.server.tenants import ApiKeys
from tests.server.front_end import RED, is_listening, listening, wait_until
from tests.server.running_server import bearer
from tests.server.scripted_backend import ScriptedBackend

CHAT = "https://chat.example"
ALLOWED = "access-control-allow-origin"


@contextmanager
def server(*origins: str) -> Iterator[str]:
    """Run a front end with a key; yield its URL."""
    settings = ServerSettings("scripted", ByteTokenizer(), frozenset(), ApiKeys([RED]), cors_origins=origins)
    with listening(Server(ScriptedBackend(), settings)) as found:
        wait_until(lambda: is_listening(found.url))
        yield found.url


def preflight(url: str, path: str, origin: str = CHAT) -> httpx.Response:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(url + path, headers={"Origin": origin, **wanted})


def test_no_cross_origin_request_is_allowed_by_default() -> None:
    with server() as url:
        assert preflight(url, "/v1/completions").status_code == 401
        reply = httpx.get(f"{url}/v1/models", headers=bearer() | {"Origin": CHAT})
        assert reply.status_code == 200 and ALLOWED not in reply.headers


@pytest.mark.parametrize(("origins", "allowed"), [((CHAT, "http://localhost:3000"), CHAT), (("*",), "*")])
def test_allowed_origin_passes_preflight_and_can_read_replies_and_errors(origins: tuple[str], allowed: str) -> None:
    with server(*origins) as url:
        asked = preflight(url, "/v1/chat/completions")
        assert asked.status_code == 200 and asked.headers[ALLOWED] == allowed
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for headers, status in ((bearer(), 200), ({}, 401)):
            reply = httpx.get(f"{url}/v1/models", headers=headers | {"Origin": CHAT})
            assert (reply.status_code, reply.headers[ALLOWED]) == (status, allowed)
            assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_origin_that_is_not_listed_gets_no_cors_headers() -> None:
    with server(CHAT) as url:
        assert ALLOWED not in preflight(url, "/v1/completions", "https://evil.example").headers
        reply = httpx.get(f"{url}/v1/models", headers=bearer() | {"Origin": "https://evil.example"})
        assert ALLOWED not in reply.headers


@pytest.mark.parametrize("path", ["/metrics", "/dashboard", "/dashboard/history", "/admin/flush", "/admin/weights"])
def test_admin_routes_allow_no_other_origin(path: str) -> None:
    with server("*") as url:
        asked = preflight(url, path)
        assert asked.status_code == 401 and ALLOWED not in asked.headers
        reply = httpx.get(url + path, headers=bearer() | {"Origin": CHAT})
        assert reply.status_code == 403 and ALLOWED not in reply.headers


@pytest.mark.parametrize(
    "wrong", ["chat.example", "https://chat.example/", "https://", "ftp://chat.example", "", "null"]
)
def test_malformed_origin_flag_is_a_usage_error(wrong: str) -> None:
    with pytest.raises(UsageError, match="--cors-origin"):
        check_server_arguments(command_parser().parse_args(["serve", "--cors-origin", wrong]))
