"""Overflow flags are consumed by steps, and void where the gradient was cleared."""

from tests.test_flags import DISCRIMINATOR, GENERATOR, Graph


def test_consuming_all_slots_clears_them() -> None:
    graph = Graph()
    graph.backward(0, 3)
    graph.flags.consume([0, 1, 2, 3])
    assert graph.raised(0, 1, 2, 3) == [False] * 4


def test_consuming_twice_raises_nothing_again() -> None:
    graph = Graph()
    graph.backward(0, 2)
    graph.flags.consume(GENERATOR)
    graph.flags.consume(GENERATOR)
    assert graph.raised(0, 1) == [False, False]


def test_consumed_flags_stay_cleared_while_their_gradient_is_still_there() -> None:
    # The step was skipped and the gradients were not cleared: the new step looks at the gradient itself.
    graph = Graph()
    graph.backward(0)
    graph.flags.consume(GENERATOR)
    graph.backward()
    assert graph.raised(0, 1) == [False, False]


def test_a_flag_counts_after_anothers_step_if_the_gradient_is_still_there() -> None:
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    assert graph.raised(*DISCRIMINATOR) == [True, False]


def test_a_flag_counts_after_anothers_step_if_the_gradient_was_accumulated_into() -> None:
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    graph.backward()
    assert graph.raised(*DISCRIMINATOR) == [True, False]


def test_a_flag_counts_after_several_steps_of_another() -> None:
    graph = Graph()
    graph.backward(2)
    for _ in range(3):
        graph.flags.consume(GENERATOR)
        graph.zero_grad(GENERATOR)
        graph.backward()
    assert graph.raised(*DISCRIMINATOR) == [True, False]


def test_a_flag_does_not_count_after_anothers_step_and_zero_grad() -> None:
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    graph.zero_grad(DISCRIMINATOR)
    graph.backward()
    assert graph.raised(*DISCRIMINATOR) == [False, False]


def test_a_fresh_overflow_counts_where_a_stale_one_does_not() -> None:
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    graph.zero_grad(DISCRIMINATOR)
    graph.backward(3)
    assert graph.raised(*DISCRIMINATOR) == [False, True]


def test_a_stale_flag_stays_stale_through_another_step() -> None:
    # Two steps of the generator, between them zero_grad of the discriminator: the gradient that waits for the
    # discriminator's step is that of the second backward, which was clean.
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    graph.zero_grad(DISCRIMINATOR)
    graph.backward()
    graph.flags.consume(GENERATOR)
    assert graph.raised(*DISCRIMINATOR) == [False, False]


def test_each_parameter_is_cleared_on_its_own() -> None:
    graph = Graph()
    graph.backward(2, 3)
    graph.flags.consume(GENERATOR)
    graph.zero_grad([2])
    graph.backward()
    assert graph.raised(*DISCRIMINATOR) == [False, True]


def test_a_flag_that_outlived_anothers_step_is_consumed_by_its_own() -> None:
    graph = Graph()
    graph.backward(2)
    graph.flags.consume(GENERATOR)
    graph.flags.consume(DISCRIMINATOR)
    assert graph.raised(0, 1, 2, 3) == [False] * 4


def test_two_optimizers_that_step_in_turn_each_see_their_own() -> None:
    graph = Graph()
    for overflowed in (0, 2, 0, 2):
        graph.backward(overflowed)
        assert graph.raised(*GENERATOR) == [overflowed == 0, False]
        graph.flags.consume(GENERATOR)
        assert graph.raised(*DISCRIMINATOR) == [overflowed == 2, False]
        graph.flags.consume(DISCRIMINATOR)
        graph.zero_grad((*GENERATOR, *DISCRIMINATOR))


def test_flags_of_a_bad_batch_whose_gradients_were_thrown_away_are_void() -> None:
    graph = Graph()
    graph.backward(0, 2)
    graph.zero_grad((*GENERATOR, *DISCRIMINATOR))
    graph.backward(1)
    assert graph.raised(0, 1, 2, 3) == [False, True, False, False]


def test_flags_are_void_in_every_graph_once_the_gradient_was_cleared() -> None:
    # The next backward passes through another graph of the same parameters.
    graph = Graph()
    other = graph.flags_of_another_graph()
    graph.backward(2)
    graph.zero_grad(DISCRIMINATOR)
    graph.backward(flags=other)
    assert graph.raised(*DISCRIMINATOR) == [False, False]
    assert other.raised(DISCRIMINATOR).tolist() == [False, False]


def test_a_flag_raised_after_the_gradient_was_cleared_counts_whatever_graph_saw_it_cleared() -> None:
    graph = Graph()
    other = graph.flags_of_another_graph()
    graph.backward()
    graph.zero_grad(DISCRIMINATOR)
    graph.backward(flags=other)
    graph.backward(2)
    assert graph.raised(*DISCRIMINATOR) == [True, False]


def test_a_flag_counts_after_zeroing_in_place_because_the_gradient_is_still_there() -> None:
    graph = Graph()
    graph.backward(2)
    before = graph.parameters[2].grad
    graph.flags.consume(GENERATOR)
    graph.zero_grad(DISCRIMINATOR, set_to_none=False)
    graph.backward()
    assert graph.parameters[2].grad is before
    assert graph.raised(*DISCRIMINATOR) == [True, False]
