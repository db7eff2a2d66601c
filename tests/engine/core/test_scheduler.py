"""The order in which sequences get tokens, slots and blocks, seen in the steps that come out."""

from __future__ import annotations

from tessera.engine.core.step_batch import StepBatch
from tests.engine.core.steps import Steps, tokens_of


def test_no_work_no_step() -> None:
    assert Steps().scheduler.schedule(now=0.0) is None


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_sampled_once() -> None:
    steps = Steps(budget=16)
    sequence = steps.add("a", 40)
    sampled = []
    for expected in (16, 16, 8, 1, 1):
        step = steps.schedule()
        assert tokens_of(step) == {"a": expected}
        sampled.append(step.batch.num_sampled)
        steps.complete(step)
    assert sampled == [0, 0, 1, 1, 1]
    assert sequence.num_output_tokens == 3


def test_a_prompt_joins_a_step_in_which_others_decode() -> None:
    steps = Steps(budget=16)
    steps.add("a", 3)
    steps.add("b", 4)
    assert steps.step() == {"a": 3, "b": 4}
    steps.add("c", 20)
    step = steps.schedule()
    assert tokens_of(step) == {"a": 1, "b": 1, "c": 14}
    assert [sequence.request_id for sequence in step.sampled] == ["a", "b"]
    assert step.batch.cu_seqlens_q.tolist() == [0, 1, 2, 16]
    assert step.batch.input_ids.tolist() == [1, 1] + [4] * 14
    assert step.batch.positions.tolist() == [3, 4, *range(14)]
    assert step.batch.context_lens.tolist() == [4, 5, 14]
    assert step.batch.logits_indices.tolist() == [0, 1]
    steps.complete(step)
    assert steps.step() == {"a": 1, "b": 1, "c": 6}


def test_a_long_prompt_in_front_leaves_a_token_to_everyone_behind() -> None:
    steps = Steps(budget=8)
    for name in "bcd":
        steps.add(name, 1)
    steps.step()
    steps.add("a", 20, priority=-1)
    assert steps.step() == {"b": 1, "c": 1, "d": 1, "a": 5}
    assert steps.step() == {"a": 5, "b": 1, "c": 1, "d": 1}


def test_slots_are_given_in_order_of_priority_then_arrival() -> None:
    steps = Steps(max_num_seqs=2)
    priorities = {"a": 1, "b": 1, "c": 0, "d": 1}
    sequences = {name: steps.add(name, 2, priority=priority) for name, priority in priorities.items()}
    assert list(steps.step()) == ["c", "a"]
    steps.scheduler.finish(sequences["c"], "stop")
    assert list(steps.step()) == ["a", "b"]
    steps.scheduler.finish(sequences["a"], "stop")
    assert list(steps.step()) == ["b", "d"]


def test_the_last_sequence_gives_up_its_blocks_keeps_its_tokens_and_comes_back_first() -> None:
    steps = Steps(num_blocks=6)
    first = steps.add("first", 8)
    last = steps.add("last", 8)
    for _ in range(5):
        steps.step()
    assert (len(first.block_table), len(last.block_table)) == (3, 3)
    late = steps.add("late", 2)
    while last.is_running:
        step = steps.schedule()
        steps.complete(step)
    assert step.preempted == [last]
    assert step.admitted == []
    assert tokens_of(step) == {"first": 1}
    assert last.block_table == []
    assert last.num_preemptions == 1
    assert list(steps.scheduler.waiting) == [last, late]
    outputs = last.output_token_ids
    assert len(outputs) == 5
    steps.scheduler.finish(first, "stop")
    step = steps.schedule()
    assert tokens_of(step) == {"last": 13, "late": 2}
    assert step.batch.slot_inits[0].output_token_ids == outputs
    assert step.batch.input_ids[:13].tolist() == [3] * 8 + outputs
    assert num_output_tokens(step.batch) == [5, 0]


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    steps = Steps(num_blocks=8, prefix_caching=True)
    first = steps.add("first", 12)
    last = steps.add("last", 11)
    while last.num_preemptions == 0:
        steps.step()
    num_tokens = last.num_tokens
    steps.scheduler.finish(first, "stop")
    num_scheduled = steps.step()["last"]
    assert num_scheduled < num_tokens
    assert last.num_cached_tokens == 0, "what the first schedule spared, not a later one"


def test_a_waiting_sequence_needs_room_for_its_length_and_a_spare_block_for_each_running_one() -> None:
    for num_blocks, admitted in ((9, ["first"]), (10, ["first", "second"])):
        steps = Steps(num_blocks=num_blocks)
        first = steps.add("first", 16)
        steps.step()
        steps.add("second", 16)
        assert list(steps.step()) == admitted
        assert len(first.block_table) == 5


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    steps = Steps(num_blocks=8)
    first = steps.add("first", 16)
    steps.step()
    steps.add("second", 16)
    steps.add("third", 1)
    assert list(steps.step()) == ["first"]
    assert list(steps.step()) == ["first"]
    steps.scheduler.finish(first, "stop")
    assert list(steps.step()) == ["second", "third"]


def test_those_behind_a_head_that_found_no_room_go_on_when_it_is_aborted() -> None:
    steps = Steps(num_blocks=8)
    steps.add("first", 16)
    steps.step()
    second = steps.add("second", 16)
    steps.add("third", 1)
    assert list(steps.step()) == ["first"]
    steps.scheduler.finish(second, "abort")
    assert list(steps.step()) == ["first", "third"]


def test_a_more_urgent_request_goes_before_a_head_that_found_no_room() -> None:
    steps = Steps(num_blocks=8)
    steps.add("first", 16)
    steps.step()
    steps.add("second", 16)
    assert list(steps.step()) == ["first"]
    steps.add("urgent", 1, priority=-1)
    assert list(steps.step()) == ["first", "urgent"]


def test_the_prefix_cache_spares_tokens() -> None:
    steps = Steps(prefix_caching=True)
    first = steps.add("first", 16)
    steps.step()
    second = steps.add("second", 16)
    second.token_ids = first.token_ids[:16]
    step = steps.schedule()
    assert tokens_of(step)["second"] == 4
    assert second.num_cached_tokens == 12
    assert step.batch.positions[-4:].tolist() == [12, 13, 14, 15]


def test_sampling_parameters_follow_their_sequence_through_slots() -> None:
    steps = Steps()
    names = ["a", "b", "c", "d"]
    sequences = {
        name: steps.add(name, 2, temperature=0.5 * index, seed=2**64 - 1 - index, top_k=index, min_tokens=index)
        for index, name in enumerate(names)
    }
    steps.step()
    steps.scheduler.finish(sequences.pop("b"), "stop")
    sequences["e"] = steps.add("e", 2, temperature=1.75, logprobs=3)  # takes the slot of b
    step = steps.schedule()
    rows = step.batch.sampling.rows
    params = [sequence.params for sequence in step.sampled]
    assert [sequence.request_id for sequence in step.sampled] == ["a", "c", "d", "e"]
    assert rows["temperature"].tolist() == [each.temperature for each in params]
    assert rows["seed"].tolist() == [each.seed for each in params]
    assert rows["top_k"].tolist() == [each.top_k for each in params]
    assert rows["min_tokens"].tolist() == [each.min_tokens for each in params]
    assert rows["num_logprobs"].tolist() == [-1, -1, -1, 3]
    assert num_output_tokens(step.batch) == [1, 1, 1, 0]
    assert rows["position"].tolist() == [3, 3, 3, 2]
    assert len(set(rows["slot"].tolist())) == 4


def num_output_tokens(batch: StepBatch) -> list[int]:
    rows = batch.sampling.rows
    return (rows["position"] - rows["num_prompt_tokens"]).tolist()


def flags(batch: StepBatch) -> tuple[bool, bool]:
    return batch.sampling.needs_adjustment, batch.sampling.needs_filter


def test_costly_sampling_is_asked_for_only_where_needed() -> None:
    plain = Steps()
    plain.add("a", 2, temperature=0.0, top_k=5)
    plain.add("b", 2, temperature=1.0)
    assert flags(plain.schedule().batch) == (False, False)
    filtered = Steps()
    filtered.add("a", 2, top_p=0.9)
    assert flags(filtered.schedule().batch) == (False, True)
    penalised = Steps()
    penalised.add("a", 2, presence_penalty=0.5)
    assert flags(penalised.schedule().batch) == (True, False)


def test_end_ids_are_suppressed_only_until_min_tokens() -> None:
    steps = Steps()
    steps.add("a", 2, min_tokens=2)
    needed = []
    for _ in range(3):
        step = steps.schedule()
        needed.append(step.batch.sampling.needs_adjustment)
        if step.batch.slot_inits:
            assert step.batch.slot_inits[0].suppressed_token_ids == (0,)
        steps.complete(step)
    assert needed == [True, True, False]


def test_a_slot_that_is_taken_again_has_none_of_the_old_blocks() -> None:
    steps = Steps(max_num_seqs=2)
    long, other = steps.add("long", 30), steps.add("other", 3)
    steps.step()
    steps.scheduler.finish(other, "stop")
    steps.add("mid", 3)
    steps.scheduler.finish(long, "stop")
    steps.add("next", 30)
    batch = steps.schedule().batch
    assert batch.table_updates is not None
    written = [batch.table_updates.rows.tolist().count(slot) for slot in batch.table_rows.tolist()]
    assert sorted(written) == [1, 8], "exactly the blocks of the two that are in the batch"


def test_only_what_changes_of_a_block_table_is_sent() -> None:
    steps = Steps()
    steps.add("long", 30)
    first = steps.schedule()
    assert first.batch.table_updates is not None
    assert first.batch.table_updates.columns.tolist() == list(range(8))
    steps.complete(first)
    seen = []
    for _ in range(8):
        step = steps.schedule()
        updates = step.batch.table_updates
        seen.append([] if updates is None else updates.columns.tolist())
        steps.complete(step)
    assert seen == [[], [], [8], [], [], [], [9], []]
