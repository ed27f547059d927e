"""Tests of the console: in a real browser against the real service, and of the build of its files."""
