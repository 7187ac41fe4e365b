"""How a question and its context become windows of tokens, and which characters of the context each token has."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from limbeck.errors import LimbeckError


class Context(NamedTuple):
    """The tokens of a context, and for each its first character and the one behind its last."""

    ids: list[int]
    starts: list[int]
    ends: list[int]

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last token with any of these characters."""
        first, last = bisect_right(self.ends, start), bisect_left(self.starts, end) - 1
        return (first, last) if first <= last else None


class Frame(NamedTuple):
    """What a tokenizer puts before a question, between it and its context, and behind both, with token types."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: list[list[int]]  # of these three, then of a token of the question and of the context

    @property
    def size(self) -> int:
        """How many tokens that is."""
        return len(self.before) + len(self.between) + len(self.after)

    def ids(self, question: Sequence[int], context: Sequence[int]) -> list[int]:
        """The tokens of a window."""
        return [*self.before, *question, *self.between, *context, *self.after]

    def token_types(self, question: int, context: int) -> list[int]:
        """The token types of a window with so many tokens of each."""
        before, between, after, first, second = self.types
        return [*before, *first * question, *between, *second * context, *after]


def frame_of(tokenizer: Any) -> Frame:
    """The frame, read off a pair of one-letter texts."""
    if not tokenizer.is_fast:
        raise LimbeckError(
            "question answering needs a tokenizer that says where its tokens stand in the text, and this one does not. "
            "Give a model with a fast tokenizer (tokenizer.json)."
        )
    pair = tokenizer("a", "a", return_token_type_ids=True)
    ids, types, owners = pair["input_ids"], pair["token_type_ids"], pair.sequence_ids(0)
    first, second = owners.index(0), owners.index(1)
    ends = [len(owners) - owners[::-1].index(owner) for owner in (0, 1)]
    parts = (slice(0, first), slice(ends[0], second), slice(ends[1], None))
    return Frame(
        *(ids[part] for part in parts),
        types=[*(types[part] for part in parts), [types[first]], [types[second]]],
    )


def contexts_of(tokenizer: Any, texts: Sequence[str], **options: Any) -> dict[str, Context]:
    """The tokens of every text, each made once however often it comes."""
    distinct = list(dict.fromkeys(texts))
    found = tokenizer(distinct, add_special_tokens=False, return_offsets_mapping=True, verbose=False, **options)
    return {
        text: Context(ids, [start for start, _ in spans], [end for _, end in spans])
        for text, ids, spans in zip(distinct, found["input_ids"], found["offset_mapping"], strict=True)
    }


def cut(length: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """The windows of a text: `room` tokens at a time, of which two neighbours share `stride`, at most half of them."""
    step = room - min(stride, room // 2)
    for low in range(0, max(length - room, 0) + step, step):
        yield low, min(low + room, length)
