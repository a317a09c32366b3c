import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.types.entities import Entity, entities, tag_words


def spans(tags: str) -> list[tuple[str, int, int]]:
    """Return type, first and last word of the entities in tags with spaces between."""
    return [(entity.type, entity.start, entity.end - 1) for entity in entities(tags.split())]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),  # IOB2
        ("I-PER I-PER B-PER O", [("PER", 0, 1), ("PER", 2, 2)]),  # IOB1
        ("B-PER I-PER E-PER S-LOC S-LOC", [("PER", 0, 2), ("LOC", 3, 3), ("LOC", 4, 4)]),  # IOBES
        ("I-PER E-PER E-PER I-PER", [("PER", 0, 1), ("PER", 2, 2), ("PER", 3, 3)]),  # IOE
        ("O I-PER O", [("PER", 1, 1)]),
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),
        ("B-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)]),
        ("B-A-B I-A-B", [("A-B", 0, 1)]),
        ("B I O S E", [("_", 0, 1), ("_", 3, 3), ("_", 4, 4)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_are_read_as_seqeval_reads_them(tags: str, expected: list[tuple[str, int, int]]) -> None:
    """The expected values are those of seqeval 1.2.2, `get_entities`."""
    assert spans(tags) == expected


def test_units_and_last_words_of_bilou_are_those_of_iobes() -> None:
    assert spans("B-PER I-PER L-PER U-LOC") == spans("B-PER I-PER E-PER S-LOC")


def test_tags_of_other_schemes_are_entities_of_one_word() -> None:
    assert spans("DET NOUN NOUN") == [("DET", 0, 0), ("NOUN", 1, 1), ("NOUN", 2, 2)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(["A", "B"]))))
def test_entities_are_read_back_from_the_tags_written_for_them(parts: list[tuple[int, int, str]]) -> None:
    written, position = [], 0
    for gap, length, type_ in parts:
        written.append(Entity(position + gap, position + gap + length, type_))
        position += gap + length
    tags = tag_words(written, position + 1)
    assert len(tags) == position + 1
    assert entities(tags) == written
