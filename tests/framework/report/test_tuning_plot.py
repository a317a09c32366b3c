import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lxml import etree
from PIL import Image

from partita.report.batch_sizes import memory_points
from partita.report.tuning_plot import check_plot, predicted_line, write_plot
from partita_schema.errors import DataError, PartitaError, WriteError
from partita_trainers.batch_size.probe import BatchSize

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def sizes(generation: BatchSize, training: BatchSize, evaluation: BatchSize) -> dict[str, BatchSize]:
    """Return a measured size for each purpose."""
    return {"generation": generation, "training": training, "evaluation": evaluation}


def words(file: Path) -> set[str]:
    """Return all texts of an SVG."""
    return {"".join(element.itertext()).strip() for element in etree.parse(file).iter(f"{SVG}text")}


class Page(HTMLParser):
    """Parse tags, cells by table, and ids of a page; check that tags are closed in order."""

    VOID = {"meta", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.sentences: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
        if self.open and self.open[-1] == "p":
            self.sentences.append(data)


def test_a_png_has_a_row_of_panels_for_each_measured_size(
    sizes: Mapping[str, BatchSize], generation: BatchSize, written: BatchSize, tmp_path: Path
) -> None:
    write_plot(tmp_path / "new" / "all.PNG", sizes, title="Batch sizes")
    write_plot(tmp_path / "one.png", {"generation": generation, "training": written}, title="Batch sizes")
    heights = []
    for file in (tmp_path / "new" / "all.PNG", tmp_path / "one.png"):
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert image.width == 1500
            assert len(set(image.convert("RGB").resize((150, 150)).get_flattened_data())) > 20
            heights.append(image.height)
    assert heights == [1635, 585]


def test_an_svg_names_budget_marks_and_verdicts(sizes: Mapping[str, BatchSize], tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.svg", sizes, title="Batch sizes of run.yaml")
    result = words(tmp_path / "plot.svg")
    assert {"Batch sizes of run.yaml", "generation: memory taken", "training: rows a second"} <= result
    assert {"budget 1.20 GB", "budget 140 GB", "best 24", "fits 148", "best and fits 120", "best and fits 64"} <= result
    assert {"too large", "out of memory", "predicted", "fits"} <= result
    assert "evaluation: memory taken of 40.0 GB" in result
    assert "budget 40.0 GB" not in result


def test_the_legend_explains_only_signs_in_the_plot(
    evaluation: BatchSize, generation: BatchSize, tmp_path: Path
) -> None:
    write_plot(tmp_path / "plot.svg", {"evaluation": evaluation}, title="")
    assert words(tmp_path / "plot.svg").isdisjoint({"too large", "out of memory", "predicted"})
    without = replace(generation, probes=())
    write_plot(tmp_path / "paces.svg", {"generation": without}, title="")
    assert "predicted for the data" in words(tmp_path / "paces.svg")
    assert words(tmp_path / "paces.svg").isdisjoint({"too large", "out of memory", "predicted"})


@pytest.mark.long
def test_equal_sizes_give_equal_files(sizes: Mapping[str, BatchSize], tmp_path: Path) -> None:
    for ending in ("svg", "html"):
        for name in ("one", "two"):
            write_plot(tmp_path / f"{name}.{ending}", sizes, title="Batch sizes")
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()


def test_a_page_has_all_numbers_no_external_files_and_unique_ids(
    sizes: Mapping[str, BatchSize], tmp_path: Path
) -> None:
    write_plot(tmp_path / "plot.html", sizes, title="Batch sizes of <a> & b.yaml")
    text = (tmp_path / "plot.html").read_text(encoding="utf8")
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 3
    assert page.tags.count("section") == 3
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert len(page.ids) == len(set(page.ids)) > 100
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert {"152", "1.23 GB", "0.458", "0.0203", "235", "too large", "139 GB", "out of memory"} <= set(page.cells)
    assert page.sentences[2].startswith("evaluation: 64 rows (fits 64, best 64), cached and checked again")
    assert "Batch sizes of &lt;a&gt; &amp; b.yaml" in text


def test_the_plots_of_a_page_use_its_text_and_background_colours(
    sizes: Mapping[str, BatchSize], tmp_path: Path
) -> None:
    write_plot(tmp_path / "plot.html", sizes, title="Batch sizes")
    text = (tmp_path / "plot.html").read_text(encoding="utf8")
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        assert "currentColor" in picture
        assert set(re.findall(r"#[0-9a-f]{6}", picture)) <= {"#8a9099", "#2f7fc1", "#d2552b"}


def test_a_page_without_measurements_still_lists_the_sizes(written: BatchSize, tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.html", {"generation": written}, title="Batch sizes")
    assert Page((tmp_path / "plot.html").read_text(encoding="utf8")).sentences == [
        "generation: 8 rows, as the file says"
    ]


def test_a_plot_without_measurements_is_refused(written: BatchSize, tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    with pytest.raises(DataError) as caught:
        write_plot(file, {"generation": written, "evaluation": replace(written, rows=1)}, title="Batch sizes")
    assert str(caught.value) == (
        f"{file}: no size was measured, so there is nothing to draw (generation is 8 rows, evaluation is 1 row); "
        "write batch_size: auto"
    )
    assert not file.exists()


@pytest.mark.parametrize(("name", "ending"), [("plot.pdf", "the ending '.pdf'"), ("plot", "no ending")])
def test_an_unknown_file_extension_is_refused(name: str, ending: str) -> None:
    with pytest.raises(DataError) as caught:
        check_plot(Path(name))
    assert str(caught.value) == f"{name} has {ending}; plots are written as .png, .svg or .html"


def test_missing_matplotlib_is_reported_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PartitaError) as caught:
        check_plot(Path("plot.png"))
    assert str(caught.value) == "plots are drawn with matplotlib, which is missing here; pip install 'partita[plot]'"


def test_a_file_that_cannot_be_written_is_reported(generation: BatchSize, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError) as caught:
        write_plot(tmp_path / "file" / "plot.svg", {"generation": generation}, title="")
    assert str(caught.value).startswith(f"{tmp_path / 'file' / 'plot.svg'} cannot be written: ")
    assert str(caught.value).endswith("; name another file with --plot")


def test_the_predicted_line_goes_through_all_points_and_ends_at_the_limit(generation: BatchSize) -> None:
    points = [point for point in memory_points(generation) if point[0].verdict == "fits"]
    rows, held = predicted_line(points, max_rows=1000, limit=1.3e9)
    line = dict(zip(rows, held, strict=True))
    assert [line[probe.rows] for probe, _ in points] == [taken for _, taken in points]
    assert line[40] == pytest.approx(91e6 + 36 * (1197e6 - 91e6) / 144)
    assert 155 < rows[-1] < 165
    assert 1.25e9 < held[-1] <= 1.3e9
    assert predicted_line(points, max_rows=150, limit=1.3e9)[0][-1] == 150
