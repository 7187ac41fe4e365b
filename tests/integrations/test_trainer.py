"""The Distiller inside transformers.Trainer gives the losses, gradients and students of limbeck's own loop."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback

from limbeck.data import grammar
from limbeck.engine.step import Step
from limbeck.errors import LimbeckError
from limbeck.initialisers import start_student
from limbeck.integrations.trainer import DistillationTrainer
from limbeck.objectives import Labels, Logits, Match
from limbeck.recipe import resolve
from limbeck.teachers import Live
from tests import toy
from tests.engine.test_step import examples, world
from tests.invariants.test_split import torchrun
from tests.test_structure import heavy_after
from tests.tiny import tiny_model

LENGTH = 16
LR = 1e-3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def models(**options):
    student = tiny_model("bert", 2, width=16, heads=2, seed=1, **options)
    return {"model": student, "teacher": tiny_model("bert", 4, seed=2)}


class Rows(list):
    """Nine examples: batches of four end with one of a single example, in half as many pieces as the others."""

    def __init__(self, count=9):
        columns = examples(count).batch(range(count), LENGTH)
        super().__init__({"id": i, **{name: values[i] for name, values in columns.items()}} for i in range(count))


class Collator:
    """Batches, and a note of which examples each has."""

    def __init__(self):
        self.seen = []

    def __call__(self, rows):
        self.seen.append([row["id"] for row in rows])
        names = ("input_ids", "attention_mask", "token_type_ids", "labels")
        return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in names}


class Gradients(TrainerCallback):
    """What each optimiser step saw."""

    def __init__(self):
        self.seen, self.distiller = [], None

    def on_pre_optimizer_step(self, args, state, control, **rest):
        self.seen.append({n: p.grad.clone() for n, p in self.distiller.named_parameters() if p.grad is not None})


def arguments(out, **options):
    return TrainingArguments(
        **{
            "output_dir": str(out),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": LR,
            "weight_decay": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "seed": 7,
            "use_cpu": True,
        }
        | options
    )


def trainer(out, *, collator=None, dataset=None, dropout=False, both=None, **options):
    named = {k: options.pop(k) for k in list(options) if k in TrainingArguments.__dataclass_fields__}
    made = DistillationTrainer(
        **both or models(**{} if dropout else NO_DROPOUT),
        args=arguments(out, **named),
        train_dataset=dataset or Rows(),
        data_collator=collator or Collator(),
        **options,
    )
    made.remove_callback(PrinterCallback)
    return made


def logged(made):
    return [line for line in made.state.log_history if "loss" in line]


def test_question_answering_has_its_labels_in_two_columns(tmp_path):
    both = {
        who: tiny_model("bert", layers, seed=layers, labels=2, auto=AutoModelForQuestionAnswering, **NO_DROPOUT)
        for who, layers in (("model", 2), ("teacher", 4))
    }
    first, last = torch.tensor([1, 0, 2]), torch.tensor([3, 0, 2])
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "start_positions": s, "end_positions": e}
        for ids, s, e in zip(torch.arange(5, 29).view(3, 8), first, last, strict=True)
    ]
    batch = default_data_collator(rows)
    made = trainer(
        tmp_path, both=both, dataset=rows, recipe="kd", collator=default_data_collator, max_steps=1, eval_dataset=rows
    )
    with torch.no_grad():
        taught = made.distiller.eval()(**batch, labels=torch.stack([first, last], -1))
        own = both["model"](**batch).loss  # transformers' own, which is the mean of both sides too
    torch.testing.assert_close(taught.parts["labels"], own)
    made.train()
    assert logged(made)[0]["loss"] == pytest.approx(taught.loss.item(), rel=1e-5)
    assert made.evaluate()["eval_loss"] < own


STAGES = [("pkd", None), ("rail-kd-l", None), ("cr-ild", "layers"), ("cr-ild", "predictions")]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("recipe", "stage"), STAGES, ids=str)
def test_steps_are_those_of_our_own_loop(tmp_path, recipe, stage, accumulated):
    collator, gradients = Collator(), Gradients()
    cut = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    made = trainer(tmp_path, collator=collator, recipe=recipe, stage=stage, callbacks=[gradients], **cut)
    gradients.distiller = made.distiller
    made.train()
    ours = trainer(tmp_path, recipe=recipe, stage=stage, **cut).distiller.train()
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(name in gradients.seen[0])
    step = Step(ours, made.stage, world(), examples(9).on("cpu"))
    ours.steps = 6
    pieces = collator.seen[1:]  # the first was to see what a forward does
    for at, line in enumerate(logged(made)):
        epoch, batch = divmod(at, 3)
        first = epoch * len(pieces) // 2 + batch * accumulated
        taken = pieces[first : first + (accumulated if batch < 2 else 1)]
        ours.at(epoch, at)
        step([np.array(ids) for ids in taken], LENGTH, sum(map(len, taken)), line["learning_rate"], seed=0)
        found = {n.removeprefix("loss_"): value for n, value in line.items() if n.startswith("loss")}
        assert found == pytest.approx(step.read(), rel=1e-5, abs=1e-5)
        for name, gradient in gradients.seen[at].items():
            torch.testing.assert_close(gradient, ours.get_parameter(name).grad, **CLOSE)
    assert at == 5


def test_aligners_train_with_the_student(tmp_path):
    made = trainer(tmp_path, objectives=[Labels(), Match("hidden", map="uniform", align="linear")])
    before = {name: weight.clone() for name, weight in made.distiller.state_dict().items()}
    made.train()
    moved = {name for name, weight in made.distiller.named_parameters() if not torch.equal(weight, before[name])}
    assert {name.split(".")[0] for name in moved} == {"student", "objectives"}
    assert {f"loss_{name}" for name in ("labels", "match")} <= set(logged(made)[0])


def test_what_is_logged_is_the_mean_since_the_last_time(tmp_path):
    often = trainer(tmp_path, recipe="kd")
    rarely = trainer(tmp_path, recipe="kd", logging_steps=3)
    often.train()
    rarely.train()
    for name in ("loss", "loss_labels", "loss_logits"):
        values = [line[name] for line in logged(often)]
        expected = [sum(values[:3]) / 3, sum(values[3:]) / 3]
        assert [line[name] for line in logged(rarely)] == pytest.approx(expected, abs=1e-4)


def test_checkpoints_are_the_plain_student(tmp_path):
    made = trainer(tmp_path, recipe="pkd", save_strategy="epoch")
    made.train()
    folder = tmp_path / "checkpoint-6"
    assert set(load_file(folder / "model.safetensors")) == set(made.model.state_dict())
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, made.model.state_dict()[name])
    assert set(load_file(folder / "aligners.safetensors")) == set(made.distiller.objectives.state_dict())
    made.save_model(str(tmp_path / "student"))
    assert not (tmp_path / "student" / "aligners.safetensors").exists()


@pytest.mark.parametrize("step", [2, 3])
def test_resumed_is_uninterrupted(tmp_path, step):
    """Inside an epoch and between two, with dropout and layers drawn each epoch."""
    options = {"recipe": "rail-kd-l", "dropout": True, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path / "run", **options)
    whole.train()
    resumed = trainer(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    for name, weight in whole.distiller.state_dict().items():
        assert torch.equal(weight, resumed.distiller.state_dict()[name]), name
    assert [line["loss_layers"] for line in logged(resumed)] == [line["loss_layers"] for line in logged(whole)]


def test_what_has_no_aligners_is_not_resumed(tmp_path):
    trainer(tmp_path, recipe="pkd", save_strategy="epoch").train()
    (tmp_path / "checkpoint-3" / "aligners.safetensors").unlink()
    with pytest.raises(LimbeckError, match="it has no aligners"):
        trainer(tmp_path, recipe="pkd").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_evaluation_is_the_students_own(tmp_path):
    rows = Rows()
    made = trainer(
        tmp_path,
        recipe="pkd",
        eval_dataset=rows,
        eval_strategy="epoch",
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    made.train()
    scores = [line for line in made.state.log_history if "eval_loss" in line]
    assert len(scores) == 2
    batch = Collator()(rows)
    with torch.no_grad():
        output = made.model.eval()(**batch)
    assert scores[-1]["eval_loss"] == pytest.approx(output.loss.item(), abs=1e-4)
    assert scores[-1]["eval_right"] == pytest.approx((output.logits.argmax(-1) == batch["labels"]).float().mean())
    assert made.evaluate()["eval_loss"] == pytest.approx(output.loss.item(), abs=1e-4)


def test_a_teacher_of_another_family_gets_its_columns(tmp_path, monkeypatch):
    """DistilBERT takes no token types; they reach its teacher, and what nobody takes is left out."""
    asked = set()
    real = Live.features
    monkeypatch.setattr(Live, "features", lambda self, **batch: asked.update(batch) or real(self, **batch))
    both = {"model": tiny_model("distilbert", 2), "teacher": tiny_model("bert", 4, seed=2)}
    options = {"eval_dataset": Rows(), "remove_unused_columns": True, "collator": default_data_collator}
    made = trainer(tmp_path, both=both, recipe="kd", **options)
    made.train()
    assert asked == {"input_ids", "attention_mask", "token_type_ids", "labels", "count"}
    assert "eval_loss" in made.evaluate()


def test_a_recipe_of_several_stages_has_a_trainer_for_each(tmp_path):
    teacher = models()["teacher"]
    student = start_student(resolve("ted").init, teacher, teacher, depth=2, labels={}, seed=0).student
    both = {"model": student, "teacher": teacher}
    first = trainer(tmp_path, both=both, recipe="ted", stage="filters")
    start = {name: weight.clone() for name, weight in student.state_dict().items()}
    first.train()
    assert all(torch.equal(weight, start[name]) for name, weight in student.state_dict().items())
    learnt = {name: w.clone() for name, w in first.aligners["task"].module.state_dict().items()}
    for name in learnt:  # a student of the teacher's layers starts with what the teacher's filters learned
        assert torch.equal(learnt[name], learnt[name.replace("student.", "teacher.")])
    assert all(parameter.requires_grad for parameter in student.parameters())
    second = trainer(tmp_path, both=both, recipe="ted", stage="distil", aligners=first.aligners)
    assert second.aligners["task"].module is first.aligners["task"].module
    second.train()
    now = second.aligners["task"].module.state_dict()
    moved = {name.split(".")[0] for name in now if not torch.equal(now[name], learnt[name])}
    assert moved == {"student"}
    assert any(not torch.equal(weight, start[name]) for name, weight in student.state_dict().items())


def test_what_no_objective_reaches_stays(tmp_path):
    """The classifier is not read while layers are compared, and weight decay would shrink it."""
    both = models(**NO_DROPOUT)
    before = both["model"].classifier.weight.clone()
    trainer(tmp_path, both=both, recipe="tinybert", stage="layers", weight_decay=0.5).train()
    assert torch.equal(both["model"].classifier.weight, before)
    trainer(tmp_path, both=both, recipe="tinybert", stage="predictions").train()
    assert not torch.equal(both["model"].classifier.weight, before)


def test_what_is_frozen_stays_frozen(tmp_path):
    both = models(**NO_DROPOUT)
    both["model"].classifier.requires_grad_(False)
    before = both["model"].classifier.weight.clone()
    trainer(tmp_path, both=both, recipe="kd").train()
    assert torch.equal(both["model"].classifier.weight, before)
    assert not both["model"].classifier.weight.requires_grad


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either recipe= or objectives="),
        ({"recipe": "kd", "objectives": [Logits()]}, "either recipe= or objectives="),
        ({"recipe": "tinybert"}, 'has 2 stages and a Trainer trains one: give stage="layers"'),
        ({"recipe": "tinybert", "stage": "layer"}, 'no stage "layer". Did you mean'),
        ({"recipe": "kd", "label_smoothing_factor": 0.1}, "does not take label_smoothing_factor"),
        ({"recipe": "kd", "compute_loss_func": print}, "does not take compute_loss_func"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, options, said):
    with pytest.raises(LimbeckError, match=re.escape(said)):
        trainer(tmp_path, **options)


def test_batches_without_masks_are_refused(tmp_path):
    with pytest.raises(LimbeckError, match="batches have no attention_mask"):
        trainer(tmp_path, recipe="kd", collator=lambda rows: {"input_ids": torch.ones(2, 3).long()}).train()


def test_a_resolved_recipe_is_taken(tmp_path):
    made = trainer(tmp_path, recipe=resolve("kd", overrides=["stages.distil.objectives.logits.weight=0"]))
    assert list(made.distiller.terms) == ["labels"]


@pytest.mark.parametrize("recipe", ["lwd", "att-kl"])
def test_gradient_checkpointing_changes_nothing(tmp_path, recipe):
    stage = resolve(recipe).stages[0].name
    plain, spared = (trainer(tmp_path, recipe=recipe, stage=stage, gradient_checkpointing=on) for on in (False, True))
    plain.train()
    spared.train()
    values = [[line["loss"] for line in logged(made)] for made in (plain, spared)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, monkeypatch):
    """Half a batch each, of eight examples: every loss and gradient norm is that of one process."""
    whole = trainer(tmp_path / "one", recipe="pkd", dataset=Rows(8), max_steps=4)
    whole.train()
    monkeypatch.chdir(toy.ROOT)
    torchrun("-m", "tests.integrations.test_trainer", tmp_path / "two")
    lines = json.loads((tmp_path / "two" / "logged.json").read_text("utf8"))
    for ours, theirs in zip(logged(whole), lines, strict=True):
        for name in ("loss", "loss_labels", "loss_logits", "loss_layers", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_the_documented_example_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text("utf8")
    code = re.search(r"<!-- example: trainer -->\n```python\n(.*?)```", page, flags=re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    grammar.write(tmp_path, train=16, dev=8)
    toy.save(toy.model(), tmp_path / "teacher")
    ran = {}
    exec(compile(code, "docs/trainer.md", "exec"), ran)
    assert [line["epoch"] for line in ran["trainer"].state.log_history if "eval_loss" in line] == [1.0, 2.0]
    assert AutoModelForSequenceClassification.from_pretrained("student").config.num_hidden_layers == 2


def test_trainer_is_imported_only_where_it_is_asked_for():
    code = "import limbeck; limbeck.Distiller; limbeck.distill; assert 'transformers.trainer' not in sys.modules"
    heavy_after(code)
    heavy_after("import limbeck.integrations; assert 'transformers' not in sys.modules")


if __name__ == "__main__":  # one of two processes
    run = trainer(sys.argv[1], recipe="pkd", dataset=Rows(8), max_steps=4, per_device_train_batch_size=2)
    run.train()
    if run.is_world_process_zero():
        (Path(sys.argv[1]) / "logged.json").write_text(json.dumps(logged(run)), encoding="utf8")
    torch.distributed.destroy_process_group()
