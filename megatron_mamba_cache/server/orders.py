"""Orders: generation requests, in one format for the routes of all APIs."""

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from ..models.tokenizers.token_reader import TokenReader
from ..policy.request_settings import LogProbSettings, RequestSpec, SamplingSettings, packed_ids
from .conversation import Conversation
from .errors import ApiError, bad_request
from .limits import ServerLimits
from .parsers.families import ReplySyntax
from .prompt_scores import PromptScoring
from .prompts import Prompt, PromptReader
from .reply import ReplyReading, special_stops
from .reply_forms import FormMaker, ReplyForm
from .schemas import ChatRequest, CompletionRequest, GenerationFields
from .tenants import Tenant
from .tool_schemas import ChosenTools, chosen_tools

_DEFAULT_COMPLETION_TOKENS = 16
_UINT63 = 2**63


@dataclass(frozen=True, slots=True)
class Order:
    """Generation request from any route: prompts, sampling settings and reply format."""

    tenant: Tenant
    readings: tuple[Callable[[], Prompt], ...]  # functions that tokenize one prompt; may take seconds or raise
    num_choices: int  # number of replies to generate for each prompt
    sampling: SamplingSettings  # without the grammar; the seed is for choice 0
    max_tokens: int | None  # maximum reply length, at least 1; None: limited by the context
    stops: tuple[str, ...]
    fits_room: bool = False  # True lowers `max_tokens` to what fits in the context
    is_empty: bool = False  # True if only the prompts are processed; replies have no tokens
    reading: ReplyReading | None = None  # parser settings for replies; None: all text is content
    form: ReplyForm | None = None  # grammar that constrains the replies; None: any text
    num_log_probs: int | None = None  # number of alternatives with log-probs; None: no log-probs at all
    scores_prompt: bool = False  # True: also return the prompt's log-probs; the whole prompt is then prefilled
    scoring: PromptScoring | None = None  # settings for `prompt_logprobs`; None: not requested
    returns_routes: bool = False  # True: also return the routed experts of each reply's tokens

    def specs(self, prompt: Prompt, max_sequence_length: int) -> Iterator[RequestSpec]:
        """Yield the engine request for each choice of a prompt; its id is not set yet."""
        ids = packed_ids(prompt.token_ids)
        room = max(max_sequence_length - len(ids), 1)
        max_tokens = room if self.max_tokens is None else self.max_tokens
        grammar = "" if self.form is None else self.form.grammar_after(prompt)
        for number in range(self.num_choices):
            yield RequestSpec(
                request_id=0,
                prompt=ids,
                max_len=len(ids) + (min(max_tokens, room) if self.fits_room else max_tokens),
                sampling=replace(self.sampling, seed=choice_seed(self.sampling.seed, number), grammar=grammar),
                tenant=self.tenant.name,
                log_probs=self._log_probs(number),
                breakpoints=prompt.breakpoints,
                returns_routes=self.returns_routes,
            )

    def _log_probs(self, number: int) -> LogProbSettings:
        """Return the log-prob settings for choice `number`; only choice 0 returns `prompt_logprobs`."""
        prompt_top_n = None if self.scoring is None or number else self.scoring.top_n
        is_scored = prompt_top_n is not None
        return LogProbSettings(
            wanted=self.num_log_probs is not None or is_scored,
            skip_prompt=not (self.scores_prompt or is_scored),
            top_n=self.num_log_probs or 0,
            prompt_top_n=prompt_top_n,
            names_ids=True,
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model that the server offers: its names, prompt reader and reply syntax."""

    name: str  # the model's name in the API
    reader: PromptReader
    created: int  # creation time in `/v1/models`, in seconds since the epoch
    syntax: ReplySyntax = field(default_factory=ReplySyntax)
    other_names: tuple[str, ...] = ()  # other model names that requests may use

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model; responses use the first."""
        return (self.name, *self.other_names)

    def check_name(self, name: str | None) -> None:
        """Raise `ApiError` 404 if `name` is not a name of this model; accept None."""
        if name is not None and name not in self.names:
            served = " or ".join(map(repr, self.names))
            raise ApiError(404, f"the model {name!r} is not served here; send {served}", "model_not_found", "model")


def tenant_of(request: Request, body: GenerationFields) -> Tenant:
    """Return the request's tenant; `AccessControl` has set `scope["owner"]` from the API key."""
    return Tenant(request.scope.get("owner", ""), body.cache_salt or "")


class OrderMaker:
    """Converts requests to orders; raises `ApiError` if a request names another model or has too many choices."""

    def __init__(self, model: ServedModel, limits: ServerLimits, tokenizer: Any) -> None:
        self._model = model
        self._limits = limits
        self._tokenizer = tokenizer
        self._form_maker = FormMaker(model.syntax, tokenizer)
        self._tag_ids = model.syntax.tag_ids(tokenizer)

    def completion(self, body: CompletionRequest, tenant: Tenant) -> Order:
        """Convert a request to `/v1/completions` to an order."""
        read = self._model.reader.read
        if body.echo:
            read = partial(self._model.reader.read_to_echo, has_tokens=body.logprobs is not None)
        readings = tuple(partial(read, tenant, prompt, body.add_special_tokens) for prompt in body.prompts)
        length = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        order = self._order(body, tenant, readings, length, body.logprobs)
        if body.answer is not None:
            order = replace(order, form=self._form_maker.answer(*body.answer))
        if body.skip_special_tokens is False:
            order = replace(order, reading=ReplyReading(shown=None))
        return replace(order, scores_prompt=bool(body.echo) and body.logprobs is not None)

    def chat(self, body: ChatRequest, tenant: Tenant, answer_field: str | None = None) -> Order:
        """Convert a chat completion, or a request from another API translated to one, to an order.

        `answer_field` is the name of the answer-format field in error messages; None: the name in chat completions.
        """
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs requires logprobs to be true", "top_logprobs")
        conversation = body.conversation()
        add = bool(body.add_special_tokens)
        readings = (partial(self._read_chat, tenant, conversation, add_special_tokens=add),)
        length = body.max_completion_tokens or body.max_tokens
        order = self._order(body, tenant, readings, length, (body.top_logprobs or 0) if body.logprobs else None)
        answer = body.answer
        if answer is not None and answer_field is not None:
            answer = answer_field, answer[1]
        chosen = chosen_tools(body.tool_choice, conversation.tools)
        form = self._form_maker.chat(answer, chosen, body.parallel_tool_calls)
        for name in ("ignore_eos", "min_tokens"):
            if form is not None and getattr(body, name):
                reason = "the format of a constrained reply decides where it ends"
                raise bad_request(f"{name} cannot be combined with {form.field}: {reason}", name)
        reading = self._reading(body, chosen, is_constrained=form is not None)
        return replace(order, reading=reading, form=form)

    def _read_chat(self, tenant: Tenant, conversation: Conversation, *, add_special_tokens: bool) -> Prompt:
        prompt = self._model.reader.read_chat(tenant, conversation, add_special_tokens=add_special_tokens)
        form = self._model.syntax.reasoning
        if form is None:
            return prompt
        begun = self._model.reader.begun_reply(prompt)
        return replace(prompt, reasoning=begun.reasoning(form, self._tag_ids, self._tokenizer))

    def _order(
        self,
        body: GenerationFields,
        tenant: Tenant,
        readings: tuple[Callable[[], Prompt], ...],
        max_tokens: int | None,
        num_log_probs: int | None,
    ) -> Order:
        """Return an order. If `max_tokens` is None, replies may fill the context; if it is 0, replies are empty."""
        self._model.check_name(body.model)
        num_choices, num_prompts = body.n or 1, len(readings)
        if num_choices * num_prompts > self._limits.max_choices:
            raise bad_request(
                f"{num_prompts} prompts times n={num_choices} make {num_prompts * num_choices} choices; at most "
                f"{self._limits.max_choices} are allowed in one request; send fewer, or raise --max-choices",
                "prompt" if num_choices == 1 else "n",
            )
        stop_token_ids = dict.fromkeys([*(body.stop_token_ids or ()), *special_stops(self._tokenizer, body.stops)])
        sampling = SamplingSettings(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=1 if body.top_p == 0 else max(body.top_k or 0, 0),  # top_p=0 is greedy
            top_p=body.top_p or 0.0,
            seed=secrets.randbelow(2**63) if body.seed is None else body.seed,
            termination_id=-1 if body.ignore_eos else None,
            stop_words=tuple((token,) for token in stop_token_ids),
            logits=body.logits,
        )
        scoring = None
        if body.prompt_logprobs is not None:
            scoring = PromptScoring(body.prompt_logprobs, TokenReader(self._tokenizer).text_of)
        return Order(
            tenant,
            readings,
            num_choices,
            sampling,
            None if max_tokens is None else max_tokens or 1,
            body.stops,
            is_empty=max_tokens == 0,
            num_log_probs=num_log_probs,
            scoring=scoring,
            returns_routes=bool(body.return_routed_experts),
        )

    def _reading(self, body: ChatRequest, chosen: ChosenTools, *, is_constrained: bool) -> ReplyReading | None:
        """Return the parser settings for replies; None if all text is content."""
        syntax = self._model.syntax
        calls_tools = bool(chosen.tools) and chosen.choice != "none" and syntax.tool_calls is not None
        shows_all = body.skip_special_tokens is False
        if not calls_tools and syntax.reasoning is None and not shows_all:
            return None
        functions = [tool["function"] for tool in chosen.tools]
        parameters = {function["name"]: function.get("parameters", {}) for function in functions}
        return ReplyReading(
            None if shows_all else self._tag_ids.keys(),
            partial(syntax.parser, parameters if calls_tools else None, is_constrained=is_constrained),
            {number: tag for tag, number in self._tag_ids.items()},
            most_calls=1 if body.parallel_tool_calls is False else None,
        )


def choice_seed(seed: int, number: int) -> int:
    """Return the seed for choice `number`: the request's seed for choice 0, otherwise a hash of seed and number."""
    if number == 0:
        return seed % _UINT63
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little") % _UINT63
