"""Half precision: forward and backward run on bf16 copies of the student's weights; what is optimised stays in fp32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call

from limbeck import kernels
from limbeck.distiller import Distiller, Output
from limbeck.engine.beside import Beside
from limbeck.engine.blocks import Swapped
from limbeck.engine.dropout import Draws
from limbeck.engine.forks import Forks
from limbeck.engine.products import Leaf, joints, trained_forwards

APART = 64  # numbers: what is laid one after another begins at multiples of this


class Half:
    """A distiller whose student runs in bf16 throughout, and whose gradients arrive at the fp32 weights.

    Under autocast every layer casts its weights and inputs, and norms and residual sums stay in fp32: kernels that
    small batches notice. Objectives and aligners are not touched; they compute in fp32. With `own_products`, linear
    maps, norms and embeddings run as products.py has them, and residual sums as residual.py where there are kernels,
    otherwise as torch does.
    """

    def __init__(self, distiller: Distiller, *, own_products: bool = True) -> None:
        self.distiller, student = distiller, distiller.student
        weights = dict(student.named_parameters())
        self.trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        self.frozen = {name: weight.detach().bfloat16() for name, weight in frozen.items()}
        self.beside, self.draws, self.forks = Beside(), Draws(), Forks()
        joined = [maps for maps in joints(student) if own_products and self._all_train(maps)]
        together = [[f"{one}.{part}" for one in maps] for maps in joined for part in ("weight", "bias")]
        together = [names for names in together if names[0] in self.trained]
        others = self.trained.keys() - {name for names in together for name in names}
        self.leaves = self._laid_out([*together, *([name] for name in self.trained if name in others)])
        by_name = {name: leaf for leaf in self.leaves for name in leaf.names}
        own = trained_forwards(student, joined, by_name, self.beside, self.forks) if own_products else {}
        if own_products and kernels.run_on(student.device):
            from limbeck.engine.residual import trained_residuals

            own |= trained_residuals(student, by_name, self.beside, self.draws, self.forks)
        self.swapped = Swapped(own)
        parts = {name: part for leaf in self.leaves for name, part in leaf.copies().items()}
        self.copied = [(part.detach(), weights[name].detach()) for name, part in {**parts, **self.frozen}.items()]

    def _all_train(self, maps: Sequence[str]) -> bool:
        found = [(one, self.distiller.student.get_submodule(one)) for one in maps]
        return all(name in self.trained for one, module in found for name, _ in module.named_parameters(one))

    def _laid_out(self, together: Sequence[Sequence[str]]) -> list[Leaf]:
        """Leaves for these weights, all in one buffer, and their gradients in two: of one backward, and their sum."""
        sizes = [sum(self.trained[name].numel() for name in names) for names in together]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // APART) * APART)
        device = self.distiller.student.device
        copies, self.made = (torch.zeros(starts[-1], dtype=torch.bfloat16, device=device) for _ in range(2))
        self.sum = torch.zeros(starts[-1], device=device)
        leaves, self.gradients = [], {}
        for names, start, size in zip(together, starts, sizes):
            first = self.trained[names[0]]
            rows = [len(self.trained[name]) if first.dim() else 1 for name in names]
            shape = (sum(rows), *first.shape[1:]) if first.dim() else ()
            copy, made, summed = (flat[start : start + size].view(shape) for flat in (copies, self.made, self.sum))
            leaves.append(Leaf(names, rows, copy, made))
            self.gradients |= dict(zip(names, summed.split(rows) if len(rows) > 1 else [summed]))
        return leaves

    def refresh(self) -> None:
        """Bring the copies up to date with the weights."""
        copies, weights = zip(*self.copied)
        torch._foreach_copy_(copies, weights)  # pyright: ignore

    def __call__(self, **batch: Any) -> Output:
        """The distiller's forward, on the copies."""
        for leaf in self.leaves:  # a backward that failed, as in a capture, may have left something
            leaf.tensor.grad, leaf.written = None, False
        self.forks.begin()
        self.draws.begin()
        copies = {name: part for leaf in self.leaves for name, part in leaf.copies().items()} | self.frozen
        with self.swapped.running():
            return functional_call(
                self.distiller, {f"student.{name}": copy for name, copy in copies.items()}, kwargs=batch
            )

    def give_gradients(self) -> None:
        """Have the weights see their gradients, for an optimiser that reads them there."""
        for name, weight in self.trained.items():
            weight.grad = self.gradients[name]

    def settle(self) -> None:
        """Once a backward has ended: wait for what ran beside, and take what autograd found by other ways than ours.
        What nobody found is 0."""
        self.beside.join()
        self.forks.settle()
        found = [leaf for leaf in self.leaves if leaf.tensor.grad is not None]
        for written, move in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):  # pyright: ignore
            if alike := [leaf for leaf in found if leaf.written == written]:
                move([leaf.gradient for leaf in alike], [leaf.tensor.grad for leaf in alike])  # pyright: ignore
        for leaf in self.leaves:
            if leaf.tensor.grad is None and not leaf.written:
                leaf.gradient.zero_()
            leaf.tensor.grad, leaf.written = None, False

    def hand_over(self, *, add: bool) -> None:
        """Move the copies' gradients to the weights, added to what is there or in its stead."""
        (self.sum.add_ if add else self.sum.copy_)(self.made)
