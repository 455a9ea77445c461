"""The exceptions a user can meet.

Every message is one sentence with the value, the limit and the remedy. The command prints it and
exits with `exit_code`; a traceback is shown only under `--debug`.
"""


class CompressorError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class RequestError(CompressorError):
    """The request cannot be carried out as it is; nothing was written."""

    exit_code = 2


class RunError(CompressorError):
    """A valid request failed while it ran."""

    exit_code = 1
