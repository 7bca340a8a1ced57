"""Tools and formats for the agent scripts, and a loop of five rounds of tool calls."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from checking import check
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    size: Literal["small", "large"]
    districts: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=1, max_length=2)


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Bergen", "Bodø"]
    days: int = Field(ge=1, le=14)


QUESTION = "How is the weather?"
OSLO = '{"name": "Oslo", "size": "large", "districts": [3, 14]}'
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "Weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()},
}
ROUNDS = 5
SETTINGS: dict[str, Any] = {"max_tokens": 300, "seed": 5}


def run_rounds(ask: Callable[[list[Any]], tuple[Any, str, str]], result: Callable[[str, str], Any]) -> None:
    """Run five rounds in which the model must call a tool; check the arguments.

    Args:
        ask: Sends the messages; returns the reply as a message, the id of its only call, and the arguments.
        result: Returns the message with the result of a call.
    """
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for number in range(ROUNDS):
        reply, call_id, arguments = ask(messages)
        weather = Weather.model_validate_json(arguments)
        messages += [reply, result(call_id, json.dumps({"city": weather.city, "degrees": number}))]
    check(f"{ROUNDS} rounds of calls", len(messages), 1 + 2 * ROUNDS)
