from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.data.labels import find_labels, rows_with_known_labels
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows

Make = Callable[..., Any]


def table(length: int) -> list[dict[str, Any]]:
    return [{"question": f"why {i}?", "answer": f"because {i}", "kind": "ab"[i % 2]} for i in range(length)]


def test_labels_come_from_the_configuration_or_the_rows(make_config: Make) -> None:
    rows = open_rows([*table(3), {"question": "", "kind": "never seen"}], folder=Path())
    named = make_config(output_features=[{"name": "kind", "type": "category", "decoder": {"labels": ["b", "c", "a"]}}])
    seen = make_config(output_features=[{"name": "label", "column": "kind", "type": "category"}])

    assert find_labels(named, rows) == {"kind": ("b", "c", "a")}
    assert find_labels(seen, rows) == {"label": ("a", "b")}
    assert find_labels(seen, None) == {"label": ()}
    assert find_labels(make_config(), rows) == {}


def test_configured_labels_are_in_lower_case_if_the_values_are(make_config: Make) -> None:
    decoder = {"labels": ["B", "c", "A", "a"]}
    output = {"name": "kind", "type": "category", "preprocessing": {"lowercase": True}, "decoder": decoder}
    assert find_labels(make_config(output_features=[output]), None) == {"kind": ("b", "c", "a")}


def test_rows_to_evaluate_on_with_an_unknown_label_are_left_out_and_do_not_stop_training(make_config: Make) -> None:
    config = make_config(output_features=[{"name": "label", "column": "kind", "type": "category"}])
    known = open_rows(table(6), folder=Path())
    strange = open_rows([*table(3), {**table(1)[0], "kind": "c"}, {"question": "no kind"}], folder=Path())
    labels = find_labels(config, known)
    ledger = Ledger(None, max_bad_rows=0)

    assert rows_with_known_labels(known, config, labels, ledger=ledger, split="test") is known
    kept = rows_with_known_labels(strange, config, labels, ledger=ledger, split="test")

    assert [row.get("kind") for row in kept.get(range(len(kept)))] == ["a", "b", "a", None]
    assert [kept.key(index) for index in range(4)] == ["dataset:1", "dataset:2", "dataset:3", "dataset:5"]
    assert ledger.split("test").reasons == {"column kind: 'c' is none of the labels a, b": 1}
    ledger.check()


def test_labels_that_look_like_several_are_reported_with_the_separator(
    make_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(output_features=[{"name": "kinds", "type": "set"}])
    rows = [{"question": "why?", "kinds": kinds} for kinds in ("b;a", "c; b", "x,y")]
    assert find_labels(config, open_rows(rows, folder=Path())) == {"kinds": ("b;a", "c; b", "x", "y")}
    assert caplog.messages == ["kinds: if 'b;a' is several labels, write preprocessing: {separator: ';'}"]
    caplog.clear()
    find_labels(config, open_rows([{"question": "why?", "kinds": ["a;b", "c;d", "e"]}], folder=Path()))
    assert caplog.messages == []
