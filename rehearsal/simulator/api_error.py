"""An error of the API in Google's form: a google.rpc status, the HTTP code that goes with it, a message, details."""

from typing import Any

# google.rpc.Code → (number, HTTP code), https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
CODES = {
    "CANCELLED": (1, 499),
    "INVALID_ARGUMENT": (3, 400),
    "DEADLINE_EXCEEDED": (4, 504),
    "NOT_FOUND": (5, 404),
    "ALREADY_EXISTS": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 400),
    "UNIMPLEMENTED": (12, 501),
    "INTERNAL": (13, 500),
    "UNAVAILABLE": (14, 503),
}


class ApiError(Exception):
    """A refusal. `status` is a name of CODES; `violations` are (field, what is wrong with it)."""

    def __init__(self, status: str, message: str, violations: list[tuple[str, str]] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.violations = violations or []

    @property
    def http_code(self) -> int:
        """The code of the answer's first line."""
        return CODES[self.status][1]

    def as_status(self) -> dict[str, Any]:
        """The `Status` message that a failed operation or queued resource carries; its code is google.rpc's."""
        return {"code": CODES[self.status][0], "message": self.message}

    def as_answer(self) -> dict[str, Any]:
        """The body of a refused request; its code is HTTP's."""
        error: dict[str, Any] = {"code": self.http_code, "message": self.message, "status": self.status}
        if self.violations:
            field_violations = [
                {"field": field, "description": description} for field, description in self.violations
            ]
            error["details"] = [
                {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": field_violations}
            ]
        return {"error": error}


def invalid(field: str, description: str) -> ApiError:
    """INVALID_ARGUMENT about one field."""
    return ApiError("INVALID_ARGUMENT", f"{field}: {description}", [(field, description)])


def missing(name: str) -> ApiError:
    """NOT_FOUND about a resource."""
    return ApiError("NOT_FOUND", f"Resource '{name}' was not found")


def taken(name: str) -> ApiError:
    """ALREADY_EXISTS about a resource."""
    return ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")


def unready(name: str, state: str, reason: str) -> ApiError:
    """FAILED_PRECONDITION: the resource's state does not allow what was asked."""
    return ApiError("FAILED_PRECONDITION", f"'{name}' is in state {state}: {reason}")
