"""instructor: retries after a wrong answer, over chats and Anthropic's messages; lists; responses."""

import json

import anthropic
import instructor
import openai
from agent_tools import OSLO
from checking import Served, call, check, replies, thought
from pydantic import BaseModel, field_validator

served = Served.of_arguments()


class City(BaseModel):
    """City in an answer."""

    name: str
    size: str
    districts: list[int]

    @field_validator("name")
    @classmethod
    def is_oslo(cls, value: str) -> str:
        """Check a condition that a JSON schema cannot express."""
        if value != "Oslo":
            raise ValueError("it has to be the capital of Norway")
        return value


RIGHT = json.loads(OSLO)
WRONG = RIGHT | {"name": "Bergen"}
openai_client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)
anthropic_client = anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0)
MADE = {
    "OpenAI": (instructor.from_openai, openai_client),
    "Anthropic": (instructor.from_anthropic, anthropic_client),
}


def as_call(city):
    return call("City", **city)


def as_text(city):
    return json.dumps(city)


def as_block(city):
    return f"Here it is.\n\n```json\n{json.dumps(city)}\n```"


MODES = [
    ("OpenAI", "TOOLS", as_call),
    ("OpenAI", "TOOLS_STRICT", as_call),
    ("OpenAI", "JSON_SCHEMA", as_text),
    ("OpenAI", "JSON", as_text),
    ("OpenAI", "MD_JSON", as_block),
    ("Anthropic", "ANTHROPIC_TOOLS", as_call),
]
for side, mode, write in MODES:
    make, plain = MADE[side]
    client = make(plain, mode=instructor.Mode[mode], model=served.model)
    tries = []
    client.on("parse:error", lambda *_, tries=tries, **__: tries.append(1))
    script = replies(thought("Hm.") + write(WRONG), write(RIGHT))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": script}]
    found = client.create(response_model=City, messages=messages, max_retries=2, max_tokens=400)
    check(f"a right answer after a wrong one ({mode})", (found.model_dump(), len(tries)), (RIGHT, 1))

client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS, model=served.model)
script = replies(call("IterableCity", tasks=[RIGHT, RIGHT]))
cities = client.create_iterable(response_model=City, messages=[{"role": "user", "content": script}], max_tokens=400)
check("a list that is streamed", [city.model_dump() for city in cities], [RIGHT, RIGHT])
for side, mode, write, limit in (  # these modes omit the wrong answer from the retry
    ("OpenAI", "RESPONSES_TOOLS", as_call, {"max_output_tokens": 400}),
    ("Anthropic", "ANTHROPIC_JSON", as_text, {"max_tokens": 400}),
):
    make, plain = MADE[side]
    client = make(plain, mode=instructor.Mode[mode], model=served.model)
    messages = [{"role": "user", "content": replies(thought("Hm.") + write(RIGHT))}]
    found = client.create(response_model=City, messages=messages, max_retries=0, **limit)
    check(f"an answer ({mode})", found.model_dump(), RIGHT)
