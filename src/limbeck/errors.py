"""The one error a user meets."""

from collections.abc import Iterable
from difflib import get_close_matches


class LimbeckError(Exception):
    """A user's mistake, told in one paragraph: what is wrong, where, what is allowed, what to type next."""


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """`' Did you mean "x"?'` for the nearest allowed word, or nothing."""
    near = get_close_matches(str(word), [str(a) for a in allowed], n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
