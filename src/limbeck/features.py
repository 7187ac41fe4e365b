"""What is compared: a feature turns what a tap saw at one layer into rows, vectors `(batch, …, D)` and their mask.

Padding is masked here, once: no distance and no objective ever meets a padded position that counts.

In a model with an encoder and a decoder, features are the decoder's; any of them may be had of the encoder, and those
of attention of the decoder's attention to the encoder: `hidden(side=encoder)`, `attention(side=cross)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from limbeck import kernels
from limbeck.architectures import Side, Size
from limbeck.distances import exact
from limbeck.errors import LimbeckError
from limbeck.spec import Call, bind, parse

Heads = Annotated[int, Field(gt=0)] | None
HeadSize = Annotated[int, Field(gt=0)] | None  # instead of their number; in a match, of a head of the teacher
LOGITS = -1  # the "layer" of what comes after every block: the predictions, and what the classifier reads


@dataclass
class Rows:
    """Vectors `(batch, …, D)` and which of the rows `(batch, …)` count."""

    states: Any  # in the precision the model ran in; of words, what makes the vectors
    mask: Tensor

    @cached_property
    def values(self) -> Any:
        """The vectors as they are compared: half precision in fp32."""
        with torch.enable_grad():  # the first to read them may want no gradient, and the next want one
            return exact(self.states) if isinstance(self.states, Tensor) else self.states


@dataclass
class Attention:
    """What one attention worked on: q, k, v of `(batch, heads, positions, size)` as it multiplies them, rotated
    where it rotates them; its own additive bias; and what it does to scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    bias: Tensor | None = None
    mask: Tensor | None = None  # (batch, 1, queries, keys): True where a key is seen; none: wherever there is a token
    softcap: float | None = None  # scores are bent to stay below it


@dataclass
class Seen:
    """What a tap kept of one forward, on one side of the model."""

    mask: Tensor  # (batch, positions): True where there is a token
    keys: Tensor | None = None  # the same of the tokens attended to, where they are others
    hidden: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor | None = None  # the last block's states, normed where the model has a norm behind its blocks
    attention: dict[int, Attention] = field(default_factory=dict)
    logits: Any = None  # over a vocabulary, what they are made of
    projector: nn.Linear | None = None  # what stands between the last state and the classifier
    pooling: Literal["first", "last", "mean"] = "first"  # which states the classifier reads
    per_token: bool = False  # the classifier predicts for every token

    # Shared by all layers, so that each is computed once.

    @cached_property
    def ones(self) -> Tensor:
        """1 where there is a token, 0 elsewhere, `(batch, 1, positions)`."""
        return self.mask.float().unsqueeze(1)

    @cached_property
    def counts(self) -> Tensor:
        """How many tokens an example has, `(batch, 1)`."""
        return self.mask.sum(1, keepdim=True).clamp_min(1)

    @cached_property
    def one_row(self) -> Tensor:
        """The row mask of a feature with one row an example."""
        return torch.ones_like(self.mask[:, 0])

    @property
    def predicted(self) -> Tensor:
        """The row mask of the predictions."""
        return self.mask if self.per_token else self.one_row


@dataclass(frozen=True)
class Feature:
    """A function that gives rows, and what has to be known of it before it is called."""

    function: Callable[..., Rows]
    site: Literal["hidden", "final", "logits", "attention"]  # where it looks
    fixed: int | None = None  # the one layer it has
    width: Size | None = None  # which of a model's sizes D is; none: D is positions
    distribution: bool = False  # whether rows are distributions
    rows: Literal["example", "token", "prediction"] | None = None  # what there is one of; only then it can be cached
    side: Side = "decoder"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, seen: Seen, layer: int, **options: Any) -> Rows:
        return self.function(seen, layer, **self.options, **options)

    @property
    def __wrapped__(self) -> Callable[..., Rows]:
        """Whose signature says what options there are."""
        return self.function


def seen_at(site: Any, **known: Any) -> Callable[[Callable[..., Rows]], Feature]:
    """Make a function a feature: say where it looks, and what else there is to know."""
    return lambda function: Feature(function, site, **known)


@seen_at("hidden", width="width", rows="token")
def hidden(seen: Seen, layer: int) -> Rows:
    """The state of every token."""
    return Rows(seen.hidden[layer], seen.mask)


@seen_at("hidden", width="width", rows="example")
def cls(seen: Seen, layer: int) -> Rows:
    """The state of the first token; of the last one where the classifier reads that, as in causal models, whose first
    token has seen no other."""
    return Rows(_cls(seen, seen.hidden[layer]), seen.one_row)


@seen_at("hidden", width="width", rows="example")
def mean(seen: Seen, layer: int) -> Rows:
    """The mean state of an example's tokens, padding left out."""
    return Rows(_mean(seen, seen.hidden[layer]), seen.one_row)


@seen_at("hidden", fixed=0, width="width", rows="token")
def embeddings(seen: Seen, layer: int) -> Rows:
    """The state of every token before the first block."""
    return hidden(seen, layer)


@seen_at("final", fixed=LOGITS, width="width", rows="token")
def final(seen: Seen, layer: int) -> Rows:
    """The state of every token after the last block and, in models that have one there, the final norm."""
    return Rows(_final(seen), seen.mask)


@seen_at("final", fixed=LOGITS, width="reads", rows="prediction")
def classifier_input(seen: Seen, layer: int) -> Rows:
    """What the classifier reads: the final state of every token it predicts for, or else of the first token, the last,
    or the mean, whichever the model takes; through the student's projector where it has one."""
    state = _final(seen)
    if not seen.per_token:
        state = _mean(seen, state) if seen.pooling == "mean" else _cls(seen, state)
    if seen.projector is not None:
        bias = seen.projector.bias
        state = F.linear(state, exact(seen.projector.weight), bias if bias is None else exact(bias))
    return Rows(state, seen.predicted)


@seen_at("logits", fixed=LOGITS, width="labels", rows="prediction")
def logits(seen: Seen, layer: int) -> Rows:
    """The predictions; of language models a `Predictor`, which makes them for some tokens at a time."""
    if seen.logits is None:
        raise RuntimeError("logits were read, but the forward stopped before them")
    return Rows(seen.logits, seen.predicted)


@seen_at("attention")
def scores(seen: Seen, layer: int, *, heads: Heads = None) -> Rows:
    """Attention before the softmax; each valid (head, query, key) is a row of one number.

    In another number of heads than the model's own, positions do not count: their bias belongs to the model's heads.
    """
    values = _scores(seen.attention[layer], heads)
    valid = seen.mask[:, None, :, None] & _keys(seen, layer)
    return Rows(values.masked_fill(~valid, 0.0).unsqueeze(-1), valid.expand_as(values))


@seen_at("attention", distribution=True)
def attention(seen: Seen, layer: int, *, heads: Heads = None) -> Rows:
    """Attention maps: for each head and query, a distribution over the keys. Other `heads` as for scores."""
    return _distributions(_scores(seen.attention[layer], heads), seen.mask, _keys(seen, layer))


def _relation(seen: Seen, layer: int, part: str, heads: int | None, size: int | None) -> Rows:
    states = getattr(seen.attention[layer], part)
    if size is not None:
        heads = states.shape[1] * states.shape[3] // size
    states = _split(states, heads)
    relations = states @ states.transpose(-1, -2) * states.shape[-1] ** -0.5
    mask = seen.mask if part == "query" or seen.keys is None else seen.keys
    return _distributions(relations, mask, mask[:, None, None, :])  # between all tokens, whoever attends


@seen_at("attention", distribution=True)
def value_relation(seen: Seen, layer: int, *, heads: Heads = None, size: HeadSize = None) -> Rows:
    """How the values of the tokens relate: softmax(v·vᵀ/√d) (MiniLM)."""
    return _relation(seen, layer, "value", heads, size)


@seen_at("attention", distribution=True)
def query_relation(seen: Seen, layer: int, *, heads: Heads = None, size: HeadSize = None) -> Rows:
    """How the queries relate (MiniLMv2)."""
    return _relation(seen, layer, "query", heads, size)


@seen_at("attention", distribution=True)
def key_relation(seen: Seen, layer: int, *, heads: Heads = None, size: HeadSize = None) -> Rows:
    """How the keys relate (MiniLMv2)."""
    return _relation(seen, layer, "key", heads, size)


FEATURES: dict[str, Feature] = {
    f.function.__name__: f
    for f in (
        hidden,
        cls,
        mean,
        embeddings,
        final,
        classifier_input,
        logits,
        scores,
        attention,
        value_relation,
        query_relation,
        key_relation,
    )
}


def find_feature(feature: str | Call) -> Feature:
    """The feature a call names, with its options set, and the side of the model it looks at."""
    call = parse(feature)
    side = call.options.get("side", "decoder")
    own = {name: value for name, value in call.options.items() if name != "side"}
    bound = bind(Call(call.name, call.args, own), FEATURES, "feature")
    found = bound.func
    if side not in get_args(Side):
        raise LimbeckError(f'{call}: there is no side "{side}". Allowed: {", ".join(get_args(Side))}.')
    if not isinstance(found, Feature):
        raise LimbeckError(f'feature "{call.name}" does not say where it looks: mark it with @seen_at(…).')
    if side == "cross" and found.site != "attention":
        raise LimbeckError(f"{call}: side=cross goes with scores, attention and the relations.")
    if side == "encoder" and found.rows == "prediction":
        raise LimbeckError(f"{call}: the decoder predicts. Leave out side.")
    return replace(found, side=side, options=bound.keywords)


def last_token(states: Tensor, mask: Tensor) -> Tensor:
    """The state of each example's last token; padding is on the right."""
    last = mask.sum(1).clamp_min(1) - 1
    return torch.take_along_dim(states, last[:, None, None], 1).squeeze(1)


def _cls(seen: Seen, states: Tensor) -> Tensor:
    return last_token(states, seen.mask) if seen.pooling == "last" else states[:, 0]


def _mean(seen: Seen, states: Tensor) -> Tensor:
    if kernels.take(states):
        from limbeck.means import token_means

        return token_means(states, seen.mask)
    states = exact(states)
    return (seen.ones.to(states.dtype) @ states).squeeze(1) / seen.counts


def _final(seen: Seen) -> Tensor:
    if seen.final is None:
        raise RuntimeError("the final states were read, but the forward stopped before them")
    return exact(seen.final)


def _split(states: Tensor, heads: int | None) -> Tensor:
    """Re-cut `(batch, H, positions, d)` into another number of heads: joined per token first, then split."""
    if heads is None or heads == states.shape[1]:
        return exact(states)
    joined = exact(states).transpose(1, 2).flatten(2)
    return joined.unflatten(-1, (heads, -1)).transpose(1, 2)


def _keys(seen: Seen, layer: int) -> Tensor:
    """Which keys a query sees, of a shape that goes with `(batch, heads, queries, keys)`."""
    mask = seen.attention[layer].mask
    return seen.mask[:, None, None, :] if mask is None else mask


def _scores(at: Attention, heads: int | None) -> Tensor:
    if heads is None or heads == at.query.shape[1]:
        products = exact(at.query) @ exact(at.key).transpose(-1, -2) * at.scaling
        if at.softcap is not None:
            products = (products / at.softcap).tanh() * at.softcap
        return products if at.bias is None else products + exact(at.bias)
    query, key = _split(at.query, heads), _split(at.key, heads)
    return query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5  # a bias per head has no meaning in other heads


def _distributions(scores: Tensor, mask: Tensor, allowed: Tensor) -> Rows:
    # Not -inf: an example with no token at all would be NaN, and stay NaN whatever its weight.
    lowest = torch.finfo(scores.dtype).min
    maps = scores.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)
    return Rows(maps, mask[:, None, :].expand(maps.shape[:-1]))
