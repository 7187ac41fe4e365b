"""CUDA graphs: work captured once a shape, then replayed without a launch from Python."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class Captures:
    """One graph a key, all in one memory pool. A key's first turn runs eagerly, which warms up; its second is captured.

    Work must read and write buffers that stay where they are, and leave nothing of worth in what it allocates: the next
    graph may use the same memory. Work that cannot be captured runs eagerly from then on, and `refused` says why.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.say = say
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.warm: set[Hashable] = set()
        self.pool = torch.cuda.graph_pool_handle()
        self.held = 0  # bytes of that pool
        self.refused: dict[Hashable, str] = {}

    def run(self, key: Hashable, work: Callable[[], None], seed: int) -> None:
        """Do the work, by the fastest means there is for this key. `seed` is the generator's at its start."""
        if key in self.warm and key not in self.graphs and key not in self.refused:
            self._capture(key, work)
            torch.manual_seed(seed)  # capturing drew from the generator
        if key in self.graphs:
            self.graphs[key].replay()
        else:
            self.warm.add(key)
            work()

    def _capture(self, key: Hashable, work: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with uncollected(), torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
                before = torch.cuda.memory_reserved()
                work()
                grown = torch.cuda.memory_reserved() - before
        except RuntimeError as error:
            first = error.__context__ or error  # ending a capture that has failed fails too
            self.refused[key] = str(first).strip().splitlines()[0]
            self.say(f"a step is not captured and runs eagerly: {self.refused[key]}")
            recover(self.pool)
            self.graphs.clear()  # they know the old state: captured again
            self.pool, self.held = torch.cuda.graph_pool_handle(), 0
        else:
            self.graphs[key] = graph
            self.held += grown

    def describe(self) -> str:
        """How many shapes are captured, and what they and all else hold."""
        graphs, everything = (size / 2**30 for size in (self.held, torch.cuda.memory_reserved()))
        return (
            f"{len(self.graphs)} batch shapes captured as CUDA graphs, which share {graphs:.1f} GiB; "
            f"{everything:.1f} GiB of GPU memory held in all"
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """In here Python collects no garbage: a graph of an earlier stage among it would break the capture as it goes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def recover(pool: Any) -> None:
    """After a capture that failed, the allocator may still record into its pool, and the device's generator still
    believes in it: end the first, and give the second a new state."""
    torch.cuda.synchronize()
    with suppress(RuntimeError):  # it does not
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
