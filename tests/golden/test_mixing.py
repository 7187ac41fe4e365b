"""The losses of the methods that mix their inputs, against a BERT written out here that starts from the mixture."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from limbeck.data.mixing import Mixup
from limbeck.distiller import Distiller
from limbeck.objectives import NamedAligner, build
from limbeck.recipe import resolve
from limbeck.spec import parse
from tests.test_golden import close, doubled, linear
from tests.tiny import tiny_batch, tiny_model

RECIPES = {"cr-ild", "cr-ild:mixup", "cr-ild:code", "mixkd"}
STEPS = 40


def norm(layer, states):
    return F.layer_norm(states, states.shape[-1:], layer.weight, layer.bias, layer.eps)


@torch.no_grad()
def read(model, states, mask):
    """The states and attention maps of every layer, and the logits, from what enters the first block."""
    hidden, maps = [states], [None]
    for block in model.bert.encoder.layer:
        parts = (getattr(block.attention.self, name) for name in ("query", "key", "value"))
        q, k, v = (linear(part, states).unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        maps.append(torch.softmax(scores.masked_fill(~mask[:, None, None, :], -torch.inf), -1))
        attended = (maps[-1] @ v).transpose(1, 2).flatten(2)
        states = norm(block.attention.output.LayerNorm, linear(block.attention.output.dense, attended) + states)
        inner = F.gelu(linear(block.intermediate.dense, states))
        states = norm(block.output.LayerNorm, linear(block.output.dense, inner) + states)
        hidden.append(states)
    pooled = torch.tanh(linear(model.bert.pooler.dense, states[:, 0]))
    return SimpleNamespace(hidden=hidden, maps=maps, logits=linear(model.classifier, pooled))


class Mixed:
    """A stage of a recipe over two models, and what they make of mixed and of plain inputs."""

    def __init__(self, recipe, stage=0, *, width=32, labels=3, step=10):
        recipe = resolve(recipe)
        self.stage = recipe.stages[stage]
        self.teacher = tiny_model("bert", 6, labels=labels, seed=1).double()
        self.student = tiny_model("bert", 3, width=width, labels=labels, seed=2).double()
        torch.manual_seed(3)
        with doubled():
            objectives = {name: build(o, recipe.aligners) for name, o in self.stage.objectives.items()}
            aligners = {name: NamedAligner(parse(call)) for name, call in recipe.aligners.items()}
            mixup = Mixup(self.stage.mixup, rows=8) if self.stage.mixup else None
            self.distiller = Distiller(
                self.teacher, self.student, objectives, aligners=aligners, mixup=mixup, steps=STEPS, seed=5, stage=stage
            ).eval()
        self.distiller.at(step // 2, step)
        self.batch = tiny_batch(self.student)
        self.y = self.batch["labels"]
        self.mask = self.batch["attention_mask"].bool()
        if mixup:
            self.share, self.partner = mixup.share.clone(), mixup(self.batch)["partner"].tolist()
        else:
            self.share, self.partner = torch.tensor(1.0).double(), [0, 1, 2]
        self.union = self.mask | self.mask[self.partner]
        self.s, self.t = (self.read(model, self.mix, self.union) for model in (self.student, self.teacher))
        self.plain = self.read(self.student, lambda values: values, self.mask)

    def read(self, model, change, mask):
        with torch.no_grad():
            embedded = model.bert.embeddings(self.batch["input_ids"], self.batch["token_type_ids"])
        return read(model, change(embedded), mask)

    def mix(self, values):
        rows = [self.share * values[i] + (1 - self.share) * values[j] for i, j in enumerate(self.partner)]
        return torch.stack(rows)

    def loss(self):
        output = self.distiller(**self.batch)
        assert output.loss.dtype == torch.float64
        return output.loss.detach()

    def tokens(self, rows):
        """The mean over an example's positions (and heads), then over examples; a pair is as long as the longer."""
        means = [row[..., : int(n)].mean() for row, n in zip(rows, self.union.sum(1))]
        return torch.stack(means).mean()


def kl(p, q):
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


@pytest.mark.parametrize("width", [32, 16])
def test_cr_ild(width):
    """MSE and KL(teacher ‖ student) of the last layers on mixed inputs, and of the student with itself."""
    case = Mixed("cr-ild", width=width, step=10)
    assert 0.05 < case.share < 0.95
    assert case.partner != [0, 1, 2]
    aligner = case.distiller.terms["hidden"].aligner
    ours = linear(aligner.maps[0], case.s.hidden[3]) if width == 16 else case.s.hidden[3]
    hidden = case.tokens((ours - case.t.hidden[6]).square().mean(-1))
    attention = case.tokens(kl(case.t.maps[6], case.s.maps[3]))
    steady_hidden = case.tokens((case.s.hidden[3] - case.mix(case.plain.hidden[3])).square().mean(-1))
    steady_attention = case.tokens(kl(case.s.maps[3], case.mix(case.plain.maps[3])))
    close(case.loss(), hidden + attention + 0.1 * 10 / STEPS * (steady_hidden + steady_attention))


def test_cr_ild_begins_and_ends():
    """The weight of the consistency is 0 at first, and 0.1 in the end."""
    terms = Mixed("cr-ild", step=0).distiller.terms
    assert [terms[name].scale.item() for name in terms] == [1, 1, 0, 0]
    terms = Mixed("cr-ild", step=STEPS).distiller.terms
    assert [terms[name].scale.item() for name in terms] == [1, 1, 0.1, 0.1]


@pytest.mark.parametrize("recipe", ["cr-ild", "cr-ild:mixup"])
def test_cr_ild_in_its_second_stage(recipe):
    """Cross-entropy with the teacher's predictions on plain inputs; no labels."""
    case = Mixed(recipe, 1)
    assert case.distiller.mixup is None
    close(case.loss(), -(torch.softmax(case.t.logits, -1) * F.log_softmax(case.s.logits, -1)).sum(-1).mean())


def test_cr_ild_mixup():
    """The ablation: mixed inputs without the consistency."""
    case = Mixed("cr-ild:mixup")
    hidden = case.tokens((case.s.hidden[3] - case.t.hidden[6]).square().mean(-1))
    close(case.loss(), hidden + case.tokens(kl(case.t.maps[6], case.s.maps[3])))


@pytest.mark.parametrize("width", [32, 16])
def test_cr_ild_as_its_code(width):
    """The batch reversed, the larger share, cross-entropies, one map throughout, weights that rise epoch by epoch.

    The code takes λ·d(mixed, f(x_i)) + (1 - λ)·d(mixed, f(x_j)). For cross-entropy that is d to the mixed target; for
    the squared error it is more by λ(1 - λ)·MSE(f(x_i), f(x_j)), which has no gradient.
    """
    case = Mixed("cr-ild:code", width=width, step=7)  # of 40: in the fourth of 20 epochs
    assert case.partner == [2, 1, 0]
    assert case.share >= 0.5
    share, rest = case.share, 1 - case.share

    def soft_ce(p, q):
        return -torch.xlogy(p, q).sum(-1)

    def mse(a, b):
        return (a - b).square().mean(-1)

    states, maps = case.plain.hidden[3], case.plain.maps[3]
    states_j, maps_j = states[case.partner], maps[case.partner]
    steady_attention = share * soft_ce(maps, case.s.maps[3]) + rest * soft_ce(maps_j, case.s.maps[3])
    fit = case.distiller.terms["hidden"].aligner.map
    assert case.distiller.terms["hidden-consistency"].aligner.map is fit
    ours, states, states_j = (linear(fit, one) for one in (case.s.hidden[3], states, states_j))
    steady_hidden = share * mse(ours, states) + rest * mse(ours, states_j) - share * rest * mse(states, states_j)
    matched = case.tokens(mse(ours, case.t.hidden[6])) + case.tokens(soft_ce(case.t.maps[6], case.s.maps[3]))
    steady = case.tokens(steady_hidden) + case.tokens(steady_attention)
    close(case.loss(), matched + 0.1 * 3 / 20 * steady)


def test_cr_ild_as_its_code_in_the_second_stage():
    case = Mixed("cr-ild:code", 1)
    soft = -(torch.softmax(case.t.logits / 2, -1) * F.log_softmax(case.s.logits / 2, -1)).sum(-1).mean()
    close(case.loss(), 4 * soft)


def test_mixkd():
    """CE(x, y) + CE(mixed x, mixed y) + MSE of the logits of mixed x."""
    case = Mixed("mixkd")
    labels = F.one_hot(case.y, 3).double()

    def ce(logits, targets):
        return -(targets * F.log_softmax(logits, -1)).sum(-1).mean()

    expected = ce(case.plain.logits, labels) + ce(case.s.logits, case.mix(labels))
    close(case.loss(), expected + (case.s.logits - case.t.logits).square().mean())


def test_mixkd_on_scores():
    case = Mixed("mixkd", labels=1)
    y = case.y.double()
    hard = (case.plain.logits[:, 0] - y).square().mean() + (case.s.logits[:, 0] - case.mix(y)).square().mean()
    close(case.loss(), hard + (case.s.logits - case.t.logits).square().mean())
