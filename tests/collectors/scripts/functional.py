"""Two data-parallel ranks that reduce their gradients with functional collectives, waited for or not."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def main():
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.copy_(functional.all_reduce(parameter.grad, "sum", group))
        optimizer.step()
        functional.wait_tensor(functional.all_gather_single(model.bias.detach(), 0, [0, 1]))
        functional.all_reduce(torch.ones(2), "sum", group)
        functional.all_reduce(torch.ones(2), "sum", group).view(2, 1).add(1)  # waits for a view of the result


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
