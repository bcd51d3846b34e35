"""The claims about tiles of positions, by the last run of the benchmark."""

from __future__ import annotations

import long_rows
from results_file import last_row


def test_tiles_cost_no_operation_beside_checkpointed_layers_and_little_time() -> None:
    figures = last_row("long_rows")["figures"]
    counted = figures["counted"]
    assert set(counted) == set(long_rows.SET_UPS)
    tiled, checkpointed = (counted[name] for name in ("layers checkpointed, in tiles", "layers checkpointed"))
    assert tiled["flops"] == checkpointed["flops"] < counted["layers checkpointed, usual tiles"]["flops"]
    assert tiled["peak_bytes"] < 0.75 * checkpointed["peak_bytes"]
    for seconds in figures["mlp_seconds"].values():
        # a tile that is computed once more, as usual ones are, costs a third more
        assert all(each < 1.25 * seconds["whole"] for each in seconds.values())


def test_a_set_up_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(long_rows, "TOKENS", 64)
    monkeypatch.setattr(long_rows, "TILE", 16)
    usual, ours, whole = (long_rows.counted("non-reentrant", tiles)["flops"] for tiles in ("usual", "ours", ""))
    assert whole == ours < usual
