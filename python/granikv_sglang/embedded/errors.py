"""The one error of this package."""


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be had. The message is one line: what failed, and how to mend it."""
