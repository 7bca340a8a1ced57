"""pydantic-ai over OpenAI's chats and responses and Anthropic's messages: tools, formats, thinking, retries."""

import asyncio
import json

from agent_tools import OSLO, City
from anthropic import AsyncAnthropic
from checking import Served, call, check, replies, thought
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelHTTPError, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

served = Served.of_arguments()
openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0))
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0))
MODELS = {
    "chats": OpenAIChatModel(served.model, provider=openai),
    "responses": OpenAIResponsesModel(served.model, provider=openai),
    "messages": AnthropicModel(served.model, provider=anthropic),
}
SCRIPT = replies(
    thought("Two.") + "I look.\n" + call("weather", city="Bodø", days=2) + "\n" + call("weather", city="Rome", days=1),
    call("weather", city="nowhere", days=1),
    thought("Done.") + "Rome is the warmest.",
)
SETTINGS = {"max_tokens": 400, "parallel_tool_calls": True, "openai_reasoning_summary": "auto"}
seen = []


def weather(city: str, days: int) -> dict:
    """Return the weather in a city."""
    if city == "nowhere":
        raise ModelRetry("There is no such city.")
    seen.append((city, days))
    return {"city": city, "degrees": len(city)}


def thoughts(messages):
    return [part.content for message in messages for part in message.parts if isinstance(part, ThinkingPart)]


async def run(kind, model):
    agent = Agent(model, instructions="Be brief.", tools=[weather], model_settings=SETTINGS, retries=2)
    seen.clear()
    result = await agent.run(SCRIPT)
    found = result.output, sorted(seen)  # calls in one turn run concurrently
    check(f"turns with a retry ({kind})", found, ("Rome is the warmest.", [("Bodø", 2), ("Rome", 1)]))
    check(f"their thoughts ({kind})", thoughts(result.all_messages()), ["Two.", "Done."])
    check(f"their usage ({kind})", (result.usage.requests, result.usage.cache_read_tokens >= 64), (3, True))
    then = await agent.run(replies("Thanks too."), message_history=result.all_messages())
    check(f"a further question ({kind})", then.output, "Thanks too.")

    seen.clear()
    pieces = []
    script = replies(call("weather", city="Bodø", days=2), thought("Done.") + "It is cold there.")
    async with agent.run_stream(script) as stream:
        pieces += [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    check(f"a streamed answer ({kind})", ("".join(pieces), len(pieces) > 2), ("It is cold there.", True))
    check(f"its call ({kind})", seen, [("Bodø", 2)])

    for form, reply in ((ToolOutput(City), call("final_result", **json.loads(OSLO))), (NativeOutput(City), OSLO)):
        name = type(form).__name__
        if (kind, name) == ("messages", "NativeOutput"):
            continue  # the client offers this only for names of Anthropic's models
        former, script = Agent(model, output_type=form, model_settings=SETTINGS), replies(thought("A city.") + reply)
        check(f"an answer by {name} ({kind})", (await former.run(script)).output, City.model_validate_json(OSLO))
        async with former.run_stream(script) as stream:
            check(f"streamed by {name} ({kind})", await stream.get_output(), City.model_validate_json(OSLO))
    try:
        await Agent(model, model_settings={"temperature": 9}).run("Hello.")
    except ModelHTTPError as error:
        check(f"a wrong value ({kind})", (error.status_code, "temperature" in str(error.body)), (400, True))
    else:
        check(f"a wrong value is refused ({kind})", False)


async def main():
    for kind, model in MODELS.items():
        await run(kind, model)


asyncio.run(main())
