"""A stop string that is a special token ends a reply, although the token has no text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.server.backend import Progress
from tests.models.tokenizer_kinds import END, NOT_SPECIAL, THREE_KINDS, TURN_END, save_kind, size_of
from tests.server.front_end import FrontEnd, front_end
from tests.server.scripted_agent import Agent

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "lazy dog"}]


@pytest.fixture(scope="module", params=THREE_KINDS)
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["StoppingAgent"]:
    directory: Path = tmp_path_factory.mktemp("kind")
    save_kind(directory, request.param, "begin")
    tokenizer = load_tokenizer(directory, size_of(directory))
    assert tokenizer is not None
    with front_end(keys=(), tokenizer=tokenizer) as server:
        yield StoppingAgent(server, tokenizer)


class StoppingAgent(Agent):
    """Agent whose replies end with the request's stop tokens, like replies from an engine."""

    server: FrontEnd
    tokenizer: HuggingFaceTokenizer

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that may contain names of special tokens."""
        by_name = {name: self.tokenizer.id_of(name) for name in (END, TURN_END, *NOT_SPECIAL)}
        parts = [text] if text not in by_name else []
        for name in by_name:
            parts = [piece for part in parts for piece in split_at(part, name)]
        return [
            token for part in parts for token in ([by_name[part]] if part in by_name else spelled(self.tokenizer, part))
        ]

    def _deliver(self, reply: str, end: str, refused: Any) -> None:
        from tests.server.front_end import wait_until

        wait_until(lambda: self.server.backend.running or refused.is_set())
        stops = () if refused.is_set() else self.server.backend.asked[-1].sampling.stop_token_ids
        for token in () if refused.is_set() else self.tokens(reply):
            is_last = token in stops
            self.server.backend.deliver(Progress(tokens=(token,), end="stop" if is_last else None))
            if is_last or not self.server.backend.running:
                return
        self.server.backend.deliver(Progress(end=end))  # type: ignore[arg-type]


def split_at(text: str, name: str) -> list[str]:
    """Split a text into the parts before a name, the name, and after it; drop empty parts."""
    before, found, after = text.partition(name)
    return [part for part in (before, found, after) if part]


def spelled(tokenizer: HuggingFaceTokenizer, text: str) -> list[int]:
    by_bytes = {tokenizer.bytes_of(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[character.encode()] for character in text]


@pytest.mark.parametrize("stop", [TURN_END, END, ["x!", TURN_END], NOT_SPECIAL[0]])
@pytest.mark.parametrize("shows", [True, False])
def test_reply_ends_before_a_special_token_in_stop(agent: StoppingAgent, stop: Any, shows: bool) -> None:
    name = stop if isinstance(stop, str) else stop[-1]
    extra = {"skip_special_tokens": not shows}
    found = agent.ask(f"the dog{name} and the fox", messages=ASKED, tools=[], stop=stop, extra_body=extra)
    assert found.message.content == "the dog" and found.finish_reason == "stop"
    is_special = name != NOT_SPECIAL[0]
    stops = agent.server.backend.asked[-1].sampling.stop_token_ids
    assert stops == ((agent.tokenizer.id_of(name),) if is_special else ())
    deltas, reason = agent.ask_streamed(f"the dog{name} and", messages=ASKED, tools=[], stop=stop, extra_body=extra)
    assert "".join(delta.content or "" for delta in deltas) == "the dog" and reason == "stop"


def test_stop_token_id_and_stop_string_of_a_token_give_the_same_reply(agent: StoppingAgent) -> None:
    number = agent.tokenizer.id_of(TURN_END)
    agent.ask("x", messages=ASKED, tools=[], stop=[TURN_END, END], extra_body={"stop_token_ids": [number, 5]})
    assert agent.server.backend.asked[-1].sampling.stop_token_ids == (number, 5, agent.tokenizer.id_of(END))


def test_next_turn_does_not_contain_the_special_stop_token(agent: StoppingAgent) -> None:
    for fields in ({"stop": TURN_END}, {"extra_body": {"stop_token_ids": [agent.tokenizer.id_of(TURN_END)]}}):
        fox = "a red fox" if "stop" in fields else "a big fox"
        agent.ask(f"{fox}{TURN_END}", messages=ASKED, tools=[], **fields)
        messages = [*ASKED, {"role": "assistant", "content": fox}, *ASKED]
        agent.ask("x", messages=messages, tools=[])
        first, second = agent.prompts()[-2:]
        exact = (*first, *spelled(agent.tokenizer, fox), agent.tokenizer.id_of(TURN_END))
        assert second[: len(exact)] == exact and second[len(exact)] != exact[-1]


def test_messages_api_returns_the_special_stop_token_as_stop_sequence(agent: StoppingAgent) -> None:
    body = {"model": "scripted", "max_tokens": 20, "messages": ASKED, "stop_sequences": ["never", TURN_END]}
    with agent.server.client() as http, agent.saying(f"the dog{TURN_END} and"):
        found = http.post("/v1/messages", json=body).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", TURN_END)
    assert found["content"] == [{"type": "text", "text": "the dog"}]
    with agent.server.client() as http, agent.saying("the dog", end="stop"):
        found = http.post("/v1/messages", json=body).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
