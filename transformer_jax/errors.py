"""The one exception for what a user can put right: bad input, bad configuration, a run that does not fit."""


class UserError(ValueError):
    """A failure with a cure. The message names the file, line or field, the value found and what would be legal.

    The command line prints it in one or two lines and exits with status 1; a library caller may catch it.
    """


def first_line(error: BaseException) -> str:
    """What an exception of another library says, in one line.

    >>> first_line(OSError("no such split\\nand more"))
    'OSError: no such split'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else 'no message'}"
