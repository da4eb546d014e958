"""Why figures of a benchmark should not be trusted, and what to do: told from its samples alone.

Figures are doubted if

- the interquartile range is above 15 % of the median, of a setting or of the ceiling;
- there are fewer than 5 rounds, whose quartiles say nothing;
- the threads of the reader got less than 90 % of the cores they asked for. They never wait, so
  what is missing went to other programs, here or beside this virtual machine. An engine's own
  share of the cores is no such test: it waits between ops, the more the smaller the model. So it
  is shown, and doubted only where the reader's is;
- pages came from disk while the engine ran: then it is the disk that was measured;
- all weights fit the processor's caches, or more than the ceiling was reached: then it is not
  memory that bounds the speed.
"""

from export_grok.runtime.bench.result import Bench

__all__ = ["doubts"]

WIDEST = 0.15
FEWEST_ROUNDS = 5
LEAST_BUSY = 0.9
NAMED = 3  # so many of the widest


def doubts(bench: Bench) -> list[str]:
    """Return the reasons, a sentence each with what to do; none if there is nothing to doubt."""
    return [*_unsteady(bench), *_not_alone(bench), *_not_of_memory(bench)]


def _unsteady(bench: Bench) -> list[str]:
    told = []
    rounds = bench.options.rounds
    if rounds < FEWEST_ROUNDS:
        told.append(
            f"too few rounds to tell a spread from: {rounds}; give --rounds {FEWEST_ROUNDS} or "
            "more"
        )
    spreads = {str(each.setting): each.step_seconds.relative for each in bench.measurements}
    spreads["the read ceiling"] = bench.ceiling.relative
    wide = sorted((name for name in spreads if spreads[name] > WIDEST), key=spreads.__getitem__)
    if wide:
        worst = "; ".join(f"{name} by {spreads[name]:.0%}" for name in wide[: -NAMED - 1 : -1])
        told.append(
            f"the middle half of the samples spreads by more than {WIDEST:.0%} of the median in "
            f"{len(wide)} of {len(spreads)}, the widest: {worst}. Close what else runs on this "
            "machine and measure again, with more --rounds, or more --decode-tokens where a round "
            "takes milliseconds"
        )
    return told


def _not_alone(bench: Bench) -> list[str]:
    told = []
    if bench.reader_busy < LEAST_BUSY * bench.threads:
        told.append(
            f"the {bench.threads} threads that read the ceiling got {bench.reader_busy:.2f} cores "
            "of time: something else ran here, or there are fewer cores than --threads. Close it, "
            "or give fewer --threads"
        )
    waited = {
        str(each.setting): pages
        for each in bench.measurements
        if (pages := sum(sample.pages_from_disk for sample in each.samples))
    }
    if waited:
        most = max(waited, key=lambda setting: waited[setting])
        told.append(
            f"{sum(waited.values()):,} pages came from disk while the engine ran, most in {most}: "
            "the weights did not stay in memory. Free some memory, or take it as the speed of the "
            "disk"
        )
    return told


def _not_of_memory(bench: Bench) -> list[str]:
    cache = bench.cache_bytes
    if cache is not None and bench.engine.weight_bytes <= cache:
        return [
            f"all weights ({bench.engine.weight_bytes / 1e6:,.1f} MB) fit the processor's caches "
            f"({cache / 1e6:,.1f} MB): the ceiling is that of a cache, and shares of it say "
            "nothing about larger models"
        ]
    above = [
        f"{each.setting} ({each.share.median:.0%})"
        for each in bench.measurements
        if each.share is not None and each.share.median > 1
    ]
    if above:
        return [
            f"more than the ceiling was reached: {'; '.join(above)}. Some weights came from a "
            "cache, or a batch chose fewer different experts than equally likely choices would: "
            "take the time, not the share"
        ]
    return []
