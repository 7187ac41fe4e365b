"""One optimiser step: micro-batches in, parameters moved, every loss part out."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from limbeck.distiller import Distiller
from limbeck.recipe import Stage


class Step:
    """The step of a stage, the same whether the batch is whole, in pieces, or shared by several processes."""

    def __init__(self, distiller: Distiller, stage: Stage, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.stage = stage
        self.optimizer = torch.optim.AdamW(groups(distiller, stage), lr=stage.lr, fused=True)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.module: nn.Module = accelerator.prepare_model(distiller)

    def __call__(self, pieces: Sequence[dict[str, Tensor]], examples: int, lr: float) -> dict[str, Tensor]:
        """Step on one optimiser batch of `examples`, of which `pieces` are this process's share."""
        self.module.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # DDP averages gradients over processes; dividing by less makes that the sum contract 5 asks for.
        count = torch.tensor(examples / self.accelerator.num_processes, device=self.accelerator.device)
        parts: dict[str, Tensor] = {}
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                output = self.module(**piece, count=count)
                self.accelerator.backward(output.loss)
            for name, part in [*output.parts.items(), ("loss", output.loss)]:
                parts[name] = parts[name] + part.detach() if name in parts else part.detach()
        if self.stage.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.stage.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return parts

    def mean_over_processes(self, parts: dict[str, Tensor]) -> dict[str, float]:
        """The parts of the whole batch, as numbers. This waits for the device: call it when logging only."""
        names = list(parts)
        values = self.accelerator.reduce(torch.stack([parts[name].float() for name in names]), reduction="mean")
        return dict(zip(names, values.tolist()))  # type: ignore[union-attr]


def groups(distiller: Distiller, stage: Stage) -> list[dict]:
    """Parameter groups: weights decay; biases and norms do not."""
    trained = [p for p in distiller.parameters() if p.requires_grad]
    decayed, plain = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return _nonempty([{"params": decayed, "weight_decay": stage.weight_decay}, {"params": plain, "weight_decay": 0.0}])


def _nonempty(groups: Iterable[dict]) -> list[dict]:
    return [group for group in groups if group["params"]]
