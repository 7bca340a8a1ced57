"""Execute Python blocks one after another in one process: a JSON object a line in, one a line out.

Each block is `__main__` in its own namespace, unless it continues the one before it.
"""

import contextlib
import io
import json
import os
import sys
import traceback


def main() -> None:
    """Execute blocks until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries write past sys.stdout is not a reply
    sys.argv = [""]
    sys.path.insert(0, "")
    namespace: dict[str, object] = {}
    for line in sys.stdin:
        block = json.loads(line)
        if not block["continues"]:
            namespace = {"__name__": "__main__"}
        printed, error = io.StringIO(), ""
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(block["text"], block["name"], "exec"), namespace)
            except BaseException:
                error = traceback.format_exc()
        print(json.dumps({"printed": printed.getvalue(), "error": error}), file=replies, flush=True)


if __name__ == "__main__":
    main()
