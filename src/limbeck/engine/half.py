"""Half precision: forward and backward run on bf16 copies of the student's weights; what is optimised stays in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from limbeck.distiller import Distiller, Output


class Half:
    """A distiller whose student runs in bf16 throughout, and whose gradients arrive at the fp32 weights.

    Under autocast every layer casts its weights and inputs, and norms and residual sums stay in fp32: kernels that
    small batches notice. Objectives and aligners are not touched; they compute in fp32.
    """

    def __init__(self, distiller: Distiller) -> None:
        self.distiller = distiller
        weights = {f"student.{name}": weight for name, weight in distiller.student.named_parameters()}
        self.weights = [weight.detach() for weight in weights.values()]
        self.copies = {
            name: weight.detach().bfloat16().requires_grad_(weight.requires_grad) for name, weight in weights.items()
        }
        trained = [(weight, self.copies[name]) for name, weight in weights.items() if weight.requires_grad]
        self.trained = [copy for _, copy in trained]
        self.gradients = [torch.zeros_like(weight) for weight, _ in trained]
        for (weight, _), gradient in zip(trained, self.gradients):
            weight.grad = gradient

    def refresh(self) -> None:
        """Bring the copies up to date with the weights."""
        torch._foreach_copy_([copy.detach() for copy in self.copies.values()], self.weights)  # pyright: ignore

    def __call__(self, **batch: Any) -> Output:
        """The distiller's forward, on the copies."""
        return functional_call(self.distiller, self.copies, kwargs=batch)

    def hand_over(self, *, add: bool) -> None:
        """Move the copies' gradients to the weights, added to what is there or in its stead."""
        if not self.trained:  # a stage that trains aligners alone
            return
        found: list[Tensor] = [copy.grad for copy in self.trained if copy.grad is not None]
        (torch._foreach_add_ if add else torch._foreach_copy_)(self.gradients, found)  # pyright: ignore
        for copy in self.trained:
            copy.grad = None
