"""OpenAI's and vLLM's request fields for structured output."""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..grammars.forms import Grammar, choice_grammar, json_grammar, lark_grammar, regex_grammar
from .field_types import Flag, JsonObject, Name, PartlySupported, Text
from .strict_json import strict_value
from .unsupported import STRUCTURED_OUTPUTS, schema_error

_MOST_CHOICES = 10_000
_ANY_OBJECT = {"type": "object"}


def _schema(found: Any) -> Any:
    """Return the JSON schema in `found`; if the client sent it as a string, parse it first."""
    if isinstance(found, str):
        try:
            found = strict_value(found)
        except ValueError as error:
            raise schema_error("no_schema", f"the text is not valid JSON: {error}") from error
    if not isinstance(found, dict | bool):
        sentence = f"the value must be a JSON schema (an object, true or false), found {type(found).__name__}"
        raise schema_error("no_schema", sentence)
    return found


JsonSchema = JsonObject | Flag
SchemaOrText = Annotated[JsonObject | Flag | Text, AfterValidator(_schema)]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]


class NamedSchema(BaseModel):
    """JSON schema in `response_format`; answers always follow the schema, even if `strict` is false."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: Name | None = None
    description: Text | None = None
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(BaseModel):
    """The field `response_format` in OpenAI's API."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar that constrains the answer; None if any text is allowed."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(_ANY_OBJECT)
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return json_grammar(_ANY_OBJECT if schema is None else schema)


class StructuredOutputs(PartlySupported):
    """The field `structured_outputs` in vLLM's API; at most one constraint may be set."""

    model_config = ConfigDict(extra="forbid")
    unsupported = STRUCTURED_OUTPUTS

    json_schema: SchemaOrText | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: Flag | None = None

    def grammars(self) -> dict[str, Grammar]:
        """Return one grammar for each constraint that is set, by field name."""
        found = {}
        if self.json_schema is not None and not isinstance(self.json_schema, str):
            found["json"] = json_grammar(self.json_schema)
        if self.regex is not None:
            found["regex"] = regex_grammar(self.regex)
        if self.choice is not None:
            found["choice"] = choice_grammar(self.choice)
        if self.grammar is not None:
            found["grammar"] = lark_grammar(self.grammar)
        if self.json_object:
            found["json_object"] = json_grammar(_ANY_OBJECT)
        return found


class AnswerFields(PartlySupported):
    """Base schema with the structured-output fields; a request may set at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @cached_property
    def answer(self) -> tuple[str, Grammar] | None:
        """Constraint on the answer, as (name of the request field, grammar); None if any text is allowed."""
        return next(iter(self._answers.items()), None)

    @cached_property
    def _answers(self) -> dict[str, Grammar]:
        found: dict[str, Grammar] = {}
        answer = None if self.response_format is None else self.response_format.grammar()
        if answer is not None:
            found["response_format"] = answer
        guided = StructuredOutputs.model_construct(
            json_schema=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        for prefix, outputs in (("structured_outputs.", self.structured_outputs), ("guided_", guided)):
            if outputs is not None:
                found |= {prefix + name: grammar for name, grammar in outputs.grammars().items()}
        return found

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        names = list(self._answers)
        if len(names) > 1:
            sentence = f"{' and '.join(names)} each set a format for the answer; send only one of them"
            raise schema_error("several_forms", sentence, names[1])
        return self
