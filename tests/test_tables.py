"""Tables: what is shown is what was given, on any terminal and in a notebook."""

from dasllama_torch.tables import Table

TABLE = Table(
    "a [bold]caption", ("name", "figure"), [("x<y>", "1.5"), ("\x1b[31mred", "2")], frozenset({1}), ["a note"]
)


def test_text():
    text = TABLE.text()
    for part in ("a [bold]caption", "x<y>", "1.5", "a note", "\\x1b[31mred"):
        assert part in text
    assert "\x1b" not in text


def test_figures_keep_their_digits_where_names_are_long():
    long = Table("", ("name", "figure"), [("model." * 60, "0.123456789012345")])
    assert "0.123456789012345" in long.text()


def test_notebook():
    page = TABLE._repr_html_()
    assert "x&lt;y&gt;" in page
    assert "<p>a note</p>" in page
    assert page.count("<tr") == 3
    assert page.count("color") == 1
