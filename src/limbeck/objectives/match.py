"""Match: layers of the student against layers of the teacher."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from limbeck.aligners import ALIGNERS, Linear, NoAligner, Several, Shared
from limbeck.architectures import Shape, Side
from limbeck.blends import BLENDS, Blend
from limbeck.distances import DISTANCES, OF_DISTRIBUTIONS, exact, mse
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Rows, find_feature, scores
from limbeck.filters import Filters
from limbeck.mappings import MAPPINGS, Layers
from limbeck.objectives.base import Models, Moment, NamedAligner, Objective, Read, per_example
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features


class Match(Objective):
    """Layers of the student against layers of the teacher: feature × mapping × aligner × distance.

    Where the mapping gives a student layer several teacher layers, `blend` says how they become one.
    """

    compares_layers = moves_to_encoder = True
    draw: Tensor
    by_heads = False  # whether layers are compared by what heads on them predict

    def __init__(
        self,
        match: str | Call,
        *,
        map: str | Call | None = None,
        blend: str | Call | None = None,
        align: str | Call = "none",
        distance: str | Call = "mse",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        self.call, self.align = parse(match), parse(align)
        self.feature = find_feature(self.call)
        self.side: Side = self.feature.side
        self.distance = bind(parse(distance), DISTANCES, "distance")
        if self.distance.func in OF_DISTRIBUTIONS and not self.feature.distribution:
            raise LimbeckError(
                f'distance "{parse(distance)}" compares distributions, and {self.call} gives vectors. '
                "Use mse, unit_mse, unit_sq or cosine; kl and soft_ce go with attention and the relations."
            )
        if reduce not in ("sum_layers", "mean_layers"):
            raise LimbeckError(f'there is no reduction "{reduce}". Allowed: sum_layers, mean_layers.')
        self.mean = reduce == "mean_layers"
        if self.feature.fixed is not None and map is not None:
            raise LimbeckError(f'feature "{self.call}" has one layer only: leave out map.')
        if self.feature.fixed is None and map is None:
            raise LimbeckError(f"match: {self.call} needs a map: which layers meet. Allowed: {', '.join(MAPPINGS)}.")
        self.mapping = bind(parse(map), MAPPINGS, "map") if map is not None else None
        self.make_blend = bind(parse(blend), BLENDS, "blend") if blend is not None else None
        self.blend: Blend | None = None

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        if models.teacher is None:
            raise LimbeckError(f"match: {self.call} needs a teacher, and there is none. Give --teacher.")
        student, teacher = models.student.at(self.side), models.teacher.at(self.side)
        if self.mapping:
            self.layers = self.mapping(student.layers, teacher.layers)
        elif (fixed := self.feature.fixed) is not None:
            self.layers = Layers((fixed,), (fixed,))
        self._check_layers(student, teacher)
        start = self.layers.draw(0, 0, 0) if self.layers.draw else list(range(len(self.layers.student)))
        self.register_buffer("draw", torch.tensor(start), persistent=False)
        self._drawn_now = start
        self._settle_heads(student, teacher)
        self._settle_aligner(models, teacher, named)
        self._settle_blend(teacher)

    def _settle_aligner(self, models: Models, teacher: Shape, named: Mapping[str, NamedAligner]) -> None:
        count = len(self.layers.student)
        if self.feature.width is None:
            if self.align.name != "none":
                raise LimbeckError(f"match: {self.call} compares positions, not widths: leave out align.")
            self.aligner: nn.Module = NoAligner(1, 1, count)
            return
        widths = models.student.size(self.feature.width), teacher.size(self.feature.width)
        make = named.get(self.align.name) or bind(self.align, ALIGNERS, "aligner")
        self.aligner = make(*widths, count)
        if isinstance(self.aligner, Filters) and self.side != "decoder":
            raise LimbeckError(
                f"match: {self.call}: filters predict, and an encoder beside a decoder does not. Leave out side, or "
                "use another aligner."
            )
        if isinstance(self.aligner, Filters) and models.live:
            self.aligner.bind(*models.live, self.layers, tokens=self.feature.rows == "token")
        if isinstance(self.aligner, NoAligner | Filters) and not self.aligner.fits and not self.by_heads:
            raise LimbeckError(
                f"match: {self.call} compares a student of width {widths[0]} with a teacher of width {widths[1]} as "
                "is. Add align: linear, which learns the map."
            )

    def _settle_blend(self, teacher: Shape) -> None:
        groups = self.layers.groups
        if bool(groups) != bool(self.make_blend):
            raise LimbeckError(
                f"match: {self.call}: map: groups gives a student layer several teacher layers, and blend says how "
                f"they become one: one needs the other. Blends: {', '.join(BLENDS)}."
            )
        if self.make_blend is None:
            return
        if self.feature.width is None:
            raise LimbeckError(
                f"match: {self.call} compares positions, and a blend needs vectors: hidden, cls or mean."
            )
        self._check_teacher_side()
        places = [[self.layers.teacher.index(t) for t in group] for group in groups]
        self.blend = self.make_blend(teacher.size(self.feature.width), places)

    def _check_teacher_side(self) -> None:
        """Where a student layer meets several teacher layers, an aligner of pairs would drop some."""
        if not isinstance(self.aligner, NoAligner | Linear | Shared):
            raise LimbeckError(
                f"{self.call}: a student layer that meets several teacher layers takes them as they are, and align: "
                f"{self.align} maps them. Use align: none, linear or shared."
            )

    def _check_layers(self, student: Shape, teacher: Shape) -> None:
        lowest = 1 if self.feature.site == "attention" else LOGITS
        if not self.layers.student:
            raise LimbeckError(
                f"match: {self.call} compares no layer: the map leaves a student of {student.layers} layers none. "
                "Use more layers, or a map that keeps the last one (last=true)."
            )
        for s in self.layers.student:
            if not lowest <= s <= student.layers:
                raise LimbeckError(f"match: {self.call} asks for layer {s} of a student with {student.layers} layers.")
        for t in self.layers.teacher:
            if not lowest <= t <= teacher.layers:
                raise LimbeckError(f"match: {self.call} asks for layer {t} of a teacher with {teacher.layers} layers.")

    def _settle_heads(self, student: Shape, teacher: Shape) -> None:
        """Models with other head counts meet in the largest of the two counts that divides what both attend in."""
        if self.feature.site != "attention":
            return
        ours, theirs = student.attends, teacher.attends
        if heads := self._asked_heads(theirs):
            if ours % heads or theirs % heads:
                raise LimbeckError(f"match: {self.call}: {heads} heads do not divide both widths, {ours} and {theirs}.")
            return
        if student.heads == teacher.heads:
            return
        fitting = [h for h in (student.heads, teacher.heads) if ours % h == 0 == theirs % h]
        if not fitting:
            raise LimbeckError(
                f"match: {self.call}: neither {student.heads} nor {teacher.heads} heads divide both widths, "
                f"{ours} and {theirs}. Say how many: {self.call.name}(heads=…)."
            )
        self.call = self.call.with_option("heads", max(fitting))

    def _asked_heads(self, width: int) -> int | None:
        """How many heads the recipe wants: it says so, or how wide one of the teacher's is."""
        heads, size = self.feature.options.get("heads"), self.feature.options.get("size")
        if size is None:
            return heads
        if heads is not None:
            raise LimbeckError(f"match: {self.call}: give heads or size, not both.")
        if width % size:
            raise LimbeckError(f"match: {self.call}: size {size} does not divide the teacher's width, {width}.")
        options = {name: value for name, value in self.call.options.items() if name != "size"}
        self.call = Call(self.call.name, options=options).with_option("heads", width // size)
        return width // size

    def at(self, moment: Moment) -> None:
        super().at(moment)
        if self.layers.draw:
            drawn = self.layers.draw(moment.seed, moment.stage, moment.epoch)
            if drawn != self._drawn_now:
                self._drawn_now = drawn
                self.draw.copy_(torch.tensor(drawn), non_blocking=True)

    def pairs(self) -> list[tuple[int, int]]:
        """The layer pairs compared now, student first."""
        if self.layers.groups:
            return [(s, t) for s, group in zip(self.layers.student, self.layers.groups) for t in group]
        return [(s, self.layers.teacher[i]) for s, i in zip(self.layers.student, self.draw.tolist())]

    def reads(self) -> set[Read]:
        name, (ours, theirs) = str(self.call), self.sides
        return {Read(ours, name, s) for s in self.layers.student} | {Read(theirs, name, t) for t in self.layers.teacher}

    def aligned(self, student: Features, teacher: Features) -> tuple[Several, Several, Tensor]:
        """Both sides' layers, comparable, and the mask of their rows."""
        name, (ours_raw, theirs_raw) = str(self.call), self._as_they_are
        ours = [student[name, s] for s in self.layers.student]
        theirs = [teacher[name, t] for t in self.layers.teacher]
        # The drawn layers are picked on the device: one captured step serves every draw.
        right = self._taken(theirs, theirs_raw, self.draw if self.layers.draw else None)
        left = self._taken(ours, ours_raw)
        if not vars(type(self.aligner)).get("together"):  # said by the class itself, not by one it is derived from
            left, right = list(left), list(right)
        masks = [ours[0].mask] if isinstance(self.aligner, Filters) else []  # filters may attend to other tokens
        left, right = self.aligner(left, right, *masks)
        return left, right, ours[0].mask

    def _taken(self, layers: Sequence[Rows], raw: bool, draw: Tensor | None = None) -> Several:
        """Layers as they are compared; what is small goes as one tensor from here on: fewer kernels."""
        if self.feature.rows == "example":
            states = torch.stack([rows.states for rows in layers])
            return exact(states if draw is None else states.index_select(0, draw))
        found = [rows.states if raw else rows.values for rows in layers]
        return found if draw is None else torch.stack(found).index_select(0, draw).unbind()

    @property
    def _as_they_are(self) -> tuple[bool, bool]:
        """Of student and teacher, whether nothing touches the layers but a distance that takes half precision."""
        kind = type(self.aligner)  # not one derived from it, which may touch more
        if self.distance.func is not mse or self.blend or kind not in (NoAligner, Linear, Shared):
            return False, False
        return not list(self.aligner.parameters()), True

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        left, right, mask = self.aligned(student, teacher)
        if self.blend:
            right = self.blend(list(left), list(right))
        if self.feature.rows == "example":
            layers = self.distance(_together(left), _together(right))
        elif self.feature.function is scores.function:  # a number is a row there
            masks = self._shared_rows(student, teacher) or [mask] * len(left)
            layers = torch.stack([per_example(self.distance(a, b), m) for a, b, m in zip(left, right, masks)])
        else:
            layers = per_example(torch.stack([self.distance(a, b) for a, b in zip(left, right)]), mask)
        return layers.mean(0) if self.mean else layers.sum(0)

    def _shared_rows(self, student: Features, teacher: Features) -> list[Tensor]:
        """Of scores, the rows that both layers of a pair have: windows differ by layer."""
        if self.layers.draw:
            return []
        name = str(self.call)
        pairs = zip(self.layers.student, self.layers.teacher)
        return [student[name, s].mask & teacher[name, t].mask for s, t in pairs]

    def layer_weights(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        grid = torch.zeros(len(self.layers.student), len(self.layers.teacher))
        if self.blend is None:
            grid[range(len(grid)), self.draw.tolist()] = 1.0
            return grid
        left, right, mask = self.aligned(student, teacher)
        for row, group, weights in zip(grid, self.blend.groups, self.blend.weights(list(left), list(right))):
            row[list(group)] = (weights[mask].mean(0) if weights.dim() > 1 else weights).detach().to(row)
        return grid


def _together(layers: Several) -> Tensor:
    return layers if isinstance(layers, Tensor) else torch.stack(list(layers))
