"""`align=text`: a reference with another tokenizer scores the text of replies, and its logprobs come back to tokens."""

import itertools
import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
from other_tokenizers import byte_level, sentence_piece
from tokenizers import normalizers

from prl.algorithms.alignment import around_reply, encode, end_and_before, spans_of, spelling, spread
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.opd import OPDAlgorithm
from prl.algorithms.reference import KLConfig
from prl.base.errors import ConfigError
from prl.config.model_reference import FrozenModelConfig
from prl.engines.renderer import make_renderer
from prl.models import model_path
from prl.rollouts.logprobs import SENTINEL_CEILING

TEXTS = [
    "hello, world",
    " the sum  of 12",
    "naïve 日本語 🙂🙂!",
    "a\n\nb",
    "\n the",
    "<think>4</think>\n\n4",
    "\ufffdx",
    "",
    "é",
]


def pieces(*texts):
    """The spelling of tokens with these texts."""
    return "".join(texts), [(end, 0) for end in itertools.accumulate(map(len, texts))]


def ranges(spans):
    return [(ours.start, ours.stop, theirs.start, theirs.stop) for ours, theirs in spans]


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["ab", "c"], ["a", "bc"], [(0, 2, 0, 2)]),
        (["ab", "c"], ["ab", "c"], [(0, 1, 0, 1), (1, 2, 1, 2)]),
        (["a", "b", "cd"], ["ab", "c", "d"], [(0, 2, 0, 1), (2, 3, 1, 3)]),
        ([], [], []),
        (["ab", "c", "de"], ["ab", "C", "de"], [(0, 1, 0, 1), (1, 3, 1, 3)]),  # a text that was normalised
        (["  "], [], []),  # a text that was normalised away
    ],
)
def test_spans_by_hand(ours, theirs, expected):
    assert ranges(spans_of(pieces(*ours), pieces(*theirs))) == expected
    moved = [(a + 5, b + 5, c + 7, d + 7) for a, b, c, d in expected]
    assert ranges(spans_of(pieces(*ours), pieces(*theirs), 5, 7)) == moved


def test_a_span_is_shared_equally_and_one_token_has_all_of_it():
    assert spread([-1.0, -2.0], -6.0) == [-2.5, -3.5]  # the difference -3, half of it each
    assert spread([-0.1], -0.3) == [-0.3]


def test_spans_are_the_shortest_and_sums_are_kept():
    """Against all pairs of cuts of random segmentations of one text."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab ") for _ in range(draw.randint(1, 14)))
        cuts = [sorted({0, len(text), *draw.sample(range(len(text) + 1), draw.randint(0, len(text)))}) for _ in "ab"]
        ours, theirs = ([text[a:b] for a, b in itertools.pairwise(cut)] for cut in cuts)
        spans = spans_of(pieces(*ours), pieces(*theirs))
        assert ["".join(ours[a]) for a, _ in spans] == ["".join(theirs[b]) for _, b in spans]
        common = sorted(set(cuts[0]) & set(cuts[1]))
        assert ["".join(ours[a]) for a, _ in spans] == [text[a:b] for a, b in itertools.pairwise(common)]
        own, teacher = ([draw.uniform(-9, 0) for _ in part] for part in (ours, theirs))
        stamped = [value for a, b in spans for value in spread(own[a], math.fsum(teacher[b]))]
        assert len(stamped) == len(own) and math.isclose(sum(stamped), sum(teacher))


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    return {"tiny": tokenizer, "byte-level": byte_level(), "sentencepiece": sentence_piece()}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("one", "other"), itertools.product(["tiny", "byte-level", "sentencepiece"], repeat=2))
def test_tokens_of_a_span_have_the_same_text(tokenizers, one, other, text):
    ours, theirs = tokenizers[one], tokenizers[other]
    our_ids, their_ids = encode(ours, text), encode(theirs, text)
    spans = spans_of(spelling(ours, our_ids), spelling(theirs, their_ids))
    ends = [(our_ids[: a.stop], their_ids[: b.stop]) for a, b in spans]
    assert [ours.decode(a) for a, _ in ends] == [theirs.decode(b) for _, b in ends]
    assert not ends or ends[-1] == (our_ids, their_ids)
    if one == other:
        assert ranges(spans) == [(i, i + 1, i, i + 1) for i in range(len(our_ids))], "within characters, too"


@pytest.mark.parametrize("one", ["tiny", "sentencepiece"])
def test_random_tokens_have_spans_to_the_end_of_their_text(tokenizers, one):
    """What a policy samples is no tokenizer's choice, may break characters off and have bytes that are no UTF-8."""
    draw = random.Random(0)
    ours, theirs = tokenizers[one], tokenizers["byte-level"]
    for _ in range(300):
        our_ids = [draw.randrange(len(ours) - 1) for _ in range(draw.randint(1, 8))]
        text, borders = spelling(ours, our_ids)
        if one == "tiny":  # a byte of ours that is no UTF-8 takes those before it along
            assert ours.decode(our_ids).startswith(text)
        their_ids = encode(theirs, text)
        spans = spans_of((text, borders), spelling(theirs, their_ids))
        assert (spans[-1][1].stop if spans else 0) == len(their_ids)
        assert all(a.start == b.stop for (b, _), (a, _) in itertools.pairwise(spans))


def test_a_character_that_is_not_complete_has_no_counterpart(tokenizer):
    whole = encode(tokenizer, "4é")
    assert spelling(tokenizer, whole[:-1])[0] == "4"
    assert ranges(spans_of(spelling(tokenizer, whole[:-1]), pieces("4"))) == [(0, 1, 0, 1)]


def test_behind_another_spelling_the_rest_is_one_span(tokenizer):
    composing = byte_level(normalizer=normalizers.NFC())
    our_ids, their_ids = encode(tokenizer, "4e\u0301!"), encode(composing, "4e\u0301!")
    assert composing.decode(their_ids) == "4\u00e9!"
    spans = spans_of(spelling(tokenizer, our_ids), spelling(composing, their_ids))
    assert ranges(spans) == [(0, 1, 0, 1), (1, len(our_ids), 1, len(their_ids))]


@pytest.mark.parametrize(
    ("make", "end", "first"),
    [
        (byte_level, ["<|im_end|>"], "the"),
        (sentence_piece, ["</s>"], "▁the"),  # the template writes a blank behind [/INST]
        (partial(sentence_piece, "chatml"), [], "t"),  # none behind a line's end; it has "the" behind a blank alone
    ],
)
def test_a_reply_is_encoded_as_the_template_has_it(make, end, first):
    made = make()
    renderer = make_renderer(made)
    ends, before = end_and_before(around_reply(renderer)[1], renderer.get_stop_token_ids(), made)
    assert made.convert_ids_to_tokens(ends) == end
    assert made.convert_ids_to_tokens(encode(made, "the sum", before))[0] == first


# --- rollouts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def aligned(frozen, attached):
    """An algorithm whose teacher has the tokenizer in `folder`."""

    def make(folder, align="text"):
        teacher = FrozenModelConfig(name="big", base_url="http://a/v1", tokenizer=str(folder))
        return attached(OPDAlgorithm(teacher=teacher, align=align))

    return make


@pytest.fixture
def talked(new_talk, user):
    """A rollout of two turns."""

    def make(**options):
        talk = new_talk()
        talk.turn([*talk.turn([user("2+2=")], "the sum 4é", **options), user("the other")], "hello", **options)
        return talk.rollout()

    return make


async def test_with_the_policys_tokenizer_it_is_as_without(frozen, aligned, talked, play):
    (plain,) = await play(aligned(model_path("tiny"), align=None), [talked()])
    algorithm = aligned(model_path("tiny"))
    (by_text,) = await play(algorithm, [talked()])
    (before,), (after,) = plain.samples, by_text.samples
    assert after.ref_logprobs == [x if on else 0.0 for x, on in zip(before.ref_logprobs, before.mask, strict=True)]
    assert after.ref_kl_weights == before.ref_kl_weights and frozen[-1].asked == [before.token_ids]
    assert algorithm.take_logged() == {"spans_of_one": [1.0]}


async def test_another_tokenizer_scores_the_replies_in_its_own_template(frozen, aligned, talked, play, tmp_path):
    """Each reply's logprobs add up to the teacher's, which saw the conversation as it would write it."""
    theirs = byte_level()
    theirs.save_pretrained(tmp_path)
    algorithm = aligned(tmp_path)
    (rollout,) = await play(algorithm, [talked()])
    (sample,), teacher = rollout.samples, frozen[-1]
    first = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    second = "<|im_end|>\n<|im_start|>user\nthe other<|im_end|>\n<|im_start|>assistant\n"
    parts = [encode(theirs, part) for part in (first, "the sum 4é", second, "hello", "<|im_end|>")]
    assert teacher.asked == [[*itertools.chain.from_iterable(parts)]], "the second conversation begins with the first"
    values = teacher.logprobs(teacher.asked[0])
    ends = list(itertools.accumulate(map(len, parts)))
    (one, two), reference = [turn.tokens for turn in rollout.turns], sample.ref_logprobs
    assert math.isclose(sum(reference[one]), sum(values[ends[0] : ends[1] + 1]))
    assert math.isclose(sum(reference[two]), sum(values[ends[2] :]))
    assert reference[one.stop - 1] == values[ends[1]] and reference[two.stop - 1] == values[-1], "the ends of turns"
    assert not any(x for x, on in zip(reference, sample.mask, strict=True) if not on)
    assert teacher.probes[-1].token_ids == encode(theirs, teacher.probes[-1].text), "its endpoint has that tokenizer"
    # Ours are t h e Ġ s u m Ġ 4 Ã © <|im_end|> and h e l l o <|im_end|>: a blank, 4 and the ends are theirs, too.
    assert theirs.convert_ids_to_tokens(parts[1]) == ["the", "Ġsum", "Ġ", "4", "Ã©"]
    assert theirs.convert_ids_to_tokens(parts[3]) == ["he", "llo"]
    assert algorithm.take_logged() == {"spans_of_one": [4 / 18]}


async def test_a_token_without_a_counterpart_has_the_policys_logprob(aligned, talked, play, tmp_path):
    sentence_piece("chatml").save_pretrained(tmp_path)  # its template ends turns with text
    algorithm = aligned(tmp_path)
    (rollout,) = await play(algorithm, [talked()])
    (sample,) = rollout.samples
    for turn in rollout.turns:
        assert sample.ref_logprobs[turn.tokens.stop - 1] == sample.logprobs[turn.tokens.stop - 1]


async def test_a_span_that_the_sampler_did_not_measure_pulls_nothing(aligned, talked, play, tmp_path):
    byte_level().save_pretrained(tmp_path)
    algorithm = aligned(tmp_path)
    rollout = talked()
    (sample,) = rollout.samples
    the = rollout.turns[0].tokens.start
    sample.logprobs[the + 1] = SENTINEL_CEILING - 1
    await play(algorithm, [rollout])
    assert sample.ref_logprobs[the : the + 3] == [sample.logprobs[the], 0.0, sample.logprobs[the + 2]]


async def test_a_conversation_that_the_template_refuses_costs_that_rollout(
    frozen, aligned, new_talk, user, play, tmp_path
):
    sentence_piece().save_pretrained(tmp_path)  # user and assistant take turns
    algorithm = aligned(tmp_path)
    talk = new_talk()
    talk.turn([user("one"), user("two")], "4")
    (rollout,) = await play(algorithm, [talk.rollout()])
    assert rollout.error_kind == "reference" and "take turns" in rollout.error and frozen[-1].asked == []


async def test_kl_takes_a_reference_of_another_tokenizer(frozen, attached, talked, tmp_path):
    byte_level().save_pretrained(tmp_path)
    reference = FrozenModelConfig(name=str(tmp_path), base_url="http://a/v1")  # its name says where the tokenizer is
    algorithm = attached(GRPOAlgorithm(kl=KLConfig(coef=0.5, reference=reference, align="text")))
    await algorithm.start()
    rollout = talked()
    await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group([rollout])
    (sample,) = rollout.samples
    end = rollout.turns[1].tokens.stop - 1
    assert sample.ref_kl_weights == [0.5 * trains for trains in sample.mask]
    assert sample.ref_logprobs[end] == frozen[-1].logprobs(frozen[-1].asked[0])[-1]


async def test_a_tokenizer_that_does_not_say_what_its_tokens_are_is_refused(aligned, attached):
    algorithm = aligned(model_path("tiny"))
    attached(algorithm, renderer=SimpleNamespace(_tokenizer=object(), get_stop_token_ids=list))
    with pytest.raises(ConfigError, match=r"^algo\.align=text: .*tokenizer\.json"):
        await algorithm.start()


async def test_a_tokenizer_that_is_not_there_is_refused(aligned, tmp_path):
    with pytest.raises(ConfigError, match=r"'big': tokenizer='.*nothing': no tokenizer here"):
        await aligned(tmp_path / "nothing").start()


async def test_letters_of_a_marker_end_no_turn(aligned, talked, play, tmp_path):
    theirs = byte_level()
    theirs.save_pretrained(tmp_path)
    algorithm = aligned(tmp_path)
    (rollout,) = await play(algorithm, [talked()])
    scorer = algorithm.teacher_scorer
    reply = [token_id for letter in "4<|im_end|>" for token_id in encode(scorer.ours, letter)]
    token_ids, spans = scorer.align(rollout.sample_branches[0].nodes[:1], reply, 0)
    spelled = token_ids[spans[0][1].start :]
    assert theirs.decode(spelled) == "4<|im_end|>" and not set(spelled) & set(theirs.all_special_ids)


async def test_a_template_that_begins_thoughts_is_refused_beside_one_that_does_not(aligned, talked, play, tmp_path):
    thinks = byte_level()
    mark = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    thinks.chat_template = thinks.chat_template.rstrip() + mark
    thinks.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="begins replies with '<think>', the policy's with ''"):
        await play(aligned(tmp_path), [talked()])
