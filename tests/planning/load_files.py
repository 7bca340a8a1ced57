"""Files of recorded loads for tests."""

import gzip
import json
from pathlib import Path
from typing import Any


def written(path: Path, *lines: Any) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def session(*requests: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": "a", "block_size": block_size, "requests": list(requests)}


def request(t: float, prompt: int, reply: int, hashes: range) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": reply, "hash_ids": list(hashes)}
