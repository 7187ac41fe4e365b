"""The whole loss of every shipped recipe, against the papers' formulas written out, in double precision.

A teacher of 6 layers and a student of 3. The references use the models' own hidden states and nothing of limbeck but
the weights of its linear maps. `golden/` has more of them, a file a topic, which says in RECIPES what it covers.
"""

import importlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from limbeck.distiller import Distiller
from limbeck.initialisers import start_student
from limbeck.objectives import NamedAligner, build
from limbeck.recipe import read, resolve, shipped
from limbeck.spec import parse
from tests.tiny import columns_for, tiny_batch, tiny_model

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@contextmanager
def doubled():
    """New maps and weights in double precision from the start."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Case:
    """The distiller of a recipe's stage over two models, and what the models say of a batch."""

    def __init__(self, recipe, *, width=32, labels=3, task=None, init=None, stage=0, **options):
        self.recipe = resolve(recipe, task=task)
        self.teacher = tiny_model("bert", 6, labels=labels, seed=1).double()
        if init:
            self.student = start_student(
                init, self.teacher, self.teacher, depth=3, labels={"num_labels": labels}, seed=0
            ).student
        else:
            self.student = tiny_model("bert", 3, width=width, labels=labels, seed=2)
        self.student.double()
        with doubled():
            named = self.recipe.aligners
            objectives = {n: build(o, named) for n, o in self.recipe.stages[stage].objectives.items()}
        torch.manual_seed(3)
        with doubled():
            aligners = {name: NamedAligner(parse(call)) for name, call in named.items()}
            self.distiller = Distiller(
                self.teacher, self.student, objectives, aligners=aligners, seed=5, **options
            ).eval()
        self.batch = tiny_batch(self.student)
        self.mask = self.batch["attention_mask"].double()
        self.y = self.batch["labels"]
        with torch.no_grad():
            self.s, self.t = (
                model(**columns_for(model, self.batch), output_hidden_states=True)
                for model in (self.student, self.teacher)
            )
        self.aligner = getattr(self.distiller.terms.get("layers"), "aligner", None)

    def loss(self, epoch=0):
        self.distiller.at(epoch, 0)
        output = self.distiller(**self.batch)
        assert output.loss.dtype == torch.float64
        return output.loss.detach()

    # the pieces of every formula, each a mean over the examples

    def ce(self):
        picked = [self.s.logits[i].log_softmax(-1)[self.y[i]] for i in range(len(self.y))]
        return -torch.stack(picked).mean()

    def kl(self, temperature):
        """KL of the teacher's softened predictions from the student's."""
        p, q = (torch.softmax(m.logits / temperature, -1) for m in (self.t, self.s))
        return (p * (p.log() - q.log())).sum(-1).mean()

    def cls(self, model, layer):
        return model.hidden_states[layer][:, 0]

    def pooled(self, model, layer):
        states = model.hidden_states[layer]
        rows = [states[i, : int(self.mask[i].sum())].mean(0) for i in range(len(states))]
        return torch.stack(rows)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def close(found, expected):
    torch.testing.assert_close(found, expected, **EXACT)
    assert found > 0


def linear(layer, vectors):
    return vectors @ layer.weight.T + layer.bias


COVERED = {"finetune", "kd", "pkd", "ild", "ild-rtc", "rail-kd-l", "rail-kd-c", "simkd", "lwd"}
COVERED |= {"pkd:last", "pkd:code", "ild:pkd", "ild-rtc:pkd", "ild:four-layers", "ild-rtc:four-layers", "lwd:code"}


def test_every_shipped_recipe_and_variant_is_covered():
    files = (Path(__file__).parent / "golden").glob("test_*.py")
    topics = [importlib.import_module(f"tests.golden.{path.stem}").RECIPES for path in files]
    variants = {f"{name}:{variant}" for name in shipped() for variant in read(name).get("variants", {})}
    assert variants | set(shipped()) == COVERED.union(*topics)


def test_finetune():
    case = Case("finetune")
    close(case.loss(), case.ce())
    assert case.distiller.teacher is None


def test_finetune_on_scores():
    case = Case("finetune", labels=1)
    close(case.loss(), (case.s.logits[:, 0] - case.y).square().mean())


def test_kd():
    """Hinton: half the labels, half T² times the divergence at T 2."""
    case = Case("kd")
    close(case.loss(), 0.5 * case.ce() + 0.5 * 4 * case.kl(2))


def test_kd_on_scores():
    case = Case("kd", labels=1)
    hard, soft = (case.s.logits[:, 0] - case.y).square(), (case.s.logits - case.t.logits)[:, 0].square()
    close(case.loss(), 0.5 * hard.mean() + 0.5 * soft.mean())


@pytest.mark.parametrize(("recipe", "pairs"), [("pkd", [(1, 2), (2, 4)]), ("pkd:last", [(1, 4), (2, 5)])])
@pytest.mark.parametrize("width", [32, 16])
def test_pkd(recipe, pairs, width):
    """(1 - α)·CE + α·T²·KL + β·PT, α 0.7, T 10, β 500; PT a mean over layers, examples and dimensions (its code)."""
    case = Case(recipe, width=width)
    patience = []
    for i, (s, t) in enumerate(pairs):
        ours = case.cls(case.s, s) if width == 32 else linear(case.aligner.maps[i], case.cls(case.s, s))
        patience.append((unit(ours) - unit(case.cls(case.t, t))).square())
    close(case.loss(), 0.3 * case.ce() + 0.7 * 100 * case.kl(10) + 500 * torch.stack(patience).mean())


@pytest.mark.parametrize("classes", [3, 2])
def test_pkd_as_its_code(classes):
    """The divergence is divided by the classes as well (`reduction='mean'`); RTE has a learning rate of its own."""
    case = Case("pkd:code", labels=classes)
    plain = Case("pkd", labels=classes)
    close(plain.loss() - case.loss(), 0.7 * 100 * case.kl(10) * (1 - 1 / classes))
    assert [resolve("pkd:code", task=task).stages[0].lr for task in ("rte", "mrpc")] == [1e-5, 2e-5]


@pytest.mark.parametrize(
    ("recipe", "task", "alpha", "beta"),
    [
        ("ild-rtc:four-layers", "sst2", 0.2, 1000),
        ("ild:four-layers", "qqp", 0.5, 10),
        ("ild-rtc:four-layers", "qnli", 0.2, 1000),
        ("ild:four-layers", "rte", 0.5, 10),
        ("ild", None, 0.5, 100),
        ("ild-rtc", None, 0.5, 100),
        ("ild-rtc", "sst2", 0.2, 10),
        ("ild-rtc", "mrpc", 0.5, 500),
        ("ild-rtc", "qqp", 0.5, 500),
        ("ild-rtc", "mnli", 0.2, 100),
        ("ild-rtc", "qnli", 0.7, 1000),
        ("ild-rtc", "rte", 0.5, 1000),
        ("ild", "rte", 0.5, 1000),
    ],
)
def test_ild(recipe, task, alpha, beta):
    """α·CE + (1 - α)·KL at T 10, no T², + β·Σ over layers 1..M-1, with ⌊N/M⌋·m, of the mean over dimensions."""
    case = Case(recipe, task=task)
    layers = sum((unit(case.cls(case.s, m)) - unit(case.cls(case.t, 2 * m))).square().mean(-1).mean() for m in (1, 2))
    close(case.loss(), alpha * case.ce() + (1 - alpha) * case.kl(10) + beta * layers)


@pytest.mark.parametrize("recipe", ["ild:pkd", "ild-rtc:pkd"])
def test_ild_with_the_temperature_squared(recipe):
    case, plain = Case(recipe), Case(recipe.removesuffix(":pkd"))
    close(case.loss() - plain.loss(), 0.5 * 99 * plain.kl(10))


def test_ild_of_a_narrower_student_goes_through_a_map_a_layer():
    case = Case("ild", width=16)
    layers = sum(
        (unit(linear(case.aligner.maps[m - 1], case.cls(case.s, m))) - unit(case.cls(case.t, 2 * m))).square().mean()
        for m in (1, 2)
    )
    close(case.loss(), 0.5 * case.ce() + 0.5 * case.kl(10) + 100 * layers)


def test_ild_rtc_starts_with_the_teachers_classifier():
    case = Case("ild-rtc", init=resolve("ild-rtc").init)
    with torch.no_grad():
        read = case.s.hidden_states[-1]
        expected = case.teacher.classifier(case.teacher.bert.pooler(read))
    torch.testing.assert_close(case.s.logits, expected)
    layers = sum((unit(case.cls(case.s, m)) - unit(case.cls(case.t, 2 * m))).square().mean(-1).mean() for m in (1, 2))
    close(case.loss(), 0.5 * case.ce() + 0.5 * case.kl(10) + 100 * layers)


@pytest.mark.parametrize("width", [32, 16])
def test_rail_kd_l(width):
    """A third each of CE, KL at T 2, and Σ over layers of ‖unit(W_t h_t) - unit(W_s h_s)‖², layers drawn each epoch."""
    case = Case("rail-kd-l", width=width)
    losses, drawn = [], set()
    for epoch in range(6):
        found = case.loss(epoch)
        pairs = case.distiller.terms["layers"].pairs()
        drawn.add(tuple(pairs))
        layers = sum(
            (
                unit(linear(case.aligner.student[i], case.pooled(case.s, s)))
                - unit(case.pooled(case.t, t) @ case.aligner.teacher[i].weight.T)
            )
            .square()
            .sum(-1)
            .mean()
            for i, (s, t) in enumerate(pairs)
        )
        close(found, (case.ce() + case.kl(2) + layers) / 3)
        losses.append(found.item())
    assert all([s for s, _ in pairs] == [1, 2] for pairs in drawn)
    assert len(drawn) > 1
    assert len(set(losses)) == len(drawn)


def test_rail_kd_c():
    """As above, with the layers of a side concatenated before one map a side."""
    case = Case("rail-kd-c", width=16)
    drawn = set()
    for epoch in range(4):
        found = case.loss(epoch)
        pairs = case.distiller.terms["layers"].pairs()
        drawn.add(tuple(pairs))
        ours = torch.cat([case.pooled(case.s, s) for s, _ in pairs], -1)
        theirs = torch.cat([case.pooled(case.t, t) for _, t in pairs], -1)
        assert (ours.shape[1], theirs.shape[1]) == (32, 64)
        difference = unit(linear(case.aligner.student, ours)) - unit(theirs @ case.aligner.teacher.weight.T)
        assert difference.shape[1] == 128
        close(found, (case.ce() + case.kl(2) + difference.square().sum(-1).mean()) / 3)
    assert len(drawn) > 1


def test_simkd():
    """MSE of what the classifier reads, and nothing else; the classifier is the teacher's."""
    case = Case("simkd", init=resolve("simkd").init)
    close(case.loss(), (case.cls(case.s, 3) - case.cls(case.t, 6)).square().mean())
    for name in ("classifier.weight", "bert.pooler.dense.weight"):
        assert torch.equal(case.student.get_parameter(name), case.teacher.get_parameter(name))


@pytest.mark.parametrize("width", [32, 16])
def test_lwd(width):
    """L + α1·T²·KL + α2·Σ over layers of the MSE of every token, through a map a layer, at equal widths too."""
    case = Case("lwd", width=width)
    assert len(case.aligner.maps) == 3
    layers = 0
    for i, (s, t) in enumerate([(1, 1), (2, 4), (3, 6)]):
        rows = (linear(case.aligner.maps[i], case.s.hidden_states[s]) - case.t.hidden_states[t]).square().mean(-1)
        layers = layers + ((rows * case.mask).sum(1) / case.mask.sum(1)).mean()
    close(case.loss(), case.ce() + 2.5 * 4 * case.kl(2) + 20 * layers)


# The scripts of TED's code: α1 and α2 on the mean over layers, learning rate, epochs, batch, warm-up as a share. On
# STS-B its divergence is of a softmax over one score, which is always 0.
SCRIPTS = {
    "mnli": (5, 100, 7e-5, 3, 64, 0.08),
    "qqp": (20, 20, 6e-5, 8, 64, 0.11),
    "qnli": (20, 10, 5e-5, 3, 32, 0.05),
    "sst2": (20, 20, 4e-5, 6, 32, 0),
    "rte": (20, 20, 6e-5, 6, 16, 0),
    "mrpc": (20, 5, 7e-5, 6, 32, 0),
    "stsb": (0, 5, 1e-4, 6, 16, 0.05),
    "cola": (0, 5, 6e-5, 6, 32, 0),
    "question-answering": (10, 100, 5e-5, 3, 8, 0),
}


@pytest.mark.parametrize("task", SCRIPTS)
def test_lwd_as_its_code(task):
    """L + α1·T²·KL + α2·the mean over layers of the MSE of every token, every second layer of the teacher's."""
    alpha, beta, *pace = SCRIPTS[task]
    case = Case("lwd:code", task=task, width=16)
    layers = 0
    for i, (s, t) in enumerate([(1, 2), (2, 4), (3, 6)]):
        rows = (linear(case.aligner.maps[i], case.s.hidden_states[s]) - case.t.hidden_states[t]).square().mean(-1)
        layers = layers + ((rows * case.mask).sum(1) / case.mask.sum(1)).mean() / 3
    close(case.loss(), case.ce() + alpha * 4 * case.kl(2) + beta * layers)
    for recipe in ("lwd:code", "ted:code"):
        for stage in resolve(recipe, task=task).stages:
            assert [stage.lr, stage.epochs, stage.batch, stage.warmup] == pace
