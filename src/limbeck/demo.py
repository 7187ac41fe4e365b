"""`limbeck demo`: a small teacher on generated sentences, distilled five ways, in a table and on a page."""

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import BertConfig, BertForSequenceClassification

from limbeck.data import grammar
from limbeck.engine.world import seed_for
from limbeck.folder import check_place, write_folder
from limbeck.models import quiet
from limbeck.report.page import write_report
from limbeck.report.tables import comparison
from limbeck.run import Run, distill, finetune

TEACHER_LAYERS, STUDENT_LAYERS, WIDTH = 4, 2, 64
# A model this small, trained from nothing, wants a far higher rate than a pre-trained one.
TEACHER = ["stages.*.epochs=10", "stages.*.lr=1e-3", "stages.*.batch=64"]
STUDENT = ["stages.*.epochs=2", "stages.*.lr=1e-3", "stages.*.batch=64"]
RECIPES = ("kd", "pkd", "ild-rtc", "rail-kd-l", "lwd")


def run_demo(out: Path, console: Console) -> list[Run]:
    """Generate, train, distil five ways, compare; every run goes on where it stopped if the demo is started again."""
    check_place(out, "--out")
    races = out / "races"
    data = {"train": str(races / "train.csv"), "eval": str(races / "dev.csv"), "resume": True}
    if not races.exists():
        write_folder(races, grammar.write)
    blank = out / "blank"
    if not blank.exists():
        write_folder(blank, _save_blank)
    console.print("[bold]1. A teacher[/] of four layers learns who wins the race.")
    teacher = finetune(blank, out=out / "teacher", set=TEACHER, **data)
    console.print("[bold]2. A student[/] of two layers, on labels alone: what the others have to beat.")
    alone = finetune(
        teacher.folder, out=out / "finetune", layers=STUDENT_LAYERS, set=[*STUDENT, "init=[layers(first)]"], **data
    )
    runs = [alone]
    for number, recipe in enumerate(RECIPES, start=3):
        console.print(f"[bold]{number}. The same student, distilled with {recipe}.[/]")
        runs.append(
            distill(recipe, teacher=teacher.folder, out=out / recipe, layers=STUDENT_LAYERS, set=STUDENT, **data)
        )
    first = {**teacher.scores, "recipe": "teacher"}
    console.print(comparison([first, *(_beside(run.scores, teacher.scores) for run in runs)]))
    page = write_report([teacher.folder, *(run.folder for run in runs)], out / "report.html")
    console.print(f"The page is {page}; the students are in {out}/RECIPE/student.")
    return runs


def _beside(scores: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """A run without a teacher of its own, beside the demo's."""
    if scores["teacher"] is not None:
        return scores
    return {**scores, "teacher": teacher["student"], "retention": 100 * scores["student"] / teacher["student"]}


def _save_blank(place: Path) -> None:
    """An untrained model with its tokenizer."""
    import torch

    train, dev = grammar.generate()
    tokenizer = grammar.build_tokenizer(row["text"] for row in [*train, *dev])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(0))
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=WIDTH,
                num_hidden_layers=TEACHER_LAYERS,
                num_attention_heads=4,
                intermediate_size=4 * WIDTH,
                max_position_embeddings=64,
                initializer_range=0.05,  # with the usual 0.02, a model this narrow takes twice as long to get going
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                id2label=dict(enumerate(grammar.LABELS)),
                label2id={name: i for i, name in enumerate(grammar.LABELS)},
            )
        )
    with quiet():
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
