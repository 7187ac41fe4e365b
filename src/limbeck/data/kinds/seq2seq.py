"""A text for a text."""

from typing import Any

from limbeck.data.kinds.base import Kind


class Seq2Seq(Kind):
    """A text to be written, token by token."""

    name = "seq2seq"
    auto = "AutoModelForSeq2SeqLM"
    head = "lm_head"
    per_token = True
    vocabulary = True

    def owns(self, architecture: str, config: Any) -> bool:
        return architecture.endswith(("ForConditionalGeneration", "MTModel"))
