"""`serve --record-load`: records contain no texts, and `plan` reads them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.planning.recorded_load import read_load
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.load_record import LoadFile, LoadLines, ServedRequest
from tests.server.front_end import FrontEnd, front_end, request_bytes, wait_until
from tests.server.running_server import RED, running_server

SEED = 20_261


def lines_of(*requests: ServedRequest, run_tokens: int = 64) -> list[dict[str, Any]]:
    lines = LoadLines(run_tokens)
    return [json.loads(lines.line(request)) for request in requests]


def served(prompt: list[int], tenant: str = "", reply_len: int = 1) -> ServedRequest:
    return ServedRequest(1.5, tenant, tuple(prompt), reply_len)


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    pairs = zip(one["hash_ids"], other["hash_ids"], strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one["hash_ids"]), len(other["hash_ids"])))


@pytest.mark.parametrize("run_tokens", [1, 64, 100])
def test_recorded_hashes_are_equal_exactly_up_to_the_common_prefix(run_tokens: int) -> None:
    rng = random.Random(SEED)
    for _ in range(30):
        shared = [rng.randrange(1000) for _ in range(rng.randrange(500))]
        first, second = shared + [1001] * rng.randrange(1, 200), shared + [1002] * rng.randrange(1, 200)
        one, other, foreign = lines_of(served(first), served(second), served(first, "b"), run_tokens=run_tokens)
        assert common(one, other) == len(shared) // run_tokens
        assert common(one, foreign) == 0
        assert len(one["hash_ids"]) == -(-len(first) // run_tokens)


def test_recorded_hashes_differ_between_server_runs() -> None:
    assert common(*(lines_of(served([5] * 200))[0] for _ in range(2))) == 0


def test_recorded_prompt_joins_a_session_only_when_it_extends_the_sessions_prompt() -> None:
    system, question, other = [1] * 200, [2] * 100, [3] * 100
    turns = [system + question, system + question + [4] * 90, system + question + [4] * 180]
    first, second, third, stranger, again = lines_of(*map(served, [*turns, system + other, turns[-1] + [5] * 10]))
    assert first["session"] == second["session"] == third["session"] == again["session"] != stranger["session"]


def test_records_appended_by_several_runs_load_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    first = {"timestamp": 1, "input_length": 1, "output_length": 0, "hash_ids": [0], "block_size": 64}
    path.write_text(json.dumps(first))
    for prompt in ([7] * 64, [8] * 130):
        record = LoadFile(path, 256)
        record.start()
        choice = SimpleNamespace(spec=SimpleNamespace(prompt=tuple(prompt)), reply=SimpleNamespace(token_ids=[1, 2]))
        job = SimpleNamespace(times=SimpleNamespace(arrived=0.0), tenant=SimpleNamespace(name="a"), choices=[choice])
        record.note(job)  # type: ignore[arg-type]
        record.close()
    load = read_load(path)
    assert load.tokens_per_id == 64 and [one.prompt_len for one in load.requests] == [1, 64, 130]
    assert len({one.session for one in load.requests}) == 3


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    return tmp_path / "load.jsonl"


def test_recorded_lines_contain_no_text_or_api_key(recording: Path) -> None:
    with front_end(load_record=LoadFile(recording, 64)) as server, server.client() as http:
        ask(server, {"prompt": "secret words " * 20, "max_tokens": 3, "n": 2}, Progress((97, 98, 99), end="length"))
        ask(server, {"prompt": [5, 6, 7], "max_tokens": 9, "stream": True}, Progress((97,), end="stop"))
        assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        connection = server.connection(request_bytes({"prompt": "left", "max_tokens": 9}))
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97, 98)))
        connection.close()
        wait_until(lambda: not server.backend.running)
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(260, 3), (260, 3), (3, 1), (4, 2)]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] and len(lines[0]["hash_ids"]) == 5
    assert "secret" not in recording.read_text() and RED not in recording.read_text()


def ask(server: FrontEnd, body: dict[str, Any], progress: Progress) -> None:
    connection = server.connection(request_bytes(body))
    wait_until(lambda: len(server.backend.running) == body.get("n", 1))
    server.backend.deliver(progress)
    assert b"200 OK" in connection.recv(65_536)
    wait_until(lambda: not server.server.app.num_open)
    connection.close()


def test_full_disk_stops_recording_but_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with front_end(load_record=LoadFile(Path("/dev/full"), 64)) as server:
        for _ in range(2):
            ask(server, {"prompt": "abc", "max_tokens": 1}, Progress((97,), end="length"))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["--record-load /dev/full"]


def test_plan_for_a_recorded_session_matches_the_server(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, skipped = ["def add(a, b):\n    return a + b\n\n" * 20, "class A:\n    x = 1\n" * 40], 0
    flags = ("--record-load", str(recording), "--block-size", "64", "--device", "cpu")
    with running_server(*flags) as server, server.client() as http:
        for turn in range(6):
            prompt = prompts[turn % 2]
            body = {"prompt": prompt, "max_tokens": 70, "temperature": 0, "ignore_eos": True}
            reply = http.post("/v1/completions", json=body).json()
            skipped += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            prompts[turn % 2] += reply["choices"][0]["text"] + f"\n# and then, {turn}\n" * 5
    assert skipped > 1000
    sizes = ("--block-size", "64", "--kv-bytes-per-token", "1024", "--state-bytes", "65536", "--cache-gb", "1")
    capsys.readouterr()
    assert main(["plan", "--trace", str(recording), *sizes, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["skipped_tokens"] == skipped
    assert row["share"] == row["unlimited_share"] == skipped / row["prompt_tokens"]


@pytest.mark.parametrize("path", ["{}/load.jsonl.gz", "{}/missing/load.jsonl", "{}"])
def test_unwritable_record_path_is_refused_at_startup(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path.format(tmp_path)
    assert main(["serve", "--random-model", "--port", "0", "--record-load", path]) == 2
    reason = "must not end in .gz" if path.endswith(".gz") else "cannot be written: "
    assert f"--record-load {path} {reason}" in capsys.readouterr().err
