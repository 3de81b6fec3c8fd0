"""Training scripts that ``benchmarks/reliability.py`` starts under ``gossamer launch``. Each prints ``RESULT`` and one line of JSON."""
