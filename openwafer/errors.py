"""The one error a user is meant to see."""


class UserError(ValueError):
    """Something the user gave is wrong: what it was, what is allowed, what to do.

    The command line prints it as one sentence on stderr and exits with code 2; it is never a traceback.
    """
