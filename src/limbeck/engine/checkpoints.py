"""Checkpoints: safetensors and JSON, written whole or not at all, so that a killed run resumes exactly."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limbeck.engine.sharding import cut_like, gathered
from limbeck.folder import write_file, write_folder


@dataclass
class State:
    """All the loop remembers between two steps, weights and optimiser aside; generators are re-seeded each step."""

    stage: int = 0
    step: int = 0
    judged: int = 0  # the last step whose student was scored
    best: float | None = None
    stale: int = 0  # epochs since the best
    stopped: bool = False  # early
    logged: int = 0  # bytes of metrics.jsonl that belong to the steps done
    seconds: list[float] = field(default_factory=list)  # spent in each stage


class Checkpoints:
    """The checkpoints of one run: the newest state, and the best student of the stage.

    Every process saves and loads, since a sharded model is gathered by all of them; one `writes`.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.best = folder / "best.safetensors"

    def save(self, state: State, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Write the newest state, then drop the older one."""
        target = self.folder / f"{state.stage:03d}-{state.step:08d}"
        tensors = {f"{name}.{k}": v for name, module in modules.items() for k, v in module.state_dict().items()}
        files = {"weights": gathered(tensors, keep=self.writes)}
        if optimizer is not None:
            files["optimizer"] = gathered(optimizer_tensors(optimizer), keep=self.writes)
        if not self.writes:
            return

        def write(place: Path) -> None:
            for name, values in files.items():
                save_file(values, place / f"{name}.safetensors")
            (place / "state.json").write_text(json.dumps(asdict(state)), encoding="utf8")

        write_folder(target, write)
        for older in self._all():
            if older != target:
                shutil.rmtree(older, ignore_errors=True)

    def newest(self) -> "Checkpoint | None":
        """The newest state, if there is one."""
        found = self._all()
        return Checkpoint(found[-1]) if found else None

    def save_best(self, student: nn.Module) -> None:
        """Keep the student as it is now."""
        weights = gathered(student.state_dict(), keep=self.writes)
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.best, lambda place: save_file(weights, place))

    def load_best(self, student: nn.Module) -> None:
        """Bring back the kept student."""
        load_into(student, load_file(self.best))

    def clear(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("[0-9]*-[0-9]*") if path.is_dir())


class Checkpoint:
    """One saved state."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.state = State(**json.loads((place / "state.json").read_text("utf8")))

    def load(self, modules: dict[str, nn.Module]) -> None:
        """Bring back the weights."""
        tensors = load_file(self.place / "weights.safetensors")
        for name, module in modules.items():
            inside = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
            if inside:
                load_into(module, inside)

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring back the optimiser; its parameters must come in the same order."""
        path = self.place / "optimizer.safetensors"
        if not path.exists():
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in load_file(path).items():
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = cut_like(tensor, parameters[int(index)])
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state, flat: `0.exp_avg`, `0.exp_avg_sq`, …"""
    return {f"{i}.{key}": value for i, slot in optimizer.state_dict()["state"].items() for key, value in slot.items()}


def load_into(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a module whole weights, of which a sharded one takes its pieces."""
    own = module.state_dict()
    module.load_state_dict({name: cut_like(value, own.get(name)) for name, value in weights.items()})
