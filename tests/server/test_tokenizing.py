"""Prompts are tokenized after admission by the queue gate, in threads that serve API keys in turn."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.server.fair_threads import FairThreads
from tests.server.front_end import BLUE, RED, FrontEnd, front_end, request_bytes, status_of, wait_until


class SlowTokenizer(ByteTokenizer):
    """Tokenizer that blocks on texts that begin with "slow" until released.

    Attributes:
        begun: Texts that it has started to tokenize.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.begun: list[str] = []

    def tokenize(self, text: str) -> list[int]:
        self.begun.append(text)
        if text.startswith("slow"):
            assert self.allowed.acquire(timeout=20)
        return super().tokenize(text)


@pytest.fixture
def tokenizer() -> SlowTokenizer:
    return SlowTokenizer()


@pytest.fixture
def server(tokenizer: SlowTokenizer) -> Iterator[FrontEnd]:
    with front_end(tokenizer=tokenizer, max_running=2, max_queued=4) as server:
        yield server
        for _ in range(20):
            tokenizer.allowed.release()


def slow(number: int) -> bytes:
    return request_bytes({"prompt": f"slow {number}", "max_tokens": 1, "stream": True})


def test_prompts_being_tokenized_count_toward_the_queue_limit(server: FrontEnd, tokenizer: SlowTokenizer) -> None:
    connections = [server.connection(slow(number)) for number in range(6)]
    wait_until(lambda: server.server.gate.num_inside == 6)
    with server.client(BLUE) as http:
        refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert refused.status_code == 429 and refused.headers["retry-after"]
    assert len(tokenizer.begun) == 2 and not server.backend.asked
    for connection in connections:
        connection.close()


def test_api_key_with_many_prompts_delays_other_keys_by_one_prompt_at_most(
    server: FrontEnd, tokenizer: SlowTokenizer
) -> None:
    connections = [server.connection(slow(number)) for number in range(5)]
    wait_until(lambda: server.server.gate.num_inside == 5)
    connections.append(server.connection(request_bytes({"prompt": "x", "max_tokens": 1, "stream": True}, key=BLUE)))
    wait_until(lambda: server.server.gate.num_inside == 6)
    tokenizer.allowed.release(2)
    wait_until(lambda: len(server.backend.asked) == 3)
    assert tokenizer.begun.index("x") <= 3
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_during_tokenizing_is_detected_immediately(
    server: FrontEnd, tokenizer: SlowTokenizer, stream: bool
) -> None:
    body = {"prompt": ["slow 1", "slow 2", "slow 3"], "max_tokens": 1, "stream": stream}
    with server.connection(request_bytes(body)):
        wait_until(lambda: tokenizer.begun)
    wait_until(lambda: server.server.gate.num_inside == 0, 5)
    tokenizer.allowed.release(3)
    time.sleep(0.1)
    assert tokenizer.begun == ["slow 1"] and not server.backend.asked


def test_oversized_prompt_is_refused_before_tokenizing(server: FrontEnd, tokenizer: SlowTokenizer) -> None:
    bodies = [{"prompt": "slow" * 10_000}, {"prompt": [1] * 10_000}, {"prompt": ["a", "slow" * 10_000]}]
    for body in bodies:
        connection = server.connection(request_bytes(body))
        assert status_of(connection) == 400
    assert tokenizer.begun == ["a"] and server.server.gate.num_inside == 0


def test_cancelled_work_releases_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        threads, allowed = FairThreads(1), threading.Event()
        pass_on = threads._pass_on

        def pass_on_and_cancel() -> None:
            pass_on()
            second.cancel()

        monkeypatch.setattr(threads, "_pass_on", pass_on_and_cancel)
        first = asyncio.create_task(threads.run(RED, lambda: allowed.wait(5)))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(threads.run(RED, lambda: "second"))
        third = asyncio.create_task(threads.run(BLUE, lambda: "third"))
        await asyncio.sleep(0.01)
        allowed.set()
        assert await first and await asyncio.wait_for(third, 5) == "third" and second.cancelled()
        threads.close()

    asyncio.run(run())
