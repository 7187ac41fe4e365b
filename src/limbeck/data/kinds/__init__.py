"""The kinds of tasks, one a file. A new kind is a file here and a line in KINDS."""

from typing import Any

from limbeck.data.kinds.base import IGNORE, Kind
from limbeck.data.kinds.causal_lm import CausalLM
from limbeck.data.kinds.classification import Classification
from limbeck.data.kinds.lambada import Lambada
from limbeck.data.kinds.masked_lm import MaskedLM
from limbeck.data.kinds.multi_label import MultiLabel
from limbeck.data.kinds.question_answering import QuestionAnswering
from limbeck.data.kinds.regression import Regression
from limbeck.data.kinds.seq2seq import Seq2Seq
from limbeck.data.kinds.tagging import Tagging
from limbeck.data.kinds.text import Text
from limbeck.errors import LimbeckError, did_you_mean

__all__ = ["IGNORE", "KINDS", "Kind", "declared", "find_kind", "of"]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Classification(),
        Regression(),
        MultiLabel(),
        Tagging(),
        QuestionAnswering(),
        Seq2Seq(),
        Text(),
        CausalLM(),
        MaskedLM(),
        Lambada(),
    )
}


def find_kind(name: str) -> Kind:
    """The kind of that name."""
    if name not in KINDS:
        raise LimbeckError(
            f'there is no kind of task "{name}"; there are {", ".join(KINDS)}.{did_you_mean(name, KINDS)}'
        )
    return KINDS[name]


def of(model: Any) -> Kind:
    """The kind of task a model is for, by its class and configuration."""
    bare = model.base_model is model  # as T5 is too, with its head
    return declared(type(model).__name__, model.config) or KINDS["text" if bare else "classification"]


def declared(architecture: str, config: Any) -> Kind | None:
    """The kind that models of this class and configuration are for; None where the class has no head."""
    return next((kind for kind in KINDS.values() if kind.owns(architecture, config)), None)
