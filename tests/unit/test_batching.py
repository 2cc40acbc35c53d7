from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from common.domain.tickets import Ticket
from worker.batching import choose_batch


def ticket(job: int, key: str = "a", seq: int = 1) -> Ticket:
    return Ticket(UUID(int=job), seq, "tiny-wan2.2-t2v", key)


hands = st.lists(
    st.builds(ticket, st.integers(0, 8), st.sampled_from("abc"), st.integers(1, 3)),
    max_size=12,
)


@given(hands, st.integers(1, 6))
def test_every_job_in_hand_is_either_run_or_given_back_once(hand: list[Ticket], max_batch: int) -> None:
    choice = choose_batch(hand, max_batch)
    assert sorted(t.job_id for t in choice.batch + choice.rest) == sorted({t.job_id for t in hand})


@given(hands, st.integers(1, 6))
def test_a_batch_shares_one_key_and_fits(hand: list[Ticket], max_batch: int) -> None:
    batch = choose_batch(hand, max_batch).batch
    assert len(batch) <= max_batch
    assert len({t.batch_key for t in batch}) <= 1


@given(hands.filter(bool), st.integers(1, 6))
def test_the_oldest_ticket_is_always_run(hand: list[Ticket], max_batch: int) -> None:
    assert choose_batch(hand, max_batch).batch[0] == hand[0]


@given(hands, st.integers(1, 6))
def test_nothing_that_fits_is_given_back(hand: list[Ticket], max_batch: int) -> None:
    choice = choose_batch(hand, max_batch)
    if len(choice.batch) < max_batch:
        assert all(t.batch_key != choice.batch[0].batch_key for t in choice.rest)


def test_a_doubled_ticket_counts_once_by_its_first_copy() -> None:
    first, second = ticket(1, seq=1), ticket(1, seq=2)
    assert choose_batch([first, ticket(2), second], 4).batch == (first, ticket(2))
