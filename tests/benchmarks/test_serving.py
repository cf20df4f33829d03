"""What the serving question watches, against what the engine did."""

from __future__ import annotations

import pytest
import torch

from benchmarks.capacity import Length
from benchmarks.serving_load import Subject, Watch, greedy, percentile, small
from benchmarks.serving_load import serving as open_serving
from benchmarks.serving_memory import _whole, balanced
from tieredkv.serving import Finish


@pytest.fixture(scope="module")
def subject() -> Subject:
    return small()


def test_logits_go_to_the_request_they_are_of(subject: Subject) -> None:
    """Requests that begin and end at different steps: each one's tokens are the likeliest of its own logits."""
    prompts = subject.prompts([5, 70, 300, 40, 9])
    with open_serving(subject, 2000) as served, Watch(subject.model) as watch:
        handles = [
            watch.follow(served.engine.submit(prompt, greedy(3 + 4 * number))) for number, prompt in enumerate(prompts)
        ]
        served.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        tokens = handle.result(0)
        logits = torch.stack(watch.logits[handle.number])
        assert logits.argmax(-1).tolist() == tokens and len(watch.seconds[handle.number]) == len(tokens)
        with torch.no_grad():
            alone = subject.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert (logits - alone).abs().max() <= 1e-4 * alone.abs().max()
        assert watch.ended[handle.number] >= watch.seconds[handle.number][-1]
    assert not subject.model._forward_hooks


def test_no_two_prompts_share_a_block(subject: Subject) -> None:
    prompts = subject.prompts([200] * 60)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 60
    assert prompts == subject.prompts([200] * 60) != subject.prompts([200] * 60, seed=1)


def test_a_lost_slot_and_blocks_of_requests_are_seen(subject: Subject) -> None:
    with open_serving(subject, 1000, block_size=16) as served:
        handle = served.engine.submit(subject.prompts([40])[0], greedy(3))
        served.engine.step()
        assert served.requests_bytes == 3 * served.slot_bytes
        served.run()
        assert served.requests_bytes == 0 and served.used_bytes > 0  # kept for the next with this prompt
        assert balanced(served)
        slot = served.blocks.hot.slots.allocate()
        assert not balanced(served)
        served.blocks.hot.slots.release(slot)
        assert balanced(served)
    assert handle.finish is Finish.LENGTH
    assert _whole(handle, Length(40, 3)) and not _whole(handle, Length(40, 4))


def test_a_percentile_is_a_value() -> None:
    assert [percentile(list(range(100)), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]
