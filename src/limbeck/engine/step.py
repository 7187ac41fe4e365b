"""One optimiser step: example ids in, parameters moved, every loss part out.

Everything a step changes or reads lives in buffers that stay where they are: ids, learning rate, count, weights, draws.
So the same code runs eagerly (on CPU, under DDP) and as a captured CUDA graph, one a batch shape.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from limbeck import kernels
from limbeck.data.plan import Length
from limbeck.data.resident import Resident, Streamed
from limbeck.distiller import Distiller, Output
from limbeck.engine.blocks import Recomputed, Swapped
from limbeck.engine.captures import Captures
from limbeck.engine.checkpoints import Checkpoint
from limbeck.engine.compiled import Compiled, failed
from limbeck.engine.half import Half
from limbeck.engine.products import frozen_forwards
from limbeck.engine.sharding import average, clip, hold_ends, is_sharded
from limbeck.engine.world import seed_for
from limbeck.recipe import Stage
from limbeck.taps import Tap

if TYPE_CHECKING:
    from limbeck.engine.one_pass import OnePass


class Step:
    """The step of a stage, the same whether the batch is whole, in pieces, or shared by several processes."""

    def __init__(
        self,
        distiller: Distiller,
        stage: Stage,
        accelerator: Accelerator,
        tokens: Resident | Streamed,
        *,
        eager: bool = False,
        compiled: bool = False,
        recomputed: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        device = accelerator.device
        self.accelerator, self.tokens, self.clip, self.say = accelerator, tokens, stage.clip, say
        self.teacher = distiller.teacher
        self.count = torch.tensor(1.0, device=device)
        self.ids: dict[int, Tensor] = {}  # a buffer a piece size
        self.names = ["loss", *distiller.terms]
        self.parts = torch.zeros(len(self.names), device=device)
        cuda = device.type == "cuda"
        adam = {"betas": tuple(stage.betas), "eps": stage.eps}
        self.optimizer = torch.optim.AdamW(groups(distiller, stage), **adam, fused=True, capturable=cuda)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.sharded = is_sharded(distiller.student)
        if self.sharded:
            hold_ends([distiller.tap, distiller.plain])
        alone = accelerator.num_processes == 1 and not self.sharded
        self.half_products = accelerator.mixed_precision == "bf16"
        self.module: nn.Module = distiller if alone or self.sharded else accelerator.prepare_model(distiller)
        self.captures = None
        if cuda and not eager:
            self.captures = captures(distiller, say, alone=alone, recomputed=recomputed)
        self.stream = torch.cuda.Stream() if self.captures else None
        if cuda:
            prime(self.optimizer)
        # DDP and recomputed blocks know the weights themselves, so with them these are cast by autocast instead.
        halves = alone and self.half_products and not recomputed
        self.half = Half(distiller, own_products=not compiled) if halves else None
        copied = {id(weight) for weight in distiller.student.parameters()} if self.half else set()
        self.direct = [p for p in self.parameters if id(p) not in copied]  # these get their gradients from autograd
        own = kernels.run_on(distiller.student.device)
        self.one_pass = updating_at_once(self.optimizer, self.half, self.direct) if self.half and own else None
        if self.half and not self.one_pass:
            self.half.give_gradients()
        self.unclipped = torch.ones((), device=device)
        self.compiled = Compiled([distiller.tap, *live_taps(distiller)]) if compiled else None
        above = light_teacher(distiller) if self.half and not compiled else None
        self.above = Swapped(swift_forwards(above) if above else {})
        self.recomputed = Recomputed(distiller.student) if recomputed else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Where steps run: if they are captured, on a stream of their own, since the default one cannot be."""
        if self.half:
            self.half.refresh()  # somebody may have changed the weights
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, pieces: Sequence[np.ndarray], length: Length, examples: int, lr: float, seed: int) -> None:
        """Step on one optimiser batch of `examples`; `pieces` are the example ids of this process's share of it."""
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            rate.fill_(lr * group["pace"])
        # DDP averages gradients over processes; dividing by less makes that the sum contract 5 asks for.
        self.count.fill_(examples / self.accelerator.num_processes)
        if len(pieces) == 1:
            ids = self._load(pieces[0], length)
            self._run(("whole", len(ids), length), lambda: self._whole(ids, length), seed)
            return
        self._run("begin", self._begin, seed)
        for i, piece in enumerate(pieces):
            ids, last = self._load(piece, length), i == len(pieces) - 1
            work = partial(self._backward, ids, length, last)
            self._run(("piece", len(ids), length), work, seed_for(seed, i))
        self._run("update", partial(self._update, summed=True), seed)

    def _run(self, key: Hashable, work: Callable[[], None], seed: int) -> None:
        torch.manual_seed(seed)
        try:
            with tensor_cores() if self.half_products else nullcontext():
                if self.captures:
                    self.captures.run(key, work, seed)
                else:
                    work()
        except RuntimeError as error:
            if self.compiled is None or not failed(error):
                raise
            self.compiled = None
            self.say(f"blocks are not compiled: {str(error).strip().splitlines()[0]}")
            self._run(key, work, seed)

    def _whole(self, ids: Tensor, length: Length) -> None:
        for parameter in self.direct:
            parameter.grad = None  # nothing to add to: gradients are written, not accumulated
        self._refresh()
        self._backward(ids, length, True, add=False)
        self._update()

    def _begin(self) -> None:
        # Gradients stay where they are, and pieces add to them; no operation zeroes sharded ones beside whole ones.
        self.optimizer.zero_grad(set_to_none=self.sharded)
        if self.half:
            self.half.sum.zero_()
        self._refresh()

    def _refresh(self) -> None:
        self.parts.zero_()
        if self.half and not self.one_pass:
            self.half.refresh()

    def _backward(self, ids: Tensor, length: Length, last: bool, add: bool = True) -> None:
        with nullcontext() if last else self.accelerator.no_sync(self.module):
            output = self._forward(ids, length)
            output.loss.backward()
        if self.half:
            self.half.settle()
            if add or not self.one_pass:
                self.half.hand_over(add=add)
        self.parts.add_(torch.stack([output.loss.detach(), *(part.detach() for part in output.parts.values())]))

    def _forward(self, ids: Tensor, length: Length) -> Output:
        batch = self.tokens.batch(ids, length) | {"count": self.count}
        swapped = self.compiled or self.recomputed
        with swapped.running() if swapped else nullcontext():
            if self.half:
                with self.above.running():
                    return self.half(**batch)
            with self.accelerator.autocast():
                return self.module(**batch)

    def _update(self, summed: bool = False) -> None:
        if self.sharded:
            average(self.parameters)
        if self.half and self.one_pass:
            gradients = [self.half.sum if summed else self.half.made, *self.one_pass.gather()]
            self.one_pass(shortening(gradients, self.clip) if self.clip else self.unclipped, summed=summed)
            return
        if self.clip:
            (clip if self.sharded else nn.utils.clip_grad_norm_)(self.parameters, self.clip)
        self.optimizer.step()

    def _load(self, ids: np.ndarray, length: Length) -> Tensor:
        self.tokens.fetch(ids, length)
        if self.teacher is not None:
            self.teacher.fetch(ids, length)
        if len(ids) not in self.ids:
            self.ids[len(ids)] = torch.zeros(len(ids), dtype=torch.long, device=self.accelerator.device)
        return self.ids[len(ids)].copy_(torch.from_numpy(ids), non_blocking=True)

    def read(self) -> dict[str, float]:
        """The parts of the whole last batch, as numbers. This waits for the device: call it when logging only."""
        values = self.accelerator.reduce(self.parts.clone(), reduction="mean")
        return dict(zip(self.names, values.tolist()))  # type: ignore[union-attr]

    def resume(self, checkpoint: Checkpoint) -> None:
        """Bring back the optimiser, and keep the buffers that captured steps read."""
        checkpoint.load_optimizer(self.optimizer)
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate
        if self.one_pass:
            self.one_pass.locate()


def captures(
    distiller: Distiller, say: Callable[[str], None], *, alone: bool = True, recomputed: bool = False
) -> Captures | None:
    """Where steps are captured; None where something keeps them from it, which is said."""
    terms: dict[str, list[str]] = {}  # by what keeps them from it
    for name, term in distiller.terms.items():
        if term.uncapturable:
            terms.setdefault(term.uncapturable, []).append(name)
    reasons = [f"{', '.join(names)}: {why}" for why, names in terms.items()]
    if not alone:
        reasons.append("processes wait for each other")
    if recomputed:
        reasons.append("what recomputes its activations asks the generator for its state")
    for reason in reasons:
        say(f"steps are not captured and run eagerly: {reason}")
    return None if reasons else Captures(say)


def light_teacher(distiller: Distiller) -> PreTrainedModel | None:
    """The teacher that runs in a step, if it is a copy in half precision, which nobody else has and nobody trains."""
    live = distiller.teacher and distiller.teacher.live
    return live.model if live and live.light else None


def swift_forwards(teacher: PreTrainedModel) -> dict[nn.Module, Callable[..., Tensor]]:
    """What a teacher's modules run instead of their own forwards, if it is ours alone."""
    made: dict[nn.Module, Callable[..., Tensor]] = {**frozen_forwards(teacher)}
    if kernels.run_on(teacher.device):
        from limbeck.engine.residual import frozen_residuals

        made |= frozen_residuals(teacher)
    return made


def updating_at_once(optimizer: torch.optim.AdamW, half: Half, direct: Sequence[Tensor]) -> "OnePass | None":
    """What updates weights, moments and copies in one pass, and those that get their gradients from autograd as well;
    None where no student trains, or weights do not lie as it takes for granted."""
    if not half.trained or not all(map(_plain, [*half.trained.values(), *direct])):
        return None
    from limbeck.engine.one_pass import Gathered, OnePass, Place

    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    copies = {name: part for leaf in half.leaves for name, part in leaf.copies().items()}
    made = {name: part for leaf in half.leaves for name, part in leaf.gradients().items()}
    places = [
        Place(weight, copies[name].detach(), made[name], half.gradients[name], groups[id(weight)])
        for name, weight in half.trained.items()
    ]
    gathered = Gathered(direct) if direct else None
    if gathered:
        places += [Place(w, None, None, part, groups[id(w)]) for w, part in zip(direct, gathered.parts)]
    return OnePass(optimizer, places, gathered)


def _plain(weight: Tensor) -> bool:
    """Whether it is fp32, in one piece, and begins where wide loads may."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and weight.data_ptr() % 16 == 0


def shortening(gradients: Sequence[Tensor], most: float) -> Tensor:
    """The factor that makes gradients no longer, all together, than `most`."""
    norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients])
    return (most / (norms.norm() + 1e-6)).clamp_max(1.0)


def live_taps(distiller: Distiller) -> list[Tap]:
    """How the teacher is run in a step, if it is."""
    teacher = distiller.teacher
    return [teacher.live.tap] if teacher and teacher.live else []


def groups(distiller: Distiller, stage: Stage) -> list[dict]:
    """Parameter groups: weights decay, biases and norms do not; a term may have a pace of its own. No group has sharded
    parameters and whole ones."""
    paces = {id(p): term.pace for term in distiller.terms.values() for p in term.parameters()}
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in distiller.parameters():
        if parameter.requires_grad:
            decay = stage.weight_decay if parameter.dim() > 1 else 0.0
            found.setdefault((paces.get(id(parameter), 1.0), decay), []).append(parameter)
    # A checkpoint knows parameters by their place, so the order is the same whether they are sharded or not.
    return [
        {"params": alike, "weight_decay": decay, "pace": pace, "lr": _rate(stage.lr * pace, alike[0])}
        for (pace, decay), members in found.items()
        for alike in (list(run) for _, run in groupby(members, key=lambda p: isinstance(p, DTensor)))
    ]


def _rate(lr: float, like: Tensor) -> Tensor:
    """A learning rate where the parameters are, which a captured step reads."""
    return torch.tensor(lr, device=like.device)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Products in fp32 may use TF32: where models run in bf16, these are the losses' and aligners' alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimiser make its state now, by a step that moves nothing: made while capturing, it would be made anew
    at every replay."""
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
