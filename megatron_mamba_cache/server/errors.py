"""Error responses in the formats of OpenAI's and Anthropic's APIs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
}

_MESSAGES = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_OTHER_FORM = ("string_type", "list_type", "int_type")
_MOST_CHARACTERS = 1000
_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")


@dataclass
class ApiError(Exception):
    """Error to send to the client as the HTTP response, or within its event stream."""

    status: int
    message: str  # states the value that was found and the allowed values
    code: str | None = None  # machine-readable error code
    param: str | None = None
    retry_after_s: int | None = None  # seconds after which a retry may succeed; None: unknown or never

    @property
    def type(self) -> str:
        """OpenAI's error type for the HTTP status."""
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the response body in the format of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the response body in the format of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Return the headers for the error response: `Retry-After` and, with status 401, `WWW-Authenticate`."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"WWW-Authenticate": 'Basic realm="API key as password"'} if self.status == 401 else {})


def is_of_anthropic(path: str) -> bool:
    """Return True if a path belongs to Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error for a request that can never run; `param` names the invalid field."""
    return ApiError(400, message, code, param)


def too_long(reason: str, max_tokens: int) -> ApiError:
    """Return the error for a prompt and reply that exceed the context length.

    LangChain detects this error by its code or by "prompt is too long"; litellm detects it by the first words of
    OpenAI's message.
    """
    message = f"This model's maximum context length is {max_tokens} tokens, and the prompt is too long: {reason}"
    return bad_request(message, "prompt", "context_length_exceeded")


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """Return a 503 error for a server that is starting, draining or has failed."""
    return ApiError(503, message, code, retry_after_s=retry_after_s)


def unexpected() -> ApiError:
    """Return a 500 error for a request that failed because of a bug in the server."""
    return ApiError(500, "the server failed to handle this request; the reason is in its log", "internal_error")


def engine_failed(reason: str) -> ApiError:
    """Return a 503 error for a server whose engine has failed."""
    return unavailable(reason, "engine_failed", retry_after_s=30)


def schema_error(errors: Sequence[Any], content_type: str | None) -> ApiError:
    """Convert pydantic's errors to one `ApiError`; if no member of a union matches, report the closest one's error."""
    found = max((error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]), key=_reach)
    return _body_error(found, content_type) or _field_error(found)


def _body_error(found: Any, content_type: str | None) -> ApiError | None:
    """Return the error if the whole body is missing, not JSON or not an object; None if only a field is wrong."""
    kind = found["type"]
    if kind == "json_invalid":
        position, reason = found["loc"][-1], found["ctx"]["error"]
        return bad_request(f"the body is not valid JSON: {reason} at character {position}", code="invalid_json")
    if found["loc"] != ("body",):
        return None
    if kind == "missing":
        return bad_request("the body is empty; send a JSON object", code="missing")
    if kind in _NO_OBJECT and not _is_json(content_type):
        found_type = "missing" if content_type is None else repr(content_type)
        return bad_request(f"the Content-Type is {found_type}; send application/json", "Content-Type", "content_type")
    return bad_request("the body must be a JSON object", code=kind) if kind in _NO_OBJECT else None


def _field_error(found: Any) -> ApiError:
    path = [part for part in found["loc"] if part != "body" and not _is_form(part)]
    context = found.get("ctx", {})
    names = [*map(str, path), *([context["field"]] if "field" in context else [])]
    param = ".".join(names) if names else None
    if "sentence" in context:
        message = context["sentence"] if len(path) == 0 else f"{param}: {context['sentence']}"
    elif found["type"] == "extra_forbidden":
        message = f"`{param}` is not a known field; leave it out"
    else:
        message = f"{param or 'the body'}: {found['msg']}"
    return bad_request(message[:_MOST_CHARACTERS], param, found["type"])


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _reach(error: Any) -> tuple[int, int, bool]:
    """Return a sort key for how far validation got: (path depth, index of the failing item, type is correct)."""
    path = error["loc"]
    return len(path), path[-1] if isinstance(path[-1], int) else -1, error["type"] not in _OTHER_FORM


def _is_form(part: str | int) -> bool:
    """Return True if `part` of an error's path is pydantic's name for a union member, not a field or index."""
    return isinstance(part, str) and (part == "str" or "[" in part or "-" in part)
