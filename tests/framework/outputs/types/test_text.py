import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from partita.outputs.registry import output_type
from partita.outputs.types.text import ROUGE, TextMetrics
from partita_schema.sections.outputs.text import TextOutput

KINDS = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
"""ROUGE metrics and their names in the library."""
SCORER = RougeScorer(list(KINDS.values()))


def rouge(truth: str, answer: str) -> dict[str, float]:
    metrics = TextMetrics()
    metrics.add(truth, answer, valid=True)
    return {name: metrics.results(1)[name] for name in ROUGE}


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        ("\u0915\u0940", "\u0915\u093f", 0),  # two Hindi syllables, with vowel signs of the category Mc
        ("\u0bae\u0bca\u0bb4\u0bbf", "\u0bae\u0bca\u0bb4", 0),
        ("\u0915\u0940 \u0939\u093f\u0902\u0926\u0940", "\u0939\u093f\u0902\u0926\u0940", 2 / 3),
        ("caf\u00e9", "cafe\u0301", 1),
        ("\u2764\ufe0f ok", "ok", 1),
    ],
)
def test_marks_belong_to_their_word_in_rouge(truth: str, answer: str, score: float) -> None:
    assert rouge(truth, answer)["rouge_1"] == pytest.approx(score)


@given(*[st.text(alphabet=st.sampled_from("abAB01 ._-'\n"), max_size=20)] * 2)
def test_rouge_of_ascii_equals_the_library(truth: str, answer: str) -> None:
    scores = SCORER.score(truth.strip(), answer)
    assert rouge(truth, answer) == {name: scores[kind].fmeasure for name, kind in KINDS.items()}


def test_text_without_spaces_is_compared_in_whole_phrases() -> None:
    assert rouge("\u6211\u559c\u6b22\u82f9\u679c\u3002\u597d", "\u6211\u559c\u6b22\u68a8\u3002\u597d")["rouge_1"] == 0.5


def test_several_correct_answers_are_the_references_of_sacrebleu_and_the_best_rouge() -> None:
    rows = [
        ("the cat sat on the mat", ("a dog ran far away", "the cat sat on a mat")),
        ("a big dog ran", ("a big dog ran off today", "the dog ran")),
        ("yes", ("no", "yes")),
    ]
    metrics = TextMetrics()
    rights = [metrics.add_any(truths, answer, closest=0, valid=True) for answer, truths in rows]

    results = metrics.results(3)
    assert (rights, results["exact_match"]) == ([False, False, True], 1 / 3)
    for name, kind in KINDS.items():
        best = [max(SCORER.score(truth, answer)[kind].fmeasure for truth in truths) for answer, truths in rows]
        assert results[name] == pytest.approx(sum(best) / 3)
    references = [list(column) for column in zip(*(truths for _, truths in rows), strict=True)]
    wanted = sacrebleu.corpus_bleu([answer for answer, _ in rows], references, use_effective_order=True).score
    assert results["bleu"] == pytest.approx(wanted)


def test_an_answer_is_shown_beside_the_correct_one_that_it_equals_or_is_most_similar_to() -> None:
    output = output_type(TextOutput(name="reply", type="text"))
    assert output.closest(["a b c d", "a b"], " a b\n") == 1
    assert output.closest(["x", "a b c d", "a b y z"], "a b c") == 1
    assert output.closest(["x", "y"], "z") == 0
