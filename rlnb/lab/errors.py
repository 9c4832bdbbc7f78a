"""The one exception that the lab raises on purpose: a single line that says what happened, where, and what to do next."""


class LabError(Exception):
    "A problem that a person can fix. `exit_code` is what the command line exits with."

    exit_code = 1

    def __init__(self, message: str, *, exit_code: int | None = None):
        super().__init__(" ".join(str(message).split()))
        if exit_code is not None:
            self.exit_code = exit_code


class Interrupted(LabError):
    "Ctrl-C or a termination signal arrived; the run's record says so."

    exit_code = 130


def did_you_mean(word: str, known) -> str:
    "`' (did you mean X?)'` when one of `known` is close to `word`, else an empty string."
    import difflib

    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
