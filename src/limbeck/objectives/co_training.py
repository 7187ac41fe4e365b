"""CoTraining: a teacher that learns the task beside the student, and is held back to what the student can follow."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from limbeck.errors import LimbeckError
from limbeck.features import LOGITS
from limbeck.objectives.base import Models, NamedAligner, Read, positive, within
from limbeck.objectives.predictions import Logits, from_labels, from_teacher, labels_of
from limbeck.spec import Call
from limbeck.taps import Features, Tap


class CoTraining(Logits):
    """The teacher's predictions, where the teacher trains too (ProKT): on the labels, and by a `share` of its loss
    towards the student. Each side sees the other's predictions as given; `pace` is the teacher's learning rate, in
    units of the student's.

    What trains is a copy of the teacher. When the stage is over, the teacher becomes what the copy has learnt.
    """

    learns_labels = True
    moves_teacher = True
    passing = ("teacher",)

    def __init__(
        self,
        co_training: str | Call = "kl",
        *,
        share: float | str = 0.5,
        pace: float | str = 1.0,
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(co_training, weight=weight)
        self.share = within("share", share, "from 0 to 1", lambda found: 0 <= found <= 1)
        self.pace = positive("pace", pace)

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        if models.live is None:
            raise LimbeckError("co_training needs a teacher, and there is none. Give --teacher.")
        self.teacher = copy.deepcopy(models.live[1]).requires_grad_(True)
        self.tap = Tap(self.teacher, [("logits", LOGITS)])
        self._given = [models.live[1]]  # in a list, so that nn.Module does not register it

    def reads(self) -> set[Read]:
        return {Read("student", "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        ours, labels = student["logits", LOGITS], labels_of(self.kind, batch)
        made = getattr(ours.states, "states", ours.states)  # of words, what makes them
        with torch.autocast(ours.mask.device.type, torch.bfloat16, enabled=made.dtype == torch.bfloat16):
            theirs = self.tap(**batch)["logits", LOGITS]
        drawn = from_teacher(self.kind, theirs, ours, labels, self.distance)
        learnt = from_labels(self.kind, theirs, labels)
        taught = (1 - self.share) * learnt + self.share * drawn
        return from_teacher(self.kind, ours, theirs, labels, self.distance) + taught

    def finish(self) -> None:
        self._given[0].load_state_dict(self.teacher.state_dict())
