"""CUDA graphs: work captured once a shape, then replayed without a launch from Python."""

from collections.abc import Callable, Hashable

import torch


class Captures:
    """One graph a key, all in one memory pool. A key's first turn runs eagerly, which warms up; its second is captured.

    Work must read and write buffers that stay where they are, and leave nothing of worth in what it allocates: the next
    graph may use the same memory. Work that cannot be captured runs eagerly from then on, and `refused` says why.
    """

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.warm: set[Hashable] = set()
        self.pool = torch.cuda.graph_pool_handle()
        self.refused: str | None = None

    def run(self, key: Hashable, work: Callable[[], None], seed: int) -> None:
        """Do the work, by the fastest means there is for this key. `seed` is the generator's at its start."""
        if key in self.graphs:
            self.graphs[key].replay()
        elif self.refused or key not in self.warm:
            self.warm.add(key)
            work()
        elif self._captured(key, work):
            torch.manual_seed(seed)  # capturing drew from the generator
            self.graphs[key].replay()
        else:
            work()

    def _captured(self, key: Hashable, work: Callable[[], None]) -> bool:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
                work()
        except (RuntimeError, torch.AcceleratorError) as error:
            self.refused = str(error).strip().splitlines()[0]
            torch.cuda.synchronize()
            return False
        self.graphs[key] = graph
        return True

    def describe(self) -> str:
        """How many shapes are captured and what they hold, or why none is."""
        if self.refused:
            return f"steps run eagerly: {self.refused}"
        held = torch.cuda.memory_reserved() / 2**30
        return f"{len(self.graphs)} batch shapes captured as CUDA graphs; {held:.1f} GiB of GPU memory held"
