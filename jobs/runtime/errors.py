"""The one exception that means "the request was wrong, not the program"."""


class RequestError(Exception):
    """A mistake in what the user asked for.

    The message is all the user sees, so it names the value, the rule and the remedy. A job that meets one
    prints the message without a traceback and ends with exit code 2: trying again can't help.
    """


class Unreachable(RequestError):
    """A place does not answer, or refuses: the same request may succeed later."""
