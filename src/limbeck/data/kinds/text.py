"""Running text, of which nothing is predicted."""

from collections.abc import Sequence
from typing import Any

from limbeck.data.kinds.base import Kind


class Text(Kind):
    """Bodies without a head, compared layer by layer; the student is fine-tuned later, on any task.

    What is scored is the loss of the distillation itself, on text held out.
    """

    name = "text"
    auto = "AutoModel"
    bare = True
    packed = True
    named = False
    predicts = "nothing"
    pipeline = "feature-extraction"
    output = 'states = model(**tokenizer("A sentence.", return_tensors="pt")).last_hidden_state'
    lower = ("loss",)

    def owns(self, architecture: str, config: Any) -> bool:
        return False  # a checkpoint without a head may get one, of any kind

    def usual_metrics(self, names: Sequence[str], values: Sequence) -> tuple[str, ...]:
        return self.lower

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {}
