"""What results show of themselves: one table, for the terminal (rich) and for a notebook (HTML)."""

import html
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table
    import rich.text

WIDTH = 120  # columns of a table that is printed as text


@dataclass(frozen=True)
class Table:
    """headings and rows of cells, all text; the first column is left-aligned, the others are figures. marked: indices
    of the rows that stand out. notes: lines below the table.
    """

    caption: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    marked: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)

    def rich(self) -> "rich.table.Table":
        """For a `rich.console.Console`."""
        from rich.table import Table as RichTable

        table = RichTable(title=_shown(self.caption), title_justify="left", caption_justify="left")
        for i, heading in enumerate(self.headings):
            # Where the terminal is narrow, names break over lines; figures must not lose digits.
            table.add_column(heading, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
        for i, row in enumerate(self.rows):
            table.add_row(*map(_shown, row), style="bold red" if i in self.marked else None)
        if self.notes:
            table.caption = _shown("\n".join(self.notes))
        return table

    def text(self) -> str:
        """As plain text of `WIDTH` columns."""
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self.rich())
        return out.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """For a notebook, without scripts or styles of its own but for alignment and the marked rows."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.headings)
        body = "".join(self._html_row(i, row) for i, row in enumerate(self.rows))
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = f"<caption>{html.escape(self.caption)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _html_row(self, i: int, row: tuple[str, ...]) -> str:
        style = ' style="font-weight: bold; color: #c00"' if i in self.marked else ""
        name, *figures = map(html.escape, row)
        cells = "".join(f'<td style="text-align: right">{cell}</td>' for cell in figures)
        return f'<tr{style}><td style="text-align: left">{name}</td>{cells}</tr>'


def _shown(text: str) -> "rich.text.Text":
    """Without markup, and with control characters escaped: names come from files, and may command a terminal."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text))
