"""Find the beginning of a reply that a prompt already contains, such as an opening reasoning tag."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .conversation import Conversation
from .errors import ApiError
from .parsers.reasoning import PromptReasoning, ReasoningForm

_MARK = "\u2400"


@dataclass(frozen=True, slots=True)
class BegunReply:
    """Text after the last complete message of a prompt; the model continues this text."""

    text: str  # text from the template; includes the reasoning of a message to continue
    prefill: str  # content of the message to continue; "" if none
    token_ids: Sequence[int]  # token ids of the whole prompt

    def reasoning(self, form: ReasoningForm, tag_ids: Mapping[str, int], tokenizer: Any) -> PromptReasoning:
        """Return the state of reasoning at the end of the prompt; see `PromptReasoning`.

        Args:
            form: The model's reasoning tags.
            tag_ids: Token ids of the reasoning tags that are single tokens.
        """
        ids = {tag_ids.get(form.open), tag_ids.get(form.close)}
        if None in ids:
            return form.after(self.text, self.prefill)
        at = next((at for at in reversed(range(len(self.token_ids))) if self.token_ids[at] in ids), None)
        if at is None:
            return form.without_tags(self.prefill)
        rest = tokenizer.detokenize(list(self.token_ids[at:]), skip_special_tokens=False)
        if len(rest) > len(self.text) + len(self.prefill):
            return form.without_tags(self.prefill)  # the tag belongs to an earlier message
        return PromptReasoning.OPEN if self.token_ids[at] == tag_ids[form.open] else PromptReasoning.DONE


def begun_reply(
    conversation: Conversation, text: str, token_ids: Sequence[int], rendered: Callable[[Conversation], str]
) -> BegunReply:
    """Return the beginning of the reply that the rendered conversation `text` already contains.

    `rendered` renders a conversation; it is used to find where the last complete message ends in `text`.
    """
    end = _after_last_message(conversation, text, rendered)
    prefill = conversation.messages[-1].get("content") if conversation.continues else None
    prefill = prefill.strip() if isinstance(prefill, str) else ""
    at = end.rfind(prefill) if prefill else -1
    return BegunReply(end, "", token_ids) if at < 0 else BegunReply(end[:at], end[at:], token_ids)


def _after_last_message(conversation: Conversation, text: str, rendered: Callable[[Conversation], str]) -> str:
    """Return the part of `text` after the last complete message; all of `text` if that message cannot be located."""
    last = len(conversation.messages) - 1 - conversation.continues
    content = (conversation.messages[last].get("content") or "") if last >= 0 else None
    if not isinstance(content, str):
        return text
    for marked_content, after_mark in ((content + _MARK, ""), (_MARK + content, content.strip())):
        messages = [*conversation.messages]
        messages[last] = {**messages[last], "content": marked_content}
        try:
            end = rendered(replace(conversation, messages=messages)).rpartition(_MARK)[2]
        except ApiError:
            continue
        end = end.partition(after_mark)[2] if after_mark else end
        if end and text.endswith(end):
            return end
    return text
