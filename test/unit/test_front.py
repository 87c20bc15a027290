"""What would end SGLang's scheduler is refused where a request becomes its message to the scheduler."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from granikv_sglang.plugin.front import Front

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


class Request(SimpleNamespace):
    def contains_mm_input(self) -> bool:
        return vars(self).get("image_data") is not None


def tokenized(request, input_ids):
    """Through our hook, with an original that packs the ids as SGLang's does."""

    def original(_manager, _request, _text, ids):
        return SimpleNamespace(input_ids=None if ids is None else array("q", ids))

    return Front().around_tokenized(original, MANAGER, request, "text", input_ids)


@pytest.mark.parametrize("ids", [None, [], [0], [99, 0, 5]])
def test_what_the_model_has_passes(ids):
    made = tokenized(Request(top_logprobs_num=100), ids)
    assert made.input_ids == (None if ids is None else array("q", ids))


@pytest.mark.parametrize(
    ("ids", "named"), [([5, -1], "token id -1"), ([100], "token id 100"), ([3, 2**63], "a token id")]
)
def test_token_ids_the_model_does_not_have_are_refused(ids, named):
    with pytest.raises(ValueError, match=f"{named} is not one of the model's, which are 0 to 99"):
        tokenized(Request(), ids)


def test_placeholders_of_pictures_are_not_tokens():
    assert tokenized(Request(image_data=["x"]), [5, 10**6]).input_ids[1] == 10**6


@pytest.mark.parametrize("top", [-1, 101])
def test_impossible_numbers_of_top_log_probabilities_are_refused(top):
    with pytest.raises(ValueError, match=f"{top} top log-probabilities were asked for; 0 to 100 are possible"):
        tokenized(Request(top_logprobs_num=top), [1])


class Manager(SimpleNamespace):
    """As much of SGLang's tokenizer manager as sends requests."""

    def __init__(self, flag=False):
        super().__init__(server_args=SimpleNamespace(enable_tokenizer_batch_encode=flag), rid_to_state={}, sent=[])

    def _send_batch_request(self, requests):
        self.sent.append([request.rid for request in requests])

    def take(self, front, rids, ids=True):
        """Whether the batch goes the way of one message; its states are made before, as SGLang does."""
        self.rid_to_state.update(dict.fromkeys(rids))
        return front.around_batched(lambda *_: ids, self, len(rids), SimpleNamespace(rid=rids))

    def pack(self, front, rid):
        front.around_send(lambda manager, one: manager.sent.append(one.rid), self, SimpleNamespace(rid=rid))


def test_prompts_of_token_ids_are_sent_16_at_a_time():
    front, manager = Front(), Manager()
    rids = [f"r{i}" for i in range(40)]
    assert not manager.take(front, rids)
    for rid in rids:
        manager.pack(front, rid)
    assert manager.sent == [rids[:16], rids[16:32], rids[32:]]
    manager.pack(front, "alone")
    assert manager.sent[-1] == "alone"


def test_batches_whose_requests_are_packed_in_turns_keep_apart():
    front, manager = Front(), Manager()
    a, b = ([f"{name}{i}" for i in range(17)] for name in "ab")
    assert not manager.take(front, a) and not manager.take(front, b)
    for pair in zip(a, b, strict=True):
        for rid in pair:
            manager.pack(front, rid)
    assert manager.sent == [a[:16], b[:16], a[16:], b[16:]]


def test_small_batches_text_and_the_flag_go_as_sglang_has_it():
    rids = [f"r{i}" for i in range(17)]
    assert Manager().take(Front(), rids[:16])
    assert not Manager().take(Front(), rids, ids=False)
    flagged, front = Manager(flag=True), Front()
    assert flagged.take(front, rids)
    text = Manager()
    assert not text.take(front, rids, ids=False)
    text.pack(front, rids[0])
    assert text.sent == [rids[0]]  # nobody is held


def test_a_batch_that_is_refused_half_way_leaves_nothing_behind():
    front, manager = Front(), Manager()
    bad = [f"bad{i}" for i in range(20)]
    manager.take(front, bad)
    for rid in bad[:5]:
        manager.pack(front, rid)
    manager.rid_to_state.clear()  # as SGLang does when the sixth is refused
    good = [f"good{i}" for i in range(18)]
    manager.take(front, good)
    for rid in good:
        manager.pack(front, rid)
    assert manager.sent == [good[:16], good[16:]]
    assert not front._groups
