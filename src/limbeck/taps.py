"""Run a model, keep the sites read, and no others.

Hidden states are caught as blocks take and return them; the final norm of models that have one is a site of its own.
Queries, keys and values come through transformers' attention interface, so that models stay on SDPA; families that do
not use it are caught at their projections. Where all layers are one block, its k-th turn is layer k. A forward goes no
deeper than the deepest site read. Nothing stays attached to the model between calls.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from limbeck import architectures
from limbeck.data import kinds
from limbeck.data.mixing import mix
from limbeck.features import FEATURES, LOGITS, Attention, Rows, Seen
from limbeck.spec import bind, parse
from limbeck.vocabulary import Predictor, Shaping, shaping

Site = tuple[str, int]  # a feature, as a call string, and a layer
Features = dict[Site, Rows]

IMPLEMENTATION, TAPPED = "limbeck", "limbeck_tap"
_watched: ContextVar[Mapping[nn.Module, Callable[[Attention], None]] | None] = ContextVar("watched", default=None)


class Tap:
    """A model whose forward also hands out the features read: `Tap(model, [("cls", 4), ("logits", -1)])(**batch)`."""

    def __init__(self, model: PreTrainedModel, sites: Iterable[Site]) -> None:
        self.sites = sorted(set(sites))
        self.model = model
        self.features = {name: bind(parse(name), FEATURES, "feature") for name, _ in self.sites}
        self.columns = architectures.inputs(model)
        self.kind = kinds.of(model)
        self.hidden = {layer for name, layer in self.sites if self._site(name) == "hidden"}
        self.attention = {layer for name, layer in self.sites if self._site(name) == "attention"}
        depth = architectures.shape(model).layers
        self.final = any(self._site(name) == "final" for name, _ in self.sites)
        self.norm = architectures.final_norm(model) if self.final else None
        if self.final and self.norm is None:
            self.hidden.add(depth)
        self.whole = any(self._site(name) == "logits" for name, _ in self.sites)
        # Layer 0 is what block 1 takes.
        self.depth = depth if self.whole or self.final else max(self.hidden | self.attention | {1})
        self.shaping = shaping(model) if self.whole and self.kind.vocabulary else None
        self.output: nn.Module | None = None  # what is given the states that logits are made of, where it makes none
        self.runs = model if self.whole else architectures.cut_short(model, self.depth)
        if self.shaping is not None:
            self.runs, self.output = architectures.handing_on(model)
        self.givers = self._turns(architectures.giver, self.hidden)
        self.attentions = self._turns(architectures.self_attention, self.attention)
        taken = inspect.signature(self.runs.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in taken else {}
        self.relative: dict[tuple[int, torch.device], Tensor] = {}

    def _site(self, name: str) -> str:
        return self.features[name].func.site

    def _turns(self, of: Callable[[PreTrainedModel, int], nn.Module], wanted: set[int]) -> dict[nn.Module, list[int]]:
        """The modules of wanted layers, and of each the layers it stands for, as often as it gets to run."""
        layers: dict[nn.Module, list[int]] = {}
        for layer in range(1, self.depth + 1 if wanted else 1):
            layers.setdefault(of(self.model, layer), []).append(layer)
        return {module: found for module, found in layers.items() if wanted & set(found)}

    def __call__(self, **batch: Tensor) -> Features:
        if not self.sites:
            return {}
        seen = Seen(
            mask=batch["attention_mask"].bool(),
            projector=architectures.projector(self.model),
            pooling=architectures.pooling(self.model),
            per_token=self.kind.per_token,
        )
        with ExitStack() as attached:
            if "partner" in batch:
                attached.enter_context(self._mix_embeddings(batch))  # first, so that layer 0 is seen mixed
            attached.enter_context(self._watch_hidden(seen))
            attached.enter_context(self._watch_output(seen))
            attached.enter_context(self._watch_attention(seen))
            attached.enter_context(self._attending())
            attached.enter_context(self._placing())
            output = self.runs(**{name: batch[name] for name in self.columns if name in batch}, **self.options)
        if self.whole and self.output is None:
            seen.logits = self.kind.logits(output)
        if self.final and self.norm is None:
            seen.final = seen.hidden[self.depth]
        with full_precision(seen.mask):
            return {(name, layer): self.features[name](seen, layer) for name, layer in self.sites}

    @contextmanager
    def _mix_embeddings(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Mix what enters the first block: embeddings with positions and types, normed, after dropout."""

        def mix_input(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            handle.remove()  # a shared block gets to run again, on states
            if args:
                return (mix(args[0], batch), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": mix(kwargs["hidden_states"], batch)}

        handle = architectures.blocks(self.model)[0].register_forward_pre_hook(mix_input, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _watch_hidden(self, seen: Seen) -> Iterator[None]:
        blocks = architectures.blocks(self.model)

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
            handles.append(blocks[0].register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _watch_output(self, seen: Seen) -> Iterator[None]:
        """Keep what a language model's logits are made of, instead of logits."""

        def keep(_: nn.Module, args: tuple[Tensor]) -> None:
            seen.logits = self.predictor(args[0])

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
        made_by = architectures.output_map(self.model)
        return Predictor(states, made_by.weight, made_by.bias, *(self.shaping or Shaping()))

    @contextmanager
    def _watch_attention(self, seen: Seen) -> Iterator[None]:
        if not self.attention:
            yield
        elif architectures.family(self.model).projections:
            with ExitStack() as hooks:
                for layer in self.attention:
                    hooks.enter_context(_watch_projections(self.model, layer, seen))
                yield
        else:

            def keep(turns: Iterator[int]):
                def hook(found: Attention) -> None:
                    if (layer := next(turns)) in self.attention:
                        seen.attention[layer] = found

                return hook

            token = _watched.set({module: keep(iter(layers)) for module, layers in self.attentions.items()})
            try:
                yield
            finally:
                _watched.reset(token)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Have the model attend by our implementation, where it attends by SDPA or its attention is read."""
        config = self.model.config
        native = config._attn_implementation
        interface = architectures.family(self.model).projections is None
        if interface and (self.attention or native == "sdpa"):
            config._attn_implementation = TAPPED if self.attention else IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = native

    @contextmanager
    def _placing(self) -> Iterator[None]:
        """Make a length's relative positions once: a step that is captured cannot copy from the host, and needs not."""
        if not (path := architectures.family(self.model).relative):
            yield
            return
        place, _, name = path.rpartition(".")
        owner = self.runs.base_model.get_submodule(place)  # type: ignore[union-attr]
        make = getattr(owner, name)

        def once(states: Tensor, *more: Any) -> Tensor:
            key = (states.shape[1], states.device)
            if key not in self.relative:
                self.relative[key] = make(states, *more)
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
        keep(Attention(query, keys, values, scaling, mask=attention_mask, softcap=softcap))
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    own = sys.modules[type(module).__module__].eager_attention_forward
    lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)  # it takes the softmax in fp32
    added = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return own(module, query, key, value, added, **options)


def _always_masked(*args: Any, **options: Any) -> Tensor | None:
    """SDPA's mask, also where it hides nothing, or what SDPA could hide by itself: asking whether it does would wait
    for the device at every step, and a step that is captured could not ask."""
    return sdpa_mask(*args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(TAPPED, _tapped_attention)
AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
AttentionMaskInterface.register(TAPPED, _always_masked)
AttentionMaskInterface.register(IMPLEMENTATION, _always_masked)


@contextmanager
def _watch_projections(model: PreTrainedModel, layer: int, seen: Seen) -> Iterator[None]:
    """Catch q, k, v at their linear maps, and the position bias where the attention is given it, or makes it."""
    attention, family = architectures.self_attention(model, layer), architectures.family(model)
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
