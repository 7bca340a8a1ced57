"""Chat in the terminal with an OpenAI-compatible endpoint; each turn shows its cached tokens and time to first token.

    python -m megatron_mamba_cache serve &
    python examples/chat_session.py

Needs the `openai` package. With `--say` it takes its turns from the command line and ends.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its text and what it took.

    Args:
        first_token_s: Seconds until the first text; None if there was none.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None
    seconds: float
    finish_reason: str

    def __str__(self) -> str:
        share = 100 * self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        first = "no token" if self.first_token_s is None else f"first token after {1000 * self.first_token_s:.0f} ms"
        rate = self.completion_tokens / self.seconds if self.seconds else 0.0
        return (
            f"[{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached ({share:.0f} %), {first}, "
            f"{self.completion_tokens} tokens at {rate:.0f}/s, {self.finish_reason}]"
        )


def take_turn(client: Any, model: str, messages: list[dict[str, str]], settings: dict[str, Any]) -> Turn:
    """Stream one reply to the terminal and return what it took."""
    start, first, parts, usage, reason = time.perf_counter(), None, [], None, "cut off"
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter() - start
                parts.append(choice.delta.content)
                print(choice.delta.content, end="", flush=True)
            reason = choice.finish_reason or reason
    details = getattr(usage, "prompt_tokens_details", None)
    return Turn(
        text="".join(parts),
        prompt_tokens=getattr(usage, "prompt_tokens", 0),
        cached_tokens=getattr(details, "cached_tokens", 0) or 0,
        completion_tokens=getattr(usage, "completion_tokens", 0),
        first_token_s=first,
        seconds=time.perf_counter() - start,
        finish_reason=reason,
    )


def typed_lines() -> Iterator[str]:
    """Yield what is typed until the input ends; `\\n` in it stands for a line break."""
    while True:
        try:
            yield input("\n> ").replace("\\n", "\n")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def parsed_arguments() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description="Chat in the terminal; each turn shows its cached tokens.")
    parser.add_argument("--url", default="http://127.0.0.1:5000/v1", help="default: http://127.0.0.1:5000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the endpoint has")
    parser.add_argument("--system", help="a first message for every turn")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a reply (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.9, help="default: 0.9")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--say", action="append", metavar="TEXT", help="a turn, instead of typing; may be repeated")
    return parser.parse_args()


def main() -> int:
    """Chat until the input ends."""
    arguments = parsed_arguments()
    try:
        import openai
    except ImportError:
        print("the openai package is missing: pip install openai", file=sys.stderr)
        return 1
    client = openai.OpenAI(base_url=arguments.url, api_key=arguments.api_key)
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": arguments.seed}
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    lines = (text.replace("\\n", "\n") for text in arguments.say) if arguments.say else typed_lines()
    try:
        model = arguments.model or next(iter(client.models.list())).id
        for line in lines:
            messages.append({"role": "user", "content": line})
            turn = take_turn(client, model, messages, settings)
            messages.append({"role": "assistant", "content": turn.text})
            print(f"\n{turn}", flush=True)
    except openai.OpenAIError as error:
        print(f"{arguments.url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
