"""Hostile grammars give an answer or a clear error, do not change other streams, and do not leak memory."""

import concurrent.futures
import time
from typing import Any

import httpx
import pytest

from tests.server.running_server import RunningServer, resident_mib

PLAIN = {"prompt": "import os\n", "max_tokens": 60, "temperature": 0, "return_token_ids": True}
MOST_SECONDS = 20.0
MOST_MIB = 64.0


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS: dict[str, Any] = {
    "1 MB": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "description": "x" * 80} for n in range(8000)},
    },
    "2,000 optional properties": {"type": "object", "properties": {f"p{n}": {} for n in range(1990)}},
    "10,000 alternatives": {"anyOf": [{"const": n} for n in range(10_000)]},
    "10,000 values": {"enum": [f"value {n}" for n in range(10_000)]},
    "deep": nested(400),
    "less deep": nested(100),
    "exponential": {"type": "string", "pattern": "^(a|a)*(a|aa)*((b|a){1,200})+c{500}$"},
    "many states": {"type": "string", "pattern": "^.*a.{40}b.{40}$"},
    "repeats of repeats": {"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99}){1,99}$"},
    "endless": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "endless documents": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "odd names": {"type": "object", "properties": {'a"\n\\': {"const": 'x"\n'}}, "required": ['a"\n\\']},
}


DOUBLED = "".join(f'a{n}: a{n + 1} a{n + 1} | "x"\n' for n in range(1500))
FORMS: dict[str, dict[str, Any]] = {name: {"guided_json": schema} for name, schema in SCHEMAS.items()} | {
    "5,000 optional letters": {"guided_regex": "(a?){5000}a{5000}"},
    "doubled rules": {"guided_grammar": f'start: a0\n{DOUBLED}a1500: "x"'},
}


def asked(http: httpx.Client, form: dict[str, Any], max_tokens: int = 4) -> tuple[httpx.Response, float]:
    """Request an answer in a format; return the response and the seconds that it took."""
    began = time.monotonic()
    reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": max_tokens, **form})
    return reply, time.monotonic() - began


def test_hostile_grammars_do_not_change_other_replies(server: RunningServer) -> None:
    with server.client() as http, concurrent.futures.ThreadPoolExecutor(8) as threads:
        alone = http.post("/v1/completions", json=PLAIN).json()["choices"][0]["token_ids"]
        hostile = {name: threads.submit(asked, http, form) for name, form in FORMS.items()}
        concurrent_replies = [threads.submit(http.post, "/v1/completions", json=PLAIN) for _ in range(4)]
        assert [reply.result().json()["choices"][0]["token_ids"] for reply in concurrent_replies] == [alone] * 4
        for name, found in hostile.items():
            reply, seconds = found.result()
            print(f"{name}: {reply.status_code} after {seconds:.2f} s {reply.text[:90]}")
            assert reply.status_code in (200, 400), (name, reply.text)
            assert seconds < MOST_SECONDS, name
            if reply.status_code == 400:
                assert len(reply.json()["error"]["message"]) > 20, name


@pytest.mark.long
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_compiled_grammars(server: RunningServer, count: int) -> None:
    with server.client() as http:

        def ask(number: int) -> None:
            schema = {"type": "object", "properties": {f"p{number}": {"enum": [number, "a" * (number % 50)]}}}
            schema |= {"required": [f"p{number}"], "description": "x" * 20_000}
            reply, _ = asked(http, {"guided_json": schema}, max_tokens=1)
            assert reply.status_code == 200, reply.text

        for number in range(count, count + count // 2):  # numbers with the same number of digits as later ones
            ask(number)
        before = resident_mib()
        for number in range(count + count // 2, 2 * count):
            ask(number)
    grown = resident_mib() - before
    print(f"{grown:.1f} MiB in the last {count - count // 2} of {count} requests")
    assert grown < MOST_MIB
