"""Orders: what the requests of each route ask of the model, in one form."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from ..models.tokenizers.token_reader import TokenReader
from .backend import GenerationRequest
from .conversation import Conversation
from .errors import ApiError, bad_request
from .job import Order
from .limits import ServerLimits
from .parsers.families import ReplySyntax
from .prompt_scores import PromptScoring
from .prompts import Prompt, PromptReader
from .reply import ReplyReading, special_stops
from .reply_forms import FormMaker
from .schemas import ChatRequest, CompletionRequest, GenerationFields
from .tenants import Tenant
from .tool_schemas import ChosenTools, chosen_tools

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the reader that turns requests into its tokens.

    Args:
        name: What clients call the model, and replies.
        created: Seconds since the epoch, as `/v1/models` reports it.
        other_names: What clients may call it too.
    """

    name: str
    reader: PromptReader
    created: int
    syntax: ReplySyntax = field(default_factory=ReplySyntax)
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, that of replies first."""
        return (self.name, *self.other_names)

    def check_name(self, name: str | None) -> None:
        """Raise `ApiError` 404 if a request names a model that is not served."""
        if name is not None and name not in self.names:
            served = " and ".join(map(repr, self.names))
            verb = "is" if len(self.names) == 1 else "are"
            raise ApiError(
                404, f"the model {name!r} is not served here, but {served} {verb}", "model_not_found", "model"
            )


def tenant_of(request: Request, body: GenerationFields) -> Tenant:
    """Return the tenant whose prefixes a request may share; `scope["owner"]` was set from its API key."""
    return Tenant(request.scope.get("owner", ""), body.cache_salt or "")


class OrderMaker:
    """Makes orders for one model.

    Raises:
        ApiError: From each method: if the model is not served, or there are too many choices.
    """

    def __init__(self, model: ServedModel, limits: ServerLimits, tokenizer: Any) -> None:
        self._model = model
        self._limits = limits
        self._tokenizer = tokenizer
        self._form_maker = FormMaker(model.syntax, tokenizer)
        self._tag_ids = model.syntax.tag_ids(tokenizer)

    def completion(self, body: CompletionRequest, tenant: Tenant) -> Order:
        """Return the order of a request of `/v1/completions`."""
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
        if body.echo and body.logprobs is not None:
            return replace(order, plain=replace(order.plain, scores_prompt=True))
        return order

    def chat(self, body: ChatRequest, tenant: Tenant, answer_field: str | None = None) -> Order:
        """Return the order of a request of `/v1/chat/completions`, or of another route in its terms.

        Args:
            answer_field: What the other route calls the field that says the form of an answer.
        """
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
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
                raise bad_request(f"{form.field} says where a reply ends; leave out {name}", name)
        reading = self._reading(body, chosen, is_held=form is not None)
        return replace(order, reading=reading, form=form)

    def _read_chat(self, tenant: Tenant, conversation: Conversation, *, add_special_tokens: bool) -> Prompt:
        prompt = self._model.reader.read_chat(tenant, conversation, add_special_tokens=add_special_tokens)
        form = self._model.syntax.reasoning
        if form is None:
            return prompt
        begun = self._model.reader.begun_reply(prompt)
        return replace(prompt, opens_reasoning=begun.opens_reasoning(form, self._tag_ids, self._tokenizer))

    def _order(
        self,
        body: GenerationFields,
        tenant: Tenant,
        readings: tuple[Callable[[], Prompt], ...],
        max_tokens: int | None,
        num_log_probs: int | None,
    ) -> Order:
        """Return a request's order.

        Args:
            max_tokens: None generates as many as fit; 0 computes the prompts and generates nothing.
        """
        self._model.check_name(body.model)
        num_choices, num_prompts = body.n or 1, len(readings)
        if num_choices * num_prompts > self._limits.max_choices:
            raise bad_request(
                f"{num_prompts} prompts times n={num_choices} make {num_prompts * num_choices} choices; at most "
                f"{self._limits.max_choices} are allowed in a request: send fewer, or raise --max-choices",
                "prompt" if num_choices == 1 else "n",
            )
        seed = secrets.randbelow(2**63) if body.seed is None else body.seed
        top_k = max(body.top_k or 0, 0)
        plain = GenerationRequest(
            prompt=(),
            max_tokens=max_tokens or 1,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=1 if body.top_p == 0 else top_k,  # top_p 0 takes the most probable token
            top_p=body.top_p or 0.0,
            seed=seed,
            tenant=tenant.name,
            num_log_probs=num_log_probs,
            prompt_top_n=body.prompt_logprobs,
            ignores_end=bool(body.ignore_eos),
            stop_token_ids=self._stop_token_ids(body),
            logits=body.logits,
        )
        scoring = None
        if body.prompt_logprobs is not None:
            scoring = PromptScoring(body.prompt_logprobs, TokenReader(self._tokenizer).text_of)
        return Order(
            tenant,
            readings,
            num_choices,
            plain,
            max_tokens is None,
            body.stops,
            is_empty=max_tokens == 0,
            scoring=scoring,
        )

    def _stop_token_ids(self, body: GenerationFields) -> tuple[int, ...]:
        """Return the tokens that end a reply because the request says so, each once."""
        return tuple(dict.fromkeys([*(body.stop_token_ids or ()), *special_stops(self._tokenizer, body.stops)]))

    def _reading(self, body: ChatRequest, chosen: ChosenTools, *, is_held: bool) -> ReplyReading | None:
        """Return how the replies to messages are read; None if all of their text is content."""
        syntax = self._model.syntax
        calls_tools = bool(chosen.tools) and chosen.choice != "none" and syntax.tool_calls is not None
        shows_all = body.skip_special_tokens is False
        if not calls_tools and syntax.reasoning is None and not shows_all:
            return None
        functions = [tool["function"] for tool in chosen.tools]
        parameters = {function["name"]: function.get("parameters", {}) for function in functions}
        return ReplyReading(
            None if shows_all else self._tag_ids.keys(),
            partial(syntax.parser, parameters if calls_tools else None, is_held=is_held),
            {number: tag for tag, number in self._tag_ids.items()},
            most_calls=1 if body.parallel_tool_calls is False else None,
        )
