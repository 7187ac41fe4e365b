"""Toy data and teachers on disk, and runs on them: everything an end-to-end test starts from.

What is written is written once and only read from then on; tests write below their own `tmp_path`.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, Qwen2Tokenizer

import limbeck
from limbeck.data import grammar
from limbeck.models import quiet
from tests.tiny import SPECIAL, pre_norm, two_sided, two_sided_sizes

LABELS = grammar.LABELS
ROOT = Path(__file__).parents[1]
# The longest sentence of the toy data fits: nothing is cut.
POSITIONS = 64


_workplace = TemporaryDirectory(prefix="limbeck-toys-")


def workplace() -> Path:
    """Where the toys lie; gone when the tests end."""
    return Path(_workplace.name)


@cache
def data(train: int = 64, dev: int = 32) -> dict[str, str]:
    """`train` and `eval` files of that many rows, as `limbeck.distill` takes them."""
    folder = workplace() / f"data-{train}-{dev}"
    grammar.write(folder, train=train, dev=dev)
    return {"train": str(folder / "train.csv"), "eval": str(folder / "dev.csv")}


@cache
def scores(train: int = 64, dev: int = 32) -> dict[str, str]:
    """The same sentences with a number to predict: a regression task."""
    folder = workplace() / f"scores-{train}-{dev}"
    folder.mkdir()
    named = {}
    for split, path in data(train, dev).items():
        named[split] = str(folder / Path(path).name)
        with Path(path).open(encoding="utf8", newline="") as file:
            rows = [(row["text"], len(row["text"].split()) / 8 + 0.1) for row in csv.DictReader(file)]
        write_csv(named[split], ("text", "score"), rows)
    return named


def write_csv(path: str | Path, header: tuple[str, ...], rows: list[tuple]) -> str:
    """A CSV file."""
    with Path(path).open("w", encoding="utf8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def write_jsonl(path: str | Path, rows: list[dict]) -> str:
    """A JSONL file."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    return str(path)


@cache
def words_of(train: int = 64, dev: int = 32) -> dict[str, list[str]]:
    """The sentences of the toy data, by split."""
    found = {}
    for split, path in data(train, dev).items():
        with Path(path).open(encoding="utf8", newline="") as file:
            found[split] = [row["text"] for row in csv.DictReader(file)]
    return found


def kinds_data(kind: str, row: Callable[[str], dict], train: int = 64, dev: int = 32) -> dict[str, str]:
    """`train` and `eval` files of the toy sentences, with what `row` makes of each."""
    folder = workplace() / f"{kind}-{train}-{dev}"
    folder.mkdir(exist_ok=True)
    return {
        split: write_jsonl(folder / f"{split}.jsonl", [row(text) for text in texts])
        for split, texts in words_of(train, dev).items()
    }


@cache
def tokenizer(family: str = "bert"):
    """One tokenizer for all toys: it knows every word the grammar has. Qwen2 has its own, as transformers loads no
    other beside it: a token a byte."""
    if family == "qwen2":
        return Qwen2Tokenizer({sign: i for i, sign in enumerate(("<|endoftext|>", *sorted(ByteLevel.alphabet())))})
    train, dev = grammar.generate(train=2000, dev=0)
    return grammar.build_tokenizer(row["text"] for row in train + dev)


def model(
    family: str = "bert",
    *,
    layers: int = 4,
    width: int = 32,
    heads: int = 4,
    labels: tuple[str, ...] | int = LABELS,
    dropout: float = 0.1,
    seed: int = 0,
    headless: bool = False,
    auto: str = "AutoModelForSequenceClassification",
    **options,
):
    """A random model. `labels` are names, or a number of them; its weights are drawn large, so that layers differ."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if family == "distilbert":
        sizes = {"dim": width, "n_layers": layers, "n_heads": heads, "hidden_dim": 64}
        drops = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    if family in ("electra", "albert"):
        sizes["embedding_size"] = 16
    if family == "gpt2":
        drops = {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}
    if family in two_sided:
        sizes = two_sided_sizes(family, layers, layers, width, heads)
        start = "sep_token_id" if family == "bart" else "pad_token_id"
        sizes |= {"decoder_start_token_id": getattr(tokenizer(), start), "decoder_vocab_size": len(tokenizer())}
        drops = {"dropout_rate": dropout, "dropout": dropout, "attention_dropout": 0.0, "activation_dropout": 0.0}
    if family in pre_norm:
        drops |= {"attention_dropout": dropout, "mlp_dropout": dropout, "embedding_dropout": dropout}
    sizes |= SPECIAL.get(family, {})
    if family in ("roberta", "xlm-roberta", "mpnet"):
        sizes["max_position_embeddings"] = POSITIONS + 2  # they number positions from behind the padding token
    words = tokenizer(family)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(words),
            "max_position_embeddings": POSITIONS,
            "pad_token_id": words.pad_token_id,
            "bos_token_id": words.cls_token_id,
            "eos_token_id": words.sep_token_id,
            "initializer_range": 0.2,
        }
        | sizes
        | drops
        | _labels(labels)
        | options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, "AutoModel" if headless else auto).from_config(config)
    return made.eval()


def _labels(labels: tuple[str, ...] | int) -> dict:
    if isinstance(labels, int):
        return {"num_labels": labels}
    return {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}


def save(made, folder: Path, *, words=None, bare: bool = False) -> str:
    """A model and a tokenizer (`words`, or the toys' own; `bare`: none), as a plain Hugging Face folder."""
    with quiet():
        made.save_pretrained(folder)
        if not bare:
            (words or tokenizer()).save_pretrained(folder)
    return str(folder)


@cache
def teacher(family: str = "bert", **options) -> str:
    """The folder of a random model with tokenizer; `options` as for `model`."""
    name = "-".join([family, *(f"{k}={v}" for k, v in options.items())]).replace(" ", "").replace("'", "")
    return save(model(family, **options), workplace() / name, words=tokenizer(family))


def distill(recipe: str, out: Path, *, teacher: str, steps: int | None = 3, set: tuple[str, ...] = (), **options):
    """`limbeck.distill` without a word, for a few steps, on the toy data unless told otherwise."""
    if "train" not in options:
        options |= data()
    if "student" not in options:
        options.setdefault("layers", 2)
    short = (f"stages.*.steps={steps}",) if steps else ()
    options.setdefault("pace", limbeck.Pace(log_every=1))
    return limbeck.distill(recipe, teacher=teacher, out=out, set=(*short, *set), quiet=True, **options)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The student a run left."""
    return load_file(Path(run) / "student" / "model.safetensors")


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text("utf8").splitlines()]


def losses(run: Path) -> list[dict]:
    """The lines that tell of a training step."""
    return [line for line in metrics(run) if "loss" in line]


def environment(**more: str) -> dict[str, str]:
    """For a process of its own: limbeck from this tree, one thread, no network, no GPU, which several would share."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")},
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def command(*arguments: object, launcher: tuple[str, ...] = ("-m", "limbeck"), timeout: float = 120):
    """`python -m limbeck …` in a process of its own."""
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )


def options(**named: object) -> list[str]:
    """Keywords as the command line has them: `max_length=64` is `--max-length 64`; a list repeats the option."""
    words: list[str] = []
    for name, value in named.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{name.replace('_', '-')}"] + ([] if one is True else [str(one)])
    return words
