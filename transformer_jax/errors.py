"""The one exception for what a user can put right: bad input, bad configuration, a run that does not fit."""


class UserError(ValueError):
    """A failure with a cure. The message names the file, line or field, the value found and what would be legal.

    The command line prints it in one or two lines and exits with status 1; a library caller may catch it.
    """
