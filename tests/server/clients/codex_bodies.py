"""Requests like the first and a later turn of Codex: same fields and item types, different texts."""

from typing import Any

HOSTED_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "inner", "parameters": {}}]},
    {"type": "local_shell"},
    {"type": "file_search", "vector_store_ids": ["v"]},
]
"""Tools that only OpenAI's servers can run."""
CODEX: dict[str, Any] = {
    "model": "scripted",
    "instructions": "You write code in a terminal.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you delete."}]},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Notes: none."},
                {"type": "input_text", "text": "Directory: /a"},
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which files are there?"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        *HOSTED_TOOLS,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-ab",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-installation": "0199"},
    "service_tier": "default",
}
LATER: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "I list the files."}],
        "content": None,
        "encrypted_content": "gAAAA",
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "name": "exec_command",
        "arguments": '{"cmd": "ls"}',
        "call_id": "c1",
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "c1", "output": "a.py b.py"},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA"},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "There are two.", "annotations": []}],
    },
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c2",
        "name": "patch",
        "input": '*** Begin\n+x = "1"\n*** End',
        "status": "completed",
    },
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "pwd"}', "call_id": "c3"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "Patched."},
    {
        "type": "function_call_output",
        "call_id": "c3",
        "output": [
            {"type": "input_text", "text": "/a"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        ],
    },
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c4",
        "status": "completed",
        "action": {"type": "exec", "command": ["bash", "-lc", "date"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "lsh_1", "call_id": "c4", "output": "Friday"},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "python lists"},
    },
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief from now on."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks. And now?"}]},
]
SHOWN = [
    *("You write code in a terminal.", "Ask before you delete.", "Notes: none.\nDirectory: /a"),
    *("Which files are there?",),
    *("a.py b.py", "There are two.", '*** Begin\n+x = "1"\n*** End', "Patched.", "bash", "Friday", "python lists"),
    *("/a\n[image omitted: this model reads text only]", "Be brief from now on.", "Thanks. And now?"),
]
