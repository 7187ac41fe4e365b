"""The same Distiller inside `transformers.Trainer`, for code that lives there.

A Trainer's model is the student, so that saving, evaluation, hub and callbacks see a plain model; what it trains is the
Distiller around it. One trainer trains one stage of a recipe.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from limbeck import architectures
from limbeck.data.mixing import Mixup
from limbeck.distiller import Distiller
from limbeck.engine.sharding import gathered
from limbeck.engine.world import seed_for
from limbeck.errors import LimbeckError, did_you_mean
from limbeck.objectives import NamedAligner, Objective, build
from limbeck.recipe import Recipe, Stage, resolve
from limbeck.spec import parse
from limbeck.trained import find_unreached, listed

ALIGNERS = "aligners.safetensors"  # in each checkpoint, beside the student


class DistillationTrainer(Trainer):
    """A Trainer that distils `teacher` into `model`, by a recipe's stage or by objectives of your own.

    `recipe` is a name (`"pkd"`, `"ted:kl"`, a file) or what `limbeck.recipe.resolve` gives; of a recipe with several
    stages, `stage` names the one to train. It says what is compared and what trains; learning rate, epochs, batch and
    all the rest are Trainer's. How the student starts is up to you. `aligners` takes those that have names in the
    recipe from the trainer of the stage before (`trainer.aligners`).

    Other arguments are Trainer's own. Every part of the loss is logged as `loss_NAME`. `eval_loss` is the student's own
    loss with the labels. `trainer.distiller` is the module that trains.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        teacher: PreTrainedModel,
        recipe: str | Recipe | None = None,
        stage: str | None = None,
        objectives: Sequence[Objective] | Mapping[str, Objective] | None = None,
        aligners: Mapping[str, NamedAligner] | None = None,
        **options: Any,
    ) -> None:
        if (recipe is None) == (objectives is None):
            raise LimbeckError("give either recipe= or objectives=: one of them says what the student learns from.")
        super().__init__(model, args, **options)
        _check(self, model)
        # Its losses are divided by the whole optimiser batch already: Trainer must not divide them again.
        self.model_accepts_loss_kwargs = True
        self.aligners = dict(aligners or {})
        self.stage, index = None, 0
        if recipe is not None:
            resolved = resolve(recipe) if isinstance(recipe, str) else recipe
            self.stage, index = _chosen(resolved, stage)
            objectives = {name: build(one, resolved.aligners) for name, one in self.stage.objectives.items()}
            self.aligners = {n: NamedAligner(parse(call)) for n, call in resolved.aligners.items()} | self.aligners
        mixup = self.stage.mixup if self.stage else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.args.seed, index))  # aligners start as in a run of limbeck's own
            self.distiller = Distiller(
                teacher,
                model,
                objectives or {},
                aligners=self.aligners,
                mixup=Mixup(mixup, rows=self.args.train_batch_size) if mixup else None,
                seed=self.args.seed,
                stage=index,
            ).to(self.args.device)
        self._student_columns = set(inspect.signature(model.forward).parameters)
        self._set_signature_columns_if_needed()
        self._signature_columns = [*(self._signature_columns or []), *architectures.inputs(teacher)]
        self._sums, self._steps = torch.zeros(len(self.distiller.terms), device=self.args.device), 0

    def train(self, *args: Any, **options: Any) -> Any:
        """Train the student and its aligners; see `Trainer.train`."""
        with self._freezing():
            result = super().train(*args, **options)
        self.distiller.finish()
        return result

    @contextmanager
    def _freezing(self) -> Iterator[None]:
        """While training, freeze what the stage does not train and what no objective reaches: DDP and weight decay
        would not leave it alone. Another stage may train it, so it is given back."""
        trained = {name: p for name, p in self.distiller.named_parameters() if p.requires_grad}
        try:
            wanted = listed(self.distiller, self.stage, self.aligners) if self.stage else trained
            for name, parameter in trained.items():
                parameter.requires_grad_(name in wanted)
            for name in find_unreached(self.distiller, self._probe()):
                trained[name].requires_grad_(False)
            yield
        finally:
            for parameter in trained.values():
                parameter.requires_grad_(True)

    def _probe(self) -> dict[str, Any]:
        """Two examples, to see what a forward does."""
        if self.train_dataset is None:
            raise LimbeckError("there is nothing to train on: give train_dataset=.")
        collate = self._get_collator_with_removed_columns(self.data_collator)
        batch = self._prepare_inputs(collate(list(islice(self.train_dataset, 2))))  # type: ignore[call-overload]
        missing = {"input_ids", "attention_mask"} - set(batch)
        if missing:
            raise LimbeckError(
                f"batches have no {' and no '.join(sorted(missing))}: give what a tokenizer gives, and a data_collator "
                "or processing_class that pads it."
            )
        return _labelled(batch)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimiser of student and aligners."""
        return super().create_optimizer(self.distiller)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Train the Distiller in the student's place, behind DDP where there are several processes."""
        if training and model is self.model:
            return self.accelerator.prepare_model(self.distiller)
        return super()._wrap_model(model, training, dataloader)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The pieces of the next optimiser batch, and what the losses of each are divided by: all its examples."""
        pieces = list(islice(epoch_iterator, num_batches))
        examples = torch.tensor(float(sum(len(piece["input_ids"]) for piece in pieces)), device=device)
        self.distiller.steps = self.state.max_steps
        self.distiller.at(int(self.state.epoch or 0), self.state.global_step)
        self._steps += 1
        # DDP averages gradients over processes; dividing by less makes that the sum.
        return pieces, self.accelerator.reduce(examples, reduction="mean")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The weighted sum of all objectives; in evaluation, where outputs are asked for, the student's own loss."""
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs)
        output = model(**_labelled(inputs), count=num_items_in_batch)
        self._sums += torch.stack([part.detach() for part in output.parts.values()])
        return output.loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """What the student predicts; it is not given the columns that only its teacher takes."""
        taken = {name: value for name, value in inputs.items() if name in self._student_columns}
        return super().prediction_step(model, taken, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, beside the loss, the mean of each of its parts since the last time."""
        if "loss" in logs:
            logs |= self._parts()
        super().log(logs, *args, **options)

    def _parts(self) -> dict[str, float]:
        means = self.accelerator.reduce(self._sums / max(self._steps, 1), reduction="mean")
        self._sums.zero_()
        self._steps = 0
        return {f"loss_{name}": mean for name, mean in zip(self.distiller.terms, means.tolist())}  # type: ignore[union-attr]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_file(gathered(self.distiller.objectives.state_dict()), Path(output_dir) / ALIGNERS)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        saved = Path(checkpoint) / ALIGNERS
        if not saved.is_file():
            raise LimbeckError(f"{checkpoint} cannot be resumed: it has no {ALIGNERS}. Save without save_only_model.")
        self.distiller.objectives.load_state_dict(load_file(saved))


def _labelled(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with labels as objectives take them; transformers has those of question answering in two columns."""
    if "start_positions" not in batch:
        return batch
    return {**batch, "labels": torch.stack([batch["start_positions"], batch["end_positions"]], -1)}


def _chosen(recipe: Recipe, name: str | None) -> tuple[Stage, int]:
    """The stage of that name, or the only one there is."""
    names = [stage.name for stage in recipe.stages]
    if name is None and len(names) > 1:
        raise LimbeckError(
            f'recipe "{recipe.name}" has {len(names)} stages and a Trainer trains one: give stage="{names[0]}", then '
            f"another trainer with the same student for each of the rest, {', '.join(names[1:])}."
        )
    if name is not None and name not in names:
        raise LimbeckError(
            f'recipe "{recipe.name}" has no stage "{name}".{did_you_mean(name, names)} Stages: {", ".join(names)}.'
        )
    index = names.index(name) if name else 0
    return recipe.stages[index], index


def _check(trainer: Trainer, student: PreTrainedModel) -> None:
    """Refuse what Trainer offers and this one cannot do."""
    refused = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process (start one for each, with torchrun)": trainer.args.n_gpu > 1,
        "label_smoothing_factor": trainer.args.label_smoothing_factor,
        "compute_loss_func": trainer.compute_loss_func,
        "a student with a projector (limbeck.distill does)": architectures.projector(student),
    }
    found = [name for name, asked in refused.items() if asked]
    if found:
        raise LimbeckError(f"DistillationTrainer does not take {', nor '.join(found)}.")
