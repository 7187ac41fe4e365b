"""Filters: small networks on single layers that keep what the task needs, each with a head that predicts it (TED).

They are an aligner, and one that can predict: `probe` teaches the heads the task, `match` compares what comes out of
the filters, `heads` what comes out of the heads.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import architectures, views
from limbeck.data import kinds
from limbeck.errors import LimbeckError
from limbeck.features import last_token
from limbeck.mappings import Layers
from limbeck.taps import IMPLEMENTATION
from limbeck.vocabulary import Predictor, Shaping, shaping

Kind = Literal["linear", "mlp", "next-layer", "all-next-layers"] | None
Head = Literal["linear", "pooled"]
DROPOUT = 0.1  # before the maps of a head; the paper's for task layers


class Filters(nn.Module):
    """A filter a layer and model, to the teacher's width, each with a head that predicts from one token (TED): the
    first, or the last in causal models.

    A filter is `linear`, an `mlp`, a copy of the model's `next-layer` or of `all-next-layers`, or `none`: the head
    alone. A `pooled` head has a layer of its own before the last map. The filters of a student made of the teacher's
    layers have the form of the teacher's, so that they can become copies of them.

    Where words are predicted, the last map of all heads is the teacher's output embedding, which does not train: one a
    head would be several times as large as the models. If it reads another width, as ALBERT's does, every head has a
    map to that.
    """

    student: "ModelFilters"
    teacher: "ModelFilters"
    words: Tensor
    words_bias: Tensor | None

    def __init__(self, student: int, teacher: int, pairs: int, *, kind: Kind = "linear", head: Head = "linear") -> None:
        super().__init__()
        self.width, self.fits = teacher, kind is not None or student == teacher
        self.kind: Kind = kind
        self.head: Head = head
        self.layers: Layers | None = None
        self.alike = False  # whether the student is made of the teacher's layers
        self.shaping: Shaping | None = None  # of logits over words

    def bind(self, student: PreTrainedModel, teacher: PreTrainedModel, layers: Layers, *, tokens: bool) -> None:
        """Make the filters of these layers; a second time only see that they are the same layers."""
        if layers.draw:
            raise LimbeckError("filters belong to layers, and a random map has other layers each epoch. Use another.")
        if not tokens and self.kind in ("next-layer", "all-next-layers"):
            raise LimbeckError(f"filters({self.kind}) attend to every token: compare hidden.")
        if not tokens and kinds.of(student).per_token:
            raise LimbeckError(
                "the task is predicted from every token, which heads can only learn from all of them: use hidden."
            )
        if self.layers is not None:
            if self.layers[:2] != layers[:2]:
                raise LimbeckError(
                    f"filters that were made for layers {_said(self.layers)} are asked for {_said(layers)}. "
                    "Give every term that names them the same map."
                )
            return
        self.layers = layers
        self.alike = architectures.same_blocks(student, layers.student, teacher, layers.teacher)
        predicted: int | None = architectures.shape(student).labels
        if kinds.of(teacher).vocabulary:
            self._take_words(teacher)
            read = self.words.shape[1]
            predicted = None if read == self.width else read
        self.teacher = ModelFilters(self, teacher, layers.teacher, predicted)
        self.student = (
            copy.deepcopy(self.teacher) if self.alike else ModelFilters(self, student, layers.student, predicted)
        )

    def _take_words(self, teacher: PreTrainedModel) -> None:
        output, bias = architectures.output_map(teacher), architectures.output_bias(teacher)
        self.shaping = shaping(teacher)
        if self.shaping is None:
            raise LimbeckError(
                f"filters predict words as the teacher does, and what {type(teacher).__name__} does to its logits is "
                "not known. Use lwd, which has no filters."
            )
        if self.kind is None:
            raise LimbeckError(
                "filters(none) are heads alone, and those of a language model are its output embedding, which does not "
                "train. Use filters(linear)."
            )
        # Made anew from the teacher wherever filters are, so no checkpoint needs to hold it.
        self.register_buffer("words", output.weight.detach().clone(), persistent=False)
        self.register_buffer("words_bias", None if bias is None else bias.detach().clone(), persistent=False)

    def predict(self, side: Literal["student", "teacher"], states: Sequence[Tensor], mask: Tensor) -> list[Any]:
        """The predictions of every head of a side: logits, or a `Predictor` of words."""
        found = getattr(self, side).predict(states, mask)
        if self.shaping is None:
            return found
        return [Predictor(one, self.words, self.words_bias, *self.shaping) for one in found]

    def copy_to_student(self) -> None:
        """Make the student's filters and heads what the teacher's are."""
        self.student.load_state_dict(self.teacher.state_dict())

    def train(self, mode: bool = True) -> "Filters":
        """Set the mode; a side that does not train stays in eval mode: dropout would only blur what it says."""
        super().train(mode)
        for side in self.children():
            side.train(mode and any(p.requires_grad for p in side.parameters()))
        return self

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():  # trained together, both sides would agree on nothing at all
            target = self.teacher(teacher, mask)
        return self.student(student, mask), target


class ModelFilters(nn.Module):
    """The filters and heads of one model, one of each a layer."""

    def __init__(self, asked: Filters, model: PreTrainedModel, layers: Sequence[int], predicted: int | None) -> None:
        super().__init__()
        width = asked.width if asked.kind else architectures.shape(model).width
        self.filters = nn.ModuleList(_filter(asked.kind, model, layer, width) for layer in layers)
        self.heads = nn.ModuleList(_head(asked.head, width, predicted) for _ in layers)
        self.last = architectures.pooling(model) == "last"
        self.per_token = kinds.of(model).per_token

    def forward(self, states: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
        return [f(s, mask) if isinstance(f, Blocks) else f(s) for f, s in zip(self.filters, states)]

    def predict(self, states: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
        """The predictions of every head, of the first token or, where the task asks for that, of each; for words, what
        they are made of."""
        filtered = self(states, mask)
        if filtered[0].dim() == 3 and not self.per_token:
            filtered = [last_token(f, mask) if self.last else f[:, 0] for f in filtered]
        return [head(f) for head, f in zip(self.heads, filtered)]


class Blocks(nn.Module):
    """Copies of some blocks of a model, and a map to `width` behind them where theirs differs."""

    def __init__(self, model: PreTrainedModel, first: int, last: int, width: int) -> None:
        super().__init__()
        own = architectures.shape(model).width
        self.blocks = views.copied_blocks(model, first, last).requires_grad_(True)
        config: Any = self.blocks.config
        if config._attn_implementation == "sdpa":
            config._attn_implementation = IMPLEMENTATION  # whose mask does not wait for the device
        self.map = nn.Linear(own, width) if own != width else nn.Identity()

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.map(self.blocks(inputs_embeds=states, attention_mask=mask.long()).last_hidden_state)


def _filter(kind: Kind, model: PreTrainedModel, layer: int, width: int) -> nn.Module:
    depth, own = architectures.shape(model)[:2]
    if kind is None:
        return nn.Identity()
    if kind == "mlp":
        return nn.Sequential(nn.Linear(own, own), nn.GELU(), nn.Linear(own, width))
    if kind == "linear" or layer == depth:  # no layer comes after the last
        return nn.Linear(own, width)
    return Blocks(model, layer + 1, layer + 1 if kind == "next-layer" else depth, width)


def _head(kind: Head, width: int, predicted: int | None) -> nn.Module:
    """A head that predicts so many numbers; with None, those it is given."""
    last = [nn.Dropout(DROPOUT)] + ([] if predicted is None else [nn.Linear(width, predicted)])
    pooler = [nn.Dropout(DROPOUT), nn.Linear(width, width), nn.GELU()] if kind == "pooled" else []
    return nn.Sequential(*pooler, *last)


def _said(layers: Layers) -> str:
    return f"{list(layers.student)} of the student and {list(layers.teacher)} of the teacher"
