import base64
import hashlib
import html.parser
import json
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from experiments.extraction import html_page, report, token_texts
from tests.experiments.extraction import fake_sweeps

EVIL = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u202e\u2028'\""
MEMBERS = {f"a{EVIL}": 100_000, "large": 5_000_000}


class Page(html.parser.HTMLParser):
    """The elements of a page, and the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.raw = []
        self.in_raw = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.in_raw = tag in ("script", "style")
        if self.in_raw:
            self.raw.append("")

    def handle_endtag(self, tag):
        self.in_raw = False

    def handle_data(self, data):
        if self.in_raw:
            self.raw[-1] += data

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    windows = fake_sweeps.make_windows(lengths=(100,), per_bucket=6)
    text = "".join(f"{EVIL} {i}\n" for i in range(50))
    sweep = fake_sweeps.write(folder / "sweep", windows, MEMBERS, text=text)
    return (report.report([sweep], str(folder / "out")) / "report.html").read_bytes()


@pytest.fixture(scope="module")
def page(written):
    return Page(written.decode())


def test_nothing_in_a_corpus_or_a_name_becomes_markup(written, page):
    assert written.isascii()
    assert len(page.named("img")) == 5
    assert len(page.named("script")) == 2
    assert not any(
        name.startswith("on") for _, attrs in page.elements for name in attrs
    )
    data = json.loads(page.raw[1])
    assert data["models"][0]["name"] == f"a{EVIL}"
    texts = [
        "".join(data["vocabulary"][str(i)] for i in ids)
        for ids in data["windows"].values()
    ]
    assert any(token_texts.visible(EVIL) in text for text in texts)


def test_the_page_needs_nothing_else(page):
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;")), tag
    assert not page.named("link")
    style, _, script = page.raw
    assert "url(" not in style
    assert "@import" not in style
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert way not in script
    for way in ("fetch", "XMLHttpRequest", "import(", "eval", "http"):
        assert way not in script


def test_the_policy_lets_this_script_run_and_no_other(page):
    (policy,) = (
        meta["content"]
        for meta in page.named("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    style, _, script = page.raw
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    assert policy == (
        "default-src 'none'; img-src data:; "
        f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'"
    )


def test_the_script_and_the_template_name_the_same_elements(page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    _, _, script = page.raw
    named = set(re.findall(r'(?:byId|getElementById)\("([\w-]+)"\)', script))
    assert len(named) > 10
    assert named <= set(ids)
    anchors = {a["href"][1:] for a in page.named("a")}
    assert anchors <= set(ids)


def test_people_without_sight_are_told(page):
    assert all(image["alt"] for image in page.named("img"))
    controls = [*page.named("input"), *page.named("select")]
    assert len(controls) == len(page.named("label")) == 11
    assert [table.get("role") for table in page.named("table")].count("grid") == 1
    assert page.named("html") == [{"lang": "en"}]


@hypothesis.given(st.recursive(st.text() | st.integers(), st.lists, max_leaves=9))
def test_embedded_json_is_the_data_and_no_markup(data):
    text = html_page.embedded_json(data)
    assert json.loads(text) == data
    assert "<" not in text
    assert text.isascii()


def test_embedded_json_has_no_numbers_that_are_not_json():
    with pytest.raises(ValueError, match="JSON"):
        html_page.embedded_json(float("nan"))
