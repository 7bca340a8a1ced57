"""guidellm: 8 concurrent streams of synthetic chats and completions; no request fails and no token is missing."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import Served, check

STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 24, 64, 12
served = Served.of_arguments()


def benchmark(folder: str, form: str) -> dict:
    """Run one benchmark; return guidellm's report."""
    report = Path(folder, "report.json")
    flags = {
        "--backend": f"kind=openai_http,target={served.url},request_format={form},api_key={served.key}",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--tokenizer": f"kind=huggingface_auto,model={served.directory}",
        "--output": f"kind=json,path={report}",
    }
    words = [word for flag in flags.items() for word in flag]
    command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"guidellm {words}: {done.stdout[-2000:]} {done.stderr[-4000:]}")
    (one,) = json.loads(report.read_text())["benchmarks"]
    return one


for form in ("/v1/chat/completions", "/v1/completions"):
    with tempfile.TemporaryDirectory() as folder:
        found = benchmark(folder, form)
    totals = found["metrics"]["request_totals"]
    check(f"requests that failed ({form})", totals["errored"], 0)
    check(f"requests done ({form})", totals["successful"], REQUESTS)
    requests = found["requests"]["successful"]
    counted = {request["output_metrics"]["text_tokens"] for request in requests}
    check(f"tokens of each reply, as the server counts them ({form})", counted, {OUTPUT_TOKENS})
    fewest = min(request["info"]["timings"]["token_iterations"] for request in requests)
    check(f"replies come token by token ({form})", fewest > OUTPUT_TOKENS // 2)
