"""What a kind of task is."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from limbeck.data.columns import Columns, Rows, Table
from limbeck.data.corpus import RunningText, Split

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # the label of a row that has none
Metric = Callable[[Any, Any], float]


class Kind:
    """How tasks of one kind are read, learnt, predicted and scored. What is here serves most; a kind changes the rest.

    Labels and predictions are rows: one an example, or one a token (`per_token`).
    """

    name = ""
    auto = "AutoModelForSequenceClassification"  # the class of transformers that loads its models
    head = ""  # the linear map over every token that predicts, from the whole model; empty: the family's classifier
    pipeline = "text-classification"  # what the hub calls it
    output = 'logits = model(**tokenizer("A sentence.", truncation=True, return_tensors="pt")).logits'  # how to ask one
    like = ""  # the kind whose models it takes, where it has none of its own
    per_token = False
    regression = False  # predicts a number, and squared errors are learnt from
    bare = False  # its models have no head
    vocabulary = False  # predicts words; logits of that many are never held whole, see vocabulary.py
    masked = False  # words are hidden from it, see masking.py
    writes = False  # a text of its own length, whose tokens are the labels
    labelled = True  # learns from labels beside the texts
    packed = False  # learns from running text, packed into blocks of tokens
    named = True  # labels have names
    classes = "classes"  # what those names are
    length = 128  # how many tokens an example may have, unless the user says
    predicts = ""  # what is predicted, where it has no names
    columns: tuple[Columns, ...] = ()  # how files usually call theirs
    metrics: Mapping[str, Metric] = {}  # of predictions and what is right; 1 is perfect
    lower: tuple[str, ...] = ()  # those of which less is better, given as they are: others are shown from 0 to 100

    # reading

    def owns(self, architecture: str, config: Any) -> bool:
        """Whether models of this class and configuration are for this kind."""
        return architecture.endswith(self.auto.removeprefix("AutoModel"))

    def recognised(self, table: Table) -> bool:
        """Whether a table's columns can only be of this kind."""
        return False

    def tidied(self, table: Table, columns: Columns) -> Table:
        """The table with its texts as strings and its labels as `labels` takes them."""
        return table

    def remarks(self, rows: Rows) -> list[str]:
        """What a user should know of the rows of a file."""
        return []

    def names(self, values: Sequence) -> tuple[str, ...]:
        """The names of the labels, from the values of a column."""
        return ()

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        """The labels as arrays have them: an entry an example, on the first axis."""
        raise NotImplementedError

    def moved(self, labels: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The labels when label i becomes label `places[i]`."""
        return places[labels]

    def kept_together(self, split: Split) -> Sequence[str]:
        """What no two examples may share that are held out and trained on."""
        return split.joined

    def usual_metrics(self, names: Sequence[str], values: Sequence) -> tuple[str, ...]:
        """The metrics of a task without a name of its own, the main one first; `values` are the labels of all files."""
        return tuple(self.metrics)

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """What a model's configuration says of its labels."""
        places = {name: place for place, name in enumerate(names)}
        return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": places, "problem_type": None}

    def tokens(self, tokenizer: Any, split: Split, *, stride: int, **options: Any) -> Mapping[str, list[list[int]]]:
        """The token columns of some examples: `labels` among them where labels belong to tokens, and what `right` asks.

        Where a text is cut into several examples, two neighbours share `stride` tokens.
        """
        return tokenizer(split.text, split.text_pair, truncation="longest_first", **options)

    def right(
        self, split: Split | RunningText, tokens: Mapping[str, np.ndarray], offsets: np.ndarray
    ) -> tuple[np.ndarray | None, Any]:
        """The labels of examples, a row each, and what predictions are scored against, where that is something else.

        `tokens` are the columns of `tokens`, end to end, and `offsets` say where examples begin and end in them.
        """
        return split.labels if isinstance(split, Split) else None, None

    # learning

    def logits(self, output: Any) -> "Tensor":
        """A model's predictions: `(batch, labels)`, or `(batch, positions, labels)`."""
        return output.logits

    def targets(self, batch: Mapping[str, "Tensor"]) -> "Tensor | None":
        """The labels of a batch, if it has any."""
        return batch.get("labels")

    def counted(self, mask: "Tensor", labels: "Tensor | None") -> "Tensor":
        """Which rows of the predictions count; `labels` are those of the batch, if it has any."""
        return mask

    def distributions(self, logits: "Tensor", mask: "Tensor") -> tuple["Tensor", "Tensor"]:
        """Logits whose last axis is one distribution, a row a label to be predicted, and the rows that count."""
        return logits, mask

    # scoring

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Any) -> Any:
        """What a model answers, as its metrics take it."""
        return logits.argmax(axis=-1)

    def expected(self, right: Any, names: Sequence[str]) -> Any:
        """What would have been the right answer, as metrics take it."""
        return right

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Any) -> list[dict[str, Any]]:
        """What a file of predictions says of each example."""
        found = self.decided(logits, names, right)
        return [{"prediction": names[place], "logits": row.tolist()} for place, row in zip(found, logits, strict=True)]

    def ordered(self, logits: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Columns by label name, so that models with other label orders can be compared."""
        return logits[:, np.argsort(names)] if names else logits

    def agreement(self, ours: Any, theirs: Any) -> float:
        """How alike two models' answers are; 1 is equal."""
        return float(np.mean(np.asarray(ours) == np.asarray(theirs)))
