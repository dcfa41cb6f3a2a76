"""Who computes what: answers first, prompts in pieces, and who gives way."""

from openwafer.serve.block_pool import BlockPool
from openwafer.serve.core import Request, Sampling
from openwafer.serve.scheduler import Scheduler, Work
from openwafer.serve.sequence import Sequence


def sequence(order: int, num_tokens: int) -> Sequence:
    prompt = tuple(range(100 * order, 100 * order + num_tokens))
    request = Request(id=str(order), prompt=prompt, sampling=Sampling(max_tokens=99))
    return Sequence(request=request, on_event=lambda event: None, seed=0, submitted_s=0.0, order=order)


def scheduler(num_blocks: int = 20, max_running: int = 4, max_step_tokens: int = 10) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, 4), max_running=max_running, max_step_tokens=max_step_tokens)


def shown(works: list[Work]) -> list[tuple[int, int, int]]:
    return [(work.sequence.order, work.start, work.stop) for work in works]


def done(plan: Scheduler, works: list[Work]) -> None:
    """As the engine does: what was computed counts, and a finished prompt draws a token."""
    for work in works:
        work.sequence.num_computed = work.stop
        plan.pool.publish(work.sequence)
        if work.draws:
            work.sequence.tokens.append(7)


def test_prompts_fill_what_answers_leave_free() -> None:
    plan = scheduler()
    plan.waiting.push(sequence(1, 3))
    plan.waiting.push(sequence(2, 25))
    works = plan.plan()
    assert shown(works) == [(1, 0, 3), (2, 0, 7)]
    done(plan, works)
    works = plan.plan()
    assert shown(works) == [(1, 3, 4), (2, 7, 16)]
    done(plan, works)
    works = plan.plan()
    assert shown(works) == [(1, 4, 5), (2, 16, 25)]
    assert works[1].draws
    done(plan, works)
    assert shown(plan.plan()) == [(1, 5, 6), (2, 25, 26)]


def test_guesses_are_computed_with_the_last_token_and_cut_to_fit() -> None:
    plan = scheduler(max_step_tokens=6)
    one = sequence(1, 4)
    plan.waiting.push(one)
    done(plan, plan.plan())
    one.drafts = [1, 2, 3, 4, 5, 6, 7, 8]
    assert shown(plan.plan()) == [(1, 4, 10)]
    assert one.drafts == [1, 2, 3, 4, 5]


def test_no_more_than_may_run_are_let_in() -> None:
    plan = scheduler(max_running=2)
    for order in (1, 2, 3):
        plan.waiting.push(sequence(order, 2))
    assert len(plan.plan()) == 2
    assert (len(plan.running), len(plan.waiting)) == (2, 1)
    plan.finish(plan.running[0])
    plan.plan()
    assert [s.order for s in plan.running] == [2, 3]


def test_one_whose_prompt_has_no_room_waits() -> None:
    plan = scheduler(num_blocks=5)
    plan.waiting.push(sequence(1, 11))
    plan.waiting.push(sequence(2, 9))
    plan.plan()
    assert [s.order for s in plan.running] == [1]
    assert plan.pool.num_free == 2


def test_the_last_that_came_gives_way_and_comes_back_first() -> None:
    plan = scheduler(num_blocks=4, max_step_tokens=20)
    first, second = sequence(1, 7), sequence(2, 7)
    plan.waiting.push(first)
    plan.waiting.push(second)
    works = plan.plan()
    assert len(works) == 2
    done(plan, works)
    done(plan, plan.plan())  # both fill their second block
    plan.waiting.push(sequence(3, 1))
    works = plan.plan()
    assert shown(works) == [(1, 8, 9)]
    assert plan.num_preemptions == 1
    assert plan.waiting.peek() is second
    assert (second.blocks, second.num_computed, len(second.tokens)) == ([], 0, 9)
    plan.finish(first)
    assert plan.pool.num_free == 4
    # Of what it had computed, the end was needed for the other's third block; the beginning is found again.
    assert (2, 4, 9) in shown(plan.plan())
