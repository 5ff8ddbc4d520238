"""Pages of experiments: numbers between two markers, words around them."""

from pathlib import Path

END = "<!-- end of numbers -->"


def write_numbers(page: Path, script: str, numbers: str) -> None:
    """Put what `script` (its file) found between the markers; the words around them stay."""
    start = f"<!-- numbers: written by scripts/{Path(script).name} -->"
    before, rest = page.read_text().split(start)
    page.write_text(f"{before}{start}\n\n{numbers}\n\n{END}{rest.split(END)[1]}")
