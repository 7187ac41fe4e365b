"""Run a model, keep the sites read, and no others.

Hidden states are caught as blocks take and return them; the final norm of models that have one is a site of its own.
Queries, keys and values come through transformers' attention interface, so that models stay on SDPA; families that do
not use it are caught at their projections. Where all layers are one block, its k-th turn is layer k. A forward goes no
deeper than the deepest site read; where all are an encoder's, its decoder does not run. Nothing stays attached to the
model between calls.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from limbeck import architectures, views
from limbeck.architectures import Side
from limbeck.data import kinds
from limbeck.data.mixing import mix
from limbeck.features import LOGITS, Attention, Rows, Seen, find_feature
from limbeck.vocabulary import Predictor, Shaping, shaping


class Site(NamedTuple):
    """What is read of a model."""

    feature: str  # a call string
    layer: int


Features = dict[tuple[str, int], Rows]  # by site

SIDES: tuple[Side, ...] = ("encoder", "decoder", "cross")  # in the order they run
IMPLEMENTATION, TAPPED, ADDED = "limbeck", "limbeck_tap", "limbeck_added"
_watched: ContextVar[Mapping[nn.Module, Callable[[Attention], None]] | None] = ContextVar("watched", default=None)


class Stack:
    """What is read on one side of a model."""

    def __init__(self, model: PreTrainedModel, side: Side, read: list[tuple[str, int]]) -> None:
        self.model = model
        self.side: Side = side
        self.hidden = {layer for site, layer in read if site == "hidden"}
        self.attention = {layer for site, layer in read if site == "attention"}
        depth = architectures.shape(model).at(side).layers
        self.final = any(site == "final" for site, _ in read)
        self.norm = architectures.final_norm(model, side) if self.final else None
        if self.final and self.norm is None:
            self.hidden.add(depth)
        self.whole = any(site == "logits" for site, _ in read)
        # Layer 0 is what block 1 takes.
        self.depth = depth if self.whole or self.final else max(self.hidden | self.attention | {1})
        self.givers = self._turns(architectures.giver, self.hidden)
        self.attentions = self._turns(architectures.attention, self.attention)

    def _turns(self, of: Callable[..., nn.Module], wanted: set[int]) -> dict[nn.Module, list[int]]:
        """The modules of wanted layers, and of each the layers it stands for, as often as it gets to run."""
        layers: dict[nn.Module, list[int]] = {}
        for layer in range(1, self.depth + 1 if wanted else 1):
            layers.setdefault(of(self.model, layer, self.side), []).append(layer)
        return {module: found for module, found in layers.items() if wanted & set(found)}

    @contextmanager
    def watching(self, seen: Seen) -> Iterator[None]:
        """Keep the hidden states read."""

        def keep_input(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            seen.hidden.setdefault(0, args[0] if args else kwargs["hidden_states"])

        def keep_output(turns: Iterator[int]):
            def hook(_: nn.Module, __: tuple, output: Any) -> None:
                if (layer := next(turns)) in self.hidden:
                    seen.hidden[layer] = output if isinstance(output, Tensor) else output[0]

            return hook

        def keep_final(_: nn.Module, __: tuple, output: Tensor) -> None:
            seen.final = output

        handles = [module.register_forward_hook(keep_output(iter(layers))) for module, layers in self.givers.items()]
        if self.norm is not None:
            handles.append(self.norm.register_forward_hook(keep_final))
        if 0 in self.hidden:
            first = architectures.blocks(self.model, self.side)[0]
            handles.append(first.register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self.final and self.norm is None:
            seen.final = seen.hidden[self.depth]

    def keepers(self, seen: Seen) -> dict[nn.Module, Callable[[Attention], None]]:
        """What keeps the attention read, by the module it is of."""

        def keep(turns: Iterator[int]):
            def hook(found: Attention) -> None:
                if (layer := next(turns)) in self.attention:
                    seen.attention[layer] = found

            return hook

        return {module: keep(iter(layers)) for module, layers in self.attentions.items()}


class Tap:
    """A model whose forward also hands out the features read: `Tap(model, [("cls", 4), ("logits", -1)])(**batch)`."""

    def __init__(self, model: PreTrainedModel, sites: Iterable[tuple[str, int]]) -> None:
        self.sites = sorted({Site(*site) for site in sites})
        self.model = model
        self.features = {name: find_feature(name) for name, _ in self.sites}
        self.kind = kinds.of(model)
        read = {feature.side for feature in self.features.values()} or {"decoder"}
        self.stacks: dict[Side, Stack] = {
            side: Stack(model, side, self._read_on(side)) for side in SIDES if side in read
        }
        self.whole = any(stack.whole for stack in self.stacks.values())
        self.side: Side = "encoder" if read == {"encoder"} else "decoder"
        self.last = [stack for stack in self.stacks.values() if (stack.side == "encoder") == (self.side == "encoder")]
        self.depth = max(stack.depth for stack in self.last)
        self.shaping = shaping(model) if self.whole and self.kind.vocabulary else None
        self.output: nn.Module | None = None  # what is given the states that logits are made of, where it makes none
        self.runs = model if self.whole else views.cut_short(model, self.depth, self.side)
        if self.shaping is not None:
            self.runs, self.output = views.handing_on(model)
        taken = inspect.signature(self.runs.forward).parameters
        self.columns = tuple(name for name in architectures.inputs(model) if name in taken)
        self.options = {"use_cache": False} if "use_cache" in taken else {}
        self.configs = architectures.configs(model)
        self.relative: dict[tuple[int, torch.device], Tensor | None] = {}

    def _read_on(self, side: Side) -> list[tuple[str, int]]:
        read = [(self.features[name], layer) for name, layer in self.sites]
        return [(feature.site, layer) for feature, layer in read if feature.side == side]

    @property
    def attends(self) -> bool:
        """Whether attention is read."""
        return any(stack.attention for stack in self.stacks.values())

    @property
    def ends_in_attention(self) -> bool:
        """Whether no more is read of the last block that runs than its attention."""
        hidden, attention = (set().union(*(getattr(s, name) for s in self.last)) for name in ("hidden", "attention"))
        return self.depth in attention - hidden and not self.whole

    def plain_blocks(self) -> list[nn.Module]:
        """The blocks that run and whose attention is not read."""
        ran = list(architectures.blocks(self.model, self.side)[: self.depth])
        if self.side == "decoder" and "encoder" in architectures.sides(self.model):
            ran += architectures.blocks(self.model, "encoder")
        stacks = self.stacks.values()
        read = {architectures.blocks(self.model, stack.side)[k - 1] for stack in stacks for k in stack.attention}
        return [block for block in ran if block not in read]

    def __call__(self, **batch: Tensor) -> Features:
        if not self.sites:
            return {}
        seen: dict[Side, Seen] = {side: self._blank(side, batch) for side in self.stacks}
        with ExitStack() as attached:
            if "partner" in batch:
                attached.enter_context(self._mix_embeddings(batch))  # first, so that layer 0 is seen mixed
            for side, stack in self.stacks.items():
                attached.enter_context(stack.watching(seen[side]))
            attached.enter_context(self._watch_output(seen))
            attached.enter_context(self._watch_attention(seen))
            attached.enter_context(self._attending())
            attached.enter_context(self._placing())
            output = self.runs(**architectures.arguments(self.model, batch, self.columns), **self.options)
        if self.whole and self.output is None:
            seen["decoder"].logits = self.kind.logits(output)
        with full_precision(batch["attention_mask"]):
            found = {}
            for name, layer in self.sites:
                feature = self.features[name]
                found[name, layer] = feature(seen[feature.side], layer)
            return found

    def _blank(self, side: Side, batch: Mapping[str, Tensor]) -> Seen:
        """What is known of a side before the forward."""
        source = batch["attention_mask"].bool()
        written = side != "encoder" and "encoder" in architectures.sides(self.model)
        return Seen(
            mask=architectures.target_mask(batch).bool() if written else source,
            keys=source if side == "cross" else None,
            projector=architectures.projector(self.model),
            pooling=architectures.pooling(self.model, side),
            per_token=self.kind.per_token,
        )

    @contextmanager
    def _mix_embeddings(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Mix what enters the first block: embeddings with positions and types, normed, after dropout."""

        def mix_input(first: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            handles[first].remove()  # a shared block gets to run again, on states
            if args:
                return (mix(args[0], batch), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": mix(kwargs["hidden_states"], batch)}

        firsts = [architectures.blocks(self.model, side)[0] for side in architectures.sides(self.model)]
        handles = {first: first.register_forward_pre_hook(mix_input, with_kwargs=True) for first in firsts}
        try:
            yield
        finally:
            for handle in handles.values():
                handle.remove()

    @contextmanager
    def _watch_output(self, seen: Mapping[Side, Seen]) -> Iterator[None]:
        """Keep what a language model's logits are made of, instead of logits."""

        def keep(_: nn.Module, args: tuple[Tensor]) -> None:
            seen["decoder"].logits = self.predictor(args[0])

        hook = self.output.register_forward_pre_hook(keep) if self.output is not None else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def words(self, site: Site) -> bool:
        """Whether a site's values are predictions of words, yet to be made."""
        return self.output is not None and site == ("logits", LOGITS)

    def predictor(self, states: Tensor) -> Predictor:
        """Logits of these last states, yet to be made, by the weights the model has now."""
        weight, bias = architectures.output_map(self.model).weight, architectures.output_bias(self.model)
        return Predictor(states, weight, bias, *(self.shaping or Shaping()))

    @contextmanager
    def _watch_attention(self, seen: Mapping[Side, Seen]) -> Iterator[None]:
        if not self.attends:
            yield
        elif architectures.family(self.model).projections:
            with ExitStack() as hooks:
                for layer in self.stacks["decoder"].attention:
                    hooks.enter_context(_watch_projections(self.model, layer, seen["decoder"]))
                yield
        else:
            keepers = [stack.keepers(seen[side]) for side, stack in self.stacks.items()]
            token = _watched.set({module: keep for found in keepers for module, keep in found.items()})
            try:
                yield
            finally:
                _watched.reset(token)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Have the model attend by our implementation, where it attends by SDPA, caps its scores, or is read. One that
        knows no implementations attends as it does, with a mask that we make."""
        config = self.model.config
        tapped = self.attends or architectures.made_with(config)
        by = TAPPED if tapped else IMPLEMENTATION if config._attn_implementation == "sdpa" else None
        if architectures.family(self.model).projections:
            by = ADDED
        with architectures.attending_by(self.configs, by) if by else nullcontext():
            yield

    @contextmanager
    def _placing(self) -> Iterator[None]:
        """Make a length's relative positions once: a step that is captured cannot copy from the host, and needs not."""
        if not (path := architectures.family(self.model).relative):
            yield
            return
        place, _, name = path.rpartition(".")
        owner = self.runs.base_model.get_submodule(place)  # type: ignore[union-attr]
        make = getattr(owner, name)

        def once(states: Tensor, *more: Any, **options: Any) -> Tensor | None:
            key = (states.shape[1], self.model.device)
            if key not in self.relative:
                found = make(states, *more, **options)
                self.relative[key] = found if found is None else found.to(self.model.device)
            return self.relative[key]

        setattr(owner, name, once)
        try:
            yield
        finally:
            delattr(owner, name)


def full_precision(like: Tensor) -> torch.autocast:
    """Models run under autocast where there is one; features and losses never do."""
    return torch.autocast(like.device.type, enabled=False)


def _tapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
):
    """Keep q, k, v of a watched layer, then attend as SDPA does, or as the model does where SDPA cannot."""
    softcap = options.get("softcap")
    if keep := (_watched.get() or {}).get(module):
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        groups = query.shape[1] // key.shape[1]  # grouped-query attention shares keys and values among several heads
        keys, values = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
        bias = options.get("position_bias")
        keep(Attention(query, keys, values, scaling, bias, attention_mask, softcap))
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    own = sys.modules[type(module).__module__].eager_attention_forward
    lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)  # it takes the softmax in fp32
    added = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return own(module, query, key, value, added, **options)


def _always_masked(*args: Any, **options: Any) -> Tensor:
    """SDPA's mask, also where it hides nothing, or what SDPA could hide by itself: asking whether it does would wait
    for the device at every step, and a step that is captured could not ask."""
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **options | never)  # type: ignore[return-value]


def _always_added(*args: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """The same to be added to scores; transformers 5.17 copies its zero from the host, which capturing forbids."""
    seen = _always_masked(*args, **options)
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _made_once(*args: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """A mask as SDPA adds it, in half precision: of any other, every layer would make its own. Autocast may still turn
    what is fp32 here into bf16, where the lowest number is another."""
    make = _always_added if dtype in (torch.bfloat16, torch.float16) else _always_masked
    return make(*args, dtype=dtype, **options)


AttentionInterface.register(TAPPED, _tapped_attention)
AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
AttentionMaskInterface.register(TAPPED, _always_masked)
AttentionMaskInterface.register(IMPLEMENTATION, _made_once)
AttentionMaskInterface.register(ADDED, _always_added)


@contextmanager
def _watch_projections(model: PreTrainedModel, layer: int, seen: Seen) -> Iterator[None]:
    """Catch q, k, v at their linear maps, and the position bias where the attention is given it, or makes it."""
    attention, family = architectures.attention(model, layer), architectures.family(model)
    heads = model.config.num_attention_heads
    taken = inspect.signature(attention.forward)
    caught: list[Tensor] = []
    biases: list[Tensor] = []

    def keep_projection(_: nn.Module, __: tuple, output: Tensor) -> None:
        caught.append(output.unflatten(-1, (heads, -1)).transpose(1, 2))

    def keep_attention(_: nn.Module, args: tuple, kwargs: dict[str, Any], __: Any) -> None:
        query, key, value = caught[:3]  # DeBERTa may project its positions next, by the same maps
        given = taken.bind(*args, **kwargs).arguments.get(family.bias)
        bias = biases[0].unflatten(0, (-1, heads)) if biases else given
        scaling = architectures.scaling(attention, query.shape[-1])
        seen.attention[layer] = Attention(query, key, value, scaling, bias)

    with ExitStack() as hooks:
        for name in family.projections or ():
            hooks.callback(attention.get_submodule(name).register_forward_hook(keep_projection).remove)
        hooks.callback(attention.register_forward_hook(keep_attention, with_kwargs=True).remove)
        if method := getattr(attention, family.bias, None):
            hooks.callback(delattr, attention, family.bias)
            setattr(attention, family.bias, _keeping(method, biases))
        yield


def _keeping(method: Callable[..., Any], kept: list[Tensor]) -> Callable[..., Any]:
    """The same method, whose answers are also kept; a bias without terms is the number 0, and is not."""

    def keep(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if isinstance(answer, Tensor):
            kept.append(answer)
        return answer

    return keep
