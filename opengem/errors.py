"""The two families of errors that end a command with their own exit status."""


class UserError(ValueError):
    """The user's input is wrong. One line: what, where, what was wanted, how to mend it. Exit status 2."""


class NonFiniteError(RuntimeError):
    """Training met a non-finite loss or gradient; nothing was stepped or saved. Exit status 3."""
