"""The pauses between attempts."""

from __future__ import annotations

from hotrow.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_reset_begins_with_the_first_pause() -> None:
    backoff = Backoff(0.1, 10.0)
    backoff.next(), backoff.next()
    backoff.reset()
    assert backoff.next() == 0.1


def test_jitter_only_shortens_a_pause_and_does_not_change_the_next() -> None:
    backoff = Backoff(1.0, 4.0, jitter=0.25)
    pauses = [backoff.next() for _ in range(6)]
    for pause, whole in zip(pauses, [1.0, 2.0, 4.0, 4.0, 4.0, 4.0], strict=True):
        assert 0.75 * whole <= pause <= whole
    assert len(set(pauses)) > 1
