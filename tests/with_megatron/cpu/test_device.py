"""What stands in for CUDA and NCCL where Megatron's engine would otherwise stop on CPU."""

from __future__ import annotations

from typing import Any


def gathered(sizes: list[int]) -> tuple[list[float], list[float]]:
    """Megatron's gather of `sizes` rows from the ranks, and back: the sum of what each rank has of a row."""
    import torch
    import torch.distributed as dist
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


def two_instances(overlap: bool) -> list[Any]:
    from with_megatron.tiny_model import build

    tiny = build(instances=2, overlap=overlap)
    return [tiny.step(tiny.random_gradients(step))[0] for step in range(3)]


def test_two_optimizer_instances_overlap_on_a_stream_that_is_entered_twice(pool):
    for mine, theirs in zip(pool.run(two_instances, True), pool.run(two_instances, False), strict=True):
        assert [shard.tolist() for shard in mine] == [shard.tolist() for shard in theirs]
