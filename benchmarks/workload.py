"""What the benchmarks time: models of a given shape with random weights, and sequences of real or given lengths."""

import copy
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedModel

from limbeck.data.encoding import Encoded
from limbeck.data.plan import plan, share
from limbeck.distiller import Distiller
from limbeck.engine.loop import total_steps
from limbeck.engine.step import Step
from limbeck.initialisers import start_student
from limbeck.objectives import build
from limbeck.recipe import Stage, resolve
from limbeck.teachers import PASSES, Live, remembering

VOCABULARY = 30522
LONGEST = 128


def teacher(layers: int = 12, width: int = 768, labels: int = 2) -> PreTrainedModel:
    """A BERT of that shape; BERT-base unless told otherwise."""
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=labels,
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def lengths_of(task: str, data: Path | None, count: int) -> np.ndarray:
    """Token lengths of a GLUE task (counted in words and punctuation, near enough to word pieces), or one number."""
    if task.isdigit():
        return np.full(count, int(task))
    if data is None:
        raise SystemExit(f"--data FOLDER is needed for the lengths of {task}; or give a number")
    import re

    from limbeck.data.loading import load
    from limbeck.data.spec import DataSpec

    split = load(DataSpec(task=task, data=str(data))).train
    if split is None:
        raise SystemExit(f"{task} has no train set in {data}")
    pieces = re.compile(r"\w+|[^\w\s]")
    sizes = [len(pieces.findall(text)) for text in split.text]
    if split.text_pair:
        sizes = [a + len(pieces.findall(b)) + 1 for a, b in zip(sizes, split.text_pair)]
    # A word is 1.15 pieces of BERT's vocabulary on GLUE's texts; two more for [CLS] and [SEP].
    rounded = np.minimum(np.ceil(np.array(sizes) * 1.15).astype(int) + 2, LONGEST)
    return np.random.default_rng(0).choice(rounded, count)


def examples(lengths: np.ndarray, labels: int = 2) -> Encoded:
    """Random tokens of those lengths, with random labels."""
    rng = np.random.default_rng(0)
    total = int(lengths.sum())
    return Encoded(
        {
            "input_ids": rng.integers(1000, VOCABULARY, total).astype(np.int32),
            "token_type_ids": np.zeros(total, np.int32),
        },
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rng.integers(0, labels, len(lengths)),
        {"input_ids": 0, "token_type_ids": 0},
    )


class Workload:
    """A stage of a recipe, ready to step."""

    def __init__(
        self,
        recipe: str,
        model: PreTrainedModel,
        data: Encoded,
        batch: int,
        *,
        layers: int = 6,
        eager: bool = False,
        compiled: bool = False,
        cached: bool = False,
        accelerator: Accelerator,
        pieces: int = 1,
        set: tuple[str, ...] = (),
    ) -> None:
        resolved = resolve(recipe, overrides=[f"stages.*.batch={batch}", *set])
        self.stage: Stage = resolved.stages[-1]
        self.accelerator, self.data, self.pieces = accelerator, data, pieces
        above = copy.deepcopy(model)
        start = start_student(resolved.init, above, above, depth=layers, labels={}, seed=0)
        objectives = {name: build(one) for name, one in self.stage.objectives.items()}
        torch.manual_seed(1)
        self.distiller = Distiller(above, start.student, objectives, steps=total_steps(self.stage, len(data)))
        for name, parameter in start.student.named_parameters():
            parameter.requires_grad_(name not in start.frozen)
        if self.distiller.teacher is not None and accelerator.mixed_precision == "bf16":
            self.distiller.teacher.lighten(copy.deepcopy(above).to(torch.bfloat16))
        self.distiller.to(accelerator.device).train()
        began, live = time.perf_counter(), self.distiller.teacher
        if cached and isinstance(live, Live):
            self.distiller.teacher = remembering(
                live, data, passes=PASSES, choice="auto", device=accelerator.device, say=print
            )
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
        self.cache_seconds = time.perf_counter() - began
        self.step = Step(
            self.distiller,
            self.stage,
            accelerator,
            data.on(accelerator.device),
            eager=eager,
            compiled=compiled,
            say=print,
        )
        self.done = 0

    def run(self, epoch: int = 0, most: int | None = None) -> int:
        """Steps through an epoch, or its first batches; returns how many."""
        longest = max(LONGEST, int(self.data.lengths.max()))
        batches = plan(self.data.lengths, self.stage.batch, seed=0, stage=0, epoch=epoch, longest=longest)[:most]
        with self.step.running():
            for batch in batches:
                self.distiller.at(epoch, self.done)
                real = int((batch.ids >= 0).sum())
                self.step(share(batch.ids, 0, 1, self.pieces), batch.length, real, self.stage.lr, self.done)
                self.done += 1
        return len(batches)
