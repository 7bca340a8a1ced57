"""OpenAPI schema of the server, and random requests generated from it: no response is a 5xx.

SCHEMATHESIS_EXAMPLES sets the number of requests for each operation.
"""

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from tests.server.running_server import RunningServer, bearer

NUM_EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "6"))
OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/admin/flush"),
    ("POST", "/admin/pause"),
    ("POST", "/admin/resume"),
    ("POST", "/admin/abort"),
    ("GET", "/admin/weights"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/metrics"),
    ("GET", "/dashboard"),
)


def described(server: RunningServer) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/openapi.json", headers=bearer(), timeout=60)
    assert reply.status_code == 200
    return reply.json()


def test_property_tests_cover_every_operation(server: RunningServer) -> None:
    found = {(method.upper(), path) for path, methods in described(server)["paths"].items() for method in methods}
    assert found == set(OPERATIONS)


CASES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
CASES += [
    (method, path, GenerationMode.NEGATIVE) for method, path in OPERATIONS if method == "POST" and path != "/ping"
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_random_requests_never_get_a_5xx(server: RunningServer, method: str, path: str, mode: GenerationMode) -> None:
    config = SchemathesisConfig.from_dict({"generation": {"mode": mode.value}})
    schema = schemathesis.openapi.from_dict(shortened(described(server)), config=config)
    operation = schema[path][method]
    few = settings(
        max_examples=NUM_EXAMPLES if method == "POST" else 3,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    statuses = set()

    @few
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        reply = case.call(base_url=server.url, headers=bearer(), timeout=120)
        statuses.add(reply.status_code)
        assert reply.status_code < 500, (reply.status_code, case.body, reply.text)
        if reply.status_code >= 400:
            is_openais = not path.startswith("/v1/messages")
            assert set(reply.json()["error"]) == {"message", "type", *(("param", "code") if is_openais else ())}

    ask()
    print(method, path, mode, sorted(statuses))


def shortened(description: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with replies limited to a few tokens, because longer replies would test nothing more."""
    for name in ("CompletionRequest", "ChatRequest", "MessagesRequest", "ResponsesRequest"):
        fields = description["components"]["schemas"][name]["properties"]
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in fields:
                fields[field] = {"type": "integer", "minimum": 1, "maximum": 3}
        limit = "max_output_tokens" if name == "ResponsesRequest" else "max_tokens"
        description["components"]["schemas"][name]["required"].append(limit)
    return description
