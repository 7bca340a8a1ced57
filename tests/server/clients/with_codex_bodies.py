"""Codex's requests over plain HTTP: a first turn with results, a later turn, and a summary of a long history."""

import json
import urllib.error
import urllib.request
from typing import Any

from checking import Served, call, check, replies, thought
from codex_bodies import CODEX, LATER

served = Served.of_arguments()
LINES = "\n".join(f"{number:4} x = [{number}, {number + 1}]" for number in range(150))


def events_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed response."""
    headers = {
        "Authorization": f"Bearer {served.key}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
    }
    request = urllib.request.Request(f"{served.url}/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        lines = reply.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def turn(history: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the items that Codex would keep from the events of a turn, and the usage."""
    events = events_of(CODEX | {"model": served.model, "input": history} | fields)
    check(
        "a turn begins and is completed",
        (events[0]["type"], events[-1]["type"]),
        ("response.created", "response.completed"),
    )
    response, items = events[-1]["response"], [e["item"] for e in events if e["type"] == "response.output_item.done"]
    check("its items are those of its end", items, response["output"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    check(
        "its text is streamed",
        deltas,
        "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"]),
    )
    shown = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta")
    check("its reasoning is shown", shown, "".join(i["summary"][0]["text"] for i in items if i["type"] == "reasoning"))
    return items, response["usage"]


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def results(items: list[dict[str, Any]], output: str) -> list[dict[str, Any]]:
    """Return a result item for each call among the items."""
    calls = [item for item in items if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": one["call_id"], "output": output} for one in calls]


script = replies(
    thought("I list them.") + "I look.\n" + call("exec_command", cmd="ls <dir>"),
    thought("I read one.") + call("exec_command", cmd="cat a.py"),
    "There is one list a line.",
)
history = [*CODEX["input"][:-1], message("user", script)]
kinds, usages = [], []
for output in ("a.py b.py", LINES, ""):
    items, usage = turn(history)
    kinds.append([item["type"] for item in items])
    usages.append(usage)
    history += [*items, *results(items, output)]
check("the turns", kinds, [["reasoning", "message", "function_call"], ["reasoning", "function_call"], ["message"]])
check("the first call", json.loads(history[len(CODEX["input"]) + 2]["arguments"]), {"cmd": "ls <dir>"})
cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
check(
    "later turns are cached",
    all(now >= then["input_tokens"] - 128 for now, then in zip(cached[1:], usages[:-1], strict=True)),
)
check("usage adds up", [u["total_tokens"] - u["input_tokens"] - u["output_tokens"] for u in usages], [0, 0, 0])

later = [*history, *LATER[:-1], message("user", replies("All kinds of items were read."))]
items, _ = turn(later)
check("a later turn", items[0]["content"][0]["text"], "All kinds of items were read.")

long = [*later[:-1]]
for number in range(6):
    one = {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "cat a.py"}', "call_id": f"l{number}"}
    long += [one, *results([one], LINES)]
summing = message("user", "Sum up what was done so that another can go on.\n" + replies("Two files were read."))
items, usage = turn([*long, summing], tools=[], parallel_tool_calls=False)
check(
    "a summary of a long history",
    (items[0]["content"][0]["text"], usage["input_tokens"] > 10_000),
    ("Two files were read.", True),
)
compact = [*CODEX["input"][:2], message("user", "Summary: Two files were read."), message("user", replies("I go on."))]
items, _ = turn(compact)
check("a turn after it", items[0]["content"][0]["text"], "I go on.")

try:
    events_of(CODEX | {"model": "absent"})
except urllib.error.HTTPError as error:
    check("another model", (error.code, json.load(error)["error"]["code"]), (404, "model_not_found"))
else:
    check("another model is not found", False)
