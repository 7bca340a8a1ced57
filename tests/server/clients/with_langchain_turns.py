"""LangChain's agents over ChatOpenAI (chats, responses) and ChatAnthropic: rounds, streams, formats, errors."""

from typing import Literal

import anthropic
import openai
from agent_tools import OSLO, City
from checking import Served, call, check, replies, thought
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

served = Served.of_arguments()
OPENAI = {"model": served.model, "base_url": f"{served.url}/v1", "api_key": served.key, "max_retries": 0}
ANTHROPIC = {"model_name": served.model, "base_url": served.url, "api_key": served.key, "max_retries": 0}
MODELS = {
    "chats": lambda **settings: ChatOpenAI(**OPENAI, max_tokens=400, **settings),
    "responses": lambda **settings: ChatOpenAI(**OPENAI, max_tokens=400, use_responses_api=True, **settings),
    "messages": lambda **settings: ChatAnthropic(**ANTHROPIC, max_tokens_to_sample=400, **settings),
}
SCRIPT = replies(
    thought("Two.") + "I look.\n" + call("weather", city="Bodø", days=2) + "\n" + call("weather", city="Rome", days=1),
    thought("One.") + call("weather", city="Oslo", days=3),
    "Rome is the warmest.",
)
CALLS = [("Bodø", 2), ("Rome", 1), ("Oslo", 3)]
seen = []


@tool
def weather(city: Literal["Bodø", "Kyiv", "Oslo", "Rome"], days: int) -> dict:
    """Return the weather in a city."""
    seen.append((city, days))
    return {"city": city, "degrees": len(city)}


for kind, make in MODELS.items():
    model = make()
    agent = create_agent(model, tools=[weather], system_prompt="Be brief.")
    seen.clear()
    messages = agent.invoke({"messages": [HumanMessage(SCRIPT)]})["messages"]
    check(f"an agent's answer ({kind})", (messages[-1].text, sorted(seen)), ("Rome is the warmest.", sorted(CALLS)))
    turns = [message for message in messages if isinstance(message, AIMessage)]
    check(f"its first text ({kind})", turns[0].text, "I look.")
    cached = [turn.usage_metadata["input_token_details"].get("cache_read", 0) for turn in turns]
    check(f"its later turns are cached ({kind})", min(cached[1:]) >= 64)
    seen.clear()
    question = {"messages": [*messages, HumanMessage(replies(call("weather", city="Kyiv", days=1), "Mild."))]}
    chunks = [chunk for chunk, _ in agent.stream(question, stream_mode="messages")]
    streamed = "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk")
    check(f"a further question, streamed ({kind})", (streamed, seen), ("Mild.", [("Kyiv", 1)]))
    middle = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hello!"), HumanMessage(replies("Yes."))]
    check(f"a conversation ({kind})", model.invoke(middle).text, "Yes.")
    formed = model.with_structured_output(City, method="json_schema")
    check(f"with_structured_output ({kind})", formed.invoke(replies(OSLO)), City.model_validate_json(OSLO))
    forced = model.bind_tools([weather], tool_choice="weather").invoke(replies(call("weather", city="Rome", days=1)))
    check(f"a call that has to be made ({kind})", forced.tool_calls[0]["args"], {"city": "Rome", "days": 1})
    try:
        make(temperature=9).invoke("Hello.")
    except (openai.BadRequestError, anthropic.BadRequestError) as error:
        check(f"a wrong value ({kind})", "temperature" in str(error))
    else:
        check(f"a wrong value is refused ({kind})", False)

chat = MODELS["messages"](thinking={"type": "enabled", "budget_tokens": 1024})
chat.max_tokens = 2048
reply = chat.invoke([HumanMessage(replies(thought("Hm.") + "Yes."))])
blocks = [(block["type"], block.get("thinking") or block.get("text")) for block in reply.content]
check("thinking (messages)", blocks, [("thinking", "Hm."), ("text", "Yes.")])
counted = chat.get_num_tokens_from_messages([HumanMessage("Hello.")])
check(
    "counted tokens (messages)",
    counted,
    MODELS["messages"]().invoke("Hello.", max_tokens=1).usage_metadata["input_tokens"],
)
