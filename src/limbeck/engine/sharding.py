"""Models cut over processes (FSDP2): each holds a piece of every weight, and has a block whole while it runs."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from limbeck import architectures
from limbeck.data import kinds
from limbeck.errors import LimbeckError
from limbeck.taps import Tap


def check_processes() -> None:
    """There must be processes to cut a model over."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise LimbeckError(
            "--shard cuts the models over several processes, and there is one. Start them with torchrun "
            "--nproc_per_node N -m limbeck …, or leave --shard out."
        )


def shard(model: PreTrainedModel, *, half: bool = False) -> None:
    """Cut a model over all processes, in place, block by block. Every process calls it, with equal weights.

    `half`: it runs in bf16; what is trained, and the sums of gradients over processes, stay in fp32.
    """
    # T5's blocks hand on position biases that are views; nothing writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options = {
        "mesh": init_device_mesh(model.device.type, (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy(),
        "reshard_after_forward": True,  # also at the top, which a teacher would otherwise hold whole for ever
    }
    for block in architectures.every_block(model):
        fully_shard(block, **options)
    # These are read outside the model's forward, where a sharded module is in pieces.
    words = [architectures.output_map(model)] if kinds.of(model).vocabulary else []
    outside = [architectures.projector(model), *words]
    fully_shard(model, ignored_params={p for module in outside if module for p in module.parameters()}, **options)
    if "encoder" in architectures.sides(model):
        # A model that writes runs its encoder before its own forward, which would gather what lies around the blocks.
        model.get_encoder().register_forward_pre_hook(lambda *_: cast(FSDPModule, model).unshard())


def hold_ends(taps: Sequence[Tap]) -> None:
    """Set which weights of a sharded model stay whole from its forward to its backward; `taps` are how it runs.

    Weights come back when a gradient reaches a module's output. Where only the attention of the last block is read,
    none reaches the outputs of that block and of the model.
    """
    model = taps[0].model
    ends = [tap for tap in taps if tap.ends_in_attention]
    words = any(tap.output is not None for tap in taps)  # what is read then enters the output map
    held: set[nn.Module] = {architectures.blocks(model, tap.side)[tap.depth - 1] for tap in ends}
    held |= {model} if ends or words else set()
    for module in (model, *architectures.every_block(model)):
        cast(FSDPModule, module).set_reshard_after_forward(module not in held, recurse=False)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is cut over processes."""
    return isinstance(model, FSDPModule)


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients of parameters that every process has whole their mean over processes, as FSDP does with the
    others'."""
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale gradients down to a norm of at most `most`, over those in pieces and those that are whole."""
    alike: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    norms = [whole(nn.utils.get_total_norm([p.grad for p in some])) for some in alike.values()]  # type: ignore[misc]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for some in alike.values():  # apart: no operation takes both
        nn.utils.clip_grads_with_norm_(some, most, total)


def shell(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without the memory of its weights; `fill` gives it some."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def fill(model: PreTrainedModel, sharded: nn.Module, *, keep: bool) -> None:
    """Give a shell the weights of a sharded model, gathered on the host. Every process calls this; some `keep` them."""
    weights = gathered(sharded.state_dict(), keep=keep)
    if keep:
        model.load_state_dict(weights, assign=True)
        model.tie_weights()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be in pieces, gathered; then every process has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: Tensor, like: object) -> Tensor:
    """This process's piece of a whole tensor, cut as `like` is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensors: dict[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: whole, on the host, and copies, since it refuses memory under two names (a
    shared aligner). Sharded ones are gathered by all processes; those that do not `keep` them get nothing."""
    found = {}
    for name, tensor in tensors.items():
        value = whole(tensor.detach())
        if keep:
            found[name] = value.to("cpu", copy=True).contiguous()
    return found
