"""A policy says what should happen to a region's activations: a frozen value, with a string and a dict form.

    none                            keep everything on the device
    recompute                       keep a region's inputs, run its forward again in backward
    recompute(every=2)              only every second region of a stack
    offload                         keep what autograd saves, but in pinned host memory
    recompute+offload               recompute, with the inputs in pinned host memory
    recompute+offload(host=8GiB)    ... of which at most 8 GiB
    recompute+offload(disk=/scratch)             recompute, with the inputs in a private file in /scratch
    recompute+offload(disk=/scratch, limit=1TB, verify)    ... of at most 1 TB per process, with checksums
    recompute+offload(host=8GiB, disk=/scratch)  host memory first, the disk past 8 GiB
    tile                            run blocks with their attention, MLPs and the loss in tiles of tokens, where a
                                    model takes them
    tile(attention, tokens=8k)      only blocks, with all that is in them
    tile(mlp, tokens=8k)            only MLPs and experts, in tiles of 8192 tokens (or shards=8: in eight tiles)
    tile(loss, loss_tokens=512)     only the loss
    recompute+offload+tile          all of it

Rules tell regions apart by their module name: `"recompute+offload; visual.*: recompute; *.layers.0: none"`. The last
rule that matches a region wins. Words that people know from other libraries are understood; unknown ones are refused.

`policy` has the value itself, `text` and `mapping` read its string and dict forms, and `rules` writes a choice of
policies, region by region, as one policy.
"""

from __future__ import annotations

from lowtide.policy.policy import Policy

__all__ = ["Policy"]
