"""The losses of the methods with heads on layers, every stage, against their formulas written out here."""

import pytest
import torch
from torch.nn.functional import gelu

from limbeck.distiller import Distiller
from limbeck.initialisers import start_student
from limbeck.objectives import NamedAligner, build
from limbeck.recipe import resolve
from limbeck.spec import parse
from tests.test_golden import Case, close, doubled, linear
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"ted", "ted:kl", "ted:code", "universal-kd"}
SANH, UNIFORM = [(1, 1), (2, 4), (3, 6)], [(1, 2), (2, 4), (3, 6)]


class Staged(Case):
    """All stages of a recipe over two models; `own` is a student that is not made of the teacher's layers."""

    def __init__(self, recipe, *, own=None, labels=3, overrides=()):
        self.recipe = resolve(recipe, overrides=overrides)
        self.teacher = tiny_model("bert", 6, labels=labels, seed=1).double()
        if own:
            self.student = tiny_model("bert", 3, width=own, labels=labels, seed=2).double()
        else:
            init, sizes = self.recipe.init, {"depth": 3, "labels": {"num_labels": labels}}
            self.student = start_student(init, self.teacher, self.teacher, **sizes, seed=0).student.double()
        named = {name: NamedAligner(parse(call)) for name, call in self.recipe.aligners.items()}
        torch.manual_seed(3)
        with doubled():
            self.stages = [
                Distiller(
                    self.teacher,
                    self.student,
                    {n: build(o, named) for n, o in stage.objectives.items()},
                    aligners=named,
                    stage=index,
                ).eval()
                for index, stage in enumerate(self.recipe.stages)
            ]
        (self.filters,) = (aligner.module for aligner in named.values())
        self.batch = tiny_batch(self.student)
        self.mask, self.y = self.batch["attention_mask"].double(), self.batch["labels"]
        with torch.no_grad():
            self.s, self.t = (
                model(**columns_for(model, self.batch), output_hidden_states=True)
                for model in (self.student, self.teacher)
            )

    def at(self, stage):
        self.distiller = self.stages[stage]
        return self.loss()

    def tokens(self, ours, theirs):
        """MSE over dimensions, mean over an example's tokens, mean over examples."""
        rows = (ours - theirs).square().mean(-1) * self.mask
        return (rows.sum(1) / self.mask.sum(1)).mean()

    def task(self, logits):
        """The task's loss of some predictions."""
        if logits.shape[1] == 1:
            return (logits[:, 0] - self.y).square().mean()
        return -torch.stack([logits[i].log_softmax(-1)[self.y[i]] for i in range(len(self.y))]).mean()


def divergence(ours, theirs):
    p, q = theirs.softmax(-1), ours.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1).mean()


def head(layer, states):
    """A linear head on the first token, behind its dropout."""
    return linear(layer[1], states[:, 0])


@pytest.mark.parametrize("labels", [3, 1])
@torch.no_grad()
def test_ted_teaches_the_teachers_filters_the_task(labels):
    """Σ over layers of the task's loss; those of a student made of the teacher's layers come as copies."""
    case = Staged("ted", labels=labels)
    filters = case.filters
    taught = sum(
        case.task(head(filters.teacher.heads[i], linear(filters.teacher.filters[i], case.t.hidden_states[t])))
        for i, (_, t) in enumerate(SANH)
    )
    close(case.at(0), taught)
    for parameter in filters.teacher.parameters():
        parameter.mul_(1.5)
    case.stages[0].finish()
    layers = sum(
        case.tokens(
            *(linear(filters.teacher.filters[i], x) for x in (case.s.hidden_states[s], case.t.hidden_states[t]))
        )
        for i, (s, t) in enumerate(SANH)
    )
    soft = 4 * case.kl(2) if labels == 3 else (case.s.logits - case.t.logits)[:, 0].square().mean()
    close(case.at(1), case.task(case.s.logits) + 2.5 * soft + 20 * layers)


@torch.no_grad()
@pytest.mark.parametrize("width", [32, 16])
def test_ted_teaches_the_filters_of_any_other_student_too(width):
    case = Staged("ted", own=width)
    sides = {"student": case.s.hidden_states, "teacher": case.t.hidden_states}
    filtered = {
        name: [
            linear(getattr(case.filters, name).filters[i], states[pair[name == "teacher"]])
            for i, pair in enumerate(SANH)
        ]
        for name, states in sides.items()
    }
    heads = {name: getattr(case.filters, name).heads for name in sides}
    close(case.at(0), sum(case.task(head(heads[n][i], filtered[n][i])) for n in sides for i in range(3)))
    case.stages[0].finish()  # nothing is copied
    layers = sum(case.tokens(filtered["student"][i], filtered["teacher"][i]) for i in range(3))
    close(case.at(1), case.ce() + 2.5 * 4 * case.kl(2) + 20 * layers)


@torch.no_grad()
@pytest.mark.parametrize("labels", [3, 1])
def test_ted_kl(labels):
    """The heads are kept, and their predictions compared; squared differences where they are scores."""
    case = Staged("ted:kl", own=16, labels=labels)
    taught, layers, soft = (
        [],
        [],
        4 * case.kl(2) if labels == 3 else (case.s.logits - case.t.logits)[:, 0].square().mean(),
    )
    for i, (s, t) in enumerate(SANH):
        ours = head(case.filters.student.heads[i], linear(case.filters.student.filters[i], case.s.hidden_states[s]))
        theirs = head(case.filters.teacher.heads[i], linear(case.filters.teacher.filters[i], case.t.hidden_states[t]))
        taught += [case.task(ours), case.task(theirs)]
        layers.append(divergence(ours, theirs) if labels == 3 else (ours - theirs).square().mean())
    close(case.at(0), sum(taught))
    close(case.at(1), case.task(case.s.logits) + 2.5 * soft + 20 * sum(layers))


@torch.no_grad()
def test_ted_code():
    """Means over layers, the last layer of each group, and heads with a pooler, as released."""
    case = Staged("ted:code", own=16)
    taught, layers = {"student": [], "teacher": []}, []
    for i, pair in enumerate(UNIFORM):
        filtered = {}
        for name, model, layer in (("student", case.s, pair[0]), ("teacher", case.t, pair[1])):
            side = getattr(case.filters, name)
            filtered[name] = linear(side.filters[i], model.hidden_states[layer])
            pooler, last = side.heads[i][1], side.heads[i][4]
            taught[name].append(case.task(linear(last, gelu(linear(pooler, filtered[name][:, 0])))))
        layers.append(case.tokens(filtered["student"], filtered["teacher"]))
    close(case.at(0), sum(taught["student"]) / 3 + sum(taught["teacher"]) / 3)
    close(case.at(1), case.ce() + 20 * 4 * case.kl(2) + 100 * sum(layers) / 3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["next-layer", "all-next-layers"])
def test_ted_with_the_models_own_next_layers_as_filters(kind):
    """Before they train, such filters give the models' own later states; the last layer has a linear map."""
    case = Staged("ted", own=32, overrides=[f"aligners.task=filters({kind})"])
    last = case.filters.student.filters[2], case.filters.teacher.filters[2]
    layers = case.tokens(linear(last[0], case.s.hidden_states[3]), linear(last[1], case.t.hidden_states[6]))
    reached = [(2, 2), (3, 5)] if kind == "next-layer" else [(3, 6), (3, 6)]
    layers = layers + sum(case.tokens(case.s.hidden_states[s], case.t.hidden_states[t]) for s, t in reached)
    close(case.at(1), case.ce() + 2.5 * 4 * case.kl(2) + 20 * layers)


@torch.no_grad()
@pytest.mark.parametrize("own", [None, 16])
@pytest.mark.parametrize("labels", [3, 1])
def test_universal_kd(own, labels):
    """Pseudo-classifiers on the inner layers; each student's against a mixture of the teacher's; then labels and KD."""
    case = Staged("universal-kd", own=own, labels=labels)
    theirs = [linear(case.filters.teacher.heads[k - 1][1], case.cls(case.t, k)) for k in range(1, 6)]
    ours = [linear(case.filters.student.heads[k - 1][1], case.cls(case.s, k)) for k in (1, 2)]
    close(case.at(0), sum(case.task(z) for z in theirs))
    case.stages[0].finish()  # the student's own stay as they are
    expected = 0
    for z in ours:
        for b in range(len(z)):
            energy = torch.stack([torch.dot(z[b], one[b]) for one in theirs])
            target = sum(w * one[b] for w, one in zip(energy.exp() / energy.exp().sum(), theirs))
            difference = divergence(z[b : b + 1], target[None]) if labels == 3 else (z[b] - target).square().mean()
            expected = expected + difference / len(z)
    close(case.at(1), expected)
    soft = 4 * case.kl(2) if labels == 3 else (case.s.logits - case.t.logits)[:, 0].square().mean()
    close(case.at(2), 0.5 * case.task(case.s.logits) + 0.5 * soft)
