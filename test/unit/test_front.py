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


@pytest.mark.parametrize("flag", [False, True])
def test_prompts_of_token_ids_are_sent_one_by_one_unless_the_flag_asks_for_batches(flag):
    manager = SimpleNamespace(server_args=SimpleNamespace(enable_tokenizer_batch_encode=flag))
    assert Front().around_batched(lambda *_: True, manager, 2, [[1], [2]]) is flag
