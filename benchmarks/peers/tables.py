"""The tables of a comparison as Markdown, and why to doubt them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers import Peer
from results import FEWEST_ROUNDS, WIDEST, Results, Row
from storage import bytes_per_token

from export_grok.config import GrokConfig

__all__ = ["OURS", "QUANTITIES", "Comparison"]

OURS = "grok"
# So many cores that others took spoil a round.
OTHERS = 0.1


def _decode(row: Row) -> float:
    ordered = sorted(row["decode_ms"])
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _prefill(count: int) -> Callable[[Row], float]:
    return lambda row: row["prefill_s"][str(count)]


# Times: the smaller, the better.
QUANTITIES: dict[str, Callable[[Row], float]] = {
    "decode": _decode,
    "prefill 128": _prefill(128),
    "prefill 512": _prefill(512),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the results of some peers come to.

    Attributes:
        peers: in the order of the tables; each has results.
    """

    config: GrokConfig
    results: Results
    peers: Sequence[Peer]

    @property
    def rounds(self) -> int:
        """How many there were."""
        return max(len(rows) for rows in self.results.rows.values())

    def tables(self) -> str:
        """Return the tables, and what is doubtful about them."""
        parts = [self._decode_table(), self._prefill_table(), self._other_table()]
        doubts = [f"- {doubt}" for doubt in self.doubts()]
        if doubts:
            parts.append("Doubts:\n\n" + "\n".join(doubts))
        return "\n\n".join(parts)

    def doubts(self) -> list[str]:
        """Return why figures should not be trusted; none if there is nothing to doubt."""
        told = []
        rounds = min(len(self.results.rows[peer.name]) for peer in self.peers)
        if rounds < FEWEST_ROUNDS:
            told.append(
                f"--rounds {rounds} is too few to tell a spread from; give {FEWEST_ROUNDS} or more"
            )
        spreads = {
            f"{quantity} of {peer.name}": self.results.spread(peer.name, value)
            for peer in self.peers
            for quantity, value in QUANTITIES.items()
        }
        wide = [name for name, spread in spreads.items() if spread.is_wide]
        if wide:
            told.append(
                f"the middle half of the rounds spreads by more than {WIDEST:.0%} of the median: "
                + ", ".join(wide)
            )
        others = [row["others"] for row in self.results.all_rows()]
        spoilt = sum(cores > OTHERS for cores in others)
        if spoilt:
            told.append(
                f"other programs took more than {OTHERS} cores in {spoilt} of {len(others)} "
                f"measurements, {max(others):.1f} at the worst: close them"
            )
        return told

    def _decode_table(self) -> str:
        rows = []
        for peer in self.peers:
            nbytes = bytes_per_token(self.config, peer.matrices, peer.head)
            speed = self.results.spread(peer.name, lambda row, n=nbytes: n / _decode(row) / 1e6)
            share = self.results.spread(
                peer.name, lambda row, n=nbytes: n / _decode(row) / 1e6 / row["ceiling_gb_s"]
            )
            rows.append(
                [
                    peer.name,
                    self.results.spread(peer.name, _decode).text(".1f"),
                    self._ratio(peer, "decode"),
                    f"{nbytes / 1e6:.0f}",
                    f"{speed.median:.1f}",
                    f"{share.median:.0%}",
                ]
            )
        head = ["decode", "ms a token", f"times {OURS}", "MB a token", "GB/s", "of the ceiling"]
        return _table(head, rows)

    def _prefill_table(self) -> str:
        rows = []
        for peer in self.peers:
            row = [peer.name]
            for count in (128, 512):
                speed = self.results.spread(peer.name, lambda row, n=count: n / _prefill(n)(row))
                row += [speed.text(".1f"), self._ratio(peer, f"prefill {count}")]
            rows.append(row)
        head = [
            "prefill",
            *["128 tokens: tokens/s", f"times {OURS}"],
            *["512 tokens: tokens/s", f"times {OURS}"],
        ]
        return _table(head, rows)

    def _other_table(self) -> str:
        rows = []
        for peer in self.peers:
            load, private, mapped = (
                self.results.spread(peer.name, lambda row, key=key: row[key]).median
                for key in ("load_s", "private_mb", "mapped_mb")
            )
            *_, last = self.results.rows[peer.name].values()
            prefill, *steps = last["errors"]
            middle = sorted(steps)[len(steps) // 2]
            rows.append(
                [
                    peer.name,
                    f"{load:.1f}",
                    f"{private:,.0f}",
                    f"{mapped:,.0f}",
                    f"{prefill:.1e}",
                    f"{middle:.1e}",
                    f"{max(steps):.1e}",
                ]
            )
        error = "error of logits"
        head = ["", "load s", "private MB", "mapped MB"]
        return _table([*head, f"{error}: prefill", "decode, median", "decode, worst"], rows)

    def _ratio(self, peer: Peer, quantity: str) -> str:
        ratio = self.results.ratio(peer.name, OURS, QUANTITIES[quantity])
        if peer.name == OURS or ratio is None:
            return "1" if peer.name == OURS else ""
        return ratio.text(".2f")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
