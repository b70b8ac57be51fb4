"""What a call can't have, in OpenAI's error format."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request", "ended"]


class ApiError(Exception):
    """An HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind

    @property
    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }


def bad_request(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """400: the same call would be refused again; ``param`` is what of it is wrong."""
    return ApiError(400, message, code=code, param=param)


def ended(why: str) -> ApiError:
    """410: the trajectory takes no more calls.  No client tries a 410 again."""
    return ApiError(410, why, code="trajectory_ended", kind="trajectory_ended")
