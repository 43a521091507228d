"""DistributedDataParallel on two ranks, of which the second starts over without the PYTHONPATH it was given."""

import os
import sys


def main():
    if os.environ["RANK"] == "1" and "SILENT" not in os.environ:
        os.environ["SILENT"] = "1"
        os.environ["PYTHONPATH"] = ""
        os.execv(sys.executable, [sys.executable, *sys.argv])

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
