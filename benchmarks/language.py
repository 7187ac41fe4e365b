"""How good recipes are on language models: TED's setting, recipes × seeds on one teacher, as a table and JSON.

    python benchmarks/language.py --model MODEL --train wiki/train.txt --eval wiki/valid.txt \
        --tests wikitext-2=wiki/test.txt,lambada=lambada_test.jsonl --layers 3 --results docs/results/NAME

The teacher is MODEL, fine-tuned on the text. With `--stories N` it is MODEL itself, and the text is N stories that it
tells, of which a twentieth is held out to select on and a twentieth to test on (`stories`). Recipes differ by method
alone: each student starts as the same layers of the teacher and takes as many steps, of one size, learning rate and β
and ε of AdamW; `finetune` sees text only. A stage that trains no student comes on top, a quarter as long, as in the
paper. Tests in JSONL are LAMBADA's; the others are running text. Perplexities are of tokens, in blocks of
`--max-length`.
"""

import argparse
import json
import multiprocessing
import time
from pathlib import Path

from comparison import limbeck_in, save, seeds, spread, words

TELLING = 4096  # stories at a time


def main() -> None:
    args = arguments()
    work = Path(args.work)
    began = time.time()
    if args.stories:
        tell(args, work / "stories")
    teacher = args.model if args.stories else str(work / "teacher")
    first = [] if args.stories else [("teacher", args.teacher_seed, args.model, None, work / "teacher", args)]
    students = [
        (recipe, seed, teacher, args.layers, work / f"{recipe}-{seed}", args)
        for seed in args.seeds
        for recipe in args.recipes
    ]
    rows: list[dict] = []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        if args.stories:
            rows.append(pool.apply(scored, ("teacher", 0, args.model, args)))
        for jobs in (first, students):
            for row in pool.imap_unordered(one, jobs):
                rows.append(row)
                shown = "  ".join(f"{name} {value:.2f}" for name, value in row["scores"].items())
                print(f"{time.time() - began:6.0f} s  {row['recipe']} {row['seed']}  {shown}", flush=True)
                table = write(rows, args, time.time() - began)  # each time: a stopped comparison keeps what it has
    print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the language model the teacher starts from")
    parser.add_argument("--train", help="text to learn from")
    parser.add_argument("--eval", help="text to select on")
    parser.add_argument("--stories", type=int, default=0, help="instead, how many stories the model tells")
    parser.add_argument("--tests", type=named, default={}, help="what to score on: NAME=FILE,…")
    parser.add_argument("--recipes", type=words, default=["finetune", "kd", "lwd", "ted"])
    parser.add_argument("--seeds", type=seeds, default=[1, 2, 3])
    parser.add_argument("--teacher-seed", type=int, default=42)
    parser.add_argument("--teacher-epochs", type=float, default=4)
    parser.add_argument("--teacher-lr", default="5e-4")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lr", default="5e-4")
    parser.add_argument("--layer-weight", help="of what compares layers; default: as the recipe has it")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", default="runs/language", help="where the run folders go")
    parser.add_argument("--results", required=True, help="writes RESULTS.json and RESULTS.md")
    args = parser.parse_args()
    if args.stories:
        folder = Path(args.work) / "stories"
        args.train, args.eval = str(folder / "train.jsonl"), str(folder / "eval.jsonl")
        args.tests = {"stories": str(folder / "test.jsonl"), **args.tests}
    if not (args.train and args.eval and args.tests):
        parser.error("give --train and --eval, or --stories; and --tests")
    return args


def tell(args: argparse.Namespace, folder: Path) -> None:
    """Have the model tell stories, sampled from its own predictions, and leave them in three files."""
    if (folder / "test.jsonl").exists():
        return
    import torch

    from limbeck import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = models.load_model(args.model).to(device), models.load_tokenizer(args.model)
    start = torch.tensor([[tokenizer.bos_token_id]], device=device)
    torch.manual_seed(0)
    stories: list[str] = []
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        while len(stories) < args.stories:
            count = min(TELLING, args.stories - len(stories))
            ids = model.generate(
                start.expand(count, 1),
                attention_mask=torch.ones_like(start).expand(count, 1),
                do_sample=True,
                top_k=0,
                max_new_tokens=args.max_length - 1,
                pad_token_id=tokenizer.eos_token_id,
            )
            # A story ends where the next one would begin.
            ends = ((ids[:, 1:] == tokenizer.eos_token_id) | (ids[:, 1:] == tokenizer.bos_token_id)).long()
            kept = [row[1:][end.cumsum(0) == 0] for row, end in zip(ids, ends)]
            stories += [text for text in tokenizer.batch_decode(kept, skip_special_tokens=True) if text.strip()]
    folder.mkdir(parents=True, exist_ok=True)
    held = max(1, len(stories) // 20)
    parts = {"train": stories[2 * held :], "eval": stories[:held], "test": stories[held : 2 * held]}
    for name, part in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf8")


def one(job: tuple) -> dict:
    """Carry out one run, or go on with it, and return the scores of its student."""
    recipe, seed, model, layers, folder, args = job
    limbeck = limbeck_in(args.workers)
    common = {
        "kind": "causal-lm", "train": args.train, "eval": args.eval, "max_length": args.max_length,
        "out": str(folder).replace(":", "-"), "seed": seed, "resume": True, "quiet": True,
        "pace": limbeck.Pace(save_every=1e9, compile="off"),
    }  # fmt: skip
    if recipe == "teacher":
        changes = [f"stages.*.{key}={value}" for key, value in
                   (("epochs", args.teacher_epochs), ("lr", args.teacher_lr), ("batch", args.batch))]  # fmt: skip
        run = limbeck.finetune(model, set=changes, **common)
    elif recipe == "finetune":
        run = limbeck.finetune(model, layers=layers, set=[*alike(recipe, args), "init=[layers(sanh)]"], **common)
    else:
        run = limbeck.distill(recipe, teacher=model, layers=layers, set=alike(recipe, args), **common)
    return scored(recipe, seed, str(run.student), args) | {
        "seconds": run.scores["seconds"],
        "params": run.scores["params"],
    }


def alike(recipe: str, args: argparse.Namespace) -> list[str]:
    """What makes a recipe take as many steps of the student as the others, of the same size."""
    from limbeck.recipe import resolve

    changes = [f"stages.*.batch={args.batch}", "stages.*.betas=[0.9, 0.999]", "stages.*.eps=1e-8"]
    for stage in resolve(recipe, task="causal-lm").stages:
        if "student" in stage.train:
            changes += [f"stages.{stage.name}.epochs={args.epochs}", f"stages.{stage.name}.lr={args.lr}"]
        else:
            changes.append(f"stages.{stage.name}.epochs={args.epochs / 4}")
        if args.layer_weight and "layers" in stage.objectives:
            changes.append(f"stages.{stage.name}.objectives.layers.weight={args.layer_weight}")
    return changes


def scored(recipe: str, seed: int, name: str, args: argparse.Namespace) -> dict:
    """A model's scores on every test."""
    import torch

    from limbeck import evaluation, models
    from limbeck.data.encoding import encode
    from limbeck.data.kinds import KINDS
    from limbeck.data.loading import load
    from limbeck.data.spec import DataSpec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = models.load_model(name).to(device), models.load_tokenizer(name)  # type: ignore[arg-type]
    scores = {}
    for test, file in args.tests.items():
        kind = "causal-lm" if test == "stories" or not file.endswith(".jsonl") else "lambada"
        corpus = load(DataSpec(eval=file, kind=kind, max_length=args.max_length), train=False)
        data = encode(corpus.evals["dev"], tokenizer, ("input_ids",), args.max_length, KINDS[kind])
        for metric, value in evaluation.evaluate(model, data, corpus.task).items():
            scores[f"{test} {metric}"] = value
    return {"recipe": recipe, "seed": seed, "scores": scores}


def write(rows: list[dict], args: argparse.Namespace, seconds: float) -> str:
    """Leave the raw rows and the table, and return the table."""
    order = ["teacher", *args.recipes]
    rows.sort(key=lambda row: (order.index(row["recipe"]), row["seed"]))
    settings = {k: v for k, v in vars(args).items() if k not in ("work", "results", "train", "eval", "tests")}
    settings |= {"model": Path(args.model).name, "tests": list(args.tests)}
    header = ["recipe", *rows[0]["scores"]]
    return save(args.results, header, lines(rows, order), settings=settings, seconds=round(seconds), rows=rows)


def lines(rows: list[dict], order: list[str]):
    """A line a recipe: mean ± standard deviation over seeds, score by score."""
    for recipe in order:
        found = [row["scores"] for row in rows if row["recipe"] == recipe]
        if found:
            yield [recipe, *(spread([scores[name] for scores in found], digits=2) for name in found[0])]


def named(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words(text))


if __name__ == "__main__":
    main()
