"""The words of the field: names, docstrings, comments and messages that a newcomer understands at once.

Each entry of the tables below is a pattern and what to write instead. `CLEAN` lists what is checked;
`python tests/test_words.py FOLDER ...` prints the violations of any folder.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = ("benchmarks", "examples", "megatron_mamba_cache", "setup.py", "tests")
"""Folders and files whose Python is checked, subfolders included."""

MAX_TEST_NAME = 90

# In identifiers, split into lower-case words first: `launched_step` and `LaunchedStep` are the same two words.
NAMES = {
    r"(decode|prefill|align|replay|running|waiting|padding|dummy|drafting|live) rows?": "requests, or a batch of them",
    r"(advance|drop|admit|fill|launch) rows?|row (progress|ids?)": "request",
    r"(launched|early) steps?|(run|runs|ran|running) ahead": "overlapped step",
    r"rounded(?! (up|down))|8 bits": "quantized",
    r"(?<!in )places?": "index, slot, queue position: say of what",
    r"drawn|undrawn|draw (token|tokens|next)": "sampled, sample",
    r"bars|barred|(mask|masks|masked) off": "mask",
    r"brought|bring back|(look|looks) ahead": "restore, prefetch",
    r"watched drafts?": "shadow drafts",
    r"probes? (step|steps|draft|drafts)": "trial",
    r"worth": "priority",
    r"(lie|lies|lay|stand|stands|stood) (apart|behind|beside)|lying": "stagger, offset, or drop the word",
    r"behind": "after",
    r"beside|besides": "next to, alongside, overlapped with",
    r"told|tells|said": "reported",
    r"void(?! p)": "cancelled",
    r"(let|lets) go|(give|gives|gave|given) back": "release, free",
    r"faults?|faulty": "error",
    r"reckon\w*": "estimate",
    r"(hopper|product|shared memory) rings?": "pipeline stages",
    r"(grouped|dense|pair|uneven|shared|expert|experts) products?|product (buffer|sums|tiles|ring)": "GEMM, matmul",
    r"(rank|tensor|weight) parts?": "shard",
    r"un?settle[sd]?|settling": "fold, resolve",
    r"whom?|nobody|somebody": "name the request, the caller or the thread",
}

FIXED_NAMES = {
    "block_worth",
    "decode_rows",
    "max_prompt_tokens_beside_decode",
    "run_ahead",
    "state_worth",
    "tokens_per_decode_row",
}
"""Names of a metric, of settings, of a JSON field and of an earlier commit that a benchmark imports."""

# In docstrings, comments and messages; lines are joined first.
PHRASES = {
    r"(decode|prefill|running|prompt|padding|padded|drafting|waiting|queued|dummy) rows?": "requests",
    r"rows? (of|in) (a|the|this|that|each|one|its) (step|request|batch|launch)s?": "requests",
    r"rows? (that|which) (decode|draft|prefill|join|leave|end|start|resume|run)s?": "requests",
    r"row'?s'? (prompt|tokens?|drafts?|blocks?|live|draft|window|request|reply|text|ring)": "request's",
    r"(early|launched) steps?|(run|runs|ran|running) ahead": "overlapped step",
    r"rounded (\w+ )?(state|pool|cop|cache|weight)\w*|(state|cache)s? (is|are) rounded": "quantized",
    r"(?<!in )(?<!take )(?<!takes )(?<!one )places?": "index, slot, queue position: say of what",
    r"(draw|draws|drew|drawn) (a |the |its |next |no |one )*tokens?|tokens? (is|are) drawn": "sample",
    r"bars?|barred|(mask|masks|masked) off": "mask",
    r"(bring|brings|brought) (\w+ )?back|looks? ahead|look(ed|ing) ahead": "restore, prefetch",
    r"way to the host": "offload",
    r"watched drafts?": "shadow drafts",
    r"(?<!is )(?<!are )(?<!be )(?<!not )worth(?! (of|it))": "priority",
    r"lie|lies|lain|lying|lay(?! out)": "is, are; stagger, offset",
    r"(stands?|stood)(?! for| in\b|-in)": "is, are",
    r"behind": "after",
    r"beside": "next to, alongside, overlapped with",
    r"in (the|its|their) places? of": "instead of",
    r"told|tells|said": "reported, given, or drop the words",
    r"void": "cancelled",
    r"(let|lets|letting) (\w+ )?go|(give|gives|gave|given|giving) (\w+ )?back": "release, free, return",
    r"faults?|faulty": "error",
    r"reckon\w*": "estimate",
    r"(hopper|product|shared memory) rings?": "pipeline stages",
    r"un?settle[sd]?|settling": "fold, resolve",
    r"who|whom|whoever|nobody|somebody|nobody's|somebody's": "name the request, the caller or the thread",
}
# What is not meant by the phrases above.
EXEMPT = re.compile(
    r"\bin[- ]place\b|takes? place|decimal places?|segmentation faults?|page faults?|progress bars?|replay rings?"
    r"|logits rows?|looks? ahead or behind|no place for|`[^`]*`|\bstand-ins?\b",
    re.I,
)

REQUEST_TYPES = re.compile(r"RunningRequest|Candidate")
OPENINGS = re.compile(r"(Whether|What|Who|Those|See)\b")
ARGUMENT = re.compile(r"^\s+[\w, `*]+: (Whether|Who|Those|See)\b", re.M)


def compiled(table: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(rf"\b(?:{pattern})\b", re.I), instead) for pattern, instead in table.items()]


_NAMES, _PHRASES = compiled(NAMES), compiled(PHRASES)
_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def violations(path: Path, request_fields: frozenset[str]) -> Iterator[str]:
    """Yield the words of a module that a newcomer would not understand, each with its line and what to write."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = {
        *name_violations(path.stem, source),
        *prose_violations(comments(source)),
        *prose_violations([*docstrings(tree), *messages(tree)]),
        *opening_violations(docstrings(tree)),
        *request_violations(tree, request_fields),
        *long_name_violations(tree),
    }
    for line, message in sorted(found):
        yield f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {message}"


Found = Iterator[tuple[int, str]]


def name_violations(module: str, source: str) -> Found:
    """Yield identifiers that the table of names forbids, the module's own name included."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {(token.string, token.start[0]) for token in tokens if token.type == tokenize.NAME}
    for name, line in names | {(module, 1)}:
        for instead in better_names(name):
            yield line, f"{name}: write {instead}"


@cache
def better_names(name: str) -> tuple[str, ...]:
    """Return what to write instead of the words of an identifier that the table of names forbids."""
    words = "" if name in FIXED_NAMES else " ".join(_WORDS.findall(name)).lower()
    return tuple(instead for pattern, instead in _NAMES if pattern.search(words))


def prose_violations(texts: list[tuple[int, str]]) -> Found:
    """Yield phrases of docstrings, comments or messages that the table of phrases forbids."""
    for line, text in texts:
        text = EXEMPT.sub(lambda match: re.sub(r"\w", "_", match[0]), text)
        in_one_line = re.sub(r"\s", " ", text)
        for pattern, instead in _PHRASES:
            for match in pattern.finditer(in_one_line):
                yield line + text.count("\n", 0, match.start()), f"{match[0]!r}: write {instead}"


def opening_violations(texts: list[tuple[int, str]]) -> Found:
    """Yield docstrings and entries of arguments that begin with a question word or point elsewhere."""
    for line, text in texts:
        if match := OPENINGS.match(text):
            yield line, f"a docstring begins with {match[0]!r}: write what the caller gets"
        for match in ARGUMENT.finditer(text):
            yield line + text.count("\n", 0, match.start(1)), f"{match[1]!r} begins an argument: write 'True if'"


def request_violations(tree: ast.Module, request_fields: frozenset[str]) -> Found:
    """Yield requests that are called rows: by annotation, loop, or an attribute that only requests have."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                is_request = REQUEST_TYPES.search(ast.unparse(annotation)) is not None
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation):
                is_request = REQUEST_TYPES.search(ast.unparse(annotation)) is not None
            case (
                ast.For(target=ast.Name(id=name), iter=source)
                | ast.comprehension(target=ast.Name(id=name), iter=source)
            ):
                is_request = re.search(r"\brequests$", ast.unparse(source)) is not None
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=field) if name[-4:] != "rows":
                is_request = field in request_fields
            case ast.Attribute(value=ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)), attr=field):
                is_request = field in request_fields
            case _:
                continue
        if is_request and re.search(r"(^|_)rows?$", name):
            yield getattr(node, "lineno", 0) or node.target.lineno, f"{name} is a running request: write request"


def long_name_violations(tree: ast.Module) -> Found:
    """Yield names of tests that are too long to be properties."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_") and len(name) > MAX_TEST_NAME:
            yield node.lineno, f"a test's name of {len(name)} letters: write at most {MAX_TEST_NAME}"


def comments(source: str) -> list[tuple[int, str]]:
    """Return the comments with their lines; those of consecutive lines as one."""
    joined: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            if joined and line == joined[-1][0] + joined[-1][1].count("\n") + 1:
                joined[-1] = joined[-1][0], f"{joined[-1][1]}\n{text}"
            else:
                joined.append((line, text))
    return joined


def docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the docstrings with their lines, those of attributes included."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def messages(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the texts of errors, logs, warnings and helps, each with its line."""
    speaking = ("raise", "debug", "info", "warning", "error", "exception", "warn", "print")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            parents: list[ast.AST] = [node]
        elif isinstance(node, ast.Call) and called_name(node.func) in speaking:
            parents = list(node.args)
        elif isinstance(node, ast.keyword) and node.arg == "help":
            parents = [node.value]
        else:
            continue
        texts = [inner for parent in parents for inner in ast.walk(parent) if isinstance(inner, ast.Constant)]
        found += [(text.lineno, text.value) for text in texts if isinstance(text.value, str)]
    return found


def called_name(function: ast.expr) -> str:
    """Return the name of a called function or method, "" if it has none."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def python_files(name: str) -> list[Path]:
    return [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))


@cache
def fields_of_requests() -> frozenset[str]:
    """Return the attributes of a running request."""
    tree = ast.parse((ROOT / "megatron_mamba_cache/policy/requests.py").read_text(encoding="utf-8"))
    (record,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RunningRequest")
    fields = {node.target.id for node in record.body if isinstance(node, ast.AnnAssign)}
    return frozenset(fields | {node.name for node in record.body if isinstance(node, ast.FunctionDef)})


@pytest.mark.parametrize("clean", CLEAN)
def test_folder_contains_no_forbidden_words(clean: str) -> None:
    files = python_files(clean)
    assert files
    assert [violation for file in files for violation in violations(file, fields_of_requests())] == []


PLANTED = {
    "name": ("launched_step = 1", "overlapped step"),
    "name_of_a_class": ("class LaunchedStep: ...", "overlapped step"),
    "name_of_requests": ("advance_rows()", "request"),
    "annotated_request": ("def f(row: RunningRequest): ...", "request"),
    "annotated_requests": ("rows: Sequence[RunningRequest] = ()", "request"),
    "quoted_annotation": ("def f(row: 'Candidate'): ...", "request"),
    "loop_over_requests": ("for row in self.requests: g(row)", "request"),
    "comprehension_over_requests": ("x = [g(row) for row in requests]", "request"),
    "attribute_of_an_attribute": ("self.row.prompt_len", "request"),
    "attribute_of_a_request": ("for row in x:\n    row.prompt_len", "request"),
    "attribute_of_one_of_some_requests": ("f(self.rows[0].prompt_len)", "request"),
    "comment": ("# The tokens lie apart.", "stagger"),
    "comment_of_two_lines": ("# A step that is run\n# by rows of a\n# step.", "requests"),
    "docstring": ('def f():\n    """Return a row\'s tokens."""', "request's"),
    "docstring_of_two_lines": ('x = 1\n"""A request\nwaits behind it."""', "after"),
    "message": ('raise ValueError(f"told {x}")', "reported"),
    "logged": ('logger.warning("%d are behind", x)', "after"),
    "help": ('f(help="what nobody reads")', "name the request"),
    "opening": ('"""Whether it is free."""', "what the caller gets"),
    "pointer": ('def f():\n    """See `Base.f`."""', "what the caller gets"),
    "argument": ('def f(x):\n    """Do it.\n\n    Args:\n        x: Whether to do it.\n    """', "True if"),
    "long_name_of_a_test": (f"def test_{'x' * 90}(): ...", "at most 90"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_forbidden_word_is_found(planted: str, tmp_path: Path) -> None:
    source, instead = PLANTED[planted]
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    found = list(violations(tmp_path / "module.py", frozenset({"prompt_len"})))
    assert found and all(instead in violation for violation in found)


def test_text_without_forbidden_words_passes(tmp_path: Path) -> None:
    source = (
        '"""Fold the replay ring in place."""\n'
        "def f(row, rows, request: RunningRequest):\n"
        '    """Return the sum of each row of `told`."""\n'
        "    return row.sum() + rows[0].sum() + request.prompt_len\n"
    )
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert list(violations(tmp_path / "module.py", frozenset({"prompt_len"}))) == []


if __name__ == "__main__":
    for file in (file for name in sys.argv[1:] for file in python_files(name)):
        sys.stdout.writelines(f"{violation}\n" for violation in violations(file, fields_of_requests()))
