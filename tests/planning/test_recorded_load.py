"""Recorded loads in both formats, and the errors of lines in neither."""

from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.planning.recorded_load import RecordedLoad, read_load
from tests.planning.load_files import request, session, written


def test_recorded_sessions_start_at_different_times_and_share_no_hashes(tmp_path: Path) -> None:
    first = session(request(0, 130, 5, range(3)), request(2000, 200, 7, range(4)))
    second = session(request(1.5, 64, 0, range(1)))
    load = read_load(written(tmp_path / "load.jsonl.gz", first, "", second))
    assert load.tokens_per_id == 64
    found = [(one.arrival_s, one.session, one.prompt_len, one.reply_len, one.content[0]) for one in load.requests]
    assert found == [(0.0, 0, 130, 5, (0, 0)), (901.5, 1, 64, 0, (1, 0)), (2000.0, 0, 200, 7, (0, 0))]


def test_sub_agent_times_are_relative_to_their_agent(tmp_path: Path) -> None:
    agent = {"t": 10.0, "type": "subagent", "requests": [request(0, 64, 1, range(9, 10)), request(4, 64, 1, range(1))]}
    load = read_load(written(tmp_path / "load.jsonl", session(request(0, 64, 1, range(1)), agent)))
    assert [(one.arrival_s, one.content) for one in load.requests] == [
        (0.0, ((0, 0),)),
        (10.0, ((0, 9),)),
        (14.0, ((0, 0),)),
    ]


def test_mooncake_hashes_are_shared_by_all_requests(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 512, "output_length": 6, "hash_ids": [0]},
    ]
    load = read_load(written(tmp_path / "load.jsonl", *lines))
    assert load.tokens_per_id == 512
    assert [(one.arrival_s, one.session, one.content) for one in load.requests] == [
        (1.0, 1, ((0, 0),)),
        (3.0, 0, ((0, 0), (0, 1))),
    ]


def test_start_times_are_spread_evenly_over_the_sessions_that_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "load.jsonl", *(session(request(0, 64, 1, range(1))) for _ in range(4)))

    def starts(load: RecordedLoad) -> list[float]:
        return [one.arrival_s for one in load.requests]

    assert starts(read_load(path, skip_sessions=1)) == [0.0, 600.0, 1200.0]
    assert starts(read_load(path, most_sessions=2)) == [0.0, 900.0]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: each line must be a JSON object, found list"),
        ({"prompt": "x"}, "line 2: a line must have the fields of a session"),
        ({"requests": []}, "line 2: the field 'block_size' is missing"),
        (session({"t": 0, "in": 5, "out": 1}), "line 2: the field 'hash_ids' is missing"),
        (session({"t": 0, "in": "5", "out": 1, "hash_ids": []}), "line 2: in must be an integer of at least 1"),
        (session({"t": -1, "in": 5, "out": 1, "hash_ids": []}), "line 2: t must be a finite, non-negative number"),
        ({"block_size": 64, "requests": 5}, "line 2: requests must be a list"),
        (session({"t": 0, "in": 5, "out": 1, "hash_ids": "0"}), "line 2: hash_ids must be a list of integers"),
        (session({"t": 0, "in": 64, "out": 1, "hash_ids": [None]}), "line 2: hash_ids must be a list of integers"),
        (session({"t": 0, "in": 64, "out": 2**24, "hash_ids": [0]}), "line 2: out must be an integer of at least 0"),
        ("[" * 100_000, "line 2: the JSON is nested too deeply"),
        (
            session(request(0, 640, 1, range(9))),
            "line 2: a prompt of 640 tokens must have at least 10 hash_ids, one per 64 tokens, found 9",
        ),
        (
            session(request(0, 640, 1, range(10)), block_size=32),
            "line 2: a prompt of 640 tokens must have at least 20 hash_ids, one per 32",
        ),
        (session(request(0, 32, 1, range(1)), block_size=32), "cover different numbers of tokens, \\[32, 64\\];"),
    ],
)
def test_invalid_line_is_named_in_the_error(line: Any, named: str, tmp_path: Path) -> None:
    path = written(tmp_path / "load.jsonl", session(request(0, 64, 1, range(1))), line)
    with pytest.raises(ValueError, match=named):
        read_load(path)


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = written(tmp_path / "load.jsonl", session(request(0, 64, 1, range(1))))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_load(path).requests) == 1


def test_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains only sessions without requests"):
        read_load(written(tmp_path / "load.jsonl", session(), session()))
    with pytest.raises(ValueError, match="contains no requests"):
        read_load(written(tmp_path / "load.jsonl", "", ""))
