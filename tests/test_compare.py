"""The table that sets models side by side."""

from io import StringIO

from rich.console import Console

from limbeck.compare import shown


def test_no_number_is_cut_on_a_narrow_screen():
    scores = {"rouge_l": 41.25, "bleu": 12.5, "exact_match": 100.0, "accuracy": 61.75, "perplexity": 1234.5}
    cost = {"parameters": 223_000_000, "gflops": 12.25, "latency_ms": 128.5, "speedup": 1.5}
    rows = [{"model": f"runs/{name}", "scores": {"dev": scores}, "agreement": {"dev": 100.0}, **cost} for name in "ab"]
    console = Console(width=80, record=True, file=StringIO())
    console.print(shown(rows), crop=False)
    cells = console.export_text().split()
    for value in ("41.25", "12.50", "100.00", "61.75", "1234.50", "12.25", "128.5", "1.50×", "100.0"):
        assert cells.count(value) == 2
