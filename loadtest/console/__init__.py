"""Measures the service's console in Debian's chromium. `browser.py` starts service and browser, `figures.py` measures the figures of
docs/figures.md, `picture.py` makes the picture of the README."""
