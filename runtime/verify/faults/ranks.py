"""Mistakes that only ranks can make: whose part a rank holds, and what is left out of a sum."""

from export_grok.runtime.verify.faults.fault import Fault, RankPart

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        name="wrong_slice",
        title="rank 1 holds rank 0's part of attention.value",
        graph="layer",
        shows="v_out",
        mistake=None,
        plant=None,
        of_ranks=RankPart(
            tensors=("attention.value.weight", "attention.value.scales"),
            content=lambda own, first: first,
        ),
    ),
    Fault(
        name="sum_left_out",
        title="the sum behind attention leaves rank 1 out",
        graph="layer",
        shows="attention",
        mistake=None,
        plant=None,
        of_ranks=RankPart(
            tensors=("attention.out.scales",), content=lambda own, first: bytes(len(own))
        ),
    ),
)
