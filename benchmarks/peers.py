"""The same distillation step by limbeck and by its peers, side by side in one run.

    python benchmarks/peers.py --data glue/ --lengths mrpc,sst2 --batch 32,8 --results benchmarks/results/peers.json

BERT-base 12 → 6 with random weights, MSE on the tokens of six layers (2, 4, …, 12), KL of the logits at T 2, AdamW.
Peers get bf16 autocast, fused AdamW and dynamic padding by hand, which not all of them offer. Each first has to give
the loss that a few lines of plain torch give on a batch without padding (there, reductions agree). Then all are timed
on the same examples, in turns, and each keeps the better of two turns. A peer that cannot be imported is named, not
timed. `--install FOLDER` has pip put the peers there first; without it they are taken from PYTHONPATH.
"""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from workload import LONGEST, Workload, examples, lengths_of, teacher

from limbeck.data.encoding import Encoded
from limbeck.engine.world import open_world
from limbeck.initialisers import start_student
from limbeck.report.tables import markdown
from limbeck.run import environment

# Without what they depend on, torch above all: these are the parts of it that the step here needs.
PACKAGES = [
    "textbrewer==0.2.1.post1", "torchdistill==1.1.5", "nvidia-modelopt==0.47.0",
    "cloudpickle", "nvidia-ml-py", "omegaconf>=2.4", "pulp<4",
    "requests", "urllib3", "certifi", "idna", "charset-normalizer",
]  # fmt: skip
T = 2.0
PAIRS = [(i, 2 * i) for i in range(1, 7)]
RECIPE = {
    "name": "peers",
    "init": ["layers(first)"],
    "stages": [
        {
            "name": "distil",
            "epochs": 1,
            "clip": 0,
            "objectives": {
                "layers": {"match": "hidden", "map": "uniform", "distance": "mse"},
                "logits": {"logits": f"kl(temperature={T}, scale=T²)"},
            },
        }
    ],
}
Batch = dict[str, Tensor]
TRAINER = "transformers.Trainer"
OURS = {
    "limbeck, eager": {"cached": False, "eager": True},
    "limbeck": {"cached": False},
    "limbeck, cached": {"cached": True},
}


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    soft = F.log_softmax(student / T, -1), F.log_softmax(teacher / T, -1)
    return T**2 * F.kl_div(*soft, reduction="batchmean", log_target=True)


def reference(student: nn.Module, above: nn.Module, batch: Batch) -> float:
    """The loss, in plain torch, in fp32."""
    with torch.no_grad():
        ours, theirs = (m(**batch, output_hidden_states=True) for m in (student, above))
    layers = sum(F.mse_loss(ours.hidden_states[s], theirs.hidden_states[t]) for s, t in PAIRS)
    return float(layers + kl(ours.logits, theirs.logits))


def plain_loop(student: nn.Module, above: nn.Module) -> Callable[[Batch], Tensor]:
    """A loop anybody writes: `output_hidden_states` on both sides."""

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            theirs = above(**batch, output_hidden_states=True)
        ours = student(**batch, output_hidden_states=True)
        layers = [F.mse_loss(ours.hidden_states[s].float(), theirs.hidden_states[t].float()) for s, t in PAIRS]
        return torch.stack(layers).sum() + kl(ours.logits.float(), theirs.logits.float())

    return loss


def textbrewer(student: nn.Module, above: nn.Module) -> Callable[[Batch], Tensor]:
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig

    matches = [{"layer_T": t, "layer_S": s, "feature": "hidden", "loss": "hidden_mse", "weight": 1} for s, t in PAIRS]
    distiller = GeneralDistiller(
        TrainingConfig(device="cuda", output_dir=tempfile.mkdtemp(), log_dir=None),
        DistillationConfig(
            temperature=T, kd_loss_type="ce", kd_loss_weight=T**2, hard_label_weight=0, intermediate_matches=matches
        ),
        above,
        student,
        *[lambda batch, out: {"logits": out.logits, "hidden": out.hidden_states}] * 2,
    )

    def loss(batch: Batch) -> Tensor:
        return distiller.train_on_batch(batch, {"output_hidden_states": True})[0]

    return loss


def modelopt(student: nn.Module, above: nn.Module) -> Callable[[Batch], Tensor]:
    import modelopt.torch.distill as mtd

    criterion = {(f"bert.encoder.layer.{s - 1}", f"bert.encoder.layer.{t - 1}"): nn.MSELoss() for s, t in PAIRS}
    criterion["classifier", "classifier"] = mtd.LogitsDistillationLoss(temperature=T, reduction="batchmean")
    model = mtd.convert(
        student,
        mode=[
            ("kd_loss", {"teacher_model": above, "criterion": criterion, "loss_balancer": mtd.StaticLossBalancer(1.0)})
        ],
    )

    def loss(batch: Batch) -> Tensor:
        model(**batch)
        return torch.stack(list(model.compute_kd_loss(skip_balancer=True).values())).sum()

    return loss


def torchdistill(student: nn.Module, above: nn.Module) -> Callable[[Batch], Tensor]:
    from torchdistill.core.distillation import DistillationBox

    def path(layer: int) -> str:
        return f"bert.encoder.layer.{layer - 1}"

    def side(teacher: bool, layer: int) -> dict:
        return {"is_from_teacher": teacher, "module_path": path(layer), "io": "output"}

    def hooked(layers: list[int], **more) -> dict:
        hooks = {"output": [*map(path, layers), "classifier"]}
        return {"forward_proc": "forward_batch_only_as_kwargs", "forward_hook": hooks, **more}

    mse = {"key": "MSELoss", "kwargs": {}}
    wrapped = [{"input": side(False, s), "target": side(True, t)} for s, t in PAIRS]
    terms: dict = {
        f"layer {i}": {
            "criterion": mse, "criterion_wrapper": {"key": "SimpleLossWrapper", "kwargs": sides}, "weight": 1.0
        }
        for i, sides in enumerate(wrapped)
    }  # fmt: skip
    logits = {f"{who}_module_{key}": value for who in ("student", "teacher")
              for key, value in (("path", "classifier"), ("io", "output"))}  # fmt: skip
    kd = {"key": "KDLoss", "kwargs": {**logits, "temperature": T, "alpha": 0}}  # without labels it leaves out T²
    terms["logits"] = {"criterion": kd, "weight": T**2}
    box = DistillationBox(
        above,
        student,
        {},
        {
            "num_epochs": 1,
            "teacher": hooked([t for _, t in PAIRS], requires_grad=False),
            "student": hooked([s for s, _ in PAIRS]),
            "criterion": {"key": "WeightedSumLoss", "kwargs": {"sub_terms": terms}},
        },
        torch.device("cuda"),
        None,
        False,
        1,
    )
    return lambda batch: box.forward_process(batch)


PEERS = {"plain loop": plain_loop, "TextBrewer": textbrewer, "ModelOpt": modelopt, "torchdistill": torchdistill}


class Peer:
    """A peer in a loop with bf16 autocast, dynamic padding and fused AdamW."""

    def __init__(self, make, model, data: Encoded, batch: int) -> None:
        self.data, self.batch = data, batch
        self.above = copy.deepcopy(model).cuda().eval().requires_grad_(False)
        self.student = start_student(["layers(first)"], model, model, depth=6, labels={}, seed=0).student.cuda()
        self.student.eval()
        self.check(make)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=2e-5, fused=True)

    def check(self, make) -> None:
        """Its loss is the reference's, on examples of one length."""
        batch = self.padded(np.argsort(self.data.lengths, kind="stable")[-1:].repeat(2))
        expected = reference(self.student, self.above, batch)
        if make is textbrewer:  # its soft cross-entropy is the KL plus the teacher's entropy
            soft = F.softmax(self.above(**batch).logits / T, -1)
            expected += float(-(T**2) * (soft * soft.log()).sum(-1).mean())
        self.loss = make(self.student, self.above)
        found = float(self.loss(batch))
        if not math.isclose(found, expected, rel_tol=1e-4):
            raise SystemExit(f"{make.__name__} computes another loss: {found} instead of {expected}")
        self.student.train()
        self.above.eval()

    def padded(self, ids: np.ndarray) -> Batch:
        length = int(self.data.lengths[ids].max())
        kept = ("input_ids", "attention_mask", "token_type_ids")
        return {k: v.cuda(non_blocking=True) for k, v in self.data.batch(ids, length).items() if k in kept}

    def batches(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng(epoch).permutation(len(self.data))
        return order[: len(order) // self.batch * self.batch].reshape(-1, self.batch)

    def run(self, epoch: int) -> int:
        batches = self.batches(epoch)
        for ids in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.loss(self.padded(ids))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return len(batches)


class WithTrainer(Peer):
    """The plain loss in transformers.Trainer: bf16, fused AdamW, dynamic padding in the collator."""

    def run(self, epoch: int) -> int:
        from transformers import Trainer, TrainingArguments

        loss, padded = self.loss, self.padded

        class Distilling(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return loss(inputs)

        batches = self.batches(epoch)
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=self.batch, num_train_epochs=1, bf16=True, report_to=[],
            optim="adamw_torch_fused", save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=0,
            remove_unused_columns=False, dataloader_pin_memory=False, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Distilling(
            self.student, arguments, data_collator=lambda ids: padded(np.array(ids)), train_dataset=batches.ravel()
        )  # fmt: skip
        self.spent = trainer.train().metrics["train_runtime"]  # what it needs to start is not counted
        return len(batches)


def ours(model, data: Encoded, batch: int, accelerator, *, cached: bool, **how: bool) -> Workload:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(RECIPE, file)
        file.flush()
        work = Workload(file.name, model, data, batch, accelerator=accelerator, cached=cached, **how)
    check = {
        k: v.cuda() for k, v in data.batch(np.argsort(data.lengths, kind="stable")[-1:].repeat(2), LONGEST).items()
    }
    length = int(data.lengths.max())
    check = {k: v[:, :length] if v.dim() > 1 else v for k, v in check.items()}
    work.distiller.eval()
    with torch.no_grad(), accelerator.autocast():
        found = float(work.distiller(**check).loss)
    kept = {k: v for k, v in check.items() if k in ("input_ids", "attention_mask", "token_type_ids")}
    expected = reference(work.distiller.student, copy.deepcopy(model).cuda().eval(), kept)
    if not math.isclose(found, expected, rel_tol=3e-2):  # bf16 against fp32
        raise SystemExit(f"limbeck computes another loss: {found} instead of {expected}")
    work.distiller.train()
    return work


def install(folder: Path) -> None:
    """Have pip put the peers into a folder, and Python look there; torchvision is the one made for this torch."""
    minor = int(torch.__version__.split(".")[1]) + 15
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES, f"torchvision==0.{minor}.*"], check=True)
    sys.path.insert(0, str(folder))


def contenders(model, data: Encoded, batch: int, accelerator) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, make in PEERS.items():
        yield name, lambda make=make: Peer(make, model, data, batch)
    yield TRAINER, lambda: WithTrainer(plain_loop, model, data, batch)
    for name, how in OURS.items():
        yield name, lambda how=how: ours(model, data, batch, accelerator, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--lengths", default="mrpc,sst2")
    parser.add_argument("--batch", default="32,8")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="where pip puts the peers")
    parser.add_argument("--results")
    args = parser.parse_args()
    if args.install:
        install(args.install)
    accelerator, model, rows, missing = open_world(), teacher(), [], {}
    for batch in map(int, args.batch.split(",")):
        for lengths in args.lengths.split(","):
            rows += side_by_side(lengths, batch, model, accelerator, missing, args)
            torch.cuda.empty_cache()
            report(rows, missing, args)  # each time: a run that is stopped keeps what it has


def side_by_side(
    lengths: str, batch: int, model, accelerator, missing: dict[str, str], args: argparse.Namespace
) -> list[dict]:
    """Everybody's time on the same batches, in turns."""
    data = examples(lengths_of(lengths, args.data, args.steps * batch))
    ready = {}
    for name, make in contenders(model, data, batch, accelerator):
        try:
            ready[name] = make()
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
            print(f"{name} is not timed: {error}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(4):  # two to warm up and capture, two timed
        for name, contender in ready.items():
            times[name].append(clocked(contender, turn % 2))
    return [
        {"who": name, "lengths": lengths, "batch": batch, "ms": min(found[2:]), "turns": found}
        | {"cache_seconds": getattr(ready[name], "cache_seconds", None)}
        for name, found in times.items()
    ]


def clocked(contender, epoch: int) -> float:
    """Milliseconds a step, over an epoch."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    steps = contender.run(epoch)
    torch.cuda.synchronize()
    spent = getattr(contender, "spent", time.perf_counter() - began)
    return 1000 * spent / steps


def report(rows: list[dict], missing: dict[str, str], args: argparse.Namespace) -> None:
    """A table with every time, and how many times faster limbeck is than the fastest peer."""
    cases = list(dict.fromkeys((row["lengths"], row["batch"]) for row in rows))
    ms: dict[str, dict[tuple, float]] = {}
    for row in rows:
        ms.setdefault(row["who"], {})[row["lengths"], row["batch"]] = row["ms"]
    cells = [[who, *(f"{found[case]:.2f}" if case in found else "–" for case in cases)] for who, found in ms.items()]
    print(markdown(["ms a step", *(f"{length}, batch {batch}" for length, batch in cases)], cells))
    peers = [found for who, found in ms.items() if who not in OURS]
    ratios = {}
    for who, ours in ((who, ms[who]) for who in OURS if who in ms):
        for batch in dict.fromkeys(batch for _, batch in cases):
            alike = [case for case in ours if case[1] == batch and any(case in found for found in peers)]
            if alike:
                times = [min(found[case] for found in peers if case in found) / ours[case] for case in alike]
                ratios[f"{who}, batch {batch}"] = statistics.geometric_mean(times)
    print(markdown(["against the fastest peer", "times faster"], [[k, f"{v:.2f}"] for k, v in ratios.items()]))
    print("not there:", missing)
    if args.results:
        machine = {k: v for k, v in environment().items() if k != "command"}
        result = {"environment": machine, "rows": rows, "ratios": ratios, "missing": missing}
        Path(args.results).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
