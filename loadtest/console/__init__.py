"""Makes the picture of the README: `browser.py` starts the service and Debian's chromium, `picture.py` opens the console."""
