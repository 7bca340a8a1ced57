"""instructor over openai: TOOLS, TOOLS_STRICT, JSON_SCHEMA and JSON, whole, streamed and asynchronous."""

import asyncio

import instructor
import openai
from agent_tools import QUESTION, SETTINGS, City
from checking import Served, check

served = Served.of_arguments()
WHERE = {"base_url": f"{served.url}/v1", "api_key": served.key, "max_retries": 0}
ASKED = {"model": served.model, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0, **SETTINGS}

for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    client = instructor.from_openai(openai.OpenAI(**WHERE), mode=instructor.Mode[mode])
    found, completion = client.chat.completions.create_with_completion(response_model=City, **ASKED)
    check(f"{mode}: a city", isinstance(found, City))
    again = client.create(response_model=City, **ASKED)
    check(f"{mode}: the same for the same seed", again.model_dump(), found.model_dump())

client = instructor.from_openai(openai.OpenAI(**WHERE), mode=instructor.Mode.TOOLS)
parts = list(client.create_partial(response_model=City, **ASKED))
check("a city that is streamed", isinstance(City.model_validate(parts[-1].model_dump()), City))


async def asynchronous():
    client = instructor.from_openai(openai.AsyncOpenAI(**WHERE), mode=instructor.Mode.JSON_SCHEMA)
    return await client.create(response_model=City, **ASKED)


check("an asynchronous one", isinstance(asyncio.run(asynchronous()), City))
