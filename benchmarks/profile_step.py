"""Where a step's time goes on the GPU: kernels by total time, how many there are, and the gaps between them.

python benchmarks/profile_step.py --recipe kd --length 64 --batch 32 --cached
"""

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile
from workload import Workload, examples, lengths_of, teacher

from limbeck.engine.world import open_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="kd")
    parser.add_argument("--length", default="64")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--cached", action="store_true", help="the teacher's answers are looked up")
    args = parser.parse_args()
    data = examples(lengths_of(args.length, None, args.steps * args.batch))
    work = Workload(args.recipe, teacher(), data, args.batch, accelerator=open_world(), cached=args.cached)
    for _ in range(2):
        work.run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    work.run()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / args.steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work.run()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in kernels) / args.steps / 1000
    count = sum(e.count for e in kernels) / args.steps
    waits = [e for e in profiler.key_averages() if "ynchronize" in e.key or e.key == "aten::item"]
    print(f"{args.recipe}: {1000 * wall:.2f} ms a step; {busy:.2f} ms in {count:.0f} kernels; waits: "
          + (", ".join(f"{e.key} × {e.count}" for e in waits) or "none"))  # fmt: skip
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[: args.rows]:
        share = event.self_device_time_total / args.steps
        print(f"{share:8.1f} us  {event.count / args.steps:6.1f} ×  {event.key[:110]}")


if __name__ == "__main__":
    main()
