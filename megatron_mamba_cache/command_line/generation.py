"""Generate text for the prompts in a file or for the built-in prompts, and print the results."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from ..build import TokenIdTokenizer
from ..config import CacheConfig
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from . import report
from .arguments import cache_config, with_auto_drafts
from .cache_flags import argument_of, given_budget
from .expected_memory import check_memory
from .launch import Launch
from .model_choice import ModelDirectory
from .processes import Replicas
from .prompts import PromptLine
from .quiet import own_warnings_hidden
from .ready_model import WeightFlags, drafter_maker, engine_for, ready_model
from .request_runner import RequestRunner, SamplingFlags
from .results import LaterTurns, RunResult, first_difference, write_output
from .sizing import default_draft_settings, default_settings

EXIT_OUTPUTS_DIFFER = 1


class Generation:
    """Runs prompts on a model or on several replicas of it, with the settings from the flags."""

    def __init__(self, arguments: Namespace, directory: ModelDirectory | None, device: str, replicas: Replicas) -> None:
        self._replicas = replicas
        given_gb = given_budget(arguments)
        check_memory(
            arguments,
            directory,
            device,
            default_settings,
            lambda shape, length, _: default_draft_settings(shape, length, given_gb, ranks_of_process()),
            loads_head=WeightFlags.of(arguments).mtp != "none",
        )
        self._model = ready_model(directory, arguments.dtype, device, WeightFlags.of(arguments))
        arguments = with_auto_drafts(arguments, has_head=self._model.mtp is not None)
        model = self._model.model
        shape = model_shape_of(model, ranks_of_process(), self._model.mtp)
        settings = default_settings(shape, model.max_sequence_length)
        self._config = config = cache_config(arguments, settings)
        self._drafter = drafter_maker(
            arguments,
            self._model,
            lambda shape, length: (
                default_draft_settings(shape, length, given_gb, ranks_of_process())
                | {"num_cuda_graphs": config.num_cuda_graphs}
            ),
        )
        self._seed = arguments.seed
        self._output_path = arguments.output_path
        self._is_first = Launch.of_environment().is_first
        self._facts = {"device": device, "dtype": self._model.dtype, "prefix_caching": config.prefix_caching}
        self._sampling = SamplingFlags(
            arguments.num_tokens_to_generate, arguments.temperature, arguments.top_k, arguments.top_p
        )
        self._inexact_because = _inexact_because(arguments, self._model.dtype, self._sampling)
        print(f"{self._model.description}, on {device}")
        if directory is None:
            print("Its weights are random, so the text below is noise; what the cache saves is real.")
        print()

    @property
    def reads_text(self) -> bool:
        """True when prompts may be text rather than token ids."""
        return not isinstance(self._model.tokenizer, TokenIdTokenizer)

    def run(self, lines: Sequence[PromptLine]) -> int:
        """Run the prompt lines once, print the report, and return the exit status."""
        result = self._run_engines(lines, self._config, "generating")
        later = self._report(lines, result)
        self._write(result, **later.as_dict())
        return 0

    def run_and_compare(self, lines: Sequence[PromptLine]) -> int:
        """Run the lines with and without cache and drafts; return 1 if the outputs differ unexpectedly, otherwise 0."""
        if not self._config.prefix_caching:
            return self.run(lines)
        no_tiers: dict[str, Any] = {"host_cache_gb": None, "disk_cache_dir": None, "disk_cache_gb": None}
        plain = replace(self._config, prefix_caching=False, num_speculative_tokens=0, **no_tiers)
        with own_warnings_hidden():
            self._run_engine(lines[:1], self._config, "warming up")  # also fails early if the settings do not fit
            uncached = self._run_engines(lines, plain, "without cache")
        cached = self._run_engines(lines, self._config, "with cache")
        later = self._report(lines, cached)
        if self._config.num_speculative_tokens:
            print("\nThe same requests with cache and drafts, and with neither:")
        else:
            print("\nThe same requests with and without the cache:")
        _print_all(report.comparison_lines(cached, uncached))
        difference = first_difference(cached, uncached)
        comparison = {"outputs_identical": difference is None, "without_cache": uncached.summary()}
        self._write(cached, **later.as_dict(), **comparison)
        if difference is None:
            print(f"outputs identical: all {len(cached.completed)} requests that ran")
            return 0
        if self._inexact_because is None:
            print(f"outputs differ: {difference}", file=sys.stderr)
            return EXIT_OUTPUTS_DIFFER
        print(f"outputs differ, which can happen {self._inexact_because}: {difference}")
        return 0

    def _run_engines(self, lines: Sequence[PromptLine], config: CacheConfig, title: str) -> RunResult:
        """Run this replica's share of the lines, and return the combined results of all replicas."""
        return self._replicas.gather(self._run_engine(self._replicas.share(lines), config, title))

    def _run_engine(self, lines: Sequence[PromptLine], config: CacheConfig, title: str) -> RunResult:
        wanted = sum(self._sampling.num_tokens if line.num_tokens is None else line.num_tokens for line in lines)
        with (
            closing(self._replicas.make(lambda: engine_for(self._model, config, self._seed, self._drafter))) as engine,
            # disable=None shows the progress bar only if stderr is a terminal.
            tqdm(total=wanted, desc=title, unit="token", file=sys.stderr, leave=False, disable=None) as bar,
        ):
            engine.warmup()
            continues = self._replicas.any_continues
            return RequestRunner(engine, self._model.tokenizer, self._sampling, bar.update, continues).run(lines)

    def _report(self, lines: Sequence[PromptLine], result: RunResult) -> LaterTurns:
        prompts = [self._model.tokenizer.detokenize(record.prompt_tokens) for record in result.records]
        if self._model.writes_text:
            _print_all(report.reply_lines(lines, result.records, prompts))
        else:
            _print_all(report.text_lines(result.records, prompts))
        print()
        _print_all(report.table_lines(result.records))
        print(f"\n{report.summary_line(result)}")
        if result.cache.num_compiled_kernels:
            print(report.compilation_line(result))
        if result.cache.num_graphs:
            print(report.graphs_line(result))
        if self._config.num_speculative_tokens:
            print(report.drafts_line(result))
        later = LaterTurns.of(lines, result.records)
        if later.prompt_tokens:
            print(later)
        reason = report.reason_for_no_skip(result, self._config)
        if reason is not None:
            print(f"nothing was skipped: {reason}")
        return later

    def _write(self, result: RunResult, **more_summary: object) -> None:
        if self._output_path is not None and self._is_first:
            write_output(self._output_path, result, **self._facts, **more_summary)


def _inexact_because(arguments: Namespace, dtype: str, sampling: SamplingFlags) -> str | None:
    """Return the reason why outputs may depend on cache or batch; None if they must be identical."""
    if dtype == "bf16":
        return "in bf16, where rounding depends on the batch"
    if getattr(arguments, argument_of("cached_state_dtype")) == "int8":
        return "after a cached state of 8 bits"
    if getattr(arguments, argument_of("kv_cache_dtype")) == "fp8":
        return "with an FP8 KV cache, where rounding depends on the batch"
    if arguments.drafter == "draft-model" and not sampling.is_greedy:
        return "with a draft model, which changes sampled tokens but not their distribution"
    return None


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
