"""Each head of the shipped model removed: rows and the sentence that follows from them."""

from minimha.labs import removed


def test_conclusions_follow_their_rows():
    rows = [removed.Row("0.0", "seat", 1.0, 0.95, 0), removed.Row("1.2", "receiver", 0.9, 0.2, 3)]
    assert removed.conclude(rows) == (
        "of the 2 heads of the shipped model 1 can be removed alone without any relation losing "
        "more than 10% of its answers, and without head 1.2 'receiver' falls from 90% to 20%"
    )
    assert removed.conclude(rows[:1]).endswith("more than 10% of its answers")


def test_every_head_of_the_shipped_model_is_removed_in_turn(monkeypatch):
    monkeypatch.setattr(removed, "NUM_QUESTIONS", 3)
    steps = []
    table, _, words = removed.removals(steps.append)
    rows = [removed.Row(*row) for row in table.rows]
    config = removed.world.load().config
    assert len({row.head for row in rows}) == config.num_layers * config.num_heads
    assert steps == list(removed.RELATIONS)
    assert all(row.whole >= removed.LEARNED for row in rows)
    assert all(row.broken == 0 for row in rows if row.relation == "nothing")
    spared = sum(row.broken == 0 for row in rows)
    assert words.startswith(f"of the {len(rows)} heads of the shipped model {spared} can be")
