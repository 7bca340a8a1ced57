"""The error for a user's mistake."""


class UsageError(Exception):
    """A bad flag, file or line; the message is one line that names it and says what to do."""
