"""The exceptions a user can meet.

Every message is one sentence with the value, the limit and the remedy. The command prints it and
exits with `exit_code`; a traceback is shown only under `--debug`.
"""

NOT_FINITE_REMEDY = (
    "look for such weights in this layer and those before it, or, where this was in 16 bits, use dtype float32"
)
"""Of layers whose activations or gradients are NaN or infinite: that is where it came from, or they overflow."""


class CompressorError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class RequestError(CompressorError):
    """The request cannot be carried out as it is; nothing was written."""

    exit_code = 2


class RunError(CompressorError):
    """A valid request failed while it ran."""

    exit_code = 1
