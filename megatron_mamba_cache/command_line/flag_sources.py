"""Read flags from YAML files and environment variables."""

import re
from argparse import Action, BooleanOptionalAction
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml


class UsageError(Exception):
    """Raised for an invalid flag or input file; the message is one line that includes the remedy."""


_LEAST_LIKENESS = 0.65

VLLM_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--gpu-memory-utilization": "use --memory-fraction, a fraction of the memory that the weights leave free",
        "--kv-cache-memory-bytes": "use --cache-gb, in GiB, for KV blocks and states together",
        "--max-num-seqs": "use --max-running-requests",
        "--max-num-batched-tokens": "use --max-tokens-per-step",
        "--tensor-parallel-size": "use torchrun --nproc-per-node N, and --tensor-model-parallel-size N",
        "--pipeline-parallel-size": "use torchrun --nproc-per-node N, and --pipeline-model-parallel-size N",
        "--data-parallel-size": "use torchrun --nproc-per-node N; processes that do not share a model are replicas",
        "--enable-expert-parallel": "use --expert-model-parallel-size N",
        "--enable-return-routed-experts": "use --record-routes, and send return_routed_experts",
        "--enable-prefix-caching": "prefixes are cached by default; --no-prefix-caching turns it off",
        "--no-enable-prefix-caching": "use --no-prefix-caching",
        "--enable-chunked-prefill": "long prompts are always computed in chunks of --max-tokens-per-step",
        "--enforce-eager": "use --cuda-graphs 0",
        "--cpu-offload-gb": "weights stay on the GPU; --host-cache-gb offloads cached prefixes to host memory",
        "--swap-space": "use --host-cache-gb, in GiB",
        "--kv-offloading-size": "use --host-cache-gb, in GiB",
        "--mamba-cache-dtype": "live states are fp32; --cached-state-dtype sets the format of cached ones",
        "--mamba-ssm-cache-dtype": "live states are fp32; --cached-state-dtype sets the format of cached ones",
        "--mamba-block-size": "use --block-size, for KV blocks and states",
        "--mamba-cache-mode": "states are always cached, at block boundaries that later prompts are likely to share",
        "--speculative-config": "use --num-speculative-tokens and --drafter",
        "--enable-auto-tool-choice": "tools are always on; --tool-call-parser is auto by default",
        "--allowed-origins": "use --cors-origin, once for each",
        "--uvicorn-log-level": "use --log-level",
        "--disable-uvicorn-access-log": "use --access-log off",
        "--disable-log-requests": "use --access-log off",
        "--enable-log-requests": "requests are logged by default, see --access-log",
        "--trust-remote-code": "code in a checkpoint's directory is never run",
        "--chat-template": "put the template into the model's directory as chat_template.jinja",
        "--tokenizer": "put the tokenizer's files into the model's directory",
        "--quantization": "the checkpoint's own configuration selects the quantization",
        "--load-format": "use --hf-model, or --load for a checkpoint of Megatron",
        "--ssl-keyfile": "terminate TLS in a proxy before the server",
        "--ssl-certfile": "terminate TLS in a proxy before the server",
    }
)
"""Flag of `vllm serve` → advice on what to use instead."""


def unknown_flag(flag: str, known: Collection[str], command: str) -> str:
    """Return the error message for an unknown flag; `known` has the flags of `command`, such as "mamba-cache serve"."""
    advice = _advice_on(flag, known)
    return f"unknown flag {flag}" + (f": {advice}" if advice else f"; {command} --help lists all of them")


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name most similar to `name`; None if no name is similar."""
    longer = sorted((one for one in known if one.startswith(name)), key=len)
    alike = get_close_matches(name, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return next(iter([*longer, *alike]), None)


PREFIX = "MAMBA_CACHE_"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NULLS = ("", "~", "null", "Null", "NULL")
# If a Service is named mamba-cache, Kubernetes sets variables of this form in each pod.
_OF_A_SERVICE = re.compile(rf"{PREFIX}(SERVICE_|PORT_\d)")
_ADDRESS = re.compile(r"\w+://")

Value = str | list[str]


@dataclass(frozen=True, slots=True)
class SetFlag:
    """A flag set by a file or an environment variable."""

    flag: str  # a long flag, such as "--block-size"
    names: tuple[str, ...]
    value: Value  # text for argparse; "true" or "false" for a flag without a value
    source: str  # the variable's name, or the file, line and key


class SettableFlags:
    """The flags of a command that a file or an environment variable may set."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = {
            option.removeprefix("--"): action
            for action in actions
            if action.dest not in ("help", "version", "config")
            for option in action.option_strings
            if option.startswith("--")
        }

    def of_file(self, path: Path) -> dict[str, SetFlag]:
        """Return the flags set in a YAML file, keyed by long name without dashes; raise `UsageError` for an error."""
        return self._collected(self._in_file(path))

    def of_environment(self, environment: Mapping[str, str]) -> dict[str, SetFlag]:
        """Return the flags set by environment variables, keyed as in `of_file`; raise `UsageError` for an error."""
        return self._collected(self._in_environment(environment))

    def _in_file(self, path: Path) -> Iterator[SetFlag]:
        for key, node in _entries(path):
            source = f"{path}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{source}: a key must be a flag, found a {key.id}")
            name = str(key.value).removeprefix("--").replace("_", "-")
            if name not in self._actions:
                advice = _advice_on(name, self._actions.keys())
                raise UsageError(f"{source}: unknown key {key.value!r}" + (f": {advice}" if advice else ""))
            value = _value_of(node, f"{source}: {key.value}")
            if value is not None:
                yield self._checked(name, value, f"{source} ({key.value})")

    def _in_environment(self, environment: Mapping[str, str]) -> Iterator[SetFlag]:
        for name, action in self._actions.items():
            variable = variable_of(name)
            text = environment.get(variable, "")
            if text and not (variable.endswith("_PORT") and _ADDRESS.match(text)):
                yield self._checked(name, _listed(text, variable) if _takes_list(action) else text, variable)

    def _checked(self, name: str, value: Value, source: str) -> SetFlag:
        action = self._actions[name]
        flag = f"--{name}"
        if isinstance(value, list):
            if not _takes_list(action):
                raise UsageError(f"{source}: {flag} takes one value, found a list of {len(value)}")
            for item in value:
                if item.startswith("--"):
                    raise UsageError(f"{source}: {item!r} is a flag, not a value of {flag}")
        elif action.nargs == 0:
            if value.lower() not in (*_TRUE, *_FALSE):
                raise UsageError(f"{source} is {value!r}; it must be true or false")
            is_negated = isinstance(action, BooleanOptionalAction) and name.startswith("no-")
            value = "true" if (value.lower() in _TRUE) != is_negated else "false"
        return SetFlag(flag, tuple(action.option_strings), value, source)

    def _collected(self, found: Iterable[SetFlag]) -> dict[str, SetFlag]:
        collected: dict[str, SetFlag] = {}
        for one in found:
            first = first_name(self._actions[one.flag.removeprefix("--")])
            if first in collected:
                raise UsageError(f"{one.source} and {collected[first].source} set the same flag; keep one")
            collected[first] = one
        return collected


def misspelled_variables(environment: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """Yield a warning for each environment variable whose name resembles, but is not, the variable of a known flag."""
    variables = {variable_of(flag) for flag in known}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in variables and not _OF_A_SERVICE.match(name):
            advice = _advice_on(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in variables], PREFIX)
            if advice is not None:
                yield f"{name} sets no flag: {advice}"


def first_name(action: Action) -> str:
    """Return the first long name of a flag's action, without leading dashes."""
    return next(option for option in action.option_strings if option.startswith("--")).removeprefix("--")


def variable_of(flag: str) -> str:
    """Return the name of a flag's environment variable; `flag` may have leading dashes or not."""
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def _advice_on(name: str, known: Collection[str], prefix: str = "") -> str | None:
    """Return advice for an unknown name that suggests a similar known name, with `prefix`; None if none is similar."""
    advice = VLLM_FLAGS.get("--" + name.removeprefix("--").replace("_", "-").lower())
    if advice is not None:
        return advice
    found = nearest(name, known)
    return None if found is None else f"did you mean {prefix}{found}?"


def _takes_list(action: Action) -> bool:
    """Return True if a flag accepts several values."""
    return action.nargs in ("+", "*") or type(action).__name__ == "_AppendAction"


def _entries(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the key and value nodes of the mapping in a YAML file, in which scalars are still text."""
    try:
        with path.open(encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise UsageError(f"--config {path}{line} is not valid YAML: {problem}") from error
    except RecursionError as error:
        raise UsageError(f"--config {path} is nested too deeply") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if root is None or (isinstance(root, yaml.ScalarNode) and _is_null(root)):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"--config {path}: the file must have lines of the form FLAG: VALUE, found a {root.id}")
    return root.value


def _value_of(node: yaml.Node, source: str) -> Value | None:
    """Return the text of a YAML scalar, or a list with the text of each item; None for an empty value."""
    if isinstance(node, yaml.ScalarNode):
        return None if _is_null(node) else str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [str(item.value) for item in node.value]
    raise UsageError(f"{source} must be a value or a list of values, found a {node.id}")


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.style is None and node.value in _NULLS


def _listed(text: str, variable: str) -> list[str]:
    """Split a variable's text into items; it is a YAML list in brackets, or words separated by spaces."""
    if not text.startswith("["):
        return text.split()
    try:
        value: Any = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{variable} is {text!r}; it must be words, or a list such as [first, second]")
    return value
