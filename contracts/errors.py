"""The exceptions whose message is all that the user has to see: no traceback says more."""


class RequestError(Exception):
    """A mistake in what the user asked for.

    The message is all the user sees, so it names the value, the rule and the remedy. A job that meets one
    prints the message without a traceback and ends with exit code 2: trying again can't help.
    """


class Unreachable(RequestError):
    """A place does not answer, or refuses: the same request may succeed later."""


class JobFailed(Exception):
    """The job has judged its own results, and training on is of no use; the message says why and what to do.

    Every process raises it after the same step. It ends with exit code 1 and without a traceback.
    """
