"""The answer to a question, as a span of a context."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from limbeck.data import squad
from limbeck.data.columns import Columns, Rows, Table
from limbeck.data.corpus import Split
from limbeck.data.kinds.base import IGNORE, Kind
from limbeck.data.windows import Context, contexts_of, cut, frame_of
from limbeck.errors import LimbeckError

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 30  # tokens of an answer
LOW = -1e9  # the logit of padding: no probability is left there, and differences stay finite
NOWHERE = (IGNORE, IGNORE)


class Answers(NamedTuple):
    """What a file says of a question: all that is right, or nothing where the context has no answer."""

    id: str
    texts: tuple[str, ...]
    starts: tuple[int, ...]  # the first character of each in the context

    def spans(self, context: str) -> list[tuple[int, int]]:
        """The characters of those that stand where the file says."""
        found = zip(self.texts, self.starts, strict=True)
        return [(start, start + len(text)) for text, start in found if start >= 0 and context.startswith(text, start)]


class Asked(NamedTuple):
    """The questions of a split, and where the tokens of their windows stand in their contexts."""

    answers: np.ndarray
    contexts: list[str]
    starts: np.ndarray  # the first character of every token; -1 where it is none of the context
    ends: np.ndarray
    offsets: np.ndarray  # where windows begin and end, in tokens
    questions: np.ndarray  # where questions begin and end, in windows

    @property
    def unanswerable(self) -> bool:
        """Whether there is a question whose context has no answer."""
        return any(not answers.texts for answers in self.answers)


class QuestionAnswering(Kind):
    """Where an answer starts and where it ends: two labels an example, each one of its tokens.

    A context that is too long is cut into windows that overlap, each an example of its own; where the answer is not in
    a window, both labels are its first token. In a file that has questions without an answer, a question is left
    unanswered if the first token has more to say for it, in every window, than the best span.
    """

    name = "question-answering"
    auto = "AutoModelForQuestionAnswering"
    head = "qa_outputs"
    pipeline = "question-answering"
    output = (
        'output = model(**tokenizer("Who won?", "The fox won.", return_tensors="pt"))\n'
        "first, last = output.start_logits.argmax(), output.end_logits.argmax()  # the tokens of the answer"
    )
    per_token = True
    named = False
    predicts = "the span of an answer"
    length = 384
    columns = (Columns("question", "context", "answers"),)
    metrics = {  # noqa: RUF012
        "f1": squad.f1,
        "exact": squad.exact,
        "has_answer_f1": squad.has_answer_f1,
        "has_answer_exact": squad.has_answer_exact,
        "no_answer": squad.no_answer,
    }

    def recognised(self, table: Table) -> bool:
        known = all(name in table.columns for name in self.columns[0] if name)
        return known and any(isinstance(value, dict | list) for value in table.columns["answers"])

    def tidied(self, table: Table, columns: Columns) -> Table:
        if columns.text_pair is None:
            raise LimbeckError(
                f"{table.origin}: questions are answered from a context, and none is there. Name its column with "
                "--text-pair COLUMN."
            )
        if columns.label is None:
            return table
        values = table.columns[columns.label]
        ids = table.columns.get("id", range(len(values)))
        answers = [
            None if value is None else _answers(value, str(name), f"{table.origin}: row {row}")
            for row, (name, value) in enumerate(zip(ids, values, strict=True), start=1)
        ]
        return table.changed({columns.label: answers})

    def remarks(self, rows: Rows) -> list[str]:
        if rows.values is None or rows.text_pair is None:
            return []
        none = sum(not answers.texts for answers in rows.values)
        lost = [a.id for a, text in zip(rows.values, rows.text_pair, strict=True) if a.texts and not a.spans(text)]
        said = [f"{none} of the questions have no answer in their context"] if none else []
        if lost:
            said.append(
                f"{len(lost)} questions, the first of them {lost[0]}, have no answer that stands at its answer_start: "
                "they are scored, and not learnt from"
            )
        return said

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        return np.fromiter(values, dtype=object, count=len(values))

    def usual_metrics(self, names: Sequence[str], values: Sequence) -> tuple[str, ...]:
        return tuple(self.metrics) if any(not answers.texts for answers in values) else ("f1", "exact")

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": 2, "problem_type": None}

    def kept_together(self, split: Split) -> Sequence[str]:
        return split.text_pair or []  # which has several questions

    def tokens(
        self, tokenizer: Any, split: Split, *, max_length: int, stride: int, **options: Any
    ) -> Mapping[str, list[list[int]]]:
        frame, texts = frame_of(tokenizer), split.text_pair or []
        most = _room(frame.size, max_length, stride)
        contexts = contexts_of(tokenizer, texts, **options)
        questions = tokenizer(split.text, add_special_tokens=False, verbose=False, **options)["input_ids"]
        names = ("input_ids", "token_type_ids", "starts", "ends", "targets", "first")
        columns: dict[str, list[list[int]]] = {name: [] for name in names}
        for row, (question, text) in enumerate(zip(questions, texts, strict=True)):
            question, context = question[: most // 2], contexts[text]
            right = NOWHERE if split.labels is None else _right(split.labels[row], text, context)
            ahead, behind = len(frame.before) + len(question) + len(frame.between), len(frame.after)
            for low, high in cut(len(context.ids), most - len(question), stride):
                columns["input_ids"].append(frame.ids(question, context.ids[low:high]))
                columns["token_type_ids"].append(frame.token_types(len(question), high - low))
                for name, places in (("starts", context.starts), ("ends", context.ends)):
                    columns[name].append([*[-1] * ahead, *places[low:high], *[-1] * behind])
                columns["targets"].append(_target(right, low, high, ahead))
                columns["first"].append([int(low == 0)])
        return columns

    def right(
        self, split: Split, tokens: Mapping[str, np.ndarray], offsets: np.ndarray
    ) -> tuple[np.ndarray | None, Asked | None]:
        if split.labels is None:
            return None, None
        questions = np.append(np.flatnonzero(tokens["first"]), len(offsets) - 1)
        asked = Asked(split.labels, split.text_pair or [], tokens["starts"], tokens["ends"], offsets, questions)
        return tokens["targets"].astype(np.int64).reshape(-1, 2), asked

    def logits(self, output: Any) -> "Tensor":
        import torch

        return torch.stack([output.start_logits, output.end_logits], -1)

    def distributions(self, logits: "Tensor", mask: "Tensor") -> tuple["Tensor", "Tensor"]:
        positions = logits.masked_fill(~mask[:, :, None], LOW).transpose(1, 2)
        return positions, mask[:, :1].expand(-1, 2)

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Asked) -> list[str]:
        scores, lengths = _best_spans(logits, right)
        nothing = np.full(len(right.answers), -np.inf)
        if right.unanswerable:
            nothing = np.minimum.reduceat(logits[right.offsets[:-1]].sum(1), right.questions[:-1])
        found = []
        for context, none, (low, high) in zip(
            right.contexts, nothing, pairwise(right.offsets[right.questions]), strict=True
        ):
            first = low + int(scores[low:high].argmax())
            last = first + lengths[first] - 1
            answered = np.isfinite(scores[first]) and scores[first] >= none
            found.append(context[right.starts[first] : right.ends[last]].strip() if answered else "")
        return found

    def expected(self, right: Asked, names: Sequence[str]) -> list[squad.Texts]:
        return [tuple(text for text in answers.texts if squad.plain(text)) or ("",) for answers in right.answers]

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Asked) -> list[dict[str, Any]]:
        found = self.decided(logits, names, right)
        return [{"id": answers.id, "prediction": text} for answers, text in zip(right.answers, found, strict=True)]

    def agreement(self, ours: Sequence[str], theirs: Sequence[str]) -> float:
        return squad.exact(ours, [(text,) for text in theirs])


def _answers(value: Any, name: str, place: str) -> Answers:
    """As SQuAD's files have them, a list of answers, or as the hub has them, lists of texts and of starts."""
    try:
        if isinstance(value, dict):
            pairs = list(zip(value["text"], value["answer_start"], strict=True))
        else:
            pairs = [(one["text"], one["answer_start"]) for one in value]
        pairs = [(str(text), int(start)) for text, start in pairs if text]
        return Answers(name, tuple(text for text, _ in pairs), tuple(start for _, start in pairs))
    except (KeyError, TypeError, ValueError) as error:
        raise LimbeckError(
            f'{place} has no answers that can be read ({error}). Answers are {{"text": ["a fox"], "answer_start": '
            "[12]}, with empty lists where the context has no answer."
        ) from error


def _room(around: int, max_length: int, stride: int) -> int:
    """How many tokens a question and its context may have together."""
    if stride < 0:
        raise LimbeckError(f"--stride {stride} must be 0 or more: so many tokens do two windows of a context share.")
    if max_length < around + 2:
        raise LimbeckError(
            f"--max-length {max_length} leaves no room for a question and a context: {around} tokens stand around them."
        )
    return max_length - around


def _right(answers: Answers, text: str, context: Context) -> tuple[int, int] | None:
    """The tokens of the first answer that stands where it should, None where none is right."""
    if not answers.texts:
        return None
    found = (context.tokens(*span) for span in answers.spans(text))
    return next(filter(None, found), NOWHERE)


def _target(right: tuple[int, int] | None, low: int, high: int, ahead: int) -> list[int]:
    """What a window of the tokens `low` to `high`, with others ahead of them, has for labels."""
    if right == NOWHERE:
        return list(NOWHERE)
    inside = right is not None and low <= right[0] and right[1] < high
    return [ahead + place - low for place in right] if right and inside else [0, 0]


def _best_spans(logits: np.ndarray, right: Asked) -> tuple[np.ndarray, np.ndarray]:
    """The score of the best span that starts at each token, and its length; only tokens of one window's context."""
    inside = right.starts >= 0
    starts, ends = (np.where(inside, column, -np.inf) for column in logits.T)
    windows = np.repeat(np.arange(len(right.offsets) - 1), np.diff(right.offsets))
    scores, lengths = starts + ends, np.ones(len(logits), dtype=np.int64)
    for more in range(1, min(LONGEST, len(logits))):
        longer = starts[:-more] + np.where(windows[more:] == windows[:-more], ends[more:], -np.inf)
        better = longer > scores[:-more]
        scores[:-more][better], lengths[:-more][better] = longer[better], more + 1
    return scores, lengths
