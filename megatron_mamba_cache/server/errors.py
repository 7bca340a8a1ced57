"""Errors in the shapes that OpenAI's and Anthropic's clients expect."""

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


@dataclass
class ApiError(Exception):
    """An error that a request gets instead of a reply.

    Args:
        status: HTTP status.
        message: What was found and what is allowed.
        code: Error code for programs.
        param: The field that is wrong.
        retry_after_s: Whole seconds after which the same request may succeed.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the JSON object for clients of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Return the error's response headers."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"WWW-Authenticate": 'Basic realm="API key as password"'} if self.status == 401 else {})


def is_of_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that can never run."""
    return ApiError(400, message, code, param)


def too_long(fault: str, max_tokens: int) -> ApiError:
    """Return the error of a prompt and reply that do not fit.

    LangChain recognizes it by the code or by "prompt is too long", litellm by the first words of OpenAI's own message.

    Args:
        max_tokens: Limit for prompt and reply together.
    """
    message = f"This model's maximum context length is {max_tokens} tokens, and the prompt is too long: {fault}"
    return bad_request(message, "prompt", "context_length_exceeded")


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """Return the error of a server that is starting, draining or broken."""
    return ApiError(503, message, code, retry_after_s=retry_after_s)


def unexpected() -> ApiError:
    """Return the error of a defect of the server."""
    return ApiError(500, "the server failed at this request; its log says why", "internal_error")


def engine_failed(reason: str) -> ApiError:
    """Return the error of a server whose engine has failed."""
    return unavailable(reason, "engine_failed", retry_after_s=30)
