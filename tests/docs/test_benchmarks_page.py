"""The README of benchmarks/ names every script and every file of results."""

import re

from tests.docs.blocks import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"


def test_every_benchmark_script_and_result_is_named_in_the_documentation() -> None:
    text = (FOLDER / "README.md").read_text()
    scripts = {file.name for file in FOLDER.glob("*.py") if "__main__" in file.read_text()} - {"machine.py"}
    assert set(re.findall(r"benchmarks/(\w+\.py)", text)) == scripts
    tables = {file.name for file in (FOLDER / "results").glob("*.md")}
    assert set(re.findall(r"\(results/(\w+\.md)\)", text)) == tables
