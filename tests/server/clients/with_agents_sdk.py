"""openai-agents: several tool rounds over chats and responses, with streaming, sessions, handoffs and formats."""

import asyncio
from typing import Literal

from agent_tools import OSLO, City
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from checking import Served, call, check, replies, thought
from openai import AsyncOpenAI, BadRequestError
from openai.types.shared import Reasoning

set_tracing_disabled(True)
served = Served.of_arguments()
client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)
seen = []


@function_tool
def weather(city: Literal["Bodø", "Oslo", "Rome"], days: int = 1) -> dict:
    """Return the weather in a city.

    Args:
        city: Name of the city.
        days: Number of days in the forecast.
    """
    seen.append((city, days))
    return {"city": city, "degrees": len(city)}


@function_tool
async def broken(reason: str) -> str:
    """Raise an error."""
    raise ValueError(reason)


SCRIPT = replies(
    thought("Two.") + "I look.\n" + call("weather", city="Bodø", days=2) + "\n" + call("weather", city="Rome", days=1),
    call("broken", reason="no network"),
    call("weather", city="Oslo", days=3),
    "Rome is the warmest.",
)
CALLS = [("Bodø", 2), ("Rome", 1), ("Oslo", 3)]
MODELS = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
TURNS = ["reasoning_item", "message_output_item", *["tool_call_item"] * 2, *["tool_call_output_item"] * 2]


async def run(kind):
    model = MODELS[kind](model=served.model, openai_client=client)
    settings = ModelSettings(parallel_tool_calls=True, store=True, reasoning=Reasoning(effort="low"), max_tokens=300)
    agent = Agent("Helper", instructions="Be brief.", model=model, model_settings=settings, tools=[weather, broken])
    seen.clear()
    result = await Runner.run(agent, SCRIPT)
    check(f"four turns ({kind})", (result.final_output, seen), ("Rome is the warmest.", CALLS))
    check(f"the first turn's items ({kind})", sorted(item.type for item in result.new_items[:6]), sorted(TURNS))
    usage = result.context_wrapper.usage
    check(f"their usage ({kind})", (usage.requests, usage.input_tokens_details.cached_tokens >= 64), (4, True))

    seen.clear()
    session = SQLiteSession(kind)  # in memory
    stream = Runner.run_streamed(agent, SCRIPT, session=session)
    kinds = {event.data.type async for event in stream.stream_events() if event.type == "raw_response_event"}
    check(f"streamed turns ({kind})", (stream.final_output, seen), ("Rome is the warmest.", CALLS))
    check(f"their events ({kind})", {"response.output_text.delta", "response.completed"} <= kinds)
    then = await Runner.run(agent, replies("Thanks too."), session=session)
    check(f"the session's next question ({kind})", then.final_output, "Thanks too.")

    expert = Agent("Expert", instructions="Know it.", handoff_description="Knows it.", model=model)
    desk = Agent("Desk", instructions="Pass on.", model=model, handoffs=[handoff(expert)])
    passed = await Runner.run(desk, replies(call("transfer_to_expert"), "I know."))
    check(f"a handoff ({kind})", (passed.final_output, passed.last_agent.name), ("I know.", "Expert"))

    formed = Agent("Former", model=model, model_settings=ModelSettings(max_tokens=300), output_type=City)
    answer = await Runner.run(formed, replies(thought("A city.") + OSLO))
    check(f"an answer of a form ({kind})", answer.final_output, City.model_validate_json(OSLO))
    forced = ModelSettings(tool_choice="weather", temperature=0, max_tokens=300)
    caller = Agent(
        "Caller", model=model, model_settings=forced, tools=[weather], tool_use_behavior="stop_on_first_tool"
    )
    seen.clear()
    await Runner.run(caller, replies(call("weather", city="Rome", days=1)))
    check(f"a call that has to be made ({kind})", seen, [("Rome", 1)])
    wrong = Agent("Wrong", model=model, model_settings=ModelSettings(temperature=9))
    try:
        await Runner.run(wrong, "Hello.")
    except BadRequestError as error:
        check(f"a wrong value ({kind})", error.param, "temperature")
    else:
        check(f"a wrong value is refused ({kind})", False)


async def chained():
    model = OpenAIResponsesModel(model=served.model, openai_client=client)
    agent = Agent("Helper", instructions="Be brief.", model=model, tools=[weather])
    first = await Runner.run(
        agent, replies(call("weather", city="Bodø", days=1), "Cold."), auto_previous_response_id=True
    )
    then = await Runner.run(agent, replies("Still cold."), previous_response_id=first.last_response_id)
    check("runs that follow each other by response", (first.final_output, then.final_output), ("Cold.", "Still cold."))


async def main():
    for kind in MODELS:
        await run(kind)
    await chained()


asyncio.run(main())
