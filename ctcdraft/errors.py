"""The one exception that means "the input was wrong". It knows nothing of what was wrong with it."""


class InputError(ValueError):
    """One sentence: what was found, with its values, and what to do about it.

    The entry points print it and exit with status 1, without a traceback. Any other exception is a bug of
    ours and keeps its traceback.
    """
