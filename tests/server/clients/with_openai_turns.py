"""openai in several scripted turns, over chats and responses: reasoning, tools, fields that agents send."""

import json

import openai
from checking import Served, call, check, replies, thought

served = Served.of_arguments()
client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)
MODEL = served.model
FUNCTION = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCRIPT = replies(
    thought("Two cities.")
    + "I look.\n"
    + call("weather", city="Bodø", days=2)
    + "\n"
    + call("weather", city="Rome", days=1),
    thought("One is left.") + call("weather", city="Oslo", days=3),
    "Rome is the warmest.",
)
COMMON = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "metadata": {"purpose": "a test"},
    "user": "me",
    "seed": 1,
}
CHAT = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "store": False,
    "service_tier": "auto",
    "max_completion_tokens": 400,
    "reasoning_effort": "low",
    "frequency_penalty": 0,
    **COMMON,
}


def result(call_id, arguments):
    return json.dumps({"degrees": len(json.loads(arguments)["city"]), "id": call_id[:3]})


def created(messages):
    return client.chat.completions.create(model=MODEL, messages=messages, **CHAT)


def streamed(messages):
    with client.chat.completions.stream(
        model=MODEL, messages=messages, stream_options={"include_usage": True}, **CHAT
    ) as stream:
        return stream.get_final_completion()


for ask in (created, streamed):
    name = ask.__name__
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": SCRIPT}]
    seen, usages = [], []
    while not seen or seen[-1][1]:
        chat = ask(messages)
        message, usage = chat.choices[0].message, chat.usage
        calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]
        seen.append(
            (message.content, calls, getattr(message, "reasoning_content", None), chat.choices[0].finish_reason)
        )
        usages.append(usage)
        messages.append(message)
        for one in message.tool_calls or []:
            text = result(one.id, one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": [{"type": "text", "text": text}]})
    wanted = [("weather", {"city": "Bodø", "days": 2}), ("weather", {"city": "Rome", "days": 1})]
    check(f"two calls at once ({name})", seen[0], ("I look.", wanted, "Two cities.", "tool_calls"))
    wanted = [("weather", {"city": "Oslo", "days": 3})]
    check(f"a call ({name})", (seen[1][0] or "", *seen[1][1:]), ("", wanted, "One is left.", "tool_calls"))
    check(f"the answer ({name})", seen[2], ("Rome is the warmest.", [], None, "stop"))
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    check(f"later turns are cached ({name})", cached[1] >= 64 and cached[2] >= cached[1])
    check(f"usage adds up ({name})", {u.total_tokens - u.prompt_tokens - u.completion_tokens for u in usages}, {0})

# The next user message. Earlier turns stay in the history, and instructions also occur between turns.
messages += [{"role": "system", "content": "In capitals."}, {"role": "user", "content": replies("AND NOW?")}]
check("a further question", created(messages).choices[0].message.content, "AND NOW?")

RESPONSE = {
    "tools": [{"type": "function", **FUNCTION}],
    "instructions": "Be brief.",
    "max_output_tokens": 400,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "truncation": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    **{name: value for name, value in COMMON.items() if name != "seed"},
}


def answered(**fields):
    return client.responses.create(model=MODEL, **RESPONSE, **fields)


def answered_streamed(**fields):
    with client.responses.stream(model=MODEL, **RESPONSE, **fields) as stream:
        kinds = [event.type for event in stream]
        check("a stream of events", (kinds[0], kinds[-1]), ("response.created", "response.completed"))
        return stream.get_final_response()


def outputs(response):
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": result(item.call_id, item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]


for ask in (answered, answered_streamed):
    name = ask.__name__
    kept = [ask(input=SCRIPT, store=True)]  # turns linked by response ids
    while outputs(kept[-1]):
        kept.append(ask(input=outputs(kept[-1]), previous_response_id=kept[-1].id, store=True))
    kinds = [[item.type for item in response.output] for response in kept]
    wanted = ["reasoning", "message", "function_call", "function_call"], ["reasoning", "function_call"], ["message"]
    check(f"responses that follow each other ({name})", kinds, list(wanted))
    check(f"the last text ({name})", kept[-1].output_text, "Rome is the warmest.")
    check(f"cached tokens ({name})", kept[-1].usage.input_tokens_details.cached_tokens >= 64)
    history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SCRIPT}]}]
    texts = []  # turns that send all items; no response is stored
    for _ in range(3):
        response = ask(input=history, store=False)
        history += [*response.output, *outputs(response)]
        texts.append(response.output_text)
    check(f"a history of items ({name})", texts, ["I look.", "", "Rome is the warmest."])
check("a response that is kept", client.responses.retrieve(kept[-1].id).output_text, "Rome is the warmest.")
client.responses.delete(kept[-1].id)


def error_of(act, **fields):
    try:
        act(**fields)
    except openai.APIError as error:
        return type(error).__name__, error.param
    return None


for act, given in (
    (client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}]}),
    (client.responses.create, {"input": "x"}),
):
    check("another model", error_of(act, model="absent", **given), ("NotFoundError", "model"))
    check("a wrong value", error_of(act, model=MODEL, temperature=9, **given), ("BadRequestError", "temperature"))
    wrong = {"extra_body": {"temprature": 1}}
    check("an unknown field", error_of(act, model=MODEL, **wrong, **given), ("BadRequestError", "temprature"))
gone = error_of(client.responses.create, model=MODEL, input="x", previous_response_id=kept[-1].id)
check("a response that was deleted", gone, ("BadRequestError", "previous_response_id"))
