"""Measure the held-out bits per byte of a model of Python source, such as the one that ships with the package.

The text is the standard library of the running CPython. A hash of each file's path assigns it to a split, so every
version of CPython holds out the same files.
"""

import argparse
import hashlib
import lzma
import math
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SHIPPED_MODEL = Path(__file__).resolve().parent.parent / "megatron_mamba_cache" / "models" / "small_python_model"
# Upper bounds of the splits within the hash's range; the rest is for training.
PARTS = {"held-out": 0.03, "validation": 0.05}
# Tables rather than code, or generated when Python is built.
NO_SOURCE = ("encodings/", "pydoc_data/", "html/entities.py", "stringprep.py", "_sysconfigdata", "config-")
THIRD_PARTY = ("site-packages/", "dist-packages/")
SUITE_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the standard library; `path` is relative to the library, with forward slashes."""

    path: str
    text: str

    @property
    def document(self) -> str:
        """Return the text that the model reads: a line that names the file, then the file."""
        return f"# file: {self.path}\n{self.text}"

    @property
    def part(self) -> str:
        """Return "held-out", "validation" or "training"."""
        position = int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:4], "big") / 2**32
        return next((name for name, end in PARTS.items() if position < end), "training")

    @property
    def in_test_suite(self) -> bool:
        """True if the file is one of CPython's own tests, which not every installation has."""
        return not SUITE_FOLDERS.isdisjoint(self.path.split("/")[:-1])


@dataclass(frozen=True, slots=True)
class Score:
    """The bits that a model needs for `size_bytes` bytes of text, with those of xz for comparison."""

    bits: float
    xz_bits: int
    size_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.size_bytes

    @property
    def xz_bits_per_byte(self) -> float:
        return self.xz_bits / self.size_bytes


def main() -> None:
    """Print the bits per byte of a model directory and, for comparison, of xz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, help="Hugging Face directory; default: the shipped"
    )
    parser.add_argument("--stdlib", type=Path, default=installed_library(), help="default: the running Python's")
    parser.add_argument("--limit-bytes", type=int, default=sys.maxsize, help="whole files until there are so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).to(flags.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    sources = first_bytes(library_part(flags.stdlib, "held-out"), flags.limit_bytes)
    score = measure(model, tokenizer, sources)
    print(
        f"{score.bits_per_byte:.4f} bits per byte over {score.size_bytes:,} bytes in {len(sources)} held-out files"
        f" (xz: {score.xz_bits_per_byte:.4f}); library of CPython {library_version(flags.stdlib)}"
    )


def installed_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_version(stdlib: Path) -> str:
    """Return the CPython version of a library folder; for another Python's folder, the version in its name."""
    if stdlib == installed_library():
        return platform.python_version()
    return stdlib.name.removeprefix("python") if stdlib.name.startswith("python") else "unknown version"


def library_sources(stdlib: Path) -> list[Source]:
    """Read every `.py` file of UTF-8 source code, sorted by path.

    Raises:
        FileNotFoundError: If the folder has no such file.
    """
    sources = []
    for file in sorted(stdlib.rglob("*.py"), key=lambda found: found.relative_to(stdlib).parts):
        path = file.relative_to(stdlib).as_posix()
        if path.startswith((*NO_SOURCE, *THIRD_PARTY)):
            continue
        try:
            sources.append(Source(path, file.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a few tests deliberately use other encodings
    if not sources:
        raise FileNotFoundError(f"need .py files, found none in {stdlib}; name a standard library with --stdlib")
    return sources


def library_part(stdlib: Path, part: str) -> list[Source]:
    """Return the sources of one split, without CPython's own tests."""
    return [source for source in library_sources(stdlib) if source.part == part and not source.in_test_suite]


def first_bytes(sources: list[Source], limit: int) -> list[Source]:
    """Return the shortest list of leading sources that has at least `limit` bytes; all of them if none has."""
    taken, size = [], 0
    for source in sources:
        if size >= limit:
            break
        taken.append(source)
        size += len(source.document.encode())
    return taken


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[Source]) -> Score:
    """Score whole documents, each after a beginning-of-text token; xz compresses all of them in one piece.

    A document longer than the model's context is read in windows that overlap by half, so after the first window
    each token is predicted from at least half a context.
    """
    bits = 0.0
    for source in sources:
        tokens = [tokenizer.bos_token_id, *tokenizer.encode(source.document, add_special_tokens=False)]
        ids = torch.tensor([tokens], device=model.device)  # [1, tokens]
        for begin, first, end in _windows(len(tokens), model.config.max_position_embeddings):
            bits += _window_bits(model, ids[:, begin:end], first - begin)
    text = "".join(source.document for source in sources).encode()
    return Score(bits, 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)), len(text))


def _windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end): read tokens [begin, end), score those from `first` on."""
    begin, first = 0, 1
    while first < length:
        end = min(begin + context, length)
        yield begin, first, end
        begin, first = end - context // 2, end


@torch.no_grad()
def _window_bits(model: PreTrainedModel, ids: torch.Tensor, first: int) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]  # [scored, vocabulary]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, first:], reduction="sum").item() / math.log(2)


if __name__ == "__main__":
    main()
