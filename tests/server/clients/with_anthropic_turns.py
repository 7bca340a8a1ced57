"""anthropic in several scripted turns: instructions in blocks, thinking, tools, results, events, usage, errors."""

import anthropic
from checking import Served, call, check, replies, thought

served = Served.of_arguments()
client = anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0)
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}},
]
BASE = {
    "model": served.model,
    "system": [
        {"type": "text", "text": "You help in a terminal."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
    ],
    "tools": TOOLS,
}
SETTINGS = {
    "max_tokens": 2048,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["never"],
    "service_tier": "auto",
}
SCRIPT = replies(
    thought("Two cities.") + "I look.\n" + call("weather", city="Bodø", days=2) + "\n" + call("clock"),
    thought("One is left.") + call("weather", city="Oslo", days=3),
    "Rome is the warmest.",
)
EVENTS = {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_stop"}


def created(messages):
    return client.messages.create(messages=messages, **BASE, **SETTINGS)


def streamed(messages):
    with client.messages.stream(messages=messages, **BASE, **SETTINGS) as stream:
        kinds = [event.type for event in stream]
        check(
            "a stream of events", (kinds[0], kinds[-1], set(kinds) >= EVENTS), ("message_start", "message_stop", True)
        )
        return stream.get_final_message()


def shown(block):
    return {"thinking": "thinking", "text": "text", "tool_use": "input"}[block.type]


def result(block):
    content = [{"type": "text", "text": "5 degrees"}, {"type": "text", "text": "rain"}]
    if block.name == "clock":
        return {"type": "tool_result", "tool_use_id": block.id, "is_error": True, "content": "no clock"}
    return {"type": "tool_result", "tool_use_id": block.id, "content": content}


for ask in (created, streamed):
    name = ask.__name__
    messages = [{"role": "user", "content": [{"type": "text", "text": SCRIPT, "cache_control": {"type": "ephemeral"}}]}]
    seen, usages = [], []
    while not seen or seen[-1][1] == "tool_use":
        counted = client.messages.count_tokens(messages=messages, **BASE).input_tokens
        message = ask(messages)
        usage = message.usage
        total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        check(f"turn {len(seen) + 1} has the tokens that were counted ({name})", total, counted)
        seen.append(([getattr(block, shown(block)) for block in message.content], message.stop_reason))
        usages.append(usage)
        messages.append({"role": "assistant", "content": message.content})
        results = [result(block) for block in message.content if block.type == "tool_use"]
        messages.append({"role": "user", "content": results})
    wanted = [
        (["Two cities.", "I look.", {"city": "Bodø", "days": 2}, {}], "tool_use"),
        (["One is left.", {"city": "Oslo", "days": 3}], "tool_use"),
        (["Rome is the warmest."], "end_turn"),
    ]
    check(f"the turns ({name})", seen, wanted)
    check(f"later turns are cached ({name})", all(usage.cache_read_input_tokens >= 64 for usage in usages[1:]))

messages[-1:] = [{"role": "user", "content": [{"type": "text", "text": replies("And now?")}]}]
check("a further question", created(messages).content[-1].text, "And now?")
plain = {
    "model": served.model,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": replies("One two three four")}],
}
check("an end by length", client.messages.create(**plain).stop_reason, "max_tokens")
stopped = client.messages.create(**{**plain, "max_tokens": 50, "stop_sequences": [" three"]})
found = (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence)
check("an end by a stop sequence", found, ("One two", "stop_sequence", " three"))


def error_of(act, **fields):
    try:
        act(**{**plain, **fields})
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.body["error"]["type"]
    return None


check("another model", error_of(client.messages.create, model="absent"), ("NotFoundError", "not_found_error"))
for wrong in ({"extra_body": {"temperature": 9}}, {"messages": []}, {"extra_body": {"temprature": 1}}):
    found = error_of(client.messages.create, **wrong)
    check(f"a wrong request ({', '.join(wrong)})", found, ("BadRequestError", "invalid_request_error"))
stranger = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
found = error_of(stranger.messages.create)
check("an unknown key", served.key == "no-key" or found, found and ("AuthenticationError", "authentication_error"))
check("the models", [model.id for model in client.models.list()], [served.model])
