"""benchmarks/collectives.py: the collectives of a private step do not become more, or larger, on any engine."""

from __future__ import annotations

from benchmarks.collectives import Setting, build, in_two_processes, table

# Calls of a step, and their bytes over those of the same step without privacy: the most that are allowed.
LIMITS = {
    Setting("ddp", "full", 2): (2, 1.51),
    Setting("fsdp2", "full", 2): (20, 1.23),
    Setting("fsdp2", "full", 4, "float32"): (37, 1.01),  # sums are exact in float32: of bfloat16 it is the difference
    Setting("fsdp2", "lora", 2): (19, 1.03),
    Setting("zero1", "full", 2): (2, 1.67),
    Setting("zero2", "full", 2): (5, 1.01),
    Setting("zero2", "lora", 2): (4, 1.01),
    Setting("zero3", "full", 2): (5, 1.01),
    Setting("zero3", "full", 1, "float32"): (4, 1.01),  # no weight is gathered to hand a sum in
    Setting("zero3", "lora", 2): (5, 1.01),
}


def test_no_engine_needs_more_collectives_or_bytes(tmp_path):
    """Each engine stays within its limits; plain DDP sends what the formula says, so the count is right."""
    found = dict(zip(LIMITS, in_two_processes(list(LIMITS), tmp_path), strict=True))
    shown = "\n" + table(list(found), list(found.values()), kinds=True)
    entries = sum(parameter.numel() for parameter in build(Setting("ddp", "full", 2)).parameters())
    plain, _ = found[Setting("ddp", "full", 2)]
    assert plain.sent["all-reduce"] == 2 * (2 * entries) // 2, shown  # f = 1/2 of twice 2 bytes an entry
    for setting, (calls, ratio) in LIMITS.items():
        plain, private = found[setting]
        assert private.calls.total() <= calls, shown
        assert private.sent.total() / plain.sent.total() <= ratio, shown
