"""The linear map a student may need before a reused classifier: put in to train, multiplied away to save.

A classifier begins with a linear map of the state it reads. The projector stands before that map with nothing between
them, so that the two are one linear map: of the family's own shape where the widths are equal, and otherwise of a
classifier that is wider than the states it reads (`wide_head.py`).
"""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from limbeck import architectures
from limbeck.architectures import WIDE, dense_map, family, output_map
from limbeck.data import kinds


def take_over(student: PreTrainedModel, teacher: PreTrainedModel, *, project: bool) -> set[str]:
    """Give the student a copy of the teacher's classifier, and a projector where widths differ or `project` asks for
    one. Answers the names of the parameters that were the teacher's."""
    ours, theirs = family(student), family(teacher)
    places = {ours.output: theirs.output, ours.after: theirs.after, ours.dense: theirs.dense}
    reused: set[int] = set()
    for place, origin in places.items():
        if place:
            module = copy.deepcopy(teacher.get_submodule(origin)).to(student.device, student.dtype).requires_grad_()
            reused |= {id(parameter) for parameter in module.parameters()}
            student.set_submodule(place, module)
    dense, width = dense_map(student), student.config.hidden_size
    if project or width != dense.in_features:
        both: OrderedDict[str, nn.Module] = OrderedDict(projector=_projector(width, dense), dense=dense)
        student.set_submodule(ours.dense, nn.Sequential(both))
    return {name for name, parameter in student.named_parameters() if id(parameter) in reused}


def _projector(inside: int, dense: nn.Linear) -> nn.Linear:
    """One that starts by leaving lengths as they are: the identity at equal widths, else orthogonal. It has a bias
    where the map behind it has one to take it up."""
    projector = nn.Linear(inside, dense.in_features, bias=dense.bias is not None)
    nn.init.eye_(projector.weight) if inside == dense.in_features else nn.init.orthogonal_(projector.weight)
    if projector.bias is not None:
        nn.init.zeros_(projector.bias)
    return projector


def folded(student: PreTrainedModel) -> PreTrainedModel:
    """The same function without a projector, as a model of its family, or of its family with a wider head."""
    known, width = family(student), student.config.hidden_size
    one_map = known.dense == known.output  # which is of the width of the states once the projector is folded into it
    size = width if one_map else output_map(student).in_features
    projector = architectures.projector(student)
    if projector is None and size == getattr(student.config, "head_size", width):
        return student
    weights = student.state_dict()
    if projector is not None:
        inside = f"{known.dense}."
        weights = {name: value for name, value in weights.items() if not name.startswith(inside)}
        weights |= {inside + name: value for name, value in _product(dense_map(student), projector).items()}
    plain = architectures.model_type(student.config)
    config = _config(student.config, plain if size == width else f"{WIDE}{plain}", size)
    auto = architectures.auto_class(kinds.of(student))
    made = auto.from_config(config, dtype=student.dtype, **architectures.made_with(config))
    made.load_state_dict(weights)
    return made.train(student.training)


@torch.no_grad()
def _product(dense: nn.Linear, projector: nn.Linear) -> dict[str, Tensor]:
    """One linear map for two; multiplied in double precision, so that rounding is that of the result alone."""
    after, before = (linear.weight.double() for linear in (dense, projector))
    product = {"weight": after @ before}
    if dense.bias is not None:
        product["bias"] = after @ projector.bias.double() + dense.bias.double()
    return {name: value.to(dense.weight.dtype) for name, value in product.items()}


def _config(config: PretrainedConfig, model_type: str, head_size: int) -> PretrainedConfig:
    """The same settings as another class has them."""
    values = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "auto_map")}
    size = {"head_size": head_size} if model_type.startswith(WIDE) else {}
    return AutoConfig.for_model(model_type, **values | size)
