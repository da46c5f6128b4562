"""What stands in for CUDA and NCCL where Megatron's engine would otherwise stop on CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gathered(sizes: list[int]) -> tuple[list[float], list[float]]:
    """Megatron's gather of `sizes` rows from the ranks, and back: the sum of what each rank has of a row."""
    from megatron.core.tensor_parallel import mappings

    group, rank = dist.group.WORLD, dist.get_rank()
    rows = torch.arange(sizes[rank], dtype=torch.float32) + 100 * rank
    mine = rows.view(-1, 1).expand(-1, 3).clone().requires_grad_()
    everything = mappings.gather_from_sequence_parallel_region(
        mine, tensor_parallel_output_grad=True, group=group, output_split_sizes=sizes
    )
    everything.sum().backward()
    return everything[:, 1].tolist(), mine.grad[:, 2].tolist()


def test_ranks_gather_parts_of_different_sizes_as_expert_tensor_parallelism_does(pool):
    for sizes in ([2, 3, 0, 1], [2, 2, 2, 2]):
        whole = [float(100 * rank + row) for rank, size in enumerate(sizes) for row in range(size)]
        for rank, (everything, gradient) in enumerate(pool.run(gathered, sizes)):
            assert everything == whole
            assert gradient == [4.0] * sizes[rank]
